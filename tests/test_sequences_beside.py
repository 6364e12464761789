"""Several sequences over one tree: copies, ends of answers, late saving, low cells."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llamakeep.errors import RestoreFailed, StateError
from llamakeep.runtime.fake import FakeRuntime
from llamakeep.tokens import IntArray
from tests.test_sequence import KINDS, Served, joined, tokens_of


class Beside(Served):
    """Two sequences that may copy from each other; nothing is saved but what `resume` saves."""

    def ask(self, prompt: IntArray, seq_id: int = 0, *, answer: int = 0) -> int:
        """Serve a prompt and decode an answer; compare with a cold run, return what was reused."""
        sequence = self.sequences[seq_id]
        reuse = sequence.resume(prompt, others=self.sequences)
        sequence.advance(prompt[reuse.reused_tokens :])
        self.cold.clear(0)
        self.cold.evaluate(0, prompt)
        assert np.array_equal(self.runtime.logits(), self.cold.logits())
        for token in tokens_of(answer, int(prompt[-1])):
            sequence.advance(np.array([token], np.int32))
        self.tree.check()
        return reuse.reused_tokens

    def all(self, seq_id: int) -> IntArray:
        return self.sequences[seq_id].live.tokens.copy()


@pytest.mark.parametrize("kind", KINDS)
def test_a_live_prefix_is_copied_where_the_family_allows_it(kind: dict[str, Any]) -> None:
    served = Beside(kind, save_late=True)
    prompt = tokens_of(300, 1)
    served.ask(prompt, 0)
    other = joined(prompt[:200], tokens_of(40, 2))
    rolling, segments = served.runtime.traits.rolling, served.runtime.traits.segments
    writes = served.runtime.calls.writes
    # A rolling state is true at its checkpoint only, which is near the prompt's end.
    assert served.ask(other, 1) == (0 if rolling else 200)
    if not rolling:
        assert (served.runtime.calls.writes, served.tree.store.used_bytes) == (writes, 0)
    again = joined(prompt[:296], tokens_of(40, 3))
    assert served.ask(again, 1) == 296
    if segments and rolling:
        assert served.runtime.calls.copies == 1  # rows stay where they are: no segment is written
    assert served.sequences[0].live.n_tokens == 300


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_answer_is_copied_to_the_next_turn(kind: dict[str, Any]) -> None:
    served = Beside(kind)
    served.ask(tokens_of(100, 1), 0, answer=13)
    turn = joined(served.all(0), tokens_of(30, 2))
    assert served.ask(turn, 1) == 113
    assert served.sequences[0].live.n_tokens == 113


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operation", ["copy", "copy:rows", "restore", "restore:segment"])
def test_a_copy_that_fails_is_evaluated(kind: dict[str, Any], operation: str) -> None:
    served = Beside(kind)
    prompt = tokens_of(300, 1)
    served.ask(prompt, 0)

    def fail(current: str) -> None:
        if current == operation:
            raise RestoreFailed("broken") if ":" in current else StateError("broken")

    served.runtime.failures = fail
    for seed in (2, 3):
        served.ask(joined(prompt[:296], tokens_of(40, seed)), 1)
    assert served.sequences[0].live.n_tokens == 300


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keep_ends", [True, False])
def test_what_an_answer_ends_in_is_kept_for_the_next_turn(
    kind: dict[str, Any], keep_ends: bool
) -> None:
    served = Beside(kind, save_late=True, keep_ends=keep_ends)
    served.ask(tokens_of(200, 1), answer=37)
    turn = joined(served.all(0), tokens_of(30, 2))
    served.sequences[0].save()
    served.sequences[0].clear()
    rolling = served.runtime.traits.rolling
    # Without the end: the checkpoint near the prompt's end. Rows can be cut at a multiple of 8.
    expected = (237 if keep_ends else 192) if rolling else 232
    assert served.ask(turn) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_an_end_is_taken_once(kind: dict[str, Any]) -> None:
    served = Beside(kind, keep_ends=True)
    served.ask(tokens_of(200, 1), answer=3)
    served.sequences[0].save()
    reads = served.runtime.calls.reads
    served.sequences[0].save()
    assert served.runtime.calls.reads == reads


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_about_to_be_lost_is_saved_late(kind: dict[str, Any]) -> None:
    served = Beside(kind, save_late=True, keep_ends=True)
    prompt = tokens_of(200, 1)
    served.ask(prompt)
    if not served.runtime.traits.rolling:
        assert served.tree.store.used_bytes == 0  # what is live is not held twice
    served.ask(tokens_of(150, 2))
    assert served.ask(joined(prompt, tokens_of(9, 3))) == 200


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operation", [None, "restore", "restore:segment", "read_segment"])
def test_a_sequence_laid_low_goes_on_as_if_nothing_had_happened(
    kind: dict[str, Any], operation: str | None
) -> None:
    served = Beside(kind)
    prompt = tokens_of(200, 1)
    served.ask(prompt)
    if operation is not None:
        served.runtime.fail(operation)
    served.sequences[0].lay_low()
    held = served.sequences[0].live.n_tokens
    assert held in (0, 200)
    assert served.runtime.positions(0).n_tokens == held
    served.runtime._planned.clear()
    reused = served.ask(joined(prompt, tokens_of(9, 2)))
    assert reused == 200 or operation is not None


@pytest.mark.parametrize("kind", KINDS)
def test_another_prompt_can_go_on_where_it_will_leave(kind: dict[str, Any]) -> None:
    served = Beside(kind, save_late=True)
    prompt = tokens_of(300, 1)
    sequence = served.sequences[0]
    sequence.resume(prompt)
    sequence.advance(prompt[:64])
    at = sequence.expect_branch(203)
    assert at == 200
    sequence.advance(prompt[64:])
    assert served.ask(joined(prompt[:203], tokens_of(40, 2)), 1) == at
    rolling = served.runtime.traits.rolling
    assert sequence.expect_branch(100) == (0 if rolling else 96)  # that is past


def test_nothing_is_promised_that_may_not_be_kept() -> None:
    served = Beside({"family": "hybrid"})
    served.tree.max_checkpoints = 0
    served.sequences[0].resume(tokens_of(300, 1))
    assert served.sequences[0].expect_branch(203) == 0


def test_a_sequence_of_another_runtime_state_is_not_copied_from() -> None:
    """One whose rows were cleared behind its back has nothing to give."""
    served = Beside({"family": "attention"})
    prompt = tokens_of(300, 1)
    served.ask(prompt, 0)
    assert isinstance(served.runtime, FakeRuntime)
    served.runtime.clear(0)
    assert served.ask(joined(prompt[:200], tokens_of(40, 2)), 1) == 0
