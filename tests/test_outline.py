"""What is kept, in few strokes: branches of a tree, bounded, with bytes that add up."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from llamakeep.engine import Choice, Request
from llamakeep.engine.cells import SlotState
from llamakeep.engine.job import Job
from llamakeep.engine.view import LOOK_EVERY_S, LOOK_SHARE, Looks, SlotGlance
from llamakeep.outline import Branch, Outline, Seen, branches, outline_of_trees
from llamakeep.radix import walk
from llamakeep.runtime.base import Family
from llamakeep.spans import SpanNode
from llamakeep.states import Reuse
from tests.engine_tools import ask, engine_of, join, span

ALL = 10_000


def seen(
    number: int, parent: int, start: int, end: int, n_bytes: int, n: int, **more: object
) -> Seen:
    given = {
        "number": number,
        "parent": parent,
        "root": 0,
        "start": start,
        "end": end,
        "n_bytes": n_bytes,
        "tier": "ram",
        "checkpoints": (),
        "hits": 0,
        "last_used": 1.0,
        "n_children": n,
    }
    return Seen(**(given | more))  # type: ignore[arg-type]


def drawn(spans: list[Seen]) -> list[Branch]:
    """Return the branches of spans, all of them."""
    return branches(Outline(0.0, spans), ALL).found


def test_spans_that_follow_each_other_are_one_branch() -> None:
    spans = [
        seen(7, -1, 0, 32, 100, 1, hits=1, checkpoints=(8, 32)),
        seen(8, 0, 32, 64, 100, 1, hits=3, last_used=9.0, checkpoints=(40,)),
        seen(9, 1, 64, 96, 100, 1, tier="disk"),
    ]
    first, second = drawn(spans)
    assert (first.number, first.parent, first.start, first.end) == (7, None, 0, 64)
    assert (first.n_bytes, first.n_spans, first.hits, first.last_used) == (200, 2, 3, 9.0)
    assert (first.checkpoints, first.n_checkpoints) == ([8, 32, 40], 3)
    assert (second.number, second.parent, second.tier) == (9, 7, "disk")


@pytest.mark.parametrize("at", [16, 32])
def test_where_prompts_part_a_branch_ends(at: int) -> None:
    spans = [seen(1, -1, 0, 32, 10, 2), seen(2, 0, 32, 64, 10, 0), seen(3, 0, at, 50, 10, 0)]
    found = drawn(spans)
    assert [(each.number, each.parent, each.start) for each in found] == [
        (1, None, 0),
        (2, 1, 32),
        (3, 1, at),
    ]


def test_a_branch_in_the_middle_of_the_only_child_is_no_continuation() -> None:
    spans = [seen(1, -1, 0, 32, 10, 1), seen(2, 0, 16, 64, 10, 0)]
    assert [each.start for each in drawn(spans)] == [0, 16]


def test_what_is_left_out_is_summed_up_where_it_hangs_off() -> None:
    spans = [seen(0, -1, 0, 10, 100, 4)]
    for n in range(1, 4):
        spans.append(seen(n, 0, 10, 20, n * 10, 1))
        spans.append(seen(n + 10, len(spans) - 1, 20, 30, n, 0, tier="disk"))
    spans.append(seen(99, -1, 0, 10, 5, 0))
    found, n_more, more_bytes = branches(Outline(0.0, spans), 3)
    assert [each.number for each in found] == [0, 2, 3]
    assert [(each.n_more, each.more_bytes) for each in found] == [(2, 11), (1, 2), (1, 3)]
    assert (n_more, more_bytes) == (1, 5)


def test_many_checkpoints_are_counted_and_the_last_ones_told() -> None:
    spans = [seen(1, -1, 0, 500, 10, 0, checkpoints=tuple(range(1, 101)))]
    [branch] = drawn(spans)
    assert branch.n_checkpoints == 100
    assert branch.checkpoints == list(range(69, 101))


def paths(found: list[Branch]) -> int:
    return len(found) - len({each.parent for each in found} - {None})


@pytest.mark.parametrize("family", list(Family))
def test_an_outline_of_an_engine_adds_up(family: Family) -> None:
    with engine_of(family, n_seqs=2, n_ctx=1024) as engine:
        common = span(200, 1)
        for n in range(4):
            ask(engine, join(common, span(150, 10 + n)), 2).wait()
        ask(engine, span(100, 5), 2, salt="other").wait()
        engine.flush()
        keeping = engine._keeping
        outline = engine.call(keeping.outline)
        stats = engine.stats()
    found = branches(outline, ALL).found
    assert sum(each.n_bytes for each in found) == stats["used_bytes"] > 0
    assert len(outline.seen) == stats["nodes"]
    assert outline.n_unseen == 0
    assert {each.root for each in found} == {0, 1}
    by_number = {each.number: each for each in found}
    assert len(by_number) == len(found)
    for each in found:
        assert each.start < each.end
        assert all(each.start < at <= each.end for at in each.checkpoints)
        if each.parent is None:
            assert each.start == 0
        else:
            above = by_number[each.parent]
            assert above.start < each.start <= above.end
            assert above.root == each.root
    assert paths(found) >= 5
    rolls = family is not Family.ATTENTION
    assert (sum(each.n_checkpoints for each in found) > 0) == rolls


def test_entries_of_a_prompt_cache_are_a_tree_without_branches() -> None:
    with engine_of(cache="upstream", n_seqs=1) as engine:
        for n in range(3):
            ask(engine, span(100, n), 2).wait()
        outline = engine.call(engine._keeping.outline)
        entries, used_bytes = engine.entries(), engine.stats()["used_bytes"]
    found = branches(outline, ALL).found
    assert sorted(each.end for each in found) == sorted(entry["n_tokens"] for entry in entries)
    assert sum(each.n_bytes for each in found) == used_bytes > 0
    assert {each.parent for each in found} == {None}


def test_nothing_is_kept_nothing_is_seen() -> None:
    with engine_of(capacity_bytes=0) as engine:
        ask(engine, span(100, 1), 2).wait()
        assert engine.call(engine._keeping.outline).seen == []


def test_of_a_large_tree_no_more_than_so_much_is_looked_at() -> None:
    root = SpanNode(span(1, 0)[:0])
    for n in range(50):
        node = SpanNode(join([n], span(9, n)))
        root.attach(node)
        node.attach(SpanNode(span(10, 100 + n), 10))
    n_nodes = sum(1 for _ in walk(root)) - 1
    outline = outline_of_trees([root], n_nodes, 0.0, most=41)
    assert (len(outline.seen), outline.n_unseen) == (41, n_nodes - 41)
    assert all(each.parent < place for place, each in enumerate(outline.seen))
    assert len(branches(outline, ALL).found) == 21  # 20 pairs, and one without its second half


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_looks_are_asked_for_one_at_a_time_and_cost_a_small_share() -> None:
    clock, posted, taking = Clock(), list[Callable[[], None]](), 0.01

    def look() -> Outline:
        clock.now += taking
        return Outline(clock.now)

    def post(what: Callable[[], None]) -> bool:
        posted.append(what)
        return True

    looks = Looks(look, post, clock)
    assert looks.latest() is None
    assert looks.latest() is None
    assert len(posted) == 1, "one is on its way"
    posted.pop()()
    told = looks.latest()
    assert told is not None
    assert told[1] == pytest.approx(taking)
    clock.now += LOOK_EVERY_S + taking
    looks.latest()
    assert posted == [], "a look that takes long is not repeated soon"
    clock.now = 100 + taking + taking / LOOK_SHARE + 0.001
    looks.latest()
    assert len(posted) == 1


def test_a_look_that_fails_is_logged_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()

    def look() -> Outline:
        raise ZeroDivisionError

    def post(what: Callable[[], None]) -> bool:
        what()
        return True

    looks = Looks(look, post, clock)
    for n in range(1, 3):
        assert looks.latest() is None
        assert caplog.text.count("could not look") == n
        clock.now += LOOK_EVERY_S + 0.1


def test_how_far_a_slot_is_can_be_seen_from_its_prompt_to_its_answer() -> None:
    slot = SlotState(3)
    assert SlotGlance.of(slot, 7, 0.0) == SlotGlance(3, 7)
    job = Job(9, Request.of(range(1, 101), max_tokens=20, label="a"), lambda _: None, 200, 0.0)
    slot.job = job
    assert SlotGlance.of(slot, 40, 0.5).done_tokens == 0, "it has not begun"
    job.start_clock(1.0)
    job.begin(3, Reuse(40, 60, "ram", "new"), 1.0)
    common = {"task_id": 9, "label": "a", "prompt_tokens": 100, "reused_tokens": 40}
    common["max_tokens"] = 20
    assert SlotGlance.of(slot, 64, 3.0) == SlotGlance(
        3, 64, "prompt", done_tokens=64, tokens_per_second=12.0, **common
    )
    job.prompt_done(5.0)
    for n in range(5):
        job.push(Choice(65), b"A", 5.0 + n * 0.5)
    assert SlotGlance.of(slot, 104, 9.0) == SlotGlance(
        3, 104, "answer", done_tokens=100, generated_tokens=5, tokens_per_second=2.0, **common
    )


def test_slots_can_be_seen_while_a_batch_runs() -> None:
    with engine_of(n_seqs=2) as engine:
        ask(engine, span(100, 1), 3, label="a").wait()
        held, go_on = threading.Event(), threading.Event()

        def hold() -> None:
            held.set()
            go_on.wait(30)

        thread = threading.Thread(target=engine.call, args=(hold,), daemon=True)
        thread.start()
        assert held.wait(30)
        try:
            idle = engine.glance()
            assert engine.outline() is None
            assert [(slot.slot_id, slot.state, slot.task_id) for slot in idle] == [
                (0, "idle", None),
                (1, "idle", None),
            ]
            assert sorted(slot.n_tokens for slot in idle) == [0, 102]
        finally:
            go_on.set()
            thread.join(30)
