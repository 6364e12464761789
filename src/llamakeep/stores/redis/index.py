"""What makes states on a Redis server findable by tokens: see `lookup` for finding them.

The name of a state follows from the tokens up to its end, so whoever has a prompt needs to be told
only where spans start and end. Of each block there is a set of the positions where segments start
and where checkpoints are: twice as many at most as it has tokens. A segment that goes on to the
end of its block, and each checkpoint, is then asked for by name.

What a name does not find are segments that end elsewhere, and those that a prompt parts with on
the way. They are in a list, one for all that start behind the same tokens and with the same one. It
is ordered so that what agrees with a prompt furthest is beside it (see `order`), and no more than a
few neighbours of it are read, whatever else is listed. Lists follow what is kept: whoever writes
looks at a few by chance, takes out what is gone, and, where a list is too long, what names find and
what was used least recently.

Sets and lists only gain or lose whole members: writers who do not know of each other add up,
without a lock or a script.

The index is no proof of anything. Whoever can write to the server can put records into it; but a
name is recomputed from tokens by whoever uses it, and the seal covers name, place and bytes. A
forged record leads to a blob that is not there, or is not what it should be: a miss.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from blake3 import blake3

from llamakeep.stores.redis.keys import RedisKeys, Spot
from llamakeep.stores.redis.order import member, parsed, trace
from llamakeep.tokens import IntArray, Place

if TYPE_CHECKING:
    from llamakeep.stores.redis.link import Command

MAX_RECORDS = 1 << 16
"""Records of a list; of more, some go with each that comes."""
SAMPLED = 8
"""Records of a list that a writer looks at."""

_BRANCH_BYTES = 16


class Listed(NamedTuple):
    """What a record of a list says.

    Attributes:
        name: Of a segment.
        spot: Where the index has it.
        n_tokens: Of its span.
        closes: Its block ends with it: a name finds it too.
    """

    name: bytes
    spot: Spot
    n_tokens: int
    closes: bool


class RedisIndex:
    """The commands that enter states, and take them out. From any thread.

    Args:
        keys: Of the prefix.
    """

    def __init__(self, keys: RedisKeys) -> None:
        self._keys = keys

    def entering(self, spot: Spot, expires_ms: int) -> list[Command]:
        """Return the commands that make a state findable until a time of the server's clock."""
        commands: list[Command] = []
        if spot.branch:
            commands.append(("ZADD", self._list(spot), 0, spot.member))
        mark = f"{'s' if spot.branch else 'c'}{spot.position}"
        commands.append(("ZADD", self._keys.marks(spot.block), spot.position, mark))
        return commands + [("PEXPIREAT", key, expires_ms) for key in self.keys_of(spot)]

    def leaving(self, spot: Spot) -> list[Command]:
        """Return the commands that take a record out of its list, if it is in one."""
        return [("ZREM", self._list(spot), spot.member)] if spot.member else []

    def measuring(self, spot: Spot) -> list[Command]:
        """Return the command that says how long the list of a spot is, if it is in one."""
        return [("ZCARD", self._list(spot))] if spot.branch else []

    def sampling(self, spot: Spot) -> list[Command]:
        """Return the command that names some records of a list by chance, if it is in one."""
        return [("ZRANDMEMBER", self._list(spot), SAMPLED)] if spot.branch else []

    def keys_of(self, spot: Spot) -> tuple[str, ...]:
        """Return the keys that have to live on for what is at a spot to be found."""
        listed = (self._list(spot),) if spot.branch else ()
        return (*listed, self._keys.marks(spot.block))

    def _list(self, spot: Spot) -> str:
        return self._keys.listed(spot.block, spot.position, spot.branch)


def spot_of(place: Place) -> Spot:
    """Return where the index has the state at `place`. Costs hashes of its block's tokens."""
    if place.kind == "checkpoint":
        return Spot(place.block, place.end, b"", b"")
    offset = place.start - place.origin
    span = trace(place.tokens)[offset:]
    return Spot(
        place.block,
        place.start,
        branch_of(place.tokens, offset),
        member(span, place.name, closes=place.closes),
    )


def branch_of(tokens: IntArray, offset: int) -> bytes:
    """Return the digest of a block's tokens up to the one at `offset`, and of that."""
    head = tokens[: offset + 1].astype("<i4", copy=False)
    return blake3(head.tobytes()).digest(_BRANCH_BYTES)


def beside(spot: Spot, raw: bytes) -> Listed | None:
    """Return what another record of a spot's list says, or None for what is no record."""
    record = parsed(raw)
    if record is None:
        return None
    n_tokens, name, closes = record
    return Listed(name, replace(spot, member=raw), n_tokens, closes)
