"""Slots in files: every family, and every file that is not what it should be."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamakeep.engine.slotfile import SlotContent, read_slot_file, write_slot_file
from llamakeep.errors import BlobRejected, ContextOverflow, InvalidValue, StoreError
from llamakeep.modes import Mode
from llamakeep.runtime.base import Family
from llamakeep.stores.disk.files import Files
from llamakeep.stores.envelope import seal_key
from llamakeep.wholes import read_whole
from tests.engine_tools import ask, cold, engine_of, join, runtime_of, span, tenant

FAMILIES = list(Family)
MINE = tenant("")


def kept(family: Family | str = "attention") -> SlotContent:
    """Return 100 tokens and their state, with a checkpoint at 40 where there are any."""
    runtime, tokens = runtime_of(family), span(100, 1)
    runtime.evaluate(0, tokens[:40])
    checkpoints = [runtime.read_checkpoint(0)] if runtime.traits.rolling else []
    runtime.evaluate(0, tokens[40:])
    return SlotContent(tokens, read_whole(runtime, 0, 100), tuple(checkpoints))


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_written_is_read(family: Family, tmp_path: Path) -> None:
    content = kept(family)
    written = write_slot_file(tmp_path / "slot", content, MINE)
    read, back = read_slot_file(tmp_path / "slot", MINE)
    assert (
        (read.n_tokens, read.n_bytes)
        == (written.n_tokens, written.n_bytes)
        == (
            100,
            (tmp_path / "slot").stat().st_size,
        )
    )
    np.testing.assert_array_equal(back.tokens, content.tokens)
    ends = [(100, back.whole.checkpoint), *((each.position, each) for each in back.checkpoints)]
    assert len(ends) == 1 + len(content.checkpoints)
    for n_tokens, checkpoint in ends:
        other, plain = runtime_of(family), runtime_of(family)
        other.restore(0, n_tokens, back.whole.segments_to(n_tokens), checkpoint)
        other.evaluate(0, span(5, 2))
        plain.evaluate(0, join(content.tokens[:n_tokens], span(5, 2)))
        np.testing.assert_array_equal(other.logits(), plain.logits())


def test_only_its_owner_reads_it_and_nothing_else_is_left(tmp_path: Path) -> None:
    content = kept()
    path = tmp_path / "new" / "slot"
    write_slot_file(path, content, MINE)
    write_slot_file(path, content, MINE)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in path.parent.iterdir()] == ["slot"]


@pytest.mark.parametrize("where", ["create", "write", "flush", "rename"])
def test_fault_48_what_cannot_be_written_leaves_the_old_one(tmp_path: Path, where: str) -> None:
    content = kept()
    path = tmp_path / "slot"
    write_slot_file(path, content, MINE)
    before = path.read_bytes()

    class Full(Files):
        pass

    def full(*_: object) -> Any:
        raise OSError(28, "No space left on device")

    setattr(Full, where, full)
    with pytest.raises(StoreError, match="No space left"):
        write_slot_file(path, content, MINE, files=Full())
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["slot"]


def test_fault_46_links_are_followed_neither_for_reading_nor_for_writing(tmp_path: Path) -> None:
    content = kept()
    outside, link = tmp_path / "outside", tmp_path / "link"
    outside.write_bytes(b"precious")
    link.symlink_to(outside)
    with pytest.raises(BlobRejected, match="symbolic link"):
        read_slot_file(link, MINE)
    write_slot_file(link, content, MINE)
    assert outside.read_bytes() == b"precious"
    assert not link.is_symlink()


def test_fault_43_and_47_another_models_or_tenants_file_is_refused(tmp_path: Path) -> None:
    content = kept()
    write_slot_file(tmp_path / "slot", content, MINE)
    with pytest.raises(BlobRejected, match="another model, other settings, or another tenant"):
        read_slot_file(tmp_path / "slot", tenant("other"))


def test_a_file_that_was_sealed_needs_the_secret(tmp_path: Path) -> None:
    content = kept()
    path, key = tmp_path / "slot", seal_key("hush")
    write_slot_file(path, content, MINE, key=key)
    assert read_slot_file(path, MINE, key=key)[0].n_tokens == 100
    for wrong in (None, seal_key("other")):
        with pytest.raises(BlobRejected):
            read_slot_file(path, MINE, key=wrong)


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("slot") / "slot"
    content = kept("hybrid-swa")
    write_slot_file(path, content, MINE)
    return path.read_bytes()


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_fault_5_and_44_no_damaged_file_is_used(
    whole_file: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged"
    at = data.draw(st.integers(0, len(whole_file) - 1))
    kind = data.draw(st.sampled_from(["flip", "cut", "longer", "zeros"]))
    damaged = {
        "flip": whole_file[:at] + bytes([whole_file[at] ^ 1]) + whole_file[at + 1 :],
        "cut": whole_file[:at],
        "longer": whole_file + b"x" * (1 + at % 50),
        "zeros": whole_file[:at] + bytes(len(whole_file) - at),
    }[kind]
    path.write_bytes(damaged)
    if damaged == whole_file:
        return
    with pytest.raises(BlobRejected):
        read_slot_file(path, MINE)


def test_fault_39_what_is_no_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="missing cannot be read: No such file"):
        read_slot_file(tmp_path / "missing", MINE)
    (tmp_path / "directory").mkdir()
    with pytest.raises((BlobRejected, StoreError)):
        read_slot_file(tmp_path / "directory", MINE)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises((BlobRejected, StoreError)):
        read_slot_file(tmp_path / "pipe", MINE)


# -- through the engine ----------------------------------------------------------------------------


@pytest.mark.parametrize("cache", ["tree", "keep"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_slot_comes_back_and_what_it_held_is_kept(
    family: Family, cache: str, tmp_path: Path
) -> None:
    path, prompt = tmp_path / "slot", span(100, 1)
    with engine_of(family, n_seqs=1, cache=cache) as engine:
        first = ask(engine, prompt, 4)
        first.wait()
        assert engine.slot_save(0, path).n_tokens == 103
        other = ask(engine, span(150, 2), 4)
        other.wait()
        assert engine.slot_restore(0, path).n_tokens == 103
        turn = join(prompt, first.tokens, span(9, 3))
        heard = ask(engine, turn, 4)
        assert heard.wait().timings.cache_n >= 96
        assert heard.tokens == cold(family, turn, 4)
        back = ask(engine, join(span(150, 2), other.tokens, span(9, 4)), 4)
        assert back.wait().timings.cache_n >= 144


def test_fault_39_slots_that_cannot_be_saved_or_restored_say_why(tmp_path: Path) -> None:
    path = tmp_path / "slot"
    with engine_of(n_seqs=2) as engine:
        with pytest.raises(InvalidValue, match="slot 0 is empty"):
            engine.slot_save(0, path)
        for call in (engine.slot_save, engine.slot_restore):
            with pytest.raises(InvalidValue, match="slot 2 is outside 0 to 1"):
                call(2, path)
        with pytest.raises(InvalidValue, match="outside"):
            engine.slot_erase(-1)
        running = ask(engine, span(50, 1), 1500, slot=0)
        assert running.begun.wait(60)
        for busy in (engine.slot_save, engine.slot_restore):
            with pytest.raises(InvalidValue, match="slot 0 is answering"):
                busy(0, path)
        with pytest.raises(InvalidValue, match="slot 0 is answering"):
            engine.slot_erase(0)
        assert running.ticket is not None
        running.ticket.cancel()
        running.wait()
        assert engine.slot_save(0, path).n_tokens >= 50
        assert engine.slot_erase(0) >= 50
        assert engine.slots()[0].tokens.size == 0


def test_fault_42_a_file_of_a_larger_context_is_refused_and_the_slot_as_it_was(
    tmp_path: Path,
) -> None:
    path = tmp_path / "slot"
    with engine_of(n_seqs=1, n_ctx=1024) as engine:
        ask(engine, span(700, 1), 0).wait()
        engine.slot_save(0, path)
    with engine_of(n_seqs=1, n_ctx=512) as engine:
        ask(engine, span(100, 2), 0).wait()
        with pytest.raises(ContextOverflow, match="700 tokens"):
            engine.slot_restore(0, path)
        assert engine.slots()[0].tokens.size == 100
        with pytest.raises(StoreError):
            engine.slot_restore(0, tmp_path / "missing")
        assert ask(engine, join(span(100, 2), span(9, 3)), 0).wait().timings.cache_n == 96


@pytest.mark.parametrize("operation", ["restore", "restore:segment", "restore:verify"])
def test_fault_6_a_runtime_that_refuses_leaves_the_slot_empty(
    operation: str, tmp_path: Path
) -> None:
    path, model = tmp_path / "slot", runtime_of("attention", n_seqs=1)
    with engine_of(runtime=model) as engine:
        ask(engine, span(100, 1), 0).wait()
        engine.slot_save(0, path)
        engine.call(lambda: model.fail(operation))
        with pytest.raises(Exception, match="injected"):
            engine.slot_restore(0, path)
        assert engine.slots()[0].tokens.size == 0
        heard = ask(engine, span(100, 1), 4)
        heard.wait()
        assert heard.tokens == cold("attention", span(100, 1), 4)


def test_a_tenants_slot_is_restored_for_that_tenant_alone(tmp_path: Path) -> None:
    path, prompt = tmp_path / "slot", span(100, 1)
    with engine_of(n_seqs=1) as engine:
        ask(engine, prompt, 0, salt="one").wait()
        engine.slot_save(0, path, salt="one")
        with pytest.raises(BlobRejected, match="tenant"):
            engine.slot_restore(0, path)
        engine.clear_cache()
        engine.slot_restore(0, path, salt="one")
        assert ask(engine, prompt, 0).wait().timings.cache_n == 0
        engine.slot_restore(0, path, salt="one")
        assert ask(engine, prompt, 0, salt="one").wait().timings.cache_n == 96


@pytest.mark.parametrize("cache", ["tree", "upstream", "keep"])
def test_a_slot_is_saved_and_erased_for_its_tenant_alone(cache: str, tmp_path: Path) -> None:
    path = tmp_path / "slot"
    with engine_of(n_seqs=2, cache=cache) as engine:
        for owner, others in (("one", ["two", ""]), ("", ["one"])):
            ask(engine, span(100, 1), 0, salt=owner, slot=0).wait()
            for salt in others:
                with pytest.raises(InvalidValue, match="with this salt") as caught:
                    engine.slot_save(0, path, salt=salt)
                assert "one" not in str(caught.value)
                with pytest.raises(InvalidValue, match="with this salt"):
                    engine.slot_erase(0, salt=salt)
            assert not path.exists()
            assert engine.slots()[0].tokens.size == 100
            assert engine.slot_save(0, path, salt=owner).n_tokens == 100
            assert engine.slot_erase(0, salt=owner) == 100
            path.unlink()
        assert engine.slot_erase(0, salt="two") == 0  # there is nothing of anybody


@pytest.mark.parametrize("family", FAMILIES)
def test_a_restored_slot_serves_prompts_that_leave_it_before_its_end(
    family: Family, tmp_path: Path
) -> None:
    path, prompt = tmp_path / "slot", span(300, 1)
    for again in (False, True):
        with engine_of(family, n_seqs=2) as engine:
            if not again:
                ask(engine, prompt, 40, user_starts=(100, 200), slot=0).wait()
                engine.slot_save(0, path)
                continue
            engine.slot_restore(0, path)
            for turn in (join(prompt[:296], span(20, 2)), join(prompt[:204], span(20, 3))):
                heard = ask(engine, turn, 4)
                assert heard.wait().timings.cache_n >= turn.size // 100 * 100 - 4
                assert heard.tokens == cold(family, turn, 4)


def test_a_slot_is_restored_beside_one_that_fills_the_context(tmp_path: Path) -> None:
    path = tmp_path / "slot"
    with engine_of(n_seqs=2, n_ctx=1024, park_idle=False) as engine:
        ask(engine, span(700, 1), 0, slot=1).wait()
        engine.slot_save(1, path)
        engine.slot_erase(1)
        ask(engine, span(700, 2), 0, slot=0).wait()
        engine.slot_restore(1, path)
        assert ask(engine, join(span(700, 1), span(9, 3)), 0).wait().timings.cache_n >= 696
        assert ask(engine, join(span(700, 2), span(9, 3)), 0).wait().timings.cache_n >= 696


def test_what_was_restored_is_kept_whatever_came_before(tmp_path: Path) -> None:
    path = tmp_path / "slot"
    with engine_of(n_seqs=1) as engine:
        ask(engine, span(200, 1), 0).wait()
        engine.slot_save(0, path)
        engine.clear_cache()
        ask(engine, span(50, 2), 0, mode=Mode.OFF).wait()
        engine.slot_restore(0, path)
        ask(engine, span(100, 3), 0).wait()
        assert ask(engine, span(200, 1), 0).wait().timings.cache_n >= 192
