"""RadixIndex against a brute-force model, and the nodes under it."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llamakeep import radix
from llamakeep.errors import IntegrityError, InvalidValue, TokenError
from llamakeep.radix import Node, RadixIndex, check_nodes, descend, walk
from llamakeep.tokens import IntArray

Key = tuple[int, ...]


def tokens_of(*ids: int) -> IntArray:
    return np.array(ids, dtype=np.int32)


def index_of(*keys: Key) -> RadixIndex[Key]:
    """Return an index that maps each key to itself, the last one newest."""
    index: RadixIndex[Key] = RadixIndex()
    for key in keys:
        index.insert(key, key)
    index.check()
    return index


def contents(index: RadixIndex[Any]) -> dict[Key, Any]:
    return {tuple(tokens.tolist()): value for tokens, value in index.items()}


# --- lookups ---------------------------------------------------------------------------------


def test_a_key_shorter_than_the_prompt_is_found() -> None:
    index = index_of((7,))
    assert index.longest_prefix([7, 8, 9]) == (1, (7,))
    assert index.longest_common_prefix([7, 8, 9]) == (1, (7,))


@pytest.mark.parametrize("query", [(1, 2, 3, 4, 9), (1, 2, 3), (1, 2, 7), (1, 9), (1, 2), ()])
@pytest.mark.parametrize("how", ["longest_prefix", "longest_common_prefix"])
def test_a_lookup_that_touches_is_a_lookup_and_a_touch(query: Key, how: str) -> None:
    keys: list[Key] = [(1, 2), (1, 2, 3, 4), (1, 2, 3, 5), (1, 6), (8,)]
    one, two = index_of(*keys), index_of(*keys)
    found = getattr(one, how)(query, touch=True)
    assert found == getattr(two, how)(query)
    if found[1] is not None:
        two.touch(found[1])
    one.check()
    for each in [(1,), (1, 2, 3), (1, 2, 3, 9), (8,)]:
        assert one.longest_common_prefix(each) == two.longest_common_prefix(each)


def test_a_key_that_diverges_is_a_common_prefix_only() -> None:
    index = index_of((1, 9, 9, 9))
    assert index.longest_common_prefix([1, 2, 3]) == (1, (1, 9, 9, 9))
    assert index.longest_prefix([1, 2, 3]) == (0, None)


def test_a_key_longer_than_the_prompt_is_a_common_prefix_only() -> None:
    index = index_of((1, 2, 3, 4))
    assert index.longest_common_prefix([1, 2, 3]) == (3, (1, 2, 3, 4))
    assert index.longest_prefix([1, 2, 3]) == (0, None)


def test_keys_that_share_come_with_how_much_deepest_first() -> None:
    index = index_of((1,), (1, 2, 3, 4), (1, 2, 3, 5), (1, 2, 8), (7,))
    assert index.prefixes([1, 2, 3, 4, 9]) == [(4, (1, 2, 3, 4)), (1, (1,))]
    assert list(index.sharing([1, 2, 3, 4, 9], 3)) == [(4, (1, 2, 3, 4)), (3, (1, 2, 3, 5))]
    assert [shared for shared, _ in index.sharing([1, 2, 3, 4, 9])] == [4, 3, 2, 1, 0]
    assert {key for _, key in index.sharing([1, 2], 2)} == {(1, 2, 3, 4), (1, 2, 3, 5), (1, 2, 8)}
    assert list(index.sharing([5], 1)) == index.prefixes([5]) == []


def test_nothing_in_common() -> None:
    index = index_of((1, 2), (3,))
    assert index.longest_common_prefix([4, 1, 2]) == (0, None)
    assert index.longest_prefix([4, 1, 2]) == (0, None)


def test_an_empty_index_finds_nothing() -> None:
    index = index_of()
    for query in ([], [1, 2]):
        assert index.longest_common_prefix(query) == (0, None)
        assert index.longest_prefix(query) == (0, None)
        assert not index.contains(query)


def test_the_deepest_prefix_wins_past_a_deeper_divergence() -> None:
    index = index_of((1,), (1, 2, 3), (1, 2, 3, 4, 5, 6))
    assert index.longest_prefix([1, 2, 3, 4, 5, 9]) == (3, (1, 2, 3))
    assert index.longest_prefix([1, 2]) == (1, (1,))
    assert index.longest_common_prefix([1, 2, 3, 4, 5, 9]) == (5, (1, 2, 3, 4, 5, 6))


def test_a_tie_goes_to_the_key_inside_the_prompt_even_if_it_is_oldest() -> None:
    index = index_of((1, 2), (1, 2, 3), (1, 2, 4))
    assert index.longest_common_prefix([1, 2, 9]) == (2, (1, 2))
    assert index.longest_common_prefix([1, 2]) == (2, (1, 2))


@pytest.mark.parametrize("newest", [(1, 2, 3), (1, 2, 4), (1, 2, 5, 6)])
def test_a_tie_goes_to_the_newest(newest: Key) -> None:
    index = index_of((1, 2, 3), (1, 2, 4), (1, 2, 5, 6))
    index.touch(newest)
    index.check()
    assert index.longest_common_prefix([1, 2, 9]) == (2, newest)


def test_a_shorter_newer_key_does_not_win_a_tie_it_is_not_in() -> None:
    index = index_of((1, 2, 3, 4, 5), (1, 2, 3, 9), (1, 7))
    assert index.longest_common_prefix([1, 2, 3, 8]) == (3, (1, 2, 3, 9))
    index.touch((1, 2, 3, 4, 5))
    index.touch((1, 7))
    assert index.longest_common_prefix([1, 2, 3, 8]) == (3, (1, 2, 3, 4, 5))


def test_removing_the_newest_gives_the_tie_to_the_next_newest() -> None:
    # 1 2 3 and 1 2 3 4 share a branch: without the latter, that branch is the oldest.
    index = index_of((1, 2, 9), (1, 2, 3), (1, 2, 5), (1, 2, 3, 4))
    assert index.longest_common_prefix([1, 2, 8]) == (2, (1, 2, 3, 4))
    index.remove((1, 2, 3, 4))
    index.check()
    assert index.longest_common_prefix([1, 2, 8]) == (2, (1, 2, 5))


def test_lookups_do_not_touch() -> None:
    index = index_of((1, 2), (1, 3))
    index.longest_prefix([1, 2])
    index.longest_common_prefix([1, 2])
    index.get([1, 2])
    assert index.longest_common_prefix([1]) == (1, (1, 3))


def test_an_empty_key_is_a_prefix_of_everything_and_common_with_nothing() -> None:
    index = index_of(())
    assert len(index) == 1
    assert index.contains([])
    assert index.longest_prefix([5]) == (0, ())
    assert index.longest_common_prefix([5]) == (0, None)
    assert index.longest_common_prefix([]) == (0, None)
    index.insert([5], (5,))
    assert index.longest_prefix([5]) == (1, (5,))
    assert index.remove([]) == ()
    assert index.longest_prefix([6]) == (0, None)
    index.check()


def test_a_stored_none_is_a_key() -> None:
    index: RadixIndex[None] = RadixIndex()
    index.insert([1], None)
    assert index.contains([1])
    assert index.longest_prefix([1, 2]) == (1, None)
    assert index.remove([1]) is None


@pytest.mark.parametrize("n_shared", [0, 1, 63, 64, 65, 575, 576, 577, 4671, 4672, 4673, 8999])
@pytest.mark.parametrize("branched", [False, True])
def test_a_divergence_is_found_wherever_it_is(n_shared: int, branched: bool) -> None:
    stored = np.arange(9000, dtype=np.int32)
    index: RadixIndex[str] = RadixIndex()
    index.insert(stored, "stored")
    query = stored.copy()
    query[n_shared:] = 10_000
    if branched:
        index.insert(query, "branch")
        index.touch(stored)
        assert index.longest_prefix(query) == (9000, "branch")
        query[-1] += 1
        assert index.longest_common_prefix(query)[0] == max(8999, n_shared)
    else:
        expected = (n_shared, "stored") if n_shared else (0, None)
        assert index.longest_common_prefix(query) == expected
        assert index.longest_prefix(query) == (0, None)


# --- what goes in ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "convert",
    [list, tuple, tokens_of, lambda *ids: np.array(ids), lambda *ids: np.array(ids, np.uint16)],
)
def test_every_form_of_the_same_tokens_is_the_same_key(convert: Callable[..., Any]) -> None:
    ids = (1, 2, 3)
    form = convert(ids) if convert in (list, tuple) else convert(*ids)
    index = index_of(ids, (1, 5))
    assert index.get(form) == ids
    assert form in index
    assert index.longest_prefix(form) == (3, ids)
    index.insert(form, (0,))
    assert len(index) == 2
    index.touch(form)
    assert index.remove(form) == (0,)


def test_a_strided_array_is_read_right() -> None:
    index = index_of((1, 2, 3))
    assert index.get(tokens_of(1, 9, 2, 9, 3, 9)[::2]) == (1, 2, 3)


@pytest.mark.parametrize("bad", [[1, -2], [2**31], [1.5], [[1]], "12"])
def test_what_is_no_token_sequence_is_refused_and_changes_nothing(bad: Any) -> None:
    index = index_of((1, 2))
    with pytest.raises(TokenError):
        index.insert(bad, ())
    with pytest.raises(TokenError):
        index.get(bad)
    assert contents(index) == {(1, 2): (1, 2)}
    index.check()


def test_a_refused_array_of_int32_changes_nothing() -> None:
    index = index_of((1, 2))
    with pytest.raises(TokenError, match="-7"):
        index.insert(tokens_of(1, -7), ())
    assert index.longest_common_prefix(tokens_of(1, -7)) == (1, (1, 2))
    index.check()


def test_the_caller_may_change_its_array_afterwards() -> None:
    mine = tokens_of(1, 2, 3, 4)
    index: RadixIndex[str] = RadixIndex()
    index.insert(mine, "first")
    mine[:] = 9
    assert index.get([1, 2, 3, 4]) == "first"
    assert not index.contains([9, 9, 9, 9])
    index.check()


def test_arrays_handed_out_are_read_only() -> None:
    index = index_of((1, 2, 3), (1, 2, 4))
    for tokens, _ in index:
        with pytest.raises(ValueError, match="read-only"):
            tokens[0] = 9
    for node in walk(index._root):
        assert not node.tokens.flags.writeable


# --- replacing, removing ---------------------------------------------------------------------


def test_replacing_keeps_one_key_and_makes_it_newest() -> None:
    index = index_of((1, 2), (1, 3))
    before = index.nbytes
    index.insert((1, 2), (0,))
    assert len(index) == 2
    assert index.nbytes == before
    assert index.longest_common_prefix([1]) == (1, (0,))
    index.check()


@pytest.mark.parametrize("missing", [(), (1,), (1, 2, 3, 4), (1, 9), (5,)])
def test_removing_or_touching_what_is_missing_names_its_length(missing: Key) -> None:
    index = index_of((1, 2, 3))
    with pytest.raises(KeyError, match=f"{len(missing)} tokens"):
        index.remove(missing)
    with pytest.raises(KeyError, match=f"{len(missing)} tokens"):
        index.touch(missing)
    assert contents(index) == {(1, 2, 3): (1, 2, 3)}


@pytest.mark.parametrize(
    ("stored", "removed", "left"),
    [
        pytest.param([(1, 2, 3)], (1, 2, 3), [], id="the only key"),
        pytest.param([(1,), (1, 2, 3)], (1, 2, 3), [(1,)], id="a leaf"),
        pytest.param([(1, 2, 3), (1,)], (1, 2, 3), [(1,)], id="an edge is cut at a value"),
        pytest.param([(1, 2, 3), (1, 4)], (1, 2, 3), [(1, 4)], id="cut at a branch and joined"),
        pytest.param([(1,), (1, 2)], (1,), [(1, 2)], id="joined to the only branch"),
        pytest.param([(1,), (1, 2), (1, 3)], (1,), [(1, 2), (1, 3)], id="joined to one of two"),
        pytest.param([(1, 2), (1,)], (1,), [(1, 2)], id="a value inside an edge"),
        pytest.param(
            [(1, 2, 3), (1, 2, 3, 4, 5), (1, 2, 3, 4, 6), (1, 2)],
            (1, 2, 3),
            [(1, 2, 3, 4, 5), (1, 2, 3, 4, 6), (1, 2)],
            id="a joined branch brings its branches",
        ),
        pytest.param([(), (1,)], (), [(1,)], id="the empty key"),
    ],
)
def test_removing_leaves_what_a_fresh_index_holds(
    stored: list[Key], removed: Key, left: list[Key]
) -> None:
    index = index_of(*stored)
    assert index.remove(removed) == removed
    index.check()
    fresh = index_of(*left)
    assert contents(index) == contents(fresh)
    assert index.nbytes == fresh.nbytes
    for length in range(4):
        query = (1, 2, 3, 9)[:length]
        assert index.longest_common_prefix(query) == fresh.longest_common_prefix(query)


def test_clear_and_removing_everything_leave_an_empty_index() -> None:
    keys: list[Key] = [(), (1, 2), (1, 2, 3), (4,)]
    index = index_of(*keys)
    assert index.nbytes > 0
    for key in keys:
        index.remove(key)
    assert (len(index), index.nbytes, contents(index)) == (0, 0, {})
    index = index_of(*keys)
    index.clear()
    assert (len(index), index.nbytes, contents(index)) == (0, 0, {})
    index.check()
    index.insert((1,), (1,))
    assert index.longest_prefix([1, 2]) == (1, (1,))


def test_a_conversation_that_replaces_itself_stays_one_edge() -> None:
    index: RadixIndex[int] = RadixIndex()
    for n in range(1, 300):
        index.insert(range(n), n)
        if n > 1:
            index.remove(range(n - 1))
    index.check()
    assert len(list(walk(index._root))) == 2
    assert index.longest_prefix(range(500)) == (299, 299)


def chain_of(n_keys: int) -> tuple[RadixIndex[int], IntArray]:
    """Return an index of all prefixes of a prompt, one edge for each, and the prompt."""
    prompt = np.arange(n_keys, dtype=np.int32)
    index: RadixIndex[int] = RadixIndex()
    for n in range(1, n_keys + 1):
        index.insert(prompt[:n], n)
    assert len(list(walk(index._root))) == n_keys + 1
    return index, prompt


def test_a_chain_deeper_than_the_recursion_limit() -> None:
    n_keys = 2 * sys.getrecursionlimit()
    index, prompt = chain_of(n_keys)
    index.check()
    assert index.longest_prefix(prompt) == (n_keys, n_keys)
    assert index.longest_common_prefix(prompt[:500]) == (500, 500)
    index.touch(prompt)
    assert sum(len(tokens) for tokens, _ in index) == n_keys * (n_keys + 1) // 2
    assert index.remove(prompt) == n_keys
    assert index.remove(prompt[:1]) == 1
    index.check()
    index.clear()
    assert index.nbytes == 0


def test_a_chain_of_5000_nodes() -> None:
    root = Node(tokens_of())
    node = root
    for position in range(5_000):
        child = Node(tokens_of(position), position)
        node.attach(child)
        node = child
    assert check_nodes(root) == (5_000, 5_000)
    path = descend(root, np.arange(6_000, dtype=np.int32))
    assert path.n_tokens == 5_000
    assert path.nodes[-1] == (node, 5_000)


@pytest.mark.parametrize("oldest_first", [True, False])
def test_a_chain_is_removed_from_either_end(oldest_first: bool) -> None:
    n_keys = 600
    index, prompt = chain_of(n_keys)
    for n in range(1, n_keys + 1) if oldest_first else range(n_keys, 0, -1):
        assert index.remove(prompt[:n]) == n
        if n % 100 == 0:
            index.check()
    assert index.nbytes == 0
    index.check()


# --- cost ------------------------------------------------------------------------------------


def lines_run(call: Callable[[], object]) -> int:
    """Count the lines of radix.py that a call runs: its cost without a clock."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        if frame.f_code.co_filename != radix.__file__:
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


def fan(n_keys: int) -> Iterator[IntArray]:
    """Prompts that leave one long prompt at random points."""
    rng = np.random.default_rng(0)
    trunk = np.arange(2_000, dtype=np.int32)
    yield trunk
    for n in range(n_keys):
        yield np.append(trunk[: rng.integers(1, 1_900)], [10_000 + n, 1, 2]).astype(np.int32)


def fan_cost(n_keys: int, method: str) -> int:
    """Return the most lines that a lookup of the trunk runs after a touch, and the touch's."""
    index: RadixIndex[int] = RadixIndex()
    for value, key in enumerate(fan(n_keys)):
        index.insert(key, value)
    trunk = next(fan(0))
    queries = [trunk[:n] for n in (5, 900, 1_950)]
    lookup: Callable[[IntArray], object] = getattr(index, method)
    for query in queries:
        lookup(query)
    touch = lines_run(lambda: index.touch(trunk))
    return touch + max(lines_run(partial(lookup, query)) for query in queries)


@pytest.mark.parametrize("method", ["longest_prefix", "longest_common_prefix"])
def test_a_lookup_costs_the_same_among_many_keys(method: str) -> None:
    few, many = fan_cost(10, method), fan_cost(3_000, method)
    assert many <= few + 20


def test_ties_at_late_points_after_many_touches() -> None:
    index: RadixIndex[int] = RadixIndex()
    keys = list(fan(300))
    for value, key in enumerate(keys):
        index.insert(key, value)
    rng = np.random.default_rng(1)
    order = list(range(len(keys)))
    for _ in range(300):
        touched = int(rng.integers(len(keys)))
        index.touch(keys[touched])
        order.remove(touched)
        order.append(touched)
        point = int(rng.integers(1, 1_990))
        expected = next(i for i in reversed(order) if i == 0 or len(keys[i]) - 3 >= point)
        assert index.longest_common_prefix(np.arange(point)) == (point, expected)
    index.check()


@pytest.mark.parametrize("shape", ["fan", "chain", "one edge", "small"])
def test_nbytes_is_what_python_allocates(shape: str) -> None:
    rng = np.random.default_rng(0)
    trunk = np.arange(5_000, dtype=np.int32)
    shapes: dict[str, Callable[[int], IntArray]] = {
        "fan": lambda _: np.append(trunk[:200], rng.integers(0, 9, 100, np.int32)),
        "chain": lambda n: trunk[: 10 * n + 10],
        "one edge": lambda n: trunk[: 3_000 - n],
        "small": lambda _: rng.integers(0, 50, 8, np.int32),
    }
    keys = [shapes[shape](n) for n in range(500 if shape == "chain" else 3_000)]
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        index: RadixIndex[None] = RadixIndex()
        for key in keys:
            index.insert(key, None)
        gc.collect()
        allocated = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0.9 * allocated < index.nbytes < 1.35 * allocated


# --- the model -------------------------------------------------------------------------------


def common(a: Key, b: Key) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


alphabet = st.integers(0, 2)
keys = st.lists(alphabet, max_size=12).map(tuple)


class IndexAgainstDict(RuleBasedStateMachine):
    """Every method against a dict whose order is the recency of its keys."""

    def __init__(self) -> None:
        super().__init__()
        self.index: RadixIndex[int] = RadixIndex()
        self.model: dict[Key, int] = {}
        self.n_values = 0

    def nth(self, number: int) -> Key:
        return sorted(self.model)[number % len(self.model)]

    def insert_key(self, key: Key) -> None:
        self.n_values += 1
        array = np.array(key, dtype=np.int32)
        self.index.insert(array, self.n_values)
        array[:] = 99
        self.model.pop(key, None)
        self.model[key] = self.n_values

    @rule(key=keys)
    def insert(self, key: Key) -> None:
        self.insert_key(key)

    @precondition(lambda self: self.model)
    @rule(number=st.integers(0, 999), keep=st.integers(0, 12), more=keys)
    def insert_related(self, number: int, keep: int, more: Key) -> None:
        self.insert_key((self.nth(number)[:keep] + more)[:12])

    @precondition(lambda self: self.model)
    @rule(number=st.integers(0, 999))
    def remove(self, number: int) -> None:
        key = self.nth(number)
        assert self.index.remove(key) == self.model.pop(key)

    @precondition(lambda self: self.model)
    @rule(newest=st.booleans())
    def remove_by_age(self, newest: bool) -> None:
        key = list(self.model)[-1 if newest else 0]
        assert self.index.remove(key) == self.model.pop(key)

    @precondition(lambda self: self.model)
    @rule(number=st.integers(0, 999))
    def touch(self, number: int) -> None:
        key = self.nth(number)
        self.index.touch(key)
        self.model[key] = self.model.pop(key)

    @rule(key=keys)
    def remove_or_touch_missing(self, key: Key) -> None:
        if key in self.model:
            return
        with pytest.raises(KeyError):
            self.index.remove(key)
        with pytest.raises(KeyError):
            self.index.touch(key)

    @rule(query=keys)
    def look_up(self, query: Key) -> None:
        self.compare(query)

    @precondition(lambda self: self.model)
    @rule(number=st.integers(0, 999), keep=st.integers(0, 12), more=keys)
    def look_up_related(self, number: int, keep: int, more: Key) -> None:
        self.compare(self.nth(number)[:keep] + more)

    @precondition(lambda self: len(self.model) > 8)
    @rule()
    def clear(self) -> None:
        self.index.clear()
        self.model.clear()
        assert self.index.nbytes == 0

    def compare(self, query: Key) -> None:
        model = self.model
        array = np.array(query, dtype=np.int32)
        prefixes = [key for key in model if key == query[: len(key)]]
        longest = max(prefixes, key=len, default=None)
        expected = (0, None) if longest is None else (len(longest), model[longest])
        assert self.index.longest_prefix(array) == expected

        ranked = [
            (common(key, query), key in prefixes, age, value)
            for age, (key, value) in enumerate(model.items())
        ]
        best = max(ranked, default=(0, False, 0, 0))
        expected = (best[0], best[3]) if best[0] else (0, None)
        assert self.index.longest_common_prefix(array) == expected

        found = [(len(key), model[key]) for key in sorted(prefixes, key=len, reverse=True)]
        assert self.index.prefixes(array) == found
        for least in range(len(query) + 2):
            found = list(self.index.sharing(array, least))
            assert [shared for shared, _ in found] == sorted((n for n, _ in found), reverse=True)
            expected_pairs = [(n, value) for n, _, _, value in ranked if n >= least]
            assert sorted(found) == sorted(expected_pairs)

        assert self.index.contains(array) == (query in model)
        assert self.index.get(array) == model.get(query)

    @invariant()
    def adds_up(self) -> None:
        self.index.check()
        assert len(self.index) == len(self.model)
        assert len(list(self.index)) == len(self.model)
        assert contents(self.index) == self.model

    @invariant()
    def holds_no_more_than_the_keys_need(self) -> None:
        prefixes = {key[:n] for key in self.model for n in range(1, len(key) + 1)}
        rest = self.index.nbytes - 4 * len(prefixes) - radix._KEY_BYTES * len(self.model)
        n_nodes, odd = divmod(rest, radix._NODE_BYTES)
        n_leaves = len(prefixes - {prefix[:-1] for prefix in prefixes})
        assert odd == 0
        assert n_leaves <= n_nodes <= len(self.model)

    def teardown(self) -> None:
        for key in list(self.model):
            assert self.index.remove(key) == self.model.pop(key)
            self.index.check()
        assert self.index.nbytes == 0


TestIndexAgainstDict = IndexAgainstDict.TestCase
TestIndexAgainstDict.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, print_blob=True
)


# --- nodes -----------------------------------------------------------------------------------


def small_tree() -> tuple[Node, Node, Node, Node]:
    """Return a root, 1 2 3 4 below it, 9 9 off its middle, 5 at its end."""
    root = Node(tokens_of())
    trunk = Node(tokens_of(1, 2, 3, 4), 0)
    middle = Node(tokens_of(9, 9), 2)
    last = Node(tokens_of(5), 4)
    root.attach(trunk)
    trunk.attach(middle)
    trunk.attach(last)
    return root, trunk, middle, last


@pytest.mark.parametrize(
    ("query", "names", "points"),
    [
        ([], "r", [0]),
        ([8], "r", [0]),
        ([1, 2], "rt", [0, 2]),
        ([1, 2, 8], "rt", [0, 2]),
        ([1, 2, 9], "rtm", [0, 2, 3]),
        ([1, 2, 9, 9, 9], "rtm", [0, 2, 4]),
        ([1, 2, 3, 4], "rt", [0, 4]),
        ([1, 2, 3, 4, 5, 6], "rtl", [0, 4, 5]),
        ([1, 3, 9, 9], "rt", [0, 1]),
    ],
)
def test_descend_names_nodes_and_how_far_each_was_followed(
    query: list[int], names: str, points: list[int]
) -> None:
    root, trunk, middle, last = small_tree()
    by_name = {"r": root, "t": trunk, "m": middle, "l": last}
    path = descend(root, tokens_of(*query))
    assert path.nodes == [(by_name[name], point) for name, point in zip(names, points, strict=True)]
    assert path.n_tokens == points[-1]
    assert descend(root, query) == path


def test_descend_finds_branches_whichever_was_attached_last() -> None:
    root, trunk, middle, last = small_tree()
    for recent in (middle, last, middle):
        trunk.renew(recent)
        assert descend(root, [1, 2, 9]).nodes[-1] == (middle, 3)
        assert descend(root, [1, 2, 3, 4, 5]).nodes[-1] == (last, 5)
        assert list(trunk.branches.values())[-1] is recent
    trunk.detach(middle)
    assert middle.parent is None
    assert descend(root, [1, 2, 9]).nodes[-1] == (trunk, 2)


def test_check_nodes_counts() -> None:
    root, *_ = small_tree()
    assert check_nodes(root) == (3, 7)
    assert check_nodes(Node(tokens_of())) == (0, 0)


@pytest.mark.parametrize(
    ("ids", "start"),
    [
        pytest.param([], 1, id="empty"),
        pytest.param([8], 0, id="at the start, where the parent's branches hang"),
        pytest.param([8], 5, id="past the end"),
        pytest.param([3, 8], 2, id="like the edge"),
        pytest.param([9], 2, id="like another branch in the middle"),
        pytest.param([5, 8], 4, id="like another branch at the end"),
    ],
)
def test_attach_refuses_what_would_make_two_ways(ids: list[int], start: int) -> None:
    root, trunk, _, _ = small_tree()
    child = Node(tokens_of(*ids), start)
    with pytest.raises(InvalidValue):
        trunk.attach(child)
    assert child.parent is None
    assert check_nodes(root) == (3, 7)


def test_attach_refuses_a_second_parent_and_detach_a_stranger() -> None:
    root, trunk, middle, _ = small_tree()
    with pytest.raises(InvalidValue, match="already attached"):
        root.attach(middle)
    with pytest.raises(InvalidValue, match="not a branch"):
        root.detach(middle)
    with pytest.raises(InvalidValue, match="not a branch"):
        trunk.renew(trunk)


def test_truncate_and_extend_keep_branches_reachable() -> None:
    root, trunk, middle, last = small_tree()
    with pytest.raises(InvalidValue):
        trunk.truncate(3)
    with pytest.raises(InvalidValue):
        trunk.extend(tokens_of(5, 6))
    trunk.extend(tokens_of(6, 7))
    assert trunk.tokens.tolist() == [1, 2, 3, 4, 6, 7]
    assert descend(root, [1, 2, 3, 4, 5]).nodes[-1] == (last, 5)
    trunk.detach(last)
    trunk.truncate(2)
    assert descend(root, [1, 2, 9]).nodes[-1] == (middle, 3)
    with pytest.raises(InvalidValue):
        trunk.truncate(0)
    assert check_nodes(root) == (2, 4)


def test_token_at_refuses_positions_off_the_edge() -> None:
    _, _, middle, _ = small_tree()
    assert middle.token_at(3) == 9
    for position in (1, 4):
        with pytest.raises(InvalidValue, match=str(position)):
            middle.token_at(position)


# --- check -----------------------------------------------------------------------------------


def refile(index: RadixIndex[Key]) -> None:
    (node,) = index._root.branches.values()
    node.branches[2, 77] = node.branches.pop((2, 3))


def twin(index: RadixIndex[Key]) -> None:
    (node,) = index._root.branches.values()
    node._raw = tokens_of(1, 2, 3, 5).tobytes()


def orphan(index: RadixIndex[Key]) -> None:
    (node,) = index._root.branches.values()
    node.branches[2, 3].parent = index._root


def stray(index: RadixIndex[Key]) -> None:
    (node,) = index._root.branches.values()
    node.held[0].start = 9


def overhang(index: RadixIndex[Key]) -> None:
    (node,) = index._root.branches.values()
    node._raw += b"\1\0\0\0"


def swap_order(index: RadixIndex[Key]) -> None:
    (node,) = index._root.branches.values()
    node.order.reverse()


def lose_entry(index: RadixIndex[Key]) -> None:
    (node,) = index._root.branches.values()
    del node.order[0]


def old_stamp(index: RadixIndex[Key]) -> None:
    (node,) = index._root.branches.values()
    node.stamp -= 1


def old_clock(index: RadixIndex[Key]) -> None:
    index._clock -= 1


def old_stairs(index: RadixIndex[Key]) -> None:
    (node,) = index._root.branches.values()
    node._stairs = []


def miscount_keys(index: RadixIndex[Key]) -> None:
    index._n_keys += 1


def miscount_tokens(index: RadixIndex[Key]) -> None:
    index._n_tokens -= 1


@pytest.mark.parametrize(
    "damage",
    [
        refile,
        twin,
        orphan,
        stray,
        overhang,
        swap_order,
        lose_entry,
        old_stamp,
        old_clock,
        old_stairs,
        miscount_keys,
        miscount_tokens,
    ],
)
def test_check_finds_damage(damage: Callable[[RadixIndex[Key]], None]) -> None:
    index = index_of((1, 2, 4, 5), (1, 2, 3), (1, 2))
    damage(index)
    with pytest.raises(IntegrityError, match=r"\d"):
        index.check()
