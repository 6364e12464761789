"""What the prompt cache keeps of a prompt, and what its calls say of themselves."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from llamakeep.checkpoint_list import CheckpointList
from llamakeep.listed import ListedCheckpoint, deepest_of, prefixes_of, state_at
from llamakeep.states import Checkpoint
from llamakeep.tokens import IntArray
from llamakeep.wholes import Whole


def no_tokens() -> IntArray:
    """Return what an empty sequence holds."""
    return np.empty(0, np.int32)


def ratio(part: int, whole: int) -> float:
    """Return part / whole in single precision, in which llama-server compares f_keep and f_sim."""
    return float(np.float32(part) / np.float32(whole))


def reason(error: Exception) -> str:
    """Return what an error says; a MemoryError mostly says nothing."""
    return str(error) or "out of memory"


class Saving(str, enum.Enum):
    """What became of a slot that was to be saved."""

    SAVED = "saved"
    NOTHING = "nothing to save"
    """The slot is empty, or the cache is off."""
    CACHED = "already in the cache"
    REFUSED = "too large"
    NO_MEMORY = "no memory"
    FAILED = "failed"
    """The runtime could not read the state."""


class Loading(str, enum.Enum):
    """What became of the search for an entry."""

    RESTORED = "restored"
    NO_MATCH = "no match"
    """The sequence is as it was."""
    FAILED = "failed"
    """The sequence is empty."""


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """What `PromptCache.load` did.

    Attributes:
        result: Restored, no match or failed.
        tokens: What the sequence holds now, when something was restored.
        checkpoints: The entry's, when something was restored.
        cleared_all: The failure emptied every sequence of the runtime.
    """

    result: Loading
    tokens: IntArray = field(default_factory=no_tokens)
    checkpoints: CheckpointList | None = None
    cleared_all: bool = False


class Allocated(NamedTuple):
    """What `PromptCache.alloc` did: an entry that waits for its state, or why there is none."""

    result: Saving
    entry: Entry | None = None


class Entry:
    """One prompt that is kept; `n_bytes` counts its states and its checkpoints.

    Attributes:
        tokens: The prompt.
        namespace: What makes its states incompatible with others.
        rolling: It can be resumed at its end and at its checkpoints only.
        state: Of the model's sequence, or None while it is being read.
        draft: Of the draft model's.
        checkpoints: A copy of the slot's, or None.
        n_bytes: What it occupies.
        created: When it was stored, or used if uses refresh it.
        last_used: When it was stored or used.
        sequence: Grows with every entry stored.
        hits: How often it was used.
    """

    __slots__ = (
        "_proven",
        "checkpoints",
        "created",
        "draft",
        "hits",
        "last_used",
        "marginal",
        "n_bytes",
        "namespace",
        "rolling",
        "sequence",
        "state",
        "tokens",
    )

    def __init__(
        self,
        tokens: IntArray,
        n_bytes: int,
        *,
        checkpoints: CheckpointList | None = None,
        rolling: bool = False,
        namespace: bytes = b"",
    ) -> None:
        self.tokens = tokens.copy()
        self.tokens.flags.writeable = False
        self.n_bytes = n_bytes
        self.checkpoints = checkpoints
        self.rolling = rolling
        self.namespace = namespace
        self.state: Whole | None = None
        self.draft: Whole | None = None
        self.created = self.last_used = 0.0
        self.sequence = self.hits = 0
        self.marginal: Callable[[Entry], int] | None = None
        self._proven: tuple[CheckpointList, list[ListedCheckpoint]] | None = None

    def __repr__(self) -> str:
        held = f"{self.n_tokens} tokens, {self.n_checkpoints} checkpoints"
        return f"Entry({held}, {self.n_bytes:,} bytes)"

    @property
    def n_tokens(self) -> int:
        """Tokens of the prompt."""
        return int(self.tokens.size)

    @property
    def n_checkpoints(self) -> int:
        """Checkpoints kept with it."""
        return len(self.checkpoints) if self.checkpoints is not None else 0

    @property
    def marginal_tokens(self) -> int:
        """Tokens that no other entry could resume: what losing this one would cost."""
        return self.marginal(self) if self.marginal is not None else self.n_tokens

    def reach(self, n_shared: int, limit: int) -> int:
        """Return how many tokens of a prompt, at most `limit`, can be resumed from this entry.

        At any of its checkpoints, whatever the mode of the list they are from: what is loaded
        ends there, and is gone on with at its end.

        Args:
            n_shared: Leading tokens that the prompt shares with this entry.
            limit: Tokens of it that may be reused.
        """
        limit = min(limit, n_shared)
        if not self.rolling or limit == self.n_tokens:
            return limit
        found = deepest_of(self.own_checkpoints(), limit)
        return found.n_tokens if found is not None else 0

    def places(self) -> set[int]:
        """Return where a rolling entry can be resumed: at its end and its own checkpoints."""
        return {self.n_tokens, *(kept.n_tokens for kept in self.own_checkpoints())}

    def own_checkpoints(self) -> list[ListedCheckpoint]:
        """Return the checkpoints that are proven to be of these tokens, by position.

        llama-server's lists hold others too. Costs one hash of the tokens, the first time only.
        """
        if self.checkpoints is None:
            return []
        if self._proven is None or self._proven[0] is not self.checkpoints:
            self._proven = self.checkpoints, prefixes_of(self.checkpoints, self.tokens)
        return self._proven[1]

    def checkpoint_at(self, n_tokens: int) -> Checkpoint | None:
        """Return the state of the checkpoint there, if it is of these tokens."""
        return state_at(self.own_checkpoints(), n_tokens)
