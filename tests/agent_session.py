"""A client that behaves as coding agents do: tools, many short turns, edits, a compaction.

The client is OpenAI's own, and knows nothing of caches. What it sends is long in front (rules,
tools) and changes at the end, until it does what costs: it asks again, takes a message back, or
replaces what was said by a summary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from openai import OpenAI

RULES = """You are a careful programmer who works on a repository with tools.
Read a file before you change it. Change as little as you can. Run the tests after each change.
Say what you did in one sentence. Never touch what nobody asked you to touch.
"""
_WORDS = (
    *("parse", "token", "cache", "index", "value", "state", "reader", "writer", "error", "limit"),
    *("byte", "line", "result", "path", "name", "count", "first", "last", "open", "close", "find"),
    *("keep", "drop", "check", "test"),
)


def _function(name: str, description: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": list(properties),
                "additionalProperties": False,
            },
        },
    }


PATH = {"enum": ["src/reader.py", "src/writer.py", "tests/test_reader.py"]}
TOOLS = [
    _function("read_file", "Return the text of a file.", path=PATH),
    _function(
        "edit_file",
        "Replace a line of a file.",
        path=PATH,
        line={"type": "integer", "minimum": 1, "maximum": 99},
    ),
    _function("run_tests", "Run the tests of a file and return what failed.", path=PATH),
]


@dataclass(frozen=True)
class Turn:
    """What one request was, and what it cost.

    Attributes:
        what: `call`, `answer`, `again`, `edit` or `compact`.
        prompt_tokens: Tokens of its prompt.
        cached_tokens: Those that were not evaluated.
        finish_reason: Why its answer ended.
        request_id: Its id.
    """

    what: str
    prompt_tokens: int
    cached_tokens: int
    finish_reason: str
    request_id: str

    @property
    def evaluated_tokens(self) -> int:
        """Prompt tokens that were evaluated."""
        return self.prompt_tokens - self.cached_tokens


class Session:
    """One agent at work. The same seed gives the same session, as far as the model is the same.

    Args:
        client: OpenAI's, of a server.
        seed: Of what tools return and users ask.
        n_rules: How often the rules are in the system prompt: real ones are long.
        n_result: Words of a tool's result.
        n_answer: Tokens of an answer in words at most.
        extra: More for the body of each request.
    """

    def __init__(
        self,
        client: OpenAI,
        *,
        seed: int = 1,
        n_rules: int = 6,
        n_result: int = 60,
        n_answer: int = 24,
        extra: dict[str, Any] | None = None,
    ) -> None:
        self._client = client
        self._random = Random(seed)
        self._n_result = n_result
        self._n_answer = n_answer
        self._extra = extra or {}
        system = "".join(f"{n + 1}. {RULES}" for n in range(n_rules))
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": system}]

    def turns(self, n_tasks: int, n_calls: int = 3) -> Iterator[Turn]:
        """Work on tasks, each some calls and an answer; then ask again, edit, and compact."""
        for number in range(n_tasks):
            self._say(f"Task {number + 1}: {self._words(20)}.")
            for _ in range(n_calls):
                yield self._call()
            yield self._answer("answer")
        asked = self.messages[:-1]
        yield self._answer("again", asked)
        place = max(i for i, each in enumerate(asked) if each["role"] == "user")
        self.messages = [*asked[:place], {"role": "user", "content": self._words(20)}]
        yield self._answer("edit")
        summary = f"Summary of the work so far: {self._words(30)}"
        self.messages = [self.messages[0], {"role": "user", "content": summary}]
        yield self._answer("compact")
        self._say(self._words(10))
        yield self._answer("answer")

    def _words(self, n: int) -> str:
        return " ".join(self._random.choices(_WORDS, k=n))

    def _say(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def _call(self) -> Turn:
        """Let the model call a tool, as a stream, and add the tool's result."""
        stream = self._client.chat.completions.create(
            model="any",
            messages=self.messages,  # type: ignore[arg-type]
            tools=TOOLS,  # type: ignore[arg-type]
            tool_choice="required",
            parallel_tool_calls=False,
            temperature=0,
            max_tokens=200,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=self._extra,
        )
        call: dict[str, Any] = {"id": "", "name": "", "arguments": ""}
        usage: Any = None
        reason = request_id = ""
        for chunk in stream:
            request_id = chunk.id
            usage = chunk.usage or usage
            for choice in chunk.choices:
                reason = choice.finish_reason or reason
                for delta in choice.delta.tool_calls or ():
                    call["id"] = delta.id or call["id"]
                    if delta.function is not None:
                        call["name"] += delta.function.name or ""
                        call["arguments"] += delta.function.arguments or ""
        json.loads(call["arguments"])
        function = {"name": call["name"], "arguments": call["arguments"]}
        self.messages += [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": call["id"], "type": "function", "function": function}],
            },
            {
                "role": "tool",
                "tool_call_id": call["id"],
                "content": self._words(self._n_result),
            },
        ]
        return _turn("call", usage, reason, request_id)

    def _answer(self, what: str, messages: list[dict[str, Any]] | None = None) -> Turn:
        """Let the model say something in words."""
        asked = self.messages if messages is None else messages
        answer = self._client.chat.completions.create(
            model="any",
            messages=asked,  # type: ignore[arg-type]
            tools=TOOLS,  # type: ignore[arg-type]
            tool_choice="none",
            temperature=0,
            max_tokens=self._n_answer,
            extra_body=self._extra,
        )
        [choice] = answer.choices
        if messages is None:
            self.messages.append({"role": "assistant", "content": choice.message.content or "..."})
        return _turn(what, answer.usage, choice.finish_reason, answer.id)


def _turn(what: str, usage: Any, reason: str, request_id: str) -> Turn:
    cached = usage.prompt_tokens_details.cached_tokens
    return Turn(what, usage.prompt_tokens, cached, reason, request_id)


def table(turns: list[Turn], write: Callable[[str], None]) -> None:
    """Write a line for each turn."""
    for number, turn in enumerate(turns, 1):
        write(
            f"{number:3} {turn.what:8} {turn.prompt_tokens:6,} tokens, "
            f"{turn.evaluated_tokens:5,} evaluated"
        )
