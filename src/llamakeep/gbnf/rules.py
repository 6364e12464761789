"""What a grammar is made of, as llama.cpp lays it out: repetitions are rules of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Chars:
    """One character.

    Attributes:
        ranges: First and last code point of each range.
        negated: Any character that is in none of them.
    """

    ranges: tuple[tuple[int, int], ...]
    negated: bool = False

    def matches(self, code: int) -> bool:
        """Whether a character is one of these."""
        return any(low <= code <= high for low, high in self.ranges) != self.negated


@dataclass(frozen=True, slots=True)
class Token:
    """One token of the model's.

    Attributes:
        text: Its text, with angle brackets around it; "" when it is named by its number.
        id: Its number, or -1.
        negated: Any other token.
        where: Line and column.
    """

    text: str
    id: int
    negated: bool
    where: str


@dataclass(frozen=True, slots=True)
class Ref:
    """Another rule.

    Attributes:
        rule: Its number.
    """

    rule: int


Element: TypeAlias = "Chars | Token | Ref"
Alternative: TypeAlias = tuple[Element, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Grammar:
    """A grammar that was read.

    Attributes:
        names: Of the rules; those of groups and repetitions have a number at the end.
        rules: The alternatives of each.
        root: The number of the rule to begin with.
        literals: Every text that stands in quotes.
        tokens: Every token that is named.
        n_elements: Size of all rules together.
    """

    names: tuple[str, ...]
    rules: tuple[tuple[Alternative, ...], ...]
    root: int
    literals: frozenset[str]
    tokens: tuple[Token, ...]
    n_elements: int
