"""What takes long goes into a thread, so that the event loop goes on.

What is to be done is weighed in letters to tokenize: about 1 us each, on a slow core.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any, TypeVar

from starlette.concurrency import run_in_threadpool

from llamakeep.engine.request import Piece
from llamakeep.server.context import ServerOptions

T = TypeVar("T")

_VALUE = 8
_OBJECT = 128
"""A message: its part of a template costs as much."""
_PROB = 8
"""A token with its probability, in JSON."""
_TOKENS = 8
"""So many tokens become text at the cost of a letter that becomes tokens."""


def size_of(value: Any, most: int) -> int:
    """Return about what it costs to read `value` as a prompt or a conversation, in letters.

    Counts no further than to where it is more than `most`: so it costs no more than that.
    """
    size = 0
    rest: list[Iterator[Any]] = [iter((value,))]
    while rest and size <= most:
        for each in rest[-1]:
            size += _VALUE
            if isinstance(each, str):
                size += len(each)
            elif isinstance(each, dict):
                size += _OBJECT
                rest.append(chain.from_iterable(each.items()))
                break
            elif isinstance(each, list):
                rest.append(iter(each))
                break
            if size > most:
                break
        else:
            rest.pop()
    return size


def size_of_answer(n_prompt: int, n_tokens: int, n_probs: int, n_biases: int = 0) -> int:
    """Return about what it costs to write an answer, in letters.

    Args:
        n_prompt: Tokens of its prompt.
        n_tokens: Those of the answer.
        n_probs: How many of the likeliest come with each.
        n_biases: Of its `logit_bias`.
    """
    n_texts = n_prompt + n_tokens
    size = n_texts // _TOKENS + n_biases
    return size + (_PROB * n_tokens * (1 + n_probs) if n_probs else 0)


def size_of_piece(piece: Piece) -> int:
    """Return about what it costs to write a piece of an answer as an event, in letters."""
    return sum(_PROB * (1 + len(choice.likeliest)) for choice in piece.probs) if piece.probs else 0


async def soon(
    options: ServerOptions, size: int, work: Callable[[], T], *, compiles: bool = False
) -> T:
    """Return what `work` returns: at once for a small `size`, from a thread for a larger one.

    A thread costs 0.1 to 0.3 ms, which is more than most prompts need.

    Args:
        options: Say what is small.
        size: About what `work` costs, in letters.
        work: What is to be done.
        compiles: It may make a grammar of tools, of a schema or of a text: nobody knows before
            what that costs, for 200 letters can ask for thousands of rules.
    """
    if size <= options.inline_chars and not compiles:
        return work()
    return await run_in_threadpool(work)
