"""The bodies of requests as conversations: everything in them that becomes a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from llamakeep.errors import InvalidValue
from llamakeep.explain import items
from llamakeep.explain.conversation import Conversation, Leaf, Message
from llamakeep.explain.leaves import content_leaves, message_leaves, written
from llamakeep.explain.ordering import MOST_DEPTH, too_deep
from llamakeep.texts import without_billing

_SETTINGS: Final = (
    "chat_template",
    "chat_template_kwargs",
    "reasoning_effort",
    "add_generation_prompt",
    "continue_final_message",
    "documents",
)
SETTINGS: Final = frozenset({*_SETTINGS, "thinking", "output_config.effort", "reasoning.effort"})
"""Paths of what changes the text that a template writes, besides messages and tools."""
_MOST_EFFORTS: Final = {"xhigh": "high", "max": "high"}
"""Of Anthropic's API, to the most that templates know."""


def is_chat(body: Mapping[str, Any]) -> bool:
    """Return whether a request body is a conversation: messages, or the items of a response."""
    return isinstance(body.get("messages"), list) or _has_items(body)


def _has_items(body: Mapping[str, Any]) -> bool:
    if "messages" in body or body.get("prompt") is not None:
        return False
    return isinstance(body.get("input"), (str, list)) or isinstance(body.get("instructions"), str)


def from_body(body: Mapping[str, Any]) -> Conversation:
    """Return the conversation of a request to a chat API.

    That is OpenAI's, for chats and for responses, llama-server's or Anthropic's.

    Raises:
        InvalidValue: For JSON that is nested too deeply, and for a body without messages.
    """
    if too_deep(dict(body), most=2 * MOST_DEPTH):
        raise InvalidValue(f"a request body is nested more than {2 * MOST_DEPTH} times")
    if not is_chat(body):
        raise InvalidValue("a request body has no messages")
    messages = list(items.messages_of(body) if _has_items(body) else _messages(body))
    tools_path = "functions" if body.get("functions") and not body.get("tools") else "tools"
    tools = body.get(tools_path)
    return Conversation(
        tuple(messages),
        tuple(written(each) for each in tools) if isinstance(tools, list) else (),
        tools_path,
        dict(_settings(body)),
        salt_of(body),
    )


def salt_of(body: Mapping[str, Any]) -> str | None:
    """Return the salt of a request, if it has one."""
    salt = body.get("cache_salt")
    return salt if isinstance(salt, str) and salt else None


def _settings(body: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield what templates are told besides, by its path."""
    for name in _SETTINGS:
        if body.get(name) is not None:
            yield name, body[name]
    thinking = _within(body, "thinking", "type")
    if isinstance(thinking, str):
        # How it thinks, and how much of it, no template is told.
        yield "thinking", "disabled" if thinking == "disabled" else "enabled"
    effort = _within(body, "output_config", "effort")
    if effort is not None:
        known = _MOST_EFFORTS.get(effort, effort) if isinstance(effort, str) else effort
        yield "output_config.effort", known
    effort = _within(body, "reasoning", "effort")
    if effort is not None:
        yield "reasoning.effort", effort


def _within(body: Mapping[str, Any], name: str, inner: str) -> Any:
    value = body.get(name)
    return value.get(inner) if isinstance(value, Mapping) else None


def _messages(body: Mapping[str, Any]) -> Iterator[Message]:
    """Yield the messages of a chat; the system prompt of Anthropic's is the first."""
    leaves = tuple(_system(body.get("system")))
    if leaves:
        yield Message("system", "system", leaves)
    for index, each in enumerate(body["messages"]):
        yield _message(f"messages[{index}]", each)


def _system(given: Any) -> Iterator[Leaf]:
    for leaf in content_leaves("system", given):
        text = without_billing(leaf.value) if isinstance(leaf.value, str) else leaf.value
        if text != "":
            yield Leaf(leaf.path, leaf.what, text)


def _message(path: str, message: Any) -> Message:
    if not isinstance(message, Mapping):
        return Message(path, "?", (Leaf(path, "text", message),))
    role = message.get("role")
    role = role if isinstance(role, str) else "?"
    if role == "developer":  # as most templates have it
        role = "system"
    return Message(path, role, tuple(message_leaves(path, written(message))))
