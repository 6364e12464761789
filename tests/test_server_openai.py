"""OpenAI's endpoints, by hand and with OpenAI's own client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError, OpenAI, RateLimitError

from llamakeep.runtime.fake_text import BOS, FakeSampler
from tests.server_tools import HELLO, ONLY_A, Served, served

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as made:
        yield made


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[OpenAI]:
    with OpenAI(api_key="any", base_url=f"{server.url}/v1", max_retries=0) as made:
        yield made


# -- chats -----------------------------------------------------------------------------------------
def test_a_chat_is_answered_in_openais_shape(server: Served) -> None:
    answer = server.answer(CHAT, messages=HELLO, max_tokens=5, logit_bias=ONLY_A)
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "fake"
    assert answer["system_fingerprint"].startswith("b")
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": "AAAAA"}
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    usage = answer["usage"]
    assert usage["completion_tokens"] == 5
    assert usage["total_tokens"] == usage["prompt_tokens"] + 5
    assert set(usage["prompt_tokens_details"]) == {"cached_tokens"}


def test_cached_tokens_are_told_always(server: Served) -> None:
    messages = [{"role": "user", "content": "G" * 200}]
    usages = [server.answer(CHAT, messages=messages, max_tokens=2)["usage"] for _ in range(2)]
    cached = [usage["prompt_tokens_details"]["cached_tokens"] for usage in usages]
    assert cached[0] < 50 < 180 < cached[1]
    chunk = server.stream(
        CHAT, messages=messages, max_tokens=2, stream_options={"include_usage": True}
    )[-1]
    assert chunk["usage"]["prompt_tokens_details"]["cached_tokens"] > 180


def test_a_chat_streams_what_it_answers_whole(server: Served) -> None:
    whole = server.answer(CHAT, messages=HELLO, max_tokens=12, **GREEDY)
    lines = server.lines(CHAT, messages=HELLO, max_tokens=12, **GREEDY)
    assert lines[-1] == "[DONE]"
    first, *pieces, last = server.stream(CHAT, messages=HELLO, max_tokens=12, **GREEDY)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": None}
    text = "".join(piece["choices"][0]["delta"]["content"] for piece in pieces)
    assert text == whole["choices"][0]["message"]["content"]
    assert last["choices"][0] == {"index": 0, "delta": {}, "finish_reason": "length"}
    assert {chunk["object"] for chunk in (first, *pieces, last)} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in (first, *pieces, last)}) == 1
    assert "usage" not in last


def test_the_usage_comes_last_when_asked_for(server: Served) -> None:
    *_, last = server.stream(
        CHAT, messages=HELLO, max_tokens=3, **GREEDY, stream_options={"include_usage": True}
    )
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 3
    assert last["timings"]["predicted_n"] == 3


@pytest.mark.parametrize("word", ["AAA", ["no", "AAA"]])
def test_stop_strings_end_a_chat(server: Served, word: object) -> None:
    answer = server.answer(CHAT, messages=HELLO, max_tokens=50, logit_bias=ONLY_A, stop=word)
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop")
    assert answer["usage"]["completion_tokens"] == 3


def test_the_models_end_is_a_stop(server: Served) -> None:
    end = {str(server.engine.vocab.eos): 1000}
    answer = server.answer(CHAT, messages=HELLO, max_tokens=50, logit_bias=end)
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_several_answers_have_indices_and_seeds_of_their_own(server: Served, stream: bool) -> None:
    asked = {"messages": HELLO, "max_tokens": 8, "n": 3, "seed": 5, "ignore_eos": True}
    texts = {0: "", 1: "", 2: ""}
    if stream:
        for chunk in server.stream(CHAT, **asked):
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["delta"].get("content") or ""
    else:
        for choice in server.answer(CHAT, **asked)["choices"]:
            texts[choice["index"]] = choice["message"]["content"]
    assert len(set(texts.values())) == 3


def test_one_prompt_with_several_answers_counts_once(server: Served) -> None:
    one = server.answer(CHAT, messages=HELLO, max_tokens=2, ignore_eos=True)["usage"]
    three = server.answer(CHAT, messages=HELLO, max_tokens=2, n=3, ignore_eos=True)["usage"]
    assert three["prompt_tokens"] == one["prompt_tokens"]
    assert three["completion_tokens"] == 6


def test_chat_logprobs_add_up_to_the_text(server: Served) -> None:
    asked = {"messages": HELLO, "max_tokens": 4, "logit_bias": ONLY_A, "logprobs": True}
    choice = server.answer(CHAT, **asked, top_logprobs=3)["choices"][0]
    content = choice["logprobs"]["content"]
    assert "".join(each["token"] for each in content) == "AAAA"
    assert [len(each["top_logprobs"]) for each in content] == [3] * 4
    assert all(each["logprob"] <= 0 and each["bytes"] == [65] for each in content)
    none = server.answer(CHAT, **asked)["choices"][0]["logprobs"]["content"]
    assert [each["top_logprobs"] for each in none] == [[]] * 4
    chunks = server.stream(CHAT, **asked, top_logprobs=3)[1:-1]
    assert [chunk["choices"][0]["logprobs"]["content"][0] for chunk in chunks] == content


def test_a_chat_goes_on_with_the_assistants_last_words(server: Served) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "My name"}]
    answer = server.answer(CHAT, messages=messages, max_tokens=1, verbose=True)
    assert answer["__verbose"]["prompt"].endswith("assistant\nMy name")
    error = server.error(
        CHAT, messages=messages, continue_final_message=True, add_generation_prompt=True
    )
    assert error["param"] == "continue_final_message"


def test_the_tokens_of_a_chat_are_counted(server: Served) -> None:
    usage = server.answer(CHAT, messages=HELLO, max_tokens=1)["usage"]
    counted = server.answer(f"{CHAT}/input_tokens", messages=HELLO)
    assert counted["input_tokens"] == usage["prompt_tokens"]


def test_message_starts_reach_the_engine(server: Served) -> None:
    with server.asked() as seen:
        messages = [*HELLO, {"role": "assistant", "content": "Me"}, *HELLO]
        server.answer(CHAT, messages=messages, max_tokens=1)
    (request,) = seen
    vocab = server.engine.vocab
    assert len(request.user_starts) == 2
    for start in request.user_starts:
        assert vocab.text(request.prompt[start:]).startswith("<|im_start|>user")


def test_samplings_defaults_are_openais(server: Served) -> None:
    settings = server.answer(TEXT, prompt="Hi", verbose=True)["__verbose"]["generation_settings"]
    assert (settings["temperature"], settings["top_p"]) == (1.0, 1.0)
    assert (settings["top_k"], settings["min_p"], settings["n_predict"]) == (40, 0.05, 16)
    settings = server.answer(TEXT, prompt="Hi", top_k=7, min_p=0.2, verbose=True)["__verbose"][
        "generation_settings"
    ]
    assert (settings["top_k"], settings["min_p"]) == (7, 0.2)


@pytest.mark.parametrize(
    ("of_server", "of_request", "n"), [(None, {}, 16), (40, {}, 40), (40, {"max_tokens": 3}, 3)]
)
def test_how_much_a_completion_generates(
    of_server: int | None, of_request: dict[str, int], n: int
) -> None:
    with served(n_predict=of_server) as server:
        answer = server.answer("/v1/completions", prompt="Hi", logit_bias=ONLY_A, **of_request)
    assert answer["usage"]["completion_tokens"] == n


# -- completions -----------------------------------------------------------------------------------
def test_a_completion_is_answered_in_openais_shape(server: Served) -> None:
    answer = server.answer(TEXT, prompt="Hi", max_tokens=3, logit_bias=ONLY_A)
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [
        {"text": "AAA", "index": 0, "logprobs": None, "finish_reason": "length"}
    ]
    assert answer["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize("prompt", [["Hi", "Ho"], [[BOS, 72, 105], [BOS, 72, 111]]])
def test_each_prompt_has_its_answers(server: Served, prompt: object) -> None:
    answer = server.answer(TEXT, prompt=prompt, n=2, max_tokens=2, **GREEDY)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts[0] == texts[1] != texts[2] == texts[3]
    assert answer["usage"]["prompt_tokens"] == 6
    assert answer["usage"]["completion_tokens"] == 8


def test_a_completion_streams_what_it_answers_whole(server: Served) -> None:
    whole = server.answer(TEXT, prompt="Hi", max_tokens=8, **GREEDY)["choices"][0]["text"]
    *pieces, last = server.stream(TEXT, prompt="Hi", max_tokens=8, **GREEDY)
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == whole
    assert [piece["choices"][0]["finish_reason"] for piece in pieces] == [None] * len(pieces)
    assert last["choices"][0]["finish_reason"] == "length"


def test_completion_logprobs_have_the_older_shape(server: Served) -> None:
    asked = {"prompt": "Hi", "max_tokens": 3, "logit_bias": ONLY_A}
    logprobs = server.answer(TEXT, **asked, logprobs=2)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["A", "A", "A"]
    assert logprobs["text_offset"] == [0, 1, 2]
    assert all(number <= 0 for number in logprobs["token_logprobs"])
    assert all("A" in table and len(table) >= 2 for table in logprobs["top_logprobs"])
    chunks = server.stream(TEXT, **asked, logprobs=2)[:-1]
    offsets = [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in chunks]
    assert offsets == [[0], [1], [2]]


def offsets(server: Served, stream: bool, **asked: Any) -> list[int]:
    """Return `text_offset` of all tokens of an answer."""
    asked = {"prompt": "Hi", "logprobs": 1, "temperature": 0} | asked
    if not stream:
        found: list[int] = server.answer(TEXT, **asked)["choices"][0]["logprobs"]["text_offset"]
        return found
    choices = [chunk["choices"][0] for chunk in server.stream(TEXT, **asked)]
    return [at for each in choices if each["logprobs"] for at in each["logprobs"]["text_offset"]]


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_count_what_is_held_back_for_a_stop_string(server: Served, stream: bool) -> None:
    asked = {"max_tokens": 6, "logit_bias": ONLY_A}
    assert offsets(server, stream, stop=["AAB"], **asked) == [0, 1, 2, 3, 4, 5]
    assert offsets(server, stream, stop=["AAAAA"], **asked) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_count_letters_that_lie_across_tokens(
    server: Served, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = [97, *"\N{WHALE}é".encode(), BOS, 98]
    script = iter(answer)
    monkeypatch.setattr(FakeSampler, "sample", lambda *_: next(script))
    assert offsets(server, stream, max_tokens=9) == [0, 1, 1, 1, 1, 2, 2, 3, 3]


# -- what is wrong ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        (TEXT, "echo", True),
        (TEXT, "suffix", "end"),
        (TEXT, "best_of", 3),
        (TEXT, "logprobs", 100),
        (TEXT, "prompt", []),
        (TEXT, "max_tokens", 10**30),
        (TEXT, "n", 129),
        (TEXT, "stream_options", 5),
        (CHAT, "messages", None),
        (CHAT, "messages", "Hi"),
        (CHAT, "messages", []),
        (CHAT, "messages", [5]),
        (CHAT, "messages", [{}]),
        (CHAT, "messages", [{"role": 5, "content": "x"}]),
        (CHAT, "messages", [{"role": "user", "content": 5}]),
        (CHAT, "messages", [{"role": "assistant", "content": "x"}] * 2),
        (CHAT, "response_format", {"type": "json_object"}),
        (CHAT, "logprobs", 5),
        (CHAT, "top_logprobs", 5),
        (CHAT, "temperature", "hot"),
        (CHAT, "max_completion_tokens", 1.5),
        (CHAT, "chat_template_kwargs", "x"),
    ],
)
def test_what_cannot_be_meant_is_a_400_with_its_name(
    server: Served, path: str, field: str, value: object
) -> None:
    body: dict[str, Any] = {"max_tokens": 1}
    body |= {"messages": HELLO} if path == CHAT else {"prompt": "Hi"}
    error = server.error(path, 400, **(body | {field: value}))
    assert error["type"] == "invalid_request_error"
    assert error["param"].split(".")[0] == field


@pytest.mark.parametrize(
    ("path", "field", "most"), [(TEXT, "logprobs", 5), (CHAT, "top_logprobs", 20)]
)
def test_more_probabilities_than_are_told_are_refused_with_the_bound(
    server: Served, path: str, field: str, most: int
) -> None:
    body: dict[str, Any] = {"max_tokens": 1, "logit_bias": ONLY_A}
    body |= {"messages": HELLO, "logprobs": True} if path == CHAT else {"prompt": "Hi"}
    server.answer(path, **(body | {field: most}))
    error = server.error(path, 400, **(body | {field: most + 1}))
    assert (error["param"], str(most) in error["message"]) == (field, True)


@pytest.mark.parametrize(
    "field", [{"tools": []}, {"tool_choice": "none"}, {"response_format": {"type": "text"}}]
)
def test_what_asks_for_nothing_is_taken(server: Served, field: dict[str, object]) -> None:
    server.answer(CHAT, messages=HELLO, max_tokens=1, **field)


def test_what_is_not_looked_at_may_be_long(server: Served) -> None:
    name = "x" * 10_000
    server.answer(CHAT, messages=HELLO, max_tokens=1, user=name, model=name, temperature=-1)


def test_pictures_are_refused_by_name(server: Served) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    error = server.error(CHAT, 400, messages=[{"role": "user", "content": [picture]}])
    assert "image_url" in error["message"]


def test_a_conversation_that_is_too_deep_is_a_400(server: Served) -> None:
    deep: object = "x"
    for _ in range(400):
        deep = [deep]
    response = server.post(CHAT, {"messages": [{"role": "user", "content": "x", "more": deep}]})
    assert response.status_code in (200, 400)


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_that_does_not_fit_is_told_with_both_numbers(server: Served, stream: bool) -> None:
    error = server.error(CHAT, 400, messages=HELLO * 100, stream=stream)
    assert error["type"] == "exceed_context_size_error"
    assert error["n_prompt_tokens"] > error["n_ctx"] == 512


# -- OpenAI's client -------------------------------------------------------------------------------
def test_the_client_reads_a_chat(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="any",
        messages=HELLO,  # type: ignore[arg-type]
        max_tokens=6,
        logit_bias=ONLY_A,
        logprobs=True,
        top_logprobs=2,
    )
    assert answer.choices[0].message.content == "AAAAAA"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens is not None
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None


def test_the_client_streams_a_chat(client: OpenAI) -> None:
    text, usage = "", None
    for chunk in client.chat.completions.create(
        model="any",
        messages=HELLO,  # type: ignore[arg-type]
        max_tokens=6,
        logit_bias=ONLY_A,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"cache_mode": "read", "cache_salt": "me"},
    ):
        usage = chunk.usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
    assert text == "AAAAAA"
    assert usage is not None
    assert usage.completion_tokens == 6


def test_the_client_streams_completions(client: OpenAI) -> None:
    text = ""
    for chunk in client.completions.create(
        model="any", prompt=["Hi", "Ho"], max_tokens=2, logit_bias=ONLY_A, stream=True
    ):
        text += chunk.choices[0].text
    assert text == "AAAA"


def test_the_client_lists_the_model(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]


def test_the_model_has_the_names_and_facts_that_it_was_given() -> None:
    facts = {"n_params": 7, "size": 28, "ftype": "all F32"}
    with served(engine={"model_facts": facts}, aliases=("code", "fim"), tags=("small",)) as server:
        listed = server.client.get("/v1/models").json()
        [model], [entry] = listed["data"], listed["models"]
        assert (model["aliases"], model["tags"]) == (["code", "fim"], ["small"])
        assert model["meta"].items() >= facts.items()
        assert (
            model["meta"].items() >= {"n_vocab": server.engine.vocab.n_vocab, "n_ctx": 512}.items()
        )
        assert (entry["name"], entry["capabilities"]) == (model["id"], ["completion"])
        assert server.client.get("/props").json()["model_ftype"] == "all F32"


def test_the_client_understands_errors(client: OpenAI) -> None:
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(model="any", messages=HELLO, seed="x")  # type: ignore[call-overload]
    assert caught.value.param == "seed"
    assert caught.value.type == "invalid_request_error"
    assert not isinstance(caught.value, RateLimitError)
