"""One sequence of a runtime and the tree that keeps what it computes.

The sequence knows its tokens by its own log. Before a prompt is evaluated it is brought to the
deepest position that can be reached without evaluating (`resume`); while the prompt is evaluated
it takes checkpoints where they were planned (`note_evaluated`); afterwards it saves what the tree
lacks (`save`). Who evaluates, a `Llama` or an engine, is not its business.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from llamakeep.checkpoints import (
    MIN_EVALUATED,
    deepest_resume,
    positions_to_take,
)
from llamakeep.errors import LlamakeepError, RestoreFailed, StateError, StateLost
from llamakeep.live import Live
from llamakeep.modes import Mode
from llamakeep.runtime.base import Runtime
from llamakeep.states import Checkpoint, DeviceCheckpoint, Match, Reuse, Segment
from llamakeep.tokens import IntArray, align_down, common_prefix
from llamakeep.tree import PrefixTree

logger = logging.getLogger("llamakeep")

_ATTEMPTS = 4
"""How often a prompt is matched anew when a state that it matched was gone from its tier."""
_MAX_DUE = 16
"""Checkpoints that may be due at most before other prompts add theirs."""
FIRST_TIME = "first time seen"
"""The reason of a request whose prompt shares nothing with what is known."""
_LOST = "a stored state was lost"


@dataclass(frozen=True, slots=True)
class Reached:
    """Where `reach` brought a sequence.

    Attributes:
        n_tokens: Tokens it holds now.
        tier: Where they came from.
        match: What the tree had to offer.
        problem: What went wrong on the way, or "".
    """

    n_tokens: int
    tier: str
    match: Match
    problem: str = ""


class KeptSequence:
    """One sequence, its log, and the tree below it. One thread at a time, the context's owner.

    Args:
        runtime: Holds the sequence.
        tree: Keeps its states.
        seq_id: Which sequence.
        align: Prompts are resumed at multiples of this.
        min_step: Least distance in tokens between checkpoints at user messages.
        save_late: Save rows when a prompt is about to take their place, so that what is live is not
            held twice; `save` saves at any time. Without it the caller saves after each request.
        keep_ends: In families with a rolling part, `save` takes a checkpoint at the sequence's end
            too, and any kept checkpoint is restored, aligned or not: what an answer's tokens, which
            were evaluated one by one, end in. Without it nothing past the last planned checkpoint
            is kept.
        on_device: Leave the newest checkpoint in the context's own buffers (not where there is a
            window, which llama.cpp cannot leave there).
        namespace: Digest of everything that makes states incompatible: what it keeps and finds is
            of this namespace alone. May be changed while the sequence is empty.

    Attributes:
        live: What the sequence holds.
        due: Positions at which a checkpoint will be taken, ascending.
        mode: What the request that is served may do, set by `resume`.
        failures: How often a restore, rewind, checkpoint or save failed.
    """

    def __init__(
        self,
        runtime: Runtime,
        tree: PrefixTree,
        seq_id: int = 0,
        *,
        align: int = 8,
        min_step: int = 512,
        save_late: bool = False,
        keep_ends: bool = False,
        on_device: bool = False,
        namespace: bytes = b"",
    ) -> None:
        self.namespace = namespace
        self.live = Live(runtime.n_ctx)
        self.due: list[int] = []
        self.mode = Mode.ON
        self.failures: dict[str, int] = {}
        self._runtime = runtime
        self._shared_tree = tree
        self._seq_id = seq_id
        self._align = align
        self._min_step = min_step
        self._save_late = save_late
        traits = runtime.traits
        self._keep_ends = keep_ends and traits.rolling
        self._on_device = on_device and not (traits.whole_because or traits.family.has_window)
        self._device: DeviceCheckpoint | None = None
        self._warned_refused = False

    @property
    def _tree(self) -> PrefixTree:
        # Sequences of several tenants or adapters share one tree: each enters it as itself.
        self._shared_tree.namespace = self.namespace
        return self._shared_tree

    @property
    def align(self) -> int:
        """Prompts are resumed at multiples of this."""
        return self._align

    @property
    def device_bytes(self) -> int:
        """Bytes that the sequence's checkpoint occupies in buffers of the context."""
        return self._device.device_bytes if self._device is not None else 0

    def clear(self) -> None:
        """Empty the sequence; what is kept stays kept."""
        self._runtime.clear(self._seq_id)
        self.cut(0)

    def cut(self, n_tokens: int) -> None:
        """Note that everything past the first `n_tokens` is gone, or is not ours."""
        self.live.cut(n_tokens)
        if self._device is not None and self._device.position > n_tokens:
            self._device = None

    # -- resuming ----------------------------------------------------------------------------

    def resume(
        self,
        prompt: IntArray,
        *,
        user_starts: Sequence[int] = (),
        scored: bool = False,
        mode: Mode = Mode.ON,
        others: Sequence[KeptSequence] = (),
    ) -> Reuse:
        """Bring the sequence to the deepest reachable prefix of `prompt`, and plan checkpoints.

        Args:
            prompt: What will be evaluated; the rest of it is for the caller to evaluate.
            user_starts: Positions where a user message starts, ascending.
            scored: Reuse only rows whose logits somebody still has.
            mode: What the request may reuse and keep.
            others: Sequences of the same runtime and namespace that a prefix may be copied from;
                they stay as they are.

        Returns:
            How far it got, and why no further. Never fails: what cannot be used is a miss.
        """
        common = common_prefix(self.live.tokens, prompt)
        # A request that may keep nothing leaves nothing behind, what it goes on from included.
        if self._save_late and (common < self.live.n_tokens or mode is not Mode.ON):
            with self._tree.pin(prompt):  # what it makes room for is about to be restored
                self.save()
        begin = time.perf_counter()
        self.mode, self.due = mode, []
        limit = deepest_resume(prompt.size, self._align)
        if mode.reads:
            reached = self.reach(
                prompt, limit=limit, align=self._align, scored=scored, others=others
            )
            self._tree.touch(prompt, reached.n_tokens)
        else:
            self.clear()
            reached = Reached(0, "none", self._tree.match_prefix(prompt), f"mode is {mode.value}")
        if self._runtime.traits.rolling and self._tree.max_checkpoints and mode.writes:
            self.due = positions_to_take(
                prompt.size,
                reached.n_tokens,
                align=self._align,
                min_step=self._min_step,
                user_starts=user_starts,
                branch=max(reached.match.shared_tokens, common),
                present=self._tree.checkpoint_positions(prompt),
            )
        known = max(reached.match.shared_tokens, common, reached.n_tokens)
        return Reuse(
            reached.n_tokens,
            prompt.size - reached.n_tokens,
            reached.tier,
            self._why_no_deeper(reached, known, limit, scored),
            restore_ms=(time.perf_counter() - begin) * 1e3,
            shared_tokens=known,
        )

    def reach(
        self,
        prompt: IntArray,
        *,
        limit: int,
        align: int = 1,
        scored: bool = False,
        others: Sequence[KeptSequence] = (),
    ) -> Reached:
        """Bring the sequence to at most `limit` tokens of `prompt`. See `resume`."""
        if scored:
            limit = min(limit, align_down(self.live.n_scores, align))
        self._tree.settle()
        kept_align = 1 if self._keep_ends else align
        match = self._tree.match_prefix(prompt, limit=limit, align=kept_align)
        n_live, checkpoint = self._live_candidate(prompt, match, limit, align)
        if others and not scored:
            copied = self._copy_best(prompt, match, limit, align, n_live, others)
            if copied is not None:
                return copied
        if max(n_live, match.n_tokens) < limit and not scored:
            known = match
            match = self._tree.discover(prompt, match, limit=limit, align=kept_align, beyond=n_live)
            if match is not known:
                n_live, checkpoint = self._live_candidate(prompt, match, limit, align)
        if scored and n_live > self.live.n_scores:
            n_live = 0
        problem = ""
        if n_live and (scored or n_live >= match.n_tokens):
            problem = self._rewind(prompt, n_live, checkpoint)
            if not problem:
                return Reached(n_live, "live", match)
        for _ in range(_ATTEMPTS):
            if scored or not match.n_tokens:
                break
            tier = self._tree.tier_of(prompt, match)
            problem = self._restore(prompt, match)
            if not problem:
                return Reached(match.n_tokens, tier, match)
            if problem != _LOST:
                break  # a runtime that refuses one state would refuse the next one too
            match = self._tree.match_prefix(prompt, limit=limit, align=kept_align)
        self.clear()
        return Reached(0, "none", match, problem)

    def _why_no_deeper(self, reached: Reached, known: int, limit: int, scored: bool) -> str:
        """Say why the rest of a prompt has to be evaluated. `known` tokens were seen before."""
        if reached.problem:
            return reached.problem
        if not known:
            return FIRST_TIME
        if reached.n_tokens >= limit:
            return f"the end of a prompt is always evaluated, from a multiple of {self._align} on"
        if reached.n_tokens >= align_down(known, self._align):
            return f"new from token {known} on"
        if scored:
            return f"logits of all rows are wanted, and are there for {reached.n_tokens}"
        where = f"the nearest is at {reached.n_tokens}" if reached.n_tokens else "there is none"
        return f"no checkpoint at token {known}, where the prompt leaves what is known; {where}"

    def _live_candidate(
        self, prompt: IntArray, match: Match, limit: int, align: int
    ) -> tuple[int, Checkpoint | DeviceCheckpoint | None]:
        """Return the deepest position the live sequence can be cut to, and what that needs."""
        live, runtime, seq_id = self.live, self._runtime, self._seq_id
        common = common_prefix(live.tokens, prompt)
        held = self._held()
        if held < live.n_tokens or not common:
            return 0, None
        best = align_down(min(common, limit), align)
        if best and runtime.can_rewind(seq_id, best):
            return best, None
        # Going on from the very end needs nothing; alignment buys nothing after decoded rows.
        at_end = common == live.n_tokens == held and common <= prompt.size - MIN_EVALUATED
        if at_end and (live.decoded or common % align == 0):
            return common, None
        best, checkpoint = 0, None
        device = self._device
        if device is not None and device.position <= min(common, limit):
            best, checkpoint = device.position, device
        if best < match.n_tokens <= common and match.checkpoint is not None:
            fetched = self._tree.fetch_checkpoint(prompt, match)
            if fetched is not None:
                return match.n_tokens, fetched
        return best, checkpoint

    def _copy_best(
        self,
        prompt: IntArray,
        match: Match,
        limit: int,
        align: int,
        n_live: int,
        others: Sequence[KeptSequence],
    ) -> Reached | None:
        """Copy from another sequence what is neither here nor kept; None when nothing was copied.

        In families with a rolling part a prefix can be copied at a kept checkpoint only, or whole.
        """
        rolling = self._runtime.traits.rolling
        best, source, checkpoint = max(n_live, match.n_tokens - (not rolling)), None, None
        for other in others:
            live = other.live
            common = min(common_prefix(live.tokens, prompt), limit)
            if other is self or live.opaque or other._held() != live.n_tokens:
                continue
            if common == live.n_tokens and (live.decoded or common % align == 0):
                n_tokens, needs = common, None
            elif not rolling:
                n_tokens, needs = align_down(common, align), None
            elif match.checkpoint is not None and match.n_tokens <= common:
                n_tokens, needs = match.n_tokens, match.checkpoint
            else:
                continue
            if n_tokens > best or (needs is not None and n_tokens == best > n_live):
                best, source, checkpoint = n_tokens, other, needs
        if source is None:
            return None
        state = self._tree.fetch_checkpoint(prompt, match) if checkpoint is not None else None
        if checkpoint is not None and state is None:
            return None
        self.cut(0)
        try:
            self._runtime.copy(source._seq_id, self._seq_id, best, state)
        except (StateError, MemoryError) as error:
            self._failed("copy", error)
            return None
        self.live.replace(prompt[:best])
        return Reached(best, "live", match)

    # The log is emptied before the native move and filled after it, so that whatever comes in
    # between, an interrupt too, leaves it knowing too little and never something wrong.

    def _rewind(
        self, prompt: IntArray, n_tokens: int, checkpoint: Checkpoint | DeviceCheckpoint | None
    ) -> str:
        """Cut the live sequence back; return why it could not be done, or nothing."""
        n_scores, device = min(self.live.n_scores, n_tokens), self._device
        self.cut(0)
        try:
            self._runtime.rewind(self._seq_id, n_tokens, checkpoint)
        except (StateError, MemoryError) as error:
            self._failed("rewind", error)
            return f"the live state could not be cut back: {error}"
        self.live.replace(prompt[:n_tokens])
        self.live.n_scores = n_scores
        self._device = device if device and device.position <= n_tokens else None
        return ""

    def _restore(self, prompt: IntArray, match: Match) -> str:
        """Restore a match; return why it could not be done, or nothing."""
        fetched = self._tree.fetch(prompt, match)
        if fetched is None:
            return _LOST
        self.cut(0)
        try:
            with self._tree.pin(prompt):
                self._runtime.restore(self._seq_id, match.n_tokens, *fetched)
        except StateLost as error:
            self.count_failure("lost")
            logger.info("a stored state was lost: %s", error)
            self._tree.reject(prompt, match, error.lost)
            return _LOST
        except MemoryError as error:
            self._failed("restore", error)
            return "there was no memory to restore a stored state"
        except StateError as error:
            self._failed("restore", error)
            self._tree.reject(prompt, match, getattr(error, "refused", None))
            return f"a stored state could not be used: {error}"
        self.live.replace(prompt[: match.n_tokens])
        return ""

    def _failed(self, what: str, error: Exception) -> None:
        self.count_failure(what)
        logger.warning("%s failed, the prompt is evaluated instead: %s", what, error)
        if isinstance(error, RestoreFailed):
            self.cut(0)

    def count_failure(self, what: str) -> None:
        """Count something that went wrong and was survived."""
        self.failures[what] = self.failures.get(what, 0) + 1

    # -- evaluating --------------------------------------------------------------------------

    def cuts(self, n_tokens: int) -> list[int]:
        """Return where to stop while `n_tokens` more are evaluated, the end included.

        Call `note_evaluated` at each stop, before going on.
        """
        start, end = self.live.n_tokens, self.live.n_tokens + n_tokens
        return sorted({end, *(position for position in self.due if start < position < end)})

    def kept(self, prompt: IntArray) -> int:
        """Return how many tokens of a prompt could be restored now. Changes nothing."""
        align = 1 if self._keep_ends else self._align
        return self._tree.match_prefix(prompt, align=align).n_tokens

    def expect_branch(self, n_tokens: int) -> int:
        """Plan for another prompt that shares the first `n_tokens` of the one being evaluated.

        Returns:
            Up to where it can go on from here once that is evaluated; in families with a rolling
            part a checkpoint is due there now.
        """
        at = align_down(n_tokens, self._align)
        if not self._runtime.traits.rolling:
            return at
        if not (self._tree.max_checkpoints and self.mode.writes):
            return 0
        planned = [due for due in self.due if self.live.n_tokens < due <= at]
        if planned and (at - planned[-1] < self._min_step or len(self.due) >= _MAX_DUE):
            return planned[-1]  # each one costs a read and a batch of its own
        if at <= self.live.n_tokens or len(self.due) >= _MAX_DUE:
            return 0
        self.due = sorted({*self.due, at})
        return at

    def note_evaluated(self, tokens: IntArray, *, scored: bool = False) -> None:
        """Note that `tokens` were evaluated; take a checkpoint where one is due."""
        if self.live.opaque or not tokens.size:
            return
        if self._held() != self.live.n_tokens + tokens.size:
            self._lost()
            return
        self.live.append(tokens, scored=scored)
        if self.live.n_tokens in self.due:
            self._take_checkpoint()

    def advance(self, tokens: IntArray) -> None:
        """Evaluate `tokens` through the runtime, with checkpoints where they are due.

        Raises:
            TokenError: For an id outside the vocabulary; nothing is evaluated.
            ContextOverflow: When they do not fit; nothing is evaluated.
            DecodeError: When the runtime fails; the sequence is empty then.
            StateError: When the sequence lost what it held, because a failure elsewhere cleared
                the whole memory; it is empty then, and the prompt must be resumed anew.
        """
        start = self.live.n_tokens
        if self._held() != start:
            self._lost()
            raise StateError(f"sequence {self._seq_id} no longer holds its {start} tokens")
        try:
            for cut in self.cuts(tokens.size):
                part = tokens[self.live.n_tokens - start : cut - start]
                self._runtime.evaluate(self._seq_id, part)
                self.note_evaluated(part)
        except LlamakeepError:
            if self._held() != self.live.n_tokens:
                self.clear()
            raise

    def _held(self) -> int:
        return self._runtime.positions(self._seq_id).n_tokens

    def _lost(self) -> None:
        logger.warning(
            "sequence %d holds %d tokens, not those that were evaluated: it is emptied",
            self._seq_id,
            self._held(),
        )
        self.clear()

    def _take_checkpoint(self) -> None:
        """Keep the rolling state at the end of the sequence, and the spans before it."""
        tokens, seq_id = self.live.tokens.copy(), self._seq_id
        try:
            if self._on_device and self.due and self.live.n_tokens == max(self.due):
                self._device = self._runtime.read_device_checkpoint(seq_id)
                return
            n_bytes = self._runtime.checkpoint_bytes(seq_id)
            if self._save_spans(tokens, n_bytes) and self._tree.save_checkpoint(
                tokens,
                n_bytes=n_bytes,
                read=lambda: self._runtime.read_checkpoint(seq_id),
            ):
                return
        except (LlamakeepError, MemoryError) as error:
            self._failed("checkpoint", error)
        self._tree.prune(tokens)

    # -- saving ------------------------------------------------------------------------------

    def drop_past(self, n_tokens: int) -> bool:
        """Cut rows past `n_tokens`, of drafts nobody accepted; return whether there were any.

        A recurrent state cannot be cut: there the rows stay, known for what they are.
        """
        live, runtime = self.live, self._runtime
        if (
            live.opaque
            or n_tokens >= live.n_tokens
            or not runtime.can_rewind(self._seq_id, n_tokens)
        ):
            return False
        try:
            runtime.rewind(self._seq_id, n_tokens)
        except StateError as error:
            self._failed("rewind", error)
        self.cut(n_tokens)
        return True

    def save(self, n_tokens: int | None = None) -> bool:
        """Keep the rows of the first `n_tokens` that are live; None for all of them.

        A family with a rolling part keeps nothing past its last checkpoint, which `note_evaluated`
        took care of, unless it is to keep ends. Nor does a request whose mode says so. Never fails:
        what cannot be kept is counted and logged.

        Returns:
            Whether nothing of it is lost when the sequence is emptied now: it is all kept, or may
            not be kept.
        """
        live = self.live
        if not self.mode.writes or not live.n_tokens:
            return True
        end = live.n_tokens if n_tokens is None else min(n_tokens, live.n_tokens)
        if self._held() < end:
            self._lost()
            return True
        if self._runtime.traits.rolling:
            return self._save_end() if self._keep_ends and end == live.n_tokens else False
        try:
            return self._save_spans(live.tokens[:end].copy())
        except (LlamakeepError, MemoryError) as error:
            self._failed("save", error)
            return False

    def _save_end(self) -> bool:
        """Take a checkpoint where the sequence ends; return whether the tree has one there."""
        n_tokens = self.live.n_tokens
        if self.live.opaque or not self._tree.max_checkpoints or self._held() != n_tokens:
            return False
        if n_tokens not in self._tree.checkpoint_positions(self.live.tokens):
            due, self.due = self.due, []
            self._take_checkpoint()
            self.due = due
        return n_tokens in self._tree.checkpoint_positions(self.live.tokens)

    def kept_checkpoints(self) -> list[Checkpoint]:
        """Return the checkpoints before the end of what the sequence holds that are kept."""
        tokens, found = self.live.tokens, []
        for position in self._tree.checkpoint_positions(tokens):
            if position < tokens.size:
                match = self._tree.match_prefix(tokens[:position])
                state = self._tree.fetch_checkpoint(tokens[:position], match)
                if state is not None and state.position == position:
                    found.append(state)
        return found

    def keep_checkpoints(self, checkpoints: Iterable[Checkpoint]) -> None:
        """Keep checkpoints of what the sequence holds, which its owner has from elsewhere."""
        for state in sorted(checkpoints, key=lambda each: each.position):
            tokens, n_bytes = self.live.tokens[: state.position].copy(), int(state.data.nbytes)
            try:
                if self._save_spans(tokens, n_bytes):
                    self._tree.save_checkpoint(
                        tokens, n_bytes=n_bytes, read=partial(_itself, state)
                    )
            except (LlamakeepError, MemoryError) as error:
                self._failed("save", error)

    def lay_low(self) -> None:
        """Write the sequence anew, into the lowest cells that are free.

        Attention costs what the highest cell in use costs. What other sequences, gone by now, left
        it above stays above them. It is kept first, and stays where it is when that is refused.
        Costs a save, of what is not kept, and a restore.
        """
        tokens, live = self.live.tokens.copy(), self.live
        if live.opaque or not tokens.size or not self.mode.writes or not self.save():
            return
        match = self._tree.match_prefix(tokens)
        if match.n_tokens != tokens.size:
            return
        decoded, n_scores = live.decoded, live.n_scores
        if self._restore(tokens, match):
            if self._held():
                self.clear()
            return
        live.decoded, live.n_scores = decoded, n_scores

    def hold(self, tokens: IntArray) -> None:
        """Note that the sequence was given exactly `tokens`, by a restore of its owner's.

        How they were evaluated is not known, so alignment buys nothing: it goes on at their end.
        """
        self._device, self.mode = None, Mode.ON
        self.live.replace(tokens)
        self.live.decoded = True

    def _save_spans(self, tokens: IntArray, and_bytes: int = 0) -> bool:
        def read(start: int, end: int) -> Segment:
            return self._runtime.read_segment(self._seq_id, start, end)

        saved = self._tree.save(
            tokens, segment_bytes=self._runtime.segment_bytes, read=read, and_bytes=and_bytes
        )
        if saved.refused:
            level = logging.INFO if self._warned_refused else logging.WARNING
            self._warned_refused = True
            room = self._tree.store.capacity_bytes
            logger.log(level, "not all is kept: %s into %s bytes", saved.refused, f"{room:,}")
        return saved.n_tokens == tokens.size


def _itself(state: Checkpoint) -> Checkpoint:
    return state
