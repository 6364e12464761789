"""The command line: what it says, how it fails, and that each command is explained."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from llamakeep import demo
from llamakeep.cli import app
from llamakeep.demo import screen
from llamakeep.errors import ModelError

README = Path(__file__).parent.parent / "README.md"

COMMANDS = sorted(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


@pytest.fixture
def runner() -> CliRunner:
    return CliRunner()


def _raise(error: BaseException) -> None:
    raise error


def test_help_says_what_to_do_next(runner: CliRunner) -> None:
    result = runner.invoke(app, ["--help"])
    assert result.exit_code == 0
    assert "no prefix is evaluated twice" in " ".join(result.stdout.split())
    assert "llamakeep demo\n" in result.stdout
    assert demo.SMOLLM2_INSTALL in result.stdout
    assert "llamakeep.attach(llm)" in result.stdout
    assert "llamakeep ls --cache-dir my-cache" in result.stdout


def test_help_groups_the_commands(runner: CliRunner) -> None:
    help_text = runner.invoke(app, ["--help"]).stdout
    first, _, rest = help_text.partition("Start here:\n")[2].partition("kept on disk:\n")
    assert re.findall(r"^  (\w+)  ", first, re.MULTILINE) == ["demo", "serve"]
    rest, _, last = rest.partition("When a prompt is read again:\n")
    last, _, study = last.partition("Study what to keep:\n")
    assert re.findall(r"^  (\w+)  +\w", last, re.MULTILINE) == ["explain"]
    assert re.findall(r"^  (\w+)  +\w", study, re.MULTILINE) == ["simulate", "chats"]
    found = re.findall(r"^  (\w+)  +\w", rest, re.MULTILINE)
    assert found == ["ls", "stats", "check", "trim", "rm", "export", "import"]
    assert "..." not in rest  # no sentence is cut


def test_no_command_shows_the_help(runner: CliRunner) -> None:
    result = runner.invoke(app, [])
    assert result.exit_code == 2
    assert "llamakeep demo\n" in result.output


def test_version(runner: CliRunner) -> None:
    result = runner.invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout.startswith("llamakeep ")
    assert "llama-cpp-python" in result.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_an_example_and_json(runner: CliRunner, command: str) -> None:
    result = runner.invoke(app, [command, "--help"])
    assert result.exit_code == 0
    examples = result.stdout.partition("Examples:\n")[2].partition("Options:")[0]
    assert re.search(rf"^ +(.* \| .*)?llamakeep {command}( |$)", examples, re.MULTILINE)
    assert re.search(rf"llamakeep {command} .*--json", examples)
    assert "  --json " in result.stdout


@pytest.mark.skipif(not README.exists(), reason="there is no README.md")
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_in_the_readme(command: str) -> None:
    readme = README.read_text(encoding="utf-8")
    assert re.search(rf"(^ *|`)llamakeep (\w.*\b)?{command}\b", readme, re.MULTILINE)


def test_help_does_not_load_llama_cpp() -> None:
    program = (
        "import sys\n"
        "from llamakeep.cli import app\n"
        "app(['demo', '--help'], standalone_mode=False)\n"
        "print('loaded', 'llama_cpp' in sys.modules)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout.endswith("loaded False\n")


def test_an_error_is_one_line_on_stderr(runner: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    error = ModelError("something\nis wrong")
    monkeypatch.setattr(screen, "run_demo", lambda *_args, **_options: _raise(error))
    result = runner.invoke(app, ["demo", "--model", "m.gguf", "--json"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == "llamakeep: something is wrong\n"


def test_a_closed_pipe_is_quiet(runner: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "run_demo", lambda *_args, **_options: _raise(BrokenPipeError()))
    result = runner.invoke(app, ["demo", "--model", "m.gguf", "--json"])
    assert (result.exit_code, result.output) == (141, "")


def test_the_module_is_the_command_line() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "llamakeep", "--version"], capture_output=True, text=True, check=True
    )
    assert run.stdout.startswith("llamakeep ")


def test_ctrl_c_is_quiet(runner: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "run_demo", lambda *_args, **_options: _raise(KeyboardInterrupt()))
    result = runner.invoke(app, ["demo", "--model", "m.gguf", "--json"])
    assert (result.exit_code, result.output) == (130, "")


def test_other_errors_are_not_hidden(runner: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "run_demo", lambda *_args, **_options: _raise(ZeroDivisionError()))
    result = runner.invoke(app, ["demo", "--model", "m.gguf", "--json"])
    assert isinstance(result.exception, ZeroDivisionError)


def test_without_the_model_package(runner: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    result = runner.invoke(app, ["demo"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.endswith(f"{demo.SMOLLM2_INSTALL}\n")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("content", [None, b"not a model", b"GGUF and then nothing"])
def test_a_model_that_cannot_be_loaded(
    runner: CliRunner, tmp_path: Path, content: bytes | None
) -> None:
    pytest.importorskip("llama_cpp")
    path = tmp_path / "m.gguf"
    if content is not None:
        path.write_bytes(content)
    result = runner.invoke(app, ["demo", "--model", str(path), "--json"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert str(path) in result.stderr
    assert result.stderr.count("\n") == 1


def test_json_stands_alone_on_stdout(runner: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    row = demo.DemoRow(
        "title", 10, 8, 2, "ram", "new from token 8 on", 0, 5, 40.0, 10.0, 60.0, 30.0, "text", True
    )
    result_of_run = demo.DemoResult("m.gguf", 2, 8, (row, row), 100, 1000)
    monkeypatch.setattr(screen, "run_demo", lambda *_args, **_options: result_of_run)
    result = runner.invoke(app, ["demo", "--model", "m.gguf", "--json"])
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["saved_share"] == 0.8
    assert (found["reused_tokens"], found["evaluated_tokens"]) == (16, 4)
    assert (found["used_bytes"], found["capacity_bytes"]) == (100, 1000)
    assert [entry["tier"] for entry in found["requests"]] == ["ram", "ram"]
    assert found["requests"][0]["reason"] == "new from token 8 on"
    assert found["requests"][0]["speedup"] == 4.0
