"""Why prompts are read again: realistic pairs, each named rightly."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest

from llamakeep.explain import CHURN, Circumstances, Explanation, Kind, Recorded, explain
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


DOCS = Path(__file__).parent.parent / "docs" / "explain.md"


@pytest.mark.skipif(not DOCS.exists(), reason="there is no docs/explain.md")
def test_each_kind_and_field_is_documented() -> None:
    text = DOCS.read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z_-]+)`", text))
    wanted = {kind.value for kind in Kind}
    for each in (Explanation, Recorded, Circumstances):
        wanted |= {field.name for field in fields(each)}
    assert not wanted - named


@pytest.mark.skipif(not DOCS.exists(), reason="there is no docs/explain.md")
def test_the_example_says_what_it_says() -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    lines = snippet.replace("print(", "said.append(")
    said: list[str] = []
    exec(compile(lines, "docs/explain.md", "exec"), {"said": said})
    assert said[0] == "date-or-time"
    assert said[1].startswith("Move the date")
