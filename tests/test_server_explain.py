"""`/explain` after a request to each API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from llamakeep.explain import Explanation, Kind
from tests.engine_tools import ask, span
from tests.server_tools import served

SYSTEM = "You are helpful. Today is 2026-03-01, a Sunday. Be brief, and answer in English only."
SECRET = "what nobody else may read"
BOTH = pytest.mark.parametrize("texts", [False, True])


def chat(system: str) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": SECRET}]
    return "/v1/chat/completions", {"messages": messages, "max_tokens": 2}


def claude(system: str) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "user", "content": SECRET}]
    return "/v1/messages", {
        "model": "any",
        "system": system,
        "messages": messages,
        "max_tokens": 2,
        "metadata": {"user_id": "somebody"},
    }


def response(system: str) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"instructions": system, "input": SECRET, "max_output_tokens": 2}


def plain(system: str) -> tuple[str, dict[str, Any]]:
    return "/completion", {"prompt": f"{system} {SECRET}", "n_predict": 2}


APIS = {
    "messages[0].content": chat,
    "system": claude,
    "instructions": response,
    "prompt": plain,
}


@BOTH
@pytest.mark.parametrize("part", list(APIS))
def test_a_request_to_each_api_is_explained(part: str, texts: bool) -> None:
    with served(explain_texts=texts) as server:
        for system in (SYSTEM, SYSTEM.replace("03-01", "03-02")):
            path, body = APIS[part](system)
            answer = server.post(path, body)
            assert answer.status_code == 200, answer.text
        found = server.client.get("/explain")
        assert found.status_code == 200, found.text
        said = Explanation.from_json(found.json())
        assert said.kind is Kind.DATE
        if texts:
            assert said.part == part
            assert "'2026-03-02' now" in said.reason
        assert (SECRET[:8] in found.text or "2026-03-0" in found.text) is texts
        last = server.engine.history.find()
        assert last is not None
        assert (None if last.body is None else json.loads(last.body)) == (body if texts else None)


@BOTH
@pytest.mark.parametrize("part", list(APIS))
def test_the_same_request_again_is_the_same(part: str, texts: bool) -> None:
    with served(explain_texts=texts) as server:
        path, body = APIS[part](SYSTEM)
        for _ in range(2):
            server.answer(path, **body)
        said = Explanation.from_json(server.client.get("/explain").json())
        assert said.kind is Kind.SAME


@BOTH
def test_requests_of_different_apis_can_be_compared(texts: bool) -> None:
    with served(explain_texts=texts) as server:
        for api in (*APIS.values(), *reversed(APIS.values())):
            path, body = api(SYSTEM)
            server.answer(path, **body)
            assert server.client.get("/explain").status_code == 200


def test_a_body_that_nobody_can_read_leaves_the_tokens() -> None:
    with served(explain_texts=True) as server:
        for body in (b'{"made": "by hand"}', b'{"messages": null}', b"[1]", b"no JSON"):
            ask(server.engine, span(60, 1), 1, body=body).wait()
            found = server.client.get("/explain")
            assert found.status_code == 200, found.text
        assert Explanation.from_json(found.json()).kind is Kind.SAME


def test_anthropics_clients_find_their_requests_and_name_their_sessions() -> None:
    with served() as server:
        path, body = claude(SYSTEM)
        answer = server.post(path, body)
        ids = (answer.json()["id"], answer.headers["request-id"])
        server.answer(*chat(SYSTEM)[:1], **chat(SYSTEM)[1])
        found = [server.client.get(f"/explain/{each}").json() for each in ids]
        assert found[0] == found[1]
        assert found[0]["request_id"] == ids[0]
        known = server.engine.history.find(ids[1])
        assert known is not None
        assert known.session == "somebody"


@pytest.mark.parametrize("metadata", [None, {}, {"user_id": None}, {"user_id": 7}, ["a"]])
def test_metadata_that_names_nobody_names_no_session(metadata: Any) -> None:
    with served() as server:
        path, body = claude(SYSTEM)
        server.answer(path, **(body | {"metadata": metadata}))
        known = server.engine.history.find()
        assert known is not None
        assert known.session == ""
