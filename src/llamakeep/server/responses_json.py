"""Answers of `/v1/responses`: whole, and as the events of a stream.

Both are made of the same items, told by the same updates: so a stream ends with what a whole answer
is. What every response tells again of the request, tools and instructions above all, may be large,
and is written once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from llamakeep.engine.request import Finished, Piece, Update
from llamakeep.sampling import Sampling
from llamakeep.server.answers import Answer
from llamakeep.server.errors import ApiError
from llamakeep.server.responses_items import Event, Items
from llamakeep.server.responses_schema import CreateResponse
from llamakeep.server.responses_tools import Toolbox
from llamakeep.server.sse import PING
from llamakeep.server.talk import Ending, Plan
from llamakeep.server.wire import dumps, dumps_in_pieces, timings_json
from llamakeep.tool_calls import Content, Delta, Reasoning

_CUT = (Ending.LIMIT, Ending.CANCELLED)


@dataclass(frozen=True, slots=True)
class Question:
    """What an answer is to.

    Attributes:
        body: What the client sent.
        box: Its tools.
        plan: How it is answered.
        sampling: How tokens are chosen.
        answer_id: Of the response.
        model: The model's name.
        n_probs: How many of the likeliest tokens are told; None for no probabilities.
    """

    body: CreateResponse
    box: Toolbox
    plan: Plan
    sampling: Sampling
    answer_id: str
    model: str
    n_probs: int | None


class ResponseEncoder:
    """Writes one answer. Used by one HTTP request.

    Args:
        question: What it is to.
        new_id: Returns an id that begins with a text.

    Raises:
        ApiError: For a request with numbers that JSON does not have.
    """

    ping = PING

    def __init__(self, question: Question, new_id: Callable[[str], str]) -> None:
        body = question.body
        self._items = Items(
            new_id,
            question.box.known,
            n_probs=question.n_probs,
            seals=body.includes("reasoning.encrypted_content"),
        )
        try:
            self._same = dumps(_same(question))
        except ValueError as error:
            if isinstance(error, UnicodeError):
                raise
            raise ApiError(f"the answer cannot tell of the request again: {error}") from None
        self._number = 0
        self._is_thinking = question.plan.thinking
        self._n_thought = 0

    # -- whole -------------------------------------------------------------------------------------
    def hear(self, answer: Answer, update: Update) -> None:
        """Go on with an update, which `answer` has taken already."""
        self._take(answer, update)

    def whole(self, answer: Answer, *, depth: int = 0) -> bytes:
        """Return the response, in JSON written in pieces of this `depth`."""
        return self._response(self._final(answer), depth=depth)

    # -- in events ---------------------------------------------------------------------------------
    def encode(self, answer: Answer, update: Update) -> bytes:
        """Return the events of one update, which `answer` has taken already; b"" if it has none."""
        parts = [] if self._number else self._opening()
        parts += [self._event(*each) for each in self._take(answer, update)]
        if isinstance(update, Finished):
            final = self._final(answer)
            kind = "completed" if final["status"] == "completed" else "incomplete"
            parts.append(self._lifecycle(f"response.{kind}", final))
        return b"".join(parts)

    def tail(self) -> bytes:
        """Return b"": the last event says that it is the last."""
        return b""

    def failed(self, error: ApiError) -> bytes:
        """Return the events of a failure: of the response, if it has begun."""
        code = "server_error" if error.code >= 500 else "invalid_prompt"
        message = error.error["message"]
        if not self._number:
            fields = {"code": code, "message": message, "param": error.error.get("param")}
            return self._event("error", fields)
        told = {"status": "failed", "error": {"code": code, "message": message}}
        return self._lifecycle("response.failed", _before() | told | {"output": self._items.output})

    def _opening(self) -> list[bytes]:
        response = _before() | {"status": "in_progress"}
        kinds = ("response.created", "response.in_progress")
        return [self._lifecycle(kind, response) for kind in kinds]

    def _lifecycle(self, kind: str, response: Mapping[str, Any]) -> bytes:
        """Return an event with a response."""
        head = dumps({"type": kind, "sequence_number": self._number})
        self._number += 1
        written = self._response(response)
        return b'event: %s\ndata: %s,"response":%s}\n\n' % (kind.encode(), head[:-1], written)

    def _event(self, kind: str, fields: Mapping[str, Any]) -> bytes:
        data = dumps({"type": kind, "sequence_number": self._number, **fields})
        self._number += 1
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), data)

    # -- both --------------------------------------------------------------------------------------
    def _take(self, answer: Answer, update: Update) -> list[Event]:
        """Go on with an update; return what it adds."""
        if not isinstance(update, Piece | Finished):
            return []
        deltas: list[Delta] = []
        if answer.talk is not None:
            deltas = answer.talk.deltas
        elif isinstance(update, Piece) and update.text:
            deltas = [Content(update.text)]
        if deltas:
            self._is_thinking = isinstance(deltas[-1], Reasoning)
        if isinstance(update, Piece):
            self._n_thought += len(update.tokens) if self._is_thinking else 0
            return self._items.take(deltas, update.probs)
        events = self._items.take(deltas)
        return events + self._items.finish(is_whole=answer.ending not in _CUT)

    def _response(self, told: Mapping[str, Any], *, depth: int = 0) -> bytes:
        """Return a response in JSON: what is told now, and what is the same each time."""
        return dumps_in_pieces(dict(told), depth)[:-1] + b"," + self._same[1:]

    def _final(self, answer: Answer) -> dict[str, Any]:
        ending = answer.ending
        told = _before() | {"status": "completed", "completed_at": int(time.time())}
        if ending in _CUT:
            reason = {"reason": "max_output_tokens"} if ending is Ending.LIMIT else None
            told |= {"status": "incomplete", "incomplete_details": reason, "completed_at": None}
        n_thought = min(self._n_thought, answer.n_generated)
        return told | {
            "output": self._items.output,
            "usage": {
                "input_tokens": answer.n_prompt,
                "input_tokens_details": {
                    "cached_tokens": answer.n_reused,
                    "cache_write_tokens": 0,
                },
                "output_tokens": answer.n_generated,
                "output_tokens_details": {"reasoning_tokens": n_thought},
                "total_tokens": answer.n_prompt + answer.n_generated,
            },
            "timings": timings_json(answer.timings),
        }


def _before() -> dict[str, Any]:
    """Return what a response tells before there is anything to tell."""
    return {
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
    }


def _same(question: Question) -> dict[str, Any]:
    """Return what a response tells again of the request, and of what came of it."""
    body, sampling = question.body, question.sampling
    reasoning, text = body.reasoning, body.text
    form = None if text is None else text.format
    return {
        "id": question.answer_id,
        "object": "response",
        "created_at": int(time.time()),
        "model": question.model,
        "background": False,
        "conversation": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None,
        },
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": sampling.temperature,
        "text": {
            "format": {"type": "text"}
            if form is None
            else form.model_dump(by_alias=True, exclude_none=True),
            "verbosity": (text and text.verbosity) or "medium",
        },
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "tools": question.box.told,
        "top_logprobs": body.top_logprobs or 0,
        "top_p": sampling.top_p,
        "truncation": "disabled",
        "user": body.user,
    }
