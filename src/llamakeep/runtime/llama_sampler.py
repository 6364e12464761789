"""llama.cpp's own samplers, chained as llama-server chains them."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import llama_cpp
import numpy as np
import numpy.typing as npt

from llamakeep.errors import KeeperClosed
from llamakeep.runtime.base import Sampler
from llamakeep.runtime.sampling import Settled, check_logits
from llamakeep.sampling import Sampling
from llamakeep.tokens import TokensLike, as_tokens

_RANDOM_SEED: Final = llama_cpp.LLAMA_DEFAULT_SEED


class LlamaSampler:
    """Chooses tokens with a chain of llama.cpp's samplers. See `Sampler`.

    Its memory is freed by `close`, or with the object. It holds nothing of the context's.

    Args:
        sampling: What was asked for.
        settled: What of it takes effect.
        n_vocab: Tokens in the vocabulary.
        output: Returns the logits of an output, where they lie; raises when there are none.
        context: Returns the native context; raises when it is closed.
    """

    def __init__(
        self,
        sampling: Sampling,
        settled: Settled,
        *,
        n_vocab: int,
        output: Callable[[int], npt.NDArray[np.float32]],
        context: Callable[[], Any],
    ) -> None:
        self._n_vocab = n_vocab
        self._last_n = settled.last_n
        self._output = output
        self._context = context
        # Without penalties the likeliest token needs no list of candidates, which costs the most.
        self._is_plain = sampling.greedy and not settled.last_n
        self._biased = settled.tokens.astype(np.intp)
        self._biases = settled.biases
        self._chain = new_chain(sampling, settled, n_vocab)
        self._free = weakref.finalize(self, llama_cpp.llama_sampler_free, self._chain)
        select = (
            llama_cpp.llama_sampler_init_greedy()
            if sampling.greedy
            else llama_cpp.llama_sampler_init_dist(
                _RANDOM_SEED if settled.seed is None else settled.seed
            )
        )
        llama_cpp.llama_sampler_chain_add(self._chain, select)

    def _open(self) -> Any:
        if not self._free.alive:
            raise KeeperClosed("the sampler is closed")
        return self._chain

    def accept(self, tokens: TokensLike) -> None:
        """Count tokens as those before the answer. See `Sampler.accept`."""
        chain = self._open()
        array = as_tokens(tokens, n_vocab=self._n_vocab)
        for token in array[max(0, array.size - self._last_n) :].tolist():
            llama_cpp.llama_sampler_accept(chain, token)

    def sample(self, index: int) -> int:
        """Choose a token by an output's logits, and accept it. See `Sampler.sample`."""
        chain = self._open()
        logits = self._output(index)  # llama.cpp ends the process for one that does not exist
        if self._is_plain:
            return self._likeliest(logits)
        check_logits(float(logits.max()))
        return int(llama_cpp.llama_sampler_sample(chain, self._context(), index))

    def _likeliest(self, logits: npt.NDArray[np.float32]) -> int:
        """Choose what llama.cpp's greedy sampler would, the first of equals."""
        if self._biased.size:
            logits = logits.copy()
            logits[self._biased] += self._biases
        token = int(logits.argmax())
        check_logits(float(logits[token]))  # one that is no number counts as the largest
        return token

    def close(self) -> None:
        """Free its memory. Calling it again does nothing."""
        self._free()


def new_chain(sampling: Sampling, settled: Settled, n_vocab: int) -> Any:
    """Return a chain of all but the last sampler, which selects; the caller frees it.

    Penalties and biases come first, then the filters in llama-server's order.
    """
    params = llama_cpp.llama_sampler_chain_default_params()
    params.no_perf = True
    chain = llama_cpp.llama_sampler_chain_init(params)
    samplers = []
    if settled.tokens.size:
        samplers.append(_bias_sampler(settled, n_vocab))
    if settled.last_n:
        samplers.append(
            llama_cpp.llama_sampler_init_penalties(
                n_vocab,
                settled.last_n,
                sampling.repeat_penalty,
                sampling.frequency_penalty,
                sampling.presence_penalty,
            )
        )
    if not sampling.greedy:
        keep = settled.min_keep
        samplers += [
            llama_cpp.llama_sampler_init_top_k(settled.top_k),
            llama_cpp.llama_sampler_init_typical(sampling.typical_p, keep),
            llama_cpp.llama_sampler_init_top_p(sampling.top_p, keep),
            llama_cpp.llama_sampler_init_min_p(sampling.min_p, keep),
            llama_cpp.llama_sampler_init_temp(settled.temperature),
        ]
    for sampler in samplers:
        llama_cpp.llama_sampler_chain_add(chain, sampler)
    return chain


def _bias_sampler(settled: Settled, n_vocab: int) -> Any:
    """Return llama.cpp's sampler of biases, which copies them."""
    pairs = np.empty(settled.tokens.size, np.dtype(llama_cpp.llama_logit_bias))
    pairs["token"], pairs["bias"] = settled.tokens, settled.biases
    pointer = pairs.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_logit_bias))
    return llama_cpp.llama_sampler_init_logit_bias(n_vocab, pairs.size, pointer)


if TYPE_CHECKING:
    _is_a_sampler: type[Sampler] = LlamaSampler
