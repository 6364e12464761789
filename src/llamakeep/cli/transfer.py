"""What `export` and `import` do."""

from __future__ import annotations

import io
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import typer

from llamakeep.cli import opening, screen
from llamakeep.cli.group import WRONG, writing_output
from llamakeep.cli.listing import choose
from llamakeep.errors import BlobRejected, InvalidValue, StoreError
from llamakeep.sizes import format_bytes

STREAM = "-"


def export_prompts(
    path: Path, file: str, ids: Sequence[str], *, force: bool, as_json: bool
) -> None:
    """Write prompts of a cache into one file, and print how much that was.

    Args:
        path: The cache.
        file: Where to; `-` for standard output.
        ids: Beginnings of the prompts' ids; none for all.
        force: Replace a file that is there.
        as_json: Print one JSON object.

    Raises:
        InvalidValue: When an id is not there or means several, or when the output is a terminal.
        StoreError: When there is no cache, the file is there, or it cannot be written; also when
            not one state can be read, as without the secret.
        typer.Exit: With 1, when some states could not be read.
    """
    _refuse_unnamed(file)
    if file == STREAM and as_json:
        raise InvalidValue("standard output is for the prompts: --json needs a file to write")
    if file == STREAM and is_terminal(sys.stdout):
        raise InvalidValue("prompts are not written to a terminal: name a file, or use a pipe")
    with opening.look(path) as store, screen.Bar("Exporting", hidden=as_json) as bar:
        target = Path(file)
        if file != STREAM:
            _refuse_target(target, force)
        known = [entry.id for entry in store.entries()]
        chosen = choose(ids, known) or None
        n_due = 0

        def progress(done: int, total: int) -> None:
            nonlocal n_due
            n_due = total
            bar.update(done, total)

        if file == STREAM:
            with _spool() as spool, _explaining(path):
                n_blobs = store.export(spool, chosen, progress)
                n_bytes = spool.tell()
                spool.seek(0)
                with writing_output():
                    shutil.copyfileobj(spool, sys.stdout.buffer)
                    sys.stdout.buffer.flush()
        else:
            with _explaining(path):
                n_blobs = store.export(target, chosen, progress)
            n_bytes = target.stat().st_size
    n_prompts = len(known if chosen is None else chosen)
    if as_json:
        screen.print_json(
            {
                "path": str(path),
                "file": str(target),
                "n_prompts": n_prompts,
                "n_blobs": n_blobs,
                "n_bytes": n_bytes,
            }
        )
    else:
        what = "prompt" if n_prompts == 1 else "prompts"
        typer.echo(
            f"Exported {n_prompts:,} {what}: {n_blobs:,} states, {format_bytes(n_bytes)}.", err=True
        )
    if n_blobs < n_due:
        typer.echo(
            f"llamakeep: {n_due - n_blobs:,} states could not be read and were left out: "
            "see llamakeep check",
            err=True,
        )
        raise typer.Exit(WRONG)


@contextmanager
def _explaining(path: Path) -> Iterator[None]:
    """Say which cache it is that cannot be read, and that nothing was written."""
    try:
        yield
    except BlobRejected as error:
        raise StoreError(f"{path}: {error}; nothing was exported") from error


def _refuse_unnamed(file: str) -> None:
    if not file.strip():
        raise InvalidValue("the file has an empty name")


def is_terminal(stream: TextIO) -> bool:
    """Return whether somebody sits at a stream."""
    return stream.isatty()


def _refuse_target(target: Path, force: bool) -> None:
    if target.is_dir():
        raise StoreError(f"{target} is a directory")
    if not force and os.path.lexists(target):
        raise StoreError(f"{target} is there already: --force replaces it")
    if not target.absolute().parent.is_dir():
        raise StoreError(f"there is no directory {target.absolute().parent}")


def import_prompts(path: Path, file: str, *, as_json: bool) -> None:
    """Take the states of a file into a cache, and print how many.

    Raises:
        InvalidValue: When the input is a terminal.
        StoreError: When the file cannot be read or is not what was exported (then nothing is
            taken), or when the cache cannot be changed.
        typer.Exit: With 1, when some did not fit.
    """
    _refuse_unnamed(file)
    with _source(file) as source, screen.Bar("Importing", hidden=as_json) as bar:
        opening.is_cache(path)
        try:
            with opening.change(path, make=True) as store:
                done = store.import_(source, bar.update)
                opening.complain(store)
                figures = {"used_bytes": store.used_bytes, "capacity_bytes": store.capacity_bytes}
        except BlobRejected as error:
            hint = " (see LLAMAKEEP_SECRET)" if "secret" in str(error) else ""
            name = "standard input" if file == STREAM else file
            raise StoreError(f"{name}: {error}{hint}; nothing was imported") from error
    if as_json:
        counts = {"n_blobs": done.n_states, "n_kept": done.n_kept}
        screen.print_json({"path": str(path), "file": file, **counts, **figures})
    else:
        screen.say(
            f"Imported {done.n_kept:,} of {done.n_states:,} states; in use: "
            f"{format_bytes(figures['used_bytes'])} of {format_bytes(figures['capacity_bytes'])}."
        )
    if done.n_kept < done.n_states:
        if not as_json:
            screen.say("The others did not fit.")
        raise typer.Exit(WRONG)


@contextmanager
def _source(file: str) -> Iterator[io.BufferedIOBase | io.RawIOBase]:
    """Open what is imported: a file, or all of standard input, which cannot be read twice."""
    if file != STREAM:
        try:
            opened = open(file, "rb", buffering=0)  # noqa: SIM115 - closed below
        except OSError as error:
            raise StoreError(f"cannot read {file}: {error.strerror or error}") from error
        with opened:
            yield opened
        return
    if is_terminal(sys.stdin):
        raise InvalidValue("prompts are not read from a terminal: name a file, or use a pipe")
    with _spool() as spool:
        try:
            shutil.copyfileobj(sys.stdin.buffer, spool)
            spool.seek(0)
        except OSError as error:
            raise StoreError(f"cannot take in the input: {error.strerror or error}") from error
        yield spool


@contextmanager
def _spool() -> Iterator[Any]:
    """Lend a file without a name, which only this process can read."""
    with tempfile.TemporaryFile() as file:
        yield getattr(file, "file", file)  # on Windows it has a name, and a shell around it
