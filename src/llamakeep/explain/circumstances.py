"""What an engine or a keeper knows about a request beside its text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llamakeep.errors import InvalidValue, whole_number
from llamakeep.fingerprint import Difference
from llamakeep.states import Reuse

_SALT_PARTS = ("salted", "salt_id")
_NUMBERS = (
    "prompt_tokens",
    "reused_tokens",
    "shared_tokens",
    "stored_tokens",
    "nearest_checkpoint",
    "slack_tokens",
)


@dataclass(frozen=True, slots=True)
class Evicted:
    """The deepest beginning of a prompt that was kept once and is no more.

    Attributes:
        policy: Name of the policy that dropped it.
        n_tokens: Tokens of the prompt that it would have restored.
    """

    policy: str
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Circumstances:
    """Facts about one request. Each may be unknown: None, or empty.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        reused_tokens: Those that were not evaluated.
        tier: Where the reused ones came from, see `Reuse`.
        reason: What `Reuse` says about the rest.
        shared_tokens: Tokens that the best kept prefix shares with the prompt, restorable or not;
            0 if nothing is known that begins so.
        stored_tokens: Length of the kept prompt that shares most; equal to `shared_tokens` if all
            of it is the beginning of this one.
        rolling: A position is restorable only where a checkpoint sits.
        nearest_checkpoint: The deepest checkpoint at or before `shared_tokens`; None if there is
            none.
        slack_tokens: Up to so many tokens of what is shared are evaluated again in any case: those
            that `align` rounds off, and those that a decode needs.
        evicted: What was dropped that would have served.
        namespaces: How the prompt is kept in another namespace, see `Namespace.differences`; salts
            are named here only to who may know of other tenants.
    """

    prompt_tokens: int | None = None
    reused_tokens: int | None = None
    tier: str = ""
    reason: str = ""
    shared_tokens: int | None = None
    stored_tokens: int | None = None
    rolling: bool = False
    nearest_checkpoint: int | None = None
    slack_tokens: int = 9
    evicted: Evicted | None = None
    namespaces: tuple[Difference, ...] = ()

    @classmethod
    def of(cls, reuse: Reuse, **more: Any) -> Circumstances:
        """Return what a `Reuse` says, and other fields by name."""
        return cls(
            reuse.reused_tokens + reuse.evaluated_tokens,
            reuse.reused_tokens,
            reuse.tier,
            reuse.reason,
            **more,
        )

    @property
    def other_salt(self) -> bool:
        """Whether the salt is among what differs."""
        return any(each.part in _SALT_PARTS for each in self.namespaces)

    def to_json(self) -> dict[str, Any]:
        """Return what is known, ready for JSON."""
        found: dict[str, Any] = {
            "prompt_tokens": self.prompt_tokens,
            "reused_tokens": self.reused_tokens,
            "tier": self.tier or None,
            "reason": self.reason or None,
            "shared_tokens": self.shared_tokens,
            "stored_tokens": self.stored_tokens,
            "rolling": self.rolling or None,
            "nearest_checkpoint": self.nearest_checkpoint,
            "slack_tokens": self.slack_tokens,
        }
        if self.evicted is not None:
            found["evicted"] = {
                "policy": self.evicted.policy,
                "n_tokens": self.evicted.n_tokens,
            }
        if self.namespaces:
            found["namespaces"] = [
                {"part": each.part, "ours": each.ours, "theirs": each.theirs}
                for each in self.namespaces
            ]
        return {name: value for name, value in found.items() if value is not None}

    @classmethod
    def from_json(cls, value: object) -> Circumstances:
        """Return what `to_json` wrote; fields that nobody knows are passed over.

        Raises:
            InvalidValue: For anything else, with the field.
        """
        if not isinstance(value, Mapping):
            raise InvalidValue(f"circumstances must be an object, not {type(value).__name__}")
        known: dict[str, Any] = {}
        for name in _NUMBERS:
            if value.get(name) is not None:
                known[name] = whole_number(name, value[name], 0)
        for name in ("tier", "reason"):
            if value.get(name) is not None:
                known[name] = _text(name, value[name])
        known["rolling"] = value.get("rolling") is True
        evicted = value.get("evicted")
        if evicted is not None:
            if not isinstance(evicted, Mapping):
                raise InvalidValue("evicted must be an object")
            known["evicted"] = Evicted(
                _text("evicted.policy", evicted.get("policy")),
                whole_number("evicted.n_tokens", evicted.get("n_tokens"), 0),
            )
        known["namespaces"] = _differences(value.get("namespaces") or ())
        return cls(**known)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidValue(f"{name} must be a text, not {value!r:.60}")
    return value


def _differences(value: object) -> tuple[Difference, ...]:
    if not isinstance(value, (list, tuple)):
        raise InvalidValue("namespaces must be a list")
    found = []
    for index, each in enumerate(value):
        if not isinstance(each, Mapping):
            raise InvalidValue(f"namespaces[{index}] must be an object")
        part = _text(f"namespaces[{index}].part", each.get("part"))
        found.append(Difference(part, each.get("ours"), each.get("theirs")))
    return tuple(found)
