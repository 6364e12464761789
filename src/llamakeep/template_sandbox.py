"""The sandbox and the meter that chat templates run in.

A template is a program that someone on the internet wrote. Jinja's sandbox keeps it from Python's
internals; the meter keeps it from running on: loop turns, calls, and the characters of every value
it makes are counted against the size of what it was given, and its time is limited. All of Jinja
that chat templates use works as it does with Hugging Face's transformers; filters and methods that
they do not use are not there.
"""

from __future__ import annotations

import functools
import json
import operator
import re
from collections.abc import (
    Callable,
    ItemsView,
    Iterator,
    KeysView,
    ValuesView,
)
from contextvars import ContextVar
from datetime import datetime
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from llamakeep.errors import TemplateError

SOURCE_CHARS: Final = 1 << 18
"""Length of a template's source at most; the longest in use have a tenth of it."""
VALUE_CHARS: Final = 4 << 20
"""Length of any one value a template makes at most, besides 4 times what it was given."""
WORK_CHARS: Final = 64 << 20
"""Characters, items and steps of one rendering at most, besides 256 times what it was given."""
TIME_LIMIT_S: Final = 2.0
"""Processor time of one rendering at most, in seconds; a busy machine does not shorten it."""

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


def weigh(value: object, known: dict[int, int] | None = None) -> int:
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
        weight = 2 + sum(weigh(item, known) for item in value)
        if isinstance(value, dict):
            weight += sum(weigh(item, known) for item in value.values())
        known[id(value)] = weight
    return known[id(value)]


def _length(value: object) -> int:
    """Return how many characters or items `value` has, without looking inside."""
    if isinstance(value, int):
        return value.bit_length()
    sized = isinstance(value, (str, bytes, range, *_CONTAINERS))
    return len(value) if sized else 1  # type: ignore[arg-type]


class Meter:
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
        self.make(weigh(value))


METER: ContextVar[Meter] = ContextVar("meter")


class _Looped:
    """What a loop runs over, each turn counted."""

    def __init__(self, values: Any, turn_chars: int) -> None:
        self._values = values
        self._turn_chars = turn_chars

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Any]:
        spend = METER.get().spend
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
    """Jinja's sandbox with a meter. What runs in it finds its meter in `METER`."""

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
            METER.get().make(len(text) + fields * (1000 + weigh([args, kwargs])))
            return str(_Formatter(self).vformat(text, args, kwargs))

        return formatted

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call something for the template, counted."""
        meter = METER.get()
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
        meter = METER.get()
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
            METER.get().read(argument)
        return super().getitem(obj, argument)

    # What follows is called by templates, where _Metering put it.

    def looped(self, values: Any, turn_chars: int) -> _Looped:
        """Return what a loop shall run over."""
        return _Looped(values, turn_chars)

    def joined(self, *values: Any) -> str:
        """Return `~` of all values."""
        meter = METER.get()
        meter.make(sum(weigh(value) for value in values))
        return "".join(map(str, values))

    def compared(self, op: str, left: Any, right: Any) -> Any:
        """Return a comparison of two values; large ones take time, and are counted."""
        if isinstance(left, _CONTAINERS) and isinstance(right, _CONTAINERS):
            METER.get().read([left, right])
        elif not isinstance(right, dict):
            METER.get().spend(_length(left) + _length(right))
        return _COMPARE[op](left, right)

    def made(self, value: Any) -> Any:
        """Return `value`; the call is counted, and what it returns."""
        return value

    def flat(self, value: Any) -> Any:
        """Return `value`, counted with all inside it."""
        METER.get().read(value)
        return value


def _comparison(op: str, environment: _Environment) -> Callable[[Any, Any], Any]:
    return lambda left, right: environment.compared(op, left, right)


def _check_text(meter: Meter, text: str, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Count what a method of a string will make, and return its arguments."""
    if name == "join" and args:
        items = list(args[0])
        meter.make(sum(map(weigh, items)) + len(text) * len(items))
        return (items, *args[1:])
    if name == "replace" and len(args) > 1 and all(isinstance(arg, str) for arg in args[:2]):
        meter.make(len(text) + text.count(args[0]) * len(args[1]))
    else:
        meter.spend(len(text))
    return args


def _check_percent(meter: Meter, text: str, values: Any) -> None:
    if _WIDTH.search(text):
        raise TemplateError("the chat template asks for a width of more than 99, or has a long key")
    meter.make(len(text) + text.count("%") * (100 + weigh(values)))


@jinja2.pass_context
def _written(_context: Any, value: Any) -> Any:
    """Count what is about to be written."""
    METER.get().read(value)
    return value


def _raise_exception(message: Any) -> None:
    raise TemplateError(str(message))


def _strftime_now(form: str) -> str:
    if len(form) > 200 or re.search(r"\d{3}", form):
        raise TemplateError("the chat template asks for a date that is too long")
    return METER.get().now.strftime(form)


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
        meter = METER.get()
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
            meter.make(len(args[0]) * weigh(options))
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


def compiled(source: str) -> jinja2.Template:
    """Return a template in the sandbox, to be rendered with a meter in `METER`.

    Raises:
        TemplateError: For a source that is too long, wrong, or nested too deeply.
    """
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
