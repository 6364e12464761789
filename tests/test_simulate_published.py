"""The figures that others published, on their traces, where these are at hand."""

from __future__ import annotations

import numpy as np
import pytest

from llamakeep.runtime.sized import SizedRuntime
from llamakeep.simulate.bound import bound
from llamakeep.simulate.experiment import capacity_of
from llamakeep.simulate.replay import PromptDriver, TraceClock, replay
from llamakeep.simulate.trace import open_trace
from tests.published import POINTS, PUBLISHED, WholePrompts, searched_first, trace_path
from tests.simulate_tools import random_prompts, trace_of
from tests.test_upstream_replay import MIB, ROW_BYTES, option, recording


@pytest.mark.parametrize("name", ["lmcache_agent", "taubench_airline"])
def test_published_figures(name: str) -> None:
    """The largest trace is left to the benchmark `simulate-published`."""
    path = trace_path(name)
    if path is None:
        pytest.skip(f"the trace {name} is not in a directory shared/traces beside the project")
    with open_trace(path) as trace:
        for share, (slot, lru, most) in PUBLISHED[name].items():
            capacity_bytes = capacity_of(share, trace.footprint_tokens)
            found = replay(trace, capacity_bytes=capacity_bytes, policy="lru")
            best = bound(trace, capacity_bytes=capacity_bytes)
            assert 100 * found.saved_share == pytest.approx(lru, abs=POINTS["lru"])
            assert 100 * best.saved_share == pytest.approx(most, abs=POINTS["bound"])
            learned = replay(trace, capacity_bytes=capacity_bytes, policy="hazard").saved_share
            prompt = replay(trace, "prompt", capacity_bytes=capacity_bytes).saved_share
            assert 100 * learned >= 100 * max(found.saved_share, prompt) - 0.5
            if best.saved_share - found.saved_share > 0.05:
                gap = best.saved_share - found.saved_share
                # What it closes on these two, 23 to 60 %, less what a change of constants may cost:
                # that a third of all gaps is closed is not so (docs/eviction-evidence.md).
                assert learned - found.saved_share > gap / 5
            assert found.saved_share <= best.saved_share
            variant = searched_first(trace, capacity_bytes)
            assert 100 * variant == pytest.approx(slot, abs=POINTS["slot"])


@pytest.mark.parametrize("seed", range(6))
def test_but_for_one_rule_the_variant_is_the_prompt_cache(seed: int) -> None:
    """What tells the two apart is the order of two steps, and nothing else."""
    rng = np.random.default_rng(seed)
    prompts = [np.repeat(each, 8).tolist() for each in random_prompts(rng, n=40, longest=120)]
    with trace_of(prompts) as trace:
        for capacity_bytes in (100, 300, 900, 1 << 20):
            model = WholePrompts(capacity_bytes, search_first=False)
            runtime, clock = SizedRuntime(n_ctx=trace.longest_tokens), TraceClock()
            driver = PromptDriver(runtime, capacity_bytes, policy="oldest", clock=clock)
            for request in trace:
                clock.go_to(request.timestamp)
                assert driver.serve(request) == model.serve(request.tokens)
            driver.check()
            assert model.reused_tokens > 0


@pytest.mark.parametrize(
    ("name", "more"), [("prompt_cache_1slot", True), ("prompt_cache_shared_system", False)]
)
def test_the_variant_is_not_what_a_llama_server_was_seen_to_do(name: str, more: bool) -> None:
    """It finds entries that the recorded server evicted, just before that one searched."""
    record = recording(name)
    capacity_tokens = option(record["server"], "--cache-ram", 8192) * MIB // ROW_BYTES
    upstream, variant = (WholePrompts(capacity_tokens, search_first=it) for it in (False, True))
    for request in record["requests"]:
        tokens = np.array(request["tokens"], np.int32)
        assert upstream.serve(tokens) == request["reused"]
        variant.serve(tokens)
    assert (variant.reused_tokens > upstream.reused_tokens) is more
