"""llama-server's endpoints."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from llamakeep.chat import find_starts
from llamakeep.engine import Engine, Request
from llamakeep.runtime.base import Part
from llamakeep.runtime.fake import FakeRuntime
from llamakeep.runtime.fake_text import BOS
from llamakeep.sampling import Sampling
from llamakeep.server import context, prompts
from llamakeep.server.absent import ABSENT
from llamakeep.server.answers import Answer, Inbox
from llamakeep.server.app import create_app
from llamakeep.server.asking import options_for
from llamakeep.server.constraints import SAMPLERS
from llamakeep.server.context import ServerOptions
from llamakeep.server.native_json import NativeEncoder
from llamakeep.server.schema import Delimiter, NativeCompletion
from llamakeep.server.slots import checked_name, slot_json
from llamakeep.server.sse import EventStream
from llamakeep.tokens import as_tokens
from tests.engine_tools import GREEDY, engine_of
from tests.server_tools import HELLO, ONLY_A, TIMEOUT_S, Served, served

PROMPT = "The lighthouse was built in"
TIMINGS = {
    "cache_n",
    "prompt_n",
    "prompt_ms",
    "prompt_per_token_ms",
    "prompt_per_second",
    "predicted_n",
    "predicted_ms",
    "predicted_per_token_ms",
    "predicted_per_second",
}
FINAL = {
    "index",
    "content",
    "tokens",
    "id_slot",
    "stop",
    "model",
    "tokens_predicted",
    "tokens_evaluated",
    "generation_settings",
    "prompt",
    "has_new_line",
    "truncated",
    "stop_type",
    "stopping_word",
    "tokens_cached",
    "timings",
}

SETTINGS = {
    "seed",
    "temperature",
    "dynatemp_range",
    "dynatemp_exponent",
    "top_k",
    "top_p",
    "min_p",
    "top_n_sigma",
    "xtc_probability",
    "xtc_threshold",
    "typical_p",
    "repeat_last_n",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "mirostat",
    "mirostat_tau",
    "mirostat_eta",
    "adaptive_target",
    "adaptive_decay",
    "max_tokens",
    "n_predict",
    "n_keep",
    "n_discard",
    "ignore_eos",
    "stream",
    "n_probs",
    "min_keep",
    "chat_format",
    "reasoning_format",
    "reasoning_in_content",
    "generation_prompt",
    "samplers",
    "speculative.types",
    "timings_per_token",
    "post_sampling_probs",
    "backend_sampling",
    "lora",
}
"""Of defaults, as llama-server tells them; slots do not know how their answer is sent."""
ONLY_IN_ANSWERS = {
    "dry_sequence_breakers",
    "stop",
    "logit_bias",
    "grammar",
    "grammar_lazy",
    "grammar_triggers",
    "preserved_tokens",
}
PROPS = {
    "default_generation_settings",
    "total_slots",
    "model_alias",
    "model_ftype",
    "model_path",
    "modalities",
    "endpoint_slots",
    "endpoint_props",
    "endpoint_metrics",
    "ui",
    "ui_settings",
    "chat_template",
    "chat_template_caps",
    "bos_token",
    "eos_token",
    "build_info",
    "is_sleeping",
    "cors_proxy_enabled",
}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as made:
        yield made


# -- completions -----------------------------------------------------------------------------------
def test_a_completion_has_the_fields_of_llama_server(server: Served) -> None:
    answer = server.answer("/completion", prompt=PROMPT, n_predict=5, logit_bias=ONLY_A)
    assert set(answer) == FINAL
    assert set(answer["timings"]) == TIMINGS
    assert (answer["content"], answer["tokens"]) == ("AAAAA", [])
    assert (answer["stop"], answer["stop_type"], answer["stopping_word"]) == (True, "limit", "")
    assert answer["prompt"] == "<s>" + PROMPT
    n_prompt = len(PROMPT) + 1
    assert (answer["tokens_evaluated"], answer["tokens_predicted"]) == (n_prompt, 5)
    timings = answer["timings"]
    assert timings["prompt_n"] + timings["cache_n"] == n_prompt
    assert timings["predicted_n"] == 5
    assert answer["truncated"] is answer["has_new_line"] is False


def test_a_stream_gives_what_a_whole_answer_gives(server: Served) -> None:
    asked = {"prompt": PROMPT, "n_predict": 8, "temperature": 0, "ignore_eos": True}
    whole = server.answer("/completion", return_tokens=True, **asked)
    *pieces, last = server.stream("/completion", **asked)
    assert "".join(piece["content"] for piece in pieces) == whole["content"]
    assert [token for piece in pieces for token in piece["tokens"]] == whole["tokens"]
    assert [piece["stop"] for piece in pieces] == [False] * len(pieces)
    assert (set(last), last["stop"], last["content"]) == (FINAL, True, "")


def test_completions_is_another_name(server: Served) -> None:
    answer = server.answer("/completions", prompt="Hi", n_predict=2, logit_bias=ONLY_A)
    assert answer["content"] == "AA"


def test_a_stop_string_ends_an_answer_and_is_named(server: Served) -> None:
    answer = server.answer(
        "/completion", prompt=PROMPT, n_predict=50, logit_bias=ONLY_A, stop=["no", "AAA"]
    )
    assert (answer["content"], answer["stop_type"]) == ("", "word")
    assert answer["stopping_word"] == "AAA"
    answer = server.answer("/completion", prompt=PROMPT, n_predict=50, logit_bias=ONLY_A, stop="AA")
    assert answer["stopping_word"] == "AA"


def test_the_models_end_is_told(server: Served) -> None:
    end = str(server.engine.vocab.eos)
    answer = server.answer("/completion", prompt=PROMPT, n_predict=9, logit_bias={end: 1000})
    assert (answer["stop_type"], answer["content"]) == ("eos", "")


def test_new_lines_are_noticed(server: Served) -> None:
    answer = server.answer("/completion", prompt=PROMPT, n_predict=2, logit_bias=[[10, 1000]])
    assert answer["has_new_line"] is True


def test_a_full_context_truncates_an_answer(server: Served) -> None:
    answer = server.answer("/completion", prompt="A" * 490, n_predict=-1, logit_bias=ONLY_A)
    assert (answer["truncated"], answer["stop_type"]) == (True, "limit")
    assert answer["tokens_predicted"] == 512 - 491


def test_no_tokens_are_generated_for_n_predict_0(server: Served) -> None:
    answer = server.answer("/completion", prompt=PROMPT, n_predict=0)
    assert (answer["content"], answer["timings"]["predicted_n"]) == ("", 0)


def test_prompts_are_texts_tokens_or_both(server: Served) -> None:
    asked = {"n_predict": 4, "temperature": 0}
    text = server.answer("/completion", prompt="Hi", **asked)
    tokens = server.answer("/completion", prompt=[BOS, 72, 105], **asked)
    mixed = server.answer("/completion", prompt=[BOS, "H", 105], **asked)
    wrapped = server.answer("/completion", prompt={"prompt_string": "Hi"}, **asked)
    assert {each["content"] for each in (text, tokens, mixed, wrapped)} == {text["content"]}
    assert {each["prompt"] for each in (text, tokens, mixed, wrapped)} == {"<s>Hi"}


def test_a_list_of_prompts_has_a_list_of_answers(server: Served) -> None:
    asked = {"n_predict": 2, "temperature": 0}
    answers = server.answer("/completion", prompt=["Hi", [BOS, 72, 105], [BOS, "Ho"]], **asked)
    assert [each["index"] for each in answers] == [0, 1, 2]
    assert [each["prompt"] for each in answers] == ["<s>Hi", "<s>Hi", "<s>Ho"]
    assert answers[0]["content"] == answers[1]["content"]


def test_what_was_read_once_is_not_read_again() -> None:
    with served() as server:
        first = server.answer("/completion", prompt="B" * 300, n_predict=2)
        second = server.answer("/completion", prompt="B" * 300, n_predict=2)
        assert first["timings"]["cache_n"] == 0
        assert second["timings"]["cache_n"] >= 280
        assert second["timings"]["prompt_n"] == 301 - second["timings"]["cache_n"]


def test_a_server_may_reuse_only_where_a_request_says_so() -> None:
    with served(cache_prompt=False) as server:
        asked = {"prompt": "B" * 300, "n_predict": 1}
        said: tuple[dict[str, object], ...] = (
            {},
            {},
            {"cache_prompt": True},
            {"cache_mode": "read"},
        )
        reused = [server.answer("/completion", **asked, **more) for more in said]
        assert [each["timings"]["cache_n"] > 0 for each in reused] == [False, False, True, True]


@pytest.mark.parametrize("field", [{"cache_prompt": False}, {"cache_mode": "off"}])
def test_a_request_may_refuse_what_is_kept(server: Served, field: dict[str, object]) -> None:
    server.answer("/completion", prompt="C" * 200, n_predict=2)
    again = server.answer("/completion", prompt="C" * 200, n_predict=2, **field)
    assert again["timings"]["cache_n"] == 0


def test_salts_share_nothing(server: Served) -> None:
    server.answer("/completion", prompt="D" * 200, n_predict=2, cache_salt="a")
    other = server.answer("/completion", prompt="D" * 200, n_predict=2, cache_salt="b")
    same = server.answer("/completion", prompt="D" * 200, n_predict=2, cache_salt="a")
    assert other["timings"]["cache_n"] == 0
    assert same["timings"]["cache_n"] > 0


def test_a_slot_can_be_asked_for(server: Served) -> None:
    for slot in (0, 1, 1):
        assert (
            server.answer("/completion", prompt="Hi", n_predict=1, id_slot=slot)["id_slot"] == slot
        )
    error = server.error("/completion", prompt="Hi", id_slot=7)
    assert "id_slot" in error["message"]


def test_message_delimiters_become_starts(server: Served) -> None:
    with server.asked() as requests:
        server.answer(
            "/completion",
            prompt="U: one A: two U: three",
            n_predict=1,
            message_delimiters=["U:", {"role": "assistant", "delimiter": "A:"}],
        )
    assert requests[0].user_starts == (1, 15)


def test_delimiters_are_looked_for_by_the_one_search_that_there_is(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched = []
    monkeypatch.setattr(
        prompts,
        "find_starts",
        lambda tokens, wanted: searched.append(tokens.size) or find_starts(tokens, wanted),
    )
    asked = {"n_predict": 1, "message_delimiters": ["AA", "AA", "A", "\N{WHALE}" * 200]}
    server.answer("/completion", prompt="AAxAAA", **asked)
    assert searched == [7] * 3
    server.error("/completion", 400, prompt="A" * 600, **asked)
    assert searched == [7] * 3, "what does not fit is not searched"
    tokens = server.engine.vocab.tokenize("AAxAAA", add_special=False, parse_special=True)
    found = prompts.starts_of(server.engine.vocab, tokens, [Delimiter(delimiter="AA")])
    assert found == (0, 3, 4)


def test_probabilities_come_with_the_tokens(server: Served) -> None:
    asked = {"prompt": PROMPT, "n_predict": 3, "n_probs": 4, "temperature": 0, "ignore_eos": True}
    whole = server.answer("/completion", **asked)["completion_probabilities"]
    assert len(whole) == 3
    for each in whole:
        assert set(each) == {"id", "token", "bytes", "logprob", "top_logprobs"}
        assert len(each["top_logprobs"]) == 4
        assert each["logprob"] <= 0
    *pieces, _ = server.stream("/completion", **asked)
    assert [each["completion_probabilities"][0] for each in pieces] == whole


def test_progress_is_told_while_a_prompt_is_read(server: Served) -> None:
    events = server.stream(
        "/completion", prompt="E" * 400, n_predict=1, return_progress=True, cache_prompt=False
    )
    progress = [each["prompt_progress"] for each in events if "prompt_progress" in each]
    assert [set(each) for each in progress] == [{"total", "cache", "processed", "time_ms"}] * len(
        progress
    )
    assert progress[0]["processed"] == progress[0]["cache"] == 0
    assert progress[-1]["processed"] == progress[-1]["total"] == 401
    processed = [each["processed"] for each in progress]
    assert processed == sorted(set(processed))


def test_times_come_with_every_token_when_asked_for(server: Served) -> None:
    events = server.stream(
        "/completion", prompt="Hi", n_predict=3, timings_per_token=True, logit_bias=ONLY_A
    )
    assert [set(each["timings"]) for each in events] == [TIMINGS] * len(events)
    assert [each["timings"]["predicted_n"] for each in events][:2] == [1, 2]


def test_times_of_a_prompt_are_those_of_what_is_evaluated(server: Served) -> None:
    events = server.stream(
        "/completion",
        prompt="F" * 400,
        n_predict=1,
        return_progress=True,
        timings_per_token=True,
        cache_prompt=False,
    )
    told = [(each["prompt_progress"], each["timings"]) for each in events[:-2]]
    assert len(told) > 1
    for progress, timings in told:
        assert timings["prompt_n"] == progress["processed"] - progress["cache"]
        assert timings["predicted_n"] == timings["predicted_ms"] == 0
    assert told[0][1]["prompt_ms"] == told[0][1]["prompt_per_second"] == 0
    times = [timings["prompt_ms"] for _, timings in told]
    assert times == sorted(times)
    assert times[-1] > 0


def test_the_first_token_costs_no_step_of_its_own(server: Served) -> None:
    asked = {"prompt": PROMPT, "logit_bias": ONLY_A}
    one = server.answer("/completion", n_predict=1, **asked)["timings"]
    assert one["predicted_n"] == 1
    assert one["predicted_per_second"] == one["predicted_per_token_ms"] == 0
    nine = server.answer("/completion", n_predict=9, **asked)["timings"]
    assert nine["predicted_per_token_ms"] * 8 == pytest.approx(nine["predicted_ms"])
    assert nine["predicted_per_second"] == pytest.approx(8e3 / nine["predicted_ms"])


def test_fields_can_be_chosen(server: Served) -> None:
    names = ["content", "generation_settings/n_predict", "nothing/here"]
    answer = server.answer("/completion", prompt="Hi", n_predict=3, response_fields=names)
    assert set(answer) == set(names[:2])
    assert answer["generation_settings/n_predict"] == 3


def test_settings_are_told_as_they_were_used(server: Served) -> None:
    settings = server.answer(
        "/completion", prompt="Hi", n_predict=1, seed=7, top_k=3, ignore_eos=True, n_probs=2
    )["generation_settings"]
    assert set(settings) - {"cache_mode"} == SETTINGS | ONLY_IN_ANSWERS
    assert (settings["seed"], settings["top_k"], settings["n_probs"]) == (7, 3, 2)
    assert (settings["temperature"], settings["top_p"], settings["min_p"]) == (0.8, 0.95, 0.05)
    assert settings["ignore_eos"] is True
    assert settings["logit_bias"]
    assert all(each["bias"] is None for each in settings["logit_bias"])


def test_the_tokens_of_a_text_are_biased_once_each(server: Served) -> None:
    asked = {"prompt": "Hi", "n_predict": 1, "logit_bias": {"AB" * 5000: 5, "65": 1}}
    settings = server.answer("/completion", **asked)["generation_settings"]
    assert settings["logit_bias"] == [
        {"token": 65, "bias": 5},
        {"token": 66, "bias": 5},
        {"token": 65, "bias": 1},
    ]
    n_vocab = server.engine.vocab.n_vocab  # less than the limit for all models
    many = [["ABCDEFGH", 1]] * (n_vocab // 8)
    server.answer("/completion", prompt="Hi", n_predict=1, logit_bias=many)
    error = server.error("/completion", 400, prompt="Hi", logit_bias=[*many, ["A", 1]])
    assert (error["param"], str(n_vocab) in error["message"]) == ("logit_bias", True)


def test_a_seed_repeats_an_answer(server: Served) -> None:
    def ask(seed: int) -> str:
        return str(server.answer("/completion", prompt=PROMPT, n_predict=12, seed=seed)["content"])

    assert ask(1) == ask(1)
    assert len({ask(seed) for seed in range(4)}) > 1


def test_a_temperature_below_0_takes_the_likeliest_token(server: Served) -> None:
    answers = [
        server.answer("/completion", prompt=PROMPT, n_predict=12, temperature=heat)["content"]
        for heat in (0, -1, -0.5)
    ]
    assert len(set(answers)) == 1


def test_defaults_can_be_the_servers() -> None:
    with served(sampling=Sampling(seed=42, temperature=0), n_predict=3) as server:
        settings = server.answer("/completion", prompt="Hi", ignore_eos=True)["generation_settings"]
        assert (settings["seed"], settings["n_predict"]) == (42, 3)
        params = server.client.get("/props").json()["default_generation_settings"]["params"]
        assert (params["seed"], params["n_predict"]) == (42, 3)


# -- what is wrong ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n_predict", 10**30),
        ("n_predict", "8"),
        ("n_predict", 1.5),
        ("temperature", -101),
        ("temperature", "hot"),
        ("top_p", 2),
        ("seed", True),
        ("seed", 1 << 64),
        ("n", 0),
        ("n_probs", -1),
        ("stop", 5),
        ("stop", ["x"] * 1000),
        ("stream", "yes"),
        ("cache_mode", "sometimes"),
        ("cache_salt", "x" * 1000),
        ("id_slot", -2),
        ("prompt", 5),
        ("prompt", None),
        ("prompt", []),
        ("prompt", [1.5]),
        ("prompt", [True]),
        ("prompt", [[[1]]]),
        ("prompt", [-1]),
        ("prompt", [10**9]),
        ("prompt", {"text": "Hi"}),
        ("prompt", ["x"] * 1000),
        ("logit_bias", {"10": "much"}),
        ("logit_bias", {"99999": 1}),
        ("logit_bias", [[1]]),
        ("logit_bias", 3),
        ("message_delimiters", [5]),
        ("response_fields", "content"),
        ("grammar", 'root ::= "a"'),
        ("json_schema", {"type": "object"}),
        ("mirostat", 2),
        ("multimodal_data", None),
    ],
)
def test_what_cannot_be_meant_is_a_400_with_its_name(
    server: Served, field: str, value: object
) -> None:
    if field == "multimodal_data":
        body = {"prompt": {"prompt_string": "x", "multimodal_data": ["x"]}}
    else:
        body = {"prompt": "Hi", "n_predict": 1, field: value}
    error = server.error("/completion", 400, **body)
    assert error["type"] == "invalid_request_error"
    assert field in error["message"]
    assert error["param"].split(".")[0] == field


@pytest.mark.parametrize("name", ["n_probs", "logprobs"])
def test_more_probabilities_than_are_told_are_refused_with_the_bound(
    server: Served, name: str
) -> None:
    error = server.error("/completion", 400, prompt="Hi", n_predict=1, **{name: 101})
    assert (error["param"], "100" in error["message"]) == (name, True)
    asked = {"prompt": "Hi", "n_predict": 1, "ignore_eos": True, name: 100}
    (told,) = server.answer("/completion", **asked)["completion_probabilities"]
    assert len(told["top_logprobs"]) == 100


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e400"])
def test_what_is_no_number_is_a_400_with_its_name(server: Served, text: str) -> None:
    response = server.raw("/completion", b'{"prompt": "Hi", "temperature": %s}' % text.encode())
    assert server.error_of(response, 400)["param"] == "temperature"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b'{"prompt": "\xc3"}',
        b'{"prompt": "\\ud800"}',
        b"[" * 100_000,
        b'{"prompt":' * 5000,
        b'{"prompt": "Hi", "n_predict": ' + b"9" * 5000 + b"}",
        b'{"n_predict": 1}',
        b'{"prompt": "Hi", "seed": 1, "lora": ' + b"[" * 900 + b"]" * 900 + b"}",
    ],
)
def test_what_is_no_request_is_a_400(server: Served, body: bytes) -> None:
    assert server.error_of(server.raw("/completion", body), 400)["type"] == "invalid_request_error"


def test_a_body_counts_as_json_unless_a_page_sent_it(server: Served) -> None:
    body = b'{"prompt": "Hi", "n_predict": 1}'
    form = {"Content-Type": "application/x-www-form-urlencoded"}  # what curl -d says
    assert server.client.post("/completion", content=body, headers=form).status_code == 200
    assert server.client.post("/completion", content=body).status_code == 200
    of_a_page = form | {"Origin": "https://elsewhere.example"}
    response = server.client.post("/completion", content=body, headers=of_a_page)
    assert "Content-Type" in server.error_of(response, 400)["message"]


@pytest.mark.parametrize(
    ("samplers", "may"),
    [
        (list(SAMPLERS), True),
        (["penalties", "dry", "top_n_sigma", *SAMPLERS[1:5], "xtc", "temperature"], True),
        ("edskypmxt", True),
        ("edkypmxt", True),
        ([*SAMPLERS, "top_k"], False),
        (["temperature", *SAMPLERS[:5]], False),
        (list(SAMPLERS[:5]), False),
        ("kypmt", False),
        ("nonsense", False),
        ([1], False),
        ({"penalties": 1}, False),
    ],
)
def test_samplers_in_the_usual_order_may_be_said(
    server: Served, samplers: object, may: bool
) -> None:
    body = {"prompt": "Hi", "n_predict": 1, "samplers": samplers}
    if may:
        assert server.answer("/completion", **body)["generation_settings"]["samplers"] == [
            *SAMPLERS
        ]
    else:
        assert server.error("/completion", **body)["param"] == "samplers"


def test_the_settings_that_are_told_can_be_sent_back(server: Served) -> None:
    props = server.client.get("/props").json()
    told = props["default_generation_settings"]["params"] | {"stream": False, "n_predict": 1}
    answer = server.answer("/completion", prompt="Hi", **told)
    again = server.answer("/completion", prompt="Hi", **answer["generation_settings"])
    assert again["generation_settings"] == answer["generation_settings"]


def test_unknown_fields_and_null_are_as_if_absent(server: Served) -> None:
    answer = server.answer(
        "/completion", prompt="Hi", n_predict=1, xyzzy=1, seed=None, stop=None, grammar=""
    )
    assert answer["tokens_predicted"] == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_does_not_fit_is_told_with_both_numbers(server: Served, stream: bool) -> None:
    error = server.error("/completion", 400, prompt="A" * 600, stream=stream)
    assert error["type"] == "exceed_context_size_error"
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (601, 512)
    assert "exceeds the available context size" in error["message"]


def test_addresses_that_are_not_there_have_llama_servers_error(server: Served) -> None:
    error = server.error_of(server.client.get("/nothing"), 404)
    assert error["type"] == "not_found_error"
    server.error_of(server.client.get("/completion"), 405)


# -- streams that end early ------------------------------------------------------------------------
LONG = {"prompt": "Hi", "n_predict": -1, "ignore_eos": True, "stream": True}


@pytest.fixture
def roomy() -> Iterator[Served]:
    """A server with one slot and so much room that no answer comes to its end by itself."""
    with served(engine={"n_seqs": 1, "n_ctx": 1 << 18, "max_waiting": 1}) as made:
        yield made


def test_a_client_that_hangs_up_cancels_its_answer(roomy: Served) -> None:
    with roomy.streaming("/completion", LONG):
        pass
    assert roomy.record().stop == "cancelled"


def test_a_client_that_hangs_up_while_it_waits_cancels_its_answer(roomy: Served) -> None:
    with pytest.raises(Exception, match="timed out"):
        roomy.client.post("/completion", json=LONG | {"stream": False}, timeout=0.3)
    assert roomy.record().stop == "cancelled"


def test_a_client_that_hangs_up_in_the_queue_is_never_answered(roomy: Served) -> None:
    with roomy.streaming("/completion", LONG):
        with pytest.raises(Exception, match="timed out"):
            roomy.client.post("/completion", json=LONG, timeout=0.3)
        record = roomy.record()
        assert (record.stop, record.slot) == ("cancelled", None)


@pytest.mark.parametrize(("n_predict", "backlog"), [(10, 100), (10, 3), (-1, 3)])
def test_a_stream_that_is_cut_off_says_so(n_predict: int, backlog: int) -> None:
    """The event loop stands still until more updates wait than may, or all of them."""
    body = NativeCompletion(**LONG | {"n_predict": n_predict})

    async def events(engine: Engine) -> list[dict[str, Any]]:
        request = Request(as_tokens([65]), max_tokens=body.limit(None), sampling=GREEDY)
        inbox = Inbox(backlog)
        inbox.submit(engine, [request])
        until = time.monotonic() + TIMEOUT_S
        while len(inbox._waiting) < 6 or (n_predict > 0 and not engine.recent()):
            assert time.monotonic() < until
            time.sleep(0.001)
        await asyncio.sleep(0)  # now the loop hears of them
        encoder = NativeEncoder(body, engine.vocab, "m")
        stream = EventStream(inbox, (), [Answer(request, 0)], encoder, ServerOptions())
        parts = [bytes(part) async for part in stream.body_iterator]  # type: ignore[arg-type]
        return [json.loads(each[6:]) for each in b"".join(parts).split(b"\n\n") if each]

    with engine_of(n_ctx=1 << 18) as engine:
        found = asyncio.run(events(engine))
    if n_predict > 0:  # it is complete, and as large as it may be
        assert found[-1]["stop_type"] == "limit"
    else:
        assert [each["error"]["code"] for each in found] == [503]


@pytest.mark.parametrize("options", [{"stall_s": 0.2}, {"backlog": 4}])
def test_a_client_that_stops_reading_is_cut_off(options: dict[str, float]) -> None:
    with (
        served(engine={"n_seqs": 1, "n_ctx": 1 << 18}, **options) as server,
        server.client.stream("POST", "/completion", json=LONG | {"n_probs": 100}) as response,
    ):
        assert response.status_code == 200
        assert server.record().stop == "cancelled"


def test_too_many_requests_are_told_when_to_come_again(roomy: Served) -> None:
    with roomy.streaming("/completion", LONG):
        refused = roomy.post("/completion", LONG | {"n": 2, "stream": False})
        message = roomy.error_of(refused, 503)["message"]
        assert message == "0 requests are waiting, at most 1 may: there is no room for 2 more"
        assert int(refused.headers["retry-after"]) >= 1
        stats = roomy.engine.stats()
        assert (stats["waiting"], stats["requests"]) == (0, 0), "none of them was begun"


def test_more_answers_than_there_is_ever_room_for_are_refused_for_good(roomy: Served) -> None:
    for given in ({"n": 3}, {"prompt": ["a", "b", "c"]}):
        error = roomy.error("/completion", 400, **(LONG | {"stream": False} | given))
        assert error["message"] == (
            "3 answers are asked for at once, and there is room for 2: 1 in slots, 1 in the queue"
        )


@pytest.mark.parametrize(
    ("path", "body"), [("/tokenize", {"content": None}), ("/detokenize", {"tokens": None})]
)
def test_null_is_as_absent(server: Served, path: str, body: dict[str, Any]) -> None:
    assert server.answer(path, **body) == server.answer(path)


def test_the_settings_of_an_answer_can_be_sent_back(server: Served) -> None:
    asked = {"prompt": "Hi", "n_predict": 3, "logit_bias": {"65": 1000, "66": False}}
    first = server.answer("/completion", **asked, seed=7, stop=["x"])
    settings = first["generation_settings"]
    again = server.answer("/completion", prompt="Hi", **settings)
    assert again["generation_settings"] == settings
    assert again["content"] == first["content"] == "AAA"


def test_every_answer_has_a_name_of_its_own_in_the_log(server: Served) -> None:
    names = set()
    for _ in range(2):
        server.answer("/completion", prompt="Hi", n_predict=1)
        names.add(server.engine.recent()[0].label)
    assert len(names) == 2
    assert all(name.startswith("completion-") for name in names)


def test_what_nobody_expected_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    with engine_of() as engine:
        engine.stats = lambda: 1 / 0  # type: ignore[method-assign,assignment,return-value]
        for told in (True, False):
            client = TestClient(create_app(engine), raise_server_exceptions=told)
            if told:  # to the server, which logs it
                with pytest.raises(ZeroDivisionError):
                    client.get("/cache")
            else:
                assert client.get("/cache").json()["error"]["message"] == "internal error"
    assert not caplog.records


def test_a_silent_stream_speaks_now_and_then() -> None:
    with served(ping_s=0.01) as server, server.held():
        body = {"prompt": "Hi", "n_predict": 1, "stream": True}
        with server.client.stream("POST", "/completion", json=body) as response:
            assert response.status_code == 200
            assert next(response.iter_lines()) == ":"


@pytest.mark.parametrize(
    ("said", "ping_s"), [(None, 15.0), (3, 3.0), (-1, context.NEVER_S), (0, context.NEVER_S)]
)
def test_a_request_may_say_how_often_a_silent_stream_speaks(
    said: int | None, ping_s: float
) -> None:
    body = NativeCompletion.model_validate({"prompt": "Hi", "sse_ping_interval": said})
    assert options_for(body, context.ServerOptions()).ping_s == ping_s
    assert options_for(body, context.ServerOptions(stall_s=7.0)).stall_s == 7.0


def test_a_stream_that_never_speaks_for_itself_is_one(server: Served) -> None:
    events = server.stream("/completion", prompt="Hi", n_predict=2, sse_ping_interval=-1)
    assert events[-1]["stop"] is True


def break_down(server: Served) -> None:
    """Let the model fail from now on, more often than the engine tries again."""
    runtime = server.engine._runtime
    assert isinstance(runtime, FakeRuntime)
    for after in range(8):
        runtime.fail("evaluate", after=after)


def test_a_failure_of_the_model_has_a_status() -> None:
    with served() as server:
        break_down(server)
        error = server.error("/completion", 500, prompt="Hi", n_predict=4)
        assert error["type"] == "server_error"


def test_a_failure_in_a_stream_is_its_last_event(roomy: Served) -> None:
    with roomy.streaming("/completion", LONG) as lines:
        break_down(roomy)
        *_, last = [line for line in lines if line]
    error = json.loads(last.removeprefix("data: "))["error"]
    assert (error["code"], error["type"]) == (500, "server_error")


# -- tokens and templates --------------------------------------------------------------------------
def test_tokens_and_back(server: Served) -> None:
    tokens = server.answer("/tokenize", content="Hi <s>é")["tokens"]
    assert tokens == [72, 105, 32, BOS, 195, 169]
    assert server.answer("/detokenize", tokens=tokens)["content"] == "Hi <s>é"
    assert [server.answer("/detokenize", **body)["content"] for body in ({}, {"tokens": None})] == [
        "",
        "",
    ]
    assert server.answer("/tokenize", content="Hi", add_special=True)["tokens"][0] == BOS
    plain = server.answer("/tokenize", content="<s>", parse_special=False)["tokens"]
    assert plain == list(b"<s>")
    assert server.answer("/tokenize")["tokens"] == []


def test_tokens_with_their_pieces(server: Served) -> None:
    tokens = server.answer("/tokenize", content=["é", 72], with_pieces=True)["tokens"]
    assert tokens == [
        {"id": 195, "piece": [195]},
        {"id": 169, "piece": [169]},
        {"id": 72, "piece": "H"},
    ]


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        ("/tokenize", {"content": 5}, "content"),
        ("/tokenize", {"content": ["x", 1.5]}, "content"),
        ("/tokenize", {"content": [10**9]}, "content"),
        ("/detokenize", {"tokens": "Hi"}, "tokens"),
        ("/detokenize", {"tokens": {"0": 1}}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "token -1 at index 0"),
        ("/detokenize", {"tokens": [1, 10**30]}, "at index 1"),
        ("/detokenize", {"tokens": [1, 1.5]}, "1.5 at index 1"),
        ("/detokenize", {"tokens": [[1], [2]]}, "tokens"),
        ("/detokenize", {"tokens": [[1], 2]}, "tokens"),
        ("/detokenize", {"tokens": ["Hi"]}, "token 'Hi' at index 0"),
        ("/detokenize", {"tokens": [None]}, "token None at index 0"),
        ("/detokenize", {"tokens": [10**7]}, "token"),
        ("/apply-template", {}, "messages"),
        ("/apply-template", {"messages": [{"role": "user"}]}, "content"),
    ],
)
def test_wrong_tokens_and_messages_are_named(
    server: Served, path: str, body: dict[str, object], name: str
) -> None:
    assert name in server.error(path, 400, **body)["message"]


def test_the_prompt_of_a_conversation(server: Served) -> None:
    prompt = server.answer("/apply-template", messages=[{"role": "user", "content": "Hi"}])
    assert prompt == {"prompt": "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"}
    open_end = server.answer(
        "/apply-template",
        messages=[{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Wh"}],
    )
    assert open_end["prompt"].endswith("<|im_start|>assistant\nWh")


def test_a_model_without_a_template_says_what_to_do() -> None:
    with served(no_template=True) as server:
        for path in ("/apply-template", "/v1/chat/completions"):
            error = server.error(path, 501, messages=HELLO)
            assert "--chat-template-file" in error["message"]


# -- what the server is ----------------------------------------------------------------------------
def test_props_tell_what_the_server_is() -> None:
    with served(model_path="/models/tiny.gguf") as server:
        props = server.client.get("/props").json()
        assert (props["model_path"], props["total_slots"]) == ("/models/tiny.gguf", 2)
        assert props["default_generation_settings"]["n_ctx"] == 512
        assert (props["bos_token"], props["eos_token"]) == ("<s>", "</s>")
        assert set(props) >= PROPS
        assert set(props["default_generation_settings"]["params"]) == SETTINGS
        assert server.error("/props", 501)["type"] == "not_supported_error"


@pytest.mark.parametrize("path", [path for paths in ABSENT.values() for path in paths])
def test_what_is_not_here_says_so_as_llama_server_does(server: Served, path: str) -> None:
    for body in (b"{}", b"", b"no JSON"):
        error = server.error_of(server.raw(path, body), 501)
        assert error["type"] == "not_supported_error"
        assert error["message"].startswith("This server does not support ")


def test_adapters_are_those_of_the_start() -> None:
    with served(adapters=(("/a/style.gguf", 0.5),)) as server:
        (adapter,) = server.client.get("/lora-adapters").json()
        assert (adapter["id"], adapter["path"], adapter["scale"]) == (0, "/a/style.gguf", 0.5)
        assert set(adapter) == {"id", "path", "scale", "task_name", "prompt_prefix"}
        changed = server.client.post("/lora-adapters", json=[{"id": 0, "scale": 1}])
        assert "LoRA" in server.error_of(changed, 501)["message"]


@pytest.mark.parametrize("path", ["/health", "/v1/health"])
def test_health_is_ok(server: Served, path: str) -> None:
    assert server.client.get(path).json() == {"status": "ok"}
    head = server.client.head(path)
    assert (head.status_code, head.content) == (200, b"")


def test_slots_tell_what_they_do(roomy: Served) -> None:
    idle = roomy.client.get("/slots").json()
    assert [each["is_processing"] for each in idle] == [False]
    assert "params" not in idle[0]
    with roomy.streaming("/completion", LONG | {"logit_bias": ONLY_A}):
        (busy,) = roomy.client.get("/slots").json()
        assert busy["is_processing"] is True
        assert busy["n_prompt_tokens"] == 3
        assert set(busy["params"]) == SETTINGS - {"stream", "timings_per_token"}
        (next_token,) = busy["next_token"]
        assert set(next_token) == {"has_next_token", "has_new_line", "n_remain", "n_decoded"}
        assert next_token["has_new_line"] is False
        assert "Hi" not in json.dumps(busy), "prompts are nobody else's business"
        none_free = roomy.client.get("/slots", params={"fail_on_no_slot": "1"})
        assert roomy.error_of(none_free, 503)["message"] == "no slot available"


def test_slots_tell_whether_an_answer_has_a_new_line(roomy: Served) -> None:
    with roomy.streaming("/completion", LONG | {"logit_bias": {"10": 1000}}):
        (busy,) = roomy.client.get("/slots").json()
        assert busy["next_token"][0]["has_new_line"] is True


def test_slots_tell_how_much_of_a_prompt_is_evaluated() -> None:
    with served(engine={"n_seqs": 1, "n_ctx": 1024}) as server:
        server.answer("/completion", prompt="G" * 200, n_predict=1)
        runtime = server.engine._runtime
        decode, seen = runtime.decode, []

        def looking(parts: list[Part]) -> list[int | None]:
            seen.extend(map(slot_json, server.engine.slots()))
            return decode(parts)

        runtime.decode = looking  # type: ignore[method-assign]
        server.answer("/completion", prompt="G" * 200 + "H" * 400, n_predict=4, ignore_eos=True)
    assert {each["n_prompt_tokens"] for each in seen} == {601}
    (n_reused,) = {each["n_prompt_tokens_cache"] for each in seen}
    assert n_reused >= 180
    processed = [each["n_prompt_tokens_processed"] for each in seen]
    assert processed[0] == 0
    assert processed == sorted(processed)
    assert len(set(processed)) > 5, "batches have 64 tokens"
    assert processed[-3:] == [601 - n_reused] * 3


def test_slots_can_be_hidden() -> None:
    with served(slots=False) as server:
        error = server.error_of(server.client.get("/slots"), 501)
        assert error["type"] == "not_supported_error"


def test_a_slot_is_saved_restored_and_erased(tmp_path: Path) -> None:
    with served(slot_save_path=tmp_path) as server:
        server.answer("/completion", prompt="F" * 100, n_predict=4, ignore_eos=True, id_slot=1)
        saved = server.answer("/slots/1?action=save", filename="one.bin")
        assert set(saved) == {"id_slot", "filename", "n_saved", "n_written", "timings"}
        assert saved["n_saved"] >= 101
        assert saved["n_written"] == (tmp_path / "one.bin").stat().st_size
        assert server.answer("/slots/1?action=erase")["n_erased"] == saved["n_saved"]
        server.client.delete("/cache")
        restored = server.answer("/slots/0?action=restore", filename="one.bin")
        assert (restored["id_slot"], restored["n_restored"]) == (0, saved["n_saved"])
        again = server.answer("/completion", prompt="F" * 100, n_predict=1, id_slot=0)
        assert again["timings"]["cache_n"] >= 88


def test_a_tenants_slot_is_restored_for_that_tenant_only(tmp_path: Path) -> None:
    mine = {"prompt": "F" * 100, "n_predict": 4, "cache_salt": "me", "id_slot": 0}
    with served(slot_save_path=tmp_path) as server:
        server.answer("/completion", **mine)
        for salt in ({}, {"cache_salt": ""}, {"cache_salt": "you"}):
            for action in ("save", "erase"):
                error = server.error(f"/slots/0?action={action}", 400, filename="mine", **salt)
                assert "cache_salt" in error["message"]
        assert list(tmp_path.iterdir()) == []
        saved = server.answer("/slots/0?action=save", filename="mine", cache_salt="me")
        server.answer("/slots/0?action=erase", cache_salt="me")
        server.client.delete("/cache")
        for salt in ({}, {"cache_salt": ""}, {"cache_salt": "you"}):
            error = server.error("/slots/0?action=restore", 400, filename="mine", **salt)
            assert "No such file" in error["message"]
        restored = server.answer("/slots/0?action=restore", filename="mine", cache_salt="me")
        assert restored["n_restored"] == saved["n_saved"]
        others = server.answer("/completion", **(mine | {"cache_salt": "you", "id_slot": 1}))
        assert others["timings"]["cache_n"] == 0
        assert server.answer("/completion", **mine)["timings"]["cache_n"] >= 88


def test_names_of_files_are_each_tenants_own(tmp_path: Path) -> None:
    texts = {"me": "F" * 100, "you": "G" * 90, "": "H" * 80}
    with served(slot_save_path=tmp_path) as server:
        for salt, text in texts.items():
            asked = {"prompt": text, "n_predict": 1, "cache_salt": salt, "id_slot": 0}
            server.answer("/completion", **asked)
            server.answer("/slots/0?action=save", filename="talk", cache_salt=salt)
        assert (tmp_path / "talk").is_file()  # where llama-server has it, without a salt
        assert len(list(tmp_path.rglob("talk"))) == 3
        assert not any("me" in name or "you" in name for name in os.listdir(tmp_path))
        for salt, text in texts.items():
            restored = server.answer("/slots/0?action=restore", filename="talk", cache_salt=salt)
            assert restored["n_restored"] == len(text) + 1
            server.answer("/slots/0?action=erase", cache_salt=salt)


def test_what_slots_do_is_shown_without_what_they_read(tmp_path: Path) -> None:
    with served(slot_save_path=tmp_path) as server:
        asked = {"prompt": "a secret of mine" * 9, "n_predict": 400, "cache_salt": "me"}
        with server.streaming("/completion", asked | {"logit_bias": ONLY_A}):
            shown = server.client.get("/slots").text
        assert "is_processing" in shown
        assert not any(word in shown for word in ("secret", "AAA", '"me"'))


def test_a_slot_that_cannot_be_restored_says_so(tmp_path: Path) -> None:
    (tmp_path / "bad.bin").write_bytes(b"not a slot at all")
    with served(slot_save_path=tmp_path) as server:
        for name in ("bad.bin", "missing.bin"):
            error = server.error("/slots/0?action=restore", 400, filename=name)
            assert error["message"].startswith("Unable to restore slot")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/slots/9?action=save", "Invalid slot ID"),
        ("/slots/x?action=save", "Invalid slot ID"),
        ("/slots/0?action=steal", "Invalid action"),
        ("/slots/0", "Invalid action"),
        ("/slots/0?action=save", "Invalid filename"),
    ],
)
def test_slot_actions_are_checked(tmp_path: Path, path: str, message: str) -> None:
    with served(slot_save_path=tmp_path) as server:
        assert server.error(path, 400)["message"] == message


def test_slots_are_not_saved_without_a_place_for_them(server: Served) -> None:
    error = server.error("/slots/0?action=save", 501, filename="x")
    assert "--slot-save-path" in error["message"]


@pytest.mark.parametrize(
    "name",
    [
        "",
        None,
        ".",
        "..",
        "../x",
        "a/b",
        "/etc/passwd",
        "a\\b",
        "C:x",
        "a\0b",
        "a\nb",
        "x.",
        " x",
        "x ",
        "a..b",
        "x" * 256,
        "é" * 128,
        "\u2215etc",
        "\uff0e\uff0e",
        "\ud800",
    ],
)
def test_names_that_leave_their_directory_are_refused(name: str | None) -> None:
    with pytest.raises(Exception, match="Invalid filename"):
        checked_name(name)


@pytest.mark.parametrize("name", ["one.bin", "für später", "x" * 255, ".hidden", "a b"])
def test_plain_names_are_taken(name: str) -> None:
    assert checked_name(name) == name
