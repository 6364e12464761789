"""Answers of `/completion` in llama-server's shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from llamakeep.engine.request import Begun, Finished, Piece, Progress, Request, Stop, Update
from llamakeep.runtime.base import Vocab
from llamakeep.sampling import RANDOM_SEED, Sampling
from llamakeep.server.answers import Answer
from llamakeep.server.constraints import SAMPLERS
from llamakeep.server.errors import ApiError
from llamakeep.server.schema import NativeCompletion
from llamakeep.server.sse import PING, event
from llamakeep.server.wire import probs_json, progress_json, timings_json

_NO_SEED = (1 << 32) - 1
_STOP_TYPES = {Stop.END: "eos", Stop.WORD: "word", Stop.LIMIT: "limit", Stop.CANCELLED: "none"}

# llama-server's other samplers, as they are when they do nothing: none of them is here.
_OFF: dict[str, Any] = {
    "dynatemp_range": 0.0,
    "dynatemp_exponent": 1.0,
    "top_n_sigma": -1.0,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.1,
    "dry_multiplier": 0.0,
    "dry_base": 1.75,
    "dry_allowed_length": 2,
    "dry_penalty_last_n": 64,
    "mirostat": 0,
    "mirostat_tau": 5.0,
    "mirostat_eta": 0.1,
    "adaptive_target": -1.0,
    "adaptive_decay": 0.9,
    "n_keep": 0,
    "n_discard": 0,
    "chat_format": "Content-only",
    "reasoning_format": "none",
    "reasoning_in_content": False,
    "generation_prompt": "",
    "speculative.types": "none",
    "post_sampling_probs": False,
    "backend_sampling": False,
    "lora": [],
}
# And what is told of an answer, but not of a slot or of defaults.
_OFF_IN_ANSWERS: dict[str, Any] = {
    "dry_sequence_breakers": ["\n", ":", '"', "*"],
    "preserved_tokens": [],
}
_LITTLE = 2048
"""Tokens whose text costs little: less than a millisecond."""


def sampling_json(
    sampling: Sampling, n_predict: int | None, *, n_probs: int = 0, **more: Any
) -> dict[str, Any]:
    """Return settings by llama-server's names, those that are off included.

    Args:
        sampling: How tokens are chosen.
        n_predict: How many at most; None for no limit.
        n_probs: How many of the likeliest come with each.
        **more: Settings that are no sampling, such as `stream`.
    """
    limit = -1 if n_predict is None else n_predict
    return {
        "seed": _NO_SEED if sampling.seed == RANDOM_SEED else sampling.seed,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "typical_p": sampling.typical_p,
        "repeat_last_n": sampling.repeat_last_n,
        "repeat_penalty": sampling.repeat_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "min_keep": sampling.min_keep,
        "ignore_eos": sampling.ignore_eos,
        "max_tokens": limit,
        "n_predict": limit,
        "n_probs": n_probs,
        "samplers": list(SAMPLERS),
        **_OFF,
        **more,
    }


def settings_json(
    request: Request, vocab: Vocab, *, stream: bool, timings_per_token: bool
) -> dict[str, Any]:
    """Return `generation_settings`: how an answer was made."""
    biases = list(request.sampling.logit_bias)
    if request.sampling.ignore_eos:
        biases += [(token, -math.inf) for token in sorted(vocab.ends)]
    settings = sampling_json(
        request.sampling,
        request.max_tokens,
        n_probs=request.n_probs,
        stream=stream,
        timings_per_token=timings_per_token,
    )
    return settings | {
        **_OFF_IN_ANSWERS,
        "grammar": request.sampling.grammar,
        "grammar_lazy": bool(request.sampling.grammar_triggers),
        "grammar_triggers": list(request.sampling.grammar_triggers),
        "stop": list(request.stop),
        "logit_bias": [
            {"token": token, "bias": bias if math.isfinite(bias) else None}
            for token, bias in biases
        ],
        "cache_mode": request.mode.value,
    }


class NativeEncoder:
    """Writes answers of `/completion`, whole or as events.

    Args:
        body: What the client sent.
        vocab: The model's.
        model: The model's name.
    """

    ping = PING

    def __init__(self, body: NativeCompletion, vocab: Vocab, model: str) -> None:
        self._vocab = vocab
        self._model = model
        self._stream = bool(body.stream)
        self._timings = bool(body.timings_per_token)
        self._return_tokens = bool(body.return_tokens)
        self._fields = body.response_fields or ()
        self._known: dict[int, dict[str, Any]] = {}
        self._n_probs = body.n_probs if body.n_probs is not None else body.logprobs or 0

    def begin(self, requests: Sequence[Request]) -> None:
        """Write what is known of answers before they come, where that is little."""
        n_biases = sum(len(request.sampling.logit_bias) for request in requests)
        if n_biases + sum(request.prompt.size for request in requests) <= _LITTLE:
            self._known = {index: self._asked(each) for index, each in enumerate(requests)}

    def _asked(self, request: Request) -> dict[str, Any]:
        return asked_json(
            request, self._vocab, stream=self._stream, timings_per_token=self._timings
        )

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return a complete answer."""
        tokens = answer.tokens if self._return_tokens else []
        result = self._final(answer, answer.text, tokens)
        if self._n_probs and answer.probs:
            result["completion_probabilities"] = [
                probs_json(each, self._n_probs) for each in answer.probs
            ]
        return _chosen(result, self._fields)

    def encode(self, answer: Answer, update: Update) -> bytes:
        """Return the event of one update; b"" if it has none."""
        if isinstance(update, Piece):
            if not update.text and not update.tokens:
                return b""
            chunk = self._partial(answer, update.text, update.tokens)
            if update.probs:
                chunk["completion_probabilities"] = [
                    probs_json(each, self._n_probs) for each in update.probs
                ]
            return event(chunk)
        if isinstance(update, Finished):
            return event(_chosen(self._final(answer, "", []), self._fields))
        if isinstance(update, Progress):
            chunk = self._partial(answer, "", ())
            chunk["prompt_progress"] = progress_json(update)
            return event(chunk)
        assert isinstance(update, Begun)
        return b""

    def tail(self) -> bytes:
        """Return b"": the last event says that it is the last."""
        return b""

    def failed(self, error: ApiError) -> bytes:
        """Return the error as an event."""
        return event(error.body)

    def _partial(self, answer: Answer, text: str, tokens: Sequence[int]) -> dict[str, Any]:
        chunk: dict[str, Any] = {
            "index": answer.index,
            "content": text,
            "tokens": list(tokens),
            "stop": False,
            "id_slot": answer.slot_id,
            "tokens_predicted": answer.n_decoded,
            "tokens_evaluated": answer.n_prompt,
        }
        if self._timings:
            chunk["timings"] = timings_json(answer.timings)
        return chunk

    def _final(self, answer: Answer, text: str, tokens: list[int]) -> dict[str, Any]:
        known = self._known.get(answer.index) or self._asked(answer.request)
        return final_json(answer, self._model, known, text=text, tokens=tokens)


def asked_json(
    request: Request, vocab: Vocab, *, stream: bool, timings_per_token: bool
) -> dict[str, Any]:
    """Return what a complete answer tells of the question.

    Args:
        request: What was asked.
        vocab: The model's.
        stream: It is streamed.
        timings_per_token: Every chunk has times.
    """
    return {
        "generation_settings": settings_json(
            request, vocab, stream=stream, timings_per_token=timings_per_token
        ),
        "prompt": vocab.text(request.prompt),
    }


def final_json(
    answer: Answer, model: str, asked: dict[str, Any], *, text: str, tokens: list[int]
) -> dict[str, Any]:
    """Return a complete answer by llama-server's names.

    Args:
        answer: It is finished.
        model: The model's name.
        asked: See `asked_json`.
        text: What to tell of the answer.
        tokens: The same, in tokens.
    """
    finished = answer.finished
    assert finished is not None
    return {
        "index": answer.index,
        "content": text,
        "tokens": tokens,
        "id_slot": answer.slot_id,
        "stop": True,
        "model": model,
        "tokens_predicted": finished.timings.predicted_n,
        "tokens_evaluated": finished.n_prompt,
        **asked,
        "has_new_line": answer.has_new_line,
        "truncated": finished.truncated,
        "stop_type": _STOP_TYPES[finished.stop],
        "stopping_word": finished.stopping_word,
        "tokens_cached": finished.n_cached,
        "timings": timings_json(finished.timings),
    }


def _chosen(result: dict[str, Any], fields: Sequence[str]) -> dict[str, Any]:
    """Return only the fields at these paths, by their paths; all where none is named."""
    if not fields:
        return result
    chosen = {}
    for path in fields:
        value: Any = result
        for key in path.split("/"):
            value = value.get(key, _MISSING) if isinstance(value, dict) else _MISSING
        if value is not _MISSING:
            chosen[path] = value
    return chosen


_MISSING = object()
