"""Reading and writing blobs as values of a Redis server.

A value is at most 512 MB, so a larger blob is cut into chunks of equal size, the last one
shorter. Chunk 0 begins with the envelope, which says how many bytes there are in all; its own
length says how they are cut. It is written last: when it is there, all are.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from llamakeep.errors import BlobRejected
from llamakeep.states import Buffer
from llamakeep.stores import envelope
from llamakeep.stores.redis.breaker import Unreachable
from llamakeep.stores.redis.keys import RedisKeys
from llamakeep.tokens import Place

if TYPE_CHECKING:
    from llamakeep.stores.redis.link import Command, RedisLink

logger = logging.getLogger("llamakeep")

MAX_CHUNKS = 4096
MAX_VALUE_BYTES = 1 << 29

_BATCH_BYTES = 16 << 20


class RedisBlobs:
    """Blobs by name. From any thread.

    Args:
        link: To the server.
        keys: Of the prefix.
        key: What seals them, or None.
        chunk_bytes: Where to cut.
        max_blob_bytes: What claims to be larger is not believed.
    """

    def __init__(
        self,
        link: RedisLink,
        keys: RedisKeys,
        key: bytes | None,
        *,
        chunk_bytes: int,
        max_blob_bytes: int,
    ) -> None:
        self._link = link
        self._keys = keys
        self._key = key
        self._chunk_bytes = chunk_bytes
        self._max_blob_bytes = max_blob_bytes

    # -- reading -----------------------------------------------------------------------------------

    def sizes(self, names: Sequence[bytes]) -> list[int | None]:
        """Return the bytes of the first chunk of each, 0 where there is none, None if unknown.

        Raises:
            Unreachable: When the server does not answer.
        """
        replies = self._link.run([("STRLEN", self._keys.chunk(name, 0)) for name in names])
        return [
            None if isinstance(reply, Exception) else self._link.whole(reply) for reply in replies
        ]

    def fetch(self, wanted: Sequence[tuple[bytes, int]]) -> Iterator[list[bytes | None]]:
        """Yield the first chunks of names, some MiB at a time.

        Nothing (`b""`) is what is not there, None what the server did not tell.

        Args:
            wanted: Names, with the bytes that are expected; one more is read, to see more.

        Raises:
            Unreachable: When the server does not answer.
        """
        batch: list[Command] = []
        n_bytes = 0
        for name, expected in wanted:
            expected = min(expected, MAX_VALUE_BYTES)
            if batch and n_bytes + expected > _BATCH_BYTES:
                yield self._run(batch, n_bytes)
                batch, n_bytes = [], 0
            # Not GET: whoever writes to the server must not decide how much is read.
            batch.append(("GETRANGE", self._keys.chunk(name, 0), 0, expected))
            n_bytes += expected
        if batch:
            yield self._run(batch, n_bytes)

    def opened(self, name: bytes, value: bytes, expected: int) -> Buffer:
        """Return the payload of the blob whose first chunk begins with `value`.

        A view of `value` when that is all, and read together from its chunks when it is not.

        Raises:
            BlobRejected: When it is not what was stored there.
            Unreachable: When the server does not answer, or the blob has just gone.
        """
        if len(value) > expected:
            # It is longer than somebody said, or was just written. Ask the server, which knows.
            (size,) = self.sizes([name])
            ((value_again,),) = self.fetch([(name, size or 0)])
            if not value_again or len(value_again) != size:
                raise Unreachable("it changes while it is read")
            return self.opened(name, value_again, size)
        n_header, n_payload = envelope.total_bytes(value[: envelope.FIXED_BYTES])
        total = n_header + n_payload
        if n_payload > self._max_blob_bytes:
            raise BlobRejected(f"claims {n_payload:,} bytes", reason="corrupt")
        header = envelope.parse(value[:n_header])
        if header.name != name:
            raise BlobRejected("is another blob", reason="name")
        envelope.check_secret(header, self._key)
        payload = self._payload(name, value, n_header, total)
        envelope.verify(header, payload, self._key)
        return payload

    def _payload(self, name: bytes, value: bytes, n_header: int, total: int) -> Buffer:
        step = len(value)
        begin = np.frombuffer(value, np.uint8)[n_header:]
        if step > total:
            raise BlobRejected(f"has {step - total:,} bytes too many", reason="corrupt")
        if step == total:
            return begin
        n_chunks = -(-total // step)
        if n_chunks > MAX_CHUNKS:
            raise BlobRejected(f"claims {n_chunks:,} chunks", reason="truncated")
        payload = np.empty(total - n_header, np.uint8)
        payload[: begin.size] = begin

        def read_on(client: Any) -> int:
            at = begin.size
            for index in range(1, n_chunks):
                size = min(step, payload.size - at)
                chunk = client.execute_command("GETRANGE", self._keys.chunk(name, index), 0, size)
                if not isinstance(chunk, bytes) or len(chunk) != size:
                    return index
                payload[at : at + size] = np.frombuffer(chunk, np.uint8)
                at += size
            return n_chunks

        # All within one deadline: a server must not take its time for each chunk anew.
        n_read = self._link.call(read_on, n_bytes=total - step)
        if n_read < n_chunks:
            raise BlobRejected(f"lacks chunk {n_read} of {n_chunks}", reason="truncated")
        return payload

    def _run(self, batch: Sequence[Command], n_bytes: int) -> list[bytes | None]:
        replies = self._link.run(batch, n_bytes=n_bytes)
        return [
            None if isinstance(reply, Exception) else self._link.text(reply) for reply in replies
        ]

    # -- writing -----------------------------------------------------------------------------------

    def n_chunks(self, n_bytes: int, place: Place | None) -> int:
        """Return how many chunks a blob of `n_bytes` makes."""
        return -(-(envelope.header_bytes(place) + n_bytes) // self._step(place))

    def glancing(self, name: bytes, place: Place | None) -> Command:
        """Return the command that reads a header; `glanced` judges it."""
        return ("GETRANGE", self._keys.chunk(name, 0), 0, envelope.header_bytes(place) - 1)

    def glanced(self, name: bytes, reply: Any) -> bool:
        """Return whether there is such a blob; its payload is not looked at.

        Raises:
            BlobRejected: When there is something else.
            Unreachable: When the server does not tell.
        """
        head = self._link.text(reply)
        if not head:
            return False
        header = envelope.parse(head)
        if header.name != name:
            raise BlobRejected("is another blob", reason="name")
        envelope.check_secret(header, self._key)
        return True

    def write(self, name: bytes, data: Buffer, place: Place | None, expires_ms: int) -> bool:
        """Write a blob that lives until a time of the server's clock.

        Returns:
            Whether it is there now. When not, some of its chunks may be.

        Raises:
            Unreachable: When the server does not answer.
        """
        header = envelope.wrap(name, data, place, self._key)
        step = self._step(place)
        payload = data.data
        offsets = range(step - len(header), data.nbytes, step)
        for index, offset in reversed(list(enumerate(offsets, 1))):
            chunk = payload[offset : offset + step]
            if not self._set(self._keys.chunk(name, index), chunk, expires_ms):
                return False
        first = b"".join((header, payload[: step - len(header)]))
        return self._set(self._keys.chunk(name, 0), first, expires_ms)

    def _set(self, key: str, value: bytes | memoryview, expires_ms: int) -> bool:
        command = ("SET", key, value, "PXAT", expires_ms)
        (reply,) = self._link.run([command], n_bytes=len(value))
        return not isinstance(reply, Exception)

    @staticmethod
    def cut_into(head: bytes, size: int) -> int:
        """Return how many chunks a blob has that begins so, and whose first one has that size."""
        try:
            total = sum(envelope.total_bytes(head[: envelope.FIXED_BYTES]))
        except BlobRejected:
            return 1
        return -(-total // max(1, size))

    def removing(self, name: bytes, n_chunks: int) -> Command:
        """Return the command that drops the first chunks of a blob."""
        return ("UNLINK", *self._keys.chunks(name, min(n_chunks, MAX_CHUNKS)))

    def _step(self, place: Place | None) -> int:
        """Return the bytes of all chunks but the last: enough for a header."""
        return max(self._chunk_bytes, envelope.header_bytes(place))
