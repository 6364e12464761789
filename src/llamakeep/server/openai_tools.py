"""From OpenAI's fields of a conversation to a `Chat`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llamakeep.errors import InvalidValue, ToolError
from llamakeep.server.errors import ApiError, unsupported
from llamakeep.server.schema import TemplateFields
from llamakeep.server.talk import Chat
from llamakeep.tool_calls import AUTO, NONE, REQUIRED, Said, Tool, ToolChoice

_CHOICES = {"auto": AUTO, "none": NONE, "required": REQUIRED}
_FUNCTIONS = "must be auto, none, required, or an object that names a function"


def chat_of(body: TemplateFields, *, said: Said | None = None) -> Chat:
    """Return the conversation that a client sends.

    Args:
        body: What it sends.
        said: What is said where nothing is called; None for anything.

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
        choice_of(body.tool_choice, tools, _name_of, _FUNCTIONS),
        parallel=body.parallel_tool_calls is not False,
        said=said,
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
        return Tool(**fields, where=f"{where}.parameters")
    except ToolError as error:
        at = f"{where}.{error.field}"
        raise ApiError(f"'{at}': {error}", param=at) from None


def choice_of(
    given: Any,
    tools: Sequence[Tool],
    name_of: Callable[[Mapping[str, Any]], str | None],
    what: str,
    kinds: Sequence[str] = ("function",),
) -> ToolChoice:
    """Return which tools are to be called.

    Args:
        given: As the client sent it.
        tools: That there are.
        name_of: Returns the name of the tool that an object means; None if it means none.
        what: What is said of a choice that is none.
        kinds: Of tools that can be chosen.

    Raises:
        ApiError: For what cannot be meant.
    """
    choice = _choice(given, name_of, kinds)
    if choice is None:
        raise ApiError(f"'tool_choice' {what}", param="tool_choice")
    try:
        choice.of(tools)
    except InvalidValue as error:
        raise ApiError(f"'tool_choice': {error}", param="tool_choice") from None
    return choice


def _choice(
    given: Any, name_of: Callable[[Mapping[str, Any]], str | None], kinds: Sequence[str]
) -> ToolChoice | None:
    if given is None:
        return AUTO
    if isinstance(given, str):
        return _CHOICES.get(given)
    if not isinstance(given, Mapping):
        return None
    kind = given.get("type", "function")
    mode: Any = "required"
    meant: Any = [given]
    if kind == "allowed_tools":
        inner = given.get("allowed_tools", given)  # chats have an object of its own for them
        if not isinstance(inner, Mapping):
            return None
        mode, meant = inner.get("mode"), inner.get("tools")
    elif kind not in kinds:
        return None
    if mode not in ("auto", "required") or not isinstance(meant, list):
        return None
    names = [name_of(each) if isinstance(each, Mapping) else None for each in meant]
    known = tuple(name for name in names if name is not None)
    once = kind != "allowed_tools"
    return ToolChoice(mode, known, once) if len(known) == len(names) else None


def _name_of(given: Mapping[str, Any]) -> str | None:
    function = given.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None
