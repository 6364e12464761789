"""Finding what begins like a prompt among any number of states, without reading them.

Of each prefix of a block's tokens a byte is kept: its *trace*. Two sequences have the same trace as
far as they agree, and then other bytes, up to chance. In a list that is ordered by traces, those
that agree with a prompt furthest are therefore the neighbours of the place where the prompt itself
would stand, however long the list is. A byte follows from all tokens before it, so a chance hit
(one in 256) ends with the next byte: among a million sequences, the neighbours agree with a prompt
for at most some three tokens less than the best one does.

A trace is no proof: who wants to know reads the tokens, which the name of the state proves.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from llamakeep.stores.envelope import MAX_TOKENS
from llamakeep.tokens import NAME_BYTES, IntArray

_Words = npt.NDArray[np.uint64]

_WEIGHT = 0x9E3779B97F4A7C15
_MIX = (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)
_TAIL, _CLOSING = b"\0", b"\1"


def trace(tokens: IntArray) -> bytes:
    """Return a byte for each prefix of a block's tokens, the shortest one first.

    The same on all machines: it is part of what is stored.
    """
    weighted = (tokens.astype(np.uint64) + np.uint64(1)) * _weights(tokens.size)
    words: _Words = np.cumsum(weighted, dtype=np.uint64)
    for factor in _MIX:  # the sum differs by the same amount behind a difference; this does not
        words ^= words >> np.uint64(33)
        words *= np.uint64(factor)
    first: npt.NDArray[np.uint8] = (words >> np.uint64(56)).astype(np.uint8)
    return first.tobytes()


def member(span: bytes, name: bytes, *, closes: bool) -> bytes:
    """Return what stands for a segment in a list.

    Args:
        span: The trace of its span.
        name: Its name.
        closes: Its block ends with it: it can be found without a list.
    """
    return span + name + (_CLOSING if closes else _TAIL)


def parsed(member: bytes) -> tuple[int, bytes, bool] | None:
    """Return tokens, name and whether the block ends there; None for what is no member."""
    n_tokens = len(member) - NAME_BYTES - 1
    if not 1 <= n_tokens <= MAX_TOKENS or member[-1:] not in (_TAIL, _CLOSING):
        return None
    return n_tokens, member[n_tokens:-1], member[-1:] == _CLOSING


def around(span: bytes, name: bytes) -> tuple[bytes, bytes]:
    """Return the bounds of what stands before and behind a segment of that name, without it."""
    return b"(" + span + name, b"(" + span + name + b"\xff"


def _weights(n_tokens: int) -> _Words:
    return _powers(max(256, 1 << (n_tokens - 1).bit_length()))[:n_tokens]


@lru_cache(maxsize=4)
def _powers(n: int) -> _Words:
    powers: _Words = np.cumprod(np.full(n, _WEIGHT, np.uint64), dtype=np.uint64)
    powers.flags.writeable = False
    return powers
