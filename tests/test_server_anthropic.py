"""Anthropic's API over HTTP: messages, events, tools, marks, errors; and its own client."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from anthropic import (
    Anthropic,
    APIStatusError,
    AuthenticationError,
    BadRequestError,
    OverloadedError,
)

from llamakeep.chat_template import BUILT_IN
from llamakeep.engine.request import Request
from llamakeep.runtime.fake import FakeRuntime
from llamakeep.runtime.fake_text import IM_END, FakeSampler
from llamakeep.server.anthropic_shapes import MessageAnswer, MessageError
from llamakeep.server.run import _Front
from tests.server_tools import Served, served

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
CHAT = "/v1/chat/completions"
TEMPLATES = Path(__file__).parent / "data" / "templates"
FAMILIES = ("qwen", "qwen_coder", "llama31", "mistral_tools", "mistral_named", "gemma")
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: dict[str, Any] = {"name": "weather", "description": "Of a city.", "input_schema": CITY}
TIME: dict[str, Any] = {"name": "time", "input_schema": {"type": "object"}}
TOOLS = [WEATHER, TIME]
ASKED: list[Any] = [{"role": "user", "content": "How is it in Rome?"}]
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
MARK = {"type": "ephemeral"}
BODY: dict[str, Any] = {"model": "any", "max_tokens": 100, "messages": ASKED}


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


@pytest.fixture(scope="module")
def thinking() -> Iterator[Served]:
    with served(template=source("qwen_thinks"), engine={"n_ctx": 4096}) as made:
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


def ask(server: Served, **body: Any) -> dict[str, Any]:
    answer: dict[str, Any] = server.answer(MESSAGES, **(BODY | body))
    assert MessageAnswer.model_validate(answer).model_dump() == answer
    return answer


def events(server: Served, **body: Any) -> list[dict[str, Any]]:
    """Return the events of a stream, each of which is called what its type is."""
    asked = BODY | {"stream": True} | body
    with server.client.stream("POST", MESSAGES, json=asked) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["request-id"].startswith("req_")
        parts = response.read().decode().split("\n\n")
    assert parts.pop() == ""
    found = []
    for part in parts:
        name, data = part.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def added_up(told: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the message that events add up to, by what each event may be where it stands."""
    assert [each["type"] for each in told[:1]] == ["message_start"]
    message: dict[str, Any] = told[0]["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    pieces: list[str] = []
    is_open = False
    for each in told[1:-2]:
        if each["type"] == "content_block_start":
            assert not is_open
            assert each["index"] == len(message["content"])
            message["content"].append(dict(each["content_block"]))
            is_open, pieces = True, []
        elif each["type"] == "content_block_delta":
            assert is_open
            assert each["index"] == len(message["content"]) - 1
            block, delta = message["content"][-1], each["delta"]
            if delta["type"] == "input_json_delta":
                pieces.append(delta["partial_json"])
            elif delta["type"] == "signature_delta":
                block["signature"] = delta["signature"]
            else:
                assert delta["type"] == f"{block['type']}_delta"
                block[block["type"]] += delta[block["type"]]
        else:
            assert each == {"type": "content_block_stop", "index": len(message["content"]) - 1}
            is_open = False
            if pieces:
                message["content"][-1]["input"] = json.loads("".join(pieces))
    assert not is_open
    delta, stop = told[-2:]
    assert (delta["type"], stop) == ("message_delta", {"type": "message_stop"})
    return message | delta["delta"] | {"usage": delta["usage"]}


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    """Return what two answers to one question have in common."""
    content = [{**block, "id": ""} for block in message["content"]]
    return {**message, "id": "", "content": content, "usage": {}}


def refused(server: Served, code: int = 400, path: str = MESSAGES, **body: Any) -> str:
    """Return the message of an error, which must have Anthropic's form."""
    return refused_by(server.post(path, BODY | body), code)


def refused_by(response: Any, code: int = 400) -> str:
    assert response.status_code == code, response.text
    body = response.json()
    error = MessageError.model_validate(body)
    assert error.request_id == response.headers["request-id"]
    assert error.error.type == {
        400: "invalid_request_error",
        401: "authentication_error",
        404: "not_found_error",
        413: "request_too_large",
        501: "api_error",
        529: "overloaded_error",
    }.get(code, "invalid_request_error")
    return error.error.message


@contextlib.contextmanager
def client_of(server: Served, **options: Any) -> Iterator[Anthropic]:
    given = {"api_key": "any", "max_retries": 0} | options
    with Anthropic(base_url=server.url, **given) as client:
        yield client


# -- what is answered ------------------------------------------------------------------------------
def test_a_message_is_answered_whole_and_in_events(
    qwen: Served, says: Callable[[str], None]
) -> None:
    says('It is "warm".')
    answer = ask(qwen, model="claude-any")
    assert answer["id"].startswith("msg_")
    assert answer["model"] == "claude-any"
    assert answer["content"] == [{"type": "text", "text": 'It is "warm".'}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("end_turn", None)
    assert answer["usage"]["output_tokens"] == len('It is "warm".') + 1
    told = events(qwen, model="claude-any")
    assert without_ids(added_up(told)) == without_ids(answer)
    assert len([each for each in told if each["type"] == "content_block_delta"]) > 5


def test_an_answer_of_nothing_has_no_blocks(qwen: Served, says: Callable[[str], None]) -> None:
    says("")
    assert ask(qwen)["content"] == []
    assert [each["type"] for each in events(qwen)] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "text", "reason", "word"),
    [
        ({"max_tokens": 5}, "One, ", "max_tokens", None),
        ({"stop_sequences": ["x", "three"]}, "One, two, ", "stop_sequence", "three"),
        ({"max_tokens": 0}, None, "max_tokens", None),
        ({}, "One, two, three.", "end_turn", None),
    ],
)
def test_why_an_answer_ends_is_told(
    qwen: Served,
    says: Callable[[str], None],
    stream: bool,
    body: dict[str, Any],
    text: str | None,
    reason: str,
    word: str | None,
) -> None:
    says("One, two, three.")
    answer = added_up(events(qwen, **body)) if stream else ask(qwen, **body)
    assert answer["content"] == ([] if text is None else [{"type": "text", "text": text}])
    assert (answer["stop_reason"], answer["stop_sequence"]) == (reason, word)


def test_the_usage_adds_up_to_the_prompt(qwen: Served, says: Callable[[str], None]) -> None:
    says("Yes.")
    salted: dict[str, Any] = {"cache_salt": "usage"}
    n_prompt = qwen.answer(COUNT, model="any", messages=ASKED)["input_tokens"]
    first = ask(qwen, **salted)["usage"]
    assert first == {
        "input_tokens": 0,
        "cache_creation_input_tokens": n_prompt,
        "cache_read_input_tokens": 0,
        "output_tokens": 5,
    }
    told = events(qwen, **salted, cache_mode="read")
    begun, usage = told[0]["message"]["usage"], told[-2]["usage"]
    assert usage["cache_read_input_tokens"] > n_prompt // 2
    assert usage["cache_creation_input_tokens"] == 0
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == n_prompt
    assert begun == usage | {"output_tokens": 0}
    off = ask(qwen, **salted, cache_mode="off")["usage"]
    assert (off["input_tokens"], off["cache_read_input_tokens"]) == (n_prompt, 0)


def test_tokens_are_counted_as_messages_have_them(family: tuple[str, Served]) -> None:
    _, server = family
    bodies: list[dict[str, Any]] = [
        {},
        {"tools": TOOLS},
        {"system": "Be brief."} if family[0] != "gemma" else {"tools": [TIME]},
        {"messages": [*ASKED, {"role": "assistant", "content": "It is"}]},
    ]
    for body in bodies:
        asked = {"model": "any", "messages": ASKED} | body
        counted = server.answer(COUNT, **asked)
        usage = ask(server, **body, max_tokens=0)["usage"]
        del usage["output_tokens"]
        assert counted == {"input_tokens": sum(usage.values())}


def test_a_prompt_is_that_of_openais_chat(family: tuple[str, Served]) -> None:
    """One conversation is one prefix, whichever API it comes by."""
    name, server = family
    call = {"type": "tool_use", "id": "a1b2c3d4e", "name": "weather", "input": {"city": "Rome"}}
    result = {"type": "tool_result", "tool_use_id": "a1b2c3d4e", "content": "24 C"}
    ours = [
        *ASKED,
        {"role": "assistant", "content": [{"type": "text", "text": "Let me see."}, call]},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
    theirs = [
        *ASKED,
        {
            "role": "assistant",
            "content": "Let me see.",
            "tool_calls": [{"id": "a1b2c3d4e", "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": "a1b2c3d4e", "content": "24 C"},
        {"role": "user", "content": "So?"},
    ]
    if name.startswith("mistral"):
        ours, theirs = [*ours[:2], {"role": "user", "content": [result]}], theirs[:3]
    tools = [
        {
            "type": "function",
            "function": {
                "name": each["name"],
                "description": each.get("description", ""),
                "parameters": each["input_schema"],
            },
        }
        for each in TOOLS
    ]
    with server.asked() as seen:
        ask(server, messages=ours, tools=TOOLS, max_tokens=0)
        server.answer(CHAT, messages=theirs, tools=tools, max_tokens=0)
    one, other = (request.prompt.tolist() for request in seen)
    assert one == other


# -- tools -----------------------------------------------------------------------------------------
def test_a_call_is_answered_whole_and_in_events(
    family: tuple[str, Served], says: Callable[[str], None]
) -> None:
    name, server = family
    says(CALL[name])
    answer = ask(server, tools=TOOLS)
    (block,) = answer["content"]
    assert block["type"] == "tool_use"
    assert (block["name"], block["input"]) == ("weather", {"city": "Rome"})
    assert block["id"].startswith("toolu_") or name == "mistral_tools"
    assert answer["stop_reason"] == "tool_use"
    told = events(server, tools=TOOLS)
    assert without_ids(added_up(told)) == without_ids(answer)


@pytest.mark.parametrize("stream", [False, True])
def test_blocks_come_in_the_order_in_which_they_are_written(
    thinking: Served, says: Callable[[str], None], stream: bool
) -> None:
    two = CALL["qwen"] + '\n<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
    says("Hm.\n</think>\n\nBoth.\n" + two)
    asked: dict[str, Any] = {"tools": TOOLS, "max_tokens": 500}
    answer = added_up(events(thinking, **asked)) if stream else ask(thinking, **asked)
    kinds = [block["type"] for block in answer["content"]]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    assert answer["content"][0] == {"type": "thinking", "thinking": "Hm.", "signature": "llamakeep"}
    assert answer["content"][1]["text"] == "Both."
    assert [block["name"] for block in answer["content"][2:]] == ["weather", "time"]
    assert len({block["id"] for block in answer["content"][2:]}) == 2
    assert answer["stop_reason"] == "tool_use"


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_alone_ends_the_answer(
    qwen: Served, says: Callable[[str], None], stream: bool
) -> None:
    says(CALL["qwen"] * 2 + "x" * 3000)
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    asked: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 3500}
    answer = added_up(events(qwen, **asked)) if stream else ask(qwen, **asked)
    assert [block["type"] for block in answer["content"]] == ["tool_use"]
    assert answer["stop_reason"] == "tool_use"
    assert answer["usage"]["output_tokens"] < 3000


def test_what_must_not_be_called_is_text(qwen: Served, says: Callable[[str], None]) -> None:
    says(CALL["qwen"])
    answer = ask(qwen, tools=TOOLS, tool_choice={"type": "none"})
    assert answer["content"] == [{"type": "text", "text": CALL["qwen"]}]
    assert answer["stop_reason"] == "end_turn"


@pytest.mark.parametrize(
    ("cut", "given", "reason"),
    [
        ({"max_tokens": 57}, {}, "max_tokens"),
        ({"max_tokens": 62}, {"city": "Rome"}, "max_tokens"),
        ({"stop_sequences": ["Ro"]}, {}, "stop_sequence"),
        ({"stop_sequences": ["</tool_call>"]}, {"city": "Rome"}, "tool_use"),
    ],
)
def test_a_call_that_is_cut_off_is_not_one_to_be_made(
    qwen: Served,
    says: Callable[[str], None],
    cut: dict[str, Any],
    given: dict[str, Any],
    reason: str,
) -> None:
    says(CALL["qwen"])
    answer = ask(qwen, tools=TOOLS, **cut)
    (block,) = answer["content"]
    assert (block["type"], block["input"]) == ("tool_use", given)
    assert answer["stop_reason"] == reason
    assert events(qwen, tools=TOOLS, **cut)[-2]["delta"]["stop_reason"] == reason


@pytest.mark.parametrize("arguments", ['{"city": Rome}', '{"city": NaN}', '{"city": "\\ud800"}'])
def test_arguments_that_are_no_json_are_told_as_they_are(
    qwen: Served, says: Callable[[str], None], arguments: str
) -> None:
    says(f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>')
    answer = ask(qwen, tools=TOOLS)
    assert answer["content"][0]["input"] == {"INVALID_JSON": arguments}
    told = events(qwen, tools=TOOLS)
    pieces = [
        each["delta"]["partial_json"] for each in told if each["type"] == "content_block_delta"
    ]
    assert "".join(pieces) == arguments


def test_a_call_that_has_failed_says_so(qwen: Served) -> None:
    call = {"type": "tool_use", "id": "x", "name": "time", "input": {}}

    def n_tokens(**result: Any) -> int:
        given = {"type": "tool_result", "tool_use_id": "x"} | result
        messages = [
            *ASKED,
            {"role": "assistant", "content": [call]},
            {"role": "user", "content": [given]},
        ]
        asked = {"model": "any", "messages": messages, "tools": TOOLS}
        return int(qwen.answer(COUNT, **asked)["input_tokens"])

    bare = n_tokens()
    assert n_tokens(content=[]) == n_tokens(content="") == bare
    assert n_tokens(content="gone") == bare + len("gone")
    assert n_tokens(content="gone", is_error=True) == bare + len("Error: gone")
    assert n_tokens(content="error 5", is_error=True) == bare + len("error 5")
    assert n_tokens(is_error=True) == bare + len("Error")


# -- thoughts --------------------------------------------------------------------------------------
def test_thoughts_are_blocks_that_come_back_to_the_template(
    thinking: Served, says: Callable[[str], None]
) -> None:
    says("Let me see.\n</think>\n\nWarm.")
    answer = ask(thinking)
    assert [block["type"] for block in answer["content"]] == ["thinking", "text"]
    omitted = {"type": "adaptive", "display": "omitted"}
    shown = added_up(events(thinking, thinking=omitted))
    assert shown["content"][0] == {"type": "thinking", "thinking": "", "signature": "llamakeep"}
    assert without_ids(shown) == without_ids(ask(thinking, thinking=omitted))
    off = {"type": "disabled"}
    says("Warm.")
    assert [each["type"] for each in ask(thinking, thinking=off)["content"]] == ["text"]


def test_thoughts_of_before_are_handed_to_the_template() -> None:
    given = "(message.reasoning_content or '') + message['content']"
    template = BUILT_IN["chatml"].replace("message['content']", given)
    with served(template=template) as server:

        def counted(*thoughts: dict[str, Any]) -> int:
            said = [*thoughts, {"type": "text", "text": "Yes."}]
            messages = [*ASKED, {"role": "assistant", "content": said}, *ASKED]
            return int(server.answer(COUNT, model="any", messages=messages)["input_tokens"])

        redacted = {"type": "redacted_thinking", "data": "x"}
        assert counted() == counted(redacted)
        thought = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
        assert counted(thought) == counted() + len("Hm.")
        assert counted(thought, thought) == counted() + len("Hm.\nHm.")


# -- systems ---------------------------------------------------------------------------------------
def test_a_billing_header_is_no_part_of_the_prompt(qwen: Served) -> None:
    def counted(system: Any) -> int:
        return int(qwen.answer(COUNT, model="any", messages=ASKED, system=system)["input_tokens"])

    header = "x-anthropic-billing-header: cc_version=2.1; cch=fa690;"
    said = {"type": "text", "text": "Be brief."}
    plain = counted("Be brief.")
    assert counted([said]) == counted(f"{header}\nBe brief.") == plain
    assert counted([{"type": "text", "text": header}, said]) == plain
    assert counted(f"Be brief.\n{header}") == plain + len(header) + 1, "it is quoted"
    bare = qwen.answer(COUNT, model="any", messages=ASKED)["input_tokens"]
    assert counted([]) == counted([{"type": "text", "text": header}]) == bare


def test_turns_of_one_role_are_one(qwen: Served) -> None:
    def counted(*messages: Any) -> int:
        return int(qwen.answer(COUNT, model="any", messages=messages)["input_tokens"])

    halves = [{"type": "text", "text": text} for text in ("a", "b")]
    whole = counted({"role": "user", "content": halves})
    assert counted(*({"role": "user", "content": [half]} for half in halves)) == whole
    assert (
        counted({"role": "system", "content": "a"}, *ASKED)
        == qwen.answer(COUNT, model="any", messages=ASKED, system="a")["input_tokens"]
    )


# -- marks -----------------------------------------------------------------------------------------
def starts_of(server: Served, **body: Any) -> list[str]:
    """Return what comes before each place that is likely to be a checkpoint."""
    with server.asked() as seen:
        ask(server, **body, max_tokens=0)
    (request,) = seen
    return [server.engine.vocab.text(request.prompt[:start]) for start in request.user_starts]


def test_marks_are_places_for_checkpoints(
    family: tuple[str, Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, server = family
    document = [
        {"type": "text", "text": "A long document."},
        {"type": "text", "text": "A question."},
    ]
    call = {"type": "tool_use", "id": "a1b2c3d4e", "name": "time", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a1b2c3d4e", "content": "31337"}

    def body(*marked: int) -> dict[str, Any]:
        blocks: list[dict[str, Any]] = [document[0], document[1], call, result, WEATHER]
        given = [
            block | ({"cache_control": MARK} if at in marked else {})
            for at, block in enumerate(blocks)
        ]
        turns = [
            {"role": "user", "content": given[:2]},
            {"role": "assistant", "content": [given[2]]},
            {"role": "user", "content": [given[3]]},
            {"role": "assistant", "content": "Late."},
            {"role": "user", "content": "And now?"},
        ]
        return {"messages": turns, "tools": [given[4], TIME]}

    bare = starts_of(server, **body())
    (text,) = set(starts_of(server, **body(0))) - set(bare)
    assert text.endswith("A long document.") or text.endswith("A long document.\n")
    calls = set(starts_of(server, **body(2))) - set(bare)
    assert all("31337" not in each and "A question." in each for each in calls)
    assert len(calls) == 1 or name == "gemma"  # where results are the user's, it is known anyway
    (after,) = set(starts_of(server, **body(3))) - set(bare)
    assert "31337" in after
    assert "Late." not in after
    (told,) = set(starts_of(server, **body(4))) - set(bare)
    assert '"time"' not in told[told.rindex("Of a city.") :]


def test_marks_change_no_token(qwen: Served, says: Callable[[str], None]) -> None:
    says("Yes.")
    plain = {"system": [{"type": "text", "text": "Be brief."}], "tools": TOOLS}
    marked = {
        "system": [{"type": "text", "text": "Be brief.", "cache_control": MARK | {"ttl": "1h"}}],
        "tools": [WEATHER, TIME | {"cache_control": MARK | {"scope": "global"}}],
        "cache_control": MARK,
    }
    salted = {"cache_salt": "marks"}
    n_prompt = sum(ask(qwen, **plain, **salted)["usage"].values()) - 5
    usage = ask(qwen, **marked, **salted)["usage"]
    assert usage["cache_read_input_tokens"] > n_prompt - 16
    assert sum(usage.values()) - 5 == n_prompt


# -- what cannot be meant --------------------------------------------------------------------------
def after(*blocks: Any, role: str = "user") -> dict[str, Any]:
    """Return messages with a call, and what comes after it."""
    call = {"type": "tool_use", "id": "x", "name": "weather", "input": {}}
    turn = {"role": role, "content": list(blocks)}
    return {"messages": [*ASKED, {"role": "assistant", "content": [call]}, turn]}


def said(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(blocks)}, *ASKED]}


RESULT = {"type": "tool_result", "tool_use_id": "x", "content": "1"}
TEXT = {"type": "text", "text": "a"}
WRONG: list[tuple[str, dict[str, Any]]] = [
    ("max_tokens", {"max_tokens": None}),
    ("max_tokens", {"max_tokens": -1}),
    ("max_tokens", {"max_tokens": "5"}),
    ("model", {"model": None}),
    ("messages", {"messages": []}),
    ("messages", {"messages": "x"}),
    ("messages.0.role", {"messages": [{"role": "tool", "content": "x"}]}),
    ("messages.0.content", {"messages": [{"role": "user", "content": 5}]}),
    ("messages.0.content", {"messages": [{"role": "user"}]}),
    ("messages.0.content.0", said({"type": "image", "source": {}})),
    ("messages.0.content.1", said(TEXT, {"type": "document", "source": {}})),
    ("messages.0.content.0", said({"type": "server_tool_use"})),
    ("messages.0.content.0.text.text", said({"type": "text"})),
    ("messages.0.content.0.text.foo", said(TEXT | {"foo": 1})),
    ("messages.0.content.0", said({"type": "tool_use", "id": "x", "name": "f", "input": {}})),
    ("messages.0.content.0.tool_use.input", said({"type": "tool_use", "id": "x", "name": "f"})),
    ("messages.0.content.0.tool_use_id", said(RESULT)),
    ("messages.2.content.0.tool_use_id", after(RESULT | {"tool_use_id": "y"})),
    ("messages.2.content.1.tool_use_id", after(RESULT, RESULT)),
    ("messages.2.content.0", after(TEXT, RESULT)),
    ("messages.2: tool_result", after(RESULT, role="assistant")),
    ("messages.2", after(TEXT, role="assistant")),
    (
        "messages.2.content.0.tool_result.content.0",
        after(RESULT | {"content": [{"type": "image"}]}),
    ),
    ("messages.1", {"messages": after()["messages"][:2]}),
    ("messages", {"messages": [{"role": "system", "content": ""}]}),
    ("system.0", {"system": [{"type": "image"}]}),
    ("system.0.cache_control.ttl", {"system": [TEXT | {"cache_control": MARK | {"ttl": "2h"}}]}),
    ("system.0.cache_control.type", {"system": [TEXT | {"cache_control": {"type": "x"}}]}),
    ("at most 4", {"system": [TEXT | {"cache_control": MARK}] * 5}),
    ("at most 4", {"system": [TEXT | {"cache_control": MARK}] * 4, "cache_control": MARK}),
    ("tools", {"tools": "x"}),
    ("tools", {"tools": [TIME] * 2000}),
    ("tools.0", {"tools": ["x"]}),
    ("tools.0.name", {"tools": [{"input_schema": {}}]}),
    ("tools.0.name", {"tools": [{"name": "a b", "input_schema": {}}]}),
    ("tools.2.name", {"tools": [*TOOLS, TIME]}),
    ("tools.0.input_schema", {"tools": [{"name": "f"}]}),
    ("tools.0.input_schema", {"tools": [{"name": "f", "input_schema": [1]}]}),
    ("tools.0.type", {"tools": [{"type": "bash_20250124", "name": "bash"}]}),
    ("tools.0.type", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
    ("tools.0.allowed_callers", {"tools": [TIME | {"allowed_callers": ["code_execution"]}]}),
    ("tool_choice", {"tool_choice": {"type": "any"}}),
    ("tool_choice.type", {"tools": TOOLS, "tool_choice": {"type": "required"}}),
    ("tool_choice.name", {"tools": TOOLS, "tool_choice": {"type": "tool"}}),
    ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "other"}}),
    ("temperature", {"temperature": 3}),
    ("top_p", {"top_p": 2}),
    ("thinking.type", {"thinking": {"type": "x"}}),
    ("thinking.budget_tokens", {"thinking": {"type": "enabled", "budget_tokens": 5}}),
    ("output_config.effort", {"output_config": {"effort": "x"}}),
    ("output_config.format.schema", {"output_config": {"format": {"type": "json_schema"}}}),
    (
        "output_config.format.schema.type",
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}},
    ),
    ("cache_mode", {"cache_mode": "x"}),
    ("container", {"container": "x"}),
    ("mcp_servers", {"mcp_servers": [{"url": "x"}]}),
    ("thread", {"thread": {}, "foo": 1} | {"thread": {"id": "x"}}),
    ("foo: Extra inputs are not permitted", {"foo": 1}),
]


@pytest.mark.parametrize(("where", "fields"), WRONG)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_meant_is_a_400_with_its_place(
    qwen: Served, where: str, fields: dict[str, Any], stream: bool
) -> None:
    message = refused(qwen, **fields, stream=stream)
    assert message.startswith(where)


def test_what_means_nothing_here_is_taken(qwen: Served, says: Callable[[str], None]) -> None:
    says("Yes.")
    answer = ask(
        qwen,
        metadata={"user_id": "x"},
        service_tier="auto",
        context_management={"edits": [{"type": "clear_thinking_20251015"}]},
        inference_geo="eu",
        speed="standard",
        mcp_servers=[],
        container=None,
        output_config={"effort": "max"},
        thinking={"type": "enabled", "budget_tokens": 2048},
        diagnostics={"previous_message_id": None},
        tools=[TIME | {"defer_loading": True, "input_examples": [{}], "type": "custom"}],
    )
    assert answer["stop_reason"] == "end_turn"
    headers = {"anthropic-beta": "x-2025-01-01", "anthropic-version": "2023-06-01"}
    assert qwen.post(MESSAGES, BODY, headers=headers).status_code == 200


def test_what_is_no_request_is_a_400(qwen: Served) -> None:
    assert "JSON" in refused_by(qwen.raw(MESSAGES, b"{"))
    assert "object" in refused_by(qwen.raw(MESSAGES, b"[]"))
    assert "JSON" in refused_by(qwen.raw(MESSAGES, b"\xff"))
    refused_by(qwen.client.get(MESSAGES), 405)
    refused_by(qwen.client.get(MESSAGES + "/batches"), 404)


@pytest.mark.parametrize("depth", [130, 1000, 100_000])
@pytest.mark.parametrize("where", ["tools", "input", "format"])
def test_what_is_nested_deeply_is_a_400_and_no_slot_is_lost(
    qwen: Served, where: str, depth: int
) -> None:
    body: dict[str, Any] = BODY | {"tools": TOOLS, "max_tokens": 1}
    if where == "tools":
        body["tools"] = [{"name": "f", "input_schema": "DEEP"}]
    elif where == "format":
        body["output_config"] = {"format": {"type": "json_schema", "schema": "DEEP"}}
    else:
        call = {"type": "tool_use", "id": "x", "name": "f", "input": "DEEP"}
        turns = [{"role": "assistant", "content": [call]}, {"role": "user", "content": [RESULT]}]
        body["messages"] = [*ASKED, *turns]
    key = '{"properties":{"a":' if where == "format" else '{"a":'
    deep = key * depth + "{}" + "}" * (depth * key.count("{"))
    response = qwen.raw(MESSAGES, json.dumps(body).replace('"DEEP"', deep).encode())
    if where == "input" and depth == 130:
        assert response.status_code == 200, response.text
    else:
        message = refused_by(response)
        assert "deep" in message or "JSON" in message or "nested" in message
    assert not any(slot["is_processing"] for slot in qwen.client.get("/slots").json())


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_is_told_as_agents_know_it(stream: bool) -> None:
    fields = {f"field_{index}": {"description": "x" * 50} for index in range(18_000)}
    large = {"name": "f", "input_schema": {"type": "object", "properties": fields}}
    assert len(json.dumps(large)) > 1 << 20
    with served(template=source("qwen"), engine={"n_ctx": 4096, "n_seqs": 1}) as server:
        message = refused(server, tools=[large], stream=stream)
        assert message.startswith("prompt is too long: 1")
        assert message.endswith(" tokens > 4096 maximum")
        assert [slot["is_processing"] for slot in server.client.get("/slots").json()] == [False]
        ask(server, max_tokens=1)


def test_a_call_that_is_required_is_refused_by_a_model_that_follows_no_grammar(
    qwen: Served,
) -> None:
    assert "grammar" in refused(qwen, tools=TOOLS, tool_choice={"type": "any"})
    given = {"format": {"type": "json_schema", "schema": CITY}}
    assert "grammar" in refused(qwen, output_config=given)


def test_a_model_without_a_template_says_so_for_good() -> None:
    with served(no_template=True) as server:
        response = server.post(MESSAGES, BODY)
        assert "template" in refused_by(response, 501)
        assert response.headers["x-should-retry"] == "false"


def test_a_key_a_size_and_a_queue_are_refused_in_its_form() -> None:
    with served(api_keys=("right",), max_body_bytes=2000) as server:
        assert "Key" in refused(server, 401)
        headers = {"x-api-key": "right"}
        large = BODY | {"system": "x" * 3000}
        assert "2,000" in refused_by(server.post(MESSAGES, large, headers=headers), 413)
        with client_of(server, api_key="wrong") as client, pytest.raises(AuthenticationError):
            client.messages.create(**BODY)
        with client_of(server, api_key="right") as client:
            assert client.messages.create(**BODY | {"max_tokens": 1}).type == "message"


def test_a_full_queue_is_an_overload_that_is_asked_again() -> None:
    with served(engine={"n_seqs": 1, "max_waiting": 1}) as server, server.held():
        for _ in range(2):
            server.engine.submit(Request.of([5, 6, 7], max_tokens=1), lambda _: None)
        response = server.post(MESSAGES, BODY)
        refused_by(response, 529)
        assert int(response.headers["retry-after"]) >= 1
        with client_of(server) as client, pytest.raises(OverloadedError):
            client.messages.create(**BODY)


def test_a_failure_in_a_stream_is_its_last_event(says: Callable[[str], None]) -> None:
    says("x" * 60_000)
    with served(engine={"n_ctx": 65_536}) as server, client_of(server) as client:
        told = iter(client.messages.create(**BODY | {"max_tokens": 60_000}, stream=True))
        assert next(told).type == "message_start"
        break_down(server)
        with pytest.raises(APIStatusError) as caught:
            deque(told)
        error = MessageError.model_validate(caught.value.body)
        assert error.error.type == "api_error"


def test_a_server_that_loads_its_model_says_so_in_its_form() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError

    for path, code in ((MESSAGES, 529), (CHAT, 503)):
        asyncio.run(_Front()({"type": "http", "path": path}, receive, send))
        start, body = sent[-2:]
        assert start["status"] == code
        error = json.loads(body["body"])
        assert error["error"]["message"] == "Loading model"
        assert ("code" in error["error"]) == (path == CHAT)


def test_a_silent_stream_has_pings() -> None:
    with served(ping_s=0.05) as server, server.held():
        asked = BODY | {"stream": True}
        with server.client.stream("POST", MESSAGES, json=asked) as response:
            lines = response.iter_lines()
            assert [next(lines), next(lines)] == ["event: ping", 'data: {"type":"ping"}']


def break_down(server: Served) -> None:
    """Let the model fail from now on, more often than the engine tries again."""
    runtime = server.engine._runtime
    assert isinstance(runtime, FakeRuntime)
    for after in range(8):
        runtime.fail("evaluate", after=after)


# -- its client ------------------------------------------------------------------------------------
@pytest.mark.parametrize("stream", [False, True])
def test_the_client_calls_a_tool_in_two_steps(
    family: tuple[str, Served], says: Callable[[str], None], stream: bool
) -> None:
    name, server = family
    says(CALL[name])
    messages: list[Any] = list(ASKED)
    asked: dict[str, Any] = {"model": "any", "max_tokens": 200, "tools": TOOLS}
    with client_of(server) as client:
        if stream:
            with client.messages.stream(messages=messages, **asked) as told:
                kinds = {each.type for each in told}
                answer: Any = told.get_final_message()
            assert {"input_json", "content_block_stop", "message_stop"} <= kinds
        else:
            answer = client.messages.create(messages=messages, **asked)
        assert answer.stop_reason == "tool_use"
        (call,) = answer.content
        assert (call.type, call.name, call.input) == ("tool_use", "weather", {"city": "Rome"})
        messages.append(answer.to_param())
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "24 C"}
        messages.append({"role": "user", "content": [result]})
        says(SAY.get(name, 'It is "warm".'))
        last = client.messages.create(messages=messages, **asked)
        assert (last.content[0].to_dict(), last.stop_reason) == (
            {"type": "text", "text": 'It is "warm".'},
            "end_turn",
        )
        counted = client.messages.count_tokens(model="any", messages=messages, tools=asked["tools"])
        usage = last.usage
        assert counted.input_tokens == (
            usage.input_tokens
            + (usage.cache_read_input_tokens or 0)
            + (usage.cache_creation_input_tokens or 0)
        )


def test_the_client_reads_a_stream(thinking: Served, says: Callable[[str], None]) -> None:
    says("Hm, ä.\n</think>\n\nWarm, ö.")
    with client_of(thinking) as client:
        with client.messages.stream(**BODY) as told:
            assert "".join(told.text_stream) == "Warm, ö."
            message = told.get_final_message()
            assert told.request_id is not None
        first, second = message.content
        assert first.type == "thinking"
        assert (first.thinking, first.signature) == ("Hm, ä.", "llamakeep")
        assert second.type == "text"
        raw = client.messages.create(**BODY, stream=True)
        assert [each.type for each in raw][::100] == ["message_start"]


def test_the_client_understands_errors(qwen: Served) -> None:
    with client_of(qwen) as client, pytest.raises(BadRequestError) as caught:
        client.messages.create(**BODY, tools=[WEATHER, WEATHER])
    assert "tools.1.name" in str(caught.value)
    assert caught.value.request_id is not None
