"""Refuses grammars that can be followed in ever more ways at once.

llama.cpp keeps a stack for each way in which a text so far can have come about. Some grammars
double their number with each letter. Whether one does is tried here: of all letters that can come
next, those are followed which leave the most stacks. That finds what grows by itself; it is no
proof for a grammar that was made to hide it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final, TypeAlias

from llamakeep.errors import GrammarError
from llamakeep.gbnf.rules import Chars, Grammar, Ref, Token

MOST_STACKS: Final = 1024
_LETTERS: Final = 32
"""How far a text is followed."""
_TRIED: Final = 3
"""Letters that are tried at each place."""
_WORK: Final = 40_000
"""Steps at most, of about 1 us: what takes longer is not followed further."""

# Where the rest of a text is matched: a rule, an alternative, an element of it, and what comes
# after, or None.
Stack: TypeAlias = "tuple[int, int, int, Stack | None]"
Stacks: TypeAlias = "set[Stack | None]"


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
        stacks = self._advance(
            (root, index, 0, None) if elements else None
            for index, elements in enumerate(self._rules[root])
        )
        for _ in range(_LETTERS):
            tried = [(self._after(stacks, code), code) for code in self._letters(stacks)]
            if not tried or self._work > _WORK:
                return
            stacks, code = max(tried, key=lambda item: len(item[0]))
            self._text += chr(code)

    def _letters(self, stacks: Stacks) -> list[int]:
        """Return the letters that fit most of the stacks."""
        heads = Counter(
            element
            for stack in stacks
            if stack is not None and isinstance(element := self._top(stack), Chars)
        )
        codes: Counter[int] = Counter()
        for code in {_letter(chars) for chars in heads}:
            codes[code] = sum(n for chars, n in heads.items() if chars.matches(code))
        return [code for code, _ in codes.most_common(_TRIED)]

    def _top(self, stack: Stack) -> Chars | Token | Ref:
        rule, alternative, index, _ = stack
        return self._rules[rule][alternative][index]

    def _after(self, stacks: Stacks, code: int) -> Stacks:
        """Return the stacks after a letter."""
        matching = []
        for stack in stacks:
            if stack is None:
                continue
            element = self._top(stack)
            if isinstance(element, Chars) and element.matches(code):
                matching.append(self._next(stack))
        return self._advance(matching)

    def _next(self, stack: Stack) -> Stack | None:
        """Return the stack without its top."""
        rule, alternative, index, after = stack
        if index + 1 < len(self._rules[rule][alternative]):
            return (rule, alternative, index + 1, after)
        return after

    def _advance(self, stacks: Iterable[Stack | None]) -> Stacks:
        """Return the stacks with a letter or a token on top that these lead to."""
        todo = list(stacks)
        seen: Stacks = set(todo)
        found: Stacks = set()
        while todo:
            self._work += 1
            stack = todo.pop()
            element = None if stack is None else self._top(stack)
            if stack is None or not isinstance(element, Ref):
                found.add(stack)
                if len(found) > MOST_STACKS:
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
        text = repr(self._text) if self._text else "the begin"
        raise GrammarError(
            f"the grammar is too ambiguous: after {text} it can go on in more than "
            f"{MOST_STACKS:,} ways"
        )


def _letter(chars: Chars) -> int:
    """Return a letter that these are."""
    if not chars.negated:
        return chars.ranges[0][0]
    code = ord("a")
    while not chars.matches(code):
        code = 1 + max(high for low, high in chars.ranges if low <= code <= high)
    return code
