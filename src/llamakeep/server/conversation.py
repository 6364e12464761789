"""From a conversation to a prompt: through the model's chat template, with its message starts."""

from __future__ import annotations

import functools
import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from llamakeep.chat_template import ChatTemplate, token_starts
from llamakeep.errors import GrammarError
from llamakeep.runtime.base import Vocab
from llamakeep.server.errors import ApiError
from llamakeep.server.messages import check_messages
from llamakeep.server.prompts import Prompt
from llamakeep.server.seams import seams_of
from llamakeep.server.talk import Chat, Plan
from llamakeep.server.tool_grammars import ToolGrammars
from llamakeep.template_tools import short_id
from llamakeep.tool_calls import (
    GENERIC,
    Format,
    Said,
    Thoughts,
    Tool,
    format_of,
    is_closed,
    is_left_open,
    is_open,
    thoughts_of,
)
from llamakeep.tool_calls.described import described, without_calls
from llamakeep.tool_calls.grammar import Grammar

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


_GOES_ON = "cannot be had of an answer that goes on with a message of the assistant"
_THINKS = "enable_thinking"
"""What templates call it."""


class Conversations:
    """Makes prompts of conversations. Any thread may use it.

    Args:
        template: The model's, or None if it has none.
        vocab: The model's.
        n_ctx: Tokens that a prompt has room for; one that is longer is refused by the engine, so
            no grammar is made for it. None for no limit.
        values: For the template, where a request has no others.
        prefill: An answer goes on with a last message of the assistant, where a request does not
            say.
        thinks: The model is to think before it answers, or not to, where a request does not say;
            None for what its template does then.
        thoughts_apart: See `Chat`.
    """

    def __init__(
        self,
        template: ChatTemplate | None,
        vocab: Vocab,
        n_ctx: int | None = None,
        *,
        values: Mapping[str, Any] | None = None,
        prefill: bool = True,
        thinks: bool | None = None,
        thoughts_apart: bool = True,
    ) -> None:
        self._values = dict(values or {})
        if thinks is not None:
            self._values.setdefault(_THINKS, thinks)
        self._apart = thoughts_apart
        self._prefill = prefill
        self._n_ctx = n_ctx
        self._template = template
        self._vocab = vocab
        self._thoughts = None if template is None else thoughts_of(template.source)
        # A template that tells of tools, but writes calls in a way not known here, does not tell.
        knows = template is not None and template.traits.tools and template.traits.calls
        own = format_of(template.source) if template is not None and knows else None
        self._form = own or GENERIC
        self._grammars = ToolGrammars(vocab)

    def text(self, chat: Chat) -> str:
        """Return the text that a conversation becomes.

        Raises:
            ApiError: For messages that are none, or if there is no template.
            TemplateError: What the template refuses.
        """
        return self._render(chat)[0]

    def prompt(self, chat: Chat) -> Prompt:
        """Return the prompt that a conversation becomes. Raises what `text` does."""
        return self._prompt(*self._render(chat)[:2])

    def plan(self, chat: Chat) -> Plan:
        """Return how a conversation is answered.

        Costs a grammar for its tools, besides what `prompt` costs.

        Raises:
            ApiError: As `text`, for calls that the model cannot be held to, and for a format of an
                answer that goes on with a message: its grammar would begin anew.
            InvalidValue: For a tool that is to be called and is not there.
        """
        text, starts, beginning = self._render(chat)
        if beginning and chat.said is not None:
            raise ApiError(f"'{chat.said.where}' {_GOES_ON}", param=chat.said.where)
        tools = chat.choice.of(chat.tools)
        marked = self._thoughts
        if marked is not None and is_closed(text, marked):
            marked = None
        is_apart = self._apart if chat.thoughts_apart is None else chat.thoughts_apart
        thoughts = marked if is_apart else None
        # Told of tools in plain words, a model that may call none still answers in that form.
        form = self._form if tools or (chat.tools and self._form.generic) else None
        if form is not None and form.generic and chat.said is not None:
            form = replace(form, wraps=False)
        marks = tuple(marker.text for marker in form.markers) if form is not None else ()
        marks += (thoughts.open, thoughts.close) if thoughts is not None else ()
        if form is not None and form.named:
            marks += ("[ARGS]", "[CALL_ID]")
        thinking = marked is not None and (is_open(text, marked) or is_left_open(beginning, marked))
        if chat.seams:
            places = seams_of(text, chat, lambda other: self._render(other, starts=False)[0])
            starts = sorted({*starts, *places})
        prompt = self._prompt(text, starts)
        grammar = None
        is_held = form is not None or chat.said is not None
        if is_held and (self._n_ctx is None or prompt.tokens.size <= self._n_ctx):
            grammar = self._grammar(chat, form or self._form, marked, thinking)
        return Plan(
            prompt,
            self._new_id,
            form,
            {tool.name: tool for tool in tools},
            parallel=chat.parallel and not chat.choice.once,
            thoughts=thoughts,
            thinking=thinking,
            grammar=grammar,
            shown=self._shown(marks),
        )

    def _grammar(
        self, chat: Chat, form: Format, thoughts: Thoughts | None, thinking: bool
    ) -> Grammar | None:
        """Return what the answer has to match; None where it may be anything."""
        assert self._template is not None
        tools = chat.choice.of(chat.tools)
        try:
            return self._grammars.grammar(
                form,
                tools,
                required=chat.choice.mode == "required",
                parallel=chat.parallel and not chat.choice.once and self._template.traits.several,
                thoughts=thoughts,
                thinking=thinking,
                said=chat.said,
            )
        except GrammarError as error:
            raise _not_held(error, tools, chat.said) from error

    def _new_id(self) -> str:
        call_id = "call_" + secrets.token_hex(12)
        is_short = self._template is not None and self._template.traits.short_ids
        return short_id(call_id) if is_short else call_id

    @functools.lru_cache(maxsize=8)  # noqa: B019 - lives as long as the server
    def _shown(self, marks: tuple[str, ...]) -> frozenset[int]:
        """Return those of some texts that are special tokens, whose text answers would lack."""
        shown: set[int] = set()
        for mark in marks:
            tokens = self._vocab.tokenize(mark, add_special=False, parse_special=True)
            if tokens.size == 1 and self._vocab.piece(int(tokens[0])) != mark.encode():
                shown.add(int(tokens[0]))
        return frozenset(shown)

    def _prompt(self, text: str, starts: Sequence[int]) -> Prompt:
        tokens, at = token_starts(text, starts, self._vocab.tokenize)
        if not tokens.size:
            raise ApiError("'messages' become an empty prompt", param="messages")
        return Prompt(tokens, tuple(sorted({start for start in at if start < tokens.size})))

    def _render(self, chat: Chat, *, starts: bool = True) -> tuple[str, Sequence[int], str]:
        """Return the text, its starts (at half the cost: none), and what the answer goes on with.

        That is "" if it begins anew.
        """
        if self._template is None:
            raise ApiError(NO_TEMPLATE, code=501)
        chat = replace(chat, extra={**self._values, **chat.extra})
        check_messages(chat.messages)
        goes_on = _goes_on(chat, prefill=self._prefill)
        messages, tools = self._told(chat)
        beginning = ""
        if goes_on:
            messages = [*messages[:-1], _without_empty_end(messages[-1])]
            beginning = _last_text(messages[-1], len(messages) - 1)
        if goes_on and not beginning:
            messages, goes_on = messages[:-1], False
        if goes_on:
            return *self._render_open(messages, beginning, tools, chat.extra), beginning
        begins = chat.add_generation_prompt is not False
        if not starts:
            text = self._template.render(
                messages, add_generation_prompt=begins, tools=tools, extra=chat.extra
            )
            return self._settled(text, chat), (), ""
        rendered = self._template.render_chat(
            messages, add_generation_prompt=begins, tools=tools, extra=chat.extra
        )
        return self._settled(rendered.text, chat), rendered.starts, ""

    def _settled(self, text: str, chat: Chat) -> str:
        """Return a prompt whose thoughts are closed, if there are to be none and it opens some."""
        marks = self._thoughts
        if chat.extra.get(_THINKS) is False and marks is not None and is_open(text, marks):
            return text + marks.close
        return text

    def _told(self, chat: Chat) -> tuple[Sequence[Mapping[str, Any]], list[dict[str, Any]] | None]:
        """Return messages as the template can have them, and the tools that it can tell of.

        A template goes on to tell of tools that must not be called: so the prompt stays the same.
        """
        assert self._template is not None
        traits, messages = self._template.traits, chat.messages
        describes = self._form.generic and bool(chat.tools)
        if describes or not traits.calls:
            messages = without_calls(messages)
        if describes:
            messages = described(messages, chat.tools, has_system=traits.system)
        if self._form.generic or not chat.tools:
            return messages, None
        return messages, [tool.to_openai() for tool in chat.tools]

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
                messages, add_generation_prompt=False, tools=tools, extra=extra
            )

        whole = render(messages)
        mark = _mark(whole.text)
        *others, last = messages
        before, found, after = render([*others, _with_text(last, mark)]).text.rpartition(mark)
        if not found:
            raise ApiError("the chat template does not show the last message", param="messages")
        text = _open_end(whole.text, before, beginning, after)
        return text, [start for start in whole.starts if start < len(text)]


def _not_held(error: GrammarError, tools: Sequence[Tool], said: Said | None) -> ApiError:
    """Return what is said of a grammar that cannot be had, with the path that the client sent."""
    paths = [tool.path for tool in tools] + ([] if said is None else [said.where])
    if any(error.where == path or error.where.startswith(path + ".") for path in paths):
        return ApiError(str(error), param=error.where)
    if said is not None and not tools:
        message = f"'{said.where}': the answer cannot be held to it: {error}"
        return ApiError(message, param=said.where)
    return ApiError(f"'tools': calls cannot be held to them: {error}", param="tools")


def _goes_on(chat: Chat, *, prefill: bool) -> bool:
    """Return whether the answer goes on with the last message, as llama-server has it.

    It does if the message is the assistant's, unless a new turn is asked for; without `prefill`
    only if that is asked for.
    """
    messages = chat.messages
    if chat.continue_final_message and chat.add_generation_prompt:
        raise ApiError(
            "'add_generation_prompt' and 'continue_final_message' cannot both be true",
            param="continue_final_message",
        )
    if messages[-1].get("role") != "assistant" or chat.continue_final_message is False:
        return False
    if not chat.continue_final_message and (chat.add_generation_prompt or not prefill):
        return False
    if len(messages) > 1 and messages[-2].get("role") == "assistant":
        raise ApiError("'messages' must not end with two of the assistant", param="messages")
    return not messages[-1].get("tool_calls")


def _without_empty_end(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message without the texts at its end that are empty."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    n_parts = len(content)
    while n_parts and content[n_parts - 1] == {"type": "text", "text": ""}:
        n_parts -= 1
    return {**message, "content": content[:n_parts]}


def _last_text(message: Mapping[str, Any], index: int) -> str:
    """Return the text that a message ends with; "" for one that has nothing in it.

    Raises:
        ApiError: For one that ends with something else: no answer can go on from there.
    """
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    last = content[-1]
    text = last.get("text") if isinstance(last, dict) else None
    if not isinstance(text, str):
        where = f"messages.{index}.content.{len(content) - 1}"
        raise ApiError(f"'{where}' is no text, and an answer goes on with a text only", param=where)
    return text


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
