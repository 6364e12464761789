"""Finding by tokens what is on a Redis server: at most three round trips, however much there is.

1. For each block of the prompt: the segment of all its tokens by name, and at which positions
   something starts or is. Of the first and last blocks also the neighbours of the prompt in the
   list of what starts with the block.
2. At these positions: checkpoints and segments up to the end of the block by name, and neighbours.
   Of listed neighbours of the first round: what their blobs say that they are.
3. The same for the neighbours of the second round.

A block that a single segment covers is not looked into for others. What comes back is bounded: of a
list `2 * NEIGHBOURS` records of a byte for each token and 33 more, and as many headers of blobs
with the block's tokens; of a name 144 bytes; of a block `MAX_MARKS` positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from llamakeep.errors import BlobRejected
from llamakeep.states import Block, Record
from llamakeep.stores import envelope
from llamakeep.stores.redis.index import beside, branch_of, spot_of
from llamakeep.stores.redis.keys import RedisKeys, Spot
from llamakeep.stores.redis.order import around, member, trace
from llamakeep.tokens import state_name

if TYPE_CHECKING:
    from llamakeep.stores.redis.link import Command, RedisLink

NEIGHBOURS = 4
"""Records that are read of a list on either side of the prompt. The nearest would do, but the
server may have dropped it."""
MAX_MARKS = 1024
"""Positions that are read of a block, the first ones."""

_EAGER_FIRST, _EAGER_LAST = 4, 12
"""Blocks whose lists are asked for before it is known whether they are of use: what a prompt has in
memory ends in the first one, and what was kept of it in one of the last, mostly. To ask for all of
a long prompt would cost more than the round trip that it may save."""
_MAX_DIGITS = 19
_BYTES_AT_ONCE = 1 << 13  # of a question and its answer, about: for deadlines

_Step: TypeAlias = "tuple[list[Command], Callable[[list[Any]], None]]"


@dataclass(frozen=True, slots=True)
class Found:
    """A state that is there.

    Attributes:
        record: What it is.
        spot: Where the index has it.
        n_bytes: Its bytes with the header.
    """

    record: Record
    spot: Spot
    n_bytes: int


@dataclass(slots=True)
class Finds:
    """What came of a look-up.

    Attributes:
        found: States that are there.
        gone: Names and spots of listed states that are not there.
        wrong: Names of what is not what it should be, and why.
    """

    found: list[Found] = field(default_factory=list)
    gone: list[tuple[bytes, Spot]] = field(default_factory=list)
    wrong: list[tuple[bytes, BlobRejected]] = field(default_factory=list)


class _Asked:
    """A block of the prompt."""

    __slots__ = ("_trace", "block", "is_eager", "is_there")

    def __init__(self, block: Block, *, is_eager: bool) -> None:
        self.block = block
        self.is_eager = is_eager
        self.is_there = False  # in one segment
        self._trace: bytes | None = None

    def trace_from(self, start: int) -> bytes:
        if self._trace is None:
            self._trace = trace(self.block.tokens)
        return self._trace[start - self.block.origin :]

    def segment(self, start: int) -> bytes:
        """Return the name of the segment from a position as far as the prompt goes."""
        return state_name("segment", self.block.name, start, self.block.tokens)

    def spot(self, start: int, member: bytes = b"") -> Spot:
        branch = branch_of(self.block.tokens, start - self.block.origin)
        return Spot(self.block.name, start, branch, member)


class RedisLookup:
    """One look-up for the blocks of one prompt. Not to be used again.

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
        self._finds = Finds()
        self._listed: list[tuple[_Asked, Spot]] = []
        self._marked: list[tuple[_Asked, str, int]] = []

    def find(self, blocks: Sequence[Block]) -> Finds:
        """Return what the prompt can use: see `Tier.find`.

        One round trip where there is nothing but whole blocks; two where there are checkpoints, or
        what starts with a block and ends in it; three where spans start and end inside blocks, and
        where what ends inside one is far from both ends of a long prompt.

        Raises:
            Unreachable: When the server does not answer.
        """
        blocks = [block for block in blocks if block.tokens.size]
        last = len(blocks) - _EAGER_LAST
        asked = [
            _Asked(block, is_eager=index < _EAGER_FIRST or index >= last)
            for index, block in enumerate(blocks)
        ]
        steps = [self._for_whole(each) for each in asked]
        self._ask(steps + [self._for_marks(each) for each in asked])
        steps = list(self._for_listed())
        for each, kind, position in self._marked:
            if kind == "c":
                steps.append(self._for_checkpoint(each.block, position))
            elif each.is_there:
                continue
            elif position > each.block.origin:
                steps.append(self._for_part(each, position))
            elif not each.is_eager:
                steps.append(self._for_neighbours(each, position))
        self._ask(steps)
        self._ask(list(self._for_listed()))
        return self._finds

    def _ask(self, steps: Sequence[_Step]) -> None:
        commands = [command for asked, _ in steps for command in asked]
        replies = self._link.run(commands, n_bytes=len(commands) * _BYTES_AT_ONCE)
        at = 0
        for asked, take in steps:
            take(replies[at : at + len(asked)])
            at += len(asked)

    # -- by name -----------------------------------------------------------------------------------

    def _for_whole(self, asked: _Asked) -> _Step:
        """Ask for all of a block by name, and, where it may be of use, for what parts with it."""
        if asked.is_eager:
            return self._for_part(asked, asked.block.origin)
        name = asked.segment(asked.block.origin)

        def take(replies: list[Any]) -> None:
            self._take_named(asked, asked.block.origin, name, replies[0])

        return [self._beginning(name)], take

    def _for_part(self, asked: _Asked, start: int) -> _Step:
        """Ask for a block from a position on by name, and for its neighbours in its list."""
        name = asked.segment(start)
        commands, take_neighbours = self._for_neighbours(asked, start, name)

        def take(replies: list[Any]) -> None:
            if not self._take_named(asked, start, name, replies[0]):
                take_neighbours(replies[1:])

        return [self._beginning(name), *commands], take

    def _for_neighbours(self, asked: _Asked, start: int, name: bytes | None = None) -> _Step:
        """Ask for the neighbours of a segment in the list that it would be in."""
        spot = asked.spot(start)
        key = self._keys.listed(spot.block, start, spot.branch)
        before, behind = around(asked.trace_from(start), name or asked.segment(start))
        limit = ("LIMIT", 0, NEIGHBOURS)
        commands: list[Command] = [
            ("ZRANGE", key, before, "-", "BYLEX", "REV", *limit),
            ("ZRANGE", key, behind, "+", "BYLEX", *limit),
        ]

        def take(replies: list[Any]) -> None:
            for reply in replies:
                self._listed += [(asked, replace(spot, member=raw)) for raw in self._texts(reply)]

        return commands, take

    def _take_named(self, asked: _Asked, start: int, name: bytes, reply: Any) -> bool:
        """Note the segment from a position as far as the prompt goes; say whether it is there."""
        head = self._begins(name, reply)
        if head is None:
            return False
        block = asked.block
        asked.is_there |= start == block.origin
        tokens = block.tokens[start - block.origin :]
        record = Record("segment", name, start, tokens, head.payload_bytes, self._tier)
        stands = b""
        if not head.closes:  # else a trace costs more than a record that stays in a list for long
            stands = member(asked.trace_from(start), name, closes=False)
        self._take(record, asked.spot(start, stands), head.header_bytes)
        return True

    def _for_checkpoint(self, block: Block, position: int) -> _Step:
        tokens = block.tokens[: position - block.origin]
        name = state_name("checkpoint", block.name, 0, tokens)

        def take(replies: list[Any]) -> None:
            head = self._begins(name, replies[0])
            if head is None:
                return
            start = head.start
            if (head.block, head.origin) != (block.name, block.origin) or not (
                block.origin <= start < position
            ):
                self._count("rejected_record")
                return
            within = tokens[start - block.origin :]
            record = Record("checkpoint", name, start, within, head.payload_bytes, self._tier)
            self._take(record, Spot(block.name, position, b"", b""), head.header_bytes)

        return [self._beginning(name)], take

    def _beginning(self, name: bytes) -> Command:
        return ("GETRANGE", self._keys.chunk(name, 0), 0, envelope.FIXED_BYTES - 1)

    def _begins(self, name: bytes, reply: Any) -> envelope.Beginning | None:
        """Return what the blob of that name begins with, if it is there."""
        raw = b"" if isinstance(reply, Exception) else self._link.text(reply)
        if not raw:
            return None
        try:
            head = envelope.begins(raw)
            if head.name != name:
                raise BlobRejected("is another blob", reason="name")
        except BlobRejected as error:
            self._finds.wrong.append((name, error))
            return None
        if head.payload_bytes > self._max_blob_bytes:
            self._count("rejected_record")
            return None
        return head

    # -- by position, and in lists -----------------------------------------------------------------

    def _for_marks(self, asked: _Asked) -> _Step:
        """Ask where in a block something starts or is, as far as the prompt goes."""
        block = asked.block
        end = block.origin + int(block.tokens.size)
        limit = ("LIMIT", 0, MAX_MARKS)

        def take(replies: list[Any]) -> None:
            (reply,) = replies
            for mark in self._texts(reply):
                kind, digits = mark[:1].decode("latin-1"), mark[1:]
                if kind not in "sc" or not digits.isdigit() or len(digits) > _MAX_DIGITS:
                    self._count("rejected_record")
                elif block.origin <= (position := int(digits)) - (kind == "c") < end:
                    self._marked.append((asked, kind, position))

        key = self._keys.marks(block.name)
        command = ("ZRANGE", key, block.origin, end, "BYSCORE", *limit)
        return [command], take

    def _for_listed(self) -> Iterator[_Step]:
        """Ask what is listed: the headers of these blobs, with their tokens."""
        listed, self._listed = self._listed, []
        for asked, spot in listed:
            it = beside(spot, spot.member)
            if it is None:
                self._count("rejected_record")
                continue
            n_tokens = spot.position - asked.block.origin + it.n_tokens
            last = envelope.MIN_HEADER_BYTES + 4 * n_tokens - 1
            take = partial(self._take_listed, asked.block, it.name, it.spot)
            yield [("GETRANGE", self._keys.chunk(it.name, 0), 0, last)], take

    def _take_listed(self, block: Block, name: bytes, spot: Spot, replies: list[Any]) -> None:
        (reply,) = replies
        if isinstance(reply, Exception):
            return
        raw = self._link.text(reply)
        if not raw:
            self._finds.gone.append((name, spot))
            return
        try:
            head = envelope.parse(raw)
        except BlobRejected:
            head = None  # or the record is wrong: who reads the blob by its name will see
        place = head.place if head is not None else None
        if head is None or place is None or head.name != name or spot_of(place) != spot:
            self._count("rejected_record")
            return
        record = block.offer(name, place, head.payload_bytes, self._tier)
        if record is None or record.n_bytes > self._max_blob_bytes:
            self._count("rejected_record")
            return
        self._take(record, spot, head.header_bytes)

    def _texts(self, reply: Any) -> list[bytes]:
        if isinstance(reply, Exception):
            return []
        return [self._link.text(one) for one in self._link.rows(reply)]

    def _take(self, record: Record, spot: Spot, header_bytes: int) -> None:
        self._finds.found.append(Found(record, spot, header_bytes + record.n_bytes))
