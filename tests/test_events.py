"""What llama-server reports: keys as in recordings, lines in its own words."""

from __future__ import annotations

import dataclasses
import gzip
import json
import logging
from pathlib import Path

import pytest

from llamakeep import events
from llamakeep.events import MIB, Event

RECORDINGS = Path(__file__).parent / "data" / "upstream"
PLACE = "pos_min = 9, pos_max = 19, n_tokens = 20"

HALF = MIB // 2
CASES: list[tuple[Event, dict[str, object], str]] = [
    (
        events.SlotById(1),
        {"event": "slot_by_id", "slot": 1},
        "selected slot by id (1)",
    ),
    (
        events.SlotBySimilarity(0, 0.5, 0.1, 0.05612),
        {
            "event": "slot_by_similarity",
            "slot": 0,
            "f_sim": 0.5,
            "threshold": 0.1,
            "f_keep": 0.056,
        },
        "selected slot by LCP similarity, f_sim_best = 0.500 (> 0.100 thold), f_keep = 0.056",
    ),
    (
        events.SlotByLru(1, 123456),
        {"event": "slot_by_lru", "slot": 1},
        "selected slot by LRU, t_last = 123456",
    ),
    (
        events.PromptCleared(1, 12),
        {"event": "prompt_cleared", "slot": 1, "n_tokens": 12},
        "clearing prompt with 12 tokens",
    ),
    (
        events.SlotPurged(1, 12),
        {"event": "slot_purged", "slot": 1, "n_tokens": 12},
        "purging slot 1 with 12 tokens",
    ),
    (
        events.SavingPrompt(22392340, 178, HALF),
        {"event": "saving_prompt", "n_tokens": 178, "mib": 21.355},
        " - saving prompt with length 178, total state size = 21.355 MiB (draft: 0.500 MiB)",
    ),
    (
        events.SavingIdleSlot(2),
        {"event": "saving_idle_slot", "slot": 2},
        "saving idle slot to prompt cache",
    ),
    (
        events.AlreadyCached(),
        {"event": "prompt_already_cached"},
        " - prompt is already in the cache, skipping",
    ),
    (
        events.OverLimitSkipped(3 * MIB, 2 * MIB),
        {"event": "over_limit_skipped", "mib": 3.0, "limit_mib": 2.0},
        " - prompt state size 3.000 MiB exceeds cache size limit 2.000 MiB, skipping",
    ),
    (
        events.ObsoleteRemoved(51),
        {"event": "obsolete_removed", "n_tokens": 51},
        " - removing obsolete cached prompt with length 51",
    ),
    (
        events.AllocationFailed("std::bad_alloc"),
        {"event": "allocation_failed"},
        "failed to allocate memory for prompt cache state: std::bad_alloc",
    ),
    (
        events.LoadBase(-1.0, 0.0),
        {"event": "load_base", "f_keep": -1.0, "f_sim": 0.0},
        " - looking for better prompt, base f_keep = -1.000, f_sim = 0.000",
    ),
    (
        events.LoadFound(1.0, 0.3252),
        {"event": "load_found", "f_keep": 1.0, "f_sim": 0.325},
        " - found better prompt with f_keep = 1.000, f_sim = 0.325",
    ),
    (
        events.LoadFailed(0),
        {"event": "load_failed", "slot": 0},
        "failed to load prompt from cache",
    ),
    (
        events.EvictedForRoom(HALF),
        {"event": "evicted_oldest_for_room", "mib": 0.5},
        " - making room for prompt cache entry, removing oldest entry (size = 0.500 MiB)",
    ),
    (
        events.EvictedOverLimit(HALF),
        {"event": "evicted_over_limit", "mib": 0.5},
        " - cache size limit reached, removing oldest entry (size = 0.500 MiB)",
    ),
    (
        events.EvictedOverTokenLimit(HALF, 100, 250),
        {
            "event": "evicted_over_token_limit",
            "limit_tokens": 100,
            "limit_tokens_now": 250,
            "mib": 0.5,
        },
        " - cache token limit (100, est: 250) reached, removing oldest entry (size = 0.500 MiB)",
    ),
    (
        events.LimitReduced(HALF),
        {"event": "limit_reduced", "mib": 0.5},
        " - cache size limit reduced to 0.500 MiB",
    ),
    (
        events.CacheState(299174461, 7, 8192 * MIB, 262144, 262144),
        {"event": "cache_state", "prompts": 7, "mib": 285.315},
        " - cache state: 7 prompts, 285.315 MiB (limits: 8192.000 MiB, 262144 tokens, 262144 est)",
    ),
    (
        events.CachedPrompt(HALF, "0x1", 51, 2),
        {"event": "cached_prompt", "name": "0x1", "n_tokens": 51, "checkpoints": 2, "mib": 0.5},
        "   - prompt 0x1:      51 tokens, checkpoints:  2,     0.500 MiB",
    ),
    (
        events.CheckpointCreated(HALF, 9, 19, 20, 3, 32),
        {
            "event": "checkpoint_created",
            "count": 3,
            "limit": 32,
            "pos_min": 9,
            "pos_max": 19,
            "n_tokens": 20,
            "mib": 0.5,
        },
        f"created context checkpoint 3 of 32 ({PLACE}, size = 0.500 MiB)",
    ),
    (
        events.CheckpointEvictedClose(HALF, 9, 19, 20),
        {"event": "checkpoint_evicted_close", "pos_min": 9, "pos_max": 19, "n_tokens": 20},
        f"erasing context checkpoint too close to an earlier one ({PLACE}, size = 0.500 MiB)",
    ),
    (
        events.CheckpointEvictedOldest(HALF, 9, 19, 20),
        {"event": "checkpoint_evicted_oldest", "pos_min": 9, "pos_max": 19, "n_tokens": 20},
        f"erasing old context checkpoint ({PLACE}, size = 0.500 MiB)",
    ),
    (
        events.CheckpointEvicted(HALF, 9, 19, 20, "lru"),
        {
            "event": "checkpoint_evicted",
            "policy": "lru",
            "pos_min": 9,
            "pos_max": 19,
            "n_tokens": 20,
        },
        f"erasing context checkpoint by policy lru ({PLACE}, size = 0.500 MiB)",
    ),
    (
        events.CheckpointRefused(HALF, 9, 19, 20, MIB // 4),
        {
            "event": "checkpoint_refused",
            "pos_min": 9,
            "pos_max": 19,
            "n_tokens": 20,
            "mib": 0.5,
            "limit_mib": 0.25,
        },
        f"refusing context checkpoint above 0.250 MiB ({PLACE}, size = 0.500 MiB)",
    ),
    (
        events.CheckpointSuperseded(20),
        {"event": "checkpoint_superseded", "n_tokens": 20},
        "superseding context checkpoint at n_tokens = 20",
    ),
    (
        events.CheckpointRestored(HALF, 9, 19, 20, 19),
        {
            "event": "checkpoint_restored",
            "pos_min": 9,
            "pos_max": 19,
            "n_tokens": 20,
            "n_past": 19,
        },
        f"restored context checkpoint ({PLACE}, n_past = 19, size = 0.500 MiB)",
    ),
    (
        events.CheckpointInvalidated(HALF, 9, 19, 20, 512, 7),
        {"event": "checkpoint_invalidated", "pos_min": 9, "pos_max": 19, "n_tokens": 20},
        f"erased invalidated context checkpoint ({PLACE}, n_swa = 512, pos_next = 7, "
        "size = 0.500 MiB)",
    ),
    (
        events.FullReprocess(),
        {"event": "full_reprocess"},
        "forcing full prompt re-processing due to lack of cache data (likely due to SWA or "
        "hybrid/recurrent memory, see https://github.com/ggml-org/llama.cpp/pull/13194"
        "#issuecomment-2868343055)",
    ),
]
KINDS = {
    kind.kind: kind
    for kind in vars(events).values()
    if isinstance(kind, type) and issubclass(kind, Event) and kind.kind
}


@pytest.mark.parametrize(
    ("event", "as_dict", "line"), CASES, ids=[event.kind for event, _, _ in CASES]
)
def test_an_event_has_the_recordings_keys_and_llama_servers_words(
    event: Event, as_dict: dict[str, object], line: str
) -> None:
    assert event.as_dict() == as_dict
    assert list(event.as_dict()) == list(as_dict)
    assert event.line() == line
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.n_bytes = 1  # type: ignore[attr-defined]


def test_every_kind_is_tried_and_drawn() -> None:
    assert sorted(event.kind for event, _, _ in CASES) == sorted(KINDS)
    drawn = (events.__doc__ or "").split("::", 1)[1]
    for kind in KINDS.values():
        assert kind.__name__ in drawn


@pytest.mark.parametrize("path", sorted(RECORDINGS.glob("*.json.gz")), ids=lambda path: path.stem)
def test_recordings_hold_no_other_keys(path: Path) -> None:
    with gzip.open(path, "rt") as file:
        requests = json.load(file)["requests"]
    for request in requests:
        for event in request["events"]:
            kind = KINDS[event["event"]]
            assert kind.recorded
            assert tuple(event) == ("event", *kind.keys)


def test_by_default_the_line_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "llamakeep"):
        events.log(events.CachedPrompt(0, "50%d", 1, 0))
    assert [(r.levelname, r.name) for r in caplog.records] == [("INFO", "llamakeep")]
    assert "prompt 50%d:" in caplog.text
