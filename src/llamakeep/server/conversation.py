"""From a conversation to a prompt: through the model's chat template, with its message starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from llamakeep.chat_template import token_starts
from llamakeep.runtime.base import Vocab
from llamakeep.server.errors import ApiError
from llamakeep.server.ports import Prompt
from llamakeep.server.schema import TemplateFields

NO_TEMPLATE = (
    "this model has no chat template: start the server with --chat-template-file, or send a "
    "prompt to /v1/completions"
)


class Rendered(Protocol):
    """A conversation as a text."""

    @property
    def text(self) -> str:
        """The prompt."""
        ...  # pragma: no cover - protocol

    @property
    def starts(self) -> Sequence[int]:
        """Where each user message's turn begins in it, in characters."""
        ...  # pragma: no cover - protocol


class Template(Protocol):
    """What turns messages into a text (`llamakeep.chat_template.ChatTemplate`)."""

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """Return the text of `messages`.

        Raises:
            TemplateError: With the template's own words.
        """
        ...  # pragma: no cover - protocol


class Conversations:
    """Makes prompts of conversations. Any thread may use it.

    Args:
        template: The model's, or None if it has none.
        vocab: The model's.
    """

    def __init__(self, template: Template | None, vocab: Vocab) -> None:
        self._template = template
        self._vocab = vocab

    def text(self, body: TemplateFields, tools: list[dict[str, Any]] | None = None) -> str:
        """Return the text that a conversation becomes.

        Raises:
            ApiError: For messages that are none, or if there is no template.
            TemplateError: What the template refuses.
        """
        return self._render(body, tools)[0]

    def prompt(self, body: TemplateFields, tools: list[dict[str, Any]] | None = None) -> Prompt:
        """Return the prompt that a conversation becomes. Raises what `text` does."""
        text, starts = self._render(body, tools)
        tokens, at = token_starts(text, starts, self._vocab.tokenize)
        if not tokens.size:
            raise ApiError("'messages' become an empty prompt", param="messages")
        return Prompt(tokens, tuple(sorted({start for start in at if start < tokens.size})))

    def _render(
        self, body: TemplateFields, tools: list[dict[str, Any]] | None
    ) -> tuple[str, Sequence[int]]:
        if self._template is None:
            raise ApiError(NO_TEMPLATE, code=501)
        messages = body.messages
        for index, message in enumerate(messages):
            _check(message, index)
        goes_on = _goes_on(body)
        extra = dict(body.chat_template_kwargs or {})
        if body.reasoning_effort is not None:
            extra.setdefault("reasoning_effort", body.reasoning_effort)
        beginning = _last_text(messages[-1]) if goes_on else ""
        if goes_on and not beginning:
            messages, goes_on = messages[:-1], False
        rendered = self._template.render_chat(
            messages,
            add_generation_prompt=not goes_on and body.add_generation_prompt is not False,
            tools=tools or None,
            extra=extra,
        )
        if not goes_on:
            return rendered.text, rendered.starts
        text = _cut_after(rendered.text, beginning)
        return text, [start for start in rendered.starts if start < len(text)]


def _check(message: Mapping[str, Any], index: int) -> None:
    """Raise for a message without a role, or with a content that is none."""
    if not isinstance(message.get("role"), str):
        name = f"messages.{index}.role"
        raise ApiError(f"'{name}' must be a text", param=name)
    name = f"messages.{index}.content"
    content = message.get("content")
    if "content" not in message and not message.get("tool_calls"):
        raise ApiError(f"'{name}' is required", param=name)
    if content is not None and not isinstance(content, str | list):
        raise ApiError(f"'{name}' must be a text or a list of parts", param=name)


def _goes_on(body: TemplateFields) -> bool:
    """Return whether the answer goes on with the last message, as llama-server has it.

    It does if the message is the assistant's, unless a new turn is asked for.
    """
    messages = body.messages
    if body.continue_final_message and body.add_generation_prompt:
        raise ApiError(
            "'add_generation_prompt' and 'continue_final_message' cannot both be true",
            param="continue_final_message",
        )
    if messages[-1].get("role") != "assistant" or body.continue_final_message is False:
        return False
    if body.add_generation_prompt and not body.continue_final_message:
        return False
    if len(messages) > 1 and messages[-2].get("role") == "assistant":
        raise ApiError("'messages' must not end with two of the assistant", param="messages")
    return not messages[-1].get("tool_calls")


def _last_text(message: Mapping[str, Any]) -> str:
    """Return the text that a message ends with."""
    content = message.get("content") or ""
    if isinstance(content, list):
        last = content[-1]
        content = last.get("text") if isinstance(last, dict) else ""
    return content if isinstance(content, str) else ""


def _cut_after(text: str, beginning: str) -> str:
    """Return `text` up to the last place where it has `beginning`, which templates may trim."""
    for wanted in (beginning, beginning.strip()):
        at = text.rfind(wanted) if wanted else -1
        if at >= 0:
            return text[: at + len(wanted)]
    raise ApiError("the chat template does not show the last message", param="messages")
