"""Trees whose policy watches: what it hears, and that the numbers add up whatever is asked."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamakeep.errors import StateError
from llamakeep.policy import get_policy, name_of, parse_policy, policy_below
from llamakeep.states import Checkpoint, Segment
from llamakeep.stores.memory import MemoryStore
from llamakeep.tree import PrefixTree
from tests.test_eviction import Time
from tests.test_policy_watching import WATCHING
from tests.test_tree import NO_ROWS, PLAIN, ROLLING, array, byte_tree, keep, random_tokens


@pytest.mark.parametrize("name", WATCHING)
def test_a_span_that_cannot_be_read_is_forgotten(name: str) -> None:
    tree = byte_tree(40, segment_tokens=8, policy=name)
    policy: Any = tree.policy
    heard: list[str] = []
    leaves = policy.leaves

    def hear(kept: Any, now: float, *, evicted: bool) -> None:
        heard.append("evicted" if evicted else "lost")
        leaves(kept, now, evicted=evicted)

    policy.leaves = hear

    def fails(start: int, end: int) -> Segment:
        raise StateError("out of order")

    for seed in range(10):
        with pytest.raises(StateError, match="out of order"):
            tree.save(random_tokens(20, seed), segment_bytes=lambda n: n, read=fails)
    assert heard == ["lost"] * 10
    assert tree.store.used_bytes == 0
    tree.check()


acts = st.lists(
    st.tuples(
        st.sampled_from(["save", "save", "save", "touch", "pin", "clear", "other", "shrink"]),
        st.lists(st.integers(0, 1), min_size=1, max_size=24),
        st.integers(1, 24),
        st.sampled_from([0.0, 0.5, 7.0, 400.0, -3.0]),
    ),
    max_size=30,
)


def played(tree: PrefixTree, clock: Time, asked: list[Any]) -> list[Any]:
    """Do what is asked, and return what was seen."""
    seen: list[Any] = []
    store: Any = tree.store
    for what, ids, at, wait in asked:
        clock.now += wait
        tokens = array(*ids)
        if what == "clear":
            tree.clear()
        elif what == "shrink":
            while store.used_bytes > 40 + at:
                assert tree._evict_one()
            store.resize(40 + at)
        elif what == "touch":
            match = tree.match_prefix(tokens)
            tree.touch(tokens, match.n_tokens)
            seen.append(match.n_tokens)
        else:
            tree.namespace = b"other" if what == "other" else b""
            with tree.pin(tokens[:at] if what == "pin" else tokens[:0]):
                save(tree, tokens, at)
            tree.namespace = b""
        assert store.used_bytes <= store.capacity_bytes
        tree.check()
        seen.append(sorted(tree.store))
    return seen


def save(tree: PrefixTree, tokens: Any, at: int) -> None:
    for end in sorted({min(at, tokens.size), int(tokens.size)}):
        keep(tree, tokens[:end])
        if tree.traits.rolling:
            data = np.zeros(5, np.uint8)
            tree.save_checkpoint(tokens[:end], n_bytes=5, read=_checkpoint(end, data))


def _checkpoint(end: int, data: Any) -> Callable[[], Any]:
    return lambda: Checkpoint(end, data)


@pytest.mark.parametrize("traits", [PLAIN, ROLLING, NO_ROWS], ids=["rows", "both", "rolling"])
@pytest.mark.parametrize("policy", [*WATCHING, "hazard:guard=0"])
@given(asked=acts)
@settings(max_examples=15, deadline=None)
def test_whatever_is_asked_the_numbers_add_up_and_the_same_comes_of_the_same(
    traits: Any, policy: str, asked: list[Any]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llamakeep.policy.hazard._LEARN_AFTER", 4)
        results = []
        for _ in range(2):
            clock = Time()
            tree = PrefixTree(
                MemoryStore(64),
                traits,
                segment_tokens=4,
                max_checkpoints=4,
                policy=parse_policy(policy),
                clock=clock,
            )
            results.append(played(tree, clock, asked))
            tree.clear()
            assert tree.store.used_bytes == 0
            assert len(tree) == 0
        assert results[0] == results[1]


@pytest.mark.parametrize("name", WATCHING)
@pytest.mark.parametrize("traits", [PLAIN, ROLLING, NO_ROWS], ids=["rows", "both", "rolling"])
@pytest.mark.parametrize("capacity_bytes", [0, 3])
def test_little_room_and_prompts_that_are_larger(
    name: str, traits: Any, capacity_bytes: int
) -> None:
    clock = Time()
    tree = PrefixTree(
        MemoryStore(capacity_bytes), traits, segment_tokens=4, policy=name, clock=clock
    )
    rng = random.Random(1)
    asked = [
        ("save", [rng.randrange(2) for _ in range(20)], rng.randint(1, 20), 1.0) for _ in range(60)
    ]
    played(tree, clock, asked)
    assert tree.store.used_bytes <= capacity_bytes


class Failing:
    """A policy of anyone's, without a name, that fails while it is told to."""

    def __init__(self) -> None:
        self.fails = False

    def rank(self, kept: Any, now: float) -> tuple[float, int]:
        if self.fails:
            raise RuntimeError("no idea")
        return kept.last_used, kept.sequence


def test_a_policy_that_fails_leaves_nothing_that_would_never_go() -> None:
    policy = Failing()
    tree = PrefixTree(MemoryStore(24), PLAIN, segment_tokens=4, policy=policy, clock=Time())  # type: ignore[arg-type]
    keep(tree, random_tokens(8, 1))
    policy.fails = True
    for seed in (2, 3, 4):
        with pytest.raises(RuntimeError, match="no idea"):
            keep(tree, random_tokens(8, seed))
    policy.fails = False
    tree.check()
    for seed in range(5, 12):
        keep(tree, random_tokens(8, seed))
        tree.check()
    assert tree.store.used_bytes == 24


def test_names_take_options_everywhere() -> None:
    tree = PrefixTree(MemoryStore(24), PLAIN, policy="slru:protected=0.5")
    assert repr(tree.policy) == "SegmentedLRU(protected=0.5)"
    assert policy_below("slru:protected=0.5") == "lru"
    assert policy_below("marginal:half_life=60") == "marginal:half_life=60"
    assert repr(get_policy("marginal:half_life=60", "disk")) == "Marginal(half_life=60)"
    assert name_of(Failing()) == "Failing"  # type: ignore[arg-type]
