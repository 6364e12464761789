"""The keys that a prefix has on a Redis server.

::

    <prefix>:b:{<name>}:<i>                   chunk i of a blob; chunk 0 begins with its envelope
    <prefix>:i:{<block>}                      set: where spans start in that block
    <prefix>:i:{<block>}:<start>:<token>      hash: name -> record, of the spans that start there
    <prefix>:namespaces                       hash: namespace -> what it is, as JSON
    <prefix>:{<prefix>}:<what>                what is kept, counted: see `ledger`

What stands in braces decides the node of a cluster: the chunks of a blob are together, and so is
what is known of a block, and the ledger. Names are in hexadecimal.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from llamakeep.errors import InvalidValue
from llamakeep.tokens import NAME_BYTES

_PREFIX = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")


@dataclass(frozen=True, slots=True)
class Spot:
    """Where the index has a record: the block, where the span starts, and with which token."""

    block: bytes
    start: int
    first: int


class RedisKeys:
    """Makes keys.

    Args:
        prefix: Begins all of them.

    Raises:
        InvalidValue: For a prefix that could be taken for more than one.
    """

    def __init__(self, prefix: str) -> None:
        if not _PREFIX.match(prefix):
            raise InvalidValue(
                f"prefix must be 1 to 64 letters, digits, '_', '.' or '-', not {prefix!r}"
            )
        self.prefix = prefix
        self.namespaces = f"{prefix}:namespaces"
        self.all_pattern = f"{prefix}:*"
        self.blob_pattern = f"{prefix}:b:*"

    def chunk(self, name: bytes, index: int) -> str:
        """Return the key of a chunk of a blob."""
        return f"{self.prefix}:b:{{{name.hex()}}}:{index}"

    def chunks(self, name: bytes, n_chunks: int) -> list[str]:
        """Return the keys of the first chunks of a blob; of one at least."""
        return [self.chunk(name, index) for index in range(max(1, n_chunks))]

    def starts(self, block: bytes) -> str:
        """Return the key of the starts of spans in a block."""
        return f"{self.prefix}:i:{{{block.hex()}}}"

    def records(self, spot: Spot) -> str:
        """Return the key of the records of a spot."""
        return f"{self.starts(spot.block)}:{spot.start}:{spot.first}"

    def ledger(self, what: str) -> str:
        """Return a key of the ledger."""
        return f"{self.prefix}:{{{self.prefix}}}:{what}"

    def chunk_of(self, key: bytes) -> tuple[bytes, int] | None:
        """Return the name and the number of the chunk that a key is of, or None for another key."""
        _, _, rest = key.partition(b"{")
        digits, _, index = rest.partition(b"}:")
        try:
            name = bytes.fromhex(digits.decode())
            return (name, int(index)) if len(name) == NAME_BYTES else None
        except ValueError:
            return None
