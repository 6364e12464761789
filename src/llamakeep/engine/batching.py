"""Who gets how much of the next batch."""

from __future__ import annotations

from collections.abc import Sequence

from llamakeep.tokens import align_down

LEAST_CHUNK = 32
"""Tokens of a prompt that are worth a place in a batch, if it has so many left."""


def share_out(wanted: Sequence[int], room: int) -> list[int]:
    """Split `room` among prompts that want so many tokens, so that none waits for a longer one.

    All get the same, but for those that want less, whose rest goes to the others. Where the room
    is too small for pieces that are worth it, those that came first get theirs.

    Args:
        wanted: Tokens that each prompt still needs, in the order in which they came.
        room: Tokens that the batch has left for prompts.

    Returns:
        Tokens of each in the next batch.
    """
    shares = [0] * len(wanted)
    served = range(min(len(wanted), max(1, room // LEAST_CHUNK))) if room > 0 else range(0)
    hungry = [index for index in served if wanted[index] > 0]
    while room > 0 and hungry:
        each = max(1, room // len(hungry))
        for index in tuple(hungry):
            more = min(each, wanted[index] - shares[index], room)
            shares[index] += more
            room -= more
            if shares[index] == wanted[index]:
                hungry.remove(index)
    return shares


def chunk_end(start: int, share: int, stop: int, align: int) -> int:
    """Return where a prompt's next chunk ends: on a multiple of `align`, if it gets that far.

    It leaves no single token before the stop, if that can be helped: a row that is evaluated by
    itself is rounded differently.

    Args:
        start: Tokens that are evaluated.
        share: Tokens that it may have.
        stop: Where it must end at the latest: a checkpoint, or the prompt's end.
        align: What rows are grouped by.
    """
    end = start + share
    if end >= stop:
        return stop
    for wanted in (align_down(end, align), align_down(end, align) - align, end, end - 1):
        if start < wanted and stop - wanted != 1:
            return wanted
    return end


class Pace:
    """How many tokens of prompts may join a batch that others wait for to get their next token.

    Learns the speed of evaluation from the batches that were run.

    Args:
        stall_ms: The longest such a batch should take.
        most: Tokens of a batch at most.
    """

    def __init__(self, stall_ms: float, most: int) -> None:
        self._stall_ms = stall_ms
        self._most = most
        self._ms_per_token = 0.0

    @property
    def n_tokens(self) -> int:
        """Tokens that take about as long as is allowed; `LEAST_CHUNK` at the least."""
        if not self._ms_per_token:
            return min(self._most, 4 * LEAST_CHUNK)
        return max(LEAST_CHUNK, min(self._most, int(self._stall_ms / self._ms_per_token)))

    def ran(self, n_tokens: int, ms: float) -> None:
        """Note how long a batch of `n_tokens` took; small ones say nothing about long ones."""
        if n_tokens < LEAST_CHUNK:
            return
        speed = ms / n_tokens
        self._ms_per_token = 0.7 * self._ms_per_token + 0.3 * speed if self._ms_per_token else speed
