"""The probabilities that are told with a token."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from llamakeep.engine.request import Choice, TokenProb
from llamakeep.runtime.base import Vocab


def with_probs(token: int, logits: npt.NDArray[np.float32], n_probs: int, vocab: Vocab) -> Choice:
    """Return a token with its log probability, and the `n_probs` likeliest with theirs.

    Args:
        token: The one that was chosen.
        logits: Of all tokens, shape (n_vocab,), before sampling changed anything.
        n_probs: How many; at most as many as there are.
        vocab: Names the tokens.
    """
    top = float(logits.max())
    logprobs = logits - (top + math.log(float(np.exp(logits - top).sum(dtype=np.float64))))
    n_probs = min(n_probs, int(logits.size))
    likeliest = np.argpartition(-logprobs, n_probs - 1)[:n_probs]
    likeliest = likeliest[np.argsort(-logprobs[likeliest], kind="stable")]

    def of(one: int) -> TokenProb:
        return TokenProb(one, vocab.piece(one, special=True), float(logprobs[one]))

    return Choice(token, of(token), tuple(of(int(one)) for one in likeliest))
