from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamakeep.errors import InvalidValue, TokenError
from llamakeep.tokens import NAME_BYTES, PathNames, align_down, as_tokens, common_prefix

token_lists = st.lists(st.integers(0, 3), max_size=400)


def tokens_of(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


# -- as_tokens -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        [1, 2, 3],
        (1, 2, 3),
        range(1, 4),
        np.array([1, 2, 3], np.int64),
        np.array([1, 2, 3], np.uint16),
        np.array([1, 9, 2, 9, 3], np.int32)[::2],
        [np.int64(1), np.uint8(2), 3],
    ],
)
def test_every_form_of_tokens_becomes_the_same_array(given: Any) -> None:
    tokens = as_tokens(given)
    assert tokens.dtype == np.int32
    assert tokens.flags.c_contiguous
    assert tokens.tolist() == [1, 2, 3]


@pytest.mark.parametrize("given", [[], (), np.empty(0), np.empty(0, np.int64)])
def test_no_tokens(given: Any) -> None:
    assert as_tokens(given).shape == (0,)
    assert as_tokens(given).dtype == np.int32


def test_a_contiguous_int32_array_is_not_copied() -> None:
    tokens = tokens_of(1, 2)
    assert np.shares_memory(as_tokens(tokens), tokens)


@pytest.mark.parametrize(
    ("given", "n_vocab", "match"),
    [
        ([5, -1, 7], None, r"token -1 at index 1 is outside 0 to 2\*\*31 - 1"),
        ([5, 2**31], None, r"token 2147483648 at index 1 "),
        ([5, 2**63], None, r"token 9223372036854775808 at index 1 "),
        ([2**80], None, r"token 1208925819614629174706176 at index 0 "),
        ([5, 6, 10], 10, r"token 10 at index 2 is outside the vocabulary \(0 to 9\)"),
        (np.array([[1, 2]]), None, "one dimension, not 2"),
        ([[1, 2]], None, "one dimension, not 2"),
        ([[1], [2, 3]], None, "flat list"),
        (np.array([1.0]), None, "integers, not float64"),
        ([1, 2.5], None, r"token 2.5 at index 1 is not an integer"),
        ([1, "a"], None, r"token 'a' at index 1 is not an integer"),
        ([1, None], None, r"token None at index 1 is not an integer"),
        ("abc", None, "integers, not str"),
        (b"abc", None, "integers, not bytes"),
        (3, None, "flat list"),
    ],
)
def test_what_is_no_token_is_named(given: Any, n_vocab: int | None, match: str) -> None:
    with pytest.raises(TokenError, match=match) as raised:
        as_tokens(given, n_vocab=n_vocab)
    assert isinstance(raised.value, InvalidValue)
    assert isinstance(raised.value, ValueError)


# -- common_prefix and align_down ----------------------------------------------------------------


@given(shared=token_lists, first=token_lists, second=token_lists)
def test_common_prefix_is_that_of_a_loop(
    shared: list[int], first: list[int], second: list[int]
) -> None:
    a, b = [*shared, *first], [*shared, *second]
    expected = 0
    while expected < min(len(a), len(b)) and a[expected] == b[expected]:
        expected += 1
    assert common_prefix(tokens_of(*a), tokens_of(*b)) == expected


@pytest.mark.parametrize("at", [0, 1, 63, 64, 65, 575, 576, 577, 5_000])
def test_common_prefix_across_its_chunks(at: int) -> None:
    a = np.zeros(5_000, np.int32)
    b = a.copy()
    b[at:] = 1
    assert common_prefix(a, b) == at


@pytest.mark.parametrize(
    ("position", "align", "expected"),
    [(0, 8, 0), (7, 8, 0), (8, 8, 8), (15, 8, 8), (15, 1, 15), (-1, 8, 0), (-9, 8, 0)],
)
def test_align_down(position: int, align: int, expected: int) -> None:
    assert align_down(position, align) == expected


# -- names ---------------------------------------------------------------------------------------


def names_of(*tokens: int, namespace: bytes = b"space", block: int = 4) -> PathNames:
    return PathNames(namespace, tokens_of(*tokens), block)


@given(
    tokens=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=60),
    block=st.integers(1, 9),
    data=st.data(),
)
def test_a_name_depends_on_the_tokens_up_to_it_and_not_on_the_way(
    tokens: list[int], block: int, data: st.DataObject
) -> None:
    path = tokens_of(*tokens)
    start = data.draw(st.integers(0, path.size - 1))
    end = data.draw(st.integers(start + 1, min(path.size, start - start % block + block)))
    straight = PathNames(b"space", path[:end].copy(), block)
    other = tokens_of(*data.draw(st.lists(st.integers(0, 5), max_size=60)))
    winding = PathNames(b"space", other, block)
    for origin in range(0, other.size + 1, block):
        winding.block(origin)
    winding.follow(path)
    for names in (winding, PathNames(b"space", path, block)):
        assert names.segment(start, end).name == straight.segment(start, end).name
        assert names.checkpoint(start, end).name == straight.checkpoint(start, end).name
    changed = path.copy()
    changed[data.draw(st.integers(0, end - 1))] ^= 1
    assert PathNames(b"space", changed, block).segment(start, end).name != (
        straight.segment(start, end).name
    )


def test_names_tell_apart_what_is_not_interchangeable() -> None:
    here = names_of(1, 2, 3, 4, 5, 6, 7, 8)
    places = [
        here.segment(0, 4),
        here.segment(1, 4),
        here.segment(0, 3),
        here.segment(4, 8),
        here.checkpoint(0, 4),
        here.checkpoint(0, 3),
        here.checkpoint(4, 8),
        names_of(1, 2, 3, 4, namespace=b"other").segment(0, 4),
        names_of(1, 2, 3, 4, namespace=b"other").checkpoint(0, 4),
        names_of(9, 2, 3, 4, 5, 6, 7, 8).segment(4, 8),  # the same tokens after another first one
        names_of(9, 2, 3, 4, 5, 6, 7, 8).checkpoint(4, 8),
    ]
    names = [*(place.name for place in places), here.block(0), here.block(4), here.block(8)]
    assert len(set(names)) == len(names)
    assert {len(name) for name in names} == {NAME_BYTES}


def test_a_checkpoint_is_the_same_wherever_its_span_starts() -> None:
    names = names_of(1, 2, 3, 4)
    assert names.checkpoint(0, 4).name == names.checkpoint(2, 4).name


def test_a_place_says_where_it_is() -> None:
    names = names_of(10, 11, 12, 13, 14, 15, 16, 17, 18)
    place = names.segment(5, 8)
    assert (place.origin, place.start, place.end, place.first) == (4, 5, 8, 15)
    assert place.tokens.tolist() == [14, 15, 16, 17]
    assert (place.kind, place.namespace, place.block) == ("segment", b"space", names.block(4))
    assert place.closes
    assert place.next_block == names.block(8)
    tail = names.segment(8, 9)
    assert not tail.closes
    assert tail.next_block == b""
    assert names.checkpoint(5, 7).kind == "checkpoint"


def test_names_are_the_same_in_every_release() -> None:
    """A changed name makes every cache on disk a stranger: then change the namespace too."""
    names = PathNames(b"llamakeep", tokens_of(1, 2, 3, 70_000), 2)
    assert names.block(0).hex()[:16] == "9fc658ec1766eb14"
    assert names.segment(2, 4).name.hex()[:16] == "2f200d5a4120ee8f"
    assert names.checkpoint(2, 4).name.hex()[:16] == "98dad526f864f3b1"


def test_no_name_past_the_end_or_across_blocks() -> None:
    names = names_of(1, 2, 3, 4, 5)
    for start, end in ((0, 5), (3, 5), (4, 6), (2, 2), (3, 2)):
        with pytest.raises(TokenError, match=f"no segment of tokens {start} to {end}"):
            names.segment(start, end)
    for origin in (1, -4, 8):
        with pytest.raises(TokenError, match=f"no block at {origin}"):
            names.block(origin)
