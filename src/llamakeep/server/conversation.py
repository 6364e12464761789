"""From a conversation to a prompt: through the model's chat template, with its message starts."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from llamakeep.chat_template import ChatTemplate, token_starts
from llamakeep.runtime.base import Vocab
from llamakeep.server.errors import ApiError
from llamakeep.server.prompts import Prompt
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


class Conversations:
    """Makes prompts of conversations. Any thread may use it.

    Args:
        template: The model's, or None if it has none.
        vocab: The model's.
        values: For the template, where a request has no others.
        prefill: An answer goes on with a last message of the assistant, where a request does not
            say.
    """

    def __init__(
        self,
        template: ChatTemplate | None,
        vocab: Vocab,
        *,
        values: Mapping[str, Any] | None = None,
        prefill: bool = True,
    ) -> None:
        self._template = template
        self._vocab = vocab
        self._values = dict(values or {})
        self._prefill = prefill

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
        goes_on = _goes_on(body, prefill=self._prefill)
        extra = dict(self._values)
        if body.reasoning_effort is not None:
            extra["reasoning_effort"] = body.reasoning_effort
        extra |= body.chat_template_kwargs or {}
        beginning = _last_text(messages[-1]) if goes_on else ""
        if goes_on and not beginning:
            messages, goes_on = messages[:-1], False
        if goes_on:
            return self._render_open(messages, beginning, tools, extra)
        rendered = self._template.render_chat(
            messages,
            add_generation_prompt=body.add_generation_prompt is not False,
            tools=tools or None,
            extra=extra,
        )
        return rendered.text, rendered.starts

    def _render_open(
        self,
        messages: Sequence[Mapping[str, Any]],
        beginning: str,
        tools: list[dict[str, Any]] | None,
        extra: Mapping[str, Any],
    ) -> tuple[str, Sequence[int]]:
        """Return the text of a conversation whose last message is not complete.

        Where its text stands is found with another text in its place, which occurs nowhere else:
        the text itself may also occur in what the template writes around it.
        """
        template = self._template
        assert template is not None

        def render(messages: Sequence[Mapping[str, Any]]) -> Rendered:
            return template.render_chat(
                messages, add_generation_prompt=False, tools=tools or None, extra=extra
            )

        whole = render(messages)
        mark = _mark(whole.text)
        *others, last = messages
        before, found, after = render([*others, _with_text(last, mark)]).text.rpartition(mark)
        if not found:
            raise ApiError("the chat template does not show the last message", param="messages")
        text = _open_end(whole.text, before, beginning, after)
        return text, [start for start in whole.starts if start < len(text)]


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


def _goes_on(body: TemplateFields, *, prefill: bool) -> bool:
    """Return whether the answer goes on with the last message, as llama-server has it.

    It does if the message is the assistant's, unless a new turn is asked for; without `prefill`
    only if that is asked for.
    """
    messages = body.messages
    if body.continue_final_message and body.add_generation_prompt:
        raise ApiError(
            "'add_generation_prompt' and 'continue_final_message' cannot both be true",
            param="continue_final_message",
        )
    if messages[-1].get("role") != "assistant" or body.continue_final_message is False:
        return False
    if not body.continue_final_message and (body.add_generation_prompt or not prefill):
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


def _mark(text: str) -> str:
    """Return a word of plain letters that is not in `text`, nor can be put there on purpose."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:12]
    return "".join(chr(ord("a") + half) for byte in digest for half in divmod(byte, 16))


def _with_text(message: Mapping[str, Any], text: str) -> dict[str, Any]:
    """Return a message that ends with another text."""
    content = message["content"]
    if isinstance(content, list):
        return {**message, "content": [*content[:-1], {**content[-1], "text": text}]}
    return {**message, "content": text}


def _open_end(whole: str, before: str, beginning: str, after: str) -> str:
    """Return a conversation up to the end of its last text.

    Args:
        whole: The conversation.
        before: What the template writes before the last text.
        beginning: That text.
        after: What comes after it.
    """
    text = before + beginning
    if not whole.endswith(after) or whole == text + after:
        return text
    made = whole[: len(whole) - len(after)]
    if made.startswith(before) and made[len(before) :].strip() == beginning.strip():
        return text  # the template trims it; what the client sent counts
    return made  # it makes something else of it: of thoughts, for example
