"""What llama-server's prompt cache and context checkpoints report, as objects and as log lines.

Each kind of event is one frozen class. `Event.as_dict` gives what a recording of a llama-server
holds of it, `Event.line` the words the llama-server of the recordings logs it with, their leading
dash included. Events go to a callable; the default, `log`, writes the line to the logger
``llamakeep``.

::

    Event
    ├── SlotById, SlotBySimilarity, SlotByLru, PromptCleared, SlotPurged  which slot serves
    ├── SavingPrompt, SavingIdleSlot, AlreadyCached, OverLimitSkipped,
    │   ObsoleteRemoved, AllocationFailed                                 a slot is saved
    ├── LoadBase, LoadFound, LoadFailed                                   a saved one is taken
    ├── EvictedForRoom, EvictedOverLimit, EvictedOverTokenLimit,
    │   LimitReduced, CacheState, CachedPrompt                            the cache is kept small
    └── CheckpointCreated, CheckpointEvictedClose, CheckpointEvictedOldest,
        CheckpointSuperseded, CheckpointRestored, CheckpointInvalidated,
        FullReprocess, CheckpointEvicted, CheckpointRefused               checkpoints

Classes with `recorded` False are those that the recordings leave out, and the two of the last line
that llama-server does not have.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

logger = logging.getLogger("llamakeep")

MIB = 1 << 20
"""Bytes of a MiB, the unit of llama-server's lines."""

_SIZE = "size = {0.mib:.3f} MiB"
_PLACE = "pos_min = {0.pos_min}, pos_max = {0.pos_max}, n_tokens = {0.n_tokens}"


@dataclass(frozen=True)
class Event:
    """Something that happened; its classes say what.

    Attributes:
        kind: The name recordings give to it.
        keys: The fields that recordings hold of it.
        words: The log line, as a format of the event.
        recorded: Whether recordings hold events of this kind at all.
    """

    kind: ClassVar[str] = ""
    keys: ClassVar[tuple[str, ...]] = ()
    words: ClassVar[str] = ""
    recorded: ClassVar[bool] = True

    def as_dict(self) -> dict[str, str | int | float]:
        """Return the event as a recording holds it; fractions have three decimals."""
        return {"event": self.kind} | {key: _rounded(getattr(self, key)) for key in self.keys}

    def line(self) -> str:
        """Return the log line."""
        return self.words.format(self)


def _rounded(value: int | float) -> int | float:
    return round(value, 3) if isinstance(value, float) else value


Emit: TypeAlias = Callable[[Event], None]
"""Takes each event as it happens; must not raise."""


def log(event: Event) -> None:
    """Write the event's line to the logger ``llamakeep``, at level INFO."""
    if is_logged():
        logger.info("%s", event.line())


def is_logged() -> bool:
    """Return whether `log` writes anything."""
    return logger.isEnabledFor(logging.INFO)


@dataclass(frozen=True)
class _Sized(Event):
    """An event about bytes."""

    n_bytes: int

    @property
    def mib(self) -> float:
        """The bytes in MiB."""
        return self.n_bytes / MIB


class _Limited:
    """What events share that name a limit in bytes."""

    limit_bytes: int

    @property
    def limit_mib(self) -> float:
        """The limit in MiB."""
        return self.limit_bytes / MIB


# -- which slot ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SlotById(Event):
    """A request named its slot."""

    kind = "slot_by_id"
    keys = ("slot",)
    words = "selected slot by id ({0.slot})"
    recorded = False

    slot: int


@dataclass(frozen=True)
class SlotBySimilarity(Event):
    """A slot was chosen because it holds much of the prompt already."""

    kind = "slot_by_similarity"
    keys = ("slot", "f_sim", "threshold", "f_keep")
    words = (
        "selected slot by LCP similarity, f_sim_best = {0.f_sim:.3f} (> {0.threshold:.3f} thold), "
        "f_keep = {0.f_keep:.3f}"
    )

    slot: int
    f_sim: float
    threshold: float
    f_keep: float


@dataclass(frozen=True)
class SlotByLru(Event):
    """A slot was chosen because it was idle for the longest time. `t_last`: microseconds."""

    kind = "slot_by_lru"
    keys = ("slot",)
    words = "selected slot by LRU, t_last = {0.t_last}"

    slot: int
    t_last: int = -1


@dataclass(frozen=True)
class PromptCleared(Event):
    """A slot was emptied of `n_tokens`, its checkpoints with them."""

    kind = "prompt_cleared"
    keys = ("slot", "n_tokens")
    words = "clearing prompt with {0.n_tokens} tokens"
    recorded = False

    slot: int
    n_tokens: int


@dataclass(frozen=True)
class SlotPurged(Event):
    """An idle slot was emptied because the context had no room left."""

    kind = "slot_purged"
    keys = ("slot", "n_tokens")
    words = "purging slot {0.slot} with {0.n_tokens} tokens"
    recorded = False

    slot: int
    n_tokens: int


# -- saving ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SavingPrompt(_Sized):
    """A slot's prompt is about to be saved; `n_bytes` without checkpoints."""

    kind = "saving_prompt"
    keys = ("n_tokens", "mib")
    words = (
        " - saving prompt with length {0.n_tokens}, total state size = {0.mib:.3f} MiB "
        "(draft: {0.draft_mib:.3f} MiB)"
    )
    recorded = False

    n_tokens: int
    draft_bytes: int = 0

    @property
    def draft_mib(self) -> float:
        """The draft model's part of the bytes, in MiB."""
        return self.draft_bytes / MIB


@dataclass(frozen=True)
class SavingIdleSlot(Event):
    """A slot that no task uses is about to be saved."""

    kind = "saving_idle_slot"
    keys = ("slot",)
    words = "saving idle slot to prompt cache"
    recorded = False

    slot: int


@dataclass(frozen=True)
class AlreadyCached(Event):
    """Nothing was saved: an entry begins with the whole prompt."""

    kind = "prompt_already_cached"
    words = " - prompt is already in the cache, skipping"


@dataclass(frozen=True)
class OverLimitSkipped(_Sized, _Limited):
    """Nothing was saved: state and checkpoints alone are larger than the cache."""

    kind = "over_limit_skipped"
    keys = ("mib", "limit_mib")
    words = (
        " - prompt state size {0.mib:.3f} MiB exceeds cache size limit {0.limit_mib:.3f} MiB, "
        "skipping"
    )

    limit_bytes: int


@dataclass(frozen=True)
class ObsoleteRemoved(Event):
    """An entry was removed because the prompt that is saved begins with it."""

    kind = "obsolete_removed"
    keys = ("n_tokens",)
    words = " - removing obsolete cached prompt with length {0.n_tokens}"

    n_tokens: int


@dataclass(frozen=True)
class AllocationFailed(Event):
    """There was no memory for the entry."""

    kind = "allocation_failed"
    words = "failed to allocate memory for prompt cache state: {0.reason}"
    recorded = False

    reason: str


# -- loading ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoadBase(Event):
    """The cache is searched for an entry better than what the slot holds."""

    kind = "load_base"
    keys = ("f_keep", "f_sim")
    words = " - looking for better prompt, base f_keep = {0.f_keep:.3f}, f_sim = {0.f_sim:.3f}"

    f_keep: float
    f_sim: float


@dataclass(frozen=True)
class LoadFound(Event):
    """An entry is better; it goes into the slot."""

    kind = "load_found"
    keys = ("f_keep", "f_sim")
    words = " - found better prompt with f_keep = {0.f_keep:.3f}, f_sim = {0.f_sim:.3f}"

    f_keep: float
    f_sim: float


@dataclass(frozen=True)
class LoadFailed(Event):
    """The runtime refused the entry's state; the slot is cleared."""

    kind = "load_failed"
    keys = ("slot",)
    words = "failed to load prompt from cache"

    slot: int


# -- keeping the cache small -----------------------------------------------------------------------


@dataclass(frozen=True)
class EvictedForRoom(_Sized):
    """An entry was evicted before a new one was allocated."""

    kind = "evicted_oldest_for_room"
    keys = ("mib",)
    words = f" - making room for prompt cache entry, removing oldest entry ({_SIZE})"


@dataclass(frozen=True)
class EvictedOverLimit(_Sized):
    """An entry was evicted because the cache was above its limit."""

    kind = "evicted_over_limit"
    keys = ("mib",)
    words = f" - cache size limit reached, removing oldest entry ({_SIZE})"


@dataclass(frozen=True)
class EvictedOverTokenLimit(_Sized):
    """An entry was evicted because of the token limit: the one set, and what memory allows."""

    kind = "evicted_over_token_limit"
    keys = ("limit_tokens", "limit_tokens_now", "mib")
    words = (
        " - cache token limit ({0.limit_tokens}, est: {0.limit_tokens_now}) reached, "
        f"removing oldest entry ({_SIZE})"
    )

    limit_tokens: int
    limit_tokens_now: int


@dataclass(frozen=True)
class LimitReduced(_Sized):
    """The cache's own limit fell to `n_bytes`, after an allocation that failed."""

    kind = "limit_reduced"
    keys = ("mib",)
    words = " - cache size limit reduced to {0.mib:.3f} MiB"


@dataclass(frozen=True)
class CacheState(_Sized, _Limited):
    """What the cache holds after an update, and its limits (0 for no limit)."""

    kind = "cache_state"
    keys = ("prompts", "mib")
    words = (
        " - cache state: {0.prompts} prompts, {0.mib:.3f} MiB (limits: {0.limit_mib:.3f} MiB, "
        "{0.limit_tokens} tokens, {0.limit_tokens_now} est)"
    )

    prompts: int
    limit_bytes: int = 0
    limit_tokens: int = 0
    limit_tokens_now: int = 0


@dataclass(frozen=True)
class CachedPrompt(_Sized):
    """One entry of the cache after an update; `name` tells it from the others."""

    kind = "cached_prompt"
    keys = ("name", "n_tokens", "checkpoints", "mib")
    words = (
        "   - prompt {0.name}: {0.n_tokens:7d} tokens, checkpoints: {0.checkpoints:2d}, "
        "{0.mib:9.3f} MiB"
    )
    recorded = False

    name: str
    n_tokens: int
    checkpoints: int


# -- checkpoints -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Placed(_Sized):
    """An event about one checkpoint."""

    pos_min: int
    pos_max: int
    n_tokens: int


@dataclass(frozen=True)
class CheckpointCreated(_Placed):
    """A checkpoint was added; `count` of at most `limit` are in the list now."""

    kind = "checkpoint_created"
    keys = ("count", "limit", "pos_min", "pos_max", "n_tokens", "mib")
    words = f"created context checkpoint {{0.count}} of {{0.limit}} ({_PLACE}, {_SIZE})"

    count: int
    limit: int


@dataclass(frozen=True)
class CheckpointEvictedClose(_Placed):
    """A checkpoint was dropped because another task's lies within the least step before it."""

    kind = "checkpoint_evicted_close"
    keys = ("pos_min", "pos_max", "n_tokens")
    words = f"erasing context checkpoint too close to an earlier one ({_PLACE}, {_SIZE})"


@dataclass(frozen=True)
class CheckpointEvictedOldest(_Placed):
    """The oldest checkpoint was dropped because the list was full."""

    kind = "checkpoint_evicted_oldest"
    keys = ("pos_min", "pos_max", "n_tokens")
    words = f"erasing old context checkpoint ({_PLACE}, {_SIZE})"


@dataclass(frozen=True)
class CheckpointEvicted(_Placed):
    """A checkpoint was dropped by a policy that llama-server does not have."""

    kind = "checkpoint_evicted"
    keys = ("policy", "pos_min", "pos_max", "n_tokens")
    words = f"erasing context checkpoint by policy {{0.policy}} ({_PLACE}, {_SIZE})"
    recorded = False

    policy: str


@dataclass(frozen=True)
class CheckpointRefused(_Placed, _Limited):
    """A checkpoint was not taken: it alone is larger than the list's bytes."""

    kind = "checkpoint_refused"
    keys = ("pos_min", "pos_max", "n_tokens", "mib", "limit_mib")
    words = f"refusing context checkpoint above {{0.limit_mib:.3f}} MiB ({_PLACE}, {_SIZE})"
    recorded = False

    limit_bytes: int


@dataclass(frozen=True)
class CheckpointSuperseded(Event):
    """A checkpoint was dropped because the new one is at the same position."""

    kind = "checkpoint_superseded"
    keys = ("n_tokens",)
    words = "superseding context checkpoint at n_tokens = {0.n_tokens}"

    n_tokens: int


@dataclass(frozen=True)
class CheckpointRestored(_Placed):
    """A checkpoint is restored; `n_past` tokens need no evaluation."""

    kind = "checkpoint_restored"
    keys = ("pos_min", "pos_max", "n_tokens", "n_past")
    words = f"restored context checkpoint ({_PLACE}, n_past = {{0.n_past}}, {_SIZE})"

    n_past: int


@dataclass(frozen=True)
class CheckpointInvalidated(_Placed):
    """A checkpoint was dropped because it lies beyond where the request goes on."""

    kind = "checkpoint_invalidated"
    keys = ("pos_min", "pos_max", "n_tokens")
    words = (
        f"erased invalidated context checkpoint ({_PLACE}, n_swa = {{0.n_swa}}, "
        f"pos_next = {{0.pos_next}}, {_SIZE})"
    )

    n_swa: int
    pos_next: int


@dataclass(frozen=True)
class FullReprocess(Event):
    """No checkpoint can be used: the whole prompt is evaluated."""

    kind = "full_reprocess"
    words = (
        "forcing full prompt re-processing due to lack of cache data (likely due to SWA or "
        "hybrid/recurrent memory, see https://github.com/ggml-org/llama.cpp/pull/13194"
        "#issuecomment-2868343055)"
    )
