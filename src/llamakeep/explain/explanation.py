"""What is said about a prompt that was read again."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from llamakeep.errors import InvalidValue, whole_number
from llamakeep.explain.bodies import SETTINGS
from llamakeep.explain.divergence import NOWHERE, Around
from llamakeep.explain.kinds import (
    ADVICE,
    EDITED,
    EDITED_MEANING,
    MEANING,
    NO_TEXTS,
    NO_VOCAB,
    NOT_KEPT,
    TELLS_NO_TEXT,
    Kind,
)

_NUMBERS = (
    "char_index",
    "token_index",
    "token_range",
    "reused_tokens",
    "evaluated_tokens",
    "lost_tokens",
    "nearest_checkpoint",
)
_TEXTS = ("reason", "part", "tier", "policy", "request_id", "before_id")
_MOST_CHARS = 4096
_PLAIN_PATH = re.compile(
    r"message \d+(?: \((?:system|user|assistant|tool)\))?|(?:messages|input|tools)(?:\[\d+\])?"
    r"(?:\.content(?:\[\d+\])?)?|tools order|system|instructions|prompt|cache_salt"
)
_IS_MESSAGE = re.compile(r"messages?[ \[]|input\[")
_SETTINGS = (Kind.NAMESPACE, Kind.SALT)
"""Their parts are names of settings."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a prompt, or the rest of one, had to be evaluated. Numbers may be unknown: None.

    Attributes:
        kind: The cause.
        reason: In a sentence.
        part: What part of the request it is, as in `messages[3].content`, or "".
        char_index: Where the prompts part, in characters: of that part, where one is named by a
            path into a request body, else of the prompt.
        token_index: The same in tokens of the prompt.
        token_range: The prompts part within so many tokens from `token_index` on: 1 if that is
            exact, a block's length where only hashes of blocks are known.
        around: The text there.
        reused_tokens: Prompt tokens that were not evaluated.
        evaluated_tokens: Prompt tokens that were.
        lost_tokens: Tokens that would not have been evaluated but for the cause.
        tier: Where the reused tokens came from.
        policy: Name of the policy that evicted what would have served.
        nearest_checkpoint: The deepest checkpoint before the place where the prompts part.
        also: Other kinds that apply.
        request_id: The request that is explained, or "".
        before_id: The request with which it is compared, or "".
    """

    kind: Kind
    reason: str = ""
    part: str = ""
    char_index: int | None = None
    token_index: int | None = None
    token_range: int | None = None
    around: Around = NOWHERE
    reused_tokens: int | None = None
    evaluated_tokens: int | None = None
    lost_tokens: int | None = None
    tier: str = ""
    policy: str = ""
    nearest_checkpoint: int | None = None
    also: tuple[Kind, ...] = ()
    request_id: str = ""
    before_id: str = ""

    @property
    def advice(self) -> str:
        """What a user can do about it."""
        return ADVICE[self.kind] if self.kind is not Kind.UNKNOWN else self._next_step()

    @property
    def _is_not_kept(self) -> bool:
        """Whether it was sent before and is not kept, of which only figures are told."""
        return self.kind is Kind.UNKNOWN and self.lost_tokens is not None

    def _next_step(self) -> str:
        """What a user can do where no cause is proven."""
        if self._is_not_kept:
            return NOT_KEPT
        if self.part in SETTINGS:
            return f"Send the same {self.part} in every request of a conversation."
        if _IS_MESSAGE.match(self.part):
            return EDITED
        if self.around != NOWHERE:
            return ADVICE[self.kind]
        if self.request_id:
            return NO_TEXTS
        return NO_VOCAB if self.token_index is not None else ADVICE[self.kind]

    def without_texts(self) -> Explanation:
        """Return the same with nothing in it that prompts say.

        Reasons of a few kinds stay as they are; of all others there is a sentence for each kind. Of
        a part's path only the beginning stays: what follows can be keys that a client chose.
        """
        tells_none = self.kind in TELLS_NO_TEXT or self._is_not_kept
        reason = self.reason if tells_none else MEANING[self.kind]
        if self.kind is Kind.UNKNOWN and not tells_none and _IS_MESSAGE.match(self.part):
            reason = EDITED_MEANING
        path = _PLAIN_PATH.match(self.part)
        part = "" if path is None else path.group()
        if self.kind in _SETTINGS:
            part = self.part
        return replace(self, reason=reason, part=part, around=NOWHERE)

    def to_json(self) -> dict[str, Any]:
        """Return all that is known, ready for JSON."""
        found: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        found["kind"] = self.kind.value
        found["advice"] = self.advice
        found["also"] = [kind.value for kind in self.also]
        found["around"] = {
            "shared": self.around.shared,
            "before": self.around.before,
            "after": self.around.after,
        }
        return found

    @classmethod
    def from_json(cls, value: object) -> Explanation:
        """Return what `to_json` wrote; fields that nobody knows are passed over.

        Raises:
            InvalidValue: For anything else, with the field.
        """
        if not isinstance(value, Mapping):
            raise InvalidValue(f"an explanation must be an object, not {type(value).__name__}")
        known: dict[str, Any] = {"kind": _kind(value.get("kind"))}
        for name in _NUMBERS:
            if value.get(name) is not None:
                known[name] = whole_number(name, value[name], 0)
        for name in _TEXTS:
            if value.get(name) is not None:
                known[name] = _text(name, value[name])
        near = value.get("around")
        if near is not None:
            if not isinstance(near, Mapping):
                raise InvalidValue("around must be an object")
            parts = ("shared", "before", "after")
            known["around"] = Around(*(_text(f"around.{p}", near.get(p, "")) for p in parts))
        also = value.get("also") or []
        if not isinstance(also, list):
            raise InvalidValue("also must be a list")
        known["also"] = tuple(map(_kind, also))
        return cls(**known)


def _kind(value: object) -> Kind:
    try:
        return Kind(value)
    except ValueError:
        raise InvalidValue(f"{value!r:.60} is no kind of explanation") from None


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidValue(f"{name} must be a text, not {value!r:.60}")
    return value[:_MOST_CHARS]
