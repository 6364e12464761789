"""What logs and metrics are told of a request: numbers and words of ours, none of its content."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llamakeep.engine.request import (
    Begun,
    Failed,
    Finished,
    Listener,
    Progress,
    Request,
    Update,
)
from llamakeep.errors import ContextOverflow, EngineClosed, LlamakeepError, QueueFull
from llamakeep.runtime.base import Vocab
from llamakeep.server.ports import Engine, SlotFile, SlotInfo, Ticket

logger = logging.getLogger("llamakeep")

_REFUSALS: dict[type[LlamakeepError], str] = {
    ContextOverflow: "too_long",
    EngineClosed: "closed",
    QueueFull: "queue_full",
}

FAILED = "failed"
"""As `RequestRecord.stop`: the answer could not be completed."""
PROGRESS_EVERY_MS = 2000.0
"""How often a long prompt's progress is told."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """How one request was answered. Milliseconds are of wall time.

    Attributes:
        request_id: The request's label; it can be a client's, so it is no label of a metric.
        slot_id: Which slot answered; None if none ever did.
        reused_tokens: Prompt tokens that were not evaluated.
        evaluated_tokens: Prompt tokens that were.
        tier: Where the reused ones came from: `live`, `ram`, `disk`, `shared` or `none`.
        reason: Why the rest had to be evaluated.
        generated_tokens: Tokens of the answer.
        restore_ms: Finding and restoring.
        queue_ms: Waiting for a slot.
        prompt_ms: Finding, restoring and evaluating, up to the first token.
        predicted_ms: From the first token to the last.
        stop: Why it ended: `end`, `word`, `limit`, `cancelled` or `failed`.
        error: The class of what failed, or "".
    """

    request_id: str
    slot_id: int | None = None
    reused_tokens: int = 0
    evaluated_tokens: int = 0
    tier: str = "none"
    reason: str = ""
    generated_tokens: int = 0
    restore_ms: float = 0.0
    queue_ms: float = 0.0
    prompt_ms: float = 0.0
    predicted_ms: float = 0.0
    stop: str = FAILED
    error: str = ""

    @classmethod
    def of(cls, request: Request, end: Finished | Failed, begun: Begun | None) -> RequestRecord:
        """Return the record of a request that ended.

        Args:
            request: The request.
            end: How it ended.
            begun: How it began, if it did.
        """
        reuse = begun.reuse if begun is not None else None
        record = cls(request.label, begun.slot_id if begun is not None else None)
        if isinstance(end, Failed):
            record = replace(record, error=type(end.error).__name__)
        else:
            reuse, cost = end.reuse, end.timings
            record = replace(
                record,
                slot_id=end.slot_id,
                reused_tokens=cost.cache_n,
                evaluated_tokens=cost.prompt_n,
                generated_tokens=cost.predicted_n,
                queue_ms=cost.queue_ms,
                prompt_ms=cost.prompt_ms,
                predicted_ms=cost.predicted_ms,
                stop=end.stop.value,
            )
        if reuse is None:
            return record
        return replace(record, tier=reuse.tier, reason=reuse.reason, restore_ms=reuse.restore_ms)

    @property
    def first_token_ms(self) -> float:
        """From when it was queued to its first token."""
        return self.queue_ms + self.prompt_ms

    @property
    def ms(self) -> float:
        """From when it was queued to its last token."""
        return self.first_token_ms + self.predicted_ms

    @property
    def tokens_per_second(self) -> float:
        """How fast the answer came, without its first token; 0 if it had no second one."""
        n_steps = self.generated_tokens - 1
        return n_steps / self.predicted_ms * 1e3 if n_steps > 0 and self.predicted_ms > 0 else 0.0


Tell = Callable[[RequestRecord], None]
TellProgress = Callable[[str, Progress], None]


class WatchedEngine:
    """An engine whose requests are told of when they end. Everything else is the engine's.

    What is told to raises nothing, for it is called in the engine's thread: what it raises is
    logged.

    Args:
        engine: Answers the requests.
        *tell: Hear of every request that ended.
        progress: Hears of long prompts while they are evaluated, every `PROGRESS_EVERY_MS`.
        refused: Hears why the engine did not take a request, in a word; from the thread that asked.
    """

    def __init__(
        self,
        engine: Engine,
        *tell: Tell,
        progress: TellProgress | None = None,
        refused: Callable[[str], None] | None = None,
    ) -> None:
        self._engine = engine
        self._refused = refused
        self._tell = tell
        self._progress = progress

    def submit(self, request: Request, listener: Listener) -> Ticket:
        """Queue a request. See `ports.Engine.submit`."""
        asked = request
        if self._progress is not None and not request.wants_progress:
            asked = replace(request, wants_progress=True)
        watch = _Watch(request, listener, self._tell, self._progress)
        try:
            return self._engine.submit(asked, watch)
        except LlamakeepError as error:
            if self._refused is not None:
                self._refused(_REFUSALS.get(type(error), "invalid"))
            raise

    @property
    def n_ctx(self) -> int:
        """Tokens that one request has room for."""
        return self._engine.n_ctx

    @property
    def n_slots(self) -> int:
        """Requests that are answered at the same time."""
        return self._engine.n_slots

    @property
    def closed(self) -> bool:
        """Whether it takes no more requests."""
        return self._engine.closed

    @property
    def model_name(self) -> str:
        """What clients see as the model's name."""
        return self._engine.model_name

    @property
    def vocab(self) -> Vocab:
        """The model's vocabulary."""
        return self._engine.vocab

    def slots(self) -> Sequence[SlotInfo]:
        """Return all slots as they are now."""
        return self._engine.slots()

    def slot_save(self, slot_id: int, path: Path) -> SlotFile:
        """Write what the slot holds to `path`."""
        return self._engine.slot_save(slot_id, path)

    def slot_restore(self, slot_id: int, path: Path, *, salt: str = "") -> SlotFile:
        """Make the slot hold what `path` has."""
        return self._engine.slot_restore(slot_id, path, salt=salt)

    def slot_erase(self, slot_id: int) -> int:
        """Empty the slot and return how many tokens it held."""
        return self._engine.slot_erase(slot_id)

    def stats(self) -> dict[str, Any]:
        """Return counters and sizes."""
        return self._engine.stats()

    def entries(self) -> list[dict[str, Any]]:
        """Return what is kept."""
        return self._engine.entries()

    def recent(self) -> list[dict[str, Any]]:
        """Return how the last requests were served."""
        return self._engine.recent()

    def clear_cache(self) -> dict[str, Any]:
        """Forget what is kept and return what that was."""
        return self._engine.clear_cache()


class _Watch:
    """A listener that hears with another one."""

    def __init__(
        self,
        request: Request,
        listener: Listener,
        tell: tuple[Tell, ...],
        progress: TellProgress | None,
    ) -> None:
        self._request = request
        self._listener = listener
        self._tell = tell
        self._progress = progress
        self._begun: Begun | None = None
        self._due_ms = PROGRESS_EVERY_MS

    def __call__(self, update: Update) -> None:
        """Hear, and pass on what the other one wants to; who waits for the end finds it noted."""
        try:
            self._note(update)
        except Exception:  # what is told of a request must not end the others
            logger.exception("a request could not be noted")
        if not isinstance(update, Progress) or self._request.wants_progress:
            self._listener(update)

    def _note(self, update: Update) -> None:
        if isinstance(update, Begun):
            self._begun = update
        elif isinstance(update, Progress):
            if self._progress is not None and update.ms >= self._due_ms:
                self._due_ms = update.ms + PROGRESS_EVERY_MS
                self._progress(self._request.label, update)
        elif isinstance(update, (Finished, Failed)):
            record = RequestRecord.of(self._request, update, self._begun)
            for tell in self._tell:
                tell(record)


if TYPE_CHECKING:
    _is_an_engine: type[Engine] = WatchedEngine
