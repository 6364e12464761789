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
        found = {text.find(special, start, end) for special in specials} - {-1}
        for at in sorted(found)[:_TRIES]:
            if _begins(text, at, specials, strips):
                pieces.append(text[begin:at])
                begin, start = at, at + size
                break
        else:
            start += size
    return [*pieces, text[begin:]]


def _begins(text: bytes, at: int, specials: Sequence[bytes], strips: Collection[bytes]) -> bool:
    """Return whether a special token begins at `at` for sure, and the text before is as it is.

    The longest ones are looked for first. So the longest one there is taken if no other one lies
    across its beginning or its end.
    """
    longest = max((each for each in specials if text.startswith(each, at)), key=len)
    if longest in strips and text[at - 1 : at].isspace():
        return False
    end = at + len(longest)
    if longest.isspace():
        past = end
        while text[past : past + 1].isspace():
            past += 1
        if text.startswith(tuple(strips), past):
            return False  # it is taken away itself
    return not (_lies_across(text, at, specials) or _lies_across(text, end, specials, at + 1))


def _lies_across(text: bytes, at: int, specials: Sequence[bytes], first: int = 0) -> bool:
    """Return whether a special token begins before `at`, not before `first`, and ends after it."""
    return any(
        text.find(special, max(first, at - len(special) + 1), at + len(special) - 1) >= 0
        for special in specials
    )
