"""Whether a conversation can be meant: roles, contents, calls, and results of these calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from llamakeep.server.errors import ApiError


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise for the first message that cannot be meant.

    Raises:
        ApiError: With the field.
    """
    calls: dict[str, str] = {}  # of the last answer: ids, and the tools that were called
    for index, message in enumerate(messages):
        where = f"messages.{index}"
        _check_content(where, message)
        if message["role"] == "tool":
            _check_result(where, message, calls)
        elif message["role"] == "assistant":
            calls = _calls(where, message.get("tool_calls"))
        else:
            calls = {}


def _wrong(where: str, what: str) -> ApiError:
    return ApiError(f"'{where}' {what}", param=where)


def _check_content(where: str, message: Mapping[str, Any]) -> None:
    if not isinstance(message.get("role"), str):
        raise _wrong(f"{where}.role", "must be a text")
    content = message.get("content")
    if "content" not in message and not message.get("tool_calls"):
        raise _wrong(f"{where}.content", "is required")
    if content is not None and not isinstance(content, str | list):
        raise _wrong(f"{where}.content", "must be a text or a list of parts")
    if not isinstance(message.get("reasoning_content"), str | None):
        raise _wrong(f"{where}.reasoning_content", "must be a text")


def _calls(where: str, calls: object) -> dict[str, str]:
    """Return the tools that an answer calls, by the ids of the calls."""
    where = f"{where}.tool_calls"
    if not isinstance(calls, list | None):
        raise _wrong(where, "must be a list")
    found: dict[str, str] = {}
    for index, call in enumerate(calls or ()):
        at = f"{where}.{index}"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping):
            raise _wrong(at, "must be an object with a function")
        name, call_id = function.get("name"), call.get("id")
        if not isinstance(name, str) or not name:
            raise _wrong(f"{at}.function.name", "must be a text")
        if not isinstance(function.get("arguments", ""), str | Mapping):
            raise _wrong(f"{at}.function.arguments", "must be JSON, as a text")
        if not isinstance(call_id, str) or not call_id:
            raise _wrong(f"{at}.id", "must be a text")
        if call_id in found:
            raise _wrong(f"{at}.id", f"is there twice: {call_id[:100]!r}")
        found[call_id] = name
    return found


def _check_result(where: str, message: Mapping[str, Any], calls: Mapping[str, str]) -> None:
    call_id, name = message.get("tool_call_id"), message.get("name")
    at = f"{where}.tool_call_id"
    if not isinstance(call_id, str):
        raise _wrong(at, "is required")
    if call_id not in calls:
        raise _wrong(at, f"is no call of the answer before: {call_id[:100]!r}")
    if name is not None and name != calls[call_id]:
        at = f"{where}.name"
        raise _wrong(at, f"is not the tool that was called: {str(name)[:100]!r}")
