"""What takes long is not done in the event loop."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamakeep.chat_template import ChatTemplate
from llamakeep.engine.request import Finished, Listener, Piece, Request, Stop, Timings
from llamakeep.server import native_json, openai_json, prompts, wire
from llamakeep.server.answers import collect
from llamakeep.server.context import ServerOptions
from llamakeep.server.threads import size_of
from llamakeep.server.wire import dumps, dumps_in_pieces
from tests.server_tools import HELLO, ONLY_A, served

WORKER = "AnyIO worker thread"
MOST = ServerOptions().inline_chars


# -- how much it is --------------------------------------------------------------------------------
class Counted(list[Any]):
    """A list that counts how many of its items are looked at."""

    looks = 0

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            Counted.looks += 1
            yield item


@pytest.mark.parametrize(
    "value",
    [
        Counted([7] * 100_000),
        Counted([""] * 100_000),
        Counted([[]] * 100_000),
        Counted([{}] * 100_000),
        Counted([{"role": "user", "content": "x" * 9999}] * 1000),
        Counted(Counted([7] * 10) for _ in range(10_000)),
    ],
    ids=["tokens", "empty texts", "empty lists", "empty objects", "messages", "prompts"],
)
def test_a_large_prompt_is_counted_only_up_to_the_bound(value: object) -> None:
    Counted.looks = 0
    assert size_of(value, MOST) > MOST
    assert Counted.looks <= MOST / 8 + 1


def test_what_is_deep_is_counted_without_recursion() -> None:
    deep: object = 7
    for _ in range(100_000):
        deep = [deep]
    assert size_of(deep, MOST) > MOST
    assert size_of(deep, 10**9) == 8 * 100_001


@given(
    value=st.recursive(
        st.text(max_size=20) | st.integers() | st.none(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=3), inner),
    ),
    most=st.integers(0, 400),
)
def test_the_bound_changes_only_how_far_it_is_counted(value: object, most: int) -> None:
    def whole(one: object) -> int:
        if isinstance(one, dict):
            return 136 + sum(whole(key) + whole(each) for key, each in one.items())
        if isinstance(one, list):
            return 8 + sum(map(whole, one))
        return 8 + (len(one) if isinstance(one, str) else 0)

    exact = whole(value)
    assert size_of(value, 10**9) == exact
    assert (size_of(value, most) > most) == (exact > most)


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
JSON = st.recursive(
    TEXT | st.integers() | st.none() | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
)


@given(value=JSON, depth=st.integers(0, 6))
def test_json_in_pieces_is_the_same_json(value: object, depth: int) -> None:
    assert dumps_in_pieces(value, depth) == dumps(value)


# -- where it is done ------------------------------------------------------------------------------
@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return the threads that write probabilities."""
    names: set[str] = set()

    def noting(function: Any) -> Any:
        def call(*given: Any) -> Any:
            names.add(threading.current_thread().name)
            return function(*given)

        return call

    monkeypatch.setattr(native_json, "probs_json", noting(native_json.probs_json))
    monkeypatch.setattr(openai_json, "probs_json", noting(openai_json.probs_json))
    monkeypatch.setattr(openai_json, "legacy_logprobs", noting(openai_json.legacy_logprobs))
    return names


LARGE = "x" * MOST
TEMPLATED = [
    {"tools": [{"type": "function", "function": {"name": "f", "description": LARGE}}]},
    {"chat_template_kwargs": {"x": LARGE}},
    {"chat_template_kwargs": {LARGE: 1}},
]


@pytest.mark.parametrize("more", TEMPLATED, ids=["tools", "value", "key"])
@pytest.mark.parametrize("path", ["/apply-template", "/v1/chat/completions/input_tokens"])
def test_a_template_is_filled_in_a_thread_whatever_is_long(
    path: str, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    render = ChatTemplate.render_chat

    def noting(*given: Any, **options: Any) -> Any:
        names.append(threading.current_thread().name)
        return render(*given, **options)

    monkeypatch.setattr(ChatTemplate, "render_chat", noting)
    with served() as server:
        server.answer(path, messages=HELLO)
        server.answer(path, messages=HELLO, **more)
    assert names[0] != WORKER == names[1]


def test_a_long_body_is_read_in_a_thread_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    loads = json.loads

    def noting(data: bytes | str) -> Any:
        if b"find me" in data if isinstance(data, bytes) else "find me" in data:
            names.append(threading.current_thread().name)
        return loads(data)

    with served() as server:
        monkeypatch.setattr(json, "loads", noting)
        padding = b" " * 100_000
        for body in (b'{"content": "find me"%s}', b'{"tokens": 7, "find me": 1%s}', b'"find me%s'):
            for more in (b"", padding):
                path = "/detokenize" if b"tokens" in body else "/tokenize"
                server.raw(path, body % more)
        monkeypatch.undo()
    assert len(names) == 6
    assert [name == WORKER for name in names] == [False, True] * 3


ENDPOINTS = [
    ("/completion", {"prompt": "Hi", "n_probs": 100}),
    ("/v1/completions", {"prompt": "Hi", "logprobs": 5}),
    ("/v1/chat/completions", {"messages": HELLO, "logprobs": True, "top_logprobs": 20}),
]


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
def test_many_biases_are_read_and_told_in_a_thread(
    path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []

    def noting(value: Any) -> float:
        names.append(threading.current_thread().name)
        return float(value)

    monkeypatch.setattr(prompts, "_bias", noting)
    with served() as server:
        server.answer(path, max_tokens=1, **body, logit_bias=[[65, 1]])
        assert len(names) == 1
        assert WORKER not in names, "a few are read at once"
        server.answer(path, max_tokens=1, **body, logit_bias=[[65, 1]] * 500)
        assert names[1:] == [WORKER] * 500


def test_many_biases_are_told_in_a_thread_however_short_the_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names: list[str] = []
    written = native_json.settings_json

    def noting(*given: Any, **more: Any) -> Any:
        names.append(threading.current_thread().name)
        return written(*given, **more)

    monkeypatch.setattr(native_json, "settings_json", noting)
    with served() as server:
        for n_biases in (1, 900):
            biases = [[65, 1]] * n_biases
            server.answer("/completion", prompt="Hi", n_predict=1, n=3, logit_bias=biases)
    assert [name == WORKER for name in names] == [False] * 3 + [True] * 3


def test_the_last_event_with_many_biases_is_written_in_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names: list[str] = []
    written = native_json.final_json

    def noting(*given: Any, **more: Any) -> Any:
        names.append(threading.current_thread().name)
        return written(*given, **more)

    monkeypatch.setattr(native_json, "final_json", noting)
    with served(inline_chars=100) as server:
        for n_biases in (0, 500):
            biases = [[65, 1]] * n_biases
            server.stream("/completion", prompt="Hi", n_predict=1, logit_bias=biases)
    assert [name == WORKER for name in names] == [False, True]


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
def test_a_large_answer_is_written_in_a_thread(
    path: str, body: dict[str, Any], writers: set[str]
) -> None:
    with served() as server:
        server.answer(path, max_tokens=1, logit_bias=ONLY_A, **body)
        assert len(writers) == 1
        assert WORKER not in writers, "a small one is written at once"
        writers.clear()
        server.answer(path, max_tokens=200, logit_bias=ONLY_A, **body)
        assert writers == {WORKER}


def test_no_piece_of_a_large_answer_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def noting(value: object) -> bytes:
        sizes.append(len(dumps(value)))
        return dumps(value)

    monkeypatch.setattr(wire, "dumps", noting)
    with served() as server:
        for path, body in ENDPOINTS:
            server.answer(path, max_tokens=200, logit_bias=ONLY_A, **body)
    assert max(sizes) < 20_000 < sum(sizes)


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
def test_large_events_are_written_in_a_thread(
    path: str, body: dict[str, Any], writers: set[str]
) -> None:
    with served(inline_chars=16) as server:
        threaded = server.stream(path, max_tokens=5, logit_bias=ONLY_A, **body)
        assert writers == {WORKER}
    with served() as server:
        at_once = server.stream(path, max_tokens=5, logit_bias=ONLY_A, **body)
    same = ("content", "completion_probabilities", "choices")
    assert [{name: each.get(name) for name in same} for each in threaded] == [
        {name: each.get(name) for name in same} for each in at_once
    ]


def test_the_end_of_a_long_answer_leaves_others_their_turn() -> None:
    """All pieces of an answer that is not streamed come at its end."""

    class Finishes:
        """An engine whose answer is there at once."""

        def submit_all(self, asked: Sequence[tuple[Request, Listener]]) -> list[Any]:
            for request, listener in asked:
                for _ in range(5000):
                    listener(Piece("a", (1,)))
                n = int(request.prompt.size)
                listener(Finished(Stop.LIMIT, "", 0, None, Timings(0, n, 0, 0, 0, 0), n, n))
            return []

    async def run() -> tuple[int, int]:
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        async def never() -> Any:
            await asyncio.Event().wait()

        task = asyncio.ensure_future(others())
        await asyncio.sleep(0)
        before = turns
        [answer] = await collect(Finishes(), [Request.of([1])], never)  # type: ignore[arg-type]
        task.cancel()
        return answer.n_decoded, turns - before

    n_decoded, n_turns = asyncio.run(run())
    assert n_decoded == 5000
    assert n_turns >= 5000 // 256
