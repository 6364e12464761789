"""What a request cost, however it ended: times that passed, tokens that were evaluated."""

from __future__ import annotations

from typing import Any

import pytest

from llamakeep.engine import Begun, Engine, Finished, Progress, Record, Request, Stop, Update
from llamakeep.engine.records import Records
from llamakeep.errors import DecodeError
from llamakeep.runtime.fake import FakeRuntime
from llamakeep.server.metrics import Metrics
from tests.engine_tools import GREEDY, Heard, ask, engine_of, runtime_of, span


class Clock:
    """Seconds that pass with what is evaluated: one for each batch."""

    def __init__(self, runtime: FakeRuntime) -> None:
        self.now_s = 1000.0
        decode = runtime.decode

        def passing(parts: Any) -> Any:
            self.now_s += 1
            return decode(parts)

        runtime.decode = passing  # type: ignore[method-assign]

    def __call__(self) -> float:
        return self.now_s


def cancelling(engine: Engine, request: Request, when: Any) -> Heard:
    """Submit a request that is cancelled when `when` is true of what it hears."""
    heard, tickets = Heard(), list[Any]()

    def hear(update: Update) -> None:
        heard(update)
        if when(update):
            tickets[0].cancel()

    engine.call(lambda: tickets.append(engine.submit(request, hear)))
    return heard


def at(processed: int) -> Any:
    return lambda update: isinstance(update, Progress) and update.processed >= processed


def test_a_prompt_that_is_cancelled_on_its_way_costs_what_it_took_and_keeps_it() -> None:
    runtime = runtime_of("attention", n_seqs=1, n_batch=50)
    clock = Clock(runtime)
    prompt = span(1000, 1)
    with engine_of(runtime=runtime, clock=clock) as engine:
        request = Request(prompt, max_tokens=4, sampling=GREEDY, wants_progress=True)
        first, heard = engine.call(  # at once
            lambda: (ask(engine, span(40, 2), 30), cancelling(engine, request, at(300)))
        )
        first.wait()
        finished = heard.wait()
        assert (finished.stop, finished.slot_id) == (Stop.CANCELLED, 0)
        times = finished.timings
        held = finished.n_cached
        assert 300 <= held < 400
        assert (times.prompt_n, times.cache_n, times.predicted_n) == (held, 0, 0)
        assert times.queue_ms == 30e3  # a batch for each token of the one before
        assert times.prompt_ms == 1e3 * -(-held // 48)  # in pieces that end at multiples of 8
        assert times.predicted_ms == 0
        again = ask(engine, prompt, 2).wait()
        assert again.timings.cache_n == held
        (_, cancelled, _) = engine.recent()
        assert (cancelled.evaluated_tokens, cancelled.ms) == (held, times.prompt_ms + 30e3)


def test_a_request_that_is_cancelled_in_the_queue_has_waited() -> None:
    runtime = runtime_of("attention", n_seqs=1)
    clock = Clock(runtime)
    with engine_of(runtime=runtime, clock=clock) as engine:
        long = Heard()
        queued = list[Heard]()

        def hear(update: Update) -> None:
            long(update)
            if len(long.tokens) == 25 and queued[0].ticket is not None:
                queued[0].ticket.cancel()

        def both() -> None:
            engine.submit(Request(span(40, 1), max_tokens=60, sampling=GREEDY), hear)
            queued.append(ask(engine, span(40, 2), 4))

        engine.call(both)
        finished = queued[0].wait()
        long.wait()
        times = finished.timings
        assert (finished.slot_id, times.queue_ms, times.prompt_ms) == (None, 25e3, 0)
        assert (times.prompt_n, times.cache_n, times.predicted_ms) == (0, 0, 0)
        assert engine.recent()[1].queue_ms == 25e3


def test_who_never_had_a_slot_says_nothing_of_how_long_answers_take() -> None:
    records = Records()
    records.add(Record(slot=1, prompt_ms=2e3, predicted_ms=8e3))
    records.add(Record(slot=None, stop="cancelled", queue_ms=500.0))
    assert (records.mean_s, records.totals["requests"]) == (10.0, 2)


def test_what_fails_has_cost_what_was_evaluated() -> None:
    runtime = runtime_of("attention", n_seqs=1, n_batch=50)
    clock = Clock(runtime)
    with engine_of(runtime=runtime, clock=clock) as engine:

        def hear(update: Update) -> None:
            heard(update)
            if isinstance(update, Progress) and update.processed >= 90:
                for _ in range(8):
                    runtime.fail("evaluate")

        heard = Heard()
        engine.submit(Request(span(500, 1), sampling=GREEDY, wants_progress=True), hear)
        with pytest.raises(DecodeError):
            heard.wait()
        (record,) = engine.recent()
    assert (record.stop, record.generated_tokens) == ("failed", 0)
    assert 90 <= record.evaluated_tokens < 500
    assert record.prompt_ms > 0
    assert record.queue_ms == record.predicted_ms == 0


@pytest.mark.parametrize("family", ["attention", "hybrid"])
def test_tokens_are_counted_as_they_are_evaluated(family: str) -> None:
    runtime = runtime_of(family, n_seqs=2, n_ctx=300)
    with engine_of(runtime=runtime, capacity_bytes=0) as engine:
        heard = [ask(engine, span(100, seed), 150) for seed in (1, 2)]  # no room for both
        finished = [one.wait() for one in heard]
        stats = engine.stats()
    n_decoded = sum(each.timings.predicted_n - 1 for each in finished)
    assert sum(each.timings.prompt_n for each in finished) > 200
    assert stats["evaluated_tokens"] + n_decoded == runtime.calls.evaluated_tokens


def test_counters_never_go_down() -> None:
    runtime = runtime_of("attention", n_seqs=1, n_batch=50)
    clock = Clock(runtime)
    with engine_of(runtime=runtime, clock=clock) as engine:
        metrics = Metrics(engine.stats, engine.settle)
        engine.observers.add(metrics)

        def counters() -> dict[str, float]:
            engine.settle()
            return {
                sample.name + str(sample.labels): sample.value
                for family in metrics.registry.collect()
                for sample in family.samples
                if family.type == "counter"
            }

        ask(engine, span(40, 1), 30).wait()
        before = counters()
        first = ask(engine, span(40, 3), 30)
        request = Request(span(1000, 2), sampling=GREEDY, wants_progress=True)
        cancelling(engine, request, at(200)).wait()
        first.wait()
        cancelling(engine, request, lambda update: isinstance(update, Begun)).wait()
        after = counters()
    assert {name for name in before if after[name] < before[name]} == set()
    name = "llamacpp:prompt_seconds_total{}"
    assert after[name] > before[name]


def test_times_of_an_answer_are_between_what_happened() -> None:
    runtime = runtime_of("attention", n_seqs=1, n_batch=50)
    clock = Clock(runtime)
    with engine_of(runtime=runtime, clock=clock) as engine:
        finished: Finished = ask(engine, span(100, 1), 9).wait()
        record: Record = engine.recent()[0]
    times = finished.timings
    assert (times.queue_ms, times.prompt_n, times.predicted_ms) == (0, 100, 8e3)
    assert times.prompt_ms in (2e3, 3e3)
    assert (record.prompt_ms, record.predicted_ms) == (times.prompt_ms, times.predicted_ms)
