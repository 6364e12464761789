"""A runtime without a model and without bytes: what states would occupy, for simulations.

`FakeRuntime` proves that what is restored is right; this one proves nothing. It knows how many
tokens a sequence holds and how large each state would be, and its states are of that size without
occupying it. So caches above it decide as they do above any runtime, at a small part of the cost.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from llamakeep.errors import InvalidValue, StateRejected, whole_number
from llamakeep.runtime.base import Family, check_fits
from llamakeep.runtime.fake import FakeRuntime
from llamakeep.states import Buffer, Checkpoint, DeviceCheckpoint, Segment, frozen
from llamakeep.tokens import IntArray

_N_VOCAB: Final = 2**31


class SizedRuntime(FakeRuntime):
    """Sequences that are lengths, and states that are sizes. See `Runtime` for the methods.

    Nothing comes out of it: there are no logits, and whether a state is the right one is not
    checked, only that it is of the right span and size. All checkpoints are of one size, also
    those of a window that is not full. One thread at a time.

    Args:
        family: The memory family.
        n_ctx: Tokens that one sequence has room for.
        n_seqs: Sequences for the caller.
        n_batch: Most tokens in one native call; only `calls` depend on it.
        n_swa: Window size, in families that have one.
        bytes_per_token: Bytes of a token's rows, in families that have rows.
        checkpoint_bytes: Bytes of a rolling part, in families that have one.
        fixed_bytes: Bytes that every segment has besides its rows.

    Raises:
        InvalidValue: For a size that cannot be.
    """

    def __init__(
        self,
        family: Family | str = Family.ATTENTION,
        *,
        n_ctx: int = 4096,
        n_seqs: int = 1,
        n_batch: int = 2048,
        n_swa: int = 64,
        bytes_per_token: int = 1,
        checkpoint_bytes: int = 0,
        fixed_bytes: int = 0,
    ) -> None:
        super().__init__(
            family, n_ctx=n_ctx, n_seqs=n_seqs, n_batch=n_batch, n_swa=n_swa, n_vocab=_N_VOCAB
        )
        whole_number("bytes_per_token", bytes_per_token, 1)
        whole_number("checkpoint_bytes", checkpoint_bytes, 1 if self.traits.rolling else 0)
        self._bytes_per_token = bytes_per_token
        self._checkpoint_bytes = checkpoint_bytes
        self._fixed_bytes = whole_number("fixed_bytes", fixed_bytes, 0)

    # -- evaluating --------------------------------------------------------------------------

    def evaluate(self, seq_id: int, tokens: IntArray) -> None:
        """Count `tokens` as evaluated. See `Runtime.evaluate`."""
        seq, n_tokens = self._seq(seq_id), int(tokens.size)
        check_fits(seq.n_tokens + n_tokens, self.n_ctx)
        self._set(seq_id, seq.n_tokens + n_tokens)
        self.calls.evaluate += -(-n_tokens // self.n_batch)
        self.calls.evaluated_tokens += n_tokens

    def _set(self, seq_id: int, n_tokens: int) -> None:
        """Let a sequence hold so many tokens, the last ones of them in its window."""
        seq = self._seq(seq_id)
        seq.n_tokens = n_tokens
        seq.window_start = max(0, n_tokens - self.traits.n_swa) if self.traits.n_swa else 0

    def decode(self, parts: object) -> list[int | None]:
        """Refuse: there are no outputs to return.

        Raises:
            InvalidValue: Always.
        """
        raise InvalidValue("a runtime of sizes has no outputs: call evaluate")

    def logits(self) -> npt.NDArray[np.float32]:
        """Refuse: there are no logits.

        Raises:
            InvalidValue: Always.
        """
        raise InvalidValue("a runtime of sizes has no logits")

    # -- states ------------------------------------------------------------------------------

    def segment_bytes(self, n_tokens: int) -> int:
        """Return the size of a segment of `n_tokens`."""
        return self._fixed_bytes + n_tokens * self._bytes_per_token

    def read_segment(self, seq_id: int, start: int, end: int) -> Segment:
        """Return a segment of tokens [start, end), with its size alone."""
        held = self._seq(seq_id).n_tokens
        if not (self.traits.segments and 0 <= start < end <= held):
            raise InvalidValue(f"no tokens {start} to {end}: the sequence holds {held}")
        data = of_size(self.segment_bytes(end - start))
        self._count_read(data)
        return Segment(start, end, data)

    def checkpoint_bytes(self, seq_id: int) -> int:
        """Return the size of a checkpoint."""
        self._checkpoint_sequence(seq_id)
        return self._checkpoint_bytes

    def read_checkpoint(self, seq_id: int) -> Checkpoint:
        """Return a checkpoint at the sequence's end, with its size alone."""
        n_tokens = self._checkpoint_sequence(seq_id).n_tokens
        data = of_size(self._checkpoint_bytes)
        self._count_read(data)
        return Checkpoint(n_tokens, data)

    def read_device_checkpoint(self, seq_id: int) -> DeviceCheckpoint:
        """Refuse: there is no device.

        Raises:
            InvalidValue: Always.
        """
        raise InvalidValue("a runtime of sizes has no device")

    # -- moving ------------------------------------------------------------------------------

    def restore(
        self,
        seq_id: int,
        n_tokens: int,
        segments: Iterable[Segment],
        checkpoint: Checkpoint | None = None,
    ) -> None:
        """Let the sequence hold the first `n_tokens` of a prompt. See `Runtime.restore`."""
        self._seq(seq_id)
        if not 0 < n_tokens <= self.n_ctx:
            raise StateRejected(f"{n_tokens} tokens do not fit into a context of {self.n_ctx}")
        reach, moved = 0, []
        for segment in segments:
            if segment.start > reach or segment.data.nbytes != self.segment_bytes(
                segment.end - segment.start
            ):
                raise StateRejected(f"{segment} does not continue from {reach}", refused=segment)
            reach = segment.end
            moved.append(segment.data)
        if self.traits.segments and reach < n_tokens:
            raise StateRejected(f"segments reach to {reach}, not to {n_tokens}")
        self._check(checkpoint, n_tokens, needed=self.traits.rolling)
        if checkpoint is not None:
            moved.append(checkpoint.data)
        for data in moved:
            self._count_write(data)
        self.calls.restores += 1
        self._set(seq_id, n_tokens)

    def _check(
        self, checkpoint: Checkpoint | DeviceCheckpoint | None, n_tokens: int, *, needed: bool
    ) -> None:
        position = checkpoint.position if checkpoint is not None else None
        if position != n_tokens and (needed or position is not None):
            raise StateRejected(f"the checkpoint is at {position}, not {n_tokens}")

    def rewind(
        self,
        seq_id: int,
        n_tokens: int,
        checkpoint: Checkpoint | DeviceCheckpoint | None = None,
    ) -> None:
        """Cut the sequence back. See `Runtime.rewind`."""
        seq = self._seq(seq_id)
        if not 0 <= n_tokens <= seq.n_tokens:
            raise InvalidValue(f"cannot rewind to {n_tokens}: the sequence holds {seq.n_tokens}")
        if n_tokens == seq.n_tokens:
            return
        self._check(checkpoint, n_tokens, needed=not self.can_rewind(seq_id, n_tokens))
        if checkpoint is not None:
            self._count_write(checkpoint.data)
        self.calls.rewinds += 1
        window_start = seq.window_start
        self._set(seq_id, n_tokens)
        if checkpoint is None:
            seq.window_start = window_start  # what left the window stays away

    def copy(self, src: int, dst: int, n_tokens: int, checkpoint: Checkpoint | None = None) -> None:
        """Let `dst` hold the first `n_tokens` of `src`. See `Runtime.copy`."""
        held = self._seq(src).n_tokens
        self._seq(dst)
        if src == dst or not 0 < n_tokens <= held:
            raise InvalidValue(f"cannot copy {n_tokens} tokens of {held} from {src} to {dst}")
        self._check(checkpoint, n_tokens, needed=self.traits.rolling and n_tokens != held)
        self.calls.copies += 1
        self._set(dst, n_tokens)

    def clear(self, seq_id: int) -> None:
        """Empty the sequence."""
        self._set(seq_id, 0)


@lru_cache(maxsize=1024)
def of_size(n_bytes: int) -> Buffer:
    """Return a read-only array that is as large as asked for, in the memory of one byte."""
    return frozen(np.broadcast_to(np.zeros(1, np.uint8), (n_bytes,)))
