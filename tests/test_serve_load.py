"""`llamakeep serve` under load: many clients, some of them bad, on tiny models."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionChunk
from schemathesis.generation import GenerationMode

from llamakeep.engine import Finished, Request, Update
from tests.load_tools import (
    CHAT,
    GREEDY,
    MAX_BODY_BYTES,
    NATIVE,
    PATIENCE_S,
    TEXT,
    ColdModel,
    LiveServer,
    Question,
    ask_streamed,
    ask_whole,
    chosen,
    connect,
    hang_up,
    live,
    stop_reading,
    words,
)
from tests.server_tools import Served, served
from tests.test_serve_cli import Process

N_CONNECTIONS = 20
N_ANSWER = 12
CAPACITY_BYTES = 1 << 20
"""Far less than the prompts alone need in each family: states are evicted all the time, however
early answers are cancelled."""
TENANTS = ("red", "blue")
MALFORMED = [b"", b"{", b"[]", b'{"prompt": "x", "max_tokens": 1e400}', b'{"prompt": \xff}', b"nul"]

Job = Callable[[httpx.Client], None]
ModelOf = Callable[[str], Path]


@pytest.fixture(scope="module", params=["attention", "hybrid"])
def model(request: pytest.FixtureRequest, tiny_model: ModelOf) -> Path:
    return tiny_model(request.param)


@pytest.fixture(scope="module")
def cold(model: Path) -> Iterator[ColdModel]:
    made = ColdModel(model)
    yield made
    made.close()


@pytest.fixture(scope="module")
def questions(cold: ColdModel) -> list[Question]:
    """Prompts of all endpoints, many of which begin alike, with what a cold model answers."""
    rng = random.Random(1)
    system = words(rng, 120)
    tokens = [rng.randrange(300, 4000) for _ in range(100)]
    talks = chosen(lambda: cold.talk(system, [words(rng, 30) for _ in range(3)], N_ANSWER), 3)
    texts = chosen(
        lambda: cold.completion(TEXT, f"{system} {words(rng, rng.randrange(9, 90))}", N_ANSWER), 6
    )
    natives = chosen(
        lambda: cold.completion(
            NATIVE,
            [*tokens, *(rng.randrange(300, 4000) for _ in range(rng.randrange(9, 90)))],
            N_ANSWER,
        ),
        6,
    )
    return [*(turn for talk in talks for turn in talk), *texts, *natives]


class Load:
    """Two hundred requests in a random order that is the same every time.

    Attributes:
        n_finished: Answers that come to their end.
        stalled: Connections of clients that read no more, and do not hang up either.
    """

    def __init__(self, server: LiveServer, questions: list[Question]) -> None:
        self._server = server
        self._questions = questions
        self._rng = random.Random(2)
        self.stalled: list[socket.socket] = []
        made = [
            *(self._asks(ask_whole) for _ in range(60)),
            *(self._asks(ask_streamed) for _ in range(60)),
            *(self._hangs_up() for _ in range(30)),
            *(self._hangs_up_unread() for _ in range(12)),
            *(self._says_nonsense() for _ in range(20)),
            *(self._sends_too_much() for _ in range(14)),
            *(self._stops_reading() for _ in range(4)),
        ]
        self.n_finished = 120
        self.jobs: list[Job] = made
        self._rng.shuffle(self.jobs)

    def run(self) -> None:
        """Send all of them over twenty connections at once; raises what goes wrong first."""

        def talk(jobs: list[Job]) -> None:
            with self._server.client() as client:
                for job in jobs:
                    job(client)

        with ThreadPoolExecutor(N_CONNECTIONS) as pool:
            shares = [self.jobs[start::N_CONNECTIONS] for start in range(N_CONNECTIONS)]
            for each in [pool.submit(talk, share) for share in shares]:
                each.result()

    def _some(self) -> tuple[Question, str]:
        return self._rng.choice(self._questions), self._rng.choice(TENANTS)

    def _asks(self, how: Callable[..., str]) -> Job:
        question, tenant = self._some()

        def job(client: httpx.Client) -> None:
            assert how(client, question, cache_salt=tenant) == question.text

        return job

    def _hangs_up(self) -> Job:
        question, tenant = self._some()
        return partial(
            hang_up, question=question, n_lines=self._rng.randrange(1, 40), cache_salt=tenant
        )

    def _hangs_up_unread(self) -> Job:
        question, tenant = self._some()
        body = question.body | {"cache_salt": tenant, "max_tokens": -1}
        return lambda _: connect(self._server.url, question.path, body).close()

    def _says_nonsense(self) -> Job:
        path, data = self._rng.choice((NATIVE, TEXT, CHAT)), self._rng.choice(MALFORMED)

        def job(client: httpx.Client) -> None:
            response = client.post(path, content=data)
            assert response.status_code == 400
            assert response.json()["error"]["type"] == "invalid_request_error"

        return job

    def _sends_too_much(self) -> Job:
        path = self._rng.choice((NATIVE, TEXT, CHAT))
        n_bytes = MAX_BODY_BYTES + self._rng.choice((1, MAX_BODY_BYTES))

        def job(client: httpx.Client) -> None:
            assert client.post(path, content=b"x" * n_bytes).status_code == 413

        return job

    def _stops_reading(self) -> Job:
        prompt = [self._rng.randrange(300, 4000) for _ in range(20)]
        tenant = self._rng.choice(TENANTS)

        def job(_: httpx.Client) -> None:
            self.stalled.append(stop_reading(self._server.url, prompt, cache_salt=tenant))

        return job


def test_under_load_every_answer_is_that_of_a_cold_model_and_nothing_leaks(
    model: Path, questions: list[Question], caplog: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as stack:
        server = stack.enter_context(live(model, cache_ram_bytes=CAPACITY_BYTES))
        load = Load(server, questions)
        assert len(load.jobs) == 200
        try:
            load.run()
            server.wait_until_idle()  # while those who read no more still hold their connections
        finally:
            for each in load.stalled:
                stack.callback(each.close)
        stats = server.engine.stats()
        assert (stats["slots_busy"], stats["waiting"]) == (0, 0)
        assert not any(slot.is_processing for slot in server.engine.slots())
        assert stats["failures"] == {}
        stops = [record.stop for record in server.records]
        # An answer may be complete before the server sees that its client has gone.
        assert stops.count("limit") >= load.n_finished
        assert set(stops) == {"limit", "cancelled"}
        evicted = stats["evicted_segments"] + stats["evicted_checkpoints"]
        assert evicted > 0, "the budget was no limit"
        assert 0 < stats["used_bytes"] <= stats["capacity_bytes"] == CAPACITY_BYTES
        assert server.engine._keeping._tree.store.memory.peak_bytes <= CAPACITY_BYTES  # type: ignore[attr-defined]
        with server.client() as client:
            asked = [questions[-1].body | {"cache_salt": salt} for salt in ("red", "red", "green")]
            timings = [client.post(NATIVE, json=body).json()["timings"] for body in asked]
        assert timings[1]["cache_n"] > 0 == timings[2]["cache_n"], "tenants share nothing"
        assert not [record for record in caplog.records if record.exc_info]
        server.engine.check()


# -- OpenAI's client -------------------------------------------------------------------------------
ASKED: dict[str, Any] = {
    "model": "any",
    "temperature": 0,
    "max_tokens": N_ANSWER,
    "extra_body": {"ignore_eos": True},
}
STREAMED: dict[str, Any] = ASKED | {"stream": True, "stream_options": {"include_usage": True}}


@pytest.fixture(scope="module")
def talks(cold: ColdModel) -> list[list[Question]]:
    """More conversations than there are slots, each with a beginning of its own."""
    rng = random.Random(3)
    return chosen(
        lambda: cold.talk(words(rng, 40), [words(rng, 25) for _ in range(3)], N_ANSWER), 4
    )


@pytest.fixture
def two_slots(model: Path) -> Iterator[LiveServer]:
    with live(model, parallel=2, timeout_s=PATIENCE_S) as server:
        yield server


@dataclass
class Turn:
    """What a client saw of one turn.

    Attributes:
        text: As it was streamed.
        whole: The answer to the same without a stream.
        n_prompt: Tokens of the prompt.
        n_cached: Those that were not evaluated.
    """

    text: str = ""
    whole: str | None = None
    n_prompt: int = 0
    n_cached: int = -1

    def take(self, chunk: ChatCompletionChunk) -> None:
        for choice in chunk.choices:
            self.text += choice.delta.content or ""
        if chunk.usage is not None:
            assert not chunk.choices
            assert chunk.usage.completion_tokens == N_ANSWER
            assert chunk.usage.prompt_tokens_details is not None
            self.n_prompt = chunk.usage.prompt_tokens
            self.n_cached = chunk.usage.prompt_tokens_details.cached_tokens or 0


def check_talk(talk: list[Question], turns: list[Turn]) -> None:
    """Each turn is right, and has what the turn before had evaluated."""
    assert [turn.text for turn in turns] == [question.text for question in talk]
    assert [turn.whole for turn in turns] == [question.text for question in talk]
    for before, turn in pairwise(turns):
        assert before.n_cached < before.n_prompt - 9 <= turn.n_cached < turn.n_prompt


def test_conversations_stream_to_openais_client_as_they_are_answered_whole(
    two_slots: LiveServer, talks: list[list[Question]]
) -> None:
    def hold(client: OpenAI, talk: list[Question]) -> list[Turn]:
        turns = []
        for question in talk:
            turn, messages = Turn(), question.body["messages"]
            for chunk in client.chat.completions.create(messages=messages, **STREAMED):
                turn.take(chunk)
            whole = client.chat.completions.create(messages=messages, **ASKED)
            turn.whole = whole.choices[0].message.content
            turns.append(turn)
        return turns

    url = f"{two_slots.url}/v1"
    with (
        OpenAI(api_key="any", base_url=url, max_retries=0) as client,
        ThreadPoolExecutor(len(talks)) as pool,
    ):
        for talk, turns in zip(talks, pool.map(partial(hold, client), talks), strict=True):
            check_talk(talk, turns)


def test_conversations_stream_to_openais_async_client_as_they_are_answered_whole(
    two_slots: LiveServer, talks: list[list[Question]]
) -> None:
    async def hold(client: AsyncOpenAI, talk: list[Question]) -> list[Turn]:
        turns = []
        for question in talk:
            turn, messages = Turn(), question.body["messages"]
            async for chunk in await client.chat.completions.create(messages=messages, **STREAMED):
                turn.take(chunk)
            whole = await client.chat.completions.create(messages=messages, **ASKED)
            turn.whole = whole.choices[0].message.content
            turns.append(turn)
        return turns

    async def hold_all() -> list[list[Turn]]:
        url = f"{two_slots.url}/v1"
        async with AsyncOpenAI(api_key="any", base_url=url, max_retries=0) as client:
            return await asyncio.gather(*(hold(client, talk) for talk in talks))

    for talk, turns in zip(talks, asyncio.run(hold_all()), strict=True):
        check_talk(talk, turns)


# -- the command, and how it ends ------------------------------------------------------------------
class Command(Process):
    """The command in a process of its own; lines that llama.cpp writes are no events."""

    def __init__(self, *line: str) -> None:
        super().__init__(*line)
        self.skipped: list[str] = []

    def wait_for_event(self, event: str) -> dict[str, Any]:
        while (line := self.err.get(timeout=PATIENCE_S)) is not None:
            if not line.startswith("{"):
                self.skipped.append(line)
            elif (entry := json.loads(line))["event"] == event:
                return dict(entry)
        raise AssertionError(f"no event {event!r}")


@contextmanager
def command(model: Path, *flags: str) -> Iterator[tuple[Command, httpx.Client]]:
    """The command once it is ready, and a client of it."""
    line = f"serve -m {model} -ngl 0 -t 1 -b 128 -ub 128 -fa off --port 0".split()
    server = Command("-m", "llamakeep", *line, *flags)
    try:
        url = server.wait_for_event("ready")["url"]
        with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
            yield server, client
    finally:
        server.process.kill()
        server.process.wait(PATIENCE_S)
        for stream in (server.process.stdin, server.process.stdout, server.process.stderr):
            assert stream is not None
            stream.close()


def wait_until_flushed(client: httpx.Client, n_prompts: int) -> None:
    """Return once so many prompts are kept and all that is kept of them is on disk."""
    for _ in range(2000):
        cache = client.get("/cache").json()
        if len(cache["entries"]) >= n_prompts and not cache["below"]["queued"]:
            assert cache["below"]["written_disk"] >= n_prompts
            return
    raise AssertionError(f"not flushed: {cache}")


def test_what_is_live_goes_to_disk_when_nobody_waits_whoever_looks_just_then(
    tiny_model: ModelOf, tmp_path: Path
) -> None:
    with live(tiny_model("attention"), cache_dir=tmp_path) as server:
        ended = threading.Event()

        def hear(update: Update) -> None:
            if isinstance(update, Finished):
                ticket.cancel()  # too late: does nothing, but wakes the engine
                ended.set()

        prompt = Request.of(list(range(300, 450)), max_tokens=2)
        with server.held():
            ticket = server.engine.submit(prompt, hear)
        assert ended.wait(PATIENCE_S)
        for _ in range(100):  # each lets the engine come to rest once more
            server.engine.call(lambda: None)
        assert server.engine.entries()


def test_each_line_of_a_log_that_is_no_terminal_is_an_event(tiny_model: ModelOf) -> None:
    with command(tiny_model("hybrid")) as (server, _):
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == (0, [])
        assert server.skipped == []


def test_what_was_flushed_before_a_kill_is_reused_after_it(model: Path, tmp_path: Path) -> None:
    flags = ("-c", "32768", "-np", "2", "--cache-dir", str(tmp_path / "kept"))
    rng = random.Random(4)
    prompts = [[rng.randrange(300, 4000) for _ in range(150 + 20 * n)] for n in range(3)]
    asked = [{"prompt": prompt, "n_predict": N_ANSWER, **GREEDY} for prompt in prompts]
    with command(model, *flags) as (server, client):
        first = [client.post(NATIVE, json=body).json() for body in asked]
        endless = {"prompt": prompts[0][::-1], "n_predict": -1, "stream": True, **GREEDY}
        with client.stream("POST", NATIVE, json=endless) as response:
            lines = response.iter_lines()
            assert json.loads(next(lines)[6:])["stop"] is False
            wait_until_flushed(client, len(prompts))
            server.process.kill()
            with pytest.raises(httpx.TransportError):
                list(lines)
        assert server.process.wait(PATIENCE_S) == -signal.SIGKILL
    with command(model, *flags) as (server, client):
        for body, before in zip(asked, first, strict=True):
            answer = client.post(NATIVE, json=body).json()
            assert answer["content"] == before["content"]
            assert answer["timings"]["prompt_n"] <= 9
            assert server.wait_for_event("request")["tier"] == "disk"


def test_a_stream_that_runs_when_the_end_is_told_comes_to_its_own_end(
    tiny_model: ModelOf,
) -> None:
    body = {"prompt": "Hello", "max_tokens": 1000, "stream": True, **GREEDY}
    body["stream_options"] = {"include_usage": True}
    with command(tiny_model("attention"), "-c", "2048", "--drain", "1000") as (server, client):
        with client.stream("POST", TEXT, json=body) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            server.process.send_signal(signal.SIGTERM)
            server.wait_for_event("ending")
            rest = [line[6:] for line in lines if line.startswith("data: ")]
        assert rest.pop() == "[DONE]"
        usage, last = json.loads(rest.pop()), json.loads(rest.pop())
        assert last["choices"][0]["finish_reason"] == "length"
        assert usage["usage"]["completion_tokens"] == 1000
        assert server.wait_for_event("request")["stop"] == "limit", "after it was told to end"
        assert server.end() == (0, [])


def test_the_end_waits_for_the_drain_and_for_no_client(tiny_model: ModelOf) -> None:
    flags = ("-c", "32768", "-np", "2", "--drain", "0.5", "--timeout", "1")
    endless = {"prompt": "Hello", "max_tokens": -1, "stream": True, **GREEDY}
    with (
        command(tiny_model("attention"), *flags) as (server, client),
        stop_reading(str(client.base_url), list(range(300, 320))),
    ):
        assert server.wait_for_event("request")["stop"] == "cancelled", "it took nothing"
        with client.stream("POST", TEXT, json=endless) as response:
            lines = response.iter_lines()
            seen = [next(lines)]
            server.process.send_signal(signal.SIGTERM)
            seen.extend(line for line in lines if line.startswith("data: "))
        assert "data: [DONE]" not in seen, "what was cut off does not pass for complete"
        assert json.loads(seen[-1][6:])["error"]["type"] == "unavailable_error"
        assert server.wait_for_event("request")["error"] == "EngineClosed"
        assert server.end() == (0, [])


def test_a_client_that_was_cut_off_is_no_error_of_the_server(tiny_model: ModelOf) -> None:
    flags = ("--drain", "0.5", "--timeout", "1")
    with (
        command(tiny_model("attention"), *flags) as (server, client),
        stop_reading(str(client.base_url), list(range(300, 320))),
    ):
        assert server.wait_for_event("request")["stop"] == "cancelled"
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == (0, [])
        events = map(json.loads, server.errors().splitlines())
        assert [event for event in events if event["level"] == "error"] == []


# -- any request that can be thought of ------------------------------------------------------------
@pytest.fixture
def fuzzed(tmp_path: Path) -> Iterator[Served]:
    """A server with all that can be turned on, so that nothing hides behind a 501."""
    with served(
        engine={"n_seqs": 2, "n_ctx": 256},
        n_predict=2,
        slot_save_path=tmp_path,
        exposition=lambda: (b"up 1\n", "text/plain; version=0.0.4"),
    ) as made:
        yield made


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_no_request_right_or_wrong_is_a_fault_of_the_server(
    fuzzed: Served, mode: GenerationMode
) -> None:
    schema = schemathesis.openapi.from_url(f"{fuzzed.url}/openapi.json")
    seen = set()
    for found in schema.get_all_operations():
        operation = found.ok()
        if mode is GenerationMode.NEGATIVE and not (operation.body or operation.query):
            continue  # there is no wrong way to ask: parts of paths are any text

        @settings(
            max_examples=6,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case: schemathesis.Case) -> None:
            response = case.call()
            refused = (case.operation.label, response.status_code) == ("POST /props", 501)
            assert response.status_code < 500 or refused  # no other address refuses all requests
            if response.status_code >= 400 and case.method != "HEAD":
                body = response.json()
                if case.operation.path.startswith("/v1/messages"):
                    assert body["type"] == "error"
                else:
                    assert body["error"]["code"] == response.status_code

        check()
        seen.add((operation.method.upper(), operation.path))
    paths = fuzzed.client.get("/openapi.json").json()["paths"]
    every = {(verb.upper(), path) for path, verbs in paths.items() for verb in verbs}
    with_body = {(verb, path) for verb, path in every if "requestBody" in paths[path][verb.lower()]}
    assert seen == every if mode is GenerationMode.POSITIVE else with_body <= seen
    assert fuzzed.client.get("/health").status_code == 200
    assert not any(slot.is_processing for slot in fuzzed.engine.slots())
