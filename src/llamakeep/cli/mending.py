"""What `check`, `trim` and `rm` do."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import typer

from llamakeep.cli import opening, screen
from llamakeep.cli.group import WRONG
from llamakeep.cli.listing import SHORT_ID, choose
from llamakeep.errors import IndexDamaged, InvalidValue
from llamakeep.sizes import format_bytes
from llamakeep.stores.disk import DiskStore
from llamakeep.stores.disk.audit import DiskReport
from llamakeep.stores.disk.catalog import resolve

_PROBLEMS = {
    "index": "the index is missing or damaged",
    "unindexed": "good files that the index lacks",
    "missing": "states in the index without a file",
    "wrong": "states that the index has otherwise than their file",
    "parents": "states that hang off the wrong one",
    "descriptions": "descriptions of namespaces that are damaged, or that the index lacks",
    "miscounted_bytes": "bytes are counted wrong",
    "corrupt": "files that are not what was written",
    "truncated": "files that end early",
    "name": "files under another state's name",
    "foreign": "files that are no states",
    "symlink": "links in place of files",
    "leftovers": "leftovers of writes that ended early",
}
_LEFT = {
    "secret": "sealed with another secret, or with none",
    "version": "made by a newer version",
    "unreadable": "cannot be read",
    "directories": "directories that are none of ours",
}
_MENDED_ON_OPENING = {"rebuilt": "index", "leftovers": "leftovers", "adopted": "unindexed"}
"""What opening a cache to change it mends already, by how the store counts it."""
_UNVERIFIED = ("secret", "unreadable")
"""What is left alone and may be damaged: nobody could tell."""
_MOST_SHOWN = 20


# -- check -----------------------------------------------------------------------------------------


def check_cache(path: Path, *, fix: bool, verify: bool, as_json: bool) -> None:
    """Compare a cache with itself, print what is wrong, and mend it if asked to.

    Raises:
        StoreError: When there is no cache, or it cannot be read.
        typer.Exit: With 1, when something is wrong and stays so, or could not be verified.
    """
    report = _audit(path, fix=fix, verify=verify, hidden=as_json)
    ok = (report.fixed or not report.problems) and not _n_unverified(report)
    if as_json:
        screen.print_json(
            {
                "path": str(path),
                "ok": ok,
                "fixed": report.fixed,
                "n_blobs": report.n_states,
                "used_bytes": report.used_bytes,
                "problems": dict(sorted(report.problems.items())),
                "left": dict(sorted(report.left.items())),
                "files": {kind: list(paths) for kind, paths in sorted(report.files.items())},
            }
        )
    else:
        _show_report(report)
    if not ok:
        raise typer.Exit(WRONG)


def _audit(path: Path, *, fix: bool, verify: bool, hidden: bool) -> DiskReport:
    with screen.Bar("Checking", hidden=hidden) as bar:
        if not fix:
            try:
                with opening.look(path) as store:
                    return store.audit(verify=verify, progress=bar.update)
            except IndexDamaged:
                return DiskReport(0, 0, {"index": 1})
        with opening.change(path) as store:
            report = store.audit(fix=True, verify=verify, progress=bar.update)
            problems = Counter(report.problems)
            for counted, kind in _MENDED_ON_OPENING.items():
                problems[kind] += store.counters.get(counted, 0)
            return replace(report, problems=+problems)


def _n_unverified(report: DiskReport) -> int:
    return sum(report.left.get(kind, 0) for kind in _UNVERIFIED)


def _show_report(report: DiskReport) -> None:
    for kind, n in sorted(report.problems.items()):
        screen.say(f"{n:>8,}  {_PROBLEMS.get(kind, kind)}")
        _show_files(report, kind)
    for kind, n in sorted(report.left.items()):
        screen.say(f"{n:>8,}  left alone: {_LEFT.get(kind, kind)}")
        _show_files(report, kind)
    unverified = _n_unverified(report)
    kept = f"{report.n_states:,} states in {format_bytes(report.used_bytes)}"
    if not report.problems:
        screen.say(f"No problem was found: {kept}." if unverified else f"All is well: {kept}.")
    elif report.fixed:
        screen.say(f"Mended. There are {kept} now.")
    else:
        screen.say("Nothing was changed; llamakeep check --fix mends it.")
    if unverified:
        screen.say(f"But {unverified:,} {_files(unverified)} could not be verified.")
    if report.left.get("secret"):
        screen.say("LLAMAKEEP_SECRET must say the secret that they were sealed with, or nothing.")


def _show_files(report: DiskReport, kind: str) -> None:
    paths = report.files.get(kind, ())
    for path in paths[:_MOST_SHOWN]:
        screen.say(f"          {screen.printable(path)}")
    n_more = {**report.problems, **report.left}[kind] - _MOST_SHOWN
    if paths and n_more > 0:
        screen.say(f"          and {n_more:,} more")


def _files(n: int) -> str:
    return "file" if n == 1 else "files"


# -- trim ------------------------------------------------------------------------------------------


def trim_cache(path: Path, max_bytes: int, *, as_json: bool) -> None:
    """Drop states of a cache until no more than `max_bytes` are in use, and print what went.

    Raises:
        StoreError: When there is no cache, or it cannot be changed.
        typer.Exit: With 1, when more has to stay.
    """
    with opening.change(path) as store:
        before = store.used_bytes
        n_gone = store.trim(max_bytes)
        opening.complain(store)
        used = store.used_bytes
    if as_json:
        screen.print_json(
            {
                "path": str(path),
                "max_bytes": max_bytes,
                "removed_blobs": n_gone,
                "removed_bytes": max(0, before - used),
                "used_bytes": used,
                "capacity_bytes": opening.capacity_bytes(path),
            }
        )
    else:
        screen.say(f"Dropped {n_gone:,} states, {format_bytes(max(0, before - used))}.")
        screen.say(f"In use: {format_bytes(used)}.")
    if used > max_bytes:
        if not as_json:
            screen.say("What is left has no place among prompts, or is being written: see stats.")
        raise typer.Exit(WRONG)


# -- rm --------------------------------------------------------------------------------------------


def remove(
    path: Path,
    ids: Sequence[str],
    *,
    everything: bool,
    namespace: str,
    sure: bool,
    as_json: bool,
) -> None:
    """Drop prompts of a cache and print which.

    Args:
        path: The cache.
        ids: Beginnings of ids.
        everything: Drop all instead.
        namespace: Drop those of a namespace instead: the beginning of its digest.
        sure: Do not ask before dropping everything.
        as_json: Print one JSON object.

    Raises:
        InvalidValue: When not exactly one of the three is given, or when an id or a namespace is
            not there or means several; nothing is dropped then.
        StoreError: When there is no cache, or it cannot be changed.
        typer.Exit: With 1, when the person says no, or when a prompt stays because another one
            needs all that it has.
    """
    if (bool(ids), everything, bool(namespace)).count(True) != 1:
        raise InvalidValue("say what to drop: ids (see llamakeep ls), or --namespace, or --all")
    stay: list[str] = []
    with opening.change(path) as store:
        n_blobs, before = len(store), store.used_bytes
        entries = {entry.id: entry for entry in store.entries()}
        if everything:
            gone = list(entries)
            if not sure:
                _ask(f"Drop all of {path}: {len(gone):,} prompts, {format_bytes(before)}?")
            store.clear()
        elif namespace:
            known = {*store.stats().namespaces, *(name.hex() for name in store.namespaces())}
            only = resolve(namespace, known, "namespace")
            gone = [id_ for id_, entry in entries.items() if entry.namespace == only]
            store.remove_namespace(only)
        else:
            chosen = choose(ids, entries)
            stay = _remove_each(store, chosen)
            gone = [id_ for id_ in chosen if id_ not in stay]
        opening.complain(store)
        n_gone, used = n_blobs - len(store), store.used_bytes
    if as_json:
        screen.print_json(
            {
                "path": str(path),
                "removed": gone,
                "stay": stay,
                "removed_blobs": max(0, n_gone),
                "removed_bytes": max(0, before - used),
                "used_bytes": used,
                "capacity_bytes": opening.capacity_bytes(path),
            }
        )
    else:
        what = "prompt" if len(gone) == 1 else "prompts"
        screen.say(f"Dropped {len(gone):,} {what}, {format_bytes(max(0, before - used))}.")
        for id_ in stay:
            screen.say(
                f"{id_[:SHORT_ID]} stays: its states are part of another prompt that is kept, "
                "until that goes."
            )
    if stay:
        raise typer.Exit(WRONG)


def _remove_each(store: DiskStore, ids: Sequence[str]) -> list[str]:
    """Drop prompts; return those that stay, because others need all that they have."""
    stay = list(ids)
    while stay:
        for id_ in stay:
            store.remove(id_)
        known = {entry.id for entry in store.entries()}
        left = [id_ for id_ in stay if id_ in known]
        if len(left) == len(stay):
            break
        stay = left  # what they stayed for may be gone now
    return stay


def can_ask() -> bool:
    """Return whether there is somebody who can answer."""
    return sys.stdin.isatty()


def _ask(question: str) -> None:
    """Return if the person at the terminal agrees.

    Raises:
        InvalidValue: When nobody can be asked.
        typer.Exit: With 1, when the answer is no.
    """
    if not can_ask():
        raise InvalidValue("--all drops everything: say --yes where nobody can be asked")
    if not typer.confirm(question, err=True):
        typer.echo("Nothing was dropped.", err=True)
        raise typer.Exit(WRONG)
