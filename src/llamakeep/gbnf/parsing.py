"""Reads GBNF. Follows llama.cpp's parser, and refuses what that would take for something else."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final, NoReturn

from llamakeep.errors import GrammarError
from llamakeep.gbnf.rules import Alternative, Chars, Element, Grammar, Ref, Token

ROOT: Final = "root"
MOST_REPETITIONS: Final = 2000
"""llama.cpp's own limit. It takes a larger maximum for none at all, which nobody means."""
MOST_DEPTH: Final = 128
"""Of groups: llama.cpp's parser calls itself for each."""
MOST_ELEMENTS: Final = 1 << 17
"""Of all rules together; llama.cpp needs about 1 us and 20 bytes for each."""

_NAME = re.compile(r"[a-zA-Z0-9-]+")
_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_PLAIN = re.compile(r'[^"\\]+')
_DIGITS = re.compile(r"[0-9]+")
_TIMES = re.compile(r"\{\s*([0-9]+)\s*(?:(,)\s*([0-9]*)\s*)?\}")
_TOKEN = re.compile(r"<(?:\[([0-9]{1,9})\]|[^>\n]+)>")
_HEX = {"x": 2, "u": 4, "U": 8}
_ESCAPES = {"t": "\t", "r": "\r", "n": "\n"} | {char: char for char in '\\"[]-'}
_HEX_DIGITS = re.compile(r"[0-9a-fA-F]+")
_MOST_CODE: Final = 0x10FFFF


def parse(text: str) -> Grammar:
    """Return the rules of a grammar.

    Raises:
        GrammarError: With line and column.
    """
    return _Parser(text).grammar()


@dataclass(slots=True)
class _Item:
    """What a repetition sign would repeat.

    Attributes:
        elements: One, or the characters of a text.
        n_rules: How many rules llama.cpp counts for it.
    """

    elements: list[Element]
    n_rules: int = 1


@dataclass(slots=True)
class _Parser:
    text: str
    pos: int = 0
    names: list[str] = field(default_factory=list)
    ids: dict[str, int] = field(default_factory=dict)
    first_use: dict[int, int] = field(default_factory=dict)
    rules: dict[int, tuple[Alternative, ...]] = field(default_factory=dict)
    literals: set[str] = field(default_factory=set)
    tokens: list[Token] = field(default_factory=list)
    n_elements: int = 0

    # -- where things are --------------------------------------------------------------------------

    def fail(self, message: str, pos: int | None = None) -> NoReturn:
        where = self.where(self.pos if pos is None else pos)
        raise GrammarError(f"the grammar, {where}: {message}", where=where)

    def where(self, pos: int) -> str:
        line = self.text.count("\n", 0, pos) + 1
        column = pos - (self.text.rfind("\n", 0, pos) + 1) + 1
        return f"line {line}, column {column}"

    def next(self) -> str:
        return self.text[self.pos : self.pos + 1]

    def skip(self, newlines: bool) -> None:
        match = (_SPACES if newlines else _SPACE).match(self.text, self.pos)
        assert match is not None, "it matches nothing, too"
        self.pos = match.end()

    # -- rules -------------------------------------------------------------------------------------

    def grammar(self) -> Grammar:
        for char, name in (("\0", "NUL"), ("\ufeff", "a byte order mark")):
            if char in self.text:
                self.fail(f"{name} cannot be in a grammar", self.text.index(char))
        self._check_unicode()
        self.skip(True)
        while self.pos < len(self.text):
            self.rule()
        for rule, pos in self.first_use.items():
            if rule not in self.rules:
                self.fail(f"there is no rule {self.names[rule]!r}", pos)
        if ROOT not in self.ids:
            raise GrammarError(f"the grammar has no rule {ROOT!r}")
        return Grammar(
            names=tuple(self.names),
            rules=tuple(self.rules[rule] for rule in range(len(self.names))),
            root=self.ids[ROOT],
            literals=frozenset(self.literals),
            tokens=tuple(self.tokens),
            n_elements=self.n_elements,
        )

    def _check_unicode(self) -> None:
        try:
            self.text.encode()
        except UnicodeEncodeError as error:
            self.fail("half of a surrogate pair", error.start)

    def rule(self) -> None:
        begin = self.pos
        name = self.name()
        self.skip(False)
        if not self.text.startswith("::=", self.pos):
            self.fail(f"expected ::= after the name {name!r}")
        self.pos += 3
        self.skip(True)
        rule = self.id_of(name)
        if rule in self.rules:
            self.fail(f"the rule {name!r} is there twice", begin)
        self.rules[rule] = self.alternatives(name, 0)
        if self.pos < len(self.text) and self.next() not in "\r\n":
            self.fail("expected a new line or the end")
        self.skip(True)

    def name(self) -> str:
        match = _NAME.match(self.text, self.pos)
        if match is None:
            self.fail("expected a rule's name, of letters, digits and -")
        self.pos = match.end()
        return match[0]

    def id_of(self, name: str) -> int:
        if name not in self.ids:
            self.ids[name] = len(self.names)
            self.names.append(name)
        return self.ids[name]

    def new_rule(self, name: str) -> int:
        """Return the number of a rule that no name can mean."""
        return self.id_of(f"{name}_{len(self.names)}")

    def counted(self, n_elements: int) -> None:
        self.n_elements += n_elements
        if self.n_elements > MOST_ELEMENTS:
            self.fail(f"the grammar is too large here: more than {MOST_ELEMENTS:,} elements")

    def alternatives(self, name: str, depth: int) -> tuple[Alternative, ...]:
        if depth > MOST_DEPTH:
            self.fail(f"groups are nested deeper than {MOST_DEPTH}")
        found = [self.sequence(name, depth)]
        while self.next() == "|":
            self.pos += 1
            self.skip(True)
            found.append(self.sequence(name, depth))
        return tuple(found)

    def sequence(self, name: str, depth: int) -> Alternative:
        done: list[Element] = []
        last = _Item([])
        while self.pos < len(self.text):
            char = self.next()
            if char in "*+?{":
                last = self.repeated(name, last)
            else:
                item = self.item(name, depth)
                if item is None:
                    break
                done += last.elements
                last = item
            self.skip(depth > 0)
        self.counted(1)
        return (*done, *last.elements)

    # -- what stands in a rule ---------------------------------------------------------------------

    def item(self, name: str, depth: int) -> _Item | None:
        """Read one item; None where none begins."""
        char = self.next()
        if char == '"':
            return self.literal()
        if char == "[":
            return self.char_class()
        if char in "<!":
            return self.token()
        if char == "(":
            return self.group(name, depth)
        if char == ".":
            self.pos += 1
            self.counted(1)
            return _Item([Chars(((0, _MOST_CODE),))])
        if _NAME.match(char):
            begin = self.pos
            rule = self.id_of(self.name())
            self.first_use.setdefault(rule, begin)
            self.counted(1)
            return _Item([Ref(rule)])
        return None

    def literal(self) -> _Item:
        begin = self.pos
        self.pos += 1
        codes: list[int] = []
        while self.next() != '"':
            if plain := _PLAIN.match(self.text, self.pos):
                codes += map(ord, plain[0])
                self.pos = plain.end()
            elif self.next():
                codes.append(self.char())
            else:
                self.fail("the text has no end", begin)
        self.pos += 1
        self.counted(len(codes))
        self.literals.add("".join(map(chr, codes)))
        return _Item([Chars(((code, code),)) for code in codes])

    def char_class(self) -> _Item:
        begin = self.pos
        self.pos += 1
        negated = self.next() == "^"
        self.pos += negated
        ranges: list[tuple[int, int]] = []
        while self.next() != "]":
            if not self.next():
                self.fail("the class of characters has no end", begin)
            low = high = self.char()
            if self.next() == "-" and self.text[self.pos + 1 : self.pos + 2] != "]":
                self.pos += 1
                high = self.char()
                if high < low:
                    self.fail("the range of characters ends before it begins")
            ranges.append((low, high))
        if not ranges:
            self.fail("the class has no characters", begin)
        self.pos += 1
        self.counted(2 * len(ranges))
        return _Item([Chars(tuple(ranges), negated)])

    def char(self) -> int:
        char = self.next()
        if not char:
            self.fail("the grammar ends too early")
        self.pos += 1
        if char != "\\":
            return ord(char)
        escape = self.next()
        self.pos += 1
        if escape in _HEX:
            digits = self.text[self.pos : self.pos + _HEX[escape]]
            if len(digits) < _HEX[escape] or not _HEX_DIGITS.fullmatch(digits):
                self.fail(f"\\{escape} needs {_HEX[escape]} hexadecimal digits")
            self.pos += len(digits)
            if int(digits, 16) > _MOST_CODE:
                self.fail(f"there is no character {digits}", self.pos - len(digits))
            return int(digits, 16)
        if escape not in _ESCAPES or not escape:
            self.fail(f"\\{escape} means nothing", self.pos - 2)
        return ord(_ESCAPES[escape])

    def token(self) -> _Item:
        where = self.where(self.pos)
        negated = self.next() == "!"
        self.pos += negated
        match = _TOKEN.match(self.text, self.pos)
        if match is None:
            self.fail("expected a token like <think> or <[1000]>")
        self.pos = match.end()
        number = match[1]
        token = Token("" if number else match[0], int(number) if number else -1, negated, where)
        self.tokens.append(token)
        self.counted(1)
        return _Item([token])

    def group(self, name: str, depth: int) -> _Item:
        begin = self.pos
        self.pos += 1
        self.skip(True)
        n_before = len(self.names)
        rule = self.new_rule(name)
        self.rules[rule] = self.alternatives(name, depth + 1)
        if self.next() != ")":
            self.fail("expected )" if self.next() else "the group has no end", begin)
        self.pos += 1
        self.counted(1)
        return _Item([Ref(rule)], max(1, len(self.names) - n_before))

    # -- repetitions -------------------------------------------------------------------------------

    def times(self) -> tuple[int, int | None]:
        """Read a repetition sign; return how often at least and at most."""
        char = self.next()
        if char != "{":
            self.pos += 1
            return {"*": (0, None), "+": (1, None), "?": (0, 1)}[char]
        match = _TIMES.match(self.text, self.pos)
        if match is None:
            self.fail("expected a repetition like {2}, {2,} or {2,5}")
        least, comma, most = match.groups()
        numbers = [int(digits[:9]) for digits in (least, most) if digits]
        if max(numbers) > MOST_REPETITIONS:
            self.fail(f"more than {MOST_REPETITIONS} repetitions")
        low = numbers[0]
        high = low if not comma else numbers[1] if most else None
        if high is not None and high < low:
            self.fail(f"at least {low} and at most {high} repetitions")
        self.pos = match.end()
        return low, high

    def repeated(self, name: str, item: _Item) -> _Item:
        """Lay out a repetition as llama.cpp does: what must come, then a rule for what may."""
        begin = self.pos
        if not item.elements:
            self.fail("nothing is before it that could be repeated")
        low, high = self.times()
        n_rules = item.n_rules * max(1, low if high is None else high)
        if n_rules > MOST_REPETITIONS:
            self.fail(f"repetitions within one another make {n_rules:,} rules", begin)
        size = len(item.elements)
        n_optional = 1 if high is None else high - low
        self.counted(size * max(0, low - 1) + n_optional * (size + 3))
        elements = item.elements * low
        rest: int | None = None
        for _ in range(n_optional):
            rule = self.new_rule(name)
            after = rule if high is None else rest
            tail: list[Element] = [] if after is None else [Ref(after)]
            self.rules[rule] = ((*item.elements, *tail), ())
            rest = rule
        if rest is not None:
            elements = [*elements, Ref(rest)]
        return _Item(elements, n_rules)
