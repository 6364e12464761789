"""What grammars need to know of a model's tokens: what each begins with, and which have no text."""

from __future__ import annotations

import ctypes
from typing import Any, Final

import llama_cpp
import numpy as np
import numpy.typing as npt

from llamakeep.runtime.unfinished import letters_of

N_BYTES: Final = 256
END: Final = N_BYTES
"""As first byte: the token ends an answer."""
NEVER: Final = N_BYTES + 1
"""As first byte: the token has no text, or one that no grammar matches."""

_TWO_BITS: Final = 0xC0
_GOES_ON: Final = 0x80
"""What the first two bits of a byte are that does not begin a letter."""


class GrammarTokens:
    """The tokens of a model, as grammars see them. Immutable; costs about 4 us per token.

    Args:
        vocab: The native vocabulary, alive while this is made.
        n_vocab: Tokens in it.

    Attributes:
        first: First byte of each token, special ones with their text, or `END` or `NEVER`.
        of_byte: For each byte a token that is just that byte; -1 where there is none.
        ends: The tokens that end an answer.
        hidden: The text of each other token that an answer's text leaves out.
        begins: Whether each token's text is UTF-8 where a letter begins; the last may go on.
        going_on: The tokens that can only go on with an unfinished letter, or be no UTF-8.
        is_short: Whether each token's text is one letter at most, or a part of one.
    """

    def __init__(self, vocab: Any, n_vocab: int) -> None:
        self.first = np.full(n_vocab, NEVER, np.int16)
        self.of_byte = np.full(N_BYTES, -1, np.int32)
        self.hidden: dict[int, str] = {}
        self.begins = np.zeros(n_vocab, bool)
        self.is_short = np.zeros(n_vocab, bool)
        going_on: list[int] = []
        self._parts: set[int] = set()
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
                self.begins[token] = True
                ends.append(token)
                continue
            piece = buffer.raw[:n]
            if not n or 0 in piece:  # it ends there for the grammar, but not for the answer
                continue
            self.first[token] = piece[0]
            read = letters_of(piece)
            self.begins[token] = read is not None
            if read is not None and not read[0]:
                self._parts.add(token)
            self.is_short[token] = sum(byte & _TWO_BITS != _GOES_ON for byte in piece) <= 1
            if piece[0] & _TWO_BITS == _GOES_ON:
                going_on.append(token)
                self.is_short[token] = all(byte & _TWO_BITS == _GOES_ON for byte in piece)
            if llama_cpp.llama_vocab_get_attr(vocab, token) & unseen:
                self.hidden[token] = piece.decode("utf-8", "replace")
            elif n == 1 and self.of_byte[piece[0]] < 0:
                self.of_byte[piece[0]] = token
        self.ends: npt.NDArray[np.int32] = np.array(ends, np.int32)
        self.going_on: npt.NDArray[np.int32] = np.array(going_on, np.int32)

    def never_named(self, token: int) -> str:
        """Return why llama.cpp samples a token nowhere that a grammar names it; "" if it does.

        It tests a named token only where a letter of it is complete.
        """
        if self.first[token] == END:
            return "it ends the answer"
        if self.first[token] == NEVER:
            return "it has no text"
        if not self.begins[token] or token in self._parts:
            return "it is a part of a letter"
        return ""
