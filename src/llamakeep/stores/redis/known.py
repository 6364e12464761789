"""What this process knows of blobs on a Redis server, so that it need not ask."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from llamakeep.stores.redis.keys import Spot

_MAX_KNOWN = 1 << 14  # of some 600 bytes, where blocks have 256 tokens


@dataclass(frozen=True, slots=True)
class Known:
    """A blob that was found or written here.

    Attributes:
        spot: Where its record is, or None when it has none.
        n_bytes: Its bytes with the header, as its record says.
    """

    spot: Spot | None
    n_bytes: int


class KnownBlobs:
    """The blobs that were found or written last, some thousand of them. From any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, Known] = OrderedDict()

    def get(self, name: bytes) -> Known | None:
        """Return what is known of a blob."""
        with self._lock:
            return self._known.get(name)

    def spot(self, name: bytes) -> Spot | None:
        """Return where the record of a blob is, where that is known."""
        known = self.get(name)
        return known.spot if known is not None else None

    def learn(self, name: bytes, spot: Spot | None, n_bytes: int) -> None:
        """Remember a blob."""
        with self._lock:
            self._known[name] = Known(spot, n_bytes)
            self._known.move_to_end(name)
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)

    def forget(self, name: bytes) -> None:
        """Forget a blob."""
        with self._lock:
            self._known.pop(name, None)

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._known.clear()
