"""A forest of spans over a store: what is kept, what may go, and the proof that it adds up.

One tree for each namespace, all over one store and its budget. What is evicted frees memory; tiers
below look after themselves. A node of which memory holds nothing may still be known because a tier
below has it: its states are *cold*.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import TypeAlias

from llamakeep.errors import IntegrityError, InvalidValue
from llamakeep.outline import Outline, outline_of_trees
from llamakeep.policy import Policy, get_policy, looks_around, watcher_of
from llamakeep.policy.queue import EvictionQueue, Rank
from llamakeep.radix import Path, check_nodes, descend, walk
from llamakeep.runtime.base import Traits
from llamakeep.spans import Kept, SpanNode, TreeCounters, TreeEntry
from llamakeep.states import CheckpointRef, SegmentRef
from llamakeep.stores.base import TreeStore
from llamakeep.tokens import IntArray, Place

logger = logging.getLogger("llamakeep")

_MAX_COLD = 16_384
"""States in tiers below that are remembered; more are found again when they are asked for."""

OnEvicted: TypeAlias = Callable[[bytes, IntArray], None]
"""Hears of the namespace of a state that goes, and of the tokens from the start to its end."""


class SpanForest:
    """Spans of tokens and their states, of several namespaces, over one store.

    One thread at a time.

    Args:
        store: Where the blobs are; used by this forest alone.
        traits: How the model's state can be kept.
        policy: What to evict first.
        clock: Seconds.
        namespace: What is looked at and kept; may be changed between calls.

    Attributes:
        on_evicted: Hears of each state that goes to make room; None for nobody.

    Raises:
        InvalidValue: For an unknown policy.
    """

    def __init__(
        self,
        store: TreeStore,
        traits: Traits,
        policy: str | Policy,
        clock: Callable[[], float],
        namespace: bytes,
    ) -> None:
        self.store = store
        self.traits = traits
        self.namespace = namespace
        self.policy = get_policy(policy)
        self.counters = TreeCounters()
        self.on_evicted: OnEvicted | None = None
        self._clock = clock
        self._roots: dict[bytes, SpanNode] = {}
        self._numbers = itertools.count()
        self._queue = EvictionQueue[Kept](self.policy, clock, self._is_live)
        self._looks_around = looks_around(self.policy)
        self._watcher = watcher_of(
            self.policy,
            self._queue.look_again,
            lambda: self.store.capacity_bytes,
            may_refuse=not traits.rolling,
        )
        self._cold: dict[bytes, Kept] = {}  # what is only in tiers below, by name
        self._pinned_bytes = 0
        self._n_nodes = 0

    # -- nodes ------------------------------------------------------------------------------------

    def _kept(
        self,
        node: SpanNode,
        ref: SegmentRef | CheckpointRef,
        tier: str,
        place: Place | None = None,
        now: float | None = None,
    ) -> Kept:
        now = self._clock() if now is None else now
        kept = Kept(node, ref, "ram", now, next(self._numbers))
        kept.place = place if self.store.below else None
        self._keep_in(kept, tier)
        return kept

    def _keep_in(self, kept: Kept, tier: str) -> None:
        kept.tier = tier
        if tier != "ram" and kept.n_bytes:
            self._cold[kept.ref.name] = kept

    def _put_in(self, node: SpanNode, position: int, kept: Kept) -> None:
        """Put a checkpoint into a node."""
        node.checkpoints[position] = kept
        self._watcher.enters(kept, kept.created, node.segment)
        if self._looks_around:  # less is lost with what comes next, and with the node's segment
            if node.segment is not None:
                self._queue.look_again(node.segment)
            for each in node.next_states(position):
                self._queue.look_again(each)
        if node.pins:
            self._pinned_bytes += kept.held_bytes
        else:
            self._queue.push(kept)

    def _new_node(
        self,
        above: SpanNode,
        tokens: IntArray,
        ref: SegmentRef,
        place: Place | None = None,
        now: float | None = None,
        *,
        fits: bool = True,
    ) -> SpanNode:
        """Return a new span, the end of `ref`, that is to hang off another."""
        node = SpanNode(tokens, ref.end - int(tokens.size))
        kept = node.segment = self._kept(node, ref, "ram", place, now)
        self._watcher.enters(kept, kept.created, above.segment, fits=fits)
        return node

    def _hang(self, path: Path[SpanNode], node: SpanNode, tier: str) -> SpanNode:
        """Hang a new span, kept in a tier, off the end of a pinned path, as part of that."""
        if node.segment is not None:
            self._keep_in(node.segment, tier)
        self._roots.setdefault(self.namespace, path.nodes[0][0]).namespace = self.namespace
        path.nodes[-1][0].attach(node)
        path.nodes.append((node, node.end))
        self._n_nodes += 1
        self._hold(node)  # queued when it is let go
        return node

    # -- room -------------------------------------------------------------------------------------

    def _make_room(self, n_bytes: int, *, below: Rank | None = None) -> bool:
        """Evict until there are `n_bytes`; evict nothing where there cannot be.

        If `below` is given, nothing is evicted either where the first to go does not rank below it.
        """
        if n_bytes > self._reclaimable_bytes():
            return False
        while self._free_bytes() < n_bytes:
            if not self._evict_one(below):
                return False
            below = None  # it has been decided: nothing goes in vain
        return True

    def _free_bytes(self) -> int:
        return self.store.capacity_bytes - self.store.used_bytes

    def _reclaimable_bytes(self) -> int:
        """Return the bytes that are free or could be freed without touching a pinned node."""
        # Pins are set along whole paths, so nothing that is not pinned is above what is.
        return self.store.capacity_bytes - self._pinned_bytes

    def _forget_cold(self) -> None:
        """Forget what is only in tiers below, where that is too much: it can be found again.

        What was learnt first goes first, as far as nothing in memory hangs off it.
        """
        if len(self._cold) <= _MAX_COLD:
            return
        for kept in list(self._cold.values()):
            if self._is_live(kept) and isinstance(kept.ref, CheckpointRef) and not kept.node.pins:
                self._take_out(kept.node, kept.ref.position)
            node: SpanNode | None = kept.node
            while node is not None and self._is_cold_leaf(node):
                parent = node.parent
                self._drop_subtree(node)
                if len(self._cold) <= _MAX_COLD:
                    return
                node = parent

    @staticmethod
    def _is_cold_leaf(node: SpanNode) -> bool:
        is_leaf = node.parent is not None and not (node.branches or node.pins)
        return is_leaf and bool(node.n_bytes) and not node.held_bytes

    def _evict_one(self, below: Rank | None = None) -> bool:
        """Evict what the policy ranks first among leaves and checkpoints that nobody holds.

        What cannot go now is queued again when it can: a pinned node when it is let go, a segment
        that others hang off when it becomes a leaf's.
        """
        kept = self._queue.pop(self._can_go, below=below)
        if kept is None:
            return False
        self._watcher.leaves(kept, self._clock(), evicted=True)
        if isinstance(kept.ref, CheckpointRef):
            self._drop_checkpoint(kept)
        else:
            self._drop_leaf(kept.node)
        return True

    def _is_live(self, kept: Kept) -> bool:
        node, ref = kept.node, kept.ref
        if isinstance(ref, CheckpointRef):
            return node.checkpoints.get(ref.position) is kept
        return node.segment is kept

    def _can_go(self, kept: Kept) -> bool:
        node = kept.node
        return not node.pins and (isinstance(kept.ref, CheckpointRef) or not node.branches)

    def _drop_checkpoint(self, kept: Kept) -> None:
        node, ref = kept.node, kept.ref
        if not isinstance(ref, CheckpointRef):  # pragma: no cover - told apart by the callers
            raise InvalidValue(f"{ref} is no checkpoint")
        self._tell_evicted(node, ref.position)
        self._take_out(node, ref.position)
        self.store.evict(ref.name)
        self.counters.evicted_checkpoints += 1
        self.counters.evicted_bytes += kept.held_bytes
        if self._is_useless(node):
            self._drop_leaf(node)

    def _tell_evicted(self, node: SpanNode, position: int) -> None:
        """Tell that what would have been restored up to a position is about to go."""
        if self.on_evicted is not None and node.held_bytes:
            root, tokens = node.path_to(position)
            self.on_evicted(root.namespace, tokens)

    def _take_out(self, node: SpanNode, position: int) -> None:
        """Take a checkpoint out of its node; its bytes stay where they are."""
        kept = node.checkpoints.pop(position)
        self._watcher.leaves(kept, kept.last_used, evicted=False)
        self._cold.pop(kept.ref.name, None)
        if self._looks_around and node.segment is not None:
            self._queue.look_again(node.segment)  # it takes one less along
        if node.pins:
            self._pinned_bytes -= kept.held_bytes

    def _is_useless(self, node: SpanNode) -> bool:
        """Whether a rolling family has nothing to restore at or below this node."""
        held = node.checkpoints or node.branches or node.pins or node.parent is None
        return self.traits.rolling and not held

    def _drop_leaf(self, node: SpanNode) -> None:
        """Drop a leaf and what it holds, and the spans above it that led only there."""
        while node.parent is not None and not node.branches:
            parent = node.parent
            for position in sorted(node.checkpoints) if self.traits.rolling else (node.end,):
                self._tell_evicted(node, position)
            self.counters.evicted_bytes += node.held_bytes
            self.counters.evicted_segments += 1
            self.counters.evicted_checkpoints += len(node.checkpoints)
            self._drop_subtree(node)
            if not self._is_useless(parent):
                return
            node = parent

    def _drop_subtree(self, node: SpanNode) -> None:
        for below in walk(node):
            self._empty(below)
            self._n_nodes -= 1
        parent = node.parent
        if parent is not None:
            parent.detach(node)
            if not parent.branches and parent.segment is not None:
                self._queue.push(parent.segment)  # it is a leaf now
            if not parent.branches and parent.parent is None:
                self._forget_root(parent)

    def _forget_root(self, root: SpanNode) -> None:
        """Forget the root of a namespace of which nothing is known any more."""
        for namespace, each in self._roots.items():
            if each is root:
                del self._roots[namespace]
                return

    def _empty(self, node: SpanNode) -> None:
        """Drop what a node holds from memory."""
        for kept in node.states():
            self._watcher.leaves(kept, kept.last_used, evicted=False)
            self._cold.pop(kept.ref.name, None)
            self.store.evict(kept.ref.name)
        node.segment = None
        node.checkpoints.clear()

    # -- holding on -------------------------------------------------------------------------------

    @contextmanager
    def _pinned(self, path: Path[SpanNode]) -> Iterator[Path[SpanNode]]:
        n_held, complete = 0, False
        try:
            for node, _ in path.nodes:
                self._hold(node)
                n_held += 1
            complete = True
            yield path
        finally:
            # Also what was hung on meanwhile. A policy may raise: nothing stays pinned.
            nodes = path.nodes if complete else path.nodes[:n_held]
            free = [node for node, _ in nodes if self._let_go(node)]
            with ExitStack() as each:  # what raises for one thing leaves no other out
                for node in free:
                    for kept in self._evictable(node):
                        each.callback(self._queue.push, kept)

    def _pinned_up(self, last: SpanNode) -> AbstractContextManager[Path[SpanNode]]:
        """Hold a node and everything above it."""
        nodes, node = [(last, last.end)], last.parent
        while node is not None:
            nodes.append((node, nodes[-1][0].start))
            node = node.parent
        return self._pinned(Path(nodes[::-1], last.end))

    def _hold(self, node: SpanNode) -> None:
        if not node.pins:
            self._pinned_bytes += node.held_bytes
        node.pins += 1

    def _let_go(self, node: SpanNode) -> bool:
        if not node.pins:
            return False  # an interrupt came before it was held
        node.pins -= 1
        if not node.pins:
            self._pinned_bytes -= node.held_bytes
        return not node.pins

    @staticmethod
    def _evictable(node: SpanNode) -> list[Kept]:
        """Return what could go of a node that nobody holds."""
        found = list(node.checkpoints.values())
        if node.segment is not None and not node.branches:
            found.append(node.segment)
        return found

    # -- looking ----------------------------------------------------------------------------------

    def _path(self, tokens: IntArray) -> Path[SpanNode]:
        # A namespace that was only asked for gets no root of its own.
        return descend(self._roots.get(self.namespace) or SpanNode(tokens[:0]), tokens)

    def _checkpoints_along(self, path: Path[SpanNode]) -> dict[int, Kept]:
        return {
            position: kept
            for node, end in path.nodes
            for position, kept in node.checkpoints.items()
            if position <= end
        }

    def _nodes(self) -> Iterator[SpanNode]:
        for root in self._roots.values():
            nodes = walk(root)
            next(nodes)
            yield from nodes

    def __len__(self) -> int:
        return self._n_nodes

    def entries(self) -> list[TreeEntry]:
        """Return every prompt known to its end, most recently used first."""
        found = []
        for last in self._nodes():
            kept = last.segment
            if kept is None or any(point == last.end for point, _ in last.branches):
                continue  # a longer prompt goes on from here
            positions: list[int] = []
            path_bytes, end, tiers = 0, last.end, set[str]()
            node: SpanNode | None = last
            while node is not None:
                past = [at for at in node.checkpoints if at > end]
                positions += node.checkpoints.keys() - past
                path_bytes += node.n_bytes
                path_bytes -= sum(node.checkpoints[at].n_bytes for at in past)
                tiers.update(k.tier for at, k in node.checkpoints.items() if at <= end)
                tiers.update([node.segment.tier] if node.segment is not None else [])
                end, node = node.start, node.parent
            found.append(
                TreeEntry(
                    last.end,
                    path_bytes,
                    tuple(sorted(positions)),
                    kept.hits,
                    kept.last_used,
                    self._lowest(tiers),
                )
            )
        return sorted(found, key=lambda entry: entry.last_used, reverse=True)

    def outline(self) -> Outline:
        """Return what there is, in few strokes. Changes nothing; costs 4 ms at most."""
        return outline_of_trees(self._roots.values(), self._n_nodes, self._clock())

    def _lowest(self, tiers: set[str]) -> str:
        order = [tier.tier for tier in self.store.below]
        return max(tiers - {"ram"}, key=order.index, default="ram")

    def clear(self) -> None:
        """Forget everything, in every namespace; tiers below keep what they have.

        Raises:
            InvalidValue: While something is pinned; nothing is forgotten then.
        """
        if any(node.pins for node in self._nodes()):
            raise InvalidValue("cannot clear a tree while states of it are in use")
        for node in self._nodes():
            self._empty(node)
        self._roots.clear()
        self._cold.clear()
        self._queue.clear()
        self._n_nodes = 0

    # -- proving ----------------------------------------------------------------------------------

    def check(self, *, fix: bool = False) -> None:
        """Prove that nodes, blobs and counted bytes agree.

        Args:
            fix: Mend instead of raising, where it can be done: drop nodes whose blobs are gone
                and blobs without a node.

        Raises:
            IntegrityError: With the numbers. Costs a visit of every node.
        """
        for root in self._roots.values():
            check_nodes(root)
        self.store.memory.check(fix=fix)
        if fix:
            self._mend_bookkeeping()
        names, broken = self._survey()
        while fix and broken:
            for node, problem in broken:
                logger.warning("dropping a node: %s", problem)
                self._drop_subtree(node)
            names, broken = self._survey()  # a blob that two had is gone for both
        if broken:
            raise IntegrityError(broken[0][1])
        orphans = [name for name in self.store.held() if name not in names]
        if orphans and not fix:
            raise IntegrityError(f"{len(orphans)} blobs belong to no node")
        for name in orphans:
            self.store.evict(name)
        if (total := sum(names.values())) != self.store.used_bytes:
            raise IntegrityError(
                f"nodes have {total:,} bytes, {self.store.used_bytes:,} are counted"
            )
        self._check_bookkeeping()

    def _mend_bookkeeping(self) -> None:
        """Count anew what an interrupt may have left half counted. Nothing is pinned now."""
        nodes = list(self._nodes())
        self._n_nodes, self._pinned_bytes = len(nodes), 0
        states = [kept for node in nodes for kept in node.states()]
        self._cold = {kept.ref.name: kept for kept in states if kept.tier != "ram"}
        for node in nodes:
            node.pins = 0
            for kept in self._evictable(node):
                self._queue.push(kept)

    def _check_bookkeeping(self) -> None:
        nodes = list(self._nodes())
        if len(nodes) != self._n_nodes:
            raise IntegrityError(f"{self._n_nodes} nodes are counted, there are {len(nodes)}")
        held_bytes = sum(node.held_bytes for node in nodes if node.pins)
        if held_bytes != self._pinned_bytes:
            raise IntegrityError(f"{self._pinned_bytes:,} bytes count as held, {held_bytes:,} are")
        cold = {k.ref.name for node in nodes for k in node.states() if k.tier != "ram"}
        if cold != self._cold.keys():
            raise IntegrityError(f"{len(self._cold)} states count as below, {len(cold)} are")
        in_queue = list(self._queue)
        if len(set(map(id, in_queue))) != len(in_queue):
            raise IntegrityError(f"the queue of {len(in_queue)} has something twice")
        for node in nodes:
            if not node.pins and not all(kept.queued for kept in self._evictable(node)):
                raise IntegrityError(f"{node!r} holds what would never be evicted")

    def _survey(self) -> tuple[dict[bytes, int], list[tuple[SpanNode, str]]]:
        """Return the sizes of all blobs by name, and what is wrong with which nodes.

        What hangs off a node with something wrong is left out.
        """
        names: dict[bytes, int] = {}
        broken = []
        stack = [child for root in self._roots.values() for child in root.branches.values()]
        while stack:
            node = stack.pop()
            if problem := self._problem(node, names):
                broken.append((node, problem))
            else:
                stack.extend(node.branches.values())
        return names, broken

    def _problem(self, node: SpanNode, names: dict[bytes, int]) -> str:
        """Say what is wrong with a node, or nothing; add its blobs to `names`."""
        kept = node.segment
        if kept is None or not isinstance(kept.ref, SegmentRef):
            return f"{node!r} has no segment"
        if kept.ref.start > node.start or kept.ref.end != node.end:
            return f"{node!r} has the segment of {kept.ref.start} to {kept.ref.end}"
        if node.pins < 0:
            return f"{node!r} has {node.pins} pins"
        segment = [kept] if self.traits.segments else []
        refs = [k.ref for k in (*segment, *node.checkpoints.values()) if k.tier == "ram"]
        for position, checkpoint in node.checkpoints.items():
            ref = checkpoint.ref
            if not isinstance(ref, CheckpointRef) or ref.position != position:
                return f"{node!r} has {ref} at {position}"
            if not node.start < position <= node.end:
                return f"{node!r} has a checkpoint at {position}"
        for ref in refs:
            if not self.store.holds(ref.name):
                return f"a blob of {node!r} is missing"
            if ref.name in names:
                return f"a blob of {node!r} belongs to another node too"
        names.update((ref.name, ref.n_bytes) for ref in refs)
        return ""
