"""Replaying a trace: the product's own tree, caches and policies, on a runtime of sizes.

Requests come one after the other, in the trace's order, as they would to one slot. The prefix tree
is emptied of its live sequence after each, so that it is measured by what it keeps; llama-server's
cache of whole prompts has its slot, whose prompt is memory on top of its capacity, because without
it there is nothing that it could save.

What an answer adds is not in a trace, and nothing is kept of it: the next turn brings it along.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, Protocol, TypeAlias

from llamakeep.checkpoints import MIN_EVALUATED
from llamakeep.errors import InvalidValue, whole_number
from llamakeep.events import Event, EvictedForRoom, EvictedOverLimit, EvictedOverTokenLimit
from llamakeep.policy import DEFAULT_POLICY as TREE_POLICY
from llamakeep.policy import Policy
from llamakeep.prompt_cache import PromptCache
from llamakeep.runtime.base import Family
from llamakeep.runtime.fake import FakeRuntime
from llamakeep.runtime.sized import SizedRuntime
from llamakeep.sequence import KeptSequence
from llamakeep.simulate.foresight import Foresight
from llamakeep.simulate.rules import DEFAULT_RULES, CheckpointRules, name_of
from llamakeep.simulate.tiers import TierSize, open_store
from llamakeep.simulate.trace import Request, Trace
from llamakeep.slots import Slots
from llamakeep.stores.base import TreeStore
from llamakeep.stores.sized import SizedTier
from llamakeep.tokens import IntArray
from llamakeep.tree import PrefixTree

CacheName: TypeAlias = Literal["tree", "prompt"]
DEFAULT_POLICY: Final[dict[str, str]] = {"tree": TREE_POLICY, "prompt": "oldest"}
N_SWA: Final = 1024
"""A window that is common in models that have one."""

_TICK_S: Final = 1e-6
_REPORT_EVERY: Final = 64


@dataclass(frozen=True, slots=True)
class Model:
    """What the states of a model occupy.

    Attributes:
        bytes_per_token: Bytes of a token's rows.
        family: The memory family.
        checkpoint_bytes: Bytes of a rolling part; 0 in the attention family, which has none.
        n_swa: Tokens of the window, in families that have one.

    Raises:
        InvalidValue: For a size that cannot be.
    """

    bytes_per_token: int = 1
    family: Family = Family.ATTENTION
    checkpoint_bytes: int = 0
    n_swa: int = N_SWA

    def __post_init__(self) -> None:
        whole_number("bytes_per_token", self.bytes_per_token, 1)
        whole_number("n_swa", self.n_swa, 1)
        rolling = self.family is not Family.ATTENTION
        if bool(self.checkpoint_bytes) != rolling:
            wants = "needs checkpoint_bytes" if rolling else "has no checkpoints"
            raise InvalidValue(f"the {self.family.value} family {wants}")

    def state_bytes(self, n_tokens: int) -> int:
        """Return what the whole state of so many tokens occupies."""
        rows = n_tokens * self.bytes_per_token if self.family.has_rows else 0
        return rows + self.checkpoint_bytes

    def runtime(self, n_ctx: int) -> SizedRuntime:
        """Return a runtime with a sequence of so many tokens."""
        return SizedRuntime(
            self.family,
            n_ctx=n_ctx,
            n_swa=self.n_swa,
            bytes_per_token=self.bytes_per_token,
            checkpoint_bytes=self.checkpoint_bytes,
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one replay saved, of the requests after the warm-up.

    Attributes:
        cache: `tree` or `prompt`, or what else decided.
        policy: What went first.
        capacity_bytes: What could be kept.
        n_requests: Requests.
        requests_hit: Those of which something was reused.
        input_tokens: Tokens of their prompts.
        reused_tokens: Those that were not evaluated.
        evicted_bytes: Bytes that were evicted.
        restored_bytes: Bytes that were moved to reuse them, by the tier that they came from.
        reevaluated_tokens: Those that were evaluated though an earlier request had the same prompt
            up to them. At least two a prompt: the end of one is always evaluated.
        checkpoint_policy: Which checkpoint of a slot went first; "" where that is none's to say.
    """

    cache: str
    policy: str
    capacity_bytes: int
    n_requests: int
    requests_hit: int
    input_tokens: int
    reused_tokens: int
    evicted_bytes: int = 0
    restored_bytes: Mapping[str, int] = field(default_factory=dict)
    reevaluated_tokens: int = 0
    checkpoint_policy: str = ""

    @property
    def evaluated_tokens(self) -> int:
        """Tokens that were evaluated."""
        return self.input_tokens - self.reused_tokens

    @property
    def saved_share(self) -> float:
        """Tokens reused of all, 0 to 1."""
        return self.reused_tokens / self.input_tokens if self.input_tokens else 0.0


class TraceClock:
    """The time of the trace: that of its requests, and never the same twice.

    Requests at one time follow each other by a microsecond, or policies could not tell them apart.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._begun = False

    def __call__(self) -> float:
        """Return the time, in seconds."""
        return self._now

    def go_to(self, timestamp: float) -> None:
        """Let a request begin."""
        self._now = max(timestamp, self._now + _TICK_S) if self._begun else timestamp
        self._begun = True


class Driver(Protocol):
    """Serves the requests of a trace with one cache."""

    @property
    def evicted_bytes(self) -> int:
        """Bytes that were evicted."""
        ...  # pragma: no cover - protocol

    @property
    def restored_bytes(self) -> Mapping[str, int]:
        """Bytes that were moved into the sequence, by tier."""
        ...  # pragma: no cover - protocol

    def serve(self, request: Request) -> int:
        """Serve a request and return how many tokens of its prompt were reused."""
        ...  # pragma: no cover - protocol

    def check(self) -> None:
        """Prove that what is counted is what is kept."""
        ...  # pragma: no cover - protocol


class TreeDriver:
    """The prefix tree, as the keeper and the server use it, without what is live.

    Args:
        runtime: Holds one sequence.
        store: Where the tree keeps its states. Tiers below memory are let catch up after each
            request, so that a replay is the same each time.
        segment_tokens: Longest span.
        policy: What goes first.
        clock: Seconds.
        checkpoints: Limits of checkpoints, and where they are taken.

    Attributes:
        tree: The tree.
        reused_tokens: Tokens that were reused, by the tier that they came from.
    """

    def __init__(
        self,
        runtime: FakeRuntime,
        store: TreeStore,
        *,
        segment_tokens: int,
        policy: str | Policy,
        clock: Callable[[], float],
        checkpoints: CheckpointRules = DEFAULT_RULES,
    ) -> None:
        self._runtime = runtime
        self.tree = PrefixTree(
            store,
            runtime.traits,
            segment_tokens=segment_tokens,
            policy=policy,
            clock=clock,
            **checkpoints.of_tree(),
        )
        self.reused_tokens: Counter[str] = Counter()
        self._sequence = KeptSequence(runtime, self.tree, **checkpoints.of_sequence())

    @property
    def evicted_bytes(self) -> int:
        """Bytes that memory evicted; tiers below may have them still."""
        return self.tree.counters.evicted_bytes

    @property
    def restored_bytes(self) -> dict[str, int]:
        """Bytes that were moved into the sequence, by tier."""
        tiers = [tier for tier in self.tree.store.below if isinstance(tier, SizedTier)]
        found = {tier.tier: tier.read_bytes for tier in tiers}
        return {"ram": self._runtime.calls.written_bytes - sum(found.values()), **found}

    def serve(self, request: Request) -> int:
        """Serve a request and return how many tokens of its prompt were reused."""
        sequence, keep = self._sequence, request.keep_tokens
        # Of what cannot be kept two tokens are as good as all: they are evaluated behind the rest.
        prompt = request.tokens[: keep + MIN_EVALUATED]
        starts = [start for start in request.user_starts if start < prompt.size]
        reused = sequence.resume(prompt, user_starts=starts).reused_tokens
        self._count_reused(prompt, reused)
        sequence.advance(prompt[reused:])
        sequence.save(keep)
        sequence.clear()
        if self.tree.store.below:
            self.tree.store.flush()
        return reused

    def _count_reused(self, prompt: IntArray, reused: int) -> None:
        if not self.tree.store.below:
            self.reused_tokens["ram"] += reused
        elif reused:
            # What was read from below is offered to memory, and comes there with the next save.
            match = self.tree.match_prefix(prompt, limit=reused)
            self.reused_tokens.update(self.tree.tokens_by_tier(prompt, match))

    def check(self) -> None:
        """Prove that nodes, blobs and counted bytes agree.

        Raises:
            IntegrityError: With the numbers.
        """
        self.tree.check()


class PromptDriver:
    """llama-server's prompt cache behind one slot.

    Args:
        runtime: Holds one sequence.
        capacity_bytes: What the cache may keep.
        policy: What goes first.
        clock: Seconds.
        checkpoints: How the slot's checkpoints are taken, kept and restored.

    Attributes:
        cache: The cache.
    """

    def __init__(
        self,
        runtime: FakeRuntime,
        capacity_bytes: int,
        *,
        policy: str | Policy,
        clock: Callable[[], float],
        checkpoints: CheckpointRules = DEFAULT_RULES,
    ) -> None:
        self._runtime = runtime
        self._served = 0
        self._foresight: object = checkpoints.policy
        self.evicted_bytes = 0
        self.cache = PromptCache(
            capacity_bytes,
            policy=policy,
            lists_entries=False,
            emit=self._hear,
            clock=clock,
            **checkpoints.of_cache(),
        )
        self._slots = Slots(
            runtime, self.cache, emit=_nobody, clock=clock, **checkpoints.of_slots()
        )

    @property
    def checkpoint_policy(self) -> str:
        """Which checkpoint of the slot goes first."""
        return self._slots.slots[0].checkpoints.policy_name

    @property
    def restored_bytes(self) -> dict[str, int]:
        """Bytes that were moved into the slot."""
        return {"ram": self._runtime.calls.written_bytes}

    def _hear(self, event: Event) -> None:
        if isinstance(event, (EvictedForRoom, EvictedOverLimit, EvictedOverTokenLimit)):
            self.evicted_bytes += event.n_bytes

    def serve(self, request: Request) -> int:
        """Serve a request and return how many tokens of its prompt were reused."""
        if isinstance(self._foresight, Foresight):
            self._foresight.begin(self._served)
        self._served += 1
        prompt, keep = request.tokens, request.keep_tokens
        if keep and self._runtime.traits.rolling:
            # The next turn has another tail, as if it went back a few tokens. Where a state can be
            # cut that costs nothing; elsewhere it would take a checkpoint each time, which a turn
            # that really goes on does not need.
            prompt = prompt[:keep]
        starts = [start for start in request.user_starts if start < prompt.size]
        return self._slots.serve(prompt, user_starts=starts).reused_tokens

    def check(self) -> None:
        """Prove that slot, entries and counted bytes agree.

        Raises:
            IntegrityError: With the numbers.
        """
        self._slots.check()


def _nobody(event: Event) -> None:
    """Hear nothing."""


def replay(
    trace: Trace,
    cache: CacheName = "tree",
    *,
    capacity_bytes: int,
    policy: str | Policy | None = None,
    model: Model | None = None,
    below: Sequence[TierSize] = (),
    checkpoints: CheckpointRules = DEFAULT_RULES,
    warmup: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> Outcome:
    """Serve the requests of a trace with a cache, and return what that saved.

    Args:
        trace: The requests.
        cache: `tree` or `prompt`.
        capacity_bytes: What it may keep, in bytes.
        policy: What goes first; None for the default in the tree and `oldest` in the prompt cache.
        model: What states occupy; attention with a byte a token if not given.
        below: Tiers below memory, for the tree.
        checkpoints: How checkpoints are taken, kept and restored, in families that need them.
        warmup: Requests at the begin that are served and not counted.
        on_progress: Called now and then with the requests that are served, and all of them.

    Raises:
        InvalidValue: For an argument that is none of these.
        IntegrityError: When the cache's numbers do not add up at the end.
    """
    model = model or Model()
    chosen: str | Policy = DEFAULT_POLICY.get(cache, "") if policy is None else policy
    clock = TraceClock()
    runtime = model.runtime(trace.longest_tokens)
    if cache not in DEFAULT_POLICY:
        raise InvalidValue(f"cache must be tree or prompt, not {cache!r}")
    if below and cache != "tree":
        raise InvalidValue("only the tree has tiers below memory")
    checkpoints.check(cache, model.family)
    blank = Outcome(cache, name_of(chosen), capacity_bytes, 0, 0, 0, 0)
    if cache == "prompt":
        slots = PromptDriver(
            runtime, capacity_bytes, policy=chosen, clock=clock, checkpoints=checkpoints
        )
        if model.checkpoint_bytes:
            blank = replace(blank, checkpoint_policy=slots.checkpoint_policy)
        return drive(trace, slots, clock, blank, warmup=warmup, on_progress=on_progress)
    store = open_store(capacity_bytes, below, policy=chosen, clock=clock)
    try:
        tree = TreeDriver(
            runtime,
            store,
            segment_tokens=trace.block_tokens,
            policy=chosen,
            clock=clock,
            checkpoints=checkpoints,
        )
        return drive(trace, tree, clock, blank, warmup=warmup, on_progress=on_progress)
    finally:
        store.close()


def drive(
    trace: Trace,
    driver: Driver,
    clock: TraceClock,
    outcome: Outcome,
    *,
    warmup: int = 0,
    on_progress: Callable[[int, int], None] | None = None,
) -> Outcome:
    """Serve the requests of a trace with a driver, and return its outcome with the numbers.

    Args:
        trace: The requests.
        driver: Serves them.
        clock: The driver's clock.
        outcome: What it is called, and its capacity.
        warmup: Requests at the begin that are not counted.
        on_progress: Called now and then with the requests that are served, and all of them.

    Raises:
        InvalidValue: For a warm-up that is no number of requests of the trace.
        IntegrityError: When the driver's numbers do not add up at the end.
    """
    if not 0 <= warmup < trace.n_requests:
        raise InvalidValue(f"warmup must be 0 to {trace.n_requests - 1} requests, not {warmup}")
    n_requests = hits = input_tokens = reused_tokens = again = evicted = 0
    restored: Mapping[str, int] = {}
    for index, request in enumerate(trace):
        if index == warmup:
            evicted, restored = driver.evicted_bytes, driver.restored_bytes
        clock.go_to(request.timestamp)
        reused = driver.serve(request)
        if index >= warmup:
            n_requests += 1
            hits += bool(reused)
            input_tokens += int(request.tokens.size)
            reused_tokens += reused
            again += max(0, request.known_tokens - reused)
        if on_progress is not None and index % _REPORT_EVERY == 0:
            on_progress(index, trace.n_requests)
    driver.check()
    return replace(
        outcome,
        n_requests=n_requests,
        requests_hit=hits,
        input_tokens=input_tokens,
        reused_tokens=reused_tokens,
        reevaluated_tokens=again,
        evicted_bytes=driver.evicted_bytes - evicted,
        restored_bytes={
            tier: n_bytes - restored.get(tier, 0) for tier, n_bytes in driver.restored_bytes.items()
        },
    )
