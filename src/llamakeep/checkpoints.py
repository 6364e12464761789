"""Checkpoints: where to take them, which to restore, which to drop.

A checkpoint is the rolling part of a state (a sliding window, a recurrent state) at one position.
Taking one costs a read of constant size and splits the prefill, so they are taken where a later
prompt is likely to diverge, and nowhere else.

These functions say where they are taken and which is dropped for one prompt of the prefix tree.
The list that a slot of a server has, by llama-server's rules or better ones, is in
`checkpoint_list.py`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import pairwise

from llamakeep.errors import InvalidValue
from llamakeep.tokens import align_down

MIN_EVALUATED = 2
"""Prompt tokens that are always evaluated: a row evaluated alone is rounded differently."""


def deepest_resume(n_tokens: int, align: int, min_evaluated: int = MIN_EVALUATED) -> int:
    """Return the deepest position a prompt of `n_tokens` may be resumed at (0 at the least).

    It leaves `min_evaluated` tokens to evaluate and is a multiple of `align`.
    """
    return align_down(n_tokens - min_evaluated, align)


def positions_to_take(
    n_tokens: int,
    resume: int,
    *,
    align: int,
    min_step: int,
    user_starts: Sequence[int] = (),
    branch: int = 0,
    present: Iterable[int] = (),
    min_evaluated: int = MIN_EVALUATED,
) -> list[int]:
    """Return the positions at which to take a checkpoint while a prompt is evaluated.

    They are: near the prompt's end (the last position a repeat can resume at), at the last user
    message (a regenerated or edited answer diverges after it), at each earlier user message that
    is at least `min_step` tokens past the checkpoint before it, and where this prompt left the
    ones known before (the next one will leave there too).

    Args:
        n_tokens: Length of the prompt.
        resume: Tokens that need no evaluation; only later positions can be taken.
        align: Positions are rounded down to multiples of this.
        min_step: Least distance between checkpoints at earlier user messages, in tokens.
        user_starts: Positions where a user message starts, ascending.
        branch: Position where the prompt left what was known; 0 for none.
        present: Positions that have a checkpoint already.
        min_evaluated: Tokens that whoever resumes the prompt leaves to evaluate.

    Returns:
        Ascending positions in (resume, n_tokens].
    """
    known = frozenset(present)
    deepest = deepest_resume(n_tokens, align, min_evaluated)
    starts = [align_down(start, align) for start in user_starts if start <= deepest]
    wanted = {deepest, align_down(min(branch, deepest), align), *starts[-1:]}
    wanted = {position for position in wanted if position > resume}
    # What lies before `resume` and is not there will not be: it is no step to count from.
    taken = sorted({0, *known, *wanted})
    for start in starts[:-1]:
        before = taken[bisect_right(taken, start) - 1]
        if start > resume and start - before >= min_step:
            taken.insert(bisect_right(taken, start), start)
            wanted.add(start)
    return sorted(wanted - known)


def best_to_restore(positions: Iterable[int], limit: int, align: int) -> int:
    """Return the deepest of `positions` that is at most `limit` and aligned; 0 for none."""
    fitting = (position for position in positions if position <= limit and position % align == 0)
    return max(fitting, default=0)


def least_missed(positions: Sequence[int]) -> int:
    """Return which of a prompt's checkpoints to drop when it has too many.

    Losing one costs the tokens between it and the one before it, since a prompt that diverges
    after it is resumed there instead. The deepest one stays: the next turn needs it.

    Args:
        positions: Ascending, at least two.

    Raises:
        InvalidValue: For fewer than two.
    """
    if len(positions) < 2:
        raise InvalidValue(f"of {len(positions)} checkpoints none can be dropped")
    gaps = [after - before for before, after in pairwise((0, *positions[:-1]))]
    return positions[gaps.index(min(gaps))]
