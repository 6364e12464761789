r"""Finding prefixes of token sequences: nodes with long edges, and a map built on them.

A node carries an *edge*, a run of tokens at known absolute positions. Edges are never split:
what diverges hangs as a branch off the point where it diverges, in the middle of the edge or at
its end. So a node keeps its identity, and whatever a caller attached to it, for its whole life::

    root --0-- [1 2 3 4 5 6]       keys  1 2 3 4 5 6
                    3\                    1 2 3 9 9
                      [9 9]

The tree is correct because of one invariant: a branch's first token differs from the edge's
token at the same point, and from every other branch's there. Then at most one way leads on, and
finding it is one comparison of memory per edge and one dictionary lookup per branch.

`Node` and `descend` know nothing about what nodes hold. `RadixIndex` is a map over them.
Nothing here recurses: chains of edges can be thousands deep. Nothing here locks: a caller that
shares a tree between threads holds its own lock, also around lookups.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np

from llamakeep.errors import IntegrityError, InvalidValue
from llamakeep.tokens import IntArray, TokensLike, as_tokens, matched

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["Node", "Path", "RadixIndex", "check_nodes", "descend", "walk"]

N = TypeVar("N", bound="Node")
V = TypeVar("V")

_INT32 = np.dtype(np.int32)
_TOKEN_BYTES = _INT32.itemsize

_START = attrgetter("start")
_STAMP = attrgetter("stamp")

# The most that CPython 3.11 was seen to allocate for a node that has a branch, with its own entry
# in its parent, and for a key with its place in the recency order. Leaves take about 150 less.
# test_radix.py holds both to what tracemalloc sees.
_NODE_BYTES = 640
_KEY_BYTES = 136


class Node:
    """One edge of a prefix tree and the branches that hang off it.

    Args:
        tokens: The edge, copied. Only a root may be empty.
        start: Absolute position of the edge's first token.

    Attributes:
        start: Absolute position of the edge's first token.
        parent: The node this one is a branch of; None for a root or a detached node.
        branches: Child nodes by (absolute position p, first token there), start < p <= end; off
            a root, whose edge is empty, p is 0. Ordered least recently attached or renewed
            first. Change it through `attach`, `detach` and `renew`.
    """

    __slots__ = ("_likely", "_raw", "branches", "parent", "start")

    def __init__(self, tokens: IntArray, start: int = 0) -> None:
        # The edge is a bytes object because `bytes.startswith` compares it with a slice of a
        # query by one memcmp, without a temporary: 5 times as fast as np.array_equal.
        self._raw = np.ascontiguousarray(tokens, dtype=np.int32).tobytes()
        self.start = start
        self.parent: Self | None = None
        self.branches: dict[tuple[int, int], Self] = {}
        # The point of the branch last attached or renewed, where `descend` looks first.
        self._likely = sys.maxsize

    @property
    def tokens(self) -> IntArray:
        """The edge as a read-only int32 array; a view made anew at each access."""
        return np.frombuffer(self._raw, dtype=np.int32)

    @property
    def end(self) -> int:
        """Absolute position after the edge's last token."""
        return self.start + len(self._raw) // _TOKEN_BYTES

    def __repr__(self) -> str:
        return f"<{type(self).__name__} [{self.start}, {self.end}) branches={len(self.branches)}>"

    def token_at(self, position: int) -> int:
        """Return the edge's token at an absolute `position` in [start, end)."""
        if not self.start <= position < self.end:
            raise InvalidValue(f"position {position} is outside [{self.start}, {self.end})")
        offset = (position - self.start) * _TOKEN_BYTES
        return int.from_bytes(self._raw[offset : offset + _TOKEN_BYTES], sys.byteorder)

    def attach(self, child: Self) -> None:
        """Hang `child` off this node at `child.start`, as the most recent branch.

        Raises:
            InvalidValue: When the child is empty or has a parent, its start is no point of this
                edge, or another way leads on from there with the same token. Nothing changed.
        """
        point = child.start
        if not child._raw or child.parent is not None:
            raise InvalidValue(f"{child!r} is empty or already attached")
        if point > self.end or point < self.start or (point == self.start and self._raw):
            raise InvalidValue(f"no branch at {point} off an edge [{self.start}, {self.end})")
        key = (point, child.token_at(point))
        if key in self.branches or (point < self.end and self.token_at(point) == key[1]):
            raise InvalidValue(f"token {key[1]} at {point} already leads on from {self!r}")
        self.branches[key] = child
        child.parent = self
        self._likely = point

    def detach(self, child: Self) -> None:
        """Take `child`, with what hangs off it, from this node.

        Raises:
            InvalidValue: When it is not one of this node's branches.
        """
        del self.branches[self._key_of(child)]
        child.parent = None

    def renew(self, child: Self) -> None:
        """Make `child` the most recent of this node's branches.

        Raises:
            InvalidValue: When it is not one of this node's branches.
        """
        key = self._key_of(child)
        self.branches[key] = self.branches.pop(key)
        self._likely = child.start

    def truncate(self, end: int) -> None:
        """Cut the edge at absolute position `end`.

        Raises:
            InvalidValue: When that empties the edge, or a branch hangs off a later point.
                Nothing changed. Costs a pass over the branches.
        """
        if not self.start < end <= self.end or any(point > end for point, _ in self.branches):
            raise InvalidValue(f"{self!r} cannot be cut at {end}")
        self._raw = self._raw[: (end - self.start) * _TOKEN_BYTES]

    def extend(self, tokens: IntArray) -> None:
        """Append `tokens`, copied, to the edge.

        Raises:
            InvalidValue: When a branch at the edge's end starts with the same token.
        """
        if tokens.size and (self.end, int(tokens[0])) in self.branches:
            raise InvalidValue(f"token {int(tokens[0])} already leads on from {self!r}")
        self._raw += np.ascontiguousarray(tokens, dtype=np.int32).tobytes()

    def _key_of(self, child: Self) -> tuple[int, int]:
        if child.parent is not self:
            raise InvalidValue(f"{child!r} is not a branch of {self!r}")
        return child.start, child.token_at(child.start)


# A generic NamedTuple exists from Python 3.11 on; type checkers understand it everywhere.
if TYPE_CHECKING:

    class Path(NamedTuple, Generic[N]):
        """How far a prompt was followed, see `descend`."""

        nodes: list[tuple[N, int]]
        n_tokens: int

else:

    class Path(NamedTuple):
        """How far a prompt was followed, see `descend`.

        Attributes:
            nodes: The nodes entered, root first, each with the absolute position up to which
                the prompt equals its edge. That is where the next node starts; for the last
                node it is `n_tokens`.
            n_tokens: Length of the longest prefix of the prompt that is in the tree.
        """

        nodes: list[tuple[Any, int]]
        n_tokens: int


def descend(root: N, tokens: TokensLike) -> Path[N]:
    """Follow `tokens` from `root` as far as the tree knows them.

    Args:
        root: A node that starts at 0.
        tokens: The prompt. A contiguous int32 array is taken as it is, unchecked: to find the
            range of 8,000 ids takes longer than to find the ids, and one that no edge can hold
            matches nothing.

    Returns:
        The path; never empty, its first node is `root`.

    Raises:
        TokenError: When `tokens` is something else and `as_tokens` refuses it.

    Changes nothing. Costs one memcmp of the matched tokens, under 1 us for each edge entered, and
    up to 5 us more where an edge is left in its middle at an unlikely point; nothing per branch.
    """
    array: Any = tokens  # of int32 below, which type checkers cannot follow
    if not (
        isinstance(tokens, np.ndarray)
        and tokens.dtype == _INT32
        and tokens.ndim == 1
        and tokens.flags.c_contiguous
    ):
        array = as_tokens(tokens)
    n_all = len(array)
    nodes: list[tuple[N, int]] = []
    node: N | None = root
    point = 0
    while node is not None:
        likely = node._likely
        if likely < n_all:
            child = node.branches.get((likely, array.item(likely)))
            # Branches differ from the edge, so equality up to a branch that fits is the whole
            # answer; to find an unknown point of divergence takes several times as long.
            if child is not None and node._raw.startswith(array[point:likely]):
                nodes.append((node, likely))
                node, point = child, likely
                continue
        point += matched(node._raw, array[point : point + len(node._raw) // _TOKEN_BYTES])
        nodes.append((node, point))
        if point == n_all:
            break
        node = node.branches.get((point, array.item(point)))
    return Path(nodes, point)


def walk(root: N) -> Iterator[N]:
    """Yield `root` and every node below it, parents before children.

    A node's branches are read when the next one is asked for; the node just yielded may be
    changed.
    """
    stack = [root]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(node.branches.values())


def check_nodes(root: Node) -> tuple[int, int]:
    """Check the invariants that `descend` relies on, in the whole tree.

    Returns:
        The number of nodes, `root` not counted, and of tokens in their edges.

    Raises:
        IntegrityError: Naming the first node that breaks one.

    Costs a visit of every node.
    """
    n_nodes, n_tokens = -1, 0
    for node in walk(root):
        n_nodes += 1
        n_tokens += node.end - node.start
        for (point, token), child in node.branches.items():
            if child.parent is not node:
                raise IntegrityError(f"{child!r}: its parent is {child.parent!r}, not {node!r}")
            if child.end == child.start or (child.start, child.token_at(child.start)) != (
                point,
                token,
            ):
                raise IntegrityError(f"{child!r} is filed under token {token} at {point}")
            if not node.start < point <= node.end and not node.start == point == node.end:
                raise IntegrityError(f"{child!r} hangs outside {node!r}")
            if point < node.end and node.token_at(point) == token:
                raise IntegrityError(f"{child!r} starts like {node!r} at {point}: token {token}")
    return n_nodes, n_tokens


class _Value(Generic[V]):
    """A key's value, at the absolute position where the key ends."""

    __slots__ = ("stamp", "start", "value")

    def __init__(self, start: int, value: V) -> None:
        # Named like a node's, so that one recency order can hold both.
        self.start = start
        self.stamp = 0
        self.value = value


class _KeyNode(Node, Generic[V]):
    """A node that holds values at positions of its edge, and knows which entry is newest.

    An *entry* is a value or a branch. Its stamp is that of the most recently inserted or touched
    key in it; stamps are unique among the entries of a node. 0 means not ordered yet.
    """

    __slots__ = ("_stairs", "held", "order", "stamp")

    def __init__(self, tokens: IntArray, start: int = 0) -> None:
        super().__init__(tokens, start)
        self.held: list[_Value[V]] = []  # by position
        self.order: list[_Value[V] | Self] = []  # every entry, by stamp
        self.stamp = 0
        # The entries that have no newer one at or after their point, oldest first, each after
        # its negated point, so that the first numbers ascend. None: not known.
        self._stairs: list[tuple[int, _Value[V] | Self]] | None = None

    def value_up_to(self, point: int) -> _Value[V] | None:
        """Return the value at the last position that has one and is not after `point`."""
        held = self.held
        if held and held[-1].start <= point:
            return held[-1]
        index = bisect_right(held, point, key=_START)
        return held[index - 1] if index else None

    def value_at(self, point: int) -> _Value[V] | None:
        """Return the value at `point`."""
        value = self.value_up_to(point)
        return value if value is not None and value.start == point else None

    def newest(self, point: int) -> _Value[V] | Self:
        """Return the newest entry at or after `point`, which no edge's end lacks."""
        newest = self.order[-1]
        if newest.start >= point:
            return newest
        stairs = self._stairs
        if stairs is None:
            stairs = self._stairs = self._build_stairs()
        return stairs[bisect_right(stairs, -point, key=_first) - 1][1]

    def promote(self, entry: _Value[V] | Self, stamp: int) -> None:
        """Make `entry` the newest, with a stamp above all others."""
        order = self.order
        if not order or order[-1] is not entry:
            if entry.stamp:
                del order[bisect_left(order, entry.stamp, key=_STAMP)]
            order.append(entry)
            stairs = self._stairs
            if stairs is not None:
                while stairs and stairs[-1][0] >= -entry.start:
                    stairs.pop()
                stairs.append((-entry.start, entry))
        entry.stamp = stamp

    def demote(self, entry: Self, stamp: int) -> None:
        """Give `entry`, which lost its newest key, an older stamp."""
        self.discard(entry)
        entry.stamp = stamp
        insort(self.order, entry, key=_STAMP)

    def discard(self, entry: _Value[V] | Self) -> None:
        """Take `entry` out of the recency order."""
        del self.order[bisect_left(self.order, entry.stamp, key=_STAMP)]
        stairs = self._stairs
        if stairs is not None:
            # Only an entry on the stairs can hide others; without it they have to be found.
            index = bisect_left(stairs, -entry.start, key=_first)
            if index < len(stairs) and stairs[index][1] is entry:
                self._stairs = None

    def absorb(self, child: Self) -> None:
        """Append a branch at this edge's end, and all that it holds, to this node."""
        self.discard(child)
        self.detach(child)
        self.extend(child.tokens)
        for key, grandchild in child.branches.items():
            self.branches[key] = grandchild
            grandchild.parent = self
        child.branches = {}
        self.held += child.held
        self.order = sorted(self.order + child.order, key=_STAMP)
        self._stairs = None

    def check(self) -> None:
        """Raise IntegrityError when values, recency order or stairs do not add up."""
        points = [value.start for value in self.held]
        is_root = self.parent is None
        if points != sorted(set(points)) or any(
            not self.start < point <= self.end and not (is_root and point == 0) for point in points
        ):
            raise IntegrityError(f"{self!r} holds values at {points}")
        if not is_root and (not points or points[-1] != self.end):
            raise IntegrityError(f"{self!r} ends after its last value, of {points}")
        stamps = [entry.stamp for entry in self.order]
        if stamps != sorted(set(stamps)) or 0 in stamps:
            raise IntegrityError(f"{self!r} orders entries by stamps {stamps}")
        entries = {id(entry) for entry in (*self.held, *self.branches.values())}
        if {id(entry) for entry in self.order} != entries:
            raise IntegrityError(f"{self!r} orders {len(stamps)} of {len(entries)} entries")
        if not is_root and stamps[-1] != self.stamp:
            raise IntegrityError(f"{self!r} has stamp {self.stamp}, its newest {stamps[-1]}")
        if self._stairs is not None and self._stairs != self._build_stairs():
            raise IntegrityError(f"{self!r} has outdated stairs of {len(self._stairs)} entries")

    def _build_stairs(self) -> list[tuple[int, _Value[V] | Self]]:
        stairs: list[tuple[int, _Value[V] | Self]] = []
        reached, end = -1, self.end
        for entry in reversed(self.order):
            if entry.start > reached:
                reached = entry.start
                stairs.append((-reached, entry))
                if reached == end:
                    break
        stairs.reverse()
        return stairs


def _first(step: tuple[int, object]) -> int:
    return step[0]


def _values(entry: _Value[V] | _KeyNode[V]) -> Iterator[V]:
    """Yield the values of all keys in an entry, which may be one."""
    if not isinstance(entry, _KeyNode):
        yield entry.value
        return
    for node in walk(entry):
        for held in node.held:
            yield held.value


class RadixIndex(Generic[V]):
    """A map from token sequences to values that finds keys by prefix.

    Keys are lists, tuples or integer arrays of token ids; the index stores copies, what two keys
    share is stored once. Lookups change nothing that a caller can see. An empty key is allowed.

    A lookup costs what `descend` costs, whatever the number of keys. `insert` and `touch` add
    O(depth) list operations, `remove` also a copy of an edge when it joins two.

    `KeyError` and `TokenError` (for what is no token sequence) are the only errors raised,
    besides `check`'s.
    """

    def __init__(self) -> None:
        self.clear()

    def __len__(self) -> int:
        return self._n_keys

    def __iter__(self) -> Iterator[tuple[IntArray, V]]:
        return self.items()

    def __contains__(self, tokens: TokensLike) -> bool:
        return self.contains(tokens)

    def __repr__(self) -> str:
        return f"<RadixIndex keys={self._n_keys} nbytes={self.nbytes}>"

    @property
    def nbytes(self) -> int:
        """Bytes of all edges plus an estimate for nodes and keys; values not included. O(1).

        The estimate is a constant per node and per key, chosen so that the sum is rarely below
        what CPython 3.11 allocates on 64 bits, and up to a third above it.
        An empty index counts as 0.
        """
        return (
            self._n_tokens * _TOKEN_BYTES + self._n_nodes * _NODE_BYTES + self._n_keys * _KEY_BYTES
        )

    def insert(self, tokens: TokensLike, value: V) -> None:
        """Store `value` under `tokens`, replacing what was there; the key is now the newest.

        Raises:
            TokenError: When an id is negative or above int32.
        """
        key = as_tokens(tokens)
        nodes, n_tokens = descend(self._root, key)
        node = nodes[-1][0]
        if n_tokens < len(key):
            parent, node = node, _KeyNode(key[n_tokens:], n_tokens)
            parent.attach(node)
            nodes.append((node, len(key)))
            self._n_nodes += 1
            self._n_tokens += len(key) - n_tokens
        held = node.value_at(len(key))
        if held is None:
            held = _Value(len(key), value)
            insort(node.held, held, key=_START)
            self._n_keys += 1
        held.value = value
        self._touch(nodes, held)

    def longest_prefix(self, tokens: TokensLike, *, touch: bool = False) -> tuple[int, V | None]:
        """Find the longest key that is wholly a prefix of `tokens`.

        Args:
            tokens: What it shall be a prefix of.
            touch: Make it the newest, for less than `touch` costs.

        Returns:
            The key's length and value; (0, None) when there is none. An empty key is a prefix
            of everything.
        """
        nodes = descend(self._root, tokens).nodes
        while nodes:
            node, point = nodes[-1]
            held = node.value_up_to(point)
            if held is not None:
                if touch:
                    self._touch(nodes, held)
                return held.start, held.value
            nodes.pop()
        return 0, None

    def longest_common_prefix(
        self, tokens: TokensLike, *, touch: bool = False
    ) -> tuple[int, V | None]:
        """Find the key that shares the most leading tokens with `tokens`, at least one.

        The key may diverge after them, or be longer than `tokens`. Among several, a key that is
        wholly a prefix of `tokens` wins, then the most recently inserted or touched.

        Args:
            tokens: What is looked for.
            touch: Make the key the newest, for less than `touch` costs.

        Returns:
            The number of tokens shared and the key's value; (0, None) when there is none.
        """
        nodes, n_tokens = descend(self._root, tokens)
        if not n_tokens:
            return 0, None
        node = nodes[-1][0]
        # A node holds no more than its keys need, so some key runs through the point reached.
        entry = node.value_at(n_tokens) or node.newest(n_tokens)
        while isinstance(entry, _KeyNode):
            nodes.append((entry, entry.start))
            entry = entry.order[-1]
        if touch:
            self._touch(nodes, entry)
        return n_tokens, entry.value

    def prefixes(self, tokens: TokensLike) -> list[tuple[int, V]]:
        """Return every key that is wholly a prefix of `tokens`, the longest first.

        Returns:
            Their lengths and values. Costs what `descend` costs, and a step for each.
        """
        found: list[tuple[int, V]] = []
        for node, point in reversed(descend(self._root, tokens).nodes):
            n_held = bisect_right(node.held, point, key=_START)
            found += [(held.start, held.value) for held in reversed(node.held[:n_held])]
        return found

    def sharing(self, tokens: TokensLike, least: int = 0) -> Iterator[tuple[int, V]]:
        """Yield every key that shares at least `least` leading tokens with `tokens`.

        Those that share more come first, others in no particular order. The index must not change
        meanwhile.

        Args:
            tokens: What is looked for.
            least: Keys that share less are not visited.

        Returns:
            How many tokens each shares, and its value. Costs what `descend` costs, a look at the
            entries of the edges that the path leads along, and a visit of each key that is yielded.
        """
        followed: _KeyNode[V] | None = None
        for node, point in reversed(descend(self._root, tokens).nodes):
            if point < least:
                return
            beside: list[_Value[V] | _KeyNode[V]] = []
            for entry in node.order:
                if entry is followed or entry.start < least:
                    continue
                if entry.start < point:
                    beside.append(entry)
                else:
                    yield from ((point, value) for value in _values(entry))
            beside.sort(key=_START, reverse=True)
            for entry in beside:
                yield from ((entry.start, value) for value in _values(entry))
            followed = node

    def contains(self, tokens: TokensLike) -> bool:
        """Return whether `tokens` is a key."""
        return self._find(tokens)[1] is not None

    def get(self, tokens: TokensLike) -> V | None:
        """Return the value under exactly `tokens`, or None."""
        held = self._find(tokens)[1]
        return None if held is None else held.value

    def next_tokens(self, tokens: TokensLike) -> list[int]:
        """Return the tokens that some key has after `tokens`, in no particular order.

        Costs a look at every branch of one edge.
        """
        nodes, n_tokens = descend(self._root, tokens)
        if n_tokens < len(tokens):
            return []
        node = nodes[-1][0]
        found = [node.token_at(n_tokens)] if n_tokens < node.end else []
        return found + [token for point, token in node.branches if point == n_tokens]

    def touch(self, tokens: TokensLike) -> None:
        """Make the key `tokens` the newest.

        Raises:
            KeyError: When it is no key; names its length.
        """
        nodes, held = self._find(tokens)
        if held is None:
            raise KeyError(f"no key of these {len(tokens)} tokens")
        self._touch(nodes, held)

    def remove(self, tokens: TokensLike) -> V:
        """Remove the key `tokens`, and every token that no other key needs.

        What is left is what a fresh index of the remaining keys would hold: an edge is cut after
        its last value or branch, and an edge that ends in a branch takes the branch's edge over.

        Returns:
            The value.

        Raises:
            KeyError: When it is no key; names its length.
        """
        nodes, held = self._find(tokens)
        if held is None:
            raise KeyError(f"no key of these {len(tokens)} tokens")
        node = nodes[-1][0]
        del node.held[bisect_left(node.held, held.start, key=_START)]
        node.discard(held)
        self._n_keys -= 1
        parent = node.parent
        if parent is None:
            return held.value
        if not node.order:
            parent.discard(node)
            parent.detach(node)
            self._n_nodes -= 1
            self._n_tokens -= node.end - node.start
            # The parent's edge ends at a value, as every edge does: it stays as it is.
            node = parent
        elif held.start == node.end:
            self._tidy(node)
        # The removed key may have been the newest of several nodes on its path.
        while (parent := node.parent) is not None and node.order[-1].stamp != node.stamp:
            parent.demote(node, node.order[-1].stamp)
            node = parent
        return held.value

    def items(self) -> Iterator[tuple[IntArray, V]]:
        """Yield every key, as a read-only array, with its value; shorter prefixes first.

        Keys that do not extend one another come in no particular order. The index must not
        change meanwhile. Costs a copy of each key's tokens.
        """
        stack: list[tuple[_KeyNode[V], IntArray]] = [(self._root, np.empty(0, np.int32))]
        while stack:
            node, before = stack.pop()
            tokens = np.concatenate((before, node.tokens))
            tokens.flags.writeable = False
            for held in node.held:
                yield tokens[: held.start], held.value
            stack.extend((child, tokens[: child.start]) for child in node.branches.values())

    def clear(self) -> None:
        """Remove every key."""
        old: _KeyNode[V] | None = getattr(self, "_root", None)
        self._root: _KeyNode[V] = _KeyNode(np.empty(0, np.int32))
        self._clock = 0
        self._n_keys = 0
        self._n_nodes = 0
        self._n_tokens = 0
        if old is not None:
            # Nodes and parents refer to each other. Untied, the memory is free now, not when
            # the garbage collector next runs.
            for node in list(walk(old)):
                node.parent, node.branches, node.order, node._stairs = None, {}, [], None

    def check(self) -> None:
        """Check every invariant of the index.

        Raises:
            IntegrityError: With the numbers that do not add up.

        Costs a visit of every node and key.
        """
        n_nodes, n_tokens = check_nodes(self._root)
        n_keys = 0
        for node in walk(self._root):
            node.check()
            n_keys += len(node.held)
            if node.stamp > self._clock:
                raise IntegrityError(f"{node!r} has stamp {node.stamp} of {self._clock}")
        counted = (self._n_keys, self._n_nodes, self._n_tokens)
        if counted != (n_keys, n_nodes, n_tokens):
            raise IntegrityError(
                f"(keys, nodes, tokens) counted {counted}, found {(n_keys, n_nodes, n_tokens)}"
            )

    def _find(self, tokens: TokensLike) -> tuple[list[tuple[_KeyNode[V], int]], _Value[V] | None]:
        nodes, n_tokens = descend(self._root, tokens)
        return nodes, nodes[-1][0].value_at(n_tokens) if n_tokens == len(tokens) else None

    def _touch(self, nodes: list[tuple[_KeyNode[V], int]], held: _Value[V]) -> None:
        self._clock += 1
        entry: _Value[V] | _KeyNode[V] = held
        for node, _ in reversed(nodes):
            node.promote(entry, self._clock)
            entry = node

    def _tidy(self, node: _KeyNode[V]) -> None:
        """Let a node end at a value again, after it lost the one at its end."""
        end = max(entry.start for entry in node.order)
        if end < node.end:
            self._n_tokens -= node.end - end
            node.truncate(end)
        last = node.newest(end)
        if node.value_at(end) is None and isinstance(last, _KeyNode):
            node.absorb(last)
            self._n_nodes -= 1
