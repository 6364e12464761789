"""Prompts as conversations: from request bodies, and from texts that a chat template wrote."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from llamakeep.errors import InvalidValue
from llamakeep.explain.ordering import MOST_DEPTH, dumps, too_deep

_UNWRITTEN: Final = frozenset(
    {"cache_control", "signature", "citations", "annotations", "refusal", "audio", "index"}
)
"""Fields of messages that no chat template writes."""
_MOST_MESSAGES: Final = 16384
_SETTINGS: Final = (
    "chat_template",
    "chat_template_kwargs",
    "reasoning_effort",
    "add_generation_prompt",
    "continue_final_message",
    "documents",
)


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


# -- request bodies --------------------------------------------------------------------------------


def is_chat(body: Mapping[str, Any]) -> bool:
    """Return whether a request body has messages."""
    return isinstance(body.get("messages"), list)


def from_body(body: Mapping[str, Any]) -> Conversation:
    """Return the conversation of a request to OpenAI's, llama-server's or Anthropic's chat API.

    Raises:
        InvalidValue: For JSON that is nested too deeply, and for a body without messages.
    """
    if too_deep(dict(body), most=2 * MOST_DEPTH):
        raise InvalidValue(f"a request body is nested more than {2 * MOST_DEPTH} times")
    if not is_chat(body):
        raise InvalidValue("a request body has no messages")
    messages = [_message(f"messages[{index}]", each) for index, each in enumerate(body["messages"])]
    if body.get("system"):
        leaves = tuple(_content("system", body["system"]))
        messages.insert(0, Message("system", "system", leaves))
    tools_path = "functions" if body.get("functions") and not body.get("tools") else "tools"
    tools = body.get(tools_path)
    return Conversation(
        tuple(messages),
        tuple(_written(each) for each in tools) if isinstance(tools, list) else (),
        tools_path,
        {name: body[name] for name in _SETTINGS if body.get(name) is not None},
        salt_of(body),
    )


def salt_of(body: Mapping[str, Any]) -> str | None:
    """Return the salt of a request, if it has one."""
    salt = body.get("cache_salt")
    return salt if isinstance(salt, str) and salt else None


def _message(path: str, message: Any) -> Message:
    if not isinstance(message, Mapping):
        return Message(path, "?", (Leaf(path, "text", message),))
    role = message.get("role")
    role = role if isinstance(role, str) else "?"
    if role == "developer":  # as most templates have it
        role = "system"
    return Message(path, role, tuple(_leaves(path, _written(message))))


def _written(value: Any) -> Any:
    """Return an object without what no template writes, and without what is null."""
    if not isinstance(value, Mapping):
        return value
    return {k: v for k, v in value.items() if v is not None and k not in _UNWRITTEN}


def _leaves(path: str, message: Mapping[str, Any]) -> Iterator[Leaf]:
    for name in ("reasoning_content", "reasoning", "thinking"):
        if isinstance(message.get(name), str) and message[name]:
            yield Leaf(f"{path}.{name}", "reasoning", message[name])
    yield from _content(f"{path}.content", message.get("content"))
    calls = message.get("tool_calls")
    for index, call in enumerate(calls if isinstance(calls, list) else ()):
        yield from _call(f"{path}.tool_calls[{index}]", call)
    known = {"role", "content", "tool_calls", "reasoning_content", "reasoning", "thinking"}
    for name in sorted(set(message) - known, key=str):
        what = "id" if name in ("tool_call_id", "id") else str(name)
        yield Leaf(f"{path}.{name}", what, message[name])


def _content(path: str, content: Any) -> Iterator[Leaf]:
    if isinstance(content, str) or not isinstance(content, list):
        if content not in (None, ""):
            yield Leaf(path, "text", content)
        return
    for index, block in enumerate(content):
        yield from _block(f"{path}[{index}]", block)


def _block(path: str, block: Any) -> Iterator[Leaf]:
    if not isinstance(block, Mapping):
        yield Leaf(path, "text", block)
        return
    block = _written(block)
    kind = block.get("type")
    if kind in ("text", "input_text", "output_text") and isinstance(block.get("text"), str):
        if block["text"]:
            yield Leaf(f"{path}.text", "text", block["text"])
    elif kind in ("thinking", "redacted_thinking", "reasoning"):
        value = block.get("thinking", block.get("text", block.get("data", "")))
        yield Leaf(f"{path}.{kind}", "reasoning", value)
    elif kind == "tool_use":
        yield Leaf(f"{path}.id", "id", block.get("id"))
        yield Leaf(f"{path}.name", "name", block.get("name"))
        yield Leaf(f"{path}.input", "arguments", block.get("input"))
    elif kind == "tool_result":
        yield Leaf(f"{path}.tool_use_id", "id", block.get("tool_use_id"))
        yield from _content(f"{path}.content", block.get("content"))
    else:
        yield Leaf(path, str(kind), block)


def _call(path: str, call: Any) -> Iterator[Leaf]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        yield Leaf(path, "call", call)
        return
    if call.get("id") is not None:
        yield Leaf(f"{path}.id", "id", call["id"])
    yield Leaf(f"{path}.function.name", "name", function.get("name"))
    yield Leaf(f"{path}.function.arguments", "arguments", function.get("arguments"))


# -- texts -----------------------------------------------------------------------------------------

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
        path = f"message {number} ({role})"
        yield Message(path, role, (_text_leaf(path, said, start),))
        number += 1


def _text_leaf(path: str, text: str, start: int) -> Leaf:
    return Leaf(path, "text", text, start)
