"""Tokens that match a grammar: llama.cpp's own grammar sampler behind the usual chain.

A token is sampled as if there were no grammar, and tested alone. Only if the grammar refuses it,
all others are looked at, and one of those that match is sampled.

What a grammar matches is the text of the answer. So special tokens, which have none in it, are not
sampled, unless the grammar has their text in quotes, or names them.

llama.cpp can wait for triggers itself, but searches all of the answer with a regular expression for
each token, calling itself for each letter, and ends the process where a trigger's token goes on as
the grammar cannot. So triggers are found here.
"""

from __future__ import annotations

import ctypes
import time
import weakref
from collections.abc import Callable
from typing import Any, Final, TypeAlias

import llama_cpp
import numpy as np
import numpy.typing as npt

from llamakeep.errors import GrammarError
from llamakeep.gbnf import CheckedGrammar
from llamakeep.gbnf.following import Follower
from llamakeep.gbnf.parsing import parse
from llamakeep.gbnf.rules import Grammar
from llamakeep.runtime.base import NO_TOKEN
from llamakeep.runtime.llama_sampler import LlamaSampler
from llamakeep.runtime.llama_text import Vocabulary
from llamakeep.runtime.llama_tokens import END, N_BYTES, NEVER
from llamakeep.runtime.sampling import Settled, check_logits
from llamakeep.runtime.unfinished import letters_of
from llamakeep.sampling import Sampling

Logits: TypeAlias = npt.NDArray[np.float32]
Tokens: TypeAlias = npt.NDArray[np.int32]

_MOST_TRIES: Final = 32
"""Tokens that may be refused in turn because a trigger ends in them as the grammar cannot go on."""
_MOST_ASKED: Final = 256
"""Tokens that are followed one by one, of those that may be allowed where tokens are named."""
_MOST_SECONDS: Final = 0.5
"""How long llama.cpp may take to test tokens or accept one; some grammars double it each time."""
_TOKEN_SECONDS: Final = 20e-6
"""How much longer for each token that is tested."""


class Candidates:
    """llama.cpp's list of tokens to choose from.

    Args:
        n_tokens: How many it has room for.
    """

    def __init__(self, n_tokens: int) -> None:
        self._data = (llama_cpp.llama_token_data * n_tokens)()
        self._view = np.ctypeslib.as_array(self._data)
        self._array = llama_cpp.llama_token_data_array(self._data, n_tokens, -1, False)
        self._pointer = ctypes.byref(self._array)

    def fill(self, tokens: Tokens, logits: Logits | float) -> None:
        """Make it these tokens."""
        self._view["id"][: tokens.size] = tokens
        self._view["logit"][: tokens.size] = logits
        array = self._array
        array.data, array.size = self._data, tokens.size
        array.selected, array.sorted = -1, False

    def apply(self, sampler: Any) -> None:
        """Let a sampler change it."""
        llama_cpp.llama_sampler_apply(sampler, self._pointer)

    @property
    def selected(self) -> int:
        """The token that was chosen."""
        array = self._array
        assert 0 <= array.selected < array.size, "the last sampler of a chain selects"
        return int(array.data[array.selected].id)

    def left(self, n_tokens: int) -> npt.NDArray[np.bool_]:
        """Return which of the first tokens no grammar has refused."""
        found: npt.NDArray[np.bool_] = self._view["logit"][:n_tokens] > -np.inf
        return found


class Matcher:
    """Where an answer stands in a grammar. Of one thread; `close` frees its memory.

    Args:
        grammar: It was checked.
        rules: What it says, where it names tokens; else None.
        vocab: The native vocabulary; it must live while this is used, except for `close`.
        vocabulary: The same.
        candidates: Room for all tokens; what it holds is lost at each call.
        clock: Returns seconds in which this thread worked.

    Raises:
        GrammarError: When llama.cpp does not take the grammar, or it names a token that is none;
            from each method, when a token takes too long: the next one would take longer.
    """

    def __init__(
        self,
        grammar: CheckedGrammar,
        rules: Grammar | None,
        vocab: Any,
        vocabulary: Vocabulary,
        candidates: Candidates,
        clock: Callable[[], float],
    ) -> None:
        self._clock = clock
        self._vocabulary = vocabulary
        self._tokens = tokens = vocabulary.grammar_tokens
        self._candidates = candidates
        named = vocabulary.named(grammar)
        self._follower = Follower(rules, named) if rules is not None else None
        self._sampler = llama_cpp.llama_sampler_init_grammar(vocab, grammar.text.encode(), b"root")
        if not self._sampler:
            raise GrammarError("llama.cpp cannot read the grammar")
        self.close = weakref.finalize(self, llama_cpp.llama_sampler_free, self._sampler)
        self._named = {token.id for token in grammar.tokens if not token.text} | {*named.values()}
        hidden = [
            token
            for token, text in tokens.hidden.items()
            if token not in self._named and text not in grammar.literals
        ]
        self._is_open = tokens.first < NEVER
        self._is_open[hidden] = False
        # Where a first byte tells enough, few tokens are left to look at.
        self._asks_bytes = not (grammar.tokens or grammar.excludes_letters)
        self._bytes = tokens.of_byte[tokens.of_byte >= 0]
        self._unfinished = b""

    def allows(self, token: int) -> bool:
        """Whether the answer may go on with this token."""
        if not self._is_open[token]:
            return False
        left = self._left(np.array([token], np.int32))
        return bool(left.size) and self._is_whole(token)

    def accept(self, token: int) -> None:
        """Go on with a token that is allowed; llama.cpp ends the process for any other."""
        if self._tokens.first[token] != END:
            letters, rest = self._read(token)
            if self._follower is not None:
                self._follower.accept(token, letters)
            self._unfinished = rest
        began = self._clock()
        llama_cpp.llama_sampler_accept(self._sampler, token)
        self._check_time(began, 1)

    @property
    def is_complete(self) -> bool:
        """Whether the answer may end here; False for a model that cannot end answers."""
        return bool(self._left(self._tokens.ends).size)

    def allowed(self) -> Tokens:
        """Return tokens that the answer may go on with: all, where the grammar names none.

        Where it names some, tokens of several letters may be left out that are too many to be
        followed one by one.
        """
        is_open = self._is_open
        if self._asks_bytes:
            by_first = np.ones(N_BYTES + 2, bool)
            by_first[self._tokens.first[self._bytes]] = False
            by_first[self._tokens.first[self._left(self._bytes)]] = True
            by_first[END] = self.is_complete
            is_open = is_open & by_first[self._tokens.first]
        return self._whole(self._left(np.flatnonzero(is_open).astype(np.int32)))

    def _left(self, tokens: Tokens) -> Tokens:
        """Return which tokens llama.cpp lets go on, of those whose bytes become letters."""
        asked: Tokens = tokens[self._are_letters(tokens)]
        if not asked.size:
            return asked
        self._candidates.fill(asked, 0.0)
        began = self._clock()
        self._candidates.apply(self._sampler)
        self._check_time(began, asked.size)
        left: Tokens = asked[self._candidates.left(asked.size)]
        return left

    def _check_time(self, began: float, n_tokens: int) -> None:
        took = self._clock() - began
        if took > _MOST_SECONDS + n_tokens * _TOKEN_SECONDS:
            raise GrammarError(
                f"the grammar is too ambiguous here: to follow it took {took * 1000:,.0f} ms for "
                f"{n_tokens:,} tokens"
            )

    # -- letters that a token leaves unfinished ----------------------------------------------------

    def _are_letters(self, tokens: Tokens) -> npt.NDArray[np.bool_]:
        """Return which tokens are UTF-8 here."""
        if not self._unfinished:
            begins: npt.NDArray[np.bool_] = self._tokens.begins[tokens]
            return begins
        asked = tokens[np.isin(tokens, self._tokens.going_on)]
        return np.isin(tokens, [token for token in asked.tolist() if self._letters(token)])

    def _letters(self, token: int) -> tuple[str, bytes] | None:
        return letters_of(self._unfinished + self._vocabulary.piece(token, special=True))

    def _read(self, token: int) -> tuple[str, bytes]:
        """Return the letters that an allowed token completes, and the begin of the next."""
        found = self._letters(token)
        assert found is not None, "what is no UTF-8 is not allowed"
        return found

    # -- tokens that are named ---------------------------------------------------------------------

    def _is_whole(self, token: int) -> bool:
        """Whether llama.cpp can accept a token that it lets go on."""
        if self._follower is None or self._tokens.first[token] == END:
            return True
        return self._follower.goes_on(token, self._read(token)[0])

    def _whole(self, tokens: Tokens) -> Tokens:
        """Return which tokens llama.cpp can accept, of those that it lets go on."""
        follower = self._follower
        if follower is None:
            return tokens
        is_named = np.isin(tokens, list(self._named))
        asked = is_named.copy()
        if follower.others_later():
            excluded = follower.others_here()
            if excluded is None:
                is_sure = self._tokens.is_short[tokens] | (self._tokens.first[tokens] == END)
                asked |= ~is_sure
            # else any but the named can stand here as a whole
        followed = asked if asked.sum() <= _MOST_ASKED + is_named.sum() else is_named
        kept = ~asked
        began = self._clock()
        for index in np.flatnonzero(followed).tolist():
            kept[index] = self._is_whole(int(tokens[index]))
            self._check_time(began, int(followed.sum()))
        found: Tokens = tokens[kept]
        return found


class Trigger:
    """Waits for one of some texts.

    Args:
        texts: What may come.
    """

    def __init__(self, texts: tuple[str, ...]) -> None:
        self._texts = [text.encode() for text in texts]
        self._n_before = max(map(len, self._texts)) - 1
        self._before = b""

    def found(self, piece: bytes) -> bytes | None:
        """Return what follows from the first text that is complete with `piece`, or None."""
        whole = self._before + piece
        starts = [start for text in self._texts if (start := whole.find(text)) >= 0]
        return whole[min(starts) :] if starts else None

    def push(self, piece: bytes) -> None:
        """Go on; `piece` completes none."""
        whole = self._before + piece
        self._before = whole[max(0, len(whole) - self._n_before) :]


class ConstrainedSampler(LlamaSampler):
    """Chooses tokens that match a grammar. See `LlamaSampler`, and `Sampling.grammar`.

    Args:
        sampling: What was asked for.
        settled: What of it takes effect.
        grammar: That of `sampling`, checked.
        vocabulary: The model's.
        output: Returns the logits of an output, where they lie; raises when there are none.
        context: Returns the native context; raises when it is closed.
        clock: Returns seconds in which this thread worked.

    Raises:
        GrammarError: As `Matcher`.
    """

    def __init__(
        self,
        sampling: Sampling,
        settled: Settled,
        *,
        grammar: CheckedGrammar,
        vocabulary: Vocabulary,
        output: Callable[[int], Logits],
        context: Callable[[], Any],
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self._clock = clock
        n_vocab = vocabulary.n_vocab
        super().__init__(sampling, settled, n_vocab=n_vocab, output=output, context=context)
        self._vocabulary = vocabulary
        self._grammar = grammar
        self._rules = parse(grammar.text) if grammar.tokens else None
        self._tokens = vocabulary.grammar_tokens
        self._all: Tokens = np.arange(n_vocab, dtype=np.int32)
        self._never = np.isin(self._all, self._biased[np.isneginf(self._biases)])
        self._candidates = Candidates(n_vocab)
        self._trigger = Trigger(sampling.grammar_triggers) if sampling.grammar_triggers else None
        self._matcher: Matcher | None = None if self._trigger else self._begin()

    def _begin(self) -> Matcher:
        with self._vocabulary.reading() as vocab:
            return Matcher(
                self._grammar,
                self._rules,
                vocab,
                self._vocabulary,
                self._candidates,
                self._clock,
            )

    def sample(self, index: int) -> int:
        """Choose a token by an output's logits, and accept it. See `Sampler.sample`."""
        chain = self._open()
        logits = self._output(index)  # it raises where the model is gone
        check_logits(float(logits.max()))
        with self._vocabulary.reading():
            if self._matcher is None:
                token = self._before_grammar(logits)
            else:
                token = self._within(self._matcher, logits)
        if token != NO_TOKEN and not self._is_plain:
            llama_cpp.llama_sampler_accept(chain, token)
        return token

    def _within(self, matcher: Matcher, logits: Logits) -> int:
        """Choose a token that matches, and go on with it."""
        token = self._choose(logits, None)
        if not matcher.allows(token):
            allowed = matcher.allowed()
            allowed = allowed[~self._never[allowed]]
            if not allowed.size:
                if matcher.is_complete or not self._tokens.ends.size:
                    return NO_TOKEN
                raise GrammarError("no token that may be sampled goes on as the grammar wants it")
            token = self._choose(logits, allowed)
        matcher.accept(token)
        return token

    def _before_grammar(self, logits: Logits) -> int:
        """Choose a token freely; with one that completes a trigger, the grammar begins."""
        assert self._trigger is not None
        refused: list[int] = []
        for _ in range(_MOST_TRIES):
            token = self._choose(logits, self._all_but(refused) if refused else None)
            if self._tokens.first[token] == END:
                return token
            piece = self._vocabulary.piece(token, special=True)
            text = self._trigger.found(piece)
            if text is None:
                self._trigger.push(piece)
                return token
            matcher = self._begin()
            if self._follow(matcher, text):
                self._matcher = matcher
                return token
            refused.append(token)
        raise GrammarError("what follows a trigger does not go on as the grammar wants it")

    def _all_but(self, refused: list[int]) -> Tokens:
        left = np.delete(self._all, refused)
        return left[~self._never[left]]

    def _follow(self, matcher: Matcher, text: bytes) -> bool:
        """Let a grammar follow a text, byte by byte; return whether it matches."""
        for byte in text:
            token = int(self._tokens.of_byte[byte])
            if token < 0 or not matcher.allows(token):
                return False
            matcher.accept(token)
        return True

    def _choose(self, logits: Logits, tokens: Tokens | None) -> int:
        """Choose one of some tokens, or of all, as the chain does."""
        if self._is_plain:
            if tokens is None:
                return self._likeliest(logits)
            biased = logits.copy()
            biased[self._biased] += self._biases
            return int(tokens[biased[tokens].argmax()])
        tokens = self._all if tokens is None else tokens
        self._candidates.fill(tokens, logits if tokens is self._all else logits[tokens])
        self._candidates.apply(self._open())
        return self._candidates.selected

    def close(self) -> None:
        """Free its memory. Calling it again does nothing."""
        super().close()
        if self._matcher is not None:
            self._matcher.close()
