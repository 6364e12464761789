"""Endpoints of llama-server for what is not here, and its list of adapters, which cannot change.

What is not here is a 501, as llama-server answers where it was not started with it: not a 404,
which would look like a slip in the address.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import APIRouter
from fastapi.responses import Response

from llamakeep.server.context import Context
from llamakeep.server.documented import ERRORS
from llamakeep.server.errors import ApiError
from llamakeep.server.wire import answer_json

ABSENT = {
    "This server does not support embeddings: it writes answers": (
        "/embedding",
        "/embeddings",
        "/v1/embeddings",
    ),
    "This server does not support reranking: it writes answers": (
        "/rerank",
        "/reranking",
        "/v1/rerank",
        "/v1/reranking",
    ),
    "This server does not support infill: a prompt has no suffix": ("/infill",),
    "This server does not support audio: a prompt is text": (
        "/audio/transcriptions",
        "/v1/audio/transcriptions",
    ),
    "This server does not support control of a running answer: its client may hang up": (
        "/v1/chat/completions/control",
    ),
}
"""Addresses that answer a POST with a 501, by the reason."""
_FIXED = "This server does not support changing LoRA adapters: it has those of its start"


def router(context: Context) -> APIRouter:
    """Return the endpoints."""
    routes = APIRouter(tags=["llama-server"])
    adapters = [
        {"id": index, "path": path, "scale": scale, "task_name": "", "prompt_prefix": ""}
        for index, (path, scale) in enumerate(context.options.adapters)
    ]

    @routes.get("/lora-adapters", responses=ERRORS)
    async def lora_adapters() -> Response:
        """Return the LoRA adapters that the model has."""
        return answer_json(adapters)

    for why, paths in ((_FIXED, ("/lora-adapters",)), *ABSENT.items()):
        for path in paths:
            routes.add_api_route(
                path, _refusing(why), methods=["POST"], responses=ERRORS, include_in_schema=False
            )
    return routes


def _refusing(why: str) -> Callable[[], Awaitable[Response]]:
    async def refuse() -> Response:
        raise ApiError(why, code=501)

    return refuse
