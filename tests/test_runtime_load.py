"""What a model can be loaded with, and what of it is part of its states' namespace."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamakeep.errors import InvalidValue, KeeperClosed, ModelError

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

from llamakeep.runtime.llama_cpp import KV_TYPES, LlamaCppRuntime
from llamakeep.runtime.llama_load import _NativeLog
from llamakeep.runtime.llama_text import load_vocab

Paths = Callable[[str], Path]
TOKENS = np.arange(40, dtype=np.int32) * 7 + 3


def logits(path: Path, **options: Any) -> np.ndarray:
    runtime = LlamaCppRuntime.load(path, n_ctx=256, n_threads=1, **options)
    runtime.evaluate(0, TOKENS)
    found = runtime.logits()
    runtime.close()
    return found


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"use_mmap": False},
        {"n_threads_batch": 2},
        {"flash_attn": "off"},
        {"flash_attn": False},
        {"type_k": "f16", "type_v": "f16"},
        {"type_k": "F16", "type_v": 1},
    ],
    ids=str,
)
def test_options_without_effect_on_what_is_computed(
    tiny_model: Paths, options: dict[str, Any]
) -> None:
    path = tiny_model("attention")
    np.testing.assert_allclose(logits(path, **options), logits(path), rtol=0, atol=1e-5)


def test_a_locked_model_answers(tiny_model: Paths) -> None:
    for use_mmap in (True, False):
        assert np.isfinite(logits(tiny_model("attention"), use_mlock=True, use_mmap=use_mmap)).all()


def test_flash_attention_by_name_and_by_flag(tiny_model: Paths) -> None:
    path = tiny_model("attention")
    on = logits(path, flash_attn="on")
    np.testing.assert_array_equal(on, logits(path, flash_attn=True))
    assert np.abs(on - logits(path)).max() > 0
    np.testing.assert_array_equal(logits(path, flash_attn="auto"), on)  # a CPU can


def test_each_type_of_keys_and_values_can_be_had(tiny_model: Paths) -> None:
    """Its rows have its size, by what is known of the types (bits per value)."""
    bits = {"f32": 32, "f16": 16, "bf16": 16, "q8_0": 8.5, "q5_1": 6, "q5_0": 5.5, "q4_1": 5}
    bits |= {"q4_0": 4.5, "iq4_nl": 4.5}
    assert bits.keys() == KV_TYPES.keys()
    per_bit = set()
    for name in KV_TYPES:
        runtime = LlamaCppRuntime.load(
            tiny_model("attention"), n_ctx=256, flash_attn=True, type_k=name, type_v=name
        )
        runtime.evaluate(0, TOKENS)
        assert np.isfinite(runtime.logits()).all()
        one_more = runtime.segment_bytes(9) - runtime.segment_bytes(8)
        runtime.close()
        n_cell = 12  # bytes of a token's position and sequences, in each state
        per_bit.add((one_more - n_cell) / bits[name])
    assert len(per_bit) == 1


def test_what_a_model_is(tiny_model: Paths) -> None:
    path = tiny_model("attention")
    runtime = LlamaCppRuntime.load(path, n_ctx=256, n_threads=1)
    facts, metadata = runtime.model_facts(), runtime.vocab.metadata
    assert set(facts) == {"vocab_type", "n_ctx_train", "n_embd", "n_params", "size", "ftype"}
    assert "all F32" in facts["ftype"]
    assert facts["size"] == 4 * facts["n_params"] <= path.stat().st_size
    assert facts["n_embd"] == int(metadata[f"{metadata['general.architecture']}.embedding_length"])
    runtime.close()
    with pytest.raises(KeeperClosed):
        runtime.model_facts()


def test_a_window_that_is_not_kept_whole(tiny_model: Paths) -> None:
    path = tiny_model("swa")
    np.testing.assert_allclose(logits(path, swa_full=False), logits(path), rtol=0, atol=5e-3)


# -- progress --------------------------------------------------------------------------------------


def test_progress_goes_from_nothing_to_all(tiny_model: Paths) -> None:
    seen: list[float] = []
    LlamaCppRuntime.load(tiny_model("attention"), n_ctx=256, on_progress=seen.append).close()
    assert seen == sorted(seen)
    assert seen[0] < 1
    assert seen[-1] == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_what_progress_raises_ends_the_loading(
    tiny_model: Paths, error: type[BaseException]
) -> None:
    seen: list[float] = []

    def stop(progress: float) -> None:
        seen.append(progress)
        raise error("enough")

    with pytest.raises(error, match="enough"):
        LlamaCppRuntime.load(tiny_model("attention"), n_ctx=256, on_progress=stop)
    assert len(seen) == 1


# -- what cannot be --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"type_k": "q9_9"}, "type_k must be one of f32, f16, .*, not 'q9_9'"),
        ({"type_v": 99}, "type_v must be one of .*, not 99"),
        ({"flash_attn": "maybe"}, "flash_attn must be auto, on or off, not 'maybe'"),
        ({"n_ctx": 2**40}, "n_ctx must be 2147483647 at most"),
        ({"n_ubatch": 0}, "n_ubatch must be 1 or more, not 0"),
        ({"n_threads": 0}, "n_threads must be 1 or more"),
        ({"n_threads_batch": -1}, "n_threads_batch must be 1 or more"),
        ({"n_gpu_layers": -2}, "n_gpu_layers must be -1 or more"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_meant(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidValue, match=said):
        LlamaCppRuntime.load("no such model", **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"type_v": "q8_0"}, "type_v=q8_0, flash_attn=off"),
        ({"n_seqs": 300}, "n_seqs=300"),
    ],
    ids=str,
)
def test_a_context_that_cannot_be_made_says_its_settings(
    tiny_model: Paths, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ModelError, match=f"could not make a context .*{said}"):
        LlamaCppRuntime.load(tiny_model("attention"), n_ctx=256, **options)


@pytest.mark.parametrize("content", [None, b"PK\x03\x04", b"GGUF\x03\0\0\0 and then nothing"])
def test_no_model_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "m.gguf"
    if content is not None:
        path.write_bytes(content)
    for load in (LlamaCppRuntime.load, load_vocab):
        with pytest.raises(ModelError, match=r"m\.gguf"):
            load(path)


# -- namespaces ------------------------------------------------------------------------------------

SAME: list[dict[str, Any]] = [
    {},
    {"flash_attn": True},
    {"flash_attn": True, "type_k": 8, "type_v": 8},
    {"swa_full": False},
    {"n_ctx": 1024},
    {"use_mmap": False},
]


@pytest.mark.parametrize("options", SAME, ids=str)
def test_equal_settings_make_equal_namespaces(
    family: str, tiny_model: Paths, tiny_llama: Callable[..., Any], options: dict[str, Any]
) -> None:
    """States of a server and those of a `Llama` with a keeper are the same."""
    options = {"n_ctx": 512} | options
    loaded = LlamaCppRuntime.load(tiny_model(family), n_threads=1, **options)
    llm = tiny_llama(family, **options)
    adopted = LlamaCppRuntime.adopt(llm)
    for rope_factors in (True, False):
        found = loaded.namespace_settings(rope_factors=rope_factors)
        assert found == adopted.namespace_settings(rope_factors=rope_factors)
        assert found == LlamaCppRuntime.context_settings(llm, rope_factors=rope_factors)
    assert loaded.traits == adopted.traits
    loaded.close()


@pytest.mark.parametrize(
    "options",
    [{"flash_attn": "auto"}, {"type_k": "f32"}, {"flash_attn": True, "type_v": "q8_0"}],
    ids=str,
)
def test_other_settings_make_other_namespaces(tiny_model: Paths, options: dict[str, Any]) -> None:
    path = tiny_model("attention")
    plain, other = (LlamaCppRuntime.load(path, n_ctx=256, **each) for each in ({}, options))
    assert plain.namespace_settings() != other.namespace_settings()
    plain.close()
    other.close()
    with pytest.raises(KeeperClosed):
        plain.namespace_settings()


def test_lines_of_two_threads_stay_whole(caplog: pytest.LogCaptureFixture) -> None:
    log = _NativeLog(logging.getLogger("llama.cpp.test"))

    def hear(text: bytes) -> None:
        log._hear(3, text, None)

    hear(b"mine ")
    other = threading.Thread(target=hear, args=(b"another's\n",))
    other.start()
    other.join()
    hear(b"goes on\n")
    assert caplog.messages == ["another's", "mine goes on"]
