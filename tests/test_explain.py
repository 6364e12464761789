"""Why prompts are read again: realistic pairs, each named rightly."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from llamakeep.explain import CHURN, Explanation, Kind, explain
from tests.explain_pairs import PAIRS, Pair


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.name)
def test_none_is_misnamed(pair: Pair) -> None:
    found = explain(pair.before, pair.after)
    assert found.kind is pair.kind, found
    if pair.part is not None:
        assert found.part == pair.part
    assert found.reason
    assert found.advice
    assert Explanation.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_there_are_pairs_of_each_kind() -> None:
    names = [pair.name for pair in PAIRS]
    assert len(set(names)) == len(names)
    counted = Counter(pair.kind for pair in PAIRS)
    assert all(counted[kind] >= 2 for kind in (*CHURN, Kind.UNKNOWN, Kind.NEW_TEXT, Kind.SAME))
