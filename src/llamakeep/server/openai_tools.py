"""From OpenAI's fields of a conversation to a `Chat`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llamakeep.errors import InvalidValue
from llamakeep.server.errors import ApiError, unsupported
from llamakeep.server.schema import TemplateFields
from llamakeep.server.talk import Chat
from llamakeep.tool_calls import AUTO, NONE, REQUIRED, Tool, ToolChoice

_CHOICES = {"auto": AUTO, "none": NONE, "required": REQUIRED}
_WHAT = "must be auto, none, required, or an object that names a function"


def chat_of(body: TemplateFields, *, said: Any = None, said_where: str = "") -> Chat:
    """Return the conversation that a client sends.

    Args:
        body: What it sends.
        said: A schema of what is said where nothing is called; None for anything.
        said_where: The path to it.

    Raises:
        ApiError: For tools and a choice of them that cannot be meant, with the field.
    """
    extra = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        extra.setdefault("reasoning_effort", body.reasoning_effort)
    tools = tools_of(body.tools or ())
    return Chat(
        body.messages,
        tools,
        choice_of(body.tool_choice, tools),
        parallel=body.parallel_tool_calls is not False,
        said=said,
        said_where=said_where,
        thoughts_apart=None if body.reasoning_format is None else body.reasoning_format != "none",
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        extra=extra,
    )


def tools_of(given: Any) -> tuple[Tool, ...]:
    """Return the tools that a client sends."""
    tools: list[Tool] = []
    names: set[str] = set()
    for index, each in enumerate(given):
        where = f"tools.{index}"
        kind = each.get("type", "function")
        if kind != "function":
            raise unsupported(f"{where}.type", f"must be function, not {str(kind)[:100]!r}")
        function = each.get("function")
        if not isinstance(function, Mapping):
            raise ApiError(f"'{where}.function' must be an object", param=f"{where}.function")
        tool = tool_of(f"{where}.function", function)
        if tool.name in names:
            name = f"{where}.function.name"
            raise ApiError(f"'{name}': there are two tools {tool.name!r}", param=name)
        names.add(tool.name)
        tools.append(tool)
    return tuple(tools)


def tool_of(where: str, function: Mapping[str, Any]) -> Tool:
    """Return the tool that a function is.

    Args:
        where: The path to it, for errors.
        function: With `name`, `description`, `parameters` and `strict`; the rest is not looked at.

    Raises:
        ApiError: For a function that cannot be meant, with the field.
    """
    kinds: dict[str, tuple[type, str]] = {
        "name": (str, "a text"),
        "description": (str, "a text"),
        "parameters": (dict, "an object: a JSON schema"),
        "strict": (bool, "true or false"),
    }
    fields: dict[str, Any] = {}
    for name, (kind, what) in kinds.items():
        value = function.get(name)
        if value is None and name != "name":
            continue
        if not isinstance(value, kind):
            raise ApiError(f"'{where}.{name}' must be {what}", param=f"{where}.{name}")
        fields[name] = value
    try:
        return Tool(**fields)
    except InvalidValue as error:
        name = "parameters" if "the parameters of" in str(error) else "name"
        raise ApiError(f"'{where}.{name}': {error}", param=f"{where}.{name}") from None


def choice_of(given: Any, tools: tuple[Tool, ...]) -> ToolChoice:
    """Return which tools are to be called."""
    choice = _choice(given)
    try:
        choice.of(tools)
    except InvalidValue as error:
        raise ApiError(f"'tool_choice': {error}", param="tool_choice") from None
    return choice


def _choice(given: Any) -> ToolChoice:
    if given is None:
        return AUTO
    if isinstance(given, str) and given in _CHOICES:
        return _CHOICES[given]
    if isinstance(given, Mapping):
        if given.get("type") == "allowed_tools":
            allowed = given.get("allowed_tools", given)
            mode = allowed.get("mode") if isinstance(allowed, Mapping) else None
            if mode in ("auto", "required") and isinstance(allowed.get("tools"), list):
                return ToolChoice(mode, tuple(_named(each) for each in allowed["tools"]))
        elif given.get("type", "function") == "function":
            return ToolChoice("required", (_named(given),))
    raise ApiError(f"'tool_choice' {_WHAT}", param="tool_choice")


def _named(given: Any) -> str:
    function = given.get("function") if isinstance(given, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise ApiError(f"'tool_choice' {_WHAT}", param="tool_choice")
    return name
