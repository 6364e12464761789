"""Whether two conversations have more in common than how prompts begin."""

from __future__ import annotations

import re
from typing import Final

from llamakeep.explain.conversation import Conversation, Message

_WORD: Final = re.compile(r"[\u3040-\u9fff\uac00-\ud7af]|\w+")
_RUN_WORDS: Final = 3
_MOST_CHARS: Final = 1 << 18
_LEAST_SHARE: Final = 0.3


def related(before: Conversation, after: Conversation) -> bool:
    """Return whether two conversations have a message in common, or much of their system prompt.

    Where neither has a system prompt, their first messages stand for it. Costs a scan of both.
    """
    ours = {each.key for each in before.messages if not each.is_system and _WORD.search(each.text)}
    if any(each.key in ours for each in after.messages):
        return True
    sides = (before.messages, after.messages)
    systems = ["\n".join(each.text for each in side if each.is_system) for side in sides]
    if not any(systems):
        systems = [_first_text(side) for side in sides]
    return likeness(*systems) >= _LEAST_SHARE


def _first_text(messages: tuple[Message, ...]) -> str:
    return messages[0].text if messages else ""


def likeness(one: str, other: str) -> float:
    """Return the share of the longer text's runs of three words that the other one has, too."""
    runs, others = _runs(one), _runs(other)
    longer = max(len(runs), len(others))
    return len(runs & others) / longer if longer else float(one == other)


def _runs(text: str) -> set[tuple[str, ...]]:
    words = _WORD.findall(text[:_MOST_CHARS])
    if len(words) < _RUN_WORDS:
        return {tuple(words)} if words else set()
    return set(zip(*(words[start:] for start in range(_RUN_WORDS)), strict=False))
