"""Tools over HTTP: rendered, called, streamed, answered; and what cannot be meant."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from llamakeep.runtime.fake_text import IM_END, FakeSampler
from tests.server_tools import HELLO, Served, served

CHAT = "/v1/chat/completions"
TEMPLATES = Path(__file__).parent / "data" / "templates"
FAMILIES = ("qwen", "qwen_coder", "llama31", "mistral_tools", "mistral_named", "gemma")
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "Of a city.", "parameters": CITY},
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "time"}}
TOOLS = [WEATHER, TIME]
ASKED = [{"role": "user", "content": "How is it in Rome?"}]
CALL = {
    "qwen": '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
    "qwen_coder": "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n"
    "</function>\n</tool_call>",
    "llama31": '{"name": "weather", "parameters": {"city": "Rome"}}',
    "mistral_tools": '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Rome"}}]',
    "mistral_named": '[TOOL_CALLS]weather[ARGS]{"city": "Rome"}',
    "gemma": '{"tool_calls": [{"name": "weather", "arguments": {"city": "Rome"}}]}',
}
SAY = {"gemma": '{"response": "It is \\"warm\\"."}'}


def source(family: str) -> str:
    return (TEMPLATES / f"{family}.jinja").read_text()


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Iterator[tuple[str, Served]]:
    with served(template=source(request.param), engine={"n_ctx": 4096}) as made:
        yield request.param, made


@pytest.fixture(scope="module")
def qwen() -> Iterator[Served]:
    with served(template=source("qwen"), engine={"n_ctx": 4096}) as made:
        yield made


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let every answer from now on be a text."""

    def say(text: str) -> None:
        scripts: dict[FakeSampler, Iterator[int]] = {}

        def sample(sampler: FakeSampler, _index: int) -> int:
            tokens = [*text.encode(), IM_END]
            return next(scripts.setdefault(sampler, iter(tokens)))

        monkeypatch.setattr(FakeSampler, "sample", sample)

    return say


def joined(chunks: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """Return the message that the chunks of a stream add up to, as clients do it."""
    message: dict[str, Any] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            if choice["index"] != index:
                continue
            for key, value in choice["delta"].items():
                if key == "tool_calls":
                    calls = message.setdefault("tool_calls", [])
                    for each in value:
                        if each["index"] == len(calls):
                            calls.append({name: each[name] for name in ("id", "type", "function")})
                        else:
                            assert each["index"] == len(calls) - 1
                            assert set(each) == {"index", "function"}
                            arguments = each["function"]["arguments"]
                            calls[-1]["function"]["arguments"] += arguments
                elif value is not None:
                    message[key] = (message.get(key) or "") + value
                else:
                    message.setdefault(key, None)
    return message


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    calls = [{**call, "id": ""} for call in message.get("tool_calls", ())]
    return {**message, "tool_calls": calls}


# -- what is answered ------------------------------------------------------------------------------
def test_a_call_is_answered_whole_and_in_pieces(
    family: tuple[str, Served], says: Callable[[str], None]
) -> None:
    name, server = family
    says(CALL[name])
    (choice,) = server.answer(CHAT, messages=ASKED, tools=TOOLS)["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] is None
    (call,) = message["tool_calls"]
    assert (call["type"], call["function"]["name"]) == ("function", "weather")
    assert json.loads(call["function"]["arguments"]) == {"city": "Rome"}
    assert len(call["id"]) == (9 if name == "mistral_tools" else 29)
    chunks = server.stream(CHAT, messages=ASKED, tools=TOOLS)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert chunks[-1]["choices"][0] == {"index": 0, "delta": {}, "finish_reason": "tool_calls"}
    assert without_ids(joined(chunks)) == without_ids(message)
    pieces = [
        piece for chunk in chunks for piece in chunk["choices"][0]["delta"].get("tool_calls", ())
    ]
    assert len(pieces) > 5, "the arguments come as they are written"


def test_tools_may_be_left_alone(family: tuple[str, Served], says: Callable[[str], None]) -> None:
    name, server = family
    says(SAY.get(name, 'It is "warm".'))
    (choice,) = server.answer(CHAT, messages=ASKED, tools=TOOLS)["choices"]
    assert choice["message"] == {"role": "assistant", "content": 'It is "warm".'}
    assert choice["finish_reason"] == "stop"
    chunks = server.stream(CHAT, messages=ASKED, tools=TOOLS)
    assert joined(chunks) == choice["message"]


def test_results_reach_the_prompt(family: tuple[str, Served], says: Callable[[str], None]) -> None:
    name, server = family
    says(CALL[name])
    message = server.answer(CHAT, messages=ASKED, tools=TOOLS)["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "31337"}
    messages = [*ASKED, message, result]
    prompt = server.answer("/apply-template", messages=messages, tools=TOOLS)["prompt"]
    assert prompt.index("weather") < prompt.index("Rome") < prompt.index("31337")
    says(SAY.get(name, "Warm."))
    answer = server.answer(CHAT, messages=messages, tools=TOOLS, max_tokens=50)
    assert answer["choices"][0]["finish_reason"] == "stop"
    counted = server.answer(f"{CHAT}/input_tokens", messages=messages, tools=TOOLS)["input_tokens"]
    assert answer["usage"]["prompt_tokens"] == counted


def test_the_tools_are_told_to_the_model(family: tuple[str, Served]) -> None:
    _, server = family
    prompt = server.answer("/apply-template", messages=ASKED, tools=TOOLS)["prompt"]
    for word in ("weather", "time", "city"):
        assert word in prompt
    plain = server.answer("/apply-template", messages=ASKED)["prompt"]
    assert "weather" not in plain


def test_a_prompt_is_the_same_whatever_may_be_called(family: tuple[str, Served]) -> None:
    name, server = family
    choices: list[Any] = ["auto", "required", {"type": "function", "function": {"name": "time"}}]
    if name != "gemma":  # whose template has no place for tools: they are told in plain words
        choices.append("none")
    prompts = {
        server.answer("/apply-template", messages=ASKED, tools=TOOLS, tool_choice=choice)["prompt"]
        for choice in choices
    }
    assert len(prompts) == 1


def test_what_must_not_be_called_is_content(
    family: tuple[str, Served], says: Callable[[str], None]
) -> None:
    name, server = family
    says(CALL[name])
    (choice,) = server.answer(CHAT, messages=ASKED, tools=TOOLS, tool_choice="none")["choices"]
    assert choice["message"] == {"role": "assistant", "content": CALL[name]}
    assert choice["finish_reason"] == "stop"


def test_message_starts_are_where_the_users_turns_are(family: tuple[str, Served]) -> None:
    name, server = family
    call = {"id": "x", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages = [
        *ASKED,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "x", "content": "31337"},
        {"role": "assistant", "content": "Warm."},
        {"role": "user", "content": "And Oslo?"},
    ]
    with server.asked() as seen:
        server.answer(CHAT, messages=messages, tools=TOOLS, max_tokens=1)
    (request,) = seen
    texts = [server.engine.vocab.text(request.prompt[start:]) for start in request.user_starts]
    assert len(texts) == (3 if name == "gemma" else 2), (
        "results are the user's where they are plain"
    )
    assert "How is it" in texts[0].partition("31337")[0]
    assert "And Oslo?" in texts[-1]
    assert "31337" not in texts[-1]


# -- several calls ---------------------------------------------------------------------------------
TWO = CALL["qwen"] + '\n<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
def test_several_calls_have_indices_and_ids(
    qwen: Served, says: Callable[[str], None], stream: bool
) -> None:
    says("Both.\n" + TWO)
    asked: dict[str, Any] = {"messages": ASKED, "tools": TOOLS}
    if stream:
        message = joined(qwen.stream(CHAT, **asked))
    else:
        message = qwen.answer(CHAT, **asked)["choices"][0]["message"]
    assert message["content"] == "Both."
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather", "time"]
    assert len({call["id"] for call in message["tool_calls"]}) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_alone_ends_the_answer(
    qwen: Served, says: Callable[[str], None], stream: bool
) -> None:
    says(TWO + "x" * 3000)
    asked: dict[str, Any] = {"messages": ASKED, "tools": TOOLS, "parallel_tool_calls": False}
    if stream:
        chunks = qwen.stream(CHAT, **asked)
        label, message = chunks[0]["id"], joined(chunks)
        reason = chunks[-1]["choices"][0]["finish_reason"]
    else:
        answer = qwen.answer(CHAT, **asked)
        label, choice = answer["id"], answer["choices"][0]
        message, reason = choice["message"], choice["finish_reason"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather"]
    assert reason == "tool_calls"
    record = qwen.record()
    while record.label != label:
        record = qwen.record()
    assert record.stop == "cancelled"
    assert record.generated_tokens < 3000


@pytest.mark.parametrize("stream", [False, True])
def test_each_answer_has_calls_of_its_own(
    qwen: Served, says: Callable[[str], None], stream: bool
) -> None:
    says(CALL["qwen"])
    asked: dict[str, Any] = {"messages": ASKED, "tools": TOOLS, "n": 3}
    if stream:
        chunks = qwen.stream(CHAT, **asked)
        messages = [joined(chunks, index) for index in range(3)]
    else:
        messages = [each["message"] for each in qwen.answer(CHAT, **asked)["choices"]]
    ids = {message["tool_calls"][0]["id"] for message in messages}
    assert len(ids) == 3
    assert len({json.dumps(without_ids(message)) for message in messages}) == 1


def test_only_allowed_tools_are_called(qwen: Served, says: Callable[[str], None]) -> None:
    says(TWO)
    named = [{"type": "function", "function": {"name": "time"}}]
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": named}}
    message = qwen.answer(CHAT, messages=ASKED, tools=TOOLS, tool_choice=choice)["choices"][0]
    (call,) = message["message"]["tool_calls"]
    assert call["function"]["name"] == "time"
    assert message["message"]["content"] == CALL["qwen"]


# -- cut off, with probabilities, with stop strings ------------------------------------------------
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n_tokens", [5, 30, 60, 62, 70])
def test_a_call_that_is_cut_off_says_length(
    qwen: Served, says: Callable[[str], None], n_tokens: int, stream: bool
) -> None:
    says(CALL["qwen"])
    asked: dict[str, Any] = {"messages": ASKED, "tools": TOOLS, "max_tokens": n_tokens}
    if stream:
        chunks = qwen.stream(CHAT, **asked)
        message, reason = joined(chunks), chunks[-1]["choices"][0]["finish_reason"]
    else:
        choice = qwen.answer(CHAT, **asked)["choices"][0]
        message, reason = choice["message"], choice["finish_reason"]
    assert reason == "length"
    if calls := message.get("tool_calls"):
        arguments = calls[0]["function"]["arguments"]
        assert arguments
        assert '{"city": "Rome"}'.startswith(arguments)
    else:
        assert message["content"] == CALL["qwen"][:n_tokens]
    assert bool(calls) == (n_tokens > 50)


@pytest.mark.parametrize("stream", [False, True])
def test_probabilities_come_with_calls(
    qwen: Served, says: Callable[[str], None], stream: bool
) -> None:
    says("Hi " + CALL["qwen"])
    asked: dict[str, Any] = {"messages": ASKED, "tools": TOOLS, "logprobs": True}
    if stream:
        choices = [chunk["choices"][0] for chunk in qwen.stream(CHAT, **asked)]
        content = [
            each for choice in choices for each in (choice.get("logprobs") or {}).get("content", ())
        ]
    else:
        content = qwen.answer(CHAT, **asked)["choices"][0]["logprobs"]["content"]
    assert "".join(each["token"] for each in content) == "Hi " + CALL["qwen"]


def test_a_stop_string_ends_a_call(qwen: Served, says: Callable[[str], None]) -> None:
    says(CALL["qwen"])
    (choice,) = qwen.answer(CHAT, messages=ASKED, tools=TOOLS, stop="Ro")["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "'
    assert choice["finish_reason"] == "stop"
    (choice,) = qwen.answer(CHAT, messages=ASKED, tools=TOOLS, stop="</tool_call>")["choices"]
    assert choice["finish_reason"] == "tool_calls"


# -- thoughts --------------------------------------------------------------------------------------
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_thoughts_stand_apart(says: Callable[[str], None], tools: object) -> None:
    with served(template=source("qwen_thinks"), engine={"n_ctx": 4096}) as server:
        says("Let me <think>.\n</think>\n\nWarm. ")
        asked: dict[str, Any] = {"messages": ASKED, "tools": tools}
        (choice,) = server.answer(CHAT, **asked)["choices"]
        assert choice["message"] == {
            "role": "assistant",
            "content": "Warm. ",
            "reasoning_content": "Let me <think>.",
        }
        chunks = server.stream(CHAT, **asked)
        assert joined(chunks) == choice["message"]
        none = server.answer(CHAT, **asked, reasoning_format="none")["choices"][0]["message"]
        assert none["content"] == "Let me <think>.\n</think>\n\nWarm. "
        off = {"enable_thinking": False}
        says("Warm.")
        message = server.answer(CHAT, **asked, chat_template_kwargs=off)["choices"][0]["message"]
        assert message == {"role": "assistant", "content": "Warm."}
        messages = [*ASKED, {"role": "assistant", "content": "<think>So"}]
        says(" it.</think>Warm.")
        message = server.answer(CHAT, messages=messages)["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("it.", "Warm.")
        says("Hm.</think>" + CALL["qwen"])
        called = server.answer(CHAT, messages=ASKED, tools=TOOLS)["choices"][0]
        assert called["message"]["reasoning_content"] == "Hm."
        assert called["finish_reason"] == "tool_calls"


# -- what cannot be meant --------------------------------------------------------------------------
def call_of(name: str = "weather", **more: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": "{}"}
    return {"id": "x", "type": "function", "function": function, **more}


def after(call: object, **result: Any) -> list[dict[str, Any]]:
    """Return messages with a call and a result."""
    answer = {"role": "assistant", "content": None, "tool_calls": call}
    given = {"role": "tool", "tool_call_id": "x", "content": "1"} | result
    return [*ASKED, answer, given]


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("tools", {"tools": "x"}),
    ("tools.0", {"tools": ["x"]}),
    ("tools.0.function", {"tools": [{"type": "function"}]}),
    ("tools.0.type", {"tools": [{"type": "web_search"}]}),
    ("tools.0.function.name", {"tools": [{"type": "function", "function": {}}]}),
    ("tools.0.function.name", {"tools": [{"type": "function", "function": {"name": "a b"}}]}),
    ("tools.0.function.name", {"tools": [{"type": "function", "function": {"name": 5}}]}),
    ("tools.2.function.name", {"tools": [*TOOLS, TIME]}),
    (
        "tools.0.function.parameters",
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]},
    ),
    (
        "tools.0.function.description",
        {"tools": [{"type": "function", "function": {"name": "f", "description": 5}}]},
    ),
    ("tools", {"tools": [TIME] * 2000}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tools": TOOLS, "tool_choice": "any"}),
    ("tool_choice", {"tools": TOOLS, "tool_choice": 5}),
    ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "function"}}),
    ("tool_choice", {"tools": TOOLS, "tool_choice": {"function": {"name": "other"}}}),
    ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}),
    ("parallel_tool_calls", {"tools": TOOLS, "parallel_tool_calls": "x"}),
    ("reasoning_format", {"reasoning_format": "x"}),
    ("messages.1.tool_call_id", {"messages": [ASKED[0], after([])[2]]}),
    ("messages.2.tool_call_id", {"messages": after([call_of()], tool_call_id="y")}),
    ("messages.2.tool_call_id", {"messages": after([call_of()], tool_call_id=None)}),
    ("messages.2.tool_call_id", {"messages": after([])}),
    ("messages.2.name", {"messages": after([call_of()], name="time")}),
    ("messages.1.tool_calls", {"messages": after({})}),
    ("messages.1.tool_calls.0", {"messages": after([5])}),
    ("messages.1.tool_calls.0.id", {"messages": after([call_of(id=None)])}),
    ("messages.1.tool_calls.1.id", {"messages": after([call_of(), call_of()])}),
    ("messages.1.tool_calls.0.function.name", {"messages": after([call_of(name=None)])}),  # type: ignore[arg-type]
    (
        "messages.1.tool_calls.0.function.arguments",
        {"messages": after([call_of(function={"name": "f", "arguments": [1]})])},
    ),
    (
        "messages.0.reasoning_content",
        {"messages": [{"role": "assistant", "content": "x", "reasoning_content": 5}, *ASKED]},
    ),
]


@pytest.mark.parametrize(("param", "fields"), WRONG)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_meant_is_a_400_with_its_place(
    qwen: Served, param: str, fields: dict[str, Any], stream: bool
) -> None:
    error = qwen.error(CHAT, **({"messages": ASKED, "max_tokens": 1, "stream": stream} | fields))
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"


def test_arguments_of_before_that_are_no_json_are_a_400(qwen: Served) -> None:
    call = call_of(function={"name": "weather", "arguments": '{"city": "Ro'})
    error = qwen.error(CHAT, messages=after([call]), tools=TOOLS)
    assert "messages[1].tool_calls[0].function.arguments" in error["message"]


@pytest.mark.parametrize("name", ["qwen", "gemma"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_of_a_megabyte_is_a_400_and_no_slot_is_lost(name: str, stream: bool) -> None:
    fields = {
        f"field_{index}": {"type": "string", "description": "x" * 50} for index in range(12_000)
    }
    large = {"name": "f", "parameters": {"type": "object", "properties": fields}}
    assert len(json.dumps(large)) > 1 << 20
    tools = [{"type": "function", "function": large}]
    with served(template=source(name), engine={"n_ctx": 4096, "n_seqs": 1}) as server:
        error = server.error(CHAT, messages=ASKED, tools=tools, stream=stream)
        assert error["type"] == "exceed_context_size_error"
        assert error["n_prompt_tokens"] > 1 << 20
        assert [slot["is_processing"] for slot in server.client.get("/slots").json()] == [False]
        server.answer(CHAT, messages=HELLO, max_tokens=1)


@pytest.mark.parametrize("depth", [130, 1000, 100_000])
@pytest.mark.parametrize("where", ["tools", "arguments"])
def test_what_is_nested_deeply_is_a_400_and_no_slot_is_lost(
    qwen: Served, where: str, depth: int
) -> None:
    deep = '{"a":' * depth + "1" + "}" * depth
    body: dict[str, Any] = {"messages": ASKED, "tools": TOOLS, "max_tokens": 1}
    if where == "tools":
        body["tools"] = [{"type": "function", "function": {"name": "f", "parameters": "DEEP"}}]
    else:
        function = {"name": "weather", "arguments": "DEEP"}
        body["messages"] = after([call_of(function=function)])
    content = json.dumps(body).replace('"DEEP"', deep)
    response = qwen.raw(CHAT, content.encode())
    if where == "arguments" and depth == 130:
        assert response.status_code == 200, response.text
    else:
        error = qwen.error_of(response, 400)
        assert "deep" in error["message"] or "JSON" in error["message"]
    if where == "arguments":  # as a text they are
        function["arguments"] = deep
        response = qwen.post(CHAT, body)
        assert response.status_code == (200 if depth == 130 else 400), response.text
    assert not any(slot["is_processing"] for slot in qwen.client.get("/slots").json())


def test_a_call_that_is_required_is_refused_by_a_model_that_follows_no_grammar(
    qwen: Served,
) -> None:
    error = qwen.error(CHAT, messages=ASKED, tools=TOOLS, tool_choice="required")
    assert error["param"] == "tools"
    assert "grammar" in error["message"]


@pytest.mark.parametrize("path", ["/completion", "/v1/completions"])
def test_tools_are_a_chats_alone(qwen: Served, path: str) -> None:
    assert qwen.error(path, prompt="Hi", tools=TOOLS)["param"] == "tools"


def test_no_tools_are_none(qwen: Served, says: Callable[[str], None]) -> None:
    says(CALL["qwen"])
    for fields in ({"tools": []}, {"tools": None}, {"tool_choice": "auto"}):
        message = qwen.answer(CHAT, messages=ASKED, **fields)["choices"][0]["message"]
        assert message == {"role": "assistant", "content": CALL["qwen"]}


# -- OpenAI's client -------------------------------------------------------------------------------
@pytest.mark.parametrize("stream", [False, True])
def test_the_client_calls_a_tool_in_two_steps(
    family: tuple[str, Served], says: Callable[[str], None], stream: bool
) -> None:
    name, server = family
    says(CALL[name])
    messages: list[Any] = list(ASKED)
    with OpenAI(api_key="any", base_url=f"{server.url}/v1", max_retries=0) as client:
        asked: dict[str, Any] = {"model": "any", "tools": TOOLS}
        if stream:
            with client.chat.completions.stream(messages=messages, **asked) as events:
                kinds = {event.type for event in events}
                answer = events.get_final_completion()
            assert "tool_calls.function.arguments.done" in kinds
        else:
            answer = client.chat.completions.create(messages=messages, **asked)
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.tool_calls is not None
        (call,) = choice.message.tool_calls
        assert call.type == "function"
        assert json.loads(call.function.arguments) == {"city": "Rome"}
        messages.append(choice.message.model_dump(exclude_none=True, exclude={"parsed"}))
        messages[-1]["tool_calls"][0]["function"].pop("parsed_arguments", None)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "24 C"})
        says(SAY.get(name, 'It is "warm".'))
        last = client.chat.completions.create(messages=messages, **asked).choices[0]
        assert (last.message.content, last.finish_reason) == ('It is "warm".', "stop")


def test_the_client_understands_errors(qwen: Served) -> None:
    with (
        OpenAI(api_key="any", base_url=f"{qwen.url}/v1", max_retries=0) as client,
        pytest.raises(BadRequestError) as caught,
    ):
        client.chat.completions.create(
            model="any",
            messages=ASKED,  # type: ignore[arg-type]
            tools=[WEATHER, WEATHER],  # type: ignore[list-item]
        )
    assert caught.value.param == "tools.1.function.name"
