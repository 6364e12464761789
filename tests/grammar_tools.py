"""Texts that a grammar matches, drawn at random, and schemas to try."""

from __future__ import annotations

import random
from typing import Any

from llamakeep.gbnf.parsing import parse
from llamakeep.gbnf.rules import Chars, Grammar, Ref

_FAR = 1 << 40
_ALPHABET = "abcXYZ019 _-.,:/\\\"'\täß€漢😀"


def texts_of(grammar: str, seed: int, n_texts: int, size: int = 60) -> list[str]:
    """Texts that the grammar matches; after about `size` steps each comes to its end."""
    walk = _Walk(parse(grammar), random.Random(seed))
    return [walk.text(size) for _ in range(n_texts)]


class _Walk:
    def __init__(self, grammar: Grammar, rng: random.Random) -> None:
        self._grammar = grammar
        self._rng = rng
        self._shortest = _shortest(grammar)

    def text(self, size: int) -> str:
        found: list[str] = []
        todo: list[Any] = [Ref(self._grammar.root)]
        while todo:
            element = todo.pop()
            size -= 1
            if isinstance(element, Chars):
                found.append(self._char(element))
                continue
            assert isinstance(element, Ref)
            alternatives = [
                each for each in self._grammar.rules[element.rule] if self._cost(each) < _FAR
            ]
            if size > 0:
                chosen = self._rng.choice(alternatives)
            else:
                chosen = min(alternatives, key=self._cost)
            todo += reversed(chosen)
        return "".join(found)

    def _cost(self, alternative: tuple[Any, ...]) -> int:
        return sum(self._shortest[e.rule] if isinstance(e, Ref) else 1 for e in alternative)

    def _char(self, chars: Chars) -> str:
        fitting = [char for char in _ALPHABET if chars.matches(ord(char))]
        if fitting and self._rng.random() < 0.8:
            return self._rng.choice(fitting)
        assert not chars.negated, "schemas make no such classes"
        low, high = self._rng.choice(chars.ranges)
        return chr(self._rng.choice([low, high, self._rng.randint(low, high)]))


def _shortest(grammar: Grammar) -> list[int]:
    """The least number of steps of each rule."""
    cost = [_FAR] * len(grammar.rules)
    changed = True
    while changed:
        changed = False
        for rule, alternatives in enumerate(grammar.rules):
            least = 1 + min(
                sum(cost[e.rule] if isinstance(e, Ref) else 1 for e in elements)
                for elements in alternatives
            )
            if least < cost[rule]:
                cost[rule], changed = least, True
    return cost
