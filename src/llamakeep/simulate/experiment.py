"""One trace, several policies and capacities, and the bound: what `llamakeep simulate` reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any, Final

from llamakeep.errors import InvalidValue
from llamakeep.policy import PolicyKind, parse_policy
from llamakeep.simulate.bound import bound
from llamakeep.simulate.fleet import Fleet, FleetOutcome, replay_fleet, total_bytes
from llamakeep.simulate.greedy import clairvoyant
from llamakeep.simulate.replay import DEFAULT_POLICY, CacheName, Model, Outcome, replay
from llamakeep.simulate.tiers import DEFAULT_BYTES_PER_S, TierSize, saved_ms
from llamakeep.simulate.trace import Trace
from llamakeep.sizes import parse_bytes

PREFILL_TOKENS_PER_S: Final = 500.0
"""What a small model reaches on a few cores."""

Progress = Callable[[str, int, int], None]
"""Called with what is going on, how much of it is done, and all of it."""


@dataclass(frozen=True, slots=True)
class Experiment:
    """What is to be replayed.

    Attributes:
        cache: `tree` or `prompt`.
        policies: What goes first, as `parse_policy` reads it; empty for the cache's default.
        capacities: What can be kept, as `capacity_of` reads it.
        model: What states occupy.
        below: Tiers below memory.
        bytes_per_s: How fast states come back, by tier.
        prefill_tokens_per_s: How fast prompts are evaluated.
        warmup: Requests that are not counted, a number or a share: `1000`, `10%`.
        with_bound: Compute what was possible, too.
        fleets: Replicas that share the requests, for the tree; empty for one cache by itself.
    """

    cache: CacheName = "tree"
    policies: Sequence[str] = ()
    capacities: Sequence[str] = ("10%",)
    model: Model = field(default_factory=Model)
    below: Sequence[TierSize] = ()
    bytes_per_s: Mapping[str, float] = field(default_factory=lambda: dict(DEFAULT_BYTES_PER_S))
    prefill_tokens_per_s: float = PREFILL_TOKENS_PER_S
    warmup: str = "0"
    with_bound: bool = True
    fleets: Sequence[Fleet] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """What an experiment found.

    Attributes:
        trace: The name of the trace.
        n_requests: Requests in it.
        n_blocks: Their blocks.
        block_tokens: Tokens of a full block.
        input_tokens: Tokens of all prompts.
        footprint_bytes: What would keep everything.
        outcomes: Of each policy at each capacity, the policies in their order; of each fleet, if
            there are fleets.
        best: What was possible at each capacity; empty if that was not asked for. For fleets: in
            one cache of all their memory, for each number of replicas.
        best_is_bound: Nothing can be better than `best`. Not where that is a greedy choice; nor
            for llama-server's cache, whose slot is memory on top of its capacity.
        saved_ms: The milliseconds that each of the outcomes saved, then each of the best.
    """

    trace: str
    n_requests: int
    n_blocks: int
    block_tokens: int
    input_tokens: int
    footprint_bytes: int
    outcomes: tuple[Outcome, ...]
    best: tuple[Outcome, ...]
    best_is_bound: bool
    saved_ms: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the report, ready for JSON."""
        rows = [
            _row(outcome, self.footprint_bytes, ms)
            for outcome, ms in zip((*self.outcomes, *self.best), self.saved_ms, strict=True)
        ]
        return {
            "trace": self.trace,
            "requests": self.n_requests,
            "blocks": self.n_blocks,
            "block_tokens": self.block_tokens,
            "input_tokens": self.input_tokens,
            "footprint_bytes": self.footprint_bytes,
            "results": rows[: len(self.outcomes)],
            "best": rows[len(self.outcomes) :],
            "best_is_bound": self.best_is_bound,
        }


def _row(outcome: Outcome, footprint_bytes: int, ms: float) -> dict[str, Any]:
    fleet = outcome.to_json() if isinstance(outcome, FleetOutcome) else {}
    return {
        "cache": outcome.cache,
        "policy": outcome.policy,
        "capacity_bytes": outcome.capacity_bytes,
        "capacity_share": outcome.capacity_bytes / footprint_bytes if footprint_bytes else None,
        "saved_share": outcome.saved_share,
        "requests": outcome.n_requests,
        "requests_hit": outcome.requests_hit,
        "input_tokens": outcome.input_tokens,
        "reused_tokens": outcome.reused_tokens,
        "evaluated_tokens": outcome.evaluated_tokens,
        "evicted_bytes": outcome.evicted_bytes,
        "restored_bytes": dict(outcome.restored_bytes),
        "saved_ms": ms,
        **fleet,
    }


def capacity_of(text: str, footprint_bytes: int) -> int:
    """Return the bytes that a capacity means: a size, or a share of a footprint.

    Example:
        >>> capacity_of("5%", 2000), capacity_of("1KiB", 2000)
        (100, 1024)

    Raises:
        InvalidValue: For a text that is neither, and a share below 0.
    """
    share = _share(text)
    return parse_bytes(text) if share is None else int(share * footprint_bytes)


def warmup_of(text: str, n_requests: int) -> int:
    """Return the requests that a warm-up means: a number, or a share of all.

    Raises:
        InvalidValue: For a text that is neither, and for a warm-up that leaves none.
    """
    share = _share(text)
    if share is None and not text.strip().isdecimal():
        raise InvalidValue(f"a warm-up is a number of requests or a share like 10%, not {text!r}")
    warmup = int(text) if share is None else int(share * n_requests)
    if warmup >= n_requests:
        raise InvalidValue(f"a warm-up of {warmup:,} leaves nothing of {n_requests:,} requests")
    return warmup


def _share(text: str) -> float | None:
    number = text.strip().removesuffix("%")
    if number == text.strip():
        return None
    try:
        share = float(number) / 100
    except ValueError:
        share = -1.0
    if not 0 <= share < 1e6:
        raise InvalidValue(f"a share is written like 5%, not {text!r}")
    return share


def run(trace: Trace, experiment: Experiment, on_progress: Progress | None = None) -> Report:
    """Replay a trace as an experiment says. Everything is checked before the first replay.

    Costs a replay for each policy, capacity and fleet, and a pass for each capacity's bound.

    Raises:
        InvalidValue: For an experiment that cannot be meant.
        IntegrityError: When a cache's numbers do not add up at the end.
    """
    if experiment.fleets:
        return _run_fleets(trace, experiment, on_progress)
    kind: PolicyKind = "prompts" if experiment.cache == "prompt" else "tree"
    names = experiment.policies or (DEFAULT_POLICY[experiment.cache],)
    for name in names:
        parse_policy(name, kind)
    model = experiment.model
    footprint_bytes = trace.footprint_tokens * model.bytes_per_token
    capacities = [capacity_of(text, footprint_bytes) for text in experiment.capacities]
    warmup = warmup_of(experiment.warmup, trace.n_requests)
    saved_ms(0, {}, prefill_tokens_per_s=experiment.prefill_tokens_per_s)
    outcomes = [
        replace(
            replay(
                trace,
                experiment.cache,
                capacity_bytes=capacity_bytes,
                policy=parse_policy(name, kind),
                model=model,
                below=experiment.below,
                warmup=warmup,
                on_progress=_telling(on_progress, f"{name} at {text}"),
            ),
            policy=name,  # with its options
        )
        for name in names
        for text, capacity_bytes in zip(experiment.capacities, capacities, strict=True)
    ]
    below_bytes = sum(tier.capacity_bytes for tier in experiment.below)
    rolling = bool(model.checkpoint_bytes)
    best = [
        (clairvoyant if rolling else bound)(
            trace,
            capacity_bytes=capacity_bytes + below_bytes,
            model=model,
            warmup=warmup,
            on_progress=_telling(on_progress, f"what is possible at {text}"),
        )
        for text, capacity_bytes in zip(experiment.capacities, capacities, strict=True)
        if experiment.with_bound
    ]
    return Report(
        trace.name,
        trace.n_requests,
        trace.n_blocks,
        trace.block_tokens,
        trace.n_tokens,
        footprint_bytes,
        tuple(outcomes),
        tuple(best),
        not rolling and experiment.cache == "tree",
        tuple(_saved_ms(experiment, each) for each in (*outcomes, *best)),
    )


def _run_fleets(trace: Trace, experiment: Experiment, on_progress: Progress | None) -> Report:
    """Replay a trace with replicas. See `run`."""
    if experiment.cache != "tree":
        raise InvalidValue("only trees have replicas")
    names = experiment.policies or (DEFAULT_POLICY["tree"],)
    for name in names:
        parse_policy(name, "tree")
    model, below = experiment.model, experiment.below
    footprint_bytes = trace.footprint_tokens * model.bytes_per_token
    capacities = [(text, capacity_of(text, footprint_bytes)) for text in experiment.capacities]
    warmup = warmup_of(experiment.warmup, trace.n_requests)
    saved_ms(0, {}, prefill_tokens_per_s=experiment.prefill_tokens_per_s)
    outcomes = [
        replay_fleet(
            trace,
            fleet,
            capacity_bytes=capacity_bytes,
            policy=name,
            model=model,
            below=below,
            warmup=warmup,
            on_progress=_telling(on_progress, f"{name} at {text}, {fleet}"),
        )
        for name, (text, capacity_bytes), fleet in product(names, capacities, experiment.fleets)
    ]
    rolling = bool(model.checkpoint_bytes)
    sizes = dict.fromkeys(fleet.n_replicas for fleet in experiment.fleets)
    best = [
        (clairvoyant if rolling else bound)(
            trace,
            capacity_bytes=total_bytes(capacity_bytes, below, n_replicas),
            model=model,
            warmup=warmup,
            on_progress=_telling(on_progress, f"what is possible at {text}"),
        )
        for (text, capacity_bytes), n_replicas in product(capacities, sizes)
        if experiment.with_bound
    ]
    return Report(
        trace.name,
        trace.n_requests,
        trace.n_blocks,
        trace.block_tokens,
        trace.n_tokens,
        footprint_bytes,
        tuple(outcomes),
        tuple(best),
        not rolling,
        tuple(_saved_ms(experiment, each) for each in (*outcomes, *best)),
    )


def _telling(on_progress: Progress | None, title: str) -> Callable[[int, int], None] | None:
    return None if on_progress is None else partial(on_progress, title)


def _saved_ms(experiment: Experiment, outcome: Outcome) -> float:
    return saved_ms(
        outcome.reused_tokens,
        outcome.restored_bytes,
        prefill_tokens_per_s=experiment.prefill_tokens_per_s,
        bytes_per_s=experiment.bytes_per_s,
    )
