"""What clients send: the fields of each request, their types and their ranges.

null is the same as absent, as in both APIs. Fields that nobody knows are ignored, as in both APIs;
those that one of them knows and llamakeep does not are in `constraints.py`. Numbers are not taken
from texts, and have ranges, so that no later stage meets one that it cannot hold.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

MOST = (1 << 31) - 1
MOST_PROBS = 100
"""Most of the likeliest tokens that `/completion` tells with each token of an answer."""
_TEXT = 256
_WORDS = 128
_WORD_CHARS = 4096
MOST_MESSAGES = 1 << 14
"""Messages of a conversation, or what an API has in their place: blocks, items."""
MOST_TOOLS = 1024

Count = Annotated[int, Field(ge=-1, le=MOST)]
Number = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Name = Annotated[str, Field(max_length=_TEXT)]
Word = Annotated[str, Field(max_length=_WORD_CHARS)]
Messages = Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MOST_MESSAGES)]

_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": MOST}}
_MIXED = {"type": "array", "items": {"anyOf": [_TOKENS["items"], {"type": "string"}]}}
_PROMPT: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {**_MIXED, "minItems": 1},
        {"type": "array", "items": {"anyOf": [{"type": "string"}, _MIXED]}, "minItems": 1},
    ]
}
_BIAS = {
    "anyOf": [
        {"type": "object", "additionalProperties": {"type": ["number", "boolean"]}},
        {"type": "array", "items": {"type": "array", "minItems": 2, "maxItems": 2}},
        {"type": "null"},
    ]
}
_STOP = {
    "anyOf": [
        {"type": "string", "maxLength": _WORD_CHARS},
        {
            "type": "array",
            "items": {"type": "string", "maxLength": _WORD_CHARS},
            "maxItems": _WORDS,
        },
        {"type": "null"},
    ]
}
_CHOICE = {
    "anyOf": [
        {"type": "string", "enum": ["auto", "none", "required"]},
        {"type": "object"},
        {"type": "null"},
    ]
}
Choice = Annotated[Any, WithJsonSchema(_CHOICE)]
Prompt = Annotated[Any, WithJsonSchema(_PROMPT)]
Schema = Annotated[
    Any, WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "boolean"}, {"type": "null"}]})
]
Bias = Annotated[Any, WithJsonSchema(_BIAS)]


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _delimited(value: Any) -> Any:
    return {"delimiter": value} if isinstance(value, str) else value


Words = Annotated[
    list[Word], Field(max_length=_WORDS), BeforeValidator(_listed), WithJsonSchema(_STOP)
]


class _Body(BaseModel):
    """A JSON object; what it does not name is kept aside for `constraints.py`."""

    model_config = ConfigDict(strict=True, extra="allow")

    def named(self, name: str) -> bool:
        """Whether the client gave this field a value that is not null."""
        return name in self.model_fields_set and getattr(self, name) is not None


class StreamOptions(_Body):
    """What else a stream shall carry."""

    include_usage: bool | None = Field(default=None, description="A last chunk with the usage.")


class Delimiter(_Body):
    """Where messages of a role start."""

    role: Name | None = Field(default=None, description="Whose; `user` if absent.")
    delimiter: Word = Field(description="The text that a message starts with.")


Delimiters = Annotated[
    list[Annotated[Delimiter, BeforeValidator(_delimited)]], Field(max_length=64)
]


class SamplingFields(_Body):
    """How tokens are chosen. What is absent has the endpoint's default."""

    temperature: Number | None = Field(
        default=None, description="0 or less takes the likeliest token."
    )
    top_k: Count | None = Field(default=None, description="0 for all tokens.")
    top_p: Share | None = Field(default=None, description="1 for all tokens.")
    min_p: Share | None = Field(default=None, description="0 for all tokens.")
    typical_p: Share | None = Field(default=None, description="1 for off.")
    repeat_penalty: Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)] | None = Field(
        default=None, description="1 for off."
    )
    repeat_last_n: Count | None = Field(default=None, description="-1 for the whole context.")
    presence_penalty: Number | None = Field(default=None, description="0 for off.")
    frequency_penalty: Number | None = Field(default=None, description="0 for off.")
    seed: Annotated[int, Field(ge=-(1 << 63), le=(1 << 64) - 1)] | None = Field(
        default=None, description="-1 for another one each time."
    )
    min_keep: Annotated[int, Field(ge=0, le=MOST)] | None = Field(
        default=None, description="Tokens that the filters leave at least."
    )
    ignore_eos: bool | None = Field(
        default=None, description="Do not let the model end the answer."
    )
    logit_bias: Bias = Field(
        default=None,
        description="From tokens (or texts) to what is added to their logits; false forbids one.",
    )


class NamedSchema(_Body):
    """A JSON schema, as OpenAI's API wraps it."""

    name: Name | None = Field(default=None, description="Not looked at.")
    description: str | None = Field(default=None, description="Not looked at.")
    schema_: Schema = Field(
        default=None, alias="schema", description="The schema; any object, if absent."
    )
    strict: bool | None = Field(
        default=None, description="Not looked at: the schema is always followed."
    )


class ResponseFormat(_Body):
    """What an answer has to be."""

    type: Literal["text", "json_object", "json_schema"] = Field(
        description="Anything, a JSON object, or JSON that validates against a schema."
    )
    json_schema: NamedSchema | None = Field(
        default=None, description="The schema of `json_schema`."
    )
    schema_: Schema = Field(
        default=None, alias="schema", description="A schema for `json_object`, as llama-server."
    )


class AnswerFields(SamplingFields):
    """What all three kinds of completion have in common."""

    model: str | None = Field(default=None, description="Not looked at: there is one model.")
    stream: bool | None = Field(default=None, description="Send the answer piece by piece.")
    stop: Words | None = Field(
        default=None, description="Texts that end the answer; they are not part of it."
    )
    n_predict: Count | None = Field(
        default=None, description="llama-server's name of `max_tokens`."
    )
    max_tokens: Count | None = Field(
        default=None, description="Tokens to generate at most; -1: no limit."
    )
    max_completion_tokens: Count | None = Field(
        default=None, description="OpenAI's newer name of it."
    )
    n: Annotated[int, Field(ge=1, le=128)] | None = Field(
        default=None, description="Answers per prompt."
    )
    n_cmpl: Annotated[int, Field(ge=1, le=128)] | None = Field(
        default=None, description="llama-server's name of `n`."
    )
    cache_prompt: bool | None = Field(
        default=None, description="false evaluates the whole prompt (`cache_mode` write)."
    )
    cache_mode: Literal["on", "read", "write", "off"] | None = Field(
        default=None,
        description="Whether kept states may be used (`read`), added (`write`), or both.",
    )
    cache_salt: Name | None = Field(
        default=None, description="Requests with different salts share nothing."
    )
    id_slot: Annotated[int, Field(ge=-1, le=MOST)] | None = Field(
        default=None, description="Answer in this slot, waiting for it; -1 for any."
    )
    timings_per_token: bool | None = Field(
        default=None, description="Times in every chunk of a stream."
    )
    return_progress: bool | None = Field(
        default=None, description="Chunks that tell how far the prompt is evaluated."
    )
    sse_ping_interval: Annotated[int, Field(ge=-1, le=MOST)] | None = Field(
        default=None, description="Seconds until a silent stream has a comment; -1 for never."
    )
    grammar: str | None = Field(
        default=None, description="In GBNF, with a rule `root`: what the answer has to match."
    )
    json_schema: Schema = Field(
        default=None, description="A JSON schema that the answer has to validate against."
    )
    response_format: ResponseFormat | None = Field(
        default=None, description="What the answer has to be, as OpenAI's API says it."
    )
    verbose: bool | None = Field(
        default=None, description="Add `__verbose` with the prompt's text."
    )

    def stop_words(self) -> tuple[str, ...]:
        """Return the texts that end the answer, without empty ones."""
        return tuple(word for word in self.stop or () if word)

    def limit(self, default: int | None) -> int | None:
        """Return the most tokens to generate; None for no limit."""
        for value in (self.n_predict, self.max_completion_tokens, self.max_tokens):
            if value is not None:
                return None if value < 0 else value
        return default

    @property
    def choices(self) -> int:
        """Answers to each prompt."""
        return self.n_cmpl or self.n or 1


class NativeCompletion(AnswerFields):
    """A request to `/completion`."""

    prompt: Prompt = Field(
        description="A text, tokens, both mixed, or a list of prompts, each with its answer."
    )
    n_probs: Annotated[int, Field(ge=0, le=MOST_PROBS)] | None = Field(
        default=None, description="How many of the likeliest tokens come with each."
    )
    logprobs: Annotated[int, Field(ge=0, le=MOST_PROBS)] | None = Field(
        default=None, description="Another name of `n_probs`."
    )
    return_tokens: bool | None = Field(default=None, description="The tokens, not only their text.")
    response_fields: Annotated[list[Name], Field(max_length=_WORDS)] | None = Field(
        default=None, description="Only these fields; `generation_settings/seed` for inner ones."
    )
    message_delimiters: Delimiters | None = Field(
        default=None, description="Texts that user messages start with."
    )


class OpenAIFields(AnswerFields):
    """What OpenAI's two completions have in common."""

    stream_options: StreamOptions | None = Field(
        default=None, description="What else a stream carries."
    )
    user: str | None = Field(default=None, description="Not looked at.")


class Completion(OpenAIFields):
    """A request to `/v1/completions`."""

    prompt: Prompt = Field(
        description="A text, a list of texts, tokens, or a list of tokens: an answer for each."
    )
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = Field(
        default=None, description="How many of the likeliest tokens come with each."
    )
    echo: bool | None = Field(default=None, description="Not supported: a 400 when true.")
    suffix: str | None = Field(default=None, description="Not supported: a 400.")
    best_of: Annotated[int, Field(ge=1, le=128)] | None = Field(
        default=None, description="Not supported: a 400 unless it is `n`."
    )


class TemplateFields(_Body):
    """A conversation, and how its template is filled in."""

    messages: Messages = Field(description="The conversation.")
    add_generation_prompt: bool | None = Field(
        default=None, description="End the prompt where the answer begins."
    )
    continue_final_message: bool | None = Field(
        default=None,
        description="Let the answer go on with the last message, one of the assistant.",
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="More values for the template."
    )
    reasoning_effort: Name | None = Field(default=None, description="Handed to the template.")
    reasoning_format: Literal["none", "auto", "deepseek"] | None = Field(
        default=None,
        description="`none` leaves what the model thinks in the content; else it stands apart.",
    )
    tools: Annotated[list[dict[str, Any]], Field(max_length=MOST_TOOLS)] | None = Field(
        default=None, description="What the model may call."
    )
    tool_choice: Choice = Field(
        default=None, description="auto, none, required, or an object that names a function."
    )
    parallel_tool_calls: bool | None = Field(
        default=None, description="false ends the answer after one call."
    )

    @property
    def told(self) -> list[Any]:
        """All that a template gets and that may be long."""
        return [self.messages, self.chat_template_kwargs, self.tools]


class ChatCompletion(OpenAIFields, TemplateFields):
    """A request to `/v1/chat/completions`."""

    logprobs: bool | None = Field(default=None, description="The log probability of each token.")
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        default=None, description="And how many of the likeliest tokens."
    )


class ApplyTemplate(TemplateFields):
    """A request to `/apply-template`, or to count the tokens of a conversation."""


class Tokenize(_Body):
    """A request to `/tokenize`."""

    content: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, _MIXED]})] = Field(
        default="", description="A text, or texts and tokens mixed."
    )
    add_special: bool | None = Field(
        default=None, description="Begin as a prompt does; no, if absent."
    )
    parse_special: bool | None = Field(
        default=None, description="Read special tokens in the text; yes, if absent."
    )
    with_pieces: bool | None = Field(default=None, description="Each token with its text.")


class Detokenize(_Body):
    """A request to `/detokenize`."""

    tokens: Annotated[Any, WithJsonSchema(_TOKENS)] = Field(
        default_factory=list, description="Tokens."
    )


class SlotAction(_Body):
    """A request to save or restore a slot."""

    filename: str | None = Field(default=None, description="A plain name, without a path.")
    cache_salt: Name | None = Field(
        default=None,
        description="The salt of the requests that filled the slot. Each salt has its own files.",
    )
