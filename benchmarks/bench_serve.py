"""The engine and the server on SmolLM2: rates against bare loops, turns, workloads, a restart."""

from __future__ import annotations

import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import httpx
import llama_cpp
import numpy as np

from benchmarks.bench_states import random_tokens, smollm2
from benchmarks.harness import Result, benchmark
from llamakeep.engine import Engine, Failed, Finished, Piece, Request, Update
from llamakeep.runtime.llama_cpp import LlamaCppRuntime, usable_cores
from llamakeep.sampling import Sampling
from llamakeep.server.loading import load_engine
from llamakeep.server.settings import ServerSettings
from llamakeep.tokens import IntArray

T = TypeVar("T")

N_PROMPT = 128
N_ANSWER = 96
ROUNDS = 3
GREEDY = Sampling(temperature=0.0, ignore_eos=True)


def settings(**options: Any) -> ServerSettings:
    given: dict[str, Any] = {
        "model": smollm2(),
        "ctx_size": 8192,
        "parallel": 4,
        "batch_size": 512,
        "cache_ram_bytes": 8 << 30,
    }
    return ServerSettings(**(given | options))


class Heard:
    """When each token of one answer came."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self.ended = threading.Event()
        self.last: Update | None = None

    def __call__(self, update: Update) -> None:
        if isinstance(update, Piece):
            self.at.extend([time.perf_counter()] * len(update.tokens))
        elif isinstance(update, (Finished, Failed)):
            self.last = update
            self.ended.set()

    def wait(self) -> Finished:
        self.ended.wait()
        if not isinstance(self.last, Finished):
            raise RuntimeError(f"a request failed: {self.last}")
        return self.last


def ask(engine: Engine, prompts: Sequence[IntArray], n: int) -> list[Heard]:
    """Answer prompts together; return when their tokens came."""
    heard = [Heard() for _ in prompts]
    for prompt, one in zip(prompts, heard, strict=True):
        engine.submit(Request(prompt, n, GREEDY), one)
    for one in heard:
        one.wait()
    return heard


def rate(heard: Sequence[Heard]) -> float:
    """Return tokens per second while all answers ran."""
    begin = max(one.at[0] for one in heard)
    end = min(one.at[-1] for one in heard)
    return sum(sum(begin < at <= end for at in one.at) for one in heard) / (end - begin)


class Bare:
    """A loop of llama_decode and nothing else: what there is to be had."""

    def __init__(self, n_threads: int | None = None) -> None:
        self.runtime = LlamaCppRuntime.load(
            smollm2(), n_ctx=8192, n_seqs=4, n_batch=512, flash_attn="on", n_threads=n_threads
        )
        self._batch = llama_cpp.llama_batch_init(8, 0, 1)

    def rate(self, prompts: Sequence[IntArray], n: int) -> float:
        runtime, batch, ctx = self.runtime, self._batch, self.runtime._ctx
        runtime.clear_all()
        tokens = []
        for seq_id, prompt in enumerate(prompts):
            runtime.evaluate(seq_id, prompt)
            tokens.append(int(np.argmax(runtime.logits())))
        begin = time.perf_counter()
        for step in range(n):
            batch.n_tokens = len(prompts)
            for seq_id, token in enumerate(tokens):
                batch.token[seq_id] = token
                batch.pos[seq_id] = prompts[seq_id].size + step
                batch.n_seq_id[seq_id] = 1
                batch.seq_id[seq_id][0] = seq_id
                batch.logits[seq_id] = 1
            if llama_cpp.llama_decode(ctx, batch):
                raise RuntimeError("llama_decode failed")
            for seq_id in range(len(prompts)):
                logits = llama_cpp.llama_get_logits_ith(ctx, seq_id)
                row = np.ctypeslib.as_array(logits, (runtime.n_vocab,))
                tokens[seq_id] = int(np.argmax(row))
        return n * len(prompts) / (time.perf_counter() - begin)

    def close(self) -> None:
        llama_cpp.llama_batch_free(self._batch)
        self.runtime.close()


def best_ratio(ours: Callable[[], float], theirs: Callable[[], float]) -> tuple[float, list[Any]]:
    """Return the median of ratios that were measured in turn, and all pairs."""
    pairs = [(ours(), theirs()) for _ in range(ROUNDS)]
    return statistics.median(mine / yours for mine, yours in pairs), pairs


def alone(run: Callable[[], T]) -> T:
    """Run something in a thread of its own: its OpenMP threads end with it, and slow nobody."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


def bare_rate(prompts: Sequence[IntArray], n_threads: int | None = None) -> float:
    def run() -> float:
        bare = Bare(n_threads)
        try:
            bare.rate(prompts, 4)
            return bare.rate(prompts, N_ANSWER)
        finally:
            bare.close()

    return alone(run)


def engine_rate(prompts: Sequence[IntArray], idle: Sequence[IntArray] = ()) -> float:
    engine = load_engine(settings())
    try:
        ask(engine, prompts, 4)
        if idle:
            ask(engine, idle, 2)
        return rate(ask(engine, prompts, N_ANSWER))
    finally:
        engine.close()


@benchmark("serve-rate")
def serve_rate() -> Iterator[Result]:
    """Tokens per second of the engine, one stream and four, against bare loops."""
    prompts = [random_tokens(N_PROMPT, 40_000, seed) for seed in range(4)]
    for n in (1, 4):
        ratio, pairs = best_ratio(
            lambda n=n: engine_rate(prompts[:n]), lambda n=n: bare_rate(prompts[:n])
        )
        yield Result(
            name=f"serve-engine-{n} stream{'s' * (n > 1)} against bare llama_decode",
            value=ratio,
            unit="x",
            target=0.95,
            better="higher",
            detail={"pairs": pairs},
        )
    # Three slots that are idle, and hold 1,500 tokens each, beside one that answers.
    idle = [random_tokens(1500, 40_000, 10 + seed) for seed in range(3)]
    ratio, pairs = best_ratio(
        lambda: engine_rate(prompts[:1], idle), lambda: engine_rate(prompts[:1])
    )
    yield Result(
        name="serve-engine-one active beside three idle against alone",
        value=ratio,
        unit="x",
        target=0.95,
        better="higher",
        detail={"pairs": pairs},
    )


@benchmark("serve-turn")
def serve_turn() -> Iterator[Result]:
    """Time to the first token of a second turn, against evaluating just its new tokens."""
    bare = Bare()
    engine = load_engine(settings(parallel=1))
    n_vocab = bare.runtime.n_vocab
    pairs = []
    try:
        for seed in range(ROUNDS):
            prompt, new = random_tokens(1200, n_vocab, seed), random_tokens(120, n_vocab, 50 + seed)
            first = Heard()
            engine.submit(Request(prompt, 1, GREEDY), first)
            first.wait()
            if seed % 2:  # every other time another conversation came between
                ask(engine, [random_tokens(1200, n_vocab, 90 + seed)], 1)
            second, begin = Heard(), time.perf_counter()
            engine.submit(Request(np.concatenate((prompt, new)), 1, GREEDY), second)
            second.wait()
            ours = second.at[0] - begin
            bare.runtime.clear_all()
            bare.runtime.evaluate(0, prompt)
            begin = time.perf_counter()
            bare.runtime.evaluate(0, new)
            pairs.append((ours, time.perf_counter() - begin))
    finally:
        engine.close()
        bare.close()
    yield Result(
        name="serve-second turn against evaluating its new tokens",
        value=statistics.median(ours / theirs for ours, theirs in pairs),
        unit="x",
        target=1.3,
        better="lower",
        detail={"pairs": pairs},
    )


def workload(n_talks: int, n_turns: int, order: str, seed: int) -> tuple[list[IntArray], int]:
    """Return prompts of talks that share a system prompt of 600 tokens, and their unique tokens.

    Each turn adds 45 to 135 tokens. `rr` goes round, `zipf` prefers the first talks.
    """
    random = Random(seed)
    system = [random.randrange(200, 49_000) for _ in range(600)]
    talks = [list(system) for _ in range(n_talks)]
    turns, prompts = [0] * n_talks, []
    while len(prompts) < n_talks * n_turns:
        which = len(prompts) % n_talks
        if order == "zipf":
            live = [number for number in range(n_talks) if turns[number] < n_turns]
            which = random.choices(live, [1 / (number + 1) for number in live])[0]
        more = int(90 * random.uniform(0.5, 1.5))
        talks[which] += [random.randrange(200, 49_000) for _ in range(more)]
        turns[which] += 1
        prompts.append(np.array(talks[which], np.int32))
    return prompts, 600 + sum(len(talk) - 600 for talk in talks)


@benchmark("serve-workload")
def serve_workload() -> Iterator[Result]:
    """Tokens evaluated of talks that take turns in one slot, against those that are unique."""
    for name, n_talks, order in (("6 talks", 6, "rr"), ("8 talks, zipf", 8, "zipf")):
        prompts, unique = workload(n_talks, 5, order, 1)
        with tempfile.TemporaryDirectory() as place:
            engine = load_engine(settings(parallel=1, cache_dir=Path(place)))
            try:
                evaluated = sum(one_alone(engine, prompt).timings.prompt_n for prompt in prompts)
            finally:
                engine.close(flush_s=60)
            yield Result(
                name=f"serve-workload-{name}",
                value=evaluated / unique,
                unit="x unique",
                target=1.05,
                better="lower",
                detail={"evaluated": evaluated, "unique": unique, "requests": len(prompts)},
            )
            engine = load_engine(settings(parallel=1, cache_dir=Path(place)))
            try:
                again = [one_alone(engine, prompt).timings.prompt_n for prompt in prompts]
            finally:
                engine.close()
        yield Result(
            name=f"serve-workload-{name}, after a restart",
            value=max(again),
            unit="tokens at most",
            target=9,
            better="lower",
            detail={"evaluated": again},
        )


def one_alone(engine: Engine, prompt: IntArray) -> Finished:
    heard = Heard()
    engine.submit(Request(prompt, 1, GREEDY), heard)
    return heard.wait()


@contextmanager
def server(n_threads: int) -> Iterator[tuple[str, Any]]:
    """Start `llamakeep serve` on a free port; yields its URL."""
    command = [sys.executable, "-m", "llamakeep", "serve", "-m", str(smollm2()), "--port", "0"]
    command += ["-c", "8192", "-np", "4", "-b", "512", "-t", str(n_threads), "--metrics"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            told = json.loads(line)
            if told.get("event") == "ready":
                drain = threading.Thread(target=process.stderr.read, daemon=True)
                drain.start()
                yield told["url"], process
                return
        raise RuntimeError("the server did not start")
    finally:
        process.terminate()
        process.wait(30)


def stream_rate(url: str, prompts: Sequence[IntArray], n: int) -> float:
    """Return tokens per second of answers that are streamed together over HTTP."""
    at: list[list[float]] = [[] for _ in prompts]

    def read(number: int) -> None:
        body = {
            "prompt": prompts[number].tolist(),
            "n_predict": n,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        with httpx.stream("POST", f"{url}/completion", json=body, timeout=600) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: ") and '"stop":false' in line.replace(" ", ""):
                    at[number].append(time.perf_counter())

    threads = [threading.Thread(target=read, args=(number,)) for number in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    begin, end = max(each[0] for each in at), min(each[-1] for each in at)
    return sum(sum(begin < each <= end for each in one) for one in at) / (end - begin)


@benchmark("serve-http")
def serve_http() -> Iterator[Result]:
    """The same rates over HTTP, with one thread less than cores on both sides; what HTTP adds."""
    n_threads = max(1, usable_cores() - 1)
    prompts = [random_tokens(N_PROMPT, 40_000, seed) for seed in range(4)]
    with server(n_threads) as (url, _):
        for n in (1, 4):
            ratio, pairs = best_ratio(
                lambda n=n: stream_rate(url, prompts[:n], N_ANSWER),
                lambda n=n: bare_rate(prompts[:n], n_threads),
            )
            yield Result(
                name=f"serve-http-{n} stream{'s' * (n > 1)} against bare llama_decode",
                value=ratio,
                unit="x",
                target=0.95,
                better="higher",
                detail={"pairs": pairs, "threads": n_threads},
            )
        yield what_http_adds(url, prompts[0], n_threads)


def what_http_adds(url: str, prompt: IntArray, n_threads: int) -> Result:
    """Return how much longer a request takes over HTTP than at the engine's interface, median.

    What the model takes, as the answer itself tells it, is left out of both.
    """
    client = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    body = {"prompt": prompt.tolist(), "n_predict": 1, "temperature": 0, "ignore_eos": True}
    over_http, at_engine = [], []

    def asked_over_http() -> float:
        begin = time.perf_counter()
        client.request("POST", "/completion", json.dumps(body))
        timings = json.loads(client.getresponse().read())["timings"]
        ms = (time.perf_counter() - begin) * 1e3
        return ms - timings["prompt_ms"] - timings["predicted_ms"]

    def asked_at_engine(engine: Engine) -> float:
        begin = time.perf_counter()
        timings = one_alone(engine, prompt).timings
        ms = (time.perf_counter() - begin) * 1e3
        return ms - timings.prompt_ms - timings.predicted_ms

    with load_engine(settings(threads=n_threads)) as engine:
        for _ in range(100):  # in turn: both see the same machine
            over_http.append(asked_over_http())
            at_engine.append(asked_at_engine(engine))
    client.close()
    return Result(
        name="serve-http-what it adds to a request, median",
        value=statistics.median(over_http) - statistics.median(at_engine),
        unit="ms",
        target=1.5,
        better="lower",
        detail={"http_ms": over_http, "engine_ms": at_engine},
    )
