"""The demo on real and tiny models: what it claims holds, and it says so when something differs."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from llamakeep import demo
from llamakeep.cli import app
from llamakeep.demo import (
    DemoResult,
    DemoRow,
    Step,
    measure,
    restart,
    run_demo,
    screen,
    summary,
    write_log,
)
from llamakeep.demo.answer import Settings
from llamakeep.errors import LlamakeepError

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp's threads wait for each other by spinning, which test workers cannot afford."""
    monkeypatch.setattr("llamakeep.runtime.llama_cpp.usable_cores", lambda: 1)


N_REQUESTS = 9
REPEATED, CONTINUED, RESTARTED = 6, 7, 8
"""Indices of the request that is repeated, the one that goes on after its answer, and the one that
a second process answers."""


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
    assert [row.restarted for row in result.rows] == [n == RESTARTED for n in range(N_REQUESTS)]
    restarted = result.rows[RESTARTED]
    assert restarted.plain_evaluated_tokens == restarted.prompt_tokens
    assert restarted.tier == "disk"
    assert result.disk_used_bytes > 0
    assert min(result.load_ms, result.write_ms) > 0


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
    # A window is restored at checkpoints only, of which the nearest one is before the log.
    assert result.rows[RESTARTED].reused_tokens > 0.4 * result.rows[RESTARTED].prompt_tokens


def test_smollm2(smollm2_path: Path) -> None:
    steps: list[Step] = []
    result = run_demo(smollm2_path, quick=True, on_step=steps.append)
    _check_totals(result)

    for row in result.rows[:CONTINUED]:
        assert row.reused_generated_tokens == 0
        assert row.identical, row
    assert result.rows[CONTINUED].reused_generated_tokens > 0
    assert result.rows[RESTARTED].reused_generated_tokens == 0
    assert result.rows[RESTARTED].identical
    assert [row.tier for row in result.rows] == [
        *("none", "live", "live", "live", "ram", "live", "ram", "live", "disk")
    ]
    for row in result.rows[1:]:
        assert row.reused_tokens >= 0.9 * row.prompt_tokens
    # A `Llama` alone reuses what it saw last, and nothing from before that.
    assert result.rows[1].plain_evaluated_tokens <= result.rows[1].evaluated_tokens
    assert result.rows[REPEATED].plain_evaluated_tokens > 200

    assert {step.phase for step in steps} == {*screen._PHASES}
    assert [len(step.rows) for step in steps if step.phase == "done"] == [*range(1, 10)]
    assert [s.phase for s in steps if s.index == 9 and not s.total_tokens] == [
        *("cold", "answer", "restart", "done")
    ]
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
    assert {"disk_used_bytes", "write_ms", "load_ms"} <= found.keys()
    assert found["requests"][RESTARTED]["tier"] == "disk"


def test_plain_lines_where_there_is_no_terminal(tiny_model: Callable[[str], Path]) -> None:
    model = str(tiny_model("attention"))
    result = CliRunner().invoke(app, ["demo", "--quick", "--model", model])
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout
    lines = result.stdout.splitlines()
    assert [line.partition(".")[0] for line in lines if "; first token after" in line] == [
        str(n) for n in range(1, 10)
    ]
    assert any(line.startswith("Tokens evaluated: ") for line in lines)
    assert any("a second process read " in line and " from disk" in line for line in lines)
    assert '    keeper = llamakeep.attach(llm, cache_dir="~/.cache/llamakeep")' in lines


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
    assert "1/9 a log and a question: without llamakeep" in shown
    end = shown[shown.rindex("Tokens of each prompt") :]
    assert "9/9 after a restart: loading and answering in a second process" in shown
    assert "9 after a restart" in end
    assert "9/9" not in end
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
    tiny_llama: Callable[..., Any], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    settings = Settings(str(tiny_model("attention")), 1, 4, str(tmp_path / "cache"), 1 << 30)
    with ExitStack() as stack:
        pair = measure._Pair(settings, stack)
        llm = tiny_llama("attention", logits_all=True, n_ctx=settings.n_ctx)
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


# -- the restart -----------------------------------------------------------------------------


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's temporary directory, for one test."""
    path = tmp_path / "scratch"
    path.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(path))
    return path


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first request and the one after the restart."""
    first, *_, last = measure.story()
    monkeypatch.setattr(measure, "story", lambda: (first, last))


@pytest.mark.usefixtures("short")
def test_states_are_in_a_directory_of_the_demo_alone_which_is_gone_afterwards(
    tiny_model: Callable[[str], Path],
    scratch: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (
        ("CACHE_DIR", str(tmp_path / "mine")),
        ("DISK_BYTES", "1"),
        ("REDIS_URL", "redis://127.0.0.1:1"),
        ("REDIS_PREFIX", "no:prefix"),
        ("SECRET", "mine"),
        ("SALT", "mine"),
    ):
        monkeypatch.setenv(f"LLAMAKEEP_{name}", value)
    here = tmp_path / "here"
    here.mkdir()
    (here / "json.py").write_text("raise ZeroDivisionError")  # a user's, not to be imported
    monkeypatch.chdir(here)
    seen: list[list[Path]] = []

    def look(step: Step) -> None:
        if step.phase == "restart":
            seen.append([*scratch.glob("llamakeep-demo-*/cache/blobs/*/*.state")])

    result = run_demo(tiny_model("attention"), quick=True, on_step=look)
    assert len(seen) == 1
    assert seen[0]
    assert result.rows[-1].tier == "disk"
    assert [*scratch.iterdir()] == []
    assert not (tmp_path / "mine").exists()


@pytest.mark.usefixtures("short")
def test_a_second_process_that_fails_is_one_error_in_its_words(
    tiny_model: Callable[[str], Path], scratch: Path, tmp_path: Path
) -> None:
    model = tmp_path / "model.gguf"
    shutil.copy(tiny_model("attention"), model)

    def spoil(step: Step) -> None:
        if step.phase == "restart":
            model.rename(tmp_path / "elsewhere.gguf")

    with pytest.raises(LlamakeepError) as caught:
        run_demo(model, quick=True, on_step=spoil)
    said = str(caught.value)
    assert said.startswith("the second process could not answer: ")
    assert str(model) in said
    assert "\n" not in said
    assert [*scratch.iterdir()] == []


@pytest.mark.usefixtures("short")
def test_an_interrupt_ends_the_second_process_and_leaves_nothing(
    tiny_model: Callable[[str], Path], scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[subprocess.Popen[str]] = []

    def interrupted(self: subprocess.Popen[str], *_args: Any, **_options: Any) -> Any:
        ended.append(self)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_demo(tiny_model("attention"), quick=True)
    assert len(ended) == 1
    assert ended[0].poll() not in (None, 0)
    assert [*scratch.iterdir()] == []


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import sys; sys.exit('one\\ntwo')", "could not answer: two$"),
        ("{}['key']", "could not answer: KeyError: 'key'$"),
        ("import os; os._exit(7)", "could not answer: it ended with exit code 7$"),
        ("print('no answer')", "gave no answer, but 'no answer"),
        ("print('[]')", "gave no answer, but"),
    ],
)
def test_whatever_a_second_process_does_is_one_error(
    code: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = subprocess.run

    def other(args: list[str], **options: Any) -> Any:
        return run([args[0], "-c", code], **options)

    monkeypatch.setattr(subprocess, "run", other)
    settings = Settings("m.gguf", 1, 4, str(tmp_path / "cache"), 1 << 20)
    with pytest.raises(LlamakeepError, match=expected):
        restart.ask_second_process(settings, [])


def test_a_second_process_that_cannot_be_started_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    settings = Settings("m.gguf", 1, 4, str(tmp_path / "cache"), 1 << 20)
    with pytest.raises(LlamakeepError, match="could not be started"):
        restart.ask_second_process(settings, [])


def test_a_restart_that_found_nothing_is_said() -> None:
    row = DemoRow("t", 10, 0, 10, "none", "first time seen", 0, 10, 4.0, 4.0, 6.0, 6.0, "a", True)
    result = DemoResult("m.gguf", 2, 8, (replace(row, restarted=True),), 100, 1000)
    assert (
        "After a restart, a second process evaluated 10 of 10 tokens, and had none from disk: "
        "first time seen."
    ) in summary(result)
