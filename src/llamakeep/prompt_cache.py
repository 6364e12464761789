"""llama-server's cache of whole prompts, as it is and as it could be.

An entry is all that a slot held when another prompt took it: its tokens, the whole state of its
sequence, that of a draft model, and its context checkpoints. In mode `upstream` the rules are
those of llama-server, faults included; in mode `keep` the same store keeps what llama-server
loses:

=====================  ==================================  ======================================
what                   `upstream`                          `keep`
=====================  ==================================  ======================================
a hit                  moves the entry out                 copies; hits and time are recorded
chosen entry           beats the slot in f_keep and        gives the most tokens that can really
                       f_sim, f_keep at least 0.25         be resumed, if more than the slot has
restored               all of it, then cut back            what the request shares with it
too large              refused                             stored with fewer checkpoints, if that
                                                           helps; else refused
a prefix of another    is obsolete, and not stored         only if nothing is lost by it (rolling
                                                           memory resumes at checkpoints only, so
                                                           these must all be there)
a state that is wrong  stays, and fails again              is dropped
=====================  ==================================  ======================================

Bytes are counted in one `ByteBudget` before they are read. The tokens of an entry can be limited
too, but never below what the bytes have room for: see `update`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Literal, TypeAlias

import numpy as np
import psutil

from llamakeep.budget import ByteBudget
from llamakeep.checkpoint_list import CheckpointList
from llamakeep.entries import Allocated, Entry, Loaded, Loading, Saving, ratio, reason
from llamakeep.entry_list import EntryList
from llamakeep.errors import IntegrityError, InvalidValue, StateError, whole_number
from llamakeep.events import (
    AllocationFailed,
    AlreadyCached,
    CachedPrompt,
    CacheState,
    Emit,
    Event,
    EvictedForRoom,
    EvictedOverLimit,
    EvictedOverTokenLimit,
    LimitReduced,
    LoadBase,
    LoadFound,
    ObsoleteRemoved,
    OverLimitSkipped,
    SavingPrompt,
    is_logged,
    log,
)
from llamakeep.policy import Policy, get_policy
from llamakeep.runtime.base import Runtime
from llamakeep.tokens import IntArray, TokensLike, as_tokens, common_prefix
from llamakeep.wholes import Whole, read_whole, whole_bytes

logger = logging.getLogger("llamakeep")

CacheMode: TypeAlias = Literal["upstream", "keep"]
KeepCheckpoints: TypeAlias = Literal["all", "last", "none"]

NO_LIMIT: Final = -1
"""As `limit_bytes`: as much as `NO_LIMIT_SHARE` of the memory that is available now."""
NO_LIMIT_SHARE: Final = 0.5
SHRINK: Final = 0.4
"""What is left of the cache as its limit after an allocation failed."""
_LEVELS: Final[tuple[KeepCheckpoints, ...]] = ("all", "last", "none")


class PromptCache:
    """Whole prompts by their tokens. See the module for what the two modes are.

    One thread at a time, the owner of the context whose states it keeps.

    Args:
        limit_bytes: The limit; 0 keeps nothing and finds nothing, -1 stands for half of the
            memory that is available now (a warning says how much that is).
        limit_tokens: The limit on the tokens of all entries, raised when the bytes have room for
            more; None or 0 for none. llama-server sets it to the size of its context.
        policy: Which entry goes first, a name of the kind ``prompts`` or an object.
        mode: `upstream` or `keep`.
        checkpoints: How many of a slot's checkpoints go into an entry: all, the last, none.
        lists_entries: Whether each update reports every entry, as llama-server's log does. That is
            a pass over them for each request; an eviction is the only other one.
        refresh_on_hit: A hit makes the entry the youngest, for policies that go by age too. For
            mode `keep`: an entry that moves out has no age.
        emit: Takes events.
        clock: Seconds.

    Attributes:
        counters: How often what happened: `saved`, `cached`, `refused`, `trimmed` (stored with
            fewer checkpoints), `evicted`, `obsolete`, `hits`, `misses`, `no_memory`, `failed_save`,
            `failed_load`.
        on_evicted: Hears of the namespace and the tokens of each entry that goes to make room;
            None for nobody.

    Raises:
        InvalidValue: For an argument that is none of these.
    """

    def __init__(
        self,
        limit_bytes: int,
        limit_tokens: int | None = None,
        *,
        policy: str | Policy = "oldest",
        mode: CacheMode = "upstream",
        checkpoints: KeepCheckpoints = "all",
        lists_entries: bool = True,
        refresh_on_hit: bool = False,
        emit: Emit = log,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        whole_number("limit_bytes", limit_bytes, NO_LIMIT)
        if mode not in ("upstream", "keep"):
            raise InvalidValue(f"mode must be upstream or keep, not {mode!r}")
        if checkpoints not in _LEVELS:
            raise InvalidValue(f"checkpoints must be {', '.join(_LEVELS)}, not {checkpoints!r}")
        if limit_bytes == NO_LIMIT:
            limit_bytes = max(1, int(NO_LIMIT_SHARE * psutil.virtual_memory().available))
            logger.warning("a prompt cache without a limit may take %s bytes", f"{limit_bytes:,}")
        self.limit_tokens = whole_number("limit_tokens", limit_tokens or 0, 0)
        self.mode: CacheMode = mode
        self.policy = get_policy(policy, "prompts")
        self.counters: dict[str, int] = {}
        self.on_evicted: Callable[[bytes, IntArray], None] | None = None
        self._limit_bytes = limit_bytes
        self._budget = ByteBudget(limit_bytes)
        self._keep_checkpoints: KeepCheckpoints = checkpoints
        self._lists_entries = lists_entries
        self._refresh_on_hit = refresh_on_hit
        self._emit_to = emit
        self._heard_by: Emit | None = None
        self._clock = clock
        self._entries = EntryList()
        self._pending: Entry | None = None
        self._sequence = 0

    def __repr__(self) -> str:
        return f"PromptCache({len(self._entries)} prompts, {self._budget!r}, {self.mode})"

    def __len__(self) -> int:
        return len(self._entries)

    def __bool__(self) -> bool:
        """A cache is there even when it is empty."""
        return True

    def __iter__(self) -> Iterator[Entry]:
        """Yield the entries that are there now, oldest first."""
        return iter(self._entries)

    @property
    def enabled(self) -> bool:
        """Whether anything can be kept."""
        return self._limit_bytes > 0

    @property
    def limit_bytes(self) -> int:
        """The limit now; it falls when memory could not be allocated, and `resize` raises it."""
        return self._limit_bytes

    @property
    def used_bytes(self) -> int:
        """What is kept, with what is being read now."""
        return self._budget.used_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that was ever kept."""
        return self._budget.peak_bytes

    @property
    def n_tokens(self) -> int:
        """Tokens of all entries."""
        return self._entries.n_tokens

    def _emit(self, event: Event) -> None:
        if self._heard_by is not None:
            self._heard_by(event)
        self._emit_to(event)

    @contextmanager
    def heard_by(self, listener: Emit) -> Iterator[None]:
        """Let `listener` hear the events of this block too."""
        before = self._heard_by
        try:
            self._heard_by = listener
            yield
        finally:
            self._heard_by = before

    def resize(self, limit_bytes: int) -> None:
        """Set another limit (0 or more, in bytes); what does not fit any more is evicted.

        An entry that waits to be filled is cancelled: it was allocated under the other limit.

        Raises:
            InvalidValue: For a negative one; nothing is changed.
        """
        self._limit_bytes = whole_number("limit_bytes", limit_bytes, 0)
        if self._pending is not None:
            self._drop_pending()
        self.update()

    def clear(self) -> None:
        """Forget all entries, one that waits to be filled too."""
        for entry in self:
            self._remove(entry)
        self._drop_pending()

    # -- saving ------------------------------------------------------------------------------------

    def save(
        self,
        runtime: Runtime,
        seq_id: int,
        tokens: TokensLike,
        checkpoints: CheckpointList | None = None,
        *,
        namespace: bytes = b"",
    ) -> Saving:
        """Keep what a sequence holds; the sequence is unchanged.

        Args:
            runtime: Holds the sequence, and its draft model's if there is one. A draft that does
                not hold the same number of tokens is left out.
            seq_id: Which sequence.
            tokens: What it holds; copied.
            checkpoints: Its checkpoints; their data are shared.
            namespace: Entries are found in the same namespace only.

        An entry that still waits to be filled is cancelled first.

        Raises:
            TokenError: For what are no tokens.

        Returns:
            What became of it. A runtime that fails, or memory that is not there, is no exception:
            the cache is as it was, but for what made room. Costs a copy of the state.
        """
        tokens = as_tokens(tokens)
        if not self.enabled or not tokens.size:
            return Saving.NOTHING
        n_tokens, draft = int(tokens.size), self._draft_of(runtime, seq_id, int(tokens.size))
        if self._pending is not None:
            self._drop_pending()  # left by an interrupt: with one thread nobody waits meanwhile
        try:
            state_bytes = whole_bytes(runtime, seq_id, n_tokens)
            draft_bytes = whole_bytes(draft, seq_id, n_tokens) if draft is not None else 0
            self._emit(SavingPrompt(state_bytes + draft_bytes, n_tokens, draft_bytes))
            result, entry = self.alloc(
                tokens,
                state_bytes,
                draft_bytes,
                checkpoints,
                rolling=runtime.traits.rolling,
                namespace=namespace,
            )
            if entry is None:
                return result
            state = read_whole(runtime, seq_id, n_tokens)
            drafted = read_whole(draft, seq_id, n_tokens) if draft is not None else None
            self.fill(entry, state, drafted)
        except MemoryError as error:
            self._out_of_memory(error)
            return Saving.NO_MEMORY
        except StateError as error:
            self._drop_pending()
            self._count("failed_save")
            logger.warning("a prompt could not be saved: %s", error)
            return Saving.FAILED
        except BaseException:
            self._drop_pending()
            raise
        return Saving.SAVED

    def _draft_of(self, runtime: Runtime, seq_id: int, n_tokens: int) -> Runtime | None:
        """Return the draft model's runtime, if it holds these tokens; it can do without them."""
        draft = runtime.draft
        if draft is None:
            return None
        held = draft.positions(seq_id).n_tokens
        if held == n_tokens:
            return draft
        logger.warning("saved without the draft, which holds %d of %d tokens", held, n_tokens)
        return None

    def alloc(
        self,
        tokens: TokensLike,
        state_bytes: int,
        draft_bytes: int = 0,
        checkpoints: CheckpointList | None = None,
        *,
        rolling: bool = False,
        namespace: bytes = b"",
    ) -> Allocated:
        """Make room for an entry, in llama-server's order: refuse before anything is evicted.

        Nothing is done when an entry contains the prompt already (in mode `keep` and with rolling
        memory: and all the checkpoints it would be stored with), or when the new one alone is
        above the limit. Else entries that are prefixes of it go, then others by the policy, until
        there is room, which is taken. The entry counts, but is not found before it is filled.

        Returns:
            The entry, for `fill` or `cancel`; or why there is none.

        Raises:
            InvalidValue: While another entry waits to be filled.
        """
        if self._pending is not None:
            raise InvalidValue("an entry is waiting to be filled: fill or cancel it first")
        tokens = as_tokens(tokens)
        if not self.enabled:
            return Allocated(Saving.NOTHING)
        new = Entry(tokens, 0, rolling=rolling, namespace=namespace)
        fits, fewer = self._fit(new, state_bytes + draft_bytes, checkpoints)
        if any(self._is_enough(entry, new) for entry in self._entries.containing(new)):
            self._count("cached")
            self._emit(AlreadyCached())
            return Allocated(Saving.CACHED)
        if not fits:
            self._count("refused")
            self._emit(OverLimitSkipped(new.n_bytes, self._limit_bytes))
            return Allocated(Saving.REFUSED)
        if fewer:
            self._count("trimmed")
        for entry in self._entries.prefixes(new):
            if self._is_obsolete(entry, new):
                self._count("obsolete")
                self._emit(ObsoleteRemoved(entry.n_tokens))
                self._remove(entry)
        while self._entries and self.used_bytes + new.n_bytes > self._limit_bytes:
            self._evict(lambda entry: EvictedForRoom(entry.n_bytes))
        self._pending = new
        try:
            self._budget.reserve(new.n_bytes)
        except BaseException:
            self._drop_pending()
            raise
        return Allocated(Saving.SAVED, new)

    def fill(self, entry: Entry, state: Whole, draft: Whole | None = None) -> None:
        """Give an allocated entry its states, and let it be found.

        Raises:
            InvalidValue: For an entry that is not the one waiting: filled, cancelled, or none of
                this cache's; nothing is changed.
            StateError: When they are not of the size that was allocated; `cancel` the entry then.
        """
        if entry is not self._pending:
            raise InvalidValue(f"{entry!r} is not waiting to be filled")
        held = entry.checkpoints.n_bytes if entry.checkpoints is not None else 0
        n_bytes = state.n_bytes + (draft.n_bytes if draft is not None else 0) + held
        if n_bytes != entry.n_bytes:
            raise StateError(f"a prompt of {n_bytes:,} bytes was to have {entry.n_bytes:,}")
        entry.state, entry.draft = state, draft
        entry.created = entry.last_used = self._clock()
        entry.sequence = self._sequence
        entry.marginal = self._marginal
        self._sequence += 1
        self._entries.add(entry)
        self._pending = None
        self._count("saved")

    def cancel(self, entry: Entry) -> None:
        """Give back what was taken for an entry that will not be filled."""
        if self._pending is entry:
            self._drop_pending()

    def _drop_pending(self) -> None:
        """Forget the entry that waits to be filled, if there is one."""
        self._pending = None
        self._recount()

    def _recount(self) -> None:
        """Count what is kept: an interrupt may fall between an entry and its bytes."""
        pending = [self._pending] if self._pending not in (None, *self._entries) else []
        kept = sum(each.n_bytes for each in (*self._entries, *pending) if each is not None)
        extra = self._budget.used_bytes - kept
        if extra > 0:
            self._budget.release(extra)
        elif extra < 0:
            self._budget.reserve(-extra)

    def _fit(
        self, new: Entry, state_bytes: int, checkpoints: CheckpointList | None
    ) -> tuple[bool, bool]:
        """Choose the checkpoints of an entry; return whether it fits, and if so with fewer."""
        first = _LEVELS.index(self._keep_checkpoints)
        levels = _LEVELS[first:] if self.mode == "keep" else _LEVELS[first : first + 1]
        for level in levels:
            kept = checkpoints.copy(level) if checkpoints is not None else None
            n_bytes = state_bytes + (kept.n_bytes if kept is not None else 0)
            if level == levels[0]:
                new.n_bytes = n_bytes  # what a refusal reports
            if n_bytes <= self._limit_bytes:
                new.n_bytes, new.checkpoints = n_bytes, kept
                return True, level != levels[0]
        return False, False

    def _is_enough(self, entry: Entry, new: Entry) -> bool:
        """Return whether `entry`, which begins with all of `new`, makes it needless."""
        return self.mode == "upstream" or not entry.rolling or new.places() <= entry.places()

    def _is_obsolete(self, entry: Entry, new: Entry) -> bool:
        """Return whether `new`, which begins with all of `entry`, makes that needless."""
        return self.mode == "upstream" or not entry.rolling or entry.places() <= new.places()

    def _out_of_memory(self, error: MemoryError) -> None:
        """Do as llama-server when an allocation fails: less from now on."""
        self._drop_pending()
        self._count("no_memory")
        self._emit(AllocationFailed(reason(error)))
        self._limit_bytes = max(1, int(SHRINK * self.used_bytes))
        self._emit(LimitReduced(self._limit_bytes))
        self.update()

    # -- loading -----------------------------------------------------------------------------------

    def load(
        self,
        runtime: Runtime,
        seq_id: int,
        held: TokensLike,
        prompt: TokensLike,
        *,
        reach: int | None = None,
        most: int | None = None,
        namespace: bytes = b"",
        take: bool = True,
    ) -> Loaded:
        """Put the entry that serves `prompt` best into a sequence, if it beats what is there.

        Args:
            runtime: Holds the sequence.
            seq_id: Which sequence; what it held is gone when something is restored.
            held: What it holds.
            prompt: The request.
            reach: How much of it the sequence can resume by itself (mode `keep`); the common
                prefix if not given.
            most: Tokens that may be restored at most (mode `keep`); all but one if not given.
            namespace: As in `save`.
            take: In mode `upstream`, whether the entry moves out; if not, it is copied as in
                `keep`.

        Returns:
            Restored, no match (the sequence is as it was) or failed (it is empty), which is what
            becomes of an error of the runtime and of memory that is not there. In mode
            `upstream` the entry moves out when it is restored, and stays when that fails. In mode
            `keep` it stays, unless its own bytes are to blame. Costs what
            `EntryList` says, and the restore.
        """
        held, prompt = as_tokens(held), as_tokens(prompt)
        if not self.enabled:
            return Loaded(Loading.NO_MATCH)
        reach = common_prefix(held, prompt) if reach is None else reach
        most = int(prompt.size) - 1 if most is None else most
        entry, n_tokens = self._choose(held, prompt, reach, most, namespace)
        if entry is None or entry.state is None:
            self._count("misses")
            return Loaded(Loading.NO_MATCH)
        try:
            self._restore(runtime, seq_id, entry, n_tokens)
        except (StateError, MemoryError) as error:
            self._count("failed_load")
            logger.warning("a cached prompt could not be restored: %s", reason(error))
            runtime.clear(seq_id)
            if runtime.draft is not None:
                runtime.draft.clear(seq_id)
            if self.mode == "keep" and getattr(error, "refused", None) is not None:
                self._remove(entry)
            cleared_all = bool(getattr(error, "cleared_all", False))
            return Loaded(Loading.FAILED, cleared_all=cleared_all)
        self._count("hits")
        checkpoints = entry.checkpoints
        if self.mode == "upstream" and take:
            self._remove(entry)
        else:
            self._use(entry, n_tokens)
            checkpoints = checkpoints.copy() if checkpoints is not None else None
        return Loaded(Loading.RESTORED, entry.tokens[:n_tokens], checkpoints)

    def _choose(
        self, held: IntArray, prompt: IntArray, reach: int, most: int, namespace: bytes
    ) -> tuple[Entry | None, int]:
        """Return the best entry and how many of its tokens to restore."""
        common = common_prefix(held, prompt)
        keep = ratio(common, held.size) if held.size else -1.0
        self._emit(LoadBase(keep, ratio(common, prompt.size)))
        if self.mode == "upstream":
            shared, best = self._entries.best_by_ratios(namespace, prompt, common, keep)
            n_tokens = best.n_tokens if best is not None else 0
        else:
            shared, best, n_tokens = self._entries.deepest(namespace, prompt, reach, most)
        if best is not None:
            self._emit(LoadFound(ratio(shared, best.n_tokens), ratio(shared, prompt.size)))
        return best, n_tokens

    def _restore(self, runtime: Runtime, seq_id: int, entry: Entry, n_tokens: int) -> None:
        if entry.state is None:
            raise IntegrityError(f"{entry!r} was never filled")
        checkpoint = entry.state.checkpoint
        if entry.rolling and n_tokens < entry.n_tokens:
            checkpoint = entry.checkpoint_at(n_tokens)
        runtime.restore(seq_id, n_tokens, entry.state.segments_to(n_tokens), checkpoint)
        draft, state = runtime.draft, entry.draft
        if draft is None:
            return
        if state is None or (state.checkpoint is not None and n_tokens < state.n_tokens):
            draft.clear(seq_id)  # its owner evaluates the prompt again
        else:
            draft.restore(seq_id, n_tokens, state.segments_to(n_tokens), state.checkpoint)

    def _use(self, entry: Entry, n_tokens: int) -> None:
        """Record a hit."""
        entry.hits += 1
        entry.last_used = self._clock()
        for kept in entry.checkpoints or ():
            if kept.n_tokens == n_tokens < entry.n_tokens:
                kept.hits += 1
                kept.last_used = entry.last_used
        if self._refresh_on_hit:
            self._sequence += 1
            entry.created, entry.sequence = entry.last_used, self._sequence - 1

    # -- keeping it small --------------------------------------------------------------------------

    def update(self) -> None:
        """Evict until both limits hold, and report what is left.

        First the bytes. The limit on tokens then in force is the larger of the one that was set
        and what the bytes would have room for, at the average size of a token in the cache. So
        while there is a limit on bytes, the one on tokens is never the tighter one; llama-server
        rounds to single precision on the way, and at times evicts an entry because of that.
        """
        while self._entries and self.used_bytes > self._limit_bytes:
            self._evict(lambda entry: EvictedOverLimit(entry.n_bytes))
        if self._budget.capacity_bytes != self._limit_bytes:
            self._budget.resize(self._limit_bytes)
        limit = self._token_limit()
        while self.limit_tokens and self._entries and self.n_tokens > limit:
            self._evict(lambda e: EvictedOverTokenLimit(e.n_bytes, self.limit_tokens, limit))
        if not self.enabled:
            return
        self._emit(
            CacheState(
                self.used_bytes, len(self._entries), self._limit_bytes, self.limit_tokens, limit
            )
        )
        if not self._is_listed():
            return
        for entry in self._entries:
            name, count = f"{entry.sequence:#x}", entry.n_checkpoints
            self._emit(CachedPrompt(entry.n_bytes, name, entry.n_tokens, count))

    def _is_listed(self) -> bool:
        """Return whether anybody hears of each entry, after each update."""
        if not self._lists_entries:
            return False
        return self._heard_by is not None or self._emit_to is not log or is_logged()

    def _token_limit(self) -> int:
        """Return the limit on tokens that is in force."""
        used, n_tokens, limit = self.used_bytes, max(1, self.n_tokens), self._limit_bytes
        if self.mode == "keep":
            raised = limit * n_tokens // max(used, n_tokens)
        else:
            per_token = max(np.float32(1), np.float32(used) / np.float32(n_tokens))
            raised = int(np.float32(limit) / per_token)
        return max(self.limit_tokens, raised)

    def _evict(self, event: Callable[[Entry], Event]) -> None:
        """Evict the entry that the policy ranks first; costs one pass over the entries."""
        now = self._clock()
        entry = min(self._entries, key=lambda entry: self.policy.rank(entry, now))
        self._count("evicted")
        if self.on_evicted is not None:
            self.on_evicted(entry.namespace, entry.tokens)
        self._emit(event(entry))
        self._remove(entry)

    def _remove(self, entry: Entry) -> None:
        try:
            self._entries.remove(entry)
            self._budget.release(entry.n_bytes)
        except BaseException:
            self._recount()
            raise

    def _marginal(self, entry: Entry) -> int:
        """Return what no other entry could resume of this one."""
        return entry.n_tokens - self._entries.reached_by_others(entry)

    def _count(self, what: str) -> None:
        self.counters[what] = self.counters.get(what, 0) + 1

    def check(self) -> None:
        """Compare the count of bytes with what is there.

        Raises:
            IntegrityError: With both numbers, or the entry that is half there.
        """
        total = self._pending.n_bytes if self._pending is not None else 0
        for entry in self._entries:
            if entry.state is None or entry.state.n_tokens != entry.n_tokens:
                raise IntegrityError(f"{entry!r} has no state of its tokens")
            held = entry.state.n_bytes + (entry.draft.n_bytes if entry.draft is not None else 0)
            held += entry.checkpoints.n_bytes if entry.checkpoints is not None else 0
            if held != entry.n_bytes:
                raise IntegrityError(f"{entry!r} holds {held:,} bytes")
            total += held
        self._entries.check()
        if total != self.used_bytes:
            raise IntegrityError(f"{self.used_bytes:,} bytes are counted, {total:,} are kept")
        if self._pending is None and total > self._limit_bytes:
            raise IntegrityError(f"{total:,} bytes are kept, above {self._limit_bytes:,}")
