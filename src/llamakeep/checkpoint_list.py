"""The checkpoints of one slot of a server, by llama-server's rules or by better ones."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from llamakeep import events
from llamakeep.budget import ByteBudget
from llamakeep.checkpoints import MIN_EVALUATED, deepest_resume, positions_to_take
from llamakeep.errors import IntegrityError, InvalidValue, whole_number
from llamakeep.listed import (
    NEAR_END_TOKENS,
    NEIGHBOUR_POLICIES,
    AnyCheckpoint,
    ListedCheckpoint,
    Resume,
    deepest_of,
    far_enough,
    is_whole,
    link,
    prefix_digest,
    prefixes_of,
    unprotected,
    upstream_choice,
    upstream_splits,
)
from llamakeep.policy import Policy, get_policy
from llamakeep.states import DeviceCheckpoint
from llamakeep.tokens import IntArray

Keep: TypeAlias = Literal["all", "last", "none"]
Restore: TypeAlias = Literal["upstream", "exact", "prefix"]

_Dropped: TypeAlias = "events.CheckpointEvictedClose | events.CheckpointEvictedOldest"


@dataclass(frozen=True, slots=True)
class _Asked:
    """What `CheckpointList.resume` is asked, with nothing left open."""

    common: int
    prompt: IntArray
    pos_next: int
    live_pos_min: int
    n_swa: int
    n_new: int
    at_end: bool
    n_rows: int

    @classmethod
    def of(
        cls,
        common: int,
        prompt: IntArray,
        pos_next: int | None,
        live_pos_min: int,
        n_swa: int,
        n_new: int | None,
        n_live: int | None,
        n_rows: int | None,
    ) -> _Asked:
        n_prompt = int(prompt.size)
        if not 0 <= common <= n_prompt or not n_prompt:
            raise InvalidValue(f"{common} tokens in common with a prompt of {n_prompt}")
        if common and live_pos_min < 0:
            raise InvalidValue(f"{common} tokens in common with an empty sequence")
        return cls(
            common,
            prompt,
            common if pos_next is None else pos_next,
            live_pos_min,
            n_swa,
            n_prompt - common if n_new is None else n_new,
            n_live is not None and n_live == common,
            min(n_prompt, max(common, n_rows or 0)),
        )

    @property
    def n_prompt(self) -> int:
        return int(self.prompt.size)

    def left_to_do(self, n_past: int) -> int:
        """Return the known tokens without the last of a prompt that is known to its end."""
        return n_past - (0 < n_past == self.n_prompt)


class CheckpointList:
    """The checkpoints of one slot: which to take, keep, restore and drop.

    Pure bookkeeping: no method calls a runtime. Three modes of restoring:

    - ``upstream`` does what llama-server does, its faults included. The rules are those of the
      notes on checkpoint eviction. What they leave open is said at each method, as the recording
      of a hybrid model shows it; what that does not decide, as the source of the recorded build
      has it (see `llamakeep.listed`). A checkpoint counts as covering all of [pos_min, pos_max].
    - ``exact`` takes a checkpoint at the common prefix and no other.
    - ``prefix`` takes the deepest checkpoint whose tokens are a prefix of the prompt.

    The last two restore a window only where it is proven to be whole, take checkpoints where
    `positions_to_take` says so, and drop a checkpoint as soon as its tokens are not the prompt's.

    One thread at a time. Every call costs O(limit), `resume` in the other modes also one hash of
    the prompt up to the deepest checkpoint.

    Args:
        limit: Most checkpoints; 0 turns them off: nothing is wanted, nothing is kept.
        min_step: Tokens between checkpoints at user messages.
        limit_bytes: Most bytes of their states; None for no limit, 0 turns them off. One that is
            larger is refused, and nothing is dropped for it; in the other modes no more are wanted
            then until the next prompt.
        restore: The mode.
        policy: Which goes when there is no room, a name or an object with a `rank` method;
            None means ``upstream`` in the mode of that name, ``neighbor-gap`` in the others.
        min_evaluated: Tokens of a prompt that are evaluated at least, in the other modes.
        emit: Takes each event.
        clock: Seconds.

    Raises:
        InvalidValue: For an unknown mode or policy, and for a negative number. -1 is not "no
            limit" here: a list without one would take all of the host.
    """

    def __init__(
        self,
        limit: int = 32,
        min_step: int = 8192,
        limit_bytes: int | None = None,
        *,
        restore: Restore = "upstream",
        policy: str | Policy | None = None,
        min_evaluated: int = MIN_EVALUATED,
        emit: events.Emit = events.log,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if restore not in ("upstream", "exact", "prefix"):
            raise InvalidValue(f"restore must be upstream, exact or prefix, not {restore!r}")
        if policy is None:
            policy = "upstream" if restore == "upstream" else "neighbor-gap"
        self.limit = whole_number("limit", limit, 0)
        self.min_step = whole_number("min_step", min_step, 0)
        self.restore = restore
        self._policy = get_policy(policy, "checkpoints")
        self._policy_name = str(getattr(self._policy, "name", type(self._policy).__name__))
        self._min_evaluated = whole_number("min_evaluated", min_evaluated, 1)
        self._emit = emit
        self._clock = clock
        capacity = sys.maxsize if limit_bytes is None else limit_bytes
        self._budget = ByteBudget(whole_number("limit_bytes", capacity, 0))
        self._items: list[ListedCheckpoint] = []
        self._sequence = 0
        self._n_prompt = 0
        self._branch = 0
        self._refused = False

    def __repr__(self) -> str:
        at = [item.n_tokens for item in self._items]
        return f"CheckpointList({self.restore}, {self._policy_name}, at {at} of {self.limit})"

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[ListedCheckpoint]:
        """Go through the checkpoints, oldest first."""
        return iter(tuple(self._items))

    def __bool__(self) -> bool:
        """A list is there even when it is empty."""
        return True

    @property
    def policy_name(self) -> str:
        """Which goes first when there is no room."""
        return self._policy_name

    @property
    def n_bytes(self) -> int:
        """What all states occupy in RAM."""
        return self._budget.used_bytes

    @property
    def limit_bytes(self) -> int:
        """The most they may occupy."""
        return self._budget.capacity_bytes

    # -- where -------------------------------------------------------------------------------------

    def wants(
        self,
        n_tokens: int,
        *,
        n_prompt: int,
        n_ubatch: int,
        user_starts: Sequence[int] = (),
        batch_end: int | None = None,
        media_before: bool = False,
    ) -> bool:
        """Return whether to take a checkpoint now, with a batch ready but not yet evaluated.

        llama-server decides before each batch, for the position where the batch starts: it must
        be the start of a user message, or the batch must end within `n_ubatch` of the prompt's
        end (strictly; it is the batch's end that counts, not the checkpoint's position). Then it
        is taken if the list is empty, at the last user message, near the end, or more than
        `min_step` past the checkpoint added last. An empty list alone is no reason, and at 0
        there is nothing to take.

        In the other modes it is taken at the positions of `split_points`, and where the prompt
        resumes if such a position is there, unless the list has one there already.

        Args:
            n_tokens: Tokens evaluated so far.
            n_prompt: Length of the prompt.
            n_ubatch: The physical batch, in tokens.
            user_starts: Positions where a user message starts, ascending.
            batch_end: Where the batch that comes next ends; None for the prompt's end.
            media_before: A picture or sound stands before; then nothing is wanted.
        """
        whole_number("n_ubatch", n_ubatch, 1)
        self._n_prompt = n_prompt
        if self._is_off or media_before or not 0 < n_tokens < n_prompt:
            return False
        if self.restore != "upstream":
            return n_tokens in self._positions(n_tokens - 1, n_prompt, user_starts)
        end = n_prompt if batch_end is None else batch_end
        near_end = n_prompt < end + n_ubatch
        if near_end:
            return True
        return n_tokens in user_starts and far_enough(
            n_tokens, user_starts, self._newest(), self.min_step
        )

    def split_points(
        self,
        n_past: int,
        n_prompt: int,
        *,
        n_batch: int,
        n_ubatch: int,
        user_starts: Sequence[int] = (),
        media_at: int | None = None,
    ) -> list[int]:
        """Return where the batches of a prefill must end, besides where they are full.

        llama-server ends a batch at the last user message, at other user messages when the list
        is empty or they are more than `min_step` past the checkpoint added last (by what is in
        the list when the batch is filled, before the batch's own checkpoint), and
        min(`n_batch`, 4 + `n_ubatch`) and 4 tokens before the prompt's end. Two of these splits may
        bring no checkpoint: the second user message of a prompt that begins with an empty list,
        when both lie in one batch's reach (the first one's is not in the list yet); and the
        farther one near the end, when a user message cuts the batch behind it short (that batch
        ends too far from the end).

        In the other modes: exactly where a checkpoint is taken.

        Args:
            n_past: Tokens that need no evaluation.
            n_prompt: Length of the prompt.
            n_batch: Most tokens of a batch.
            n_ubatch: The physical batch.
            user_starts: Positions where a user message starts, ascending.
            media_at: Position of the first picture or sound; nothing is split past it, in any
                mode. (llama-server holds back only the checkpoint right behind one.)

        Returns:
            Ascending positions in (n_past, n_prompt). No checkpoint is changed.
        """
        whole_number("n_batch", n_batch, 1)
        whole_number("n_ubatch", n_ubatch, 1)
        self._n_prompt = n_prompt
        if self._is_off:
            return []
        if self.restore == "upstream":
            splits = upstream_splits(
                n_past,
                n_prompt,
                n_batch=n_batch,
                n_ubatch=n_ubatch,
                user_starts=user_starts,
                newest=self._newest(),
                min_step=self.min_step,
            )
        else:
            # One taken where the prompt goes on counts as a step, though nothing is split there.
            due = self._positions(max(0, n_past - 1), n_prompt, user_starts)
            splits = [position for position in due if position > n_past]
        return [split for split in splits if media_at is None or split <= media_at]

    def _positions(self, resume: int, n_prompt: int, user_starts: Sequence[int]) -> list[int]:
        if self._refused:
            return []
        return positions_to_take(
            n_prompt,
            resume,
            align=1,
            min_step=self.min_step,
            user_starts=user_starts,
            branch=self._branch,
            present=[item.n_tokens for item in self._items],
            min_evaluated=self._min_evaluated,
        )

    @property
    def _is_off(self) -> bool:
        return not self.limit or not self.limit_bytes

    def _newest(self) -> int | None:
        return self._items[-1].n_tokens if self._items else None

    # -- adding ------------------------------------------------------------------------------------

    def create(
        self,
        data: AnyCheckpoint,
        *,
        id_task: int,
        pos_min: int,
        pos_max: int,
        n_tokens: int,
        tokens: IntArray,
        prompt_end: bool | None = None,
    ) -> bool:
        """Add a checkpoint that has been read already; see `take`."""
        if data.position != n_tokens:
            raise InvalidValue(f"the checkpoint is at {data.position}, not at {n_tokens}")
        return self.take(
            int(data.data.nbytes),
            lambda: data,
            id_task=id_task,
            pos_min=pos_min,
            pos_max=pos_max,
            n_tokens=n_tokens,
            tokens=tokens,
            prompt_end=prompt_end,
        )

    def take(
        self,
        n_bytes: int,
        read: Callable[[], AnyCheckpoint],
        *,
        id_task: int,
        pos_min: int,
        pos_max: int,
        n_tokens: int,
        tokens: IntArray,
        prompt_end: bool | None = None,
    ) -> bool:
        """Make room for a checkpoint, count it, read it and add it.

        With policy ``upstream`` room is made in three steps. When the list is full or one short
        of it, checkpoints of other tasks go that are at most `min_step` past the one kept before
        them in the list (the first stays; the current task's stay, so both near-end checkpoints
        of one task may live side by side). While it is still full, the oldest goes. Then what is
        at the same `n_tokens`. The steps do not look ahead: for a checkpoint that replaces one,
        others may go as well. Bytes, which llama-server does not limit, make the oldest go too.

        With the others, one at the same position is replaced first; then the policy's first goes
        while the list is full, the new one counting as a neighbour. The neighbour policies spare
        the first and the last by position and the newest at a prompt's end while another is left.

        Args:
            n_bytes: The exact size of what `read` returns.
            read: Reads it; called once, after room was made. What it raises goes through; the
                checkpoint is not added then, and what was dropped stays dropped.
            id_task: The task.
            pos_min: The first position that the sequence holds.
            pos_max: The last one.
            n_tokens: Tokens evaluated.
            tokens: These tokens, at least; what is past `n_tokens` is not looked at.
            prompt_end: Taken close to a prompt's end; None for: at most 4 tokens before the end
                of the prompt that was spoken of last.

        Returns:
            Whether it is in the list now: not with a limit of 0, nor when it alone is larger than
            `limit_bytes`; then nothing was read and nothing dropped.

        Raises:
            InvalidValue: For positions or tokens that do not fit together.
            IntegrityError: When `read` returns another size or position than it was said.
        """
        if not 0 < n_tokens <= tokens.size or not 0 <= pos_min <= pos_max:
            raise InvalidValue(
                f"no checkpoint of {n_tokens} tokens at positions {pos_min} to {pos_max} with "
                f"{tokens.size} tokens known"
            )
        if self._is_off:
            return False
        if n_bytes > self._budget.capacity_bytes:
            self._refused = True
            self._emit(
                events.CheckpointRefused(n_bytes, pos_min, pos_max, n_tokens, self.limit_bytes)
            )
            return False
        if prompt_end is None:
            prompt_end = 0 <= self._n_prompt - n_tokens <= NEAR_END_TOKENS
        self._make_room(n_bytes, n_tokens, id_task, prompt_end)
        try:
            self._budget.reserve(n_bytes)
            data = read()
            if (data.position, data.data.nbytes) != (n_tokens, n_bytes):
                raise IntegrityError(
                    f"read {data.data.nbytes:,} bytes at {data.position}, "
                    f"not {n_bytes:,} at {n_tokens}"
                )
            self._drop_overwritten(data)
            self._sequence += 1
            now = self._clock()
            self._items.append(
                ListedCheckpoint(
                    data=data,
                    id_task=id_task,
                    pos_min=pos_min,
                    pos_max=pos_max,
                    n_tokens=n_tokens,
                    prefix=prefix_digest(tokens[:n_tokens]),
                    prompt_end=prompt_end,
                    sequence=self._sequence,
                    created=now,
                    last_used=now,
                )
            )
        except BaseException:
            self._recount()
            raise
        link(self._items, self._n_prompt)
        self._emit(
            events.CheckpointCreated(
                n_bytes, pos_min, pos_max, n_tokens, len(self._items), self.limit
            )
        )
        return True

    def _make_room(self, n_bytes: int, n_tokens: int, id_task: int, prompt_end: bool) -> None:
        if self._policy_name == "upstream":
            self._drop_close(id_task)
            while self._is_full(n_bytes):
                self._evict(n_tokens, prompt_end)
            self._supersede(n_tokens)
            return
        self._supersede(n_tokens)
        while self._is_full(n_bytes):
            self._evict(n_tokens, prompt_end)

    def _evict(self, coming: int, coming_is_end: bool) -> None:
        """Drop the one that the policy ranks first, for one that will be at `coming`."""
        if self._policy_name == "upstream":
            self._drop(self._items[0], events.CheckpointEvictedOldest)
            return
        link(self._items, self._n_prompt, coming)
        candidates: Sequence[ListedCheckpoint] = self._items
        if self._policy_name in NEIGHBOUR_POLICIES:
            candidates = unprotected(self._items, coming, coming_is_end)
        now = self._clock()
        victim = min(candidates, key=lambda item: self._policy.rank(item, now))
        self._remove(victim)
        self._emit(
            events.CheckpointEvicted(
                victim.n_bytes,
                victim.pos_min,
                victim.pos_max,
                victim.n_tokens,
                self._policy_name,
            )
        )

    def _is_full(self, n_bytes: int) -> bool:
        return len(self._items) >= self.limit or n_bytes > self._budget.free_bytes

    def _drop_close(self, id_task: int) -> None:
        kept: int | None = None
        for item in tuple(self._items):
            if len(self._items) + 1 < self.limit:
                return
            close = kept is not None and item.n_tokens <= kept + self.min_step
            if close and item.id_task != id_task:
                self._drop(item, events.CheckpointEvictedClose)
            else:
                kept = item.n_tokens

    def _supersede(self, n_tokens: int) -> None:
        for item in tuple(self._items):
            if item.n_tokens == n_tokens:
                self._remove(item)
                self._emit(events.CheckpointSuperseded(n_tokens))

    def _drop_overwritten(self, data: AnyCheckpoint) -> None:
        """Drop what a newer device checkpoint of the same sequence has overwritten."""
        if not isinstance(data, DeviceCheckpoint):
            return
        for item in tuple(self._items):
            old = item.data
            if isinstance(old, DeviceCheckpoint) and (old.context, old.seq_id) == (
                data.context,
                data.seq_id,
            ):
                self._invalidated(item, 0, data.position)

    # -- restoring ---------------------------------------------------------------------------------

    def resume(
        self,
        tokens_common: int,
        prompt: IntArray,
        *,
        pos_next: int | None = None,
        live_pos_min: int,
        n_swa: int = 0,
        n_new: int | None = None,
        n_live: int | None = None,
        n_rows: int | None = None,
        commit: bool = True,
    ) -> Resume:
        """Find where a prompt goes on, record the hit, and drop what the prompt makes untrue.

        llama-server looks for a checkpoint when tokens are in common and the live memory starts
        at or behind the threshold max(0, pos_next - n_swa - (0 if new tokens follow else 1)). It
        takes the newest with pos_max <= pos_next and pos_min below the threshold or 0, and goes
        on at min(pos_next, max(pos_min + 1, pos_max)), at most at its n_tokens. None: everything
        is evaluated. Then every checkpoint with pos_max > pos_next goes; without common tokens
        that is done too, and the search is not. Last, a prompt that is known to its end has its
        last token evaluated again.

        The other modes go on at what is live where it can be cut there, and else at a checkpoint
        of the prompt's own tokens; they leave `min_evaluated` tokens. What is not of the prompt's
        tokens goes, whatever its position; what is stays, also behind where the prompt goes on.

        Args:
            tokens_common: Tokens that the prompt shares with those of the slot.
            prompt: All of the prompt.
            pos_next: The position after them; None for `tokens_common`.
            live_pos_min: The first position that the slot's sequence holds; -1 when empty.
            n_swa: The window in tokens; 0 without one, and where its rows are all kept.
            n_new: Tokens of the prompt that are not in common; None to count them.
            n_live: Tokens that the slot holds, if known: a slot that is only continued needs no
                checkpoint. Not looked at by llama-server's rule.
            n_rows: Tokens of the prompt whose rows are there or needless (a recurrent model has
                none), when more than `tokens_common`: how deep mode ``prefix`` may restore.
            commit: Without it nothing is changed, recorded or reported.

        Raises:
            InvalidValue: For numbers that do not fit together; nothing is changed.
        """
        asked = _Asked.of(
            tokens_common, prompt, pos_next, live_pos_min, n_swa, n_new, n_live, n_rows
        )
        if not commit:
            if self.restore != "upstream":
                return self._search_proven(asked, prefixes_of(self._items, prompt))
            n_past, found, lost, _ = self._search_upstream(asked)
            return Resume(asked.left_to_do(n_past), found, lost)
        self._n_prompt = asked.n_prompt
        self._refused = False
        if self.restore == "upstream":
            return self._resume_upstream(asked)
        return self._resume_proven(asked)

    def deepest(self, tokens: IntArray, limit: int, *, n_swa: int = 0) -> ListedCheckpoint | None:
        """Return the checkpoint that brings most of the first `limit` tokens back, by the mode.

        Always one that is proven to be of these tokens; in mode ``upstream`` None too where that
        would restore another one. Changes nothing; costs one hash of the tokens.

        Args:
            tokens: At least `limit`.
            limit: Tokens that may be reused.
            n_swa: As in `resume`.
        """
        return self._deepest(prefixes_of(self._items, tokens[:limit]), limit, n_swa)

    def _deepest(
        self, own: Sequence[ListedCheckpoint], limit: int, n_swa: int
    ) -> ListedCheckpoint | None:
        if self.restore == "upstream":
            found = upstream_choice(self._items, limit, max(0, limit - n_swa))
            return found if found in own else None
        return deepest_of(own, limit, n_swa=n_swa, exact=self.restore == "exact")

    def _search_upstream(self, asked: _Asked) -> tuple[int, ListedCheckpoint | None, bool, int]:
        """Return tokens that are known, the checkpoint, whether all is lost, and what is next."""
        pos_next = asked.pos_next
        threshold = max(0, pos_next - asked.n_swa - (0 if asked.n_new else 1))
        if not asked.common or asked.live_pos_min < threshold:
            return asked.common, None, False, pos_next
        found = upstream_choice(self._items, pos_next, threshold)
        if found is None:
            return 0, None, True, 0
        pos_next = min(pos_next, max(found.pos_min + 1, found.pos_max))
        return min(asked.common, pos_next, found.n_tokens), found, False, pos_next

    def _resume_upstream(self, asked: _Asked) -> Resume:
        n_past, found, lost, pos_next = self._search_upstream(asked)
        if lost:
            self._emit(events.FullReprocess())
        if found is not None:
            self._hit(found, n_past)
        self.invalidate(pos_next, n_swa=asked.n_swa)
        return Resume(asked.left_to_do(n_past), found, lost)

    def _search_proven(self, asked: _Asked, own: Sequence[ListedCheckpoint]) -> Resume:
        """Go on at what is live, or at the deepest checkpoint that is proven to be the prompt's."""
        deepest = deepest_resume(asked.n_prompt, 1, self._min_evaluated)
        target = min(asked.common, deepest)
        live = target > 0 and (
            (asked.at_end and target == asked.common)
            or (asked.live_pos_min < target and is_whole(asked.live_pos_min, target, asked.n_swa))
        )
        reach = min(asked.n_rows, deepest) if self.restore == "prefix" else target
        found = self._deepest(own, reach, asked.n_swa)
        if live and (found is None or found.n_tokens <= target):
            return Resume(target)
        n_past = found.n_tokens if found is not None else 0
        return Resume(n_past, found, target > 0 and not n_past)

    def _resume_proven(self, asked: _Asked) -> Resume:
        own = prefixes_of(self._items, asked.prompt)
        resume = self._search_proven(asked, own)
        if resume.checkpoint is not None:
            self._hit(resume.checkpoint, resume.n_past)
        if resume.full_reprocess:
            self._emit(events.FullReprocess())
        for item in tuple(self._items):
            if item not in own:
                self._invalidated(item, asked.n_swa, resume.n_past)
        link(self._items, self._n_prompt)
        self._branch = asked.common if resume.n_past < asked.common else 0
        return resume

    def _hit(self, item: ListedCheckpoint, n_past: int) -> None:
        item.hits += 1
        item.last_used = self._clock()
        self._emit(
            events.CheckpointRestored(
                item.n_bytes, item.pos_min, item.pos_max, item.n_tokens, n_past
            )
        )

    # -- dropping ----------------------------------------------------------------------------------

    def invalidate(self, pos_next: int, *, n_swa: int = 0) -> None:
        """Drop what lies beyond `pos_next`, the position that is evaluated next.

        llama-server drops what has pos_max > pos_next, and so keeps a checkpoint that has seen the
        token at `pos_next`, too, whatever is evaluated there now. The other modes drop it.
        """
        beyond = 1 if self.restore == "upstream" else 0
        for item in tuple(self._items):
            if item.pos_max >= pos_next + beyond:
                self._invalidated(item, n_swa, pos_next)
        link(self._items, self._n_prompt)

    def clear(self) -> None:
        """Drop everything, without an event: the slot's prompt was cleared."""
        for item in tuple(self._items):
            self._remove(item)
        self._branch = 0

    def copy(self, keep: Keep = "all") -> CheckpointList:
        """Return a list of its own with the same settings and checkpoints; states are shared.

        Device checkpoints stay behind: they live and die with their sequence.

        Args:
            keep: ``all``, the ``last`` by position alone, or ``none``.

        Raises:
            InvalidValue: For another word.
        """
        if keep not in ("all", "last", "none"):
            raise InvalidValue(f"keep must be all, last or none, not {keep!r}")
        other = self._empty()
        items = [item for item in self._items if not isinstance(item.data, DeviceCheckpoint)]
        if keep != "all":
            items = sorted(items, key=lambda item: item.n_tokens)[-1:] if keep == "last" else []
        for item in items:
            other._budget.reserve(item.n_bytes)
            other._items.append(replace(item))
        other._sequence, other._n_prompt = self._sequence, self._n_prompt
        link(other._items, other._n_prompt)
        return other

    def taking_over(self, other: CheckpointList, n_tokens: int) -> CheckpointList:
        """Return a list of these settings with the checkpoints of another; states are shared.

        What lies beyond `n_tokens` stays behind, and device checkpoints as in `copy`. Limits are
        these: what is too large is left out, and the policy's first go while there is no room.

        Args:
            other: Unchanged, whatever its settings are.
            n_tokens: What the sequence holds of the tokens that the checkpoints are of.
        """
        mine = self._empty()
        mine._sequence, mine._n_prompt = other._sequence, other._n_prompt
        for item in () if self._is_off else other:
            if isinstance(item.data, DeviceCheckpoint) or item.n_tokens > n_tokens:
                continue
            if item.n_bytes > mine.limit_bytes:
                continue
            while mine._is_full(item.n_bytes):
                mine._evict(item.n_tokens, item.prompt_end)
            mine._budget.reserve(item.n_bytes)
            mine._items.append(replace(item))
        link(mine._items, mine._n_prompt)
        return mine

    def _empty(self) -> CheckpointList:
        """Return an empty list with the same settings."""
        return CheckpointList(
            self.limit,
            self.min_step,
            self.limit_bytes,
            restore=self.restore,
            policy=self._policy,
            min_evaluated=self._min_evaluated,
            emit=self._emit,
            clock=self._clock,
        )

    def check(self) -> None:
        """Compare the counts with the truth.

        Raises:
            IntegrityError: With the numbers that do not add up.
        """
        held = sum(item.n_bytes for item in self._items)
        if held != self.n_bytes or len(self._items) > self.limit:
            raise IntegrityError(
                f"{len(self._items)} checkpoints of {self.limit} hold {held:,} bytes, "
                f"{self.n_bytes:,} are counted"
            )
        if len({item.n_tokens for item in self._items}) != len(self._items):
            raise IntegrityError(f"two checkpoints at one position: {self!r}")

    def _invalidated(self, item: ListedCheckpoint, n_swa: int, pos_next: int) -> None:
        self._remove(item)
        self._emit(
            events.CheckpointInvalidated(
                item.n_bytes, item.pos_min, item.pos_max, item.n_tokens, n_swa, pos_next
            )
        )

    def _drop(self, item: ListedCheckpoint, event: type[_Dropped]) -> None:
        self._remove(item)
        self._emit(event(item.n_bytes, item.pos_min, item.pos_max, item.n_tokens))

    def _remove(self, item: ListedCheckpoint) -> None:
        try:
            self._items.remove(item)
            self._budget.release(item.n_bytes)
        except BaseException:
            self._recount()
            raise

    def _recount(self) -> None:
        """Count what is kept: an interrupt may fall between a checkpoint and its bytes."""
        extra = self.n_bytes - sum(item.n_bytes for item in self._items)
        if extra > 0:
            self._budget.release(extra)
        elif extra < 0:
            self._budget.reserve(-extra)
