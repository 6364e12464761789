"""What it costs an answer that somebody looks at the dashboard: bare clients, SmolLM2."""

from __future__ import annotations

import http.client
import itertools
import statistics
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from benchmarks.bench_serve import server
from benchmarks.bench_states import random_tokens
from benchmarks.harness import Result, benchmark
from llamakeep.runtime.llama_cpp import usable_cores

N_KEPT = 50
N_PROMPT = 128
N_ANSWER = 256
ROUNDS = 11


def decode_rate(url: str, seed: int) -> float:
    """Return tokens per second of one answer, as the server measures it."""
    body = {
        "prompt": random_tokens(N_PROMPT, 40_000, seed).tolist(),
        "n_predict": N_ANSWER,
        "temperature": 0,
        "ignore_eos": True,
    }
    answer = httpx.post(f"{url}/completion", json=body, timeout=600).json()
    rate: float = answer["timings"]["predicted_per_second"]
    return rate


@contextmanager
def polling(url: str, n_clients: int) -> Iterator[list[int]]:
    """Let clients ask once a second each, one after the other; the value counts their answers."""
    address = url.removeprefix("http://")
    clients = [http.client.HTTPConnection(address, timeout=60) for _ in range(n_clients)]
    tags = [""] * n_clients
    done, statuses = threading.Event(), list[int]()

    def poll() -> None:
        for n in itertools.cycle(range(n_clients)):
            if done.wait(1.0 / n_clients):
                return
            clients[n].request("GET", "/dashboard/data", headers={"If-None-Match": tags[n]})
            answer = clients[n].getresponse()
            answer.read()
            tags[n] = answer.headers["ETag"]
            statuses.append(answer.status)

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        yield statuses
    finally:
        done.set()
        thread.join()
        for client in clients:
            client.close()


@benchmark("serve-dashboard")
def serve_dashboard() -> Iterator[Result]:
    """Tokens per second with the dashboard's data asked for once a second, against without."""
    n_threads = max(1, usable_cores() - 1)
    with server(n_threads) as (url, _):
        for seed in range(N_KEPT):  # what there is to show is as much as is ever shown
            body = {"prompt": random_tokens(N_PROMPT, 40_000, 100 + seed).tolist(), "n_predict": 1}
            httpx.post(f"{url}/completion", json=body, timeout=600).raise_for_status()
        decode_rate(url, 0)
        for n_clients in (1, 10):
            pairs, n_answers = [], 0
            for seed in range(ROUNDS):
                with polling(url, n_clients) as statuses:
                    ours = decode_rate(url, seed)
                if set(statuses) - {200, 304}:
                    raise RuntimeError(f"a client was answered with {set(statuses)}")
                n_answers += len(statuses)
                pairs.append((ours, decode_rate(url, seed)))
            plural = "s" if n_clients > 1 else ""
            yield Result(
                name=f"serve-dashboard-{n_clients} client{plural} against none",
                value=statistics.median(ours / theirs for ours, theirs in pairs),
                unit="x",
                target=0.98,
                better="higher",
                detail={"pairs": pairs, "threads": n_threads, "answers": n_answers},
            )
