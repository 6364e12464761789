"""One of many texts, or any text but these: as trees, so that few ways are open at a time."""

from __future__ import annotations

import json
from collections.abc import Iterable

from llamakeep.json_schema.rules import LETTERS, Rules, char_class, literal, without


def one_of(rules: Rules, texts: Iterable[str]) -> str:
    """Return a rule that matches one of some texts."""
    return _one_of(rules, sorted(set(texts)))


def _one_of(rules: Rules, texts: list[str]) -> str:
    """Return the same for texts in order, all different."""
    if len(texts) == 1:
        return literal(texts[0]) if texts[0] else '""'
    begin = _common(texts[0], texts[-1])
    groups: dict[str, list[str]] = {}
    for text in texts:
        rest = text[len(begin) :]
        groups.setdefault(rest[:1], []).append(rest[1:])
    parts = [
        '""' if not first else f"{literal(first)} {_one_of(rules, rest)}"
        for first, rest in groups.items()
    ]
    name = rules.add("word", " | ".join(parts))
    return f"{literal(begin)} {name}" if begin else name


def _common(one: str, other: str) -> str:
    n = 0
    while n < min(len(one), len(other)) and one[n] == other[n]:
        n += 1
    return one[:n]


def other_key(rules: Rules, names: Iterable[str]) -> str:
    """Return a rule for a JSON text that is none of these; without escapes."""
    inner = (json.dumps(name, ensure_ascii=False)[1:-1] for name in names)
    texts = sorted({text for text in inner if "\\" not in text})
    if not texts:
        return rules.json("string")
    return rules.add("key", f'"\\"" {_none_of(rules, texts)} "\\""')


def _none_of(rules: Rules, texts: list[str]) -> str:
    letters = rules.json("letter")
    groups: dict[str, list[str]] = {}
    for text in texts:
        groups.setdefault(text[:1], []).append(text[1:])
    parts = ['""'] if "" not in groups else []
    groups.pop("", None)
    others = without(LETTERS, [(ord(first), ord(first)) for first in groups])
    parts.append(f"{char_class(others)} {letters}*")
    parts += [f"{literal(first)} {_none_of(rules, rest)}" for first, rest in groups.items()]
    return rules.add("other", " | ".join(parts))
