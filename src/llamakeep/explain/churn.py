"""What differs between two texts that should have been the same.

Each cause is proven before it is named: with the one date, number or space replaced by the other,
both texts have to go on alike for a while. What cannot be proven has no name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Final

from llamakeep.explain import marks
from llamakeep.explain.kinds import Kind
from llamakeep.explain.ordering import reordered
from llamakeep.texts import common_text

SAME_CHARS: Final = 24
"""Characters that have to be the same again behind what differs."""

_BACK: Final = 160
_AHEAD: Final = 640
_MOST_STEPS: Final = 16
_LEAST_SAME: Final = 8
_BLANKS: Final = "\ufeff\u200b\u200c\u200d\u2060"
_NO_BLANKS: Final = dict.fromkeys(map(ord, _BLANKS))
_IS_SPACE: Final = re.compile(rf"[\s{_BLANKS}]")


_BETWEEN: Final = 4
_CODE: Final = re.compile(r"0\d")
_PLAIN: Final = re.compile(r"[-+]?\d+(?:\.\d+)?")
_DOUBTFUL: Final = (
    (marks.PERHAPS_DATES, marks.SAYS_TIME),
    (marks.NAMED_DAYS, marks.SAYS_DAY),
)


@dataclass(frozen=True, slots=True)
class Found:
    """What differs.

    Attributes:
        kind: The cause.
        before: What stood there.
        after: What stands there now.
    """

    kind: Kind
    before: str = ""
    after: str = ""


@dataclass(frozen=True, slots=True)
class Proof:
    """How much has to be the same behind a difference for its cause to be believed.

    Attributes:
        same_chars: Characters that follow and are equal.
        ends_count: The end of either text will do instead.
        says_when: For a date, a word before it that says that it is the time of sending will do.
        reorders: The same in another order is the same: it is not in what a call is given.
    """

    same_chars: int = SAME_CHARS
    ends_count: bool = True
    says_when: bool = True
    reorders: bool = True


@dataclass(frozen=True, slots=True)
class _Span:
    start: int
    end: int
    kind: Kind


def classify(before: str, after: str, at: int, proof: Proof) -> Found | None:
    """Name what differs at the character `at`, up to which both texts are equal.

    Returns:
        The cause, or None if none is proven.
    """
    found = _number(before, after, at, proof) or _mark(before, after, at, proof)
    if found is not None:
        return found
    if _is_white(before, after, at, proof):
        return Found(Kind.WHITESPACE, _run(before, at), _run(after, at))
    kind = reordered(before, after, at) if proof.reorders else None
    return Found(kind) if kind is not None else None


# -- dates, counters and ids -----------------------------------------------------------------------


def _mark(before: str, after: str, at: int, proof: Proof) -> Found | None:
    low = max(0, at - _BACK)
    ours, theirs = (_spans(text, low, at + _AHEAD) for text in (before, after))
    first: Found | None = None
    here, there = at, at
    for _ in range(_MOST_STEPS):
        pair = _pair(ours, theirs, before, after, here, there)
        if pair is None:
            return None
        mine, other = pair
        if first is None:
            first = Found(mine.kind, before[mine.start : mine.end], after[other.start : other.end])
            if _says_when(mine, before, proof):
                return first
        here, there = max(here, mine.end), max(there, other.end)
        same = _alike(before, after, here, there, proof.same_chars)
        if same >= proof.same_chars:
            return first
        here, there = here + same, there + same
        if here == len(before) or there == len(after):
            return first if proof.ends_count else None
    return None


def _alike(before: str, after: str, here: int, there: int, most: int) -> int:
    return common_text(before[here : here + most], after[there : there + most])


def _pair(
    ours: list[_Span], theirs: list[_Span], before: str, after: str, here: int, there: int
) -> tuple[_Span, _Span] | None:
    """Return marks of one kind that lie over both places, begin alike and are not the same."""
    for mine in ours:
        if not mine.start <= here <= mine.end:
            continue
        for other in theirs:
            if (
                other.kind is mine.kind
                and other.start <= there <= other.end
                and here - mine.start == there - other.start
                and before[mine.start : mine.end] != after[other.start : other.end]
            ):
                return mine, other
    return None


def _spans(text: str, low: int, high: int) -> list[_Span]:
    """Return the marks in a part of a text, as they are to be believed in."""
    # A window that begins within a word would take its rest for a whole one.
    while low and not text[low - 1].isspace() and low > high - 2 * _AHEAD:
        low -= 1
    part = text[low:high]
    spans = [*_of(marks.IDS, part, low, Kind.COUNTER), *_of(marks.DATES, part, low, Kind.DATE)]
    dates = [span for span in spans if span.kind is Kind.DATE]
    spans += [
        span
        for pattern, says in _DOUBTFUL
        for span in _of(pattern, part, low, Kind.DATE)
        if says.search(text, max(0, span.start - 80), span.start)
        or any(_touch(span, date, text) for date in dates)
    ]
    spans += _of(marks.COUNTERS, part, low, Kind.COUNTER)
    return spans


def _of(pattern: re.Pattern[str], part: str, low: int, kind: Kind) -> Iterable[_Span]:
    return (_Span(low + each.start(), low + each.end(), kind) for each in pattern.finditer(part))


def _touch(one: _Span, other: _Span, text: str) -> bool:
    """Whether one of two stands right behind the other: "Saturday, 1 March 2025"."""
    first, second = (one, other) if one.start <= other.start else (other, one)
    between = text[first.end : max(first.end, second.start)]
    return len(between) <= _BETWEEN and not any(map(str.isalnum, between)) and "\n" not in between


def _says_when(span: _Span, text: str, proof: Proof) -> bool:
    return (
        proof.says_when
        and span.kind is Kind.DATE
        and marks.SAYS_TIME.search(text, max(0, span.start - 60), span.start) is not None
    )


# -- numbers ---------------------------------------------------------------------------------------


def _number(before: str, after: str, at: int, proof: Proof) -> Found | None:
    """Whether one number is written in two ways there, and then perhaps others."""
    here = there = at
    first: Found | None = None
    for _ in range(_MOST_STEPS):
        mine, other = _number_at(before, here), _number_at(after, there)
        if mine is None or other is None or here - mine.start != there - other.start:
            return None
        one, two = before[mine.start : mine.end], after[other.start : other.end]
        if one == two or not _is_same_number(one, two):
            return None
        first = first or Found(Kind.NUMBER_FORMAT, one, two)
        here, there = mine.end, other.end
        same = _alike(before, after, here, there, proof.same_chars)
        if same >= proof.same_chars:
            return first
        here, there = here + same, there + same
        if here == len(before) or there == len(after):
            return first if proof.ends_count else None
    return None


def _number_at(text: str, at: int) -> _Span | None:
    low = at
    while low > max(0, at - 40) and text[low - 1] in "0123456789.,eE+-":
        low -= 1
    for match in marks.NUMBERS.finditer(text, low, min(len(text), at + 60)):
        if match.start() <= at <= match.end() and any(map(str.isdigit, match.group())):
            return _Span(match.start(), match.end(), Kind.NUMBER_FORMAT)
    return None


def _is_same_number(one: str, other: str) -> bool:
    """Whether both are one number, and no versions, codes or modes that look like numbers."""
    if _value(one) != _value(other):
        return False
    wholes, fractions = zip(*(_parts(each) for each in (one, other)), strict=True)
    if wholes[0] != wholes[1] and any(_CODE.match(whole) for whole in wholes):
        return False  # 0644 and 644, 01234 and 1234
    if all(map(_PLAIN.fullmatch, (one, other))):
        return any(not fraction.strip("0") for fraction in fractions)  # not 3.10 and 3.1
    return True


def _parts(number: str) -> tuple[str, str]:
    whole, _, fraction = number.lstrip("+-").partition(".")
    return whole, fraction


def _value(number: str) -> Decimal | None:
    try:
        return Decimal(number.replace(",", ""))
    except InvalidOperation:
        return None


# -- white space -----------------------------------------------------------------------------------


def _is_white(before: str, after: str, at: int, proof: Proof) -> bool:
    """Whether both texts are the same but for white space there."""
    sides = (before[at : at + 1], after[at : at + 1])
    if not any(_IS_SPACE.match(side) for side in sides) and all(sides):
        return False
    reach = 16 * max(proof.same_chars, SAME_CHARS)
    one, other = (_bare(text[at : at + reach]) for text in (before, after))
    same = common_text(one, other)
    if same >= proof.same_chars:
        return True
    # The end of a text has to be the end, and not that of what was looked at.
    if not proof.ends_count or len(before) > at + reach or len(after) > at + reach:
        return False
    return one == other or _LEAST_SAME <= same == min(len(one), len(other))


def _bare(text: str) -> str:
    return "".join(text.split()).translate(_NO_BLANKS)


def _run(text: str, at: int) -> str:
    """Return the white space around `at`."""
    low = high = at
    while low and _IS_SPACE.match(text[low - 1]) and at - low < 16:
        low -= 1
    while high < len(text) and _IS_SPACE.match(text[high]) and high - at < 16:
        high += 1
    return text[low:high]
