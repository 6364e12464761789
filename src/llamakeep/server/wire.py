"""JSON as it goes over the wire, and the parts of answers that both APIs share."""

from __future__ import annotations

import json
import math
from typing import Any

from fastapi.responses import Response

from llamakeep.engine.request import Choice, Progress, Timings, TokenProb

_LEAST_LOGPROB = -9999.0
_encode = json.JSONEncoder(
    ensure_ascii=False, separators=(",", ":"), allow_nan=False, check_circular=False
).encode


def dumps(value: Any) -> bytes:
    """Return `value` as compact JSON in UTF-8."""
    return _encode(value).encode()


def dumps_in_pieces(value: Any, depth: int) -> bytes:
    """Return what `dumps` does. No other thread runs while `dumps` does: between pieces it may.

    Args:
        value: Its objects have texts as keys.
        depth: So many objects and lists, one within the other, are taken apart.
    """
    if depth and value and isinstance(value, dict):
        pairs = (dumps(k) + b":" + dumps_in_pieces(v, depth - 1) for k, v in value.items())
        return b"{" + b",".join(pairs) + b"}"
    if depth and value and isinstance(value, list) and isinstance(value[0], dict | list):
        return b"[" + b",".join(dumps_in_pieces(each, depth - 1) for each in value) + b"]"
    return dumps(value)


def answer_json(value: Any, status_code: int = 200, *, depth: int = 0) -> Response:
    """Return a response with `value` as JSON, written in pieces of this `depth`."""
    content = dumps_in_pieces(value, depth)
    return Response(content, status_code, media_type="application/json")


def timings_json(timings: Timings) -> dict[str, Any]:
    """Return what an answer cost, by llama-server's names.

    Its first token costs no step of its own: rates are over the steps after it.
    """
    prompt_n, prompt_ms = timings.prompt_n, timings.prompt_ms
    n_steps, predicted_ms = timings.n_steps, timings.predicted_ms
    return {
        "cache_n": timings.cache_n,
        "prompt_n": prompt_n,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": _ratio(prompt_ms, prompt_n),
        "prompt_per_second": _ratio(prompt_n * 1e3, prompt_ms),
        "predicted_n": timings.predicted_n,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": _ratio(predicted_ms, n_steps),
        "predicted_per_second": _ratio(n_steps * 1e3, predicted_ms),
    }


def _ratio(above: float, below: float) -> float:
    return above / below if below > 0 else 0.0


def progress_json(progress: Progress) -> dict[str, Any]:
    """Return how far a prompt is evaluated, by llama-server's names."""
    return {
        "total": progress.total,
        "cache": progress.cached,
        "processed": progress.processed,
        "time_ms": round(progress.ms),
    }


def text_of(piece: bytes) -> str:
    """Return the whole letters of a token; what is cut off at either end is left out."""
    return piece.decode("utf-8", "ignore")


def logprob_of(logprob: float) -> float:
    """Return a number that JSON can hold: OpenAI's least, for what has no probability."""
    return logprob if math.isfinite(logprob) else _LEAST_LOGPROB


def probs_json(choice: Choice, top: int) -> dict[str, Any]:
    """Return a token with its log probability and the `top` likeliest ones in its place.

    The shape is that of OpenAI's chat completions, with the token's id as llama-server adds it.
    """
    assert choice.prob is not None
    likeliest = [_prob_json(each) for each in choice.likeliest[:top]]
    return _prob_json(choice.prob) | {"top_logprobs": likeliest}


def _prob_json(prob: TokenProb) -> dict[str, Any]:
    return {
        "id": prob.token,
        "token": text_of(prob.piece),
        "bytes": list(prob.piece),
        "logprob": logprob_of(prob.logprob),
    }
