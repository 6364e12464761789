"""What a server logs: a line for people or for programs, and never what was said."""

from __future__ import annotations

import io
import json
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import pytest

from llamakeep.engine import Progress, Record, Request
from llamakeep.server import logs
from tests.engine_tools import ask, engine_of

RECORD = Record(
    label="chatcmpl-1",
    slot=1,
    prompt_tokens=1256,
    reused_tokens=1200,
    evaluated_tokens=56,
    generated_tokens=31,
    tier="ram",
    reason="new from token 1200 on",
    stop="end",
    queue_ms=10.0,
    restore_ms=3.0,
    prompt_ms=400.0,
    predicted_ms=1000.0,
)
FORGED = 'x\n12:00:00 forged\r\x1b[2J\u2028\x00{"event": "forged"}\u202e'


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
    logs.tell_request(Record(label=FORGED))
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
    logs.tell_request(Record(label="x" * 10_000))
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
    with engine_of() as engine:
        engine.observers.add(logs.RequestLog(progress=True))
        prompt = list(secret.encode())
        heard = ask(engine, prompt, 3, stop=(secret,), salt=secret, label="id")
        heard.wait()
    assert heard.text
    assert [entry["event"] for entry in entries(stream)] == ["request"]
    assert secret not in stream.getvalue()
    assert str(prompt[0]) + "," not in stream.getvalue()


def test_progress_is_told_where_it_is_asked_for() -> None:
    stream = written(readable=False)
    request, progress = Request.of([1, 2], label="id"), Progress(100, 10, 50, 2000.0)
    logs.RequestLog().progressed(request, progress)
    assert not stream.getvalue()
    logs.RequestLog(progress=True).progressed(request, progress)
    [entry] = entries(stream)
    assert (entry["event"], entry["request_id"], entry["processed_tokens"]) == (
        "progress",
        "id",
        50,
    )


def test_a_failure_is_named_and_a_warning() -> None:
    stream = written(readable=False)
    logs.RequestLog().ended(replace(RECORD, stop="failed", error="DecodeError"))
    [entry] = entries(stream)
    assert (entry["level"], entry["error"], entry["stop"]) == ("warning", "DecodeError", "failed")
    assert (entry["slot"], entry["tier"]) == (1, "ram")


def test_a_request_that_never_began_has_no_slot() -> None:
    stream = written(readable=True)
    logs.tell_request(Record(label="chatcmpl-1", queue_ms=5.0, stop="cancelled"))
    assert " no slot: 0 reused (none), 0 evaluated" in stream.getvalue()
    assert "5 ms in all (cancelled) chatcmpl-1" in stream.getvalue()


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


def test_lines_that_were_dropped_are_told() -> None:
    lines: queue.Queue[logging.LogRecord] = queue.Queue(2)
    handler = logs._Queued(lines)
    handler.setFormatter(logs.JsonLines())

    def log(number: int) -> None:
        handler.handle(logs.logger.makeRecord("llamakeep", 20, "", 0, f"line {number}", (), None))

    def told() -> list[dict[str, Any]]:
        return [json.loads(lines.get_nowait().getMessage()) for _ in range(lines.qsize())]

    for number in range(5):
        log(number)
    assert [each["message"] for each in told()] == ["line 0", "line 1"]
    log(5)
    lost, line = told()
    assert (lost["event"], lost["dropped_lines"], lost["level"]) == ("dropped", 3, "warning")
    assert line["message"] == "line 5"
    log(6)
    assert [each["message"] for each in told()] == ["line 6"]
