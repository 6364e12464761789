"""`/v1/responses` over HTTP, by hand and with OpenAI's own client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError, OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from llamakeep.errors import DecodeError
from llamakeep.server.metrics import endpoint_of
from llamakeep.server.responses_input import opened, sealed
from llamakeep.server.responses_items import InputText
from llamakeep.server.responses_tools import HOSTED
from llamakeep.server.shapes import ResponseAnswer
from tests import test_server_tool_calls as tool_calls
from tests.engine_tools import runtime_of
from tests.server_tools import ONLY_A, Served, served
from tests.test_server_tool_calls import CALL, CITY, SAY, source

PATH = "/v1/responses"
CHAT = "/v1/chat/completions"
ASK = "How is it in Rome?"
WEATHER: dict[str, Any] = {"type": "function", "name": "weather", "parameters": CITY}
TIME: dict[str, Any] = {"type": "function", "name": "time"}
TOOLS = [WEATHER, TIME]
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
Says = Callable[[str], None]

family, qwen, says = tool_calls.family, tool_calls.qwen, tool_calls.says


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as made:
        yield made


REMEMBERS = source("qwen_thinks").replace(
    "'<|im_start|>assistant\\n' + message.content",
    "'<|im_start|>assistant\\n' + '<think>' + (message.reasoning_content or '') + '</think>' "
    "+ message.content",
)
"""A template that shows what the model thought before."""


@pytest.fixture(scope="module")
def thinker() -> Iterator[Served]:
    with served(template=REMEMBERS, engine={"n_ctx": 4096}) as made:
        yield made


def client_of(server: Served) -> OpenAI:
    return OpenAI(api_key="any", base_url=f"{server.url}/v1", max_retries=0)


def ask(server: Served, path: str = PATH, **body: Any) -> dict[str, Any]:
    """Return a whole answer, which has the shape of OpenAI's and of ours."""
    answer: dict[str, Any] = server.answer(path, **({"input": ASK} | body))
    Response.model_validate(answer)
    assert ResponseAnswer.model_validate(answer).model_dump(exclude_unset=True) == answer
    return answer


def events_of(server: Served, **body: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, each of which has the shape of OpenAI's."""
    asked = {"input": ASK, "stream": True} | body
    with server.client.stream("POST", PATH, json=asked) as response:
        assert response.status_code == 200, response.read()
        blocks = "".join(response.iter_text()).split("\n\n")
    events = []
    for number, block in enumerate(block for block in blocks if block and block != ":"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
        assert events[-1]["sequence_number"] == number
        EVENTS.validate_python(events[-1])
    return events


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """Return the types of events, without repetitions and without what all begin with."""
    named = [event["type"].removeprefix("response.") for event in events]
    return [kind for at, kind in enumerate(named) if not at or named[at - 1] != kind]


def without_ids(value: Any) -> Any:
    if isinstance(value, list):
        return [without_ids(each) for each in value]
    if isinstance(value, dict):
        return {
            name: without_ids(each)
            for name, each in value.items()
            if name not in ("id", "call_id", "created_at", "completed_at", "timings")
        }
    return value


def prompt_of(server: Served, seen: list[Any], **body: Any) -> str:
    """Return the prompt that a request becomes."""
    ask(server, max_output_tokens=1, **body)
    return server.engine.vocab.text(seen[-1].prompt)


@pytest.fixture
def seen(qwen: Served, thinker: Served) -> Iterator[list[Any]]:
    """What is asked of an engine, from now on."""
    requests: list[Any] = []
    with qwen.asked(requests), thinker.asked(requests):
        yield requests


# -- what is answered ------------------------------------------------------------------------------
def test_a_text_is_answered_in_openais_shape(server: Served) -> None:
    answer = ask(server, max_output_tokens=5, logit_bias=ONLY_A, metadata={"a": "b"}, user="me")
    assert answer["id"].startswith("resp_")
    assert (answer["object"], answer["model"], answer["store"]) == ("response", "fake", False)
    assert (answer["metadata"], answer["user"]) == ({"a": "b"}, "me")
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    [item] = answer["output"]
    assert (item["type"], item["role"], item["status"]) == ("message", "assistant", "incomplete")
    assert item["content"] == [
        {"type": "output_text", "text": "AAAAA", "annotations": [], "logprobs": []}
    ]
    usage = answer["usage"]
    assert usage["output_tokens"] == 5
    assert usage["total_tokens"] == usage["input_tokens"] + 5


def test_an_answer_that_says_nothing_has_an_empty_message(server: Served) -> None:
    end = {str(server.engine.vocab.eos): 1000}
    answer = ask(server, logit_bias=end)
    assert (answer["status"], answer["incomplete_details"]) == ("completed", None)
    [item] = answer["output"]
    assert (item["status"], item["content"][0]["text"]) == ("completed", "")
    assert kinds(events_of(server, logit_bias=end))[2:6] == [
        "output_item.added",
        "content_part.added",
        "output_text.done",
        "content_part.done",
    ]


def test_cached_tokens_are_told(server: Served) -> None:
    asked = {"input": "G" * 200, "max_output_tokens": 2, "ignore_eos": True}
    details = [ask(server, **asked)["usage"]["input_tokens_details"] for _ in range(2)]
    assert details[0]["cached_tokens"] < 50 < 180 < details[1]["cached_tokens"]


def test_settings_are_told_as_they_were_meant(server: Served) -> None:
    answer = ask(
        server,
        max_output_tokens=1,
        temperature=0.5,
        truncation="auto",
        store=True,
        service_tier="flex",
        reasoning={"effort": "low", "summary": "auto"},
        text={"verbosity": "low"},
        instructions="Be brief.",
        prompt_cache_key="a",
        safety_identifier="b",
        max_tool_calls=3,
    )
    assert (answer["temperature"], answer["top_p"]) == (0.5, 1.0)
    assert (answer["truncation"], answer["store"], answer["service_tier"]) == (
        "disabled",
        False,
        "default",
    )
    assert answer["reasoning"] == {"effort": "low", "summary": None}
    assert answer["text"] == {"format": {"type": "text"}, "verbosity": "low"}
    assert (answer["instructions"], answer["max_tool_calls"]) == ("Be brief.", 3)
    assert (answer["prompt_cache_key"], answer["safety_identifier"]) == ("a", "b")


def test_a_stream_tells_what_a_whole_answer_is(server: Served) -> None:
    asked = {"max_output_tokens": 8, "temperature": 0, "ignore_eos": True}
    whole = ask(server, **asked)
    events = events_of(server, **asked)
    assert kinds(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "incomplete",
    ]
    assert (events[0]["response"]["status"], events[0]["response"]["output"]) == ("in_progress", [])
    last = events[-1]["response"]
    last["usage"]["input_tokens_details"] = whole["usage"]["input_tokens_details"]
    assert without_ids(last) == without_ids(whole)
    text = "".join(event["delta"] for event in events if event["type"].endswith("text.delta"))
    assert text == whole["output"][0]["content"][0]["text"] == events[-4]["text"]
    assert len({event["response"]["id"] for event in events if "response" in event}) == 1


def test_probabilities_come_with_the_text_where_they_are_included(
    thinker: Served,
    says: Says,
) -> None:
    says("So.</think>Hi " + CALL["qwen"])
    asked = {"tools": TOOLS, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = ask(thinker, **asked)
    [message] = [item for item in whole["output"] if item["type"] == "message"]
    probs = message["content"][0]["logprobs"]
    assert "".join(each["token"] for each in probs).endswith("Hi")
    assert all(len(each["top_logprobs"]) == 2 for each in probs)
    events = events_of(thinker, **asked)
    told = [each for event in events for each in event.get("logprobs", ()) if "delta" in event]
    assert [each["token"] for each in told] == [each["token"] for each in probs]
    none = ask(thinker, tools=TOOLS, top_logprobs=2)
    assert [item["content"][0]["logprobs"] for item in none["output"] if "role" in item] == [[]]


# -- tools -----------------------------------------------------------------------------------------
def test_a_call_is_answered_whole_and_in_events(
    family: tuple[str, Served],
    says: Says,
) -> None:
    name, server = family
    says(CALL[name])
    whole = ask(server, tools=TOOLS)
    [call] = whole["output"]
    assert (call["type"], call["name"], call["status"]) == ("function_call", "weather", "completed")
    assert json.loads(call["arguments"]) == {"city": "Rome"}
    assert whole["status"] == "completed"
    events = events_of(server, tools=TOOLS)
    assert kinds(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert without_ids(events[-1]["response"]["output"]) == without_ids(whole["output"])
    assert len([event for event in events if "delta" in event]) > 5


def test_results_reach_the_prompt_as_in_a_chat(
    family: tuple[str, Served],
    says: Says,
) -> None:
    name, server = family
    says(CALL[name])
    [call] = ask(server, tools=TOOLS)["output"]
    items = [
        {"role": "user", "content": ASK},
        call,
        {"type": "function_call_output", "call_id": call["call_id"], "output": "31337"},
    ]
    function = {"name": "weather", "arguments": call["arguments"]}
    made = {"id": call["call_id"], "type": "function", "function": function}
    messages = [
        items[0],
        {"role": "assistant", "content": None, "tool_calls": [made]},
        {"role": "tool", "tool_call_id": call["call_id"], "content": "31337"},
    ]
    tools = [{"type": "function", "function": tool} for tool in TOOLS]
    chat = server.answer(f"{CHAT}/input_tokens", messages=messages, tools=tools)
    counted = server.answer(f"{PATH}/input_tokens", input=items, tools=TOOLS)
    assert counted == chat
    says(SAY.get(name, 'It is "warm".'))
    answer = ask(server, input=items, tools=TOOLS)
    assert answer["output"][0]["content"][0]["text"] == 'It is "warm".'
    assert answer["usage"]["input_tokens"] == counted["input_tokens"]


@pytest.mark.parametrize("n_tokens", [5, 55, 60])
def test_a_call_that_is_cut_off_is_incomplete(
    qwen: Served,
    says: Says,
    n_tokens: int,
) -> None:
    says(CALL["qwen"])
    whole = ask(qwen, tools=TOOLS, max_output_tokens=n_tokens)
    events = events_of(qwen, tools=TOOLS, max_output_tokens=n_tokens)
    assert events[-1]["type"] == "response.incomplete"
    for answer in (whole, events[-1]["response"]):
        assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
        [item] = answer["output"]
        assert item["status"] == "incomplete"
        if n_tokens > 50:
            assert '{"city": "Rome"}'.startswith(item["arguments"])
        else:
            assert item["content"][0]["text"] == CALL["qwen"][:n_tokens]


def test_a_call_is_complete_where_the_answer_after_it_is_not(
    qwen: Served,
    says: Says,
) -> None:
    says(CALL["qwen"] + "\n" + CALL["qwen"])
    answer = ask(qwen, tools=TOOLS, max_output_tokens=len(CALL["qwen"]))
    assert [item["status"] for item in answer["output"]] == ["completed"]
    assert answer["status"] == "incomplete"
    answer = ask(qwen, tools=TOOLS, stop='"city": "R')
    assert [item["status"] for item in answer["output"]] == ["incomplete"]


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_alone_ends_the_answer(
    qwen: Served,
    says: Says,
    stream: bool,
) -> None:
    says("Both.\n" + CALL["qwen"] + "\n" + CALL["qwen"] + "x" * 3000)
    asked: dict[str, Any] = {"tools": TOOLS, "parallel_tool_calls": False}
    answer = events_of(qwen, **asked)[-1]["response"] if stream else ask(qwen, **asked)
    assert [item["type"] for item in answer["output"]] == ["message", "function_call"]
    assert answer["status"] == "completed"
    assert answer["usage"]["output_tokens"] < 3000


def test_what_is_said_after_a_call_is_a_message_of_its_own(
    qwen: Served,
    says: Says,
    seen: list[Any],
) -> None:
    says("One. " + CALL["qwen"] + " Two. " + CALL["qwen"])
    output = ask(qwen, tools=TOOLS)["output"]
    assert output == sorted(output, key=output.index)
    types = [item["type"] for item in output]
    assert types[:2] == ["message", "function_call"]
    assert types.count("function_call") == 2
    items: list[Any] = [{"role": "user", "content": ASK}, *output]
    for item in output:
        if item["type"] == "function_call":
            result = {"type": "function_call_output", "call_id": item["call_id"], "output": "7"}
            items.append(result)
    prompt = prompt_of(qwen, seen, input=items, tools=TOOLS)
    assert prompt.count("<|im_start|>assistant") == 2, "one answer, and the one that comes"


CUSTOM = {"type": "custom", "name": "note", "description": "Takes a note."}
SPACE = {
    "type": "namespace",
    "name": "files",
    "description": "All about files.",
    "tools": [{"type": "function", "name": "read", "parameters": CITY}, CUSTOM],
}


def called(name: str, arguments: Any) -> str:
    text = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{text}\n</tool_call>"


@pytest.mark.parametrize("namespace", [None, "files"])
def test_a_custom_tool_gets_a_text(
    qwen: Served,
    says: Says,
    seen: list[Any],
    namespace: str | None,
) -> None:
    text = 'Line "one"\n{"x": 1} ß\\'
    says(called("note" if namespace is None else "files.note", {"input": text}))
    tools = [SPACE if namespace else CUSTOM]
    [call] = ask(qwen, tools=tools)["output"]
    assert (call["type"], call["name"], call["input"]) == ("custom_tool_call", "note", text)
    assert call.get("namespace") == namespace
    events = events_of(qwen, tools=tools)
    assert kinds(events)[2:6] == [
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
    ]
    assert "".join(event["delta"] for event in events if "delta" in event) == text
    result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "31337"}
    items = [{"role": "user", "content": ASK}, call, result]
    prompt = prompt_of(qwen, seen, input=items, tools=tools)
    assert prompt.index("Takes a note.") < prompt.index(r"Line \"one\"") < prompt.index("31337")


def test_a_namespace_is_before_the_names_of_its_tools(
    qwen: Served,
    says: Says,
    seen: list[Any],
) -> None:
    says(called("files.read", {"city": "Rome"}))
    [call] = ask(qwen, tools=[SPACE, WEATHER])["output"]
    assert (call["type"], call["name"], call["namespace"]) == ("function_call", "read", "files")
    prompt = qwen.engine.vocab.text(seen[-1].prompt)
    assert prompt.count("All about files.") == 1
    assert prompt.count("files.note") == 1


def test_a_custom_tools_grammar_is_told_to_the_model(
    qwen: Served,
    seen: list[Any],
) -> None:
    form = {"type": "grammar", "syntax": "lark", "definition": "start: /31337/"}
    prompt = prompt_of(qwen, seen, tools=[CUSTOM | {"format": form}])
    assert "start: /31337/" in prompt


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("written", "text"),
    [
        ('{"input": "a\\nb"}', "a\nb"),
        (' { "input" :"" } ', ""),
        ('{"input": "cut', "cut"),
        ('{"inpu', ""),
        ('{"other": "a"}', ""),
        ("[1]", ""),
    ],
)
def test_the_input_of_a_custom_tool_is_read_as_it_comes(written: str, text: str, size: int) -> None:
    reader = InputText()
    pieces = [reader.push(written[at : at + size]) for at in range(0, len(written), size)]
    assert "".join(pieces) == text
    assert reader.is_there == ('"input"' in written)


def test_what_a_custom_tool_gets_that_is_no_text_is_told_as_it_is(
    qwen: Served,
    says: Says,
) -> None:
    says(called("note", {"other": 1}))
    [call] = ask(qwen, tools=[CUSTOM])["output"]
    assert json.loads(call["input"]) == {"other": 1}


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ({"type": "allowed_tools", "mode": "auto", "tools": [TIME]}, "time"),
        (
            {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "custom", "name": "note"}],
            },
            "files.note",
        ),
        (
            {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [{"type": "custom", "name": "note", "namespace": "files"}],
            },
            "files.note",
        ),
    ],
)
def test_only_allowed_tools_are_called(
    qwen: Served,
    says: Says,
    choice: dict[str, Any],
    name: str,
) -> None:
    says(CALL["qwen"] + "\n" + called(name, {"input": "x"}))
    output = ask(qwen, tools=[*TOOLS, SPACE], tool_choice=choice)["output"]
    assert output[0]["type"] == "message"
    assert output[0]["content"][0]["text"] == CALL["qwen"]
    assert output[1]["name"] == name.rpartition(".")[2]


def test_no_tool_may_be_called(qwen: Served, says: Says) -> None:
    says(CALL["qwen"])
    [item] = ask(qwen, tools=TOOLS, tool_choice="none")["output"]
    assert item["content"][0]["text"] == CALL["qwen"]


# -- thoughts --------------------------------------------------------------------------------------
def test_thoughts_are_an_item_of_their_own(thinker: Served, says: Says) -> None:
    says("Let me see.\n</think>\n\nWarm.")
    whole = ask(thinker)
    thoughts, message = whole["output"]
    assert thoughts["content"] == [{"type": "reasoning_text", "text": "Let me see."}]
    assert (thoughts["type"], thoughts["summary"]) == ("reasoning", [])
    assert "encrypted_content" not in thoughts
    assert message["content"][0]["text"] == "Warm."
    n_thought = whole["usage"]["output_tokens_details"]["reasoning_tokens"]
    assert 11 <= n_thought <= 23 < whole["usage"]["output_tokens"]
    events = events_of(thinker)
    assert (
        kinds(events)[2:8]
        == [
            "output_item.added",
            "content_part.added",
            "reasoning_text.delta",
            "reasoning_text.done",
            "content_part.done",
            "output_item.done",
        ][:6]
    )
    assert without_ids(events[-1]["response"]["output"]) == without_ids(whole["output"])


def test_thoughts_come_back_however_they_are_sent(
    thinker: Served,
    says: Says,
    seen: list[Any],
) -> None:
    says("31337 it is.\n</think>\n\n" + CALL["qwen"])
    include = ["reasoning.encrypted_content"]
    thoughts, call = ask(thinker, tools=TOOLS, include=include)["output"]
    assert opened(thoughts["encrypted_content"]) == "31337 it is."
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "24 C"}
    bare = {"type": "reasoning", "id": thoughts["id"], "summary": []}
    sent: list[dict[str, Any]] = [
        thoughts,
        bare | {"encrypted_content": thoughts["encrypted_content"]},
        bare | {"content": thoughts["content"]},
        bare | {"summary": [{"type": "summary_text", "text": "31337 it is."}]},
    ]
    items = [{"role": "user", "content": ASK}]
    prompts = [
        prompt_of(thinker, seen, input=[*items, each, call, result], tools=TOOLS) for each in sent
    ]
    assert len(set(prompts)) == 1
    assert "31337 it is." in prompts[0]
    foreign = bare | {"encrypted_content": "gAAAAABo"}
    plain = prompt_of(thinker, seen, input=[*items, foreign, call, result], tools=TOOLS)
    assert "31337" not in plain


@pytest.mark.parametrize("text", ["", "So.", "ß漢😀"])
def test_what_is_sealed_is_opened(text: str) -> None:
    assert opened(sealed(text)) == text


@pytest.mark.parametrize("given", [None, 5, "", "llamakeep.!", "llamakeep.//8=", "x"])
def test_what_nobody_sealed_is_nothing(given: object) -> None:
    assert opened(given) == ""


def test_no_thoughts_are_asked_for_with_an_effort_of_none(thinker: Served, seen: list[Any]) -> None:
    thinks = prompt_of(thinker, seen)
    plain = prompt_of(thinker, seen, reasoning={"effort": "none"})
    assert thinks.endswith("<think>\n")
    assert not plain.endswith("<think>\n")


# -- what is asked ---------------------------------------------------------------------------------
def test_items_become_the_messages_that_they_are(
    qwen: Served,
    seen: list[Any],
) -> None:
    items: list[Any] = [
        {"type": "message", "role": "developer", "content": "Rule two."},
        {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [
                {"type": "output_text", "text": "Hi", "annotations": []},
                {"type": "refusal", "refusal": " there"},
            ],
        },
        {"role": "user", "content": ASK},
    ]
    prompt = prompt_of(qwen, seen, input=items, instructions="Rule one.")
    messages = [
        {"role": "system", "content": "Rule one.\n\nRule two."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi there"},
        {"role": "user", "content": ASK},
    ]
    chat = qwen.answer("/apply-template", messages=messages)["prompt"]
    assert prompt.removeprefix("<s>") == chat.removeprefix("<s>")
    texts = [qwen.engine.vocab.text(seen[-1].prompt[at:]) for at in seen[-1].user_starts]
    assert len(texts) == 2
    assert ASK not in texts[0].partition("Hi there")[0]
    assert texts[1].startswith("<|im_start|>user\n" + ASK)


def test_an_answer_does_not_go_on_with_the_last_one(
    qwen: Served,
    seen: list[Any],
) -> None:
    items = [{"role": "user", "content": ASK}, {"role": "assistant", "content": "It is"}]
    assert prompt_of(qwen, seen, input=items).endswith("<|im_start|>assistant\n")


def test_salts_keep_requests_apart_and_cache_keys_do_not(server: Served) -> None:
    asked = {"input": "S" * 200, "max_output_tokens": 1}

    def cached(**fields: Any) -> int:
        details = ask(server, **asked, **fields)["usage"]["input_tokens_details"]
        return int(details["cached_tokens"])

    cached()
    assert cached(prompt_cache_key="other") > 180
    assert cached(cache_salt="other") == 0
    assert cached(cache_mode="write") == 0


@pytest.mark.parametrize("path", ["/responses", "/v1/responses"])
def test_both_addresses_answer(server: Served, path: str) -> None:
    assert ask(server, path, max_output_tokens=1)["output"]
    assert server.answer(f"{path}/input_tokens", input=ASK)["input_tokens"] > len(ASK)


@pytest.mark.parametrize(
    ("method", "suffix"),
    [("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")],
)
def test_no_response_is_stored(server: Served, method: str, suffix: str) -> None:
    answer_id = ask(server, max_output_tokens=1, store=True)["id"]
    response = server.client.request(method, f"{PATH}/{answer_id}{suffix}")
    assert answer_id in server.error_of(response, 404)["message"]


def test_endpoints_have_labels() -> None:
    assert endpoint_of("/responses") == endpoint_of(PATH) == PATH
    assert endpoint_of(f"{PATH}/input_tokens") == f"{PATH}/input_tokens"
    assert endpoint_of(f"{PATH}/resp_1/cancel") == f"{PATH}/{{id}}"


def test_what_coding_agents_send_is_answered(qwen: Served, says: Says) -> None:
    says(called("mcp__files__.read", {"city": "Rome"}))
    patch = {"type": "grammar", "syntax": "lark", "definition": "start: patch"}
    shell: dict[str, Any] = {
        "type": "function",
        "name": "shell",
        "description": "Runs a command.",
        "strict": False,
        "parameters": {
            "type": "object",
            "properties": {"command": {"type": "array", "items": {"type": "string"}}},
            "required": ["command"],
            "additionalProperties": False,
        },
    }
    text = {"type": "input_text", "text": "Where am I?"}
    first = {"type": "message", "role": "developer", "content": [text]}
    items: list[Any] = [first, first | {"role": "user"}, first | {"role": "user"}]
    body: dict[str, Any] = {
        "model": "any",
        "instructions": "You are an agent.",
        "tools": [
            shell,
            {"type": "custom", "name": "apply_patch", "description": "Edits.", "format": patch},
            SPACE | {"name": "mcp__files__"},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0195",
        "text": {"verbosity": "medium"},
        "client_metadata": {"installation": "x"},
    }
    events = events_of(qwen, input=items, **body)
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [(item["name"], item["namespace"]) for item in done] == [("read", "mcp__files__")]
    assert done == events[-1]["response"]["output"]
    result = [{"type": "input_text", "text": "Nothing."}]
    items += done
    items.append({"type": "function_call_output", "call_id": done[0]["call_id"], "output": result})
    says("Nowhere.")
    last = events_of(qwen, input=items, **body)[-1]
    assert last["type"] == "response.completed"
    cached = last["response"]["usage"]["input_tokens_details"]["cached_tokens"]
    assert cached > 0.9 * events[-1]["response"]["usage"]["input_tokens"]


# -- what cannot be meant --------------------------------------------------------------------------
def item(**fields: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": ASK}, fields]}


def part(**fields: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}, fields]}]}


def tool(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "name": "f"} | fields]}


def after_call(*items: dict[str, Any], **fields: Any) -> dict[str, Any]:
    call = {"type": "function_call", "call_id": "x", "name": "weather", "arguments": "{}"}
    return {"input": [{"role": "user", "content": ASK}, call | fields, *items], "tools": TOOLS}


RESULT = {"type": "function_call_output", "call_id": "x", "output": "1"}
SCHEMA = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
WRONG: list[tuple[str, dict[str, Any]]] = [
    ("input", {"input": None}),
    ("input", {"input": []}),
    ("input", {"input": 5}),
    ("input.0", {"input": ["x"]}),
    ("input.0.role", {"input": [{"role": "tool", "content": "x"}]}),
    ("input.0.content", {"input": [{"role": "user"}]}),
    ("input.0.content", {"input": [{"role": "user", "content": 5}]}),
    ("input.0.content.0", {"input": [{"role": "user", "content": ["x"]}]}),
    ("input.0.content.1.type", part(type="input_image", image_url="data:x")),
    ("input.0.content.1.type", part(type="input_file", file_id="x")),
    ("input.0.content.1.text", part(type="input_text", text=None)),
    ("input.1", item(type="item_reference", id="msg_1")),
    ("input.1", item(id="msg_1")),
    ("input.1.type", item(type="web_search_call", id="x")),
    ("input.1.type", item(type="compaction", encrypted_content="x")),
    ("input.1.summary.0.type", item(type="reasoning", id="x", summary=[{"type": "x"}])),
    ("input.1.call_id", item(**RESULT)),
    ("input.1.call_id", item(type="function_call_output", output="x")),
    ("input.1.call_id", after_call(call_id="")),
    ("input.1.name", after_call(name=None)),
    ("input.1.namespace", after_call(namespace=5)),
    ("input.1.arguments", after_call(arguments='{"city": "Ro')),
    ("input.1.arguments", after_call(arguments="[1]")),
    ("input.1.arguments", after_call(arguments={})),
    ("input.2.call_id", after_call(RESULT | {"call_id": "y"})),
    ("input.2.call_id", after_call(after_call()["input"][1])),
    ("input.2.output", after_call(RESULT | {"output": None})),
    ("input.2.output.0.type", after_call(RESULT | {"output": [{"type": "input_image"}]})),
    ("input.3.call_id", after_call({"role": "user", "content": "x"}, RESULT)),
    ("previous_response_id", {"previous_response_id": "resp_1"}),
    ("conversation", {"conversation": "conv_1"}),
    ("background", {"background": True}),
    ("prompt", {"prompt": {"id": "pmpt_1"}}),
    ("context_management", {"context_management": [{"type": "compaction"}]}),
    ("moderation", {"moderation": {"model": "x"}}),
    ("n", {"n": 2}),
    ("include.0", {"include": ["everything"]}),
    ("top_logprobs", {"top_logprobs": 21}),
    ("max_output_tokens", {"max_output_tokens": 0}),
    ("truncation", {"truncation": "x"}),
    ("metadata.a", {"metadata": {"a": 5}}),
    ("json_schema", {"json_schema": False}),
    ("json_schema", {"json_schema": {}, "response_format": {"type": "text"}}),
    ("grammar", {"grammar": "root ::= [a]"}),
    ("tools.0", {"tools": ["x"]}),
    ("tools.0.type", {"tools": [{"name": "f"}]}),
    ("tools.0.type", tool(type="unheard_of")),
    ("tools.0.name", tool(name="a b")),
    ("tools.0.name", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
    ("tools.0.parameters", tool(parameters=[1])),
    ("tools.0.parameters", tool(parameters={"type": "string"})),
    ("tools.0.strict", tool(strict="yes")),
    ("tools.1.name", {"tools": [TIME, TIME]}),
    ("tools.0.format", tool(type="custom", format={"type": "grammar"})),
    ("tools.0.description", tool(type="custom", description=5)),
    ("tools.0.tools", tool(type="namespace")),
    ("tools.0.name", tool(type="namespace", name=None, tools=[])),
    ("tools.0.description", tool(type="namespace", description=5, tools=[])),
    ("tools.0.tools.0", tool(type="namespace", tools=[5])),
    ("tools.0.tools.0.type", tool(type="namespace", tools=[SPACE])),
    ("tools.0.tools.0.name", tool(type="namespace", tools=[{"type": "function"}])),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "function", "name": "other"}}),
    ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "function"}}),
    ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "web_search"}}),
    ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "tools": TOOLS}}),
    ("text.format.type", {"text": {"format": {"type": "grammar"}}}),
    ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "n"}}}),
    ("text.format.schema", {"text": {"format": SCHEMA | {"schema": {"type": "x"}}}}),
    ("text.format.schema", {"text": {"format": SCHEMA}}),
    ("text.format", {"text": {"format": {"type": "json_object"}}}),
    ("tools", {"tools": TOOLS, "tool_choice": "required"}),
    ("chat_template_kwargs", {"chat_template_kwargs": "x"}),
]


@pytest.mark.parametrize(("param", "fields"), WRONG)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_meant_is_a_400_with_its_place(
    qwen: Served,
    param: str,
    fields: dict[str, Any],
    stream: bool,
) -> None:
    error = qwen.error(PATH, **({"input": ASK, "max_output_tokens": 1, "stream": stream} | fields))
    assert str(error["param"]).startswith(param)
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("kind", HOSTED)
def test_tools_of_openais_own_are_refused_by_name(qwen: Served, kind: str) -> None:
    error = qwen.error(PATH, input=ASK, tools=[WEATHER, {"type": kind}])
    assert error["param"] == "tools.1.type"
    assert repr(kind) in error["message"]


def test_a_model_without_a_template_says_so() -> None:
    with served(no_template=True) as server:
        assert "chat template" in server.error(PATH, 501, input=ASK)["message"]


@pytest.mark.parametrize("depth", [130, 1000, 100_000])
@pytest.mark.parametrize("where", ["tools", "text", "arguments"])
def test_what_is_nested_deeply_is_a_400_and_no_slot_is_lost(
    qwen: Served,
    where: str,
    depth: int,
) -> None:
    deep = '{"a":' * depth + "1" + "}" * depth
    body: dict[str, Any] = {"input": ASK, "max_output_tokens": 1}
    if where == "tools":
        body |= tool(parameters="DEEP")
    elif where == "text":
        body["text"] = {"format": SCHEMA | {"schema": "DEEP"}}
    else:
        body |= after_call(arguments=deep)
    response = qwen.raw(PATH, json.dumps(body).replace('"DEEP"', deep).encode())
    if where == "arguments" and depth == 130:
        assert response.status_code == 200, response.text
    else:
        qwen.error_of(response, 400)
    assert not any(slot["is_processing"] for slot in qwen.client.get("/slots").json())


@pytest.mark.parametrize("number", ["NaN", "1e999", "-Infinity"])
@pytest.mark.parametrize("where", ["tools", "text", "choice"])
def test_a_number_that_json_does_not_have_is_a_400(qwen: Served, where: str, number: str) -> None:
    odd = {"type": "object", "properties": {"a": {"type": "number", "default": "ODD"}}}
    body: dict[str, Any] = {"input": ASK, "max_output_tokens": 1}
    if where == "tools":
        body |= tool(parameters=odd)
    elif where == "text":
        body["text"] = {"format": {"type": "text", "schema": odd}}
    else:
        body |= {"tools": TOOLS, "tool_choice": {"type": "function", "name": "time", "x": "ODD"}}
    response = qwen.raw(PATH, json.dumps(body).replace('"ODD"', number).encode())
    assert "tell" in qwen.error_of(response, 400)["message"] or where == "choice"


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_of_a_megabyte_is_a_400_and_no_slot_is_lost(
    qwen: Served,
    stream: bool,
) -> None:
    fields = {f"f_{index}": {"type": "string", "description": "x" * 50} for index in range(12_000)}
    large = tool(parameters={"type": "object", "properties": fields})
    error = qwen.error(PATH, input=ASK, stream=stream, **large)
    assert error["type"] == "exceed_context_size_error"
    assert error["n_prompt_tokens"] > 1 << 20
    assert not any(slot["is_processing"] for slot in qwen.client.get("/slots").json())


def test_a_client_that_goes_away_frees_its_slot() -> None:
    with served(engine={"n_seqs": 1}) as server:
        asked = {"input": ASK, "ignore_eos": True, "max_output_tokens": 400}
        with server.streaming(PATH, asked):
            pass
        assert server.record().stop == "cancelled"
        assert ask(server, max_output_tokens=1)["output"]


def test_a_failure_in_a_stream_is_an_event() -> None:
    model = runtime_of("attention", n_seqs=2, n_ctx=512)

    def fail(operation: str) -> None:
        if operation == "evaluate":
            raise DecodeError("broken for good")

    with served(engine={"runtime": model}) as server:
        asked = {"input": ASK, "max_output_tokens": 400, "ignore_eos": True, "stream": True}
        with server.client.stream("POST", PATH, json=asked) as response:
            lines = response.iter_lines()
            while "output_text.delta" not in next(lines):
                pass
            model.failures = fail
            rest = list(lines)
            model.failures = None
        data = [json.loads(line[6:]) for line in rest if line.startswith("data: ")]
        assert data[-1]["type"] == "response.failed"
        assert data[-1]["response"]["status"] == "failed"
        assert data[-1]["response"]["error"]["code"] == "server_error"
        EVENTS.validate_python(data[-1])


# -- OpenAI's client -------------------------------------------------------------------------------
@pytest.mark.parametrize("stream", [False, True])
def test_the_client_calls_a_tool_in_two_steps(
    family: tuple[str, Served],
    says: Says,
    stream: bool,
) -> None:
    name, server = family
    says(CALL[name])
    asked: dict[str, Any] = {"model": "any", "tools": TOOLS, "store": False}
    items: list[Any] = [{"role": "user", "content": ASK}]
    with client_of(server) as client:
        if stream:
            with client.responses.stream(input=items, **asked) as events:
                seen = [event.type for event in events]
                answer: Any = events.get_final_response()
            assert "response.function_call_arguments.delta" in seen
            assert seen[-1] == "response.completed"
        else:
            answer = client.responses.create(input=items, **asked)
        [call] = answer.output
        assert call.type == "function_call"
        assert json.loads(call.arguments) == {"city": "Rome"}
        items += [each.to_dict() for each in answer.output]
        items.append({"type": "function_call_output", "call_id": call.call_id, "output": "24 C"})
        says(SAY.get(name, 'It is "warm".'))
        last = client.responses.create(input=items, **asked)
        assert (last.output_text, last.status) == ('It is "warm".', "completed")


def test_the_client_counts_tokens_and_understands_errors(qwen: Served) -> None:
    with client_of(qwen) as client:
        assert client.responses.input_tokens.count(model="any", input=ASK).input_tokens > len(ASK)
        with pytest.raises(BadRequestError) as caught:
            client.responses.create(model="any", input=ASK, previous_response_id="resp_1")
        assert caught.value.param == "previous_response_id"
        with pytest.raises(NotFoundError):
            client.responses.retrieve("resp_1")
