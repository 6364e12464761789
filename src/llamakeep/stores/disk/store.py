"""States in a directory, which several processes may share and which outlives them.

::

    FORMAT              which layout this is
    boot                in which start of the machine files and index were compared
    index.sqlite3       what is there, and what hangs off what; made again from the files if lost
    lock                held while the directory is opened
    blobs/ab/abcd...state    one state each, in the form of `envelope.py`
    namespaces/abcd...json   what the parts of a namespace are
    tmp/                files that are being written

The files are the truth; of what the index knows, only hits and times of use are lost with it. A
state is written under a temporary name, flushed to the device, renamed and indexed in one
transaction, and its directory flushed; when `put` returns True, all that has happened. The index is
not flushed each time: whoever opens the directory first after a start of the machine compares it
with the files. Reading goes by the name alone, past the index.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from llamakeep.errors import IntegrityError, InvalidValue, whole_number
from llamakeep.policy import Policy, get_policy
from llamakeep.states import Block, Buffer, Record
from llamakeep.stores.descriptions import Described, parse_description
from llamakeep.stores.disk import archive, audit, catalog, introductions, layout, rows
from llamakeep.stores.disk.archive import Imported, Progress, Target
from llamakeep.stores.disk.audit import DiskReport
from llamakeep.stores.disk.catalog import Catalog, DiskEntry, DiskStats
from llamakeep.stores.disk.files import Files
from llamakeep.stores.disk.index import Busy, Index, is_damage, store_error
from llamakeep.stores.disk.room import Room
from llamakeep.stores.disk.shelf import FileRejected, Payload, Shelf, counted_bytes
from llamakeep.tally import Refused, Tally
from llamakeep.tokens import NAME_BYTES, IntArray, Place

_KEEP = {"version", "secret", "symlink"}
"""Why a file is refused but left alone: it may be good for somebody else, or is no file of ours."""


T = TypeVar("T")


class Mark(NamedTuple):
    """Up to where a caller knows what is in an index.

    Attributes:
        database: Which index: one that is made anew is another.
        sequence: The number of its last row.
    """

    database: bytes
    sequence: int


class Snapshot(NamedTuple):
    """A whole state of a prompt: its name, the size of its payload, and the prompt."""

    name: bytes
    n_bytes: int
    tokens: IntArray


_NAMES_AT_ONCE = 256
_FEW_DESCRIBED = 64
"""So many descriptions stay, whether their namespaces have states or not."""
_MOST_FORGOTTEN = 1024


class DiskStore:
    """Keeps states in a directory, sealed, within a budget of real disk use. From any thread.

    Several processes may use one directory: each keeps to its own limits, and counts what the
    others keep and are writing. The directory must be on a local file system, because SQLite's
    write-ahead log needs shared memory. It is made private to its owner, and a link in it leads
    nowhere.

    States that have a place in the prefix tree go, by policy, to make room for others of that
    kind: never one that another hangs off, nor one above what is being put. Those without a place
    stay until they are deleted. The index, about 2 KB for each state, is not counted.

    Args:
        path: The directory; made when it is missing. One that holds other things is refused.
        capacity_bytes: The limit on the bytes that files occupy, in whole pages. None: a quarter
            of what is free and what the cache already has, decided now. With a number, what is
            above it goes at once.
        secret: Seals the files with a key, so that nobody without it can make one. What was sealed
            with another secret, or with none, is a miss and left alone.
        policy: Which states go first: a name (see `policy.policy_names`) or a policy.
        min_free_bytes: Room on the file system that is left to others: below it, own states go,
            and then nothing is written.
        clock: Seconds.
        files: The seam to the file system.
        pool_bytes: Idle memory, at most, that is kept to read into.

    Raises:
        InvalidValue: For a negative limit or an unknown policy.
        IndexDamaged: A `StoreError`, when the index cannot be used, and nothing may be written.
        StoreError: When the directory cannot be used: not ours, of a newer version, not writable
            and empty, ...; the message says which it is and why.
    """

    tier = "disk"
    is_remote = False
    reads_into_its_own = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        capacity_bytes: int | None = None,
        *,
        secret: str | bytes | None = None,
        policy: str | Policy = "lru",
        min_free_bytes: int = 1 << 30,
        clock: Callable[[], float] = time.time,
        files: Files | None = None,
        pool_bytes: int = 64 << 20,
    ) -> None:
        if capacity_bytes is not None:
            whole_number("capacity_bytes", capacity_bytes, 0)
        whole_number("min_free_bytes", min_free_bytes, 0)
        self.policy = get_policy(policy, "disk")
        self._tally = Tally("disk cache")
        self.counters = self._tally.counters
        self._clock = clock
        self._unsettled: list[tuple[str, bytes | None]] = []
        self._forgotten: dict[bytes, tuple[int, int] | None] = {}
        self._introduced = Described()
        self._most_described = _FEW_DESCRIBED
        files = files or Files()
        try:
            self.path, self.read_only = layout.prepare(Path(path), files)
            self._shelf = Shelf(self.path, files, secret, pool_bytes)
            self._index = Index(self.path, read_only=self.read_only, rebuild=self._rebuild)
            try:
                self._room = Room(
                    self._shelf,
                    self._index,
                    self.policy,
                    capacity_bytes=self._default_bytes()
                    if capacity_bytes is None
                    else capacity_bytes,
                    min_free_bytes=min_free_bytes,
                    clock=clock,
                    tally=self._tally,
                )
                self._begin(None if self.read_only else capacity_bytes)
            except BaseException:
                self._index.close()
                raise
        except (OSError, sqlite3.Error, Refused) as error:
            raise store_error(f"{path} cannot keep states", error) from error

    def _default_bytes(self) -> int:
        with self._index.reading() as sql:
            return (self._shelf.free_bytes() + rows.totals(sql).used_bytes) // 4

    def _begin(self, max_bytes: int | None) -> None:
        """Clean up after the dead, and keep to the limit if it was given."""
        if self.read_only:
            return
        try:
            self._tidy(max_bytes)
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            self._index.ensure()  # made anew
            self._tidy(max_bytes)

    def _tidy(self, max_bytes: int | None) -> None:
        self._settle_the_dead()
        if max_bytes is not None:
            self._room.trim(max_bytes)

    def _settle_the_dead(self) -> None:
        rebooted = not layout.is_of_this_boot(self.path, self._shelf.files)
        try:
            done = audit.settle_the_dead(self._shelf, self._index, self._clock, rebooted=rebooted)
        except OSError as error:
            if not rebooted:
                raise
            self._tally.report("errors_read", f"{error}; the next to open compares again")
            return
        for kind, n in done.items():
            self._tally.count(kind, n)
        if rebooted:
            # After it: what ends in between is compared again.
            with self._tally.quietly("write"):
                layout.note_boot(self.path, self._shelf.files)

    def __repr__(self) -> str:
        return f"DiskStore({str(self.path)!r}, {self.capacity_bytes:,} bytes at most)"

    # -- how much ----------------------------------------------------------------------------------

    @property
    def capacity_bytes(self) -> int:
        """The limit on bytes."""
        return self._room.capacity_bytes

    def resize(self, capacity_bytes: int) -> None:
        """Set another limit; what is above it goes, by policy.

        Raises:
            InvalidValue: For a negative limit.
        """
        self._room.capacity_bytes = whole_number("capacity_bytes", capacity_bytes, 0)
        self.trim(capacity_bytes)

    @property
    def used_bytes(self) -> int:
        """Bytes that are kept or being written, by whomever; 0 when the index cannot be read."""
        with self._tally.quietly("read"), self._index.reading() as sql:
            return rows.totals(sql).used_bytes
        return 0

    def cost_bytes(self, n_bytes: int, place: Place | None = None) -> int:
        """Return the bytes that a blob counts for: with a header, in whole pages.

        A snapshot counts for its own bytes.
        """
        return counted_bytes(n_bytes, place)

    # -- writing -----------------------------------------------------------------------------------

    def put(
        self,
        name: bytes,
        n_bytes: int,
        produce: Callable[[], Buffer],
        place: Place | None = None,
        *,
        replace: bool = False,
    ) -> bool:
        """Keep the blob that `produce` returns. See `Store.put`.

        With `replace` it takes the place of one that has its name, which stays until then, and
        counts until then.

        True means that it is on the device, whatever happens next: if the machine goes down before
        its row is there, too, that is made again when the directory is opened. Costs a hash, a
        write and three flushes. A blob of which another thread or process writes the same name now
        is written by both.

        Raises:
            InvalidValue: For a negative size, or a name that is not that of the place.
            IntegrityError: When the blob has another size; nothing is kept.
        """
        whole_number("n_bytes", n_bytes, 0)
        if len(name) != NAME_BYTES or (place is not None and place.name != name):
            raise InvalidValue(f"{name.hex()} is not the name of what is put")
        cost = self.cost_bytes(n_bytes, place)
        ticket = None
        with self._tally.quietly("write"):
            self._settle()
            if self._has(name) and not replace:
                return True
            ticket = self._room.reserve(name, cost, place, replace=replace)
            if ticket is None:
                return True
        if ticket is None:
            return False
        began = entered = kept = False
        try:
            data = produce()
            if data.nbytes != n_bytes:
                raise IntegrityError(f"blob has {data.nbytes:,} bytes, {n_bytes:,} were announced")
            with self._tally.quietly("write"):
                self._shelf.write(ticket, name, data, place)
                began = True
                self._room.enter(ticket, name, n_bytes, cost, place, replace=replace)
                entered = True
                self._shelf.flush(name)
                kept = True
        finally:
            if entered and not kept:
                self.delete(name)  # it could be lost with the machine
            self._end(ticket, name if began and not entered else None)
        self._tally.count("written", kept)
        if kept and place is not None:  # what describes it may have gone before it came
            with self._tally.quietly("write"):
                self._introduce_again(place.namespace)
        return kept

    def _has(self, name: bytes) -> bool:
        """Return whether a blob is here and looks good; what looks bad is removed.

        Raises:
            Refused: When what is there must be left alone.
        """
        if self.read_only:
            raise Refused("read_only", f"{self.path} is read-only")
        with self._index.reading() as sql:
            known = rows.get(sql, name) is not None
            pending = known and rows.is_being_written(sql, name)
        if not known and self._shelf.stat(name) is None:
            return False
        try:
            self._shelf.peek(name)
        except FileNotFoundError:
            self._forget(name, None, wait=True)
        except FileRejected as error:
            if error.reason in _KEEP:
                raise Refused(error.reason, f"{self._shelf.path(name)} {error}") from None
            self._reject(name, error, wait=True)
        else:
            if pending:
                self._shelf.flush(name)  # whoever wrote it has not come to this
            return known
        return False

    def _end(self, ticket: str, failed: bytes | None) -> None:
        """End a write, see `Room.release`; what cannot be done now is tried again later."""
        with self._tally.quietly("write"):
            self._room.release(ticket, failed)
            return
        self._unsettled.append((ticket, failed))

    def _settle(self) -> None:
        """Do what could not be done before: end writes, and take out what a read found gone.

        Raises:
            OSError, sqlite3.Error, StoreError, Refused: When the directory or the index fails.
        """
        if self.read_only:
            return
        self._index.renew()
        pending, self._unsettled = self._unsettled, []
        for ticket, failed in pending:
            self._end(ticket, failed)
        while self._forgotten:
            try:
                name, identity = self._forgotten.popitem()
            except KeyError:
                break  # another thread was faster
            with self._tally.quietly("write"):
                self._forget(name, identity, wait=True)

    # -- reading -----------------------------------------------------------------------------------

    def get(self, name: bytes) -> Buffer | None:
        """Return the blob, verified and read-only, or None. Changes nothing, unless it is bad.

        Costs a read and a hash. The memory behind it is used again once no array looks into it.
        A file that is not what was put is counted, logged and removed, now if nobody writes just
        then, else before the next `put`; one that another version or another secret made is left
        alone. No writer is waited for.
        """
        return self._fetched(name, lambda: self._shelf.read(name)[1])

    def parse(self, name: bytes, parse: Callable[[Payload], T]) -> T | None:
        """Return what `parse` makes of a blob's payload, verified, or None. Else like `get`.

        Args:
            name: The blob's name.
            parse: Reads the payload piece by piece, all of it, each piece into memory of its own;
                may raise `BlobRejected`. Must change nothing outside: what it read may be refused.
        """
        return self._fetched(name, lambda: self._shelf.parse(name, parse))

    def _fetched(self, name: bytes, fetch: Callable[[], T]) -> T | None:
        """Return what `fetch` reads of a blob; see to it if it is gone or bad."""
        if self._index.closed:
            return None
        with self._tally.quietly("read"):
            try:
                return fetch()
            except (FileNotFoundError, NotADirectoryError):
                self._forget(name, None, wait=False)
            except FileRejected as error:
                self._reject(name, error, wait=False)
        return None

    def get_many(self, names: Sequence[bytes]) -> Iterator[Buffer | None]:
        """Yield each blob, or None for one that is gone, in order. See `Tier.get_many`."""
        for name in names:
            yield self.get(name)

    def find(self, blocks: Sequence[Block]) -> list[Record]:
        """Return what is kept in these blocks and begins like the prompt. See `Tier.find`.

        Costs one look-up for each block, and two for each distinct start of a span in it. An index
        that is gone or damaged finds nothing; it is made anew with the next write.
        """
        with self._tally.quietly("read"), self._index.reading() as sql, self._noticing_nonsense():
            return [record for block in blocks for record in rows.find(sql, block, self.tier)]
        return []

    @contextmanager
    def _noticing_nonsense(self) -> Iterator[None]:
        """Have the index made anew when what it says cannot be.

        The database has no checksums: it can be damaged without its noticing.
        """
        try:
            yield
        except (ValueError, TypeError) as error:
            self._index.condemn()
            raise sqlite3.DatabaseError(f"the index is damaged: {error}") from error

    def snapshots(self, namespace: bytes, since: Mark | None = None) -> tuple[list[Snapshot], Mark]:
        """Return the snapshots of a namespace, those used last at the end.

        Args:
            namespace: Its digest.
            since: What an earlier call returned: then only those that came since, unless the index
                was made anew meanwhile, which another `database` in the mark shows.

        Returns:
            They, and a mark for the next call. What went is not told: see `snapshot_names`.
        """
        with self._tally.quietly("read"), self._index.reading() as sql, self._noticing_nonsense():
            mark = Mark(*rows.newest(sql))
            after = since.sequence if since is not None and since.database == mark.database else 0
            found = rows.snapshots(sql, namespace, after)
            return [
                Snapshot(name, n_bytes, np.frombuffer(tokens, "<i4"))
                for name, n_bytes, tokens in found
            ], mark
        return [], since or Mark(b"", 0)

    def snapshot_names(self, namespace: bytes) -> list[bytes]:
        """Return the names of a namespace's snapshots. Costs a scan of the index."""
        with self._tally.quietly("read"), self._index.reading() as sql:
            return rows.snapshot_names(sql, namespace)
        return []

    def touch(self, names: Sequence[bytes], *, hit: bool = True) -> list[bytes]:
        """Note that states are wanted; return those that are not here. See `Tier.touch`."""
        if not names or self.read_only:
            return []
        with self._tally.quietly("write"), self._index.writing() as sql:
            time = rows.next_time(sql, self._clock())
            return [name for name in names if not rows.touch(sql, name, time, hit=hit)]
        return []

    def _reject(self, name: bytes, error: FileRejected, *, wait: bool) -> None:
        """Count a file that is not what was put, and remove it unless it may be somebody else's."""
        self._tally.report(f"rejected_{error.reason}", f"{self._shelf.path(name)} {error}")
        if error.reason not in _KEEP:
            self._forget(name, error.identity, wait=wait)

    def _forget(self, name: bytes, identity: tuple[int, int] | None, *, wait: bool) -> None:
        """Take out a state whose file is gone, or is this one.

        While others write it is only noted, unless `wait`.

        Raises:
            OSError, sqlite3.Error, StoreError, Refused: When the directory or the index fails.
        """
        if self.read_only:
            return
        with self._index.reading() as sql:
            known = rows.get(sql, name) is not None
        if not known and identity is None:
            return
        try:
            with self._index.writing(wait=wait) as sql:
                found = self._shelf.stat(name)
                if found is not None and identity == (found.st_dev, found.st_ino):
                    self._shelf.drop(name)
                    found = None
                if found is None:
                    self._tally.count("lost", self._room.drop(sql, [name]))
        except Busy:
            if len(self._forgotten) < _MOST_FORGOTTEN:  # reading it again notices again
                self._forgotten[name] = identity

    # -- dropping ----------------------------------------------------------------------------------

    def delete(self, name: bytes) -> bool:
        """Drop the blob, whatever hangs off it; return whether it was there."""
        with self._tally.quietly("write"), self._index.writing() as sql:
            if rows.get(sql, name) is not None:
                self._room.drop(sql, [name])
                return True
        return False

    def clear(self) -> None:
        """Drop everything but the descriptions of namespaces and what is being written."""
        with self._tally.quietly("write"):
            self._drop_all(rows.names)

    def forget_namespaces(self, namespaces: Collection[bytes]) -> None:
        """Drop all states of some namespaces, and their descriptions. Scans the index.

        What is put afterwards has a description again, if this store was told it.
        """
        with self._tally.quietly("write"):
            self._forget_all(namespaces)

    def _forget_all(self, namespaces: Collection[bytes]) -> int:
        n_gone = self._drop_all(lambda sql: rows.names_in(sql, namespaces))
        with self._index.writing() as sql:
            described = {digest for digest, _ in rows.described(sql)}
            for namespace in set(namespaces):
                introductions.drop(self._shelf, namespace)
                if namespace in described:
                    rows.forget_description(sql, namespace)
        return n_gone

    def _drop_all(self, chosen: Callable[[sqlite3.Connection], list[bytes]]) -> int:
        """Drop states until none of the chosen is left, also those that come meanwhile."""
        n_gone = 0
        self._index.renew()
        while True:
            with self._index.scanning() as sql:
                names = chosen(sql)
            if not names:
                return n_gone
            for first in range(0, len(names), _NAMES_AT_ONCE):
                with self._index.writing() as sql:
                    n_gone += self._room.drop(sql, names[first : first + _NAMES_AT_ONCE])

    def supersede(self, old: bytes, new: bytes) -> None:
        """Drop a tail whose place a longer one took, if that is here. See `Tier.supersede`."""
        with self._tally.quietly("write"), self._index.writing() as sql:
            if old != new and rows.get(sql, new) and rows.get(sql, old):
                rows.hang_off(sql, old, new)
                self._room.drop(sql, [old])
                self._tally.count("superseded")

    def trim(self, max_bytes: int) -> int:
        """Drop states by policy until no more than `max_bytes` are in use, or none can go.

        Returns:
            How many went.

        Raises:
            InvalidValue: For a negative number.
        """
        whole_number("max_bytes", max_bytes, 0)
        with self._tally.quietly("write"):
            return self._room.trim(max_bytes)
        return 0

    # -- what people ask ---------------------------------------------------------------------------

    def entries(self) -> list[DiskEntry]:
        """Return the prompts that are known to their end, the last used first.

        Costs a scan of the index, and memory for all tokens.

        Raises:
            StoreError: When the index cannot be read.
        """
        with self._asked(), self._index.scanning() as sql:
            return Catalog(sql).entries()

    def stats(self) -> DiskStats:
        """Return counts and bytes. Costs a scan of the index.

        Raises:
            StoreError: When the index cannot be read.
        """
        with self._asked(), self._index.scanning() as sql:
            return catalog.stats(sql, self.capacity_bytes, self._shelf.free_bytes())

    def remove(self, prefix: str) -> int:
        """Drop a prompt: its end, and above it what leads only there.

        Args:
            prefix: The beginning of its `DiskEntry.id`.

        Returns:
            The bytes that went.

        Raises:
            InvalidValue: When no id begins so, or more than one.
            StoreError: When the directory or the index fails.
        """
        freed = 0
        with self._asked():
            with self._index.scanning() as sql:
                found = Catalog(sql)
                ends = found.ends()
                own = found.own(ends[catalog.resolve(prefix, ends, "prompt")])
            with self._index.writing() as sql:
                for row in own:
                    if rows.hangs_off(sql, row):
                        break  # something was added meanwhile
                    self._room.drop(sql, [row.name])
                    freed += row.n_bytes
        return freed

    def remove_namespace(self, prefix: str) -> int:
        """Drop all states of a namespace, and its description.

        Args:
            prefix: The beginning of its hex digest.

        Returns:
            How many states went.

        Raises:
            InvalidValue: When no digest begins so, or more than one.
            StoreError: When the directory or the index fails.
        """
        with self._asked():
            with self._index.scanning() as sql:
                known = set(catalog.stats(sql, 0, 0).namespaces)
            known.update(digest.hex() for digest in self.namespaces())
            digest = bytes.fromhex(catalog.resolve(prefix, known, "namespace"))
            return self._forget_all([digest])

    def export(
        self,
        target: Target,
        ids: Iterable[str] | None = None,
        progress: Progress | None = None,
    ) -> int:
        """Write states into one file. See `archive.export`.

        Args:
            target: A path, or a binary file that can be positioned.
            ids: Beginnings of the ids of prompts; with each goes all that is along it. None: all.
            progress: Called with how many states are written, and of how many.

        Returns:
            How many states were written.

        Raises:
            InvalidValue: When no id begins so, or more than one.
            StoreError: When the file cannot be written, or the index not be read.
        """
        with self._asked():
            with self._index.scanning() as sql:
                names = rows.in_order(sql) if ids is None else Catalog(sql).along(ids)
                used = rows.namespaces_of(sql, names)
            known = {digest: text for digest, text in self.namespaces().items() if digest in used}
            return archive.export(self._shelf, names, known, target, self._shelf.key, progress)

    def import_(self, source: Target, progress: Progress | None = None) -> Imported:
        """Put the states of a file that `export` wrote. See `archive.import_`.

        Raises:
            BlobRejected: When something in it is not what was exported, or was sealed with another
                secret; nothing is put then.
            StoreError: When the file cannot be read.
        """
        with self._asked():
            return archive.import_(self, source, self._shelf.key, progress)

    @contextmanager
    def _asked(self) -> Iterator[None]:
        """Raise what goes wrong outside: a person asked, and is to know."""
        try:
            yield
        except (OSError, sqlite3.Error, Refused) as error:
            raise store_error(str(self.path), error) from error

    # -- namespaces --------------------------------------------------------------------------------

    def introduce(self, namespace: bytes, description: Mapping[str, Any]) -> None:
        """Remember what the parts of a namespace are, JSON-ready.

        One whose description has a true `rolling` is of a family whose segments are of no use
        without a checkpoint: they go with the last one below them.

        Costs a look-up where it is known. Descriptions are not counted: they are a page each, and
        those of namespaces without states go before there are twice as many of them as of others.
        """
        said = parse_description(json.dumps(dict(description), sort_keys=True))
        if said is None:
            self._tally.report("refused_description", f"{namespace.hex()} is described at length")
            return
        self._introduced.learn(namespace, said)
        if self.read_only or self._index.closed:
            return
        with self._tally.quietly("write"):
            self._introduce_again(namespace)

    def _introduce_again(self, namespace: bytes) -> None:
        """Write the description of a namespace, if it is not here, as far as it was told.

        Raises:
            OSError, sqlite3.Error, StoreError, Refused: When the directory or the index fails.
        """
        said = self._introduced.get(namespace)
        if said is None:
            return
        with self._index.reading() as sql:
            is_known = rows.is_introduced(sql, namespace, said)
        if not is_known or not introductions.has(self._shelf, namespace):
            introductions.write(self._shelf, namespace, json.dumps(said, sort_keys=True))
        if not is_known:
            with self._index.writing() as sql:
                rows.introduce(sql, namespace, said)
                n_described = rows.count_described(sql)
            if n_described > self._most_described:
                self._drop_descriptions(but=namespace)

    def _drop_descriptions(self, *, but: bytes) -> None:
        """Drop the descriptions of namespaces without states.

        Who writes the first state of one just now writes its description again.
        """
        with self._index.writing() as sql:
            for namespace in rows.described_in_vain(sql):
                if namespace != but:
                    introductions.drop(self._shelf, namespace)
                    rows.forget_description(sql, namespace)
            self._most_described = max(_FEW_DESCRIBED, 2 * rows.count_described(sql))

    def namespaces(self) -> dict[bytes, dict[str, Any]]:
        """Return the descriptions of the namespaces that were introduced.

        What is none, because the index is damaged, is left out, counted and logged.
        """
        known: dict[bytes, dict[str, Any]] = {}
        with self._tally.quietly("read"), self._index.reading() as sql:
            for digest, text in rows.described(sql):
                said = parse_description(text)
                if said is None or len(digest) != NAME_BYTES:
                    self._tally.report(
                        "rejected_description", f"what describes {digest.hex()} is damaged"
                    )
                else:
                    known[digest] = said
        return known

    # -- the rest of a store -----------------------------------------------------------------------

    def __contains__(self, name: object) -> bool:
        if isinstance(name, bytes):
            with self._tally.quietly("read"), self._index.reading() as sql:
                return rows.get(sql, name) is not None
        return False

    def __len__(self) -> int:
        with self._tally.quietly("read"), self._index.reading() as sql:
            return rows.totals(sql).n_states
        return 0

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[bytes]:
        with self._tally.quietly("read"), self._index.reading() as sql:
            return iter(rows.names(sql))
        return iter(())

    def check(self, *, fix: bool = False) -> None:
        """Compare files, index and counts; reads and verifies every file. See `audit`."""
        report = self.audit(fix=fix)
        if report.problems and not fix:
            raise IntegrityError(str(report))

    def audit(
        self, *, fix: bool = False, verify: bool = True, progress: Progress | None = None
    ) -> DiskReport:
        """Compare the files with the index, and what is counted with what is there.

        Args:
            fix: Index what is good, remove what is not and what the dead left behind, count again.
                What a newer version or another secret made is left alone.
            verify: Read and verify all payloads; else only headers and sizes.
            progress: Called after each file with how many are done, and of how many.

        Returns:
            What was found.

        Raises:
            StoreError: When the directory or the index cannot be read.
        """
        with self._asked():
            return audit.audit(
                self._shelf,
                self._index,
                self._clock,
                fix=fix,
                verify=verify,
                progress=progress,
            )

    def close(self) -> None:
        """Let go of files and connections; then everything is a miss. Again: does nothing."""
        if self._index.closed:
            return
        with self._tally.quietly("write"):
            self._room.leave()
        self._index.close()

    def __enter__(self) -> DiskStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _rebuild(self, sql: sqlite3.Connection) -> None:
        n_states, n_refused, n_undescribed = audit.rebuild(self._shelf, sql)
        if n_undescribed:
            self._tally.report(
                "rejected_description", f"{n_undescribed:,} descriptions are damaged"
            )
        for namespace, said in self._introduced.items():
            rows.introduce(sql, namespace, said)
        if n_states or n_refused:
            self._tally.report(
                "rebuilt",
                f"made the index of {self.path} anew from {n_states:,} files; "
                f"{n_refused:,} others were not understood",
            )
