"""The application: every endpoint of the server over one engine."""

from __future__ import annotations

import time

from fastapi import FastAPI
from fastapi.responses import Response

from llamakeep.chat_template import ChatTemplate
from llamakeep.engine import Engine
from llamakeep.server import (
    absent,
    anthropic,
    cache,
    dashboard,
    errors,
    explaining,
    native,
    openai,
    responses,
    slots,
)
from llamakeep.server.context import Context, Exposition, ServerOptions
from llamakeep.server.conversation import Conversations
from llamakeep.server.documented import ERRORS
from llamakeep.server.errors import ApiError
from llamakeep.server.hosts import Hosts
from llamakeep.server.limits import Limits
from llamakeep.server.origins import Origins
from llamakeep.server.routing import add_routes

_ABOUT = """
Answers with states that are kept: a prompt's beginning that was read once is not read again.

The endpoints of OpenAI's and Anthropic's APIs and of llama-server, with their fields, and `/cache`
of its own. All answers also take `cache_mode` (`on`, `read`, `write`, `off`) and `cache_salt`.
The page at `/` shows what the server does and keeps.
"""


def create_app(
    engine: Engine,
    options: ServerOptions | None = None,
    template: ChatTemplate | None = None,
    *,
    template_source: str = "",
    exposition: Exposition | None = None,
    version: str = "0",
) -> FastAPI:
    """Return the application. It does not own the engine.

    Costs a look at each token of the vocabulary, so that no request has to.

    Args:
        engine: Answers requests; any thread may use it.
        options: What the server was told.
        template: Makes prompts of conversations; None for a model without a chat template.
        template_source: Shown by `/props`.
        exposition: Returns the text of `/metrics` and its content type; None for a 501 there.
        version: Shown by `/docs`.
    """
    options = options or ServerOptions()
    context = Context(engine, options)
    _ = context.vocab.ends  # found here, and not in the event loop
    conversations = Conversations(
        template,
        context.vocab,
        engine.n_ctx,
        values=options.template_values,
        prefill=options.prefill,
        thinks=options.thinks,
        thoughts_apart=options.thoughts_apart,
    )
    started = str(int(time.time()))
    app = FastAPI(title="llamakeep", version=version, description=_ABOUT)
    errors.install(app)
    add_routes(
        app,
        native.completions(context),
        openai.completions(context),
        openai.chats(context, conversations),
        responses.responses(context, conversations),
        anthropic.messages(context, conversations),
        openai.models(context),
        dashboard.router(context),
        native.texts(context, conversations),
        native.about(context, has_metrics=exposition is not None, template=template_source),
        slots.router(context),
        cache.router(context),
        explaining.router(context),
        absent.router(context),
    )

    @app.get("/metrics", tags=["llama-server"], responses=ERRORS, response_class=Response)
    def metrics() -> Response:
        """Return counters and gauges for Prometheus."""
        if exposition is None:
            raise ApiError(
                "This server does not support metrics endpoint. Start it with `--metrics`",
                code=501,
            )
        text, media_type = exposition()
        headers = {"Content-Type": media_type, "Process-Start-Time-Unix": started}
        return Response(text, headers=headers)

    # The last one added comes first: a page's preflight carries no key.
    app.add_middleware(
        Limits,
        max_body_bytes=options.max_body_bytes,
        api_keys=options.api_keys,
        hosts=None if options.hosts is None else Hosts(options.hosts, options.cors),
    )
    if options.cors:
        app.add_middleware(Origins, origins=options.cors)
    return app
