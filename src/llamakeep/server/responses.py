"""OpenAI's `/v1/responses`: conversations as items, without a store.

Nothing is kept of a response: clients send the whole conversation each time, and what is kept of
its prompt makes that cheap.
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from llamakeep.server import constraints
from llamakeep.server.answers import collect
from llamakeep.server.asking import openai_defaults, options_for, requests_of, sampling_of, sent_of
from llamakeep.server.context import Context
from llamakeep.server.conversation import Conversations
from llamakeep.server.documented import ERRORS, answers, example
from llamakeep.server.errors import INVALID, ApiError, unsupported
from llamakeep.server.grammars import said_as, shaping_field
from llamakeep.server.openai import new_id
from llamakeep.server.responses_input import messages_of
from llamakeep.server.responses_json import Question, ResponseEncoder
from llamakeep.server.responses_schema import Asked, CountInput, CreateResponse
from llamakeep.server.responses_tools import Toolbox, choice_of, toolbox_of
from llamakeep.server.routing import JsonRoute
from llamakeep.server.shapes import ResponseAnswer
from llamakeep.server.sse import stream
from llamakeep.server.talk import Chat
from llamakeep.server.threads import size_of, soon
from llamakeep.server.wire import answer_json
from llamakeep.tool_calls import Said

_EXAMPLE = "When was the lighthouse built?"
_DEPTH = 7
"""Of a large answer's pieces: down to each token with its probabilities."""
_SEND_ALL = "send the whole conversation in 'input': what is kept of it makes that cheap"
_REFUSED = {
    "previous_response_id": f"is not supported, as no response is stored: {_SEND_ALL}",
    "conversation": f"is not supported, as no conversation is stored: {_SEND_ALL}",
    "background": "is not supported: wait for the answer, or stream it",
    "prompt": "is not supported, as no prompt is stored: send its text in 'instructions'",
    "context_management": "is not supported: send a shorter 'input'",
    "moderation": "is not supported",
}
_STORED = (("", "GET", "DELETE"), ("/input_items", "GET"), ("/cancel", "POST"))
"""How stored responses are asked for."""


async def _answer(
    context: Context, conversations: Conversations, request: Request, body: CreateResponse
) -> Response:
    engine, options = context.engine, context.options
    answer_id, top = new_id("resp_"), None
    if body.includes("message.output_text.logprobs"):
        top = body.top_logprobs or 0
    defaults = options.openai_sampling or openai_defaults(options.sampling)

    def planned() -> tuple[Question, ResponseEncoder]:
        box, chat = chat_of(body)
        plan = conversations.plan(chat)
        sampling = sampling_of(body, context.vocab, defaults)
        question = Question(body, box, plan, sampling, answer_id, engine.model_name, top)
        return question, ResponseEncoder(question, new_id)

    question, encoder = await soon(
        options,
        _size(context, body),
        planned,
        compiles=bool(body.tools) or _said_of(body) is not None,
    )
    plan = question.plan
    requests = requests_of(
        context,
        body,
        [plan.prompt],
        sampling=plan.sampling(question.sampling),
        max_tokens=options.n_predict,
        n_probs=0 if top is None else max(1, top),
        label=answer_id,
        shown=plan.shown,
        sent=await sent_of(context, request),
    )
    receive = request.receive
    if body.stream:
        waits = options_for(body, options)
        return await stream(engine, requests, receive, encoder, waits, plan)
    [answer] = await collect(engine, requests, receive, plan=plan, hear=encoder.hear)
    depth = _DEPTH if answer.size > options.inline_chars else 0
    content = await soon(options, answer.size, lambda: encoder.whole(answer, depth=depth))
    return Response(content, media_type="application/json")


def responses(context: Context, conversations: Conversations) -> APIRouter:
    """Return `/v1/responses`, and the count of a request's tokens."""
    router = APIRouter(route_class=JsonRoute, tags=["OpenAI"])

    async def create(
        request: Request,
        body: Annotated[CreateResponse, example(input=_EXAMPLE, max_output_tokens=64)],
    ) -> Response:
        """Answer a conversation, told as items."""
        _refuse(body)
        return await _answer(context, conversations, request, body)

    async def count(body: Annotated[CountInput, example(input=_EXAMPLE)]) -> Response:
        """Return how many tokens a request's input has, without answering it."""
        _refuse(body)
        prompt = await soon(
            context.options,
            _size(context, body),
            lambda: conversations.prompt(chat_of(body)[1]),
        )
        n_tokens = int(prompt.tokens.size)
        return answer_json({"object": "response.input_tokens", "input_tokens": n_tokens})

    for prefix in ("/v1", ""):
        path = f"{prefix}/responses"
        for suffix, endpoint in (("", create), ("/input_tokens", count)):
            router.add_api_route(
                path + suffix,
                endpoint,
                methods=["POST"],
                responses=ERRORS if suffix else answers(ResponseAnswer, streamed=True),
                response_class=Response,
                include_in_schema=bool(prefix),
            )
        for suffix, *methods in _STORED:
            router.add_api_route(
                f"{path}/{{response_id}}{suffix}",
                absent,
                methods=methods,
                include_in_schema=False,
            )
    return router


async def absent(response_id: str) -> Response:
    """Say that there is no such response: none is stored."""
    raise ApiError(
        f"Response with id '{response_id[:100]}' not found: no response is stored here",
        code=404,
        kind=INVALID,
        param="id",
    )


def chat_of(body: Asked) -> tuple[Toolbox, Chat]:
    """Return the tools and the conversation that a client sends.

    Raises:
        ApiError: For what cannot be meant, with the path to it.
    """
    box = toolbox_of(body.tools or ())
    extra = dict(body.chat_template_kwargs or {})
    if body.reasoning is not None and body.reasoning.effort is not None:
        extra.setdefault("reasoning_effort", body.reasoning.effort)
        if body.reasoning.effort == "none":
            extra.setdefault("enable_thinking", False)
    chat = Chat(
        messages_of(body),
        box.tools,
        choice_of(body.tool_choice, box),
        parallel=body.parallel_tool_calls is not False,
        said=_said_of(body),
        add_generation_prompt=True,
        extra=extra,
    )
    return box, chat


def _said_of(body: Asked) -> Said | None:
    """Return what an answer has to be; None for anything."""
    form = None if body.text is None else body.text.format
    if form is None or form.type == "text":
        return None
    return said_as(form.schema_, "text.format.schema")


def _refuse(body: Asked) -> None:
    """Raise for the first field that asks for something that is not there."""
    constraints.refuse(body.model_extra)
    for name, why in _REFUSED.items():
        if getattr(body, name, None):
            raise unsupported(name, why)
    if name := shaping_field(body):
        raise unsupported(name, "is not of this API: 'text.format' is")
    if body.choices != 1:
        raise unsupported("n", "is not supported: a response is one answer")


def _size(context: Context, body: Asked) -> int:
    """Return about what it costs to read a request, in letters."""
    given: list[Any] = [body.input, body.instructions, body.tools, body.logit_bias]
    given.append(body.chat_template_kwargs)
    return size_of(given, context.options.inline_chars)
