"""Addresses of Redis servers, and what is never shown of them."""

from __future__ import annotations

import traceback

import pytest

from llamakeep.errors import InvalidValue
from llamakeep.stores.redis.url import RedisAddress, hide_password, parse_redis_url


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://h", {"hosts": (("h", 6379),), "place": "h:6379"}),
        ("redis://h:1/3", {"hosts": (("h", 1),), "db": 3}),
        ("redis://h?db=4&protocol=3", {"db": 4, "protocol": 3}),
        ("redis://:p%40ss@h", {"username": None, "password": "p@ss"}),
        ("redis://me:p#:ss@h", {"username": "me", "password": "p#:ss"}),
        ("redis://a@b:pw@h", {"username": "a@b", "password": "pw", "hosts": (("h", 6379),)}),
        ("redis://[::1]:7/0", {"hosts": (("::1", 7),), "tls": False}),
        ("rediss://h", {"tls": True, "tls_options": {}}),
        ("rediss://h?ssl_ca_certs=/ca.pem", {"tls_options": {"ssl_ca_certs": "/ca.pem"}}),
        ("unix:///run/redis.sock?db=2", {"path": "/run/redis.sock", "db": 2, "hosts": ()}),
        (
            "redis+sentinel://u:pw@a,b:9/mymaster/2?sentinel_password=x",
            {
                "topology": "sentinel",
                "hosts": (("a", 26379), ("b", 9)),
                "service": "mymaster",
                "db": 2,
                "password": "pw",
                "sentinel_password": "x",
            },
        ),
        ("redis+cluster://a:1,b:2", {"topology": "cluster", "hosts": (("a", 1), ("b", 2))}),
        ("rediss+cluster://a", {"topology": "cluster", "tls": True}),
    ],
)
def test_a_url_says_where_the_server_is(url: str, expected: dict[str, object]) -> None:
    address = parse_redis_url(url)
    assert {name: getattr(address, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("", "begin with"),
        ("h:6379", "begin with"),
        ("http://h", "begin with"),
        ("redis://", "not a host"),
        ("redis://h:0", "not a host"),
        ("redis://h:99999", "not a host"),
        ("redis://h:port", "not a host"),
        ("redis://[::1", "not a host"),
        ("redis://a,b", "several hosts"),
        ("redis://h/x", "not a number"),
        ("redis://h/-1", "not a number"),
        ("redis://h/1/2", "says too much"),
        ("redis://h#f", "#fragment"),
        ("redis://h?timeout=1", "no option timeout"),
        ("redis://h?ssl_ca_certs=x", "no option ssl_ca_certs"),
        ("redis://h?db", "name=value"),
        ("redis://h?protocol=4", "neither 2 nor 3"),
        ("rediss://h?ssl_cert_reqs=maybe", "ssl_cert_reqs"),
        ("unix://run/redis.sock", "absolute"),
        ("redis+sentinel://a", "service"),
        ("redis+cluster://a/1", "database 0 only"),
    ],
)
def test_what_is_no_url_is_an_error_that_names_it(url: str, problem: str) -> None:
    with pytest.raises(InvalidValue, match=problem):
        parse_redis_url(url)


def test_what_is_no_text_is_an_error() -> None:
    with pytest.raises(InvalidValue, match="bytes"):
        parse_redis_url(b"redis://h")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "url",
    [
        "redis://:hush@h",
        "redis://me:hush@h:99999",
        "redis://me:hush@",
        "redis://:hu/hush@h",
        "redis://:hu?hush@h",
        "redis://:hu#hush@h",
        "http://:hush@h",
        "redis://h/1?password=hush",
        "redis://h?hush",
        "redis+sentinel://h/m?sentinel_password=hush",
        "redis+sentinel://h/m?sentinel_password=hu@hush",
        "me:hush@h",
        ":hush",
    ],
)
def test_no_password_is_shown(url: str) -> None:
    assert "hush" not in hide_password(url)
    try:
        shown = repr(parse_redis_url(url))
    except InvalidValue as error:
        # With all that a traceback tells of what went before; its source lines hold no URL.
        shown = "".join(traceback.format_exception(error))
    assert "hush" not in shown


def test_an_address_shows_where_it_is() -> None:
    address = parse_redis_url("redis://me:hush@h:7/1?protocol=3")
    assert isinstance(address, RedisAddress)
    assert address.shown == "redis://***@h:7/1"
