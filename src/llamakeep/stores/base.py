"""What a tier that keeps blobs must do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from llamakeep.states import Buffer


class Store(Protocol):
    """Keeps immutable blobs under their names, within a budget.

    A store decides nothing: what to keep and what to drop is the tree's business.
    """

    tier: str
    """`ram`, `disk` or `shared`: what a reuse from here is called."""

    @property
    def capacity_bytes(self) -> int:
        """The limit on bytes."""
        ...  # pragma: no cover - protocol

    @property
    def used_bytes(self) -> int:
        """Bytes kept now; never above the limit, at no instant."""
        ...  # pragma: no cover - protocol

    def put(self, name: bytes, n_bytes: int, produce: Callable[[], Buffer]) -> bool:
        """Keep the blob that `produce` returns.

        The bytes are counted before `produce` is called, and given back when it raises. A name
        that is kept already stays as it is: equal names mean interchangeable states.

        Args:
            name: The blob's name.
            n_bytes: The blob's exact size.
            produce: Called at most once, for the blob.

        Returns:
            Whether the store has the blob now; False when it does not fit.

        Raises:
            IntegrityError: When the blob has another size; nothing is kept.
        """
        ...  # pragma: no cover - protocol

    def get(self, name: bytes) -> Buffer | None:
        """Return the blob, not a copy of it, or None. Changes nothing."""
        ...  # pragma: no cover - protocol

    def delete(self, name: bytes) -> bool:
        """Drop the blob; return whether it was there."""
        ...  # pragma: no cover - protocol

    def clear(self) -> None:
        """Drop everything."""
        ...  # pragma: no cover - protocol

    def __contains__(self, name: object) -> bool: ...  # pragma: no cover - protocol

    def __len__(self) -> int: ...  # pragma: no cover - protocol

    def __iter__(self) -> Iterator[bytes]: ...  # pragma: no cover - protocol

    def check(self, *, fix: bool = False) -> None:
        """Compare what is counted with what is kept.

        Raises:
            IntegrityError: With the numbers, unless `fix` mends them.
        """
        ...  # pragma: no cover - protocol
