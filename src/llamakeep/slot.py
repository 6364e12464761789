"""One slot: a sequence, its tokens and its checkpoints, kept true whatever fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from llamakeep.checkpoint_list import CheckpointList
from llamakeep.entries import no_tokens, reason
from llamakeep.errors import IntegrityError, InvalidValue, StateError
from llamakeep.listed import Resume, prefixes_of, state_at
from llamakeep.runtime.base import Runtime
from llamakeep.states import Checkpoint, DeviceCheckpoint
from llamakeep.tokens import IntArray, common_prefix

logger = logging.getLogger("llamakeep")


class Slot:
    """One sequence, what it holds and its checkpoints.

    Its tokens are those that were evaluated: a sampled token belongs to them only once it is
    evaluated in turn, so a request for one token leaves exactly its prompt. They are forgotten
    before the sequence is moved and known again after it, so whatever is raised in between leaves
    the slot whole or empty.

    Args:
        slot_id: Its number, that of the sequence too.
        runtime: Holds the sequence, and the draft model's.
        checkpoints: An empty list.
        n_ubatch: Tokens of a physical batch.
        failures: Counts what failed.

    Attributes:
        tokens: What was evaluated into it.
        last_used: When its last task ended; -1 before the first.
        kind: The kind of task that filled it.
        namespace: What makes its states incompatible with others.
        keeps: What it holds may be saved.
        busy: Somebody evaluates into it: it is neither chosen, saved nor emptied meanwhile.
        cleared_all: A failure of this slot emptied every sequence of the runtime, and its owner
            has not been told the other slots yet.
    """

    def __init__(
        self,
        slot_id: int,
        runtime: Runtime,
        checkpoints: CheckpointList,
        *,
        n_ubatch: int,
        failures: dict[str, int],
    ) -> None:
        self.slot_id = slot_id
        self.tokens = no_tokens()
        self.checkpoints = checkpoints
        self.last_used = -1.0
        self.kind = ""
        self.namespace = b""
        self.keeps = True
        self.busy = False
        self.cleared_all = False
        self._runtime = runtime
        self._n_ubatch = n_ubatch
        self._failures = failures

    def __repr__(self) -> str:
        held = f"{self.n_tokens} tokens, {len(self.checkpoints)} checkpoints"
        return f"Slot({self.slot_id}: {held})"

    @property
    def n_tokens(self) -> int:
        """How many tokens it holds."""
        return int(self.tokens.size)

    # -- whole or empty ----------------------------------------------------------------------------

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Know nothing while the sequence is moved; what is raised inside empties the slot.

        Whoever moves it sets `tokens` inside too, so no interrupt falls in between.
        """
        try:
            self.tokens = no_tokens()
            yield
        except BaseException:
            self.forget()
            raise

    def forget(self) -> None:
        """Empty the slot, its sequences and its checkpoints.

        An interrupt on the way leaves a slot that claims nothing: what is left of its sequence
        goes when a prompt is resumed at 0.
        """
        self.tokens, self.kind = no_tokens(), ""
        self._runtime.clear(self.slot_id)
        self._clear_draft()
        self.checkpoints.clear()

    def _clear_draft(self) -> None:
        """Empty the draft model's sequence: it evaluates what it needs with the next prompt."""
        if self._runtime.draft is not None:
            self._runtime.draft.clear(self.slot_id)

    def broken(self, what: str, error: Exception) -> None:
        """Count a failure and empty the slot."""
        self.count_failure(what)
        logger.warning("slot %d is empty: %s failed: %s", self.slot_id, what, reason(error))
        self.forget()
        self.cleared_all = self.cleared_all or bool(getattr(error, "cleared_all", False))

    def count_failure(self, what: str) -> None:
        """Count something that failed."""
        self._failures[what] = self._failures.get(what, 0) + 1

    # -- how much of a prompt is here --------------------------------------------------------------

    def reach(self, prompt: IntArray, most: int) -> int:
        """Return how many tokens of a prompt, at most `most`, the slot can resume by itself.

        Asks what `resume` would do, and counts nothing that is not proven. Changes nothing; costs
        what `resume` costs without moving the sequence.
        """
        found = self._ask(prompt, int(prompt.size), commit=False)
        if found.checkpoint is not None and not prefixes_of([found.checkpoint], prompt):
            return 0  # by llama-server's rule it is restored all the same
        return min(found.n_past, most)

    def copyable(self, prompt: IntArray, most: int) -> int:
        """Return how many tokens of a prompt another slot can have of this one.

        By llama-server's rule a slot with a window may then lose some to its next search.
        """
        limit = min(common_prefix(self.tokens, prompt), most)
        if not self._runtime.traits.rolling or limit == self.n_tokens:
            return limit
        found = self.checkpoints.deepest(self.tokens, limit, n_swa=self._n_swa())
        movable = found is not None and isinstance(found.data, Checkpoint)
        return found.n_tokens if found is not None and movable else 0

    # -- resuming ----------------------------------------------------------------------------------

    def copy_from(self, source: Slot, n_tokens: int) -> None:
        """Hold what `source` holds up to `n_tokens`, one of its `copyable` positions.

        A copy that fails, for want of memory too, leaves the slot empty.
        """
        checkpoint = None
        if self._runtime.traits.rolling and n_tokens < source.n_tokens:
            checkpoint = state_at(prefixes_of(source.checkpoints, source.tokens), n_tokens)
        with self.moving():
            self._clear_draft()
            try:
                self._runtime.copy(source.slot_id, self.slot_id, n_tokens, checkpoint)
            except (StateError, MemoryError) as error:
                self.broken("copy", error)
                return
            self.checkpoints = self.checkpoints.taking_over(source.checkpoints, n_tokens)
            self.tokens, self.kind = source.tokens[:n_tokens], source.kind

    def resume(self, prompt: IntArray, most: int) -> int:
        """Cut the slot back to what it shares with the prompt, as far as its memory allows it.

        Args:
            prompt: The request.
            most: Tokens that may be in common at most.

        Returns:
            Tokens of the prompt that it holds now: at least one is left to evaluate.
        """
        found = self._ask(prompt, most, commit=True)
        data = found.checkpoint.data if found.checkpoint is not None else None
        self._cut(prompt[: found.n_past], data)
        return self.n_tokens

    def _ask(self, prompt: IntArray, most: int, *, commit: bool) -> Resume:
        """Ask the list where a prompt goes on."""
        common = min(common_prefix(self.tokens, prompt), most)
        return self.checkpoints.resume(
            common,
            prompt,
            pos_next=common,
            live_pos_min=self._pos_min(),
            n_swa=self._n_swa(),
            n_new=int(prompt.size) - common,
            n_live=self.n_tokens,
            commit=commit,
        )

    def _pos_min(self) -> int:
        """Return the first position that the slot holds; whole states are true at one only."""
        if self._runtime.traits.whole_because:
            return self.n_tokens - 1
        return self._runtime.positions(self.slot_id).pos_min

    def _n_swa(self) -> int:
        """Return the window that `_pos_min` speaks of; 0 where it speaks of none.

        Beside a recurrent state it is that state's position, whatever the window holds. Only
        llama-server's rule takes it for the window's; a checkpoint's window the runtime looks at.
        """
        traits = self._runtime.traits
        recurrent = traits.family.has_recurrent and self.checkpoints.restore != "upstream"
        return 0 if traits.dense or traits.whole_because or recurrent else traits.n_swa

    def _cut(self, tokens: IntArray, checkpoint: Checkpoint | DeviceCheckpoint | None) -> None:
        """Cut the slot back in place, or empty it when that fails."""
        n_past, runtime = int(tokens.size), self._runtime
        if not n_past:
            # Whatever the slot knows of: an interrupt may have left more in the sequence.
            with self.moving():
                runtime.clear(self.slot_id)
            return
        if n_past == self.n_tokens:
            return
        with self.moving():
            try:
                if checkpoint is not None:
                    runtime.rewind(self.slot_id, checkpoint.position, checkpoint)
                # llama-server goes on one token before the end of a checkpoint with a window.
                runtime.rewind(self.slot_id, n_past)
            except (StateError, InvalidValue, MemoryError) as error:
                self.broken("rewind", error)
                return
            self.tokens = tokens

    # -- evaluating --------------------------------------------------------------------------------

    def prefill(
        self,
        prompt: IntArray,
        user_starts: Sequence[int],
        *,
        task: int,
        takes: bool,
        make_room: Callable[[int], None],
    ) -> None:
        """Evaluate the rest of the prompt in batches, taking checkpoints on the way.

        A batch ends where the list of checkpoints says so. One is taken before the batch that
        starts there is evaluated, as llama-server does.

        Args:
            prompt: Begins with what the slot holds.
            user_starts: Positions where a user message starts, ascending.
            task: The task's number.
            takes: Whether to take checkpoints at all.
            make_room: Called with the number of tokens before each batch.
        """
        self._draft_follows()
        while self.n_tokens < prompt.size:
            start = self.n_tokens
            end = self.next_stop(int(prompt.size), user_starts, task=task, takes=takes)
            make_room(end - start)
            self.evaluate(prompt, start, end)

    def next_stop(
        self, n_prompt: int, user_starts: Sequence[int], *, task: int, takes: bool
    ) -> int:
        """Return where the batch that starts now must end; take a checkpoint first if one is due.

        Args:
            n_prompt: Length of the prompt.
            user_starts: Positions where a user message starts, ascending.
            task: The task's number.
            takes: Whether to take checkpoints at all.
        """
        runtime, listed, start = self._runtime, self.checkpoints, self.n_tokens
        end = min(start + runtime.n_batch, n_prompt)
        if not takes or not runtime.traits.rolling:
            return end
        points = listed.split_points(
            start,
            n_prompt,
            n_batch=runtime.n_batch,
            n_ubatch=self._n_ubatch,
            user_starts=user_starts,
        )
        end = min([end, *(point for point in points if point > start)])
        if listed.wants(
            start,
            n_prompt=n_prompt,
            n_ubatch=self._n_ubatch,
            user_starts=user_starts,
            batch_end=end,
        ):
            self._take(task)
        return end

    def note_evaluated(self, tokens: IntArray) -> bool:
        """Note tokens that somebody evaluated behind those it holds.

        Returns:
            Whether the sequence really holds them; else it is emptied.
        """
        held = self._runtime.positions(self.slot_id).n_tokens
        if held != self.n_tokens + tokens.size:
            self.forget()
            return False
        self.tokens = np.concatenate((self.tokens, tokens))
        return True

    def evaluate(self, tokens: IntArray, start: int, end: int) -> None:
        """Evaluate tokens [start, end), which follow those the slot holds.

        Raises:
            DecodeError: When the runtime fails; the slot is empty then.
        """
        with self.moving():
            self._runtime.evaluate(self.slot_id, tokens[start:end])
            if self._runtime.draft is not None:
                self._runtime.draft.evaluate(self.slot_id, tokens[start:end])
            self.tokens = tokens[:end]

    def _take(self, task: int) -> None:
        """Take a checkpoint of the slot as it is."""
        runtime, seq_id = self._runtime, self.slot_id
        try:
            self.checkpoints.take(
                runtime.checkpoint_bytes(seq_id),
                lambda: runtime.read_checkpoint(seq_id),
                id_task=task,
                pos_min=self._pos_min(),
                pos_max=self.n_tokens - 1,
                n_tokens=self.n_tokens,
                tokens=self.tokens,
            )
        except (StateError, MemoryError) as error:
            self.count_failure("checkpoint")
            logger.warning("no checkpoint was taken: %s", reason(error))

    def _draft_follows(self) -> None:
        """Bring the draft model's sequence to the same tokens; it evaluates what it must."""
        draft, tokens, seq_id = self._runtime.draft, self.tokens, self.slot_id
        if draft is None:
            return
        n_tokens = self.n_tokens
        with self.moving():
            held, follows = draft.positions(seq_id).n_tokens, False
            if held >= n_tokens and draft.can_rewind(seq_id, n_tokens):
                try:
                    draft.rewind(seq_id, n_tokens)
                    follows = True
                except (StateError, InvalidValue, MemoryError) as error:
                    self.count_failure("draft")
                    logger.warning("the draft evaluates its tokens again: %s", reason(error))
            if not follows:
                draft.clear(seq_id)
                if n_tokens:
                    draft.evaluate(seq_id, tokens)
            self.tokens = tokens

    def check(self) -> None:
        """Compare what the slot thinks with what the runtime holds.

        Raises:
            IntegrityError: With both numbers.
        """
        held = self._runtime.positions(self.slot_id).n_tokens
        if held != self.n_tokens:
            raise IntegrityError(f"{self!r}, but its sequence holds {held}")
        self.checkpoints.check()
        for kept in self.checkpoints:
            if kept.n_tokens > self.n_tokens:
                raise IntegrityError(f"{self!r} has a checkpoint at {kept.n_tokens}")
