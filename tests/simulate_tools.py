"""Small traces for the tests of the simulator."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from llamakeep.simulate.trace import Trace, open_trace


def line(ids: Sequence[int], sizes: Sequence[int], timestamp: float = 0.0) -> dict[str, Any]:
    """A request of blocks of at most 4 tokens."""
    return {
        "timestamp": timestamp,
        "session_id": "s",
        "block_size": 4,
        "hash_ids": list(ids),
        "block_tokens": list(sizes),
        "input_length": sum(sizes),
        "output_length": 1,
    }


def put_lines(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in lines), encoding="utf-8")
    return path


def random_prompts(rng: np.random.Generator, n: int = 12, longest: int = 40) -> list[list[int]]:
    """Prompts that grow, part and come again."""
    prompts: list[list[int]] = []
    for _ in range(n):
        start: list[int] = []
        if prompts and rng.random() < 0.8:
            before = prompts[rng.integers(len(prompts))]
            start = before[: rng.integers(len(before) + 1)]
        more = rng.integers(0, 3, rng.integers(1, 12)).tolist()
        prompts.append([*start, *more][:longest])
    return prompts


def trace_of(prompts: Sequence[Sequence[int]]) -> Trace:
    """The trace of a workload."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "w.json"
        path.write_text(json.dumps([{"tokens": list(prompt)} for prompt in prompts]))
        return open_trace(path)


def blocks_trace(*requests: Sequence[int], block_tokens: int = 1) -> Trace:
    """A trace of full blocks, by their ids, a second between requests."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "t.jsonl"
        put_lines(
            path,
            *(
                {
                    **line(ids, [block_tokens] * len(ids), float(index)),
                    "block_size": block_tokens,
                }
                for index, ids in enumerate(requests)
            ),
        )
        return open_trace(path)
