"""What can be seen of a slot from outside of the engine's thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from llamakeep.engine.cells import SlotState
from llamakeep.engine.request import Request
from llamakeep.outline import Outline
from llamakeep.states import Reuse
from llamakeep.tokens import IntArray

logger = logging.getLogger("llamakeep")

LOOK_EVERY_S = 0.5
"""How often the engine looks at what is kept, while somebody asks."""
LOOK_SHARE = 1 / 250
"""The most of its time that it spends with that."""


@dataclass(frozen=True, slots=True, eq=False)
class SlotInfo:
    """A slot between two batches.

    Attributes:
        slot_id: Its number.
        tokens: What it holds; a copy.
        n_ctx: Tokens that it has room for.
        is_processing: It answers a request.
        task_id: That request's number; None while idle.
        request: That request.
        reuse: How its prompt was served, once that is known.
        n_decoded: Tokens of the answer so far.
        has_new_line: One of them has a line end in it.
    """

    slot_id: int
    tokens: IntArray = field(repr=False)
    n_ctx: int
    is_processing: bool = False
    task_id: int | None = None
    request: Request | None = None
    reuse: Reuse | None = None
    n_decoded: int = 0
    has_new_line: bool = False

    @classmethod
    def of(cls, slot: SlotState, tokens: IntArray, n_ctx: int) -> SlotInfo:
        """Return what a slot shows of itself; for the engine's thread."""
        job = slot.job
        if job is None:
            return cls(slot.slot_id, tokens, n_ctx)
        return cls(
            slot.slot_id,
            tokens,
            n_ctx,
            True,
            job.id,
            job.request,
            job.reuse,
            job.n_generated,
            job.has_new_line,
        )


@dataclass(frozen=True, slots=True)
class SlotGlance:
    """How far a slot is.

    Attributes:
        slot_id: Its number.
        n_tokens: Tokens that it holds.
        state: `idle`, `prompt` while it evaluates one, or `answer`.
        task_id: The number of the request that it answers; None while idle.
        label: What that is called.
        prompt_tokens: Tokens of its prompt.
        reused_tokens: Those that were not evaluated.
        done_tokens: Those that are there now, the reused ones among them.
        generated_tokens: Tokens of the answer so far.
        max_tokens: Tokens of the answer at most; None for no limit.
        tokens_per_second: How fast it evaluates, or generates; 0 while that is not known.
    """

    slot_id: int
    n_tokens: int
    state: str = "idle"
    task_id: int | None = None
    label: str = ""
    prompt_tokens: int = 0
    reused_tokens: int = 0
    done_tokens: int = 0
    generated_tokens: int = 0
    max_tokens: int | None = None
    tokens_per_second: float = 0.0

    @classmethod
    def of(cls, slot: SlotState, n_tokens: int, now: float) -> SlotGlance:
        """Return how far a slot is. From any thread."""
        job = slot.job
        if job is None:
            return cls(slot.slot_id, n_tokens)
        request, reuse, n_generated = job.request, job.reuse, job.n_generated
        n_prompt = int(request.prompt.size)
        n_reused = reuse.reused_tokens if reuse is not None else 0
        n_done = n_prompt if n_generated else max(n_reused, min(n_tokens, n_prompt))
        timings = job.timings(now)
        if n_generated:
            n_steps, ms = n_generated - 1, timings.predicted_ms
        else:
            n_steps, ms = n_done - n_reused, timings.prompt_ms
        return cls(
            slot.slot_id,
            n_tokens,
            "answer" if n_generated else "prompt",
            job.id,
            request.label,
            n_prompt,
            n_reused,
            n_done if reuse is not None else 0,
            n_generated,
            request.max_tokens,
            n_steps / ms * 1e3 if ms > 0 else 0.0,
        )


class Looks:
    """Looks at what is kept now and then, in the engine's thread. To be asked from any.

    Args:
        look: Returns what is kept. In the engine's thread.
        post: Has something run there; False if there is no such thread any more.
        clock: Seconds.
    """

    def __init__(
        self,
        look: Callable[[], Outline],
        post: Callable[[Callable[[], None]], bool],
        clock: Callable[[], float],
    ) -> None:
        self._look = look
        self._post = post
        self._clock = clock
        self._gate = threading.Lock()
        self._is_asked = False
        self._due = float("-inf")
        self._last: tuple[Outline, float] | None = None

    def latest(self) -> tuple[Outline, float] | None:
        """Return what was seen last, and how many seconds ago; ask for a look if one is due."""
        with self._gate:
            is_due = not self._is_asked and self._clock() >= self._due
            self._is_asked = self._is_asked or is_due
            last = self._last
        if is_due and not self._post(self._run):
            self._is_asked = False
        return None if last is None else (last[0], self._clock() - last[1])

    def _run(self) -> None:
        begin = self._clock()
        try:
            self._last = self._look(), begin
        except Exception:  # who watches must not end what is watched
            logger.exception("the engine could not look at what is kept")
        now = self._clock()
        self._due = now + max(LOOK_EVERY_S, (now - begin) / LOOK_SHARE)
        self._is_asked = False
