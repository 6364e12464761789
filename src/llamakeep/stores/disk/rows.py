"""What is asked of the index, and what hangs off what in it.

A segment that starts inside its block hangs off the segment of that block that it continues, a
checkpoint off the segment that it lies in: their `parent`. The first segment of a block hangs off
whatever closes the block before, whose `next_block` it is in. A snapshot hangs off nothing. A state
may go when nothing hangs off it.

Every function takes a connection, and changes something only where it says so, in the caller's
transaction. `tokens` are raw here: int32, little-endian, of the block up to the state's end.
"""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from llamakeep.states import Block, Record
from llamakeep.stores.disk.owners import Owner
from llamakeep.tokens import Kind, Place

OPAQUE, SEGMENT, CHECKPOINT, SNAPSHOT = 0, 1, 2, 3
KINDS: tuple[Kind | None, ...] = (None, "segment", "checkpoint", "snapshot")


@dataclass(slots=True)
class Row:
    """A row of `states`, but for the tokens; what a policy ranks, too.

    `before` is where the last checkpoint before a checkpoint is, if somebody looked, see
    `restorable_before`; `queued` is its place in a queue, or 0.
    """

    sequence: int
    name: bytes
    kind: int
    namespace: bytes | None
    block: bytes | None
    origin: int
    start: int
    stop: int
    next_block: bytes | None
    parent: bytes | None
    payload_bytes: int
    n_bytes: int
    created: float
    last_used: float
    hits: int
    before: int = 0
    queued: int = 0

    @property
    def n_tokens(self) -> int:
        """Tokens of a segment or a snapshot, or the position of a checkpoint."""
        return self.stop - self.start if self.kind == SEGMENT else self.stop

    @property
    def marginal_tokens(self) -> int:
        """Tokens that losing it costs: of a checkpoint, back to the one before; else its own."""
        return self.stop - self.before if self.kind == CHECKPOINT else self.n_tokens

    @property
    def at_origin(self) -> bool:
        """Whether it hangs off the block before."""
        return self.kind == SEGMENT and self.start == self.origin


def order(row: Row) -> tuple[int, int, int]:
    """Return a key that sorts what hangs off another behind it."""
    return row.start if row.kind else -1, row.kind, row.stop if row.kind else 0


_COLUMNS = (
    "sequence, name, kind, namespace, block, origin, start, stop, next_block, parent, "
    "n_bytes, file_bytes, created, last_used, hits"
)
_SUMS = (
    "SELECT coalesce(sum(file_bytes), 0), "
    "coalesce(sum(CASE kind WHEN 0 THEN file_bytes ELSE 0 END), 0), count(*) FROM states"
)


def raw(place: Place) -> bytes:
    """Return the tokens of a place as they stand in the index."""
    return place.tokens.astype("<i4", copy=False).tobytes()


# -- counts --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Totals:
    """Bytes of what is kept, of the opaque part of it, of what is being written; and how many."""

    kept_bytes: int
    opaque_bytes: int
    writing_bytes: int
    n_states: int

    @property
    def used_bytes(self) -> int:
        """Bytes that count against the capacity."""
        return self.kept_bytes + self.writing_bytes


def totals(sql: sqlite3.Connection) -> Totals:
    """Return what is counted now.

    Raises:
        TypeError: When it cannot be: nothing seals the index.
    """
    found = sql.execute(
        "SELECT used_bytes, opaque_bytes, (SELECT coalesce(sum(n_bytes), 0) FROM writing), "
        "n_states FROM totals"
    ).fetchone()
    if any(not isinstance(number, int) or number < 0 for number in found):
        raise TypeError(f"it counts {found!r:.100}")
    return Totals(*found)


def next_time(sql: sqlite3.Connection, now: float) -> float:
    """Return the time of what is done now: later than all before, even if the clock went back.

    Notes it in the index.
    """
    (newest,) = sql.execute("SELECT newest FROM totals").fetchone()
    time = max(now, math.nextafter(newest, math.inf))
    sql.execute("UPDATE totals SET newest = ?", (time,))
    return time


# -- single rows ---------------------------------------------------------------------------------


def get(sql: sqlite3.Connection, name: bytes) -> Row | None:
    """Return the row of a state."""
    found = sql.execute(f"SELECT {_COLUMNS} FROM states WHERE name = ?", (name,)).fetchone()
    return Row(*found) if found else None


def tokens_of(sql: sqlite3.Connection, name: bytes) -> bytes:
    """Return the tokens of a state's block up to its end; nothing for one that is gone."""
    found = sql.execute("SELECT tokens FROM states WHERE name = ?", (name,)).fetchone()
    return found[0] or b"" if found else b""


def insert(
    sql: sqlite3.Connection,
    name: bytes,
    place: Place | None,
    payload_bytes: int,
    file_bytes: int,
    time: float,
) -> None:
    """Add a state, unless it is there; hang it off what it belongs to, and what belongs to it."""
    if place is None:
        sql.execute(
            "INSERT OR IGNORE INTO states (name, kind, n_bytes, file_bytes, created, last_used, "
            "hits) VALUES (?, 0, ?, ?, ?, ?, 0)",
            (name, payload_bytes, file_bytes, time, time),
        )
        return
    tokens = raw(place)
    sql.execute(
        "INSERT OR IGNORE INTO states (name, kind, namespace, block, origin, start, first, stop, "
        "next_block, parent, n_bytes, file_bytes, created, last_used, hits, tokens) "
        "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0, ?)",
        (
            name,
            KINDS.index(place.kind),
            place.namespace,
            place.block,
            place.origin,
            place.start,
            place.first,
            place.end,
            (place.next_block or None) if place.kind == "segment" else None,
            parent_of(sql, place, tokens),
            payload_bytes,
            file_bytes,
            time,
            time,
            tokens,
        ),
    )
    if place.kind == "segment":
        _take_orphans(sql, name, place, tokens)


def remove(sql: sqlite3.Connection, name: bytes) -> bool:
    """Take a state out; return whether it was there.

    What hung off it hangs off another that covers the same tokens, if there is one, or nothing.
    """
    gone = sql.execute("DELETE FROM states WHERE name = ?", (name,)).rowcount > 0
    if gone:
        for (below,) in sql.execute("SELECT name FROM states WHERE parent = ?", (name,)).fetchall():
            hang_anew(sql, below)
    return gone


def names(sql: sqlite3.Connection) -> list[bytes]:
    """Return the names of all states."""
    return [name for (name,) in sql.execute("SELECT name FROM states")]


def names_in(sql: sqlite3.Connection, namespaces: Collection[bytes]) -> list[bytes]:
    """Return the names of all states of some namespaces. Costs a scan of the index."""
    wanted = set(namespaces)
    found = sql.execute("SELECT name, namespace FROM states WHERE namespace IS NOT NULL")
    return [name for name, namespace in found if namespace in wanted]


def names_after(sql: sqlite3.Connection, name: bytes, limit: int) -> list[bytes]:
    """Return the next names, in order."""
    found = sql.execute(
        "SELECT name FROM states WHERE name > ? ORDER BY name LIMIT ?", (name, limit)
    )
    return [name for (name,) in found]


def counted_and_summed(sql: sqlite3.Connection) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return bytes, opaque bytes and number of states: as they are counted, and as they are."""
    counted = sql.execute("SELECT used_bytes, opaque_bytes, n_states FROM totals").fetchone()
    return counted, sql.execute(_SUMS).fetchone()


def count_again(sql: sqlite3.Connection) -> None:
    """Set what is counted to what is there."""
    sql.execute(
        "UPDATE totals SET used_bytes = ?, opaque_bytes = ?, n_states = ?",
        sql.execute(_SUMS).fetchone(),
    )


def touch(sql: sqlite3.Connection, name: bytes, time: float, *, hit: bool) -> bool:
    """Note a use of a state, which counts if it is a hit; return whether the state is there."""
    found = sql.execute(
        "UPDATE states SET last_used = ?, hits = hits + ? WHERE name = ?", (time, hit, name)
    )
    return found.rowcount > 0


# -- what hangs off what -------------------------------------------------------------------------


def parent_of(sql: sqlite3.Connection, place: Place, tokens: bytes) -> bytes | None:
    """Return the name of the segment in the same block that a state hangs off.

    Costs a few look-ups for each distinct start of a span in the block.
    """
    upto = place.end if place.kind == "checkpoint" else place.start
    return _covering(sql, place.block, place.origin, upto, tokens)


def expected_parent(sql: sqlite3.Connection, row: Row) -> bytes | None:
    """Return what `parent_of` says of a state that is here."""
    upto = row.stop if row.kind == CHECKPOINT else row.start
    return _covering(sql, row.block, row.origin, upto, tokens_of(sql, row.name))


def hang_anew(sql: sqlite3.Connection, name: bytes) -> None:
    """Hang a state off what it belongs to."""
    row = get(sql, name)
    if row is not None and row.kind:
        sql.execute(
            "UPDATE states SET parent = ? WHERE name = ?", (expected_parent(sql, row), name)
        )


def fits(sql: sqlite3.Connection, parent: Row, row: Row) -> bool:
    """Return whether a state may hang off a segment: it is in the block, and covers its start."""
    upto = row.stop if row.kind == CHECKPOINT else row.start
    shared = 4 * (upto - row.origin)
    return (
        parent.kind == SEGMENT
        and parent.block == row.block
        and parent.start < upto <= parent.stop
        and tokens_of(sql, parent.name)[:shared] == tokens_of(sql, row.name)[:shared]
    )


def _covering(
    sql: sqlite3.Connection, block: bytes | None, origin: int, upto: int, tokens: bytes
) -> bytes | None:
    """Return the last segment to start before `upto` that reaches it and has these tokens.

    Of several that start there the longest: a shorter one is a tail that is being superseded.
    """
    start = upto
    while True:
        (start,) = sql.execute(
            "SELECT max(start) FROM states WHERE block = ? AND start < ?", (block, start)
        ).fetchone()
        if start is None or start < origin:
            return None
        at = 4 * (start - origin)
        shared = 4 * (upto - origin)
        found = sql.execute(
            "SELECT name FROM states WHERE block = ? AND start = ? AND first = ? AND kind = 1 "
            "AND stop >= ? AND substr(tokens, 1, ?) = ? ORDER BY stop DESC, name LIMIT 1",
            (
                block,
                start,
                int.from_bytes(tokens[at : at + 4], "little", signed=True),
                upto,
                shared,
                tokens[:shared],
            ),
        ).fetchone()
        if found:
            name: bytes = found[0]
            return name


def _take_orphans(sql: sqlite3.Connection, name: bytes, place: Place, tokens: bytes) -> None:
    for other, kind, start, stop, its_tokens in sql.execute(
        "SELECT name, kind, start, stop, tokens FROM states WHERE block = ? AND parent IS NULL "
        "AND (kind = 2 OR start > origin)",
        (place.block,),
    ).fetchall():
        upto = stop if kind == CHECKPOINT else start
        shared = 4 * (upto - place.origin)
        if place.start < upto <= place.end and its_tokens[:shared] == tokens[:shared]:
            sql.execute("UPDATE states SET parent = ? WHERE name = ?", (name, other))


def hang_off(sql: sqlite3.Connection, old: bytes, new: bytes) -> None:
    """Let what hangs off one state hang off another, also what is being written."""
    sql.execute("UPDATE states SET parent = ? WHERE parent = ? AND name != ?", (new, old, new))
    sql.execute("UPDATE writing SET parent = ? WHERE parent = ?", (new, old))


def hangs_off(sql: sqlite3.Connection, row: Row) -> bool:
    """Return whether something hangs off a state, or is just being written to."""
    if row.kind != SEGMENT:
        return False
    (found,) = sql.execute(
        "SELECT EXISTS (SELECT 1 FROM states WHERE parent = ?1) "
        "OR EXISTS (SELECT 1 FROM states WHERE block = ?2) "
        "OR EXISTS (SELECT 1 FROM writing WHERE parent = ?1 OR block = ?2)",
        (row.name, row.next_block),
    ).fetchone()
    return bool(found)


def directly_above(sql: sqlite3.Connection, row: Row) -> list[Row]:
    """Return what a state hangs off: one segment, or all that close the block before."""
    if row.parent is not None:
        parent = get(sql, row.parent)
        return [parent] if parent else []
    return closers(sql, row.block) if row.at_origin else []


def closers(sql: sqlite3.Connection, block: bytes | None) -> list[Row]:
    """Return the segments that end where the block starts."""
    found = sql.execute(f"SELECT {_COLUMNS} FROM states WHERE next_block = ?", (block,)).fetchall()
    return [Row(*values) for values in found]


def above(sql: sqlite3.Connection, place: Place) -> list[Row]:
    """Return every segment above a place, what it hangs off directly first.

    Costs two look-ups for each.
    """
    parent = parent_of(sql, place, raw(place))
    if parent is not None:
        direct = get(sql, parent)
        found = [direct] if direct else []
    elif place.kind == "segment" and place.start == place.origin:
        found = closers(sql, place.block)
    else:
        found = []
    seen = {row.name for row in found}
    for row in found:  # grows meanwhile
        for higher in directly_above(sql, row):
            if higher.name not in seen:
                seen.add(higher.name)
                found.append(higher)
    return found


def restorable_before(
    sql: sqlite3.Connection, row: Row, known: dict[bytes | None, int] | None = None
) -> int:
    """Return where the last checkpoint before a checkpoint is on its path; 0 for none.

    Costs, for each block back to there, a few look-ups for each distinct start of a span in it.
    Segments lead from block to block: where there are none, in a family without them, only the
    checkpoint's own block is known.

    Args:
        sql: The index.
        row: A checkpoint.
        known: What was found of the origins of blocks before, to be used again and added to.
    """
    known = {} if known is None else known
    empty: list[bytes | None] = []
    block, origin, upto, tokens = row.block, row.origin, row.stop, tokens_of(sql, row.name)
    found = 0
    while not found:
        found = _last_checkpoint(sql, block, origin, upto, tokens)
        if found:
            break
        if block in known:
            found = known[block]
            break
        empty.append(block)
        before = sql.execute(
            "SELECT block, origin, stop, tokens FROM states WHERE next_block = ? LIMIT 1", (block,)
        ).fetchone()
        if before is None or not before[1] < origin:
            break
        block, origin, tokens = before[0], before[1], before[3]
        upto = before[2] + 1  # one at its end counts
    known.update(dict.fromkeys(empty, found))
    return found


def _last_checkpoint(
    sql: sqlite3.Connection, block: bytes | None, origin: int, upto: int, tokens: bytes
) -> int:
    """Return where the last checkpoint of a block before `upto` is that has these tokens."""
    found, start = 0, upto
    while True:
        (start,) = sql.execute(
            "SELECT max(start) FROM states WHERE block = ? AND start < ?", (block, start)
        ).fetchone()
        if start is None or start < origin:
            return found
        at = 4 * (start - origin)
        (stop,) = sql.execute(
            "SELECT max(stop) FROM states WHERE block = ? AND start = ? AND first = ? "
            "AND kind = 2 AND stop < ? AND tokens = substr(?, 1, length(tokens))",
            (
                block,
                start,
                int.from_bytes(tokens[at : at + 4], "little", signed=True),
                upto,
                tokens,
            ),
        ).fetchone()
        found = max(found, stop or 0)


def evictable(sql: sqlite3.Connection) -> Iterator[Row]:
    """Yield every state that may go now. Costs a scan of the index."""
    for values in sql.execute(
        f"SELECT {_COLUMNS} FROM states AS s WHERE kind > 1 OR kind = 1 "
        "AND NOT EXISTS (SELECT 1 FROM states AS c WHERE c.parent = s.name) "
        "AND NOT EXISTS (SELECT 1 FROM states AS n WHERE n.block = s.next_block)"
    ):
        yield Row(*values)


def written_after(sql: sqlite3.Connection, sequence: int) -> list[Row]:
    """Return the states that have a place and a higher sequence number."""
    found = sql.execute(
        f"SELECT {_COLUMNS} FROM states WHERE sequence > ? AND kind > 0", (sequence,)
    )
    return [Row(*values) for values in found]


def in_order(sql: sqlite3.Connection) -> list[bytes]:
    """Return the names of all states, what hangs off another behind it. Costs a sort of them."""
    found = sql.execute("SELECT name FROM states ORDER BY coalesce(start, -1), kind, stop")
    return [name for (name,) in found]


def placed(sql: sqlite3.Connection) -> Iterator[Row]:
    """Yield every state that has a place. Costs a scan of the index."""
    for values in sql.execute(f"SELECT {_COLUMNS} FROM states WHERE kind > 0"):
        yield Row(*values)


# -- finding -------------------------------------------------------------------------------------


def find(sql: sqlite3.Connection, block: Block, tier: str) -> Iterator[Record]:
    """Yield what is kept in a block and begins like the prompt.

    Costs two look-ups for each distinct start of a span in the block, whatever hangs off it.

    Raises:
        ValueError, TypeError: When what the index holds cannot be.
    """
    size = int(block.tokens.size)
    start = -1
    while True:
        (start,) = sql.execute(
            "SELECT min(start) FROM states WHERE block = ? AND start > ?", (block.name, start)
        ).fetchone()
        if start is None or start - block.origin >= size:
            return
        at = start - block.origin
        if at < 0:
            continue
        for name, kind, n_bytes, tokens in sql.execute(
            "SELECT name, kind, n_bytes, substr(tokens, ?) FROM states "
            "WHERE block = ? AND start = ? AND first = ?",
            (4 * at + 1, block.name, start, int(block.tokens[at])),
        ).fetchall():
            which = KINDS[kind]
            if which is not None:
                yield Record(which, name, start, np.frombuffer(tokens, "<i4"), n_bytes, tier)


def snapshots(
    sql: sqlite3.Connection, namespace: bytes, after: int
) -> list[tuple[bytes, int, bytes]]:
    """Return name, payload bytes and tokens of each snapshot of a namespace.

    Args:
        sql: The index.
        namespace: Which ones.
        after: Only those with a higher sequence number: that came later, in this database.

    Those used last come last. Costs a look at every later row.
    """
    return sql.execute(
        "SELECT name, n_bytes, tokens FROM states "
        "WHERE sequence > ? AND namespace = ? AND kind = 3 ORDER BY last_used",
        (after, namespace),
    ).fetchall()


def snapshot_names(sql: sqlite3.Connection, namespace: bytes) -> list[bytes]:
    """Return the names of a namespace's snapshots. Costs a scan of the index."""
    found = sql.execute("SELECT name FROM states WHERE namespace = ? AND kind = 3", (namespace,))
    return [name for (name,) in found]


def newest(sql: sqlite3.Connection) -> tuple[bytes, int]:
    """Return which database it is, and the highest sequence number that it gave away."""
    (identity,) = sql.execute("SELECT identity FROM totals").fetchone()
    found = sql.execute("SELECT seq FROM sqlite_sequence WHERE name = 'states'").fetchone()
    return identity, found[0] if found else 0


# -- what is being written, and by whom ------------------------------------------------------------


def reserve(
    sql: sqlite3.Connection,
    ticket: str,
    name: bytes,
    n_bytes: int,
    owner: Owner,
    place: Place | None,
    now: float,
) -> None:
    """Count a state that is going to be written, and hold what it hangs off."""
    sql.execute(
        "INSERT INTO owners VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (key) DO UPDATE SET seen = ?6",
        (owner.key, owner.pid, owner.started, owner.machine, owner.boot, now),
    )
    sql.execute(
        "INSERT INTO writing VALUES (?, ?, ?, ?, ?, ?)",
        (
            ticket,
            name,
            n_bytes,
            owner.key,
            parent_of(sql, place, raw(place)) if place is not None else None,
            place.block if place is not None and place.start == place.origin else None,
        ),
    )


def spend(sql: sqlite3.Connection, ticket: str) -> None:
    """Count what was written no longer as being written, but remember that it is not done."""
    sql.execute("UPDATE writing SET n_bytes = 0 WHERE ticket = ?", (ticket,))


def release(sql: sqlite3.Connection, ticket: str) -> None:
    """Count no longer what was going to be written."""
    sql.execute("DELETE FROM writing WHERE ticket = ?", (ticket,))


def tickets_of(sql: sqlite3.Connection, owner: Owner) -> list[str]:
    """Return the tickets of what an owner is writing."""
    found = sql.execute("SELECT ticket FROM writing WHERE owner = ?", (owner.key,))
    return [ticket for (ticket,) in found]


def all_tickets(sql: sqlite3.Connection) -> set[str]:
    """Return the tickets of all that is being written."""
    return {ticket for (ticket,) in sql.execute("SELECT ticket FROM writing")}


def name_of_ticket(sql: sqlite3.Connection, ticket: str) -> bytes | None:
    """Return the name of what is being written under a ticket."""
    found = sql.execute("SELECT name FROM writing WHERE ticket = ?", (ticket,)).fetchone()
    return found[0] if found else None


def is_being_written(sql: sqlite3.Connection, name: bytes) -> bool:
    """Return whether somebody is writing a state, or has and has not flushed its name."""
    found = sql.execute("SELECT 1 FROM writing WHERE name = ? LIMIT 1", (name,)).fetchone()
    return found is not None


def is_reserved(sql: sqlite3.Connection, ticket: str) -> bool:
    """Return whether something counts as being written."""
    found = sql.execute("SELECT 1 FROM writing WHERE ticket = ?", (ticket,)).fetchone()
    return found is not None


def leave(sql: sqlite3.Connection, owner: Owner) -> None:
    """Forget an owner that is done, unless something of it is still being written."""
    sql.execute(
        "DELETE FROM owners WHERE key = ?1 AND NOT EXISTS (SELECT 1 FROM writing WHERE owner = ?1)",
        (owner.key,),
    )


def owners(sql: sqlite3.Connection) -> list[tuple[Owner, float]]:
    """Return whoever wrote and did not say that it was done, and when it was last heard of."""
    found = sql.execute("SELECT key, pid, started, machine, boot, seen FROM owners").fetchall()
    return [(Owner(*values[:5]), values[5]) for values in found]


# -- namespaces ----------------------------------------------------------------------------------


def namespaces_of(sql: sqlite3.Connection, names: Iterable[bytes]) -> set[bytes]:
    """Return the namespaces that these states are in."""
    found = (
        sql.execute("SELECT namespace FROM states WHERE name = ?", (name,)).fetchone()
        for name in names
    )
    return {row[0] for row in found if row is not None and row[0] is not None}


def is_introduced(
    sql: sqlite3.Connection, namespace: bytes, description: Mapping[str, Any]
) -> bool:
    """Return whether a namespace has this description."""
    text = json.dumps(dict(description), sort_keys=True)
    found = sql.execute(
        "SELECT 1 FROM namespaces WHERE digest = ? AND description = ?", (namespace, text)
    ).fetchone()
    return found is not None


def count_described(sql: sqlite3.Connection) -> int:
    """Return how many namespaces have a description."""
    found: tuple[int] = sql.execute("SELECT count(*) FROM namespaces").fetchone()
    return found[0]


def described_in_vain(sql: sqlite3.Connection) -> list[bytes]:
    """Return the namespaces with a description and no states. Costs a scan of the index."""
    found = sql.execute(
        "SELECT CAST(digest AS BLOB) FROM namespaces WHERE digest NOT IN "
        "(SELECT namespace FROM states WHERE namespace IS NOT NULL)"
    )
    return [digest for (digest,) in found]


def introduce(sql: sqlite3.Connection, namespace: bytes, description: Mapping[str, Any]) -> None:
    """Note the description of a namespace."""
    text = json.dumps(dict(description), sort_keys=True)
    rolling = bool(description.get("rolling"))
    sql.execute("INSERT OR REPLACE INTO namespaces VALUES (?, ?, ?)", (namespace, text, rolling))


def described(sql: sqlite3.Connection) -> list[tuple[bytes, bytes]]:
    """Return namespaces and their descriptions, unread: nothing seals them."""
    return sql.execute(
        "SELECT CAST(digest AS BLOB), CAST(description AS BLOB) FROM namespaces"
    ).fetchall()


def forget_description(sql: sqlite3.Connection, namespace: bytes) -> None:
    """Take out the description of a namespace."""
    sql.execute("DELETE FROM namespaces WHERE CAST(digest AS BLOB) = ?", (namespace,))


def is_rolling(sql: sqlite3.Connection, namespace: bytes | None) -> bool:
    """Return whether segments of the namespace are of no use without a checkpoint."""
    found = sql.execute("SELECT rolling FROM namespaces WHERE digest = ?", (namespace,)).fetchone()
    return bool(found and found[0])
