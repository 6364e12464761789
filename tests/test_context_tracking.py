"""What caches hear of their context: from fakes rule by rule, and from a real one."""

from __future__ import annotations

import copy
import ctypes
import gc
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import llamakeep
from llamakeep.errors import InvalidValue
from llamakeep.llama_cache.hybrid import HybridCheckpointCache
from llamakeep.llama_cache.tracking import ContextTracking, track

if TYPE_CHECKING:
    from llama_cpp import Llama

TOKENS = list(range(1, 200))


@dataclass(frozen=True)
class Saved:
    seq_id: int
    pos_max: int


class Cache:
    """A follower that remembers checkpoints, and nothing else."""

    def __init__(self, *saved: Saved) -> None:
        self.saved = list(saved)
        self.asked: list[str] = []
        self.is_closed = False

    def forget(self, affected: Callable[[Any], bool], why: str) -> None:
        assert why
        self.saved = [saved for saved in self.saved if not affected(saved)]

    def forget_unreached(self) -> None:
        self.asked.append("unreached")

    def close(self) -> None:
        self.is_closed = True


class Context:
    """Has the methods of a `LlamaContext`, and does as it is told."""

    addresses = iter(range(1000, 10**6))

    def __init__(self) -> None:
        self.ctx: int | None = next(self.addresses)
        self.answer: Any = None
        self.calls: list[tuple[Any, ...]] = []
        self.on_call: Callable[[], object] = lambda: None
        self._exit_stack = ExitStack()
        self._exit_stack.callback(self._free)

    def _free(self) -> None:
        self.calls.append(("free",))
        self.ctx = None

    def _call(self, *call: Any) -> Any:
        self.calls.append(call)
        self.on_call()
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer

    def close(self) -> None:
        self._exit_stack.close()

    def __del__(self) -> None:
        self.close()

    def kv_cache_clear(self) -> None:
        self._call("clear")

    def kv_cache_seq_rm(self, seq_id: int, p0: int, p1: int) -> bool:
        return bool(self._call("rm", seq_id, p0, p1))

    def kv_cache_seq_cp(self, seq_id_src: int, seq_id_dst: int, p0: int, p1: int) -> None:
        self._call("cp", seq_id_src, seq_id_dst, p0, p1)

    def kv_cache_seq_keep(self, seq_id: int) -> None:
        self._call("keep", seq_id)

    def kv_cache_seq_shift(self, seq_id: int, p0: int, p1: int, shift: int) -> None:
        self._call("shift", seq_id, p0, p1, shift)


class OtherContext(Context):
    """Has the names of another build."""

    def memory_clear(self, data: bool = True) -> None:
        self._call("clear")

    def memory_seq_rm(self, seq_id: int, p0: int, p1: int = -1) -> bool:
        return bool(self._call("rm", seq_id, p0, p1))

    def memory_seq_cp(self, seq_id_src: int, seq_id_dst: int, p0: int, p1: int) -> None:
        self._call("cp", seq_id_src, seq_id_dst, p0, p1)

    def memory_seq_keep(self, seq_id: int) -> None:
        self._call("keep", seq_id)

    def memory_seq_add(self, seq_id: int, p0: int, p1: int, delta: int) -> None:
        self._call("add", seq_id, p0, p1, delta)

    def memory_seq_div(self, seq_id: int, p0: int, p1: int, d: int) -> None:
        self._call("div", seq_id, p0, p1, d)

    def set_state_data(self, src: bytes, size: int) -> int:
        self._call("set")
        return size

    def load_state_file(self, path: str, n_tokens: int) -> int:
        self._call("load")
        return n_tokens

    def set_state_seq_data(self, src: bytes, size: int, dest_seq_id: int) -> int:
        self._call("set", dest_seq_id)
        return size

    def set_state_seq_data_ext(self, src: bytes, size: int, dest_seq_id: int, flags: int) -> int:
        self._call("set", dest_seq_id)
        return size

    def load_state_seq_file(self, path: str, dest_seq_id: int, n_tokens: int) -> int:
        self._call("load", dest_seq_id)
        return n_tokens


class Model:
    """Has what of a `Llama` is tracked."""

    def __init__(self, context: Context | None) -> None:
        self._ctx = context
        self.calls: list[str] = []

    def load_state(self, state: Any) -> None:
        self.calls.append("load_state")
        if state is None:
            raise RuntimeError("Failed to set llama state data")

    def reset(self) -> None:
        self.calls.append("reset")


ALL = [Saved(0, 9), Saved(0, 19), Saved(1, 9), Saved(1, 19)]


@pytest.fixture
def context() -> Iterator[Context]:
    made = Context()
    made.answer = True
    yield made
    made.close()


def following(context: Any) -> Cache:
    cache = Cache(*ALL)
    track(context).add(cache)
    return cache


# -- the rules -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "left"),
    [
        (("clear",), []),
        # What ends before the removed suffix stays.
        (("rm", 0, 20, -1), ALL),
        (("rm", 0, 19, -1), [ALL[0], *ALL[2:]]),
        (("rm", 0, 10, -1), [ALL[0], *ALL[2:]]),
        (("rm", 0, 9, -1), ALL[2:]),
        (("rm", 0, 0, -1), ALL[2:]),
        (("rm", 0, -1, -1), ALL[2:]),
        # A negative sequence means every one.
        (("rm", -1, 10, -1), [ALL[0], ALL[2]]),
        (("rm", -1, -1, -1), []),
        # A hole: what is behind it counts on the rows too.
        (("rm", 1, 5, 6), ALL[:2]),
        (("rm", 1, 15, 16), [*ALL[:3]]),
        # Nothing lies between these.
        (("rm", 0, 5, 5), ALL),
        (("rm", 0, 7, 3), ALL),
        (("rm", 0, -1, 0), ALL),
        # Another sequence's are not touched by copies onto this one.
        (("cp", 0, 1, 0, -1), ALL[:2]),
        (("cp", 1, 0, -1, -1), ALL[2:]),
        (("cp", 1, 1, 0, 5), ALL),
        (("cp", 0, -1, 0, 5), ALL),
        (("keep", 1), ALL[2:]),
        (("keep", 2), []),
        (("keep", -1), []),
        # What ends before the rows that move, and before where they go, stays.
        (("shift", 0, 10, -1, 5), [ALL[0], *ALL[2:]]),
        (("shift", 0, 10, -1, -5), ALL[2:]),
        (("shift", 0, 20, -1, 5), ALL),
        (("shift", -1, 0, -1, 1), []),
        (("shift", 0, 5, -1, 0), ALL),
        (("shift", 0, 5, 5, 3), ALL),
    ],
    ids=str,
)
def test_what_each_change_invalidates(
    context: Context, call: tuple[Any, ...], left: list[Saved]
) -> None:
    cache, second = following(context), following(context)
    names = {"clear": "kv_cache_clear"} | {
        name: f"kv_cache_seq_{name}" for name in ("rm", "cp", "keep", "shift")
    }
    name, *args = call
    getattr(context, names[name])(*args)
    assert context.calls == [call]
    assert cache.saved == second.saved == left


def test_a_refused_removal_changes_nothing(context: Context) -> None:
    cache = following(context)
    context.answer = False
    assert context.kv_cache_seq_rm(0, 0, -1) is False
    assert cache.saved == ALL
    context.answer = True
    assert context.kv_cache_seq_rm(0, 0, -1) is True
    assert cache.saved == ALL[2:]


@pytest.mark.parametrize("error", [RuntimeError("native"), KeyboardInterrupt()])
def test_nothing_holds_after_a_call_that_failed(context: Context, error: BaseException) -> None:
    cache = following(context)
    context.answer = error
    with pytest.raises(type(error)):
        context.kv_cache_seq_keep(0)
    assert cache.saved == []


def test_a_call_that_cannot_be_made_changes_nothing(context: Context) -> None:
    cache = following(context)
    with pytest.raises(TypeError):
        context.kv_cache_seq_rm(0)
    assert (context.calls, cache.saved) == ([], ALL)


def test_arguments_may_be_named(context: Context) -> None:
    cache = following(context)
    context.kv_cache_seq_rm(p1=-1, seq_id=0, p0=10)
    assert cache.saved == [ALL[0], *ALL[2:]]


def test_numbers_that_cannot_be_compared_invalidate_all(
    context: Context, caplog: pytest.LogCaptureFixture
) -> None:
    cache = following(context)
    assert context.kv_cache_seq_rm(0, ctypes.c_int(10), -1) is True
    assert cache.saved == []
    assert "no checkpoint holds after kv_cache_seq_rm" in caplog.text


def test_caches_are_told_afterwards(context: Context) -> None:
    # Before the call, a cache could take a checkpoint of what is about to go.
    cache = following(context)
    context.on_call = lambda: cache.saved.append(Saved(0, 30))
    context.kv_cache_clear()
    assert cache.saved == []


@pytest.mark.parametrize(
    ("name", "args", "left"),
    [
        ("memory_clear", (), []),
        ("memory_clear", (False,), []),
        ("memory_seq_rm", (0, 10), [ALL[0], *ALL[2:]]),
        ("memory_seq_cp", (0, 1, 0, -1), ALL[:2]),
        ("memory_seq_keep", (1,), ALL[2:]),
        ("memory_seq_add", (0, 10, -1, 5), [ALL[0], *ALL[2:]]),
        ("memory_seq_div", (1, 12, -1, 2), ALL[:2]),
        ("memory_seq_div", (1, 12, -1, -2), ALL[:2]),
        ("memory_seq_div", (1, 20, -1, 2), ALL[:3]),
        ("memory_seq_div", (0, 12, -1, 1), ALL),
        ("set_state_data", (b"", 0), []),
        ("load_state_file", ("path", 0), []),
        ("set_state_seq_data", (b"", 0, 1), ALL[:2]),
        ("set_state_seq_data_ext", (b"", 0, 1, 0), ALL[:2]),
        ("load_state_seq_file", ("path", 1, 0), ALL[:2]),
    ],
    ids=str,
)
def test_names_of_other_builds(name: str, args: tuple[Any, ...], left: list[Saved]) -> None:
    context = OtherContext()
    context.answer = True
    cache = following(context)
    getattr(context, name)(*args)
    assert len(context.calls) == 1
    assert cache.saved == left


def test_no_names_are_made_up(context: Context) -> None:
    track(context)
    assert not hasattr(context, "memory_clear")


def test_who_makes_raw_calls_says_so(context: Context) -> None:
    cache = following(context)
    track(context).removed(0, 10, -1)
    assert cache.saved == [ALL[0], *ALL[2:]]
    track(context).loaded(1)
    assert cache.saved == ALL[:1]
    track(context).loaded(-1)
    assert cache.saved == []


def test_a_model_tells_of_loads_and_resets(context: Context) -> None:
    model, cache = Model(context), Cache(*ALL)
    track(model).add(cache)
    model.reset()
    assert (model.calls, cache.asked, cache.saved) == (["reset"], ["unreached"], ALL)
    model.load_state(b"state")
    assert (model.calls[1:], cache.saved) == (["load_state"], [])
    cache.saved = list(ALL)
    with pytest.raises(RuntimeError, match="Failed to set"):
        model.load_state(None)
    assert cache.saved == []


def test_a_new_context_of_a_model_is_another_one(context: Context) -> None:
    model, cache = Model(context), Cache(*ALL)
    track(model).add(cache)
    model._ctx = Context()
    model.reset()
    model.load_state(b"")
    assert (cache.asked, cache.saved) == ([], ALL)
    again = Cache(*ALL)
    track(model).add(again)
    model.load_state(b"")
    assert (cache.saved, again.saved) == (ALL, [])


# -- tracking ------------------------------------------------------------------------------------


def test_tracking_twice_changes_nothing(context: Context) -> None:
    first = track(context)
    kind = type(context)
    assert track(context) is first
    assert track(Model(context)) is first
    assert type(context) is kind
    cache = following(context)
    context.kv_cache_clear()
    assert context.calls == [("clear",)]
    assert cache.saved == []


def test_a_tracked_object_stays_what_it_was(context: Context) -> None:
    track(model := Model(context))
    for thing, kind in ((context, Context), (model, Model)):
        assert isinstance(thing, kind)
        assert type(thing).__name__ == kind.__name__
        assert type(thing).__qualname__ == kind.__qualname__
        assert type(thing).__module__ == kind.__module__
    model._ctx = None
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert type(pickle.loads(pickle.dumps(model, protocol))) is Model
    assert type(copy.copy(model)) is Model
    # Made of its type, as a keeper makes a new context: not tracked by itself.
    fresh = type(context)()
    fresh.kv_cache_clear()
    assert fresh.calls == [("clear",)]
    assert following(fresh).saved == ALL
    fresh.close()


@pytest.mark.parametrize("wrong", [None, 5, "ctx", Model(None), object()])
def test_what_cannot_be_tracked_is_named(wrong: Any) -> None:
    with pytest.raises(InvalidValue, match=r"track|context"):
        track(wrong)


def test_a_closed_context_cannot_be_tracked(context: Context) -> None:
    context.close()
    with pytest.raises(InvalidValue, match="closed"):
        track(context)


def test_what_has_no_room_for_it_cannot_be_tracked() -> None:
    class Fixed:
        __slots__ = ("ctx",)

        def __init__(self) -> None:
            self.ctx = 5

    with pytest.raises(InvalidValue, match="cannot be tracked"):
        track(Fixed())


def test_closing_closes_the_caches_first(context: Context) -> None:
    cache = following(context)
    tell = track(context)
    seen: list[int | None] = []
    cache.close = lambda: seen.append(context.ctx)
    context.close()
    assert len(seen) == 1
    assert seen[0] is not None  # not freed yet
    assert context.ctx is None
    assert tell.caches == ()
    context.close()
    assert context.calls == [("free",)]


def test_closing_past_the_method_closes_the_caches_too(context: Context) -> None:
    # llama-cpp-python's models free their contexts by a method they kept from before.
    kept = context.close
    cache = following(context)
    kept()
    assert cache.is_closed
    assert context.calls == [("free",)]


def test_closing_a_context_of_another_build_closes_the_caches_first() -> None:
    class FreesFirst(Context):
        def close(self) -> None:
            self.ctx = None
            super().close()

    class NoStack:
        def __init__(self) -> None:
            self.ctx: int | None = 55

        def close(self) -> None:
            self.ctx = None

    for context in (FreesFirst(), NoStack()):
        cache, seen = following(context), []
        cache.close = lambda context=context, seen=seen: seen.append(context.ctx)
        context.close()
        assert len(seen) == 1
        assert seen[0] is not None
        assert context.ctx is None


def test_a_cache_that_cannot_be_closed_does_not_keep_the_context_open(
    context: Context, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = following(context), following(context)

    def fail() -> None:
        raise RuntimeError("no")

    bad.close = fail
    context.close()
    assert context.ctx is None
    assert good.is_closed
    assert "could not be closed" in caplog.text


def test_addresses_are_forgotten(context: Context) -> None:
    address = context.ctx
    assert address is not None
    tell = track(context)
    assert ContextTracking.of(address) is ContextTracking.of(ctypes.c_void_p(address)) is tell
    tell.device_writes[0] = object()
    context.close()
    assert tell.device_writes == {}
    assert ContextTracking.of(address) is not tell


def test_who_does_not_follow_knows_it_from_before(context: Context) -> None:
    known = ContextTracking.of(context.ctx)
    assert known.caches == ()
    assert track(context) is known


def test_neither_keeps_the_other_alive() -> None:
    context = Context()
    cache = following(context)
    tell = track(context)
    gone = weakref.ref(cache)
    del cache
    assert gone() is None
    assert tell.caches == ()
    # The exit stack's callback ties this fake to itself, as llama-cpp-python's does.
    gone_context = weakref.ref(context)
    cache = following(context)
    del context
    gc.collect()
    assert gone_context() is None
    assert cache.is_closed
    assert isinstance(tell, ContextTracking)


def test_an_untied_context_goes_at_once() -> None:
    class Plain:
        def __init__(self) -> None:
            self.ctx = 77

    context = Plain()
    tell = weakref.ref(track(context))
    gone = weakref.ref(context)
    gc.disable()
    try:
        del context
        assert gone() is None
        assert tell() is None
    finally:
        gc.enable()


def test_caches_may_vanish_while_the_others_are_told(context: Context) -> None:
    caches = [following(context) for _ in range(3)]

    def forget(affected: Callable[[Any], bool], why: str) -> None:
        caches.clear()
        gc.collect()

    caches[0].forget = forget
    context.kv_cache_clear()
    assert all(cache.saved == ALL for cache in caches)


# -- a real context ------------------------------------------------------------------------------


@pytest.fixture
def llm(tiny_llama: Callable[..., Llama]) -> Llama:
    """A hybrid model that has evaluated nothing."""
    return tiny_llama("hybrid", n_ctx=512)


def saved(cache: HybridCheckpointCache, llm: Llama, *ends: int) -> list[int]:
    for end in ends:
        llm.eval(TOKENS[llm.n_tokens : end])
        assert cache.save_checkpoint(end, TOKENS[:end])
    return positions(cache)


def positions(cache: HybridCheckpointCache) -> list[int]:
    return [cp.pos for cp in cache.checkpoints]


@pytest.mark.parametrize("through", ["llama", "context", "tracked context"])
def test_caches_of_a_llama_follow_it(llm: Llama, through: str) -> None:
    if through == "tracked context":
        track(llm._ctx)
    cache = HybridCheckpointCache(llm if through == "llama" else llm._ctx)
    assert track(llm).caches == (cache,)
    saved(cache, llm, 16, 32)
    llm._ctx.kv_cache_clear()
    assert positions(cache) == []


def test_a_closed_cache_follows_no_longer(llm: Llama) -> None:
    cache = HybridCheckpointCache(llm)
    cache.close()
    assert track(llm).caches == ()
    tied = HybridCheckpointCache(llm)
    tied.itself = tied
    del tied
    gc.collect()
    assert track(llm).caches == ()


def test_a_cache_of_a_raw_pointer_does_not(llm: Llama) -> None:
    tell = track(llm)
    cache = HybridCheckpointCache(llm._ctx.ctx)
    assert tell.caches == ()
    saved(cache, llm, 16, 32)
    llm._ctx.kv_cache_clear()
    assert positions(cache) == [16, 32]
    assert not cache.restore_checkpoint(cache.checkpoints[0])  # but the rows are missed
    cache.close()


def test_what_a_cache_of_a_raw_pointer_does_is_told_to_the_others(llm: Llama) -> None:
    follower = HybridCheckpointCache(llm)
    raw = HybridCheckpointCache(llm._ctx.ctx)
    saved(follower, llm, 16)
    saved(raw, llm, 24)
    saved(follower, llm, 32)
    assert raw.restore_checkpoint(raw.checkpoints[0])
    assert positions(follower) == [16]


def test_a_removal_that_recurrent_memory_refuses(llm: Llama) -> None:
    cache = HybridCheckpointCache(llm)
    saved(cache, llm, 16, 32)
    assert llm._ctx.kv_cache_seq_rm(0, 20, -1) is False
    assert positions(cache) == [16, 32]
    assert llm._ctx.kv_cache_seq_rm(-1, 32, -1) is True  # as each `eval` asks
    assert positions(cache) == [16, 32]
    assert llm._ctx.kv_cache_seq_rm(0, -1, -1) is True
    assert positions(cache) == []


def test_a_removal_that_attention_allows(tiny_llama: Callable[..., Llama]) -> None:
    llm = tiny_llama("attention", n_ctx=512)
    cache = HybridCheckpointCache(llm)
    saved(cache, llm, 16, 32, 48)
    assert llm._ctx.kv_cache_seq_rm(0, 32, -1) is True
    assert positions(cache) == [16, 32]
    llm.n_tokens = 16  # the next `eval` removes what is behind
    llm.eval(TOKENS[100:110])
    assert positions(cache) == [16]


def test_a_reset_clears_recurrent_memory(llm: Llama, tiny_llama: Callable[..., Llama]) -> None:
    cache = HybridCheckpointCache(llm)
    saved(cache, llm, 16)
    llm.reset()
    assert positions(cache) == []
    # Attention rows stay until the next `eval` removes them.
    dense = tiny_llama("attention", n_ctx=512)
    cache = HybridCheckpointCache(dense)
    saved(cache, dense, 16)
    dense.reset()
    assert positions(cache) == [16]
    dense.eval(TOKENS[50:60])
    assert positions(cache) == []


def test_loading_a_state_invalidates_all(llm: Llama) -> None:
    cache = HybridCheckpointCache(llm)
    device = HybridCheckpointCache(llm, on_device=True)
    saved(cache, llm, 16)
    saved(device, llm, 16)
    state = llm.save_state()
    assert positions(cache) == positions(device) == [16]
    llm.load_state(state)
    assert positions(cache) == positions(device) == []


def test_a_new_prompt_and_a_grown_one(llm: Llama) -> None:
    cache = HybridCheckpointCache(llm)
    saved(cache, llm, 16)
    for _ in zip(range(3), llm.generate(TOKENS[:20], temp=0.0), strict=False):
        pass
    assert positions(cache) == [16]  # the prompt went on from there
    for _ in zip(range(3), llm.generate(TOKENS[50:60], temp=0.0), strict=False):
        pass
    assert positions(cache) == []


@pytest.mark.parametrize("way", ["llama", "context", "model"])
def test_closing_a_llama_closes_its_caches(llm: Llama, way: str) -> None:
    cache = HybridCheckpointCache(llm)
    saved(cache, llm, 16)
    (cp,) = cache.checkpoints
    {"llama": llm, "context": llm._ctx, "model": llm._model}[way].close()
    assert (cache._ctx, cache.checkpoints) == (None, [])
    assert cache.save_checkpoint(16, TOKENS[:16]) is False
    assert cache.find_best_checkpoint(TOKENS) is None
    assert cache.restore_checkpoint(cp) is False


def test_a_context_that_was_closed_unheard_is_noticed(llm: Llama) -> None:
    cache = HybridCheckpointCache(llm)
    saved(cache, llm, 16)
    (cp,) = cache.checkpoints
    pointer, llm._ctx.ctx = llm._ctx.ctx, None  # as a build that frees in another way leaves it
    assert cache.restore_checkpoint(cp) is False
    assert cache.save_checkpoint(16, TOKENS[:16]) is False
    llm._ctx.ctx = pointer


def test_neither_a_llama_nor_its_cache_keeps_the_other(
    tiny_model: Callable[[str], Path],
) -> None:
    from llama_cpp import Llama

    llm = Llama(str(tiny_model("hybrid")), n_ctx=128, n_threads=1, verbose=False)
    cache = HybridCheckpointCache(llm)
    gone = weakref.ref(cache)
    del cache
    assert gone() is None
    cache = HybridCheckpointCache(llm)
    saved(cache, llm, 16)
    gone_llama, gone_context = weakref.ref(llm), weakref.ref(llm._ctx)
    del llm
    gc.collect()
    assert gone_llama() is None
    assert gone_context() is None
    assert (cache._ctx, cache.checkpoints) == (None, [])
    assert cache.save_checkpoint(16, TOKENS[:16]) is False


def test_a_tracked_llama_goes_as_soon_as_an_untracked_one(
    tiny_model: Callable[[str], Path],
) -> None:
    from llama_cpp import Llama

    def freed_at_once(tracked: bool) -> bool:
        llm = Llama(str(tiny_model("hybrid")), n_ctx=128, n_threads=1, verbose=False)
        if tracked:
            track(llm)
        context, gone = llm._ctx, weakref.ref(llm)
        del llm
        return gone() is None and context.ctx is None

    gc.collect()
    gc.disable()
    try:
        assert freed_at_once(tracked=True) == freed_at_once(tracked=False)
    finally:
        gc.enable()


def test_tracking_and_a_keeper_get_along(llm: Llama) -> None:
    before = HybridCheckpointCache(llm)
    saved(before, llm, 16)
    context, seen = llm._ctx, []
    before.close = lambda: seen.append(context.ctx) or HybridCheckpointCache.close(before)
    keeper = llamakeep.attach(llm)  # gives it a new context
    try:
        assert len(seen) == 1
        assert seen[0] is not None  # not freed yet
        assert (context.ctx, before._ctx, before.checkpoints) == (None, None, [])
        assert before.save_checkpoint(0, []) is False
        for kept in (llm, llm._ctx):
            with pytest.raises(InvalidValue, match="a keeper is attached"):
                HybridCheckpointCache(kept)
        track(llm)
        warm = llm.create_completion("one two three", max_tokens=4, temperature=0.0)
        assert warm["choices"]
    finally:
        keeper.detach()
    cache = HybridCheckpointCache(llm)
    llm.reset()
    saved(cache, llm, 16)
    llm.reset()
    assert positions(cache) == []


def test_nothing_imports_llama_cpp_before_it_is_used() -> None:
    program = "import sys; sys.modules['llama_cpp'] = None; "
    program += "import llamakeep.llama_cache.hybrid, llamakeep.llama_cache.tracking"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
