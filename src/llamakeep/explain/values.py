"""What kind of difference two JSON values have, within them."""

from __future__ import annotations

from typing import Any

from llamakeep.explain import marks
from llamakeep.explain.churn import Found, Proof, classify
from llamakeep.explain.divergence import around
from llamakeep.explain.kinds import Kind
from llamakeep.explain.ordering import same_content
from llamakeep.explain.verdict import SURE, Verdict, moved_keys, say
from llamakeep.texts import common_text


def in_json(path: str, before: Any, after: Any, proof: Proof = SURE) -> Verdict | None:
    """Return what kind the first different value within two JSON values is of, if it is of one.

    Args:
        path: Where the values stand.
        before: The one that stood there.
        after: The one that stands there now.
        proof: What has to be proven of a text.
    """
    if isinstance(before, dict) and isinstance(after, dict) and list(before) == list(after):
        pairs = [(f"{path}.{key}", before[key], after[key]) for key in before]
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = [(f"{path}[{i}]", a, b) for i, (a, b) in enumerate(zip(before, after, strict=True))]
    else:
        return _in_value(path, before, after, proof)
    for inner, mine, theirs in pairs:
        kind = same_content(mine, theirs)
        if kind is not None and kind is not Kind.SAME:
            return Verdict(kind, say(Found(kind), inner) + moved_keys(mine, theirs), inner)
        if kind is None:
            return in_json(inner, mine, theirs, proof)
    return None


def _in_value(path: str, before: Any, after: Any, proof: Proof) -> Verdict | None:
    if isinstance(before, str) and isinstance(after, str):
        at = common_text(before, after)
        found = classify(before, after, at, proof)
        found = found or _by_name(path, before, after)
        if found is not None:
            near = around(before, after, at)
            return Verdict(found.kind, say(found, path), path, at, near)
        return None
    scalars = all(isinstance(each, (int, float, str)) for each in (before, after))
    found = _by_name(path, before, after) if scalars else None
    return Verdict(found.kind, say(found, path), path) if found is not None else None


def _by_name(path: str, before: Any, after: Any) -> Found | None:
    """Return what a field's name says of its value, if both are one word or number."""
    words = [str(each) for each in (before, after)]
    if not all(0 < len(word) <= 80 and " " not in word.strip() for word in words):
        return None
    if marks.ID_KEYS.search(path):
        return Found(Kind.COUNTER, *words)
    dated = marks.DATE_KEYS.search(path) and all(any(map(str.isdigit, word)) for word in words)
    return Found(Kind.DATE, *words) if dated else None
