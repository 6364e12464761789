"""Where a long text can be cut without changing its tokens.

llama.cpp looks for each special token in all of the text after each piece of plain text, so many
of them cost the square of the text's length. Before a special token it begins anew, though: what is
cut there, and tokenized piece by piece, has the same tokens at a cost that follows its length.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

_TRIES = 8
"""Places looked at before a piece is let grow: where all of them overlap, there is none."""


def cut(
    text: bytes, specials: Sequence[bytes], size: int, *, strips: Collection[bytes] = ()
) -> list[bytes]:
    """Return the pieces of a text, in order: each but the first begins with a special token.

    They are about `size` long, or longer where no special token is near. Costs a search for each
    special token.

    Args:
        text: In UTF-8.
        specials: Texts of all tokens that are looked for before all others; none is empty.
        size: In bytes, 1 or more.
        strips: Those of them that take away spaces before them. It is cut before one only where
            there are none.
    """
    longest = max(map(len, specials), default=0)
    pieces: list[bytes] = []
    begin, start = 0, size
    while longest and start < len(text):
        end = start + size + longest
        found = {text.find(special, start, end): special for special in specials}
        found.pop(-1, None)
        for at in sorted(found)[:_TRIES]:
            is_bare = found[at] not in strips or not text[at - 1 : at].isspace()
            if is_bare and not _is_inside(text, at, specials):
                pieces.append(text[begin:at])
                begin, start = at, at + size
                break
        else:
            start += size
    return [*pieces, text[begin:]]


def _is_inside(text: bytes, at: int, specials: Sequence[bytes]) -> bool:
    """Return whether a special token may begin before `at` and end after it."""
    return any(
        text.find(special, max(0, at - len(special) + 1), at + len(special) - 1) >= 0
        for special in specials
    )
