"""How families of models write their calls: told as data, which the parser and the grammar read.

Which family a model belongs to is seen in its chat template: what a template writes for a call is
what its model was trained on.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass


class Body(enum.Enum):
    """What follows a marker."""

    OBJECTS = "objects"
    """`{"name": ..., "arguments": ...}`, or a list of them."""
    FUNCTION = "function"
    """`name>`, then `{...}` or `<parameter=key>value</parameter>` ..., then `</function>`."""
    NAMED = "named"
    """`name[ARGS]{...}`, or what OBJECTS has."""
    TAGGED = "tagged"
    """What OBJECTS has, or `<function=` and what FUNCTION has."""


@dataclass(frozen=True, slots=True)
class Marker:
    """What announces a call.

    Attributes:
        text: As the model writes it; its first letter occurs in it once.
        body: What follows.
        close: What may come after that; "" for nothing.
    """

    text: str
    body: Body
    close: str = ""


@dataclass(frozen=True, slots=True)
class Format:
    """How a family of models writes calls.

    Attributes:
        name: Of the family.
        markers: Which announce calls; none begins with another.
        bare: A call may also stand without a marker, at the beginning of an answer.
        arguments: What an object calls its arguments.
        signs: Regular expressions; a template that has one of them is of this family.
        generic: The whole answer is an object: `{"tool_calls": [...]}` or `{"response": "..."}`.
            Of no family: what any model can be made to write.
        wraps: What is said is in such an object, too; else it stands for itself.
        xml: Arguments stand between tags.
        named: The name of a call stands before its arguments, not in an object.
    """

    name: str
    markers: tuple[Marker, ...] = ()
    bare: bool = False
    arguments: str = "arguments"
    signs: tuple[str, ...] = ()
    generic: bool = False
    wraps: bool = False
    xml: bool = False
    named: bool = False


FUNCTION = Marker("<function=", Body.FUNCTION, "</function>")
_TOOL_CALL = Marker("<tool_call>", Body.TAGGED, "</tool_call>")

QWEN_CODER = Format("qwen-coder", (_TOOL_CALL, FUNCTION), signs=(r"<parameter=",), xml=True)
HERMES = Format("hermes", (_TOOL_CALL,), signs=(r"(?s)\A(?!.*<arg_key>).*<tool_call>",))
_TOOL_CALLS = Marker("[TOOL_CALLS]", Body.NAMED)
MISTRAL = Format("mistral", (_TOOL_CALLS,), signs=(r"\[TOOL_CALLS\]",))
MISTRAL_NAMED = Format(
    "mistral-named", (_TOOL_CALLS,), signs=(r"(?s)\[TOOL_CALLS\].*\[ARGS\]",), named=True
)
LLAMA = Format(
    "llama",
    (Marker("<|python_tag|>", Body.OBJECTS), FUNCTION),
    bare=True,
    arguments="parameters",
    signs=(r"<\|python_tag\|>", r'(?s)<\|start_header_id\|>.*"parameters": '),
)
GENERIC = Format("generic", generic=True, wraps=True)

FAMILIES = (QWEN_CODER, HERMES, MISTRAL_NAMED, MISTRAL, LLAMA)
"""In the order in which a template is looked at."""


def format_of(template: str) -> Format | None:
    """Return the family that a chat template's source belongs to; None for one not known here."""
    for form in FAMILIES:
        if any(re.search(sign, template) for sign in form.signs):
            return form
    return None
