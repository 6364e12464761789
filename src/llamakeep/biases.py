"""What is added to the logits of tokens, checked and added up once for all who sample with it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from llamakeep.errors import InvalidValue
from llamakeep.tokens import IntArray, as_tokens

Pair: TypeAlias = tuple[int, float]


class Biases(Sequence[Pair]):
    """Pairs of a token and what is added to its logit, as they were given. Immutable.

    Making one costs about 1 us for each pair. All that samplers need is made then, as arrays that
    they share: one for each of many answers costs next to nothing.

    Args:
        pairs: Tokens, more than once if need be, and numbers; minus infinity forbids a token.

    Attributes:
        tokens: Each token once, ascending.
        sums: What is added to each, float64.
        values: The same, float32: minus infinity below its range, infinity above.

    Raises:
        InvalidValue: For what is no number, and for infinity.
        TokenError: For a token that is negative or above int32.
    """

    __slots__ = ("_pairs", "sums", "tokens", "values")

    def __init__(self, pairs: Iterable[Pair] = ()) -> None:
        self._pairs: Final = tuple(pairs)
        given = np.array([bias for _, bias in self._pairs], np.float64)
        if given.size and not given.max() < math.inf:  # no number is below nothing
            token, bias = next(pair for pair in self._pairs if not pair[1] < math.inf)
            raise InvalidValue(f"the bias of token {token} must be a number, not {bias!r}")
        tokens = as_tokens([token for token, _ in self._pairs])
        found, places = np.unique(tokens, return_inverse=True)
        self.tokens: IntArray = found
        sums = np.bincount(places, weights=given, minlength=found.size)
        self.sums: npt.NDArray[np.float64] = sums.astype(np.float64, copy=False)
        with np.errstate(over="ignore"):
            self.values: npt.NDArray[np.float32] = self.sums.astype(np.float32)
        for array in (self.tokens, self.sums, self.values):
            array.flags.writeable = False

    @classmethod
    def of(cls, pairs: Sequence[Pair]) -> Biases:
        """Return `pairs` themselves if that is what they are, else what they come to."""
        if isinstance(pairs, Biases):
            return pairs
        return cls(pairs) if pairs else NO_BIASES

    def __len__(self) -> int:
        return len(self._pairs)

    @overload
    def __getitem__(self, index: int) -> Pair: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Pair, ...]: ...
    def __getitem__(self, index: int | slice) -> Pair | tuple[Pair, ...]:
        return self._pairs[index]

    def __iter__(self) -> Iterator[Pair]:
        return iter(self._pairs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Biases) and self._pairs == other._pairs

    def __hash__(self) -> int:
        return hash(self._pairs)

    def __repr__(self) -> str:
        return f"Biases({len(self)} of {self.tokens.size} tokens)"


NO_BIASES: Final = Biases()
