"""Connections that say nothing, and too many of them."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn

from llamakeep.server.connections import Door, most_connections
from tests.server_tools import TIMEOUT_S

HALF = b"GET /health HT"
WHOLE = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


class Application:
    """Answers 204 once it may."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.may_answer = threading.Event()
        self.may_answer.set()

    async def __call__(self, _scope: Any, _receive: Any, send: Any) -> None:
        self.asked.set()
        await asyncio.to_thread(self.may_answer.wait, TIMEOUT_S)
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})


class Client:
    """A connection to a server."""

    def __init__(self, port: int, data: bytes = b"") -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)
        self.send(data)

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def is_answered(self) -> bool:
        return self._socket.recv(4096).startswith(b"HTTP/1.1 204 ")

    def is_closed(self) -> bool:
        """Wait until the server says something, and return whether it is that it closes."""
        try:
            return self._socket.recv(4096) == b""
        except ConnectionResetError:
            return True

    def close(self) -> None:
        self._socket.close()


@contextmanager
def server(app: Any, door: Door) -> Iterator[Callable[..., Client]]:
    """Serve an application behind a door; the value connects, and may send something."""
    with socket.socket(proto=socket.IPPROTO_TCP) as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        config = uvicorn.Config(
            app, http=door.protocol(), lifespan="off", ws="none", log_level="critical"
        )
        running = uvicorn.Server(config)
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        clients: list[Client] = []

        def connect(data: bytes = b"") -> Client:
            clients.append(Client(listening.getsockname()[1], data))
            return clients[-1]

        try:
            yield connect
        finally:
            for client in clients:
                client.close()
            running.should_exit = True
            thread.join(TIMEOUT_S)
    assert not thread.is_alive()
    assert not door.waiting


def door_of(most: int = 100, header_s: float = TIMEOUT_S * 2) -> Door:
    return Door(most, header_s, clock=lambda: 0.0)


@pytest.mark.parametrize("data", [b"", HALF, WHOLE[:-2], WHOLE + HALF])
def test_a_header_that_does_not_come_to_its_end_is_given_up(data: bytes) -> None:
    with server(Application(), door_of(header_s=0.05)) as connect:
        client = connect(data)
        if data.startswith(WHOLE):
            assert client.is_answered()
        assert client.is_closed()


def test_who_waits_for_an_answer_may_wait() -> None:
    app = Application()
    app.may_answer.clear()
    with server(app, door_of(header_s=0.05)) as connect:
        asking = connect(WHOLE)
        assert app.asked.wait(TIMEOUT_S)
        assert connect(HALF).is_closed()  # so much time has gone
        app.may_answer.set()
        assert asking.is_answered()


def test_of_too_many_those_go_that_say_nothing_for_the_longest(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app, door = Application(), door_of(most=3)
    app.may_answer.clear()
    with server(app, door) as connect, caplog.at_level(logging.WARNING, "llamakeep"):
        asking = connect(WHOLE)
        assert app.asked.wait(TIMEOUT_S)
        silent = [connect(HALF) for _ in range(5)]
        assert [each.is_closed() for each in silent[:3]] == [True] * 3
        silent[3].send(WHOLE[len(HALF) :])
        app.may_answer.set()
        assert silent[3].is_answered()
        assert asking.is_answered()
    assert door.n_turned_away == 3
    assert len(caplog.records) == 1


def test_if_all_are_answered_the_new_one_goes() -> None:
    app = Application()
    app.may_answer.clear()
    with server(app, door_of(most=1)) as connect:
        asking = connect(WHOLE)
        assert app.asked.wait(TIMEOUT_S)
        assert connect().is_closed()
        app.may_answer.set()
        assert asking.is_answered()
        new = connect(WHOLE)  # the one that was answered is idle
        assert new.is_answered()
        assert asking.is_closed()


def test_a_header_has_a_limit() -> None:
    with server(Application(), door_of()) as connect:
        client = connect(WHOLE[:-2])
        lines = b"".join(b"X-%d: %s\r\n" % (number, b"y" * 1000) for number in range(10_000))
        with pytest.raises(OSError):  # noqa: PT011 - reset, or a broken pipe
            client.send(lines)


def test_that_no_file_is_left_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    door = Door(10, clock=lambda: now)
    told: list[dict[str, Any]] = []

    class Loop(asyncio.SelectorEventLoop):
        def default_exception_handler(self, context: dict[str, Any]) -> None:
            told.append(context)

    loop = Loop()
    context = {"message": "socket.accept() out of system resource", "exception": OSError(24)}
    with caplog.at_level(logging.WARNING, "llamakeep"):
        for _ in range(100):
            door.hear(loop, context)
        assert len(caplog.records) == 1
        now = 61.0
        door.hear(loop, context)
        assert len(caplog.records) == 2
        door.hear(loop, other := {"message": "something else"})
    assert told == [other]
    loop.close()


def test_files_are_left_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource", reason="there is no such limit here")
    for soft, expected in ((1024, 768), (100, 16), (1 << 20, 4096), (resource.RLIM_INFINITY, 4096)):
        monkeypatch.setattr(resource, "getrlimit", lambda _which, soft=soft: (soft, soft))
        assert most_connections() == expected
