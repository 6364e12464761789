"""What was evicted, so that it can be told of a prompt that it would have served."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from blake3 import blake3

from llamakeep.tokens import IntArray, common_prefix

MOST_EVICTIONS: Final = 4096
"""Those before are forgotten: then nothing is claimed."""
_NAME_BYTES: Final = 16


@dataclass(frozen=True, slots=True)
class Eviction:
    """A state that went to make room.

    Attributes:
        namespace: Digest of its namespace.
        n_tokens: Where it ends: it stood for so many tokens.
        name: Digest of these tokens.
        exact: It would have served prompts that begin with all of them, and no others.
        at_s: When, in seconds.
    """

    namespace: bytes
    n_tokens: int
    name: bytes
    exact: bool
    at_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """What a request has left behind.

    Attributes:
        tokens: What it held, and might be kept.
        ended_s: When it ended.
    """

    tokens: IntArray
    ended_s: float


class Evictions:
    """The last evictions. One thread at a time."""

    def __init__(self) -> None:
        self._gone: deque[Eviction] = deque(maxlen=MOST_EVICTIONS)

    def add(self, namespace: bytes, tokens: IntArray, *, exact: bool, at_s: float) -> None:
        """Note one. Costs a hash of the tokens."""
        (name,) = _names(tokens, (int(tokens.size),))
        self._gone.append(Eviction(namespace, int(tokens.size), name, exact, at_s))

    def clear(self) -> None:
        """Forget all of them."""
        self._gone.clear()

    def snapshot(self) -> Sequence[Eviction]:
        """Return all of them, for `deepest`."""
        return tuple(self._gone)


def deepest(
    gone: Iterable[Eviction],
    namespace: bytes,
    prompt: IntArray,
    requests: Iterable[Held],
    *,
    above: int,
    before_s: float,
) -> int:
    """Return up to which token a prompt would have been served by what was evicted; 0 for none.

    A state counts if a request before has left exactly it behind, if it went after the last such
    request had ended, and before the prompt was looked up. What was never kept was never evicted
    either, so what is returned is proven. Costs a hash of each request's tokens that share more
    than `above` with the prompt.

    Args:
        gone: What was evicted.
        namespace: Of the prompt.
        prompt: Its tokens.
        requests: Those before it, in its namespace.
        above: Tokens up to which it was served, or might have been.
        before_s: When it was looked up.
    """
    found = [each for each in gone if each.namespace == namespace and each.n_tokens > above]
    ends = sorted({each.n_tokens for each in found})
    if not ends:
        return 0
    last: dict[bytes, tuple[float, int]] = {}  # by name: when it was left behind last, what of use
    for each in requests:
        common = common_prefix(each.tokens, prompt)
        if common <= above:
            continue
        there = [end for end in ends if end <= each.tokens.size]
        for name in _names(each.tokens, there):
            ended_s, most = last.get(name, (each.ended_s, common))
            last[name] = max(ended_s, each.ended_s), max(most, common)
    deep = 0
    for one in found:
        if one.name not in last or one.at_s > before_s:
            continue
        ended_s, common = last[one.name]
        if ended_s <= one.at_s and not (one.exact and one.n_tokens > common):
            deep = max(deep, min(one.n_tokens, common))
    return deep


def _names(tokens: IntArray, ends: Sequence[int]) -> list[bytes]:
    """Return a digest of the tokens up to each of the ends, which ascend."""
    hasher, start, names = blake3(), 0, []
    for end in ends:
        hasher.update(tokens[start:end].astype("<i4", copy=False).tobytes())
        names.append(hasher.digest(_NAME_BYTES))
        start = end
    return names
