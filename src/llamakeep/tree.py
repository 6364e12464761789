r"""The prefix tree: kept states, shared by every prompt that starts with their tokens.

A node covers a span of tokens and holds one segment, the truncatable bytes of that span, and any
number of checkpoints, rolling bytes at one position inside it. Spans end at multiples of
`segment_tokens`; where a prompt diverges, a new node hangs off the middle of an old one::

    [ 0 .......... 256 )[ 256 ......... 512 )[ 512 .. 600 )   system prompt, question A
                              c at 400  \
                                         [ 430 ... 512 )[ 512 ... 700 )   question B
                                                             c at 696

The last span of a prompt is a tail that ends anywhere; a longer tail takes its place. A position p
is *restorable* for a prompt when nodes cover its tokens [0, p) and, in families with a rolling
part, a checkpoint sits at p. Saving reads only the spans that the tree lacks; a match moves
nothing out; eviction takes leaves first, so what is kept can always be reached.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from llamakeep.checkpoints import best_to_restore, least_missed
from llamakeep.errors import IntegrityError, InvalidValue
from llamakeep.eviction import EvictionQueue
from llamakeep.policy import Policy, get_policy
from llamakeep.radix import Node, Path, check_nodes, descend, walk
from llamakeep.runtime.base import Traits
from llamakeep.states import (
    Buffer,
    Checkpoint,
    CheckpointRef,
    Match,
    Saved,
    Segment,
    SegmentRef,
)
from llamakeep.stores.base import Store
from llamakeep.tokens import IntArray, PathNames, align_down

logger = logging.getLogger("llamakeep")


class _Kept:
    """Something that can be evicted by itself: a leaf's segment or a checkpoint."""

    __slots__ = ("created", "hits", "last_used", "node", "queued", "ref", "sequence")

    def __init__(
        self, node: SpanNode, ref: SegmentRef | CheckpointRef, now: float, sequence: int
    ) -> None:
        self.node = node
        self.ref = ref
        self.created = self.last_used = now
        self.sequence = sequence
        self.hits = 0
        self.queued = False

    @property
    def n_bytes(self) -> int:
        return self.ref.n_bytes

    @property
    def n_tokens(self) -> int:
        ref = self.ref
        return ref.position if isinstance(ref, CheckpointRef) else ref.end - ref.start


class SpanNode(Node):
    """A span of tokens, its segment and the checkpoints inside it.

    Attributes:
        segment: What the node keeps of its span. The bytes are none in families without a
            truncatable part; the root covers nothing.
        checkpoints: By position, start < position <= end.
        pins: While above 0, the node and what it holds stay.
    """

    __slots__ = ("checkpoints", "pins", "segment")

    def __init__(self, tokens: IntArray, start: int = 0) -> None:
        super().__init__(tokens, start)
        self.segment: _Kept | None = None
        self.checkpoints: dict[int, _Kept] = {}
        self.pins = 0


@dataclass(slots=True)
class TreeCounters:
    """What a tree did since it was made."""

    hits: int = 0
    misses: int = 0
    evicted_segments: int = 0
    evicted_checkpoints: int = 0
    evicted_bytes: int = 0
    refused_segments: int = 0
    refused_checkpoints: int = 0
    lost_blobs: int = 0


@dataclass(frozen=True, slots=True)
class TreeEntry:
    """A prompt that the tree knows to its end.

    `path_bytes` are of everything along it, what it shares with others included; `hits` and
    `last_used` are those of its last span.
    """

    n_tokens: int
    path_bytes: int
    checkpoints: tuple[int, ...]
    hits: int
    last_used: float


class PrefixTree:
    """Kept states of one model, shared by every prompt that starts with their tokens.

    One thread at a time. Several namespaces (adapters, tenants) share one store and its budget,
    and nothing else.

    Args:
        store: Where the blobs are; used by this tree alone.
        traits: How the model's state can be kept.
        namespace: Digest of everything that makes states incompatible; whoever shares a tree sets
            it before each use, as `KeptSequence` does.
        segment_tokens: Longest span.
        max_checkpoints: Most checkpoints along one prompt; 0 keeps none.
        policy: What to evict first.
        clock: Seconds; injected for tests and simulations.

    Raises:
        InvalidValue: For a span that is below 1 or outgrows the window it must keep, a negative
            number of checkpoints, or an unknown policy.
    """

    def __init__(
        self,
        store: Store,
        traits: Traits,
        *,
        namespace: bytes = b"",
        segment_tokens: int = 256,
        max_checkpoints: int = 32,
        policy: str | Policy = "lru",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        longest = traits.max_segment_tokens
        if segment_tokens < 1 or (longest is not None and segment_tokens > longest):
            room = "1 or more" if longest is None else f"1 to {longest}"
            raise InvalidValue(f"segment_tokens must be {room}, not {segment_tokens}")
        if max_checkpoints < 0:
            raise InvalidValue(f"max_checkpoints must be 0 or more, not {max_checkpoints}")
        self.store = store
        self.traits = traits
        self.namespace = namespace
        self.segment_tokens = segment_tokens
        self.max_checkpoints = max_checkpoints
        self.policy = get_policy(policy)
        self.counters = TreeCounters()
        self._clock = clock
        self._roots: dict[bytes, SpanNode] = {}
        self._numbers = itertools.count()
        self._queue = EvictionQueue[_Kept](self.policy, clock, self._is_live)
        self._names: dict[bytes, PathNames] = {}
        self._held_bytes = 0
        self._n_nodes = 0

    def __repr__(self) -> str:
        return f"PrefixTree({self.traits.family.value}, {self.store!r})"

    # -- matching ----------------------------------------------------------------------------

    def match_prefix(self, tokens: IntArray, *, limit: int | None = None, align: int = 1) -> Match:
        """Find the deepest restorable position of a prompt. Changes nothing.

        Args:
            tokens: The prompt.
            limit: Deepest position wanted, so that something is left to evaluate; None for the
                prompt's length.
            align: The position must be a multiple of this.

        Returns:
            What restores it, to be given to `fetch`. Costs one pass over the matched tokens.
        """
        path = self._path(tokens)
        deepest = min(path.n_tokens, tokens.size if limit is None else limit)
        checkpoint: _Kept | None = None
        if self.traits.rolling:
            along = self._checkpoints_along(path)
            n_tokens = best_to_restore(along, deepest, align)
            checkpoint = along.get(n_tokens)
        else:
            n_tokens = align_down(deepest, align)
        segments = tuple(
            kept.ref
            for node, _ in path.nodes
            if node.start < n_tokens
            and (kept := node.segment) is not None
            and isinstance(kept.ref, SegmentRef)
        )
        return Match(
            n_tokens,
            path.n_tokens,
            segments if self.traits.segments and n_tokens else (),
            checkpoint.ref if checkpoint and isinstance(checkpoint.ref, CheckpointRef) else None,
        )

    def fetch(
        self, tokens: IntArray, match: Match
    ) -> tuple[list[Segment], Checkpoint | None] | None:
        """Return the states of a match. Call `touch` when they were used.

        Returns:
            The stored bytes, not copies; or None when the store has lost one. Then the tree
            forgets the node that it belonged to, and what hangs off it.
        """
        segments = []
        for ref in match.segments:
            data = self.store.get(ref.name)
            if data is None:
                self._forget(tokens, ref)
                return None
            segments.append(Segment(ref.start, ref.end, data))
        if match.checkpoint is None:
            return segments, None
        checkpoint = self.fetch_checkpoint(tokens, match)
        return None if checkpoint is None else (segments, checkpoint)

    def fetch_checkpoint(self, tokens: IntArray, match: Match) -> Checkpoint | None:
        """Return the checkpoint of a match, all that a live sequence needs. See `fetch`."""
        ref = match.checkpoint
        if ref is None:
            return None
        data = self.store.get(ref.name)
        if data is None:
            self._forget(tokens, ref)
            return None
        return Checkpoint(ref.position, data)

    def touch(self, tokens: IntArray, n_tokens: int) -> None:
        """Count a use of the path to `n_tokens`, its checkpoint there included."""
        now = self._clock()
        self.counters.hits += bool(n_tokens)
        self.counters.misses += not n_tokens
        for node, _ in self._path(tokens[:n_tokens]).nodes:
            for kept in (node.segment, node.checkpoints.get(n_tokens)):
                if kept is not None:
                    kept.last_used, kept.hits = now, kept.hits + 1

    def reject(
        self, tokens: IntArray, match: Match, refused: Segment | Checkpoint | None = None
    ) -> None:
        """Forget what a runtime refused, and what hangs off it.

        Args:
            tokens: The prompt of the match.
            match: What was to be restored.
            refused: The state that is not what it should be; None when that is not known. Then
                the deepest one goes, which costs the least if it was not to blame.
        """
        deepest = match.checkpoint or (match.segments[-1] if match.segments else None)
        ref: SegmentRef | CheckpointRef | None = deepest
        if isinstance(refused, Segment):
            ref = next((ref for ref in match.segments if ref.start == refused.start), deepest)
        if ref is not None:
            self._forget(tokens, ref)

    def checkpoint_positions(self, tokens: IntArray) -> list[int]:
        """Return where the tree has checkpoints along `tokens`, ascending."""
        return sorted(self._checkpoints_along(self._path(tokens)))

    # -- saving ------------------------------------------------------------------------------

    def save(
        self,
        tokens: IntArray,
        *,
        segment_bytes: Callable[[int], int],
        read: Callable[[int, int], Segment],
        and_bytes: int = 0,
    ) -> Saved:
        """Keep the spans of `tokens` that the tree lacks.

        Args:
            tokens: Everything that `read` can read.
            segment_bytes: The exact size of a segment of so many tokens.
            read: Reads the segment of tokens [start, end). Called once per span that the tree
                lacks, and for a tail that has grown, over its whole new span. Not called in
                families without segments.
            and_bytes: Room that is needed beside the spans, for a checkpoint at their end.

        Returns:
            What was read, and how far the tree covers `tokens` now. Nothing is evicted for what
            cannot be kept whole: of such tokens, what fits into free room is kept, and in families
            with a rolling part nothing, since only a checkpoint at the end makes spans worth it.

        Raises:
            StateError: What `read` raises; what was stored before stays.
        """
        path = self._path(tokens)
        node, at = path.nodes[-1]
        names = self._names_along(tokens, at)
        read_bytes = reread_bytes = 0
        with self._pinned(path):
            n_bytes = and_bytes + self._missing_bytes(at, tokens.size, segment_bytes)
            fits = n_bytes <= self._reclaimable_bytes()
            refused = f"{n_bytes:,} bytes of tokens {at} to {tokens.size} do not fit"
            if self.traits.rolling and not fits:
                self.counters.refused_segments += 1
                return Saved(at, refused=refused)
            while at < tokens.size:
                grows = node.start < at == node.end and at % self.segment_tokens != 0
                start = node.start if grows else at
                end = min(tokens.size, align_down(at, self.segment_tokens) + self.segment_tokens)
                n_bytes = segment_bytes(end - start) if self.traits.segments else 0
                ref = SegmentRef(names.segment(start, end), start, end, n_bytes)
                produce = partial(self._read_span, read, start, end)
                if not self._keep(ref, produce, evict=fits):
                    self.counters.refused_segments += 1
                    if fits:
                        refused = f"{n_bytes:,} bytes of tokens {start} to {end} do not fit"
                    return Saved(at, read_bytes, reread_bytes, refused)
                read_bytes += n_bytes
                if grows:
                    reread_bytes += segment_bytes(at - start) if self.traits.segments else 0
                    self._grow(node, tokens[at:end], ref)
                else:
                    node = self._hang(path, tokens[start:end], ref)
                at = end
        return Saved(tokens.size, read_bytes, reread_bytes)

    @staticmethod
    def _read_span(read: Callable[[int, int], Segment], start: int, end: int) -> Buffer:
        return read(start, end).data

    def _missing_bytes(self, at: int, end: int, segment_bytes: Callable[[int], int]) -> int:
        """Return the bytes of the spans of tokens [at, end)."""
        if not self.traits.segments or at == end:
            return 0
        first = min(end, align_down(at, self.segment_tokens) + self.segment_tokens)
        n_full, n_last = divmod(end - first, self.segment_tokens)
        n_bytes = segment_bytes(first - at) + n_full * segment_bytes(self.segment_tokens)
        return n_bytes + (segment_bytes(n_last) if n_last else 0)

    def _names_along(self, tokens: IntArray, start: int) -> PathNames:
        """Return the names along `tokens` past `start`.

        What continues the prompt before it, as the next checkpoint of a prompt does, is not hashed
        from its beginning again.
        """
        tokens = tokens.copy()  # the caller may write into its own
        names = self._names.get(self.namespace)
        if names is None or names.n_hashed > start or not names.follow(tokens):
            names = PathNames(self.namespace, tokens)
            self._names = {self.namespace: names}  # of the last prompt only
        return names

    def save_checkpoint(
        self, tokens: IntArray, *, n_bytes: int, read: Callable[[], Checkpoint]
    ) -> bool:
        """Keep a checkpoint at the end of `tokens`, whose spans the tree already covers.

        Args:
            tokens: The prompt up to the checkpoint.
            n_bytes: The checkpoint's exact size.
            read: Reads it; called only when it will be kept.

        Returns:
            Whether the tree has it now. False where checkpoints are off, the spans are missing or
            it does not fit; spans that lead to no checkpoint then are dropped.

        Raises:
            StateError: What `read` raises.
        """
        position = int(tokens.size)
        path = self._path(tokens)
        node = path.nodes[-1][0]
        covered = 0 < position == path.n_tokens
        if covered and position in node.checkpoints:
            return True
        name = self._names_along(tokens, position).checkpoint(position)
        ref = CheckpointRef(name, position, n_bytes)
        try:
            with self._pinned(path):
                if covered and self.max_checkpoints and self._keep(ref, lambda: read().data):
                    kept = _Kept(node, ref, self._clock(), next(self._numbers))
                    node.checkpoints[position] = kept
                    self._held_bytes += n_bytes
                    self._thin_out(path)
                    return True
        finally:
            if self._is_useless(node):
                self._drop_leaf(node)
        self.counters.refused_checkpoints += 1
        return False

    def prune(self, tokens: IntArray) -> None:
        """Drop the last spans along `tokens` that lead to nothing that could be restored.

        After a checkpoint was refused, in families that can restore nothing without one.
        """
        node = self._path(tokens).nodes[-1][0]
        if self._is_useless(node):
            self._drop_leaf(node)

    def _thin_out(self, path: Path[SpanNode]) -> None:
        along = self._checkpoints_along(path)
        while len(along) > self.max_checkpoints:
            self._drop_checkpoint(along.pop(least_missed(sorted(along))))

    def _hang(self, path: Path[SpanNode], tokens: IntArray, ref: SegmentRef) -> SpanNode:
        """Hang a new span off the end of a pinned path, and make it part of that."""
        node = SpanNode(tokens, ref.start)
        node.segment = _Kept(node, ref, self._clock(), next(self._numbers))
        self._roots.setdefault(self.namespace, path.nodes[0][0])
        path.nodes[-1][0].attach(node)
        path.nodes.append((node, ref.end))
        self._n_nodes += 1
        self._hold(node)  # queued when it is let go
        return node

    def _grow(self, node: SpanNode, more: IntArray, ref: SegmentRef) -> None:
        """Let a longer tail take the place of a shorter one."""
        old = node.segment
        before = self._own_bytes(node)
        node.extend(more)
        node.segment = _Kept(node, ref, self._clock(), next(self._numbers))
        if old is not None:
            node.segment.hits, node.segment.created = old.hits, old.created
            if self.traits.segments:
                self.store.delete(old.ref.name)
        self._held_bytes += self._own_bytes(node) - before  # a path that is saved is pinned

    # -- room --------------------------------------------------------------------------------

    def _keep(
        self, ref: SegmentRef | CheckpointRef, produce: Callable[[], Buffer], *, evict: bool = True
    ) -> bool:
        """Make room for a blob, then let it be read. False when room cannot be made."""
        if isinstance(ref, SegmentRef) and not self.traits.segments:
            return True
        if self._free_bytes() < ref.n_bytes:
            if not evict or ref.n_bytes > self._reclaimable_bytes():
                return False  # refused before anything is evicted
            while self._free_bytes() < ref.n_bytes:
                if not self._evict_one():
                    return False
        return self.store.put(ref.name, ref.n_bytes, produce)

    def _free_bytes(self) -> int:
        return self.store.capacity_bytes - self.store.used_bytes

    def _reclaimable_bytes(self) -> int:
        """Return the bytes that are free or could be freed without touching a pinned node."""
        # Pins are set along whole paths, so nothing that is not pinned is above what is.
        return self.store.capacity_bytes - self._held_bytes

    def _own_bytes(self, node: SpanNode) -> int:
        segment = node.segment.n_bytes if node.segment and self.traits.segments else 0
        return segment + sum(kept.n_bytes for kept in node.checkpoints.values())

    def _is_live(self, kept: _Kept) -> bool:
        node, ref = kept.node, kept.ref
        if isinstance(ref, CheckpointRef):
            return node.checkpoints.get(ref.position) is kept
        return node.segment is kept

    def _evict_one(self) -> bool:
        """Evict what the policy ranks first among leaves and checkpoints that nobody holds.

        What cannot go now is queued again when it can: a pinned node when it is let go, a segment
        that others hang off when it becomes a leaf's.
        """
        kept = self._queue.pop(self._can_go)
        if kept is None:
            return False
        if isinstance(kept.ref, CheckpointRef):
            self._drop_checkpoint(kept)
        else:
            self._drop_leaf(kept.node)
        return True

    def _can_go(self, kept: _Kept) -> bool:
        node = kept.node
        return not node.pins and (isinstance(kept.ref, CheckpointRef) or not node.branches)

    def _drop_checkpoint(self, kept: _Kept) -> None:
        node, ref = kept.node, kept.ref
        if not isinstance(ref, CheckpointRef):  # pragma: no cover - told apart by the callers
            raise InvalidValue(f"{ref} is no checkpoint")
        del node.checkpoints[ref.position]
        self.store.delete(ref.name)
        if node.pins:
            self._held_bytes -= ref.n_bytes
        self.counters.evicted_checkpoints += 1
        self.counters.evicted_bytes += ref.n_bytes
        if self._is_useless(node):
            self._drop_leaf(node)

    def _is_useless(self, node: SpanNode) -> bool:
        """Whether a rolling family has nothing to restore at or below this node."""
        held = node.checkpoints or node.branches or node.pins or node.parent is None
        return self.traits.rolling and not held

    def _drop_leaf(self, node: SpanNode) -> None:
        """Drop a leaf and what it holds, and the spans above it that led only there."""
        while node.parent is not None and not node.branches:
            parent = node.parent
            self.counters.evicted_bytes += self._own_bytes(node)
            self.counters.evicted_segments += 1
            self.counters.evicted_checkpoints += len(node.checkpoints)
            self._drop_subtree(node)
            if not self._is_useless(parent):
                return
            node = parent

    def _delete_blobs(self, node: SpanNode) -> None:
        if node.segment is not None and self.traits.segments:
            self.store.delete(node.segment.ref.name)
        for kept in node.checkpoints.values():
            self.store.delete(kept.ref.name)
        node.segment = None
        node.checkpoints.clear()

    def _forget(self, tokens: IntArray, ref: SegmentRef | CheckpointRef) -> None:
        """Drop what a lost or refused blob belonged to, and what hangs off it.

        A match that is older than the last save may name what was replaced since: that is let be.
        """
        position = ref.position if isinstance(ref, CheckpointRef) else ref.start + 1
        for node, end in self._path(tokens).nodes:
            if not node.start < position <= end:
                continue
            checkpoint = isinstance(ref, CheckpointRef)
            kept = node.checkpoints.get(position) if checkpoint else node.segment
            if kept is None or kept.ref.name != ref.name or node.pins:
                return
            self.counters.lost_blobs += 1
            if checkpoint:
                del node.checkpoints[position]
                self.store.delete(ref.name)
            else:
                self._drop_subtree(node)
            return

    def _drop_subtree(self, node: SpanNode) -> None:
        for below in walk(node):
            self._delete_blobs(below)
            self._n_nodes -= 1
        parent = node.parent
        if parent is not None:
            parent.detach(node)
            if not parent.branches and parent.segment is not None:
                self._queue.push(parent.segment)  # it is a leaf now

    # -- holding on --------------------------------------------------------------------------

    @contextmanager
    def pin(self, tokens: IntArray) -> Iterator[None]:
        """Hold everything along `tokens`, as far as the tree knows them, against eviction."""
        with self._pinned(self._path(tokens)):
            yield

    @contextmanager
    def _pinned(self, path: Path[SpanNode]) -> Iterator[None]:
        n_held, complete = 0, False
        try:
            for node, _ in path.nodes:
                self._hold(node)
                n_held += 1
            complete = True
            yield
        finally:
            # Also what was hung on meanwhile. A policy may raise: nothing stays pinned.
            nodes = path.nodes if complete else path.nodes[:n_held]
            free = [node for node, _ in nodes if self._let_go(node)]
            for node in free:
                self._enqueue_all(node)

    def _hold(self, node: SpanNode) -> None:
        if not node.pins:
            self._held_bytes += self._own_bytes(node)
        node.pins += 1

    def _let_go(self, node: SpanNode) -> bool:
        if not node.pins:
            return False  # an interrupt came before it was held
        node.pins -= 1
        if not node.pins:
            self._held_bytes -= self._own_bytes(node)
        return not node.pins

    def _enqueue_all(self, node: SpanNode) -> None:
        for kept in node.checkpoints.values():
            self._queue.push(kept)
        if node.segment is not None and not node.branches:
            self._queue.push(node.segment)

    # -- looking -----------------------------------------------------------------------------

    def _path(self, tokens: IntArray) -> Path[SpanNode]:
        # A namespace that was only asked for gets no root of its own.
        return descend(self._roots.get(self.namespace) or SpanNode(tokens[:0]), tokens)

    def _checkpoints_along(self, path: Path[SpanNode]) -> dict[int, _Kept]:
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
            path_bytes, end = 0, last.end
            node: SpanNode | None = last
            while node is not None:
                past = [at for at in node.checkpoints if at > end]
                positions += node.checkpoints.keys() - past
                path_bytes += self._own_bytes(node)
                path_bytes -= sum(node.checkpoints[at].n_bytes for at in past)
                end, node = node.start, node.parent
            found.append(
                TreeEntry(last.end, path_bytes, tuple(sorted(positions)), kept.hits, kept.last_used)
            )
        return sorted(found, key=lambda entry: entry.last_used, reverse=True)

    def clear(self) -> None:
        """Forget everything, in every namespace.

        Raises:
            InvalidValue: While something is pinned; nothing is forgotten then.
        """
        if any(node.pins for node in self._nodes()):
            raise InvalidValue("cannot clear a tree while states of it are in use")
        for node in self._nodes():
            self._delete_blobs(node)
        self._roots.clear()
        self._queue.clear()
        self._n_nodes = 0

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
        self.store.check(fix=fix)
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
        orphans = [name for name in self.store if name not in names]
        if orphans and not fix:
            raise IntegrityError(f"{len(orphans)} blobs belong to no node")
        for name in orphans:
            self.store.delete(name)
        if (total := sum(names.values())) != self.store.used_bytes:
            raise IntegrityError(
                f"nodes have {total:,} bytes, {self.store.used_bytes:,} are counted"
            )
        self._check_bookkeeping()

    def _mend_bookkeeping(self) -> None:
        """Count anew what an interrupt may have left half counted. Nothing is pinned now."""
        nodes = list(self._nodes())
        self._n_nodes, self._held_bytes = len(nodes), 0
        for node in nodes:
            node.pins = 0
            self._enqueue_all(node)

    def _check_bookkeeping(self) -> None:
        nodes = list(self._nodes())
        if len(nodes) != self._n_nodes:
            raise IntegrityError(f"{self._n_nodes} nodes are counted, there are {len(nodes)}")
        held_bytes = sum(self._own_bytes(node) for node in nodes if node.pins)
        if held_bytes != self._held_bytes:
            raise IntegrityError(f"{self._held_bytes:,} bytes count as held, {held_bytes:,} are")
        in_queue = list(self._queue)
        if len(set(map(id, in_queue))) != len(in_queue):
            raise IntegrityError(f"the queue of {len(in_queue)} has something twice")
        for node in nodes:
            evictable = [] if node.pins else list(node.checkpoints.values())
            if node.segment is not None and not (node.branches or node.pins):
                evictable.append(node.segment)
            if not all(kept.queued for kept in evictable):
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
        if (kept.ref.start, kept.ref.end) != (node.start, node.end):
            return f"{node!r} has the segment of {kept.ref.start} to {kept.ref.end}"
        if node.pins < 0:
            return f"{node!r} has {node.pins} pins"
        refs: list[SegmentRef | CheckpointRef] = [kept.ref] if self.traits.segments else []
        refs += [checkpoint.ref for checkpoint in node.checkpoints.values()]
        for position, checkpoint in node.checkpoints.items():
            ref = checkpoint.ref
            if not isinstance(ref, CheckpointRef) or ref.position != position:
                return f"{node!r} has {ref} at {position}"
            if not node.start < position <= node.end:
                return f"{node!r} has a checkpoint at {position}"
        for ref in refs:
            if ref.name not in self.store:
                return f"a blob of {node!r} is missing"
            if ref.name in names:
                return f"a blob of {node!r} belongs to another node too"
        names.update((ref.name, ref.n_bytes) for ref in refs)
        return ""
