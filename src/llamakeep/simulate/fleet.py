"""Replaying a trace on several replicas: each with memory of its own, over one shared tier.

A replica is what `replay` replays: a prefix tree over its memory and its disk. The shared tier is
one for all, with one budget; each replica opens it as another process would. A router says who
serves a request. Requests come one after the other here, too: what two replicas would evaluate at
the same time, because neither has finished, the second one finds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Final

from llamakeep.errors import InvalidValue, whole_number
from llamakeep.policy import DEFAULT_POLICY, parse_policy
from llamakeep.simulate.replay import Model, Outcome, TraceClock, TreeDriver, drive
from llamakeep.simulate.routing import Route, Router
from llamakeep.simulate.tiers import TierSize, open_store
from llamakeep.simulate.trace import Request, Trace
from llamakeep.stores.sized import SizedTier

WINDOW_S: Final = 10.0
"""The peak of the shared tier's bandwidth is that of so many seconds of the trace."""
MOST_REPLICAS: Final = 1024
"""Each has threads of its own."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """How many replicas there are, and how requests find theirs.

    Attributes:
        n_replicas: At least one.
        route: How a router chooses.

    Raises:
        InvalidValue: For less than one replica, or more than 1,024.
    """

    n_replicas: int = 1
    route: Route = field(default_factory=Route)

    def __post_init__(self) -> None:
        whole_number("replicas", self.n_replicas, 1)
        if self.n_replicas > MOST_REPLICAS:
            raise InvalidValue(
                f"replicas must be at most {MOST_REPLICAS:,}, not {self.n_replicas:,}"
            )

    def __str__(self) -> str:
        return "1" if self.n_replicas == 1 else f"{self.n_replicas} {self.route}"


@dataclass(frozen=True, slots=True)
class SharedUse:
    """What went to and from the shared tier.

    Attributes:
        read_bytes: Bytes that replicas read.
        written_bytes: Bytes that they wrote.
        evicted_bytes: Bytes that it evicted.
        peak_read_bytes_per_s: Most bytes that were read in `window_s` seconds, a second.
        peak_written_bytes_per_s: Most bytes that were written in as many.
        span_s: Seconds between the first request and the last one.
        window_s: See above.
        used_bytes: What it held at the end.
        peak_bytes: The most that it held.
        lookups: How often it was asked what it has.
        blocks_asked: In how many blocks.
        states_read: Segments and checkpoints that were asked for.
        states_written: And those that were written.
    """

    read_bytes: int = 0
    written_bytes: int = 0
    evicted_bytes: int = 0
    peak_read_bytes_per_s: float = 0.0
    peak_written_bytes_per_s: float = 0.0
    span_s: float = 0.0
    window_s: float = WINDOW_S
    used_bytes: int = 0
    peak_bytes: int = 0
    lookups: int = 0
    blocks_asked: int = 0
    states_read: int = 0
    states_written: int = 0

    @property
    def mean_read_bytes_per_s(self) -> float:
        """Bytes that were read, a second of the trace."""
        return self.read_bytes / max(self.span_s, self.window_s)

    @property
    def mean_written_bytes_per_s(self) -> float:
        """Bytes that were written, a second of the trace."""
        return self.written_bytes / max(self.span_s, self.window_s)

    def to_json(self) -> dict[str, Any]:
        """Return the figures, ready for JSON."""
        figures = {name: getattr(self, name) for name in self.__slots__}
        means = ("mean_read_bytes_per_s", "mean_written_bytes_per_s")
        return figures | {name: getattr(self, name) for name in means}


@dataclass(frozen=True, slots=True)
class FleetOutcome(Outcome):
    """What a fleet saved, all replicas together. Capacity is the memory of each.

    Attributes:
        fleet: The replicas, and how requests found them.
        reused_by_tier: Tokens that were reused, by the tier that they came from.
        requests_of: Requests of each replica.
        evaluated_of: Tokens that each replica evaluated.
        remembered: Most entries that the router remembered.
        shared: What went to and from the shared tier; None without one.
    """

    fleet: Fleet = field(default_factory=Fleet)
    reused_by_tier: Mapping[str, int] = field(default_factory=dict)
    requests_of: tuple[int, ...] = ()
    evaluated_of: tuple[int, ...] = ()
    remembered: int = 0
    shared: SharedUse | None = None

    @property
    def uneven_requests(self) -> float:
        """Requests of the replica with most, in means; 1 is even."""
        return uneven(self.requests_of)

    @property
    def uneven_evaluated(self) -> float:
        """Evaluated tokens of the replica with most, in means; 1 is even."""
        return uneven(self.evaluated_of)

    def to_json(self) -> dict[str, Any]:
        """Return what a plain outcome has not, ready for JSON."""
        return {
            "replicas": self.fleet.n_replicas,
            "route": str(self.fleet.route),
            "reused_by_tier": dict(self.reused_by_tier),
            "requests_of": list(self.requests_of),
            "evaluated_of": list(self.evaluated_of),
            "uneven_requests": self.uneven_requests,
            "uneven_evaluated": self.uneven_evaluated,
            "router_entries": self.remembered,
            "shared": self.shared and self.shared.to_json(),
        }


def uneven(numbers: Sequence[int]) -> float:
    """Return the largest of some numbers, in means of them; 1 where all are 0.

    Example:
        >>> uneven([3, 1]), uneven([2, 2])
        (1.5, 1.0)
    """
    total = sum(numbers)
    return max(numbers) * len(numbers) / total if total else 1.0


def total_bytes(capacity_bytes: int, below: Sequence[TierSize], n_replicas: int) -> int:
    """Return what a fleet can keep: memory and disk of each replica, and the shared tier once."""
    local = sum(tier.capacity_bytes for tier in below if tier.tier != "shared")
    everything = sum(tier.capacity_bytes for tier in below)
    return n_replicas * (capacity_bytes + local) + everything - local


class FleetDriver:
    """Replicas behind a router. See `Driver`.

    Args:
        replicas: The replicas.
        router: Says who serves a request.
        shared: The tier that they share; None where there is none.
        openings: How each replica has opened it, in their order; empty where there is none.
        warmup: Requests at the begin that are not counted.
    """

    def __init__(
        self,
        replicas: Sequence[TreeDriver],
        router: Router,
        shared: SizedTier | None = None,
        openings: Sequence[SizedTier] = (),
        *,
        warmup: int = 0,
    ) -> None:
        self._replicas = replicas
        self._router = router
        self._shared = shared
        self._openings = openings
        self._warmup = warmup
        self._n_served = 0
        self._begin()

    def _begin(self) -> None:
        """Count from here on."""
        self._requests = [0] * len(self._replicas)
        self._evaluated = [0] * len(self._replicas)
        self._tokens_before = self._tokens()
        self._figures_before = _figures(self._openings)
        self._written_before = self._n_written()
        self._windows: dict[int, Counter[str]] = {}
        self._times: tuple[float, float] | None = None
        self._peak_bytes = self._remembered = 0

    @property
    def evicted_bytes(self) -> int:
        """Bytes that the memories of all replicas evicted."""
        return sum(replica.evicted_bytes for replica in self._replicas)

    @property
    def restored_bytes(self) -> dict[str, int]:
        """Bytes that were moved into sequences, by tier."""
        found: Counter[str] = Counter()
        for replica in self._replicas:
            found.update(replica.restored_bytes)
        return dict(found)

    def serve(self, request: Request) -> int:
        """Let a replica serve a request; return how many tokens of its prompt were reused."""
        if self._n_served == self._warmup:
            self._begin()
        self._n_served += 1
        number = self._router.route(request)
        opened = self._openings[number : number + 1]
        before = _figures(opened)
        reused = self._replicas[number].serve(request)
        self._requests[number] += 1
        self._evaluated[number] += int(request.tokens.size) - reused
        self._remembered = max(self._remembered, self._router.remembered)
        first = self._times[0] if self._times is not None else request.timestamp
        self._times = first, request.timestamp
        if self._shared is not None:
            self._peak_bytes = max(self._peak_bytes, self._shared.used_bytes)
            window = int((request.timestamp - first) // WINDOW_S)
            self._windows.setdefault(window, Counter()).update(_figures(opened) - before)
        return reused

    def _tokens(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for replica in self._replicas:
            found.update(replica.reused_tokens)
        return found

    def _n_written(self) -> int:
        return 0 if self._shared is None else self._shared.counters.get("written", 0)

    def outcome(self, outcome: FleetOutcome) -> FleetOutcome:
        """Return an outcome with what is known of the fleet, of the requests after the warm-up."""
        return replace(
            outcome,
            reused_by_tier=dict(self._tokens() - self._tokens_before),
            requests_of=tuple(self._requests),
            evaluated_of=tuple(self._evaluated),
            remembered=self._remembered,
            shared=self._shared_use() if self._shared is not None else None,
        )

    def _shared_use(self) -> SharedUse:
        assert self._shared is not None
        first, last = self._times or (0.0, 0.0)

        def peak(what: str) -> float:
            return max((found[what] for found in self._windows.values()), default=0) / WINDOW_S

        return SharedUse(
            **(_figures(self._openings) - self._figures_before),
            states_written=self._n_written() - self._written_before,
            peak_read_bytes_per_s=peak("read_bytes"),
            peak_written_bytes_per_s=peak("written_bytes"),
            span_s=last - first,
            used_bytes=self._shared.used_bytes,
            peak_bytes=self._peak_bytes,
        )

    def check(self) -> None:
        """Prove that what is counted is what is kept, in each replica and in what they share.

        Raises:
            IntegrityError: With the numbers.
        """
        for replica in self._replicas:
            replica.check()
        if self._shared is not None:
            self._shared.check()


def _figures(openings: Sequence[SizedTier]) -> Counter[str]:
    """Return what went through these openings of the shared tier so far."""
    found: Counter[str] = Counter()
    for tier in openings:
        found["read_bytes"] += tier.read_bytes
        found["written_bytes"] += tier.written_bytes
        found["evicted_bytes"] += tier.evicted_bytes
        found["lookups"] += tier.lookups
        found["blocks_asked"] += tier.blocks_asked
        found["states_read"] += tier.calls["get"]
    return found


def replay_fleet(
    trace: Trace,
    fleet: Fleet,
    *,
    capacity_bytes: int,
    policy: str = DEFAULT_POLICY,
    model: Model | None = None,
    below: Sequence[TierSize] = (),
    warmup: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> FleetOutcome:
    """Serve the requests of a trace with several prefix trees, and return what that saved.

    Args:
        trace: The requests.
        fleet: The replicas, and how requests find them.
        capacity_bytes: What the memory of each may keep.
        policy: What goes first, as `parse_policy` reads it; each cache has an object of its own.
        model: What states occupy; attention with a byte a token if not given.
        below: Tiers below memory. A disk is each replica's own; `shared` is one for all.
        warmup: Requests at the begin that are served and not counted.
        on_progress: Called now and then with the requests that are served, and all of them.

    Raises:
        InvalidValue: For an argument that is none of these.
        IntegrityError: When the numbers of a cache do not add up at the end.
    """
    model = model or Model()
    clock = TraceClock()
    common = next((each for each in below if each.tier == "shared"), None)
    shared = None
    if common is not None:
        shared = SizedTier(
            common.capacity_bytes, "shared", policy=parse_policy(policy), clock=clock
        )
    local_bytes = capacity_bytes + sum(each.capacity_bytes for each in below if each is not common)
    block_bytes = trace.block_tokens * model.bytes_per_token
    router = fleet.route.open(fleet.n_replicas, max(1, local_bytes // block_bytes))
    replicas, openings = [], []
    with ExitStack() as stack:
        for _ in range(fleet.n_replicas):
            chosen = parse_policy(policy)
            store = open_store(capacity_bytes, below, policy=chosen, clock=clock, shared=shared)
            stack.callback(store.close)
            openings += [t for t in store.below if isinstance(t, SizedTier) and t.tier == "shared"]
            replicas.append(
                TreeDriver(
                    model.runtime(trace.longest_tokens),
                    store,
                    segment_tokens=trace.block_tokens,
                    policy=chosen,
                    clock=clock,
                )
            )
        driver = FleetDriver(replicas, router, shared, openings, warmup=warmup)
        blank = FleetOutcome("tree", policy, capacity_bytes, 0, 0, 0, 0, fleet=fleet)
        found = drive(trace, driver, clock, blank, warmup=warmup, on_progress=on_progress)
        assert isinstance(found, FleetOutcome)
        return driver.outcome(found)
