"""Frozen values that travel between the tree, the stores and the runtime."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from llamakeep.tokens import IntArray, Kind, Place

Buffer: TypeAlias = npt.NDArray[np.uint8]
"""The bytes of a kept state: one-dimensional, read-only, shared and never copied."""


class Blob(Protocol):
    """What a store in memory can keep: anything that says how large it is."""

    @property
    def nbytes(self) -> int:
        """What it counts for."""
        ...  # pragma: no cover - protocol


def frozen(data: Buffer) -> Buffer:
    """Return `data` made read-only, so that no holder can change what others hold."""
    data.flags.writeable = False
    return data


@dataclass(frozen=True, slots=True)
class Segment:
    """The truncatable bytes of tokens [start, end) of a sequence."""

    start: int
    end: int
    data: Buffer = field(repr=False)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The rolling bytes of a sequence after exactly `position` tokens.

    A runtime in whole-state mode puts the whole state in here, not only its rolling part.
    """

    position: int
    data: Buffer = field(repr=False)


@dataclass(frozen=True, slots=True)
class DeviceCheckpoint:
    """A checkpoint whose tensors stay in buffers that the llama.cpp context owns.

    Only the newest one of a sequence is alive: the next one overwrites its tensors. `context` and
    `generation` let the runtime refuse a stale one before native code would abort.
    """

    position: int
    data: Buffer = field(repr=False)
    seq_id: int
    context: int
    generation: int
    device_bytes: int


@dataclass(frozen=True, slots=True)
class Positions:
    """The first and last position a sequence holds, as llama.cpp reports them; -1 when empty."""

    pos_min: int
    pos_max: int

    @property
    def n_tokens(self) -> int:
        """Tokens evaluated into the sequence."""
        return self.pos_max + 1


@dataclass(frozen=True, slots=True)
class SegmentRef:
    """Where the tree keeps a segment: its name, its span and its size."""

    name: bytes = field(repr=False)
    start: int
    end: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class CheckpointRef:
    """Where the tree keeps a checkpoint: its name, its position and its size."""

    name: bytes = field(repr=False)
    position: int
    n_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A block of a prompt, to ask a tier what it has there.

    Attributes:
        name: Of the block, see `PathNames`.
        origin: Where it starts.
        tokens: The prompt's tokens from there on, at most a block of them.
    """

    name: bytes
    origin: int
    tokens: IntArray

    def offer(self, name: bytes, place: Place, n_bytes: int, tier: str) -> Record | None:
        """Return the record of a state at `place`, if its span begins like the prompt here."""
        offset = place.start - place.origin
        if (place.block, place.origin) != (self.name, self.origin) or offset >= self.tokens.size:
            return None
        if int(self.tokens[offset]) != place.first:
            return None
        return Record(place.kind, name, place.start, place.tokens[offset:], n_bytes, tier)


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """What a tier says it has: a state whose span begins like the prompt's tokens there.

    It need not go on like the prompt; `name` proves which tokens it is of.

    Attributes:
        kind: `segment` or `checkpoint`.
        name: The state's name.
        start: Where its span starts.
        tokens: Tokens [start, end) of the span; a checkpoint is at the end.
        n_bytes: Size of the state.
        tier: Which tier has it.
    """

    kind: Kind
    name: bytes
    start: int
    tokens: IntArray
    n_bytes: int
    tier: str

    @property
    def end(self) -> int:
        """Absolute position of the end."""
        return self.start + int(self.tokens.size)


@dataclass(frozen=True, slots=True)
class Match:
    """The deepest restorable position of a prompt, and what restores it.

    Attributes:
        n_tokens: Tokens that can be reused; 0 for none.
        shared_tokens: Tokens that the tree shares with the prompt, restorable or not.
        segments: In order; each is used up to the start of the next, the last up to `n_tokens`.
        checkpoint: Applied last; None in families that need none.
    """

    n_tokens: int
    shared_tokens: int
    segments: tuple[SegmentRef, ...] = ()
    checkpoint: CheckpointRef | None = None


@dataclass(frozen=True, slots=True)
class Saved:
    """What one save did.

    Attributes:
        n_tokens: The tree holds segments up to here (of those asked for).
        read_bytes: Bytes read for spans that the tree lacked.
        reread_bytes: Of these, bytes of tokens that a shorter tail already had.
        refused: Why the rest was not stored, or "".
    """

    n_tokens: int
    read_bytes: int = 0
    reread_bytes: int = 0
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Reuse:
    """How one request was served.

    Attributes:
        reused_tokens: Prompt tokens that were not evaluated.
        evaluated_tokens: Prompt tokens that were.
        tier: Where the reused ones came from: `live`, `ram`, `disk`, `shared` or `none`.
        reason: Why the rest had to be evaluated.
        restore_ms: Milliseconds spent finding and restoring.
        shared_tokens: Leading tokens of the prompt that something live or kept has, whether it
            could be gone on from there or not.
    """

    reused_tokens: int
    evaluated_tokens: int
    tier: str
    reason: str
    restore_ms: float = 0.0
    shared_tokens: int = 0
