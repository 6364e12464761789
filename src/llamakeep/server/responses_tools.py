"""The tools of `/v1/responses`: functions, custom tools, and namespaces of both.

A model knows functions only. So a custom tool, whose input is a text, becomes a function with one
parameter, and what is in a namespace has its name before its own. What a client calls them is found
again by `Toolbox.known`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from llamakeep.server import openai_tools
from llamakeep.server.errors import ApiError, unsupported
from llamakeep.server.openai_tools import tool_of
from llamakeep.tool_calls import Tool, ToolChoice

INPUT = "input"
"""The one parameter of what a custom tool becomes."""
HOSTED = (
    "apply_patch",
    "code_interpreter",
    "computer",
    "computer_use_preview",
    "file_search",
    "image_generation",
    "local_shell",
    "mcp",
    "programmatic_tool_calling",
    "shell",
    "tool_search",
    "web_search",
    "web_search_preview",
)
"""Tools of OpenAI's own, which no model here knows."""
_NO_TOOL = "is not here: it is a tool of OpenAI's own. Leave it out, or define a function like it"
_KINDS = "must be function, custom or namespace"
_TOOLS = "must be auto, none, required, or an object that names tools"
_INPUT_SCHEMA = {
    "type": "object",
    "properties": {INPUT: {"type": "string"}},
    "required": [INPUT],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Known:
    """What a client calls a tool.

    Attributes:
        kind: Whether calls have arguments or an input.
        name: Its name.
        namespace: That of its namespace; None outside of any.
    """

    kind: Literal["function", "custom"]
    name: str
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class Toolbox:
    """The tools of a request.

    Attributes:
        tools: As models know them.
        known: What a client calls each, by the names that models know.
        told: As the answer tells of them again.
    """

    tools: tuple[Tool, ...] = ()
    known: Mapping[str, Known] = field(default_factory=dict)
    told: tuple[Mapping[str, Any], ...] = ()


def full_name(name: str, namespace: str | None) -> str:
    """Return the name by which a model knows a tool."""
    return name if namespace is None else f"{namespace}.{name}"


def toolbox_of(given: Any) -> Toolbox:
    """Return the tools that a client sends.

    Raises:
        ApiError: For a tool that is not here or cannot be meant, with the field.
    """
    tools: dict[str, Tool] = {}
    known: dict[str, Known] = {}
    for where, each, namespace in _each(given):
        kind: Literal["function", "custom"] = "custom" if each["type"] == "custom" else "function"
        tool = _tool(where, each, namespace)
        if tool.name in tools:
            message = f"'{where}.name': there are two tools {tool.name!r}"
            raise ApiError(message, param=f"{where}.name")
        tools[tool.name] = tool
        known[tool.name] = Known(kind, each["name"], None if namespace is None else namespace[0])
    return Toolbox(tuple(tools.values()), known, tuple(_told(each) for each in given))


def _each(given: Any) -> Iterator[tuple[str, Mapping[str, Any], tuple[str, str] | None]]:
    """Yield the path of each tool, the tool, and name and description of its namespace.

    The description comes with the first tool of a namespace alone.
    """
    for index, each in enumerate(given):
        where = f"tools.{index}"
        if _kind(where, each) != "namespace":
            yield where, each, None
            continue
        name, about, inner = each.get("name"), each.get("description") or "", each.get("tools")
        if not isinstance(name, str) or not name:
            raise ApiError(f"'{where}.name' must be a text", param=f"{where}.name")
        if not isinstance(about, str):
            raise ApiError(f"'{where}.description' must be a text", param=f"{where}.description")
        if not isinstance(inner, list):
            raise ApiError(f"'{where}.tools' must be a list", param=f"{where}.tools")
        for number, one in enumerate(inner):
            at = f"{where}.tools.{number}"
            if not isinstance(one, Mapping):
                raise ApiError(f"'{at}' must be an object", param=at)
            if _kind(at, one) == "namespace":
                raise unsupported(f"{at}.type", "must be function or custom inside of a namespace")
            yield at, one, (name, "" if number else about)


def _kind(where: str, tool: Mapping[str, Any]) -> str:
    kind = tool.get("type")
    if not isinstance(kind, str):
        raise ApiError(f"'{where}.type' {_KINDS}", param=f"{where}.type")
    if kind in ("function", "custom", "namespace"):
        return kind
    if kind in HOSTED or kind.startswith(("web_search", "computer")):
        raise unsupported(f"{where}.type", f"{kind!r} {_NO_TOOL}")
    raise unsupported(f"{where}.type", f"{_KINDS}, not {kind[:100]!r}")


def _tool(where: str, given: Mapping[str, Any], namespace: tuple[str, str] | None) -> Tool:
    """Return a tool as models know it."""
    made = dict(given)
    if given["type"] == "custom":
        made |= {"parameters": _INPUT_SCHEMA, "strict": False}
        made["description"] = _about(where, given)
    if namespace is not None:
        plain = tool_of(where, made)  # says what is wrong before names are joined
        name, about = namespace
        made["name"] = full_name(plain.name, name)
        if about:
            made["description"] = f"{name}: {about}\n\n{plain.description}".rstrip()
    return tool_of(where, made)


def _about(where: str, custom: Mapping[str, Any]) -> str:
    """Return the description of a custom tool, with the grammar of its input if it has one."""
    about, form = custom.get("description") or "", custom.get("format") or {"type": "text"}
    if not isinstance(about, str):
        raise ApiError(f"'{where}.description' must be a text", param=f"{where}.description")
    if isinstance(form, Mapping) and form.get("type") == "text":
        return about
    syntax = form.get("syntax") if isinstance(form, Mapping) else None
    definition = form.get("definition") if isinstance(form, Mapping) else None
    if syntax not in ("lark", "regex") or not isinstance(definition, str):
        at = f"{where}.format"
        raise ApiError(f"'{at}' must be of type text, or a grammar with its syntax", param=at)
    return f"{about}\n\nThe input has to match this {syntax} grammar:\n{definition}".lstrip()


def _told(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tool with the fields that every answer's tools have."""
    if tool["type"] != "function":
        return dict(tool)
    return {"description": None, "parameters": None, **tool, "strict": bool(tool.get("strict"))}


def choice_of(given: Any, box: Toolbox) -> ToolChoice:
    """Return which tools are to be called.

    Raises:
        ApiError: For what cannot be meant.
    """
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind in HOSTED:
        raise unsupported("tool_choice", f"{kind!r} {_NO_TOOL}")
    kinds = ("function", "custom")
    return openai_tools.choice_of(given, box.tools, partial(_name_of, box), _TOOLS, kinds)


def _name_of(box: Toolbox, given: Mapping[str, Any]) -> str | None:
    """Return the name by which the model knows a tool; that of a namespace need not be said."""
    name, namespace = given.get("name"), given.get("namespace")
    if not isinstance(name, str) or not isinstance(namespace, str | None):
        return None
    full = full_name(name, namespace)
    if full in box.known or namespace is not None:
        return full
    inside = [known for known, tool in box.known.items() if tool.name == name]
    return inside[0] if len(inside) == 1 else full


def arguments_of(text: str) -> str:
    """Return the arguments of a custom tool's call, which has this input."""
    return json.dumps({INPUT: text}, ensure_ascii=False)
