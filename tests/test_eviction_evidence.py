"""Oracles of eviction, in benchmarks/: by hand, against the bound, and on empty classes."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import evidence
from benchmarks.features import (
    FEATURES,
    SETS,
    Classes,
    FeatureSet,
    classes_of,
    octaves,
    past_of,
    shuffled,
)
from benchmarks.hindsight import PRIOR, oracle, tables, waits
from benchmarks.oracles import Dead, Future, Soon, Worth
from llamakeep.errors import InvalidValue
from llamakeep.policy.survival import EDGES, N_BUCKETS, hit_density
from llamakeep.simulate.bound import bound
from llamakeep.simulate.replay import replay
from llamakeep.simulate.trace import NEVER, Trace, open_trace
from tests.simulate_tools import put_lines, random_prompts, trace_of

BLOCK = 8
"""A tree resumes at multiples of 8 tokens."""
TAIL = 1_000_000


def write(path: Path, requests: Sequence[Sequence[int]], times: Sequence[float] = ()) -> Path:
    """Requests of full blocks, by their ids; a tail behind each, so that all can be reused."""
    return put_lines(
        path,
        *(
            {
                "timestamp": times[number] if times else float(number),
                "block_size": BLOCK,
                "hash_ids": [*ids, TAIL + number],
                "block_tokens": [*[BLOCK] * len(ids), 2],
                "input_length": BLOCK * len(ids) + 2,
                "output_length": 1,
            }
            for number, ids in enumerate(requests)
        ),
    )


def trace_with(requests: Sequence[Sequence[int]], times: Sequence[float] = ()) -> Trace:
    with tempfile.TemporaryDirectory() as directory:
        return open_trace(write(Path(directory) / "t.jsonl", requests, times))


def hits(trace: Trace, policy: Any, n_blocks: int) -> int:
    found = replay(trace, capacity_bytes=n_blocks * BLOCK, policy=policy)
    return found.reused_tokens // BLOCK


def prefixes(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """An id for each prefix of each prompt."""
    ids: dict[tuple[int, ...], int] = {}
    return [
        [ids.setdefault(tuple(prompt[: end + 1]), len(ids)) for end in range(len(prompt))]
        for prompt in prompts
    ]


def random_requests(seed: int) -> list[list[int]]:
    return prefixes(random_prompts(np.random.default_rng(seed), n=50, longest=10))


def two_kinds(n: int = 600, seed: int = 3) -> list[list[int]]:
    """Prompts of two blocks that come again after a while, among ones of six that never do."""
    rng = np.random.default_rng(seed)
    again = [[2 * at, 2 * at + 1] for at in range(12)]
    return [
        again[rng.integers(len(again))]
        if number % 3 == 0
        else list(range(100 + 6 * number, 106 + 6 * number))
        for number in range(n)
    ]


# -- oracles of the future -----------------------------------------------------------------------


def test_the_future_of_a_trace() -> None:
    with trace_with([[5, 6], [7], [], [5, 9]]) as trace:
        future = Future(trace)
        assert (future.n_requests, future.n_blocks, future.block_tokens) == (4, 4, BLOCK)
        assert future.blocks.tolist() == [0, 1, 2, 0, 3]
        assert future.owners.tolist() == [0, 0, 1, 3, 3]
        assert future.depths.tolist() == [0, 1, 0, 0, 1]
        assert future.depth_of == [0, 1, 0, 1]
        assert future.next_uses.tolist() == [3, NEVER, NEVER, NEVER, NEVER]
        assert future.times.tolist() == [0.0, 1.0, 2.0, 3.0]
        assert future.blocks[future.uses_of(3)].tolist() == [0, 3]


def test_tails_that_are_kept_have_no_future() -> None:
    with trace_of([[1, 2], [1, 2, 3]]) as trace, pytest.raises(InvalidValue, match="tails"):
        Future(trace)


def test_an_oracle_of_another_trace_is_found_out() -> None:
    with trace_with([[1], [2]]) as trace, trace_of([[1] * 9, [2] * 9]) as other:
        policy = Dead(Future(trace))
        with pytest.raises(RuntimeError, match="9 tokens is of no full block"):
            replay(other, capacity_bytes=99, policy=policy)


def test_dead_by_hand() -> None:
    with trace_with([[1], [2], [3], [1], [2]]) as trace:
        future = Future(trace)
        assert hits(trace, "lru", 2) == 0  # 3 displaces 1, 1 displaces 2
        assert hits(trace, Dead(future), 2) == 1  # 3 displaces 1, 1 displaces 3
        assert hits(trace, Dead(future, selective=True), 2) == 2  # 3 is not kept
        assert hits(trace, Soon(future, selective=True), 2) == 2


def test_soon_by_hand() -> None:
    with trace_with([[1], [2], [3], [1], [3], [2]]) as trace:
        future = Future(trace)
        assert hits(trace, Dead(future), 2) == 1  # 3 displaces 1, and 1 then displaces 2
        assert hits(trace, Soon(future), 2) == 2  # 3 displaces 2
        assert hits(trace, Soon(future, selective=True), 2) == 2
        assert bound(trace, capacity_bytes=2 * BLOCK).reused_tokens == 2 * BLOCK


def test_leaves_go_before_what_they_hang_off() -> None:
    with trace_with([[1, 2], [3], [1, 2]]) as trace:
        assert hits(trace, Soon(Future(trace)), 2) == 1  # 3 displaces 2, which hangs off 1


def test_oracles_save_no_more_than_the_bound_and_refusing_soon_nearly_that() -> None:
    soon = lru = most = 0
    for seed in range(10):
        with trace_with(random_requests(seed)) as trace:
            future = Future(trace)
            for n_blocks in (12, 24):
                best = bound(trace, capacity_bytes=n_blocks * BLOCK).reused_tokens // BLOCK
                for kind in (Dead, Soon):
                    for selective in (False, True):
                        found = hits(trace, kind(future, selective=selective), n_blocks)
                        assert found <= best
                soon, most = soon + found, most + best
                lru += hits(trace, "lru", n_blocks)
    assert lru < 0.8 * most
    assert soon > 0.99 * most


# -- what is known of the past -------------------------------------------------------------------


def test_features_by_hand() -> None:
    # 1 2 / 1 2 3 goes on / 1 4 parts from it / 1 2 3 again
    with trace_with([[1, 2], [1, 2, 3], [1, 4], [1, 2, 3]], [0.0, 2.0, 5.0, 9.0]) as trace:
        past = past_of(Future(trace))
    assert past.turns.tolist() == [1, 1, 2, 2, 2, 3, 1, 4, 3, 3]
    assert past.hits.tolist() == [0, 0, 1, 1, 0, 2, 0, 3, 2, 1]
    assert past.gaps_s.tolist() == [-1, -1, 2, 2, 2, 3, -1, 4, 7, 7]
    assert past.children.tolist() == [1, 0, 1, 1, 0, 2, 0, 2, 1, 0]
    assert past.shared.tolist() == [0, 0, 0, 0, 0, 1, 0, 1, 0, 0]
    assert past.to_end.tolist() == [1, 0, 2, 1, 0, 1, 0, 2, 1, 0]
    assert past.depths.tolist() == [0, 1, 0, 1, 2, 0, 1, 0, 1, 2]
    assert past.lengths.tolist() == [2, 2, 3, 3, 3, 2, 2, 3, 3, 3]
    with trace_with([[1, 2, 3], [1, 2, 4]]) as trace:
        assert past_of(Future(trace)).shared.tolist() == [0, 0, 0, 1, 1, 0]


def test_classes_of_features() -> None:
    assert octaves(4, np.array([0.5, 1, 2, 3, 4, 8, 99])).tolist() == [0, 0, 1, 1, 2, 3, 3]
    with trace_with([[1, 2], [1, 2, 3], [1, 4]], [0.0, 4.0, 68.0]) as trace:
        past = past_of(Future(trace))
    for name, feature in FEATURES.items():
        found = feature.of(past)
        assert found.shape == past.turns.shape, name
        assert 0 <= found.min() <= found.max() < feature.n_classes, name
    assert FEATURES["turns"].of(past).tolist() == [0, 0, 1, 1, 1, 2, 0]
    assert FEATURES["last gap"].of(past).tolist() == [0, 0, 5, 5, 5, 9, 0]
    both = classes_of(past, FeatureSet(("shared", "turns"), gap_power=0.5))
    assert (both.sizes, both.n_classes) == ((2, 5), 10)
    assert both.klasses.tolist() == [0, 0, 1, 1, 1, 5 + 2, 0]
    assert both.scales.tolist() == [1, 1, 0.5, 0.5, 0.5, 2, 1]
    assert both.name == "shared + turns / gap^0.5"


# -- tables --------------------------------------------------------------------------------------


def test_waits_by_hand() -> None:
    with trace_with([[1], [1, 2], [1]], [0.0, 3.0, 10.0]) as trace:
        future = Future(trace)
    uses, seconds, used = waits(future, 0, 3)
    assert uses.tolist() == [0, 1, 2, 3]
    assert seconds.tolist() == [3, 7, 7, 0]
    assert used.tolist() == [1, 1, 0, 0]
    uses, seconds, used = waits(future, 0, 2)  # of the third nothing is known
    assert (uses.tolist(), seconds.tolist(), used.tolist()) == ([0, 1, 2], [3, 0, 0], [1, 0, 0])
    for start, end in ((0, 4), (2, 2), (-1, 2)):
        with pytest.raises(InvalidValue, match="there are no requests"):
            waits(future, start, end)


def test_tables_by_hand() -> None:
    """Blocks of class 0 are used after 3 s, those of class 1 never within 10."""
    requests = [[1], [2], [1], [2], [9]]
    with trace_with(requests, [0.0, 0.5, 3.0, 3.5, 13.0]) as trace:
        future = Future(trace)
    classes = Classes("by hand", (2,), np.array([0, 0, 1, 1, 1]), np.ones(5))
    at_3, widths = np.searchsorted(EDGES, 3.0, side="right") - 1, [*np.diff(EDGES), EDGES[-1]]
    prior = np.zeros(N_BUCKETS)
    prior[at_3] = 2 / (4 + 1)  # of all four that came so far, and one more
    for klass, found in enumerate(tables(future, classes)):
        chances = prior.copy()
        chances[at_3] = ((2, 0)[klass] + PRIOR * prior[at_3]) / (2 + PRIOR)
        for at in range(N_BUCKETS):  # those that nobody waits in are the prior's
            assert chances[at] == 0 or at == at_3
        assert found == pytest.approx(hit_density(chances.tolist(), widths))


def test_what_is_used_together_can_count_as_one() -> None:
    """Three blocks of a prompt that come again, one that never does."""
    requests = [[1, 2, 3], [4], [1, 2, 3], [5]]
    with trace_with(requests, [0.0, 0.0, 3.0, 50.0]) as trace:
        future = Future(trace)
    classes = Classes("all", (1,), np.zeros(8, np.int64), np.ones(8))
    at_3, widths = np.searchsorted(EDGES, 3.0, side="right") - 1, [*np.diff(EDGES), EDGES[-1]]
    for by_case, n_used, n_all in ((False, 3, 7), (True, 1, 3)):
        chances = np.zeros(N_BUCKETS)
        prior = n_used / (n_all + 1)
        chances[at_3] = (n_used + PRIOR * prior) / (n_all + PRIOR)
        (found,) = tables(future, classes, by_case=by_case)
        assert found == pytest.approx(hit_density(chances.tolist(), widths))


def test_what_waits_is_worth_less_as_time_passes() -> None:
    """Class 0 is worth 5 for a second, then 1; class 1 is worth 2."""
    worths = [[1.0] * N_BUCKETS, [2.0] * N_BUCKETS]
    early = int(np.searchsorted(EDGES, 1.0, side="right") - 1)
    worths[0][:early] = [5.0] * early
    for gap_s, left in ((0.25, 1), (4.0, 2)):
        assert left_of_two([0, 1, 1], [1.0, 1.0, 1.0], worths, gap_s) == [left]


def test_scaled_time() -> None:
    """Of two blocks that are alike the one of slower time keeps its worth for longer."""
    worths = [[4.0] * 8 + [0.0] * (N_BUCKETS - 8)]
    # After twice that time the slow one is worth 1, the newcomer 0.5, the other one nothing.
    assert left_of_two([0, 0, 0], [4.0, 1.0, 8.0], worths, 2 * EDGES[8]) == [1]
    assert left_of_two([0, 0, 0], [1.0, 4.0, 8.0], worths, 2 * EDGES[8]) == [2]
    # Before it, both are at their best, and that of the fast one is four times as much.
    assert left_of_two([0, 0, 0], [1.0, 4.0, 2.0], worths, EDGES[8] / 2) == [1]
    assert left_of_two([0, 0, 0], [4.0, 1.0, 2.0], worths, EDGES[8] / 2) == [2]


def left_of_two(
    klasses: list[int], scales: list[float], worths: list[list[float]], gap_s: float
) -> list[int]:
    """Which of the blocks 1 and 2 are there still, once 3 has come after a while."""
    left = []
    for probe in (1, 2):
        times = [0.0, 0.1, 0.1 + gap_s, 99.0]
        with trace_with([[1], [2], [3], [probe]], times) as trace:
            policy = Worth(Future(trace), np.array([*klasses, 0]), np.array([*scales, 1.0]), worths)
            left += [probe] * bool(evidence.served(trace, policy, 2 * BLOCK)[-1])
    return left


# -- chance --------------------------------------------------------------------------------------


def test_classes_are_dealt_in_groups() -> None:
    with trace_with(random_requests(1)) as trace:
        future = Future(trace)
    classes = classes_of(past_of(future), SETS[1])
    dealt = shuffled(future, classes, np.random.default_rng(0))
    again = shuffled(future, classes, np.random.default_rng(0))

    def groups(of: Classes) -> dict[tuple[int, int, float], set[tuple[int, float]]]:
        found: dict[tuple[int, int, float], set[tuple[int, float]]] = {}
        theirs = zip(future.owners, classes.klasses, classes.scales, strict=True)
        for key, klass, scale in zip(theirs, of.klasses, of.scales, strict=True):
            found.setdefault(key, set()).add((int(klass), float(scale)))
        return found

    before, after = groups(classes), groups(dealt)
    assert all(len(labels) == 1 for labels in after.values())
    assert sorted(map(min, before.values())) == sorted(map(min, after.values()))
    assert (dealt.klasses != classes.klasses).any()
    assert (dealt.klasses == again.klasses).all()
    assert dealt.sizes == classes.sizes


def test_what_says_much_gains_much_and_classes_that_say_nothing_next_to_nothing() -> None:
    with trace_with(two_kinds()) as trace:
        future = Future(trace)
        past = past_of(future)
        n_blocks = 24
        lru = hits(trace, "lru", n_blocks)
        gap = bound(trace, capacity_bytes=n_blocks * BLOCK).reused_tokens // BLOCK - lru
        assert gap > 50

        def gain(classes: Classes) -> float:
            return (hits(trace, oracle(future, classes), n_blocks) - lru) / gap

        length = classes_of(past, FeatureSet(("prompt length",)))
        age = gain(classes_of(past, FeatureSet(("age alone",))))
        rng = np.random.default_rng(7)
        dealt = np.mean([gain(shuffled(future, length, rng)) for _ in range(4)])
        assert gain(length) > 0.5
        assert abs(dealt - age) < 0.15


# -- the command ---------------------------------------------------------------------------------


def test_it_replays_as_replay_does() -> None:
    with trace_with(random_requests(5)) as trace:
        for policy in ("lru", "slru"):
            found = evidence.served(trace, policy, 12 * BLOCK)
            assert found.size == trace.n_requests
            for warmup in (0, 30):
                told = replay(trace, capacity_bytes=12 * BLOCK, policy=policy, warmup=warmup)
                assert found[warmup:].sum() == told.reused_tokens
        most = evidence.possible(trace, 12 * BLOCK)
        assert most.sum() == bound(trace, capacity_bytes=12 * BLOCK).reused_tokens


def test_cases() -> None:
    everything = evidence.cases_of(["a.gz", "b@3%,1KiB"], 4)
    assert [case.capacity for case in everything] == ["2%", "5%", "10%", "20%", "3%", "1KiB"]
    assert everything[-1] == evidence.Case(Path("b"), "1KiB", 4, evidence.PARTS)


def test_it_measures_and_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "kinds.jsonl", two_kinds(120))
    arguments = [f"{path}@8%", "--deals", "1"]
    assert evidence.main([*arguments, "--json"]) == 0
    rows = [json.loads(each) for each in capsys.readouterr().out.splitlines()]
    assert {row["section"] for row in rows} == set(evidence.TITLES)
    names = {row["policy"] for row in rows}
    assert {"lru", "hazard", "dead", "soon, refusing", *FEATURES} <= names
    assert {features.name for features in SETS} <= names
    assert {"last gap, dealt anew", "last gap, dealt twice"} <= names
    by_name = {row["policy"]: row for row in rows if row["section"] == "policies"}
    assert (by_name["lru"]["closed_share"], by_name["bound"]["closed_share"]) == (0, 1)
    switching = by_name[f"best of them in each {evidence.N_WINDOWS}th of the trace"]
    best = max(by_name[name]["saved_share"] for name in evidence.EXPERTS)
    assert by_name["best of lru to hazard:guard=0"]["saved_share"] == best
    assert best <= switching["saved_share"]
    assert all(row["trace"] == "kinds.jsonl" and row["capacity"] == "8%" for row in rows)

    lines = list(evidence.write_tables([evidence.Row(**row) for row in rows]))
    assert [line for line in lines if line.startswith("###")] == [
        f"### {title}" for title in evidence.TITLES.values()
    ]
    assert "| | kinds 8% | mean |" in lines
    saved = 100 * by_name["bound"]["saved_share"]
    assert f"| bound | {saved:.1f} (100) | 100 |" in lines


def test_there_is_nothing_to_say_of_what_is_not_starved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "one.jsonl", [[1, 2]] * 4)
    assert evidence.main([f"{path}@100%"]) == 1
    assert "none of these capacities is starved" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        evidence.main([str(path), "--jobs", "0"])
