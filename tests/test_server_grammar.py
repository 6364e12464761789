"""Structured output over HTTP, with a tiny model that would answer nonsense."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest

from llamakeep.errors import GrammarError
from llamakeep.server.grammars import Grammars
from llamakeep.tool_calls import Said
from tests.load_tools import CHAT, NATIVE, TEXT, LiveServer, connect, live, text_of
from tests.server_tools import served

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["old", "new"]}, "maxItems": 2},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SHORT = 'root ::= [a-f]{2,6} "-" [0-9]{3}'
ENDLESS = 'root ::= "x" root'
WORDS = "The lighthouse was built in"
MESSAGES = [{"role": "user", "content": "Who keeps the light?"}]
PROMPTS: dict[str, dict[str, Any]] = {
    NATIVE: {"prompt": WORDS},
    TEXT: {"prompt": WORDS, "max_tokens": 200},
    CHAT: {"messages": MESSAGES},
}
FORMATS: dict[str, dict[str, Any]] = {
    "openai": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "person", "strict": True, "schema": PERSON},
        }
    },
    "llama-server": {"response_format": {"type": "json_object", "schema": PERSON}},
    "json_schema": {"json_schema": PERSON},
}


@pytest.fixture(scope="module")
def server(model_dir: Path) -> Iterator[LiveServer]:
    with live(
        model_dir / "tiny-attention.gguf", parallel=2, ctx_size=4096, max_body_bytes=1 << 22
    ) as server:
        yield server


@pytest.fixture
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client
    server.wait_until_idle()
    server.engine.check()


def ask(client: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    response = client.post(path, json=PROMPTS[path] | {"seed": 1} | body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def refused(client: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    response = client.post(path, json=PROMPTS[path] | body)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def streamed(client: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    with client.stream("POST", path, json=PROMPTS[path] | {"stream": True} | body) as response:
        assert response.status_code == 200, response.read()
        data = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    return [json.loads(each) for each in data if each != "[DONE]"]


# -- what comes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [NATIVE, TEXT, CHAT])
@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_validates(client: httpx.Client, path: str, name: str) -> None:
    for seed in range(3):
        answer = ask(client, path, seed=seed, **FORMATS[name])
        assert jsonschema_rs.is_valid(PERSON, json.loads(text_of(answer)))
        if path == NATIVE:
            assert answer["stop_type"] == "eos"
        else:
            assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("path", [NATIVE, TEXT, CHAT])
def test_a_stream_validates(client: httpx.Client, path: str) -> None:
    events = streamed(client, path, **FORMATS["openai"])
    assert len(events) > 5
    assert jsonschema_rs.is_valid(PERSON, json.loads("".join(map(text_of, events[:-1]))))


@pytest.mark.parametrize("path", [NATIVE, TEXT, CHAT])
def test_a_grammar_is_followed(client: httpx.Client, path: str) -> None:
    answer = ask(client, path, grammar=SHORT)
    assert re.fullmatch(r"[a-f]{2,6}-[0-9]{3}", text_of(answer))


@pytest.mark.parametrize("path", [NATIVE, TEXT, CHAT])
def test_any_object_begins_as_one(client: httpx.Client, path: str) -> None:
    for format_ in ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "x"}}):
        text = text_of(ask(client, path, response_format=format_, max_tokens=40))
        assert text.startswith("{")


@pytest.mark.parametrize("nothing", [{"type": "text"}, None])
def test_what_asks_for_nothing_changes_nothing(client: httpx.Client, nothing: Any) -> None:
    plain = text_of(ask(client, NATIVE, n_predict=8))
    more = {"response_format": nothing, "grammar": "", "json_schema": None}
    assert text_of(ask(client, NATIVE, n_predict=8, **more)) == plain


def test_the_settings_show_the_grammar(client: httpx.Client) -> None:
    settings = ask(client, NATIVE, grammar=SHORT)["generation_settings"]
    assert settings["grammar"] == SHORT
    assert settings["grammar_lazy"] is False
    settings = ask(client, NATIVE, json_schema={"type": "null"})["generation_settings"]
    assert '"null"' in settings["grammar"]


def test_a_limit_ends_an_answer_before_its_grammar(client: httpx.Client) -> None:
    assert ask(client, NATIVE, grammar=ENDLESS, n_predict=9)["stop_type"] == "limit"
    answer = ask(client, CHAT, grammar=ENDLESS, max_tokens=9)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 9


def test_an_answer_that_may_not_end_ends_with_its_grammar(client: httpx.Client) -> None:
    answer = ask(client, NATIVE, grammar='root ::= "xyz"', ignore_eos=True)
    assert (answer["content"], answer["stop_type"]) == ("xyz", "eos")
    with_probs = ask(client, NATIVE, grammar='root ::= "xyz"', ignore_eos=True, n_probs=2)
    assert with_probs["content"] == "xyz"
    assert len(with_probs["completion_probabilities"]) == answer["tokens_predicted"]


def test_a_stop_text_ends_it_too(client: httpx.Client) -> None:
    answer = ask(client, NATIVE, grammar='root ::= "abc" "def"', stop=["cd"])
    assert (answer["content"], answer["stop_type"]) == ("ab", "word")


def test_several_answers_each_match(client: httpx.Client) -> None:
    answer = ask(client, CHAT, n=3, grammar=SHORT, temperature=2, top_k=0, min_p=0)
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert all(re.fullmatch(r"[a-f]{2,6}-[0-9]{3}", text) for text in texts)
    assert len(set(texts)) == 3


def test_probabilities_are_the_models(client: httpx.Client) -> None:
    """What is told of the first token does not hang on the grammar."""
    plain = ask(client, NATIVE, n_predict=1, n_probs=5)["completion_probabilities"][0]
    bound = ask(client, NATIVE, n_predict=1, n_probs=5, grammar=ENDLESS)
    found = bound["completion_probabilities"][0]
    assert found["top_logprobs"] == plain["top_logprobs"]
    assert found["logprob"] < min(each["logprob"] for each in plain["top_logprobs"])


def test_a_client_that_goes_away_frees_the_slot(server: LiveServer, client: httpx.Client) -> None:
    body = {"prompt": WORDS, "n_predict": -1, "grammar": ENDLESS, "stream": True}
    for _ in range(3):
        with connect(server.url, NATIVE, body) as sock:
            assert sock.recv(12) == b"HTTP/1.1 200"
    server.wait_until_idle()
    assert ask(client, NATIVE, grammar=SHORT)["stop_type"] == "eos"


# -- what is refused -------------------------------------------------------------------------------


def deep(n: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(n):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def strict(schema: Any) -> dict[str, Any]:
    wrapped = {"name": "x", "schema": schema}
    return {"response_format": {"type": "json_schema", "json_schema": wrapped}}


WHERE = "response_format.json_schema.schema"
BAD: list[tuple[dict[str, Any], str, str]] = [
    (strict({"properties": {"age": {"type": "int"}}}), f"{WHERE}.properties.age.type", "'int' is"),
    (strict({"not": {}}), f"{WHERE}.not", "is not supported"),
    (strict({"$ref": "https://example.org/x"}), f"{WHERE}.$ref", "only references within"),
    (strict({"$ref": "#"}), WHERE, "refers to itself"),
    (strict([1]), WHERE, "a schema is an object"),
    (strict({"pattern": "(?=x)"}), f"{WHERE}.pattern", "looking around"),
    (strict(deep(200)), WHERE + ".properties.a" * 128, "nested deeper than 128"),
    (
        strict({"properties": {f"p{n}": {"type": "integer"} for n in range(20_000)}}),
        f"{WHERE}.properties.p",
        "more than 262,144 characters",
    ),
    (
        {"response_format": {"type": "json_object", "schema": {"type": 5}}},
        "response_format.schema.type",
        "5 is no type",
    ),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is required"),
    ({"response_format": {"type": "yaml"}}, "response_format.type", "json_object"),
    ({"response_format": "json"}, "response_format", "valid dict"),
    ({"json_schema": {"enum": []}}, "json_schema.enum", "not empty"),
    ({"json_schema": "x"}, "json_schema", "a schema is an object"),
    ({"grammar": 'root ::= "x'}, "grammar", "line 1, column 10: the text has no end"),
    ({"grammar": "root ::= other"}, "grammar", "no rule 'other'"),
    ({"grammar": 'x ::= "x"'}, "grammar", "no rule 'root'"),
    ({"grammar": 'root ::= root "x"'}, "grammar", "left recursion"),
    ({"grammar": 'root ::= "x"{1,1000000}'}, "grammar", "more than 2000 repetitions"),
    ({"grammar": "root ::= " + "(" * 100_000}, "grammar", "nested deeper"),
    ({"grammar": 'root ::= "' + "x" * (1 << 20) + '"'}, "grammar", "at most 262,144"),
    ({"grammar": "root ::= <no token>"}, "grammar", "not one"),
    ({"grammar": 5}, "grammar", "valid string"),
    ({"grammar": SHORT, "json_schema": {}}, "json_schema", "together with 'grammar'"),
    ({"grammar": SHORT, "response_format": {"type": "json_object"}}, "response_format", "together"),
    ({"grammar_lazy": True, "grammar": SHORT}, "grammar_lazy", "not supported"),
]


@pytest.mark.parametrize("path", [NATIVE, TEXT, CHAT])
def test_what_cannot_be_meant_is_told_and_no_slot_is_lost(
    server: LiveServer, client: httpx.Client, path: str
) -> None:
    for body, param, said in BAD:
        error = refused(client, path, **body)
        assert error["param"].startswith(param), error["param"]
        assert said in error["message"]
        assert error["type"] == "invalid_request_error"
    assert server.engine.stats()["slots_busy"] == 0
    assert re.fullmatch(r"[a-f]{2,6}-[0-9]{3}", text_of(ask(client, path, grammar=SHORT)))


def test_a_schema_of_a_megabyte_is_a_schema(client: httpx.Client) -> None:
    schema = {"description": "x" * (1 << 20), "enum": [f"value {n}" for n in range(5000)]}
    text = text_of(ask(client, CHAT, **strict(schema)))
    assert json.loads(text) in schema["enum"]


def test_a_body_that_is_nested_very_deeply_is_refused(client: httpx.Client) -> None:
    body = '{"prompt": "x", "json_schema": ' + '{"items": ' * 50_000 + "{}" + "}" * 50_001
    response = client.post(NATIVE, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 400


def test_where_no_token_goes_on_the_request_fails(server: LiveServer, client: httpx.Client) -> None:
    vocab = server.engine.vocab
    bias = [[t, False] for t in range(vocab.n_vocab) if b"x" in vocab.piece(t)]
    body = {"grammar": 'root ::= "a" "x"', "logit_bias": bias}
    assert "no token" in refused(client, NATIVE, **body)["message"]
    response = client.post(NATIVE, json=PROMPTS[NATIVE] | {"stream": True} | body)
    assert "no token" in response.text.strip().splitlines()[-1]  # the stream may have begun


def test_the_fake_model_refuses_grammars() -> None:
    with served() as fake:
        error = fake.error(CHAT, messages=MESSAGES, response_format={"type": "json_object"})
        assert error["param"].startswith("response_format")
        assert "no grammar" in error["message"]
        assert fake.answer(CHAT, messages=MESSAGES, max_tokens=2)


# -- what is kept ----------------------------------------------------------------------------------


def test_a_schema_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []

    def compile_schema(schema: Any, where: str) -> str:
        compiled.append(schema)
        return f'root ::= "{len(compiled)}"'

    monkeypatch.setattr("llamakeep.server.grammars.compile_schema", compile_schema)
    grammars = Grammars(kept_chars=130)
    schemas = [Said({"const": f"{n:030}"}, "x") for n in range(3)]
    first = [grammars.of_schema(schema) for schema in schemas]
    assert grammars.of_schema(replace(schemas[2])) == first[2]
    assert len(compiled) == 3
    grammars.of_schema(schemas[0])  # it had to go
    assert len(compiled) == 4
    grammars.of_schema(Said({"const": "x" * 200}, "x"))
    grammars.of_schema(Said({"const": "x" * 200}, "x"))  # never kept
    assert len(compiled) == 6
    grammars.check()


def test_so_is_one_that_cannot_be() -> None:
    grammars = Grammars()
    for where in ("x", "x", "y"):
        with pytest.raises(GrammarError, match=f"'{where}.type': 5 is no type") as caught:
            grammars.of_schema(Said({"type": 5}, where))
        assert caught.value.where == f"{where}.type"
    grammars.check()
