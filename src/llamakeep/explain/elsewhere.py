"""Under which other settings a prompt that nobody knows is kept."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from llamakeep.fingerprint import Difference, differences
from llamakeep.states import Block
from llamakeep.stores.base import Tier
from llamakeep.tokens import IntArray, common_prefix, root_name

logger = logging.getLogger("llamakeep")

_MOST_NAMESPACES = 16
_LEAST_TOKENS = 32


def kept_elsewhere(
    tiers: Sequence[Tier], namespace: bytes, described: Mapping[str, Any], tokens: IntArray
) -> tuple[Difference, ...]:
    """Return how the settings differ under which a tier has the beginning of a prompt, or nothing.

    Looks at the first block of the prompt, in at most 16 other namespaces of the same tenant: what
    another tenant has is not looked for. Asks no tier over a network, and never fails. Any thread.

    Args:
        tiers: Asked in order; the first that knows is believed.
        namespace: Digest of the one that found nothing.
        described: Its description, see `Namespace.describe`.
        tokens: The prompt.
    """
    for tier in tiers:
        try:
            found = () if tier.is_remote else _kept_in(tier, namespace, described, tokens)
        except Exception:  # to explain a miss must not cost the answer
            logger.exception("%r could not be asked for other namespaces", tier)
        else:
            if found:
                return found
    return ()


def _kept_in(
    tier: Tier, namespace: bytes, ours: Mapping[str, Any], tokens: IntArray
) -> tuple[Difference, ...]:
    others = [
        (digest, theirs)
        for digest, theirs in tier.namespaces().items()
        if digest != namespace
        and theirs.get("salt_id") == ours["salt_id"]
        and theirs.get("salted") == ours["salted"]
    ]
    for digest, theirs in others[-_MOST_NAMESPACES:]:
        if _has_beginning(tier, digest, theirs, tokens):
            return tuple(differences(ours, theirs))
    return ()


def _has_beginning(
    tier: Tier, digest: bytes, described: Mapping[str, Any], tokens: IntArray
) -> bool:
    block_tokens = described.get("segment_tokens")
    if not isinstance(block_tokens, int) or block_tokens < 1:
        return False
    block = Block(root_name(digest), 0, tokens[:block_tokens])
    least = min(_LEAST_TOKENS, int(block.tokens.size))
    return any(
        record.start == 0 and common_prefix(record.tokens, block.tokens) >= least
        for record in tier.find([block])
    )
