"""Checkpoint policies in replays: by hand, each option as the product takes it, and references."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from llamakeep.cli import app
from llamakeep.errors import InvalidValue
from llamakeep.policy import Policy, policy_names
from llamakeep.runtime.base import Family
from llamakeep.simulate.chats import ChatStyle, chat_workload, write_chats
from llamakeep.simulate.experiment import Experiment, run
from llamakeep.simulate.fleet import Fleet
from llamakeep.simulate.foresight import Foresight
from llamakeep.simulate.greedy import Clairvoyant, clairvoyant, partings
from llamakeep.simulate.replay import Model, PromptDriver, TraceClock, TreeDriver, replay
from llamakeep.simulate.rules import CheckpointRules
from llamakeep.simulate.trace import Trace, trace_of
from llamakeep.simulate.workload import Workload
from llamakeep.stores.memory import MemoryStore
from llamakeep.tokens import as_tokens
from tests.simulate_tools import blocks_trace, line, put_lines, random_prompts

HYBRID = Model(1, Family.HYBRID, 10)
SWA = Model(1, Family.SWA, 10, 8)
SMALL = ChatStyle(n_chats=3, n_turns=12, n_open=2, system_tokens=60, user_tokens=9)


def chats(*prompts: tuple[Sequence[int], Sequence[int]]) -> Trace:
    """Prompts, and where user messages start in them."""
    tokens = [as_tokens(list(prompt)) for prompt, _ in prompts]
    return trace_of(Workload(tokens, [tuple(starts) for _, starts in prompts]), "chats")


@contextmanager
def small_chats() -> Iterator[Trace]:
    with trace_of(chat_workload(SMALL, seed=6), "small") as trace:
        yield trace


def in_one_slot(
    trace: Trace, model: Model = HYBRID, **rules: Any
) -> tuple[list[int], list[list[int]]]:
    """What is reused of each prompt without a cache, and where the slot has checkpoints then."""
    clock = TraceClock()
    driver = PromptDriver(
        model.runtime(trace.longest_tokens),
        0,
        policy="oldest",
        clock=clock,
        checkpoints=CheckpointRules(**rules),
    )
    reused, listed = [], []
    for request in trace:
        clock.go_to(request.timestamp)
        reused.append(driver.serve(request))
        listed.append(sorted(each.n_tokens for each in driver._slots.slots[0].checkpoints))
    driver.check()
    return reused, listed


# -- by hand ---------------------------------------------------------------------------------------

FIRST = list(range(110))
PARTS_AT_100 = [*FIRST[:100], *range(1000, 1040)]
PARTS_AT_80 = [*PARTS_AT_100[:80], *[7] * 10]


@pytest.mark.parametrize(
    ("policy", "first", "second", "reused"),
    [
        # For 90 goes 10, for 108 goes 30; 70 goes for 138, and nothing is left before 80.
        ("oldest", [70, 90, 108], [90, 100, 138], [0, 90, 0]),
        ("lru", [70, 90, 108], [90, 100, 138], [0, 90, 0]),
        # Of 30 and 70, each 20 from a neighbour, goes the older one; then 90, 18 from 108. Of 70
        # and 100, each 30 from a neighbour, goes 70.
        ("neighbor-distance", [10, 70, 108], [10, 100, 138], [0, 70, 10]),
        # 30 and 70 have 20 * 40, and 30 is older; 70 has 60 * 20, more than the 20 * 18 of 90.
        # Then 70 has 60 * 30, more than the 30 * 38 of 100.
        ("neighbor-gap", [10, 70, 108], [10, 70, 138], [0, 70, 70]),
        # To lose 10 costs 10 tokens, less than 20 and 40; then 90 costs 20, less than 30 and 40.
        # The second uses 70, which then is worth twice its 40; of 30 and 100 the older one goes.
        ("marginal", [30, 70, 108], [70, 100, 138], [0, 70, 70]),
    ],
)
def test_what_goes_by_hand(
    policy: str, first: list[int], second: list[int], reused: list[int]
) -> None:
    """Three fit. Taken are the starts of messages, and two tokens before the end."""
    requests = (
        (FIRST, (10, 30, 70, 90)),
        (PARTS_AT_100, (10, 30, 70, 90, 100)),
        (PARTS_AT_80, ()),
    )
    with chats(*requests) as trace:
        rules = {"restore": "prefix", "min_step": 0, "policy": policy}
        found, listed = in_one_slot(trace, limit=3, **rules)
        assert listed[:2] == [first, second]
        assert found == reused
        # Bytes are a number of checkpoints where all are of one size.
        assert in_one_slot(trace, limit_bytes=39, **rules) == (found, listed)
        told = CheckpointRules(limit=3, **rules)  # type: ignore[arg-type]
        outcome = replay(trace, "prompt", capacity_bytes=0, model=HYBRID, checkpoints=told)
        assert outcome.reused_tokens == sum(reused)
        assert outcome.reevaluated_tokens == 100 - reused[1] + 80 - reused[2]
        assert outcome.checkpoint_policy == policy


def test_a_use_counts_by_tokens_per_byte() -> None:
    second = [*FIRST[:80], *range(1000, 1060)]
    third = [*second, *range(2000, 2040)]
    requests = (
        (FIRST, (10, 30, 70, 90)),
        (second, (10, 30, 70, 80)),
        (third, (10, 30, 70, 80, 140)),
        ([*second[:90], *[7] * 10], ()),
    )
    rules = {"restore": "prefix", "limit": 3, "min_step": 0}
    with chats(*requests) as trace:
        # The second used 70: it counts twice, as 140 does, and more than 80, and than 138 after
        # a second. By age it is the first to go.
        found, listed = in_one_slot(trace, policy="tokens-per-byte", **rules)
        assert listed[1:3] == [[70, 80, 138], [70, 140, 178]]
        assert found == [0, 70, 140, 70]
        assert in_one_slot(trace, policy="oldest", **rules)[0] == [0, 70, 140, 0]


def test_llama_server_drops_what_is_close() -> None:
    """A full list, or one short of it, loses what is within a step of the one before."""
    growing = [(range(length), ()) for length in (40, 60, 80, 100, 120)]
    with chats(*growing, ([*range(45), *[7] * 9], ())) as trace:
        rules = {"limit": 4, "min_step": 30}
        found, listed = in_one_slot(trace, policy="upstream", **rules)
        # Each takes two: where it goes on, and four tokens before its end. The first one stays,
        # and so does what a task has just taken itself.
        assert listed[:3] == [[36], [36, 40, 56], [36, 60, 76]]
        assert listed[3:5] == [[36, 76, 80, 96], [36, 76, 100, 116]]
        assert found == [0, 40, 60, 80, 100, 36]
        found, listed = in_one_slot(trace, policy="oldest", **rules)
        assert listed[4] == [80, 96, 100, 116]
        assert found[5] == 0


def test_which_is_restored_by_hand() -> None:
    requests = ((FIRST, (30, 70, 90)), ([*FIRST[:80], *[7] * 30], ()), (FIRST[:70], ()))
    with chats(*requests) as trace:
        # 80 has none, and `exact` goes nowhere else. Then 68 is asked for, where none is; by
        # llama-server's rule 70 is no good either: its last token must be evaluated again.
        assert in_one_slot(trace, restore="exact", min_step=0)[0] == [0, 0, 0]
        assert in_one_slot(trace, restore="prefix", min_step=0)[0] == [0, 70, 30]
        assert in_one_slot(trace, restore="upstream", min_step=0)[0] == [0, 70, 30]
    with chats((FIRST, (30, 70, 90)), ([*FIRST[:70], *[7] * 30], ())) as trace:
        assert in_one_slot(trace, restore="exact", min_step=0)[0] == [0, 70]
        # llama-server's rule: a window that ends right where the prompt parts is none.
        assert in_one_slot(trace, SWA, restore="upstream", min_step=0)[0] == [0, 30 - 1]
        assert in_one_slot(trace, SWA, restore="prefix", min_step=0)[0] == [0, 70]


def test_entries_with_all_the_last_or_no_checkpoints() -> None:
    """A chat comes back and goes back: what it finds is what its entry had."""
    other = [*range(5000, 5100)]
    back = [*FIRST[:80], *[7] * 10]
    with chats((FIRST, (30, 70)), (other, ()), (back, ())) as trace:
        found = {}
        for keep in ("all", "last", "none"):
            rules = CheckpointRules(mode="keep", restore="prefix", min_step=0, keep=keep)  # type: ignore[arg-type]
            outcome = replay(trace, "prompt", capacity_bytes=9999, model=HYBRID, checkpoints=rules)
            found[keep] = outcome.reused_tokens
        # The last one is at 108, behind where it parts.
        assert found == {"all": 70, "last": 0, "none": 0}
        # An entry of 110 rows, a state and three checkpoints, and one of 100, a state and one.
        small = CheckpointRules(restore="prefix", min_step=0)
        for capacity, reused in ((150 + 120 - 1, 0), (150 + 120, 70)):
            outcome = replay(
                trace, "prompt", capacity_bytes=capacity, model=HYBRID, checkpoints=small
            )
            assert outcome.reused_tokens == reused


# -- what the product is told ----------------------------------------------------------------------


def test_every_rule_reaches_the_prompt_cache() -> None:
    for policy in policy_names("checkpoints"):
        rules = CheckpointRules("keep", policy, "exact", "last", 5, 55, 123)
        driver = PromptDriver(
            HYBRID.runtime(64), 100, policy="lru", clock=TraceClock(), checkpoints=rules
        )
        listed = driver._slots.slots[0].checkpoints
        assert (listed.policy_name, driver.checkpoint_policy) == (policy, policy)
        assert (listed.restore, listed.limit, listed.limit_bytes) == ("exact", 5, 55)
        assert listed.min_step == 123
        assert (driver.cache.mode, driver._slots.mode) == ("keep", "keep")
        assert driver.cache._keep_checkpoints == "last"


def test_without_rules_the_product_decides() -> None:
    driver = PromptDriver(HYBRID.runtime(64), 100, policy="lru", clock=TraceClock())
    listed = driver._slots.slots[0].checkpoints
    assert (listed.policy_name, listed.restore, listed.limit) == ("upstream", "upstream", 32)
    assert (listed.min_step, driver.cache.mode, driver.cache._keep_checkpoints) == (
        8192,
        "upstream",
        "all",
    )
    assert CheckpointRules().most_of_slot(10) == 32
    assert CheckpointRules(limit_bytes=59).most_of_slot(10) == 5
    assert CheckpointRules(limit=3, limit_bytes=59).most_of_slot(10) == 3


def test_every_rule_reaches_the_tree() -> None:
    rules = CheckpointRules(limit=5, limit_bytes=55, min_step=123)
    driver = TreeDriver(
        HYBRID.runtime(64),
        MemoryStore(100),
        segment_tokens=8,
        policy="lru",
        clock=TraceClock(),
        checkpoints=rules,
    )
    assert (driver.tree.max_checkpoints, driver.tree.max_checkpoint_bytes) == (5, 55)
    assert driver._sequence._min_step == 123


def test_the_tree_takes_checkpoints_where_messages_start() -> None:
    prompt = [*range(64)]
    with chats((prompt, (16, 32)), ([*prompt[:40], *[7] * 24], ())) as trace:
        outcome = replay(
            trace, capacity_bytes=999, model=HYBRID, checkpoints=CheckpointRules(min_step=8)
        )
        assert outcome.reused_tokens == 32
        assert outcome.reevaluated_tokens == 8
        assert outcome.checkpoint_policy == ""
        none = CheckpointRules(limit=0)
        found = replay(trace, capacity_bytes=999, model=HYBRID, checkpoints=none)
        assert (found.reused_tokens, found.reevaluated_tokens) == (0, 40)


def test_the_window_reaches_the_runtime() -> None:
    assert SWA.runtime(64).traits.n_swa == 8
    with pytest.raises(InvalidValue, match="n_swa must be 1 or more"):
        Model(1, Family.SWA, 10, 0)


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"restore": "some"}, "restore must be one of upstream, exact, prefix, not 'some'"),
        ({"keep": "two"}, "keep must be one of all, last, none, not 'two'"),
        ({"mode": "on"}, "mode must be one of upstream, keep, not 'on'"),
        ({"policy": "best"}, "unknown policy 'best'"),
        ({"limit": -1}, "limit must be 0 or more, not -1"),
        ({"limit_bytes": -1}, "limit_bytes must be 0 or more, not -1"),
        ({"min_step": 0.5}, "min_step must be a whole number, not 0.5"),
    ],
)
def test_rules_that_cannot_be(rules: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValue, match=message):
        CheckpointRules(**rules)


@pytest.mark.parametrize(
    ("cache", "model", "rules", "message"),
    [
        ("tree", HYBRID, {"restore": "exact"}, "restore is for the prompt cache alone"),
        ("tree", HYBRID, {"mode": "keep"}, "mode is for the prompt cache alone"),
        ("tree", Model(), {"limit": 4}, "attention family has no checkpoints"),
        ("prompt", Model(), {"keep": "all"}, "attention family has no checkpoints"),
    ],
)
def test_rules_of_others(cache: Any, model: Model, rules: dict[str, Any], message: str) -> None:
    with blocks_trace([1]) as trace, pytest.raises(InvalidValue, match=message):
        replay(trace, cache, capacity_bytes=9, model=model, checkpoints=CheckpointRules(**rules))


# -- references ------------------------------------------------------------------------------------


def test_foresight_by_hand() -> None:
    """Two fit. Of 30, 70 and 90 the next but one request wants 30, and nobody the others."""
    requests = (
        (FIRST, (30, 70, 90)),
        ([*FIRST, *range(200, 220)], ()),
        ([*FIRST[:40], *[7] * 50], ()),
    )
    rules = {"restore": "prefix", "limit": 2, "min_step": 0}
    with chats(*requests) as trace:
        found, listed = in_one_slot(trace, policy=Foresight(trace), **rules)
        assert listed[0] == [30, 108]  # 70, then 90, each of no use
        assert found == [0, 110, 30]
        assert in_one_slot(trace, policy="oldest", **rules)[0] == [0, 110, 0]
        exact = {**rules, "restore": "exact"}
        assert in_one_slot(trace, policy=Foresight(trace, exact=True), **exact)[1][0] == [90, 108]


def test_foresight_drops_no_worse_than_policies_do() -> None:
    for seed in range(3):
        style = ChatStyle(n_chats=2, n_turns=20, n_open=1, system_tokens=60)
        with trace_of(chat_workload(style, seed=seed), "x") as trace:
            found = {}
            for policy in (*policy_names("checkpoints"), cast(Policy, Foresight(trace))):
                rules = CheckpointRules(policy=policy, restore="prefix", limit=4)
                outcome = replay(trace, "prompt", capacity_bytes=0, model=HYBRID, checkpoints=rules)
                found[outcome.checkpoint_policy] = outcome.reevaluated_tokens
            assert min(found, key=lambda name: found[name]) == "foresight"


def test_the_clairvoyant_with_few_checkpoints_by_hand() -> None:
    with blocks_trace([1, 2, 3], [1, 2, 4], [1, 5], [1, 2, 3], [6]) as trace:
        model = Model(1, Family.HYBRID, 3)

        def reused(**limits: int) -> int:
            return clairvoyant(trace, capacity_bytes=99, model=model, **limits).reused_tokens

        # After 1, 2 and 3 a checkpoint is wanted. 3 is worth least: a token, in three requests,
        # for a row and a checkpoint. 2 saves a token more than 1 at once, 1 one later.
        assert reused() == reused(limit=3) == reused(limit_bytes=9) == 2 + 1 + 3
        assert reused(limit=2) == reused(limit_bytes=8) == 2 + 1
        # Without 3 it is 1 that is worth less: a token in two requests, against one in one.
        assert reused(limit=1) == reused(limit_bytes=3) == 2
        assert reused(limit=0) == reused(limit_bytes=2) == 0


def test_the_clairvoyant_keeps_to_its_limits() -> None:
    for seed in range(10):
        prompts = [as_tokens(each) for each in random_prompts(np.random.default_rng(seed), n=40)]
        with trace_of(Workload(prompts), "x") as trace:
            limited = Clairvoyant(9999, HYBRID, partings(trace), limit=2, limit_bytes=45)
            for index, request in enumerate(trace):
                limited.serve(index, request)
                kept = [block for block in request.blocks.tolist() if block in limited._points]
                assert len(kept) <= 2
                assert len(limited._points) <= 4
            full = clairvoyant(trace, capacity_bytes=9999, model=HYBRID)
            some = clairvoyant(trace, capacity_bytes=9999, model=HYBRID, limit=2, limit_bytes=45)
            assert some.reused_tokens <= full.reused_tokens
            assert full.reevaluated_tokens == 0
            assert some.reevaluated_tokens == full.reused_tokens - some.reused_tokens


def test_the_clairvoyant_has_the_memory_of_the_slot() -> None:
    with small_chats() as trace:
        report = run(
            trace,
            Experiment(
                "prompt",
                capacities=["0"],
                model=HYBRID,
                checkpoints=CheckpointRules(limit=4, limit_bytes=35),
                checkpoint_policies=["marginal", "foresight"],
            ),
        )
        (best,) = report.best
        slot_bytes = trace.longest_tokens + 10 + 3 * 10
        same = clairvoyant(trace, capacity_bytes=slot_bytes, model=HYBRID, limit=3)
        assert (best.reused_tokens, best.capacity_bytes) == (same.reused_tokens, 0)
        assert best.reused_tokens > max(each.reused_tokens for each in report.outcomes)
        assert [each.checkpoint_policy for each in report.outcomes] == ["marginal", "foresight"]


# -- on the command line ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chats") / "chats.json"
    write_chats(path, SMALL, seed=6)
    return path


FLAGS = ("--family", "swa", "--checkpoint-bytes", 10, "--bytes-per-token", 1, "--n-swa", 20)


def cli(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)])


def rows_of(*arguments: object) -> list[dict[str, Any]]:
    result = cli(*arguments, "--json", "--no-bound")
    assert (result.exit_code, result.stderr) == (0, "")
    return list(json.loads(result.stdout)["results"])


@pytest.mark.parametrize(
    ("flags", "rules"),
    [
        ("--restore exact", {"restore": "exact"}),
        ("--keep-checkpoints none", {"keep": "none"}),
        ("--prompt-mode keep", {"mode": "keep"}),
        ("--ctx-checkpoints 3", {"limit": 3}),
        ("--max-checkpoints 3", {"limit": 3}),
        ("--max-checkpoint-bytes 30B", {"limit_bytes": 30}),
        ("--checkpoint-min-step 0", {"min_step": 0}),
        ("--checkpoint-policy marginal --ctx-checkpoints 3", {"policy": "marginal", "limit": 3}),
    ],
)
def test_options_are_rules(workload: Path, flags: str, rules: dict[str, Any]) -> None:
    with small_chats() as trace:
        model = Model(1, Family.SWA, 10, 20)
        common: dict[str, Any] = {"capacity_bytes": 4000, "model": model}
        outcome = replay(trace, "prompt", checkpoints=CheckpointRules(**rules), **common)
        plain = replay(trace, "prompt", **common)
    (row,) = rows_of(workload, *FLAGS, "--cache", "prompt", "--capacity", 4000, *flags.split())
    assert row["reevaluated_tokens"] == outcome.reevaluated_tokens
    assert row["reevaluated_tokens"] != plain.reevaluated_tokens
    assert row["checkpoint_policy"] == outcome.checkpoint_policy


def test_options_of_the_tree(workload: Path) -> None:
    (plain,) = rows_of(workload, *FLAGS, "--capacity", 4000)
    assert plain["checkpoint_policy"] is None
    for flags in ("--ctx-checkpoints 1", "--max-checkpoint-bytes 30B", "--checkpoint-min-step 0"):
        (row,) = rows_of(workload, *FLAGS, "--capacity", 4000, *flags.split())
        assert row["reevaluated_tokens"] != plain["reevaluated_tokens"]


def test_the_table_has_a_row_for_each_pair(workload: Path, tmp_path: Path) -> None:
    flags = "--cache prompt --capacity 4000 --policy lru --policy oldest --ctx-checkpoints 3"
    flags += " --checkpoint-policy neighbor-gap --checkpoint-policy marginal:half_life=60"
    plot = tmp_path / "x.png"
    result = cli(workload, *FLAGS, *flags.split(), "--plot", plot)
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[2].split()[:6] == [
        "policy",
        "checkpoints",
        "capacity",
        "saved",
        "hit",
        "evaluated",
    ]
    assert lines[2].split()[6] == "again"
    assert [row.split()[:2] for row in lines[3:7]] == [
        ["lru", "neighbor-gap"],
        ["lru", "marginal:half_life=60"],
        ["oldest", "neighbor-gap"],
        ["oldest", "marginal:half_life=60"],
    ]
    assert lines[7].startswith("clairvoyant ")
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--cache prompt --restore some", "--restore must be one of upstream, exact, prefix, not"),
        ("--cache prompt --keep-checkpoints two", "--keep-checkpoints must be one of all, last,"),
        ("--cache prompt --prompt-mode on", "--prompt-mode must be one of upstream, keep, not"),
        ("--cache prompt --checkpoint-policy best", "unknown policy 'best'; known: lru, marginal,"),
        ("--cache prompt --checkpoint-policy lru:half_life=1", "has no option 'half_life'"),
        ("--restore exact", "--restore is for --cache prompt; the tree has --policy alone"),
        ("--keep-checkpoints all", "--keep-checkpoints is for --cache prompt"),
        ("--checkpoint-policy lru", "--checkpoint-policy is for --cache prompt"),
        ("--prompt-mode keep", "--prompt-mode is for --cache prompt"),
        ("--max-checkpoint-bytes some", "a size is written like"),
    ],
)
def test_what_cannot_be_meant(workload: Path, flags: str, message: str) -> None:
    result = cli(workload, *FLAGS, *flags.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "flags",
    [
        "--ctx-checkpoints 4",
        "--max-checkpoint-bytes 4",
        "--checkpoint-min-step 4",
        "--cache prompt --restore exact",
        "--cache prompt --keep-checkpoints all",
        "--cache prompt --checkpoint-policy lru",
    ],
)
def test_attention_has_no_checkpoints(workload: Path, flags: str) -> None:
    result = cli(workload, *flags.split())
    flag = flags.split()[-2]
    assert result.exit_code == 2
    assert f"the attention family has no checkpoints: leave out {flag}" in result.stderr


def test_replicas_do_without_rules(workload: Path) -> None:
    fleet = ("--tiers", "ram=4000,shared=9000", "--replicas", 2)
    result = cli(workload, *FLAGS, *fleet, "--ctx-checkpoints", 3)
    assert result.exit_code == 2
    assert "--replicas do without --ctx-checkpoints" in result.stderr
    with small_chats() as trace:
        rules = CheckpointRules(limit=3)
        asked = Experiment(fleets=[Fleet(2)], model=HYBRID, checkpoints=rules)
        with pytest.raises(InvalidValue, match="they take no rules"):
            run(trace, asked)


def test_only_windows_have_a_size(workload: Path) -> None:
    result = cli(workload, "--family", "hybrid", "--checkpoint-bytes", 10, "--n-swa", 20)
    assert "the hybrid family has no window: leave out --n-swa" in result.stderr


def test_a_trace_of_blocks_knows_what_was_there_before(tmp_path: Path) -> None:
    """Full blocks that came before, and with tails also what came before of others."""
    from llamakeep.simulate.trace import open_trace

    path = put_lines(
        tmp_path / "t.jsonl",
        line([1, 2], [4, 2]),
        line([1, 2], [4, 4]),
        line([1, 2, 3], [4, 4, 1]),
        line([1, 2], [4, 3]),
    )
    with open_trace(path) as trace:
        assert [request.known_tokens for request in trace] == [0, 4, 8, 4]
        assert all(request.user_starts == () for request in trace)
    with open_trace(path, tails=True) as trace:
        assert [request.known_tokens for request in trace] == [0, 6, 8, 7]


def test_a_turn_goes_on_though_a_trace_has_another_tail(tmp_path: Path) -> None:
    from llamakeep.simulate.trace import open_trace

    ids = ([1, 2, 90], [1, 2, 3, 91], [1, 2, 3, 4, 92], [1, 2, 93])
    lines = [line(each, [4] * (len(each) - 1) + [2]) for each in ids]
    with open_trace(put_lines(tmp_path / "t.jsonl", *lines)) as trace:
        reused, listed = in_one_slot(trace, restore="prefix")
        # What is live is gone on with. The last one goes back, to two tokens before an end.
        assert reused == [0, 8, 12, 6]
        assert listed[2] == [6, 10, 14]
        outcome = replay(
            trace,
            "prompt",
            capacity_bytes=0,
            model=HYBRID,
            checkpoints=CheckpointRules(restore="prefix"),
        )
        assert outcome.input_tokens == 10 + 14 + 18 + 10
        assert outcome.reevaluated_tokens == 2
