"""Grammars of calls, followed by llama.cpp: what each family writes matches, all else does not."""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from llamakeep.errors import GrammarError
from llamakeep.gbnf import check_grammar
from llamakeep.json_schema import Rules
from llamakeep.tool_calls import FAMILIES, GENERIC, Format, Parser, Reply, Said, Thoughts, Tool
from llamakeep.tool_calls.formats import HERMES, LLAMA, MISTRAL, MISTRAL_NAMED, QWEN_CODER
from llamakeep.tool_calls.grammar import grammar_of
from llamakeep.tool_calls.reasoning import THINK
from llamakeep.tool_calls.xml_values import fits_tags

if TYPE_CHECKING:
    from llama_cpp import Llama

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"type": "string", "enum": ["C", "F"]},
    },
    "required": ["city"],
}
TOOLS = (Tool("weather", parameters=SCHEMA), Tool("time"))
A = '{"city": "Ro<me", "days": 2}'
SAMPLES = {
    HERMES: [
        f'<tool_call>\n{{"name": "weather", "arguments": {A}}}\n</tool_call>',
        '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>',
    ],
    QWEN_CODER: [
        "<tool_call>\n<function=weather>\n<parameter=city>\nRo<me</p>\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n<parameter=unit>\nC\n</parameter>\n"
        "</function>\n</tool_call>",
        "<tool_call>\n<function=time>\n</function>\n</tool_call>",
    ],
    MISTRAL_NAMED: [f"[TOOL_CALLS]weather[ARGS]{A}", "[TOOL_CALLS]time[ARGS]{}"],
    MISTRAL: [f'[TOOL_CALLS] [{{"name": "weather", "arguments": {A}}}]'],
    LLAMA: [
        f'{{"name": "weather", "parameters": {A}}}',
        '{"name": "time", "parameters": {}}',
    ],
    GENERIC: [f'{{"tool_calls": [{{"name": "weather", "arguments": {A}}}]}}'],
}
BETWEEN = {HERMES: "\n", QWEN_CODER: "\n", MISTRAL_NAMED: "", LLAMA: "; "}


class Grammars:
    """Asks llama.cpp's grammar sampler whether a text matches."""

    def __init__(self, llm: Llama) -> None:
        import llama_cpp

        self._api: Any = llama_cpp
        self._llm = llm
        self._vocab = llama_cpp.llama_model_get_vocab(llm.model)
        self._end = llama_cpp.llama_vocab_eos(self._vocab)

    def match(self, grammar: str, text: str) -> bool:
        check_grammar(grammar)
        sampler = self._api.llama_sampler_init_grammar(self._vocab, grammar.encode(), b"root")
        assert sampler
        try:
            tokens = self._llm.tokenize(text.encode(), add_bos=False, special=False)
            for token in tokens:
                if not self._allows(sampler, token):
                    return False
                self._api.llama_sampler_accept(sampler, token)
            return self._allows(sampler, self._end)
        finally:
            self._api.llama_sampler_free(sampler)

    def _allows(self, sampler: Any, token: int) -> bool:
        data = (self._api.llama_token_data * 1)(self._api.llama_token_data(token, 0.0, 0.0))
        array = self._api.llama_token_data_array(data, 1, -1, False)
        self._api.llama_sampler_apply(sampler, ctypes.byref(array))
        return bool(data[0].logit > float("-inf"))


@pytest.fixture
def grammars(smollm2_path: Path, make_llama: Callable[..., Llama]) -> Grammars:
    return Grammars(make_llama(smollm2_path, vocab_only=True))


def names(form: Format) -> str:
    return form.name


@pytest.mark.parametrize("form", [GENERIC, *FAMILIES], ids=names)
def test_required_calls_match_and_nothing_else_does(form: Format, grammars: Grammars) -> None:
    grammar = grammar_of(form, TOOLS, required=True)
    assert grammar.triggers == ()
    for sample in SAMPLES[form]:
        assert grammars.match(grammar.text, sample)
        for wrong in ("", "Hello", sample[:-1], sample + "x", sample.replace("e", "é")):
            assert not grammars.match(grammar.text, wrong)
        other = sample.replace("weather", "wetter").replace("time", "tim")
        assert not grammars.match(grammar.text, other)


@pytest.mark.parametrize("form", BETWEEN, ids=names)
def test_several_calls_match_where_they_may_come(form: Format, grammars: Grammars) -> None:
    text = BETWEEN[form].join(SAMPLES[form])
    assert grammars.match(grammar_of(form, TOOLS, required=True).text, text)
    assert not grammars.match(grammar_of(form, TOOLS, required=True, parallel=False).text, text)


@pytest.mark.parametrize("form", [MISTRAL, GENERIC], ids=names)
def test_so_do_lists(form: Format, grammars: Grammars) -> None:
    (one,) = SAMPLES[form]
    end = one.rindex("]")
    two = f'{one[:end]}, {{"name": "time", "arguments": {{}}}}{one[end:]}'
    assert grammars.match(grammar_of(form, TOOLS, required=True).text, two)
    assert not grammars.match(grammar_of(form, TOOLS, required=True, parallel=False).text, two)


@pytest.mark.parametrize("form", FAMILIES, ids=names)
def test_calls_that_may_come_begin_with_their_marker(form: Format, grammars: Grammars) -> None:
    grammar = grammar_of(form, TOOLS, required=False)
    assert grammar.triggers == tuple(marker.text for marker in form.markers)
    sample = SAMPLES[form][0]
    sample = "<|python_tag|>" + sample if form is LLAMA else sample
    assert grammars.match(grammar.text, sample)
    assert not grammars.match(grammar.text, sample + " text")
    if form is QWEN_CODER:
        assert grammars.match(grammar.text, "<function=time>\n</function>")


def test_the_whole_answer_may_say_something_instead(grammars: Grammars) -> None:
    said = '{"response": "I \\"know\\"\\u00e9\\n"}'
    assert grammars.match(grammar_of(GENERIC, TOOLS, required=False).text, said)
    assert not grammars.match(grammar_of(GENERIC, TOOLS, required=True).text, said)


@pytest.mark.parametrize("thoughts", [None, THINK])
@pytest.mark.parametrize("form", [GENERIC, *FAMILIES], ids=names)
def test_what_is_said_may_have_a_schema(
    form: Format, thoughts: Thoughts | None, grammars: Grammars
) -> None:
    said = {
        "type": "object",
        "properties": {"response": {"type": "string"}},
        "required": ["response"],
    }
    grammar = grammar_of(form, TOOLS, required=False, thoughts=thoughts, said=Said(said))
    assert grammar.triggers == ()
    for text in (*SAMPLES[form], '{"response": "x"}'):
        assert grammars.match(grammar.text, text)
        assert grammars.match(grammar.text, f"<think>so</think>\n{text}") is bool(thoughts)
    for text in ("Hello", '{"response": 5}', "{}"):
        assert not grammars.match(grammar.text, text)
    required = grammar_of(form, TOOLS, required=True, said=Said(said)).text
    assert not grammars.match(required, '{"response": "x"}')
    with pytest.raises(GrammarError, match="format"):
        grammar_of(form, TOOLS, required=False, said=Said({"type": 5}))
    parser = Parser(replace(form, wraps=False), {"time": TOOLS[1]}, lambda: "id")
    assert Reply.of(parser.feed('{"response": "x"}') + parser.finish()).text == '{"response": "x"}'


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("form", [GENERIC, *FAMILIES], ids=names)
def test_thoughts_come_before(form: Format, thinking: bool, grammars: Grammars) -> None:
    sample = SAMPLES[form][0]
    grammar = grammar_of(form, TOOLS, required=True, thoughts=THINK, thinking=thinking)
    before = "I write <tool_call>, a<</think" + "</think>\n\n"
    before = before if thinking else f"\n<think>{before}"
    assert grammar.triggers == ()
    assert grammars.match(grammar.text, before + sample)
    assert grammars.match(grammar.text, sample) is not thinking
    assert not grammars.match(grammar.text, before + "Hello")


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("form", FAMILIES, ids=names)
def test_a_marker_in_thoughts_is_none(form: Format, thinking: bool, grammars: Grammars) -> None:
    sample = SAMPLES[form][0]
    sample = "<|python_tag|>" + sample if form is LLAMA else sample
    marker = form.markers[0].text
    grammar = grammar_of(form, TOOLS, required=False, thoughts=THINK, thinking=thinking)
    first = THINK.close if thinking else f"{THINK.open}I write {marker}.{THINK.close}"
    assert grammar.triggers[0] == (THINK.close if thinking else THINK.open)
    for after in ("\n", "\n\nI <look [it up: ", sample, "Now " + sample):
        assert grammars.match(grammar.text, first + after)
    assert not grammars.match(grammar.text, f"{first}{marker} is one")
    assert (marker in grammar.triggers) is not thinking
    assert grammars.match(grammar.text, sample) is not thinking


def test_arguments_are_held_to_what_is_said(grammars: Grammars) -> None:
    def held(rules: Rules, tool: Tool, schema: Any, where: str) -> str:
        assert tool in TOOLS
        assert where.startswith(f"{tool.name}.parameters")
        kinds = {"object": '"{" "\\"x\\": 1" "}"', "integer": "[0-9]"}
        return rules.add("held", kinds[schema["type"]])

    for form in (GENERIC, *FAMILIES):
        grammar = grammar_of(form, TOOLS, required=True, held=held).text
        for sample in SAMPLES[form]:
            if form is QWEN_CODER:
                assert grammars.match(grammar, sample)
                is_held = "\n2\n" in sample
                assert grammars.match(grammar, sample.replace("\n2\n", "\n22\n")) is not is_held
                continue
            other = sample.replace(A, '{"x": 1}').replace("{}", '{"x": 1}')
            assert grammars.match(grammar, other)
            assert not grammars.match(grammar, sample)


@pytest.mark.parametrize("thoughts", [None, THINK])
@pytest.mark.parametrize("required", [False, True])
@pytest.mark.parametrize("form", [GENERIC, *FAMILIES], ids=names)
def test_many_tools_make_a_grammar_that_is_taken(
    form: Format, required: bool, thoughts: Thoughts | None
) -> None:
    tools = [Tool(f"tool_{index}", "x" * 100, SCHEMA) for index in range(128)]
    check_grammar(grammar_of(form, tools, required=required, thoughts=thoughts).text)


@pytest.mark.parametrize("form", [GENERIC, *FAMILIES], ids=names)
def test_what_a_grammar_takes_the_parser_takes(form: Format) -> None:
    for sample in SAMPLES[form]:
        parser = Parser(form, {tool.name: tool for tool in TOOLS}, lambda: "id")
        reply = Reply.of(parser.feed(sample) + parser.finish())
        assert reply.text == ""
        for call in reply.calls:
            assert isinstance(json.loads(call.arguments), dict)
        assert len(reply.calls) == 1


@pytest.mark.parametrize("form", [GENERIC, *FAMILIES], ids=names)
def test_arguments_are_held_to_their_schema(form: Format, grammars: Grammars) -> None:
    grammar = grammar_of(form, TOOLS, required=True).text
    sample = SAMPLES[form][0]
    assert grammars.match(grammar, sample)
    if form is QWEN_CODER:
        wrong = [sample.replace("\n2\n", "\ntwo\n"), sample.replace("\nC\n", "\nK\n")]
        wrong.append(re.sub("<parameter=city>.*?</parameter>\n", "", sample, flags=re.DOTALL))
    else:
        wrong = [sample.replace("2}", '"2"}'), sample.replace('"city": "Ro<me", ', "")]
    assert len({sample, *wrong}) == len(wrong) + 1
    for each in wrong:
        assert not grammars.match(grammar, each)


@pytest.mark.parametrize("form", [HERMES, QWEN_CODER], ids=names)
def test_a_schema_that_cannot_be_compiled_allows_any_json(form: Format, grammars: Grammars) -> None:
    odd = {"type": "object", "properties": {"days": {"type": "integer", "not": {"const": 3}}}}
    text = SAMPLES[form][0].replace('"city": "Ro<me", ', "")
    text = re.sub("<parameter=(city|unit)>.*?</parameter>\n", "", text, flags=re.DOTALL)
    loose = grammar_of(form, [Tool("weather", parameters=odd)], required=True)
    assert grammars.match(loose.text, text)
    with pytest.raises(GrammarError, match=r"weather\.parameters\.properties\.days"):
        grammar_of(form, [Tool("weather", parameters=odd, strict=True)], required=True)


@pytest.mark.parametrize("shared", ["$defs", "definitions"])
@pytest.mark.parametrize("form", [HERMES, QWEN_CODER], ids=names)
def test_what_is_wrong_in_a_definition_is_named_where_it_stands(form: Format, shared: str) -> None:
    schema = {
        "type": "object",
        "properties": {"days": {"$ref": f"#/{shared}/days"}},
        shared: {"days": {"type": "whole"}},
    }
    tool = Tool("f", parameters=schema, strict=True, where="tools.3.function.parameters")
    with pytest.raises(GrammarError) as caught:
        grammar_of(form, [tool], required=True)
    assert caught.value.where == f"tools.3.function.parameters.{shared}.days.type"
    assert str(caught.value).startswith(f"'{caught.value.where}': ")


def test_a_part_of_a_schema_may_refer_to_the_whole(grammars: Grammars) -> None:
    schema = {
        "type": "object",
        "properties": {"days": {"$ref": "#/$defs/days"}},
        "required": ["days"],
        "$defs": {"days": {"type": "integer"}},
    }
    tool = Tool("weather", parameters=schema, strict=True)
    grammar = grammar_of(QWEN_CODER, [tool], required=True).text
    text = SAMPLES[QWEN_CODER][0]
    text = re.sub("<parameter=(city|unit)>.*?</parameter>\n", "", text, flags=re.DOTALL)
    assert grammars.match(grammar, text)
    assert not grammars.match(grammar, text.replace("\n2\n", "\nx\n"))


RED = '{"colour": "red"}'


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("form", [HERMES, GENERIC], ids=names)
def test_a_schema_without_tools_lets_the_model_think_first(
    form: Format, thinking: bool, grammars: Grammars
) -> None:
    said = {"type": "object", "properties": {"colour": {"type": "string"}}}
    grammar = grammar_of(
        form, (), required=False, thoughts=THINK, thinking=thinking, said=Said(said)
    )
    thought = ("" if thinking else "<think>") + 'Which {"x"}?</think>\n'
    assert grammars.match(grammar.text, thought + RED)
    assert grammars.match(grammar.text, RED) is not thinking
    assert not grammars.match(grammar.text, thought + "red")


def test_a_schema_of_what_is_said_is_called_by_its_name() -> None:
    with pytest.raises(GrammarError, match=r"'shape\.type'") as caught:
        grammar_of(HERMES, TOOLS, required=False, said=Said({"type": "x"}, "shape"))
    assert caught.value.where == "shape.type"


# -- what tags cannot hold -------------------------------------------------------------------------
TEXT = {"type": "string"}


@pytest.mark.parametrize(
    ("parameters", "strict", "fits"),
    [
        ({"properties": {"a": TEXT}}, True, True),
        ({"properties": {"a": TEXT | {"enum": ["x", "y"]}}, "required": ["a"]}, True, True),
        ({"properties": {"a": {"type": "integer", "minimum": 3}}}, True, True),
        ({"properties": {"a": TEXT | {"maxLength": 3}}}, False, True),
        ({"properties": {"a": TEXT | {"maxLength": 3}}}, True, False),
        ({"properties": {"a": TEXT | {"pattern": "x"}}}, True, False),
        ({"properties": {"a": TEXT}, "required": ["b"]}, True, False),
        ({"properties": {"a": TEXT}, "allOf": [{"required": ["a"]}]}, True, False),
        ({"$ref": "#/$defs/x", "$defs": {"x": {"type": "object"}}}, True, False),
        ({"properties": {"a>b": TEXT}}, False, False),
        ({"properties": {"a\nb": TEXT}}, False, False),
        ({"properties": {"a" * 129: TEXT}}, False, False),
        ({"properties": {"a": TEXT | {"enum": ["x</parameter>"]}}}, False, False),
    ],
)
def test_what_tags_would_cut_or_not_hold_is_written_as_one_object(
    parameters: dict[str, Any], strict: bool, fits: bool
) -> None:
    tool = Tool("f", parameters=parameters, strict=strict)
    assert fits_tags(tool) is fits
    grammar = grammar_of(QWEN_CODER, (tool,), required=True)
    assert ("<parameter=" in grammar.text) is (fits and bool(parameters.get("properties")))
