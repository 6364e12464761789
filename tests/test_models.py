"""The models that other tests stand on: they load, answer, and are what they claim to be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests import tiny_models

if TYPE_CHECKING:
    from llama_cpp import Llama

llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

TEXT = b"A model that is tiny still reads, and writes, one token at a time."


def last_logits(llm: Llama) -> np.ndarray:
    """A copy of the logits of the last evaluated row."""
    pointer = llama_cpp.llama_get_logits_ith(llm.ctx, -1)
    return np.array(np.ctypeslib.as_array(pointer, (llm.n_vocab(),)))


def test_tiny_model_generates(family: str, tiny_llama: Callable[..., Llama]) -> None:
    llm = tiny_llama(family)
    answer = llm.create_completion(TEXT.decode(), max_tokens=8, temperature=0.0)
    assert answer["usage"]["completion_tokens"] == 8
    assert np.isfinite(last_logits(llm)).all()


def test_tiny_model_has_the_memory_of_its_family(
    family: str, tiny_llama: Callable[..., Llama]
) -> None:
    model = tiny_llama(family).model
    assert llama_cpp.llama_model_n_swa(model) == (tiny_models.WINDOW if "swa" in family else 0)
    assert llama_cpp.llama_model_is_recurrent(model) == (family == "recurrent")
    assert llama_cpp.llama_model_is_hybrid(model) == family.startswith("hybrid")


def test_cut_vocabulary_reads_and_writes_any_text(tiny_llama: Callable[..., Llama]) -> None:
    llm = tiny_llama("attention")
    text = "Grüße, 世界! \N{LLAMA} antidisestablishmentarianism\n\tdef f(x): return x".encode()
    assert llm.detokenize(llm.tokenize(text)) == text
    [end] = llm.tokenize(b"<|im_end|>", special=True)
    assert end == llm.token_eos()


def test_tiny_models_are_the_same_wherever_they_are_written(
    model_dir: Path, smollm2_path: Path, tmp_path: Path
) -> None:
    for path in tiny_models.write_all(tmp_path, smollm2_path):
        assert path.read_bytes() == (model_dir / path.name).read_bytes()


def test_lora_changes_the_logits(tiny_llama: Callable[..., Llama], tiny_lora: Path) -> None:
    logits = []
    for options in ({}, {"lora_path": str(tiny_lora)}, {}):
        llm = tiny_llama("attention", **options)
        llm.eval(llm.tokenize(TEXT))
        logits.append(last_logits(llm))
    plain, adapted, plain_again = logits
    np.testing.assert_array_equal(plain, plain_again)
    assert np.abs(plain - adapted).max() > 0.5


@pytest.mark.parametrize("fixture", ["smollm2_path", "gemma3_path"])
def test_real_model_counts(
    fixture: str, request: pytest.FixtureRequest, make_llama: Callable[..., Llama]
) -> None:
    llm = make_llama(request.getfixturevalue(fixture), n_ctx=256)
    answer = llm.create_completion("1, 2, 3, 4,", max_tokens=4, temperature=0.0)
    assert "5" in answer["choices"][0]["text"]
