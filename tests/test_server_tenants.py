"""Tenants of one server: what their salts keep apart."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llamakeep.fingerprint import Namespace
from llamakeep.server import loading
from llamakeep.server.loading import Tenants
from llamakeep.tiers import TierSettings


def test_a_tenant_that_asks_again_and_again_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_MOST_TENANTS", 3)
    store = TierSettings.resolve(cache_dir=tmp_path, environment={}).open(1 << 20)
    (tier,) = store.below
    introduced, introduce = list[bytes](), tier.introduce

    def note(digest: bytes, described: Any) -> None:
        introduced.append(digest)
        introduce(digest, described)

    monkeypatch.setattr(tier, "introduce", note)
    try:
        tenants = Tenants(Namespace("5" * 64, "0" * 64, 256, "attention", context={}), store)
        often = tenants("often")
        for n in range(20):
            tenants(f"once {n}")
            assert tenants("often") == often
        assert introduced.count(often) == 1
        assert len(set(introduced)) == len(introduced) == 21
        tenants("once 0")
        assert len(introduced) == 22
    finally:
        store.close(0)
