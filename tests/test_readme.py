"""The README's snippets, run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
SNIPPETS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.mark.model
def test_snippets_run_one_after_the_other(
    smollm2_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    import llama_cpp

    monkeypatch.setenv("HOME", str(tmp_path))

    class Model(llama_cpp.Llama):
        def __init__(self, model_path: str, **options: Any) -> None:
            assert model_path == "model.gguf"
            super().__init__(str(smollm2_path), n_threads_batch=1, **options)

    monkeypatch.setattr(llama_cpp, "Llama", Model)
    assert len(SNIPPETS) >= 3
    names: dict[str, Any] = {}
    for snippet in SNIPPETS:
        exec(compile(snippet, "README.md", "exec"), names)
    first, second, last, share, used, tier, counters = capsys.readouterr().out.strip().splitlines()
    assert first == "{'cached_tokens': 0}"
    assert int(re.findall(r"\d+", second)[0]) > 500
    assert last.startswith("Reuse(reused_tokens=")
    assert re.fullmatch(r"\d+% of all prompt tokens were not evaluated", share)
    assert re.fullmatch(r"[\d,]+ of [\d,]+ bytes are in use", used)
    assert tier == "disk"
    assert counters == "{'misses': 1, 'stored': 2, 'hits': 1}"
    assert (tmp_path / ".cache" / "llamakeep").is_dir()
    names["llm"].close()


def test_links_lead_somewhere() -> None:
    text = (ROOT / "README.md").read_text()
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("https://"):
            continue
        page, _, anchor = target.partition("#")
        assert (ROOT / page).exists(), target
        if anchor:
            headings = re.findall(r"^#+ (.*)$", (ROOT / page).read_text(), re.MULTILINE)
            assert anchor in [heading.lower().replace(" ", "-") for heading in headings], target
