"""Descriptions of namespaces as files, from which those in the index are made again.

`namespaces/<digest>.json` each. Nothing seals them: they are for people to read, and say of which
namespaces segments are of no use without a checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llamakeep.errors import BlobRejected
from llamakeep.stores.descriptions import MAX_DESCRIPTION_BYTES, parse_description
from llamakeep.stores.disk.shelf import Shelf
from llamakeep.tokens import NAME_BYTES

DESCRIBED = "namespaces"

_NAME = re.compile(rf"([0-9a-f]{{{2 * NAME_BYTES}}})\.json")


def path_of(shelf: Shelf, namespace: bytes) -> Path:
    """Return where the description of a namespace is."""
    return shelf.root / DESCRIBED / f"{namespace.hex()}.json"


def has(shelf: Shelf, namespace: bytes) -> bool:
    """Return whether there is a file of a namespace, whatever it says."""
    return shelf.files.stat(path_of(shelf, namespace)) is not None


def write(shelf: Shelf, namespace: bytes, text: str) -> None:
    """Write the description of a namespace, as a whole. Costs two flushes.

    Raises:
        BlobRejected: When a link is in the way.
        OSError: When it cannot be written.
    """
    shelf.files.make_directory(shelf.root / DESCRIBED)
    shelf.replace(path_of(shelf, namespace), text.encode())


def drop(shelf: Shelf, namespace: bytes) -> None:
    """Remove the description of a namespace, if it is there."""
    shelf.files.unlink(path_of(shelf, namespace))


def found(shelf: Shelf) -> Iterator[tuple[Path, bytes | None, dict[str, Any] | None]]:
    """Yield every file, the namespace that it is of, and what it says.

    Both are None for what is no description. Directories are left out.
    """
    directory = shelf.root / DESCRIBED
    for file, is_directory in shelf.entries(directory):
        if is_directory:
            continue
        match = _NAME.fullmatch(file)
        said = _read(shelf, directory / file) if match else None
        if match is None or said is None:
            yield directory / file, None, None
        else:
            yield directory / file, bytes.fromhex(match[1]), said


def _read(shelf: Shelf, path: Path) -> dict[str, Any] | None:
    try:
        file, _ = shelf.files.open(path)
    except (BlobRejected, FileNotFoundError):
        return None
    with file:
        return parse_description(file.read(MAX_DESCRIPTION_BYTES + 1) or b"")
