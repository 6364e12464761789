"""What goes first is learned from how long this cache's own states waited to be used again.

A state waits from its last use. How long states wait, and how many are never used again, is counted
(`survival.py`) for a few classes of them: segments and checkpoints, what several conversations
share and what one has, and how many turns that one had. How far a wait follows the one before it is
learned as well. What is worth least goes first: expected uses for each second of room, times the
tokens that a use saves, for each byte. What is new and worth less than what would go first for it
is not kept.

Nothing is known at first, and what the past says may be wrong. So a guard (`guard.py`) keeps count,
on a sample, of what this order and the least recently used one would have reused; the one that
reused more of late rules. At first that is the latter.

What else could be known of a state was tried and left out: its depth, what follows it, whether it
ends a turn, how long its prompts are. What these add was chance (docs/eviction-evidence.md).

States that were used together have waited together: they stand in one *run*, which moves from
bucket to bucket as time passes. So an event costs O(log n), amortised; what is learned costs a pass
over the runs now and then.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from llamakeep.errors import InvalidValue
from llamakeep.policy.base import Watched
from llamakeep.policy.guard import Guard
from llamakeep.policy.shadow import Shadowed
from llamakeep.policy.survival import EDGES, N_BUCKETS, Learned, Wait, bucket_of, learn
from llamakeep.policy.watching import WatchingPolicy

if TYPE_CHECKING:
    from typing_extensions import Self

Rank = tuple[float, int]

_TURNS: Final = (0, 0, 1, 2, 2, 3, 3, 3, 3, 4)
"""Classes of turns, by their number: 1; 2; 3 and 4; 5 to 8; more."""
_N_TURNS: Final = 5
_GROUPS: Final = tuple(klass // _N_TURNS for klass in range(4 * _N_TURNS))
_LEARN_AFTER: Final = 512
"""Uses after which is learned anew, at least; with many states as many as there are."""
_CASES: Final = 4096
"""Runs that are learned from: those that began last."""
_GHOSTS: Final = 16384
"""States that went and are remembered, at least; with many states twice as many as there are."""

_SEQUENCE_BITS: Final = 40
_FEW: Final = 8

REGRET: Final = 0.005
"""What it may save less than `lru` of late, as a share of all tokens, before that rules."""


class _Run:
    """States that were last used at one time and are of one class.

    Attributes:
        klass: Their class.
        gap_s: Seconds that they had waited the time before; below 0 when that is not known.
        scale: Seconds that count as one for them.
        last: When they were used.
        number: Ascending with that.
        bucket: How long they have waited.
        n: How many they are, those that went but are remembered included.
        size: How many they were at first.
        notes: They, and some that have left.
        over: The waits of those that have left.
    """

    __slots__ = (
        "bucket",
        "gap_s",
        "klass",
        "last",
        "n",
        "notes",
        "number",
        "over",
        "scale",
        "size",
    )

    def __init__(self, klass: int, gap_s: float, last: float, number: int) -> None:
        self.klass = klass
        self.gap_s = gap_s
        self.scale = 1.0
        self.last = last
        self.number = number
        self.bucket = self.n = self.size = 0
        self.notes: list[_Note] = []
        self.over: list[Wait] = []

    def waits(self, now: float) -> list[Wait]:
        """Return what all of them waited until now."""
        return [*self.over, self.wait(self.n, now, used=False)] if self.n else self.over

    def wait(self, n: int, now: float, *, used: bool) -> Wait:
        """Return what `n` of them waited until now. They are one case: all count as one."""
        return Wait(self.klass, self.gap_s, now - self.last, n / self.size, used)


class _Note:
    """What is remembered of a state.

    Attributes:
        kept: The state; None when it went.
        name: Its name.
        draw: Whether it is in a sample, told by its lowest bits; from its first name.
        n_bytes: Its size.
        n_tokens: What losing it costs.
        run: What it was last used with.
        after: What is remembered of the one that it goes on from.
        turns: Prompts that had it or, before it, what it goes on from.
        gap_s: How long it waited the last time; below 0 when that is not known.
        depth: States before it in its prompts.
        shared: Whether prompts part behind it.
        followed: Whether any goes on from it.
    """

    __slots__ = (
        "after",
        "depth",
        "draw",
        "followed",
        "gap_s",
        "is_checkpoint",
        "kept",
        "n_bytes",
        "n_tokens",
        "name",
        "run",
        "shared",
        "turns",
    )

    def __init__(self, kept: Watched, after: _Note | None) -> None:
        self.kept: Watched | None = kept
        self.name = kept.name
        self.draw = int.from_bytes(kept.name[:4], "little")
        self.is_checkpoint = kept.is_checkpoint
        self.n_bytes = self.n_tokens = 0
        self.measure(kept)
        self.run: _Run | None = None
        self.after: _Note | None = after
        self.turns = 1
        self.gap_s = -1.0
        self.depth: int = 0 if after is None else after.depth + 1
        self.shared = self.followed = False

    def measure(self, kept: Watched) -> None:
        """Take a state's size, and what losing it costs."""
        self.n_bytes = kept.n_bytes
        # What a segment's span costs is all that it can cost; a checkpoint's is its position.
        self.n_tokens = kept.marginal_tokens if self.is_checkpoint else kept.n_tokens

    @property
    def klass(self) -> int:
        """Its class."""
        turns = _TURNS[min(self.turns, len(_TURNS) - 1)]
        return (2 * self.is_checkpoint + self.shared) * _N_TURNS + turns


class Hazard(WatchingPolicy):
    """Evict what is worth least, by what this cache has learned of its own past.

    Begins as `lru`, and is that wherever a sample says that `lru` reuses more. Keeps a note of some
    450 bytes for each state, for up to twice as many that went, or 16,384 of them; they are in no
    budget. A use costs O(log n), amortised: now and then all are looked at, which takes some 10
    microseconds for each state.

    Args:
        guard: 1 for the shadows, 0 to do without: to measure what was learned by itself.
        regret: What share of all tokens it may have saved less than `lru` of late, by the sample,
            before that rules.

    Attributes:
        rules: Whether what was learned decides at present.

    Raises:
        InvalidValue: For another guard, and for what is no share.
    """

    name = "hazard"
    looks_around = True

    def __init__(self, guard: float = 1, regret: float = REGRET) -> None:
        super().__init__()
        if guard not in (0, 1):
            raise InvalidValue(f"guard must be 0 or 1, not {guard!r}")
        if not 0 <= regret <= 1:
            raise InvalidValue(f"regret must be a share from 0 to 1, not {regret!r}")
        self._guarded = bool(guard)
        self._regret = float(regret)
        self.rules = False
        self._numbers = itertools.count(1)
        self._now = -math.inf
        self._runs: dict[int, _Run] = {}
        self._runs_now: dict[tuple[int, float], _Run] = {}
        self._ended: dict[int, tuple[_Run, int]] = {}  # whose states are used now, and how many
        self._given_up: dict[int, tuple[_Run, int]] = {}  # whose states were forgotten since
        self._due: list[tuple[float, int, _Run]] = []  # when runs come into another bucket
        self._ghosts: dict[bytes, _Note] = {}
        self._cases: deque[_Run] = deque(maxlen=_CASES)
        self._taught: Learned | None = None
        self._n_kept = self._events = 0
        self._guard: Guard | None = None  # once it is known what it watches

    def __repr__(self) -> str:
        return f"Hazard(guard={int(self._guarded)}, regret={self._regret:g})"

    def fresh(self) -> Self:
        """Return a new one with the same options."""
        return type(self)(int(self._guarded), self._regret)

    def begin_watching(
        self,
        look_again: Callable[[Any], None],
        capacity_bytes: Callable[[], int],
        *,
        may_refuse: bool,
    ) -> None:
        """Begin to watch a cache.

        Raises:
            InvalidValue: When it watches one already.
        """
        super().begin_watching(look_again, capacity_bytes, may_refuse=may_refuse)
        if self._guarded:
            self._guard = Guard(
                self._shadow_worth,
                self._shadow_recency,
                selective=may_refuse,
                regret=self._regret,
            )

    @property
    def selective(self) -> bool:  # type: ignore[override]
        """Whether a new thing that ranks below all that could go for it is not kept."""
        return self.rules

    def rank(self, kept: Watched, now: float) -> Rank:
        """Rank by expected tokens saved, a byte and a second; or by the last use."""
        note: _Note | None = kept.memo
        if note is None or note.run is None or not self.rules or self._taught is None:
            return kept.last_used, kept.sequence
        turn = (note.run.number << _SEQUENCE_BITS) + kept.sequence  # of equals the oldest use
        if kept.n_bytes <= 0:
            return math.inf, turn
        return self._worth(note.run) * kept.marginal_tokens / kept.n_bytes, turn

    def _worth(self, run: _Run) -> float:
        taught = self._taught
        return 0.0 if taught is None else taught.worths[run.klass][run.bucket] / run.scale

    # -- what happens ------------------------------------------------------------------------------

    def enters(
        self, kept: Watched, now: float, after: Watched | None, *, fits: bool = True
    ) -> None:
        """Remember a new state, or know it again."""
        self._go_to(now)
        before: _Note | None = None if after is None else after.memo
        note = self._ghosts.pop(kept.name, None)
        if note is not None:
            note.kept, note.after = kept, before
            note.measure(kept)
            waits = self._again(note)
        else:
            waits = True
            note = _Note(kept, before)
            if before is not None and not note.is_checkpoint:
                if before.followed:
                    self._share(before)
                else:
                    note.turns, note.gap_s = before.turns, before.gap_s
                    before.followed = True
            elif before is not None:
                note.turns, note.gap_s = before.turns, before.gap_s
        kept.memo = note
        self._n_kept += 1
        if waits:
            self._wait(note, fits=fits)

    def used(self, kept: Watched, now: float) -> None:
        """Count how long a state waited."""
        self._go_to(now)
        note: _Note | None = kept.memo
        if note is None or not self._again(note):
            return
        self._wait(note, there=True)
        if self.rules:
            self._look_again(kept)  # what comes after a use may be worth less than what came before

    def replaces(self, kept: Watched, old: Watched) -> None:
        """Remember of a longer tail what was known of the shorter one."""
        super().replaces(kept, old)
        note: _Note | None = kept.memo
        if note is not None:
            ghost = self._ghosts.pop(kept.name, None)  # it was as long before, and comes back
            if ghost is not None and not self._again(ghost):
                self._part(ghost)
            note.kept, note.name = kept, kept.name
            note.measure(kept)

    def leaves(self, kept: Watched, now: float, *, evicted: bool) -> None:
        """Remember a state that went, for a while. One that is lost may come back as well."""
        note: _Note | None = kept.memo
        super().leaves(kept, now, evicted=evicted)
        if note is None:
            return
        note.kept = None
        self._n_kept -= 1
        self._ghosts[note.name] = note
        while len(self._ghosts) > max(_GHOSTS, 2 * self._n_kept):
            self._forget(self._ghosts.pop(next(iter(self._ghosts))))

    def refused(self, kept: Watched, now: float) -> None:
        """Remember a state that was not kept as one that went."""
        self.leaves(kept, now, evicted=True)

    def _forget(self, note: _Note) -> None:
        run = note.run
        if run is not None:
            _, n = self._given_up.get(run.number, (run, 0))
            self._given_up[run.number] = run, n + 1
            self._part(note)

    @staticmethod
    def _share(note: _Note | None) -> None:
        """Prompts part behind a state, and so behind all before it."""
        while note is not None and not note.shared:
            note.shared, note = True, note.after

    # -- waiting -----------------------------------------------------------------------------------

    def _again(self, note: _Note) -> bool:
        """A state is used again. Return whether it waits anew: not twice from one time on."""
        run = note.run
        if run is None:
            return True
        if run.last >= self._now:
            return False
        _, n = self._ended.get(run.number, (run, 0))
        self._ended[run.number] = run, n + 1
        note.gap_s = max(0.0, self._now - run.last)
        note.turns += 1
        self._part(note)
        return True

    def _part(self, note: _Note) -> None:
        """Take a state out of its run."""
        run, note.run = note.run, None
        if run is not None:
            run.n -= 1
            if not run.n:
                self._runs.pop(run.number, None)
                run.notes.clear()
            if len(run.notes) > 2 * run.n + _FEW:
                run.notes = [each for each in run.notes if each.run is run]

    def _wait(self, note: _Note, *, fits: bool = True, there: bool = False) -> None:
        """Let a state wait, from now on, with others of its class that do."""
        key = note.klass, note.gap_s
        run = self._runs_now.get(key)
        if run is None:
            run = _Run(*key, self._now, next(self._numbers))
            run.scale = 1.0 if self._taught is None else self._taught.scale(run.gap_s)
            self._runs_now[key] = run
            self._cases.append(run)
            self._expect(run)
        self._runs[run.number] = run
        run.n += 1
        run.size += 1
        run.notes.append(note)
        note.run = run
        self._events += 1
        if self._guard is not None:
            was_there = there if self.rules else None
            self._guard.serve(note, note.n_tokens, fits=fits, there=was_there)

    def _expect(self, run: _Run) -> None:
        if run.bucket + 1 < N_BUCKETS:
            due = run.last + EDGES[run.bucket + 1] * run.scale
            heapq.heappush(self._due, (due, run.number, run))

    def _go_to(self, now: float) -> None:
        """Let time pass: runs come into other buckets, where they may be worth less."""
        if now <= self._now:  # or a clock was put back
            return
        self._close()
        self._judge()
        if self._events >= max(_LEARN_AFTER, self._n_kept, len(self._runs)):
            self._learn()
        self._now = now
        while self._due and self._due[0][0] <= now:
            run = heapq.heappop(self._due)[2]
            if not run.n:
                continue
            before = self._worth(run)
            run.bucket = max(run.bucket + 1, bucket_of((now - run.last) / run.scale))
            self._expect(run)
            if self._worth(run) < before:
                self._look_at(run)

    def _close(self) -> None:
        """The states that are used at the present time are all known: remember their waits."""
        for run, n in self._ended.values():
            run.over.append(run.wait(n, self._now, used=True))
        self._ended.clear()
        self._runs_now.clear()

    def _look_at(self, run: _Run) -> None:
        run.notes = [note for note in run.notes if note.run is run]
        for note in run.notes:
            if self.rules and note.kept is not None:
                self._look_again(note.kept)
            if self._guard is not None:
                self._guard.look_again(note)

    # -- learning ----------------------------------------------------------------------------------

    def _learn(self) -> None:
        """Work out anew what states are worth."""
        self._events = 0
        for run, n in self._given_up.values():
            run.over.append(run.wait(n, self._now, used=False))
        self._given_up.clear()
        waits = [wait for run in self._cases for wait in run.waits(self._now)]
        self._taught = learn(_GROUPS, waits)
        runs = self._runs.values()
        self._due.clear()
        for run in runs:
            run.scale = self._taught.scale(run.gap_s)
            run.bucket = bucket_of((self._now - run.last) / run.scale)
            self._expect(run)
        if self._guard is None:
            self.rules = True
        else:
            self._guard.learned.look_at_all_again()
        if self.rules:
            self._look_at_all()

    def _look_at_all(self) -> None:
        for run in self._runs.values():
            for note in run.notes:
                if note.run is run and note.kept is not None:
                    self._look_again(note.kept)

    # -- which order rules -------------------------------------------------------------------------

    def _shadow_worth(self, thing: Shadowed) -> Rank:
        note: _Note = thing  # type: ignore[assignment]
        if note.run is None or self._taught is None:
            return self._shadow_recency(thing)
        return self._worth(note.run) * note.n_tokens / note.n_bytes, -note.depth

    @staticmethod
    def _shadow_recency(thing: Shadowed) -> Rank:
        note: _Note = thing  # type: ignore[assignment]
        return (note.run.last if note.run is not None else 0.0), -note.depth

    def _judge(self) -> None:
        """Let the order rule that saved more of late."""
        if self._guard is None:
            return
        self._guard.fit(self._n_kept, self._capacity_bytes())
        if self._taught is not None and self._guard.approves(rules=self.rules) != self.rules:
            self.rules = not self.rules
            self._look_at_all()
