"""Who runs next, on one context: the engine's work, between one batch and the next.

Knows nothing of threads: whoever owns the context calls `drop_cancelled`, `start_waiting` and
`step` in turn.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from llamakeep.engine.batching import Pace, chunk_end, share_out
from llamakeep.engine.cells import Cells, SlotState
from llamakeep.engine.job import Job
from llamakeep.engine.keeping import Keeping
from llamakeep.engine.probs import with_probs
from llamakeep.engine.request import Choice, Failed, Finished, Stop
from llamakeep.errors import ContextOverflow, DecodeError, LlamakeepError, NoRoom
from llamakeep.runtime.base import NO_TOKEN, Part, Runtime, Vocab
from llamakeep.tokens import IntArray, common_prefix

logger = logging.getLogger("llamakeep")

_TRIES = 3
"""How often a request may begin because its sequence was lost."""
_WORTH_WAITING = 64
"""Tokens of a common beginning for which a prompt begins to wait until they are evaluated."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """What a slot gets of a batch."""

    slot: SlotState
    job: Job
    start: int
    tokens: IntArray
    is_last: bool

    @classmethod
    def of(cls, slot: SlotState, job: Job, start: int, end: int) -> _Piece:
        return cls(slot, job, start, job.known[start:end], end == job.n_known)

    @property
    def part(self) -> Part:
        return Part(self.slot.slot_id, self.tokens, self.is_last)


class Scheduler:
    """Slots, those that wait for one, and the batches that serve them. One thread at a time.

    Args:
        runtime: The model, with a sequence for each slot.
        vocab: Its vocabulary.
        keeping: What slots hold and keep.
        on_end: Called with a job and how it ended.
        on_saved: Called with the milliseconds that each save of a slot took.
        clock: Seconds.
        park_idle: Keep and empty idle slots while others run.
        align: Prompts are evaluated in pieces that end at multiples of this, where they can.
        stall_ms: How long answers may stand still for a piece of a prompt.

    Attributes:
        slots: All of them.
        waiting: Jobs without a slot, the first to come first.
        n_batches: Batches that were run.
        n_parts: Slots that took part in them, summed up.
        cells: Who holds the context's cells.
    """

    def __init__(
        self,
        runtime: Runtime,
        vocab: Vocab,
        keeping: Keeping,
        *,
        on_end: Callable[[Job, Finished | Failed], None],
        on_saved: Callable[[float], None],
        clock: Callable[[], float],
        park_idle: bool,
        align: int,
        stall_ms: float,
    ) -> None:
        self.slots = [SlotState(slot_id) for slot_id in range(runtime.n_seqs)]
        self.waiting: deque[Job] = deque()
        self.n_batches = self.n_parts = 0
        self.cells = Cells(
            runtime, keeping, self.slots, clock=clock, park_idle=park_idle, on_saved=on_saved
        )
        self._runtime = runtime
        self._vocab = vocab
        self._keeping = keeping
        self._on_end = on_end
        self._clock = clock
        self._align = align
        self._pace = Pace(stall_ms, runtime.n_batch)
        self._begun = itertools.count(1)
        self._n_ended = 0
        self._tokens: dict[int, tuple[bytes, bool]] = {}

    @property
    def n_busy(self) -> int:
        """Slots that answer now."""
        return sum(slot.job is not None for slot in self.slots)

    @property
    def has_work(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self.waiting) or self.n_busy > 0

    def drop_cancelled(self) -> None:
        """End what nobody wants any more."""
        for job in [job for job in self.waiting if job.cancelled]:
            self.waiting.remove(job)
            self._end(job, job.finish(Stop.CANCELLED, 0, self._clock()))
        for slot in self.slots:
            if slot.job is not None and slot.job.cancelled:
                self._finish(slot, slot.job, Stop.CANCELLED)

    # -- who gets a slot ---------------------------------------------------------------------------

    def start_waiting(self) -> None:
        """Give idle slots to those that wait, in their order."""
        n_patient = 0
        for job in tuple(self.waiting):
            idle = [slot.slot_id for slot in self.slots if slot.job is None]
            if not idle:
                break
            if job.sent_back_at == self._n_ended and self.n_busy:
                break  # there were no cells for it, and nobody has given any back since
            wanted = job.request.slot
            if wanted is not None and wanted not in idle:
                continue  # the others need not wait for that slot
            if not self.cells.fit(job):
                break
            if self._is_coming(job):
                job.is_patient = True
                n_patient += 1
                if n_patient > len(self.slots):
                    break  # to look at all of a long queue each time would cost too much
                continue
            used = [slot.last_used for slot in self.slots]
            slot_id = self._keeping.choose(idle, job.request, used)
            self.waiting.remove(job)
            self._begin(self.slots[slot_id], job)

    def _is_coming(self, job: Job) -> bool:
        """Whether another slot is about to evaluate much that this prompt begins with, too."""
        if not job.request.mode.reads:
            return False
        known = job.known[:-2]
        for slot in self.slots:
            other = slot.job
            if other is None or other.request.salt != job.request.salt:
                continue
            done = self._held(slot)
            if other.n_known - done <= 1:
                continue  # its prompt is evaluated
            shared = common_prefix(other.known, known)
            if shared <= max(done, _WORTH_WAITING):
                continue
            saved = self._keeping.worth_waiting(slot.slot_id, known, shared)
            if saved >= (1 if job.is_patient else _WORTH_WAITING):  # the last few come next
                return True
        return False

    def _begin(self, slot: SlotState, job: Job) -> None:
        """Bring a slot to what is known of a job's prompt.

        If that fails before the slot is touched, it holds what it held.
        """
        job.start_clock(self._clock())
        touched: SlotState | None = None
        try:
            if job.sampler is None:
                job.sampler = self._runtime.sampler(job.request.sampling)
                job.sampler.accept(job.request.prompt)
            self.cells.begins(slot)
            self.cells.make_room(job.n_known - self._held(slot), slot)
            slot.job, slot.n_began = job, next(self._begun)
            touched = slot
            reuse = self._keeping.begin(slot.slot_id, job.known, job.request)
            job.begin(slot.slot_id, reuse, self._clock())
            job.progressed(reuse.reused_tokens, self._clock())
        except LlamakeepError as error:
            self._fail(touched, job, error)
        except Exception as error:
            logger.exception("request %d could not begin", job.id)
            if touched is not None:
                self._keeping.clear(slot.slot_id)
            why = str(error) or type(error).__name__
            self._fail(touched, job, LlamakeepError(f"the request could not begin: {why}"))

    # -- one batch ---------------------------------------------------------------------------------

    def step(self) -> None:
        """Run one batch, sample where an answer goes on, and note what was evaluated.

        Does nothing when nothing runs.
        """
        if not self.n_busy:
            return
        self.cells.clear_the_way()
        pieces = self._plan()
        if not pieces:
            return
        begin = self._clock()
        try:
            outputs = self._runtime.decode([piece.part for piece in pieces])
        except NoRoom:
            self._too_full()
            return
        except DecodeError as error:
            logger.warning("a batch failed: %s", error)
            for slot in self.slots:
                self._keeping.holds(slot.slot_id)  # it may have spoilt more than its own
            for piece in pieces:
                self._again(piece.slot, piece.job, str(error))
            return
        self.n_batches += 1
        self.n_parts += len(pieces)
        # Samplers first: any other native call ends the life of the outputs.
        chosen = [
            None if output is None else self._sample(piece.job, output)
            for piece, output in zip(pieces, outputs, strict=True)
        ]
        now = self._clock()
        if any(output is not None for output in outputs):  # which waits for a device, too
            self._pace.ran(sum(piece.tokens.size for piece in pieces), (now - begin) * 1e3)
        for piece, choice in zip(pieces, chosen, strict=True):
            slot, job = piece.slot, piece.job
            job.evaluated(piece.start, piece.start + int(piece.tokens.size))
            is_there = self._keeping.evaluated(slot.slot_id, piece.tokens)
            if isinstance(choice, LlamakeepError):
                self._fail(slot, job, choice)
                continue
            if is_there:
                job.n_tries = 0
                job.progressed(self._held(slot), now)
            if choice is not None:  # it is right whatever became of the sequence since
                self._answer(slot, job, choice)
            if not is_there and slot.job is job:
                self._again(slot, job, "its sequence lost what it held")

    def _plan(self) -> list[_Piece]:
        """Return what the next batch is made of: a token of each answer, pieces of prompts."""
        pieces: list[_Piece] = []
        prompts: list[tuple[SlotState, Job, int]] = []
        failed = [slot for slot in self.slots if slot.job is not None and slot.job.n_tries]
        # Of those whose batch failed each is tried alone, so that one does not fail the others.
        for slot in failed[:1] or self.slots:
            job = slot.job
            if job is None:
                continue
            if not self._keeping.holds(slot.slot_id):
                self._again(slot, job, "its sequence lost what it held")
                continue
            start = self._held(slot)
            if job.n_known - start == 1 and job.n_generated:
                pieces.append(_Piece.of(slot, job, start, job.n_known))
            else:
                prompts.append((slot, job, start))
        room = self._runtime.n_batch - len(pieces)
        if pieces:
            room = min(room, self._pace.n_tokens)
        prompts.sort(key=lambda item: item[0].n_began)
        shares = share_out([job.n_known - start for _, job, start in prompts], room)
        for (slot, job, start), share in zip(prompts, shares, strict=True):
            if share:
                stop = self._keeping.next_stop(slot.slot_id, job.n_known)
                end = chunk_end(start, share, stop, self._align)
                pieces.append(_Piece.of(slot, job, start, end))
        return pieces

    def _sample(self, job: Job, output: int) -> Choice | LlamakeepError:
        """Choose the next token of an answer; any, when only the prompt was asked for."""
        job.prompt_done(self._clock())
        if job.request.max_tokens == 0 or job.sampler is None:
            return Choice(0)
        try:
            token = job.sampler.sample(output)
            n_probs = job.request.n_probs
            if not n_probs or token == NO_TOKEN:
                return Choice(token)
            return with_probs(token, self._runtime.logits_of(output), n_probs, self._vocab)
        except LlamakeepError as error:
            return error
        except Exception as error:  # of one request, which must not end the others
            logger.exception("no token could be chosen for request %d", job.id)
            return LlamakeepError(f"no token could be chosen: {str(error) or type(error).__name__}")

    def _answer(self, slot: SlotState, job: Job, choice: Choice) -> None:
        """Add a token to an answer, or end it."""
        request = job.request
        if request.max_tokens == 0:
            self._finish(slot, job, Stop.LIMIT)
            return
        if choice.token == NO_TOKEN:
            self._finish(slot, job, Stop.END)
            return
        piece, is_end = self._read(choice.token)
        if is_end and not request.sampling.ignore_eos:
            job.count_end(self._clock())
            self._finish(slot, job, Stop.END)
            return
        if choice.token in request.shown:
            piece = self._vocab.piece(choice.token, special=True)
        job.push(choice, piece, self._clock())
        if job.stopping_word:
            self._finish(slot, job, Stop.WORD)
        elif request.max_tokens is not None and job.n_generated >= request.max_tokens:
            self._finish(slot, job, Stop.LIMIT)
        elif job.n_known >= self._runtime.n_ctx:
            self._finish(slot, job, Stop.LIMIT, truncated=True)

    def _read(self, token: int) -> tuple[bytes, bool]:
        """Return what a token adds to the text, and whether it ends an answer."""
        known = self._tokens.get(token)
        if known is None:
            known = self._vocab.piece(token), self._vocab.is_end(token)
            self._tokens[token] = known  # at most the vocabulary
        return known

    # -- when it does not work ---------------------------------------------------------------------

    def _too_full(self) -> None:
        """There are no cells for a batch: make some, from the one that is missed least."""
        idle = [slot for slot in self.slots if slot.job is None and self._held(slot)]
        if idle:
            self.cells.empty(min(idle, key=lambda slot: slot.last_used))
            return
        running = [(slot, slot.job) for slot in self.slots if slot.job is not None]
        slot, job = max(running, key=lambda pair: pair[0].n_began)
        if len(running) > 1:
            job.n_held = self._held(slot)
            self.cells.empty(slot)
            slot.job, job.sent_back_at = None, self._n_ended
            self.waiting.appendleft(job)
        elif job.n_generated:
            self._finish(slot, job, Stop.LIMIT, truncated=True)
        else:
            n_ctx = self._runtime.n_ctx
            self._keeping.clear(slot.slot_id)
            message = f"{job.n_known} tokens do not fit into the cells of a context of {n_ctx}"
            self._fail(slot, job, ContextOverflow(message, n_tokens=job.n_known, n_ctx=n_ctx))

    def _again(self, slot: SlotState, job: Job, why: str) -> None:
        """Let a job begin anew, with all it has; after some tries it fails."""
        slot.job = None
        job.n_tries += 1
        if job.n_tries < _TRIES:
            logger.warning("request %d begins anew: %s", job.id, why)
            self.waiting.appendleft(job)
        else:
            self._fail(slot, job, DecodeError(why))

    def _fail(self, slot: SlotState | None, job: Job, error: LlamakeepError) -> None:
        if slot is not None:
            slot.job, slot.last_used = None, self._clock()
            job.n_held = self._held(slot)
            self.cells.guarded("end", partial(self._keeping.end, slot.slot_id, job.request))
        self._end(job, Failed(error))

    def _end(self, job: Job, last: Finished | Failed) -> None:
        """Note the end of a job, then tell it: who waits for it finds it noted."""
        self._n_ended += 1
        self._on_end(job, last)
        job.end(last)

    def fail_waiting(self, error: LlamakeepError, *, begun: bool = True) -> None:
        """End everything that waits; without `begun` not what had a slot before."""
        for job in tuple(self.waiting):
            if begun or job.reuse is None:
                self.waiting.remove(job)
                self._fail(None, job, error)

    def fail_running(self, error: LlamakeepError) -> None:
        """End everything that runs."""
        for slot in self.slots:
            if slot.job is not None:
                self._fail(slot, slot.job, error)

    def _finish(self, slot: SlotState, job: Job, stop: Stop, *, truncated: bool = False) -> None:
        """The answer is complete."""
        slot.job, slot.last_used = None, self._clock()
        n_held = job.n_held = self._held(slot)
        self.cells.guarded("end", partial(self._keeping.end, slot.slot_id, job.request))
        self._end(job, job.finish(stop, n_held, self._clock(), truncated=truncated))

    def _held(self, slot: SlotState) -> int:
        """Return how many tokens a slot holds."""
        return self.cells.held(slot)
