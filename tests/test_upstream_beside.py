"""The requests of the recordings through the prefix tree, beside what llama-server evaluated.

Counts are multiples of what an infinite prefix cache would evaluate, which leaves one token of each
prompt to do. The tree leaves two, so that a row is never evaluated alone.
"""

from __future__ import annotations

import numpy as np
import pytest

from llamakeep.runtime.base import Family
from llamakeep.runtime.fake import FakeRuntime
from llamakeep.sequence import KeptSequence
from llamakeep.stores.memory import MemoryStore
from llamakeep.tree import PrefixTree
from tests.test_upstream_replay import (
    FIXED_BYTES,
    MIB,
    RECURRENT_BYTES,
    ROW_BYTES,
    option,
    recording,
)

INFINITE = {
    "prompt_cache_1slot": 3761,
    "prompt_cache_shared_system": 3498,
    "checkpoints_hybrid": 5042,
}
SERVER = {
    "prompt_cache_1slot": 8938,
    "prompt_cache_shared_system": 8455,
    "checkpoints_hybrid": 8205,
}
PLENTY = 1 << 40
SLOT_BYTES = 1248 * ROW_BYTES
"""What the server's one slot holds at most, in either recording of an attention model."""


class Beside:
    """One live sequence and a tree that need not hold what is live, on the fake runtime."""

    def __init__(
        self,
        name: str,
        *,
        capacity_bytes: int = PLENTY,
        align: int = 1,
        policy: str = "lru",
        max_checkpoint_bytes: int | None = None,
    ) -> None:
        self.record = recording(name)
        server = self.record["server"]
        is_hybrid = name == "checkpoints_hybrid"
        self.runtime = FakeRuntime(
            Family.HYBRID if is_hybrid else Family.ATTENTION,
            n_ctx=server["n_ctx"],
            n_batch=option(server, "-b", 2048),
            row_bytes=ROW_BYTES,
            recurrent_bytes=RECURRENT_BYTES,
            fixed_bytes=0 if is_hybrid else FIXED_BYTES,
        )
        self.tree = PrefixTree(
            MemoryStore(capacity_bytes),
            self.runtime.traits,
            max_checkpoints=64,
            max_checkpoint_bytes=max_checkpoint_bytes,
            policy=policy,
        )
        self.sequence = KeptSequence(
            self.runtime, self.tree, align=align, min_step=256, save_late=True
        )
        self.peak_checkpoint_bytes = 0

    def checkpoint_bytes(self) -> int:
        """Return what all checkpoints in memory occupy."""
        return sum(
            kept.held_bytes for node in self.tree._nodes() for kept in node.checkpoints.values()
        )

    def evaluated(self) -> int:
        """Serve all requests; return how many of their tokens were evaluated."""
        total = 0
        cold = FakeRuntime(self.runtime.traits.family, n_ctx=self.runtime.n_ctx)
        for request in self.record["requests"]:
            prompt = np.array(request["tokens"], np.int32)
            reuse = self.sequence.resume(prompt, user_starts=request["user_starts"])
            self.sequence.advance(prompt[reuse.reused_tokens :])
            total += reuse.evaluated_tokens
            cold.clear(0)
            cold.evaluate(0, prompt)
            assert np.array_equal(self.runtime.logits(), cold.logits())
            assert self.tree.store.used_bytes <= self.tree.store.capacity_bytes
            self.peak_checkpoint_bytes = max(self.peak_checkpoint_bytes, self.checkpoint_bytes())
            self.tree.check()
        assert self.sequence.failures == {}
        return total


@pytest.mark.parametrize(
    ("name", "align", "most"),
    [
        ("prompt_cache_1slot", 1, 1.02),
        ("prompt_cache_shared_system", 1, 1.02),
        ("checkpoints_hybrid", 1, 1.10),
        ("prompt_cache_1slot", 8, 1.03),
        ("prompt_cache_shared_system", 8, 1.03),
        ("checkpoints_hybrid", 8, 1.11),
    ],
)
def test_with_room_for_everything(name: str, align: int, most: float) -> None:
    evaluated = Beside(name, align=align).evaluated()
    assert INFINITE[name] < evaluated <= most * INFINITE[name]


@pytest.mark.parametrize("name", ["prompt_cache_1slot", "prompt_cache_shared_system"])
@pytest.mark.parametrize("policy", ["lru", "marginal", "tokens-per-byte"])
def test_with_the_servers_bytes(name: str, policy: str) -> None:
    evaluated = Beside(name, capacity_bytes=40 * MIB, policy=policy).evaluated()
    assert evaluated <= 0.9 * SERVER[name]


@pytest.mark.parametrize("name", ["prompt_cache_1slot", "prompt_cache_shared_system"])
def test_with_half_as_many_bytes_again(name: str) -> None:
    """The server's bytes are its cache and its slot. Without the half of a slot it is tighter."""
    evaluated = Beside(name, capacity_bytes=60 * MIB, policy="marginal").evaluated()
    assert evaluated <= 1.2 * INFINITE[name]
    capacity_bytes = (40 * MIB + SLOT_BYTES) * 3 // 2 - SLOT_BYTES
    evaluated = Beside(name, capacity_bytes=capacity_bytes).evaluated()
    assert evaluated <= 1.1 * INFINITE[name]


def sixteen_checkpoints() -> int:
    """Return the bytes of 16 checkpoints of the hybrid recording's model."""
    one = FakeRuntime(Family.HYBRID, recurrent_bytes=RECURRENT_BYTES)
    one.evaluate(0, np.arange(300, dtype=np.int32))
    return 16 * one.checkpoint_bytes(0)


def test_with_the_bytes_of_16_checkpoints() -> None:
    limit = sixteen_checkpoints()
    beside = Beside("checkpoints_hybrid", policy="marginal", max_checkpoint_bytes=limit)
    evaluated = beside.evaluated()
    assert beside.peak_checkpoint_bytes <= limit
    assert evaluated <= 1.12 * INFINITE["checkpoints_hybrid"]
