"""Fleets of `simulate`: what the command line says of them, and how it shows what they saved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from llamakeep.cli import screen
from llamakeep.errors import InvalidValue
from llamakeep.simulate.experiment import Report
from llamakeep.simulate.fleet import Fleet, FleetOutcome
from llamakeep.simulate.replay import Outcome
from llamakeep.simulate.routing import parse_route
from llamakeep.simulate.tiers import DEFAULT_BYTES_PER_S
from llamakeep.sizes import format_bytes

_NAMES: Final = ("policy", "memory", "replicas")
_WORDS: Final = ("policy", "replicas")
_SHARED: Final = ("read", "peak", "mean", "written", "peak", "mean", "evicted", "held")
_NOTES: Final = {
    "bound": "bound: Belady's optimum in one cache of all memory; nothing can save more.",
    "clairvoyant": "clairvoyant: a greedy choice in one cache of all memory; no bound.",
}


def read_fleets(replicas: Sequence[int], routes: Sequence[str]) -> tuple[Fleet, ...]:
    """Return the fleets that numbers of replicas and routes make, each once.

    One replica needs no route: it is there once, whatever routes there are.

    Raises:
        InvalidValue: For a route without replicas, and for what cannot be meant.
    """
    if routes and not replicas:
        raise InvalidValue("--route says which replica serves a request: it needs --replicas")
    known = [parse_route(text) for text in routes or ("random",)]
    fleets = [
        Fleet(n_replicas, route)
        for n_replicas in replicas
        for route in (known[:1] if n_replicas == 1 else known)
    ]
    return tuple(dict.fromkeys(fleets))


def show_fleets(report: Report) -> None:
    """Print what fleets saved, and what their shared tiers were asked for."""
    fleets = [each for each in report.outcomes if isinstance(each, FleetOutcome)]
    tiers = [tier for tier in DEFAULT_BYTES_PER_S if any(tier in f.restored_bytes for f in fleets)]
    titles = (*_NAMES, "saved", "hit", *(f"from {tier}" for tier in tiers), "evaluated", "uneven")
    rows = [_row(each, tiers) for each in fleets]
    rows += [_best_row(each, tiers) for each in report.best]
    screen.show_table(titles, rows, right=[t for t in titles if t not in _WORDS])
    if any(each.shared is not None for each in fleets):
        screen.say()
        titles = (*_NAMES, *_SHARED)
        shared = [_shared_row(each) for each in fleets]
        screen.show_table(titles, shared, right=[t for t in titles if t not in _WORDS])
    screen.say()
    screen.say("uneven: the most that one replica served, and evaluated, in means of all.")
    if any(each.shared is not None for each in fleets):
        screen.say("read, written, evicted: of the shared tier; peak and mean: of it, a second.")
    if report.best:
        screen.say(_NOTES[report.best[0].cache])


def _names(outcome: FleetOutcome) -> tuple[str, ...]:
    return outcome.policy, format_bytes(outcome.capacity_bytes), str(outcome.fleet)


def _row(outcome: FleetOutcome, tiers: Sequence[str]) -> tuple[str, ...]:
    return (
        *_names(outcome),
        f"{outcome.saved_share:.1%}",
        f"{outcome.requests_hit:,}",
        *(f"{outcome.reused_by_tier.get(tier, 0):,}" for tier in tiers),
        f"{outcome.evaluated_tokens:,}",
        f"{outcome.uneven_requests:.2f}, {outcome.uneven_evaluated:.2f}",
    )


def _best_row(outcome: Outcome, tiers: Sequence[str]) -> tuple[str, ...]:
    return (
        outcome.cache,
        format_bytes(outcome.capacity_bytes),
        "in one",
        f"{outcome.saved_share:.1%}",
        f"{outcome.requests_hit:,}",
        *("" for _ in tiers),
        f"{outcome.evaluated_tokens:,}",
        "",
    )


def _shared_row(outcome: FleetOutcome) -> tuple[str, ...]:
    use = outcome.shared
    if use is None:
        return (*_names(outcome), *("" for _ in _SHARED))
    sizes = (
        use.read_bytes,
        use.peak_read_bytes_per_s,
        use.mean_read_bytes_per_s,
        use.written_bytes,
        use.peak_written_bytes_per_s,
        use.mean_written_bytes_per_s,
        use.evicted_bytes,
        use.used_bytes,
    )
    return (*_names(outcome), *map(format_bytes, sizes))
