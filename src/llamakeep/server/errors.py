"""What goes wrong, as status codes and bodies: one table for both APIs.

Bodies are llama-server's, which OpenAI's clients read as well; `param` is OpenAI's name for the
field that is meant::

    {"error": {"code": 400, "message": "...", "type": "invalid_request_error", "param": "seed"}}

Bad input is a 400 in both APIs, also where the body is no JSON or has a wrong type. Addresses that
speak Anthropic's API have the bodies of `anthropic_errors.py`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from llamakeep import errors as raised
from llamakeep.errors import LlamakeepError
from llamakeep.server import anthropic_errors

_log = logging.getLogger("llamakeep")

INVALID = "invalid_request_error"
AUTHENTICATION = "authentication_error"
SERVER = "server_error"
NOT_FOUND = "not_found_error"
NOT_SUPPORTED = "not_supported_error"
UNAVAILABLE = "unavailable_error"
TOO_LONG = "exceed_context_size_error"
FORBIDDEN = "permission_error"

GONE = 499
"""The status of an answer that nobody waits for any more; for counts only."""

_TYPES = {401: AUTHENTICATION, 403: FORBIDDEN, 404: NOT_FOUND, 501: NOT_SUPPORTED, 503: UNAVAILABLE}
_UNREADABLE = "the request body must be JSON that can be read (Content-Type: application/json)"
_NO_OBJECT = "the request body must be a JSON object (with Content-Type: application/json)"


class ApiError(Exception):
    """A request that is answered with an error.

    Args:
        message: For people.
        code: The HTTP status.
        kind: llama-server's `type`; the usual one of the code if it is "".
        param: The field that is meant.
        retry_after_s: When to come again.
        **more: Further entries of the body.
    """

    def __init__(
        self,
        message: str,
        *,
        code: int = 400,
        kind: str = "",
        param: str | None = None,
        retry_after_s: float | None = None,
        **more: Any,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s
        kind = kind or _TYPES.get(code) or (SERVER if code >= 500 else INVALID)
        self.error: dict[str, Any] = {"code": code, "message": message, "type": kind}
        if param is not None:
            self.error["param"] = param
        self.error |= more

    @property
    def body(self) -> dict[str, Any]:
        """What is answered."""
        return {"error": self.error}

    def response(self, path: str = "") -> JSONResponse:
        """Return it as a response.

        Args:
            path: The address that was asked, whose API decides about its form.
        """
        headers: dict[str, str] = {}
        if self.retry_after_s is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_s)))
        if self.code == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if not anthropic_errors.is_meant(path):
            return JSONResponse(self.body, self.code, headers)
        request_id = anthropic_errors.new_request_id()
        headers |= anthropic_errors.headers_of(self.code, request_id)
        body = anthropic_errors.body_of(self.code, self.error, request_id)
        return JSONResponse(body, anthropic_errors.code_of(self.code), headers)


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


def unsupported(param: str, why: str = "is not supported") -> ApiError:
    """Return the error of a field that means something, but not here."""
    return ApiError(f"'{param}' {why}", param=param)


def too_long(n_prompt: int, n_ctx: int) -> ApiError:
    """Return the error of a prompt that does not fit, with both numbers."""
    message = (
        f"request ({n_prompt} tokens) exceeds the available context size ({n_ctx} tokens), "
        "try increasing it"
    )
    return ApiError(message, kind=TOO_LONG, n_prompt_tokens=n_prompt, n_ctx=n_ctx)


# The first class that an error is an instance of decides.
_TABLE: tuple[tuple[type[LlamakeepError], int, str], ...] = (
    (raised.ContextOverflow, 400, TOO_LONG),
    (raised.InvalidValue, 400, INVALID),
    (raised.QueueFull, 503, UNAVAILABLE),
    (raised.EngineClosed, 503, UNAVAILABLE),
    (raised.KeeperClosed, 503, UNAVAILABLE),
    (raised.KeeperBusy, 503, UNAVAILABLE),
    (raised.OverBudget, 503, UNAVAILABLE),
    (raised.StateError, 400, INVALID),
    (raised.LlamakeepError, 500, SERVER),
)


def api_error(error: Exception) -> ApiError:
    """Return the answer to `error`; what nobody expected is logged, and told without details."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, raised.ContextOverflow) and error.n_tokens is not None:
        return too_long(error.n_tokens, error.n_ctx or 0)
    for kind, code, name in _TABLE:
        if isinstance(error, kind):
            retry = getattr(error, "retry_after_s", None)
            return ApiError(str(error), code=code, kind=name, retry_after_s=retry)
    if isinstance(error, UnicodeEncodeError):
        return ApiError("the request has text that is no Unicode (half of a surrogate pair)")
    if isinstance(error, RecursionError):
        return ApiError("the request is nested too deeply")
    _log.error("a request failed: %s", type(error).__name__, exc_info=error)
    return _internal()


def _gone() -> ApiError:
    return ApiError("the client went away", code=GONE)


def _internal() -> ApiError:
    return ApiError("internal error", code=500)


def _field(location: Sequence[Any]) -> str | None:
    """Return the name of the field that a validation error is about, like `messages.0.role`."""
    return ".".join(str(part) for part in location[1:]) or None  # the first says where it stood


def invalid(error: RequestValidationError, path: str = "") -> ApiError:
    """Return the 400 for input of a wrong type or out of range, which names the field.

    Args:
        error: What is wrong.
        path: The address that was asked.
    """
    first = error.errors()[0]
    kind, location = str(first.get("type")), first.get("loc", ())
    if kind == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        return ApiError(f"{_UNREADABLE}: {reason}")
    name = _field(location)
    if name is None:
        return ApiError(_NO_OBJECT)
    if anthropic_errors.is_meant(path):
        message = anthropic_errors.invalid_message(location[1:], first.get("msg", "invalid"))
        return ApiError(message, param=name)
    if kind == "missing":
        return ApiError(f"'{name}' is required", param=name)
    return ApiError(f"'{name}': {first.get('msg', 'invalid')}", param=name)


def _http(error: HTTPException) -> ApiError:
    messages = {
        400: _UNREADABLE,
        404: "File Not Found",
        405: "this address does not take that method",
    }
    return ApiError(messages.get(error.status_code, str(error.detail)), code=error.status_code)


def install(app: FastAPI) -> None:
    """Let every error of `app` have its body from here."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        path = request.url.path
        if isinstance(error, RequestValidationError):
            return invalid(error, path).response(path)
        if isinstance(error, HTTPException):
            if isinstance(error.__cause__, ClientDisconnect):  # so FastAPI says it
                return _gone().response(path)
            response = _http(error).response(path)
            response.headers.update(error.headers or {})
            return response
        return api_error(error).response(path)

    async def gone(request: Request, __: Exception) -> JSONResponse:
        return _gone().response(request.url.path)

    async def unexpected(request: Request, __: Exception) -> JSONResponse:
        return _internal().response(request.url.path)

    handlers: dict[type[Exception], Callable[[Request, Exception], Awaitable[JSONResponse]]] = {
        RequestValidationError: answer,
        HTTPException: answer,
        ApiError: answer,
        LlamakeepError: answer,
        UnicodeEncodeError: answer,
        RecursionError: answer,
        ClientGone: gone,
        ClientDisconnect: gone,  # with its body not complete
        Exception: unexpected,  # raised again afterwards, so that the server logs it
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)
