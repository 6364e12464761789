"""What a chat template makes of tools, calls and their results: found out by rendering some."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_ID = "a1b2c3d4e"  # Mistral's templates want nine letters and digits
_LONG_ID = "call_a1b2c3d4e5f6"
_NAME, _KEY, _VALUE, _RESULT = "f5b7d2e", "k8f3a1c", "v9c94e6", "r2d7e5b"
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True, slots=True)
class ToolTraits:
    """What a template understands.

    Attributes:
        tools: It tells the model of tools.
        calls: It writes calls of earlier turns, and their results.
        objects: The arguments of calls are objects; else they are JSON.
        several: An answer may have several calls.
        short_ids: Ids of calls have nine letters and digits.
        system: It takes system messages.
    """

    tools: bool = False
    calls: bool = False
    objects: bool = False
    several: bool = True
    short_ids: bool = False
    system: bool = True


def learn_tools(
    probe: Callable[[list[dict[str, Any]], list[dict[str, Any]] | None], str],
    content: Callable[[str], Any],
) -> ToolTraits:
    """Return what a template understands.

    Args:
        probe: Renders messages with tools; "" where that fails.
        content: Returns a text as the template has content.
    """

    def said(role: str, text: str, **more: Any) -> dict[str, Any]:
        return {"role": role, "content": content(text), **more}

    def chat(arguments: Any, ids: Sequence[str]) -> list[dict[str, Any]]:
        function = {"name": _NAME, "arguments": arguments}
        calls = [{"id": each, "type": "function", "function": function} for each in ids]
        results = [said("tool", _RESULT, tool_call_id=each, name=_NAME) for each in ids]
        rest = [said("assistant", "c"), said("user", "d")]
        return [said("user", "a"), said("assistant", "", tool_calls=calls), *results, *rest]

    def written(text: str) -> bool:
        return all(word in text for word in (_NAME, _KEY, _VALUE, _RESULT))

    function = {"name": _NAME, "description": "", "parameters": {"type": "object"}}
    tool = [{"type": "function", "function": function}]
    asked = [said("user", "a")]
    system = "s4e60c9" in probe([said("system", "s4e60c9"), *asked], None)
    tools = _NAME in probe(asked, tool)
    given: Any = {_KEY: _VALUE}
    as_object = probe(chat(given, [_ID]), tool)
    objects = _KEY in as_object and f"'{_KEY}'" not in as_object
    if not objects:
        given = f'{{"{_KEY}": "{_VALUE}"}}'
    calls = written(probe(chat(given, [_ID]), None))
    several = not calls or written(probe(chat(given, [_ID, _ID[::-1]]), None))
    short = calls and not written(probe(chat(given, [_LONG_ID]), None))
    return ToolTraits(tools, calls, objects, several, short, system)


def one_by_one(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose calls stand alone, each before its result.

    The text of a message with several calls comes with the first.
    """
    made: list[dict[str, Any]] = []
    results: dict[str, int] = {}  # where the result of each call of the last answer goes
    for message in messages:
        calls = message.get("tool_calls")
        if message["role"] == "tool" and str(message.get("tool_call_id")) in results:
            at = results.pop(str(message.get("tool_call_id")))
            made.insert(at + 1, message)
            results = {key: to + (to > at) for key, to in results.items()}
            continue
        if not calls or len(calls) == 1:
            made.append(message)
            if message["role"] != "tool":
                results = {}
            continue
        results = {}
        for index, call in enumerate(calls):
            results[str(call.get("id"))] = len(made)
            text = {} if not index else {"content": _emptied(message["content"])}
            made.append({**message, **text, "tool_calls": [call]})
    return made


def _emptied(content: Any) -> Any:
    return "" if isinstance(content, str) else []


def short_id(call_id: str) -> str:
    """Return an id of nine letters and digits: the same for the same, and itself if it is one."""
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    number = int.from_bytes(hashlib.sha256(call_id.encode("utf-8", "replace")).digest()[:8], "big")
    letters = ""
    for _ in range(9):
        number, rest = divmod(number, len(_DIGITS))
        letters += _DIGITS[rest]
    return letters


def with_short_ids(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message whose ids of calls are short."""
    made = dict(message)
    if isinstance(made.get("tool_call_id"), str):
        made["tool_call_id"] = short_id(made["tool_call_id"])
    if calls := made.get("tool_calls"):
        made["tool_calls"] = [{**each, "id": short_id(str(each.get("id")))} for each in calls]
    return made
