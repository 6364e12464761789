"""The seam between a store and the file system: every call that writes, reads or drops a blob.

No call follows a symbolic link in the last two parts of a path, so that a link that was planted in
a store's directory leads nowhere. Tests hand in a `Files` of their own, in which a call fails.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from llamakeep.errors import BlobRejected, StoreError

PAGE_BYTES = 4096
"""Files occupy whole pages of this size."""

_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_DIRECTORY = getattr(os, "O_DIRECTORY", 0)
_COMMON = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0) | _NOFOLLOW
_READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | _COMMON  # a planted pipe must not block
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _COMMON
_RELATIVE = {os.open, os.rename, os.unlink, os.stat} <= os.supports_dir_fd
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def on_disk(n_bytes: int) -> int:
    """Return the bytes that a file of `n_bytes` occupies."""
    return -(-n_bytes // PAGE_BYTES) * PAGE_BYTES


def is_full(error: BaseException) -> bool:
    """Return whether the error says that there is no room left."""
    return isinstance(error, OSError) and error.errno in _FULL


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
            directory = os.open(path, os.O_RDONLY | _DIRECTORY | _NOFOLLOW)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)

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
                if error.errno in (errno.ELOOP, errno.EMLINK):
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


@contextmanager
def _parent(path: Path) -> Iterator[int | None]:
    """Open the directory of `path`, which must be none that a link leads to.

    Yields:
        Its descriptor, or None where the system cannot name files relative to one.
    """
    directory = path.parent
    if not _RELATIVE:
        if stat.S_ISLNK(directory.lstat().st_mode):
            raise BlobRejected(f"{directory} is a symbolic link", reason="symlink")
        yield None
        return
    try:
        number = os.open(directory, os.O_RDONLY | _DIRECTORY | _COMMON)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK) or (
            error.errno == errno.ENOTDIR and directory.is_symlink()
        ):
            raise BlobRejected(f"{directory} is a symbolic link", reason="symlink") from None
        raise
    try:
        yield number
    finally:
        os.close(number)


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
    info = path.lstat()
    if stat.S_ISLNK(info.st_mode):
        raise StoreError(f"{path} is a symbolic link; a cache may not lead elsewhere")
    if not stat.S_ISDIR(info.st_mode):
        raise StoreError(f"{path} is not a directory")
    if hasattr(os, "geteuid"):
        if info.st_uid != os.geteuid():
            raise StoreError(f"{path} belongs to user {info.st_uid}, not to {os.geteuid()}")
        if info.st_mode & 0o077:
            path.chmod(0o700)


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
    try:
        info = path.lstat()
    except FileNotFoundError:
        return
    if stat.S_ISLNK(info.st_mode):
        raise StoreError(f"{path} is a symbolic link; a cache may not lead elsewhere")
    if not stat.S_ISREG(info.st_mode):
        raise StoreError(f"{path} is not a file")
    if hasattr(os, "geteuid"):
        if info.st_uid != os.geteuid():
            raise StoreError(f"{path} belongs to user {info.st_uid}, not to {os.geteuid()}")
        if info.st_mode & 0o077:
            path.chmod(0o600)
