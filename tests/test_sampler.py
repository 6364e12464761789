"""How tokens are chosen: llama.cpp's own samplers, and the fake's beside them."""

from __future__ import annotations

import ctypes
import gc
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamakeep.errors import DecodeError, InvalidValue, KeeperClosed, TokenError
from llamakeep.runtime.base import Part, Runtime
from llamakeep.runtime.fake import FakeRuntime
from llamakeep.runtime.fake_text import candidates
from llamakeep.runtime.sampling import Settled, settle
from llamakeep.sampling import Sampling
from tests import tiny_models

KINDS = ["fake", pytest.param("llama", marks=pytest.mark.model)]
PROMPT = [11, 22, 33, 44, 55, 66]
GREEDY = Sampling(temperature=0)
LOOSE = Sampling(temperature=2, top_k=0, top_p=1, min_p=0, seed=7)


@pytest.fixture(scope="module", params=KINDS)
def loaded(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    runtime: Runtime
    if request.param == "fake":
        runtime = FakeRuntime("attention", n_ctx=512, n_seqs=3, n_vocab=700)
    else:
        pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
        from llamakeep.runtime.llama_cpp import LlamaCppRuntime

        path = request.getfixturevalue("model_dir") / tiny_models.model_file("attention")
        runtime = LlamaCppRuntime.load(path, n_ctx=512, n_seqs=3, n_threads=1)
    yield runtime
    runtime.close()


@pytest.fixture
def runtime(loaded: Runtime) -> Runtime:
    loaded.clear_all()
    return loaded


def output(runtime: Runtime, tokens: list[int] = PROMPT, seq_id: int = 0) -> int:
    runtime.clear(seq_id)
    [index] = runtime.decode([Part(seq_id, tokens)])
    assert index is not None
    return index


def answer(runtime: Runtime, sampling: Sampling, n_tokens: int = 12, beside: int = 0) -> list[int]:
    """An answer to the prompt, with other sequences in the same batches."""
    runtime.clear_all()
    sampler = runtime.sampler(sampling)
    sampler.accept(PROMPT)
    tokens, answered = PROMPT, []
    for step in range(n_tokens):
        others = [Part(1 + other, [step, 100 + other]) for other in range(beside)]
        *_, index = runtime.decode([*others, Part(0, tokens)])
        assert index is not None
        tokens = [sampler.sample(index)]
        answered += tokens
    sampler.close()
    return answered


def draws(runtime: Runtime, sampling: Sampling, n_draws: int = 200) -> set[int]:
    """Tokens that are chosen after the prompt; nothing is accepted between two of them."""
    index = output(runtime)
    sampler = runtime.sampler(sampling)
    found = {sampler.sample(index) for _ in range(n_draws)}
    sampler.close()
    return found


def best(runtime: Runtime, n_tokens: int) -> list[int]:
    logits = runtime.logits_of(output(runtime))
    return np.argsort(-logits)[:n_tokens].tolist()


# -- what is chosen --------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, -1.0])
def test_the_likeliest_token_is_taken(runtime: Runtime, temperature: float) -> None:
    assert draws(runtime, Sampling(temperature=temperature), 3) == set(best(runtime, 1))


def test_a_temperature_near_nothing_takes_the_likeliest(runtime: Runtime) -> None:
    assert draws(runtime, Sampling(temperature=1e-300), 5) == set(best(runtime, 1))


def test_filters_leave_only_what_they_should(runtime: Runtime) -> None:
    top = best(runtime, 3)
    assert draws(runtime, Sampling(temperature=9, top_k=3, top_p=1, min_p=0)) == set(top)
    one = {"temperature": 9, "top_k": 0}
    assert draws(runtime, Sampling(**one, top_p=0, min_p=0)) == {top[0]}
    assert draws(runtime, Sampling(**one, top_p=1, min_p=1)) == {top[0]}
    assert draws(runtime, Sampling(**one, top_p=0, min_p=1, min_keep=2)) == set(top[:2])
    assert len(draws(runtime, Sampling(**one, top_p=1, min_p=0))) > 20


def test_a_seed_gives_the_same_answer_again(runtime: Runtime) -> None:
    first = answer(runtime, LOOSE)
    assert answer(runtime, LOOSE) == first
    assert len(set(first)) > 3


@pytest.mark.parametrize("beside", [1, 2])
def test_a_seed_gives_the_same_answer_beside_others(runtime: Runtime, beside: int) -> None:
    alone = answer(runtime, LOOSE)
    assert answer(runtime, LOOSE, beside=beside) == alone


def test_other_seeds_and_no_seed_give_other_answers(runtime: Runtime) -> None:
    seeds = (7, 8, -1, -1)
    loose = {"temperature": 2, "top_k": 0, "top_p": 1, "min_p": 0}
    answers = [answer(runtime, Sampling(**loose, seed=seed)) for seed in seeds]
    assert len({tuple(each) for each in answers}) == len(seeds)


def test_a_bias_is_added(runtime: Runtime) -> None:
    first, second, third = best(runtime, 3)
    assert draws(runtime, Sampling(temperature=0, logit_bias=((300, 1e6),)), 1) == {300}
    not_first = Sampling(temperature=0, logit_bias=((first, -math.inf),))
    assert draws(runtime, not_first, 1) == {second}
    twice = Sampling(temperature=0, logit_bias=((first, -math.inf), (second, -50), (second, -50)))
    assert draws(runtime, twice, 1) == {third}


def test_the_end_is_never_sampled_where_it_is_to_be_ignored(runtime: Runtime) -> None:
    ends = [token for token in range(runtime.n_vocab) if runtime.vocab.is_end(token)]
    assert ends
    wanted = tuple((token, 1e6) for token in ends)
    assert draws(runtime, Sampling(temperature=0, logit_bias=wanted), 1) <= set(ends)
    ignored = Sampling(temperature=0, logit_bias=wanted, ignore_eos=True)
    assert draws(runtime, ignored, 1) == set(best(runtime, 1)) - set(ends)


def test_tokens_that_came_before_are_penalized(runtime: Runtime) -> None:
    first, second = best(runtime, 2)
    penalty = Sampling(temperature=0, presence_penalty=100.0, repeat_last_n=2)
    assert chosen_after(runtime, penalty, []) == first
    assert chosen_after(runtime, penalty, [first]) == second
    assert chosen_after(runtime, penalty, [first, 1, 2]) == first  # no longer recent
    everything = Sampling(temperature=0, presence_penalty=100.0, repeat_last_n=-1)
    assert chosen_after(runtime, everything, [first, *[1] * 400]) == second
    off = Sampling(temperature=0, presence_penalty=100.0, repeat_last_n=0)
    assert chosen_after(runtime, off, [first]) == first


def test_a_token_that_was_sampled_counts_as_one_before(runtime: Runtime) -> None:
    index = output(runtime)
    sampler = runtime.sampler(Sampling(temperature=0, frequency_penalty=100.0))
    assert [sampler.sample(index) for _ in range(3)] == best(runtime, 3)


def chosen_after(runtime: Runtime, sampling: Sampling, before: list[int]) -> int:
    index = output(runtime)
    sampler = runtime.sampler(sampling)
    sampler.accept(before)
    return sampler.sample(index)


def test_the_same_from_several_outputs(runtime: Runtime) -> None:
    prompts = [[5, 6, 7], [8, 9], [1, 2, 3, 4]]
    parts = [Part(seq_id, tokens) for seq_id, tokens in enumerate(prompts)]
    indices = [index for index in runtime.decode(parts) if index is not None]
    expected = [int(runtime.logits_of(index).argmax()) for index in indices]
    samplers = [runtime.sampler(GREEDY) for _ in prompts]
    pairs = list(zip(samplers, indices, strict=True))
    assert [sampler.sample(index) for sampler, index in reversed(pairs)] == expected[::-1]
    assert len(set(expected)) == 3


# -- what is refused -------------------------------------------------------------------------------


def test_only_outputs_of_the_last_batch_are_sampled(runtime: Runtime) -> None:
    """llama.cpp ends the process for others."""
    index = output(runtime)
    sampler = runtime.sampler(GREEDY)
    runtime.decode([Part(1, [1, 2], False)])
    for bad in (index, 0, 1, -1, 10**6):
        with pytest.raises(InvalidValue, match=f"{bad} is no output"):
            sampler.sample(bad)


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        (Sampling(presence_penalty=2e9), "presence_penalty .* not 2000000000.0"),
        (Sampling(frequency_penalty=-1e300), "frequency_penalty"),
        (Sampling(repeat_penalty=1e-40), "repeat_penalty"),
        (Sampling(repeat_penalty=1e40), "repeat_penalty"),
        (Sampling(logit_bias=((3, 1e39),)), "bias of token 3"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_numbers_that_no_float_holds_are_refused(
    runtime: Runtime, sampling: Sampling, said: str
) -> None:
    with pytest.raises(InvalidValue, match=said):
        runtime.sampler(sampling)


def test_extreme_numbers_choose_a_token(runtime: Runtime) -> None:
    for sampling in (
        Sampling(temperature=1e300),
        Sampling(
            temperature=1e-300,
            logit_bias=((5, 1e9),),
            frequency_penalty=-1e9,
            repeat_penalty=1e-9,
            top_k=0,
        ),
        Sampling(top_k=2**40, repeat_last_n=2**40, min_keep=2**40, frequency_penalty=1e9),
        Sampling(repeat_penalty=1e9, frequency_penalty=-1e9, repeat_last_n=-1),
        Sampling(repeat_penalty=1e-9),
        Sampling(logit_bias=((5, 1e9), (6, -1e300)), seed=2**40 + 5),
        Sampling(typical_p=0, top_k=0),
    ):
        index = output(runtime)
        sampler = runtime.sampler(sampling)
        sampler.accept(PROMPT * 20)
        assert 0 <= sampler.sample(index) < runtime.n_vocab


def test_tokens_outside_of_the_vocabulary_are_refused(runtime: Runtime) -> None:
    for bad in (-1, runtime.n_vocab):
        with pytest.raises(TokenError):
            runtime.sampler(Sampling(logit_bias=((bad, 1.0),)))
        with pytest.raises(TokenError):
            runtime.sampler(GREEDY).accept([1, bad])


def test_not_every_token_can_be_forbidden(runtime: Runtime) -> None:
    ends = {token for token in range(runtime.n_vocab) if runtime.vocab.is_end(token)}
    rest = tuple((token, -math.inf) for token in range(runtime.n_vocab) if token not in ends)
    assert draws(runtime, Sampling(logit_bias=rest), 5) <= ends
    with pytest.raises(InvalidValue, match="every token is forbidden"):
        runtime.sampler(Sampling(logit_bias=rest, ignore_eos=True))


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_refused(runtime: Runtime, broken: float) -> None:
    index = output(runtime)
    if isinstance(runtime, FakeRuntime):
        pytest.skip("the fake's logits are always numbers")
    runtime_: Any = runtime
    runtime_._output(index)[17] = broken
    sampler = runtime.sampler(LOOSE)
    with pytest.raises(DecodeError, match="no numbers"):
        sampler.sample(index)


def test_a_closed_sampler_chooses_nothing(runtime: Runtime) -> None:
    index = output(runtime)
    sampler = runtime.sampler(LOOSE)
    sampler.sample(index)
    sampler.close()
    sampler.close()
    with pytest.raises(KeeperClosed):
        sampler.sample(index)
    with pytest.raises(KeeperClosed):
        sampler.accept([1])


def test_a_sampler_outlives_its_runtime_and_chooses_nothing(
    tiny_model: Callable[[str], Any],
) -> None:
    from llamakeep.runtime.llama_cpp import LlamaCppRuntime

    loaded = LlamaCppRuntime.load(tiny_model("attention"), n_ctx=256, n_threads=1)
    for runtime in (FakeRuntime("attention"), loaded):
        index = output(runtime)
        sampler, other = runtime.sampler(LOOSE), runtime.sampler(GREEDY)
        runtime.close()
        with pytest.raises(KeeperClosed):
            sampler.sample(index)
        with pytest.raises(KeeperClosed):
            runtime.sampler(GREEDY)
        sampler.close()
        del other  # not closed, freed with the object


def test_native_memory_goes_with_the_sampler(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(runtime, FakeRuntime):
        pytest.skip("it has no native memory")
    import llama_cpp

    freed: list[Any] = []
    free = llama_cpp.llama_sampler_free
    monkeypatch.setattr(
        llama_cpp, "llama_sampler_free", lambda chain: (freed.append(chain), free(chain))
    )
    one, two = runtime.sampler(LOOSE), runtime.sampler(LOOSE)
    gone = weakref.ref(two)
    one.close()
    one.close()
    assert len(freed) == 1
    del two
    gc.collect()
    assert gone() is None
    assert len(freed) == 2


# -- the fake beside llama.cpp ---------------------------------------------------------------------

N_VOCAB = 1_500
PROBABILITIES = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0.01, 0.99))
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 0.8, 1.0, 3.0]),
    top_k=st.sampled_from([0, 1, 5, 40, 5_000]),
    top_p=PROBABILITIES,
    min_p=PROBABILITIES,
    typical_p=st.one_of(st.just(1.0), st.floats(0.05, 0.95)),
    repeat_penalty=st.sampled_from([1.0, 1.3, 0.7]),
    repeat_last_n=st.sampled_from([0, 3, 64, -1]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.25]),
    logit_bias=st.lists(st.tuples(st.integers(0, N_VOCAB - 1), st.floats(-9, 9)), max_size=4).map(
        tuple
    ),
    min_keep=st.sampled_from([0, 1, 3]),
)


def native(
    logits: np.ndarray, sampling: Sampling, settled: Settled, before: list[int]
) -> tuple[np.ndarray, np.ndarray]:
    """The candidates that llama.cpp's chain leaves, likeliest first, and their logits."""
    import llama_cpp

    from llamakeep.runtime.llama_sampler import new_chain

    data = (llama_cpp.llama_token_data * logits.size)()
    view = np.ctypeslib.as_array(data)
    view["id"], view["logit"] = np.arange(logits.size), logits
    found = llama_cpp.llama_token_data_array(data, logits.size, -1, False)
    chain = new_chain(sampling, settled, logits.size)
    for token in before:
        llama_cpp.llama_sampler_accept(chain, token)
    llama_cpp.llama_sampler_apply(chain, ctypes.byref(found))
    llama_cpp.llama_sampler_free(chain)
    left = view[: found.size]
    left = left[np.argsort(-left["logit"], kind="stable")]
    return left["id"].copy(), left["logit"].copy()


@pytest.mark.model
@given(sampling=SAMPLINGS, seed=st.integers(0, 2**31))
def test_the_fake_leaves_the_candidates_that_llama_cpp_leaves(
    sampling: Sampling, seed: int
) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    random = np.random.default_rng(seed)
    logits = random.normal(0, 3, N_VOCAB).astype(np.float32)
    before = random.integers(0, 200, 90).tolist()
    settled = settle(sampling, n_vocab=N_VOCAB, n_ctx=80, forbidden=())
    tokens, left = native(logits, sampling, settled, before)
    recent = Counter(before[len(before) - settled.last_n :])
    mine, my_logits = candidates(logits.copy(), sampling, settled, recent)
    if sampling.greedy:
        assert tokens[0] == mine[0]
        if not settled.last_n:  # then no list of candidates is made
            from llamakeep.runtime.llama_sampler import LlamaSampler

            plain = LlamaSampler(
                sampling, settled, n_vocab=N_VOCAB, output=lambda _: logits, context=lambda: None
            )
            assert plain.sample(0) == tokens[0]
        return
    # Sums are rounded otherwise, so that a filter may end one candidate sooner or later.
    n_same = min(tokens.size, mine.size)
    assert abs(tokens.size - mine.size) <= 1
    if sampling.typical_p == 1:
        np.testing.assert_array_equal(tokens[:n_same], mine[:n_same])
        np.testing.assert_allclose(left[:n_same], my_logits[:n_same], rtol=1e-5, atol=1e-5)
    else:
        assert len(set(tokens.tolist()) ^ set(mine.tolist())) <= 2
