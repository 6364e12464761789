"""Reads a text that comes in pieces, as if all of it were there.

What reads is written as coroutines that wait where a piece ends: `yield from reader.peek()`. So
where pieces end cannot change what is read, and each letter is looked at a fixed number of times.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeAlias, TypeVar

T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]
"""A coroutine that is resumed when there is more to read."""

_SPACE = re.compile(r"[ \t\r\n]*")
_PLAIN = re.compile(r'[^"\\]*')
_FLAT = re.compile(r'[^"{}\[\]]*')
_HEX = frozenset("0123456789abcdefABCDEF")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", '"': '"', "\\": "\\", "/": "/"}
_SCALAR = re.compile(r"[^,:\"{}\[\] \t\r\n]*")


def drop(_: str) -> None:
    """Take a piece and do nothing."""


class Reader:
    """The text, up to where it has come, and how far it was read.

    Attributes:
        ended: Nothing more comes.
        was_cut: What `one_of` read last was cut off by the end.
    """

    def __init__(self) -> None:
        self.ended = False
        self.was_cut = False
        self._text = ""
        self._at = 0
        self._held: list[str] | None = None

    def push(self, text: str) -> None:
        """Add a piece. All before it must have been read."""
        assert self._at == len(self._text)
        self._text, self._at = text, 0

    # -- what may turn out to be something else ----------------------------------------------------
    def hold(self) -> None:
        """Remember what is read from here on, until `release`; goes on where it is held already."""
        if self._held is None:
            self._held = []

    def release(self) -> str:
        """Return what was read since `hold`, and remember no more."""
        held, self._held = self._held or [], None
        return "".join(held)

    # -- reading -----------------------------------------------------------------------------------
    def peek(self) -> Reading[str]:
        """Return the next letter, without reading it; "" at the end."""
        while self._at == len(self._text):
            if self.ended:
                return ""
            yield
        return self._text[self._at]

    def take(self, size: int = 1) -> str:
        """Read so many letters of the piece that is there."""
        piece = self._text[self._at : self._at + size]
        self._at += size
        if self._held is not None:
            self._held.append(piece)
        return piece

    def take_while(self, pattern: re.Pattern[str], emit: Callable[[str], None]) -> Reading[None]:
        """Read all letters that `pattern` has, handing them on in pieces."""
        while True:
            match = pattern.match(self._text, self._at)
            size = 0 if match is None else match.end() - self._at
            if size:
                emit(self.take(size))
            if self._at < len(self._text) or not (yield from self.peek()):
                return

    def space(self) -> Reading[None]:
        """Read white space."""
        yield from self.take_while(_SPACE, drop)

    def literal(self, text: str) -> Reading[bool]:
        """Read `text`; false, with nothing read, if it is not there."""
        return (yield from self.one_of((text,))) is not None

    def one_of(self, texts: Sequence[str], *, or_cut: bool = False) -> Reading[str | None]:
        """Read one of several texts, none of which begins with another.

        None, with nothing read, if none of them is there.

        Args:
            texts: What may be there.
            or_cut: One counts, too, whose beginning is all that comes before the end.
        """
        self.was_cut = False
        read = ""
        while True:
            letter = yield from self.peek()
            if or_cut and read and not letter:
                self.was_cut = True
                return texts[0]
            texts = [text for text in texts if letter and text.startswith(read + letter)]
            if not texts:
                self._unread(read)
                return None
            read += self.take()
            if read in texts:
                return read

    def _unread(self, read: str) -> None:
        """Take back what was read last, letter by letter."""
        if self._at >= len(read):
            self._at -= len(read)
        else:  # it began in a piece before: once for each piece
            self._text, self._at = read + self._text[self._at :], 0
        if self._held is not None and read:
            del self._held[-len(read) :]

    def until(self, ends: str, most: int, *, but: str = "") -> Reading[str | None]:
        """Read up to one of the letters in `ends`, which is not read.

        None if there is none of them within `most` letters, or one of those in `but` before.
        """
        read: list[str] = []
        while True:
            letter = yield from self.peek()
            if letter and letter in ends:
                return "".join(read)
            if not letter or letter in but or len(read) == most:
                return None
            read.append(self.take())

    def through(self, text: str, emit: Callable[[str], None]) -> Reading[bool]:
        """Read up to `text` and over it, handing on what comes before; false if it never comes.

        Its beginning, where the end cuts it off, is not handed on.

        Args:
            text: Its first letter occurs in it once.
            emit: Called with each piece.
        """
        others = re.compile(f"[^{re.escape(text[0])}]*")
        while True:
            yield from self.take_while(others, emit)
            read = ""
            while read != text:
                letter = yield from self.peek()
                if not letter or letter != text[len(read)]:
                    break
                read += self.take()
            if read == text:
                return True
            if not (yield from self.peek()):
                return False
            emit(read)

    # -- JSON --------------------------------------------------------------------------------------
    def value(self, emit: Callable[[str], None]) -> Reading[bool]:
        """Read a JSON value, handing on its text in pieces; false if there is none, or it is cut.

        Where a value ends is all that is looked at: brackets and strings, not what JSON allows
        between them. Nesting costs nothing.
        """
        first = yield from self.peek()
        if first == '"':
            return (yield from self.string(emit))
        if not first or first not in "{[":
            pieces: list[str] = []
            yield from self.take_while(_SCALAR, pieces.append)
            emit("".join(pieces))
            return bool(pieces) and bool((yield from self.peek()))
        depth = 0
        while True:
            yield from self.take_while(_FLAT, emit)
            letter = yield from self.peek()
            if not letter:
                return False
            if letter == '"':
                if not (yield from self.string(emit)):
                    return False
                continue
            emit(self.take())
            depth += 1 if letter in "{[" else -1
            if not depth:
                return True

    def string(self, emit: Callable[[str], None]) -> Reading[bool]:
        """Read a JSON string with its quotes, handing on its text in pieces; false if it is cut."""
        emit(self.take())
        while True:
            yield from self.take_while(_PLAIN, emit)
            letter = yield from self.peek()
            if not letter:
                return False
            if letter == '"':
                emit(self.take())
                return True
            escape = self.take()
            if not (yield from self.peek()):
                emit(escape)
                return False
            emit(escape + self.take())

    def text(self, emit: Callable[[str], None]) -> Reading[bool]:
        """Read a JSON string, handing on what it says in pieces; false if it is cut.

        Half of a surrogate pair becomes U+FFFD; an escape that JSON does not know stays.
        """
        self.take()
        while True:
            yield from self.take_while(_PLAIN, emit)
            letter = yield from self.peek()
            if not letter:
                return False
            self.take()
            if letter == '"':
                return True
            letter = yield from self.peek()
            if not letter:
                return False
            self.take()
            if letter != "u":
                emit(_ESCAPES.get(letter, "\\" + letter))
                continue
            code = yield from self._unit()
            while code is not None and 0xD800 <= code < 0xDC00:
                low = (yield from self._unit()) if (yield from self.literal("\\u")) else None
                if low is not None and 0xDC00 <= low < 0xE000:
                    code = 0x10000 + ((code - 0xD800) << 10) + low - 0xDC00
                else:
                    emit("\ufffd")
                    code = low
            if code is not None:
                emit("\ufffd" if 0xD800 <= code < 0xE000 else chr(code))

    def _unit(self) -> Reading[int | None]:
        """Read four hexadecimal digits; None, with those that are there read, for fewer."""
        digits = ""
        while len(digits) < 4 and (yield from self.peek()) in _HEX:
            digits += self.take()
        return int(digits, 16) if len(digits) == 4 else None
