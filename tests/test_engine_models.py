"""The engine on real models: a tiny one of each family, and a server's settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import llamakeep
from llamakeep.engine import Engine
from llamakeep.runtime.llama_cpp import LlamaCppRuntime
from llamakeep.server.loading import load_engine
from llamakeep.server.settings import ServerSettings
from llamakeep.tokens import IntArray
from tests.engine_tools import ask, join

TURNS = 3


@contextmanager
def served(model: Path, **options: Any) -> Iterator[Engine]:
    """An engine as `llamakeep serve` makes it, which proves its counts at the end."""
    given: dict[str, Any] = {
        "ctx_size": 1024,
        "parallel": 3,
        "batch_size": 128,
        "ubatch_size": 128,
        "flash_attn": "off",
        "threads": 1,
        "cache_ram_bytes": 1 << 28,
    }
    engine = load_engine(ServerSettings(model=model, **(given | options)))
    try:
        yield engine
        engine.check()
    finally:
        engine.close()


class Cold:
    """Answers of a model that sees one prompt at a time, and nothing before it."""

    def __init__(self, model: Path) -> None:
        self.runtime = LlamaCppRuntime.load(model, n_ctx=1024, n_batch=128, n_threads=1)
        self._ends = np.array(
            [self.runtime.vocab.is_end(token) for token in range(self.runtime.n_vocab)]
        )

    def answer(self, prompt: IntArray, n: int) -> list[int]:
        self.runtime.clear(0)
        self.runtime.evaluate(0, prompt)
        tokens: list[int] = []
        while len(tokens) < n:
            logits = self.runtime.logits()
            logits[self._ends] = -np.inf
            tokens.append(int(np.argmax(logits)))
            self.runtime.evaluate(0, np.array(tokens[-1:], np.int32))
        return tokens


def tokens_of(n: int, seed: int, n_vocab: int) -> IntArray:
    """Return `n` random tokens of a vocabulary."""
    return np.random.default_rng(seed).integers(3, n_vocab, n, dtype=np.int32)


def test_many_talks_at_once_are_each_as_if_alone(
    tiny_model: Callable[[str], Path], family: str
) -> None:
    cold = Cold(tiny_model(family))
    n_vocab = cold.runtime.n_vocab
    system = tokens_of(90, 0, n_vocab)
    talks = [join(system, tokens_of(20 + 9 * seed, 1 + seed, n_vocab)) for seed in range(4)]
    evaluated = 0
    try:
        with served(tiny_model(family)) as engine:
            for turn in range(TURNS):
                heard = [ask(engine, talk, 8) for talk in talks]
                for number, one in enumerate(heard):
                    evaluated += one.wait().timings.prompt_n
                    assert one.tokens == cold.answer(talks[number], 8)
                    more = tokens_of(12, 100 * turn + number, n_vocab)
                    talks[number] = join(talks[number], one.tokens, more)
            assert engine.stats()["failures"] == {}
    finally:
        cold.runtime.close()
    unique = 90 + sum(talk.size - 90 for talk in talks)
    # The system prompt once more where a checkpoint at its end came too late for the second.
    assert evaluated <= unique + 90 + TURNS * len(talks) * 9


def test_fault_38_after_a_restart_the_same_requests_evaluate_nine_tokens_each(
    tiny_model: Callable[[str], Path], family: str, tmp_path: Path
) -> None:
    prompts: list[IntArray] = []
    answers: list[list[int]] = []
    for again in (False, True):
        with served(tiny_model(family), cache_dir=tmp_path, parallel=1) as engine:
            n_vocab = engine.vocab.n_vocab
            for seed in range(3):
                prompt = tokens_of(150 + seed, seed, n_vocab)
                heard = ask(engine, prompt, 6)
                finished = heard.wait()
                if again:
                    assert finished.timings.prompt_n <= 9
                    assert finished.reuse is not None
                    assert finished.reuse.tier == "disk"
                    assert heard.tokens == answers[seed]
                else:
                    assert finished.timings.cache_n == 0
                    answers.append(heard.tokens)
                prompts.append(prompt)


def test_fault_39_a_slot_goes_to_a_file_and_back(
    tiny_model: Callable[[str], Path], family: str, tmp_path: Path
) -> None:
    path = tmp_path / "slot"
    with served(tiny_model(family), parallel=1) as engine:
        prompt = tokens_of(150, 1, engine.vocab.n_vocab)
        first = ask(engine, prompt, 6)
        first.wait()
        saved = engine.slot_save(0, path)
        assert (saved.n_tokens, saved.n_bytes) == (155, path.stat().st_size)
        turn = join(prompt, first.tokens, tokens_of(9, 2, engine.vocab.n_vocab))
        expected = ask(engine, turn, 6)
        expected.wait()
    with served(tiny_model(family), parallel=1, ctx_size=512) as engine:
        assert engine.slot_restore(0, path).n_tokens == 155
        heard = ask(engine, turn, 6)
        assert heard.wait().timings.cache_n in (152, 155)
        assert heard.tokens == expected.tokens
        assert engine.slot_erase(0) == heard.wait().n_cached


@pytest.mark.parametrize("flash_attn", ["on", "auto"])
def test_flash_attention_serves_too(tiny_model: Callable[[str], Path], flash_attn: str) -> None:
    with served(tiny_model("attention"), flash_attn=flash_attn) as engine:
        prompt = tokens_of(150, 1, engine.vocab.n_vocab)
        first = ask(engine, prompt, 6)
        first.wait()
        again = ask(engine, prompt, 6)
        assert again.wait().timings.prompt_n <= 9
        assert again.tokens == first.tokens


@pytest.mark.parametrize("family", ["attention", "hybrid"])
def test_a_server_finds_on_disk_what_a_llama_with_a_keeper_kept(
    tiny_model: Callable[[str], Path],
    make_llama: Callable[..., Any],
    family: str,
    tmp_path: Path,
) -> None:
    path = tiny_model(family)
    llm = make_llama(path, n_ctx=1024, flash_attn=False, swa_full=False)
    prompt = tokens_of(150, 1, llm.n_vocab())
    with llamakeep.attach(llm, cache_dir=tmp_path) as keeper:
        next(llm.generate(prompt.tolist(), temp=0.0))
        assert keeper.flush(60)
    with served(path, cache_dir=tmp_path) as engine:
        reuse = ask(engine, prompt, 2).wait().reuse
        assert reuse is not None
        assert (reuse.tier, reuse.reused_tokens) == ("disk", 144)
