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


@given(
    tokens=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=200),
    data=st.data(),
)
def test_a_name_does_not_depend_on_the_steps_to_it(tokens: list[int], data: st.DataObject) -> None:
    path = tokens_of(*tokens)
    end = data.draw(st.integers(0, path.size))
    stops = data.draw(st.lists(st.integers(0, end), max_size=5).map(sorted))
    straight, stepwise = PathNames(b"space", path), PathNames(b"space", path[:end].copy())
    for stop in stops:
        stepwise.segment(0, stop)
    assert stepwise.segment(3, end) == straight.segment(3, end)
    assert stepwise.checkpoint(end) == straight.checkpoint(end)


def test_names_tell_apart_what_is_not_interchangeable() -> None:
    path = tokens_of(1, 2, 3, 4, 5, 6, 7, 8)
    other = tokens_of(9, 2, 3, 4, 5, 6, 7, 8)
    names = [
        PathNames(b"space", path).segment(0, 8),
        PathNames(b"space", path).segment(4, 8),
        PathNames(b"space", path).segment(4, 7),
        PathNames(b"space", path).checkpoint(8),
        PathNames(b"space", path).checkpoint(7),
        PathNames(b"space", path).checkpoint(0),
        PathNames(b"other", path).segment(4, 8),
        PathNames(b"other", path).checkpoint(8),
        PathNames(b"space", other).segment(4, 8),  # the same tokens after another first one
        PathNames(b"space", other).checkpoint(8),
    ]
    assert len(set(names)) == len(names)
    assert {len(name) for name in names} == {NAME_BYTES}


def test_names_are_the_same_in_every_release() -> None:
    """A changed name makes every cache on disk a stranger: then change the namespace too."""
    names = PathNames(b"llamakeep", tokens_of(1, 2, 3, 70_000))
    assert names.segment(1, 4).hex()[:16] == "f39731705041b79f"
    assert names.checkpoint(4).hex()[:16] == "33077d3ae1735ecf"


def test_names_go_forward() -> None:
    names = PathNames(b"space", tokens_of(1, 2, 3))
    names.segment(0, 2)
    assert names.segment(0, 2) == names.segment(0, 2)
    with pytest.raises(TokenError, match="1 comes before 2"):
        names.segment(0, 1)
    with pytest.raises(TokenError, match="no name at 4: the path has 3 tokens"):
        names.checkpoint(4)
