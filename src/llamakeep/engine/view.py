"""What can be seen of a slot from outside of the engine's thread."""

from __future__ import annotations

from dataclasses import dataclass, field

from llamakeep.engine.cells import SlotState
from llamakeep.engine.request import Request
from llamakeep.states import Reuse
from llamakeep.tokens import IntArray


@dataclass(frozen=True, slots=True, eq=False)
class SlotInfo:
    """A slot between two batches.

    Attributes:
        slot_id: Its number.
        tokens: What it holds; a copy.
        n_ctx: Tokens that it has room for.
        is_processing: It answers a request.
        task_id: That request's number; None while idle.
        request: That request.
        reuse: How its prompt was served, once that is known.
        n_decoded: Tokens of the answer so far.
        has_new_line: One of them has a line end in it.
    """

    slot_id: int
    tokens: IntArray = field(repr=False)
    n_ctx: int
    is_processing: bool = False
    task_id: int | None = None
    request: Request | None = None
    reuse: Reuse | None = None
    n_decoded: int = 0
    has_new_line: bool = False

    @classmethod
    def of(cls, slot: SlotState, tokens: IntArray, n_ctx: int) -> SlotInfo:
        """Return what a slot shows of itself; for the engine's thread."""
        job = slot.job
        if job is None:
            return cls(slot.slot_id, tokens, n_ctx)
        return cls(
            slot.slot_id,
            tokens,
            n_ctx,
            True,
            job.id,
            job.request,
            job.reuse,
            job.n_generated,
            job.has_new_line,
        )
