"""Where two texts or two token sequences part, and what stands there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

Piece = Callable[[int], bytes]
"""What a token adds to a text, in UTF-8; see `Vocab.piece`."""

SHOWN_CHARS = 80
"""Most characters of a text that are shown on each side of a divergence."""

_SYNC_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Around:
    """The text around a divergence; each of the three is at most `SHOWN_CHARS` long.

    Attributes:
        shared: What stands before it, on both sides.
        before: How the stored prompt goes on.
        after: How the new one does.
    """

    shared: str = ""
    before: str = ""
    after: str = ""


NOWHERE = Around()
"""Nothing is known of the text."""


def around(before: str, after: str, at: int) -> Around:
    """Return what stands around the character `at` of two texts that are equal up to there."""
    return Around(
        after[max(0, at - SHOWN_CHARS) : at],
        before[at : at + SHOWN_CHARS],
        after[at : at + SHOWN_CHARS],
    )


def same_text_other_tokens(before: Sequence[int], after: Sequence[int], piece: Piece) -> bool:
    """Return whether two runs of tokens, which differ in the first, spell the same text for a bit.

    They do if both have a token that ends at the same place of a common text, and from there on the
    same token, or nothing more: what is before is the same text in other tokens. They also do if
    all of `before` is a beginning of the text of `after`: its last token was cut short there.
    Tokens that differ because the text behind them does are not meant.

    At most 512 tokens of each are looked at.

    Args:
        before: Tokens of the stored prompt from the divergence on.
        after: Tokens of the new prompt from there on.
        piece: What a token adds to a text.
    """
    left, right = ([piece(token) for token in side[:_SYNC_TOKENS]] for side in (before, after))
    if not left or not right:
        return False
    one, other = b"".join(left), b"".join(right)
    common = common_bytes(one, other)
    ends = [
        {end: i + 1 for i, end in enumerate(accumulate(map(len, side)))} for side in (left, right)
    ]
    for end in ends[0].keys() & ends[1].keys():
        mine, theirs = ends[0][end], ends[1][end]
        over = mine == len(before) or theirs == len(after)
        same = over or before[mine : mine + 1] == after[theirs : theirs + 1]
        if 0 < end <= common and same:
            return True
    return 0 < len(one) == common and len(left) == len(before)


def common_bytes(one: bytes, other: bytes) -> int:
    """Return how many leading bytes are equal."""
    n = min(len(one), len(other))
    return next((i for i in range(n) if one[i] != other[i]), n)
