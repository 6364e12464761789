"""`llamakeep chats`: a workload for `llamakeep simulate`, made from a seed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def chats(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            show_default=False,
            help="Where to write the workload, packed if its name ends in .gz.",
        ),
    ],
    seed: Annotated[int, typer.Option(metavar="N", help="Of all that is random.")] = 0,
    n_chats: Annotated[
        int, typer.Option("--chats", metavar="N", min=1, help="Conversations.")
    ] = 20,
    n_turns: Annotated[
        int, typer.Option("--turns", metavar="N", min=1, help="Requests of each conversation.")
    ] = 16,
    n_open: Annotated[
        int,
        typer.Option("--open", metavar="N", min=1, help="Conversations that take turns at a time."),
    ] = 3,
    system_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Tokens of the system prompt that all share.")
    ] = 600,
    user_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Tokens of a user's message on average.")
    ] = 80,
    answer_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, help="Tokens of an answer on average.")
    ] = 240,
    rewind: Annotated[
        float,
        typer.Option(
            metavar="0..1", min=0.0, max=1.0, help="How likely a request goes some turns back."
        ),
    ] = 0.1,
    edit: Annotated[
        float,
        typer.Option(
            metavar="0..1", min=0.0, max=1.0, help="How likely an earlier message is changed."
        ),
    ] = 0.05,
    regenerate: Annotated[
        float,
        typer.Option(
            metavar="0..1", min=0.0, max=1.0, help="How likely an answer is asked for again."
        ),
    ] = 0.1,
    branch: Annotated[
        float,
        typer.Option(
            metavar="0..1",
            min=0.0,
            max=1.0,
            help="How likely two continuations of an answer begin to alternate.",
        ),
    ] = 0.05,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Make conversations that people go back in, to replay them with llamakeep simulate.

    They share a system prompt and grow turn by turn, with rewinds, edits, regenerations and
    branches. Tokens are random; the same seed makes the same file on every machine.

    \b
    Examples:
        llamakeep chats chats.json.gz --seed 7
        llamakeep chats long.json --chats 6 --turns 40 --open 1 --rewind 0.2 --json
        llamakeep simulate chats.json.gz --family hybrid --checkpoint-bytes 150MiB
    """  # noqa: D301 - the backspace keeps lines as they are
    from llamakeep.cli import screen
    from llamakeep.simulate.chats import ChatStyle, write_chats

    style = ChatStyle(
        n_chats,
        n_turns,
        n_open,
        system_tokens,
        user_tokens,
        answer_tokens,
        rewind,
        edit,
        regenerate,
        branch,
    )
    counts = write_chats(file, style, seed=seed)
    if json:
        screen.print_json({"file": str(file), "requests": sum(counts.values()), "kinds": counts})
        return
    told = ", ".join(f"{n:,} {kind}" for kind, n in counts.items())
    screen.say(f"{screen.printable(str(file))}: {sum(counts.values()):,} requests: {told}")
