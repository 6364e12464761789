"""Measuring: the same requests to two copies of a model, with a keeper and without.

The copy without a keeper is emptied before every request, so it evaluates each prompt whole, and
its answers are what the others are compared with.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from llamakeep.demo.story import N_DAYS, Message, messages_of, story, write_log
from llamakeep.errors import LlamakeepError, ModelError
from llamakeep.keeper import attach
from llamakeep.tokens import IntArray, common_prefix

N_CTX = 4096


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

    @property
    def speedup(self) -> float:
        """How many times sooner the first token came with a keeper."""
        return self.cold_first_ms / self.warm_first_ms


@dataclass(frozen=True, slots=True)
class DemoResult:
    """What the demo found; sums are over all requests."""

    model: str
    n_threads: int
    answer_tokens: int
    rows: tuple[DemoRow, ...]
    used_bytes: int
    capacity_bytes: int

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
        }


@dataclass(frozen=True, slots=True)
class Step:
    """Where a running demo stands.

    `index` counts from 1. `phase` is `cold` or `warm` while a prompt is evaluated, `answer` while
    text is generated and `done` when a request is finished. `rows` are the finished requests;
    tokens count the part of the current prompt that is evaluated now.
    """

    index: int
    n_requests: int
    title: str
    phase: str
    done_tokens: int
    total_tokens: int
    rows: tuple[DemoRow, ...]


OnStep: TypeAlias = Callable[[Step], None]


@dataclass(frozen=True, slots=True)
class _Answer:
    """One answer. `tokens` are all in the context afterwards: prompt and answer but its last."""

    text: str
    first_ms: float
    total_ms: float
    tokens: IntArray


Report: TypeAlias = Callable[[str, int, int], None]
"""Takes a phase, tokens done and tokens to do."""


class _Pair:
    """The two copies of the model.

    Args:
        model: A GGUF file.
        n_threads: For each; they never run at the same time.
        max_tokens: Longest answer.
        stack: Closes them.
    """

    def __init__(self, model: Path, n_threads: int, max_tokens: int, stack: ExitStack) -> None:
        from llamakeep.runtime.llama_cpp import load_llama

        options = {"n_ctx": N_CTX, "n_threads": n_threads, "n_threads_batch": n_threads}
        self._cold, self._warm = (
            stack.enter_context(closing(load_llama(model, **options))) for _ in range(2)
        )
        self.keeper = stack.enter_context(attach(self._warm))
        self._max_tokens = max_tokens
        # Other families cannot be cut in the middle of what they hold.
        self._can_cut = self.keeper.stats()["family"] in ("attention", "swa")
        self._prompts: list[IntArray] = []
        self._plain = np.empty(0, np.int32)
        self._cold.eval(self._cold.tokenize(b"Neither of the two shall pay for going first."))

    def ask(self, title: str, messages: list[Message], report: Report) -> DemoRow:
        """Put one request to both and compare."""
        report("cold", 0, 0)
        self._cold.reset()
        with _watched(self._cold, report):
            cold = self._answer(self._cold, messages, report)
        report("warm", 0, 0)
        self.keeper.on_progress = lambda done, total: report("warm", done, total)
        warm = self._answer(self._warm, messages, report)
        reuse = self.keeper.last
        if reuse is None:
            raise LlamakeepError("the keeper did not see the request")
        n_prompt = reuse.reused_tokens + reuse.evaluated_tokens
        prompt = cold.tokens[:n_prompt]
        prefilled = max((common_prefix(prompt, known) for known in self._prompts), default=0)
        row = DemoRow(
            title=title,
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
        )
        self._prompts.append(prompt)
        self._plain = cold.tokens
        if row.identical:
            return row
        different = common_prefix(cold.tokens, warm.tokens)
        margin = self._margin(cold.tokens[:different], n_prompt)
        return replace(row, first_difference=different - n_prompt, margin=margin)

    def _answer(self, llm: Any, messages: list[Message], report: Report) -> _Answer:
        begin = time.perf_counter()
        first_ms, texts = 0.0, []
        try:
            for chunk in llm.create_chat_completion(
                messages=messages, max_tokens=self._max_tokens, temperature=0.0, stream=True
            ):
                if not first_ms:
                    first_ms = (time.perf_counter() - begin) * 1e3
                    report("answer", 0, 0)
                texts.append(chunk["choices"][0]["delta"].get("content") or "")
        except LlamakeepError:
            raise
        except Exception as error:  # a template or a tokenizer that the chats do not suit
            raise ModelError(f"{llm.model_path} cannot take the demo's chats: {error}") from error
        total_ms = (time.perf_counter() - begin) * 1e3
        tokens = llm.input_ids[: llm.n_tokens].astype(np.int32)
        return _Answer("".join(texts), first_ms, total_ms, tokens)

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


def run_demo(model: Path, *, quick: bool = False, on_step: OnStep | None = None) -> DemoResult:
    """Put the demo's requests to a model without a keeper and with one.

    Args:
        model: A GGUF file, loaded twice with the same settings.
        quick: Use a short log and short answers.
        on_step: Called when a request starts, after each evaluated batch, at the first token of
            each answer and when a request is done.

    Raises:
        ModelError: For a file that cannot be loaded, or a model that cannot hold the chats.

    Costs about a minute on two cores with the default model, and two contexts of 4,096 tokens.
    """
    from llamakeep.runtime.llama_cpp import usable_cores

    n_days, max_tokens = (4, 8) if quick else (N_DAYS, 32)
    n_threads = usable_cores()
    log, requests = write_log(n_days), story()
    rows: list[DemoRow] = []

    def reporter(index: int, title: str) -> Report:
        def report(phase: str, done: int, total: int) -> None:
            if on_step is not None:
                on_step(Step(index, len(requests), title, phase, done, total, tuple(rows)))

        return report

    with ExitStack() as stack:
        pair = _Pair(model, n_threads, max_tokens, stack)
        for index, request in enumerate(requests, 1):
            report = reporter(index, request.title)
            messages = messages_of(request, log, rows[0].answer if rows else "")
            rows.append(pair.ask(request.title, messages, report))
            report("done", 0, 0)
        stats = pair.keeper.stats()
    return DemoResult(
        model=str(model),
        n_threads=n_threads,
        answer_tokens=max_tokens,
        rows=tuple(rows),
        used_bytes=stats["used_bytes"],
        capacity_bytes=stats["capacity_bytes"],
    )
