"""What takes long goes into a thread, so that the event loop goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from starlette.concurrency import run_in_threadpool

from llamakeep.server.ports import ServerOptions

T = TypeVar("T")


def size_of(value: Any, depth: int = 5) -> int:
    """Return about how many characters `value` has; a token, or what is deeper, counts for 8."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, list | dict) and depth:
        inner = value.values() if isinstance(value, dict) else value
        return sum(size_of(each, depth - 1) for each in inner)
    return 8


async def soon(options: ServerOptions, size: int, work: Callable[[], T]) -> T:
    """Return what `work` returns: at once for a small `size`, from a thread for a larger one.

    A thread costs 0.1 ms, which is more than most prompts need.
    """
    if size <= options.inline_chars:
        return work()
    return await run_in_threadpool(work)
