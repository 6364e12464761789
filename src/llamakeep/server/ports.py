"""What the HTTP interface needs of the engine, and what it is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from llamakeep.engine.request import Listener, Request
from llamakeep.runtime.base import Vocab
from llamakeep.sampling import Sampling
from llamakeep.states import Reuse
from llamakeep.tokens import IntArray

MIB = 1 << 20


class Ticket(Protocol):
    """A request that the engine has taken."""

    @property
    def id(self) -> int:
        """Its number."""
        ...  # pragma: no cover - protocol

    def cancel(self) -> None:
        """End it at the next batch. From any thread; again, or too late, does nothing."""
        ...  # pragma: no cover - protocol


class SlotInfo(Protocol):
    """One slot as it was a moment ago."""

    @property
    def slot_id(self) -> int:
        """Its number, from 0."""
        ...  # pragma: no cover - protocol

    @property
    def is_processing(self) -> bool:
        """Whether a request is in it."""
        ...  # pragma: no cover - protocol

    @property
    def task_id(self) -> int | None:
        """The number of the request that is in it; None while it is idle."""
        ...  # pragma: no cover - protocol

    @property
    def n_ctx(self) -> int:
        """Tokens it has room for."""
        ...  # pragma: no cover - protocol

    @property
    def tokens(self) -> IntArray:
        """What it holds."""
        ...  # pragma: no cover - protocol

    @property
    def n_decoded(self) -> int:
        """Tokens generated for that request; 0 while it is idle."""
        ...  # pragma: no cover - protocol

    @property
    def request(self) -> Request | None:
        """That request; None while it is idle."""
        ...  # pragma: no cover - protocol

    @property
    def reuse(self) -> Reuse | None:
        """How its prompt was served; None before that is known, and while it is idle."""
        ...  # pragma: no cover - protocol


class SlotFile(Protocol):
    """What saving or restoring a slot did."""

    @property
    def n_tokens(self) -> int:
        """Tokens that were saved or restored."""
        ...  # pragma: no cover - protocol

    @property
    def n_bytes(self) -> int:
        """Bytes written or read."""
        ...  # pragma: no cover - protocol

    @property
    def ms(self) -> float:
        """Milliseconds it took."""
        ...  # pragma: no cover - protocol


class Engine(Protocol):
    """Answers requests. Any thread may call its methods."""

    @property
    def n_ctx(self) -> int:
        """Tokens that one request has room for."""
        ...  # pragma: no cover - protocol

    @property
    def n_slots(self) -> int:
        """Requests that are answered at the same time."""
        ...  # pragma: no cover - protocol

    @property
    def closed(self) -> bool:
        """Whether it takes no more requests."""
        ...  # pragma: no cover - protocol

    @property
    def model_name(self) -> str:
        """What clients see as the model's name."""
        ...  # pragma: no cover - protocol

    @property
    def vocab(self) -> Vocab:
        """The model's vocabulary."""
        ...  # pragma: no cover - protocol

    def submit(self, request: Request, listener: Listener) -> Ticket:
        """Queue a request; `listener` hears what becomes of it, from the engine's thread.

        Raises:
            QueueFull: When too many wait; says in `retry_after_s` when to come again.
            ContextOverflow: For a prompt that does not fit.
            InvalidValue: For what cannot be meant.
            EngineClosed: After the engine was closed.
        """
        ...  # pragma: no cover - protocol

    def slots(self) -> Sequence[SlotInfo]:
        """Return all slots as they are now."""
        ...  # pragma: no cover - protocol

    def slot_save(self, slot_id: int, path: Path) -> SlotFile:
        """Write what the slot holds to `path`; blocks until it is done."""
        ...  # pragma: no cover - protocol

    def slot_restore(self, slot_id: int, path: Path, *, salt: str = "") -> SlotFile:
        """Make the slot hold what `path` has; blocks until it is done.

        Args:
            slot_id: The slot.
            path: Of a file that `slot_save` wrote.
            salt: Of the requests that had filled the slot then.
        """
        ...  # pragma: no cover - protocol

    def slot_erase(self, slot_id: int) -> int:
        """Empty the slot and return how many tokens it held; blocks until it is done."""
        ...  # pragma: no cover - protocol

    def stats(self) -> dict[str, Any]:
        """Return counters and sizes, ready for JSON."""
        ...  # pragma: no cover - protocol

    def entries(self) -> list[dict[str, Any]]:
        """Return what is kept, ready for JSON."""
        ...  # pragma: no cover - protocol

    def recent(self) -> list[dict[str, Any]]:
        """Return how the last requests were served, ready for JSON."""
        ...  # pragma: no cover - protocol

    def clear_cache(self) -> dict[str, Any]:
        """Forget what is kept and return what that was, ready for JSON; blocks."""
        ...  # pragma: no cover - protocol


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt in tokens.

    Attributes:
        tokens: At least one, unless the text was empty.
        starts: Positions where a user message starts, ascending.
    """

    tokens: IntArray
    starts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What the HTTP interface is told. Sizes are bytes, times seconds.

    Attributes:
        model_path: Shown by `/props`.
        sampling: Defaults of `/completion`.
        openai_sampling: Defaults of the OpenAI endpoints; None for `sampling` with OpenAI's own for
            what OpenAI's API defines.
        n_predict: Tokens to generate where a request does not say; None for no limit.
        api_keys: A request must have one of them; none for no check.
        cors: Origins of pages that may ask; `*` for all.
        max_body_bytes: A larger request is refused before it is read.
        max_prompts: Most answers of one request: its prompts times `n`.
        slot_save_path: Where slots are saved; None to refuse it.
        slots: Whether `/slots` shows the slots.
        ping_s: A silent stream gets a comment this often, so that proxies keep it open.
        stall_s: A client that takes nothing for so long is cut off.
        backlog: Updates that wait for a slow client at most; then it is cut off.
        inline_chars: Prompts up to about this length are tokenized in the event loop, longer ones
            in a thread; and so for what is written. 2048 take 1 to 3 ms.
        build: Which build answers, for `system_fingerprint` and `/props`.
    """

    model_path: str = ""
    sampling: Sampling = field(default_factory=Sampling)
    openai_sampling: Sampling | None = None
    n_predict: int | None = None
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    cors: tuple[str, ...] = ()
    max_body_bytes: int = 16 * MIB
    max_prompts: int = 128
    slot_save_path: Path | None = None
    slots: bool = True
    ping_s: float = 15.0
    stall_s: float = 60.0
    backlog: int = 8192
    inline_chars: int = 2048
    build: str = "b0-llamakeep"


Exposition = Callable[[], tuple[bytes, str]]
"""Returns the text of `/metrics` and its content type."""
