"""What templates make of tools, calls and results, and what is made for those that know none."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamakeep.chat_template import ChatTemplate
from llamakeep.errors import GrammarError
from llamakeep.runtime.fake_text import FakeVocab
from llamakeep.sampling import Sampling
from llamakeep.server.conversation import Conversations
from llamakeep.server.errors import ApiError
from llamakeep.server.prompts import Prompt
from llamakeep.server.talk import Chat, Plan
from llamakeep.server.tool_grammars import ToolGrammars
from llamakeep.template_tools import ToolTraits, one_by_one, short_id
from llamakeep.tokens import as_tokens
from llamakeep.tool_calls import (
    AUTO,
    NONE,
    REQUIRED,
    Parser,
    Reply,
    Said,
    Tool,
    ToolChoice,
    format_of,
)
from llamakeep.tool_calls.described import described, without_calls
from llamakeep.tool_calls.formats import GENERIC, HERMES, LLAMA, MISTRAL, QWEN_CODER
from llamakeep.tool_calls.grammar import Grammar, grammar_of
from tests.engine_tools import ask, engine_of
from tests.grammar_tools import texts_of

TEMPLATES = Path(__file__).parent / "data" / "templates"
ARGUMENTS = '{"city": "Rome"}'
WEATHER = Tool("weather", "Of a city.", {"type": "object", "properties": {"city": {}}})
TIME = Tool("time")
ASKED = {"role": "user", "content": "How is it?"}


def load(name: str) -> ChatTemplate:
    source = (TEMPLATES / f"{name}.jinja").read_text()
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>")


def call(call_id: str, name: str = "weather", arguments: Any = ARGUMENTS) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def result(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def calls(*made: dict[str, Any], content: str | None = None) -> dict[str, Any]:
    return {"role": "assistant", "content": content, "tool_calls": list(made)}


HISTORY = [
    ASKED,
    calls(call("one"), call("two", "time", "{}"), content="I look."),
    result("two", "22:00"),
    result("one", "24 C"),
    {"role": "user", "content": "Thanks."},
]


# -- what is learned -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "traits"),
    [
        ("qwen", ToolTraits(tools=True, calls=True, objects=True)),
        ("qwen_coder", ToolTraits(tools=True, calls=True, objects=True)),
        ("llama31", ToolTraits(tools=True, calls=True, objects=True, several=False)),
        ("mistral_tools", ToolTraits(tools=True, calls=True, objects=True, short_ids=True)),
        ("mistral_named", ToolTraits(tools=True, calls=True, objects=True)),
        ("gemma", ToolTraits()),
        ("llama3", ToolTraits(tools=True)),
        ("parts", ToolTraits()),
    ],
)
def test_what_a_template_understands_is_found_out(name: str, traits: ToolTraits) -> None:
    assert load(name).traits == traits


def test_what_a_template_refuses_it_does_not_understand() -> None:
    no_system = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('No!') }}{% endif %}"
        "[{{ m.role }}]{{ m.content }}{% endfor %}"
    )
    assert ChatTemplate(no_system).traits == ToolTraits(system=False)


def test_a_template_of_the_built_in_kind_knows_no_tools() -> None:
    assert ChatTemplate("chatml").traits == ToolTraits()


# -- calls of earlier turns ------------------------------------------------------------------------
@pytest.mark.parametrize(
    "name", ["qwen", "qwen_coder", "llama31", "mistral_tools", "mistral_named", "gemma", "phi"]
)
@pytest.mark.parametrize("tools", [(), (WEATHER, TIME)])
def test_earlier_calls_and_results_are_written(name: str, tools: tuple[Tool, ...]) -> None:
    text = Conversations(load(name), FakeVocab(300)).text(Chat(HISTORY, tools))
    for word in ("weather", "Rome", "time", "22:00", "24 C"):
        assert text.count(word) >= 1
    assert text.count("Thanks.") == 1
    assert ("Of a city." in text) is bool(tools)


@pytest.mark.parametrize("arguments", [ARGUMENTS, json.loads(ARGUMENTS)])
@pytest.mark.parametrize("name", ["qwen", "llama31", "mistral_named", "gemma"])
def test_arguments_may_be_json_or_objects(name: str, arguments: Any) -> None:
    messages = [ASKED, calls(call("one", arguments=arguments)), result("one", "24 C")]
    conversations = Conversations(load(name), FakeVocab(300))
    assert '{"city": "Rome"}' in conversations.text(Chat(messages))


def test_calls_are_written_one_by_one_where_a_template_takes_one_at_a_time() -> None:
    assert not load("llama31").traits.several
    text = load("llama31").render(HISTORY)
    order = [text.index(word) for word in ("Rome", "24 C", '"time"', "22:00", "Thanks.")]
    assert order == sorted(order)


@given(
    sizes=st.lists(st.integers(0, 4), max_size=4),
    data=st.data(),
)
def test_each_call_stands_before_its_result(sizes: list[int], data: st.DataObject) -> None:
    messages: list[dict[str, Any]] = []
    for turn, size in enumerate(sizes):
        ids = [f"{turn}-{index}" for index in range(size)]
        messages.append(ASKED)
        messages.append(calls(*map(call, ids), content=f"text {turn}"))
        answered = data.draw(st.permutations(ids))[: data.draw(st.integers(0, size))]
        messages += [result(each, each) for each in answered]
    made = one_by_one(messages)
    assert [one for one in made if one["role"] == "user"] == [ASKED] * len(sizes)
    given_ids = [each["id"] for one in messages for each in one.get("tool_calls", ())]
    assert [each["id"] for one in made for each in one.get("tool_calls", ())] == given_ids
    assert sum(one["role"] == "tool" for one in made) == sum(
        one["role"] == "tool" for one in messages
    )
    for before, one in itertools.pairwise(made):
        if one["role"] == "tool":
            assert [each["id"] for each in before["tool_calls"]] == [one["tool_call_id"]]
    texts = [one["content"] for one in made if one["role"] == "assistant" and one["content"]]
    assert texts == [f"text {turn}" for turn in range(len(sizes))]


@given(st.text(max_size=40))
def test_ids_become_short_and_stay_apart(call_id: str) -> None:
    short = short_id(call_id)
    assert len(short) == 9
    assert short.isascii()
    assert short.isalnum()
    assert short_id(short) == short
    assert short_id(call_id + "x") != short


def test_ids_of_calls_and_results_fit() -> None:
    text = load("mistral_tools").render(HISTORY)
    for each in ("one", "two"):
        assert text.count(short_id(each)) == 2
        assert f'"{each}"' not in text


# -- tools in plain words --------------------------------------------------------------------------
def test_results_become_messages_of_the_user() -> None:
    made = without_calls(HISTORY)
    assert [one["role"] for one in made] == ["user", "assistant", "user"]
    assert made[1]["content"].startswith("I look.\n\n")
    written = json.loads(made[1]["content"].partition("\n\n")[2])
    assert written == {
        "tool_calls": [
            {"name": "weather", "arguments": {"city": "Rome"}},
            {"name": "time", "arguments": {}},
        ]
    }
    lines = made[2]["content"].split("\n\n")
    assert lines[1] == "Thanks."
    results = [json.loads(line)["tool_result"] for line in lines[0].split("\n")]
    assert results == [
        {"name": "time", "result": "22:00"},
        {"name": "weather", "result": "24 C"},
    ]
    assert HISTORY[1]["content"] == "I look.", "what is given stays as it is"


def test_what_the_model_reads_of_earlier_calls_is_what_it_should_write() -> None:
    (text,) = (one["content"] for one in without_calls([calls(call("a"))]))
    parser = Parser(GENERIC, {"weather": WEATHER}, lambda: "id")
    (again,) = Reply.of(parser.feed(text) + parser.finish()).calls
    assert json.loads(again.arguments) == json.loads(ARGUMENTS)


def test_results_may_be_parts_and_arguments_no_json() -> None:
    parts = [{"type": "text", "text": "24"}, {"type": "text", "text": "C"}]
    made = without_calls(
        [ASKED, calls(call("a", arguments="{cut")), result("a", "") | {"content": parts}]
    )
    assert '"arguments": "{cut"' in made[1]["content"]
    assert json.loads(made[2]["content"])["tool_result"]["result"] == "24\nC"


@pytest.mark.parametrize("content", ["Be brief.", [{"type": "text", "text": "Be brief."}]])
@pytest.mark.parametrize("has_system", [True, False])
def test_tools_are_told_once(content: Any, has_system: bool) -> None:
    system = [{"role": "system", "content": content}] if has_system else []
    made = described([*system, ASKED, ASKED], [WEATHER, TIME], has_system=has_system)
    assert len(made) == 2 + len(system)
    assert sum("Of a city." in json.dumps(one) for one in made) == 1
    assert "Of a city." in json.dumps(made[0])
    assert ("Be brief." in json.dumps(made[0])) is has_system
    assert described([ASKED], [WEATHER], has_system=True)[0]["role"] == "system"
    answer = {"role": "assistant", "content": "a"}
    assert [one["role"] for one in described([answer], [WEATHER], has_system=False)] == [
        "user",
        "assistant",
    ]


@pytest.mark.parametrize("name", ["qwen", "gemma"])
def test_tools_that_must_not_be_called_are_told_so_that_the_prompt_stays(name: str) -> None:
    conversations = Conversations(load(name), FakeVocab(300))
    none, some = (conversations.text(Chat([ASKED], (WEATHER,), each)) for each in (NONE, AUTO))
    assert "Of a city." in none
    assert none == some


# -- plans -----------------------------------------------------------------------------------------
def plan(name: str, chat: Chat, n_ctx: int | None = None) -> Plan:
    return Conversations(load(name), FakeVocab(300), n_ctx).plan(chat)


def test_a_plan_says_how_answers_are_told_apart() -> None:
    made = plan("qwen", Chat([ASKED], (WEATHER, TIME), ToolChoice("auto", ("time",))))
    assert made.form is HERMES
    assert set(made.tools) == {"time"}
    assert not made.is_plain
    assert made.talk() is not made.talk()
    assert plan("gemma", Chat([ASKED], (WEATHER,))).form is GENERIC
    for chat in (Chat([ASKED]), Chat([ASKED], (WEATHER,), NONE)):
        assert plan("qwen", chat).is_plain
        assert plan("qwen", chat).talk() is None
    thinks = plan("qwen_thinks", Chat([ASKED]))
    assert (thinks.thinking, thinks.is_plain) == (True, False)
    assert plan("qwen_thinks", Chat([ASKED], thoughts_apart=False)).is_plain
    assert plan("qwen_thinks", Chat([ASKED], extra={"enable_thinking": False})).is_plain


def test_a_prompt_that_does_not_fit_needs_no_grammar() -> None:
    with pytest.raises(ApiError, match="grammar"):
        plan("qwen", Chat([ASKED], (WEATHER,), REQUIRED), n_ctx=4096)
    assert plan("qwen", Chat([ASKED], (WEATHER,), REQUIRED), n_ctx=10).grammar is None


def test_a_grammar_of_the_requests_own_is_in_the_way_of_calls() -> None:
    prompt = Prompt(as_tokens([1]))
    made = Plan(prompt, lambda: "id", HERMES, grammar=Grammar("root ::= [a]", ("<tool_call>",)))
    sampling = made.sampling(Sampling())
    assert (sampling.grammar, sampling.grammar_triggers) == ("root ::= [a]", ("<tool_call>",))
    with pytest.raises(ApiError, match="format of its own"):
        made.sampling(Sampling(grammar="root ::= [b]"))
    assert Plan(prompt, lambda: "id").sampling(Sampling(top_k=3)) == Sampling(top_k=3)


@pytest.mark.parametrize("name", ["qwen", "qwen_thinks", "gemma"])
def test_an_answer_that_goes_on_has_no_format(name: str) -> None:
    conversations = Conversations(load(name), Counted())
    said = Said({"type": "object"}, "shape")

    def planned(*contents: str, **more: Any) -> Plan:
        answers = [{"role": "assistant", "content": content} for content in contents]
        return conversations.plan(Chat([ASKED, *answers], said=said, **more))

    with pytest.raises(ApiError, match="'shape' cannot be had of an answer that goes on") as caught:
        planned('{"a": ')
    assert caught.value.error["param"] == "shape"
    assert planned().grammar is not None
    assert planned("").grammar is not None
    assert planned("Well.", add_generation_prompt=True).grammar is not None


# -- grammars that are kept ------------------------------------------------------------------------
class Counted(FakeVocab):
    """Takes every grammar but some, and counts."""

    def __init__(self, refused: str = "\0") -> None:
        super().__init__(300)
        self.n_checked = 0
        self._refused = refused

    def check_grammar(self, grammar: str) -> None:
        self.n_checked += 1
        if self._refused in grammar:
            raise GrammarError("refused", where="here")


def grammar(kept: ToolGrammars, *tools: Tool, required: bool = True) -> Grammar | None:
    return kept.grammar(
        HERMES, tools, required=required, parallel=True, thoughts=None, thinking=False
    )


def test_a_grammar_is_made_once() -> None:
    vocab = Counted()
    kept = ToolGrammars(vocab)
    first = grammar(kept, WEATHER)
    assert grammar(kept, Tool("weather", "Told otherwise.", dict(WEATHER.parameters))) is first
    assert vocab.n_checked == 1
    assert grammar(kept, WEATHER, TIME) is not first
    assert grammar(kept, WEATHER, required=False) is not first
    assert vocab.n_checked == 3
    kept.check()


def test_grammars_are_kept_within_a_bound() -> None:
    vocab = Counted()
    kept = ToolGrammars(vocab, kept_chars=10_000)
    for index in [*range(20), 19, 0]:
        assert grammar(kept, Tool(f"f{index}")) is not None
        kept.check()
    assert vocab.n_checked == 21
    assert grammar(ToolGrammars(vocab, kept_chars=10), WEATHER) is not None


def test_schemas_that_cannot_be_followed_are_left_out() -> None:
    vocab = Counted("city")
    made = grammar(ToolGrammars(vocab), WEATHER)
    assert made is not None
    assert "city" not in made.text
    with pytest.raises(GrammarError, match="refused"):
        grammar(ToolGrammars(vocab), Tool("weather", "", WEATHER.parameters, strict=True))


def test_what_cannot_be_had_is_known_the_second_time() -> None:
    vocab = Counted("root")
    kept = ToolGrammars(vocab)
    for _ in range(2):
        with pytest.raises(GrammarError, match="refused") as caught:
            grammar(kept, WEATHER)
        assert caught.value.where == "here"
    assert grammar(kept, WEATHER, required=False) is None
    assert vocab.n_checked == 4
    kept.check()


@pytest.mark.parametrize("form", [HERMES, LLAMA, MISTRAL, GENERIC], ids=lambda form: form.name)
@pytest.mark.parametrize("seed", range(20))
def test_whatever_matches_is_told_as_calls(form: Any, seed: int) -> None:
    text = grammar_of(form, [WEATHER, TIME], required=True).text
    for each in texts_of(text, seed, 5):
        parser = Parser(form, {tool.name: tool for tool in (WEATHER, TIME)}, lambda: "id")
        reply = Reply.of(parser.feed(each) + parser.finish())
        assert reply.text == ""
        assert reply.calls
        for made in reply.calls:
            assert isinstance(json.loads(made.arguments), dict)


# -- special tokens --------------------------------------------------------------------------------
def test_special_tokens_are_shown_where_that_is_asked_for() -> None:
    token = 258  # <|im_start|>
    with engine_of() as engine:
        assert engine.vocab.piece(token) == b""
        sampling = Sampling(temperature=0, logit_bias=((token, 1000.0),))
        hidden = ask(engine, [1, 2, 3], 2, sampling=sampling)
        shown = ask(engine, [1, 2, 3], 2, sampling=sampling, shown=frozenset({token}))
        hidden.wait()
        shown.wait()
        assert (hidden.text, shown.text) == ("", "<|im_start|><|im_start|>")
        assert hidden.tokens == shown.tokens == [token, token]


def test_the_families_of_the_templates_here_are_known() -> None:
    found = {name: format_of(load(name).source) for name in ("qwen", "qwen_coder", "llama31")}
    assert found == {"qwen": HERMES, "qwen_coder": QWEN_CODER, "llama31": LLAMA}
