"""Make the tables and plots of checkpoints in docs/eviction.md.

`.venv/bin/python -m docs.make_checkpoint_tables` makes all of them, in five minutes on two cores;
names of tables, or `plots`, make these alone. Tables of traces need the traces: a directory
`shared/traces` beside the project or above it.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from llamakeep.runtime.base import Family
from llamakeep.simulate import (
    ChatStyle,
    CheckpointRules,
    Experiment,
    Model,
    Trace,
    chat_workload,
    open_trace,
    run,
    trace_of,
)
from tests.published import trace_path

DOCS: Final = Path(__file__).with_name("eviction.md")
POLICIES: Final = (
    "oldest",
    "lru",
    "upstream",
    "tokens-per-byte",
    "neighbor-distance",
    "neighbor-gap",
    "marginal",
)
TREE_POLICIES: Final = (
    "oldest",
    "lru",
    "tokens-per-byte",
    "marginal",
    "slru",
    "gdsf",
    "hazard",
    "random",
)
RESTORES: Final = ("upstream", "exact", "prefix")
N_SEEDS: Final = 8
LEAST_WORSE: Final = 7
"""In so many of the seeds a policy must be worse than the best one, to be called worse: by chance
that happens to two equal ones in 9 of 256 cases."""

BYTES_PER_TOKEN: Final = "64KiB"
CHECKPOINT_MIB: Final = 150
MODELS: Final = {
    family: Model(64 << 10, family, CHECKPOINT_MIB << 20) for family in (Family.HYBRID, Family.SWA)
}
STYLES: Final = {
    "alone": ChatStyle(n_chats=4, n_turns=40, n_open=1),
    "beside": ChatStyle(),
}
FORESIGHT: Final = "foresight"
NO_LIMIT: Final = "no limit"
CLAIRVOYANT: Final = "clairvoyant"
LIMITS: Final = (4, 8, 16)
BUDGETS: Final = ("2GiB", "16GiB")


@dataclass(frozen=True)
class Column:
    """What is replayed, with every policy.

    Attributes:
        label: Its title.
        requests: A style of chats, or the name of a trace.
        family: The memory family.
        rules: How checkpoints are treated.
        capacity: Of the prompt cache or the tree.
        cache: `prompt` or `tree`.
    """

    label: str
    requests: str
    family: Family
    rules: CheckpointRules
    capacity: str = "0"
    cache: str = "prompt"

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds; a trace has none."""
        return tuple(range(N_SEEDS)) if self.requests in STYLES else (0,)


@dataclass(frozen=True)
class Table:
    """Columns, and what stands in them.

    Attributes:
        name: What it is called, and marked with.
        columns: All of them.
        rows: Policies, then what they are compared with.
        policies: How many of the rows are policies.
    """

    name: str
    columns: tuple[Column, ...]
    rows: tuple[str, ...]
    policies: tuple[str, ...] = POLICIES


def requests_of(name: str, seed: int) -> Trace:
    """Return chats of a style, or a trace, to be closed."""
    if name in STYLES:
        return trace_of(chat_workload(STYLES[name], seed=seed), f"{name}, seed {seed}")
    path = trace_path(name)
    if path is None:
        raise FileNotFoundError(f"no trace {name}")
    return open_trace(path)


def measure(column: Column, seed: int, rows: Sequence[str]) -> list[int]:
    """Return the tokens that are evaluated again, for each row."""
    with requests_of(column.requests, seed) as trace:
        return _measure(trace, column, rows)


def _measure(trace: Trace, column: Column, rows: Sequence[str]) -> list[int]:
    of_tree = column.cache == "tree"
    policies = [row for row in rows if row not in (NO_LIMIT, CLAIRVOYANT)]
    asked = Experiment(
        cache=column.cache,  # type: ignore[arg-type]
        model=MODELS[column.family],
        capacities=[column.capacity],
        policies=policies if of_tree else (),
        checkpoint_policies=() if of_tree else policies,
        checkpoints=column.rules,
        with_bound=CLAIRVOYANT in rows,
    )
    report = run(trace, asked)
    found = dict(zip(policies, report.outcomes, strict=True))
    if CLAIRVOYANT in rows:
        (found[CLAIRVOYANT],) = report.best
    if NO_LIMIT in rows:
        rules = replace(column.rules, limit=10_000, limit_bytes=None)
        unlimited = replace(asked, checkpoints=rules, checkpoint_policies=(), with_bound=False)
        (found[NO_LIMIT],) = run(trace, unlimited).outcomes
    return [found[row].reevaluated_tokens for row in rows]


def cells(table: Table, column: Column, found: Sequence[Sequence[int]]) -> list[str]:
    """Return the texts of a column: means in thousands, the best ones marked.

    Args:
        table: The table.
        column: The column.
        found: What was measured, by seed and row.
    """
    by_row = dict(zip(table.rows, zip(*found, strict=True), strict=True))
    means = {row: sum(values) / len(values) for row, values in by_row.items()}
    best = min(table.policies, key=lambda row: means[row])
    texts = []
    for row in table.rows:
        text = f"{means[row] / 1e3:,.1f}"
        n_worse = sum(a > b for a, b in zip(by_row[row], by_row[best], strict=True))
        told_apart = n_worse >= min(LEAST_WORSE, len(column.seeds))
        told_apart = told_apart and text != f"{means[best] / 1e3:,.1f}"
        texts.append(f"**{text}**" if row in table.policies and not told_apart else text)
    return texts


def markdown(table: Table, found: Sequence[Sequence[Sequence[int]]]) -> str:
    """Return a table as text; `found` is by column, seed and row."""
    columns = [
        cells(table, column, values) for column, values in zip(table.columns, found, strict=True)
    ]
    titles = " | ".join(column.label for column in table.columns)
    lines = [f"| | {titles} |", "|---|" + "---:|" * len(columns)]
    for index, row in enumerate(table.rows):
        name = f"`{row}`" if row in table.policies else row
        lines.append(f"| {name} | {' | '.join(column[index] for column in columns)} |")
    return "\n".join(lines)


# -- what there is to be told ----------------------------------------------------------------------

_REFERENCES: Final = (*POLICIES, FORESIGHT, NO_LIMIT, CLAIRVOYANT)


def _counted(family: Family) -> Table:
    columns = tuple(
        Column(
            f"{restore}, {limit}",
            "alone",
            family,
            CheckpointRules(restore=restore, limit=limit),  # type: ignore[arg-type]
        )
        for restore in RESTORES
        for limit in LIMITS
    )
    return Table(f"count-{family.value}", columns, _REFERENCES)


def _by_bytes() -> Table:
    columns = tuple(
        Column(
            f"{family.value}, {restore}",
            "alone",
            family,
            CheckpointRules(
                restore=restore,  # type: ignore[arg-type]
                limit_bytes=8 * CHECKPOINT_MIB << 20,
            ),
        )
        for family in MODELS
        for restore in RESTORES
    )
    return Table("bytes", columns, (*POLICIES, FORESIGHT, CLAIRVOYANT))


def _stepped() -> Table:
    columns = tuple(
        Column(
            f"{restore}, {step:,}",
            "alone",
            Family.HYBRID,
            CheckpointRules(restore=restore, limit=8, min_step=step),  # type: ignore[arg-type]
        )
        for restore in RESTORES
        for step in (8192, 256, 0)
    )
    return Table("step", columns, _REFERENCES)


def _entries(restore: str, mode: str, family: Family = Family.HYBRID) -> Table:
    columns = tuple(
        Column(
            f"{keep}, {budget.replace('GiB', ' GiB')}",
            "beside",
            family,
            CheckpointRules(mode=mode, restore=restore, keep=keep, limit=8),  # type: ignore[arg-type]
            budget,
        )
        for budget in BUDGETS
        for keep in ("all", "last", "none")
    )
    name = f"entries-{mode}-{restore}" + ("-swa" if family is Family.SWA else "")
    return Table(name, columns, (*POLICIES, FORESIGHT, CLAIRVOYANT))


def _tree() -> Table:
    columns = tuple(
        Column(
            f"{limit if limit == 'all' else limit + ' GiB'} of {capacity.replace('GiB', ' GiB')}",
            "beside",
            Family.HYBRID,
            CheckpointRules(limit_bytes=None if limit == "all" else int(limit) << 30),
            capacity,
            "tree",
        )
        for limit, capacity in (("all", "2GiB"), ("1", "2GiB"), ("all", "16GiB"), ("4", "16GiB"))
    )
    return Table("tree", columns, (*TREE_POLICIES, CLAIRVOYANT), TREE_POLICIES)


def _traces() -> Table:
    columns = tuple(
        Column(
            f"{label}, {restore}",
            name,
            Family.HYBRID,
            CheckpointRules(restore=restore, limit=8),  # type: ignore[arg-type]
            "16GiB",
        )
        for name, label in (("taubench_airline", "tau-bench"), ("lmcache_agent", "LMCache"))
        for restore in RESTORES
    )
    return Table("traces", columns, (*POLICIES, FORESIGHT, CLAIRVOYANT))


TABLES: Final = {
    table.name: table
    for table in (
        _counted(Family.HYBRID),
        _counted(Family.SWA),
        _by_bytes(),
        _stepped(),
        *(_entries(restore, "upstream") for restore in RESTORES),
        _entries("prefix", "upstream", Family.SWA),
        _entries("prefix", "keep"),
        _tree(),
        _traces(),
    )
}


def quiet() -> None:
    """Let caches not warn of what does not fit: that is what is studied."""
    logging.getLogger("llamakeep").setLevel(logging.ERROR)


def measured(table: Table, pool: ProcessPoolExecutor) -> list[list[list[int]]]:
    """Return what every column of a table measures, by column, seed and row."""
    seeds = sorted({seed for column in table.columns for seed in column.seeds})
    tasks = {
        (column, seed): pool.submit(measure, column, seed, table.rows)
        for seed in seeds
        for column in table.columns
        if seed in column.seeds
    }
    return [[tasks[column, seed].result() for seed in column.seeds] for column in table.columns]


def replaced(text: str, name: str, new: str) -> str:
    """Return a document with another text between the marks of a name.

    Raises:
        ValueError: For a document without them.
    """
    pattern = rf"(<!-- {re.escape(name)} -->\n).*?(<!-- /{re.escape(name)} -->)"
    if not re.search(pattern, text, re.DOTALL):
        raise ValueError(f"no place for {name}")
    return re.sub(pattern, lambda found: f"{found[1]}\n{new}\n\n{found[2]}", text, flags=re.DOTALL)


# -- plots -----------------------------------------------------------------------------------------

_PLOT_LIMITS: Final = (2, 4, 6, 8, 12, 16, 24, 32)
_STYLES: Final[dict[str, dict[str, Any]]] = {
    "oldest": {"color": "tab:blue"},
    "lru": {"color": "black", "linestyle": (0, (1, 3))},
    "upstream": {"color": "tab:orange"},
    "tokens-per-byte": {"color": "tab:green"},
    "neighbor-distance": {"color": "magenta"},
    "neighbor-gap": {"color": "darkviolet"},
    "marginal": {"color": "red"},
    FORESIGHT: {"color": "black", "linestyle": "--"},
    NO_LIMIT: {"color": "grey", "linestyle": ":"},
    CLAIRVOYANT: {"color": "grey", "linestyle": "-."},
}


def figure(draw: Callable[[Any], None], path: Path, width: float) -> None:
    """Draw a figure of a width in inches into a small PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image

    figure = Figure(figsize=(width, 3.6), layout="constrained")
    canvas = FigureCanvasAgg(figure)
    draw(figure)
    canvas.draw()
    # 128 colours are enough for lines, and a third of the bytes.
    picture = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    picture.quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)


def plot_limits(pool: ProcessPoolExecutor) -> None:
    """Draw what is evaluated again against the number of checkpoints, for two restore modes."""
    tables = {
        restore: Table(
            restore,
            tuple(
                Column(
                    str(limit),
                    "alone",
                    Family.HYBRID,
                    CheckpointRules(restore=restore, limit=limit),  # type: ignore[arg-type]
                )
                for limit in _PLOT_LIMITS
            ),
            _REFERENCES,
        )
        for restore in RESTORES
    }
    found = {restore: measured(table, pool) for restore, table in tables.items()}

    def draw(figure: Any) -> None:
        for index, (restore, columns) in enumerate(found.items()):
            axes = figure.add_subplot(1, len(found), index + 1)
            for row, name in enumerate(_REFERENCES):
                means = [
                    sum(values[row] for values in column) / len(column) / 1e3 for column in columns
                ]
                style = _STYLES.get(name, {})
                axes.plot(_PLOT_LIMITS, means, label=name, **style)
            axes.set_xscale("log", base=2)
            axes.set_xticks(_PLOT_LIMITS, labels=[str(limit) for limit in _PLOT_LIMITS])
            axes.set_xticks([], minor=True)
            axes.set_ylim(0, 210)
            axes.set_title(f"restore {restore}", fontsize=10)
            axes.set_xlabel("checkpoints of the slot", fontsize=9)
            axes.grid(visible=True, alpha=0.3)
            axes.tick_params(labelsize=8)
            if not index:
                axes.set_ylabel("tokens evaluated again, thousands", fontsize=9)
            if index == len(found) - 1:
                axes.legend(fontsize=7, loc="upper right")

    figure(draw, DOCS.with_name("checkpoints-limit.png"), 10.0)


def plot_entries(found: dict[str, list[list[list[int]]]]) -> None:
    """Draw what is evaluated again for entries with all, the last or no checkpoints."""
    names = [f"entries-upstream-{restore}" for restore in RESTORES]
    row = TABLES[names[0]].rows.index("neighbor-gap")

    def draw(figure: Any) -> None:
        for index, budget in enumerate(BUDGETS):
            axes = figure.add_subplot(1, len(BUDGETS), index + 1)
            for place, keep in enumerate(("all", "last", "none")):
                heights = []
                for name in names:
                    column = found[name][3 * index + place]
                    heights.append(sum(values[row] for values in column) / len(column) / 1e3)
                at = [x + 0.27 * (place - 1) for x in range(len(names))]
                axes.bar(at, heights, width=0.25, label=f"entries with {keep}")
            axes.set_xticks(range(len(names)), labels=[f"restore {each}" for each in RESTORES])
            axes.set_title(f"a cache of {budget.replace('GiB', ' GiB')}", fontsize=10)
            axes.tick_params(labelsize=8)
            axes.grid(visible=True, axis="y", alpha=0.3)
            if not index:
                axes.set_ylabel("tokens evaluated again, thousands", fontsize=9)
            else:
                axes.legend(fontsize=8)
            axes.set_ylim(0, 350)

    figure(draw, DOCS.with_name("checkpoints-entries.png"), 8.0)


def main() -> None:
    """Make what the command line names, or everything."""
    wanted = sys.argv[1:] or [*TABLES, "plots"]
    unknown = [name for name in wanted if name not in TABLES and name != "plots"]
    if unknown:
        sys.exit(f"no table {unknown[0]!r}; known: {', '.join(TABLES)}, plots")
    with ProcessPoolExecutor(min(2, os.cpu_count() or 1), initializer=quiet) as pool:
        for name in wanted:
            if name == "plots":
                plot_limits(pool)
                names = [name for name in TABLES if name.startswith("entries-upstream")]
                plot_entries({name: measured(TABLES[name], pool) for name in names})
                continue
            table = TABLES[name]
            try:
                text = markdown(table, measured(table, pool))
            except FileNotFoundError as error:
                sys.stderr.write(f"{name}: {error}: left as it is\n")
                continue
            DOCS.write_text(replaced(DOCS.read_text("utf-8"), name, text), "utf-8")
            sys.stderr.write(f"{name}\n{text}\n")


if __name__ == "__main__":
    main()
