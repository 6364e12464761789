"""A runtime without a model: deterministic states and logits for each memory family.

Everything above the runtime runs on it in tests, demonstrations and simulations. It is honest
about state: logits are a function of every row, window row and recurrent state that the family
would attend to, so a foreign, stale or missing one changes them, and what is evaluated on top of
it is wrong in turn, as in a real model. It is also fast: nothing loops over tokens in Python.

The arithmetic is that of a polynomial hash modulo 2**64. With ``m(i)`` a mix of token, position
and seed, a sequence's digest is ``S(i) = K * S(i - 1) + m(i)``. A dense row holds
``S(i) - S(i - 1)``, so the rows that are there add up to S; a window row is a mix of the dense row
at its position; a recurrent state is S itself. Each evaluation starts from the sum of the rows
that it finds, plus what window and recurrent state differ by from what those rows call for:
nothing, unless something is wrong.

A state is a header (magic, kind, layout, span, checksum of these) followed by the rows, window
rows and recurrent bytes, each padded with zeros to the size asked for; the padding is never
touched, so states of recorded sizes cost address space, not memory. Like llama.cpp's, states say
how they are laid out but not which model or tokens they are of: telling those apart is the
namespace's work.
"""

from __future__ import annotations

import itertools
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from llamakeep.errors import (
    DecodeError,
    InvalidValue,
    KeeperClosed,
    NoRoom,
    RestoreFailed,
    StateError,
    StateRejected,
    blaming,
    is_of_input,
)
from llamakeep.runtime.base import (
    Family,
    Part,
    Runtime,
    Traits,
    check_fits,
    check_parts,
    spoils_others,
)
from llamakeep.runtime.fake_text import FakeSampler, FakeVocab
from llamakeep.runtime.layout import check_cover, with_stops
from llamakeep.runtime.sampling import settle
from llamakeep.sampling import Sampling
from llamakeep.states import (
    Buffer,
    Checkpoint,
    DeviceCheckpoint,
    Positions,
    Segment,
    frozen,
)
from llamakeep.tokens import IntArray, as_tokens

Words: TypeAlias = npt.NDArray[np.uint64]

_HEADER: Final = struct.Struct("<4sI8sqqqQ")
_MAGIC: Final = b"FAKE"
_SEGMENT, _CHECKPOINT, _WHOLE, _DEVICE = 1, 2, 3, 4
_KINDS: Final = {_SEGMENT: "segment", _CHECKPOINT: "checkpoint", _WHOLE: "whole", _DEVICE: "device"}
_WORD: Final = 8
_K: Final = 0x5851F42D4C957F2D  # Knuth's multiplier; its powers do not repeat before 2**62
_K_INVERSE: Final = pow(_K, -1, 1 << 64)
_MASK: Final = (1 << 64) - 1

_contexts = itertools.count(1)
_generations = itertools.count(1)

OPERATIONS: Final = (
    "evaluate",
    "read_segment",
    "read_checkpoint",
    "read_device_checkpoint",
    "restore",
    "restore:segment",
    "restore:checkpoint",
    "restore:verify",
    "rewind",
    "rewind:checkpoint",
    "rewind:cut",
    "copy",
    "copy:rows",
    "copy:checkpoint",
)
"""Points that can fail. ``evaluate`` comes before each native call, so also between two; other
names without a colon come before anything changed, those with one after that."""


@dataclass(slots=True)
class Calls:
    """What a real runtime would have done so far.

    Attributes:
        evaluate: Native evaluation calls, each of at most `n_batch` tokens.
        evaluated_tokens: Tokens in them.
        reads: Segments and checkpoints read.
        read_bytes: Bytes in them.
        device_reads: Checkpoints left on the device.
        writes: Segments and checkpoints written into sequences.
        written_bytes: Bytes in them.
        restores: Restores that passed the checks.
        rewinds: Rewinds that changed a sequence.
        copies: Copies between sequences.
    """

    evaluate: int = 0
    evaluated_tokens: int = 0
    reads: int = 0
    read_bytes: int = 0
    device_reads: int = 0
    writes: int = 0
    written_bytes: int = 0
    restores: int = 0
    rewinds: int = 0
    copies: int = 0


@dataclass(slots=True)
class _Failure:
    """One failure to come."""

    after: int
    error: BaseException | None
    cleared_all: bool


@dataclass(frozen=True, slots=True)
class _State:
    """A parsed state: what it holds, as views of its bytes."""

    end: int
    window_start: int
    rows: Words
    window: Words
    recurrent: Words


class _Sequence:
    """One sequence, its arrays indexed by position; what lies beyond `n_tokens` is stale."""

    __slots__ = ("cells", "n_tokens", "recurrent", "rows", "window", "window_start")

    def __init__(self, n_ctx: int, family: Family) -> None:
        self.n_tokens = 0
        self.rows: Words = np.zeros(n_ctx if family.has_rows else 0, np.uint64)
        self.cells = np.zeros(n_ctx if family.has_rows else 0, np.int32)
        self.window: Words = np.zeros(n_ctx if family.has_window else 0, np.uint64)
        self.window_start = 0
        self.recurrent = 0


class _Cells:
    """The cells that all sequences share, each counted by the sequences that use it."""

    def __init__(self, n_cells: int) -> None:
        self._users = np.zeros(n_cells, np.int32)
        self._free = np.arange(n_cells, dtype=np.int32)
        self.n_free = n_cells

    def take(self, n_cells: int) -> npt.NDArray[np.int32]:
        """Take `n_cells` of the `n_free` ones."""
        self.n_free -= n_cells
        cells: npt.NDArray[np.int32] = self._free[self.n_free : self.n_free + n_cells].copy()
        self._users[cells] = 1
        return cells

    def share(self, cells: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Count one more user of `cells`."""
        self._users[cells] += 1
        return cells

    def drop(self, cells: npt.NDArray[np.int32]) -> None:
        """Count one user less; cells without any are free again."""
        self._users[cells] -= 1
        unused = cells[self._users[cells] == 0]
        self._free[self.n_free : self.n_free + unused.size] = unused
        self.n_free += unused.size


class FakeRuntime:
    """Sequences of a model that does not exist. See `Runtime` for what the methods promise.

    Two runtimes with equal family, sizes and seed compute the same states and logits. Another
    seed is another model of the same layout: its states are accepted, and are wrong. One thread
    at a time, like every runtime.

    Args:
        family: The memory family.
        n_ctx: Tokens that all sequences together have room for.
        n_seqs: Sequences for the caller.
        n_batch: Most tokens in one native call; only `calls` and failures depend on it.
        n_vocab: Tokens in the vocabulary.
        n_swa: Window size, in families that have one.
        dense: Segments keep their window rows, so that no checkpoint is needed (SWA only).
        whole: Only whole states can be kept, as for a model whose layout is not known.
        row_bytes: Bytes of a token's dense row in a state, at least 8.
        window_row_bytes: Bytes of a token's window row in a state, at least 8.
        recurrent_bytes: Bytes of a recurrent state, at least 8.
        fixed_bytes: Bytes that every state has besides its header and those.
        seed: Another seed is another model.

    Attributes:
        calls: Counts of what a real runtime would have done.
        failures: Called with each of `OPERATIONS` as it comes up; may raise. None for no calls.

    Raises:
        InvalidValue: For a size that cannot be, or `dense` in another family.
    """

    def __init__(
        self,
        family: Family | str,
        *,
        n_ctx: int = 4096,
        n_seqs: int = 1,
        n_batch: int = 512,
        n_vocab: int = 50_000,
        n_swa: int = 64,
        dense: bool = False,
        whole: bool = False,
        row_bytes: int = 16,
        window_row_bytes: int = 8,
        recurrent_bytes: int = 64,
        fixed_bytes: int = 0,
        seed: int = 0,
    ) -> None:
        self._family = Family(family)
        for name, value, least in (
            ("n_ctx", n_ctx, 1),
            ("n_seqs", n_seqs, 1),
            ("n_batch", n_batch, 1),
            ("n_vocab", n_vocab, 1),
            ("n_swa", n_swa, 2),
            ("row_bytes", row_bytes, _WORD),
            ("window_row_bytes", window_row_bytes, _WORD),
            ("recurrent_bytes", recurrent_bytes, _WORD),
            ("fixed_bytes", fixed_bytes, 0),
        ):
            if value < least:
                raise InvalidValue(f"{name} must be {least} or more, not {value}")
        if dense and (self._family is not Family.SWA or whole):
            raise InvalidValue("only segments of sliding-window memory can be dense")
        self.n_ctx = n_ctx
        self.n_seqs = n_seqs
        self.n_batch = n_batch
        self.n_vocab = n_vocab
        self._vocab = FakeVocab(n_vocab)
        self.draft: Runtime | None = None
        self.calls = Calls()
        self.failures: Callable[[str], None] | None = None
        self._head_bytes = _HEADER.size + fixed_bytes
        self._row_bytes = row_bytes
        self._window_row_bytes = window_row_bytes
        self._recurrent_bytes = recurrent_bytes if self._family.has_recurrent else 0
        n_swa = n_swa if self._family.has_window else 0
        sizes = f"{self._family.value} {n_swa} {dense} {row_bytes} {window_row_bytes}"
        layout = blake3(f"fake {sizes} {recurrent_bytes} {fixed_bytes}".encode()).digest()
        self._layout = layout[:8]
        self.traits = Traits(
            self._family,
            segments=self._family.has_rows and not whole,
            rolling=whole or (self._family is not Family.ATTENTION and not dense),
            dense=dense,
            n_swa=n_swa,
            layout=b"" if whole else layout,
            whole_because="the fake was told to" if whole else "",
        )
        self._sequences = [_Sequence(n_ctx, self._family) for _ in range(n_seqs)]
        self._cells = _Cells(n_ctx)
        self._seed = int.from_bytes(blake3(f"fake {seed}".encode()).digest()[:8], "little")
        self._powers = np.empty(0, np.uint64)
        self._inverse_powers = np.empty(0, np.uint64)
        self._output: int | None = None
        self._outputs: dict[int, int] = {}
        self._context = next(_contexts)
        self._device: dict[int, tuple[int, _State]] = {}
        self._planned: dict[str, list[_Failure]] = {}
        self._closed = False

    # -- failing on purpose ------------------------------------------------------------------

    def fail(
        self,
        operation: str,
        *,
        after: int = 0,
        error: BaseException | None = None,
        cleared_all: bool = False,
    ) -> None:
        """Make one later operation fail.

        Args:
            operation: One of `OPERATIONS`. One with a colon fails in the middle: the sequence is
                empty afterwards.
            after: How many of them still work before.
            error: What to raise; None for what a real runtime would. A `StateError` in the middle
                of an operation becomes `RestoreFailed`; other errors go through.
            cleared_all: The failure empties every sequence (in the middle of an operation only).

        Raises:
            InvalidValue: For an unknown operation, or `cleared_all` where nothing is cleared.
        """
        if operation not in OPERATIONS:
            raise InvalidValue(f"unknown operation {operation!r}; known: {', '.join(OPERATIONS)}")
        if cleared_all and ":" not in operation:
            raise InvalidValue(f"{operation} fails before anything changed: nothing is cleared")
        self._planned.setdefault(operation, []).append(_Failure(after, error, cleared_all))

    def _step(self, operation: str) -> None:
        if self.failures is not None:
            self.failures(operation)
        if not self._planned:
            return
        planned = self._planned.get(operation, [])
        due = next((failure for failure in planned if failure.after <= 0), None)
        for failure in planned:
            failure.after -= 1
        if due is None:
            return
        planned.remove(due)
        if due.cleared_all:
            raise RestoreFailed(f"injected into {operation}", cleared_all=True) from due.error
        if due.error is not None:
            raise due.error
        if operation == "evaluate":
            raise DecodeError("injected into evaluate")
        if operation.startswith("read_"):
            raise StateError(f"injected into {operation}")
        raise StateRejected(f"injected into {operation}")

    @contextmanager
    def _all_or_empty(self, seq_id: int) -> Iterator[None]:
        """Empty the sequence when what happens inside fails."""
        try:
            yield
        except StateError as error:
            if is_of_input(error):
                self.clear(seq_id)
                raise
            cleared_all = isinstance(error, RestoreFailed) and error.cleared_all
            if cleared_all:
                self.clear_all()
            else:
                self.clear(seq_id)
            raise RestoreFailed(str(error), cleared_all=cleared_all) from error
        except BaseException:
            self.clear(seq_id)
            raise

    # -- evaluating --------------------------------------------------------------------------

    def _seq(self, seq_id: int) -> _Sequence:
        if not 0 <= seq_id < self.n_seqs:
            raise InvalidValue(f"seq_id {seq_id} is outside 0 to {self.n_seqs - 1}")
        if self._closed:
            raise KeeperClosed("the model is closed")
        return self._sequences[seq_id]

    def evaluate(self, seq_id: int, tokens: IntArray) -> None:
        """Evaluate `tokens` after those the sequence already holds. See `Runtime.evaluate`."""
        tokens = as_tokens(tokens, n_vocab=self.n_vocab)
        check_fits(self._seq(seq_id).n_tokens + tokens.size, self.n_ctx)
        for start in range(0, tokens.size, self.n_batch):
            try:
                self.decode([Part(seq_id, tokens[start : start + self.n_batch])])
            except NoRoom as error:
                self.clear(seq_id)
                raise DecodeError(str(error)) from None

    def decode(self, parts: Sequence[Part]) -> list[int | None]:
        """Evaluate tokens of several sequences in one native call. See `Runtime.decode`."""
        found = check_parts(self, parts)
        if not parts:
            return []
        self._outputs = {}
        self._output = None
        try:
            self._step("evaluate")
            n_tokens = sum(tokens.size for tokens, _ in found)
            if self._family.has_rows and n_tokens > self._cells.n_free:
                at = f" at {found[0][1].n_tokens}" if len(parts) == 1 else ""
                raise NoRoom(f"llama_decode returned 1 for {n_tokens} tokens{at} of {self.n_ctx}")
        except NoRoom:
            raise
        except DecodeError as error:
            if spoils_others(self._family, parts):
                self.clear_all()
                error.cleared_all = True
            for part in parts:
                self.clear(part.seq_id)
            raise
        self.calls.evaluate += 1
        self.calls.evaluated_tokens += n_tokens
        indices: list[int | None] = []
        end = 0
        for part, (tokens, _) in zip(parts, found, strict=True):
            digest = self._append(self._sequences[part.seq_id], tokens)
            end += tokens.size
            indices.append(end - 1 if part.output else None)
            if part.output:
                self._outputs[end - 1] = self._output = digest
        return indices

    def _append(self, seq: _Sequence, tokens: IntArray) -> int:
        """Put tokens behind those of a sequence, and return the digest after the last one."""
        start, n = seq.n_tokens, tokens.size
        end = start + n
        if seq.rows.size:
            seq.cells[start:end] = self._cells.take(n)
        digests = self._digests(self._found(seq), tokens, start)
        if seq.rows.size:
            np.subtract(digests[1:], digests[:-1], out=seq.rows[start:end])
        if seq.window.size:
            # What leaves the window within this call was never asked for.
            first = start if self.traits.dense else max(start, end - self.traits.n_swa)
            seq.window[first:end] = _mix(seq.rows[first:end])
            if not self.traits.dense:
                seq.window_start = max(seq.window_start, end - self.traits.n_swa)
        seq.n_tokens = end
        seq.recurrent = int(digests[-1])
        return seq.recurrent

    def _found(self, seq: _Sequence) -> int:
        """Return the digest of all that the next token of the sequence attends to."""
        if not seq.rows.size:
            return seq.recurrent
        rows = seq.rows[: seq.n_tokens]
        found = total = _sum(rows)
        if self._family.has_recurrent:
            found += 3 * (seq.recurrent - total)
        if self._family.has_window:
            reach = max(0, seq.n_tokens - self.traits.n_swa + 1)
            window = seq.window[max(reach, seq.window_start) : seq.n_tokens]
            found += 5 * (_sum(window) - _sum(_mix(rows[reach:])))
        return found & _MASK

    def _digests(self, found: int, tokens: IntArray, start: int) -> Words:
        """Return the digest before the first of `tokens` and after each of them."""
        n = tokens.size
        if self._powers.size <= n:
            size = max(n, 2 * self._powers.size, 512) + 1
            self._powers = np.cumprod(np.full(size, _K, np.uint64)) * np.uint64(_K_INVERSE)
            inverse = np.full(size, _K_INVERSE, np.uint64)
            self._inverse_powers = np.cumprod(inverse) * np.uint64(_K)
        positions = np.arange(start, start + n, dtype=np.uint64)
        mixed = (tokens.astype(np.uint64) << np.uint64(32)) + positions
        scaled = np.empty(n + 1, np.uint64)
        scaled[0] = found
        np.multiply(
            _mix(mixed ^ np.uint64(self._seed)), self._inverse_powers[1 : n + 1], out=scaled[1:]
        )
        digests: Words = np.cumsum(scaled)
        digests *= self._powers[: n + 1]
        return digests

    def logits(self) -> npt.NDArray[np.float32]:
        """Return the logits after the last evaluated token, shape (n_vocab,), a copy.

        Between -4 and 4, evenly spread, and of no meaning but equality. Costs a millisecond for a
        vocabulary of 50,000.

        Raises:
            InvalidValue: When nothing was evaluated yet.
        """
        if self._closed:
            raise KeeperClosed("the model is closed")
        if self._output is None:
            raise InvalidValue("no logits: nothing was evaluated yet")
        return self._spread(self._output)

    def logits_of(self, index: int) -> npt.NDArray[np.float32]:
        """Return the logits of an output of the last `decode`, shape (n_vocab,), a copy."""
        if self._closed:
            raise KeeperClosed("the model is closed")
        if index not in self._outputs:
            raise InvalidValue(f"{index} is no output of the last batch")
        return self._spread(self._outputs[index])

    def sampler(self, sampling: Sampling) -> FakeSampler:
        """Return a sampler with these settings. See `Runtime.sampler`.

        Raises:
            GrammarError: For any grammar; see `FakeVocab.check_grammar`.
        """
        if self._closed:
            raise KeeperClosed("the model is closed")
        if sampling.grammar:
            self.vocab.check_grammar(sampling.grammar)
        forbidden = self.vocab.ends if sampling.ignore_eos else ()
        settled = settle(sampling, n_vocab=self.n_vocab, n_ctx=self.n_ctx, forbidden=forbidden)
        return FakeSampler(sampling, settled, n_vocab=self.n_vocab, output=self.logits_of)

    @property
    def vocab(self) -> FakeVocab:
        """The tokens of the model; for any thread."""
        return self._vocab

    def _spread(self, digest: int) -> npt.NDArray[np.float32]:
        ids = np.arange(self.n_vocab, dtype=np.uint64)
        mixed = _mix(ids + np.uint64(digest)) >> np.uint64(40)
        logits: npt.NDArray[np.float32] = mixed.astype(np.float32)
        logits *= np.float32(8 / 2**24)
        logits -= np.float32(4)
        return logits

    def positions(self, seq_id: int) -> Positions:
        """Return the first and last position that the sequence holds."""
        seq = self._seq(seq_id)
        last = seq.n_tokens - 1
        if not seq.n_tokens or self._family.has_recurrent:
            return Positions(last, last)
        return Positions(seq.window_start if self._family.has_window else 0, last)

    # -- states as bytes ---------------------------------------------------------------------

    def _size(self, n_rows: int, n_window: int, n_recurrent_bytes: int) -> int:
        rows = n_rows * self._row_bytes + n_window * self._window_row_bytes
        return self._head_bytes + rows + n_recurrent_bytes

    def _pack(self, kind: int, seq: _Sequence, start: int, end: int, window_start: int) -> Buffer:
        """Return the rows [start, end) and window [window_start, end) as bytes."""
        n_recurrent = 0 if kind == _SEGMENT else self._recurrent_bytes
        data = np.zeros(self._size(end - start, end - window_start, n_recurrent), np.uint8)
        fields = (_MAGIC, kind, self._layout, start, end, window_start)
        _HEADER.pack_into(data.data, 0, *fields, _checksum(fields))
        rows, window, recurrent = self._parts(data, end - start, end - window_start)
        rows[:] = seq.rows[start:end]
        window[:] = seq.window[window_start:end]
        if n_recurrent:
            recurrent[0] = seq.recurrent
        return frozen(data)

    def _parts(self, data: Buffer, n_rows: int, n_window: int) -> tuple[Words, Words, Words]:
        """Return views of the rows, the window and the recurrent state in `data`."""
        window_at = self._head_bytes + n_rows * self._row_bytes
        recurrent_at = window_at + n_window * self._window_row_bytes
        n_recurrent = int(recurrent_at < data.size)
        return (
            np.frombuffer(data, np.uint64, n_rows, self._head_bytes if n_rows else 0),
            np.frombuffer(data, np.uint64, n_window, window_at if n_window else 0),
            np.frombuffer(data, np.uint64, n_recurrent, recurrent_at if n_recurrent else 0),
        )

    def _check_header(self, data: Buffer, kind: int, start: int, end: int) -> int:
        """Check that `data` begins like a state of this kind; return where its window starts."""
        if data.size < _HEADER.size:
            raise StateRejected(f"state ends at byte {data.size:,}, inside its header")
        *fields, checksum = _HEADER.unpack_from(data.data)
        magic, found_kind, layout, found_start, found_end, window_start = fields
        if magic != _MAGIC:
            raise StateRejected(f"state begins with {magic!r}, not {_MAGIC!r}")
        if checksum != _checksum(fields):
            raise StateRejected("state has a damaged header")
        if layout != self._layout:
            raise StateRejected("state has another layout than this model's")
        if found_kind != kind:
            raise StateRejected(f"state is a {_KINDS.get(found_kind)}, not a {_KINDS[kind]}")
        if (found_start, found_end) != (start, end):
            raise StateRejected(
                f"{_KINDS[kind]} is of tokens {found_start} to {found_end}, not {start} to {end}"
            )
        if self._family.has_window and kind != _SEGMENT:
            latest = max(0, end - self.traits.n_swa + 1)
            if not 0 <= window_start <= latest:
                raise StateRejected(f"window starts at {window_start}, too late for position {end}")
        return int(window_start)

    def _parse(self, data: Buffer, kind: int, start: int, end: int) -> _State:
        """Check that `data` is a state of this kind, layout and span, and take it apart.

        Raises:
            StateRejected: With what is wrong.
        """
        window_start = self._check_header(data, kind, start, end)
        n_recurrent = 0 if kind == _SEGMENT else self._recurrent_bytes
        size = self._size(end - start, end - window_start, n_recurrent)
        if data.size != size:
            raise StateRejected(f"state has {data.size:,} bytes, its parts have {size:,}")
        return _State(end, window_start, *self._parts(data, end - start, end - window_start))

    # -- segments ----------------------------------------------------------------------------

    def _need_segments(self) -> None:
        if self.traits.whole_because:
            raise InvalidValue(
                f"this model's state is kept whole ({self.traits.whole_because}): no segments"
            )

    def segment_bytes(self, n_tokens: int) -> int:
        """Return the exact size of a segment of `n_tokens`, without reading one."""
        self._need_segments()
        n_rows = n_tokens if self._family.has_rows else 0
        return self._size(n_rows, n_tokens if self.traits.dense else 0, 0)

    def read_segment(self, seq_id: int, start: int, end: int) -> Segment:
        """Read the truncatable bytes of tokens [start, end). See `Runtime.read_segment`."""
        self._need_segments()
        seq = self._seq(seq_id)
        if not self._family.has_rows:
            raise InvalidValue("a recurrent model has no truncatable part: no segments")
        if not 0 <= start < end <= seq.n_tokens:
            raise InvalidValue(f"no tokens {start} to {end}: the sequence holds {seq.n_tokens}")
        if self.traits.dense and end - start > self.traits.n_swa:
            raise InvalidValue(f"a segment of {end - start} tokens outgrows {self.traits.n_swa}")
        self._step("read_segment")
        data = self._pack(_SEGMENT, seq, start, end, start if self.traits.dense else end)
        self._count_read(data)
        return Segment(start, end, data)

    def _count_read(self, data: Buffer) -> None:
        self.calls.reads += 1
        self.calls.read_bytes += data.size

    def _count_write(self, data: Buffer) -> None:
        self.calls.writes += 1
        self.calls.written_bytes += data.size

    # -- checkpoints -------------------------------------------------------------------------

    def _window_start(self, seq: _Sequence) -> int:
        if not self._family.has_window:
            return seq.n_tokens
        return max(seq.window_start, seq.n_tokens - self.traits.n_swa)

    def checkpoint_bytes(self, seq_id: int) -> int:
        """Return the exact size of a checkpoint of the sequence as it is now."""
        seq = self._seq(seq_id)
        keeps_rows = self._family.has_rows and not self._rolls_alone
        n_recurrent = self._recurrent_bytes if seq.n_tokens else 0
        n_window = seq.n_tokens - self._window_start(seq)
        return self._size(seq.n_tokens if keeps_rows else 0, n_window, n_recurrent)

    @property
    def _rolls_alone(self) -> bool:
        """Whether a checkpoint is the rolling part only."""
        return self._family is not Family.ATTENTION and not self.traits.whole_because

    def read_checkpoint(self, seq_id: int) -> Checkpoint:
        """Read the rolling bytes at the sequence's end. See `Runtime.read_checkpoint`."""
        seq = self._checkpoint_sequence(seq_id)
        self._step("read_checkpoint")
        n_tokens, window_start = seq.n_tokens, self._window_start(seq)
        if self.traits.whole_because:
            start = 0 if self._family.has_rows else n_tokens
            data = self._pack(_WHOLE, seq, start, n_tokens, window_start)
        else:
            data = self._pack(_CHECKPOINT, seq, n_tokens, n_tokens, window_start)
        self._count_read(data)
        return Checkpoint(n_tokens, data)

    def _checkpoint_sequence(self, seq_id: int) -> _Sequence:
        seq = self._seq(seq_id)
        if not self.traits.rolling:
            raise InvalidValue(f"{self.traits.family.value} memory needs no checkpoints")
        if not seq.n_tokens:
            raise InvalidValue(f"sequence {seq_id} is empty: nothing to checkpoint")
        return seq

    def read_device_checkpoint(self, seq_id: int) -> DeviceCheckpoint:
        """Leave the rolling state "on the device". See `Runtime.read_device_checkpoint`."""
        seq = self._checkpoint_sequence(seq_id)
        if self.traits.whole_because:
            raise InvalidValue("this model's state is kept whole: no device checkpoints")
        if self._family.has_window:
            raise InvalidValue("a sliding window cannot be left on the device")
        self._step("read_device_checkpoint")
        n_tokens, window_start = seq.n_tokens, self._window_start(seq)
        kept = self._pack(_CHECKPOINT, seq, n_tokens, n_tokens, window_start)
        state = self._parse(kept, _CHECKPOINT, n_tokens, n_tokens)
        fields = (_MAGIC, _DEVICE, self._layout, n_tokens, n_tokens, window_start)
        data = np.frombuffer(_HEADER.pack(*fields, _checksum(fields)), np.uint8)
        generation = next(_generations)
        self._device[seq_id] = (generation, state)
        self.calls.device_reads += 1
        return DeviceCheckpoint(
            n_tokens, data, seq_id, self._context, generation, kept.size - data.size
        )

    def _device_state(self, checkpoint: DeviceCheckpoint, seq_id: int) -> _State:
        if checkpoint.context != self._context:
            raise StateRejected("device checkpoint belongs to another context")
        if checkpoint.seq_id != seq_id:
            raise StateRejected(
                f"device checkpoint is of sequence {checkpoint.seq_id}, not {seq_id}"
            )
        generation, state = self._device.get(seq_id, (0, None))
        if state is None or checkpoint.generation != generation:
            raise StateRejected("device checkpoint is gone: overwritten, or its sequence was")
        self._check_header(checkpoint.data, _DEVICE, checkpoint.position, checkpoint.position)
        return state

    def _parse_checkpoint(
        self, checkpoint: Checkpoint | DeviceCheckpoint | None, n_tokens: int, seq_id: int
    ) -> _State:
        if checkpoint is None:
            raise StateRejected(f"no checkpoint at {n_tokens}")
        if isinstance(checkpoint, DeviceCheckpoint):
            state = self._device_state(checkpoint, seq_id)
            if checkpoint.position != n_tokens:
                raise StateRejected(f"checkpoint is at {checkpoint.position}, not {n_tokens}")
            return state
        if checkpoint.position != n_tokens:
            raise StateRejected(f"checkpoint is at {checkpoint.position}, not {n_tokens}")
        return self._parse(checkpoint.data, _CHECKPOINT, n_tokens, n_tokens)

    # -- restoring ---------------------------------------------------------------------------

    def restore(
        self,
        seq_id: int,
        n_tokens: int,
        segments: Iterable[Segment],
        checkpoint: Checkpoint | None = None,
    ) -> None:
        """Make the sequence hold the first `n_tokens` of a prompt. See `Runtime.restore`."""
        seq = self._seq(seq_id)
        if not 0 < n_tokens <= self.n_ctx:
            raise StateRejected(f"{n_tokens} tokens do not fit into a context of {self.n_ctx}")
        if self.traits.whole_because:
            self._restore_whole(seq_id, n_tokens, list(segments), checkpoint)
            return
        if not self.traits.segments:
            check_cover(n_tokens, list(segments), needed=False)
        if isinstance(segments, Sequence):
            check_cover(n_tokens, segments, needed=self.traits.segments)
            segments = list(self._checked(segments))
        else:
            segments = self._checked(segments)
        rolling = None
        if self.traits.rolling:
            with blaming(checkpoint):
                rolling = self._parse_checkpoint(checkpoint, n_tokens, seq_id)
        self._step("restore")
        self.calls.restores += 1
        with self._all_or_empty(seq_id):
            self.clear(seq_id)
            for segment, stop in with_stops(n_tokens, segments) if self.traits.segments else ():
                self._step("restore:segment")
                self._count_write(segment.data)
                state = self._parse(segment.data, _SEGMENT, segment.start, segment.end)
                self._place(seq, segment, state, stop)
            if rolling is not None and checkpoint is not None:
                self._step("restore:checkpoint")
                self._count_write(checkpoint.data)
                self._apply(seq, rolling)
            self._step("restore:verify")
            if seq.n_tokens != n_tokens:
                raise RestoreFailed(f"sequence holds {seq.n_tokens} tokens, not {n_tokens}")

    def _checked(self, segments: Iterable[Segment]) -> Iterator[Segment]:
        """Yield segments, each checked before."""
        for segment in segments:
            with blaming(segment):
                self._parse(segment.data, _SEGMENT, segment.start, segment.end)
            yield segment

    def _place(self, seq: _Sequence, segment: Segment, state: _State, stop: int) -> None:
        """Put a segment's rows up to `stop` behind those the sequence has."""
        if state.rows.size > self._cells.n_free:
            raise RestoreFailed(f"llama.cpp read 0 of {segment.data.size:,} bytes of state")
        start, n = segment.start, stop - segment.start
        if n <= 0:
            return
        if start != seq.n_tokens or n > state.rows.size:
            raise RestoreFailed(f"tokens {start} to {stop} do not continue {seq.n_tokens}")
        seq.rows[start:stop] = state.rows[:n]
        seq.cells[start:stop] = self._cells.take(n)
        if self.traits.dense:
            seq.window[start:stop] = state.window[:n]
        seq.n_tokens = stop

    def _apply(self, seq: _Sequence, state: _State) -> None:
        """Put a checkpoint's window and recurrent state in place."""
        seq.n_tokens = state.end
        if self._family.has_window:
            seq.window[state.window_start : state.end] = state.window
            seq.window_start = state.window_start
        if self._family.has_recurrent:
            seq.recurrent = int(state.recurrent[0])

    def _restore_whole(
        self,
        seq_id: int,
        n_tokens: int,
        segments: Sequence[Segment],
        checkpoint: Checkpoint | DeviceCheckpoint | None,
    ) -> None:
        if isinstance(checkpoint, DeviceCheckpoint):
            raise StateRejected("a whole state cannot come from the device")
        if segments or checkpoint is None or checkpoint.position != n_tokens:
            raise StateRejected(f"a whole state of {n_tokens} tokens is needed, nothing else")
        start = 0 if self._family.has_rows else n_tokens
        with blaming(checkpoint):
            state = self._parse(checkpoint.data, _WHOLE, start, n_tokens)
        self._step("restore")
        self.calls.restores += 1
        seq = self._sequences[seq_id]
        with self._all_or_empty(seq_id):
            self.clear(seq_id)
            self._step("restore:checkpoint")
            self._count_write(checkpoint.data)
            if state.rows.size:
                self._place(seq, Segment(0, n_tokens, checkpoint.data), state, n_tokens)
            self._apply(seq, state)
            self._step("restore:verify")

    # -- rewinding and copying ---------------------------------------------------------------

    def can_rewind(self, seq_id: int, n_tokens: int) -> bool:
        """Whether `rewind` to `n_tokens` works without a checkpoint."""
        held = self.positions(seq_id)
        if n_tokens in (0, held.n_tokens):
            return True
        if not 0 < n_tokens < held.n_tokens or self.traits.whole_because:
            return False
        if self._family.has_recurrent:
            return False
        n_swa = self.traits.n_swa
        return not n_swa or held.pos_min <= max(0, n_tokens - n_swa + 1)

    def rewind(
        self,
        seq_id: int,
        n_tokens: int,
        checkpoint: Checkpoint | DeviceCheckpoint | None = None,
    ) -> None:
        """Cut the live sequence back in place. See `Runtime.rewind`."""
        seq = self._seq(seq_id)
        if not 0 <= n_tokens <= seq.n_tokens:
            raise InvalidValue(f"cannot rewind to {n_tokens}: the sequence holds {seq.n_tokens}")
        if n_tokens == seq.n_tokens:
            return
        if n_tokens == 0:
            self.clear(seq_id)
            return
        if self.traits.whole_because:
            self._restore_whole(seq_id, n_tokens, (), checkpoint)
            return
        state = None
        if not self.can_rewind(seq_id, n_tokens):
            state = self._parse_checkpoint(checkpoint, n_tokens, seq_id)
        self._step("rewind")
        self.calls.rewinds += 1
        with self._all_or_empty(seq_id):
            if state is not None and checkpoint is not None:
                self._step("rewind:checkpoint")
                self._count_write(checkpoint.data)
            self._step("rewind:cut")
            if seq.rows.size:
                self._cells.drop(seq.cells[n_tokens : seq.n_tokens])
            seq.n_tokens = n_tokens
            if state is not None:
                self._apply(seq, state)
            self._forget_device(seq_id, n_tokens)

    def copy(self, src: int, dst: int, n_tokens: int, checkpoint: Checkpoint | None = None) -> None:
        """Make `dst` hold the first `n_tokens` of `src`. See `Runtime.copy`."""
        source, target = self._seq(src), self._seq(dst)
        if src == dst:
            raise InvalidValue(f"cannot copy sequence {src} to itself")
        held = source.n_tokens
        if not 0 < n_tokens <= held:
            raise InvalidValue(f"cannot copy {n_tokens} tokens: the sequence holds {held}")
        if self.traits.rolling and checkpoint is None:
            if n_tokens != held:
                raise InvalidValue(f"copying {n_tokens} of {held} tokens needs a checkpoint")
            checkpoint = self.read_checkpoint(src)
        if not self.traits.segments:
            self.restore(dst, n_tokens, (), checkpoint)
            return
        state = None
        if self.traits.rolling:
            state = self._parse_checkpoint(checkpoint, n_tokens, dst)
        self._step("copy")
        self.calls.copies += 1
        with self._all_or_empty(dst):
            self.clear(dst)
            self._step("copy:rows")
            target.cells[:n_tokens] = self._cells_for_copy(source.cells[:n_tokens])
            target.rows[:n_tokens] = source.rows[:n_tokens]
            if self.traits.dense:
                target.window[:n_tokens] = source.window[:n_tokens]
            target.n_tokens = n_tokens
            if state is not None and checkpoint is not None:
                self._step("copy:checkpoint")
                self._count_write(checkpoint.data)
                self._apply(target, state)

    def _cells_for_copy(self, cells: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        if not self.traits.dense:
            return self._cells.share(cells)
        if cells.size > self._cells.n_free:
            raise RestoreFailed("llama.cpp read 0 bytes of state")
        return self._cells.take(cells.size)

    # -- emptying and the end ----------------------------------------------------------------

    def clear(self, seq_id: int) -> None:
        """Empty the sequence; its memory is free afterwards."""
        seq = self._seq(seq_id)
        if seq.rows.size:
            self._cells.drop(seq.cells[: seq.n_tokens])
        seq.n_tokens = seq.window_start = seq.recurrent = 0
        self._forget_device(seq_id, 0)

    def _forget_device(self, seq_id: int, n_tokens: int) -> None:
        """End the life of a device checkpoint past `n_tokens`: what follows will be others."""
        _, state = self._device.get(seq_id, (0, None))
        if state is not None and state.end > n_tokens:
            del self._device[seq_id]

    def clear_all(self) -> None:
        """Empty every sequence."""
        for seq_id in range(self.n_seqs):
            self.clear(seq_id)

    def close(self) -> None:
        """Free what the runtime owns. Calling it again does nothing."""
        self._closed = True
        self._vocab.close()


def _mix(words: Words) -> Words:
    """Return each word scrambled (the finalizer of splitmix64)."""
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words


def _sum(words: Words) -> int:
    return int(words.sum(dtype=np.uint64))


def _checksum(fields: Sequence[object]) -> int:
    return zlib.crc32(repr(tuple(fields)).encode())


if TYPE_CHECKING:
    _is_a_runtime: type[Runtime] = FakeRuntime
