"""The same content in another order or another form: JSON, lines and lists."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from llamakeep.explain.kinds import Kind

MOST_DEPTH: Final = 64
"""JSON that is nested deeper is not looked into."""

_BACK_CHARS: Final = 1 << 16
_LINE_CHARS: Final = 1 << 18
_MOST_CANDIDATES: Final = 24
_MOST_LINES: Final = 4096
_MOVABLE: Final = frozenset({"required", "enum", "tools", "functions"})
_TELLS: Final = frozenset({"parameters", "input_schema", "inputSchema", "description"})
_DECODER: Final = json.JSONDecoder()


def too_deep(value: object, most: int = MOST_DEPTH) -> bool:
    """Return whether lists and objects are nested more than `most` times. Does not recurse."""
    level = [value]
    for _ in range(most):
        level = [
            inner
            for each in level
            if isinstance(each, (dict, list))
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return False
    return any(isinstance(each, (dict, list)) for each in level)


def loads(text: str) -> Any:
    """Return the JSON value of a text that is an object or a list, or None for any other text."""
    if text.lstrip()[:1] not in ("{", "["):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return None if too_deep(value) else value


def dumps(value: Any) -> str:
    """Return JSON that is equal only for values with the same order of keys."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=repr)


def same_content(before: Any, after: Any) -> Kind | None:
    """Return how two JSON values differ that say the same: in order, or in how numbers are written.

    Only lists of which nobody reads the order may be in any: `required`, `enum`, and tools. Others
    are content: what a command is given, edits of a file, a place.

    Returns:
        `ORDER`, `NUMBER_FORMAT`, `SAME` if nothing differs, None if their content does.
    """
    if dumps(before) == dumps(after):
        return Kind.SAME
    one, other = _canonical(before, sort=False), _canonical(after, sort=False)
    if dumps(one) == dumps(other):
        return Kind.NUMBER_FORMAT
    one, other = _canonical(before, sort=True), _canonical(after, sort=True)
    return Kind.ORDER if dumps(one) == dumps(other) else None


def _has_same_items(before: Any, after: Any) -> bool:
    """Whether two values say the same if all lists may be in any order."""
    one, other = (_canonical(each, sort=True, every=True) for each in (before, after))
    return dumps(one) == dumps(other)


def _canonical(value: Any, *, sort: bool, every: bool = False, name: str = "") -> Any:
    if isinstance(value, dict):
        items = [
            (str(key), _canonical(inner, sort=sort, every=every, name=str(key)))
            for key, inner in value.items()
        ]
        return dict(sorted(items, key=lambda item: item[0]) if sort else items)
    if isinstance(value, list):
        inner = [_canonical(each, sort=sort, every=every) for each in value]
        movable = every or name in _MOVABLE or (bool(value) and all(map(_is_tool, value)))
        return sorted(inner, key=dumps) if sort and movable else inner
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value


def _is_tool(value: Any) -> bool:
    tool = value.get("function", value) if isinstance(value, dict) else None
    return (
        isinstance(tool, dict) and isinstance(tool.get("name"), str) and not _TELLS.isdisjoint(tool)
    )


def reordered(before: str, after: str, at: int) -> Kind | None:
    """Return whether two texts, equal up to the character `at`, say the same in another order.

    Looks at the JSON values that lie around `at`, the innermost first, then at the lines from
    there on, then at the list in that line.

    Returns:
        `ORDER`, `NUMBER_FORMAT` or `WHITESPACE` (of JSON), or None.
    """
    for start in _openings(after, at):
        try:
            one, end = _DECODER.raw_decode(before, start)
            other, other_end = _DECODER.raw_decode(after, start)
        except (ValueError, RecursionError):
            continue
        if min(end, other_end) <= at or too_deep(one) or too_deep(other):
            continue
        kind = same_content(one, other)
        if kind is Kind.SAME:
            spaced = "".join(before[start:end].split()) == "".join(after[start:other_end].split())
            return Kind.WHITESPACE if spaced else None
        if kind is not None:
            return kind
        if _has_same_items(one, other):
            return None  # a list in another order, which is content
    start = after.rfind("\n", 0, at) + 1
    moved = (
        _lines_moved(before, after, start)
        or _list_moved(before, after, start)
        or _elements_moved(before, after, start)
        or _items_moved(before, after, at)
    )
    return Kind.ORDER if moved else None


def _openings(text: str, at: int) -> Iterator[int]:
    """Yield where brackets open that are open at `at`, the innermost first; braces in texts count.

    That is a guess, which decoding proves.
    """
    closed, found = 0, 0
    low = max(0, at - _BACK_CHARS)
    places = [match.start() for match in re.finditer(r"[\[\]{}]", text[low : at + 1])]
    for place in reversed(places):
        position = low + place
        if text[position] in "]}":
            closed += position < at
        elif closed:
            closed -= 1
        else:
            yield position
            found += 1
            if found >= _MOST_CANDIDATES:
                return


def _lines_moved(before: str, after: str, start: int) -> bool:
    """Whether some lines from `start` on are the same ones in another order."""
    one = before[start:].split("\n", _MOST_LINES)[:_MOST_LINES]
    other = after[start:].split("\n", _MOST_LINES)[:_MOST_LINES]
    if _bare(one[0]) == _bare(other[0]):
        return False  # a comma more or less is no order
    balance: Counter[str] = Counter()
    wrong = 0
    for index, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        for line, step in ((_bare(mine), 1), (_bare(theirs), -1)):
            wrong -= balance[line] != 0
            balance[line] += step
            wrong += balance[line] != 0
        if not wrong and index and goes_on_alike(one, other, index + 1, _bare):
            return any(line for line in balance)
    return False


def goes_on_alike(
    one: Sequence[str], other: Sequence[str], at: int, bare: Callable[[str], str] = str
) -> bool:
    """Return whether two lists are over at `at`, or have the same there.

    Where something was taken away and something like it follows, as many are the same before it as
    if they had been moved; but then the lists go on differently.
    """
    return at >= min(len(one), len(other)) or bare(one[at]) == bare(other[at])


def _bare(line: str) -> str:
    return line.strip().rstrip(",").strip()


def _list_moved(before: str, after: str, start: int) -> bool:
    """Whether the line at `start` has the same items, with commas between, in another order."""
    one, other = (text[start:].split("\n", 1)[0] for text in (before, after))
    if len(one) != len(other) or len(one) > _LINE_CHARS:
        return False
    items, others = (re.split(r"[,;|]\s*", re.sub(r"^[^:\n]*:\s*", "", x)) for x in (one, other))
    bare, theirs = ([item.strip(" .()[]{}") for item in side] for side in (items, others))
    return len(bare) >= 3 and bare != theirs and sorted(bare) == sorted(theirs)


def _elements_moved(before: str, after: str, start: int) -> bool:
    """Whether the line at `start` has the same elements, in tags, in another order."""
    one, other = (text[start:].split("\n", 1)[0] for text in (before, after))
    if len(one) != len(other) or len(one) > _LINE_CHARS:
        return False
    items, others = (re.split(r"(?<=>)\s*(?=<)", line) for line in (one, other))
    return len(items) >= 2 and sorted(items) == sorted(others)


def _items_moved(before: str, after: str, at: int) -> bool:
    """Whether braces around `at` hold the same names and values, in another order.

    For what is written like JSON and is none, as objects of programs are.
    """
    for start in _openings(after, at):
        if after[start] != "{" or "\n" in after[start:at]:
            continue
        inner = [text[start + 1 :].split("}", 1)[0] for text in (before, after)]
        size = len(inner[0])
        if size != len(inner[1]) or size > _MOST_LINES or start + size < at:
            continue
        items, others = (sorted(each.strip() for each in text.split(",")) for text in inner)
        if len(items) >= 2 and items == others and all(re.search(r"[:=]", x) for x in items):
            return True
    return False
