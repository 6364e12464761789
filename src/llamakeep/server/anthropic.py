"""Anthropic's endpoints: messages, and the count of their tokens."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter, Request
from fastapi.responses import Response

from llamakeep.server.answers import collect
from llamakeep.server.anthropic_chat import chat_of, said_of
from llamakeep.server.anthropic_errors import PATH, new_request_id
from llamakeep.server.anthropic_json import MessageEncoder
from llamakeep.server.anthropic_schema import CreateMessage, TokenCount
from llamakeep.server.anthropic_shapes import Counted, MessageAnswer, answered
from llamakeep.server.asking import (
    MOST_SESSION_CHARS,
    openai_defaults,
    requests_of,
    sampling_of,
    sent_of,
)
from llamakeep.server.context import Context
from llamakeep.server.conversation import Conversations
from llamakeep.server.documented import example
from llamakeep.server.routing import JsonRoute
from llamakeep.server.schema import AnswerFields
from llamakeep.server.sse import stream
from llamakeep.server.talk import Plan
from llamakeep.server.threads import soon
from llamakeep.server.wire import answer_json

_ASKED = {
    "model": "any",
    "messages": [{"role": "user", "content": "When was the lighthouse built?"}],
}
_REQUEST_ID = "request-id"


def _fields(body: CreateMessage) -> AnswerFields:
    """Return what Anthropic's API shares with the others, by their names."""
    return AnswerFields(
        stream=body.stream,
        stop=body.stop_sequences,
        max_tokens=body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        cache_mode=body.cache_mode,
        cache_salt=body.cache_salt,
    )


def _session(body: CreateMessage) -> str:
    """Return what a client says that its request belongs to, or ""."""
    said = body.metadata.get("user_id") if isinstance(body.metadata, Mapping) else None
    return said[:MOST_SESSION_CHARS] if isinstance(said, str) else ""


async def _answer(
    context: Context, request: Request, body: CreateMessage, plan: Plan, message_id: str
) -> Response:
    options, fields, request_id = context.options, _fields(body), new_request_id()
    defaults = options.openai_sampling or openai_defaults(options.sampling)
    requests = requests_of(
        context,
        fields,
        [plan.prompt],
        sampling=plan.sampling(sampling_of(fields, context.vocab, defaults)),
        max_tokens=None,
        n_probs=0,
        label=message_id,
        shown=plan.shown,
        sent=await sent_of(context, request),
        session=_session(body),
        alias=request_id,
    )
    omits = body.thinking is not None and body.thinking.display == "omitted"
    encoder = MessageEncoder(message_id, body.model, request_id, omits=omits)
    told = None if plan.is_plain else plan
    response: Response
    if body.stream:
        response = await stream(context.engine, requests, request.receive, encoder, options, told)
    else:
        [answer] = await collect(
            context.engine, requests, request.receive, plan=told, hear=encoder.hear
        )
        response = await soon(options, answer.size, lambda: answer_json(encoder.whole(answer)))
    response.headers[_REQUEST_ID] = request_id
    return response


def messages(context: Context, conversations: Conversations) -> APIRouter:
    """Return `/v1/messages`, and the count of a conversation's tokens."""
    router = APIRouter(route_class=JsonRoute, tags=["Anthropic"])
    options = context.options

    @router.post(PATH, responses=answered(MessageAnswer, streamed=True), response_class=Response)
    async def message(
        request: Request, body: Annotated[CreateMessage, example(max_tokens=64, **_ASKED)]
    ) -> Response:
        """Answer a conversation."""
        plan = await soon(
            options,
            len(await request.body()),
            lambda: conversations.plan(chat_of(body)),
            compiles=bool(body.tools) or said_of(body) is not None,
        )
        return await _answer(context, request, body, plan, "msg_" + secrets.token_hex(12))

    @router.post(PATH + "/count_tokens", responses=answered(Counted), response_class=Response)
    async def count_tokens(
        request: Request, body: Annotated[TokenCount, example(**_ASKED)]
    ) -> Response:
        """Return how many tokens a conversation has, without answering it."""
        size = len(await request.body())
        prompt = await soon(options, size, lambda: conversations.prompt(chat_of(body)))
        response = answer_json({"input_tokens": int(prompt.tokens.size)})
        response.headers[_REQUEST_ID] = new_request_id()
        return response

    return router
