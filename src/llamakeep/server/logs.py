"""What a server logs: for people on a terminal, else one JSON object a line.

Everything goes through the logger `llamakeep`, and what other packages log takes the same form.
What is told of a request are numbers and words of ours: no prompt, no answer and no key is ever
logged. What clients chose (an id, a path) cannot make lines of its own: control characters are
escaped.
"""

from __future__ import annotations

import atexit
import json
import logging
import logging.handlers
import queue
import sys
import time
from contextlib import suppress
from datetime import datetime, timezone
from typing import Any, TextIO, cast

from llamakeep.engine import Observer, Progress, Record, Request

logger = logging.getLogger("llamakeep")

LOGGERS = {"": logging.WARNING, "llamakeep": logging.INFO, "uvicorn": logging.WARNING}
"""What is logged, and from which level on; "" is everything else."""

_PARTS_OF_UVICORN = ("uvicorn.access", "uvicorn.asgi", "uvicorn.error")
_MOST_ID_LETTERS = 80
_MOST_LINES = 10_000
"""Lines that wait to be written; more are dropped."""
_LAST_LINES_S = 3.0


def tell(event: str, message: str, *, level: int = logging.INFO, **fields: Any) -> None:
    """Log an event.

    Args:
        event: Its kind, in a word.
        message: What people read.
        level: Of `logging`.
        **fields: What programs read, JSON-ready.
    """
    logger.log(level, "%s", message, extra={"event": event, "fields": fields})


class RequestLog(Observer):
    """Logs how each request was answered.

    Args:
        progress: And how far a long prompt is evaluated.
    """

    def __init__(self, *, progress: bool = False) -> None:
        self._progress = progress

    def ended(self, record: Record) -> None:
        """Log a request."""
        tell_request(record)

    def progressed(self, request: Request, progress: Progress) -> None:
        """Log how far its prompt is."""
        if self._progress:
            tell_progress(request.label, progress)


def tell_request(record: Record) -> None:
    """Log how a request was answered."""
    fields = {
        "request_id": record.label[:_MOST_ID_LETTERS],
        "slot": record.slot,
        "reused_tokens": record.reused_tokens,
        "evaluated_tokens": record.evaluated_tokens,
        "tier": record.tier,
        "reason": record.reason,
        "generated_tokens": record.generated_tokens,
        "tokens_per_second": round(record.tokens_per_second, 1),
        "queue_ms": round(record.queue_ms, 1),
        "restore_ms": round(record.restore_ms, 1),
        "prompt_ms": round(record.prompt_ms, 1),
        "predicted_ms": round(record.predicted_ms, 1),
        "ms": round(record.ms, 1),
        "stop": record.stop,
        **({"error": record.error} if record.error else {}),
    }
    level = logging.WARNING if record.error else logging.INFO
    tell("request", _line(record), level=level, **fields)


def _line(record: Record) -> str:
    where = "no slot" if record.slot is None else f"slot {record.slot}"
    name = record.label[:_MOST_ID_LETTERS]
    if record.error:
        return f"{where}: {record.error} {name}".rstrip()
    rate = f" at {record.tokens_per_second:.1f}/s" if record.tokens_per_second else ""
    return (
        f"{where}: {record.reused_tokens:,} reused ({record.tier}), {record.evaluated_tokens:,} "
        f"evaluated in {record.prompt_ms:,.0f} ms; {record.generated_tokens:,} tokens{rate}, "
        f"{record.ms:,.0f} ms in all ({record.stop}) {name}"
    ).rstrip()


def tell_progress(request_id: str, progress: Progress) -> None:
    """Log how far a long prompt is evaluated."""
    share = progress.processed / max(1, progress.total)
    name = request_id[:_MOST_ID_LETTERS]
    tell(
        "progress",
        f"reading a prompt: {progress.processed:,} of {progress.total:,} tokens ({share:.0%}) "
        f"after {progress.ms / 1e3:.0f} s {name}".rstrip(),
        request_id=name,
        total_tokens=progress.total,
        reused_tokens=progress.cached,
        processed_tokens=progress.processed,
        ms=round(progress.ms, 1),
    )


def _printable(text: str) -> str:
    """Return text on one line that a terminal shows and does not obey."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


class Readable(logging.Formatter):
    """A line for people: the time, a level that matters, the message.

    Lines of a traceback follow, each indented, so that none can pass for a line of the log.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        lines = [f"{clock} {level}{_printable(record.getMessage())}"]
        if record.exc_info:
            trace = self.formatException(record.exc_info)
            lines += [f"    {_printable(line)}" for line in trace.splitlines()]
        return "\n".join(lines)


class JsonLines(logging.Formatter):
    """A JSON object: `time` (UTC), `level`, `event`, `message`, then the fields of the event."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the object on one line, in ASCII."""
        moment = datetime.fromtimestamp(record.created, timezone.utc)
        entry: dict[str, Any] = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "event": getattr(record, "event", "log"),
            "message": record.getMessage(),
        }
        entry |= getattr(record, "fields", {})
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


class _Queued(logging.handlers.QueueHandler):
    """Hands lines to a thread that writes them, and drops those that nobody reads in time.

    How many were dropped is a line before the next one that is not.

    Attributes:
        dropped: How many.
    """

    dropped = 0
    _told = 0

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            if self.dropped > self._told:
                self.queue.put_nowait(self.prepare(_lost(self.dropped - self._told)))
                self._told = self.dropped
            self.queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1


def _lost(n_lines: int) -> logging.LogRecord:
    """Return a record that says how many lines were dropped."""
    return logger.makeRecord(
        logger.name,
        logging.WARNING,
        __file__,
        0,
        "%s",
        (f"{n_lines:,} lines before this one were dropped: nobody read the log",),
        None,
        extra={"event": "dropped", "fields": {"dropped_lines": n_lines}},
    )


def configure(
    stream: TextIO | None = None, *, readable: bool | None = None, behind: bool = False
) -> logging.Handler:
    """Log what `LOGGERS` says to a stream, and nowhere else. Of the whole process.

    Args:
        stream: None for standard error.
        readable: For people; None if the stream is a terminal.
        behind: A thread of its own writes, so that nobody waits for a pipe that is not read; it
            ends with the process, once it has written what is there.

    Returns:
        The handler, which takes the place of those before it.
    """
    to = sys.stderr if stream is None else stream
    people = to.isatty() if readable is None else readable
    handler: logging.Handler = logging.StreamHandler(to)
    if behind:
        handler = _behind(handler)
    handler.setFormatter(Readable() if people else JsonLines())
    for name, level in LOGGERS.items():
        each = logging.getLogger(name)
        each.handlers = [handler]
        each.setLevel(level)
        each.propagate = False
    for name in _PARTS_OF_UVICORN:  # it gives them levels of their own
        logging.getLogger(name).setLevel(logging.NOTSET)
    return handler


class _Writer(logging.handlers.QueueListener):
    """Writes what is queued; at the end for a few seconds at most, if nobody reads it."""

    def stop(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            with suppress(queue.Full):
                cast(Any, self.queue).put(None, timeout=_LAST_LINES_S)
                thread.join(_LAST_LINES_S)


def _behind(writer: logging.Handler) -> logging.Handler:
    """Return a handler in whose place a thread calls `writer`, in order."""
    lines: queue.Queue[logging.LogRecord] = queue.Queue(_MOST_LINES)
    listener = _Writer(lines, writer)
    listener.start()
    atexit.register(listener.stop)
    return _Queued(lines)
