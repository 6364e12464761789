"""Where the user messages start in a rendered chat, in tokens.

A chat template is rendered once with sentinels in place of texts. What it writes between an answer
and the next user message is the delimiter that is looked for in prompts.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from llamakeep.tokens import IntArray, as_tokens

logger = logging.getLogger("llamakeep")

_FIRST, _ANSWER, _SECOND = "8f3a1c", "5b7d2e", "c94e60"
_SENTINELS = [
    {"role": "user", "content": _FIRST},
    {"role": "assistant", "content": _ANSWER},
    {"role": "user", "content": _SECOND},
]


class _Rendered(Exception):
    """Carries the rendered text out of a chat handler."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


class _Recorder:
    """Looks like a `Llama` to a chat handler and stops it at the rendered prompt."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def tokenize(self, text: bytes, *_args: Any, **_kwargs: Any) -> list[int]:
        raise _Rendered(text.decode())

    def create_completion(self, prompt: Any, **_kwargs: Any) -> Any:
        raise _Rendered(prompt if isinstance(prompt, str) else "")


def user_delimiter(llm: Any, handler: Any) -> IntArray:
    """Return the tokens that stand before a user message's text; empty when there are none.

    Args:
        llm: The `llama_cpp.Llama` whose chats are rendered.
        handler: Its chat handler, called once with sentinel messages. It evaluates nothing.

    A template that cannot be rendered like that, or that writes no delimiter, costs checkpoints at
    user messages and nothing else; the reason is logged.
    """
    nothing = np.empty(0, np.int32)
    try:
        handler(llama=_Recorder(llm), messages=_SENTINELS)
    except _Rendered as rendered:
        text = rendered.text
    except Exception as error:  # noqa: BLE001 - templates may raise anything
        logger.info("user messages are not known in this chat format: %s", error)
        return nothing
    else:
        return nothing
    if not 0 <= text.find(_FIRST) < text.find(_ANSWER) < text.find(_SECOND):
        return nothing
    before = text[: text.index(_FIRST)]
    between = text[text.index(_ANSWER) + len(_ANSWER) : text.index(_SECOND)]
    # Spaces at the end may become one token with the text behind them.
    return _shared_end(llm, before.rstrip(), between.rstrip())


def _shared_end(llm: Any, before: str, between: str) -> IntArray:
    """Return the tokens of the longest end of `between` that `before` ends with, too."""

    def tokens_of(text: str) -> list[int]:
        return list(llm.tokenize(text.encode(), add_bos=False, special=True)) if text else []

    shared = 0
    while shared < min(len(before), len(between)) and before[-1 - shared] == between[-1 - shared]:
        shared += 1
    # Different tokens may end alike, such as "<s>" and "</s>": cut between tokens only.
    whole = tokens_of(between)
    for n in range(shared, 0, -1):
        end = tokens_of(between[-n:])
        if whole == tokens_of(between[:-n]) + end:
            return as_tokens(end)
    return np.empty(0, np.int32)


def find_starts(tokens: IntArray, delimiter: IntArray) -> list[int]:
    """Return where `delimiter` begins in `tokens`, ascending, overlaps included."""
    n = delimiter.size
    if not n or tokens.size < n:
        return []
    at = np.arange(tokens.size - n + 1)
    for offset in range(n):
        at = at[tokens[at + offset] == delimiter[offset]]
    return [int(each) for each in at]
