from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamakeep.budget import ByteBudget
from llamakeep.errors import IntegrityError, InvalidValue, OverBudget


def test_reserving_and_releasing() -> None:
    budget = ByteBudget(100)
    budget.reserve(60)
    budget.reserve(40)
    assert (budget.used_bytes, budget.free_bytes, budget.capacity_bytes) == (100, 0, 100)
    budget.release(70)
    assert (budget.used_bytes, budget.free_bytes, budget.peak_bytes) == (30, 70, 100)
    assert repr(budget) == "ByteBudget(30 of 100 bytes)"


def test_what_does_not_fit_takes_nothing() -> None:
    budget = ByteBudget(100)
    budget.reserve(90)
    with pytest.raises(OverBudget, match="11 bytes do not fit: 90 of 100"):
        budget.reserve(11)
    assert (budget.used_bytes, budget.peak_bytes) == (90, 90)
    budget.reserve(10)


def test_nothing_fits_into_nothing() -> None:
    budget = ByteBudget(0)
    budget.reserve(0)
    with pytest.raises(OverBudget):
        budget.reserve(1)


def test_numbers_that_cannot_be_meant() -> None:
    with pytest.raises(InvalidValue, match="-1"):
        ByteBudget(-1)
    budget = ByteBudget(10)
    with pytest.raises(InvalidValue, match="-5"):
        budget.reserve(-5)
    budget.reserve(4)
    for n_bytes in (-1, 5):
        with pytest.raises(IntegrityError, match=f"release {n_bytes} bytes: 4 are in use"):
            budget.release(n_bytes)
    assert budget.used_bytes == 4


@given(st.integers(0, 50), st.lists(st.integers(-60, 60)))
def test_used_bytes_never_pass_the_capacity(capacity_bytes: int, steps: list[int]) -> None:
    budget, held = ByteBudget(capacity_bytes), [0]
    for step in steps:
        try:
            if step >= 0:
                budget.reserve(step)
            else:
                budget.release(-step)
            held.append(held[-1] + step)
        except (OverBudget, IntegrityError):
            assert not 0 <= held[-1] + step <= capacity_bytes
        assert budget.used_bytes == held[-1]
        assert budget.peak_bytes == max(held) <= capacity_bytes


def test_threads_do_not_overbook() -> None:
    budget = ByteBudget(1_000)
    taken: list[int] = []

    def take() -> None:
        for _ in range(1_000):
            try:
                budget.reserve(3)
            except OverBudget:
                continue
            taken.append(3)

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert budget.used_bytes == sum(taken) == 999
