"""What the dashboard reads: all it shows, nothing it must not, at a cost that pages share."""

from __future__ import annotations

import time
from importlib.resources import files
from typing import Any

import pytest

from llamakeep.engine import Record
from llamakeep.server.dashboard import FRESH_S, MOST_BRANCHES, Board, page
from llamakeep.server.series import INTERVAL_S, MOST_INTERVALS, MOST_LETTERS, MOST_RECENT, Series
from tests.engine_tools import ask, engine_of, join, span
from tests.server_tools import ONLY_A, TIMEOUT_S, Served, served

DATA = "/dashboard/data"
KEY = "sk-this-is-secret"


def settled(server: Served) -> dict[str, Any]:
    """Return what is told once the tree has been looked at after all that was asked."""
    deadline, looks = time.monotonic() + TIMEOUT_S, list[Any]()
    while time.monotonic() < deadline:
        told: dict[str, Any] = server.client.get(DATA).json()
        looks.append(told["tree"])
        if len(looks) > 2 and looks[-1] and looks[-1] == looks[-2] == looks[-3]:
            return told
        time.sleep(FRESH_S + 0.05)
    raise AssertionError("the tree is never looked at")


def test_it_tells_what_was_saved_and_what_is_kept() -> None:
    with served() as server:
        for letter in "HHI":
            server.answer("/completion", prompt=letter * 200, n_predict=1)
        server.engine.flush()
        told = settled(server)
        stats = server.engine.stats()
    assert told["totals"]["requests"] == 3
    assert told["totals"]["reused_tokens"] == stats["reused_tokens"] > 0
    assert told["totals"]["saved_ms"] >= 0
    assert told["tiers"] == [
        {"tier": "ram", "used_bytes": stats["used_bytes"], "capacity_bytes": 1 << 26}
    ]
    assert [slot["state"] for slot in told["slots"]] == ["idle", "idle"]
    found = told["tree"]["branches"]
    assert sum(each["n_bytes"] for each in found) == stats["used_bytes"]
    assert {each["last_used"] for each in found} <= set(
        range(round(time.time()) - 30, round(time.time()) + 2)
    )
    assert [each["reused_tokens"] > 0 for each in told["recent"]] == [False, True, False]
    assert sum(each[1] for each in told["series"]["intervals"]) == stats["reused_tokens"]
    assert "HHHH" not in str(told)


def test_what_is_forgotten_is_not_shown() -> None:
    with served() as server:
        server.answer("/completion", prompt="H" * 200, n_predict=1)
        server.engine.flush()
        assert settled(server)["tree"]["branches"]
        server.client.delete("/cache")
        assert settled(server)["tree"]["branches"] == []


def test_who_has_it_is_told_only_that() -> None:
    with served() as server:
        server.answer("/completion", prompt="H" * 200, n_predict=1)
        settled(server)
        first = server.client.get(DATA)
        time.sleep(FRESH_S + 0.05)  # it is made anew, and the same
        again = server.client.get(DATA, headers={"If-None-Match": first.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == first.headers["etag"]
        server.answer("/completion", prompt="I" * 200, n_predict=1)
        time.sleep(FRESH_S + 0.05)
        other = server.client.get(DATA, headers={"If-None-Match": first.headers["etag"]})
        assert other.status_code == 200
        assert other.headers["etag"] != first.headers["etag"]


def test_it_answers_while_the_engine_is_busy() -> None:
    with served() as server:
        server.answer("/completion", prompt="H" * 200, n_predict=1)
        with server.held():
            told = server.client.get(DATA).json()
            assert told["totals"]["requests"] == 1


def test_a_running_answer_is_shown() -> None:
    body = {"prompt": "H" * 100, "logit_bias": ONLY_A, "n_predict": -1, "cache_prompt": True}
    with served() as server, server.streaming("/completion", body), server.held():
        time.sleep(FRESH_S)
        slots = server.client.get(DATA).json()["slots"]
        [busy] = [slot for slot in slots if slot["state"] != "idle"]
        assert busy["state"] == "answer"
        assert busy["prompt_tokens"] == busy["done_tokens"] == 101
        assert busy["n_tokens"] >= 101
        assert busy["generated_tokens"] >= 1
        assert busy["max_tokens"] is None


def test_a_key_is_asked_for_data_and_not_for_the_page() -> None:
    with served(api_keys=(KEY,)) as server:
        assert server.client.get("/").status_code == 200
        server.error_of(server.client.get(DATA), 401)
        headers = {"Authorization": f"Bearer {KEY}"}
        assert server.client.get(DATA, headers=headers).status_code == 200


def test_slots_that_may_not_be_seen_are_not() -> None:
    with served(slots=False) as server:
        assert server.client.get(DATA).json()["slots"] is None


@pytest.mark.parametrize("cache", ["upstream", "keep"])
def test_whole_prompts_are_a_flat_list(cache: str) -> None:
    with served(engine={"cache": cache, "n_seqs": 1}) as server:
        for letter in "HIJ":
            server.answer("/completion", prompt=letter * 200, n_predict=1)
        told = settled(server)
    assert told["cache"] == "prompt"
    assert len(told["tree"]["branches"]) == 2, "the third one is in the slot"
    assert all("parent" not in each for each in told["tree"]["branches"])


def test_a_foreign_page_can_neither_read_nor_frame_it() -> None:
    with served() as server:
        told = server.client.get(DATA, headers={"Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in told.headers
        assert told.headers["cross-origin-resource-policy"] == "same-origin"
        assert told.headers["x-content-type-options"] == "nosniff"
        assert told.headers["cache-control"] == "no-store"
        shown = server.client.get("/")
    assert shown.headers["x-frame-options"] == "DENY"
    policy = dict(
        each.strip().split(" ", 1) for each in shown.headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == policy["frame-ancestors"] == policy["form-action"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["script-src"].startswith("'sha256-")
    assert "unsafe" not in str(policy)


def test_the_page_is_small_and_of_one_piece() -> None:
    content, headers = page()
    assert content == files("llamakeep.server").joinpath("dashboard.html").read_bytes()
    assert len(content) < 60_000
    for load in (b"src=", b"@import", b"url(", b"innerHTML", b'<link rel="stylesheet', b"onclick="):
        assert load not in content
    with served() as server:
        assert server.client.get("/").headers["content-type"] == "text/html; charset=utf-8"
        known = {"If-None-Match": headers["ETag"]}
        assert server.client.get("/", headers=known).status_code == 304


# -- the parts -------------------------------------------------------------------------------------
class Clock:
    now = 1_000_003.0

    def __call__(self) -> float:
        return self.now


def record(n: int, **fields: Any) -> Record:
    given = {"reused_tokens": 10, "evaluated_tokens": 5, "generated_tokens": 2}
    return Record(id=n, **(given | fields))


def test_a_series_is_summed_up_by_intervals_and_bounded() -> None:
    clock = Clock()
    series = Series(clock)
    for n in range(MOST_INTERVALS + 20):
        series.ended(record(2 * n))
        series.ended(record(2 * n + 1))
        clock.now += INTERVAL_S * (3 if n == 0 else 1)
    intervals = series.intervals()
    assert len(intervals) == MOST_INTERVALS
    assert intervals[-1] == [clock.now - INTERVAL_S - 3, 20, 10, 4]
    assert all(each[0] % INTERVAL_S == 0 for each in intervals)
    recent = series.recent()
    assert len(recent) == MOST_RECENT
    assert recent[0]["id"] == 2 * (MOST_INTERVALS + 20) - 1
    assert recent[0]["ended"] == clock.now - INTERVAL_S
    series.ended(record(0, label="x" * 1000))
    assert series.recent()[0]["label"] == "x" * MOST_LETTERS


def test_a_clock_that_is_set_back_loses_nothing() -> None:
    clock = Clock()
    series = Series(clock)
    series.ended(record(1))
    clock.now -= 500
    series.ended(record(2))
    assert series.intervals() == [[1_000_000, 20, 10, 4]]


def test_what_was_saved_is_estimated_from_prompts_that_were_evaluated_to_their_end() -> None:
    series = Series()
    assert series.ms_of(100) == 0.0
    series.ended(record(1, evaluated_tokens=50, prompt_ms=110.0, restore_ms=10.0))
    series.ended(record(2, evaluated_tokens=900, generated_tokens=0, stop="cancelled"))
    assert series.ms_of(100) == pytest.approx(200.0)


def test_it_is_made_once_for_all_who_ask_and_again_when_it_is_old() -> None:
    clock, looks = Clock(), list[int]()
    with engine_of() as engine:
        board = Board(engine, Series(clock), clock=clock)
        stats = engine.stats

        def counted() -> dict[str, Any]:
            looks.append(1)
            return stats()

        engine.stats = counted  # type: ignore[method-assign]
        told = board.tell()
        assert all(board.fresh() == board.tell() == told for _ in range(10))
        assert len(looks) == 1
        clock.now += FRESH_S
        assert board.fresh() is None
        board.tell()
        assert len(looks) == 2
        clock.now -= 100  # set back
        assert board.fresh() is None


def test_what_is_told_is_bounded_however_much_is_kept() -> None:
    with engine_of(n_seqs=1, n_ctx=512) as engine:
        series = Series()
        engine.observers.add(series)
        clock = Clock()
        common = span(40, 0)
        for n in range(MOST_BRANCHES + 30):
            ask(engine, join(common, span(60, n + 1)), 1, label="x" * 80).wait()
        engine.flush()
        board = Board(engine, series, clock=clock)
        engine.outline()
        engine.call(lambda: None)  # and it has been looked at
        body, _ = board.tell()
    assert len(body) < 60_000
    assert b'"n_more":' in body
    assert body.count(b'"n_bytes"') == MOST_BRANCHES
