"""What llamakeep needs of a runtime, and the five kinds of memory a model can have.

A runtime holds sequences of evaluated tokens. The kept state of a sequence has two parts: the
*truncatable* part (dense key and value rows), which can be cut at any token, and the *rolling*
part (a sliding window, a recurrent state), which is true at one position only. Which parts exist
depends on the model's memory family.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from llamakeep.states import Checkpoint, DeviceCheckpoint, Positions, Segment
from llamakeep.tokens import IntArray


class Family(str, enum.Enum):
    """The kinds of memory that llama.cpp gives a model."""

    ATTENTION = "attention"
    """Dense rows only: cut anywhere, no rolling part."""
    SWA = "swa"
    """Dense and sliding-window layers."""
    RECURRENT = "recurrent"
    """One state per sequence, nothing to cut."""
    HYBRID = "hybrid"
    """Dense rows and a recurrent state."""
    HYBRID_SWA = "hybrid-swa"
    """Sliding-window rows and a recurrent state."""

    @property
    def has_window(self) -> bool:
        """Whether some layers see only a sliding window."""
        return self in (Family.SWA, Family.HYBRID_SWA)

    @property
    def has_recurrent(self) -> bool:
        """Whether part of the state is recurrent."""
        return self in (Family.RECURRENT, Family.HYBRID, Family.HYBRID_SWA)

    @property
    def has_rows(self) -> bool:
        """Whether there is a truncatable part."""
        return self is not Family.RECURRENT


@dataclass(frozen=True, slots=True)
class Traits:
    """How the state of one loaded model can be kept.

    Attributes:
        family: The memory family.
        segments: Ranges of tokens can be read and restored by themselves.
        rolling: A position is restorable only where a checkpoint sits.
        dense: Sliding-window rows are kept in the segments, so no checkpoint is needed.
        n_swa: Size of the sliding window in tokens; 0 without one.
        layout: Digest of the byte layout that the start-up probe found.
        whole_because: Why only whole states are kept ("" when that is not so).
    """

    family: Family
    segments: bool
    rolling: bool
    dense: bool = False
    n_swa: int = 0
    layout: bytes = b""
    whole_because: str = ""

    @property
    def max_segment_tokens(self) -> int | None:
        """The longest segment that keeps what it must, or None for any length."""
        return self.n_swa if self.dense else None


class Runtime(Protocol):
    """Sequences of one model's context, and their states as bytes.

    One thread at a time may touch a runtime: its owner. Sequences are numbered from 0; the spare
    sequence that a runtime needs for its own moves is not counted.
    """

    n_ctx: int
    """Tokens that all sequences together have room for."""
    n_batch: int
    """Most tokens evaluated in one native call."""
    n_vocab: int
    n_seqs: int
    traits: Traits
    draft: Runtime | None
    """The context of a draft model that must follow this one, if there is one."""

    def evaluate(self, seq_id: int, tokens: IntArray) -> None:
        """Evaluate `tokens` after those the sequence already holds.

        Raises:
            TokenError: For an id outside the vocabulary; nothing is evaluated.
            ContextOverflow: When the sequence would not fit; nothing is evaluated.
            DecodeError: When the runtime fails; the sequence is cleared.
        """
        ...  # pragma: no cover - protocol

    def logits(self) -> npt.NDArray[np.float32]:
        """Return the logits after the last evaluated token, shape (n_vocab,), a copy."""
        ...  # pragma: no cover - protocol

    def positions(self, seq_id: int) -> Positions:
        """Return the first and last position that the sequence holds."""
        ...  # pragma: no cover - protocol

    def segment_bytes(self, n_tokens: int) -> int:
        """Return the exact size of a segment of `n_tokens`, without reading one."""
        ...  # pragma: no cover - protocol

    def read_segment(self, seq_id: int, start: int, end: int) -> Segment:
        """Read the truncatable bytes of tokens [start, end); the sequence is unchanged.

        Costs time and memory in proportion to end - start.

        Raises:
            InvalidValue: For a range that the sequence does not hold.
            StateError: When what came back is not what was asked for.
        """
        ...  # pragma: no cover - protocol

    def checkpoint_bytes(self, seq_id: int) -> int:
        """Return the exact size of a checkpoint of the sequence as it is now.

        Raises:
            InvalidValue: For an empty sequence, or a family that has no rolling part.
        """
        ...  # pragma: no cover - protocol

    def read_checkpoint(self, seq_id: int) -> Checkpoint:
        """Read the rolling bytes at the sequence's end; the sequence is unchanged.

        Raises:
            InvalidValue: For an empty sequence, or a family that has no rolling part.
            StateError: When what came back is not what was asked for.
        """
        ...  # pragma: no cover - protocol

    def read_device_checkpoint(self, seq_id: int) -> DeviceCheckpoint:
        """Like `read_checkpoint`, with the tensors left on the device.

        Ends the life of the sequence's previous device checkpoint.

        Raises:
            InvalidValue: As `read_checkpoint`; also for whole states and for families with a
                window, which llama.cpp cannot leave on the device.
            StateError: When what came back is not what was asked for.
        """
        ...  # pragma: no cover - protocol

    def restore(
        self,
        seq_id: int,
        n_tokens: int,
        segments: Iterable[Segment],
        checkpoint: Checkpoint | None = None,
    ) -> None:
        """Make the sequence hold exactly the first `n_tokens` of a prompt.

        Args:
            seq_id: The sequence; what it held before is gone.
            n_tokens: Tokens it shall hold.
            segments: In order, together covering [0, n_tokens); each is used up to the start of
                the next one, the last one up to `n_tokens`. A sequence is checked as a whole
                before anything is moved; an iterator is drawn one ahead of what is moved.
            checkpoint: At `n_tokens`, where the family needs one; applied last.

        Raises:
            StateRejected: When a state is not what it should be; found before native code sees it.
                The sequence is unchanged, or empty when the states came from an iterator.
            StateError: What the iterator raises. The sequence is empty.
            RestoreFailed: When the runtime refused, or size or positions were wrong afterwards.
                The sequence is empty.
        """
        ...  # pragma: no cover - protocol

    def can_rewind(self, seq_id: int, n_tokens: int) -> bool:
        """Whether `rewind` to `n_tokens` works without a checkpoint."""
        ...  # pragma: no cover - protocol

    def rewind(
        self,
        seq_id: int,
        n_tokens: int,
        checkpoint: Checkpoint | DeviceCheckpoint | None = None,
    ) -> None:
        """Cut the live sequence back to its first `n_tokens`, in place.

        Raises:
            InvalidValue: When the sequence holds fewer tokens; it is unchanged.
            StateRejected: When the checkpoint is not one of this position, or is stale; the
                sequence is unchanged.
            RestoreFailed: When the runtime refused; the sequence is empty.
        """
        ...  # pragma: no cover - protocol

    def copy(self, src: int, dst: int, n_tokens: int, checkpoint: Checkpoint | None = None) -> None:
        """Make `dst` hold the first `n_tokens` of `src`, which is unchanged.

        Families with a rolling part need the checkpoint at `n_tokens`, unless it is the end of
        `src`.

        Raises:
            InvalidValue: When `src` holds fewer tokens or a checkpoint is missing.
            StateRejected: When the checkpoint is not one of this position; `dst` is unchanged.
            RestoreFailed: When the runtime refused; `dst` is empty.
        """
        ...  # pragma: no cover - protocol

    def clear(self, seq_id: int) -> None:
        """Empty the sequence; its memory is free afterwards."""
        ...  # pragma: no cover - protocol

    def clear_all(self) -> None:
        """Empty every sequence."""
        ...  # pragma: no cover - protocol

    def close(self) -> None:
        """Free what the runtime owns. Calling it again does nothing."""
        ...  # pragma: no cover - protocol
