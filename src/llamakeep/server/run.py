"""Running a server: the port first, then the model, then requests, until a signal.

The port is bound before the model is loaded, so that one that is taken is found at once, and who
asks while it loads is told so. At SIGINT or SIGTERM nothing new is taken, running answers may go on
for a while, what is left is cancelled, and the service is closed. A second signal ends the process
at once: what is on disk bears that.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from types import FrameType
from typing import Any, TypeAlias, cast

import uvicorn

from llamakeep.chat_template import ChatTemplate
from llamakeep.errors import InvalidValue
from llamakeep.runtime.base import Vocab
from llamakeep.server.logs import tell, tell_progress, tell_request
from llamakeep.server.metrics import CountRequests, Metrics
from llamakeep.server.ports import Engine, ServerOptions
from llamakeep.server.records import WatchedEngine
from llamakeep.server.settings import ServerSettings

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]

_BACKLOG = 2048
_UNREAD_MS = 30_000
"""How long the system keeps what a client does not take after it was cut off."""
_AFTER_CANCEL_S = 1.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SHOW_CURSOR = b"\x1b[?25h"
_LOADING = {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}


@dataclass(frozen=True)
class Service:
    """What was loaded.

    Attributes:
        app: Answers requests: an ASGI application. The lifespan of a Starlette one is run.
        close: Frees the model after saving what is kept; called once, from a thread of its own.
        model_name: What clients see.
        n_slots: Requests that are answered at the same time.
        n_ctx: Tokens that all of them together have room for.
        tiers: Where states are kept, the first one first, and the most bytes there; None if that
            is not known.
    """

    app: Callable[[Scope, Receive, Send], Awaitable[None]]
    close: Callable[[], None]
    model_name: str = ""
    n_slots: int = 1
    n_ctx: int = 0
    tiers: Mapping[str, int | None] = field(default_factory=dict)


OnProgress: TypeAlias = Callable[[float], None]
"""Hears how much of the model is loaded, 0 to 1. What it raises ends the loading."""
Load: TypeAlias = Callable[[ServerSettings, OnProgress], Service]
"""Loads the model and makes the application; called in a thread of its own."""


class _Told(Exception):
    """The server was told to end while the model was being loaded."""


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens; the clients that come are kept waiting.

    Raises:
        InvalidValue: For a port that is taken or not allowed, or a host that is none of this
            machine's.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (OSError, UnicodeError) as error:
        raise InvalidValue(f"--host {host!r}: {_words(error)}") from error
    sock = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":  # elsewhere this lets two programs have one port
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # a client that never reads must not keep us
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNREAD_MS)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise InvalidValue(
                f"port {port} of {host} is taken: another program listens there; "
                "--port chooses another one"
            ) from error
        raise InvalidValue(f"cannot listen on port {port} of {host}: {_words(error)}") from error
    sock.setblocking(False)
    return sock


def _words(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def base_url(host: str, port: int) -> str:
    """Return the URL under which this machine finds a server."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"


def load_service(settings: ServerSettings, on_progress: OnProgress) -> Service:
    """Load the model and make the application that answers with it. See `Load`.

    Raises:
        ModelError: For a file that is no model, or none that fits.
        InvalidValue: For a value that this model cannot have.
        TemplateError: For a chat template that cannot be read.
        StoreError: For a directory or server that cannot keep states.
    """
    from llamakeep.server.app import create_app
    from llamakeep.server.loading import load_engine

    engine = load_engine(settings, on_progress)
    try:
        metrics = Metrics(engine.stats)
        engine.on_saved(metrics.saved)
        watched = WatchedEngine(
            engine,
            tell_request,
            metrics.finished,
            progress=tell_progress if sys.stderr.isatty() else None,
            refused=metrics.refused,
        )
        template = _template_of(settings, engine.vocab)
        app = create_app(
            cast(Engine, watched),
            options_of(settings),
            template,
            template_source="" if template is None else template.source,
            exposition=metrics.exposition if settings.metrics else None,
            version=version("llamakeep"),
        )
        app.add_middleware(CountRequests, metrics=metrics)
    except BaseException:
        engine.close()
        raise
    return Service(
        app, engine.close, engine.model_name, engine.n_slots, engine.n_ctx, tiers_of(engine.stats())
    )


def options_of(settings: ServerSettings) -> ServerOptions:
    """Return what the HTTP interface is told."""
    return ServerOptions(
        model_path=str(settings.model),
        build=f"llamakeep-{version('llamakeep')}",
        n_predict=settings.predict,
        api_keys=settings.read_api_keys(),
        cors=settings.cors,
        max_body_bytes=settings.max_body_bytes,
        slot_save_path=settings.slot_save_path,
        slots=settings.slots,
        stall_s=settings.timeout_s,
    )


def tiers_of(stats: Mapping[str, Any]) -> dict[str, int | None]:
    """Return where an engine keeps states, and the most bytes there, from its `stats`."""
    tiers: dict[str, int | None] = {}
    if stats.get("capacity_bytes"):
        tiers["ram"] = stats["capacity_bytes"]
    below = (stats.get("below") or {}).get("tiers") or {}
    return tiers | {tier: figures.get("capacity_bytes") for tier, figures in below.items()}


def _template_of(settings: ServerSettings, vocab: Vocab) -> ChatTemplate | None:
    """Return the template for chats; None for a model that has none, which can still complete."""
    source = settings.read_chat_template() or vocab.chat_template
    if source is None or not source.strip():
        return None
    bos, eos = ("" if token is None else vocab.text([token]) for token in (vocab.bos, vocab.eos))
    return ChatTemplate(source, bos_token=bos, eos_token=eos, add_bos=vocab.adds_bos)


def serve(
    settings: ServerSettings,
    load: Load,
    *,
    on_progress: OnProgress = lambda _share: None,
    on_ready: Callable[[Service, str], None] = lambda _service, _url: None,
) -> None:
    """Serve until SIGINT or SIGTERM. From the main thread, once at a time.

    Args:
        settings: What the server is told.
        load: See `Load`.
        on_progress: See `OnProgress`; from the loading thread.
        on_ready: Called with what was loaded and the server's URL when it answers.

    Raises:
        InvalidValue: For a port that is taken, and what `load` raises for a wrong value.
        ModelError: For a model that is missing, and what `load` raises.
    """
    settings.check_files()
    sock = bind(settings.host, settings.port)
    try:
        asyncio.run(_Run(settings, sock, load, on_progress, on_ready).run())
    finally:
        sock.close()


class _Front:
    """Answers that the model is being loaded, until there is an application."""

    def __init__(self) -> None:
        self.app: Callable[[Scope, Receive, Send], Awaitable[None]] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if self.app is not None:
            await self.app(scope, receive, send)
            return
        body = json.dumps(_LOADING).encode()
        headers = [
            (b"content-type", b"application/json; charset=utf-8"),
            (b"content-length", b"%d" % len(body)),
            (b"retry-after", b"1"),
        ]
        await send({"type": "http.response.start", "status": 503, "headers": headers})
        await send({"type": "http.response.body", "body": body})


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
        sock: socket.socket,
        load: Load,
        on_progress: OnProgress,
        on_ready: Callable[[Service, str], None],
    ) -> None:
        self._settings = settings
        self._sock = sock
        self._url = base_url(settings.host, sock.getsockname()[1])
        self._load = load
        self._on_progress = on_progress
        self._on_ready = on_ready
        self._told = threading.Event()
        self._front = _Front()
        self._server = _Server(
            uvicorn.Config(
                self._front,
                lifespan="off",  # the application's own runs once it is there
                ws="none",
                log_config=None,
                log_level=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=settings.drain_s,  # type: ignore[arg-type] # of wait_for
            )
        )

    async def run(self) -> None:
        """Load, serve, drain, close."""
        with self._hearing_signals():
            serving = asyncio.create_task(self._server.serve(sockets=[self._sock]))
            loading = self._start_loading()
            either: set[asyncio.Future[Any]] = {serving, loading}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                self._told.set()
            try:
                await self._serve(await loading, serving)
            except _Told:
                pass
            finally:
                self._server.should_exit = True
                await serving

    async def _serve(self, service: Service, serving: asyncio.Task[None]) -> None:
        try:
            async with AsyncExitStack() as lifespan:
                router = getattr(service.app, "router", None)
                if router is not None:
                    await lifespan.enter_async_context(router.lifespan_context(service.app))
                self._front.app = service.app
                if not self._told.is_set():
                    self._on_ready(service, self._url)
                await serving
                if self._server.server_state.tasks:  # cancelled: let them clean up
                    await asyncio.wait(self._server.server_state.tasks, timeout=_AFTER_CANCEL_S)
        finally:
            await asyncio.to_thread(service.close)

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
        self._server.should_exit = True
        drain_s = self._settings.drain_s
        tell(
            "ending",
            f"ending: running answers may go on for {drain_s:g} s; a second signal ends at once",
            drain_s=drain_s,
        )


def _end_at_once(number: int) -> None:
    if sys.stderr is not None and sys.stderr.isatty():
        os.write(sys.stderr.fileno(), _SHOW_CURSOR)  # a progress bar hides it
    os._exit(128 + number)
