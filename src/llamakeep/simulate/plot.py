"""Drawing what was saved against capacity, with what was possible above it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from llamakeep.errors import InvalidValue, StoreError
from llamakeep.simulate.experiment import Report
from llamakeep.simulate.replay import Outcome

_LABELS: Final = {
    ("bound", True): "bound (Belady)",
    ("bound", False): "Belady, without the slot",
    ("clairvoyant", False): "clairvoyant, greedy (no bound)",
}


def check_plot(path: Path) -> None:
    """Raise for what `plot_report` could not draw, before hours are spent on it.

    Raises:
        InvalidValue: Where matplotlib is not installed, or cannot write this kind of file.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise InvalidValue(
            f"plots need matplotlib (pip install 'llamakeep[plot]'): {error}"
        ) from error
    known = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise InvalidValue(f"cannot draw into {path}: its name must end in .png")


def plot_report(report: Report, path: Path) -> None:
    """Draw a report: a line for each policy, one for what was possible, by capacity.

    Uses no display and no state of matplotlib's that others share.

    Args:
        report: What was found.
        path: Where to draw it; what the name ends in says how: `.png`, `.svg`, `.pdf`.

    Raises:
        InvalidValue: As `check_plot`.
        StoreError: When the file cannot be written.
    """
    check_plot(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.2, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if report.best:
        label = _LABELS[report.best[0].cache, report.best_is_bound]
        _draw(axes, report.best, report, label, color="black", linestyle="--")
    lines: dict[str, list[Outcome]] = {}
    for outcome in report.outcomes:
        names = filter(None, (outcome.cache, outcome.policy, outcome.checkpoint_policy))
        lines.setdefault(", ".join(names), []).append(outcome)
    for label, outcomes in lines.items():
        _draw(axes, outcomes, report, label, marker="o")
    _scale(axes, report)
    axes.set_xlabel("capacity, % of what keeps everything")
    axes.set_ylabel("prompt tokens saved, %")
    axes.set_ylim(0, 100)
    axes.set_title(report.trace, parse_math=False)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(loc="lower right")
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror or error}") from error


def _share(outcome: Outcome, report: Report) -> float:
    return 100 * outcome.capacity_bytes / report.footprint_bytes if report.footprint_bytes else 0.0


def _scale(axes: Any, report: Report) -> None:
    """Mark the capacities, at equal distances for equal ratios; 0 has no place there."""
    shares = sorted({_share(each, report) for each in report.outcomes})
    if shares[0] > 0:
        axes.set_xscale("log")
    axes.set_xticks(shares, labels=[f"{share:.3g}" for share in shares])
    axes.set_xticks([], minor=True)


def _draw(axes: Any, outcomes: Any, report: Report, label: str, **style: Any) -> None:
    ordered = sorted(outcomes, key=lambda each: each.capacity_bytes)
    shares = [_share(each, report) for each in ordered]
    axes.plot(shares, [100 * each.saved_share for each in ordered], label=label, **style)
