"""Make the tables and the plot of the tree's policies in docs/eviction.md.

`.venv/bin/python -m docs.make_policy_tables` makes all of them and writes them into the page, in
some 15 minutes on two cores; names of tables, or `plot`, make these alone. They need the traces: a
directory `shared/traces` beside the project or above it.
"""

from __future__ import annotations

import gzip
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from docs.make_checkpoint_tables import DOCS, figure, quiet, replaced
from llamakeep.simulate import Experiment, Outcome, Trace, open_trace, run
from tests.published import PUBLISHED, trace_path

TITLES: Final = {
    "taubench_airline": "tau-bench",
    "lmcache_agent": "LMCache",
    "mooncake_synthetic": "Mooncake",
}
POLICIES: Final = (
    "oldest",
    "random",
    "gdsf",
    "slru",
    "slru:protected=0.5",
    "tokens-per-byte",
    "marginal",
    "marginal:half_life=60",
    "lru",
    "hazard:guard=0",
    "hazard",
)
BOUND: Final = "bound"
SLOT: Final = "prompt cache and its slot"
STARVED: Final = 0.05
"""How far the bound is above `lru` where memory is too small for it, as a share of all tokens."""

SEEDS: Final = (20, 21, 22, 23)
"""Of subsets that nobody looked at before `hazard` was what it is."""
SUBSET_CAPACITIES: Final = {
    "taubench_airline": ("2%", "5%"),
    "lmcache_agent": ("2%", "5%"),
    "mooncake_synthetic": ("5%", "20%"),
}
PLOT_CAPACITIES: Final = ("1%", "2%", "3%", "5%", "7%", "10%", "15%", "20%", "30%", "50%")
PLOTTED: Final = ("lru", "gdsf", "tokens-per-byte", "hazard")


@dataclass(frozen=True)
class Cell:
    """A trace, or a part of it, at a capacity.

    Attributes:
        name: Of the trace.
        capacity: A share of what would keep everything.
        subset: The seed of a subset of its conversations; None for all of it.
    """

    name: str
    capacity: str
    subset: int | None = None


def whole() -> list[Cell]:
    """Return the traces at the capacities whose figures were published."""
    return [Cell(name, capacity) for name, by in PUBLISHED.items() for capacity in by]


def subsets() -> list[Cell]:
    """Return subsets of the traces."""
    return [
        Cell(name, capacity, seed)
        for name, capacities in SUBSET_CAPACITIES.items()
        for capacity in capacities
        for seed in SEEDS
    ]


def subset_of(path: Path, seed: int, to: Path) -> None:
    """Write six of ten conversations of a trace, drawn from a seed.

    Where a trace does not name sessions, requests with the same first block are a conversation.
    """
    with gzip.open(path, "rt") as lines:
        requests = [json.loads(line) for line in lines]
    of = [str(each.get("session_id") or each["hash_ids"][:1]) for each in requests]
    conversations = sorted(set(of))
    random.Random(seed).shuffle(conversations)
    chosen = set(conversations[: len(conversations) * 6 // 10])
    with gzip.open(to, "wt") as out:
        for each, conversation in zip(requests, of, strict=True):
            if conversation in chosen:
                out.write(json.dumps(each) + "\n")


def measure(cell: Cell, rows: Sequence[str]) -> list[float]:
    """Return what each row saves of a cell, as a share of all tokens."""
    path = trace_path(cell.name)
    if path is None:
        raise FileNotFoundError(f"no trace {cell.name}")
    if cell.subset is None:
        with open_trace(path) as trace:
            return _measure(trace, cell.capacity, rows)
    with tempfile.TemporaryDirectory() as directory:
        part = Path(directory) / path.name
        subset_of(path, cell.subset, part)
        with open_trace(part) as trace:
            return _measure(trace, cell.capacity, rows)


def _measure(trace: Trace, capacity: str, rows: Sequence[str]) -> list[float]:
    policies = [row for row in rows if row not in (BOUND, SLOT)]
    report = run(
        trace,
        Experiment(policies=policies, capacities=[capacity], with_bound=BOUND in rows),
    )
    found: dict[str, Outcome] = dict(zip(policies, report.outcomes, strict=True))
    if BOUND in rows:
        (found[BOUND],) = report.best
    if SLOT in rows:
        asked = Experiment(cache="prompt", capacities=[capacity], with_bound=False)
        (found[SLOT],) = run(trace, asked).outcomes
    return [found[row].saved_share for row in rows]


def measured(
    cells: Sequence[Cell], rows: Sequence[str], pool: ProcessPoolExecutor
) -> list[list[float]]:
    """Return what each row saves of each cell."""
    tasks = [pool.submit(measure, cell, rows) for cell in cells]
    return [task.result() for task in tasks]


def percent(share: float) -> str:
    """Return a share as it stands in the tables."""
    return f"{100 * share:.1f}"


def _table(titles: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    lines = [f"| | {' | '.join(titles)} |", "|---|" + "---:|" * len(titles)]
    lines += [f"| {name} | {' | '.join(cells)} |" for name, cells in rows]
    return "\n".join(lines)


def _named(row: str) -> str:
    return row if row in (BOUND, SLOT) else f"`{row}`"


def policies_table(pool: ProcessPoolExecutor) -> str:
    """Return what every policy saves of the traces."""
    cells, rows = whole(), (SLOT, *POLICIES, BOUND)
    found = measured(cells, rows, pool)
    titles = [f"{TITLES[cell.name]}, {cell.capacity.replace('%', ' %')}" for cell in cells]
    texts = []
    for index, row in enumerate(rows):
        marked = []
        for column in found:
            best = max(column[rows.index(policy)] for policy in POLICIES)
            text = percent(column[index])
            is_best = row in POLICIES and text == percent(best)
            marked.append(f"**{text}**" if is_best else text)
        texts.append((_named(row), marked))
    closed = []
    for column in found:
        by = dict(zip(rows, column, strict=True))
        gap = by[BOUND] - by["lru"]
        closed.append(f"{(by['hazard'] - by['lru']) / gap:.0%}" if gap > STARVED else "")
    texts.append(("of the gap, `hazard` closes", [text.replace("%", " %") for text in closed]))
    return _table(titles, texts)


def subsets_table(pool: ProcessPoolExecutor) -> str:
    """Return what `lru` and `hazard` save of subsets of the traces."""
    cells, rows = subsets(), ("lru", "hazard", BOUND)
    found = measured(cells, rows, pool)
    titles = [f"seed {seed}" for seed in SEEDS]
    texts = []
    for at in range(0, len(cells), len(SEEDS)):
        name = f"{TITLES[cells[at].name]}, {cells[at].capacity.replace('%', ' %')}"
        columns = found[at : at + len(SEEDS)]
        texts.append((name, [" / ".join(percent(share) for share in each) for each in columns]))
    return _table(titles, texts)


TABLES: Final = {"policies": policies_table, "subsets": subsets_table}


def plot(pool: ProcessPoolExecutor) -> None:
    """Draw what policies save against capacity."""
    rows = (*PLOTTED, BOUND)
    cells = [Cell(name, capacity) for name in TITLES for capacity in PLOT_CAPACITIES]
    found = measured(cells, rows, pool)
    shares = [float(capacity.rstrip("%")) for capacity in PLOT_CAPACITIES]
    n = len(PLOT_CAPACITIES)

    def draw(drawn: Any) -> None:
        for index, title in enumerate(TITLES.values()):
            axes = drawn.add_subplot(1, len(TITLES), index + 1)
            columns = found[index * n : (index + 1) * n]
            for row, name in enumerate(rows):
                style = {"color": "black", "linestyle": "--"} if name == BOUND else {}
                axes.plot(shares, [100 * each[row] for each in columns], label=name, **style)
            axes.set_xscale("log")
            axes.set_xticks(shares[1::2], labels=[f"{share:g}" for share in shares[1::2]])
            axes.set_xticks([], minor=True)
            axes.set_ylim(0, 100)
            axes.set_title(title, fontsize=10)
            axes.set_xlabel("capacity, % of what keeps everything", fontsize=9)
            axes.grid(alpha=0.3)
            if not index:
                axes.set_ylabel("tokens saved, %", fontsize=9)
                axes.legend(fontsize=8)

    figure(draw, DOCS.with_name("policies.png"), 10)


def main(names: Sequence[str]) -> None:
    """Make tables and the plot.

    Raises:
        SystemExit: For a name that is none.
    """
    known = (*TABLES, "plot")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    with ProcessPoolExecutor(2, initializer=quiet) as pool:
        for name in names or known:
            if name == "plot":
                plot(pool)
            else:
                text = TABLES[name](pool)
                DOCS.write_text(replaced(DOCS.read_text(), name, text))


if __name__ == "__main__":
    main(sys.argv[1:])
