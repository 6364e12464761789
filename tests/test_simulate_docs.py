"""docs/simulate.md: its snippet runs, its options exist, and it quotes figures as published."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import typer

from llamakeep import simulate
from llamakeep.cli import app
from tests.published import PUBLISHED

DOCS = Path(__file__).parent.parent / "docs" / "simulate.md"
TEXT = DOCS.read_text(encoding="utf-8")


def test_the_snippet_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (snippet,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    exec(compile(snippet, str(DOCS), "exec"), {})
    shares, policies = capsys.readouterr().out.splitlines()
    found, best = map(int, re.fullmatch(r"(\d+)% of (\d+)%", shares).groups())  # type: ignore[union-attr]
    assert 0 < found < best < 100
    assert policies == "['oldest', 'marginal']"


def test_its_options_are_there() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    both = [*commands["simulate"].params, *commands["chats"].params]
    known = {flag for parameter in both for flag in parameter.opts}
    used = set(re.findall(r"--[a-z][a-z-]+", TEXT)) - {"--record"}
    assert used
    assert used <= known


def test_its_figures_of_others_are_those_that_were_published() -> None:
    rows = re.findall(r"^\|[^|]*\| (\d+) % \| (.*) \|$", TEXT, re.MULTILINE)
    theirs = [figures for shares in PUBLISHED.values() for figures in shares.values()]
    shares = [share for shares in PUBLISHED.values() for share in shares]
    assert [f"{share}%" for share, _ in rows] == shares
    for (_, cells), published in zip(rows, theirs, strict=True):
        pairs = [tuple(map(float, cell.split(", "))) for cell in cells.split(" | ")]
        assert tuple(pair[1] for pair in pairs) == published


def test_public_names_are_sorted() -> None:
    assert simulate.__all__ == sorted(simulate.__all__)
    assert all(hasattr(simulate, name) for name in simulate.__all__)
