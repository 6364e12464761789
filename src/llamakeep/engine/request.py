"""What goes into the engine, and what comes out of it while a prompt is answered.

::

    Request -> Engine.submit -> Begun, Progress..., Piece..., then Finished or Failed
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

from llamakeep.errors import InvalidValue, TokenError, whole_number
from llamakeep.modes import Mode
from llamakeep.sampling import Sampling
from llamakeep.states import Reuse
from llamakeep.tokens import IntArray, TokensLike, as_tokens

MAX_STOP_CHARS = 1 << 14
"""Length of all stop strings of a request together."""


def steps_of(n_tokens: int) -> int:
    """Return how many batches so many tokens of an answer took after its prompt's last one."""
    return max(0, n_tokens - 1)


class Stop(str, enum.Enum):
    """Why an answer ended."""

    END = "end"
    """The model ended it."""
    WORD = "word"
    """One of the request's stop strings came up."""
    LIMIT = "limit"
    """It has as many tokens as were asked for, or the context is full."""
    CANCELLED = "cancelled"
    """Nobody wants the rest."""


@dataclass(frozen=True, eq=False)
class Request:
    """One prompt to answer.

    Attributes:
        prompt: At least one token.
        max_tokens: Tokens to generate at most; 0 evaluates the prompt only, None goes on until the
            model ends or the context is full.
        sampling: How tokens are chosen.
        stop: Texts that end the answer; they are not part of it.
        shown: Special tokens whose text is part of the answer, which else it is not.
        n_probs: How many of the likeliest tokens come with each token generated; 0 for none. The
            log probability of the one that was chosen comes too then, and with 1 or more.
        user_starts: Positions in the prompt where a user message starts, ascending.
        mode: What may be reused and kept.
        salt: Requests with different salts share nothing.
        slot: Answer in this slot only, waiting for it if it is taken; None for any.
        wants_progress: Send `Progress` while the prompt is evaluated.
        label: A name for logs, such as the identifier of an HTTP request.
        session: What its sender says that it belongs to.
        body: What it was made of, as JSON; only where texts may be kept to explain requests.
        alias: Another name that its sender knows it by, or "".

    Raises:
        TokenError: For an empty prompt, or one that is no list of tokens.
        InvalidValue: For a number that cannot be meant, with its name.
    """

    prompt: IntArray
    max_tokens: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    stop: tuple[str, ...] = ()
    shown: frozenset[int] = frozenset()
    n_probs: int = 0
    user_starts: tuple[int, ...] = ()
    mode: Mode = Mode.ON
    salt: str = ""
    slot: int | None = None
    wants_progress: bool = False
    label: str = ""
    session: str = ""
    body: bytes | None = None
    alias: str = ""

    @classmethod
    def of(cls, prompt: TokensLike, **options: object) -> Request:
        """Return a request for anything that is a list of tokens."""
        return cls(as_tokens(prompt), **options)  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        if not self.prompt.size:
            raise TokenError("a prompt has at least one token")
        if self.max_tokens is not None:
            whole_number("max_tokens", self.max_tokens, 0)
        whole_number("n_probs", self.n_probs, 0)
        if any(not text for text in self.stop):
            raise InvalidValue("a stop string has at least one character")
        if (n_chars := sum(map(len, self.stop))) > MAX_STOP_CHARS:
            raise InvalidValue(
                f"stop strings have {n_chars:,} characters together, at most {MAX_STOP_CHARS:,}"
            )
        starts = self.user_starts
        if list(starts) != sorted(set(starts)) or any(
            not 0 <= start < self.prompt.size for start in starts
        ):
            raise InvalidValue(f"user_starts must ascend below {self.prompt.size}, not {starts}")


@dataclass(frozen=True, slots=True)
class TokenProb:
    """A token, its bytes as text, and its log probability before sampling changed anything."""

    token: int
    piece: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class Choice:
    """A token that was chosen, with its probability where that was asked for.

    Attributes:
        token: The token.
        prob: Its log probability; None if nobody asked.
        likeliest: The likeliest tokens, in order.
    """

    token: int
    prob: TokenProb | None = None
    likeliest: tuple[TokenProb, ...] = ()


@dataclass(frozen=True, slots=True)
class Begun:
    """A slot has taken the request; the rest of its prompt is evaluated now."""

    slot_id: int
    reuse: Reuse


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the prompt is evaluated.

    Attributes:
        total: Tokens of the prompt.
        cached: Those that were reused.
        processed: Those that are in the slot by now, the reused ones included.
        ms: Milliseconds since the prompt was begun.
    """

    total: int
    cached: int
    processed: int
    ms: float


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of the answer.

    Attributes:
        text: Whole characters that cannot become part of a stop string any more; often one
            token's, sometimes empty, sometimes several tokens'.
        tokens: The tokens that were generated since the piece before.
        probs: For each of them the chosen token and the likeliest ones; empty unless asked for.
    """

    text: str
    tokens: tuple[int, ...]
    probs: tuple[Choice, ...] = ()


@dataclass(frozen=True, slots=True)
class Timings:
    """What a request cost. Milliseconds are of wall time.

    Attributes:
        queue_ms: Waiting for a slot, up to the end where it never got one.
        prompt_n: Tokens of the prompt that were evaluated. Where a request had to begin anew, those
            that were evaluated again count again, and so do those of the answer.
        cache_n: Those that were reused.
        prompt_ms: Finding, restoring and evaluating, up to the first token or to the end.
        predicted_n: Tokens generated.
        predicted_ms: From the first token to the last.
    """

    queue_ms: float
    prompt_n: int
    cache_n: int
    prompt_ms: float
    predicted_n: int
    predicted_ms: float

    @property
    def n_steps(self) -> int:
        """Batches that `predicted_ms` is the time of: the first token came with the prompt."""
        return steps_of(self.predicted_n)


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer is complete.

    Attributes:
        stop: Why it ended.
        stopping_word: The stop string that ended it, or "".
        slot_id: Which slot answered; None if none ever did.
        reuse: How the prompt was served; None if no slot ever took it.
        timings: What it cost.
        n_prompt: Tokens of the prompt.
        n_cached: Tokens that the slot holds now, those of the answer included.
        truncated: The context was full.
    """

    stop: Stop
    stopping_word: str
    slot_id: int | None
    reuse: Reuse | None
    timings: Timings
    n_prompt: int
    n_cached: int
    truncated: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """The request could not be answered, or not to its end.

    Attributes:
        error: Why: a `LlamakeepError`.
    """

    error: Exception


Update: TypeAlias = "Begun | Progress | Piece | Finished | Failed"
Listener: TypeAlias = Callable[["Update"], None]
"""Hears what becomes of a request, from the engine's thread; must neither block nor raise."""
