"""The keys that a prefix has on a Redis server.

::

    <prefix>:b:{<name>}:<i>                     chunk i of a blob; chunk 0 begins with its envelope
    <prefix>:i2:{<block>}                       sorted set: where in a block segments start
                                                (s<position>), and checkpoints are (c<position>)
    <prefix>:i2:{<block>}:<start>:<branch>      sorted set: the segments that start there, behind
                                                tokens that have that digest, in order of tokens
    <prefix>:namespaces                         hash: namespace -> what it is, as JSON
    <prefix>:{<prefix>}:<what>                  what is kept, counted: see `ledger`

What stands in braces decides the node of a cluster: the chunks of a blob are together, and so is
what is known of a block, and the ledger. Names and digests are in hexadecimal. `i2` is the second
form of the index: who reads another one finds nothing in this one, and shares all the rest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from llamakeep.errors import InvalidValue
from llamakeep.tokens import NAME_BYTES

DEFAULT_PREFIX = "llamakeep"

_PREFIX = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")


@dataclass(frozen=True, slots=True)
class Spot:
    """Where the index has a state.

    Attributes:
        block: Name of the block that it lies in.
        position: Where a segment starts; where a checkpoint is.
        branch: Digest of the block's tokens up to the first of the segment, and of that one;
            nothing for a checkpoint, which is in no list.
        member: What stands for the segment in the list, where that is known; nothing for a
            checkpoint.
    """

    block: bytes
    position: int
    branch: bytes
    member: bytes


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

    def marks(self, block: bytes) -> str:
        """Return the key of the positions in a block."""
        return f"{self.prefix}:i2:{{{block.hex()}}}"

    def listed(self, block: bytes, start: int, branch: bytes) -> str:
        """Return the key of the list of the segments that start alike."""
        return f"{self.marks(block)}:{start}:{branch.hex()}"

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
