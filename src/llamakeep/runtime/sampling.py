"""Settings of a sampler as they take effect for one model, the same for every runtime."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from llamakeep.biases import Biases
from llamakeep.errors import DecodeError, InvalidValue
from llamakeep.sampling import Sampling
from llamakeep.tokens import IntArray, as_tokens

_MOST: Final = 1e9
"""Far beyond it, what all settings together make of a logit would leave the range of a 32-bit
float: infinite, and then no number."""
_SEED_MASK: Final = 0xFFFFFFFF


@dataclass(frozen=True, slots=True, eq=False)
class Settled:
    """What of a `Sampling` takes effect.

    Attributes:
        tokens: Those with a bias, each once.
        biases: What is added to their logits; minus infinity forbids it.
        top_k: Of so many likeliest tokens; 0 for all.
        min_keep: Tokens that the filters leave at least.
        last_n: Recent tokens that are penalized; 0 when nothing is.
        temperature: Above 0; not used where the likeliest is taken.
        seed: A 32-bit number, or None for another one each time.
    """

    tokens: IntArray
    biases: npt.NDArray[np.float32]
    top_k: int
    min_keep: int
    last_n: int
    temperature: float
    seed: int | None


def settle(sampling: Sampling, *, n_vocab: int, n_ctx: int, forbidden: Iterable[int]) -> Settled:
    """Return the settings as they take effect. However many biases: less than a millisecond.

    Args:
        sampling: What was asked for.
        n_vocab: Tokens in the vocabulary.
        n_ctx: How many tokens "all recent ones" are at most.
        forbidden: Tokens that are never sampled.

    Raises:
        InvalidValue: For a number that llama.cpp's floats cannot hold, or when no token is left.
        TokenError: For a bias of a token outside the vocabulary.
    """
    for name in ("presence_penalty", "frequency_penalty"):
        value = getattr(sampling, name)
        if abs(value) > _MOST:
            raise InvalidValue(f"{name} must be between -{_MOST} and {_MOST}, not {value!r}")
    if not 1 / _MOST <= sampling.repeat_penalty <= _MOST:
        raise InvalidValue(
            f"repeat_penalty must be between {1 / _MOST} and {_MOST}, "
            f"not {sampling.repeat_penalty!r}"
        )
    tokens, biases = _biased(sampling.biases, n_vocab, forbidden)
    penalizes = sampling.repeat_penalty != 1 or any(
        (sampling.presence_penalty, sampling.frequency_penalty)
    )
    last_n = n_ctx if sampling.repeat_last_n < 0 else min(sampling.repeat_last_n, n_ctx)
    seed = sampling.seed & _SEED_MASK
    return Settled(
        tokens=tokens,
        biases=biases,
        top_k=min(max(0, sampling.top_k), n_vocab),
        min_keep=min(sampling.min_keep, n_vocab),
        last_n=last_n if penalizes else 0,
        temperature=min(max(sampling.temperature, 1 / _MOST), _MOST),
        seed=None if seed == _SEED_MASK else seed,  # what llama.cpp takes for "a random one"
    )


def _biased(
    given: Biases, n_vocab: int, forbidden: Iterable[int]
) -> tuple[IntArray, npt.NDArray[np.float32]]:
    """Return tokens and what is added to their logits, with those that are never sampled."""
    tokens, biases = as_tokens(given.tokens, n_vocab=n_vocab), given.values
    if given.sums.size and given.sums.max() > _MOST:
        at = int(given.sums.argmax())
        raise InvalidValue(
            f"the bias of token {tokens[at]} must be {_MOST} at most, not {float(given.sums[at])!r}"
        )
    barred = np.unique(np.fromiter(forbidden, np.int32))
    if barred.size:
        left = ~np.isin(tokens, barred)
        tokens = np.concatenate([tokens[left], barred])
        biases = np.concatenate([biases[left], np.full(barred.size, -np.inf, np.float32)])
    if np.isneginf(biases).sum() >= n_vocab:
        raise InvalidValue("every token is forbidden: none can be sampled")
    return tokens, biases


def check_logits(largest: float) -> None:
    """Raise when logits are broken, by the largest of them, as numpy gives it.

    Sorting what is no number may write outside of the list.

    Raises:
        DecodeError: With that number.
    """
    if not math.isfinite(largest):
        raise DecodeError(f"the model's logits are no numbers: the largest is {largest}")
