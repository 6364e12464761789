"""One checkpoint in a list, and the rules about lists that need no list to be stated.

The rules of llama-server are from the notes on checkpoint eviction. What these leave open was found
in the recording of a hybrid model: every event of its 16 requests comes out in order, and comes out
differently when one of these is changed: near the end is measured from the end of the coming batch;
a list that is empty gets a checkpoint at a message or near the end only; the step is counted from
the one added last, and the last message needs none; the room for the first eviction step is looked
at before each checkpoint, which is measured against the one kept before it; the same position is
replaced last. The recording has no case for these, which are from the source of the same build:
near the end and past the step are strict; the far offset is at most a batch; a window, its
`pos_min == 0`, and the one position by which pos_max may reach past what is in common.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from blake3 import blake3

from llamakeep.states import Checkpoint, DeviceCheckpoint
from llamakeep.tokens import IntArray

AnyCheckpoint: TypeAlias = "Checkpoint | DeviceCheckpoint"

NEIGHBOUR_POLICIES = ("neighbor-distance", "neighbor-gap")
NEAR_END_TOKENS = 4
"""llama-server's distance of the last checkpoint from the prompt's end."""


@dataclass(slots=True, eq=False)
class ListedCheckpoint:
    """A checkpoint in a list, with what policies ask of it (`llamakeep.policy.Neighbored`).

    Attributes:
        data: The state; shared, never changed.
        id_task: The task that made it.
        pos_min: The first position that the sequence held then.
        pos_max: The last one.
        n_tokens: Tokens before it, which is its position in the tokens.
        prefix: BLAKE3 of these tokens: what proves that it belongs to a prompt.
        prompt_end: It was taken close to the end of a prompt.
        sequence: Grows with every checkpoint of the list.
        created: When it was made, in seconds of the list's clock.
        last_used: When it was made or last restored.
        hits: How often it was restored.
        gap_before: Tokens to the checkpoint before it, by position, or to 0.
        gap_after: Tokens to the one after it, or to the end of the prompt.
        marginal_tokens: What losing it costs: tokens to the restorable position before it.
    """

    data: AnyCheckpoint = field(repr=False)
    id_task: int
    pos_min: int
    pos_max: int
    n_tokens: int
    prefix: bytes = field(repr=False)
    prompt_end: bool
    sequence: int
    created: float
    last_used: float
    hits: int = 0
    gap_before: int = 0
    gap_after: int = 0
    marginal_tokens: int = 0

    @property
    def n_bytes(self) -> int:
        """What its state occupies in RAM."""
        return int(self.data.data.nbytes)


@dataclass(frozen=True, slots=True)
class Resume:
    """Where a request goes on.

    Attributes:
        n_past: Tokens that are not evaluated again.
        checkpoint: What to restore first; None to go on from what is live.
        full_reprocess: Tokens were in common, and nothing leads back to them.
    """

    n_past: int
    checkpoint: ListedCheckpoint | None = None
    full_reprocess: bool = False


# -- where llama-server takes them -----------------------------------------------------------------


def far_enough(start: int, user_starts: Sequence[int], newest: int | None, min_step: int) -> bool:
    """Return whether a user message gets a checkpoint: the last, the first of a list, or a step on.

    Args:
        start: Where the message starts.
        user_starts: Where all of them start, ascending.
        newest: Position of the checkpoint added last; None without one.
        min_step: It must be more than so many tokens past that.
    """
    return newest is None or start == user_starts[-1] or start > newest + min_step


def upstream_splits(
    n_past: int,
    n_prompt: int,
    *,
    n_batch: int,
    n_ubatch: int,
    user_starts: Sequence[int],
    newest: int | None,
    min_step: int,
) -> list[int]:
    """Return where llama-server ends batches early, see `CheckpointList.split_points`.

    Plays the batches, since the checkpoints taken on the way decide on later splits. Costs
    O(batches + user messages).
    """
    near = {n_prompt - min(n_batch, NEAR_END_TOKENS + more) for more in (n_ubatch, 0)}
    stops = sorted({*user_starts, *near})
    starts = frozenset(user_starts)
    position, splits = n_past, []
    while position < n_prompt:
        end = full = min(position + n_batch, n_prompt)
        for stop in stops[bisect_right(stops, position) : bisect_right(stops, full)]:
            if stop in near or far_enough(stop, user_starts, newest, min_step):
                end = stop
                splits.append(stop)
                break
        begins = position in starts and far_enough(position, user_starts, newest, min_step)
        # The checkpoint of a batch is taken after the batch was filled, so it counts from here on.
        if position and (begins or n_prompt < end + n_ubatch):
            newest = position
        position = end
    return [split for split in splits if split < n_prompt]


# -- which to restore ------------------------------------------------------------------------------


def upstream_choice(
    items: Sequence[ListedCheckpoint], pos_next: int, threshold: int
) -> ListedCheckpoint | None:
    """Return the newest that llama-server takes for covering the position before `pos_next`."""
    for item in reversed(items):
        if item.pos_max <= pos_next and (item.pos_min < threshold or item.pos_min == 0):
            return item
    return None


def is_whole(pos_min: int, n_tokens: int, n_swa: int) -> bool:
    """Return whether rows from `pos_min` on are all that the token at `n_tokens` looks back on."""
    return not n_swa or pos_min <= max(0, n_tokens - n_swa + 1)


def deepest_of(
    own: Iterable[ListedCheckpoint], limit: int, *, n_swa: int = 0, exact: bool = False
) -> ListedCheckpoint | None:
    """Return the deepest checkpoint that is whole and lies at most at `limit`, or `exact` at it.

    Args:
        own: Those that are proven to be of the tokens, see `prefixes_of`.
        limit: Tokens that may be reused.
        n_swa: The window that their `pos_min` speaks of; 0 for none.
        exact: Only one at `limit` will do.
    """
    fitting = [
        item
        for item in own
        if (item.n_tokens == limit or (item.n_tokens < limit and not exact))
        and is_whole(item.pos_min, item.n_tokens, n_swa)
    ]
    return max(fitting, key=lambda item: item.n_tokens, default=None)


def state_at(own: Iterable[ListedCheckpoint], n_tokens: int) -> Checkpoint | None:
    """Return the state of the one at `n_tokens`, if it can be moved to another sequence."""
    states = (item.data for item in own if item.n_tokens == n_tokens)
    return next((state for state in states if isinstance(state, Checkpoint)), None)


def prefix_digest(tokens: IntArray) -> bytes:
    """Return what proves that a checkpoint belongs to these tokens."""
    return blake3(_raw(tokens)).digest()


def prefixes_of(items: Iterable[ListedCheckpoint], prompt: IntArray) -> list[ListedCheckpoint]:
    """Return those whose tokens are a prefix of the prompt, by position.

    Hashes the prompt once, up to the deepest of them, however many there are.
    """
    own, hashed, at = [], blake3(), 0
    for item in sorted(items, key=lambda item: item.n_tokens):
        if item.n_tokens > prompt.size:
            break
        hashed.update(_raw(prompt[at : item.n_tokens]))
        at = item.n_tokens
        if hashed.digest() == item.prefix:
            own.append(item)
    return own


def _raw(tokens: IntArray) -> bytes:
    return tokens.astype("<i4", copy=False).tobytes()


# -- which to drop ---------------------------------------------------------------------------------


def link(items: Iterable[ListedCheckpoint], n_prompt: int, coming: int | None = None) -> None:
    """Tell each checkpoint how far its neighbours are.

    Args:
        items: At different positions, in any order.
        n_prompt: The end of what is known, for the last one's gap.
        coming: Where one more will be, which counts as a neighbour.
    """
    items = list(items)
    at = sorted({item.n_tokens for item in items} | ({coming} if coming is not None else set()))
    end = max([n_prompt, *at])
    for item in items:
        index = bisect_right(at, item.n_tokens)
        item.gap_before = item.n_tokens - (at[index - 2] if index > 1 else 0)
        item.gap_after = (at[index] if index < len(at) else end) - item.n_tokens
        item.marginal_tokens = item.gap_before


def unprotected(
    items: Sequence[ListedCheckpoint], coming: int, coming_is_end: bool
) -> Sequence[ListedCheckpoint]:
    """Return what a neighbour policy may drop for a checkpoint at `coming`.

    Not the first nor the last by position, nor the newest of those at the end of a prompt, with
    the coming one among them; all, when nothing else is left.
    """
    positions = [coming, *(item.n_tokens for item in items)]
    ends = [] if coming_is_end else [item for item in items if item.prompt_end]
    newest_end = max(ends, key=lambda item: item.sequence, default=None)
    outer = (min(positions), max(positions))
    inner = [item for item in items if item.n_tokens not in outer and item is not newest_end]
    return inner or items
