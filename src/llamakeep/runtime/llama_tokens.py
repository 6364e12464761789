"""What grammars need to know of a model's tokens: what each begins with, and which have no text."""

from __future__ import annotations

import ctypes
from typing import Any, Final

import llama_cpp
import numpy as np
import numpy.typing as npt

N_BYTES: Final = 256
END: Final = N_BYTES
"""As first byte: the token ends an answer."""
NEVER: Final = N_BYTES + 1
"""As first byte: the token has no text, or one that no grammar matches."""


class GrammarTokens:
    """The tokens of a model, as grammars see them. Immutable; costs about 3 us per token.

    Args:
        vocab: The native vocabulary, alive while this is made.
        n_vocab: Tokens in it.

    Attributes:
        first: First byte of each token, special ones with their text, or `END` or `NEVER`.
        of_byte: For each byte a token that is just that byte; -1 where there is none.
        ends: The tokens that end an answer.
        hidden: The text of each other token that an answer's text leaves out.
    """

    def __init__(self, vocab: Any, n_vocab: int) -> None:
        self.first = np.full(n_vocab, NEVER, np.int16)
        self.of_byte = np.full(N_BYTES, -1, np.int32)
        self.hidden: dict[int, str] = {}
        ends: list[int] = []
        unseen = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN
        size = 64
        buffer = ctypes.create_string_buffer(size)
        for token in range(n_vocab):
            n = int(llama_cpp.llama_token_to_piece(vocab, token, buffer, size, 0, True))
            if n < 0:
                size = -n
                buffer = ctypes.create_string_buffer(size)
                n = int(llama_cpp.llama_token_to_piece(vocab, token, buffer, size, 0, True))
            if llama_cpp.llama_vocab_is_eog(vocab, token):
                self.first[token] = END
                ends.append(token)
                continue
            if not n or buffer.raw[0] == 0:
                continue
            self.first[token] = buffer.raw[0]
            if llama_cpp.llama_vocab_get_attr(vocab, token) & unseen:
                self.hidden[token] = buffer.raw[:n].decode("utf-8", "replace")
            elif n == 1 and self.of_byte[buffer.raw[0]] < 0:
                self.of_byte[buffer.raw[0]] = token
        self.ends: npt.NDArray[np.int32] = np.array(ends, np.int32)
