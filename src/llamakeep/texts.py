"""Texts of requests: what two of them share, and what in them is not for the model."""

from __future__ import annotations

import re
from typing import Final

_CHUNK: Final = 4096
_BILLING: Final = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n?")


def common_text(one: str, other: str) -> int:
    """Return how many leading characters two texts share. Costs a few memory comparisons."""
    low, high = 0, min(len(one), len(other))
    while low < high and one[low : low + _CHUNK] == other[low : low + _CHUNK]:
        low += min(_CHUNK, high - low)
    high = min(high, low + _CHUNK)
    while low < high:  # texts are equal up to low
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def without_billing(text: str) -> str:
    """Return a system text of Anthropic's API without the line that tells who pays.

    Some clients write it as a first line, with a number that is another one in each request. It is
    for Anthropic's servers alone, and would part every prompt at its beginning.
    """
    return _BILLING.sub("", text)
