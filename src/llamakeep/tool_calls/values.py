"""What tool calls are made of: tools, which of them may be called, and what an answer comes to.

::

    text of an answer -> Parser -> Content, Reasoning, CallBegins, CallArguments -> Reply
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from llamakeep.errors import InvalidValue, ToolError

MOST_NAME_CHARS = 128
MOST_DEPTH = 128
"""Objects and lists, one within the other, in a tool's parameters at most."""
_NAME = re.compile(r"[A-Za-z0-9_.:/-]+")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    Attributes:
        name: Letters, digits and `_.:/-`.
        description: For the model.
        parameters: A JSON schema of an object: the arguments.
        strict: The arguments must follow the schema to the letter.
        where: What messages call the schema: the path to it in what a client sent. Makes no tool
            another one. See `path`.

    Raises:
        ToolError: For a name that is none, and for a schema that is of no object, or nested too
            deeply.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(
        default_factory=lambda: {"type": "object", "properties": {}}
    )
    strict: bool = False
    where: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or len(self.name) > MOST_NAME_CHARS:
            raise ToolError(
                f"a tool's name has 1 to {MOST_NAME_CHARS} letters, digits or _.:/-, "
                f"not {self.name[:200]!r}",
                field="name",
            )
        if self.parameters.get("type", "object") != "object":
            raise ToolError(
                f"the parameters of {self.name!r} must be the schema of an object, "
                f"not of type {str(self.parameters['type'])[:100]!r}",
                field="parameters",
            )
        if problem := _no_schema(self.parameters):
            raise ToolError(
                f"the parameters of {self.name!r} are no schema: {problem}", field="parameters"
            )
        if depth_is_over(self.parameters, MOST_DEPTH):
            raise ToolError(
                f"the parameters of {self.name!r} are nested more than {MOST_DEPTH} deep",
                field="parameters",
            )

    @property
    def path(self) -> str:
        """What messages call the schema: `where`, or else the name and `parameters`."""
        return self.where or f"{self.name}.parameters"

    def to_openai(self) -> dict[str, Any]:
        """Return it as OpenAI's API and chat templates have it."""
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
        }
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Said:
    """What an answer has to be where it calls nothing, after its thoughts.

    Attributes:
        schema: A JSON schema.
        where: What messages call it: the path to it in what a client sent.
    """

    schema: Any
    where: str = "format"


def _no_schema(parameters: Mapping[str, Any]) -> str:
    """Return what is wrong with the form of a schema, whatever it says, or ""."""
    properties, required = parameters.get("properties"), parameters.get("required")
    if properties is not None and not isinstance(properties, Mapping):
        return "properties must be an object"
    for key, schema in (properties or {}).items():
        if not isinstance(schema, Mapping | bool):
            return f"properties.{key[:100]} must be a schema"
    if required is not None and not (
        isinstance(required, Sequence)
        and not isinstance(required, str)
        and all(isinstance(each, str) for each in required)
    ):
        return "required must be a list of names"
    return ""


def depth_is_over(value: object, most: int) -> bool:
    """Return whether more than `most` objects and lists lie within each other. Never recurses."""
    rest: list[tuple[object, int]] = [(value, 1)]
    while rest:
        each, depth = rest.pop()
        inner: Iterable[object]
        if isinstance(each, Mapping):
            inner = each.values()
        elif isinstance(each, (list, tuple)):
            inner = each
        else:
            continue
        if depth > most:
            return True
        rest.extend((one, depth + 1) for one in inner)
    return False


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """Whether tools may, must or must not be called.

    Attributes:
        mode: `auto` lets the model choose, `none` forbids, `required` asks for at least one call.
        names: The tools that may be called; () for all of them.
        once: One call is meant, and no second one.
    """

    mode: Literal["auto", "none", "required"] = "auto"
    names: tuple[str, ...] = ()
    once: bool = False

    def of(self, tools: Sequence[Tool]) -> tuple[Tool, ...]:
        """Return the tools that may be called.

        Raises:
            InvalidValue: For a name that no tool has, and for a call that is required of none.
        """
        known = {tool.name for tool in tools}
        for name in self.names:
            if name not in known:
                raise InvalidValue(f"there is no tool {name!r}")
        if self.mode == "none":
            return ()
        if self.mode == "required" and not tools:
            raise InvalidValue("a call is required, and there are no tools")
        return tuple(tool for tool in tools if not self.names or tool.name in self.names)


AUTO = ToolChoice()
NONE = ToolChoice("none")
REQUIRED = ToolChoice("required")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model made.

    Attributes:
        id: Under which its result comes back.
        name: Of the tool.
        arguments: JSON as the model wrote it; incomplete where the answer was cut off, and never
            checked against the schema.
    """

    id: str
    name: str
    arguments: str

    def to_openai(self) -> dict[str, Any]:
        """Return it as OpenAI's API and chat templates have it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class Content:
    """A piece of what the model says."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of what the model thinks before."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """A call has begun; the pieces of its arguments follow.

    Attributes:
        index: Of the call, from 0.
        id: Under which its result comes back.
        name: Of the tool.
    """

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the arguments of the call that began last.

    Attributes:
        index: Of the call.
        json_text: A piece of JSON; all pieces together are an object.
    """

    index: int
    json_text: str


Delta: TypeAlias = "Content | Reasoning | CallBegins | CallArguments"


@dataclass(slots=True)
class Reply:
    """What deltas add up to. Costs a list's entry for each.

    Attributes:
        content: Pieces of what the model says.
        reasoning: Pieces of what it thinks.
    """

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    _begun: list[CallBegins] = field(default_factory=list)
    _arguments: list[list[str]] = field(default_factory=list)

    @classmethod
    def of(cls, deltas: Iterable[Delta]) -> Reply:
        """Return what `deltas` add up to."""
        reply = cls()
        reply.add(deltas)
        return reply

    def add(self, deltas: Iterable[Delta]) -> None:
        """Go on with these."""
        for delta in deltas:
            if isinstance(delta, Content):
                self.content.append(delta.text)
            elif isinstance(delta, Reasoning):
                self.reasoning.append(delta.text)
            elif isinstance(delta, CallBegins):
                self._begun.append(delta)
                self._arguments.append([])
            else:
                self._arguments[delta.index].append(delta.json_text)

    @property
    def text(self) -> str:
        """What the model says."""
        return "".join(self.content)

    @property
    def thoughts(self) -> str:
        """What it thinks."""
        return "".join(self.reasoning)

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """Its calls, in order."""
        return tuple(
            ToolCall(begun.id, begun.name, "".join(pieces))
            for begun, pieces in zip(self._begun, self._arguments, strict=True)
        )


def json_object(text: str) -> dict[str, Any] | None:
    """Return the object that `text` is in JSON; None if it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
