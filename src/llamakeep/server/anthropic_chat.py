"""From a conversation as Anthropic's API has it to a `Chat`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from llamakeep.errors import InvalidValue, ToolError
from llamakeep.server.anthropic_schema import (
    MOST_CACHE_CONTROLS,
    CustomTool,
    Message,
    SearchResult,
    TextBlock,
    Thinking,
    TokenCount,
    ToolChoice,
    ToolResult,
    ToolUse,
)
from llamakeep.server.errors import ApiError
from llamakeep.server.grammars import said_as
from llamakeep.server.talk import Chat, Seam
from llamakeep.texts import without_billing
from llamakeep.tool_calls import AUTO, NONE, REQUIRED, Said, Tool
from llamakeep.tool_calls import ToolChoice as Choice

_EFFORTS = {"xhigh": "high", "max": "high"}
"""To the most that templates know."""
_CHOICES = {"auto": AUTO, "any": REQUIRED, "none": NONE}


def chat_of(body: TokenCount) -> Chat:
    """Return the conversation that a client sends.

    Raises:
        ApiError: For what cannot be meant, with the field.
    """
    tools = _tools(body.tools or ())
    turns = _Turns(body)
    choice, given = _choice(body.tool_choice, tools), body.tool_choice
    return Chat(
        turns.messages,
        tools,
        choice,
        parallel=not (given is not None and given.disable_parallel_tool_use),
        said=said_of(body),
        extra=_extra(body),
        seams=(*_seams_of_tools(body.tools or ()), *turns.seams),
    )


def _wrong(where: str, what: str) -> ApiError:
    return ApiError(f"{where}: {what}", param=where)


def _extra(body: TokenCount) -> dict[str, Any]:
    """Return what the template is told besides."""
    extra: dict[str, Any] = {}
    if body.thinking is not None:
        extra["enable_thinking"] = body.thinking.type != "disabled"
    effort = body.output_config.effort if body.output_config is not None else None
    if effort is not None:
        extra["reasoning_effort"] = _EFFORTS.get(effort, effort)
    return extra


def said_of(body: TokenCount) -> Said | None:
    """Return what an answer has to be; None for anything.

    Raises:
        ApiError: Where both fields say it.
    """
    config = body.output_config
    where, given = "output_config.format", config.format if config is not None else None
    if given is not None and body.output_format is not None:
        raise _wrong("output_format", f"cannot be used together with {where}")
    if given is None:
        where, given = "output_format", body.output_format
    return None if given is None else said_as(given.schema_, f"{where}.schema")


# -- tools -----------------------------------------------------------------------------------------
def _tools(given: Sequence[CustomTool]) -> tuple[Tool, ...]:
    tools: dict[str, Tool] = {}
    for index, each in enumerate(given):
        if each.name in tools:
            raise _wrong(f"tools.{index}.name", f"there are two tools {each.name!r}")
        try:
            tools[each.name] = Tool(
                each.name,
                each.description or "",
                each.input_schema,
                strict=bool(each.strict),
                where=f"tools.{index}.input_schema",
            )
        except ToolError as error:
            name = "input_schema" if error.field == "parameters" else error.field
            raise _wrong(f"tools.{index}.{name}", str(error)) from None
    return tuple(tools.values())


def _choice(given: ToolChoice | None, tools: tuple[Tool, ...]) -> Choice:
    if given is None:
        return AUTO
    if given.type == "tool":
        if given.name is None:
            raise _wrong("tool_choice.name", "Field required")
        choice = Choice("required", (given.name,), once=True)
    else:
        choice = _CHOICES[given.type]
    try:
        choice.of(tools)
    except InvalidValue as error:
        raise _wrong("tool_choice", str(error)) from None
    return choice


def _seams_of_tools(given: Sequence[CustomTool]) -> Iterator[Seam]:
    for index, tool in enumerate(given):
        if tool.cache_control is not None:
            yield Seam(None, index)


# -- messages --------------------------------------------------------------------------------------
@dataclass(slots=True)
class _Turn:
    """What one message says, with the places that are marked in it."""

    role: str
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolUse] = field(default_factory=list)
    marked: list[int | None] = field(default_factory=list)

    def say(self, text: str) -> None:
        """Add a text."""
        self.texts.append(text)

    def mark(self, *, ends: bool = False) -> None:
        """Note that what comes after the last text, or after all, may be another one."""
        self.marked.append(None if ends or not self.texts else len(self.texts) - 1)

    def message(self) -> dict[str, Any]:
        """Return it as OpenAI has it."""
        message: dict[str, Any] = {"role": self.role, "content": _content(self.texts)}
        if self.thoughts:
            message["reasoning_content"] = "\n".join(self.thoughts)
        if self.calls:
            message["tool_calls"] = [_call(each) for each in self.calls]
        return message


class _Turns:
    """Makes messages of turns: those of one role in a row are one.

    Attributes:
        messages: As OpenAI has them.
        seams: The places that are marked in them.
    """

    def __init__(self, body: TokenCount) -> None:
        self.messages: list[dict[str, Any]] = []
        self.seams: list[Seam] = []
        self._open: _Turn | None = None
        self._waiting: dict[str, None] = {}  # calls of the last answer that have no result yet
        self._told: set[str] = set()
        _check_marks(body)
        for block in body.system or ():
            self._add_text("system", block, without_billing(block.text))
        for index, message in enumerate(body.messages):
            self._add(f"messages.{index}", message)
        if self._waiting:
            self._miss(f"messages.{len(body.messages) - 1}")
        self._close()
        if not self.messages:
            raise _wrong("messages", "all of them are empty")

    def _add(self, where: str, message: Message) -> None:
        if message.role == "assistant" and self._waiting:
            self._miss(where)
        for index, block in enumerate(message.content):
            at = f"{where}.content.{index}"
            if isinstance(block, ToolResult):
                self._add_result(at, message.role, block)
                continue
            if message.role != "assistant" and self._waiting:
                self._miss(at)
            if isinstance(block, TextBlock):
                self._add_text(message.role, block, block.text)
            elif isinstance(block, SearchResult):
                self._add_text(message.role, block, _found(block))
            elif message.role != "assistant":
                raise _wrong(
                    at, f"a {block.type} block is the assistant's, not the {message.role}'s"
                )
            elif isinstance(block, ToolUse):
                self._add_call(at, block)
            elif isinstance(block, Thinking) and block.thinking:
                self._turn(message.role).thoughts.append(block.thinking)
        if not message.content:
            self._turn(message.role)

    def _turn(self, role: str) -> _Turn:
        """Return the turn that is going on."""
        if self._open is None or self._open.role != role:
            self._close()
            self._open = _Turn(role)
        return self._open

    def _close(self) -> None:
        turn, self._open = self._open, None
        if turn is None:
            return
        self.seams += (Seam(len(self.messages), part) for part in turn.marked)
        self.messages.append(turn.message())

    def _add_text(self, role: str, block: TextBlock | SearchResult, text: str) -> None:
        if role == "system" and not text:
            return
        turn = self._turn(role)
        turn.say(text)
        if block.cache_control is not None:
            turn.mark()

    def _add_call(self, where: str, block: ToolUse) -> None:
        if block.id in self._told:
            raise _wrong(f"{where}.id", f"there are two calls {block.id[:100]!r}")
        self._told.add(block.id)
        self._waiting[block.id] = None
        turn = self._turn("assistant")
        turn.calls.append(block)
        if block.cache_control is not None:
            turn.mark(ends=True)

    def _add_result(self, where: str, role: str, block: ToolResult) -> None:
        if role != "user":
            raise _wrong(where, f"a tool_result block is the user's, not the {role}'s")
        if block.tool_use_id not in self._waiting:
            what = f"is no call of the turn before: {block.tool_use_id[:100]!r}"
            raise _wrong(f"{where}.tool_use_id", what)
        del self._waiting[block.tool_use_id]
        self._close()
        turn = _Turn("tool")
        for part in block.content or ():
            turn.say(part.text if isinstance(part, TextBlock) else _found(part))
            if part.cache_control is not None:
                turn.mark()
        if block.is_error and not "".join(turn.texts).lower().startswith("error"):
            turn.texts[:1] = [": ".join(("Error", *turn.texts[:1]))]
        if block.cache_control is not None:
            turn.mark()
        self._open = turn
        self._close()
        self.messages[-1]["tool_call_id"] = block.tool_use_id

    def _miss(self, where: str) -> None:
        names = ", ".join(repr(each[:100]) for each in self._waiting)
        raise _wrong(where, f"tool_result blocks must come first, one for each call: {names}")


def _content(texts: Sequence[str]) -> str | list[dict[str, Any]]:
    if len(texts) < 2:
        return "".join(texts)
    return [{"type": "text", "text": text} for text in texts]


def _call(block: ToolUse) -> dict[str, Any]:
    try:
        arguments = json.dumps(block.input, ensure_ascii=False)
    except RecursionError:
        raise ApiError(f"the input of {block.name[:100]!r} is nested too deeply") from None
    function = {"name": block.name, "arguments": arguments}
    return {"id": block.id, "type": "function", "function": function}


def _found(block: SearchResult) -> str:
    """Return a search result as a text."""
    return "\n".join((block.title, block.source, *(part.text for part in block.content)))


def _check_marks(body: TokenCount) -> None:
    """Count the places that are marked.

    The whole request being marked means its end, where there is a checkpoint anyway.
    """
    blocks = [block for message in body.messages for block in message.content]
    inner = [
        part for block in blocks if isinstance(block, ToolResult) for part in block.content or ()
    ]
    marked = [body, *(body.tools or ()), *(body.system or ()), *blocks, *inner]
    n_marks = sum(getattr(each, "cache_control", None) is not None for each in marked)
    if n_marks > MOST_CACHE_CONTROLS:
        raise ApiError(
            f"at most {MOST_CACHE_CONTROLS} blocks with cache_control may be sent, not {n_marks}",
            param="cache_control",
        )
