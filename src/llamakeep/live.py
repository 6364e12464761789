"""What a sequence of a runtime holds, by its own log."""

from __future__ import annotations

import numpy as np

from llamakeep.tokens import IntArray


class Live:
    """What a sequence holds: the tokens we saw evaluated, and what happened behind our back.

    Attributes:
        n_tokens: Tokens whose rows we know, from the first on.
        opaque: Positions past them were filled by somebody else (pictures, a loaded state).
        decoded: The last row was evaluated by itself, as generated tokens are.
        n_scores: Leading rows whose logits somebody still has.
    """

    def __init__(self, n_ctx: int) -> None:
        self._tokens = np.empty(n_ctx, np.int32)
        self.n_tokens = 0
        self.opaque = False
        self.decoded = False
        self.n_scores = 0

    @property
    def tokens(self) -> IntArray:
        """The tokens whose rows are known: a view, good until the next change."""
        return self._tokens[: self.n_tokens]

    def append(self, tokens: IntArray, *, scored: bool = False) -> None:
        """Note that `tokens` were evaluated, with logits for each of them or for the last."""
        start, end = self.n_tokens, self.n_tokens + tokens.size
        self._tokens[start:end] = tokens
        self.n_tokens = end  # only now: an interrupt leaves the log short, not wrong
        self.decoded = tokens.size == 1
        if scored and self.n_scores >= start:
            self.n_scores = self.n_tokens

    def cut(self, n_tokens: int) -> None:
        """Note that everything past the first `n_tokens` is gone."""
        self.decoded = self.decoded and n_tokens == self.n_tokens
        self.n_tokens = min(self.n_tokens, n_tokens)
        self.n_scores = min(self.n_scores, n_tokens)
        self.opaque = False

    def replace(self, tokens: IntArray) -> None:
        """Note that the sequence holds exactly `tokens`, none of them scored."""
        self.n_tokens = self.n_scores = 0
        self.append(tokens)
        self.opaque = self.decoded = False
