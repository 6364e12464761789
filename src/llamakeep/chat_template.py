"""Chat templates: from messages to a prompt, and where its user messages start.

A model carries its template, a Jinja program that someone on the internet wrote. It runs in Jinja's
sandbox, which keeps it from Python's internals, and on a meter, which keeps it from running on:
loop turns, calls, and the characters of every value it makes are counted against the size of what
it was given, and its time is limited. All of Jinja that chat templates use works as it does with
Hugging Face's transformers; filters and methods that they do not use are not there.

::

    messages -> ChatTemplate.render_chat -> Rendered(text, starts) -> token_starts -> tokens, starts
"""

from __future__ import annotations

import functools
import json
import logging
import operator
import re
import time
from collections.abc import (
    Callable,
    ItemsView,
    Iterable,
    Iterator,
    KeysView,
    Mapping,
    Sequence,
    ValuesView,
)
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Protocol

import jinja2
import numpy as np
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from llamakeep.errors import InvalidValue, ModelError, TemplateError
from llamakeep.tokens import IntArray, TokensLike, as_tokens

logger = logging.getLogger("llamakeep")

SOURCE_CHARS: Final = 1 << 18
"""Length of a template's source at most; the longest in use have a tenth of it."""
VALUE_CHARS: Final = 4 << 20
"""Length of any one value a template makes at most, besides 4 times what it was given."""
WORK_CHARS: Final = 64 << 20
"""Characters, items and steps of one rendering at most, besides 256 times what it was given."""
TIME_LIMIT_S: Final = 2.0
"""Processor time of one rendering at most, in seconds; a busy machine does not shorten it."""

BUILT_IN: Final = {
    "chatml": (
        "{% for message in messages %}"
        "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
}
"""Templates that can be asked for by name."""

_CLOCK_EVERY = 4096


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_STR_METHODS = _words(
    "capitalize casefold count endswith find format format_map index isalnum isalpha isascii "
    "isdecimal isdigit islower isnumeric isspace istitle isupper join lower lstrip partition "
    "removeprefix removesuffix replace rfind rindex rpartition rsplit rstrip split splitlines "
    "startswith strip swapcase title upper"
)
_METHODS: tuple[tuple[type, frozenset[str]], ...] = (
    (str, _STR_METHODS),
    (dict, frozenset({"get", "items", "keys", "values", "copy"})),
    (list, frozenset({"index", "count", "copy"})),
    (tuple, frozenset({"index", "count", "grouper", "list"})),
    (bytes, frozenset()),
    (int, frozenset()),
    (float, frozenset()),
)
# Those that never look inside the items they are given.
_SHALLOW = _words(
    "count d default first items last length list map reject rejectattr reverse select selectattr"
)
_FILTERS = _SHALLOW | _words(
    "abs capitalize dictsort e escape float format groupby indent int join lower max min replace "
    "round safe sort string sum title trim unique upper wordcount"
)
_COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "gt": operator.gt,
    "gteq": operator.ge,
    "lt": operator.lt,
    "lteq": operator.le,
    "in": lambda item, values: item in values,
    "notin": lambda item, values: item not in values,
}
_TESTS = {"==": "eq", "equalto": "eq", "!=": "ne", ">": "gt", "greaterthan": "gt", ">=": "gteq"}
_TESTS |= {"ge": "gteq", "<": "lt", "lessthan": "lt", "<=": "lteq", "le": "lteq"}
_TESTS |= {name: name for name in ("eq", "ne", "gt", "lt", "in")}
# A width of three digits or more, or a key that is too long to look behind.
_WIDTH = re.compile(
    r"%(?:\([^)]{0,30}\))?[-#0 +]{0,5}(?:\*|\d{3}|\d{0,2}\.(?:\*|\d{3}))|%\([^)]{31}"
)
_CONTAINERS = (dict, list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)


def _weight(value: object, known: dict[int, int] | None = None) -> int:
    """Return how many characters `value` has written out, roughly; shared parts count each time."""
    if isinstance(value, str):
        return len(value) + 1
    if isinstance(value, int):
        return value.bit_length() // 3 + 1
    if isinstance(value, range):
        return 6 * len(value) + 1
    if isinstance(value, Namespace):
        raise TemplateError("the chat template writes or compares a namespace")
    if not isinstance(value, _CONTAINERS):
        return 1
    known = {} if known is None else known
    if id(value) not in known:
        weight = 2 + sum(_weight(item, known) for item in value)
        if isinstance(value, dict):
            weight += sum(_weight(item, known) for item in value.values())
        known[id(value)] = weight
    return known[id(value)]


def _length(value: object) -> int:
    """Return how many characters or items `value` has, without looking inside."""
    if isinstance(value, int):
        return value.bit_length()
    sized = isinstance(value, (str, bytes, range, *_CONTAINERS))
    return len(value) if sized else 1  # type: ignore[arg-type]


class _Meter:
    """What one rendering may still cost."""

    def __init__(self, given_chars: int, now: datetime, clock: Callable[[], float]) -> None:
        self.now = now
        self.value_chars = VALUE_CHARS + 4 * given_chars
        self._left = WORK_CHARS + 256 * given_chars
        self._clock = clock
        self._deadline = clock() + TIME_LIMIT_S
        self._unchecked = 0

    def spend(self, amount: int) -> None:
        """Count characters, items or steps.

        Raises:
            TemplateError: When too many were, or the time is up.
        """
        self._left -= amount
        if self._left < 0:
            raise TemplateError("the chat template does too much work")
        self._unchecked += amount
        if self._unchecked >= _CLOCK_EVERY:
            self._unchecked = 0
            if self._clock() > self._deadline:
                raise TemplateError(f"the chat template takes longer than {TIME_LIMIT_S:g} s")

    def make(self, size: int) -> None:
        """Count a value before it is made.

        Raises:
            TemplateError: When it is too large; also as `spend`.
        """
        if size > self.value_chars:
            raise TemplateError(
                f"the chat template makes a value of more than {self.value_chars:,} characters"
            )
        self.spend(size)

    def read(self, value: object) -> None:
        """Count a value that is about to be written, compared or hashed, with all inside it."""
        self.make(_weight(value))


_METER: ContextVar[_Meter] = ContextVar("meter")


class _Looped:
    """What a loop runs over, each turn counted."""

    def __init__(self, values: Any, turn_chars: int) -> None:
        self._values = values
        self._turn_chars = turn_chars

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Any]:
        spend = _METER.get().spend
        for value in self._values:
            spend(1 + self._turn_chars)
            yield value


class _Metering(NodeTransformer):
    """Sends what costs time or memory, and is no call already, through the environment."""

    def _call(self, node: nodes.Node, name: str, *args: Any) -> nodes.Call:
        method = nodes.EnvironmentAttribute(name)
        return nodes.Call(method, list(args), [], None, None, lineno=node.lineno)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        chars = sum(len(text.data) for text in node.find_all(nodes.TemplateData))
        node.iter = self._call(node, "looped", node.iter, nodes.Const(chars))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._call(node, "joined", *node.nodes)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        if len(node.ops) == 1:
            [one] = node.ops
            return self._call(node, "compared", nodes.Const(one.op), node.expr, one.expr)
        node.expr = self._call(node, "flat", node.expr)
        for one in node.ops:
            one.expr = self._call(node, "flat", one.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        # A slice is a copy, and goes past the environment.
        return self._call(node, "made", node) if isinstance(node.arg, nodes.Slice) else node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.key, nodes.Const):
            node.key = self._call(node, "flat", node.key)
        return node


class _Generation(Extension):
    """`{% generation %}` marks answers for training; here it is not there."""

    tags = {"generation"}  # noqa: RUF012 - declared so by Jinja

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return body


class _Formatter(SandboxedFormatter):
    def format_field(self, value: Any, format_spec: str) -> Any:
        if re.search(r"\d{3}", format_spec):
            raise TemplateError(f"the chat template asks for the width {format_spec!r}")
        return super().format_field(value, format_spec)


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a meter. What runs in it finds its meter in `_METER`."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
            # Nothing runs while a template is compiled: there is no meter then.
            optimized=False,
            finalize=_written,
        )
        kept = ("range", "dict", "namespace", "cycler", "joiner")
        self.globals = {name: self.globals[name] for name in kept}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self.filters = {name: _metered(name, self.filters[name]) for name in sorted(_FILTERS)}
        self.filters["tojson"] = _metered("tojson", _tojson)
        for name, op in _TESTS.items():
            self.tests[name] = _comparison(op, self)

    def program(self, source: str) -> jinja2.Template:
        """Compile a template."""
        tree = _Metering().visit(self.parse(source))
        tree.set_environment(self)
        code = self.compile(tree, filename="<chat template>")
        return jinja2.Template.from_code(self, code, self.make_globals(None))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether templates may use it: of plain values, only what is listed here."""
        for kind, names in _METHODS:
            if isinstance(obj, kind):
                return attr in names
        return bool(super().is_safe_attribute(obj, attr, value))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return `str.format` and `str.format_map` with arguments and widths checked."""
        text = getattr(value, "__self__", None)
        name = getattr(value, "__name__", "")
        if not isinstance(text, str) or name not in {"format", "format_map"}:
            return None

        def formatted(*args: Any, **kwargs: Any) -> str:
            if name == "format_map":
                args, kwargs = (), dict(*args)
            fields = text.count("{")
            _METER.get().make(len(text) + fields * (1000 + _weight([args, kwargs])))
            return str(_Formatter(self).vformat(text, args, kwargs))

        return formatted

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call something for the template, counted."""
        meter = _METER.get()
        meter.spend(1)
        owner, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(owner, str):
            args = _check_text(meter, owner, name, args)
        elif args and (isinstance(owner, _CONTAINERS) or name == "changed"):
            meter.read([args, owner if name in {"index", "count"} else None])
        result = super().call(__context, __obj, *args, **kwargs)
        meter.make(_length(result))
        return result

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute, after checking how large the result will be."""
        meter = _METER.get()
        sizes = _length(left), _length(right)
        if isinstance(left, str) and operator == "%":
            _check_percent(meter, left, right)
        elif operator == "**":
            exponent = abs(right) if isinstance(right, (int, float)) else 0
            meter.make(int(min(sizes[0] * exponent, 1 << 60)) * 64)
        elif operator == "*" and isinstance(left, (str, list, tuple)):
            meter.make(sizes[0] * max(0, right) if isinstance(right, int) else 1)
        elif operator == "*" and isinstance(right, (str, list, tuple)):
            meter.make(sizes[1] * max(0, left) if isinstance(left, int) else 1)
        elif operator == "*" and isinstance(left, int) and isinstance(right, int):
            meter.make(sum(sizes) ** 2 // 64)
        else:
            meter.make(sum(sizes))
        return super().call_binop(context, operator, left, right)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Subscribe; what is hashed for it is counted."""
        if isinstance(argument, _CONTAINERS):
            _METER.get().read(argument)
        return super().getitem(obj, argument)

    # What follows is called by templates, where _Metering put it.

    def looped(self, values: Any, turn_chars: int) -> _Looped:
        """Return what a loop shall run over."""
        return _Looped(values, turn_chars)

    def joined(self, *values: Any) -> str:
        """Return `~` of all values."""
        meter = _METER.get()
        meter.make(sum(_weight(value) for value in values))
        return "".join(map(str, values))

    def compared(self, op: str, left: Any, right: Any) -> Any:
        """Return a comparison of two values; large ones take time, and are counted."""
        if isinstance(left, _CONTAINERS) and isinstance(right, _CONTAINERS):
            _METER.get().read([left, right])
        elif not isinstance(right, dict):
            _METER.get().spend(_length(left) + _length(right))
        return _COMPARE[op](left, right)

    def made(self, value: Any) -> Any:
        """Return `value`; the call is counted, and what it returns."""
        return value

    def flat(self, value: Any) -> Any:
        """Return `value`, counted with all inside it."""
        _METER.get().read(value)
        return value


def _comparison(op: str, environment: _Environment) -> Callable[[Any, Any], Any]:
    return lambda left, right: environment.compared(op, left, right)


def _check_text(meter: _Meter, text: str, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Count what a method of a string will make, and return its arguments."""
    if name == "join" and args:
        items = list(args[0])
        meter.make(sum(map(_weight, items)) + len(text) * len(items))
        return (items, *args[1:])
    if name == "replace" and len(args) > 1 and all(isinstance(arg, str) for arg in args[:2]):
        meter.make(len(text) + text.count(args[0]) * len(args[1]))
    else:
        meter.spend(len(text))
    return args


def _check_percent(meter: _Meter, text: str, values: Any) -> None:
    if _WIDTH.search(text):
        raise TemplateError("the chat template asks for a width of more than 99, or has a long key")
    meter.make(len(text) + text.count("%") * (100 + _weight(values)))


@jinja2.pass_context
def _written(_context: Any, value: Any) -> Any:
    """Count what is about to be written."""
    _METER.get().read(value)
    return value


def _raise_exception(message: Any) -> None:
    raise TemplateError(str(message))


def _strftime_now(form: str) -> str:
    if len(form) > 200 or re.search(r"\d{3}", form):
        raise TemplateError("the chat template asks for a date that is too long")
    return _METER.get().now.strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers has it: without HTML escapes."""
    if indent is not None and not 0 <= int(indent) <= 16:
        raise TemplateError(f"the chat template asks for an indent of {indent}")
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _metered(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that counts what it reads, and what it makes."""
    skipped = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def metered(*given: Any, **kwargs: Any) -> Any:
        meter = _METER.get()
        before, args = given[:skipped], list(given[skipped:])
        options = [*args[1:], *kwargs.values()]
        if name in {"join", "sum", "unique"}:
            args[0] = list(args[0])
        if name in _SHALLOW:
            meter.spend(1 + _length(args[0]))
        else:
            meter.read(args[0])
            meter.read(options)
        if name == "join":
            meter.make(len(args[0]) * _weight(options))
        elif name == "replace":
            _check_text(meter, str(args[0]), name, tuple(map(str, options)))
        elif name == "indent":
            width = kwargs.get("width", args[1] if len(args) > 1 else 4)
            width = width if isinstance(width, int) else len(str(width))
            meter.make((1 + str(args[0]).count("\n")) * width)
        elif name == "format":
            _check_percent(meter, str(args[0]), options)
        elif name == "round" and any(isinstance(n, int) and abs(n) > 99 for n in options):
            raise TemplateError("the chat template rounds to more than 99 digits")
        elif name == "sum" and any(isinstance(item, _CONTAINERS) for item in options):
            raise TemplateError("the chat template adds up lists")
        result = function(*before, *args, **kwargs)
        meter.make(_length(result))
        return result

    return metered


class Tokenize(Protocol):
    """Turns text into tokens."""

    def __call__(self, text: str, *, add_special: bool, parse_special: bool) -> TokensLike:
        """Return the tokens of `text`.

        Args:
            text: Any text.
            add_special: With the tokens that the vocabulary puts around every prompt, such as BOS.
            parse_special: Names of special tokens in the text become these tokens.
        """
        ...  # pragma: no cover - protocol


@dataclass(frozen=True, slots=True)
class Rendered:
    """A chat as a prompt.

    Attributes:
        text: The prompt.
        starts: Where in it each user message's turn begins, its header included, in characters,
            ascending. A message whose place is not known for sure is left out.
    """

    text: str
    starts: tuple[int, ...]


class ChatTemplate:
    """A chat template, compiled; it renders from any thread.

    What content a template understands is found out as llama.cpp does: by rendering messages with
    sentinels in them, once, here.

    Args:
        source: In Jinja's language, or a name in `BUILT_IN`.
        bos_token: Text of the token that begins a prompt, for templates that write it.
        eos_token: Text of the token that ends an answer.
        add_bos: The vocabulary puts BOS before every prompt; so the text's own is dropped, as
            llama.cpp does. `token_starts` never doubles it, whatever is said here.
        clock: Of processor time in seconds, for the limit.
        now: What `strftime_now` tells.

    Raises:
        ModelError: When there is no template: None, or a text without anything in it.
        TemplateError: When it is no Jinja, with the line; or too long.
    """

    def __init__(
        self,
        source: str | None,
        *,
        bos_token: str = "",
        eos_token: str = "",
        add_bos: bool = False,
        clock: Callable[[], float] = time.thread_time,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        if source is None or not source.strip():
            raise ModelError(
                "this model has no chat template: name a file that has one with "
                f"--chat-template-file, or one of {', '.join(BUILT_IN)}"
            )
        self.source = BUILT_IN.get(source.strip(), source)
        self.bos_token = bos_token
        self.eos_token = eos_token
        self._dropped = bos_token if add_bos else ""
        self._clock = clock
        self._now = now
        self._program = _compiled(self.source)
        self._texts, self._parts, self._objects = True, False, False
        self._no_tools: list[Any] | None = None
        self._learn_content()
        self._objects = self._takes_objects()
        self._header = self._learn_header()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the chat as a prompt; as `render_chat`, at half its cost."""
        prepared = self._prepared(messages)
        given = self._given(add_generation_prompt, tools)
        text = self._run(prepared, given, extra, self._now())
        return text.removeprefix(self._dropped)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """Return the chat as a prompt, with where its user messages start.

        Args:
            messages: As OpenAI has them. Lists of text parts are joined with line ends where the
                template knows texts only; the role `developer` is `system` where the template does
                not know it; arguments of tool calls are objects or JSON, as the template has it.
            add_generation_prompt: With the header of the answer at the end.
            tools: As OpenAI has them.
            extra: More variables for the template, such as `enable_thinking`.

        Raises:
            InvalidValue: For a message that is none, with its place; content that is not text, with
                its type; a variable in `extra` that is not to be changed.
            TemplateError: When the template refuses, fails, or runs over its limits.
        """
        prepared = self._prepared(messages)
        given = self._given(add_generation_prompt, tools)
        now = self._now()
        text = self._run(prepared, given, extra, now)
        users = [index for index, one in enumerate(prepared) if one["role"] == "user"]
        starts: list[int] = []
        if users and self._header:
            marks = {index: f"8f3a1c{index:08d}e5b7d" for index in users}
            marked = [
                one | {"content": self._content(marks[index])} if index in marks else one
                for index, one in enumerate(prepared)
            ]
            try:
                between = _split(self._run(marked, given, extra, now), list(marks.values()))
            except TemplateError as error:
                logger.debug("user messages are not known in this chat: %s", error)
            else:
                contents = [prepared[index]["content"] for index in users]
                starts = _starts(text, between, contents, self._header)
        dropped = len(self._dropped) if text.startswith(self._dropped) else 0
        return Rendered(text[dropped:], tuple(max(0, start - dropped) for start in starts))

    def _given(self, add_generation_prompt: bool, tools: Any) -> dict[str, Any]:
        tools = self._no_tools if tools is None else tools
        return {"add_generation_prompt": add_generation_prompt, "tools": tools}

    def _run(
        self,
        prepared: list[dict[str, Any]],
        given: Mapping[str, Any],
        extra: Mapping[str, Any] | None,
        now: datetime,
    ) -> str:
        fixed = {"messages": prepared, **given}
        fixed |= {"bos_token": self.bos_token, "eos_token": self.eos_token}
        for name in extra or ():
            if name in fixed or name in self._program.globals:
                raise InvalidValue(f"a chat template's {name!r} cannot be changed")
        try:
            meter = _Meter(_weight([prepared, given, dict(extra or {})]), now, self._clock)
        except RecursionError:
            raise InvalidValue("the messages are nested too deeply") from None
        token = _METER.set(meter)
        pieces: list[str] = []
        length = 0
        try:
            for piece in self._program.generate(**(extra or {}), **fixed):
                length += len(piece)
                meter.spend(len(piece))
                if length > meter.value_chars:
                    meter.make(length)  # says so
                pieces.append(piece)
        except TemplateError:
            raise
        except RecursionError:
            raise TemplateError("the chat template calls itself too deeply") from None
        except Exception as error:
            raise TemplateError(f"the chat template cannot be rendered: {error}") from error
        finally:
            _METER.reset(token)
        return "".join(pieces)

    def _prepared(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        given: object = messages
        if not isinstance(given, (list, tuple)) or not given:
            raise InvalidValue("messages must be a list of at least one message")
        return [self._message(f"messages[{index}]", one) for index, one in enumerate(messages)]

    def _message(self, where: str, message: object) -> dict[str, Any]:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidValue(f"{where} must be an object with a role")
        made = dict(message)
        if made["role"] == "developer" and "developer" not in self.source:
            made["role"] = "system"
        content = made.get("content")
        if content is None and made["role"] == "assistant":
            content = ""
        made["content"] = self._content(_checked(f"{where}.content", content))
        if calls := made.get("tool_calls"):
            if not isinstance(calls, (list, tuple)):
                raise InvalidValue(f"{where}.tool_calls must be a list")
            made["tool_calls"] = [
                self._tool_call(f"{where}.tool_calls[{index}]", call)
                for index, call in enumerate(calls)
            ]
        return made

    def _content(self, content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
        """Return content as this template has it."""
        if isinstance(content, str):
            return content if self._texts else [{"type": "text", "text": content}]
        return content if self._parts else "\n".join(part["text"] for part in content)

    def _tool_call(self, where: str, call: object) -> dict[str, Any]:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(call, Mapping) or not isinstance(function, Mapping):
            raise InvalidValue(f"{where} must be an object with a function")
        arguments = function.get("arguments", "{}")
        if self._objects and isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError) as error:
                raise InvalidValue(f"{where}.function.arguments is no JSON: {error}") from None
        elif not self._objects and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**function, "arguments": arguments}}

    def _probe(self, messages: list[dict[str, Any]], **given: Any) -> str:
        """Render as it stands; empty where that fails, which is what a probe is for."""
        given = self._given(True, None) | given
        try:
            return self._run(messages, given, None, self._now())
        except TemplateError as error:
            logger.debug("a chat template refused a probe: %s", error)
            return ""

    def _learn_content(self) -> None:
        """Find out whether content may be text, and whether it may be parts."""
        text = "8f3a1ce5b7d"
        as_text = self._probe([{"role": "user", "content": text}])
        parts = [{"type": "text", "text": text}]
        if not as_text and (as_text := self._probe([{"role": "user", "content": text}], tools=[])):
            self._no_tools = []  # it counts on a list
        as_parts = self._probe([{"role": "user", "content": parts}])
        self._texts = text in as_text or text not in as_parts
        written = "'text'" in as_parts or '"text"' in as_parts
        self._parts = as_parts == as_text if text in as_text else text in as_parts and not written

    def _takes_objects(self) -> bool:
        """Find out whether the arguments of tool calls may be objects."""
        key = "k8f3a1c"
        function = {"name": "f5b7d2e", "arguments": {key: "v5b7d2e"}}
        # Mistral's templates want nine letters and digits.
        call = {"id": "a1b2c3d4e", "type": "function", "function": function}
        chat = [
            {"role": "user", "content": self._content("a")},
            {"role": "assistant", "content": self._content(""), "tool_calls": [call]},
            {"role": "tool", "content": self._content("b"), "tool_call_id": "a1b2c3d4e"},
            {"role": "assistant", "content": self._content("c")},
            {"role": "user", "content": self._content("d")},
        ]
        tool = {"name": "f5b7d2e", "description": "", "parameters": {"type": "object"}}
        text = self._probe(chat, tools=[{"type": "function", "function": tool}])
        return key in text and f"'{key}'" not in text

    def _learn_header(self) -> str:
        """Return what this template writes before a user's text, after what was before it."""
        first, answer, second = "8f3a1c", "5b7d2e", "c94e60"
        chat = [
            {"role": "user", "content": self._content(first)},
            {"role": "assistant", "content": self._content(answer)},
            {"role": "user", "content": self._content(second)},
        ]
        ends = []
        for messages in (chat, chat[:2]):
            _, found, end = self._probe(messages, add_generation_prompt=False).partition(answer)
            if not found:
                return ""
            ends.append(end)
        between, cut = ends[0].partition(second)[0], ends[1]
        shared = len(_common(between, cut))
        header = between[shared:]
        if shared < len(cut):
            # What ends the last answer is another than what ends the others: the header is what
            # stands before the first message, too, from where a word in brackets begins.
            before = self._probe(chat, add_generation_prompt=False).partition(first)[0]
            same = _common(between[::-1], before[::-1])[::-1]
            opened = re.search(r"[<\[\n]", same)
            header = same if len(same) < len(header) and not opened else header
            header = same[opened.start() :] if opened else header
        if second not in ends[0] or not header.strip():
            logger.info("this chat template does not show where user messages start")
            return ""
        return header


def _compiled(source: str) -> jinja2.Template:
    if len(source) > SOURCE_CHARS:
        raise TemplateError(
            f"the chat template has {len(source):,} characters; {SOURCE_CHARS:,} are read"
        )
    try:
        return _Environment().program(source)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(
            f"the chat template is wrong in line {error.lineno}: {error.message}"
        ) from error
    except (SyntaxError, RecursionError, MemoryError, ValueError) as error:
        raise TemplateError(f"the chat template is nested too deeply: {error}") from error


def _checked(where: str, content: object) -> str | list[dict[str, Any]]:
    """Return content, which is text or a list of text parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise InvalidValue(f"{where} must be a text or a list of parts")
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            continue
        if isinstance(kind, str) and kind != "text":
            raise InvalidValue(f"{where}[{index}] is of type {kind!r}; only text can be read here")
        raise InvalidValue(f"{where}[{index}] must be an object with a type and a text")
    return [dict(part) for part in content]


def _common(one: str, other: str) -> str:
    """Return what both begin with."""
    for index, (mine, theirs) in enumerate(zip(one, other)):  # noqa: B905 - up to the shorter
        if mine != theirs:
            return one[:index]
    return min(one, other, key=len)


def _split(text: str, marks: Iterable[str]) -> list[str]:
    """Return what stands before, between and after the marks; nothing if they are not all there."""
    pieces = []
    for mark in marks:
        if text.count(mark) != 1:
            return []
        piece, _, text = text.partition(mark)
        pieces.append(piece)
    return [*pieces, text]


def _starts(
    text: str, between: list[str], contents: list[str | list[dict[str, Any]]], header: str
) -> list[int]:
    """Return where user turns start in `text`, as far as it is `between` around `contents`."""
    starts = []
    at = 0
    for index, content in enumerate(contents if between else ()):
        before, after = between[index], between[index + 1]
        if not text.startswith(before, at):
            break
        if before.endswith(header):
            starts.append(at + len(before) - len(header))
        elif header in before:
            # Something stands between header and text; in a first turn that is the system message.
            starts.append(at + (before.rindex(header) if index else before.index(header)))
        at += len(before)
        if not isinstance(content, str):
            content = "".join(part["text"] for part in content)
        ends = [
            at + len(written)
            for written in (content, content.strip(), content.lstrip(), content.rstrip())
            if text.startswith(written + after, at)
        ]
        at = ends[0] if ends else text.find(after, at)
        if at < 0:
            break
    return starts


def token_starts(
    text: str, offsets: Sequence[int], tokenize: Tokenize
) -> tuple[IntArray, tuple[int, ...]]:
    """Return the tokens of a prompt, and where `offsets` are in them.

    The tokens are those of the whole text. A prompt that begins with the text of the token that
    `tokenize` adds has it once.

    Args:
        text: The prompt.
        offsets: In characters, ascending.
        tokenize: Called for the whole text, and for pieces that are another text's length in all,
            or up to 4 if pieces do not have the tokens that they have in the whole.

    Returns:
        The tokens, and the position of the token that begins at each offset; where a token lies
        across, one before it. Each position is below the number of tokens, and there once.

    Raises:
        InvalidValue: For offsets that do not ascend, or lie outside.
    """
    if list(offsets) != sorted(offsets) or (
        offsets and not 0 <= offsets[0] <= offsets[-1] <= len(text)
    ):
        raise InvalidValue(f"offsets must ascend up to {len(text)}, not {list(offsets)}")
    whole = as_tokens(tokenize(text, add_special=True, parse_special=True))
    added = as_tokens(tokenize("", add_special=True, parse_special=True))
    lead = int(added.size > 0 and whole.size > 0 and whole[0] == added[0])
    if lead and whole.size > 1 and whole[1] == whole[0]:
        whole, lead = whole[1:], 0  # the one that is left is the text's own
    starts: list[int] = []
    done_chars, done_tokens, spent = 0, lead, 0
    for offset in offsets:
        # Where one begins, and the tokens before it are those of the text before it.
        piece = text[done_chars:offset]
        spent += len(piece)
        if spent > 4 * len(text):
            logger.debug("tokens of pieces differ; later starts are not looked for")
            break
        tokens = (
            as_tokens(tokenize(piece, add_special=False, parse_special=True))
            if piece
            else whole[:0]
        )
        there = whole[done_tokens : done_tokens + tokens.size]
        same = np.flatnonzero(tokens[: there.size] != there)
        shared = int(same[0]) if same.size else there.size
        starts.append(done_tokens + shared)
        if shared == tokens.size:
            done_chars, done_tokens = offset, done_tokens + shared
    return whole, tuple(sorted({start for start in starts if start < whole.size}))
