"""What is answered, as `/docs` shows it. Answers are written by hand; tests hold them to this."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class _Answer(BaseModel):
    """An answer has these fields and no others."""

    model_config = ConfigDict(extra="forbid")


class Timings(_Answer):
    """What an answer cost."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float
    prompt_per_second: float
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float
    predicted_per_second: float


class Likely(_Answer):
    """A token and its log probability."""

    id: int
    token: str
    bytes: list[int]
    logprob: float


class Chosen(Likely):
    """A token of an answer, and those that were likeliest in its place."""

    top_logprobs: list[Likely]


class NativeAnswer(_Answer):
    """An answer of `/completion`; a list of them for several prompts."""

    index: int
    content: str
    tokens: list[int]
    id_slot: int
    stop: bool
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    generation_settings: dict[str, Any]
    prompt: str
    has_new_line: bool
    truncated: bool
    stop_type: Literal["none", "eos", "limit", "word"]
    stopping_word: str
    tokens_cached: int
    timings: Timings
    completion_probabilities: list[Chosen] | None = None


class CachedTokens(_Answer):
    """Prompt tokens that were not evaluated."""

    cached_tokens: int


class Usage(_Answer):
    """Tokens read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class LegacyLogprobs(_Answer):
    """Log probabilities of `/v1/completions`."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(_Answer):
    """One answer of `/v1/completions`."""

    text: str
    index: int
    logprobs: LegacyLogprobs | None
    finish_reason: Literal["stop", "length"]


class ChatLogprobs(_Answer):
    """Log probabilities of a chat."""

    content: list[Chosen]


class Message(_Answer):
    """What the model said."""

    role: Literal["assistant"]
    content: str


class ChatChoice(_Answer):
    """One answer of a chat."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]


class _OpenAIAnswer(_Answer):
    """What OpenAI's two completions have in common."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage
    timings: Timings


class CompletionAnswer(_OpenAIAnswer):
    """An answer of `/v1/completions`."""

    object: Literal["text_completion"]
    choices: list[TextChoice]


class ChatAnswer(_OpenAIAnswer):
    """An answer of `/v1/chat/completions`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class Model(BaseModel):
    """A model that answers."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class Models(_Answer):
    """All models that answer: one."""

    models: list[dict[str, Any]]
    object: Literal["list"]
    data: list[Model]
