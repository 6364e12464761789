"""The tables of the tree's policies in docs/eviction.md: some of their cells, made again."""

from __future__ import annotations

import re

import pytest

from docs.make_policy_tables import (
    BOUND,
    DOCS,
    POLICIES,
    SEEDS,
    SLOT,
    TITLES,
    Cell,
    measure,
    percent,
    subsets,
    whole,
)
from llamakeep.policy import parse_policy, policy_names
from tests.published import trace_path


def rows_of(name: str) -> dict[str, list[str]]:
    """Return the cells of a table by their row, without marks; titles are the row ''."""
    found = re.search(rf"<!-- {name} -->(.*?)<!-- /{name} -->", DOCS.read_text(), re.DOTALL)
    assert found is not None
    lines = [line for line in found[1].splitlines() if line.startswith("|") and "---" not in line]
    cells = [[cell.strip(" *`") for cell in line.split("|")[1:-1]] for line in lines]
    return {row[0]: row[1:] for row in cells}


def test_every_policy_and_every_cell_is_there() -> None:
    rows = rows_of("policies")
    assert set(rows) - {"", "of the gap, `hazard` closes"} == {SLOT, *POLICIES, BOUND}
    assert len(rows[""]) == len(whole())
    assert {parse_policy(name).name for name in POLICIES} == set(policy_names())
    assert len(rows_of("subsets")) - 1 == len(subsets()) // len(SEEDS)


@pytest.mark.parametrize("name", ["taubench_airline", "lmcache_agent"])
def test_cells_are_what_replays_save(name: str) -> None:
    if trace_path(name) is None:
        pytest.skip(f"the trace {name} is not in a directory shared/traces beside the project")
    rows = rows_of("policies")
    at = rows[""].index(f"{TITLES[name]}, 2 %")
    chosen = (SLOT, "lru", "slru", "hazard", BOUND)
    found = measure(Cell(name, "2%"), chosen)
    assert [rows[row][at] for row in chosen] == [percent(share) for share in found]


def test_a_cell_of_a_subset_is_what_replays_save() -> None:
    if trace_path("lmcache_agent") is None:
        pytest.skip("the trace is not in a directory shared/traces beside the project")
    found = measure(Cell("lmcache_agent", "2%", SEEDS[0]), ("lru", "hazard", BOUND))
    assert rows_of("subsets")["LMCache, 2 %"][0] == " / ".join(percent(share) for share in found)


def test_what_is_said_of_the_tables_is_in_them() -> None:
    rows = rows_of("policies")
    saved = {row: [float(cell) for cell in cells] for row, cells in rows.items() if row in POLICIES}
    slot = [float(cell) for cell in rows[SLOT]]
    below = [max(a, b) - c for a, b, c in zip(saved["lru"], slot, saved["hazard"], strict=True)]
    assert max(below) <= 0.2001
    best = [max(column) for column in zip(*saved.values(), strict=True)]
    assert max(b - h for b, h in zip(best, saved["hazard"], strict=True)) <= 0.2001
    assert all(hazard >= whole for hazard, whole in zip(saved["hazard"], slot, strict=True))
    gains = [
        hazard - lru
        for row in list(rows_of("subsets").items())[1:]
        for lru, hazard, _ in (map(float, cell.split(" / ")) for cell in row[1])
    ]
    text = " ".join(DOCS.read_text().split())
    assert (
        f"between {-min(gains):.1f} points less than `lru` and {max(gains):.1f} more, on average "
        f"{sum(gains) / len(gains):.1f} more" in text
    )
