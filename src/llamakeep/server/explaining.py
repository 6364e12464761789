"""`/explain`: why the rest of a request's prompt was read again."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import Response
from starlette.concurrency import run_in_threadpool

from llamakeep.server.context import Context
from llamakeep.server.documented import ERRORS
from llamakeep.server.errors import ApiError
from llamakeep.server.wire import answer_json


def router(context: Context) -> APIRouter:
    """Return the endpoints."""
    routes = APIRouter(prefix="/explain", tags=["llamakeep"])
    engine, texts = context.engine, context.options.explain_texts

    async def answer(request_id: str | None) -> Response:
        found = await run_in_threadpool(engine.explain, request_id, texts=texts)
        if found is None:
            what = "no request" if request_id is None else f"no request {request_id[:80]!r}"
            raise ApiError(f"{what} is remembered: the last 100 are", code=404)
        return answer_json(found.to_json())

    @routes.get("", responses=ERRORS)
    async def last() -> Response:
        """Explain the last request that ended."""
        return await answer(None)

    @routes.get("/{request_id}", responses=ERRORS)
    async def one(request_id: str) -> Response:
        """Explain one of the last requests, by its number or its id."""
        return await answer(request_id)

    return routes
