"""Workloads of token prompts: one JSON list, each of its objects with the tokens of a prompt.

An object may say in `user_starts`, too, where user messages start in its tokens.
"""

from __future__ import annotations

import gzip
import json
import zlib
from bisect import bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from llamakeep.errors import InvalidValue, StoreError, TokenError
from llamakeep.radix import Node, descend
from llamakeep.tokens import IntArray, as_tokens

SEGMENT_TOKENS: Final = 256
"""Tokens of a segment, as the product has them unless told otherwise."""

_MOST_BYTES: Final = 1 << 30
_HEAD_BYTES: Final = 256


class _Cut(Node):
    """An edge, and the positions inside it where prompts part or end, ascending."""

    __slots__ = ("cuts", "first_id")

    def __init__(self, tokens: IntArray, start: int = 0) -> None:
        super().__init__(tokens, start)
        self.cuts: list[int] = []
        self.first_id = 0

    def cut(self, position: int) -> None:
        """Note that prompts part or end at a position of this edge."""
        at = bisect_right(self.cuts, position)
        if self.start < position and not (at and self.cuts[at - 1] == position):
            insort(self.cuts, position)


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """Prompts by their tokens.

    Attributes:
        prompts: The tokens of each, in order; none is empty.
        user_starts: Where user messages start in each, ascending; no list at all for nowhere.
        block_tokens: Tokens of a segment.
    """

    prompts: list[IntArray]
    user_starts: list[tuple[int, ...]] = field(default_factory=list)
    block_tokens: int = SEGMENT_TOKENS

    def cut(self) -> Iterator[tuple[list[int], list[int]]]:
        """Yield the blocks of each prompt: ids, and tokens of each.

        A block ends where any two prompts part, or where one ends; so a cache that can cut its
        states has all or nothing of what a prompt shares with another. Costs two passes over the
        tokens.
        """
        root = _Cut(as_tokens([]))
        for prompt in self.prompts:
            _insert(root, prompt)
        ids = 0
        stack = [root]
        while stack:
            node = stack.pop()
            node.first_id = ids
            ids += len(node.cuts)
            stack.extend(node.branches.values())
        for prompt in self.prompts:
            blocks: list[int] = []
            sizes: list[int] = []
            for node, end in descend(root, prompt).nodes[1:]:
                start = node.start
                for index, cut in enumerate(node.cuts):
                    if cut > end:
                        break
                    blocks.append(node.first_id + index)
                    sizes.append(cut - start)
                    start = cut
            yield blocks, sizes


def _insert(root: _Cut, prompt: IntArray) -> None:
    path = descend(root, prompt)
    node, end = path.nodes[-1]
    node.cut(end)
    if end < prompt.size:
        rest = _Cut(prompt[end:], end)
        rest.cut(rest.end)
        node.attach(rest)


def _head(path: Path, n_bytes: int) -> bytes:
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            return file.read(n_bytes)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise StoreError(f"cannot read {path}: {reason}") from error


def is_workload(path: Path) -> bool:
    """Return whether a file begins as a JSON list does.

    Raises:
        StoreError: When it cannot be read.
    """
    return _head(path, _HEAD_BYTES).lstrip()[:1] == b"["


def read_workload(path: Path) -> Workload:
    """Read a workload, all of it into memory.

    Raises:
        InvalidValue: For a file that is none, with the number of the request.
        StoreError: When it cannot be read, or is larger than 1 GiB.
    """
    data = _head(path, _MOST_BYTES + 1)
    if len(data) > _MOST_BYTES:
        raise StoreError(f"{path} is larger than {_MOST_BYTES >> 30} GiB: too large a workload")
    try:
        requests = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidValue(f"{path}: no JSON: {error}") from None
    prompts, starts = [], []
    for number, request in enumerate(requests, 1):
        tokens = request.get("tokens") if isinstance(request, dict) else None
        if not isinstance(tokens, list):
            raise InvalidValue(f"{path}, request {number}: it has no list of tokens")
        try:
            prompt = as_tokens(tokens)
        except TokenError as error:
            raise InvalidValue(f"{path}, request {number}: {error}") from None
        if not prompt.size:
            continue
        try:
            starts.append(_starts(request.get("user_starts", []), int(prompt.size)))
        except InvalidValue as error:
            raise InvalidValue(f"{path}, request {number}: {error}") from None
        prompts.append(prompt)
    return Workload(prompts, starts)


def _starts(values: Any, n_tokens: int) -> tuple[int, ...]:
    """Return where user messages start, if these are positions of a prompt that ascend."""
    known = isinstance(values, list) and all(type(value) is int for value in values)
    if not known or not all(before < after for before, after in pairwise([-1, *values, n_tokens])):
        raise InvalidValue(f"user_starts must be numbers that ascend below {n_tokens}")
    return tuple(values)
