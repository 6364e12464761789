"""Numbers within bounds, digit by digit."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Final

_DIGITS: Final = 15
"""Decimal digits that a double tells apart."""
MOST_DIGITS: Final = 30
"""Of a bound."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A number that others are compared with.

    Attributes:
        value: The number.
        is_open: It is itself outside.
    """

    value: Decimal
    is_open: bool = False


def whole_between(low: int | None, high: int | None) -> str | None:
    """Return the body of a rule for whole numbers; None where there are none.

    Args:
        low: The smallest; None for any.
        high: The largest; None for any.
    """
    parts = []
    if low is None or low < 0:
        largest = None if low is None else -low
        smallest = 1 if high is None or high >= 0 else -high
        if largest is None or smallest <= largest:
            parts.append(f'"-" ({_magnitudes(smallest, largest)})')
    if high is None or high >= 0:
        smallest = max(0, low or 0)
        if high is None or smallest <= high:
            parts.append(_magnitudes(smallest, high))
    return " | ".join(parts) or None


def _magnitudes(low: int, high: int | None) -> str:
    if high is None:
        high = 10 ** max(_DIGITS, len(str(low)) + 1) - 1
    parts = []
    full: list[int] = []
    for n_digits in range(len(str(low)), len(str(high)) + 1):
        least = 0 if n_digits == 1 else 10 ** (n_digits - 1)
        first, last = max(low, least), min(high, 10**n_digits - 1)
        if n_digits > 1 and (first, last) == (least, 10**n_digits - 1):
            full.append(n_digits - 1)
        else:
            parts.append(_digits(str(first), str(last)))
    if full:
        parts.append(f"[1-9] [0-9]{{{full[0]},{full[-1]}}}")
    return " | ".join(parts)


def _digits(low: str, high: str) -> str:
    """Return a body for the digits from one number to another of the same length."""
    n = len(low)
    if low == high:
        return f'"{low}"'
    if set(low) == {"0"} and set(high) == {"9"}:
        return f"[0-9]{{{n}}}"
    if n == 1:
        return f"[{low}-{high}]"
    if low[0] == high[0]:
        return f'"{low[0]}" ({_digits(low[1:], high[1:])})'
    begin, end = int(low[0]), int(high[0])
    parts = []
    if set(low[1:]) != {"0"}:
        parts.append(f'"{begin}" ({_digits(low[1:], "9" * (n - 1))})')
        begin += 1
    last = []
    if set(high[1:]) != {"9"}:
        last.append(f'"{end}" ({_digits("0" * (n - 1), high[1:])})')
        end -= 1
    if begin <= end:
        parts.append(f"[{begin}-{end}] [0-9]{{{n - 1}}}")
    return " | ".join(parts + last)


def between(low: Bound | None, high: Bound | None) -> str | None:
    """Return the body of a rule for numbers within bounds; None where there are none."""
    zero = Decimal(0)
    parts = []
    if low is None or low.value < 0:
        near = Bound(zero, True) if high is None or high.value >= 0 else _negated(high)
        body = _positive(near, None if low is None else _negated(low))
        if body:
            parts.append(f'"-" ({body})')
    if high is None or high.value >= 0:
        near = Bound(zero) if low is None or low.value < 0 else low
        body = _positive(near, high)
        if body:
            parts.append(body)
    return " | ".join(parts) or None


def _negated(bound: Bound) -> Bound:
    return Bound(-bound.value, bound.is_open)


def _split(value: Decimal) -> tuple[int, str]:
    """Return what stands before the point, and the digits after it without zeros at their end."""
    before, _, after = f"{value:f}".partition(".")
    return int(before), after.rstrip("0")


def _positive(low: Bound, high: Bound | None) -> str | None:
    before, after = _split(low.value)
    if high is None:
        room = max(1, _DIGITS - len(str(before)))
        parts = [_with(before, _fraction(after, low.is_open, None, False, room))]
        parts.append(f"({_magnitudes(before + 1, None)}) {_any_fraction(room)}")
        return " | ".join(part for part in parts if part)
    last, last_after = _split(high.value)
    room = max(1, _DIGITS - len(str(last)))
    if before > last:
        return None
    if before == last:
        return _with(before, _fraction(after, low.is_open, last_after, high.is_open, room))
    parts = [_with(before, _fraction(after, low.is_open, None, False, room))]
    if before + 1 < last:
        parts.append(f"({_magnitudes(before + 1, last - 1)}) {_any_fraction(room)}")
    parts.append(_with(last, _fraction("", False, last_after, high.is_open, room)))
    return " | ".join(part for part in parts if part) or None


def _with(before: int, fraction: str | None) -> str | None:
    return None if fraction is None else f'"{before}" {fraction}'


def _any_fraction(room: int) -> str:
    return f'("." [0-9]{{1,{room}}})?'


def _fraction(low: str, low_open: bool, high: str | None, high_open: bool, room: int) -> str | None:
    """Return a body for what may stand after the whole part, the point included.

    Args:
        low: Digits of the least fraction.
        low_open: It is itself outside.
        high: Digits of the largest; None for any.
        high_open: It is itself outside.
        room: Digits at most, where the bounds have no more.
    """
    nothing = not low and not low_open and not (high == "" and high_open)
    digits = _range(low, low_open, high, high_open, room)
    if digits is None:
        return "" if nothing else None
    return f'("." ({digits}))?' if nothing else f'"." ({digits})'


def _range(low: str, low_open: bool, high: str | None, high_open: bool, room: int) -> str | None:
    """Return a body for one or more digits, as `_fraction`."""
    room = max(room, 1)
    if not low and not low_open and high is None:
        return f"[0-9]{{1,{room}}}"
    if high == "" and not low:
        return None if high_open or low_open else f'"0"{{1,{room}}}'
    first, last = int(low[:1] or 0), 9 if high is None else int(high[:1] or 0)
    if first > last:
        return None
    parts = []
    if first == last:
        end = None if high is None else high[1:]
        parts.append(_digit(first, low[1:], low_open, end, high_open, room))
    else:
        parts.append(_digit(first, low[1:], low_open, None, False, room))
        if first + 1 < last:
            parts.append(f"[{first + 1}-{last - 1}] {_more(room)}")
        if high is None:
            parts.append(f"[{last}] {_more(room)}")
        else:
            parts.append(_digit(last, "", False, high[1:], high_open, room))
    return " | ".join(part for part in parts if part) or None


def _more(room: int) -> str:
    return f"[0-9]{{0,{room - 1}}}" if room > 1 else ""


def _digit(
    digit: int, low: str, low_open: bool, high: str | None, high_open: bool, room: int
) -> str | None:
    """Return a body for this digit, and what may follow it."""
    ends = not low and not low_open and not (high == "" and high_open)
    if room <= 1 and not low and not high:
        return f'"{digit}"' if ends else None
    rest = _range(low, low_open, high, high_open, room - 1)
    if rest is None:
        return f'"{digit}"' if ends else None
    return f'"{digit}" ({rest})?' if ends else f'"{digit}" ({rest})'
