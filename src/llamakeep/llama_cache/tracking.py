"""Which caches follow which context, and what they hear when its memory changes.

A checkpoint is a part of a state: it counts on rows that stay in the context's memory. So a cache
of checkpoints must hear of everything that changes those rows. `track` makes a context tell: the
methods of `llama_cpp._internals.LlamaContext` that change memory, and `reset` and `load_state` of
a `llama_cpp.Llama`, inform the caches that follow it. Raw C calls on its pointer go unheard; who
makes them says so by the methods of the `ContextTracking` that `track` returns.

Nothing here keeps anything else alive. A context owns its `ContextTracking`, which knows the caches
weakly; a cache owns the `ContextTracking` of its context, which does not know the context.
"""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeAlias

from llamakeep.errors import InvalidValue
from llamakeep.llama_cache.base import LOGGER
from llamakeep.llama_cache.checkpoint import Saved

logger = logging.getLogger(LOGGER)

_TRACKING: Final = "_llamakeep_tracking"
_by_address: weakref.WeakValueDictionary[int, ContextTracking] = weakref.WeakValueDictionary()

Affected: TypeAlias = Callable[[Saved], bool]
"""Whether a checkpoint is one that a change of memory affects."""


class Follower(Protocol):
    """A cache that follows a context."""

    def forget(self, affected: Affected, why: str) -> None:
        """Drop the checkpoints that are affected."""

    def forget_unreached(self) -> None:
        """Drop the checkpoints whose rows the memory no longer has."""

    def close(self) -> None:
        """Drop all checkpoints and let go of the context."""


class ContextTracking:
    """Tells the caches of one context what happened to its memory. Made by `track`.

    The methods say what a native call has done, and take its arguments; who makes such calls past
    the wrapped methods calls them right after it (`closed` right before). They change no memory
    themselves, and cost a look at each checkpoint. One thread at a time, the one that owns the
    context.

    Attributes:
        address: Of the native context, as given.
        device_writes: What stands for the last write into the context's buffers on the device, by
            sequence. llama.cpp has one set for each, whoever writes: also two caches that were
            made from raw pointers, and do not know each other.
    """

    def __init__(self, address: int) -> None:
        self.address = address
        self.device_writes: dict[int, object] = {}
        self._caches: weakref.WeakSet[Any] = weakref.WeakSet()

    @classmethod
    def of(cls, address: Any) -> ContextTracking:
        """Return the one of the open context at an address, also for who does not follow it.

        Raises:
            InvalidValue: For what is no address, and for null.
        """
        number = getattr(address, "value", address)
        if isinstance(number, bool) or not isinstance(number, int) or number <= 0:
            raise InvalidValue(f"ctx must be a llama.cpp context, not {address!r}")
        return _by_address.setdefault(number, cls(number))

    @property
    def caches(self) -> tuple[Follower, ...]:
        """The caches that follow the context and are still alive."""
        return tuple(self._caches)

    def add(self, cache: Follower) -> None:
        """Let a cache follow; it is known weakly."""
        self._caches.add(cache)

    def remove(self, cache: Follower) -> None:
        """Let a cache follow no longer."""
        self._caches.discard(cache)

    def forget(self, affected: Affected, why: str) -> None:
        """Make every cache drop the checkpoints that are affected."""
        for cache in self.caches:
            cache.forget(affected, why)

    def cleared(self, *_: Any) -> None:
        """All memory was cleared, or another state was loaded: no checkpoint holds."""
        self.forget(lambda _: True, "memory was cleared or loaded")

    def loaded(self, seq_id: int) -> None:
        """Another state was loaded into one sequence; a negative one means all of them."""
        self.forget(
            lambda saved: seq_id < 0 or saved.seq_id == seq_id, f"sequence {seq_id} was loaded"
        )

    def removed(self, seq_id: int, p0: int, p1: int) -> None:
        """Positions [p0, p1) were removed. What ends before p0 holds.

        Args:
            seq_id: The sequence; a negative one means all of them.
            p0: The first position; a negative one is 0.
            p1: The position after the last one; a negative one is none.
        """
        self._changed(seq_id, p0, p1, p0, "removed")

    def shifted(self, seq_id: int, p0: int, p1: int, shift: int) -> None:
        """Positions [p0, p1) were moved by `shift`. What ends before both places holds."""
        if shift != 0:
            self._changed(seq_id, p0, p1, max(p0, 0) + min(shift, 0), "moved")

    def divided(self, seq_id: int, p0: int, p1: int, by: int) -> None:
        """Positions [p0, p1) were divided by `by`. What ends before both places holds."""
        if by != 1:
            self._changed(seq_id, p0, p1, max(p0, 0) // by if by > 0 else 0, "divided")

    def copied(self, src: int, dst: int, *_: Any) -> None:
        """Positions of `src` were copied onto `dst`, whose checkpoints do not hold."""
        if src != dst:  # llama.cpp does nothing
            self.forget(lambda saved: saved.seq_id == dst, f"sequence {src} was copied over it")

    def kept(self, seq_id: int) -> None:
        """Every other sequence was removed."""
        self.forget(lambda saved: saved.seq_id != seq_id, f"only sequence {seq_id} was kept")

    def reset(self) -> None:
        """Something may have been cleared: what the memory does not reach does not hold."""
        for cache in self.caches:
            cache.forget_unreached()

    def closed(self) -> None:
        """The context is about to be freed: close its caches."""
        for cache in self.caches:
            try:
                cache.close()
            except Exception:
                logger.exception("a cache could not be closed before its context")
        self._caches.clear()
        self.device_writes.clear()
        if _by_address.get(self.address) is self:
            del _by_address[self.address]

    def _loaded_data(self, data: Any, size: int, seq_id: int, *_: Any) -> None:
        self.loaded(seq_id)

    def _loaded_file(self, path: Any, seq_id: int, *_: Any) -> None:
        self.loaded(seq_id)

    def _changed(self, seq_id: int, p0: int, p1: int, first: int, how: str) -> None:
        """Positions [p0, p1) were changed, if those are any. What ends before `first` holds."""
        if not 0 <= p1 <= max(p0, 0):
            self.forget(
                lambda saved: (seq_id < 0 or saved.seq_id == seq_id) and saved.pos_max >= first,
                f"positions from {p0} were {how}",
            )


def track(ctx: Any) -> ContextTracking:
    """Make a context tell its caches what happens to its memory. Doing so again changes nothing.

    The object's class is replaced by a subclass of the same name, whose methods tell the caches
    after llama.cpp has done what they ask for. A removal that llama.cpp refuses tells nothing; a
    call that raises may have changed anything, and no checkpoint holds after it. llama-cpp-python
    0.3.36 takes a negative sequence for sequence 0 in `kv_cache_seq_rm`, others for all of them:
    here it means all.

    Args:
        ctx: A `llama_cpp._internals.LlamaContext`, or a `llama_cpp.Llama`: then its `reset` and
            `load_state` tell too. When a `Llama` is given a new context, that is another context.

    Returns:
        The context's `ContextTracking`. Its methods are for those who call llama.cpp themselves.

    Raises:
        InvalidValue: For something else, and for a closed context.
    """
    llama, context = parts_of(ctx)
    if context is None:
        raise InvalidValue(f"a Llama or a LlamaContext can be tracked, not {type(ctx).__name__}")
    tracking: ContextTracking | None = getattr(context, _TRACKING, None)
    if tracking is None:
        tracking = ContextTracking.of(context.ctx)
        _make_tell(context)
        setattr(context, _TRACKING, tracking)
        # A model that is closed before its context frees the context past its `close`.
        exit_stack = getattr(context, "_exit_stack", None)
        if exit_stack is not None:
            exit_stack.callback(tracking.closed)
    if llama is not None:
        _make_tell(llama)
    return tracking


def parts_of(ctx: Any) -> tuple[Any | None, Any | None]:
    """Return a `Llama` and its `LlamaContext`, None for what is not there: both of a raw pointer.

    Raises:
        InvalidValue: For a closed one.
    """
    llama = ctx if hasattr(ctx, "_ctx") else None
    context = ctx if llama is None else llama._ctx
    if not hasattr(context, "ctx"):
        if llama is not None:
            raise InvalidValue("the Llama is closed or has no context")
        return None, None
    if context.ctx is None:
        raise InvalidValue("the context is closed")
    return llama, context


# -- telling classes -----------------------------------------------------------------------------

_TELLING: Final = {
    "close": "closed",
    "kv_cache_clear": "cleared",
    "kv_cache_seq_rm": "removed",
    "kv_cache_seq_cp": "copied",
    "kv_cache_seq_keep": "kept",
    "kv_cache_seq_shift": "shifted",
    # The same, and what loads states, in other builds of llama-cpp-python.
    "memory_clear": "cleared",
    "memory_seq_rm": "removed",
    "memory_seq_cp": "copied",
    "memory_seq_keep": "kept",
    "memory_seq_add": "shifted",
    "memory_seq_div": "divided",
    "set_state_data": "cleared",
    "load_state_file": "cleared",
    "set_state_seq_data": "_loaded_data",
    "set_state_seq_data_ext": "_loaded_data",
    "load_state_seq_file": "_loaded_file",
    # Those of a `Llama`.
    "load_state": "cleared",
    "reset": "reset",
}
"""Methods of contexts and models, and those of `ContextTracking` that take the same arguments."""


def _make_tell(thing: Any) -> None:
    # Methods on the object itself would need a way back to it: a strong one keeps it alive until
    # a garbage collection, a weak one is dead when `__del__` wants to close what it was for.
    base: Any = type(thing)
    if hasattr(base, "_llamakeep_tells"):
        return
    try:
        thing.__class__ = _telling_class(base)
    except TypeError as error:
        raise InvalidValue(f"a {base.__name__} cannot be tracked: {error}") from error


@functools.cache
def _telling_class(base: Any) -> type:
    """Return a subclass that looks like `base`, and tells."""

    def reduce_ex(self: Any, protocol: Any) -> Any:
        """Be copied and pickled as what it was before it was tracked."""
        _, _, *state = base.__reduce_ex__(self, protocol)
        return (object.__new__, (base,), *state)

    members = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    members |= {"_llamakeep_tells": True, "__reduce_ex__": reduce_ex}
    for name, event in _TELLING.items():
        if hasattr(base, name):
            members[name] = _telling_method(getattr(base, name), event)
    return type(base.__name__, (base,), members)


def _telling_method(native: Callable[..., Any], event: str) -> Callable[..., Any]:
    signature = inspect.signature(native)

    @functools.wraps(native)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        tracking = getattr(getattr(self, "_ctx", self), _TRACKING, None)
        if tracking is None:
            return native(self, *args, **kwargs)
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        if event == "closed":
            tracking.closed()  # some builds free the context before anything else
            return native(self, *args, **kwargs)
        try:
            result = native(self, *args, **kwargs)
        except BaseException:
            tracking.cleared()  # nobody knows how far it came
            raise
        if result or event != "removed":
            try:
                getattr(tracking, event)(*bound.args[1:])
            except TypeError as error:  # numbers that llama.cpp can read and Python cannot compare
                logger.warning("no checkpoint holds after %s: %s", native.__name__, error)
                tracking.cleared()
        return result

    return method
