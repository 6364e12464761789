"""Refuses grammars that can be followed in ever more ways at once.

llama.cpp keeps a stack for each way in which a text so far can have come about, each once. Some
grammars double their number with each letter. To test a token it follows each stack by itself,
letter by letter, and forgets which ways it has been before; tokens of many letters, such as runs of
blanks, then take as long as there are ways through them.

Both are tried here, from a grammar's begin and from each rule that contains itself: of all letters
that can come next, those are followed which leave the most. That finds what grows by itself; it is
no proof for a grammar that was made to hide it.
"""

from __future__ import annotations

from collections import Counter
from typing import Final, TypeAlias

from llamakeep.errors import GrammarError
from llamakeep.gbnf.recursion import growing_rules
from llamakeep.gbnf.rules import Chars, Grammar, Ref, Token

MOST_WAYS: Final = 4096
_LETTERS: Final = 24
"""How far a text is followed."""
_RUN: Final = 16
"""How often the same letter comes in a row; few tokens are longer."""
_TRIED: Final = 3
"""Letters that are tried at each place."""
_SURE: Final = 4
"""If up to here no letter could be matched in two ways from a rule, other rules have to answer."""
_CODES: Final = 64
"""Letters that are looked at, at each place."""
_WORK: Final = 50_000
"""Steps from one rule at most, of about 1 us: what takes longer is not followed further."""
_ALL_WORK: Final = 200_000
"""Steps from all of them."""

# Where the rest of a text is matched: a rule, an alternative, an element of it, and what comes
# after, or None.
Stack: TypeAlias = "tuple[int, int, int, Stack | None]"
Ways: TypeAlias = "Counter[Stack | None]"


def check_growth(grammar: Grammar) -> None:
    """Raise for a grammar that can be followed in too many ways at once.

    Raises:
        GrammarError: With a text after which it can.
    """
    work = 0
    inside = sorted(growing_rules(grammar))
    known: dict[Stack | None, list[Stack | None]] = {}
    for rule in dict.fromkeys([grammar.root, *inside]):
        walk = _Walk(grammar, rule, known)
        walk.run()
        work += walk.work
        if work > _ALL_WORK:
            raise GrammarError(
                f"{len(inside):,} of the grammar's rules contain themselves: too many to be checked"
            )


class _Walk:
    def __init__(
        self, grammar: Grammar, begin: int, known: dict[Stack | None, list[Stack | None]]
    ) -> None:
        self._known = known
        self._rules = grammar.rules
        self._begin = begin
        name = grammar.names[begin].partition("_")[0]
        self._where = "" if begin == grammar.root else f" from {name!r} on"
        self._is_inner = begin != grammar.root
        self._has_choice = False
        self._text = ""
        self.work = 0

    def run(self) -> None:
        begin = self._begin
        ways: Ways = Counter(
            (begin, index, 0, None) if elements else None
            for index, elements in enumerate(self._rules[begin])
        )
        ways = self._advance(ways)
        for n_letters in range(_LETTERS):
            tried = [(self._after(_once(ways), code), code) for code in self._letters(ways)]
            if not tried or self.work > _WORK:
                return
            if n_letters == _SURE and not self._has_choice and self._is_inner:
                return
            ways, code = max(tried, key=lambda item: len(item[0]))
            self._text += chr(code)
            self._run_of(ways, code)

    def _run_of(self, ways: Ways, code: int) -> None:
        """Follow a run of one letter, and count each way through it."""
        text = self._text
        ways = _once(ways)
        for _ in range(_RUN):
            ways = self._after(ways, code)
            if not ways or self.work > _WORK:
                break
            self._text += chr(code)
        self._text = text

    def _letters(self, ways: Ways) -> list[int]:
        """Return the letters that fit most of the stacks."""
        heads: Counter[Chars] = Counter()
        for stack in ways:
            if stack is not None and isinstance(element := self._top(stack), Chars):
                heads[element] += 1
        codes: Counter[int] = Counter()
        some = {code for chars in heads for code in _letters(chars)}
        for code in sorted(some)[:_CODES]:
            codes[code] = sum(n for chars, n in heads.items() if chars.matches(code))
            self._has_choice |= codes[code] > 1
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
        found = self._known.get(begin)
        self.work += 1
        if found is not None:
            return found
        found, todo, seen = [], [begin], {begin}
        while todo:
            self.work += 1
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
        self._known[begin] = found
        return found

    def _fail(self) -> None:
        text = f"after {self._text!r}" if self._text else "at its begin"
        raise GrammarError(
            f"the grammar is too ambiguous{self._where}: {text} it can go on in more than "
            f"{MOST_WAYS:,} ways"
        )


def _once(ways: Ways) -> Ways:
    """Return stacks that are each led to in one way."""
    return Counter(ways.keys())


def _letters(chars: Chars) -> list[int]:
    """Return letters that these are: where two classes overlap, it is one of theirs."""
    if not chars.negated:
        return [low for low, _ in chars.ranges]
    after = [ord("a"), *(high + 1 for _, high in chars.ranges)]
    return [code for code in after if chars.matches(code)]
