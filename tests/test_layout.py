"""Bytes that are not what they should be: refused before native code sees them.

llama.cpp takes cell tables and counts on trust. The first half of this file spoils states byte by
byte and asks the layout; the second half shows what llama.cpp does without the checks, and that a
sequence is empty, by size, after anything that goes wrong in the middle of a restore.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llamakeep.errors import RestoreFailed, StateRejected
from llamakeep.runtime.layout import (
    MAGIC,
    KvLayout,
    RecurrentLayout,
    StateLayout,
    check_cover,
    check_header,
    learn_kv,
    learn_recurrent,
)
from llamakeep.states import Buffer, Checkpoint, Positions, Segment
from tests import tiny_models

WINDOW = 64
N_TOKENS = 70
FAST = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


# -- states made by hand -------------------------------------------------------------------------


def u32(*values: int) -> bytes:
    return np.array(values, "<u4").tobytes()


def kv_part(
    positions: range,
    *,
    extended: bool = False,
    v_trans: bool = False,
    ids: int = 0,
    n_layer: int = 2,
) -> bytes:
    """A key-value part with keys of 6 bytes and values of 4 a cell."""
    n_cells = len(positions)
    data = u32(1, n_cells)
    if not n_cells:
        return data
    for position in positions:
        data += u32(position, 1) + (u32(7, 8, 9) if extended else b"") + u32(ids)
    data += u32(int(v_trans), n_layer)
    key = u32(1) + (6).to_bytes(8, "little") + b"k" * 6 * n_cells
    value = u32(1) + (u32(2, 2) if v_trans else (4).to_bytes(8, "little")) + b"v" * 4 * n_cells
    return data + key * n_layer + value * n_layer


def recurrent_part(position: int | None, n_layer: int = 2) -> bytes:
    """A recurrent part with states of 5 bytes."""
    n_cells = int(position is not None)
    entry = u32(0) + (5).to_bytes(8, "little") + b"r" * 5 * n_cells
    cells = b"" if position is None else u32(position, 0)
    return u32(n_cells) + cells + u32(0, n_layer) + entry * n_layer


def buffer(data: bytes) -> Buffer:
    return np.frombuffer(data, np.uint8).copy()


@pytest.mark.parametrize("extended", [False, True])
@pytest.mark.parametrize("v_trans", [False, True])
def test_what_was_learned_fits_other_sizes(extended: bool, v_trans: bool) -> None:
    def part(positions: range) -> bytes:
        return kv_part(positions, extended=extended, v_trans=v_trans)

    learned = part(range(3, 8))
    layout = learn_kv(buffer(learned), 0, len(learned))
    for n_cells in (0, 1, 2, 40):
        data = part(range(10, 10 + n_cells))
        assert layout.size(n_cells) == len(data)
        end, positions = layout.check(buffer(b"xyz" + data + b"rest"), 3)
        assert end == 3 + len(data)
        assert positions.tolist() == list(range(10, 10 + n_cells))
    for other in (kv_part(range(4), extended=not extended), kv_part(range(4), n_layer=3)):
        with pytest.raises(StateRejected):
            layout.check(buffer(other), 0)


@pytest.mark.parametrize(
    ("spoil", "match"),
    [
        (lambda data: u32(2) + data[4:], "2 streams"),
        (lambda data: data[:4] + u32(1) + data[8:], "of 1 cells"),
        (lambda data: data[:8] + u32(90) + data[12:], "unknown layout"),
        (lambda data: data[:68] + u32(2) + data[72:], "value layout 2"),
        (lambda data: data + b"\0", "inside a tensor header"),
        (lambda data: data + b"\0" * 12, "5 tensors of 2 layers"),
        (lambda data: data[:-1], "end at"),
        (lambda data: data[:60], "unknown layout"),
        (lambda data: data[:6], "before a field"),
        (lambda data: data[:80] + b"\xff" * 8 + data[88:], "bytes a cell"),
    ],
)
def test_unknown_layouts_are_not_learned(spoil: Callable[[bytes], bytes], match: str) -> None:
    data = kv_part(range(2, 7))
    spoiled = spoil(data)
    with pytest.raises(StateRejected, match=match):
        learn_kv(buffer(spoiled), 0, len(spoiled))


def test_unknown_recurrent_layouts_are_not_learned() -> None:
    data = recurrent_part(9)
    layout = learn_recurrent(buffer(data), 0, len(data))
    assert layout.check(buffer(data), 0) == (len(data), 9)
    empty = recurrent_part(None)
    assert layout.check(buffer(empty), 0) == (len(empty), -1)
    assert (layout.size(0), layout.size(1)) == (len(empty), len(data))
    for spoiled in (
        u32(2) + data[4:],
        data[:12] + u32(1) + data[16:],
        data + b"\0",
        data[:-1],
        data + b"\0" * 12 * 3,
    ):
        with pytest.raises(StateRejected):
            learn_recurrent(buffer(spoiled), 0, len(spoiled))


def by_hand(family: str, *, dense: bool = False) -> StateLayout:
    """The layout of a family's states made by hand."""

    def kv() -> KvLayout:
        data = kv_part(range(5))
        return learn_kv(buffer(data), 0, len(data))

    def recurrent() -> RecurrentLayout:
        data = recurrent_part(1)
        return learn_recurrent(buffer(data), 0, len(data))

    return StateLayout(
        rows=None if family == "recurrent" else kv(),
        window=kv() if "swa" in family else None,
        recurrent=recurrent() if family not in ("attention", "swa") else None,
        n_swa=8 if "swa" in family else 0,
        dense=dense,
    )


def test_digests_tell_layouts_apart() -> None:
    layouts = [by_hand(family) for family in tiny_models.FAMILIES]
    layouts.append(by_hand("swa", dense=True))
    assert len({layout.digest() for layout in layouts}) == 6
    assert by_hand("hybrid").digest() == by_hand("hybrid").digest()


def test_a_window_must_reach_back_from_the_next_token() -> None:
    layout = by_hand("swa")
    header = u32(MAGIC, 0)
    for first, fits in ((12, True), (13, True), (14, False), (19, False)):
        data = buffer(header + kv_part(range(first, 20)))
        if fits:
            assert layout.check_checkpoint(data, 20) == 20 - first
        else:
            with pytest.raises(StateRejected, match=f"starts at {first}, too late"):
                layout.check_checkpoint(data, 20)
    assert layout.check_checkpoint(buffer(header + kv_part(range(3))), 3) == 3
    with pytest.raises(StateRejected, match="does not end at token 20"):
        layout.check_checkpoint(buffer(header + kv_part(range(0))), 20)
    with pytest.raises(StateRejected, match="no rolling part"):
        by_hand("attention").check_checkpoint(buffer(header), 20)


def test_segments_carry_nothing_that_rolls() -> None:
    header, rows = u32(MAGIC, 0), kv_part(range(4, 9))
    nothing, window = kv_part(range(0)), kv_part(range(4, 9))
    hybrid, swa, dense = by_hand("hybrid"), by_hand("swa"), by_hand("swa", dense=True)
    hybrid.check_segment(buffer(header + rows + recurrent_part(None)), 4, 9)
    with pytest.raises(StateRejected, match="recurrent"):
        hybrid.check_segment(buffer(header + rows + recurrent_part(8)), 4, 9)
    swa.check_segment(buffer(header + rows + nothing), 4, 9)
    with pytest.raises(StateRejected, match="window rows"):
        swa.check_segment(buffer(header + rows + window), 4, 9)
    dense.check_segment(buffer(header + rows + window), 4, 9)
    with pytest.raises(StateRejected, match="window of the segment holds tokens nothing"):
        dense.check_segment(buffer(header + rows + nothing), 4, 9)
    with pytest.raises(StateRejected, match="no truncatable part"):
        by_hand("recurrent").check_segment(buffer(header + rows), 4, 9)


def test_ids_are_refused_until_they_are_zeroed() -> None:
    layout = by_hand("hybrid-swa")
    data = buffer(
        u32(MAGIC, 3) + kv_part(range(4), ids=3) + kv_part(range(0)) + recurrent_part(None)
    )
    with pytest.raises(StateRejected, match="of sequence 3, not 0"):
        layout.check_segment(data, 0, 4)
    data[4:8] = 0
    with pytest.raises(StateRejected, match="names a sequence"):
        layout.check_segment(data, 0, 4)
    layout.zero_segment_ids(data, 4)
    layout.check_segment(data, 0, 4)


def test_cells_may_lie_in_any_order() -> None:
    data = buffer(kv_part(range(5)))
    layout = learn_kv(data, 0, data.size)
    cells = layout.cells(data, 0, 5)
    cells["pos"] = [3, 4, 0, 1, 2]
    assert layout.check(data, 0)[1].tolist() == [0, 1, 2, 3, 4]
    cells["pos"] = [3, 4, 0, 1, 1]
    with pytest.raises(StateRejected, match="gaps or doubles"):
        layout.check(data, 0)
    cells["pos"] = [-1, 0, 1, 2, 3]
    with pytest.raises(StateRejected, match="-1 to 3"):
        layout.check(data, 0)


def test_headers() -> None:
    assert check_header(buffer(u32(MAGIC, 5)), 5) == 8
    with pytest.raises(StateRejected, match="begins with"):
        check_header(buffer(u32(MAGIC + 1, 0)))
    with pytest.raises(StateRejected, match="before a field"):
        check_header(buffer(u32(MAGIC)))


def test_cover() -> None:
    def spans(*ends: tuple[int, int]) -> list[Segment]:
        return [Segment(start, end, buffer(b"")) for start, end in ends]

    check_cover(10, spans((0, 4), (4, 12)), needed=True)
    check_cover(10, spans((0, 8), (4, 12)), needed=True)
    check_cover(10, [], needed=False)
    for ends in (
        (),
        ((1, 12),),
        ((0, 4), (5, 12)),
        ((0, 9),),
        ((0, 10), (10, 12)),
        ((0, 10), (11, 12)),
        ((0, 8), (4, 8)),
        ((0, 8), (4, 10), (2, 12)),
        ((0, 8), (-1, 12)),
        ((-2, 12),),
    ):
        with pytest.raises(StateRejected):
            check_cover(10, spans(*ends), needed=True)
    with pytest.raises(StateRejected, match="no segments"):
        check_cover(10, spans((0, 12)), needed=False)


# -- states of real contexts ---------------------------------------------------------------------


@dataclass
class State:
    """A state's bytes, the parts it has, and the check that it passes."""

    data: Buffer
    parts: list[KvLayout | RecurrentLayout | None]
    check: Callable[[Buffer], object]

    def structure(self) -> tuple[list[int], list[int]]:
        """Return where all bytes stand that are not tensor data, and where each field ends."""
        ends = [0, 4, 8]
        steers = [*range(8)]

        def number(at: int) -> int:
            return int(self.data[at : at + 4].view("<u4")[0])

        def mark(*sizes: int) -> int:
            for size in sizes:
                steers.extend(range(ends[-1], ends[-1] + size))
                ends.append(ends[-1] + size)
            return ends[-1]

        for part in self.parts:
            if part is None:
                continue
            if isinstance(part, KvLayout):
                n_cells = number(mark(4))
                mark(4, *[4, 4, *[4] * (3 * part._extended), 4] * n_cells)
                if not n_cells:
                    continue
            else:
                n_cells = number(ends[-1])
                mark(4, *[4, 4] * n_cells)
            mark(4, 4)
            for entry in part._entries.entries:
                ends.append(mark(4, 8) + entry.cell_bytes * n_cells)
        assert ends[-1] == self.data.size
        return steers, sorted(set(ends))


@dataclass
class Case:
    """A loaded model and the states of one prompt."""

    runtime: Any
    segments: list[Segment]
    checkpoint: Checkpoint | None
    cold: np.ndarray

    def states(self) -> list[State]:
        layout = self.runtime._layout
        states = [
            State(
                part.data,
                [layout.rows, layout.window, layout.recurrent],
                lambda data, part=part: layout.check_segment(data, part.start, part.end),
            )
            for part in self.segments
        ]
        if self.checkpoint is not None:
            states.append(
                State(
                    self.checkpoint.data,
                    [layout.window, layout.recurrent],
                    lambda data: layout.check_checkpoint(data, N_TOKENS),
                )
            )
        return states

    def restore(self, seq_id: int = 0) -> None:
        self.runtime.restore(seq_id, N_TOKENS, self.segments, self.checkpoint)


TOKENS = np.random.default_rng(5).integers(0, 4_000, N_TOKENS, dtype=np.int32)
NEXT = np.array([5, 6, 7], np.int32)
CASES = {
    "attention": ("attention", {}),
    "attention-q8": ("attention", {"flash_attn": True, "type_k": 8, "type_v": 8}),
    "swa": ("swa", {"swa_full": False}),
    "swa-dense": ("swa", {"segment_tokens": WINDOW}),
    "recurrent": ("recurrent", {}),
    "hybrid": ("hybrid", {}),
    "hybrid-swa": ("hybrid-swa", {}),
}


@pytest.fixture(scope="module", params=CASES)
def loaded(request: pytest.FixtureRequest, model_dir: Path) -> Iterator[Case]:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    from llamakeep.runtime.llama_cpp import LlamaCppRuntime

    family, options = CASES[request.param]
    runtime = LlamaCppRuntime.load(
        model_dir / tiny_models.model_file(family), n_ctx=256, n_seqs=2, n_threads=1, **options
    )
    runtime.evaluate(0, TOKENS)
    spans = ((0, 9), (9, 70)) if runtime.traits.segments else ()
    segments = [runtime.read_segment(0, *span) for span in spans]
    checkpoint = runtime.read_checkpoint(0) if runtime.traits.rolling else None
    runtime.evaluate(0, NEXT)
    yield Case(runtime, segments, checkpoint, runtime.logits())
    runtime.close()


@pytest.fixture
def case(loaded: Case) -> Case:
    loaded.runtime.clear_all()
    return loaded


def test_the_states_pass_unspoiled(case: Case) -> None:
    for state in case.states():
        state.check(state.data)
    case.restore()
    case.runtime.evaluate(0, NEXT)
    np.testing.assert_allclose(case.runtime.logits(), case.cold, rtol=0, atol=5e-3)


def test_any_flipped_bit_outside_tensor_data_is_refused(case: Case) -> None:
    n_flipped = 0
    for state in case.states():
        data = state.data.copy()
        steers, _ = state.structure()
        # Every bit of short states, every 7th of long ones; 7 and 8 have no factor in common.
        step = 1 if len(steers) < 1_000 else 7
        for bit in range(0, 8 * len(steers), step):
            at, mask = steers[bit // 8], np.uint8(1 << bit % 8)
            data[at] ^= mask
            with pytest.raises(StateRejected):
                state.check(data)
            data[at] ^= mask
            n_flipped += 1
        state.check(data)
    assert n_flipped > 500


@FAST
@given(draw=st.data())
def test_any_changed_byte_outside_tensor_data_is_refused(case: Case, draw: st.DataObject) -> None:
    state = draw.draw(st.sampled_from(case.states()))
    at = draw.draw(st.sampled_from(state.structure()[0]))
    data = state.data.copy()
    data[at] ^= np.uint8(draw.draw(st.integers(1, 255)))
    with pytest.raises(StateRejected):
        state.check(data)


def test_other_lengths_are_refused(case: Case) -> None:
    for state in case.states():
        _, ends = state.structure()
        lengths = {end + more for end in ends for more in (-1, 0, 1)}
        for length in sorted(lengths & set(range(state.data.size))):
            with pytest.raises(StateRejected):
                state.check(state.data[:length])
        for n_more in (1, 4, 8, 12, state.data.size):
            with pytest.raises(StateRejected):
                state.check(np.concatenate([state.data, state.data[:n_more]]))


@FAST
@given(data=st.binary(max_size=400), keep=st.integers(0, 400))
def test_noise_is_refused(case: Case, data: bytes, keep: int) -> None:
    for state in case.states():
        spoiled = np.concatenate([state.data[:keep], buffer(data)])
        if spoiled.size == state.data.size and (spoiled == state.data).all():
            continue
        with pytest.raises(StateRejected):
            state.check(spoiled)


def test_spoiled_states_never_reach_native_code(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llamakeep.runtime import llama_cpp as adapter

    runtime = case.runtime
    runtime.evaluate(0, TOKENS)
    held = runtime.positions(0)

    def called(*_: object) -> int:
        raise AssertionError("native code was asked")

    for name in ("llama_state_seq_set_data_ext", "llama_memory_seq_rm", "llama_memory_seq_cp"):
        monkeypatch.setattr(adapter.llama_cpp, name, called)
    for index, state in enumerate(case.states()):
        for at in state.structure()[0][:: max(1, state.data.size // 200)]:
            data = state.data.copy()
            data[at] ^= 1
            segments, checkpoint = list(case.segments), case.checkpoint
            if index < len(segments):
                segments[index] = Segment(segments[index].start, segments[index].end, data)
            else:
                checkpoint = Checkpoint(N_TOKENS, data)
            with pytest.raises(StateRejected):
                runtime.restore(0, N_TOKENS, segments, checkpoint)
    assert runtime.positions(0) == held


def test_recurrent_states_of_two_cells_are_refused(case: Case) -> None:
    layout = case.runtime._layout
    if case.checkpoint is None or layout.recurrent is None:
        return
    with pytest.raises(StateRejected, match="claims 2 cells"):
        layout.check_checkpoint(two_cells(layout, case.checkpoint.data), N_TOKENS)


def two_cells(layout: StateLayout, data: Buffer) -> Buffer:
    """Forge a recurrent part with two well-formed cells."""
    recurrent = layout.recurrent
    assert recurrent is not None
    start = data.size - recurrent.size(1)
    forged = data[:start].tobytes() + u32(2) + data[start + 4 : start + 12].tobytes() * 2
    forged += recurrent._tail
    at = start + 4 + 8 + 8
    for entry in recurrent._entries.entries:
        rows = data[at + 12 : at + 12 + entry.cell_bytes].tobytes()
        forged += entry.header + rows * 2
        at += 12 + entry.cell_bytes
    return buffer(forged)


# -- what the checks are for ---------------------------------------------------------------------

CHILD = """
import sys
import numpy as np
from llamakeep.errors import InvalidValue, StateError
from llamakeep.runtime import llama_cpp as adapter
from llamakeep.states import Checkpoint, DeviceCheckpoint
from tests.test_layout import two_cells

runtime = adapter.LlamaCppRuntime.load(
    sys.argv[1], n_ctx=512, n_threads=1, n_ubatch=64, swa_full=False
)
guarded = sys.argv[2] == "guarded"
tokens = np.arange(1, 65, dtype=np.int32)
runtime.evaluate(0, tokens)
try:
"""
ATTACKS = {
    "two cells": (
        "recurrent",
        """
    data = two_cells(runtime._layout, runtime.read_checkpoint(0).data)
    if guarded:
        runtime.restore(0, 64, (), Checkpoint(64, data))
    runtime._write(0, data, adapter.PARTIAL)
""",
    ),
    "device magic": (
        "recurrent",
        """
    kept = runtime.read_device_checkpoint(0)
    data = kept.data.copy()
    data[0] ^= 1
    runtime.evaluate(0, tokens)
    if guarded:
        parts = (kept.seq_id, kept.context, kept.generation, kept.device_bytes)
        runtime.rewind(0, 64, DeviceCheckpoint(64, data, *parts))
    runtime._write(0, data, adapter.PARTIAL | adapter.ON_DEVICE)
""",
    ),
    "device sequence": (
        "hybrid",
        """
    kept = runtime.read_device_checkpoint(0)
    data = kept.data.copy()
    data[4] = 1
    runtime.evaluate(0, tokens)
    if guarded:
        parts = (kept.seq_id, kept.context, kept.generation, kept.device_bytes)
        runtime.rewind(0, 64, DeviceCheckpoint(64, data, *parts))
    runtime._write(0, data, adapter.PARTIAL | adapter.ON_DEVICE)
""",
    ),
    "device length": (
        "recurrent",
        """
    kept = runtime.read_device_checkpoint(0)
    data = np.append(kept.data, np.zeros(4, np.uint8))
    runtime.evaluate(0, tokens)
    if guarded:
        parts = (kept.seq_id, kept.context, kept.generation, kept.device_bytes)
        runtime.rewind(0, 64, DeviceCheckpoint(64, data, *parts))
    runtime._write(0, data, adapter.PARTIAL | adapter.ON_DEVICE)
""",
    ),
    "device window": (
        "swa",
        """
    for n_tokens in (59, 59, 59, 59):
        if guarded:
            runtime.read_device_checkpoint(0)
        runtime._read(0, adapter.PARTIAL | adapter.ON_DEVICE)
        runtime.evaluate(0, tokens[:n_tokens])
    runtime._read(0, adapter.PARTIAL | adapter.ON_DEVICE)
""",
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_what_would_end_the_process_is_refused(attack: str, model_dir: Path) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    family, script = ATTACKS[attack]
    script = f"{CHILD}{script}except (StateError, InvalidValue) as error:\n"
    script += "    sys.stdout.write(f'refused: {error}')\n"
    environment = os.environ | {
        "GGML_NO_BACKTRACE": "1",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }

    def child(how: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", script, model_dir / tiny_models.model_file(family), how],
            cwd=Path(__file__).parents[1],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    with child("guarded") as guarded, child("unguarded") as unguarded:
        said, complained = guarded.communicate(timeout=60)
        assert guarded.returncode == 0, complained
        assert said.startswith("refused: ")
        said, complained = unguarded.communicate(timeout=60)
        if os.name == "posix":
            assert unguarded.returncode < 0, (said, complained)


# -- failures in the middle ----------------------------------------------------------------------


def assert_empty_and_well(case: Case) -> None:
    """Sequence 0 is empty by size, like the spare, and a restore into it works."""
    runtime = case.runtime
    assert runtime.positions(0) == Positions(-1, -1)
    for seq_id in (0, runtime._spare):
        assert runtime._size(seq_id, 0) == runtime._empty_bytes
    case.restore()
    runtime.evaluate(0, NEXT)
    np.testing.assert_allclose(runtime.logits(), case.cold, rtol=0, atol=5e-3)
    runtime.clear(0)
    runtime.evaluate(0, TOKENS)
    runtime.evaluate(0, NEXT)
    np.testing.assert_allclose(runtime.logits(), case.cold, rtol=0, atol=5e-3)
    runtime.clear(0)


def spoil_call(
    monkeypatch: pytest.MonkeyPatch, name: str, at: int, spoil: Callable[..., object]
) -> list[int]:
    """Replace the `at`-th call of a native function; return a list that counts calls."""
    from llamakeep.runtime import llama_cpp as adapter

    original = getattr(adapter.llama_cpp, name)
    calls: list[int] = []

    def call(*args: Any) -> object:
        calls.append(len(calls))
        if calls[-1] == at:
            return spoil(original, *args)
        return original(*args)

    monkeypatch.setattr(adapter.llama_cpp, name, call)
    return calls


def interrupt(*_: object) -> object:
    raise KeyboardInterrupt


def write_half(write: Callable[..., int], ctx: Any, data: Any, size: int, *rest: Any) -> int:
    return write(ctx, data, size // 2, *rest)


def write_and_deny(write: Callable[..., int], *args: Any) -> int:
    write(*args)
    return 0


@pytest.mark.parametrize(
    "spoil", [lambda *_: 0, write_half, write_and_deny, interrupt], ids=range(4)
)
def test_a_write_that_fails_leaves_nothing(case: Case, spoil: Callable[..., object]) -> None:
    n_writes = len(case.segments) + (case.checkpoint is not None)
    for at in range(n_writes):
        case.runtime.evaluate(0, NEXT)
        with pytest.MonkeyPatch.context() as monkeypatch:
            calls = spoil_call(monkeypatch, "llama_state_seq_set_data_ext", at, spoil)
            with pytest.raises(KeyboardInterrupt if spoil is interrupt else RestoreFailed):
                case.restore()
        assert len(calls) == at + 1
        assert_empty_and_well(case)


def test_rows_that_are_missing_or_doubled_are_noticed(case: Case) -> None:
    def copy_less(copy: Callable[..., None], mem: Any, src: int, dst: int, *span: int) -> None:
        copy(mem, src, dst, span[0], span[1] - 1)

    def copy_nothing(*_: object) -> None:
        return None

    for spoil in (copy_less, copy_nothing, interrupt):
        for at in range(len(case.segments)):
            case.runtime.evaluate(0, NEXT)
            with pytest.MonkeyPatch.context() as monkeypatch:
                spoil_call(monkeypatch, "llama_memory_seq_cp", at, spoil)
                with pytest.raises(KeyboardInterrupt if spoil is interrupt else RestoreFailed):
                    case.restore()
            assert_empty_and_well(case)

    if not case.segments:
        return
    runtime = case.runtime
    with pytest.MonkeyPatch.context() as monkeypatch:
        place = runtime._place

        def place_twice(seq_id: int, n_tokens: int, segments: list[Segment]) -> None:
            place(seq_id, n_tokens, segments)
            place(seq_id, 9, segments[:1])

        monkeypatch.setattr(runtime, "_place", place_twice)
        with pytest.raises(RestoreFailed, match=r"bytes after the move, 70 tokens have"):
            case.restore()
    assert_empty_and_well(case)


def test_a_doubled_position_passes_every_other_check(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Size, ends and even logits are right, until a cut takes another row than it should."""
    if not case.segments:
        return
    runtime = case.runtime
    first, second = case.segments
    data = second.data.copy()
    runtime._layout.rows.cells(data, 8, 61)["pos"][60 - 7] = 68
    spoiled = [first, Segment(9, 70, data)]
    with pytest.raises(StateRejected, match="9 to 69 have gaps or doubles"):
        runtime.restore(0, N_TOKENS, spoiled, case.checkpoint)
    monkeypatch.setattr(StateLayout, "check_segment", lambda *_: None)
    runtime.restore(0, N_TOKENS, spoiled, case.checkpoint)
    assert runtime.positions(0).n_tokens == N_TOKENS
    monkeypatch.undo()
    if case.checkpoint is None:
        with pytest.raises(RestoreFailed, match="bytes after the move, 65 tokens have"):
            runtime.rewind(0, 65)
    runtime.clear(0)
    assert_empty_and_well(case)


def test_what_cannot_be_emptied_clears_the_whole_memory(
    case: Case, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = case.runtime
    runtime.evaluate(1, TOKENS)
    remove, failed_write = runtime._remove, []

    def write_and_stick(write: Callable[..., int], *args: Any) -> int:
        failed_write.append(write(*args))
        return 0

    with pytest.MonkeyPatch.context() as monkeypatch:
        last = len(case.segments) + (case.checkpoint is not None) - 1
        spoil_call(monkeypatch, "llama_state_seq_set_data_ext", last, write_and_stick)
        monkeypatch.setattr(runtime, "_remove", lambda *args: failed_write or remove(*args))
        with pytest.raises(RestoreFailed) as failed:
            case.restore()
    assert failed.value.cleared_all
    assert "clearing the whole memory" in caplog.text
    assert runtime.positions(1) == Positions(-1, -1)
    assert_empty_and_well(case)


def test_rewinds_and_copies_that_fail_leave_nothing(case: Case) -> None:
    runtime = case.runtime
    runtime.evaluate(0, TOKENS)
    runtime.evaluate(0, NEXT)
    with pytest.MonkeyPatch.context() as monkeypatch:
        spoil_call(monkeypatch, "llama_memory_seq_rm", 0, lambda *_: False)
        with pytest.raises(RestoreFailed, match="could not cut"):
            runtime.rewind(0, N_TOKENS, case.checkpoint)
    assert_empty_and_well(case)

    runtime.evaluate(1, TOKENS)
    runtime.evaluate(1, NEXT)
    name, spoil = "llama_memory_seq_cp", lambda *_: None
    if not case.segments:
        name, spoil = "llama_state_seq_set_data_ext", lambda *_: 0
    n_reads = len(range(0, N_TOKENS, WINDOW)) if runtime.traits.dense else 0
    with pytest.MonkeyPatch.context() as monkeypatch:
        spoil_call(monkeypatch, name, n_reads, spoil)
        with pytest.raises(RestoreFailed):
            runtime.copy(1, 0, N_TOKENS, case.checkpoint)
    assert runtime.positions(1).n_tokens == N_TOKENS + NEXT.size
    assert_empty_and_well(case)
