"""The prefix tree: what it finds, what it keeps, what it lets go.

Three kinds of tests. Some use states of one byte per token, the token itself, so that sizes are
easy to count and a wrong byte shows. Others serve prompts on a fake runtime of every memory
family and compare each answer with that of a cold run. State machines do the same in any order
and compare what the tree finds with a search of everything that was ever kept.
"""

from __future__ import annotations

import heapq
import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from types import FrameType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from llamakeep import radix
from llamakeep import tokens as tokens_module
from llamakeep import tree as tree_module
from llamakeep.checkpoints import deepest_resume, positions_to_take
from llamakeep.errors import IntegrityError, InvalidValue, StateError
from llamakeep.policy import Kept
from llamakeep.radix import walk
from llamakeep.runtime.base import Family, Traits
from llamakeep.runtime.fake import FakeRuntime
from llamakeep.sequence import KeptSequence
from llamakeep.spans import SpanNode
from llamakeep.states import Checkpoint, CheckpointRef, Match, Saved, Segment, SegmentRef
from llamakeep.stores.memory import MemoryStore
from llamakeep.tokens import IntArray, common_prefix
from llamakeep.tree import PrefixTree

PLAIN = Traits(Family.ATTENTION, segments=True, rolling=False)
ROLLING = Traits(Family.HYBRID, segments=True, rolling=True)
NO_ROWS = Traits(Family.RECURRENT, segments=False, rolling=True)


def array(*ids: int) -> IntArray:
    return np.array(ids, np.int32)


def random_tokens(n: int, seed: int) -> IntArray:
    """Return `n` tokens that fit into a byte."""
    return np.random.default_rng(seed).integers(0, 256, n).astype(np.int32)


def join(*parts: IntArray) -> IntArray:
    return np.concatenate(parts)


class Clock:
    """Seconds that pass when a test says so, and a little with every look."""

    def __init__(self) -> None:
        self._ticks = itertools.count(1)

    def __call__(self) -> float:
        return float(next(self._ticks))


# -- states of one byte per token ------------------------------------------------------------------


def byte_tree(
    capacity_bytes: int = 10_000,
    *,
    traits: Traits = PLAIN,
    segment_tokens: int = 16,
    **options: Any,
) -> PrefixTree:
    store = MemoryStore(capacity_bytes)
    options = {"clock": Clock()} | options
    return PrefixTree(store, traits, segment_tokens=segment_tokens, **options)


def keep(tree: PrefixTree, tokens: IntArray, reads: list[tuple[int, int]] | None = None) -> Saved:
    """Save `tokens`, noting which spans are read."""

    def read(start: int, end: int) -> Segment:
        if reads is not None:
            reads.append((start, end))
        return Segment(start, end, tokens[start:end].astype(np.uint8))

    saved = tree.save(tokens, segment_bytes=lambda n_tokens: n_tokens, read=read)
    tree.check()
    assert tree.store.used_bytes <= tree.store.capacity_bytes
    return saved


def keep_checkpoint(tree: PrefixTree, tokens: IntArray, n_bytes: int = 8) -> bool:
    """Save a checkpoint at the end of `tokens`; its bytes are that position."""
    data = np.full(n_bytes, tokens.size % 256, np.uint8)
    kept = tree.save_checkpoint(tokens, n_bytes=n_bytes, read=lambda: Checkpoint(tokens.size, data))
    tree.check()
    return kept


def keep_all(tree: PrefixTree, tokens: IntArray, *positions: int, n_bytes: int = 8) -> None:
    """Save `tokens` with checkpoints at `positions`, in that order."""
    for position in positions:
        assert not keep(tree, tokens[:position]).refused
        assert keep_checkpoint(tree, tokens[:position], n_bytes)


def never(*_: object) -> Any:
    raise AssertionError("something was read that nobody needs")


def depth(tree: PrefixTree, tokens: IntArray, **options: Any) -> int:
    """Return how many tokens can be restored, having restored them."""
    match = tree.match_prefix(tokens, **options)
    fetched = tree.fetch(tokens, match)
    assert fetched is not None
    tree.touch(tokens, match.n_tokens)
    segments, checkpoint = fetched
    if tree.traits.segments:
        stops = [*(segment.start for segment in segments[1:]), match.n_tokens]
        found = [
            token
            for segment, stop in zip(segments, stops, strict=bool(segments))
            for token in segment.data[: stop - segment.start].tolist()
        ]
        assert found == tokens[: match.n_tokens].tolist()
    if tree.traits.rolling and match.n_tokens:
        assert checkpoint is not None
        assert (checkpoint.data == match.n_tokens % 256).all()
    tree.check()
    return match.n_tokens


def stored_bytes(tree: PrefixTree) -> int:
    """Return the bytes of all blobs, by looking at each."""
    return sum(data.nbytes for name in tree.store if (data := tree.store.get(name)) is not None)


def node_at(tree: PrefixTree, tokens: IntArray) -> SpanNode:
    """Return the node that covers the last of `tokens`."""
    node: SpanNode = tree._path(tokens).nodes[-1][0]
    return node


# -- spans -----------------------------------------------------------------------------------------


def test_spans_end_at_multiples_and_the_last_anywhere() -> None:
    tree = byte_tree()
    reads: list[tuple[int, int]] = []
    tokens = random_tokens(50, 1)
    saved = keep(tree, tokens, reads)
    assert saved == Saved(50, read_bytes=50)
    assert reads == [(0, 16), (16, 32), (32, 48), (48, 50)]
    assert (len(tree), tree.store.used_bytes) == (4, 50)
    assert depth(tree, tokens) == 50


def test_what_diverges_is_cut_there_and_shared_tokens_are_kept_once() -> None:
    tree = byte_tree()
    reads: list[tuple[int, int]] = []
    trunk = random_tokens(50, 1)
    fork = join(trunk[:20], random_tokens(20, 2))
    keep(tree, trunk)
    assert keep(tree, fork, reads) == Saved(40, read_bytes=20)
    assert reads == [(20, 32), (32, 40)]
    assert tree.store.used_bytes == 50 + 20
    assert depth(tree, trunk) == 50
    assert depth(tree, fork) == 40
    assert depth(tree, fork[:26]) == 26  # in the middle of a segment
    assert depth(tree, join(fork[:30], random_tokens(9, 3))) == 30


def test_a_prompt_that_is_known_is_not_read_again() -> None:
    tree = byte_tree()
    tokens = random_tokens(50, 1)
    keep(tree, tokens)
    for known in (tokens, tokens[:20], tokens[:16], tokens[:0]):
        saved = tree.save(known, segment_bytes=never, read=never)
        assert saved == Saved(known.size)


def test_a_longer_tail_takes_the_place_of_a_shorter_one() -> None:
    tree = byte_tree()
    reads: list[tuple[int, int]] = []
    tokens = random_tokens(70, 1)
    keep(tree, tokens[:20])
    assert keep(tree, tokens[:30], reads) == Saved(30, read_bytes=14, reread_bytes=4)
    assert keep(tree, tokens, reads) == Saved(70, read_bytes=16 + 38, reread_bytes=14)
    assert reads == [(16, 30), (16, 32), (32, 48), (48, 64), (64, 70)]
    assert (len(tree), tree.store.used_bytes) == (5, 70)
    assert depth(tree, tokens) == 70


def test_a_tail_that_ends_at_a_multiple_is_not_read_again() -> None:
    tree = byte_tree()
    reads: list[tuple[int, int]] = []
    tokens = random_tokens(40, 1)
    keep(tree, tokens[:32])
    assert keep(tree, tokens, reads) == Saved(40, read_bytes=8)
    assert reads == [(32, 40)]


def test_what_hangs_off_a_tail_survives_its_growth() -> None:
    tree = byte_tree()
    trunk = random_tokens(31, 1)
    inside = join(trunk[:18], array(trunk[18] ^ 1), random_tokens(10, 2))
    at_end = join(trunk[:20], array(trunk[20] ^ 1), random_tokens(10, 3))
    keep(tree, trunk[:20])
    keep(tree, inside)
    keep(tree, at_end)
    keep(tree, trunk)
    for tokens in (inside, at_end, trunk):
        assert depth(tree, tokens) == tokens.size
    assert tree.store.used_bytes == 31 + 11 + 11
    longer = join(at_end, random_tokens(30, 4))
    keep(tree, longer)
    assert depth(tree, longer) == longer.size


def test_a_branch_that_starts_in_a_span_grows_by_its_own_part_only() -> None:
    tree = byte_tree()
    reads: list[tuple[int, int]] = []
    trunk = random_tokens(32, 1)
    fork = join(trunk[:20], array(trunk[20] ^ 1), random_tokens(20, 2))
    keep(tree, trunk)
    keep(tree, fork[:24])
    assert keep(tree, fork, reads).reread_bytes == 4
    assert reads == [(20, 32), (32, 41)]


def test_fewer_bytes_than_a_segment_are_read_again_whatever_the_steps() -> None:
    tree = byte_tree()
    tokens = random_tokens(300, 1)
    rng = np.random.default_rng(0)
    n_tokens = 0
    while n_tokens < tokens.size:
        before, n_tokens = n_tokens, min(tokens.size, n_tokens + int(rng.integers(1, 40)))
        saved = keep(tree, tokens[:n_tokens])
        assert saved.reread_bytes < tree.segment_tokens
        assert saved.read_bytes == n_tokens - before + saved.reread_bytes
        assert tree.store.used_bytes == n_tokens


def test_one_token_per_span() -> None:
    tree = byte_tree(segment_tokens=1)
    reads: list[tuple[int, int]] = []
    tokens = random_tokens(5, 1)
    keep(tree, tokens, reads)
    assert reads == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]
    assert depth(tree, join(tokens[:3], array(tokens[3] ^ 1))) == 3


@pytest.mark.parametrize(
    ("traits", "options", "said"),
    [
        (PLAIN, {"segment_tokens": 0}, "segment_tokens must be 1 or more, not 0"),
        (
            Traits(Family.SWA, segments=True, rolling=False, dense=True, n_swa=32),
            {"segment_tokens": 33},
            "segment_tokens must be 1 to 32, not 33",
        ),
        (PLAIN, {"max_checkpoints": -1}, "max_checkpoints must be 0 or more, not -1"),
        (PLAIN, {"policy": "newest"}, "unknown policy 'newest'; known: gdsf, hazard, lru"),
    ],
)
def test_bad_arguments_are_named(traits: Traits, options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidValue, match=said):
        byte_tree(traits=traits, **options)


# -- matching --------------------------------------------------------------------------------------


def test_limit_and_align_hold() -> None:
    tree = byte_tree()
    tokens = random_tokens(50, 1)
    keep(tree, tokens)
    assert depth(tree, tokens, limit=37) == 37
    assert depth(tree, tokens, limit=37, align=8) == 32
    assert depth(tree, tokens, align=8) == 48
    assert depth(tree, tokens, limit=0) == 0
    assert depth(tree, tokens, limit=1000) == 50
    assert depth(tree, tokens[:7], align=8) == 0
    assert tree.match_prefix(tokens, limit=20).shared_tokens == 50


def test_a_match_names_what_is_needed_and_no_more() -> None:
    tree = byte_tree()
    tokens = random_tokens(50, 1)
    keep(tree, tokens)
    spans = [(ref.start, ref.end) for ref in tree.match_prefix(tokens, limit=32).segments]
    assert spans == [(0, 16), (16, 32)]
    assert tree.match_prefix(tokens, limit=0).segments == ()
    assert tree.match_prefix(random_tokens(9, 9)) == Match(0, 0)


def test_matching_changes_nothing() -> None:
    tree = byte_tree(traits=ROLLING, capacity_bytes=60)
    old, new = random_tokens(20, 1), random_tokens(20, 2)
    keep_all(tree, old, 20)
    keep_all(tree, new, 20)
    entries, counters = tree.entries(), repr(tree.counters)
    for _ in range(3):
        tree.match_prefix(old)
        tree.checkpoint_positions(old)
    assert (tree.entries(), repr(tree.counters)) == (entries, counters)
    keep_all(tree, random_tokens(20, 3), 20)
    assert depth(tree, old) == 0  # looking at it was no use of it


def test_fault_12_a_partial_match_counts_only_where_the_state_can_be_cut_back() -> None:
    for traits, expected in ((PLAIN, [3, 1]), (ROLLING, [0, 0]), (NO_ROWS, [0, 0])):
        tree = byte_tree(traits=traits)
        keep_all(tree, array(1, 2, 3, 4), *([4] if traits.rolling else []))
        keep(tree, array(1, 2, 3, 4))
        keep_all(tree, array(1, 9, 9, 9), *([4] if traits.rolling else []))
        keep(tree, array(1, 9, 9, 9))
        found = [depth(tree, array(1, 2, 3)), depth(tree, array(1, 7, 3))]
        assert found == expected
        assert depth(tree, array(1, 2, 3, 4)) == 4
        keep_all(tree, array(1, 2, 3, 4), *([2] if traits.rolling else []))
        assert depth(tree, array(1, 2, 3)) == (2 if traits.rolling else 3)


def test_fault_2_a_checkpoint_past_the_common_prefix_is_never_found() -> None:
    tree = byte_tree(traits=ROLLING)
    tokens = random_tokens(60, 1)
    keep_all(tree, tokens, 20, 40, 60)
    for n_tokens in range(1, 61):
        assert depth(tree, tokens[:n_tokens]) == n_tokens // 20 * 20
        changed = tokens.copy()
        changed[n_tokens - 1] ^= 1
        assert depth(tree, changed) == (n_tokens - 1) // 20 * 20


def test_a_checkpoint_that_was_taken_along_another_branch_is_not_its_own() -> None:
    """One node holds positions past the point where a prompt leaves it."""
    tree = byte_tree(traits=ROLLING, segment_tokens=64)
    tokens = random_tokens(30, 1)
    keep_all(tree, tokens, 20, 30)
    fork = join(tokens[:15], tokens[15:20] ^ 1)
    assert keep_checkpoint(tree, fork) is False  # its spans are missing
    assert tree.checkpoint_positions(fork) == []
    keep_all(tree, fork, 20)
    assert depth(tree, fork) == 20
    assert depth(tree, tokens) == 30


def test_fault_34_three_times_is_one_entry() -> None:
    tree = byte_tree(segment_tokens=64)
    for _ in range(3):
        keep(tree, random_tokens(40, 1))
        assert (tree.store.used_bytes, len(tree), len(tree.store)) == (40, 1, 1)
    rolling = byte_tree(traits=ROLLING, segment_tokens=64)
    for _ in range(3):
        keep_all(rolling, random_tokens(40, 1), 40, n_bytes=10)
        assert (rolling.store.used_bytes, len(rolling.store)) == (50, 2)
    assert rolling.save_checkpoint(random_tokens(40, 1), n_bytes=10, read=never)
    assert len(tree.entries()) == len(rolling.entries()) == 1


def test_fault_36_a_hit_makes_no_second_copy() -> None:
    tree = byte_tree(traits=ROLLING)
    tokens = random_tokens(40, 1)
    keep_all(tree, tokens, 40)
    fetched = tree.fetch(tokens, tree.match_prefix(tokens))
    assert fetched is not None
    segments, checkpoint = fetched
    assert checkpoint is not None
    buffers = [*(segment.data for segment in segments), checkpoint.data]
    assert len(buffers) == len(tree.store) == 4
    for name in tree.store:
        held = tree.store.get(name)
        assert held is not None
        assert sum(np.shares_memory(held, buffer) for buffer in buffers) == 1
        assert not held.flags.writeable


# -- room ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("segment_tokens", [10, 60])
@pytest.mark.parametrize("in_between", [True, False])
def test_fault_19_what_is_used_survives(segment_tokens: int, in_between: bool) -> None:
    """Capacity 100; A (60) is hit five times; then come B, C and D, of 20 each.

    Used again in between, A survives whole. When B, C and D come in a row, A is the least recently
    used when D needs room. Leaves go first, so it loses no more than its last spans: as many as
    the room takes, here 20 tokens of 60. In one span it has only itself to lose.
    """
    tree = byte_tree(100, segment_tokens=segment_tokens)
    a = random_tokens(60, 0)
    keep(tree, a)
    for _ in range(5):
        assert depth(tree, a) == 60
    for seed in (1, 2, 3):
        keep(tree, random_tokens(20, seed))
        if in_between:
            assert depth(tree, a) == 60
    lost = 0 if in_between else 20 if segment_tokens == 10 else 60
    assert depth(tree, a) == 60 - lost
    assert depth(tree, random_tokens(20, 3)) == 20


def test_fault_25_what_can_never_fit_evicts_nothing() -> None:
    tree = byte_tree(100, segment_tokens=128)
    three = [random_tokens(30, seed) for seed in range(3)]
    for tokens in three:
        keep(tree, tokens)
    saved = tree.save(random_tokens(101, 9), segment_bytes=lambda n: n, read=never)
    assert saved == Saved(0, refused="101 bytes of tokens 0 to 101 do not fit")
    assert tree.counters.refused_segments == 1
    assert tree.counters.evicted_bytes == 0
    assert [depth(tree, tokens) for tokens in three] == [30, 30, 30]


def test_fault_25_a_prompt_longer_than_the_capacity_evicts_nothing() -> None:
    """Of its prefix, what finds free room is kept; the others stay."""
    tree = byte_tree(126)
    three = [random_tokens(30, seed) for seed in range(3)]
    for tokens in three:
        keep(tree, tokens)
    long = random_tokens(127, 9)
    saved = keep(tree, long)
    assert (saved.n_tokens, saved.refused) == (32, "127 bytes of tokens 0 to 127 do not fit")
    assert [depth(tree, tokens) for tokens in (*three, long)] == [30, 30, 30, 32]
    assert keep(tree, long[:126]).n_tokens == 126  # this one fits, and takes their place
    assert [depth(tree, tokens) for tokens in three] == [0, 0, 0]


def test_fault_25_with_a_rolling_part_a_prompt_that_does_not_fit_whole_evicts_nothing() -> None:
    tree = byte_tree(150, traits=ROLLING)
    three = [random_tokens(30, seed) for seed in range(3)]
    for tokens in three:
        keep_all(tree, tokens, 30)
    saved = tree.save(random_tokens(151, 9), segment_bytes=lambda n: n, read=never)
    assert saved == Saved(0, refused="151 bytes of tokens 0 to 151 do not fit")
    assert tree.counters.refused_segments == 1
    assert [depth(tree, tokens) for tokens in three] == [30, 30, 30]
    longer = join(three[0], random_tokens(130, 9))
    with tree.pin(three[1]):  # 114 of 150 bytes could be had, 38 of these are its own path's
        saved = tree.save(longer, segment_bytes=lambda n: n, read=never)
    assert saved.refused == "130 bytes of tokens 30 to 160 do not fit"
    assert [depth(tree, tokens) for tokens in three] == [30, 30, 30]
    assert keep(tree, random_tokens(150, 8)).refused == ""


def test_nothing_is_evicted_in_vain_for_what_pins_leave_no_room_for() -> None:
    tree = byte_tree(100, segment_tokens=128)
    held, other = random_tokens(60, 1), random_tokens(30, 2)
    keep(tree, held)
    keep(tree, other)
    with tree.pin(held):
        saved = tree.save(random_tokens(41, 3), segment_bytes=lambda n: n, read=never)
        assert saved.refused
        assert depth(tree, other) == 30
        assert keep(tree, random_tokens(40, 3)).refused == ""
        assert depth(tree, other) == 0
        assert depth(tree, held) == 60


@pytest.mark.parametrize("traits", [PLAIN, ROLLING])
def test_fault_28_room_is_made_before_anything_is_read(traits: Traits) -> None:
    tree = byte_tree(100, traits=traits, segment_tokens=128)
    assert isinstance(tree.store, MemoryStore)
    keep(tree, random_tokens(90, 1))
    seen = []

    def read(start: int, end: int) -> Segment:
        seen.append((stored_bytes(tree), tree.store.used_bytes))
        return Segment(start, end, np.zeros(end - start, np.uint8))

    tree.save(random_tokens(60, 2), segment_bytes=lambda n: n, read=read)
    assert seen == [(0, 60)]  # nothing else is held, and its own bytes are counted already
    assert tree.store.peak_bytes == 90
    tree.check()


def test_a_growing_tail_is_counted_twice_while_it_is_read() -> None:
    tree = byte_tree(50, segment_tokens=64)
    tokens = random_tokens(40, 1)
    keep(tree, tokens[:20])
    assert keep(tree, tokens[:30]).refused == ""  # 20 and 30 are there at once
    assert isinstance(tree.store, MemoryStore)
    assert tree.store.peak_bytes == 50
    saved = tree.save(tokens, segment_bytes=lambda n: n, read=never)
    assert saved.refused == "40 bytes of tokens 0 to 40 do not fit"
    assert depth(tree, tokens) == 30


def test_fault_29_checkpoints_are_counted() -> None:
    tree = byte_tree(1000, traits=ROLLING, segment_tokens=64)
    tokens = random_tokens(40, 1)
    keep_all(tree, tokens, 40, 10, 20, 30, 35, n_bytes=30)
    assert tree.store.used_bytes == stored_bytes(tree) == 190
    (entry,) = tree.entries()
    assert entry.path_bytes == 190


def test_fault_30_checkpoints_that_outgrow_the_capacity_are_refused() -> None:
    tree = byte_tree(100, traits=ROLLING, segment_tokens=64)
    tokens = random_tokens(40, 1)
    keep(tree, tokens)
    assert [keep_checkpoint(tree, tokens[:n], 30) for n in (40, 10, 20, 30)] == [
        True,
        True,
        False,
        False,
    ]
    assert tree.counters.refused_checkpoints == 2
    assert tree.store.used_bytes == 100
    assert depth(tree, tokens) == 40


@pytest.mark.parametrize("traits", [PLAIN, ROLLING, NO_ROWS])
def test_fault_37_a_capacity_of_zero_keeps_nothing(traits: Traits) -> None:
    tree = byte_tree(0, traits=traits)
    tokens = random_tokens(40, 1)
    saved = tree.save(tokens, segment_bytes=lambda n: n, read=never)
    assert bool(saved.refused) == traits.segments
    if traits.rolling:
        assert tree.save_checkpoint(tokens, n_bytes=8, read=never) is False
    assert depth(tree, tokens) == 0
    assert len(tree) == 0


def test_fault_32_cleared_is_zero() -> None:
    tree = byte_tree(traits=ROLLING)
    for namespace in (b"a", b"b"):
        tree.namespace = namespace
        keep_all(tree, random_tokens(40, 1), 40)
    tree.clear()
    assert (len(tree), len(tree.store), tree.store.used_bytes) == (0, 0, 0)
    assert depth(tree, random_tokens(40, 1)) == 0
    keep_all(tree, random_tokens(40, 1), 40)
    assert depth(tree, random_tokens(40, 1)) == 40


def test_eviction_takes_leaves_first_so_that_what_is_kept_can_be_reached() -> None:
    tree = byte_tree(200)
    trunk = random_tokens(100, 1)
    forks = [join(trunk[:n], random_tokens(30, n)) for n in (40, 70)]
    for tokens in (trunk, *forks):
        keep(tree, tokens)
    prompts = [trunk, *forks]
    seen = [depth(tree, tokens) for tokens in prompts]
    for _ in range(20):
        assert tree._evict_one()
        tree.check()
        now = [depth(tree, tokens) for tokens in prompts]
        assert all(after <= before for after, before in zip(now, seen, strict=True))
        reached = {id(node) for tokens in prompts for node, _ in tree._path(tokens).nodes}
        assert {id(node) for node in tree._nodes()} <= reached
        seen = now
        if not len(tree):
            break
    assert seen == [0, 0, 0]
    assert tree.store.used_bytes == 0
    assert tree._evict_one() is False


def test_shared_roots_do_not_die_first() -> None:
    tree = byte_tree(100)
    system = random_tokens(48, 1)
    for seed in range(2, 30):
        keep(tree, join(system, random_tokens(16, seed)))
        assert depth(tree, system) == 48


@pytest.mark.parametrize("traits", [PLAIN, ROLLING])
def test_what_is_pinned_survives_any_pressure(traits: Traits) -> None:
    tree = byte_tree(120, traits=traits)
    held = random_tokens(40, 1)
    keep_all(tree, held, *([20, 40] if traits.rolling else []))
    keep(tree, held)
    # The pin holds the path, also where the prompt goes on in the middle of a span.
    with tree.pin(join(held[:35], random_tokens(9, 2))), tree.pin(held):
        for seed in range(3, 20):
            tokens = random_tokens(50, seed)
            keep(tree, tokens)
            keep_checkpoint(tree, tokens)
            assert tree.match_prefix(held).n_tokens == 40
    keep(tree, random_tokens(120, 99))
    assert tree.match_prefix(held).n_tokens == 0  # and not a moment longer


def test_a_pin_ends_when_its_block_raises() -> None:
    tree = byte_tree(40)
    tokens = random_tokens(40, 1)
    keep(tree, tokens)
    with pytest.raises(ZeroDivisionError), tree.pin(tokens):
        raise ZeroDivisionError
    assert keep(tree, random_tokens(40, 2)).refused == ""


def test_nothing_is_cleared_while_pinned() -> None:
    tree = byte_tree()
    tokens = random_tokens(40, 1)
    keep(tree, tokens)
    with tree.pin(tokens[:5]):
        with pytest.raises(InvalidValue, match="in use"):
            tree.clear()
        assert depth(tree, tokens) == 40
    with tree.pin(random_tokens(5, 9)):  # holds nothing
        tree.clear()
    assert len(tree) == 0


def test_a_read_that_fails_leaves_what_was_there() -> None:
    tree = byte_tree(traits=ROLLING)
    tokens = random_tokens(60, 1)
    keep_all(tree, tokens, 20)

    def read(start: int, end: int) -> Segment:
        if end > 40:
            raise StateError("no more rows")
        return Segment(start, end, tokens[start:end].astype(np.uint8))

    with pytest.raises(StateError, match="no more rows"):
        tree.save(tokens, segment_bytes=lambda n: n, read=read)
    tree.check()
    assert tree.store.used_bytes == 32 + 8
    assert depth(tree, tokens) == 20

    def read_checkpoint() -> Checkpoint:
        raise StateError("no checkpoint")

    with pytest.raises(StateError, match="no checkpoint"):
        tree.save_checkpoint(tokens[:32], n_bytes=8, read=read_checkpoint)
    tree.check()
    assert depth(tree, tokens) == 20
    tree.clear()  # nothing stayed pinned


def test_a_read_of_another_size_is_an_error_and_not_kept() -> None:
    tree = byte_tree()
    short = Segment(0, 10, np.zeros(9, np.uint8))
    with pytest.raises(IntegrityError, match="9 bytes, 10 were announced"):
        tree.save(random_tokens(10, 1), segment_bytes=lambda n: n, read=lambda s, e: short)
    tree.check()
    assert len(tree) == 0


# -- policies --------------------------------------------------------------------------------------


class BiggestFirst:
    name = "biggest-first"

    def rank(self, kept: Kept, now: float) -> tuple[float, int]:
        return -kept.n_bytes, kept.sequence  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("policy", "survivors"),
    [("lru", [0, 2, 3]), ("oldest", [2, 3]), (BiggestFirst(), [0, 1, 3])],
    ids=["lru", "oldest", "object"],
)
def test_the_policy_says_what_goes_first(policy: Any, survivors: list[int]) -> None:
    tree = byte_tree(100, segment_tokens=64, policy=policy)
    sizes = [20, 25, 50, 30]
    prompts = [random_tokens(size, size) for size in sizes]
    for index, tokens in enumerate(prompts[:3]):
        keep(tree, tokens)
        if index == 1:
            assert depth(tree, prompts[0]) == 20  # the oldest is used
    keep(tree, prompts[3])
    expected = [size if index in survivors else 0 for index, size in enumerate(sizes)]
    assert [tree.match_prefix(tokens).n_tokens for tokens in prompts] == expected


def test_a_grown_tail_is_as_old_as_its_beginning() -> None:
    tree = byte_tree(100, segment_tokens=64, policy="oldest")
    first, second = random_tokens(30, 1), random_tokens(30, 2)
    keep(tree, first[:20])
    keep(tree, second)
    keep(tree, first)
    keep(tree, random_tokens(50, 3))
    assert [depth(tree, first), depth(tree, second)] == [0, 30]


def test_a_policy_object_is_asked_at_the_trees_own_time() -> None:
    times = []

    class Watch(BiggestFirst):
        def rank(self, kept: Kept, now: float) -> tuple[float, int]:
            times.append(now)
            return super().rank(kept, now)

    tree = byte_tree(20, policy=Watch(), clock=lambda: 17.0)
    keep(tree, random_tokens(16, 1))
    keep(tree, random_tokens(16, 2))
    assert set(times) == {17.0}


# -- checkpoints -----------------------------------------------------------------------------------


def test_too_many_checkpoints_are_thinned_out_where_least_is_lost() -> None:
    tree = byte_tree(traits=ROLLING, max_checkpoints=3)
    tokens = random_tokens(90, 1)
    keep_all(tree, tokens, 10, 30, 35)
    keep_all(tree, tokens, 60)
    assert tree.checkpoint_positions(tokens) == [10, 30, 60]  # 35 was 5 after the one before it
    keep_all(tree, tokens, 61)
    assert tree.checkpoint_positions(tokens) == [30, 60, 61]  # never the deepest
    assert tree.counters.evicted_checkpoints == 2
    assert tree.store.used_bytes == 61 + 3 * 8


def test_the_newest_checkpoint_is_never_the_one_that_goes() -> None:
    tree = byte_tree(traits=ROLLING, max_checkpoints=1)
    tokens = random_tokens(60, 1)
    keep_all(tree, tokens, 20, 40)
    assert tree.checkpoint_positions(tokens) == [40]
    # The limit counts what lies before a new one: deeper ones belong to prompts that go on.
    keep_all(tree, tokens, 30)
    assert tree.checkpoint_positions(tokens) == [30, 40]
    keep_all(tree, tokens, 60)
    assert tree.checkpoint_positions(tokens) == [60]


def test_fault_23_thinning_out_keeps_coverage() -> None:
    tree = byte_tree(traits=ROLLING, max_checkpoints=4)
    tokens = random_tokens(90, 1)
    keep_all(tree, tokens, *range(10, 90, 10))
    positions = tree.checkpoint_positions(tokens)
    assert len(positions) == 4
    assert positions[-1] == 80
    assert 0 < depth(tree, tokens[:45]) < 45


def test_fault_24_a_long_answer_does_not_push_the_prompts_end_out() -> None:
    tree = byte_tree(traits=ROLLING, max_checkpoints=8)
    tokens = random_tokens(200, 1)
    keep_all(tree, tokens, 100, *range(110, 200, 8))
    assert depth(tree, tokens[:102]) == 100


def test_the_limit_counts_along_a_prompt_not_in_all() -> None:
    tree = byte_tree(traits=ROLLING, max_checkpoints=2)
    trunk = random_tokens(20, 1)
    forks = [join(trunk, random_tokens(20, seed)) for seed in range(2, 8)]
    for fork in forks:
        keep_all(tree, fork, 20, 40)
    assert all(tree.checkpoint_positions(fork) == [20, 40] for fork in forks)


@pytest.mark.parametrize("traits", [ROLLING, NO_ROWS])
def test_fault_66_without_checkpoints_nothing_is_read_or_kept(traits: Traits) -> None:
    tree = byte_tree(traits=traits, max_checkpoints=0)
    tokens = random_tokens(40, 1)
    keep(tree, tokens)
    assert tree.save_checkpoint(tokens, n_bytes=8, read=never) is False
    assert (len(tree), tree.store.used_bytes) == (0, 0)


def test_a_checkpoint_needs_its_spans() -> None:
    tree = byte_tree(traits=ROLLING)
    tokens = random_tokens(40, 1)
    assert tree.save_checkpoint(tokens, n_bytes=8, read=never) is False
    assert tree.save_checkpoint(tokens[:0], n_bytes=8, read=never) is False
    keep_all(tree, tokens[:30], 30)
    assert tree.save_checkpoint(tokens, n_bytes=8, read=never) is False
    assert depth(tree, tokens) == 30
    assert tree.counters.refused_checkpoints == 3


@pytest.mark.parametrize("traits", [ROLLING, NO_ROWS])
def test_spans_whose_checkpoint_is_refused_are_dropped(traits: Traits) -> None:
    tree = byte_tree(100, traits=traits)
    held = random_tokens(30, 1)
    keep_all(tree, held, 30)
    for seed in range(2, 12):
        tokens = join(held, random_tokens(20, seed))
        keep(tree, tokens)
        assert tree.save_checkpoint(tokens, n_bytes=101, read=never) is False
        tree.check()
        assert len(tree) == 2
    assert depth(tree, held) == 30


@pytest.mark.parametrize("traits", [ROLLING, NO_ROWS])
@pytest.mark.parametrize("capacity_bytes", [60, 100, 150])
def test_spans_that_lead_to_no_checkpoint_go_with_it(traits: Traits, capacity_bytes: int) -> None:
    tree = byte_tree(capacity_bytes, traits=traits)
    rng = np.random.default_rng(0)
    trunk = random_tokens(60, 1)
    for seed in range(80):
        tokens = join(trunk[: rng.integers(1, 60)], random_tokens(int(rng.integers(1, 30)), seed))
        for position in sorted({int(rng.integers(1, tokens.size + 1)), tokens.size}):
            if keep(tree, tokens[:position]).n_tokens == position:
                keep_checkpoint(tree, tokens[:position])
        leaves = [node for node in tree._nodes() if not node.branches]
        assert all(leaf.checkpoints for leaf in leaves)
    assert tree.counters.evicted_checkpoints > 5
    while tree._evict_one():
        tree.check()
    assert (len(tree), tree.store.used_bytes) == (0, 0)


def test_the_last_checkpoint_of_a_span_takes_the_spans_above_it_along() -> None:
    tree = byte_tree(traits=ROLLING)
    tokens = random_tokens(80, 1)
    keep_all(tree, tokens, 20, 80)
    node = node_at(tree, tokens)
    tree._drop_checkpoint(node.checkpoints[80])
    tree.check()
    assert tree.checkpoint_positions(tokens) == [20]
    assert [entry.n_tokens for entry in tree.entries()] == [32]
    assert tree.store.used_bytes == 32 + 8


# -- blobs that are lost, matches that are old -----------------------------------------------------


def test_fault_68_a_blob_that_is_gone_is_noticed_and_forgotten() -> None:
    for lost in range(4):
        tree = byte_tree()
        tokens = random_tokens(60, 1)
        fork = join(tokens[:10], random_tokens(9, 2))
        keep(tree, tokens)
        keep(tree, fork)
        match = tree.match_prefix(tokens)
        tree.store.delete(match.segments[lost].name)
        assert tree.fetch(tokens, match) is None
        tree.check()
        assert tree.counters.lost_blobs == 1
        assert tree.counters.hits == 0
        assert depth(tree, tokens) == lost * 16
        assert depth(tree, fork) == (19 if lost else 0)
        assert keep(tree, tokens).refused == ""
        assert depth(tree, tokens) == 60


def test_fault_68_a_checkpoint_that_is_gone_costs_only_itself() -> None:
    tree = byte_tree(traits=ROLLING)
    tokens = random_tokens(60, 1)
    keep_all(tree, tokens, 20, 60)
    match = tree.match_prefix(tokens)
    assert match.checkpoint is not None
    tree.store.delete(match.checkpoint.name)
    assert tree.fetch(tokens, match) is None
    tree.check()
    assert depth(tree, tokens) == 20
    assert keep_checkpoint(tree, tokens)
    assert depth(tree, tokens) == 60


def test_fault_5_a_damaged_blob_is_a_miss_in_a_verifying_store() -> None:
    store = MemoryStore(1000, verify=True)
    tree = PrefixTree(store, PLAIN, segment_tokens=16)
    tokens = random_tokens(40, 1)
    keep(tree, tokens)
    match = tree.match_prefix(tokens)
    data = store.get(match.segments[1].name)
    assert data is not None
    data.flags.writeable = True
    data[3] ^= 1
    assert tree.fetch(tokens, match) is None
    assert depth(tree, tokens) == 16
    keep(tree, tokens)
    assert depth(tree, tokens) == 40


def test_what_a_runtime_refused_is_forgotten() -> None:
    tree = byte_tree(traits=ROLLING)
    tokens = random_tokens(40, 1)
    keep_all(tree, tokens, 20, 40)
    keep_all(tree, random_tokens(30, 2), 30)
    match = tree.match_prefix(tokens)
    tree.reject(tokens, match)  # nobody knows what was wrong: the deepest goes
    tree.check()
    assert depth(tree, tokens) == 20
    fetched = tree.fetch(tokens, match)
    assert fetched is None  # it is stale
    match = tree.match_prefix(tokens)
    fetched = tree.fetch(tokens, match)
    assert fetched is not None
    with tree.pin(tokens):
        tree.reject(tokens, match, fetched[0][0])
        assert depth(tree, tokens) == 20  # what is pinned stays
    tree.reject(tokens, match, fetched[0][0])
    tree.check()
    assert depth(tree, tokens) == 0
    assert depth(tree, random_tokens(30, 2)) == 30
    recurrent = byte_tree(traits=NO_ROWS)
    keep_all(recurrent, tokens, 20, 40)
    recurrent.reject(tokens, recurrent.match_prefix(tokens))
    recurrent.check()
    assert depth(recurrent, tokens) == 20


def test_a_match_that_a_longer_tail_outdated_costs_nothing() -> None:
    tree = byte_tree(traits=ROLLING)
    tokens = random_tokens(30, 1)
    keep_all(tree, tokens, 20)
    old = tree.match_prefix(tokens)
    keep_all(tree, tokens, 30)
    assert tree.fetch(tokens, old) is None  # its tail is gone
    assert tree.counters.lost_blobs == 0
    assert depth(tree, tokens) == 30  # but not what took its place
    tree.reject(tokens, Match(20, 20, old.segments[1:]))
    assert depth(tree, tokens) == 30


def test_a_match_that_eviction_outdated_costs_nothing() -> None:
    tree = byte_tree(50)
    old, new = random_tokens(40, 1), random_tokens(40, 2)
    keep(tree, old)
    match = tree.match_prefix(old)
    keep(tree, new)
    assert tree.fetch(old, match) is None
    assert tree.counters.lost_blobs == 0
    assert depth(tree, new) == 40


# -- namespaces ------------------------------------------------------------------------------------


def test_faults_4_and_47_namespaces_share_the_budget_and_nothing_else() -> None:
    tree = byte_tree(100, traits=ROLLING)
    tokens = random_tokens(32, 1)
    tree.namespace = b"a"
    keep_all(tree, tokens, 32)
    tree.namespace = b"b"
    assert tree.match_prefix(tokens) == Match(0, 0)
    assert tree.checkpoint_positions(tokens) == []
    reads: list[tuple[int, int]] = []
    keep(tree, tokens, reads)
    assert reads == [(0, 16), (16, 32)]  # no name was shared either
    assert keep_checkpoint(tree, tokens)
    assert tree.store.used_bytes == 2 * 40
    keep_all(tree, random_tokens(32, 2), 32)  # evicts the oldest, whose it ever is
    assert depth(tree, tokens) == 32
    tree.namespace = b"a"
    assert depth(tree, tokens) == 0
    tree.check()


def test_a_pin_holds_in_its_own_namespace() -> None:
    tree = byte_tree(60)
    tokens = random_tokens(32, 1)
    tree.namespace = b"a"
    keep(tree, tokens)
    with tree.pin(tokens):
        tree.namespace = b"b"
        for seed in range(2, 6):
            keep(tree, random_tokens(28, seed))
        with pytest.raises(InvalidValue, match="in use"):
            tree.clear()
    tree.namespace = b"a"
    assert depth(tree, tokens) == 32


# -- what it says of itself ------------------------------------------------------------------------


def test_fault_61_entries_are_prompts_to_their_ends_newest_first() -> None:
    tree = byte_tree(traits=ROLLING)
    trunk = random_tokens(40, 1)
    inside = join(trunk[:20], random_tokens(10, 2))
    at_end = join(trunk, random_tokens(10, 3))
    keep_all(tree, trunk, 10, 25, 40)
    keep_all(tree, inside, 30)
    keep_all(tree, at_end, 50)
    assert depth(tree, inside) == 30
    entries = {entry.n_tokens: entry for entry in tree.entries()}
    assert [entry.n_tokens for entry in tree.entries()] == [30, 50]
    assert (entries[30].hits, entries[50].hits) == (1, 0)
    assert entries[30].checkpoints == (10, 30)  # at 25 it is on the other branch
    assert entries[50].checkpoints == (10, 25, 40, 50)
    assert entries[50].path_bytes == 50 + 4 * 8
    assert entries[30].path_bytes == 32 + 10 + 2 * 8  # the shared span is kept as a whole
    assert entries[30].last_used > entries[50].last_used


def test_counters_count() -> None:
    tree = byte_tree(64)
    tokens = random_tokens(64, 1)
    keep(tree, tokens)
    depth(tree, tokens)
    depth(tree, random_tokens(5, 2))
    tree.touch(tokens, 3)
    keep(tree, random_tokens(20, 3))
    counters = tree.counters
    assert (counters.hits, counters.misses) == (2, 1)
    assert (counters.evicted_segments, counters.evicted_bytes) == (2, 32)
    assert repr(tree) == "PrefixTree(attention, MemoryStore(4 blobs, 52 of 64 bytes))"


def a_tree_to_damage() -> tuple[PrefixTree, IntArray]:
    tree = byte_tree(traits=ROLLING)
    tokens = random_tokens(40, 1)
    keep_all(tree, tokens, 10, 40)
    keep_all(tree, join(tokens[:20], random_tokens(20, 2)), 40)
    return tree, tokens


def lose_segment(tree: PrefixTree, node: SpanNode) -> None:
    assert node.segment is not None
    tree.store.delete(node.segment.ref.name)


def lose_checkpoint(tree: PrefixTree, node: SpanNode) -> None:
    tree.store.delete(node.checkpoints[40].ref.name)


def add_orphan(tree: PrefixTree, node: SpanNode) -> None:
    tree.store.put(b"nobody's", 5, lambda: np.zeros(5, np.uint8))


def forget_segment(tree: PrefixTree, node: SpanNode) -> None:
    node.segment = None


def move_segment(tree: PrefixTree, node: SpanNode) -> None:
    parent = node.parent
    assert parent is not None
    assert parent.segment is not None
    node.segment = parent.segment


def misplace_checkpoint(tree: PrefixTree, node: SpanNode) -> None:
    kept = node.checkpoints.pop(40)
    kept.ref = CheckpointRef(kept.ref.name, 41, 8)
    node.checkpoints[41] = kept


def share_checkpoint(tree: PrefixTree, node: SpanNode) -> None:
    node.checkpoints[39] = node.checkpoints[40]


def share_blob(tree: PrefixTree, node: SpanNode) -> None:
    parent = node.parent
    assert parent is not None
    (sibling,) = (child for child in parent.branches.values() if child is not node)
    mine, other = node.segment, sibling.segment
    assert mine is not None
    assert other is not None
    tree.store.delete(mine.ref.name)
    mine.ref = SegmentRef(other.ref.name, 32, 40, 8)


def unpin_twice(tree: PrefixTree, node: SpanNode) -> None:
    node.pins -= 1


def miscount(tree: PrefixTree, node: SpanNode) -> None:
    assert isinstance(tree.store, MemoryStore)
    tree.store._budget.reserve(7)


DAMAGE: dict[Callable[[PrefixTree, SpanNode], None], str] = {
    lose_segment: r"a blob of <SpanNode \[32, 40\).* is missing",
    lose_checkpoint: r"a blob of <SpanNode \[32, 40\).* is missing",
    add_orphan: "1 blobs belong to no node",
    forget_segment: r"<SpanNode \[32, 40\).* has no segment",
    move_segment: r"\[32, 40\).* has the segment of 16 to 32",
    misplace_checkpoint: r"\[32, 40\).* has a checkpoint at 41",
    share_checkpoint: r"\[32, 40\).* has CheckpointRef\(position=40, n_bytes=8\) at 39",
    share_blob: r"a blob of <SpanNode .* belongs to another node too",
    unpin_twice: r"\[32, 40\).* has -1 pins",
    miscount: "91 bytes are counted, 84 are kept",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_check_finds_damage_and_mends_it(damage: Callable[[PrefixTree, SpanNode], None]) -> None:
    tree, tokens = a_tree_to_damage()
    damage(tree, node_at(tree, tokens))
    with pytest.raises(IntegrityError, match=DAMAGE[damage]):
        tree.check()
    tree.check(fix=True)
    tree.check()
    assert tree.store.used_bytes == stored_bytes(tree)
    assert depth(tree, tokens) in (10, 40)
    fork = join(tokens[:20], random_tokens(20, 2))
    assert depth(tree, fork) in (10, 40)
    for again in (tokens, fork):
        keep_all(tree, again, 40)
        assert depth(tree, again) == 40


def test_check_finds_a_node_that_believes_in_another_size() -> None:
    tree, tokens = a_tree_to_damage()
    kept = node_at(tree, tokens).checkpoints[40]
    kept.ref = CheckpointRef(kept.ref.name, 40, 9)
    with pytest.raises(IntegrityError, match="nodes have 85 bytes, 84 are counted"):
        tree.check()


def test_check_finds_damaged_edges() -> None:
    tree, tokens = a_tree_to_damage()
    node_at(tree, tokens).parent = None
    with pytest.raises(IntegrityError, match="parent"):
        tree.check()


# -- cost ------------------------------------------------------------------------------------------


def lines_run(call: Callable[[], object]) -> int:
    """Count the lines that a call runs in the tree and below it: its cost without a clock."""
    count = 0
    files = {module.__file__ for module in (radix, tree_module, tokens_module)}

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        if frame.f_code.co_filename not in files:
            return None
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def crowd(n_keys: int) -> PrefixTree:
    """A tree of many prompts of 300 tokens, some of which start alike."""
    tree = byte_tree(1 << 40, segment_tokens=256)
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 50_000, (n_keys, 300)).astype(np.int32)
    rows[:, :64] = rows[np.arange(n_keys) // 10 * 10, :64]
    for row in rows:
        tree.save(
            row,
            segment_bytes=lambda n: n,
            read=lambda s, e: Segment(s, e, np.empty(e - s, np.uint8)),
        )
    return tree


def test_fault_65_the_cost_grows_with_the_prompt_not_with_the_number_of_keys() -> None:
    costs = []
    for n_keys in (100, 10_000):
        tree = crowd(n_keys)
        assert len(tree.entries()) == n_keys
        row = np.random.default_rng(0).integers(0, 50_000, (1, 300)).astype(np.int32)[0]
        fork = join(row[:200], array(1, 2, 3))
        match = tree.match_prefix(row)
        costs.append(
            [
                lines_run(lambda: tree.match_prefix(row)),  # noqa: B023
                lines_run(lambda: tree.match_prefix(fork)),  # noqa: B023
                lines_run(lambda: tree.fetch(row, match)),  # noqa: B023
                lines_run(lambda: tree.match_prefix(array(7, 7))),  # noqa: B023
                lines_run(lambda: keep_unchecked(tree, fork)),  # noqa: B023
            ]
        )
        assert match.n_tokens == 300
        # One node for each span and each point where the prompt leaves one.
        assert len(tree._path(row).nodes) <= 1 + 2 + 1
    assert costs[0] == costs[1]


def keep_unchecked(tree: PrefixTree, tokens: IntArray) -> None:
    tree.save(
        tokens,
        segment_bytes=lambda n: n,
        read=lambda s, e: Segment(s, e, np.zeros(e - s, np.uint8)),
    )


@pytest.mark.parametrize("traits", [PLAIN, ROLLING])
def test_fault_65_nor_does_it_when_room_has_to_be_made(traits: Traits) -> None:
    costs = []
    for n_keys in (100, 5_000):
        tree = byte_tree(n_keys * (20 if traits.rolling else 12), traits=traits)
        for row in np.random.default_rng(1).integers(0, 50_000, (n_keys, 12)).astype(np.int32):
            keep_unchecked(tree, row)
            if traits.rolling:
                tree.save_checkpoint(
                    row, n_bytes=8, read=lambda: Checkpoint(12, np.zeros(8, np.uint8))
                )
        rows = np.random.default_rng(2).integers(0, 50_000, (20, 40)).astype(np.int32)
        costs.append(lines_run(lambda: [keep_unchecked(tree, row) for row in rows]))  # noqa: B023
        assert tree.counters.evicted_bytes > 0
    assert costs[1] <= 1.5 * costs[0]


def test_fault_65_a_longer_prompt_costs_a_step_per_span() -> None:
    costs = []
    for n_spans in (10, 20, 40):
        tree = byte_tree()
        tokens = random_tokens(16 * n_spans, 1)
        keep_unchecked(tree, tokens)
        costs.append(lines_run(lambda: tree.match_prefix(tokens)))  # noqa: B023
    assert costs[2] - costs[1] == 2 * (costs[1] - costs[0])


@pytest.mark.parametrize("traits", [ROLLING, NO_ROWS])
def test_fault_65_no_prefix_is_hashed_once_per_checkpoint(
    traits: Traits, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[int] = []
    real = tokens_module.blake3

    def counting(data: bytes) -> Any:
        hashed.append(len(data))
        return real(data)

    monkeypatch.setattr(tokens_module, "blake3", counting)
    tree = byte_tree(traits=traits, max_checkpoints=100)
    tokens = random_tokens(1000, 1)
    scratch = tokens.copy()
    for position in range(20, 1001, 20):
        scratch[:] = -1  # a caller may use one array for all its prompts
        scratch[:position] = tokens[:position]
        keep_all(tree, scratch[:position], position)
    longest = 4 * tree.segment_tokens + 64
    n_blocks, n_spans = 1 + 1000 // tree.segment_tokens, 50 + 2 * 50
    assert max(hashed) <= longest  # a block at a time, never a prefix
    assert len(hashed) <= n_blocks + n_spans + 50  # blocks once, then one a state
    monkeypatch.undo()
    again = byte_tree(traits=traits, max_checkpoints=100)
    for position in range(1000, 0, -20):
        keep_all(again, tokens[:position], position)
    assert set(again.store) <= set(tree.store)  # the same names, whatever the order


def test_names_do_not_depend_on_what_a_caller_does_with_its_array() -> None:
    tree, fresh = byte_tree(), byte_tree()
    one, two = random_tokens(20, 1), random_tokens(40, 2)
    keep(tree, two[:20])
    scratch = join(one, one)
    keep(tree, scratch[:20])
    scratch[:] = two
    keep(tree, scratch)
    for tokens in (one, two[:20], two):
        keep(fresh, tokens)
    assert set(tree.store) == set(fresh.store)


@pytest.mark.parametrize("traits", [PLAIN, NO_ROWS])
def test_the_eviction_queue_is_tidied_now_and_then_not_always(
    traits: Traits, monkeypatch: pytest.MonkeyPatch
) -> None:
    n_items = 0
    heapify = heapq.heapify

    def counted(items: list[Any]) -> None:
        nonlocal n_items
        n_items += len(items)
        heapify(items)

    monkeypatch.setattr(heapq, "heapify", counted)
    tree = byte_tree(1 << 30, traits=traits, segment_tokens=1)
    n_kept = 0
    for seed in range(100):
        tokens = random_tokens(20, seed)
        keep_unchecked(tree, tokens)
        if traits.rolling:
            tree.save_checkpoint(
                tokens, n_bytes=1, read=lambda: Checkpoint(20, np.zeros(1, np.uint8))
            )
        n_kept += 21
    tail = random_tokens(3000, 999)
    growing = byte_tree(1 << 30, segment_tokens=10_000)
    for n_tokens in range(1, 3000):
        keep_unchecked(growing, tail[:n_tokens])
    assert n_items <= 3 * n_kept + 3000
    assert len(growing._queue) <= 128  # what was superseded does not pile up


# -- every memory family, against cold runs --------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "attention": {"family": Family.ATTENTION},
    "swa": {"family": Family.SWA, "n_swa": 12},
    "swa-dense": {"family": Family.SWA, "n_swa": 16, "dense": True},
    "recurrent": {"family": Family.RECURRENT},
    "hybrid": {"family": Family.HYBRID},
    "hybrid-swa": {"family": Family.HYBRID_SWA, "n_swa": 12},
    "whole": {"family": Family.ATTENTION, "whole": True},
    "whole-hybrid-swa": {"family": Family.HYBRID_SWA, "n_swa": 12, "whole": True},
}
ROLLING_KINDS = [kind for kind in KINDS if kind not in ("attention", "swa-dense")]


def fake(kind: str, **options: Any) -> FakeRuntime:
    return FakeRuntime(**({"n_ctx": 2048, "n_vocab": 256} | KINDS[kind] | options))


class Desk:
    """Serves prompts from a tree on a runtime; every answer is compared with that of a cold run.

    It does what a keeper does, without live sequences: match, restore, evaluate with checkpoints
    where they are due, save.
    """

    def __init__(
        self,
        kind: str,
        *,
        capacity_bytes: int = 1 << 20,
        segment_tokens: int = 16,
        align: int = 1,
        min_step: int = 64,
        n_seqs: int = 1,
        **options: Any,
    ) -> None:
        self.runtime = fake(kind, n_seqs=n_seqs)
        self.store = MemoryStore(capacity_bytes)
        options = {"clock": Clock()} | options
        self.tree = PrefixTree(
            self.store, self.runtime.traits, segment_tokens=segment_tokens, **options
        )
        self.align = align
        self.min_step = min_step
        self._cold = fake(kind)
        self._answers: dict[bytes, npt.NDArray[np.float32]] = {}

    @property
    def rolling(self) -> bool:
        return self.runtime.traits.rolling

    def cold(self, prompt: IntArray) -> npt.NDArray[np.float32]:
        """Return the logits after a prompt that nothing was reused for."""
        key = prompt.tobytes()
        if key not in self._answers:
            self._cold.clear(0)
            self._cold.evaluate(0, prompt)
            self._answers[key] = self._cold.logits()
        return self._answers[key]

    def ask(self, prompt: IntArray, *, seq_id: int = 0, user_starts: Sequence[int] = ()) -> int:
        """Serve a prompt and return how many of its tokens were reused."""
        limit = deepest_resume(prompt.size, self.align)
        match = self.tree.match_prefix(prompt, limit=limit, align=self.align)
        assert match.n_tokens <= limit
        assert match.n_tokens % self.align == 0
        reused = self._restore(prompt, match, seq_id)
        due: list[int] = []
        if self.rolling and self.tree.max_checkpoints:
            due = positions_to_take(
                prompt.size,
                reused,
                align=self.align,
                min_step=self.min_step,
                user_starts=user_starts,
                branch=match.shared_tokens,
                present=self.tree.checkpoint_positions(prompt),
            )
        at = reused
        for cut in [*due, prompt.size]:
            self.runtime.evaluate(seq_id, prompt[at:cut])
            at = cut
            if cut in due and self.save(prompt[:cut], seq_id):
                self.checkpoint(prompt[:cut], seq_id)
        assert np.array_equal(self.runtime.logits(), self.cold(prompt)), "not what a cold run says"
        if not self.rolling:
            self.save(prompt, seq_id)
        self.check()
        return reused

    def _restore(self, prompt: IntArray, match: Match, seq_id: int) -> int:
        self.runtime.clear(seq_id)
        fetched = self.tree.fetch(prompt, match)
        if fetched is None or not match.n_tokens:
            self.tree.touch(prompt, 0)
            return 0
        with self.tree.pin(prompt):
            self.runtime.restore(seq_id, match.n_tokens, *fetched)
        self.tree.touch(prompt, match.n_tokens)
        return match.n_tokens

    def save(self, tokens: IntArray, seq_id: int = 0) -> bool:
        saved = self.tree.save(
            tokens,
            segment_bytes=self.runtime.segment_bytes,
            read=lambda start, end: self.runtime.read_segment(seq_id, start, end),
        )
        assert bool(saved.refused) == (saved.n_tokens < tokens.size)
        return not saved.refused

    def checkpoint(self, tokens: IntArray, seq_id: int = 0) -> bool:
        return self.tree.save_checkpoint(
            tokens,
            n_bytes=self.runtime.checkpoint_bytes(seq_id),
            read=lambda: self.runtime.read_checkpoint(seq_id),
        )

    def check(self) -> None:
        self.tree.check()
        assert stored_bytes(self.tree) == self.store.used_bytes
        assert self.store.peak_bytes <= self.store.capacity_bytes


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_a_conversation_with_edits_branches_and_repeats(kind: str) -> None:
    desk = Desk(kind)
    system = random_tokens(40, 1)
    prompt = join(system, random_tokens(21, 2))
    longer = join(prompt, random_tokens(30, 3))
    other = join(system, random_tokens(17, 4))
    assert desk.ask(prompt) == 0
    assert desk.ask(prompt) == 59
    assert desk.ask(longer) == (59 if desk.rolling else 61)
    assert desk.ask(other) == (0 if desk.rolling else 40)
    assert desk.ask(join(system, random_tokens(10, 5))) == 40  # a branch point by now
    assert desk.ask(longer) == 89
    edited = join(longer[:70], random_tokens(20, 6))
    desk.ask(edited)
    assert desk.ask(longer[:50]) == (40 if desk.rolling else 48)
    assert desk.ask(edited) == 88
    assert desk.ask(longer) == 89


@pytest.mark.parametrize("align", [1, 8])
@pytest.mark.parametrize("capacity_bytes", [2_000, 6_000, 20_000])
def test_random_prompts_under_pressure(kind: str, align: int, capacity_bytes: int) -> None:
    desk = Desk(kind, capacity_bytes=capacity_bytes, align=align, max_checkpoints=3)
    rng = np.random.default_rng(capacity_bytes)
    known = [random_tokens(50, 1)]
    reused = 0
    for seed in range(60):
        base = known[int(rng.integers(len(known)))]
        cut = int(rng.integers(0, base.size + 1))
        prompt = join(base[:cut], random_tokens(int(rng.integers(1, 40)), seed))[:150]
        known.append(prompt)
        reused += desk.ask(prompt)
    assert reused > 0
    assert desk.tree.counters.evicted_bytes > 0


def test_fault_3_checkpoints_past_a_rewind_never_match_other_tokens(kind: str) -> None:
    desk = Desk(kind)
    trunk = random_tokens(30, 1)
    for n_tokens in (12, 22, 30):
        desk.ask(trunk[:n_tokens])
    fork = join(trunk[:15], trunk[15:] ^ 1)
    assert desk.ask(fork) == (10 if desk.rolling else 15)
    assert desk.ask(trunk) == 28  # still there, on its own branch
    assert desk.ask(fork) == 28


def test_faults_7_8_9_short_prompts_and_exact_repeats(kind: str) -> None:
    desk = Desk(kind)
    desk.ask(array(7))
    # Two tokens are evaluated, so a prompt of one token never gets a checkpoint.
    assert desk.ask(array(7, 8, 9)) == (0 if desk.rolling else 1)
    for _ in range(3):
        assert desk.ask(array(7, 8, 9)) == 1
    twenty = random_tokens(20, 1)
    desk.ask(twenty)
    assert desk.ask(twenty[:5]) == (0 if desk.rolling else 3)
    assert desk.ask(twenty) == 18


def test_fault_7_a_hit_refreshes_recency() -> None:
    tree = byte_tree(30)
    first, second = array(7), random_tokens(15, 2)
    keep(tree, first)
    keep(tree, second)
    assert depth(tree, array(7, 8, 9)) == 1
    keep(tree, random_tokens(16, 3))
    assert [depth(tree, first), depth(tree, second)] == [1, 0]


def test_fault_16_what_one_sequence_made_serves_another(kind: str) -> None:
    desk = Desk(kind, n_seqs=2)
    prompt = random_tokens(60, 1)
    desk.ask(prompt, seq_id=0)
    desk.ask(random_tokens(50, 2), seq_id=0)
    assert desk.ask(prompt, seq_id=1) == 58
    assert desk.ask(join(prompt, random_tokens(20, 3)), seq_id=1) >= 58
    assert desk.ask(prompt, seq_id=0) == 58


def test_fault_17_two_conversations_in_turn(kind: str) -> None:
    desk = Desk(kind)
    common = random_tokens(193, 1)
    one, two = (join(common, random_tokens(48, seed)) for seed in (2, 3))
    desk.ask(one)
    desk.ask(two)
    for prompt in (one, two, one, two):
        assert desk.ask(prompt) == 239


def test_fault_18_a_growing_chat_is_a_prefix_hit(kind: str) -> None:
    desk = Desk(kind)
    chat = random_tokens(60, 1)
    desk.ask(chat)
    for seed in range(2, 6):
        before, chat = chat.size, join(chat, random_tokens(30, seed))
        assert desk.ask(chat) == (before - 2 if desk.rolling else before)


def test_faults_20_and_27_repeats_are_hits_and_add_nothing(kind: str) -> None:
    desk = Desk(kind)
    prompt = random_tokens(100, 1)
    reused, blobs = [], []
    for _ in range(6):
        reused.append(desk.ask(prompt))
        blobs.append((len(desk.store), desk.store.used_bytes, len(desk.tree.entries())))
    assert reused == [0] + [98] * 5
    assert set(blobs) == {blobs[0]}
    assert blobs[0][2] == 1
    assert (desk.tree.counters.hits, desk.tree.counters.misses) == (5, 1)


def test_fault_33_ten_tokens_are_ten_tokens(kind: str) -> None:
    used = set()
    for n_ctx in (512, 4096):
        desk = Desk(kind)
        desk.runtime = fake(kind, n_ctx=n_ctx)
        desk.ask(random_tokens(10, 1))
        used.add(desk.store.used_bytes)
    assert len(used) == 1
    assert used.pop() < 1_000


def test_fault_35_every_byte_that_is_read_is_counted(kind: str) -> None:
    desk = Desk(kind)
    common = random_tokens(50, 1)
    for seed in range(2, 6):
        desk.ask(join(common, random_tokens(30, seed)), user_starts=[20, 50])
    evicted = desk.tree.counters.evicted_bytes
    assert evicted == 0
    tails = desk.runtime.calls.read_bytes - desk.store.used_bytes
    assert 0 <= tails < 8 * desk.tree.segment_tokens * 24 + 8 * 48  # superseded by longer ones
    assert desk.store.used_bytes == stored_bytes(desk.tree)


def test_fault_36_a_restore_gets_the_stored_bytes_themselves(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = Desk(kind)
    prompt = random_tokens(60, 1)
    desk.ask(prompt)
    given: list[npt.NDArray[np.uint8]] = []
    restore = desk.runtime.restore

    def watched(
        seq_id: int,
        n_tokens: int,
        segments: Sequence[Segment],
        checkpoint: Checkpoint | None = None,
    ) -> None:
        given.extend(segment.data for segment in segments)
        if checkpoint is not None:
            given.append(checkpoint.data)
        restore(seq_id, n_tokens, segments, checkpoint)

    monkeypatch.setattr(desk.runtime, "restore", watched)
    assert desk.ask(prompt) == 58
    held = [data for name in desk.store if (data := desk.store.get(name)) is not None]
    assert given
    assert all(any(buffer is data for data in held) for buffer in given)


def test_saving_reads_only_what_is_missing(kind: str) -> None:
    desk = Desk(kind)
    calls = desk.runtime.calls
    chat = random_tokens(100, 1)
    desk.ask(chat)
    for seed in range(2, 8):
        new = join(chat, random_tokens(25, seed))
        before = calls.read_bytes
        n_new = new.size - desk.ask(new)
        read = calls.read_bytes - before
        if desk.runtime.traits.segments:
            # The new rows, at most one span again, a checkpoint of constant size, some headers.
            row = 24 if kind == "swa-dense" else 16
            assert read <= (n_new + desk.tree.segment_tokens) * row + 500
        chat = new
    before = calls.read_bytes
    desk.ask(chat)
    assert calls.read_bytes == before


@pytest.mark.parametrize("kind", ROLLING_KINDS)
def test_faults_49_to_53_small_prompts_and_small_checkpoints(kind: str) -> None:
    desk = Desk(kind)
    base = random_tokens(22, 1)
    desk.ask(base)  # a checkpoint at 20
    assert desk.ask(join(base[:20], random_tokens(3, 2))) == 20
    ten = random_tokens(10, 3)
    desk.ask(ten)
    assert desk.ask(join(ten[:8], ten[8:] ^ 1)) == 8  # below 64 tokens too
    assert desk.ask(ten) == 8  # and the other one is still there
    short = random_tokens(5, 4)  # shorter than the window: the checkpoint starts at 0
    desk.ask(short)
    assert desk.ask(short) == 3
    assert desk.ask(short) == 3


@pytest.mark.parametrize("kind", ROLLING_KINDS)
def test_fault_52_a_match_names_no_checkpoint_when_all_of_it_is_live(kind: str) -> None:
    """What is live wins over an equal match; a deeper position does not exist in the tree."""
    desk = Desk(kind)
    twenty = random_tokens(20, 1)
    desk.ask(twenty)
    match = desk.tree.match_prefix(join(twenty, random_tokens(5, 2)), limit=23)
    assert match.n_tokens == 18
    assert desk.runtime.positions(0).n_tokens == 20


@pytest.mark.parametrize("kind", ROLLING_KINDS)
def test_fault_54_prefill_is_split_only_where_a_checkpoint_is_taken(kind: str) -> None:
    desk = Desk(kind, min_step=256)
    prompt = random_tokens(212, 1)
    desk.ask(prompt, user_starts=list(range(10, 210, 10)))
    assert desk.tree.checkpoint_positions(prompt) == [200, 210]
    assert desk.runtime.calls.evaluate == 3
    desk.ask(prompt, user_starts=list(range(10, 210, 10)))
    assert desk.runtime.calls.evaluate == 4


@pytest.mark.parametrize("kind", ROLLING_KINDS)
def test_fault_55_a_fixed_prefix_keeps_its_checkpoint(kind: str) -> None:
    desk = Desk(kind, max_checkpoints=2)
    prefix = random_tokens(100, 1)
    reused = [desk.ask(join(prefix, random_tokens(40, seed))) for seed in range(2, 12)]
    assert reused == [0, 0] + [100] * 8


def test_fault_58_a_restored_window_is_dense_only_where_segments_kept_it() -> None:
    for kind, dense in (("swa", False), ("swa-dense", True)):
        desk = Desk(kind)
        prompt = random_tokens(200, 1)
        desk.ask(prompt)
        assert desk.ask(prompt) == 198
        assert desk.runtime.can_rewind(0, 100) == dense


def test_fault_66_without_checkpoints_nothing_is_extracted(kind: str) -> None:
    desk = Desk(kind, max_checkpoints=0)
    prompt = random_tokens(60, 1)
    desk.ask(prompt)
    assert desk.ask(prompt) == (0 if desk.rolling else 58)
    if desk.rolling:
        assert desk.runtime.calls.reads == 0
        assert desk.store.used_bytes == 0


def test_fault_68_a_blob_missing_in_the_middle_is_evaluated(kind: str) -> None:
    desk = Desk(kind)
    prompt = random_tokens(60, 1)
    desk.ask(prompt)
    for name in list(desk.store):
        assert desk.store.delete(name)
        match = desk.tree.match_prefix(prompt, limit=58)
        if desk.tree.fetch(prompt, match) is not None:
            desk.tree.check(fix=True)  # it was not among those that are needed
        desk.check()
        desk.ask(prompt)
        assert desk.ask(prompt) == 58


def test_a_runtime_that_refuses_costs_an_evaluation(kind: str) -> None:
    desk = Desk(kind)
    prompt = random_tokens(60, 1)
    desk.ask(prompt)
    match = desk.tree.match_prefix(prompt, limit=58)
    for operation in ("restore", "restore:verify"):
        desk.runtime.fail(operation)
        with pytest.raises(StateError):
            desk._restore(prompt, match, 0)
    desk.tree.reject(prompt, match)
    desk.check()
    assert desk.ask(prompt) < 58
    assert desk.ask(prompt) == 58


@pytest.mark.parametrize("operation", ["read_segment", "read_checkpoint", "evaluate"])
def test_a_failure_while_saving_leaves_the_tree_whole(kind: str, operation: str) -> None:
    desk = Desk(kind)
    common = random_tokens(40, 1)
    desk.ask(join(common, random_tokens(30, 2)))
    failed = False
    for after in range(4):
        desk.runtime.fail(operation, after=after)
        prompt = join(common, random_tokens(60, 3 + after))
        try:
            desk.ask(prompt)
        except (StateError, RuntimeError):
            failed = True
        desk.check()
        desk.runtime._planned.clear()
        desk.ask(prompt)
        assert desk.ask(prompt) == 98
    traits = desk.runtime.traits
    expected = {"read_segment": traits.segments, "read_checkpoint": traits.rolling}
    assert failed == expected.get(operation, True)
    desk.tree.clear()  # nothing stayed pinned


# -- any order of calls, against a search of everything that was kept ------------------------------

Key = tuple[int, ...]
ids = st.integers(0, 2)


class TreeAgainstSearch(RuleBasedStateMachine):
    """Whatever was done: what the tree finds was kept, and is right."""

    kind = "attention"
    capacity_bytes = 1 << 20
    exact = True
    """Nothing is evicted or lost, so that everything kept must be found."""

    @initialize(align=st.sampled_from([1, 1, 2]))
    def start(self, align: int) -> None:
        self.desk = Desk(
            self.kind,
            capacity_bytes=self.capacity_bytes,
            segment_tokens=4,
            align=align,
            min_step=4,
            max_checkpoints=1000,
        )
        self.tree = self.desk.tree
        self.tree.namespace = b"a"
        self.known: list[Key] = [(0, 1, 2, 0, 1)]
        self.spans: set[tuple[bytes, Key]] = set()
        self.checkpoints: set[tuple[bytes, Key]] = set()
        self.pins: list[tuple[ExitStack, bytes, IntArray, int]] = []

    def prompt(self, base: int, cut: int, tail: list[int]) -> IntArray:
        """Return a prompt that leaves a known one at `cut`."""
        known = self.known[base % len(self.known)]
        key = (*known[: cut % (len(known) + 1)], *tail)[:28] or (0,)
        if key not in self.known:
            self.known.append(key)
        return array(*key)

    prompts = {  # noqa: RUF012 - the arguments of `prompt`
        "base": st.integers(0, 20),
        "cut": st.integers(0, 28),
        "tail": st.lists(ids, max_size=12),
    }

    def keys(self, kept: Iterable[tuple[bytes, Key]]) -> list[IntArray]:
        return [array(*key) for namespace, key in kept if namespace == self.tree.namespace]

    def search(self, prompt: IntArray, limit: int, align: int) -> tuple[int, int]:
        """Return the deepest position that can be restored and the longest shared prefix."""
        shared = max((common_prefix(prompt, key) for key in self.keys(self.spans)), default=0)
        if not self.desk.rolling:
            deepest = min(limit, shared)
            return deepest - deepest % align, shared
        fitting = (
            key.size
            for key in self.keys(self.checkpoints)
            if key.size <= limit
            and key.size % align == 0
            and common_prefix(prompt, key) == key.size
        )
        return max(fitting, default=0), shared

    def compare(self, match: Match, prompt: IntArray, limit: int, align: int) -> None:
        deepest, shared = self.search(prompt, limit, align)
        if self.exact:
            assert (match.n_tokens, match.shared_tokens) == (deepest, shared)
        else:
            assert match.n_tokens <= deepest
            assert match.shared_tokens <= shared
        assert bool(match.segments) == bool(match.n_tokens and self.desk.runtime.traits.segments)
        assert (match.checkpoint is not None) == bool(match.n_tokens and self.desk.rolling)

    def note(self, prompt: IntArray) -> None:
        """Note what the tree was given, from what it says it has."""
        namespace, key = self.tree.namespace, tuple(prompt.tolist())
        covered = self.tree.match_prefix(prompt).shared_tokens
        if self.exact and not self.desk.rolling:
            assert covered == prompt.size
        self.spans.add((namespace, key[:covered]))
        for position in self.tree.checkpoint_positions(prompt):
            self.checkpoints.add((namespace, key[:position]))

    @rule(**prompts)
    def ask(self, base: int, cut: int, tail: list[int]) -> None:
        prompt = self.prompt(base, cut, tail)
        limit = deepest_resume(prompt.size, self.desk.align)
        match = self.tree.match_prefix(prompt, limit=limit, align=self.desk.align)
        self.compare(match, prompt, limit, self.desk.align)
        assert self.desk.ask(prompt) == match.n_tokens
        self.note(prompt)

    @rule(**prompts, limit=st.integers(0, 28), align=st.sampled_from([1, 2, 4]))
    def look(self, base: int, cut: int, tail: list[int], limit: int, align: int) -> None:
        prompt = self.prompt(base, cut, tail)
        limit = min(limit, prompt.size)
        match = self.tree.match_prefix(prompt, limit=limit, align=align)
        self.compare(match, prompt, limit, align)
        reused = self.desk._restore(prompt, match, 0)
        assert reused == match.n_tokens
        if reused < prompt.size:
            self.desk.runtime.evaluate(0, prompt[reused:])
            assert np.array_equal(self.desk.runtime.logits(), self.desk.cold(prompt))

    @rule(**prompts)
    def save(self, base: int, cut: int, tail: list[int]) -> None:
        prompt = self.prompt(base, cut, tail)
        self.desk.runtime.clear(0)
        self.desk.runtime.evaluate(0, prompt)
        saved = self.desk.save(prompt)
        assert saved or not self.exact
        self.note(prompt)

    @rule(**prompts)
    def checkpoint(self, base: int, cut: int, tail: list[int]) -> None:
        if not self.desk.rolling:
            return
        prompt = self.prompt(base, cut, tail)
        self.desk.runtime.clear(0)
        self.desk.runtime.evaluate(0, prompt)
        kept = self.desk.save(prompt) and self.desk.checkpoint(prompt)
        assert kept or not self.exact
        assert kept == (prompt.size in self.tree.checkpoint_positions(prompt))
        self.note(prompt)

    @rule(**prompts, n_tokens=st.integers(0, 28))
    def touch(self, base: int, cut: int, tail: list[int], n_tokens: int) -> None:
        self.tree.touch(self.prompt(base, cut, tail), n_tokens)

    @rule(namespace=st.sampled_from([b"a", b"b"]))
    def switch(self, namespace: bytes) -> None:
        self.tree.namespace = namespace

    @precondition(lambda self: len(self.pins) < 3)
    @rule(**prompts)
    def pin(self, base: int, cut: int, tail: list[int]) -> None:
        prompt = self.prompt(base, cut, tail)
        stack = ExitStack()
        stack.enter_context(self.tree.pin(prompt))
        n_tokens = self.tree.match_prefix(prompt).n_tokens
        self.pins.append((stack, self.tree.namespace, prompt, n_tokens))

    @precondition(lambda self: len(self.pins) > 0)
    @rule(index=st.integers(0, 2))
    def unpin(self, index: int) -> None:
        self.pins.pop(index % len(self.pins))[0].close()

    @precondition(lambda self: not self.exact and not self.pins and len(self.desk.store) > 0)
    @rule(index=st.integers(0, 200))
    def lose_a_blob(self, index: int) -> None:
        names = list(self.desk.store)
        self.desk.store.delete(names[index % len(names)])
        with pytest.raises(IntegrityError):
            self.tree.check()
        self.tree.check(fix=True)

    @rule()
    def clear(self) -> None:
        held = [pin for pin in self.pins if any(node.pins for node in self.tree._nodes())]
        if held:
            with pytest.raises(InvalidValue):
                self.tree.clear()
            return
        self.tree.clear()
        self.spans.clear()
        self.checkpoints.clear()
        assert self.desk.store.used_bytes == 0

    @invariant()
    def adds_up(self) -> None:
        self.desk.check()
        if self.exact:
            assert self.tree.counters.evicted_bytes == 0

    @invariant()
    def what_is_pinned_is_there(self) -> None:
        current = self.tree.namespace
        for _, namespace, prompt, n_tokens in self.pins:
            self.tree.namespace = namespace
            assert self.tree.match_prefix(prompt).n_tokens >= n_tokens
        self.tree.namespace = current

    def teardown(self) -> None:
        for stack, *_ in self.pins:
            stack.close()
        assert not any(node.pins for root in self.tree._roots.values() for node in walk(root))
        # Whatever the history: everything can be evicted, one by one.
        while self.tree._evict_one():
            self.tree.check()
        assert (len(self.tree), self.desk.store.used_bytes) == (0, 0)


def run_machine(**options: Any) -> None:
    machine = type("Machine", (TreeAgainstSearch,), options)
    test_case = machine.TestCase
    test_case.settings = settings(
        max_examples=25, stateful_step_count=25, deadline=None, print_blob=True
    )
    test_case().runTest()


@pytest.mark.parametrize("kind", ["attention", "swa-dense", "recurrent", "hybrid"])
def test_any_order_finds_everything_while_there_is_room(kind: str) -> None:
    run_machine(kind=kind, exact=True)


@pytest.mark.parametrize("capacity_bytes", [700, 2_000])
def test_any_order_finds_nothing_wrong_under_pressure(kind: str, capacity_bytes: int) -> None:
    run_machine(kind=kind, capacity_bytes=capacity_bytes, exact=False)


def test_checkpoints_have_a_limit_of_their_own() -> None:
    runtime = FakeRuntime(Family.HYBRID, recurrent_bytes=4096)
    runtime.evaluate(0, np.arange(64, dtype=np.int32))
    one = runtime.checkpoint_bytes(0)
    tree = PrefixTree(
        MemoryStore(1 << 24),
        runtime.traits,
        segment_tokens=64,
        max_checkpoint_bytes=3 * one + 10,
        policy="marginal",
    )
    sequence = KeptSequence(runtime, tree, align=1)
    for seed in range(8):
        prompt = np.random.default_rng(seed).integers(0, 50_000, 200, dtype=np.int32)
        for end in (100, 200):
            reuse = sequence.resume(prompt[:end])
            sequence.advance(prompt[reuse.reused_tokens : end])
            sequence.save()
            held = [k.held_bytes for node in tree._nodes() for k in node.checkpoints.values()]
            assert 0 < sum(held) <= 3 * one + 10
            tree.check()
    assert tree.counters.evicted_checkpoints >= 8
    kept = len(tree)
    tree.max_checkpoint_bytes = one - 1
    prompt = np.random.default_rng(99).integers(0, 50_000, 200, dtype=np.int32)
    sequence.resume(prompt)
    sequence.advance(prompt)
    sequence.save()
    assert len(tree) == kept, "what never fits drops nothing, and leaves nothing behind"
    assert tree.counters.refused_checkpoints > 0
    tree.check()


@pytest.mark.parametrize("limit", [-1, 1.5, "4 KiB"])
def test_a_limit_of_checkpoints_that_is_none(limit: Any) -> None:
    traits = FakeRuntime(Family.HYBRID).traits
    with pytest.raises(InvalidValue, match="max_checkpoint_bytes"):
        PrefixTree(MemoryStore(1), traits, max_checkpoint_bytes=limit)


def test_a_first_checkpoint_lets_its_nodes_segment_sink() -> None:
    """With it, less is lost with the segment: what was queued for more is looked at again."""
    runtime = FakeRuntime(Family.HYBRID)
    tree = PrefixTree(
        MemoryStore(1 << 20),
        runtime.traits,
        segment_tokens=64,
        policy="marginal",
        clock=lambda: 0.0,
    )
    for first, end, position in ((0, 60, 2), (1000, 1008, 1)):
        tokens = np.arange(first, end, dtype=np.int32)
        runtime.clear(0)
        runtime.evaluate(0, tokens[:position])
        checkpoint = runtime.read_checkpoint(0)
        runtime.evaluate(0, tokens[position:])
        tree.save(
            tokens,
            segment_bytes=runtime.segment_bytes,
            read=lambda start, end: runtime.read_segment(0, start, end),
        )
        assert tree.save_checkpoint(
            tokens[:position], n_bytes=checkpoint.data.nbytes, read=lambda kept=checkpoint: kept
        )
    states = [kept for node in tree._nodes() for kept in node.states()]
    least = min(states, key=lambda kept: tree.policy.rank(kept, 0.0))
    assert tree._evict_one()
    assert least.node not in list(tree._nodes()) or least not in list(least.node.states())
    tree.check()
