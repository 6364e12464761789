"""An engine on a fake model, and what its answers should be."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np

from llamakeep.engine import (
    Begun,
    Engine,
    Failed,
    Finished,
    Keeping,
    Observer,
    Piece,
    PromptKeeping,
    Record,
    Request,
    Ticket,
    TreeKeeping,
    Update,
)
from llamakeep.prompt_cache import PromptCache
from llamakeep.runtime.base import Family
from llamakeep.runtime.fake import FakeRuntime
from llamakeep.sampling import Sampling
from llamakeep.stores.base import TreeStore
from llamakeep.stores.memory import MemoryStore
from llamakeep.tokens import IntArray, TokensLike, as_tokens
from llamakeep.tree import PrefixTree

GREEDY = Sampling(temperature=0.0, ignore_eos=True)
N_VOCAB = 1_000
N_SWA = 32


def runtime_of(family: Family | str, **options: Any) -> FakeRuntime:
    """Return a small fake model."""
    given: dict[str, Any] = {"n_ctx": 2048, "n_batch": 64, "n_vocab": N_VOCAB, "n_swa": N_SWA}
    return FakeRuntime(family, **(given | options))


class Ends(Observer):
    """Tells what became of each request to a function."""

    def __init__(self, tell: Callable[[Record], object]) -> None:
        self._tell = tell

    def ended(self, record: Record) -> None:
        self._tell(record)


def tenant(salt: str) -> bytes:
    """Return a namespace for a tenant."""
    return salt.encode().ljust(32, b"\0")


@contextmanager
def engine_of(
    family: Family | str = Family.ATTENTION,
    *,
    n_seqs: int = 3,
    capacity_bytes: int = 1 << 26,
    runtime: FakeRuntime | None = None,
    store: TreeStore | None = None,
    keeping: dict[str, Any] | None = None,
    cache: str = "tree",
    n_ctx: int = 2048,
    **options: Any,
) -> Iterator[Engine]:
    """An engine over a tree, which proves at its end that what it counts is there."""
    model = runtime or runtime_of(family, n_seqs=n_seqs, n_ctx=n_ctx)
    kept: Keeping
    if cache == "tree":
        store = MemoryStore(capacity_bytes) if store is None else store
        tree = PrefixTree(store, model.traits, segment_tokens=32)
        kept = TreeKeeping(model, tree, tenant, **({"min_step": 64} | (keeping or {})))
    else:
        whole = PromptCache(capacity_bytes, mode=cast(Any, cache))
        kept = PromptKeeping(model, whole, tenant, **({"n_ubatch": 32} | (keeping or {})))
    engine = Engine(model, kept, model_name="fake", **options)
    try:
        yield engine
        engine.check()
    finally:
        engine.close()


class Heard:
    """Listens to one request."""

    def __init__(self) -> None:
        self.updates: list[Update] = []
        self.ticket: Ticket | None = None
        self.ended = threading.Event()
        self.begun = threading.Event()
        self.answered = threading.Event()

    def __call__(self, update: Update) -> None:
        self.updates.append(update)
        if isinstance(update, (Begun, Piece)):
            self.begun.set()
        if isinstance(update, Piece):
            self.answered.set()
        if isinstance(update, (Finished, Failed)):
            self.begun.set()
            self.answered.set()
            self.ended.set()

    def wait(self) -> Finished:
        """Return how it finished.

        Raises whatever it failed with.
        """
        assert self.ended.wait(60), self.updates
        last = self.updates[-1]
        if isinstance(last, Failed):
            raise last.error
        assert isinstance(last, Finished)
        return last

    @property
    def tokens(self) -> list[int]:
        return [
            token for update in self.updates if isinstance(update, Piece) for token in update.tokens
        ]

    @property
    def text(self) -> str:
        return "".join(update.text for update in self.updates if isinstance(update, Piece))


def ask(engine: Engine, prompt: TokensLike, max_tokens: int | None = 4, **options: Any) -> Heard:
    """Submit a request, greedy unless told otherwise."""
    heard = Heard()
    options = {"sampling": GREEDY, "max_tokens": max_tokens} | options
    heard.ticket = engine.submit(Request(as_tokens(prompt), **options), heard)
    return heard


def cold(family: Family | str, prompt: TokensLike, n: int, **options: Any) -> list[int]:
    """Return the greedy answer of a model that has seen nothing else and may not end it."""
    model = runtime_of(family, **options)
    ends = [token for token in range(N_VOCAB) if model.vocab.is_end(token)]
    tokens = as_tokens(prompt)
    model.evaluate(0, tokens)
    answer: list[int] = []
    while len(answer) < n:
        logits = model.logits()
        logits[ends] = -np.inf
        token = int(np.argmax(logits))
        answer.append(token)
        model.evaluate(0, np.array([token], np.int32))
    return answer


def span(n: int, seed: int) -> IntArray:
    """Return `n` random tokens, none of which ends an answer."""
    return np.random.default_rng(seed).integers(300, N_VOCAB, n, dtype=np.int32)


def join(*parts: TokensLike) -> IntArray:
    """Return the parts one after the other."""
    return np.concatenate([as_tokens(part) for part in parts])
