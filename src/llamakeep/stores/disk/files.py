"""The seam between a store and the file system: every call that writes, reads or drops a blob.

No call follows a symbolic link in the last three parts of a path, and nothing of a store lies
deeper, so that a link that was planted in a store's directory leads nowhere. Where the system can,
each part is opened relative to the one before, so that none becomes a link in between. Tests hand
in a `Files` of their own, in which a call fails.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import stat
import sys
from contextlib import suppress
from pathlib import Path

from llamakeep.errors import BlobRejected, StoreError

PAGE_BYTES = 4096
"""Files occupy whole pages of this size."""

_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_DIRECTORY = getattr(os, "O_DIRECTORY", 0)
_COMMON = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0) | _NOFOLLOW
_READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | _COMMON  # a planted pipe must not block
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _COMMON
_RELATIVE = {os.open, os.rename, os.unlink, os.stat, os.mkdir} <= os.supports_dir_fd
_WALK = getattr(os, "O_PATH", os.O_RDONLY) | _DIRECTORY | _COMMON
_LINK = (errno.ELOOP, errno.EMLINK)


def on_disk(n_bytes: int) -> int:
    """Return the bytes that a file of `n_bytes` occupies."""
    return -(-n_bytes // PAGE_BYTES) * PAGE_BYTES


class Files:
    """The file system, as it is. From any thread."""

    def free_bytes(self, path: Path) -> int:
        """Return what an ordinary user can still write to the file system of `path`."""
        return shutil.disk_usage(path).free

    def writable(self, path: Path) -> bool:
        """Return whether files can be made in the directory."""
        return os.access(path, os.W_OK | os.X_OK)

    def create(self, path: Path) -> io.FileIO:
        """Return a new file, open for writing, that only its owner can read.

        Raises:
            OSError: Also when something of that name is there.
        """
        with _parent(path) as parent:
            return io.FileIO(os.open(_within(path, parent), _CREATE, 0o600, dir_fd=parent), "w")

    def write(self, file: io.FileIO, data: memoryview) -> None:
        """Write all of `data`."""
        done = 0
        while done < len(data):
            done += file.write(data[done:])

    def flush(self, file: io.FileIO) -> None:
        """Return when what was written is on the device."""
        if sys.platform == "darwin":
            import fcntl

            fcntl.fcntl(file.fileno(), fcntl.F_FULLFSYNC)
        else:
            os.fsync(file.fileno())

    def rename(self, old: Path, new: Path) -> None:
        """Give a file the name `new`, whose directory exists; a file of that name is replaced."""
        with _parent(old) as source, _parent(new) as target:
            if source is None or target is None:
                os.replace(old, new)
            else:
                os.rename(old.name, new.name, src_dir_fd=source, dst_dir_fd=target)

    def flush_directory(self, path: Path) -> None:
        """Return when the names in the directory are on the device, where the system can tell."""
        if sys.platform != "win32":
            with _Directory(str(path), os.O_RDONLY | _DIRECTORY | _COMMON) as number:
                if number is not None:
                    os.fsync(number)

    def make_directory(self, path: Path) -> None:
        """Make a directory that only its owner can enter, unless it is there."""
        with suppress(FileExistsError), _parent(path) as parent:
            os.mkdir(_within(path, parent), 0o700, dir_fd=parent)

    def listing(self, path: Path) -> list[tuple[str, bool]]:
        """Return what is in a directory, sorted: names, and whether it is a directory, no link.

        One that is missing is empty.

        Raises:
            BlobRejected: When a link leads there.
            OSError: When it cannot be read.
        """
        with (
            suppress(FileNotFoundError),
            _Directory(str(path), os.O_RDONLY | _DIRECTORY | _COMMON) as number,
            os.scandir(path if number is None or os.scandir not in os.supports_fd else number) as (
                entries
            ),
        ):
            return sorted((entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries)
        return []

    def open(self, path: Path) -> tuple[io.FileIO, os.stat_result]:
        """Return a regular file, open for reading, and what it is.

        Raises:
            BlobRejected: When it is a link or no regular file.
            OSError: When it cannot be opened.
        """
        with _parent(path) as parent:
            if not _NOFOLLOW and stat.S_ISLNK(path.lstat().st_mode):
                raise BlobRejected(f"{path} is a symbolic link", reason="symlink")
            try:
                number = os.open(_within(path, parent), _READ, dir_fd=parent)
            except OSError as error:
                if error.errno in _LINK:
                    raise BlobRejected(f"{path} is a symbolic link", reason="symlink") from None
                if error.errno == errno.ENXIO:
                    raise BlobRejected(f"{path} is a socket", reason="foreign") from None
                raise
        file = io.FileIO(number, "r")
        info = os.fstat(number)
        if not stat.S_ISREG(info.st_mode):
            file.close()
            raise BlobRejected(f"{path} is no regular file", reason="foreign")
        return file, info

    def stat(self, path: Path) -> os.stat_result | None:
        """Return what is of that name, a link itself if it is one; None for nothing."""
        with suppress(FileNotFoundError), _parent(path) as parent:
            return os.stat(_within(path, parent), dir_fd=parent, follow_symlinks=False)
        return None

    def unlink(self, path: Path) -> None:
        """Remove a file, or a link itself; nothing happens when there is none."""
        with suppress(FileNotFoundError), _parent(path) as parent:
            os.unlink(_within(path, parent), dir_fd=parent)


class _Directory:
    """An open directory, unless it or the one that it is in is a link. Costs two `open` calls.

    `with` gives its descriptor, or None where the system cannot name files relative to one.

    Raises:
        BlobRejected: When a link leads there.
    """

    __slots__ = ("_flags", "_number", "_path")

    def __init__(self, path: str, flags: int = _WALK) -> None:
        self._path = path
        self._flags = flags
        self._number: int | None = None

    def __enter__(self) -> int | None:
        above, name = os.path.split(self._path)
        if not _RELATIVE:
            for each in (above, self._path):
                if stat.S_ISLNK(os.lstat(each).st_mode):
                    raise BlobRejected(f"{each} is a symbolic link", reason="symlink")
            return None
        outer = _enter(above, above, None, _WALK)
        try:
            self._number = _enter(self._path, name or ".", outer, self._flags)
        finally:
            os.close(outer)
        return self._number

    def __exit__(self, *_: object) -> None:
        if self._number is not None:
            os.close(self._number)


def _parent(path: Path) -> _Directory:
    return _Directory(os.path.dirname(path))


def _enter(path: str, name: str, within: int | None, flags: int) -> int:
    try:
        return os.open(name, flags, dir_fd=within)
    except OSError as error:
        if error.errno in _LINK or (error.errno == errno.ENOTDIR and os.path.islink(path)):
            raise BlobRejected(f"{path} is a symbolic link", reason="symlink") from None
        raise


def _within(path: Path, parent: int | None) -> str:
    return str(path) if parent is None else path.name


def private_directory(path: Path) -> None:
    """Make a directory that only its owner can enter, or make one that is there so.

    Raises:
        StoreError: When it is a link, no directory, or another user's.
        OSError: When it can be neither made nor changed.
    """
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    _make_private(path, path.lstat(), stat.S_IFDIR, 0o700)


def private_file(path: Path) -> None:
    """Make a file that only its owner can read, or make one that is there so.

    Raises:
        StoreError: When it is a link, no file, or another user's.
        OSError: When it can be neither made nor changed.
    """
    with suppress(FileExistsError):
        os.close(os.open(path, _CREATE, 0o600))
    refuse_foreign(path)


def refuse_foreign(path: Path) -> None:
    """Tighten a file of ours; a missing one is fine.

    Raises:
        StoreError: When it is a link, no file, or another user's.
    """
    with suppress(FileNotFoundError):
        _make_private(path, path.lstat(), stat.S_IFREG, 0o600)


def _make_private(path: Path, info: os.stat_result, kind: int, mode: int) -> None:
    _refuse(path, info, kind)
    if not hasattr(os, "geteuid") or not info.st_mode & 0o077:
        return
    # Not a descriptor for reading: closing one of a database would end the locks that SQLite has
    # on it in this process. One that only names the file does not.
    names = hasattr(os, "O_PATH") and os.path.isdir("/proc/self/fd")
    number = os.open(path, (getattr(os, "O_PATH", 0) if names else _READ) | _COMMON)
    try:
        _refuse(path, os.fstat(number), kind)
        if names:
            os.chmod(f"/proc/self/fd/{number}", mode)
        else:
            os.fchmod(number, mode)
    finally:
        os.close(number)


def _refuse(path: Path, info: os.stat_result, kind: int) -> None:
    """Raise unless it is a file or directory of our own."""
    if stat.S_ISLNK(info.st_mode):
        raise StoreError(f"{path} is a symbolic link; a cache may not lead elsewhere")
    if stat.S_IFMT(info.st_mode) != kind:
        raise StoreError(f"{path} is not a {'directory' if kind == stat.S_IFDIR else 'file'}")
    if hasattr(os, "geteuid") and info.st_uid != os.geteuid():
        raise StoreError(f"{path} belongs to user {info.st_uid}, not to {os.geteuid()}")
