"""A directory of states: whether it is one, and of which version."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from llamakeep.errors import StoreError
from llamakeep.modelfile import CACHE_FILE, PARTIAL_PREFIX
from llamakeep.stores.disk.files import Files, private_directory, refuse_foreign
from llamakeep.stores.disk.index import LOCK_FILE, SIDE_FILES, opening
from llamakeep.stores.disk.introductions import DESCRIBED
from llamakeep.stores.disk.owners import this_boot
from llamakeep.stores.disk.shelf import BLOBS, TEMPORARY, replace

FORMAT_FILE = "FORMAT"
FORMAT = "llamakeep states, version "
VERSION = 1

BOOT_FILE = "boot"

OWN = "llamakeep"
"""A directory of states in one that holds other things."""

_MAX_BOOT_BYTES = 256
_OURS = {FORMAT_FILE, LOCK_FILE, BOOT_FILE, BLOBS, DESCRIBED, TEMPORARY, *SIDE_FILES, CACHE_FILE}
_HARMLESS = {"lost+found"}


def prepare(path: Path, files: Files) -> tuple[Path, bool]:
    """Make a directory one of states, private to its owner, unless it is one.

    Args:
        path: The directory; it may be reached by links, what is in it may not.
        files: The file system.

    Returns:
        The directory, and whether it can only be read.

    Raises:
        StoreError: When it holds other things, is another user's, or of a newer version.
        OSError: When it cannot be made or read.
    """
    root = Path(os.path.realpath(path.expanduser()))
    if not root.exists():
        root.parent.mkdir(parents=True, exist_ok=True)
        private_directory(root)
    version = _version(root)
    if not files.writable(root):
        if not version:
            raise StoreError(f"{root} is read-only and holds no states")
        _refuse_others(root)
        return root, True
    if not version:
        # A directory is made private, and told what is not ours: so not one of other things.
        others = strangers(root)
        if others:
            raise StoreError(f"{root} is no cache of states: it holds {others[0]!r}")
    private_directory(root)
    for name in (FORMAT_FILE, LOCK_FILE, BOOT_FILE):
        refuse_foreign(root / name)
    with opening(root):
        private_directory(root / BLOBS)
        private_directory(root / DESCRIBED)
        private_directory(root / TEMPORARY)
        if not _version(root):
            _mark(root, files)
    return root, False


def home(path: Path) -> Path:
    """Return where the states of a cache in `path` belong: there, or below what lies there.

    A directory that holds other things, as those of other caches, keeps them untouched; the states
    get one of their own in it.
    """
    path = path.expanduser()
    try:
        taken = not (path / FORMAT_FILE).exists() and strangers(path)
    except (FileNotFoundError, NotADirectoryError):
        return path
    return path / OWN if taken else path


def strangers(root: Path) -> list[str]:
    """Return what a directory holds that no directory of states does, sorted.

    Raises:
        OSError: When it cannot be read.
    """
    return sorted(
        name
        for name in set(os.listdir(root)) - _OURS - _HARMLESS
        if not name.startswith(PARTIAL_PREFIX)
    )


def _version(root: Path) -> int:
    """Return the version of the directory, 0 when it has none."""
    path = root / FORMAT_FILE
    try:
        if path.is_symlink():
            raise StoreError(f"{path} is a symbolic link; a cache may not lead elsewhere")
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return 0
    if not text:
        return 0  # the machine went down before it was written
    number = text.removeprefix(FORMAT).strip()
    if not text.startswith(FORMAT) or not number.isdecimal():
        raise StoreError(f"{path} does not say that {root} holds states")
    if int(number) > VERSION:
        raise StoreError(f"{root} has version {number}; this program knows up to {VERSION}")
    return int(number)


def _mark(root: Path, files: Files) -> None:
    replace(files, root, root / FORMAT_FILE, f"{FORMAT}{VERSION}\n".encode())


def is_of_this_boot(root: Path, files: Files) -> bool:
    """Return whether files and index were compared since the machine was started."""
    try:
        file, _ = files.open(root / BOOT_FILE)
    except FileNotFoundError:
        return False
    with file:
        return file.read(_MAX_BOOT_BYTES) == this_boot().encode()


def note_boot(root: Path, files: Files) -> None:
    """Note that files and index were compared since the machine was started.

    Raises:
        BlobRejected: When a link is in the way.
        OSError: When that fails.
    """
    replace(files, root, root / BOOT_FILE, this_boot().encode())


def _refuse_others(root: Path) -> None:
    if hasattr(os, "geteuid"):
        info = root.stat()
        if info.st_uid != os.geteuid():
            raise StoreError(f"{root} belongs to user {info.st_uid}, not to {os.geteuid()}")
    for name in (BLOBS, DESCRIBED, TEMPORARY):
        found = root / name
        if found.exists() and not stat.S_ISDIR(found.lstat().st_mode):
            raise StoreError(f"{found} is a link or no directory")
