"""Who may ask, and how much they may send: checked before anything of a request is read."""

from __future__ import annotations

import hashlib
import hmac
import logging
from collections.abc import Iterable

import anyio
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llamakeep.server.errors import ApiError
from llamakeep.server.hosts import Hosts

_log = logging.getLogger("llamakeep")

PUBLIC = frozenset({"/", "/health", "/v1/health"})
"""Paths that need no key."""
_BEARER = "bearer "


class Limits:
    """Refuses requests without a key, those of foreign pages, and bodies that are too large.

    Browsers let every page send a simple POST to this machine; only what is JSON, or another
    method, they ask about first.

    Args:
        app: What comes after.
        max_body_bytes: A larger body is a 413: before it is read if it says how large it is, else
            as soon as it is too large.
        body_s: A body of which nothing comes for so many seconds is a 408.
        api_keys: One of them must be in `Authorization: Bearer` or `X-Api-Key`; none for no check.
        hosts: Says under which names it may be asked, and by which pages; None for no check.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        max_body_bytes: int,
        body_s: float = 30.0,
        api_keys: Iterable[str] = (),
        hosts: Hosts | None = None,
    ) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._body_s = body_s
        self._hosts = hosts
        # Digests have one length, so that comparing them tells nothing about the keys.
        self._keys = [_digest(key) for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        try:
            if self._hosts is not None:
                self._hosts.check(headers)
            self._check_key(scope["path"], headers)
            self._check_length(headers)
            _check_page(scope, headers)
        except ApiError as error:
            await _refuse(error, scope, receive, send)
            return
        await self._app(_as_json(scope, headers), self._counted(receive), send)

    def _check_key(self, path: str, headers: Headers) -> None:
        if not self._keys or path in PUBLIC:
            return
        given = [_digest(each) for each in _keys_in(headers)]
        matches = [hmac.compare_digest(one, key) for one in given for key in self._keys]  # always
        if not any(matches):
            _log.warning("a request without a valid API key was refused")
            raise ApiError("Invalid API Key", code=401)

    def _check_length(self, headers: Headers) -> None:
        length = headers.get("content-length", "")
        if length.isdigit() and int(length[:20]) > self._max_body_bytes:
            raise self._too_large()

    def _too_large(self) -> ApiError:
        return ApiError(f"the body is larger than {self._max_body_bytes:,} bytes", code=413)

    def _counted(self, receive: Receive) -> Receive:
        received, is_whole = 0, False

        async def count() -> Message:
            nonlocal received, is_whole
            if is_whole:  # what comes now is that the client goes away
                return await receive()
            try:
                with anyio.fail_after(self._body_s):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(408, f"no more of the body in {self._body_s:g} s") from None
            received += len(message.get("body", b""))
            is_whole = not message.get("more_body", False)
            if received > self._max_body_bytes:
                raise HTTPException(413, self._too_large().error["message"])
            return message

        return count


def _keys_in(headers: Headers) -> tuple[str, str]:
    """Return what may be a key: `Authorization` of any scheme does not hide `X-Api-Key`."""
    given = headers.get("authorization", "")
    if given[: len(_BEARER)].lower() == _BEARER:
        given = given[len(_BEARER) :].strip()
    return given, headers.get("x-api-key", "")


def _check_page(scope: Scope, headers: Headers) -> None:
    """Refuse what a page may send without asking first: a POST that is no JSON, or has no body."""
    if scope["method"] != "POST" or "origin" not in headers:
        return
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError("a page must send JSON (with Content-Type: application/json)")


def _as_json(scope: Scope, headers: Headers) -> Scope:
    """Return a request whose body counts as JSON, whatever it says, unless a page sent it.

    Nothing else is taken here, and `curl -d` says that it sends a form. Browsers say where a
    request comes from; a form of another site must not pass for JSON, which they would not send.
    """
    if scope["method"] != "POST" or "origin" in headers:
        return scope
    kept = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
    return {**scope, "headers": [*kept, (b"content-type", b"application/json")]}


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    response = error.response(scope["path"])
    response.headers["Connection"] = "close"  # the rest of the body is not read
    await response(scope, receive, send)
