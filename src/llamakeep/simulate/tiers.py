"""The tiers of a simulation: how much they hold, and how fast what they hold comes back."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from llamakeep.errors import InvalidValue
from llamakeep.policy import Policy
from llamakeep.sizes import parse_bytes
from llamakeep.stores.base import TreeStore
from llamakeep.stores.memory import MemoryStore
from llamakeep.stores.sized import SizedTier
from llamakeep.stores.tiered import TieredStore

DEFAULT_BYTES_PER_S: Final[Mapping[str, float]] = {
    "ram": 10.0 * (1 << 30),
    "disk": 2.0 * (1 << 30),
    "shared": 0.5 * (1 << 30),
}
"""What a machine of today moves back a second, from memory, a solid-state disk, and a network."""

_UNLIMITED: Final = 1 << 60


@dataclass(frozen=True, slots=True)
class TierSize:
    """One tier.

    Attributes:
        tier: `ram`, `disk` or `shared`.
        capacity_bytes: What it can keep.
        bytes_per_s: What is restored from it in a second.
    """

    tier: str
    capacity_bytes: int
    bytes_per_s: float


def parse_tiers(text: str) -> tuple[TierSize, ...]:
    """Return the tiers that a text names, `ram` first.

    Example:
        >>> [tier.tier for tier in parse_tiers("ram=4GiB@12GiB,disk=64GiB")]
        ['ram', 'disk']

    Args:
        text: `NAME=SIZE` for each tier, with `@SIZE` for what comes back from it in a second.

    Raises:
        InvalidValue: For anything else.
    """
    found: dict[str, TierSize] = {}
    for part in text.split(","):
        name, equals, sizes = part.strip().partition("=")
        if name not in DEFAULT_BYTES_PER_S or not equals or name in found:
            known = ", ".join(DEFAULT_BYTES_PER_S)
            raise InvalidValue(f"tiers are NAME=SIZE or NAME=SIZE@SPEED of {known}, not {part!r}")
        size, at, speed = sizes.partition("@")
        speed = speed.strip().removesuffix("/s")
        bytes_per_s = float(parse_bytes(speed)) if at else DEFAULT_BYTES_PER_S[name]
        if bytes_per_s <= 0:
            raise InvalidValue(f"tier {name}: nothing comes back at {speed!r} a second")
        found[name] = TierSize(name, parse_bytes(size), bytes_per_s)
    if "ram" not in found:
        raise InvalidValue(f"tiers must begin with memory, ram=SIZE; there are {', '.join(found)}")
    return tuple(found[name] for name in DEFAULT_BYTES_PER_S if name in found)


def open_store(
    capacity_bytes: int,
    below: Sequence[TierSize] = (),
    *,
    policy: str | Policy,
    clock: Callable[[], float],
    shared: SizedTier | None = None,
) -> TreeStore:
    """Return a store for a tree: memory, over tiers that hold sizes.

    Args:
        capacity_bytes: What memory can keep.
        below: The tiers below it, nearest first.
        policy: What goes first in them.
        clock: Seconds.
        shared: What the tier of that name is, where others have it too; None for one of its own.
    """
    memory = MemoryStore(capacity_bytes)
    if not below:
        return memory
    tiers = [
        shared.another()
        if shared is not None and each.tier == shared.tier
        else SizedTier(each.capacity_bytes, each.tier, policy=policy, clock=clock)
        for each in below
    ]
    return TieredStore(memory, *tiers, queue_bytes=_UNLIMITED)


def saved_ms(
    reused_tokens: int,
    restored_bytes: Mapping[str, int],
    *,
    prefill_tokens_per_s: float,
    bytes_per_s: Mapping[str, float] = DEFAULT_BYTES_PER_S,
) -> float:
    """Return the milliseconds that reuse saved: those of evaluating, less those of restoring.

    Args:
        reused_tokens: Tokens that were not evaluated.
        restored_bytes: Bytes that were moved for that, by tier.
        prefill_tokens_per_s: How fast prompts are evaluated.
        bytes_per_s: How fast states come back, by tier.

    Raises:
        InvalidValue: For a rate that is not a positive number.
    """
    if not 0 < prefill_tokens_per_s < math.inf:
        raise InvalidValue(f"the prefill rate must be above 0, not {prefill_tokens_per_s}")
    restoring = sum(n_bytes / bytes_per_s[tier] for tier, n_bytes in restored_bytes.items())
    return 1e3 * (reused_tokens / prefill_tokens_per_s - restoring)
