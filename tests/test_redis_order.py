"""Traces: what agrees with a prompt furthest stands beside it, in a list of any length."""

from __future__ import annotations

from bisect import bisect

import numpy as np
import pytest
from blake3 import blake3

from llamakeep.stores.redis.order import around, member, parsed, trace
from llamakeep.tokens import IntArray

NAME = bytes(range(32))


def ints(*tokens: int) -> IntArray:
    return np.array(tokens, np.int32)


def test_a_trace_has_a_byte_for_each_prefix_and_is_the_same_everywhere() -> None:
    assert trace(ints(1, 2, 3, 2**31 - 1, 0)).hex() == "d362d8387c"
    tokens = np.random.default_rng(0).integers(0, 150_000, 700).astype(np.int32)
    whole = trace(tokens)
    assert len(whole) == 700
    for size in (0, 1, 2, 255, 256, 257, 512, 513):
        assert trace(tokens[:size]) == whole[:size]
    assert len(set(whole)) > 200


def test_a_trace_parts_where_tokens_do_and_stays_apart() -> None:
    rng = np.random.default_rng(1)
    late = 0
    for _ in range(2_000):
        one = rng.integers(0, 50_000, 40).astype(np.int32)
        at = int(rng.integers(0, 40))
        other = one.copy()
        other[at] += 1  # the rest is the same
        alike = np.frombuffer(trace(one), np.uint8) == np.frombuffer(trace(other), np.uint8)
        assert alike[:at].all()
        late += int(alike[at:].sum())
    assert late / (2_000 * 20) == pytest.approx(1 / 256, rel=0.3)


@pytest.mark.parametrize("n_words", [2, 200])
def test_neighbours_agree_as_far_as_any_does(n_words: int) -> None:
    rng = np.random.default_rng(2)
    talks = rng.integers(0, n_words, (20_000, 30)).astype(np.int32)
    listed = sorted(
        (member(trace(talk), blake3(talk.tobytes()).digest(), closes=False), index)
        for index, talk in enumerate(talks)
    )
    lost = []
    for _ in range(200):
        parent = talks[int(rng.integers(len(talks)))]
        cut = int(rng.integers(1, 30))
        prompt = np.concatenate([parent[:cut], rng.integers(0, n_words, 30 - cut)]).astype(np.int32)
        alike = np.cumprod(talks == prompt, axis=1).sum(axis=1)
        at = bisect(listed, (trace(prompt) + NAME, 0))
        beside = max(alike[index] for _, index in listed[max(0, at - 4) : at + 4])
        lost.append(int(alike.max() - beside))
    assert max(lost) <= 3
    assert np.mean(lost) < 0.1


def test_a_member_says_what_it_is_of() -> None:
    span = trace(ints(5, 6, 7))
    for closes in (False, True):
        record = member(span, NAME, closes=closes)
        assert parsed(record) == (3, NAME, closes)
        assert parsed(record[:-1] + b"\x02") is None
    assert parsed(NAME + b"\0") is None
    assert parsed(b"") is None


def test_bounds_leave_out_the_segment_itself() -> None:
    span = trace(ints(5, 6, 7))
    before, behind = around(span, NAME)
    for closes in (False, True):
        assert before[1:] < member(span, NAME, closes=closes) < behind[1:]
    assert before[:1] == behind[:1] == b"("
    assert member(span, NAME[:-1] + b"\xff", closes=False) > behind[1:]
    assert member(span[:2], NAME, closes=False) != member(span, NAME, closes=False)
