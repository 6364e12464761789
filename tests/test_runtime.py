"""What every runtime promises, for the fake and for llama.cpp, in every memory family.

A prompt is evaluated in pieces of 32 tokens, across the window of 64. Cold and restored runs use
the same pieces, so on real models they may differ only by where rows lie in the cache: not at all
for one sequence, a little beside another one. A wrong row or state moves logits by `FAULT` or more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamakeep.errors import (
    ContextOverflow,
    DecodeError,
    InvalidValue,
    KeeperClosed,
    ModelError,
    RestoreFailed,
    StateError,
    StateRejected,
    TokenError,
)
from llamakeep.runtime.base import Family, Runtime
from llamakeep.runtime.fake import OPERATIONS, FakeRuntime
from llamakeep.states import Checkpoint, DeviceCheckpoint, Positions, Segment
from tests import tiny_models

N_CTX = 512
N_VOCAB = 4_000
STOPS = (32, 64, 96)
END = STOPS[-1]
TAIL = 3
TOLERANCE = 5e-3
FLASH_TOLERANCE = 3e-2
"""With f16 values, flash attention on a CPU adds up in f16, in the order of the cells."""
FAULT = 0.2
"""Least change of a logit that a fault shows as; the tiny models are made so."""

Q8_0 = 8


# -- the runtimes ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rig:
    """One kind of runtime: the fake with some options, or llama.cpp with some."""

    name: str
    family: str
    fake: bool
    options: tuple[tuple[str, Any], ...]
    model: Callable[[str], Path] | None = None

    def make(self, n_ctx: int = N_CTX, n_seqs: int | None = None) -> Runtime:
        options = dict(self.options)
        if n_seqs is None:
            n_seqs = 1 if self.alone else 2
        if self.fake:
            return FakeRuntime(
                self.family, n_ctx=n_ctx, n_seqs=n_seqs, n_vocab=N_VOCAB, n_swa=64, **options
            )
        from llamakeep.runtime.llama_cpp import LlamaCppRuntime

        assert self.model is not None
        whole = options.pop("whole", False)
        runtime = LlamaCppRuntime.load(
            self.model(self.family), n_ctx=n_ctx, n_seqs=n_seqs, n_threads=1, **options
        )
        if whole:
            keep_whole(runtime)
        flash = "flash_attn" in options and "type_v" not in options
        vars(runtime)["atol"] = FLASH_TOLERANCE if flash else TOLERANCE
        return runtime

    @property
    def whole(self) -> bool:
        return bool(dict(self.options).get("whole"))

    @property
    def segments(self) -> bool:
        return self.family != "recurrent" and not self.whole

    @property
    def dense(self) -> bool:
        return "dense" in self.name

    @property
    def alone(self) -> bool:
        """llama.cpp keeps a window dense only where it has one sequence."""
        return self.dense and not self.fake

    @property
    def rolling(self) -> bool:
        return self.whole or not (self.dense or self.family == "attention")


def keep_whole(runtime: Any) -> None:
    """Make the probe of a loaded model fail, as that of an unknown memory type does."""

    def unknown(*_: object) -> None:
        raise StateError("an unknown layout")

    runtime._learn = unknown
    runtime.traits = runtime._probe(True, 256)


def _rig(family: str, name: str, *, fake: bool = False, **options: Any) -> Rig:
    return Rig(
        f"{'fake' if fake else 'llama'}-{family}{name}", family, fake, tuple(options.items())
    )


FLASH = {"flash_attn": True}
Q8 = {"flash_attn": True, "type_k": Q8_0, "type_v": Q8_0}
CHECKPOINTED = {"swa_full": False, "n_ubatch": 64}  # makes a window cache of 256 cells
DENSE = {"segment_tokens": 64}
RIGS = [
    *(_rig(family.value, "", fake=True) for family in Family),
    *(_rig(family.value, "-whole", fake=True, whole=True) for family in Family),
    _rig("swa", "-dense", fake=True, dense=True),
    _rig("attention", ""),
    _rig("attention", "-flash", **FLASH),
    _rig("attention", "-q8", **Q8),
    _rig("attention", "-q8-keys", type_k=Q8_0),
    _rig("attention", "-whole", whole=True),
    _rig("swa", "-dense", **DENSE),
    _rig("swa", "-dense-flash", **DENSE, **FLASH),
    _rig("swa", "-full", segment_tokens=256),
    _rig("swa", "", **CHECKPOINTED),
    _rig("swa", "-flash", **CHECKPOINTED, **FLASH),
    _rig("swa", "-whole", whole=True),
    _rig("recurrent", ""),
    _rig("hybrid", ""),
    _rig("hybrid", "-flash", **FLASH),
    _rig("hybrid", "-q8", **Q8),
    _rig("hybrid", "-whole", whole=True),
    _rig("hybrid-swa", "", **CHECKPOINTED),
    _rig("hybrid-swa", "-full"),
    _rig("hybrid-swa", "-flash", **FLASH),
]


def _params(keep: Callable[[Rig], bool]) -> list[Any]:
    return [
        pytest.param(rig, id=rig.name, marks=() if rig.fake else pytest.mark.model)
        for rig in RIGS
        if keep(rig)
    ]


def only(keep: Callable[[Rig], bool]) -> pytest.MarkDecorator:
    """Run a test with the runtimes for which it has a meaning."""
    return pytest.mark.parametrize("rig", _params(keep), indirect=True)


with_segments = only(lambda rig: rig.segments)
with_two_sequences = only(lambda rig: not rig.alone)
with_checkpoints = only(lambda rig: rig.rolling)
with_device_checkpoints = only(lambda rig: rig.family in ("recurrent", "hybrid") and not rig.whole)


@pytest.fixture(scope="module", params=_params(lambda rig: True))
def rig(request: pytest.FixtureRequest) -> Rig:
    rig: Rig = request.param
    if rig.fake:
        return rig
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    model_dir: Path = request.getfixturevalue("model_dir")
    return Rig(
        rig.name,
        rig.family,
        rig.fake,
        rig.options,
        lambda family: model_dir / tiny_models.model_file(family),
    )


@pytest.fixture(scope="module")
def loaded(rig: Rig) -> Iterator[Runtime]:
    runtime = rig.make()
    yield runtime
    runtime.close()


@pytest.fixture
def runtime(loaded: Runtime) -> Iterator[Runtime]:
    """The module's runtime, empty before the test; its spare sequence is empty after it."""
    loaded.clear_all()
    if isinstance(loaded, FakeRuntime):
        loaded.failures = None
    yield loaded
    check_spare(loaded)
    loaded.clear_all()
    for seq_id in range(loaded.n_seqs):
        assert loaded.positions(seq_id) == Positions(-1, -1)


def check_spare(runtime: Any) -> None:
    """The spare sequence is empty, by size: positions can say so while rows are left."""
    if isinstance(runtime, FakeRuntime):
        used = {
            int(cell) for seq in runtime._sequences for cell in seq.cells[: seq.n_tokens].tolist()
        }
        assert runtime._cells.n_free == runtime.n_ctx - len(used)
    else:
        assert runtime._size(runtime._spare, 0) == runtime._empty_bytes


# -- helpers -----------------------------------------------------------------------------------


def tokens_of(seed: int, n_tokens: int = END) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, N_VOCAB, n_tokens, dtype=np.int32)


PROMPT = tokens_of(1)
OTHER = tokens_of(2)
NEXT = tokens_of(3, TAIL)
NEXT_TOO = tokens_of(4, TAIL)


def grow(
    runtime: Runtime, seq_id: int, tokens: np.ndarray, stops: tuple[int, ...] = STOPS
) -> dict[int, Checkpoint]:
    """Evaluate the rest of `tokens` in pieces that end at `stops`; checkpoint each, if any."""
    checkpoints = {}
    for stop in stops:
        held = runtime.positions(seq_id).n_tokens
        if held < stop <= tokens.size:
            runtime.evaluate(seq_id, tokens[held:stop])
            if runtime.traits.rolling:
                checkpoints[stop] = runtime.read_checkpoint(seq_id)
    return checkpoints


def cut(runtime: Runtime, seq_id: int, cuts: tuple[int, ...] = (0, *STOPS)) -> list[Segment]:
    """Read the segments between `cuts`; none where the runtime has none."""
    if not runtime.traits.segments:
        return []
    return [runtime.read_segment(seq_id, start, end) for start, end in pairwise(cuts)]


def after(runtime: Runtime, seq_id: int, tokens: np.ndarray = NEXT) -> np.ndarray:
    check_spare(runtime)
    runtime.evaluate(seq_id, tokens)
    return runtime.logits()


def cold(
    runtime: Runtime,
    tokens: np.ndarray = PROMPT,
    tail: np.ndarray = NEXT,
    stops: tuple[int, ...] = STOPS,
) -> np.ndarray:
    """Logits after `tokens` and `tail`, evaluated from nothing; the runtime is empty after it."""
    runtime.clear_all()
    for start, stop in pairwise((0, *stops)):
        if start < tokens.size:
            runtime.evaluate(0, tokens[start : min(stop, tokens.size)])
    logits = after(runtime, 0, tail)
    runtime.clear_all()
    return logits


def assert_same(runtime: Runtime, found: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=vars(runtime).get("atol", 0))


def assert_different(found: np.ndarray, expected: np.ndarray) -> None:
    assert np.abs(found - expected).max() > FAULT


# -- reading and restoring -----------------------------------------------------------------------


def test_the_family_is_what_it_should_be(rig: Rig, runtime: Runtime) -> None:
    traits = runtime.traits
    assert traits.family.value == rig.family
    assert bool(traits.whole_because) == rig.whole
    assert (traits.segments, traits.rolling) == (rig.segments, rig.rolling)
    assert traits.dense == rig.dense
    assert traits.n_swa == (64 if traits.family.has_window else 0)
    assert traits.max_segment_tokens == (64 if traits.dense else None)
    assert bool(traits.layout) != rig.whole


# With flash attention the order of the window's cells shows: see FLASH_TOLERANCE.
@only(lambda rig: rig.name not in ("llama-swa-flash", "llama-swa-dense-flash"))
def test_restored_alone_is_bit_for_bit_what_it_was(runtime: Runtime) -> None:
    expected = cold(runtime)
    checkpoints = grow(runtime, 0, PROMPT)
    segments = cut(runtime, 0)
    runtime.restore(0, END, segments, checkpoints.get(END))
    np.testing.assert_array_equal(after(runtime, 0), expected)


def test_restored_at_the_end(runtime: Runtime) -> None:
    checkpoints = grow(runtime, 0, PROMPT)
    segments = cut(runtime, 0)
    held = runtime.positions(0)
    live = after(runtime, 0)
    assert_same(runtime, live, cold(runtime))
    runtime.restore(0, END, segments, checkpoints.get(END))
    assert runtime.positions(0).n_tokens == END
    assert runtime.positions(0).pos_min >= held.pos_min
    assert_same(runtime, after(runtime, 0), live)


@pytest.mark.parametrize("position", [1, 8, 40, 63, 65])
def test_restored_inside_a_segment(runtime: Runtime, position: int) -> None:
    stops = tuple(sorted({position, *STOPS}))
    expected = cold(runtime, stops=stops)
    checkpoints = grow(runtime, 0, PROMPT, stops)
    segments = [part for part in cut(runtime, 0) if part.start < position]
    runtime.restore(0, position, segments, checkpoints.get(position))
    assert runtime.positions(0).n_tokens == position
    grow(runtime, 0, PROMPT, stops)
    assert_same(runtime, after(runtime, 0), expected)


def test_restored_from_segments_that_overlap(runtime: Runtime) -> None:
    checkpoints = grow(runtime, 0, PROMPT)
    segments = []
    if runtime.traits.segments:
        segments = [runtime.read_segment(0, *span) for span in ((0, 64), (40, 90), (50, 96))]
    live = after(runtime, 0)
    runtime.restore(0, END, segments, checkpoints.get(END))
    assert_same(runtime, after(runtime, 0), live)


def test_restored_over_a_longer_sequence(runtime: Runtime) -> None:
    checkpoints = grow(runtime, 0, PROMPT)
    segments = cut(runtime, 0)
    live = after(runtime, 0)
    runtime.clear(0)
    grow(runtime, 0, tokens_of(9, 300), (100, 200, 300))
    runtime.restore(0, END, segments, checkpoints.get(END))
    assert_same(runtime, after(runtime, 0), live)


@with_two_sequences
def test_restored_beside_a_live_sequence(runtime: Runtime) -> None:
    expected, expected_other = cold(runtime), cold(runtime, OTHER)
    checkpoints = grow(runtime, 0, PROMPT)
    segments = cut(runtime, 0)
    runtime.clear(0)
    grow(runtime, 0, OTHER)
    runtime.restore(1, END, segments, checkpoints.get(END))
    assert_same(runtime, after(runtime, 1), expected)
    assert_same(runtime, after(runtime, 0), expected_other)


# Where llama.cpp's layout is not known, sequence ids stay in the bytes.
without_ids = only(lambda rig: rig.fake or not (rig.whole or rig.alone))


@without_ids
def test_restored_state_can_be_saved_again(runtime: Runtime) -> None:
    checkpoints = grow(runtime, 0, PROMPT)
    segments = cut(runtime, 0)
    runtime.restore(1, END, segments, checkpoints.get(END))
    for again, first in zip(cut(runtime, 1), segments, strict=True):
        assert again.data.size == first.data.size
        np.testing.assert_array_equal(again.data, first.data)
    if runtime.traits.rolling:
        again = runtime.read_checkpoint(1)
        np.testing.assert_array_equal(again.data, checkpoints[END].data)


def test_reading_leaves_the_sequence_as_it_is(runtime: Runtime) -> None:
    expected = cold(runtime)
    for stop in STOPS:
        grow(runtime, 0, PROMPT[:stop])
        held = runtime.positions(0)
        cut(runtime, 0, (stop - 31, stop - 9, stop))
        assert runtime.positions(0) == held
    assert_same(runtime, after(runtime, 0), expected)


def test_what_is_read_cannot_be_changed(runtime: Runtime) -> None:
    checkpoints = grow(runtime, 0, PROMPT[:32])
    for kept in (*cut(runtime, 0, (0, 32)), *checkpoints.values()):
        assert not kept.data.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            kept.data[0] = 1


@without_ids
def test_equal_tokens_read_through_another_sequence_are_equal_bytes(runtime: Runtime) -> None:
    grow(runtime, 0, PROMPT)
    runtime.copy(0, 1, END)
    for first, second in zip(cut(runtime, 0), cut(runtime, 1), strict=True):
        np.testing.assert_array_equal(first.data, second.data)
    if runtime.traits.rolling:
        np.testing.assert_array_equal(
            runtime.read_checkpoint(0).data, runtime.read_checkpoint(1).data
        )


# -- sizes -------------------------------------------------------------------------------------


def test_sizes_are_known_before_reading(runtime: Runtime) -> None:
    for n_tokens in (1, 2, 31, 32, 64):
        runtime.clear(0)
        runtime.evaluate(0, PROMPT[:n_tokens])
        if runtime.traits.segments:
            segment = runtime.read_segment(0, 0, n_tokens)
            assert segment.data.size == runtime.segment_bytes(n_tokens)
        if runtime.traits.rolling:
            assert runtime.read_checkpoint(0).data.size == runtime.checkpoint_bytes(0)


@with_segments
def test_segments_are_as_large_as_their_range(runtime: Runtime) -> None:
    grow(runtime, 0, PROMPT)
    base = runtime.segment_bytes(1)
    per_token = runtime.segment_bytes(2) - base
    for start, end in ((0, 10), (50, 60), (86, 96)):
        assert runtime.read_segment(0, start, end).data.size == base + 9 * per_token


def test_another_context_size(rig: Rig, runtime: Runtime) -> None:
    """States move between contexts; what does not fit is refused before anything changes."""
    expected = cold(runtime)
    tokens = np.concatenate([PROMPT, tokens_of(5, 224)])
    checkpoints = grow(runtime, 0, tokens, (*STOPS, 320))
    segments = cut(runtime, 0, (0, *STOPS, 160, 224, 288, 320))
    smaller = rig.make(n_ctx=256, n_seqs=1)
    try:
        if runtime.traits.segments:
            assert smaller.segment_bytes(10) == runtime.segment_bytes(10)
        assert smaller.traits.layout == runtime.traits.layout
        smaller.restore(0, END, segments[:3], checkpoints.get(END))
        with pytest.raises(StateRejected, match=r"320 .* 256"):
            smaller.restore(0, 320, segments, checkpoints.get(320))
        assert_same(runtime, after(smaller, 0), expected)
        if runtime.traits.rolling:
            assert smaller.read_checkpoint(0).data.size == smaller.checkpoint_bytes(0)
    finally:
        smaller.close()
    smaller.close()
    with pytest.raises(KeeperClosed):
        smaller.logits()
    for call in every_call(smaller, 0):
        with pytest.raises(KeeperClosed):
            call()


# -- refusing ----------------------------------------------------------------------------------


def every_call(runtime: Runtime, seq_id: int) -> list[Callable[[], object]]:
    """Every call that names a sequence, with arguments that are wrong only if that is."""
    calls: list[Callable[[], object]] = [
        lambda: runtime.evaluate(seq_id, NEXT),
        lambda: runtime.positions(seq_id),
        lambda: runtime.checkpoint_bytes(seq_id),
        lambda: runtime.restore(seq_id, 1, ()),
        lambda: runtime.can_rewind(seq_id, 0),
        lambda: runtime.rewind(seq_id, 0),
        lambda: runtime.copy(seq_id, 0, 1),
        lambda: runtime.clear(seq_id),
    ]
    if runtime.traits.segments:
        calls.append(lambda: runtime.read_segment(seq_id, 0, 1))
    if runtime.traits.rolling:
        calls.append(lambda: runtime.read_checkpoint(seq_id))
    if runtime.traits.family in (Family.RECURRENT, Family.HYBRID):
        calls.append(lambda: runtime.read_device_checkpoint(seq_id))
    return calls


@pytest.mark.parametrize("seq_id", [-1, 2, 1_000])
def test_unknown_sequences_are_named(runtime: Runtime, seq_id: int) -> None:
    runtime.evaluate(0, NEXT)
    for call in [*every_call(runtime, seq_id), lambda: runtime.copy(0, seq_id, 1)]:
        with pytest.raises(InvalidValue, match=f"seq_id {seq_id} "):
            call()


def test_ranges_that_are_not_held_are_named(runtime: Runtime) -> None:
    if not runtime.traits.segments:
        with pytest.raises(InvalidValue, match="no segments"):
            runtime.read_segment(0, 0, 1)
        return
    with pytest.raises(InvalidValue, match="0 to 1: the sequence holds 0"):
        runtime.read_segment(0, 0, 1)
    grow(runtime, 0, PROMPT)
    for start, end in ((0, 0), (5, 3), (-1, 4), (-4, -1), (90, 97)):
        with pytest.raises(InvalidValue, match=f"no tokens {start} to {end}"):
            runtime.read_segment(0, start, end)
    if runtime.traits.dense:
        with pytest.raises(InvalidValue, match="outgrows 64"):
            runtime.read_segment(0, 0, 65)


def test_checkpoints_of_nothing_are_named(runtime: Runtime) -> None:
    if runtime.traits.rolling:
        with pytest.raises(InvalidValue, match="sequence 1 is empty"):
            runtime.read_checkpoint(1)
        return
    runtime.evaluate(0, NEXT)
    with pytest.raises(InvalidValue, match="needs no checkpoints"):
        runtime.read_checkpoint(0)
    with pytest.raises(InvalidValue, match="needs no checkpoints"):
        runtime.read_device_checkpoint(0)


@with_two_sequences
def test_rewinds_and_copies_beyond_the_end_are_named(runtime: Runtime) -> None:
    grow(runtime, 0, PROMPT)
    for n_tokens in (-1, END + 1):
        assert not runtime.can_rewind(0, n_tokens)
        with pytest.raises(InvalidValue, match=rf"cannot rewind to {n_tokens}: .* holds 96"):
            runtime.rewind(0, n_tokens)
    for n_tokens in (-1, 0, END + 1):
        with pytest.raises(InvalidValue, match=rf"cannot copy {n_tokens} tokens: .* holds 96"):
            runtime.copy(0, 1, n_tokens)
    with pytest.raises(InvalidValue, match="to itself"):
        runtime.copy(0, 0, 8)
    assert_same(runtime, after(runtime, 0), cold(runtime))


def test_tokens_outside_the_vocabulary_are_named(runtime: Runtime) -> None:
    runtime.evaluate(0, NEXT)
    for token in (-1, runtime.n_vocab):
        with pytest.raises(TokenError, match=f"token {token} at index 1 "):
            runtime.evaluate(0, np.array([5, token], np.int32))
    assert runtime.positions(0).n_tokens == TAIL


def test_evaluating_nothing_changes_nothing(runtime: Runtime) -> None:
    first = after(runtime, 0)
    runtime.evaluate(0, np.empty(0, np.int32))
    assert runtime.positions(0).n_tokens == TAIL
    np.testing.assert_array_equal(runtime.logits(), first)


def test_logits_are_a_copy(runtime: Runtime) -> None:
    first = after(runtime, 0)
    assert first.shape == (runtime.n_vocab,)
    assert first.dtype == np.float32
    first[:] = 0
    assert runtime.logits().any()


def test_context_overflow_names_both_numbers(runtime: Runtime) -> None:
    grow(runtime, 0, PROMPT)
    with pytest.raises(ContextOverflow, match=r"513 .* 512"):
        runtime.evaluate(0, tokens_of(5, 417))
    assert runtime.positions(0).n_tokens == END
    assert_same(runtime, after(runtime, 0), cold(runtime))
    with pytest.raises(StateRejected, match=r"513 .* 512"):
        runtime.restore(0, 513, (), None)


# A recurrent state takes the same room for any number of tokens.
@only(lambda rig: rig.family != "recurrent" and not rig.alone)
def test_no_room_beside_another_sequence(runtime: Runtime) -> None:
    expected = cold(runtime)
    long = tokens_of(6, 480)
    checkpoints = grow(runtime, 0, PROMPT)
    segments = cut(runtime, 0)
    runtime.clear(0)
    grow(runtime, 0, long, (256, 480))
    with pytest.raises(RestoreFailed) as failed:
        runtime.restore(1, END, segments, checkpoints.get(END))
    assert not failed.value.cleared_all
    assert runtime.positions(1) == Positions(-1, -1)
    with pytest.raises(DecodeError, match=r"512"):
        runtime.evaluate(1, PROMPT)
    assert runtime.positions(1) == Positions(-1, -1)
    check_spare(runtime)
    assert runtime.positions(0).n_tokens == 480
    found = after(runtime, 0)
    runtime.clear(0)
    runtime.restore(1, END, segments, checkpoints.get(END))
    assert_same(runtime, after(runtime, 1), expected)
    assert_same(runtime, found, cold(runtime, long, stops=(256, 480)))


BAD_SEGMENTS: dict[str, Callable[[list[Segment]], list[Segment]]] = {
    "none": lambda parts: [],
    "first missing": lambda parts: parts[1:],
    "middle missing": lambda parts: [parts[0], parts[2]],
    "last missing": lambda parts: parts[:2],
    "doubled": lambda parts: [parts[0], parts[0], *parts[1:], parts[2]],
    "swapped": lambda parts: [parts[1], parts[0], parts[2]],
    "backwards": lambda parts: [*parts[:2], parts[0], parts[2]],
    "one too many": lambda parts: [*parts, Segment(END, END + 32, parts[2].data)],
    "called another": lambda parts: [parts[0], Segment(32, 64, parts[2].data), parts[2]],
    "called longer": lambda parts: [*parts[:2], Segment(64, 128, parts[2].data)],
    "called shorter": lambda parts: [*parts[:2], Segment(65, 96, parts[2].data)],
    "truncated": lambda parts: [*parts[:2], Segment(64, 96, parts[2].data[:-1])],
    "in the header": lambda parts: [*parts[:2], Segment(64, 96, parts[2].data[:5])],
    "empty": lambda parts: [*parts[:2], Segment(64, 96, parts[2].data[:0])],
    "longer": lambda parts: [*parts[:2], Segment(64, 96, np.append(parts[2].data, np.uint8(0)))],
    "noise": lambda parts: [*parts[:2], Segment(64, 96, np.full(999, 7, np.uint8))],
}


@with_segments
def test_wrong_segments_are_refused(runtime: Runtime) -> None:
    expected = cold(runtime, OTHER)
    checkpoints = grow(runtime, 0, PROMPT)
    segments = cut(runtime, 0)
    runtime.clear(0)
    grow(runtime, 0, OTHER)
    held = runtime.positions(0)
    for fault, spoil in BAD_SEGMENTS.items():
        with pytest.raises(StateRejected):
            runtime.restore(0, END, spoil(list(segments)), checkpoints.get(END))
        assert runtime.positions(0) == held, fault
    assert_same(runtime, after(runtime, 0), expected)


BAD_CHECKPOINTS: dict[str, Callable[[dict[int, Checkpoint]], Checkpoint | None]] = {
    "none": lambda kept: None,
    "of an earlier position": lambda kept: kept[64],
    "called another": lambda kept: Checkpoint(96, kept[64].data),
    "called the one before": lambda kept: Checkpoint(95, kept[96].data),
    "truncated": lambda kept: Checkpoint(96, kept[96].data[:-1]),
    "in the header": lambda kept: Checkpoint(96, kept[96].data[:7]),
    "empty": lambda kept: Checkpoint(96, kept[96].data[:0]),
    "longer": lambda kept: Checkpoint(96, np.append(kept[96].data, np.uint8(0))),
    "noise": lambda kept: Checkpoint(96, np.full(999, 7, np.uint8)),
}
NATIVE_IN_WHOLE_MODE = {"called another", "truncated", "longer"}
"""Faults that only llama.cpp can notice where the layout is not known."""


@with_checkpoints
def test_wrong_checkpoints_are_refused(rig: Rig, runtime: Runtime) -> None:
    expected = cold(runtime, OTHER)
    checkpoints = grow(runtime, 0, PROMPT)
    segments = cut(runtime, 0)
    runtime.clear(0)
    grow(runtime, 0, OTHER)
    held = runtime.positions(0)
    for fault, spoil in BAD_CHECKPOINTS.items():
        bad = spoil(checkpoints)
        if rig.whole and not rig.fake and fault in NATIVE_IN_WHOLE_MODE:
            with pytest.raises(RestoreFailed):
                runtime.restore(0, END, segments, bad)
            assert runtime.positions(0) == Positions(-1, -1), fault
            grow(runtime, 0, OTHER)
            continue
        with pytest.raises(StateRejected):
            runtime.restore(0, END, segments, bad)
        assert runtime.positions(0) == held, fault
        if bad is not None:
            with pytest.raises(StateRejected):
                runtime.copy(0, 1, END, bad)
        assert runtime.positions(1) == Positions(-1, -1), fault
    assert_same(runtime, after(runtime, 0), expected)


# The tiny hybrid-SWA model has no dense layer: its segments hold cells without rows.
@only(lambda rig: rig.segments and (rig.fake or rig.family != "hybrid-swa"))
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_segment_of_other_tokens_shows(runtime: Runtime, index: int) -> None:
    """Nothing in the bytes says whose they are: what the names are for."""
    grow(runtime, 0, OTHER)
    foreign = cut(runtime, 0)
    runtime.clear(0)
    checkpoints = grow(runtime, 0, PROMPT)
    segments = cut(runtime, 0)
    live = after(runtime, 0)
    segments[index] = foreign[index]
    runtime.restore(0, END, segments, checkpoints.get(END))
    assert_different(after(runtime, 0), live)


@with_checkpoints
def test_a_checkpoint_of_other_tokens_shows(runtime: Runtime) -> None:
    foreign = grow(runtime, 0, OTHER)
    runtime.clear(0)
    grow(runtime, 0, PROMPT)
    segments = cut(runtime, 0)
    live = after(runtime, 0)
    runtime.restore(0, END, segments, foreign[END])
    assert_different(after(runtime, 0), live)


# -- rewinding and copying -----------------------------------------------------------------------


@pytest.mark.parametrize("position", [8, 32, 64, 88])
def test_rewound_in_place(runtime: Runtime, position: int) -> None:
    stops = tuple(sorted({position, *STOPS}))
    tail = OTHER[:16]
    expected = cold(runtime, PROMPT[:position], tail, stops[: stops.index(position) + 1])
    checkpoints = grow(runtime, 0, PROMPT, stops)
    runtime.rewind(0, position, checkpoints.get(position))
    assert runtime.positions(0).n_tokens == position
    assert_same(runtime, after(runtime, 0, tail), expected)


@pytest.mark.parametrize("position", [0, 1, 8, 40, 95, 96])
def test_can_rewind_tells_the_truth(runtime: Runtime, position: int) -> None:
    for restored in (False, True):
        runtime.clear_all()
        checkpoints = grow(runtime, 0, PROMPT)
        if restored:
            runtime.restore(0, END, cut(runtime, 0), checkpoints.get(END))
        held = runtime.positions(0)
        able = runtime.can_rewind(0, position)
        assert able or position not in (0, END)
        if not able:
            assert runtime.traits.rolling
            with pytest.raises(StateRejected):
                runtime.rewind(0, position)
            assert runtime.positions(0) == held
            continue
        runtime.rewind(0, position)
        assert runtime.positions(0).n_tokens == position
        found = after(runtime, 0)
        stops = tuple(stop for stop in STOPS if stop < position) + (position,) * bool(position)
        assert_same(runtime, found, cold(runtime, PROMPT[:position], NEXT, stops))


def test_can_rewind_knows_what_left_the_window(runtime: Runtime) -> None:
    tokens = np.concatenate([PROMPT, tokens_of(5, 304)])
    for position in (399, 397, 352, 338, 337, 336, 64, 1):
        grow(runtime, 0, tokens, (*STOPS, 200, 300, 400))
        able = runtime.can_rewind(0, position)
        if not able:
            with pytest.raises(StateRejected):
                runtime.rewind(0, position)
            assert runtime.positions(0).n_tokens == 400
            continue
        runtime.rewind(0, position)
        found = after(runtime, 0)
        stops = (*(stop for stop in (*STOPS, 200, 300) if stop < position), position)
        assert_same(runtime, found, cold(runtime, tokens[:position], NEXT, stops))


@only(lambda rig: rig.rolling and (rig.fake or not rig.whole))
def test_rewinding_with_the_wrong_checkpoint_is_refused(runtime: Runtime) -> None:
    checkpoints = grow(runtime, 0, PROMPT)
    runtime.restore(0, END, cut(runtime, 0), checkpoints[END])  # full-size windows need one now
    for bad in (checkpoints[32], Checkpoint(64, checkpoints[32].data), None):
        with pytest.raises(StateRejected):
            runtime.rewind(0, 64, bad)
    assert_same(runtime, after(runtime, 0), cold(runtime))


@with_two_sequences
def test_copied_whole(runtime: Runtime) -> None:
    expected, expected_too = cold(runtime), cold(runtime, tail=NEXT_TOO)
    grow(runtime, 1, OTHER)  # is replaced
    grow(runtime, 0, PROMPT)
    held = runtime.positions(0)
    runtime.copy(0, 1, END)
    assert runtime.positions(0) == held
    assert runtime.positions(1).n_tokens == END
    # Each goes on for more than a window, so that what they share is overwritten if it can be.
    assert_same(runtime, after(runtime, 1, NEXT_TOO), expected_too)
    assert_same(runtime, after(runtime, 0), expected)
    runtime.evaluate(0, tokens_of(7, 128))
    runtime.evaluate(1, tokens_of(8, 128))
    first, second = after(runtime, 0), after(runtime, 1)
    runtime.clear_all()
    for tail, rest, found in ((NEXT, 7, first), (NEXT_TOO, 8, second)):
        grow(runtime, 0, PROMPT)
        runtime.evaluate(0, tail)
        runtime.evaluate(0, tokens_of(rest, 128))
        assert_same(runtime, found, after(runtime, 0))
        runtime.clear(0)


@with_two_sequences
@pytest.mark.parametrize("position", [32, 64, 88])
def test_copied_up_to_a_checkpoint(runtime: Runtime, position: int) -> None:
    stops = tuple(sorted({position, *STOPS}))
    until = stops[: stops.index(position) + 1]
    expected = cold(runtime, PROMPT[:position], NEXT_TOO, until)
    expected_source = cold(runtime, stops=stops)
    checkpoints = grow(runtime, 0, PROMPT, stops)
    runtime.copy(0, 1, position, checkpoints.get(position))
    assert runtime.positions(1).n_tokens == position
    assert_same(runtime, after(runtime, 1, NEXT_TOO), expected)
    assert_same(runtime, after(runtime, 0), expected_source)


@with_two_sequences
def test_copying_a_prefix_needs_its_checkpoint(runtime: Runtime) -> None:
    checkpoints = grow(runtime, 0, PROMPT)
    if not runtime.traits.rolling:
        runtime.copy(0, 1, 41)
        assert runtime.positions(1).n_tokens == 41
        return
    grow(runtime, 1, OTHER)
    with pytest.raises(InvalidValue, match="copying 64 of 96 tokens needs a checkpoint"):
        runtime.copy(0, 1, 64)
    with pytest.raises(StateRejected):
        runtime.copy(0, 1, 64, checkpoints[32])
    assert runtime.positions(1).n_tokens == END
    assert_same(runtime, after(runtime, 1), cold(runtime, OTHER))


@only(lambda rig: rig.alone)
def test_windows_stay_dense_only_in_a_context_of_one_sequence(rig: Rig) -> None:
    """With several, llama.cpp takes cells that left a window before free ones further on."""
    runtime = rig.make(n_seqs=2)
    assert not runtime.traits.dense
    assert runtime.traits.rolling
    runtime.close()


# -- device checkpoints --------------------------------------------------------------------------


def grow_past(runtime: Runtime, n_tokens: int = 300) -> DeviceCheckpoint:
    """Leave a device checkpoint at 64 and go on, past what a window still holds."""
    grow(runtime, 0, PROMPT[:64])
    kept = runtime.read_device_checkpoint(0)
    grow(runtime, 0, np.concatenate([PROMPT, tokens_of(5, n_tokens - END)]), (*STOPS, n_tokens))
    return kept


def refused(runtime: Runtime, kept: DeviceCheckpoint, match: str) -> None:
    held = runtime.positions(0)
    assert not runtime.can_rewind(0, 64)
    with pytest.raises(StateRejected, match=match):
        runtime.rewind(0, 64, kept)
    assert runtime.positions(0) == held


@only(lambda rig: rig.whole)
def test_whole_states_are_not_left_on_the_device(runtime: Runtime) -> None:
    runtime.evaluate(0, NEXT)
    with pytest.raises(InvalidValue, match="kept whole"):
        runtime.read_device_checkpoint(0)


@only(lambda rig: "swa" in rig.family and rig.rolling and not rig.whole)
def test_windows_are_not_left_on_the_device(runtime: Runtime) -> None:
    runtime.evaluate(0, NEXT)
    with pytest.raises(InvalidValue, match="window"):
        runtime.read_device_checkpoint(0)


@with_device_checkpoints
def test_a_device_checkpoint_works(runtime: Runtime) -> None:
    expected = cold(runtime, PROMPT[:64], NEXT, (32, 64))
    kept = grow_past(runtime)
    assert kept.device_bytes > 0
    assert kept.data.size < runtime.checkpoint_bytes(0)
    for _ in range(2):
        runtime.rewind(0, 64, kept)
        assert_same(runtime, after(runtime, 0), expected)
        runtime.evaluate(0, tokens_of(6, 240))


@with_device_checkpoints
def test_the_newer_device_checkpoint_ends_the_older(runtime: Runtime) -> None:
    kept = grow_past(runtime)
    newer = runtime.read_device_checkpoint(0)
    refused(runtime, kept, "gone")
    assert newer.position == 300


@with_device_checkpoints
@pytest.mark.parametrize("clear", ["clear", "clear_all", "restore", "copy"])
def test_an_emptied_sequence_ends_its_device_checkpoint(runtime: Runtime, clear: str) -> None:
    kept = grow_past(runtime)
    if clear == "clear":
        runtime.clear(0)
    elif clear == "clear_all":
        runtime.clear_all()
    elif clear == "restore":
        runtime.restore(0, 300, cut(runtime, 0, (0, 300)), runtime.read_checkpoint(0))
    else:
        grow(runtime, 1, OTHER)
        runtime.copy(1, 0, END)
    if runtime.positions(0).n_tokens < 300:
        grow(runtime, 0, tokens_of(9, 300), (300,))
    refused(runtime, kept, "gone")
    again = runtime.read_device_checkpoint(0)
    assert again.generation != kept.generation
    refused(runtime, kept, "gone")


@with_device_checkpoints
def test_rewinding_before_a_device_checkpoint_ends_it(runtime: Runtime) -> None:
    checkpoints = grow(runtime, 0, PROMPT[:32])
    kept = grow_past(runtime)
    runtime.rewind(0, 32, checkpoints[32])
    grow(runtime, 0, tokens_of(9, 300), (300,))
    refused(runtime, kept, "gone")


@with_device_checkpoints
def test_a_device_checkpoint_of_another_context_is_refused(rig: Rig, runtime: Runtime) -> None:
    other = rig.make()
    try:
        foreign = grow_past(other)
        grow_past(runtime)
        refused(runtime, foreign, "context")
    finally:
        other.close()


@with_device_checkpoints
def test_a_device_checkpoint_of_another_sequence_is_refused(runtime: Runtime) -> None:
    grow(runtime, 1, PROMPT[:64])
    kept = runtime.read_device_checkpoint(1)
    grow_past(runtime)
    refused(runtime, kept, "of sequence 1, not 0")


# -- the fake alone ------------------------------------------------------------------------------

fakes = pytest.mark.parametrize(
    "fake",
    [
        pytest.param(
            lambda family=family, options=options, **more: FakeRuntime(
                family, n_vocab=N_VOCAB, **{**options, **more}
            ),
            id=f"{family.value}{''.join(f'-{option}' for option in options)}",
        )
        for family in Family
        for options in ({}, {"whole": True}, {"dense": True})
        if not options.get("dense") or family is Family.SWA
    ],
)
MakeFake = Callable[..., FakeRuntime]


@fakes
def test_fake_logits_do_not_depend_on_how_tokens_are_batched(fake: MakeFake) -> None:
    tokens = tokens_of(1, 700)
    once, twice, single = fake(n_batch=1024), fake(n_batch=7), fake()
    once.evaluate(0, tokens)
    twice.evaluate(0, tokens[:333])
    twice.evaluate(0, tokens[333:])
    for token in tokens:
        single.evaluate(0, np.array([token]))
    np.testing.assert_array_equal(once.logits(), twice.logits())
    np.testing.assert_array_equal(once.logits(), single.logits())
    for first, second in zip(cut(once, 0, (0, 60, 120)), cut(single, 0, (0, 60, 120)), strict=True):
        np.testing.assert_array_equal(first.data, second.data)
    assert (once.calls.evaluate, once.calls.evaluated_tokens) == (1, 700)
    assert (twice.calls.evaluate, twice.calls.evaluated_tokens) == (48 + 53, 700)


@fakes
def test_fake_logits_depend_on_every_token_and_its_place(fake: MakeFake) -> None:
    seen = set()
    for change in (0, 1, 2, 3):
        tokens = tokens_of(1, 200)
        if change == 1:
            tokens[0] += 1
        if change == 2:
            tokens[[3, 4]] = tokens[[4, 3]]
        if change == 3:
            tokens[-1] += 1
        runtime = fake()
        runtime.evaluate(0, tokens)
        seen.add(runtime.logits().tobytes())
    runtime = fake(seed=1)
    runtime.evaluate(0, tokens_of(1, 200))
    seen.add(runtime.logits().tobytes())
    assert len(seen) == 5


def test_fake_attends_to_what_is_there() -> None:
    """Damage that no call can do: each part of the state matters to what follows."""
    damages: dict[str, tuple[str, Callable[[Any], None]]] = {
        "dense row": ("attention", lambda seq: seq.rows.__setitem__(5, 1)),
        "window row": ("swa", lambda seq: seq.window.__setitem__(90, 1)),
        "short window": ("swa", lambda seq: setattr(seq, "window_start", 40)),
        "recurrent": ("recurrent", lambda seq: setattr(seq, "recurrent", 1)),
        "hybrid": ("hybrid", lambda seq: setattr(seq, "recurrent", 1)),
        "stale row": ("hybrid-swa", lambda seq: seq.rows.__setitem__(95, seq.rows[94])),
    }
    for family, damage in damages.values():
        runtime = FakeRuntime(family)
        expected = cold(runtime)
        grow(runtime, 0, PROMPT)
        damage(runtime._sequences[0])
        assert_different(after(runtime, 0), expected)
        runtime.evaluate(0, tokens_of(5, 200))
        later = after(runtime, 0)
        runtime.clear(0)
        for tokens in (PROMPT, NEXT, tokens_of(5, 200)):
            runtime.evaluate(0, tokens)
        assert_different(after(runtime, 0), later)


def test_fake_does_not_attend_to_what_left_its_window() -> None:
    runtime = FakeRuntime("swa", dense=True)
    expected = cold(runtime)
    grow(runtime, 0, PROMPT)
    runtime._sequences[0].window[: END - 64 + 1] = 1
    assert_same(runtime, after(runtime, 0), expected)


@fakes
def test_fake_refuses_any_flipped_bit_of_a_header(fake: MakeFake) -> None:
    runtime = fake()
    checkpoints = grow(runtime, 0, PROMPT)
    segments = cut(runtime, 0)
    kept = [*segments[:1], *list(checkpoints.values())[-1:]]
    for bit in range(48 * 8):
        for state in kept:
            data = state.data.copy()
            data[bit // 8] ^= 1 << bit % 8
            parts, checkpoint = segments, checkpoints.get(END)
            if isinstance(state, Segment):
                parts = [Segment(0, 32, data), *segments[1:]]
            else:
                checkpoint = Checkpoint(END, data)
            with pytest.raises(StateRejected):
                runtime.restore(0, END, parts, checkpoint)


def test_fake_sizes_are_those_asked_for() -> None:
    runtime = FakeRuntime(
        "hybrid-swa", row_bytes=23_040, window_row_bytes=100, recurrent_bytes=19_000_000
    )
    checkpoints = grow(runtime, 0, PROMPT)
    header = runtime.segment_bytes(0)
    assert runtime.segment_bytes(256) == header + 256 * 23_040
    assert checkpoints[32].data.size == header + 32 * 100 + 19_000_000
    assert checkpoints[96].data.size == header + 64 * 100 + 19_000_000
    runtime.restore(0, END, cut(runtime, 0), checkpoints[END])
    assert_same(runtime, after(runtime, 0), cold(runtime))


def test_fake_refuses_another_layout_but_not_another_model() -> None:
    runtime = FakeRuntime("attention")
    grow(runtime, 0, PROMPT)
    segments = cut(runtime, 0)
    live = after(runtime, 0)
    with pytest.raises(StateRejected, match="layout"):
        FakeRuntime("attention", row_bytes=24).restore(0, END, segments)
    with pytest.raises(StateRejected, match="layout"):
        FakeRuntime("hybrid").restore(0, END, segments)
    another = FakeRuntime("attention", seed=1)
    another.restore(0, END, segments)
    assert_different(after(another, 0), live)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {name: 0}) for name in ("n_ctx", "n_seqs", "n_batch", "n_vocab", "n_swa")),
        *((name, {name: 7}) for name in ("row_bytes", "window_row_bytes", "recurrent_bytes")),
        ("dense", {"dense": True}),
    ],
)
def test_fake_names_impossible_options(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue, match=name):
        FakeRuntime("attention", **options)


def test_fake_has_no_logits_before_the_first_token() -> None:
    with pytest.raises(InvalidValue, match="nothing was evaluated"):
        FakeRuntime("attention").logits()


def test_fake_counts_what_a_real_runtime_would_do() -> None:
    runtime = FakeRuntime("hybrid", n_seqs=2)
    checkpoints = grow(runtime, 0, PROMPT)
    segments = cut(runtime, 0)
    calls = runtime.calls
    states = [*segments, *checkpoints.values()]
    assert (calls.evaluate, calls.evaluated_tokens) == (3, END)
    assert (calls.reads, calls.read_bytes) == (6, sum(state.data.size for state in states))
    assert (calls.writes, calls.written_bytes) == (0, 0)
    runtime.restore(0, 64, segments[:2], checkpoints[64])
    written = [*segments[:2], checkpoints[64]]
    assert (calls.restores, calls.writes) == (1, 3)
    assert calls.written_bytes == sum(state.data.size for state in written)
    runtime.rewind(0, 32, checkpoints[32])
    runtime.copy(0, 1, 32, checkpoints[32])
    assert (calls.rewinds, calls.copies, calls.writes, calls.reads) == (1, 1, 5, 6)
    runtime.read_device_checkpoint(0)
    assert (calls.reads, calls.device_reads) == (6, 1)


def run(runtime: FakeRuntime, operation: str, kept: dict[int, Checkpoint], parts: Any) -> None:
    """Do what contains `operation`: to sequence 1 for copies, to sequence 0 otherwise."""
    name = operation.partition(":")[0]
    if name == "evaluate":
        runtime.evaluate(0, tokens_of(5, 40))
    elif name == "read_segment":
        runtime.read_segment(0, 0, 32)
    elif name == "read_checkpoint":
        runtime.read_checkpoint(0)
    elif name == "read_device_checkpoint":
        runtime.read_device_checkpoint(0)
    elif name == "restore":
        runtime.restore(0, END, parts, kept[END])
    elif name == "rewind":
        runtime.rewind(0, 64, kept[64])
    else:
        runtime.copy(0, 1, 64, kept[64])


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("family", ["swa", "hybrid", "hybrid-swa"])
def test_fake_fails_where_it_is_told_to(family: str, operation: str) -> None:
    if operation == "read_device_checkpoint" and "swa" in family:
        return
    runtime = FakeRuntime(family, n_seqs=2, n_batch=32)
    expected = cold(runtime, OTHER)
    kept = grow(runtime, 0, OTHER)
    parts = cut(runtime, 0)
    grow(runtime, 1, PROMPT)
    runtime.evaluate(0, NEXT)
    changed = 1 if operation.startswith("copy") else 0
    held = runtime.positions(changed)
    runtime.fail(operation)
    error: type[Exception] = StateRejected
    if operation == "evaluate":
        error = DecodeError
    elif operation.startswith("read"):
        error = StateError
    elif ":" in operation:
        error = RestoreFailed
    with pytest.raises(error, match=f"injected into {operation}"):
        run(runtime, operation, kept, parts)
    emptied = ":" in operation or operation == "evaluate"
    assert runtime.positions(changed) == (Positions(-1, -1) if emptied else held)
    check_spare(runtime)
    if changed == 0:
        runtime.clear(0)
        grow(runtime, 0, OTHER)
    else:
        runtime.rewind(0, END, kept[END])
    assert_same(runtime, after(runtime, 0), expected)
    runtime.rewind(0, END, kept[END])
    run(runtime, operation, kept, parts)  # it fails once


def test_fake_fails_later_in_its_own_way_and_for_all() -> None:
    runtime = FakeRuntime("hybrid", n_seqs=2, n_batch=16)
    kept = grow(runtime, 0, PROMPT)
    parts = cut(runtime, 0)
    grow(runtime, 1, PROMPT)

    runtime.fail("evaluate", after=2)
    with pytest.raises(DecodeError):
        runtime.evaluate(0, tokens_of(5, 64))
    assert runtime.positions(0).n_tokens == 0

    runtime.fail("restore:segment", after=1, error=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        runtime.restore(0, END, parts, kept[END])
    assert runtime.positions(0).n_tokens == 0

    runtime.fail("restore:verify", cleared_all=True)
    with pytest.raises(RestoreFailed) as failed:
        runtime.restore(0, END, parts, kept[END])
    assert failed.value.cleared_all
    assert runtime.positions(1).n_tokens == 0

    runtime.restore(0, END, parts, kept[END])
    runtime.fail("read_segment", error=StateError("a size was wrong"))
    runtime.fail("read_segment")
    with pytest.raises(StateError, match="a size was wrong"):
        runtime.read_segment(0, 0, 8)
    with pytest.raises(StateError, match="injected"):
        runtime.read_segment(0, 0, 8)
    runtime.read_segment(0, 0, 8)

    seen: list[str] = []
    runtime.failures = seen.append
    runtime.restore(0, END, parts, kept[END])
    assert seen == ["restore", *["restore:segment"] * 3, "restore:checkpoint", "restore:verify"]
    with pytest.raises(InvalidValue, match="unknown operation 'reboot'"):
        runtime.fail("reboot")
    with pytest.raises(InvalidValue, match="nothing is cleared"):
        runtime.fail("restore", cleared_all=True)


def test_fake_sequences_share_the_rows_they_have_in_common() -> None:
    runtime = FakeRuntime("attention", n_ctx=128, n_seqs=3)
    runtime.evaluate(0, PROMPT)
    runtime.copy(0, 1, END)
    runtime.copy(0, 2, 64)
    runtime.clear(0)
    runtime.evaluate(1, tokens_of(5, 32))
    with pytest.raises(DecodeError):
        runtime.evaluate(2, NEXT)
    runtime.rewind(1, 80)
    runtime.evaluate(1, tokens_of(5, 48))
    runtime.clear_all()
    runtime.evaluate(2, tokens_of(5, 128))
    check_spare(runtime)


# -- loading -------------------------------------------------------------------------------------


@pytest.mark.model
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot read the model .*: No such file"),
        (b"PK\x03\x04", "is not a GGUF file"),
        (b"", "is not a GGUF file"),
        (b"GGUF\x03\0\0\0 and then nothing", "could not load"),
    ],
)
def test_models_that_cannot_be_loaded_are_named(
    tmp_path: Path, content: bytes | None, said: str
) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    from llamakeep.runtime.llama_cpp import LlamaCppRuntime

    path = tmp_path / "model.gguf"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelError, match=said) as raised:
        LlamaCppRuntime.load(path)
    assert str(path) in str(raised.value)
    with pytest.raises(InvalidValue, match="n_ctx must be 0 or more, not -1"):
        LlamaCppRuntime.load(path, n_ctx=-1)
    with pytest.raises(InvalidValue, match="n_seqs must be 1 or more, not 0"):
        LlamaCppRuntime.load(path, n_seqs=0)
