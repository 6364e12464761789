"""What models write, told apart: content, thoughts, calls; however the text is cut into pieces."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamakeep.errors import InvalidValue, ToolError
from llamakeep.tool_calls import (
    FAMILIES,
    GENERIC,
    NONE,
    REQUIRED,
    CallArguments,
    CallBegins,
    Content,
    Delta,
    Format,
    Parser,
    Reasoning,
    Reply,
    Tool,
    ToolChoice,
    format_of,
    is_closed,
    is_left_open,
    is_open,
    thoughts_of,
)
from llamakeep.tool_calls.formats import HERMES, LLAMA, MISTRAL, MISTRAL_NAMED, QWEN_CODER
from llamakeep.tool_calls.reasoning import MISTRAL_THINK, THINK
from llamakeep.tool_calls.values import MOST_DEPTH, MOST_NAME_CHARS

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"enum": ["C", "F"]},
        "any": {},
    },
}
TOOLS = {name: Tool(name, parameters=SCHEMA) for name in ("weather", "time")}
A, B = '{"city": "Rome"}', '{"city": "Oslo", "days": 2}'
TWO = (("weather", A), ("time", B))


def parsed(form: Format | None, pieces: Sequence[str], **options: Any) -> list[Delta]:
    numbers = itertools.count()
    parser = Parser(form, TOOLS, lambda: f"id{next(numbers)}", **options)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)]
    return deltas + parser.finish()


def told(form: Format | None, text: str, **options: Any) -> tuple[str, str, tuple[Any, ...]]:
    """Return content, thoughts and calls: as a whole, and letter by letter, which is the same."""
    replies = [Reply.of(parsed(form, pieces, **options)) for pieces in ([text], list(text))]
    first, second = ((one.text, one.thoughts, one.calls) for one in replies)
    assert first == second
    content, thoughts, calls = first
    assert [call.id for call in calls] == [f"id{index}" for index in range(len(calls))]
    return content, thoughts, tuple((call.name, call.arguments) for call in calls)


# -- calls -----------------------------------------------------------------------------------------
def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def xml(name: str, *parameters: tuple[str, str]) -> str:
    lines = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"<tool_call>\n<function={name}>\n{lines}</function>\n</tool_call>"


CALLS: list[tuple[str, Format, str, tuple[tuple[str, str], ...]]] = [
    ("one", HERMES, hermes("weather", A), TWO[:1]),
    ("two", HERMES, hermes("weather", A) + "\n" + hermes("time", B), TWO),
    ("touching", HERMES, hermes("weather", A) + hermes("time", B), TWO),
    (
        "on one line",
        HERMES,
        '<tool_call>{"name":"time","arguments":{}}</tool_call>',
        (("time", "{}"),),
    ),
    ("without an end", HERMES, f'<tool_call>{{"name": "weather", "arguments": {A}}}', TWO[:1]),
    ("half an end", HERMES, hermes("weather", A)[:-5], TWO[:1]),
    (
        "without any end",
        HERMES,
        f'<tool_call>{{"name": "weather", "arguments": {A}}}\n' + hermes("time", B),
        TWO,
    ),
    (
        "arguments first",
        HERMES,
        f'<tool_call>{{"arguments": {A}, "name": "weather"}}</tool_call>',
        TWO[:1],
    ),
    (
        "other keys",
        HERMES,
        f'<tool_call>{{"id": [1, {{}}], "name": "weather", "arguments": {A}, "x": null}}',
        TWO[:1],
    ),
    ("parameters", HERMES, f'<tool_call>{{"name": "weather", "parameters": {A}}}', TWO[:1]),
    ("no arguments", HERMES, '<tool_call>{"name": "time"}</tool_call>', (("time", "{}"),)),
    ("null", HERMES, '<tool_call>{"name": "time", "arguments": null}', (("time", "{}"),)),
    (
        "a string of JSON",
        HERMES,
        '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"R\\u00f6m\\"}"}',
        (("weather", '{"city": "Röm"}'),),
    ),
    ("an escaped name", HERMES, '<tool_call>{"na\\u006de": "tim\\u0065"}', (("time", "{}"),)),
    (
        "a list",
        HERMES,
        f'<tool_call>[{{"name": "weather", "arguments": {A}}}, '
        f'{{"name": "time", "arguments": {B}}}]</tool_call>',
        TWO,
    ),
    (
        "marks in strings",
        HERMES,
        hermes("weather", '{"city": "</tool_call>}]\\"{", "any": [{"a": {"b": "\\\\"}}]}'),
        (("weather", '{"city": "</tool_call>}]\\"{", "any": [{"a": {"b": "\\\\"}}]}'),),
    ),
    (
        "tags of the other kind",
        HERMES,
        xml("weather", ("city", "Rome")),
        TWO[:1],
    ),
    ("tags", QWEN_CODER, xml("weather", ("city", "Rome")), TWO[:1]),
    (
        "two with tags",
        QWEN_CODER,
        xml("weather", ("city", "Rome")) + "\n" + xml("time", ("city", "Oslo"), ("days", "2")),
        TWO,
    ),
    ("tags without the outer ones", QWEN_CODER, xml("weather", ("city", "Rome"))[12:-13], TWO[:1]),
    ("tags without an end", QWEN_CODER, xml("weather", ("city", "Rome"))[:-13], TWO[:1]),
    ("half an end of tags", QWEN_CODER, xml("weather", ("city", "Rome"))[:-3], TWO[:1]),
    ("no parameters", QWEN_CODER, xml("time"), (("time", "{}"),)),
    (
        "values of many kinds",
        QWEN_CODER,
        xml(
            "weather",
            ("city", 'a\n"b"\\\n\n<c>'),
            ("days", "2"),
            ("unit", "F"),
            ("any", '{"x": [1]}'),
            ("more", "True"),
            ("text", "two words"),
            ("nan", "NaN"),
        ),
        (
            (
                "weather",
                '{"city": "a\\n\\"b\\"\\\\\\n\\n<c>", "days": 2, "unit": "F", "any": {"x": [1]}, '
                '"more": true, "text": "two words", "nan": "NaN"}',
            ),
        ),
    ),
    ("JSON in tags", QWEN_CODER, f"<function=weather>{A}</function>", TWO[:1]),
    ("bare", LLAMA, f'{{"name": "weather", "parameters": {A}}}', TWO[:1]),
    (
        "bare, two",
        LLAMA,
        f'\n{{"name": "weather", "parameters": {A}}}; {{"name": "time", "parameters": {B}}}',
        TWO,
    ),
    ("python tag", LLAMA, f'<|python_tag|>{{"name": "weather", "parameters": {A}}}', TWO[:1]),
    (
        "python tag, two",
        LLAMA,
        f'<|python_tag|>{{"name": "weather", "parameters": {A}}}\n'
        f'{{"name": "time", "parameters": {B}}}',
        TWO,
    ),
    ("function tag", LLAMA, f"<function=weather>{A}</function>", TWO[:1]),
    (
        "a list of calls",
        MISTRAL,
        f'[TOOL_CALLS] [{{"name": "weather", "arguments": {A}, "id": "a1b2c3d4e"}}, '
        f'{{"name": "time", "arguments": {B}}}]',
        TWO,
    ),
    ("named calls", MISTRAL_NAMED, f"[TOOL_CALLS]weather[ARGS]{A}[TOOL_CALLS]time[ARGS]{B}", TWO),
    ("named, without a mark", MISTRAL_NAMED, f"[TOOL_CALLS]weather {A}", TWO[:1]),
    (
        "the whole answer",
        GENERIC,
        f' {{"tool_calls": [{{"name": "weather", "arguments": {A}}}, '
        f'{{"name": "time", "arguments": {B}}}]}}\n',
        TWO,
    ),
]


@pytest.mark.parametrize(
    ("form", "text", "calls"), [row[1:] for row in CALLS], ids=[row[0] for row in CALLS]
)
def test_calls_are_told(form: Format, text: str, calls: tuple[Any, ...]) -> None:
    content, thoughts, found = told(form, text)
    assert (content, thoughts, found) == ("", "", calls)
    for _, arguments in found:
        assert isinstance(json.loads(arguments), dict)


@pytest.mark.parametrize("form", [HERMES, QWEN_CODER, MISTRAL, MISTRAL_NAMED, LLAMA])
def test_what_is_said_around_calls_is_content(form: Format) -> None:
    text = next(row[2] for row in CALLS if row[1] is form)
    if form is LLAMA:  # whose bare calls stand at the beginning
        text = f'<|python_tag|>{{"name": "weather", "parameters": {A}}}'
    content, _, calls = told(form, f" Let me see.\n\n{text}\n That is it. \n")
    assert (content, calls[:1]) == (" Let me see.\n That is it.", TWO[:1])


def test_an_id_of_the_models_own_is_kept() -> None:
    deltas = parsed(MISTRAL_NAMED, [f"[TOOL_CALLS]weather[CALL_ID]x7[ARGS]{A}"])
    assert deltas == [CallBegins(0, "x7", "weather"), CallArguments(0, A)]


def test_deltas_come_as_soon_as_they_are_certain() -> None:
    parser = Parser(HERMES, TOOLS, lambda: "id")
    assert parser.feed("Well <tool") == [Content("Well")]
    assert parser.feed('_call>{"name": "weather", "arg') == []
    assert parser.feed('uments": {"ci') == [
        CallBegins(0, "id", "weather"),
        CallArguments(0, '{"ci'),
    ]
    assert parser.feed('ty": "a"') == [CallArguments(0, 'ty": "a"')]
    assert parser.feed("}") == [CallArguments(0, "}")]
    assert parser.feed("}\n</tool_call>") == []
    assert parser.n_calls == 1
    assert parser.finish() == []


def test_strings_between_tags_come_as_they_are_written() -> None:
    parser = Parser(QWEN_CODER, TOOLS, lambda: "id")
    parser.feed("<function=weather>\n<parameter=city>\nRo")
    assert parser.feed('me "') == [CallArguments(0, 'me \\"')]


@pytest.mark.parametrize(("form", "text"), [(row[1], row[2]) for row in CALLS if len(row[3]) == 2])
def test_without_parallel_calls_the_first_ends_it(form: Format, text: str) -> None:
    parser = Parser(form, TOOLS, lambda: "id", parallel=False)
    deltas = parser.feed(text + " and more")
    assert parser.complete
    assert [(call.name, call.arguments) for call in Reply.of(deltas).calls] == [TWO[0]]
    assert parser.feed("text") + parser.finish() == []


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, "<tool_call>no call</tool_call>"),
        (HERMES, "<tool_call></tool_call>"),
        (HERMES, "Write <tool_call> before it, as in <tool_call>{...}</tool_call>. "),
        (HERMES, '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"arguments": {"a": 1}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "time", "arguments": [1]}</tool_call>'),
        (HERMES, '<tool_call>{"name": "time", "arguments": "not JSON"}</tool_call>'),
        (HERMES, '<tool_call>{"name": "time" "arguments": {}}</tool_call>'),
        (HERMES, '<tool_call>{"name": "time", "argu'),
        (HERMES, '<tool_call>{name: "time"}</tool_call>'),
        (HERMES, "<tool_call>[]</tool_call>"),
        (HERMES, '{"name": "time", "arguments": {}}'),
        (HERMES, "<tool_cal"),
        (QWEN_CODER, "<function=unknown>\n<parameter=a>\n1\n</parameter>\n</function>"),
        (QWEN_CODER, "<function=weather>\nno parameter</function>"),
        (QWEN_CODER, "<function=weather"),
        (QWEN_CODER, "a <function of x> b"),
        (LLAMA, '{"name": "time"}'),
        (LLAMA, '{"name": "unknown", "parameters": {}}'),
        (LLAMA, ' {"a": {"name": "time", "parameters": {}}} '),
        (LLAMA, 'It is {"name": "time", "parameters": {}}'),
        (LLAMA, "<|python_tag|>print(1)"),
        (MISTRAL, "[TOOL_CALLS] none"),
        (MISTRAL, '[TOOL_CALLS] [{"a": 1}]'),
        (MISTRAL_NAMED, "[TOOL_CALLS]unknown[ARGS]{}"),
        (MISTRAL_NAMED, "[TOOL_CALLS]weather[ARGS]text"),
        (GENERIC, "Just text."),
        (GENERIC, '{"tool_calls": 5}'),
        (GENERIC, '{"tool_calls": []}'),
        (GENERIC, '{"other": "x"}'),
        (GENERIC, '{"tool_calls": [{"name": "unknown", "arguments": {}}]}'),
        (None, hermes("weather", A)),
        (HERMES, " \n\t"),
        (HERMES, ""),
    ],
)
def test_what_is_no_call_is_content_to_the_letter(form: Format | None, text: str) -> None:
    assert told(form, text) == (text, "", ())


def test_a_call_after_what_is_none_is_told() -> None:
    content, _, calls = told(HERMES, "<tool_call>\n<tool_call>x " + hermes("weather", A))
    assert (content, calls) == ("<tool_call>\n<tool_call>x", TWO[:1])


def test_without_tools_all_is_content() -> None:
    text = hermes("weather", A)
    parser = Parser(HERMES, {}, lambda: "id")
    assert Reply.of(parser.feed(text) + parser.finish()).text == text


@pytest.mark.parametrize(
    ("form", "text", "calls"), [row[1:] for row in CALLS], ids=[row[0] for row in CALLS]
)
def test_a_call_that_is_cut_off_keeps_what_it_has(
    form: Format, text: str, calls: tuple[Any, ...]
) -> None:
    for end in range(len(text)):
        content, _, found = told(form, text[:end])
        if not found:
            assert content.strip() == text[:end].strip()
            continue
        for (name, arguments), (whole_name, whole) in zip(found, calls, strict=False):
            assert name == whole_name
            assert whole.startswith(arguments)
        for complete, whole in zip(found[:-1], calls, strict=False):
            assert complete == whole


def test_strings_of_the_whole_answer_are_read() -> None:
    text = '{"response": "a\\n\\"b\\" \\ud83d\\ude00 \\u00e9 \\ud800x \\/ \\q"}'
    assert told(GENERIC, text)[0] == 'a\n"b" \N{GRINNING FACE} é \N{REPLACEMENT CHARACTER}x / \\q'
    assert told(GENERIC, '{"response": "cut \\u00')[0] == "cut "
    assert told(GENERIC, '{"response": "a"} b')[0] == "a b"


@pytest.mark.parametrize("cut", ["]", ",", ', {"na', ', {"name":', ",\n"])
def test_what_is_left_of_an_envelope_that_was_cut_off_is_told_nobody(cut: str) -> None:
    one = '{"tool_calls": [{"name": "weather", "arguments": {"city": "Rome"}}'
    assert told(GENERIC, one + cut) == told(GENERIC, one + "]}")
    assert told(GENERIC, one + cut)[0] == ""


# -- thoughts --------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("text", "thinking", "content", "thoughts"),
    [
        ("<think>\nHm.\n</think>\n\nYes. ", False, "Yes. ", "Hm."),
        ("\n<think>Hm.</think>Yes.", False, "Yes.", "Hm."),
        ("Hm.\n</think>\nYes.", True, "Yes.", "Hm."),
        ("\n<think>\nHm.</think>Yes.", True, "Yes.", "Hm."),
        ("</think>Yes.", True, "Yes.", ""),
        ("<think></think>Yes.", False, "Yes.", ""),
        ("<think>Hm, <b> </thin> k", False, "", "Hm, <b> </thin> k"),
        ("<think>cut </thi", False, "", "cut"),
        (" Yes, <think> is a tag. ", False, " Yes, <think> is a tag. ", ""),
        ("<thin", False, "<thin", ""),
        ("<think>a\n\nb</think>", False, "", "a\n\nb"),
    ],
)
@pytest.mark.parametrize("form", [None, HERMES])
def test_thoughts_stand_apart(
    form: Format | None, text: str, thinking: bool, content: str, thoughts: str
) -> None:
    assert told(form, text, thoughts=THINK, thinking=thinking) == (content, thoughts, ())


def test_calls_come_after_thoughts_and_not_in_them() -> None:
    text = f"[THINK]I write [TOOL_CALLS]time[ARGS]{{}}.[/THINK][TOOL_CALLS]weather[ARGS]{A}"
    content, thoughts, calls = told(MISTRAL_NAMED, text, thoughts=MISTRAL_THINK)
    assert (content, thoughts) == ("", "I write [TOOL_CALLS]time[ARGS]{}.")
    assert calls == TWO[:1]
    assert (
        told(LLAMA, f'<think>a</think>\n{{"name": "weather", "parameters": {A}}}', thoughts=THINK)[
            2
        ]
        == TWO[:1]
    )


def test_thoughts_that_nobody_wants_apart_are_content() -> None:
    assert told(HERMES, "<think>a</think> b")[0] == "<think>a</think> b"


def test_whether_thoughts_are_open_is_seen_at_the_end_of_a_prompt() -> None:
    assert is_open("<|im_start|>assistant\n<think>\n", THINK)
    assert not is_open("<|im_start|>assistant\n<think>\n\n</think>\n\n", THINK)
    assert not is_open("What is <think>?<|im_start|>assistant\n", THINK)
    assert is_closed("<|im_start|>assistant\n<think>\n\n</think>\n\n", THINK)
    assert not is_closed("<|im_start|>assistant\n<think>\n", THINK)
    assert is_left_open("<think>so", THINK)
    assert not is_left_open("<think>so</think>It", THINK)
    assert not is_left_open("It", THINK)


# -- however it is cut -----------------------------------------------------------------------------
_WORDS = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<function=",
        "weather>",
        "</function>",
        "<parameter=city>",
        "</parameter>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "weather",
        "<|python_tag|>",
        "<think>",
        "</think>",
        '{"name": "weather", "arguments": ',
        '{"name": "time", "parameters": ',
        '{"tool_calls": [',
        '{"response": "',
        A,
        B,
        "\\",
        '"',
        "\\u00",
        *"{}[],:;<> \n\\",
        "\N{GRINNING FACE}",
        "x",
    ]
)
_TEXTS = st.one_of(
    st.lists(_WORDS, max_size=12).map("".join),
    st.tuples(st.sampled_from([row[2] for row in CALLS]), st.lists(_WORDS, max_size=3)).map(
        lambda pair: pair[0] + "".join(pair[1])
    ),
)


@given(
    text=_TEXTS,
    form=st.sampled_from([None, GENERIC, *FAMILIES]),
    cuts=st.lists(st.integers(0, 200), max_size=12),
    thinking=st.booleans(),
    thoughts=st.sampled_from([None, THINK]),
    parallel=st.booleans(),
)
def test_every_split_gives_the_same(
    text: str, form: Format | None, cuts: list[int], **options: Any
) -> None:
    whole = Reply.of(parsed(form, [text], **options))
    ends = sorted({min(cut, len(text)) for cut in cuts} | {len(text)})
    pieces = [text[start:end] for start, end in itertools.pairwise([0, *ends])]
    for cut in (pieces, list(text)):
        reply = Reply.of(parsed(form, cut, **options))
        assert (reply.text, reply.thoughts, reply.calls) == (
            whole.text,
            whole.thoughts,
            whole.calls,
        )


@given(text=_TEXTS, form=st.sampled_from([None, *FAMILIES]))
def test_nothing_is_lost_where_nothing_is_called(text: str, form: Format | None) -> None:
    reply = Reply.of(parsed(form, [text]))
    assert reply.calls or reply.text == text


@given(
    values=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
        max_leaves=8,
    ),
    form=st.sampled_from([HERMES, LLAMA, MISTRAL, MISTRAL_NAMED, GENERIC]),
    ascii_only=st.booleans(),
)
def test_arguments_are_handed_on_as_they_are_written(
    values: Any, form: Format, ascii_only: bool
) -> None:
    arguments = json.dumps({"any": values}, ensure_ascii=ascii_only)
    call = f'{{"name": "time", "{form.arguments}": {arguments}}}'
    text = {
        "hermes": f"<tool_call>{call}</tool_call>",
        "llama": call,
        "mistral": f"[TOOL_CALLS][{call}]",
        "mistral-named": f"[TOOL_CALLS]time[ARGS]{arguments}",
        "generic": f'{{"tool_calls": [{call}]}}',
    }[form.name]
    assert told(form, text) == ("", "", (("time", arguments),))


@given(value=st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_strings_between_tags_are_any_text(value: str) -> None:
    _, _, ((name, arguments),) = told(QWEN_CODER, xml("weather", ("city", value)))
    assert name == "weather"
    expected = value.partition("</parameter>")[0]
    assert json.loads(arguments)["city"] == expected


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        '<tool_call>{"a":"',
        '<tool_call>{"name": "weather", "arguments": {"a":',
        '<tool_call>{"a": ["<tool_call>{", ',
        "<function=weather>\n<parameter=city>\n",
        "<think>",
        " \n",
        "{[",
    ],
)
@pytest.mark.parametrize("form", [GENERIC, *FAMILIES])
def test_the_work_grows_with_the_text_alone(form: Format, text: str) -> None:
    steps = []
    for n in (200, 400, 800):
        whole = text * n
        parser = Parser(form, TOOLS, lambda: "id", thoughts=THINK)
        taken = 0
        take = parser._reader.take

        def counted(size: int = 1, take: Any = take) -> str:
            nonlocal taken
            taken += 1
            return str(take(size))

        parser._reader.take = counted  # type: ignore[method-assign]
        deltas = [d for at in range(0, len(whole), 3) for d in parser.feed(whole[at : at + 3])]
        deltas += parser.finish()
        steps.append(taken / len(whole))
    assert max(steps) < 5
    assert steps[2] < 1.2 * steps[0] + 0.1


# -- values ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["", "a b", "a\n", "ä", "x" * (MOST_NAME_CHARS + 1), "<f>"])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(InvalidValue, match="a tool's name"):
        Tool(name)


def test_a_schema_that_is_too_deep_is_refused() -> None:
    deep: Any = {}
    for _ in range(MOST_DEPTH - 1):
        deep = {"items": [deep]} if len(str(deep)) % 2 else {"a": deep}
    Tool("f", parameters={})
    for _ in range(5_000):
        deep = [deep]
    with pytest.raises(InvalidValue, match=f"nested more than {MOST_DEPTH} deep"):
        Tool("f", parameters={"a": deep})


def test_a_choice_says_which_tools_may_be_called() -> None:
    tools = tuple(TOOLS.values())
    assert ToolChoice().of(tools) == REQUIRED.of(tools) == tools
    assert NONE.of(tools) == ()
    assert ToolChoice("required", ("time",)).of(tools) == tools[1:]
    assert ToolChoice().of(()) == ()
    with pytest.raises(InvalidValue, match="there is no tool 'other'"):
        ToolChoice("auto", ("other",)).of(tools)
    with pytest.raises(InvalidValue, match="there are no tools"):
        REQUIRED.of(())


def test_a_reply_adds_up() -> None:
    deltas: list[Delta] = [
        Reasoning("a"),
        Content("b"),
        CallBegins(0, "x", "f"),
        CallArguments(0, "{"),
        CallArguments(0, "}"),
        Content("c"),
    ]
    reply = Reply.of(deltas)
    assert (reply.thoughts, reply.text) == ("a", "bc")
    assert [call.to_openai() for call in reply.calls] == [
        {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    ]


@pytest.mark.parametrize(
    ("source", "family"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("<tool_call><function=x><parameter=y>", "qwen-coder"),
        ("[TOOL_CALLS] [", "mistral"),
        ("[TOOL_CALLS]x\n[ARGS]", "mistral-named"),
        ("<|python_tag|>", "llama"),
        ("<|start_header_id|>\n '\"parameters\": '", "llama"),
        ("<|start_header_id|>", None),
        ("<tool_call>x<arg_key>", None),
        ("<|im_start|>", None),
    ],
)
def test_a_family_is_known_by_its_template(source: str, family: str | None) -> None:
    found = format_of(source)
    assert (found and found.name) == family


def test_thoughts_are_known_by_the_template() -> None:
    assert thoughts_of("a </think>") is THINK
    assert thoughts_of("[THINK]") is MISTRAL_THINK
    assert thoughts_of("thinking") is None


@pytest.mark.parametrize(
    ("parameters", "problem"),
    [
        ({"properties": []}, "properties must be an object"),
        ({"properties": {"a": 5}}, "properties.a must be a schema"),
        ({"required": 7}, "required must be a list of names"),
        ({"required": "a"}, "required must be a list of names"),
        ({"required": [7]}, "required must be a list of names"),
    ],
)
def test_parameters_that_are_no_schema_are_refused(
    parameters: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ToolError, match=problem) as caught:
        Tool("f", parameters=parameters)
    assert caught.value.field == "parameters"
    Tool("f", parameters={"properties": None, "required": None})
