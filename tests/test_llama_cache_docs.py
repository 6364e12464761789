"""The snippets of docs/llama_cache.md and the scripts in examples/, run as they stand there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llamakeep import llama_cache

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs" / "llama_cache.md"
EXAMPLES = ROOT / "examples"
TEXT = DOCS.read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


# Hybrid memory cannot be cut: there, what fits only in part is found and then evaluated anew.
@pytest.mark.parametrize("family", ["attention", "hybrid"])
def test_snippets_run_one_after_the_other(
    family: str,
    tiny_model: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    import llama_cpp

    class Model(llama_cpp.Llama):
        def __init__(self, model_path: str, **options: Any) -> None:
            super().__init__(model_path, n_threads_batch=1, **options)

    monkeypatch.setattr(llama_cpp, "Llama", Model)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"model_path": str(tiny_model(family))}
    for number, snippet in enumerate(SNIPPETS, 1):
        exec(compile(snippet, f"{DOCS.name}, snippet {number}", "exec"), names)
    shown, counted, found = capsys.readouterr().out.strip().splitlines()
    assert shown.startswith("LlamaRAMCache(")
    assert "'hits': " in counted
    assert names["state"].n_tokens > 100
    assert re.fullmatch(rf"a state of \d+ tokens, 1 in {re.escape(str(tmp_path))}/states", found)
    assert names["checkpoint"].pos == len(names["beginning"]) - 1
    names["checkpoints"].close()
    names["llm"].close()


def test_every_block_of_python_is_run() -> None:
    assert len(SNIPPETS) == TEXT.count("```python") == TEXT.count("```") // 2


def test_links_lead_somewhere() -> None:
    for page in (DOCS, EXAMPLES / "README.md"):
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            assert target.startswith("https://") or (page.parent / target).exists(), target


def test_rows_have_as_many_cells_as_their_heads() -> None:
    for table in re.findall(r"(?:^\|.*\n)+", TEXT, re.MULTILINE):
        assert len({row.count("|") for row in table.splitlines()}) == 1, table


def test_public_names_are_explained() -> None:
    missing = [name for name in llama_cache.__all__ if f"`{name}" not in TEXT]
    assert set(missing) <= {"BaseLlamaCache", "HybridCheckpoint", "track", "ContextTracking"}


def test_every_example_is_listed() -> None:
    listed = set(re.findall(r"`(\w+\.py)`", (EXAMPLES / "README.md").read_text()))
    assert listed == {path.name for path in EXAMPLES.glob("*.py")}


def run(script: str, model: Path, *options: str, cwd: Path) -> str:
    """Return what an example prints; it must end well."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), str(model), "--max-tokens", "4", *options],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_ram_cache(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    shown = run("ram_cache.py", tiny_model("attention"), cwd=tmp_path)
    assert "without a cache: " in shown
    (hits,) = re.findall(r"^lookups: (\d+) hits", shown, re.MULTILINE)
    assert int(hits) >= 2  # the second question and the third


def test_trie_cache(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    shown = run("trie_cache.py", tiny_model("hybrid"), cwd=tmp_path)
    (hits, n_tokens) = re.findall(
        r"^lookups: (\d+) hits; the shared state has (\d+) tokens$", shown, re.MULTILINE
    )[0]
    assert int(hits) >= 3
    assert int(n_tokens) > 100


def test_disk_cache_finds_states_of_another_process(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    options = ("--cache-dir", str(tmp_path / "states"))
    first = run("disk_cache.py", tiny_model("attention"), *options, cwd=tmp_path)
    second = run("disk_cache.py", tiny_model("attention"), *options, cwd=tmp_path)
    directory = tmp_path / "states"
    assert first.startswith(f"found: 0 states in {directory}\n")
    assert "no state: When was it built?\n" in first
    assert second.startswith(f"found: 3 states in {directory}\n")
    assert "from disk: When was it built?\n" in second
    other = run("disk_cache.py", tiny_model("swa"), *options, cwd=tmp_path)
    assert other.startswith(f"found: 0 states in {directory}\n")


@pytest.mark.parametrize(
    ("family", "options"),
    [("attention", []), ("hybrid", []), ("recurrent", ["--on-device"]), ("hybrid-swa", [])],
)
def test_hybrid_checkpoints(
    family: str, options: list[str], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    shown = run("hybrid_checkpoints.py", tiny_model(family), *options, cwd=tmp_path)
    assert "\nrestored: to token " in shown
    assert shown.endswith("the same 4 tokens again: True\n")


def test_the_langchain_example_is_python() -> None:
    source = (EXAMPLES / "langchain_cache.py").read_text()
    compile(source, "langchain_cache.py", "exec")
    assert "llm.client.set_cache(cache)" in source
