"""`llamakeep simulate`: what it takes, and how it explains itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from llamakeep.policy import DEFAULT_POLICY

SUBJECT = "Study what to keep"


def simulate(
    trace: Annotated[
        Path,
        typer.Argument(
            metavar="TRACE",
            show_default=False,
            help="A trace or a log of llamakeep serve --record, gzip or plain; or a workload.",
        ),
    ],
    cache: Annotated[
        str,
        typer.Option(metavar="NAME", help="tree, or prompt: llama-server's cache and one slot."),
    ] = "tree",
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:KEY=VALUE]",
            show_default=False,
            help=f"What goes first. More than once. Default: {DEFAULT_POLICY}; oldest for prompt.",
        ),
    ] = None,
    capacity: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZE|SHARE",
            show_default=False,
            help="8GiB, or 5% of what would keep everything. More than once. Default: 2%, 5%, 10%, "
            "20%, 50%; with --tiers, its ram.",
        ),
    ] = None,
    bytes_per_token: Annotated[
        str, typer.Option(metavar="SIZE", help="What a token's rows occupy.")
    ] = "128KiB",
    family: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Memory of the model: attention, swa, recurrent, hybrid or hybrid-swa.",
        ),
    ] = "attention",
    checkpoint_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            show_default=False,
            help="What a checkpoint occupies, in all families but attention.",
        ),
    ] = None,
    n_swa: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            show_default=False,
            help="Tokens of the window, in families that have one. Default: 1024.",
        ),
    ] = None,
    ctx_checkpoints: Annotated[
        int | None,
        typer.Option(
            "--ctx-checkpoints",
            "--max-checkpoints",
            metavar="N",
            min=0,
            show_default=False,
            help="Most checkpoints of a slot, or along one prompt of the tree. Default: 32.",
        ),
    ] = None,
    max_checkpoint_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            show_default=False,
            help="What the checkpoints of a slot, or all of the tree, may occupy.",
        ),
    ] = None,
    checkpoint_min_step: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            show_default=False,
            help="Least tokens between checkpoints at user messages. Default: 8192; for the tree "
            "512.",
        ),
    ] = None,
    checkpoint_policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:KEY=VALUE]",
            show_default=False,
            help="Which checkpoint of a slot goes first; foresight knows what comes. More than "
            "once. For --cache prompt. Default: neighbor-gap; with --restore upstream, upstream.",
        ),
    ] = None,
    restore: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            show_default=False,
            help="Which checkpoint of a slot is restored: upstream, exact or prefix. For --cache "
            "prompt. Default: upstream; with --prompt-mode keep, prefix.",
        ),
    ] = None,
    keep_checkpoints: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            show_default=False,
            help="How many of a slot's checkpoints go into the prompt cache with it: all, last or "
            "none. Default: all.",
        ),
    ] = None,
    prompt_mode: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            show_default=False,
            help="Rules of the prompt cache: upstream, or keep, which loses nothing that it has "
            "room for. Default: upstream.",
        ),
    ] = None,
    tiers: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=SIZE[@SPEED],...",
            show_default=False,
            help="Memory and what is below it, and what comes back a second: "
            "ram=8GiB@10GiB,disk=64GiB@2GiB. For the tree.",
        ),
    ] = None,
    replicas: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N",
            show_default=False,
            help="Replicas that share the requests, each with its own memory (and disk), over one "
            "shared tier. More than once. For the tree.",
        ),
    ] = None,
    route: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:KEY=VALUE]",
            show_default=False,
            help="How requests find a replica: random, random:seed=1, conversation, prefix, or "
            "prefix:blocks=10000 for what its router remembers of each. More than once. Default: "
            "random.",
        ),
    ] = None,
    prefill_rate: Annotated[
        float, typer.Option(metavar="TOKENS", help="Tokens that are evaluated in a second.")
    ] = 500.0,
    warmup: Annotated[
        str,
        typer.Option(metavar="N|SHARE", help="Requests at the begin that are not counted."),
    ] = "0",
    tails: Annotated[
        bool,
        typer.Option("--tails", help="Keep the last block of a prompt where it is not full, too."),
    ] = False,
    no_bound: Annotated[
        bool, typer.Option("--no-bound", help="Leave out what was possible.")
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.png",
            show_default=False,
            help="Draw what was saved against capacity. Needs matplotlib: pip install "
            "'llamakeep[plot]'.",
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Replay a trace of requests, and say what a cache saves and what was possible.

    The caches and policies are those that serve requests; only states are sizes without bytes.
    What was possible is Belady's optimum on the same blocks, which no cache can pass; for families
    with checkpoints it is what a greedy clairvoyant saves, which is no bound.

    \b
    Examples:
        llamakeep simulate requests.jsonl
        llamakeep simulate trace.jsonl.gz --policy lru --policy marginal:half_life=600 --capacity 5%
        llamakeep simulate trace.jsonl.gz --cache prompt --plot savings.png
        llamakeep simulate trace.jsonl.gz --family hybrid --checkpoint-bytes 20MiB --json
        llamakeep simulate trace.jsonl.gz --tiers ram=8GiB,disk=64GiB@1GiB
        llamakeep simulate trace.jsonl.gz --tiers ram=8GiB,shared=64GiB --replicas 4 --route prefix
        llamakeep simulate chats.json --cache prompt --family swa --checkpoint-bytes 20MiB
    """  # noqa: D301 - the backspace keeps lines as they are
    from llamakeep.cli.simulating import Asked, simulate_asked

    asked = Asked(
        trace,
        cache,
        tuple(policy or ()),
        tuple(capacity or ()),
        bytes_per_token,
        family,
        checkpoint_bytes,
        tiers,
        prefill_rate,
        warmup,
        tails,
        not no_bound,
        plot,
        replicas=tuple(replicas or ()),
        routes=tuple(route or ()),
        prompt_mode=prompt_mode,
        checkpoint_policies=tuple(checkpoint_policy or ()),
        restore=restore,
        keep_checkpoints=keep_checkpoints,
        ctx_checkpoints=ctx_checkpoints,
        max_checkpoint_bytes=max_checkpoint_bytes,
        checkpoint_min_step=checkpoint_min_step,
        n_swa=n_swa,
    )
    simulate_asked(asked, as_json=json)
