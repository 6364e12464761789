"""What is kept, drawn in few strokes: the spans of a tree, joined where nothing parts.

Looking at a tree is work for the thread that owns it, so that does as little as it can, and no more
than `MOST_SPANS` of it: `Outline` is what it saw. What is made of that, `branches`, is anybody's.
No token is in it, only how many.

    spans     [0 256][256 512][512 640]          branches  [0 ........ 512][512 640]
                         |- [512 700]                                  |--- [512 700]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from llamakeep.radix import walk
from llamakeep.spans import Kept, SpanNode

MOST_SPANS = 2048
"""So many spans of a tree are looked at; what was hung on last comes first."""
MOST_POSITIONS = 32
"""So many checkpoints of a branch are told, the last ones."""


class Seen(NamedTuple):
    """A span, or a whole prompt, as it was seen. Times are of the clock of what keeps it.

    Attributes:
        number: Names it as long as it is there.
        parent: Where the one above it stands in the outline; -1 for none.
        root: Which tree it is of, from 0; each tenant has one.
        start: Position of its first token.
        end: Position after its last token.
        n_bytes: Bytes of its states, wherever they are.
        tier: Where they are.
        checkpoints: Positions of its checkpoints, ascending.
        hits: Uses.
        last_used: When it was kept or used.
        n_children: How many hang off it.
    """

    number: int
    parent: int
    root: int
    start: int
    end: int
    n_bytes: int
    tier: str
    checkpoints: tuple[int, ...]
    hits: int
    last_used: float
    n_children: int


@dataclass(frozen=True, slots=True)
class Outline:
    """What was seen of what is kept.

    Attributes:
        now: When, by the clock of what keeps it.
        seen: Those above stand before those below.
        n_unseen: How many there are beside these.
    """

    now: float = 0.0
    seen: Sequence[Seen] = ()
    n_unseen: int = 0


@dataclass(slots=True)
class Branch:
    """Spans of one tier that follow each other, with nothing else hanging off between them.

    Attributes:
        number: Of its first span; names it as long as that is there.
        parent: The number of the branch above; None for none.
        root: Which tree it is of, from 0.
        start: Position of its first token.
        end: Position after its last token.
        n_bytes: Bytes of its states.
        tier: Where they are.
        n_spans: How many spans it is made of.
        checkpoints: Positions of its checkpoints, ascending; the last `MOST_POSITIONS`.
        n_checkpoints: How many there are.
        hits: The most uses of one of its spans.
        last_used: When one of them was last kept or used.
        n_more: Branches below it that were left out.
        more_bytes: What those hold.
    """

    number: int
    parent: int | None
    root: int
    start: int
    end: int
    n_bytes: int
    tier: str
    n_spans: int = 1
    checkpoints: list[int] = field(default_factory=list)
    n_checkpoints: int = 0
    hits: int = 0
    last_used: float = 0.0
    n_more: int = 0
    more_bytes: int = 0


class Branches(NamedTuple):
    """Branches of trees.

    Attributes:
        found: Those above stand before those below.
        n_more: Branches of whole trees that were left out.
        more_bytes: What those hold.
    """

    found: list[Branch]
    n_more: int
    more_bytes: int


def outline_of_trees(
    roots: Iterable[SpanNode], n_nodes: int, now: float, *, most: int = MOST_SPANS
) -> Outline:
    """Return what is seen of trees. For the thread that owns them; changes nothing.

    Args:
        roots: One for each tree; they cover nothing themselves.
        n_nodes: How many nodes they have below them.
        now: What their clock shows.
        most: Spans to look at; 2048 take about 4 ms.
    """
    seen: list[Seen] = []
    for number, root in enumerate(roots):
        places = {root: -1}
        for node in walk(root):
            if node is root:
                continue
            if len(seen) >= most:
                return Outline(now, seen, n_nodes - len(seen))
            places[node] = len(seen)
            parent = places[node.parent] if node.parent is not None else -1
            seen.append(_seen(node, parent, number))
    return Outline(now, seen, n_nodes - len(seen))


def _seen(node: SpanNode, parent: int, root: int) -> Seen:
    states: list[Kept] = list(node.states())
    n_bytes = hits = 0
    last_used, tier = 0.0, ""
    for kept in states:
        n_bytes += kept.n_bytes
        hits = max(hits, kept.hits)
        last_used = max(last_used, kept.last_used)
        if not tier and kept.n_bytes:  # a segment without bytes is nowhere
            tier = kept.tier
    return Seen(
        states[0].sequence if states else -1,
        parent,
        root,
        node.start,
        node.end,
        n_bytes,
        tier or (states[0].tier if states else "ram"),
        tuple(sorted(node.checkpoints)),
        hits,
        last_used,
        len(node.branches),
    )


def branches(outline: Outline, most: int) -> Branches:
    """Return the branches of an outline.

    From any thread; costs a pass over what was seen.

    Args:
        outline: What was seen.
        most: More are left out, those that lead to the fewest bytes, and summed up in what they
            hang off.
    """
    found, owners = _joined(outline.seen)
    parents = [-1] * len(found)
    for place, each in enumerate(outline.seen):
        owner = owners[place]
        if each.parent >= 0 and owners[each.parent] != owner:
            parents[owner] = owners[each.parent]
    below = [branch.n_bytes for branch in found]  # and all that hangs off
    for place in range(len(found) - 1, -1, -1):
        if parents[place] >= 0:
            below[parents[place]] += below[place]
    # What is above leads to at least as many bytes, and comes first: so it is kept before.
    order = sorted(range(len(found)), key=lambda place: -below[place])
    kept = set(order[:most])
    n_more = more_bytes = 0
    for place, branch in enumerate(found):
        at = parents[place]
        if place in kept:
            branch.parent = found[at].number if at >= 0 else None
            continue
        while at >= 0 and at not in kept:
            at = parents[at]
        if at >= 0:
            found[at].n_more += 1
            found[at].more_bytes += branch.n_bytes
        else:
            n_more, more_bytes = n_more + 1, more_bytes + branch.n_bytes
    left = [branch for place, branch in enumerate(found) if place in kept]
    return Branches(left, n_more, more_bytes)


def _joined(seen: Sequence[Seen]) -> tuple[list[Branch], list[int]]:
    """Return branches, and for each span the one it is part of."""
    found: list[Branch] = []
    owners: list[int] = []
    for each in seen:
        above = seen[each.parent] if each.parent >= 0 else None
        if (
            above is not None
            and above.n_children == 1
            and above.end == each.start
            and above.tier == each.tier
        ):
            owner = owners[each.parent]
            branch = found[owner]
            branch.end = each.end
            branch.n_spans += 1
            branch.n_bytes += each.n_bytes
        else:
            owner = len(found)
            branch = Branch(
                each.number, None, each.root, each.start, each.end, each.n_bytes, each.tier
            )
            found.append(branch)
        owners.append(owner)
        branch.checkpoints = [*branch.checkpoints, *each.checkpoints][-MOST_POSITIONS:]
        branch.n_checkpoints += len(each.checkpoints)
        branch.hits = max(branch.hits, each.hits)
        branch.last_used = max(branch.last_used, each.last_used)
    return found, owners
