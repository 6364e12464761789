"""What a cache can know of a block without knowing the future, in classes.

Everything is known at each use of a block, that use included, and holds until its next one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Final

import numpy as np

from benchmarks.oracles import Floats, Future, Ints

USUAL_GAP_S: Final = 16.0
LEAST_GAP_S: Final = 0.25
_NEVER_WAITED = -1.0


@dataclass(frozen=True, slots=True, eq=False)
class Past:
    """What is known at each use of a trace, one number a use.

    Attributes:
        turns: Prompts that had the block or, before there was one, what it goes on from.
        hits: Earlier uses of the block itself.
        gaps_s: How long it waited before, in seconds; of a new block, what it goes on from; below
            0 where there is none.
        children: Different blocks that have followed it.
        shared: Whether prompts have parted behind it.
        to_end: Blocks from it to the end of its prompt.
        depths: Blocks before it.
        lengths: Blocks of its prompt.
    """

    turns: Ints
    hits: Ints
    gaps_s: Floats
    children: Ints
    shared: Ints
    to_end: Ints
    depths: Ints
    lengths: Ints


def past_of(future: Future) -> Past:
    """Return what is known at each use. Costs one pass over the requests."""
    n_uses, n_blocks = future.blocks.size, future.n_blocks
    turns, hits, children, shared = (np.zeros(n_uses, np.int64) for _ in range(4))
    gaps_s = np.zeros(n_uses)
    n_turns, n_hits, n_children, is_shared = (np.zeros(n_blocks, np.int64) for _ in range(4))
    last_s, gap_s = np.full(n_blocks, -np.inf), np.full(n_blocks, _NEVER_WAITED)
    for request in range(future.n_requests):
        uses, now = future.uses_of(request), future.times[request]
        path = future.blocks[uses]
        if not path.size:
            continue
        n_old = int(np.count_nonzero(last_s[path] >= 0.0))  # old ones are a prefix
        old, new = path[:n_old], path[n_old:]
        gap_s[old] = now - last_s[old]
        if new.size and n_old:
            end = old[-1]
            if n_children[end]:
                is_shared[old] = 1  # prompts part here, so they do behind all before it
            else:
                n_turns[new], gap_s[new] = n_turns[end], gap_s[end]
            n_children[end] += 1
        n_children[new[:-1]] = 1
        n_turns[path] += 1
        last_s[path] = now
        for of_uses, of_blocks in (
            (turns, n_turns),
            (hits, n_hits),
            (children, n_children),
            (shared, is_shared),
            (gaps_s, gap_s),
        ):
            of_uses[uses] = of_blocks[path]
        n_hits[path] += 1
    lengths = np.diff(future.starts)[future.owners]
    to_end = lengths - future.depths - 1
    return Past(turns, hits, gaps_s, children, shared, to_end, future.depths, lengths)


@dataclass(frozen=True, slots=True)
class Feature:
    """Something that is known of blocks, in a few classes.

    Attributes:
        name: What it is.
        n_classes: How many there are.
        of: Returns the class of each use, from 0 on.
    """

    name: str
    n_classes: int
    of: Callable[[Past], Ints]


def octaves(n_classes: int, values: Floats | Ints, least: float = 1.0) -> Ints:
    """Return how often `least` can be doubled without exceeding a value, the last class open."""
    found = np.floor(np.log2(np.maximum(values / least, 1.0))).astype(np.int64)
    return np.minimum(found, n_classes - 1)


def _turns(counts: Ints) -> Ints:
    """Return classes of a number of turns: 1; 2; 3 and 4; 5 to 8; more."""
    return np.searchsorted([2, 3, 5, 9], counts, side="right").astype(np.int64)


def _gaps(gaps_s: Floats) -> Ints:
    """Return classes of waits: none; below half a second; octaves."""
    return np.where(gaps_s < 0, 0, 1 + octaves(11, gaps_s, LEAST_GAP_S))


_FEATURES: Final = (
    Feature("age alone", 1, lambda past: np.zeros_like(past.turns)),
    Feature("turns", 5, lambda past: _turns(past.turns)),
    Feature("own hits", 5, lambda past: _turns(past.hits + 1)),
    Feature("last gap", 12, lambda past: _gaps(past.gaps_s)),
    Feature("children", 3, lambda past: np.minimum(past.children, 2)),
    Feature("shared", 2, lambda past: past.shared),
    Feature("distance from the end", 9, lambda past: octaves(9, past.to_end + 1)),
    Feature("depth", 9, lambda past: octaves(9, past.depths + 1)),
    Feature("prompt length", 9, lambda past: octaves(9, past.lengths)),
    Feature("ends a turn", 2, lambda past: (past.to_end == 0).astype(np.int64)),
)
FEATURES: Final = {feature.name: feature for feature in _FEATURES}


@dataclass(frozen=True, slots=True)
class FeatureSet:
    """Features together, each of the classes of one parted by the next.

    Attributes:
        features: Their names; the evidence of what all have in common is drawn to that of what
            all but the last have.
        gap_power: Time is measured against this power of the last gap; 0 for as it is.
    """

    features: tuple[str, ...]
    gap_power: float = 0.0

    @property
    def name(self) -> str:
        """What it is called in tables."""
        against = f" / gap^{self.gap_power:g}" if self.gap_power else ""
        return " + ".join(self.features) + against


SETS: Final = (
    FeatureSet(("shared", "turns")),
    FeatureSet(("shared", "turns"), gap_power=0.5),
    FeatureSet(("shared", "turns", "last gap")),
    FeatureSet(("shared", "turns", "last gap", "prompt length")),
    FeatureSet(("shared", "turns", "last gap", "prompt length", "depth")),
)
"""The second one is what `hazard` goes by, which learns the power. The last ones have more classes
than there is evidence."""


@dataclass(frozen=True, slots=True, eq=False)
class Classes:
    """The class of each use of a trace.

    Attributes:
        name: What they are.
        sizes: How many classes each feature has; the last one changes fastest.
        klasses: The class of each use.
        scales: Seconds that count as one, for each use.
    """

    name: str
    sizes: tuple[int, ...]
    klasses: Ints
    scales: Floats

    @property
    def n_classes(self) -> int:
        """How many there are."""
        return prod(self.sizes)


def classes_of(past: Past, features: FeatureSet) -> Classes:
    """Return the class of each use by some features."""
    chosen = [FEATURES[name] for name in features.features]
    klasses = np.zeros_like(past.turns)
    for feature in chosen:
        klasses = klasses * feature.n_classes + feature.of(past)
    waited = np.maximum(past.gaps_s, LEAST_GAP_S) / USUAL_GAP_S
    scales = np.where(past.gaps_s < 0, 1.0, waited**features.gap_power)
    return Classes(features.name, tuple(each.n_classes for each in chosen), klasses, scales)


def groups_of(future: Future, classes: Classes) -> tuple[Floats, Ints]:
    """Return the groups of uses that are of one request and one class, and the group of each use.

    Returns:
        For each group its request, class and scale, in columns; the column of each use.
    """
    keys = np.stack((future.owners.astype(float), classes.klasses.astype(float), classes.scales))
    groups, of_uses = np.unique(keys, axis=1, return_inverse=True)
    return groups, of_uses.reshape(-1)


def shuffled(future: Future, classes: Classes, rng: np.random.Generator) -> Classes:
    """Return classes that say nothing, of which everything else is the same.

    The uses of one request that were of one class still are; which class that is, is dealt anew
    among all such groups of the trace.
    """
    groups, of_uses = groups_of(future, classes)
    dealt = groups[:, rng.permutation(groups.shape[1])][:, of_uses]
    return Classes(
        f"{classes.name}, dealt anew", classes.sizes, dealt[1].astype(np.int64), dealt[2]
    )
