"""Registering and timing benchmarks.

A benchmark measures both sides of its ratio in the same run, so that a slow machine slows both.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypedDict

__all__ = ["BENCHMARKS", "Result", "benchmark", "falls_short", "median_time"]


class Result(TypedDict):
    """One number and what it is held to."""

    name: str
    value: float
    unit: str
    target: float
    better: Literal["higher", "lower"]
    detail: dict[str, Any]


Benchmark = Callable[[], Iterable[Result]]

BENCHMARKS: dict[str, Benchmark] = {}
"""Every registered benchmark by name, in the order of registration."""


def benchmark(name: str) -> Callable[[Benchmark], Benchmark]:
    """Register a function without arguments, which yields or returns results, under `name`.

    Raises:
        ValueError: When the name is taken.
    """

    def register(function: Benchmark) -> Benchmark:
        if name in BENCHMARKS:
            raise ValueError(f"there already is a benchmark {name!r}")
        BENCHMARKS[name] = function
        return function

    return register


def falls_short(result: Result) -> bool:
    """Return whether a result misses its target; one that is not a number does."""
    if result["better"] == "higher":
        return not result["value"] >= result["target"]
    return not result["value"] <= result["target"]


def median_time(function: Callable[[], object], repeats: int) -> float:
    """Return the median of the seconds that `repeats` calls take, after one that is not timed.

    The garbage collector is off meanwhile: its passes belong to whoever filled the heap.
    """
    function()
    seconds = []
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for _ in range(repeats):
            start = time.perf_counter()
            function()
            seconds.append(time.perf_counter() - start)
    finally:
        if was_enabled:
            gc.enable()
    return statistics.median(seconds)
