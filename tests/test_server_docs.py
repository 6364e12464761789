"""docs/server.md: its snippet runs, its endpoints and options are there."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llamakeep.server import absent, constraints, refused
from llamakeep.server.accepted import ACCEPTED, IDLE
from llamakeep.server.anthropic_schema import (
    CreateMessage,
    CustomTool,
    OutputConfig,
    TextBlock,
    ToolUse,
)
from llamakeep.server.schema import ChatCompletion, Completion, NativeCompletion
from llamakeep.server.settings import BY_NAME, OPTIONS
from tests.engine_tools import engine_of

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs" / "server.md"
TEXT = DOCS.read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_snippet_runs(
    tiny_model: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    (tmp_path / "model.gguf").symlink_to(tiny_model("attention"))
    monkeypatch.chdir(tmp_path)
    [snippet] = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(snippet, "server.md", "exec"), names)
    assert "0 tokens of the prompt were not evaluated" in capsys.readouterr().out


def test_every_endpoint_that_it_names_is_there() -> None:
    from llamakeep.server.app import create_app

    with engine_of() as engine:
        documented = create_app(engine, None, None).openapi()["paths"]
    paths = {re.sub(r"{\w+}", "{}", path) for path in (*documented, "/docs", "/metrics")}
    rows = [
        line.split("|")[1] for line in TEXT.splitlines() if re.match(r"\| `(GET|POST|DEL)", line)
    ]
    named = {path for row in rows for path in re.findall(r"(/[^`?]*)", row)}
    assert len(named) > 12
    assert {path for path in named if re.sub(r"{\w+}", "{}", path) not in paths} == set()


def row(name: str) -> str:
    """Return what the table of differences says of something."""
    [line] = [line for line in TEXT.splitlines() if line.startswith(f"| {name} |")]
    return line.split("|", 2)[2]


def fields(text: str) -> set[str]:
    return set(re.findall(r"`([a-z_]+)`", text))


def test_the_endpoints_that_are_not_there_are_not_there() -> None:
    from llamakeep.server.app import create_app

    with engine_of() as engine:
        paths = set(create_app(engine, None, None).openapi()["paths"])
    missing = set(re.findall(r"`(/[^`]*)`", row("not there (404)")))
    refused_paths = set(re.findall(r"`(/[^`]*)`", row("not there (501)")))
    assert refused_paths == {path for paths in absent.ABSENT.values() for path in paths}
    assert len(missing) >= 3
    assert (missing | refused_paths) & paths == set()


def test_every_field_that_is_refused_is_told() -> None:
    refused = set(constraints._NEUTRAL) | {"echo", "suffix", "best_of"}
    start, end = (TEXT.index(f"**fields that are {kind}") for kind in ("refused", "ignored"))
    assert refused <= fields(TEXT[start:end])


def test_the_fields_that_are_told_to_be_ignored_are() -> None:
    told = fields(row("**fields that are ignored**"))
    looked_at = {
        name
        for body in (ChatCompletion, Completion, NativeCompletion)
        for name in body.model_fields
    }
    assert {"n_keep", "store", "model", "user"} <= told
    assert (told - {"model", "user"}) & (looked_at | set(constraints._NEUTRAL)) == set()


def test_the_fields_of_anthropics_api_that_mean_nothing_here_are_told() -> None:
    ignored, refused = fields(row("taken and not looked at")), fields(row("refused unless empty"))
    unread: set[str] = set()
    for body in (CreateMessage, OutputConfig, CustomTool, TextBlock, ToolUse):
        for name, field in body.model_fields.items():
            text = field.description or ""
            if text.startswith("Not looked at"):
                unread.add(name)
            assert text.startswith("Not supported") == (name in refused)
    assert ignored == unread - {"task_budget"}  # told with where it stands


def test_limits_are_those_of_the_schema() -> None:
    limits = dict(re.findall(r"`(\w+)`[^,]*? (\d+)", row("limits")))
    bodies = {"n_probs": NativeCompletion, "top_logprobs": ChatCompletion, "logprobs": Completion}
    assert set(limits) == {*bodies, "n"}
    for name, most in limits.items():
        schema = bodies.get(name, Completion).model_json_schema()["properties"][name]
        assert schema["anyOf"][0]["maximum"] == int(most)


def test_every_flag_that_changes_nothing_is_told() -> None:
    told = set(re.findall(r"`(--[a-z-]+)`", row("flags that change nothing")))
    assert told == {f"--{each.key}" for each in ACCEPTED}


@pytest.mark.parametrize("text", [TEXT, README], ids=["docs", "README"])
def test_every_option_that_is_named_is_one(text: str) -> None:
    flags = {flag for each in OPTIONS for name in each.flags for flag in name.split("/")}
    flags |= {"--config", "--check", "--json", "--help"}
    flags |= {flag for each in ACCEPTED for flag in each.flags}
    if text is TEXT:
        told = set(re.findall(r"`(--[a-z-]+)`", row("flags that are refused")))
        assert len(told) > 5
        assert told <= set(refused.WHY)
        flags |= told
    commands = re.findall(r"llamakeep serve [^\n`]*(?:\\\n[^\n]*)*", text)
    named = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", " ".join(commands)))
    if text is TEXT:
        named |= set(re.findall(r"`(--[a-z-]+)", text))
    assert len(named) >= 4
    assert named - flags == set()


def test_every_flag_that_changes_nothing_beside_others_is_told() -> None:
    told = set(re.findall(r"`--([a-z-]+)`", row("flags beside others")))
    assert {BY_NAME[each.name].key for each in IDLE} <= told
