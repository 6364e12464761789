"""States of every shape that the drop-in caches meet, small and without a model."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

N_VOCAB = 16


def native(mark: int, size: int = 3000, n_tokens: int = 2) -> bytes:
    """Return a context's state of `size` bytes as llama.cpp writes it, of recurrent memory."""
    data_bytes = size - 44
    head = struct.pack("<I4sIiIiIIiQ", 4, b"stub", 1, n_tokens - 1, 1, 0, 0, 1, 0, data_bytes)
    return head + bytes([mark]) * data_bytes


class LlamaState:
    """A state with the attributes of llama-cpp-python 0.3.36's."""

    def __init__(
        self,
        input_ids: npt.NDArray[np.intc],
        scores: npt.NDArray[np.single],
        n_tokens: int,
        llama_state: bytes,
        llama_state_size: int,
        seed: int,
    ) -> None:
        self.input_ids = input_ids
        self.scores = scores
        self.n_tokens = n_tokens
        self.llama_state = llama_state
        self.llama_state_size = llama_state_size
        self.seed = seed


class ForkState(LlamaState):
    """A state with what forks add: the last logits, and its own account of its size."""

    def __init__(self, last_logits: npt.NDArray[np.single], **attributes: Any) -> None:
        super().__init__(**attributes)
        self.last_logits = last_logits

    @property
    def nbytes(self) -> int:
        """Native bytes and owned arrays."""
        arrays = (self.input_ids, self.scores, self.last_logits)
        return len(self.llama_state) + sum(each.nbytes for each in arrays)


class LegacyState:
    """A state of an older kind: no arrays, and a size in a field."""

    def __init__(self, llama_state: bytes) -> None:
        self.llama_state = llama_state
        self.llama_state_size = len(llama_state)


class ForkLlama:
    """What a fork's `Llama` asks of a cache, without a model.

    Its "state" is the list of tokens it was given; evaluating is remembering.
    """

    def __init__(self) -> None:
        self.cache: Any = None
        self.tokens: list[int] = []
        self.evaluated = 0

    @staticmethod
    def longest_token_prefix(a: Sequence[int], b: Sequence[int], verbose: bool = False) -> int:
        """Return how many leading tokens are equal."""
        pairs = enumerate(zip(a, b, strict=False))
        return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))

    def set_cache(self, cache: Any) -> None:
        """Set the cache."""
        self.cache = cache

    def save_state(self) -> ForkState:
        """Return what was evaluated."""
        return fork_state(self.tokens, bytes(token % 256 for token in self.tokens))

    def load_state(self, state: ForkState) -> None:
        """Take what was evaluated."""
        self.tokens = [int(token) for token in state.input_ids[: state.n_tokens]]

    def complete(self, prompt: Sequence[int], answer: Sequence[int]) -> int:
        """Return how many tokens of the prompt were evaluated."""
        prompt = list(prompt)
        if self.cache:
            try:
                found = self.cache[prompt]
                cached = self.longest_token_prefix(found.input_ids.tolist(), prompt, False)
                if cached > self.longest_token_prefix(self.tokens, prompt, False):
                    self.load_state(found)
            except KeyError:
                pass
        kept = min(self.longest_token_prefix(self.tokens, prompt), len(prompt) - 1)
        evaluated = len(prompt) - kept
        self.tokens = prompt + list(answer)
        if self.cache:
            self.cache[tuple(prompt) + tuple(answer)] = self.save_state()
        return evaluated


def llama_state(
    tokens: Sequence[int], native: bytes, *, n_ctx: int = 64, n_batch: int = 8
) -> LlamaState:
    """Return a state as `Llama.save_state` makes it."""
    n_tokens = len(tokens)
    ids = np.arange(1000, 1000 + n_ctx, dtype=np.intc)
    ids[:n_tokens] = tokens
    scores = np.zeros((min(n_tokens, n_batch), N_VOCAB), np.single)
    return LlamaState(ids, scores, n_tokens, native, len(native), seed=7)


def fork_state(tokens: Sequence[int], native: bytes) -> ForkState:
    """Return a state as a fork makes it."""
    return ForkState(
        input_ids=np.asarray(tokens, np.intc),
        scores=np.ones((1, N_VOCAB), np.single),
        n_tokens=len(tokens),
        llama_state=native,
        llama_state_size=len(native),
        seed=7,
        last_logits=np.full(N_VOCAB, 0.5, np.single),
    )


def legacy_state(tokens: Sequence[int], native: bytes) -> LegacyState:
    """Return a state of the older kind."""
    return LegacyState(native)


SHAPES = {"0.3.36": llama_state, "fork": fork_state, "legacy": legacy_state}
