"""Deltas as they become certain: white space may still turn out to be layout."""

from __future__ import annotations

from collections.abc import Callable

from llamakeep.tool_calls.values import CallArguments, Content, Delta, Reasoning

_SPACES = " \t\r\n"


class Voice:
    """Collects what an answer says, thinks and calls."""

    def __init__(self) -> None:
        self._out: list[Delta] = []
        self._space: list[str] = []

    def say(self, text: str, make: Callable[[str], Delta] = Content) -> None:
        """Add a text, but for white space at its end, which waits for what comes after it."""
        bare = text.rstrip(_SPACES)
        if bare:
            self._out.append(make("".join(self._space) + bare))
            self._space = []
        if len(bare) < len(text):
            self._space.append(text[len(bare) :])

    def say_all(self, text: str) -> None:
        """Add a text with all of its white space, and that which waits."""
        self.keep_space()
        self._out.append(Content(text))

    def keep_space(self) -> None:
        """Let white space that waits be content."""
        if self._space:
            self._out.append(Content("".join(self._space)))
            self._space = []

    def drop_space(self) -> None:
        """Let white space that waits be layout."""
        self._space = []

    def add(self, delta: Delta) -> None:
        """Add a part of a call."""
        self._out.append(delta)

    def taken(self) -> list[Delta]:
        """Return what was added since the last time, pieces that belong together as one."""
        out, self._out = self._out, []
        joined: list[Delta] = []
        begin = 0
        for end in range(1, len(out) + 1):
            if end < len(out) and type(out[end]) is type(out[begin]) and _joins(out[begin]):
                continue
            joined.append(_joined(out[begin:end]))
            begin = end
        return joined


def _joins(delta: Delta) -> bool:
    return isinstance(delta, (Content, Reasoning, CallArguments))


def _joined(deltas: list[Delta]) -> Delta:
    """Return deltas of one kind, and of one call, as one."""
    first = deltas[0]
    if len(deltas) == 1:
        return first
    if isinstance(first, CallArguments):
        pieces = [each.json_text for each in deltas if isinstance(each, CallArguments)]
        return CallArguments(first.index, "".join(pieces))
    kind = Reasoning if isinstance(first, Reasoning) else Content
    return kind("".join(each.text for each in deltas if isinstance(each, kind)))
