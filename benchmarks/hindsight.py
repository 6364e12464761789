"""Tables of how long blocks of each class wait, made knowing the trace.

Counted as `hazard` counts: of what began to wait in a bucket of time, how many were used in it.
What little evidence says is drawn to what more of it says: that of a class to that of the features
before its last one, and so on to that of everything. What it is worth to keep a block is the most
uses that it gets for a second of room (`policy/survival.py`).
"""

from __future__ import annotations

from math import prod
from typing import Final

import numpy as np

from benchmarks.features import Classes, groups_of
from benchmarks.oracles import Floats, Future, Ints, Worth
from llamakeep.errors import InvalidValue
from llamakeep.policy.survival import EDGES, N_BUCKETS, hit_density

PRIOR: Final = 20.0
"""What coarser classes count for, in blocks, against the evidence of a finer one."""
_WIDTHS: Final = (*np.diff(EDGES).tolist(), EDGES[-1])


def waits(future: Future, start: int, end: int) -> tuple[Ints, Floats, Ints]:
    """Return how long blocks wait that requests `start` to `end` use, as far as these tell.

    Returns:
        Which uses these are; seconds until the next use, or until the last of these requests;
        whether that was a use, 1 or 0.

    Raises:
        InvalidValue: Where there are no such requests.
    """
    if not 0 <= start < end <= future.n_requests:
        raise InvalidValue(f"there are no requests {start} to {end} of {future.n_requests}")
    uses = np.arange(future.starts[start], future.starts[end])
    next_uses = future.next_uses[uses]
    ends = np.minimum(next_uses, end - 1)
    seconds = future.times[ends] - future.times[future.owners[uses]]
    return uses, seconds, (next_uses < end).astype(np.int64)


def tables(
    future: Future, classes: Classes, start: int = 0, end: int = 0, *, by_case: bool = False
) -> list[list[float]]:
    """Return for each class and bucket what it is worth to keep a block, by what requests tell.

    Args:
        future: Of the trace.
        classes: The class of each use.
        start: The first request that counts.
        end: The one after the last that counts; 0 for all.
        by_case: Let blocks of one class that one request used count as one, all together: they are
            mostly used again together, or not. Else each counts as one.
    """
    uses, seconds, was_used = waits(future, start, end or future.n_requests)
    counts = np.ones(uses.size)
    if by_case:
        of_uses = groups_of(future, classes)[1][uses]
        counts /= np.bincount(of_uses)[of_uses]
    waited = seconds / classes.scales[uses]
    buckets = np.searchsorted(EDGES, waited, side="right") - 1
    klasses, n_classes = classes.klasses[uses], classes.n_classes
    shape = n_classes, N_BUCKETS
    cells = klasses * N_BUCKETS + buckets
    ended = np.bincount(cells, weights=counts, minlength=prod(shape)).reshape(shape)
    used = np.bincount(cells, weights=counts * was_used, minlength=prod(shape)).reshape(shape)
    began = np.cumsum(ended[:, ::-1], axis=1)[:, ::-1]
    chances = (used.sum(axis=0) / (began.sum(axis=0) + 1.0))[None]
    for level in range(len(classes.sizes)):
        n_coarse, n_fine = prod(classes.sizes[: level + 1]), prod(classes.sizes[level + 1 :])
        u, n = (each.reshape(n_coarse, n_fine, -1).sum(axis=1) for each in (used, began))
        prior = np.repeat(chances, classes.sizes[level], axis=0)
        chances = (u + PRIOR * prior) / (n + PRIOR)
    rows, of_classes = np.unique(chances, axis=0, return_inverse=True)  # many have no evidence
    worths = [hit_density(row, _WIDTHS) for row in rows.tolist()]
    return [worths[row] for row in of_classes.reshape(-1).tolist()]


def oracle(
    future: Future,
    classes: Classes,
    start: int = 0,
    end: int = 0,
    *,
    by_case: bool = False,
    selective: bool = True,
) -> Worth:
    """Return a policy that ranks by the tables of some requests. See `tables`."""
    worths = tables(future, classes, start, end, by_case=by_case)
    return Worth(future, classes.klasses, classes.scales, worths, selective=selective)
