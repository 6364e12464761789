"""Routes whose requests take few steps: what a request costs before and after its answer is ours.

After some milliseconds of waiting a processor has forgotten a program: each of its steps costs four
times as much as it does in a loop. So it is the number of steps that counts.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

Handler = Callable[[Request], Coroutine[Any, Any, Response]]

M = TypeVar("M", bound=BaseModel)

MOST_VALUES = 1 << 21
"""Values that a body may have: each takes up to a hundred bytes when it is read."""
_INLINE_BYTES = 100_000
"""A body up to this size is read in the event loop, which takes up to 2 ms."""


class JsonRoute(APIRoute):
    """A route that reads a body by itself, and answers a wrong one as FastAPI does.

    The short way is for endpoints whose only parameters are `body`, a model, and `request`. Bodies
    of too many values are refused whatever the endpoint, and before they are read.
    """

    def get_route_handler(self) -> Handler:
        """Return what answers a request."""
        usual = super().get_route_handler()
        endpoint, model = self.endpoint, model_of(self.endpoint)
        if self.body_field is None:
            return usual
        wants_request = "request" in inspect.signature(endpoint).parameters

        async def answer(request: Request) -> Response:
            data = await request.body()
            if model is None or not data:
                check_values(data)
                return await usual(request)
            read = partial(body_of, model, data)
            body = read() if len(data) <= _INLINE_BYTES else await run_in_threadpool(read)
            answered: Response = await (
                endpoint(request=request, body=body) if wants_request else endpoint(body=body)
            )
            return answered

        return answer


class PlainRoute(APIRoute):
    """A route whose endpoint takes the `request` and nothing else, and returns a response."""

    def get_route_handler(self) -> Handler:
        """Return what answers a request."""
        endpoint = self.endpoint

        async def answer(request: Request) -> Response:
            answered: Response = await endpoint(request=request)
            return answered

        return answer


def check_values(data: bytes) -> None:
    """Raise for a body that has more values than may be. Costs a look at each byte.

    What is in texts is counted, too: there are fewer commas in them than a body may have.

    Raises:
        HTTPException: A 413.
    """
    if len(data) > MOST_VALUES and sum(map(data.count, (b",", b":", b"[", b"{"))) > MOST_VALUES:
        raise HTTPException(413, f"the body has more than {MOST_VALUES:,} values")


def body_of(model: type[M], data: bytes) -> M:
    """Return what a body says.

    Raises:
        RequestValidationError: For what is no JSON, or not what the model is: as FastAPI says it.
        HTTPException: For what cannot be read, or has too many values.
    """
    check_values(data)
    try:
        value = json.loads(data)
    except json.JSONDecodeError as error:
        wrong = {
            "type": "json_invalid",
            "loc": ("body", error.pos),
            "msg": "JSON decode error",
            "input": {},
            "ctx": {"error": error.msg},
        }
        raise RequestValidationError([wrong]) from error
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, "There was an error parsing the body") from error
    try:
        return model.model_validate(value, from_attributes=True)
    except ValidationError as error:
        found = error.errors(include_url=False)
        raise RequestValidationError(
            [{**each, "loc": ("body", *each["loc"])} for each in found]
        ) from error


def model_of(endpoint: Callable[..., Any]) -> type[BaseModel] | None:
    """Return the model of an endpoint's `body`; None if it has none, or other parameters too."""
    parameters = inspect.signature(endpoint, eval_str=True).parameters
    if "body" not in parameters or not parameters.keys() <= {"body", "request"}:
        return None
    annotation = parameters["body"].annotation
    kind = getattr(annotation, "__origin__", annotation)  # of Annotated: what is annotated
    return kind if inspect.isclass(kind) and issubclass(kind, BaseModel) else None


def add_routes(app: FastAPI, *routers: APIRouter) -> None:
    """Add routes to an application itself: those of an included router are looked at twice.

    Each costs those after it a look: what is asked most is first.
    """
    for router in routers:
        app.router.routes.extend(router.routes)
