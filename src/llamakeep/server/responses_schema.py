"""What clients send to `/v1/responses`: the fields, their types and their ranges."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from llamakeep.server.schema import MOST, MOST_MESSAGES, MOST_TOOLS, AnswerFields, Choice, Name

_INPUT = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "object"}, "maxItems": MOST_MESSAGES},
        {"type": "null"},
    ]
}
Input = Annotated[Any, WithJsonSchema(_INPUT)]
Summary = Literal["auto", "concise", "detailed"]
Included = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class _Part(BaseModel):
    """An object; what it does not name is not looked at."""

    model_config = ConfigDict(strict=True, extra="allow")


class TextFormat(_Part):
    """What the text of an answer has to be."""

    type: Literal["text", "json_object", "json_schema"] = Field(
        description="Anything, a JSON object, or JSON that validates against `schema`."
    )
    schema_: dict[str, Any] | None = Field(
        default=None, alias="schema", description="The schema; any object, if absent."
    )
    name: Name | None = Field(default=None, description="Not looked at.")
    description: str | None = Field(default=None, description="Not looked at.")
    strict: bool | None = Field(
        default=None, description="Not looked at: the schema is always followed."
    )


class TextConfig(_Part):
    """How the text of an answer is to be."""

    format: TextFormat | None = Field(default=None, description="What it has to be.")
    verbosity: Literal["low", "medium", "high"] | None = Field(
        default=None, description="Not looked at."
    )


class Reasoning(_Part):
    """How the model is to think."""

    effort: Name | None = Field(
        default=None,
        description="Handed to the template as `reasoning_effort`; `none` asks for no thoughts.",
    )
    summary: Summary | None = Field(
        default=None, description="Not looked at: thoughts are told whole, and never summed up."
    )


class Asked(AnswerFields):
    """What both endpoints of `/v1/responses` read of a request."""

    input: Input = Field(default=None, description="A text, or items: messages, calls, results.")
    instructions: str | None = Field(default=None, description="A system message before the input.")
    tools: Annotated[list[dict[str, Any]], Field(max_length=MOST_TOOLS)] | None = Field(
        default=None, description="What the model may call: functions, custom tools, namespaces."
    )
    tool_choice: Choice = Field(
        default=None, description="auto, none, required, or an object that names tools."
    )
    parallel_tool_calls: bool | None = Field(
        default=None, description="false ends the answer after one call."
    )
    text: TextConfig | None = Field(default=None, description="What the answer has to be.")
    reasoning: Reasoning | None = Field(default=None, description="How the model is to think.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        default=None, description="More values for the template."
    )
    truncation: Literal["auto", "disabled"] | None = Field(
        default=None, description="Nothing is ever left out: what is too long is a 400."
    )
    previous_response_id: Any = Field(default=None, description="Not supported: a 400.")
    conversation: Any = Field(default=None, description="Not supported: a 400.")


class CreateResponse(Asked):
    """A request to `/v1/responses`."""

    max_output_tokens: Annotated[int, Field(ge=1, le=MOST)] | None = Field(
        default=None, description="Tokens to generate at most, thoughts included."
    )
    max_tool_calls: Annotated[int, Field(ge=1, le=MOST)] | None = Field(
        default=None, description="Not looked at: it is of calls that a server makes."
    )
    include: Annotated[list[Included], Field(max_length=64)] | None = Field(
        default=None,
        description="`message.output_text.logprobs` and `reasoning.encrypted_content` say "
        "something here.",
    )
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = Field(
        default=None, description="How many of the likeliest tokens `include` brings with each."
    )
    metadata: Annotated[dict[str, str], Field(max_length=16)] | None = Field(
        default=None, description="Told again in the answer."
    )
    store: bool | None = Field(default=None, description="Nothing is stored: answered with false.")
    background: bool | None = Field(default=None, description="Not supported: a 400 when true.")
    prompt: Any = Field(default=None, description="Not supported: a 400.")
    context_management: Any = Field(default=None, description="Not supported: a 400.")
    moderation: Any = Field(default=None, description="Not supported: a 400.")
    user: str | None = Field(default=None, description="Told again in the answer.")
    safety_identifier: str | None = Field(default=None, description="Told again in the answer.")
    prompt_cache_key: str | None = Field(
        default=None,
        description="Told again in the answer. Keeps nobody apart: that is `cache_salt`.",
    )
    service_tier: Name | None = Field(default=None, description="Answered with `default`.")
    stream_options: dict[str, Any] | None = Field(default=None, description="Not looked at.")

    def includes(self, name: Included) -> bool:
        """Whether the answer shall have this, too."""
        return name in (self.include or ())

    def limit(self, default: int | None) -> int | None:
        """Return the most tokens to generate; None for no limit."""
        return self.max_output_tokens or super().limit(default)


class CountInput(Asked):
    """A request to `/v1/responses/input_tokens`."""
