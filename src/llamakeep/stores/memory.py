"""Blobs in this process's memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, cast

import numpy as np
from blake3 import blake3

from llamakeep.budget import ByteBudget
from llamakeep.errors import IntegrityError, OverBudget
from llamakeep.states import Blob, Block, Buffer, Record, frozen
from llamakeep.stores.base import Promoted, State, Tier
from llamakeep.tokens import Place

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    B = TypeVar("B", bound=Blob, default=Buffer)
else:
    from typing import TypeVar

    B = TypeVar("B")


class MemoryStore(Generic[B]):
    """Keeps blobs in RAM, exactly as they were read. One thread at a time.

    A blob is an array of bytes, which is made read-only, or another value of a known size.

    Args:
        capacity_bytes: The limit on their bytes.
        verify: Remember a checksum of every blob and compare it on every `get`; what does not
            match is dropped. For arrays only. Costs about 0.15 ms a MiB both ways. Off by default:
            the blobs are read-only and nobody else writes into this process.

    Raises:
        InvalidValue: For a negative limit.
    """

    tier = "ram"

    def __init__(self, capacity_bytes: int, *, verify: bool = False) -> None:
        self._budget = ByteBudget(capacity_bytes)
        self._blobs: dict[bytes, B] = {}
        self._sums: dict[bytes, bytes] | None = {} if verify else None
        self.corrupt_blobs = 0

    def __repr__(self) -> str:
        return (
            f"MemoryStore({len(self)} blobs, {self.used_bytes:,} of {self.capacity_bytes:,} bytes)"
        )

    @property
    def capacity_bytes(self) -> int:
        """The limit on bytes."""
        return self._budget.capacity_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes kept now."""
        return self._budget.used_bytes

    @property
    def peak_bytes(self) -> int:
        """The most bytes ever kept at once."""
        return self._budget.peak_bytes

    def cost_bytes(self, n_bytes: int, place: Place | None = None) -> int:
        """Return the bytes that a blob of `n_bytes` counts for: just these."""
        return n_bytes

    def put(
        self,
        name: bytes,
        n_bytes: int,
        produce: Callable[[], B],
        place: Place | None = None,
    ) -> bool:
        """Keep the blob that `produce` returns. See `Store.put`."""
        if name in self._blobs:
            return True
        try:
            self._budget.reserve(n_bytes)
        except OverBudget:
            return False
        try:
            data = produce()
            if data.nbytes != n_bytes:
                raise IntegrityError(f"blob has {data.nbytes:,} bytes, {n_bytes:,} were announced")
            if self._sums is not None:
                self._sums[name] = _checksum(data)
            if isinstance(data, np.ndarray):
                frozen(data)
            self._blobs[name] = data
        except BaseException:
            self._budget.release(n_bytes)
            raise
        return True

    def get(self, name: bytes) -> B | None:
        """Return the blob, not a copy of it, or None."""
        data = self._blobs.get(name)
        if data is None or self._sums is None or _checksum(data) == self._sums[name]:
            return data
        self.corrupt_blobs += 1
        self.delete(name)
        return None

    def resize(self, capacity_bytes: int) -> None:
        """Set another limit.

        Raises:
            OverBudget: When more is kept; the limit stays as it is.
            InvalidValue: For a negative limit.
        """
        self._budget.resize(capacity_bytes)

    def delete(self, name: bytes) -> bool:
        """Drop the blob; return whether it was there."""
        data = self._blobs.pop(name, None)
        if data is None:
            return False
        if self._sums is not None:
            del self._sums[name]
        self._budget.release(data.nbytes)
        return True

    def clear(self) -> None:
        """Drop everything."""
        for name in list(self._blobs):
            self.delete(name)

    def __contains__(self, name: object) -> bool:
        return name in self._blobs

    def __len__(self) -> int:
        return len(self._blobs)

    def __iter__(self) -> Iterator[bytes]:
        return iter(list(self._blobs))

    def check(self, *, fix: bool = False) -> None:
        """Compare what is counted with what is kept. See `Store.check`."""
        kept = sum(data.nbytes for data in self._blobs.values())
        if kept == self.used_bytes:
            return
        if not fix:
            raise IntegrityError(f"{self.used_bytes:,} bytes are counted, {kept:,} are kept")
        self._budget.release(self.used_bytes)
        self._budget.reserve(kept)

    # -- a tree's store with nothing below it --------------------------------------------------

    @property
    def memory(self) -> MemoryStore[B]:
        """What is in memory: this."""
        return self

    def flush(self, timeout: float | None = None) -> bool:
        """Do nothing: there is nothing on its way anywhere."""
        return True

    def close(self, timeout: float | None = None) -> None:
        """Do nothing: what is here goes with the process."""

    def stats(self) -> dict[str, Any]:
        """Return nothing: there is nothing below."""
        return {}

    @property
    def below(self) -> Sequence[Tier]:
        """The tiers below memory: none."""
        return ()

    def held(self) -> Iterator[bytes]:
        """Yield the names of what is in memory."""
        return iter(self)

    def holds(self, name: bytes) -> bool:
        """Whether a blob is in memory."""
        return name in self._blobs

    def put_below(self, name: bytes, n_bytes: int, produce: Callable[[], B], place: Place) -> str:
        """Keep nothing: there is no tier below. See `TreeStore.put_below`."""
        return ""

    def evict(self, name: bytes) -> None:
        """Drop a blob."""
        self.delete(name)

    def supersede(self, old: bytes, new: bytes) -> None:
        """Drop a tail whose place a longer one took."""
        self.delete(old)

    def find_pending(self, blocks: Sequence[Block]) -> list[Record]:
        """Return nothing: nothing is on its way anywhere."""
        return []

    def get_many(self, names: Sequence[bytes]) -> Iterator[B | None]:
        """Yield each blob, or None for one that is gone, in order."""
        return map(self.get, names)

    def seen(self, path: Sequence[State], n_tokens: int, *, used: bool) -> None:
        """Do nothing: the tree keeps its own recency."""

    def take_promoted(self) -> Iterator[Promoted]:
        """Yield nothing: nothing comes from below."""
        return iter(())

    def forget(self, name: bytes) -> None:
        """Drop a blob."""
        self.delete(name)

    def introduce(self, namespace: bytes, description: Mapping[str, Any]) -> None:
        """Do nothing: there are no tiers."""

    def forget_namespaces(self, namespaces: Sequence[bytes]) -> Callable[[], None]:
        """Do nothing: there are no tiers."""
        return lambda: None

    def admit(self, name: bytes, data: B, place: Place | None = None, origin: str = "") -> bool:
        """Keep a blob if there is room."""
        return self.put(name, data.nbytes, lambda: data)


def _checksum(data: Blob) -> bytes:
    return blake3(cast("Buffer", data).data).digest()
