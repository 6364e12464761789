"""The byte layout of a llama.cpp sequence state: learned once, then checked before every use.

llama.cpp trusts the bytes it is given: a doubled cell position leaves ghost cells, a forged
recurrent part aborts the process. So everything that steers native code (header, cell counts, cell
table, types, row sizes, total length) is compared here with what the loaded model itself wrote,
before the bytes go down. Tensor data is not interpreted.

A state is ``[magic, seq_id][rows][window][recurrent]``; which parts exist depends on the family.
``rows`` and ``window`` are key-value caches::

    u32 n_stream, u32 n_cells, then for n_cells > 0:
    n_cells x (i32 position, u32 n_seq_id, [3 x i32 extension], i32 seq_id)
    u32 v_trans, u32 n_layer
    n_layer x (i32 type, u64 row_bytes, n_cells rows)                      keys
    values: the same, or for transposed values
            (i32 type, u32 element_bytes, u32 n_embd, n_embd x n_cells elements)

and ``recurrent`` is::

    u32 n_cells, n_cells x (i32 position, u32 0), u32 s_trans, u32 n_layer,
    entries (i32 type, u64 row_bytes, n_cells rows)

Source: llama.cpp `llama_kv_cache::state_write`, `llama_memory_recurrent::state_write`. Newer
memory types that do not follow it are noticed while learning and kept as whole states.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from llamakeep.errors import StateRejected
from llamakeep.states import Buffer, Segment

MAGIC = 0xAF143CD8
HEADER_BYTES = 8
_ENTRY_BYTES = 12
_EMPTY_KV_BYTES = 8

_CELL = np.dtype([("pos", "<i4"), ("n_seq_id", "<u4"), ("seq_id", "<i4")])
_CELL_EXT = np.dtype([("pos", "<i4"), ("n_seq_id", "<u4"), ("ext", "<i4", (3,)), ("seq_id", "<i4")])
_RECURRENT_CELL = np.dtype([("pos", "<i4"), ("n_seq_id", "<u4")])


def _u32(data: Buffer, at: int) -> int:
    if at + 4 > data.size:
        raise StateRejected(f"state ends at byte {data.size:,}, before a field at {at:,}")
    return int(data[at : at + 4].view("<u4")[0])


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor's descriptor: its twelve header bytes and the bytes each cell adds."""

    header: bytes
    cell_bytes: int


def _read_entry(data: Buffer, at: int, transposed: bool) -> Entry:
    if at + _ENTRY_BYTES > data.size:
        raise StateRejected(f"state ends at byte {data.size:,}, inside a tensor header at {at:,}")
    header = data[at : at + _ENTRY_BYTES].tobytes()
    if transposed:
        element = int.from_bytes(header[4:8], "little")
        cell_bytes = element * int.from_bytes(header[8:12], "little")
    else:
        cell_bytes = int.from_bytes(header[4:12], "little")
    if cell_bytes > 2**31:
        raise StateRejected(f"a tensor header at {at:,} claims {cell_bytes:,} bytes a cell")
    return Entry(header, cell_bytes)


class _Entries:
    """The tensor headers of one part and where they stand for a given number of cells."""

    def __init__(self, entries: tuple[Entry, ...]) -> None:
        self.entries = entries
        self.cell_bytes = sum(entry.cell_bytes for entry in entries)
        self.size_bytes = _ENTRY_BYTES * len(entries)
        self._headers = np.frombuffer(
            b"".join(entry.header for entry in entries), np.uint8
        ).reshape(-1, _ENTRY_BYTES)
        cells = np.array([entry.cell_bytes for entry in entries], np.int64)
        self._before = np.concatenate(([0], np.cumsum(cells)[:-1])) if entries else cells

    def check(self, data: Buffer, at: int, n_cells: int) -> None:
        if not self.entries:
            return
        starts = at + self._before * n_cells + _ENTRY_BYTES * np.arange(len(self.entries))
        found = data[starts[:, None] + np.arange(_ENTRY_BYTES)]
        wrong = np.flatnonzero((found != self._headers).any(axis=1))
        if wrong.size:
            raise StateRejected(
                f"tensor {int(wrong[0])} has another type or row size than this model's"
            )


class KvLayout:
    """Layout of one key-value cache (the dense rows, or the sliding window).

    Args:
        extended: Cells carry an extension (two-dimensional positions, token).
        v_trans: Values are stored transposed.
        n_layer: Layers in this cache.
        entries: Keys of every layer, then values.
    """

    def __init__(
        self, *, extended: bool, v_trans: bool, n_layer: int, entries: tuple[Entry, ...]
    ) -> None:
        self._extended = extended
        self._cell = _CELL_EXT if extended else _CELL
        self._tail = np.array([v_trans, n_layer], "<u4").tobytes()
        self._entries = _Entries(entries)

    def describe(self) -> str:
        """Return what makes two such layouts the same."""
        return f"kv ext={self._extended} {self._tail.hex()} {self._entries.entries}"

    def size(self, n_cells: int) -> int:
        """Return the bytes of the part with `n_cells` cells."""
        if n_cells == 0:
            return _EMPTY_KV_BYTES
        per_cell = self._cell.itemsize + self._entries.cell_bytes
        return _EMPTY_KV_BYTES + 8 + self._entries.size_bytes + n_cells * per_cell

    def cells(self, data: Buffer, at: int, n_cells: int) -> npt.NDArray[np.void]:
        """Return the cell table as a view."""
        return np.frombuffer(data, self._cell, n_cells, at + _EMPTY_KV_BYTES)

    def check(self, data: Buffer, at: int) -> tuple[int, npt.NDArray[np.int32]]:
        """Check the part at byte `at`; return where it ends and its positions, ascending.

        Raises:
            StateRejected: With what is wrong.
        """
        n_stream, n_cells = _u32(data, at), _u32(data, at + 4)
        if n_stream != 1:
            raise StateRejected(f"state has {n_stream} streams, not 1")
        end = at + self.size(n_cells)
        if end > data.size:
            raise StateRejected(
                f"state claims {n_cells:,} cells, {end:,} bytes, but has {data.size:,}"
            )
        if n_cells == 0:
            return end, np.empty(0, np.int32)
        cells = self.cells(data, at, n_cells)
        if (cells["n_seq_id"] != 1).any():
            raise StateRejected("a cell belongs to another number of sequences than 1")
        if cells["seq_id"].any():
            raise StateRejected("a cell names a sequence: ids were not zeroed, or were changed")
        positions = np.ascontiguousarray(cells["pos"])
        steps = np.diff(positions)
        if (steps < 1).any():
            positions = np.sort(positions)
            steps = np.diff(positions)
        if positions[0] < 0 or (steps != 1).any():
            raise StateRejected(
                f"cell positions {int(positions[0])} to {int(positions[-1])} have gaps or doubles"
            )
        table_end = at + _EMPTY_KV_BYTES + n_cells * self._cell.itemsize
        if data[table_end : table_end + 8].tobytes() != self._tail:
            raise StateRejected("layer count or value layout is not this model's")
        self._entries.check(data, table_end + 8, n_cells)
        return end, positions

    def zero_ids(self, data: Buffer, at: int) -> None:
        """Overwrite the sequence ids in the cell table: they say who read it, not what it is."""
        n_cells = _u32(data, at + 4)
        if n_cells:
            self.cells(data, at, n_cells)["seq_id"] = 0


def learn_kv(data: Buffer, at: int, end: int) -> KvLayout:
    """Learn the layout of the key-value part that fills bytes [at, end).

    Raises:
        StateRejected: When the bytes do not follow the layout this module knows.
    """
    n_stream, n_cells = _u32(data, at), _u32(data, at + 4)
    if n_stream != 1 or n_cells < 2:
        raise StateRejected(f"cannot learn from {n_stream} streams of {n_cells} cells")
    for extended in (False, True):
        cell = _CELL_EXT if extended else _CELL
        table_end = at + _EMPTY_KV_BYTES + n_cells * cell.itemsize
        if table_end + 8 > end:
            continue
        cells = np.frombuffer(data, cell, n_cells, at + _EMPTY_KV_BYTES)
        if (cells["n_seq_id"] == 1).all() and (np.diff(np.sort(cells["pos"])) == 1).all():
            break
    else:
        raise StateRejected("the cell table has an unknown layout")
    v_trans, n_layer = _u32(data, table_end), _u32(data, table_end + 4)
    if v_trans > 1:
        raise StateRejected(f"unknown value layout {v_trans}")
    cursor, entries = table_end + 8, list[Entry]()
    while cursor < end:
        entry = _read_entry(data, cursor, transposed=bool(v_trans) and len(entries) >= n_layer)
        entries.append(entry)
        cursor += _ENTRY_BYTES + entry.cell_bytes * n_cells
    if cursor != end or not n_layer <= len(entries) <= 2 * n_layer:
        raise StateRejected(
            f"{len(entries)} tensors of {n_layer} layers end at {cursor}, not {end}"
        )
    return KvLayout(
        extended=extended, v_trans=bool(v_trans), n_layer=n_layer, entries=tuple(entries)
    )


class RecurrentLayout:
    """Layout of the recurrent part: one cell when there is a state, none when it is empty."""

    def __init__(self, *, n_layer: int, entries: tuple[Entry, ...]) -> None:
        self._tail = np.array([0, n_layer], "<u4").tobytes()
        self._entries = _Entries(entries)

    def describe(self) -> str:
        """Return what makes two such layouts the same."""
        return f"recurrent {self._tail.hex()} {self._entries.entries}"

    def size(self, n_cells: int) -> int:
        """Return the bytes of the part with `n_cells` cells (0 or 1)."""
        per_cell = _RECURRENT_CELL.itemsize + self._entries.cell_bytes
        return 12 + self._entries.size_bytes + n_cells * per_cell

    def check(self, data: Buffer, at: int) -> tuple[int, int]:
        """Check the part at byte `at`; return where it ends and its position, -1 when empty.

        Raises:
            StateRejected: With what is wrong.
        """
        n_cells = _u32(data, at)
        if n_cells > 1:
            raise StateRejected(f"a recurrent state claims {n_cells} cells")
        end = at + self.size(n_cells)
        if end > data.size:
            raise StateRejected(f"recurrent state ends at byte {end:,} of {data.size:,}")
        position, cursor = -1, at + 4
        if n_cells:
            cell = np.frombuffer(data, _RECURRENT_CELL, 1, cursor)[0]
            if int(cell["n_seq_id"]) != 0:
                raise StateRejected("a recurrent cell lists sequences")
            position, cursor = int(cell["pos"]), cursor + _RECURRENT_CELL.itemsize
            if position < 0:
                raise StateRejected(f"a recurrent cell claims position {position}")
        if data[cursor : cursor + 8].tobytes() != self._tail:
            raise StateRejected("recurrent layer count is not this model's")
        self._entries.check(data, cursor + 8, n_cells)
        return end, position


def learn_recurrent(data: Buffer, at: int, end: int) -> RecurrentLayout:
    """Learn the layout of the recurrent part, one cell of it, that fills bytes [at, end).

    Raises:
        StateRejected: When the bytes do not follow the layout this module knows.
    """
    if _u32(data, at) != 1:
        raise StateRejected(f"cannot learn from {_u32(data, at)} recurrent cells")
    cursor = at + 4 + _RECURRENT_CELL.itemsize
    s_trans, n_layer = _u32(data, cursor), _u32(data, cursor + 4)
    if s_trans:
        raise StateRejected("transposed recurrent states are not known here")
    cursor, entries = cursor + 8, []
    while cursor < end:
        entry = _read_entry(data, cursor, transposed=False)
        entries.append(entry)
        cursor += _ENTRY_BYTES + entry.cell_bytes
    if cursor != end or len(entries) > 2 * n_layer:
        raise StateRejected(
            f"{len(entries)} tensors of {n_layer} layers end at {cursor}, not {end}"
        )
    return RecurrentLayout(n_layer=n_layer, entries=tuple(entries))


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Layout of all parts of one model's sequence state.

    Attributes:
        rows: The truncatable part, or None.
        window: The sliding window, or None.
        recurrent: The recurrent part, or None.
        n_swa: Window size in tokens.
        dense: Segments keep their window rows.
    """

    rows: KvLayout | None
    window: KvLayout | None
    recurrent: RecurrentLayout | None
    n_swa: int = 0
    dense: bool = False

    def digest(self) -> bytes:
        """Return a digest that is equal for equal layouts."""
        parts = (self.rows, self.window, self.recurrent)
        text = [part.describe() if part else "-" for part in parts]
        return blake3(f"{text} {self.n_swa} {self.dense}".encode()).digest()

    # -- sizes, exact ------------------------------------------------------------------------

    def segment_size(self, n_tokens: int) -> int:
        """Return the bytes of a segment of `n_tokens`."""
        rows = self.rows.size(n_tokens) if self.rows else 0
        return HEADER_BYTES + rows + self._rolling_size(n_tokens if self.dense else 0, 0)

    def state_size(self, n_tokens: int, n_window: int) -> int:
        """Return the bytes of a whole state of `n_tokens` with `n_window` cells in its window."""
        rows = self.rows.size(n_tokens) if self.rows else 0
        return HEADER_BYTES + rows + self._rolling_size(n_window, 1 if n_tokens else 0)

    def _rolling_size(self, n_window: int, n_recurrent: int) -> int:
        window = self.window.size(n_window) if self.window else 0
        return window + (self.recurrent.size(n_recurrent) if self.recurrent else 0)

    def window_cells(self, n_tokens: int) -> int:
        """Return how many window cells a dense sequence of `n_tokens` writes."""
        return min(n_tokens, self.n_swa) if self.window else 0

    # -- checks ------------------------------------------------------------------------------

    def check_segment(self, data: Buffer, start: int, end: int) -> None:
        """Check that `data` is a segment of tokens [start, end) of this model.

        Raises:
            StateRejected: With what is wrong.
        """
        cursor = check_header(data)
        if self.rows is None:
            raise StateRejected("this model has no truncatable part")
        cursor, positions = self.rows.check(data, cursor)
        _check_span(positions, start, end, "segment")
        if self.window:
            cursor, positions = self.window.check(data, cursor)
            if self.dense:
                _check_span(positions, start, end, "window of the segment")
            elif positions.size:
                raise StateRejected("segment carries window rows")
        if self.recurrent:
            cursor, position = self.recurrent.check(data, cursor)
            if position >= 0:
                raise StateRejected("segment carries a recurrent state")
        _check_end(data, cursor)

    def check_checkpoint(self, data: Buffer, position: int) -> int:
        """Check that `data` is a checkpoint after `position` tokens; return its window cells.

        Raises:
            StateRejected: With what is wrong; also when the window does not reach back far enough
                for the next token.
        """
        cursor, n_window = check_header(data), 0
        if self.window is None and self.recurrent is None:
            raise StateRejected("this model has no rolling part")
        if self.window:
            cursor, positions = self.window.check(data, cursor)
            n_window = positions.size
            if not n_window or int(positions[-1]) != position - 1:
                raise StateRejected(f"window does not end at token {position}")
            if int(positions[0]) > max(0, position - self.n_swa + 1):
                raise StateRejected(
                    f"window starts at {int(positions[0])}, too late for position {position}"
                )
        if self.recurrent:
            cursor, last = self.recurrent.check(data, cursor)
            if last != position - 1:
                raise StateRejected(f"recurrent state is of token {last + 1}, not {position}")
        _check_end(data, cursor)
        return n_window

    # -- ids ---------------------------------------------------------------------------------

    def zero_segment_ids(self, data: Buffer, n_tokens: int) -> None:
        """Zero the sequence ids that reading left in a segment."""
        data[4:HEADER_BYTES] = 0
        if self.rows:
            self.rows.zero_ids(data, HEADER_BYTES)
            if self.window:
                self.window.zero_ids(data, HEADER_BYTES + self.rows.size(n_tokens))

    def zero_checkpoint_ids(self, data: Buffer) -> None:
        """Zero the sequence ids that reading left in a checkpoint."""
        data[4:HEADER_BYTES] = 0
        if self.window:
            self.window.zero_ids(data, HEADER_BYTES)


def check_header(data: Buffer, seq_id: int = 0) -> int:
    """Check magic and sequence id; return where the parts begin.

    Raises:
        StateRejected: With what is wrong.
    """
    magic = _u32(data, 0)
    if magic != MAGIC:
        raise StateRejected(f"state begins with {magic:#010x}, not {MAGIC:#010x}")
    found = _u32(data, 4)
    if found != seq_id:
        raise StateRejected(f"state is of sequence {found}, not {seq_id}")
    return HEADER_BYTES


def check_cover(n_tokens: int, segments: Sequence[Segment], *, needed: bool) -> None:
    """Check that `segments` follow each other and cover `n_tokens`, by what they say of themselves.

    Args:
        n_tokens: Tokens to cover.
        segments: In order; each is used up to the start of the next one.
        needed: Whether the family has segments; without, there must be none.

    Raises:
        StateRejected: With what is wrong.
    """
    if not needed:
        if segments:
            raise StateRejected("this family has no segments")
        return
    before, reach = -1, 0
    for segment in segments:
        # A later segment may end before the one that it branches off from.
        if not before < segment.start <= reach:
            raise StateRejected(
                f"segment {segment.start} to {segment.end} does not continue from {reach}"
            )
        before, reach = segment.start, segment.end
    if not before < n_tokens <= reach:
        raise StateRejected(f"segments reach from {before} to {reach}, not to {n_tokens}")


def with_stops(n_tokens: int, segments: Iterable[Segment]) -> Iterator[tuple[Segment, int]]:
    """Yield each segment and the position up to which it is used, as they come.

    The next one is drawn before each is yielded. See `check_cover`.

    Raises:
        StateRejected: When they do not follow each other or do not cover `n_tokens`.
    """
    before: Segment | None = None
    reach, start = 0, -1
    for segment in segments:
        if not start < segment.start <= reach or segment.start >= n_tokens:
            raise StateRejected(
                f"segment {segment.start} to {segment.end} does not continue from {reach}"
            )
        if before is not None:
            yield before, segment.start
        before, start, reach = segment, segment.start, segment.end
    if before is None or n_tokens > reach:
        raise StateRejected(f"segments reach to {reach}, not to {n_tokens}")
    yield before, n_tokens


def _check_span(positions: npt.NDArray[np.int32], start: int, end: int, what: str) -> None:
    # Positions are ascending without gaps (KvLayout.check), so both ends say it all.
    if positions.size != end - start or (positions.size and int(positions[0]) != start):
        found = f"{int(positions[0])} to {int(positions[-1]) + 1}" if positions.size else "nothing"
        raise StateRejected(f"{what} holds tokens {found}, not {start} to {end}")


def _check_end(data: Buffer, cursor: int) -> None:
    if cursor != data.size:
        raise StateRejected(f"state has {data.size:,} bytes, its parts have {cursor:,}")


# -- whole states of a context ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cells:
    """How many cells a part has, at consecutive positions from which one on."""

    n_cells: int
    first: int


@dataclass(frozen=True, slots=True)
class ContextState:
    """What the whole state of a context says of itself.

    Attributes:
        rows: Cells of the dense layers; None without such.
        window: Cells of the layers with a sliding window.
        recurrent: The recurrent cell; none at all in an empty state.
    """

    rows: Cells | None
    window: Cells | None = None
    recurrent: Cells | None = None

    def problem(self, n_tokens: int) -> str:
        """Return why it cannot be used as one of `n_tokens` tokens in one sequence, or nothing.

        Rows of more tokens do no harm where they can be cut off.
        """
        surplus = 0 if self.rows is None else self.rows.n_cells - n_tokens
        can_be_cut = self.window is None and self.recurrent is None
        if self.rows is not None and (
            self.rows.first or surplus < 0 or (surplus and not can_be_cut)
        ):
            return (
                f"it has {self.rows.n_cells} cells from position {self.rows.first} on, not "
                f"{n_tokens} from 0 on"
            )
        if self.window is not None and self.window.first + self.window.n_cells != n_tokens:
            return f"its window ends elsewhere than after {n_tokens} tokens"
        if self.recurrent is not None and self.recurrent.first != n_tokens - 1:
            return f"its recurrent state is of position {self.recurrent.first}"
        return ""


def read_context(native: bytes) -> ContextState | None:
    """Read the cell tables of a whole context's state, of one sequence.

    Args:
        native: What `llama_state_get_data` wrote: the architecture's name (u32, text), then the
            memory's parts as in a sequence's state, whose cells name their sequences.

    Returns:
        What it says; None when the bytes are not understood.

    Costs a pass over the tables. Source: llama.cpp `llama_context::state_write_data`.
    """
    data = np.frombuffer(native, np.uint8)
    try:
        at = 4 + _u32(data, 0)
        if recurrent := _recurrent_to_end(data, at):
            return ContextState(None, recurrent=recurrent)
        rows = _cells_of(data, at)
        if rows is None:
            return None
        for end in _kv_ends(data, at):
            if end == data.size:
                return ContextState(rows[0])
            if recurrent := _recurrent_to_end(data, end):
                return ContextState(rows[0], recurrent=recurrent)
            window = _cells_of(data, end)
            for last in _kv_ends(data, end) if window is not None else ():
                recurrent = _recurrent_to_end(data, last) if last < data.size else None
                if window is not None and (last == data.size or recurrent):
                    return ContextState(rows[0], window[0], recurrent)
    except StateRejected:
        pass
    return None


def _cells_of(data: Buffer, at: int) -> tuple[Cells, int] | None:
    """Return the cells of a key-value part of one sequence, and where their table ends."""
    n_stream, n_cells = _u32(data, at), _u32(data, at + 4)
    if n_stream != 1:
        return None
    for cell in (_CELL, _CELL_EXT):
        end = at + _EMPTY_KV_BYTES + n_cells * cell.itemsize
        if end > data.size:
            continue
        table = np.frombuffer(data, cell, n_cells, at + _EMPTY_KV_BYTES)
        positions = np.sort(table["pos"])
        if (
            (table["n_seq_id"] == 1).all()
            and not table["seq_id"].any()
            and (np.diff(positions) == 1).all()
        ):
            return Cells(n_cells, int(positions[0]) if n_cells else 0), end
    return None


def _kv_ends(data: Buffer, at: int) -> list[int]:
    """Return where a key-value part may end: after keys and values, or after keys alone."""
    found = _cells_of(data, at)
    if found is None:
        return []
    n_cells, cursor = found[0].n_cells, found[1]
    if not n_cells:
        return [cursor]
    v_trans, n_layer = _u32(data, cursor), _u32(data, cursor + 4)
    if v_trans > 1 or n_layer > 4096:
        return []
    cursor += 8
    ends: list[int] = []
    for transposed in (False, bool(v_trans)):
        for _ in range(n_layer):
            if cursor + _ENTRY_BYTES > data.size:
                return ends
            entry = _read_entry(data, cursor, transposed)
            cursor += _ENTRY_BYTES + entry.cell_bytes * n_cells
            if cursor > data.size:
                return ends
        ends.insert(0, cursor)
    return ends


def _recurrent_to_end(data: Buffer, at: int) -> Cells | None:
    """Return the cell of a recurrent part that goes from here to the end, or None for another."""
    try:
        n_cells = _u32(data, at)
        cursor = at + 4 + n_cells * _CELL.itemsize
        if n_cells > 1 or _u32(data, cursor):
            return None
        n_layer, first = _u32(data, cursor + 4), -1
        if n_cells:
            cell = np.frombuffer(data, _CELL, 1, at + 4)[0]
            if cell["n_seq_id"] != 1 or cell["seq_id"]:
                return None
            first = int(cell["pos"])
        cursor += 8
        for _ in range(2 * min(n_layer, 4096)):
            if cursor >= data.size:
                break
            cursor += _ENTRY_BYTES + _read_entry(data, cursor, False).cell_bytes * n_cells
    except StateRejected:
        return None
    return Cells(n_cells, first) if cursor == data.size else None
