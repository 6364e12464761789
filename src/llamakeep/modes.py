"""What one request may do with kept states: use them, add to them, both or neither."""

from __future__ import annotations

import enum
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token

from llamakeep.errors import InvalidValue


class Mode(str, enum.Enum):
    """What a request may do with kept states."""

    ON = "on"
    """Reuse and keep."""
    READ = "read"
    """Reuse, keep nothing new."""
    WRITE = "write"
    """Evaluate the whole prompt, and keep it."""
    OFF = "off"
    """Evaluate the whole prompt, keep nothing."""

    @property
    def reads(self) -> bool:
        """Whether states may be reused, those that are live included."""
        return self in (Mode.ON, Mode.READ)

    @property
    def writes(self) -> bool:
        """Whether states may be kept."""
        return self in (Mode.ON, Mode.WRITE)


_current: ContextVar[Mode] = ContextVar("llamakeep_mode", default=Mode.ON)


def current_mode() -> Mode:
    """Return the mode of the running block: `on` outside of `mode`."""
    return _current.get()


class _Block(AbstractContextManager[Mode]):
    """A block in which calls have a mode; it may be entered again, also inside itself."""

    def __init__(self, wanted: Mode) -> None:
        self._mode = wanted
        self._before: list[Token[Mode]] = []

    def __enter__(self) -> Mode:
        self._before.append(_current.set(self._mode))
        return self._mode

    def __exit__(self, *_: object) -> None:
        _current.reset(self._before.pop())


def mode(wanted: str | Mode) -> AbstractContextManager[Mode]:
    """Let the calls inside this block reuse and keep what `wanted` allows.

    Of this thread (or task) alone. A stream keeps the mode that it was opened in.

    Example:
        >>> with mode("read") as inside:
        ...     print(inside.reads, inside.writes)
        True False

    Args:
        wanted: `on`, `read`, `write` or `off`.

    Raises:
        InvalidValue: For anything else.
    """
    try:
        chosen = Mode(wanted)
    except ValueError:
        known = ", ".join(item.value for item in Mode)
        raise InvalidValue(f"mode must be one of {known}, not {wanted!r}") from None
    return _Block(chosen)
