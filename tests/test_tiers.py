"""What every tier below memory must do besides keeping blobs: find them by tokens, for others too.

A tier joins the contract and the state machine with one line in `KINDS`. That it keeps blobs is in
`test_stores.py`; here all of them have places, of prompts that are cut into small blocks.
"""

from __future__ import annotations

import itertools
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from llamakeep.states import Block, Buffer
from llamakeep.stores.base import Tier
from llamakeep.stores.disk import DiskStore
from llamakeep.stores.fake import FakeTier
from llamakeep.stores.redis import RedisStore
from llamakeep.stores.sized import SizedTier
from llamakeep.tokens import PathNames, Place
from tests.disk_tools import Unflushed
from tests.finding import usable

BLOCK = 4
NAMESPACE = bytes(range(32))
OTHER = bytes(range(100, 132))
PAGE_BYTES = 4096

Fixture = Callable[[str], Any]
Open = Callable[..., Tier]


@dataclass(frozen=True)
class Kind:
    """How tiers of a kind are made over one place, and what they do differently.

    Attributes:
        place: `place(directory, fixture)` makes an empty place for them, which `open` opens.
        is_ours: It drops a namespace when it is told to; one that machines share does not.
        max_examples: How many orders of calls the state machine tries.
    """

    place: Callable[[Path, Fixture], Open]
    is_ours: bool = True
    max_examples: int = 15


def over_fake(directory: Path, fixture: Fixture) -> Open:
    device = FakeTier()
    return lambda: device.another()


def over_sized(directory: Path, fixture: Fixture) -> Open:
    device = SizedTier(1 << 40, clock=time.monotonic)
    return lambda: device.another()


def over_disk(directory: Path, fixture: Fixture) -> Open:
    def begin(capacity_bytes: int = 1 << 30) -> DiskStore:
        return DiskStore(directory, capacity_bytes, min_free_bytes=0, files=Unflushed())

    return begin


def over_redis(url: str) -> Callable[[Path, Fixture], Open]:
    def place(directory: Path, fixture: Fixture) -> Open:
        prefix = f"tier-{next(numbers)}"

        def begin(**options: Any) -> RedisStore:
            patient = {"timeout_s": 10, "connect_timeout_s": 10}  # of a machine that is busy
            return RedisStore(fixture(url), secret="hush", prefix=prefix, **patient, **options)

        return begin

    numbers = itertools.count()
    return place


KINDS = {
    "fake": Kind(over_fake, max_examples=40),
    "sized": Kind(over_sized, max_examples=40),
    "disk": Kind(over_disk),
    "redis": Kind(over_redis("redis_url"), is_ours=False),
    "redis-cluster": Kind(over_redis("redis_cluster_url"), is_ours=False, max_examples=5),
}
"""Every kind of tier, by name."""


def path_of(tokens: Sequence[int], namespace: bytes = NAMESPACE) -> PathNames:
    return PathNames(namespace, np.array(tokens, np.int32), BLOCK)


def blocks_of(tokens: Sequence[int], namespace: bytes = NAMESPACE) -> list[Block]:
    """The blocks that may hold something for a prompt."""
    array, path = np.array(tokens, np.int32), path_of(tokens, namespace)
    origins = range(0, array.size, BLOCK)
    return [Block(path.block(origin), origin, array[origin : origin + BLOCK]) for origin in origins]


def size_of(place: Place) -> int:
    """The size of the state of a place: not the same for all."""
    return 10 + place.end + 7 * (place.kind == "checkpoint")


def content(place: Place) -> Buffer:
    """The only right bytes of a state."""
    return np.frombuffer(blake3(place.name).digest(length=size_of(place)), np.uint8)


def put(tier: Tier, *places: Place) -> list[bytes]:
    for place in places:
        assert tier.put(place.name, size_of(place), lambda place=place: content(place), place)
    return [place.name for place in places]


def never() -> Buffer:
    raise AssertionError("a blob was produced that nobody needs")


def found(tier: Tier, tokens: Sequence[int], namespace: bytes = NAMESPACE) -> set[bytes]:
    return {record.name for record in tier.find(blocks_of(tokens, namespace))}


def brute_force(places: Iterable[Place], tokens: Sequence[int]) -> dict[bytes, Place]:
    """The states in a block of the prompt whose span starts with the prompt's token there."""
    blocks = {block.name for block in blocks_of(tokens)}
    return {
        place.name: place
        for place in places
        if place.block in blocks
        and place.start < len(tokens)
        and place.first == tokens[place.start]
    }


def agrees(tier: Tier, places: Iterable[Place], tokens: Sequence[int]) -> None:
    """Compare what a tier finds for a prompt with brute force, in every field.

    A remote one need not tell what is of no use beside the rest.
    """
    expected = brute_force(places, tokens)
    blocks = blocks_of(tokens)
    records = tier.find(blocks)
    names = {record.name for record in records}
    assert len(records) == len(names)
    assert names <= set(expected)
    assert tier.is_remote or names == set(expected)
    told = [expected[name] for name in names]
    assert usable(told, blocks) == usable(expected.values(), blocks)
    for record in records:
        place = expected[record.name]
        span = place.tokens[place.start - place.origin :]
        assert (record.kind, record.start, record.end) == (place.kind, place.start, place.end)
        assert (record.tokens.dtype, record.tokens.tolist()) == (np.int32, span.tolist())
        assert (record.n_bytes, record.tier) == (size_of(place), tier.tier)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    """Runs the test once for each kind of tier."""
    return KINDS[request.param]


@pytest.fixture
def start(kind: Kind, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """`start()` opens the one place of this test; once more is what another process does."""
    begin = kind.place(tmp_path / "tier", request.getfixturevalue)
    with ExitStack() as opened:

        def start(**options: Any) -> Tier:
            tier = begin(**options)
            opened.callback(tier.close)
            return tier

        yield start


@pytest.fixture
def tier(start: Open) -> Tier:
    """An empty one."""
    return start()


# -- finding ---------------------------------------------------------------------------------------


def test_what_was_put_with_a_place_is_found_as_it_is(tier: Tier) -> None:
    path = path_of(range(100, 110))
    places = [path.segment(0, 4), path.checkpoint(0, 4), path.segment(4, 6), path.segment(6, 8)]
    places += [path.checkpoint(6, 7), path.segment(8, 10)]
    put(tier, *places)
    assert tier.tier in ("disk", "shared")
    agrees(tier, places, range(100, 110))
    for n_tokens in range(11):  # also where the prompt ends in the middle of a block or a span
        agrees(tier, places, range(100, 100 + n_tokens))
    agrees(tier, places, [*range(100, 106), 7, 8, 9])
    agrees(tier, places, [5, *range(101, 110)])
    assert tier.find([]) == []
    assert found(tier, range(100, 110), OTHER) == set()
    tier.check()


def test_find_is_brute_force(tier: Tier) -> None:
    rng = np.random.default_rng(11)
    prompts: list[list[int]] = [rng.integers(0, 3, 20).tolist()]
    places: dict[bytes, Place] = {}
    for _ in range(12):
        # Branch off somewhere, into a vocabulary so small that spans begin alike.
        parent = prompts[int(rng.integers(len(prompts)))]
        cut = int(rng.integers(0, 16))
        prompt = parent[:cut] + rng.integers(0, 3, int(rng.integers(1, 12))).tolist()
        prompts.append(prompt)
        path, position = path_of(prompt), 0
        while position < len(prompt):
            limit = min(position - position % BLOCK + BLOCK, len(prompt))
            end = int(rng.integers(position + 1, limit + 1))
            spans = [path.segment(position, end)]
            if rng.integers(2):
                spans.append(path.checkpoint(position, end))
            for place in spans:
                if place.name not in places:
                    places[place.name] = place
                    put(tier, place)
            position = end
    for prompt in [*prompts, rng.integers(0, 3, 30).tolist()]:
        agrees(tier, places.values(), prompt)
    assert len(tier) == len(places)
    tier.check()


def test_a_blob_without_a_place_is_kept_and_not_found(tier: Tier) -> None:
    name = blake3(b"opaque").digest()
    assert tier.put(name, 5, lambda: np.arange(5, dtype=np.uint8))
    data = tier.get(name)
    assert data is not None
    assert data.tolist() == [0, 1, 2, 3, 4]
    assert found(tier, range(100)) == set()


def test_a_state_that_is_there_is_not_produced_again(tier: Tier, start: Open) -> None:
    place = path_of(range(4)).segment(0, 4)
    put(tier, place)
    for writer in (tier, start()):
        assert writer.put(place.name, size_of(place), never, place)
    agrees(tier, [place], range(4))


# -- reading ---------------------------------------------------------------------------------------


def test_get_many_is_in_order_with_none_for_what_is_gone(tier: Tier) -> None:
    path = path_of(range(40))
    places = [path.segment(at, at + BLOCK) for at in range(0, 40, BLOCK)]
    put(tier, *places[:3], *places[4:])
    tier.delete(places[6].name)
    order = [5, 3, 0, 6, 9, 0, 3]
    n_read = 0
    for index, data in zip(order, tier.get_many([places[i].name for i in order]), strict=True):
        n_read += 1
        if index in (3, 6):
            assert data is None
        else:
            assert data is not None
            assert np.array_equal(data, content(places[index]))
            assert not data.flags.writeable
    assert n_read == len(order)
    assert list(tier.get_many([])) == []


# -- dropping --------------------------------------------------------------------------------------


def test_what_is_deleted_is_not_found_and_what_hangs_off_it_is(tier: Tier) -> None:
    path = path_of(range(8))
    places = [path.segment(0, 4), path.checkpoint(0, 4), path.segment(4, 8)]
    names = put(tier, *places)
    assert tier.delete(names[0]) is True
    assert tier.delete(names[0]) is False
    agrees(tier, places[1:], range(8))
    put(tier, places[0])
    agrees(tier, places, range(8))
    tier.check()


def test_a_use_is_counted_and_what_is_gone_is_no_error(tier: Tier) -> None:
    path = path_of(range(8))
    names = put(tier, path.segment(0, 4), path.segment(4, 8))
    unknown = blake3(b"unknown").digest()
    assert tier.touch([]) == []
    for hit in (True, False):
        assert tier.touch(names, hit=hit) == []
        assert tier.touch([names[0], unknown, names[1]], hit=hit) == [unknown]
    assert found(tier, range(8)) == set(names)
    tier.check()


@pytest.mark.parametrize("what", ["disk", "redis"])
def test_what_is_touched_outlives_what_is_not(
    what: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    begin = KINDS[what].place(tmp_path / "tier", request.getfixturevalue)
    tier = begin(capacity_bytes=3 * PAGE_BYTES) if what == "disk" else begin(ttl_s=1.0)
    prompts = [[n] * BLOCK for n in range(4)]
    places = [path_of(prompt).segment(0, BLOCK) for prompt in prompts]
    try:
        put(tier, *places[:3])
        if what == "disk":
            tier.touch([places[0].name])
            put(tier, places[3])  # there is room for three
        else:
            for _ in range(4):
                time.sleep(0.4)
                tier.touch([places[0].name])
        assert found(tier, prompts[0]) == {places[0].name}
        assert tier.get(places[0].name) is not None
        assert found(tier, prompts[1]) == set()
        assert tier.get(places[1].name) is None
        tier.check()
    finally:
        tier.close()


def test_a_tail_is_superseded_only_when_both_are_there(tier: Tier) -> None:
    path = path_of(range(8))
    short, long = path.segment(0, 2), path.segment(0, 3)
    child, grandchild = path.segment(2, 4), path.segment(4, 8)
    tier.supersede(short.name, long.name)  # neither is
    put(tier, short, child, grandchild)
    tier.supersede(short.name, long.name)  # the new one is not
    tier.supersede(short.name, short.name)
    agrees(tier, [short, child, grandchild], range(8))
    put(tier, long)
    tier.supersede(short.name, long.name)
    assert short.name not in tier
    assert tier.get(short.name) is None
    agrees(tier, [long, child, grandchild], range(8))
    tier.supersede(short.name, long.name)  # the old one is gone
    agrees(tier, [long, child, grandchild], range(8))
    tier.check()


def test_clear_drops_everything(tier: Tier) -> None:
    path = path_of(range(8))
    put(tier, path.segment(0, 4), path.checkpoint(0, 4), path.segment(4, 8))
    tier.clear()
    assert (found(tier, range(8)), len(tier), list(tier), tier.used_bytes) == (set(), 0, [], 0)
    put(tier, path.segment(0, 4))
    agrees(tier, [path.segment(0, 4)], range(8))
    tier.check()


# -- namespaces ------------------------------------------------------------------------------------

DESCRIPTION = {
    "model": "é.gguf",
    "n_layer": 4,
    "rolling": True,
    "lora": [{"scale": 0.5}],
    "x": None,
}


def test_namespaces_come_back_as_they_were_introduced(tier: Tier, start: Open) -> None:
    assert tier.namespaces() == {}
    tier.introduce(NAMESPACE, DESCRIPTION)
    tier.introduce(OTHER, {})
    tier.introduce(OTHER, {"model": "b"})
    for reader in (tier, start()):
        assert reader.namespaces() == {NAMESPACE: DESCRIPTION, OTHER: {"model": "b"}}
    tier.namespaces()[OTHER]["model"] = "c"
    assert tier.namespaces()[OTHER] == {"model": "b"}  # what was returned is the caller's


JUNK = [b"", b"{", b"[1]", b"3", b"\xff\xfe", b"[" * 50_000, b'{"a":' * 20_000, b"x" * 100_000]


@pytest.mark.parametrize("what", ["disk", "redis"])
def test_descriptions_that_are_none_are_left_out(
    what: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    begin = KINDS[what].place(tmp_path / "tier", request.getfixturevalue)
    tier: Any = begin()
    try:
        tier.introduce(NAMESPACE, DESCRIPTION)
        for index, junk in enumerate(JUNK):
            digest = blake3(bytes([index])).digest()
            if what == "disk":
                tier.introduce(digest, {})
                with tier._index.writing() as sql:
                    sql.execute(
                        "UPDATE namespaces SET description = ? WHERE digest = ?", (junk, digest)
                    )
            else:
                tier._link.run([("HSET", tier._keys.namespaces, digest, junk)])
        assert tier.namespaces() == {NAMESPACE: DESCRIPTION}
    finally:
        tier.close()


def test_a_namespace_is_forgotten_in_a_tier_of_our_own(tier: Tier, kind: Kind) -> None:
    ours, theirs = path_of(range(8)), path_of(range(8), OTHER)
    places = [ours.segment(0, 4), ours.segment(4, 8), ours.checkpoint(4, 8)]
    put(tier, *places, theirs.segment(0, 4))
    tier.introduce(NAMESPACE, DESCRIPTION)
    tier.introduce(OTHER, {})
    tier.forget_namespaces([NAMESPACE, blake3(b"unknown").digest()])
    assert tier.namespaces().keys() == ({OTHER} if kind.is_ours else {NAMESPACE, OTHER})
    agrees(tier, [] if kind.is_ours else places, range(8))
    assert found(tier, range(8), OTHER) == {theirs.segment(0, 4).name}
    tier.check()


# -- more than one, and none -----------------------------------------------------------------------


def test_two_over_one_place_see_each_other(start: Open) -> None:
    one, two = start(), start()
    path = path_of(range(12))
    places = [path.segment(at, at + BLOCK) for at in range(0, 12, BLOCK)]
    put(one, places[0])
    put(two, places[1], places[2])
    for tier in (one, two):
        agrees(tier, places, range(12))
        assert set(tier) == {place.name for place in places}
        assert all(data is not None for data in tier.get_many([place.name for place in places]))
    assert one.delete(places[1].name)
    agrees(two, [places[0], places[2]], range(12))
    assert two.get(places[1].name) is None
    one.close()
    agrees(two, [places[0], places[2]], range(12))
    agrees(start(), [places[0], places[2]], range(12))
    two.check()


def test_after_close_everything_is_a_miss_and_closing_again_does_nothing(
    tier: Tier, start: Open
) -> None:
    path = path_of(range(8))
    places = [path.segment(0, 4), path.segment(4, 8)]
    names = put(tier, *places)
    tier.introduce(NAMESPACE, DESCRIPTION)
    tier.close()
    tier.close()
    assert found(tier, range(8)) == set()
    assert tier.get(names[0]) is None
    assert list(tier.get_many(names)) == [None, None]
    assert names[0] not in tier
    assert (len(tier), list(tier), tier.namespaces()) == (0, [], {})
    assert tier.put(names[0], size_of(places[0]), never, places[0]) is False
    assert tier.delete(names[0]) is False
    tier.touch(names)
    tier.supersede(*names)
    tier.introduce(OTHER, {})
    tier.forget_namespaces([NAMESPACE])
    assert tier.used_bytes >= 0
    tier.close()
    again = start()
    agrees(again, places, range(8))
    assert again.namespaces() == {NAMESPACE: DESCRIPTION}
    again.check()


def test_from_any_thread(tier: Tier, start: Open) -> None:
    path = path_of(range(24 * BLOCK))
    places = [path.segment(at, at + BLOCK) for at in range(0, 24 * BLOCK, BLOCK)]
    tiers = [tier, start()]
    failures: list[BaseException] = []

    def work(which: int) -> None:
        mine, tier = places[which::4], tiers[which % 2]
        try:
            for n_put, place in enumerate(mine, 1):
                put(tier, place)
                names = [one.name for one in mine[:n_put]]
                assert set(names) <= found(tier, range(24 * BLOCK))
                for one, data in zip(mine, tier.get_many(names), strict=False):
                    assert data is not None
                    assert np.array_equal(data, content(one))
                tier.touch(names)
            tier.delete(mine[0].name)
        except BaseException as error:  # noqa: BLE001 - shown below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(which,)) for which in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    for one in tiers:
        agrees(one, places[4:], range(24 * BLOCK))
    tier.check()


# -- against a dictionary of places ----------------------------------------------------------------

PROMPTS = [[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5, 9, 9, 1], [0, 1, 7], [0, 0, 0, 0, 0]]


def spans(prompt: list[int]) -> Iterator[Place]:
    path = path_of(prompt)
    for begin, end in itertools.combinations(range(len(prompt) + 1), 2):
        if end <= begin - begin % BLOCK + BLOCK:
            yield path.segment(begin, end)
            if begin % 2 == 0:
                yield path.checkpoint(begin, end)


PLACES = list({place.name: place for prompt in PROMPTS for place in spans(prompt)}.values())
places = st.sampled_from(PLACES)


class TierAgainstDict(RuleBasedStateMachine):
    """Any order of calls, by two over one place, does to a tier what it does to a dictionary."""

    kind: Kind
    fixture: Fixture

    @initialize()
    def empty(self) -> None:
        self.directory = tempfile.TemporaryDirectory(prefix="llamakeep-tier-")
        self.open = self.kind.place(Path(self.directory.name) / "tier", type(self).fixture)
        self.tiers = [self.open(), self.open()]
        self.model: dict[bytes, Place] = {}

    @rule(who=st.integers(0, 1), place=places)
    def put(self, who: int, place: Place) -> None:
        produce = never if place.name in self.model else lambda: content(place)
        assert self.tiers[who].put(place.name, size_of(place), produce, place)
        self.model.setdefault(place.name, place)

    @rule(who=st.integers(0, 1), place=places)
    def delete(self, who: int, place: Place) -> None:
        there = self.model.pop(place.name, None) is not None
        assert self.tiers[who].delete(place.name) == there

    @rule(who=st.integers(0, 1), data=st.data())
    def delete_one_that_is_there(self, who: int, data: st.DataObject) -> None:
        if self.model:
            self.delete(who, data.draw(st.sampled_from(list(self.model.values()))))

    @rule(who=st.integers(0, 1), old=places, new=places)
    def supersede(self, who: int, old: Place, new: Place) -> None:
        self.tiers[who].supersede(old.name, new.name)
        if old.name != new.name and {old.name, new.name} <= self.model.keys():
            del self.model[old.name]

    @rule(who=st.integers(0, 1), data=st.data())
    def supersede_what_is_there(self, who: int, data: st.DataObject) -> None:
        if self.model:
            there = st.sampled_from(list(self.model.values()))
            self.supersede(who, data.draw(there), data.draw(there))

    @rule(who=st.integers(0, 1), some=st.lists(places, max_size=4))
    def touch(self, who: int, some: list[Place]) -> None:
        absent = self.tiers[who].touch([place.name for place in some])
        assert set(absent) == {place.name for place in some} - self.model.keys()

    @rule(who=st.integers(0, 1), some=st.lists(places, max_size=6))
    def get_many(self, who: int, some: list[Place]) -> None:
        blobs = self.tiers[who].get_many([place.name for place in some])
        for place, data in zip(some, blobs, strict=True):
            assert (data is not None) == (place.name in self.model)
            assert data is None or np.array_equal(data, content(place))

    @rule(who=st.integers(0, 1))
    def forget_namespace(self, who: int) -> None:
        self.tiers[who].forget_namespaces([NAMESPACE])
        if self.kind.is_ours:
            self.model.clear()

    @rule(who=st.integers(0, 1))
    def clear(self, who: int) -> None:
        self.tiers[who].clear()
        self.model.clear()

    @rule(who=st.integers(0, 1))
    def begin_again(self, who: int) -> None:
        self.tiers[who].close()
        self.tiers[who] = self.open()

    @invariant()
    def is_the_model(self) -> None:
        for tier in self.tiers:
            for prompt in PROMPTS:
                agrees(tier, self.model.values(), prompt)
            assert set(tier) == set(self.model)
            costs = [tier.cost_bytes(size_of(place), place) for place in self.model.values()]
            assert tier.used_bytes == sum(costs)

    def teardown(self) -> None:
        if not hasattr(self, "tiers"):
            return  # it could not even be made
        try:
            for tier in self.tiers:
                tier.check()
        finally:
            for tier in self.tiers:
                tier.close()
            self.directory.cleanup()


def test_any_order_of_calls(kind: Kind, request: pytest.FixtureRequest) -> None:
    members = {"kind": kind, "fixture": staticmethod(request.getfixturevalue)}
    test_case = type("Machine", (TierAgainstDict,), members).TestCase
    test_case.settings = settings(
        max_examples=kind.max_examples, stateful_step_count=20, deadline=None, print_blob=True
    )
    test_case().runTest()
