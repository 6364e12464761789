"""Why a request of a log was read again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

from llamakeep.errors import InvalidValue
from llamakeep.explain.circumstances import Circumstances
from llamakeep.explain.explaining import explain, not_kept
from llamakeep.explain.explanation import Explanation
from llamakeep.explain.kinds import Kind
from llamakeep.explain.prompts import Side
from llamakeep.explain.record import Recorded, read_log, tokens_of
from llamakeep.runtime.base import Vocab
from llamakeep.tokens import common_prefix


def explain_logged(
    path: Path, request_id: str | None = None, *, vocab: Vocab | None = None
) -> Explanation:
    """Explain a request of a log, by the one before it that shares most with it.

    Where tokens or texts are recorded, the two are compared as prompts. Otherwise the block is
    told in which they part, and the cause only if the log's own figures, or the ids alone, prove
    it. Reads the file twice, and keeps two lines of it in memory.

    Args:
        path: The log.
        request_id: Which request; the last one if None. Of several with one id, the last. Where no
            id is this one, a number counts the requests of the log, from 1 on.
        vocab: Of the model, to make texts of tokens.

    Raises:
        InvalidValue: For a line that is none, a log without requests, and an id that is not there.
        StoreError: When the file cannot be read.
    """
    found: Recorded | None = None
    place = 0
    counted: tuple[Recorded, int] | None = None
    for index, line in enumerate(read_log(path)):
        if request_id is None or line.id == request_id:
            found, place = line, index
        elif request_id == str(index + 1):
            counted = line, index
    if found is None and counted is not None:
        found, place = counted
    if found is None:
        what = "no request" if request_id is None else f"no request {request_id!r}"
        raise InvalidValue(f"{path} has {what}")
    lines = enumerate(read_log(path))
    before = (line for _, line in takewhile(lambda each: each[0] < place, lines))
    best, n_blocks = _deepest(before, found)
    return explain_line(found, best, n_blocks, vocab=vocab)


def _deepest(lines: Iterator[Recorded], found: Recorded) -> tuple[Recorded | None, int]:
    """Return the last of the lines that share most with `found`, and how many blocks that is."""
    best, most, most_tokens = None, 0, 0
    ours = tokens_of(found)
    for line in lines:
        common = line.common_blocks(found)
        if best is not None and common < most:
            continue
        theirs = tokens_of(line)
        # Within a block only tokens can tell which prompt shares more.
        n_tokens = common_prefix(ours, theirs) if ours is not None and theirs is not None else 0
        if best is None or (common, n_tokens) >= (most, most_tokens):
            best, most, most_tokens = line, common, n_tokens
    return best, most


def explain_line(
    line: Recorded, before: Recorded | None, n_blocks: int, *, vocab: Vocab | None = None
) -> Explanation:
    """Explain a request by the one before it that shares `n_blocks` with it, or by none.

    Raises:
        TokenError: For recorded tokens that are none.
    """
    known = line.circumstances or Circumstances(
        prompt_tokens=line.input_length,
        reused_tokens=line.reused_tokens,
        tier=line.tier,
        reason=line.reason,
    )
    known = replace(known, prompt_tokens=line.input_length)
    if before is None:
        found = explain(None, Side(text=""), circumstances=known)
        if found.kind is Kind.UNKNOWN and not line.reused_tokens:
            found = replace(
                found, kind=Kind.FIRST_SEEN, reason="it is the first request of the log"
            )
        return replace(found, request_id=line.id)
    new, old = (Side(tokens_of(each), each.text) for each in (line, before))
    if _has_both(new, old):
        found = explain(old, new, vocab=vocab, circumstances=known)
    else:
        found = _by_blocks(line, before, n_blocks, known)
    return replace(found, request_id=line.id, before_id=before.id)


def _has_both(one: Side, other: Side) -> bool:
    return (one.tokens is not None and other.tokens is not None) or (
        one.text is not None and other.text is not None
    )


def _by_blocks(
    line: Recorded, before: Recorded, n_blocks: int, known: Circumstances
) -> Explanation:
    """Return what ids alone say: in which block the prompts part, or that one goes on."""
    at = sum(line.block_tokens[:n_blocks])
    found = explain(None, Side(text=""), circumstances=known)
    if n_blocks == len(line.hash_ids):
        kind, span = Kind.SAME, 1
        reason = f"all {n_blocks} blocks of it are in request {before.id}"
    elif n_blocks == len(before.hash_ids):
        kind, span = Kind.NEW_TEXT, 1
        reason = f"the prompt goes on from token {at}, where request {before.id} ends"
    else:
        kind = Kind.UNKNOWN
        rest = (line.block_tokens[n_blocks], before.block_tokens[n_blocks])
        span = min(rest) + (rest[0] != rest[1])  # the shorter one may be the other's beginning
        shared = known.shared_tokens or 0
        if at < shared < at + span:
            at, span = shared, 1  # the engine knew more than the ids tell
        where = f"at token {at}" if span == 1 else f"within {span} tokens from token {at} on"
        reason = (
            f"it leaves request {before.id} {where}; the log has hashes only, so that what differs "
            "there is not known"
        )
    told = found.kind
    found = replace(found, token_index=at, token_range=span)
    if told not in (Kind.UNKNOWN, Kind.FIRST_SEEN) or (told is Kind.FIRST_SEEN and not n_blocks):
        return found
    reused = line.reused_tokens
    if reused is not None:
        lost = at - max(reused, known.shared_tokens or 0)
        if lost > known.slack_tokens:
            return not_kept(found, at, lost)
    return replace(found, kind=kind, reason=reason)
