"""Figures that were published for three traces, which lie outside of the project."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from llamakeep.entries import no_tokens, ratio
from llamakeep.simulate.trace import Trace
from llamakeep.tokens import IntArray, common_prefix

PUBLISHED: Final[dict[str, dict[str, tuple[float, float, float]]]] = {
    "taubench_airline": {
        "2%": (53.5, 66.6, 79.7),
        "5%": (60.5, 88.7, 91.8),
        "50%": (63.0, 92.8, 92.8),
    },
    "lmcache_agent": {
        "2%": (55.0, 41.5, 54.2),
        "5%": (66.3, 67.6, 77.3),
        "10%": (86.2, 86.9, 89.3),
    },
    "mooncake_synthetic": {
        "2%": (7.6, 7.6, 25.6),
        "10%": (24.7, 25.4, 50.4),
        "20%": (38.6, 39.0, 60.7),
    },
}
"""Tokens saved, in % of all: llama-server's cache, blocks by recency, and Belady's optimum."""

POINTS: Final = {"lru": 2.0, "bound": 1.0, "slot": 1.0}
"""How far off ours may be: which of two blocks of one path is the older one is a choice."""


class WholePrompts:
    """llama-server's rules for one slot and its cache, in one short loop; or one of them otherwise.

    Args:
        capacity_tokens: What the cache may keep; the slot is beside it.
        search_first: Search before what the slot holds is saved, not after: then what is found has
            left when room is made, and is never evicted for what it makes room for. llama-server
            does not; the figures that were published did.

    Attributes:
        reused_tokens: Of all prompts so far.
    """

    def __init__(self, capacity_tokens: int, *, search_first: bool) -> None:
        self.reused_tokens = 0
        self._capacity_tokens = capacity_tokens
        self._search_first = search_first
        self._slot = no_tokens()
        self._entries: list[IntArray] = []

    def serve(self, prompt: IntArray) -> int:
        """Serve a prompt, and return how many of its tokens were reused."""
        common = common_prefix(self._slot, prompt)
        keep = ratio(common, self._slot.size) if self._slot.size else -1.0
        sim = ratio(common, prompt.size)
        if sim <= ratio(1, 10) or keep < 0.5:
            if self._search_first:
                found = self._take(prompt, keep, sim)
                self._save()
            else:
                self._save()
                found = self._take(prompt, keep, sim)
            common = common if found is None else common_prefix(found, prompt)
        self._slot = prompt
        reused = min(common, int(prompt.size) - 1)
        self.reused_tokens += reused
        return reused

    def _save(self) -> None:
        new = self._slot
        room = self._capacity_tokens - int(new.size)
        if not new.size or any(common_prefix(each, new) == new.size for each in self._entries):
            return
        if room < 0:
            return
        self._entries = [each for each in self._entries if common_prefix(each, new) < each.size]
        while sum(each.size for each in self._entries) > room:
            del self._entries[0]
        self._entries.append(new)

    def _take(self, prompt: IntArray, keep: float, sim: float) -> IntArray | None:
        best = None
        for index, each in enumerate(self._entries):
            shared = common_prefix(each, prompt)
            its_keep, its_sim = ratio(shared, each.size), ratio(shared, prompt.size)
            if its_keep >= 0.25 and its_keep > keep and its_sim > sim:
                best, keep, sim = index, its_keep, its_sim
        return self._entries.pop(best) if best is not None else None


def searched_first(trace: Trace, capacity_tokens: int) -> float:
    """Return the share of tokens that the variant saves which the published figures come from."""
    model = WholePrompts(capacity_tokens, search_first=True)
    for request in trace:
        model.serve(request.tokens)
    return model.reused_tokens / trace.n_tokens


def trace_path(name: str) -> Path | None:
    """Return where a trace is: in `shared/traces` beside the project or above it, if anywhere."""
    for directory in Path(__file__).resolve().parents:
        path = directory / "shared" / "traces" / f"{name}.jsonl.gz"
        if path.exists():
            return path
    return None
