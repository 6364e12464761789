"""Who serves a request, where there are several: routers that know what a real one can know.

A router sees requests, and remembers where it sent them. It does not look into the replicas: what
these have evicted, or found in a shared tier, it is not told.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from blake3 import blake3

from llamakeep.errors import InvalidValue, whole_number
from llamakeep.simulate.trace import Ids, Request

ROUTES: Final = ("random", "conversation", "prefix")
REMEMBERED_BLOCKS: Final = 1 << 16
"""Blocks that a router remembers of each replica, unless told otherwise."""

_OPTIONS: Final = {"random": "seed", "conversation": "", "prefix": "blocks"}
_MAX_ENDS: Final = 1 << 20
_OVERLOAD: Final = 1.25
_HALF_LIFE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Route:
    """How a router chooses.

    Attributes:
        name: `random`, `conversation` or `prefix`.
        seed: Of `random`.
        blocks: Blocks that `prefix` remembers of each replica; None for as many as the replica
            itself can keep.
    """

    name: str = "random"
    seed: int = 0
    blocks: int | None = None

    def __str__(self) -> str:
        if self.name == "random" and self.seed:
            return f"random:seed={self.seed}"
        return self.name if self.blocks is None else f"{self.name}:blocks={self.blocks}"

    def open(self, n_replicas: int, blocks: int = REMEMBERED_BLOCKS) -> Router:
        """Return a router that has sent nothing yet.

        Args:
            n_replicas: How many there are to choose from.
            blocks: What `prefix` remembers of each where the route does not say.
        """
        if self.name == "random":
            return RandomRouter(n_replicas, self.seed)
        if self.name == "conversation":
            return ConversationRouter(n_replicas)
        return PrefixRouter(n_replicas, blocks if self.blocks is None else self.blocks)


def parse_route(text: str) -> Route:
    """Return the route that a text names: `random:seed=1`, `conversation`, `prefix:blocks=1000`.

    Example:
        >>> parse_route("prefix:blocks=1000").blocks
        1000

    Raises:
        InvalidValue: For an unknown name or option, or a value that is no whole number.
    """
    name, colon, option = text.partition(":")
    if name not in ROUTES:
        raise InvalidValue(f"a route must be one of {', '.join(ROUTES)}, not {text!r}")
    if not colon:
        return Route(name)
    key, _, value = option.partition("=")
    known = _OPTIONS[name]
    if key != known or not known:
        has = f"known: {known}" if known else "it has none"
        raise InvalidValue(f"route {name!r} has no option {key!r}; {has}")
    if not value.isdecimal() or (name == "prefix" and not int(value)):
        raise InvalidValue(f"route {text!r}: {key} must be a whole number, not {value!r}")
    return Route(name, seed=int(value)) if known == "seed" else Route(name, blocks=int(value))


class Router(Protocol):
    """Chooses who serves a request."""

    @property
    def remembered(self) -> int:
        """Entries that it remembers now."""
        ...  # pragma: no cover - protocol

    def route(self, request: Request) -> int:
        """Return the number of the replica that is to serve a request, from 0 on."""
        ...  # pragma: no cover - protocol


class RandomRouter:
    """Sends each request anywhere.

    Args:
        n_replicas: How many there are to choose from.
        seed: Of the choices.
    """

    remembered = 0

    def __init__(self, n_replicas: int, seed: int = 0) -> None:
        self._n_replicas = whole_number("n_replicas", n_replicas, 1)
        self._random = random.Random(seed)

    def route(self, request: Request) -> int:
        """Return the number of a replica."""
        return self._random.randrange(self._n_replicas)


def full_blocks(request: Request) -> tuple[Ids, list[int]]:
    """Return the blocks of a request that can be kept, and the tokens of each."""
    n_tokens, sizes = 0, []
    for size in request.sizes.tolist():
        n_tokens += size
        if n_tokens > request.keep_tokens:
            break
        sizes.append(size)
    return request.blocks[: len(sizes)], sizes


class Conversations:
    """Says which conversation a request belongs to.

    The session that the trace names. Where it names none: that of the longest earlier prompt whose
    full blocks are the beginning of this one's; a prompt that goes on from no earlier one begins a
    conversation. Costs a look-up for each block at most.

    Args:
        max_ends: Ends of prompts that are remembered, the last ones.
    """

    def __init__(self, max_ends: int = _MAX_ENDS) -> None:
        self._max_ends = max_ends
        self._ends: OrderedDict[int, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ends)

    def of(self, request: Request) -> int:
        """Return the number of a request's conversation, and remember where the prompt ends."""
        if request.session:
            return request.session
        blocks = full_blocks(request)[0].tolist() or request.blocks.tolist()
        conversation = next(
            (self._ends[block] for block in reversed(blocks) if block in self._ends), blocks[-1]
        )
        self._ends[blocks[-1]] = conversation
        self._ends.move_to_end(blocks[-1])
        if len(self._ends) > self._max_ends:
            self._ends.popitem(last=False)
        return conversation


class ConversationRouter:
    """Sends all requests of a conversation to one replica, by the hash of the conversation.

    The replica with the highest hash of both has it (rendezvous hashing): of N + 1 replicas, the
    new one takes 1 / (N + 1) of all conversations, and the others keep theirs.

    Args:
        n_replicas: How many there are to choose from.
    """

    def __init__(self, n_replicas: int) -> None:
        self._n_replicas = whole_number("n_replicas", n_replicas, 1)
        self._conversations = Conversations()

    @property
    def remembered(self) -> int:
        """Ends of prompts without a session that it remembers."""
        return len(self._conversations)

    def route(self, request: Request) -> int:
        """Return the number of the replica of a request's conversation."""
        return home_of(self._conversations.of(request), self._n_replicas)


def home_of(conversation: int, n_replicas: int) -> int:
    """Return the replica with the highest hash of itself and a conversation."""
    begin = conversation.to_bytes(8, "little")
    return max(range(n_replicas), key=lambda n: blake3(begin + n.to_bytes(4, "little")).digest(8))


class PrefixRouter:
    """Sends a request where most of its prompt was sent before, unless that replica has too much.

    For each replica it remembers the ids of the blocks that it sent there, least recently sent
    first out, the end of a prompt before its beginning. A replica costs what it would have to
    evaluate, as far as that is known, and what it was sent above 1.25 times the mean of all;
    what was sent counts half after a minute. The cheapest replica gets the request; of equal ones,
    that with the least load. So a long conversation stays where it is, and a new one does not
    follow a common system prompt to a replica that is busy with others.

    An id and its place in the order are all that is remembered of a block. A request costs a
    look-up for each block that is known, times replicas at worst, and one entry for each of its
    blocks.

    Args:
        n_replicas: How many there are to choose from.
        blocks: Blocks that are remembered of each.
    """

    def __init__(self, n_replicas: int, blocks: int = REMEMBERED_BLOCKS) -> None:
        whole_number("n_replicas", n_replicas, 1)
        self._max_blocks = whole_number("blocks", blocks, 1)
        self._sent: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(n_replicas)]
        self._load = [0.0] * n_replicas
        self._now: float | None = None

    @property
    def remembered(self) -> int:
        """Blocks that it remembers, of all replicas."""
        return sum(map(len, self._sent))

    def known_tokens(self, request: Request) -> list[int]:
        """Return how many tokens of a prompt each replica has, as far as the router knows."""
        blocks, sizes = full_blocks(request)
        ids = blocks.tolist()
        return [self._known(sent, ids, sizes) for sent in self._sent]

    @staticmethod
    def _known(sent: OrderedDict[int, None], ids: Sequence[int], sizes: Sequence[int]) -> int:
        n_tokens = 0
        for block, size in zip(ids, sizes, strict=True):
            if block not in sent:
                break
            n_tokens += size
        return n_tokens

    def route(self, request: Request) -> int:
        """Return the number of the cheapest replica, and remember that it gets the request."""
        self._age(request.timestamp)
        known, load = self.known_tokens(request), self._load
        allowed = _OVERLOAD * sum(load) / len(load)

        def cost(replica: int) -> tuple[float, float]:
            return max(0.0, load[replica] - allowed) - known[replica], load[replica]

        chosen = min(range(len(load)), key=cost)
        load[chosen] += int(request.tokens.size) - known[chosen]
        sent = self._sent[chosen]
        for block in reversed(full_blocks(request)[0].tolist()):
            sent[block] = None
            sent.move_to_end(block)
        while len(sent) > self._max_blocks:
            sent.popitem(last=False)
        return chosen

    def _age(self, timestamp: float) -> None:
        passed = 0.0 if self._now is None else max(0.0, timestamp - self._now)
        self._load = [load * 2.0 ** (-passed / _HALF_LIFE_S) for load in self._load]
        self._now = timestamp
