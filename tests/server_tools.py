"""A server over a loopback socket, on an engine whose model is fake."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from llamakeep.chat_template import ChatTemplate
from llamakeep.engine import Engine, Listener, Record, Request, Ticket
from llamakeep.server.app import create_app
from llamakeep.server.context import ServerOptions
from tests.engine_tools import Ends, engine_of

TIMEOUT_S = 30.0
"""For what must happen: longer than any busy machine takes, so that only a fault runs into it."""

ONLY_A = {"65": 1000}
"""As `logit_bias`: every answer is "AAAA..." until something ends it."""
HELLO = [{"role": "user", "content": "Hello there, what is your name?"}]


@contextlib.contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """Serve `app` over a loopback socket; the value is its address."""
    # Without its protocol named, asyncio leaves Nagle's algorithm on: 40 ms for each answer.
    with socket.socket(proto=socket.IPPROTO_TCP) as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()  # who connects before the server runs waits for it
        config = uvicorn.Config(app, log_level="critical", access_log=False, ws="none", http="h11")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(TIMEOUT_S)
    assert not thread.is_alive(), "the server did not stop"


@dataclass
class Served:
    """A server, the engine below it, and a client of it.

    Attributes:
        engine: Of a fake model whose tokens are bytes.
        client: Talks to the server.
        url: Its address.
        records: What became of each request, as the engine tells it.
    """

    engine: Engine
    client: httpx.Client
    url: str
    records: queue.SimpleQueue[Record]

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return self.client.post(path, json=body, **options)

    def answer(self, path: str, **body: Any) -> Any:
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        return response.json()

    def error(self, path: str, code: int = 400, **body: Any) -> dict[str, Any]:
        """Return the error that a request is answered with, which must have this code."""
        return self.error_of(self.post(path, body), code)

    @staticmethod
    def error_of(response: httpx.Response, code: int) -> dict[str, Any]:
        assert response.status_code == code, response.text
        error: dict[str, Any] = response.json()["error"]
        assert error["code"] == code
        assert error["message"]
        return error

    def raw(self, path: str, content: bytes) -> httpx.Response:
        """Send bytes that call themselves JSON."""
        return self.client.post(path, content=content, headers={"Content-Type": "application/json"})

    def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """Return the events of a streamed answer, without `[DONE]`."""
        return [json.loads(data) for data in self.lines(path, **body) if data != "[DONE]"]

    def lines(self, path: str, **body: Any) -> list[str]:
        """Return the data of each event of a streamed answer."""
        with self.client.stream("POST", path, json={"stream": True} | body) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = [line for line in response.iter_lines() if line]
        assert all(line.startswith(("data: ", ":")) for line in lines)
        return [line[6:] for line in lines if line.startswith("data: ")]

    @contextlib.contextmanager
    def streaming(self, path: str, body: dict[str, Any]) -> Iterator[Iterator[str]]:
        """Begin a streamed answer and read its first line; the value reads the others."""
        with self.client.stream("POST", path, json=body | {"stream": True}) as response:
            assert response.status_code == 200, response.read()
            lines = response.iter_lines()
            assert next(lines)
            yield lines

    @contextlib.contextmanager
    def asked(self, requests: list[Request] | None = None) -> Iterator[list[Request]]:
        """Collect the requests that reach the engine, in a list if given, until the block ends."""
        requests = [] if requests is None else requests
        submit_all = self.engine.submit_all

        def note(asked: Sequence[tuple[Request, Listener]]) -> list[Ticket]:
            requests.extend(request for request, _ in asked)
            return submit_all(asked)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.engine, "submit_all", note)
            yield requests

    def record(self) -> Record:
        """Wait for the next request to end, and return what became of it."""
        return self.records.get(timeout=TIMEOUT_S)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep the engine from doing anything, until the block ends."""
        held, gate = threading.Event(), threading.Event()

        def hold() -> None:
            held.set()
            gate.wait(TIMEOUT_S)

        thread = threading.Thread(target=self.engine.call, args=(hold,), daemon=True)
        thread.start()
        assert held.wait(TIMEOUT_S)
        try:
            yield
        finally:
            gate.set()
            thread.join(TIMEOUT_S)


@contextlib.contextmanager
def served(
    *,
    engine: dict[str, Any] | None = None,
    no_template: bool = False,
    template: str = "chatml",
    **options: Any,
) -> Iterator[Served]:
    """Serve a fake model with a ChatML template.

    Args:
        engine: Options of `engine_of`.
        no_template: The model has none.
        template: Another one.
        **options: Of `ServerOptions`, or `exposition`.
    """
    records: queue.SimpleQueue[Record] = queue.SimpleQueue()
    exposition = options.pop("exposition", None)
    given = {"n_seqs": 2, "n_ctx": 512} | (engine or {})
    with engine_of(**given) as made:
        made.observers.add(Ends(records.put))
        chats = None if no_template else ChatTemplate(template, add_bos=True)
        app = create_app(made, ServerOptions(**options), chats, exposition=exposition)
        with serving(app) as url, httpx.Client(base_url=url, timeout=TIMEOUT_S) as client:
            yield Served(made, client, url, records)
