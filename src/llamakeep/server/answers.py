"""Answers as they come: from the engine's thread to whoever waits for them.

::

    engine's thread --listener--> Inbox --take--> a stream (sse.py), or `collect`
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from starlette.types import Receive

from llamakeep.engine import Engine, Ticket
from llamakeep.engine.request import (
    Begun,
    Choice,
    Failed,
    Finished,
    Listener,
    Piece,
    Progress,
    Request,
    Timings,
    Update,
)
from llamakeep.server.errors import ClientGone
from llamakeep.server.talk import Ending, Plan, Talk, ending_of
from llamakeep.server.threads import size_of_answer

_WATCH_AFTER_S = 0.1
_AT_ONCE = 256
"""Updates of a long answer that are looked at without a break: about a millisecond."""
_NO_LIMIT = 1 << 62


@dataclass(slots=True)
class Answer:
    """One answer, as far as it has come.

    Attributes:
        request: What was asked.
        index: Which of the answers to one HTTP request it is.
        keep: Whether texts and tokens are collected, or only counted.
        talk: Tells it apart; None where it is nothing but text.
    """

    request: Request
    index: int
    keep: bool = True
    talk: Talk | None = None
    texts: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    probs: list[Choice] = field(default_factory=list)
    begun: Begun | None = None
    progress: Progress | None = None
    finished: Finished | None = None
    n_decoded: int = 0
    has_new_line: bool = False
    began_at: float = math.nan
    first_at: float = math.nan
    last_at: float = math.nan

    def take(self, update: Update) -> None:
        """Note what has come."""
        if isinstance(update, Piece):
            self.last_at = time.perf_counter()
            if not self.n_decoded:
                self.first_at = self.last_at
            self.n_decoded += len(update.tokens)
            self.has_new_line = self.has_new_line or "\n" in update.text
            if self.keep:
                self.texts.append(update.text)
                self.tokens.extend(update.tokens)
                self.probs.extend(update.probs)
        elif isinstance(update, Begun):
            self.begun, self.began_at = update, time.perf_counter()
        elif isinstance(update, Progress):
            self.progress = update
        elif isinstance(update, Finished):
            self.finished = update
        if self.talk is not None:
            self.talk.take(update)

    @property
    def is_enough(self) -> bool:
        """Whether the rest of it is not wanted."""
        return self.talk is not None and self.talk.is_complete and self.finished is None

    @property
    def ending(self) -> Ending:
        """Why it ended; it must have."""
        assert self.finished is not None
        return ending_of(self.finished, self.talk)

    @property
    def text(self) -> str:
        """What was collected of the text."""
        return "".join(self.texts)

    @property
    def slot_id(self) -> int:
        """Which slot answers; -1 as long as none does."""
        if self.finished is not None and self.finished.slot_id is not None:
            return self.finished.slot_id
        return -1 if self.begun is None else self.begun.slot_id

    @property
    def n_prompt(self) -> int:
        """Tokens of the prompt."""
        return int(self.request.prompt.size)

    @property
    def n_generated(self) -> int:
        """Tokens generated; at its end that which ended it is counted, too."""
        return self.n_decoded if self.finished is None else self.finished.timings.predicted_n

    @property
    def n_reused(self) -> int:
        """Those that were not evaluated."""
        reuse = self.finished.reuse if self.finished else self.begun and self.begun.reuse
        return reuse.reused_tokens if reuse else 0

    @property
    def size(self) -> int:
        """About what it costs to write it, see `threads.size_of_answer`."""
        n_biases = len(self.request.sampling.logit_bias)
        return size_of_answer(self.n_prompt, self.n_decoded, self.request.n_probs, n_biases)

    @property
    def timings(self) -> Timings:
        """What it has cost up to now; the engine's own figures at its end."""
        if self.finished is not None:
            return self.finished.timings
        prompt_n, prompt_ms = self.n_prompt - self.n_reused, (self.first_at - self.began_at) * 1e3
        if math.isnan(prompt_ms):  # it is being evaluated
            prompt_n, prompt_ms = 0, 0.0
            if self.progress is not None:
                prompt_n = self.progress.processed - self.progress.cached
                prompt_ms = self.progress.ms if prompt_n else 0.0
        return Timings(
            queue_ms=0.0,
            prompt_n=prompt_n,
            cache_n=self.n_reused,
            prompt_ms=prompt_ms,
            predicted_n=self.n_decoded,
            predicted_ms=(self.last_at - self.first_at) * 1e3 if self.n_decoded else 0.0,
        )


class Inbox:
    """Updates on their way from the engine's thread to the event loop.

    The loop is woken once for all that came since it last looked. Made in the event loop, which
    alone calls all methods but the listeners.

    Args:
        backlog: Updates that may wait; `overflown` says that there were more.
        eager: Wake the loop for every update, not only for the last one of each answer.

    Attributes:
        overflown: Whoever should take the updates does not keep up.
    """

    def __init__(self, backlog: int, *, eager: bool = True) -> None:
        self.overflown = False
        self._eager = eager
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[int, Update]] = deque()
        self._backlog = backlog
        self._woken = False
        self._event = asyncio.Event()
        self._tickets: list[Ticket] = []
        self._open = 0

    def submit(self, engine: Engine, requests: Sequence[Request]) -> None:
        """Ask for all answers, or for none.

        Raises:
            LlamakeepError: What the engine refuses.
        """
        asked = [(request, self._listener(index)) for index, request in enumerate(requests)]
        self._tickets = engine.submit_all(asked)
        self._open = len(asked)

    def _listener(self, index: int) -> Listener:
        waiting, eager = self._waiting, self._eager

        def hear(update: Update) -> None:
            waiting.append((index, update))
            if not self._woken and (eager or isinstance(update, Finished | Failed)):
                self._woken = True
                # A loop that is closed has nobody waiting in it.
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(self._wake)

        return hear

    def _wake(self) -> None:
        self._woken = False
        if self._eager and len(self._waiting) > self._backlog and not self._are_all_there():
            self.overflown = True
            self.cancel()
        self._event.set()

    def _are_all_there(self) -> bool:
        """Whether nothing more will come."""
        ends = sum(isinstance(update, Finished | Failed) for _, update in self._waiting.copy())
        return ends >= self._open

    def poke(self) -> None:
        """Let `take` return, with nothing if nothing came."""
        self._event.set()

    async def take(self) -> list[tuple[int, Update]]:
        """Wait until something came or `poke` was called; return all that is there, in order.

        It may be nothing.
        """
        if not self._waiting:
            await self._event.wait()
        self._event.clear()
        result: list[tuple[int, Update]] = []
        while self._waiting:
            result.append(self._waiting.popleft())
        self._open -= sum(isinstance(update, Finished | Failed) for _, update in result)
        return result

    @property
    def is_open(self) -> bool:
        """Whether answers are not complete yet."""
        return self._open > 0

    def end(self, answer: Answer) -> None:
        """End one answer, whose rest is not wanted."""
        if answer.index < len(self._tickets):
            self._tickets[answer.index].cancel()

    def cancel(self) -> None:
        """End what is not complete yet."""
        tickets, self._tickets = self._tickets, []
        for ticket in tickets:
            ticket.cancel()


class Watch:
    """Notices that the client hung up, while nothing is sent to it. A context manager.

    It begins to look after `_WATCH_AFTER_S`: a task of its own costs more than a short wait.

    Args:
        receive: Of the request, whose body was read.
        inbox: Is poked then.

    Attributes:
        gone: It did.
    """

    def __init__(self, receive: Receive, inbox: Inbox) -> None:
        self.gone = False
        self._receive = receive
        self._inbox = inbox

    async def __aenter__(self) -> Watch:
        self._task: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(_WATCH_AFTER_S, self._begin)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def _begin(self) -> None:
        self._task = asyncio.ensure_future(self._listen())

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        self._inbox.poke()

    def check(self) -> None:
        """Raise `ClientGone` if nobody waits any more."""
        if self.gone:
            raise ClientGone


async def collect(
    engine: Engine,
    requests: Sequence[Request],
    receive: Receive,
    meanwhile: Callable[[], object] = lambda: None,
    plan: Plan | None = None,
    hear: Callable[[Answer, Update], object] = lambda _answer, _update: None,
) -> list[Answer]:
    """Ask, and wait for all answers.

    Args:
        engine: Answers.
        requests: What is asked.
        receive: Of the HTTP request, whose body was read.
        meanwhile: Called once they are asked: takes no time from anybody while the model works.
        plan: Of a conversation; its answers are told apart.
        hear: Called with each update, which its answer has taken already.

    Raises:
        ClientGone: When the client hung up; nothing goes on for it.
        Exception: What the engine refuses, or why an answer failed.
    """
    answers = [
        Answer(request, index, talk=None if plan is None else plan.talk())
        for index, request in enumerate(requests)
    ]
    looks = plan is not None and not plan.parallel  # for where an answer is enough
    inbox = Inbox(_NO_LIMIT, eager=looks)
    inbox.submit(engine, requests)
    try:
        meanwhile()
        async with Watch(receive, inbox) as watch:
            while inbox.is_open:
                for count, (index, update) in enumerate(await inbox.take(), 1):
                    if count % _AT_ONCE == 0:
                        await asyncio.sleep(0)  # others are served in between
                    if isinstance(update, Failed):
                        raise update.error
                    answers[index].take(update)
                    hear(answers[index], update)
                    if answers[index].is_enough:
                        inbox.end(answers[index])
                watch.check()
    finally:
        inbox.cancel()
    return answers
