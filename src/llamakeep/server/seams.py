"""Where clients expect prompts to part: at the ends of tools, and of parts of messages.

Nobody but a template knows where such a place is in its text. So the conversation is rendered once
more with something else right after the place: up to there both texts are the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from llamakeep.errors import InvalidValue, TemplateError
from llamakeep.server.errors import ApiError
from llamakeep.server.talk import Chat, Seam
from llamakeep.texts import common_text
from llamakeep.tool_calls import Tool

_log = logging.getLogger("llamakeep")

_OTHER = "8f3a1c5b7d2e"
"""A text that follows no place; its first letter may happen to, and then one letter is too many."""


def seams_of(text: str, chat: Chat, render: Callable[[Chat], str]) -> list[int]:
    """Return where the seams of a conversation are in its text, in characters, ascending.

    What is not known for sure is left out, and so are seams in the last message: next to the end
    of a prompt there is a checkpoint anyway. Costs a rendering for each seam.

    Args:
        text: Of the whole conversation.
        chat: The conversation.
        render: Returns the text of another one.
    """
    found: set[int] = set()
    for seam in chat.seams:
        changed = _changed(chat, seam)
        if changed is None:
            continue
        try:
            other = render(changed)
        except (ApiError, InvalidValue, TemplateError) as error:
            _log.debug("a seam is not known in this chat: %s", error)
            continue
        place = common_text(text, other)
        if 0 < place < len(text):
            found.add(place)
    return sorted(found)


def _changed(chat: Chat, seam: Seam) -> Chat | None:
    """Return a conversation that is another one from a seam on; None for a seam at its end."""
    if seam.message is None:
        tools = list(chat.tools)
        tools.insert(len(tools) if seam.part is None else seam.part + 1, Tool(_OTHER, _OTHER))
        return replace(chat, tools=tuple(tools))
    if seam.message >= len(chat.messages) - 1:
        return None
    messages = list(chat.messages)
    at, part = seam.message, seam.part
    if part is None:  # what begins after it is another one
        at += 1
        messages[at] = {**messages[at], "content": _before(messages[at].get("content"))}
    else:
        messages[at] = {**messages[at], "content": _after(messages[at].get("content"), part)}
    return replace(chat, messages=messages)


def _after(content: Any, part: int) -> Any:
    """Return content with another text at the end of one of its parts."""
    if not isinstance(content, list):
        return (content or "") + _OTHER
    parts: Sequence[Mapping[str, Any]] = content
    changed = {**parts[part], "text": parts[part]["text"] + _OTHER}
    return [*parts[:part], changed, *parts[part + 1 :]]


def _before(content: Any) -> Any:
    """Return content with another text at its beginning."""
    if not isinstance(content, list):
        return _OTHER + (content or "")
    return [{"type": "text", "text": _OTHER}, *content]
