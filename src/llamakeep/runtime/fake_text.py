"""The tokens and the sampler of the model that does not exist; see `fake`."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from llamakeep.errors import GrammarError, KeeperClosed
from llamakeep.gbnf import check_grammar
from llamakeep.runtime.base import Sampler, Vocab, utf8
from llamakeep.runtime.sampling import Settled, check_logits
from llamakeep.sampling import Sampling
from llamakeep.tokens import IntArray, TokensLike, as_tokens

FloatArray: TypeAlias = npt.NDArray[np.float32]

N_BYTES: Final = 256
SPECIALS: Final = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
BOS, EOS, IM_START, IM_END = range(N_BYTES, N_BYTES + len(SPECIALS))
CHATML: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class FakeVocab:
    """A vocabulary of bytes, a few special tokens, and others that no text becomes. See `Vocab`.

    Token n below 256 is the byte n; 256 to 259 are `SPECIALS`; each one above has its number in
    angle brackets as its text. A smaller vocabulary lacks the last of these.

    Args:
        n_vocab: Tokens in it.
    """

    def __init__(self, n_vocab: int) -> None:
        self.n_vocab = n_vocab
        self._closed = False
        self._specials = {
            text: N_BYTES + index
            for index, text in enumerate(SPECIALS)
            if N_BYTES + index < n_vocab
        }
        self._ends = frozenset(token for token in (EOS, IM_END) if token < n_vocab)
        self._split = re.compile("|".join(map(re.escape, SPECIALS))).split
        self._find = re.compile("|".join(map(re.escape, SPECIALS))).findall

    def _check_open(self) -> None:
        if self._closed:
            raise KeeperClosed("the vocabulary is closed")

    def _known(self, token: int) -> int:
        self._check_open()
        return int(as_tokens([token], n_vocab=self.n_vocab)[0])

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool) -> IntArray:
        """Return the tokens of `text`. See `Vocab.tokenize`.

        Raises:
            TokenError: When the vocabulary is too small for the text's bytes.
        """
        self._check_open()
        tokens = [BOS] if add_special and self.adds_bos else []
        plain = self._split(text) if parse_special and self._specials else [text]
        special = self._find(text) if len(plain) > 1 else []
        for piece, name in zip(plain, [*special, ""], strict=True):
            tokens += utf8(piece)
            if name in self._specials:
                tokens.append(self._specials[name])
            else:
                tokens += utf8(name)
        return as_tokens(tokens, n_vocab=self.n_vocab)

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """Return what a token adds to a text. See `Vocab.piece`."""
        token = self._known(token)
        if token < N_BYTES:
            return bytes([token])
        if token < N_BYTES + len(SPECIALS):
            return SPECIALS[token - N_BYTES].encode() if special else b""
        return b"<%d>" % token

    def text(self, tokens: TokensLike, *, special: bool = True) -> str:
        """Return the text of tokens. See `Vocab.text`."""
        self._check_open()
        array = as_tokens(tokens, n_vocab=self.n_vocab)
        pieces = (self.piece(token, special=special) for token in array.tolist())
        return b"".join(pieces).decode("utf-8", "ignore")

    def check_grammar(self, grammar: str) -> None:
        """Raise `GrammarError`, with what is wrong with a grammar where something is.

        Grammars are followed by llama.cpp's own code. Another one here would be no less work and
        prove nothing of that one; so what needs grammars is tested on tiny models.
        """
        self._check_open()
        check_grammar(grammar)
        raise GrammarError("the fake model follows no grammar")

    def is_end(self, token: int) -> bool:
        """Whether the model ends an answer with this token. See `Vocab.is_end`."""
        return self._known(token) in self.ends

    @property
    def ends(self) -> frozenset[int]:
        """All tokens that end an answer."""
        self._check_open()
        return self._ends

    @property
    def bos(self) -> int | None:
        """The token at the begin of a text."""
        self._check_open()
        return BOS if self.n_vocab > BOS else None

    @property
    def eos(self) -> int | None:
        """The token at the end of a text."""
        self._check_open()
        return EOS if self.n_vocab > EOS else None

    @property
    def adds_bos(self) -> bool:
        """Whether `add_special` puts `bos` before the text."""
        return self.bos is not None

    @property
    def chat_template(self) -> str | None:
        """ChatML, if its tokens are in the vocabulary."""
        self._check_open()
        return CHATML if self.n_vocab > IM_END else None

    @property
    def metadata(self) -> dict[str, str]:
        """What a model's file would say about itself."""
        template = self.chat_template
        found = {"general.architecture": "fake", "general.name": "fake"}
        return found | ({} if template is None else {"tokenizer.chat_template": template})

    def close(self) -> None:
        """Refuse everything from now on."""
        self._closed = True


class FakeSampler:
    """Chooses tokens as llama.cpp's chain does, with numpy and other random numbers.

    Args:
        sampling: What was asked for.
        settled: What of it takes effect.
        n_vocab: Tokens in the vocabulary.
        output: Returns a copy of the logits of an output; raises when there are none.
    """

    def __init__(
        self,
        sampling: Sampling,
        settled: Settled,
        *,
        n_vocab: int,
        output: Callable[[int], FloatArray],
    ) -> None:
        self._sampling = sampling
        self._settled = settled
        self._n_vocab = n_vocab
        self._output = output
        self._recent: deque[int] = deque(maxlen=settled.last_n)
        self._random = np.random.default_rng(settled.seed)
        self._closed = False

    def _check_open(self) -> None:
        if self._closed:
            raise KeeperClosed("the sampler is closed")

    def accept(self, tokens: TokensLike) -> None:
        """Count tokens as those before the answer. See `Sampler.accept`."""
        self._check_open()
        self._recent.extend(as_tokens(tokens, n_vocab=self._n_vocab).tolist())

    def sample(self, index: int) -> int:
        """Choose a token by an output's logits, and accept it. See `Sampler.sample`."""
        self._check_open()
        logits = self._output(index)
        check_logits(float(logits.max()))
        tokens, left = candidates(logits, self._sampling, self._settled, Counter(self._recent))
        drawn = self._random.random()  # once per token, whatever is left
        sums = np.cumsum(softmax(left), dtype=np.float64)
        chosen = int(np.searchsorted(sums, drawn * sums[-1]))
        token = int(tokens[min(chosen, tokens.size - 1)])
        self._recent.append(token)
        return token

    def close(self) -> None:
        """Refuse everything from now on."""
        self._closed = True


def softmax(logits: FloatArray) -> FloatArray:
    """Return probabilities, shape as given."""
    weights: FloatArray = np.exp(logits - logits.max())
    weights /= weights.sum()
    return weights


def candidates(
    logits: FloatArray, sampling: Sampling, settled: Settled, counts: Counter[int]
) -> tuple[npt.NDArray[np.intp], FloatArray]:
    """Return the tokens that can be chosen, likeliest first, and their logits.

    Args:
        logits: Of all tokens; overwritten.
        sampling: What was asked for.
        settled: What of it takes effect.
        counts: How often each recent token came.
    """
    logits[settled.tokens] += settled.biases
    if settled.last_n and counts:
        seen = np.fromiter(counts.keys(), np.intp)
        found = logits[seen]
        penalty = np.float32(sampling.repeat_penalty)
        found = np.where(found <= 0, found * penalty, found / penalty)
        times = np.fromiter(counts.values(), np.float32)
        found -= times * np.float32(sampling.frequency_penalty)
        logits[seen] = found - np.float32(sampling.presence_penalty)
    if sampling.greedy:
        best = np.array([logits.argmax()])
        return best, logits[best]
    tokens = np.argsort(-logits, kind="stable")
    tokens = tokens[: settled.top_k or tokens.size]
    if sampling.typical_p < 1:
        tokens = np.sort(tokens[_typical(logits[tokens], sampling.typical_p, settled.min_keep)])
        tokens = tokens[np.argsort(-logits[tokens], kind="stable")]
    if sampling.top_p < 1:
        tokens = tokens[: _top_p(logits[tokens], sampling.top_p, settled.min_keep)]
    if sampling.min_p > 0:
        least = logits[tokens[0]] + np.log(np.float32(sampling.min_p))
        n_kept = int((logits[tokens] >= least).sum())
        tokens = tokens[: max(n_kept, settled.min_keep)]
    return tokens, logits[tokens] / np.float32(settled.temperature)


def _typical(logits: FloatArray, typical_p: float, min_keep: int) -> npt.NDArray[np.intp]:
    """Return which of them are locally typical: as surprising as is to be expected."""
    probs = softmax(logits)
    with np.errstate(divide="ignore"):
        surprise = -np.log(probs)
    expected = (probs[probs > 0] * surprise[probs > 0]).sum()
    order = np.argsort(np.abs(surprise - expected), kind="stable")
    return order[: _enough(np.cumsum(probs[order]) > typical_p, min_keep)]


def _top_p(logits: FloatArray, top_p: float, min_keep: int) -> int:
    """Return how many of them, likeliest first, have the probability together."""
    return _enough(np.cumsum(softmax(logits)) >= np.float32(top_p), min_keep)


def _enough(reached: npt.NDArray[np.bool_], min_keep: int) -> int:
    """Return how many are kept: up to the first where it is reached, and `min_keep` at least."""
    n_kept = int(reached.argmax()) + 1 if reached.any() else reached.size
    return min(max(n_kept, min_keep), reached.size)


if TYPE_CHECKING:
    _is_a_vocab: type[Vocab] = FakeVocab
    _is_a_sampler: type[Sampler] = FakeSampler
