"""One trace, several policies and capacities, and the bound: what `llamakeep simulate` reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any, Final, cast

from llamakeep.errors import InvalidValue
from llamakeep.policy import Policy, PolicyKind, parse_policy
from llamakeep.simulate.bound import bound
from llamakeep.simulate.fleet import Fleet, FleetOutcome, replay_fleet, total_bytes
from llamakeep.simulate.foresight import Foresight
from llamakeep.simulate.greedy import clairvoyant
from llamakeep.simulate.replay import DEFAULT_POLICY, CacheName, Model, Outcome, replay
from llamakeep.simulate.rules import DEFAULT_RULES, CheckpointRules
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
        checkpoints: How checkpoints are taken, kept and restored; their policy is not looked at.
        checkpoint_policies: Which checkpoint of a slot goes first, as `parse_policy` reads it, or
            `foresight`; each with each of `policies`. Empty for the product's choice. For the
            prompt cache.
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
    checkpoints: CheckpointRules = DEFAULT_RULES
    checkpoint_policies: Sequence[str] = ()


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
        has_checkpoints: The family needs them.
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
    has_checkpoints: bool
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
        "checkpoint_policy": outcome.checkpoint_policy or None,
        "capacity_bytes": outcome.capacity_bytes,
        "capacity_share": outcome.capacity_bytes / footprint_bytes if footprint_bytes else None,
        "saved_share": outcome.saved_share,
        "requests": outcome.n_requests,
        "requests_hit": outcome.requests_hit,
        "input_tokens": outcome.input_tokens,
        "reused_tokens": outcome.reused_tokens,
        "evaluated_tokens": outcome.evaluated_tokens,
        "reevaluated_tokens": outcome.reevaluated_tokens,
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
    rules = _rules(trace, experiment)
    for each in rules.values():
        each.check(experiment.cache, model.family)
    footprint_bytes = trace.footprint_tokens * model.bytes_per_token
    capacities = [capacity_of(text, footprint_bytes) for text in experiment.capacities]
    warmup = warmup_of(experiment.warmup, trace.n_requests)
    saved_ms(0, {}, prefill_tokens_per_s=experiment.prefill_tokens_per_s)
    outcomes = []
    for name, (of_checkpoints, each) in product(names, rules.items()):
        for text, capacity_bytes in zip(experiment.capacities, capacities, strict=True):
            found = replay(
                trace,
                experiment.cache,
                capacity_bytes=capacity_bytes,
                policy=parse_policy(name, kind),
                model=model,
                below=experiment.below,
                checkpoints=each,
                warmup=warmup,
                on_progress=_telling(on_progress, f"{_title(name, of_checkpoints)} at {text}"),
            )
            chosen = of_checkpoints or found.checkpoint_policy
            # With their options.
            outcomes.append(replace(found, policy=name, checkpoint_policy=chosen))
    rolling = bool(model.checkpoint_bytes)
    best = [
        _best(
            trace,
            experiment,
            capacity_bytes,
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
        rolling,
        tuple(_saved_ms(experiment, each) for each in (*outcomes, *best)),
    )


def _rules(trace: Trace, experiment: Experiment) -> dict[str, CheckpointRules]:
    """Return the rules for each policy of checkpoints, "" for none that was asked for."""
    rules = replace(experiment.checkpoints, policy=None)
    names = experiment.checkpoint_policies
    found = {
        name: replace(
            rules,
            policy=cast(Policy, Foresight(trace, exact=rules.restore == "exact"))
            if name == Foresight.name
            else parse_policy(name, "checkpoints"),
        )
        for name in names
    }
    return found or {"": rules}


def _title(name: str, of_checkpoints: str) -> str:
    return f"{name}, {of_checkpoints}" if of_checkpoints else name


def _best(
    trace: Trace,
    experiment: Experiment,
    capacity_bytes: int,
    *,
    warmup: int,
    on_progress: Callable[[int, int], None] | None,
) -> Outcome:
    """Return what was possible with a capacity and what is below.

    With checkpoints, that of the slot too: it is memory on top of the capacity of llama-server's
    cache, and without it the clairvoyant would have less than those it is compared with.
    """
    model, rules = experiment.model, experiment.checkpoints
    capacity_bytes += sum(tier.capacity_bytes for tier in experiment.below)
    if not model.checkpoint_bytes:
        return bound(
            trace,
            capacity_bytes=capacity_bytes,
            model=model,
            warmup=warmup,
            on_progress=on_progress,
        )
    limit, limit_bytes, slot_bytes = rules.limit, rules.limit_bytes, 0
    if experiment.cache == "prompt":
        limit, limit_bytes = rules.most_of_slot(model.checkpoint_bytes), None
        slot_bytes = model.state_bytes(trace.longest_tokens) + limit * model.checkpoint_bytes
    found = clairvoyant(
        trace,
        capacity_bytes=capacity_bytes + slot_bytes,
        model=model,
        limit=limit,
        limit_bytes=limit_bytes,
        warmup=warmup,
        on_progress=on_progress,
    )
    return replace(found, capacity_bytes=capacity_bytes)


def _run_fleets(trace: Trace, experiment: Experiment, on_progress: Progress | None) -> Report:
    """Replay a trace with replicas. See `run`."""
    if experiment.cache != "tree":
        raise InvalidValue("only trees have replicas")
    if experiment.checkpoint_policies or experiment.checkpoints != DEFAULT_RULES:
        raise InvalidValue("replicas treat checkpoints as the product does: they take no rules")
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
        rolling,
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
