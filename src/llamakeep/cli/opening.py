"""Which directory a command is about, and opening it without changing it where that is enough."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from platformdirs import user_cache_path

from llamakeep.errors import IndexDamaged, InvalidValue, StoreError
from llamakeep.stores.disk import DiskStore
from llamakeep.stores.disk.files import Files
from llamakeep.stores.disk.layout import FORMAT_FILE, OWN
from llamakeep.tiers import TierSettings


class ReadOnlyFiles(Files):
    """The file system, for a command that changes nothing: a store only reads."""

    def writable(self, path: Path) -> bool:
        """Return that no files may be made in the directory."""
        return False


def cache_path(given: str | None) -> Path:
    """Return the directory that a command is about.

    Args:
        given: What the option or the environment says; None for the user's cache directory.

    Raises:
        InvalidValue: For an empty name, which a shell makes of a variable that is not set.
    """
    if given is None:
        return user_cache_path("llamakeep", appauthor=False)
    if not given.strip():
        raise InvalidValue("--cache-dir is empty")
    return home(Path(os.path.abspath(Path(given).expanduser())))


def home(path: Path) -> Path:
    """Return the cache that lies in a directory of other things, if there is one, else `path`."""
    own = path / OWN
    return own if (own / FORMAT_FILE).exists() and not (path / FORMAT_FILE).exists() else path


def is_cache(path: Path) -> bool:
    """Return whether a directory holds states; False when there is nothing yet, or no directory.

    Raises:
        StoreError: When there is something else.
    """
    try:
        others = sorted(os.listdir(path))
    except FileNotFoundError:
        return False
    except NotADirectoryError:
        raise StoreError(f"{path} is not a directory") from None
    except OSError as error:
        raise StoreError(f"cannot look into {path}: {error.strerror or error}") from error
    if others and FORMAT_FILE not in others:
        raise StoreError(
            f"{path} is not a cache of llamakeep: it holds {others[0]!r}, and no file {FORMAT_FILE}"
        )
    return bool(others)


def settings(path: Path) -> TierSettings:
    """Return what the environment says about a cache in `path`: its limit and its secret."""
    return TierSettings.resolve(cache_dir=path, redis_url="")


def _refuse_missing(path: Path) -> None:
    if not is_cache(path):
        raise StoreError(f"{path} holds no cache: nothing was kept there")


@contextmanager
def look(path: Path) -> Iterator[DiskStore]:
    """Open a cache to read it. Changes nothing but the files that SQLite has beside a database.

    Args:
        path: The cache; see `is_cache`.

    Raises:
        IndexDamaged: Also from inside; the message says how to mend it.
        StoreError: When there is no cache, or it cannot be read.
    """
    _refuse_missing(path)
    of_it = settings(path)
    files = ReadOnlyFiles()
    try:
        with DiskStore(path, of_it.disk_bytes, secret=of_it.secret, files=files) as store:
            yield store
    except IndexDamaged as error:
        raise IndexDamaged(
            f"the index of {path} is missing, damaged or another version's: "
            "llamakeep check --fix makes it anew"
        ) from error


def change(path: Path, *, make: bool = False) -> DiskStore:
    """Open a cache to change it.

    The environment's limit is kept to only where something will be put: a command drops what it
    says, and nothing else.

    Args:
        path: The cache.
        make: Make it if it is missing, and keep to the limit.

    Raises:
        StoreError: When there is no cache, or it can only be read.
    """
    if not make:
        _refuse_missing(path)
    of_it = settings(path)
    limit = of_it.disk_bytes if make else None
    store = DiskStore(path, limit, secret=of_it.secret)
    if store.read_only:
        store.close()
        raise StoreError(f"{path} can only be read: nothing in it can be changed")
    return store


def capacity_bytes(path: Path) -> int | None:
    """Return the environment's limit; None where only who keeps prompts there knows one."""
    return settings(path).disk_bytes


def complain(store: DiskStore) -> None:
    """Raise if something failed meanwhile that a store counts and does not raise.

    Raises:
        StoreError: With what failed and how often.
    """
    failed = {kind: n for kind, n in store.counters.items() if kind.startswith("errors_")}
    if failed:
        what = ", ".join(f"{kind}: {n:,}" for kind, n in sorted(failed.items()))
        raise StoreError(f"{store.path}: not all could be done ({what})")
