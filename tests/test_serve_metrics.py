"""What Prometheus is told, and that labels stay few whatever clients send."""

from __future__ import annotations

import asyncio
import logging
import random
import string
from dataclasses import replace
from typing import Any

import httpx
import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from llamakeep.engine import Record
from llamakeep.errors import (
    ContextOverflow,
    EngineClosed,
    InvalidValue,
    LlamakeepError,
    QueueFull,
)
from llamakeep.server.metrics import (
    ENDPOINTS,
    ERRORS,
    OTHER,
    CountRequests,
    Metrics,
    endpoint_of,
)

RECORD = Record(
    label="id",
    slot=0,
    prompt_tokens=1256,
    reused_tokens=1200,
    evaluated_tokens=56,
    tier="ram",
    reason="new from token 1200 on",
    generated_tokens=31,
    restore_ms=3.0,
    queue_ms=10.0,
    prompt_ms=400.0,
    predicted_ms=1000.0,
    stop="end",
)
STATS: dict[str, Any] = {
    "slots": 4,
    "slots_busy": 1,
    "waiting": 7,
    "batches": 12,
    "used_bytes": 100,
    "capacity_bytes": 1000,
    "evicted_segments": 3,
    "evicted_checkpoints": 2,
    "evicted_bytes": 99,
    "refused_segments": 1,
    "failures": {"restore": 5},
    "below": {
        "queue_bytes": 10,
        "queue_capacity_bytes": 20,
        "errors": 6,
        "dropped_queue_full": 4,
        "tiers": {
            "disk": {"used_bytes": 5, "capacity_bytes": 50, "evicted": 8, "refused_disk_full": 9},
            "shared": {"errors_timeout": 11, "hits": 3},
        },
    },
}


def samples(metrics: Metrics) -> dict[tuple[str, tuple[str, ...]], float]:
    """Return what a scrape shows: values by name and values of labels, those by their names."""
    text, content_type = metrics.exposition()
    assert content_type.startswith("text/plain; version=0.0.4")
    return {
        (sample.name, tuple(sample.labels[name] for name in sorted(sample.labels))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_a_request_is_counted_once_by_all_that_is_told_of_it() -> None:
    metrics = Metrics()
    metrics.ended(RECORD)
    metrics.ended(replace(RECORD, tier="none", reused_tokens=0, stop="limit"))
    found = samples(metrics)
    assert found["llamakeep_requests_total", ("end",)] == 1
    assert found["llamakeep_requests_total", ("limit",)] == 1
    assert found["llamakeep_reused_tokens_total", ("ram",)] == 1200
    assert found["llamakeep_evaluated_tokens_total", ("ram",)] == 56
    assert found["llamakeep_evaluated_tokens_total", ("none",)] == 56
    assert found["llamakeep_generated_tokens_total", ()] == 62
    assert found["llamakeep_restore_seconds_sum", ("ram",)] == pytest.approx(0.003)
    assert found["llamakeep_queue_seconds_sum", ()] == pytest.approx(0.02)
    assert found["llamakeep_first_token_seconds_sum", ()] == pytest.approx(0.82)
    assert found["llamakeep_first_token_seconds_count", ()] == 2


def test_what_never_began_has_no_times() -> None:
    metrics = Metrics()
    metrics.ended(Record(label="id", queue_ms=9.0, stop="cancelled"))
    found = samples(metrics)
    assert found["llamakeep_queue_seconds_count", ()] == 0
    assert found["llamakeep_first_token_seconds_count", ()] == 0
    assert found["llamakeep_requests_total", ("cancelled",)] == 1


def test_the_names_that_dashboards_of_llama_server_expect() -> None:
    metrics = Metrics(lambda: STATS)
    metrics.ended(RECORD)
    metrics.ended(RECORD)
    found = samples(metrics)
    expected = {
        "prompt_tokens_total": 112,
        "prompt_tokens_cached_total": 2400,
        "prompt_seconds_total": 0.8,
        "tokens_predicted_total": 62,
        "tokens_predicted_seconds_total": 2.0,
        "n_decode_total": 12,
        "n_tokens_max": 1287,
        "prompt_tokens_seconds": 140.0,
        "predicted_tokens_seconds": 30.0,  # the first token of an answer costs no step
        "spec_decode_num_draft_tokens_total": 0,
        "spec_decode_num_accepted_tokens_total": 0,
        "spec_decode_num_drafts_total": 0,
        "requests_processing": 1,
        "requests_deferred": 7,
    }
    ours = {name: found[f"llamacpp:{name}", ()] for name in expected}
    assert ours == pytest.approx(expected)


def test_rates_are_of_the_last_requests() -> None:
    metrics = Metrics()
    metrics.ended(replace(RECORD, evaluated_tokens=1_000_000))
    for _ in range(32):
        metrics.ended(RECORD)
    assert samples(metrics)["llamacpp:prompt_tokens_seconds", ()] == pytest.approx(140.0)


def test_what_is_kept_is_read_when_somebody_asks() -> None:
    stats = dict(STATS)
    assert ("llamakeep_used_bytes", ("ram",)) not in samples(Metrics())
    metrics = Metrics(lambda: stats)
    assert samples(metrics)["llamakeep_used_bytes", ("ram",)] == 100
    stats["used_bytes"] = 200
    assert samples(metrics)["llamakeep_used_bytes", ("ram",)] == 200


def test_tiers_slots_and_what_went() -> None:
    found = samples(Metrics(lambda: STATS))
    assert found["llamakeep_slots", ("busy",)] == 1
    assert found["llamakeep_slots", ("idle",)] == 3
    assert found["llamakeep_queue_length", ()] == 7
    assert found["llamakeep_capacity_bytes", ("ram",)] == 1000
    assert found["llamakeep_used_bytes", ("disk",)] == 5
    assert found["llamakeep_used_bytes", ("queue",)] == 10
    assert ("llamakeep_used_bytes", ("shared",)) not in found
    assert found["llamakeep_evictions_total", ("segments", "ram")] == 3
    assert found["llamakeep_evictions_total", ("checkpoints", "ram")] == 2
    assert found["llamakeep_evictions_total", ("all", "disk")] == 8
    assert ("llamakeep_evictions_total", ("bytes", "ram")) not in found
    assert found["llamakeep_cache_refusals_total", ("disk_full", "disk")] == 9
    assert found["llamakeep_cache_errors_total", ("timeout", "shared")] == 11
    assert found["llamakeep_cache_drops_total", ("queue_full", "queue")] == 4
    assert found["llamakeep_survived_failures_total", ("restore",)] == 5


def test_a_thousand_random_paths_are_one_label() -> None:
    metrics = Metrics()
    choose = random.Random(7)
    letters = string.printable + "/{}ü\N{RIGHT-TO-LEFT OVERRIDE}"
    for _ in range(1000):
        path = "/" + "".join(choose.choices(letters, k=choose.randrange(1, 60)))
        metrics.answered(path, choose.randrange(-100, 2000))
    found = [labels for name, labels in samples(metrics) if name == "llamakeep_http_requests_total"]
    assert {endpoint for endpoint, _ in found} == {OTHER}
    assert {status for _, status in found} == {"1xx", "2xx", "3xx", "4xx", "5xx", "gone", OTHER}


def test_a_thousand_clients_make_no_new_labels() -> None:
    metrics = Metrics(lambda: STATS)
    everything = {"stop": "end", "tier": "ram", "error": "DecodeError", "reason": "r"}
    metrics.ended(replace(RECORD, **everything))
    metrics.ended(replace(RECORD, stop="?", tier="?", error="?"))
    metrics.refused(InvalidValue("?"))
    known = set(samples(metrics))
    for n in range(1000):
        mine = {name: f"{name}-{n}" for name in (*everything, "label")}
        metrics.ended(replace(RECORD, **mine))
        metrics.refused(type(f"Error{n}", (LlamakeepError,), {})("?"))
    assert set(samples(metrics)) == known


def test_counters_of_a_tier_cannot_grow_without_bound() -> None:
    stats = STATS | {f"evicted_{a}{b}": 1 for a in string.ascii_lowercase for b in "abc"}
    stats |= {"failures": {f"kind {n}": 1 for n in range(1000)}}
    found = samples(Metrics(lambda: stats))
    evictions = [labels for name, labels in found if name == "llamakeep_evictions_total"]
    assert len(evictions) <= 2 * (32 + 1)
    assert found["llamakeep_survived_failures_total", (OTHER,)] == 1000
    assert sum(found["llamakeep_evictions_total", labels] for labels in evictions) == 78 + 5 + 8


@pytest.mark.parametrize(
    ("path", "endpoint"),
    [
        ("/v1/chat/completions", "/v1/chat/completions"),
        ("/chat/completions", "/v1/chat/completions"),
        ("/slots/3", "/slots/{id}"),
        ("/slots/x%2f..", "/slots/{id}"),
        ("/slots/3/4", OTHER),
        ("/models", "/v1/models"),
        ("/v1/health", "/health"),
        ("/HEALTH", OTHER),
        ("", OTHER),
    ],
)
def test_which_endpoint_a_path_is_of(path: str, endpoint: str) -> None:
    assert endpoint_of(path) == endpoint
    assert endpoint in (*ENDPOINTS, OTHER)


def test_what_was_evaluated_again_is_held_once() -> None:
    metrics = Metrics()
    metrics.ended(Record(slot=0, prompt_tokens=100, evaluated_tokens=170, generated_tokens=5))
    metrics.ended(Record(slot=0, prompt_tokens=900, evaluated_tokens=60, stop="cancelled"))
    assert samples(metrics)["llamacpp:n_tokens_max", ()] == 105


def test_errors_are_counted_by_class() -> None:
    metrics = Metrics()
    metrics.ended(Record(label="id", error="DecodeError"))
    assert samples(metrics)["llamakeep_errors_total", ("DecodeError",)] == 1
    assert "DecodeError" in ERRORS


def test_refusals_and_saves() -> None:
    metrics = Metrics()
    metrics.refused(QueueFull("full", retry_after_s=1.0))
    metrics.saved(21.0)
    found = samples(metrics)
    assert found["llamakeep_refusals_total", ("queue_full",)] == 1
    assert found["llamakeep_save_seconds_sum", ()] == pytest.approx(0.021)


def test_two_servers_share_nothing_and_the_process_wide_registry_stays_empty() -> None:
    first, second = Metrics(), Metrics()
    first.ended(RECORD)
    assert samples(second)["llamakeep_generated_tokens_total", ()] == 0
    assert not [family.name for family in REGISTRY.collect() if "llama" in family.name]


def test_an_engine_that_does_not_tell_costs_only_its_own_figures(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail() -> dict[str, Any]:
        raise ZeroDivisionError

    metrics = Metrics(fail)
    metrics.ended(RECORD)
    with caplog.at_level(logging.ERROR, "llamakeep"):
        found = samples(metrics)
    assert found["llamakeep_generated_tokens_total", ()] == 31
    assert ("llamakeep_queue_length", ()) not in found
    assert "the engine does not tell its figures" in caplog.text


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (QueueFull("full", retry_after_s=1.0), "queue_full"),
        (ContextOverflow("long"), "too_long"),
        (EngineClosed("closed"), "closed"),
        (InvalidValue("wrong"), "invalid"),
    ],
)
def test_a_request_that_is_not_taken_is_counted_by_its_reason(
    error: LlamakeepError, reason: str
) -> None:
    metrics = Metrics()
    metrics.refused(error)
    assert samples(metrics)["llamakeep_refusals_total", (reason,)] == 1


async def _app(scope: Any, _receive: Any, send: Any) -> None:
    status = int(scope["query_string"])
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def ask(app: Any, path: str) -> int:
    async def run() -> int:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://s") as client:
            return (await client.get(path)).status_code

    return asyncio.run(run())


def test_http_requests_are_counted_by_endpoint_and_status() -> None:
    metrics = Metrics()
    app = CountRequests(_app, metrics)
    assert [ask(app, path) for path in ("/cache?200", "/cache?204", "/x?404")] == [200, 204, 404]
    assert ask(app, "/completion?413") == 413
    found = samples(metrics)
    assert found["llamakeep_http_requests_total", ("/cache", "2xx")] == 2
    assert found["llamakeep_http_requests_total", (OTHER, "4xx")] == 1
    assert found["llamakeep_refusals_total", ("too_large",)] == 1


def test_a_request_that_breaks_the_application_is_a_500() -> None:
    async def broken(*_: object) -> None:
        raise ZeroDivisionError

    metrics = Metrics()
    with pytest.raises(ZeroDivisionError):
        ask(CountRequests(broken, metrics), "/cache")
    assert samples(metrics)["llamakeep_http_requests_total", ("/cache", "5xx")] == 1
