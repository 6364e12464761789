"""The form in which a state is kept: what is large is shared, what no reader needs is left out.

`Llama.save_state()` of llama-cpp-python copies more than `load_state` reads: `n_batch * n_vocab`
scores, which are never computed unless the model was loaded with `logits_all`, and `n_ctx` token
ids of which only the first `n_tokens` mean anything. Left out, they make a state of SmolLM2 after
1,000 tokens 23 MB instead of 123. `Snapshot.revive` gives back what `load_state` takes for the
same: one row of zeros, which it broadcasts, and ids of full length.

Scores that were never computed are zero where the system gave fresh memory for them, as it does for
large arrays. Where they are not, they are left out only if it is known whose they are.

A `Plan` says of each attribute which kind of `Part` it is; that is decided nowhere else. Its parts
are the caller's own things, counted and not copied; those of a `Snapshot` are copies.
"""

from __future__ import annotations

import array
import copy
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import FunctionType, MemberDescriptorType, ModuleType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from llamakeep.errors import InvalidValue, whole_number
from llamakeep.tally import Refused

Array = npt.NDArray[Any]
Form: TypeAlias = "tuple[list[Any], bytes | memoryview]"
"""What the head of a file says of a part: its kind and more; and its bytes."""

NO_TOKEN = 0
"""Stands where ids were left out, as in new memory. `Llama` may read them: a chat handler that
evaluates a picture steps over their places, and then asks for all ids up to the end."""

TYPES = {
    name: np.dtype(name)
    for name in ("<i1", "<i2", "<i4", "<i8", "<u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8")
}
"""The numbers that have a plain form, by the name that a file has for them."""

_COMPACTED = {"input_ids", "scores", "n_tokens", "llama_state", "llama_state_size", "seed"}
"""The attributes of the one kind of state whose `load_state` is known well enough to leave
something out: that of llama-cpp-python 0.3.36. What forks add to them is kept."""

_WHOLE = ""  # what a state is called that is kept as one part
_SCAN_ROWS = 64
_MAX_DEPTH = 1000  # what is nested deeper than Python recurses cannot be copied


@dataclass(frozen=True, eq=False)
class Part:
    """One attribute of a state. What a kind does not say is as for a value that cannot change."""

    value: Any

    @property
    def nbytes(self) -> int:
        """What it counts for."""
        return 0

    def copied(self) -> Part:
        """Return it with nothing in it that the caller may change."""
        return self

    def revive(self, n_ctx: int | None) -> Any:
        """Return the attribute; `n_ctx` is the length that ids shall have."""
        return self.value

    def form(self, name: str) -> Form:
        """Return its plain form. Raises Refused, with what it is called, when it has none."""
        kind = type(self.value).__name__
        raise Refused("unsupported", f"{name or 'a state'} of type {kind} has no plain form")


class Plain(Part):
    """A number, text or None."""

    def form(self, name: str) -> Form:
        """Return the value."""
        return ["plain", self.value], b""


class Raw(Part):
    """Bytes, shared with whoever has them."""

    @property
    def nbytes(self) -> int:
        """How many."""
        return memoryview(self.value).nbytes

    def copied(self) -> Part:
        """Return them as bytes. Of bytes, no copy."""
        return Raw(bytes(self.value))

    def form(self, name: str) -> Form:
        """Return how many."""
        return ["raw", self.nbytes], self.value


class Dense(Part):
    """An array."""

    @property
    def nbytes(self) -> int:
        """Of its items."""
        return int(self.value.nbytes)

    def copied(self) -> Part:
        """Return it with a copy."""
        array = self.value.copy()
        array.flags.writeable = False
        return replace(self, value=array)

    def revive(self, n_ctx: int | None) -> Any:
        """Return a copy."""
        return self.value.copy()

    def form(self, name: str) -> Form:
        """Return type and shape."""
        kind = _type_name(name, self.value.dtype)
        items = np.ascontiguousarray(self.value, TYPES[kind]).reshape(-1)
        return ["array", kind, list(self.value.shape)], items.view(np.uint8).data


@dataclass(frozen=True, eq=False)
class Ids(Dense):
    """The ids of the tokens, without what comes after them; and how many there were with it."""

    full_length: int

    def revive(self, n_ctx: int | None) -> Any:
        """Return `n_ctx` ids or, if not given, as many as there were; never less than tokens."""
        n_tokens = len(self.value)
        ids = np.full(max(n_ctx or self.full_length, n_tokens), NO_TOKEN, self.value.dtype)
        ids[:n_tokens] = self.value
        return ids

    def form(self, name: str) -> Form:
        """Return type, shape and the length that they had."""
        said, items = super().form(name)
        return [*said, self.full_length], items


@dataclass(frozen=True, eq=False)
class Zeros(Part):
    """Scores that were left out: of which type they were, and how wide."""

    n_columns: int

    def revive(self, n_ctx: int | None) -> Any:
        """Return one row, which is broadcast to as many as are needed."""
        return np.zeros((1, self.n_columns), self.value)

    def form(self, name: str) -> Form:
        """Return type and width."""
        return ["zeros", _type_name(name, self.value), self.n_columns], b""


class Other(Part):
    """What is none of that. Copied in depth, on the way in and out; bytes in it are shared."""

    @classmethod
    def of(cls, value: Any) -> Other:
        """Return a value, if it can be copied. Costs a copy of all but its bytes and arrays."""
        copy.deepcopy(value, _held(value))
        return cls(value)

    @property
    def nbytes(self) -> int:
        """Of all bytes and arrays in it."""
        return sum(
            each.nbytes if isinstance(each, np.ndarray) else memoryview(each).nbytes
            for each in _held(self.value).values()
        )

    def copied(self) -> Part:
        """Return it with a copy. Views, which Python does not copy, become bytes."""
        held = _held(self.value).items()
        views = {key: bytes(each) for key, each in held if isinstance(each, memoryview)}
        return Other(copy.deepcopy(self.value, views))

    def revive(self, n_ctx: int | None) -> Any:
        """Return a copy."""
        return copy.deepcopy(self.value)


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A state as it is kept. What is in it does not change.

    Attributes:
        make: Class of the state.
        nbytes: What it counts for.
        parts: What is kept of it, by attribute; under the empty name, all of a state whose
            attributes are not all there is to it.
    """

    make: type
    nbytes: int
    parts: Mapping[str, Part]

    def revive(self, n_ctx: int | None = None) -> Any:
        """Return the state: an object of its own, with the large bytes of this one.

        Args:
            n_ctx: Length that its ids shall have, if it is known how to change that; never less
                than its tokens. As long as they were if not given.
        """
        if _WHOLE in self.parts:
            return self.parts[_WHOLE].revive(n_ctx)
        kind: Any = self.make
        state = kind.__new__(kind)
        for name, part in self.parts.items():
            state.__dict__[name] = part.revive(n_ctx)
        return state

    @property
    def attributes(self) -> frozenset[str]:
        """The names of what it is put together from; none of a state that is kept as one."""
        return frozenset(self.parts) - {_WHOLE}

    @property
    def n_tokens(self) -> int | None:
        """Of how many tokens it says that it is."""
        match self.parts.get("n_tokens"):
            case Plain(int(n_tokens)) if not isinstance(n_tokens, bool):
                return n_tokens
        return None

    @property
    def scores_shape(self) -> tuple[int, int] | None:
        """Rows and columns of its scores: one row if they were left out."""
        match self.parts.get("scores"):
            case Zeros(n_columns=n_columns):
                return 1, n_columns
            case Dense(scores) if scores.ndim <= 2:
                n_rows, n_columns = np.atleast_2d(scores).shape
                return n_rows, n_columns
        return None

    @property
    def scores_left_out(self) -> bool:
        """Whether it had scores that are not kept."""
        return isinstance(self.parts.get("scores"), Zeros)

    @property
    def native(self) -> bytes | None:
        """What llama.cpp wrote."""
        match self.parts.get("llama_state"):
            case Raw(bytes(data)):
                return data
        return None


class State:
    """A state read from a file where llama_cpp, which has a class for it, is not installed."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be kept of a state, and how much that is: nothing is copied yet.

    Attributes:
        make: Class of the state.
        nbytes: What its snapshot counts for.
        parts: The parts that will be copied, see `Snapshot`.
    """

    make: type
    nbytes: int
    parts: Mapping[str, Part]

    @classmethod
    def of(cls, value: Any, *, scores_matter: bool = True) -> Plan:
        """Look at a state, without copying what is large. Costs a pass over scores that are zero.

        Args:
            value: A `LlamaState`, or anything that says how large it is.
            scores_matter: False when it is known that whoever loads it never looks at scores.

        Raises:
            InvalidValue: When it does not say how large it is, or says what cannot be.
            Refused: When something in it cannot be copied.
        """
        kind, attributes = type(value), getattr(value, "__dict__", {})
        n_bytes, at_least = _size_of(value, "nbytes"), 0
        if n_bytes is None and not any(isinstance(it, np.ndarray) for it in attributes.values()):
            said = _size_of(value, "llama_state_size")
            if said is None:
                raise InvalidValue(
                    f"{kind.__name__} cannot be kept: it has neither nbytes nor llama_state_size"
                )
            at_least = said
        with _copying(kind):
            if _is_its_attributes(value):
                parts = {name: _part(each) for name, each in attributes.items()}
            else:
                parts = {_WHOLE: Other.of(value)}
            if n_bytes is None:
                if parts.keys() >= _COMPACTED:
                    _cut(parts, scores_matter)
                n_bytes = max(at_least, sum(part.nbytes for part in parts.values()))
        return cls(kind, n_bytes, parts)

    def snapshot(self) -> Snapshot:
        """Return the state as it is to be kept. Costs copies of its arrays."""
        with _copying(self.make):
            parts = {name: part.copied() for name, part in self.parts.items()}
        return Snapshot(self.make, self.nbytes, parts)


@contextmanager
def _copying(kind: type) -> Iterator[None]:
    """Refuse a state in which something cannot be copied."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        raise Refused("uncopyable", f"a {kind.__name__} cannot be copied: {error}") from error


def _size_of(value: Any, name: str) -> int | None:
    size = getattr(value, name, None)
    return None if size is None else whole_number(f"{type(value).__name__}.{name}", size, 0)


def _is_its_attributes(value: Any) -> bool:
    """Return whether a new object with the same attributes is the same."""
    kind: Any = type(value)
    if kind.__new__ is not object.__new__ or not hasattr(value, "__dict__"):
        return False  # as where a base is built in
    slots = any(vars(base).get("__slots__") for base in kind.__mro__)
    return not slots and all(isinstance(name, str) and name for name in vars(value))


def _part(value: Any) -> Part:
    """Return what an attribute is, if no more is known of it."""
    if isinstance(value, np.generic) and value.dtype.kind in "biufU":
        value = value.item()
    if value is None or isinstance(value, (int, float, str)):
        return Plain(value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return Raw(value)
    # Subclasses hold more than items, and of objects an array copies no more than where they are.
    return Dense(value) if type(value) is np.ndarray and _is_leaf(value) else Other.of(value)


def _cut(parts: dict[str, Part], scores_matter: bool) -> None:
    """Leave out what nobody reads who loads a state that has these parts."""
    match parts["input_ids"], parts["n_tokens"]:
        case Dense(ids), Plain(int(n)) if ids.ndim == 1 and 0 <= n <= len(ids):
            parts["input_ids"] = Ids(ids[:n], len(ids))
    match parts["scores"]:
        case Dense(scores) if scores.ndim == 2 and len(scores):
            if not scores_matter or not _any(scores):
                parts["scores"] = Zeros(scores.dtype, scores.shape[1])


def _any(scores: Array) -> bool:
    """Return whether there is a bit that is not zero; stops where it finds one."""
    for start in range(0, len(scores), _SCAN_ROWS):
        # The largest byte is found faster than a number, and minus zero is not zero.
        rows = np.ascontiguousarray(scores[start : start + _SCAN_ROWS])
        if rows.view(np.uint8).max(initial=0):
            return True
    return False


def _type_name(name: str, dtype: np.dtype[Any]) -> str:
    kind = str(dtype.newbyteorder("<").str).replace("|", "<")
    if kind not in TYPES:
        raise Refused("unsupported", f"{name} is of type {dtype}, which has no plain form")
    return kind


def _held(value: Any) -> dict[int, Any]:
    """Return, by id, the bytes and arrays in a value, each once."""
    seen: dict[int, Any] = {}
    level = [value]
    for _ in range(_MAX_DEPTH):
        if not level:
            break
        fresh = {id(each): each for each in level if id(each) not in seen}
        seen |= fresh
        level = [inner for each in fresh.values() for inner in _inside(each)]
    return {key: each for key, each in seen.items() if _is_leaf(each)}


def _is_leaf(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return not value.dtype.hasobject
    return isinstance(value, (bytes, bytearray, memoryview, array.array))


def _inside(value: Any) -> list[Any]:
    """Return what a container or an object holds, except what its copies share."""
    if _is_leaf(value) or isinstance(value, (type, ModuleType, FunctionType, int, float, str)):
        return []
    inside = [*getattr(value, "__dict__", {}).values()]
    for kind in type(value).__mro__:
        slots = [name for name, each in vars(kind).items() if type(each) is MemberDescriptorType]
        inside += [getattr(value, name, None) for name in slots]
    if isinstance(value, dict):
        return [*inside, *value, *value.values()]
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return [*inside, *value]
    return inside + value.ravel().tolist() if isinstance(value, np.ndarray) else inside
