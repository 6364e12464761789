"""Refuses rules that lead to themselves before anything was read, and very long ways to the left.

llama.cpp looks for the first kind, too, but overlooks some of them and then takes all memory; and
it looks along every way to the left, of which a grammar of a few lines can have millions.
"""

from __future__ import annotations

from typing import Final

from llamakeep.errors import GrammarError
from llamakeep.gbnf.rules import Grammar, Ref

MOST_LEFT: Final = 2048
"""How long a way to the left may be: llama.cpp calls itself for each step."""
MOST_WAYS: Final = 1 << 21
"""How many ways to the left there may be; llama.cpp follows each, in about 20 ns."""


def check_left(grammar: Grammar) -> None:
    """Raise for a grammar that refers to itself on the left, or almost does.

    Raises:
        GrammarError: With the name of a rule.
    """
    empty = _may_be_empty(grammar)
    steps = [_first_rules(grammar, rule, empty) for rule in range(len(grammar.rules))]
    length: dict[int, int] = {}
    ways: dict[int, int] = {}
    for rule in _leaves_first(grammar, steps):
        length[rule] = 1 + max((length[each] for each in steps[rule]), default=0)
        ways[rule] = 1 + sum(ways[each] for each in steps[rule])
        if length[rule] > MOST_LEFT:
            raise GrammarError(
                f"the grammar's rule {_named(grammar, rule)} begins with more than {MOST_LEFT:,} "
                "rules within one another"
            )
    if sum(ways.values()) > MOST_WAYS:
        most = max(ways, key=lambda rule: ways[rule])
        raise GrammarError(
            f"the grammar's rules can begin in more than {MOST_WAYS:,} ways, "
            f"{_named(grammar, most)} in the most of them"
        )


def _named(grammar: Grammar, rule: int) -> str:
    """Return the name of a rule, or of the one that a group is in."""
    return repr(grammar.names[rule].partition("_")[0])


def _may_be_empty(grammar: Grammar) -> list[bool]:
    """Return of each rule whether it matches no text at all."""
    waits: list[list[tuple[int, int]]] = [[] for _ in grammar.rules]
    missing: dict[tuple[int, int], int] = {}
    empty = [False] * len(grammar.rules)
    found: list[int] = []
    for rule, alternatives in enumerate(grammar.rules):
        for index, elements in enumerate(alternatives):
            refs = [each.rule for each in elements if isinstance(each, Ref)]
            if len(refs) < len(elements):
                continue
            missing[rule, index] = len(refs)
            for ref in refs:
                waits[ref].append((rule, index))
            if not refs and not empty[rule]:
                empty[rule] = True
                found.append(rule)
    while found:
        for rule, index in waits[found.pop()]:
            missing[rule, index] -= 1
            if not missing[rule, index] and not empty[rule]:
                empty[rule] = True
                found.append(rule)
    return empty


def _first_rules(grammar: Grammar, rule: int, empty: list[bool]) -> list[int]:
    """Return the rules that a rule can begin with, as often as llama.cpp would look at them."""
    found = []
    for elements in grammar.rules[rule]:
        for element in elements:
            if not isinstance(element, Ref):
                break
            found.append(element.rule)
            if not empty[element.rule]:
                break
    return found


def _leaves_first(grammar: Grammar, steps: list[list[int]]) -> list[int]:
    """Return the rules so that each comes after those it can begin with."""
    order: list[int] = []
    state = [0] * len(steps)  # 1: on the way, 2: done
    for start in range(len(steps)):
        if state[start]:
            continue
        state[start] = 1
        path = [(start, iter(steps[start]))]
        while path:
            rule, rest = path[-1]
            following = next(rest, None)
            if following is None:
                state[rule] = 2
                order.append(rule)
                path.pop()
            elif state[following] == 1:
                raise GrammarError(
                    f"the grammar's rule {_named(grammar, following)} leads to itself before "
                    "anything else (left recursion)"
                )
            elif not state[following]:
                state[following] = 1
                path.append((following, iter(steps[following])))
    return order
