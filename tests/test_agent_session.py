"""A coding agent's session over HTTP: what each turn evaluates is what is new in it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from openai import OpenAI

from llamakeep.explain import Kind
from tests.agent_session import Session
from tests.test_server_tool_models import TEMPLATES, real

QUIET = {"chat_template_kwargs": {"enable_thinking": False}}
SLACK = 24
"""Tokens that are evaluated again: up to eight at the end, and what comes back in other tokens."""


@pytest.mark.parametrize(
    ("kind", "template"),
    [
        ("attention", "qwen"),
        ("attention", "llama31"),
        ("attention", "gemma"),
        ("swa", "qwen"),
        ("recurrent", "qwen"),
        ("hybrid", "qwen"),
        ("hybrid-swa", "qwen"),
    ],
)
def test_each_turn_evaluates_what_is_new(
    kind: str, template: str, tiny_model: Callable[[str], Path]
) -> None:
    source = (TEMPLATES / f"{template}.jinja").read_text()
    with (
        real(tiny_model(kind), source) as (client, engine),
        OpenAI(api_key="any", base_url=f"{client.base_url}/v1", max_retries=0) as openai,
    ):
        session = Session(openai, n_rules=1, n_result=12, n_answer=12, extra=QUIET)
        turns = list(session.turns(2, 2))
        kinds = {turn.what: engine.explain(turn.request_id) for turn in turns}
    assert [turn.what for turn in turns] == [
        *("call", "call", "answer") * 2,
        "again",
        "edit",
        "compact",
        "answer",
    ]
    assert {turn.finish_reason for turn in turns if turn.what == "call"} == {"tool_calls"}
    assert turns[0].cached_tokens == 0
    grown = [pair for pair in pairwise(turns) if pair[1].what in ("call", "answer")]
    for before, turn in grown:
        assert turn.evaluated_tokens <= turn.prompt_tokens - before.prompt_tokens + SLACK, turn
    [again, edit, compact] = [turn for turn in turns if turn.what in ("again", "edit", "compact")]
    assert again.evaluated_tokens <= 9
    for turn in (edit, compact):
        assert turn.evaluated_tokens <= n_said(session) + SLACK, turn
    assert kinds["again"] is not None
    assert kinds["again"].kind is Kind.SAME
    assert kinds["compact"] is not None
    assert kinds["compact"].kind is Kind.COMPACTED


def n_said(session: Session) -> int:
    """Return how many tokens the longest message has at most: one for every two characters."""
    return max(len(str(each["content"])) for each in session.messages[1:]) // 2
