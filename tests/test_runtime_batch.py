"""Batches of several sequences, for the fake and for llama.cpp, in every memory family.

Recurrent memory splits a batch by sequences, and cells of all sequences lie between each other; so
what a sequence gives in company is compared with what it gives alone. On the tiny F32 models a
fault moves logits by 0.2 or more, rounding by 1e-3.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llamakeep.errors import (
    ContextOverflow,
    DecodeError,
    InvalidValue,
    KeeperClosed,
    NoRoom,
    TokenError,
)
from llamakeep.runtime.base import Family, Part, Runtime
from llamakeep.runtime.fake import FakeRuntime
from tests import tiny_models

N_CTX = 512
N_BATCH = 64
N_VOCAB = 4_000
N_SEQS = 3
TOLERANCE = 5e-3
ROUNDS = 6
ABORTS = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)

KINDS = [
    *(pytest.param(("fake", family.value), id=f"fake-{family.value}") for family in Family),
    *(
        pytest.param(("llama", family.value), id=f"llama-{family.value}", marks=pytest.mark.model)
        for family in Family
    ),
]
FAKES = KINDS[: len(Family)]
MODELS = KINDS[len(Family) :]


def make(kind: str, family: str, model_dir: Callable[[], Path], **options: Any) -> Runtime:
    sizes = {"n_ctx": N_CTX, "n_seqs": N_SEQS, "n_batch": N_BATCH} | options
    if kind == "fake":
        return FakeRuntime(family, n_vocab=N_VOCAB, **sizes)
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    from llamakeep.runtime.llama_cpp import LlamaCppRuntime

    path = model_dir() / tiny_models.model_file(family)
    return LlamaCppRuntime.load(path, n_threads=1, n_ubatch=32, **sizes)


@pytest.fixture(scope="module", params=KINDS)
def loaded(request: pytest.FixtureRequest) -> Iterator[Runtime]:
    runtime = make(*request.param, lambda: request.getfixturevalue("model_dir"))
    yield runtime
    runtime.close()


@pytest.fixture
def runtime(loaded: Runtime) -> Iterator[Runtime]:
    loaded.clear_all()
    yield loaded
    if isinstance(loaded, FakeRuntime):
        used = sum(seq.n_tokens for seq in loaded._sequences if seq.rows.size)
        assert loaded._cells.n_free == loaded.n_ctx - used
    loaded.clear_all()
    assert held(loaded) == [0] * loaded.n_seqs


def held(runtime: Runtime) -> list[int]:
    return [runtime.positions(seq_id).n_tokens for seq_id in range(runtime.n_seqs)]


def tokens_of(seed: int, n_tokens: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, N_VOCAB, n_tokens, dtype=np.int32)


PROMPTS = [tokens_of(1, 150), tokens_of(2, 31), tokens_of(3, 90)]


def alone(runtime: Runtime, prompt: np.ndarray, n_rounds: int = ROUNDS) -> list[np.ndarray]:
    """The logits after the prompt, and after each token of its greedy continuation."""
    runtime.clear_all()
    runtime.evaluate(0, prompt)
    found = [runtime.logits()]
    for _ in range(n_rounds):
        runtime.evaluate(0, np.array([found[-1].argmax()], np.int32))
        found.append(runtime.logits())
    runtime.clear_all()
    return found


def together(runtime: Runtime, order: list[int], n_rounds: int = ROUNDS) -> list[list[np.ndarray]]:
    """The same for all prompts at once: pieces of prompts share batches with decoded tokens."""
    todo = {seq_id: PROMPTS[seq_id] for seq_id in order}
    found: list[list[np.ndarray]] = [[] for _ in PROMPTS]
    while todo:
        parts = []
        for seq_id, tokens in todo.items():
            piece, todo[seq_id] = tokens[:17], tokens[17:]
            parts.append(Part(seq_id, piece, not todo[seq_id].size))
        for part, index in zip(parts, runtime.decode(parts), strict=True):
            assert (index is not None) == part.output
            if index is None:
                continue
            logits = runtime.logits_of(index)
            found[part.seq_id].append(logits)
            todo[part.seq_id] = logits.argmax(keepdims=True).astype(np.int32)
            if len(found[part.seq_id]) > n_rounds:
                del todo[part.seq_id]
    return found


def assert_same(runtime: Runtime, found: np.ndarray, expected: np.ndarray) -> None:
    atol = 0 if isinstance(runtime, FakeRuntime) else TOLERANCE
    np.testing.assert_allclose(found, expected, rtol=0, atol=atol)


# -- what comes out --------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]], ids=str)
def test_a_sequence_gives_in_company_what_it_gives_alone(
    runtime: Runtime, order: list[int]
) -> None:
    expected = [alone(runtime, prompt) for prompt in PROMPTS]
    found = together(runtime, order)
    for mine, cold in zip(found, expected, strict=True):
        assert [each.argmax() for each in mine] == [each.argmax() for each in cold]
        for logits, right in zip(mine, cold, strict=True):
            assert_same(runtime, logits, right)
    assert np.abs(expected[0][0] - expected[1][0]).max() > 0.2  # one for another would be noticed


def test_outputs_are_those_that_were_asked_for(runtime: Runtime) -> None:
    cold = [alone(runtime, prompt[:9], 0)[0] for prompt in PROMPTS]
    parts = [Part(2, PROMPTS[2][:9]), Part(0, PROMPTS[0][:5], False), Part(1, PROMPTS[1][:9])]
    first, none, last = runtime.decode(parts)
    assert none is None
    assert first is not None
    assert last is not None
    assert_same(runtime, runtime.logits_of(first), cold[2])
    assert_same(runtime, runtime.logits_of(last), cold[1])


def test_the_last_output_is_what_logits_gives(runtime: Runtime) -> None:
    _, index = runtime.decode([Part(1, PROMPTS[1][:7]), Part(0, PROMPTS[0][:5])])
    assert index is not None
    np.testing.assert_array_equal(runtime.logits(), runtime.logits_of(index))
    runtime.decode([Part(0, [1, 2], False)])
    with pytest.raises(InvalidValue, match="no logits"):
        runtime.logits()


def test_outputs_end_with_the_next_batch(runtime: Runtime) -> None:
    [index] = runtime.decode([Part(0, [1, 2, 3])])
    assert index is not None
    logits = runtime.logits_of(index)
    kept = logits.copy()
    assert runtime.decode([Part(1, [4])]) == [0]
    np.testing.assert_array_equal(logits, kept)  # a copy
    for gone in (index, -1, 1, N_BATCH, 10**6):
        with pytest.raises(InvalidValue, match=f"{gone} is no output"):
            runtime.logits_of(gone)


def test_nothing_to_do_is_no_batch(runtime: Runtime) -> None:
    [index] = runtime.decode([Part(0, [1, 2, 3])])
    assert runtime.decode([]) == []
    assert index is not None
    assert runtime.logits_of(index).size == runtime.n_vocab


def test_a_batch_can_be_full(runtime: Runtime) -> None:
    parts = [Part(0, tokens_of(4, N_BATCH - 2)), Part(1, [1]), Part(2, [2])]
    assert runtime.decode(parts) == [N_BATCH - 3, N_BATCH - 2, N_BATCH - 1]
    assert held(runtime) == [N_BATCH - 2, 1, 1]


# -- what does not fit -----------------------------------------------------------------------------

BAD: list[tuple[list[Part], type[Exception], str]] = [
    ([Part(0, [1]), Part(1, [N_VOCAB * 100])], TokenError, "index 0"),
    ([Part(0, [1]), Part(1, [-1])], TokenError, "-1"),
    ([Part(0, [1]), Part(1, "text")], TokenError, "str"),
    ([Part(0, [1]), Part(1, [])], InvalidValue, "no tokens for sequence 1"),
    ([Part(0, [1]), Part(0, [2])], InvalidValue, "sequence 0 is twice"),
    ([Part(0, [1]), Part(N_SEQS, [2])], InvalidValue, "seq_id 3"),
    ([Part(0, [1]), Part(-1, [2])], InvalidValue, "seq_id -1"),
    ([Part(0, [1]), Part(1, [2] * N_BATCH)], InvalidValue, "65 tokens exceed a batch of 64"),
    ([Part(0, [1]), Part(1, [2] * (N_CTX + 1))], ContextOverflow, "513 .* 512"),
]


@pytest.mark.parametrize(("parts", "error", "said"), BAD, ids=[said for _, _, said in BAD])
def test_what_does_not_fit_changes_nothing(
    runtime: Runtime, parts: list[Part], error: type[Exception], said: str
) -> None:
    [index] = runtime.decode([Part(0, PROMPTS[0][:20])])
    assert index is not None
    before = runtime.logits_of(index)
    with pytest.raises(error, match=said):
        runtime.decode(parts)
    assert held(runtime) == [20, 0, 0]
    np.testing.assert_array_equal(runtime.logits_of(index), before)


def test_a_sequence_ends_at_the_end_of_the_context(runtime: Runtime) -> None:
    runtime.evaluate(1, tokens_of(5, N_CTX - 1))
    with pytest.raises(ContextOverflow, match=r"513 .* 512"):
        runtime.decode([Part(0, [1]), Part(1, [1, 2])])
    assert held(runtime) == [0, N_CTX - 1, 0]


# -- what fails ------------------------------------------------------------------------------------


def test_without_room_no_sequence_changes(runtime: Runtime) -> None:
    if not runtime.traits.family.has_rows:
        pytest.skip("a recurrent state takes the same room for any number of tokens")
    expected = alone(runtime, PROMPTS[0], 0)[0]
    runtime.evaluate(0, PROMPTS[0][:140])
    runtime.evaluate(1, tokens_of(6, 300))
    runtime.evaluate(2, PROMPTS[1])
    before = [runtime.positions(seq_id) for seq_id in range(N_SEQS)]
    # The first compute graph of the batch has room, the second has not.
    parts = [Part(0, PROMPTS[0][140:]), Part(1, tokens_of(7, 30)), Part(2, [1, 2, 3])]
    with pytest.raises(NoRoom, match="returned 1 for 43 tokens of 512"):
        runtime.decode(parts)
    assert [runtime.positions(seq_id) for seq_id in range(N_SEQS)] == before
    with pytest.raises(InvalidValue, match="no output"):
        runtime.logits_of(9)
    [index] = runtime.decode(parts[:1])
    assert index is not None
    assert_same(runtime, runtime.logits_of(index), expected)


def test_evaluating_without_room_leaves_the_sequence_empty(runtime: Runtime) -> None:
    if not runtime.traits.family.has_rows:
        pytest.skip("a recurrent state takes the same room for any number of tokens")
    runtime.evaluate(0, tokens_of(6, 300))
    with pytest.raises(DecodeError, match="of 512") as failed:
        runtime.evaluate(1, tokens_of(7, 300))
    assert not isinstance(failed.value, NoRoom)
    assert held(runtime) == [300, 0, 0]


@pytest.mark.parametrize("loaded", FAKES, indirect=True)
def test_a_failure_of_the_fake_clears_the_sequences_of_the_batch(runtime: Runtime) -> None:
    assert isinstance(runtime, FakeRuntime)
    runtime.decode([Part(seq_id, [1, 2, 3]) for seq_id in range(N_SEQS)])
    runtime.fail("evaluate")
    with pytest.raises(DecodeError, match="injected") as failed:
        runtime.decode([Part(0, [4]), Part(2, [4])])
    left = check_left(runtime, failed.value, [0, 3, 0])
    runtime.fail("evaluate", error=NoRoom("injected"))
    with pytest.raises(NoRoom):
        runtime.decode([Part(0, [4]), Part(1, [4])])
    assert held(runtime) == left
    runtime.fail("evaluate")
    with pytest.raises(DecodeError):
        runtime.decode([Part(0, [4])])
    assert held(runtime) == left  # alone in a batch, a sequence spoils no other


def check_left(runtime: Runtime, error: DecodeError, left: list[int]) -> list[int]:
    """Recurrent states of other sequences are spoilt, too: see `spoils_others`."""
    assert not isinstance(error, NoRoom)
    assert error.cleared_all == runtime.traits.family.has_recurrent
    if error.cleared_all:
        left = [0] * runtime.n_seqs
    assert held(runtime) == left
    return left


@pytest.mark.parametrize("loaded", FAKES, indirect=True)
def test_a_batch_counts_as_one_call(runtime: Runtime) -> None:
    assert isinstance(runtime, FakeRuntime)
    before = runtime.calls.evaluate, runtime.calls.evaluated_tokens
    runtime.decode([Part(0, [1, 2, 3]), Part(1, [4])])
    assert (runtime.calls.evaluate, runtime.calls.evaluated_tokens) == (
        before[0] + 1,
        before[1] + 4,
    )


@pytest.mark.parametrize("loaded", MODELS, indirect=True)
def test_a_batch_that_is_aborted_is_cleared_and_what_is_left_is_right(runtime: Any) -> None:
    import llama_cpp

    expected = alone(runtime, PROMPTS[1], 0)[0]
    runtime.decode([Part(0, PROMPTS[0][:20]), Part(1, PROMPTS[1][:-1]), Part(2, [1, 2, 3])])
    calls: list[int] = []

    @ABORTS
    def abort(_: object) -> bool:
        calls.append(1)
        return True

    llama_cpp.llama_set_abort_callback(runtime._ctx, abort, None)
    try:
        with pytest.raises(DecodeError, match="llama_decode returned 2 for 60 tokens") as failed:
            runtime.decode([Part(0, tokens_of(8, 40)), Part(2, tokens_of(9, 20))])
    finally:
        llama_cpp.llama_set_abort_callback(runtime._ctx, ABORTS(), None)
    assert calls
    n_left = check_left(runtime, failed.value, [0, PROMPTS[1].size - 1, 0])[1]
    [index] = runtime.decode([Part(1, PROMPTS[1][n_left:])])
    assert_same(runtime, runtime.logits_of(index), expected)


@pytest.mark.parametrize("loaded", MODELS, indirect=True)
def test_no_room_is_not_believed_where_positions_changed(
    runtime: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import llama_cpp

    runtime.decode([Part(0, [1, 2]), Part(1, [3]), Part(2, [4])])
    decode = llama_cpp.llama_decode

    def evaluates_and_says_no(ctx: Any, batch: Any) -> int:
        assert decode(ctx, batch) == 0
        return 1

    monkeypatch.setattr(llama_cpp, "llama_decode", evaluates_and_says_no)
    with pytest.raises(DecodeError, match="returned 1") as failed:
        runtime.decode([Part(0, [5]), Part(2, [5, 6])])
    check_left(runtime, failed.value, [0, 1, 0])


@pytest.mark.parametrize("kind", [FAKES[0], MODELS[0]])
def test_a_closed_runtime_decodes_nothing(
    kind: tuple[str, str], request: pytest.FixtureRequest
) -> None:
    runtime = make(*kind, lambda: request.getfixturevalue("model_dir"))
    [index] = runtime.decode([Part(0, [1, 2])])
    assert index is not None
    runtime.close()
    with pytest.raises(KeeperClosed):
        runtime.decode([Part(0, [3])])
    with pytest.raises(KeeperClosed):
        runtime.logits_of(index)
