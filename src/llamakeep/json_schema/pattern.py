"""Regular expressions of JSON schemas, as rules for what stands between a JSON text's quotes."""

from __future__ import annotations

import json
from string import hexdigits
from typing import Final, NoReturn

from llamakeep.errors import GrammarError
from llamakeep.gbnf.parsing import MOST_REPETITIONS
from llamakeep.json_schema.rules import (
    EVERYTHING,
    LETTERS,
    Ranges,
    Rules,
    char_class,
    literal,
    without,
)

_DIGIT: Final[Ranges] = ((0x30, 0x39),)
_WORD: Final[Ranges] = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
_SPACE: Final[Ranges] = (
    (0x09, 0x0D),
    (0x20, 0x20),
    (0xA0, 0xA0),
    (0x1680, 0x1680),
    (0x2000, 0x200A),
    (0x2028, 0x2029),
    (0x202F, 0x202F),
    (0x205F, 0x205F),
    (0x3000, 0x3000),
    (0xFEFF, 0xFEFF),
)
_NO_NEWLINE: Final = without(EVERYTHING, ((0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)))
_CLASSES: Final = {"d": _DIGIT, "w": _WORD, "s": _SPACE} | {
    "D": without(EVERYTHING, _DIGIT),
    "W": without(EVERYTHING, _WORD),
    "S": without(EVERYTHING, _SPACE),
}
_ESCAPES: Final = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v", "0": "\0"}
_HEX: Final = {"x": 2, "u": 4}
_MOST_DEPTH: Final = 100


def pattern_rule(rules: Rules, pattern: str) -> str:
    """Return a rule for the JSON texts in which an expression matches, without the quotes.

    Raises:
        GrammarError: For what is no expression, and for what no grammar can do: looking around,
            references back, the edges of words, and anchors within.
    """
    return _Reader(rules, pattern).read()


class _Reader:
    def __init__(self, rules: Rules, pattern: str) -> None:
        self._rules = rules
        self._text = pattern
        self._pos = 0

    def _fail(self, why: str) -> NoReturn:
        raise GrammarError(f"{why}, at character {self._pos + 1} of {self._text!r}")

    def _next(self, n: int = 1) -> str:
        return self._text[self._pos : self._pos + n]

    def read(self) -> str:
        anything = f"{self._rules.json('char')}*"
        found = []
        while True:
            begins = self._next() == "^"
            self._pos += begins
            body = self._sequence(0)
            ends = self._next() == "$"
            self._pos += ends
            parts = (anything if not begins else "", body, anything if not ends else "")
            found.append(" ".join(part for part in parts if part) or '""')
            if self._next() != "|":
                break
            self._pos += 1
        if self._pos < len(self._text):
            self._fail("expected an anchor at the end" if self._next() in "^$" else "unexpected )")
        return self._rules.add("pattern", " | ".join(found))

    def _sequence(self, depth: int) -> str:
        if depth > _MOST_DEPTH:
            self._fail("groups are nested too deeply")
        parts = []
        while self._pos < len(self._text) and self._next() not in "|)$":
            if self._next() == "^":
                self._fail("an anchor is supported at the begin and the end only")
            parts.append(self._repeated(self._item(depth)))
        return " ".join(part for part in parts if part)

    def _item(self, depth: int) -> str:
        char = self._next()
        self._pos += 1
        if char == "(":
            return self._group(depth)
        if char == "[":
            return self._one(self._class())
        if char == ".":
            return self._one(_NO_NEWLINE)
        if char == "\\":
            return self._one(self._escape(in_class=False))
        if char in "*+?{":
            self._pos -= 1
            self._fail("nothing is before it that could be repeated")
        return self._one(((ord(char), ord(char)),))

    def _group(self, depth: int) -> str:
        if self._next() == "?":
            if self._next(2) == "?:":
                self._pos += 2
            elif self._next(2) == "?<" and self._next(3)[2:] not in ("=", "!"):
                end = self._text.find(">", self._pos)
                if end < 0:
                    self._fail("a group's name has no end")
                self._pos = end + 1
            else:
                self._fail("looking around is not supported")
        parts = [self._sequence(depth + 1)]
        while self._next() == "|":
            self._pos += 1
            parts.append(self._sequence(depth + 1))
        if self._next() != ")":
            self._fail("an anchor within a group is not supported" if self._next() else "missing )")
        self._pos += 1
        return self._rules.add("group", " | ".join(part or '""' for part in parts))

    def _class(self) -> Ranges:
        begin = self._pos
        negated = self._next() == "^"
        self._pos += negated
        found: list[tuple[int, int]] = []
        while self._next() != "]":
            if not self._next():
                self._pos = begin
                self._fail("a class of characters has no end")
            low = self._class_item()
            if self._next() == "-" and self._next(2)[1:] not in ("", "]"):
                self._pos += 1
                high = self._class_item()
                if len(low) != 1 or len(high) != 1 or low[0][0] != low[0][1] > high[0][1]:
                    self._fail("a range of characters has no begin or end")
                low = ((low[0][0], high[0][1]),)
                if low[0][0] > low[0][1]:
                    self._fail("a range of characters ends before it begins")
            found += low
        self._pos += 1
        return without(EVERYTHING, found) if negated else tuple(found)

    def _class_item(self) -> Ranges:
        char = self._next()
        self._pos += 1
        return self._escape(in_class=True) if char == "\\" else ((ord(char), ord(char)),)

    def _escape(self, *, in_class: bool) -> Ranges:
        char = self._next()
        if not char:
            self._fail("it ends with \\")
        self._pos += 1
        if char in _CLASSES:
            return _CLASSES[char]
        if char in _HEX:
            digits = self._next(_HEX[char])
            if len(digits) < _HEX[char] or set(digits) - set(hexdigits):
                self._fail(f"\\{char} needs {_HEX[char]} hexadecimal digits")
            self._pos += len(digits)
            return ((int(digits, 16), int(digits, 16)),)
        if char in _ESCAPES:
            code = ord(_ESCAPES[char])
        elif char == "b" and in_class:
            code = 0x08
        elif char.isalnum():
            self._fail(f"\\{char} is not supported")
        else:
            code = ord(char)
        return ((code, code),)

    def _one(self, ranges: Ranges) -> str:
        """Return a rule for one of these characters, as JSON writes it."""
        merged = without(EVERYTHING, without(EVERYTHING, ranges))
        outside = without(merged, LETTERS)
        plain = without(merged, outside)
        parts = [char_class(plain)] if plain else []
        for low, high in outside:
            parts += [_escaped(code) for code in range(low, high + 1)]
        if not parts:
            self._fail("no character can stand here")
        return self._rules.add("one", " | ".join(parts))

    def _repeated(self, item: str) -> str:
        while (char := self._next()) and char in "*+?{":
            if char == "{":
                low, high = self._times()
            else:
                low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
                self._pos += 1
            if self._next() == "?":  # as few as possible: the same texts
                self._pos += 1
            elif self._next() == "+":
                self._fail("possessive repetitions are not supported")
            body = self._rules.repeated(item, low, high)
            item = self._rules.add("times", body.strip() or '""')
        return item

    def _times(self) -> tuple[int, int | None]:
        end = self._text.find("}", self._pos)
        parts = self._text[self._pos + 1 : end].split(",") if end >= 0 else []
        numbers = [int(part) if part.isdecimal() and len(part) < 9 else None for part in parts]
        if not 1 <= len(parts) <= 2 or numbers[0] is None or (parts[-1] and numbers[-1] is None):
            self._fail("expected a repetition like {2}, {2,} or {2,5}")
        low, high = numbers[0], numbers[-1]
        if low > MOST_REPETITIONS or (high or 0) > MOST_REPETITIONS:
            self._fail(f"more than {MOST_REPETITIONS} repetitions")
        if high is not None and high < low:
            self._fail("the repetition ends before it begins")
        self._pos = end + 1
        return low, high


def _escaped(code: int) -> str:
    """Return a rule for a character that does not stand for itself in JSON."""
    return literal(json.dumps(chr(code))[1:-1])
