"""`llamakeep serve`: what it takes, what it says, how it fails, and how it runs and ends."""

from __future__ import annotations

import asyncio
import http.client
import inspect
import io
import json
import logging
import queue
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import httpx
import pytest
import typer
from typer.testing import CliRunner

from llamakeep.cli import app
from llamakeep.cli import serve as command
from llamakeep.engine import Request
from llamakeep.errors import InvalidValue, QueueFull
from llamakeep.server import logs, refused, run
from llamakeep.server.accepted import ACCEPTED
from llamakeep.server.context import NEVER_S
from llamakeep.server.listening import base_url, bind, bind_all
from llamakeep.server.loading import load_engine
from llamakeep.server.metrics import OTHER, endpoint_of
from llamakeep.server.service import Service, capacities_of, load_service, options_of
from llamakeep.server.settings import OPTIONS
from llamakeep.server.sources import resolve
from llamakeep.tokens import as_tokens
from tests.engine_tools import engine_of

PATIENCE_S = 60.0

COMMAND: Any = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]


@pytest.fixture
def runner() -> CliRunner:
    return CliRunner()


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 0))  # no tensors, and nothing of itself
    return str(path)


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


# -- options -----------------------------------------------------------------------------------


def test_the_flags_are_those_of_the_table() -> None:
    ours = {"config", "check", "json"}
    taken = {each.name: set(each.opts) | set(each.secondary_opts) for each in COMMAND.params}
    assert set(taken) == (
        {each.name for each in OPTIONS if each.flags} | {each.name for each in ACCEPTED} | ours
    )
    for option in OPTIONS:
        if option.flags:
            flags = {flag for part in option.flags for flag in part.split("/")}
            assert flags <= taken[option.name]


def test_every_default_is_left_to_the_table() -> None:
    parameters = inspect.signature(command.serve).parameters
    assert all(parameters[each.name].default is None for each in OPTIONS if each.flags)


def test_help_has_a_section_for_each_subject_and_examples(runner: CliRunner) -> None:
    shown = runner.invoke(app, ["serve", "--help"], terminal_width=100).stdout
    headings = re.findall(r"^(\w.*):$", shown, re.MULTILINE)
    assert headings == [*dict.fromkeys(each.section for each in OPTIONS), "Options"]
    assert "  llamakeep serve -m model.gguf\n" in shown
    assert "curl http://127.0.0.1:8080/v1/chat/completions" in shown
    words = " ".join(shown.split())
    for part in ("[default: 8080]", "[default: 1]", "[default: 16.0 MiB]", "[default: on]"):
        assert part in words


def test_flags_of_llama_server_are_understood(runner: CliRunner, model: str) -> None:
    line = (
        f"serve -m {model} -c 4096 -np 4 -b 64 -ub 32 -ngl all -fa off -ctk q8_0 -ctv f16 -t 3 "
        "-tb 2 --cache-ram 100 --no-cache-idle-slots --port 0 -n 7 "
        "--api-key k --api-key j --no-slots --check --json --no-mmap --mlock --swa-full --temp 0.5 "
        "--top-k 3 --top-p 0.4 --min-p 0.2 -s 7 --repeat-penalty 1.2 --typical-p 0.9 "
        "--repeat-last-n 32 --presence-penalty 0.1 --frequency-penalty 0.2 --ignore-eos "
        "--alias fim,code --tags small -kvu --cors-origins localhost --sse-ping-interval -1 "
        '--no-cache-prompt --no-prefill-assistant --chat-template-kwargs {"a":1}'
    )
    result = runner.invoke(app, line.split())
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    expected = {
        "ctx_size": 4096,
        "parallel": 4,
        "batch_size": 64,
        "ubatch_size": 32,
        "gpu_layers": -1,
        "flash_attn": "off",
        "cache_type_k": "q8_0",
        "threads": 3,
        "threads_batch": 2,
        "cache_ram_bytes": 100 << 20,
        "cache_idle_slots": False,
        "predict": 7,
        "api_key": "***",
        "slots": False,
        "mmap": False,
        "mlock": True,
        "swa_full": True,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.4,
        "min_p": 0.2,
        "seed": 7,
        "repeat_penalty": 1.2,
        "typical_p": 0.9,
        "repeat_last_n": 32,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "ignore_eos": True,
        "alias": ["fim", "code"],
        "tags": ["small"],
        "cors": ["localhost"],
        "ping_s": None,
        "cache_prompt": False,
        "prefill_assistant": False,
        "chat_template_kwargs": {"a": 1},
    }
    assert {name: shown[name] for name in expected} == expected
    assert shown["sources"]["slots"] == "--no-slots"


def test_flags_of_llama_server_that_change_nothing_are_taken(
    runner: CliRunner, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMAKEEP_CTX_SIZ", "1")
    line = (
        "--jinja --no-ui -cb --cache-reuse 256 --no-context-shift --log-disable -v -lv 3 "
        "--log-colors on --log-prefix --no-log-timestamps --no-warmup --no-perf --offline "
        "--no-mmproj --threads-http 4 -fit off --check"
    )
    result = runner.invoke(app, ["serve", "-m", model, "--port", "0", *line.split()])
    assert result.exit_code == 0, result.output
    first, *accepted, _ = result.stderr.splitlines()
    assert first.startswith("llamakeep: LLAMAKEEP_CTX_SIZ is not known")
    assert len(accepted) == len(ACCEPTED)
    assert all(re.match(r"llamakeep: --[a-z-]+ changes nothing: ", line) for line in accepted)


def test_what_is_refused_is_no_option_and_the_value_of_one_is_not_refused(
    runner: CliRunner, model: str
) -> None:
    taken = {flag for each in COMMAND.params for flag in (*each.opts, *each.secondary_opts)}
    assert len(refused.WHY) > 150
    assert set(refused.WHY) & taken == set()
    assert all(refused.why(flag) == why for flag, why in refused.WHY.items())
    assert refused.why("--nonsense") is None
    asked = ["serve", "-m", model, "--alias", "-md", "--port", "0", "--check"]
    assert runner.invoke(app, asked).exit_code == 0


def test_what_a_server_was_given_is_logged(
    runner: CliRunner, model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(run, "serve", lambda *_, **__: True)
    monkeypatch.setattr(logs, "configure", lambda **_: None)
    runner.invoke(app, ["serve", "-m", model, "--jinja", "--port", "0"])
    assert "--jinja changes nothing: chat templates are always read as Jinja" in caplog.messages


def test_json_shows_no_secret(
    runner: CliRunner, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMAKEEP_SECRET", "nobody-sees-this")
    monkeypatch.setenv("LLAMAKEEP_REDIS_URL", "redis://u:nobody-sees-this@h")
    result = runner.invoke(app, ["serve", "-m", model, "--port", "0", "--check", "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["secret"] == "***"
    assert "nobody-sees-this" not in result.output


def test_a_file_is_read(runner: CliRunner, model: str, tmp_path: Path) -> None:
    path = tmp_path / "serve.toml"
    path.write_text(f'model = "{model}"\nport = 0\nparallel = 3\n')
    result = runner.invoke(app, ["serve", "--config", str(path), "--check", "--json"])
    assert json.loads(result.stdout)["parallel"] == 3


# -- one clear line ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("", "no model: say which GGUF file with --model FILE (-m)"),
        ("-m nothing.gguf", "/nothing.gguf does not exist"),
        ("-m MODEL --port 99999", "--port must be between 0 and 65535, not 99999"),
        ("-m MODEL -c 100 -np 2", "--ctx-size: a context of 100 tokens is too small for 2 slots"),
        ("-m MODEL --chat-template-file nothing.jinja", "/nothing.jinja: No such file"),
        ("-m MODEL --no-kv-unified", "--no-kv-unified is refused"),
        ("-m MODEL --config nothing.toml", "cannot read nothing.toml"),
        ("-m MODEL --host a.sock", "--host must be an address or a name: 'a.sock' would be a UNIX"),
        ("-m MODEL --host 127.0.0.1,::1 --port 0", "--port: several addresses need a port"),
        ("-m MODEL --host no.such.host.invalid", "--host 'no.such.host.invalid'"),
        ("-m MODEL --port TAKEN", "is taken: another program listens there"),
        ("-m MODEL --nonsense 3", "No such option: --nonsense"),
        ("-m MODEL extra", "unexpected extra argument"),
        ("-m MODEL --mlock=x", "does not take a value"),
        ("-m PYTHON", "is not a GGUF file that can be read"),
        ("-m MODEL --lora PYTHON", "is not a GGUF file that can be read"),
        ("-m MODEL --redis-url redis://h", "--redis-url: a server that others use needs a secret"),
        ("-m MODEL --redis-url h --secret x", "h is no URL of a Redis server"),
        ("-m MODEL --redis-prefix a:b", "--redis-prefix: prefix must be 1 to 64 letters"),
        ("-m MODEL --cache off --cache-dir kept", "--cache off keeps nothing outside"),
        ("-m MODEL --cache prompt --cache-dir kept", "--cache prompt keeps nothing outside"),
        ("-m MODEL --disk-bytes 1GiB", "--disk-bytes: it limits the directory of --cache-dir"),
        ("-m MODEL --chat-template {%if%}", "--chat-template: "),
        ("-m MODEL --chat-template-kwargs {", "--chat-template-kwargs must be a JSON object"),
        ("-m MODEL --load-mode mmap --no-mmap", "are two ways to say one thing"),
        ("-m MODEL --context-shift", "--context-shift is refused: a context is never shifted"),
        ("-m MODEL -md draft.gguf", "-md is refused: answers are not drafted"),
        ("-m MODEL -nocb", "-nocb is refused: requests always share batches"),
        ("-m MODEL --spec-type=draft-mtp", "--spec-type is refused: answers are not drafted"),
        ("-m MODEL --embedding --port 1x", "--embedding is refused: embeddings and rankings"),
        ("-hf user/model", "-hf is refused: nothing is downloaded"),
        ("-m MODEL --chat-template llama3", "'llama3' is no template; the built-in one is chatml"),
        ("-m MODEL --chat-template-file PYTHON", "--chat-template-file: "),
        ("-m MODEL --cache-dir PYTHON/kept", "is no directory"),
        ("-m MODEL --cache-dir PYTHON", "is no directory"),
        ("-m MODEL --cache-dir OTHERS", "is no cache of states: it holds 'm.gguf'"),
    ],
)
def test_what_is_wrong_is_one_line_and_exit_code_2(
    runner: CliRunner, model: str, taken_port: int, flags: str, says: str
) -> None:
    words = flags.replace("MODEL", model).replace("TAKEN", str(taken_port)).split()
    others = {"PYTHON": __file__, "OTHERS": str(Path(model).parent)}
    words = [re.sub("PYTHON|OTHERS", lambda name: others[name[0]], word) for word in words]
    result = runner.invoke(app, ["serve", *words, "--check"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("llamakeep: ")
    assert says in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_check_makes_nothing(runner: CliRunner, model: str, tmp_path: Path) -> None:
    kept = tmp_path / "a" / "b"
    words = ["-m", model, "--cache-dir", str(kept), "--disk-bytes", "1GiB", "--port", "0"]
    words += ["--redis-url", "redis://127.0.0.1:1", "--allow-unauthenticated"]
    result = runner.invoke(app, ["serve", *words, "--check"])
    assert result.exit_code == 0, result.output
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_without_the_packages_the_line_says_what_to_install(
    runner: CliRunner, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "llamakeep.server.run")
    monkeypatch.delattr("llamakeep.server.run")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    result = runner.invoke(app, ["serve", "-m", model, "--check"])
    assert result.exit_code == 2
    assert "pip install 'llamakeep[server]' (uvicorn is missing)" in result.stderr


# -- the port ----------------------------------------------------------------------------------


def test_a_port_is_held_from_the_start() -> None:
    with bind("127.0.0.1", 0) as held:
        port = held.getsockname()[1]
        with pytest.raises(InvalidValue, match=rf"port {port} of 127\.0\.0\.1 is taken"):
            bind("127.0.0.1", port)
    bind("127.0.0.1", port).close()


def has_ipv6() -> bool:
    """Whether this machine has an address of its own in IPv6."""
    try:
        bind("::1", 0).close()
    except InvalidValue:
        return False
    return True


def test_where_one_of_several_addresses_cannot_be_had_none_is() -> None:
    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    with pytest.raises(InvalidValue, match=r"192\.0\.2\.1"):
        bind_all(("127.0.0.1", "192.0.2.1"), port)
    bind("127.0.0.1", port).close()


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_all_addresses_of_ipv6_are_no_other_ones_where_there_are_several() -> None:
    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    for sock in bind_all(("0.0.0.0", "::"), port):
        sock.close()


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(InvalidValue, match=r"cannot listen on port 0 of 192\.0\.2\.1"):
        bind("192.0.2.1", 0)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:1"),
        ("0.0.0.0", "http://127.0.0.1:1"),
        ("::", "http://[::1]:1"),
        ("a.example", "http://a.example:1"),
    ],
)
def test_where_this_machine_finds_the_server(host: str, url: str) -> None:
    assert base_url(host, 1) == url


# -- running: a process with a small application of its own ------------------------------------

PROGRAM = """
import asyncio, contextlib, sys, threading
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route
from llamakeep.cli import serve as command
from llamakeep.server import listening, logs, run
from llamakeep.server.service import Service
from llamakeep.server.sources import resolve

def say(word):
    print(word, flush=True)

def told():
    return sys.stdin.readline().strip()

def bind(host, port, bind=listening.bind, **options):
    sock = bind(host, port, **options)
    say(f"port {sock.getsockname()[1]}")
    return sock

idle = threading.Event()
idle.set()

async def slow(request):
    async def body():
        idle.clear()
        yield "first "
        try:
            await asyncio.get_running_loop().run_in_executor(None, told)
        except asyncio.CancelledError:
            say("cancelled")
            raise
        finally:
            idle.set()
        yield "last"
    return StreamingResponse(body())

async def mute(request):
    say("asked")
    await asyncio.get_running_loop().run_in_executor(None, told)

def close(drain_s):
    idle.wait(drain_s)
    say("closed")

@contextlib.asynccontextmanager
async def lifespan(app):
    say("up")
    yield
    say("down")

def load(settings, on_progress):
    how = sys.argv[1]
    if how == "wait":
        told()
    elif how == "for ever":
        say("loading")
        while True:
            on_progress(0.5)
    elif how == "fail":
        from llamakeep.errors import ModelError
        raise ModelError("m.gguf is no model")
    routes = [Route("/slow", slow), Route("/quick", lambda request: PlainTextResponse("quick"))]
    routes.append(Route("/mute", mute))
    app = Starlette(routes=routes, lifespan=lifespan)
    tiers = {"ram": 1 << 30, "shared": None}
    return Service(app, close, model_name="tiny", n_slots=2, n_ctx=512, tiers=tiers)

def ready(service, url):
    say("ready")
    command.announce(settings, service, url)

listening.bind = bind
logs.configure()
flags = {"model": __file__, "port": sys.argv[3], "host": sys.argv[4], "drain_s": sys.argv[2]}
settings = resolve(flags, environment={})
try:
    run.serve(settings, load, on_ready=ready)
finally:
    say("over")
"""


class Process:
    """A server in a process of its own; its lines are waited for, never slept for."""

    def __init__(self, *command: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.out, self.err = (
            self._reading(stream) for stream in (self.process.stdout, self.process.stderr)
        )
        self.seen: list[str] = []
        self.closing = ExitStack()
        self.port = 0

    @staticmethod
    def _reading(stream: IO[str] | None) -> queue.Queue[str | None]:
        lines: queue.Queue[str | None] = queue.Queue()

        def read() -> None:
            assert stream is not None
            for line in stream:
                lines.put(line)
            lines.put(None)

        threading.Thread(target=read, daemon=True).start()
        return lines

    def wait_for(self, beginning: str) -> str:
        """Return the next line of its output that begins so."""
        while (line := self.out.get(timeout=PATIENCE_S)) is not None:
            self.seen.append(line.strip())
            if line.startswith(beginning):
                return line
        raise AssertionError(f"no {beginning!r} in {self.seen}: {self.errors()}")

    def wait_for_event(self, event: str) -> dict[str, Any]:
        """Return the next event of that kind in its log."""
        while (line := self.err.get(timeout=PATIENCE_S)) is not None:
            entry = json.loads(line)
            if entry["event"] == event:
                return dict(entry)
        raise AssertionError(f"no event {event!r}")

    def errors(self) -> str:
        """Return the rest of its errors."""
        lines = iter(lambda: self.err.get(timeout=PATIENCE_S), None)
        return "".join(line for line in lines if line)

    def tell(self, word: str) -> None:
        """Write a line to its input."""
        assert self.process.stdin is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def ask(self, path: str, host: str = "127.0.0.1") -> http.client.HTTPResponse:
        """Return an answer whose body is still to be read."""
        connection = http.client.HTTPConnection(host, self.port, timeout=PATIENCE_S)
        self.closing.callback(connection.close)
        connection.request("GET", path)
        return self.closing.enter_context(connection.getresponse())

    def end(self) -> tuple[int, list[str]]:
        """Wait for its end; return the exit status and the lines of its output."""
        status = self.process.wait(PATIENCE_S)
        while (line := self.out.get(timeout=PATIENCE_S)) is not None:
            self.seen.append(line.strip())
        return status, [line for line in self.seen if not line.startswith("port ")]


@pytest.fixture
def launch() -> Iterator[Callable[..., Process]]:
    """Start processes that do not outlive the test."""
    started: list[Process] = []

    def begin(*command: str) -> Process:
        started.append(Process(*command))
        return started[-1]

    yield begin
    for each in started:
        each.closing.close()
        each.process.kill()
        each.process.wait(PATIENCE_S)
        for stream in (each.process.stdin, each.process.stdout, each.process.stderr):
            assert stream is not None
            stream.close()


@pytest.fixture
def start(launch: Callable[..., Process], tmp_path: Path) -> Callable[..., Process]:
    path = tmp_path / "server.py"
    path.write_text(PROGRAM)

    def begin(
        how: str = "", *, drain_s: float = 1000.0, port: int = 0, host: str = "127.0.0.1"
    ) -> Process:
        server = launch(str(path), how, str(drain_s), str(port), host)
        server.port = int(server.wait_for("port ").split()[1])
        return server

    return begin


def test_who_asks_while_the_model_loads_is_told_so(start: Any) -> None:
    server = start("wait")
    for path in ("/health", "/v1/models"):
        answer = server.ask(path)
        assert (answer.status, answer.getheader("Retry-After")) == (503, "1")
        assert json.load(answer) == {
            "error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}
        }
    server.tell("go on")
    server.wait_for("ready")
    assert server.ask("/quick").read() == b"quick"


def test_a_server_ends_in_order(start: Any) -> None:
    server = start()
    server.wait_for("ready")
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == (0, ["up", "ready", "closed", "down", "over"])


@pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.2 is not everywhere this machine")
def test_several_addresses_are_listened_on(start: Any) -> None:
    with bind("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    server = start(port=port, host="127.0.0.1,127.0.0.2")
    server.wait_for("ready")
    for host in ("127.0.0.1", "127.0.0.2"):
        assert server.ask("/quick", host).read() == b"quick"
    server.process.send_signal(signal.SIGTERM)
    assert server.end()[0] == 0


def test_a_running_answer_is_completed_and_nothing_new_is_taken(start: Any) -> None:
    server = start()
    server.wait_for("ready")
    answer = server.ask("/slow")
    assert answer.read(6) == b"first "
    server.process.send_signal(signal.SIGINT)
    assert server.wait_for_event("ending")["drain_s"] == 1000.0
    with pytest.raises(OSError, match=r"refused|reset|closed"):  # noqa: PT012 - until the port is closed
        while True:
            server.ask("/quick").read()
    server.tell("go on")
    assert answer.read() == b"last"
    assert server.end() == (0, ["up", "ready", "closed", "down", "over"])


def test_what_takes_longer_than_the_drain_is_cancelled(start: Any) -> None:
    server = start(drain_s=0.0)
    server.wait_for("ready")
    answer = server.ask("/slow")
    assert answer.read(6) == b"first "
    server.process.send_signal(signal.SIGTERM)
    server.wait_for("down")
    server.tell("go on")
    status, lines = server.end()
    assert (status, lines) == (0, ["up", "ready", "closed", "cancelled", "down", "over"])
    with pytest.raises((http.client.IncompleteRead, OSError)):
        answer.read()
    assert "Traceback" not in server.errors()


def test_who_is_not_answered_at_the_end_is_told_so(start: Any) -> None:
    server = start(drain_s=0.0)
    server.wait_for("ready")
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    server.closing.callback(connection.close)
    connection.request("GET", "/mute")
    server.wait_for("asked")
    server.process.send_signal(signal.SIGTERM)
    answer = server.closing.enter_context(connection.getresponse())
    assert (answer.status, json.load(answer)["error"]["type"]) == (503, "unavailable_error")
    server.tell("go on")
    assert server.end()[0] == 0
    assert "Traceback" not in server.errors()


def test_a_second_signal_ends_at_once(start: Any) -> None:
    server = start()
    server.wait_for("ready")
    answer = server.ask("/slow")
    assert answer.read(6) == b"first "
    server.process.send_signal(signal.SIGTERM)
    server.wait_for_event("ending")
    server.process.send_signal(signal.SIGINT)
    assert server.end() == (128 + signal.SIGINT, ["up", "ready"])


def test_a_signal_while_the_model_loads_ends_the_loading(start: Any) -> None:
    server = start("for ever")
    server.wait_for("loading")
    server.process.send_signal(signal.SIGTERM)
    assert server.end() == (0, ["loading", "over"])


def test_a_model_that_does_not_load_ends_the_server(start: Any) -> None:
    server = start("fail")
    status, lines = server.end()
    assert (status, lines) == (1, ["over"])
    assert "ModelError: m.gguf is no model" in server.errors()


def test_what_is_served_is_told_as_an_event(start: Any) -> None:
    server = start()
    entry = server.wait_for_event("ready")
    assert entry["url"] == f"http://127.0.0.1:{server.port}"
    assert entry["base_url"] == f"http://127.0.0.1:{server.port}/v1"
    assert f"curl {entry['base_url']}/chat/completions" in entry["message"]
    assert f'OpenAI(base_url="{entry["base_url"]}"' in entry["client"]
    assert (entry["model"], entry["slots"], entry["n_ctx"]) == ("tiny", 2, 512)
    assert entry["tiers"] == {"ram": 1 << 30, "shared": None}


# -- running: with an engine on a fake model -------------------------------------------------------

ENGINE = """
import contextlib, sys, threading, time
sys.path.insert(0, sys.argv[1])
from llamakeep.cli import serve as command
from llamakeep.errors import EngineClosed
from llamakeep.server import loading, logs, run
from llamakeep.server.service import load_service
from llamakeep.server.sources import resolve
from tests.engine_tools import engine_of, runtime_of

fake = runtime_of("attention", n_seqs=2, n_ctx=4096)
dies = threading.Event()

def is_full():
    stats = engine.stats()
    return (stats["slots_busy"], stats["waiting"]) == (2, 1)

def every(operation):
    # A batch takes its time; with two requests running and one waiting it takes until the end.
    if operation == "evaluate":
        time.sleep(0.002)
        while not engine.closed and is_full():
            if dies.wait(0.01):
                raise KeyboardInterrupt("the engine's thread dies")

fake.failures = every
settings = resolve({"model": __file__, "port": "0", "drain_s": sys.argv[2]}, environment={})
with contextlib.suppress(EngineClosed), engine_of(runtime=fake) as engine:
    loading.load_engine = lambda *_: engine
    logs.configure()
    threading.Thread(target=lambda: sys.stdin.readline() and dies.set(), daemon=True).start()
    ready = lambda service, url: command.announce(settings, service, url)
    was_told = run.serve(settings, load_service, on_ready=ready)
    print(was_told)
"""
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "ignore_eos": True}


@pytest.fixture(params=[0])
def three(
    launch: Callable[..., Process], tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Any]:
    """A server whose two slots answer, one in a stream, while a third request waits."""
    path = tmp_path / "engine.py"
    path.write_text(ENGINE)
    server = launch(str(path), str(Path(__file__).parent.parent), str(request.param))
    url = server.wait_for_event("ready")["url"]
    with ThreadPoolExecutor(3) as pool, httpx.Client(base_url=url, timeout=PATIENCE_S) as client:

        def ask(stream: bool) -> httpx.Response:
            return client.post("/v1/chat/completions", json=CHAT | {"stream": stream})

        answers = []
        for stream, metric in (
            (True, "processing 1"),
            (False, "processing 2"),
            (False, "deferred 1"),
        ):
            answers.append(pool.submit(ask, stream))
            while f"llamacpp:requests_{metric}.0" not in client.get("/metrics").text:
                assert not any(answer.done() for answer in answers)
        yield server, client, [answer.result for answer in answers]


def unavailable(answer: httpx.Response) -> bool:
    return (answer.status_code, answer.json()["error"]["type"]) == (503, "unavailable_error")


def test_who_is_not_answered_in_time_is_told_that_the_server_ends(three: Any) -> None:
    server, _, (stream, running, waiting) = three
    server.process.send_signal(signal.SIGTERM)
    assert unavailable(running())
    assert unavailable(waiting())
    assert stream().status_code == 200
    last = stream().text.strip().splitlines()[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "unavailable_error"
    assert server.end() == (0, ["True"])
    assert "Traceback" not in server.errors()


@pytest.mark.parametrize("three", [1000], indirect=True)
def test_while_running_answers_go_on_open_connections_get_503(three: Any) -> None:
    server, client, answers = three
    server.process.send_signal(signal.SIGTERM)
    while (answer := client.get("/health")).status_code == 200:  # until the signal has arrived
        pass
    assert unavailable(answer)
    assert unavailable(client.post("/v1/chat/completions", json=CHAT))
    assert unavailable(answers[-1]())  # what only waits is not waited for
    server.process.send_signal(signal.SIGTERM)
    assert server.end()[0] == 128 + signal.SIGTERM


def test_a_server_whose_engine_dies_ends_too(three: Any) -> None:
    server, _, answers = three
    server.tell("die")
    stream, running, waiting = (answer() for answer in answers)
    assert unavailable(running)
    assert unavailable(waiting)
    assert "unavailable_error" in stream.text
    assert server.wait_for_event("stopped")["level"] == "error"
    assert server.end() == (0, ["False"])


def test_a_server_that_ends_by_itself_has_exit_code_1(
    runner: CliRunner, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for was_told in (True, False):
        monkeypatch.setattr(run, "serve", lambda *_, told=was_told, **__: told)
        monkeypatch.setattr(logs, "configure", lambda **_: None)
        result = runner.invoke(app, ["serve", "-m", model, "--port", "0"])
        assert result.exit_code == (0 if was_told else 1)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def announced(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, **flags: str) -> str:
    """Return what is said on standard error of a service that is ready."""
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(logging.getLogger("llamakeep"), "handlers", [logging.StreamHandler(stream)])
    monkeypatch.setattr(logging.getLogger("llamakeep"), "level", logging.INFO)
    tiers = {"ram": 8 << 30, "disk": 20 << 30, "shared": None}
    service = Service(
        lambda *_: None,  # type: ignore[arg-type, return-value]
        lambda _: None,
        model_name="tiny\x1b[2J",
        n_slots=4,
        n_ctx=8192,
        tiers=tiers,
    )
    settings = resolve({"model": "m.gguf"} | flags, environment={})
    command.announce(settings, service, "http://127.0.0.1:8080")
    return stream.getvalue()


def test_what_is_served_is_told_to_people_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    first, *rest = announced(monkeypatch, Terminal()).splitlines()
    assert first == (
        "tiny\\x1b[2J is ready at http://127.0.0.1:8080 (4 slots, 8,192 tokens of context)"
    )
    text = "\n".join(rest)
    assert "ram 8.00 GiB, disk 20.0 GiB, shared" in text
    assert "curl http://127.0.0.1:8080/v1/chat/completions" in text
    assert 'OpenAI(base_url="http://127.0.0.1:8080/v1", api_key="none")' in text
    assert "http://127.0.0.1:8080/metrics" in text


def test_the_key_is_asked_for_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    text = announced(monkeypatch, Terminal(), api_key="nobody-sees-this", metrics="off")
    assert "Authorization: Bearer YOUR-KEY" in text
    assert 'api_key="YOUR-KEY"' in text
    assert "nobody-sees-this" not in text
    assert "/metrics" not in text


def test_a_server_that_is_open_to_others_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    warning = "anybody who reaches 0.0.0.0 may ask"
    assert warning in announced(monkeypatch, io.StringIO(), host="0.0.0.0")
    assert warning not in announced(monkeypatch, io.StringIO(), host="0.0.0.0", api_key="k")
    assert warning not in announced(monkeypatch, io.StringIO(), host="127.0.0.1")


# -- the ends that meet here: an engine on a fake model, and the application --------------------


@pytest.fixture
def log() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def service(
    model: str, monkeypatch: pytest.MonkeyPatch, log: io.StringIO, tmp_path: Path
) -> Iterator[Service]:
    handler = logging.StreamHandler(log)
    handler.setFormatter(logs.JsonLines())
    logger = logging.getLogger("llamakeep")
    monkeypatch.setattr(logger, "handlers", [handler])
    level = logger.level
    logger.setLevel(logging.INFO)  # and not its attribute: loggers remember what they let through
    monkeypatch.chdir(tmp_path)
    (tmp_path / "slots").mkdir()
    settings = resolve({"model": model, "slot_save_path": "slots"}, environment={})
    try:
        with engine_of() as engine:
            monkeypatch.setattr("llamakeep.server.loading.load_engine", lambda *_: engine)
            yield load_service(settings, lambda _share: None)
    finally:
        logger.setLevel(level)


def test_a_loaded_service_answers_counts_and_logs(service: Service, log: io.StringIO) -> None:
    question = {"messages": [{"role": "user", "content": "a-question"}], "max_tokens": 4}

    async def ask() -> tuple[Any, str]:
        transport = httpx.ASGITransport(service.app)  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            answer = await client.post("/v1/chat/completions", json=question)
            return answer.json(), (await client.get("/metrics")).text

    answer, metrics = asyncio.run(ask())
    assert answer["usage"]["completion_tokens"] == 4
    n_prompt = answer["usage"]["prompt_tokens"]
    assert f"llamacpp:prompt_tokens_total {n_prompt}.0\n" in metrics
    assert 'llamakeep_http_requests_total{endpoint="/v1/chat/completions",status="2xx"} 1.0' in (
        metrics
    )
    [entry] = map(json.loads, log.getvalue().splitlines())
    assert (entry["event"], entry["evaluated_tokens"]) == ("request", n_prompt)
    assert "a-question" not in log.getvalue()
    assert service.tiers == {"ram": 1 << 26}
    assert (service.model_name, service.n_slots) == ("fake", 3)


def test_slots_are_saved_in_a_directory_that_was_named_relatively(
    service: Service, tmp_path: Path
) -> None:
    def ask(path: str, body: dict[str, Any]) -> httpx.Response:
        async def post() -> httpx.Response:
            transport = httpx.ASGITransport(service.app)  # type: ignore[arg-type]
            async with httpx.AsyncClient(
                transport=transport, base_url="http://localhost"
            ) as client:
                return await client.post(path, json=body)

        return asyncio.run(post())

    assert ask("/completion", {"prompt": "words", "n_predict": 2, "id_slot": 0}).is_success
    saved = ask("/slots/0?action=save", {"filename": "a.bin"})
    assert saved.status_code == 200, saved.text
    assert (tmp_path / "slots" / "a.bin").stat().st_size == saved.json()["n_written"]
    (tmp_path / "slots").rename(tmp_path / "gone")
    (tmp_path / "slots").touch()
    failed = ask("/slots/0?action=save", {"filename": "a.bin"})
    assert failed.status_code == 500
    assert f"(in {tmp_path / 'slots'})" in failed.json()["error"]["message"]


def test_every_route_has_a_label_of_its_own(service: Service) -> None:
    paths = service.app.openapi()["paths"]  # type: ignore[attr-defined]
    assert len(paths) > 10
    assert {path for path in paths if endpoint_of(path) == OTHER} == set()


def test_the_application_is_told_what_the_settings_say(model: str, tmp_path: Path) -> None:
    flags = {"model": model, "predict": "7", "api_key": "k", "cors": "*", "timeout_s": "5"}
    flags |= {"max_body_bytes": "1MiB", "slot_save_path": str(tmp_path), "slots": "off"}
    options = options_of(resolve(flags, environment={}))
    assert (options.n_predict, options.api_keys, options.cors) == (7, ("k",), ("*",))
    assert (options.max_body_bytes, options.slot_save_path) == (1 << 20, tmp_path)
    assert (options.slots, options.stall_s, options.model_path) == (False, 5.0, model)
    assert (options.aliases, options.tags) == ((Path(model).stem,), ())
    assert options.build.startswith("b")  # clients of llama-server count on it
    assert (options.ping_s, options.cache_prompt, options.prefill) == (15.0, True, True)
    flags = {"model": model, "alias": ["tiny,fim", "code"], "tags": ["small, chat"]}
    flags |= {"ping_s": "-1", "cache_prompt": False, "prefill_assistant": False}
    flags |= {"chat_template_kwargs": '{"enable_thinking": false}'}
    options = options_of(resolve(flags, environment={}))
    assert (options.ping_s, options.cache_prompt, options.prefill) == (NEVER_S, False, False)
    assert options.template_values == {"enable_thinking": False}
    assert (options.aliases, options.tags) == (("code", "fim", "tiny"), ("chat", "small"))


def test_a_full_queue_is_told_in_the_singular_too() -> None:
    with engine_of(n_seqs=1, max_waiting=1) as engine, ExitStack() as stack:
        gate = threading.Event()
        request = Request(as_tokens([1, 2, 3]), max_tokens=1)
        thread = threading.Thread(target=engine.call, args=(gate.wait,))
        thread.start()
        stack.callback(thread.join)
        stack.callback(gate.set)
        for _ in range(2):
            engine.submit(request, lambda _: None)
        with pytest.raises(QueueFull, match=r"^1 request is waiting"):
            engine.submit(request, lambda _: None)


def test_what_was_chosen_for_sampling_is_the_default_of_both_apis(model: str) -> None:
    options = options_of(resolve({"model": model}, environment={}))
    openai = options.openai_sampling
    assert (options.sampling.temperature, openai and openai.temperature) == (0.8, 1.0)
    flags = {"model": model, "temperature": "0.8", "top_k": "7"}
    options = options_of(resolve(flags, environment={}))
    for sampling in (options.sampling, options.openai_sampling):
        assert sampling is not None
        assert (sampling.temperature, sampling.top_k) == (0.8, 7)
    assert options.openai_sampling is not None
    assert (options.sampling.top_p, options.openai_sampling.top_p) == (0.95, 1.0)


def test_a_context_beyond_the_training_is_told_with_both_numbers(
    model: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with engine_of(n_ctx=2048) as engine:
        monkeypatch.setattr("llamakeep.server.loading.load_engine", lambda *_: engine)
        for trained, says in ((1024, True), (2048, False)):
            metadata = {"general.architecture": "x", "x.context_length": str(trained)}
            monkeypatch.setattr(type(engine.vocab), "metadata", metadata)
            caplog.clear()
            load_service(resolve({"model": model}, environment={}), lambda _share: None)
            told = "a context of 2,048 tokens is more than the 1,024 that the model was trained for"
            assert (told in caplog.text) == says


def test_how_a_model_is_loaded_is_told_to_llama_cpp(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Loaded(Exception):
        pass

    told: dict[str, Any] = {}

    def load(*_: Any, **options: Any) -> None:
        told.update(options)
        raise Loaded

    monkeypatch.setattr("llamakeep.runtime.llama_cpp.LlamaCppRuntime.load", load)
    for flags, expected in (
        ({}, {"use_mmap": True, "use_mlock": False, "swa_full": False}),
        (
            {"mmap": False, "mlock": True, "swa_full": True},
            {"use_mmap": False, "use_mlock": True, "swa_full": True},
        ),
    ):
        with pytest.raises(Loaded):
            load_engine(resolve({"model": model} | flags, environment={}))
        assert expected.items() <= told.items()


def test_tiers_are_read_off_the_stats() -> None:
    below = {"tiers": {"disk": {"capacity_bytes": 5}, "shared": {"hits": 1}}}
    assert capacities_of({"capacity_bytes": 9, "below": below}) == {
        "ram": 9,
        "disk": 5,
        "shared": None,
    }
    assert capacities_of({}) == {}


# -- all of it, with a real model ----------------------------------------------------------------


@pytest.mark.model
def test_the_command_serves_a_model_and_keeps_what_it_read(
    launch: Callable[..., Process], tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    command = ["-m", "llamakeep", "serve", "-m", str(tiny_model("attention")), "-c", "1024"]
    command += ["-ngl", "0", "-t", "1", "--port", "0", "--cache-dir", str(tmp_path / "kept")]
    body = {"prompt": list(range(10, 210)), "n_predict": 2}
    cached = []
    for _ in range(2):
        server = launch(*command)
        ready = server.wait_for_event("ready")
        assert {"ram", "disk"} <= set(ready["tiers"])
        answer = httpx.post(f"{ready['url']}/completion", json=body, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        cached.append(answer.json()["timings"]["cache_n"])
        assert server.wait_for_event("request")["reused_tokens"] == cached[-1]
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == (0, [])
    assert cached[0] == 0
    assert cached[1] >= 190


@pytest.mark.model
def test_a_file_that_is_no_model_is_one_line(
    launch: Callable[..., Process], tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF and then nothing")
    server = launch("-m", "llamakeep", "serve", "-m", str(path), "--port", "0")
    assert server.end() == (2, [])
    errors = server.errors()
    assert errors.startswith(f"llamakeep: {path}")
    assert errors.count("\n") == 1
