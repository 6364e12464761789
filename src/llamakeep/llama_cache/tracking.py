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
import itertools
import logging
import weakref
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeAlias

from llamakeep.errors import InvalidValue
from llamakeep.llama_cache.base import LOGGER

logger = logging.getLogger(LOGGER)

_TRACKING: Final = "_llamakeep_tracking"


class Affected(Protocol):
    """What a change of memory is compared with: one checkpoint, as it was saved."""

    @property
    def seq_id(self) -> int:
        """The sequence that it is of."""

    @property
    def pos_max(self) -> int:
        """The last position that it covers."""

    @property
    def on_device(self) -> bool:
        """Whether its tensors lie in the context's own buffers."""


class Follower(Protocol):
    """A cache that follows a context."""

    def forget(self, affected: Callable[[Affected], bool], why: str) -> None:
        """Drop the checkpoints that are affected."""

    def forget_unreached(self) -> None:
        """Drop the checkpoints whose rows the memory no longer has."""

    def close(self) -> None:
        """Drop all checkpoints and let go of the context."""


class ContextTracking:
    """Tells the caches of one context what happened to its memory. Made by `track`.

    The methods say what a native call has done; who makes such calls past the wrapped methods
    calls them right after it (`closed` right before). They change no memory themselves, and cost
    a look at each checkpoint. One thread at a time, the one that owns the context.

    Args:
        address: Of the native context.

    Attributes:
        address: Of the native context.
        is_closed: The context was closed; nothing follows it any more.
    """

    def __init__(self, address: int) -> None:
        self.address = address
        self.is_closed = False
        self._caches: weakref.WeakSet[Any] = weakref.WeakSet()

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

    def forget(self, affected: Callable[[Affected], bool], why: str) -> None:
        """Make every cache drop the checkpoints that are affected."""
        for cache in self.caches:
            cache.forget(affected, why)

    def cleared(self) -> None:
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
        if 0 <= p1 <= max(p0, 0):
            return
        self._changed_from(seq_id, p0, f"positions from {p0} were removed")

    def shifted(self, seq_id: int, p0: int, p1: int, shift: int) -> None:
        """Positions [p0, p1) were moved by `shift`. What ends before both places holds."""
        if shift == 0 or 0 <= p1 <= max(p0, 0):
            return
        self._changed_from(seq_id, max(p0, 0) + min(shift, 0), f"positions from {p0} were moved")

    def divided(self, seq_id: int, p0: int, p1: int, by: int) -> None:
        """Positions [p0, p1) were divided by `by`. What ends before both places holds."""
        if by == 1 or 0 <= p1 <= max(p0, 0):
            return
        first = max(p0, 0) // by if by > 0 else 0
        self._changed_from(seq_id, first, f"positions from {p0} were divided")

    def copied(self, src: int, dst: int) -> None:
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
        self.is_closed = True
        for cache in self.caches:
            try:
                cache.close()
            except Exception:
                logger.exception("a cache could not be closed before its context")
        self._caches.clear()
        if _by_address.get(self.address) is self:
            del _by_address[self.address]
        for slot in [slot for slot in _device_slots if slot[0] == self.address]:
            del _device_slots[slot]

    def _changed_from(self, seq_id: int, start: int, why: str) -> None:
        def affected(saved: Affected) -> bool:
            return (seq_id < 0 or saved.seq_id == seq_id) and saved.pos_max >= start

        self.forget(affected, why)


_by_address: weakref.WeakValueDictionary[int, ContextTracking] = weakref.WeakValueDictionary()
_device_slots: dict[tuple[int, int], int] = {}  # who wrote last, by context and sequence
_writes = itertools.count(1)


def tracking_of(address: int) -> ContextTracking | None:
    """Return the tracking of the open context at `address`, or None where there is none."""
    return _by_address.get(address)


def write_device_slot(address: int, seq_id: int) -> int:
    """Note that a context's device buffers of a sequence are about to be written.

    llama.cpp has one set of buffers for each sequence, whoever writes: also two caches that were
    made from raw pointers, and do not know each other.

    Returns:
        A number that no other write has.
    """
    _device_slots[address, seq_id] = number = next(_writes)
    return number


def device_slot(address: int, seq_id: int) -> int:
    """Return the number of the last write into those buffers; 0 if there was none."""
    return _device_slots.get((address, seq_id), 0)


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
    llama, context = _parts(ctx)
    tracking: ContextTracking | None = getattr(context, _TRACKING, None)
    if tracking is None:
        tracking = ContextTracking(address_of(context.ctx))
        _swap_class(context, _telling_context)
        setattr(context, _TRACKING, tracking)
        _by_address[tracking.address] = tracking
        # A model that is closed before its context frees the context past its `close`.
        exit_stack = getattr(context, "_exit_stack", None)
        if exit_stack is not None:
            exit_stack.callback(tracking.closed)
    if llama is not None:
        _swap_class(llama, _telling_llama)
    return tracking


def context_of(ctx: Any) -> Any:
    """Return the `LlamaContext` of a `Llama`, the one that is given, or None for a raw pointer.

    Raises:
        InvalidValue: For a closed one.
    """
    return _parts(ctx)[1] if hasattr(ctx, "_ctx") or hasattr(ctx, "ctx") else None


def address_of(pointer: Any) -> int:
    """Return the address of a native context.

    Raises:
        InvalidValue: For what is no pointer, and for null.
    """
    address = getattr(pointer, "value", pointer)
    if isinstance(address, bool) or not isinstance(address, int) or address <= 0:
        raise InvalidValue(f"ctx must be a llama.cpp context, not {pointer!r}")
    return address


def _parts(ctx: Any) -> tuple[Any | None, Any]:
    llama = ctx if hasattr(ctx, "_ctx") else None
    context = ctx if llama is None else llama._ctx
    if not hasattr(context, "ctx"):
        if llama is not None:
            raise InvalidValue("the Llama is closed or has no context")
        raise InvalidValue(f"a Llama or a LlamaContext can be tracked, not {type(ctx).__name__}")
    if context.ctx is None:
        raise InvalidValue("the context is closed")
    return llama, context


# -- telling classes -----------------------------------------------------------------------------

Tell: TypeAlias = Callable[..., None]

_CONTEXT_METHODS: Final[dict[str, Tell]] = {
    "kv_cache_clear": lambda tracking: tracking.cleared(),
    "kv_cache_seq_rm": lambda tracking, seq_id, p0, p1: tracking.removed(seq_id, p0, p1),
    "kv_cache_seq_cp": lambda tracking, src, dst, *_: tracking.copied(src, dst),
    "kv_cache_seq_keep": lambda tracking, seq_id: tracking.kept(seq_id),
    "kv_cache_seq_shift": lambda tracking, *where: tracking.shifted(*where),
    # The same, and what loads states, in other builds of llama-cpp-python.
    "memory_clear": lambda tracking, *_: tracking.cleared(),
    "memory_seq_rm": lambda tracking, seq_id, p0, p1: tracking.removed(seq_id, p0, p1),
    "memory_seq_cp": lambda tracking, src, dst, *_: tracking.copied(src, dst),
    "memory_seq_keep": lambda tracking, seq_id: tracking.kept(seq_id),
    "memory_seq_add": lambda tracking, *where: tracking.shifted(*where),
    "memory_seq_div": lambda tracking, *where: tracking.divided(*where),
    "set_state_data": lambda tracking, *_: tracking.cleared(),
    "load_state_file": lambda tracking, *_: tracking.cleared(),
    "set_state_seq_data": lambda tracking, data, size, seq_id: tracking.loaded(seq_id),
    "set_state_seq_data_ext": lambda tracking, data, size, seq_id, *_: tracking.loaded(seq_id),
    "load_state_seq_file": lambda tracking, path, seq_id, *_: tracking.loaded(seq_id),
}
_LLAMA_METHODS: Final[dict[str, Tell]] = {
    "load_state": lambda tracking, state: tracking.cleared(),
    "reset": lambda tracking: tracking.reset(),
}
_MAY_REFUSE: Final = frozenset({"kv_cache_seq_rm", "memory_seq_rm"})


def _swap_class(thing: Any, make: Callable[[type], type]) -> None:
    # Methods on the object itself would need a way back to it: a strong one keeps it alive until
    # a garbage collection, a weak one is dead when `__del__` wants to close what it was for.
    base = type(thing)
    if hasattr(base, "_llamakeep_base"):
        return
    try:
        thing.__class__ = make(base)
    except TypeError as error:
        raise InvalidValue(f"a {base.__name__} cannot be tracked: {error}") from error


@functools.cache
def _telling_context(base: type) -> type:
    native_close = getattr(base, "close", None)

    def close(self: Any) -> None:
        """Close the caches that follow this context, then the context itself."""
        tracking = _heard_of(self)
        if tracking is not None:
            tracking.closed()
        if native_close is not None:
            native_close(self)

    return _subclass(base, _telling_methods(base, _CONTEXT_METHODS) | {"close": close})


@functools.cache
def _telling_llama(base: type) -> type:
    return _subclass(base, _telling_methods(base, _LLAMA_METHODS))


def _subclass(base: Any, methods: dict[str, Any]) -> type:
    def reduce_ex(self: Any, protocol: Any) -> Any:
        """Be copied and pickled as what it was before it was tracked."""
        _, _, *state = base.__reduce_ex__(self, protocol)
        return (object.__new__, (base,), *state)

    return type(
        base.__name__,
        (base,),
        {
            "_llamakeep_base": base,
            "__module__": base.__module__,
            "__qualname__": base.__qualname__,
            "__doc__": base.__doc__,
            "__reduce_ex__": reduce_ex,
            **methods,
        },
    )


def _telling_methods(base: type, methods: dict[str, Tell]) -> dict[str, Any]:
    return {
        name: _telling_method(getattr(base, name), tell, may_refuse=name in _MAY_REFUSE)
        for name, tell in methods.items()
        if hasattr(base, name)
    }


def _telling_method(
    native: Callable[..., Any], tell: Tell, *, may_refuse: bool
) -> Callable[..., Any]:
    signature = inspect.signature(native)
    n_values = len(signature.parameters) - 1

    @functools.wraps(native)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        tracking = _heard_of(self)
        if tracking is None:
            return native(self, *args, **kwargs)
        values = args
        if kwargs or len(args) != n_values:
            bound = signature.bind(self, *args, **kwargs)
            bound.apply_defaults()
            values = bound.args[1:]
        try:
            result = native(self, *args, **kwargs)
        except BaseException:
            tracking.cleared()  # nobody knows how far it came
            raise
        if result or not may_refuse:
            try:
                tell(tracking, *values)
            except TypeError:
                tracking.cleared()  # numbers that llama.cpp can read and Python cannot compare
        return result

    return method


def _heard_of(thing: Any) -> ContextTracking | None:
    context = getattr(thing, "_ctx", thing)
    return getattr(context, _TRACKING, None)
