"""Tools and formats are meant, weighed and refused alike in every API over conversations."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llamakeep.json_schema import ANY_OBJECT
from llamakeep.json_schema.compiler import Compiler
from llamakeep.server import anthropic_chat, grammars, responses
from llamakeep.server.anthropic_schema import CreateMessage
from llamakeep.server.conversation import Conversations
from llamakeep.server.responses_schema import CountInput
from llamakeep.server.schema import ChatCompletion
from llamakeep.tool_calls import Said
from tests.server_tools import Served, served

QWEN = (Path(__file__).parent / "data" / "templates" / "qwen.jinja").read_text()
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
APIS = [CHAT, RESPONSES, MESSAGES]
ASKED = [{"role": "user", "content": "How is it?"}]
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": ASKED, "max_tokens": 2},
    RESPONSES: {"input": ASKED, "max_output_tokens": 2},
    MESSAGES: {"model": "any", "messages": ASKED, "max_tokens": 2},
}
ODD = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)"}}}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}


@pytest.fixture(scope="module")
def qwen() -> Iterator[Served]:
    with served(template=QWEN) as server:
        yield server


def tool(path: str, name: str = "f", schema: Any = CITY, **more: Any) -> dict[str, Any]:
    """Return a tool as an API has it."""
    if path == MESSAGES:
        return {"name": name, "input_schema": schema, **more}
    function = {"name": name, "parameters": schema, **more}
    if path == CHAT:
        return {"type": "function", "function": function}
    return {"type": "function", **function}


def format_(path: str, schema: Any = CITY) -> dict[str, Any]:
    """Return the field that says what an answer has to be, as an API has it."""
    if path == MESSAGES:
        return {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    if path == CHAT:
        wrapped = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        return {"response_format": wrapped}
    return {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}}


FORMATS = {
    CHAT: "response_format.json_schema.schema",
    RESPONSES: "text.format.schema",
    MESSAGES: "output_config.format.schema",
}


def refused(server: Served, path: str, **more: Any) -> tuple[str | None, str]:
    """Return the place that a 400 names, and what it says."""
    response = server.post(path, BODIES[path] | more)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    message: str = error["message"]
    if path == MESSAGES:
        return message.partition(": ")[0], message
    return error.get("param"), message


# -- what is refused -------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("path", "where"),
    [
        (CHAT, "tools.1.function.parameters"),
        (RESPONSES, "tools.1.parameters"),
        (MESSAGES, "tools.1.input_schema"),
    ],
)
def test_a_strict_tool_that_cannot_be_followed_is_named_as_the_client_sent_it(
    qwen: Served, path: str, where: str
) -> None:
    tools = [tool(path, "other"), tool(path, "f", ODD, strict=True)]
    place, message = refused(qwen, path, tools=tools)
    assert place == f"{where}.properties.a.pattern"
    assert message.startswith((place, f"'{place}'"))
    assert "f.parameters" not in message.removeprefix("'").removeprefix(place)


def test_so_is_one_in_a_namespace(qwen: Served) -> None:
    space = {"type": "namespace", "name": "n", "description": "All.", "tools": []}
    space["tools"] = [tool(RESPONSES), tool(RESPONSES, "g", ODD, strict=True)]
    place, _ = refused(qwen, RESPONSES, tools=[space])
    assert place == "tools.0.tools.1.parameters.properties.a.pattern"


@pytest.mark.parametrize("path", APIS)
def test_a_format_that_cannot_be_followed_is_named_as_the_client_sent_it(
    qwen: Served, path: str
) -> None:
    for tools in ([], [tool(path)]):
        place, message = refused(qwen, path, tools=tools, **format_(path, ODD))
        assert place == f"{FORMATS[path]}.properties.a.pattern"
        assert "looking around" in message


@pytest.mark.parametrize("path", APIS)
@pytest.mark.parametrize("name", ["nested x", "the parameters of x"])
def test_a_name_is_wrong_whatever_it_says(qwen: Served, path: str, name: str) -> None:
    place, message = refused(qwen, path, tools=[tool(path, name)])
    assert place == ("tools.0.function.name" if path == CHAT else "tools.0.name")
    assert "a tool's name" in message


@pytest.mark.parametrize("path", APIS)
def test_parameters_are_wrong_whatever_the_name(qwen: Served, path: str) -> None:
    place, message = refused(qwen, path, tools=[tool(path, schema={"type": "string"})])
    schema = {CHAT: "function.parameters", RESPONSES: "parameters", MESSAGES: "input_schema"}
    assert place == f"tools.0.{schema[path]}"
    assert "of an object" in message


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_an_answer_that_goes_on_has_no_format(qwen: Served, path: str) -> None:
    begun = [*ASKED, {"role": "assistant", "content": '{"city": '}]
    place, message = refused(qwen, path, messages=begun, **format_(path))
    assert place == FORMATS[path]
    assert "goes on with a message of the assistant" in message


def test_what_is_not_supported_is_not_promised(qwen: Served) -> None:
    place, message = refused(qwen, CHAT, grammar_lazy=True)
    assert (place, message) == ("grammar_lazy", "'grammar_lazy' is not supported")


# -- what is meant ---------------------------------------------------------------------------------
@pytest.mark.parametrize("given", [{}, {"schema": None}, {"schema": {}}])
def test_a_format_without_a_schema_is_any_object(given: dict[str, Any]) -> None:
    wrapped = {"type": "json_schema", "json_schema": {"name": "x", **given}}
    chat = ChatCompletion(messages=ASKED, response_format=wrapped)
    assert grammars.said_of(chat) == Said(ANY_OBJECT, FORMATS[CHAT])
    asked = CountInput(input="x", text={"format": {"type": "json_schema", "name": "x", **given}})
    assert responses.chat_of(asked)[1].said == Said(ANY_OBJECT, FORMATS[RESPONSES])
    if given.get("schema") is not None:
        body = CreateMessage.model_validate(BODIES[MESSAGES] | format_(MESSAGES, {}))
        assert anthropic_chat.said_of(body) == Said(ANY_OBJECT, FORMATS[MESSAGES])


# -- where it is done ------------------------------------------------------------------------------
@pytest.mark.parametrize("path", APIS)
def test_what_may_be_compiled_is_planned_in_a_thread(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    plan = Conversations.plan

    def noting(*given: Any) -> Any:
        names.append(threading.current_thread().name)
        return plan(*given)

    monkeypatch.setattr(Conversations, "plan", noting)
    shapes = [{}, {"tools": [tool(path)]}, format_(path)]
    if path == MESSAGES:
        shapes.append({"output_format": format_(path)["output_config"]["format"]})
    with served(template=QWEN) as server:
        for shape in shapes:
            server.post(path, BODIES[path] | shape)
    worker = "AnyIO worker thread"
    assert [name == worker for name in names] == [bool(shape) for shape in shapes]


# -- how often it is done --------------------------------------------------------------------------
@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Compiler]:
    """Return what is compiled."""
    made: list[Compiler] = []
    compile_ = Compiler.compile

    def noting(compiler: Compiler) -> str:
        made.append(compiler)
        return compile_(compiler)

    monkeypatch.setattr(Compiler, "compile", noting)
    return made


@pytest.mark.parametrize("path", APIS)
def test_a_format_is_compiled_once_for_all_requests(path: str, compiled: list[Compiler]) -> None:
    with served(template=QWEN) as server:
        for _ in range(3):
            server.post(path, BODIES[path] | format_(path))
    assert len(compiled) == 1


@pytest.mark.parametrize("path", APIS)
def test_counting_tokens_compiles_nothing(
    qwen: Served, path: str, compiled: list[Compiler]
) -> None:
    given = {key: value for key, value in BODIES[path].items() if not key.startswith("max")}
    count = "/count_tokens" if path == MESSAGES else "/input_tokens"
    qwen.answer(path + count, **given, tools=[tool(path)], **format_(path, ODD))
    assert not compiled


@pytest.mark.parametrize("path", APIS)
def test_a_prompt_that_does_not_fit_is_told_so_before_its_format(
    path: str, compiled: list[Compiler]
) -> None:
    long = [{"role": "user", "content": "x" * 300}]
    messages = {"input": long} if path == RESPONSES else {"messages": long}
    with served(template=QWEN, engine={"n_ctx": 128, "n_seqs": 1}) as server:
        _, message = refused(server, path, **messages, **format_(path, ODD))
    assert "exceeds the available context" in message or "prompt is too long" in message
    assert not compiled
