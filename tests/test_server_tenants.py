"""Tenants of a server: what each leaves in the tiers below, and whose states are forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from llamakeep.engine import Engine, TreeKeeping
from llamakeep.explain import Kind
from llamakeep.modes import Mode
from llamakeep.server.loading import Tenants
from llamakeep.tiers import TierSettings
from llamakeep.tree import PrefixTree
from tests.engine_tools import ask, runtime_of, span

PROMPT = span(100, 1)


@contextmanager
def server(where: Path, salt: str = "", **context: Any) -> Iterator[Engine]:
    """Yield the engine of a server over this directory, whose context has these settings."""
    tiers = TierSettings.resolve(
        cache_dir=where / "cache", disk_bytes=1 << 26, salt=salt, environment={}
    )
    runtime = runtime_of("attention", n_seqs=1)
    namespace = tiers.namespace(
        runtime.traits,
        "m" * 8,
        model_name="fake.gguf",
        segment_tokens=32,
        context=context,
        build={},
    )
    store = tiers.open(1 << 24)
    tenants = Tenants(namespace, store)
    tree = PrefixTree(store, runtime.traits, segment_tokens=32)
    keeping = TreeKeeping(
        runtime, tree, tenants, all_namespaces=tenants.all, describe=tenants.described
    )
    with Engine(runtime, keeping, model_name="fake") as engine:
        yield engine


def described(where: Path) -> int:
    """Return how many namespaces have a description on disk."""
    directory = where / "cache" / "namespaces"
    return len(list(directory.iterdir())) if directory.exists() else 0


def test_a_tenant_that_nothing_is_kept_of_leaves_nothing(tmp_path: Path) -> None:
    with server(tmp_path) as engine:
        for n in range(5):
            ask(engine, PROMPT, 1, salt=f"tenant {n}", mode=Mode.OFF).wait()
            ask(engine, PROMPT, 1, salt=f"reader {n}", mode=Mode.READ).wait()
        engine.flush()
        assert described(tmp_path) == 0
        ask(engine, PROMPT, 1, salt="tenant 3").wait()
        ask(engine, PROMPT, 1).wait()
        engine.flush()
        assert described(tmp_path) == 2


def test_what_is_forgotten_leaves_no_description(tmp_path: Path) -> None:
    with server(tmp_path) as engine:
        for salt in ("", "a", "b"):
            ask(engine, PROMPT, 1, salt=salt).wait()
        engine.flush()
        assert described(tmp_path) == 3
        engine.clear_cache()
        assert described(tmp_path) == 0
        ask(engine, PROMPT, 1, salt="a").wait()
        engine.flush()
        assert described(tmp_path) == 1


def test_what_an_earlier_process_kept_of_tenants_is_forgotten(tmp_path: Path) -> None:
    with server(tmp_path, "alice") as engine:
        ask(engine, PROMPT, 1).wait()
        ask(engine, PROMPT, 1, salt="a").wait()
    with server(tmp_path, "alice") as engine:
        engine.clear_cache()
        for salt in ("", "a"):
            assert ask(engine, PROMPT, 1, salt=salt).wait().timings.cache_n == 0


@pytest.mark.parametrize("salt", ["bob", ""])
def test_fault_47_what_a_server_of_another_salt_keeps_stays(tmp_path: Path, salt: str) -> None:
    with server(tmp_path, salt) as engine:
        ask(engine, PROMPT, 1).wait()
        ask(engine, PROMPT, 1, salt="tenant").wait()
    with server(tmp_path, "alice") as engine:
        for tenant in ("", "tenant"):
            assert ask(engine, PROMPT, 1, salt=tenant).wait().timings.cache_n == 0
        engine.clear_cache()
    with server(tmp_path, salt) as engine:
        for tenant in ("", "tenant"):
            finished = ask(engine, PROMPT, 1, salt=tenant).wait()
            assert (finished.reuse.tier, finished.timings.cache_n > 90) == ("disk", True)


def test_what_is_on_its_way_is_forgotten_too(tmp_path: Path) -> None:
    with server(tmp_path) as engine:
        ask(engine, PROMPT, 1, salt="new").wait()
        engine.clear_cache()  # before anybody waited for the disk
        engine.flush()
        assert ask(engine, PROMPT, 1, salt="new").wait().timings.cache_n == 0


@pytest.mark.parametrize("salt", ["", "tenant"])
@pytest.mark.parametrize("texts", [False, True])
def test_what_is_kept_under_other_settings_is_told(tmp_path: Path, salt: str, texts: bool) -> None:
    with server(tmp_path, type_k=1) as engine:
        ask(engine, PROMPT, 1, salt=salt).wait()
        engine.flush()
        found = engine.explain(texts=texts)
        assert found is not None
        assert found.kind is Kind.FIRST_SEEN
    with server(tmp_path, type_k=8) as engine:
        ask(engine, PROMPT, 1, salt=salt, label="first").wait()
        ask(engine, PROMPT[::-1], 1, salt=salt, label="new").wait()
        ask(engine, PROMPT, 1, salt="somebody else", label="other").wait()
        first, new, other = (
            engine.explain(label, texts=texts) for label in ("first", "new", "other")
        )
        assert first is not None
        assert new is not None
        assert other is not None
        assert (first.kind, first.part) == (Kind.NAMESPACE, "context.type_k")
        assert first.reason == "kept with context.type_k=1, now 8"
        assert new.kind is Kind.FIRST_SEEN
        assert other.kind is (Kind.SALT if texts else Kind.FIRST_SEEN)
