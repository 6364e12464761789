"""How a replay takes, keeps and restores checkpoints: what the product's own objects are told."""

from __future__ import annotations

from dataclasses import dataclass, fields
from inspect import signature
from typing import Any, Final

from llamakeep.checkpoint_list import Restore
from llamakeep.errors import InvalidValue, whole_number
from llamakeep.policy import Policy, get_policy
from llamakeep.prompt_cache import CacheMode, KeepCheckpoints
from llamakeep.runtime.base import Family
from llamakeep.slots import Slots

RESTORES: Final = ("upstream", "exact", "prefix")
KEEPS: Final = ("all", "last", "none")
MODES: Final = ("upstream", "keep")

DEFAULT_LIMIT: Final = int(signature(Slots).parameters["ctx_checkpoints"].default)
"""Checkpoints that a slot may have, if not told."""

OF_PROMPTS: Final = ("mode", "policy", "restore", "keep")
"""What only llama-server's cache of whole prompts has: one slot's list, and copies of it."""


@dataclass(frozen=True, slots=True)
class CheckpointRules:
    """How checkpoints are taken, kept and restored. None: as the product does if not told.

    Attributes:
        mode: Of llama-server's cache, see `PromptCache`: `upstream` or `keep`.
        policy: Which checkpoint of a slot goes first, see `CheckpointList`.
        restore: Which one is restored: `upstream`, `exact` or `prefix`.
        keep: How many of a slot's checkpoints go into an entry of the cache: `all`, `last`, `none`.
        limit: Most checkpoints of a slot, or along one prompt of the tree; 0 takes none.
        limit_bytes: What those of a slot, or of the whole tree, may occupy.
        min_step: Least tokens between checkpoints at user messages.

    Raises:
        InvalidValue: For a value that is none of these.
    """

    mode: CacheMode | None = None
    policy: str | Policy | None = None
    restore: Restore | None = None
    keep: KeepCheckpoints | None = None
    limit: int | None = None
    limit_bytes: int | None = None
    min_step: int | None = None

    def __post_init__(self) -> None:
        for name, known in (("mode", MODES), ("restore", RESTORES), ("keep", KEEPS)):
            value = getattr(self, name)
            if value is not None and value not in known:
                raise InvalidValue(f"{name} must be one of {', '.join(known)}, not {value!r}")
        if self.policy is not None:
            get_policy(self.policy, "checkpoints")
        for name in ("limit", "limit_bytes", "min_step"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), 0)

    def check(self, cache: str, family: Family) -> None:
        """Raise for what this cache or this family has not.

        Raises:
            InvalidValue: With the names of what was given in vain.
        """
        given = [each.name for each in fields(self) if getattr(self, each.name) is not None]
        alone = [name for name in given if name in OF_PROMPTS]
        if cache != "prompt" and alone:
            raise InvalidValue(f"{alone[0]} is for the prompt cache alone, not for the {cache}")
        of_checkpoints = [name for name in given if name != "mode"]
        if family is Family.ATTENTION and of_checkpoints:
            raise InvalidValue(
                f"the {family.value} family has no checkpoints, and nothing to do with "
                f"their {of_checkpoints[0]}"
            )

    def most_of_slot(self, checkpoint_bytes: int) -> int:
        """Return how many checkpoints of that size a slot may have."""
        limit = DEFAULT_LIMIT if self.limit is None else self.limit
        if self.limit_bytes is None:
            return limit
        return min(limit, self.limit_bytes // checkpoint_bytes)

    def of_cache(self) -> dict[str, Any]:
        """Return what `PromptCache` is told."""
        return _given(mode=self.mode, checkpoints=self.keep)

    def of_slots(self) -> dict[str, Any]:
        """Return what `Slots` are told."""
        return _given(
            checkpoint_policy=self.policy,
            restore=self.restore,
            ctx_checkpoints=self.limit,
            checkpoint_bytes=self.limit_bytes,
            checkpoint_min_step=self.min_step,
        )

    def of_tree(self) -> dict[str, Any]:
        """Return what `PrefixTree` is told."""
        return _given(max_checkpoints=self.limit, max_checkpoint_bytes=self.limit_bytes)

    def of_sequence(self) -> dict[str, Any]:
        """Return what `KeptSequence` is told."""
        return _given(min_step=self.min_step)


DEFAULT_RULES: Final = CheckpointRules()
"""As the product does if not told."""


def name_of(policy: str | Policy) -> str:
    """Return what a policy is called."""
    return policy if isinstance(policy, str) else getattr(policy, "name", type(policy).__name__)


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}
