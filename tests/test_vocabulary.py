"""Text to tokens and back: the fake's vocabulary, a tiny model's and SmolLM2's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamakeep.errors import InvalidValue, KeeperClosed, ModelError, TokenError
from llamakeep.runtime.base import Vocab
from llamakeep.runtime.fake import FakeRuntime
from llamakeep.runtime.fake_text import BOS, EOS, IM_END, FakeVocab
from tests import tiny_models

TEXT = "The lighthouse burned whale oil: 1871, naïve, 灯台, 🐋!\n\n\tdef f(x): return  x "
TURN = "<|im_start|>user\nHow old?<|im_end|>\n"
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)

KINDS = ["fake", *(pytest.param(kind, marks=pytest.mark.model) for kind in ("tiny", "smollm2"))]


@pytest.fixture(scope="module", params=KINDS)
def vocab(request: pytest.FixtureRequest) -> Iterator[Vocab]:
    if request.param == "fake":
        yield FakeVocab(1_000)
        return
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    from llamakeep.runtime.llama_text import load_vocab

    if request.param == "tiny":
        path = request.getfixturevalue("model_dir") / tiny_models.model_file("attention")
    else:
        path = request.getfixturevalue("smollm2_path")
    with load_vocab(path) as loaded:
        yield loaded


def plain(vocab: Vocab, text: str) -> np.ndarray:
    return vocab.tokenize(text, add_special=False, parse_special=False)


# -- round trips -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def readable(vocab: Vocab) -> Callable[[str], str]:
    """Leaves out letters that the model cannot read: some bytes are no tokens of SmolLM2's."""
    known = {vocab.piece(token) for token in range(vocab.n_vocab)}
    missing = {byte for byte in range(256) if bytes([byte]) not in known}
    assert len(missing) < 32
    assert all(byte < 32 or byte > 0xBF for byte in missing)
    return lambda text: "".join(letter for letter in text if not missing & set(letter.encode()))


@given(text=TEXTS)
def test_any_text_comes_back(vocab: Vocab, readable: Callable[[str], str], text: str) -> None:
    text = readable(text)
    tokens = plain(vocab, text)
    assert tokens.dtype == np.int32
    assert vocab.text(tokens) == text
    assert b"".join(vocab.piece(token) for token in tokens.tolist()) == text.encode()


@given(before=TEXTS, after=TEXTS)
def test_text_beside_special_tokens_comes_back(
    vocab: Vocab, readable: Callable[[str], str], before: str, after: str
) -> None:
    text = readable(f"<|im_start|>{before}<|im_end|>{after}")
    tokens = vocab.tokenize(text, add_special=False, parse_special=True)
    assert vocab.text(tokens) == text
    pieces = [vocab.piece(token, special=True) for token in tokens.tolist()]
    assert b"".join(pieces) == text.encode()


@given(data=st.data())
def test_pieces_together_are_the_text(vocab: Vocab, data: st.DataObject) -> None:
    some = st.lists(st.integers(0, vocab.n_vocab - 1), max_size=30)
    tokens = data.draw(some)
    for special in (True, False):
        pieces = b"".join(vocab.piece(token, special=special) for token in tokens)
        assert vocab.text(tokens, special=special) == pieces.decode("utf-8", "ignore")


def test_half_a_letter_is_a_piece_and_no_text(vocab: Vocab) -> None:
    tokens = plain(vocab, "🐋").tolist()
    assert len(tokens) > 1
    assert vocab.text(tokens[:1]) == ""
    assert vocab.piece(tokens[0])
    assert "🐋".encode().startswith(vocab.piece(tokens[0]))


def test_a_long_text_comes_back(vocab: Vocab) -> None:
    text = TEXT * 2_000
    assert vocab.text(plain(vocab, text)) == text


# -- special tokens --------------------------------------------------------------------------------


@pytest.mark.parametrize("parse_special", [True, False])
@pytest.mark.parametrize("add_special", [True, False])
def test_a_long_text_has_the_tokens_of_its_parts(
    vocab: Vocab, add_special: bool, parse_special: bool
) -> None:
    options = {"add_special": False, "parse_special": parse_special}
    turns = [f"<|im_start|>user\n {n} <|im_end|>\n" for n in range(4_000)]
    whole = vocab.tokenize("".join(turns), add_special=add_special, parse_special=parse_special)
    begin = [vocab.bos] if add_special and vocab.adds_bos else []
    parts: list[int] = []
    step = 1 if parse_special else len(turns)  # plain text may become other tokens at a seam
    for at in range(0, len(turns), step):
        parts += vocab.tokenize("".join(turns[at : at + step]), **options).tolist()
    assert whole.tolist() == begin + parts
    assert vocab.text(whole[len(begin) :]) == "".join(turns)


def test_special_tokens_are_read_only_where_they_are_asked_for(vocab: Vocab) -> None:
    parsed = vocab.tokenize(TURN, add_special=False, parse_special=True).tolist()
    flat = plain(vocab, TURN).tolist()
    assert len(flat) > len(parsed)
    start, end = (
        vocab.tokenize(name, add_special=False, parse_special=True).tolist()
        for name in ("<|im_start|>", "<|im_end|>")
    )
    assert len(start) == len(end) == 1
    assert set(start + end) <= set(parsed)
    assert not set(start + end) & set(flat)
    assert vocab.text(flat) == vocab.text(parsed) == TURN
    assert vocab.text(parsed, special=False) == "user\nHow old?\n"
    assert vocab.piece(start[0]) == b""
    assert vocab.piece(start[0], special=True) == b"<|im_start|>"
    assert vocab.is_end(end[0])
    assert not vocab.is_end(start[0])
    assert not any(vocab.is_end(token) for token in flat)


def test_a_begin_is_added_where_the_model_wants_it(vocab: Vocab) -> None:
    with_it = vocab.tokenize("a", add_special=True, parse_special=False).tolist()
    without = plain(vocab, "a").tolist()
    assert with_it == ([vocab.bos] if vocab.adds_bos else []) + without


def test_what_a_vocabulary_says_of_itself(vocab: Vocab) -> None:
    assert vocab.bos is not None
    assert vocab.eos is not None
    assert vocab.is_end(vocab.eos)
    assert vocab.metadata["general.architecture"] in ("fake", "llama")
    assert vocab.chat_template == vocab.metadata.get("tokenizer.chat_template")
    vocab.metadata.clear()
    assert vocab.metadata


def test_a_chat_template_is_whole(smollm2_path: Path) -> None:
    from llamakeep.runtime.llama_text import load_vocab

    with load_vocab(smollm2_path) as vocab:
        template = vocab.chat_template
        assert template is not None
        assert template.startswith("{%")
        assert template.endswith("%}")
        assert "<|im_start|>" in template
        assert vocab.metadata["tokenizer.ggml.model"] == "gpt2"


# -- what cannot be read ---------------------------------------------------------------------------


def test_tokens_outside_of_the_vocabulary_are_refused(vocab: Vocab) -> None:
    for bad in (-1, vocab.n_vocab, 2**31, 2**40):
        for ask in (vocab.piece, vocab.is_end, lambda token: vocab.text([token])):
            with pytest.raises(TokenError):
                ask(bad)


@pytest.mark.parametrize("text", ["ab\ud800c", "\udfff", "ab<|im_end|>\udc00"])
def test_half_of_a_surrogate_pair_is_no_text(vocab: Vocab, text: str) -> None:
    for parse in (True, False):
        with pytest.raises(InvalidValue, match="surrogate"):
            vocab.tokenize(text, add_special=False, parse_special=parse)


def assert_closed(vocab: Vocab) -> None:
    for ask in (
        lambda: plain(vocab, "a"),
        lambda: vocab.piece(1),
        lambda: vocab.text([1]),
        lambda: vocab.is_end(1),
        lambda: vocab.bos,
        lambda: vocab.eos,
        lambda: vocab.adds_bos,
        lambda: vocab.chat_template,
        lambda: vocab.metadata,
    ):
        with pytest.raises(KeeperClosed):
            ask()


def test_a_closed_fake_reads_nothing() -> None:
    runtime = FakeRuntime("attention")
    runtime.vocab.piece(1)
    runtime.close()
    assert_closed(runtime.vocab)


def test_a_closed_model_reads_nothing(tiny_model: Callable[[str], Path]) -> None:
    from llamakeep.runtime.llama_cpp import LlamaCppRuntime

    runtime = LlamaCppRuntime.load(tiny_model("attention"), n_ctx=256, n_threads=1)
    vocab = runtime.vocab
    assert vocab.text(plain(vocab, TEXT)) == TEXT
    assert vocab.piece(1) is not None
    assert not vocab.is_end(1)
    assert vocab.metadata
    runtime.close()
    assert_closed(vocab)


def test_a_vocabulary_ends_with_the_llama_that_it_is_of(tiny_llama: Callable[..., Any]) -> None:
    from llamakeep.runtime.llama_cpp import LlamaCppRuntime

    llm = tiny_llama("attention")
    vocab = LlamaCppRuntime.adopt(llm).vocab
    assert plain(vocab, TEXT).tolist() == llm.tokenize(TEXT.encode(), add_bos=False)
    llm.close()
    assert_closed(vocab)


def test_closing_waits_for_other_threads(tiny_model: Callable[[str], Path]) -> None:
    """Threads read until they are refused, while the model is closed under them."""
    from llamakeep.runtime.llama_cpp import LlamaCppRuntime

    runtime = LlamaCppRuntime.load(tiny_model("attention"), n_ctx=256, n_threads=1)
    vocab, text = runtime.vocab, TEXT * 200
    expected = plain(vocab, text)
    running = threading.Barrier(4)
    ends: list[object] = []

    def read() -> None:
        started = False
        try:
            while np.array_equal(plain(vocab, text), expected):
                if not started:
                    started = True
                    running.wait()
            ends.append("other tokens")
        except KeeperClosed as error:
            ends.append(type(error))

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    running.wait()
    runtime.close()
    for thread in threads:
        thread.join()
    assert ends == [KeeperClosed] * 3


def test_a_model_without_a_tokenizer_has_no_text(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    from gguf import GGUFWriter

    from llamakeep.runtime.llama_text import load_vocab

    path = tmp_path / "mute.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(64)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with load_vocab(path) as vocab:
        for ask in (lambda: plain(vocab, "a"), lambda: vocab.piece(1), lambda: vocab.text([])):
            with pytest.raises(ModelError, match="no tokenizer"):
                ask()


# -- the fake's ------------------------------------------------------------------------------------


def test_the_fakes_tokens() -> None:
    vocab = FakeVocab(701)
    assert plain(vocab, "aß").tolist() == [97, 195, 159]
    assert vocab.text([104, 105, 700, 260]) == "hi<700><260>"
    assert len({vocab.piece(token, special=True) for token in range(701)}) == 701
    parsed = vocab.tokenize("<s>a<|im_end|>", add_special=True, parse_special=True)
    assert parsed.tolist() == [BOS, BOS, 97, IM_END]
    assert (vocab.bos, vocab.eos) == (BOS, EOS)
    assert vocab.ends == {EOS, IM_END}
    assert vocab.chat_template is not None
    assert "<|im_start|>" in vocab.chat_template


@pytest.mark.parametrize("n_vocab", [1, 100, BOS, EOS])
def test_a_small_fake_lacks_the_last_tokens(n_vocab: int) -> None:
    vocab = FakeVocab(n_vocab)
    assert vocab.bos == (BOS if n_vocab > BOS else None)
    assert vocab.eos is None
    assert vocab.ends == frozenset()
    assert vocab.chat_template is None
    assert vocab.tokenize("\0", add_special=False, parse_special=True).tolist() == [0]
    with pytest.raises(TokenError) if n_vocab <= 255 else pytest.MonkeyPatch.context():
        vocab.tokenize("\U0010ffff" + TURN, add_special=True, parse_special=True)
