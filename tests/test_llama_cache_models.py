"""The caches in the hands of `llama_cpp.Llama`: tiny models of every family, and a real one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llamakeep.errors import InvalidValue, ModelError
from llamakeep.llama_cache import LlamaDiskCache, LlamaRAMCache, LlamaTrieCache
from llamakeep.llama_cache.indexed import IndexedCache
from llamakeep.llama_cache.packed import Packed
from llamakeep.llama_cache.snapshots import Plan
from llamakeep.runtime.layout import read_context

if TYPE_CHECKING:
    from llama_cpp import Llama

LoadLlama = Callable[..., "Llama"]


# Whoever is looked for: how a state lies in the backing is the business of other tests.
@pytest.fixture(params=["ram", "trie", "disk"])
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[IndexedCache]:
    if request.param == "ram":
        yield LlamaRAMCache()
    elif request.param == "trie":
        yield LlamaTrieCache()
    else:
        with LlamaDiskCache(tmp_path / "cache") as disk:
            yield disk


def prompt_of(n: int, seed: int) -> list[int]:
    rng = np.random.default_rng(seed)
    return [int(token) for token in rng.integers(300, 4000, n)]


def answer(llm: Llama, prompt: Sequence[int], n: int = 6, **options: Any) -> list[int]:
    """Return the tokens that greedily follow a prompt, through the caches of the `Llama`."""
    text = llm.create_completion(
        list(prompt), max_tokens=n, temperature=0.0, logit_bias={0: -100.0}, **options
    )
    return [int(text["usage"]["completion_tokens"]), *llm.input_ids[: llm.n_tokens].tolist()]  # type: ignore[index]


class Counting:
    """Counts the tokens that a `Llama` evaluates."""

    def __init__(self, llm: Llama) -> None:
        self.n_tokens = 0
        evaluate = llm.eval

        def count(tokens: Sequence[int]) -> None:
            self.n_tokens += len(tokens)
            evaluate(tokens)

        llm.eval = count  # type: ignore[method-assign]

    def since(self) -> int:
        n_tokens, self.n_tokens = self.n_tokens, 0
        return n_tokens


def forget(llm: Llama) -> None:
    """Leave nothing live, as another conversation does."""
    llm.reset()
    llm._ctx.kv_cache_clear()
    llm.n_tokens = 0


# -- every family ----------------------------------------------------------------------------------


def test_answers_are_those_without_a_cache(
    tiny_llama: LoadLlama, family: str, cache: IndexedCache
) -> None:
    """Two conversations take turns; what is asked twice is read once; faults 8, 9 and 51."""
    llm = tiny_llama(family, n_ctx=512)
    plain = tiny_llama(family, n_ctx=512)
    cache.set_namespace(llm)
    llm.set_cache(cache)
    counting = Counting(llm)
    one, two = prompt_of(80, seed=1), prompt_of(80, seed=2)
    evaluated = []
    for turn in range(3):
        for prompt in (one, two):
            forget(plain)
            asked = list(prompt)
            counting.since()
            got = answer(llm, asked)
            evaluated.append(counting.since())
            assert got == answer(plain, asked)
            # With the last token of the answer, which was not evaluated.
            prompt[:] = [*cache._entries()[-1].key, *prompt_of(10, seed=10 + turn)]
    assert min(evaluated[:2]) >= 80
    assert max(evaluated[2:]) < 20, evaluated
    assert cache.counters["hits"] == 4
    for again in (one, one):
        counting.since()
        assert answer(llm, again[:-10]) == answer_of(plain, again[:-10])
        assert counting.since() >= 1


def answer_of(plain: Llama, prompt: Sequence[int]) -> list[int]:
    forget(plain)
    return answer(plain, prompt)


def test_prompts_that_part_ways(tiny_llama: LoadLlama, family: str, cache: IndexedCache) -> None:
    """A state that has to be cut, or cannot be, gives the right answer all the same."""
    llm = tiny_llama(family, n_ctx=512)
    plain = tiny_llama(family, n_ctx=512)
    cache.set_namespace(llm)
    llm.set_cache(cache)
    start = prompt_of(60, seed=3)
    for seed in (4, 5, 4, 6):
        prompt = [*start, *prompt_of(12, seed=seed)]
        forget(llm)
        assert answer(llm, prompt) == answer_of(plain, prompt)
    assert answer(llm, start[:30]) == answer_of(plain, start[:30])


def test_a_state_loads_as_the_one_that_was_saved(
    tiny_llama: LoadLlama, family: str, cache: IndexedCache
) -> None:
    llm = tiny_llama(family, n_ctx=256, n_batch=32)
    llm.scores[:] = 0.0  # never computed, and not of zeros by itself
    cache.set_namespace("any" if family != "swa" else llm)
    tokens = prompt_of(50, seed=7)
    llm.eval(tokens)
    saved = llm.save_state()
    assert saved.scores.shape == (32, llm.n_vocab())
    cache[tokens] = saved
    kept = saved.llama_state_size + 50 * 4
    assert kept <= cache.cache_size < kept + 400

    def after(state: Any) -> tuple[Any, ...]:
        forget(llm)
        llm.scores[:] = 3.0
        llm.load_state(state)
        seen = (llm.n_tokens, llm._input_ids.tolist(), llm.scores.copy(), llm._seed)
        llm.eval(prompt_of(9, seed=8))
        logits = np.ctypeslib.as_array(llm._ctx.get_logits(), (llm.n_vocab(),)).copy()
        assert llm.input_ids.shape == (256,)
        return (*seen, llm._input_ids.tolist(), logits)

    for expected, got in zip(after(saved), after(cache[tokens]), strict=True):
        assert np.array_equal(expected, got)


def test_scores_that_were_computed_are_kept(tiny_llama: LoadLlama, cache: IndexedCache) -> None:
    llm = tiny_llama("attention", n_ctx=256, logits_all=True)
    cache.set_namespace(llm)
    tokens = prompt_of(40, seed=9)
    llm.eval(tokens)
    saved = llm.save_state()
    cache[tokens] = saved
    found = cache[tokens]
    assert found.scores.shape == (40, llm.n_vocab())
    assert np.array_equal(found.scores, saved.scores)
    assert cache.cache_size > 40 * llm.n_vocab() * 4
    llm.set_cache(cache)
    plain = tiny_llama("attention", n_ctx=256, logits_all=True)
    text = "One two three four five six seven eight nine ten"
    forget(llm)
    first = llm.create_completion(text, max_tokens=4, temperature=0.0, logprobs=2, echo=True)
    text = first["choices"][0]["text"] + " eleven twelve"  # type: ignore[index]
    forget(llm)
    warm = llm.create_completion(text, max_tokens=4, temperature=0.0, logprobs=2, echo=True)
    assert cache.counters["hits"] > 1
    cold = plain.create_completion(text, max_tokens=4, temperature=0.0, logprobs=2, echo=True)
    for name in ("tokens", "text_offset"):
        assert warm["choices"][0]["logprobs"][name] == cold["choices"][0]["logprobs"][name]  # type: ignore[index,literal-required]
    warm_logprobs = warm["choices"][0]["logprobs"]["token_logprobs"][1:]  # type: ignore[index]
    cold_logprobs = cold["choices"][0]["logprobs"]["token_logprobs"][1:]  # type: ignore[index]
    np.testing.assert_allclose(warm_logprobs, cold_logprobs, atol=5e-3)


def test_scores_that_were_left_out_do_not_serve_who_needs_them(
    tiny_llama: LoadLlama, cache: IndexedCache
) -> None:
    llm = tiny_llama("attention", n_ctx=256)
    cache.set_namespace(llm)
    tokens = prompt_of(40, seed=9)
    llm.eval(tokens)
    cache[tokens] = llm.save_state()
    cache.set_namespace(tiny_llama("attention", n_ctx=256, logits_all=True))
    assert tokens not in cache
    with pytest.raises(KeyError):
        cache[tokens]
    cache.set_namespace(llm)
    assert cache[tokens].n_tokens == 40


def test_what_is_too_long_does_not_hide_what_fits(
    tiny_llama: LoadLlama, cache: IndexedCache
) -> None:
    small, large = tiny_llama("attention", n_ctx=256), tiny_llama("attention", n_ctx=1024)
    tokens = prompt_of(600, seed=27)
    for llm, n_tokens in ((small, 100), (large, 500)):
        cache.set_namespace(llm)
        llm.eval(tokens[:n_tokens])
        cache[tokens[:n_tokens]] = llm.save_state()
    assert cache[tokens[:600]].n_tokens == 500
    cache.set_namespace(small)
    assert cache[tokens[:200]].n_tokens == 100
    assert len(cache) == 1


def test_ids_that_were_left_out_can_be_asked_for(
    tiny_llama: LoadLlama, cache: IndexedCache
) -> None:
    """As chat handlers do, which step over the places of a picture."""
    llm = tiny_llama("attention", n_ctx=256)
    cache.set_namespace(llm)
    llm.set_cache(cache)
    prompt = prompt_of(30, seed=28)
    answer(llm, prompt)
    forget(llm)
    answer(llm, [*cache._entries()[-1].key, 7, 8])
    assert cache.counters["hits"] == 1
    llm.n_tokens += 60
    seen = llm.input_ids[: llm.n_tokens].tolist()
    with pytest.raises(KeyError):
        cache[seen[-60:]]
    cache[seen] = llm.save_state()
    assert seen in cache


def test_scores_of_no_use_are_not_kept_if_that_is_known(
    tiny_llama: LoadLlama, cache: IndexedCache
) -> None:
    """Memory of scores that were never computed may hold anything."""
    llm = tiny_llama("attention", n_ctx=256, n_batch=32)
    llm.scores[:] = 5.0
    tokens = prompt_of(40, seed=9)
    llm.eval(tokens)
    cache[tokens] = llm.save_state()
    assert cache[tokens].scores.shape == (32, llm.n_vocab())
    cache.clear()
    cache.set_namespace(llm)
    cache[tokens] = llm.save_state()
    assert cache[tokens].scores.shape == (1, llm.n_vocab())


# -- contexts, settings, adapters ------------------------------------------------------------------


def test_fault_42_contexts_of_other_sizes(
    tiny_llama: LoadLlama, family: str, cache: IndexedCache
) -> None:
    saver = tiny_llama(family, n_ctx=512)
    cache.set_namespace(saver)
    long, short = prompt_of(300, seed=11), prompt_of(90, seed=12)
    for prompt in (long, short):
        forget(saver)
        saver.eval(prompt)
        cache[prompt] = saver.save_state()
    for n_ctx in (256, 4096):
        llm = tiny_llama(family, n_ctx=n_ctx)
        plain = tiny_llama(family, n_ctx=n_ctx)
        cache.set_namespace(llm)
        llm.set_cache(cache)
        counting = Counting(llm)
        prompt = [*short, *prompt_of(7, seed=n_ctx)]
        assert answer(llm, prompt) == answer_of(plain, prompt)
        assert 7 <= counting.since() < 20, "it was reused"
        if n_ctx == 4096:
            prompt = [*long, *prompt_of(600, seed=14)]
            assert answer(llm, prompt) == answer_of(plain, prompt)
        llm.set_cache(None)
    llm = tiny_llama(family, n_ctx=256)
    cache.set_namespace(llm)
    assert long not in cache
    with pytest.raises(KeyError):
        cache[long]
    llm.set_cache(cache)
    prompt = [*long[:100], *prompt_of(5, seed=15)]
    plain = tiny_llama(family, n_ctx=256)
    assert answer(llm, prompt) == answer_of(plain, prompt)


def test_fault_43_other_settings_miss(tiny_llama: LoadLlama, cache: IndexedCache) -> None:
    import llama_cpp

    tokens = prompt_of(40, seed=16)
    llm = tiny_llama("attention", n_ctx=256)
    cache.set_namespace(llm)
    llm.eval(tokens)
    cache[tokens] = llm.save_state()
    for options in (
        {"type_k": llama_cpp.GGML_TYPE_Q8_0},
        {"flash_attn": True},
        {"rope_freq_base": 5000.0},
    ):
        other = tiny_llama("attention", n_ctx=256, **options)
        cache.set_namespace(other)
        assert tokens not in cache, options
        other.set_cache(cache)
        assert answer(other, tokens) == answer_of(
            tiny_llama("attention", n_ctx=256, **options), tokens
        )
    cache.set_namespace(tiny_llama("swa", n_ctx=256))
    assert tokens not in cache
    cache.set_namespace(tiny_llama("attention", n_ctx=256, n_batch=64, n_threads=2))
    assert tokens in cache, "what only changes the order of work is no other namespace"


def test_fault_4_adapters_and_their_scales(
    tiny_llama: LoadLlama, tiny_lora: Path, cache: IndexedCache
) -> None:
    tokens = prompt_of(40, seed=17)

    def load(scale: float | None) -> Llama:
        options: dict[str, Any] = {}
        if scale is not None:
            options = {"lora_path": str(tiny_lora), "lora_scale": scale}
        return tiny_llama("attention", n_ctx=256, **options)

    llm = load(1.0)
    cache.set_namespace(llm)
    llm.eval(tokens)
    cache[tokens] = llm.save_state()
    for scale in (None, 0.5):
        cache.set_namespace(load(scale))
        assert tokens not in cache
    cache.set_namespace(load(1.0))
    assert tokens in cache


def test_namespaces_of_a_llama(tiny_llama: LoadLlama) -> None:
    cache = LlamaRAMCache()
    llm = tiny_llama("attention", n_ctx=64)
    llm.close()
    with pytest.raises(ModelError, match="closed"):
        cache.set_namespace(llm)
    with pytest.raises(InvalidValue, match=r"llama_cpp\.Llama"):
        cache.set_namespace(object())


def test_a_state_that_says_nothing_fits_no_llama(tiny_llama: LoadLlama) -> None:
    from tests.llama_states import legacy_state, llama_state

    cache = LlamaRAMCache()
    cache.set_namespace(tiny_llama("attention", n_ctx=64))
    cache[[1]] = legacy_state([1], b"x")
    cache[[2]] = llama_state([2], b"x")
    for key in ([1], [2]):
        with pytest.raises(KeyError):
            cache[key]
    assert cache.counters["rejected_unfit"] == 2


# -- drafts, threads, chats ------------------------------------------------------------------------


def test_fault_56_tokens_of_a_draft_behind_the_end(
    tiny_llama: LoadLlama, family: str, cache: IndexedCache
) -> None:
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    draft = LlamaPromptLookupDecoding(num_pred_tokens=4, max_ngram_size=2)
    llm = tiny_llama(family, n_ctx=512, draft_model=draft, logits_all=True)
    plain = tiny_llama(family, n_ctx=512, logits_all=True)
    cache.set_namespace(llm)
    llm.set_cache(cache)
    prompt = prompt_of(12, seed=18) * 4
    for _ in range(3):
        forget(llm)
        forget(plain)
        warm = llm.create_completion(prompt, max_tokens=5, temperature=0.0)
        cold = plain.create_completion(prompt, max_tokens=5, temperature=0.0)
        assert warm["choices"][0]["text"] == cold["choices"][0]["text"]  # type: ignore[index]
        for entry in cache._entries():
            state = cache._peek(entry.tokens)
            held = state.input_ids[: state.n_tokens].tolist()
            shared = min(len(held), len(entry.key))
            assert held[:shared] == list(entry.key[:shared]), "what is held begins like the key"
        prompt = [*prompt, *prompt_of(3, seed=19)]


def test_fault_59_two_models_and_one_cache(tiny_llama: LoadLlama, cache: IndexedCache) -> None:
    models = [tiny_llama("attention", n_ctx=256) for _ in range(2)]
    plain = tiny_llama("attention", n_ctx=256)
    cache.set_namespace(models[0])
    prompts = [prompt_of(40, seed=seed) for seed in (20, 21, 22)]
    expected = [answer_of(plain, prompt) for prompt in prompts]
    failures: list[BaseException] = []

    def work(llm: Llama) -> None:
        try:
            llm.set_cache(cache)
            for turn in range(9):
                assert answer(llm, prompts[turn % 3]) == expected[turn % 3]
        except BaseException as error:  # noqa: BLE001 - shown below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(llm,)) for llm in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures


def test_three_turns_of_completions(
    make_llama: LoadLlama, smollm2_path: Path, cache: IndexedCache
) -> None:
    llm = make_llama(smollm2_path, n_ctx=1024, n_threads=2)
    cache.set_namespace(llm)
    llm.set_cache(cache)
    counting = Counting(llm)
    texts = ["The sea is wide. " * 8, "A forest has trees. " * 8]
    evaluated = []
    for turn in range(3):
        for index, text in enumerate(texts):
            done = llm(f"{text}\nQ{turn}:", max_tokens=8, temperature=0.0)
            texts[index] = f"{text}\nQ{turn}:" + done["choices"][0]["text"]  # type: ignore[index]
            evaluated.append(counting.since())
    assert cache.counters["hits"] >= 4
    assert max(evaluated[2:]) < 24 < min(evaluated[:2]), evaluated


def test_three_turns_of_chats(
    make_llama: LoadLlama, smollm2_path: Path, cache: IndexedCache
) -> None:
    llm = make_llama(smollm2_path, n_ctx=1024, n_threads=2)
    cache.set_namespace(llm)
    llm.set_cache(cache)
    counting = Counting(llm)
    system = {"role": "system", "content": "You answer in few words. " * 8}
    chats: list[list[dict[str, str]]] = [[system], [system]]
    evaluated = []
    for turn in range(3):
        for index, chat in enumerate(chats):
            chat.append({"role": "user", "content": f"Tell me fact {turn} of {index}."})
            done = llm.create_chat_completion(chat, max_tokens=8, temperature=0.0)  # type: ignore[arg-type]
            chat.append({"role": "assistant", "content": done["choices"][0]["message"]["content"]})  # type: ignore[index]
            evaluated.append(counting.since())
    assert cache.counters["hits"] >= 4
    assert max(evaluated[2:]) < 40 < evaluated[0], evaluated


def test_the_constructor_of_0_3_36_swallows_a_cache(
    make_llama: LoadLlama, tiny_model: Callable[[str], Path]
) -> None:
    llm = make_llama(tiny_model("attention"), n_ctx=64, cache=LlamaRAMCache())
    assert llm.cache is None


# -- sliding windows -------------------------------------------------------------------------------


def test_a_window_needs_a_llama_that_is_known(
    tiny_llama: LoadLlama, cache: IndexedCache, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever loads such a state and is not kept from cutting it may answer wrongly."""
    llm = tiny_llama("swa", n_ctx=512)
    cache.set_namespace("a label says nothing of the model")
    llm.set_cache(cache)
    prompt = prompt_of(80, seed=23)
    answer(llm, prompt)
    assert len(cache) == 0
    assert cache.counters["refused_window"] == 1
    assert "set_namespace(llm)" in caplog.text
    cache.set_namespace(llm)
    forget(llm)
    answer(llm, prompt)
    assert len(cache) == 1


def test_a_window_is_not_cut_where_rows_are_gone(tiny_llama: LoadLlama, tmp_path: Path) -> None:
    """After a state is loaded, new tokens take the cells of rows outside of the window."""
    cache = LlamaTrieCache()
    llm = tiny_llama("swa", n_ctx=512)
    plain = tiny_llama("swa", n_ctx=512)
    cache.set_namespace(llm)
    llm.set_cache(cache)
    start = prompt_of(150, seed=24)
    answer(llm, start)
    forget(llm)
    key = cache._entries()[-1].key
    answer(llm, [*key, *prompt_of(80, seed=25)])
    assert cache.counters["hits"] == 1
    for cut in (70, 100, 140):
        assert answer(llm, start[:cut]) == answer_of(plain, start[:cut])


@pytest.mark.parametrize("options", [{}, {"flash_attn": True}, {"swa_full": False}])
def test_what_a_state_says_of_its_cells(
    tiny_llama: LoadLlama, family: str, options: dict[str, Any]
) -> None:
    llm = tiny_llama(family, n_ctx=512, **options)
    for n_tokens in (1, 2, 64, 200):
        forget(llm)
        llm.eval(prompt_of(n_tokens, seed=26))
        native = llm.save_state().llama_state
        state = read_context(native)
        assert state is not None
        assert (state.rows is not None) == (family != "recurrent")
        assert (state.window is not None) == ("swa" in family)
        assert (state.recurrent is not None) == (family in ("recurrent", "hybrid", "hybrid-swa"))
        assert state.problem(n_tokens) == ""
        assert (state.problem(n_tokens - 1) == "") == (family == "attention")
        assert state.problem(n_tokens + 1) != ""
        assert read_context(native[:-1]) is None
        assert read_context(native + b"x") is None
    assert read_context(b"") is None
    assert read_context(b"\xff" * 40) is None


def flipped_cell(native: bytes) -> bytes:
    """Return a state in which one bit of a cell's position differs."""
    at = 4 + int.from_bytes(native[:4], "little")
    is_recurrent = native[4:at] == b"mamba"
    where = at + 4 if is_recurrent else at + 8 + 12
    return native[:where] + bytes([native[where] ^ 64]) + native[where + 1 :]


def test_fault_69_a_forged_state_on_disk(
    tiny_llama: LoadLlama, family: str, tmp_path: Path
) -> None:
    """Whoever can write into the directory can seal what he likes; no secret is asked for."""
    llm = tiny_llama(family, n_ctx=256)
    plain = tiny_llama(family, n_ctx=256)
    prompt = prompt_of(60, seed=29)
    with LlamaDiskCache(tmp_path / "cache", namespace=llm) as cache:
        llm.set_cache(cache)
        answer(llm, prompt)
        key = cache._entries()[-1].key
        state = cache.cache[key]
        state.llama_state = flipped_cell(state.llama_state)
        entry = cache._index().get(key)
        assert entry is not None
        packed = Packed(Plan.of(state).snapshot())
        store = cache._backing.store
        assert store.put(entry.name, packed.n_bytes, packed.bytes, entry.place, replace=True)
        forget(llm)
        longer = [*key, *prompt_of(5, seed=30)]
        assert answer(llm, longer) == answer_of(plain, longer)
        rejected = [kind for kind in cache.counters if kind.startswith("rejected_")]
        assert rejected in (["rejected_inconsistent"], ["rejected_unknown_form"])
        assert "hits" not in cache.counters


def test_a_state_with_more_rows_than_tokens_is_not_kept(
    tiny_llama: LoadLlama, family: str, cache: IndexedCache
) -> None:
    """Recurrent memory cannot give up the tokens of a draft that nobody accepted."""
    llm = tiny_llama(family, n_ctx=256)
    cache.set_namespace(llm)
    llm.eval(prompt_of(40, seed=31))
    llm.n_tokens -= 3
    key = llm._input_ids.tolist()
    cache[key] = llm.save_state()
    if family == "attention":  # where they are simply cut off
        llm.set_cache(cache)
        forget(llm)
        prompt = [*key, *prompt_of(5, seed=32)]
        assert answer(llm, prompt) == answer_of(tiny_llama(family, n_ctx=256), prompt)
        assert cache.counters["hits"] == 1
        return
    assert len(cache) == 0
    assert cache.counters["refused_inconsistent"] == 1


def test_a_state_that_fills_its_context(tiny_llama: LoadLlama, cache: IndexedCache) -> None:
    small, large = tiny_llama("attention", n_ctx=256), tiny_llama("attention", n_ctx=512)
    prompt = prompt_of(256, seed=32)
    cache.set_namespace(small)
    small.eval(prompt)
    cache[prompt] = small.save_state()
    cache.set_namespace(large)
    assert cache[prompt].input_ids.shape == (512,)
    large.set_cache(cache)
    longer = [*prompt, *prompt_of(20, seed=33)]
    assert answer(large, longer) == answer_of(tiny_llama("attention", n_ctx=512), longer)


def test_the_guard_outlives_a_keeper(tiny_llama: LoadLlama) -> None:
    import llamakeep

    cache = LlamaTrieCache()
    llm = tiny_llama("swa", n_ctx=512)
    plain = tiny_llama("swa", n_ctx=512)
    cache.set_namespace(llm)
    llamakeep.attach(llm).detach()
    llm.set_cache(cache)
    start = prompt_of(150, seed=24)
    answer(llm, start)
    forget(llm)
    key = cache._entries()[-1].key if len(cache) else tuple(start)
    answer(llm, [*key, *prompt_of(80, seed=25)])
    for cut in (70, 100, 140):
        assert answer(llm, start[:cut]) == answer_of(plain, start[:cut])
