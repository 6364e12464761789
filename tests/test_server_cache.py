"""What is kept at `/cache`, who may ask, how much may be sent, and what `/docs` shows."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from llamakeep.server.shapes import ChatAnswer, CompletionAnswer, NativeAnswer
from tests.server_tools import HELLO, ONLY_A, TIMEOUT_S, Served, served

KEY = "sk-this-is-secret"
ORIGIN = "https://chat.example"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served(max_body_bytes=4096) as made:
        yield made


@pytest.fixture(scope="module")
def local() -> Iterator[Served]:
    with served(cors=("localhost", ORIGIN)) as made:
        yield made


@pytest.fixture(scope="module")
def locked() -> Iterator[Served]:
    with served(api_keys=("another", KEY), cors=(ORIGIN,)) as made:
        yield made


# -- /cache ----------------------------------------------------------------------------------------
def test_the_cache_tells_what_it_saved_and_forgets_on_demand() -> None:
    with served() as server:
        for _ in range(2):
            server.answer("/completion", prompt="H" * 200, n_predict=1)
        server.answer("/completion", prompt="I" * 200, n_predict=1)  # the idle slot gives way
        cache = server.client.get("/cache").json()
        _, second, first = cache["recent"]
        assert (first["reused_tokens"], first["evaluated_tokens"]) == (0, 201)
        assert second["reused_tokens"] + second["evaluated_tokens"] == 201
        assert cache["reused_tokens"] == second["reused_tokens"] > 0
        assert cache["entries"]
        assert 0 < cache["saved_share"] < 1
        assert 0 < cache["used_bytes"] <= cache["capacity_bytes"]
        assert "HHHH" not in str(cache), "prompts are not shown"
        assert server.client.delete("/cache").status_code == 200
        assert server.client.get("/cache").json()["entries"] == []
        again = server.answer("/completion", prompt="H" * 200, n_predict=1)
        assert again["timings"]["cache_n"] == 0


# -- keys and sizes --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer"},
        {"X-Api-Key": KEY + "x"},
        {"Authorization": "Basic wrong", "X-Api-Key": KEY + "x"},
        {"Authorization": b"Bearer \xff\xfe"},
    ],
)
@pytest.mark.parametrize("path", ["/completion", "/v1/chat/completions", "/cache", "/nothing"])
def test_without_a_key_nothing_is_answered(
    locked: Served, headers: dict[str, str], path: str
) -> None:
    error = locked.error_of(locked.post(path, {"prompt": "Hi"}, headers=headers), 401)
    assert error["type"] == "authentication_error"


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": f"Bearer {KEY}"},
        {"Authorization": f"bearer {KEY}"},
        {"Authorization": f"Bearer  {KEY}"},
        {"Authorization": KEY},
        {"X-Api-Key": KEY},
        {"Authorization": "Basic wrong", "X-Api-Key": KEY},
        {"X-Api-Key": "another"},
    ],
)
def test_with_a_key_all_is_answered(locked: Served, headers: dict[str, str]) -> None:
    body = {"prompt": "Hi", "n_predict": 1}
    assert locked.post("/completion", body, headers=headers).status_code == 200


@pytest.mark.parametrize("path", ["/health", "/v1/health"])
def test_health_needs_no_key(locked: Served, path: str) -> None:
    assert locked.client.get(path).status_code == 200


@pytest.mark.parametrize("path", ["/v1/models", "/models", "/props", "/slots", "/metrics", "/docs"])
def test_what_tells_of_the_server_needs_a_key(locked: Served, path: str) -> None:
    locked.error_of(locked.client.get(path), 401)
    assert locked.client.get(path, headers={"X-Api-Key": KEY}).status_code != 401


def test_a_page_that_may_ask_can_ask_first(locked: Served) -> None:
    asks = {
        "Origin": ORIGIN,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "Authorization",
    }
    allowed = locked.client.options("/completion", headers=asks)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == ORIGIN
    other = locked.client.options("/completion", headers=asks | {"Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize(
    ("origin", "may"),
    [
        ("http://localhost", True),
        ("https://localhost:8443", True),
        ("http://127.0.0.1:3000", True),
        ("http://[::1]:3000", True),
        ("http://notlocalhost", False),
        ("http://localhost.evil.example", False),
        ("http://localhost:1@evil.example", False),
        ("null", False),
        (ORIGIN, True),
    ],
)
def test_pages_of_this_machine_may_ask_where_it_says_so(
    local: Served, origin: str, may: bool
) -> None:
    asks = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    for response in (
        local.client.options("/completion", headers=asks),
        local.client.get("/health", headers={"Origin": origin}),
    ):
        assert response.status_code == 200
        allowed = response.headers.get("access-control-allow-origin")
        assert allowed == (origin if may else None)
        assert "origin" in response.headers["vary"].lower()


def test_without_cors_no_page_may_ask(server: Served) -> None:
    response = server.client.get("/health", headers={"Origin": ORIGIN})
    assert "access-control-allow-origin" not in response.headers


def test_a_foreign_page_cannot_empty_a_slot(tmp_path: Path) -> None:
    with served(slot_save_path=tmp_path) as server:
        server.answer("/completion", prompt="Hi", n_predict=3, ignore_eos=True, id_slot=0)
        held = server.client.get("/slots").status_code
        assert held == 200
        for headers in ({}, {"Content-Type": "text/plain"}, {"Content-Type": "text/plain;json"}):
            page = {"Origin": "https://evil.example"} | headers
            response = server.client.post("/slots/0?action=erase", headers=page)
            assert "Content-Type" in server.error_of(response, 400)["message"]
        asked = {"Origin": server.url, "Content-Type": "application/json; charset=utf-8"}
        erased = server.client.post("/slots/0?action=erase", headers=asked)
        assert erased.json()["n_erased"] > 0


def test_a_large_body_is_refused_before_it_is_sent(server: Served) -> None:
    address = server.url.removeprefix("http://").split(":")
    with socket.create_connection((address[0], int(address[1])), TIMEOUT_S) as raw:
        raw.sendall(
            b"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 999999999\r\n\r\n"
        )
        assert b" 413 " in raw.recv(4096).split(b"\r\n")[0]


def test_a_large_body_without_a_length_is_refused_too(server: Served) -> None:
    def chunks() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(100):
            yield b"x" * 1000
        yield b'"}'

    headers = {"Content-Type": "application/json"}
    response = server.client.post("/completion", content=chunks(), headers=headers)
    assert server.error_of(response, 413)["type"] == "invalid_request_error"


def test_a_body_of_just_the_size_is_taken(server: Served) -> None:
    body = b'{"prompt": "Hi", "n_predict": 1, "more": "%s"}'
    filled = body % (b"x" * (4096 - len(body) + 2))
    assert len(filled) == 4096
    assert server.raw("/completion", filled).status_code == 200
    assert server.raw("/completion", filled + b" ").status_code == 413


# -- metrics and docs ------------------------------------------------------------------------------
def test_metrics_are_shown_if_there_are_any(server: Served) -> None:
    assert "--metrics" in server.error_of(server.client.get("/metrics"), 501)["message"]
    before = int(time.time())
    with served(exposition=lambda: (b"up 1\n", "text/plain; version=0.0.4")) as other:
        response = other.client.get("/metrics")
        assert response.text == "up 1\n"
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert before <= int(response.headers["process-start-time-unix"]) <= time.time()


def test_every_endpoint_that_takes_a_body_shows_an_example(server: Served) -> None:
    assert server.client.get("/docs").status_code == 200
    paths = server.client.get("/openapi.json").json()["paths"]
    bodies = [
        operation["requestBody"]["content"]["application/json"]
        for path in paths.values()
        for operation in path.values()
        if "requestBody" in operation
    ]
    assert len(bodies) >= 7
    assert all("422" not in op["responses"] for path in paths.values() for op in path.values())
    assert all(body["examples"]["example"]["value"] for body in bodies)


def test_the_examples_of_the_docs_are_answered() -> None:
    with served() as server:
        paths = server.client.get("/openapi.json").json()["paths"]
        for path, operations in paths.items():
            for operation in operations.values():
                if "{" in path or "requestBody" not in operation:
                    continue
                examples = operation["requestBody"]["content"]["application/json"]["examples"]
                server.answer(path, **examples["example"]["value"])


@pytest.mark.parametrize(
    ("shape", "path", "body"),
    [
        (NativeAnswer, "/completion", {"prompt": "Hi", "n_probs": 2}),
        (CompletionAnswer, "/v1/completions", {"prompt": "Hi", "logprobs": 2, "n": 2}),
        (ChatAnswer, "/v1/chat/completions", {"messages": HELLO, "logprobs": True}),
        (ChatAnswer, "/v1/chat/completions", {"messages": HELLO, "n": 2}),
    ],
)
def test_answers_have_the_shapes_that_the_docs_show(
    server: Served, shape: type[BaseModel], path: str, body: dict[str, object]
) -> None:
    answer = server.answer(path, max_tokens=3, logit_bias=ONLY_A, **body)
    assert shape.model_validate(answer).model_dump(exclude_unset=True) == answer
