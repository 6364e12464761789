"""One checkpoint: what its owner sees, what it was when it was saved, its prefix's hash."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, cast

from llamakeep.tokens import IntArray

_HASH_LETTERS: Final = 32


@dataclass
class HybridCheckpoint:
    """One checkpoint of a sequence. Made by `HybridCheckpointCache.save_checkpoint`.

    It is good for the cache that made it, as long as that lists it and nobody changed it.

    Attributes:
        pos: Tokens that were evaluated when it was taken.
        data: What llama.cpp wrote. In device mode without the tensors, which stay in the context.
        hash_val: The first 32 hex digits of the SHA-256 of those tokens, or "empty".
        size: Bytes of `data`.
        seq_id: The sequence.
        pos_min: The first position that the sequence held in memory. Positions are not token
            counts: a picture's differ.
        pos_max: The last one; None only in checkpoints that were made by hand.
    """

    pos: int
    data: bytes
    hash_val: str
    size: int
    seq_id: int
    pos_min: int = -1
    pos_max: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Saved:
    """A checkpoint that a cache saved, and what it was then, whatever its owner does to it.

    `whole_bytes` is the size of the sequence's whole state then: after a restore it must be that
    again, or rows are missing.
    """

    checkpoint: HybridCheckpoint
    copy: HybridCheckpoint
    whole_bytes: int
    device_write: object | None  # see `ContextTracking`; None in host mode

    @property
    def seq_id(self) -> int:
        """The sequence that it is of."""
        return self.copy.seq_id

    @property
    def pos_max(self) -> int:
        """The last position that it covers."""
        return cast("int", self.copy.pos_max)

    @property
    def is_unchanged(self) -> bool:
        """Whether the object still says what was saved. Bytes cannot change: the same are equal."""
        return self.checkpoint.data is self.copy.data and self.checkpoint == self.copy


def prefix_hashes(tokens: IntArray, lengths: Iterable[int]) -> dict[int, str]:
    """Return the hash of each leading part of `tokens`, in one pass over them."""
    hashes: dict[int, str] = {}
    running, done = hashlib.sha256(), 0
    for length in sorted(set(lengths)):
        if length <= 0:
            hashes[length] = "empty"
            continue
        running.update(tokens[done:length].data)
        done = length
        hashes[length] = running.copy().hexdigest()[:_HASH_LETTERS]
    return hashes
