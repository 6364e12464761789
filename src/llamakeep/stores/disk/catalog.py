"""What a directory of states holds, as people see it: prompts, not blobs.

Everything here reads the whole index. It is for the command line, not for the path of a request.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import numpy as np

from llamakeep.errors import InvalidValue
from llamakeep.stores.disk import rows
from llamakeep.stores.disk.rows import CHECKPOINT, OPAQUE, SEGMENT, SNAPSHOT, Row
from llamakeep.tokens import IntArray, block_name

_NO_TOKENS: IntArray = np.empty(0, np.int32)
_NO_TOKENS.flags.writeable = False


@dataclass(frozen=True, slots=True, eq=False)
class DiskEntry:
    """A prompt that is known to its end.

    Attributes:
        id: Hex name of its last segment, or of its last checkpoint where there are no segments.
        namespace: Hex digest of its namespace.
        n_tokens: Its length.
        tokens: Its tokens, from `tokens_from` on.
        tokens_from: 0, unless nothing is kept that ends where one of its blocks does: of what was
            before that, only the digest is known.
        path_bytes: What the states along it occupy, also those that it shares with others.
        own_bytes: What of that would go with it.
        checkpoints: Positions of the checkpoints along it, ascending.
        hits: How often its end was used.
        created: When its end was written, in seconds.
        last_used: When its end was last used.
    """

    id: str
    namespace: str
    n_tokens: int
    tokens: IntArray = field(repr=False)
    tokens_from: int
    path_bytes: int
    own_bytes: int
    checkpoints: tuple[int, ...]
    hits: int
    created: float
    last_used: float


@dataclass(frozen=True, slots=True)
class DiskStats:
    """What a directory of states holds.

    Attributes:
        used_bytes: What counts against the limit.
        capacity_bytes: The limit.
        free_bytes: Room that is left on the file system.
        writing_bytes: What of the used bytes is being written now.
        n_blobs: How many states there are.
        n_segments: How many of them are segments.
        n_checkpoints: How many are checkpoints.
        n_snapshots: How many are whole states of a prompt.
        n_opaque: How many have no place.
        namespaces: Bytes by hex digest of the namespace.
    """

    used_bytes: int
    capacity_bytes: int
    free_bytes: int
    writing_bytes: int
    n_blobs: int
    n_segments: int
    n_checkpoints: int
    n_snapshots: int
    n_opaque: int
    namespaces: dict[str, int]


def stats(sql: sqlite3.Connection, capacity_bytes: int, free_bytes: int) -> DiskStats:
    """Return what is there. Costs a scan of the index."""
    kinds = [0] * len(rows.KINDS)
    namespaces: dict[str, int] = {}
    for namespace, kind, n, n_bytes in sql.execute(
        "SELECT namespace, kind, count(*), sum(file_bytes) FROM states GROUP BY namespace, kind"
    ):
        kinds[kind] += n
        if namespace is not None:
            namespaces[namespace.hex()] = namespaces.get(namespace.hex(), 0) + n_bytes
    totals = rows.totals(sql)
    return DiskStats(
        used_bytes=totals.used_bytes,
        capacity_bytes=capacity_bytes,
        free_bytes=free_bytes,
        writing_bytes=totals.writing_bytes,
        n_blobs=totals.n_states,
        n_segments=kinds[SEGMENT],
        n_checkpoints=kinds[CHECKPOINT],
        n_snapshots=kinds[SNAPSHOT],
        n_opaque=kinds[OPAQUE],
        namespaces=namespaces,
    )


class _Node:
    """A segment, a snapshot, or a checkpoint that lies in no segment, and what hangs off it.

    Attributes:
        row: Its row.
        above: What it hangs off.
        below: What hangs off it.
        marks: The checkpoints that lie in it, by position.
        n_ends: How many prompts end at it or below.
        above_bytes: What the states before it occupy, on the way to it.
    """

    __slots__ = ("above", "above_bytes", "below", "marks", "n_ends", "row")

    def __init__(self, row: Row) -> None:
        self.row = row
        self.above: _Node | None = None
        self.below: list[_Node] = []
        self.marks: list[Row] = []
        self.n_ends = 0
        self.above_bytes = 0

    @property
    def leaves_at(self) -> int:
        """Where the last of what hangs off it begins; its start when nothing does."""
        return max((node.row.start for node in self.below), default=self.row.start)

    @property
    def is_end(self) -> bool:
        """Whether a prompt ends here: nothing goes on from its end."""
        if self.row.kind == CHECKPOINT:
            return not self.below
        return all(node.row.start < self.row.stop for node in self.below)

    def bytes_upto(self, position: int) -> int:
        """Return what it and its checkpoints up to a position occupy."""
        return self.row.n_bytes + sum(mark.n_bytes for mark in self.marks_upto(position))

    def marks_upto(self, position: int) -> list[Row]:
        """Return the checkpoints that a prompt shares which leaves it there."""
        return [mark for mark in self.marks if mark.stop <= position]

    def own_rows(self) -> list[Row]:
        """Return what goes with the prompt that ends here, of itself."""
        if not self.below:
            return [*self.marks[::-1], self.row]
        return [mark for mark in self.marks[::-1] if mark.stop > self.leaves_at]


class Catalog:
    """The prompts in an index, at one moment. Costs a scan of it, and memory for all rows."""

    def __init__(self, sql: sqlite3.Connection) -> None:
        self._sql = sql
        self._nodes: dict[bytes, _Node] = {}
        checkpoints = []
        for row in rows.placed(sql):
            if row.kind != CHECKPOINT:
                self._nodes[row.name] = _Node(row)
            else:
                checkpoints.append(row)
        closers: dict[bytes, _Node] = {}
        for node in self._nodes.values():
            if node.row.next_block is not None:
                closers.setdefault(node.row.next_block, node)
        alone = []
        for row in checkpoints:
            lies_in = self._nodes.get(row.parent) if row.parent is not None else None
            if lies_in is None:
                alone.append(row)
            else:
                lies_in.marks.append(row)
        for node in self._nodes.values():
            row = node.row
            if row.parent is not None:
                self._hang(node, self._nodes.get(row.parent))
            elif row.at_origin and row.block is not None:
                self._hang(node, closers.get(row.block))
            node.marks.sort(key=lambda mark: mark.stop)
        self._chain(alone)
        self._add_up()

    def _hang(self, node: _Node, above: _Node | None) -> None:
        if above is not None:
            node.above = above
            above.below.append(node)

    def _chain(self, alone: Iterable[Row]) -> None:
        """Hang checkpoints that lie in no segment off each other, as far as tokens are known."""
        blocks: dict[bytes | None, list[tuple[_Node, bytes]]] = defaultdict(list)
        closers: dict[bytes, _Node] = {}
        for row in sorted(alone, key=lambda row: row.stop):
            tokens = rows.tokens_of(self._sql, row.name)
            node = self._nodes[row.name] = _Node(row)
            before = [other for other, begin in blocks[row.block] if tokens.startswith(begin)]
            above = before[-1] if before else closers.get(row.block or b"")
            self._hang(node, above)
            blocks[row.block].append((node, tokens))
            if row.block is not None:
                closers.setdefault(block_name(row.block, np.frombuffer(tokens, "<i4")), node)

    def _add_up(self) -> None:
        # A segment begins after the one that it hangs off, a checkpoint is after its like.
        ordered = sorted(
            self._nodes.values(),
            key=lambda node: node.row.start if node.row.kind == SEGMENT else node.row.stop,
        )
        for node in ordered:
            if node.above is not None:
                above = node.above
                upto = node.row.start if node.row.kind == SEGMENT else above.row.stop
                node.above_bytes = above.above_bytes + above.bytes_upto(upto)
        for node in reversed(ordered):
            node.n_ends += node.is_end
            if node.above is not None:
                node.above.n_ends += node.n_ends

    # -- entries -----------------------------------------------------------------------------------

    def ends(self) -> dict[str, _Node]:
        """Return the prompts, by id."""
        return {name.hex(): node for name, node in self._nodes.items() if node.is_end}

    def entries(self) -> list[DiskEntry]:
        """Return the prompts, the last used first."""
        found = [self._entry(node) for node in self.ends().values()]
        return sorted(found, key=lambda entry: (-entry.last_used, entry.id))

    def _entry(self, end: _Node) -> DiskEntry:
        row = end.row
        path = self.path(end)
        tokens, tokens_from = self._tokens(end)
        return DiskEntry(
            id=row.name.hex(),
            namespace=(row.namespace or b"").hex(),
            n_tokens=row.stop,
            tokens=tokens,
            tokens_from=tokens_from,
            path_bytes=end.above_bytes + end.bytes_upto(row.stop),
            own_bytes=sum(each.n_bytes for each in self.own(end)),
            checkpoints=tuple(sorted(each.stop for each in path if each.kind == CHECKPOINT)),
            hits=row.hits,
            created=row.created,
            last_used=row.last_used,
        )

    def path(self, end: _Node) -> list[Row]:
        """Return the states along a prompt, what is needed first in front."""
        found: list[Row] = []
        node: _Node | None = end
        upto = end.row.stop
        while node is not None:
            found += reversed(node.marks_upto(upto))
            found.append(node.row)
            upto = node.row.start if node.row.kind == SEGMENT else 0
            node = node.above
        return found[::-1]

    def own(self, end: _Node) -> list[Row]:
        """Return the states that lead nowhere but to the end of a prompt, the last first."""
        found = end.own_rows()
        node = end
        while not end.below and node.above is not None and node.above.n_ends == 1:
            node = node.above
            found += [*node.marks[::-1], node.row]
        return found

    def along(self, ids: Iterable[str]) -> list[bytes]:
        """Return the names of all states along these prompts, what hangs off another behind it.

        Args:
            ids: Beginnings of ids.

        Raises:
            InvalidValue: When no id begins so, or more than one.
        """
        ends = self.ends()
        found: dict[bytes, Row] = {}
        for each in ids:
            found.update({row.name: row for row in self.path(ends[resolve(each, ends, "prompt")])})
        return [row.name for row in sorted(found.values(), key=rows.order)]

    def _tokens(self, end: _Node) -> tuple[IntArray, int]:
        pieces: list[IntArray] = []
        node: _Node | None = end
        origin = end.row.stop
        while node is not None:
            if node.row.stop == origin:  # the first of its block that is met, and the longest
                pieces.append(np.frombuffer(rows.tokens_of(self._sql, node.row.name), "<i4"))
                origin = node.row.origin
            node = node.above
        tokens = np.concatenate(pieces[::-1]) if pieces else _NO_TOKENS
        tokens.flags.writeable = False
        return tokens, origin


def resolve(prefix: str, known: Collection[str], what: str) -> str:
    """Return the one of `known` that begins with `prefix`.

    Raises:
        InvalidValue: When none does, or more than one.
    """
    found = [each for each in known if prefix and each.startswith(prefix.lower())]
    if len(found) != 1:
        problem = f"{len(found)} begin with" if found else "none begins with"
        raise InvalidValue(f"{what} {prefix!r}: {problem} that")
    return found[0]
