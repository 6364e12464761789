"""Who runs next, on one context: the engine's work, between one batch and the next.

Knows nothing of threads: whoever owns the context calls `drop_cancelled`, `start_waiting` and
`step` in turn.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from llamakeep.engine.batching import Pace, chunk_end, share_out
from llamakeep.engine.job import Job
from llamakeep.engine.keeping import Keeping
from llamakeep.engine.request import Choice, Failed, Finished, Stop, TokenProb
from llamakeep.errors import ContextOverflow, DecodeError, LlamakeepError, NoRoom
from llamakeep.runtime.base import Part, Runtime, Vocab
from llamakeep.tokens import IntArray, common_prefix

logger = logging.getLogger("llamakeep")

_TRIES = 3
"""How often a request may begin because its sequence was lost."""
_WORTH_WAITING = 64
"""Tokens of a common beginning for which a prompt waits until another has evaluated them."""
_WORTH_MOVING = 256
"""Tokens of others that a slot was above, below which it is not laid low."""


class SlotState:
    """A sequence and the job that has it.

    Attributes:
        slot_id: Its number, the sequence's too.
        job: What it answers; None while it is idle.
        last_used: When its last answer ended; -1 before the first.
        n_began: Grows with every job that begins in any slot.
        crowd: Tokens that others held while this one was filled, so that its cells are above them.
    """

    def __init__(self, slot_id: int) -> None:
        self.slot_id = slot_id
        self.job: Job | None = None
        self.last_used = -1.0
        self.n_began = 0
        self.crowd = 0


@dataclass(frozen=True, slots=True)
class _Piece:
    """What a slot gets of a batch."""

    slot: SlotState
    job: Job
    tokens: IntArray
    is_last: bool

    @classmethod
    def of(cls, slot: SlotState, job: Job, start: int, end: int) -> _Piece:
        return cls(slot, job, job.known[start:end], end == job.n_known)

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
        clock: Seconds.
        park_idle: Keep and empty idle slots while others run.
        align: Prompts are evaluated in pieces that end at multiples of this, where they can.
        stall_ms: How long answers may stand still for a piece of a prompt.

    Attributes:
        slots: All of them.
        waiting: Jobs without a slot, the first to come first.
        n_batches: Batches that were run.
        n_parts: Slots that took part in them, summed up.
        on_saved: Called with the milliseconds that each save of a slot took; None for no calls.
    """

    def __init__(
        self,
        runtime: Runtime,
        vocab: Vocab,
        keeping: Keeping,
        *,
        on_end: Callable[[Job, str], None],
        clock: Callable[[], float],
        park_idle: bool,
        align: int,
        stall_ms: float,
    ) -> None:
        self.slots = [SlotState(slot_id) for slot_id in range(runtime.n_seqs)]
        self.waiting: deque[Job] = deque()
        self.n_batches = self.n_parts = 0
        self.on_saved: Callable[[float], None] | None = None
        self._runtime = runtime
        self._vocab = vocab
        self._keeping = keeping
        self._on_end = on_end
        self._clock = clock
        self._park_idle = park_idle and keeping.parks
        self._align = align
        self._pace = Pace(stall_ms, runtime.n_batch)
        self._begun = itertools.count(1)
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
            self._end(job, job.finish(Stop.CANCELLED, 0))
        for slot in self.slots:
            if slot.job is not None and slot.job.cancelled:
                self._finish(slot, slot.job, Stop.CANCELLED)

    def save_idle(self) -> None:
        """Keep what idle slots hold."""
        for slot in self.slots:
            if slot.job is None:
                self._timed(self._keeping.save, slot)

    def _park(self, slot: SlotState) -> None:
        """Keep what a slot holds, and empty it."""
        self._timed(self._keeping.park, slot)

    def _timed(self, save: Callable[[int], None], slot: SlotState) -> None:
        """Save a slot, and tell how long that took, if there was something to save."""
        if not self._held(slot):
            return
        begin = self._clock()
        save(slot.slot_id)
        ms = (self._clock() - begin) * 1e3
        if self.on_saved is not None:
            self.on_saved(ms)

    def guarded(self, what: str, action: Callable[[], None]) -> None:
        """Do something that no request should fail of."""
        try:
            action()
        except Exception:
            self._keeping.failures[what] = self._keeping.failures.get(what, 0) + 1
            logger.exception("%s failed", what)

    # -- who gets a slot ---------------------------------------------------------------------------

    def start_waiting(self) -> None:
        """Give idle slots to those that wait, in their order."""
        for job in tuple(self.waiting):
            idle = [slot.slot_id for slot in self.slots if slot.job is None]
            if not idle:
                break
            wanted = job.request.slot
            if wanted is not None and wanted not in idle:
                continue  # the others need not wait for that slot
            if not self._fits(job):
                break
            if self._is_coming(job):
                continue
            used = [slot.last_used for slot in self.slots]
            slot_id = self._keeping.choose(idle, job.request, used)
            self.waiting.remove(job)
            self._begin(self.slots[slot_id], job)

    def _fits(self, job: Job) -> bool:
        """Whether there are cells for a prompt beside what runs; alone it always fits."""
        running = [slot.job.n_known for slot in self.slots if slot.job is not None]
        if not running or not self._runtime.traits.family.has_rows:
            return True
        return sum(running) + len(running) + job.n_known <= self._runtime.n_ctx

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
            if shared - done < _WORTH_WAITING:
                continue
            at = self._keeping.will_share(slot.slot_id, shared)
            if at - done >= _WORTH_WAITING:
                return True
        return False

    def _begin(self, slot: SlotState, job: Job) -> None:
        """Bring a slot to what is known of a job's prompt."""
        job.start_clock(self._clock())
        try:
            if job.sampler is None:
                job.sampler = self._runtime.sampler(job.request.sampling)
                job.sampler.accept(job.request.prompt)
            slot.job, slot.n_began = job, next(self._begun)
            self._make_cells(job.n_known - self._held(slot), slot)
            reuse = self._keeping.begin(slot.slot_id, job.known, job.request)
            job.begin(slot.slot_id, reuse, self._clock())
            job.progressed(reuse.reused_tokens, self._clock())
        except LlamakeepError as error:
            self._fail(slot, job, error)
        except Exception as error:
            logger.exception("request %d could not begin", job.id)
            self._keeping.clear(slot.slot_id)
            self._fail(slot, job, LlamakeepError(f"the request could not begin: {error}"))

    def _live_tokens(self) -> int:
        return sum(self._held(slot) for slot in self.slots)

    def _make_cells(self, n_tokens: int, spare: SlotState) -> None:
        """Empty idle slots, those used least recently first, until so many tokens have room.

        Cells that slots share count for each of them.
        """
        if not self._runtime.traits.family.has_rows:
            return
        idle = [slot for slot in self.slots if slot.job is None and slot is not spare]
        for slot in sorted(idle, key=lambda slot: slot.last_used):
            if self._live_tokens() + n_tokens <= self._runtime.n_ctx:
                return
            self._park(slot)

    def _clear_the_way(self) -> None:
        """Park idle slots while others run, and lay low what was above them."""
        held = [slot for slot in self.slots if self._held(slot)]
        total = self._live_tokens()
        for slot in self.slots:
            slot.crowd = max(slot.crowd, total - self._held(slot)) if slot in held else 0
        for slot in held if self._park_idle else ():
            if slot.job is None:
                self.guarded("park", partial(self._park, slot))
        left = [slot for slot in held if self._held(slot)]
        if len(left) == 1 and left[0].crowd >= _WORTH_MOVING:
            left[0].crowd = 0
            self.guarded("lay_low", partial(self._keeping.lay_low, left[0].slot_id))

    # -- one batch ---------------------------------------------------------------------------------

    def step(self) -> None:
        """Run one batch, sample where an answer goes on, and note what was evaluated.

        Does nothing when nothing runs.
        """
        if not self.n_busy:
            return
        self._clear_the_way()
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
        now = self._clock()
        self.n_batches += 1
        self.n_parts += len(pieces)
        self._pace.ran(sum(piece.tokens.size for piece in pieces), (now - begin) * 1e3)
        # Samplers first: any other native call ends the life of the outputs.
        chosen = [
            None if output is None else self._sample(piece.job, output)
            for piece, output in zip(pieces, outputs, strict=True)
        ]
        for piece, choice in zip(pieces, chosen, strict=True):
            slot, job = piece.slot, piece.job
            if not self._keeping.evaluated(slot.slot_id, piece.tokens):
                self._again(slot, job, "its sequence lost what it held")
            elif isinstance(choice, LlamakeepError):
                self._fail(slot, job, choice)
            else:
                job.progressed(self._held(slot), now)
                if choice is not None:
                    self._answer(slot, job, choice)

    def _plan(self) -> list[_Piece]:
        """Return what the next batch is made of: a token of each answer, pieces of prompts."""
        pieces: list[_Piece] = []
        prompts: list[tuple[SlotState, Job, int]] = []
        for slot in self.slots:
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
            return (
                self._told(token, self._runtime.logits_of(output), n_probs)
                if n_probs
                else (Choice(token))
            )
        except LlamakeepError as error:
            return error

    def _told(self, token: int, logits: npt.NDArray[np.float32], n_probs: int) -> Choice:
        """Return a token with its log probability, and the `n_probs` likeliest with theirs."""
        top = float(logits.max())
        logprobs = logits - (top + math.log(float(np.exp(logits - top).sum(dtype=np.float64))))
        n_probs = min(n_probs, int(logits.size))
        likeliest = np.argpartition(-logprobs, n_probs - 1)[:n_probs]
        likeliest = likeliest[np.argsort(-logprobs[likeliest], kind="stable")]

        def of(one: int) -> TokenProb:
            return TokenProb(one, self._vocab.piece(one, special=True), float(logprobs[one]))

        return Choice(token, of(token), tuple(of(int(one)) for one in likeliest))

    def _answer(self, slot: SlotState, job: Job, choice: Choice) -> None:
        """Add a token to an answer, or end it."""
        request = job.request
        if request.max_tokens == 0:
            self._finish(slot, job, Stop.LIMIT)
            return
        piece, is_end = self._read(choice.token)
        if is_end and not request.sampling.ignore_eos:
            job.count_end(self._clock())
            self._finish(slot, job, Stop.END)
            return
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
            self._park(min(idle, key=lambda slot: slot.last_used))
            return
        running = [(slot, slot.job) for slot in self.slots if slot.job is not None]
        slot, job = max(running, key=lambda pair: pair[0].n_began)
        if len(running) > 1:
            self._park(slot)
            slot.job = None
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
        self._end(job, Failed(error))

    def _end(self, job: Job, last: Finished | Failed) -> None:
        """Note the end of a job, then tell it: who waits for it finds it noted."""
        self._on_end(job, last.stop.value if isinstance(last, Finished) else "error")
        job.end(last)

    def fail_waiting(self, error: LlamakeepError) -> None:
        """End everything that waits."""
        while self.waiting:
            self._fail(None, self.waiting.popleft(), error)

    def fail_running(self, error: LlamakeepError) -> None:
        """End everything that runs."""
        for slot in self.slots:
            if slot.job is not None:
                self._fail(slot, slot.job, error)

    def _finish(self, slot: SlotState, job: Job, stop: Stop, *, truncated: bool = False) -> None:
        """The answer is complete."""
        slot.job, slot.last_used = None, self._clock()
        n_held = self._held(slot)
        self._keeping.end(slot.slot_id, job.request)
        self._end(job, job.finish(stop, n_held, truncated=truncated))

    def _held(self, slot: SlotState) -> int:
        """Return how many tokens a slot holds."""
        return int(self._keeping.tokens(slot.slot_id).size)
