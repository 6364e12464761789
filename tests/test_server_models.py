"""Over HTTP with real vocabularies."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from llamakeep.runtime.base import Vocab
from llamakeep.server.app import create_app
from tests.server_tools import TIMEOUT_S, served, serving


@contextlib.contextmanager
def real(path: Path) -> Iterator[tuple[httpx.Client, Vocab]]:
    """Serve a model; the values are a client and the vocabulary."""
    from llamakeep.server.loading import load_engine
    from llamakeep.server.settings import ServerSettings

    engine = load_engine(ServerSettings(model=path, ctx_size=512, parallel=1, threads=1))
    try:
        with (
            serving(create_app(engine)) as url,
            httpx.Client(base_url=url, timeout=TIMEOUT_S) as client,
        ):
            yield client, engine.vocab
    finally:
        engine.close()


def ask(client: httpx.Client, **body: Any) -> dict[str, Any]:
    response = client.post("/completion", json={"prompt": "The lighthouse", "n_predict": 6} | body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


@pytest.mark.parametrize("model", ["tiny", "smollm2"])
def test_an_answer_that_may_not_end_tells_which_tokens_are_forbidden(
    model: str, request: pytest.FixtureRequest
) -> None:
    if model == "tiny":
        path = request.getfixturevalue("tiny_model")("attention")
    else:
        path = request.getfixturevalue("smollm2_path")
    with real(path) as (client, vocab):
        ends = [token for token in range(vocab.n_vocab) if vocab.is_end(token)]
        assert ends
        wanted = [[token, 1000] for token in ends]
        ended = ask(client, logit_bias=wanted)
        assert (ended["stop_type"], ended["content"]) == ("eos", "")
        answer = ask(client, logit_bias=wanted, ignore_eos=True, return_tokens=True)
        assert (answer["stop_type"], answer["tokens_predicted"]) == ("limit", 6)
        assert not set(ends) & set(answer["tokens"])
        biases = answer["generation_settings"]["logit_bias"]
        assert [each["token"] for each in biases if each["bias"] is None] == ends


def test_the_ends_are_found_once_and_not_by_the_event_loop(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import llama_cpp

    asked_by: list[str] = []
    is_end = llama_cpp.llama_vocab_is_eog

    def counted(vocab: Any, token: int) -> bool:
        asked_by.append(threading.current_thread().name)
        return bool(is_end(vocab, token))

    monkeypatch.setattr(llama_cpp, "llama_vocab_is_eog", counted)
    with real(smollm2_path) as (client, vocab):
        assert len(asked_by) == vocab.n_vocab, "when the application is made"
        assert set(asked_by) == {threading.current_thread().name}
        for n_predict in (0, 1, 6):  # without a token, nobody samples
            assert ask(client, ignore_eos=True, n_predict=n_predict)
        assert set(asked_by[vocab.n_vocab :]) <= {"llamakeep-engine"}
        assert len(asked_by) <= vocab.n_vocab + 7
        assert vocab.ends is vocab.ends


def test_the_fakes_ends_are_found_once() -> None:
    with served() as server:
        assert server.engine.vocab.ends is server.engine.vocab.ends
