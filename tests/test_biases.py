"""Biases are added up once, as one by one, and shared by all who sample with them."""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamakeep.biases import NO_BIASES, Biases
from llamakeep.errors import InvalidValue, TokenError
from llamakeep.runtime.sampling import settle
from llamakeep.sampling import Sampling
from llamakeep.server.errors import ApiError
from llamakeep.server.prompts import MOST_BIASES, bias_of
from tests.engine_tools import runtime_of
from tests.server_tools import Served, served

PAIRS = st.lists(
    st.tuples(st.integers(0, 30), st.floats(-1e300, 1e9) | st.just(-math.inf)), max_size=40
)


@given(pairs=PAIRS, forbidden=st.sets(st.integers(0, 30), max_size=5))
def test_they_are_added_up_as_one_by_one(
    pairs: list[tuple[int, float]], forbidden: set[int]
) -> None:
    expected = dict[int, float]()
    for token, bias in pairs:
        expected[token] = expected.get(token, 0.0) + bias
    sampling = Sampling(logit_bias=pairs)
    assert list(sampling.logit_bias) == pairs
    if max(expected.values(), default=0.0) > 1e9:
        with pytest.raises(InvalidValue, match="the bias of token"):
            settle(sampling, n_vocab=100, n_ctx=80, forbidden=forbidden)
        return
    settled = settle(sampling, n_vocab=100, n_ctx=80, forbidden=forbidden)
    expected |= dict.fromkeys(forbidden, -math.inf)
    found = dict(zip(settled.tokens.tolist(), settled.biases.tolist(), strict=True))
    assert found == {token: ctypes.c_float(bias).value for token, bias in expected.items()}


def test_copies_of_settings_share_them_and_samplers_do_too() -> None:
    sampling = Sampling(logit_bias=((3, 1.0), (1, 2.0), (3, 0.5)))
    other = replace(sampling, seed=7)
    assert other.biases is sampling.biases
    assert (other == sampling, replace(other, seed=sampling.seed) == sampling) == (False, True)
    assert hash(replace(other, seed=sampling.seed)) == hash(sampling)
    for each in (sampling, other):
        settled = settle(each, n_vocab=100, n_ctx=80, forbidden=())
        assert settled.biases is sampling.biases.values
        assert settled.tokens is sampling.biases.tokens
    assert Sampling().biases is Sampling(logit_bias=()).biases is NO_BIASES


def test_they_are_what_was_given_and_cannot_be_changed() -> None:
    biases = Biases([(3, 1.0), (1, 2.0), (3, 0.5)])
    assert (len(biases), biases[0], biases[1:]) == (3, (3, 1.0), ((1, 2.0), (3, 0.5)))
    assert biases == Biases(list(biases)) != Biases([(3, 1.5), (1, 2.0)])
    for array in (biases.tokens, biases.sums, biases.values):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_is_refused(bad: float) -> None:
    with pytest.raises(InvalidValue, match=f"the bias of token 7 must be a number, not {bad}"):
        Sampling(logit_bias=((1, 1.0), (7, bad), (2, -math.inf)))


def test_what_is_no_token_is_refused() -> None:
    for bad in (-1, 2**31):
        with pytest.raises(TokenError):
            Sampling(logit_bias=((bad, 1.0),))


def test_a_request_has_a_limit_of_them_that_no_vocabulary_lifts() -> None:
    vocab = runtime_of("attention", n_vocab=100_000).vocab
    pairs: list[Any] = [[token, 1] for token in range(MOST_BIASES)]
    assert len(bias_of(vocab, pairs)) == MOST_BIASES
    for more in ([*pairs, [5, 1]], [*pairs[:-1], ["two", 1]]):
        with pytest.raises(ApiError, match=f"more than {MOST_BIASES}"):
            bias_of(vocab, more)


@pytest.fixture(scope="module")
def server() -> Any:
    with served() as made:
        yield made


def test_all_answers_of_a_request_share_them(server: Served) -> None:
    biases = [[token, 1] for token in range(300)]
    with server.asked() as requests:
        server.answer("/v1/completions", prompt=["a", "b"], n=3, max_tokens=1, logit_bias=biases)
    assert len(requests) == 6
    assert len({id(request.sampling.biases) for request in requests}) == 1
    assert len(requests[0].sampling.biases) == 300
