"""Routes that skip FastAPI's machinery where a body is right, and only there."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response
from fastapi.testclient import TestClient
from pydantic import BaseModel

from llamakeep.server.app import create_app
from llamakeep.server.routing import MOST_VALUES, JsonRoute, add_routes, check_values, model_of
from tests.engine_tools import engine_of


class Body(BaseModel):
    number: int = 7


async def plain(body: Body) -> Response:
    return Response(str(body.number))


async def asking(request: Request, body: Body) -> Response:
    return Response(f"{request.url.path} {body.number}")


async def with_query(body: Body, more: int = 0) -> Response:
    return Response(str(body.number + more))


async def without_body(request: Request) -> Response:
    return Response(request.url.path)


def client_of(route_class: type[Any] | None) -> TestClient:
    app = FastAPI()
    router = APIRouter() if route_class is None else APIRouter(route_class=route_class)
    for endpoint in (plain, asking, with_query, without_body):
        router.add_api_route(f"/{endpoint.__name__}", endpoint, methods=["POST"])
    add_routes(app, router)
    return TestClient(app)


@pytest.mark.parametrize("path", ["/plain", "/asking", "/with_query?more=3", "/without_body"])
@pytest.mark.parametrize(
    "content",
    [
        b'{"number": 3}',
        b"{}",
        b'{"number": "3"}',
        b'{"number": "x"}',
        b'{"number": null}',
        b'{"other": 1}',
        b"[]",
        b"null",
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
def test_both_ways_answer_the_same(path: str, content: bytes) -> None:
    answers = [
        client.post(path, content=content, headers={"Content-Type": "application/json"})
        for client in (client_of(JsonRoute), client_of(None))
    ]
    short, usual = [(answer.status_code, answer.content) for answer in answers]
    assert short == usual


def test_only_a_body_and_the_request_can_take_the_short_way() -> None:
    assert [model_of(each) for each in (plain, asking, with_query, without_body)] == [
        Body,
        Body,
        None,
        None,
    ]


def test_what_is_asked_most_takes_the_short_way() -> None:
    with engine_of() as engine:
        routes = {getattr(route, "path", ""): route for route in create_app(engine).routes}
    for path in ("/completion", "/v1/completions", "/v1/chat/completions", "/tokenize"):
        route = routes[path]
        assert isinstance(route, JsonRoute)
        assert model_of(route.endpoint) is not None


@pytest.mark.parametrize("path", ["/completion", "/tokenize", "/slots/0?action=save"])
@pytest.mark.parametrize("values", ["[],", "1,", '{"":0},'])
def test_a_body_of_too_many_values_is_refused_before_it_is_read(
    path: str, values: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = values * (MOST_VALUES // sum(values.count(each) for each in ",:[{") + 1)
    body = f'{{"x": [{many}0]}}'.encode()

    def never(_data: bytes) -> None:
        raise AssertionError("it was read")

    with engine_of() as engine:
        client = TestClient(create_app(engine))
        monkeypatch.setattr(json, "loads", never)
        response = client.post(path, content=body)
        monkeypatch.undo()
        assert response.status_code == 413
        assert f"{MOST_VALUES:,} values" in response.json()["error"]["message"]


def test_a_long_text_is_not_many_values() -> None:
    text = "Well, this is prose, as people write it: long, and longer. " * 200_000
    check_values(json.dumps({"prompt": text}).encode())
    check_values(json.dumps({"prompt": list(range(1_000_000))}).encode())
