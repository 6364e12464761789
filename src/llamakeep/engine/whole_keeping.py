"""Slots over llama-server's prompt cache, for those who want its rules: `--cache prompt`.

Everything is as `llamakeep.slots` has it, but for what several prompts at once ask for: busy slots
are neither chosen, saved nor emptied, the engine decides how long the pieces of a prompt are, and
an idle slot whose cells are needed is saved before it is emptied.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from llamakeep.engine.keeping import HearEvicted
from llamakeep.engine.request import Request
from llamakeep.engine.slotfile import SlotContent
from llamakeep.entries import Entry, Loading, Saving
from llamakeep.fingerprint import Difference
from llamakeep.outline import MOST_SPANS, Outline, Seen
from llamakeep.policy import name_of
from llamakeep.prompt_cache import PromptCache
from llamakeep.runtime.base import Runtime
from llamakeep.slots import Slots
from llamakeep.states import Reuse
from llamakeep.tokens import IntArray
from llamakeep.wholes import read_whole


class PromptKeeping:
    """Slots over a cache of whole prompts. See `Keeping`.

    Args:
        runtime: Holds a sequence for each slot.
        cache: Keeps whole prompts; only this object uses it.
        namespace_of: Returns what makes a tenant's states incompatible with others, for its salt.
        clock: Seconds.
        options: For `Slots`.
    """

    def __init__(
        self,
        runtime: Runtime,
        cache: PromptCache,
        namespace_of: Callable[[str], bytes],
        *,
        clock: Callable[[], float] = time.monotonic,
        **options: Any,
    ) -> None:
        self.parks = False  # when a task begins the idle slots are saved, at no other time
        self.has_tiers = False
        self._runtime = runtime
        self._cache = cache
        self.namespace_of = namespace_of
        self._clock = clock
        self._slots = Slots(runtime, cache, clock=clock, **options)
        self._tasks = [0] * runtime.n_seqs
        self._update = [True] * runtime.n_seqs
        self._salts = [""] * runtime.n_seqs
        self._requests: list[Request | None] = [None] * runtime.n_seqs

    @property
    def failures(self) -> dict[str, int]:
        """How often what failed."""
        return self._slots.failures

    def tokens(self, slot_id: int) -> IntArray:
        """Return what a slot holds."""
        return self._slots.slots[slot_id].tokens

    def held_tokens(self, slot_id: int) -> int:
        """Return how many tokens a slot holds."""
        return self._slots.slots[slot_id].n_tokens

    def choose(self, idle: Sequence[int], request: Request, last_used: Sequence[float]) -> int:
        """Return the idle slot that shares enough with the prompt, else the least recent one."""
        del last_used  # the slots know
        for slot in self._slots.slots:
            slot.busy = slot.slot_id not in idle
        chosen, update = self._slots.choose(
            request.prompt, request.slot, namespace=self.namespace_of(request.salt)
        )
        self._update[chosen.slot_id] = update
        return chosen.slot_id

    def begin(self, slot_id: int, known: IntArray, request: Request) -> Reuse:
        """Bring a slot to what it need not evaluate; save it and the idle ones first."""
        begin, slot = time.perf_counter(), self._slots.slots[slot_id]
        self._salts[slot_id], self._requests[slot_id] = request.salt, request
        loaded = self._slots.begin(
            slot,
            known,
            update=self._update[slot_id],
            reads=request.mode.reads,
            writes=request.mode.writes,
            namespace=self.namespace_of(request.salt),
        )
        slot.busy = True
        self._tasks[slot_id] = self._slots.next_task()
        restored = loaded is not None and loaded.result is Loading.RESTORED
        reused = slot.n_tokens
        tier = ("ram" if restored else "live") if reused else "none"
        reason = f"new from token {reused} on" if reused else "no slot and no entry serves it"
        ms = (time.perf_counter() - begin) * 1e3
        return Reuse(reused, int(known.size) - reused, tier, reason, ms, shared_tokens=reused)

    def next_stop(self, slot_id: int, end: int) -> int:
        """Return where a batch must end; take a checkpoint where it starts, if one is due."""
        slot, request = self._slots.slots[slot_id], self._requests[slot_id]
        if request is None or end > request.prompt.size:
            return end  # an answer is evaluated anew, behind its prompt
        stop = slot.next_stop(
            end, request.user_starts, task=self._tasks[slot_id], takes=request.mode.writes
        )
        return min(stop, end)

    def worth_waiting(self, slot_id: int, prompt: IntArray, n_tokens: int) -> int:
        """Return 0: llama-server lets every prompt evaluate for itself."""
        return 0

    def evaluated(self, slot_id: int, tokens: IntArray) -> bool:
        """Note tokens that were evaluated."""
        return self._slots.slots[slot_id].note_evaluated(tokens)

    def holds(self, slot_id: int) -> bool:
        """Whether a slot really holds what is known of it."""
        slot = self._slots.slots[slot_id]
        if self._runtime.positions(slot_id).n_tokens == slot.n_tokens:
            return True
        slot.forget()
        return False

    def end(self, slot_id: int, request: Request) -> None:
        """Leave the slot as it is; empty it when nothing of it may be kept."""
        slot = self._slots.slots[slot_id]
        slot.busy, slot.last_used = False, self._clock()
        self._requests[slot_id] = None
        if not request.mode.writes:
            self._slots.clear(slot_id)

    def save(self, slot_id: int) -> None:
        """Do nothing: a prompt is saved when another one takes its slot."""

    def park(self, slot_id: int, *, force: bool = True) -> bool:
        """Keep what a slot holds, and empty it."""
        slot = self._slots.slots[slot_id]
        if slot.n_tokens:
            saved = self._slots.save(slot_id)
            if force or saved in (Saving.SAVED, Saving.CACHED) or not slot.keeps:
                self._slots.clear(slot_id)
        slot.busy = False
        return not slot.n_tokens

    def lay_low(self, slot_id: int) -> None:
        """Do nothing: llama-server does not."""

    def clear(self, slot_id: int) -> None:
        """Empty a slot."""
        self._slots.clear(slot_id)
        self._slots.slots[slot_id].busy = False

    def content(self, slot_id: int) -> SlotContent:
        """Read what a slot holds; its checkpoints stay behind, as llama-server's do."""
        tokens = self.tokens(slot_id).copy()
        return SlotContent(tokens, read_whole(self._runtime, slot_id, int(tokens.size)))

    def hold(self, slot_id: int, content: SlotContent, salt: str) -> None:
        """Note what was restored into a slot that was empty."""
        self._salts[slot_id] = salt
        self._slots.hold(slot_id, content.tokens, namespace=self.namespace_of(salt))

    def namespace(self, slot_id: int) -> bytes:
        """Return the namespace of the slot's tenant."""
        return self.namespace_of(self._salts[slot_id])

    def stats(self) -> dict[str, Any]:
        """Return the cache's counters and sizes."""
        cache = self._cache
        return {
            "cache": "prompt",
            "used_bytes": cache.used_bytes,
            "capacity_bytes": cache.limit_bytes,
            "prompts": len(cache),
            "policy": name_of(cache.policy),
            "failures": dict(self.failures),
            **cache.counters,
            "below": {},
        }

    def entries(self) -> list[dict[str, Any]]:
        """Return every kept prompt, most recently used first."""
        entries = sorted(self._cache, key=lambda entry: -entry.last_used)
        return [_shown(entry) for entry in entries]

    def outline(self) -> Outline:
        """Return the entries, the last ones first: nothing hangs off any."""
        entries = list(self._cache)[: -MOST_SPANS - 1 : -1]
        seen = [
            Seen(
                entry.sequence,
                -1,
                0,
                0,
                entry.n_tokens,
                entry.n_bytes,
                "ram",
                tuple(_positions(entry)),
                entry.hits,
                entry.last_used,
                0,
            )
            for entry in entries
        ]
        return Outline(self._clock(), seen, len(self._cache) - len(seen))

    def tell_evicted(self, hear: HearEvicted) -> None:
        """Let somebody hear of entries that go. How much of one would be used, other rules say."""
        self._slots.tell_evicted(lambda namespace, tokens: hear(namespace, tokens, True))

    def kept_elsewhere(self, namespace: bytes, tokens: IntArray) -> tuple[Difference, ...]:
        """Return nothing: there are no tiers below memory."""
        return ()

    def forget(self) -> Callable[[], None]:
        """Forget all entries."""
        self._cache.clear()
        return lambda: None

    def flush(self, timeout_s: float | None) -> bool:
        """Return True: there is nothing below memory."""
        return True

    def check(self) -> None:
        """Compare what slots and cache think with what is there."""
        self._slots.check()

    def close(self, timeout_s: float) -> None:
        """Forget everything: it does not outlive the process."""
        self._cache.clear()


def _positions(entry: Entry) -> list[int]:
    kept = entry.checkpoints
    return [each.n_tokens for each in kept] if kept is not None else []


def _shown(entry: Entry) -> dict[str, Any]:
    return {
        "n_tokens": entry.n_tokens,
        "path_bytes": entry.n_bytes,
        "checkpoints": _positions(entry),
        "hits": entry.hits,
        "last_used": entry.last_used,
        "tier": "ram",
    }
