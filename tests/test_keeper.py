"""`attach` on real llama.cpp models of every memory family.

Each prompt is answered twice: by a `Llama` with a keeper and by a plain one that is reset before
every prompt. On the tiny F32 models without flash attention the answers must be equal; their
logits may differ by rounding (1e-3), far less than any fault would move them.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import llamakeep
from llamakeep.errors import ModelError, RestoreFailed, StateRejected

pytestmark = pytest.mark.model

TOLERANCE = 5e-3
N_ANSWER = 64

MODES = [
    pytest.param("attention", {}, {}, id="attention"),
    pytest.param("swa", {}, {}, id="swa"),
    pytest.param("swa", {}, {"segment_tokens": 64}, id="swa-dense"),
    pytest.param("swa", {"swa_full": False}, {}, id="swa-window-only"),
    pytest.param("recurrent", {}, {}, id="recurrent"),
    pytest.param("hybrid", {}, {}, id="hybrid"),
    pytest.param("hybrid-swa", {}, {}, id="hybrid-swa"),
    pytest.param("attention", {"type_k": 8, "type_v": 8, "flash_attn": True}, {}, id="q8_0"),
    pytest.param("hybrid", {"flash_attn": True}, {}, id="hybrid-flash"),
]
ROLLING = ["swa", "recurrent", "hybrid", "hybrid-swa"]


def tokens_of(n: int, seed: int) -> list[int]:
    """Return `n` random tokens."""
    return [int(token) for token in np.random.default_rng(seed).integers(300, 4000, n)]


def answer(llm: Any, prompt: list[int], n: int = N_ANSWER) -> list[int]:
    """Return the greedy continuation of a prompt."""
    return list(itertools.islice(llm.generate(prompt, temp=0.0), n))


def next_logits(llm: Any, prompt: list[int]) -> npt.NDArray[np.float32]:
    """Return the logits after a prompt."""
    import llama_cpp

    stream = llm.generate(prompt, temp=0.0)
    next(stream)
    pointer = llama_cpp.llama_get_logits_ith(llm._ctx.ctx, -1)
    logits = np.ctypeslib.as_array(pointer, (llm.n_vocab(),)).copy()
    stream.close()
    return logits


class Pair:
    """A `Llama` with a keeper and a plain one of the same model."""

    def __init__(self, make: Callable[..., Any], family: str, options: Any, **kept: Any) -> None:
        self.plain = make(family, **options)
        self.llm = make(family, **options)
        self.keeper = llamakeep.attach(self.llm, capacity_bytes=256 << 20, **kept)

    def ask(self, prompt: list[int], n: int = N_ANSWER) -> llamakeep.Reuse:
        """Answer with both, compare, and return how the keeper served it."""
        self.plain.reset()
        self.plain._ctx.kv_cache_clear()
        cold = answer(self.plain, prompt, n)
        assert answer(self.llm, prompt, n) == cold
        self.keeper.check()
        assert self.keeper.last is not None
        return self.keeper.last

    def compare_logits(self, prompt: list[int]) -> llamakeep.Reuse:
        """Compare the logits after a prompt and return how the keeper served it."""
        self.plain.reset()
        self.plain._ctx.kv_cache_clear()
        cold = next_logits(self.plain, prompt)
        assert np.abs(next_logits(self.llm, prompt) - cold).max() <= TOLERANCE
        self.keeper.check()
        assert self.keeper.last is not None
        return self.keeper.last


@pytest.fixture
def pair(tiny_llama: Callable[..., Any]) -> Callable[..., Pair]:
    """`pair(family, options, **kept)` makes a `Pair`."""

    def make(family: str, options: dict[str, Any] | None = None, **kept: Any) -> Pair:
        return Pair(tiny_llama, family, options or {}, **kept)

    return make


# -- right answers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "options", "kept"), MODES)
def test_a_conversation_with_edits_branches_and_repeats(
    pair: Callable[..., Pair], family: str, options: dict[str, Any], kept: dict[str, Any]
) -> None:
    both = pair(family, options, **kept)
    system, first = tokens_of(300, 1), tokens_of(141, 2)
    prompt = system + first
    assert both.ask(prompt).reused_tokens == 0
    repeat = both.ask(prompt)
    assert (repeat.reused_tokens, repeat.tier) == (432, "live")
    longer = prompt + tokens_of(90, 3)
    assert both.ask(longer).reused_tokens >= 432
    other = system + tokens_of(77, 4)
    both.ask(other)
    assert both.ask(system + tokens_of(50, 5)).reused_tokens == 296  # a branch point by now
    back = both.ask(longer)
    assert (back.reused_tokens, back.tier) == (528, "ram")
    edited = longer[:400] + tokens_of(60, 6)
    both.ask(edited)
    both.ask(longer[:333])
    assert both.ask(edited).evaluated_tokens <= 12
    assert both.keeper.stats()["failures"] == {}


@pytest.mark.parametrize(("family", "options", "kept"), MODES[:7])
def test_next_logits_are_those_of_a_cold_run(
    pair: Callable[..., Pair], family: str, options: dict[str, Any], kept: dict[str, Any]
) -> None:
    both = pair(family, options, **kept)
    prompts = [tokens_of(500, 10), tokens_of(450, 11)]
    middle = prompts[0][:200] + tokens_of(100, 12)
    for prompt in (*prompts, middle, prompts[0], middle + tokens_of(9, 13), prompts[1]):
        both.compare_logits(prompt)
    totals = both.keeper.stats()
    assert totals["hits"] >= 3
    assert totals["failures"] == {}


def test_smollm2_is_equal_bit_for_bit_where_that_is_promised(
    smollm2_path: Any, make_llama: Callable[..., Any]
) -> None:
    """One sequence, prefilled rows, aligned: the same logits, not nearly the same."""
    plain, llm = make_llama(smollm2_path), make_llama(smollm2_path)
    keeper = llamakeep.attach(llm)
    document = tokens_of(600, 20)
    prompts = [document + tokens_of(n, n) for n in (40, 61, 83)]
    for prompt in (*prompts, prompts[0], document[:333], prompts[1]):
        plain.reset()
        cold = next_logits(plain, prompt)
        assert np.array_equal(next_logits(llm, prompt), cold)
    assert keeper.last is not None
    assert keeper.last.reused_tokens == 656
    assert keeper.stats()["failures"] == {}


def test_smollm2_decoded_rows_first_difference_has_a_small_margin(
    smollm2_path: Any, make_llama: Callable[..., Any]
) -> None:
    """Rows decoded one by one are rounded otherwise; only near-ties may come out differently."""
    plain, llm = make_llama(smollm2_path), make_llama(smollm2_path)
    keeper = llamakeep.attach(llm)
    prompt = llm.tokenize(b"A short story about a lighthouse keeper and her dog:")
    prompt = prompt + answer(llm, prompt, 60) + llm.tokenize(b" And then", add_bos=False)
    plain.reset()
    cold, warm = answer(plain, prompt, 40), answer(llm, prompt, 40)
    assert keeper.last is not None
    assert keeper.last.reused_tokens > 60
    if cold != warm:
        at = next(i for i, (a, b) in enumerate(zip(cold, warm, strict=True)) if a != b)
        plain.reset()
        top = np.sort(next_logits(plain, prompt + cold[:at]))[-2:]
        assert top[1] - top[0] < 1.5


def test_gemma3_dense_and_windowed(gemma3_path: Any, make_llama: Callable[..., Any]) -> None:
    for swa_full in (True, False):
        plain = make_llama(gemma3_path, swa_full=swa_full)
        llm = make_llama(gemma3_path, swa_full=swa_full)
        keeper = llamakeep.attach(llm)
        document = llm.tokenize(b"The tide tables of the harbour were kept by hand. " * 60)
        prompts = [document + llm.tokenize(q, add_bos=False) for q in (b" Who kept", b" Where")]
        for prompt in (*prompts, prompts[0]):
            plain.reset()
            plain._ctx.kv_cache_clear()
            cold = next_logits(plain, prompt)
            assert np.abs(next_logits(llm, prompt) - cold).max() <= 0.05 * cold.std()
        assert keeper.last is not None
        assert keeper.last.reused_tokens >= len(prompts[0]) - 10
        assert keeper.stats()["failures"] == {}


# -- what faults.md lists --------------------------------------------------------------------------


def test_fault_1_nothing_found_empties_the_context(pair: Callable[..., Pair]) -> None:
    both = pair("attention", align=1)
    both.ask(tokens_of(50, 1), 2)
    reuse = both.ask([90, 91], 2)
    assert (reuse.reused_tokens, reuse.evaluated_tokens, reuse.tier) == (0, 2, "none")
    assert both.llm.input_ids[:2].tolist() == [90, 91]


@pytest.mark.parametrize("family", ROLLING)
def test_fault_2_growing_then_going_back(pair: Callable[..., Pair], family: str) -> None:
    both = pair(family, {"swa_full": False} if family == "swa" else {}, align=1)
    first = tokens_of(200, 1)
    grown = first + tokens_of(150, 2)
    for prompt in (first, grown, grown + tokens_of(120, 3), first):
        last = both.ask(prompt, 8)
    assert last.reused_tokens == 198


@pytest.mark.parametrize("family", ["recurrent", "hybrid", "hybrid-swa"])
def test_fault_3_checkpoints_past_a_rewind_never_match_other_tokens(
    pair: Callable[..., Pair], family: str
) -> None:
    both = pair(family, align=1)
    trunk = tokens_of(30, 1)
    for n in (12, 22, 30):
        both.ask(trunk[:n], 1)
    fork = trunk[:15] + tokens_of(15, 2)
    assert both.ask(fork, 4).reused_tokens == 10
    assert both.ask(trunk, 4).reused_tokens == 28  # still there, on its own branch
    assert both.ask(fork, 4).reused_tokens == 28


def test_fault_4_adapters_and_scales_do_not_mix(
    tiny_llama: Callable[..., Any], tiny_lora: Any
) -> None:
    llm = tiny_llama("attention")
    keeper = llamakeep.attach(llm, align=1)
    prompt = tokens_of(80, 1)
    bare = next_logits(llm, prompt)
    seen = {}
    for scale in (1.0, 0.5):
        keeper.set_lora([(tiny_lora, scale)])
        seen[scale] = next_logits(llm, prompt)
        assert keeper.last is not None
        assert keeper.last.reused_tokens == 0
        assert np.abs(seen[scale] - bare).max() > 0.5
    assert np.abs(seen[1.0] - seen[0.5]).max() > 0.2
    for adapters, expected in (({tiny_lora: 1.0}, seen[1.0]), ({}, bare)):
        keeper.set_lora(adapters)
        assert np.abs(next_logits(llm, prompt) - expected).max() <= TOLERANCE
        assert keeper.last.reused_tokens == 78
        assert keeper.last.tier == "ram"


@pytest.mark.parametrize("where", [0, 5, 12, 24])
def test_fault_5_a_changed_blob_is_a_miss_and_the_next_answer_is_right(
    pair: Callable[..., Pair], where: int
) -> None:
    both = pair("attention")
    prompt = tokens_of(300, 1)
    both.ask(prompt, 4)
    both.ask(tokens_of(100, 2), 4)
    for name in both.keeper._tree.store:
        data = both.keeper._tree.store.get(name)
        assert data is not None
        data.flags.writeable = True
        data[where] ^= 0x40
        data.flags.writeable = False
    reuse = both.ask(prompt, 4)
    assert (reuse.reused_tokens, reuse.tier) == (0, "none")
    assert "could not be used" in reuse.reason
    both.ask(tokens_of(60, 3), 4)
    both.ask(tokens_of(100, 2), 4)
    assert both.ask(prompt, 4).reused_tokens == 296


@pytest.mark.parametrize("family", ["attention", "hybrid"])
@pytest.mark.parametrize("native", ["_write", "_verify", "_copy"])
def test_fault_6_a_refused_restore_rolls_everything_back(
    pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch, family: str, native: str
) -> None:
    both = pair(family)
    prompt = tokens_of(300, 1)
    both.ask(prompt, 4)
    both.ask(tokens_of(100, 2), 4)

    def refuse(*_: Any) -> None:
        raise RestoreFailed("no room, says the test")

    with monkeypatch.context() as broken:
        broken.setattr(both.keeper._runtime, native, refuse)
        failed = answer(both.llm, prompt, 4)
    both.plain.reset()
    assert failed == answer(both.plain, prompt, 4)
    assert both.keeper.last is not None
    assert both.keeper.last.reused_tokens == 0
    assert both.keeper.stats()["failures"]["restore"] == 1
    both.ask(prompt, 4)
    assert both.ask(prompt, 4).reused_tokens == 296


def test_faults_7_8_9_short_prompts_and_exact_repeats(pair: Callable[..., Pair]) -> None:
    both = pair("attention", align=1)
    both.ask([700], 1)
    assert both.ask([700, 701, 702], 1).reused_tokens == 1
    assert both.ask([700, 701, 702], 1).reused_tokens == 1  # two tokens are evaluated again
    long = tokens_of(20, 1)
    both.ask(long, 3)
    assert both.ask(long[:5], 3).reused_tokens == 3
    assert both.ask(long, 3).reused_tokens == 18
    with pytest.raises(llamakeep.InvalidValue, match="empty prompt"):
        answer(both.llm, [], 1)


class PictureHandler:
    """Stands in for a handler of pictures: evaluates embeddings that no token names."""

    def __init__(self, shift: int) -> None:
        self.shift = shift

    def __call__(self, *, llama: Any, messages: Any, **options: Any) -> Any:
        import llama_cpp

        llama.reset()
        llama._ctx.kv_cache_clear()
        llama.input_ids[:] = 7  # what it holds where the picture is depends on chance otherwise
        llama.eval(messages[0]["content"])
        # A picture of four positions, put into the context as mtmd does: past `Llama.eval`.
        batch = llama._batch
        picture = [(self.shift + i) % 4000 for i in range(4)]
        batch.set_batch(batch=picture, n_past=llama.n_tokens, logits_all=False)
        assert llama_cpp.llama_decode(llama._ctx.ctx, batch.batch) == 0
        llama.n_tokens += 4
        llama.eval(messages[1]["content"])
        prompt = llama.input_ids[: llama.n_tokens].tolist()
        return llama.create_completion(
            prompt=prompt, temperature=0.0, max_tokens=options["max_tokens"]
        )


def test_faults_10_and_73_pictures_are_never_matched(tiny_llama: Callable[..., Any]) -> None:
    llm, plain = tiny_llama("attention"), tiny_llama("attention")
    keeper = llamakeep.attach(llm, align=1)
    before, after = tokens_of(40, 1), tokens_of(30, 2)
    messages: Any = [{"role": "user", "content": part} for part in (before, after)]
    texts = []
    for shift in (100, 2000, 100):
        for model in (llm, plain):
            model.chat_handler = PictureHandler(shift)
            result = model.create_chat_completion(messages=messages, max_tokens=12)
            texts.append(result["choices"][0]["text"])
        assert texts[-1] == texts[-2]
        assert keeper.last is not None
        assert keeper.last.tier == "none"
    assert texts[0] != texts[2]
    # A text whose tokens equal what is left over in the token buffer matches the text part only.
    stale = llm.input_ids[: llm.n_tokens].tolist()
    plain.reset()
    assert answer(llm, stale) == answer(plain, stale)
    assert keeper.last.reused_tokens <= len(before)
    keeper.check()


def test_fault_11_the_same_prompts_again_in_turn(pair: Callable[..., Pair]) -> None:
    both = pair("hybrid")
    prompts = [tokens_of(100 + 37 * i, i) for i in range(3)]
    for prompt in (*prompts, prompts[2], *prompts):
        both.ask(prompt)


def test_fault_13_what_is_handed_out_cannot_be_changed(pair: Callable[..., Pair]) -> None:
    both = pair("attention")
    both.ask(tokens_of(100, 1), 2)
    store = both.keeper._tree.store
    for name in store:
        data = store.get(name)
        assert data is not None
        with pytest.raises(ValueError, match="read-only"):
            data[0] = 1


@pytest.mark.parametrize("family", ["attention", "swa", "recurrent", "hybrid", "hybrid-swa"])
def test_fault_17_two_conversations_in_turn(pair: Callable[..., Pair], family: str) -> None:
    both = pair(family, align=1)
    common = tokens_of(193, 1)
    one, two = common + tokens_of(48, 2), common + tokens_of(48, 3)
    for prompt in (one, two):
        both.ask(prompt, 2)
    for prompt in (one, two, one):
        assert both.ask(prompt, 2).reused_tokens == 239


def test_fault_18_a_growing_chat_is_a_prefix_hit(pair: Callable[..., Pair]) -> None:
    both = pair("hybrid", align=1)
    turn = tokens_of(60, 1)
    both.ask(turn, 1)
    both.ask(tokens_of(50, 9), 1)
    assert both.ask(turn + tokens_of(30, 2), 1).reused_tokens == 58


def test_faults_20_and_27_reads_keep_and_repeats_do_not_add(pair: Callable[..., Pair]) -> None:
    both = pair("attention", align=1)
    prompt = tokens_of(100, 1)
    sizes = []
    for _ in range(6):
        both.ask(prompt, 1)
        both.ask(tokens_of(30, 2), 1)
        sizes.append(len(both.keeper._tree.store))
    assert sizes == [2] * 6
    assert both.keeper.stats()["hits"] == 10


def test_fault_32_cleared_is_zero(pair: Callable[..., Pair]) -> None:
    both = pair("hybrid")
    both.ask(tokens_of(300, 1), 4)
    assert both.keeper.stats()["used_bytes"] > 0
    both.keeper.clear()
    stats = both.keeper.stats()
    assert (stats["used_bytes"], stats["nodes"], stats["live_tokens"]) == (0, 0, 0)
    assert both.ask(tokens_of(300, 1), 4).reused_tokens == 0


def test_fault_33_ten_tokens_are_ten_tokens(tiny_llama: Callable[..., Any]) -> None:
    used = []
    for n_ctx in (512, 4096):
        llm = tiny_llama("attention", n_ctx=n_ctx)
        keeper = llamakeep.attach(llm)
        answer(llm, tokens_of(10, 1), 1)
        used.append(keeper.stats()["used_bytes"])
    assert used[0] == used[1] < 64 << 10


@pytest.mark.parametrize("family", ROLLING)
def test_faults_49_to_53_short_prompts_and_small_checkpoints(
    pair: Callable[..., Pair], family: str
) -> None:
    options = {"swa_full": False} if family == "swa" else {}
    both = pair(family, options, align=1)
    ten = tokens_of(10, 1)
    both.ask(ten, 1)
    assert both.ask(ten[:8] + tokens_of(4, 2), 1).reused_tokens == 8
    assert both.ask(ten, 1).reused_tokens == 8
    twenty = tokens_of(20, 3)
    both.ask(twenty, 1)
    # The live sequence ends where the new tokens begin: nothing is restored.
    reuse = both.ask(twenty + tokens_of(5, 4), 1)
    assert reuse.tier == "live"
    assert reuse.reused_tokens >= 18


@pytest.mark.parametrize("family", ["recurrent", "hybrid"])
def test_fault_54_prefill_is_split_only_where_a_checkpoint_is_taken(
    tiny_llama: Callable[..., Any], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = tiny_llama(family)
    llamakeep.attach(llm, min_step=256)
    calls = count_decodes(llm, monkeypatch)
    messages: Any = []
    for index in range(20):
        messages += [
            {"role": "user", "content": f"w{index}"},
            {"role": "assistant", "content": "a"},
        ]
    messages[-1:] = []
    llm.create_chat_completion(messages=messages, temperature=0.0, max_tokens=1)
    # One up to the last user message, one up to the end's checkpoint, one for the last tokens.
    assert 2 <= len(calls) <= 4


def count_decodes(llm: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows by the size of every batch that is decoded from now on."""
    calls: list[int] = []
    decode = llm._ctx.decode

    def counted(batch: Any) -> None:
        calls.append(batch.batch.n_tokens)
        decode(batch)

    monkeypatch.setattr(llm._ctx, "decode", counted)
    return calls


def test_fault_55_a_fixed_prefix_keeps_its_checkpoint(pair: Callable[..., Pair]) -> None:
    both = pair("hybrid", align=1, ctx_checkpoints=4)
    prefix = tokens_of(100, 1)
    for seed in range(2, 10):
        last = both.ask(prefix + tokens_of(40, seed), 1)
    assert last.reused_tokens == 100


class Draft:
    """Drafts what it is told to."""

    def __init__(self, drafts: list[list[int]]) -> None:
        self.drafts = drafts

    def __call__(self, input_ids: Any, /, **_: Any) -> npt.NDArray[np.intc]:
        return np.array(self.drafts.pop(0) if self.drafts else [], np.intc)


def test_fault_56_only_accepted_draft_tokens_are_kept(tiny_llama: Callable[..., Any]) -> None:
    plain = tiny_llama("attention")
    prompt = tokens_of(60, 1)
    right = answer(plain, prompt, 5)
    wrong = [(token + 1) % 4000 for token in right]
    llm = tiny_llama("attention", draft_model=Draft([[right[1], *wrong[2:4]]]))
    keeper = llamakeep.attach(llm, align=1)
    stream = llm.generate(prompt, temp=0.0)
    assert [next(stream), next(stream)] == right[:2]
    stream.close()  # the consumer stops at the second token; the draft went on
    kept = keeper._tree.entries()
    assert [entry.n_tokens for entry in kept] == [62]
    assert llm.n_tokens == 62
    assert keeper._tree.match_prefix(np.array(prompt + right[:2], np.int32)).n_tokens == 62
    plain.reset()
    assert answer(llm, prompt + right[:2]) == answer(plain, prompt + right[:2])


def test_a_draft_on_a_recurrent_state_is_rolled_back(tiny_llama: Callable[..., Any]) -> None:
    """llama.cpp cannot cut a recurrent state; rejected drafts must not stay in it."""
    plain = tiny_llama("hybrid")
    prompt = tokens_of(60, 1)
    right = answer(plain, prompt, 12)
    drafts = [[right[1], 7, 8], [9, 9], [right[4]], [5]]
    llm = tiny_llama("hybrid", draft_model=Draft(drafts))
    llamakeep.attach(llm)
    assert answer(llm, prompt, 12) == right


@pytest.mark.parametrize("kept", [{}, {"segment_tokens": 64}], ids=["windowed", "dense"])
def test_fault_58_a_restored_window_is_known_for_what_it_is(
    pair: Callable[..., Pair], kept: dict[str, Any]
) -> None:
    both = pair("swa", {"swa_full": True}, **kept)
    long = tokens_of(700, 1)
    both.ask(long, 2)
    both.ask(tokens_of(80, 2), 2)
    assert both.ask(long, 2).tier == "ram"
    # Far before the end: live rows are dense only if the restored segments kept their windows.
    back = both.ask(long[:320] + tokens_of(30, 3), 2)
    assert back.reused_tokens == (320 if kept else 0)


def test_fault_59_threads_are_served_one_after_the_other(
    pair: Callable[..., Pair],
) -> None:
    both = pair("hybrid")
    prompts = [tokens_of(80 + 9 * i, i) for i in range(4)]
    cold = []
    for prompt in prompts:
        both.plain.reset()
        cold.append(answer(both.plain, prompt, 12))
    found: dict[int, list[list[int]]] = {i: [] for i in range(4)}

    def work(i: int) -> None:
        for _ in range(3):
            found[i].append(answer(both.llm, prompts[i], 12))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert found == {i: [cold[i]] * 3 for i in range(4)}
    both.keeper.check()


@pytest.mark.parametrize("family", ["hybrid", "recurrent"])
def test_fault_66_checkpoints_off_means_nothing_is_read(
    tiny_llama: Callable[..., Any], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = tiny_llama(family)
    keeper = llamakeep.attach(llm, ctx_checkpoints=0)

    def never(*_: Any) -> None:
        raise AssertionError("something was read")

    monkeypatch.setattr(keeper._runtime, "_read", never)
    calls = count_decodes(llm, monkeypatch)
    answer(llm, tokens_of(300, 1), 3)
    answer(llm, tokens_of(200, 2), 1)
    assert calls == [300, 1, 1, 200]
    assert keeper.stats()["used_bytes"] == 0


def test_fault_67_nothing_is_saved_before_the_first_token(
    tiny_llama: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = tiny_llama("attention")
    keeper = llamakeep.attach(llm)
    reads: list[int] = []
    read = keeper._runtime._read

    def counted(*args: Any) -> Any:
        reads.append(1)
        return read(*args)

    monkeypatch.setattr(keeper._runtime, "_read", counted)
    prompts = [tokens_of(600, seed) for seed in range(5)]
    for prompt in (*prompts, *prompts):
        before = len(reads)
        stream = llm.generate(prompt, temp=0.0)
        next(stream)
        assert len(reads) == before
        stream.close()
    assert len(reads) == 5 * 3  # three spans each, once


def test_fault_70_echo_with_logprobs_reuses_only_where_scores_are_known(
    tiny_llama: Callable[..., Any],
) -> None:
    llm, plain = (tiny_llama("attention", logits_all=True, n_ctx=512) for _ in range(2))
    keeper = llamakeep.attach(llm, align=1)
    text = "The keeper of the lighthouse wrote down every ship that passed by. " * 3
    plainly: dict[str, Any] = {"max_tokens": 2, "temperature": 0.0}
    wanted = plainly | {"logprobs": 1, "echo": True}
    llm.create_completion(prompt=text, **plainly)
    llm.create_completion(prompt="Another one.", **plainly)
    usage = llm.create_completion(prompt=text, **plainly)["usage"]
    assert keeper.last is not None
    assert keeper.last.tier == "ram"  # restored: the scores of its rows are not known
    for expected in (0, usage["prompt_tokens"] - 2):
        warm = llm.create_completion(prompt=text, **wanted)["choices"][0]["logprobs"]
        assert keeper.last.reused_tokens == expected
        plain.reset()
        cold = plain.create_completion(prompt=text, **wanted)["choices"][0]["logprobs"]
        assert warm["tokens"] == cold["tokens"]
        pairs = zip(warm["token_logprobs"][1:], cold["token_logprobs"][1:], strict=True)
        assert max(abs(a - b) for a, b in pairs) < TOLERANCE


def test_fault_71_a_second_call_while_a_stream_is_open(tiny_llama: Callable[..., Any]) -> None:
    llm = tiny_llama("attention")
    keeper = llamakeep.attach(llm)
    prompt, other = tokens_of(50, 1), tokens_of(60, 2)
    whole = answer(llm, prompt, 20)
    expected = answer(llm, other, 5)
    stream = llm.generate(prompt, temp=0.0)
    begun = [next(stream) for _ in range(5)]
    for call in (
        lambda: llm.create_completion(prompt=other, max_tokens=1),
        lambda: llm.eval(other),
        lambda: llm.reset(),
        lambda: keeper.clear(),
        lambda: next(llm.generate(other)),
        lambda: keeper.detach(),
    ):
        with pytest.raises(llamakeep.KeeperBusy, match="still open"):
            call()
    answers: list[list[int]] = []
    waiting = threading.Thread(target=lambda: answers.append(answer(llm, other, 5)))
    waiting.start()
    begun += [next(stream) for _ in range(15)]
    assert begun == whole
    assert answers == []
    stream.close()
    waiting.join(timeout=30)
    assert answers == [expected]


def test_fault_72_an_adapter_survives_the_new_context(
    tiny_llama: Callable[..., Any], tiny_lora: Any
) -> None:
    llm = tiny_llama("attention", lora_path=str(tiny_lora), lora_scale=0.7)
    prompt = tokens_of(50, 1)
    before = next_logits(llm, prompt)
    keeper = llamakeep.attach(llm)
    assert np.abs(next_logits(llm, prompt) - before).max() <= TOLERANCE
    keeper.set_lora()
    assert np.abs(next_logits(llm, prompt) - before).max() > 0.5


# -- checkpoints of chats --------------------------------------------------------------------------


def test_user_messages_are_where_checkpoints_are_taken(tiny_llama: Callable[..., Any]) -> None:
    llm, plain = tiny_llama("hybrid"), tiny_llama("hybrid")
    keeper = llamakeep.attach(llm, min_step=32, align=1)
    messages: Any = [{"role": "system", "content": "Be brief. " * 20}]
    for turn in range(4):
        messages.append({"role": "user", "content": f"question {turn} " * 12})
        messages.append({"role": "assistant", "content": f"answer {turn} " * 8})
    chat = messages[:-1]
    llm.create_chat_completion(messages=chat, temperature=0.0, max_tokens=4)
    (entry,) = keeper._tree.entries()
    assert len(entry.checkpoints) == 5  # before each user message, and near the end
    edited = [*messages[:5], {"role": "user", "content": "something else"}]
    warm = llm.create_chat_completion(messages=edited, temperature=0.0, max_tokens=24)
    assert keeper.last is not None
    assert keeper.last.reused_tokens == entry.checkpoints[2]
    plain.create_chat_completion(messages=chat, temperature=0.0, max_tokens=4)
    plain.reset()
    cold = plain.create_chat_completion(messages=edited, temperature=0.0, max_tokens=24)
    assert warm["choices"] == cold["choices"]
    details = warm["usage"]["prompt_tokens_details"]
    assert details == {"cached_tokens": keeper.last.reused_tokens}


def test_device_checkpoints_serve_the_live_conversation(tiny_llama: Callable[..., Any]) -> None:
    llm, plain = tiny_llama("hybrid"), tiny_llama("hybrid")
    keeper = llamakeep.attach(llm, checkpoint_on_device=True)
    prompt = tokens_of(300, 1)
    for n in (8, 8, 3):
        plain.reset()
        assert answer(llm, prompt, n) == answer(plain, prompt, n)
    assert keeper.last is not None
    assert (keeper.last.reused_tokens, keeper.last.tier) == (296, "live")
    assert keeper.stats()["device_bytes"] > 0
    answer(llm, tokens_of(100, 2), 2)
    assert answer(llm, prompt, 3) == answer(plain, prompt, 3)
    assert keeper.last.reused_tokens == 0  # the device held one, of another conversation
    assert keeper.stats()["failures"] == {}


# -- what else may happen to a Llama ---------------------------------------------------------------


def chat_text(llm: Any, **options: Any) -> str:
    """Return the text of a short chat."""
    result = llm.create_chat_completion(
        messages=[{"role": "user", "content": "Name three colours."}],
        temperature=0.0,
        max_tokens=24,
        **options,
    )
    text: str = result["choices"][0]["message"]["content"] or ""
    return text


def test_completions_chats_streams_tools_and_grammars(
    smollm2_path: Any, make_llama: Callable[..., Any]
) -> None:
    from llama_cpp import LlamaGrammar

    plain, llm = make_llama(smollm2_path), make_llama(smollm2_path)
    llamakeep.attach(llm)
    for _ in range(2):
        plain.reset()
        assert chat_text(llm) == chat_text(plain)
    tool = {
        "type": "function",
        "function": {
            "name": "paint",
            "parameters": {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}},
        },
    }
    for _ in range(2):
        found = []
        for model in (plain, llm):
            result = model.create_chat_completion(
                messages=[{"role": "user", "content": "Paint it red."}],
                tools=[tool],
                tool_choice={"type": "function", "function": {"name": "paint"}},
                temperature=0.0,
                max_tokens=32,
            )
            call = result["choices"][0]["message"]["tool_calls"][0]["function"]
            found.append((call["name"], call["arguments"]))
        assert found[0] == found[1]
        plain.reset()
    grammar = LlamaGrammar.from_string('root ::= "yes" | "no"', verbose=False)
    for _ in range(2):
        result = llm("Is the sky blue? ", grammar=grammar, temperature=0.0, max_tokens=4)
        assert result["choices"][0]["text"] in ("yes", "no")
    chunks = llm("One, two, three,", max_tokens=12, temperature=0.0, stream=True)
    streamed = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert streamed == llm("One, two, three,", max_tokens=12, temperature=0.0)["choices"][0]["text"]


def test_streams_that_are_closed_dropped_or_broken_off(pair: Callable[..., Pair]) -> None:
    both = pair("hybrid")
    prompt = tokens_of(100, 1)
    stream = both.llm.generate(prompt, temp=0.0)
    next(stream)
    stream.close()
    both.ask(prompt)
    stream = both.llm.create_completion(prompt=prompt, max_tokens=8, stream=True)
    next(stream)
    del stream
    gc.collect()
    both.ask(prompt)
    unstarted = both.llm.create_completion(prompt=prompt, max_tokens=8, stream=True)
    with pytest.raises(llamakeep.KeeperBusy):
        both.llm.reset()
    del unstarted
    both.ask(prompt)
    stream = both.llm.generate(prompt, temp=0.0)
    next(stream)
    with pytest.raises(ZeroDivisionError):
        stream.throw(ZeroDivisionError())
    both.ask(prompt)


def test_an_exception_in_the_middle_leaves_nothing_half(
    pair: Callable[..., Pair], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = pair(family)
    prompt = tokens_of(700, 1)
    decode, calls = both.llm._ctx.decode, itertools.count()

    def break_second(batch: Any) -> None:
        decode(batch)
        if next(calls) == 1:
            raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(both.llm._ctx, "decode", break_second)
        with pytest.raises(KeyboardInterrupt):
            answer(both.llm, prompt, 2)
    assert both.llm.n_tokens == 0
    both.ask(prompt, 8)
    with monkeypatch.context() as broken:
        broken.setattr(both.llm._ctx, "decode", lambda _: (_ for _ in ()).throw(RuntimeError("1")))
        with pytest.raises(llamakeep.DecodeError, match="tokens at 0"):
            answer(both.llm, tokens_of(90, 2), 2)
    both.ask(prompt, 8)
    both.ask(tokens_of(90, 2), 8)

    def stop(*_: Any) -> bool:
        raise ValueError("the caller's own")

    with pytest.raises(ValueError, match="caller's own"):
        list(both.llm.generate(prompt, stopping_criteria=stop))
    both.ask(prompt, 8)


def test_direct_eval_reset_and_generate_without_reset(
    pair: Callable[..., Pair], family: str
) -> None:
    both = pair(family)
    head, tail = tokens_of(120, 1), tokens_of(40, 2)
    found = []
    for model in (both.plain, both.llm):
        model.reset()
        model.eval(head)
        found.append(list(itertools.islice(model.generate(tail, temp=0.0, reset=False), 16)))
    assert found[0] == found[1]
    both.ask(head + tail, 16)
    both.llm.reset()
    assert both.llm.n_tokens == 0
    both.ask(head + tail, 16)
    # The caller cuts the sequence back by hand, as speculative decoders do.
    both.llm.n_tokens = 60
    both.llm.eval(tail)
    both.plain.reset()
    both.plain._ctx.kv_cache_clear()
    both.plain.eval(head[:60] + tail)
    assert both.llm.sample(temp=0.0) == both.plain.sample(temp=0.0)
    both.ask(head, 16)


def test_a_stream_that_outlived_its_turn_touches_nothing(tiny_llama: Callable[..., Any]) -> None:
    llm, plain = tiny_llama("attention"), tiny_llama("attention")
    llamakeep.attach(llm)
    prompt, other = tokens_of(100, 1), tokens_of(200, 2)
    broken = llm.create_completion(prompt=prompt, max_tokens=9, stream=True)
    next(broken)
    try:
        broken.throw(ValueError("kept alive, and its frames with it"))
    except ValueError as error:
        kept = error
    stream = llm.generate(other, temp=0.0)
    found = [next(stream) for _ in range(4)]
    del broken, kept
    gc.collect()
    found += [next(stream) for _ in range(8)]
    stream.close()
    assert found == answer(plain, other, 12)


def test_calls_from_inside_an_answer_are_refused(tiny_llama: Callable[..., Any]) -> None:
    llm, plain = tiny_llama("attention"), tiny_llama("attention")
    keeper = llamakeep.attach(llm)
    prompt = tokens_of(60, 1)
    refused: list[str] = []

    def inside(_ids: Any, scores: Any) -> Any:
        for call in (
            lambda: next(llm.generate(tokens_of(9, 2))),
            lambda: llm.create_completion(prompt=tokens_of(9, 2)),
            keeper.clear,
            keeper.set_lora,
            keeper.detach,
        ):
            with pytest.raises(llamakeep.KeeperBusy) as raised:
                call()
            refused.append(str(raised.value))
        return scores

    from llama_cpp import LogitsProcessorList

    options: Any = {"temp": 0.0, "logits_processor": LogitsProcessorList([inside])}
    found = list(itertools.islice(llm.generate(prompt, **options), 3))
    assert found == answer(plain, prompt, 3)
    assert len(refused) >= 15


@pytest.mark.parametrize("how", ["reset", "n_tokens", "clear"])
def test_device_checkpoints_do_not_outlive_their_tokens(
    tiny_llama: Callable[..., Any], how: str
) -> None:
    llm, plain = tiny_llama("hybrid"), tiny_llama("hybrid")
    llamakeep.attach(llm, checkpoint_on_device=True)
    answer(llm, tokens_of(100, 1), 2)
    if how == "reset":
        llm.reset()
    elif how == "clear":
        llm._ctx.kv_cache_clear()
    llm.n_tokens = 0
    other = tokens_of(150, 2)
    llm.eval(other)
    prompt = other[:120] + tokens_of(40, 3)
    assert answer(llm, prompt, 8) == answer(plain, prompt, 8)


def test_rows_changed_through_the_context_are_noticed(
    pair: Callable[..., Pair], family: str
) -> None:
    import llama_cpp

    both = pair(family)
    prompt = tokens_of(100, 1)
    both.ask(prompt, 4)
    # A hole in the middle, made past every wrapper.
    memory = llama_cpp.llama_get_memory(both.llm._ctx.ctx)
    llama_cpp.llama_memory_seq_rm(memory, 0, 10, 40)
    both.ask(prompt + tokens_of(30, 2), 4)
    # Cleared and filled with something else, with a smaller count.
    both.llm.reset()
    both.llm.eval(prompt)
    both.llm._ctx.kv_cache_clear()
    foreign = tokens_of(48, 3)
    both.llm._batch.set_batch(batch=foreign, n_past=0, logits_all=False)
    assert llama_cpp.llama_decode(both.llm._ctx.ctx, both.llm._batch.batch) == 0
    both.llm.n_tokens = 48
    for _ in range(2):
        both.ask(prompt[:48] + tokens_of(30, 4), 4)
        both.ask(tokens_of(20, 5), 4)


@pytest.mark.parametrize("how", ["clear", "tail", "counted tail"])
def test_rows_that_are_gone_are_computed_again_when_they_are_counted_on(
    pair: Callable[..., Pair], family: str, how: str
) -> None:
    both = pair(family)
    head, more = tokens_of(100, 1), tokens_of(9, 2)
    answer(both.llm, head, 5)
    known = both.llm.input_ids[: both.llm.n_tokens].tolist()
    n_tokens = len(known)
    if how == "clear":
        both.llm._ctx.kv_cache_clear()
    else:
        both.llm._ctx.kv_cache_seq_rm(0, 60, -1)
    if how == "counted tail":
        n_tokens = both.llm.n_tokens = 60
    both.llm.eval(more)
    both.plain.reset()
    both.plain._ctx.kv_cache_clear()
    both.plain.eval(known[:n_tokens])
    both.plain.eval(more)
    assert both.llm.sample(temp=0.0) == both.plain.sample(temp=0.0)
    both.ask(head + more, 6)


def test_an_interrupt_between_restore_and_log_is_forgotten_with_its_rows(
    pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = pair("hybrid")
    first, second = tokens_of(200, 1), tokens_of(180, 2)
    both.ask(first, 4)
    both.ask(second, 4)
    with monkeypatch.context() as broken:
        restore = both.keeper._runtime.restore

        def interrupted(*args: Any) -> None:
            restore(*args)
            raise KeyboardInterrupt

        broken.setattr(both.keeper._runtime, "restore", interrupted)
        with pytest.raises(KeyboardInterrupt):
            answer(both.llm, first, 4)
    both.ask(second, 4)
    both.ask(first, 4)


@pytest.mark.parametrize("n_batch", [1, 2, 7])
def test_small_batches(tiny_llama: Callable[..., Any], n_batch: int) -> None:
    llm = tiny_llama("hybrid", n_batch=n_batch)
    plain = tiny_llama("hybrid", n_batch=n_batch)
    llamakeep.attach(llm)
    prompt = tokens_of(40, 1)
    for _ in range(2):
        plain.reset()
        assert answer(llm, prompt, 4) == answer(plain, prompt, 4)


def test_attaching_again_and_again_keeps_nothing_alive(tiny_llama: Callable[..., Any]) -> None:
    llm = tiny_llama("attention")
    keepers = []
    for _ in range(5):
        keeper = llamakeep.attach(llm)
        keepers.append(weakref.ref(keeper))
        keeper.detach()
    del keeper
    gc.collect()
    assert [alive() for alive in keepers] == [None] * 5


def test_states_loaded_behind_the_keeper_are_not_trusted(pair: Callable[..., Pair]) -> None:
    both = pair("attention")
    prompt, other = tokens_of(100, 1), tokens_of(90, 2)
    both.ask(prompt, 4)
    state = both.llm.save_state()
    both.ask(other, 4)
    both.llm.load_state(state)
    assert both.ask(prompt, 4).tier == "ram"
    state.input_ids[:90] = other  # a state that lies about its tokens
    both.llm.load_state(state)
    both.ask(other, 4)


def test_a_cache_set_at_the_same_time_is_left_alone(
    pair: Callable[..., Pair], caplog: pytest.LogCaptureFixture
) -> None:
    from llama_cpp.llama_cache import LlamaRAMCache

    both = pair("attention")
    cache = LlamaRAMCache()
    both.llm.set_cache(cache)
    prompt = tokens_of(80, 1)
    with caplog.at_level(logging.WARNING, logger="llamakeep"):
        for _ in range(2):
            both.llm.create_completion(prompt=prompt, max_tokens=2)
            for _ in both.llm.create_completion(prompt=prompt, max_tokens=2, stream=True):
                assert both.llm.cache is cache
    assert both.llm.cache is cache
    assert cache.cache_size == 0
    assert len([r for r in caplog.records if "LlamaRAMCache" in r.message]) == 1
    both.keeper.detach()
    both.llm.create_completion(prompt=prompt, max_tokens=2)
    assert cache.cache_size > 0


def test_closing_the_model_ends_the_keeper(tiny_llama: Callable[..., Any]) -> None:
    llm = tiny_llama("hybrid")
    keeper = llamakeep.attach(llm)
    stream = llm.generate(tokens_of(50, 1), temp=0.0)
    next(stream)
    llm.close()
    with pytest.raises(llamakeep.KeeperClosed):
        next(stream)
    for call in (lambda: llm("x"), keeper.clear, keeper.set_lora):
        with pytest.raises(llamakeep.KeeperClosed, match="model is closed"):
            call()
    assert keeper.stats()["used_bytes"] == 0
    with pytest.raises(ModelError, match="is closed"):
        llamakeep.attach(llm)


def test_dropping_the_model_frees_it(tiny_model: Callable[[str], Any]) -> None:
    from llama_cpp import Llama

    llm = Llama(str(tiny_model("attention")), n_ctx=512, verbose=False)
    keeper = llamakeep.attach(llm)
    answer(llm, tokens_of(20, 1), 2)
    alive = weakref.ref(llm)
    gc.disable()
    try:
        del llm
        assert alive() is None  # without waiting for the garbage collector
    finally:
        gc.enable()
    with pytest.raises(llamakeep.KeeperClosed):
        keeper.clear()


def test_detach_gives_the_llama_back(pair: Callable[..., Pair]) -> None:
    both = pair("attention")
    prompt = tokens_of(70, 1)
    both.ask(prompt)
    with both.keeper:
        pass
    assert "generate" not in vars(both.llm)
    both.plain.reset()
    assert answer(both.llm, prompt) == answer(both.plain, prompt)
    with pytest.raises(llamakeep.KeeperClosed, match="detached"):
        both.keeper.clear()
    both.keeper.detach()
    again = llamakeep.attach(both.llm)
    answer(both.llm, prompt)
    assert again.last is not None


# -- room ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "capacity"), [("attention", 700_000), ("recurrent", 150_000), ("hybrid", 400_000)]
)
def test_a_small_capacity_is_never_passed_and_answers_stay_right(
    tiny_llama: Callable[..., Any], family: str, capacity: int
) -> None:
    plain, llm = tiny_llama(family), tiny_llama(family)
    keeper = llamakeep.attach(llm, capacity_bytes=capacity)
    common = tokens_of(150, 1)
    for seed in (2, 3, 4, 2, 5, 6, 2):
        prompt = common + tokens_of(150 + 31 * seed, seed)
        plain.reset()
        assert answer(llm, prompt, 6) == answer(plain, prompt, 6)
        keeper.check()
        stats = keeper.stats()
        assert stats["used_bytes"] <= capacity
    assert stats["evicted_bytes"] > 0
    assert keeper._tree.store.peak_bytes <= capacity


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"capacity_bytes": -1}, "capacity_bytes must be 0 or more, not -1"),
        ({"capacity_bytes": 1000}, "below one segment of 256 tokens"),
        ({"segment_tokens": 0}, "segment_tokens must be 1 or more, not 0"),
        ({"min_step": -5}, "min_step must be 0 or more, not -5"),
        ({"ctx_checkpoints": -1}, "ctx_checkpoints must be 0 or more, not -1"),
        ({"align": 0}, "align must be 1 or more, not 0"),
        (
            {"policy": "newest"},
            "unknown policy 'newest'; known: gdsf, hazard, lru, marginal, oldest",
        ),
        ({"policy": None}, "policy must be gdsf, .* or have a rank method, not None"),
        ({"capacity_bytes": "2G"}, "capacity_bytes must be a whole number, not '2G'"),
        ({"segment_tokens": 2.5}, "segment_tokens must be a whole number, not 2.5"),
        ({"ctx_checkpoints": True}, "ctx_checkpoints must be a whole number, not True"),
    ],
)
def test_bad_arguments_are_named_and_the_llama_still_works(
    tiny_llama: Callable[..., Any], options: dict[str, Any], said: str
) -> None:
    llm = tiny_llama("attention")
    with pytest.raises(llamakeep.InvalidValue, match=said):
        llamakeep.attach(llm, **options)
    assert len(answer(llm, tokens_of(20, 1), 3)) == 3
    llamakeep.attach(llm)
    with pytest.raises(llamakeep.InvalidValue, match="has a keeper already"):
        llamakeep.attach(llm)


def test_bad_prompts_are_named_and_nothing_is_lost(pair: Callable[..., Pair]) -> None:
    both = pair("attention", {"n_ctx": 512})
    prompt = tokens_of(100, 1)
    both.ask(prompt, 4)
    n_vocab = both.llm.n_vocab()
    for bad in (n_vocab, -1):
        with pytest.raises(llamakeep.TokenError, match=f"token {bad} at index 1 is outside"):
            answer(both.llm, [5, bad, 6], 1)
        with pytest.raises(llamakeep.TokenError, match=f"token {bad} at index 0"):
            both.llm.eval([bad])
    with pytest.raises(llamakeep.ContextOverflow, match="600 tokens exceed the context of 512"):
        answer(both.llm, tokens_of(600, 2), 1)
    with pytest.raises(ValueError, match="exceed context window"):
        both.llm.create_completion(prompt=tokens_of(600, 2))
    assert both.ask(prompt, 4).tier == "live"


def test_embedding_models_are_refused(tiny_llama: Callable[..., Any]) -> None:
    llm = tiny_llama("attention", embedding=True)
    with pytest.raises(ModelError, match="embedding=True"):
        llamakeep.attach(llm)
    assert len(llm.embed("still works")) > 0


def test_encoders_are_refused(
    tiny_llama: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import llama_cpp

    llm = tiny_llama("attention")
    monkeypatch.setattr(llama_cpp, "llama_model_has_encoder", lambda _: True)
    with pytest.raises(ModelError, match="has an encoder"):
        llamakeep.attach(llm)
    assert len(answer(llm, tokens_of(20, 1), 3)) == 3


def test_a_context_that_cannot_be_made_gives_the_old_one_back(
    tiny_llama: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = tiny_llama("attention")
    made = type(llm._ctx)

    class Fails(made):  # type: ignore[misc, valid-type]
        def __init__(self, *, params: Any, **rest: Any) -> None:
            if params.n_seq_max > 1:
                self._exit_stack = contextlib.ExitStack()
                raise ValueError("no memory for two")
            super().__init__(params=params, **rest)

    llm._ctx.__class__ = Fails
    with pytest.raises(ModelError, match="no memory for two"):
        llamakeep.attach(llm)
    assert len(answer(llm, tokens_of(20, 1), 3)) == 3


def test_what_is_no_llama_is_named(tiny_llama: Callable[..., Any]) -> None:
    with pytest.raises(llamakeep.InvalidValue, match=r"a llama_cpp\.Llama is needed, not str"):
        llamakeep.attach("model.gguf")
    llm = tiny_llama("attention")
    llm.model_params.vocab_only = True
    with pytest.raises(ModelError, match="vocab_only=True"):
        llamakeep.attach(llm)


def test_bad_adapters_are_named_and_those_before_stay(
    tiny_llama: Callable[..., Any], tiny_lora: Any, tiny_model: Callable[[str], Any]
) -> None:
    llm, other = tiny_llama("attention"), tiny_llama("hybrid")
    keeper, of_other = llamakeep.attach(llm), llamakeep.attach(other)
    prompt = tokens_of(40, 1)
    keeper.set_lora({tiny_lora: 1.0})
    expected = next_logits(llm, prompt)
    for adapters, said in (
        ("style.gguf", "given like"),
        (["style.gguf"], "given like"),
        (None, "given like"),
        ({tiny_lora: float("nan")}, "must be a finite number, not nan"),
        ({tiny_lora: "0.5"}, "must be a finite number, not '0.5'"),
        ({"missing.gguf": 1.0}, "cannot read missing.gguf"),
        ({tiny_model("attention"): 1.0}, "is not a LoRA adapter for this model"),
    ):
        with pytest.raises((llamakeep.InvalidValue, ModelError), match=said):
            keeper.set_lora(adapters)
    with pytest.raises(ModelError, match="is not a LoRA adapter for this model"):
        of_other.set_lora({tiny_lora: 1.0})
    assert np.abs(next_logits(llm, prompt) - expected).max() <= TOLERANCE
    assert len(answer(other, prompt, 4)) == 4


def test_a_policy_that_raises_costs_no_answer(
    tiny_llama: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    class Broken:
        name = "broken"

        def rank(self, *_: Any) -> Any:
            raise ZeroDivisionError("of the policy")

    llm, plain = tiny_llama("attention"), tiny_llama("attention")
    keeper = llamakeep.attach(llm, policy=Broken())
    prompt = tokens_of(60, 1)
    assert answer(llm, prompt, 6) == answer(plain, prompt, 6)
    assert keeper.stats()["failures"] == {"save": 1}
    assert "of the policy" in caplog.text


def test_stale_device_checkpoints_are_refused(tiny_llama: Callable[..., Any]) -> None:
    llm = tiny_llama("hybrid")
    keeper = llamakeep.attach(llm)
    runtime = keeper._runtime
    runtime.evaluate(0, np.array(tokens_of(20, 1), np.int32))
    first = runtime.read_device_checkpoint(0)
    runtime.evaluate(0, np.array(tokens_of(20, 2), np.int32))
    runtime.read_device_checkpoint(0)
    with pytest.raises(StateRejected, match="overwritten"):
        runtime.rewind(0, 20, first)


def test_progress_is_reported_while_a_prompt_is_evaluated(tiny_llama: Callable[..., Any]) -> None:
    llm = tiny_llama("attention", n_batch=64)
    keeper = llamakeep.attach(llm)
    seen: list[tuple[int, int]] = []
    keeper.on_progress = lambda done, total: seen.append((done, total))
    answer(llm, tokens_of(200, 1), 4)
    assert seen == [(0, 200), (64, 200), (128, 200), (192, 200), (200, 200)]

    def cancel(done: int, _total: int) -> None:
        if done:
            raise RuntimeError("cancelled by the user")

    keeper.on_progress = cancel
    with pytest.raises(RuntimeError, match=r"^cancelled by the user$") as raised:
        answer(llm, tokens_of(200, 2), 4)
    assert type(raised.value) is RuntimeError
    keeper.on_progress = None
    assert len(answer(llm, tokens_of(200, 2), 4)) == 4


def test_public_names_are_sorted_and_complete() -> None:
    assert llamakeep.__all__ == sorted(llamakeep.__all__)
    public = {name for name, value in vars(llamakeep).items() if isinstance(value, type)}
    assert public <= set(llamakeep.__all__)
