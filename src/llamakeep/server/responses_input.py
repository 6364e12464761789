"""From the items of `/v1/responses` to a conversation.

What the model said, thought and called in one answer comes as items of their own. Templates want
one message of it: so items of the assistant in a row are one, up to what begins another answer.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from llamakeep.server.errors import ApiError, unsupported
from llamakeep.server.responses_schema import Asked
from llamakeep.server.responses_tools import arguments_of, full_name
from llamakeep.server.schema import MOST_MESSAGES
from llamakeep.tool_calls.values import json_object

_SEALED = "llamakeep."
_ROLES = ("user", "assistant", "system", "developer")
_LEADING = ("system", "developer")
_TEXTS = ("input_text", "output_text", "text")
_REFERENCE = (
    "is not supported: nothing is stored, so send the item itself. What is kept makes that cheap"
)


def sealed(thoughts: str) -> str:
    """Return thoughts as clients get them in `encrypted_content`. They can be read: it is base64.

    Some clients send back nothing else of what the model thought.
    """
    return _SEALED + base64.b64encode(thoughts.encode()).decode()


def opened(content: object) -> str:
    """Return the thoughts that `sealed` made a text of; "" for any other text."""
    if not isinstance(content, str) or not content.startswith(_SEALED):
        return ""
    try:
        return base64.b64decode(content[len(_SEALED) :], validate=True).decode()
    except (binascii.Error, ValueError):
        return ""


def messages_of(asked: Asked) -> list[dict[str, Any]]:
    """Return the messages that a client's input and instructions are.

    Instructions, and system messages before all others, are one system message: few templates
    take several.

    Raises:
        ApiError: For what cannot be meant, with the path to it.
    """
    made = _Messages()
    if asked.instructions:
        made.say("system", asked.instructions)
    if isinstance(asked.input, str):
        made.say("user", asked.input)
    elif isinstance(asked.input, list):
        if len(asked.input) > MOST_MESSAGES:
            raise ApiError(f"'input' has more than {MOST_MESSAGES} items", param="input")
        for index, item in enumerate(asked.input):
            _add(made, f"input.{index}", item)
    elif asked.input is not None:
        raise ApiError("'input' must be a text or a list of items", param="input")
    messages = _led(made.messages)
    if not messages:
        raise ApiError("'input' is required", param="input")
    return messages


class _Messages:
    """Collects messages.

    Attributes:
        messages: Those so far.
        calls: Ids of the calls in the last answer.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.calls: set[str] = set()
        self._answer: dict[str, Any] | None = None

    def say(self, role: str, content: Any) -> None:
        """Add a message that is not the assistant's."""
        self._answer, self.calls = None, set()
        self.messages.append({"role": role, "content": content})

    def result(self, call_id: str, content: Any) -> None:
        """Add what a call led to."""
        self._answer = None
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def answer(self, text: str) -> None:
        """Add what the assistant said."""
        made = self._open(new="content" in self._current and not self.calls)
        made["content"] = made.get("content", "") + text

    def think(self, text: str) -> None:
        """Add what it thought."""
        made = self._open(new="content" in self._current and not self.calls)
        before = made.get("reasoning_content")
        made["reasoning_content"] = f"{before}\n{text}" if before else text

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """Add a call."""
        made = self._open(new=False)
        self.calls.add(call_id)
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        made.setdefault("tool_calls", []).append(call)

    @property
    def _current(self) -> dict[str, Any]:
        return self._answer or {}

    def _open(self, *, new: bool) -> dict[str, Any]:
        if self._answer is None or new:
            self._answer, self.calls = {"role": "assistant"}, set()
            self.messages.append(self._answer)
        return self._answer


def _led(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages that begin with one system message at most, each with its content."""
    for message in messages:
        message.setdefault("content", None if "tool_calls" in message else "")
    n_leading = next(
        (at for at, one in enumerate(messages) if one["role"] not in _LEADING), len(messages)
    )
    if n_leading < 2:
        return messages
    texts = (_as_text(message["content"]) for message in messages[:n_leading])
    first = {"role": messages[0]["role"], "content": "\n\n".join(texts)}
    return [first, *messages[n_leading:]]


def _add(made: _Messages, where: str, item: Any) -> None:
    if not isinstance(item, Mapping):
        raise _wrong(where, "must be an object")
    kind = item.get("type") or ("message" if "role" in item else None)
    if kind == "message":
        _message(made, where, item)
    elif kind == "reasoning":
        if thoughts := _thoughts(where, item):
            made.think(thoughts)
    elif kind in ("function_call", "custom_tool_call"):
        _call(made, where, item)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        call_id = _text(where, item, "call_id")
        if call_id not in made.calls:
            raise _wrong(f"{where}.call_id", f"is no call of the answer before: {call_id[:100]!r}")
        made.result(call_id, _content(f"{where}.output", item.get("output")))
    elif kind == "item_reference" or (kind is None and "id" in item):
        raise unsupported(where, _REFERENCE)
    else:
        raise unsupported(f"{where}.type", f"is not supported: {str(kind)[:100]!r}")


def _message(made: _Messages, where: str, item: Mapping[str, Any]) -> None:
    role = item.get("role")
    if role not in _ROLES:
        raise _wrong(f"{where}.role", f"must be one of {', '.join(_ROLES)}")
    content = _content(f"{where}.content", item.get("content"))
    if role == "assistant":
        made.answer(_as_text(content, ""))
    else:
        made.say(role, content)


def _call(made: _Messages, where: str, item: Mapping[str, Any]) -> None:
    call_id, name = _text(where, item, "call_id"), _text(where, item, "name")
    namespace = item.get("namespace")
    if not isinstance(namespace, str | None):
        raise _wrong(f"{where}.namespace", "must be a text")
    if call_id in made.calls:
        raise _wrong(f"{where}.call_id", f"is there twice: {call_id[:100]!r}")
    if item["type"] == "custom_tool_call":
        arguments = arguments_of(_text(where, item, "input", may_be_empty=True))
    else:
        arguments = _text(where, item, "arguments", may_be_empty=True) or "{}"
        if json_object(arguments) is None:
            raise _wrong(f"{where}.arguments", "must be a JSON object, as a text")
    made.call(call_id, full_name(name, namespace or None), arguments)


def _thoughts(where: str, item: Mapping[str, Any]) -> str:
    """Return what a reasoning item says: as it was thought, or else summed up."""
    for name in ("content", "encrypted_content", "summary"):
        given = item.get(name)
        text = opened(given)
        if name != "encrypted_content" and given is not None:
            text = _as_text(_content(f"{where}.{name}", given, "reasoning_text", "summary_text"))
        if text:
            return text
    return ""


def _content(where: str, given: Any, *kinds: str) -> str | list[dict[str, Any]]:
    """Return a content as templates have it: a text, or several as parts."""
    if isinstance(given, str):
        return given
    if not isinstance(given, list):
        raise _wrong(where, "must be a text or a list of parts")
    texts: list[str] = []
    for index, part in enumerate(given):
        at = f"{where}.{index}"
        if not isinstance(part, Mapping):
            raise _wrong(at, "must be an object")
        kind = part.get("type")
        if kind == "refusal":
            texts.append(_text(at, part, "refusal", may_be_empty=True))
        elif kind in (kinds or _TEXTS):
            texts.append(_text(at, part, "text", may_be_empty=True))
        else:
            raise unsupported(f"{at}.type", f"is not supported: {str(kind)[:100]!r}; send text")
    if len(texts) == 1:
        return texts[0]
    return [{"type": "text", "text": text} for text in texts] if texts else ""


def _as_text(content: str | list[dict[str, Any]], between: str = "\n") -> str:
    return content if isinstance(content, str) else between.join(part["text"] for part in content)


def _text(where: str, item: Mapping[str, Any], name: str, *, may_be_empty: bool = False) -> str:
    text = item.get(name)
    if not isinstance(text, str) or not (text or may_be_empty):
        raise _wrong(f"{where}.{name}", "must be a text" if text != "" else "must not be empty")
    return text


def _wrong(where: str, what: str) -> ApiError:
    return ApiError(f"'{where}' {what}", param=where)
