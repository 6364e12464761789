"""Run benchmarks: `python -m benchmarks [SUBSTRING ...]`.

Prints one JSON line per result, appends it to bench.jsonl, and ends with a table on stderr.
Exits with 1 when a result misses its target or a benchmark fails, with 2 when no name matches.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import sys
import traceback
from pathlib import Path

from rich.console import Console
from rich.table import Table

import benchmarks
from benchmarks.harness import BENCHMARKS, Result, falls_short

LOG = Path("bench.jsonl")


def load() -> None:
    """Import every bench_*.py, which registers what it defines."""
    for module in sorted(pkgutil.iter_modules(benchmarks.__path__), key=lambda m: m.name):
        if module.name.startswith("bench_"):
            importlib.import_module(f"benchmarks.{module.name}")


def show(results: list[Result]) -> None:
    """Print all results as a table on stderr, those that miss their target marked."""
    table = Table("benchmark", "value", "target", "")
    for column in table.columns[1:3]:
        column.justify = "right"
        column.no_wrap = True
    for result in results:
        bound = "≥" if result["better"] == "higher" else "≤"
        missed = falls_short(result)
        table.add_row(
            result["name"],
            f"{result['value']:.4g} {result['unit']}",
            f"{bound} {result['target']:g}",
            "MISSED" if missed else "ok",
            style="bold red" if missed else None,
        )
    Console(stderr=True).print(table)


def main() -> int:
    """Run what the command line asks for and return the exit status."""
    load()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure, print JSON lines, append them to bench.jsonl, compare to targets.",
        epilog="benchmarks: " + ", ".join(BENCHMARKS),
    )
    parser.add_argument("substring", nargs="*", help="run only those whose name has one of these")
    wanted = parser.parse_args().substring
    names = [n for n in BENCHMARKS if not wanted or any(part in n for part in wanted)]
    if not names:
        parser.error(f"no benchmark's name has any of {wanted}")
    results: list[Result] = []
    failed = []
    for name in names:
        try:
            for result in BENCHMARKS[name]():
                line = json.dumps(result)
                print(line, flush=True)
                with LOG.open("a", encoding="utf-8") as log:
                    log.write(line + "\n")
                results.append(result)
        except Exception:  # noqa: BLE001 - one that breaks must not hide the others
            traceback.print_exc()
            failed.append(name)
    show(results)
    for name in failed:
        print(f"FAILED: {name}", file=sys.stderr)
    return 1 if failed or any(map(falls_short, results)) else 0


if __name__ == "__main__":
    sys.exit(main())
