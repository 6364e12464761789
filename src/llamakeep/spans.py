"""What a prefix tree is made of: spans of tokens, and what is kept of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from llamakeep.radix import Node
from llamakeep.states import CheckpointRef, SegmentRef
from llamakeep.tokens import IntArray, Place


class Kept:
    """A state that can be evicted by itself: a leaf's segment or a checkpoint.

    Attributes:
        node: The span it belongs to.
        ref: Its name, position and size.
        tier: The tier it was last known in: `ram`, or the name of one below.
        place: Where it belongs; None where there are no bytes.
        created: When it was kept.
        last_used: When it was kept or used.
        sequence: Ascending in the order of keeping.
        hits: Uses.
        queued: Its place in the eviction queue, which alone writes this, or 0.
        memo: What a policy that watches remembers of it, which alone writes this.
    """

    __slots__ = (
        "created",
        "hits",
        "last_used",
        "memo",
        "node",
        "place",
        "queued",
        "ref",
        "sequence",
        "tier",
    )

    def __init__(
        self, node: SpanNode, ref: SegmentRef | CheckpointRef, tier: str, now: float, sequence: int
    ) -> None:
        self.node = node
        self.ref = ref
        self.tier = tier
        self.place: Place | None = None
        self.created = self.last_used = now
        self.sequence = sequence
        self.hits = 0
        self.queued = 0
        self.memo: Any = None

    @property
    def name(self) -> bytes:
        """Its name, the same when it is kept again."""
        return self.ref.name

    @property
    def is_checkpoint(self) -> bool:
        """Whether it is true at one position only."""
        return isinstance(self.ref, CheckpointRef)

    @property
    def n_bytes(self) -> int:
        """Size of the state."""
        return self.ref.n_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of it in memory."""
        return self.ref.n_bytes if self.tier == "ram" else 0

    @property
    def n_tokens(self) -> int:
        """Tokens of a segment's span; the position of a checkpoint."""
        ref = self.ref
        return ref.position if isinstance(ref, CheckpointRef) else ref.end - ref.start

    @property
    def marginal_tokens(self) -> int:
        """Tokens between it and the restorable position before it, which losing it costs.

        Of a checkpoint that is the one before it on its path, or 0. A leaf's segment takes its
        node's checkpoints along, so it reaches from what is restorable without the node to the
        deepest of those; where it has none, any position is restorable, and it is the span.
        Costs a visit of the nodes back to the checkpoint before.
        """
        node, ref = self.node, self.ref
        if isinstance(ref, CheckpointRef):
            return ref.position - node.restorable_before(ref.position)
        if not node.checkpoints:
            return node.end - node.start
        return max(node.checkpoints) - node.restorable_before(node.start + 1)


class SpanNode(Node):
    """A span of tokens, its segment and the checkpoints inside it.

    Attributes:
        segment: What the node keeps of its span, and perhaps of some tokens before it, which
            another writer cut differently. There are no bytes in families without a truncatable
            part; the root covers nothing.
        checkpoints: By position, start < position <= end.
        pins: While above 0, the node and what it holds stay.
        namespace: Of a root: what its prompts are kept for.
    """

    __slots__ = ("checkpoints", "namespace", "pins", "segment")

    def __init__(self, tokens: IntArray, start: int = 0) -> None:
        super().__init__(tokens, start)
        self.segment: Kept | None = None
        self.checkpoints: dict[int, Kept] = {}
        self.pins = 0
        self.namespace = b""

    def path_to(self, position: int) -> tuple[SpanNode, IntArray]:
        """Return the root above, and all tokens from there up to a position in this node.

        Costs a copy of these tokens.
        """
        node, end, parts = self, position, [self.tokens[: position - self.start]]
        while node.parent is not None:
            node, end = node.parent, node.start
            parts.append(node.tokens[: end - node.start])
        return node, np.concatenate(parts[::-1])

    def states(self) -> Iterator[Kept]:
        """Yield the segment and the checkpoints."""
        if self.segment is not None:
            yield self.segment
        yield from self.checkpoints.values()

    def restorable_before(self, position: int) -> int:
        """Return where the last checkpoint before `position` is, here or above; 0 for none."""
        node: SpanNode | None = self
        while node is not None:
            found = max((at for at in node.checkpoints if at < position), default=0)
            if found:
                return found
            position, node = node.start + 1, node.parent
        return 0

    def next_states(self, position: int) -> Iterator[Kept]:
        """Yield the states whose restorable position before is `position`, in this node, or may be.

        That is the next checkpoint on each path from there on, and the segments of the nodes below
        this one on the way to it. Costs a visit of those nodes.
        """
        nodes = [self]
        while nodes:
            node = nodes.pop()
            if node.segment is not None and node is not self:
                yield node.segment
            after = min((at for at in node.checkpoints if at > position), default=node.end + 1)
            if after in node.checkpoints:
                yield node.checkpoints[after]
            nodes += [
                child for (point, _), child in node.branches.items() if position <= point < after
            ]

    @property
    def held_bytes(self) -> int:
        """Bytes in memory."""
        return sum(kept.held_bytes for kept in self.states())

    @property
    def n_bytes(self) -> int:
        """Bytes of its states, wherever they are."""
        return sum(kept.n_bytes for kept in self.states())


@dataclass(slots=True)
class TreeCounters:
    """What a tree did since it was made."""

    hits: int = 0
    misses: int = 0
    evicted_segments: int = 0
    evicted_checkpoints: int = 0
    evicted_bytes: int = 0
    refused_segments: int = 0
    refused_checkpoints: int = 0
    lost_blobs: int = 0
    discovered: int = 0
    promoted: int = 0


@dataclass(frozen=True, slots=True)
class TreeEntry:
    """A prompt that the tree knows to its end.

    `path_bytes` are of everything along it, what it shares with others included; `hits` and
    `last_used` are those of its last span; `tier` is the lowest that a state of it is in.
    """

    n_tokens: int
    path_bytes: int
    checkpoints: tuple[int, ...]
    hits: int
    last_used: float
    tier: str
