"""docs/eviction-evidence.md: its commands exist, its tables add up, and some of them are true."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks import evidence
from benchmarks.features import FEATURES, SETS
from benchmarks.hindsight import waits
from benchmarks.oracles import Future
from llamakeep.simulate.trace import open_trace
from tests.published import POINTS, PUBLISHED, trace_path

TEXT = (Path(__file__).parent.parent / "docs" / "eviction-evidence.md").read_text(encoding="utf-8")
CELL = re.compile(r"(\d+\.\d) \((-|-?\d+)\)")
COLUMNS = [
    ("taubench_airline", "2%"),
    ("lmcache_agent", "2%"),
    ("lmcache_agent", "5%"),
    ("mooncake_synthetic", "2%"),
    ("mooncake_synthetic", "10%"),
    ("mooncake_synthetic", "20%"),
]


def table_of(section: str) -> dict[str, list[str]]:
    """The cells of a section's table, by what its rows are called."""
    lines = TEXT[TEXT.index(f"### {evidence.TITLES[section]}\n") :].splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("|"))
    heads = " | ".join(f"{trace} {capacity}" for trace, capacity in COLUMNS)
    assert lines[start] == f"| | {heads} | mean |"
    rows = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        rows[name] = cells
    return rows


def test_its_command_is_there() -> None:
    commands = re.findall(r"^    python -m benchmarks\.evidence ((?:.*\\\n)*.*)$", TEXT, re.M)
    assert commands
    for command in commands:
        options = evidence.command_line().parse_args(command.replace("\\\n", " ").split())
        cases = evidence.cases_of(options.trace, options.deals)
        assert [(case.path.name.split(".")[0], case.capacity) for case in cases] == COLUMNS


@pytest.mark.parametrize("section", evidence.TITLES)
def test_its_means_are_those_of_its_columns(section: str) -> None:
    for name, cells in table_of(section).items():
        found = [CELL.fullmatch(cell) for cell in cells[:-1]]
        assert all(found), name
        closed = [int(each[2]) for each in found if each is not None and each[2] != "-"]
        assert int(cells[-1]) == pytest.approx(np.mean(closed), abs=1), name


def test_its_rows_are_those_that_are_measured() -> None:
    assert [*table_of("features")][: len(FEATURES)] == [*FEATURES]
    assert {features.name for features in SETS} <= table_of("features").keys()
    assert {features.name for features in SETS} <= table_of("cases").keys()
    assert {*FEATURES, "lru", "hazard", "bound"} <= table_of("halves").keys()
    assert [*table_of("policies")][: len(evidence.EXPERTS)] == [*evidence.EXPERTS]


def test_its_ends_are_those_that_were_published() -> None:
    for name, at in (("lru", 1), ("bound", 2)):
        for (trace, capacity), cell in zip(COLUMNS, table_of("policies")[name], strict=False):
            saved = float(cell.split()[0])
            assert saved == pytest.approx(PUBLISHED[trace][capacity][at], abs=POINTS[name])


def test_its_sum_for_a_third_is_right() -> None:
    name = "shared + turns + last gap"
    gained, dealt = (
        [int(re.findall(r"\((-?\d+)\)", cell)[0]) for cell in cells[:-1]]
        for cells in (table_of("features")[name], table_of("chance")[f"{name}, dealt anew"])
    )
    left = [one - other for one, other in zip(gained[3:], dealt[3:], strict=True)]
    text = " ".join(TEXT.split())
    assert "{}, {} and {} % by sharing, turns and gap".format(*left) in text
    assert "hindsight gives them, {}, {} and {} %".format(*gained[:3]) in text
    assert f"the mean is {np.mean([*gained[:3], *left]):.0f} %" in text


def test_its_summary_is_that_of_its_tables() -> None:
    lines = TEXT[TEXT.index("| tables by |") :].splitlines()[2:]
    summary = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:4]]
    for name, *cells in summary:
        gained, dealt, difference, learned = map(int, cells)
        assert gained == int(table_of("features")[name][-1])
        assert dealt == int(table_of("chance")[f"{name}, dealt anew"][-1])
        assert difference == gained - dealt
        assert learned == int(table_of("halves")[name][-1])


@pytest.mark.parametrize("name", ["taubench_airline", "lmcache_agent", "mooncake_synthetic"])
def test_what_it_says_of_waits_is_so(name: str) -> None:
    path = trace_path(name)
    if path is None:
        pytest.skip("shared/traces is not at hand")
    with open_trace(path) as trace:
        future = Future(trace)
    half = future.n_requests // 2
    _, seconds, used = waits(future, 0, future.n_requests)
    in_first = future.next_uses < half
    medians = [np.median(seconds[(used == 1) & (in_first == first)]) for first in (True, False)]
    written = {
        "taubench_airline": r"shorter than\s+(\S+) s, in its second (\S+) s",
        "lmcache_agent": r"On LMCache that goes from (\S+) to (\S+) s",
        "mooncake_synthetic": r"on Mooncake from (\S+) to (\S+) s",
    }
    (found,) = re.findall(written[name], TEXT)
    for median, text in zip(medians, found, strict=True):
        assert float(text) == pytest.approx(float(median), rel=0.05)


@pytest.mark.parametrize("capacity", ["2%", "5%"])
def test_what_it_says_of_oracles_is_what_they_save(capacity: str) -> None:
    path = trace_path("lmcache_agent")
    if path is None:
        pytest.skip("shared/traces is not at hand")
    rows = evidence.measure(evidence.Case(path, capacity, 1, ("oracles",)))
    column = COLUMNS.index(("lmcache_agent", capacity))
    written = {name: cells[column] for name, cells in table_of("oracles").items()}
    assert rows
    for row in rows:
        assert row.closed_share is not None
        found = f"{100 * row.saved_share:.1f} ({round(100 * row.closed_share)})"
        assert written[row.policy] == found
