"""Token arrays, prefix lengths and the names of kept states.

Tokens are one-dimensional ``int32`` arrays everywhere inside llamakeep; `as_tokens` is the one
door through which other forms come in.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TypeAlias, cast

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from llamakeep.errors import TokenError

IntArray: TypeAlias = npt.NDArray[np.int32]
TokensLike: TypeAlias = Sequence[int] | npt.NDArray[np.integer]

NAME_BYTES = 32
"""Length of a state's name (a BLAKE3 digest)."""

_MAX_TOKEN = 2**31 - 1
_TOKEN_BYTES = 4
_FIRST_CHUNK = 64
_CHUNK_GROWTH = 8


def as_tokens(tokens: TokensLike, *, n_vocab: int | None = None) -> IntArray:
    """Return `tokens` as a contiguous one-dimensional int32 array.

    Args:
        tokens: Token ids: a list, a tuple or an integer array.
        n_vocab: When given, ids must be below it.

    Returns:
        The same array when it already is contiguous int32 (no copy), else a new one.

    Raises:
        TokenError: For other shapes or types, and for an id that is negative, above int32 or
            outside the vocabulary; the message names the id and where it stands.
    """
    if isinstance(tokens, np.ndarray):
        array = tokens
        if array.ndim != 1:
            raise TokenError(f"tokens must have one dimension, not {array.ndim}")
        if array.dtype.kind not in "iu":
            if array.size:
                raise TokenError(f"tokens must be integers, not {array.dtype}")
            return np.empty(0, np.int32)
    else:
        array = _array_of(tokens)
    if array.size:
        low, high = int(array.min()), int(array.max())
        limit = _MAX_TOKEN if n_vocab is None else n_vocab - 1
        if low < 0 or high > limit:
            bad = low if low < 0 else high
            where = int(np.flatnonzero(array == bad)[0])
            room = "0 to 2**31 - 1" if n_vocab is None else f"the vocabulary (0 to {limit})"
            raise TokenError(f"token {bad} at index {where} is outside {room}")
    return np.ascontiguousarray(array, dtype=np.int32)


def _array_of(tokens: Sequence[int]) -> npt.NDArray[np.int64]:
    if isinstance(tokens, (str, bytes)):
        raise TokenError(f"tokens must be integers, not {type(tokens).__name__}")
    try:
        tokens = tokens if isinstance(tokens, (list, tuple)) else list(tokens)
        array = np.asarray(tokens)
    except (TypeError, ValueError, OverflowError) as error:
        raise TokenError(f"tokens must be a flat list of integers: {error}") from error
    if array.ndim != 1:
        raise TokenError(f"tokens must have one dimension, not {array.ndim}")
    if array.size and array.dtype.kind != "i":
        for index, token in enumerate(tokens):
            try:
                value = operator.index(token)
            except TypeError:
                raise TokenError(f"token {token!r} at index {index} is not an integer") from None
            if not 0 <= value <= _MAX_TOKEN:
                raise TokenError(f"token {value} at index {index} is outside 0 to 2**31 - 1")
        array = np.asarray([operator.index(token) for token in tokens], dtype=np.int64)
    return cast("npt.NDArray[np.int64]", array)


def matched(raw: bytes, piece: IntArray) -> int:
    """Return how many leading tokens of `piece` equal those in `raw`, which is at least as long.

    Costs one memcmp where all are equal, else a few that follow the depth of the difference.
    """
    # An array is a buffer; its type says so only from Python 3.12 on.
    startswith: Callable[..., bool] = raw.startswith
    if startswith(piece):
        return len(piece)
    # memcmp says whether there is a difference, not where. Growing chunks find it at a cost
    # that follows its depth, not the edge's length.
    low, step = 0, _FIRST_CHUNK
    while startswith(piece[low : low + step], low * _TOKEN_BYTES):
        low, step = low + step, step * _CHUNK_GROWTH
    rest = piece[low : low + step]
    edge = np.frombuffer(raw, np.int32, len(rest), low * _TOKEN_BYTES)
    return low + int((edge != rest).argmax())


def common_prefix(a: IntArray, b: IntArray) -> int:
    """Return how many leading tokens `a` and `b` share."""
    n = min(a.size, b.size)
    return matched(a[:n].tobytes(), b[:n])


def align_down(position: int, align: int) -> int:
    """Return the largest multiple of `align` that is not above `position` (0 at the least)."""
    return max(0, position - position % align)


class PathNames:
    """The names of the states along one prompt, each from one pass over its tokens.

    A name is BLAKE3 over the namespace, the tokens up to the end of the span, what the state is
    and where its span starts. Equal names mean interchangeable states, whoever computed them.
    The hasher moves forward with the path, so no prefix is hashed once per state on it.
    """

    def __init__(self, namespace: bytes, tokens: IntArray) -> None:
        self._tokens = tokens
        self._hasher = blake3(namespace)
        self._done = 0

    @property
    def n_hashed(self) -> int:
        """Tokens that are hashed already; names before them are not to be had any more."""
        return self._done

    def follow(self, tokens: IntArray) -> bool:
        """Go on along `tokens` if they begin with all that is hashed; return whether they do."""
        if not np.array_equal(tokens[: self._done], self._tokens[: self._done]):
            return False
        self._tokens = tokens
        return True

    def _at(self, end: int, kind: bytes, start: int) -> bytes:
        if end < self._done:
            raise TokenError(f"names go forward: {end} comes before {self._done}")
        if end > self._tokens.size:
            raise TokenError(f"no name at {end}: the path has {self._tokens.size} tokens")
        if end > self._done:
            self._hasher.update(self._tokens[self._done : end].astype("<i4").tobytes())
            self._done = end
        return self._hasher.copy().update(kind + start.to_bytes(8, "little")).digest()

    def segment(self, start: int, end: int) -> bytes:
        """Return the name of the segment of tokens [start, end)."""
        return self._at(end, b"segment", start)

    def checkpoint(self, position: int) -> bytes:
        """Return the name of the checkpoint after `position` tokens."""
        return self._at(position, b"checkpoint", position)
