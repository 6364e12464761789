"""What the engine remembers of the requests that ended."""

from __future__ import annotations

from collections import deque
from typing import Any

from llamakeep.engine.job import Job

_RECENT = 100
_SUMMED = ("reused_tokens", "evaluated_tokens", "generated_tokens")


class Records:
    """Totals, and the last 100 requests. Written by the engine's thread, read by any.

    Attributes:
        totals: Requests, and tokens reused, evaluated and generated.
        by_tier: Reused tokens by where they came from.
        mean_s: About how long an answer takes, the last ones counting most; 0 before the first.
    """

    def __init__(self) -> None:
        self.totals: dict[str, int] = dict.fromkeys(("requests", *_SUMMED), 0)
        self.by_tier: dict[str, int] = {}
        self.mean_s = 0.0
        self._recent: deque[dict[str, Any]] = deque(maxlen=_RECENT)

    def add(self, job: Job, stop: str) -> dict[str, Any]:
        """Note the end of a request; return its record."""
        record = job.record(stop)
        self.totals["requests"] += 1
        for name in _SUMMED:
            self.totals[name] += record[name]
        tier = record["tier"]
        self.by_tier[tier] = self.by_tier.get(tier, 0) + record["reused_tokens"]
        seconds = (record["prompt_ms"] + record["predicted_ms"]) / 1e3
        self.mean_s = 0.8 * self.mean_s + 0.2 * seconds if self.mean_s else seconds
        self._recent.append(record)
        return record

    def recent(self) -> list[dict[str, Any]]:
        """Return the records of the last requests, the newest first."""
        return [dict(record) for record in reversed(tuple(self._recent))]

    def stats(self) -> dict[str, Any]:
        """Return the totals, and the share of prompt tokens that was not evaluated."""
        totals = dict(self.totals)
        prompt_tokens = totals["reused_tokens"] + totals["evaluated_tokens"]
        share = totals["reused_tokens"] / prompt_tokens if prompt_tokens else 0.0
        return {**totals, "saved_share": share, "reused_by_tier": dict(self.by_tier)}
