"""Running a server: the port first, then the model, then requests, until a signal.

The port is bound before the model is loaded, so that one that is taken is found at once, and who
asks while it loads is told so. At SIGINT or SIGTERM nothing new is taken, and running answers may
go on for a while; who is not answered then is told why. A second signal ends the process at once:
what is on disk bears that. A service that ends by itself ends the process.

    signal -> no more connections -> the service closes: answers end or fail -> they are sent -> end
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import (
    Awaitable,
    Callable,
    Iterator,
    MutableMapping,
    Sequence,
)
from contextlib import AsyncExitStack, contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any

import uvicorn

from llamakeep.server import anthropic_errors
from llamakeep.server.connections import Door, most_connections
from llamakeep.server.listening import BACKLOG, base_url, bind_all
from llamakeep.server.logs import tell
from llamakeep.server.service import Load, OnProgress, Receive, Scope, Send, Service
from llamakeep.server.settings import ServerSettings
from llamakeep.server.sse import ABORT

_LAST_WORDS_S = 1
"""What clients have, at least, to take how their answers ended; and requests to clean up."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SHOW_CURSOR = b"\x1b[?25h"
_LOADING = "Loading model"
_ENDED = "the server has ended"


class _Told(Exception):
    """The server was told to end while the model was being loaded."""


def serve(
    settings: ServerSettings,
    load: Load,
    *,
    on_progress: OnProgress = lambda _share: None,
    on_ready: Callable[[Service, str], None] = lambda _service, _url: None,
) -> bool:
    """Serve until SIGINT or SIGTERM. From the main thread, once at a time.

    Args:
        settings: What the server is told.
        load: See `Load`.
        on_progress: See `OnProgress`; from the loading thread.
        on_ready: Called with what was loaded and the server's URL when it answers.

    Returns:
        Whether it was told to end; no, if the service ended by itself.

    Raises:
        InvalidValue: For a port that is taken, and what `load` raises for a wrong value.
        ModelError: For a model that is missing, and what `load` raises.
    """
    settings.check_files()
    socks = bind_all(settings.host, settings.port)
    try:
        return asyncio.run(_Run(settings, socks, load, on_progress, on_ready).run())
    finally:
        for sock in socks:
            sock.close()


async def _unavailable(message: str, path: str, send: Send) -> None:
    """Answer 503, in the form of the address that was asked."""
    code, error = 503, {"code": 503, "message": message, "type": "unavailable_error"}
    answer: dict[str, Any] = {"error": error}
    if anthropic_errors.is_meant(path):
        answer = anthropic_errors.body_of(code, error, anthropic_errors.new_request_id())
        code = anthropic_errors.code_of(code)
    body = json.dumps(answer).encode()
    headers = [
        (b"content-type", b"application/json; charset=utf-8"),
        (b"content-length", b"%d" % len(body)),
        (b"retry-after", b"1"),
    ]
    await send({"type": "http.response.start", "status": code, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class _Front:
    """Answers that the model is being loaded, until there is an application.

    A request that is cancelled at the end of the server, because it took longer than all others
    were given, is a 503 too, or an answer that is not complete.
    """

    def __init__(self) -> None:
        self.app: Callable[[Scope, Receive, Send], Awaitable[None]] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if self.app is None:
            await _unavailable(_LOADING, scope["path"], send)
            return
        has_begun, scope = False, _with_abort(scope, send)

        async def begin(message: MutableMapping[str, Any]) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self.app(scope, receive, begin)
        except asyncio.CancelledError:  # by uvicorn alone, which would log it as a fault
            if not has_begun:
                await _unavailable(_ENDED, scope["path"], send)


def _with_abort(scope: Scope, send: Send) -> Scope:
    """Return a request that can end its connection, where uvicorn lets us have that.

    There is no such thing in ASGI: what a client does not take would be kept for it.
    """
    transport = getattr(getattr(send, "__self__", None), "transport", None)
    abort = getattr(transport, "abort", None)
    if abort is None:
        return scope
    return {**scope, "extensions": {**(scope.get("extensions") or {}), ABORT: abort}}


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone: `_Run` hears them, from before the model is loaded."""
        yield


class _Run:
    """One run of a server."""

    def __init__(
        self,
        settings: ServerSettings,
        socks: Sequence[socket.socket],
        load: Load,
        on_progress: OnProgress,
        on_ready: Callable[[Service, str], None],
    ) -> None:
        self._settings = settings
        self._socks = list(socks)
        self._url = base_url(settings.host[0], socks[0].getsockname()[1])
        self._load = load
        self._on_progress = on_progress
        self._on_ready = on_ready
        self._told = threading.Event()
        self._ending = asyncio.Event()
        self._has_stopped = False
        self._front = _Front()
        self._door = Door(most_connections(), clock=time.monotonic)
        self._server = _Server(
            uvicorn.Config(
                self._front,
                http=self._door.protocol(),
                backlog=BACKLOG,
                lifespan="off",  # the application's own runs once it is there
                ws="none",
                log_config=None,
                log_level=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=_LAST_WORDS_S,
            )
        )

    async def run(self) -> bool:
        """Load, serve, drain, close; return whether it was told to end."""
        asyncio.get_running_loop().set_exception_handler(self._door.hear)
        with self._hearing_signals():
            serving = asyncio.create_task(self._server.serve(sockets=self._socks))
            loading = self._start_loading()
            either: set[asyncio.Future[Any]] = {serving, loading}
            try:
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if serving.done():
                    self._told.set()
                await self._serve(await loading, serving)
            except _Told:
                pass
            finally:
                self._server.should_exit = True
                await serving
        return not self._has_stopped

    async def _serve(self, service: Service, serving: asyncio.Task[None]) -> None:
        loop = asyncio.get_running_loop()
        async with AsyncExitStack() as lifespan:
            drain_s = 0.0
            try:
                router = getattr(service.app, "router", None)
                if router is not None:
                    await lifespan.enter_async_context(router.lifespan_context(service.app))
                self._front.app = service.app
                service.watch(partial(self._hear_stop, loop))
                if not self._told.is_set():
                    self._on_ready(service, self._url)
                await self._until_the_end(serving)
                drain_s = self._settings.drain_s
            finally:
                until = loop.time() + drain_s
                self._stop_listening()
                await asyncio.to_thread(service.close, drain_s)
            tasks = self._server.server_state.tasks
            while tasks and (left := until - loop.time()) > 0:  # who reads slowly has that, too
                await asyncio.wait(set(tasks), timeout=left)
            self._server.should_exit = True
            await serving
            if tasks:  # cancelled: let them clean up
                await asyncio.wait(set(tasks), timeout=_LAST_WORDS_S)

    async def _until_the_end(self, serving: asyncio.Task[None]) -> None:
        ending = asyncio.create_task(self._ending.wait())
        await asyncio.wait({serving, ending}, return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()

    def _stop_listening(self) -> None:
        """Take no more connections; those that are there stay. Again: does nothing."""
        for server in getattr(self._server, "servers", ()):  # it has none before it has started
            server.close()

    # -- loading ---------------------------------------------------------------------------------

    def _start_loading(self) -> asyncio.Future[Service]:
        """Load in a thread that does not keep the process alive."""
        loop = asyncio.get_running_loop()
        loaded: asyncio.Future[Service] = loop.create_future()

        def run() -> None:
            try:
                service = self._load(self._settings, self._progress)
            except BaseException as error:  # noqa: BLE001 - raised where it is awaited
                loop.call_soon_threadsafe(loaded.set_exception, error)
            else:
                loop.call_soon_threadsafe(loaded.set_result, service)

        threading.Thread(target=run, name="llamakeep-load", daemon=True).start()
        return loaded

    def _progress(self, share: float) -> None:
        if self._told.is_set():
            raise _Told
        self._on_progress(share)

    # -- signals ---------------------------------------------------------------------------------

    @contextmanager
    def _hearing_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()

        def hear(number: int, _frame: FrameType | None) -> None:
            if self._told.is_set():
                _end_at_once(number)
            self._told.set()
            loop.call_soon_threadsafe(self._begin_to_end)

        before = {number: signal.signal(number, hear) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _begin_to_end(self) -> None:
        self._stop_listening()
        self._ending.set()
        drain_s = self._settings.drain_s
        tell(
            "ending",
            f"ending: running answers may go on for {drain_s:g} s; a second signal ends at once",
            drain_s=drain_s,
        )

    # -- a service that ends by itself -------------------------------------------------------------

    def _hear_stop(self, loop: asyncio.AbstractEventLoop) -> None:
        with suppress(RuntimeError):  # the loop is closed: it is over anyway
            loop.call_soon_threadsafe(self._stopped)

    def _stopped(self) -> None:
        if self._told.is_set():
            return
        self._told.set()
        self._has_stopped = True
        self._stop_listening()
        self._ending.set()
        tell("stopped", "the engine has stopped: the server ends, too", level=logging.ERROR)


def _end_at_once(number: int) -> None:
    if sys.stderr is not None and sys.stderr.isatty():
        os.write(sys.stderr.fileno(), _SHOW_CURSOR)  # a progress bar hides it
    os._exit(128 + number)
