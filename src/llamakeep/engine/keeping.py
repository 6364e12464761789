"""What the engine's slots hold, and what becomes of it: kept in the prefix tree.

The engine decides who runs; a `Keeping` decides what of a prompt need not be evaluated, and keeps
what was. `TreeKeeping` has one `KeptSequence` for each slot, all over one tree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol, TypeAlias

from llamakeep.engine.request import Request
from llamakeep.engine.slotfile import SlotContent
from llamakeep.explain import kept_elsewhere
from llamakeep.fingerprint import Difference
from llamakeep.outline import Outline
from llamakeep.policy import name_of
from llamakeep.runtime.base import Runtime
from llamakeep.sequence import KeptSequence
from llamakeep.states import Reuse
from llamakeep.tokens import IntArray, common_prefix
from llamakeep.tree import PrefixTree
from llamakeep.wholes import read_whole

HearEvicted: TypeAlias = Callable[[bytes, IntArray, bool], None]
"""Hears of the namespace of a state that goes to make room, of the tokens up to its end, and
whether it served only prompts that begin with all of them."""


class Keeping(Protocol):
    """Brings slots to what is known of a prompt, and keeps what they compute.

    One thread at a time, the engine's. Slots are numbered as the runtime's sequences.
    """

    parks: bool
    """Idle slots may be parked while others run: what they hold is kept then."""
    has_tiers: bool
    """There are tiers below memory, in which what is kept outlives the process."""

    @property
    def failures(self) -> dict[str, int]:
        """How often what failed and was survived."""
        ...  # pragma: no cover - protocol

    def tokens(self, slot_id: int) -> IntArray:
        """Return what a slot holds: a view, good until the next call."""
        ...  # pragma: no cover - protocol

    def held_tokens(self, slot_id: int) -> int:
        """Return how many tokens a slot holds; from any thread."""
        ...  # pragma: no cover - protocol

    def choose(self, idle: Sequence[int], request: Request, last_used: Sequence[float]) -> int:
        """Return which of the idle slots serves a request; the one it asks for, if it does."""
        ...  # pragma: no cover - protocol

    def begin(self, slot_id: int, known: IntArray, request: Request) -> Reuse:
        """Bring a slot to the deepest prefix of `known` that need not be evaluated."""
        ...  # pragma: no cover - protocol

    def next_stop(self, slot_id: int, end: int) -> int:
        """Return where to stop on the way to `end`, so that a checkpoint can be taken."""
        ...  # pragma: no cover - protocol

    def worth_waiting(self, slot_id: int, prompt: IntArray, n_tokens: int) -> int:
        """Return the tokens that a prompt need not evaluate if it waits for a slot.

        Args:
            slot_id: It holds the beginning of the prompt, and is about to evaluate more of it.
            prompt: What waits.
            n_tokens: How many of the prompt's tokens the slot will have.
        """
        ...  # pragma: no cover - protocol

    def evaluated(self, slot_id: int, tokens: IntArray) -> bool:
        """Note tokens that were evaluated into a slot; False when it lost what it held."""
        ...  # pragma: no cover - protocol

    def holds(self, slot_id: int) -> bool:
        """Whether a slot really holds what is known of it; one that does not is emptied."""
        ...  # pragma: no cover - protocol

    def end(self, slot_id: int, request: Request) -> None:
        """An answer is complete."""
        ...  # pragma: no cover - protocol

    def save(self, slot_id: int) -> None:
        """Keep what a slot holds; it goes on holding it."""
        ...  # pragma: no cover - protocol

    def park(self, slot_id: int, *, force: bool = True) -> bool:
        """Keep what a slot holds, and empty it.

        Args:
            slot_id: The slot.
            force: Empty it also when it cannot be kept.

        Returns:
            Whether it is empty now.
        """
        ...  # pragma: no cover - protocol

    def lay_low(self, slot_id: int) -> None:
        """Move what a slot holds into the lowest cells that are free."""
        ...  # pragma: no cover - protocol

    def clear(self, slot_id: int) -> None:
        """Empty a slot, and keep nothing of it that is not kept already."""
        ...  # pragma: no cover - protocol

    def content(self, slot_id: int) -> SlotContent:
        """Read what a slot holds, with what is kept along it."""
        ...  # pragma: no cover - protocol

    def hold(self, slot_id: int, content: SlotContent, salt: str) -> None:
        """Note what was restored into a slot that was empty."""
        ...  # pragma: no cover - protocol

    def namespace(self, slot_id: int) -> bytes:
        """Return what makes a slot's states incompatible with others."""
        ...  # pragma: no cover - protocol

    def namespace_of(self, salt: str) -> bytes:
        """Return what makes a tenant's states incompatible with others."""
        ...  # pragma: no cover - protocol

    def stats(self) -> dict[str, Any]:
        """Return counters and sizes: JSON-ready; from any thread."""
        ...  # pragma: no cover - protocol

    def entries(self) -> list[dict[str, Any]]:
        """Return every kept prompt, most recently used first: JSON-ready."""
        ...  # pragma: no cover - protocol

    def outline(self) -> Outline:
        """Return what is kept as a tree, in few strokes; bounded, whatever is kept."""
        ...  # pragma: no cover - protocol

    def tell_evicted(self, hear: HearEvicted) -> None:
        """Let somebody hear of what goes to make room, in the engine's thread."""
        ...  # pragma: no cover - protocol

    def kept_elsewhere(self, namespace: bytes, tokens: IntArray) -> tuple[Difference, ...]:
        """Return under which other settings tiers below have a prompt's beginning, or nothing.

        From any thread; costs reads of a tier.
        """
        ...  # pragma: no cover - protocol

    def forget(self) -> Callable[[], None]:
        """Forget everything that is kept, for every tenant this engine has seen.

        Returns:
            What waits until it is gone below memory, too; for any thread.
        """
        ...  # pragma: no cover - protocol

    def flush(self, timeout_s: float | None) -> bool:
        """Wait until everything kept is in the tiers below memory too; whether it is."""
        ...  # pragma: no cover - protocol

    def check(self) -> None:
        """Prove that what is counted is what is kept; raises IntegrityError."""
        ...  # pragma: no cover - protocol

    def close(self, timeout_s: float) -> None:
        """Let go of the tiers, once what is on its way has arrived or the time is over."""
        ...  # pragma: no cover - protocol


class TreeKeeping:
    """Slots over the prefix tree. See `Keeping`.

    Args:
        runtime: Holds a sequence for each slot.
        tree: Keeps their states; of a store without capacity, only what is live is reused.
        namespaces: Returns what makes a tenant's states incompatible with others, for its salt.
        all_namespaces: Returns those of all tenants of this model and these settings, those of
            earlier processes included, for `forget`.
        describe: Returns the description of a namespace, None if it is not known; see
            `Namespace.describe`. From any thread.
        similarity: Share of a prompt that an idle slot must hold to be chosen for it; else the one
            used least recently is. 0 chooses by recency alone.
        align: See `KeptSequence`.
        min_step: See `KeptSequence`.
    """

    def __init__(
        self,
        runtime: Runtime,
        tree: PrefixTree,
        namespaces: Callable[[str], bytes],
        *,
        all_namespaces: Callable[[], Sequence[bytes]] = tuple,
        describe: Callable[[bytes], Mapping[str, Any] | None] = lambda _digest: None,
        similarity: float = 0.1,
        align: int = 8,
        min_step: int = 512,
    ) -> None:
        self.has_tiers = bool(tree.store.below)
        self.parks = tree.store.capacity_bytes > 0 or self.has_tiers
        self.failures: dict[str, int] = {}
        self._runtime = runtime
        self._tree = tree
        self.namespace_of = namespaces
        self._all_namespaces = all_namespaces
        self._describe = describe
        self._similarity = similarity
        self._salts = [""] * runtime.n_seqs
        self._sequences = [
            KeptSequence(
                runtime,
                tree,
                seq_id,
                align=align,
                min_step=min_step,
                save_late=True,
                keep_ends=True,
                namespace=namespaces(""),
            )
            for seq_id in range(runtime.n_seqs)
        ]
        for sequence in self._sequences:
            sequence.failures = self.failures

    def tokens(self, slot_id: int) -> IntArray:
        """Return what a slot holds."""
        return self._sequences[slot_id].live.tokens

    def held_tokens(self, slot_id: int) -> int:
        """Return how many tokens a slot holds."""
        return self._sequences[slot_id].live.n_tokens

    def choose(self, idle: Sequence[int], request: Request, last_used: Sequence[float]) -> int:
        """Return the idle slot that holds most of the prompt, or the one used least recently."""
        if request.slot is not None:
            return request.slot
        best, shared = -1, self._similarity * request.prompt.size
        for slot_id in idle if request.mode.reads and self._similarity else ():
            if self._salts[slot_id] == request.salt:
                common = common_prefix(self.tokens(slot_id), request.prompt)
                if common > shared:
                    best, shared = slot_id, common
        if best >= 0:
            return best
        held = [bool(self.tokens(slot_id).size) for slot_id in range(len(self._sequences))]
        return min(idle, key=lambda slot_id: (held[slot_id], last_used[slot_id], slot_id))

    def begin(self, slot_id: int, known: IntArray, request: Request) -> Reuse:
        """Bring a slot to the deepest prefix of `known` that is live anywhere, or kept."""
        sequence = self._sequences[slot_id]
        if self._salts[slot_id] != request.salt:
            self.park(slot_id)
            sequence.namespace = self.namespace_of(request.salt)
            self._salts[slot_id] = request.salt
        others = [
            other
            for other, salt in zip(self._sequences, self._salts, strict=True)
            if other is not sequence
            and salt == request.salt
            and other.live.n_tokens
            and other.mode.writes  # what may not be kept is nobody else's
        ]
        return sequence.resume(
            known, user_starts=request.user_starts, mode=request.mode, others=others
        )

    def next_stop(self, slot_id: int, end: int) -> int:
        """Return where the next checkpoint is due, or `end`."""
        sequence = self._sequences[slot_id]
        return sequence.cuts(end - sequence.live.n_tokens)[0]

    def worth_waiting(self, slot_id: int, prompt: IntArray, n_tokens: int) -> int:
        """Return what waiting saves; a checkpoint is due then where the prompts part."""
        sequence = self._sequences[slot_id]
        if not sequence.mode.writes:  # see `begin`: nothing is copied from it
            return 0
        there = sequence.live.n_tokens
        at = sequence.expect_branch(n_tokens)
        if at <= there:
            return 0
        if self._runtime.traits.rolling:  # nothing can be copied before that checkpoint is there
            there = sequence.kept(prompt[:at])
        return at - there

    def evaluated(self, slot_id: int, tokens: IntArray) -> bool:
        """Note tokens that were evaluated, and take a checkpoint where one is due."""
        sequence = self._sequences[slot_id]
        end = sequence.live.n_tokens + tokens.size
        sequence.note_evaluated(tokens)
        return sequence.live.n_tokens == end

    def holds(self, slot_id: int) -> bool:
        """Whether a slot really holds what is known of it."""
        sequence = self._sequences[slot_id]
        held = self._runtime.positions(slot_id).n_tokens
        if held == sequence.live.n_tokens:
            return True
        sequence.clear()
        return False

    def end(self, slot_id: int, request: Request) -> None:
        """Leave the slot as it is, for the next turn; empty it when nothing may be kept.

        What it held before such a request was kept when that began.
        """
        if not request.mode.writes:
            self._sequences[slot_id].clear()

    def save(self, slot_id: int) -> None:
        """Keep what the slot holds."""
        self._sequences[slot_id].save()

    def park(self, slot_id: int, *, force: bool = True) -> bool:
        """Keep what the slot holds, and empty it."""
        sequence = self._sequences[slot_id]
        if sequence.save() or force:
            sequence.clear()
        return not sequence.live.n_tokens

    def lay_low(self, slot_id: int) -> None:
        """Move what the slot holds into the lowest cells that are free."""
        self._sequences[slot_id].lay_low()

    def clear(self, slot_id: int) -> None:
        """Empty the slot."""
        self._sequences[slot_id].clear()

    def content(self, slot_id: int) -> SlotContent:
        """Read what the slot holds, with the checkpoints that are kept along it."""
        sequence = self._sequences[slot_id]
        tokens = sequence.live.tokens.copy()
        whole = read_whole(self._runtime, slot_id, int(tokens.size))
        return SlotContent(tokens, whole, tuple(sequence.kept_checkpoints()))

    def hold(self, slot_id: int, content: SlotContent, salt: str) -> None:
        """Note what was restored into the slot, and keep its checkpoints."""
        sequence = self._sequences[slot_id]
        self._salts[slot_id], sequence.namespace = salt, self.namespace_of(salt)
        sequence.hold(content.tokens)
        sequence.keep_checkpoints(content.checkpoints)

    def namespace(self, slot_id: int) -> bytes:
        """Return the namespace of the slot's tenant."""
        return self._sequences[slot_id].namespace

    def stats(self) -> dict[str, Any]:
        """Return the tree's counters and sizes, and those of the tiers below."""
        store, tree = self._tree.store, self._tree
        return {
            "cache": "tree",
            "used_bytes": store.used_bytes,
            "capacity_bytes": store.capacity_bytes,
            "blobs": len(store.memory),
            "nodes": len(tree),
            "policy": name_of(tree.policy),
            "failures": dict(self.failures),
            **asdict(tree.counters),
            "below": store.stats(),
        }

    def entries(self) -> list[dict[str, Any]]:
        """Return every kept prompt of every tenant."""
        return [asdict(entry) for entry in self._tree.entries()]

    def outline(self) -> Outline:
        """Return the trees of all tenants, in few strokes."""
        return self._tree.outline()

    def tell_evicted(self, hear: HearEvicted) -> None:
        """Let somebody hear of what goes from memory."""
        exact = self._runtime.traits.rolling
        self._tree.on_evicted = lambda namespace, tokens: hear(namespace, tokens, exact)

    def kept_elsewhere(self, namespace: bytes, tokens: IntArray) -> tuple[Difference, ...]:
        """Ask the tiers on this machine for other namespaces of the same tenant."""
        described = self._describe(namespace)
        if described is None:
            return ()
        return kept_elsewhere(self._tree.store.below, namespace, described, tokens)

    def forget(self) -> Callable[[], None]:
        """Forget what is kept, on disk too; a shared tier keeps what it has until it expires."""
        self._tree.clear()
        return self._tree.store.forget_namespaces(list(self._all_namespaces()))

    def flush(self, timeout_s: float | None) -> bool:
        """Wait for the tiers below memory."""
        return self._tree.store.flush(timeout_s)

    def check(self) -> None:
        """Compare the tree's counts with what is there."""
        self._tree.check()

    def close(self, timeout_s: float) -> None:
        """Save what is live, and let go of the tiers."""
        for slot_id in range(len(self._sequences)):
            self.save(slot_id)
        self._tree.store.close(timeout_s)
        self._tree.clear()
