"""GBNF, llama.cpp's notation of grammars: read, and found harmless before llama.cpp sees it.

llama.cpp writes what it cannot read to the standard error output, with the whole text, and some
grammars that it can read take all memory, overflow the stack, or keep it busy for hours. So each
one is read here first, by the same rules.

::

    parse (parsing.py) -> Grammar (rules.py) -> check_left (recursion.py), check_growth (growth.py)
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from llamakeep.errors import GrammarError
from llamakeep.gbnf.growth import check_growth
from llamakeep.gbnf.parsing import parse
from llamakeep.gbnf.recursion import check_left, ends
from llamakeep.gbnf.rules import Chars, Grammar, Token

__all__ = ["MOST_CHARS", "CheckedGrammar", "check_grammar"]

MOST_CHARS: Final = 1 << 18
"""Length of a grammar; reading so much takes up to a second."""
_KEPT_CHARS: Final = 1 << 22
"""Length of all grammars of which is kept what was found."""
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
    found = _known.get(text)
    if found is None:
        grammar = parse(text)
        check_left(grammar)
        check_growth(grammar)
        found = CheckedGrammar(
            text,
            "\0".join(sorted(grammar.literals)),
            grammar.tokens,
            _excludes_letters(grammar),
            ends(grammar),
        )
        _known.put(found)
    return found


def _excludes_letters(grammar: Grammar) -> bool:
    return any(
        isinstance(element, Chars)
        and element.negated
        and any(high > _ASCII for _, high in element.ranges)
        for alternatives in grammar.rules
        for elements in alternatives
        for element in elements
    )


class _Known:
    """Grammars that were checked, the last ones first to stay. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, CheckedGrammar] = OrderedDict()
        self._n_chars = 0

    def get(self, text: str) -> CheckedGrammar | None:
        with self._lock:
            found = self._kept.get(text)
            if found is not None:
                self._kept.move_to_end(text)
            return found

    def put(self, found: CheckedGrammar) -> None:
        with self._lock:
            if found.text in self._kept:
                return
            self._n_chars += len(found.text)
            while self._n_chars > _KEPT_CHARS:
                old, _ = self._kept.popitem(last=False)
                self._n_chars -= len(old)
            self._kept[found.text] = found


_known = _Known()
