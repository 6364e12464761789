"""The bound against brute force, and the clairvoyant against the bound."""

from __future__ import annotations

from functools import cache
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamakeep.errors import InvalidValue
from llamakeep.policy import policy_names
from llamakeep.runtime.base import Family
from llamakeep.simulate.bound import Belady, bound
from llamakeep.simulate.greedy import Clairvoyant, clairvoyant, partings
from llamakeep.simulate.replay import Model, replay
from llamakeep.simulate.trace import Trace
from tests.simulate_tools import blocks_trace, random_prompts, trace_of

HYBRID = Model(1, Family.HYBRID, 3)


def best_of_all(trace: Trace, capacity_tokens: int) -> int:
    """The most tokens that any cache of whole prefixes saves, by trying all of them."""
    paths = []
    for request in trace:
        tokens = request.tokens.tolist()
        paths.append([tuple(tokens[:end]) for end in range(1, len(tokens) + 1)])

    def saved(kept: frozenset[tuple[int, ...]], path: list[tuple[int, ...]]) -> int:
        return next((i for i, prefix in enumerate(path) if prefix not in kept), len(path))

    @cache
    def most(index: int, kept: frozenset[tuple[int, ...]]) -> int:
        if index == len(paths):
            return 0
        at_hand = sorted(kept | set(paths[index]))
        future = {prefix for path in paths[index + 1 :] for prefix in path}
        wanted = [prefix for prefix in at_hand if prefix in future]
        n = min(capacity_tokens, len(wanted))
        choices = {frozenset(chosen) for chosen in combinations(wanted, n)}
        rest = max(most(index + 1, chosen) for chosen in choices)
        return saved(kept, paths[index]) + rest

    return most(0, frozenset())


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(0, 7))
def test_it_is_what_the_best_of_all_saves(seed: int, capacity_tokens: int) -> None:
    rng = np.random.default_rng(seed)
    prompts = [prompt[:6] for prompt in random_prompts(rng, n=int(rng.integers(2, 7)), longest=6)]
    with trace_of(prompts) as trace:
        found = bound(trace, capacity_bytes=capacity_tokens)
        assert found.reused_tokens == best_of_all(trace, capacity_tokens)


def test_by_hand() -> None:
    with blocks_trace([1], [2], [3], [1], [2], [1]) as trace:
        # One block: 1 is used again before 2 each time but the last.
        found = bound(trace, capacity_bytes=1)
        assert (found.reused_tokens, found.requests_hit, found.n_requests) == (2, 2, 6)
        assert (found.cache, found.policy, found.capacity_bytes) == ("bound", "belady", 1)
        assert bound(trace, capacity_bytes=2).reused_tokens == 3
        assert bound(trace, capacity_bytes=5, model=Model(3)).reused_tokens == 2
        assert bound(trace, capacity_bytes=0).reused_tokens == 0


def test_what_is_kept_is_always_whole_prefixes() -> None:
    for seed in range(20):
        with trace_of(random_prompts(np.random.default_rng(seed), n=25)) as trace:
            belady = Belady(17)
            parents: dict[int, int | None] = {}
            sizes: dict[int, int] = {}
            for request in trace:
                path = request.blocks.tolist()
                parents.update(zip(path, [None, *path], strict=False))
                sizes.update(zip(path, request.sizes.tolist(), strict=True))
                belady.serve(request)
                kept = {block: tokens for block, (tokens, _) in belady._kept.items()}
                assert sum(kept.values()) == belady.used_tokens <= 17
                for block, tokens in kept.items():
                    assert 0 < tokens <= sizes[block]
                    parent = parents[block]
                    assert parent is None or kept[parent] == sizes[parent]


@pytest.mark.parametrize("policy", policy_names("tree"))
def test_no_policy_passes_it(policy: str) -> None:
    for seed in range(5):
        with trace_of(random_prompts(np.random.default_rng(seed), n=40, longest=200)) as trace:
            before = 0
            for capacity_bytes in (10, 40, 80, 10_000):
                most = bound(trace, capacity_bytes=capacity_bytes).reused_tokens
                assert before <= most
                before = most
                found = replay(trace, capacity_bytes=capacity_bytes, policy=policy)
                assert found.reused_tokens <= most
                assert found.input_tokens == trace.n_tokens


def test_warmup_and_progress() -> None:
    heard: list[tuple[int, int]] = []
    with blocks_trace([1], [1], [1]) as trace:
        found = bound(trace, capacity_bytes=9, warmup=2, on_progress=lambda *now: heard.append(now))
        assert (found.n_requests, found.reused_tokens, found.saved_share) == (1, 1, 1.0)
        assert heard == [(0, 3)]
        with pytest.raises(InvalidValue, match="0 to 2 requests, not 3"):
            bound(trace, capacity_bytes=9, warmup=3)


def test_old_places_are_forgotten() -> None:
    """However often a block is used, its places in the heap do not pile up."""
    with blocks_trace(*([[1, 2, 3]] * 3000)) as trace:
        belady = Belady(10)
        for request in trace:
            belady.serve(request)
            assert len(belady._heap) <= 1024 + 2 * 3 + 3


# -- checkpoints -----------------------------------------------------------------------------------


def test_partings_by_hand() -> None:
    with blocks_trace([1, 2, 3], [1, 2, 4], [1, 5], [1, 2, 3], [6]) as trace:
        assert partings(trace) == {2: [1], 1: [2], 3: [3]}


def test_the_clairvoyant_by_hand() -> None:
    with blocks_trace([1, 2, 3], [1, 2, 4], [1, 5], [1, 2, 3], [6]) as trace:
        # Three checkpoints and three rows: everything that anybody wants.
        all_of_it = clairvoyant(trace, capacity_bytes=12, model=HYBRID)
        assert (all_of_it.reused_tokens, all_of_it.requests_hit) == (2 + 1 + 3, 3)
        assert (all_of_it.cache, all_of_it.policy) == ("clairvoyant", "greedy")
        assert clairvoyant(trace, capacity_bytes=3, model=HYBRID).reused_tokens == 0


@pytest.mark.parametrize("family", [Family.HYBRID, Family.RECURRENT, Family.SWA])
def test_the_clairvoyant_keeps_to_its_capacity(family: Family) -> None:
    model = Model(1, family, 5)
    for seed in range(10):
        with trace_of(random_prompts(np.random.default_rng(seed), n=40)) as trace:
            greedy = Clairvoyant(40, model, partings(trace))
            for index, request in enumerate(trace):
                greedy.serve(index, request)
                points = greedy._points.values()
                rows = {
                    block: end - start
                    for point in points
                    for block, start, end in zip(
                        point.blocks, [0, *point.ends], point.ends, strict=False
                    )
                }
                row_bytes = 0 if family is Family.RECURRENT else sum(rows.values())
                assert greedy.used_bytes == 5 * len(points) + row_bytes <= 40


def test_with_room_for_all_the_clairvoyant_saves_all_that_is_shared() -> None:
    for seed in range(10):
        with trace_of(random_prompts(np.random.default_rng(seed), n=40)) as trace:
            most = bound(trace, capacity_bytes=10**9).reused_tokens
            found = clairvoyant(trace, capacity_bytes=10**9, model=HYBRID)
            assert found.reused_tokens == most
            small = clairvoyant(trace, capacity_bytes=50, model=HYBRID).reused_tokens
            assert small <= bound(trace, capacity_bytes=50).reused_tokens


def test_only_families_with_checkpoints_need_a_clairvoyant() -> None:
    with blocks_trace([1], [1]) as trace:
        with pytest.raises(InvalidValue, match="attention family needs no checkpoints"):
            clairvoyant(trace, capacity_bytes=1, model=Model())
        with pytest.raises(InvalidValue, match="0 to 1 requests, not 2"):
            clairvoyant(trace, capacity_bytes=1, model=HYBRID, warmup=2)
