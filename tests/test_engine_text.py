"""Tokens to text, stop strings, and who gets how much of a batch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamakeep.engine.batching import LEAST_CHUNK, Pace, chunk_end, share_out
from llamakeep.engine.text import Writer

LETTERS = st.text(alphabet="ab\N{EURO SIGN}\N{GRINNING FACE}", max_size=30)


def written(data: bytes, stop: list[str], cuts: list[int]) -> tuple[str, str]:
    """What a writer tells of bytes that come in pieces, and what stopped it."""
    writer, out, at = Writer(stop), [], 0
    for cut in [*sorted(cuts), len(data)]:
        out.append(writer.push(data[at:cut]))
        at = max(at, cut)
    out.append(writer.finish())
    return "".join(out), writer.stopped_by


@given(LETTERS, st.lists(st.integers(0, 100), max_size=8))
def test_pieces_say_the_whole_text_however_it_is_cut(text: str, cuts: list[int]) -> None:
    data = text.encode()
    assert written(data, [], [min(cut, len(data)) for cut in cuts]) == (text, "")


@given(
    LETTERS,
    st.lists(st.text(alphabet="ab\N{EURO SIGN}", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 100), max_size=8),
)
def test_text_ends_before_the_first_stop_string(
    text: str, stop: list[str], cuts: list[int]
) -> None:
    data = text.encode()
    told, by = written(data, stop, [min(cut, len(data)) for cut in cuts])
    ends = {text.find(each) + len(each): each for each in sorted(stop, key=len) if each in text}
    if not ends:
        assert (told, by) == (text, "")
    else:
        first = min(ends)
        assert by == ends[first]
        assert told + by == text[:first]


def test_what_may_become_a_stop_string_is_held_back() -> None:
    writer = Writer(["STOP"])
    assert [writer.push(piece) for piece in (b"ab S", b"T", b"x", b"STO")] == ["ab ", "", "STx", ""]
    assert (writer.push(b"P and more"), writer.stopped_by) == ("", "STOP")
    assert (writer.push(b"more"), writer.finish()) == ("", "")


def test_of_stop_strings_that_end_at_one_place_the_longest_counts() -> None:
    writer = Writer(["bc", "abc", "abcd"])
    assert (writer.push(b"xabcd"), writer.stopped_by) == ("x", "abc")


def test_many_long_stop_strings_cost_a_step_for_each_letter() -> None:
    writer = Writer(["a" * 4000 + "b"])
    assert writer.push(b"a" * 3999) == ""
    assert writer.push(b"ax") == "a" * 4000 + "x"
    assert writer.push(b"a" * 4001) == "a"
    assert (writer.push(b"b"), writer.stopped_by) == ("", "a" * 4000 + "b")


def test_half_a_letter_waits_and_becomes_a_replacement_at_the_end() -> None:
    writer = Writer()
    assert [writer.push(piece) for piece in (b"\xe2", b"\x82", b"\xac", b"\xe2")] == [
        "",
        "",
        "\N{EURO SIGN}",
        "",
    ]
    assert writer.finish() == "\N{REPLACEMENT CHARACTER}"


def test_bytes_that_are_no_text_become_replacements() -> None:
    assert written(b"a\xffb", [], []) == ("a\N{REPLACEMENT CHARACTER}b", "")


# -- batches ---------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 3000), max_size=8), st.integers(-5, 2048))
def test_no_room_is_left_while_one_of_them_wants_it(wanted: list[int], room: int) -> None:
    shares = share_out(wanted, room)
    assert len(shares) == len(wanted)
    assert all(0 <= share <= want for share, want in zip(shares, wanted, strict=True))
    served = max(1, room // LEAST_CHUNK)
    assert sum(shares) == max(0, min(room, sum(wanted[:served])))


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    assert share_out([10_000, 100], 512) == [412, 100]
    assert share_out([10_000, 10_000], 512) == [256, 256]


def test_pieces_are_worth_their_place() -> None:
    assert share_out([1000] * 4, 2 * LEAST_CHUNK) == [LEAST_CHUNK, LEAST_CHUNK, 0, 0]
    assert share_out([1000], 5) == [5]


@pytest.mark.parametrize(
    ("start", "share", "stop", "end"),
    [
        (0, 100, 1000, 96),  # on a multiple
        (0, 100, 100, 100),  # at the stop
        (3, 4, 1000, 7),  # no multiple in reach
        (96, 9, 106, 104),
        (96, 16, 113, 104),  # not all but one: a row by itself is rounded differently
        (4, 3, 8, 6),
        (4, 1, 6, 5),
    ],
)
def test_a_chunk_ends_where_rows_are_grouped(start: int, share: int, stop: int, end: int) -> None:
    assert chunk_end(start, share, stop, 8) == end


@given(st.integers(0, 500), st.integers(1, 600), st.integers(1, 600), st.integers(1, 16))
def test_a_chunk_gets_on_and_keeps_to_its_share(
    start: int, share: int, more: int, align: int
) -> None:
    end = chunk_end(start, share, start + more, align)
    assert start < end <= min(start + share, start + more)


def test_the_pace_follows_the_batches_that_were_run() -> None:
    pace = Pace(100.0, 512)
    assert pace.n_tokens == 4 * LEAST_CHUNK
    pace.ran(1, 900.0)  # one token alone says nothing
    assert pace.n_tokens == 4 * LEAST_CHUNK
    pace.ran(500, 500.0)
    assert pace.n_tokens == 100
    for _ in range(50):
        pace.ran(512, 512 * 50.0)
    assert pace.n_tokens == LEAST_CHUNK
    for _ in range(50):
        pace.ran(512, 1.0)
    assert pace.n_tokens == 512
