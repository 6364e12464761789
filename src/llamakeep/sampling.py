"""How the next token is chosen: the settings, by llama-server's names and with its defaults."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from llamakeep.biases import NO_BIASES, Biases
from llamakeep.errors import InvalidValue

RANDOM_SEED = -1
"""As `Sampling.seed`: another one each time."""

MOST_TRIGGERS = 64
MOST_TRIGGER_CHARS = 256


@dataclass(frozen=True, slots=True)
class Sampling:
    """How one request's tokens are chosen. Defaults are llama-server's.

    Attributes:
        temperature: 0 or less takes the likeliest token.
        top_k: Of so many likeliest tokens; 0 or less for all.
        top_p: Of the likeliest that together have this probability; 1 for all.
        min_p: Of those that have at least this share of the likeliest one's probability; 0 for all.
        typical_p: Locally typical sampling; 1 for off.
        repeat_penalty: Divides the logits of recent tokens; 1 for off.
        repeat_last_n: How many tokens are recent; 0 for none, -1 for all of the context.
        presence_penalty: Subtracted from the logits of recent tokens; 0 for off.
        frequency_penalty: The same, times how often they came; 0 for off.
        seed: Of the random numbers; -1 for another one each time.
        logit_bias: Pairs of token and what is added to its logit; minus infinity forbids it.
            Becomes `Biases`, which copies of these settings share.
        ignore_eos: The end of an answer is never sampled.
        min_keep: Tokens that the filters leave at least.
        grammar: What the answer has to match, in GBNF, from the rule `root`; "" for anything.
        grammar_triggers: Texts, special tokens by theirs, with the first of which the grammar
            begins: it describes the answer from there on, the trigger included, and what comes
            before is free. Without any, it describes the whole answer.

    Raises:
        InvalidValue: For a number that cannot be meant, with its name.
        TokenError: For a bias of what can be no token.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = RANDOM_SEED
    logit_bias: Sequence[tuple[int, float]] = NO_BIASES
    ignore_eos: bool = False
    min_keep: int = 0
    grammar: str = ""
    grammar_triggers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("temperature", "presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not math.isfinite(value):
                raise InvalidValue(f"{name} must be a finite number, not {value!r}")
        for name in ("top_p", "min_p", "typical_p"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise InvalidValue(f"{name} must be between 0 and 1, not {value!r}")
        if not 0 < self.repeat_penalty < math.inf:
            raise InvalidValue(f"repeat_penalty must be above 0, not {self.repeat_penalty!r}")
        if self.repeat_last_n < -1:
            raise InvalidValue(f"repeat_last_n must be -1 or more, not {self.repeat_last_n!r}")
        if self.min_keep < 0:
            raise InvalidValue(f"min_keep must be 0 or more, not {self.min_keep!r}")
        object.__setattr__(self, "logit_bias", Biases.of(self.logit_bias))
        if self.grammar_triggers:
            self._check_triggers()

    def _check_triggers(self) -> None:
        triggers = self.grammar_triggers
        if not self.grammar:
            raise InvalidValue("grammar_triggers need a grammar")
        if len(triggers) > MOST_TRIGGERS:
            raise InvalidValue(f"{len(triggers)} grammar_triggers, at most {MOST_TRIGGERS}")
        for text in triggers:
            if not 0 < len(text) <= MOST_TRIGGER_CHARS:
                raise InvalidValue(
                    f"a grammar trigger has 1 to {MOST_TRIGGER_CHARS} characters, not {len(text)}"
                )

    @property
    def biases(self) -> Biases:
        """What `logit_bias` comes to."""
        assert isinstance(self.logit_bias, Biases), "see `__post_init__`"
        return self.logit_bias

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature <= 0
