"""What Prometheus is told: names of our own, and those that dashboards of llama-server expect.

Requests are counted when they end (`Metrics.ended`, `Metrics.answered`); what is kept, who waits
and what went is read from the engine's `stats()` when somebody asks. Labels have few values, all of
them ours: never a path, a model, a salt or anything else that a client chose.
"""

from __future__ import annotations

import inspect
import logging
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llamakeep import errors
from llamakeep.engine import Observer, Record
from llamakeep.engine.request import steps_of
from llamakeep.errors import ContextOverflow, EngineClosed, LlamakeepError, QueueFull
from llamakeep.server.errors import GONE
from llamakeep.server.recording import LOST

logger = logging.getLogger("llamakeep")

OTHER = "other"
"""The label of everything that is not known by name."""
TIERS = ("live", "ram", "disk", "shared", "none")
ENDPOINTS = (
    "/v1/chat/completions",
    "/v1/chat/completions/input_tokens",
    "/v1/completions",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/responses/{id}",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/models",
    "/completion",
    "/tokenize",
    "/detokenize",
    "/apply-template",
    "/props",
    "/slots",
    "/slots/{id}",
    "/lora-adapters",
    "/health",
    "/metrics",
    "/cache",
    "/explain",
    "/explain/{id}",
    "/",
    "/dashboard/data",
    "/docs",
    "/openapi.json",
)
REFUSALS = ("queue_full", "too_large", "no_key", "too_long", "closed", "invalid")
STOPS = ("end", "word", "limit", "cancelled", "failed")
ERRORS = tuple(name for name, _ in inspect.getmembers(errors, inspect.isclass))

_ALIASES = {
    "/chat/completions": "/v1/chat/completions",
    "/completions": "/completion",
    "/responses": "/v1/responses",
    "/responses/input_tokens": "/v1/responses/input_tokens",
    "/models": "/v1/models",
    "/v1/health": "/health",
}
_REFUSALS: dict[type[LlamakeepError], str] = {
    ContextOverflow: "too_long",
    EngineClosed: "closed",
    QueueFull: "queue_full",
}
_REFUSED_BY = {401: "no_key", 413: "too_large"}
_SLOT = re.compile(r"/slots/[^/]*")
_EXPLAINED = re.compile(r"/explain/[^/]*")
_RESPONSE = re.compile(r"/v1/responses/[^/]+(/cancel|/input_items)?")
_KIND = re.compile(r"[a-z_]{1,40}")
_MOST_KINDS = 32
_RECENT = 32
_DRAFTS = ("draft_tokens", "accepted_tokens", "drafts")
_FAST_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_SLOW_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


def endpoint_of(path: str) -> str:
    """Return the endpoint that a request's path is of, or `other`."""
    path = _ALIASES.get(path, path)
    if _SLOT.fullmatch(path):
        return "/slots/{id}"
    if _EXPLAINED.fullmatch(path):
        return "/explain/{id}"
    if path not in ENDPOINTS and _RESPONSE.fullmatch(path):
        return "/v1/responses/{id}"
    return path if path in ENDPOINTS else OTHER


def _one_of(value: str, known: Iterable[str]) -> str:
    return value if value in known else OTHER


class Metrics(Observer):
    """The counts of one server, in a registry of its own. From any thread.

    Args:
        stats: The engine's `stats`; None for none.
        settle: Called before figures are shown: tells of what has ended.
    """

    def __init__(
        self,
        stats: Callable[[], Mapping[str, Any]] | None = None,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self.registry = CollectorRegistry()
        self._settle = settle

        def count(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"llamakeep_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(
                f"llamakeep_{name}_seconds", text, labels, buckets=buckets, registry=self.registry
            )

        self._http = count("http_requests", "HTTP requests answered.", "endpoint", "status")
        self._requests = count("requests", "Prompts answered, by why the answer ended.", "stop")
        self._reused = count(
            "reused_tokens", "Prompt tokens not evaluated, by where they came from.", "tier"
        )
        self._evaluated = count(
            "evaluated_tokens", "Prompt tokens evaluated, by where the others came from.", "tier"
        )
        self._generated = count("generated_tokens", "Tokens of answers.")
        self._refusals = count("refusals", "Requests that were not taken.", "reason")
        self._unrecorded = count(
            "unrecorded_requests", "Requests that --record did not write.", "reason"
        )
        self._errors = count("errors", "Requests that failed, by the error's class.", "kind")
        self._restore = histogram("restore", "Finding and restoring a state.", _FAST_S, "tier")
        self._save = histogram("save", "Keeping a state.", _FAST_S)
        self._queue = histogram("queue", "Waiting for a slot.", _SLOW_S)
        self._first = histogram("first_token", "From the request to its first token.", _SLOW_S)
        self._collector = _Collector(stats)
        self.registry.register(self._collector)

    def answered(self, path: str, status: int) -> None:
        """Count an HTTP request by its path and status."""
        kind = f"{status // 100}xx" if 100 <= status < 600 else OTHER
        if status == GONE:
            kind = "gone"
        self._http.labels(endpoint_of(path), kind).inc()
        if status in _REFUSED_BY:
            self._refuse(_REFUSED_BY[status])

    def ended(self, record: Record) -> None:
        """Count a prompt that was answered, or failed."""
        tier = _one_of(record.tier, TIERS)
        self._requests.labels(_one_of(record.stop, STOPS)).inc()
        self._reused.labels(tier).inc(record.reused_tokens)
        self._evaluated.labels(tier).inc(record.evaluated_tokens)
        self._generated.inc(record.generated_tokens)
        if record.error:
            self._errors.labels(_one_of(record.error, ERRORS)).inc()
        if record.restore_ms > 0:
            self._restore.labels(tier).observe(record.restore_ms / 1e3)
        if record.slot is not None and not record.error:
            self._queue.observe(record.queue_ms / 1e3)
        if record.generated_tokens:
            self._first.observe(record.first_token_ms / 1e3)
        self._collector.add(record)

    def unrecorded(self, reason: str) -> None:
        """Count a request that is not in the log of requests."""
        self._unrecorded.labels(_one_of(reason, LOST)).inc()

    def saved(self, ms: float) -> None:
        """Note how long it took to keep a state."""
        self._save.observe(ms / 1e3)

    def refused(self, error: LlamakeepError) -> None:
        """Count a request that was not taken."""
        self._refuse(_REFUSALS.get(type(error), "invalid"))

    def _refuse(self, reason: str) -> None:
        self._refusals.labels(_one_of(reason, REFUSALS)).inc()

    def exposition(self) -> tuple[bytes, str]:
        """Return the text that Prometheus reads, and its content type."""
        self._settle()
        return generate_latest(self.registry), CONTENT_TYPE_PLAIN_0_0_4


class CountRequests:
    """An ASGI middleware that counts requests when their answer begins, or breaks.

    Args:
        app: What answers.
        metrics: What counts.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, and note the status of its answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, begun = scope["path"], False

        async def noting(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start" and not begun:
                begun = True
                self._metrics.answered(path, message["status"])
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except Exception:
            if not begun:
                self._metrics.answered(path, 500)
            raise


class _Collector(Collector):
    """Reads an engine when somebody asks, and sums what llama-server's names stand for."""

    def __init__(self, stats: Callable[[], Mapping[str, Any]] | None) -> None:
        self.stats = stats
        self._lock = threading.Lock()
        self._sums = dict.fromkeys(("prompt_n", "cache_n", "predicted_n", "n_most"), 0)
        self._ms = dict.fromkeys(("prompt", "predicted"), 0.0)
        self._recent: deque[Record] = deque(maxlen=_RECENT)

    def add(self, record: Record) -> None:
        """Add a request to the sums."""
        # What was evaluated again stands in the slot once.
        n_prompt = min(record.reused_tokens + record.evaluated_tokens, record.prompt_tokens)
        held = n_prompt + record.generated_tokens
        with self._lock:
            self._sums["prompt_n"] += record.evaluated_tokens
            self._sums["cache_n"] += record.reused_tokens
            self._sums["predicted_n"] += record.generated_tokens
            self._sums["n_most"] = max(self._sums["n_most"], held)
            self._ms["prompt"] += record.prompt_ms
            self._ms["predicted"] += record.predicted_ms
            self._recent.append(record)

    def describe(self) -> Iterable[Metric]:
        """Return nothing: what there is depends on the engine."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield what there is now."""
        stats: Mapping[str, Any] = {}
        if self.stats is not None:
            try:
                stats = self.stats()
            except Exception:  # who watches is told what is left
                logger.exception("the engine does not tell its figures")
        yield from self._of_llama_server(stats)
        if stats:
            yield from _of_slots(stats)
            yield from _of_tiers(stats)

    def _of_llama_server(self, stats: Mapping[str, Any]) -> Iterator[Metric]:
        with self._lock:
            sums, ms, recent = dict(self._sums), dict(self._ms), list(self._recent)
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens evaluated.", sums["prompt_n"]),
            ("prompt_tokens_cached", "Prompt tokens reused.", sums["cache_n"]),
            ("prompt_seconds", "Time spent on prompts.", ms["prompt"] / 1e3),
            ("tokens_predicted", "Tokens generated.", sums["predicted_n"]),
            ("tokens_predicted_seconds", "Time spent generating.", ms["predicted"] / 1e3),
            ("n_decode", "Batches evaluated.", stats.get("batches", 0)),
            *((f"spec_decode_num_{name}", "0: no drafts are made.", 0) for name in _DRAFTS),
        ):
            yield CounterMetricFamily(f"llamacpp:{name}", text, value)
        for name, text, value in (
            (
                "n_busy_slots_per_decode",
                "Slots that take part in a batch, on average.",
                stats.get("batch_slots", 0) / max(1, stats.get("batches", 0)),
            ),
            ("n_tokens_max", "Most tokens of a prompt and its answer.", sums["n_most"]),
            (
                "prompt_tokens_seconds",
                f"Prompt tokens a second, of the last {_RECENT} requests.",
                _rate((each.evaluated_tokens, each.prompt_ms) for each in recent),
            ),
            (
                "predicted_tokens_seconds",
                f"Tokens generated a second, of the last {_RECENT} requests.",
                _rate((steps_of(each.generated_tokens), each.predicted_ms) for each in recent),
            ),
            ("requests_processing", "Requests in a slot.", stats.get("slots_busy", 0)),
            ("requests_deferred", "Requests that wait for one.", stats.get("waiting", 0)),
        ):
            yield GaugeMetricFamily(f"llamacpp:{name}", text, value)


def _rate(parts: Iterable[tuple[int, float]]) -> float:
    pairs = list(parts)
    ms = sum(each for _, each in pairs)
    return sum(n for n, _ in pairs) / ms * 1e3 if ms > 0 else 0.0


def _of_slots(stats: Mapping[str, Any]) -> Iterator[Metric]:
    busy, n_slots = int(stats.get("slots_busy", 0)), int(stats.get("slots", 0))
    slots = GaugeMetricFamily("llamakeep_slots", "Slots by what they do.", labels=["state"])
    slots.add_metric(["busy"], busy)
    slots.add_metric(["idle"], max(0, n_slots - busy))
    yield slots
    yield GaugeMetricFamily(
        "llamakeep_queue_length", "Requests that wait for a slot.", stats.get("waiting", 0)
    )
    failures = CounterMetricFamily(
        "llamakeep_survived_failures", "What went wrong and cost only time.", labels=["kind"]
    )
    for kind, n in _few(stats.get("failures", {})).items():
        failures.add_metric([kind], n)
    yield failures


def _of_tiers(stats: Mapping[str, Any]) -> Iterator[Metric]:
    used = GaugeMetricFamily("llamakeep_used_bytes", "Bytes of kept states.", labels=["tier"])
    capacity = GaugeMetricFamily("llamakeep_capacity_bytes", "Most bytes.", labels=["tier"])
    families = {
        word: CounterMetricFamily(f"llamakeep_{name}", text, labels=["tier", "reason"])
        for word, name, text in (
            ("evicted", "evictions", "States that went to make room."),
            ("refused", "cache_refusals", "States that were not kept."),
            ("errors", "cache_errors", "What went wrong in a tier."),
            ("dropped", "cache_drops", "States that did not get to the tier in time."),
        )
    }
    below: Mapping[str, Any] = stats.get("below") or {}
    for tier, figures in (("ram", stats), *(below.get("tiers") or {}).items()):
        tier = _one_of(tier, TIERS)
        for family, key in ((used, "used_bytes"), (capacity, "capacity_bytes")):
            if figures.get(key) is not None:
                family.add_metric([tier], figures[key])
        _add_counters(families, tier, figures)
    _add_counters(families, "queue", {k: v for k, v in below.items() if k != "tiers"})
    for family, key in ((used, "queue_bytes"), (capacity, "queue_capacity_bytes")):
        if key in below:
            family.add_metric(["queue"], below[key])
    yield from (used, capacity, *families.values())


def _add_counters(
    families: Mapping[str, CounterMetricFamily], tier: str, figures: Mapping[str, Any]
) -> None:
    """Add the counters that are called like `evicted_segments`, by the words of their names."""
    by_word: dict[str, dict[str, Any]] = {}
    for name, n in figures.items():
        word, _, reason = name.partition("_")
        if word in families and isinstance(n, int) and reason != "bytes":
            by_word.setdefault(word, {})[reason or "all"] = n
    for word, counts in by_word.items():
        for reason, n in _few(counts).items():
            families[word].add_metric([tier, reason], n)


def _few(counts: Mapping[str, int]) -> dict[str, int]:
    """Return counts by kinds that are words, and not more of them than a metric may have."""
    found: MutableMapping[str, int] = {}
    for kind, n in counts.items():
        known = _KIND.fullmatch(kind) and len(found) < _MOST_KINDS
        name = kind if known else OTHER
        found[name] = found.get(name, 0) + n
    return dict(found)
