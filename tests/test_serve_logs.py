"""What a server logs: a line for people or for programs, and never what was said."""

from __future__ import annotations

import io
import json
import logging
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from typing import Any

import numpy as np
import pytest

from llamakeep.engine.request import (
    Begun,
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
from llamakeep.errors import DecodeError
from llamakeep.server import logs
from llamakeep.server.records import PROGRESS_EVERY_MS, RequestRecord, WatchedEngine
from llamakeep.states import Reuse

REUSE = Reuse(1200, 56, "ram", "new from token 1200 on", 3.0)
FINISHED = Finished(Stop.END, "", 1, REUSE, Timings(10.0, 56, 1200, 400.0, 31, 1000.0), 1256, 1287)
REQUEST = Request.of(np.arange(1256), label="chatcmpl-1")
RECORD = RequestRecord.of(REQUEST, FINISHED, Begun(1, REUSE))
FORGED = 'x\n12:00:00 forged\r\x1b[2J\u2028\x00{"event": "forged"}\u202e'


class Engine:
    """Answers every request with the same updates."""

    n_ctx = 77

    def __init__(self, *updates: Update) -> None:
        self.updates = updates
        self.asked: list[Request] = []

    def submit(self, request: Request, listener: Listener) -> str:
        self.asked.append(request)
        for update in self.updates:
            listener(update)
        return "ticket"


@pytest.fixture(autouse=True)
def _loggers_stay_as_they_were() -> Iterator[None]:
    before = {
        name: (list(log.handlers), log.level, log.propagate)
        for name in logs.LOGGERS
        for log in [logging.getLogger(name)]
    }
    yield
    for name, (handlers, level, propagate) in before.items():
        log = logging.getLogger(name)
        log.handlers, log.propagate = handlers, propagate
        log.setLevel(level)


def written(readable: bool) -> io.StringIO:
    stream = io.StringIO()
    logs.configure(stream, readable=readable)
    return stream


def entries(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_request_is_one_json_object() -> None:
    stream = written(readable=False)
    logs.tell_request(RECORD)
    [entry] = entries(stream)
    moment = datetime.fromisoformat(entry.pop("time").replace("Z", "+00:00"))
    assert moment.tzinfo == timezone.utc
    assert "1,200 reused" in entry.pop("message")
    assert entry == {
        "level": "info",
        "event": "request",
        "request_id": "chatcmpl-1",
        "slot": 1,
        "reused_tokens": 1200,
        "evaluated_tokens": 56,
        "tier": "ram",
        "reason": "new from token 1200 on",
        "generated_tokens": 31,
        "tokens_per_second": 30.0,
        "queue_ms": 10.0,
        "restore_ms": 3.0,
        "prompt_ms": 400.0,
        "predicted_ms": 1000.0,
        "ms": 1410.0,
        "stop": "end",
    }


def test_a_request_is_one_line_for_people() -> None:
    stream = written(readable=True)
    logs.tell_request(RECORD)
    clock, _, rest = stream.getvalue().partition(" ")
    assert len(clock) == len("12:34:56")
    assert rest == (
        "slot 1: 1,200 reused (ram), 56 evaluated in 400 ms; 31 tokens at 30.0/s, "
        "1,410 ms in all (end) chatcmpl-1\n"
    )


def test_the_time_is_utc_to_the_millisecond() -> None:
    record = logging.makeLogRecord({"msg": "m", "created": 86_400.25})
    assert json.loads(logs.JsonLines().format(record))["time"] == "1970-01-02T00:00:00.250Z"


@pytest.mark.parametrize("readable", [True, False])
def test_what_a_client_sends_makes_no_line_of_its_own(readable: bool) -> None:
    stream = written(readable)
    logs.tell_request(RequestRecord(FORGED))
    logs.tell_progress(FORGED, Progress(10, 0, 5, 1.0))
    logging.getLogger("llamakeep").warning("a path: %s", FORGED)
    logging.getLogger("uvicorn.error").warning("a header: %s", FORGED)
    text = stream.getvalue()
    assert len(text.splitlines()) == 4
    assert text.replace("\n", "").isprintable()


@pytest.mark.parametrize("readable", [True, False])
def test_a_traceback_makes_no_line_that_looks_like_one(readable: bool) -> None:
    stream = written(readable)
    try:
        raise ValueError(FORGED)
    except ValueError:
        logging.getLogger("llamakeep").exception("it failed")
    first, *rest = stream.getvalue().splitlines()
    assert all(line.startswith("    ") for line in rest)
    if readable:
        assert first.endswith("error: it failed")
        assert any("ValueError" in line for line in rest)
    else:
        assert "ValueError" in json.loads(first)["traceback"]
        assert not rest


def test_an_id_is_cut() -> None:
    stream = written(readable=False)
    logs.tell_request(RequestRecord("x" * 10_000))
    assert len(entries(stream)[0]["request_id"]) == 80
    assert len(stream.getvalue()) < 1000


@pytest.mark.parametrize("name", ["uvicorn.error", "asyncio", "llama-cpp-python"])
def test_others_log_in_the_same_form_and_only_what_matters(name: str) -> None:
    stream = written(readable=False)
    logging.getLogger(name).info("Started server process")
    logging.getLogger(name).error("Invalid HTTP request received.")
    [entry] = entries(stream)
    assert (entry["level"], entry["event"]) == ("error", "log")


def test_a_terminal_gets_lines_for_people() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    assert isinstance(logs.configure(Terminal()).formatter, logs.Readable)
    assert isinstance(logs.configure(io.StringIO()).formatter, logs.JsonLines)


def test_configuring_again_replaces_the_handler() -> None:
    first, second = written(readable=True), written(readable=True)
    logging.getLogger("llamakeep").info("once")
    assert (first.getvalue(), second.getvalue().count("once")) == ("", 1)


def test_what_was_said_is_not_logged() -> None:
    stream = written(readable=False)
    secret = "what-nobody-else-may-read"
    request = Request.of([31337, 42], stop=(secret,), salt=secret, label="id")
    engine = WatchedEngine(
        Engine(Begun(0, REUSE), Piece(secret, (31337,)), FINISHED),
        logs.tell_request,
        progress=logs.tell_progress,
    )
    engine.submit(request, lambda _update: None)
    assert stream.getvalue().count("\n") == 1
    assert secret not in stream.getvalue()
    assert "31337" not in stream.getvalue()


def test_a_failure_is_named_and_a_warning() -> None:
    stream = written(readable=False)
    engine = WatchedEngine(Engine(Begun(1, REUSE), Failed(DecodeError("x"))), logs.tell_request)
    engine.submit(REQUEST, lambda _update: None)
    [entry] = entries(stream)
    assert (entry["level"], entry["error"], entry["stop"]) == ("warning", "DecodeError", "failed")
    assert (entry["slot"], entry["tier"]) == (1, "ram")


def test_a_request_that_never_began_has_no_slot() -> None:
    stream = written(readable=True)
    timings = Timings(5.0, 0, 0, 0.0, 0, 0.0)
    end = Finished(Stop.CANCELLED, "", None, None, timings, 1256, 0)
    logs.tell_request(RequestRecord.of(REQUEST, end, None))
    assert " no slot: 0 reused (none), 0 evaluated" in stream.getvalue()
    assert "5 ms in all (cancelled) chatcmpl-1" in stream.getvalue()


def test_who_asked_hears_the_same_as_without_the_watch() -> None:
    updates = (Begun(1, REUSE), Progress(9, 0, 3, 1.0), Piece("a", (1,)), FINISHED)
    engine = Engine(*updates)
    heard: list[Update] = []
    told: list[RequestRecord] = []
    watched = WatchedEngine(engine, told.append, progress=lambda _id, _update: None)
    assert watched.submit(REQUEST, heard.append) == "ticket"
    assert heard == [update for update in updates if not isinstance(update, Progress)]
    assert told == [RECORD]
    heard.clear()
    watched.submit(Request.of([1], wants_progress=True), heard.append)
    assert heard == list(updates)
    assert watched.n_ctx == 77


def test_progress_is_asked_for_only_when_it_is_told() -> None:
    engine = Engine()
    WatchedEngine(engine).submit(REQUEST, lambda _update: None)
    WatchedEngine(engine, progress=lambda _id, _update: None).submit(REQUEST, lambda _update: None)
    assert [request.wants_progress for request in engine.asked] == [False, True]


def test_progress_is_told_of_long_prompts_only_and_not_too_often() -> None:
    told: list[float] = []
    steps = [Progress(100, 0, 1, ms) for ms in np.arange(0.0, 10_000.0, 250.0)]
    watched = WatchedEngine(Engine(*steps), progress=lambda _id, update: told.append(update.ms))
    watched.submit(REQUEST, lambda _update: None)
    assert told == [2000.0, 4000.0, 6000.0, 8000.0]
    assert PROGRESS_EVERY_MS == 2000.0


def test_what_fails_to_be_noted_ends_no_answer() -> None:
    stream = written(readable=False)

    def fail(_record: RequestRecord) -> None:
        raise ZeroDivisionError

    heard: list[Update] = []
    WatchedEngine(Engine(FINISHED), fail).submit(REQUEST, heard.append)
    assert heard == [FINISHED]
    assert "ZeroDivisionError" in entries(stream)[0]["traceback"]


class Stuck(io.StringIO):
    """A pipe that nobody reads until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.let_go = threading.Event()

    def write(self, text: str) -> int:
        self.let_go.wait()
        return super().write(text)


def test_nobody_waits_for_a_pipe_that_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[Callable[[], None]] = []
    monkeypatch.setattr(logs.atexit, "register", ends.append)
    monkeypatch.setattr(logs, "_MOST_LINES", 5)
    before = {name: logging.getLogger(name).handlers for name in logs.LOGGERS}
    stuck = Stuck()
    try:
        handler: Any = logs.configure(stuck, readable=False, behind=True)
        for number in range(20):
            logs.tell("event", f"line {number}")
        stuck.let_go.set()
        for end in ends:
            end()
    finally:
        for name, handlers in before.items():
            logging.getLogger(name).handlers = handlers
    told = [json.loads(line)["message"] for line in stuck.getvalue().splitlines()]
    assert told == [f"line {number}" for number in range(len(told))]
    assert len(told) >= 5
    assert handler.dropped == 20 - len(told)
