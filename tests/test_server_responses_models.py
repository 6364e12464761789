"""`/v1/responses` with models and OpenAI's client: what is asked for holds on any weights."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from openai import BadRequestError, OpenAI
from pydantic import BaseModel, ConfigDict

from tests.test_server_tool_models import real

TEMPLATES = Path(__file__).parent / "data" / "templates"
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "description": "Of a city.",
    "parameters": CITY,
    "strict": True,
}
NOTE: dict[str, Any] = {"type": "custom", "name": "note", "description": "Takes a note."}
ASK = "How is it in Rome?"
OFF = {"chat_template_kwargs": {"enable_thinking": False}}  # no weights here end their thoughts


class Report(BaseModel):
    """What is asked for."""

    model_config = ConfigDict(extra="forbid")

    sky: Literal["clear", "grey"]
    rain: bool
    days: list[Literal["today", "later"]]


FORMAT: Any = {
    "type": "json_schema",
    "name": "report",
    "schema": {
        "type": "object",
        "properties": {
            "sky": {"enum": ["clear", "grey"]},
            "rain": {"type": "boolean"},
            "days": {"type": "array", "items": {"enum": ["today", "later"]}, "maxItems": 3},
        },
        "required": ["sky", "rain", "days"],
        "additionalProperties": False,
    },
}


@contextlib.contextmanager
def client_of(path: Path, template: str) -> Iterator[tuple[OpenAI, httpx.Client]]:
    """Serve a model; the values are OpenAI's client and a plain one."""
    with real(path, template) as (client, engine):
        with OpenAI(api_key="any", base_url=f"{client.base_url}/v1", max_retries=0) as openai:
            yield openai, client
        assert not any(slot.is_processing for slot in engine.slots())


def source(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


@pytest.mark.parametrize("template", ["qwen", "qwen_coder", "llama31", "gemma", "qwen_thinks"])
def test_a_tool_is_called_in_two_steps(template: str, tiny_model: Callable[[str], Path]) -> None:
    with client_of(tiny_model("attention"), source(template)) as (client, _):
        items: list[Any] = [{"role": "user", "content": ASK}]
        asked: dict[str, Any] = {"model": "any", "tools": [WEATHER], "extra_body": OFF}
        asked |= {"max_output_tokens": 300, "parallel_tool_calls": False}
        first = client.responses.create(input=items, tool_choice="required", **asked)
        assert first.status == "completed"
        [call] = first.output
        assert call.type == "function_call"
        assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")
        items += [call.to_dict()]
        items += [{"type": "function_call_output", "call_id": call.call_id, "output": "24 C"}]
        form: Any = {"format": FORMAT}
        with client.responses.stream(input=items, tool_choice="none", text=form, **asked) as events:
            kinds = [event.type for event in events]
            last = events.get_final_response()
        assert kinds[:2] == ["response.created", "response.in_progress"]
        assert kinds[-1] == "response.completed"
        assert Report.model_validate_json(last.output_text)
        assert last.usage is not None
        assert last.usage.input_tokens_details.cached_tokens > 0


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
def test_a_structured_output_is_parsed(kind: str, tiny_model: Callable[[str], Path]) -> None:
    class Small(BaseModel):
        """A model whose schema the client makes."""

        sky: Literal["clear", "grey"]
        rain: bool

    with client_of(tiny_model(kind), source("qwen")) as (client, _):
        for seed in range(3):
            parsed = client.responses.parse(
                model="any", input=ASK, text_format=Small, extra_body={"seed": seed}
            )
            assert isinstance(parsed.output_parsed, Small)
        with client.responses.stream(model="any", input=ASK, text_format=Small) as events:
            done = [event for event in events if event.type == "response.output_text.done"]
            assert events.get_final_response().output_parsed == done[0].parsed
        json_object: Any = {"format": {"type": "json_object"}}
        loose = client.responses.create(
            model="any", input=ASK, text=json_object, max_output_tokens=30
        )
        assert loose.output_text.startswith("{")


@pytest.mark.parametrize("template", ["qwen", "mistral_tools", "gemma"])
def test_an_answer_beside_tools_calls_or_has_its_format(
    template: str, tiny_model: Callable[[str], Path]
) -> None:
    form: Any = {"format": FORMAT}
    with client_of(tiny_model("attention"), source(template)) as (client, _):
        seen = set()
        for seed in range(8):
            answer = client.responses.create(
                model="any",
                input=ASK,
                tools=[WEATHER],  # type: ignore[list-item]
                text=form,
                temperature=1.8,
                parallel_tool_calls=False,
                extra_body={"seed": seed},
            )
            [item] = answer.output
            seen.add(item.type)
            if item.type == "function_call":
                assert json.loads(item.arguments)["city"] in ("Rome", "Oslo")
            else:
                assert Report.model_validate_json(answer.output_text)
        assert seen == {"function_call", "message"}


def test_thoughts_come_before_a_format(tiny_model: Callable[[str], Path]) -> None:
    form: Any = {"format": FORMAT}
    with client_of(tiny_model("attention"), source("qwen_thinks")) as (client, _):
        answer = client.responses.create(model="any", input=ASK, text=form, max_output_tokens=20)
        assert (answer.status, [item.type for item in answer.output]) == (
            "incomplete",
            ["reasoning"],
        )
        assert answer.usage is not None
        assert answer.usage.output_tokens_details.reasoning_tokens == 20
        plain = client.responses.create(
            model="any", input=ASK, text=form, reasoning={"effort": "none"}
        )
        assert Report.model_validate_json(plain.output_text)


def test_a_custom_tool_gets_a_text_from_a_model(tiny_model: Callable[[str], Path]) -> None:
    with client_of(tiny_model("attention"), source("qwen")) as (client, plain):
        answer = client.responses.create(
            model="any",
            input=ASK,
            tools=[NOTE],  # type: ignore[list-item]
            tool_choice={"type": "custom", "name": "note"},
            max_output_tokens=60,
        )
        [call] = answer.output
        assert call.type == "custom_tool_call"
        assert call.name == "note"
        assert not call.input.startswith('{"input"')
        items = [
            {"role": "user", "content": ASK},
            call.to_dict(),
            {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "noted"},
        ]
        response = plain.post(
            "/v1/responses", json={"input": items, "tools": [NOTE], "max_output_tokens": 3}
        )
        assert response.status_code == 200, response.text


def test_a_schema_that_cannot_be_followed_is_refused_with_its_place(
    tiny_model: Callable[[str], Path],
) -> None:
    odd = {"type": "object", "properties": {"a": {"type": "string", "not": {"const": "x"}}}}
    strict = {"type": "function", "name": "f", "parameters": odd, "strict": True}
    loose = strict | {"strict": False}
    with client_of(tiny_model("attention"), source("qwen")) as (client, _):
        for tools in ([], [WEATHER]):
            with pytest.raises(BadRequestError) as caught:
                client.responses.create(
                    model="any",
                    input=ASK,
                    tools=tools,
                    text={"format": {"type": "json_schema", "name": "n", "schema": odd}},
                )
            assert str(caught.value.param).startswith("text.format.schema.properties.a")
        with pytest.raises(BadRequestError, match=r"'tools\.0\.parameters\.properties\.a"):
            client.responses.create(model="any", input=ASK, tools=[strict])  # type: ignore[list-item]
        answer = client.responses.create(
            model="any",
            input=ASK,
            tools=[loose],  # type: ignore[list-item]
            max_output_tokens=2,
        )
        assert answer.status == "incomplete"


def test_a_conversation_that_is_sent_again_is_not_evaluated_again(smollm2_path: Path) -> None:
    with client_of(smollm2_path, source("chatml")) as (client, _):
        rules = "Answer each question about the lighthouse in a few words. " * 8
        items: list[Any] = [{"role": "user", "content": "When was it built?"}]
        asked: dict[str, Any] = {"model": "any", "instructions": rules, "max_output_tokens": 12}
        first = client.responses.create(input=items, **asked)
        assert first.output_text
        items += [each.to_dict() for each in first.output]
        items.append({"role": "user", "content": "And of what?"})
        second = client.responses.create(input=items, **asked)
        assert first.usage is not None
        assert second.usage is not None
        cached = second.usage.input_tokens_details.cached_tokens
        assert cached > 0.9 * first.usage.input_tokens


# -- the same in chats -----------------------------------------------------------------------------
CHAT_FORMAT: Any = {
    "type": "json_schema",
    "json_schema": {"name": "report", "schema": FORMAT["schema"]},
}
CHAT_WEATHER: Any = {
    "type": "function",
    "function": {key: value for key, value in WEATHER.items() if key != "type"},
}


def test_a_chat_thinks_before_its_format(tiny_model: Callable[[str], Path]) -> None:
    asked: Any = {
        "model": "any",
        "messages": [{"role": "user", "content": ASK}],
        "response_format": CHAT_FORMAT,
    }
    with client_of(tiny_model("attention"), source("qwen_thinks")) as (client, _):
        answer = client.chat.completions.create(**asked, max_tokens=20)
        message: Any = answer.choices[0].message
        assert (answer.choices[0].finish_reason, message.content) == ("length", "")
        assert message.reasoning_content
        plain = client.chat.completions.create(**asked, extra_body=OFF)
        assert Report.model_validate_json(plain.choices[0].message.content or "")


@pytest.mark.parametrize("template", ["qwen", "llama31", "gemma"])
def test_a_chat_beside_tools_calls_or_has_its_format(
    template: str, tiny_model: Callable[[str], Path]
) -> None:
    with client_of(tiny_model("attention"), source(template)) as (client, _):
        seen = set()
        for seed in range(8):
            answer = client.chat.completions.create(
                model="any",
                messages=[{"role": "user", "content": ASK}],
                tools=[CHAT_WEATHER],
                response_format=CHAT_FORMAT,
                temperature=1.8,
                parallel_tool_calls=False,
                seed=seed,
            )
            [choice] = answer.choices
            seen.add(choice.finish_reason)
            if choice.finish_reason == "tool_calls":
                [call] = choice.message.tool_calls or ()
                assert call.type == "function"
                assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
            else:
                assert Report.model_validate_json(choice.message.content or "")
        assert seen == {"tool_calls", "stop"}
