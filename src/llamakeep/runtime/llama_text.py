"""The tokens of a llama.cpp model, from text and to text."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import llama_cpp
import numpy as np

from llamakeep.errors import GrammarError, InvalidValue, KeeperClosed, ModelError
from llamakeep.gbnf import CheckedGrammar, check_grammar
from llamakeep.runtime.base import Vocab, utf8
from llamakeep.runtime.cuts import cut
from llamakeep.runtime.llama_load import load_model, model_params
from llamakeep.runtime.llama_tokens import GrammarTokens
from llamakeep.tokens import IntArray, TokensLike, as_tokens

_MAX_BYTES: Final = 2**31 - 1
_LONG_BYTES: Final = 1 << 15
_PIECE_BYTES: Final = 1 << 11
_CONTROL: Final = llama_cpp.LLAMA_TOKEN_ATTR_CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_UNKNOWN
"""What such tokens are read as is asked for with `parse_special`."""


class Vocabulary:
    """The tokens of a model. See `Vocab` for what the methods promise.

    Made by `LlamaCppRuntime.vocab`, whose model it borrows, or by `load_vocab`, with a model of its
    own. Any thread may use it: what llama.cpp knows of tokens never changes, and `close` waits for
    those who are reading.

    Args:
        model: The native model.
        free: Frees it, once nobody reads any more; None when it belongs to somebody else.
        is_open: Whether the model still lives, where somebody else may close it.

    Attributes:
        n_vocab: Tokens in it.
    """

    def __init__(
        self,
        model: Any,
        *,
        free: Callable[[], None] | None = None,
        is_open: Callable[[], bool] = lambda: True,
    ) -> None:
        self._model = model
        self._vocab = llama_cpp.llama_model_get_vocab(model)
        self._free = free
        self._is_open = is_open
        self._readers = 0
        self._closed = False
        self._idle = threading.Condition()
        self._pieces: dict[tuple[int, bool], bytes] = {}
        self._ends: frozenset[int] | None = None
        self._specials: list[tuple[bytes, int]] | None = None
        self._grammar_tokens: GrammarTokens | None = None
        self._metadata: dict[str, str] | None = None
        self._has_text = llama_cpp.llama_vocab_type(self._vocab) != llama_cpp.LLAMA_VOCAB_TYPE_NONE
        self.n_vocab = int(llama_cpp.llama_vocab_n_tokens(self._vocab))

    @contextmanager
    def reading(self) -> Iterator[Any]:
        """Keep the native vocabulary alive inside, which is the value."""
        with self._idle:
            self._check_open()
            self._readers += 1
        try:
            yield self._vocab
        finally:
            with self._idle:
                self._readers -= 1
                if not self._readers:
                    self._idle.notify_all()

    def _check_open(self) -> None:
        if self._closed or not self._is_open():
            raise KeeperClosed("the vocabulary is closed")

    def _check_text(self) -> None:
        """Raise where llama.cpp would end the process: a model may have tokens without text."""
        self._check_open()
        if not self._has_text:
            raise ModelError("the model's file has no tokenizer: tokens only, no text")

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> IntArray:
        """Return the tokens of `text`. See `Vocab.tokenize`. About 0.5 ms for 1,000 letters."""
        self._check_text()
        data = utf8(text)
        if len(data) > _MAX_BYTES:
            raise InvalidValue(f"a text of {len(data):,} bytes is too long for llama.cpp")
        if len(data) <= _LONG_BYTES:
            return self._tokens(data, add_special, parse_special)
        return self._in_pieces(data, add_special, parse_special)

    def _in_pieces(self, data: bytes, add_special: bool, parse_special: bool) -> IntArray:
        """Return what `_tokens` does, at a cost that follows the length; see `cuts`."""
        with self.reading() as vocab:
            around = [
                llama_cpp.llama_vocab_get_add_bos(vocab) and llama_cpp.llama_vocab_bos(vocab),
                llama_cpp.llama_vocab_get_add_eos(vocab) and llama_cpp.llama_vocab_eos(vocab),
            ]
        first, last = ([int(each)] if add_special and each is not False else [] for each in around)
        if self._tokens(b"", add_special, parse_special).tolist() != first + last:
            return self._tokens(data, add_special, parse_special)  # with others around it
        specials, strips = self._looked_for(parse_special)
        pieces = cut(data, specials, _PIECE_BYTES, strips=strips)
        found = [self._tokens(piece, False, parse_special) for piece in pieces]
        return as_tokens(np.concatenate([as_tokens(first), *found, as_tokens(last)]))

    def _looked_for(self, parse_special: bool) -> tuple[list[bytes], set[bytes]]:
        """Return texts that are looked for before all others, and which strip spaces before them.

        The first time, this asks about each token (0.1 s for 100,000).
        """
        if self._specials is None:
            attributes = llama_cpp.llama_vocab_get_attr
            with self.reading() as vocab:
                of_each = [(token, int(attributes(vocab, token))) for token in range(self.n_vocab)]
                self._specials = [
                    (bytes(llama_cpp.llama_vocab_get_text(vocab, token)), attribute)
                    for token, attribute in of_each
                    if attribute & (_CONTROL | llama_cpp.LLAMA_TOKEN_ATTR_USER_DEFINED)
                ]
        known = [
            (text, attribute)
            for text, attribute in self._specials
            if text and (parse_special or not attribute & _CONTROL)
        ]
        strip = llama_cpp.LLAMA_TOKEN_ATTR_LSTRIP
        return [text for text, _ in known], {text for text, each in known if each & strip}

    def _tokens(self, data: bytes, add_special: bool, parse_special: bool) -> IntArray:
        room = len(data) + 8
        with self.reading() as vocab:
            while True:
                tokens: IntArray = np.empty(room, np.int32)
                pointer = tokens.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token))
                options = (bool(add_special), bool(parse_special))
                n = int(llama_cpp.llama_tokenize(vocab, data, len(data), pointer, room, *options))
                if n >= 0:
                    found: IntArray = tokens[:n].copy()
                    return found
                if -n <= room:
                    raise InvalidValue(f"llama.cpp cannot tokenize a text of {len(data):,} bytes")
                room = -n

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Return what a token adds to a text, in UTF-8. See `Vocab.piece`."""
        self._check_text()
        piece = self._pieces.get((token, special))
        if piece is None:
            token = self._known(token)
            with self.reading() as vocab:
                piece = self._pieces[token, special] = _piece(vocab, token, special)
        return piece

    def text(self, tokens: TokensLike, *, special: bool = True) -> str:
        """Return the text of tokens. See `Vocab.text`."""
        self._check_text()
        array = as_tokens(tokens, n_vocab=self.n_vocab)  # for others, llama.cpp ends the process
        pointer = array.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token))
        size = 64 + 16 * array.size
        with self.reading() as vocab:
            while True:
                buffer = ctypes.create_string_buffer(size)
                n_bytes = int(
                    llama_cpp.llama_detokenize(
                        vocab, pointer, array.size, buffer, size, False, bool(special)
                    )
                )
                if n_bytes >= 0:
                    return buffer.raw[:n_bytes].decode("utf-8", "ignore")
                size = -n_bytes

    def is_end(self, token: int) -> bool:
        """Whether the model ends an answer with this token. See `Vocab.is_end`."""
        token = self._known(token)
        with self.reading() as vocab:
            return bool(llama_cpp.llama_vocab_is_eog(vocab, token))

    @property
    def ends(self) -> frozenset[int]:
        """All tokens that end an answer. The first time, this asks about each token (30 ms)."""
        self._check_open()
        if self._ends is None:
            with self.reading() as vocab:
                is_end = llama_cpp.llama_vocab_is_eog
                self._ends = frozenset(n for n in range(self.n_vocab) if is_end(vocab, n))
        return self._ends

    @property
    def grammar_tokens(self) -> GrammarTokens:
        """What grammars need of all tokens. The first time, this asks for each (150 ms)."""
        self._check_text()
        if self._grammar_tokens is None:
            with self.reading() as vocab:
                self._grammar_tokens = GrammarTokens(vocab, self.n_vocab)
        return self._grammar_tokens

    def check_grammar(self, grammar: str) -> None:
        """Raise for a grammar that cannot be followed. See `Vocab.check_grammar`."""
        found = check_grammar(grammar)
        named = self.named(found)
        known = self.grammar_tokens
        for token in found.tokens:
            number = named[token.text] if token.text else token.id
            if not token.negated and (why := known.never_named(number)):
                name = token.text or f"token {number}"
                raise GrammarError(
                    f"the grammar, {token.where}: {name} can never be sampled by its name: {why}",
                    where=token.where,
                )

    def named(self, grammar: CheckedGrammar) -> dict[str, int]:
        """Return the number of each token that a grammar names by its text.

        Raises:
            GrammarError: For what is no token of this vocabulary, with line and column.
        """
        named: dict[str, int] = {}
        for token in grammar.tokens:
            if token.text and token.text not in named:
                found = self.tokenize(token.text, add_special=False, parse_special=True)
                if found.size != 1:
                    raise GrammarError(
                        f"the grammar, {token.where}: {token.text} is {found.size} tokens, not one",
                        where=token.where,
                    )
                named[token.text] = int(found[0])
            elif not token.text and token.id >= self.n_vocab:
                raise GrammarError(
                    f"the grammar, {token.where}: token {token.id} is none of {self.n_vocab}",
                    where=token.where,
                )
        return named

    def _known(self, token: int) -> int:
        return int(as_tokens([token], n_vocab=self.n_vocab)[0])

    @property
    def bos(self) -> int | None:
        """The token at the begin of a text, if the model has one."""
        with self.reading() as vocab:
            return _token(llama_cpp.llama_vocab_bos(vocab))

    @property
    def eos(self) -> int | None:
        """The token at the end of a text, if the model has one."""
        with self.reading() as vocab:
            return _token(llama_cpp.llama_vocab_eos(vocab))

    @property
    def adds_bos(self) -> bool:
        """Whether `add_special` puts `bos` before the text."""
        with self.reading() as vocab:
            return bool(llama_cpp.llama_vocab_get_add_bos(vocab))

    @property
    def suppressed(self) -> tuple[int, ...]:
        """The tokens that the model's file wants never to be sampled."""
        with self.reading() as vocab:
            n = ctypes.c_int32(0)
            tokens = llama_cpp.llama_vocab_get_suppress_tokens(vocab, ctypes.byref(n))
            return tuple(int(tokens[index]) for index in range(n.value))

    @property
    def chat_template(self) -> str | None:
        """The Jinja template that the model's file has for chats, if any."""
        with self.reading():
            template = llama_cpp.llama_model_chat_template(self._model, None)
        return None if template is None else template.decode("utf-8", "replace")

    @property
    def metadata(self) -> dict[str, str]:
        """What the model's file says about itself, without its lists; a copy."""
        if self._metadata is None:
            with self.reading():
                self._metadata = _metadata(self._model)
        self._check_open()
        return dict(self._metadata)

    def close(self) -> None:
        """Wait for those who read, then free the model. Calling it again does nothing."""
        with self._idle:
            self._closed = True
            self._idle.wait_for(lambda: not self._readers)
            free, self._free = self._free, None
        if free is not None:
            free()

    def __enter__(self) -> Vocabulary:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _token(token: int) -> int | None:
    """Return a token; None for llama.cpp's "no token"."""
    return None if token < 0 else int(token)


def _piece(vocab: Any, token: int, special: bool) -> bytes:
    size = 32
    while True:
        buffer = ctypes.create_string_buffer(size)
        n = int(llama_cpp.llama_token_to_piece(vocab, token, buffer, size, 0, bool(special)))
        if n >= 0:
            return buffer.raw[:n]
        size = -n


def _metadata(model: Any) -> dict[str, str]:
    def read(function: Callable[..., int], index: int) -> str:
        size = 256
        while True:
            buffer = ctypes.create_string_buffer(size)
            n = int(function(model, index, buffer, size))
            if n < size:
                return buffer.raw[: max(0, n)].decode("utf-8", "replace")
            size = n + 1

    key, value = (
        llama_cpp.llama_model_meta_key_by_index,
        llama_cpp.llama_model_meta_val_str_by_index,
    )
    n_entries = int(llama_cpp.llama_model_meta_count(model))
    return {read(key, index): read(value, index) for index in range(n_entries)}


if TYPE_CHECKING:
    _is_a_vocab: type[Vocab] = Vocabulary


def load_vocab(path: str | Path) -> Vocabulary:
    """Load the vocabulary of a model file, and no weights.

    Raises:
        ModelError: With the path, when it cannot be loaded or has no vocabulary.
    """
    params = model_params()
    params.vocab_only = True
    model = load_model(path, params, what="the vocabulary of ")
    return Vocabulary(model, free=lambda: llama_cpp.llama_model_free(model))
