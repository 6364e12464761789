"""The figures that others published, on their traces, where these are at hand."""

from __future__ import annotations

import pytest

from llamakeep.simulate.bound import bound
from llamakeep.simulate.experiment import capacity_of
from llamakeep.simulate.replay import replay
from llamakeep.simulate.trace import open_trace
from tests.published import POINTS, PUBLISHED, trace_path


@pytest.mark.parametrize("name", ["lmcache_agent", "taubench_airline"])
def test_published_figures(name: str) -> None:
    """The largest trace is left to the benchmark `simulate-published`."""
    path = trace_path(name)
    if path is None:
        pytest.skip(f"the trace {name} is not in a directory shared/traces beside the project")
    with open_trace(path) as trace:
        for share, (_, lru, most) in PUBLISHED[name].items():
            capacity_bytes = capacity_of(share, trace.footprint_tokens)
            found = replay(trace, capacity_bytes=capacity_bytes)
            best = bound(trace, capacity_bytes=capacity_bytes)
            assert 100 * found.saved_share == pytest.approx(lru, abs=POINTS["lru"])
            assert 100 * best.saved_share == pytest.approx(most, abs=POINTS["bound"])
            assert found.saved_share <= best.saved_share
