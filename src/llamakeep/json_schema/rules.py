"""A grammar that is being made, and the rules of JSON."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

from llamakeep.errors import GrammarError
from llamakeep.gbnf import MOST_CHARS

Ranges: TypeAlias = "tuple[tuple[int, int], ...]"

LETTERS: Final[Ranges] = (
    (0x20, 0x21),
    (0x23, 0x5B),
    (0x5D, 0x7E),
    (0x80, 0xD7FF),
    (0xE000, 0x10FFFF),
)
"""Characters that stand for themselves in a JSON text."""
EVERYTHING: Final[Ranges] = ((0, 0xD7FF), (0xE000, 0x10FFFF))

_MOST_HINT: Final = 24
_INLINE: Final = 64
"""Up to so many repetitions of a character are left to llama.cpp."""
_NO_NAME = re.compile(r"[^a-zA-Z0-9]+")
_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t", '"': '\\"', "\\": "\\\\"}
# A special token that begins like this cannot be taken for a part of a text that is cut after it.
_CUTS = re.compile(r"(?<=[<\[])")

_JSON: Final = {
    "ws": '([ ] | "\\n" [ \\t]{0,24})?',
    "value": "object | array | string | number | boolean | null",
    "object": '"{" ws (pair ("," ws pair)* ws)? "}"',
    "pair": 'string ws ":" ws value',
    "array": '"[" ws (value ("," ws value)* ws)? "]"',
    "string": '"\\"" char* "\\""',
    "char": 'letter | "\\\\" (["\\\\/bfnrt] | "u" unicode)',
    "unicode": "[0-9a-cefA-CEF] hex{3} | [dD] [0-7] hex{2}",
    "hex": "[0-9a-fA-F]",
    "number": '"-"? whole ("." [0-9]{1,16})? ([eE] [-+]? [0-9]{1,2})?',
    "integer": '"-"? whole',
    "whole": '"0" | [1-9] [0-9]{0,15}',
    "boolean": '"true" | "false"',
    "null": '"null"',
}
_WORD = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]|([a-zA-Z][a-zA-Z0-9-]*)')


class Rules:
    """Collects rules; those with the same body are one. Of one thread."""

    def __init__(self) -> None:
        self._bodies: dict[str, str] = {}
        self._names: dict[str, str] = {}
        self._counts: dict[str, int] = {}
        self._n_chars = 0

    def json(self, name: str) -> str:
        """Return the name of one of JSON's own rules, such as `value`, `string` or `ws`."""
        if name not in self._bodies:
            body = _letter_class() if name == "letter" else _JSON[name]
            self._put(name, body)
            for match in _WORD.finditer(body):
                if match[1]:
                    self.json(match[1])
        return name

    def add(self, hint: str, body: str) -> str:
        """Return the name of a rule with this body.

        Args:
            hint: What its name begins with.
            body: In GBNF.
        """
        name = self._names.get(body)
        if name is None:
            name = self.reserve(hint)
            self.define(name, body)
            self._names[body] = name
        return name

    def reserve(self, hint: str) -> str:
        """Return a name that nothing else has, for a rule that refers to itself."""
        # With a number at its end, none of JSON's own names is taken.
        stem = _NO_NAME.sub("-", hint)[:_MOST_HINT].strip("-") or "rule"
        self._counts[stem] = number = self._counts.get(stem, 0) + 1
        return f"{stem}-{number}"

    def define(self, name: str, body: str) -> None:
        """Give a reserved name its body."""
        self._put(name, body)

    def _put(self, name: str, body: str) -> None:
        self._bodies[name] = body
        self._n_chars += len(name) + len(body) + 6
        if self._n_chars > MOST_CHARS:
            raise GrammarError(f"its grammar has more than {MOST_CHARS:,} characters")

    def text(self, root: str) -> str:
        """Return the grammar.

        Args:
            root: The body of the rule `root`.
        """
        lines = [f"root ::= {root}", *(f"{name} ::= {body}" for name, body in self._bodies.items())]
        return "\n".join(lines) + "\n"

    # -- parts that many schemas need --------------------------------------------------------------

    def exactly(self, item: str, n: int) -> str:
        """Return so many of a rule, one after the other."""
        if n <= _INLINE:
            return f"{item}{{{n}}}" if n else ""
        half = n // 2
        return self.add(item, f"{self.exactly(item, half)} {self.exactly(item, n - half)}")

    def up_to(self, item: str, n: int) -> str:
        """Return up to so many of a rule that leads to no rule that has this one inside."""
        if n <= _INLINE:
            return f"{item}{{0,{n}}}" if n else ""
        half = (n + 1) // 2
        more = f"{self.exactly(item, half)} {self.up_to(item, n - half)}"
        return self.add(item, f"{more} | {self.up_to(item, half - 1)}")

    def repeated(self, item: str, least: int, most: int | None) -> str:
        """Return between `least` and `most` of a rule; None for any number."""
        before = self.exactly(item, least)
        return f"{before} {item}*" if most is None else f"{before} {self.up_to(item, most - least)}"


def literal(text: str) -> str:
    """Return the body of a rule that matches just this text, and no special token in it."""
    if not text:
        return '""'
    return " ".join(f'"{_escaped(part)}"' for part in _CUTS.split(text) if part)


def char_class(ranges: Iterable[tuple[int, int]]) -> str:
    """Return the body of a rule that matches one of these characters."""
    parts = [
        _class_char(low) + (f"-{_class_char(high)}" if high > low else "") for low, high in ranges
    ]
    return f"[{''.join(parts)}]"


def without(ranges: Sequence[tuple[int, int]], gone: Iterable[tuple[int, int]]) -> Ranges:
    """Return ranges of characters without others."""
    left = sorted(ranges)
    for low, high in gone:
        kept = []
        for first, last in left:
            if last < low or first > high:
                kept.append((first, last))
                continue
            if first < low:
                kept.append((first, low - 1))
            if last > high:
                kept.append((high + 1, last))
        left = kept
    return tuple(left)


def _letter_class() -> str:
    return char_class(LETTERS)


def _escaped(text: str) -> str:
    return "".join(
        _ESCAPES.get(char) or (char if char >= " " and char != "\x7f" else f"\\x{ord(char):02x}")
        for char in text
    )


def _class_char(code: int) -> str:
    if 0x20 <= code < 0x7F and chr(code) not in '^-[]\\"':
        return chr(code)
    if code <= 0xFF:
        return f"\\x{code:02X}"
    return f"\\u{code:04X}" if code <= 0xFFFF else f"\\U{code:08X}"
