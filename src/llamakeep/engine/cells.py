"""Which slots hold the cells of a context: room is made, idle slots are parked, others laid low."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

from llamakeep.engine.job import Job
from llamakeep.engine.keeping import Keeping
from llamakeep.runtime.base import Family, Runtime
from llamakeep.tokens import IntArray, common_prefix

logger = logging.getLogger("llamakeep")

_WORTH_MOVING = 256
"""Tokens of others that a slot was filled above, below which it is not laid low."""


class SlotState:
    """A sequence and the job that has it.

    Attributes:
        slot_id: Its number, the sequence's too.
        job: What it answers; None while it is idle.
        last_used: When its last answer ended; -1 before the first.
        n_began: Grows with every job that begins in any slot.
        crowd: Tokens that others held when this one was filled, so that its cells are above them.
        is_stuck: What it holds could not be kept, so it is not parked without need.
    """

    def __init__(self, slot_id: int) -> None:
        self.slot_id = slot_id
        self.job: Job | None = None
        self.last_used = -1.0
        self.n_began = 0
        self.crowd = 0
        self.is_stuck = False


class Cells:
    """The cells that slots hold. One thread at a time, the engine's.

    Args:
        runtime: Has the cells.
        keeping: What slots hold.
        slots: All of them.
        clock: Seconds.
        park_idle: Keep and empty idle slots while others run.
        on_saved: Called with the milliseconds that each save of a slot took.
    """

    def __init__(
        self,
        runtime: Runtime,
        keeping: Keeping,
        slots: Sequence[SlotState],
        *,
        clock: Callable[[], float],
        park_idle: bool,
        on_saved: Callable[[float], None],
    ) -> None:
        self._n_cells = runtime.n_ctx
        self._counts = runtime.traits.family.has_rows
        self._shares = runtime.traits.family is Family.ATTENTION
        self._keeping = keeping
        self._slots = slots
        self._clock = clock
        self._on_saved = on_saved
        self._park_idle = park_idle and keeping.parks

    def held(self, slot: SlotState) -> int:
        """Return how many tokens a slot holds."""
        return int(self._keeping.tokens(slot.slot_id).size)

    # -- room --------------------------------------------------------------------------------------

    def fit(self, job: Job) -> bool:
        """Whether there are cells for a job beside what runs; alone it always fits."""
        running = [slot for slot in self._slots if slot.job is not None]
        if not running or not self._counts:
            return True
        known = [slot.job.known for slot in running if slot.job is not None]
        owners = [self._keeping.namespace(slot.slot_id) for slot in running]
        owners.append(self._keeping.namespace_of(job.request.salt))
        return self._sum([*known, job.known], owners) + len(owners) <= self._n_cells

    def _sum(self, tokens: Sequence[IntArray], owners: Sequence[bytes]) -> int:
        """Return the cells that sequences need, the beginnings that they can share counted once.

        Those that were evaluated apart share nothing though they could: then there may be less room
        than this says, and a batch finds that out.
        """
        total = 0
        for at, each in enumerate(tokens):
            shared = 0
            if self._shares:
                before = zip(tokens[:at], owners[:at], strict=True)
                same = (other for other, owner in before if owner == owners[at])
                shared = max((common_prefix(each, other) for other in same), default=0)
            total += int(each.size) - shared
        return total

    def used(self) -> int:
        """Return the cells that are in use, about: see `_sum`."""
        held = [self._keeping.tokens(slot.slot_id) for slot in self._slots]
        return self._sum(held, [self._keeping.namespace(slot.slot_id) for slot in self._slots])

    def make_room(self, n_tokens: int, spare: SlotState) -> None:
        """Empty idle slots, those used least recently first, until so many tokens have room."""
        if not self._counts:
            return
        idle = [slot for slot in self._slots if slot.job is None and slot is not spare]
        for slot in sorted(idle, key=lambda slot: slot.last_used):
            if self.used() + n_tokens <= self._n_cells:
                return
            self.empty(slot)

    def empty(self, slot: SlotState) -> None:
        """Keep what a slot holds if that can be, and empty it."""
        self.guarded("park", partial(self._timed, self._keeping.park, slot))
        if self.held(slot):
            self._keeping.clear(slot.slot_id)

    # -- keeping -----------------------------------------------------------------------------------

    def save_idle(self) -> None:
        """Keep what idle slots hold."""
        for slot in self._slots:
            if slot.job is None:
                self._timed(self._keeping.save, slot)

    def _timed(self, save: Callable[[int], object], slot: SlotState) -> None:
        """Save a slot, and tell how long that took, if there was something to save."""
        if not self.held(slot):
            return
        begin = self._clock()
        save(slot.slot_id)
        self._on_saved((self._clock() - begin) * 1e3)

    def guarded(self, what: str, action: Callable[[], object]) -> None:
        """Do something that no request should fail of."""
        try:
            action()
        except Exception:
            self._keeping.failures[what] = self._keeping.failures.get(what, 0) + 1
            logger.exception("%s failed", what)

    # -- who is in the way -------------------------------------------------------------------------

    def begins(self, slot: SlotState) -> None:
        """Note that a slot is about to be filled, above what others hold now."""
        others = sum(self.held(other) for other in self._slots if other is not slot)
        slot.crowd = max(slot.crowd if self.held(slot) else 0, others)
        slot.is_stuck = False

    def clear_the_way(self) -> None:
        """Park idle slots while others run, and lay low what was filled above them."""
        idle = [slot for slot in self._slots if slot.job is None] if self._park_idle else []
        for slot in idle:
            if self.held(slot) and not slot.is_stuck:
                gently = partial(self._keeping.park, force=False)
                self.guarded("park", partial(self._timed, gently, slot))
                slot.is_stuck = self.held(slot) > 0
        left = [slot for slot in self._slots if self.held(slot)]
        for slot in self._slots:
            if slot not in left:  # it will be filled above those who are there now
                slot.crowd = sum(map(self.held, left))
        if len(left) == 1 and left[0].crowd >= max(_WORTH_MOVING, self.held(left[0]) // 2):
            left[0].crowd = 0
            self.guarded("lay_low", partial(self._keeping.lay_low, left[0].slot_id))
