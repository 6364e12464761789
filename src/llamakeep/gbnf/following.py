"""Follows a grammar that names tokens, as llama.cpp does when it accepts a token.

When llama.cpp tests a token it lets a named one stand behind characters of the same piece, and when
it accepts the token it does not; then no way is left, and it ends the process. So where a grammar
names tokens, each token is followed here before llama.cpp accepts it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, TypeAlias

from llamakeep.errors import GrammarError
from llamakeep.gbnf.growth import MOST_WAYS
from llamakeep.gbnf.rules import Chars, Grammar, Ref, Token

# What is still to be matched, by its number in `Follower._frames`.
Stack: TypeAlias = int

_DONE: Final[Stack] = -1


class Follower:
    """Where an answer stands in a grammar. Of one thread; some us for each way and letter.

    Args:
        grammar: It was checked.
        named: The numbers of the tokens that it names by their text.
    """

    def __init__(self, grammar: Grammar, named: Mapping[str, int]) -> None:
        self._rules = grammar.rules
        self._named = named
        self._names_other = _rules_with_others(grammar)
        # A rule, an alternative, an element of it, and the stack below. Numbers, as stacks can be
        # deeper than Python compares tuples.
        self._frames: list[tuple[int, int, int, Stack]] = []
        self._numbers: dict[tuple[int, int, int, Stack], Stack] = {}
        self._known: dict[Stack, tuple[Stack, ...]] = {}
        self._stacks = self._advance(
            self._begin(grammar.root, index, _DONE)
            for index in range(len(grammar.rules[grammar.root]))
        )

    def goes_on(self, token: int, letters: str) -> bool:
        """Whether some way is left after a token.

        Args:
            token: Its number.
            letters: Those that it completes.

        Raises:
            GrammarError: When more ways are left than may be followed at once.
        """
        return bool(self._after(token, letters))

    def accept(self, token: int, letters: str) -> None:
        """Go on with a token. See `goes_on`."""
        self._stacks = self._after(token, letters)

    def is_named(self, token: int) -> bool:
        """Whether the grammar allows the token here by its name, or as one that it is not."""
        return any(
            isinstance(top := self._top(stack), Token) and self._is(top, token)
            for stack in self._stacks
            if stack != _DONE
        )

    def others_here(self) -> set[int] | None:
        """Return the tokens but for which any is allowed here; None where some are asked for."""
        found: set[int] | None = None
        for stack in self._stacks:
            top = None if stack == _DONE else self._top(stack)
            if isinstance(top, Token) and top.negated:
                excluded = {self._number(top)}
                found = excluded if found is None else found & excluded
        return found

    def others_later(self) -> bool:
        """Whether `any token but` one may come behind a character that can come now."""
        return any(
            stack != _DONE and isinstance(self._top(stack), Chars) and self._has_others(stack)
            for stack in self._stacks
        )

    def _has_others(self, stack: Stack) -> bool:
        while stack != _DONE:
            rule, alternative, index, stack = self._frames[stack]
            for element in self._rules[rule][alternative][index:]:
                if isinstance(element, Token) and element.negated:
                    return True
                if isinstance(element, Ref) and element.rule in self._names_other:
                    return True
        return False

    def _after(self, token: int, letters: str) -> tuple[Stack, ...]:
        """Return the stacks after a token: named as a whole, or read by its letters alone."""
        following: list[Stack] = []
        stacks: list[Stack] = []
        for stack in self._stacks:
            if stack == _DONE:
                continue
            top = self._top(stack)
            if not isinstance(top, Token):
                stacks.append(stack)
            elif self._is(top, token):
                following.append(self._below(stack))
        read: Iterable[Stack] = stacks
        for letter in letters:
            code = ord(letter)
            read = self._advance(
                self._below(stack)
                for stack in read
                if stack != _DONE
                and isinstance(top := self._top(stack), Chars)
                and top.matches(code)
            )
        return tuple(dict.fromkeys((*self._advance(following), *read)))

    def _is(self, element: Token, token: int) -> bool:
        return (self._number(element) == token) != element.negated

    def _number(self, element: Token) -> int:
        return self._named[element.text] if element.text else element.id

    def _top(self, stack: Stack) -> Chars | Token | Ref:
        rule, alternative, index, _ = self._frames[stack]
        return self._rules[rule][alternative][index]

    def _begin(self, rule: int, alternative: int, below: Stack) -> Stack:
        if not self._rules[rule][alternative]:
            return below
        return self._stack((rule, alternative, 0, below))

    def _stack(self, frame: tuple[int, int, int, Stack]) -> Stack:
        number = self._numbers.setdefault(frame, len(self._frames))
        if number == len(self._frames):
            self._frames.append(frame)
        return number

    def _below(self, stack: Stack) -> Stack:
        """Return a stack without its top."""
        rule, alternative, index, below = self._frames[stack]
        if index + 1 < len(self._rules[rule][alternative]):
            return self._stack((rule, alternative, index + 1, below))
        return below

    def _advance(self, stacks: Iterable[Stack]) -> tuple[Stack, ...]:
        """Return the stacks with a letter or a token on top that these lead to."""
        found: dict[Stack, None] = {}
        for stack in stacks:
            known = self._known.get(stack)
            if known is None:
                known = self._known[stack] = self._leads_to(stack)
            found.update(dict.fromkeys(known))
            if len(found) > MOST_WAYS:
                raise GrammarError(
                    "the grammar is too ambiguous: the answer can go on in more than "
                    f"{MOST_WAYS:,} ways"
                )
        return tuple(found)

    def _leads_to(self, begin: Stack) -> tuple[Stack, ...]:
        found, todo, seen = [], [begin], {begin}
        while todo:
            stack = todo.pop()
            top = None if stack == _DONE else self._top(stack)
            if not isinstance(top, Ref):
                found.append(stack)
                continue
            below = self._below(stack)
            for index in range(len(self._rules[top.rule])):
                following = self._begin(top.rule, index, below)
                if following not in seen:
                    seen.add(following)
                    todo.append(following)
        return tuple(found)


def _rules_with_others(grammar: Grammar) -> frozenset[int]:
    """Return the rules in which, or in whose rules, `any token but` one stands."""
    users: list[list[int]] = [[] for _ in grammar.rules]
    found: set[int] = set()
    for rule, alternatives in enumerate(grammar.rules):
        for elements in alternatives:
            for element in elements:
                if isinstance(element, Ref):
                    users[element.rule].append(rule)
                elif isinstance(element, Token) and element.negated:
                    found.add(rule)
    todo = list(found)
    while todo:
        for user in users[todo.pop()]:
            if user not in found:
                found.add(user)
                todo.append(user)
    return frozenset(found)
