"""What clients of Anthropic's API send: the fields of a request, their types and their ranges.

Fields that nobody knows are refused, as in Anthropic's API, and those that mean nothing here are
taken and not looked at. null is the same as absent.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from llamakeep.server.schema import MOST, MOST_MESSAGES, MOST_TOOLS, Name, Share, Word

MOST_CACHE_CONTROLS: Final = 4
_MOST_WORDS = 128
_LEAST_BUDGET_TOKENS = 1024
_RUN_ELSEWHERE = (
    "advisor_",
    "code_execution_",
    "mcp_toolset",
    "tool_search_tool_",
    "web_fetch_",
    "web_search_",
)
_SHAPES_ELSEWHERE = ("bash_", "browser_", "computer_", "memory_", "text_editor_")

Object = Annotated[dict[str, Any], WithJsonSchema({"type": "object"})]
Anything = Annotated[Any, WithJsonSchema({})]


def _blocks(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


def _known(*kinds: str) -> BeforeValidator:
    """Refuse blocks of other kinds by their names; what is no block is refused later."""

    def check(value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind not in kinds:
            raise PydanticCustomError(
                "block_type",
                "blocks of type {kind} cannot be read here, only {known}",
                {"kind": repr(kind[:64]), "known": ", ".join(kinds)},
            )
        return value

    return BeforeValidator(check)


def _unsupported(name: str, why: str) -> PydanticCustomError:
    return PydanticCustomError("not_supported", "'{name}' {why}", {"name": name, "why": why})


def _only_nothing(name: str, why: str) -> AfterValidator:
    """Refuse a field unless it asks for nothing."""

    def check(value: Any) -> Any:
        if value:
            raise _unsupported(name, f"is not supported: {why}")
        return value

    return AfterValidator(check)


class _Fields(BaseModel):
    """A JSON object that has these fields and no others."""

    model_config = ConfigDict(strict=True, extra="forbid")


class CacheControl(_Fields):
    """A place after which prompts are expected to part."""

    type: Literal["ephemeral"] = Field(description="There is one type.")
    ttl: Literal["5m", "1h"] | None = Field(
        default=None, description="Not looked at: what is kept stays as long as there is room."
    )
    scope: Anything = Field(default=None, description="Not looked at: `cache_salt` keeps apart.")


class _Block(_Fields):
    """What most blocks of content have."""

    cache_control: CacheControl | None = Field(
        default=None, description="A hint: the prompt is expected to come again up to here."
    )


class TextBlock(_Block):
    """A text."""

    type: Literal["text"]
    text: str
    citations: Anything = Field(default=None, description="Not looked at.")


class SearchResult(_Block):
    """A text that was found somewhere."""

    type: Literal["search_result"]
    source: str
    title: str
    content: Annotated[list[TextBlock], Field(max_length=MOST_MESSAGES)]
    citations: Anything = Field(default=None, description="Not looked at.")


class ToolUse(_Block):
    """A call that the model has made."""

    type: Literal["tool_use"]
    id: Annotated[str, Field(min_length=1, max_length=256)]
    name: Annotated[str, Field(min_length=1, max_length=256)]
    input: Object = Field(description="The arguments.")
    caller: Anything = Field(default=None, description="Not looked at.")


_ResultPart = Annotated[
    Annotated[TextBlock | SearchResult, Field(discriminator="type")],
    _known("text", "search_result"),
]
_ResultParts = Annotated[
    list[_ResultPart],
    Field(max_length=MOST_MESSAGES),
    BeforeValidator(_blocks, json_schema_input_type=str | list[_ResultPart]),
]


class ToolResult(_Block):
    """What a call came to."""

    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(min_length=1, max_length=256)]
    content: _ResultParts | None = Field(default=None, description="A text, or blocks of text.")
    is_error: bool | None = Field(default=None, description="The call has failed.")


class Thinking(_Fields):
    """What the model has thought."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = Field(default=None, description="Not looked at.")


class RedactedThinking(_Fields):
    """What a model has thought, and nobody can read."""

    type: Literal["redacted_thinking"]
    data: str = Field(description="Not looked at.")


_Part = Annotated[
    Annotated[
        TextBlock | SearchResult | ToolUse | ToolResult | Thinking | RedactedThinking,
        Field(discriminator="type"),
    ],
    _known("text", "search_result", "tool_use", "tool_result", "thinking", "redacted_thinking"),
]
_Parts = Annotated[
    list[_Part],
    Field(max_length=MOST_MESSAGES),
    BeforeValidator(_blocks, json_schema_input_type=str | list[_Part]),
]
_Text = Annotated[TextBlock, _known("text")]
_Texts = Annotated[
    list[_Text],
    Field(max_length=MOST_MESSAGES),
    BeforeValidator(_blocks, json_schema_input_type=str | list[_Text]),
]


class Message(_Fields):
    """A turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: _Parts = Field(description="A text, or blocks.")


def _custom(value: Any) -> Any:
    if not isinstance(value, str) or value == "custom":
        return value
    if value.startswith(_RUN_ELSEWHERE):
        why = "runs on Anthropic's servers and not here: leave it out"
    elif value.startswith(_SHAPES_ELSEWHERE):
        why = (
            "has no schema here, for only Anthropic's models know it: send it as a tool of type "
            "custom, with its input_schema"
        )
    else:
        why = "is no type of tool that is known here: send it as custom, with its input_schema"
    raise _unsupported(value[:64], why)


def _direct(value: list[str] | None) -> list[str] | None:
    if value is not None and "direct" not in value:
        raise _unsupported("allowed_callers", "must have direct: no code calls tools here")
    return value


class CustomTool(_Fields):
    """A tool that the client runs."""

    type: Annotated[Name | None, BeforeValidator(_custom)] = Field(
        default=None, description="custom, or absent."
    )
    name: str = Field(description="Letters, digits and `_.:/-`.")
    description: str | None = Field(default=None, description="For the model.")
    input_schema: Object = Field(description="A JSON schema of the arguments.")
    strict: bool | None = Field(
        default=None, description="A schema that cannot be followed to the letter is a 400."
    )
    cache_control: CacheControl | None = Field(default=None, description="A hint: as in blocks.")
    allowed_callers: Annotated[list[Name] | None, AfterValidator(_direct)] = Field(
        default=None, description="Must have `direct`."
    )
    defer_loading: bool | None = Field(
        default=None, description="Not looked at: all tools are told at once."
    )
    eager_input_streaming: bool | None = Field(
        default=None, description="Not looked at: arguments are streamed as they come."
    )
    input_examples: Anything = Field(default=None, description="Not looked at.")


class ToolChoice(_Fields):
    """Whether tools may, must or must not be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = Field(default=None, description="Of `tool`: the one to be called.")
    disable_parallel_tool_use: bool | None = Field(
        default=None, description="true ends the answer after one call."
    )


class ThinkingConfig(_Fields):
    """Whether the model thinks before it answers."""

    type: Literal["enabled", "adaptive", "between_tools", "disabled"] = Field(
        description="`disabled`, or all others: handed to the template as `enable_thinking`."
    )
    budget_tokens: Annotated[int, Field(ge=_LEAST_BUDGET_TOKENS, le=MOST)] | None = Field(
        default=None, description="Not looked at."
    )
    display: Literal["summarized", "omitted"] | None = Field(
        default=None, description="`omitted` leaves the text of thoughts out."
    )


class JsonFormat(_Fields):
    """An answer that is JSON."""

    type: Literal["json_schema"]
    schema_: Object = Field(alias="schema", description="What it validates against.")


class OutputConfig(_Fields):
    """How the model answers."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        default=None,
        description="Handed to the template as `reasoning_effort`; the last two are `high`.",
    )
    format: JsonFormat | None = Field(default=None, description="What the answer has to be.")
    task_budget: Anything = Field(default=None, description="Not looked at.")


class TokenCount(_Fields):
    """A request to `/v1/messages/count_tokens`: a conversation."""

    model: Name = Field(description="Answered back: there is one model.")
    messages: Annotated[list[Message], Field(min_length=1, max_length=MOST_MESSAGES)] = Field(
        description="The conversation; a last turn of the assistant is gone on with."
    )
    system: _Texts | None = Field(default=None, description="A text, or blocks of text.")
    tools: Annotated[list[CustomTool], Field(max_length=MOST_TOOLS)] | None = Field(
        default=None, description="What the model may call."
    )
    tool_choice: ToolChoice | None = Field(default=None, description="Which of them, and whether.")
    thinking: ThinkingConfig | None = Field(
        default=None, description="As the template has it, if absent."
    )
    output_config: OutputConfig | None = Field(default=None, description="How it answers.")
    output_format: JsonFormat | None = Field(
        default=None, description="An older name of `output_config.format`."
    )
    cache_control: CacheControl | None = Field(
        default=None, description="A hint: as if it stood in the last block."
    )
    context_management: Anything = Field(
        default=None, description="Not looked at: nothing is taken out of a conversation."
    )
    speed: Anything = Field(default=None, description="Not looked at.")
    user_profile_id: Anything = Field(default=None, description="Not looked at.")
    mcp_servers: Annotated[
        list[Anything] | None,
        _only_nothing("mcp_servers", "no MCP server is asked from here; send their tools"),
    ] = Field(default=None, description="Not supported: a 400, unless it is empty.")


class CreateMessage(TokenCount):
    """A request to `/v1/messages`."""

    max_tokens: Annotated[int, Field(ge=0, le=MOST)] = Field(
        description="Tokens to generate at most; 0 evaluates the prompt, and keeps it."
    )
    stream: bool | None = Field(default=None, description="Send the answer piece by piece.")
    stop_sequences: Annotated[list[Word], Field(max_length=_MOST_WORDS)] | None = Field(
        default=None, description="Texts that end the answer; they are not part of it."
    )
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = Field(
        default=None, description="0 takes the likeliest token."
    )
    top_p: Share | None = Field(default=None, description="1 for all tokens.")
    top_k: Annotated[int, Field(ge=0, le=MOST)] | None = Field(
        default=None, description="0 for all tokens."
    )
    cache_mode: Literal["on", "read", "write", "off"] | None = Field(
        default=None,
        description="Whether kept states may be used (`read`), added (`write`), or both.",
    )
    cache_salt: Name | None = Field(
        default=None, description="Requests with different salts share nothing."
    )
    metadata: Anything = Field(
        default=None,
        description="Its `user_id` is the session in the log of requests; no more is read.",
    )
    service_tier: Anything = Field(default=None, description="Not looked at.")
    inference_geo: Anything = Field(default=None, description="Not looked at.")
    diagnostics: Anything = Field(
        default=None, description="Not looked at: `/cache` says why a prompt was evaluated."
    )
    billing_policy: Anything = Field(default=None, description="Not looked at.")
    fallbacks: Anything = Field(default=None, description="Not looked at: there is one model.")
    fallback_credit_token: Anything = Field(default=None, description="Not looked at.")
    compaction: Annotated[
        Anything, _only_nothing("compaction", "conversations are not made shorter here")
    ] = Field(default=None, description="Not supported: a 400, unless it is null.")
    container: Annotated[
        Anything, _only_nothing("container", "there are no containers and skills here")
    ] = Field(default=None, description="Not supported: a 400, unless it is null.")
    thread: Annotated[
        Anything, _only_nothing("thread", "send the whole conversation: its prefix is kept")
    ] = Field(default=None, description="Not supported: a 400, unless it is null.")
