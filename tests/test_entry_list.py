"""Entries found by their tokens: against a list without an index, which looks at each."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llamakeep.entries import Entry
from llamakeep.entry_list import EntryList
from llamakeep.errors import IntegrityError
from llamakeep.events import Event
from llamakeep.policy import policy_names
from llamakeep.prompt_cache import PromptCache
from llamakeep.runtime.base import Family
from llamakeep.runtime.fake import FakeRuntime
from llamakeep.slots import Slots
from llamakeep.wholes import whole_bytes
from tests.plain_prompt_cache import PlainEntries, PlainPromptCache

NUMBERS = itertools.count(1)


def entry_of(*tokens: int, namespace: bytes = b"", rolling: bool = False) -> Entry:
    entry = Entry(np.array(tokens, np.int32), 1, namespace=namespace, rolling=rolling)
    entry.sequence = next(NUMBERS)
    return entry


def list_of(*entries: Entry) -> EntryList:
    found = EntryList()
    for entry in entries:
        found.add(entry)
    found.check()
    return found


# -- by hand ---------------------------------------------------------------------------------------


def test_entries_are_found_by_what_they_share() -> None:
    short, long, other, foreign = entries = (
        entry_of(1, 2),
        entry_of(1, 2, 3, 4),
        entry_of(1, 2, 7, 8, 9),
        entry_of(1, 2, 3, namespace=b"b"),
    )
    listed = list_of(*entries)
    asked = entry_of(1, 2, 3)
    assert list(listed) == list(entries)
    assert listed.n_tokens == 14
    assert list(listed.containing(asked)) == [long]
    assert listed.prefixes(asked) == [short]
    assert list(listed.sharing(b"", asked.tokens, 3)) == [(3, long)]
    assert set(listed.sharing(b"", asked.tokens, 1)) == {(3, long), (2, short), (2, other)}
    assert list(listed.sharing(b"c", asked.tokens, 0)) == []
    assert [listed.reached_by_others(each) for each in entries] == [2, 2, 2, 0]
    assert list(listed.containing(entry_of(1, 2, namespace=b"b"))) == [foreign]


def test_who_comes_and_goes_changes_what_others_reach() -> None:
    first, near, same = entry_of(1, 2, 3, 4), entry_of(1, 2, 3, 9), entry_of(1, 2, 3, 4)
    listed = list_of(first)
    for entry, reached in ((near, 3), (same, 4)):
        listed.add(entry)
        assert listed.reached_by_others(first) == reached
    for entry, reached in ((same, 3), (near, 0)):
        listed.remove(entry)
        listed.check()
        assert listed.reached_by_others(first) == reached


def test_checkpoints_that_come_later_are_looked_for() -> None:
    """Nothing is remembered of a namespace with entries that resume at checkpoints only."""
    plain, far = entry_of(1, 2, 3, 4), entry_of(1, 2, 3, 9)
    listed = list_of(plain, far)
    assert listed.reached_by_others(plain) == 3
    rolling = entry_of(1, 2, 3, 4, 5, rolling=True)
    listed.add(rolling)
    listed.check()
    assert [listed.reached_by_others(each) for each in (plain, far)] == [3, 3]
    listed.remove(far)
    listed.check()
    assert listed.reached_by_others(plain) == 0


def test_a_stranger_cannot_be_removed() -> None:
    listed = list_of(entry_of(1, 2))
    with pytest.raises(KeyError, match=r"Entry\(2 tokens"):
        listed.remove(entry_of(1, 2))
    listed.check()
    assert len(listed) == 1
    assert repr(listed) == "EntryList(1 entries)"


@pytest.mark.parametrize("method", ["add", "remove"])
@pytest.mark.parametrize("where", ["insert", "remove", "longest_common_prefix", "get"])
def test_what_an_interrupt_leaves_is_made_anew(
    method: str, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, entry = entry_of(1, 2, 3), entry_of(1, 2, 4, 5)
    listed = list_of(before) if method == "add" else list_of(before, entry)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"llamakeep.radix.RadixIndex.{where}", interrupt)
        try:
            getattr(listed, method)(entry)
        except KeyboardInterrupt:
            pass
        else:
            assert where != "get"
    listed.check()
    left = [before, entry] if method == "add" else [before]
    assert list(listed) == left
    assert set(listed.sharing(b"", entry.tokens, 2)) == {
        (4 if each is entry else 2, each) for each in left
    }


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda listed, _: setattr(listed._known, "n_tokens", 8), "8 tokens are counted, 7 are"),
        (lambda listed, _: listed._known.indexes.clear(), "0 entries can be found, 2 are kept"),
        (lambda _, entry: setattr(entry, "namespace", b"x"), "is found by 3 other tokens"),
        (lambda listed, entry: listed._known.reached.update({entry: 1}), "reach 2 tokens of"),
    ],
)
def test_check_finds_damage(damage: Any, message: str) -> None:
    entry = entry_of(1, 2, 3)
    listed = list_of(entry, entry_of(1, 2, 4, 5))
    damage(listed, entry)
    with pytest.raises(IntegrityError, match=message):
        listed.check()


# -- in any order ----------------------------------------------------------------------------------

prompts = st.lists(st.integers(0, 2), min_size=1, max_size=10)


class ListAgainstPlain(RuleBasedStateMachine):
    """Every question, to the list and to one that looks at each entry."""

    def __init__(self) -> None:
        super().__init__()
        self.listed, self.plain = EntryList(), PlainEntries()

    def nth(self, number: int) -> Entry:
        return list(self.plain)[number % len(self.plain)]

    @rule(tokens=prompts, namespace=st.sampled_from([b"", b"", b"b"]))
    def add(self, tokens: list[int], namespace: bytes) -> None:
        entry = entry_of(*tokens, namespace=namespace)
        self.listed.add(entry)
        self.plain.add(entry)

    @precondition(lambda self: len(self.plain))
    @rule(number=st.integers(0, 99), keep=st.integers(0, 10), more=prompts)
    def add_related(self, number: int, keep: int, more: list[int]) -> None:
        self.add([*self.nth(number).tokens[:keep].tolist(), *more], self.nth(number).namespace)

    @precondition(lambda self: len(self.plain))
    @rule(number=st.integers(0, 99))
    def remove(self, number: int) -> None:
        entry = self.nth(number)
        self.listed.remove(entry)
        self.plain.remove(entry)

    @precondition(lambda self: len(self.plain))
    @rule(number=st.integers(0, 99))
    def make_youngest(self, number: int) -> None:
        self.nth(number).sequence = next(NUMBERS)

    @precondition(lambda self: len(self.plain) > 6)
    @rule()
    def clear(self) -> None:
        self.listed.clear()
        self.plain.clear()

    @rule(tokens=prompts, namespace=st.sampled_from([b"", b"b", b"c"]))
    def ask(self, tokens: list[int], namespace: bytes) -> None:
        asked = Entry(np.array(tokens, np.int32), 1, namespace=namespace)
        one, other = self.listed, self.plain
        assert set(one.containing(asked)) == set(other.containing(asked))
        assert one.prefixes(asked) == other.prefixes(asked)
        assert one.reached_by_others(asked) == other.reached_by_others(asked)
        for least in range(len(tokens) + 2):
            found = list(one.sharing(namespace, asked.tokens, least))
            assert Counter(found) == Counter(other.sharing(namespace, asked.tokens, least))
            assert found == sorted(found, key=lambda pair: -pair[0])

    @invariant()
    def adds_up(self) -> None:
        self.listed.check()
        assert list(self.listed) == list(self.plain)
        assert len(self.listed) == len(self.plain)
        assert self.listed.n_tokens == self.plain.n_tokens
        for entry in self.plain:
            assert entry in self.listed
            assert self.listed.reached_by_others(entry) == self.plain.reached_by_others(entry)


TestListAgainstPlain = ListAgainstPlain.TestCase
TestListAgainstPlain.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, print_blob=True
)


# -- the whole cache -------------------------------------------------------------------------------


class SlowClock:
    """Shows the same time thrice: what is used at one time is told apart by order."""

    def __init__(self) -> None:
        self._ticks = itertools.count(3)

    def __call__(self) -> float:
        return float(next(self._ticks) // 3)


def requests_of(rng: np.random.Generator, n: int) -> list[list[int]]:
    """Prompts that go on, part anywhere, and come again; a few tenants' beginnings are alike."""
    prompts: list[list[int]] = []
    while len(prompts) < n:
        start: list[int] = [int(rng.integers(2))] * int(rng.integers(1, 20))
        if prompts and rng.random() < 0.8:
            before = prompts[int(rng.integers(len(prompts)))]
            start = before[: int(rng.integers(1, len(before) + 1))]
            if rng.random() < 0.2:
                # One like it, from which it goes on: what was saved of it is not loaded.
                prompts.append([*before[:-1], 3, 4])
                start = before
        # Mostly short: an entry may begin with all of a prompt that was cut.
        more = int(rng.integers(1, 30)) if rng.random() < 0.6 else 0
        prompts.append([*start, *rng.integers(0, 3, more).tolist()][:120])
    return prompts


def shown(cache: PromptCache) -> list[Any]:
    return [
        (e.tokens.tolist(), e.n_bytes, e.hits, e.last_used, e.sequence, e.marginal_tokens)
        for e in cache
    ]


@pytest.mark.parametrize("policy", policy_names("prompts"))
@pytest.mark.parametrize("mode", ["upstream", "keep"])
@pytest.mark.parametrize("family", [Family.ATTENTION, Family.HYBRID])
def test_the_cache_decides_as_one_that_looks_at_every_entry(
    family: Family, mode: Any, policy: str
) -> None:
    """Word for word: what is chosen, evicted and reported, for one slot and for several."""
    happened: Counter[str] = Counter()
    runtime = FakeRuntime(family, n_ctx=480)
    runtime.evaluate(0, np.arange(100, dtype=np.int32))
    limits = [n * whole_bytes(runtime, 0, 100) for n in (2, 5, 30)]
    for seed, n_seqs in zip(range(4), (1, 3, 1, 3), strict=True):
        rng = np.random.default_rng(seed)
        heard: list[list[Event]] = [[], []]
        sides = []
        for kind, events in zip((PromptCache, PlainPromptCache), heard, strict=True):
            cache = kind(
                limits[seed % 3],
                policy=policy,
                mode=mode,
                refresh_on_hit=mode == "keep" and seed == 2,
                emit=events.append,
                clock=SlowClock(),
            )
            runtime = FakeRuntime(family, n_ctx=480, n_seqs=n_seqs, n_batch=32)
            slots = Slots(runtime, cache, emit=events.append, ctx_checkpoints=3, clock=SlowClock())
            sides.append((slots, cache))
        for prompt in requests_of(rng, 70):
            namespace = bytes(rng.integers(4, size=1) // 3)
            starts = [at for at in (8, 24) if at < len(prompt)]
            one, other = (
                slots.serve(prompt, user_starts=starts, namespace=namespace) for slots, _ in sides
            )
            assert one == other
            assert heard[0] == heard[1]
            assert shown(sides[0][1]) == shown(sides[1][1])
        for slots, cache in sides:
            slots.check()
            assert cache.counters == sides[0][1].counters
        happened.update(sides[0][1].counters)
    assert min(happened[what] for what in ("saved", "hits", "misses", "evicted", "obsolete")) > 0
    assert happened["cached"] > 0
