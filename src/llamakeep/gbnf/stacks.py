"""What is left to be matched, in stacks that share what is below their tops."""

from __future__ import annotations

from typing import Final, TypeAlias

from llamakeep.gbnf.rules import Chars, Element, Grammar, Ref, Token

# The number of a stack in `Stacks`. Stacks can be deeper than Python compares tuples.
Stack: TypeAlias = int
# A rule, an alternative of it, and an element of that.
Place: TypeAlias = tuple[int, int, int]

DONE: Final[Stack] = -1
"""Nothing is left."""


class Stacks:
    """The stacks of a grammar that were met so far. Of one thread; each costs about 300 bytes.

    Args:
        grammar: It was read.

    Attributes:
        met: Each place that came to be on top; whoever reads it may empty it.
        work: Steps so far, of about 1 us.
    """

    def __init__(self, grammar: Grammar) -> None:
        self._rules = grammar.rules
        self._frames: list[tuple[int, int, int, Stack]] = []
        self._numbers: dict[tuple[int, int, int, Stack], Stack] = {}
        self._known: dict[Stack, tuple[Stack, ...]] = {}
        self.met: set[Place] = set()
        self.work = 0

    def of_rule(self, rule: int, below: Stack = DONE) -> list[Stack]:
        """Return the stacks with the first element of each alternative of a rule on top."""
        return [
            self.at(rule, index, 0, below) if elements else below
            for index, elements in enumerate(self._rules[rule])
        ]

    def at(self, rule: int, alternative: int, index: int, below: Stack = DONE) -> Stack:
        """Return the stack with an element on top."""
        frame = (rule, alternative, index, below)
        number = self._numbers.setdefault(frame, len(self._frames))
        if number == len(self._frames):
            self._frames.append(frame)
        return number

    def top(self, stack: Stack) -> Element | None:
        """Return the element to be matched next, None where nothing is."""
        if stack == DONE:
            return None
        rule, alternative, index, _ = self._frames[stack]
        return self._rules[rule][alternative][index]

    def below(self, stack: Stack) -> Stack:
        """Return a stack without its top."""
        rule, alternative, index, below = self._frames[stack]
        if index + 1 < len(self._rules[rule][alternative]):
            return self.at(rule, alternative, index + 1, below)
        return below

    def parts(self, stack: Stack) -> tuple[tuple[Element, ...], Stack]:
        """Return what is left of the alternative on top, and the stack below it."""
        rule, alternative, index, below = self._frames[stack]
        return self._rules[rule][alternative][index:], below

    def leads_to(self, begin: Stack) -> tuple[Stack, ...]:
        """Return the stacks with a character or a token on top, or none, that a stack leads to."""
        self.work += 1
        known = self._known.get(begin)
        if known is not None:
            return known
        found, todo, seen = [], [begin], {begin}
        while todo:
            self.work += 1
            stack = todo.pop()
            if stack != DONE:
                self.met.add(self._frames[stack][:3])
            top = self.top(stack)
            if top is None or isinstance(top, (Chars, Token)):
                found.append(stack)
                continue
            assert isinstance(top, Ref)
            for following in self.of_rule(top.rule, self.below(stack)):
                if following not in seen:
                    seen.add(following)
                    todo.append(following)
        self._known[begin] = tuple(found)
        return self._known[begin]
