"""The form in which a state is kept: what is large is shared, what no reader needs is left out.

`Llama.save_state()` of llama-cpp-python copies more than `load_state` reads: `n_batch * n_vocab`
scores, which are never computed unless the model was loaded with `logits_all`, and `n_ctx` token
ids of which only the first `n_tokens` mean anything. Left out, they make a state of SmolLM2 after
1,000 tokens 23 MB instead of 123. `Snapshot.revive` gives back what `load_state` takes for the
same: one row of zeros, which it broadcasts, and ids of full length.

Scores that were never computed are zero where the system gave fresh memory for them, as it does for
large arrays. Where they are not, they are left out only if it is known whose they are.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from llamakeep.errors import InvalidValue, whole_number

Array = npt.NDArray[Any]

NO_TOKEN = -1
"""Stands where ids were left out: no prompt goes on with it."""

_COMPACTED = {"input_ids", "scores", "n_tokens", "llama_state", "llama_state_size", "seed"}
"""The attributes of the one kind of state whose `load_state` is known well enough to leave
something out: that of llama-cpp-python 0.3.36. Forks add to them."""

_SCAN_ROWS = 64


class Zeros(NamedTuple):
    """Scores that were left out: how wide they were, and of which type."""

    n_columns: int
    dtype: np.dtype[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A state as it is kept. What is in it does not change.

    Attributes:
        make: Class of the state.
        nbytes: What it counts for.
        plain: Attributes that are numbers, text or None.
        raw: Attributes that are bytes, shared with whoever has them.
        arrays: Attributes that are arrays, our own copies.
        full_length: Of an array of ids that was cut, how long it was.
        zeros: Attributes that were arrays of scores, all zero.
        other: What is none of that, by attribute; under the empty name, a whole state whose
            attributes are not all there is to it. Copied in depth, when it comes in and when it
            goes out; bytes in it are shared.
    """

    make: type
    nbytes: int
    plain: Mapping[str, int | float | str | None] = field(default_factory=dict)
    raw: Mapping[str, bytes] = field(default_factory=dict)
    arrays: Mapping[str, Array] = field(default_factory=dict)
    full_length: Mapping[str, int] = field(default_factory=dict)
    zeros: Mapping[str, Zeros] = field(default_factory=dict)
    other: Mapping[str, Any] = field(default_factory=dict)

    def revive(self, n_ctx: int | None = None) -> Any:
        """Return the state: an object of its own, with the large bytes of this one.

        Args:
            n_ctx: Length that its ids shall have, if they were cut; as long as they were if not
                given.
        """
        if "" in self.other:
            return copy.deepcopy(self.other[""])
        kind: Any = self.make
        state = kind.__new__(kind)
        state.__dict__.update(self.plain)
        state.__dict__.update(self.raw)
        for name, array in self.arrays.items():
            length = self.full_length.get(name)
            if length is None:
                state.__dict__[name] = array.copy()
            else:
                ids = np.full(max(n_ctx or length, len(array)), NO_TOKEN, array.dtype)
                ids[: len(array)] = array
                state.__dict__[name] = ids
        for name, zeros in self.zeros.items():
            state.__dict__[name] = np.zeros((1, zeros.n_columns), zeros.dtype)
        for name, value in self.other.items():
            state.__dict__[name] = copy.deepcopy(value)
        return state


class State:
    """A state read from a file where llama_cpp, which has a class for it, is not installed."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What will be kept of a state, and how much that is: nothing is copied yet.

    Attributes:
        value: The state.
        nbytes: What its snapshot counts for.
    """

    value: Any
    nbytes: int
    _is_cut: bool
    _has_zeros: bool

    @classmethod
    def of(cls, value: Any, *, scores_matter: bool = True) -> Plan:
        """Look at a state, without copying it. Costs a pass over scores that are all zero.

        Args:
            value: A `LlamaState`, or anything that says how large it is.
            scores_matter: False when it is known that whoever loads it never looks at scores.

        Raises:
            InvalidValue: When it does not say how large it is, or says what cannot be.
        """
        attributes = getattr(value, "__dict__", {})
        own = _size_of(value, "nbytes")
        is_cut = has_zeros = False
        if own is None and attributes.keys() == _COMPACTED:
            ids, n_tokens = attributes["input_ids"], attributes["n_tokens"]
            is_cut = (
                isinstance(ids, np.ndarray)
                and ids.ndim == 1
                and isinstance(n_tokens, int)
                and 0 <= n_tokens < len(ids)
            )
            scores = attributes["scores"]
            has_zeros = (
                isinstance(scores, np.ndarray)
                and scores.ndim == 2
                and len(scores) > 0
                and (not scores_matter or not _any(scores))
            )
        if own is not None:
            return cls(value, own, False, False)
        if any(isinstance(each, np.ndarray) for each in attributes.values()):
            n_bytes = 0
            for name, each in attributes.items():
                if name == "input_ids" and is_cut:
                    n_bytes += attributes["n_tokens"] * each.itemsize
                elif isinstance(each, np.ndarray) and not (name == "scores" and has_zeros):
                    n_bytes += each.nbytes
                elif isinstance(each, (bytes, bytearray, memoryview)):
                    n_bytes += memoryview(each).nbytes
            return cls(value, n_bytes, is_cut, has_zeros)
        legacy = _size_of(value, "llama_state_size")
        if legacy is None:
            raise InvalidValue(
                f"{type(value).__name__} cannot be kept: it has neither nbytes nor llama_state_size"
            )
        return cls(value, legacy, False, False)

    def snapshot(self) -> Snapshot:
        """Return the state as it is to be kept. Costs copies of the arrays that are.

        Raises:
            InvalidValue: When something in it cannot be copied.
        """
        value = self.value
        if not _is_its_attributes(value):
            return Snapshot(type(value), self.nbytes, other={"": _copied(value)})
        plain: dict[str, int | float | str | None] = {}
        raw: dict[str, bytes] = {}
        arrays: dict[str, Array] = {}
        full_length: dict[str, int] = {}
        zeros: dict[str, Zeros] = {}
        other: dict[str, Any] = {}
        for name, each in value.__dict__.items():
            if name == "scores" and self._has_zeros:
                zeros[name] = Zeros(each.shape[1], each.dtype)
            elif name == "input_ids" and self._is_cut:
                arrays[name] = _frozen(each[: value.n_tokens].copy())
                full_length[name] = len(each)
            elif isinstance(each, np.ndarray):
                arrays[name] = _frozen(each.copy())
            elif isinstance(each, (bytes, bytearray, memoryview)):
                raw[name] = bytes(each)  # of bytes, no copy
            elif each is None or isinstance(each, (int, float, str)):
                plain[name] = each
            else:
                other[name] = _copied(each)
        return Snapshot(type(value), self.nbytes, plain, raw, arrays, full_length, zeros, other)


def _is_its_attributes(value: Any) -> bool:
    """Return whether a new object with the same attributes is the same."""
    kind = type(value)
    inherited = any(base.__module__ == "builtins" for base in kind.__mro__ if base is not object)
    slots = any(getattr(base, "__slots__", ()) for base in kind.__mro__)
    return hasattr(value, "__dict__") and not inherited and not slots


def _copied(value: Any) -> Any:
    try:
        return copy.deepcopy(value)
    except Exception as error:
        raise InvalidValue(f"a {type(value).__name__} cannot be copied: {error}") from error


def _size_of(value: Any, name: str) -> int | None:
    size = getattr(value, name, None)
    return None if size is None else whole_number(f"{type(value).__name__}.{name}", size, 0)


def _any(scores: Array) -> bool:
    """Return whether there is a bit that is not zero; stops where it finds one."""
    if not scores.flags.c_contiguous:
        return bool(np.count_nonzero(scores))
    for start in range(0, len(scores), _SCAN_ROWS):
        rows = scores[start : start + _SCAN_ROWS].reshape(-1)
        # Bits, not values: they are compared faster, and minus zero is none.
        if rows.view(np.uint8)[: rows.nbytes // 8 * 8].view(np.uint64).any() or (
            rows.nbytes % 8 and rows.view(np.uint8)[rows.nbytes // 8 * 8 :].any()
        ):
            return True
    return False


def _frozen(array: Array) -> Array:
    array.flags.writeable = False
    return array
