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


class CalledFunction(_Answer):
    """A tool that the model calls."""

    name: str
    arguments: str


class MadeToolCall(_Answer):
    """A call of the model's."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class Message(_Answer):
    """What the model said, thought and called."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[MadeToolCall] | None = None


class ChatChoice(_Answer):
    """One answer of a chat."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]


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


class InputTokens(_Answer):
    """Prompt tokens that were not evaluated; nothing is ever charged for keeping them."""

    cached_tokens: int
    cache_write_tokens: int


class OutputTokens(_Answer):
    """Tokens of thoughts."""

    reasoning_tokens: int


class ResponseUsage(_Answer):
    """Tokens read and written."""

    input_tokens: int
    input_tokens_details: InputTokens
    output_tokens: int
    output_tokens_details: OutputTokens
    total_tokens: int


class OutputText(_Answer):
    """What the model said."""

    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[Chosen]


class ReasoningText(_Answer):
    """What the model thought."""

    type: Literal["reasoning_text"]
    text: str


class _Item(_Answer):
    id: str
    status: Literal["completed", "incomplete"]


class MessageItem(_Item):
    """A message of the model's."""

    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputText]


class ReasoningItem(_Item):
    """Thoughts before it; `encrypted_content` has them as base64, where `include` asks for it."""

    type: Literal["reasoning"]
    summary: list[Any]
    content: list[ReasoningText]
    encrypted_content: str | None = None


class FunctionCallItem(_Item):
    """A call of a function."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class CustomCallItem(_Item):
    """A call of a custom tool."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str


class ReasoningSettings(_Answer):
    """How the model was to think."""

    effort: str | None
    summary: None


class TextSettings(_Answer):
    """What the answer was to be."""

    format: dict[str, Any]
    verbosity: str


class ResponseAnswer(_Answer):
    """An answer of `/v1/responses`."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["completed", "incomplete"]
    error: None
    incomplete_details: dict[str, str] | None
    model: str
    output: list[MessageItem | ReasoningItem | FunctionCallItem | CustomCallItem]
    usage: ResponseUsage
    timings: Timings
    background: bool
    conversation: None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None
    prompt: None
    prompt_cache_key: str | None
    reasoning: ReasoningSettings
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: Literal[False]
    temperature: float
    text: TextSettings
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"]
    user: str | None


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
