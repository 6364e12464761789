"""Caches without bytes: what a shadow keeps is what a plain model keeps."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamakeep.policy.shadow import Shadow, Shadowed


@dataclass(eq=False)
class Thing:
    draw: int
    n_bytes: int = 1
    last: float = 0.0
    worth: float = 0.0


@dataclass
class Model:
    """What a shadow does, by a search of everything."""

    selective: bool
    capacity_bytes: int = 0
    things: dict[int, Thing] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)

    def rank(self, thing: Shadowed) -> tuple[float, int]:
        assert isinstance(thing, Thing)
        return (thing.worth if self.selective else thing.last), -thing.draw

    @property
    def used_bytes(self) -> int:
        return sum(self.sizes.values())

    def drop(self, draw: int) -> None:
        del self.things[draw], self.sizes[draw]

    def access(self, thing: Thing) -> bool:
        if thing.draw in self.things:
            self.things[thing.draw], self.sizes[thing.draw] = thing, thing.n_bytes
            return True
        if thing.n_bytes > self.capacity_bytes:
            return False
        while self.used_bytes + thing.n_bytes > self.capacity_bytes:
            last = min(self.things.values(), key=self.rank)
            if self.selective and self.rank(last) >= self.rank(thing):
                return False
            self.drop(last.draw)
        self.things[thing.draw], self.sizes[thing.draw] = thing, thing.n_bytes
        return False


steps = st.lists(
    st.tuples(
        st.sampled_from(["access"] * 6 + ["grow", "fall", "rise", "resize", "thin", "all"]),
        st.integers(0, 15),
        st.integers(0, 9),
    ),
    max_size=60,
)


@pytest.mark.parametrize("selective", [False, True])
@given(steps=steps)
@settings(max_examples=150, deadline=None)
def test_a_shadow_keeps_what_a_plain_model_keeps(
    selective: bool, steps: list[tuple[str, int, int]]
) -> None:
    model = Model(selective)
    shadow = Shadow(model.rank, selective=selective)
    shadow.capacity_bytes = model.capacity_bytes = 12
    things = [Thing(draw, 1 + draw % 3, worth=draw * 7 % 5) for draw in range(16)]
    mask = 0
    for now, (step, index, amount) in enumerate(steps, 1):
        thing = things[index]
        if step == "access":
            if thing.draw & mask:
                continue
            thing.last = float(now)
            assert shadow.access(thing) == model.access(thing)
        elif step == "grow":
            thing.n_bytes = amount
        elif step == "fall":
            thing.worth -= amount
            shadow.look_again(thing)
        elif step == "rise":
            thing.worth += amount
        elif step == "all":
            for each in things:
                each.worth = each.draw * amount % 5
            shadow.look_at_all_again()
        elif step == "resize":
            shadow.capacity_bytes = model.capacity_bytes = 2 * amount
        elif index == 0:
            mask = 2 * mask + 1
            shadow.thin_out(mask)
            for each in [it for it in model.things if it & mask]:
                model.drop(each)
        assert shadow._items.keys() == model.things.keys()
        assert shadow.used_bytes == model.used_bytes
        assert len(shadow) == len(model.things)


def test_what_falls_when_it_is_used_goes_when_it_should() -> None:
    """A use may change the class of a thing, and what that is worth."""
    worths = {1: 5.0, 2: 3.0}
    shadow = Shadow(lambda thing: (worths[thing.draw], thing.draw), selective=True)
    shadow.capacity_bytes = 2
    assert not shadow.access(Thing(1))
    assert not shadow.access(Thing(2))
    worths |= {1: 1.0, 3: 2.0}
    assert shadow.access(Thing(1))
    assert not shadow.access(Thing(3))
    assert shadow._items.keys() == {2, 3}


@pytest.mark.parametrize("selective", [False, True])
def test_what_grows_and_goes_leaves_no_bytes_behind(selective: bool) -> None:
    shadow = Shadow(lambda thing: (float(thing.draw), 0), selective=selective)
    shadow.capacity_bytes = 100
    thing = Thing(1, 10)
    shadow.access(thing)
    thing.n_bytes = 60  # the same object: a tail that became longer
    assert shadow.used_bytes == 10  # until it is used again
    shadow.access(Thing(2, 90))
    assert shadow.used_bytes == 100
    shadow.capacity_bytes = 5
    shadow.access(Thing(3, 5))
    assert (len(shadow), shadow.used_bytes) == (1, 5)


@pytest.mark.parametrize("selective", [False, True])
def test_for_what_is_larger_than_all_nothing_goes(selective: bool) -> None:
    shadow = Shadow(lambda thing: (float(thing.draw), 0), selective=selective)
    shadow.capacity_bytes = 10
    for draw in range(10):
        shadow.access(Thing(draw))
    assert not shadow.access(Thing(99, 11))
    assert (len(shadow), shadow.used_bytes) == (10, 10)
    assert not shadow.access(Thing(99, 10))
    assert shadow._items.keys() == {99}


def test_nothing_fits_into_nothing() -> None:
    shadow = Shadow(lambda thing: (0.0, 0), selective=False)
    for draw in range(10):
        assert not shadow.access(Thing(draw))
    assert (len(shadow), shadow.used_bytes) == (0, 0)


def test_room_shrinks_with_what_comes_next() -> None:
    shadow = Shadow(lambda thing: (float(thing.draw), 0), selective=False)
    shadow.capacity_bytes = 50
    for draw in range(50):
        shadow.access(Thing(draw))
    shadow.capacity_bytes = 5
    shadow.access(Thing(50))
    assert sorted(shadow._items) == [46, 47, 48, 49, 50]


def test_a_sample_is_thinned_out_by_its_lowest_bits() -> None:
    shadow = Shadow(lambda thing: (float(thing.draw), 0), selective=False)
    shadow.capacity_bytes = 1000
    for draw in range(64):
        shadow.access(Thing(draw, 2))
    shadow.thin_out(0)
    assert len(shadow) == 64
    shadow.thin_out(7)
    assert sorted(shadow._items) == list(range(0, 64, 8))
    assert shadow.used_bytes == 16


def test_places_do_not_pile_up_however_often_things_are_used() -> None:
    things = [Thing(draw) for draw in range(20)]
    shadow = Shadow(lambda thing: (0.0, thing.draw), selective=True)
    shadow.capacity_bytes = 20
    rng = random.Random(1)
    for _ in range(5000):
        shadow.access(rng.choice(things))
    assert len(shadow) == 20
    assert len(shadow._queue._heap) <= 128
