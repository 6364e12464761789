"""From values between tags to the JSON object they mean, as they come."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from llamakeep.tool_calls.values import Tool

_WORDS = {"True": "true", "False": "false", "None": "null"}
_CLOSE = "</parameter>"
_MOST_KEY_CHARS = 128
_SAID = {"title", "description", "default", "examples", "deprecated", "$comment"}
_OF_TAGS = (
    _SAID
    | {"$schema", "$defs", "definitions"}
    | {*("type", "properties", "required", "additionalProperties")}
)
_OF_TEXTS = _SAID | {"type", "enum"}
"""What tags can hold of a schema, and of one of a text."""


class Values:
    """Writes the arguments of one call.

    What the schema calls a string is handed on as it comes. All else is held up to its end: it is
    JSON, or a string if it is none.

    Args:
        tool: Whose arguments they are.
        emit: Called with pieces of JSON.
    """

    def __init__(self, tool: Tool, emit: Callable[[str], None]) -> None:
        properties = tool.parameters.get("properties")
        self._schemas: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        self._emit = emit
        self._keys: set[str] = set()
        self._is_text = False
        self._is_first = True
        self._held: list[str] = []

    def begin(self, key: str) -> None:
        """Begin a value."""
        self._emit("{" if not self._keys else ", ")
        self._keys.add(key)
        schema = self._schemas.get(key)
        self._is_text = isinstance(schema, Mapping) and is_text(schema)
        self._emit(json.dumps(key, ensure_ascii=False) + (': "' if self._is_text else ": "))
        self._is_first, self._held = True, []

    def push(self, text: str) -> None:
        """Add to the value. The line end after its tag, and that before the next, are layout."""
        if not self._is_text:
            self._held.append(text)
            return
        if self._is_first:
            self._is_first = False
            text = text.removeprefix("\n")
        bare = text.removesuffix("\n")
        if bare:
            self._emit(_escaped("".join(self._held) + bare))
            self._held = []
        if len(bare) < len(text):
            if self._held:
                self._emit(_escaped(self._held.pop()))
            self._held.append("\n")

    def end(self) -> None:
        """End the value."""
        if self._is_text:
            self._emit('"')
            return
        text = "".join(self._held)
        self._emit(_json_of(text.removeprefix("\n").removesuffix("\n")))

    def close(self) -> None:
        """End the object."""
        self._emit("}" if self._keys else "{}")


def fits_tags(tool: Tool) -> bool:
    """Return whether a tool's arguments are told in full by a tag and a value for each.

    Names and values that tags would cut do not fit; and of a strict tool nothing that holds more
    than one argument at a time, or holds a text to more than a list.
    """
    parameters = tool.parameters
    properties = parameters.get("properties") or {}
    if tool.strict:
        required = parameters.get("required") or []
        if not parameters.keys() <= _OF_TAGS or not set(required) <= properties.keys():
            return False
    for key, schema in properties.items():
        if not 0 < len(key) <= _MOST_KEY_CHARS or any(letter in key for letter in "<>\r\n"):
            return False
        if not isinstance(schema, Mapping) or not is_text(schema):
            continue
        if tool.strict and not schema.keys() <= _OF_TEXTS:
            return False
        choices = schema.get("enum")
        if isinstance(choices, list) and any(_CLOSE in str(each) for each in choices):
            return False
    return True


def is_text(schema: Mapping[str, Any]) -> bool:
    """Return whether a schema is of strings only, which stand between tags without quotes."""
    if "type" in schema:
        return bool(schema["type"] == "string")
    choices = schema.get("enum")
    return isinstance(choices, list) and all(isinstance(each, str) for each in choices)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _json_of(text: str) -> str:
    bare = text.strip()
    try:
        json.loads(bare, parse_constant=_no_number)
    except (ValueError, RecursionError):
        return _WORDS.get(bare) or json.dumps(text, ensure_ascii=False)
    return bare


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
