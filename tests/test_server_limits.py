"""What is checked of a request before and while it is read, on a bare application."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send

from llamakeep.server.app import create_app
from llamakeep.server.limits import Limits
from llamakeep.server.metrics import CountRequests, Metrics
from tests.engine_tools import engine_of

BODY: Message = {"type": "http.request", "body": b"{}", "more_body": False}
GONE: Message = {"type": "http.disconnect"}


def asked(messages: list[Message], *, then: Any = None, **options: Any) -> list[Any]:
    """Return what an application receives of these messages, and what ended it."""
    heard: list[Any] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            while True:
                heard.append(await receive())
        except (HTTPException, EOFError) as error:
            heard.append(getattr(error, "status_code", "end"))

    async def run() -> None:
        left = list(messages)

        async def receive() -> Message:
            if left:
                return left.pop(0)
            if then is not None:
                await then()
            raise EOFError

        async def send(message: Message) -> None:
            raise AssertionError(message)

        scope = {"type": "http", "method": "POST", "path": "/completion", "headers": []}
        limits = Limits(app, max_body_bytes=10, **options)
        await limits(scope, receive, send)

    asyncio.run(run())
    return heard


async def never() -> None:
    await asyncio.Event().wait()


def test_a_body_that_does_not_come_to_its_end_is_given_up() -> None:
    part: Message = {"type": "http.request", "body": b"{", "more_body": True}
    assert asked([part], then=never, body_s=0.01) == [part, 408]


def test_who_waits_for_an_answer_may_wait() -> None:
    async def a_while() -> None:
        await asyncio.sleep(0.03)

    assert asked([BODY], then=a_while, body_s=0.01) == [BODY, "end"]


def test_a_body_is_counted_as_it_comes() -> None:
    part: Message = {"type": "http.request", "body": b"123456", "more_body": True}
    assert asked([part, part]) == [part, 413]


@pytest.mark.parametrize("path", ["/completion", "/tokenize", "/slots/0"])
def test_a_client_that_leaves_with_half_a_body_is_no_fault(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    metrics, sent = Metrics(), []
    left: list[Message] = [{"type": "http.request", "body": b"{", "more_body": True}, GONE]

    async def receive() -> Message:
        return left.pop(0)

    async def send(message: Message) -> None:
        sent.append(message.get("status"))

    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "query_string": b"action=save",
        "headers": [],
    }
    with engine_of() as engine:
        asyncio.run(CountRequests(create_app(engine), metrics)(scope, receive, send))
    assert sent[0] == 499
    found = {
        sample.labels["status"]: sample.value
        for family in text_string_to_metric_families(metrics.exposition()[0].decode())
        for sample in family.samples
        if sample.name == "llamakeep_http_requests_total"
    }
    assert found == {"gone": 1.0}
    assert not caplog.records
