"""Recordings of a real llama-server, replayed through slots, prompt cache and checkpoint list.

Each request of a recording is served by the fake runtime, whose states have the recorded sizes;
its events, in order, and the tokens evaluated and reused must be the recorded ones, all of them.
What the log of the recordings left out (`Event.recorded`) is left out here.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from llamakeep.events import Event
from llamakeep.policy import policy_names
from llamakeep.prompt_cache import PromptCache
from llamakeep.runtime.base import Family
from llamakeep.runtime.fake import FakeRuntime
from llamakeep.slots import Served, Slots

DATA = Path(__file__).parent / "data" / "upstream"
MIB = 1 << 20

# SmolLM2-135M: 30 layers of keys and values, each 3 heads of 64 half floats, are 23,040 bytes a
# token; 12 more are the cell's position, its count of sequences and the sequence. What does not
# grow with the tokens is 656 to 769 bytes by the recorded sizes; 48 are the fake's own header.
ROW_BYTES = 30 * 2 * 3 * 64 * 2 + 12
FIXED_BYTES = 740 - 48
# A checkpoint of the tiny hybrid model has 0.004 MiB.
RECURRENT_BYTES = 4096


def recording(name: str) -> dict[str, Any]:
    with gzip.open(DATA / f"{name}.json.gz", "rt", encoding="utf-8") as file:
        read: dict[str, Any] = json.load(file)
    return read


def option(server: dict[str, Any], flag: str, default: int) -> int:
    args = server["args"]
    return int(args[args.index(flag) + 1]) if flag in args else default


def slots_of(
    server: dict[str, Any], family: Family, *, limit_bytes: int | None = None, **options: Any
) -> Slots:
    """Return slots with a server's arguments, over a cache of its size if not of another."""
    runtime = FakeRuntime(
        family,
        n_ctx=server["n_ctx"] * server["slots"],
        n_seqs=server["slots"],
        n_batch=option(server, "-b", 2048),
        row_bytes=ROW_BYTES,
        recurrent_bytes=RECURRENT_BYTES,
        fixed_bytes=FIXED_BYTES if family is Family.ATTENTION else 0,
    )
    if limit_bytes is None:
        limit_bytes = option(server, "--cache-ram", 8192) * MIB
    cache = PromptCache(limit_bytes, server["n_ctx"] * server["slots"], **options)
    return Slots(
        runtime,
        cache,
        ctx_checkpoints=option(server, "--ctx-checkpoints", 32),
        checkpoint_min_step=option(server, "--checkpoint-min-step", 8192),
        n_ubatch=option(server, "-ub", 512),
        min_evaluated=1,
        emit=options["emit"],
    )


def differences(served: Served, request: dict[str, Any]) -> list[str]:
    """Return in what a request was not served as the server served it."""
    found = [event.as_dict() for event in served.events if event.recorded]
    return [
        what
        for what, ours, theirs in (
            ("events", found, request["events"]),
            ("evaluated", served.evaluated_tokens, request["evaluated"]),
            ("reused", served.reused_tokens, request["reused"]),
        )
        if ours != theirs
    ]


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("prompt_cache_1slot", Family.ATTENTION),
        ("prompt_cache_shared_system", Family.ATTENTION),
        ("checkpoints_hybrid", Family.HYBRID),
    ],
)
def test_every_request_of_a_recording_is_served_as_it_was(name: str, family: Family) -> None:
    record = recording(name)
    events: list[Event] = []
    slots = slots_of(record["server"], family, emit=events.append)
    for number, request in enumerate(record["requests"]):
        events.clear()
        served = slots.serve(request["tokens"], user_starts=request["user_starts"])
        where = f"request {number}: {request['note']}"
        found = [event.as_dict() for event in events if event.recorded]
        assert served.events == tuple(events)
        assert found == request["events"], where
        assert served.evaluated_tokens == request["evaluated"], where
        assert served.reused_tokens == request["reused"], where
        assert not differences(served, request)
        slots.check()


@pytest.mark.parametrize(
    ("name", "family", "infinite"),
    [
        ("prompt_cache_1slot", Family.ATTENTION, 3761),
        ("prompt_cache_shared_system", Family.ATTENTION, 3498),
    ],
)
def test_mode_keep_with_room_evaluates_what_an_infinite_cache_would(
    name: str, family: Family, infinite: int
) -> None:
    assert kept_tokens(name, family, limit_bytes=1 << 30) == infinite


@pytest.mark.parametrize("policy", policy_names("prompts"))
@pytest.mark.parametrize(
    ("name", "family", "theirs"),
    [
        ("prompt_cache_1slot", Family.ATTENTION, 8938),
        ("prompt_cache_shared_system", Family.ATTENTION, 8455),
        ("checkpoints_hybrid", Family.HYBRID, 8205),
    ],
)
def test_mode_keep_evaluates_no_more_in_the_same_bytes(
    name: str, family: Family, theirs: int, policy: str
) -> None:
    assert kept_tokens(name, family, policy=policy) <= theirs


def kept_tokens(name: str, family: Family, **options: Any) -> int:
    """Return what mode keep evaluates of a recording."""
    record = recording(name)
    options = {"mode": "keep", "emit": lambda _: None} | options
    slots = slots_of(record["server"], family, **options)
    evaluated = 0
    for request in record["requests"]:
        served = slots.serve(request["tokens"], user_starts=request["user_starts"])
        evaluated += served.evaluated_tokens
    slots.check()
    return evaluated
