"""docs/server.md: its snippet runs, its endpoints and options are there."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llamakeep.server.settings import OPTIONS
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
        paths = set(create_app(engine, None, None).openapi()["paths"]) | {"/docs", "/metrics"}
    rows = [
        line.split("|")[1] for line in TEXT.splitlines() if re.match(r"\| `(GET|POST|DEL)", line)
    ]
    named = {path for row in rows for path in re.findall(r"(/[^`?]*)", row)}
    assert len(named) > 12
    assert {path for path in named if path.replace("{id}", "{id_slot}") not in paths} == set()


@pytest.mark.parametrize("text", [TEXT, README], ids=["docs", "README"])
def test_every_option_that_is_named_is_one(text: str) -> None:
    flags = {flag for each in OPTIONS for name in each.flags for flag in name.split("/")}
    flags |= {"--config", "--check", "--json", "--help"}
    commands = re.findall(r"llamakeep serve [^\n`]*(?:\\\n[^\n]*)*", text)
    named = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", " ".join(commands)))
    if text is TEXT:
        named |= set(re.findall(r"`(--[a-z-]+)", text))
    assert len(named) >= 4
    assert named - flags == set()
