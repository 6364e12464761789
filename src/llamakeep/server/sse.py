"""Streams of server-sent events over the engine's updates.

Whatever ends a stream early (the client hangs up, stops reading or is too slow, the server stops)
cancels what it still waits for. What fails before the first byte has a status of its own; later
failures are an event with the error in it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any, Protocol

import anyio
from fastapi.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from llamakeep.engine import Engine
from llamakeep.engine.request import Failed, Finished, Piece, Request, Update
from llamakeep.server.answers import Answer, Inbox, Watch
from llamakeep.server.context import ServerOptions
from llamakeep.server.errors import ApiError, api_error
from llamakeep.server.talk import Plan
from llamakeep.server.threads import size_of_answer, size_of_piece, soon
from llamakeep.server.wire import dumps

ABORT = "llamakeep.abort"
"""In a request's `extensions`: ends its connection, with what was not taken of it."""
_log = logging.getLogger("llamakeep")

PING = b":\n\n"
"""A comment, which every client skips."""
_TOO_SLOW = ApiError(
    "the answer is not complete: it was cancelled, because it was not taken as fast as it came",
    code=503,
)


def event(data: Any) -> bytes:
    """Return one event with `data` as JSON."""
    return b"data: " + dumps(data) + b"\n\n"


class Encoder(Protocol):
    """Writes the updates of one HTTP request as events."""

    def encode(self, answer: Answer, update: Update) -> bytes:
        """Return the events for one update, which `answer` has taken already; often one."""
        ...  # pragma: no cover - protocol

    def tail(self) -> bytes:
        """Return what comes after the last answer is complete."""
        ...  # pragma: no cover - protocol

    def failed(self, error: ApiError) -> bytes:
        """Return the events that tell of a failure; nothing comes after them."""
        ...  # pragma: no cover - protocol

    @property
    def ping(self) -> bytes:
        """What comes when nothing has come for some time."""
        ...  # pragma: no cover - protocol


class EventStream(StreamingResponse):
    """A response whose events are made from the engine's updates as they come.

    Args:
        inbox: Where they come; its answers are cancelled when the response ends, however it does.
        first: Those that came already.
        answers: By index.
        encoder: Makes events of them.
        options: For how long a client may take nothing, and how often a silent stream speaks.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        inbox: Inbox,
        first: Sequence[tuple[int, Update]],
        answers: Sequence[Answer],
        encoder: Encoder,
        options: ServerOptions,
    ) -> None:
        self._inbox = inbox
        self._answers = answers
        self._told_apart = [answer for answer in answers if answer.talk is not None]
        self._encoder = encoder
        self._options = options
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(self._events(first), headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it all. A client that takes nothing for `stall_s` is left alone."""
        stall_s = self._options.stall_s
        with anyio.CancelScope() as patience:

            async def send_in_time(message: Message) -> None:
                patience.deadline = anyio.current_time() + stall_s
                await send(message)
                patience.deadline = math.inf

            try:
                await super().__call__(scope, receive, send_in_time)
            finally:
                self._inbox.cancel()
        if patience.cancelled_caught:
            _log.warning("a client took nothing for %g s: its answer is cancelled", stall_s)
            abort = (scope.get("extensions") or {}).get(ABORT)
            if abort is not None:
                abort()
                for _ in range(3):  # turns of the event loop, until uvicorn knows
                    await anyio.lowlevel.checkpoint()

    async def _events(self, first: Sequence[tuple[int, Update]]) -> AsyncIterator[bytes]:
        inbox, pending = self._inbox, first
        pinger = _Pinger(inbox, self._options.ping_s)
        try:
            while True:
                if inbox.overflown:
                    _log.warning("a client is too slow: its answer is cancelled")
                    yield self._encoder.failed(_TOO_SLOW)
                    return
                size, work = self._size(pending), partial(self._write, pending)
                data, failed = await soon(self._options, size, work)
                for answer in self._told_apart:
                    if answer.is_enough:
                        inbox.end(answer)
                if failed:
                    yield data
                    return
                if not inbox.is_open:
                    data += self._encoder.tail()
                elif pinger.is_due and not data:
                    data = self._encoder.ping
                if data:
                    yield data
                    pinger.rest()
                if not inbox.is_open:
                    return
                pending = await inbox.take()
        finally:
            pinger.close()

    def _size(self, updates: Sequence[tuple[int, Update]]) -> int:
        """Return about what it costs to write updates, in letters; see `threads`."""
        size = 0
        for index, update in updates:
            if isinstance(update, Piece):
                size += size_of_piece(update)
            elif isinstance(update, Finished):  # with the settings, and the prompt's text
                request = self._answers[index].request
                size += size_of_answer(update.n_prompt, 0, 0, len(request.sampling.logit_bias))
        return size

    def _write(self, updates: Sequence[tuple[int, Update]]) -> tuple[bytes, bool]:
        """Return the events of updates, and whether the last one tells of a failure."""
        parts: list[bytes] = []
        for index, update in updates:
            if isinstance(update, Failed):
                parts.append(self._encoder.failed(api_error(update.error)))
                return b"".join(parts), True
            answer = self._answers[index]
            answer.take(update)
            parts.append(self._encoder.encode(answer, update))
        return b"".join(parts), False


class _Pinger:
    """Wakes a stream that has been silent for some time. One timer, however many tokens come."""

    def __init__(self, inbox: Inbox, after_s: float) -> None:
        self._inbox = inbox
        self._after_s = after_s
        self._loop = asyncio.get_running_loop()
        self._spoke_at = self._loop.time()
        self._timer: asyncio.TimerHandle | None = self._loop.call_later(after_s, self._ring)

    @property
    def is_due(self) -> bool:
        """Whether it has been silent for too long."""
        return self._loop.time() - self._spoke_at >= self._after_s

    def rest(self) -> None:
        """Note that it spoke."""
        self._spoke_at = self._loop.time()

    def close(self) -> None:
        """End the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _ring(self) -> None:
        left = self._spoke_at + self._after_s - self._loop.time()
        if left <= 0:
            self._inbox.poke()
            left = self._after_s
        self._timer = self._loop.call_later(left, self._ring)


async def stream(
    engine: Engine,
    requests: Sequence[Request],
    receive: Receive,
    encoder: Encoder,
    options: ServerOptions,
    plan: Plan | None = None,
) -> EventStream:
    """Ask, and return the stream of all answers once the first of them has begun.

    While all wait in the queue nothing is sent, so that what is refused there has its status; but
    after `ping_s` the stream begins anyway.

    Args:
        engine: Answers.
        requests: What is asked.
        receive: Of the HTTP request, whose body was read.
        encoder: Writes the events.
        options: What the server was told.
        plan: Of a conversation; its answers are told apart.

    Raises:
        ClientGone: When the client hung up before.
        Exception: What the engine refuses, or why the first answer failed.
    """
    answers = [
        Answer(request, index, keep=False, talk=None if plan is None else plan.talk(keep=False))
        for index, request in enumerate(requests)
    ]
    inbox = Inbox(options.backlog)
    inbox.submit(engine, requests)
    timer = asyncio.get_running_loop().call_later(options.ping_s, inbox.poke)
    try:
        async with Watch(receive, inbox) as watch:
            first = await inbox.take()
            watch.check()
        for _, update in first:
            if isinstance(update, Failed):
                raise update.error
    except BaseException:
        inbox.cancel()
        raise
    finally:
        timer.cancel()
    return EventStream(inbox, first, answers, encoder, options)
