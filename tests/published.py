"""Figures that were published for three traces, which lie outside of the project."""

from __future__ import annotations

from pathlib import Path
from typing import Final

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

POINTS: Final = {"lru": 2.0, "bound": 1.0}
"""How far off ours may be: which of two blocks of one path is the older one is a choice."""


def trace_path(name: str) -> Path | None:
    """Return where a trace is: in `shared/traces` beside the project or above it, if anywhere."""
    for directory in Path(__file__).resolve().parents:
        path = directory / "shared" / "traces" / f"{name}.jsonl.gz"
        if path.exists():
            return path
    return None
