"""Fingerprints of model and adapter files, computed once.

Reading a 20 GB model's header and samples takes a moment, so what was found is remembered: in the
process, and across processes in a small file, `fingerprints.json`, in the cache's directory. What
is remembered counts for one key only: path, device, inode, size and times of every part. So a file
that was changed, moved or replaced is read again, and whatever is wrong with the small file costs
no more than that.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import stat
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

from blake3 import blake3

from llamakeep.errors import ModelError
from llamakeep.gguf import (
    Header,
    has_rope_factors,
    read_header,
    read_spans,
    sampled_spans,
    split_parts,
)

logger = logging.getLogger("llamakeep")

CACHE_FILE: Final = "fingerprints.json"
PARTIAL_PREFIX: Final = f".{CACHE_FILE}-"
"""What the names of files begin with that are to become `fingerprints.json`."""
ABANDONED_SECONDS: Final = 3600.0
"""A file that is being written for so long is nobody's any more."""
_SCHEME: Final = b"llamakeep model file 1\0"
"""Another number for another way to compute a fingerprint: old ones are then strangers."""
_MOST_FILES: Final = 256
_MOST_CACHE_BYTES: Final = 1 << 20
_HEX = re.compile(r"[0-9a-f]{64}")
_SETTLED_NS: Final = 2_000_000_000
"""A file younger than this may change once more without its times changing."""

_now_ns = time.time_ns
_known: dict[str, ModelFile] = {}
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class ModelFile:
    """What is known of a model or adapter file.

    Attributes:
        fingerprint: Equal for equal contents: hex of 32 bytes.
        rope_factors: It has rope factors that llama.cpp chooses by the size of the context.
    """

    fingerprint: str
    rope_factors: bool


def inspect_file(path: str | Path, *, cache_dir: str | Path | None = None) -> ModelFile:
    """Return what is known of a GGUF file; of all its parts if the model is split.

    From any thread. Costs some reads of 4 KiB for each tensor (a file up to 64 MiB is read whole)
    the first time, a few `stat` calls afterwards. Changes nothing but `fingerprints.json`.

    Args:
        path: A model (any part of it) or an adapter.
        cache_dir: The directory of `fingerprints.json`; made if missing, for its owner alone. None
            remembers in this process only.

    Raises:
        ModelError: When it cannot be read, is no GGUF file, or a part is missing; with the path.
    """
    parts = split_parts(path)
    key, newest_ns = _identify(parts)
    with _lock:
        found = _known.get(key)
    kept = _load(Path(cache_dir)) if cache_dir is not None else {}
    found = found or kept.get(key)
    if found is None:
        settled = newest_ns + _SETTLED_NS < _now_ns()
        found = _read(Path(path), parts)
        if not settled or _identify(parts)[0] != key:
            return found
    with _lock:
        _remember(_known, key, found)
    if cache_dir is not None and key not in kept:
        _remember(kept, key, found)
        _save(Path(cache_dir), kept)
    return found


def fingerprint_file(path: str | Path, *, cache_dir: str | Path | None = None) -> str:
    """Return the fingerprint of a model or adapter file, see `inspect_file`.

    Raises:
        ModelError: When it cannot be read, is no GGUF file, or a part is missing; with the path.
    """
    return inspect_file(path, cache_dir=cache_dir).fingerprint


def _identify(parts: list[Path]) -> tuple[str, int]:
    """Return a key that changes when a part does, and the newest time of all parts."""
    newest_ns = 0
    identities: list[tuple[str | int, ...] | None] = []
    for part in parts:
        try:
            info = part.stat()
        except OSError:
            identities.append(None)  # missing; or a name that only looks like a part's
            continue
        # Where ctime is when a file was made (Windows), only mtime tells of a change in place.
        times = info.st_mtime_ns, info.st_ctime_ns
        newest_ns = max(newest_ns, *times)
        # The path as well: there are file systems that number their files anew on every mount.
        where = os.path.realpath(part), info.st_dev, info.st_ino
        identities.append((*where, info.st_size, *times))
    return blake3(_SCHEME + json.dumps(identities).encode()).hexdigest(), newest_ns


def _read(path: Path, parts: list[Path]) -> ModelFile:
    headers = {path: _header(path)}
    n_parts = headers[path].n_parts
    if n_parts > 1:
        if len(parts) != n_parts:
            raise ModelError(
                f"{path} is one of {n_parts} parts, so its name should end like "
                f"-00001-of-{n_parts:05d}.gguf"
            )
        for part in parts:
            if not part.exists():
                raise ModelError(f"{part} is missing: {path.name} is one of {n_parts} parts")
        headers = {part: headers.get(part) or _header(part) for part in parts}
    hasher = blake3(_SCHEME)
    for part, header in headers.items():
        hasher.update(header.file_bytes.to_bytes(8, "little"))
        with _opened(part) as file:
            for piece in read_spans(file, sampled_spans(header), part):
                hasher.update(piece)
    rope_factors = any(has_rope_factors(header) for header in headers.values())
    return ModelFile(hasher.hexdigest(), rope_factors)


def _header(path: Path) -> Header:
    with _opened(path) as file:
        return read_header(file, os.fstat(file.fileno()).st_size, path)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with open(path, "rb", buffering=0) as file:
            yield file
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error


# -- what is remembered ----------------------------------------------------------------------------


def _remember(known: dict[str, ModelFile], key: str, found: ModelFile) -> None:
    known[key] = found
    while len(known) > _MOST_FILES:
        del known[next(iter(known))]


def _load(cache_dir: Path) -> dict[str, ModelFile]:
    """Return what is remembered on disk: nothing, if anything about the file is odd."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        with open(os.open(cache_dir / CACHE_FILE, flags), "rb") as file:
            info = os.fstat(file.fileno())
            if not stat.S_ISREG(info.st_mode) or info.st_size > _MOST_CACHE_BYTES:
                raise ValueError("it is no regular file, or too large")
            if hasattr(os, "geteuid") and info.st_uid != os.geteuid():
                raise ValueError("it belongs to someone else")
            data = json.loads(file.read(_MOST_CACHE_BYTES))
        entries = data["files"].items() if data["scheme"] == 1 else ()
        return dict(entry for entry in map(_entry, entries) if entry is not None)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        logger.debug("%s in %s is not used: %s", CACHE_FILE, cache_dir, error)
        return {}


def _entry(item: tuple[str, Any]) -> tuple[str, ModelFile] | None:
    key, value = item
    match value:
        case {"fingerprint": str(fingerprint), "rope_factors": bool(rope_factors)}:
            if _HEX.fullmatch(key) and _HEX.fullmatch(fingerprint):
                return key, ModelFile(fingerprint, rope_factors)
    return None


def _save(cache_dir: Path, known: dict[str, ModelFile]) -> None:
    """Replace the file as a whole, readable for its owner alone. Two writers: the last one wins."""
    files = {key: asdict(found) for key, found in known.items()}
    try:
        cache_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=PARTIAL_PREFIX, dir=cache_dir)
        try:
            with open(handle, "w", encoding="ascii") as file:
                json.dump({"scheme": 1, "files": files}, file, indent=0)
            os.replace(name, cache_dir / CACHE_FILE)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
            raise
        for left in abandoned(cache_dir, time.time()):
            left.unlink(missing_ok=True)
    except OSError as error:
        logger.debug("%s in %s could not be written: %s", CACHE_FILE, cache_dir, error)


def abandoned(cache_dir: Path, now: float) -> list[Path]:
    """Return what processes left that were killed while they wrote `fingerprints.json`.

    Args:
        cache_dir: The directory of `fingerprints.json`.
        now: The time, in seconds.

    Raises:
        OSError: When the directory cannot be read.
    """
    found = []
    with os.scandir(cache_dir) as entries:
        for entry in entries:
            if entry.name.startswith(PARTIAL_PREFIX):
                with contextlib.suppress(FileNotFoundError):
                    info = entry.stat(follow_symlinks=False)
                    if not stat.S_ISDIR(info.st_mode) and now - info.st_mtime > ABANDONED_SECONDS:
                        found.append(Path(entry.path))
    return found
