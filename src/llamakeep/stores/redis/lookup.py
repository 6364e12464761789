"""Finding by tokens what is on a Redis server: at most three round trips, however much there is.

1. For each block of the prompt: the segment of all its tokens by name, the neighbours of the prompt
   in the list of what starts with the block, and at which positions else something starts or is.
2. At these positions: checkpoints and segments up to the end of the block by name, and neighbours.
   Of listed neighbours of the first round: what their blobs say that they are.
3. The same for the neighbours of the second round.

A block that a single segment covers is not looked into for others. What comes back is bounded: of a
list `2 * NEIGHBOURS` records of a byte for each token and 33 more, and as many headers of blobs
with the block's tokens; of a name 144 bytes; of a block `MAX_MARKS` positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
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


class _Span:
    """The segment from a position as far as a prompt goes in its block."""

    __slots__ = ("block", "branch", "is_there", "name", "start", "trace")

    def __init__(self, block: Block, start: int, block_trace: bytes) -> None:
        offset = start - block.origin
        self.block = block
        self.start = start
        self.trace = block_trace[offset:]
        self.name = state_name("segment", block.name, start, block.tokens)
        self.branch = branch_of(block.tokens, offset)
        self.is_there = False

    def spot(self, raw: bytes) -> Spot:
        """Return the spot of a record of the list that it would be in."""
        is_marked = self.start > self.block.origin
        return Spot(self.block.name, self.start, self.branch, raw, is_marked)


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
        self._listed: list[tuple[_Span, bytes]] = []
        self._marked: list[tuple[Block, str, int]] = []

    def find(self, blocks: Sequence[Block]) -> Finds:
        """Return what the prompt can use: see `Tier.find`.

        One round trip where the index names nothing but whole blocks; two where it names
        checkpoints, or what starts with blocks and ends in them; three where spans start inside
        blocks and end there.

        Raises:
            Unreachable: When the server does not answer.
        """
        traces = {block.name: trace(block.tokens) for block in blocks if block.tokens.size}
        blocks = [block for block in blocks if block.tokens.size]
        whole = {block.name: _Span(block, block.origin, traces[block.name]) for block in blocks}
        steps = [self._for_span(span) for span in whole.values()]
        self._ask(steps + [self._for_marks(block) for block in blocks])
        parted = {name for name, span in whole.items() if not span.is_there}
        steps = list(self._for_listed())
        for block, kind, position in self._marked:
            if kind == "c":
                steps.append(self._for_checkpoint(block, position))
            elif block.name in parted:
                steps.append(self._for_span(_Span(block, position, traces[block.name])))
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

    def _for_span(self, span: _Span) -> _Step:
        """Ask for a segment by name, and for its neighbours in its list."""
        key = self._keys.listed(span.block.name, span.start, span.branch)
        before, behind = around(span.trace, span.name)
        limit = ("LIMIT", 0, NEIGHBOURS)
        commands: list[Command] = [
            self._beginning(span.name),
            ("ZRANGE", key, before, "-", "BYLEX", "REV", *limit),
            ("ZRANGE", key, behind, "+", "BYLEX", *limit),
        ]

        def take(replies: list[Any]) -> None:
            head = self._begins(span.name, replies[0])
            if head is not None:
                span.is_there = True
                tokens = span.block.tokens[span.start - span.block.origin :]
                record = Record(
                    "segment", span.name, span.start, tokens, head.payload_bytes, self._tier
                )
                spot = span.spot(member(span.trace, span.name, closes=head.closes))
                self._take(record, spot, head.header_bytes)
                return
            for reply in replies[1:]:
                self._listed += [(span, raw) for raw in self._texts(reply)]

        return commands, take

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
            self._take(record, Spot(block.name, position, b"", b"", True), head.header_bytes)

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

    def _for_marks(self, block: Block) -> _Step:
        """Ask where in a block something starts or is, as far as the prompt goes."""
        end = block.origin + int(block.tokens.size)
        limit = ("LIMIT", 0, MAX_MARKS)

        def take(replies: list[Any]) -> None:
            (reply,) = replies
            for mark in self._texts(reply):
                kind, digits = mark[:1].decode("latin-1"), mark[1:]
                if kind not in "sc" or not digits.isdigit() or len(digits) > _MAX_DIGITS:
                    self._count("rejected_record")
                elif block.origin < (position := int(digits)) < end + (kind == "c"):
                    self._marked.append((block, kind, position))

        key = self._keys.marks(block.name)
        command = ("ZRANGE", key, f"({block.origin}", end, "BYSCORE", *limit)
        return [command], take

    def _for_listed(self) -> Iterator[_Step]:
        """Ask what is listed: the headers of these blobs, with their tokens."""
        listed, self._listed = self._listed, []
        for span, raw in listed:
            it = beside(span.spot(raw), raw)
            if it is None:
                self._count("rejected_record")
                continue
            n_tokens = span.start - span.block.origin + it.n_tokens
            last = envelope.MIN_HEADER_BYTES + 4 * n_tokens - 1
            take = partial(self._take_listed, span.block, it.name, it.spot)
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
