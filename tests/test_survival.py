"""How long things wait: what is counted, what it is worth, and whether waits follow each other."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamakeep.policy.survival import (
    EDGES,
    FIRST_S,
    N_BUCKETS,
    Learned,
    Wait,
    bucket_of,
    gap_power,
    hit_density,
    learn,
    scale_of,
)

# -- buckets ---------------------------------------------------------------------------------------


def test_buckets_are_half_octaves_from_an_eighth_of_a_second() -> None:
    assert len(EDGES) == N_BUCKETS == 47
    assert (EDGES[0], EDGES[1], EDGES[3], EDGES[5]) == (0.0, FIRST_S, 0.25, 0.5)
    assert EDGES[-1] == pytest.approx(8.6 * 86400, rel=0.01)
    assert all(a < b for a, b in pairwise(EDGES))


@pytest.mark.parametrize("at", range(N_BUCKETS))
def test_a_bucket_begins_at_its_edge(at: int) -> None:
    assert bucket_of(EDGES[at]) == at
    assert bucket_of(math.nextafter(EDGES[at], -1.0)) == max(0, at - 1)


def test_what_is_shorter_or_longer_than_all_is_in_the_first_and_the_last() -> None:
    assert bucket_of(-5.0) == bucket_of(0.0) == bucket_of(0.1) == 0
    assert bucket_of(1e12) == bucket_of(math.inf) == N_BUCKETS - 1


def test_scales() -> None:
    assert scale_of(16.0, 1.0) == scale_of(16.0, 0.0) == scale_of(1e9, 0.0) == 1.0
    assert scale_of(-1.0, 1.0) == 1.0  # not known
    assert scale_of(0.0, 1.0) == scale_of(0.25, 1.0) == 0.25 / 16  # none is shorter
    assert scale_of(32.0, 1.0) == 2.0
    assert Learned(0.5, []).scale(64.0) == 2.0


# -- what waiting is worth -------------------------------------------------------------------------


def brute_force(chances: Sequence[float], widths: Sequence[float]) -> list[float]:
    """For each bucket the best of all ends: uses over time of what is alive there."""
    found = []
    for at in range(len(chances)):
        best, uses, time, alive = 0.0, 0.0, 0.0, 1.0
        for chance, width in zip(chances[at:], widths[at:], strict=True):
            uses += alive * chance
            time += alive * (chance * width / 2 + (1 - chance) * width)
            alive *= 1 - chance
            best = max(best, uses / time)
        found.append(best)
    return found


chances = st.lists(st.floats(0, 0.9), min_size=1, max_size=8)  # 1e-8 are left in the end


@given(chances=chances, seed=st.integers(0, 999))
def test_hit_density_is_the_best_of_all_ends(chances: list[float], seed: int) -> None:
    rng = random.Random(seed)
    widths = [rng.choice([0.1, 0.5, 1.0, 3.0, 20.0]) for _ in chances]
    assert hit_density(chances, widths) == pytest.approx(brute_force(chances, widths), rel=1e-6)


@given(chances=st.lists(st.floats(0, 0.2), min_size=N_BUCKETS, max_size=N_BUCKETS))
def test_hit_density_over_all_the_buckets_there_are(chances: list[float]) -> None:
    widths = [b - a for a, b in pairwise(EDGES)] + [EDGES[-1]]
    assert hit_density(chances, widths) == pytest.approx(brute_force(chances, widths), rel=1e-6)


def test_where_the_chance_falls_it_is_the_chance_now() -> None:
    assert hit_density([0.5, 0.25, 0.0], [1.0, 1.0, 1.0]) == [0.5 / 0.75, 0.25 / 0.875, 0.0]


def test_a_peak_counts_as_soon_as_it_is_worth_waiting_for() -> None:
    first, second, third = hit_density([0.0, 0.0, 1.0], [1.0, 8.0, 1.0])
    assert (first, second, third) == pytest.approx((1 / 9.5, 1 / 8.5, 2.0))


def test_what_is_certain_leaves_finite_numbers() -> None:
    widths = [b - a for a, b in pairwise(EDGES)] + [EDGES[-1]]
    for chances in ([1.0] * N_BUCKETS, [0.0] * N_BUCKETS, [0.0, 1.0] * 23 + [0.5]):
        worths = hit_density(chances, widths)
        assert all(0 <= worth < math.inf for worth in worths)


# -- how much waits follow the gaps before them ----------------------------------------------------


def waits_of(
    n: int, follow: float, rng: random.Random, klass: int = 0, octaves: float = 8.0
) -> list[Wait]:
    """Waits whose logarithm follows that of the gap so far, with noise of an octave."""
    found = []
    for _ in range(n):
        gap = 2 ** rng.uniform(0, octaves)
        seconds = gap**follow * 2 ** rng.uniform(-1, 1)
        found.append(Wait(klass, gap, seconds, 1.0, used=True))
    return found


def test_waits_that_equal_their_gaps_follow_them() -> None:
    gaps = [2.0 ** (n % 10) for n in range(500)]
    power = gap_power([Wait(0, gap, gap, 1.0, used=True) for gap in gaps])
    assert 0.99 < power <= 1.0


@pytest.mark.parametrize(("follow", "power"), [(1.0, 1.0), (0.5, 0.5), (0.0, 0.0), (-1.0, 0.0)])
def test_the_power_is_the_slope_of_the_logarithms(follow: float, power: float) -> None:
    found = gap_power(waits_of(4000, follow, random.Random(1)))
    assert found == pytest.approx(power, abs=0.03)
    assert 0.0 <= found <= 1.0


def test_that_classes_differ_says_nothing_about_one_of_them() -> None:
    rng = random.Random(2)
    waits = [
        Wait(klass, *(4.0**klass * 2 ** rng.uniform(0, 2) for _ in "ab"), 1.0, used=True)
        for klass in range(5)
        for _ in range(500)
    ]
    assert gap_power(waits) < 0.05
    assert gap_power([wait._replace(klass=0) for wait in waits]) > 0.8  # as if they were one


def test_little_evidence_and_none_say_nothing() -> None:
    assert gap_power([]) == 0.0
    two = [Wait(0, 1.0, 1.0, 1.0, True), Wait(0, 2.0, 2.0, 1.0, True)]
    assert gap_power(two) == pytest.approx((math.log(2) ** 2 / 2) / (math.log(2) ** 2 / 2 + 5))
    unknown = [wait._replace(gap_s=-1.0) for wait in two * 100]
    unused = [wait._replace(used=False) for wait in two * 100]
    assert gap_power(unknown) == gap_power(unused) == 0.0


def test_weights_count() -> None:
    rng = random.Random(3)
    waits = waits_of(200, 1.0, rng) + waits_of(200, 0.0, rng)
    light = [w._replace(weight=0.01 if at >= 200 else 1.0) for at, w in enumerate(waits)]
    assert gap_power(light) > 0.9 > gap_power(waits)


class Lessons:
    """Waits that are over, and what they teach with those that go on."""

    def __init__(self, groups: Sequence[int]) -> None:
        self._groups = groups
        self._over: list[Wait] = []

    def add(self, wait: Wait) -> None:
        self._over.append(wait)

    def learn(self, waiting: Sequence[Wait]) -> Learned:
        return learn(self._groups, [*self._over, *waiting])


# -- what is learned -------------------------------------------------------------------------------


def test_by_hand_what_two_classes_of_two_groups_teach() -> None:
    """Two waits of a class were used within 0.125 s, one was given up after 1 s, one goes on."""
    survival = Lessons([0, 1])
    for wait in (
        Wait(0, -1.0, 0.05, 1.0, used=True),
        Wait(0, -1.0, 0.1, 1.0, used=True),
        Wait(0, -1.0, 1.0, 1.0, used=False),
    ):
        survival.add(wait)
    learned = survival.learn([Wait(0, -1.0, 0.3, 0.5, used=False)])
    assert learned.power == 0.0
    # Of 3.5 that began in the first bucket 2 were used in it. The other class knows nothing.
    at_all = 2 / (3.5 + 1)
    group = (2 + 5 * at_all) / (3.5 + 5)
    first = (2 + 5 * group) / (3.5 + 5)
    other = (0 + 5 * ((0 + 5 * at_all) / 5)) / 5
    assert other == pytest.approx(at_all)
    assert learned.worths[0][0] == pytest.approx(first / (FIRST_S * (1 - first / 2)))
    assert learned.worths[1][0] == pytest.approx(at_all / (FIRST_S * (1 - at_all / 2)))
    # Nothing was used later on, whatever was left by then.
    assert set(learned.worths[0][1:]) == set(learned.worths[1][1:]) == {0.0}


def test_what_was_censored_counts_until_then() -> None:
    """Waits that were given up early do not let later ones look worse."""
    survival = Lessons([0])
    for _ in range(10):
        survival.add(Wait(0, -1.0, 0.01, 1.0, used=False))
        survival.add(Wait(0, -1.0, 5.0, 1.0, used=True))
    learned = survival.learn([])
    late = bucket_of(5.0)
    all_ten = 10 / (10 + 1)
    chance = (10 + 5 * ((10 + 5 * all_ten) / 15)) / 15
    width = EDGES[late + 1] - EDGES[late]
    assert learned.worths[0][late] == pytest.approx(chance / (width * (1 - chance / 2)))
    assert learned.worths[0][late + 1] == 0.0
    assert 0.0 < learned.worths[0][0] < learned.worths[0][1] < learned.worths[0][late]


def test_classes_are_drawn_to_their_group() -> None:
    """Of no evidence of its own a class is worth what the others of its group are."""
    survival = Lessons([0, 0, 1, 1])
    for _ in range(300):
        survival.add(Wait(0, -1.0, 0.1, 1.0, used=True))
        survival.add(Wait(2, -1.0, 0.1, 1.0, used=False))
    worths = [each[0] for each in survival.learn([]).worths]
    assert worths[0] > worths[1] > worths[3] > worths[2]
    assert worths[1] > 5 * worths[3]


def test_time_is_measured_against_the_gap_where_waits_follow_it() -> None:
    survival = Lessons([0])
    for n in range(500):
        gap = 2.0 ** (n % 10)
        survival.add(Wait(0, gap, gap, 1.0, used=True))
    learned = survival.learn([])
    assert learned.power > 0.99
    usual = bucket_of(16.0 * 1.02)
    best = max(range(N_BUCKETS), key=lambda at: learned.worths[0][at])
    assert abs(best - usual) <= 1


def test_what_waits_half_of_the_time_for_ever_is_seen_as_that() -> None:
    """A known distribution: half of all come back after an exponential time, the others never."""
    rng = random.Random(5)
    waits = []
    for _ in range(4000):
        came = rng.expovariate(1 / 10.0) if rng.random() < 0.5 else math.inf
        watched = rng.uniform(0.0, 200.0)  # until now, or until it was given up
        waits.append(Wait(0, -1.0, min(came, watched), 1.0, used=came <= watched))
    worths = learn([0], waits).worths[0]
    # At the beginning: half of 1 / 10 a second, and less and less as only the others are left.
    assert worths[bucket_of(0.0)] == pytest.approx(0.05, rel=0.15)
    for seconds in (4.0, 12.0, 30.0):
        left = 0.5 * math.exp(-seconds / 10)
        assert worths[bucket_of(seconds)] == pytest.approx(left / (left + 0.5) / 10, rel=0.4)


def test_what_is_given_up_hides_nothing_of_what_is_used() -> None:
    """Half are used after a second, the rest is given up some time later."""
    waits = [Wait(0, -1.0, 1.0, 1.0, used=True) for _ in range(1000)]
    waits += [Wait(0, -1.0, 30.0, 1.0, used=False) for _ in range(1000)]
    at = bucket_of(1.0)
    width = EDGES[at + 1] - EDGES[at]
    assert learn([0], waits).worths[0][at] == pytest.approx(0.5 / (width * 0.75), rel=0.01)


def test_nothing_teaches_nothing() -> None:
    learned = Lessons([0, 1, 1]).learn([])
    assert learned.power == 0.0
    assert [set(each) for each in learned.worths] == [{0.0}] * 3
