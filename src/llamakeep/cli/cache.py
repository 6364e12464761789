"""The commands over a disk cache: what they take, and how they explain themselves."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

SUBJECT = "Prompts that are kept on disk"

CacheDir = Annotated[
    str | None,
    typer.Option(
        "--cache-dir",
        envvar="LLAMAKEEP_CACHE_DIR",
        metavar="DIR",
        show_default=False,
        help="The cache. Without it, the user's cache directory.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]


class Sort(str, Enum):
    """In which order prompts are listed."""

    used = "used"
    size = "size"
    hits = "hits"
    age = "age"


def ls(
    cache_dir: CacheDir = None,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="Show how prompts of this GGUF file begin, in words.",
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=0, metavar="N", show_default=False, help="At most so many.")
    ] = None,
    sort: Annotated[
        Sort, typer.Option(help="Last used first, largest, most used, or oldest first.")
    ] = Sort.used,
    namespace: Annotated[
        str,
        typer.Option(
            metavar="HEX",
            show_default=False,
            help="Only prompts of the namespace whose digest begins so, see llamakeep stats.",
        ),
    ] = "",
    json: Json = False,
) -> None:
    """List the prompts that are kept, the last used one first.

    A prompt's own bytes would go with it; all bytes are also those that it shares with others.
    Points are checkpoints along it. The id, or the beginning of it, is what rm and export take.
    Changes nothing.

    \b
    Examples:
        llamakeep ls
        llamakeep ls --model my-model.gguf --limit 10
        llamakeep ls --cache-dir my-cache --sort size --json
    """  # noqa: D301 - the backspace keeps lines as they are
    from llamakeep.cli.listing import Wanted, list_prompts
    from llamakeep.cli.opening import cache_path

    wanted = Wanted(sort.value, limit, namespace, model)
    list_prompts(cache_path(cache_dir), wanted, as_json=json)


def stats(cache_dir: CacheDir = None, json: Json = False) -> None:
    """Say how much is kept, for which models, and why some of it is not shared.

    A namespace is everything that makes states incompatible: the model, adapters, settings, the
    build. Where a model has several, each is compared with the one that was used last. Changes
    nothing.

    \b
    Examples:
        llamakeep stats
        llamakeep stats --cache-dir my-cache --json
    """  # noqa: D301 - as above
    from llamakeep.cli.listing import show_stats
    from llamakeep.cli.opening import cache_path

    show_stats(cache_path(cache_dir), as_json=json)


def check(
    cache_dir: CacheDir = None,
    fix: Annotated[bool, typer.Option("--fix", help="Mend what is wrong.")] = False,
    no_verify: Annotated[
        bool, typer.Option("--no-verify", help="Read headers and sizes only, which is fast.")
    ] = False,
    json: Json = False,
) -> None:
    """Compare the files with what was put there, and with the index.

    Exits with 1 when something is wrong and was not mended, or could not be verified because it is
    of another secret. Mending indexes what is good and removes what is not; what another secret or
    a newer version made is left alone. The secret of a sealed cache is taken from LLAMAKEEP_SECRET;
    it is no option, because others could read it.

    \b
    Examples:
        llamakeep check
        llamakeep check --fix
        llamakeep check --cache-dir my-cache --no-verify --json
    """  # noqa: D301 - as above
    from llamakeep.cli.mending import check_cache
    from llamakeep.cli.opening import cache_path

    check_cache(cache_path(cache_dir), fix=fix, verify=not no_verify, as_json=json)


def trim(
    max_bytes: Annotated[
        str,
        typer.Option("--max-bytes", metavar="SIZE", help="How much may stay, like 512MiB or 8GiB."),
    ],
    cache_dir: CacheDir = None,
    json: Json = False,
) -> None:
    """Drop what was not used for longest, until no more than a size is in use.

    What several prompts share goes after all of them. Exits with 1 when that much cannot go.

    \b
    Examples:
        llamakeep trim --max-bytes 8GiB
        llamakeep trim --cache-dir my-cache --max-bytes 512MiB --json
    """  # noqa: D301 - as above
    from llamakeep.cli.mending import trim_cache
    from llamakeep.cli.opening import cache_path
    from llamakeep.sizes import parse_bytes

    trim_cache(cache_path(cache_dir), parse_bytes(max_bytes), as_json=json)


def rm(
    ids: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ID", show_default=False, help="Prompts: how their ids begin, see ls."
        ),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Drop all that is kept.")] = False,
    namespace: Annotated[
        str,
        typer.Option(
            metavar="HEX",
            show_default=False,
            help="Drop the namespace whose digest begins so, see llamakeep stats.",
        ),
    ] = "",
    yes: Annotated[bool, typer.Option("--yes", "-y", help="With --all: do not ask.")] = False,
    cache_dir: CacheDir = None,
    json: Json = False,
) -> None:
    """Drop prompts: some, those of a namespace, or all.

    What a prompt shares with others stays for them; where all of it is part of another one, it
    stays until that goes, and the exit code is 1. When one of several ids is not there, or means
    more than one prompt, nothing is dropped.

    \b
    Examples:
        llamakeep rm 3f9a21c07e
        llamakeep rm --namespace 8c41
        llamakeep rm --all --yes --cache-dir my-cache --json
    """  # noqa: D301 - as above
    from llamakeep.cli.mending import remove
    from llamakeep.cli.opening import cache_path

    remove(
        cache_path(cache_dir),
        ids or [],
        everything=everything,
        namespace=namespace,
        sure=yes,
        as_json=json,
    )


def export(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="The file to write; - for standard output.")
    ],
    ids: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="ID", show_default=False, help="Prompts, see ls. Without: all of them."
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", "-f", help="Replace a file that is there.")
    ] = False,
    cache_dir: CacheDir = None,
    json: Json = False,
) -> None:
    """Write prompts into one file, to import them elsewhere.

    It holds conversations and is readable by its owner only. Only what was computed with the same
    model, settings and build is of use there. States that were sealed stay so: LLAMAKEEP_SECRET
    must say the secret here and there; it is no option, because others could read it. Exits with 1
    when some states could not be read, and with 2, writing nothing, when none could.

    \b
    Examples:
        llamakeep export prompts.llamakeep
        llamakeep export --json prompts.llamakeep 3f9a21c07e 77b0
        llamakeep export - | ssh other-machine llamakeep import -
    """  # noqa: D301 - as above
    from llamakeep.cli.opening import cache_path
    from llamakeep.cli.transfer import export_prompts

    export_prompts(cache_path(cache_dir), file, ids or [], force=force, as_json=json)


def import_(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="The file to read; - for standard input.")
    ],
    cache_dir: CacheDir = None,
    json: Json = False,
) -> None:
    """Take in prompts that were exported.

    All of the file is verified first, and nothing is taken from one that is not what was exported.
    Makes the cache if it is missing, and keeps to LLAMAKEEP_DISK_BYTES. The secret of sealed states
    is taken from LLAMAKEEP_SECRET; it is no option, because others could read it. Exits with 1 when
    some did not fit.

    \b
    Examples:
        llamakeep import prompts.llamakeep
        llamakeep import - --cache-dir my-cache --json < prompts.llamakeep
    """  # noqa: D301 - as above
    from llamakeep.cli.opening import cache_path
    from llamakeep.cli.transfer import import_prompts

    import_prompts(cache_path(cache_dir), file, as_json=json)
