"""Tools for models whose template knows none: told in plain words, and answered in JSON.

Calls and results of earlier turns become plain messages, as the model is asked to write them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llamakeep.tool_calls.values import Tool, json_object

ABOUT = "You can call these tools, each told as a JSON object with the schema of its arguments:"
"""What stands before the tools."""
ENDS = "To call tools, answer with nothing but a JSON object of this form:"
"""What stands behind them."""
_CALL = (
    f"{ENDS}\n"
    '{"tool_calls": [{"name": "the name of a tool", "arguments": {"argument": "value"}}]}'
)
_SAY = 'To say something instead, answer with {"response": "what you say"}'


def described(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Tool],
    *,
    has_system: bool,
) -> list[dict[str, Any]]:
    """Return messages that tell of `tools`; as many or one more.

    The text is the same whether or not a call must come, so that a prompt stays what it was.

    Args:
        messages: As OpenAI has them, without calls.
        tools: At least one.
        has_system: The template takes system messages; else the first user message tells.
    """
    lines = (json.dumps(tool.to_openai()["function"], ensure_ascii=False) for tool in tools)
    text = "\n".join((ABOUT, *lines, "", _CALL, _SAY))
    made = [dict(message) for message in messages]
    roles = ("system", "developer") if has_system else ("user",)
    first = next((one for one in made if has_system or one["role"] == "user"), made[0])
    if first["role"] in roles:
        first["content"] = _joined(first.get("content"), text, after=has_system)
        return made
    return [{"role": roles[0], "content": text}, *made]


def without_calls(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with calls and results as plain text.

    Results in a row are one message of the user, with what the user says right after them.
    """
    made: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    takes_more = False
    for message in messages:
        one = dict(message)
        if one["role"] == "tool":
            result = {
                "name": names.get(str(one.get("tool_call_id")), one.get("name") or ""),
                "result": _plain(one.get("content")),
            }
            text = json.dumps({"tool_result": result}, ensure_ascii=False)
            if takes_more:
                made[-1]["content"] += "\n" + text
            else:
                made.append({"role": "user", "content": text})
            takes_more = True
            continue
        if takes_more and one["role"] == "user":
            made[-1]["content"] = _joined(one.get("content"), made[-1]["content"], after=False)
            takes_more = False
            continue
        takes_more = False
        if calls := one.pop("tool_calls", None):
            names |= {str(call.get("id")): call["function"]["name"] for call in calls}
            text = json.dumps({"tool_calls": [_call(each) for each in calls]}, ensure_ascii=False)
            one["content"] = _joined(one.get("content"), text, after=True)
        made.append(one)
    return made


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        found = json_object(arguments)
        arguments = arguments if found is None else found
    return {"name": function["name"], "arguments": arguments}


def _joined(content: Any, text: str, *, after: bool) -> Any:
    """Return content, a text or parts, with a text before or after it."""
    if isinstance(content, (list, tuple)):
        part = {"type": "text", "text": text}
        return [*content, part] if after else [part, *content]
    if not content:
        return text
    return f"{content}\n\n{text}" if after else f"{text}\n\n{content}"


def _plain(content: Any) -> str:
    if isinstance(content, (list, tuple)):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""
