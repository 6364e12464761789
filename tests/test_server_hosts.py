"""Under which names a server may be asked, and by which pages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from starlette.datastructures import Headers

from llamakeep.server.errors import ApiError
from llamakeep.server.hosts import Hosts, is_loopback
from llamakeep.server.service import hosts_of
from llamakeep.server.settings import ServerSettings
from tests.server_tools import served

ASKED = {"prompt": "hi", "n_predict": 1}


def is_taken(hosts: Hosts, **headers: str) -> bool:
    try:
        hosts.check(Headers(headers))
    except ApiError as error:
        return error.code != 403
    return True


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:8080",
        "localhost.:8080",
        "a.localhost",
        "127.0.0.1:8080",
        "127.1.2.3",
        "[::1]:8080",
        "[::1]",
        "192.168.1.7:80",
        "host.docker.internal:8080",
        "",
    ],
)
def test_addresses_and_local_names_may_be_asked_for(host: str) -> None:
    assert is_taken(Hosts((), ()), host=host)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8080",
        "localhost.evil.example",
        "evillocalhost",
        "127.0.0.1.evil.example",
        "evil.example:127.0.0.1",
        "[::1].evil.example",
        "*",
        "..",
    ],
)
def test_other_names_may_not(host: str) -> None:
    assert not is_taken(Hosts((), ()), host=host)
    assert is_taken(Hosts((host,), ()), host=host) or host == "*"
    assert is_taken(Hosts(("*",), ()), host=host)


@pytest.mark.parametrize(
    ("origin", "taken"),
    [
        ("http://localhost:3000", True),
        ("https://127.0.0.1", True),
        ("http://[::1]:5173", True),
        ("http://app.localhost", True),
        ("https://chat.example", True),
        ("https://proxy.example", True),
        ("http://evil.example", False),
        ("http://192.168.1.7", False),
        ("http://localhost.evil.example", False),
        ("http://host.docker.internal", False),
        ("chrome-extension://localhost", False),
        ("null", False),
        ("http://[", False),
        ("", False),
    ],
)
def test_pages_of_this_machine_and_of_those_named_may_ask(origin: str, taken: bool) -> None:
    hosts = Hosts(("proxy.example",), ("https://chat.example",))
    assert is_taken(hosts, host="localhost", origin=origin) is taken
    assert is_taken(Hosts((), ("*",)), host="localhost", origin=origin)


def test_pages_of_this_server_may_ask_it() -> None:
    hosts = Hosts((), ())
    assert is_taken(hosts, host="192.168.1.7:8080", origin="http://192.168.1.7:8080")
    assert not is_taken(hosts, host="192.168.1.7:8080", origin="http://192.168.1.7:9090")
    assert not is_taken(hosts, host="evil.example", origin="http://evil.example")


def test_the_host_of_a_page_that_may_ask_may_be_asked_for() -> None:
    assert is_taken(Hosts((), ("https://chat.example:444",)), host="chat.example")
    assert is_taken(Hosts((), ("*",)), host="chat.example")


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.168.1.7", False),
        ("example.org", False),
    ],
)
def test_what_only_this_machine_reaches(host: str, local: bool) -> None:
    assert is_loopback(host) is local


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ("127.0.0.1",)),
        ({"host": ("localhost", "::1")}, ("localhost", "::1")),
        ({"host": ("0.0.0.0",)}, None),
        ({"host": ("127.0.0.1", "192.168.1.7")}, None),
        ({"api_key": ("k",)}, None),
        (
            {"host": ("0.0.0.0",), "api_key": ("k",), "allowed_hosts": ("a.example",)},
            ("0.0.0.0", "a.example"),
        ),
        ({"allowed_hosts": ("*",)}, ("127.0.0.1", "*")),
    ],
)
def test_when_names_are_looked_at(options: dict[str, Any], expected: tuple[str, ...]) -> None:
    assert hosts_of(ServerSettings(model=Path("m.gguf"), **options)) == expected


def test_a_page_that_lets_its_name_stand_for_this_machine_is_refused() -> None:
    rebound = {"Host": "evil.example", "Origin": "http://evil.example"}
    with served(hosts=()) as server:
        assert server.post("/completion", ASKED).status_code == 200
        refused = server.post("/completion", ASKED, headers=rebound)
        error = server.error_of(refused, 403)
        assert error["type"] == "permission_error"
        assert "--allowed-hosts evil.example" in error["message"]
        assert server.client.get("/slots", headers={"Host": "evil.example"}).status_code == 403
        refused = server.post("/completion", ASKED, headers={"Origin": "http://evil.example"})
        assert "--cors http://evil.example" in server.error_of(refused, 403)["message"]
        local = {"Origin": "http://localhost:3000"}
        assert server.post("/completion", ASKED, headers=local).status_code == 200
    with served(hosts=("evil.example",)) as server:
        assert server.post("/completion", ASKED, headers=rebound).status_code == 200
    with served() as server:  # nothing was said of names
        assert server.post("/completion", ASKED, headers=rebound).status_code == 200
