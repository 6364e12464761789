"""Which slot a request gets, for whom it waits, and what a slot loses by one that cannot begin."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest

from llamakeep.engine import Begun, Progress, Request, Update
from llamakeep.errors import InvalidValue, LlamakeepError
from llamakeep.modes import Mode
from llamakeep.sampling import Sampling
from tests.engine_tools import GREEDY, N_VOCAB, Heard, ask, engine_of, join, runtime_of, span

CACHES = ["tree", "upstream", "keep"]
NOTHING = Sampling(logit_bias=tuple((token, -math.inf) for token in range(N_VOCAB)))


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("mode", Mode)
def test_a_request_that_cannot_begin_costs_no_slot_what_it_holds(cache: str, mode: Mode) -> None:
    talk = span(400, 1)
    with engine_of(n_seqs=1, cache=cache, capacity_bytes=0) as engine:
        ask(engine, talk, 4).wait()
        before = engine.slots()[0].tokens
        with pytest.raises(InvalidValue, match="every token is forbidden"):
            ask(engine, span(20, 2), 4, sampling=NOTHING, mode=mode).wait()
        assert engine.slots()[0].tokens.tolist() == before.tolist()
        turn = ask(engine, join(talk, span(20, 3)), 4).wait()
    assert turn.timings.cache_n == 400


@pytest.mark.parametrize("mode", [Mode.ON, Mode.OFF])
def test_a_sampler_that_breaks_costs_no_slot_what_it_holds(mode: Mode) -> None:
    runtime = runtime_of("attention", n_seqs=1)
    with engine_of(runtime=runtime, capacity_bytes=0) as engine:
        ask(engine, span(100, 1), 4).wait()
        sampler = runtime.sampler

        def broken(_: Sampling) -> Any:
            raise ZeroDivisionError("by no token")

        runtime.sampler = broken  # type: ignore[method-assign]
        with pytest.raises(LlamakeepError, match="by no token"):
            ask(engine, span(20, 2), 4, mode=mode).wait()
        runtime.sampler = sampler  # type: ignore[method-assign]
        assert engine.slots()[0].tokens.size == 103


@pytest.mark.parametrize("mode", Mode)
def test_a_prompt_waits_for_what_it_can_copy_and_for_nothing_else(mode: Mode) -> None:
    prompt, heard = span(500, 1), list[tuple[str, Update]]()
    done = {"first": Heard(), "second": Heard()}
    asked = {
        "first": Request(prompt, max_tokens=2, sampling=GREEDY, mode=mode, wants_progress=True),
        "second": Request(join(prompt[:400], span(40, 2)), max_tokens=2, sampling=GREEDY),
    }

    def hear(name: str, update: Update) -> None:
        heard.append((name, update))
        done[name](update)

    with engine_of(runtime=runtime_of("attention", n_seqs=2, n_batch=64)) as engine:
        engine.call(
            lambda: [engine.submit(asked[name], partial(hear, name)) for name in asked]  # at once
        )
        done["first"].wait()
        reused = done["second"].wait().timings.cache_n
    kinds = [(name, type(update)) for name, update in heard]
    evaluated = kinds[: kinds.index(("second", Begun))].count(("first", Progress))
    # The first progress is told when it begins.
    assert (evaluated > 1, reused >= 384) == (mode.writes, mode.writes)


@pytest.mark.parametrize("cache", ["tree", "upstream"])
def test_a_similarity_of_0_chooses_by_recency_alone(cache: str) -> None:
    keeping = {"similarity": 0.0}
    with engine_of(n_seqs=2, cache=cache, keeping=keeping, park_idle=False) as engine:
        talk = span(100, 1)
        one = ask(engine, talk, 2).wait().slot_id
        other = ask(engine, span(100, 2), 2).wait().slot_id
        assert other != one
        ask(engine, span(100, 3), 2, slot=one).wait()
        assert ask(engine, join(span(100, 3), span(20, 4)), 2).wait().slot_id == other
