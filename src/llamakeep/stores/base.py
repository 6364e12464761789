"""What keeps blobs must do, and what a tier below memory must do besides.

A `Store` keeps immutable blobs under their names, within a budget. A `Tier` is a store that
outlives the process: other processes write into it too, so it also finds what it has by tokens,
and decides itself what to drop. A `TreeStore` is what a prefix tree stands on: memory, in which
the tree decides, over any number of tiers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from llamakeep.states import Block, Buffer, Record
from llamakeep.tokens import Place


class Store(Protocol):
    """Keeps immutable blobs under their names, within a budget."""

    tier: str
    """`ram`, `disk` or `shared`: what a reuse from here is called."""

    @property
    def capacity_bytes(self) -> int:
        """The limit on bytes."""
        ...  # pragma: no cover - protocol

    @property
    def used_bytes(self) -> int:
        """Bytes counted now; never above the limit, at no instant."""
        ...  # pragma: no cover - protocol

    def cost_bytes(self, n_bytes: int, place: Place | None = None) -> int:
        """Return the bytes that a blob of `n_bytes` counts for here."""
        ...  # pragma: no cover - protocol

    def put(
        self,
        name: bytes,
        n_bytes: int,
        produce: Callable[[], Buffer],
        place: Place | None = None,
    ) -> bool:
        """Keep the blob that `produce` returns.

        The bytes are counted before `produce` is called, and given back when it raises. A name
        that is kept already stays as it is: equal names mean interchangeable states.

        Args:
            name: The blob's name.
            n_bytes: The blob's exact size.
            produce: Called at most once, for the blob.
            place: Where the state belongs in the prefix tree. A tier finds only what it was told
                the place of, and drops only that by itself.

        Returns:
            Whether the store has the blob now; False when it does not fit, or when what is below
            the store failed (which is counted and logged, never raised).

        Raises:
            InvalidValue: For a negative size.
            IntegrityError: When the blob has another size; nothing is kept.
        """
        ...  # pragma: no cover - protocol

    def get(self, name: bytes) -> Buffer | None:
        """Return the blob, read-only, or None. Changes nothing but recency."""
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


class State(NamedTuple):
    """A state's name, and where it belongs."""

    name: bytes
    place: Place | None


class Promoted(NamedTuple):
    """A blob that was read from a tier and may come into memory."""

    name: bytes
    data: Buffer
    tier: str


class TreeStore(Store, Protocol):
    """What a prefix tree keeps its blobs in: memory, and whatever is below it.

    `capacity_bytes` and `used_bytes` are those of memory: what to keep there is the tree's
    business. Below it, tiers look after themselves.
    """

    @property
    def memory(self) -> Store:
        """What is in memory."""
        ...  # pragma: no cover - protocol

    @property
    def below(self) -> Sequence[Tier]:
        """The tiers below memory, nearest first."""
        ...  # pragma: no cover - protocol

    def held(self) -> Iterator[bytes]:
        """Yield the names of what is in memory."""
        ...  # pragma: no cover - protocol

    def holds(self, name: bytes) -> bool:
        """Whether a blob is in memory."""
        ...  # pragma: no cover - protocol

    def put_below(
        self, name: bytes, n_bytes: int, produce: Callable[[], Buffer], place: Place
    ) -> str:
        """Keep a blob that memory has no room for; return in which tier, or nothing."""
        ...  # pragma: no cover - protocol

    def evict(self, name: bytes) -> None:
        """Drop a blob from memory; tiers below keep theirs."""
        ...  # pragma: no cover - protocol

    def supersede(self, old: bytes, new: bytes) -> None:
        """Drop a tail whose place a longer one took, everywhere."""
        ...  # pragma: no cover - protocol

    def find_pending(self, blocks: Sequence[Block]) -> list[Record]:
        """Return what is on its way to a tier, see `Tier.find`."""
        ...  # pragma: no cover - protocol

    def get_many(self, names: Sequence[bytes]) -> Iterator[Buffer | None]:
        """Yield each blob, or None for one that is gone, in order. See `Tier.get_many`."""
        ...  # pragma: no cover - protocol

    def introduce(self, namespace: bytes, description: Mapping[str, Any]) -> None:
        """Say what the parts of a namespace are; a tier hears it with the first state of it.

        Costs nothing: may be said whenever the namespace is used, and is forgotten if that is not
        for thousands of others. The description must not be changed afterwards.
        """
        ...  # pragma: no cover - protocol

    def seen(self, path: Sequence[State], n_tokens: int, *, used: bool) -> None:
        """Note a path that a prompt of `n_tokens` saved or used, first span first."""
        ...  # pragma: no cover - protocol

    def take_promoted(self) -> Iterator[Promoted]:
        """Yield what was read from below and may come into memory, and forget it."""
        ...  # pragma: no cover - protocol

    def admit(
        self, name: bytes, data: Buffer, place: Place | None = None, origin: str = ""
    ) -> bool:
        """Keep in memory what the tier `origin` has too, and in the tiers nearer than that."""
        ...  # pragma: no cover - protocol

    def forget(self, name: bytes) -> None:
        """Drop a blob everywhere, below soon."""
        ...  # pragma: no cover - protocol

    def forget_namespaces(self, namespaces: Sequence[bytes]) -> Callable[[], None]:
        """Drop what tiers of our own have of some namespaces: soon, and in its turn.

        What is put afterwards is kept.

        Returns:
            What waits until it is done; for any thread.
        """
        ...  # pragma: no cover - protocol

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until the tiers have what is to go down; return whether all of them have it."""
        ...  # pragma: no cover - protocol

    def close(self, timeout: float | None = None) -> None:
        """Wait for what is on its way down, and let go of the tiers. Again: does nothing."""
        ...  # pragma: no cover - protocol

    def stats(self) -> dict[str, Any]:
        """Return what is below memory and on its way there, JSON-ready; nothing: empty."""
        ...  # pragma: no cover - protocol


class Tier(Store, Protocol):
    """A store that outlives the process and finds what it has by tokens. From any thread.

    Nothing that goes wrong outside, a full disk or a dead server, is raised: reading is a miss
    then, writing is refused, and `counters` say how often and why.
    """

    is_remote: bool
    """Whether asking it costs a round trip over a network."""

    reads_into_its_own: bool
    """Whether what it reads lies in memory that it wants to use again."""

    counters: dict[str, int]
    """What happened, by kind: `written`, `refused_*`, `rejected_*`, `evicted`, `errors_*`, ..."""

    def find(self, blocks: Sequence[Block]) -> list[Record]:
        """Return what is kept in these blocks and begins like the prompt.

        Args:
            blocks: Of one prompt, ascending.

        Returns:
            States in one of the blocks whose span starts with the token that the prompt has there.
            Every checkpoint that the prompt has the tokens of is among them, and segments that
            cover all its tokens that any of them cover; others may be. The cost follows the
            blocks, not what hangs off them.
        """
        ...  # pragma: no cover - protocol

    def get_many(self, names: Sequence[bytes]) -> Iterator[Buffer | None]:
        """Yield each blob, or None for one that is gone, in order.

        A blob may be overwritten when the next one is asked for, unless it is held meanwhile.
        """
        ...  # pragma: no cover - protocol

    def touch(self, names: Sequence[bytes], *, hit: bool = True) -> list[bytes]:
        """Note that these states are wanted, so that they are dropped later.

        Args:
            names: Of the states along a path.
            hit: They were used, and that counts; otherwise only what lies behind them was saved.

        Returns:
            Those that are not here, as far as that could be found out.
        """
        ...  # pragma: no cover - protocol

    def supersede(self, old: bytes, new: bytes) -> None:
        """Drop a tail whose place a longer one took; what hung off the old hangs off the new."""
        ...  # pragma: no cover - protocol

    def introduce(self, namespace: bytes, description: Mapping[str, Any]) -> None:
        """Remember what the parts of a namespace are, JSON-ready."""
        ...  # pragma: no cover - protocol

    def namespaces(self) -> dict[bytes, dict[str, Any]]:
        """Return the descriptions of the namespaces that were introduced."""
        ...  # pragma: no cover - protocol

    def forget_namespaces(self, namespaces: Collection[bytes]) -> None:
        """Drop all states of some namespaces, and what describes them, in a tier of our own.

        A shared one lets them expire.
        """
        ...  # pragma: no cover - protocol

    def close(self) -> None:
        """Let go of files and connections. Calling it again does nothing."""
        ...  # pragma: no cover - protocol
