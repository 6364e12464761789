"""A slot without a model: plays prompts through a `CheckpointList` and notices wrong states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from blake3 import blake3

from llamakeep.checkpoint_list import CheckpointList
from llamakeep.events import Event
from llamakeep.listed import Resume
from llamakeep.states import Checkpoint, frozen
from llamakeep.tokens import IntArray, as_tokens, common_prefix

STATE_BYTES = 4096


def state_of(tokens: Sequence[int] | IntArray, n_bytes: int = STATE_BYTES) -> Checkpoint:
    """Return a state that says which tokens it is of."""
    array = as_tokens(tokens)
    data = np.zeros(n_bytes, np.uint8)
    digest = np.frombuffer(blake3(array.tobytes()).digest(), np.uint8)[:n_bytes]
    data[: digest.size] = digest
    return Checkpoint(int(array.size), frozen(data))


def put(
    kept: CheckpointList,
    tokens: Sequence[int] | IntArray,
    *,
    task: int = 0,
    pos_min: int | None = None,
    n_bytes: int = STATE_BYTES,
    prompt_end: bool | None = None,
) -> bool:
    """Add a checkpoint after `tokens`; recurrent unless `pos_min` says where a window starts."""
    array = as_tokens(tokens)
    last = int(array.size) - 1
    return kept.create(
        state_of(array, n_bytes),
        id_task=task,
        pos_min=last if pos_min is None else pos_min,
        pos_max=last,
        n_tokens=last + 1,
        tokens=array,
        prompt_end=prompt_end,
    )


def at(kept: CheckpointList) -> list[int]:
    """Return the positions in a list, oldest first."""
    return [item.n_tokens for item in kept]


class SlotPlayer:
    """One slot of a model with a recurrent part: its memory is true at its end alone.

    Args:
        kept: Its checkpoints.
        n_batch: Most tokens of a batch.
        n_ubatch: The physical batch.
        n_bytes: Size of each state.
    """

    def __init__(
        self,
        kept: CheckpointList,
        *,
        n_batch: int = 128,
        n_ubatch: int = 64,
        n_bytes: int = STATE_BYTES,
    ) -> None:
        self.kept = kept
        self.n_batch = n_batch
        self.n_ubatch = n_ubatch
        self.n_bytes = n_bytes
        self.live = as_tokens([])
        self.task = 0
        self.batches: list[tuple[int, int]] = []
        self.taken: list[int] = []
        self.common = 0
        self.wrong: list[int] = []
        """Positions restored with the state of other tokens, or cut to without any."""

    def serve(self, tokens: Sequence[int] | IntArray, user_starts: Sequence[int] = ()) -> Resume:
        """Resume and evaluate a prompt as Slots does."""
        prompt = as_tokens(tokens)
        self.task += 1
        self.common = common_prefix(self.live, prompt)
        resume = self.kept.resume(
            self.common, prompt, live_pos_min=int(self.live.size) - 1, n_live=int(self.live.size)
        )
        if resume.checkpoint is not None:
            state = resume.checkpoint.data.data
            if not np.array_equal(
                state, state_of(prompt[: resume.checkpoint.n_tokens], self.n_bytes).data
            ):
                self.wrong.append(resume.checkpoint.n_tokens)
        elif resume.n_past not in (0, self.live.size):
            self.wrong.append(resume.n_past)
        self.live = prompt[: resume.n_past]
        self.batches, self.taken = [], []
        self._evaluate(prompt, user_starts)
        return resume

    def _evaluate(self, prompt: IntArray, user_starts: Sequence[int]) -> None:
        n_prompt = int(prompt.size)
        while self.live.size < n_prompt:
            start = int(self.live.size)
            splits = self.kept.split_points(
                start,
                n_prompt,
                n_batch=self.n_batch,
                n_ubatch=self.n_ubatch,
                user_starts=user_starts,
            )
            end = min([start + self.n_batch, n_prompt, *splits[:1]])
            wanted = self.kept.wants(
                start,
                n_prompt=n_prompt,
                n_ubatch=self.n_ubatch,
                user_starts=user_starts,
                batch_end=end,
            )
            if wanted and put(self.kept, self.live, task=self.task, n_bytes=self.n_bytes):
                self.taken.append(start)
            self.batches.append((start, end))
            self.live = prompt[:end]

    def answer(self, tokens: Sequence[int] | IntArray) -> None:
        """Generate tokens after the prompt."""
        self.live = np.concatenate([self.live, as_tokens(tokens)])


class Recorder(list[dict[str, Any]]):
    """Takes events, as a recording holds them."""

    def __call__(self, event: Event) -> None:
        if event.recorded:
            self.append(event.as_dict())
