"""What is answered on Anthropic's addresses, as `/docs` shows it; tests hold answers to this."""

from __future__ import annotations

from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict

from llamakeep.server.documented import answers


class _Answer(BaseModel):
    """An answer has these fields and no others."""

    model_config = ConfigDict(extra="forbid")


class SaidText(_Answer):
    """What the model says."""

    type: Literal["text"]
    text: str


class Thoughts(_Answer):
    """What the model thinks."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class MadeCall(_Answer):
    """A call of the model's."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(_Answer):
    """Tokens read and written; the first three are all of the prompt."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageAnswer(_Answer):
    """An answer of `/v1/messages`."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[SaidText | Thoughts | MadeCall]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class Counted(_Answer):
    """An answer of `/v1/messages/count_tokens`."""

    input_tokens: int


class MessageErrorDetail(_Answer):
    """What went wrong."""

    type: str
    message: str


class MessageError(_Answer):
    """The body of every answer that is an error."""

    type: Literal["error"]
    error: MessageErrorDetail
    request_id: str


ERRORS: Final[dict[int | str, dict[str, Any]]] = {
    400: {"model": MessageError, "description": "Something cannot be meant; the message names it."},
    401: {"model": MessageError, "description": "No API key, or a wrong one."},
    413: {"model": MessageError, "description": "The body is too large."},
    500: {"model": MessageError, "description": "A fault of the server."},
    501: {"model": MessageError, "description": "The model has no chat template."},
    529: {"model": MessageError, "description": "Too many requests wait, or none is taken now."},
    "default": {"model": MessageError, "description": "Any other error."},
}


def answered(model: type[BaseModel], *, streamed: bool = False) -> dict[int | str, dict[str, Any]]:
    """Return what an endpoint answers with: `model`, the errors, and events if it may stream."""
    return ERRORS | {200: answers(model, streamed=streamed)[200]}
