"""What a server runs: the model, and the application that answers with it."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any, TypeAlias

from llamakeep.explain import RecordLog
from llamakeep.sampling import Sampling
from llamakeep.server.context import NEVER_S, ServerOptions
from llamakeep.server.hosts import is_loopback
from llamakeep.server.logs import RequestLog, tell
from llamakeep.server.metrics import CountRequests, Metrics
from llamakeep.server.recording import Recorder
from llamakeep.server.settings import ServerSettings

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]


@dataclass(frozen=True)
class Service:
    """What was loaded.

    Attributes:
        app: Answers requests: an ASGI application. The lifespan of a Starlette one is run.
        close: Takes no more requests, lets running answers go on for so many seconds, fails the
            others, saves what is kept and frees the model. Called once, from a thread of its own.
        watch: Takes what is to be called, from any thread, should the service end by itself.
        model_name: What clients see.
        n_slots: Requests that are answered at the same time.
        n_ctx: Tokens that all of them together have room for.
        tiers: Where states are kept, the first one first, and the most bytes there; None if that
            is not known.
    """

    app: Callable[[Scope, Receive, Send], Awaitable[None]]
    close: Callable[[float], None]
    watch: Callable[[Callable[[], None]], None] = lambda _on_stop: None
    model_name: str = ""
    n_slots: int = 1
    n_ctx: int = 0
    tiers: Mapping[str, int | None] = field(default_factory=dict)


OnProgress: TypeAlias = Callable[[float], None]
"""Hears how much of the model is loaded, 0 to 1. What it raises ends the loading."""
Load: TypeAlias = Callable[[ServerSettings, OnProgress], Service]
"""Loads the model and makes the application; called in a thread of its own."""


def load_service(settings: ServerSettings, on_progress: OnProgress) -> Service:
    """Load the model and make the application that answers with it. See `Load`.

    Raises:
        ModelError: For a file that is no model, or none that fits.
        InvalidValue: For a value that this model cannot have.
        TemplateError: For a chat template that cannot be read.
        StoreError: For a directory or server that cannot keep states.
    """
    from llamakeep.server.app import create_app
    from llamakeep.server.loading import load_engine, template_of, trained_context

    engine = load_engine(settings, on_progress)
    try:
        trained = trained_context(engine.vocab)
        wanted = min(settings.ctx_size or engine.n_ctx, engine.n_ctx)  # which may be rounded up
        if trained is not None and wanted > trained:
            tell(
                "context",
                f"a context of {wanted:,} tokens is more than the {trained:,} that the model was "
                "trained for: answers beyond those are likely to be poor",
                level=logging.WARNING,
                n_ctx=wanted,
                trained_tokens=trained,
            )
        metrics = Metrics(engine.stats, engine.settle)
        engine.observers.add(metrics)
        if settings.record is not None:
            log = RecordLog(settings.record, clock=time.time, with_texts=settings.explain_texts)
            engine.observers.add(Recorder(engine, log, metrics.unrecorded))
        engine.observers.add(RequestLog(progress=sys.stderr.isatty()))
        template = template_of(settings, engine.vocab)
        app = create_app(
            engine,
            options_of(settings),
            template,
            template_source="" if template is None else template.source,
            exposition=metrics.exposition if settings.metrics else None,
            version=version("llamakeep"),
        )
        app.add_middleware(CountRequests, metrics=metrics)
    except BaseException:
        engine.close()
        raise

    def watch(on_stop: Callable[[], None]) -> None:
        engine.on_stop = on_stop
        if engine.closed:  # before it was watched
            on_stop()

    return Service(
        app,
        engine.close,
        watch,
        engine.model_name,
        engine.n_slots,
        engine.n_ctx,
        capacities_of(engine.stats()),
    )


def options_of(settings: ServerSettings) -> ServerOptions:
    """Return what the HTTP interface is told."""
    from llamakeep.server.asking import openai_defaults

    usual = Sampling()
    return ServerOptions(
        model_path=str(settings.model),
        aliases=settings.aliases,
        adapters=tuple((str(path), scale) for path, scale in settings.adapters),
        tags=tuple(sorted(set(settings.tags))),
        sampling=replace(usual, **settings.sampling),
        openai_sampling=replace(openai_defaults(usual), **settings.sampling),
        build=f"b0-llamakeep-{version('llamakeep')}",
        cache_prompt=settings.cache_prompt,
        template_values=settings.chat_template_kwargs,
        prefill=settings.prefill_assistant,
        thinks={"on": True, "off": False}.get(settings.reasoning),
        thoughts_apart=settings.reasoning_format != "none",
        n_predict=settings.predict,
        api_keys=settings.read_api_keys(),
        cors=settings.cors,
        hosts=hosts_of(settings),
        max_body_bytes=settings.max_body_bytes,
        slot_save_path=settings.slot_save_path,
        slots=settings.slots,
        ping_s=NEVER_S if settings.ping_s is None else settings.ping_s,
        stall_s=settings.timeout_s,
        explain_texts=settings.explain_texts,
    )


def hosts_of(settings: ServerSettings) -> tuple[str, ...] | None:
    """Return the names under which a server may be asked; None for all.

    Where nothing is said, they are looked at if only this machine can reach the server, and nobody
    has a key to show: then a page that is read on this machine is the one stranger that could ask.
    Which names a server has that others reach is not known here.
    """
    named = settings.allowed_hosts
    if not named and (settings.read_api_keys() or not all(map(is_loopback, settings.host))):
        return None
    return (*settings.host, *named)


def capacities_of(stats: Mapping[str, Any]) -> dict[str, int | None]:
    """Return where an engine keeps states, and the most bytes there, from its `stats`."""
    tiers: dict[str, int | None] = {}
    if stats.get("capacity_bytes"):
        tiers["ram"] = stats["capacity_bytes"]
    below = (stats.get("below") or {}).get("tiers") or {}
    return tiers | {tier: figures.get("capacity_bytes") for tier, figures in below.items()}
