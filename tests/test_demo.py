"""The demo on real and tiny models: what it claims holds, and it says so when something differs."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from llamakeep import demo
from llamakeep.cli import app
from llamakeep.demo import DemoResult, Step, measure, run_demo, screen, summary, write_log

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp's threads wait for each other by spinning, which test workers cannot afford."""
    monkeypatch.setattr("llamakeep.runtime.llama_cpp.usable_cores", lambda: 1)


N_REQUESTS = 8
REPEATED, CONTINUED = 6, 7
"""Indices of the request that is repeated and of the one that goes on after its answer."""


def _check_totals(result: DemoResult) -> None:
    assert len(result.rows) == N_REQUESTS
    for row in result.rows:
        assert row.reused_tokens + row.evaluated_tokens == row.prompt_tokens
        assert 0 <= row.reused_generated_tokens <= row.reused_tokens
        assert row.evaluated_tokens >= 2
        assert 0 < row.warm_first_ms <= row.warm_ms
        assert 0 < row.cold_first_ms <= row.cold_ms
        assert row.identical == (row.first_difference is None) == (row.margin is None)
    assert result.rows[0].tier == "none"
    assert result.rows[0].plain_evaluated_tokens == result.rows[0].prompt_tokens
    assert 0 < result.used_bytes <= result.capacity_bytes


def test_the_log_is_long_and_its_start_is_its_own() -> None:
    assert len(write_log(28).split("\n")) == 29
    assert len(set(write_log(28).split("\n"))) == 29
    assert write_log(28).startswith(write_log(4))


def test_every_family(family: str, tiny_model: Callable[[str], Path]) -> None:
    result = run_demo(tiny_model(family), quick=True)
    _check_totals(result)
    for row in result.rows:
        assert row.identical, row
    assert result.rows[REPEATED].reused_tokens > 0.9 * result.rows[REPEATED].prompt_tokens
    assert result.rows[REPEATED].tier == "ram"


def test_smollm2(smollm2_path: Path) -> None:
    steps: list[Step] = []
    result = run_demo(smollm2_path, quick=True, on_step=steps.append)
    _check_totals(result)

    for row in result.rows[:CONTINUED]:
        assert row.reused_generated_tokens == 0
        assert row.identical, row
    assert result.rows[CONTINUED].reused_generated_tokens > 0
    assert [row.tier for row in result.rows] == [
        *("none", "live", "live", "live", "ram", "live", "ram", "live")
    ]
    for row in result.rows[1:]:
        assert row.reused_tokens >= 0.9 * row.prompt_tokens
    # A `Llama` alone reuses what it saw last, and nothing from before that.
    assert result.rows[1].plain_evaluated_tokens <= result.rows[1].evaluated_tokens
    assert result.rows[REPEATED].plain_evaluated_tokens > 200

    assert {step.phase for step in steps} == {"cold", "warm", "answer", "done"}
    assert [len(step.rows) for step in steps if step.phase == "done"] == [*range(1, 9)]
    evaluated = [(s.phase, s.done_tokens, s.total_tokens) for s in steps if s.total_tokens]
    n_prompt = result.rows[0].prompt_tokens
    assert evaluated[:4] == [
        ("cold", 512, n_prompt),
        ("cold", n_prompt, n_prompt),
        ("warm", 0, n_prompt),
        ("warm", 512, n_prompt),
    ]


def test_json(tiny_model: Callable[[str], Path]) -> None:
    model = str(tiny_model("attention"))
    result = CliRunner().invoke(app, ["demo", "--quick", "--json", "--model", model])
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    for name in ("reused_tokens", "evaluated_tokens", "prompt_tokens", "plain_evaluated_tokens"):
        assert found[name] == sum(row[name] for row in found["requests"])
    assert found["saved_share"] == found["reused_tokens"] / found["prompt_tokens"]
    assert found["requests"][0].keys() == {
        *demo.DemoRow.__slots__,
        "speedup",
    }
    assert {"used_bytes", "capacity_bytes", "model", "n_threads"} <= found.keys()


def test_plain_lines_where_there_is_no_terminal(tiny_model: Callable[[str], Path]) -> None:
    model = str(tiny_model("attention"))
    result = CliRunner().invoke(app, ["demo", "--quick", "--model", model])
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout
    lines = result.stdout.splitlines()
    assert [line.partition(".")[0] for line in lines if "; first token after" in line] == [
        str(n) for n in range(1, 9)
    ]
    assert any(line.startswith("Tokens evaluated: ") for line in lines)
    assert "    keeper = llamakeep.attach(llm)" in lines


def test_a_terminal_shows_a_table_and_progress(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.StringIO()

    def console(**options: Any) -> Console:
        return Console(file=out, force_terminal=True, width=100, **options)

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(screen, "Console", console)
    demo.show_demo(tiny_model("attention"), quick=True)
    shown = out.getvalue()
    assert "1/8 a log and a question: without llamakeep" in shown
    end = shown[shown.rindex("Tokens of each prompt") :]
    assert "8 request 1, continued" in end
    assert "8/8" not in end
    assert "\x1b[?25h" in end  # the cursor is back


def test_a_difference_is_found_and_said(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One answer is changed on its way back; the margin is that of the cold run."""
    answer = measure._Pair._answer
    calls: list[np.ndarray] = []

    def changed(self: Any, llm: Any, *args: Any) -> Any:
        found = answer(self, llm, *args)
        calls.append(found.tokens)
        if len(calls) != 4:  # the second request with a keeper
            return found
        tokens = found.tokens.copy()
        tokens[-3] += 1
        return replace(found, text="something else", tokens=tokens)

    monkeypatch.setattr(measure._Pair, "_answer", changed)
    result = run_demo(tiny_model("attention"), quick=True)
    assert [row.identical for row in result.rows] == [n != 1 for n in range(N_REQUESTS)]
    row = result.rows[1]
    assert row.first_difference == calls[3].size - 3 - row.prompt_tokens
    assert row.margin is not None
    assert 0 < row.margin < 10
    said = summary(result)[-1]
    assert f"differs from its token {row.first_difference} on" in said
    assert "please report it" in said
    generated = replace(row, reused_generated_tokens=7)
    said = summary(replace(result, rows=(generated,)))[-1]
    assert "reused 7 tokens that were generated one by one" in said


def test_the_margin_is_that_of_the_token_that_was_chosen(
    tiny_llama: Callable[..., Any], tiny_model: Callable[[str], Path]
) -> None:
    from contextlib import ExitStack

    with ExitStack() as stack:
        pair = measure._Pair(tiny_model("attention"), 1, 4, stack)
        llm = tiny_llama("attention", logits_all=True, n_ctx=measure.N_CTX)
        tokens = np.arange(20, 60, dtype=np.int32)
        margin = pair._margin(tokens, 30)
        llm.eval(tokens.tolist())
        second, best = np.sort(llm.scores[39])[-2:]
        assert margin == pytest.approx(best - second, abs=1e-3)


def test_the_picture_shows_the_table_and_loads_nothing(tiny_model: Callable[[str], Path]) -> None:
    svg = demo.picture(run_demo(tiny_model("attention"), quick=True))
    assert svg.startswith("<svg")
    assert "request&#160;1,&#160;repeated" in svg
    assert "Tokens&#160;evaluated" in svg
    assert "url(" not in svg.replace("url(#", "")
