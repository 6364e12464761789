"""Checkpoints of live sequences: save, find and restore step by step, in every memory family."""

from __future__ import annotations

import array
import ctypes
import dataclasses
import hashlib
import logging
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest

from llamakeep.errors import InvalidValue, TokenError
from llamakeep.llama_cache import checkpoint
from llamakeep.llama_cache.base import BaseLlamaCache
from llamakeep.llama_cache.hybrid import HybridCheckpoint, HybridCheckpointCache
from llamakeep.states import Positions
from tests.tiny_models import FAMILIES, N_VOCAB, WINDOW

if TYPE_CHECKING:
    from llama_cpp import Llama

TOKENS = np.random.default_rng(7).integers(1, N_VOCAB, 400).tolist()
OTHER = np.random.default_rng(8).integers(1, N_VOCAB, 400).tolist()
TOLERANCE = 5e-3
ON_DEVICE_FAMILIES = ("recurrent", "hybrid")


class Context:
    """A native context of several sequences on the model of a `Llama`."""

    def __init__(self, llm: Llama, n_seqs: int) -> None:
        import llama_cpp
        from llama_cpp._internals import LlamaContext

        self.native = llama_cpp
        params = llm.context_params
        params.n_seq_max, params.kv_unified = n_seqs, True
        self.context = LlamaContext(model=llm._model, params=params, verbose=False)
        self._n_vocab = llm.n_vocab()

    def positions(self, seq_id: int) -> tuple[int, int]:
        memory = self.context.memory
        return (
            self.native.llama_memory_seq_pos_min(memory, seq_id),
            self.native.llama_memory_seq_pos_max(memory, seq_id),
        )

    def evaluate(self, seq_id: int, tokens: list[int]) -> npt.NDArray[np.float32]:
        """Evaluate tokens behind those that the sequence holds; return the last logits."""
        start, n = self.positions(seq_id)[1] + 1, len(tokens)
        batch = self.native.llama_batch_init(n, 0, 1)
        batch.n_tokens = n
        for index, token in enumerate(tokens):
            batch.token[index], batch.pos[index] = token, start + index
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, seq_id
            batch.logits[index] = index == n - 1
        code = self.native.llama_decode(self.context.ctx, batch)
        self.native.llama_batch_free(batch)
        assert code == 0
        logits = self.native.llama_get_logits_ith(self.context.ctx, -1)
        return np.ctypeslib.as_array(logits, (self._n_vocab,)).copy()

    def remove_rows(self, seq_id: int, start: int, end: int) -> bool:
        """Remove positions by a raw call, which no cache hears of."""
        return bool(
            self.native.llama_memory_seq_rm(self.context.memory, seq_id, start, end),
        )


MakeContext = Callable[..., Context]


@pytest.fixture
def make_context(tiny_llama: Callable[..., Llama]) -> Iterator[MakeContext]:
    made: list[Context] = []

    def make(family: str = "hybrid", n_seqs: int = 1, **options: Any) -> Context:
        made.append(Context(tiny_llama(family, n_ctx=512, **options), n_seqs))
        return made[-1]

    yield make
    for context in made:
        context.context.close()


@pytest.fixture
def context(make_context: MakeContext) -> Context:
    """A hybrid context of one sequence."""
    return make_context()


def saved_at(cache: HybridCheckpointCache, context: Context, *ends: int, seq_id: int = 0) -> list:
    """Evaluate TOKENS up to each end in turn, and take a checkpoint there."""
    for end in ends:
        start = context.positions(seq_id)[1] + 1
        if end > start:
            context.evaluate(seq_id, TOKENS[start:end])
        assert cache.save_checkpoint(end, TOKENS[:end], seq_id)
    return cache.checkpoints[-len(ends) :]


class Counted:
    """A native function that notes its calls."""

    def __init__(self, native: Callable[..., Any]) -> None:
        self.native = native
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *args: Any) -> Any:
        self.calls.append(args)
        return self.native(*args)


def forbidden(*_: Any) -> Any:
    pytest.fail("llama.cpp was called")


def bare() -> HybridCheckpointCache:
    """A cache whose constructor did not run: its hash needs no context."""
    return object.__new__(HybridCheckpointCache)


# -- the interface -------------------------------------------------------------------------------


@pytest.mark.parametrize(("on_device", "flags"), [(False, 1), (True, 3)])
def test_attributes(context: Context, on_device: bool, flags: int) -> None:
    import llama_cpp

    cache = HybridCheckpointCache(context.context.ctx, on_device=on_device)
    assert cache._ctx == context.context.ctx
    assert (cache.on_device, cache.verbose, cache.max_checkpoints) == (on_device, False, 16)
    assert (cache.checkpoints, cache._current_size, cache.cache_size) == ([], 0, 0)
    assert cache._flags == flags
    assert cache._get_size_ext is llama_cpp.llama_state_seq_get_size_ext
    assert cache._get_data_ext is llama_cpp.llama_state_seq_get_data_ext
    assert cache._set_data_ext is llama_cpp.llama_state_seq_set_data_ext
    assert isinstance(cache, BaseLlamaCache)
    assert cache  # `Llama` asks so


def test_a_context_is_needed() -> None:
    with pytest.raises(ValueError, match="ctx is None"):
        HybridCheckpointCache(None)


@pytest.mark.parametrize("wrong", [0, -1, True, "ctx", 1.5, ctypes.c_void_p(None), object()])
def test_a_wrong_context_is_named(wrong: Any) -> None:
    with pytest.raises(InvalidValue, match="ctx must be a llama"):
        HybridCheckpointCache(wrong)


def test_a_closed_context_is_refused(context: Context) -> None:
    context.context.close()
    with pytest.raises(InvalidValue, match="closed"):
        HybridCheckpointCache(context.context)


@pytest.mark.parametrize("wrong", [1.5, "3", None, True])
def test_a_wrong_number_of_checkpoints_is_named(wrong: Any) -> None:
    with pytest.raises(InvalidValue, match="max_checkpoints"):
        HybridCheckpointCache(None, max_checkpoints=wrong)


def test_the_dictionary_interface_is_disabled(context: Context) -> None:
    cache = HybridCheckpointCache(context.context.ctx)
    text = "HybridCheckpointCache: pls use save_checkpoint or restore_checkpoint method"
    for use in (
        lambda: cache[[1]],
        lambda: cache.__setitem__([1], b""),
        lambda: [1] in cache,
    ):
        with pytest.raises(NotImplementedError) as caught:
            use()
        assert str(caught.value) == text


# -- the hash of a prefix ------------------------------------------------------------------------


def reference_hash(tokens: list[int], length: int) -> str:
    if length <= 0:
        return "empty"
    part = array.array("i", tokens[: min(length, len(tokens))])
    return hashlib.sha256(part.tobytes()).hexdigest()[:32]


def test_hashes_are_the_documented_ones() -> None:
    cache = bare()
    assert cache._hash_prefix([1, 2, 3, 4], 4) == "cf97adeedb59e05bfd73a2b4c2a88857"
    assert cache._hash_prefix([1, 2, 3, 4], 2) == "34fb5c825de7ca4aea6e712f19d439c1"
    assert cache._hash_prefix([0, 2**31 - 1], 2) == "b6d07a2a406a5dd243cf8c120962fb28"
    assert cache._hash_prefix([], 5) == "e3b0c44298fc1c149afbf4c8996fb924"
    assert cache._hash_prefix([1, 2], 9) == cache._hash_prefix([1, 2], 2)
    assert cache._hash_prefix([1, 2], 0) == cache._hash_prefix([1, 2], -3) == "empty"
    for length in range(-1, 70, 7):
        assert cache._hash_prefix(TOKENS[:60], length) == reference_hash(TOKENS[:60], length)


def test_tokens_may_be_lists_tuples_or_arrays() -> None:
    forms = (TOKENS, tuple(TOKENS), np.array(TOKENS), np.array(TOKENS, np.int32)[::1])
    strided = np.repeat(np.array(TOKENS, np.int32), 2)[::2]
    hashes = {bare()._hash_prefix(tokens, 100) for tokens in (*forms, strided)}
    assert hashes == {reference_hash(TOKENS, 100)}


@pytest.mark.parametrize("wrong", [[1, -5], [2**31], ["a"], [1.5], "text", [[1]]])
def test_wrong_tokens_are_named(context: Context, wrong: Any) -> None:
    cache = HybridCheckpointCache(context.context.ctx)
    saved_at(cache, context, 8)
    with pytest.raises(TokenError):
        cache._hash_prefix(wrong, 1)
    with pytest.raises(TokenError):
        cache.find_best_checkpoint(wrong)
    with pytest.raises(TokenError):
        cache.save_checkpoint(8, wrong)
    assert len(cache.checkpoints) == 1


# -- saving, step by step ------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [0, -1, -(2**40)])
def test_save_1_disabled_extracts_nothing(context: Context, limit: int) -> None:
    context.evaluate(0, TOKENS[:8])
    cache = HybridCheckpointCache(context.context.ctx, max_checkpoints=limit)
    cache._get_size_ext = cache._get_data_ext = cache._set_data_ext = forbidden
    cache._memory = None  # nothing else of llama.cpp either
    assert cache.save_checkpoint(8, TOKENS[:8]) is False
    assert cache.find_best_checkpoint(TOKENS) is None
    assert cache.checkpoints == []


def test_fault_57_save_2_device_mode_ends_older_ones(make_context: MakeContext) -> None:
    context = make_context(n_seqs=2)
    first = HybridCheckpointCache(context.context, on_device=True)
    second = HybridCheckpointCache(context.context, on_device=True)
    host = HybridCheckpointCache(context.context)
    (stale,) = saved_at(first, context, 8)
    (other,) = saved_at(first, context, 8, seq_id=1)
    (kept,) = saved_at(host, context, 8)
    (newer,) = saved_at(second, context, 16)
    assert first.checkpoints == [other]
    assert (host.checkpoints, second.checkpoints) == ([kept], [newer])
    (newest,) = saved_at(second, context, 16)
    assert second.checkpoints == [newest]
    assert second.checkpoints[0] is newest
    assert second.cache_size == newest.size
    assert not first.restore_checkpoint(stale)
    assert not second.restore_checkpoint(newer)
    assert second.restore_checkpoint(newest)


def test_save_2_comes_before_the_slot_is_overwritten(context: Context) -> None:
    cache = HybridCheckpointCache(context.context, on_device=True)
    saved_at(cache, context, 8)
    seen: list[int] = []
    native = cache._get_data_ext

    def read(*args: Any) -> int:
        seen.append(len(cache.checkpoints))
        return native(*args)

    cache._get_data_ext = read
    assert cache.save_checkpoint(8, TOKENS[:8])
    assert seen == [0]


def test_save_2_host_mode_keeps_them(context: Context) -> None:
    cache = HybridCheckpointCache(context.context)
    saved_at(cache, context, 8, 16, 24)
    assert [cp.pos for cp in cache.checkpoints] == [8, 16, 24]


@pytest.mark.parametrize("on_device", [False, True])
def test_save_3_to_7_what_is_read(context: Context, on_device: bool) -> None:
    cache = HybridCheckpointCache(context.context.ctx, on_device=on_device)
    flags = 3 if on_device else 1
    cache._get_size_ext = sizes = Counted(cache._get_size_ext)
    cache._get_data_ext = reads = Counted(cache._get_data_ext)
    (cp,) = saved_at(cache, context, 16)
    assert sizes.calls == [(cache._ctx, 0, flags)]
    ((ctx, buffer, size, seq_id, used),) = reads.calls
    assert (ctx, size, seq_id, used) == (cache._ctx, cp.size, 0, flags)
    assert isinstance(buffer, ctypes.Array)
    assert buffer._type_ is ctypes.c_uint8
    assert type(cp.data) is bytes
    assert cp.data == bytes(buffer)
    assert cp.size == len(cp.data)


def test_save_4_no_size_is_no_checkpoint(context: Context) -> None:
    cache = HybridCheckpointCache(context.context.ctx)
    context.evaluate(0, TOKENS[:8])
    cache._get_size_ext = lambda *_: 0
    cache._get_data_ext = forbidden
    assert cache.save_checkpoint(8, TOKENS[:8]) is False
    assert (cache.checkpoints, cache.cache_size) == ([], 0)


@pytest.mark.parametrize("off", [-1, 1])
def test_save_6_an_unexpected_size_is_no_checkpoint(context: Context, off: int) -> None:
    cache = HybridCheckpointCache(context.context.ctx)
    saved_at(cache, context, 8)
    native = cache._get_data_ext
    cache._get_data_ext = lambda *args: native(*args) + off
    assert cache.save_checkpoint(8, TOKENS[:8]) is False
    assert len(cache.checkpoints) == 1


def test_save_5_no_memory_is_no_checkpoint(context: Context) -> None:
    cache = HybridCheckpointCache(context.context.ctx)
    context.evaluate(0, TOKENS[:8])
    cache._get_size_ext = lambda *_: 2**62
    cache._get_data_ext = forbidden
    assert cache.save_checkpoint(8, TOKENS[:8]) is False


def test_save_8_to_10_what_is_kept(context: Context) -> None:
    cache = HybridCheckpointCache(context.context.ctx)
    first, second = saved_at(cache, context, 16, 40)
    assert [cp.pos for cp in cache.checkpoints] == [16, 40]
    assert first.hash_val == reference_hash(TOKENS, 16)
    assert (first.seq_id, first.pos_min, first.pos_max) == (0, 15, 15)
    assert second.pos_max == 39
    assert cache._current_size == cache.cache_size == first.size + second.size


def test_save_11_the_oldest_go_first(context: Context) -> None:
    cache = HybridCheckpointCache(context.context.ctx, max_checkpoints=2)
    saved_at(cache, context, 8, 16, 24, 32)
    assert [cp.pos for cp in cache.checkpoints] == [24, 32]
    assert cache.cache_size == sum(cp.size for cp in cache.checkpoints)
    cache.max_checkpoints = 1
    cache._evict_checkpoints_if_needed()
    assert [cp.pos for cp in cache.checkpoints] == [32]


def test_eviction_by_itself() -> None:
    cache = bare()
    cache._records, cache.verbose, cache.max_checkpoints = {}, False, 1
    cache.checkpoints = [HybridCheckpoint(n, b"", "", 10, 0) for n in range(3)]
    cache._current_size = 15
    cache._evict_checkpoints_if_needed()
    assert [cp.pos for cp in cache.checkpoints] == [2]
    assert cache._current_size == 0  # never below


def test_an_empty_sequence_is_not_saved(family: str, make_context: MakeContext) -> None:
    cache = HybridCheckpointCache(make_context(family).context)
    cache._get_data_ext = forbidden
    assert cache.save_checkpoint(0, []) is False


@pytest.mark.parametrize("seq_id", [-1, 2, 10**6, 1.0, True])
def test_a_sequence_that_does_not_exist_is_named(make_context: MakeContext, seq_id: Any) -> None:
    context = make_context(n_seqs=2)
    cache = HybridCheckpointCache(context.context.ctx)
    context.evaluate(0, TOKENS[:8])
    with pytest.raises(InvalidValue, match=f"seq_id.*{seq_id}"):
        cache.save_checkpoint(8, TOKENS[:8], seq_id)


@pytest.mark.parametrize("current_pos", [-1, 1.5, None, True])
def test_a_wrong_position_is_named(context: Context, current_pos: Any) -> None:
    context.evaluate(0, TOKENS[:8])
    cache = HybridCheckpointCache(context.context.ctx)
    with pytest.raises(InvalidValue, match="current_pos"):
        cache.save_checkpoint(current_pos, TOKENS[:8])


def test_a_position_past_the_tokens_is_never_found(context: Context) -> None:
    cache = HybridCheckpointCache(context.context.ctx)
    context.evaluate(0, TOKENS[:16])
    assert cache.save_checkpoint(16, TOKENS[:12])
    (cp,) = cache.checkpoints
    assert cp.hash_val == reference_hash(TOKENS, 12)
    for tokens in (TOKENS[:12], TOKENS[:16], TOKENS, TOKENS[:12] + OTHER):
        assert cache.find_best_checkpoint(tokens) is None
    assert cache.restore_checkpoint(cp)  # it is what was saved, all the same


# -- finding, step by step -----------------------------------------------------------------------


def test_find_1_nothing_there(context: Context) -> None:
    cache = HybridCheckpointCache(context.context.ctx)
    assert cache.find_best_checkpoint(TOKENS) is None
    saved_at(cache, context, 8)
    cache.max_checkpoints = 0
    assert cache.find_best_checkpoint(TOKENS) is None


def test_find_2_other_sequences_are_passed_over(make_context: MakeContext) -> None:
    context = make_context(n_seqs=2)
    cache = HybridCheckpointCache(context.context.ctx)
    saved_at(cache, context, 8)
    saved_at(cache, context, 16, seq_id=1)
    found = [cache.find_best_checkpoint(TOKENS, seq_id) for seq_id in (0, 1, 2, -1)]
    assert [cp and cp.pos for cp in found] == [8, 16, None, None]


def test_find_3_longer_ones_are_passed_over(context: Context) -> None:
    cache = HybridCheckpointCache(context.context.ctx)
    saved_at(cache, context, 8, 16)
    found = [cache.find_best_checkpoint(TOKENS[:n]) for n in (7, 8, 15, 16, 17)]
    assert [cp and cp.pos for cp in found] == [None, 8, 8, 16, 16]


def test_find_4_other_tokens_are_passed_over(context: Context) -> None:
    cache = HybridCheckpointCache(context.context.ctx)
    saved_at(cache, context, 8, 16)
    found = cache.find_best_checkpoint(TOKENS[:15] + OTHER)
    assert found is cache.checkpoints[0]
    assert cache.find_best_checkpoint(OTHER) is None


def test_find_5_the_longest_and_newest(context: Context) -> None:
    cache = HybridCheckpointCache(context.context.ctx)
    saved_at(cache, context, 8, 16, 16)
    assert cache.find_best_checkpoint(np.array(TOKENS)) is cache.checkpoints[2]
    assert cache.find_best_checkpoint(tuple(TOKENS[:12])) is cache.checkpoints[0]


def test_a_lookup_hashes_each_token_once(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = HybridCheckpointCache(context.context.ctx)
    saved_at(cache, context, *range(8, 136, 8), 128)
    assert len(cache.checkpoints) == 16
    hashed: list[int] = []

    class Sha256:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def update(self, data: Any) -> None:
            hashed.append(memoryview(data).nbytes)
            self.inner.update(data)

        def copy(self) -> Sha256:
            return Sha256(self.inner.copy())

        def hexdigest(self) -> str:
            return str(self.inner.hexdigest())

    real = hashlib.sha256
    monkeypatch.setattr(checkpoint.hashlib, "sha256", lambda: Sha256(real()))
    assert cache.find_best_checkpoint(TOKENS) is cache.checkpoints[-1]
    assert sum(hashed) == 128 * 4


# -- restoring, step by step ---------------------------------------------------------------------


def refused(cache: HybridCheckpointCache, context: Context, cp: Any, seq_id: int = 0) -> bool:
    """Whether a restore is refused before llama.cpp sees it, and changes nothing."""
    before = (list(cache.checkpoints), cache.cache_size, context.positions(0))
    set_data, cut = cache._set_data_ext, cache._memory and cache._memory.cut
    cache._set_data_ext = forbidden
    if cache._memory is not None:
        cache._memory.cut = forbidden
    try:
        answer = cache.restore_checkpoint(cp, seq_id)
    finally:
        cache._set_data_ext = set_data
        if cache._memory is not None:
            cache._memory.cut = cut
    assert before == (list(cache.checkpoints), cache.cache_size, context.positions(0))
    return answer is False


def test_restore_1_another_sequence(make_context: MakeContext) -> None:
    context = make_context(n_seqs=2)
    cache = HybridCheckpointCache(context.context.ctx)
    (cp,) = saved_at(cache, context, 8)
    context.evaluate(1, TOKENS[:16])
    for seq_id in (1, 2, -1):
        assert refused(cache, context, cp, seq_id)
    assert cache.restore_checkpoint(cp)


@pytest.mark.parametrize("on_device", [False, True])
def test_restore_2_not_registered(make_context: MakeContext, on_device: bool) -> None:
    context = make_context()
    cache = HybridCheckpointCache(context.context, on_device=on_device)
    (cp,) = saved_at(cache, context, 8)
    assert refused(cache, context, dataclasses.replace(cp))  # equal, yet another object
    cache.clear()
    assert refused(cache, context, cp)
    (cp,) = saved_at(cache, context, 8)
    cache.max_checkpoints = 0
    cache._evict_checkpoints_if_needed()
    assert refused(cache, context, cp)
    cache.max_checkpoints = 4
    (cp,) = saved_at(cache, context, 8)
    elsewhere = HybridCheckpointCache(context.context, on_device=on_device)
    assert refused(elsewhere, context, cp)
    cache.close()
    assert cache.restore_checkpoint(cp) is False


def test_restore_2_put_in_by_hand(context: Context) -> None:
    cache = HybridCheckpointCache(context.context.ctx)
    (cp,) = saved_at(cache, context, 8)
    forged = dataclasses.replace(cp, pos=400)
    legacy = HybridCheckpoint(8, cp.data, cp.hash_val, cp.size, 0)
    cache.checkpoints[:] = [forged, legacy]
    assert refused(cache, context, forged)
    assert refused(cache, context, legacy)
    assert refused(cache, context, cp)  # no longer listed
    assert cache.find_best_checkpoint(TOKENS) is None
    assert cache._records == {}


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        {"data": b"\0" * 8},
        {"pos_max": 40},
        {"pos_max": None},
        {"pos_min": 0},
        {"pos": 9},
        {"size": 8},
        {"hash_val": "empty"},
    ],
    ids=lambda change: "-".join(change),
)
def test_fault_69_a_changed_checkpoint_is_refused(
    context: Context, on_device: bool, change: dict[str, Any]
) -> None:
    cache = HybridCheckpointCache(context.context.ctx, on_device=on_device)
    (cp,) = saved_at(cache, context, 16)
    before = dataclasses.asdict(cp)
    for name, value in change.items():
        setattr(cp, name, value)
    assert refused(cache, context, cp)
    assert cache.find_best_checkpoint(TOKENS) is None
    for name in change:
        setattr(cp, name, before[name])
    assert cache.restore_checkpoint(cp)


def test_equal_bytes_are_not_the_same_bytes(context: Context) -> None:
    cache = HybridCheckpointCache(context.context.ctx)
    (cp,) = saved_at(cache, context, 16)
    cp.data = bytes(bytearray(cp.data))
    assert refused(cache, context, cp)


@pytest.mark.parametrize("at", [0, 4], ids=["magic", "sequence"])
def test_fault_69_what_llama_cpp_wrote_in_another_form_is_refused(
    context: Context, at: int, caplog: pytest.LogCaptureFixture
) -> None:
    cache = HybridCheckpointCache(context.context.ctx)
    native = cache._get_data_ext

    def read(ctx: Any, buffer: Any, *rest: Any) -> int:
        written = native(ctx, buffer, *rest)
        buffer[at] ^= 1
        return int(written)

    cache._get_data_ext = read
    (cp,) = saved_at(cache, context, 16)
    with caplog.at_level(logging.DEBUG, "llamakeep"):
        assert refused(cache, context, cp)
    assert "state begins with" in caplog.text or "state is of sequence 1" in caplog.text


def test_restore_3_and_4_another_size(context: Context) -> None:
    cache = HybridCheckpointCache(context.context.ctx)
    (cp,) = saved_at(cache, context, 16)
    native = cache._get_size_ext
    for off in (-1, 1):
        cache._get_size_ext = sizes = Counted(lambda *args, off=off: native(*args) + off)
        assert refused(cache, context, cp)
        assert sizes.calls == [(cache._ctx, 0, 1)]
    cache._get_size_ext = native
    assert cache.restore_checkpoint(cp)


def test_the_sequence_must_still_reach_the_checkpoint(
    family: str, make_context: MakeContext
) -> None:
    context = make_context(family)
    cache = HybridCheckpointCache(context.context.ctx)
    (cp,) = saved_at(cache, context, 40)
    context.native.llama_memory_clear(context.context.memory, True)  # by a raw call
    assert refused(cache, context, cp)
    context.evaluate(0, OTHER[:39])
    assert refused(cache, context, cp)


@pytest.mark.parametrize("on_device", [False, True])
def test_restore_5_to_7_what_is_called(context: Context, on_device: bool) -> None:
    cache = HybridCheckpointCache(context.context.ctx, on_device=on_device)
    (cp,) = saved_at(cache, context, 16)
    context.evaluate(0, OTHER[:16])
    cache._set_data_ext = writes = Counted(cache._set_data_ext)
    cache._memory.cut = cuts = Counted(cache._memory.cut)
    assert cache.restore_checkpoint(cp) is True
    ((ctx, source, size, seq_id, flags),) = writes.calls
    assert (ctx, size, seq_id, flags) == (cache._ctx, cp.size, 0, 3 if on_device else 1)
    assert ctypes.string_at(source, size) == cp.data
    assert cuts.calls == [(0, cp.pos_max + 1)]
    assert context.positions(0)[1] == 15


def test_restore_8_later_ones_go_in_every_cache(make_context: MakeContext) -> None:
    context = make_context(n_seqs=2)
    cache = HybridCheckpointCache(context.context)
    other = HybridCheckpointCache(context.context)
    early, middle = saved_at(cache, context, 16, 24)
    saved_at(other, context, 24, 32)
    saved_at(cache, context, 32)
    saved_at(other, context, 40, seq_id=1)
    assert cache.restore_checkpoint(middle)
    assert cache.checkpoints == [early, middle]
    assert [(cp.seq_id, cp.pos) for cp in other.checkpoints] == [(0, 24), (1, 40)]
    assert cache.restore_checkpoint(middle)  # again
    assert other.restore_checkpoint(other.checkpoints[0])
    assert cache.restore_checkpoint(early)
    assert [cp.pos for cp in other.checkpoints] == [40]


def broken(cache: HybridCheckpointCache, way: str) -> None:
    """Make the native side of a restore fail."""
    memory = cache._memory
    assert memory is not None
    if way == "short":
        native = cache._set_data_ext
        cache._set_data_ext = lambda *args: native(*args) - 1
    elif way == "nothing":
        cache._set_data_ext = lambda *_: 0
    elif way == "not cut":
        cut = memory.cut
        memory.cut = lambda seq_id, start: start < 0 and cut(seq_id, start)
    elif way == "cut too far":
        real = memory.cut
        memory.cut = lambda seq_id, start: real(seq_id, start - 1) or True
    elif way == "moved":
        write, positions = cache._set_data_ext, memory.positions

        def move(*args: Any) -> int:
            memory.positions = lambda seq_id: Positions(3, positions(seq_id).pos_max + 1)
            return write(*args)

        cache._set_data_ext = move
    else:

        def fail(*_: Any) -> int:
            raise KeyboardInterrupt

        cache._set_data_ext = fail


@pytest.mark.parametrize(
    "way", ["short", "nothing", "not cut", "cut too far", "moved", "interrupt"]
)
@pytest.mark.parametrize("n_seqs", [1, 2])
def test_restore_9_a_failure_ends_the_sequence(
    make_context: MakeContext, way: str, n_seqs: int, caplog: pytest.LogCaptureFixture
) -> None:
    context = make_context(n_seqs=n_seqs)
    cache = HybridCheckpointCache(context.context)
    other = HybridCheckpointCache(context.context)
    early, cp = saved_at(cache, context, 8, 16)
    saved_at(other, context, 16)
    if n_seqs == 2:
        (kept,) = saved_at(other, context, 24, seq_id=1)
        context.evaluate(1, TOKENS[24:40])
    context.evaluate(0, OTHER[:16])
    broken(cache, way)
    if way == "interrupt":
        with pytest.raises(KeyboardInterrupt):
            cache.restore_checkpoint(cp)
    else:
        assert cache.restore_checkpoint(cp) is False
        assert any("failed" in record.message for record in caplog.records)
    assert cache.checkpoints == []
    assert cache.cache_size == 0
    assert context.positions(0) == (-1, -1)
    assert not cache.restore_checkpoint(early)
    if n_seqs == 2:
        assert other.checkpoints == [kept]
        assert context.positions(1)[1] == 39
        assert other.restore_checkpoint(kept, 1)
    else:
        assert other.checkpoints == []


def test_restore_8_and_9_without_tracking(context: Context) -> None:
    cache = HybridCheckpointCache(context.context.ctx)
    early, _ = saved_at(cache, context, 8, 16)
    assert cache.restore_checkpoint(early)
    assert cache.checkpoints == [early]
    broken(cache, "nothing")
    assert not cache.restore_checkpoint(early)
    assert cache.checkpoints == []


def test_what_is_not_known_to_be_empty_is_cleared(context: Context) -> None:
    context.evaluate(0, TOKENS[:8])
    cache = HybridCheckpointCache(context.context.ctx)
    assert cache._memory is not None
    assert cache._memory.empty_bytes is None  # no sequence was, when the cache was made
    (cp,) = saved_at(cache, context, 8)
    broken(cache, "short")
    assert not cache.restore_checkpoint(cp)
    assert context.positions(0) == (-1, -1)


def test_what_cannot_be_cleaned_is_cleared_with_everything(make_context: MakeContext) -> None:
    context = make_context(n_seqs=2)
    cache = HybridCheckpointCache(context.context)
    (cp,) = saved_at(cache, context, 8)
    saved_at(cache, context, 8, seq_id=1)
    memory = cache._memory
    assert memory is not None
    memory.empty_bytes = 1  # no sequence is ever that small: as if rows stayed
    broken(cache, "nothing")
    assert cache.restore_checkpoint(cp) is False
    assert cache.checkpoints == []
    assert context.positions(1) == (-1, -1)


@pytest.mark.parametrize("family", ["hybrid", "swa"])
def test_a_missing_row_is_noticed(make_context: MakeContext, family: str) -> None:
    context = make_context(family)
    cache = HybridCheckpointCache(context.context)
    saved_at(cache, context, 40, 160)
    assert context.remove_rows(0, 10, 20)  # a raw call: no cache hears of it
    assert context.positions(0)[1] == 159
    assert cache.restore_checkpoint(cache.checkpoints[1]) is False
    assert context.positions(0) == (-1, -1)
    assert cache.checkpoints == []


def test_restore_10_what_is_no_checkpoint(context: Context) -> None:
    cache = HybridCheckpointCache(context.context.ctx)
    for wrong in (None, b"", "cp"):
        with pytest.raises(InvalidValue, match="HybridCheckpoint"):
            cache.restore_checkpoint(wrong)


# -- right answers -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "swa_full"),
    [(family, True) for family in FAMILIES] + [("swa", False), ("hybrid-swa", False)],
)
def test_a_restore_continues_as_if_nothing_had_happened(
    family: str, make_context: MakeContext, swa_full: bool
) -> None:
    context = make_context(family, swa_full=swa_full)
    cache = HybridCheckpointCache(context.context)
    ends = (24, 32, 160)  # inside the window, and past it
    cold = []
    for start, end in zip((0, *ends), ends, strict=False):
        context.evaluate(0, TOKENS[start:end])
        cache.save_checkpoint(end, TOKENS[:end])
    for end in reversed(ends):
        fresh = make_context(family, swa_full=swa_full)
        for start, stop in zip((0, *ends), ends, strict=False):
            if stop <= end:
                fresh.evaluate(0, TOKENS[start:stop])
        cold.append(fresh.evaluate(0, OTHER[:8]))
    context.evaluate(0, TOKENS[160 : 160 + WINDOW + 40])
    for end, expected in zip(reversed(ends), cold, strict=True):
        cp = cache.find_best_checkpoint(TOKENS[:end] + OTHER)
        assert cp is not None
        assert cp.pos == end
        for _ in range(2):
            assert cache.restore_checkpoint(cp)
            warm = context.evaluate(0, OTHER[:8])
            np.testing.assert_allclose(warm, expected, atol=TOLERANCE, rtol=0)
            if "swa" not in family:
                assert np.array_equal(warm, expected)


def test_a_llama_goes_back_and_on(tiny_llama: Callable[..., Llama], family: str) -> None:
    def logits(llm: Llama) -> npt.NDArray[np.float32]:
        pointer = llm._ctx.get_logits_ith(-1)
        return np.ctypeslib.as_array(pointer, (llm.n_vocab(),)).copy()

    llm, cold = (tiny_llama(family, n_ctx=512) for _ in range(2))
    for part in (TOKENS[:64], OTHER[:8]):
        cold.eval(part)
    cache = HybridCheckpointCache(llm)
    llm.eval(TOKENS[:64])
    assert cache.save_checkpoint(llm.n_tokens, TOKENS[:64])
    llm.eval(TOKENS[64:120])
    cp = cache.find_best_checkpoint(TOKENS[:64] + OTHER)
    assert cp is not None
    assert cache.restore_checkpoint(cp)
    llm.n_tokens = cp.pos
    llm.eval(OTHER[:8])
    np.testing.assert_allclose(logits(llm), logits(cold), atol=TOLERANCE, rtol=0)
    assert cache.checkpoints == [cp]


def test_a_llama_is_reset_when_a_restore_fails(
    tiny_llama: Callable[..., Llama], family: str
) -> None:
    # It would go on behind tokens that are gone, and llama.cpp would decode that without an error.
    llm = tiny_llama(family, n_ctx=512)
    cold = list(zip(range(3), llm.generate(TOKENS[:60], temp=0.0), strict=False))
    llm.reset()
    cache = HybridCheckpointCache(llm)
    llm.eval(TOKENS[:40])
    assert cache.save_checkpoint(40, TOKENS[:40])
    llm.eval(TOKENS[40:60])
    broken(cache, "short")
    assert not cache.restore_checkpoint(cache.checkpoints[0])
    assert llm.n_tokens == 0
    assert list(zip(range(3), llm.generate(TOKENS[:60], temp=0.0), strict=False)) == cold


def test_sequences_do_not_mix(make_context: MakeContext) -> None:
    context = make_context(n_seqs=3)
    cache = HybridCheckpointCache(context.context)
    for seq_id in (0, 1):
        saved_at(cache, context, 32, seq_id=seq_id)
        context.evaluate(seq_id, OTHER[:16])
    first, second = cache.checkpoints
    assert cache.restore_checkpoint(second, 1)
    assert context.positions(0)[1] == 47
    assert cache.restore_checkpoint(first, 0)
    warm = [context.evaluate(seq_id, OTHER[16:24]) for seq_id in (0, 1)]
    np.testing.assert_allclose(*warm, atol=TOLERANCE, rtol=0)


# -- device mode ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ON_DEVICE_FAMILIES)
def test_device_mode_keeps_the_tensors_in_the_context(make_context: MakeContext, name: str) -> None:
    context = make_context(name)
    host = HybridCheckpointCache(context.context)
    device = HybridCheckpointCache(context.context, on_device=True)
    (in_host,) = saved_at(host, context, 32)
    (on_device,) = saved_at(device, context, 32)
    assert device.cache_size == on_device.size == len(on_device.data)
    assert on_device.size < in_host.size / 10
    results = []
    for cache, cp in ((host, in_host), (device, on_device)) * 2:
        context.evaluate(0, TOKENS[32:72])
        assert cache.restore_checkpoint(cp)
        results.append(context.evaluate(0, OTHER[:8]))
    assert all(np.array_equal(result, results[0]) for result in results)


@pytest.mark.parametrize("name", ["attention", "swa", "hybrid-swa"])
def test_rows_are_not_left_on_the_device(
    make_context: MakeContext, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    context = make_context(name)
    cache = HybridCheckpointCache(context.context, on_device=True)
    cache._get_size_ext = cache._get_data_ext = forbidden
    context.evaluate(0, TOKENS[:16])
    with caplog.at_level(logging.DEBUG, "llamakeep"):
        assert cache.save_checkpoint(16, TOKENS[:16]) is False
    assert f"cannot leave {name} memory on the device" in caplog.text


def test_two_caches_of_a_raw_pointer_share_the_device(context: Context) -> None:
    one, two = (HybridCheckpointCache(context.context.ctx, on_device=True) for _ in range(2))
    (cp,) = saved_at(one, context, 16)
    saved_at(two, context, 32)
    assert one.checkpoints == [cp]  # they do not know each other
    assert refused(one, context, cp)  # and yet


CHILD = """
import ctypes, os, sys
os.environ["GGML_NO_BACKTRACE"] = "1"
import llama_cpp as native
from llama_cpp import Llama
from llama_cpp._internals import LlamaContext
from llamakeep.llama_cache.hybrid import HybridCheckpointCache

llm = Llama(sys.argv[1], n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False)
params = llm.context_params
params.n_seq_max = 2
mine, foreign = (LlamaContext(model=llm._model, params=params, verbose=False) for _ in range(2))
tokens = list(range(1, 25))

def evaluate(context, seq_id):
    batch = native.llama_batch_init(24, 0, 1)
    batch.n_tokens = 24
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.logits[i] = token, i, i == 23
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq_id
    assert native.llama_decode(context.ctx, batch) == 0

for context, seq_id in ((mine, 0), (mine, 1), (foreign, 0)):
    evaluate(context, seq_id)
cache = HybridCheckpointCache(mine, on_device=True)
assert cache.save_checkpoint(24, tokens)
(cp,) = cache.checkpoints
good = cp.data

def write(context, data, seq_id=0):
    buffer = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
    return native.llama_state_seq_set_data_ext(context.ctx, buffer, len(data), seq_id, 3)

def forged(data, **fields):
    cp.data, cp.size = data, len(data)
    for name, value in fields.items():
        setattr(cp, name, value)
    return cache.restore_checkpoint(cp, cp.seq_id)

def elsewhere():
    other = HybridCheckpointCache(foreign, on_device=True)
    return other.restore_checkpoint(cp)

def no_such_sequence():
    try:
        cache.save_checkpoint(24, tokens, 99)
    except ValueError:
        return False

unknown = good[:4] + (77).to_bytes(4, "little") + good[8:]
cases = {
    "magic": (lambda: forged(bytes(4) + good[4:]), lambda: write(mine, bytes(4) + good[4:])),
    "size": (lambda: forged(good + bytes(8)), lambda: write(mine, good + bytes(8))),
    "context": (elsewhere, lambda: write(foreign, good)),
    "sequence": (lambda: forged(unknown, seq_id=77), lambda: write(mine, unknown)),
    "range": (
        no_such_sequence,
        lambda: native.llama_memory_seq_pos_max(mine.memory, 99),
    ),
    "good": (lambda: not cache.restore_checkpoint(cp), lambda: write(mine, good)),
}

def fate(call):
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        answer = call()
        os._exit(0 if answer is False else 3)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

for name, (ours, raw) in cases.items():
    print(name, fate(ours), fate(raw), flush=True)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that share a loaded model")
@pytest.mark.parametrize("name", ON_DEVICE_FAMILIES)
def test_fault_69_what_llama_cpp_would_die_of_is_refused(
    tiny_model: Callable[[str], Path], name: str
) -> None:
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(tiny_model(name))],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    fates = dict(line.split(" ", 1) for line in child.stdout.splitlines())
    refused_and_dead = "0 -6"
    assert fates["magic"] == fates["size"] == fates["context"] == refused_and_dead
    assert fates["sequence"] == refused_and_dead
    assert fates["range"].startswith("0 ")  # recurrent memory survives it
    assert fates["good"] == "0 3"


# -- lifetime ------------------------------------------------------------------------------------


def test_clear(context: Context, capsys: pytest.CaptureFixture[str]) -> None:
    cache = HybridCheckpointCache(context.context.ctx)
    saved_at(cache, context, 8, 16)
    cache.clear()
    assert (cache.checkpoints, cache.cache_size, cache._records) == ([], 0, {})
    cache.clear()
    saved_at(cache, context, 16)  # it goes on
    assert len(cache.checkpoints) == 1
    assert capsys.readouterr() == ("", "")


def test_close(context: Context) -> None:
    cache = HybridCheckpointCache(context.context)
    (cp,) = saved_at(cache, context, 8)
    cache.close()
    assert (cache._ctx, cache.checkpoints, cache.cache_size) == (None, [], 0)
    assert cache._get_size_ext is cache._get_data_ext is cache._set_data_ext is None
    assert cache.save_checkpoint(8, TOKENS[:8]) is False
    assert cache.find_best_checkpoint(TOKENS) is None
    assert cache.restore_checkpoint(cp) is False
    cache.close()
    assert context.positions(0)[1] == 7  # the context lives


def test_a_finalizer_closes(context: Context) -> None:
    cache = HybridCheckpointCache(context.context)
    saved_at(cache, context, 8)
    cache.__del__()
    assert cache._ctx is None


@pytest.mark.parametrize("wrong", [{"ctx": None}, {"ctx": 0}, {"ctx": 1, "max_checkpoints": "x"}])
def test_a_finalizer_survives_a_failed_constructor(wrong: dict[str, Any]) -> None:
    cache = bare()
    with pytest.raises(InvalidValue):
        cache.__init__(**wrong)
    cache.__del__()
    bare().__del__()


def test_a_finalizer_is_quiet_when_python_ends(tiny_model: Callable[[str], Path]) -> None:
    # What another module holds may outlive the modules that `close` needs.
    program = """
import sys, threading
from llama_cpp import Llama
from llamakeep.llama_cache.hybrid import HybridCheckpointCache
llm = Llama(sys.argv[1], n_ctx=128, n_threads=1, verbose=False)
llm.eval([1, 2, 3])
threading.kept = HybridCheckpointCache(llm._ctx.ctx, verbose=True)
assert threading.kept.save_checkpoint(3, [1, 2, 3])
"""
    child = subprocess.run(
        [sys.executable, "-c", program, str(tiny_model("hybrid"))],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert "took a checkpoint at 3" in child.stderr.splitlines()[-1], child.stderr


def test_verbose_says_so_on_standard_error(tiny_model: Callable[[str], Path]) -> None:
    program = """
import sys
from llama_cpp import Llama
from llamakeep.llama_cache.hybrid import HybridCheckpointCache
llm = Llama(sys.argv[1], n_ctx=128, n_threads=1, verbose=False)
cache = HybridCheckpointCache(llm, verbose=True)
HybridCheckpointCache(llm, max_checkpoints=0, verbose=True)
llm.eval([1, 2, 3])
cache.save_checkpoint(3, [1, 2, 3])
cache.clear()
cache.save_checkpoint(3, [1, 2, 3])  # is still there when the interpreter ends
"""
    child = subprocess.run(
        [sys.executable, "-c", program, str(tiny_model("hybrid"))],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert child.stdout == ""
    lines = child.stderr.splitlines()
    assert "HybridCheckpointCache(clear): cleared" in lines
    assert any("no rollback" in line for line in lines)
    assert "Traceback" not in child.stderr
    assert "Exception" not in child.stderr


# -- memory --------------------------------------------------------------------------------------


def test_a_save_makes_one_copy_and_a_restore_none(make_context: MakeContext) -> None:
    context = make_context("attention")
    cache = HybridCheckpointCache(context.context)
    context.evaluate(0, TOKENS[:256])
    tokens = np.array(TOKENS[:256], np.int32)
    tracemalloc.start()
    try:
        cache.save_checkpoint(256, tokens)
        (cp,) = cache.checkpoints
        assert cp.size > 200_000
        assert tracemalloc.get_traced_memory()[1] < 2 * cp.size + 32_000
        assert tracemalloc.get_traced_memory()[0] < cp.size + 32_000
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        assert cache.restore_checkpoint(cp)
        assert tracemalloc.get_traced_memory()[1] < before + 32_000
    finally:
        tracemalloc.stop()
    cache.clear()
    assert cache.cache_size == 0


def test_a_llama_says_where_it_is(tiny_llama: Callable[..., Any]) -> None:
    llm = tiny_llama("hybrid", n_ctx=256)
    cache = HybridCheckpointCache(llm)
    llm.eval(TOKENS[:20])
    for wrong in (19, 21, 10**9):
        with pytest.raises(InvalidValue, match=f"current_pos is {wrong}, .* 20 tokens"):
            cache.save_checkpoint(wrong, TOKENS)
    assert cache.save_checkpoint(20, TOKENS)


@pytest.mark.parametrize("swa_full", [True, False])
def test_a_window_is_not_cut_where_rows_are_gone(
    tiny_llama: Callable[..., Any], swa_full: bool
) -> None:
    """After a restore, new tokens take the cells of rows outside of the window."""
    llm = tiny_llama("swa", n_ctx=512, swa_full=swa_full)
    plain = tiny_llama("swa", n_ctx=512, swa_full=swa_full)
    cache = HybridCheckpointCache(llm)
    llm.eval(TOKENS[:150])
    assert cache.save_checkpoint(150, TOKENS)
    llm.eval(OTHER[:20])
    (checkpoint,) = cache.checkpoints
    assert cache.restore_checkpoint(checkpoint)
    llm.n_tokens = checkpoint.pos
    llm.eval(OTHER[20:120])
    for cut in (70, 100, 140):
        prompt = [*TOKENS[:cut], *OTHER[200:205]]
        texts = []
        for each in (llm, plain):
            if each is plain:
                each.reset()
                each._ctx.kv_cache_clear()
            each.create_completion(prompt, max_tokens=4, temperature=0.0)
            texts.append(each._input_ids.tolist())
        assert texts[0] == texts[1]
