"""Answers of OpenAI's two completions: whole, and as chunks of a stream."""

from __future__ import annotations

import codecs
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from llamakeep.engine.request import Begun, Choice, Finished, Piece, Progress, Update
from llamakeep.runtime.base import Vocab
from llamakeep.server.answers import Answer
from llamakeep.server.errors import ApiError
from llamakeep.server.native_json import asked_json, final_json
from llamakeep.server.schema import ChatCompletion, OpenAIFields
from llamakeep.server.sse import PING, event
from llamakeep.server.talk import Ending, Talk
from llamakeep.server.wire import (
    dumps,
    logprob_of,
    probs_json,
    progress_json,
    text_of,
    timings_json,
)
from llamakeep.tool_calls import CallBegins, Content, Delta, Reasoning

_REASONS = {
    Ending.SAID: "stop",
    Ending.WORD: "stop",
    Ending.CALLS: "tool_calls",
    Ending.LIMIT: "length",
    Ending.CANCELLED: "stop",
}
_DONE = b"data: [DONE]\n\n"


def usage_json(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return what was read and written; a prompt with several answers counts once.

    What is reused of it is what its first answer reused: the others reuse that one's work.
    """
    prompts = {id(answer.request.prompt): answer for answer in reversed(answers)}
    n_prompt = sum(answer.n_prompt for answer in prompts.values())
    n_cached = sum(answer.n_reused for answer in prompts.values())
    n_decoded = sum(answer.n_generated for answer in answers)
    return {
        "prompt_tokens": n_prompt,
        "completion_tokens": n_decoded,
        "total_tokens": n_prompt + n_decoded,
        "prompt_tokens_details": {"cached_tokens": n_cached},
    }


class Offsets:
    """Tells where each token of an answer begins in its text. For one answer, in order.

    The text is that of all tokens: what is held back for a stop string, or cut off by one, counts.
    A token that begins inside of a letter begins where the letter does.

    Args:
        piece: Returns what a token adds to the text, in UTF-8.
    """

    def __init__(self, piece: Callable[[int], bytes]) -> None:
        self._piece = piece
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._n_chars = 0

    def push(self, token: int) -> int:
        """Return where the next token begins, in characters."""
        begin = self._n_chars
        self._n_chars += len(self._decoder.decode(self._piece(token)))
        return begin


def legacy_logprobs(probs: Sequence[Choice], top: int, offsets: Offsets) -> dict[str, Any]:
    """Return log probabilities in the shape of `/v1/completions`.

    Args:
        probs: Of each token.
        top: How many of the likeliest are told.
        offsets: Of this answer; has had all tokens before these.
    """
    tokens: list[str] = []
    logprobs: list[float] = []
    tops: list[dict[str, float]] = []
    for choice in probs:
        assert choice.prob is not None
        text, logprob = text_of(choice.prob.piece), logprob_of(choice.prob.logprob)
        tokens.append(text)
        logprobs.append(logprob)
        table = {text_of(each.piece): logprob_of(each.logprob) for each in choice.likeliest[:top]}
        table.setdefault(text, logprob)
        tops.append(table)
    return {
        "tokens": tokens,
        "token_logprobs": logprobs,
        "top_logprobs": tops,
        "text_offset": [offsets.push(choice.token) for choice in probs],
    }


class OpenAIEncoder(ABC):
    """What both kinds of completion have in common. Used by one HTTP request.

    Args:
        body: What the client sent.
        answer_id: Of the whole response.
        model: The model's name.
        build: `system_fingerprint`.
        vocab: The model's.
        n_probs: How many of the likeliest tokens are told; None for no probabilities.
    """

    object_name = ""
    chunk_name = ""
    ping = PING

    def __init__(
        self,
        body: OpenAIFields,
        answer_id: str,
        model: str,
        build: str,
        vocab: Vocab,
        n_probs: int | None,
    ) -> None:
        self._body = body
        self._vocab = vocab
        self._model = model
        self._n_probs = n_probs
        self._per_token = bool(body.timings_per_token)
        options = body.stream_options
        self._usage = bool(options and options.include_usage)
        self._answers: dict[int, Answer] = {}
        self._head = {
            "id": answer_id,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": build,
        }
        chunk = dumps(self._head | {"object": self.chunk_name})
        # Most chunks differ in their text alone, so all else of them is written once.
        self._before = b"data: " + chunk[:-1] + b',"choices":[{"index":'
        self._after = b"}]}\n\n"

    # -- whole -------------------------------------------------------------------------------------
    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Return all answers as one response."""
        result = self._head | {
            "object": self.object_name,
            "choices": [self._choice(answer) for answer in answers],
            "usage": usage_json(answers),
        }
        first = answers[0]
        if self._body.verbose:
            result["__verbose"] = self._verbose(first, first.text)
        return result | {"timings": timings_json(first.timings)}

    @abstractmethod
    def _choice(self, answer: Answer) -> dict[str, Any]: ...  # pragma: no cover - abstract

    def _verbose(self, answer: Answer, text: str) -> dict[str, Any]:
        asked = asked_json(
            answer.request,
            self._vocab,
            stream=bool(self._body.stream),
            timings_per_token=self._per_token,
        )
        return final_json(answer, self._model, asked, text=text, tokens=[])

    # -- in chunks ---------------------------------------------------------------------------------
    def encode(self, answer: Answer, update: Update) -> bytes:
        """Return the chunks of one update; b"" if it has none."""
        if isinstance(update, Piece):
            if not self._is_told(answer, update):
                return b""
            extra = {"timings": timings_json(answer.timings)} if self._per_token else {}
            return self._opening(answer) + self._piece(answer, update, extra)
        if isinstance(update, Finished):
            self._answers[answer.index] = answer
            opening = self._opening(answer)
            return opening + self._rest(answer) + self._last(answer, _REASONS[answer.ending])
        if isinstance(update, Progress):
            return self._opening(answer, {"prompt_progress": progress_json(update)})
        assert isinstance(update, Begun)
        return b""

    def _is_told(self, answer: Answer, piece: Piece) -> bool:
        """Whether a piece becomes a chunk."""
        return bool(piece.text) or self._n_probs is not None

    def _rest(self, answer: Answer) -> bytes:
        """Return the chunks of what was told at the end only."""
        return b""

    def tail(self) -> bytes:
        """Return the usage, if it was asked for, and the end of the stream."""
        if not self._usage:
            return _DONE
        answers = [self._answers[index] for index in sorted(self._answers)]
        chunk = self._head | {
            "object": self.chunk_name,
            "choices": [],
            "usage": usage_json(answers),
            "timings": timings_json(answers[0].timings),
        }
        return event(chunk) + _DONE

    def failed(self, error: ApiError) -> bytes:
        """Return the error as an event."""
        return event(error.body)

    @abstractmethod
    def _opening(self, answer: Answer, extra: dict[str, Any] | None = None) -> bytes:
        """Return what comes before the first piece of an answer, if anything does."""
        ...  # pragma: no cover - abstract

    @abstractmethod
    def _piece(
        self, answer: Answer, piece: Piece, extra: dict[str, Any]
    ) -> bytes: ...  # pragma: no cover - abstract

    @abstractmethod
    def _last(self, answer: Answer, reason: str) -> bytes: ...  # pragma: no cover - abstract

    def _chunk(self, choice: dict[str, Any], extra: dict[str, Any]) -> bytes:
        """Return a chunk that is not like most."""
        return event(self._head | {"object": self.chunk_name, "choices": [choice]} | extra)

    def _last_extra(self, answer: Answer) -> dict[str, Any]:
        """Return what the last chunk of an answer has besides the reason."""
        extra: dict[str, Any] = {}
        if not self._usage:
            extra["timings"] = timings_json(answer.timings)
        if self._body.verbose:
            extra["__verbose"] = self._verbose(answer, "")
        return extra


class CompletionEncoder(OpenAIEncoder):
    """Writes answers of `/v1/completions`."""

    object_name = "text_completion"
    chunk_name = "text_completion"

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._offsets: dict[int, Offsets] = {}

    def _choice(self, answer: Answer) -> dict[str, Any]:
        return {
            "text": answer.text,
            "index": answer.index,
            "logprobs": self._logprobs(answer, answer.probs),
            "finish_reason": _REASONS[answer.ending],
        }

    def _logprobs(self, answer: Answer, probs: Sequence[Choice]) -> dict[str, Any] | None:
        if self._n_probs is None:
            return None
        if answer.index not in self._offsets:
            self._offsets[answer.index] = Offsets(self._vocab.piece)
        return legacy_logprobs(probs, self._n_probs, self._offsets[answer.index])

    def _opening(self, answer: Answer, extra: dict[str, Any] | None = None) -> bytes:
        if extra is None:
            return b""
        choice = {"text": "", "index": answer.index, "logprobs": None, "finish_reason": None}
        return self._chunk(choice, extra)

    def _piece(self, answer: Answer, piece: Piece, extra: dict[str, Any]) -> bytes:
        if self._n_probs is None and not extra:
            return b'%s%d,"logprobs":null,"finish_reason":null,"text":%s%s' % (
                self._before,
                answer.index,
                dumps(piece.text),
                self._after,
            )
        choice = {
            "text": piece.text,
            "index": answer.index,
            "logprobs": self._logprobs(answer, piece.probs),
            "finish_reason": None,
        }
        return self._chunk(choice, extra)

    def _last(self, answer: Answer, reason: str) -> bytes:
        choice = {"text": "", "index": answer.index, "logprobs": None, "finish_reason": reason}
        return self._chunk(choice, self._last_extra(answer))


class ChatEncoder(OpenAIEncoder):
    """Writes answers of `/v1/chat/completions`."""

    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, body: ChatCompletion, *rest: Any) -> None:
        super().__init__(body, *rest)
        self._opened: set[int] = set()

    def _choice(self, answer: Answer) -> dict[str, Any]:
        return {
            "index": answer.index,
            "message": _message(answer),
            "logprobs": self._logprobs(answer.probs),
            "finish_reason": _REASONS[answer.ending],
        }

    def _is_told(self, answer: Answer, piece: Piece) -> bool:
        if answer.talk is None or self._n_probs is not None:
            return super()._is_told(answer, piece)
        return bool(answer.talk.deltas)

    def _logprobs(self, probs: Sequence[Choice]) -> dict[str, Any] | None:
        top = self._n_probs
        if top is None:
            return None
        return {"content": [probs_json(each, top) for each in probs]}

    def _opening(self, answer: Answer, extra: dict[str, Any] | None = None) -> bytes:
        if answer.index in self._opened and extra is None:
            return b""
        delta: dict[str, Any] = {}
        if answer.index not in self._opened:
            delta = {"role": "assistant", "content": None}
            self._opened.add(answer.index)
        choice = {"index": answer.index, "delta": delta, "finish_reason": None}
        return self._chunk(choice, extra or {})

    def _piece(self, answer: Answer, piece: Piece, extra: dict[str, Any]) -> bytes:
        if answer.talk is not None:
            return self._told(answer, answer.talk, piece.probs, extra)
        if self._n_probs is None and not extra:
            return b'%s%d,"finish_reason":null,"delta":{"content":%s}%s' % (
                self._before,
                answer.index,
                dumps(piece.text),
                self._after,
            )
        choice = {
            "index": answer.index,
            "delta": {"content": piece.text},
            "logprobs": self._logprobs(piece.probs),
            "finish_reason": None,
        }
        return self._chunk(choice, extra)

    def _told(
        self, answer: Answer, talk: Talk, probs: Sequence[Choice], extra: dict[str, Any]
    ) -> bytes:
        """Return a chunk for each delta; the first has what comes with the tokens."""
        chunks: list[bytes] = []
        for delta in [delta_json(each) for each in talk.deltas] or [{}]:
            choice: dict[str, Any] = {"index": answer.index, "delta": delta}
            if self._n_probs is not None:
                choice["logprobs"] = None if chunks else self._logprobs(probs)
            chunks.append(self._chunk(choice | {"finish_reason": None}, extra))
        return b"".join(chunks)

    def _rest(self, answer: Answer) -> bytes:
        if answer.talk is None or not answer.talk.deltas:
            return b""
        return self._told(answer, answer.talk, (), {})

    def _last(self, answer: Answer, reason: str) -> bytes:
        choice = {"index": answer.index, "delta": {}, "finish_reason": reason}
        return self._chunk(choice, self._last_extra(answer))


def _message(answer: Answer) -> dict[str, Any]:
    """Return what the model said, thought and called."""
    if answer.talk is None:
        return {"role": "assistant", "content": answer.text}
    reply = answer.talk.reply
    calls = [call.to_openai() for call in reply.calls]
    message: dict[str, Any] = {"role": "assistant", "content": reply.text}
    if calls:
        message |= {"content": reply.text or None, "tool_calls": calls}
    if reply.thoughts:
        message["reasoning_content"] = reply.thoughts
    return message


def delta_json(delta: Delta) -> dict[str, Any]:
    """Return a delta of a chat as OpenAI's chunks have it."""
    if isinstance(delta, Content):
        return {"content": delta.text}
    if isinstance(delta, Reasoning):
        return {"reasoning_content": delta.text}
    if isinstance(delta, CallBegins):
        function = {"name": delta.name, "arguments": ""}
        call = {"index": delta.index, "id": delta.id, "type": "function", "function": function}
    else:
        call = {"index": delta.index, "function": {"arguments": delta.json_text}}
    return {"tool_calls": [call]}
