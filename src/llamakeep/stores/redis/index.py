"""Finding by tokens what is on a Redis server.

For each block there is a set of where spans start in it, and for each such start and token a hash
of what begins there like that. So a look-up asks for what begins like the prompt, and never sees
the thousands of conversations that branch off elsewhere. Sets and hashes only gain or lose whole
members: writers who do not know of each other add up, without a lock or a script.

The index is no proof of anything. Whoever can write to the server can put records into it; but a
name is recomputed from tokens by whoever uses it, and the seal covers name, place and bytes. A
forged record leads to a blob that is not there, or is not what it should be: a miss.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from llamakeep.states import Block, Record
from llamakeep.stores import envelope
from llamakeep.stores.redis.keys import RedisKeys, Spot
from llamakeep.tokens import NAME_BYTES, Kind, Place

if TYPE_CHECKING:
    from llamakeep.stores.redis.link import Command, RedisLink

MAX_LISTED = 1024
"""Records that are read of one spot, and starts of one block. More than that nobody writes."""

_RECORD = struct.Struct("<BBHQQI")  # version, kind, zero, start, bytes, number of tokens; tokens
_VERSION = 1
_KINDS: tuple[Kind, ...] = ("segment", "checkpoint")
_MAX_SPAN_TOKENS = 1 << 20


class RedisIndex:
    """What begins where. From any thread.

    Args:
        link: To the server.
        keys: Of the prefix.
        count: Called with the kind of each thing that happened, for counters.
        max_blob_bytes: What claims to be larger is not believed.
        tier: What the records say they are from.
    """

    def __init__(
        self,
        link: RedisLink,
        keys: RedisKeys,
        count: Callable[[str], None],
        *,
        max_blob_bytes: int,
        tier: str,
    ) -> None:
        self._link = link
        self._keys = keys
        self._count = count
        self._max_blob_bytes = max_blob_bytes
        self._tier = tier

    def find(self, blocks: Sequence[Block]) -> list[tuple[Record, Spot, int]]:
        """Return what begins like the prompt, its spot, and its bytes with the header.

        One round trip, and another when spans start elsewhere than their blocks.

        Raises:
            Unreachable: When the server does not answer.
        """
        asked = [block for block in blocks if block.tokens.size]
        # Most spans start where their block does: ask for these before that is known.
        first = [(block, Spot(block.name, block.origin, int(block.tokens[0]))) for block in asked]
        replies = self._link.run(
            [self._listing(spot) for _, spot in first]
            + [("SRANDMEMBER", self._keys.starts(block.name), MAX_LISTED) for block in asked],
            n_bytes=len(asked) << 16,
        )
        found = self._records(zip(first, replies[: len(first)], strict=True))
        inside = [
            (block, Spot(block.name, start, int(block.tokens[start - block.origin])))
            for block, starts in zip(asked, replies[len(first) :], strict=True)
            for start in self._starts(block, starts)
        ]
        replies = self._link.run(
            [self._listing(spot) for _, spot in inside], n_bytes=len(inside) << 14
        )
        return found + self._records(zip(inside, replies, strict=True))

    def entering(self, name: bytes, place: Place, n_bytes: int, expires_ms: int) -> list[Command]:
        """Return the commands that make a state findable until a time of the server's clock."""
        spot = spot_of(place)
        span = place.tokens[place.start - place.origin :].astype("<i4", copy=False)
        record = _RECORD.pack(
            _VERSION, _KINDS.index(place.kind), 0, place.start, n_bytes, span.size
        )
        return [
            ("HSET", self._keys.records(spot), name, record + span.tobytes()),
            ("SADD", self._keys.starts(spot.block), spot.start),
            *(("PEXPIREAT", key, expires_ms) for key in self.keys_of(spot)),
        ]

    def leaving(self, name: bytes, spot: Spot) -> Command:
        """Return the command that takes a record out."""
        return ("HDEL", self._keys.records(spot), name)

    def sampling(self, spot: Spot) -> Command:
        """Return the command that names a few of a spot, by chance."""
        return ("HRANDFIELD", self._keys.records(spot), 4)

    def keys_of(self, spot: Spot) -> tuple[str, str]:
        """Return the keys that have to live on for what is at a spot to be found."""
        return self._keys.records(spot), self._keys.starts(spot.block)

    def _listing(self, spot: Spot) -> Command:
        # The whole hash up to that many members, and never more, whoever filled it.
        return ("HRANDFIELD", self._keys.records(spot), MAX_LISTED, "WITHVALUES")

    def _starts(self, block: Block, reply: Any) -> list[int]:
        """Return where else in a block spans start, as far as the prompt goes."""
        starts = []
        for raw in () if isinstance(reply, Exception) else self._link.rows(reply):
            if not self._link.text(raw).isdigit() or len(raw) > 19:
                self._count("rejected_record")
            elif block.origin < int(raw) < block.origin + block.tokens.size:
                starts.append(int(raw))
        return sorted(starts)

    def _records(
        self, listings: Iterable[tuple[tuple[Block, Spot], Any]]
    ) -> list[tuple[Record, Spot, int]]:
        found = []
        for (block, spot), reply in listings:
            for name, raw in self._pairs(reply):
                record = self._record(spot, name, raw)
                if record is None:
                    self._count("rejected_record")
                    continue
                n_header = envelope.MIN_HEADER_BYTES + 4 * (record.end - block.origin)
                found.append((record, spot, n_header + record.n_bytes))
        return found

    def _pairs(self, reply: Any) -> list[tuple[bytes, bytes]]:
        """Return the members and values of a hash, from either version of the protocol."""
        if isinstance(reply, Exception):
            return []
        rows = self._link.rows(reply)
        if rows and isinstance(rows[0], (list, tuple)):
            rows = [part for pair in rows for part in self._link.rows(pair)]
        parts = [self._link.text(part) for part in rows]
        return list(zip(parts[::2], parts[1::2], strict=False))

    def _record(self, spot: Spot, name: bytes, raw: bytes) -> Record | None:
        """Return the record that some bytes are, or None where they make no sense."""
        if len(name) != NAME_BYTES or len(raw) < _RECORD.size:
            return None
        version, kind, _, start, n_bytes, n_tokens = _RECORD.unpack_from(raw)
        if version != _VERSION or kind >= len(_KINDS) or start != spot.start:
            return None
        if not 0 < n_tokens <= _MAX_SPAN_TOKENS or len(raw) != _RECORD.size + 4 * n_tokens:
            return None
        tokens = np.frombuffer(raw, "<i4", n_tokens, _RECORD.size).astype(np.int32, copy=False)
        if tokens[0] != spot.first or tokens.min() < 0 or n_bytes > self._max_blob_bytes:
            return None
        return Record(_KINDS[kind], name, start, tokens, n_bytes, self._tier)


def spot_of(place: Place) -> Spot:
    """Return where the index has the record of a state at `place`."""
    return Spot(place.block, place.start, place.first)
