"""What several schemas demand together: references followed, `allOf` and neighbours made one."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final, NoReturn
from urllib.parse import unquote

from llamakeep.errors import GrammarError
from llamakeep.json_schema.numbers import MOST_DIGITS, Bound

TYPES: Final = ("object", "array", "string", "number", "boolean", "null")

_MOST_COMPARED: Final = 100_000
"""Pairs of values."""

# What these mean no grammar can hold, unless their value asks for nothing.
_REFUSED: Final[dict[str, tuple[Any, ...]]] = {
    "not": (False,),
    "if": (True, {}),
    "dependencies": ({},),
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "patternProperties": ({},),
    "propertyNames": (True, {}),
    "contains": (),
    "uniqueItems": (False,),
    "unevaluatedItems": (True, {}),
    "unevaluatedProperties": (True, {}),
    "$dynamicRef": (),
    "$recursiveRef": (),
}
_BESIDE: Final = {"$ref", "$defs", "definitions", "$schema", "$id", "$comment", "title"} | {
    "description",
    "default",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
}
_OBJECT: Final = (
    "properties",
    "required",
    "additionalProperties",
    "minProperties",
    "maxProperties",
)
_ARRAY: Final = ("items", "prefixItems", "additionalItems", "minItems", "maxItems")
_STRING: Final = ("minLength", "maxLength", "pattern")
_NUMBER: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


class Nothing(Exception):
    """No value satisfies a schema.

    Args:
        where: The path to what forbids the last one.
    """

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self.where = where


class Budget:
    """Counts, and refuses what is too much.

    Args:
        most: How many schemas may be looked at, each as often as it is used.
    """

    def __init__(self, most: int) -> None:
        self._most = self._left = most

    def spend(self, where: str) -> None:
        """Count one.

        Raises:
            GrammarError: When it was one too many.
        """
        self._left -= 1
        if self._left < 0:
            fail(where, f"the schema leads to more than {self._most:,} schemas")


@dataclass(frozen=True, slots=True)
class Node:
    """A schema and the path to it."""

    schema: Any
    where: str

    def at(self, *keys: str | int) -> str:
        """Return the path to what is in it."""
        return ".".join((self.where, *map(str, keys)))

    def child(self, *keys: str | int) -> Node:
        """Return a schema in it."""
        schema = self.schema
        for key in keys:
            schema = schema[key]
        return Node(schema, self.at(*keys))


def fail(where: str, why: str) -> NoReturn:
    """Raise for what is wrong at a path."""
    raise GrammarError(f"'{where}': {why}", where=where)


@dataclass(slots=True)
class Flat:
    """What a value must be.

    Attributes:
        where: The path to the first of the schemas.
        types: Those that are left.
        whole: A number must be whole.
        values: The only values; None for any.
        choices: Of each list, one schema must be satisfied, too.
        chosen: The paths to the lists of which one was, or is still to be.
        properties: The schemas of each.
        required: Those that must be there, with the path to where that is said.
        others: For each schema that limits other properties: those it names, and what others are.
        least, most: Number of properties.
        tuples: The schemas of an array's first items, and of the rest.
        low, high: Of numbers.
        multiple: A number must be a multiple of it.
        n_items: Number of items.
        n_chars: Length of a text.
        pattern: What it matches, and the path to that.
        format: Of a text.
        budget: Counts the schemas that were looked at.
    """

    where: str
    budget: Budget
    types: tuple[str, ...] = TYPES
    whole: bool = False
    values: list[Any] | None = None
    choices: list[list[Node]] = field(default_factory=list)
    chosen: dict[str, bool] = field(default_factory=dict)
    properties: dict[str, list[Node]] = field(default_factory=dict)
    required: dict[str, str] = field(default_factory=dict)
    others: list[tuple[frozenset[str], Node]] = field(default_factory=list)
    n_properties: tuple[int, int | None] = (0, None)
    tuples: list[tuple[list[Node], Node | None]] = field(default_factory=list)
    low: Bound | None = None
    high: Bound | None = None
    multiple: int = 1
    n_items: tuple[int, int | None] = (0, None)
    n_chars: tuple[int, int | None] = (0, None)
    pattern: tuple[str, str] | None = None
    format: str = ""

    def copy(self) -> Flat:
        """Return one that may change."""
        return copy.copy(self)._own()

    def _own(self) -> Flat:
        for name in ("choices", "chosen", "required", "others", "tuples"):
            setattr(self, name, copy.copy(getattr(self, name)))
        self.properties = {name: list(nodes) for name, nodes in self.properties.items()}
        return self

    # -- one schema more ---------------------------------------------------------------------------

    def add(self, node: Node, root: Node, trail: tuple[str, ...] = ()) -> None:
        """Demand what a schema does, too.

        Args:
            node: The schema.
            root: The one that references are looked up in.
            trail: Paths of the schemas that led to it without asking for anything.

        Raises:
            GrammarError: For what is no schema, or cannot be compiled.
            Nothing: When no value is left.
        """
        schema = node.schema
        self.budget.spend(node.where)
        if node.where in trail:
            fail(node.where, "refers to itself and to nothing else")
        trail = (*trail, node.where)
        if schema is True:
            return
        if schema is False:
            raise Nothing(node.where)
        if not isinstance(schema, dict):
            fail(node.where, f"a schema is an object, true or false, not {_shown(schema)}")
        for name, neutral in _REFUSED.items():
            if name in schema and not any(schema[name] == each for each in neutral):
                if name == "if" and not {"then", "else"} & schema.keys():
                    continue
                fail(node.at(name), "is not supported")
        self._add_types(node)
        self._add_values(node)
        self._add_object(node)
        self._add_array(node)
        self._add_string(node)
        self._add_number(node)
        if "$ref" in schema:
            self.add(resolve(root, node), root, trail)
        for index in range(len(_list(node, "allOf"))):
            self.add(node.child("allOf", index), root, trail)
        for name in ("anyOf", "oneOf"):
            if name in schema:
                self._add_choices(node, name)

    def _add_choices(self, node: Node, name: str) -> None:
        where = node.at(name)
        options = [node.child(name, index) for index in range(len(_list(node, name)))]
        if self.chosen.get(where):
            fail(where, "comes back to itself and asks for nothing else")
        if where not in self.chosen:  # to satisfy one of a list twice is to do it once
            self.chosen[where] = False
            self.choices.append(options)

    def choose(self) -> tuple[Flat, list[Node]]:
        """Return what is demanded besides the first list of choices, and that list."""
        rest = self.copy()
        options = rest.choices.pop(0)
        rest.chosen[options[0].where.rpartition(".")[0]] = True
        return rest, options

    def _add_types(self, node: Node) -> None:
        schema = node.schema
        given = schema.get("type")
        if given is None:
            if "type" in schema:
                fail(node.at("type"), "must be a type or a list of types, not null")
            given = [
                kind
                for kind, names in (
                    ("object", _OBJECT),
                    ("array", _ARRAY),
                    ("string", _STRING),
                    ("number", _NUMBER),
                )
                if any(name in schema for name in names)
            ] or list(TYPES)
        elif not isinstance(given, list):
            given = [given]
        elif not given:
            fail(node.at("type"), "is an empty list")
        for kind in given:
            if not isinstance(kind, str) or kind not in (*TYPES, "integer"):
                fail(node.at("type"), f"{_shown(kind)} is no type")
        if "number" not in given and "integer" in given:
            self.whole = True
        kinds = {"number" if kind == "integer" else kind for kind in given}
        self.types = tuple(kind for kind in self.types if kind in kinds)
        if not self.types:
            raise Nothing(node.at("type"))

    def _add_values(self, node: Node) -> None:
        schema = node.schema
        given: list[list[Any]] = []
        if "const" in schema:
            given.append([schema["const"]])
        if "enum" in schema:
            given.append(_list(node, "enum"))
        for values in given:
            if self.values is None:
                self.values = list(values)
            elif len(self.values) * len(values) > _MOST_COMPARED:
                fail(node.where, "two lists of values are too long to be compared")
            else:
                self.values = [each for each in self.values if any(same(each, v) for v in values)]

    def _add_object(self, node: Node) -> None:
        schema = node.schema
        properties = schema.get("properties", {})
        if not isinstance(properties, dict):
            fail(node.at("properties"), f"must be an object, not {_shown(properties)}")
        for name in properties:
            self.properties.setdefault(name, []).append(node.child("properties", name))
        required = schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
            fail(node.at("required"), "must be a list of names")
        for index, name in enumerate(required):
            self.required.setdefault(name, node.at("required", index))
        if "additionalProperties" in schema:
            self.others.append((frozenset(properties), node.child("additionalProperties")))
        self.n_properties = _both(
            self.n_properties, _count(node, "minProperties"), _count(node, "maxProperties")
        )

    def _add_array(self, node: Node) -> None:
        schema = node.schema
        self.n_items = _both(self.n_items, _count(node, "minItems"), _count(node, "maxItems"))
        name, rest = "prefixItems", "items"
        if isinstance(schema.get("items"), list):
            name, rest = "items", "additionalItems"
        if name in schema or (rest in schema and rest == "items"):
            first = [node.child(name, n) for n in range(len(_list(node, name)))]
            self.tuples.append((first, node.child(rest) if rest in schema else None))

    def _add_string(self, node: Node) -> None:
        schema = node.schema
        self.n_chars = _both(self.n_chars, _count(node, "minLength"), _count(node, "maxLength"))
        if "pattern" in schema:
            pattern = schema["pattern"]
            if not isinstance(pattern, str):
                fail(node.at("pattern"), f"must be a text, not {_shown(pattern)}")
            if self.pattern is not None and self.pattern[0] != pattern:
                fail(node.at("pattern"), "is not supported together with another one")
            self.pattern = (pattern, node.at("pattern"))
        if isinstance(schema.get("format"), str):
            self.format = self.format or schema["format"]

    def _add_number(self, node: Node) -> None:
        schema = node.schema
        low_open, high_open = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
        for name in ("minimum", "exclusiveMinimum"):
            # In the oldest drafts the second one is a switch of the first.
            if name in schema and not isinstance(schema[name], bool):
                is_open = name != "minimum" or low_open is True
                bound = Bound(_decimal(node, name), is_open)
                if self.low is None or _key(bound, 1) > _key(self.low, 1):
                    self.low = bound
        for name in ("maximum", "exclusiveMaximum"):
            if name in schema and not isinstance(schema[name], bool):
                is_open = name != "maximum" or high_open is True
                bound = Bound(_decimal(node, name), is_open)
                if self.high is None or _key(bound, -1) < _key(self.high, -1):
                    self.high = bound
        if "multipleOf" in schema:
            step = _decimal(node, "multipleOf")
            if step <= 0:
                fail(node.at("multipleOf"), "must be above 0")
            if step != step.to_integral_value() or set(str(int(step)).lstrip("1")) - {"0"}:
                fail(node.at("multipleOf"), "only 1, 10, 100 and so on are supported")
            self.whole = True
            self.multiple = max(self.multiple, int(step))


def resolve(root: Node, node: Node) -> Node:
    """Return the schema that a reference means.

    Raises:
        GrammarError: When it leads nowhere, or out of the schema: nothing is ever fetched.
    """
    where, ref = node.at("$ref"), node.schema["$ref"]
    if not isinstance(ref, str):
        fail(where, f"must be a text, not {_shown(ref)}")
    if ref != "#" and not ref.startswith("#/"):
        fail(where, f"only references within the schema are followed (#/...), not {_shown(ref)}")
    found = root
    for part in ref.split("/")[1:]:
        key: str | int = unquote(part).replace("~1", "/").replace("~0", "~")
        schema = found.schema
        if isinstance(schema, list) and str(key).isdecimal() and int(key) < len(schema):
            key = int(key)
        elif not isinstance(schema, dict) or key not in schema:
            fail(where, f"there is no {_shown(ref)}")
        found = found.child(key)
    return found


def is_reference(node: Node) -> bool:
    """Whether a schema is a reference, and says nothing else."""
    schema = node.schema
    return isinstance(schema, dict) and "$ref" in schema and not schema.keys() - _BESIDE


def followed(root: Node, node: Node) -> Node:
    """Return the schema that a reference means in the end.

    Raises:
        GrammarError: As `resolve`, and when it leads back to itself.
    """
    seen: set[str] = set()
    while is_reference(node):
        if node.where in seen:
            fail(node.where, "refers to itself and to nothing else")
        seen.add(node.where)
        node = resolve(root, node)
    return node


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal as JSON has it: 1 is 1.0, but not true."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return (type(one) is type(other) and one == other) or _is_number(one, other)


def _is_number(one: Any, other: Any) -> bool:
    numbers = isinstance(one, (int, float)) and isinstance(other, (int, float))
    return numbers and one == other


def _key(bound: Bound, sign: int) -> tuple[Decimal, int]:
    return bound.value, sign * bound.is_open


def _both(
    held: tuple[int, int | None], least: int | None, most: int | None
) -> tuple[int, int | None]:
    low, high = held
    if most is not None:
        high = most if high is None else min(high, most)
    return max(low, least or 0), high


def _count(node: Node, name: str) -> int | None:
    value = node.schema.get(name)
    if value is None and name not in node.schema:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        fail(node.at(name), f"must be a whole number of 0 or more, not {_shown(value)}")
    return value


def _decimal(node: Node, name: str) -> Decimal:
    value = node.schema[name]
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value):
        fail(node.at(name), f"must be a number, not {_shown(value)}")
    number = Decimal(repr(value)).normalize()
    if number and (abs(number.adjusted()) > MOST_DIGITS or len(number.as_tuple().digits) > 20):
        fail(node.at(name), f"is too large or too fine a number: {_shown(value)}")
    return number


def _list(node: Node, name: str) -> list[Any]:
    if name not in node.schema:
        return []
    value = node.schema[name]
    if not isinstance(value, list) or (not value and name != "prefixItems"):
        fail(node.at(name), "must be a list that is not empty")
    return value


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
