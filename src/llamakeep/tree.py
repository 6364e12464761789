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

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np

from llamakeep.checkpoints import best_to_restore, least_missed
from llamakeep.errors import InvalidValue, StateLost, whole_number
from llamakeep.forest import SpanForest
from llamakeep.policy import DEFAULT_POLICY, NOT_WATCHING, Policy
from llamakeep.policy.queue import Rank
from llamakeep.radix import Path
from llamakeep.runtime.base import Traits
from llamakeep.spans import Kept, SpanNode
from llamakeep.states import (
    Block,
    Buffer,
    Checkpoint,
    CheckpointRef,
    Match,
    Record,
    Saved,
    Segment,
    SegmentRef,
)
from llamakeep.stores.base import State, TreeStore
from llamakeep.tokens import IntArray, PathNames, Place, align_down, state_name

logger = logging.getLogger("llamakeep")

_MAX_AVOIDED = 1_024
_MIN_GAIN = 64
"""Tokens that must be to be gained for a further tier to be asked: that costs a round trip."""


class PrefixTree(SpanForest):
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
        max_checkpoint_bytes: What the checkpoints of all prompts may occupy in memory, of what the
            store may; None for no limit of their own.
        policy: What to evict first.
        clock: Seconds; injected for tests and simulations.

    Raises:
        InvalidValue: For a span that is below 1 or outgrows the window it must keep, a negative
            number of checkpoints, or an unknown policy.
    """

    def __init__(
        self,
        store: TreeStore,
        traits: Traits,
        *,
        namespace: bytes = b"",
        segment_tokens: int = 256,
        max_checkpoints: int = 32,
        max_checkpoint_bytes: int | None = None,
        policy: str | Policy = DEFAULT_POLICY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        longest = traits.max_segment_tokens
        if segment_tokens < 1 or (longest is not None and segment_tokens > longest):
            room = "1 or more" if longest is None else f"1 to {longest}"
            raise InvalidValue(f"segment_tokens must be {room}, not {segment_tokens}")
        if max_checkpoints < 0:
            raise InvalidValue(f"max_checkpoints must be 0 or more, not {max_checkpoints}")
        if max_checkpoint_bytes is not None:
            whole_number("max_checkpoint_bytes", max_checkpoint_bytes, 0)
        super().__init__(store, traits, policy, clock, namespace)
        self.segment_tokens = segment_tokens
        self.max_checkpoints = max_checkpoints
        self.max_checkpoint_bytes = max_checkpoint_bytes
        self._names: dict[bytes, PathNames] = {}
        self._avoided: dict[bytes, None] = {}  # what a runtime refused for no known reason

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
        checkpoint: Kept | None = None
        if self.traits.rolling:
            along = self._checkpoints_along(path)
            n_tokens = best_to_restore(along, deepest, align)
            checkpoint = along.get(n_tokens)
        else:
            n_tokens = align_down(deepest, align)
        return Match(
            n_tokens,
            path.n_tokens,
            tuple(self._cover(path, n_tokens)) if self.traits.segments and n_tokens else (),
            checkpoint.ref if checkpoint and isinstance(checkpoint.ref, CheckpointRef) else None,
        )

    @staticmethod
    def _cover(path: Path[SpanNode], n_tokens: int) -> list[SegmentRef]:
        """Return the segments that cover the first `n_tokens` of a path, as few as do."""
        cover: list[SegmentRef] = []
        for node, _ in path.nodes:
            ref = node.segment.ref if node.segment is not None else None
            if node.start >= n_tokens or not isinstance(ref, SegmentRef):
                continue
            while cover and cover[-1].start >= ref.start:
                cover.pop()  # cut by another writer, who had these tokens too
            cover.append(ref)
        return cover

    def discover(
        self,
        tokens: IntArray,
        match: Match,
        *,
        limit: int | None = None,
        align: int = 1,
        beyond: int = 0,
    ) -> Match:
        """Look below memory for a deeper restorable position than `match`, and learn the way there.

        Costs an index lookup for each block of tokens past the match in each tier that is asked,
        nearest first; a further one only while 64 tokens or more are still to be gained.

        Args:
            tokens: The prompt.
            match: What `match_prefix` found, with the same arguments.
            limit: Deepest position wanted; None for the prompt's length.
            align: The position must be a multiple of this.
            beyond: Only a position deeper than this is worth anything.

        Returns:
            The match to be had now.
        """
        deepest = align_down(tokens.size if limit is None else min(limit, tokens.size), align)
        sources = [(tier.find, _MIN_GAIN if tier.is_remote else 1) for tier in self.store.below]
        for find, least_gain in [(self.store.find_pending, 1), *sources] if sources else []:
            if deepest - max(match.n_tokens, beyond) < least_gain:
                break
            names = self._names_along(tokens)
            first = align_down(match.n_tokens, self.segment_tokens)
            blocks = [
                Block(names.block(origin), origin, tokens[origin : origin + self.segment_tokens])
                for origin in range(first, deepest, self.segment_tokens)
            ]
            try:
                found = find(blocks)
            except Exception:  # a tier must not undo a request
                logger.exception("a tier could not be asked what it has")
                continue
            # Spans before the checkpoints that sit in them.
            for record in sorted(found, key=lambda it: (it.kind == "checkpoint", it.start, it.end)):
                self._graft(tokens, names, record)
            if found:
                match = self.match_prefix(tokens, limit=limit, align=align)
        self._forget_cold()
        return match

    def fetch(
        self, tokens: IntArray, match: Match
    ) -> tuple[Iterable[Segment], Checkpoint | None] | None:
        """Return the states of a match. Call `touch` when they were used.

        Returns:
            The stored bytes, not copies: a list of segments when all are in memory; else an
            iterator that reads one after the other and raises `StateLost` when one is gone, which
            `reject` wants to hear of. None when the store has lost one already: then the tree
            forgets the node that it belonged to, and what hangs off it.
        """
        refs: list[SegmentRef | CheckpointRef] = [*match.segments]
        if match.checkpoint is not None:
            refs.insert(0, match.checkpoint)
        blobs = self.store.get_many([ref.name for ref in refs])
        checkpoint = None
        if match.checkpoint is not None:
            data = _read(blobs)
            if data is None:
                self._forget(tokens, match.checkpoint)
                return None
            checkpoint = Checkpoint(match.checkpoint.position, data)
        segments = self._segments_of(match.segments, blobs)
        if not any(ref.name in self._cold for ref in match.segments):
            try:
                return list(segments), checkpoint
            except StateLost as error:
                self.reject(tokens, match, error.lost)
                return None
        return segments, checkpoint

    @staticmethod
    def _segments_of(
        refs: Sequence[SegmentRef], blobs: Iterator[Buffer | None]
    ) -> Iterator[Segment]:
        for ref in refs:
            data = _read(blobs)
            if data is None:
                raise StateLost(f"the state of tokens {ref.start} to {ref.end} is gone", lost=ref)
            yield Segment(ref.start, ref.end, data)

    def fetch_checkpoint(self, tokens: IntArray, match: Match) -> Checkpoint | None:
        """Return the checkpoint of a match, all that a live sequence needs. See `fetch`."""
        ref = match.checkpoint
        if ref is None:
            return None
        data = _read(self.store.get_many([ref.name]))
        if data is None:
            self._forget(tokens, ref)
            return None
        return Checkpoint(ref.position, data)

    def tier_of(self, tokens: IntArray, match: Match) -> str:
        """Return the lowest tier that a state of a match comes from."""
        wanted = {ref.name for ref in match.segments}
        if match.checkpoint is not None:
            wanted.add(match.checkpoint.name)
        path = self._path(tokens[: match.n_tokens])
        tiers = {k.tier for node, _ in path.nodes for k in node.states() if k.ref.name in wanted}
        return self._lowest(tiers)

    def tokens_by_tier(self, tokens: IntArray, match: Match) -> dict[str, int]:
        """Return how many tokens of a match come from each tier: by its segments, or whole."""
        path = self._path(tokens[: match.n_tokens])
        tiers = {k.ref.name: k.tier for node, _ in path.nodes for k in node.states()}
        found: dict[str, int] = {}
        if match.checkpoint is not None and not match.segments:
            found[tiers[match.checkpoint.name]] = match.n_tokens
        ends = [*(ref.start for ref in match.segments[1:]), match.n_tokens]
        for ref, end in zip(match.segments, ends, strict=False):
            tier = tiers[ref.name]
            found[tier] = found.get(tier, 0) + end - ref.start
        return found

    def touch(self, tokens: IntArray, n_tokens: int) -> None:
        """Count a use of the path to `n_tokens`, its checkpoint there included."""
        now = self._clock()
        self.counters.hits += bool(n_tokens)
        self.counters.misses += not n_tokens
        used = []
        for node, _ in self._path(tokens[:n_tokens]).nodes:
            for kept in (node.segment, node.checkpoints.get(n_tokens)):
                if kept is not None:
                    kept.last_used, kept.hits = now, kept.hits + 1
                    self._watcher.used(kept, now)
                    used += [State(kept.ref.name, kept.place)] if kept.n_bytes else []
        if used:
            self.store.seen(used, int(tokens.size), used=True)

    def reject(
        self,
        tokens: IntArray,
        match: Match,
        refused: Segment | Checkpoint | SegmentRef | None = None,
    ) -> None:
        """Forget what a runtime refused, or a tier lost, and what hangs off it.

        Args:
            tokens: The prompt of the match.
            match: What was to be restored.
            refused: The state that is not what it should be, which is deleted in every tier; or
                what is lost, of a `StateLost`. None when that is not known: then the deepest one
                goes from memory, which costs the least if it was not to blame, and is not taken
                from a tier again.
        """
        if isinstance(refused, SegmentRef):
            self._forget(tokens, refused)
            return
        deepest = match.checkpoint or (match.segments[-1] if match.segments else None)
        ref: SegmentRef | CheckpointRef | None = deepest
        if isinstance(refused, Segment):
            ref = next((ref for ref in match.segments if ref.start == refused.start), deepest)
        if ref is None:
            return
        self._forget(tokens, ref, delete=refused is not None)
        if refused is None:
            self._avoided[ref.name] = None
            while len(self._avoided) > _MAX_AVOIDED:
                del self._avoided[next(iter(self._avoided))]

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
            A policy that is selective may not think a span worth what would go for it; then that
            and the rest are not kept, which is no reason to be `refused`.

        Raises:
            StateError: What `read` raises; what was stored before stays.
        """
        self.settle()
        now = self._clock()  # of all spans: they came together
        path = self._path(tokens)
        node, at = path.nodes[-1]
        names = self._names_along(tokens)
        read_bytes = reread_bytes = 0
        with self._pinned(path):
            n_bytes = and_bytes + self._missing_bytes(at, tokens.size, segment_bytes)
            fits = n_bytes <= self._reclaimable_bytes()
            refused = f"{n_bytes:,} bytes of tokens {at} to {tokens.size} do not fit"
            if self.traits.rolling and not (fits or self.store.below):
                self.counters.refused_segments += 1
                return Saved(at, refused=refused)
            while at < tokens.size:
                grows = self._may_grow(node, at)
                start = self._start_of(node) if grows else at
                end = min(tokens.size, align_down(at, self.segment_tokens) + self.segment_tokens)
                n_bytes = segment_bytes(end - start) if self.traits.segments else 0
                place = names.segment(start, end)
                ref = SegmentRef(place.name, start, end, n_bytes)
                new = None
                if not grows:
                    new = self._new_node(node, tokens[at:end], ref, place, now, fits=fits)
                below = self._rank_of_new(new, now) if fits else None
                tier = self._keep_span(ref, place, read, new, evict=fits, below=below)
                if not tier:
                    self.counters.refused_segments += 1
                    self._tell_refused(new, tokens, names, segment_bytes, fits=fits)
                    if below is not None and self._free_bytes() < n_bytes:
                        self._tell_unworthy(tokens)
                        refused = ""
                    elif fits:
                        refused = f"{n_bytes:,} bytes of tokens {start} to {end} do not fit"
                    return Saved(at, read_bytes, reread_bytes, refused)
                read_bytes += n_bytes
                if new is None:
                    reread_bytes += segment_bytes(at - start) if self.traits.segments else 0
                    shorter = self._grow(node, tokens[at:end], ref, tier, place)
                    if self.traits.segments:
                        self.store.supersede(shorter, ref.name)
                else:
                    node = self._hang(path, new, tier)
                at = end
            self._pass_on(path, tokens.size)
        self._forget_cold()
        return Saved(tokens.size, read_bytes, reread_bytes)

    def _rank_of_new(self, node: SpanNode | None, now: float) -> Rank | None:
        """Return what has to rank lower to go for a new span; None for all that can go.

        Where states need checkpoints, a span is worth nothing without the one that is yet to come.
        """
        if node is None or node.segment is None or self.traits.rolling:
            return None
        return self.policy.rank(node.segment, now) if self._watcher.selective else None

    def _keep_span(
        self,
        ref: SegmentRef,
        place: Place,
        read: Callable[[int, int], Segment],
        new: SpanNode | None,
        *,
        evict: bool,
        below: Rank | None,
    ) -> str:
        """Let a span be read and kept. Return the tier it is in, or nothing."""
        produce = partial(self._read_span, read, ref.start, ref.end)
        try:
            return self._keep(ref, place, produce, evict=evict, below=below)
        except BaseException:
            if new is not None and new.segment is not None:
                self._watcher.leaves(new.segment, new.segment.created, evicted=False)
            raise

    def _tell_refused(
        self,
        first: SpanNode | None,
        tokens: IntArray,
        names: PathNames,
        segment_bytes: Callable[[int], int],
        *,
        fits: bool,
    ) -> None:
        """Tell a policy that watches of the spans that a prompt has and the tree does not keep.

        Args:
            first: The span that was refused, of which it has heard; None for a grown tail.
            tokens: The prompt.
            names: The names along it.
            segment_bytes: The size of a segment.
            fits: Whether the prompt could be kept whole.
        """
        if self._watcher is NOT_WATCHING or first is None or first.segment is None:
            return
        now, refused = first.segment.created, [first]
        while refused[-1].end < tokens.size:
            at = refused[-1].end
            end = min(int(tokens.size), at + self.segment_tokens)
            place = names.segment(at, end)
            n_bytes = segment_bytes(end - at) if self.traits.segments else 0
            ref = SegmentRef(place.name, at, end, n_bytes)
            refused.append(self._new_node(refused[-1], tokens[at:end], ref, place, now, fits=fits))
        for node in reversed(refused):
            if node.segment is not None:
                self._watcher.refused(node.segment, now)

    def _tell_unworthy(self, tokens: IntArray) -> None:
        """Tell that a prompt is not kept for what it is worth: as good as evicted at once."""
        if self.on_evicted is not None:
            self.on_evicted(self.namespace, tokens)

    @staticmethod
    def _start_of(node: SpanNode) -> int:
        """Return where the segment of a node starts, which may be before the node does."""
        ref = node.segment.ref if node.segment is not None else None
        return ref.start if isinstance(ref, SegmentRef) else node.start

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

    def _names_along(self, tokens: IntArray) -> PathNames:
        """Return the names along `tokens`; what they share with the last prompt stays hashed."""
        tokens = tokens.copy()  # the caller may write into its own
        names = self._names.get(self.namespace)
        if names is None:
            names = PathNames(self.namespace, tokens, self.segment_tokens)
            self._names = {self.namespace: names}  # of the last prompt only
        else:
            names.follow(tokens)
        return names

    def _may_grow(self, node: SpanNode, at: int) -> bool:
        """Whether a node ends at `at` with a tail that a longer one may take the place of."""
        return node.start < at == node.end and at % self.segment_tokens != 0

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
        try:
            if covered and self.max_checkpoints:
                place = self._names_along(tokens).checkpoint(node.start, position)
                ref = CheckpointRef(place.name, position, n_bytes)
                with self._pinned(path):
                    tier = ""
                    if self._limit_checkpoints(path, n_bytes):
                        tier = self._keep(ref, place, lambda: read().data)
                    if tier:
                        kept = self._kept(node, ref, tier, place)
                        self._put_in(node, position, kept)
                        self._thin_out(path)
                        self._pass_on(path, position, kept)
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

    def _limit_checkpoints(self, path: Path[SpanNode], n_bytes: int) -> bool:
        """Drop checkpoints until one more fits into what all of them may occupy.

        The policy says which, of the prompt itself or of others, but for those that are in use.
        Costs a visit of every node, and a look at every checkpoint for each that is dropped.

        Returns:
            Whether it fits; if it never can, nothing is dropped.
        """
        limit = self.max_checkpoint_bytes
        if limit is None:
            return True
        own = {id(node) for node, _ in path.nodes}
        kept = [each for node in self._nodes() for each in node.checkpoints.values()]
        used = sum(each.held_bytes for each in kept)
        free = [
            each for each in kept if each.held_bytes and each.node.pins <= (id(each.node) in own)
        ]
        if used + n_bytes - limit > sum(each.held_bytes for each in free):
            return False
        now = self._clock()
        while used + n_bytes > limit:
            first = min(free, key=lambda each: self.policy.rank(each, now))
            free.remove(first)
            used -= first.held_bytes
            self._drop_checkpoint(first)
        return True

    def _thin_out(self, path: Path[SpanNode]) -> None:
        along = self._checkpoints_along(path)
        while len(along) > self.max_checkpoints:
            thinned = along.pop(least_missed(sorted(along)))
            self._drop_checkpoint(thinned)
            if thinned.tier == "ram":  # what others keep below is theirs
                self.store.forget(thinned.ref.name)

    def _grow(
        self, node: SpanNode, more: IntArray, ref: SegmentRef, tier: str, place: Place
    ) -> bytes:
        """Let a longer tail take the place of a shorter one, in a pinned node.

        Returns:
            The name of the shorter one, whose bytes are still where they were.
        """
        old, before = node.segment, node.held_bytes
        node.extend(more)
        node.segment = self._kept(node, ref, tier, place)
        self._pinned_bytes += node.held_bytes - before
        if old is None:  # pragma: no cover - every node but a root has one
            return b""
        node.segment.hits, node.segment.created = old.hits, old.created
        self._watcher.replaces(node.segment, old)
        self._cold.pop(old.ref.name, None)
        return old.ref.name

    def _pass_on(self, path: Path[SpanNode], n_tokens: int, *more: Kept) -> None:
        """Tell the store which states a prompt of `n_tokens` goes through."""
        if not self.store.below:
            return
        segments = [node.segment for node, _ in path.nodes if node.segment is not None]
        states = [*(segments if self.traits.segments else ()), *more]
        self.store.seen([State(k.ref.name, k.place) for k in states], n_tokens, used=False)

    # -- what comes from tiers below ---------------------------------------------------------

    def _graft(self, tokens: IntArray, names: PathNames, record: Record) -> None:
        """Hang what a tier has below memory where it belongs, if it is what it says it is."""
        if type(record.n_bytes) is not int or record.n_bytes <= 0:
            return  # an index that others write says so
        origin = align_down(record.start, self.segment_tokens)
        end = record.end
        if not origin <= record.start < end <= origin + self.segment_tokens or (
            record.start > tokens.size
        ):
            return
        within = np.concatenate((tokens[origin : record.start], record.tokens))
        if np.array_equal(record.tokens, tokens[record.start : end]):
            whole = tokens[:end]
        else:
            whole = np.concatenate((tokens[: record.start], record.tokens))
        place = Place(
            record.kind,
            self.namespace,
            names.block(origin),
            origin,
            record.start,
            within,
            end == origin + self.segment_tokens,
        )
        if place.name != record.name or record.name in self._avoided:
            return  # its block goes on otherwise before its span starts; or it was refused before
        with self._pinned(self._path(whole)) as path:
            node, at = path.nodes[-1]
            if record.kind == "checkpoint":
                self._graft_checkpoint(path, whole, names, record, place)
            elif self.traits.segments and record.start <= at < end:
                ref = SegmentRef(record.name, record.start, end, record.n_bytes)
                self.counters.discovered += 1
                if self._may_grow(node, at) and record.start <= self._start_of(node):
                    self.store.evict(self._grow(node, whole[at:end], ref, record.tier, place))
                else:
                    new = self._new_node(node, whole[at:end], ref, place)
                    self._hang(path, new, record.tier)

    def _graft_checkpoint(
        self,
        path: Path[SpanNode],
        tokens: IntArray,
        names: PathNames,
        record: Record,
        place: Place,
    ) -> None:
        position = record.end
        at = path.n_tokens
        while not self.traits.segments and at < position:
            # Spans without bytes lead to it.
            end = min(position, align_down(at, self.segment_tokens) + self.segment_tokens)
            origin = align_down(at, self.segment_tokens)
            name = state_name("segment", names.block(origin), at, tokens[origin:end])
            new = self._new_node(path.nodes[-1][0], tokens[at:end], SegmentRef(name, at, end, 0))
            self._hang(path, new, "ram")
            at = end
        node = path.nodes[-1][0]
        if self.traits.rolling and at >= position and position not in node.checkpoints:
            self.counters.discovered += 1
            ref = CheckpointRef(record.name, position, record.n_bytes)
            self._put_in(node, position, self._kept(node, ref, record.tier, place))

    def settle(self) -> None:
        """Take into memory what was read from tiers below since, as far as there is room."""
        for name, data, tier in self.store.take_promoted():
            kept = self._cold.get(name)
            if kept is None or kept.n_bytes != data.nbytes:
                continue
            with self._pinned_up(kept.node):
                if self._make_room(kept.n_bytes) and self.store.admit(name, data, kept.place, tier):
                    kept.tier = "ram"
                    del self._cold[name]
                    self._pinned_bytes += kept.n_bytes
                    self.counters.promoted += 1

    # -- room --------------------------------------------------------------------------------

    def _keep(
        self,
        ref: SegmentRef | CheckpointRef,
        place: Place,
        produce: Callable[[], Buffer],
        *,
        evict: bool = True,
        below: Rank | None = None,
    ) -> str:
        """Make room for a blob, then let it be read. Return the tier it is in, or nothing.

        If `below` is given, nothing goes for it where the first to go does not rank below that.
        """
        if isinstance(ref, SegmentRef) and not self.traits.segments:
            return "ram"
        if evict:
            has_room = self._make_room(ref.n_bytes, below=below)
        else:
            has_room = self._free_bytes() >= ref.n_bytes
        if has_room and self.store.put(ref.name, ref.n_bytes, produce, place):
            return "ram"
        return self.store.put_below(ref.name, ref.n_bytes, produce, place)

    def _forget(
        self, tokens: IntArray, ref: SegmentRef | CheckpointRef, *, delete: bool = False
    ) -> None:
        """Drop what a lost or refused blob belonged to, and what hangs off it.

        With `delete` the blob goes in every tier: it is not what it should be. Otherwise it may
        only be out of reach.

        A match that is older than the last save may name what was replaced since: that is let be.
        """
        for node, _ in self._path(tokens).nodes:
            kept = node.segment
            if isinstance(ref, CheckpointRef):
                kept = node.checkpoints.get(ref.position)
            if kept is None or kept.ref.name != ref.name:
                continue  # by name: a segment may begin before its node does
            if node.pins:
                return
            self.counters.lost_blobs += 1
            if isinstance(ref, CheckpointRef):
                self._take_out(node, ref.position)
                self.store.evict(ref.name)
            else:
                self._drop_subtree(node)
            if delete:
                self.store.forget(ref.name)
            return

    @contextmanager
    def pin(self, tokens: IntArray) -> Iterator[None]:
        """Hold everything along `tokens`, as far as the tree knows them, against eviction."""
        with self._pinned(self._path(tokens)):
            yield


def _read(blobs: Iterator[Buffer | None]) -> Buffer | None:
    """Return the next blob; None also when its tier fails, which must not undo a request."""
    try:
        return next(blobs, None)
    except Exception:
        logger.exception("a tier could not be read")
        return None
