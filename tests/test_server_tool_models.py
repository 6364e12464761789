"""Tools over HTTP with models: a call that is required is a right one, whatever the weights are."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest

from llamakeep.chat_template import ChatTemplate
from llamakeep.engine import Engine
from llamakeep.server.app import create_app
from tests import tiny_models
from tests.server_tools import TIMEOUT_S, serving

CHAT = "/v1/chat/completions"
TEMPLATES = Path(__file__).parent / "data" / "templates"
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "more": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["days", "unit"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
CLOCK = {"type": "object", "properties": {"utc": {"type": "boolean"}}, "required": ["utc"]}
TIME = {"type": "function", "function": {"name": "time", "parameters": CLOCK}}
TOOLS = [WEATHER, TIME]
SCHEMAS: dict[str, dict[str, Any]] = {"weather": SCHEMA, "time": CLOCK}
ASKED = [{"role": "user", "content": "How is it in Rome?"}]
MARKER = "[TOOL_CALLS]"


@contextlib.contextmanager
def real(path: Path, template: str) -> Iterator[tuple[httpx.Client, Engine]]:
    """Serve a model with a template; the values are a client and the engine."""
    from llamakeep.server.loading import load_engine
    from llamakeep.server.settings import ServerSettings

    settings = ServerSettings(model=path, ctx_size=2048, parallel=2, threads=1)
    engine = load_engine(settings)
    try:
        chats = ChatTemplate(template, bos_token="<s>", eos_token="</s>")
        with (
            serving(create_app(engine, None, chats)) as url,
            httpx.Client(base_url=url, timeout=TIMEOUT_S) as client,
        ):
            yield client, engine
        engine.check()
    finally:
        engine.close()


def ask(client: httpx.Client, **body: Any) -> dict[str, Any]:
    asked = {"messages": ASKED, "tools": TOOLS, "max_tokens": 600, "temperature": 1.5}
    response = client.post(CHAT, json=asked | body)
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json()["choices"][0]
    return choice


def check(calls: list[dict[str, Any]]) -> None:
    for call in calls:
        function = call["function"]
        arguments = json.loads(function["arguments"])
        assert jsonschema_rs.is_valid(SCHEMAS[function["name"]], arguments), arguments


@pytest.mark.parametrize(
    "template",
    ["qwen", "qwen_coder", "llama31", "mistral_tools", "mistral_named", "gemma", "qwen_thinks"],
)
def test_a_call_that_is_required_is_a_right_one(
    template: str, tiny_model: Callable[[str], Path]
) -> None:
    source = (TEMPLATES / f"{template}.jinja").read_text()
    off = {"chat_template_kwargs": {"enable_thinking": False}}  # no weights here end their thoughts
    with real(tiny_model("attention"), source) as (client, _):
        for seed in range(4):
            extra: dict[str, Any] = {"seed": seed, "parallel_tool_calls": False, **off}
            once = {"type": "function", "function": {"name": "time"}}
            choice = ask(client, tool_choice="required", **extra)
            assert choice["finish_reason"] == "tool_calls", choice
            assert choice["message"]["content"] is None
            assert len(choice["message"]["tool_calls"]) == 1
            check(choice["message"]["tool_calls"])
            choice = ask(client, tool_choice=once, **{**extra, "parallel_tool_calls": True})
            (call,) = choice["message"]["tool_calls"]
            assert call["function"]["name"] == "time"
            check([call])


def test_several_calls_are_right_and_are_streamed(tiny_model: Callable[[str], Path]) -> None:
    source = (TEMPLATES / "qwen.jinja").read_text()
    with real(tiny_model("hybrid"), source) as (client, _):
        counts = []
        for seed in range(2):
            asked = {"tool_choice": "required", "seed": seed, "n": 2, "max_tokens": 300}
            choice = ask(client, **asked)
            calls = choice["message"]["tool_calls"]
            check(calls[:-1] if choice["finish_reason"] == "length" else calls)
            counts.append(len(calls))
            body = {"messages": ASKED, "tools": TOOLS, "stream": True}
            with client.stream("POST", CHAT, json=body | asked) as response:
                assert response.status_code == 200
                lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
            assert lines[-1] == "[DONE]"
            chunks = [json.loads(line)["choices"][0] for line in lines[:-1]]
            reasons = [each["finish_reason"] for each in chunks if each["finish_reason"]]
            assert len(reasons) == 2
            assert set(reasons) <= {"tool_calls", "length"}
        assert counts


def test_thoughts_come_before_a_call_that_is_required(tiny_model: Callable[[str], Path]) -> None:
    source = (TEMPLATES / "qwen_thinks.jinja").read_text()
    with real(tiny_model("attention"), source) as (client, _):
        choice = ask(client, tool_choice="required", max_tokens=20)
        assert choice["finish_reason"] == "length"
        assert choice["message"]["reasoning_content"]
        assert "tool_calls" not in choice["message"]
        assert choice["message"]["content"] == ""


def test_a_template_that_knows_no_tools_gets_them_told(smollm2_path: Path) -> None:
    from llamakeep.runtime.llama_text import load_vocab

    vocab = load_vocab(smollm2_path)
    source = vocab.chat_template
    vocab.close()
    assert source is not None
    assert not ChatTemplate(source).traits.tools
    with real(smollm2_path, source) as (client, _):
        choice = ask(client, tool_choice="required", parallel_tool_calls=False, temperature=0)
        assert choice["finish_reason"] == "tool_calls"
        check(choice["message"]["tool_calls"])
        call = choice["message"]["tool_calls"][0]
        messages = [
            *ASKED,
            choice["message"],
            {"role": "tool", "tool_call_id": call["id"], "content": "24 C and sunny"},
        ]
        answer = ask(client, messages=messages, temperature=0, max_tokens=60)
        assert answer["finish_reason"] in ("stop", "tool_calls", "length")
        text = answer["message"]["content"] or ""
        assert "{" not in text[:1]
        plain = ask(client, messages=messages, tools=None, temperature=0, max_tokens=8)
        assert plain["message"]["content"]


@pytest.fixture(scope="module")
def marked(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that has a marker of calls among its special tokens."""
    donor = tiny_models.Tokenizer.from_gguf(smollm2_path)
    fields = []
    for key, value, kind, inner in donor.fields:
        if key == "tokenizer.ggml.tokens":
            value = [MARKER if token == "<jupyter_start>" else token for token in value]
            assert MARKER in value
        fields.append((key, value, kind, inner))
    path = tmp_path_factory.mktemp("marked") / "marked.gguf"
    tiny_models.write_attention(path, tiny_models.Tokenizer(tuple(fields), donor.n_vocab))
    return path


@pytest.mark.parametrize("template", ["mistral_tools", "mistral_named"])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_marker_that_is_a_special_token_is_seen(marked: Path, template: str, choice: str) -> None:
    source = (TEMPLATES / f"{template}.jinja").read_text()
    with real(marked, source) as (client, engine):
        (token,) = engine.vocab.tokenize(MARKER, add_special=False, parse_special=True).tolist()
        assert engine.vocab.piece(token) == b""
        for seed in range(3):
            # The bias lets it be the first token, and often one between calls.
            answer = ask(client, tool_choice=choice, seed=seed, logit_bias={str(token): 30})
            calls = answer["message"]["tool_calls"]
            if answer["finish_reason"] != "length":
                assert answer["message"]["content"] is None
            check(calls[:-1] if answer["finish_reason"] == "length" else calls)


def test_a_client_that_goes_away_frees_its_slot(tiny_model: Callable[[str], Path]) -> None:
    source = (TEMPLATES / "qwen_thinks.jinja").read_text()
    with real(tiny_model("attention"), source) as (client, engine):
        body = {"messages": ASKED, "tools": TOOLS, "tool_choice": "required", "stream": True}
        with client.stream("POST", CHAT, json=body) as response:
            assert next(response.iter_lines())
        choice = ask(client, max_tokens=5, tool_choice="required")
        assert choice["finish_reason"] == "length"
        assert engine.stats()["waiting"] == 0


@pytest.mark.parametrize("strict", [False, True])
def test_a_schema_that_cannot_be_compiled(tiny_model: Callable[[str], Path], strict: bool) -> None:
    odd = {"type": "object", "properties": {"a": {"type": "string", "not": {"const": "x"}}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": odd, "strict": strict}}]
    source = (TEMPLATES / "qwen.jinja").read_text()
    with real(tiny_model("attention"), source) as (client, _):
        body = {"messages": ASKED, "tools": tools, "max_tokens": 4}
        for choice in ("auto", "required"):
            response = client.post(CHAT, json=body | {"tool_choice": choice})
            if not strict:
                assert response.status_code == 200, response.text
                continue
            error = response.json()["error"]
            where = "tools.0.function.parameters.properties.a"
            assert response.status_code == 400
            assert error["param"].startswith(where)
            assert error["message"].startswith(f"'{where}")
        slots = client.get("/slots").json()
        assert not any(slot["is_processing"] for slot in slots)


def test_a_model_that_may_call_nothing_speaks_in_the_same_prompt(
    tiny_model: Callable[[str], Path],
) -> None:
    source = (TEMPLATES / "gemma.jinja").read_text()
    asked = {"messages": ASKED, "tools": TOOLS, "max_tokens": 40, "temperature": 1.5}
    with real(tiny_model("attention"), source) as (client, _):
        prompts = []
        for seed in range(4):
            for choice in ("none", "required"):
                body = asked | {"tool_choice": choice, "seed": seed}
                answer = client.post(CHAT, json=body).json()
                message = answer["choices"][0]["message"]
                prompts.append(answer["usage"]["prompt_tokens"])
                if choice == "none":
                    assert "tool_calls" not in message
                    assert not message["content"].startswith('{"')
        assert len(set(prompts)) == 1
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > prompts[0] - 10
