"""llama-server's own endpoints: completions, tokens, templates, and what the server is."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from llamakeep.errors import EngineClosed
from llamakeep.server import constraints
from llamakeep.server.answers import collect
from llamakeep.server.asking import options_for, requests_of, sampling_soon, sent_of
from llamakeep.server.context import Context
from llamakeep.server.conversation import Conversations
from llamakeep.server.documented import ERRORS, answers, example
from llamakeep.server.errors import ApiError
from llamakeep.server.native_json import NativeEncoder, sampling_json
from llamakeep.server.openai import new_id
from llamakeep.server.openai_tools import chat_of
from llamakeep.server.prompts import Prompt, starts_of, tokenize_mixed, tokenize_prompts
from llamakeep.server.routing import JsonRoute
from llamakeep.server.schema import (
    ApplyTemplate,
    Detokenize,
    NativeCompletion,
    Tokenize,
)
from llamakeep.server.shapes import NativeAnswer
from llamakeep.server.sse import stream
from llamakeep.server.threads import size_of, size_of_answer, soon
from llamakeep.server.wire import answer_json
from llamakeep.tokens import IntArray, as_tokens

_DEPTH = 4
"""Of a large answer's pieces: down to each token with its probabilities."""


def _prompts(context: Context, body: NativeCompletion) -> list[Prompt]:
    vocab, n_ctx = context.vocab, context.engine.n_ctx

    def made(tokens: IntArray) -> Prompt:
        if tokens.size > n_ctx:  # it is refused, whatever is in it
            return Prompt(tokens)
        return Prompt(tokens, starts_of(vocab, tokens, body.message_delimiters or ()))

    prompts = tokenize_prompts(vocab, body.prompt, most=context.options.max_prompts)
    return [made(tokens) for tokens in prompts]


def completions(context: Context) -> APIRouter:
    """Return `/completion` and `/completions`."""
    router = APIRouter(route_class=JsonRoute, tags=["llama-server"])
    engine, options = context.engine, context.options

    async def completion(
        request: Request,
        body: Annotated[
            NativeCompletion, example(prompt="The lighthouse was built in", n_predict=16)
        ],
    ) -> Response:
        """Continue one prompt, or each of several."""
        constraints.refuse(body.model_extra)
        n_probs = body.n_probs if body.n_probs is not None else body.logprobs or 0
        sampling = await sampling_soon(context, body, options.sampling)
        size = size_of(body.prompt, options.inline_chars)
        prompts = await soon(options, size, lambda: _prompts(context, body))
        requests = requests_of(
            context,
            body,
            prompts,
            sampling=sampling,
            max_tokens=options.n_predict,
            n_probs=n_probs,
            label=new_id("completion-"),
            sent=await sent_of(context, request),
        )
        encoder = NativeEncoder(body, context.vocab, engine.model_name)
        if body.stream:
            told = options_for(body, options)
            return await stream(engine, requests, request.receive, encoder, told)
        answers = await collect(engine, requests, request.receive, partial(encoder.begin, requests))
        size = sum(each.size for each in answers)

        def write() -> Response:
            written = [encoder.whole(each) for each in answers]
            depth = _DEPTH if size > options.inline_chars else 0
            return answer_json(written[0] if len(written) == 1 else written, depth=depth)

        return await soon(options, size, write)

    for path in ("/completion", "/completions"):
        router.add_api_route(
            path,
            completion,
            methods=["POST"],
            responses=answers(NativeAnswer | list[NativeAnswer], streamed=True),
            response_class=Response,
            include_in_schema=path == "/completion",
        )
    return router


def texts(context: Context, conversations: Conversations) -> APIRouter:
    """Return `/tokenize`, `/detokenize` and `/apply-template`."""
    router = APIRouter(route_class=JsonRoute, tags=["llama-server"])
    vocab, options = context.vocab, context.options

    @router.post("/tokenize", responses=ERRORS)
    async def tokenize(
        body: Annotated[Tokenize, example(content="Hello world", with_pieces=True)],
    ) -> Response:
        """Return the tokens of a text."""

        def tokens_of() -> list[Any]:
            tokens = tokenize_mixed(
                vocab,
                content,
                "content",
                add_special=bool(body.add_special),
                parse_special=body.parse_special is not False,
            )
            ids = [int(token) for token in tokens]
            return (
                [{"id": each, "piece": _piece(each)} for each in ids] if body.with_pieces else ids
            )

        def _piece(token: int) -> str | list[int]:
            piece = vocab.piece(token, special=True)
            try:
                return piece.decode()
            except UnicodeDecodeError:
                return list(piece)

        content = "" if body.content is None else body.content
        size = size_of(content, options.inline_chars)
        return await soon(options, size, lambda: answer_json({"tokens": tokens_of()}))

    @router.post("/detokenize", responses=ERRORS)
    async def detokenize(body: Annotated[Detokenize, example(tokens=[72, 105])]) -> Response:
        """Return the text of tokens."""
        given = [] if body.tokens is None else body.tokens
        if not isinstance(given, list):
            raise ApiError("'tokens' must be a list of tokens", param="tokens")

        def write() -> Response:  # and look at each of millions: so it is not done before
            tokens = as_tokens(given, n_vocab=vocab.n_vocab)
            return answer_json({"content": vocab.text(tokens) if tokens.size else ""})

        return await soon(options, size_of_answer(len(given), 0, 0), write)

    @router.post("/apply-template", responses=ERRORS)
    async def apply_template(
        body: Annotated[ApplyTemplate, example(messages=[{"role": "user", "content": "Hello"}])],
    ) -> Response:
        """Return the prompt that a conversation becomes."""
        size = size_of(body.told, options.inline_chars)
        text = await soon(options, size, lambda: conversations.text(chat_of(body)))
        return answer_json({"prompt": text})

    return router


def about(context: Context, *, has_metrics: bool, template: str) -> APIRouter:
    """Return `/props` and `/health`."""
    router = APIRouter(route_class=JsonRoute, tags=["llama-server"])
    engine, options, vocab = context.engine, context.options, context.vocab

    def special(token: int | None) -> str:
        return "" if token is None else vocab.piece(token, special=True).decode("utf-8", "replace")

    @router.get("/props")
    async def props() -> Response:
        """Return what the server is and what it does where a request does not say."""
        return answer_json(
            {
                "default_generation_settings": {
                    "params": sampling_json(
                        options.sampling, options.n_predict, stream=True, timings_per_token=False
                    ),
                    "n_ctx": engine.n_ctx,
                },
                "total_slots": engine.n_slots,
                "model_alias": engine.model_name,
                "model_ftype": engine.model_facts.get("ftype", ""),
                "model_path": options.model_path,
                "modalities": {"vision": False, "audio": False, "video": False},
                "endpoint_slots": options.slots,
                "endpoint_props": False,
                "endpoint_metrics": has_metrics,
                "ui": False,
                "ui_settings": {},
                "chat_template": template,
                "chat_template_caps": {},
                "bos_token": special(vocab.bos),
                "eos_token": special(vocab.eos),
                "build_info": options.build,
                "is_sleeping": False,
                "cors_proxy_enabled": False,
            }
        )

    @router.post("/props", responses=ERRORS)
    async def change_props() -> Response:
        """Refuse: a running server cannot be told otherwise."""
        raise ApiError("This server does not support changing global properties.", code=501)

    async def health() -> Response:
        """Say whether requests are answered."""
        if engine.closed:
            raise EngineClosed("the engine has stopped")
        return answer_json({"status": "ok"})

    for path in ("/health", "/v1/health"):
        router.add_api_route(path, health, methods=["GET"], responses=ERRORS)
        router.add_api_route(path, health, methods=["HEAD"], include_in_schema=False)
    return router
