"""Files against index: making the index anew, cleaning up after the dead, and comparing it all."""

from __future__ import annotations

import logging
import os
import sqlite3
import stat
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llamakeep.errors import BlobRejected
from llamakeep.stores.descriptions import parse_description
from llamakeep.stores.disk import introductions, rows
from llamakeep.stores.disk.index import Index
from llamakeep.stores.disk.shelf import FileRejected, Shelf, counted_bytes
from llamakeep.stores.envelope import Envelope
from llamakeep.tokens import NAME_BYTES

logger = logging.getLogger("llamakeep")

LEFT_ALONE = {"version", "secret"}
"""Files that are refused for one of these reasons may be good for somebody else."""

_AT_ONCE = 256
_MOST_NAMED = 1000


@dataclass(frozen=True, slots=True)
class DiskReport:
    """What comparing a directory with its index found.

    Attributes:
        n_states: States that are right.
        used_bytes: What they occupy.
        problems: How many there were of a kind. Files: `foreign`, `symlink`, `truncated`,
            `corrupt`, `name` (of another state), `unindexed` (good, but the index lacked them),
            `leftovers` (of writes that ended early). Rows: `missing` (without a file), `wrong`
            (not what the file says), `parents` (hung off the wrong state). `descriptions` of
            namespaces that are none, or that the index lacks. `miscounted_bytes`.
        left: Files that are left alone: `version` (newer), `secret` (sealed otherwise),
            `directories` (foreign ones), `unreadable`.
        fixed: The problems are mended.
        files: Which ones they are, by kind of problem or of what is left: paths in the directory,
            also of files that are missing; at most 1,000 of each.
    """

    n_states: int
    used_bytes: int
    problems: Mapping[str, int] = field(default_factory=dict)
    left: Mapping[str, int] = field(default_factory=dict)
    fixed: bool = False
    files: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __str__(self) -> str:
        found = ", ".join(f"{kind}: {n:,}" for kind, n in sorted(self.problems.items()))
        left = ", ".join(f"{kind}: {n:,}" for kind, n in sorted(self.left.items()))
        return (
            f"{self.n_states:,} states in {self.used_bytes:,} bytes are right; "
            f"{'mended' if self.fixed else 'wrong'}: {found or 'nothing'}"
            + (f"; left alone: {left}" if left else "")
        )


def rebuild(shelf: Shelf, sql: sqlite3.Connection) -> tuple[int, int, int]:
    """Fill an empty index from the headers of all files. Costs a few reads for each.

    Payloads are not read: they are verified whenever they are.

    Returns:
        How many states there are, how many files were not understood, and how many descriptions of
        namespaces; these stay.
    """
    n_states = n_refused = n_undescribed = 0
    newest = 0.0
    for path, name in shelf.listing():
        try:
            if name is None:
                raise BlobRejected(f"{path} is no state", reason="foreign")
            envelope, info = _glance(shelf, path, name)
        except FileNotFoundError:
            continue
        except BlobRejected:
            n_refused += 1
            continue
        newest = max(newest, info.st_mtime)
        _insert(sql, name, envelope, info.st_mtime)
        n_states += 1
    rows.next_time(sql, newest)
    for _, namespace, said in introductions.found(shelf):
        if namespace is None or said is None:
            n_undescribed += 1
        else:
            rows.introduce(sql, namespace, said)
    return n_states, n_refused, n_undescribed


def _glance(shelf: Shelf, path: Path, name: bytes) -> tuple[Envelope, os.stat_result]:
    """Return what a file's header says, whoever sealed it."""
    info = shelf.files.stat(path)
    if info is None:
        raise FileNotFoundError(path)
    return shelf.peek(name, anyone=True), info


def _insert(sql: sqlite3.Connection, name: bytes, envelope: Envelope, time: float) -> None:
    cost = counted_bytes(envelope.payload_bytes, envelope.place)
    rows.insert(sql, name, envelope.place, envelope.payload_bytes, cost, time)


# -- the dead --------------------------------------------------------------------------------------


def settle_the_dead(
    shelf: Shelf, index: Index, clock: Callable[[], float], *, rebooted: bool
) -> Counter[str]:
    """Clean up after processes that ended without doing so. Costs a look-up when there are none.

    Args:
        shelf: The files.
        index: Their index.
        clock: Seconds.
        rebooted: The machine may have gone down since files and index were compared. Files are
            flushed one by one, rows are not, so that the last ones may be lost: all are compared.

    Returns:
        How many files were `adopted`, and how many `leftovers` went.
    """
    done: Counter[str] = Counter()
    now = clock()
    with index.reading() as sql:
        found = [owner for owner, seen in rows.owners(sql) if owner.is_dead(now - seen)]
    partial = shelf.leftovers() if found else []
    for owner in found:
        with index.reading() as sql:
            tickets = rows.tickets_of(sql, owner)
        tickets += [ticket for ticket in partial if ticket.startswith(f"{owner.key}-")]
        done += settle(shelf, index, clock, tickets)
        with index.writing() as sql:
            rows.leave(sql, owner)
    if rebooted or any(owner.lost_with_machine() for owner in found):
        report = audit(shelf, index, clock, fix=True, verify=False, trust=True)
        done["adopted"] += report.problems.get("unindexed", 0)
        done["leftovers"] += report.problems.get("leftovers", 0)
    return done


def settle(
    shelf: Shelf, index: Index, clock: Callable[[], float], tickets: Iterable[str]
) -> Counter[str]:
    """End writes that nobody will end: index what came to its place whole, remove the rest."""
    done: Counter[str] = Counter()
    for ticket in dict.fromkeys(tickets):
        with index.reading() as sql:
            name = rows.name_of_ticket(sql, ticket)
        shelf.discard(ticket)
        done["leftovers"] += 1
        if name is None:
            continue
        envelope, bad = _judge(shelf, name, verify=True)
        with index.writing() as sql:
            if rows.get(sql, name) is None:
                if envelope is not None and shelf.stat(name) is not None:
                    shelf.flush(name)
                    _insert(sql, name, envelope, rows.next_time(sql, clock()))
                    done["adopted"] += 1
                elif bad is not None and bad.reason not in LEFT_ALONE:
                    _drop_if_same(shelf, name, bad)
            rows.release(sql, ticket)
    return done


def _judge(shelf: Shelf, name: bytes, verify: bool) -> tuple[Envelope | None, FileRejected | None]:
    """Return what a file is, or why it is not what it should be; neither when there is none."""
    try:
        try:
            return (shelf.read(name)[0] if verify else shelf.peek(name)), None
        except FileRejected as error:
            if error.reason != "secret":
                return None, error
            return shelf.peek(name, anyone=True), error
    except FileRejected as error:
        return None, error
    except (FileNotFoundError, NotADirectoryError):
        return None, None


def _drop_if_same(shelf: Shelf, name: bytes, bad: FileRejected) -> None:
    found = shelf.stat(name)
    if found is not None and bad.identity in (None, (found.st_dev, found.st_ino)):
        shelf.drop(name)


# -- comparing -------------------------------------------------------------------------------------


class _Audit:
    """One comparison. What looks wrong is looked at again where nobody can change it meanwhile."""

    def __init__(self, shelf: Shelf, index: Index, clock: Callable[[], float], fix: bool) -> None:
        self.shelf = shelf
        self.index = index
        self.clock = clock
        self.fix = fix
        self.problems: Counter[str] = Counter()
        self.left: Counter[str] = Counter()
        self.good: set[bytes] = set()
        self.files: defaultdict[str, list[str]] = defaultdict(list)

    def note(self, counts: Counter[str], kind: str, paths: Iterable[Path]) -> None:
        """Count something for each path, and remember the first ones."""
        for path in paths:
            counts[kind] += 1
            if len(self.files[kind]) < _MOST_NAMED:
                self.files[kind].append(path.relative_to(self.shelf.root).as_posix())

    def leftovers(self) -> None:
        """Look for what was being written by nobody who is alive."""
        now = self.clock()
        partial = self.shelf.leftovers()
        with self.index.reading() as sql:
            dead = [owner for owner, seen in rows.owners(sql) if owner.is_dead(now - seen)]
            known = rows.all_tickets(sql)
            lost = [ticket for owner in dead for ticket in rows.tickets_of(sql, owner)]
        lost += [ticket for ticket in partial if ticket not in known]
        unready = list(self.shelf.abandoned(now))
        self.note(self.problems, "leftovers", map(self.shelf.partial, dict.fromkeys(lost)))
        self.note(self.problems, "leftovers", unready)
        if self.fix:
            for path in unready:
                self.shelf.files.unlink(path)
            settle(self.shelf, self.index, self.clock, lost)
            if dead:
                with self.index.writing() as sql:
                    for owner in dead:
                        rows.leave(sql, owner)

    def foreign(self, path: Path) -> None:
        """Look at something that cannot be a state's file."""
        info = self.shelf.files.stat(path)
        if info is None:
            return
        if stat.S_ISDIR(info.st_mode):
            self.note(self.left, "directories", [path])
            return
        kind = "symlink" if stat.S_ISLNK(info.st_mode) else "foreign"
        self.note(self.problems, kind, [path])
        if self.fix:
            self.shelf.files.unlink(path)

    def file(self, name: bytes, verify: bool) -> None:
        """Look at a file that has the name of a state."""
        path = self.shelf.path(name)
        try:
            envelope, bad = _judge(self.shelf, name, verify)
        except OSError as error:
            logger.warning("%s cannot be read: %s", path, error)
            self.note(self.left, "unreadable", [path])
            self.good.add(name)  # its row is none without a file
            return
        if bad is not None and bad.reason in LEFT_ALONE:
            self.note(self.left, bad.reason, [path])
        elif bad is not None:
            self.note(self.problems, bad.reason, [path])
            if self.fix:
                with self.index.writing() as sql:
                    _drop_if_same(self.shelf, name, bad)
                    if self.shelf.stat(name) is None:
                        rows.remove(sql, name)
        if envelope is None:
            if bad is not None and bad.reason == "version":
                self.good.add(name)  # a row of it is none without a file
            return
        self.good.add(name)
        with self.index.reading() as sql:
            kind = _compare(sql, name, envelope)
            if kind == "unindexed" and rows.is_being_written(sql, name):
                kind = ""
        if kind and self.shelf.stat(name) is not None:
            self.note(self.problems, kind, [path])
            if self.fix:
                with self.index.writing() as sql:
                    if self.shelf.stat(name) is not None and _compare(sql, name, envelope):
                        rows.remove(sql, name)
                        _insert(sql, name, envelope, rows.next_time(sql, self.clock()))

    def rows(self) -> None:
        """Look for rows without a file, and for wrong parents."""
        last = b""
        while True:
            with self.index.scanning() as sql:
                names = rows.names_after(sql, last, _AT_ONCE)
                wrong = [name for name in names if _is_misplaced(sql, name)]
            missing = [
                name for name in names if name not in self.good and self.shelf.stat(name) is None
            ]
            if missing:
                with self.index.reading() as sql:  # unless they were dropped just now
                    missing = [name for name in missing if rows.get(sql, name)]
            self.note(self.problems, "missing", map(self.shelf.path, missing))
            self.note(self.problems, "parents", map(self.shelf.path, wrong))
            if self.fix and missing:
                with self.index.writing() as sql:
                    for name in missing:
                        if self.shelf.stat(name) is None:
                            rows.remove(sql, name)
            if self.fix and wrong:
                with self.index.writing() as sql:
                    for name in wrong:
                        rows.hang_anew(sql, name)
            if len(names) < _AT_ONCE:
                return
            last = names[-1]

    def descriptions(self) -> None:
        """Compare the descriptions of namespaces with their files."""
        with self.index.reading() as sql:
            known = {digest: parse_description(text) for digest, text in rows.described(sql)}
        wrong: dict[bytes, dict[str, Any] | None] = {
            digest: None
            for digest, said in known.items()
            if said is None or len(digest) != NAME_BYTES
        }
        for path, namespace, said in introductions.found(self.shelf):
            if namespace is None:
                self.note(self.problems, "descriptions", [path])
                if self.fix:
                    self.shelf.files.unlink(path)
            elif known.get(namespace) is None:
                wrong[namespace] = said
        paths = [introductions.path_of(self.shelf, digest) for digest in wrong]
        self.note(self.problems, "descriptions", paths)
        if self.fix and wrong:
            with self.index.writing() as sql:
                for digest, said in wrong.items():
                    if said is None:
                        rows.forget_description(sql, digest)
                    else:
                        rows.introduce(sql, digest, said)

    def counts(self) -> None:
        """Compare what is counted with the sum of what is there."""
        with self.index.scanning() as sql:
            counted, summed = rows.counted_and_summed(sql)
        if counted != summed:
            self.problems["miscounted_bytes"] += abs(counted[0] - summed[0]) or 1
            if self.fix:
                with self.index.writing() as sql:
                    rows.count_again(sql)


def audit(
    shelf: Shelf,
    index: Index,
    clock: Callable[[], float],
    *,
    fix: bool,
    verify: bool,
    trust: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> DiskReport:
    """Compare files, rows and counts. See `DiskStore.audit`.

    Args:
        shelf: The files.
        index: Their index.
        clock: Seconds.
        fix: Mend what is wrong.
        verify: Read and verify all payloads.
        trust: Look at no file that has a row: it was flushed before it got its name.
        progress: Called after each file.
    """
    if fix:
        index.ensure()
    work = _Audit(shelf, index, clock, fix)
    work.leftovers()
    for path in shelf.strangers():
        work.foreign(path)
    indexed: set[bytes] = set()
    if trust:
        with index.scanning() as sql:
            indexed.update(rows.names(sql))
    files = list(shelf.listing())
    for done, (path, name) in enumerate(files, 1):
        if name is None:
            work.foreign(path)
        elif name in indexed:
            work.good.add(name)
        else:
            work.file(name, verify)
        if progress is not None:
            progress(done, len(files))
    work.rows()
    work.descriptions()
    work.counts()
    with index.reading() as sql:
        now = rows.totals(sql)
    named = {kind: tuple(paths) for kind, paths in work.files.items()}
    return DiskReport(now.n_states, now.kept_bytes, +work.problems, +work.left, fix, named)


def _compare(sql: sqlite3.Connection, name: bytes, envelope: Envelope) -> str:
    """Return what is wrong with the row of a file, or nothing."""
    row = rows.get(sql, name)
    if row is None:
        return "unindexed"
    place = envelope.place
    cost = counted_bytes(envelope.payload_bytes, place)
    if (row.payload_bytes, row.n_bytes) != (envelope.payload_bytes, cost):
        return "wrong"
    if place is None:
        return "wrong" if row.kind else ""
    said = (rows.KINDS[row.kind], row.namespace, row.block, row.origin, row.start, row.stop)
    if said != (place.kind, place.namespace, place.block, place.origin, place.start, place.end):
        return "wrong"
    if rows.tokens_of(sql, name) != rows.raw(place):
        return "wrong"
    next_block = (place.next_block or None) if place.kind == "segment" else None
    return "" if row.next_block == next_block else "wrong"


def _is_misplaced(sql: sqlite3.Connection, name: bytes) -> bool:
    """Return whether a state hangs off something that it does not belong to."""
    row = rows.get(sql, name)
    if row is None or not row.kind:
        return False
    if row.parent is None:
        return not row.at_origin and rows.expected_parent(sql, row) is not None
    parent = rows.get(sql, row.parent)
    return parent is None or not rows.fits(sql, parent, row)
