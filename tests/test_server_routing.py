"""Routes that skip FastAPI's machinery where a body is right, and only there."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response
from fastapi.testclient import TestClient
from pydantic import BaseModel

from llamakeep.server.app import create_app
from llamakeep.server.routing import JsonRoute, add_routes, model_of
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
