"""Turns and streams, without a model: threads, exceptions and every way a stream can end."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from llamakeep.errors import KeeperBusy
from llamakeep.turns import OpenStream, Turns

SOON = 10.0
"""Seconds that a thread may take for what should happen at once."""


class Worker:
    """Runs a function in a thread of its own and hands back what it returned or raised."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:  # noqa: BLE001 - raised again by `result`
            self._error = error

    @property
    def waits(self) -> bool:
        """Whether it is still at work after it had time to get on."""
        self._thread.join(timeout=0.05)
        return self._thread.is_alive()

    def result(self) -> Any:
        self._thread.join(timeout=SOON)
        assert not self._thread.is_alive(), "the thread did not come to an end"
        if self._error is not None:
            raise self._error
        return self._result


class Log:
    """A stream's surroundings, noting what happened in which order."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
        self.events: list[str] = []
        self.fail_to_finish = False

    @contextmanager
    def running(self) -> Iterator[None]:
        assert self.turns.nested
        self.events.append("in")
        try:
            yield
        finally:
            self.events.append("out")

    def finish(self) -> None:
        assert self.turns.nested, "finished outside the turn"
        self.events.append("finish")
        if self.fail_to_finish:
            raise ArithmeticError("could not finish")

    def items(self, n: int) -> Generator[int, Any, None]:
        try:
            for item in range(n):
                assert self.turns.nested
                self.events.append(f"item {item}")
                yield item
        finally:
            assert self.turns.nested
            self.events.append("closed")

    def open(self, inner: Generator[Any, Any, Any] | None = None) -> OpenStream:
        """Begin a turn and leave a stream of three items in it."""
        self.turns.begin()
        self.turns.suspend()
        inner = self.items(3) if inner is None else inner
        return OpenStream(self.turns, inner, self.running, self.finish)

    @property
    def finished(self) -> int:
        return self.events.count("finish")


@pytest.fixture
def log() -> Log:
    return Log(Turns())


def is_free(turns: Turns) -> bool:
    """Whether another thread gets the turn at once."""

    def take() -> bool:
        turns.begin()
        turns.end()
        return True

    return not turns._lock.locked() and bool(Worker(take).result())


# -- turns -----------------------------------------------------------------------------------------


def test_a_turn_is_nested_only_while_it_lasts_and_only_in_its_thread() -> None:
    turns = Turns()
    assert not turns.nested
    turns.begin()
    assert turns.nested
    assert Worker(lambda: turns.nested).result() is False
    turns.end()
    assert not turns.nested
    assert is_free(turns)


def test_fault_71_a_second_turn_in_the_same_thread_is_an_error() -> None:
    turns = Turns()
    turns.begin()
    for prepare in (turns.suspend, turns.resume):
        prepare()
        with pytest.raises(KeeperBusy, match="still open in this thread"):
            turns.begin()
    turns.end()
    turns.begin()
    turns.end()


def test_a_suspended_turn_lasts_but_is_not_nested() -> None:
    turns = Turns()
    turns.begin()
    turns.suspend()
    assert not turns.nested
    other = Worker(turns.begin)
    assert other.waits
    turns.resume()
    assert turns.nested
    turns.end()
    other.result()


def test_fault_60_every_waiting_thread_gets_its_turn() -> None:
    turns = Turns()
    turns.begin()
    inside: list[int] = []
    most = 0

    def work(number: int) -> None:
        nonlocal most
        turns.begin()
        inside.append(number)
        most = max(most, len(inside))
        assert turns.nested
        inside.remove(number)
        turns.end()

    workers = [Worker(lambda n=n: work(n)) for n in range(20)]  # type: ignore[misc]
    assert all(worker.waits for worker in workers[:2])
    assert most == 0
    turns.end()
    for worker in workers:
        worker.result()
    assert most == 1
    assert is_free(turns)


# -- streams ---------------------------------------------------------------------------------------


def test_an_exhausted_stream_ends_its_turn(log: Log) -> None:
    assert list(log.open()) == [0, 1, 2]
    assert log.events == [
        *("in", "item 0", "out", "in", "item 1", "out", "in", "item 2", "out"),
        *("in", "closed", "out", "finish"),
    ]
    assert is_free(log.turns)


def test_between_items_the_turn_lasts_and_the_caller_is_outside_it(log: Log) -> None:
    stream = log.open()
    next(stream)
    assert not log.turns.nested
    with pytest.raises(KeeperBusy):
        log.turns.begin()
    other = Worker(log.turns.begin)
    assert other.waits
    assert list(stream) == [1, 2]
    other.result()


def test_a_stream_may_change_hands(log: Log) -> None:
    stream = log.open()
    assert next(stream) == 0
    assert Worker(lambda: next(stream)).result() == 1
    assert next(stream) == 2
    with pytest.raises(StopIteration):
        next(stream)
    assert log.finished == 1
    assert is_free(log.turns)


def test_a_stream_that_another_thread_has_does_not_block_this_one_forever(log: Log) -> None:
    stream = log.open()
    next(stream)
    taken, go_on = threading.Event(), threading.Event()

    def consume() -> list[int]:
        items = [next(stream)]
        taken.set()
        assert go_on.wait(SOON)
        return items + list(stream)

    consumer = Worker(consume)
    assert taken.wait(SOON)
    threading.Timer(0.05, go_on.set).start()
    log.turns.begin()  # it was this thread's stream; now it is the consumer's, so this waits
    assert consumer.result() == [1, 2]
    log.turns.end()


def test_values_can_be_sent(log: Log) -> None:
    def echo() -> Generator[Any, Any, None]:
        sent = yield "first"
        while sent is not None:
            sent = yield sent

    stream = log.open(echo())
    assert next(stream) == "first"
    assert stream.send([5, 6]) == [5, 6]
    with pytest.raises(StopIteration):
        stream.send(None)
    assert log.finished == 1


def close(stream: OpenStream) -> None:
    stream.close()
    stream.close()


def break_off(stream: OpenStream) -> None:
    with pytest.raises(ZeroDivisionError):
        stream.throw(ZeroDivisionError("the caller's own"))


def exhaust(stream: OpenStream) -> None:
    list(stream)


@pytest.mark.parametrize("end", [close, break_off, exhaust])
@pytest.mark.parametrize("n_items", [0, 1, 3])
def test_a_stream_ends_its_turn_exactly_once(
    log: Log, end: Callable[[OpenStream], None], n_items: int
) -> None:
    stream = log.open()
    for _ in range(n_items):
        next(stream)
    end(stream)
    assert log.finished == 1
    assert not log.turns.nested
    assert is_free(log.turns)
    # It has ended: nothing that is done to it now may touch somebody else's turn.
    log.turns.begin()
    with pytest.raises(StopIteration):
        next(stream)
    with pytest.raises(StopIteration):
        stream.send(1)
    stream.close()
    del stream
    gc.collect()
    assert log.turns.nested
    assert log.finished == 1
    log.turns.end()


@pytest.mark.parametrize("n_items", [0, 1])
def test_a_dropped_stream_ends_its_turn(log: Log, n_items: int) -> None:
    stream = log.open()
    for _ in range(n_items):
        next(stream)
    del stream
    gc.collect()
    assert log.finished == 1
    assert log.events.count("closed") == n_items  # a generator that never ran has nothing to end
    assert is_free(log.turns)


def test_a_stream_dropped_by_another_thread_ends_its_turn(log: Log) -> None:
    held = [log.open()]
    next(held[0])
    Worker(held.clear).result()
    gc.collect()
    assert log.finished == 1
    assert is_free(log.turns)


@pytest.mark.parametrize("error", [ValueError("inside"), KeyboardInterrupt(), GeneratorExit()])
def test_an_error_inside_ends_the_turn(log: Log, error: BaseException) -> None:
    def fails() -> Generator[int, Any, None]:
        yield 0
        raise error

    stream = log.open(fails())
    next(stream)
    with pytest.raises(type(error)):
        next(stream)
    assert log.finished == 1
    assert is_free(log.turns)


def test_a_thrown_error_that_is_handled_inside_keeps_the_turn(log: Log) -> None:
    def survives() -> Generator[str, Any, None]:
        try:
            yield "before"
        except ZeroDivisionError:
            yield "after"

    stream = log.open(survives())
    next(stream)
    assert stream.throw(ZeroDivisionError()) == "after"
    assert log.finished == 0
    with pytest.raises(KeeperBusy):
        log.turns.begin()
    stream.close()
    assert log.finished == 1


def test_a_generator_that_will_not_close_still_ends_the_turn(log: Log) -> None:
    def stubborn() -> Generator[int, Any, None]:
        while True:
            try:
                yield 0
            except GeneratorExit:
                yield 1

    inner = stubborn()
    stream = log.open(inner)
    next(stream)
    with pytest.raises(RuntimeError, match="ignored GeneratorExit"):
        stream.close()
    assert log.finished == 1
    assert is_free(log.turns)
    with pytest.raises(ZeroDivisionError):
        inner.throw(ZeroDivisionError())  # nothing is left to complain when it is collected


@pytest.mark.parametrize("end", [exhaust, OpenStream.close, lambda stream: next(stream)])
def test_surroundings_that_cannot_be_entered_end_the_turn(
    end: Callable[[OpenStream], object],
) -> None:
    turns = Turns()
    log = Log(turns)

    def refuse() -> Any:
        raise LookupError("the model is gone")

    turns.begin()
    turns.suspend()
    stream = OpenStream(turns, log.items(3), refuse, log.finish)
    with pytest.raises(LookupError):
        end(stream)
    assert log.finished == 1
    assert is_free(turns)


@pytest.mark.parametrize("end", [exhaust, OpenStream.close])
def test_finish_that_raises_still_ends_the_turn_once(
    log: Log, end: Callable[[OpenStream], None]
) -> None:
    log.fail_to_finish = True
    stream = log.open()
    next(stream)
    with pytest.raises(ArithmeticError, match="could not finish"):
        end(stream)
    assert log.finished == 1
    assert is_free(log.turns)
    stream.close()
    assert log.finished == 1


def test_a_step_while_the_stream_is_running_is_refused_and_changes_nothing(log: Log) -> None:
    """Two threads, one stream: the one that comes second must not end the first one's turn."""
    arrived, go_on = threading.Event(), threading.Event()

    def slow() -> Generator[int, Any, None]:
        arrived.set()
        assert go_on.wait(SOON)
        assert log.turns.nested
        yield 0
        yield 1

    stream = log.open(slow())
    first = Worker(lambda: next(stream))
    assert arrived.wait(SOON)
    for again in (lambda: next(stream), stream.close, lambda: stream.throw(KeyError())):
        with pytest.raises(ValueError, match="already executing"):
            again()
    assert log.finished == 0
    waiting = Worker(log.turns.begin)
    assert waiting.waits
    go_on.set()
    assert first.result() == 0
    assert list(stream) == [1]
    assert log.finished == 1
    waiting.result()


def test_a_stream_that_closes_itself_is_refused(log: Log) -> None:
    streams: list[OpenStream] = []

    def reenters() -> Generator[int, Any, None]:
        with pytest.raises(ValueError, match="already executing"):
            streams[0].close()
        assert log.turns.nested
        yield 0

    streams.append(log.open(reenters()))
    assert list(streams[0]) == [0]
    assert log.finished == 1
    assert is_free(log.turns)


def test_a_stream_is_a_generator(log: Log) -> None:
    stream = log.open()
    assert isinstance(stream, Generator)
    assert iter(stream) is stream
    stream.close()
