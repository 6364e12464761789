"""The engine: one thread that owns a context, and answers many requests on it at once.

Each turn of its loop takes what other threads asked for, gives free slots to waiting requests,
fills one batch with a token of each answer and pieces of the prompts, runs it, and samples. What a
slot need not evaluate, and what is kept of it, is a `Keeping`'s business; who runs next is the
`Scheduler`'s.

    submit -> waiting -> a slot: resume, evaluate in pieces, then token by token -> finished

Answers go on while a long prompt is evaluated, since its pieces take no longer than `stall_ms`; a
prompt that shares its beginning with one that is being evaluated waits for it instead of evaluating
it once more. When the cells do not suffice, idle slots are emptied first; then the request that
began last goes back to the queue, with all it has computed kept.
"""

from __future__ import annotations

import itertools
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from llamakeep.engine.job import Job
from llamakeep.engine.keeping import Keeping
from llamakeep.engine.observer import Observers, Untold
from llamakeep.engine.records import Record, Records
from llamakeep.engine.request import Failed, Finished, Listener, Request
from llamakeep.engine.scheduler import Scheduler
from llamakeep.engine.slot_actions import SlotActions
from llamakeep.engine.slotfile import SlotFile
from llamakeep.engine.view import Looks, SlotGlance, SlotInfo
from llamakeep.errors import (
    ContextOverflow,
    EngineClosed,
    InvalidValue,
    LlamakeepError,
    QueueFull,
    whole_number,
)
from llamakeep.explain import Explanation, History
from llamakeep.fingerprint import Difference
from llamakeep.outline import Outline
from llamakeep.runtime.base import Runtime, Vocab
from llamakeep.tokens import IntArray, as_tokens

logger = logging.getLogger("llamakeep")

T = TypeVar("T")

_AFTERWARDS_S = 0.002
"""Observers hear of an end after whoever waits for it, and when there is nothing else to do."""
_SETTLE_S = 1.0
"""How long to wait for another thread that tells observers: one of them may wait for this one."""


class Ticket:
    """A request that was submitted. From any thread.

    Attributes:
        id: Its number.
    """

    def __init__(self, job: Job, wake: Callable[[], None]) -> None:
        self.id = job.id
        self._job = job
        self._wake = wake

    def cancel(self) -> None:
        """Ask for no more; takes effect at the next batch. Again: does nothing."""
        self._job.cancelled = True
        self._wake()


class Engine:
    """Answers requests on one context, several at a time. See the module.

    Methods are safe from any thread; what touches the context runs in the engine's own. Use it as
    a context, or call `close`.

    Args:
        runtime: The model, with a sequence for each slot. The engine's thread owns it from now on,
            and `close` closes it.
        keeping: What slots hold and keep.
        vocab: The model's vocabulary; the runtime's own if not given.
        model_name: For people.
        model_facts: For people, too: what the model is, such as `n_params`. JSON-ready.
        file_key: Seals files of slots, see `envelope.seal_key`; None for none.
        max_waiting: Requests that may wait for a slot.
        park_idle: Keep and empty idle slots while others run: cells that nobody uses slow down all.
        align: Prompts are evaluated in pieces that end at multiples of this, where they can.
        stall_ms: How long answers may stand still for a piece of a prompt.
        clock: Seconds.

    Attributes:
        n_ctx: Tokens that all slots together have room for, and each of them.
        n_slots: How many requests are answered at once.
        on_stop: Called when the engine's thread has ended without having been closed; from it.
        observers: Hear of every request.
        history: The last requests, by which they are explained.

    Raises:
        InvalidValue: For a number that cannot be meant.
    """

    def __init__(
        self,
        runtime: Runtime,
        keeping: Keeping,
        *,
        vocab: Vocab | None = None,
        model_name: str = "",
        model_facts: Mapping[str, Any] | None = None,
        file_key: bytes | None = None,
        max_waiting: int = 256,
        park_idle: bool = True,
        align: int = 8,
        stall_ms: float = 250.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        whole_number("align", align, 1)
        if not 0 < stall_ms < math.inf:
            raise InvalidValue(f"stall_ms must be above 0, not {stall_ms!r}")
        self.n_ctx = runtime.n_ctx
        self.n_slots = runtime.n_seqs
        self.vocab = runtime.vocab if vocab is None else vocab
        self.model_name = model_name
        self.model_facts = dict(model_facts or {})
        self.on_stop: Callable[[], None] | None = None
        self.observers = Observers()
        self._runtime = runtime
        self._keeping = keeping
        self._max_waiting = whole_number("max_waiting", max_waiting, 0)
        self._clock = clock
        self._scheduler = Scheduler(
            runtime,
            self.vocab,
            keeping,
            on_end=self._ended,
            on_saved=self.observers.saved,
            clock=clock,
            park_idle=park_idle,
            align=align,
            stall_ms=stall_ms,
        )
        self._actions = SlotActions(self.call, runtime, keeping, self._scheduler, file_key)
        self._records = Records()
        kept = keeping.stats()
        self.history = History(
            policy=kept["policy"] if kept["capacity_bytes"] else "",
            rolling=runtime.traits.rolling,
            align=align,
            elsewhere=self._kept_elsewhere,
            clock=clock,
        )
        keeping.tell_evicted(self.history.evicted)
        self._looks = Looks(keeping.outline, self._post, clock)
        self._ids = itertools.count(1)
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._gate = threading.Lock()
        self._n_open = 0  # submitted and not ended
        self._closing = False
        self._deadline = self._flush_s = 0.0
        self._unsaved = False
        self._untold = Untold(self.observers)
        self._thread = threading.Thread(target=self._run, name="llamakeep-engine", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        busy = self._scheduler.n_busy
        return f"Engine({self.model_name!r}, {busy} of {self.n_slots} slots busy)"

    @property
    def closed(self) -> bool:
        """Whether it takes no more requests: it is closing, or has stopped."""
        return self._closing

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- requests ----------------------------------------------------------------------------------

    def submit(self, request: Request, listener: Listener) -> Ticket:
        """Answer a request.

        Args:
            request: What is to be done.
            listener: Hears what becomes of it, from the engine's thread. The last it hears is
                `Finished` or `Failed`.

        Raises:
            TokenError: For a token outside the vocabulary.
            ContextOverflow: For a prompt that leaves no room for an answer, with both numbers.
            InvalidValue: For a slot that does not exist.
            QueueFull: When as many wait as may wait.
            EngineClosed: After `close` was called.
        """
        (ticket,) = self.submit_all([(request, listener)])
        return ticket

    def submit_all(self, asked: Sequence[tuple[Request, Listener]]) -> list[Ticket]:
        """Answer several requests, or none of them: they get their places in one step.

        Args:
            asked: Requests and who hears what becomes of each, as for `submit`. They queue in this
                order.

        Raises:
            InvalidValue: For more than would fit if nobody else asked, too, with the numbers.
            LlamakeepError: As `submit`, for any of them.
        """
        try:
            for request, _ in asked:
                self._check(request)
            return self._enqueue(
                [
                    Job(
                        next(self._ids),
                        request,
                        listener,
                        self.n_ctx,
                        self._clock(),
                        self.observers.progressed,
                    )
                    for request, listener in asked
                ]
            )
        except LlamakeepError as error:
            self.observers.refused(error)
            raise

    def _check(self, request: Request) -> None:
        n_prompt = int(request.prompt.size)
        if n_prompt + (request.max_tokens != 0) > self.n_ctx:
            raise ContextOverflow(
                f"the prompt has {n_prompt} tokens; the context of {self.n_ctx} has no room for "
                "it and an answer",
                n_tokens=n_prompt,
                n_ctx=self.n_ctx,
            )
        if request.slot is not None and not 0 <= request.slot < self.n_slots:
            raise InvalidValue(f"slot {request.slot} is outside 0 to {self.n_slots - 1}")
        as_tokens(request.prompt, n_vocab=self._runtime.n_vocab)

    def _enqueue(self, jobs: Sequence[Job]) -> list[Ticket]:
        n_new, most = len(jobs), self.n_slots + self._max_waiting
        if n_new > most:
            raise InvalidValue(
                f"{n_new} answers are asked for at once, and there is room for {most}: "
                f"{self.n_slots} in slots, {self._max_waiting} in the queue"
            )
        with self._gate:
            if self._closing:
                raise EngineClosed("the engine is shutting down")
            if self._n_open + n_new > most:
                n_waiting = max(0, self._n_open - self.n_slots)
                waiting = "1 request is" if n_waiting == 1 else f"{n_waiting} requests are"
                limit = "as many as may wait"
                if n_new > 1:
                    limit = f"at most {self._max_waiting} may: there is no room for {n_new} more"
                raise QueueFull(
                    f"{waiting} waiting, {limit}",
                    retry_after_s=max(1.0, math.ceil(self._records.mean_s / self.n_slots)),
                )
            self._n_open += n_new
            self._inbox.put(lambda: self._scheduler.waiting.extend(jobs))
        return [Ticket(job, self._wake) for job in jobs]

    def call(self, what: Callable[[], T]) -> T:
        """Run something in the engine's thread, between two batches, and return what it returns.

        Raises:
            EngineClosed: After `close`. Whatever `what` raises goes through.
        """
        if threading.current_thread() is self._thread:
            return what()
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(what())
            except BaseException as error:  # noqa: BLE001 - it belongs to the caller
                future.set_exception(error)

        with self._gate:
            if self._closing:
                raise EngineClosed("the engine is shutting down")
            self._inbox.put(run)
        return future.result()

    def _post(self, what: Callable[[], None]) -> bool:
        """Have something run in the engine's thread, which must not raise; whether it will."""
        with self._gate:
            if not self._closing:
                self._inbox.put(what)
            return not self._closing

    def _wake(self) -> None:
        self._inbox.put(None)

    # -- what there is to see ----------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return counters and sizes: JSON-ready, keys as everywhere in llamakeep.

        From any thread, without waiting for a batch; costs nothing that grows with what is kept.
        """
        busy = self._scheduler.n_busy
        traits = self._runtime.traits
        return {
            **self._records.stats(),
            "batches": self._scheduler.n_batches,
            "batch_slots": self._scheduler.n_parts,
            "slots": self.n_slots,
            "slots_busy": busy,
            "waiting": max(0, self._n_open - busy),
            "n_ctx": self.n_ctx,
            "family": traits.family.value,
            "whole_because": traits.whole_because,
            **self._keeping.stats(),
        }

    def recent(self) -> list[Record]:
        """Return what became of the last 100 requests, the newest first."""
        return self._records.recent()

    def explain(
        self, request: int | str | None = None, *, texts: bool = True
    ) -> Explanation | None:
        """Say why the rest of a prompt was evaluated; None for a request that is forgotten.

        From any thread; costs some milliseconds for a long prompt, and reads of the disk tier for
        one of which nothing was known.

        Args:
            request: Number or label of one of the last requests; the last one if None.
            texts: Quote both texts where two prompts part, and tell of other salts: for who may
                know what all tenants say.
        """
        served = self.history.find(request)
        if served is None:
            return None
        found = self.history.explain(served, self.vocab, salts=texts)
        return found if texts else found.without_texts()

    def _kept_elsewhere(self, namespace: bytes, tokens: IntArray) -> tuple[Difference, ...]:
        """Ask the tiers, in the thread that wants to know; not when they are about to be closed."""
        return () if self._closing else self._keeping.kept_elsewhere(namespace, tokens)

    def entries(self) -> list[dict[str, Any]]:
        """Return every kept prompt, most recently used first: JSON-ready."""
        return self.call(self._keeping.entries)

    def glance(self) -> list[SlotGlance]:
        """Return how far each slot is: numbers alone. From any thread, without waiting.

        A batch may end meanwhile: the numbers of a slot can be of before and after it.
        """
        now = self._clock()
        return [
            SlotGlance.of(slot, self._keeping.held_tokens(slot.slot_id), now)
            for slot in self._scheduler.slots
        ]

    def outline(self) -> tuple[Outline, float] | None:
        """Return what is kept as a tree, and how many seconds ago it was so.

        From any thread, without waiting. The engine is asked to look again between two batches, but
        no more often than it can spare time for: so what is asked for after a while is old, and
        None the first time.
        """
        return self._looks.latest()

    def slots(self) -> list[SlotInfo]:
        """Return what each slot holds and does, between two batches."""

        def look() -> list[SlotInfo]:
            return [
                SlotInfo.of(slot, self._keeping.tokens(slot.slot_id).copy(), self.n_ctx)
                for slot in self._scheduler.slots
            ]

        return self.call(look)

    # -- slots and what is kept --------------------------------------------------------------------

    def slot_save(self, slot_id: int, path: Path, *, salt: str = "") -> SlotFile:
        """Write what an idle slot holds to a file. See `SlotActions.save`."""
        return self._actions.save(slot_id, path, salt=salt)

    def slot_restore(self, slot_id: int, path: Path, *, salt: str = "") -> SlotFile:
        """Put what a file holds into an idle slot. See `SlotActions.restore`."""
        return self._actions.restore(slot_id, path, salt=salt)

    def slot_erase(self, slot_id: int, *, salt: str = "") -> int:
        """Empty an idle slot. See `SlotActions.erase`."""
        return self._actions.erase(slot_id, salt=salt)

    def clear_cache(self) -> dict[str, Any]:
        """Forget everything that is kept, and what idle slots hold; return what was freed.

        Waits until it is gone below memory, too; answers go on meanwhile.
        """

        def clear() -> tuple[int, Callable[[], None]]:
            before = self._keeping.stats()["used_bytes"]
            for slot in self._scheduler.slots:
                if slot.job is None:
                    self._keeping.clear(slot.slot_id)
            wait = self._keeping.forget()
            self.history.clear()
            return before - self._keeping.stats()["used_bytes"], wait

        freed_bytes, wait = self.call(clear)
        wait()
        if self._keeping.has_tiers:
            self.call(clear)  # what was read from there before it was gone
        return {"freed_bytes": freed_bytes}

    def flush(self, timeout_s: float | None = None) -> bool:
        """Keep what idle slots hold, and wait until all of it is in the tiers below memory too."""
        self.call(self._scheduler.cells.save_idle)
        return self._keeping.flush(timeout_s)

    def settle(self) -> None:
        """Let observers hear of all that has ended: usually they do some milliseconds later.

        Waits for a thread that is telling them, for a second at most; the engine's own does not. An
        observer that calls this while it hears of an end returns at once.
        """
        self._untold.tell(0.0 if threading.current_thread() is self._thread else _SETTLE_S)

    def check(self) -> None:
        """Prove that what is counted is what is kept.

        Raises:
            IntegrityError: With the numbers.
        """
        self.call(self._keeping.check)

    def close(self, drain_s: float = 0.0, *, flush_s: float = 10.0) -> None:
        """Take no more, let answers finish for a while, keep everything, and free the context.

        Args:
            drain_s: Seconds that running answers have to finish; what waits, and what is not
                finished then, is told that the engine is closed.
            flush_s: Seconds that the tiers below memory have to write what is on its way.

        Again, or from several threads: waits until it is closed.
        """
        with self._gate:
            if not self._closing:
                self._deadline, self._flush_s = self._clock() + drain_s, flush_s
            self._closing = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # -- the engine's thread -----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException:
            logger.exception("the engine stopped")
        finally:
            self._shut_down()

    def _turn(self) -> bool:
        """Do what is to be done until the next batch has run; return whether to go on."""
        scheduler = self._scheduler
        self._take_orders()
        scheduler.drop_cancelled()
        if self._closing:
            error = EngineClosed("the engine is shutting down")
            is_over = self._clock() >= self._deadline
            scheduler.fail_waiting(error, begun=is_over)
            if is_over:
                scheduler.fail_running(error)
            if not scheduler.has_work:
                return False
        scheduler.start_waiting()
        self._unsaved = self._unsaved or scheduler.n_busy > 0
        scheduler.step()
        return True

    def _take_orders(self) -> None:
        """Run what other threads asked for; wait for it when there is nothing else to do."""
        block = not self._scheduler.has_work and not self._closing
        if block and self._unsaved and self._inbox.empty():
            self._unsaved = False
            self._scheduler.cells.guarded("save", self._rest)
        while True:
            try:
                order = self._inbox.get(block, _AFTERWARDS_S if block and self._untold else None)
            except queue.Empty:
                self.settle()
                if block:
                    continue
                return
            block = False
            if order is not None:
                order()

    def _rest(self) -> None:
        """Nobody waits: what is live goes below memory, if there is something below."""
        if self._keeping.has_tiers:
            self._scheduler.cells.save_idle()

    def _ended(self, job: Job, last: Finished | Failed) -> None:
        with self._gate:
            self._n_open -= 1
        record = job.record(last, self._clock())
        self._records.add(record)
        served = job.served(self._keeping.namespace_of(job.request.salt), self._clock())
        self.history.add(served)
        self._untold.add(record, served)

    def _shut_down(self) -> None:
        """End everything that is left, keep what is live, free the context."""
        with self._gate:
            was_closed, self._closing = self._closing, True
        if not was_closed and self.on_stop is not None:
            self._scheduler.cells.guarded("stop", self.on_stop)
        scheduler, error = self._scheduler, EngineClosed("the engine is shutting down")
        while True:
            try:
                order = self._inbox.get_nowait()
            except queue.Empty:
                break
            if order is not None:
                scheduler.cells.guarded("order", order)
        scheduler.fail_waiting(error)
        scheduler.fail_running(error)
        self._untold.tell(_SETTLE_S)
        scheduler.cells.guarded("close", lambda: self._keeping.close(self._flush_s))
        scheduler.cells.guarded("close", self._runtime.close)
        self.observers.closed()
