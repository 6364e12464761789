"""Which kept thing goes first when room is needed: policies, and the queue that follows them."""

from llamakeep.policy.base import (
    NOT_WATCHING,
    Kept,
    Neighbored,
    NotWatching,
    Policy,
    PolicyKind,
    Watched,
    Watching,
    looks_around,
    name_of,
    rerank_seconds,
    watcher_of,
)
from llamakeep.policy.hazard import Hazard
from llamakeep.policy.ranks import (
    HALF_LIFE_SECONDS,
    LEAST_USE,
    LeastRecentlyUsed,
    Marginal,
    NeighborDistance,
    NeighborGap,
    Oldest,
    TokensPerByte,
    Upstream,
)
from llamakeep.policy.registry import (
    DEFAULT_POLICY,
    get_policy,
    parse_policy,
    policy_below,
    policy_names,
)
from llamakeep.policy.watching import GreedyDualSizeFrequency, Random, SegmentedLRU

__all__ = [
    "DEFAULT_POLICY",
    "HALF_LIFE_SECONDS",
    "LEAST_USE",
    "NOT_WATCHING",
    "GreedyDualSizeFrequency",
    "Hazard",
    "Kept",
    "LeastRecentlyUsed",
    "Marginal",
    "NeighborDistance",
    "NeighborGap",
    "Neighbored",
    "NotWatching",
    "Oldest",
    "Policy",
    "PolicyKind",
    "Random",
    "SegmentedLRU",
    "TokensPerByte",
    "Upstream",
    "Watched",
    "Watching",
    "get_policy",
    "looks_around",
    "name_of",
    "parse_policy",
    "policy_below",
    "policy_names",
    "rerank_seconds",
    "watcher_of",
]
