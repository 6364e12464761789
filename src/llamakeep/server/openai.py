"""OpenAI's endpoints: chat completions, completions and the list of models."""

from __future__ import annotations

import secrets
import time
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from llamakeep.server import constraints
from llamakeep.server.answers import collect
from llamakeep.server.asking import (
    openai_defaults,
    options_for,
    requests_of,
    sampling_soon,
    sent_of,
)
from llamakeep.server.context import Context
from llamakeep.server.conversation import Conversations
from llamakeep.server.documented import ERRORS, answers, example
from llamakeep.server.errors import ApiError, unsupported
from llamakeep.server.grammars import said_of
from llamakeep.server.openai_json import ChatEncoder, CompletionEncoder, OpenAIEncoder
from llamakeep.server.openai_tools import chat_of
from llamakeep.server.prompts import Prompt, tokenize_prompts
from llamakeep.server.routing import JsonRoute
from llamakeep.server.schema import ApplyTemplate, ChatCompletion, Completion, OpenAIFields
from llamakeep.server.shapes import ChatAnswer, CompletionAnswer, Models
from llamakeep.server.sse import stream
from llamakeep.server.talk import Plan
from llamakeep.server.threads import size_of, soon
from llamakeep.server.wire import answer_json

_MESSAGES = [{"role": "user", "content": "When was the lighthouse built?"}]
_DEPTH = 6
"""Of a large answer's pieces: down to each token with its probabilities."""
_COMPLETION_TOKENS = 16
"""What `/v1/completions` generates where neither request nor server says: OpenAI's default."""


def new_id(kind: str) -> str:
    """Return an identifier such as `chatcmpl-...`."""
    return kind + secrets.token_hex(16)


async def _answer(
    context: Context,
    request: Request,
    body: OpenAIFields,
    prompts: list[Prompt],
    encoder: OpenAIEncoder,
    *,
    max_tokens: int | None,
    n_probs: int,
    label: str,
    plan: Plan | None = None,
    shaped: bool = True,
) -> Response:
    options = context.options
    defaults = options.openai_sampling or openai_defaults(options.sampling)
    sampling = await sampling_soon(context, body, defaults, shaped=shaped)
    if plan is not None:
        sampling = plan.sampling(sampling)
    requests = requests_of(
        context,
        body,
        prompts,
        sampling=sampling,
        max_tokens=max_tokens,
        n_probs=n_probs,
        label=label,
        shown=frozenset() if plan is None else plan.shown,
        sent=await sent_of(context, request),
    )
    told = None if plan is None or plan.is_plain else plan
    if body.stream:
        waits = options_for(body, options)
        return await stream(context.engine, requests, request.receive, encoder, waits, told)
    answers = await collect(context.engine, requests, request.receive, plan=told)
    size = sum(answer.size for answer in answers)
    depth = _DEPTH if size > options.inline_chars else 0
    return await soon(options, size, lambda: answer_json(encoder.whole(answers), depth=depth))


def completions(context: Context) -> APIRouter:
    """Return `/v1/completions`."""
    router = APIRouter(route_class=JsonRoute, tags=["OpenAI"])
    engine, options = context.engine, context.options

    @router.post(
        "/v1/completions",
        responses=answers(CompletionAnswer, streamed=True),
        response_class=Response,
    )
    async def completion(
        request: Request,
        body: Annotated[Completion, example(prompt="The lighthouse was built in", max_tokens=16)],
    ) -> Response:
        """Continue one prompt, or each of several."""
        constraints.refuse(body.model_extra)
        if body.echo:
            raise unsupported("echo", "is not supported: send the prompt's text yourself")
        if body.suffix:
            raise unsupported("suffix", "is not supported")
        if body.best_of is not None and body.best_of != body.choices:
            raise unsupported("best_of", "is not supported: ask for `n` answers")
        vocab = context.vocab
        tokens = await soon(
            options,
            size_of(body.prompt, options.inline_chars),
            lambda: tokenize_prompts(vocab, body.prompt, most=options.max_prompts),
        )
        answer_id = new_id("cmpl-")
        encoder = CompletionEncoder(
            body, answer_id, engine.model_name, options.build, vocab, body.logprobs
        )
        return await _answer(
            context,
            request,
            body,
            [Prompt(each) for each in tokens],
            encoder,
            max_tokens=_COMPLETION_TOKENS if options.n_predict is None else options.n_predict,
            n_probs=0 if body.logprobs is None else max(1, body.logprobs),
            label=answer_id,
        )

    return router


def chats(context: Context, conversations: Conversations) -> APIRouter:
    """Return `/v1/chat/completions`, and the count of a conversation's tokens."""
    router = APIRouter(route_class=JsonRoute, tags=["OpenAI"])
    engine, options = context.engine, context.options

    async def chat(
        request: Request,
        body: Annotated[ChatCompletion, example(messages=_MESSAGES, max_tokens=64)],
    ) -> Response:
        """Answer a conversation."""
        constraints.refuse(body.model_extra)
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError("'top_logprobs' needs 'logprobs' to be true", param="top_logprobs")
        said = said_of(body)
        plan = await soon(
            options,
            size_of(body.told, options.inline_chars),
            lambda: conversations.plan(chat_of(body, said=said)),
            compiles=said is not None or bool(body.tools),
        )
        top = (body.top_logprobs or 0) if body.logprobs else None
        answer_id = new_id("chatcmpl-")
        encoder = ChatEncoder(body, answer_id, engine.model_name, options.build, context.vocab, top)
        return await _answer(
            context,
            request,
            body,
            [plan.prompt],
            encoder,
            max_tokens=options.n_predict,
            n_probs=0 if top is None else max(1, top),
            label=answer_id,
            plan=plan,
            shaped=said is None,  # else the plan has seen to it, or the prompt is refused
        )

    async def count(
        body: Annotated[ApplyTemplate, example(messages=_MESSAGES)],
    ) -> Response:
        """Return how many tokens a conversation has, without answering it."""
        size = size_of(body.told, options.inline_chars)
        prompt = await soon(options, size, lambda: conversations.prompt(chat_of(body)))
        return answer_json(
            {"object": "response.input_tokens", "input_tokens": int(prompt.tokens.size)}
        )

    for prefix in ("/v1", ""):
        path = f"{prefix}/chat/completions"
        for suffix, endpoint in (("", chat), ("/input_tokens", count)):
            router.add_api_route(
                path + suffix,
                endpoint,
                methods=["POST"],
                responses=ERRORS if suffix else answers(ChatAnswer, streamed=True),
                response_class=Response,
                include_in_schema=bool(prefix),
            )
    return router


def models(context: Context) -> APIRouter:
    """Return `/v1/models`: there is one."""
    router = APIRouter(route_class=JsonRoute, tags=["OpenAI"])
    engine, vocab, options = context.engine, context.vocab, context.options
    started = int(time.time())

    def meta() -> dict[str, Any]:
        return {
            "n_vocab": vocab.n_vocab,
            "n_ctx": engine.n_ctx,
            "architecture": vocab.metadata.get("general.architecture", ""),
            **engine.model_facts,
        }

    def for_ollama() -> dict[str, Any]:
        """Return the model as clients of Ollama look for it; llama-server has it so, too."""
        name = engine.model_name
        unknown = dict.fromkeys(("modified_at", "size", "digest", "description", "parameters"), "")
        details = {
            "parent_model": "",
            "format": "gguf",
            "family": "",
            "families": [""],
            "parameter_size": "",
            "quantization_level": "",
        }
        return unknown | {
            "name": name,
            "model": name,
            "type": "model",
            "tags": [""],
            "capabilities": ["completion"],
            "details": details,
        }

    async def list_models() -> Response:
        """Return the model that answers."""
        model = {
            "id": engine.model_name,
            "object": "model",
            "created": started,
            "owned_by": "llamakeep",
            "aliases": list(options.aliases) or [engine.model_name],
            "tags": list(options.tags),
            "meta": meta(),
        }
        return answer_json({"models": [for_ollama()], "object": "list", "data": [model]})

    for path in ("/v1/models", "/models"):
        router.add_api_route(
            path,
            list_models,
            methods=["GET"],
            responses=answers(Models),
            response_class=Response,
            include_in_schema="v1" in path,
        )
    return router
