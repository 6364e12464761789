"""Chats from a seed: each kind of request is what it says, and comes back as it was written."""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from llamakeep.cli import app
from llamakeep.errors import InvalidValue, StoreError
from llamakeep.simulate.chats import (
    ASSISTANT,
    KINDS,
    SYSTEM,
    USER,
    ChatRequest,
    ChatStyle,
    chat_workload,
    make_chats,
    write_chats,
)
from llamakeep.simulate.trace import open_trace, trace_of
from llamakeep.tokens import common_prefix

CALM = ChatStyle(rewind=0, edit=0, regenerate=0, branch=0)


def of_one_chat(**likely: Any) -> list[ChatRequest]:
    style = {"rewind": 0.0, "edit": 0.0, "regenerate": 0.0, "branch": 0.0, **likely}
    return list(make_chats(ChatStyle(n_chats=1, n_turns=40, n_open=1, **style), seed=5))


def test_one_seed_makes_one_workload() -> None:
    requests = list(make_chats(seed=1))
    assert requests == list(make_chats(seed=1))
    assert requests != list(make_chats(seed=2))
    # On every machine, and with every version of Python.
    tokens = json.dumps([request.tokens for request in requests]).encode()
    assert hashlib.sha256(tokens).hexdigest()[:16] == "61f8f248e4798c48"
    assert set(Counter(request.kind for request in requests)) == set(KINDS)


def test_prompts_are_laid_out_as_templates_do_it() -> None:
    systems = set()
    for request in make_chats(seed=3):
        roles = [message[0] for message in request.messages]
        assert roles[0] == SYSTEM
        assert roles[1:] == [USER, ASSISTANT] * (len(roles) // 2 - 1) + [USER]
        assert len(request.messages[0]) == 601
        systems.add(request.messages[0])
        tokens = request.tokens
        assert tokens[-1] == ASSISTANT
        assert request.user_starts == [at for at, token in enumerate(tokens) if token == USER]
        assert sum(map(len, request.messages)) + 1 == len(tokens)
    assert len(systems) == 1


def test_messages_are_as_long_as_asked_for_on_average() -> None:
    last = list(make_chats(CALM, seed=0))
    for role, mean in ((USER, 80), (ASSISTANT, 240)):
        found = {message for each in last for message in each.messages if message[0] == role}
        assert sum(map(len, found)) / len(found) == pytest.approx(mean, rel=0.15)
        assert max(map(len, found)) <= 6 * mean + 1


def test_chats_take_turns() -> None:
    order = [request.chat for request in make_chats(ChatStyle(n_chats=7, n_open=3), seed=1)]
    assert Counter(order) == dict.fromkeys(range(7), 16)
    ends = {chat: len(order) - order[::-1].index(chat) for chat in range(7)}
    begins = {chat: order.index(chat) for chat in range(7)}
    for at in range(len(order)):
        assert sum(begins[chat] <= at < ends[chat] for chat in range(7)) <= 3
    assert any(one != other for one, other in itertools.pairwise(order))
    alone = [request.chat for request in make_chats(ChatStyle(n_chats=4, n_open=1), seed=1)]
    assert alone == sorted(alone)


def test_a_calm_chat_grows() -> None:
    requests = of_one_chat()
    assert [len(request.messages) for request in requests] == list(range(2, 81, 2))
    for before, request in itertools.pairwise(requests):
        assert request.kind == "turn"
        assert request.messages[:-2] == before.messages


def test_a_rewind_goes_on_from_an_earlier_turn() -> None:
    went_back = Counter[int]()
    requests = of_one_chat(rewind=0.5)
    for before, request in itertools.pairwise(requests):
        if request.kind != "rewind":
            continue
        n = len(request.messages) - 1
        assert request.messages[:n] == before.messages[:n]  # up to an answer
        assert request.messages[n] not in before.messages
        back = (len(before.messages) - n + 1) // 2
        assert 1 <= back < len(before.messages) // 2
        went_back[back] += 1
    assert len(went_back) > 3


def test_an_edit_changes_one_message_of_the_user() -> None:
    changed_at = set()
    requests = of_one_chat(edit=0.5)
    for before, request in itertools.pairwise(requests):
        if request.kind != "edit":
            continue
        pairs = zip(before.messages, request.messages, strict=False)
        (at,) = [at for at, (old, new) in enumerate(pairs) if old != new]
        assert request.messages[at][0] == USER
        assert len(request.messages) == len(before.messages) + 2
        changed_at.add(at)
    assert len(changed_at) > 5


def test_a_regeneration_asks_for_an_answer_again() -> None:
    requests = of_one_chat(regenerate=0.5)
    kinds = Counter[str]()
    for before, request in itertools.pairwise(requests):
        if request.kind == "regenerate":
            again = request.messages == before.messages
            assert again or request.messages == before.messages[:-2]
            kinds["same" if again else "less"] += 1
    assert kinds["same"] > 2
    assert kinds["less"] > 2


def test_two_continuations_of_a_branch_alternate() -> None:
    requests = of_one_chat(branch=0.3)
    at = next(index for index, each in enumerate(requests) if each.kind == "branch")
    one, other = requests[at].messages, requests[at + 1].messages
    assert at
    assert one[:-2] == requests[at - 1].messages
    assert one[:-1] == other[:-1]
    assert one != other
    for step in range(2, 6):
        assert requests[at + step].messages[:-2] == requests[at + step - 2].messages
    assert requests[at + 6].messages[: len(requests[at + 4].messages)] == requests[at + 4].messages


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_chats": 0}, "n_chats must be 1 or more, not 0"),
        ({"user_tokens": 1.5}, "user_tokens must be a whole number, not 1.5"),
        ({"rewind": -0.1}, "rewind must be 0 to 1, not -0.1"),
        ({"branch": float("nan")}, "branch must be 0 to 1, not nan"),
        ({"rewind": 0.5, "edit": 0.6}, "sum up to 1.25, above 1"),
    ],
)
def test_styles_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        ChatStyle(**options)


# -- as a workload ---------------------------------------------------------------------------------


def test_a_file_comes_back_as_it_was_written(tmp_path: Path) -> None:
    style = ChatStyle(n_chats=3, n_turns=6)
    requests = list(make_chats(style, seed=4))
    for name in ("chats.json", "chats.json.gz"):
        counts = write_chats(tmp_path / name, style, seed=4)
        assert counts == {kind: sum(each.kind == kind for each in requests) for kind in KINDS}
        with open_trace(tmp_path / name) as trace:
            for request, read in zip(requests, trace, strict=True):
                assert read.tokens.tolist() == request.tokens
                assert read.user_starts == tuple(request.user_starts)
    packed = (tmp_path / "chats.json.gz").read_bytes()
    assert gzip.decompress(packed) == (tmp_path / "chats.json").read_bytes()
    write_chats(tmp_path / "again.json.gz", style, seed=4)
    assert (tmp_path / "again.json.gz").read_bytes() == packed
    with pytest.raises(StoreError, match="cannot write"):
        write_chats(tmp_path / "no" / "chats.json")


def test_in_memory_it_is_the_same_workload(tmp_path: Path) -> None:
    style = ChatStyle(n_chats=3, n_turns=6)
    write_chats(tmp_path / "chats.json", style, seed=4)
    with (
        open_trace(tmp_path / "chats.json") as read,
        trace_of(chat_workload(style, seed=4), "made") as made,
    ):
        assert made.name == "made"
        assert made.footprint_tokens == read.footprint_tokens
        for one, other in zip(read, made, strict=True):
            assert one.tokens.tolist() == other.tokens.tolist()
            assert one.blocks.tolist() == other.blocks.tolist()
            assert one.user_starts == other.user_starts


def test_what_was_there_before_is_known() -> None:
    with trace_of(chat_workload(ChatStyle(n_chats=4, n_turns=10), seed=2), "x") as trace:
        before: list[Any] = []
        for request in trace:
            shared = max((common_prefix(each, request.tokens) for each in before), default=0)
            assert request.known_tokens == shared
            before.append(request.tokens)


@pytest.mark.parametrize("starts", ["0", "[1, 1]", "[2, 1]", "[4]", "[-1]", "[true]", "[0.5]"])
def test_starts_that_are_none_are_refused(tmp_path: Path, starts: str) -> None:
    path = tmp_path / "w.json"
    path.write_text(f'[{{"tokens": [1]}}, {{"tokens": [5, 6, 7, 8], "user_starts": {starts}}}]')
    with pytest.raises(InvalidValue, match=r"request 2: user_starts must be .* ascend below 4"):
        open_trace(path)


def test_the_command(tmp_path: Path) -> None:
    path = tmp_path / "chats.json"
    flags = "--seed 4 --chats 3 --turns 6 --open 2 --system-tokens 50 --user-tokens 9"
    flags += " --answer-tokens 20 --rewind 0.2 --edit 0.1 --regenerate 0.15 --branch 0.12"
    result = CliRunner().invoke(app, ["chats", str(path), *flags.split()])
    assert (result.exit_code, result.stderr) == (0, "")
    style = ChatStyle(3, 6, 2, 50, 9, 20, 0.2, 0.1, 0.15, 0.12)
    counts = write_chats(tmp_path / "own.json", style, seed=4)
    assert path.read_bytes() == (tmp_path / "own.json").read_bytes()
    told = ", ".join(f"{n} {kind}" for kind, n in counts.items())
    assert result.stdout.replace("\n", "").endswith(f"chats.json: 18 requests: {told}")
    again = CliRunner().invoke(app, ["chats", str(path), *flags.split(), "--json"])
    assert json.loads(again.stdout) == {"file": str(path), "requests": 18, "kinds": counts}
    refused = CliRunner().invoke(app, ["chats", str(path), "--rewind", "0.9", "--edit", "0.9"])
    assert refused.exit_code == 2
    assert refused.stderr.startswith("llamakeep: rewind, edit, regenerate and branch sum up to")
