"""Long texts in pieces: the tokens are those of the whole."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llamakeep.runtime.cuts import cut

SPECIALS = [b"<a>", b"<a><b>", b"<b>", b"aa", b"\n\n", b"<strip>", b"b<"]
STRIPS = {b"<strip>"}
BITS = [*SPECIALS, b" ", b"\n", b"a", b"b", b"<", b">", b"plain", "é".encode()]


def partition(text: bytes) -> list[tuple[bool, bytes]]:
    """Return what llama.cpp makes of a text before it tokenizes the plain parts, one by one.

    The longest special tokens first, each of them from left to right.
    """
    parts = [(False, text)]
    for special in sorted(SPECIALS, key=len, reverse=True):
        after: list[tuple[bool, bytes]] = []
        for is_special, part in parts:
            while not is_special and special in part:
                before, _, part = part.partition(special)
                before = before.rstrip() if special in STRIPS else before
                after += [(False, before), (True, special)]
            after.append((is_special, part))
        parts = [(is_special, part) for is_special, part in after if part]
    return parts


@given(bits=st.lists(st.sampled_from(BITS), max_size=40), size=st.integers(1, 12))
@example(bits=[b" ", b"\n\n", b"<strip>"], size=1)
@example(bits=[b"a", b"\n\n", b" ", b"<strip>"], size=1)
def test_pieces_have_the_tokens_of_the_whole(bits: list[bytes], size: int) -> None:
    text = b"".join(bits)
    pieces = cut(text, SPECIALS, size, strips=STRIPS)
    assert b"".join(pieces) == text
    assert [part for piece in pieces for part in partition(piece)] == partition(text)
    assert all(piece.startswith(tuple(SPECIALS)) for piece in pieces[1:])
    assert all(len(piece) >= size for piece in pieces[:-1])


@pytest.mark.parametrize(
    "text",
    [
        b" b<a>",  # the shorter one is not taken: a longer one lies across its end
        b" aaa",
        b"x<a><b>",
        b"xb<b><a>",
        b"\n\n\n\n\n",
    ],
)
def test_what_lies_across_is_not_torn(text: bytes) -> None:
    for size in range(1, len(text)):
        pieces = cut(text, SPECIALS, size, strips=STRIPS)
        assert [part for piece in pieces for part in partition(piece)] == partition(text)


@pytest.mark.parametrize("between", [b"", b"x", b" ", b"x" * 90])
def test_pieces_are_about_as_long_as_was_asked_for(between: bytes) -> None:
    pieces = cut((between + b"<b>") * 2_000, SPECIALS, 100)
    assert max(map(len, pieces)) <= 100 + len(between) + 3


def test_a_text_without_special_tokens_is_one_piece() -> None:
    assert cut(b"x" * 1_000, SPECIALS, 10) == [b"x" * 1_000]
    assert cut(b"<a>" * 1_000, [], 10) == [b"<a>" * 1_000]
    assert cut(b"", SPECIALS, 10) == [b""]


def test_it_is_not_cut_where_spaces_would_come_back() -> None:
    assert cut(b"x  <strip>y", SPECIALS, 2, strips=STRIPS) == [b"x  <strip>y"]
    assert cut(b"x  <strip>y", SPECIALS, 2) == [b"x  ", b"<strip>y"]
