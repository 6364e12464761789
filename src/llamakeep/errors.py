"""The errors llamakeep raises, in one tree.

::

    LlamakeepError
    ├── InvalidValue            an argument that cannot be meant (also a ValueError)
    │   ├── TokenError          a token list or id outside the vocabulary
    │   ├── TemplateError       a chat template that cannot be compiled or rendered
    │   ├── GrammarError        a grammar or a JSON schema that cannot be compiled
    │   ├── ToolError           a tool that cannot be told to a model
    │   └── ContextOverflow     more tokens than the context has room for
    ├── ModelError              a model that is missing, unreadable or not supported
    ├── DecodeError             llama.cpp could not evaluate a batch
    │   └── NoRoom              it found no cells for it; no sequence has changed
    ├── StateError              a kept state could not be used
    │   ├── StateRejected       refused by our own checks, before native code saw it
    │   ├── BlobRejected        a file or value that is not what was stored there
    │   ├── StateLost           a state that was found is gone when it is to be read
    │   └── RestoreFailed       refused or left wrong by llama.cpp; the sequence is empty again
    ├── StoreError              a directory or server that cannot keep states
    │   └── IndexDamaged        a directory whose index must be made anew
    ├── OverBudget              a reservation that does not fit
    ├── IntegrityError          `check()` found numbers that do not add up
    ├── QueueFull               as many requests wait as may wait
    ├── EngineClosed            a request to an engine that takes no more
    ├── KeeperBusy              a call while a stream of the same `Llama` is open
    └── KeeperClosed            a call on a detached keeper or a closed model

A cache that cannot help is a miss with a reason, never one of these: they are raised for
callers' mistakes and for what breaks below.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class LlamakeepError(Exception):
    """Base class of everything llamakeep raises."""


class InvalidValue(LlamakeepError, ValueError):
    """An argument has a value that cannot be meant; the message names it."""


class TokenError(InvalidValue):
    """A token list is not one-dimensional integers, or an id lies outside the vocabulary."""


class TemplateError(InvalidValue):
    """A chat template is wrong or refuses these messages; the message has the template's words."""


class GrammarError(InvalidValue):
    """A grammar or a JSON schema cannot be compiled; the message says where, and why.

    Attributes:
        where: A line and column of a grammar, or the path to what is wrong in a schema; "" where
            it is the whole of it.
    """

    def __init__(self, message: str, *, where: str = "") -> None:
        super().__init__(message)
        self.where = where


class ToolError(InvalidValue):
    """A tool cannot be told to a model, for its name or its parameters.

    Attributes:
        field: Which of the two: `name` or `parameters`.
    """

    def __init__(self, message: str, *, field: str) -> None:
        super().__init__(message)
        self.field = field


class ContextOverflow(InvalidValue, RuntimeError):
    """A prompt or a state needs more tokens than the context has room for.

    Attributes:
        n_tokens: How many it needs, where that is known.
        n_ctx: How many there are, where that is known.
    """

    def __init__(
        self, message: str, *, n_tokens: int | None = None, n_ctx: int | None = None
    ) -> None:
        super().__init__(message)
        self.n_tokens = n_tokens
        self.n_ctx = n_ctx


class ModelError(LlamakeepError):
    """A model or context is missing, unreadable, or of a kind that keeps no prompt state."""


class DecodeError(LlamakeepError, RuntimeError):
    """llama.cpp could not evaluate a batch; its sequences are cleared.

    Attributes:
        cleared_all: True when every sequence had to be cleared, those outside of the batch too.
    """

    def __init__(self, message: str, *, cleared_all: bool = False) -> None:
        super().__init__(message)
        self.cleared_all = cleared_all


class NoRoom(DecodeError):
    """The context has no cells for a batch; every sequence is as it was before."""


class StateError(LlamakeepError):
    """A kept state could not be used. The caller evaluates the prompt instead."""


class StateRejected(StateError):
    """Our own checks refused a state before native code saw it; the sequence is unchanged.

    Attributes:
        refused: The `Segment` or `Checkpoint` that is not what it should be, where that is known.
    """

    def __init__(self, message: str, *, refused: Any = None) -> None:
        super().__init__(message)
        self.refused = refused


class BlobRejected(StateError):
    """A file or value of a tier is foreign, newer, truncated, corrupt or not authentic: a miss.

    Attributes:
        reason: In a word, for counters: `foreign`, `version`, `truncated`, `name`, `corrupt`,
            `secret`, `symlink`.
    """

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class StateLost(StateError):
    """A state that was found is gone from its tier; the sequence is empty.

    Attributes:
        lost: The reference to it.
    """

    def __init__(self, message: str, *, lost: Any) -> None:
        super().__init__(message)
        self.lost = lost


def is_of_input(error: StateError) -> bool:
    """Whether it is a state that was handed in which is to blame, not what was done with it."""
    return isinstance(error, StateLost) or getattr(error, "refused", None) is not None


@contextmanager
def blaming(state: object) -> Iterator[None]:
    """Note on a `StateRejected` that is raised inside which state was refused."""
    try:
        yield
    except StateRejected as error:
        error.refused = state
        raise


class RestoreFailed(StateError):
    """llama.cpp refused a state, or the sequence was wrong afterwards; it is empty now.

    Attributes:
        cleared_all: True when the whole memory had to be cleared, every sequence with it.
    """

    def __init__(self, message: str, *, cleared_all: bool = False) -> None:
        super().__init__(message)
        self.cleared_all = cleared_all


class StoreError(LlamakeepError):
    """A directory or server cannot keep states; the message says which, and why."""


class IndexDamaged(StoreError):
    """The index is missing or damaged, or another version's; it can be made anew from the files."""


class OverBudget(LlamakeepError):
    """A reservation of bytes does not fit into its budget."""


class IntegrityError(LlamakeepError):
    """A `check()` found numbers that do not add up; the message gives them."""


class QueueFull(LlamakeepError):
    """As many requests are waiting as may wait.

    Attributes:
        retry_after_s: When it may be worth to ask again, in seconds.
    """

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineClosed(LlamakeepError, RuntimeError):
    """The engine is shutting down, or has been shut down."""


class KeeperBusy(LlamakeepError, RuntimeError):
    """A call came in a thread whose own stream of the same `Llama` is still open."""


class KeeperClosed(LlamakeepError, RuntimeError):
    """The keeper was detached, or its model closed."""


def whole_number(name: str, value: object, least: int) -> int:
    """Return `value`, a whole number of at least `least`.

    Raises:
        InvalidValue: With the argument's name and its value.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise InvalidValue(f"{name} must be a whole number, not {value!r}")
    number = operator.index(value)
    if number < least:
        raise InvalidValue(f"{name} must be {least} or more, not {number}")
    return number
