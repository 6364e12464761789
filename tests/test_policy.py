"""What every policy promises, what each ranks first, and which stand up to public faults."""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llamakeep.errors import InvalidValue
from llamakeep.policy import (
    HALF_LIFE_SECONDS,
    Kept,
    LeastRecentlyUsed,
    Marginal,
    NeighborDistance,
    NeighborGap,
    Oldest,
    Policy,
    TokensPerByte,
    Upstream,
    get_policy,
    looks_around,
    parse_policy,
    policy_names,
    rerank_seconds,
)

HOUR = 3600.0
HALF_LIFE = 6 * HOUR


@dataclass
class Thing:
    """Everything that any policy may ask of a kept thing."""

    created: float = 0.0
    last_used: float = 0.0
    sequence: int = 0
    hits: int = 0
    n_bytes: int = 1
    n_tokens: int = 1
    marginal_tokens: int = 1
    gap_before: int = 1
    gap_after: int = 1


def first(policy: Policy, things: Sequence[Thing], now: float) -> Thing:
    return min(things, key=lambda thing: policy.rank(thing, now))


# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("tree", "gdsf hazard lru marginal oldest random slru tokens-per-byte"),
        ("disk", "lru marginal oldest tokens-per-byte"),
        ("prompts", "lru marginal oldest tokens-per-byte upstream"),
        (
            "checkpoints",
            "lru marginal neighbor-distance neighbor-gap oldest tokens-per-byte upstream",
        ),
    ],
)
def test_each_kind_has_its_own_names(kind: Any, names: str) -> None:
    assert policy_names(kind) == names.split()
    for name in policy_names(kind):
        assert get_policy(name, kind).name == name


def test_what_is_asked_for_without_a_kind_is_for_the_tree() -> None:
    assert policy_names() == policy_names("tree")
    assert isinstance(get_policy("marginal"), Marginal)


@pytest.mark.parametrize("policy", ["upstream", "neighbor-gap", Upstream(), NeighborGap()])
def test_what_the_table_leaves_out_is_refused(policy: Any) -> None:
    name = policy if isinstance(policy, str) else policy.name
    said = f"policy '{name}' is not for tree; known: gdsf, hazard, lru, marginal, oldest, random"
    with pytest.raises(InvalidValue, match=said):
        get_policy(policy)
    assert get_policy(policy, "checkpoints").name == name


def test_neighbours_are_no_matter_of_prompts() -> None:
    with pytest.raises(InvalidValue, match="'neighbor-distance' is not for prompts; known: lru, m"):
        get_policy(NeighborDistance(), "prompts")  # type: ignore[arg-type]


def test_unknown_names_are_answered_with_the_known_ones() -> None:
    with pytest.raises(InvalidValue, match=r"unknown policy 'newest'; known: lru, .*, upstream$"):
        get_policy("newest", "prompts")
    with pytest.raises(InvalidValue, match=r"policy must be gdsf, .*oldest.* rank method, not 7"):
        get_policy(7)  # type: ignore[arg-type]
    with pytest.raises(
        InvalidValue, match="kind must be prompts, checkpoints, tree, disk, not 'slots'"
    ):
        get_policy("lru", "slots")  # type: ignore[arg-type]


def test_a_policy_can_be_anyones() -> None:
    class Biggest:
        name = "biggest"

        def rank(self, kept: Kept, now: float) -> tuple[float, int]:
            return -kept.sequence, 0

    policy = Biggest()
    for kind in ("tree", "prompts", "checkpoints"):
        assert get_policy(policy, kind) is policy  # type: ignore[arg-type]
    assert looks_around(policy)  # for all that is known
    assert math.isinf(rerank_seconds(policy))


@pytest.mark.parametrize("half_life", [0, -1.0, math.inf, math.nan, "6h", None])
@pytest.mark.parametrize("policy", [TokensPerByte, Marginal])
def test_a_half_life_is_a_positive_number(policy: Any, half_life: Any) -> None:
    with pytest.raises(InvalidValue, match="half_life must be a positive number of seconds"):
        policy(half_life)


def test_a_half_life_is_six_hours_unless_told_otherwise() -> None:
    assert TokensPerByte().half_life == Marginal().half_life == HALF_LIFE
    assert repr(Marginal(half_life=60)) == "Marginal(half_life=60)"
    assert rerank_seconds(Marginal(half_life=64)) == 1.0


# -- the contract ----------------------------------------------------------------------------------

every_policy = pytest.mark.parametrize("name", policy_names("checkpoints"))
sizes = st.one_of(st.integers(0, 5), st.integers(0, 10**6), st.integers(2**62, 2**64))
times = st.one_of(st.floats(-1e6, 1e6), st.floats(0, 4e9), st.floats(-1e12, 1e12))
any_thing = st.builds(
    Thing,
    created=times,
    last_used=times,
    hits=sizes,
    n_bytes=sizes,
    n_tokens=sizes,
    marginal_tokens=sizes,
    gap_before=sizes,
    gap_after=sizes,
)


def numbered(things: list[Thing]) -> list[Thing]:
    for number, thing in enumerate(things):
        thing.sequence = number
    return things


some_things = st.lists(any_thing, min_size=1, max_size=4).map(numbered)


@every_policy
@given(things=some_things, now=times)
@example(things=[Thing(n_bytes=0, n_tokens=0, marginal_tokens=0)], now=-1.0)
@example(things=[Thing(last_used=1e12, hits=2**64)], now=-1e12)
def test_a_rank_is_a_pure_function_into_a_total_order(
    name: str, things: list[Thing], now: float
) -> None:
    policy, other = get_policy(name, "checkpoints"), get_policy(name, "checkpoints")
    before = copy.deepcopy((things, vars(policy)))
    ranks = [policy.rank(thing, now) for thing in things]
    assert not any(math.isnan(value) for value, _ in ranks)
    assert len(set(ranks)) == len(ranks)
    shuffled = list(zip(things, ranks, strict=True))
    random.Random(len(things)).shuffle(shuffled)
    for thing, rank in shuffled:  # whoever is asked, and whatever was asked before
        assert other.rank(thing, now) == policy.rank(thing, now) == rank
    assert (things, vars(policy)) == before


@every_policy
@given(things=some_things, now=times)
def test_ties_go_in_order_of_insertion(name: str, things: list[Thing], now: float) -> None:
    policy = get_policy(name, "checkpoints")
    twins = [copy.copy(things[0]) for _ in range(3)]
    for twin, sequence in zip(twins, (7, 2**70, 3), strict=True):
        twin.sequence = sequence
    assert [t.sequence for t in sorted(twins, key=lambda t: policy.rank(t, now))] == [3, 7, 2**70]


@every_policy
@given(things=some_things, now=times, later=times)
def test_a_rank_never_rises_with_time_and_falls_only_where_the_policy_says_so(
    name: str, things: list[Thing], now: float, later: float
) -> None:
    policy = get_policy(name, "checkpoints")
    now, later = sorted((now, later))
    for thing in things:
        before, after = policy.rank(thing, now), policy.rank(thing, later)
        assert after <= before
        if math.isinf(rerank_seconds(policy)):
            assert after == before


@every_policy
@given(things=some_things, now=times)
def test_a_use_never_lets_a_rank_fall(name: str, things: list[Thing], now: float) -> None:
    policy = get_policy(name, "checkpoints")
    for thing in things:
        now = max(now, thing.last_used)  # the clock of a use is not behind that of the last one
        before = policy.rank(thing, now)
        thing.last_used, thing.hits = now, thing.hits + 1
        assert policy.rank(thing, now) >= before


@pytest.mark.parametrize("policy", [Oldest(), LeastRecentlyUsed(), TokensPerByte(), Upstream()])
def test_who_says_that_it_does_not_look_around_does_not(policy: Any) -> None:
    class Alone:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"{name} was asked for")

        created = last_used = 1.0
        sequence, hits, n_bytes, n_tokens = 1, 2, 3, 4

    assert not looks_around(policy)
    policy.rank(Alone(), 5.0)


# -- one by one ------------------------------------------------------------------------------------

OLD_BUT_USED = Thing(created=1, last_used=9, sequence=1)
UNUSED = Thing(created=2, last_used=2, sequence=2)


@pytest.mark.parametrize(
    ("policy", "goes"),
    [
        (Oldest(), OLD_BUT_USED),
        (Upstream(), OLD_BUT_USED),
        (LeastRecentlyUsed(), UNUSED),
        (TokensPerByte(), OLD_BUT_USED),  # both save the same, nobody was hit: the oldest
        (Marginal(), UNUSED),
    ],
)
def test_what_counts_is_insertion_or_use(policy: Policy, goes: Thing) -> None:
    assert first(policy, [UNUSED, OLD_BUT_USED], 10.0) is goes


@given(
    hits=st.integers(0, 1000),
    age=st.floats(0, 60 * HALF_LIFE),
    n_tokens=st.integers(1, 10**6),
    n_bytes=st.integers(1, 10**10),
)
def test_the_formulas(hits: int, age: float, n_tokens: int, n_bytes: int) -> None:
    now = 2e6
    thing = Thing(
        last_used=now - age, hits=hits, n_tokens=n_tokens, marginal_tokens=n_tokens, n_bytes=n_bytes
    )
    fresh = 2 ** (-(now - thing.last_used) / HALF_LIFE)
    e = hits * fresh if hits * fresh >= 0.01 else 0.0
    rank, _ = TokensPerByte().rank(thing, now)
    assert rank == pytest.approx((e + 1) * n_tokens / n_bytes)
    rank, _ = Marginal().rank(thing, now)
    assert 2 ** (rank - now / HALF_LIFE) == pytest.approx((e + fresh) * n_tokens / n_bytes, 1e-6)


def test_a_use_is_forgotten_below_a_hundredth() -> None:
    policy = TokensPerByte()
    thing = Thing(hits=1)
    assert policy.uses(thing, 0) == 1.0
    assert policy.uses(thing, HALF_LIFE) == 0.5
    assert policy.uses(thing, 6 * HALF_LIFE) == 1 / 64
    assert policy.uses(thing, 7 * HALF_LIFE) == 0.0  # 1 / 128
    thing.hits = 2
    assert policy.uses(thing, 7 * HALF_LIFE) == 1 / 64


def test_undecayed_hits_pin_nothing() -> None:
    """What `ds4`'s users found: a file with many hits of last year stays for ever."""
    stale = Thing(hits=1_000_000, sequence=1)
    then = Thing(created=0, last_used=0, sequence=2, n_tokens=2, marginal_tokens=2)
    fresh = Thing(created=1e7, last_used=1e7, sequence=2, n_tokens=2, marginal_tokens=2)
    for policy in (TokensPerByte(), Marginal()):
        assert first(policy, [stale, then], 60.0) is then
        assert first(policy, [stale, fresh], 1e7) is stale


def test_what_was_never_used_ages_too_where_it_counts_as_likely_to_be_used() -> None:
    """The +1 of tokens-per-byte never ages; marginal's does."""
    long_idle = Thing(n_tokens=3, marginal_tokens=3, sequence=1)
    young = Thing(created=1e6, last_used=1e6, n_tokens=2, marginal_tokens=2, sequence=2)
    assert first(TokensPerByte(), [long_idle, young], 1e6) is young
    assert first(Marginal(), [long_idle, young], 1e6) is long_idle


def test_a_clock_that_went_back_makes_no_use_worth_more_than_one() -> None:
    thing = Thing(last_used=1e9, hits=3)
    assert TokensPerByte().uses(thing, 0.0) == 3.0
    used_last = Thing(last_used=1e9 + HALF_LIFE, hits=3, sequence=1)
    assert first(Marginal(), [used_last, thing], 0.0) is thing  # still in order of use


def test_the_order_of_what_lay_idle_for_thousands_of_half_lives_is_not_lost() -> None:
    things = [Thing(last_used=n, sequence=-n) for n in range(5)]
    now = 5000 * HALF_LIFE
    ordered = sorted(things, key=lambda thing: Marginal().rank(thing, now))
    assert [thing.last_used for thing in ordered] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("policy", [TokensPerByte(), Marginal()])
def test_what_occupies_nothing_goes_last(policy: Policy) -> None:
    nothing = Thing(n_bytes=0, n_tokens=0, marginal_tokens=0)
    most = Thing(hits=2**40, n_tokens=2**40, marginal_tokens=2**40, sequence=1)
    assert first(policy, [nothing, most], 0.0) is most


def test_what_costs_nothing_to_lose_goes_first() -> None:
    free = Thing(marginal_tokens=0, hits=50, sequence=5)
    assert first(Marginal(), [Thing(n_bytes=2**60), free], 0.0) is free


def test_the_same_ratio_is_a_tie() -> None:
    things = [Thing(sequence=9 - n, n_tokens=n, marginal_tokens=n, n_bytes=3 * n) for n in (1, 7)]
    for policy in (TokensPerByte(), Marginal()):
        assert first(policy, things, 5.0) is things[1]


def test_tokens_per_byte_ranks_checkpoints_of_one_size_by_position() -> None:
    at_30, at_80 = Thing(n_tokens=30, marginal_tokens=30), Thing(n_tokens=80, marginal_tokens=1)
    at_80.sequence = 1
    assert first(TokensPerByte(), [at_30, at_80], 0.0) is at_30
    assert first(Marginal(), [at_30, at_80], 0.0) is at_80


def test_neighbours() -> None:
    near = Thing(gap_before=2, gap_after=50, sequence=1)
    tight = Thing(gap_before=6, gap_after=7, sequence=2)
    wide = Thing(gap_before=20, gap_after=20, sequence=0)
    distance: Any = NeighborDistance()
    gap: Any = NeighborGap()
    assert first(distance, [near, tight, wide], 0.0) is near
    assert first(gap, [near, tight, wide], 0.0) is tight
    assert gap.rank(near, 0.0) == (100.0, 1)
    assert distance.rank(wide, 0.0) == (20.0, 0)


# -- faults that prompt caches had in public -------------------------------------------------------


class Cache:
    """Whole entries up to a number of bytes, what the policy ranks first in front."""

    def __init__(self, policy: Policy, capacity_bytes: int) -> None:
        self.policy = policy
        self.capacity_bytes = capacity_bytes
        self.kept: dict[str, Thing] = {}
        self.now = itertools.count()

    def put(self, name: str, n_bytes: int) -> None:
        now = float(next(self.now))
        while sum(thing.n_bytes for thing in self.kept.values()) + n_bytes > self.capacity_bytes:
            victim = first(self.policy, list(self.kept.values()), now)
            del self.kept[next(name for name, thing in self.kept.items() if thing is victim)]
        self.kept[name] = Thing(
            now, now, len(self.kept), 0, n_bytes, n_tokens=n_bytes, marginal_tokens=n_bytes
        )

    def use(self, name: str) -> None:
        self.kept[name].last_used = next(self.now)
        self.kept[name].hits += 1


@pytest.mark.parametrize(
    ("name", "survives"),
    [("lru", True), ("tokens-per-byte", True), ("marginal", True), ("oldest", False)],
)
def test_fault_19_what_is_used_survives_what_is_not(name: str, survives: bool) -> None:
    cache = Cache(get_policy(name, "prompts"), 100)
    cache.put("A", 60)
    cache.put("B", 20)
    cache.put("C", 20)
    for _ in range(5):
        cache.use("A")
    cache.put("D", 20)
    assert ("A" in cache.kept) is survives
    assert "D" in cache.kept


def test_fault_19_upstream_has_it() -> None:
    cache = Cache(get_policy("upstream", "prompts"), 100)
    cache.put("A", 60)
    for _ in range(5):
        cache.use("A")
    for name in "BCD":
        cache.put(name, 20)
    assert set(cache.kept) == {"B", "C", "D"}


def checkpoints(name: str, limit: int, positions: Sequence[int], length: int) -> list[int]:
    """Return which checkpoints are left of a list of at most `limit`.

    Those that a list protects are protected: the first and the last.
    """
    policy = get_policy(name, "checkpoints")
    kept: list[Thing] = []
    for number, position in enumerate(positions):
        if len(kept) == limit:
            ends = (0, *(thing.n_tokens for thing in kept), length)
            for index, thing in enumerate(kept, 1):
                thing.gap_before = thing.marginal_tokens = ends[index] - ends[index - 1]
                thing.gap_after = ends[index + 1] - ends[index]
            free = kept[1:-1] if name.startswith("neighbor") else kept
            kept.remove(first(policy, free, float(number)))
        kept.append(Thing(number, number, number, 0, 1000, position))
    return [thing.n_tokens for thing in kept]


COVERING = pytest.mark.parametrize("name", ["marginal", "neighbor-distance", "neighbor-gap"])


@COVERING
def test_fault_21_an_early_checkpoint_survives_many_turns_close_together(name: str) -> None:
    left = checkpoints(name, 8, [30, *range(80, 100, 2)], 100)
    assert 30 in left
    assert left[-1] == 98


@pytest.mark.parametrize("name", ["oldest", "lru", "upstream", "tokens-per-byte"])
def test_fault_21_order_and_position_alone_have_it(name: str) -> None:
    assert 30 not in checkpoints(name, 8, [30, *range(80, 100, 2)], 100)


@COVERING
def test_fault_23_what_is_left_covers_the_prompt(name: str) -> None:
    left = checkpoints(name, 4, range(10, 90, 10), 85)
    assert len(left) == 4
    assert max(at for at in left if at <= 25) >= 10  # a rewind to 25 finds one
    gaps = [after - before for before, after in itertools.pairwise((0, *left))]
    assert left[-1] == 80
    assert max(gaps) <= 50


@pytest.mark.parametrize("name", ["marginal", "neighbor-gap"])
def test_fault_24_the_end_of_a_long_prompt_survives_a_long_answer(name: str) -> None:
    left = checkpoints(name, 8, [300, 1000, *range(1010, 1200, 10)], 1200)
    assert {300, 1000} <= set(left)


def test_fault_24_the_nearer_neighbour_alone_has_it() -> None:
    """So a list does not offer it the newest checkpoint at a prompt's end."""
    left = checkpoints("neighbor-distance", 8, [300, 1000, *range(1010, 1200, 10)], 1200)
    assert 300 in left
    assert 1000 not in left


# -- written down ----------------------------------------------------------------------------------


def test_policies_with_options_are_read() -> None:
    policy = parse_policy("marginal:half_life=90")
    assert isinstance(policy, Marginal)
    assert policy.half_life == 90
    assert parse_policy("tokens-per-byte").half_life == HALF_LIFE_SECONDS  # type: ignore[attr-defined]
    assert parse_policy("neighbor-gap", "checkpoints").name == "neighbor-gap"
    assert parse_policy("lru:").name == "lru"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "unknown policy ''"),
        ("best:half_life=1", "unknown policy 'best'"),
        ("upstream", "'upstream' is not for tree"),
        ("lru:half_life=1", "policy 'lru' has no option 'half_life'; known: it has none"),
        ("marginal:life=1", "has no option 'life'; known: half_life"),
        ("marginal:half_life", "'half_life' has no value"),
        ("marginal:half_life=", "'half_life' is no number: ''"),
        ("marginal:half_life=1h", "'half_life' is no number: '1h'"),
        ("marginal:half_life=0", "half_life must be a positive number"),
        ("marginal:half_life=nan", "half_life must be a positive number"),
    ],
)
def test_what_is_no_policy_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        parse_policy(text)
