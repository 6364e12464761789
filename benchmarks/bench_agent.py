"""A coding agent's session on SmolLM2: tokens evaluated against those that are new."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from openai import OpenAI

from benchmarks.bench_serve import server
from benchmarks.harness import Result, benchmark
from llamakeep.runtime.llama_load import usable_cores
from tests.agent_session import Session, Turn, table


@benchmark("serve-agent")
def serve_agent() -> Iterator[Result]:
    """Tokens evaluated in a session with tools, an edit and a compaction, against new ones.

    New is what a prompt has more than the one before it; where the conversation was changed, what
    the last message has.
    """
    with (
        server(usable_cores()) as (url, _),
        OpenAI(api_key="any", base_url=f"{url}/v1", timeout=600) as client,
    ):
        turns = list(Session(client).turns(6, 3))
    table(turns, print)
    grown = [
        (before, turn)
        for before, turn in pairwise(turns)
        if turn.what in ("call", "answer") and before.what != "compact"
    ]
    evaluated = sum(turn.evaluated_tokens for _, turn in grown)
    new = sum(turn.prompt_tokens - before.prompt_tokens for before, turn in grown)
    yield _result("evaluated of what is new", evaluated / new, "x", 1.2, turns)
    everything = sum(turn.prompt_tokens for turn in turns)
    all_evaluated = sum(turn.evaluated_tokens for turn in turns)
    yield _result("evaluated of all prompts", all_evaluated / everything, "x", 0.15, turns)


def _result(name: str, value: float, unit: str, target: float, turns: list[Turn]) -> Result:
    rows = [(turn.what, turn.prompt_tokens, turn.evaluated_tokens) for turn in turns]
    return Result(
        name=f"serve-agent-{name}",
        value=value,
        unit=unit,
        target=target,
        better="lower",
        detail={"turns": rows},
    )
