"""The index of a directory of states: an SQLite database that can be made again from the files.

This is the database itself: its tables, who may use it when, and when it is thrown away. What is
asked of it stands in `rows.py`.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from llamakeep.errors import IndexDamaged, StoreError
from llamakeep.stores.disk.files import private_file, refuse_foreign
from llamakeep.tally import Refused

INDEX_FILE = "index.sqlite3"
LOCK_FILE = "lock"
SIDE_FILES = (INDEX_FILE, f"{INDEX_FILE}-wal", f"{INDEX_FILE}-shm", f"{INDEX_FILE}-journal")

_BUSY_SECONDS = 30.0
_APPLICATION_ID = 0x6C6B6462
_WAL_LIMIT_BYTES = 16 << 20
_LOCK = os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)

SCHEMA = """
CREATE TABLE states (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    name BLOB NOT NULL UNIQUE,
    kind INTEGER NOT NULL,
    namespace BLOB,
    block BLOB,
    origin INTEGER,
    start INTEGER,
    first INTEGER,
    stop INTEGER,
    next_block BLOB,
    parent BLOB,
    n_bytes INTEGER NOT NULL,
    file_bytes INTEGER NOT NULL,
    created REAL NOT NULL,
    last_used REAL NOT NULL,
    hits INTEGER NOT NULL,
    tokens BLOB
);
CREATE INDEX by_place ON states (block, start, first) WHERE block IS NOT NULL;
CREATE INDEX by_parent ON states (parent) WHERE parent IS NOT NULL;
CREATE INDEX by_next_block ON states (next_block) WHERE next_block IS NOT NULL;
CREATE INDEX orphans ON states (block) WHERE parent IS NULL AND (kind = 2 OR start > origin);
CREATE TABLE totals (
    used_bytes INTEGER NOT NULL,
    opaque_bytes INTEGER NOT NULL,
    n_states INTEGER NOT NULL,
    newest REAL NOT NULL,
    identity BLOB NOT NULL
);
INSERT INTO totals VALUES (0, 0, 0, 0.0, randomblob(16));
CREATE TRIGGER count_in AFTER INSERT ON states BEGIN
    UPDATE totals SET
        used_bytes = used_bytes + new.file_bytes,
        opaque_bytes = opaque_bytes + CASE new.kind WHEN 0 THEN new.file_bytes ELSE 0 END,
        n_states = n_states + 1;
END;
CREATE TRIGGER count_out AFTER DELETE ON states BEGIN
    UPDATE totals SET
        used_bytes = used_bytes - old.file_bytes,
        opaque_bytes = opaque_bytes - CASE old.kind WHEN 0 THEN old.file_bytes ELSE 0 END,
        n_states = n_states - 1;
END;
CREATE TABLE writing (
    ticket TEXT PRIMARY KEY,
    name BLOB NOT NULL,
    n_bytes INTEGER NOT NULL,
    owner TEXT NOT NULL,
    parent BLOB,
    block BLOB
);
CREATE TABLE owners (
    key TEXT PRIMARY KEY,
    pid INTEGER NOT NULL,
    started REAL NOT NULL,
    machine TEXT NOT NULL,
    boot TEXT NOT NULL,
    seen REAL NOT NULL
);
CREATE TABLE namespaces (
    digest BLOB PRIMARY KEY,
    description TEXT NOT NULL,
    rolling INTEGER NOT NULL
);
"""
"""`states` has a row for each file. `kind`: 0 opaque, 1 segment, 2 checkpoint, 3 snapshot.
`file_bytes` is what it counts for, see `counted_bytes`; `identity` tells this database from one
that is made in its place later, which numbers its rows anew. `tokens` are those
of the block up to `stop`, int32. `parent` is the name of the segment in the same block that the
state hangs off. `writing` has a row for each file that is not indexed yet: its bytes count."""


class Busy(Exception):
    """Others write, or the database has to be made anew, and that was not to be waited for."""


class Index:
    """Connections to the database: one looks up, one scans, one writes. From any thread.

    Each serves one thread at a time, and those that read wait for no writer. A writer holds the
    database's lock for a few rows at a time, never while a state is read or written. Connections
    do not survive a fork: they are closed before it and made again on both sides when needed.

    When the database is missing, damaged or another program's, or its file was replaced, it is
    made anew with `rebuild` when it is opened or written to next, in one transaction, while others
    that write wait; those that read fail until then.

    Args:
        directory: Where the database is.
        read_only: Write nothing, not even a lock.
        rebuild: Called in the transaction that makes an empty database, to fill it.

    Raises:
        IndexDamaged: When the database cannot be used, and nothing may be written.
        StoreError: When it can be neither used nor made.
    """

    def __init__(
        self, directory: Path, *, read_only: bool, rebuild: Callable[[sqlite3.Connection], None]
    ) -> None:
        self.path = directory / INDEX_FILE
        self.read_only = read_only
        self.closed = False
        self._rebuild = rebuild
        self._condemned = False
        self._connections: dict[str, sqlite3.Connection] = {}
        self._identities: dict[str, tuple[int, int]] = {}
        # In this order, where more than one is taken.
        self._locks = {which: threading.Lock() for which in ("scanner", "reader", "writer")}
        _OPEN.add(self)
        with self._locks["writer"]:
            self._prepare()

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Lend the connection for short look-ups.

        Raises:
            Refused: After `close`.
            sqlite3.Error: When the database fails.
            StoreError, OSError: When it is gone, and was not made anew yet.
        """
        with self._lend("reader") as sql:
            yield sql

    @contextmanager
    def scanning(self) -> Iterator[sqlite3.Connection]:
        """Lend the connection for what takes long, so that look-ups need not wait for it.

        Raises:
            Refused, sqlite3.Error, StoreError, OSError: As `reading` does.
        """
        with self._lend("scanner") as sql:
            yield sql

    @contextmanager
    def _lend(self, which: str) -> Iterator[sqlite3.Connection]:
        with self._locks[which]:
            if which not in self._connections or self._is_replaced(which):
                # Not made anew here if it is gone: who reads does not wait for all files.
                self._drop(which)
                self._connect(which)
            with self._noticing_damage(unless="no such"):  # it may just be made
                yield self._connections[which]

    @contextmanager
    def writing(self, *, wait: bool = True) -> Iterator[sqlite3.Connection]:
        """Lend the connection that writes, in a transaction; undone when something is raised.

        Args:
            wait: For others that write, and for the database to be made anew if need be.

        Raises:
            Busy: When this would have to be waited for.
            Refused: After `close`, and when nothing may be written.
            sqlite3.Error: When the database fails, or stays locked for too long.
            StoreError, OSError: When it had to be made anew and could not be.
        """
        if self.read_only:
            raise Refused("read_only", f"{self.path.parent} is read-only")
        if not self._locks["writer"].acquire(blocking=wait):
            raise Busy
        try:
            if self.closed:
                raise Refused("closed", f"{self.path.parent} is closed")
            anew = self._condemned or self._is_replaced("writer")
            if not wait and (anew or "writer" not in self._connections):
                raise Busy
            if anew:
                self._prepare()
            if "writer" not in self._connections:
                self._connect("writer")
            sql = self._connections["writer"]
            with self._noticing_damage():
                _begin(sql, wait)
                try:
                    yield sql
                    sql.execute("COMMIT")
                except BaseException:
                    # A failed COMMIT may have ended the transaction, or may not.
                    if sql.in_transaction:
                        sql.execute("ROLLBACK")
                    raise
        finally:
            self._locks["writer"].release()

    def renew(self) -> None:
        """Make the database anew now if that is due. Else costs a `stat` call.

        Raises:
            Refused, sqlite3.Error, StoreError, OSError: As `writing` does.
        """
        if not self.read_only and (self._condemned or not self.path.exists()):
            with self.writing():
                pass

    def close(self) -> None:
        """Close all connections, once nobody uses them."""
        for which, lock in self._locks.items():
            with lock:
                self.closed = True
                self._drop(which)
        _OPEN.discard(self)

    def ensure(self) -> None:
        """Make the database anew now if that is due, or if its pages are damaged. Reads it all.

        Raises:
            Refused, sqlite3.Error, StoreError, OSError: As `writing` does.
        """
        self.renew()
        try:
            with self.scanning() as sql:
                (found,) = sql.execute("PRAGMA quick_check(1)").fetchone()
            if found != "ok":
                self.condemn()
        except sqlite3.DatabaseError:
            if not self._condemned:
                raise
        self.renew()

    def condemn(self) -> None:
        """Have the database made anew when it is written to next."""
        self._condemned = True

    # -- connections -------------------------------------------------------------------------------

    def _connect(self, which: str) -> sqlite3.Connection:
        if self.closed:
            raise Refused("closed", f"{self.path.parent} is closed")
        info = self.path.lstat()
        if stat.S_ISLNK(info.st_mode):
            raise StoreError(f"{self.path} is a symbolic link; a cache may not lead elsewhere")
        if self.read_only:
            sql = self._open_read_only()
        else:
            sql = self._open(self.path.as_uri(), "rw")
            if which == "writer":  # to change this, others have to be waited for
                sql.execute("PRAGMA journal_mode = WAL").fetchall()
        self._connections[which] = sql
        self._identities[which] = (info.st_dev, info.st_ino)
        return sql

    def _open(self, uri: str, mode: str) -> sqlite3.Connection:
        sql = sqlite3.connect(
            f"{uri}?mode={mode}",
            timeout=_BUSY_SECONDS,
            isolation_level=None,
            check_same_thread=False,
            uri=True,
        )
        try:
            sql.execute("PRAGMA trusted_schema = OFF")
            sql.execute("PRAGMA cell_size_check = ON")
            if mode == "rw":
                sql.execute("PRAGMA synchronous = NORMAL")
                sql.execute(f"PRAGMA journal_size_limit = {_WAL_LIMIT_BYTES}").fetchall()
        except BaseException:
            sql.close()
            raise
        return sql

    def _open_read_only(self) -> sqlite3.Connection:
        # A database in WAL mode needs a file beside it, which may be neither there nor be made.
        uri = self.path.as_uri()
        try:
            sql = self._open(uri, "ro")
        except sqlite3.OperationalError:
            return self._open(uri, "ro&immutable=1")
        try:
            sql.execute("SELECT 1 FROM sqlite_master").fetchall()
        except sqlite3.OperationalError:
            sql.close()
            return self._open(uri, "ro&immutable=1")
        return sql

    def _drop(self, which: str) -> None:
        sql = self._connections.pop(which, None)
        if sql is not None:
            sql.close()

    def _is_replaced(self, which: str) -> bool:
        """Whether the database's file is gone, or is another than the one that was opened."""
        try:
            info = self.path.lstat()
        except FileNotFoundError:
            return True
        return (info.st_dev, info.st_ino) != self._identities.get(which)

    @contextmanager
    def _noticing_damage(self, unless: str | None = None) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            if is_damage(error) and not (unless and unless in str(error)):
                self.condemn()
            raise
        except (TypeError, AttributeError, UnicodeDecodeError, OverflowError) as error:
            # A value of a type that no column of ours has: nothing seals them.
            self.condemn()
            raise sqlite3.DatabaseError(f"malformed index: {error}") from error

    # -- making it anew ----------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Make sure that there is a database of ours. The writer's lock is held."""
        for name in SIDE_FILES:
            if self.read_only:
                if (self.path.parent / name).is_symlink():
                    raise StoreError(f"{self.path.parent / name} is a symbolic link")
            else:
                refuse_foreign(self.path.parent / name)
        self._drop("writer")
        if self.read_only:
            if not self._is_ours():
                raise IndexDamaged(f"{self.path} cannot be used, nor be made anew: read-only")
            return
        with opening(self.path.parent):
            if self._is_replaced("writer"):
                self._condemned = False  # whatever is there now, it is not what was found damaged
            if self._condemned or not self._is_ours():
                for name in SIDE_FILES:
                    (self.path.parent / name).unlink(missing_ok=True)
                self._make()
            self._condemned = False

    def _is_ours(self) -> bool:
        """Whether the database has exactly our tables; the writer is connected then."""
        try:
            if not self.path.stat().st_size:
                return False
            sql = self._connect("writer")
            if _schema_of(sql) == _schema() and sql.execute("SELECT 1 FROM totals").fetchone():
                return True
        except FileNotFoundError:
            return False
        except sqlite3.DatabaseError as error:
            self._drop("writer")
            if is_damage(error):
                return False
            raise
        self._drop("writer")
        return False

    def _make(self) -> None:
        private_file(self.path)
        sql = self._connect("writer")
        try:
            sql.execute("BEGIN IMMEDIATE")
            for statement in _statements():
                sql.execute(statement)
            sql.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            self._rebuild(sql)
            sql.execute("COMMIT")
        except BaseException:
            self._drop("writer")
            raise


def _begin(sql: sqlite3.Connection, wait: bool) -> None:
    if wait:
        sql.execute("BEGIN IMMEDIATE")
        return
    sql.execute("PRAGMA busy_timeout = 0").fetchall()
    try:
        sql.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError as error:
        if "locked" in str(error) or "busy" in str(error):
            raise Busy from None
        raise
    finally:
        sql.execute(f"PRAGMA busy_timeout = {int(_BUSY_SECONDS * 1000)}").fetchall()


def store_error(message: str, cause: Exception) -> StoreError:
    """Return what to raise to somebody who asked, because of what went wrong below."""
    damaged = isinstance(cause, sqlite3.Error) and is_damage(cause)
    return (IndexDamaged if damaged else StoreError)(f"{message}: {cause}")


def is_damage(error: sqlite3.Error) -> bool:
    """Return whether the error says that the database's file is damaged or none."""
    words = str(error)
    return any(word in words for word in ("malformed", "not a database", "no such", "corrupt"))


def _statements() -> list[str]:
    """Return the schema's statements one by one; a trigger is one with its body."""
    found, begun = [], ""
    for line in SCHEMA.splitlines(keepends=True):
        begun += line
        if sqlite3.complete_statement(begun):
            found.append(begun)
            begun = ""
    return found


def _schema_of(sql: sqlite3.Connection) -> list[tuple[str, str]]:
    return sql.execute(
        "SELECT name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_%' ORDER BY name"
    ).fetchall()


@lru_cache(maxsize=1)
def _schema() -> list[tuple[str, str]]:
    sql = sqlite3.connect(":memory:")
    try:
        sql.executescript(SCHEMA)
        return _schema_of(sql)
    finally:
        sql.close()


# -- one at a time -------------------------------------------------------------------------------

_OPENING = threading.Lock()


@contextmanager
def opening(directory: Path) -> Iterator[None]:
    """Let only one thread of one process at a time prepare the directory. Waits for the others."""
    # A lock on a record belongs to the process: a forked child has no part in it, and it ends with
    # the process. Threads need another.
    path = directory / LOCK_FILE
    with _OPENING:
        private_file(path)
        with open(os.open(path, _LOCK), "r+b") as file:
            if sys.platform == "win32":
                import msvcrt

                msvcrt.locking(file.fileno(), msvcrt.LK_LOCK, 1)
                try:
                    yield
                finally:
                    file.seek(0)
                    msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)
            else:
                import fcntl

                fcntl.lockf(file, fcntl.LOCK_EX)
                yield


# -- forks ---------------------------------------------------------------------------------------

_OPEN: weakref.WeakSet[Index] = weakref.WeakSet()
_FORKING = threading.RLock()
_held: list[threading.Lock] = []


def _before_fork() -> None:
    _FORKING.acquire()
    for index in list(_OPEN):
        for which, lock in index._locks.items():
            lock.acquire()
            _held.append(lock)
            index._drop(which)
    # Last: who writes may wait for it.
    _OPENING.acquire()
    _held.append(_OPENING)


def _after_fork() -> None:
    while _held:
        _held.pop().release()
    _FORKING.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork
    )
