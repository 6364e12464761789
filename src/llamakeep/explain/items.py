"""The items of OpenAI's Responses as messages: what makes one answer is one message."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from llamakeep.explain.conversation import Leaf, Message
from llamakeep.explain.leaves import content_leaves, written

_CALLS: Final = {
    "function_call": "arguments",
    "custom_tool_call": "input",
}
_RESULTS: Final = ("function_call_output", "custom_tool_call_output")
_ORDER: Final = ("reasoning", "text")
"""In which templates write an answer, whatever the order of its items; calls come last."""


def messages_of(body: Mapping[str, Any]) -> Iterator[Message]:
    """Yield the messages of a request: its instructions, then what its items are."""
    if body.get("instructions"):
        leaves = tuple(content_leaves("instructions", body["instructions"]))
        yield Message("instructions", "system", leaves)
    given = body.get("input")
    if isinstance(given, str):
        yield Message("input", "user", tuple(content_leaves("input", given)))
        return
    answer: list[Leaf] = []
    start = ""
    for index, item in enumerate(given if isinstance(given, list) else ()):
        path = f"input[{index}]"
        said = _of_assistant(path, item)
        if answer and (said is None or _begins_anew(answer, said)):
            yield _answer(start, answer)
            answer = []
        if said is None:
            yield _message(path, item)
            continue
        if not answer:
            start = path
        answer += said
    if answer:
        yield _answer(start, answer)


def _kind(item: Any) -> str:
    if not isinstance(item, Mapping):
        return "?"
    kind = item.get("type") or ("message" if "role" in item else "?")
    return kind if isinstance(kind, str) else "?"


def _of_assistant(path: str, item: Any) -> list[Leaf] | None:
    """Return what an item says if it is the assistant's; None if it is not."""
    kind = _kind(item)
    if kind == "message" and item.get("role") == "assistant":
        return list(content_leaves(f"{path}.content", item.get("content")))
    if kind == "reasoning":
        return list(_thoughts(path, item))
    if kind in _CALLS:
        name = _CALLS[kind]
        return [
            Leaf(f"{path}.call_id", "id", item.get("call_id")),
            Leaf(f"{path}.name", "name", item.get("name")),
            Leaf(f"{path}.{name}", "arguments", item.get(name)),
        ]
    return None


def _thoughts(path: str, item: Mapping[str, Any]) -> Iterator[Leaf]:
    """Yield what was thought: as it was, or sealed, or else summed up."""
    for name in ("content", "encrypted_content", "summary"):
        given = item.get(name)
        if not given:
            continue
        parts = given if isinstance(given, list) else [given]
        for index, part in enumerate(parts):
            at = f"{path}.{name}[{index}]" if given is parts else f"{path}.{name}"
            yield Leaf(at, "reasoning", part.get("text") if isinstance(part, Mapping) else part)
        return


def _begins_anew(answer: list[Leaf], said: list[Leaf]) -> bool:
    """Whether something said belongs to another answer: one speaks once, and then calls."""
    kinds = {leaf.what for leaf in answer}
    return "text" in kinds and "name" not in kinds and any(leaf.what in _ORDER for leaf in said)


def _answer(path: str, leaves: list[Leaf]) -> Message:
    def rank(leaf: Leaf) -> int:
        return _ORDER.index(leaf.what) if leaf.what in _ORDER else len(_ORDER)

    return Message(path, "assistant", tuple(sorted(leaves, key=rank)))


def _message(path: str, item: Any) -> Message:
    kind = _kind(item)
    if kind in _RESULTS:
        leaves = (
            Leaf(f"{path}.call_id", "id", item.get("call_id")),
            *content_leaves(f"{path}.output", item.get("output")),
        )
        return Message(path, "tool", leaves)
    if kind != "message":
        return Message(path, "?", (Leaf(path, kind, written(item)),))
    role = item.get("role")
    role = role if isinstance(role, str) else "?"
    leaves = tuple(content_leaves(f"{path}.content", item.get("content")))
    return Message(path, "system" if role == "developer" else role, leaves)
