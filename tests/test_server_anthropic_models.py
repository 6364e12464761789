"""Anthropic's client on models: whatever the weights are, what is required comes as it must."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import jsonschema_rs
import pytest
from anthropic import Anthropic
from pydantic import BaseModel, ConfigDict

from llamakeep.chat_template import ChatTemplate
from llamakeep.server.app import create_app
from tests.server_tools import TIMEOUT_S, serving

TEMPLATES = Path(__file__).parent / "data" / "templates"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"type": "string", "enum": ["C", "F"]},
    },
    "required": ["days", "unit"],
    "additionalProperties": False,
}
TOOL: Any = {"name": "weather", "input_schema": SCHEMA}
ASKED: list[Any] = [{"role": "user", "content": "How is it in Rome?"}]


class Weather(BaseModel):
    """What is asked for."""

    model_config = ConfigDict(extra="forbid")

    is_warm: bool
    unit: Literal["C", "F"]


@contextlib.contextmanager
def real(path: Path, template: str) -> Iterator[Anthropic]:
    """Serve a model with a template; the value is a client."""
    from llamakeep.server.loading import load_engine
    from llamakeep.server.settings import ServerSettings

    engine = load_engine(ServerSettings(model=path, ctx_size=2048, parallel=2, threads=1))
    try:
        text = (TEMPLATES / f"{template}.jinja").read_text()
        chats = ChatTemplate(text, bos_token="<s>", eos_token="</s>")
        with (
            serving(create_app(engine, None, chats)) as url,
            Anthropic(api_key="any", base_url=url, timeout=TIMEOUT_S, max_retries=0) as client,
        ):
            yield client
        engine.check()
    finally:
        engine.close()


@pytest.fixture(params=["qwen", "gemma", "mistral_tools"])
def client(
    request: pytest.FixtureRequest, tiny_model: Callable[[str], Path]
) -> Iterator[Anthropic]:
    with real(tiny_model("attention"), request.param) as made:
        yield made


def test_a_tool_is_called_in_two_steps(client: Anthropic) -> None:
    messages: list[Any] = list(ASKED)
    asked: dict[str, Any] = {"model": "any", "max_tokens": 600, "tools": [TOOL]}
    forced = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    with client.messages.stream(messages=messages, tool_choice=forced, **asked) as told:  # type: ignore[arg-type]
        first = told.get_final_message()
    assert first.stop_reason == "tool_use"
    (call,) = first.content
    assert call.type == "tool_use"
    assert jsonschema_rs.is_valid(SCHEMA, call.input), call.input
    messages.append(first.to_param())
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "24 C"}
    messages.append({"role": "user", "content": [result]})
    second = client.messages.create(messages=messages, **asked | {"max_tokens": 8})
    assert (second.usage.cache_read_input_tokens or 0) > 0
    assert second.usage.output_tokens >= 1


@pytest.mark.parametrize("tools", [[], [TOOL]])
def test_an_answer_has_the_shape_that_is_asked_for(client: Anthropic, tools: list[Any]) -> None:
    for seed in range(3):
        asked = [{"role": "user", "content": f"Number {seed}: how is it in Rome?"}]
        message = client.messages.parse(
            model="any",
            max_tokens=600,
            messages=asked,  # type: ignore[arg-type]
            output_format=Weather,
            tools=tools,
            tool_choice={"type": "none"},
        )
        assert message.stop_reason == "end_turn"
        assert isinstance(message.parsed_output, Weather)


def test_a_schema_of_a_megabyte_is_a_schema(client: Anthropic) -> None:
    schema = {"description": "x" * (1 << 20), "enum": [f"value {n}" for n in range(5000)]}
    message = client.messages.create(
        model="any",
        max_tokens=100,
        messages=[{"role": "user", "content": "Which?"}],
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    (block,) = message.content
    assert block.type == "text"
    assert json.loads(block.text) in schema["enum"]


def test_an_answer_may_be_a_call_where_it_has_a_shape(client: Anthropic) -> None:
    for seed in range(4):
        message = client.messages.create(
            model="any",
            max_tokens=600,
            messages=[{"role": "user", "content": f"Number {seed}: how is it in Rome?"}],
            output_config={"format": {"type": "json_schema", "schema": SCHEMA}},
            tools=[TOOL],
            tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        )
        (block,) = message.content
        if block.type == "tool_use":
            assert message.stop_reason == "tool_use"
            assert jsonschema_rs.is_valid(SCHEMA, block.input), block.input
        else:
            assert (block.type, message.stop_reason) == ("text", "end_turn")
            assert jsonschema_rs.is_valid(SCHEMA, json.loads(block.text)), block.text


def test_thoughts_may_come_before_what_has_a_shape(tiny_model: Callable[[str], Path]) -> None:
    with real(tiny_model("attention"), "qwen_thinks") as client:
        message = client.messages.parse(
            model="any",
            max_tokens=900,
            messages=ASKED,
            output_format=Weather,
            thinking={"type": "disabled"},
        )
        assert isinstance(message.parsed_output, Weather)
