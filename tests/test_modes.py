"""Modes of a request: what it may reuse and keep."""

from __future__ import annotations

import threading

import pytest

import llamakeep
from llamakeep.errors import InvalidValue
from llamakeep.modes import Mode, current_mode
from tests.test_below import KINDS, Process, tokens_of


@pytest.mark.parametrize("name", ["on", "read", "write", "off"])
def test_a_block_has_its_mode_and_the_next_one_another(name: str) -> None:
    assert current_mode() is Mode.ON
    with llamakeep.mode(name) as inside:
        assert current_mode() is inside is Mode(name)
        with llamakeep.mode(Mode.OFF):
            assert current_mode() is Mode.OFF
        assert current_mode() is inside
    assert current_mode() is Mode.ON


def test_a_block_can_be_entered_again() -> None:
    off = llamakeep.mode("off")
    for _ in range(2):
        with off, off:
            assert current_mode() is Mode.OFF
        assert current_mode() is Mode.ON


def test_an_error_inside_gives_the_mode_back() -> None:
    with pytest.raises(ZeroDivisionError), llamakeep.mode("off"):
        raise ZeroDivisionError
    assert current_mode() is Mode.ON


@pytest.mark.parametrize("wrong", ["ON", "", "readwrite", 3, None])
def test_another_word_is_an_error(wrong: object) -> None:
    with pytest.raises(InvalidValue, match="on, read, write, off"), llamakeep.mode(wrong):  # type: ignore[arg-type]
        pass


def test_a_mode_is_of_its_thread_alone() -> None:
    seen = []
    with llamakeep.mode("off"):
        other = threading.Thread(target=lambda: seen.append(current_mode()))
        other.start()
        other.join()
    assert seen == [Mode.ON]


@pytest.mark.parametrize("kind", KINDS)
def test_fault_62_each_mode_reuses_and_keeps_what_it_says(kind: dict[str, object]) -> None:
    for mode in Mode:
        process = Process(kind)
        known, new = tokens_of(200, 1), tokens_of(200, 2)
        process.ask(known)
        process.forget_live()
        n_nodes = len(process.tree)

        def ask(prompt: object, process: Process = process, mode: Mode = mode) -> llamakeep.Reuse:
            sequence = process.sequence
            reuse = sequence.resume(prompt, mode=mode)  # type: ignore[arg-type]
            sequence.advance(prompt[reuse.reused_tokens :])  # type: ignore[index]
            sequence.save()
            return reuse

        reuse = ask(known)
        assert (reuse.reused_tokens > 0) == mode.reads
        if not mode.reads:
            assert reuse.reason == f"mode is {mode.value}"
            assert ask(known).reused_tokens == 0  # what is live is not reused either
        ask(new)
        assert (len(process.tree) > n_nodes) == mode.writes
        process.tree.check()
        process.forget_live()
        assert (process.ask(new).reused_tokens > 0) == mode.writes
        process.store.close()
