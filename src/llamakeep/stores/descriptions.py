"""Descriptions of namespaces: those told last, and those read from where nothing seals them."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

MAX_DESCRIPTION_BYTES = 1 << 16
"""No description that is ours is larger."""

MOST_DESCRIBED = 4_096
"""Namespaces whose descriptions a process remembers: clients choose how many there are."""

_MAX_DEPTH = 16


class Described:
    """What the namespaces are that were told last. From any thread.

    Args:
        most: Of more than these, those go that were not asked for the longest.
    """

    def __init__(self, most: int = MOST_DESCRIBED) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._known: OrderedDict[bytes, Mapping[str, Any]] = OrderedDict()

    def learn(self, namespace: bytes, description: Mapping[str, Any]) -> None:
        """Remember one; it must not be changed afterwards."""
        with self._lock:
            self._known[namespace] = description
            self._known.move_to_end(namespace)
            if len(self._known) > self._most:
                self._known.popitem(last=False)

    def get(self, namespace: bytes) -> Mapping[str, Any] | None:
        """Return one, if it is remembered."""
        with self._lock:
            found = self._known.get(namespace)
            if found is not None:
                self._known.move_to_end(namespace)
            return found

    def items(self) -> list[tuple[bytes, Mapping[str, Any]]]:
        """Return all that are remembered."""
        with self._lock:
            return list(self._known.items())

    def __len__(self) -> int:
        return len(self._known)


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
