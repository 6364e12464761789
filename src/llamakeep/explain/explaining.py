"""Why a prompt was read again: from two prompts, and from what an engine knows of a request."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType
from typing import Final

from llamakeep import fingerprint
from llamakeep.explain.circumstances import Circumstances
from llamakeep.explain.explanation import Explanation
from llamakeep.explain.kinds import CHURN, MEANING, Kind
from llamakeep.explain.prompts import Given, Side, compare_sides, side_of
from llamakeep.explain.verdict import Verdict
from llamakeep.runtime.base import Vocab

_NOTHING = Circumstances()
_FROM_CLIENT = CHURN | {Kind.TOKENIZATION}
_REST: Final = MappingProxyType(
    {
        Kind.TOKENIZATION: "the same text came in other tokens",
        Kind.NEW_TEXT: "they are new",
        Kind.SALT: "they came with another salt",
        Kind.UNKNOWN: "what was sent there before was edited",
    }
)
"""Why the rest was read that was not evicted, in words that quote nothing."""


def explain(
    before: Given | None,
    after: Given,
    *,
    vocab: Vocab | None = None,
    circumstances: Circumstances = _NOTHING,
) -> Explanation:
    """Say why the rest of a prompt had to be evaluated.

    What is known of the request comes first: a state that was evicted, or that is another
    namespace's, would have served whatever the client sent. Then what differs between the two
    prompts is named, if it can be proven. Any thread; costs some milliseconds for 30,000 tokens.

    Args:
        before: The stored prompt that shares most with it; None if there is none, or if it is not
            known.
        after: The prompt.
        vocab: Makes text of tokens whose text is not given, and shows where a text is the same in
            other tokens.
        circumstances: What is known of the request.

    Returns:
        The explanation; its kind is `unknown` where nothing is proven.

    Raises:
        InvalidValue: For a request body that is none, or is nested too deeply.
        TokenError: For tokens that are none, or not of the vocabulary.
    """
    new = side_of(after)
    verdict, at = None, None
    if before is not None:
        old = side_of(before)
        verdict, at = compare_sides(old, new, vocab)
        found = _explained(verdict, at, circumstances, _lost(verdict, at, old, new))
    else:
        found = _explained(None, None, circumstances, None)
    return _with_figures(found, new, circumstances)


def _lost(verdict: Verdict, at: int | None, before: Side, after: Side) -> int | None:
    """Return how many tokens a client's change may have cost, at most."""
    if at is None or before.tokens is None or after.tokens is None:
        return None
    if verdict.kind not in _FROM_CLIENT:
        return None
    return int(min(before.tokens.size, after.tokens.size)) - at


def _with_figures(found: Explanation, after: Side, known: Circumstances) -> Explanation:
    n_tokens = known.prompt_tokens
    if n_tokens is None and after.tokens is not None:
        n_tokens = int(after.tokens.size)
    reused = known.reused_tokens
    evaluated = None if n_tokens is None or reused is None else max(0, n_tokens - reused)
    return replace(
        found,
        reused_tokens=reused,
        evaluated_tokens=evaluated,
        tier=known.tier,
        nearest_checkpoint=known.nearest_checkpoint,
    )


def _explained(
    verdict: Verdict | None, at: int | None, known: Circumstances, lost: int | None
) -> Explanation:
    """Return the cause that stands before all others."""
    also = (verdict.kind,) if verdict is not None and verdict.kind in _FROM_CLIENT else ()
    if verdict is None:
        base = Explanation(Kind.UNKNOWN, token_index=known.shared_tokens)
    else:
        where = known.shared_tokens if at is None else at
        base = Explanation(
            verdict.kind,
            verdict.reason,
            verdict.part,
            verdict.char_index,
            where,
            around=verdict.around,
            lost_tokens=lost,
        )
    if base.token_index is not None:
        base = replace(base, token_range=1)
    evicted = _evicted(base, known)
    if evicted is not None:
        return _with_rest(evicted, verdict, known)
    elsewhere = _elsewhere(base, known)
    if elsewhere is not None:
        return replace(elsewhere, also=also + elsewhere.also)
    unreachable = _unreachable(base, known)
    if unreachable is not None:
        if not also:
            return unreachable
        return replace(base, also=(Kind.NO_CHECKPOINT,))
    return _by_figures(base, known) if not also else base


def _evicted(base: Explanation, known: Circumstances) -> Explanation | None:
    dropped = known.evicted
    there = max(known.shared_tokens or 0, known.reused_tokens or 0)
    if dropped is None or dropped.n_tokens <= there:
        return None
    lost = dropped.n_tokens - (known.reused_tokens or 0)
    return replace(
        base,
        kind=Kind.EVICTED,
        reason=(
            f"the first {dropped.n_tokens:,} tokens were kept, and dropped for room by the policy "
            f"{dropped.policy}: that cost {lost:,} tokens"
        ),
        policy=dropped.policy,
        lost_tokens=lost,
    )


def _with_rest(found: Explanation, verdict: Verdict | None, known: Circumstances) -> Explanation:
    """Return what was evicted with what the client changed, which may have cost more."""
    if verdict is None or verdict.kind in (Kind.SAME, Kind.FIRST_SEEN):
        return found
    n_tokens, reused = known.prompt_tokens, known.reused_tokens
    rest = None
    if n_tokens is not None and reused is not None and found.lost_tokens is not None:
        rest = n_tokens - reused - found.lost_tokens
    changed = verdict.kind in _FROM_CLIENT
    if verdict.kind is Kind.UNKNOWN:  # something else stands there, and it is not known why
        changed = rest is not None and rest > known.slack_tokens
    if rest is not None and rest > known.slack_tokens:
        words = _REST.get(verdict.kind) or MEANING[verdict.kind]
        found = replace(found, reason=f"{found.reason}; {rest:,} more were read because {words}")
    return replace(found, also=(verdict.kind,)) if changed else found


def _elsewhere(base: Explanation, known: Circumstances) -> Explanation | None:
    if not known.namespaces or known.shared_tokens or known.reused_tokens:
        return None
    parts = [
        "cache_salt" if each.part in ("salted", "salt_id") else each.part
        for each in known.namespaces
    ]
    others = [part for part in parts if part not in ("cache_salt", "digest")]
    kind = Kind.NAMESPACE if others or not known.other_salt else Kind.SALT
    also = (Kind.SALT,) if kind is Kind.NAMESPACE and known.other_salt else ()
    reason = fingerprint.explain(known.namespaces)
    part = (others or parts)[0]
    return replace(base, kind=kind, reason=reason, part=part, also=also, lost_tokens=None)


def _unreachable(base: Explanation, known: Circumstances) -> Explanation | None:
    shared, reused = known.shared_tokens, known.reused_tokens
    if not known.rolling or shared is None or reused is None:
        return None
    if shared - reused <= known.slack_tokens:
        return None
    nearest = known.nearest_checkpoint
    where = "there is none before it" if nearest is None else f"the nearest is at token {nearest}"
    return replace(
        base,
        kind=Kind.NO_CHECKPOINT,
        reason=f"{shared:,} tokens are kept, and no checkpoint is where they end; {where}",
        lost_tokens=shared - reused,
    )


def not_kept(base: Explanation, n_tokens: int, lost: int) -> Explanation:
    """Return what is to be said of a prompt that was sent before, and of which too little is kept.

    Args:
        base: What else is known of it.
        n_tokens: Tokens that were sent before.
        lost: Those that are not kept.
    """
    reason = (
        f"the first {n_tokens:,} tokens were sent before, and were not kept any more, or never: "
        f"that cost {lost:,} tokens"
    )
    return replace(base, kind=Kind.UNKNOWN, reason=reason, lost_tokens=lost)


def _by_figures(base: Explanation, known: Circumstances) -> Explanation:
    """Return what numbers say where the texts say nothing."""
    shared, reused, n_tokens = known.shared_tokens, known.reused_tokens, known.prompt_tokens
    told = known.reason
    if base.kind in (Kind.SAME, Kind.NEW_TEXT) and base.token_index is not None:
        lost = base.token_index - max(shared or 0, reused or 0)
        if shared is not None and reused is not None and lost > known.slack_tokens:
            return not_kept(base, base.token_index, lost)
    if shared == 0 and not reused:
        if base.kind is Kind.SAME:
            return replace(base, kind=Kind.UNKNOWN, reason=told or "it was sent, and is not kept")
        if not base.token_index and not base.char_index:
            reason = "nothing that is known begins like it"
            return replace(base, kind=Kind.FIRST_SEEN, reason=reason)
    if base.reason:
        return base
    if shared is not None and n_tokens is not None and shared >= n_tokens:
        return replace(base, kind=Kind.SAME, reason=told or "all of it is known")
    if shared and shared == known.stored_tokens:
        reason = f"the prompt goes on from token {shared}, where the stored one ends"
        return replace(base, kind=Kind.NEW_TEXT, reason=reason)
    return replace(base, reason=told or "too little is known of the two prompts")
