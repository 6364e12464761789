"""An engine whose requests are told of: what is the engine's stays so, and failures are counted."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import FunctionType

import httpx
import pytest

from llamakeep import engine
from llamakeep.engine.request import Begun, Failed, Listener, Request
from llamakeep.runtime.fake import FakeRuntime
from llamakeep.server import ports
from llamakeep.server.app import create_app
from llamakeep.server.metrics import ERRORS, OTHER, Metrics
from llamakeep.server.records import RequestRecord, WatchedEngine
from llamakeep.states import Reuse
from tests.engine_tools import engine_of, runtime_of
from tests.server_tools import TIMEOUT_S, serving

ASKED = [name for name in vars(ports.Engine) if not name.startswith("_")]


@pytest.mark.parametrize("name", ASKED)
def test_a_watched_engine_has_all_that_is_asked_for_as_the_engine_has_it(name: str) -> None:
    watched, asked = vars(WatchedEngine)[name], vars(ports.Engine)[name]
    assert type(watched) is type(asked)
    if isinstance(asked, FunctionType):
        wanted = [(each.name, each.kind) for each in inspect.signature(asked).parameters.values()]
        for one in (watched, vars(engine.Engine)[name]):
            given = inspect.signature(one).parameters.values()
            assert [(each.name, each.kind) for each in given] == wanted


def test_what_a_watched_engine_tells_is_what_the_engine_tells(tmp_path: Path) -> None:
    with engine_of(n_seqs=1, park_idle=False) as made:
        watched = WatchedEngine(made)
        with (
            serving(create_app(watched, ports.ServerOptions(slot_save_path=tmp_path))) as url,
            httpx.Client(base_url=url, timeout=TIMEOUT_S) as client,
        ):
            body = {"prompt": "F" * 100, "n_predict": 2, "cache_salt": "me", "ignore_eos": True}
            assert client.post("/completion", json=body).status_code == 200
            for action, field in (("save", "n_saved"), ("restore", "n_restored")):
                asked = {"filename": "one", "cache_salt": "me"}
                answer = client.post(f"/slots/0?action={action}", json=asked)
                assert answer.json()[field] == 102
            assert client.post("/slots/0?action=erase").json()["n_erased"] == 102
        assert watched.stats() == made.stats()
        assert watched.recent() == made.recent()
        assert watched.entries() == made.entries()
        assert (watched.n_ctx, watched.n_slots, watched.closed) == (2048, 1, False)
        assert (watched.model_name, watched.vocab) == ("fake", made.vocab)
        assert len(watched.slots()) == 1
        assert set(watched.clear_cache()) == {"freed_bytes"}


def errors_of(metrics: Metrics) -> dict[str, float]:
    """Return the errors that were counted, by their labels."""
    return {
        sample.labels["kind"]: sample.value
        for family in metrics.registry.collect()
        for sample in family.samples
        if sample.name == "llamakeep_errors_total"
    }


def test_a_request_that_fails_after_it_began_is_counted_as_failed() -> None:
    runtime = runtime_of("attention", n_seqs=1)
    metrics, told = Metrics(), list[RequestRecord]()
    with engine_of(runtime=runtime) as made:
        watched = WatchedEngine(made, told.append, metrics.finished)
        with (
            serving(create_app(watched)) as url,
            httpx.Client(base_url=url, timeout=TIMEOUT_S) as client,
        ):
            break_down(runtime)
            answer = client.post("/completion", json={"prompt": "Hi", "n_predict": 4})
            assert answer.status_code == 500
    (record,) = told
    assert (record.slot_id, record.stop, record.error) == (0, "failed", "DecodeError")
    assert errors_of(metrics) == {"DecodeError": 1}
    assert metrics.registry.get_sample_value("llamakeep_requests_total", {"stop": "failed"}) == 1
    assert metrics.registry.get_sample_value("llamakeep_queue_seconds_count") == 0


def break_down(runtime: FakeRuntime) -> None:
    """Let a model fail more often than the engine tries again."""
    for after in range(8):
        runtime.fail("evaluate", after=after)


class Fails:
    """An engine whose requests begin, and fail each with an error of its own kind."""

    def __init__(self) -> None:
        self.n_failed = 0

    def submit(self, _request: Request, listener: Listener) -> None:
        self.n_failed += 1
        kind = type(f"Error{self.n_failed}", (Exception,), {})
        reuse = Reuse(0, 1, "none", "new")
        listener(Begun(0, reuse))
        listener(Failed(kind()))


def test_however_requests_fail_there_are_few_labels() -> None:
    metrics = Metrics()
    watched = WatchedEngine(Fails(), metrics.finished)  # type: ignore[arg-type]
    for _ in range(300):
        watched.submit(Request.of([1]), lambda _update: None)
    assert errors_of(metrics) == {OTHER: 300}
    assert len(ERRORS) < 64
