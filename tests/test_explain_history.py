"""Why a request was read again, told by an engine that has seen those before it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import llamakeep
from llamakeep.engine import Engine, Record, Request
from llamakeep.errors import DecodeError
from llamakeep.explain import Explanation, History, Kind, RecordLog, Served, explain_logged
from llamakeep.modes import Mode
from llamakeep.runtime.fake import FakeRuntime
from llamakeep.server.metrics import Metrics
from llamakeep.server.recording import Recorder
from llamakeep.states import Reuse
from llamakeep.tokens import IntArray, as_tokens, common_prefix
from tests.engine_tools import ask, engine_of, join, span
from tests.server_tools import served as serving_fake

FAMILIES = ["attention", "swa", "recurrent", "hybrid", "hybrid-swa"]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_request_shares_and_with_which_one(family: str) -> None:
    with engine_of(family, n_seqs=2) as engine:
        first = ask(engine, span(200, 1), 4, label="first")
        first.wait()
        turn = join(span(200, 1), first.tokens, span(30, 2))
        ask(engine, turn, 4, label="second").wait()
        ask(engine, span(60, 3), 2, label="other").wait()
        found = engine.explain("second")
        assert found is not None
        assert (found.kind, found.token_index) == (Kind.NEW_TEXT, 204)
        assert (found.request_id, found.before_id) == ("second", "first")
        assert found.reused_tokens is not None
        assert found.reused_tokens + (found.evaluated_tokens or 0) == turn.size
        last = engine.explain()
        assert last is not None
        assert (last.request_id, last.kind) == ("other", Kind.FIRST_SEEN)
        assert engine.explain("nobody") is None


def text_tokens(engine: Engine, text: str) -> IntArray:
    return engine.vocab.tokenize(text, add_special=False, parse_special=True)


TIMED = "It is 10:31:07 on 2026-03-01. You read a file before you edit it, and you are brief."
KEYS = '{"command": "make", "timeout": 105, "path": "/src/lighthouse"}'
TURNS = "<|im_end|>\n<|im_start|>user\nHow old?<|im_end|>\n<|im_start|>assistant\n"
TOOLS = "read_file: reads a file.\nrun: runs a command.\nsearch: finds a text in files.\n"


@pytest.mark.parametrize("family", ["attention", "hybrid"])
@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        (TIMED, TIMED.replace("31:07", "32:55"), Kind.DATE),
        (
            KEYS,
            '{"timeout": 105, "command": "make", "path": "/src/lighthouse"}',
            Kind.ORDER,
        ),
        (TOOLS, "".join(sorted(TOOLS.splitlines(keepends=True), reverse=True)), Kind.ORDER),
        (KEYS, KEYS.replace("105", "105.0"), Kind.NUMBER_FORMAT),
        (
            f"{TURNS}<think>The light must be old.</think>It was built in 1871, a plaque says.",
            f"{TURNS}It was built in 1871, a plaque says.",
            Kind.REASONING_REMOVED,
        ),
    ],
    ids=["timestamp", "keys", "tools", "number", "thinking"],
)
def test_fault_63_clients_change_early_tokens(
    family: str, before: str, after: str, kind: Kind
) -> None:
    lead = "<|im_start|>system\nYou are careful.\n"
    rest = " Go on.<|im_end|>\n<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n"
    with engine_of(family, n_seqs=1, keeping={"align": 1}, align=1) as engine:
        old, new = (text_tokens(engine, lead + text + rest) for text in (before, after))
        ask(engine, old, 2, label="before").wait()
        ask(engine, new, 2, label="after").wait()
        found = engine.explain("after")
        assert found is not None
        at = common_prefix(old, new)
        shared = engine.vocab.text(new[:at])
        assert (found.kind, found.token_index, found.token_range) == (kind, at, 1)
        assert (found.request_id, found.before_id) == ("after", "before")
        assert found.reused_tokens is not None
        assert found.reused_tokens <= at
        assert found.around.shared
        assert shared.endswith(found.around.shared)
        assert engine.vocab.text(old[at:]).startswith(found.around.before)
        assert engine.vocab.text(new[at:]).startswith(found.around.after)
        assert found.around.before[:1] != found.around.after[:1]


def test_fault_64_the_same_text_in_other_tokens_is_reused_to_where_they_part() -> None:
    with engine_of(n_seqs=1, keeping={"align": 1}, align=1) as engine:
        lead, rest = span(96, 1), span(40, 2)
        [whole], parts = [700], text_tokens(engine, "<700>")
        assert engine.vocab.text([whole]) == engine.vocab.text(parts)
        ask(engine, join(lead, parts, rest), 1, label="before").wait()
        ask(engine, join(lead, [whole], rest), 1, label="after").wait()
        found = engine.explain("after")
        assert found is not None
        assert (found.kind, found.token_index) == (Kind.TOKENIZATION, 96)
        assert found.reused_tokens == 96
        assert found.evaluated_tokens == 41
        assert found.reason == "the text at token 96 is the same, in other tokens"
        assert found.around.before.startswith("<700>")
        assert found.around.after.startswith("<700>")


def test_what_was_evicted_is_told_with_the_policy_and_the_price() -> None:
    with engine_of(n_seqs=1, capacity_bytes=12_000) as engine:
        ask(engine, span(300, 1), 1, label="first").wait()
        for seed in range(2, 12):
            ask(engine, span(300, seed), 1).wait()
        ask(engine, join(span(300, 1), span(10, 99)), 1, label="again").wait()
        assert engine.stats()["evicted_segments"] > 0
        found = engine.explain("again")
        assert found is not None
        assert (found.kind, found.policy) == (Kind.EVICTED, "hazard")
        assert found.lost_tokens == 300 - (found.reused_tokens or 0)
        assert "--cache-ram" in found.advice


def test_without_a_cache_nothing_was_evicted() -> None:
    with engine_of(n_seqs=1, capacity_bytes=0) as engine:
        ask(engine, span(300, 1), 1).wait()
        ask(engine, span(300, 2), 1).wait()
        ask(engine, span(300, 1), 1, label="again").wait()
        found = engine.explain("again")
        assert found is not None
        assert found.kind is not Kind.EVICTED


def test_what_was_cancelled_while_it_waited_was_never_evicted() -> None:
    with engine_of(n_seqs=1, capacity_bytes=12_000) as engine:
        busy = ask(engine, span(50, 9), 400)
        assert busy.begun.wait(60)
        waits = ask(engine, span(300, 1), 1, label="waits")
        for each in (waits, busy):
            assert each.ticket is not None
            each.ticket.cancel()
            each.wait()
        for seed in range(2, 12):
            ask(engine, span(300, seed), 1).wait()
        assert engine.stats()["evicted_segments"] > 0
        ask(engine, span(300, 1), 1, label="again").wait()
        waited, again = engine.explain("waits"), engine.explain("again")
        assert waited is not None
        assert again is not None
        assert (waited.kind, again.kind) == (Kind.UNKNOWN, Kind.FIRST_SEEN)
        assert "before it began" in waited.reason


def test_of_what_failed_midway_only_its_beginning_was_evicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with engine_of(n_seqs=1, capacity_bytes=12_000) as engine:
        usual, fails = FakeRuntime.decode, [False]

        def decode(runtime: FakeRuntime, parts: Any) -> Any:
            if fails[0] and runtime.positions(0).n_tokens >= 128:
                raise DecodeError("no more")
            return usual(runtime, parts)

        monkeypatch.setattr(FakeRuntime, "decode", decode)
        fails[0] = True
        with pytest.raises(DecodeError):
            ask(engine, span(300, 1), 1, label="fails").wait()
        fails[0] = False
        served = engine.history.find("fails")
        assert served is not None
        assert served.held.size <= 128
        for seed in range(2, 12):
            ask(engine, span(300, seed), 1).wait()
        ask(engine, span(300, 1), 1, label="again").wait()
        found = engine.explain("again")
        assert found is not None
        assert found.kind in (Kind.EVICTED, Kind.NEW_TEXT)
        if found.kind is Kind.EVICTED:
            assert found.lost_tokens is not None
            assert found.lost_tokens + (found.reused_tokens or 0) <= 128


@pytest.mark.parametrize("cache", ["tree", "upstream"])
def test_what_is_refused_as_too_large_was_never_evicted(cache: str) -> None:
    with engine_of(n_seqs=1, capacity_bytes=2_000, cache=cache) as engine:
        ask(engine, span(40, 7), 1).wait()
        ask(engine, span(900, 1), 1, label="large").wait()
        for seed in range(2, 8):
            ask(engine, span(40, seed), 1).wait()
        stats = engine.stats()
        assert stats.get("refused_segments", 0) + stats.get("refused", 0) > 0
        assert stats.get("evicted_segments", 0) + stats.get("evicted", 0) > 0
        ask(engine, span(900, 1), 1, label="again").wait()
        found = engine.explain("again")
        assert found is not None
        assert found.kind is not Kind.EVICTED or (found.lost_tokens or 0) < 200


def test_whole_prompts_that_were_evicted_are_told() -> None:
    with engine_of(n_seqs=1, capacity_bytes=12_000, cache="upstream") as engine:
        ask(engine, span(300, 1), 1, label="first").wait()
        for seed in range(2, 12):
            ask(engine, span(300, seed), 1).wait()
        ask(engine, join(span(300, 1), span(10, 99)), 1, label="again").wait()
        assert engine.stats()["evicted"] > 0
        found = engine.explain("again")
        assert found is not None
        assert found.kind is Kind.EVICTED


@pytest.mark.parametrize(
    ("family", "capacity_bytes"), [("recurrent", 3_000), ("hybrid", 20_000), ("swa", 20_000)]
)
def test_checkpoints_that_were_evicted_are_told(family: str, capacity_bytes: int) -> None:
    with engine_of(family, n_seqs=1, capacity_bytes=capacity_bytes) as engine:
        ask(engine, span(300, 1), 1, label="first").wait()
        for seed in range(2, 30):
            ask(engine, span(300, seed), 1).wait()
        ask(engine, join(span(300, 1), span(10, 99)), 1, label="again").wait()
        stats = engine.stats()
        assert stats["evicted_checkpoints"] + stats["evicted_segments"] > 0
        found = engine.explain("again")
        assert found is not None
        assert found.kind is Kind.EVICTED
        assert found.lost_tokens is not None
        assert 200 < found.lost_tokens <= 300


def test_a_request_that_may_not_read_is_not_told_that_it_is_new() -> None:
    with engine_of(n_seqs=1) as engine:
        ask(engine, span(100, 1), 1).wait()
        for mode in (Mode.OFF, Mode.WRITE):
            ask(engine, join(span(100, 1), span(9, 2)), 1, mode=mode, label=mode.value).wait()
            found = engine.explain(mode.value)
            assert found is not None
            assert found.kind is Kind.UNKNOWN
            assert "mode" in found.reason


@pytest.mark.parametrize("family", ["recurrent", "hybrid"])
def test_where_a_checkpoint_is_missing_the_nearest_is_told(family: str) -> None:
    with engine_of(family, n_seqs=1) as engine:
        ask(engine, span(700, 1), 1, label="first").wait()
        ask(engine, join(span(700, 1)[:333], span(50, 2)), 1, label="edit").wait()
        found = engine.explain("edit")
        assert found is not None
        assert found.kind is Kind.NO_CHECKPOINT
        assert found.token_index == 333
        assert found.nearest_checkpoint == (found.reused_tokens or None)


def test_another_salt_is_told() -> None:
    with engine_of(n_seqs=2) as engine:
        ask(engine, span(100, 1), 1, salt="a", label="tenant a").wait()
        ask(engine, span(100, 1), 1, salt="b", label="same").wait()
        ask(engine, span(100, 2), 1, salt="b", label="else").wait()
        same, other = engine.explain("same"), engine.explain("else")
        assert same is not None
        assert other is not None
        assert (same.kind, other.kind) == (Kind.SALT, Kind.FIRST_SEEN)
        assert (same.part, same.before_id, other.before_id) == ("cache_salt", "tenant a", "")


@pytest.mark.parametrize("mode", [Mode.READ, Mode.OFF])
def test_what_may_leave_nothing_behind_is_not_remembered(mode: Mode) -> None:
    with engine_of(n_seqs=1) as engine:
        ask(engine, span(100, 1), 1, mode=mode, label="private").wait()
        served = engine.history.find("private")
        assert served is not None
        assert served.tokens.size == 0
        assert served.n_prompt == 100
        ask(engine, span(100, 1), 1, label="public").wait()
        found = engine.explain("public")
        assert found is not None
        assert found.kind is Kind.FIRST_SEEN
        assert engine.explain("private") is not None


def test_who_forgets_what_is_kept_forgets_this_too() -> None:
    with engine_of() as engine:
        ask(engine, span(100, 1), 1).wait()
        assert engine.explain() is not None
        engine.clear_cache()
        assert engine.explain() is None


def made(number: int, n_tokens: int) -> Served:
    tokens = as_tokens(range(number, number + n_tokens))
    return Served(number, "", b"n", tokens, n_tokens, Reuse(0, n_tokens, "none", ""))


def test_a_history_is_bounded_in_tokens_and_requests() -> None:
    history = History(capacity_bytes=4000)
    for number in range(1, 30):
        history.add(made(number, 90))
    known = [number for number in range(1, 30) if history.find(number) is not None]
    assert known == list(range(19, 30))
    history.add(made(30, 2000))
    assert history.find() is None, "what is larger than all of it is not held"
    for number in range(40, 400):
        history.add(made(number, 1))
    assert [number for number in (299, 300, 399) if history.find(number)] == [300, 399]


# -- over HTTP -------------------------------------------------------------------------------------
TALK = "You are helpful. Today is 2026-03-01, a Sunday. Be brief, and answer in English only. "
SECRET = "what nobody else may read"


@pytest.mark.parametrize("texts", [False, True])
def test_a_server_explains_and_quotes_only_where_it_may(texts: bool) -> None:
    with serving_fake(explain_texts=texts) as server:
        for text in (TALK, TALK.replace("03-01", "03-02")):
            body = {"messages": [{"role": "system", "content": text + SECRET}], "max_tokens": 2}
            answer = server.post("/v1/chat/completions", body).json()
        response = server.client.get("/explain")
        found = Explanation.from_json(response.json())
        assert found.kind is Kind.DATE
        assert found.request_id == answer["id"]
        assert (SECRET[:12] in response.text or "2026-03-0" in response.text) is texts
        one = server.client.get(f"/explain/{answer['id']}")
        assert one.json() == response.json()
        missing = server.client.get("/explain/nobody")
        assert missing.status_code == 404
        assert "nobody" in missing.json()["error"]["message"]


@pytest.mark.parametrize("texts", [False, True])
def test_what_is_recorded_can_be_explained_and_says_no_more_than_it_may(
    texts: bool, tmp_path: Path
) -> None:
    path = tmp_path / "requests.jsonl"
    log = RecordLog(path, clock=lambda: 7.0, with_texts=texts)
    with engine_of(n_seqs=1) as engine:
        engine.observers.add(Recorder(engine, log))
        first = ask(engine, span(200, 1), 4, label="first", session="session-of-mine")
        first.wait()
        ask(engine, join(span(200, 1)[:150], span(90, 2)), 4, label="second").wait()
        ask(engine, span(50, 3), 1, label="private", mode=Mode.OFF).wait()
        engine.settle()
        live = engine.explain("second")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["id"] for line in lines] == ["first", "second"]
    assert lines[1]["reused_tokens"] == 144
    assert [("tokens" in line, "text" in line) for line in lines] == [(texts, texts)] * 2
    assert ("session-of-mine" in json.dumps(lines[0])) is texts
    assert live is not None
    assert live.token_index == 150
    found = explain_logged(path)
    assert found.request_id == "second"
    assert found.before_id == "first"
    assert found.token_index is not None
    assert found.token_range is not None
    assert found.token_index <= 150 < found.token_index + found.token_range


class Broken(RecordLog):
    """A log on a full disk."""

    def _write(self, data: bytes) -> None:
        from llamakeep.errors import StoreError

        raise StoreError("cannot write: No space left on device")


@pytest.mark.parametrize("texts", [False, True])
def test_salts_are_recorded_for_who_may_read_all(texts: bool, tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    log = RecordLog(path, clock=lambda: 7.0, with_texts=texts)
    with engine_of(n_seqs=1) as engine:
        engine.observers.add(Recorder(engine, log))
        ask(engine, span(200, 1), 1, salt="a").wait()
        ask(engine, span(200, 1), 1, salt="b").wait()
        engine.settle()
    assert explain_logged(path).kind is (Kind.SALT if texts else Kind.FIRST_SEEN)


def counting(log: RecordLog, engine: Engine) -> tuple[Recorder, Metrics]:
    metrics = Metrics(engine.stats, engine.settle)
    recorder = Recorder(engine, log, metrics.unrecorded)
    engine.observers.add(recorder)
    return recorder, metrics


def test_a_log_that_is_full_ends_no_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with engine_of() as engine:
        recorder, metrics = counting(Broken(tmp_path / "x", clock=lambda: 0.0), engine)
        for _ in range(3):
            ask(engine, span(20, 1), 1).wait()
        engine.settle()
        assert recorder.n_lost == 3
        shown = metrics.exposition()[0].decode()
        assert 'llamakeep_unrecorded_requests_total{reason="failed"} 3.0' in shown
    assert caplog.text.count("a request is not recorded, and others may not be") == 1
    assert "No space left" in caplog.text


def test_what_may_leave_nothing_behind_is_not_recorded_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "requests.jsonl"
    with engine_of() as engine, caplog.at_level("INFO", logger="llamakeep"):
        recorder, metrics = counting(RecordLog(path, clock=lambda: 0.0), engine)
        for mode in Mode:
            ask(engine, span(20, 1), 1, mode=mode, label=mode.value).wait()
        engine.settle()
        assert (recorder.n_private, recorder.n_lost) == (2, 0)
        shown = metrics.exposition()[0].decode()
        assert 'llamakeep_unrecorded_requests_total{reason="private"} 2.0' in shown
    lines = [json.loads(line)["id"] for line in path.read_text().splitlines()]
    assert lines == ["on", "write"]
    assert caplog.text.count("are not recorded") == 1


def test_what_the_history_has_forgotten_is_recorded_all_the_same(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    with engine_of() as engine:
        recorder, _ = counting(RecordLog(path, clock=lambda: 0.0), engine)
        engine.history = History(capacity_bytes=200)
        ask(engine, span(200, 1), 1, label="long").wait()
        engine.settle()
        assert engine.history.find("long") is None
        assert recorder.n_lost == 0
    (line,) = [json.loads(line) for line in path.read_text().splitlines()]
    assert (line["id"], line["input_length"], line["reused_tokens"]) == ("long", 200, 0)


@pytest.mark.parametrize("texts", [False, True])
def test_a_session_that_is_no_text_is_recorded(tmp_path: Path, texts: bool) -> None:
    path = tmp_path / "requests.jsonl"
    with engine_of() as engine:
        log = RecordLog(path, clock=lambda: 0.0, with_texts=texts)
        recorder, _ = counting(log, engine)
        ask(engine, span(20, 1), 1, session="\ud800").wait()
        engine.settle()
        assert recorder.n_lost == 0
    (line,) = path.read_text().splitlines()
    session = json.loads(line)["session_id"]
    assert (session == "\ud800") is texts
    assert session


def test_a_request_knows_its_session_and_its_body() -> None:
    with serving_fake(explain_texts=True) as server:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "user": "me"}
        server.post("/v1/chat/completions", body)
        served = server.engine.history.find()
        assert served is not None
        assert served.session == "me"
        assert json.loads(served.body or b"") == body


def test_records_and_history_agree() -> None:
    with engine_of() as engine:
        ask(engine, span(40, 1), 1, label="a").wait()
        (record,) = engine.recent()
        served = engine.history.find(record.id)
        assert isinstance(record, Record)
        assert served is not None
        assert served.label == record.label
        assert served.reuse is not None
        assert served.reuse.reason == record.reason
        assert isinstance(Request.of([1]).body, type(None))


# -- a Llama with a keeper -------------------------------------------------------------------------
def test_a_keeper_explains_its_requests(family: str, tiny_llama: Callable[..., Any]) -> None:
    llm = tiny_llama(family)
    keeper = llamakeep.attach(llm)
    try:
        prompt = [token + 300 for token in range(120)]
        answer = list(islice(llm.generate(prompt, top_k=1), 5))
        for turn in ([*prompt, *answer, *range(700, 740)], list(range(900, 950))):
            assert len(list(islice(llm.generate(turn, top_k=1), 2))) == 2
        first, second, third = (keeper.explain(number) for number in (1, 2, 3))
        assert first is not None
        assert second is not None
        assert third == keeper.explain()
        assert third is not None
        assert [each.kind for each in (first, second, third)] == [
            Kind.FIRST_SEEN,
            Kind.NEW_TEXT,
            Kind.FIRST_SEEN,
        ]
        assert second.before_id == "1"
        assert second.token_index is not None
        assert second.token_index >= 124
        assert keeper.explain(4) is None
        keeper.clear()
        assert keeper.explain() is None
    finally:
        keeper.detach()


def test_a_change_near_the_beginning_is_compared_with_the_same_talk() -> None:
    rest = span(200, 9)
    with engine_of(n_seqs=1) as engine:
        ask(engine, join(span(40, 1), [7], rest), 1, label="yesterday").wait()
        for n in range(3):
            ask(engine, join(span(40, 1), span(60, 20 + n)), 1, label=f"other {n}").wait()
        ask(engine, join(span(40, 1), [8], rest), 1, label="today").wait()
        found = engine.explain("today")
    assert found is not None
    assert (found.before_id, found.token_index) == ("yesterday", 40)


def test_bodies_are_bounded_with_the_rest() -> None:
    history = History(capacity_bytes=10_000)
    for number in range(1, 30):
        history.add(replace(made(number, 10), body=b"{}" * 500))
    assert sum(history.find(number) is not None for number in range(1, 30)) == 9


def test_a_body_with_several_prompts_says_nothing_of_any_of_them() -> None:
    with serving_fake(explain_texts=True, engine={"n_seqs": 1}) as server:
        first, second = "A first prompt, of some length.", "And another one, which is new."
        server.answer("/completion", prompt=first, n_predict=1)
        server.answer("/completion", prompt=[first, second], n_predict=1)
        found = server.engine.explain()
    assert found is not None
    assert found.kind is not Kind.SAME
    assert found.evaluated_tokens


@pytest.mark.parametrize("body", [b"[]", b"{", b"\xff", b"[" * 100_000, b'{"other": 1}'])
def test_a_body_that_cannot_be_read_is_left_out(body: bytes) -> None:
    with engine_of(n_seqs=1) as engine:
        ask(engine, span(60, 1), 1, label="a").wait()
        ask(engine, join(span(60, 1), span(20, 2)), 1, label="b", body=body).wait()
        found = engine.explain("b")
    assert found is not None
    assert (found.before_id, found.token_index) == ("a", 60)
