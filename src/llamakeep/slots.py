"""llama-server's slots: which one serves a prompt, what is saved of it, where it goes on.

`Slots.serve` does for one request what llama-server does from the moment a slot is chosen to the
prompt's last token. Mode `upstream` follows llama-server step by step (see `PromptCache` for the
cache's part):

1. Choose: the slot that shares the most with the prompt, if that is more than `similarity` of it;
   else the one used least recently, of equals the last.
2. Save and load, for completions only: when the slot was chosen by recency, or would lose more
   than half of what it holds.
3. Save the idle slots, and empty them under a unified cache. llama-server does this whatever
   kind of task is launched.
4. Resume: at the common prefix, or at a checkpoint where the memory cannot be cut.
5. Evaluate the rest in batches, each ended where a checkpoint will be taken. One is taken before
   the batch that starts there is evaluated.

Mode `keep` differs in 2 and 3: a completion is saved whenever it would lose a single token, and
when a task of another kind takes its slot; the prompt is looked up whatever was chosen and why, in
the other slots too; what another kind of task left is never saved; idle slots are emptied only when
the cache has them.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np

from llamakeep.checkpoint_list import CheckpointList, Restore
from llamakeep.checkpoints import MIN_EVALUATED, deepest_resume
from llamakeep.entries import Loaded, Loading, Saving, ratio
from llamakeep.errors import (
    ContextOverflow,
    InvalidValue,
    TokenError,
    whole_number,
)
from llamakeep.events import (
    Emit,
    Event,
    LoadFailed,
    PromptCleared,
    SavingIdleSlot,
    SlotById,
    SlotByLru,
    SlotBySimilarity,
    SlotPurged,
    log,
)
from llamakeep.policy import Policy
from llamakeep.prompt_cache import CacheMode, PromptCache
from llamakeep.runtime.base import Runtime
from llamakeep.slot import Slot
from llamakeep.tokens import IntArray, TokensLike, as_tokens, common_prefix

logger = logging.getLogger("llamakeep")

Purge: TypeAlias = Literal["first", "lru", "longest"]

COMPLETION: Final = "completion"
KINDS: Final = (COMPLETION, "infill", "embedding", "rerank")
"""Kinds of tasks. Only the first looks into the cache and takes checkpoints; the last two reuse
nothing, not even what is live."""
_STATELESS: Final = ("embedding", "rerank")
LEAST_KEPT: Final = 0.5
"""llama-server saves a slot that would lose more than this share of what it holds."""


@dataclass(frozen=True, slots=True)
class Served:
    """How one request was served.

    Attributes:
        slot_id: By which slot.
        evaluated_tokens: Prompt tokens that were evaluated.
        reused_tokens: Prompt tokens that were not.
        loaded: What the search of the cache gave; None when it was not searched.
        events: What happened, in order.
    """

    slot_id: int
    evaluated_tokens: int
    reused_tokens: int
    loaded: Loading | None
    events: tuple[Event, ...]


class Slots:
    """The slots of one context, over one prompt cache. One thread at a time, the context's owner.

    Args:
        runtime: Holds a sequence for each slot.
        cache: What slots are saved to; it may serve several contexts of one model.
        similarity: Share of a prompt that a slot must hold to be chosen for it; 0 chooses by
            recency alone.
        ctx_checkpoints: Most checkpoints of a slot; 0 for none.
        checkpoint_min_step: Least tokens between checkpoints at user messages.
        cache_idle_slots: Save the slots that are idle when a task starts.
        purge: Which idle slot is emptied when the context is full: the first, the one used least
            recently, the one that holds most. It is saved first; llama-server's way is mode
            `upstream` with `first`, and loses it.
        mode: `upstream` or `keep`; that of the cache if not given.
        n_ubatch: Tokens of a physical batch: decides where checkpoints near a prompt's end are.
        kv_unified: Slots share the cells of one cache, so an idle one is emptied once saved.
        restore: Which checkpoints are restored, see `CheckpointList`; `upstream` or `prefix` by
            the mode, if not given.
        checkpoint_policy: Which checkpoint goes first, see `CheckpointList`.
        checkpoint_bytes: Limit on the bytes of a slot's checkpoints.
        min_evaluated: Tokens of a prompt that are evaluated at least, in mode `keep`. Positions
            are not aligned, so warm runs round as cold ones only where batch shape does not matter.
        namespace: What makes states incompatible with those of others in the cache. Slots that
            restore checkpoints by position, as llama-server does, share with their like only.
        emit: Takes events, beside what `serve` returns.
        clock: Seconds.

    Attributes:
        slots: All of them.
        failures: How often a save, load, rewind, copy, checkpoint or rewind of the draft failed.

    Raises:
        InvalidValue: For an argument that is none of these.
    """

    def __init__(
        self,
        runtime: Runtime,
        cache: PromptCache,
        *,
        similarity: float = 0.1,
        ctx_checkpoints: int = 32,
        checkpoint_min_step: int = 8192,
        cache_idle_slots: bool = True,
        purge: Purge = "first",
        mode: CacheMode | None = None,
        n_ubatch: int | None = None,
        kv_unified: bool = True,
        restore: Restore | None = None,
        checkpoint_policy: str | Policy | None = None,
        checkpoint_bytes: int | None = None,
        min_evaluated: int = MIN_EVALUATED,
        namespace: bytes = b"",
        emit: Emit = log,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        mode = cache.mode if mode is None else mode
        if mode not in ("upstream", "keep"):
            raise InvalidValue(f"mode must be upstream or keep, not {mode!r}")
        if purge not in ("first", "lru", "longest"):
            raise InvalidValue(f"purge must be first, lru or longest, not {purge!r}")
        if not 0 <= similarity <= 1:
            raise InvalidValue(f"similarity must be between 0 and 1, not {similarity!r}")
        if cache_idle_slots and not cache.enabled and runtime.n_seqs > 1:
            logger.warning("idle slots are not saved: the prompt cache is off")
        self.mode: CacheMode = mode
        self._runtime = runtime
        self._cache = cache
        self._similarity = similarity
        self._cache_idle = cache_idle_slots and cache.enabled
        self._purge: Purge = purge
        self._kv_unified = kv_unified
        self._emit_to = emit
        self._clock = clock
        self._heard: list[Event] | None = None  # what `serve` returns; nobody else asks
        self._tasks = itertools.count()
        self._min_evaluated = min_evaluated
        self.failures: dict[str, int] = {}
        restore = ("upstream" if mode == "upstream" else "prefix") if restore is None else restore
        # What was restored by position alone may be wrong, and no digest tells: it stays apart.
        by_position = "upstream" in (mode, restore)
        self._prefix = b"position:" if by_position else b"proven:"
        self._default = namespace
        checkpoints = CheckpointList(
            ctx_checkpoints,
            checkpoint_min_step,
            checkpoint_bytes,
            restore=restore,
            policy=checkpoint_policy,
            min_evaluated=min_evaluated,
            emit=self._emit,
            clock=clock,
        )
        n_ubatch = min(512, runtime.n_batch) if n_ubatch is None else n_ubatch
        n_ubatch = min(whole_number("n_ubatch", n_ubatch, 1), runtime.n_batch)
        self.slots = tuple(
            Slot(n, runtime, checkpoints.copy(), n_ubatch=n_ubatch, failures=self.failures)
            for n in range(runtime.n_seqs)
        )

    def __repr__(self) -> str:
        return f"Slots({self.mode}, {', '.join(map(repr, self.slots))})"

    def _emit(self, event: Event) -> None:
        if self._heard is not None:
            self._heard.append(event)
        self._emit_to(event)

    @contextmanager
    def _listening(self) -> Iterator[list[Event]]:
        """Collect what happens, in the cache too, until the block ends."""
        heard = self._heard = []
        try:
            with self._cache.heard_by(heard.append):
                yield heard
        finally:
            self._heard = None

    # -- one request -------------------------------------------------------------------------------

    def serve(
        self,
        prompt: TokensLike,
        *,
        user_starts: Sequence[int] = (),
        kind: str = COMPLETION,
        slot: int | None = None,
        answer: TokensLike = (),
        namespace: bytes | None = None,
    ) -> Served:
        """Bring a slot to hold `prompt`, evaluating as little as the mode allows.

        Args:
            prompt: At least one token.
            user_starts: Positions where a user message starts, ascending.
            kind: One of `KINDS`.
            slot: Serve in this one, whatever it holds.
            answer: Tokens decoded after the prompt, one by one; not what was sampled last, which
                no one has evaluated yet.
            namespace: Of this request, such as its tenant's; that of the slots if not given.

        Raises:
            TokenError: For an empty prompt or a token outside the vocabulary, or the draft
                model's; nothing changes.
            ContextOverflow: For more tokens than the context has, or the draft model's; nothing
                changes.
            InvalidValue: For another kind, a slot that does not exist, or starts that are not
                ascending positions of the prompt; nothing changes.
            DecodeError: When the runtime fails; the slot is empty then. Other slots and the cache
                are whole whatever is raised.
        """
        tokens, n_prompt = self._checked(prompt, answer)
        if kind not in KINDS:
            raise InvalidValue(f"kind must be one of {', '.join(KINDS)}, not {kind!r}")
        if slot is not None and not 0 <= slot < len(self.slots):
            raise InvalidValue(f"slot {slot} is outside 0 to {len(self.slots) - 1}")
        starts = [whole_number("a user message's start", start, 0) for start in user_starts]
        if starts != sorted(set(starts)) or (starts and starts[-1] >= n_prompt):
            raise InvalidValue(f"user_starts must ascend below {n_prompt}, not {starts}")
        wanted = tokens[:n_prompt]
        with self._listening() as events:
            chosen, update = self.choose(wanted, slot, namespace=namespace)
            loaded = self.begin(chosen, wanted, update=update, kind=kind, namespace=namespace)
            n_past = chosen.n_tokens
            chosen.prefill(
                wanted,
                starts,
                task=self.next_task(),
                takes=kind == COMPLETION,
                make_room=lambda n_tokens: self._make_room(chosen, n_tokens),
            )
            for position in range(n_prompt, tokens.size):
                self._make_room(chosen, 1)
                chosen.evaluate(tokens, position, position + 1)
        chosen.last_used = self._clock()
        result = loaded.result if loaded is not None else None
        return Served(chosen.slot_id, n_prompt - n_past, n_past, result, tuple(events))

    def _checked(self, prompt: TokensLike, answer: TokensLike) -> tuple[IntArray, int]:
        """Return prompt and answer as one array of our own, and where the answer starts."""
        runtime, draft = self._runtime, self._runtime.draft
        parts = [as_tokens(part, n_vocab=runtime.n_vocab) for part in (prompt, answer)]
        tokens = np.concatenate(parts)
        if not parts[0].size:
            raise TokenError("a prompt has at least one token")
        if tokens.size > runtime.n_ctx:
            raise ContextOverflow(f"{tokens.size} tokens exceed the context of {runtime.n_ctx}")
        if draft is not None and tokens.size > draft.n_ctx:
            raise ContextOverflow(
                f"{tokens.size} tokens exceed the draft model's context of {draft.n_ctx}, "
                f"which is smaller than its target's of {runtime.n_ctx}"
            )
        if draft is not None and tokens.max() >= draft.n_vocab:
            raise TokenError(
                f"token {tokens.max()} is outside the draft model's vocabulary of "
                f"{draft.n_vocab}, which is smaller than its target's of {runtime.n_vocab}"
            )
        tokens.flags.writeable = False
        return tokens, int(parts[0].size)

    # Those who evaluate themselves, in batches with others, call these three instead of `serve`.

    def next_task(self) -> int:
        """Return the number of a task that begins."""
        return next(self._tasks)

    def begin(
        self,
        slot: Slot,
        prompt: IntArray,
        *,
        update: bool,
        kind: str = COMPLETION,
        reads: bool = True,
        writes: bool = True,
        namespace: bytes | None = None,
    ) -> Loaded | None:
        """Bring a slot to what it need not evaluate of a prompt, and save what that costs others.

        Args:
            slot: From `choose`, not busy.
            prompt: The request.
            update: From `choose`.
            kind: One of `KINDS`.
            reads: Whether anything may be reused, what is live included.
            writes: Whether anything of it may be kept. If not, what the slot held is saved first,
                and an entry that is restored stays, in mode `upstream` too.
            namespace: As in `serve`.

        Returns:
            What the search of the cache gave; None when it was not searched. The rest of the prompt
            is to be evaluated behind what the slot holds now.
        """
        mine = self._named(namespace)
        if slot.n_tokens and slot.namespace != mine:
            self._save(slot)
            self._clear(slot)
        elif slot.n_tokens and not (reads and writes):
            self._save(slot)  # it leaves nothing behind, what it goes on from included
        slot.namespace = mine
        loaded = None
        if kind == COMPLETION and self._cache.enabled and (update or self.mode == "keep"):
            if reads:
                loaded = self._swap(slot, prompt, take=writes)
        elif kind != COMPLETION and self.mode == "keep" and slot.n_tokens:
            self._save(slot)  # what it adds, if it adds to it, is none of a completion's
            self._cache.update()
        if self._cache_idle and (kind == COMPLETION or self.mode == "upstream"):
            self._save_idle(slot)
        slot.resume(prompt, int(prompt.size) if reads and kind not in _STATELESS else 0)
        self._others_too(slot)
        slot.kind, slot.keeps = kind, writes
        return loaded

    def tell_evicted(self, hear: Callable[[bytes, IntArray], None]) -> None:
        """Let somebody hear of entries that go to make room: namespace and tokens of each."""
        prefix = self._prefix
        self._cache.on_evicted = lambda name, tokens: hear(name.removeprefix(prefix), tokens)

    def _named(self, namespace: bytes | None) -> bytes:
        return self._prefix + (self._default if namespace is None else namespace)

    def choose(
        self, prompt: IntArray, pinned: int | None = None, *, namespace: bytes | None = None
    ) -> tuple[Slot, bool]:
        """Return the slot for a prompt, and whether llama-server would update the cache.

        Of those that are not busy; what slots of another namespace hold counts as nothing. In
        single precision, as llama-server: at a share of exactly one half its rounding may
        decide either way. A pinned slot that shares too little counts as sharing nothing; one
        that is empty is not updated at all, as 0/0 is not below one half.
        """
        best = self.slots[pinned] if pinned is not None else None
        if best is not None:
            self._emit(SlotById(best.slot_id))
        idle, mine = [slot for slot in self.slots if not slot.busy], self._named(namespace)
        if self._similarity:
            best_sim = 0.0
            for slot in idle if best is None else (best,):
                if not slot.n_tokens or slot.namespace != mine:
                    continue
                sim = ratio(common_prefix(slot.tokens, prompt), prompt.size)
                if sim > best_sim and sim > float(np.float32(self._similarity)):
                    best_sim, best = sim, slot
            if best is not None:
                if not best.n_tokens:
                    return best, False
                shared = np.float32(best_sim) * np.float32(prompt.size)
                keep = float(shared / np.float32(best.n_tokens))
                if pinned is None:
                    event = SlotBySimilarity(best.slot_id, best_sim, self._similarity, keep)
                    self._emit(event)
                return best, keep < LEAST_KEPT
        if best is not None:
            return best, False
        # Of slots that were used at the same time llama-server takes the last.
        slot = min(reversed(idle), key=lambda slot: slot.last_used)
        used = int(slot.last_used * 1e6) if slot.last_used >= 0 else -1
        self._emit(SlotByLru(slot.slot_id, used))
        return slot, True

    # -- saving and loading ------------------------------------------------------------------------

    def _swap(self, slot: Slot, prompt: IntArray, *, take: bool = True) -> Loaded:
        """Save what the slot would lose, and load what serves the prompt better."""
        if self.mode == "upstream":
            self._save(slot)
            loaded = self._load(slot, prompt, None, take=take)
        else:
            if common_prefix(slot.tokens, prompt) < slot.n_tokens:
                self._save(slot)
            most, n_new = self._most(prompt), int(prompt.size) - slot.n_tokens
            other, others = self._best_other(slot, prompt)
            self._make_room(slot, n_new, other if others > slot.reach(prompt, most) else None)
            own, (other, others) = slot.reach(prompt, most), self._best_other(slot, prompt)
            loaded = self._load(slot, prompt, max(own, others))
            if loaded.result is Loading.FAILED:
                own, (other, others) = 0, self._best_other(slot, prompt)
            if loaded.result is not Loading.RESTORED and other is not None and others > own:
                slot.copy_from(other, others)
                self._others_too(slot)
        self._cache.update()
        return loaded

    def _save(self, slot: Slot) -> Saving:
        if not slot.keeps or (self.mode == "keep" and slot.kind != COMPLETION):
            return Saving.NOTHING  # it may not be kept, or nobody asks for it again
        saved = self._cache.save(
            self._runtime, slot.slot_id, slot.tokens, slot.checkpoints, namespace=slot.namespace
        )
        if saved is Saving.FAILED:
            slot.count_failure("save")
        return saved

    def _load(
        self, slot: Slot, prompt: IntArray, reach: int | None, *, take: bool = True
    ) -> Loaded:
        held = slot.tokens
        with slot.moving():
            loaded = self._cache.load(
                self._runtime,
                slot.slot_id,
                held,
                prompt,
                reach=reach,
                most=self._most(prompt),
                namespace=slot.namespace,
                take=take,
            )
            if loaded.result is Loading.NO_MATCH:
                slot.tokens = held
            elif loaded.result is Loading.RESTORED:
                mine, theirs = slot.checkpoints, loaded.checkpoints
                if theirs is None:
                    slot.checkpoints = mine.copy("none")
                else:
                    slot.checkpoints = mine.taking_over(theirs, int(loaded.tokens.size))
                slot.tokens, slot.kind = loaded.tokens, COMPLETION
        if loaded.result is Loading.FAILED:
            slot.count_failure("load")
            self._emit(LoadFailed(slot.slot_id))
            self._emit(PromptCleared(slot.slot_id, int(held.size)))
            slot.forget()
            slot.cleared_all = loaded.cleared_all
            self._others_too(slot)
        return loaded

    def _most(self, prompt: IntArray) -> int:
        """Return how many tokens of a prompt may be reused."""
        return deepest_resume(int(prompt.size), 1, self._min_evaluated)

    def _save_idle(self, chosen: Slot) -> None:
        for slot in self.slots:
            if slot is chosen or slot.busy:
                continue
            self._emit(SavingIdleSlot(slot.slot_id))
            saved = self._save(slot)
            if saved is Saving.SAVED:
                self._cache.update()
            kept = self.mode == "upstream" or saved in (Saving.SAVED, Saving.CACHED)
            if self._kv_unified and (kept or slot.kind in _STATELESS):
                self._clear(slot)

    def _make_room(self, slot: Slot, n_tokens: int, source: Slot | None = None) -> None:
        """Empty idle slots, one by one, until the context has room for `n_tokens` more.

        The draft model's context counts too, where it is the smaller one. Cells that a copy shares
        with its source are counted twice, so room may be made that is there already.

        Args:
            slot: Stays as it is.
            n_tokens: Tokens that come into it.
            source: What may be copied into it: emptied when no other slot is left.
        """
        runtime, draft = self._runtime, self._runtime.draft
        contexts = [runtime] if draft is None else [runtime, draft]
        sizes = [each.n_ctx for each in contexts if each.traits.family.has_rows]
        if not (self._kv_unified and sizes):
            return
        while sum(each.n_tokens for each in self.slots) + n_tokens > min(sizes):
            idle = [e for e in self.slots if e is not slot and e.n_tokens and not e.busy]
            if not idle:
                return  # the runtime says what is wrong
            idle = [each for each in idle if each is not source] or idle
            if self._purge == "lru":
                victim = min(idle, key=lambda each: each.last_used)
            elif self._purge == "longest":
                victim = max(idle, key=lambda each: each.n_tokens)
            else:
                victim = idle[0]
            if self.mode == "keep" or self._purge != "first":
                self._save(victim)
            self._emit(SlotPurged(victim.slot_id, victim.n_tokens))
            self._clear(victim)

    def _best_other(self, slot: Slot, prompt: IntArray) -> tuple[Slot | None, int]:
        """Return the other slot that has the most of a prompt to copy."""
        best, reach = None, 0
        for other in self.slots:
            if other is slot or other.kind != COMPLETION or other.namespace != slot.namespace:
                continue
            its_reach = other.copyable(prompt, self._most(prompt))
            if its_reach > reach:
                best, reach = other, its_reach
        return best, reach

    def _others_too(self, slot: Slot) -> None:
        """Forget what the other slots held, if a failure of this one emptied them."""
        if slot.cleared_all:
            slot.cleared_all = False
            for each in self.slots:
                each.forget()

    def _clear(self, slot: Slot) -> None:
        self._emit(PromptCleared(slot.slot_id, slot.n_tokens))
        slot.forget()

    def clear(self, slot: int) -> None:
        """Empty a slot, its checkpoints with it; what the cache has stays."""
        self._clear(self.slots[slot])

    def save(self, slot: int) -> Saving:
        """Keep what a slot holds; it goes on holding it."""
        saved = self._save(self.slots[slot])
        self._cache.update()
        return saved

    def hold(self, slot: int, tokens: IntArray, *, namespace: bytes | None = None) -> None:
        """Note what somebody restored into an empty slot: tokens, and no checkpoints."""
        held = self.slots[slot]
        held.tokens, held.kind, held.keeps = tokens, COMPLETION, True
        held.namespace = self._named(namespace)

    def check(self) -> None:
        """Compare what slots and cache think with what is there.

        Raises:
            IntegrityError: With both numbers.
        """
        for slot in self.slots:
            slot.check()
        self._cache.check()
