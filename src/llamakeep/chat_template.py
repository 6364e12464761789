"""Chat templates: from messages to a prompt, and where its user messages start.

A model carries its template, a Jinja program that someone on the internet wrote: see
`template_sandbox` for what keeps it in bounds.

::

    messages -> ChatTemplate.render_chat -> Rendered(text, starts) -> token_starts -> tokens, starts
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import (
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Protocol

import numpy as np

from llamakeep.errors import InvalidValue, ModelError, TemplateError
from llamakeep.template_sandbox import METER, Meter, compiled, weigh
from llamakeep.template_tools import learn_tools, one_by_one, with_short_ids
from llamakeep.tokens import IntArray, TokensLike, as_tokens

logger = logging.getLogger("llamakeep")

BUILT_IN: Final = {
    "chatml": (
        "{% for message in messages %}"
        "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
        "{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
}
"""Templates that can be asked for by name."""


class Tokenize(Protocol):
    """Turns text into tokens."""

    def __call__(self, text: str, *, add_special: bool, parse_special: bool) -> TokensLike:
        """Return the tokens of `text`.

        Args:
            text: Any text.
            add_special: With the tokens that the vocabulary puts around every prompt, such as BOS.
            parse_special: Names of special tokens in the text become these tokens.
        """
        ...  # pragma: no cover - protocol


@dataclass(frozen=True, slots=True)
class Rendered:
    """A chat as a prompt.

    Attributes:
        text: The prompt.
        starts: Where in it each user message's turn begins, its header included, in characters,
            ascending. A message whose place is not known for sure is left out.
    """

    text: str
    starts: tuple[int, ...]


class ChatTemplate:
    """A chat template, compiled; it renders from any thread.

    What content a template understands is found out as llama.cpp does: by rendering messages with
    sentinels in them, once, here.

    Args:
        source: In Jinja's language, or a name in `BUILT_IN`.
        bos_token: Text of the token that begins a prompt, for templates that write it.
        eos_token: Text of the token that ends an answer.
        add_bos: The vocabulary puts BOS before every prompt; so the text's own is dropped, as
            llama.cpp does. `token_starts` never doubles it, whatever is said here.
        clock: Of processor time in seconds, for the limit.
        now: What `strftime_now`, `date_string` and `datetime` tell: as llama.cpp has it, a template
            may ask for the day in three ways.

    Attributes:
        source: Of the template.
        traits: What it makes of tools and calls.

    Raises:
        ModelError: When there is no template: None, or a text without anything in it.
        TemplateError: When it is no Jinja, with the line; or too long.
    """

    def __init__(
        self,
        source: str | None,
        *,
        bos_token: str = "",
        eos_token: str = "",
        add_bos: bool = False,
        clock: Callable[[], float] = time.thread_time,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        if source is None or not source.strip():
            raise ModelError(
                "this model has no chat template: name a file that has one with "
                f"--chat-template-file, or one of {', '.join(BUILT_IN)}"
            )
        self.source = BUILT_IN.get(source.strip(), source)
        self.bos_token = bos_token
        self.eos_token = eos_token
        self._dropped = bos_token if add_bos else ""
        self._clock = clock
        self._now = now
        self._program = compiled(self.source)
        self._texts, self._parts = True, False
        self._no_tools: list[Any] | None = None
        self._learn_content()
        self.traits = learn_tools(
            lambda messages, tools: self._probe(messages, tools=tools or self._no_tools),
            self._content,
        )
        self._header = self._learn_header()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the chat as a prompt; as `render_chat`, at half its cost."""
        prepared = self._prepared(messages)
        given = self._given(add_generation_prompt, tools)
        text = self._run(prepared, given, extra, self._now())
        return text.removeprefix(self._dropped)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """Return the chat as a prompt, with where its user messages start.

        Args:
            messages: As OpenAI has them. Lists of text parts are joined with line ends where the
                template knows texts only; the role `developer` is `system` where the template does
                not know it; arguments of tool calls are objects or JSON, as the template has it.
            add_generation_prompt: With the header of the answer at the end.
            tools: As OpenAI has them.
            extra: More variables for the template, such as `enable_thinking`.

        Raises:
            InvalidValue: For a message that is none, with its place; content that is not text, with
                its type; a variable in `extra` that is not to be changed.
            TemplateError: When the template refuses, fails, or runs over its limits.
        """
        prepared = self._prepared(messages)
        given = self._given(add_generation_prompt, tools)
        now = self._now()
        text = self._run(prepared, given, extra, now)
        users = [index for index, one in enumerate(prepared) if one["role"] == "user"]
        starts: list[int] = []
        if users and self._header:
            marks = {index: f"8f3a1c{index:08d}e5b7d" for index in users}
            marked = [
                one | {"content": self._content(marks[index])} if index in marks else one
                for index, one in enumerate(prepared)
            ]
            try:
                between = _split(self._run(marked, given, extra, now), list(marks.values()))
            except TemplateError as error:
                logger.debug("user messages are not known in this chat: %s", error)
            else:
                contents = [prepared[index]["content"] for index in users]
                starts = _starts(text, between, contents, self._header)
        dropped = len(self._dropped) if text.startswith(self._dropped) else 0
        return Rendered(text[dropped:], tuple(max(0, start - dropped) for start in starts))

    def _given(self, add_generation_prompt: bool, tools: Any) -> dict[str, Any]:
        tools = self._no_tools if tools is None else tools
        return {"add_generation_prompt": add_generation_prompt, "tools": tools}

    def _run(
        self,
        prepared: list[dict[str, Any]],
        given: Mapping[str, Any],
        extra: Mapping[str, Any] | None,
        now: datetime,
    ) -> str:
        fixed = {"messages": prepared, **given}
        fixed |= {"bos_token": self.bos_token, "eos_token": self.eos_token}
        for name in extra or ():
            if name in fixed or name in self._program.globals:
                raise InvalidValue(f"a chat template's {name!r} cannot be changed")
        try:
            meter = Meter(weigh([prepared, given, dict(extra or {})]), now, self._clock)
        except RecursionError:
            raise InvalidValue("the messages are nested too deeply") from None
        token = METER.set(meter)
        pieces: list[str] = []
        length = 0
        try:
            for piece in self._program.generate(**(_dated(now) | dict(extra or {})), **fixed):
                length += len(piece)
                meter.spend(len(piece))
                if length > meter.value_chars:
                    meter.make(length)  # says so
                pieces.append(piece)
        except TemplateError:
            raise
        except RecursionError:
            raise TemplateError("the chat template calls itself too deeply") from None
        except Exception as error:
            raise TemplateError(f"the chat template cannot be rendered: {error}") from error
        finally:
            METER.reset(token)
        return "".join(pieces)

    def _prepared(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        given: object = messages
        if not isinstance(given, (list, tuple)) or not given:
            raise InvalidValue("messages must be a list of at least one message")
        made = [self._message(f"messages[{index}]", one) for index, one in enumerate(messages)]
        if not self.traits.several:
            made = one_by_one(made)
        return [with_short_ids(one) for one in made] if self.traits.short_ids else made

    def _message(self, where: str, message: object) -> dict[str, Any]:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidValue(f"{where} must be an object with a role")
        made = dict(message)
        if made["role"] == "developer" and "developer" not in self.source:
            made["role"] = "system"
        content = made.get("content")
        if content is None and made["role"] == "assistant":
            content = ""
        made["content"] = self._content(_checked(f"{where}.content", content))
        if calls := made.get("tool_calls"):
            if not isinstance(calls, (list, tuple)):
                raise InvalidValue(f"{where}.tool_calls must be a list")
            made["tool_calls"] = [
                self._tool_call(f"{where}.tool_calls[{index}]", call)
                for index, call in enumerate(calls)
            ]
        return made

    def _content(self, content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
        """Return content as this template has it."""
        if isinstance(content, str):
            return content if self._texts else [{"type": "text", "text": content}]
        return content if self._parts else "\n".join(part["text"] for part in content)

    def _tool_call(self, where: str, call: object) -> dict[str, Any]:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(call, Mapping) or not isinstance(function, Mapping):
            raise InvalidValue(f"{where} must be an object with a function")
        arguments = function.get("arguments", "{}")
        if self.traits.objects and isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except (ValueError, RecursionError) as error:
                raise InvalidValue(f"{where}.function.arguments is no JSON: {error}") from None
        elif not self.traits.objects and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**function, "arguments": arguments}}

    def _probe(self, messages: list[dict[str, Any]], **given: Any) -> str:
        """Render as it stands; empty where that fails, which is what a probe is for."""
        given = self._given(True, None) | given
        try:
            return self._run(messages, given, None, self._now())
        except TemplateError as error:
            logger.debug("a chat template refused a probe: %s", error)
            return ""

    def _learn_content(self) -> None:
        """Find out whether content may be text, and whether it may be parts."""
        text = "8f3a1ce5b7d"
        as_text = self._probe([{"role": "user", "content": text}])
        parts = [{"type": "text", "text": text}]
        if not as_text and (as_text := self._probe([{"role": "user", "content": text}], tools=[])):
            self._no_tools = []  # it counts on a list
        as_parts = self._probe([{"role": "user", "content": parts}])
        self._texts = text in as_text or text not in as_parts
        written = "'text'" in as_parts or '"text"' in as_parts
        self._parts = as_parts == as_text if text in as_text else text in as_parts and not written

    def _learn_header(self) -> str:
        """Return what this template writes before a user's text, after what was before it."""
        first, answer, second = "8f3a1c", "5b7d2e", "c94e60"
        chat = [
            {"role": "user", "content": self._content(first)},
            {"role": "assistant", "content": self._content(answer)},
            {"role": "user", "content": self._content(second)},
        ]
        ends = []
        for messages in (chat, chat[:2]):
            _, found, end = self._probe(messages, add_generation_prompt=False).partition(answer)
            if not found:
                return ""
            ends.append(end)
        between, cut = ends[0].partition(second)[0], ends[1]
        shared = len(_common(between, cut))
        header = between[shared:]
        if shared < len(cut):
            # What ends the last answer is another than what ends the others: the header is what
            # stands before the first message, too, from where a word in brackets begins.
            before = self._probe(chat, add_generation_prompt=False).partition(first)[0]
            same = _common(between[::-1], before[::-1])[::-1]
            opened = re.search(r"[<\[\n]", same)
            header = same if len(same) < len(header) and not opened else header
            header = same[opened.start() :] if opened else header
        if second not in ends[0] or not header.strip():
            logger.info("this chat template does not show where user messages start")
            return ""
        return header


def _dated(now: datetime) -> dict[str, str]:
    """Return the day as templates have it that know no `strftime_now`."""
    return {"date_string": now.strftime("%d %b %Y"), "datetime": now.strftime("%b %d %Y")}


def _checked(where: str, content: object) -> str | list[dict[str, Any]]:
    """Return content, which is text or a list of text parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise InvalidValue(f"{where} must be a text or a list of parts")
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" and isinstance(part.get("text"), str):
            continue
        if isinstance(kind, str) and kind != "text":
            raise InvalidValue(f"{where}[{index}] is of type {kind!r}; only text can be read here")
        raise InvalidValue(f"{where}[{index}] must be an object with a type and a text")
    return [dict(part) for part in content]


def _common(one: str, other: str) -> str:
    """Return what both begin with."""
    for index, (mine, theirs) in enumerate(zip(one, other)):  # noqa: B905 - up to the shorter
        if mine != theirs:
            return one[:index]
    return min(one, other, key=len)


def _split(text: str, marks: Iterable[str]) -> list[str]:
    """Return what stands before, between and after the marks; nothing if they are not all there."""
    pieces = []
    for mark in marks:
        if text.count(mark) != 1:
            return []
        piece, _, text = text.partition(mark)
        pieces.append(piece)
    return [*pieces, text]


def _starts(
    text: str, between: list[str], contents: list[str | list[dict[str, Any]]], header: str
) -> list[int]:
    """Return where user turns start in `text`, as far as it is `between` around `contents`."""
    starts = []
    at = 0
    for index, content in enumerate(contents if between else ()):
        before, after = between[index], between[index + 1]
        if not text.startswith(before, at):
            break
        if before.endswith(header):
            starts.append(at + len(before) - len(header))
        elif header in before:
            # Something stands between header and text; in a first turn that is the system message.
            starts.append(at + (before.rindex(header) if index else before.index(header)))
        at += len(before)
        if not isinstance(content, str):
            content = "".join(part["text"] for part in content)
        ends = [
            at + len(written)
            for written in (content, content.strip(), content.lstrip(), content.rstrip())
            if text.startswith(written + after, at)
        ]
        at = ends[0] if ends else text.find(after, at)
        if at < 0:
            break
    return starts


def token_starts(
    text: str, offsets: Sequence[int], tokenize: Tokenize
) -> tuple[IntArray, tuple[int, ...]]:
    """Return the tokens of a prompt, and where `offsets` are in them.

    The tokens are those of the whole text. A prompt that begins with the text of the token that
    `tokenize` adds has it once.

    Args:
        text: The prompt.
        offsets: In characters, ascending.
        tokenize: Called for the whole text, and for pieces that are another text's length in all,
            or up to 4 if pieces do not have the tokens that they have in the whole.

    Returns:
        The tokens, and the position of the token that begins at each offset; where a token lies
        across, one before it. Each position is below the number of tokens, and there once.

    Raises:
        InvalidValue: For offsets that do not ascend, or lie outside.
    """
    if list(offsets) != sorted(offsets) or (
        offsets and not 0 <= offsets[0] <= offsets[-1] <= len(text)
    ):
        raise InvalidValue(f"offsets must ascend up to {len(text)}, not {list(offsets)}")
    whole = as_tokens(tokenize(text, add_special=True, parse_special=True))
    added = as_tokens(tokenize("", add_special=True, parse_special=True))
    lead = int(added.size > 0 and whole.size > 0 and whole[0] == added[0])
    if lead and whole.size > 1 and whole[1] == whole[0]:
        whole, lead = whole[1:], 0  # the one that is left is the text's own
    starts: list[int] = []
    done_chars, done_tokens, spent = 0, lead, 0
    for offset in offsets:
        # Where one begins, and the tokens before it are those of the text before it.
        piece = text[done_chars:offset]
        spent += len(piece)
        if spent > 4 * len(text):
            logger.debug("tokens of pieces differ; later starts are not looked for")
            break
        tokens = (
            as_tokens(tokenize(piece, add_special=False, parse_special=True))
            if piece
            else whole[:0]
        )
        there = whole[done_tokens : done_tokens + tokens.size]
        same = np.flatnonzero(tokens[: there.size] != there)
        shared = int(same[0]) if same.size else there.size
        starts.append(done_tokens + shared)
        if shared == tokens.size:
            done_chars, done_tokens = offset, done_tokens + shared
    return whole, tuple(sorted({start for start in starts if start < whole.size}))
