"""What is remembered of requests that ended: numbers and words of ours, none of their content."""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

FAILED = "failed"
"""As `Record.stop`: the answer could not be completed."""
_RECENT = 100
_SUMMED = ("reused_tokens", "evaluated_tokens", "generated_tokens")


@dataclass(frozen=True, slots=True)
class Record:
    """How one request was answered. Milliseconds are of wall time.

    Attributes:
        id: Its number.
        label: What its sender calls it; it can be a client's, so it is no label of a metric.
        slot: Which slot answered; None if none ever did.
        prompt_tokens: Tokens of its prompt.
        reused_tokens: Those that were not evaluated.
        evaluated_tokens: Those that were; see `Timings.prompt_n`.
        generated_tokens: Tokens of the answer.
        tier: Where the reused ones came from: `live`, `ram`, `disk`, `shared` or `none`.
        reason: Why the rest had to be evaluated.
        mode: What it might do with kept states: `on`, `read`, `write` or `off`.
        stop: Why it ended: `end`, `word`, `limit`, `cancelled` or `failed`.
        error: The class of what failed, or "".
        queue_ms: Waiting for a slot, up to the end where it never got one.
        restore_ms: Finding and restoring.
        prompt_ms: Finding, restoring and evaluating, up to the first token or to the end.
        predicted_ms: From the first token to the last.
    """

    id: int = 0
    label: str = ""
    slot: int | None = None
    prompt_tokens: int = 0
    reused_tokens: int = 0
    evaluated_tokens: int = 0
    generated_tokens: int = 0
    tier: str = "none"
    reason: str = ""
    mode: str = "on"
    stop: str = FAILED
    error: str = ""
    queue_ms: float = 0.0
    restore_ms: float = 0.0
    prompt_ms: float = 0.0
    predicted_ms: float = 0.0

    @property
    def first_token_ms(self) -> float:
        """From when it was queued to its first token, or to its end if it had none."""
        return self.queue_ms + self.prompt_ms

    @property
    def ms(self) -> float:
        """From when it was queued to its last token."""
        return self.first_token_ms + self.predicted_ms

    @property
    def tokens_per_second(self) -> float:
        """How fast the answer came, without its first token; 0 if it had no second one."""
        n_steps = self.generated_tokens - 1
        return n_steps / self.predicted_ms * 1e3 if n_steps > 0 and self.predicted_ms > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return its fields, ready for JSON; milliseconds have three digits."""
        fields = asdict(self)
        return {k: round(v, 3) if isinstance(v, float) else v for k, v in fields.items()}


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
        self._recent: deque[Record] = deque(maxlen=_RECENT)

    def add(self, record: Record) -> None:
        """Note the end of a request."""
        self.totals["requests"] += 1
        for name in _SUMMED:
            self.totals[name] += getattr(record, name)
        tier = record.tier
        self.by_tier[tier] = self.by_tier.get(tier, 0) + record.reused_tokens
        if record.slot is not None:
            seconds = (record.prompt_ms + record.predicted_ms) / 1e3
            self.mean_s = 0.8 * self.mean_s + 0.2 * seconds if self.mean_s else seconds
        self._recent.append(record)

    def recent(self) -> list[Record]:
        """Return the records of the last requests, the newest first."""
        return list(reversed(tuple(self._recent)))

    def stats(self) -> dict[str, Any]:
        """Return the totals, and the share of prompt tokens that was not evaluated."""
        totals = dict(self.totals)
        prompt_tokens = totals["reused_tokens"] + totals["evaluated_tokens"]
        share = totals["reused_tokens"] / prompt_tokens if prompt_tokens else 0.0
        return {**totals, "saved_share": share, "reused_by_tier": dict(self.by_tier)}
