"""Asking a server that runs, with what Python has on board."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Sequence
from http.client import HTTPException
from typing import Any, Final

from llamakeep.errors import InvalidValue, StoreError

_TIMEOUT_SECONDS: Final = 30.0
_MOST_BYTES: Final = 16 << 20
_MOST_SAID: Final = 300


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Follows none: the key is for the server that was named."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Return nothing, so that the redirect is an error."""


def get_json(url: str, path: Sequence[str | None], *, api_key: str = "") -> Any:
    """Return the JSON that a server answers.

    Args:
        url: Its address.
        path: What is below it, a name each; None is left out.
        api_key: Sent as a bearer's, if there is one.

    Raises:
        InvalidValue: For an address that is none.
        StoreError: When the server cannot be reached, refuses, or answers with no JSON.
    """
    names = [urllib.parse.quote(name, safe="") for name in path if name is not None]
    request = urllib.request.Request("/".join([_checked(url), *names]))
    request.add_header("Accept", "application/json")
    if api_key:
        if not (api_key.isascii() and api_key.isprintable()):
            raise InvalidValue("the API key has letters that no header can have")
        request.add_header("Authorization", f"Bearer {api_key}")
    opener = urllib.request.build_opener(_NoRedirects)
    try:
        with opener.open(request, timeout=_TIMEOUT_SECONDS) as answer:
            data = answer.read(_MOST_BYTES + 1)
    except urllib.error.HTTPError as error:
        with error:
            raise StoreError(f"{url} answers {error.code}: {_said(error)}") from None
    except urllib.error.URLError as error:
        raise StoreError(f"cannot reach {url}: {error.reason}") from None
    except (OSError, HTTPException, ValueError) as error:
        raise StoreError(f"cannot reach {url}: {str(error) or type(error).__name__}") from None
    return _parsed(url, data)


def _checked(url: str) -> str:
    try:
        parts = urllib.parse.urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidValue(f"--url {url!r}: {error}") from None
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
        raise InvalidValue(f"--url must be like http://127.0.0.1:8080, not {url!r}")
    if not (url.isascii() and url.isprintable()) or " " in url:
        raise InvalidValue(f"--url has letters that no address can have: {url!r}")
    return url.rstrip("/")


def _said(error: urllib.error.HTTPError) -> str:
    """Return what a server says about an error, as far as it can be read."""
    try:
        body = json.loads(error.read(_MOST_BYTES))
        said = body["error"]["message"]
    except (OSError, HTTPException, ValueError, LookupError, TypeError, RecursionError):
        said = error.reason
    return str(said)[:_MOST_SAID]


def _parsed(url: str, data: bytes) -> Any:
    if len(data) > _MOST_BYTES:
        raise StoreError(f"{url} answers with more than {_MOST_BYTES >> 20} MiB")
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise StoreError(f"{url} answers with no JSON: is it a llamakeep server?") from None
