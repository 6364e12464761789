"""Whatever a schema's grammar matches validates against the schema, and what cannot be is told."""

from __future__ import annotations

import json
import re
import socket
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llamakeep.errors import GrammarError
from llamakeep.gbnf import check_grammar
from llamakeep.json_schema import ANY_OBJECT, Rules, add_schema, compile_schema, literal
from llamakeep.json_schema.compiler import MOST_DEPTH
from tests.grammar_tools import texts_of

NODE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "kids": {"items": {"$ref": "#/$defs/node"}}},
    "required": ["v"],
}
LEAF = {"type": "object", "properties": {"kind": {"const": "leaf"}}, "required": ["kind"]}


def branch(kind: str) -> dict[str, Any]:
    properties = {"kind": {"const": kind}, "kids": {"type": "array", "items": {"$ref": "#"}}}
    return {"type": "object", "properties": properties, "required": ["kind", "kids"]}


def properties(**schemas: Any) -> dict[str, Any]:
    return {"type": "object", "properties": schemas}


ONE_OPTIONAL = properties(a={"type": "integer"}, b={"type": "boolean"}, c={"type": "null"})
GOOD: dict[str, Any] = {
    "true": True,
    "empty": {},
    "object": ANY_OBJECT,
    "types": {"type": ["string", "null", "integer"]},
    "enum": {"enum": ["a", 'b\n"', 1, 2.5, None, True, {"x": [1, 2], "y": {}}, []]},
    "many": {"enum": [f"value {n}" for n in range(500)] + ["", "value", 7]},
    "enum and type": {"type": ["integer", "string"], "enum": [1, 2, "x", 3.5, None], "minimum": 2},
    "const": {"const": "<|im_start|>[x]"},
    "required": ONE_OPTIONAL | {"required": ["a", "b", "c"], "additionalProperties": False},
    "one required": ONE_OPTIONAL | {"required": ["b"]},
    "last required": ONE_OPTIONAL | {"required": ["c"]},
    "none required": ONE_OPTIONAL,
    "closed": ONE_OPTIONAL | {"additionalProperties": False, "maxProperties": 3},
    "others": ONE_OPTIONAL | {"additionalProperties": {"type": "string"}, "required": ["b"]},
    "only others": {"additionalProperties": {"type": "integer"}, "minProperties": 1},
    "few others": {"type": "object", "maxProperties": 2},
    "no others": {"type": "object", "additionalProperties": False},
    "names": properties(**{"a": True, "ab": {"type": "null"}, "ä": {"type": "null"}, 'q"\\': True})
    | {"additionalProperties": {"type": "string"}},
    "unnamed required": properties(a={"type": "integer"})
    | {"required": ["zz"], "additionalProperties": {"type": "string"}},
    "forbidden": properties(a=False, b={"type": "integer"}),
    "array": {"items": {"type": "integer"}},
    "counted": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
    "no items": {"type": "array", "maxItems": 0},
    "one item": {"type": "array", "items": {"type": "null"}, "minItems": 1, "maxItems": 1},
    "false items": {"type": "array", "items": False},
    "many items": {"type": "array", "items": {"type": "null"}, "minItems": 70, "maxItems": 900},
    "tuple": {"type": "array", "prefixItems": [{"type": "string"}, {"type": "null"}]},
    "closed tuple": {"prefixItems": [{"type": "string"}, {"type": "null"}], "items": False},
    "open tuple": {"prefixItems": [{"type": "string"}], "items": {"type": "null"}, "minItems": 3},
    "cut tuple": {"prefixItems": [{"type": "string"}, {"type": "null"}], "maxItems": 1},
    "old tuple": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "items": [{"type": "string"}],
        "additionalItems": {"type": "integer"},
        "maxItems": 3,
    },
    "short": {"type": "string", "minLength": 3, "maxLength": 5},
    "long": {"type": "string", "minLength": 70},
    "at most": {"type": "string", "maxLength": 300},
    "between": {"type": "string", "minLength": 100, "maxLength": 100_000},
    "plain pattern": {"type": "string", "pattern": r"^[a-z]{2,4}-\d+(\.\d)?$"},
    "open pattern": {"type": "string", "pattern": "a|^b$|^c"},
    "classes": {"type": "string", "pattern": r"^\w+@[^\s@]+\.(?:com|org)$"},
    "escaped": {"type": "string", "pattern": r'^\(?["\\][\n\t]+.*[^a-z"]\)\x41\u00e9$'},
    "lazy": {"type": "string", "pattern": "^(?<name>ab?c*?){1,3}|$"},
    "counts in a pattern": {"type": "string", "pattern": "^[^ -~]{0,200}[a-zA-Z_]{3}$"},
    "date": {"type": "string", "format": "date"},
    "date-time": {"type": "string", "format": "date-time"},
    "time": {"type": "string", "format": "time"},
    "uuid": {"type": "string", "format": "uuid"},
    "number": {"type": "number"},
    "tens": {"type": "integer", "multipleOf": 10, "minimum": -55, "exclusiveMaximum": 1000},
    "hundreds": {"type": "integer", "multipleOf": 100},
    "old bounds": {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "type": "number",
        "minimum": 1,
        "exclusiveMinimum": True,
    },
    "reference": {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
    "to itself": properties(next={"anyOf": [{"$ref": "#"}, {"type": "null"}]})
    | {"required": ["next"]},
    "from one to the next": {
        "$defs": {f"t{n}": properties(next={"$ref": f"#/$defs/t{n + 1}"}) for n in range(400)}
        | {"t400": {"type": "null"}},
        "items": {"$ref": "#/$defs/t0"},
    },
    "escaped reference": {
        "$defs": {"a/b~c d": {"type": "null"}},
        "items": {"$ref": "#/$defs/a~1b~0c%20d"},
    },
    "beside a reference": {
        "definitions": {"x": {"type": "integer", "maximum": 9}},
        "properties": {"a": {"$ref": "#/definitions/x", "minimum": 3}},
        "required": ["a"],
    },
    "all": {
        "allOf": [
            {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
            {"properties": {"b": {"type": "string"}, "a": {"minimum": 5}}, "required": ["b"]},
        ]
    },
    "all closed": {
        "allOf": [
            {"properties": {"a": {"type": "integer"}, "b": True}, "additionalProperties": False},
            {"properties": {"a": {"maximum": 3}, "c": True}, "required": ["a"]},
        ]
    },
    "any": {"anyOf": [branch("and"), branch("or"), LEAF]},
    "one": {"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 3}]},
    "any and properties": {
        "properties": {"a": {"type": "integer"}},
        "anyOf": [
            {"required": ["a"]},
            {"required": ["b"], "properties": {"b": {"type": "string"}}},
            {"type": "null"},
        ],
    },
    "twice any": {
        "allOf": [
            {"anyOf": [{"minimum": 3}, {"type": "string"}]},
            {"anyOf": [{"maximum": 7}, {"maxLength": 2}]},
        ]
    },
    "annotations": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "https://example.org/x",
        "title": "x",
        "description": "x" * 1_000_000,
        "default": 5,
        "examples": [1],
        "x-own": {"type": 5},
        "type": "integer",
        "not": False,
        "uniqueItems": False,
    },
}


def validator(schema: Any) -> Any:
    return jsonschema_rs.validator_for(schema, validate_formats=True)


def check(schema: Any, seed: int, n_texts: int = 60) -> int:
    """Check that all texts that the grammar matches validate; return how many differ."""
    grammar = compile_schema(schema)
    valid = validator(schema)
    texts = set(texts_of(grammar, seed, n_texts))
    for text in texts:
        value = json.loads(text)
        assert valid.is_valid(value), (text, [each.message for each in valid.iter_errors(value)])
    return len(texts)


@pytest.mark.parametrize("name", GOOD)
def test_what_matches_validates(name: str) -> None:
    n_texts = check(GOOD[name], seed=len(name), n_texts=150)
    assert n_texts > (1 if name not in ("const", "no others", "false items", "no items") else 0)


BOUNDS = [(0, None), (None, 0), (1, 1), (-5, 5), (-0.5, 0.25), (0.1, 0.15), (3, 3.5), (99, 1001)]
BOUNDS += [(-20, -7), (-1.25, -1.2), (0, 1), (1.05, 12.5), (1e-5, 2e-5), (1000000.5, 1000001)]


@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
@pytest.mark.parametrize("kind", ["integer", "number"])
@pytest.mark.parametrize("is_open", [(False, False), (True, False), (False, True), (True, True)])
def test_numbers_stay_within_their_bounds(
    bounds: tuple[float | None, float | None], kind: str, is_open: tuple[bool, bool]
) -> None:
    names = ("exclusiveMinimum" if is_open[0] else "minimum",)
    names += ("exclusiveMaximum" if is_open[1] else "maximum",)
    given = {name: bound for name, bound in zip(names, bounds, strict=True) if bound is not None}
    schema = {"type": kind} | given
    try:
        check(schema, seed=3, n_texts=150)
    except GrammarError as error:
        assert "no value is left" in str(error)  # noqa: PT017 - which is right for some
        low, high = bounds
        assert low is not None
        assert high is not None
        valid = validator(schema)
        near = (low, high, (low + high) / 2) if kind == "number" else range(-30, 1100)
        assert not any(map(valid.is_valid, near))


@given(
    low=st.decimals(-2000, 2000, places=3),
    width=st.decimals(0, 50, places=3),
    opens=st.tuples(st.booleans(), st.booleans()),
    seed=st.integers(0, 99),
)
def test_numbers_stay_within_any_bounds(low: Any, width: Any, opens: Any, seed: int) -> None:
    names = ("exclusiveMinimum" if opens[0] else "minimum",)
    names += ("exclusiveMaximum" if opens[1] else "maximum",)
    bounds = (float(low), float(low + width))
    for kind in ("number", "integer"):
        schema = {"type": kind} | dict(zip(names, bounds, strict=True))
        if kind == "number" and (width or not any(opens)):
            check(schema, seed, 20)
        else:
            try:
                check(schema, seed, 20)
            except GrammarError:
                valid = validator(schema)
                whole = range(int(bounds[0]) - 1, int(bounds[1]) + 2)
                assert not any(map(valid.is_valid, [*whole, *bounds]))


# -- schemas at random -----------------------------------------------------------------------------

NAMES = st.sampled_from(["a", "b", "name", "x y", 'q"', "ä", "items", "$ref", "<s>"])
LEAVES = st.one_of(
    st.sampled_from([{}, True, {"type": "null"}, {"type": "boolean"}, {"type": "object"}]),
    st.builds(
        lambda low, n: {"type": "string", "minLength": low, "maxLength": low + n},
        st.integers(0, 5),
        st.integers(0, 90),
    ),
    st.builds(
        lambda kind, low, n: {"type": kind, "minimum": low, "maximum": low + n},
        st.sampled_from(["integer", "number"]),
        st.integers(-200, 200),
        st.integers(0, 300),
    ),
    st.builds(
        lambda values: {"enum": values},
        st.lists(st.one_of(st.integers(), st.text(max_size=5), st.none()), min_size=1),
    ),
    st.sampled_from([{"type": "string", "pattern": p} for p in ("^a+$", "x|y", r"^\d{2,3}")]),
    st.sampled_from([{"$ref": "#/$defs/one"}, {"$ref": "#/$defs/two"}]),
)


def grown(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    objects = st.builds(
        lambda schemas, required, others: (
            {
                "type": "object",
                "properties": schemas,
                "required": required,
            }
            | ({} if others is None else {"additionalProperties": others})
        ),
        st.dictionaries(NAMES, inner, max_size=4),
        st.lists(NAMES, max_size=2, unique=True),
        st.one_of(st.none(), st.just(False), inner),
    )
    arrays = st.builds(
        lambda items, low, n: {"items": items, "minItems": low, "maxItems": low + n},
        inner,
        st.integers(0, 3),
        st.integers(0, 3),
    )
    tuples = st.builds(
        lambda first, rest: {"type": "array", "prefixItems": first, "items": rest},
        st.lists(inner, min_size=1, max_size=3),
        inner,
    )
    several = st.builds(
        lambda key, schemas: {key: schemas},
        st.sampled_from(["anyOf", "allOf"]),
        st.lists(inner, min_size=1, max_size=3),
    )
    return st.one_of(objects, arrays, tuples, several)


SCHEMAS = st.builds(
    lambda schema, one, two: {"$defs": {"one": one, "two": two}, "allOf": [schema]},
    *(st.recursive(LEAVES, grown, max_leaves=8) for _ in range(3)),
)


@settings(suppress_health_check=list(HealthCheck), max_examples=150)
@given(schema=SCHEMAS, seed=st.integers(0, 1000))
def test_what_matches_any_schema_validates(schema: Any, seed: int) -> None:
    try:
        check(schema, seed, 15)
    except GrammarError as error:
        assert error.where.startswith("schema")  # noqa: PT017 - with a path, whatever it is


# -- what cannot be compiled -----------------------------------------------------------------------


def deep(n: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(n):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def doubling(name: str) -> dict[str, Any]:
    rest = {f"a{n}": {name: [{"$ref": f"#/$defs/a{n + 1}"}] * 2} for n in range(40)}
    return {"$defs": rest | {"a40": {"type": "integer"}}, "$ref": "#/$defs/a0"}


BAD: dict[str, tuple[Any, str, str]] = {
    "number": (5, "", "a schema is an object, true or false, not 5"),
    "false": (False, "", "no value is left"),
    "type": (properties(age={"type": "objekt"}), "properties.age.type", "'objekt' is no type"),
    "no type": ({"type": []}, "type", "is an empty list"),
    "null type": ({"type": None}, "type", "not null"),
    "properties": ({"properties": [1]}, "properties", "must be an object, not \\[1\\]"),
    "property": (properties(a=7), "properties.a", "not 7"),
    "required": ({"required": "a"}, "required", "must be a list of names"),
    "never there": (
        properties() | {"required": ["x", "a"], "additionalProperties": False},
        "required.0",
        "no value is left",
    ),
    "forbidden": (properties(a=False) | {"required": ["a"]}, "required.0", "no value is left"),
    "minLength": ({"minLength": -1}, "minLength", "of 0 or more, not -1"),
    "maxLength": ({"maxLength": True}, "maxLength", "not True"),
    "lengths": ({"type": "string", "minLength": 5, "maxLength": 4}, "", "no value is left"),
    "items": ({"items": 5}, "items", "not 5"),
    "many items": ({"type": "array", "minItems": 5000}, "", "minItems above 1,000"),
    "minimum": ({"minimum": "x"}, "minimum", "must be a number, not 'x'"),
    "too fine": ({"minimum": 1e-300}, "minimum", "too large or too fine"),
    "between": ({"type": "integer", "minimum": 1.2, "maximum": 1.8}, "", "no value is left"),
    "multipleOf": ({"multipleOf": 0.01}, "multipleOf", "only 1, 10, 100"),
    "enum": ({"enum": []}, "enum", "must be a list that is not empty"),
    "enum and type": ({"enum": ["x"], "type": "integer"}, "", "no value is left"),
    "lone": ({"const": "\ud800"}, "", "JSON cannot hold"),
    "no number": ({"enum": [float("nan")]}, "", "no value is left"),
    "not": (properties(a={"not": {}}), "properties.a.not", "is not supported"),
    "if": ({"if": {"type": "null"}, "then": {}}, "if", "is not supported"),
    "patternProperties": ({"patternProperties": {"x": {}}}, "patternProperties", "not supported"),
    "uniqueItems": ({"uniqueItems": True}, "uniqueItems", "is not supported"),
    "contains": ({"contains": {}}, "contains", "is not supported"),
    "minProperties": (properties(a=True) | {"minProperties": 1}, "", "not supported here"),
    "remote": ({"$ref": "https://example.org/x"}, "$ref", "only references within the schema"),
    "file": ({"$ref": "other.json#/x"}, "$ref", "only references within the schema"),
    "nowhere": ({"items": {"$ref": "#/$defs/x"}}, "items.$ref", "there is no '#/\\$defs/x'"),
    "no text": ({"$ref": 5}, "$ref", "must be a text"),
    "loop": ({"$ref": "#"}, "", "refers to itself and to nothing else"),
    "long loop": (
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        "$defs.a",
        "refers to itself",
    ),
    "loop of choices": ({"anyOf": [{"$ref": "#"}, {"type": "null"}]}, "anyOf", "back to itself"),
    "no choices": ({"anyOf": []}, "anyOf", "not empty"),
    "bad choice": ({"anyOf": [{}, {"oneOf": [{"type": 1}]}]}, "anyOf.1.oneOf.0.type", "1 is no"),
    "two patterns": ({"allOf": [{"pattern": "a"}, {"pattern": "b"}]}, "allOf.1.pattern", "another"),
    "pattern and length": ({"pattern": "a", "maxLength": 3}, "pattern", "together with"),
    "deep": (deep(MOST_DEPTH + 1), "properties.a." * 127 + "properties.a", "deeper than 128"),
    "very deep": (deep(900), "properties.a." * 127 + "properties.a", "deeper than 128"),
    "doubling": (doubling("allOf"), "$defs.a39", "more than 20,000 schemas"),
    "doubling choices": (doubling("anyOf"), "$defs.a39", "more than 20,000 schemas"),
    "many values": (
        {"allOf": [{"enum": list(range(1000))}, {"enum": list(range(1000))}]},
        "allOf.1",
        "too long to be compared",
    ),
    "many properties": (
        properties(**{f"property-{n}": {"type": "integer"} for n in range(5000)}),
        "properties.property-[0-9]+",
        "more than 262,144 characters",
    ),
    "endless": (properties(a={"$ref": "#"}) | {"required": ["a"]}, "", "without an end"),
    "ambiguous": (
        {
            "anyOf": [
                {"type": "array", "items": {"$ref": "#"}},
                {"type": "array", "prefixItems": [{"$ref": "#"}, {"type": "null"}]},
            ]
        },
        "",
        "too ambiguous",
    ),
}
PATTERNS = {
    "(a": "missing \\)",
    "a)": "unexpected \\)",
    "[a": "has no end",
    "[z-a]": "ends before it begins",
    "a{3,1}": "ends before it begins",
    "a{5000}": "more than 2000 repetitions",
    "a{x}": "expected a repetition",
    "*a": "nothing is before it",
    "(?=a)": "looking around",
    "(?<!a)b": "looking around",
    r"(a)\1": r"\\1 is not supported",
    r"\bword": r"\\b is not supported",
    r"\p{L}": r"\\p is not supported",
    "a^b": "an anchor",
    "(a$)": "an anchor",
    "a++": "possessive",
    r"\u12": "4 hexadecimal digits",
    "\\": "ends with",
    "(" * 200 + ")" * 200: "nested too deeply",
    "^(([a-z]{1,50}){1,50}){1,50}$": "too ambiguous",
    "^" + "abcdefghijklmnopqrstuvwxyz" * 2 + "(([a-z]?){30}){30}$": "too ambiguous",
    "^" + "abcdefghijklmnopqrstuvwxyz" * 2 + "((([a-z]?){12}){12}){12}$": "too ambiguous",
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_compiled_is_told_with_its_path(name: str) -> None:
    schema, path, said = BAD[name]
    with pytest.raises(GrammarError, match=said) as caught:
        compile_schema(schema, "response_format.schema")
    expected = "response_format.schema" + ("." + path if path else "")
    assert re.fullmatch(expected.replace("$", r"\$"), caught.value.where)
    assert str(caught.value).startswith(f"'{caught.value.where}': ")


@pytest.mark.parametrize("pattern", PATTERNS)
def test_what_is_no_pattern_is_told(pattern: str) -> None:
    with pytest.raises(GrammarError, match=PATTERNS[pattern]):
        compile_schema({"type": "string", "pattern": pattern})


def test_nothing_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(*_: Any) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", connect)
    for ref in ("https://example.org/x#/y", "http://127.0.0.1/x", "//x", "x.json", "#anchor"):
        with pytest.raises(GrammarError, match="within the schema"):
            compile_schema({"properties": {"a": {"$ref": ref}}})


def test_a_schema_can_be_a_part_of_another_text() -> None:
    rules = Rules()
    one = add_schema(rules, {"type": "integer"}, "one")
    two = add_schema(rules, {"type": "object", "properties": {"integer": {"type": "null"}}}, "two")
    text = rules.text(f"{literal('<call>')} ({one} | {two}) {literal('</call>')}")
    check_grammar(text)
    for found in texts_of(text, 1, 30):
        json.loads(found.removeprefix("<call>").removesuffix("</call>"))


def test_a_text_is_no_special_token() -> None:
    """Where a token's text stands in quotes as a whole, the token may be sampled."""
    schema = properties(**{"<|im_end|>": {"enum": ["[INST]", "</s>"]}})
    found = check_grammar(compile_schema(schema | {"required": ["<|im_end|>"]})).literals
    assert not any(text in found for text in ("<|im_end|>", "[INST]", "</s>"))


@pytest.mark.parametrize("value", [10**28, -(10**400), 1e300, 5e-324])
def test_listed_numbers_may_be_of_any_size(value: float) -> None:
    assert compile_schema({"type": "number", "enum": [value]})
    if isinstance(value, int):
        assert compile_schema({"type": "integer", "enum": [value]})
    else:
        check({"type": "number", "enum": [value]}, 1, 40)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(300)}},
        {"anyOf": [{"type": "string", "maxLength": n + 1} for n in range(300)]},
        {"type": "array", "items": {"type": "string", "maxLength": 1 << 20}},
        {
            "anyOf": [
                properties(kind={"const": f"v{n}"}, x={"type": "string"}) | {"required": ["kind"]}
                for n in range(400)
            ]
        },
    ],
    ids=["optional", "lengths", "long", "kinds"],
)
def test_what_is_large_and_harmless_is_taken(schema: Any) -> None:
    assert check_grammar(compile_schema(schema)).ends
