"""`llamakeep explain`: files, standard input, logs and servers; and what it refuses."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from llamakeep.cli import app
from llamakeep.explain import Circumstances, Explanation, Kind, RecordLog, explain
from tests.explain_pairs import FIX, HISTORY, MORE, SYSTEM, chat

BEFORE = chat(f"{SYSTEM} Today is 2025-03-01.", None, FIX)
AFTER = chat(f"{SYSTEM} Today is 2025-03-02.", None, FIX, *MORE)


def run(*arguments: object, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(app, ["explain", *map(str, arguments)], input=stdin)


def explained(*arguments: object, stdin: str | None = None) -> Explanation:
    result = run(*arguments, "--json", stdin=stdin)
    assert (result.exit_code, result.stderr) == (0, "")
    return Explanation.from_json(json.loads(result.stdout))


def refused(*arguments: object, stdin: str | bytes | None = None) -> str:
    result = run(*arguments, stdin=stdin)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("llamakeep: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


def put(path: Path, value: Any) -> Path:
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return path


# -- files -----------------------------------------------------------------------------------------


def test_bodies(tmp_path: Path) -> None:
    one, other = put(tmp_path / "a.json", BEFORE), put(tmp_path / "b.json", AFTER)
    found = explained(one, other)
    assert found == explain(BEFORE, AFTER)
    assert (found.kind, found.part) == (Kind.DATE, "messages[0].content")


def test_what_people_see(tmp_path: Path) -> None:
    one, other = put(tmp_path / "a.json", BEFORE), put(tmp_path / "b.json", AFTER)
    result = run(one, other)
    assert result.exit_code == 0
    lines = dict(line.split(maxsplit=1) for line in result.stdout.splitlines() if line[0] != " ")
    assert lines["kind"] == "date-or-time"
    assert "'2025-03-01' before, '2025-03-02' now" in " ".join(result.stdout.split())
    assert lines["where"].startswith("messages[0].content, character ")
    assert lines["before"] == '"1."...'
    assert lines["now"] == '"2."...'
    assert lines["advice"].startswith("Move the date or time to the end")


def test_ids_can_be_copied(server: str) -> None:
    ids = [f"chatcmpl-{n}f1b2c3d-0a1b-4c2d-8e3f-9a0b1c2d3e4f-of-a-long-name" for n in range(2)]
    found = replace(explain(BEFORE, AFTER), request_id=ids[0], before_id=ids[1])
    Answers.known["/explain"] = (200, json.dumps(found.to_json()).encode())
    words = run("--url", server).stdout.split()
    assert ids[0] + "," in words
    assert ids[1] in words


def test_what_is_shown_does_not_rule_the_terminal(tmp_path: Path) -> None:
    one, other = put(tmp_path / "a", "x\x1b[31m a"), put(tmp_path / "b", "x\x1b[31m b\x1b]0;t\x07")
    result = run(one, other)
    assert result.exit_code == 0
    assert "\x1b" not in result.stdout
    assert "\x07" not in result.stdout


@pytest.mark.parametrize("first", [True, False])
def test_standard_input(tmp_path: Path, first: bool) -> None:
    file = put(tmp_path / "a.txt", f"{SYSTEM} It is 10:15:00 now. Go on with the story of the dog.")
    text = f"{SYSTEM} It is 10:16:00 now. Go on with the story of the dog."
    names = ("-", file) if first else (file, "-")
    assert explained(*names, stdin=text).kind is Kind.DATE


def test_tokens_and_messages(tmp_path: Path) -> None:
    one, other = put(tmp_path / "a.json", [1, 2, 3]), put(tmp_path / "b.json", [1, 2, 4, 5])
    found = explained(one, other)
    assert (found.kind, found.token_index) == (Kind.UNKNOWN, 2)
    one, other = put(tmp_path / "a.json", HISTORY), put(tmp_path / "b.json", [*HISTORY, FIX])
    found = explained(one, other)
    assert (found.kind, found.part) == (Kind.NEW_TEXT, "messages[4]")


def test_a_text_may_begin_with_a_bracket(tmp_path: Path) -> None:
    one, other = put(tmp_path / "a.txt", "[INST] Hi"), put(tmp_path / "b.txt", "[INST] Hi there")
    assert explained(one, other).kind is Kind.NEW_TEXT
    one, other = put(tmp_path / "a.txt", '{"x": 1}'), put(tmp_path / "b.txt", '{"x": 1.0}')
    assert explained(one, other, "--text").kind is Kind.NUMBER_FORMAT
    assert "neither messages nor input nor prompt" in refused(one, other)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_the_end_of_a_file_is_no_part_of_a_text(tmp_path: Path, end: str) -> None:
    one, other = tmp_path / "a.txt", tmp_path / "b.txt"
    one.write_bytes(f"Once upon a time{end}".encode())
    other.write_bytes(f"Once upon a time there was a king.{end}".encode())
    found = explained(one, other)
    assert (found.kind, found.char_index) == (Kind.NEW_TEXT, len("Once upon a time"))


@pytest.mark.model
def test_tokens_as_text(tmp_path: Path, smollm2_path: Path) -> None:
    from llamakeep.runtime.llama_text import load_vocab

    texts = [f"Today is 2025-03-0{day}. You are a helpful assistant, and brief." for day in (1, 2)]
    with load_vocab(smollm2_path) as vocab:
        names = [
            put(
                tmp_path / f"{index}.json",
                vocab.tokenize(text, add_special=False, parse_special=True).tolist(),
            )
            for index, text in enumerate(texts)
        ]
    found = explained(*names, "--model", smollm2_path)
    assert found.kind is Kind.DATE
    assert found.around.after.startswith("2. You are")


# -- what is refused -------------------------------------------------------------------------------


def test_what_does_not_go_together(tmp_path: Path) -> None:
    file = put(tmp_path / "a", "x")
    assert "nothing to explain" in refused()
    assert "give the prompt that came after it" in refused(file)
    assert "not both" in refused("-", "-")
    assert "one of them" in refused(file, file, "--log", file)
    assert "one of them" in refused("--log", file, "--url", "http://x")
    assert "--id is for" in refused(file, file, "--id", "3")


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.json", b'{"messages": [}', "a.json is no JSON: Expecting value"),
        ("a.json", b"", "cannot be compared"),
        ("a.json", b"{}", "neither messages nor input nor prompt"),
        ("a.json", b"[]", "neither tokens nor messages"),
        ("a.json", b'["x"]', "neither tokens nor messages"),
        ("a.json", b'{"messages": []}', "a.json: messages is empty"),
        ("a.json", b'{"messages": [1]}', "a.json: messages[0] must be an object, not 1"),
        ("a.json", b"[1, -1]", "token -1 at index 1"),
        ("a.json", b"[1, 1e3]", "neither tokens nor messages"),
        ("a.json", b"[" * 100_000, "a.json is nested too deeply"),
        ("a.json", b'{"messages": ' + b"[" * 300 + b"]" * 300 + b"}", "nested more than 128 times"),
        ("a.json", b'{"messages": "\xff"}', "a.json is no UTF-8, at byte 14"),
        ("a.txt", b"plain text", "is a text, and"),
        ("a.json", b"[1, 2]", "is a list of tokens, and"),
    ],
)
def test_files_that_cannot_be_meant(tmp_path: Path, name: str, data: bytes, said: str) -> None:
    file, good = tmp_path / name, put(tmp_path / "good.json", BEFORE)
    file.write_bytes(data)
    assert said in refused(file, good)
    assert refused(good, file)
    if name == "a.txt":
        assert "standard input is a text" in refused("-", good, stdin=data)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    file = put(tmp_path / "a", "x")
    assert "cannot read" in refused(file, tmp_path / "missing")
    assert "cannot read" in refused(tmp_path, file)


def test_a_file_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llamakeep.cli import explaining

    monkeypatch.setattr(explaining, "_MOST_BYTES", 1 << 20)
    large, small = put(tmp_path / "a", "x" * ((1 << 20) + 1)), put(tmp_path / "b", "x")
    assert "a is larger than 1 MiB" in refused(large, small)


# -- logs ------------------------------------------------------------------------------------------


def test_a_log(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    prompts = [np.arange(300, dtype=np.int32), np.arange(400, dtype=np.int32)]
    known = Circumstances(400, 296, "ram", shared_tokens=300, stored_tokens=300)
    with RecordLog(path, clock=lambda: 1.0) as log:
        log.add(prompts[0], namespace=b"n" * 32, request_id="a")
        log.add(prompts[1], namespace=b"n" * 32, request_id="b", circumstances=known)
    found = explained("--log", path)
    assert (found.kind, found.request_id, found.reused_tokens) == (Kind.NEW_TEXT, "b", 296)
    assert explained("--log", path, "--id", "a").kind is Kind.FIRST_SEEN
    shown = run("--log", path).stdout
    assert "request   b, after a\n" in shown
    assert "296 reused from ram, 104 evaluated" in shown
    assert "has no request 'c'" in refused("--log", path, "--id", "c")
    put(path, "{\n")
    assert "requests.jsonl, line 1: no JSON" in refused("--log", path)


# -- servers ---------------------------------------------------------------------------------------


class Answers(BaseHTTPRequestHandler):
    """Answers what a test has put down for a path."""

    known: ClassVar[dict[str, tuple[int, bytes]]] = {}
    seen: ClassVar[list[tuple[str, str | None]]] = []

    def do_GET(self) -> None:
        self.seen.append((self.path, self.headers["Authorization"]))
        status, body = self.known[self.path]
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "/elsewhere")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(Answers, "known", {})
    monkeypatch.setattr(Answers, "seen", [])
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with HTTPServer(("127.0.0.1", 0), Answers) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}"
        listening.shutdown()
        thread.join()


def test_a_server_is_asked(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = explain(BEFORE, AFTER)
    body = json.dumps(wanted.to_json()).encode()
    Answers.known.update({"/explain": (200, body), "/explain/a%2Fb%3F": (200, body)})
    assert explained("--url", server) == wanted
    assert explained("--url", f"{server}/", "--id", "a/b?", "--api-key", "secret") == wanted
    assert explained("--url", f"{server}/v1/") == wanted
    monkeypatch.setenv("LLAMAKEEP_API_KEY", "from the environment")
    assert explained("--url", server) == wanted
    keys = [key for _, key in Answers.seen]
    assert keys == [None, "Bearer secret", None, "Bearer from the environment"]


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (404, b'{"error": {"message": "no request 7"}}', "answers 404: no request 7"),
        (404, b"<html>", "answers 404: Not Found"),
        (401, b'{"error": "x"}', "answers 401: Unauthorized"),
        (302, b"", "answers 302: Found"),
        (200, b"<html>", "answers with no JSON"),
        (200, b"[" * 100_000, "answers with no JSON"),
        (200, b"[]", "an explanation must be an object"),
        (200, b'{"kind": "sunspots"}', "'sunspots' is no kind"),
    ],
)
def test_answers_that_are_none(server: str, status: int, body: bytes, said: str) -> None:
    Answers.known["/explain"] = (status, body)
    assert said in refused("--url", server, "--api-key", "secret")
    assert [path for path, _ in Answers.seen] == ["/explain"]  # a key goes nowhere else


@pytest.mark.parametrize(
    "url",
    ["", "localhost:8080", "file:///etc/passwd", "http://", "http://x:y", "http://x/?a=b",
     "http://x y", "http://[", "http://exämple"],
)  # fmt: skip
def test_addresses_that_are_none(url: str) -> None:
    assert "--url" in refused("--url", url)


def test_a_server_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with HTTPServer(("127.0.0.1", 0), Answers) as listening:
        url = f"http://127.0.0.1:{listening.server_port}"
    assert f"cannot reach {url}" in refused("--url", url)


def test_a_key_that_no_header_can_have() -> None:
    assert "the API key" in refused("--url", "http://127.0.0.1:1", "--api-key", "a\r\nb: c")
