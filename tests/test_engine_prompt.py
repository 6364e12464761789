"""The engine over llama-server's prompt cache, as it is and as it could be."""

from __future__ import annotations

import numpy as np
import pytest

from llamakeep.modes import Mode
from llamakeep.prompt_cache import PromptCache
from llamakeep.runtime.base import Family
from llamakeep.slots import Slots
from tests.engine_tools import ask, cold, engine_of, join, runtime_of, span

FAMILIES = list(Family)
MODES = ("upstream", "keep")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", MODES)
def test_many_at_once_are_each_as_if_alone(family: Family, mode: str) -> None:
    prompts = [span(20 + 37 * seed, seed) for seed in range(8)]
    prompts += [join(prompts[3], span(30, 50)), prompts[0]]
    with engine_of(family, cache=mode) as engine:
        heard = [ask(engine, prompt, 12) for prompt in prompts]
        for prompt, one in zip(prompts, heard, strict=True):
            one.wait()
            assert one.tokens == cold(family, prompt, 12)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("mode", MODES)
def test_talks_that_take_turns_in_one_slot_come_back_from_the_cache(
    family: Family, mode: str
) -> None:
    with engine_of(family, n_seqs=1, cache=mode) as engine:
        talks = [span(120 + seed, seed) for seed in range(3)]
        for seed, talk in enumerate(talks):
            first = ask(engine, talk, 15)
            first.wait()
            talks[seed] = join(talk, first.tokens)
        for seed, talk in enumerate(talks):
            turn = join(talk, span(30, 10 + seed))
            second = ask(engine, turn, 5)
            finished = second.wait()
            # llama-server goes back to a checkpoint where there is a window.
            goes_back = mode == "upstream" and family.has_window
            least = 80 if goes_back else talk.size - 1
            assert least <= finished.timings.cache_n < talk.size
            assert finished.reuse is not None
            assert finished.reuse.tier == "ram"
            assert second.tokens == cold(family, turn, 5)
        assert engine.stats()["cache"] == "prompt"
        assert engine.stats()["hits"] >= 2


def test_one_at_a_time_it_evaluates_what_the_slots_alone_would() -> None:
    """The same prompts through `Slots.serve`: as many tokens are evaluated, request by request."""
    rng = np.random.default_rng(3)
    prompts = [span(60, 0)]
    for step in range(25):
        base = prompts[int(rng.integers(len(prompts)))]
        prompts.append(join(base[: int(rng.integers(20, base.size))], span(30, 100 + step)))
    for mode in MODES:
        alone = Slots(
            runtime_of("attention", n_seqs=2),
            PromptCache(20_000, mode=mode),  # type: ignore[arg-type]
            n_ubatch=32,
        )
        with engine_of(n_seqs=2, cache=mode, capacity_bytes=20_000) as engine:
            for prompt in prompts:
                finished = ask(engine, prompt, 0).wait()
                served = alone.serve(prompt)
                assert finished.timings.prompt_n == served.evaluated_tokens
                assert finished.slot_id == served.slot_id


@pytest.mark.parametrize("mode", MODES)
def test_fault_47_tenants_share_nothing(mode: str) -> None:
    prompt = span(200, 1)
    with engine_of(cache=mode) as engine:
        ask(engine, prompt, 3, salt="one").wait()
        for salt in ("two", ""):
            heard = ask(engine, prompt, 3, salt=salt)
            assert heard.wait().timings.cache_n == 0
        assert ask(engine, prompt, 3, salt="one").wait().timings.cache_n >= 190


@pytest.mark.parametrize("mode", MODES)
def test_fault_62_a_request_says_what_may_be_reused_and_kept(mode: str) -> None:
    with engine_of(n_seqs=1, cache=mode) as engine:

        def reused(seed: int, way: Mode) -> int:
            return ask(engine, span(200, seed), 3, mode=way).wait().timings.cache_n

        assert reused(1, Mode.OFF) == reused(1, Mode.ON) == 0
        assert reused(1, Mode.WRITE) == 0
        assert reused(1, Mode.READ) >= 198
        assert reused(2, Mode.READ) == reused(2, Mode.ON) == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_batches_that_fail_are_done_again(family: Family, mode: str) -> None:
    model = runtime_of(family, n_seqs=2)
    with engine_of(runtime=model, cache=mode) as engine:
        for after in (0, 2, 5):
            engine.call(lambda after=after: model.fail("evaluate", after=after))
            for seed in range(3):
                heard = ask(engine, span(100, seed), 6)
                heard.wait()
                assert heard.tokens == cold(family, span(100, seed), 6)


@pytest.mark.parametrize("mode", MODES)
def test_what_is_kept_can_be_seen_and_forgotten(mode: str) -> None:
    with engine_of(n_seqs=1, cache=mode) as engine:
        ask(engine, span(100, 1), 3).wait()
        ask(engine, span(100, 2), 3).wait()
        assert [entry["n_tokens"] for entry in engine.entries()] == [102]
        assert engine.stats()["used_bytes"] > 0
        assert engine.clear_cache()["freed_bytes"] > 0
        assert engine.entries() == []
        assert ask(engine, span(100, 1), 3).wait().timings.cache_n == 0
