"""One request on its way through the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from llamakeep.engine.observer import PROGRESS_EVERY_MS
from llamakeep.engine.records import FAILED, Record
from llamakeep.engine.request import (
    Begun,
    Choice,
    Failed,
    Finished,
    Listener,
    Piece,
    Progress,
    Request,
    Stop,
    Timings,
    Update,
)
from llamakeep.engine.text import Writer
from llamakeep.explain import Served
from llamakeep.runtime.base import Sampler
from llamakeep.states import Reuse
from llamakeep.tokens import IntArray

logger = logging.getLogger("llamakeep")


class Job:
    """A request, what is known of its answer, and who hears of it. Of the engine's thread.

    Args:
        job_id: Its number.
        request: What is to be done.
        listener: Hears what becomes of it.
        n_ctx: Tokens that there is room for.
        now: Seconds.
        on_progress: Hears of a prompt that takes long, every `PROGRESS_EVERY_MS`.

    Attributes:
        id: Its number.
        request: What is to be done.
        sampler: Chooses its tokens; None before it begins for the first time.
        reuse: How its prompt was served; None before it begins.
        n_generated: Tokens generated so far.
        has_new_line: One of them has a line end in it.
        n_tries: How often it had to begin again because a sequence was lost.
        sent_back_at: How many jobs had ended when it had to leave its slot for want of cells; -1 if
            it had not. It begins again when another one has ended since.
        is_patient: It has waited for another one to evaluate what both begin with.
        cancelled: Nobody wants more of it; may be set from any thread.
        ended: It has been told its end.
        n_held: Tokens that its slot held when it left it.
    """

    def __init__(
        self,
        job_id: int,
        request: Request,
        listener: Listener,
        n_ctx: int,
        now: float,
        on_progress: Callable[[Request, Progress], None] = lambda _request, _progress: None,
    ) -> None:
        self.id = job_id
        self.request = request
        self.sampler: Sampler | None = None
        self.reuse: Reuse | None = None
        self.n_generated = 0
        self.has_new_line = False
        self.n_tries = 0
        self.sent_back_at = -1
        self.is_patient = False
        self.cancelled = False
        self.ended = False
        self.n_held = 0
        self._resumed: float | None = None
        self.slot_id: int | None = None
        self._listener = listener
        self._on_progress = on_progress
        self._due_ms = PROGRESS_EVERY_MS
        self._writer = Writer(request.stop)
        self._known = np.empty(n_ctx + 1, np.int32)
        self._known[: request.prompt.size] = request.prompt
        self.n_known = int(request.prompt.size)
        self._unsent: list[Choice] = []
        self._queued = now
        self._begun: float | None = None
        self._first: float | None = None
        self._last = now
        self._n_evaluated = self._n_reached = 0

    @property
    def known(self) -> IntArray:
        """The prompt and the answer so far; the last token is not evaluated yet."""
        return self._known[: self.n_known]

    @property
    def stopping_word(self) -> str:
        """The stop string that came up, or ""."""
        return self._writer.stopped_by

    # -- what happens to it ------------------------------------------------------------------------

    def begin(self, slot_id: int, reuse: Reuse, now: float) -> None:
        """A slot has taken it. When it begins anew, its first reuse stays the one that counts."""
        self.start_clock(now)
        self.slot_id = slot_id
        if self.reuse is None:
            self.reuse, self._resumed = reuse, now
            self._tell(Begun(slot_id, reuse))

    def start_clock(self, now: float) -> None:
        """It leaves the queue; only the first time counts."""
        if self._begun is None:
            self._begun = now

    def evaluated(self, start: int, end: int) -> None:
        """What is known from `start` to `end` was evaluated. See `Timings.prompt_n`."""
        counted = max(int(self.request.prompt.size), self._n_reached)
        self._n_evaluated += max(0, min(end, counted) - start)
        self._n_reached = max(self._n_reached, end)

    def progressed(self, n_tokens: int, now: float) -> None:
        """So many tokens of its prompt are in the slot."""
        if self.n_generated or self.reuse is None or self._begun is None:
            return
        ms = (now - self._begun) * 1e3
        is_due = ms >= self._due_ms
        if not is_due and not self.request.wants_progress:
            return
        total = int(self.request.prompt.size)
        progress = Progress(total, self.reuse.reused_tokens, min(n_tokens, total), ms)
        if is_due:
            self._due_ms = ms + PROGRESS_EVERY_MS
            self._on_progress(self.request, progress)
        if self.request.wants_progress:
            self._tell(progress)

    def prompt_done(self, now: float) -> None:
        """The prompt is evaluated."""
        if self._first is None:
            self._first = self._last = now

    def push(self, choice: Choice, piece: bytes, now: float) -> None:
        """Add a token to the answer, and tell the text that is certain."""
        self._known[self.n_known] = choice.token
        self.n_known += 1
        self.n_generated += 1
        self._last = now
        self._unsent.append(choice)
        self.has_new_line = self.has_new_line or b"\n" in piece
        text = self._writer.push(piece)
        if text or self.stopping_word or self.request.n_probs:
            self._send(text)

    def count_end(self, now: float) -> None:
        """Count the token that ended the answer; it is no part of it."""
        self.n_generated += 1
        self._last = now

    def _send(self, text: str) -> None:
        choices, self._unsent = tuple(self._unsent), []
        told = choices if self.request.n_probs else ()
        self._tell(Piece(text, tuple(choice.token for choice in choices), told))

    def finish(self, stop: Stop, n_cached: int, now: float, *, truncated: bool = False) -> Finished:
        """Tell the rest of the text; return the end, for `end` to tell."""
        rest = ""
        if stop not in (Stop.CANCELLED, Stop.WORD):
            rest = self._writer.finish()
            stop = Stop.WORD if self._writer.stopped_by else stop
        if rest or self._unsent:
            self._send(rest)
        return Finished(
            stop,
            self.stopping_word,
            self.slot_id,
            self.reuse,
            self.timings(now),
            int(self.request.prompt.size),
            n_cached,
            truncated,
        )

    def timings(self, now: float) -> Timings:
        """Return what it has cost so far."""
        begun = now if self._begun is None else self._begun
        first = now if self._first is None else self._first
        return Timings(
            queue_ms=(begun - self._queued) * 1e3,
            prompt_n=self._n_evaluated,
            cache_n=self.reuse.reused_tokens if self.reuse is not None else 0,
            prompt_ms=(first - begun) * 1e3,
            predicted_n=self.n_generated,
            predicted_ms=0.0 if self._first is None else (self._last - first) * 1e3,
        )

    def end(self, last: Finished | Failed) -> None:
        """Tell its end, once, and free its sampler."""
        if self.ended:
            return
        self.ended = True
        if self.sampler is not None:
            self.sampler.close()
        self._tell(last)

    def _tell(self, update: Update) -> None:
        try:
            self._listener(update)
        except Exception:  # who listens badly must not stop the others
            logger.exception("a listener of request %d failed", self.id)

    def served(self, namespace: bytes, now: float) -> Served:
        """Return what it is explained by later: its tokens too, if they may be kept.

        An answer's last token is never evaluated: it counts as held if all before it are.
        """
        request, mode = self.request, self.request.mode
        keeps = mode.writes
        return Served(
            id=self.id,
            label=request.label,
            namespace=namespace,
            tokens=self.known.copy() if keeps else self._known[:0].copy(),
            n_prompt=int(request.prompt.size),
            reuse=self.reuse,
            keeps=keeps,
            session=request.session,
            body=request.body if keeps else None,
            alias=request.alias,
            reads=mode.reads,
            held_tokens=self.n_known if self.n_held >= self.n_known - 1 else self.n_held,
            resumed_s=self._resumed,
            ended_s=now,
        )

    def record(self, last: Finished | Failed, now: float) -> Record:
        """Return what is remembered of it."""
        timings = last.timings if isinstance(last, Finished) else self.timings(now)
        reuse = self.reuse
        return Record(
            id=self.id,
            label=self.request.label,
            slot=self.slot_id,
            prompt_tokens=int(self.request.prompt.size),
            reused_tokens=timings.cache_n,
            evaluated_tokens=timings.prompt_n,
            generated_tokens=timings.predicted_n,
            tier=reuse.tier if reuse is not None else "none",
            reason=reuse.reason if reuse is not None else "",
            mode=self.request.mode.value,
            stop=FAILED if isinstance(last, Failed) else last.stop.value,
            error=type(last.error).__name__ if isinstance(last, Failed) else "",
            queue_ms=timings.queue_ms,
            restore_ms=reuse.restore_ms if reuse is not None else 0.0,
            prompt_ms=timings.prompt_ms,
            predicted_ms=timings.predicted_ms,
        )
