"""Errors as Anthropic's API has them, for the addresses that speak it.

::

    {"type": "error", "error": {"type": "...", "message": "..."}, "request_id": "req_..."}

Its clients ask again after a 408, 409 or 429 and whatever is 500 or more, unless `x-should-retry`
says otherwise; agents make a conversation shorter when a prompt is said to be too long in
Anthropic's own words.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final

PATH: Final = "/v1/messages"
OVERLOADED: Final = 529
_INVALID: Final = "invalid_request_error"
_FAULT: Final = "api_error"
_KINDS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    OVERLOADED: "overloaded_error",
}


def is_meant(path: str) -> bool:
    """Return whether an address speaks Anthropic's API."""
    return path == PATH or path.startswith(PATH + "/")


def new_request_id() -> str:
    """Return an id for a request, which its answer carries in `request-id`."""
    return "req_" + secrets.token_hex(12)


def code_of(code: int) -> int:
    """Return the status of an error: what is overloaded for a time has one of its own."""
    return OVERLOADED if code == 503 else code


def body_of(code: int, error: Mapping[str, Any], request_id: str) -> dict[str, Any]:
    """Return what is answered.

    Args:
        code: The status in llama-server's API.
        error: What would be answered there.
        request_id: Of the request.
    """
    code = code_of(code)
    kind = _KINDS.get(code) or (_FAULT if code >= 500 else _INVALID)
    message = _with_its_place(error["message"], error.get("param"))
    if "n_prompt_tokens" in error:
        n_tokens, n_ctx = error["n_prompt_tokens"], error["n_ctx"]
        message = f"prompt is too long: {n_tokens} tokens > {n_ctx} maximum"
    return {
        "type": "error",
        "error": {"type": kind, "message": message},
        "request_id": request_id,
    }


def _with_its_place(message: str, param: str | None) -> str:
    """Return a message that begins with a field in quotes as Anthropic's begin with it."""
    quoted = f"'{param}'"
    if param is None or not message.startswith(quoted):
        return message
    return f"{param}: {message.removeprefix(quoted).lstrip(': ')}"


def headers_of(code: int, request_id: str) -> dict[str, str]:
    """Return the headers of an error: what never changes is not worth asking again."""
    headers = {"request-id": request_id}
    if code == 501:
        headers["x-should-retry"] = "false"
    return headers


def invalid_message(location: Sequence[Any], message: str) -> str:
    """Return what is said of a field that cannot be meant.

    Args:
        location: Of the field, from the body on.
        message: What is wrong with it.
    """
    name = ".".join(str(part) for part in location)
    return f"{name}: {message}" if name else message
