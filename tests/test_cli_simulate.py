"""`llamakeep simulate`: what it prints, what it draws, and what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from llamakeep.cli import app, simulating
from llamakeep.cli.simulating import bar
from llamakeep.simulate import plot as plotting
from llamakeep.simulate.bound import bound
from llamakeep.simulate.replay import replay
from llamakeep.simulate.trace import open_trace
from tests.simulate_tools import line, put_lines

IDS = ([1, 2], [3, 4], [1, 2, 5], [3, 6], [1, 2, 5, 7], [3, 4])


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Blocks of 16 tokens; 7 different ones."""
    lines = [
        {**line(ids, [16] * len(ids), float(index)), "block_size": 16}
        for index, ids in enumerate(IDS)
    ]
    return put_lines(tmp_path / "t.jsonl", *lines)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)])


def report_of(*arguments: object) -> dict[str, Any]:
    result = run(*arguments, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    return dict(json.loads(result.stdout))


def refused(*arguments: object) -> str:
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("llamakeep: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def test_json(trace: Path) -> None:
    found = report_of(trace, "--capacity", "64", "--capacity", "50%", "--bytes-per-token", 1)
    assert (found["requests"], found["blocks"], found["block_tokens"]) == (6, 15, 16)
    assert (found["input_tokens"], found["footprint_bytes"]) == (240, 112)
    with open_trace(trace) as opened:
        expected = [replay(opened, capacity_bytes=n) for n in (64, 56)]
        most = [bound(opened, capacity_bytes=n) for n in (64, 56)]
    for row, outcome in zip(found["results"] + found["best"], expected + most, strict=True):
        assert row["saved_share"] == outcome.saved_share
        assert row["evaluated_tokens"] == outcome.evaluated_tokens
        assert row["requests_hit"] == outcome.requests_hit
        assert row["evicted_bytes"] == outcome.evicted_bytes
        assert row["capacity_share"] == outcome.capacity_bytes / 112
        assert row["saved_ms"] == pytest.approx(outcome.reused_tokens * 2, rel=1e-3)
    assert [row["policy"] for row in found["results"]] == ["hazard", "hazard"]
    assert found["best_is_bound"] is True


def test_policies_with_options(trace: Path) -> None:
    found = report_of(
        trace, "--policy", "marginal:half_life=60", "--policy", "oldest", "--capacity", "50%"
    )
    assert [row["policy"] for row in found["results"]] == ["marginal:half_life=60", "oldest"]


def test_a_table_with_bars(trace: Path) -> None:
    result = run(trace, "--capacity", "100%", "--bytes-per-token", "1KiB")
    assert (result.exit_code, result.stderr) == (0, "")
    head, _, titles, row, most, _, note = result.stdout.splitlines()
    assert head == "t.jsonl: 6 requests, 240 tokens; 112 KiB keep everything"
    assert titles.split()[:4] == ["policy", "capacity", "saved", "hit"]
    with open_trace(trace) as opened:
        saved = replay(opened, capacity_bytes=112).saved_share
    assert row.split()[:7] == ["hazard", "112", "KiB", "=", "100", "%", f"{saved:.1%}"]
    assert row.endswith(bar(saved))
    assert most.startswith("bound ")
    assert note == "bound: Belady's optimum on the same blocks; nothing can save more."


def test_what_the_note_says(trace: Path) -> None:
    slot = run(trace, "--cache", "prompt").stdout
    assert "the slot is memory on top of it" in slot
    hybrid = run(trace, "--family", "hybrid", "--checkpoint-bytes", "1MiB").stdout
    assert hybrid.splitlines()[-1].endswith("no bound.")
    assert hybrid.splitlines()[-3].startswith("clairvoyant ")
    assert "bound" not in run(trace, "--no-bound").stdout
    assert report_of(trace, "--cache", "prompt")["best_is_bound"] is False
    hybrid_report = report_of(trace, "--family", "hybrid", "--checkpoint-bytes", "1MiB")
    assert hybrid_report["best_is_bound"] is False


def test_the_default_capacities(trace: Path) -> None:
    shares = [row["capacity_share"] for row in report_of(trace)["results"]]
    assert shares == pytest.approx([0.02, 0.05, 0.1, 0.2, 0.5], abs=1e-6)


def test_warmup(trace: Path) -> None:
    found = report_of(trace, "--capacity", "100%", "--warmup", "50%")
    assert found["results"][0]["requests"] == found["best"][0]["requests"] == 3
    assert report_of(trace, "--warmup", 4, "--capacity", "9%")["results"][0]["requests"] == 2


def test_tiers(trace: Path) -> None:
    found = report_of(
        trace, "--bytes-per-token", 1, "--tiers", "ram=48@1GiB,disk=200@1MiB", "--prefill-rate", 100
    )
    (row,), (most,) = found["results"], found["best"]
    assert (row["capacity_bytes"], most["capacity_bytes"]) == (48, 248)
    assert row["restored_bytes"]["disk"] > 0
    restoring_s = row["restored_bytes"]["disk"] / (1 << 20)
    saved_s = row["reused_tokens"] / 100 - restoring_s
    assert row["saved_ms"] == pytest.approx(1e3 * saved_s, abs=0.01)


def test_tails(tmp_path: Path) -> None:
    lines = [{**line([1, 2], [16, 12]), "block_size": 16} for _ in range(2)]
    path = put_lines(tmp_path / "t.jsonl", *lines)
    assert report_of(path, "--capacity", "100%")["results"][0]["reused_tokens"] == 16
    kept = report_of(path, "--capacity", "100%", "--tails")
    assert kept["results"][0]["reused_tokens"] == 24
    assert kept["best"][0]["reused_tokens"] == 28


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cache", "pile"], "--cache must be tree or prompt, not 'pile'"),
        (["--policy", "best"], "unknown policy 'best'"),
        (["--policy", "lru:half_life=1"], "policy 'lru' has no option 'half_life'"),
        (["--policy", "marginal:half_life=long"], "'half_life' is no number: 'long'"),
        (["--policy", "marginal:half_life"], "'half_life' has no value"),
        (["--policy", "marginal:half_life=-1"], "half_life must be a positive number"),
        (["--capacity", "much"], "a size is written like"),
        (["--capacity", "x%"], "a share is written like 5%, not 'x%'"),
        (["--family", "dense"], "--family must be one of attention, "),
        (["--family", "hybrid"], "the hybrid family needs --checkpoint-bytes"),
        (["--checkpoint-bytes", "1"], "the attention family has no checkpoints"),
        (["--bytes-per-token", "0"], "bytes_per_token must be 1 or more"),
        (["--prefill-rate", "0"], "the prefill rate must be above 0"),
        (["--warmup", "6"], "a warm-up of 6 leaves nothing of 6 requests"),
        (["--warmup", "some"], "a warm-up is a number of requests"),
        (["--tiers", "disk=1"], "must begin with memory"),
        (["--tiers", "ram=1", "--capacity", "1"], "--capacity or --tiers"),
        (["--tiers", "ram=1", "--cache", "prompt"], "--tiers are for --cache tree"),
        (["--plot", "x.doc"], "cannot draw into x.doc"),
    ],
)
def test_what_cannot_be_meant(trace: Path, arguments: list[str], message: str) -> None:
    assert message in refused(trace, *arguments)


def test_what_is_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("hello\n")
    assert "no JSON" in refused(path)
    assert "cannot read" in refused(tmp_path / "none")


def test_a_plot(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    draw = plotting._draw

    def watched(axes: Any, outcomes: Any, report: Any, label: str, **style: Any) -> None:
        draw(axes, outcomes, report, label, **style)
        line = axes.lines[-1]
        assert list(line.get_ydata()) == [100 * each.saved_share for each in outcomes]
        drawn.append(label)

    monkeypatch.setattr(plotting, "_draw", watched)
    path = tmp_path / "x.png"
    result = run(trace, "--plot", path, "--policy", "lru", "--policy", "oldest")
    assert (result.exit_code, result.stderr) == (0, "")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert drawn == ["bound (Belady)", "tree, lru", "tree, oldest"]
    assert "cannot write" in run(trace, "--plot", tmp_path / "no" / "x.png").stderr


def test_a_plot_of_any_trace_and_capacity(trace: Path, tmp_path: Path) -> None:
    odd = trace.rename(tmp_path / "cost $5^{.jsonl")
    for capacities in (["0"], ["0", "5%"], ["1TiB"]):
        flags = [flag for each in capacities for flag in ("--capacity", each)]
        result = run(odd, "--plot", tmp_path / "x.svg", *flags)
        assert (result.exit_code, result.stderr) == (0, "")
    assert "<svg" in (tmp_path / "x.svg").read_text()
    tails = put_lines(tmp_path / "tails", {**line([1], [3]), "block_size": 16})
    result = run(tails, "--plot", tmp_path / "x.svg", "--capacity", "1GiB")
    assert (result.exit_code, result.stderr) == (0, "")


def test_plots_need_matplotlib(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    assert "pip install 'llamakeep[plot]'" in refused(trace, "--plot", tmp_path / "x.png")


def test_caches_do_not_warn_of_what_does_not_fit(
    trace: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert run(trace, "--capacity", "1%").exit_code == 0
    assert caplog.records == []


def test_bars() -> None:
    assert [bar(share, 2) for share in (-1, 0, 0.03, 0.5, 0.75, 1, 2)] == [
        "",
        "",
        "",
        "█",
        "█▌",
        "██",
        "██",
    ]


@pytest.mark.parametrize(
    ("ms", "text"),
    [(3.4, "3 ms"), (-5.0, "-5 ms"), (2_500, "2.5 s"), (600_000, "10 min"), (7.2e6, "2.0 h")],
)
def test_spans_of_time(ms: float, text: str) -> None:
    assert simulating._span(ms) == text
