"""`llamakeep serve`: its options are the table of `server/settings.py`."""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from typer.core import TyperCommand

from llamakeep.cli.group import WRONG
from llamakeep.errors import InvalidValue, ModelError
from llamakeep.server import refused
from llamakeep.server.accepted import ACCEPTED, Accepted
from llamakeep.server.options import Option
from llamakeep.server.settings import OPTIONS

if TYPE_CHECKING:
    from llamakeep.server.service import OnProgress, Service
    from llamakeep.server.settings import ServerSettings

SUBJECT = "Answer requests"
_OTHERS = "Options"
_STEPS = 1000
_EXTRA = "what llamakeep serve needs is not installed: pip install 'llamakeep[server]'"

HELP = """Answer requests as OpenAI's API and llama-server do, from prompts that stay warm.

Each conversation continues where it was, whatever was asked in between; with --cache-dir also
after a restart. Every option can also stand in a TOML file, under its long name (port = 8080), or
in the environment (LLAMAKEEP_PORT). Flags are over the environment, and that is over the file.
/docs shows all endpoints. Ctrl-C ends the server when running answers are complete.

\b
Examples:
    llamakeep serve -m model.gguf
    llamakeep serve -m model.gguf -c 16384 -np 4 --cache-dir ~/.cache/llamakeep
    llamakeep serve -m model.gguf --host 0.0.0.0 --api-key-file keys.txt
    llamakeep serve --config serve.toml --check --json

\b
Ask it something:
    curl http://127.0.0.1:8080/v1/chat/completions -H 'Content-Type: application/json' \\
        -d '{"messages": [{"role": "user", "content": "Hello!"}]}'
"""


_UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # typer brings its own, or click's


class SectionedCommand(TyperCommand):
    """A command whose help lists its options under the headings that they were given."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the command line.

        Raises:
            InvalidValue: For what is no option, or has no value: one line like all others. For one
                of llama-server that means something that is not here, with the reason.
        """
        self._refuse(args)
        try:
            return super().parse_args(ctx, args)
        except _UsageError as error:
            words = cast(Any, error).format_message()
            raise InvalidValue(f"{words} (llamakeep serve --help lists all options)") from None

    def _refuse(self, args: Sequence[str]) -> None:
        """Raise for an option of llama-server that is not here.

        Before the others are read: `-md` would be `-m` with the value `d`.
        """
        takes = {
            name: not getattr(parameter, "is_flag", False)
            for parameter in self.params
            for name in (*parameter.opts, *parameter.secondary_opts)
        }
        left = iter(args)
        for arg in left:
            name = arg.partition("=")[0]
            why = None if arg in takes or name in takes else refused.why(name)
            if why is not None:
                raise InvalidValue(f"{name} is refused: {why}")
            if takes.get(arg):
                next(left, None)  # its value

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """List the options, those without a heading last."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                heading = getattr(parameter, "rich_help_panel", None) or _OTHERS
                sections.setdefault(heading, []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def _parameter(option: Option) -> inspect.Parameter:
    """Return an option as Typer reads it off a function: text, to be understood by the table."""
    kind = option.kind
    told: dict[str, Any] = {
        "help": _help(option),
        "rich_help_panel": option.section,
        "show_default": False,
    }
    taken: Any = bool | None
    if kind.metavar:
        taken = list[str] | None if kind.repeatable else str | None
        told["metavar"] = kind.metavar
    flags = option.flags
    if not kind.metavar and not any("/" in flag for flag in flags):
        flags = (*flags[:-1], f"{flags[-1]}/--no-{option.key}")
    return inspect.Parameter(
        option.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[taken, typer.Option(*flags, **told)],
    )


def _accepted_parameter(accepted: Accepted) -> inspect.Parameter:
    """Return a flag that changes nothing: help says nothing of it."""
    told: dict[str, Any] = {"metavar": accepted.metavar} if accepted.metavar else {}
    taken: Any = str | None if accepted.metavar else bool | None
    return inspect.Parameter(
        accepted.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[taken, typer.Option(*accepted.flags, hidden=True, **told)],
    )


def _help(option: Option) -> str:
    shown = "" if _is_none(option) else option.kind.show(option.default)
    many = " May come several times." if option.kind.repeatable else ""
    return option.help + many + (f" [default: {shown}]" if shown else "")


def _is_none(option: Option) -> bool:
    """Whether there is no default that one could show."""
    is_unset = option.default in (None, "", ()) or option.help.count("Without: ")
    return bool(is_unset) or option.is_secret or option.name == "model"


def serve(
    config: Annotated[
        str | None,
        typer.Option(
            "--config", metavar="FILE", show_default=False, help="A TOML file with options."
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Say whether the options can be meant, and end.")
    ] = False,
    json: Annotated[
        bool,
        typer.Option("--json", help="Print the options as they take effect as one JSON object."),
    ] = False,
    **flags: Any,
) -> None:
    """Serve. Its help is `HELP`, and its other parameters are those of the table.

    Raises:
        InvalidValue: For a value that cannot be meant, a port that is taken, a missing template.
        ModelError: For a missing model, and where a package is missing.
    """
    try:
        from llamakeep.server import loading, run, sources
        from llamakeep.server.listening import bind_all
    except ModuleNotFoundError as error:
        raise ModelError(f"{_EXTRA} ({error.name} is missing)") from error

    settings = sources.resolve(flags, config=config)
    loading.check(settings)
    if json:
        from llamakeep.cli import screen

        screen.print_json({**settings.masked(), "sources": dict(settings.sources)})
        sys.stdout.flush()  # who reads it does not wait for the end
    if check:
        for notice in settings.notices:
            typer.echo(f"llamakeep: {notice}", err=True)
        for sock in bind_all(settings.host, settings.port):
            sock.close()
        if not json:
            typer.echo("llamakeep: these options can be meant, and the port is free", err=True)
    else:
        _run(run, settings)


def _run(run: Any, settings: ServerSettings) -> None:
    """Serve until a signal, with a bar while the model is loaded."""
    from llamakeep.cli.screen import Bar
    from llamakeep.server import logs

    logs.configure(behind=True)
    for notice in settings.notices:
        logs.tell("notice", notice, level=logging.WARNING)
    with ExitStack() as loading:
        bar = loading.enter_context(Bar(f"Loading {settings.model.name}"))

        def ready(service: Service, url: str) -> None:
            loading.close()
            announce(settings, service, url)

        def load(settings: ServerSettings, on_progress: OnProgress) -> Service:
            from llamakeep.runtime.llama_load import route_log
            from llamakeep.server.service import load_service

            route_log(logging.getLogger("llama.cpp"))  # which else writes between our lines
            return load_service(settings, on_progress)

        was_told = run.serve(
            settings,
            load,
            on_progress=lambda share: bar.update(int(share * _STEPS), _STEPS),
            on_ready=ready,
        )
    if not was_told:
        raise typer.Exit(WRONG)


def announce(settings: ServerSettings, service: Service, url: str) -> None:
    """Say on standard error what is served, where, and how to try it.

    On a terminal in lines for people, else as an event of the log.
    """
    from llamakeep.cli.screen import printable
    from llamakeep.server import logs
    from llamakeep.sizes import format_bytes

    curl = (
        f"curl {url}/v1/chat/completions -H 'Content-Type: application/json' "
        f"""-d '{{"messages": [{{"role": "user", "content": "Hello!"}}]}}'"""
    )
    keys = bool(settings.read_api_keys())
    if keys:
        curl += " -H 'Authorization: Bearer YOUR-KEY'"
    client = f'OpenAI(base_url="{url}/v1", api_key="{"YOUR-KEY" if keys else "none"}")'
    tiers = ", ".join(
        name if size is None else f"{name} {format_bytes(size)}"
        for name, size in service.tiers.items()
    )
    slots = "1 slot" if service.n_slots == 1 else f"{service.n_slots} slots"
    if sys.stderr.isatty():
        model = printable(service.model_name)
        for line in (
            f"{model} is ready at {url} ({slots}, {service.n_ctx:,} tokens of context)",
            f"  kept:    {tiers or 'nothing beyond the slots'}",
            f"  try it:  {curl}",
            f"  Python:  {client}",
            f"  pages:   {url}/docs" + (f"  {url}/metrics" if settings.metrics else ""),
            "  end it:  Ctrl-C",
        ):
            typer.echo(line, err=True)
    else:
        logs.tell(
            "ready",
            f"{service.model_name} is ready at {url}; try: {curl}",
            url=url,
            base_url=f"{url}/v1",
            client=client,
            model=service.model_name,
            slots=service.n_slots,
            n_ctx=service.n_ctx,
            tiers=dict(service.tiers),
        )
    open_to = [host for host in settings.host if host not in ("127.0.0.1", "::1", "localhost")]
    if open_to and not keys:
        logs.tell(
            "open",
            f"anybody who reaches {', '.join(open_to)} may ask: --api-key-file says who may",
            level=logging.WARNING,
        )


def _from_the_table() -> None:
    """Give `serve` the options of the table as parameters, for Typer to read."""
    own = inspect.signature(serve, eval_str=True).parameters
    taken = [_parameter(option) for option in OPTIONS if option.flags]
    taken += map(_accepted_parameter, ACCEPTED)
    kept = [own[name].replace(kind=inspect.Parameter.KEYWORD_ONLY) for name in list(own)[:-1]]
    serve.__signature__ = inspect.Signature([*taken, *kept])  # type: ignore[attr-defined]
    serve.__annotations__ = {each.name: each.annotation for each in (*taken, *kept)}
    serve.__doc__ = HELP


_from_the_table()
