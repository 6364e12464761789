"""`llamakeep simulate --replicas`: what it prints, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from llamakeep.cli import app
from llamakeep.cli.fleets import read_fleets
from llamakeep.simulate.fleet import Fleet, replay_fleet
from llamakeep.simulate.replay import Model
from llamakeep.simulate.routing import Route
from llamakeep.simulate.tiers import parse_tiers
from llamakeep.simulate.trace import open_trace
from tests.simulate_tools import put_lines

BLOCK = 128
TIERS = "ram=384,shared=1KiB"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Three conversations that grow by turns, a block each, over one first block."""
    lines = [
        {
            "timestamp": float(3 * turn + talk),
            "session_id": f"talk {talk}",
            "block_size": BLOCK,
            "hash_ids": [0, *(100 * talk + block for block in range(turn))],
            "block_tokens": [BLOCK] * (turn + 1),
            "input_length": BLOCK * (turn + 1),
        }
        for turn in range(1, 5)
        for talk in range(1, 4)
    ]
    return put_lines(tmp_path / "t.jsonl", *lines)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)])


def report_of(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--bytes-per-token", 1, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    return dict(json.loads(result.stdout))


def test_json(trace: Path) -> None:
    report = report_of(
        trace, "--tiers", TIERS, "--replicas", 1, "--replicas", 3, "--route", "prefix:blocks=9"
    )
    fleets = [Fleet(1, Route("prefix", blocks=9)), Fleet(3, Route("prefix", blocks=9))]
    ram, shared = parse_tiers(TIERS)
    with open_trace(trace) as opened:
        for row, fleet in zip(report["results"], fleets, strict=True):
            found = replay_fleet(
                opened, fleet, capacity_bytes=ram.capacity_bytes, below=[shared], model=Model()
            )
            assert row["saved_share"] == found.saved_share > 0
            assert row["capacity_bytes"] == 384
            assert (row["replicas"], row["route"]) == (fleet.n_replicas, "prefix:blocks=9")
            assert row["reused_by_tier"] == found.reused_by_tier
            assert row["requests_of"] == list(found.requests_of)
            assert row["evaluated_of"] == list(found.evaluated_of)
            assert row["uneven_evaluated"] == found.uneven_evaluated
            assert row["router_entries"] == found.remembered > 0
            assert found.shared is not None
            assert row["shared"] == found.shared.to_json()
            assert row["shared"]["used_bytes"] <= 1024
    assert [row["capacity_bytes"] for row in report["best"]] == [384 + 1024, 3 * 384 + 1024]


def test_without_replicas_nothing_is_said_of_them(trace: Path) -> None:
    (row,) = report_of(trace, "--tiers", TIERS)["results"]
    assert "replicas" not in row


def test_tables(trace: Path) -> None:
    flags = ["--replicas", 2, "--route", "random:seed=5", "--route", "conversation"]
    result = run(trace, "--tiers", TIERS, "--bytes-per-token", 1, *flags)
    assert (result.exit_code, result.stderr) == (0, "")
    _, _, titles, one, two, best, _, shared_titles, *shared, _, uneven, parts, note = (
        result.stdout.splitlines()
    )
    first = "policy memory replicas saved hit from ram from shared evaluated uneven"
    assert " ".join(titles.split()) == first
    rows = report_of(trace, "--tiers", TIERS, *flags)["results"]
    for line, row in zip((one, two), rows, strict=True):
        assert line.split()[:5] == ["hazard", "384", "B", "2", row["route"]]
        assert f"{row['saved_share']:.1%}" in line
        assert f"{row['reused_by_tier'].get('shared', 0):,}" in line
        assert line.endswith(f"{row['uneven_requests']:.2f}, {row['uneven_evaluated']:.2f}")
    assert best.split()[:5] == ["bound", "1.75", "KiB", "in", "one"]
    second = "policy memory replicas read peak mean written peak mean evicted held"
    assert " ".join(shared_titles.split()) == second
    assert len(shared) == 2
    assert all("B" in line for line in shared)
    assert uneven.startswith("uneven: ")
    assert parts.startswith("read, written, evicted: of the shared tier")
    assert note == "bound: Belady's optimum in one cache of all memory; nothing can save more."


def test_a_table_without_a_shared_tier(trace: Path) -> None:
    result = run(
        trace,
        *("--replicas", 2, "--capacity", "50%", "--bytes-per-token", 1, "--no-bound"),
    )
    assert (result.exit_code, result.stderr) == (0, "")
    _, _, titles, row, _, uneven = result.stdout.splitlines()
    assert "from shared" not in titles
    assert row.split()[3:5] == ["2", "random"]
    assert uneven.startswith("uneven: ")


def test_checkpoints_have_no_bound_in_fleets_either(trace: Path) -> None:
    result = run(
        trace,
        *("--replicas", 2, "--capacity", "50%", "--bytes-per-token", 1),
        *("--family", "hybrid", "--checkpoint-bytes", 9),
    )
    assert result.stdout.splitlines()[-1] == (
        "clairvoyant: a greedy choice in one cache of all memory; no bound."
    )


def test_fleets_of_the_command_line() -> None:
    assert read_fleets([], []) == ()
    assert read_fleets([2], []) == (Fleet(2),)
    prefix = Route("prefix")
    assert read_fleets([1, 4, 4], ["random", "prefix"]) == (
        Fleet(1),
        Fleet(4),
        Fleet(4, prefix),
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--route", "prefix"], "--route says which replica serves a request: it needs --replicas"),
        (["--replicas", "0"], "replicas must be 1 or more, not 0"),
        (["--replicas", "5000"], "replicas must be at most 1,024, not 5,000"),
        (["--replicas", "2", "--route", "near"], "a route must be one of random, "),
        (["--replicas", "2", "--route", "random:blocks=1"], "has no option 'blocks'"),
        (["--replicas", "2", "--route", "prefix:blocks=0"], "must be a whole number, not '0'"),
        (["--replicas", "2", "--cache", "prompt"], "--replicas are for --cache tree"),
        (["--replicas", "2", "--plot", "x.png"], "--plot draws one cache by itself"),
    ],
)
def test_what_cannot_be_meant(trace: Path, arguments: list[str], message: str) -> None:
    result = run(trace, *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("llamakeep: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
