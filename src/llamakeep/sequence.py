"""One sequence of a runtime and the tree that keeps what it computes.

The sequence knows its tokens by its own log. Before a prompt is evaluated it is brought to the
deepest position that can be reached without evaluating (`resume`); while the prompt is evaluated
it takes checkpoints where they were planned (`note_evaluated`); afterwards it saves what the tree
lacks (`save`). Who evaluates, a `Llama` or an engine, is not its business.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llamakeep.checkpoints import (
    MIN_EVALUATED,
    deepest_resume,
    positions_to_take,
)
from llamakeep.errors import LlamakeepError, RestoreFailed, StateError, StateLost
from llamakeep.modes import Mode
from llamakeep.runtime.base import Runtime
from llamakeep.states import Checkpoint, DeviceCheckpoint, Match, Reuse, Segment
from llamakeep.tokens import IntArray, align_down, common_prefix
from llamakeep.tree import PrefixTree

logger = logging.getLogger("llamakeep")

_ATTEMPTS = 4
"""How often a prompt is matched anew when a state that it matched was gone from its tier."""
FIRST_TIME = "first time seen"
"""The reason of a request whose prompt shares nothing with what is known."""
_LOST = "a stored state was lost"


class Live:
    """What a sequence holds: the tokens we saw evaluated, and what happened behind our back.

    Attributes:
        n_tokens: Tokens whose rows we know, from the first on.
        opaque: Positions past them were filled by somebody else (pictures, a loaded state).
        decoded: The last row was evaluated by itself, as generated tokens are.
        n_scores: Leading rows whose logits somebody still has.
    """

    def __init__(self, n_ctx: int) -> None:
        self._tokens = np.empty(n_ctx, np.int32)
        self.n_tokens = 0
        self.opaque = False
        self.decoded = False
        self.n_scores = 0

    @property
    def tokens(self) -> IntArray:
        """The tokens whose rows are known: a view, good until the next change."""
        return self._tokens[: self.n_tokens]

    def append(self, tokens: IntArray, *, scored: bool = False) -> None:
        """Note that `tokens` were evaluated, with logits for each of them or for the last."""
        start, end = self.n_tokens, self.n_tokens + tokens.size
        self._tokens[start:end] = tokens
        self.n_tokens = end  # only now: an interrupt leaves the log short, not wrong
        self.decoded = tokens.size == 1
        if scored and self.n_scores >= start:
            self.n_scores = self.n_tokens

    def cut(self, n_tokens: int) -> None:
        """Note that everything past the first `n_tokens` is gone."""
        self.decoded = self.decoded and n_tokens == self.n_tokens
        self.n_tokens = min(self.n_tokens, n_tokens)
        self.n_scores = min(self.n_scores, n_tokens)
        self.opaque = False

    def replace(self, tokens: IntArray) -> None:
        """Note that the sequence holds exactly `tokens`, none of them scored."""
        self.n_tokens = self.n_scores = 0
        self.append(tokens)
        self.opaque = self.decoded = False


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
        self._on_device = on_device and not (traits.whole_because or traits.family.has_window)
        self._device: DeviceCheckpoint | None = None
        self._warned_refused = False

    @property
    def _tree(self) -> PrefixTree:
        # Sequences of several tenants or adapters share one tree: each enters it as itself.
        self._shared_tree.namespace = self.namespace
        return self._shared_tree

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
    ) -> Reuse:
        """Bring the sequence to the deepest reachable prefix of `prompt`, and plan checkpoints.

        Args:
            prompt: What will be evaluated; the rest of it is for the caller to evaluate.
            user_starts: Positions where a user message starts, ascending.
            scored: Reuse only rows whose logits somebody still has.
            mode: What the request may reuse and keep.

        Returns:
            How far it got, and why no further. Never fails: what cannot be used is a miss.
        """
        begin = time.perf_counter()
        common = common_prefix(self.live.tokens, prompt)
        if self._save_late and common < self.live.n_tokens:
            with self._tree.pin(prompt):  # what it makes room for is about to be restored
                self.save()
        self.mode, self.due = mode, []
        limit = deepest_resume(prompt.size, self._align)
        if mode.reads:
            reached = self.reach(prompt, limit=limit, align=self._align, scored=scored)
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
        return Reuse(
            reached.n_tokens,
            prompt.size - reached.n_tokens,
            reached.tier,
            self._why_no_deeper(reached, max(reached.match.shared_tokens, common), limit, scored),
            restore_ms=(time.perf_counter() - begin) * 1e3,
        )

    def reach(
        self, prompt: IntArray, *, limit: int, align: int = 1, scored: bool = False
    ) -> Reached:
        """Bring the sequence to at most `limit` tokens of `prompt`. See `resume`."""
        if scored:
            limit = min(limit, align_down(self.live.n_scores, align))
        self._tree.settle()
        match = self._tree.match_prefix(prompt, limit=limit, align=align)
        n_live, checkpoint = self._live_candidate(prompt, match, limit, align)
        if max(n_live, match.n_tokens) < limit and not scored:
            known = match
            match = self._tree.discover(prompt, match, limit=limit, align=align, beyond=n_live)
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
            match = self._tree.match_prefix(prompt, limit=limit, align=align)
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
        except StateError as error:
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
            if self._on_device and self.live.n_tokens == max(self.due):
                self._device = self._runtime.read_device_checkpoint(seq_id)
                return
            n_bytes = self._runtime.checkpoint_bytes(seq_id)
            if self._save_spans(tokens, n_bytes) and self._tree.save_checkpoint(
                tokens,
                n_bytes=n_bytes,
                read=lambda: self._runtime.read_checkpoint(seq_id),
            ):
                return
        except LlamakeepError as error:
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

    def save(self, n_tokens: int | None = None) -> None:
        """Keep the rows of the first `n_tokens` that are live; None for all of them.

        A family with a rolling part keeps nothing past its last checkpoint, which `note_evaluated`
        took care of. Nor does a request whose mode says so. Never fails: what cannot be kept is
        counted and logged.
        """
        if self._runtime.traits.rolling or not self.mode.writes:
            return
        end = self.live.n_tokens if n_tokens is None else min(n_tokens, self.live.n_tokens)
        if self._held() < end:
            self._lost()
            return
        try:
            self._save_spans(self.live.tokens[:end].copy())
        except LlamakeepError as error:
            self._failed("save", error)

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
