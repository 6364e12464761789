"""Refuses grammars that can be followed in ever more ways at once.

llama.cpp keeps a stack for each way in which a text so far can have come about, each once. Some
grammars double their number with each letter. To test a token it follows each stack by itself,
letter by letter, and forgets which ways it has been before; tokens of many letters, such as runs of
blanks, then take as long as there are ways through them.

Both are tried here: from a grammar's begin, from each rule that contains itself, and from each
place that was not met on the way. Of all letters that can come next, several are followed, and of
the texts so far those that leave the most. That finds what grows by itself; it is no proof for a
grammar that was made to hide it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Final, TypeAlias

from llamakeep.errors import GrammarError
from llamakeep.gbnf.recursion import MOST_WAYS, growing_rules, named
from llamakeep.gbnf.rules import Chars, Element, Grammar, Ref
from llamakeep.gbnf.stacks import Place, Stack, Stacks

_LETTERS: Final = 24
"""How far a text is followed."""
_RUN: Final = 16
"""How often the same letter comes in a row; few tokens are longer."""
_TRIED: Final = 4
"""Letters that are tried after each text."""
_TEXTS: Final = 3
"""Texts that are followed at once."""
_MANY: Final = 64
"""Stacks after a text with which half as many letters are tried, and no other text."""
_SLOW: Final = 4
"""Letters after which many stacks, or the ways through a run, must be more to be followed on."""
_SURE: Final = 4
"""If up to here no letter could be matched in two ways from a rule, other rules have to answer."""
_CODES: Final = 256
"""Letters that are looked at, at each place."""
_WORK: Final = 200_000
"""Steps of about 4 us; what takes longer is refused."""

_FEW: Final = 500
"""Places that are all tried; of more, of those that look alike one, as in repetitions."""
_DEPTH: Final = 4
"""Of rules within one another, by which places look alike."""

Ways: TypeAlias = "Counter[Stack]"


def check_growth(grammar: Grammar, begins: Mapping[int, int]) -> None:
    """Raise for a grammar that can be followed in too many ways at once.

    Args:
        grammar: It was read.
        begins: In how many ways each rule can begin; the places with the most are tried first.

    Raises:
        GrammarError: With a text after which it can, or because finding out would take too long.
    """
    stacks = Stacks(grammar)
    inside = sorted(growing_rules(grammar))
    for rule in dict.fromkeys([grammar.root, *inside]):
        is_root = rule == grammar.root
        where = "" if is_root else f" from {named(grammar, rule)} on"
        walk = _Walk(stacks, where, _LETTERS if is_root else _SURE)
        walk.run(stacks.of_rule(rule))
        _check_work(stacks, inside)
    rests = _rests(grammar)
    covered = {rests[place] for place in stacks.met if place in rests}
    for place in _others(grammar, rests, covered, begins):
        if rests[place] in covered:
            continue
        stacks.met.clear()
        walk = _Walk(stacks, f" within {named(grammar, place[0])}", 0)
        walk.run([stacks.at(*place)])
        covered |= {rests[met] for met in stacks.met if met in rests}
        _check_work(stacks, inside)


def _rests(grammar: Grammar) -> dict[Place, int]:
    """Return a number for what is left from each place with a rule on, the same for the same."""
    numbers: dict[tuple[Element, int], int] = {}
    found: dict[Place, int] = {}
    for rule, alternatives in enumerate(grammar.rules):
        for alternative, elements in enumerate(alternatives):
            rest = -1
            for index in range(len(elements) - 1, -1, -1):
                rest = numbers.setdefault((elements[index], rest), len(numbers))
                if isinstance(elements[index], Ref):
                    found[rule, alternative, index] = rest
    return found


def _others(
    grammar: Grammar, rests: Mapping[Place, int], covered: set[int], begins: Mapping[int, int]
) -> list[Place]:
    """Return the places that are not covered, one of each look, most ways to go on first."""

    def n_ways(place: Place) -> int:
        element = grammar.rules[place[0]][place[1]][place[2]]
        return begins[element.rule] if isinstance(element, Ref) else 0

    places = {rest: place for place, rest in rests.items() if rest not in covered}.values()
    if len(places) >= _FEW:
        looks = [0] * len(grammar.rules)
        for _ in range(_DEPTH):
            looks = [hash(tuple(_look(each, looks) for each in rule)) for rule in grammar.rules]
        places = {
            _look(grammar.rules[rule][alternative][index:], looks): (rule, alternative, index)
            for rule, alternative, index in places
        }.values()
    return sorted(places, key=n_ways, reverse=True)


def _look(elements: tuple[Element, ...], looks: list[int]) -> int:
    """Return a number for what some elements match, as far down as that of rules tells."""
    return hash(tuple(looks[e.rule] if isinstance(e, Ref) else e for e in elements[:_LETTERS]))


def _check_work(stacks: Stacks, inside: list[int]) -> None:
    if stacks.work > _WORK:
        raise GrammarError(
            "the grammar can go on in too many ways to be checked; "
            f"{len(inside):,} of its rules contain themselves"
        )


class _Walk:
    """Follows texts from one place.

    Args:
        stacks: Of the grammar.
        where: What messages say of the place.
        n_sure: Letters after which it ends if none could be matched in two ways.
    """

    def __init__(self, stacks: Stacks, where: str, n_sure: int) -> None:
        self._stacks = stacks
        self._where = where
        self._n_sure = n_sure
        self._has_choice = False

    def run(self, begin: list[Stack]) -> None:
        """Follow them from some stacks.

        Raises:
            GrammarError: When there are too many ways after one.
        """
        texts = [("", self._advance(((stack, 1) for stack in begin), ""))]
        sizes: list[int] = []
        for n_letters in range(_LETTERS):
            found: dict[frozenset[Stack], tuple[str, Ways]] = {}
            for text, ways in texts:
                codes = self._letters(ways)
                if n_letters >= self._n_sure and not self._has_choice:
                    return
                for code in codes:
                    after = self._after(_once(ways), code, text)
                    found.setdefault(frozenset(after), (text + chr(code), after))
                if self._stacks.work > _WORK:
                    return
            texts = sorted(found.values(), key=lambda each: len(each[1]), reverse=True)[:_TEXTS]
            for text, ways in texts:
                self._run_of(ways, text)
            sizes.append(len(texts[0][1]) if texts else 0)
            if sizes[-1] > _MANY:
                texts = texts[:1]
                if n_letters >= _SLOW and sizes[-1] <= sizes[-1 - _SLOW]:
                    return

    def _run_of(self, ways: Ways, text: str) -> None:
        """Follow a run of a text's last letter, and count each way through it."""
        ways = _once(ways)
        code = ord(text[-1])
        n_begin = len(ways)
        for n_letters in range(_RUN):
            before = ways
            ways = self._after(ways, code, text)
            if not ways or ways == before or self._stacks.work > _WORK:
                break
            if n_letters >= _SLOW and ways.total() <= n_begin:
                break
            text += chr(code)

    def _letters(self, ways: Ways) -> list[int]:
        """Return letters that fit most of the stacks, one of those that fit the same."""
        heads = Counter(top for stack in ways if isinstance(top := self._stacks.top(stack), Chars))
        single: Counter[int] = Counter()
        classes: list[tuple[Chars, int]] = []
        for chars, n in heads.items():
            if len(chars.ranges) == 1 and not chars.negated and len(set(chars.ranges[0])) == 1:
                single[chars.ranges[0][0]] += n
            else:
                classes.append((chars, n))
        some = {code for chars, _ in classes for code in _letters(chars)}
        some |= {code for code, _ in single.most_common(_CODES)}
        fits: dict[tuple[int, ...], tuple[int, int]] = {}
        for code in sorted(some)[:_CODES]:
            matching = [index for index, (chars, _) in enumerate(classes) if chars.matches(code)]
            n_fit = single[code] + sum(classes[index][1] for index in matching)
            alone = (-1 - code,) if single[code] else ()
            fits.setdefault((*alone, *matching), (n_fit, code))
        self._stacks.work += len(some) * len(classes) // _CODES
        best = sorted(fits.values(), key=lambda each: each[0], reverse=True)
        best = best[: _TRIED if len(ways) <= _MANY else _TRIED // 2]
        self._has_choice |= any(n_fit > 1 for n_fit, _ in best)
        return [code for _, code in best]

    def _after(self, ways: Ways, code: int, text: str) -> Ways:
        """Return the stacks after one more letter."""
        matching = [
            (self._stacks.below(stack), n_ways)
            for stack, n_ways in ways.items()
            if isinstance(top := self._stacks.top(stack), Chars) and top.matches(code)
        ]
        return self._advance(matching, text + chr(code))

    def _advance(self, ways: Iterable[tuple[Stack, int]], text: str) -> Ways:
        """Return the stacks with a letter or a token on top that these lead to."""
        found: Ways = Counter()
        total = 0
        for stack, n_ways in ways:
            for following in self._stacks.leads_to(stack):
                found[following] += n_ways
                total += n_ways
                if total > MOST_WAYS:
                    self._fail(text)
        return found

    def _fail(self, text: str) -> None:
        after = f"after {text!r}" if text else "at its begin"
        raise GrammarError(
            f"the grammar is too ambiguous{self._where}: {after} it can go on in more than "
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
