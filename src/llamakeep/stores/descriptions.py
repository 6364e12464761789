"""Descriptions of namespaces, read from where nothing seals them."""

from __future__ import annotations

import json
from typing import Any

MAX_DESCRIPTION_BYTES = 1 << 16
"""No description that is ours is larger."""

_MAX_DEPTH = 16


def parse_description(
    data: bytes | str, *, max_bytes: int = MAX_DESCRIPTION_BYTES
) -> dict[str, Any] | None:
    """Return what a description says, or None when it is none.

    Never raises, whatever was read; whoever calls it counts and logs what is dropped.

    Args:
        data: JSON, UTF-8.
        max_bytes: The limit on its size (characters, for text).

    Returns:
        The object, which nests at most 16 deep, so that it can be written again; None for anything
        else, and for what is no JSON, or too large.
    """
    try:
        if len(data) > max_bytes:
            return None
        found = json.loads(data)
    except (ValueError, TypeError, RecursionError):
        return None
    return found if isinstance(found, dict) and _is_shallow(found) else None


def _is_shallow(found: dict[str, Any]) -> bool:
    level: list[Any] = [found]
    for _ in range(_MAX_DEPTH):
        level = [
            inner
            for each in level
            if isinstance(each, (dict, list))
            for inner in (each.values() if isinstance(each, dict) else each)
        ]
    return not any(isinstance(each, (dict, list)) for each in level)
