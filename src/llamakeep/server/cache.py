"""`/cache`: what is kept, what it saved, and how to forget it."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response
from starlette.concurrency import run_in_threadpool

from llamakeep.server.context import Context
from llamakeep.server.documented import ERRORS
from llamakeep.server.wire import answer_json


def router(context: Context) -> APIRouter:
    """Return the endpoints."""
    routes = APIRouter(prefix="/cache", tags=["llamakeep"])
    engine = context.engine

    def everything() -> dict[str, Any]:
        return engine.stats() | {
            "entries": engine.entries(),
            "recent": [record.to_json() for record in engine.recent()],
        }

    @routes.get("", responses=ERRORS)
    async def cache() -> Response:
        """Return tiers and budgets, what is kept, and how the last requests were served."""
        return answer_json(await run_in_threadpool(everything))

    @routes.delete("", responses=ERRORS)
    async def clear() -> Response:
        """Forget everything that is kept."""
        return answer_json(await run_in_threadpool(engine.clear_cache))

    return routes
