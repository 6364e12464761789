"""A server as `llamakeep serve` makes it, what a cold model answers, and clients of all kinds."""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import random
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any, cast

import httpx
import numpy as np

from llamakeep.chat_template import ChatTemplate, token_starts
from llamakeep.engine import Engine, Record
from llamakeep.runtime.llama_cpp import LlamaCppRuntime
from llamakeep.server import run
from llamakeep.server.listening import bind
from llamakeep.server.service import Service, load_service
from llamakeep.server.settings import ServerSettings
from llamakeep.tokens import IntArray
from tests.engine_tools import Ends

PATIENCE_S = 60.0
"""For what must happen: longer than any busy machine takes, so that only a fault runs into it."""
DRAIN_S = 2.0
STALL_S = 1.0
"""How long a client may take nothing: the least that the server can be told."""
MAX_BODY_BYTES = 1 << 16
N_CTX = 16384
"""So much that no answer without a limit comes to its end by itself."""

NATIVE, TEXT, CHAT = "/completion", "/v1/completions", "/v1/chat/completions"
_WORDS = ("light", "house", "keeper", "stone", "water", "north", "wind", "ship", "rope", "key")
GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}


# -- the server ------------------------------------------------------------------------------------
class _Run(run._Run):
    """A run outside of the main thread, which alone hears signals: `end` does what they do."""

    @contextlib.contextmanager
    def _hearing_signals(self) -> Iterator[None]:
        self._loop = asyncio.get_running_loop()
        yield

    def end(self) -> None:
        self._told.set()
        self._loop.call_soon_threadsafe(self._begin_to_end)


class LiveServer:
    """A server on a loopback port. `end` it, whatever happens.

    Args:
        model: A GGUF file.
        **options: Of `ServerSettings`; without any, one for small models on few cores, whose
            answers are those of a cold model.

    Attributes:
        engine: What answers.
        url: Where it answers.
        records: What became of each request, as the engine tells it.
    """

    def __init__(self, model: Path, **options: Any) -> None:
        given: dict[str, Any] = {
            "ctx_size": N_CTX,
            "parallel": 4,
            "batch_size": 128,
            "ubatch_size": 128,
            "flash_attn": "off",
            "threads": 1,
            "cache_ram_bytes": 1 << 28,
            "port": 0,
            "timeout_s": STALL_S,
            "drain_s": DRAIN_S,
            "max_body_bytes": MAX_BODY_BYTES,
        }
        settings = ServerSettings(model=model, **(given | options))
        self.records: list[Record] = []
        self._ends: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.url = ""
        self._sock = bind(settings.host[0], settings.port)
        self._run = _Run(settings, [self._sock], load_service, lambda _: None, self._up)
        self._ready = threading.Event()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        assert self._ready.wait(PATIENCE_S), "the server did not start"
        self._raise()

    def _serve(self) -> None:
        try:
            asyncio.run(self._run.run())
        except BaseException as error:  # noqa: BLE001 - raised in the thread that waits
            self._failed = error
        finally:
            self._sock.close()
            self._ready.set()

    def _up(self, service: Service, url: str) -> None:
        self.engine = cast(Engine, cast(MethodType, service.close).__self__)
        self.engine.observers.add(Ends(self._ended))
        self.url = url
        self._ready.set()

    def _raise(self) -> None:
        if self._failed is not None:
            raise self._failed

    def client(self) -> httpx.Client:
        """Return a client with one connection."""
        limits = httpx.Limits(max_connections=1)
        return httpx.Client(base_url=self.url, timeout=PATIENCE_S, limits=limits)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep the engine from doing anything, until the block ends."""
        held, gate = threading.Event(), threading.Event()

        def hold() -> None:
            held.set()
            gate.wait(PATIENCE_S)

        thread = threading.Thread(target=self.engine.call, args=(hold,), daemon=True)
        thread.start()
        assert held.wait(PATIENCE_S)
        try:
            yield
        finally:
            gate.set()
            thread.join(PATIENCE_S)

    def wait_until_idle(self) -> None:
        """Wait until nobody is answered and nobody waits for a slot."""
        while self.engine.call(self._n_open):
            self._ends.get(timeout=PATIENCE_S)

    def _n_open(self) -> int:
        stats = self.engine.stats()
        return int(stats["waiting"] + stats["slots_busy"])

    def _ended(self, record: Record) -> None:
        self.records.append(record)
        self._ends.put(None)

    def begin_to_end(self) -> None:
        """Do what a signal does."""
        self._run.end()

    def end(self) -> None:
        """End it as a signal does, and wait for it."""
        if self._thread.is_alive():
            self.begin_to_end()
        self._thread.join(DRAIN_S + PATIENCE_S)
        assert not self._thread.is_alive(), "the server did not end"
        self._raise()


@contextlib.contextmanager
def live(model: Path, **options: Any) -> Iterator[LiveServer]:
    """A server that proves its counts at the end, and then ends."""
    server = LiveServer(model, **options)
    try:
        yield server
        server.engine.check()
    finally:
        server.end()


# -- what is right ---------------------------------------------------------------------------------
@dataclass(frozen=True)
class Question:
    """A request whose answer is known.

    Attributes:
        path: Where to.
        body: What is sent.
        text: What a cold model answers.
    """

    path: str
    body: dict[str, Any]
    text: str


class Close(Exception):
    """Two tokens are so likely that rounding decides between them: no question to ask."""


class ColdModel:
    """Answers of a model that sees one prompt at a time, and nothing before it."""

    MARGIN = 2e-3
    """Logits of one prompt differ by less than 1e-3 between shapes of batches."""

    def __init__(self, model: Path) -> None:
        self.runtime = LlamaCppRuntime.load(
            model, n_ctx=2048, n_batch=128, n_ubatch=128, n_threads=1, swa_full=False
        )
        vocab = self.vocab = self.runtime.vocab
        self._ends = np.array([vocab.is_end(token) for token in range(vocab.n_vocab)])
        bos, eos = ("" if each is None else vocab.text([each]) for each in (vocab.bos, vocab.eos))
        self._template = ChatTemplate(
            vocab.chat_template or "", bos_token=bos, eos_token=eos, add_bos=vocab.adds_bos
        )

    def answer(self, prompt: IntArray, n: int) -> str:
        """Return the text of the `n` likeliest tokens.

        Raises:
            Close: Where that hangs on rounding.
        """
        self.runtime.clear(0)
        self.runtime.evaluate(0, prompt)
        pieces: list[bytes] = []
        while True:
            logits = self.runtime.logits()
            logits[self._ends] = -np.inf
            second, first = np.partition(logits, -2)[-2:]
            if first - second < self.MARGIN:
                raise Close
            token = int(np.argmax(logits))
            pieces.append(self.vocab.piece(token))
            if len(pieces) == n:
                return b"".join(pieces).decode("utf-8", "replace")
            self.runtime.evaluate(0, np.array([token], np.int32))

    def completion(self, path: str, prompt: str | list[int], n: int) -> Question:
        """Return a question to one of the two endpoints for prompts."""
        tokens = np.array(prompt, np.int32) if isinstance(prompt, list) else self._tokens(prompt)
        body = {"prompt": prompt, "max_tokens": n, **GREEDY}
        return Question(path, body, self.answer(tokens, n))

    def chat(self, messages: Sequence[dict[str, str]], n: int) -> Question:
        """Return a question that continues a conversation."""
        text = self._template.render_chat(messages).text
        tokens, _ = token_starts(text, (), self.vocab.tokenize)
        body = {"messages": list(messages), "max_tokens": n, **GREEDY}
        return Question(CHAT, body, self.answer(tokens, n))

    def talk(self, first: str, more: Sequence[str], n: int) -> list[Question]:
        """Return one question for each turn of a conversation whose answers are the model's."""
        messages = [{"role": "system", "content": first}]
        turns: list[Question] = []
        for says in more:
            messages = [*messages, {"role": "user", "content": says}]
            turns.append(self.chat(messages, n))
            messages = [*messages, {"role": "assistant", "content": turns[-1].text}]
        return turns

    def _tokens(self, text: str) -> IntArray:
        return self.vocab.tokenize(text, add_special=True, parse_special=True)

    def close(self) -> None:
        """Free the model."""
        self.runtime.close()


def words(rng: random.Random, n: int) -> str:
    """Return a text of `n` words."""
    return " ".join(rng.choice(_WORDS) for _ in range(n))


def chosen(make: Callable[[], Any], n: int) -> list[Any]:
    """Return `n` of what `make` returns, without those that hang on rounding."""
    made: list[Any] = []
    while len(made) < n:
        with contextlib.suppress(Close):
            made.append(make())
    return made


# -- clients ---------------------------------------------------------------------------------------
def text_of(answer: dict[str, Any]) -> str:
    """Return the text of a whole answer, or of one event, of any of the endpoints."""
    if "content" in answer:
        return str(answer["content"])
    return "".join(
        choice["text"]
        if "text" in choice
        else (choice.get("message") or choice["delta"]).get("content") or ""
        for choice in answer["choices"]
    )


def ask_whole(client: httpx.Client, question: Question, **more: Any) -> str:
    """Return the text of an answer that comes whole."""
    response = client.post(question.path, json=question.body | more)
    assert response.status_code == 200, response.text
    return text_of(response.json())


def ask_streamed(client: httpx.Client, question: Question, **more: Any) -> str:
    """Return the text of a streamed answer, which says that it is complete."""
    body = question.body | {"stream": True} | more
    with client.stream("POST", question.path, json=body) as response:
        assert response.status_code == 200, response.read()
        data = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
    if question.path != NATIVE:
        assert data.pop() == "[DONE]"
    events = [json.loads(each) for each in data]
    last = events[-1]
    assert last["stop"] if question.path == NATIVE else last["choices"][0]["finish_reason"]
    return "".join(map(text_of, events))


def hang_up(client: httpx.Client, question: Question, n_lines: int, **more: Any) -> None:
    """Read some lines of a long answer, and close the connection."""
    body = question.body | {"stream": True, "max_tokens": -1} | more
    with client.stream("POST", question.path, json=body) as response:
        assert response.status_code == 200, response.read()
        lines = response.iter_lines()
        for _ in range(n_lines):
            next(lines)


def connect(url: str, path: str, body: dict[str, Any], *, rcvbuf: int = 0) -> socket.socket:
    """Send a request over a socket of its own; the answer is there to be read."""
    host, port = url.removeprefix("http://").rstrip("/").split(":")
    sock = socket.socket()
    try:
        if rcvbuf:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rcvbuf)
        sock.settimeout(PATIENCE_S)
        sock.connect((host, int(port)))
        data = json.dumps(body).encode()
        sock.sendall(
            f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n".encode()
            + data
        )
    except BaseException:
        sock.close()
        raise
    return sock


def stop_reading(url: str, prompt: Any, **more: Any) -> socket.socket:
    """Ask for more than any buffer holds, see that it comes, and read no more."""
    body = {"prompt": prompt, "n_predict": -1, "n_probs": 100, "stream": True, **GREEDY}
    sock = connect(url, NATIVE, body | more, rcvbuf=4096)
    try:
        if (begins := sock.recv(12)) != b"HTTP/1.1 200":
            raise ConnectionError(f"no answer begins: {begins!r}")
    except BaseException:
        sock.close()
        raise
    return sock
