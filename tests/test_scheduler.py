"""The scheduler without a thread: requests, cancels and failures in any order, step by step."""

from __future__ import annotations

import itertools
from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from llamakeep.engine import Failed, Finished, Keeping, PromptKeeping, Request, Stop, TreeKeeping
from llamakeep.engine.job import Job
from llamakeep.engine.scheduler import Scheduler
from llamakeep.errors import ContextOverflow, DecodeError
from llamakeep.modes import Mode
from llamakeep.prompt_cache import PromptCache
from llamakeep.runtime.base import Family
from llamakeep.runtime.fake import OPERATIONS, FakeRuntime
from llamakeep.stores.memory import MemoryStore
from llamakeep.tree import PrefixTree
from tests.engine_tools import GREEDY, Heard, cold, join, runtime_of, span, tenant

N_CTX = 256
MOST_STEPS = 5_000


class Ticks:
    """A clock that goes on with every look."""

    def __init__(self) -> None:
        self._count = itertools.count()

    def __call__(self) -> float:
        return float(next(self._count))


def scheduler_of(
    runtime: FakeRuntime, *, cache: str = "tree", capacity_bytes: int = 1 << 20, **options: Any
) -> tuple[Scheduler, Keeping, list[tuple[Job, Finished | Failed]]]:
    """Return a scheduler, what it keeps in, and the list of what has ended."""
    ended: list[tuple[Job, Finished | Failed]] = []
    kept: Keeping
    if cache == "tree":
        tree = PrefixTree(MemoryStore(capacity_bytes), runtime.traits, segment_tokens=16)
        kept = TreeKeeping(runtime, tree, tenant, min_step=24)
    else:
        kept = PromptKeeping(runtime, PromptCache(capacity_bytes, mode=cast(Any, cache)), tenant)
    given: dict[str, Any] = {"park_idle": True, "align": 8, "stall_ms": 1e9}
    scheduler = Scheduler(
        runtime,
        runtime.vocab,
        kept,
        on_end=lambda job, last: ended.append((job, last)),
        on_saved=lambda _ms: None,
        clock=Ticks(),
        **(given | options),
    )
    return scheduler, kept, ended


def turn(scheduler: Scheduler) -> None:
    scheduler.drop_cancelled()
    scheduler.start_waiting()
    scheduler.step()


class SchedulerMachine(RuleBasedStateMachine):
    """Everything at once, in every family, over either kind of cache."""

    @initialize(
        family=st.sampled_from(list(Family)),
        cache=st.sampled_from(["tree", "tree", "keep"]),
        capacity=st.sampled_from([0, 4_000, 1 << 20]),
        n_seqs=st.integers(1, 4),
        park=st.booleans(),
    )
    def start(self, family: Family, cache: str, capacity: int, n_seqs: int, park: bool) -> None:
        self.family = family
        self.runtime = runtime_of(family, n_seqs=n_seqs, n_ctx=N_CTX, n_batch=32)
        self.scheduler, self.keeping, self.ended = scheduler_of(
            self.runtime, cache=cache, capacity_bytes=capacity, park_idle=park
        )
        self.jobs: list[tuple[Job, Heard]] = []

    @rule(
        pieces=st.lists(st.integers(0, 3), min_size=1, max_size=5),
        cut=st.integers(0, 15),
        n=st.integers(0, 40),
        salt=st.sampled_from(["", "", "", "other"]),
        slot=st.sampled_from([None, None, None, 0]),
        mode=st.sampled_from([Mode.ON] * 4 + list(Mode)),
        starts=st.booleans(),
    )
    def submit(
        self,
        pieces: list[int],
        cut: int,
        n: int,
        salt: str,
        slot: int | None,
        mode: Mode,
        starts: bool,
    ) -> None:
        prompt = join(*(span(40, piece) for piece in pieces))
        prompt = prompt[: prompt.size - cut]
        user_starts = tuple(range(0, int(prompt.size), 40)) if starts else ()
        request = Request(
            prompt, n, GREEDY, salt=salt, slot=slot, mode=mode, user_starts=user_starts
        )
        heard = Heard()
        job = Job(len(self.jobs) + 1, request, heard, N_CTX, 0.0)
        self.jobs.append((job, heard))
        self.scheduler.waiting.append(job)

    @rule(n=st.integers(1, 12))
    def steps(self, n: int) -> None:
        for _ in range(n):
            turn(self.scheduler)

    @rule(which=st.integers(0, 50))
    def cancel(self, which: int) -> None:
        if self.jobs:
            self.jobs[which % len(self.jobs)][0].cancelled = True

    @rule(
        operation=st.sampled_from(OPERATIONS),
        after=st.integers(0, 4),
        cleared_all=st.booleans(),
    )
    def fail(self, operation: str, after: int, cleared_all: bool) -> None:
        self.runtime.fail(operation, after=after, cleared_all=cleared_all and ":" in operation)

    @rule()
    def forget(self) -> None:
        self.keeping.forget()

    @invariant()
    def what_has_ended_is_right(self) -> None:
        if not hasattr(self, "jobs"):
            return
        assert len(self.ended) == sum(heard.ended.is_set() for _, heard in self.jobs)
        for job, heard in self.jobs:
            if not heard.ended.is_set():
                continue
            last, request = heard.updates[-1], job.request
            if isinstance(last, Failed):
                assert isinstance(last.error, (DecodeError, ContextOverflow))
                continue
            assert isinstance(last, Finished)
            n = len(heard.tokens)
            expected = cold(self.family, request.prompt, n, n_ctx=N_CTX)
            assert heard.tokens == expected
            if last.stop is Stop.LIMIT and not last.truncated:
                assert n == request.max_tokens
            heard.updates = [last]  # it was looked at
            heard.ended.clear()
            self.jobs = [each for each in self.jobs if each[0] is not job]
            self.ended = [each for each in self.ended if each[0] is not job]
            self.scheduler._on_end = lambda job, last: self.ended.append((job, last))

    @invariant()
    def it_adds_up(self) -> None:
        if hasattr(self, "keeping"):
            stats = self.keeping.stats()
            assert stats["used_bytes"] <= stats["capacity_bytes"]

    def teardown(self) -> None:
        if not hasattr(self, "jobs"):
            return
        self.runtime._planned.clear()
        for _ in range(MOST_STEPS):
            if not self.scheduler.has_work:
                break
            turn(self.scheduler)
        assert not self.scheduler.has_work
        self.what_has_ended_is_right()
        for slot in self.scheduler.slots:
            self.keeping.holds(slot.slot_id)
        self.keeping.check()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


# -- one thing at a time ---------------------------------------------------------------------------


def ask(scheduler: Scheduler, number: int, prompt: Any, n: int, **options: Any) -> Heard:
    heard = Heard()
    request = Request(prompt, n, GREEDY, **options)
    scheduler.waiting.append(Job(number, request, heard, 2048, 0.0))
    return heard


def test_answers_go_on_while_a_long_prompt_is_evaluated() -> None:
    runtime = runtime_of("attention", n_seqs=2)
    scheduler, _, _ = scheduler_of(runtime)
    short = ask(scheduler, 1, span(20, 1), 100)
    turn(scheduler)
    long = ask(scheduler, 2, span(600, 2), 1)
    before = len(short.tokens)
    turns = 0
    while not long.ended.is_set():
        turn(scheduler)
        turns += 1
    assert turns >= 600 // 64
    assert len(short.tokens) - before == turns  # one in every batch


def test_short_prompts_do_not_wait_for_a_long_one() -> None:
    runtime = runtime_of("attention", n_seqs=2)
    scheduler, _, _ = scheduler_of(runtime)
    long = ask(scheduler, 1, span(1500, 1), 1)
    turn(scheduler)
    short = ask(scheduler, 2, span(60, 2), 1)
    for _ in range(3):
        turn(scheduler)
    assert short.ended.is_set()
    assert not long.ended.is_set()


def test_who_waits_for_a_prefix_goes_on_when_it_will_not_come() -> None:
    """The one that evaluates it is cancelled half way: the next one takes over."""
    runtime = runtime_of("attention", n_seqs=3)
    scheduler, _, _ = scheduler_of(runtime)
    system = span(640, 1)
    first = ask(scheduler, 1, join(system, span(20, 2)), 2)
    turn(scheduler)
    others = [ask(scheduler, 2 + seed, join(system, span(20, 3 + seed)), 2) for seed in range(2)]
    for _ in range(3):
        turn(scheduler)
    assert len(scheduler.waiting) == 2
    assert isinstance(scheduler.slots[0].job, Job)
    scheduler.slots[0].job.cancelled = True
    for _ in range(40):
        turn(scheduler)
    assert [one.wait().stop for one in (first, *others)] == [
        Stop.CANCELLED,
        Stop.LIMIT,
        Stop.LIMIT,
    ]
    evaluated = sum(one.wait().timings.prompt_n for one in others)
    assert evaluated <= 640 + 2 * 29


@pytest.mark.parametrize("family", ["attention", "hybrid"])
def test_a_prompt_that_others_wait_for_is_evaluated_once(family: str) -> None:
    runtime = runtime_of(family, n_seqs=4)
    scheduler, _, _ = scheduler_of(runtime)
    system = span(640, 1)
    heard = [ask(scheduler, seed, join(system, span(20, 2 + seed)), 2) for seed in range(4)]
    for _ in range(60):
        turn(scheduler)
    assert all(one.wait().stop is Stop.LIMIT for one in heard)
    assert runtime.calls.evaluated_tokens <= 640 + 4 * (29 + 2)


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("n_ctx", range(150, 440, 29))
def test_prompts_that_could_share_cells_and_do_not_are_answered(n_ctx: int, mode: Mode) -> None:
    """Their beginnings are equal and were evaluated apart; together they do not fit."""
    runtime = runtime_of("attention", n_seqs=4, n_ctx=n_ctx)
    scheduler, _, _ = scheduler_of(runtime)
    system = span(63, 1)
    prompts = [join(system, span(70, 2 + seed)) for seed in range(4)]
    heard = [ask(scheduler, seed, prompt, 6, mode=mode) for seed, prompt in enumerate(prompts)]
    for _ in range(400):
        turn(scheduler)
    for prompt, one in zip(prompts, heard, strict=True):
        assert one.ended.is_set()
        assert one.tokens == cold("attention", prompt, 6, n_ctx=n_ctx)
