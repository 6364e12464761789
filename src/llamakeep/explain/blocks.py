"""Ids for the blocks of a prompt, from which only who has the key can learn anything."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Final

from blake3 import blake3

from llamakeep.errors import StoreError
from llamakeep.tokens import IntArray

BLOCK_TOKENS: Final = 64
"""Tokens of a block, unless told otherwise: as in the traces of agents."""

KEY_BYTES: Final = 32
_ID_BITS: Final = 53  # what every reader of JSON can hold
_ID_BYTES: Final = 8
_KEY_SUFFIX: Final = ".key"


def block_ids(
    tokens: IntArray, *, key: bytes, namespace: bytes, block_tokens: int = BLOCK_TOKENS
) -> tuple[int, ...]:
    """Return an id for each block of a prompt: keyed BLAKE3 of all tokens up to its end.

    Args:
        tokens: The prompt.
        key: Of the log, `KEY_BYTES` long.
        namespace: Digest of everything that makes states incompatible, the salt included: what
            cannot share states shares no ids.
        block_tokens: Tokens of a block.
    """
    data = tokens.astype("<i4", copy=False).tobytes()
    name = blake3(b"llamakeep record\0" + namespace, key=key).digest()
    ids = []
    for start in range(0, len(data), 4 * block_tokens):
        name = blake3(name + data[start : start + 4 * block_tokens], key=key).digest()
        ids.append(int.from_bytes(name[:_ID_BYTES], "little") >> (8 * _ID_BYTES - _ID_BITS))
    return tuple(ids)


def pseudonym(name: str, *, key: bytes) -> str:
    """Return what stands for a name in a log: the same for the same one, of one key."""
    data = name.encode("utf-8", "surrogatepass")  # JSON has texts that are no text
    return blake3(b"llamakeep record name\0" + data, key=key).hexdigest(8)


def key_id(key: bytes) -> str:
    """Return what tells a key from others, and from which it cannot be computed."""
    return blake3(key, derive_key_context="llamakeep record, which key, version 1").hexdigest(4)


def read_key(path: Path) -> bytes:
    """Return the key of a log; one is made beside it, with mode 0600, if it has none.

    Args:
        path: The log. Its key lies in a file of that name with `.key` behind it.

    Raises:
        StoreError: When it cannot be read or made, or is no key.
    """
    file = path.with_name(path.name + _KEY_SUFFIX)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    try:
        with suppress(FileExistsError), open(os.open(file, flags, 0o600), "wb") as new:
            new.write(secrets.token_bytes(KEY_BYTES))
        key = file.read_bytes()
    except OSError as error:
        raise StoreError(f"cannot read the key {file}: {error.strerror or error}") from error
    if len(key) != KEY_BYTES:
        raise StoreError(f"{file} is no key: it has {len(key)} bytes, not {KEY_BYTES}")
    return key
