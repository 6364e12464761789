"""One checkpoint: what its owner sees, what it was when it was saved, its prefix's hash."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

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
    """A checkpoint as it was saved, whatever is done to the object that its owner holds.

    `whole_bytes` is the size of the sequence's whole state then: after a restore it must be that
    again, or rows are missing.
    """

    checkpoint: HybridCheckpoint
    pos: int
    data: bytes
    hash_val: str
    size: int
    seq_id: int
    pos_min: int
    pos_max: int
    whole_bytes: int
    device_write: int  # 0 in host mode

    @property
    def on_device(self) -> bool:
        """Whether its tensors lie in the context's own buffers."""
        return self.device_write > 0

    @property
    def is_unchanged(self) -> bool:
        """Whether the object still says what was saved. Bytes cannot change: the same are equal."""
        now = self.checkpoint
        return now.data is self.data and (
            (now.pos, now.hash_val, now.size, now.seq_id, now.pos_min, now.pos_max)
            == (self.pos, self.hash_val, self.size, self.seq_id, self.pos_min, self.pos_max)
        )


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
