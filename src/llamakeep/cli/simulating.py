"""What `simulate` replays, and how it shows what that saved."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, cast

from llamakeep.checkpoint_list import Restore
from llamakeep.cli import screen
from llamakeep.cli.fleets import read_fleets, show_fleets
from llamakeep.errors import InvalidValue
from llamakeep.prompt_cache import CacheMode, KeepCheckpoints
from llamakeep.runtime.base import Family
from llamakeep.simulate.experiment import Experiment, Report, run
from llamakeep.simulate.replay import DEFAULT_POLICY, N_SWA, Model, Outcome
from llamakeep.simulate.rules import KEEPS, MODES, RESTORES, CheckpointRules
from llamakeep.simulate.tiers import DEFAULT_BYTES_PER_S, parse_tiers
from llamakeep.simulate.trace import open_trace
from llamakeep.sizes import format_bytes, parse_bytes

_CAPACITIES: Final = ("2%", "5%", "10%", "20%", "50%")
_BAR_WIDTH: Final = 16  # the room that a last column has at least, so that none is cut
_CHECKPOINTS: Final = "checkpoints"
_EIGHTHS: Final = " ▏▎▍▌▋▊▉"
_NOTES: Final = {
    ("bound", True): "bound: Belady's optimum on the same blocks; nothing can save more.",
    ("bound", False): "bound: Belady's optimum in that capacity; the slot is memory on top of it.",
    ("clairvoyant", False): "clairvoyant: a greedy choice that knows the future; no bound.",
}


@dataclass(frozen=True)
class Asked:
    """What is to be replayed, as it was written on the command line.

    Attributes:
        trace: The file.
        cache: `tree` or `prompt`.
        policies: What goes first; empty for the default.
        capacities: Sizes and shares; empty for some shares, or what `tiers` says.
        bytes_per_token: A size.
        family: The memory family.
        checkpoint_bytes: A size; None where there are no checkpoints.
        tiers: As `parse_tiers` reads them; None for memory alone.
        prefill_tokens_per_s: How fast prompts are evaluated.
        warmup: Requests that are not counted, a number or a share.
        tails: Blocks that are not full are kept too.
        with_bound: Compute what was possible.
        plot: Where to draw it.
        replicas: How many share the requests; empty for one cache by itself.
        routes: How requests find one of them; empty for the default.
        prompt_mode: `upstream` or `keep`; None for the product's choice, as below.
        checkpoint_policies: Which checkpoint of a slot goes first.
        restore: `upstream`, `exact` or `prefix`.
        keep_checkpoints: `all`, `last` or `none`.
        ctx_checkpoints: Most checkpoints.
        max_checkpoint_bytes: A size.
        checkpoint_min_step: Tokens.
        n_swa: Tokens of a window; None for a common one.
    """

    trace: Path
    cache: str = "tree"
    policies: tuple[str, ...] = ()
    capacities: tuple[str, ...] = ()
    bytes_per_token: str = "128KiB"
    family: str = "attention"
    checkpoint_bytes: str | None = None
    tiers: str | None = None
    prefill_tokens_per_s: float = 500.0
    warmup: str = "0"
    tails: bool = False
    with_bound: bool = True
    plot: Path | None = None
    replicas: tuple[int, ...] = ()
    routes: tuple[str, ...] = ()
    prompt_mode: str | None = None
    checkpoint_policies: tuple[str, ...] = ()
    restore: str | None = None
    keep_checkpoints: str | None = None
    ctx_checkpoints: int | None = None
    max_checkpoint_bytes: str | None = None
    checkpoint_min_step: int | None = None
    n_swa: int | None = None


def simulate_asked(asked: Asked, *, as_json: bool) -> None:
    """Replay a trace and print what that saved.

    Raises:
        InvalidValue: For what cannot be meant, and for a file that is no trace.
        StoreError: For a file that cannot be read or written.
    """
    experiment = _experiment(asked)
    if asked.plot is not None:
        from llamakeep.simulate.plot import check_plot

        check_plot(asked.plot)
    with screen.Bar("reading", hidden=as_json) as reading:
        # How many there are is not known before the end.
        trace = open_trace(
            asked.trace, tails=asked.tails, on_progress=lambda n: reading.update(n, None)
        )
    with trace, _Replaying(hidden=as_json) as replaying, _without_warnings():
        report = run(trace, experiment, replaying.update)
    if asked.plot is not None:
        from llamakeep.simulate.plot import plot_report

        plot_report(report, asked.plot)
    if as_json:
        screen.print_json(report.to_json())
    elif experiment.fleets:
        _show_head(report)
        show_fleets(report)
    else:
        _show(report)


def _experiment(asked: Asked) -> Experiment:
    if asked.cache not in DEFAULT_POLICY:
        raise InvalidValue(f"--cache must be {' or '.join(DEFAULT_POLICY)}, not {asked.cache!r}")
    known = [family.value for family in Family]
    if asked.family not in known:
        raise InvalidValue(f"--family must be one of {', '.join(known)}, not {asked.family!r}")
    family = Family(asked.family)
    if (family is Family.ATTENTION) != (asked.checkpoint_bytes is None):
        wants = "has no checkpoints" if family is Family.ATTENTION else "needs --checkpoint-bytes"
        raise InvalidValue(f"the {family.value} family {wants}")
    if asked.n_swa is not None and not family.has_window:
        raise InvalidValue(f"the {family.value} family has no window: leave out --n-swa")
    model = Model(
        parse_bytes(asked.bytes_per_token),
        family,
        parse_bytes(asked.checkpoint_bytes or "0"),
        N_SWA if asked.n_swa is None else asked.n_swa,
    )
    tiers = parse_tiers(asked.tiers) if asked.tiers is not None else ()
    if tiers and asked.capacities:
        raise InvalidValue("--capacity or --tiers: one of them says what memory can keep")
    if tiers and asked.cache != "tree":
        raise InvalidValue("--tiers are for --cache tree")
    fleets = read_fleets(asked.replicas, asked.routes)
    if fleets and asked.cache != "tree":
        raise InvalidValue("--replicas are for --cache tree")
    if fleets and asked.plot is not None:
        raise InvalidValue("--plot draws one cache by itself, without --replicas")
    return Experiment(
        cast(Literal["tree", "prompt"], asked.cache),
        asked.policies,
        (str(tiers[0].capacity_bytes),) if tiers else asked.capacities or _CAPACITIES,
        model,
        tiers[1:],
        {**DEFAULT_BYTES_PER_S, **{tier.tier: tier.bytes_per_s for tier in tiers}},
        asked.prefill_tokens_per_s,
        asked.warmup,
        asked.with_bound,
        fleets,
        _rules(asked, family),
        asked.checkpoint_policies,
    )


def _rules(asked: Asked, family: Family) -> CheckpointRules:
    """Return how checkpoints are treated, if that can be meant with this cache and family."""
    of_prompts = {
        "--prompt-mode": asked.prompt_mode,
        "--checkpoint-policy": asked.checkpoint_policies or None,
        "--restore": asked.restore,
        "--keep-checkpoints": asked.keep_checkpoints,
    }
    of_checkpoints = {
        **{flag: value for flag, value in of_prompts.items() if flag != "--prompt-mode"},
        "--ctx-checkpoints": asked.ctx_checkpoints,
        "--max-checkpoint-bytes": asked.max_checkpoint_bytes,
        "--checkpoint-min-step": asked.checkpoint_min_step,
    }
    if family is Family.ATTENTION:
        for flag, value in of_checkpoints.items():
            if value is not None:
                raise InvalidValue(f"the attention family has no checkpoints: leave out {flag}")
    if asked.cache != "prompt":
        for flag, value in of_prompts.items():
            if value is not None:
                raise InvalidValue(f"{flag} is for --cache prompt; the tree has --policy alone")
    if asked.replicas:
        for flag, value in of_checkpoints.items():
            if value is not None:
                raise InvalidValue(f"--replicas do without {flag}")
    for flag, value, known in (
        ("--prompt-mode", asked.prompt_mode, MODES),
        ("--restore", asked.restore, RESTORES),
        ("--keep-checkpoints", asked.keep_checkpoints, KEEPS),
    ):
        if value is not None and value not in known:
            raise InvalidValue(f"{flag} must be one of {', '.join(known)}, not {value!r}")
    n_bytes = asked.max_checkpoint_bytes
    return CheckpointRules(
        mode=cast("CacheMode | None", asked.prompt_mode),
        restore=cast("Restore | None", asked.restore),
        keep=cast("KeepCheckpoints | None", asked.keep_checkpoints),
        limit=asked.ctx_checkpoints,
        limit_bytes=None if n_bytes is None else parse_bytes(n_bytes),
        min_step=asked.checkpoint_min_step,
    )


class _Replaying:
    """A bar for each replay, one after the other. A context."""

    def __init__(self, *, hidden: bool) -> None:
        self._hidden = hidden
        self._title = ""
        self._bar: screen.Bar | None = None

    def __enter__(self) -> _Replaying:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.__exit__()

    def update(self, title: str, done: int, total: int) -> None:
        """Show how much of what is done."""
        if self._bar is None or title != self._title:
            self.__exit__()
            self._title, self._bar = title, screen.Bar(title, hidden=self._hidden)
        self._bar.update(done, total)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """A context in which caches do not warn of what does not fit: that is what is studied."""
    logger = logging.getLogger("llamakeep")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _show_head(report: Report) -> None:
    screen.say(
        f"{screen.printable(report.trace)}: {report.n_requests:,} requests, "
        f"{report.input_tokens:,} tokens; {format_bytes(report.footprint_bytes)} keep everything"
    )
    screen.say()


def _show(report: Report) -> None:
    _show_head(report)
    best = report.best[0].cache if report.best else ""
    outcomes = [(outcome.policy, outcome) for outcome in report.outcomes]
    outcomes += [(best, outcome) for outcome in report.best]
    rows = [
        _row(name, outcome, ms, report)
        for (name, outcome), ms in zip(outcomes, report.saved_ms, strict=True)
    ]
    titles = [title for title in rows[0] if any(row[title] for row in rows) or not title]
    screen.show_table(
        titles,
        [[row[title] for title in titles] for row in rows],
        right=[title for title in titles[1:-1] if title != _CHECKPOINTS],
    )
    if report.best:
        screen.say()
        screen.say(_NOTES[best, report.best_is_bound])


def _row(name: str, outcome: Outcome, ms: float, report: Report) -> dict[str, str]:
    """Return cells by their titles; a column without a text in any row is left out."""
    share = outcome.capacity_bytes / report.footprint_bytes if report.footprint_bytes else 0.0
    return {
        "policy": name,
        _CHECKPOINTS: outcome.checkpoint_policy,
        "capacity": f"{format_bytes(outcome.capacity_bytes)} = {100 * share:.3g} %",
        "saved": f"{outcome.saved_share:.1%}",
        "hit": f"{outcome.requests_hit:,}",
        "evaluated": f"{outcome.evaluated_tokens:,}",
        "again": f"{outcome.reevaluated_tokens:,}" if report.has_checkpoints else "",
        "evicted": format_bytes(outcome.evicted_bytes),
        "time saved": _span(ms),
        "": bar(outcome.saved_share),
    }


def _span(ms: float) -> str:
    """Return a span of time as people read it."""
    seconds = ms / 1e3
    if abs(seconds) < 1:
        return f"{ms:.0f} ms"
    if abs(seconds) < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:,.0f} min" if abs(seconds) < 7200 else f"{seconds / 3600:,.1f} h"


def bar(share: float, width: int = _BAR_WIDTH) -> str:
    """Return a bar that is `share` of `width` long, to an eighth of a letter.

    Example:
        >>> bar(0.5, 4), bar(0.28, 4), bar(0.0, 4)
        ('██', '█▏', '')
    """
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    return ("█" * (eighths // 8) + _EIGHTHS[eighths % 8]).rstrip()
