"""Measuring: the same requests to two copies of a model, with a keeper and without.

The copy without a keeper is emptied before every request, so it evaluates each prompt whole, and
its answers are what the others are compared with. After a restart, the copy with a keeper is one in
a second process, which shares nothing but a directory with the first.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from llamakeep.demo.answer import Answer, Settings, ask, served
from llamakeep.demo.story import N_DAYS, Message, Request, messages_of, story, write_log
from llamakeep.states import Reuse
from llamakeep.tokens import IntArray, common_prefix


@dataclass(frozen=True, slots=True)
class DemoRow:
    """One request, without a keeper and with one.

    Attributes:
        title: What the request is.
        prompt_tokens: Its length.
        reused_tokens: Prompt tokens that the keeper did not evaluate.
        evaluated_tokens: Prompt tokens that it did.
        tier: Where the reused ones came from.
        reason: Why the rest had to be evaluated.
        reused_generated_tokens: Of the reused ones, those that had been generated one by one.
        plain_evaluated_tokens: Tokens that a `Llama` alone would evaluate if it were not emptied
            between requests: it reuses the last prompt it saw.
        cold_first_ms: Milliseconds to the first chunk of the answer, nothing reused.
        warm_first_ms: The same with a keeper.
        cold_ms: Milliseconds to the end of the answer, nothing reused.
        warm_ms: The same with a keeper, what it saves included.
        answer: The text, with a keeper.
        identical: Whether both answers have the same text.
        first_difference: Index of the first answer token that differs; None for none.
        margin: How far apart the logits of the two best tokens were there in the cold run.
        restarted: Whether a second process answered, with nothing in memory.
    """

    title: str
    prompt_tokens: int
    reused_tokens: int
    evaluated_tokens: int
    tier: str
    reason: str
    reused_generated_tokens: int
    plain_evaluated_tokens: int
    cold_first_ms: float
    warm_first_ms: float
    cold_ms: float
    warm_ms: float
    answer: str
    identical: bool
    first_difference: int | None = None
    margin: float | None = None
    restarted: bool = False

    @property
    def speedup(self) -> float:
        """How many times sooner the first token came with a keeper."""
        return self.cold_first_ms / self.warm_first_ms


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What the demo found; sums are over all requests.

    Attributes:
        model: The GGUF file.
        n_threads: Threads of llama.cpp.
        answer_tokens: Longest answer.
        rows: The requests.
        used_bytes: What was kept in memory at the end.
        capacity_bytes: What could have been.
        disk_used_bytes: What was kept on disk at the end.
        write_ms: Milliseconds that was waited, between requests, until all of it was on disk.
        load_ms: Milliseconds that the second process took to load the model and attach.
    """

    model: str
    n_threads: int
    answer_tokens: int
    rows: tuple[DemoRow, ...]
    used_bytes: int
    capacity_bytes: int
    disk_used_bytes: int = 0
    write_ms: float = 0.0
    load_ms: float = 0.0

    def total(self, name: str) -> float:
        """Return the sum of a number that every row has."""
        total: float = sum(getattr(row, name) for row in self.rows)
        return total

    @property
    def saved_share(self) -> float:
        """Share of the prompt tokens that were not evaluated, 0 to 1."""
        return self.total("reused_tokens") / self.total("prompt_tokens")

    def as_json(self) -> dict[str, Any]:
        """Return everything under the keys that all of llamakeep uses: JSON-ready."""
        rows = [
            {**{name: getattr(row, name) for name in row.__slots__}, "speedup": row.speedup}
            for row in self.rows
        ]
        summed = [
            name
            for name in DemoRow.__slots__
            if name.endswith(("_tokens", "_ms")) and name != "reused_generated_tokens"
        ]
        return {
            "model": self.model,
            "n_threads": self.n_threads,
            "answer_tokens": self.answer_tokens,
            "requests": rows,
            **{name: self.total(name) for name in summed},
            "saved_share": self.saved_share,
            "used_bytes": self.used_bytes,
            "capacity_bytes": self.capacity_bytes,
            "disk_used_bytes": self.disk_used_bytes,
            "write_ms": self.write_ms,
            "load_ms": self.load_ms,
        }


@dataclass(frozen=True, slots=True)
class Step:
    """Where a running demo stands.

    `index` counts from 1. `phase` is `cold` or `warm` while a prompt is evaluated, `answer` while
    text is generated, `write` while the rest of what was kept goes to disk, `restart` while a
    second process loads the model and answers, and `done` when a request is finished. `rows` are
    the finished requests; tokens count the part of the current prompt that is evaluated now.
    """

    index: int
    n_requests: int
    title: str
    phase: str
    done_tokens: int
    total_tokens: int
    rows: tuple[DemoRow, ...]


OnStep: TypeAlias = Callable[[Step], None]


Report: TypeAlias = Callable[[str, int, int], None]
"""Takes a phase, tokens done and tokens to do."""


class _Pair:
    """The two copies of the model.

    Args:
        settings: For both.
        stack: Closes them.
    """

    def __init__(self, settings: Settings, stack: ExitStack) -> None:
        self._settings = settings
        self._cold, self._warm = (stack.enter_context(closing(settings.load())) for _ in range(2))
        self.keeper = stack.enter_context(settings.attach(self._warm))
        self.write_ms = self.load_ms = 0.0
        # Other families cannot be cut in the middle of what they hold.
        self._can_cut = self.keeper.stats()["family"] in ("attention", "swa")
        self._prompts: list[IntArray] = []
        self._plain = np.empty(0, np.int32)
        self._cold.eval(self._cold.tokenize(b"Neither of the two shall pay for going first."))

    def ask(self, request: Request, messages: list[Message], report: Report) -> DemoRow:
        """Put one request to both and compare."""
        cold = self._ask_cold(messages, report)
        ask_kept = self._ask_restarted if request.restarted else self._ask_warm
        warm, reuse = ask_kept(messages, report)
        n_prompt = reuse.reused_tokens + reuse.evaluated_tokens
        prompt = cold.tokens[:n_prompt]
        if request.restarted:
            self._plain = np.empty(0, np.int32)
        prefilled = max((common_prefix(prompt, known) for known in self._prompts), default=0)
        row = DemoRow(
            title=request.title,
            prompt_tokens=n_prompt,
            reused_tokens=reuse.reused_tokens,
            evaluated_tokens=reuse.evaluated_tokens,
            tier=reuse.tier,
            reason=reuse.reason,
            reused_generated_tokens=max(0, reuse.reused_tokens - prefilled),
            plain_evaluated_tokens=n_prompt - self._plain_reuse(prompt),
            cold_first_ms=cold.first_ms,
            warm_first_ms=warm.first_ms,
            cold_ms=cold.total_ms,
            warm_ms=warm.total_ms,
            answer=warm.text,
            identical=cold.text == warm.text,
            restarted=request.restarted,
        )
        self._prompts.append(prompt)
        self._plain = cold.tokens
        if row.identical:
            return row
        different = common_prefix(cold.tokens, warm.tokens)
        margin = self._margin(cold.tokens[:different], n_prompt)
        return replace(row, first_difference=different - n_prompt, margin=margin)

    def _ask_cold(self, messages: list[Message], report: Report) -> Answer:
        report("cold", 0, 0)
        self._cold.reset()
        with _watched(self._cold, report):
            return self._answer(self._cold, messages, report)

    def _ask_warm(self, messages: list[Message], report: Report) -> tuple[Answer, Reuse]:
        report("warm", 0, 0)
        self.keeper.on_progress = lambda done, total: report("warm", done, total)
        answer, reuse = self._answer(self._warm, messages, report), served(self.keeper)
        report("write", 0, 0)
        begin = time.perf_counter()
        self.keeper.flush()  # or it would be written at the expense of the next cold answer
        self.write_ms += (time.perf_counter() - begin) * 1e3
        return answer, reuse

    def _ask_restarted(self, messages: list[Message], report: Report) -> tuple[Answer, Reuse]:
        from llamakeep.demo.restart import ask_second_process

        report("restart", 0, 0)
        restarted = ask_second_process(self._settings, messages)
        self.load_ms = restarted.load_ms
        return restarted.answer, restarted.reuse

    def _answer(self, llm: Any, messages: list[Message], report: Report) -> Answer:
        return ask(llm, messages, self._settings.max_tokens, lambda: report("answer", 0, 0))

    def _plain_reuse(self, prompt: IntArray) -> int:
        """Return what `Llama.generate` would reuse of the request before, by its own rule."""
        common = min(common_prefix(self._plain, prompt), prompt.size - 1)
        return common if self._can_cut or common == self._plain.size else 0

    def _margin(self, tokens: IntArray, n_prompt: int) -> float:
        """Return how far apart the two best next tokens are after `tokens`, evaluated cold."""
        llm = self._cold
        llm.reset()
        llm.eval(tokens[:n_prompt].tolist())
        for token in tokens[n_prompt:].tolist():
            llm.eval([token])  # as it was generated
        logits = np.ctypeslib.as_array(llm._ctx.get_logits(), (llm.n_vocab(),))
        second, best = np.partition(logits, -2)[-2:]
        return float(best - second)


@contextmanager
def _watched(llm: Any, report: Report) -> Iterator[None]:
    """Report after each batch of a prompt; batches stay what `Llama.eval` would make of it."""

    def evaluate(tokens: Sequence[int]) -> None:
        for start in range(0, len(tokens), llm.n_batch):
            part = tokens[start : start + llm.n_batch]
            type(llm).eval(llm, part)
            if len(tokens) > 1:
                report("cold", start + len(part), len(tokens))

    llm.eval = evaluate
    try:
        yield
    finally:
        del llm.eval


@contextmanager
def _scratch() -> Iterator[Path]:
    """A directory of our own that is gone afterwards."""
    # A virus scanner that has one of its files open must not cost the user what was measured.
    with tempfile.TemporaryDirectory(prefix="llamakeep-demo-", ignore_cleanup_errors=True) as path:
        yield Path(path)


def run_demo(model: Path, *, quick: bool = False, on_step: OnStep | None = None) -> DemoResult:
    """Put the demo's requests to a model without a keeper and with one.

    Args:
        model: A GGUF file, loaded twice with the same settings, and once more in a second process.
        quick: Use a short log and short answers.
        on_step: Called when a request starts, after each evaluated batch, at the first token of
            each answer, before what was kept is written, before the second process starts and when
            a request is done.

    Raises:
        ModelError: For a file that cannot be loaded, or a model that cannot hold the chats.
        StoreError: When nothing can be kept in the system's temporary directory.
        LlamakeepError: When the second process fails, with the last thing that it said.

    Costs about a minute on two cores with the default model, and three contexts of 4,096 tokens.
    What is kept on disk is in a temporary directory, which is removed whatever happens.
    """
    from llamakeep.runtime.llama_cpp import usable_cores

    n_days, max_tokens = (4, 8) if quick else (N_DAYS, 32)
    log, requests = write_log(n_days), story()
    rows: list[DemoRow] = []

    def reporter(index: int, title: str) -> Report:
        def report(phase: str, done: int, total: int) -> None:
            if on_step is not None:
                on_step(Step(index, len(requests), title, phase, done, total, tuple(rows)))

        return report

    with ExitStack() as stack:
        scratch = stack.enter_context(_scratch())
        settings = Settings(
            model=os.path.abspath(model),
            n_threads=usable_cores(),
            max_tokens=max_tokens,
            cache_dir=str(scratch / "cache"),
            disk_bytes=shutil.disk_usage(scratch).free // 4,
        )
        pair = _Pair(settings, stack)
        for index, request in enumerate(requests, 1):
            report = reporter(index, request.title)
            messages = messages_of(request, log, rows[0].answer if rows else "")
            rows.append(pair.ask(request, messages, report))
            report("done", 0, 0)
        stats = pair.keeper.stats()
        return DemoResult(
            model=str(model),
            n_threads=settings.n_threads,
            answer_tokens=max_tokens,
            rows=tuple(rows),
            used_bytes=stats["used_bytes"],
            capacity_bytes=stats["capacity_bytes"],
            disk_used_bytes=stats["below"]["tiers"]["disk"]["used_bytes"],
            write_ms=pair.write_ms,
            load_ms=pair.load_ms,
        )
