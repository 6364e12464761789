"""What any eviction policy could gain on a trace: `python -m benchmarks.evidence TRACE...`.

Replays oracles (`oracles.py`, `hindsight.py`) beside the product's own policies, on the product's
own tree, and prints tables: percent of all prompt tokens saved, and in brackets the percent of
LRU's gap to the bound that is closed. Capacities where that gap is small are left out.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.features import FEATURES, SETS, FeatureSet, Past, classes_of, past_of, shuffled
from benchmarks.hindsight import oracle, tables
from benchmarks.oracles import Dead, Future, Ints, Soon, Worth
from llamakeep.policy import Policy, parse_policy
from llamakeep.simulate.bound import Belady
from llamakeep.simulate.experiment import capacity_of
from llamakeep.simulate.replay import Driver, Model, Outcome, TraceClock, TreeDriver, drive
from llamakeep.simulate.tiers import open_store
from llamakeep.simulate.trace import Request, Trace, open_trace

CAPACITIES: Final = "2%,5%,10%,20%"
STARVED_SHARE: Final = 0.05
"""A capacity is starved where the bound saves so much more of all tokens than LRU does."""
EXPERTS: Final = ("lru", "oldest", "slru", "gdsf", "random", "hazard:guard=0")
"""What a policy could choose from that follows the best of several."""
N_WINDOWS: Final = 16
_AGE: Final = FeatureSet(("age alone",))
_SINGLE: Final = tuple(FeatureSet((name,)) for name in FEATURES)
PARTS: Final = ("policies", "oracles", "features", "cases", "chance")
_DEALT: Final = (FeatureSet(("last gap",)), SETS[1], SETS[2], SETS[4])

TITLES: Final = {
    "policies": "Policies, and the best of them in hindsight",
    "oracles": "Oracles of the future",
    "features": "Tables made with hindsight, measured on what they were made of",
    "halves": "Second half alone: tables made of the first half",
    "cases": "The same, but what is used together counts as one",
    "chance": "Tables made with hindsight of classes that say nothing",
}


@dataclass(frozen=True, slots=True)
class Row:
    """What one policy saved at one capacity of one trace.

    Attributes:
        trace: The name of the trace.
        capacity: As it was asked for.
        section: Which table it belongs to.
        policy: What decided.
        saved_share: Tokens saved, of all.
        closed_share: Share of LRU's gap to the bound that is closed; None where what was measured
            is not starved.
    """

    trace: str
    capacity: str
    section: str
    policy: str
    saved_share: float
    closed_share: float | None


class _Recorder:
    """Serves as another driver does, and notes what each request reused."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.reused_tokens: list[int] = []

    @property
    def evicted_bytes(self) -> int:
        return self._driver.evicted_bytes

    @property
    def restored_bytes(self) -> Mapping[str, int]:
        return self._driver.restored_bytes

    def serve(self, request: Request) -> int:
        self.reused_tokens.append(self._driver.serve(request))
        return self.reused_tokens[-1]

    def check(self) -> None:
        self._driver.check()


def served(trace: Trace, policy: str | Policy, capacity_bytes: int) -> Ints:
    """Replay a trace with the prefix tree and return how many tokens each request reused.

    The same replay as `llamakeep.simulate.replay`, told request by request.
    """
    clock = TraceClock()
    store = open_store(capacity_bytes, (), policy="lru", clock=clock)
    try:
        driver = _Recorder(
            TreeDriver(
                Model().runtime(trace.longest_tokens),
                store,
                segment_tokens=trace.block_tokens,
                policy=policy,
                clock=clock,
            )
        )
        drive(trace, driver, clock, Outcome("tree", "", capacity_bytes, 0, 0, 0, 0))
        return np.array(driver.reused_tokens)
    finally:
        store.close()


def possible(trace: Trace, capacity_bytes: int) -> Ints:
    """Return how many tokens each request reuses where the most are saved that can be."""
    belady = Belady(capacity_bytes)
    return np.array([belady.serve(request) for request in trace])


class Study:
    """All that is measured at one capacity of one trace.

    Args:
        trace: The trace.
        capacity: As `capacity_of` reads it.
        n_deals: How often classes that say nothing are dealt.
    """

    def __init__(self, trace: Trace, capacity: str, n_deals: int) -> None:
        self._trace = trace
        self._capacity = capacity
        self._n_deals = n_deals
        self._capacity_bytes = capacity_of(capacity, trace.footprint_tokens)
        self._input_tokens = np.array([request.tokens.size for request in trace])
        self._half = trace.n_requests // 2
        self._lru = self._serve("lru")
        self._bound = possible(trace, self._capacity_bytes)

    @property
    def is_starved(self) -> bool:
        """Whether there is much to gain."""
        return self._share(self._bound) - self._share(self._lru) > STARVED_SHARE

    def rows(self, parts: Iterable[str] = PARTS) -> Iterator[Row]:
        """Measure these parts. All of them cost some 80 replays."""
        future = Future(self._trace)
        past = past_of(future)
        measured: dict[str, Callable[[], Iterator[Row]]] = {
            "policies": self._policies,
            "oracles": lambda: self._oracles(future),
            "features": lambda: self._features(future, past),
            "cases": lambda: self._cases(future, past),
            "chance": lambda: self._chance(future, past),
        }
        for part in parts:
            yield from measured[part]()

    def _policies(self) -> Iterator[Row]:
        found = {name: self._serve(parse_policy(name, "tree")) for name in (*EXPERTS, "hazard")}
        found["bound"] = self._bound
        for name, reused in found.items():
            yield self._row("policies", name, reused)
        experts = [found[name] for name in EXPERTS]
        best = max(experts, key=lambda reused: int(reused.sum()))
        yield self._row("policies", "best of lru to hazard:guard=0", best)
        windows = zip(*(np.array_split(reused, N_WINDOWS) for reused in experts), strict=True)
        switching = [max(window, key=lambda reused: int(reused.sum())) for window in windows]
        name = f"best of them in each {N_WINDOWS}th of the trace"
        yield self._row("policies", name, np.concatenate(switching))
        for name in ("lru", "hazard:guard=0", "hazard", "bound"):
            yield self._row("halves", name, found[name], self._half)

    def _oracles(self, future: Future) -> Iterator[Row]:
        for kind in (Dead, Soon):
            for selective in (False, True):
                name = kind.name + (", refusing" if selective else "")
                reused = self._serve(kind(future, selective=selective))
                yield self._row("oracles", name, reused)
        yield self._row("oracles", "bound", self._bound)

    def _features(self, future: Future, past: Past) -> Iterator[Row]:
        """Measure tables that were made of everything, and of the first half."""
        for features in (*_SINGLE, *SETS):
            classes = classes_of(past, features)
            everything = self._serve(oracle(future, classes))
            yield self._row("features", features.name, everything)
            first = self._serve(oracle(future, classes, 0, self._half))
            yield self._row("halves", features.name, first, self._half)
            if features in SETS:
                yield self._row("halves", f"{features.name}, of all", everything, self._half)
        for features in SETS[1:3]:
            classes = classes_of(past, features)
            reused = self._serve(oracle(future, classes, selective=False))
            yield self._row("features", f"{features.name}, not refusing", reused)

    def _cases(self, future: Future, past: Past) -> Iterator[Row]:
        """Measure tables in which blocks that are used together are no independent evidence."""
        for features in SETS:
            classes = classes_of(past, features)
            for end, what in ((self._half, ""), (0, ", of all")):
                reused = self._serve(oracle(future, classes, 0, end, by_case=True))
                yield self._row("cases", features.name + what, reused, self._half)

    def _chance(self, future: Future, past: Past) -> Iterator[Row]:
        """Measure classes that are dealt anew: with their own tables, and with another deal's."""
        age = self._serve(oracle(future, classes_of(past, _AGE)))
        yield self._row("chance", _AGE.name, age)
        for features in _DEALT:
            classes = classes_of(past, features)
            own: list[Ints] = []
            other: list[Ints] = []
            for seed in range(self._n_deals):
                rng = np.random.default_rng(seed)
                dealt, again = shuffled(future, classes, rng), shuffled(future, classes, rng)
                worths = tables(future, dealt)
                for saved, each in ((own, dealt), (other, again)):
                    saved.append(self._serve(Worth(future, each.klasses, each.scales, worths)))
            yield self._row("chance", f"{features.name}, dealt anew", np.mean(own, axis=0))
            yield self._row("chance", f"{features.name}, dealt twice", np.mean(other, axis=0))

    def _serve(self, policy: str | Policy) -> Ints:
        return served(self._trace, policy, self._capacity_bytes)

    def _share(self, reused: Any, start: int = 0) -> float:
        return float(reused[start:].sum() / self._input_tokens[start:].sum())

    def _row(self, section: str, policy: str, reused: Any, start: int = 0) -> Row:
        saved, lru, best = (self._share(each, start) for each in (reused, self._lru, self._bound))
        closed = (saved - lru) / (best - lru) if best - lru > STARVED_SHARE else None
        return Row(self._trace.name, self._capacity, section, policy, saved, closed)


@dataclass(frozen=True, slots=True)
class Case:
    """What one process measures: the arguments of a `Study`, and its parts."""

    path: Path
    capacity: str
    n_deals: int
    parts: tuple[str, ...]


def measure(case: Case) -> list[Row]:
    """Return what was measured; nothing, where the capacity is not starved."""
    logger = logging.getLogger("llamakeep")
    before = logger.level
    logger.setLevel(logging.ERROR)  # small caches refuse much, and say so
    try:
        return _measure(case)
    finally:
        logger.setLevel(before)


def _measure(case: Case) -> list[Row]:
    with open_trace(case.path) as trace:
        study = Study(trace, case.capacity, case.n_deals)
        return list(study.rows(case.parts)) if study.is_starved else []


def write_tables(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of a Markdown table for each section."""
    columns = list(dict.fromkeys((row.trace, row.capacity) for row in rows))
    heads = [f"{trace.split('.')[0]} {capacity}" for trace, capacity in columns]
    for section, title in TITLES.items():
        found = {
            (row.policy, row.trace, row.capacity): row for row in rows if row.section == section
        }
        if not found:
            continue
        yield from (f"### {title}", "", f"| | {' | '.join(heads)} | mean |")
        yield "|---" + "|---:" * (len(columns) + 1) + "|"
        for policy in dict.fromkeys(key[0] for key in found):
            each = [found[policy, trace, capacity] for trace, capacity in columns]
            closed = [row.closed_share for row in each if row.closed_share is not None]
            cells = " | ".join(
                f"{100 * row.saved_share:.1f} ({_percent(row.closed_share)})" for row in each
            )
            yield f"| {policy} | {cells} | {_percent(float(np.mean(closed)) if closed else None)} |"
        yield ""


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{round(100 * share)}"  # which knows no -0


def cases_of(texts: Iterable[str], n_deals: int, parts: Sequence[str] = PARTS) -> list[Case]:
    """Return what `measure` takes for traces written as `PATH` or `PATH@CAPACITY,...`."""
    cases = []
    for text in texts:
        path, _, capacities = text.partition("@")
        for capacity in (capacities or CAPACITIES).split(","):
            cases.append(Case(Path(path), capacity, n_deals, tuple(parts)))
    return cases


def _as_json(row: Row) -> str:
    return json.dumps({name: getattr(row, name) for name in row.__dataclass_fields__})


def command_line() -> argparse.ArgumentParser:
    """Return what reads the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.evidence",
        description="Measure what oracles save at the starved capacities of traces.",
    )
    parser.add_argument(
        "trace", nargs="+", help=f"a trace's file, or FILE@CAPACITY,...; else {CAPACITIES}"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object a row instead")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: 1)")
    parser.add_argument("--deals", type=int, default=2, help="deals of empty classes (default: 2)")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this; may be repeated")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for and return the exit status."""
    parser = command_line()
    options = parser.parse_args(arguments)
    if options.jobs < 1 or options.deals < 1:
        parser.error("--jobs and --deals are at least 1")
    cases = cases_of(options.trace, options.deals, options.part or PARTS)
    with ProcessPoolExecutor(min(options.jobs, len(cases))) as pool:
        mapped: Callable[..., Iterable[list[Row]]] = pool.map if options.jobs > 1 else map
        rows = [row for found in mapped(measure, cases) for row in found]
    for line in map(_as_json, rows) if options.json else write_tables(rows):
        print(line)
    if not rows:
        print("none of these capacities is starved", file=sys.stderr)
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
