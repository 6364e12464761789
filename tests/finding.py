"""What a prompt can use of states, by brute force."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from llamakeep.states import Block
from llamakeep.tokens import Place, common_prefix


def usable(places: Iterable[Place], blocks: Collection[Block]) -> set[tuple[str, int]]:
    """Return the checkpoints that a prompt has the tokens of, and the tokens that segments cover.

    Args:
        places: Of states.
        blocks: Of the prompt.
    """
    by_name = {block.name: block for block in blocks}
    found: set[tuple[str, int]] = set()
    for place in places:
        block = by_name.get(place.block)
        if block is None:
            continue
        n_alike = common_prefix(place.tokens, block.tokens)
        if place.kind == "segment":
            found |= {("token", at) for at in range(place.start, place.origin + n_alike)}
        elif n_alike == place.tokens.size:
            found.add(("checkpoint", place.end))
    return found
