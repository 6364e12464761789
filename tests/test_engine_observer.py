"""Who watches an engine hears of every request, and cannot harm it."""

from __future__ import annotations

import logging
import queue
import threading
from typing import Any

import pytest

from llamakeep.engine import Engine, Finished, Observer, Progress, Record, Request, Update
from llamakeep.engine.job import Job
from llamakeep.engine.observer import PROGRESS_EVERY_MS, Observers
from llamakeep.errors import ContextOverflow, DecodeError, LlamakeepError, TokenError
from llamakeep.runtime.fake import FakeRuntime
from llamakeep.server.metrics import ERRORS, OTHER, Metrics
from llamakeep.states import Reuse
from tests.engine_tools import Ends, Heard, ask, engine_of, runtime_of, span


class Notes(Observer):
    """Writes down what it hears."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.progress: list[float] = []
        self.refusals: list[type[LlamakeepError]] = []
        self.saves: list[float] = []

    def ended(self, record: Record) -> None:
        self.records.append(record)

    def progressed(self, request: Request, progress: Progress) -> None:
        self.progress.append(progress.ms)

    def refused(self, error: LlamakeepError) -> None:
        self.refusals.append(type(error))

    def saved(self, ms: float) -> None:
        self.saves.append(ms)


def test_all_observers_hear_what_the_engine_remembers() -> None:
    first, second = Notes(), Notes()
    with engine_of(n_seqs=2) as engine:
        engine.observers.add(first)
        engine.observers.add(second)
        ask(engine, span(100, 1), 3, label="a").wait()
        ask(engine, span(100, 1), 3, label="b").wait()
        engine.settle()
        assert engine.recent() == first.records[::-1] == second.records[::-1]
        engine.flush()
    assert [record.label for record in first.records] == ["a", "b"]
    assert [record.reused_tokens for record in first.records] == [0, 96]
    assert first.saves
    assert first.saves == second.saves


def test_who_waits_for_the_end_finds_it_noted() -> None:
    notes = Notes()
    with engine_of() as engine:
        engine.observers.add(notes)
        for n in range(1, 20):
            ask(engine, span(30, n), 1).wait()
            assert len(engine.recent()) == n
            engine.settle()
            assert len(notes.records) == n


def test_observers_hear_of_an_end_when_nothing_else_comes() -> None:
    heard = queue.SimpleQueue[Record]()
    with engine_of() as engine:
        engine.observers.add(Ends(heard.put))
        ask(engine, span(30, 1), 1, label="the only one").wait()
        assert heard.get(timeout=60).label == "the only one"


def test_what_is_not_taken_is_told_and_raised() -> None:
    notes = Notes()
    with engine_of(n_ctx=64) as engine:
        engine.observers.add(notes)
        with pytest.raises(ContextOverflow):
            ask(engine, span(65, 1), 1)
        with pytest.raises(TokenError):
            ask(engine, [1_000_000], 1)
    assert notes.refusals == [ContextOverflow, TokenError]
    assert notes.records == []


class Asks(Observer):
    """Asks an engine for all it can tell, while it hears of an end."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.heard, self.may_ask = threading.Event(), threading.Event()
        self.labels = list[str]()

    def ended(self, record: Record) -> None:
        self.heard.set()
        assert self.may_ask.wait(60)
        self._engine.settle()
        assert len(self._engine.slots()) == self._engine.n_slots
        assert self._engine.entries() is not None
        self._engine.check()
        self.labels.append(record.label)


def test_an_observer_may_ask_the_engine_whoever_tells_it() -> None:
    with engine_of(n_seqs=1) as engine:
        asks, one = Asks(engine), Heard()
        engine.observers.add(asks)
        settling = [threading.Thread(target=engine.settle, daemon=True) for _ in range(3)]

        def hear(update: Update) -> None:
            one(update)
            if isinstance(update, Finished):  # another thread tells, before the engine's can
                settling[0].start()
                assert asks.heard.wait(60)

        engine.submit(Request(span(20, 1), max_tokens=2, label="one"), hear)
        one.wait()
        ask(engine, span(20, 2), 2, label="two").wait()  # the engine does not wait for observers
        for thread in settling[1:]:
            thread.start()
        asks.may_ask.set()
        for thread in settling:
            thread.join(60)
            assert not thread.is_alive()
        engine.settle()
        assert asks.labels == ["one", "two"]


@pytest.mark.parametrize("by_engine", [True, False])
def test_an_observer_may_close_the_engine_whoever_tells_it(by_engine: bool) -> None:
    begun, closed = threading.Event(), threading.Event()
    with engine_of(n_seqs=1) as engine:

        def close(_: Record) -> None:
            begun.set()
            engine.close()
            closed.set()

        def hear(update: Update) -> None:
            if isinstance(update, Finished) and not by_engine:
                threading.Thread(target=engine.settle, daemon=True).start()
                assert begun.wait(60)

        engine.observers.add(Ends(close))
        engine.submit(Request(span(20, 1), max_tokens=2), hear)
        assert closed.wait(60)
        engine.close()
        engine.check = lambda: None  # type: ignore[method-assign]


class Fails(Observer):
    """Raises, whatever it hears."""

    def ended(self, record: Record) -> None:
        raise ZeroDivisionError

    progressed = refused = saved = ended  # type: ignore[assignment]


def test_an_observer_that_fails_changes_nothing_for_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    notes = Notes()
    with engine_of(n_ctx=128) as engine, caplog.at_level(logging.ERROR, "llamakeep"):
        engine.observers.add(Fails())
        engine.observers.add(notes)
        heard = ask(engine, span(50, 1), 3)
        heard.wait()
        with pytest.raises(ContextOverflow):
            ask(engine, span(129, 1), 1)
        engine.flush()
        engine.check()
    assert len(heard.tokens) == 3
    assert (len(notes.records), notes.refusals) == (1, [ContextOverflow])
    assert len(notes.saves) >= 1
    assert "an observer of the engine failed" in caplog.text


@pytest.mark.parametrize("wanted", [False, True])
def test_progress_is_told_of_long_prompts_only_and_not_too_often(wanted: bool) -> None:
    notes, heard = Notes(), list[Any]()
    request = Request.of(range(1, 101), wants_progress=wanted)
    job = Job(1, request, heard.append, 200, 0.0, Observers([notes]).progressed)
    job.begin(0, Reuse(0, 100, "none", "new"), 0.0)
    for n in range(40):
        job.progressed(n, n * 0.25)
    assert notes.progress == [2000.0, 4000.0, 6000.0, 8000.0]
    assert PROGRESS_EVERY_MS == 2000.0
    assert sum(isinstance(each, Progress) for each in heard) == (40 if wanted else 0)


def errors_of(metrics: Metrics) -> dict[str, float]:
    """Return the errors that were counted, by their labels."""
    return {
        sample.labels["kind"]: sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == "llamakeep_errors_total"
    }


def test_a_request_that_fails_after_it_began_is_counted_as_failed() -> None:
    runtime = runtime_of("attention", n_seqs=1)
    metrics, notes = Metrics(), Notes()
    with engine_of(runtime=runtime) as engine:
        engine.observers.add(metrics)
        engine.observers.add(notes)
        break_down(runtime)
        heard = ask(engine, span(20, 1), 4)
        with pytest.raises(DecodeError):
            heard.wait()
    (record,) = notes.records
    assert (record.slot, record.stop, record.error) == (0, "failed", DecodeError.__name__)
    assert errors_of(metrics) == {"DecodeError": 1}
    assert metrics.registry.get_sample_value("llamakeep_requests_total", {"stop": "failed"}) == 1
    assert metrics.registry.get_sample_value("llamakeep_queue_seconds_count") == 0


def break_down(runtime: FakeRuntime) -> None:
    """Let a model fail more often than the engine tries again."""
    for after in range(8):
        runtime.fail("evaluate", after=after)


def test_however_requests_fail_there_are_few_labels() -> None:
    metrics = Metrics()
    for n in range(300):
        metrics.ended(Record(label="id", error=f"Error{n}"))
    assert errors_of(metrics) == {OTHER: 300}
    assert len(ERRORS) < 64
