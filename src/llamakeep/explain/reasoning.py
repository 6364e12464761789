"""What a model thought before it answered, as texts have it."""

from __future__ import annotations

import re
from typing import Final

_PAIRS: Final = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "<thought>": "</thought>",
    "<reasoning>": "</reasoning>",
    "<reflection>": "</reflection>",
    "[THINK]": "[/THINK]",
    "<|begin_of_thought|>": "<|end_of_thought|>",
    "<|channel|>analysis": "<|end|>",
    "<|channel>thought": "<channel|>",
}
_OPENINGS: Final = re.compile("|".join(map(re.escape, _PAIRS)))
_END: Final = re.compile(r"\s*")
_ANSWER: Final = re.compile(
    r"<\|channel\|>final<\|message\|>|<\|begin_of_solution\|>|<\|end_of_solution\|>"
)
_BARE_CLOSING: Final = "</think>"
_BARE_OPENING: Final = "<think>"


def reasoning_end(text: str, start: int) -> int | None:
    """Return where reasoning that starts at `start` ends, white space behind it included."""
    opening = _OPENINGS.match(text, start)
    if opening is None:
        return None
    close = _PAIRS[opening.group()]
    end = text.find(close, opening.end())
    return None if end < 0 else _skip(text, end + len(close))


def _skip(text: str, at: int) -> int:
    found = _END.match(text, at)
    return found.end() if found else at


def without_reasoning(text: str) -> str:
    """Return a message's text without what is reasoning, and without the marks of an answer.

    A text that closes what it did not open began with reasoning: there are templates that write
    the opening themselves. Costs one scan for each kind of mark.
    """
    closing, opening = text.find(_BARE_CLOSING), text.find(_BARE_OPENING)
    at = 0
    if closing >= 0 and not 0 <= opening < closing:
        at = _skip(text, closing + len(_BARE_CLOSING))
    kept: list[str] = []
    unclosed: set[str] = set()
    for found in _OPENINGS.finditer(text):
        if found.start() < at or found.group() in unclosed:
            continue
        end = reasoning_end(text, found.start())
        if end is None:
            unclosed.add(found.group())  # later ones will not be closed either
            continue
        kept.append(text[at : found.start()])
        at = end
    return _ANSWER.sub("", "".join([*kept, text[at:]])).strip()


def is_reasoning(text: str) -> bool:
    """Return whether a text begins with reasoning, closed or not."""
    return _OPENINGS.match(text.lstrip()) is not None
