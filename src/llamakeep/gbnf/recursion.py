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
MOST_WAYS: Final = 4096
"""How many ways to go on there may be at one place; llama.cpp keeps each of them."""
_ALL_WAYS: Final = 1 << 21
"""How many there may be of all rules; llama.cpp follows each once, in about 20 ns."""


def check_left(grammar: Grammar) -> dict[int, int]:
    """Raise for a grammar that refers to itself on the left, or almost does.

    Returns:
        In how many ways each rule can begin.

    Raises:
        GrammarError: With the name of a rule.
    """
    empty = _settled(grammar, is_text=False)
    steps = [_first_rules(grammar, rule, empty) for rule in range(len(grammar.rules))]
    length: dict[int, int] = {}
    ways: dict[int, int] = {}
    begins: dict[int, int] = {}
    for rule in _leaves_first(grammar, steps):
        length[rule] = 1 + max((length[each] for each in steps[rule]), default=0)
        ways[rule] = 1 + sum(ways[each] for each in steps[rule])
        begins[rule] = _n_direct(grammar, rule, empty) + sum(begins[each] for each in steps[rule])
        if length[rule] > MOST_LEFT:
            raise GrammarError(
                f"the grammar's rule {named(grammar, rule)} begins with more than {MOST_LEFT:,} "
                "rules within one another"
            )
        if begins[rule] > MOST_WAYS:
            raise GrammarError(
                f"the grammar's rule {named(grammar, rule)} can begin in more than "
                f"{MOST_WAYS:,} ways"
            )
    if sum(ways.values()) > _ALL_WAYS:
        most = max(ways, key=lambda rule: ways[rule])
        raise GrammarError(
            f"the grammar's rules can begin in more than {_ALL_WAYS:,} ways, "
            f"{named(grammar, most)} in the most of them"
        )
    return begins


def named(grammar: Grammar, rule: int) -> str:
    """Return the name of a rule, or of the one that a group is in."""
    return repr(grammar.names[rule].partition("_")[0])


def ends(grammar: Grammar) -> bool:
    """Whether some text matches: whether an answer can ever be complete."""
    return _settled(grammar, is_text=True)[grammar.root]


def _settled(grammar: Grammar, *, is_text: bool) -> list[bool]:
    """Return of each rule whether it matches a text; the empty one, unless `is_text`."""
    waits: list[list[tuple[int, int]]] = [[] for _ in grammar.rules]
    missing: dict[tuple[int, int], int] = {}
    settled = [False] * len(grammar.rules)
    found: list[int] = []
    for rule, alternatives in enumerate(grammar.rules):
        for index, elements in enumerate(alternatives):
            refs = [each.rule for each in elements if isinstance(each, Ref)]
            if len(refs) < len(elements) and not is_text:
                continue
            missing[rule, index] = len(refs)
            for ref in refs:
                waits[ref].append((rule, index))
            if not refs and not settled[rule]:
                settled[rule] = True
                found.append(rule)
    while found:
        for rule, index in waits[found.pop()]:
            missing[rule, index] -= 1
            if not missing[rule, index] and not settled[rule]:
                settled[rule] = True
                found.append(rule)
    return settled


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


def _n_direct(grammar: Grammar, rule: int, empty: list[bool]) -> int:
    """Return in how many ways a rule can begin with a character or token of its own."""
    firsts = (
        next((e for e in elements if not (isinstance(e, Ref) and empty[e.rule])), None)
        for elements in grammar.rules[rule]
    )
    return sum(first is not None and not isinstance(first, Ref) for first in firsts)


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
                    f"the grammar's rule {named(grammar, following)} leads to itself before "
                    "anything else (left recursion)"
                )
            elif not state[following]:
                state[following] = 1
                path.append((following, iter(steps[following])))
    return order


def growing_rules(grammar: Grammar) -> set[int]:
    """Return the rules that contain themselves with something behind: what follows them adds up."""
    number = _components(grammar)
    growing = {
        number[rule]
        for rule, alternatives in enumerate(grammar.rules)
        for elements in alternatives
        for element in elements[:-1]
        if isinstance(element, Ref) and number[element.rule] == number[rule]
    }
    return {rule for rule in range(len(grammar.rules)) if number[rule] in growing}


def _components(grammar: Grammar) -> list[int]:
    """Return of each rule the number of its group: rules that contain one another (Tarjan)."""
    steps = [
        [each.rule for elements in alternatives for each in elements if isinstance(each, Ref)]
        for alternatives in grammar.rules
    ]
    index = [-1] * len(steps)
    low = [0] * len(steps)
    group = [-1] * len(steps)
    open_rules: list[int] = []
    n_seen = 0
    for start in range(len(steps)):
        if index[start] >= 0:
            continue
        path = [(start, iter(steps[start]))]
        while path:
            rule, rest = path[-1]
            if index[rule] < 0:
                index[rule] = low[rule] = n_seen
                n_seen += 1
                open_rules.append(rule)
            following = next(rest, None)
            if following is None:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[rule])
                if low[rule] == index[rule]:
                    while group[rule] < 0:
                        group[open_rules.pop()] = rule
            elif index[following] < 0:
                path.append((following, iter(steps[following])))
            elif group[following] < 0:
                low[rule] = min(low[rule], index[following])
    return group
