"""Prompts as conversations, and those that the texts of chat templates show."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from llamakeep.explain.ordering import dumps

_MOST_MESSAGES: Final = 16384


@dataclass(frozen=True, slots=True)
class Leaf:
    """One thing that a message says.

    Attributes:
        path: Where it stands, as in `messages[3].content`.
        what: `text`, `reasoning`, `id`, `name`, `arguments`, or the name of another field.
        value: A text or any JSON.
        start: Where it starts in the text of the whole prompt, if it is a part of one.
    """

    path: str
    what: str
    value: Any
    start: int = 0


@dataclass(frozen=True, slots=True)
class Message:
    """A message.

    Attributes:
        path: Where it stands, as in `messages[3]`.
        role: Whose it is.
        leaves: What it says, in the order in which templates write it.
    """

    path: str
    role: str
    leaves: tuple[Leaf, ...]

    @property
    def is_system(self) -> bool:
        """Whether it is an instruction of the operator."""
        return self.role == "system"

    @property
    def key(self) -> str:
        """Equal for messages that say the same."""
        return dumps([self.role, *([leaf.what, leaf.value] for leaf in self.leaves)])

    @property
    def text(self) -> str:
        """All texts in it."""
        return "\n".join(leaf.value for leaf in self.leaves if isinstance(leaf.value, str))


@dataclass(frozen=True, slots=True)
class Conversation:
    """What becomes of a chat: everything of a request that its prompt is made of.

    Attributes:
        messages: In order; the system prompt is the first, wherever the request has it.
        tools: Tools that the model may call.
        tools_path: Where they stand.
        settings: Other fields that change the prompt.
        salt: The request's salt, or None.
        rendered: It was read from the text of a prompt, where tools are part of a message.
    """

    messages: tuple[Message, ...]
    tools: tuple[Any, ...] = ()
    tools_path: str = "tools"
    settings: Mapping[str, Any] = field(default_factory=dict)
    salt: str | None = None
    rendered: bool = False


# -- texts -----------------------------------------------------------------------------------------

ROLES: Final = frozenset({"system", "user", "assistant", "tool", "function", "?"})
"""Roles that are told by their names."""
_ROLE_NAMES: Final = {
    "human": "user",
    "developer": "system",
    "model": "assistant",
    "ai": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "ipython": "tool",
    "observation": "tool",
}
_HEADERS: Final = tuple(
    re.compile(pattern)
    for pattern in (
        r"<\|im_start\|>[ ]?(?P<role>\w+)\n?",
        r"<\|start_header_id\|>(?P<role>\w+)<\|end_header_id\|>\n{0,2}",
        r"<start_of_turn>(?P<role>\w+)\n?",
        r"<\|start\|>(?P<role>\w+)",
        r"<\|turn>(?P<role>\w+)\n?",
        r"<\|(?P<role>system|user|assistant|tool|observation)\|>\n?",
        r"<\uff5c(?P<role>User|Assistant)\uff5c>",
        r"(?P<role>\[INST\]|\[/INST\]|\[SYSTEM_PROMPT\]|\[/SYSTEM_PROMPT\]|\[TOOL_RESULTS\]|"
        r"\[/TOOL_RESULTS\])\s?",
        r"(?m)^(?P<role>System|User|Human|Assistant|AI|Bot|Tool)(?=:(?:\s|$)):[ ]?",
        r"(?m)^###? (?P<role>System|User|Human|Assistant|Tool)(?=:?\s*$):?\s*",
    )
)
_INST: Final = {
    "[INST]": "user",
    "[/INST]": "assistant",
    "[SYSTEM_PROMPT]": "system",
    "[/SYSTEM_PROMPT]": "user",
    "[TOOL_RESULTS]": "tool",
    "[/TOOL_RESULTS]": "assistant",
}


def from_text(text: str) -> Conversation | None:
    """Return the conversation that the text of a prompt was made of, or None if it shows none.

    Knows the marks of common chat templates, and lines that begin with `User:` and the like. What
    stands before the first of them is a message of the system. Costs a few scans of the text.
    """
    for header in _HEADERS:
        found = list(header.finditer(text))
        if len(found) > _MOST_MESSAGES:
            return None
        if found and (len(found) > 1 or _role(found[0]) != "assistant"):
            return Conversation(tuple(_messages(text, found)), rendered=True)
    return None


def _role(match: re.Match[str]) -> str:
    role = match["role"]
    return _INST.get(role) or _ROLE_NAMES.get(role.lower(), role.lower())


def _messages(text: str, headers: list[re.Match[str]]) -> Iterable[Message]:
    number = 0
    lead = text[: headers[0].start()]
    if len(lead) > len("<|begin_of_text|>") or re.search(r"\w\s", lead):
        yield Message("message 0 (system)", "system", (_text_leaf("message 0 (system)", lead, 0),))
        number = 1
    ends = [*(match.start() for match in headers[1:]), len(text)]
    starts = [match.end() for match in headers]
    for match, (start, end) in zip(headers, zip(starts, ends, strict=True), strict=True):
        role, said = _role(match), text[start:end]
        if match["role"].startswith("[/") and not said.strip():
            continue  # what closes one message opens no other
        # What a client writes for a role is told to nobody who may not know what it sent.
        path = f"message {number} ({role if role in ROLES else '?'})"
        yield Message(path, role, (_text_leaf(path, said, start),))
        number += 1


def _text_leaf(path: str, text: str, start: int) -> Leaf:
    return Leaf(path, "text", text, start)
