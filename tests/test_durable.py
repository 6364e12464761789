"""A `Llama` with a keeper and tiers below it, on models of every family, in several processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import llamakeep
from llamakeep.errors import InvalidValue, StoreError
from llamakeep.explain import Kind

CHILD = """
import json, sys
from llama_cpp import Llama
import llamakeep

options = json.loads(sys.argv[1])
llm = Llama(options["model"], n_ctx=2048, n_threads=1, n_threads_batch=1, seed=0, verbose=False,
            **options.get("llama", {}))
keeper = llamakeep.attach(llm, **options["attach"]) if options.get("attach") is not None else None
answers = []
for prompt in options["prompts"]:
    text = llm(prompt, max_tokens=12, temperature=0)["choices"][0]["text"]
    last = keeper.last if keeper else None
    answers.append([text, last.reused_tokens if last else 0, last.tier if last else "",
                    last.reason if last else ""])
if options.get("flush") and keeper:
    answers.append(keeper.flush(30))
print(json.dumps(answers))
"""

TEXT = "A ship left the harbour in the morning and nobody on the shore knew its name. " * 12


def run(**options: Any) -> list[Any]:
    """Answer prompts in a process of their own."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(options, default=str)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return answers


@pytest.mark.model
def test_fault_38_a_second_process_answers_from_disk(
    family: str, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    model, attach = tiny_model(family), {"cache_dir": tmp_path / "cache"}
    prompts = [TEXT + "One.", TEXT + "Two."]
    cold = run(model=model, prompts=prompts)
    first = run(model=model, prompts=prompts, attach=attach)  # ends without detaching
    second = run(model=model, prompts=prompts, attach=attach)
    assert [a[0] for a in cold] == [a[0] for a in first] == [a[0] for a in second]
    assert first[0][1] == 0
    for _, reused, tier, _ in second[:1]:
        assert tier == "disk"
        assert reused > 150
    assert second[1][1] > 150


@pytest.mark.model
def test_fault_42_and_43_other_settings_share_what_they_can_and_nothing_else(
    tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    model, attach = tiny_model("attention"), {"cache_dir": tmp_path / "cache"}
    run(model=model, prompts=[TEXT], attach=attach)
    [[_, reused, tier, _]] = run(model=model, prompts=[TEXT], attach=attach, llama={"n_batch": 64})
    assert (reused > 150, tier) == (True, "disk")
    [[_, reused, tier, reason]] = run(
        model=model, prompts=[TEXT], attach=attach, llama={"type_k": 8, "flash_attn": True}
    )
    assert (reused, tier) == (0, "none")
    assert "kept with" in reason
    assert "type_k" in reason
    salted = attach | {"salt": "tenant"}
    [[_, reused, _, reason]] = run(model=model, prompts=[TEXT], attach=salted)
    assert (reused, reason) == (0, "first time seen")  # of another tenant nothing is said


@pytest.mark.model
def test_a_keeper_says_which_tier_and_what_is_below(
    tiny_llama: Callable[..., Any], tmp_path: Path
) -> None:
    llm = tiny_llama("attention")
    with llamakeep.attach(llm, cache_dir=tmp_path / "cache") as keeper:
        llm(TEXT, max_tokens=2)
        assert keeper.flush(30)
        below = keeper.stats()["below"]
        assert below["tiers"]["disk"]["used_bytes"] > 0
        assert below["written_disk"] >= 1
        json.dumps(keeper.stats())
        assert {entry["tier"] for entry in keeper.entries()} == {"ram"}
        keeper.check()
    with llamakeep.attach(llm, cache_dir=tmp_path / "cache") as keeper:
        llm.reset()
        llm(TEXT, max_tokens=2)
        assert keeper.last is not None
        assert keeper.last.tier == "disk"
        assert keeper.last.reused_tokens > 150
        keeper.clear()
        assert keeper.stats()["below"]["tiers"]["disk"]["used_bytes"] == 0
        llm(TEXT, max_tokens=2)
        assert keeper.last.reused_tokens == 0


@pytest.mark.model
def test_a_keeper_explains_that_a_prompt_is_kept_under_other_settings(
    tiny_llama: Callable[..., Any], tmp_path: Path
) -> None:
    for options in ({}, {"type_k": 8, "flash_attn": True}):
        llm = tiny_llama("attention", **options)
        with llamakeep.attach(llm, cache_dir=tmp_path / "cache") as keeper:
            llm(TEXT, max_tokens=2)
            found = keeper.explain()
            assert found is not None
            if not options:
                assert found.kind is Kind.FIRST_SEEN
                assert keeper.flush(30)
    assert found.kind is Kind.NAMESPACE
    assert found.part.startswith("context.")
    assert "type_k" in found.reason


@pytest.mark.model
def test_settings_come_from_the_environment_and_arguments_win(
    tiny_llama: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = tiny_llama("attention")
    monkeypatch.setenv("LLAMAKEEP_CACHE_DIR", str(tmp_path / "env"))
    monkeypatch.setenv("LLAMAKEEP_DISK_BYTES", "64MiB")
    with llamakeep.attach(llm) as keeper:
        assert keeper.stats()["below"]["tiers"]["disk"]["capacity_bytes"] == 64 << 20
    with llamakeep.attach(llm, cache_dir=tmp_path / "given", disk_bytes=1 << 20) as keeper:
        assert keeper.stats()["below"]["tiers"]["disk"]["capacity_bytes"] == 1 << 20
    assert (tmp_path / "given").is_dir()
    with llamakeep.attach(llm, cache_dir="") as keeper:
        assert keeper.stats()["below"] == {}
    monkeypatch.setenv("LLAMAKEEP_DISK_BYTES", "much")
    with pytest.raises(InvalidValue, match=r"LLAMAKEEP_DISK_BYTES.*'much'"):
        llamakeep.attach(llm)
    assert llm("still works", max_tokens=1)


@pytest.mark.model
def test_a_directory_that_cannot_be_used_is_an_error_and_the_model_stays_as_it_was(
    tiny_llama: Callable[..., Any], tmp_path: Path
) -> None:
    llm = tiny_llama("attention")
    llm.eval([1, 2, 3])
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(StoreError, match="file"):
        llamakeep.attach(llm, cache_dir=tmp_path / "file")
    for wrong in (5, True, b"bytes", "a\0b"):
        with pytest.raises(InvalidValue, match="cache_dir must be a path"):
            llamakeep.attach(llm, cache_dir=wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidValue, match="disk_bytes"):
        llamakeep.attach(llm, cache_dir=tmp_path / "cache", disk_bytes=-1)
    assert llm.n_tokens == 3


@pytest.mark.model
def test_fault_62_modes_of_a_call(tiny_llama: Callable[..., Any], tmp_path: Path) -> None:
    llm = tiny_llama("attention")
    with llamakeep.attach(llm, cache_dir=tmp_path / "cache") as keeper:
        with llamakeep.mode("read"):
            llm(TEXT, max_tokens=2)
        assert keeper.stats()["blobs"] == 0
        with llamakeep.mode("write"):
            llm(TEXT, max_tokens=2)
        assert keeper.last is not None
        assert keeper.last.reused_tokens == 0
        assert keeper.stats()["blobs"] > 0
        with llamakeep.mode("off"):
            stream = llm(TEXT + "More.", max_tokens=4, stream=True)
        list(stream)  # keeps the mode that it was opened in
        assert keeper.last.reason == "mode is off"
        llm(TEXT + "More.", max_tokens=2)
        assert keeper.last.reused_tokens > 150


@pytest.mark.model
def test_adapters_have_states_of_their_own_on_disk_too(
    tiny_model: Callable[[str], Path], tiny_lora: Path, tmp_path: Path
) -> None:
    model, attach = tiny_model("attention"), {"cache_dir": tmp_path / "cache"}
    plain = run(model=model, prompts=[TEXT], attach=attach)
    lora = {"lora_path": str(tiny_lora), "lora_scale": 1.0}
    for scale, expected in ((1.0, 0), (0.5, 0), (1.0, 1)):
        [[_, reused, _, _]] = run(
            model=model, prompts=[TEXT], attach=attach, llama=lora | {"lora_scale": scale}
        )
        assert bool(reused) == bool(expected)
    again = run(model=model, prompts=[TEXT], attach=attach)
    assert again[0][0] == plain[0][0]
    assert again[0][1] > 150
