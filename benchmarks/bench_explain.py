"""What it takes to explain why a prompt of 30,000 tokens was read again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks.harness import Result, benchmark, median_time
from llamakeep.explain import Given, Kind, Side, explain
from llamakeep.tokens import IntArray

N_TOKENS = 30_000
LETTERS_PER_TOKEN = 4
N_TURNS = 60
N_VOCAB = 32_003
TARGET_MS = 50

_LINE = "The file was read, and line {n} says that the value is {n} of {m}.\n"


def words(n_letters: int, seed: int) -> str:
    """Return a text of lines that are much like each other, as output of tools is."""
    rng = np.random.default_rng(seed)
    lines = [_LINE.format(n=n, m=rng.integers(1000)) for n in range(1 + n_letters // 50)]
    return "".join(lines)[:n_letters]


def turns(seed: int) -> list[dict[str, Any]]:
    share = N_TOKENS * LETTERS_PER_TOKEN // N_TURNS
    return [
        {"role": "assistant" if index % 2 else "user", "content": words(share, seed + index)}
        for index in range(N_TURNS)
    ]


def body(system: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": system}, *messages]}


def chatml(request: dict[str, Any]) -> str:
    return "".join(
        f"<|im_start|>{each['role']}\n{each['content']}<|im_end|>\n" for each in request["messages"]
    )


def tokens(text: str) -> IntArray:
    """Return as many tokens as such a text has: four letters each."""
    data = text.encode()
    data += b"\0" * (-len(data) % LETTERS_PER_TOKEN)
    return (np.frombuffer(data, "<u4") % N_VOCAB).astype(np.int32)


def cases() -> Iterator[tuple[str, Given, Given, Kind]]:
    history = turns(1)
    more = [{"role": "user", "content": "Go on."}]
    systems = [f"You are an agent. Today is 2025-03-0{day}." for day in (1, 2)]
    dated = [body(systems[0], history), body(systems[1], history + more)]
    one, other = (Side(tokens(chatml(each)), chatml(each), each) for each in dated)
    yield "a date at the top; tokens, text and body", one, other, Kind.DATE
    edited = [dict(each) for each in history]
    edited[1]["content"] = "Something else. " + edited[1]["content"]
    late = body(systems[0], edited + more)
    yield "an old message edited; body", dated[0], late, Kind.UNKNOWN
    yield "an old message edited; text", chatml(dated[0]), chatml(late), Kind.UNKNOWN
    plain = words(N_TOKENS * LETTERS_PER_TOKEN, 5)
    yield "plain text, no cause", "a" + plain, "b" + plain, Kind.FIRST_SEEN
    wide = json.dumps([{"name": f"tool {n}", "doc": words(1000, n)} for n in range(120)])
    braces = ["{" * 400 + wide + end for end in ('"', "[")]
    yield "JSON that is broken at its end", braces[0], braces[1], Kind.UNKNOWN
    tools = [{"type": "function", "function": each} for each in json.loads(wide)]
    first = body("You are an agent.", more) | {"tools": tools}
    yield "120 tools in another order; body", first, first | {"tools": tools[::-1]}, Kind.ORDER
    yield (
        "120 tools in another order; text",
        f"{wide}\nGo on.",
        f"{json.dumps(json.loads(wide)[::-1])}\nGo on.",
        Kind.ORDER,
    )


@benchmark("explain")
def explaining() -> Iterator[Result]:
    took: dict[str, float] = {}
    for name, before, after, kind in cases():
        found = explain(before, after)
        if found.kind is not kind:
            raise RuntimeError(f"{name}: {found.kind} instead of {kind}")
        took[name] = 1e3 * median_time(lambda one=before, two=after: explain(one, two), 9)
    yield Result(
        name="explain-30000",
        value=max(took.values()),
        unit="ms",
        target=TARGET_MS,
        better="lower",
        detail={
            "what": f"explaining why a prompt of {N_TOKENS:,} tokens was read again, the slowest"
            " of these",
            "ms": took,
        },
    )
