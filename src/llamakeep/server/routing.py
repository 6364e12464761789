"""Routes whose requests take few steps: what a request costs before and after its answer is ours.

After some milliseconds of waiting a processor has forgotten a program: each of its steps costs four
times as much as it does in a loop. So it is the number of steps that counts.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class JsonRoute(APIRoute):
    """A route that reads a right body by itself, and leaves all others to FastAPI, errors too.

    For endpoints whose only parameters are `body`, a model, and `request`.
    """

    def get_route_handler(self) -> Handler:
        """Return what answers a request."""
        usual = super().get_route_handler()
        endpoint, model = self.endpoint, model_of(self.endpoint)
        if model is None:
            return usual
        wants_request = "request" in inspect.signature(endpoint).parameters

        async def answer(request: Request) -> Response:
            data = await request.body()
            try:
                body = model.model_validate(json.loads(data))
            except (ValueError, RecursionError):
                return await usual(request)  # which says what is wrong with it
            answered: Response = await (
                endpoint(request=request, body=body) if wants_request else endpoint(body=body)
            )
            return answered

        return answer


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
