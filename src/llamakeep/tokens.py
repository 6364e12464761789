"""Token arrays, prefix lengths and the names of kept states.

Tokens are one-dimensional ``int32`` arrays everywhere inside llamakeep; `as_tokens` is the one
door through which other forms come in.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

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
    if array.size and not _all_fit(array, n_vocab):
        low, high = int(array.min()), int(array.max())
        limit = _MAX_TOKEN if n_vocab is None else n_vocab - 1
        if low < 0 or high > limit:
            bad = low if low < 0 else high
            where = int(np.flatnonzero(array == bad)[0])
            room = "0 to 2**31 - 1" if n_vocab is None else f"the vocabulary (0 to {limit})"
            raise TokenError(f"token {bad} at index {where} is outside {room}")
    return np.ascontiguousarray(array, dtype=np.int32)


def _all_fit(array: npt.NDArray[np.integer], n_vocab: int | None) -> bool:
    """Return whether all are tokens, in one pass over int32; False if it is not known."""
    if array.dtype != np.int32:
        return False
    limit = _MAX_TOKEN if n_vocab is None else n_vocab - 1
    return int(array.view(np.uint32).max()) <= limit  # negative ones are above all others


def _array_of(tokens: Sequence[int]) -> npt.NDArray[np.integer]:
    if isinstance(tokens, (str, bytes)):
        raise TokenError(f"tokens must be integers, not {type(tokens).__name__}")
    array: npt.NDArray[Any] | None
    try:
        tokens = tokens if isinstance(tokens, (list, tuple)) else list(tokens)
        array = _packed(tokens)
        if array is None:
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
    return array


def _packed(tokens: list[int] | tuple[int, ...]) -> npt.NDArray[np.integer] | None:
    """Return what fits into int32, in a third of `np.asarray`'s time; None if not all does."""
    array = np.empty(len(tokens), np.int32)
    try:
        struct.pack_into(f"{len(tokens)}i", array.data, 0, *tokens)
    except (struct.error, TypeError, ValueError, OverflowError):
        return None
    return array


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
    head = min(n, _FIRST_CHUNK)  # most pairs part early: those cost no copy of all
    found = matched(a[:head].tobytes(), b[:head])
    return found if found < head or head == n else matched(a[:n].tobytes(), b[:n])


def align_down(position: int, align: int) -> int:
    """Return the largest multiple of `align` that is not above `position` (0 at the least)."""
    return max(0, position - position % align)


Kind: TypeAlias = Literal["segment", "checkpoint", "snapshot"]
"""What a kept state is: rows of a span, what is true at one position only, or all of a prompt."""


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where a state belongs: what a tier needs to find it by tokens, and its name.

    Attributes:
        kind: `segment`, `checkpoint` or `snapshot`.
        namespace: Digest of everything that makes states incompatible.
        block: Name of the block that it lies in, which is that of the prefix before `origin`.
        origin: Where that block starts.
        start: Where its span starts, origin <= start < end. A checkpoint is at the end; the span
            of a snapshot is all of its prompt.
        tokens: Tokens [origin, end).
        closes: The block ends here too.
    """

    kind: Kind
    namespace: bytes
    block: bytes
    origin: int
    start: int
    tokens: IntArray
    closes: bool

    @property
    def end(self) -> int:
        """Absolute position of the end: of a checkpoint, its position."""
        return self.origin + int(self.tokens.size)

    @property
    def first(self) -> int:
        """The first token of the span."""
        return int(self.tokens[self.start - self.origin])

    @property
    def next_block(self) -> bytes:
        """Name of the block that starts at the end, or nothing where none does."""
        return block_name(self.block, self.tokens) if self.closes else b""

    @property
    def name(self) -> bytes:
        """The state's name, `NAME_BYTES` long."""
        return state_name(self.kind, self.block, self.start, self.tokens)


class PathNames:
    """The names of the states along one prompt.

    Prompts are cut into blocks of `block_tokens`. A block's name is that of the whole prefix
    before it: BLAKE3 over the name of the block before and that block's tokens, the first one's
    over the namespace. A state lies in one block; its name is BLAKE3 over that block's name, what
    the state is, where its span starts and the block's tokens up to its end. So equal names mean
    interchangeable states, whoever computed them; a name proves the tokens that it stands for;
    and the names of all blocks that may hold something for a prompt follow from the prompt alone.

    Args:
        namespace: Digest of everything that makes states incompatible.
        tokens: The prompt; kept, not copied.
        block_tokens: Tokens of a block, the longest span of a segment.
    """

    def __init__(self, namespace: bytes, tokens: IntArray, block_tokens: int) -> None:
        self._namespace = namespace
        self._tokens = tokens
        self._block_tokens = block_tokens
        self._blocks = [root_name(namespace)]

    def follow(self, tokens: IntArray) -> None:
        """Go on along `tokens`; blocks that they share with the prompt before stay hashed."""
        common = common_prefix(self._tokens, tokens)
        del self._blocks[common // self._block_tokens + 1 :]
        self._tokens = tokens

    def block(self, origin: int) -> bytes:
        """Return the name of the block that starts at `origin`, a multiple of `block_tokens`.

        Raises:
            TokenError: When it starts elsewhere, or the path is shorter.
        """
        index, rest = divmod(origin, self._block_tokens)
        if rest or not 0 <= origin <= self._tokens.size:
            raise TokenError(f"no block at {origin}: the path has {self._tokens.size} tokens")
        while len(self._blocks) <= index:
            start = (len(self._blocks) - 1) * self._block_tokens
            tokens = self._tokens[start : start + self._block_tokens]
            self._blocks.append(block_name(self._blocks[-1], tokens))
        return self._blocks[index]

    def segment(self, start: int, end: int) -> Place:
        """Return the place of the segment of tokens [start, end), all in one block."""
        return self._place("segment", start, end)

    def checkpoint(self, start: int, position: int) -> Place:
        """Return the place of the checkpoint after `position` tokens, in a span from `start` on."""
        return self._place("checkpoint", start, position)

    def _place(self, kind: Kind, start: int, end: int) -> Place:
        origin = align_down(start, self._block_tokens)
        if not start < end <= min(origin + self._block_tokens, self._tokens.size):
            raise TokenError(
                f"no {kind} of tokens {start} to {end}: the path has {self._tokens.size}, in "
                f"blocks of {self._block_tokens}"
            )
        tokens = self._tokens[origin:end].copy()  # places live longer than prompts
        closes = end == origin + self._block_tokens
        return Place(kind, self._namespace, self.block(origin), origin, start, tokens, closes)


def snapshot_name(namespace: bytes, tokens: IntArray) -> bytes:
    """Return the name of the whole state of a prompt."""
    return state_name("snapshot", root_name(namespace), 0, tokens)


def snapshot_place(namespace: bytes, tokens: IntArray) -> Place:
    """Return the place of the whole state of a prompt, which stands for itself alone.

    Raises:
        TokenError: Without tokens.
    """
    if not tokens.size:
        raise TokenError("no snapshot of 0 tokens has a place")
    return Place("snapshot", namespace, root_name(namespace), 0, 0, tokens.copy(), False)


def root_name(namespace: bytes) -> bytes:
    """Return the name of a namespace's first block."""
    return blake3(b"llamakeep prefix\0" + namespace).digest()


def block_name(block: bytes, tokens: IntArray) -> bytes:
    """Return the name of the block that follows one of that name and those tokens."""
    return blake3(block + b"block\0" + tokens.astype("<i4", copy=False).tobytes()).digest()


def state_name(kind: Kind, block: bytes, start: int, tokens: IntArray) -> bytes:
    """Return the name of a state.

    Args:
        kind: What it is.
        block: Name of the block that it lies in.
        start: Where its span starts; of no matter for a checkpoint, which is true at its end.
        tokens: From the start of the block to the end of the state.
    """
    start_bytes = (start if kind == "segment" else 0).to_bytes(8, "little")
    head = block + kind.encode() + b"\0" + start_bytes
    return blake3(head + tokens.astype("<i4", copy=False).tobytes()).digest()
