"""The group of commands: what they raise becomes an exit code, and help lists them by subject."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import typer
from typer.core import TyperGroup

from llamakeep.errors import LlamakeepError, StoreError

WRONG = 1
"""Something is not as it should be, and the command has said what."""
FAILED = 2
"""The command could not do what it was asked to."""
INTERRUPTED = 130
UNREAD = 141
"""Nobody reads the output any more; what a shell says of a program that ended because of that."""

_OTHERS = "Commands"


class Commands(TyperGroup):
    """Turns what a command raises into an exit code and at most one line."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        try:
            try:
                return super().invoke(ctx)
            finally:
                _flush()  # here, and not when Python ends: nobody could catch that
        except LlamakeepError as error:
            typer.echo(f"llamakeep: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(FAILED) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            _write_to_nobody()
            raise typer.Exit(UNREAD) from None

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands under the subjects that they were registered with."""
        subjects: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                subject = command.rich_help_panel or _OTHERS
                subjects.setdefault(subject, []).append((name, command.get_short_help_str(200)))
        for subject, commands in subjects.items():
            with formatter.section(subject):
                formatter.write_dl(commands)


def _flush() -> None:
    """Write what is printed.

    Raises:
        BrokenPipeError: When nobody reads it.
        StoreError: When it cannot be written.
    """
    if sys.stdout is None:
        return
    with writing_output():
        sys.stdout.flush()


@contextmanager
def writing_output() -> Iterator[None]:
    """A context in which output that cannot be written is a failure, unless nobody reads it.

    Raises:
        BrokenPipeError: When nobody reads it.
        StoreError: When it cannot be written.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        _write_to_nobody()
        raise StoreError(f"cannot write the output: {error.strerror or error}") from error


def _write_to_nobody() -> None:
    """Let what is still buffered go nowhere, so that Python does not complain when it ends."""
    with suppress(OSError):  # a stream that is no file has nothing to redirect
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
