from __future__ import annotations

from dataclasses import dataclass

import pytest

from llamakeep.errors import InvalidValue
from llamakeep.policy import Kept, LeastRecentlyUsed, Oldest, Policy, get_policy, policy_names


@dataclass
class Thing:
    name: str
    created: float
    last_used: float
    sequence: int


THINGS = [
    Thing("old but used", created=1, last_used=9, sequence=1),
    Thing("young, unused", created=2, last_used=2, sequence=2),
    Thing("same time, later", created=2, last_used=2, sequence=3),
    Thing("youngest", created=5, last_used=5, sequence=4),
]


def order(policy: Policy) -> list[str]:
    return [thing.name for thing in sorted(THINGS, key=lambda thing: policy.rank(thing, 10.0))]


def test_oldest_goes_by_insertion_whatever_was_used() -> None:
    assert order(Oldest()) == [
        "old but used",
        "young, unused",
        "same time, later",
        "youngest",
    ]


def test_lru_goes_by_use_and_breaks_ties_by_insertion() -> None:
    assert order(LeastRecentlyUsed()) == [
        "young, unused",
        "same time, later",
        "youngest",
        "old but used",
    ]


@pytest.mark.parametrize("name", policy_names())
def test_every_policy_ranks_every_thing_apart(name: str) -> None:
    policy = get_policy(name)
    assert policy.name == name
    assert len({policy.rank(thing, 10.0) for thing in THINGS}) == len(THINGS)


def test_a_policy_can_be_anyones() -> None:
    class Biggest:
        name = "biggest"

        def rank(self, kept: Kept, now: float) -> tuple[float, int]:
            return -kept.sequence, 0

    policy = Biggest()
    assert get_policy(policy) is policy
    assert order(policy)[0] == "youngest"


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    with pytest.raises(InvalidValue, match=r"unknown policy 'random'; known: .*lru, oldest"):
        get_policy("random")
