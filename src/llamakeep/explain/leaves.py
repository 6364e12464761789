"""What the messages of request bodies say, one thing after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from llamakeep.explain.conversation import Leaf

_UNWRITTEN: Final = frozenset(
    {"cache_control", "signature", "citations", "annotations", "refusal", "audio", "index"}
)
"""Fields of messages that no chat template writes."""


def written(value: Any) -> Any:
    """Return an object without what no template writes, and without what is null."""
    if not isinstance(value, Mapping):
        return value
    return {k: v for k, v in value.items() if v is not None and k not in _UNWRITTEN}


def message_leaves(path: str, message: Mapping[str, Any]) -> Iterator[Leaf]:
    """Yield what a message of a chat says, in the order in which templates write it."""
    for name in ("reasoning_content", "reasoning", "thinking"):
        if isinstance(message.get(name), str) and message[name]:
            yield Leaf(f"{path}.{name}", "reasoning", message[name])
    yield from content_leaves(f"{path}.content", message.get("content"))
    calls = message.get("tool_calls")
    for index, call in enumerate(calls if isinstance(calls, list) else ()):
        yield from _call(f"{path}.tool_calls[{index}]", call)
    known = {"role", "content", "tool_calls", "reasoning_content", "reasoning", "thinking"}
    for name in sorted(set(message) - known, key=str):
        what = "id" if name in ("tool_call_id", "id") else str(name)
        yield Leaf(f"{path}.{name}", what, message[name])


def content_leaves(path: str, content: Any) -> Iterator[Leaf]:
    """Yield what a content says: a text, or several blocks."""
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
    block = written(block)
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
        yield from content_leaves(f"{path}.content", block.get("content"))
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
