"""The engine on fake models of every family: right answers, whoever else is served beside."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from llamakeep.engine import Finished, Observer, Piece, Progress, Request, Stop
from llamakeep.errors import (
    ContextOverflow,
    DecodeError,
    EngineClosed,
    InvalidValue,
    LlamakeepError,
    QueueFull,
    TokenError,
)
from llamakeep.modes import Mode
from llamakeep.runtime.base import Family
from llamakeep.sampling import Sampling
from llamakeep.stores.fake import FakeTier
from llamakeep.stores.memory import MemoryStore
from llamakeep.stores.tiered import TieredStore
from llamakeep.tokens import as_tokens
from tests.engine_tools import (
    GREEDY,
    N_VOCAB,
    Heard,
    ask,
    cold,
    engine_of,
    join,
    runtime_of,
    span,
    tenant,
)

FAMILIES = list(Family)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_is_that_of_a_cold_run(family: Family) -> None:
    prompt = span(100, 1)
    with engine_of(family) as engine:
        heard = ask(engine, prompt, 20)
        finished = heard.wait()
    assert heard.tokens == cold(family, prompt, 20)
    assert (finished.stop, finished.timings.predicted_n) == (Stop.LIMIT, 20)
    assert (finished.n_prompt, finished.timings.prompt_n, finished.timings.cache_n) == (100, 100, 0)
    assert finished.n_cached == 119  # the last token is not evaluated


@pytest.mark.parametrize("family", FAMILIES)
def test_many_at_once_are_each_as_if_alone(family: Family) -> None:
    prompts = [span(20 + 37 * seed, seed) for seed in range(8)]
    prompts += [join(prompts[3], span(30, 50)), prompts[5][:100]]
    with engine_of(family) as engine:
        heard = [ask(engine, prompt, 12) for prompt in prompts]
        for prompt, one in zip(prompts, heard, strict=True):
            one.wait()
            assert one.tokens == cold(family, prompt, 12)
        stats = engine.stats()
    assert (stats["requests"], stats["slots_busy"], stats["waiting"]) == (10, 0, 0)
    assert stats["reused_tokens"] > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_the_next_turn_evaluates_what_is_new(family: Family) -> None:
    prompt = span(203, 1)
    with engine_of(family) as engine:
        first = ask(engine, prompt, 15)
        first.wait()
        turn = join(prompt, first.tokens, span(30, 2))
        second = ask(engine, turn, 5)
        finished = second.wait()
        # The answer's last token was never evaluated; rows that can be cut are, to a multiple of 8.
        whole = 203 + 14
        assert finished.timings.cache_n in (whole, whole // 8 * 8)
        assert second.tokens == cold(family, turn, 5)
        assert finished.reuse is not None
        assert finished.reuse.tier == "live"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_next_turn_does_so_after_others_took_the_slots(family: Family) -> None:
    with engine_of(family, n_seqs=1) as engine:
        talks = [span(120 + seed, seed) for seed in range(3)]
        for seed, talk in enumerate(talks):
            first = ask(engine, talk, 15)
            first.wait()
            talks[seed] = join(talk, first.tokens)
        for seed, talk in enumerate(talks):
            turn = join(talk, span(30, 10 + seed))
            second = ask(engine, turn, 5)
            evaluated = second.wait().timings.prompt_n
            assert evaluated <= 30 + 1 + 8
            assert second.tokens == cold(family, turn, 5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_common_beginning_is_evaluated_once_by_those_that_come_together(family: Family) -> None:
    system = span(400, 1)
    prompts = [join(system, span(20 + seed, 2 + seed)) for seed in range(3)]
    with engine_of(family) as engine:
        heard = [Heard() for _ in prompts]
        requests = [Request(as_tokens(prompt), 6, GREEDY) for prompt in prompts]
        engine.submit_all(list(zip(requests, heard, strict=True)))  # before one begins
        evaluated = [one.wait().timings.prompt_n for one in heard]
        for prompt, one in zip(prompts, heard, strict=True):
            assert one.tokens == cold(family, prompt, 6)
    assert sum(evaluated) <= 400 + sum(prompt.size - 400 + 9 for prompt in prompts)


def test_a_busy_slot_gives_its_prefix_away() -> None:
    prompt = span(400, 1)
    with engine_of() as engine:
        first = ask(engine, prompt, 1500)
        assert first.answered.wait(60)
        second = ask(engine, join(prompt[:320], span(20, 2)), 3)
        finished = second.wait()
        assert (finished.timings.cache_n, finished.slot_id) == (320, 1)
        assert first.ticket is not None
        first.ticket.cancel()
        first.wait()
    assert first.tokens == cold("attention", prompt, len(first.tokens))


@pytest.mark.parametrize("family", FAMILIES)
def test_more_than_the_context_holds_is_answered_in_turn(family: Family) -> None:
    prompts = [span(150, seed) for seed in range(6)]
    with engine_of(family, n_seqs=4, n_ctx=400) as engine:
        heard = [ask(engine, prompt, 60) for prompt in prompts]
        for prompt, one in zip(prompts, heard, strict=True):
            assert one.wait().stop is Stop.LIMIT
            assert one.tokens == cold(family, prompt, 60, n_ctx=400)


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_that_outgrow_the_context_together_go_on_one_after_the_other(
    family: Family,
) -> None:
    """Admitted by their prompts, they need more than there is: one waits, with all it has."""
    prompts = [span(60, seed) for seed in range(3)]
    with engine_of(family, n_ctx=300) as engine:
        heard = [ask(engine, prompt, 150) for prompt in prompts]
        for prompt, one in zip(prompts, heard, strict=True):
            assert one.wait().truncated is False
            assert one.tokens == cold(family, prompt, 150, n_ctx=300)


def test_a_full_context_ends_the_answer() -> None:
    with engine_of(n_ctx=128) as engine:
        heard = ask(engine, span(100, 1), None, sampling=Sampling(temperature=0, ignore_eos=True))
        finished = heard.wait()
    assert (finished.stop, finished.truncated) == (Stop.LIMIT, True)
    assert len(heard.tokens) == 28
    assert finished.n_cached == 127


# -- what ends an answer ---------------------------------------------------------------------------


def test_a_stop_string_ends_it_and_is_not_told() -> None:
    with engine_of() as engine:
        whole = ask(engine, span(50, 1), 12)
        whole.wait()
        word = whole.text[9:13]
        heard = ask(engine, span(50, 1), 12, stop=("nowhere", word))
        finished = heard.wait()
    assert (finished.stop, finished.stopping_word) == (Stop.WORD, word)
    assert heard.text == whole.text[: whole.text.index(word)]


def test_the_model_ends_it() -> None:
    with engine_of() as engine:
        eos = engine.vocab.eos
        assert eos is not None
        only = Sampling(temperature=0, logit_bias=((eos, 100.0),))
        heard = ask(engine, span(50, 1), 12, sampling=only)
        finished = heard.wait()
        assert (finished.stop, heard.tokens, heard.text) == (Stop.END, [], "")
        forbidden = Sampling(temperature=0, logit_bias=((eos, 100.0),), ignore_eos=True)
        heard = ask(engine, span(50, 1), 12, sampling=forbidden)
        assert (heard.wait().stop, len(heard.tokens)) == (Stop.LIMIT, 12)


def test_no_token_asked_for_evaluates_the_prompt() -> None:
    with engine_of() as engine:
        heard = ask(engine, span(50, 1), 0)
        finished = heard.wait()
        assert (finished.stop, heard.tokens, finished.n_cached) == (Stop.LIMIT, [], 50)
        assert ask(engine, join(span(50, 1), span(9, 2)), 2).wait().timings.cache_n == 48


@pytest.mark.parametrize("n_probs", [1, 5])
def test_probabilities_are_those_of_the_logits(n_probs: int) -> None:
    prompt = span(50, 1)
    with engine_of() as engine:
        heard = ask(engine, prompt, 3, n_probs=n_probs)
        heard.wait()
    model = runtime_of("attention")
    model.evaluate(0, prompt)
    logits = model.logits().astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum())
    first = next(update for update in heard.updates if isinstance(update, Piece)).probs[0]
    assert first.prob is not None
    best = np.argsort(-logprobs)[:n_probs]
    assert [one.token for one in first.likeliest] == best.tolist()
    assert [one.logprob for one in first.likeliest] == pytest.approx(logprobs[best], abs=1e-5)
    assert first.prob.logprob == pytest.approx(logprobs[first.token], abs=1e-5)


def test_a_seed_gives_the_same_answer_whatever_runs_beside() -> None:
    seeded = Sampling(temperature=1.0, seed=7)
    with engine_of() as engine:
        alone = ask(engine, span(50, 1), 20, sampling=seeded)
        alone.wait()
        crowd = [ask(engine, span(80, seed), 20) for seed in (2, 3)]
        beside = ask(engine, span(50, 1), 20, sampling=seeded)
        for one in (*crowd, beside):
            one.wait()
        other = ask(engine, span(50, 1), 20, sampling=Sampling(temperature=1.0, seed=8))
        other.wait()
    assert beside.tokens == alone.tokens != other.tokens


def test_progress_is_told_in_order_up_to_the_whole_prompt() -> None:
    with engine_of() as engine:
        ask(engine, span(100, 1), 1).wait()
        heard = ask(engine, join(span(100, 1), span(200, 2)), 2, wants_progress=True)
        heard.wait()
    told = [update for update in heard.updates if isinstance(update, Progress)]
    assert {(one.total, one.cached) for one in told} == {(300, 96)}
    processed = [one.processed for one in told]
    assert processed[0] == 96
    assert processed == sorted(processed)
    assert processed[-1] > 200


# -- who may share ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_fault_47_tenants_share_nothing(family: Family) -> None:
    prompt = span(200, 1)
    with engine_of(family) as engine:
        ask(engine, prompt, 3, salt="one").wait()
        for salt in ("two", ""):
            heard = ask(engine, prompt, 3, salt=salt)
            assert heard.wait().timings.cache_n == 0
        assert ask(engine, prompt, 3, salt="one").wait().timings.cache_n >= 192


@pytest.mark.parametrize("family", FAMILIES)
def test_fault_62_a_request_says_what_may_be_reused_and_kept(family: Family) -> None:
    with engine_of(family, n_seqs=1) as engine:

        def reused(seed: int, mode: Mode) -> int:
            heard = ask(engine, span(200, seed), 3, mode=mode)
            finished = heard.wait()
            assert heard.tokens == cold(family, span(200, seed), 3)
            return finished.timings.cache_n

        assert reused(1, Mode.ON) == 0
        assert reused(1, Mode.WRITE) == 0
        assert reused(1, Mode.OFF) == 0
        assert reused(1, Mode.READ) >= 192
        assert [reused(2, mode) for mode in (Mode.OFF, Mode.ON)] == [0, 0]
        assert [reused(3, mode) for mode in (Mode.READ, Mode.WRITE)] == [0, 0]
        reused(4, Mode.READ)
        reused(5, Mode.ON)
        assert reused(4, Mode.ON) == 0
        assert reused(3, Mode.ON) >= 192


@pytest.mark.parametrize("pinned", [0, 2])
def test_fault_14_a_pinned_slot_finds_what_others_know(pinned: int) -> None:
    prompt = span(200, 1)
    with engine_of() as engine:
        ask(engine, prompt, 3, slot=1).wait()
        finished = ask(engine, join(prompt, span(9, 2)), 3, slot=pinned).wait()
        assert (finished.slot_id, finished.timings.cache_n) == (pinned, 200)


def test_who_waits_for_a_slot_does_not_hold_up_the_others() -> None:
    with engine_of(n_seqs=2) as engine:
        long = ask(engine, span(50, 1), 400, slot=0)
        assert long.begun.wait(60)
        waiting = ask(engine, span(50, 2), 3, slot=0)
        other = ask(engine, span(50, 3), 3)
        assert other.wait().slot_id == 1
        assert not waiting.ended.is_set()
        assert long.ticket is not None
        long.ticket.cancel()
        assert waiting.wait().slot_id == 0


# -- going away, failing, ending -------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_fault_60_who_goes_away_frees_the_slot(family: Family) -> None:
    with engine_of(family, n_seqs=1) as engine:
        gone = ask(engine, span(50, 1), 1500)
        assert gone.begun.wait(60)
        queued = ask(engine, span(60, 2), 5)
        dropped = ask(engine, span(60, 3), 5)
        assert dropped.ticket is not None
        assert gone.ticket is not None
        dropped.ticket.cancel()
        gone.ticket.cancel()
        gone.ticket.cancel()
        assert gone.wait().stop is Stop.CANCELLED
        assert dropped.wait().slot_id is None
        queued.wait()
        assert queued.tokens == cold(family, span(60, 2), 5)
        again = ask(engine, join(span(50, 1), gone.tokens, span(5, 4)), 5)
        assert again.wait().timings.cache_n >= 40  # what it had computed is not lost
        assert engine.stats()["slots_busy"] == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_fault_6_a_batch_that_fails_once_is_done_again(family: Family) -> None:
    model = runtime_of(family, n_seqs=3)
    prompts = [span(150, seed) for seed in range(3)]
    with engine_of(runtime=model) as engine:
        for after in (0, 2, 5, 11):
            engine.call(lambda after=after: model.fail("evaluate", after=after))
            heard = [ask(engine, prompt, 10) for prompt in prompts]
            for prompt, one in zip(prompts, heard, strict=True):
                one.wait()
                assert one.tokens == cold(family, prompt, 10)


def test_a_batch_that_always_fails_ends_the_request_and_not_the_engine() -> None:
    model = runtime_of("attention", n_seqs=2)
    with engine_of(runtime=model) as engine:

        def fail(operation: str) -> None:
            if operation == "evaluate":
                raise DecodeError("broken for good")

        model.failures = fail
        with pytest.raises(Exception, match="broken for good"):
            ask(engine, span(50, 1)).wait()
        model.failures = None
        ask(engine, span(50, 1)).wait()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "operation", ["restore", "restore:segment", "rewind", "copy", "read_segment", "read_checkpoint"]
)
def test_states_that_fail_cost_time_only(family: Family, operation: str) -> None:
    model = runtime_of(family, n_seqs=2)
    talks = [span(120, seed) for seed in range(3)]
    with engine_of(runtime=model) as engine:
        for _ in range(3):
            for seed, talk in enumerate(talks):
                engine.call(lambda: model.fail(operation))
                heard = ask(engine, talk, 6)
                heard.wait()
                assert heard.tokens == cold(family, talk, 6)
                talks[seed] = join(talk, heard.tokens, span(10, 100 + seed))
        model._planned.clear()


def test_a_listener_that_fails_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    with engine_of() as engine:

        def broken(update: object) -> None:
            raise ValueError("not mine")

        engine.submit(Request(span(20, 1), 3, GREEDY), broken)
        ask(engine, span(20, 2)).wait()
    assert "a listener of request 1 failed" in caplog.text


def test_the_queue_has_a_limit() -> None:
    with engine_of(n_seqs=1, max_waiting=2) as engine:
        long = ask(engine, span(50, 1), 1500)
        assert long.begun.wait(60)
        waiting = [ask(engine, span(50, seed), 1) for seed in (2, 3)]
        with pytest.raises(QueueFull, match="2 requests are waiting") as caught:
            ask(engine, span(50, 4), 1)
        assert caught.value.retry_after_s >= 1
        assert long.ticket is not None
        long.ticket.cancel()
        for one in waiting:
            one.wait()
        ask(engine, span(50, 4), 1).wait()


def test_several_get_their_places_at_once_or_none_does() -> None:
    refusals = list[LlamakeepError]()

    class Refusals(Observer):
        def refused(self, error: LlamakeepError) -> None:
            refusals.append(error)

    def request(seed: int) -> Request:
        return Request(span(50, seed), 1, GREEDY)

    with engine_of(n_seqs=1, max_waiting=4) as engine:
        engine.observers.add(Refusals())
        long = ask(engine, span(50, 1), 1500)
        assert long.begun.wait(60)
        three = [Heard() for _ in range(3)]
        engine.submit_all([(request(2 + n), heard) for n, heard in enumerate(three)])
        with pytest.raises(
            QueueFull, match="3 requests are waiting, at most 4 may: there is no room for 2 more"
        ):
            engine.submit_all([(request(5), Heard()), (request(6), Heard())])
        assert engine.stats()["waiting"] == 3  # nothing of the second ones
        assert long.ticket is not None
        long.ticket.cancel()
        for one in three:
            one.wait()
        assert [one.tokens for one in three] == [
            cold("attention", span(50, seed), 1) for seed in (2, 3, 4)
        ]
        with pytest.raises(TokenError):  # the last one is wrong
            engine.submit_all([(Request.of([n]), Heard()) for n in (1, 2, N_VOCAB)])
        assert engine.stats()["waiting"] == engine.stats()["slots_busy"] == 0
        with pytest.raises(InvalidValue, match="room for 5: 1 in slots, 4 in the queue"):
            engine.submit_all([(Request.of([1]), Heard())] * 6)
    assert [type(error) for error in refusals] == [QueueFull, TokenError, InvalidValue]


@pytest.mark.parametrize(
    ("prompt", "options", "error", "words"),
    [
        (span(2048, 1), {}, ContextOverflow, "2048 tokens; the context of 2048"),
        ([5, N_VOCAB], {}, TokenError, str(N_VOCAB)),
        ([], {}, TokenError, "at least one"),
        ([5], {"slot": 3}, InvalidValue, "slot 3 is outside 0 to 2"),
        ([5], {"max_tokens": -1}, InvalidValue, "max_tokens"),
        ([5], {"stop": ("",)}, InvalidValue, "stop string"),
        ([5, 6], {"user_starts": (1, 0)}, InvalidValue, "user_starts"),
    ],
)
def test_bad_requests_are_refused_at_once(
    prompt: Any, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with engine_of() as engine:
        with pytest.raises(error, match=words):
            ask(engine, prompt, **options)
        assert engine.stats()["waiting"] == 0


def test_a_bias_of_no_token_fails_the_request_alone() -> None:
    with engine_of() as engine:
        bad = Sampling(temperature=0, logit_bias=((N_VOCAB + 5, 1.0),))
        with pytest.raises(TokenError):
            ask(engine, span(20, 1), sampling=bad).wait()
        ask(engine, span(20, 1)).wait()


def test_closing_tells_everyone() -> None:
    with engine_of(n_seqs=1) as engine:
        running = ask(engine, span(50, 1), 1500)
        assert running.begun.wait(60)
        waiting = ask(engine, span(50, 2), 1500)
        engine.close()
        for one in (running, waiting):
            with pytest.raises(EngineClosed):
                one.wait()
        with pytest.raises(EngineClosed):
            ask(engine, span(50, 3))
        with pytest.raises(EngineClosed):
            engine.call(lambda: None)
        engine.close()
        engine.check = lambda: None  # type: ignore[method-assign]


def test_closing_lets_answers_finish() -> None:
    with engine_of(n_seqs=1) as engine:
        running = ask(engine, span(50, 1), 300)
        assert running.begun.wait(60)
        engine.close(drain_s=60)
        assert running.wait().stop is Stop.LIMIT
        assert running.tokens == cold("attention", span(50, 1), 300)
        engine.check = lambda: None  # type: ignore[method-assign]


@pytest.mark.parametrize("family", ["attention", "hybrid"])
def test_fault_59_threads_that_do_everything_at_once(family: str) -> None:
    failures: list[BaseException] = []
    with engine_of(family) as engine:

        def talk(seed: int) -> None:
            try:
                prompt = span(40 + seed, seed)
                for turn in range(4):
                    heard = ask(engine, prompt, 5)
                    engine.stats()
                    engine.slots()
                    engine.entries()
                    heard.wait()
                    assert heard.tokens == cold(family, prompt, 5)
                    prompt = join(prompt, heard.tokens, span(10, 100 * seed + turn))
                    if seed == 0:
                        engine.clear_cache()
            except BaseException as error:  # noqa: BLE001 - shown below
                failures.append(error)

        threads = [threading.Thread(target=talk, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []


def test_fault_61_what_it_does_can_be_seen() -> None:
    with engine_of(n_seqs=2) as engine:
        first = ask(engine, span(101, 1), 4, label="first")
        first.wait()
        ask(engine, join(span(101, 1), first.tokens, span(16, 2)), 3, label="second").wait()
        newest, before = engine.recent()
        assert (newest.label, before.label) == ("second", "first")
        assert (newest.reused_tokens, newest.evaluated_tokens) == (104, 17)
        assert (newest.tier, newest.reason[:8]) == ("live", "new from")
        stats = engine.stats()
        assert stats["saved_share"] == pytest.approx(104 / 222)
        assert stats["reused_by_tier"] == {"none": 0, "live": 104}
        shown = engine.slots()
        assert [one.is_processing for one in shown] == [False, False]
        assert max(one.tokens.size for one in shown) == 123
        assert engine.entries() == []  # what is live is not held twice
        engine.flush()
        assert [entry["n_tokens"] for entry in engine.entries()] == [123]
        assert engine.clear_cache()["freed_bytes"] > 0
        assert engine.entries() == []
        assert all(one.tokens.size == 0 for one in engine.slots())


def test_idle_slots_make_room_and_lose_nothing() -> None:
    with engine_of(n_seqs=3, n_ctx=512) as engine:
        talks = [span(140, seed) for seed in range(5)]
        for talk in talks * 2:
            heard = ask(engine, talk, 3)
            heard.wait()
            assert heard.tokens == cold("attention", talk, 3, n_ctx=512)
        recent = engine.recent()
        assert [record.reused_tokens for record in recent[:5]] == [136] * 5


def test_what_is_restored_above_an_idle_slot_is_laid_low_when_that_leaves() -> None:
    model = runtime_of("attention", n_seqs=2)
    with engine_of(runtime=model) as engine:
        talk = span(400, 1)
        ask(engine, talk, 3).wait()
        ask(engine, span(700, 2), 3).wait()  # in the other slot; the first is parked
        before = engine.call(lambda: model.calls.restores)
        turn = join(talk, span(20, 3))
        heard = ask(engine, turn, 10)
        heard.wait()
        assert heard.tokens == cold("attention", turn, 10)
        assert engine.call(lambda: model.calls.restores) - before == 2


def test_what_is_evaluated_low_is_not_moved() -> None:
    model = runtime_of("attention", n_seqs=2)
    with engine_of(runtime=model) as engine:
        long = ask(engine, span(700, 1), 200)
        for seed in range(5):  # neighbours that come and go lie above it
            ask(engine, span(100, 2 + seed), 3).wait()
        long.wait()
        ask(engine, span(300, 9), 20).wait()  # the other is parked before this one begins
        assert engine.call(lambda: model.calls.restores) == 0


def test_without_a_cache_what_is_live_is_reused_and_nothing_kept() -> None:
    with engine_of(n_seqs=2, capacity_bytes=0) as engine:
        prompt = span(100, 1)
        ask(engine, prompt, 3).wait()
        assert ask(engine, join(prompt, span(5, 2)), 3).wait().timings.cache_n == 96
        ask(engine, span(100, 3), 3).wait()
        assert engine.stats()["used_bytes"] == 0


def test_heard_is_told_everything_in_order() -> None:
    with engine_of() as engine:
        heard = ask(engine, span(100, 1), 5, wants_progress=True)
        heard.wait()
    kinds = [type(update).__name__ for update in heard.updates]
    assert kinds[0] == "Begun"
    assert kinds[-1] == "Finished"
    assert kinds.count("Finished") == 1
    assert "Progress" not in kinds[kinds.index("Piece") :]
    assert isinstance(heard.updates[-1], Finished)


def test_nothing_is_listened_to_after_the_end() -> None:
    heard = Heard()
    with engine_of() as engine:
        heard = ask(engine, span(100, 1), 5)
        heard.wait()
        n = len(heard.updates)
        assert heard.ticket is not None
        heard.ticket.cancel()
        ask(engine, span(100, 1), 5).wait()
    assert len(heard.updates) == n


# -- a request that may not keep -----------------------------------------------------------------


@pytest.mark.parametrize("cache", ["tree", "upstream", "keep"])
@pytest.mark.parametrize("mode", [Mode.OFF, Mode.READ, Mode.WRITE])
def test_a_talk_survives_a_request_between_that_may_not_keep(cache: str, mode: Mode) -> None:
    """It goes on from the talk, ends it, or is about something else."""
    talk = span(200, 1)
    betweens = [join(talk, span(50, 2)), talk[:150], span(100, 3)]
    if cache == "upstream":
        del betweens[1]  # llama-server looks for nothing better while a slot shares enough
    for between in betweens:
        with engine_of(n_seqs=1, cache=cache) as engine:
            ask(engine, talk, 3).wait()
            ask(engine, between, 3, mode=mode).wait()
            heard = ask(engine, join(talk, span(9, 4)), 3)
            assert heard.wait().timings.cache_n >= 192
            assert heard.tokens == cold("attention", join(talk, span(9, 4)), 3)


@pytest.mark.parametrize("cache", ["tree", "upstream", "keep"])
def test_what_is_kept_survives_one_that_only_reads_it(cache: str) -> None:
    with engine_of(n_seqs=1, cache=cache) as engine:
        ask(engine, span(200, 1), 3).wait()
        ask(engine, span(200, 2), 3).wait()
        for _ in range(2):
            read = ask(engine, span(200, 1), 3, mode=Mode.READ)
            assert read.wait().timings.cache_n >= 192
        assert ask(engine, span(200, 1), 3).wait().timings.cache_n >= 192


@pytest.mark.parametrize("cache", ["tree", "upstream", "keep"])
def test_one_that_was_sent_back_to_the_queue_keeps_nothing_either(cache: str) -> None:
    with engine_of(n_seqs=2, n_ctx=300, cache=cache) as engine:
        first = ask(engine, span(100, 1), 150, mode=Mode.OFF)
        second = ask(engine, span(100, 2), 150, mode=Mode.OFF)
        for prompt, one in ((span(100, 1), first), (span(100, 2), second)):
            one.wait()
            assert one.tokens == cold("attention", prompt, 150, n_ctx=300)
        assert engine.entries() == []
        for seed in (1, 2):
            assert ask(engine, span(100, seed), 0).wait().timings.cache_n == 0


def test_off_leaves_the_talk_where_it_is_when_another_slot_is_free() -> None:
    with engine_of(n_seqs=2) as engine:
        talked = ask(engine, span(200, 1), 3).wait()
        assert ask(engine, span(200, 1), 3, mode=Mode.OFF).wait().slot_id != talked.slot_id


# -- when something fails for good ---------------------------------------------------------------


def test_who_shares_a_batch_with_one_that_always_fails_is_answered() -> None:
    model = runtime_of("attention", n_seqs=3)
    poison = 999
    decode = model.decode

    def fail(parts: Any) -> Any:
        if any(poison in np.asarray(part.tokens) for part in parts):
            for part in parts:
                model.clear(part.seq_id)
            raise DecodeError("it cannot be evaluated")
        return decode(parts)

    with engine_of(runtime=model) as engine:
        engine.call(lambda: setattr(model, "decode", fail))
        good = [span(100, 1), span(150, 2)]
        heard = [ask(engine, prompt, 40) for prompt in good]
        for _ in range(3):
            with pytest.raises(DecodeError):
                ask(engine, join(span(50, 3), [poison], span(50, 4)), 5).wait()
        for prompt, one in zip(good, heard, strict=True):
            one.wait()
            assert one.tokens == cold("attention", prompt, 40)


def test_a_seeded_answer_is_the_same_when_its_sequence_is_lost_on_the_way() -> None:
    """A token that was sampled counts, whatever becomes of the rows after that."""
    seeded = Sampling(temperature=1.0, seed=7, ignore_eos=True, presence_penalty=1.0)
    for family in FAMILIES:
        model = runtime_of(family, n_seqs=2)
        with engine_of(runtime=model) as engine:
            undisturbed = ask(engine, span(90, 1), 30, sampling=seeded)
            undisturbed.wait()
            engine.clear_cache()
            for after in range(3):
                engine.call(
                    lambda after=after, model=model: model.fail(
                        "restore:verify", after=after, cleared_all=True
                    )
                )
                again = ask(engine, span(90, 1), 30, sampling=seeded)
                ask(engine, span(200, 2 + after), 5).wait()
                again.wait()
                assert again.tokens == undisturbed.tokens
            model._planned.clear()


@pytest.mark.parametrize("operation", ["read_segment", "restore", "copy", "read_checkpoint"])
@pytest.mark.parametrize("family", ["attention", "hybrid"])
def test_memory_that_is_not_there_costs_time_only(family: str, operation: str) -> None:
    model = runtime_of(family, n_seqs=2, n_ctx=512)
    with engine_of(runtime=model) as engine:

        def fail(current: str) -> None:
            if current == operation:
                raise MemoryError("no memory")

        engine.call(lambda: setattr(model, "failures", fail))
        talks = [span(150, seed) for seed in range(3)]
        for talk in talks * 2:
            heard = ask(engine, talk, 5)
            heard.wait()
            assert heard.tokens == cold(family, talk, 5, n_ctx=512)
        engine.call(lambda: setattr(model, "failures", None))


def test_what_cannot_be_kept_stays_live_beside_others() -> None:
    with engine_of(n_seqs=2, capacity_bytes=4_000) as engine:
        talk = span(600, 1)  # its rows take more than that
        ask(engine, talk, 3).wait()
        ask(engine, span(50, 2), 30).wait()
        heard = ask(engine, join(talk, span(9, 3)), 3)
        assert heard.wait().timings.cache_n == 600
        assert heard.tokens == cold("attention", join(talk, span(9, 3)), 3)


def test_answers_to_one_prompt_share_its_cells() -> None:
    prompt = span(300, 1)
    with engine_of(n_seqs=3, n_ctx=512) as engine:
        hold = ask(engine, span(20, 9), 60)
        assert hold.begun.wait(60)
        heard = [
            ask(engine, prompt, 20, sampling=Sampling(temperature=1, seed=seed, ignore_eos=True))
            for seed in range(2)
        ]
        finished = [one.wait() for one in heard]
        assert sum(one.timings.prompt_n for one in finished) <= 300 + 64


def test_an_engine_that_stops_by_itself_says_so_and_ends_everything(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with engine_of(n_seqs=1) as engine:
        stopped = threading.Event()
        engine.on_stop = stopped.set
        running = ask(engine, span(50, 1), 1500)
        assert running.begun.wait(60)
        waiting = ask(engine, span(50, 2), 5)

        def broken() -> None:
            raise KeyError("a fault of ours")

        engine._scheduler.step = broken  # type: ignore[method-assign]
        assert stopped.wait(60)
        for one in (running, waiting):
            with pytest.raises(EngineClosed):
                one.wait()
        assert engine.closed
        engine.check = lambda: None  # type: ignore[method-assign]
    assert "the engine stopped" in caplog.text


def test_what_may_not_be_kept_is_copied_by_nobody() -> None:
    prompt = span(400, 1)
    for mode in (Mode.OFF, Mode.READ):
        with engine_of(n_seqs=3) as engine:
            first = ask(engine, prompt, 1500, mode=mode)
            assert first.answered.wait(60)
            assert ask(engine, prompt, 3).wait().timings.cache_n == 0
            engine.clear_cache()
            assert first.ticket is not None
            first.ticket.cancel()
            first.wait()
            assert ask(engine, join(prompt, span(9, 2)), 3).wait().timings.cache_n == 0


def test_answers_go_on_while_what_is_kept_is_forgotten_below() -> None:
    disk = FakeTier()
    store = TieredStore(MemoryStore(1 << 26), disk)
    keeping = {"all_namespaces": lambda: [tenant("")]}
    with engine_of(store=store, keeping=keeping) as engine:
        disk.gate.clear()  # the disk is slow from here on
        ask(engine, span(200, 1), 3).wait()
        engine.call(engine._scheduler.cells.save_idle)
        forgetting = threading.Thread(target=engine.clear_cache)
        forgetting.start()
        ask(engine, span(100, 2), 3).wait()
        ask(engine, span(100, 3), 3).wait()
        assert forgetting.is_alive()
        disk.gate.set()
        forgetting.join(60)
        assert not forgetting.is_alive()
        assert engine.flush()
        assert ask(engine, span(200, 1), 3).wait().timings.cache_n == 0


def test_a_copy_from_a_busy_slot_gives_the_right_reason() -> None:
    prompt = span(400, 1)
    with engine_of(n_seqs=2) as engine:
        first = ask(engine, prompt, 1500)
        assert first.answered.wait(60)
        reuse = ask(engine, join(prompt[:320], span(50, 2)), 3).wait().reuse
        assert reuse is not None
        assert (reuse.reused_tokens, reuse.tier) == (320, "live")
        assert reuse.reason == "new from token 320 on"


def test_a_fault_in_a_sampler_or_at_an_end_fails_one_request_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = runtime_of("attention", n_seqs=2)
    with engine_of(runtime=model) as engine:
        other = ask(engine, span(50, 9), 60)
        assert other.begun.wait(60)
        sampler = model.sampler

        class Broken:
            def accept(self, tokens: object) -> None: ...
            def sample(self, index: int) -> int:
                raise ValueError("a fault of ours")

            def close(self) -> None: ...

        engine.call(lambda: setattr(model, "sampler", lambda _: Broken()))
        with pytest.raises(LlamakeepError, match="a fault of ours"):
            ask(engine, span(50, 1)).wait()
        engine.call(lambda: setattr(model, "sampler", sampler))
        end = engine._keeping.end

        def broken(*_: object) -> None:
            raise RuntimeError("a fault of ours")

        engine.call(lambda: setattr(engine._keeping, "end", broken))
        ask(engine, span(50, 2)).wait()
        engine.call(lambda: setattr(engine._keeping, "end", end))
        other.wait()
        assert other.tokens == cold("attention", span(50, 9), 60)
    assert "end failed" in caplog.text


def test_closing_lets_one_that_was_sent_back_finish_too() -> None:
    with engine_of(n_seqs=2, n_ctx=300) as engine:
        heard = [ask(engine, span(100, seed), 150) for seed in range(2)]
        assert all(one.begun.wait(60) for one in heard)
        engine.close(drain_s=60)
        for seed, one in enumerate(heard):
            one.wait()
            assert one.tokens == cold("attention", span(100, seed), 150, n_ctx=300)
        engine.check = lambda: None  # type: ignore[method-assign]


def test_tenants_that_nothing_is_kept_of_leave_nothing() -> None:
    with engine_of(n_seqs=1, capacity_bytes=4_000) as engine:
        for tenant_number in range(60):
            ask(engine, span(60, tenant_number), 1, salt=f"{tenant_number}").wait()
        tree = engine._keeping._tree  # type: ignore[attr-defined]
        assert len(tree._roots) < 20
