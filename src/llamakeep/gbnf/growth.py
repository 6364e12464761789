"""Refuses grammars that can be followed in ever more ways at once.

llama.cpp keeps a stack for each way in which a text so far can have come about, and to test a
token it follows each stack by itself, letter by letter. Some grammars double the number of ways
with each letter. Whether one does is tried here: of all letters that can come next, those are
followed which leave the most ways. That finds what grows by itself; it is no proof for a grammar
that was made to hide it.
"""

from __future__ import annotations

from collections import Counter
from typing import Final, TypeAlias

from llamakeep.errors import GrammarError
from llamakeep.gbnf.rules import Chars, Grammar, Ref, Token

MOST_WAYS: Final = 4096
_LETTERS: Final = 24
"""How far a text is followed; few tokens are longer."""
_TRIED: Final = 3
"""Letters that are tried at each place."""
_WORK: Final = 100_000
"""Steps at most, of about 1 us: what takes longer is not followed further."""

# Where the rest of a text is matched: a rule, an alternative, an element of it, and what comes
# after, or None.
Stack: TypeAlias = "tuple[int, int, int, Stack | None]"
Ways: TypeAlias = "Counter[Stack | None]"


def check_growth(grammar: Grammar) -> None:
    """Raise for a grammar that can be followed in too many ways at once.

    Raises:
        GrammarError: With a text after which it can.
    """
    _Walk(grammar).run()


class _Walk:
    def __init__(self, grammar: Grammar) -> None:
        self._rules = grammar.rules
        self._root = grammar.root
        self._work = 0
        self._text = ""

    def run(self) -> None:
        root = self._root
        begin: Ways = Counter(
            (root, index, 0, None) if elements else None
            for index, elements in enumerate(self._rules[root])
        )
        ways = self._advance(begin)
        for _ in range(_LETTERS):
            tried = [(self._after(ways, code), code) for code in self._letters(ways)]
            if not tried or self._work > _WORK:
                return
            ways, code = max(tried, key=lambda item: item[0].total())
            self._text += chr(code)

    def _letters(self, ways: Ways) -> list[int]:
        """Return the letters that fit most of the stacks."""
        heads: Counter[Chars] = Counter()
        for stack, n_ways in ways.items():
            if stack is not None and isinstance(element := self._top(stack), Chars):
                heads[element] += n_ways
        codes: Counter[int] = Counter()
        for code in {_letter(chars) for chars in heads}:
            codes[code] = sum(n for chars, n in heads.items() if chars.matches(code))
        return [code for code, _ in codes.most_common(_TRIED)]

    def _top(self, stack: Stack) -> Chars | Token | Ref:
        rule, alternative, index, _ = stack
        return self._rules[rule][alternative][index]

    def _after(self, ways: Ways, code: int) -> Ways:
        """Return the stacks after a letter."""
        matching: Ways = Counter()
        for stack, n_ways in ways.items():
            if stack is None:
                continue
            element = self._top(stack)
            if isinstance(element, Chars) and element.matches(code):
                matching[self._next(stack)] += n_ways
        return self._advance(matching)

    def _next(self, stack: Stack) -> Stack | None:
        """Return the stack without its top."""
        rule, alternative, index, after = stack
        if index + 1 < len(self._rules[rule][alternative]):
            return (rule, alternative, index + 1, after)
        return after

    def _advance(self, ways: Ways) -> Ways:
        """Return the stacks with a letter or a token on top that these lead to."""
        found: Ways = Counter()
        total = 0
        for stack, n_ways in ways.items():
            for following in self._leads_to(stack):
                found[following] += n_ways
                total += n_ways
                if total > MOST_WAYS:
                    self._fail()
        return found

    def _leads_to(self, begin: Stack | None) -> list[Stack | None]:
        found, todo, seen = [], [begin], {begin}
        while todo:
            self._work += 1
            stack = todo.pop()
            element = None if stack is None else self._top(stack)
            if stack is None or not isinstance(element, Ref):
                found.append(stack)
                if len(found) > MOST_WAYS:
                    self._fail()
                continue
            after = self._next(stack)
            for index, elements in enumerate(self._rules[element.rule]):
                following = (element.rule, index, 0, after) if elements else after
                if following not in seen:
                    seen.add(following)
                    todo.append(following)
        return found

    def _fail(self) -> None:
        text = f"after {self._text!r}" if self._text else "at its begin"
        raise GrammarError(
            f"the grammar is too ambiguous: {text} it can go on in more than {MOST_WAYS:,} ways"
        )


def _letter(chars: Chars) -> int:
    """Return a letter that these are."""
    if not chars.negated:
        return chars.ranges[0][0]
    code = ord("a")
    while not chars.matches(code):
        code = 1 + max(high for low, high in chars.ranges if low <= code <= high)
    return code
