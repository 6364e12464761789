"""`llamakeep explain`: what it takes, and how it explains itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

SUBJECT = "When a prompt is read again"


def explain(
    before: Annotated[
        str | None,
        typer.Argument(
            metavar="BEFORE",
            show_default=False,
            help="A file with the prompt that was sent first, or - for standard input.",
        ),
    ] = None,
    after: Annotated[
        str | None,
        typer.Argument(
            metavar="AFTER",
            show_default=False,
            help="A file with the prompt that was read again, or -.",
        ),
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="Explain a request of this log of llamakeep serve --record.",
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            metavar="URL", show_default=False, help="Ask the server that runs at this address."
        ),
    ] = None,
    request_id: Annotated[
        str | None,
        typer.Option(
            "--id",
            metavar="ID",
            show_default=False,
            help="Which request of the log or the server, by id or number. Default: the last one.",
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            envvar="LLAMAKEEP_API_KEY",
            metavar="KEY",
            show_default=False,
            show_envvar=False,
            help="The server's key. Others can read flags: LLAMAKEEP_API_KEY is better.",
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", show_default=False, help="Show tokens as text of this GGUF file."
        ),
    ] = None,
    text: Annotated[
        bool, typer.Option("--text", help="Take files as plain text, whatever is in them.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Say why a prompt was read again: where it left what was known, and what caused that.

    Compares two prompts, or two bodies of requests to a chat or completion API of OpenAI,
    llama-server or Anthropic. A file is a body if it is a JSON object, tokens if it is a JSON list
    of numbers, and a text otherwise. Or asks a running server, or reads the log that it wrote.
    Changes nothing.

    \b
    Examples:
        llamakeep explain first.json second.json
        pbpaste | llamakeep explain prompt.txt -
        llamakeep explain --url http://127.0.0.1:8080
        llamakeep explain --log requests.jsonl --id 17 --json
    """  # noqa: D301 - the backspace keeps lines as they are
    from llamakeep.cli.explaining import Asked, explain_asked

    asked = Asked(before, after, log, url, request_id, api_key or "", model, text)
    explain_asked(asked, as_json=json)
