"""What `ls` and `stats` say about a cache, for programs and for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from llamakeep.cli import opening, screen
from llamakeep.errors import InvalidValue, TokenError
from llamakeep.fingerprint import differences, explain
from llamakeep.sizes import format_bytes
from llamakeep.stores.disk import DiskStore
from llamakeep.stores.disk.catalog import DiskEntry, resolve

if TYPE_CHECKING:
    from llamakeep.runtime.llama_cpp import Vocabulary

SHORT_ID, SHORT_NAMESPACE = 10, 8
"""Digits of an id and of a namespace that are shown to people."""

_FIRST_TOKENS = 16
_TEXT_TOKENS = 48
_TEXT_LETTERS = 80

_SORTS = {
    "used": lambda entry: -entry.last_used,
    "size": lambda entry: -entry.own_bytes,
    "hits": lambda entry: -entry.hits,
    "age": lambda entry: entry.created,
}

_NOTHING_YET = """\
Nothing is kept in {path} yet. Prompts go there from Python:

    keeper = llamakeep.attach(llm, cache_dir={text!r})
"""


# -- ls --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wanted:
    """Which prompts are listed, and how.

    Attributes:
        sort: A key of `_SORTS`.
        limit: How many, at most; None for all.
        namespace: The beginning of a namespace's digest; empty for all.
        model: A GGUF file with the vocabulary of prompts that are shown as text.
    """

    sort: str = "used"
    limit: int | None = None
    namespace: str = ""
    model: Path | None = None


def list_prompts(path: Path, wanted: Wanted, *, as_json: bool) -> None:
    """Print the prompts of a cache.

    Raises:
        InvalidValue: For a namespace that is not there, or of which there are several.
        ModelError: For a model that cannot be read.
        StoreError: When the directory is no cache, or cannot be read.
    """
    there = opening.is_cache(path)
    with ExitStack() as stack:
        vocabulary, fingerprint = None, ""
        if wanted.model is not None:
            from llamakeep.modelfile import inspect_file
            from llamakeep.runtime.llama_text import load_vocab

            fingerprint = inspect_file(wanted.model).fingerprint
            vocabulary = stack.enter_context(load_vocab(wanted.model))
        if not there:
            prompts: list[dict[str, Any]] = []
            n_prompts, figures = 0, _empty(path)
        else:
            store = stack.enter_context(opening.look(path))
            entries, known = store.entries(), described(store)
            n_prompts = len(entries)
            figures = {
                "path": str(path),
                "used_bytes": store.used_bytes,
                "capacity_bytes": opening.capacity_bytes(path),
            }
            prompts = [
                _prompt(entry, known.get(entry.namespace, {}), vocabulary, fingerprint)
                for entry in _chosen(entries, wanted, known)
            ]
    if vocabulary is not None and prompts and all(each["text"] is None for each in prompts):
        typer.echo(f"llamakeep: none of these prompts is of {wanted.model}", err=True)
    if as_json:
        screen.print_json({**figures, "n_prompts": n_prompts, "prompts": prompts})
    elif not n_prompts:
        screen.say(_NOTHING_YET.format(path=path, text=str(path)), end="")
    else:
        _show_prompts(prompts, with_text=vocabulary is not None)
        shown = f"{len(prompts):,} of " if len(prompts) < n_prompts else ""
        screen.say(
            f"\n{shown}{n_prompts:,} {'prompt' if n_prompts == 1 else 'prompts'} in {path}, "
            f"{_used(figures)}"
        )


def _empty(path: Path) -> dict[str, Any]:
    return {"path": str(path), "used_bytes": 0, "capacity_bytes": opening.capacity_bytes(path)}


def _used(figures: Mapping[str, Any]) -> str:
    """Return how much is in use, and of how much where that is known."""
    used, limit = format_bytes(figures["used_bytes"]), figures["capacity_bytes"]
    return used if limit is None else f"{used} of {format_bytes(limit)}"


def choose(ids: Sequence[str], known: Collection[str]) -> list[str]:
    """Return the prompts whose ids begin so, each once.

    Raises:
        InvalidValue: When one is empty, is not there, or means several.
    """
    if not all(prefix.strip() for prefix in ids):
        raise InvalidValue("an id is empty: llamakeep ls shows those that are there")
    return list(dict.fromkeys(resolve(prefix, known, "prompt") for prefix in ids))


def _chosen(
    entries: Sequence[DiskEntry], wanted: Wanted, known: Mapping[str, Any]
) -> list[DiskEntry]:
    if wanted.namespace:
        names = {*known, *(entry.namespace for entry in entries)}
        only = resolve(wanted.namespace, names, "namespace")
        entries = [entry for entry in entries if entry.namespace == only]
    return sorted(entries, key=_SORTS[wanted.sort])[: wanted.limit]


def _prompt(
    entry: DiskEntry,
    description: Mapping[str, Any],
    vocabulary: Vocabulary | None,
    fingerprint: str,
) -> dict[str, Any]:
    text = None
    if vocabulary is not None and description.get("model") == fingerprint:
        try:
            text = vocabulary.text(entry.tokens[:_TEXT_TOKENS])
        except TokenError:
            text = None  # not of this vocabulary, whatever the namespace says
    return {
        "id": entry.id,
        "n_tokens": entry.n_tokens,
        "own_bytes": entry.own_bytes,
        "path_bytes": entry.path_bytes,
        "checkpoints": list(entry.checkpoints),
        "hits": entry.hits,
        "created": entry.created,
        "last_used": entry.last_used,
        "tier": DiskStore.tier,
        "namespace": entry.namespace,
        "model_name": _text_of(description, "model_name"),
        "tokens_from": entry.tokens_from,
        "first_tokens": [int(token) for token in entry.tokens[:_FIRST_TOKENS]],
        "text": text,
    }


def _show_prompts(prompts: Sequence[Mapping[str, Any]], *, with_text: bool) -> None:
    begin = "begins with" if with_text else "first tokens"
    right = ("tokens", "own", "all", "points", "hits", "used", "age")
    now = screen.now()
    rows = [
        (
            prompt["id"][:SHORT_ID],
            f"{prompt['n_tokens']:,}",
            format_bytes(prompt["own_bytes"]),
            format_bytes(prompt["path_bytes"]),
            f"{len(prompt['checkpoints'])}",
            f"{prompt['hits']:,}",
            screen.ago(now - prompt["last_used"]),
            screen.ago(now - prompt["created"]),
            prompt["tier"],
            prompt["namespace"][:SHORT_NAMESPACE],
            _beginning(prompt),
        )
        for prompt in prompts
    ]
    screen.show_table(("id", *right, "tier", "namespace", begin), rows, right)


def _beginning(prompt: Mapping[str, Any]) -> str:
    before = "... " if prompt["tokens_from"] else ""
    if prompt["text"] is None:
        return before + " ".join(str(token) for token in prompt["first_tokens"])
    return before + screen.printable(prompt["text"])[:_TEXT_LETTERS]


# -- stats -----------------------------------------------------------------------------------------


def show_stats(path: Path, *, as_json: bool) -> None:
    """Print how much a cache holds, and for which namespaces.

    Raises:
        StoreError: When the directory is no cache, or cannot be read.
    """
    if not opening.is_cache(path):
        if as_json:
            nothing = dict.fromkeys(("writing_bytes", *_COUNTS, "n_prompts"), 0)
            screen.print_json(
                {**_empty(path), "free_bytes": None, **nothing, "namespaces": [], "differences": []}
            )
        else:
            screen.say(_NOTHING_YET.format(path=path, text=str(path)), end="")
        return
    with opening.look(path) as store:
        found, entries, known = store.stats(), store.entries(), described(store)
    namespaces = _namespaces(found.namespaces, entries, known)
    figures = {
        "path": str(path),
        "used_bytes": found.used_bytes,
        "capacity_bytes": opening.capacity_bytes(path),
        "free_bytes": found.free_bytes,
        "writing_bytes": found.writing_bytes,
        **{name: getattr(found, name) for name in _COUNTS},
        "n_prompts": len(entries),
        "namespaces": namespaces,
        "differences": _differences(namespaces, known),
    }
    if as_json:
        screen.print_json(figures)
    else:
        _show_stats(figures)


_COUNTS = ("n_blobs", "n_segments", "n_checkpoints", "n_snapshots", "n_opaque")


def described(store: DiskStore) -> dict[str, dict[str, Any]]:
    """Return the descriptions of the namespaces of a cache, by hex digest."""
    return {digest.hex(): description for digest, description in store.namespaces().items()}


def _text_of(description: Mapping[str, Any], part: str) -> str | None:
    # A description may have come with an import: it can be any JSON.
    value = description.get(part)
    return value if isinstance(value, str) else None


def _namespaces(
    sizes: Mapping[str, int], entries: Sequence[DiskEntry], known: Mapping[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the namespaces, the last used first."""
    n_prompts = Counter(entry.namespace for entry in entries)
    last_used: dict[str, float] = {}
    for entry in entries:
        last_used[entry.namespace] = max(last_used.get(entry.namespace, 0.0), entry.last_used)
    names = sorted({*sizes, *known}, key=lambda name: (-last_used.get(name, 0.0), name))
    return [
        {
            "namespace": name,
            "model_name": _text_of(known.get(name, {}), "model_name"),
            "model": _text_of(known.get(name, {}), "model"),
            "used_bytes": sizes.get(name, 0),
            "n_prompts": n_prompts[name],
            "last_used": last_used.get(name),
        }
        for name in names
    ]


def _differences(
    namespaces: Sequence[Mapping[str, Any]], known: Mapping[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    """Compare each namespace with the last used one of the same model."""
    newest: dict[str, str] = {}
    found = []
    for each in namespaces:
        name, model = each["namespace"], each["model"]
        if model is None:
            continue
        first = newest.setdefault(model, name)
        if first != name:
            parts = differences(known[first], known[name])
            found.append(
                {
                    "namespace": first,
                    "other": name,
                    "model_name": each["model_name"],
                    "reason": explain(parts),
                    "parts": [
                        {"part": each.part, "ours": each.ours, "theirs": each.theirs}
                        for each in parts
                    ],
                }
            )
    return found


def _show_stats(figures: Mapping[str, Any]) -> None:
    used, limit = figures["used_bytes"], figures["capacity_bytes"]
    share = f" ({used / limit:.0%})" if limit else ""
    screen.say(figures["path"])
    screen.say(f"used        {_used(figures)}{share}")
    if figures["writing_bytes"]:
        screen.say(f"            {format_bytes(figures['writing_bytes'])} of it being written now")
    screen.say(f"free        {format_bytes(figures['free_bytes'])} on the file system")
    screen.say(
        f"blobs       {figures['n_blobs']:,} ({figures['n_segments']:,} segments, "
        f"{figures['n_checkpoints']:,} checkpoints, {figures['n_snapshots']:,} snapshots, "
        f"{figures['n_opaque']:,} others)"
    )
    screen.say(f"prompts     {figures['n_prompts']:,}")
    if not figures["namespaces"]:
        return
    screen.say()
    rows = [
        (
            each["namespace"][:SHORT_NAMESPACE],
            format_bytes(each["used_bytes"]),
            f"{each['n_prompts']:,}",
            screen.printable(each["model_name"] or "(not told)"),
        )
        for each in figures["namespaces"]
    ]
    screen.show_table(("namespace", "used", "prompts", "model"), rows, ("used", "prompts"))
    if figures["differences"]:
        screen.say("\nWhy namespaces of one model do not share:\n")
    for each in figures["differences"]:
        screen.say(
            f"  {each['namespace'][:SHORT_NAMESPACE]} cannot use what "
            f"{each['other'][:SHORT_NAMESPACE]} has: {each['reason']}"
        )
