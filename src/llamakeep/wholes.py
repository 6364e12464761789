"""The whole state of a sequence: read in one piece, restored in one piece or up to a position."""

from __future__ import annotations

from dataclasses import dataclass

from llamakeep.runtime.base import Runtime, Traits
from llamakeep.states import Checkpoint, Segment


@dataclass(frozen=True, slots=True)
class Whole:
    """All that a sequence held after `n_tokens`.

    Attributes:
        n_tokens: Its tokens.
        segments: Its truncatable part; empty in families that have none.
        checkpoint: Its rolling part at the end; None in families that have none.
    """

    n_tokens: int
    segments: tuple[Segment, ...]
    checkpoint: Checkpoint | None

    @property
    def n_bytes(self) -> int:
        """What it occupies."""
        rolling = self.checkpoint.data.nbytes if self.checkpoint is not None else 0
        return sum(segment.data.nbytes for segment in self.segments) + rolling

    def segments_to(self, n_tokens: int) -> tuple[Segment, ...]:
        """Return the segments that hold the first `n_tokens`."""
        return tuple(segment for segment in self.segments if segment.start < n_tokens)


def _spans(traits: Traits, n_tokens: int) -> list[tuple[int, int]]:
    """Return how the truncatable part is cut: in one piece, unless window rows lie in it."""
    if not traits.segments:
        return []
    step = traits.max_segment_tokens or n_tokens
    return [(start, min(start + step, n_tokens)) for start in range(0, n_tokens, step)]


def whole_bytes(runtime: Runtime, seq_id: int, n_tokens: int) -> int:
    """Return the exact size of the state of a sequence that holds `n_tokens`, reading nothing."""
    spans = _spans(runtime.traits, n_tokens)
    rolling = runtime.checkpoint_bytes(seq_id) if runtime.traits.rolling else 0
    return sum(runtime.segment_bytes(end - start) for start, end in spans) + rolling


def read_whole(runtime: Runtime, seq_id: int, n_tokens: int) -> Whole:
    """Read the state of a sequence that holds `n_tokens`; it is unchanged.

    Raises:
        StateError: When what came back is not what was asked for.
        MemoryError: When there is no memory for it.
    """
    segments = tuple(
        runtime.read_segment(seq_id, start, end) for start, end in _spans(runtime.traits, n_tokens)
    )
    checkpoint = runtime.read_checkpoint(seq_id) if runtime.traits.rolling else None
    return Whole(n_tokens, segments, checkpoint)
