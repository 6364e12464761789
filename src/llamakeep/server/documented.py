"""What `/docs` shows: examples of requests, and the errors that every endpoint may answer with."""

from __future__ import annotations

from typing import Any

from fastapi import Body
from pydantic import BaseModel, ConfigDict


class ErrorDetail(BaseModel):
    """What went wrong."""

    model_config = ConfigDict(extra="allow")

    code: int
    message: str
    type: str
    param: str | None = None


class ErrorBody(BaseModel):
    """The body of every answer that is an error."""

    error: ErrorDetail


def _error(text: str) -> dict[str, Any]:
    return {"model": ErrorBody, "description": text}


ERRORS: dict[int | str, dict[str, Any]] = {
    400: _error("Something in the request cannot be meant; the message names it."),
    401: _error("No API key, or a wrong one."),
    413: _error("The body is too large."),
    500: _error("A fault of the server."),
    501: _error("The server was not started with what this needs."),
    503: _error("Too many requests wait, or the server is on its way up or down."),
    "default": _error("Any other error."),
}


def answers(model: Any, *, streamed: bool = False) -> dict[int | str, dict[str, Any]]:
    """Return what an endpoint answers with: `model`, the errors, and events if it may stream."""
    answer: dict[str, Any] = {"model": model, "description": "The answer."}
    if streamed:
        answer["description"] = "The answer, or, with `stream`, events with pieces of it."
        answer["content"] = {"text/event-stream": {"schema": {"type": "string"}}}
    return ERRORS | {200: answer}


def example(**fields: Any) -> Any:
    """Return the body parameter of an endpoint, with an example for its page."""
    return Body(openapi_examples={"example": {"value": fields}})
