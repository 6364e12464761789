"""Grammars, in GBNF, that make a model write calls as its family does, and as tools want them.

A call that is required is all that the answer may be, after thoughts. One that may come is held to
the grammar from the marker that announces it; what is before it is free, unless it has a schema.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from llamakeep.errors import GrammarError
from llamakeep.json_schema import Rules, add_schema, literal
from llamakeep.tool_calls.formats import FUNCTION, Body, Format, Marker
from llamakeep.tool_calls.reasoning import Thoughts
from llamakeep.tool_calls.values import Said, Tool
from llamakeep.tool_calls.xml_values import fits_tags, is_text

Held: TypeAlias = Callable[[Rules, Tool, Any, str], str]
"""Adds the rules of a tool's schema, or a part of it, and returns the name of the first.

The last argument is what messages call the schema.
"""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer has to match.

    Attributes:
        text: In GBNF; the first rule is `root`.
        triggers: Texts with the first of which it begins; () for the beginning of the answer.
    """

    text: str
    triggers: tuple[str, ...] = ()


def as_schema(rules: Rules, tool: Tool, schema: Any, where: str) -> str:
    """Hold arguments to their schema; one that cannot be compiled allows any JSON.

    Raises:
        GrammarError: For a schema that cannot be compiled, of a tool that is strict.
    """
    try:
        add_schema(Rules(), schema, where)  # what is left of one that fails is in nobody's way
    except GrammarError:
        if tool.strict:
            raise
        return as_json(rules, tool, schema, where)
    return add_schema(rules, schema, where)


def as_json(rules: Rules, tool: Tool, schema: Any, where: str) -> str:
    """Hold arguments to be an object, and parts of them to be JSON."""
    return rules.json("object" if schema.get("type") == "object" else "value")


def grammar_of(
    form: Format,
    tools: Sequence[Tool],
    *,
    required: bool,
    parallel: bool = True,
    thoughts: Thoughts | None = None,
    thinking: bool = False,
    said: Said | None = None,
    held: Held = as_schema,
) -> Grammar:
    """Return the grammar of calls. About 0.1 ms for each property of a tool.

    Args:
        form: How the model writes calls.
        tools: That may be called: at least one, unless what is said has a schema or a form.
        required: At least one call must come.
        parallel: Several may come.
        thoughts: How the model marks its thoughts, which may come before.
        thinking: The prompt has opened them already.
        said: The schema of the whole answer, where it calls nothing; None for anything.
        held: Says what arguments are held to.

    Raises:
        GrammarError: For a schema that cannot be compiled, with the path to what is wrong, and for
            schemas that are too large together.
    """
    maker = _Maker(form, tools, parallel, held)
    triggers: tuple[str, ...] = ()
    root = "answer"
    if required:
        maker.add("answer", "calls")
    elif said is not None:
        text = maker.schema(said)
        maker.add("answer", *(("calls",) if tools else ()), text)
    elif form.generic:
        response = '"{" ws "\\"response\\":" ws string ws "}"'
        maker.add("answer", *(("calls",) if tools else ()), response)
    else:
        marked = {marker.text: f"body--{at} more" for at, marker in enumerate(form.markers)}
        if thoughts is not None:
            maker.add_scan("answer", marked, may_end=True)
        maker.add("marked", *(f"{quoted(text)} {rest}" for text, rest in marked.items()))
        triggers, root = tuple(marked), "marked"
    if thoughts is not None:
        maker.add_scan("thoughts", {thoughts.close: "ws-any answer"}, may_end=False)
        begin = f"{quoted(thoughts.open)} thoughts"
        if not triggers:
            root = "thoughts" if thinking else f"ws-any ({begin} | answer)"
        elif thinking:  # what thoughts say of calls is none
            root, triggers = f"{quoted(thoughts.close)} ws-any answer", (thoughts.close,)
        else:
            root, triggers = f"{begin} | marked", (thoughts.open, *triggers)
    return Grammar(maker.text(root), triggers)


def quoted(text: str) -> str:
    """Return a text as GBNF has it."""
    return '"' + "".join(_ESCAPES.get(letter, letter) for letter in text) + '"'


_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}


class _Maker:
    """Collects the rules of a family's calls."""

    def __init__(self, form: Format, tools: Sequence[Tool], parallel: bool, held: Held) -> None:
        self._form = form
        self._tools = tools
        self._parallel = parallel
        self._held = held
        self._rules = Rules()
        self._rules.json("ws")
        self._rules.json("string")
        self._ends: dict[str, None] = {}
        self.add("ws-any", "[ \\t\\r\\n]{0,8}")
        if not tools:
            return
        if form.xml:
            self.add_scan("tag-text", {"</parameter>": quoted("\n")}, may_end=False)
            self.add("function", *(self._xml(at) for at in range(len(tools))))
        else:
            self._arguments = [
                held(self._rules, tool, {"type": "object", **tool.parameters}, tool.path)
                for tool in tools
            ]
            self.add("call-object", *(self._object(at) for at in range(len(tools))))
        for at, marker in enumerate(form.markers):
            self.add(f"body--{at}", self._body(at, marker))
        if form.generic:
            self.add("calls", f'"{{" ws "\\"tool_calls\\":" ws {self._list()} ws "}}"')
            return
        first = "call-object" if form.bare else f"{quoted(form.markers[0].text)} body--0"
        between = quoted("; ") if form.bare else "ws-any"
        is_list = form.markers[0].body is Body.NAMED and not form.named
        repeats = parallel and not is_list
        self.add("more", f"({between} {first})*" if repeats else '""')
        self.add("calls", f"{first} more")

    def schema(self, said: Said) -> str:
        """Add the rules of a schema of the whole answer; return the name of the first."""
        return add_schema(self._rules, said.schema, said.where)

    def add(self, name: str, *choices: str) -> None:
        """Add a rule. A number at a name's end has two dashes before it: no schema's rule has."""
        self._rules.define(name, " | ".join(choices))

    def add_scan(self, name: str, ends: Mapping[str, str], *, may_end: bool) -> None:
        """Add rules for any text up to the first of `ends`, and over it.

        Args:
            name: Of the first rule.
            ends: Texts, none of which lies in another, and what follows each.
            may_end: None of them has to come.
        """
        self._ends |= dict.fromkeys(ends)
        states = {""} | {text[:at] for text in ends for at in range(1, len(text))}
        names = {state: f"{name}--{at}" for at, state in enumerate(sorted(states))}
        letters = sorted({letter for text in ends for letter in text})
        self.add(name, names[""])
        for state, rule in names.items():
            choices = ['""'] if may_end else []
            known = ""
            for letter in letters:
                read = state + letter
                if read in ends:
                    choices.append(f"{quoted(letter)} {ends[read]}")
                    known += letter
                    continue
                while read not in states:
                    read = read[1:]
                if read:
                    choices.append(f"{quoted(letter)} {names[read]}")
                    known += letter
            others = "".join(f"\\x{ord(letter):02X}" for letter in known)
            self.add(rule, *choices, f"[^{others}] {names['']}")

    def text(self, root: str) -> str:
        """Return all rules."""
        if self._ends:  # a special token may be sampled whose text stands in quotes, in one piece
            self.add("in-one-piece", *map(quoted, self._ends))
        return self._rules.text(root)

    def _list(self) -> str:
        more = '(ws "," ws call-object)*' if self._parallel else ""
        return f'"[" ws call-object {more} ws "]"'

    def _object(self, at: int) -> str:
        key, name = self._form.arguments, json.dumps(self._tools[at].name)
        arguments = f"ws {quoted(json.dumps(key) + ':')} ws {self._arguments[at]} ws"
        begin = f'"{{" ws {quoted(json.dumps("name") + ":")} ws {quoted(name)} ws ","'
        return f'{begin} {arguments} "}}"'

    def _body(self, at: int, marker: Marker) -> str:
        """Return what follows a marker."""
        form = self._form
        if form.xml:
            if marker.body is Body.FUNCTION:
                return "function"
            return f"ws {quoted(FUNCTION.text)} function ws {quoted(marker.close)}"
        if marker.body is Body.FUNCTION:
            close = quoted(marker.close)
            each = (
                f"{quoted(tool.name + '>')} ws {self._arguments[at]} ws {close}"
                for at, tool in enumerate(self._tools)
            )
            return " | ".join(each)
        if marker.body is Body.NAMED:
            if not form.named:
                return f"ws {self._list()}"
            each = (
                f"{quoted(tool.name + '[ARGS]')} {self._arguments[at]}"
                for at, tool in enumerate(self._tools)
            )
            return " | ".join(each)
        return f"ws call-object ws {quoted(marker.close)}" if marker.close else "ws call-object"

    def _value(self, tool: Tool, key: str, schema: Mapping[str, Any]) -> str:
        """Add the rules of one parameter, which may refer to what the whole schema defines."""
        where = f"{tool.path}.properties.{key}"
        shared = {
            name: tool.parameters[name]
            for name in _SHARED
            if name in tool.parameters and name not in schema
        }
        try:
            return self._held(self._rules, tool, {**shared, **schema}, where)
        except GrammarError as error:
            for name in shared:  # it stands in the whole schema and not in this part
                here, there = f"{where}.{name}.", f"{tool.path}.{name}."
                if error.where.startswith(here):
                    message = str(error).replace(here, there, 1)
                    raise GrammarError(message, where=error.where.replace(here, there, 1)) from None
            raise

    def _xml(self, at: int) -> str:
        """Return a tool's name and parameters between tags; as one object, if tags lose any."""
        tool = self._tools[at]
        if not fits_tags(tool):
            schema = {"type": "object", **tool.parameters}
            held = self._held(self._rules, tool, schema, tool.path)
            return f"{quoted(tool.name + '>')} ws {held} ws {quoted(FUNCTION.close)}"
        properties = tool.parameters.get("properties")
        required = tool.parameters.get("required")
        parts: list[str] = []
        for number, (key, schema) in enumerate(
            properties.items() if isinstance(properties, Mapping) else ()
        ):
            schema = schema if isinstance(schema, Mapping) else {}
            name = f"tool--{at}--{number}"
            end = quoted("\n</parameter>\n")
            choices = schema.get("enum")
            if is_text(schema) and isinstance(choices, list):
                self.add(name, *(f"{literal(str(each))} {end}" for each in choices))
            elif is_text(schema):
                self.add(name, "tag-text")
            else:
                self.add(name, f"{self._value(tool, key, schema)} {end}")
            part = f"{quoted('<parameter=')} {literal(key)} {quoted('>' + chr(10))} {name}"
            is_needed = isinstance(required, list) and key in required
            parts.append(part if is_needed else f"({part})?")
        return " ".join([quoted(tool.name + ">\n"), *parts, quoted(FUNCTION.close)])


_SHARED = ("$defs", "definitions")
"""What all parts of a schema may refer to."""
