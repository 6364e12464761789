"""Answers as Anthropic's API has them: a message, or events that add up to the same message."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from pydantic_core import from_json

from llamakeep.engine.request import Begun, Finished, Piece, Update
from llamakeep.server import anthropic_errors
from llamakeep.server.answers import Answer
from llamakeep.server.errors import ApiError
from llamakeep.server.talk import Ending
from llamakeep.server.wire import dumps
from llamakeep.tool_calls import CallArguments, CallBegins, Content, Delta, Reasoning

SIGNATURE: Final = "llamakeep"
"""Of thoughts: clients send it back, and it is not looked at."""
_REASONS: Final = {
    Ending.SAID: "end_turn",
    Ending.WORD: "stop_sequence",
    Ending.CALLS: "tool_use",
    Ending.LIMIT: "max_tokens",
    Ending.CANCELLED: "end_turn",
}


_TEXTS: Final = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "signature_delta": "signature",
    "input_json_delta": "partial_json",
}
"""The field of each delta that has its text."""


def event(data: dict[str, Any]) -> bytes:
    """Return an event; it is called what its type is."""
    return b"event: %s\ndata: %s\n\n" % (data["type"].encode(), dumps(data))


def usage_json(answer: Answer) -> dict[str, int]:
    """Return what was read and written.

    Tokens of the prompt that were evaluated count as created in the cache if the request lets them
    be kept, else as plain input; all three numbers together are the whole prompt.
    """
    n_evaluated = answer.n_prompt - answer.n_reused
    n_created = n_evaluated if answer.request.mode.writes else 0
    return {
        "input_tokens": n_evaluated - n_created,
        "cache_creation_input_tokens": n_created,
        "cache_read_input_tokens": answer.n_reused,
        "output_tokens": answer.n_generated,
    }


class MessageEncoder:
    """Writes one answer. Used by one HTTP request.

    Args:
        message_id: Of the answer.
        model: What the client calls the model.
        request_id: Of the request.
        omits: The text of thoughts is left out.
    """

    def __init__(self, message_id: str, model: str, request_id: str, *, omits: bool) -> None:
        self._id = message_id
        self._model = model
        self._request_id = request_id
        self._omits = omits
        self._begun = False
        self._kind = ""
        self._index = -1
        self._blocks: list[tuple[dict[str, Any], list[str]]] = []

    # -- whole -------------------------------------------------------------------------------------
    def hear(self, answer: Answer, update: Update) -> None:
        """Note what has come, for `whole`."""
        for told in self._told(answer, update):
            if told["type"] == "content_block_start":
                self._blocks.append((told["content_block"], []))
            elif told["type"] == "content_block_delta":
                delta, (block, pieces) = told["delta"], self._blocks[-1]
                text = delta[_TEXTS[delta["type"]]]
                if delta["type"] == "signature_delta":
                    block["signature"] = text
                else:
                    pieces.append(text)

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return the complete message; all updates must have been heard."""
        reason, word = _stop(answer)
        cut = reason != "tool_use"
        content = [_block(block, "".join(pieces), cut=cut) for block, pieces in self._blocks]
        return self._message(answer, content, reason, word)

    def _message(
        self, answer: Answer, content: list[dict[str, Any]], reason: str | None, word: str | None
    ) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": word,
            "usage": usage_json(answer),
        }

    # -- in events ---------------------------------------------------------------------------------
    def encode(self, answer: Answer, update: Update) -> bytes:
        """Return the events of one update; b"" if it has none."""
        if isinstance(update, Piece) and answer.talk is None and self._kind == "text":
            return self._text(update.text) if update.text else b""
        parts: list[bytes] = []
        if not self._begun and isinstance(update, Begun | Piece | Finished):
            self._begun = True
            message = self._message(answer, [], None, None)
            parts.append(event({"type": "message_start", "message": message}))
        parts += map(event, self._told(answer, update))
        if isinstance(update, Finished):
            reason, word = _stop(answer)
            end = {"stop_reason": reason, "stop_sequence": word}
            usage = usage_json(answer)
            parts.append(event({"type": "message_delta", "delta": end, "usage": usage}))
            parts.append(event({"type": "message_stop"}))
        return b"".join(parts)

    def _text(self, text: str) -> bytes:
        """Return the event that most are: more of a text."""
        return (
            b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
            b'"delta":{"type":"text_delta","text":%s}}\n\n' % (self._index, dumps(text))
        )

    def tail(self) -> bytes:
        """Return b"": the last event says that it is the last."""
        return b""

    def failed(self, error: ApiError) -> bytes:
        """Return the error as an event."""
        return event(anthropic_errors.body_of(error.code, error.error, self._request_id))

    @property
    def ping(self) -> bytes:
        """An event of its own."""
        return event({"type": "ping"})

    # -- both --------------------------------------------------------------------------------------
    def _told(self, answer: Answer, update: Update) -> Iterator[dict[str, Any]]:
        """Yield the events of blocks that an update has."""
        if not isinstance(update, Piece | Finished):
            return
        deltas: list[Delta] = []
        if answer.talk is not None:
            deltas = answer.talk.deltas
        elif isinstance(update, Piece) and update.text:
            deltas = [Content(update.text)]
        for delta in deltas:
            yield from self._delta(delta)
        if isinstance(update, Finished):
            yield from self._end()

    def _delta(self, delta: Delta) -> Iterator[dict[str, Any]]:
        if isinstance(delta, CallBegins):
            call = {"type": "tool_use", "id": id_of(delta.id), "name": delta.name, "input": {}}
            yield from self._begin(call)
        elif isinstance(delta, CallArguments):
            yield self._more("input_json_delta", delta.json_text)
        elif isinstance(delta, Reasoning):
            if self._kind != "thinking":
                yield from self._begin({"type": "thinking", "thinking": "", "signature": ""})
            if not self._omits:
                yield self._more("thinking_delta", delta.text)
        else:
            if self._kind != "text":
                yield from self._begin({"type": "text", "text": ""})
            yield self._more("text_delta", delta.text)

    def _begin(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._end()
        self._kind = block["type"]
        self._index += 1
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _more(self, kind: str, text: str) -> dict[str, Any]:
        delta = {"type": kind, _TEXTS[kind]: text}
        return {"type": "content_block_delta", "index": self._index, "delta": delta}

    def _end(self) -> Iterator[dict[str, Any]]:
        """End the block that is going on."""
        if not self._kind:
            return
        if self._kind == "thinking":
            yield self._more("signature_delta", SIGNATURE)
        self._kind = ""
        yield {"type": "content_block_stop", "index": self._index}


def _stop(answer: Answer) -> tuple[str, str | None]:
    """Return why an answer ended, and the stop sequence that ended it."""
    assert answer.finished is not None
    ending = answer.ending
    return _REASONS[ending], answer.finished.stopping_word if ending is Ending.WORD else None


def id_of(call_id: str) -> str:
    """Return the id of a call as Anthropic's look, unless the model wants it as it is."""
    return call_id.replace("call_", "toolu_", 1) if call_id.startswith("call_") else call_id


def _block(block: dict[str, Any], text: str, *, cut: bool) -> dict[str, Any]:
    """Return a complete block.

    Args:
        block: As it began.
        text: All its pieces.
        cut: The answer was cut off, so arguments may be incomplete.
    """
    kind = block["type"]
    if kind != "tool_use":
        return {**block, kind: text}
    arguments = _object(text)
    if arguments is None:
        arguments = (_object(text, partial=True) or {}) if cut else {"INVALID_JSON": text}
    return {**block, "input": arguments}


def _object(text: str, *, partial: bool = False) -> dict[str, Any] | None:
    """Return the object that a text is in JSON, or begins to be; None if it is none."""
    try:
        value = from_json(text, allow_inf_nan=False, allow_partial=partial)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
