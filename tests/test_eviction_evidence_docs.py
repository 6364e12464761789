"""docs/eviction-evidence.md: its commands exist, its tables add up, and some of them are true."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks import evidence
from benchmarks.features import FEATURES, SETS
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
        found = f"{100 * row.saved_share:.1f} ({100 * row.closed_share:.0f})"
        assert written[row.policy] == found
