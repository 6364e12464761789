"""Policies by name, and which is the default."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any, Final, cast

from llamakeep.errors import InvalidValue
from llamakeep.policy.base import Policy, PolicyKind, name_of, watches
from llamakeep.policy.hazard import Hazard
from llamakeep.policy.ranks import (
    LeastRecentlyUsed,
    Marginal,
    NeighborDistance,
    NeighborGap,
    Oldest,
    TokensPerByte,
    Upstream,
)
from llamakeep.policy.watching import GreedyDualSizeFrequency, Random, SegmentedLRU, WatchingPolicy

DEFAULT_POLICY: Final = "hazard"
"""What decides in the prefix tree unless told otherwise."""


def _by_name(*policies: type[Any]) -> dict[str, type[Any]]:
    return {policy.name: policy for policy in policies}


_DISK = _by_name(Oldest, LeastRecentlyUsed, TokensPerByte, Marginal)
_TREE = _DISK | _by_name(SegmentedLRU, GreedyDualSizeFrequency, Random, Hazard)
_PROMPTS = _DISK | _by_name(Upstream)
_CHECKPOINTS = _PROMPTS | _by_name(NeighborDistance, NeighborGap)
_POLICIES: Mapping[str, Mapping[str, type[Any]]] = {
    "prompts": _PROMPTS,
    "checkpoints": _CHECKPOINTS,
    "tree": _TREE,
    "disk": _DISK,
}
_OURS = {**_CHECKPOINTS, **_TREE}


def policy_names(kind: PolicyKind = "tree") -> list[str]:
    """Return the names that `get_policy` knows for what is kept, sorted.

    Raises:
        InvalidValue: For an unknown kind.
    """
    return sorted(_allowed(kind))


def get_policy(policy: str | Policy, kind: PolicyKind = "tree") -> Policy:
    """Return the policy of that name; an object with a `rank` method is returned as it is.

    Of an object of ours that watches what is used a new one is returned, with the same options:
    each cache needs its own.

    Args:
        policy: A name, with options as `parse_policy` reads them, or an object.
        kind: What is kept: `prompts`, `checkpoints` (of one prompt), `tree` (states in a prefix
            tree) or `disk` (files of such states).

    Raises:
        InvalidValue: For an unknown kind, and for a name, or an object of ours, that is none for
            what is kept; the message lists those that are.
    """
    if isinstance(policy, str) and ":" in policy:
        return parse_policy(policy, kind)
    allowed = _allowed(kind)
    known = ", ".join(sorted(allowed))
    if isinstance(policy, str):
        name, is_ours = policy, policy in _OURS
    elif callable(getattr(policy, "rank", None)):
        name, is_ours = name_of(policy), type(policy) in _OURS.values()
    else:
        raise InvalidValue(f"policy must be {known} or have a rank method, not {policy!r}")
    if is_ours and name not in allowed:
        raise InvalidValue(f"policy {name!r} is not for {kind}; known: {known}")
    if not isinstance(policy, str):
        return policy.fresh() if isinstance(policy, WatchingPolicy) else policy
    if name not in allowed:
        raise InvalidValue(f"unknown policy {name!r}; known: {known}")
    return cast(Policy, allowed[name]())


def policy_below(policy: str | Policy) -> str | Policy:
    """Return what decides in a tier below memory, where `policy` does in memory.

    The same, but for policies that watch what is used: of a directory that is not known, because
    other processes use it as well. There it is `lru`, by which such policies are measured.
    """
    name = policy.partition(":")[0] if isinstance(policy, str) else name_of(policy)
    of_memory = name in _TREE.keys() - _DISK.keys() or watches(policy)
    return LeastRecentlyUsed.name if of_memory else policy


def parse_policy(text: str, kind: PolicyKind = "tree") -> Policy:
    """Return the policy that a text names, with its options: `NAME` or `NAME:key=value,...`.

    Example:
        >>> parse_policy("tokens-per-byte:half_life=3600")
        TokensPerByte(half_life=3600)

    Args:
        text: A name that `get_policy` knows, and numbers for arguments of its class.
        kind: What is kept.

    Raises:
        InvalidValue: For an unknown name or option, or a value that is none.
    """
    name, _, rest = text.partition(":")
    default = get_policy(name, kind)
    options: dict[str, float] = {}
    for part in rest.split(",") if rest else ():
        key, equals, value = part.partition("=")
        try:
            options[key.strip()] = float(value)
        except ValueError:
            what = "has no value" if not equals else f"is no number: {value!r}"
            raise InvalidValue(f"policy {text!r}: {key!r} {what}") from None
    known = signature(type(default)).parameters
    unknown = next((key for key in options if key not in known), None)
    if unknown is not None:
        names = ", ".join(known) or "it has none"
        raise InvalidValue(f"policy {name!r} has no option {unknown!r}; known: {names}")
    make = cast("type[Any]", type(default))
    return cast(Policy, make(**options)) if options else default


def _allowed(kind: str) -> Mapping[str, type[Any]]:
    if kind not in _POLICIES:
        raise InvalidValue(f"kind must be {', '.join(_POLICIES)}, not {kind!r}")
    return _POLICIES[kind]
