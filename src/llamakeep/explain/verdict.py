"""What is to be said of two prompts, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from llamakeep.explain.churn import Found, Proof
from llamakeep.explain.divergence import NOWHERE, Around
from llamakeep.explain.kinds import Kind
from llamakeep.explain.ordering import dumps

SURE: Final = Proof()
NEW_MESSAGE: Final = Proof(same_chars=200, ends_count=False, says_when=False)
"""In text that is new, a date is content; unless much follows that is not new."""
GIVEN: Final = Proof(reorders=False)
"""In what a call is given."""
LOOSE: Final = Proof(ends_count=False)
"""In a text of which nothing is known."""

_SHOWN_CHARS: Final = 80


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is to be said of two prompts.

    Attributes:
        kind: Why they part.
        reason: In a sentence.
        part: What part of the request it is, or "".
        char_index: Where they part: in the text of that part, or of the prompt.
        around: What stands there.
    """

    kind: Kind
    reason: str
    part: str = ""
    char_index: int | None = None
    around: Around = NOWHERE


def shown(value: object) -> str:
    """Return a value as a sentence can quote it."""
    text = value if isinstance(value, str) else dumps(value)
    return repr(text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}...")


def say(found: Found, part: str) -> str:
    """Return a sentence about what was found in a part of a prompt."""
    words = _WORDS[found.kind].format(part=part or "the prompt")
    if found.before or found.after:
        words += f": {shown(found.before)} before, {shown(found.after)} now"
    return words


def moved_keys(before: Any, after: Any) -> str:
    """Return which keys of two JSON values come in another order, for a sentence, or ""."""
    if isinstance(before, dict) and isinstance(after, dict):
        one, other = list(before), list(after)
        if one == other:
            inner = (moved_keys(before[key], after[key]) for key in one)
            return next(filter(None, inner), "")
    elif isinstance(before, list) and isinstance(after, list):
        if not all(isinstance(each, str) for each in (*before, *after)):
            inner = (moved_keys(a, b) for a, b in zip(before, after, strict=False))
            return next(filter(None, inner), "")
        one, other = before, after
    else:
        return ""
    if one == other or sorted(map(str, one)) != sorted(map(str, other)):
        return ""
    return f": {shown(', '.join(map(str, one)))} before, {shown(', '.join(map(str, other)))} now"


_WORDS: Final = {
    Kind.DATE: "{part} has another date or time",
    Kind.COUNTER: "{part} has another counter or id",
    Kind.ORDER: "{part} says the same in another order",
    Kind.NUMBER_FORMAT: "{part} has a number in another form",
    Kind.WHITESPACE: "{part} differs in white space",
}
