"""Every policy behind the lazy queue: what goes is what has the least rank."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamakeep.eviction import EvictionQueue
from llamakeep.policy import get_policy, policy_names


@dataclass(eq=False)
class Thing:
    created: float
    last_used: float
    sequence: int
    hits: int = 0
    n_bytes: int = 1
    n_tokens: int = 1
    queued: bool = False
    kept: bool = True
    held: bool = False


steps = st.lists(
    st.tuples(
        st.sampled_from(["add", "use", "drop", "hold", "let go", "evict"]), st.integers(0, 9)
    ),
    max_size=60,
)


@pytest.mark.parametrize("name", policy_names())
@given(steps=steps)
def test_the_victim_is_the_brute_force_minimum(name: str, steps: list[tuple[str, int]]) -> None:
    now = 0.0
    policy = get_policy(name)
    queue = EvictionQueue[Thing](policy, lambda: now, lambda thing: thing.kept)
    things: list[Thing] = []
    for step, index in steps:
        now += 1
        if step == "add":
            things.append(Thing(now, now, len(things)))
            queue.push(things[-1])
        elif step == "evict":
            victim = queue.pop(lambda thing: not thing.held)
            free = [thing for thing in things if thing.kept and not thing.held]
            least = min(free, key=lambda thing: policy.rank(thing, now), default=None)
            assert victim is least
            if victim is not None:
                victim.kept = False
        elif things:
            thing = things[index % len(things)]
            if step == "use":
                thing.last_used, thing.hits = now, thing.hits + 1
            elif step == "drop":
                thing.kept = False
            else:
                thing.held = step == "hold"
                if not thing.held and thing.kept:
                    queue.push(thing)
    assert len(set(map(id, queue))) == len(queue)


def test_what_is_gone_does_not_pile_up() -> None:
    queue = EvictionQueue[Thing](get_policy("lru"), lambda: 0.0, lambda thing: thing.kept)
    for number in range(10_000):
        thing = Thing(0, 0, number)
        queue.push(thing)
        queue.push(thing)
        thing.kept = False
    assert len(queue) <= 65
    queue.clear()
    assert len(queue) == 0
