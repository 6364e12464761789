"""Reading traces: all forms, what is refused, and what follows from ids."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamakeep.errors import InvalidValue, StoreError
from llamakeep.explain import RecordLog
from llamakeep.simulate import trace as trace_module
from llamakeep.simulate.trace import NEVER, Trace, made_up, open_trace
from llamakeep.simulate.workload import read_workload
from llamakeep.tokens import as_tokens, common_prefix
from tests.simulate_tools import line, put_lines, random_prompts, trace_of


def test_a_trace(tmp_path: Path) -> None:
    path = put_lines(tmp_path / "t.jsonl", line([1, 2], [4, 4]), line([1, 2, 3], [4, 4, 1], 7.0))
    with open_trace(path) as trace:
        assert (trace.n_requests, trace.n_blocks, trace.block_tokens) == (2, 5, 4)
        assert (trace.n_tokens, trace.longest_tokens, trace.footprint_tokens) == (17, 9, 8)
        first, second = trace
        assert first.next_uses.tolist() == [1, 1]
        assert second.next_uses.tolist() == [NEVER] * 3
        assert (first.keep_tokens, second.keep_tokens, second.timestamp) == (8, 8, 7.0)
        assert second.tokens.tolist() == [1] * 4 + [2] * 4 + [3]
        assert [request.tokens.size for request in trace] == [8, 9]  # as often as wanted


def test_tails_count_when_they_are_wanted(tmp_path: Path) -> None:
    path = put_lines(tmp_path / "t.jsonl", line([1, 2], [4, 3]), line([1, 2], [4, 3]))
    with open_trace(path, tails=True) as trace:
        first, second = trace
        assert (first.keep_tokens, trace.footprint_tokens) == (7, 7)
        assert first.next_uses.tolist() == [1, 1]
    with open_trace(path) as trace:
        first, second = trace
        assert (second.keep_tokens, trace.footprint_tokens) == (4, 4)
        assert first.next_uses.tolist() == [1, NEVER]


def test_packed(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(line([1], [4])).encode() + b"\n\n"))
    with open_trace(path) as trace:
        assert trace.n_requests == 1


def test_mooncake_lines_have_no_block_size(tmp_path: Path) -> None:
    mooncake = {"timestamp": 27482, "input_length": 6955, "output_length": 52}
    path = put_lines(tmp_path / "m.jsonl", {**mooncake, "hash_ids": list(range(14))})
    with open_trace(path) as trace:
        assert (trace.block_tokens, trace.n_tokens, trace.footprint_tokens) == (512, 6955, 6656)
        assert [request.timestamp for request in trace] == [27.482]


def test_a_log_of_the_server(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    prompts = [np.arange(200, dtype=np.int32), np.arange(150, dtype=np.int32)]
    with RecordLog(path, clock=lambda: 5.0) as log:
        for prompt in prompts:
            log.add(prompt, namespace=b"n", request_id="r")
    with open_trace(path) as trace:
        assert (trace.block_tokens, trace.n_tokens, trace.footprint_tokens) == (64, 350, 192)
        first, second = trace
        assert common_prefix(first.tokens, second.tokens) == 128
        assert first.next_uses.tolist() == [1, 1, NEVER, NEVER]


def test_a_workload(tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    prompts = [[1, 2, 3, 4], [1, 2, 5], [1, 2, 3, 4, 6], [1, 2]]
    path.write_text(json.dumps([{"conversation": 0, "tokens": each} for each in prompts]))
    with open_trace(path) as trace:
        found = list(trace)
        assert [request.tokens.tolist() for request in found] == prompts
        assert [request.sizes.tolist() for request in found] == [[2, 2], [2, 1], [2, 2, 1], [2]]
        assert trace.footprint_tokens == 6  # 1 2 | 3 4 | 6 | 5
        assert found[0].next_uses.tolist() == [1, 2]
        assert found[0].keep_tokens == 4


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_a_workload_is_cut_where_prompts_part(seed: int) -> None:
    """Two prompts share blocks exactly as far as they share tokens."""
    prompts = random_prompts(np.random.default_rng(seed))
    with trace_of(prompts) as trace:
        found = list(trace)
        for one in found:
            assert one.tokens.size == one.sizes.sum()
            for other in found:
                blocks = zip(one.blocks.tolist(), other.blocks.tolist(), strict=False)
                shared = 0
                for size, (a, b) in zip(one.sizes.tolist(), blocks, strict=False):
                    if a != b:
                        break
                    shared += size
                assert shared == common_prefix(one.tokens, other.tokens)
        prefixes = {tuple(prompt[:end]) for prompt in prompts for end in range(1, len(prompt) + 1)}
        assert trace.footprint_tokens == len(prefixes)


@pytest.mark.parametrize("at_once", [1, 7, 1000])
def test_next_uses_are_those_of_a_search(
    tmp_path: Path, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_module, "_BUCKET_BLOCKS", at_once)
    with trace_of(random_prompts(np.random.default_rng(3), n=30)) as trace:
        found = list(trace)
        for index, request in enumerate(found):
            for block, next_use in zip(request.blocks, request.next_uses, strict=True):
                later = (i for i in range(index + 1, len(found)) if block in found[i].blocks)
                assert next_use == next(later, NEVER)


def test_made_up_tokens_are_prefixes_exactly_where_ids_are() -> None:
    sizes = np.array([3, 2, 2], np.int32)
    ids = np.array([5, (7 << 31) + 6, 1 << 61], np.int64)
    tokens = made_up(ids, sizes)
    assert (tokens.dtype, tokens.min() >= 0) == (np.dtype(np.int32), True)
    for index in range(3):
        other = ids.copy()
        other[index] ^= 1 << 40
        assert common_prefix(tokens, made_up(other, sizes)) in (
            range(sizes[:index].sum(), sizes[:index].sum() + 2)
        )
    grown = made_up(np.append(ids, 9), np.append(sizes, 4).astype(np.int32))
    assert common_prefix(tokens, grown) == 7


def test_ids_may_be_any_numbers(tmp_path: Path) -> None:
    path = put_lines(tmp_path / "t", line([-3, 2**70], [4, 4]), line([-3, 2**70], [4, 4]))
    with open_trace(path) as trace:
        assert [request.next_uses.tolist() for request in trace] == [[1, 1], [NEVER, NEVER]]


BAD: dict[str, tuple[list[Any], str]] = {
    "no object": ([1], "line 1: a line must be an object"),
    "sizes do not add up": ([line([1], [4]), {**line([1], [4]), "input_length": 5}], "line 2: "),
    "no ids": ([{"timestamp": 0, "input_length": 4}], "line 1: hash_ids must be a list"),
    "other blocks": (
        [line([1], [4]), {**line([1], [4]), "block_size": 8, "id": "x"}],
        "request x has blocks of 8 tokens, those before have 4",
    ),
    "two parents": (
        [line([1, 2], [4, 4]), line([3, 2], [4, 4])],
        "block 2 follows 1 in request 1 and 3 in request 2",
    ),
    "a root that has a parent": (
        [line([1, 2], [4, 4]), line([2], [4])],
        "block 2 follows 1 in request 1 and none in request 2",
    ),
    "not full before the last": ([line([1, 2], [3, 4])], "request 1 has a block before its last"),
    "a time that is none": ([line([1], [4]), {**line([1], [4]), "timestamp": 1e999}], "is no time"),
    "another one": ([{**line([1], [4]), "timestamp": float("nan")}], "line 1: timestamp nan is no"),
    "blocks without end": (
        [{**line([1], [4]), "block_size": 2_000_000_000}],
        "has blocks of 2000000000 tokens; 1,048,576 are the most",
    ),
    "nothing": ([], "has no requests with tokens"),
    "no tokens": ([line([], [])], "has no requests with tokens"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_is_no_trace_is_refused(tmp_path: Path, what: str) -> None:
    lines, message = BAD[what]
    with pytest.raises(InvalidValue, match=message):
        open_trace(put_lines(tmp_path / "t.jsonl", *lines))


def test_a_block_can_be_cut_off_in_one_prompt(tmp_path: Path) -> None:
    path = put_lines(tmp_path / "t", line([1, 2], [4, 2]), line([1, 2, 3], [4, 4, 4]))
    with open_trace(path, tails=True) as trace:
        assert trace.footprint_tokens == 12
        first, second = trace
        assert common_prefix(first.tokens, second.tokens) == 6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1", "no JSON"),
        ("[{}]", "request 1: it has no list of tokens"),
        ('[{"tokens": [1]}, {"tokens": [-1]}]', "request 2: token -1 at index 0"),
        ("[]", "has no requests with tokens"),
    ],
)
def test_what_is_no_workload_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "w.json"
    path.write_text(text)
    with pytest.raises(InvalidValue, match=message):
        open_trace(path)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot read"):
        open_trace(tmp_path / "none.jsonl")
    bad = tmp_path / "bad.jsonl.gz"
    bad.write_bytes(b"no gzip")
    with pytest.raises(StoreError, match="cannot read"):
        open_trace(bad)


def test_progress_and_closing(tmp_path: Path) -> None:
    path = put_lines(tmp_path / "t", *(line([i], [4]) for i in range(2050)))
    heard: list[int] = []
    with open_trace(path, on_progress=heard.append) as trace:
        assert heard == [1024, 2048]
        assert "2,050 requests" in repr(trace)
    trace.close()


def test_a_workload_may_be_packed(tmp_path: Path) -> None:
    path = tmp_path / "w.json.gz"
    path.write_bytes(gzip.compress(b'[{"tokens": [1, 2]}]'))
    assert [prompt.tolist() for prompt in read_workload(path).prompts] == [[1, 2]]
    with open_trace(path) as trace:
        assert isinstance(trace, Trace)
        assert np.array_equal(next(iter(trace)).tokens, as_tokens([1, 2]))
