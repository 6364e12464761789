"""How commands show things: tables, JSON, sizes and times for people, a bar while they wait."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from llamakeep.cli.group import writing_output

_GAP, _INDENT = "  ", "    "
_MIN_ROOM = 16
_SLOW_SECONDS = 0.5

now = time.time
"""Seconds; a test puts its own clock here."""


def say(text: str = "", end: str = "\n") -> None:
    """Print text to standard output.

    Raises:
        BrokenPipeError: When nobody reads it.
        StoreError: When it cannot be written.
    """
    with writing_output():
        print(text, end=end)


def print_json(value: Mapping[str, Any]) -> None:
    """Print one JSON object."""
    say(json.dumps(value, indent=2))


def show_table(
    titles: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str] = ()
) -> None:
    """Print rows under titles, a line each. Only the last column is cut, to fit a terminal.

    Where a terminal has no room for it, it stands on a line of its own.

    Args:
        titles: Of the columns.
        rows: Texts, as many in each.
        right: Titles of columns with numbers.
    """
    console = Console(highlight=False, markup=False, emoji=False)
    *widths, _ = (max(map(cell_len, column)) for column in zip(titles, *rows, strict=True))
    room = console.width - sum(widths) - len(_GAP) * len(widths)
    below = console.is_terminal and room < _MIN_ROOM

    def line(cells: Sequence[str]) -> str:
        padded = []
        for title, cell, width in zip(titles, cells, widths, strict=False):
            space = " " * (width - cell_len(cell))
            padded.append(space + cell if title in right else cell + space)
        last = cells[-1]
        if console.is_terminal:
            last = _cut(last, console.width - len(_INDENT) if below else room)
        if below:
            return _GAP.join(padded).rstrip() + (f"\n{_INDENT}{last}" if last else "")
        return _GAP.join([*padded, last]).rstrip()

    if console.is_terminal:
        console.print(line(titles), style="bold", soft_wrap=True)
    else:
        say(line(titles))
    for row in rows:
        say(line(row))


def _cut(text: str, width: int) -> str:
    return text if cell_len(text) <= width else set_cell_size(text, width - 3).rstrip() + "..."


def printable(text: str) -> str:
    """Return text on one line that a terminal shows and does not obey."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode()
        for letter in text
    )


def ago(seconds: float) -> str:
    """Return a span of time as people read it: `12s`, `3m`, `5h`, `2d`."""
    if seconds < 60:
        return f"{max(0, int(seconds))}s"
    if seconds < 3600:
        return f"{int(seconds // 60)}m"
    return f"{int(seconds // 3600)}h" if seconds < 172_800 else f"{int(seconds // 86_400)}d"


class Bar:
    """A bar on standard error, when that is a terminal and something takes long. A context.

    Args:
        title: What is going on.
        hidden: Show nothing.
    """

    def __init__(self, title: str, *, hidden: bool = False) -> None:
        console = Console(stderr=True, highlight=False, markup=False, emoji=False)
        self._hidden = hidden or not sys.stderr.isatty() or console.is_dumb_terminal
        self._shown: Progress | None = None
        self._task = TaskID(0)
        self._console = console
        self._title = title
        self._begun = time.monotonic()

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown is not None:
            self._shown.stop()

    def update(self, done: int, total: int | None) -> None:
        """Show how much is done; None for a total that is not known yet."""
        if self._hidden or (self._shown is None and time.monotonic() - self._begun < _SLOW_SECONDS):
            return
        if self._shown is None:
            self._shown = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f}%"),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
            )
            self._task = self._shown.add_task(self._title, total=total)
            self._shown.start()
        self._shown.update(self._task, completed=done, total=total)
