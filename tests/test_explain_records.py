"""The log of requests: what is written, what is not, what is read, and what it explains."""

from __future__ import annotations

import gzip
import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamakeep.errors import InvalidValue, LlamakeepError, StoreError
from llamakeep.explain import (
    Circumstances,
    Evicted,
    Kind,
    Recorded,
    RecordLog,
    explain_logged,
    read_log,
)
from llamakeep.explain.blocks import KEY_BYTES, block_ids, key_id, read_key
from llamakeep.fingerprint import Difference
from llamakeep.runtime.fake_text import FakeVocab
from llamakeep.tokens import IntArray, as_tokens
from tests.explain_pairs import SYSTEM, chatml

KEY = bytes(range(KEY_BYTES))
SPACE = b"n" * 32
NOW = 1_740_820_500.25
VOCAB = FakeVocab(400)

LINE: dict[str, Any] = {
    "timestamp": 1.5,
    "session_id": "s",
    "block_size": 4,
    "hash_ids": [7, 8],
    "block_tokens": [4, 2],
    "input_length": 6,
    "output_length": 3,
}


def tokens_of(text: str) -> IntArray:
    return VOCAB.tokenize(text, add_special=False, parse_special=True)


def write(path: Path, *prompts: IntArray, **options: Any) -> list[Recorded]:
    known = options.pop("circumstances", None)
    with RecordLog(path, clock=lambda: NOW, **options) as log:
        return [
            log.add(
                prompt,
                namespace=SPACE,
                request_id=f"r{index}",
                circumstances=known if index == len(prompts) - 1 else None,
                text=VOCAB.text(prompt),
            )
            for index, prompt in enumerate(prompts)
        ]


# -- writing ---------------------------------------------------------------------------------------


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    known = Circumstances(
        prompt_tokens=100, reused_tokens=64, tier="disk", reason="r", evicted=Evicted("lru", 90)
    )
    written = write(path, np.arange(100, dtype=np.int32), circumstances=known)
    assert list(read_log(path)) == written
    line = json.loads(path.read_text())
    assert line["timestamp"] == NOW
    assert line["block_tokens"] == [64, 36]
    assert (line["reused_tokens"], line["evaluated_tokens"]) == (64, 36)
    assert (line["tier"], line["reason"], line["id"]) == ("disk", "r", "r0")
    assert line["circumstances"]["evicted"] == {"policy": "lru", "n_tokens": 90}


def test_without_leave_no_content_is_written(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    prompt = tokens_of("The password is lighthouse.")
    write(path, prompt)
    said = path.read_text()
    assert "lighthouse" not in said
    assert not {"tokens", "text"} & set(json.loads(said))
    with_texts = tmp_path / "texts.jsonl"
    write(with_texts, prompt, with_texts=True)
    line = json.loads(with_texts.read_text())
    assert line["text"] == "The password is lighthouse."
    assert line["tokens"] == prompt.tolist()


@pytest.mark.skipif(os.name == "nt", reason="Windows has no modes")
def test_nobody_else_may_read_the_log_or_its_key(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    write(path, np.arange(3, dtype=np.int32))
    for file in (path, tmp_path / "log.jsonl.key"):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_log_is_continued_with_its_key(tmp_path: Path) -> None:
    path, prompt = tmp_path / "log.jsonl", np.arange(100, dtype=np.int32)
    write(path, prompt)
    write(path, prompt)
    one, other = read_log(path)
    assert one.hash_ids == other.hash_ids
    assert one.key_id == other.key_id == key_id(read_key(path))


def test_a_key_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    (tmp_path / "log.jsonl.key").write_bytes(b"short")
    with pytest.raises(StoreError, match=r"log.jsonl.key is no key: it has 5 bytes"):
        RecordLog(path, clock=lambda: NOW)
    with pytest.raises(InvalidValue, match="the key has 3 bytes"):
        RecordLog(path, clock=lambda: NOW, key=b"abc")
    with pytest.raises(StoreError, match="cannot read the key"):
        RecordLog(tmp_path / "nowhere" / "log", clock=lambda: NOW)
    with pytest.raises(StoreError, match="cannot write"):
        RecordLog(tmp_path, clock=lambda: NOW, key=KEY)


def test_a_closed_log_takes_nothing(tmp_path: Path) -> None:
    log = RecordLog(tmp_path / "log", clock=lambda: NOW, key=KEY)
    log.close()
    log.close()
    with pytest.raises(StoreError, match="is closed"):
        log.add(np.arange(3, dtype=np.int32), namespace=SPACE, request_id="1")


@pytest.mark.skipif(not hasattr(os, "O_NOFOLLOW"), reason="no way to refuse links")
def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "log").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError, match="cannot write"):
        RecordLog(tmp_path / "log", clock=lambda: NOW, key=KEY)
    assert not (tmp_path / "elsewhere").exists()


def test_threads_write_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with RecordLog(path, clock=lambda: NOW, key=KEY, with_texts=True) as log:

        def many(name: str) -> None:
            for index in range(20):
                prompt = np.arange(500, dtype=np.int32)
                log.add(prompt, namespace=SPACE, request_id=f"{name}{index}")

        threads = [threading.Thread(target=many, args=(name,)) for name in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    names = {f"{name}{index}" for name in "abcd" for index in range(20)}
    assert {line.id for line in read_log(path)} == names


# -- ids -------------------------------------------------------------------------------------------

TOKENS = st.lists(st.integers(0, 2), max_size=30)


@given(one=TOKENS, other=TOKENS, size=st.integers(1, 8))
def test_ids_are_equal_as_far_as_whole_prefixes_are(
    one: list[int], other: list[int], size: int
) -> None:
    ids = [
        block_ids(as_tokens(side), key=KEY, namespace=SPACE, block_tokens=size)
        for side in (one, other)
    ]
    for index, (mine, theirs) in enumerate(zip(*ids, strict=False)):
        end = (index + 1) * size
        assert (mine == theirs) == (one[:end] == other[:end])
    assert all(0 <= each < 2**53 for side in ids for each in side)


def test_ids_of_other_keys_and_namespaces_are_others() -> None:
    prompt = np.arange(300, dtype=np.int32)
    sides = [
        block_ids(prompt, key=key, namespace=space)
        for key in (KEY, bytes(KEY_BYTES))
        for space in (SPACE, b"m" * 32)
    ]
    assert len({each for side in sides for each in side}) == 4 * len(sides[0])


# -- reading ---------------------------------------------------------------------------------------


def test_a_trace_without_our_fields_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    short = {name: value for name, value in LINE.items() if name != "block_tokens"}
    with gzip.open(path, "wt") as file:
        file.write(json.dumps(LINE | {"type": "chat"}) + "\n\n" + json.dumps(short) + "\n")
    first, second = read_log(path)
    assert second.block_tokens == (4, 2)
    assert (first.hash_ids, first.input_length, first.reused_tokens) == ((7, 8), 6, None)
    assert (first.id, second.id) == ("1", "3")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"block_size": 0}, "block_size must be 1 or more"),
        ({"block_size": None}, "block_size must be a whole number"),
        ({"hash_ids": "7"}, "hash_ids must be a list"),
        ({"hash_ids": [7]}, "1 hash_ids, but block_tokens of 2 blocks"),
        ({"hash_ids": [7, 1.5]}, r"hash_ids\[1\] must be a whole number"),
        ({"hash_ids": [7, True]}, r"hash_ids\[1\] must be a whole number"),
        ({"block_tokens": [4, 0]}, r"block_tokens\[1\] is 0"),
        ({"block_tokens": [5, 1]}, r"block_tokens\[0\] is 5, of blocks of 4"),
        ({"block_tokens": None, "input_length": 9}, "2 hash_ids, but 9 tokens in blocks of 4"),
        ({"input_length": 7}, "input_length is 7, block_tokens sum to 6"),
        ({"timestamp": "now"}, "timestamp must be a number"),
        ({"timestamp": 10**400}, "timestamp 1000"),
        ({"session_id": 4}, "session_id must be a text"),
        ({"reused_tokens": 7}, "reused_tokens is 7, of 6 tokens"),
        ({"tokens": ["x"]}, r"tokens\[0\]"),
        ({"text": 3}, "text must be a text"),
        ({"circumstances": {"tier": 3}}, "tier must be a text"),
    ],
)
def test_a_line_that_is_none_is_named(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps(LINE) + "\n" + json.dumps(LINE | change) + "\n")
    with pytest.raises(InvalidValue, match=rf"log.jsonl, line 2: {said}"):
        list(read_log(path))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"{", "line 1: no JSON"),
        (b"[]", "line 1: a line must be an object"),
        (b"\xff\xfe{}", "line 1: no "),
        (b"[" * 100_000, "line 1: nested too deeply"),
        (b"9" * 5000, "line 1: no JSON"),
    ],
)
def test_bytes_that_are_no_line(tmp_path: Path, data: bytes, said: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(data)
    with pytest.raises(InvalidValue, match=said):
        list(read_log(path))


@given(data=st.binary(max_size=200) | st.text(max_size=80).map(str.encode))
def test_no_bytes_are_too_strange(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    path.write_bytes(data)
    with pytest.raises(LlamakeepError, match=r"log\.jsonl"):
        explain_logged(path)


def test_a_last_line_that_was_cut_off_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "log.jsonl"
    whole = json.dumps(LINE) + "\n"
    for torn in (b'{"timestamp": 1.5, "hash', '{"session_id": "é'.encode()[:-1]):
        caplog.clear()
        path.write_bytes(whole.encode() + torn)
        assert [line.id for line in read_log(path)] == ["1"]
        assert f"{path}, line 2 was cut off" in caplog.text
    path.write_text(whole + '{"timestamp"\n')
    with pytest.raises(InvalidValue, match="line 2: no JSON"):
        list(read_log(path))


def test_what_is_no_log_is_told(tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text('{"timestamp": 1, "message": "x"}\n')
    said = r"line 1: not a log of llamakeep serve --record: it has no block_size, hash_ids, input_"
    with pytest.raises(InvalidValue, match=said):
        list(read_log(path))
    with pytest.raises(StoreError, match=r"cannot read [^ ]*nope.jsonl: "):
        list(read_log(tmp_path / "nope.jsonl"))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    broken = tmp_path / "log.gz"
    broken.write_bytes(gzip.compress(json.dumps(LINE).encode() * 100)[:60])
    garbled = tmp_path / "garbled.gz"
    garbled.write_bytes(b"\x1f\x8b\x08" + b"\x00" * 7 + b"\xff" * 40)
    for path in (tmp_path, tmp_path / "missing", broken, garbled):
        with pytest.raises(StoreError, match="cannot read"):
            list(read_log(path))


# -- explaining ------------------------------------------------------------------------------------


def dated(date: str, *more: tuple[str, str]) -> IntArray:
    return tokens_of(
        chatml(("system", f"{SYSTEM}\nToday is {date}."), ("user", "Hello, who is there?"), *more)
    )


def test_with_texts_the_cause_is_told(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    write(path, dated("2025-03-01"), dated("2025-03-02"), with_texts=True)
    found = explain_logged(path)
    assert (found.kind, found.request_id, found.before_id) == (Kind.DATE, "r1", "r0")
    assert found.around.before.startswith("1.")
    assert found.token_index == len(f"{SYSTEM}\nToday is 2025-03-0") + 8


def test_with_hashes_the_place_is_told(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    one, other = dated("2025-03-01"), dated("2025-03-02")
    at = int(np.flatnonzero(one != other)[0])
    write(path, one, other)
    found = explain_logged(path)
    assert (found.kind, found.around.before) == (Kind.UNKNOWN, "")
    assert found.token_index is not None
    assert found.token_range is not None
    assert found.token_index <= at < found.token_index + found.token_range <= at + 64
    assert "hashes only" in found.reason


@given(shared=TOKENS, one=TOKENS, other=TOKENS, size=st.integers(1, 6))
def test_the_place_is_within_what_is_told(
    tmp_path_factory: pytest.TempPathFactory,
    shared: list[int],
    one: list[int],
    other: list[int],
    size: int,
) -> None:
    path = tmp_path_factory.mktemp("log") / "log"
    before, after = shared + one, shared + other
    write(path, as_tokens(before), as_tokens(after), key=KEY, block_tokens=size)
    found = explain_logged(path)
    shorter = min(len(before), len(after))
    at = next((i for i in range(shorter) if before[i] != after[i]), shorter)
    assert found.token_index is not None
    assert found.token_range is not None
    assert found.token_index <= at < found.token_index + found.token_range
    if found.kind is Kind.NEW_TEXT:
        assert after[: len(before)] == before
    if found.kind is Kind.SAME:
        assert before[: len(after)] == after


def test_the_best_request_before_it_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    prompts = [np.full(300, n, np.int32) for n in range(3)]
    prompts.append(np.concatenate((prompts[1], prompts[0])))
    prompts.append(prompts[2])
    write(path, *prompts)
    found = explain_logged(path, "r3")
    assert (found.before_id, found.token_index) == ("r1", 256)
    found = explain_logged(path, "r0")
    assert (found.kind, found.before_id) == (Kind.FIRST_SEEN, "")
    assert explain_logged(path).kind is Kind.SAME


def test_the_log_knows_what_the_engine_knew(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    known = Circumstances(300, 0, "none", shared_tokens=0, evicted=Evicted("marginal", 256))
    write(path, *[np.arange(300, dtype=np.int32)] * 2, circumstances=known)
    found = explain_logged(path)
    assert (found.kind, found.policy, found.lost_tokens) == (Kind.EVICTED, "marginal", 256)
    assert (found.reused_tokens, found.evaluated_tokens) == (0, 300)


def test_the_engine_knows_the_place_within_a_block(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    prompt = np.arange(300, dtype=np.int32)
    other = np.concatenate((prompt[:190], prompt[:100]))
    known = Circumstances(290, 188, "live", shared_tokens=190, slack_tokens=9)
    write(path, prompt, other, circumstances=known)
    found = explain_logged(path)
    assert (found.kind, found.token_index, found.token_range) == (Kind.UNKNOWN, 190, 1)
    assert "--explain-texts" in found.advice


def test_the_salt_of_a_request_comes_before_what_its_text_says(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    salts = (Difference("salt_id", "aa", "bb"),)
    known = Circumstances(300, 0, "none", shared_tokens=0, namespaces=salts)
    write(path, dated("2025-03-01"), dated("2025-03-02"), with_texts=True, circumstances=known)
    found = explain_logged(path)
    assert (found.kind, found.part, found.also) == (Kind.SALT, "cache_salt", (Kind.DATE,))


def test_what_was_not_kept_any_more_is_not_the_same(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    known = Circumstances(300, 0, "none", shared_tokens=0)
    write(path, *[np.arange(300, dtype=np.int32)] * 2, circumstances=known)
    found = explain_logged(path)
    assert (found.kind, found.lost_tokens) == (Kind.UNKNOWN, 300)
    assert "not kept any more" in found.reason


def test_a_request_is_found_by_its_place(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    write(path, *(np.full(100, n, np.int32) for n in range(3)))
    assert explain_logged(path, "3").request_id == "r2"
    write(path, *(np.full(100, n, np.int32) for n in range(3)))
    path.write_text(path.read_text().replace('"r0"', '"3"'))
    assert explain_logged(path, "3").request_id == "3"
    with pytest.raises(InvalidValue, match="has no request '7'"):
        explain_logged(path, "7")


def test_requests_of_other_keys_are_not_compared(tmp_path: Path) -> None:
    path, prompt = tmp_path / "log.jsonl", np.arange(300, dtype=np.int32)
    write(path, prompt, key=KEY)
    write(path, prompt, key=bytes(KEY_BYTES))
    assert explain_logged(path).token_index == 0


def test_requests_that_are_not_there(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text("\n")
    with pytest.raises(InvalidValue, match=r"log.jsonl has no request$"):
        explain_logged(path)
    write(path, np.arange(3, dtype=np.int32))
    with pytest.raises(InvalidValue, match="has no request 'r7'"):
        explain_logged(path, "r7")
