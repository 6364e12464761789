"""When a server that does not answer is asked again."""

from __future__ import annotations

import pytest

from llamakeep.errors import InvalidValue
from llamakeep.stores.redis.breaker import CircuitBreaker


class Clock:
    """Seconds, set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> CircuitBreaker:
    return CircuitBreaker(clock, cooldown_s=1.0, longest_s=60.0)


def fail(breaker: CircuitBreaker) -> None:
    ticket = breaker.enter() or breaker.probe()
    assert ticket is not None
    assert breaker.failed(ticket)


def test_all_pass_while_the_server_answers(breaker: CircuitBreaker) -> None:
    for _ in range(3):
        ticket = breaker.enter()
        assert ticket is not None
        assert not ticket.probe
        breaker.succeeded(ticket)
    assert (breaker.state, breaker.cooldown_s) == ("closed", 0.0)


def test_one_failure_stops_all(breaker: CircuitBreaker, clock: Clock) -> None:
    fail(breaker)
    assert breaker.state == "open"
    assert (breaker.enter(), breaker.probe(), breaker.wait_s()) == (None, None, 1.0)
    clock.now += 0.75
    assert (breaker.enter(), breaker.probe(), breaker.wait_s()) == (None, None, 0.25)


def test_after_the_cooldown_one_probe_passes_and_nothing_else(
    breaker: CircuitBreaker, clock: Clock
) -> None:
    assert breaker.probe() is None  # nobody has to find anything out
    fail(breaker)
    clock.now += 1000.0
    assert breaker.enter() is None  # a request is no probe, however long it was
    assert breaker.wait_s() == 0.0
    ticket = breaker.probe()
    assert ticket is not None
    assert ticket.probe
    assert breaker.state == "half-open"
    clock.now += 1000
    assert (breaker.enter(), breaker.probe()) == (None, None)
    breaker.succeeded(ticket)
    assert breaker.state == "closed"
    assert breaker.enter() is not None


def test_cooldowns_double_up_to_the_longest(breaker: CircuitBreaker, clock: Clock) -> None:
    waits = []
    for _ in range(9):
        fail(breaker)
        waits.append(breaker.cooldown_s)
        clock.now += breaker.cooldown_s
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_a_server_that_comes_and_goes_is_not_trusted_each_time(
    breaker: CircuitBreaker, clock: Clock
) -> None:
    for cooldown_s in (1, 2, 4):
        fail(breaker)
        assert breaker.cooldown_s == cooldown_s
        clock.now += cooldown_s
        ticket = breaker.probe()
        assert ticket is not None
        breaker.succeeded(ticket)
        clock.now += 59.0
    clock.now += 1.0  # a minute without a failure
    fail(breaker)
    assert breaker.cooldown_s == 1


def test_calls_that_fail_together_count_once(breaker: CircuitBreaker, clock: Clock) -> None:
    tickets = [breaker.enter() for _ in range(10)]
    assert all(tickets)
    assert [breaker.failed(ticket) for ticket in tickets if ticket] == [True] + [False] * 9
    assert breaker.cooldown_s == 1


def test_what_began_before_the_failure_does_not_end_the_cooldown(
    breaker: CircuitBreaker, clock: Clock
) -> None:
    late = breaker.enter()
    assert late is not None
    fail(breaker)
    breaker.succeeded(late)
    assert breaker.state == "open"
    clock.now += 1.0
    probe = breaker.probe()
    assert probe is not None
    breaker.succeeded(late)
    assert not breaker.failed(late)
    assert breaker.state == "half-open"


@pytest.mark.parametrize("cooldown_s", [0.0, -1.0, 61.0, float("nan")])
def test_a_cooldown_that_cannot_be_meant_is_an_error(clock: Clock, cooldown_s: float) -> None:
    with pytest.raises(InvalidValue, match="cooldown_s"):
        CircuitBreaker(clock, cooldown_s=cooldown_s, longest_s=60.0)
