"""From schemas to rules."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final

from llamakeep.errors import GrammarError
from llamakeep.json_schema.flat import (
    TYPES,
    Budget,
    Flat,
    Node,
    Nothing,
    fail,
    followed,
    is_reference,
)
from llamakeep.json_schema.numbers import Bound, between, whole_between
from llamakeep.json_schema.pattern import pattern_rule
from llamakeep.json_schema.rules import Rules, literal
from llamakeep.json_schema.words import one_of, other_key

MOST_DEPTH: Final = 128
"""Of schemas within one another."""
MOST_SCHEMAS: Final = 20_000
"""That may be looked at, each as often as it is used."""
_MOST_CHARS: Final = 1 << 20
"""Of a text whose length a schema limits."""
_MOST_ITEMS: Final = 1000
_FEW: Final = 8
"""Up to so many values are simply listed."""

_DAY = (
    '("0" [13578] | "1" [02]) "-" ("0" [1-9] | [12] [0-9] | "3" [01])'
    ' | ("0" [469] | "11") "-" ("0" [1-9] | [12] [0-9] | "30")'
    ' | "02-" ("0" [1-9] | "1" [0-9] | "2" [0-8])'
)
_TIME = (
    '([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9] ":" [0-5] [0-9] ("." [0-9]{1,6})?'
    ' ("Z" | [+-] ([01] [0-9] | "2" [0-3]) ":" [0-5] [0-9])'
)
_FORMATS: Final = {
    "date": f'[1-9] [0-9]{{3}} "-" ({_DAY})',
    "time": _TIME,
    "date-time": f'[1-9] [0-9]{{3}} "-" ({_DAY}) "T" {_TIME}',
    "uuid": ' "-" '.join(f"[0-9a-fA-F]{{{n}}}" for n in (8, 4, 4, 4, 12)),
}


class Compiler:
    """Adds the rules of one schema. Of one thread, once.

    Args:
        rules: Where they go.
        schema: As it is read from JSON.
        where: What messages call it.
    """

    def __init__(self, rules: Rules, schema: Any, where: str) -> None:
        self._rules = rules
        self._root = Node(schema, where)
        self._known: dict[tuple[str, ...], str] = {}
        self._later: list[tuple[str, list[Node]]] = []
        self._depth = 0
        self._budget = Budget(MOST_SCHEMAS)
        self._here = where

    def compile(self) -> str:
        """Return the name of the schema's rule.

        Raises:
            GrammarError: With the path to what is wrong.
        """
        try:
            name = self._rule([self._root])
            while self._later:
                later, nodes = self._later.pop()
                self._define(later, nodes)
            return name
        except Nothing as nothing:
            fail(nothing.where, "no value is left that satisfies the schema")
        except GrammarError as error:
            if error.where.startswith(self._root.where):
                raise
            fail(self._here, str(error))

    # -- one value ---------------------------------------------------------------------------------

    def _rule(self, nodes: list[Node]) -> str:
        """Return the name of a rule for a value that satisfies some schemas."""
        is_elsewhere = len(nodes) == 1 and is_reference(nodes[0])
        if is_elsewhere:
            nodes = [followed(self._root, nodes[0])]
        key = tuple(sorted({node.where for node in nodes}))
        known = self._known.get(key)
        if known is not None:
            return known
        name = self._rules.reserve(nodes[0].where.rpartition(".")[2])
        self._known[key] = name
        if is_elsewhere:  # so that schemas which lead from one to the next are not nested
            self._later.append((name, nodes))
            return name
        try:
            self._define(name, nodes)
        except Nothing:
            del self._known[key]
            raise
        return name

    def _define(self, name: str, nodes: list[Node]) -> None:
        where = nodes[0].where
        self._depth += 1
        if self._depth > MOST_DEPTH:
            fail(where, f"schemas are nested deeper than {MOST_DEPTH}")
        self._here = where
        try:
            flat = Flat(where, self._budget)
            for node in nodes:
                flat.add(node, self._root)
            self._rules.define(name, self._body(flat))
        finally:
            self._depth -= 1

    def _optional(self, nodes: list[Node]) -> str | None:
        """Return the same; None where no value satisfies them."""
        try:
            return self._rule(nodes)
        except Nothing:
            return None

    def _body(self, flat: Flat) -> str:
        if flat.choices:
            return self._one_of(flat)
        if flat.values is not None:
            return self._values(flat)
        if flat.types == TYPES and not flat.whole:
            return self._rules.json("value")
        makers: dict[str, Callable[[Flat], str]] = {
            "object": self._object,
            "array": self._array,
            "string": self._string,
            "number": self._number,
        }
        parts, nothing = [], None
        for kind in flat.types:
            try:
                parts.append(makers[kind](flat) if kind in makers else self._rules.json(kind))
            except Nothing as error:
                nothing = error
        if not parts:
            raise nothing or Nothing(flat.where)
        return " | ".join(parts)

    def _one_of(self, flat: Flat) -> str:
        rest, options = flat.choose()
        parts, nothing = [], None
        for node in options:
            option = rest.copy()
            try:
                option.add(node, self._root)
                body = self._body(option)
            except Nothing as error:
                nothing = error
                continue
            parts.append(self._rules.add("option", body))
        if not parts:
            raise nothing or Nothing(flat.where)
        return " | ".join(dict.fromkeys(parts))

    # -- values that are listed --------------------------------------------------------------------

    def _values(self, flat: Flat) -> str:
        values = [each for each in flat.values or () if self._fits(flat, each)]
        if not values:
            raise Nothing(flat.where)
        texts = [each for each in values if isinstance(each, str)]
        if len(texts) > _FEW:
            parts = [one_of(self._rules, [_dumped(flat, text) for text in texts])]
            parts += [self._constant(flat, each) for each in values if not isinstance(each, str)]
        else:
            parts = [self._constant(flat, each) for each in values]
        return " | ".join(dict.fromkeys(parts))

    def _constant(self, flat: Flat, value: Any) -> str:
        ws = self._rules.json("ws")
        if isinstance(value, dict) and value:
            pairs = [
                f'{literal(_dumped(flat, key))} {ws} ":" {ws} {self._constant(flat, each)}'
                for key, each in value.items()
            ]
            return f'"{{" {ws} ' + f' "," {ws} '.join(pairs) + f' {ws} "}}"'
        if isinstance(value, list) and value:
            items = [self._constant(flat, each) for each in value]
            return f'"[" {ws} ' + f' "," {ws} '.join(items) + f' {ws} "]"'
        return literal(_dumped(flat, value))

    def _fits(self, flat: Flat, value: Any) -> bool:
        """Whether a listed value satisfies what else is said of it."""
        kind = _type_of(value)
        if kind not in flat.types:
            return False
        if kind == "number":
            number = Decimal(repr(value))
            if not number.is_finite() or (flat.whole and Fraction(number) % flat.multiple):
                return False
            low, high = flat.low, flat.high
            return not (low and (number < low.value or (low.is_open and number == low.value))) and (
                not (high and (number > high.value or (high.is_open and number == high.value)))
            )
        if kind == "string":
            if flat.pattern is not None:
                fail(flat.pattern[1], "is not supported together with listed values")
            return _within(len(value), flat.n_chars)
        if kind == "object" and (flat.properties or flat.required or flat.others):
            fail(flat.where, "properties are not supported together with listed objects")
        if kind == "array" and flat.tuples:
            fail(flat.where, "items are not supported together with listed arrays")
        counts = {"object": flat.n_properties, "array": flat.n_items}.get(kind)
        return counts is None or _within(len(value), counts)

    # -- objects -----------------------------------------------------------------------------------

    def _object(self, flat: Flat) -> str:
        rules = self._rules
        ws = rules.json("ws")
        names = list(dict.fromkeys([*flat.properties, *flat.required]))
        pairs: list[tuple[str, bool]] = []
        for name in names:
            nodes = flat.properties.get(name, []) + [
                node for known, node in flat.others if name not in known
            ]
            rule = self._optional(nodes) if nodes else rules.json("value")
            if rule is not None:
                key = literal(_dumped(flat, name))
                pair = rules.add("pair", f'{key} {ws} ":" {ws} {rule}')
                pairs.append((pair, name in flat.required))
            elif name in flat.required:
                raise Nothing(flat.required[name])
        other = self._other_pair(flat, names)
        least, most = flat.n_properties
        if not pairs:
            members = self._only_others(flat, other)
        else:
            n_required = sum(is_required for _, is_required in pairs)
            most_here = None if other else len(pairs)
            if least > n_required or (most is not None and (most_here is None or most_here > most)):
                fail(flat.where, "minProperties and maxProperties are not supported here")
            members = self._members(pairs, other)
        return f'"{{" {ws} {members} "}}"' if members else f'"{{" {ws} "}}"'

    def _other_pair(self, flat: Flat, names: list[str]) -> str | None:
        """Return a rule for a property without a name of its own; None where there is none."""
        if not flat.others and names:
            return None  # fewer are allowed than might be
        rule: str | None = self._rules.json("value")
        nodes = [node for _, node in flat.others]
        if nodes:
            rule = self._optional(nodes)
        if rule is None:
            return None
        ws, key = self._rules.json("ws"), other_key(self._rules, names)
        return self._rules.add("other-pair", f'{key} {ws} ":" {ws} {rule}')

    def _only_others(self, flat: Flat, other: str | None) -> str:
        least, most = flat.n_properties
        if other is None or most == 0:
            if least:
                raise Nothing(flat.where)
            return ""
        if least > 1:
            fail(flat.where, "minProperties above 1 needs properties that are required")
        ws = self._rules.json("ws")
        more = self._rules.add("more", f'"," {ws} {other}')
        most = None if most is None else min(most, _MOST_ITEMS)
        rest = self._rules.repeated(more, 0, None if most is None else most - 1)
        members = f"{other} {rest} {ws}"
        return members if least else f"({members})?"

    def _members(self, pairs: list[tuple[str, bool]], other: str | None) -> str:
        """Return the body for properties in order, of which some may be missing.

        Two chains of rules: what may come while nothing has come yet, and what may come after.
        """
        rules, ws = self._rules, self._rules.json("ws")
        first_required = next((n for n, (_, needed) in enumerate(pairs) if needed), len(pairs))
        after = rules.add("more", f'("," {ws} {other})*') if other else ""
        behind = {len(pairs): after}
        for index in range(len(pairs) - 1, 0, -1):
            pair, needed = pairs[index]
            here = f'"," {ws} {pair}' if needed else f'("," {ws} {pair})?'
            after = f"{here} {after}".strip()
            if index <= first_required + 1 or not needed or len(after) > 400:
                after = rules.add("more", after)
            behind[index] = after
        if first_required < len(pairs):
            begin = f"{pairs[first_required][0]} {behind[first_required + 1]}".strip()
        else:
            begin = f"{other} {behind[len(pairs)]}" if other else ""
        for index in range(min(first_required, len(pairs)) - 1, -1, -1):
            here = f"{pairs[index][0]} {behind[index + 1]}".strip()
            begin = rules.add("first", f"{here} | {begin}" if begin else here)
        if first_required < len(pairs):
            return f"{begin} {ws}"
        return f"({begin} {ws})?"

    # -- arrays ------------------------------------------------------------------------------------

    def _array(self, flat: Flat) -> str:
        rules, ws = self._rules, self._rules.json("ws")
        least, most = flat.n_items
        if most is not None and least > most:
            raise Nothing(flat.where)
        if least > _MOST_ITEMS:
            fail(flat.where, f"minItems above {_MOST_ITEMS:,} is not supported")
        n_first = max((len(first) for first, _ in flat.tuples), default=0)
        if most is not None:
            n_first, most = min(n_first, most), min(most, _MOST_ITEMS)
        items = [
            self._rule(nodes) if (nodes := _item_nodes(flat, index)) else rules.json("value")
            for index in range(n_first)
        ]
        rest = self._rest(flat, n_first)
        if rest is None and least > n_first:
            raise Nothing(flat.where)
        begin = f' "," {ws} '.join(items)
        if rest is None or most == n_first:
            return f'"[" {ws} {begin} {ws} "]"' if items else f'"[" {ws} "]"'
        more = rules.add("more", f'"," {ws} {rest}')
        done = max(n_first, 1)
        tail = rules.repeated(more, max(0, least - done), None if most is None else most - done)
        if items:
            return f'"[" {ws} {begin} {tail} {ws} "]"'
        inner = f"{rest} {tail} {ws}"
        return f'"[" {ws} {inner} "]"' if least else f'"[" {ws} ({inner})? "]"'

    def _rest(self, flat: Flat, n_first: int) -> str | None:
        """Return a rule for the items after the first ones; None where there are none."""
        if any(first and node is None for first, node in flat.tuples):
            return None  # fewer are allowed than might be
        nodes = _item_nodes(flat, n_first)
        return self._optional(nodes) if nodes else self._rules.json("value")

    # -- texts and numbers -------------------------------------------------------------------------

    def _string(self, flat: Flat) -> str:
        rules = self._rules
        least, most = flat.n_chars
        if most is not None and least > most:
            raise Nothing(flat.where)
        if flat.pattern is not None:
            pattern, where = flat.pattern
            if least or most is not None:
                fail(where, "is not supported together with minLength or maxLength")
            try:
                return f'"\\"" {pattern_rule(rules, pattern)} "\\""'
            except GrammarError as error:
                fail(where, str(error))
        if flat.format in _FORMATS and not least and most is None:
            return f'"\\"" {rules.add(flat.format, _FORMATS[flat.format])} "\\""'
        if not least and most is None:
            return rules.json("string")
        if least > _MOST_CHARS:
            fail(flat.where, f"minLength above {_MOST_CHARS:,} is not supported")
        most = None if most is None else min(most, _MOST_CHARS)
        return f'"\\"" {rules.repeated(rules.json("char"), least, most)} "\\""'

    def _number(self, flat: Flat) -> str:
        low, high = flat.low, flat.high
        if low is None and high is None and flat.multiple == 1:
            return self._rules.json("integer" if flat.whole else "number")
        body: str | None
        if flat.whole:
            step = flat.multiple
            smallest = None if low is None else _quotient(low, step, up=True)
            largest = None if high is None else _quotient(high, step, up=False)
            body = _multiples(smallest, largest, str(step)[1:])
        else:
            body = between(low, high)
        if body is None:
            raise Nothing(flat.where)
        return self._rules.add("number", body)


def _item_nodes(flat: Flat, index: int) -> list[Node]:
    """Return the schemas of an array's item."""
    found = []
    for first, rest in flat.tuples:
        node = first[index] if index < len(first) else rest
        if node is not None:
            found.append(node)
    return found


def _multiples(low: int | None, high: int | None, zeros: str) -> str | None:
    """Return the body of a rule for whole numbers with so many zeros behind; 0 has none."""
    if not zeros:
        return whole_between(low, high)
    negative = low is None or low < 0
    below = whole_between(low, -1 if high is None else min(-1, high)) if negative else None
    above = whole_between(1 if low is None else max(1, low), high)
    parts = [f'({part}) "{zeros}"' for part in (below, above) if part]
    if (low is None or low <= 0) and (high is None or high >= 0):
        parts.append('"0"')
    return " | ".join(parts) or None


def _quotient(bound: Bound, step: int, *, up: bool) -> int:
    """Return the nearest whole multiple within a bound, divided by the step."""
    value = bound.value / step
    number = math.ceil(value) if up else math.floor(value)
    if bound.is_open and number == value:
        number += 1 if up else -1
    return number


def _within(n: int, limits: tuple[int, int | None]) -> bool:
    least, most = limits
    return n >= least and (most is None or n <= most)


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    kinds = {dict: "object", list: "array", str: "string", int: "number", float: "number"}
    return kinds.get(type(value), "null")


def _dumped(flat: Flat, value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except ValueError as error:  # half of a surrogate pair, or no number
        fail(flat.where, f"has a value that JSON cannot hold: {error}")
    return text
