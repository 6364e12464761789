"""Follows a grammar that names tokens, as llama.cpp does when it accepts a token.

When llama.cpp tests a token it lets a named one stand behind characters of the same piece, and when
it accepts the token it does not; then no way is left, and it ends the process. So where a grammar
names tokens, each token is followed here before llama.cpp accepts it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from llamakeep.errors import GrammarError
from llamakeep.gbnf.recursion import MOST_WAYS
from llamakeep.gbnf.rules import Chars, Element, Grammar, Ref, Token
from llamakeep.gbnf.stacks import DONE, Stack, Stacks


class Follower:
    """Where an answer stands in a grammar. Of one thread; some us for each way and letter.

    Args:
        grammar: It was checked.
        named: The numbers of the tokens that it names by their text.
    """

    def __init__(self, grammar: Grammar, named: Mapping[str, int]) -> None:
        self._named = named
        self._names_other = _rules_with_others(grammar)
        self._all = Stacks(grammar)
        self._with_others = {DONE: False}
        self._stacks = self._advance(self._all.of_rule(grammar.root))

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

    def others_here(self) -> set[int] | None:
        """Return the tokens but for which any is allowed here; None where some are asked for."""
        found: set[int] | None = None
        for top in map(self._all.top, self._stacks):
            if isinstance(top, Token) and top.negated:
                excluded = {self._number(top)}
                found = excluded if found is None else found & excluded
        return found

    def others_later(self) -> bool:
        """Whether `any token but` one may come behind a character that can come now."""
        return any(
            self._has_others(stack)
            for stack in self._stacks
            if isinstance(self._all.top(stack), Chars)
        )

    def _has_others(self, stack: Stack) -> bool:
        passed: list[Stack] = []
        while (found := self._with_others.get(stack)) is None:
            passed.append(stack)
            elements, stack = self._all.parts(stack)
            if any(map(self._is_others, elements)):
                found = True
                break
        self._with_others |= dict.fromkeys(passed, found)
        return found

    def _is_others(self, element: Element) -> bool:
        if isinstance(element, Ref):
            return element.rule in self._names_other
        return isinstance(element, Token) and element.negated

    def _after(self, token: int, letters: str) -> tuple[Stack, ...]:
        """Return the stacks after a token: named as a whole, or read by its letters alone."""
        following: list[Stack] = []
        stacks: list[Stack] = []
        for stack in self._stacks:
            top = self._all.top(stack)
            if isinstance(top, Chars):
                stacks.append(stack)
            elif isinstance(top, Token) and self._is(top, token):
                following.append(self._all.below(stack))
        read: Iterable[Stack] = stacks
        for letter in letters:
            read = self._advance(
                self._all.below(stack)
                for stack in read
                if isinstance(top := self._all.top(stack), Chars) and top.matches(ord(letter))
            )
        return tuple(dict.fromkeys((*self._advance(following), *read)))

    def _is(self, element: Token, token: int) -> bool:
        return (self._number(element) == token) != element.negated

    def _number(self, element: Token) -> int:
        return self._named[element.text] if element.text else element.id

    def _advance(self, stacks: Iterable[Stack]) -> tuple[Stack, ...]:
        """Return the stacks with a letter or a token on top that these lead to."""
        found: dict[Stack, None] = {}
        for stack in stacks:
            found.update(dict.fromkeys(self._all.leads_to(stack)))
            if len(found) > MOST_WAYS:
                raise GrammarError(
                    "the grammar is too ambiguous: the answer can go on in more than "
                    f"{MOST_WAYS:,} ways"
                )
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
