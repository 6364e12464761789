"""GBNF, llama.cpp's notation of grammars: read, and found harmless before llama.cpp sees it.

llama.cpp writes what it cannot read to the standard error output, with the whole text, and some
grammars that it can read take all memory, overflow the stack, or keep it busy for hours. So each
one is read here first, by the same rules.

::

    parse (parsing.py) -> Grammar (rules.py) -> check_left (recursion.py), check_growth (growth.py)
                                                then Follower (following.py), where it names tokens
    KeptGrammars (kept.py): what was found, or made of schemas, for the next time
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from llamakeep.errors import GrammarError
from llamakeep.gbnf.growth import check_growth
from llamakeep.gbnf.kept import KeptGrammars
from llamakeep.gbnf.parsing import parse
from llamakeep.gbnf.recursion import check_left, ends
from llamakeep.gbnf.rules import Chars, Grammar, Token

__all__ = ["MOST_CHARS", "CheckedGrammar", "KeptGrammars", "check_grammar"]

MOST_CHARS: Final = 1 << 18
"""Length of a grammar; reading so much takes up to a second."""
_KEPT_CHARS: Final = 1 << 22
"""Length of what is kept of grammars that were checked."""
_ASCII: Final = 0x7F


@dataclass(frozen=True, slots=True, eq=False)
class CheckedGrammar:
    """A grammar that llama.cpp can read and follow, and what matters of it afterwards.

    Attributes:
        text: The grammar.
        literals: Every text that stands in quotes, with NUL between them.
        tokens: Every token that is named.
        excludes_letters: Some class of characters is all but one beyond ASCII.
        ends: Some text matches; else an answer goes on to its limit.
    """

    text: str
    literals: str
    tokens: tuple[Token, ...]
    excludes_letters: bool
    ends: bool


def check_grammar(text: str) -> CheckedGrammar:
    """Return a grammar that llama.cpp can read and follow. Any thread; cheap the second time.

    Args:
        text: GBNF with a rule `root`.

    Raises:
        GrammarError: When it cannot be read, with line and column, or is too large, refers to
            itself on the left, or is so ambiguous that following it would take ever more memory.
    """
    if len(text) > MOST_CHARS:
        raise GrammarError(f"the grammar has {len(text):,} characters, at most {MOST_CHARS:,}")
    return _checked.get(text, lambda: _check(text))


def _check(text: str) -> CheckedGrammar:
    grammar = parse(text)
    check_growth(grammar, check_left(grammar))
    return CheckedGrammar(
        text,
        "\0".join(sorted(grammar.literals)),
        grammar.tokens,
        _excludes_letters(grammar),
        ends(grammar),
    )


def _excludes_letters(grammar: Grammar) -> bool:
    return any(
        isinstance(element, Chars)
        and element.negated
        and any(high > _ASCII for _, high in element.ranges)
        for alternatives in grammar.rules
        for elements in alternatives
        for element in elements
    )


_checked: KeptGrammars[CheckedGrammar] = KeptGrammars(
    _KEPT_CHARS, lambda found: len(found.literals)
)
