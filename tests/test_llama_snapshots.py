"""What is kept of a state: the form of each attribute, what it counts for, its bytes on disk."""

from __future__ import annotations

import array
import contextlib
import enum
import io
import struct
import threading
from collections import OrderedDict, deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamakeep.errors import BlobRejected, InvalidValue
from llamakeep.llama_cache import LlamaRAMCache
from llamakeep.llama_cache.packed import VERSION, Packed, unpack
from llamakeep.llama_cache.snapshots import Plan, Snapshot
from llamakeep.tally import Refused
from tests.llama_states import (
    N_VOCAB,
    LegacyState,
    LlamaState,
    llama_state,
    native,
)


def snapshot_of(state: Any, **options: Any) -> Snapshot:
    return Plan.of(state, **options).snapshot()


def through_a_file(state: Any) -> Snapshot:
    packed = Packed(snapshot_of(state))
    stream = io.BytesIO(packed.bytes().tobytes())
    return unpack(stream.read, packed.n_bytes, type(state))


# -- what is left out ------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [snapshot_of, through_a_file])
@pytest.mark.parametrize("n_tokens", [0, 3, 63, 64])
def test_ids_get_the_length_that_is_wanted(keep: Any, n_tokens: int) -> None:
    tokens = list(range(1, n_tokens + 1))
    kept = keep(llama_state(tokens, b"native"))
    for n_ctx, length in [(None, 64), (100, 100), (64, 64), (10, max(10, n_tokens))]:
        ids = kept.revive(n_ctx).input_ids
        assert ids.shape == (length,), n_ctx
        assert ids.tolist() == tokens + [0] * (length - n_tokens)
        assert ids.dtype == np.intc
        assert ids.flags.writeable


@pytest.mark.parametrize("n_tokens", [-1, 65, 1.0, "3", None])
def test_ids_of_an_impossible_number_of_tokens_stay(n_tokens: Any) -> None:
    state = llama_state([1, 2, 3], b"native")
    state.n_tokens = n_tokens
    found = snapshot_of(state).revive(100)
    assert found.input_ids.tolist() == state.input_ids.tolist()
    assert found.n_tokens == n_tokens


def test_what_a_fork_adds_is_kept_and_the_rest_left_out() -> None:
    state: Any = llama_state([1, 2, 3], b"native")
    state.last_logits = np.full(N_VOCAB, 0.5, np.single)
    plan = Plan.of(state)
    assert plan.nbytes == len(b"native") + 3 * 4 + N_VOCAB * 4
    found = plan.snapshot().revive(100)
    assert found.last_logits.tolist() == [0.5] * N_VOCAB
    assert found.input_ids.shape == (100,)
    assert found.scores.shape == (1, N_VOCAB)


def test_a_state_that_lacks_an_attribute_stays_whole() -> None:
    state = llama_state([1, 2, 3], b"native")
    del state.seed
    found = snapshot_of(state).revive(100)
    assert found.input_ids.tolist() == state.input_ids.tolist()
    assert found.scores.shape == state.scores.shape


def test_a_state_with_its_own_nbytes_stays_whole() -> None:
    state: Any = llama_state([1, 2, 3], b"native")
    state.nbytes = 7
    plan = Plan.of(state)
    assert plan.nbytes == 7
    found = plan.snapshot().revive(100)
    assert found.input_ids.tolist() == state.input_ids.tolist()
    assert found.scores.shape == state.scores.shape


@pytest.mark.parametrize("at", [(0, 0), (0, 15), (7, 15)])
@pytest.mark.parametrize("value", ["least", -0.0, np.nan])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", [np.float16, np.single, np.double])
def test_any_bit_in_the_scores_keeps_them(at: Any, value: Any, order: Any, dtype: Any) -> None:
    state: Any = llama_state(list(range(10)), b"native")
    state.scores = np.zeros((8, 16), dtype, order)
    assert snapshot_of(state).scores_left_out
    state.scores[at] = np.finfo(dtype).smallest_subnormal if value == "least" else value
    kept = snapshot_of(state)
    assert not kept.scores_left_out
    assert kept.revive().scores.tobytes() == state.scores.tobytes()
    assert snapshot_of(state, scores_matter=False).scores_left_out


def test_nothing_is_copied_before_it_is_wanted() -> None:
    state = llama_state([1, 2, 3], b"native")
    plan = Plan.of(state)
    state.input_ids[0] = 9
    kept = plan.snapshot()
    state.input_ids[0] = 8
    assert kept.revive().input_ids[0] == 9
    assert kept.revive().llama_state is state.llama_state


# -- what a snapshot says --------------------------------------------------------------------------


def test_what_a_snapshot_says() -> None:
    state = llama_state([1, 2, 3], native(1))
    kept = snapshot_of(state)
    assert kept.make is LlamaState
    assert kept.attributes == vars(state).keys()
    assert (kept.n_tokens, kept.native) == (3, state.llama_state)
    assert (kept.scores_shape, kept.scores_left_out) == ((1, N_VOCAB), True)
    state.scores[1, 1] = 1
    kept = snapshot_of(state)
    assert (kept.scores_shape, kept.scores_left_out) == ((3, N_VOCAB), False)


@pytest.mark.parametrize(
    ("scores", "shape"),
    [
        (np.ones(5), (1, 5)),
        (np.ones((2, 5)), (2, 5)),
        (np.ones((0, 5)), (0, 5)),
        (np.ones((1, 2, 5)), None),
        ([1.0], None),
        (None, None),
    ],
)
def test_scores_of_other_shapes(scores: Any, shape: Any) -> None:
    state = llama_state([1, 2, 3], b"native")
    state.scores = scores
    kept = snapshot_of(state)
    assert (kept.scores_shape, kept.scores_left_out) == (shape, False)


def test_what_a_snapshot_cannot_say() -> None:
    state: Any = LegacyState(b"x")
    state.llama_state = [b"x"]
    for n_tokens in (None, "3", True, 3.0, [3]):
        state.n_tokens = n_tokens
        kept = snapshot_of(state)
        assert (kept.n_tokens, kept.native, kept.scores_shape) == (None, None, None)


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (np.int32(3), 3),
        (np.uint64(2**64 - 1), 2**64 - 1),
        (np.float32(0.5), 0.5),
        (np.float64(0.1), 0.1),
        (np.bool_(True), True),
        (np.str_("text"), "text"),
    ],
)
@pytest.mark.parametrize("keep", [snapshot_of, through_a_file])
def test_scalars_of_numpy_are_plain_values(keep: Any, value: Any, plain: Any) -> None:
    state = llama_state([1, 2, 3], b"native")
    state.seed = value
    found = keep(state).revive().seed
    assert found == plain
    assert type(found) is type(plain)


@pytest.mark.parametrize("keep", [snapshot_of, through_a_file])
def test_a_number_of_tokens_of_numpy(keep: Any) -> None:
    state: Any = llama_state([1, 2, 3], b"native")
    state.n_tokens = np.int32(3)
    kept = keep(state)
    assert kept.n_tokens == 3
    assert Plan.of(state).nbytes == len(b"native") + 3 * 4
    assert kept.revive(100).input_ids.shape == (100,)


@pytest.mark.parametrize(
    "value",
    [
        np.datetime64("2024-01-01", "ns"),
        np.timedelta64(3, "ns"),
        np.complex64(1j),
        np.longdouble(2),
    ],
)
def test_other_scalars_are_copied_as_they_are(value: Any) -> None:
    state = llama_state([1, 2, 3], b"native")
    state.seed = value
    found = snapshot_of(state).revive().seed
    assert found == value
    assert type(found) is type(value)


def test_an_array_is_more_than_its_items() -> None:
    state: Any = llama_state([1, 2, 3], b"native")
    state.masked = np.ma.masked_equal([1, 2, 3], 2)
    state.objects = np.array([[1], None], object)
    kept = snapshot_of(state)
    state.objects[0].append(2)
    found = kept.revive()
    assert found.masked.tolist() == [1, None, 3]
    assert found.objects.tolist() == [[1], None]
    found.objects[0].append(3)
    assert kept.revive().objects.tolist() == [[1], None]
    for name in ("masked", "objects"):
        state = llama_state([1, 2, 3], b"native")
        setattr(state, name, getattr(found, name))
        with pytest.raises(Refused, match=f"{name} .* no plain form"):
            Packed(snapshot_of(state))


# -- what it counts for ----------------------------------------------------------------------------


class Slots:
    __slots__ = ("__hidden", "shown", "unset")

    def __init__(self, shown: Any, hidden: Any) -> None:
        self.shown = shown
        self.__hidden = hidden


class Attributes:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


KIB = bytes(1024)


@pytest.mark.parametrize(
    "holder",
    [
        [KIB],
        (KIB,),
        {KIB},
        frozenset([KIB]),
        {"key": KIB},
        {KIB: "value"},
        deque([KIB]),
        OrderedDict(key=[KIB]),
        [bytearray(KIB)],
        [memoryview(bytearray(KIB))],
        [np.zeros(128)],
        [np.zeros(128, "M8[s]")],
        [array.array("d", KIB)],
        [np.array([None, KIB], object)],
        np.array([None, KIB], object),
        Slots(KIB, None),
        Slots(None, KIB),
        Attributes(inner=Attributes(list=[KIB])),
        [KIB, KIB],
        [[[[({"deep": [Slots([KIB], 1)]},)]]]],
    ],
    ids=lambda holder: type(holder).__name__,
)
def test_what_is_nested_counts(holder: Any) -> None:
    state: Any = LegacyState(b"")
    state.more = holder
    is_array = isinstance(holder, np.ndarray)
    if is_array:  # a state with arrays is counted without what it says itself
        state.llama_state_size = 5000
    assert Plan.of(state).nbytes == 1024
    if not is_array:
        state.llama_state_size = 5000
        assert Plan.of(state).nbytes == 5000, "what it says, if that is more"
    state.llama_state = KIB
    state.array = np.zeros(3)
    assert Plan.of(state).nbytes == 2 * 1024 + 24
    assert snapshot_of(state).nbytes == 2 * 1024 + 24


def test_what_is_nested_in_a_state_of_slots_counts() -> None:
    class State(Slots):
        llama_state_size = 10

    assert Plan.of(State([KIB], {1: KIB[1:]})).nbytes == 1024 + 1023
    assert Plan.of(State(b"", b"")).nbytes == 10


def test_what_holds_itself_counts_once() -> None:
    state: Any = LegacyState(b"")
    loop: list[Any] = [KIB]
    loop.append(loop)
    state.loop = loop
    kept = snapshot_of(state)
    assert kept.nbytes == 1024
    found = kept.revive().loop
    assert found[1] is found is not loop


def test_what_is_nested_deeper_than_can_be_copied() -> None:
    state: Any = LegacyState(b"")
    state.deep = []
    for _ in range(5000):
        state.deep = [state.deep]
    with pytest.raises(Refused, match="recursion") as caught:
        Plan.of(state)
    assert caught.value.why == "uncopyable"


def test_classes_functions_and_modules_are_not_searched() -> None:
    state: Any = LegacyState(b"x")
    Attributes.large = KIB  # type: ignore[attr-defined]
    try:
        state.more = [Attributes, test_what_holds_itself_counts_once]
        assert Plan.of(state).nbytes == 1
    finally:
        del Attributes.large  # type: ignore[attr-defined]


def test_views_become_bytes() -> None:
    state: Any = LegacyState(b"")
    buffer = bytearray(b"abcd")
    state.llama_state = memoryview(buffer)
    state.more = [memoryview(buffer)[::2]]
    plan = Plan.of(state)
    assert plan.nbytes == 6
    kept = plan.snapshot()
    buffer[:] = b"wxyz"
    found = kept.revive()
    assert (found.llama_state, found.more) == (b"abcd", [b"ac"])


# -- what cannot be kept ---------------------------------------------------------------------------


def released() -> memoryview:
    view = memoryview(b"bytes")
    view.release()
    return view


class Stubborn:
    def __deepcopy__(self, memo: Any) -> Any:
        raise ValueError("not me")


class StubbornState(LegacyState, Stubborn):
    nbytes = 10
    __slots__ = ("more",)


@pytest.mark.parametrize(
    "odd",
    [
        threading.Lock(),
        [threading.Lock()],
        (each for each in "text"),
        Stubborn(),
        {"key": Attributes(inner=Stubborn())},
        np.array([Stubborn()]),
        released(),
        [released()],
        contextlib,
    ],
    ids=lambda odd: type(odd).__name__,
)
def test_what_cannot_be_copied_is_found_before_anything_goes(odd: Any) -> None:
    state: Any = LegacyState(bytes(70))
    state.odd = odd
    with pytest.raises(Refused, match="LegacyState cannot be copied") as caught:
        Plan.of(state)
    assert caught.value.why == "uncopyable"
    cache = LlamaRAMCache(100)
    cache[[1]] = LegacyState(bytes(70))
    for key in ([1], [2]):
        cache[key] = state
    assert cache.counters["refused_uncopyable"] == 2
    assert cache[[1]].llama_state == bytes(70)
    assert len(cache) == 1


def test_a_whole_state_that_cannot_be_copied() -> None:
    with pytest.raises(Refused, match="StubbornState cannot be copied: not me"):
        Plan.of(StubbornState(b"x"))


def test_a_lack_of_memory_is_no_fault_of_the_state() -> None:
    class Hungry:
        def __deepcopy__(self, memo: Any) -> Any:
            raise MemoryError

    state: Any = LegacyState(b"x")
    state.more = Hungry()
    with pytest.raises(MemoryError):
        Plan.of(state)


def test_a_size_is_missed_first() -> None:
    for size in (-1, "large"):
        state: Any = LegacyState(b"x")
        state.odd, state.llama_state_size = Stubborn(), size
        with pytest.raises(InvalidValue, match="llama_state_size"):
            Plan.of(state)
    with pytest.raises(InvalidValue, match="neither nbytes nor llama_state_size"):
        Plan.of(Stubborn())


# -- states that are more than their attributes ----------------------------------------------------


class ListState(list):  # type: ignore[type-arg]
    nbytes = 10


class MadeOf:
    """An object that needs arguments to be made."""

    nbytes = 10

    def __new__(cls, *args: Any) -> MadeOf:
        made = super().__new__(cls)
        made.args = args  # type: ignore[attr-defined]
        return made


class Kind(enum.Enum):
    ONE = 1

    @property
    def nbytes(self) -> int:
        return 10


def oddly_named() -> Any:
    state = LegacyState(b"x")
    state.__dict__[""] = 1
    return state


@pytest.mark.parametrize(
    "value", [ListState([[1]]), MadeOf([1]), Kind.ONE, np.arange(3), oddly_named()]
)
def test_they_are_copied_as_one(value: Any) -> None:
    kept = snapshot_of(value)
    assert kept.attributes == frozenset()
    assert (kept.n_tokens, kept.native, kept.scores_left_out) == (None, None, False)
    found = kept.revive(100)
    assert type(found) is type(value)
    if isinstance(value, ListState):
        found[0].append(2)
        assert kept.revive() == value == [[1]]
    with pytest.raises(Refused, match="no plain form"):
        Packed(kept)


def test_bytes_in_what_is_copied_are_shared() -> None:
    state: Any = LegacyState(b"x")
    state.more = [KIB]
    assert snapshot_of(state).revive().more[0] is KIB


# -- the form --------------------------------------------------------------------------------------

PINNED = """
    01000000 c4000000
    5b5b226e5f746f6b656e73222c22706c61696e222c335d2c5b226c6c616d615f73746174655f73697a65222c2270
    6c61696e222c365d2c5b2273656564222c22706c61696e222c375d2c5b226c6c616d615f7374617465222c227261
    77222c365d2c5b22696e7075745f696473222c226172726179222c223c6934222c5b335d2c385d2c5b226c617374
    5f6c6f67697473222c226172726179222c223c6634222c5b322c315d5d2c5b2273636f726573222c227a65726f73
    222c223c6634222c31365d5d
    6e6174697665
    010000000200000003000000
    0000c03f000000c0
"""
"""Version, bytes of the head, head; native bytes, three ids, two logits."""


def test_the_form_on_disk_does_not_change() -> None:
    state: Any = llama_state([1, 2, 3], b"native", n_ctx=8)
    state.last_logits = np.array([[1.5], [-2]], np.single)
    assert Packed(snapshot_of(state)).bytes().tobytes().hex() == "".join(PINNED.split())
    stream = io.BytesIO(bytes.fromhex(PINNED))
    found = unpack(stream.read, 100, LlamaState).revive()
    assert vars(found).keys() == vars(state).keys()
    assert found.input_ids.tolist() == [1, 2, 3, 0, 0, 0, 0, 0]
    assert found.last_logits.tolist() == [[1.5], [-2]]
    assert found.scores.tolist() == [[0.0] * N_VOCAB]
    assert (found.n_tokens, found.seed, found.llama_state) == (3, 7, b"native")


@pytest.mark.parametrize("name", ["a b", "__class__", "_" * 2])
def test_names_that_no_file_may_say(name: str) -> None:
    state = LegacyState(b"x")
    state.__dict__[name] = 1
    with pytest.raises(Refused, match="no file can say"):
        Packed(snapshot_of(state))


def test_a_head_that_is_too_large() -> None:
    state: Any = LegacyState(b"x")
    state.text = "x" * (1 << 20)
    with pytest.raises(Refused, match="what describes a state"):
        Packed(snapshot_of(state))


numbers = st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64), st.text(max_size=9))
arrays = st.sampled_from(
    [
        np.array([], np.intc),
        np.array([[1.5, -2], [0, np.nan]], np.single),
        np.zeros((0, 5), np.float16),
        np.arange(6, dtype=">i8").reshape(1, 2, 3),
        np.array(7, np.uint8),
        np.arange(12, dtype=np.int32).reshape(3, 4).T,
        np.array([True, False]).view(np.int8),
    ]
)


@given(st.dictionaries(st.from_regex(r"\A[a-z][a-z0-9_]{0,8}\Z"), numbers | arrays | st.binary()))
@settings(max_examples=150, deadline=None)
def test_what_is_packed_comes_back(attributes: dict[str, Any]) -> None:
    state = LegacyState(b"native")
    state.__dict__.update(attributes)
    state.llama_state_size = 6
    packed = Packed(Plan.of(state).snapshot())
    data = packed.bytes()
    assert data.nbytes == packed.n_bytes
    stream = io.BytesIO(data.tobytes())
    found = unpack(stream.read, packed.n_bytes, LegacyState).revive()
    assert not stream.read()
    assert vars(found).keys() == vars(state).keys()
    for name, value in vars(state).items():
        got = getattr(found, name)
        if isinstance(value, np.ndarray):
            assert got.dtype == value.dtype.newbyteorder("=")
            np.testing.assert_array_equal(got, value)
        else:
            assert got == value
            assert type(got) is type(value)


def told(head: bytes, rest: bytes = b"") -> Any:
    data = struct.pack("<II", VERSION, len(head)) + head + rest
    left = len(data)
    stream = io.BytesIO(data)

    def read(n_bytes: int) -> bytes:
        nonlocal left
        if n_bytes > left:
            raise BlobRejected("too short", reason="truncated")
        left -= n_bytes
        return stream.read(n_bytes)

    return unpack(read, left, LegacyState)


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"{}x",
        b"[1]",
        b"[[]]",
        b"7",
        b'{"a": 1}',
        b'[["__class__", "plain", 1]]',
        b'[["__reduce__", "raw", 0]]',
        b'[["a b", "plain", 1]]',
        b'[[1, "plain", 1]]',
        b'[["a", "plain", [1]]]',
        b'[["a", "plain"]]',
        b'[["a", "pickle", 3]]',
        b'[["a", "raw", -1]]',
        b'[["a", "raw", 1e9]]',
        b'[["a", "raw", true]]',
        b'[["a", "raw", 99999999999]]',
        b'[["a", "array", "|O", [1]]]',
        b'[["a", "array", ["<i4"], [1]]]',
        b'[["a", "array", "<i4", [1000000000]]]',
        b'[["a", "array", "<i4", [-1]]]',
        b'[["a", "array", "<i4", 3]]',
        b'[["a", "array", "<i4", [0, 0, 0, 0, 0, 0, 0, 0, 0]]]',
        b'[["a", "array", "<i4", [0], 99999999999]]',
        b'[["a", "array", "<i4", [1], 0]]',
        b'[["a", "array", "<i4", [0, 0], 1]]',
        b'[["a", "zeros", "<f4", 99999999999]]',
        b'[["a", "zeros", "<f4", "wide"]]',
        b"[" * 100_000,
        b"\xff\xfe",
    ],
)
def test_heads_that_no_state_has(head: bytes) -> None:
    with pytest.raises(BlobRejected):
        told(head, b"\0" * 4)


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_nothing_else_is_raised(data: bytes) -> None:
    with contextlib.suppress(BlobRejected):
        told(data)


def test_a_newer_version() -> None:
    stream = io.BytesIO(struct.pack("<II", VERSION + 1, 0))
    with pytest.raises(BlobRejected, match="version") as caught:
        unpack(stream.read, 8, LegacyState)
    assert caught.value.reason == "version"
