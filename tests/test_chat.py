"""Where user messages start: templates of several kinds, tokenized by a stub."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamakeep.chat import find_starts, user_delimiter
from llamakeep.tokens import IntArray

Messages: TypeAlias = Sequence[dict[str, str]]
Template: TypeAlias = Callable[[Messages], str]

SPECIAL = (
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "[INST]",
    "[/INST]",
    "<s>",
    "</s>",
    "<|user|>",
    "<|assistant|>",
)
WORD = re.compile(r" ?\w+|\n+|.", re.DOTALL)


class StubLlama:
    """Tokenizes like a byte pair encoding: a space goes with the word behind it."""

    verbose = False

    def __init__(self, *, space_prefix: bool = False) -> None:
        self.space_prefix = space_prefix
        self.pieces: list[str] = []

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        found = ["<s>"] if add_bos else []
        pattern = f"({'|'.join(map(re.escape, SPECIAL))})" if special else "(?!)"
        for index, part in enumerate(re.split(pattern, text.decode())):
            if part in SPECIAL and special:
                found.append(part)
            elif part:
                # Sentencepiece vocabularies put a space before a text's first word.
                prefix = " " if self.space_prefix and index == 0 else ""
                found += WORD.findall(prefix + part)
        return [self._id(piece) for piece in found]

    def _id(self, piece: str) -> int:
        if piece not in self.pieces:
            self.pieces.append(piece)
        return self.pieces.index(piece)

    def text(self, tokens: Sequence[int] | IntArray) -> str:
        return "".join(self.pieces[token] for token in tokens)


def chatml(messages: Messages) -> str:
    text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return text + "<|im_start|>assistant\n"


def chatml_with_default_system(messages: Messages) -> str:
    if messages[0]["role"] != "system":
        messages = [{"role": "system", "content": "You are a helpful assistant."}, *messages]
    return chatml(messages)


def llama3(messages: Messages) -> str:
    text = "<|begin_of_text|>"
    for m in messages:
        text += f"<|start_header_id|>{m['role']}<|end_header_id|>\n\n{m['content']}<|eot_id|>"
    return text + "<|start_header_id|>assistant<|end_header_id|>\n\n"


def mistral(messages: Messages) -> str:
    text, system = "<s>", ""
    for m in messages:
        if m["role"] == "system":
            system = m["content"] + "\n\n"
        elif m["role"] == "user":
            text += f"[INST] {system}{m['content']} [/INST]"
            system = ""
        else:
            text += f" {m['content']}</s>"
    return text


def bare_system(messages: Messages) -> str:
    """Nothing stands after the system prompt, `</s>` after an answer."""
    marks = {"system": "{}", "user": "<|user|>{}", "assistant": "<|assistant|>{}</s>"}
    return "<s>" + "".join(marks[m["role"]].format(m["content"]) for m in messages)


def words(messages: Messages) -> str:
    """No special tokens at all."""
    names = {"system": "Context", "user": "User", "assistant": "Assistant"}
    return "\n".join(f"{names[m['role']]}: {m['content']}" for m in messages) + "\nAssistant:"


def handler_of(template: Template, *, add_bos: bool = False) -> Callable[..., Any]:
    """Return a chat handler like those of llama-cpp-python, for a template."""

    def handler(*, llama: Any, messages: Messages, **_: Any) -> Any:
        assert llama.verbose is False  # what is not stopped reaches the model
        text = template(messages)
        tokens = llama.tokenize(text.encode(), add_bos=add_bos, special=True)
        return llama.create_completion(prompt=tokens)

    return handler


CHAT = [
    {"role": "system", "content": "Be brief: one line."},
    {"role": "user", "content": "Who kept the light?"},
    {"role": "assistant", "content": "A woman: user of many books"},
    {"role": "user", "content": "And \n\n who came after her?"},
    {"role": "assistant", "content": "Nobody"},
    {"role": "user", "content": "<s> why"},
]


@pytest.mark.parametrize(
    ("template", "delimiter", "n_found"),
    [
        pytest.param(chatml, "<|im_start|>user", 3, id="ChatML"),
        pytest.param(
            chatml_with_default_system, "<|im_end|>\n<|im_start|>user", 3, id="ChatML-default"
        ),
        pytest.param(llama3, "<|start_header_id|>user<|end_header_id|>", 3, id="Llama-3"),
        pytest.param(mistral, "[INST]", 3, id="Mistral"),
        pytest.param(bare_system, "<|user|>", 3, id="bare system"),
        pytest.param(words, "User:", 3, id="words"),
    ],
)
def test_every_user_message_is_found(template: Template, delimiter: str, n_found: int) -> None:
    llm = StubLlama()
    found = user_delimiter(llm, handler_of(template))
    assert found.dtype == np.int32
    assert llm.text(found) == delimiter
    text = template(CHAT)
    tokens = np.array(llm.tokenize(text.encode(), add_bos=False, special=True), np.int32)
    starts = find_starts(tokens, found)
    assert len(starts) == n_found
    # Each start stands after everything that was said before, and before what the user says.
    users = [m["content"] for m in CHAT if m["role"] == "user"]
    for start, content in zip(starts, users[-n_found:], strict=True):
        at = len(llm.text(tokens[:start]))
        until = text.index(content)
        assert at <= until - len(delimiter)
        for said in CHAT[: [m["content"] for m in CHAT].index(content)]:
            if said["role"] != "system":
                assert text.index(said["content"]) + len(said["content"]) <= at


def test_a_tokenizer_that_prefixes_a_space_finds_special_tokens_or_nothing() -> None:
    for template, n_found in ((chatml, 3), (llama3, 3), (mistral, 3), (words, 0)):
        llm = StubLlama(space_prefix=True)
        found = user_delimiter(llm, handler_of(template))
        text = template(CHAT).encode()
        tokens = np.array(llm.tokenize(text, add_bos=False, special=True), np.int32)
        assert len(find_starts(tokens, found)) == n_found


def test_a_handler_may_hand_its_prompt_over_as_text() -> None:
    llm = StubLlama()

    def handler(*, llama: Any, messages: Messages) -> Any:
        return llama.create_completion(prompt=chatml(messages), max_tokens=1)

    assert llm.text(user_delimiter(llm, handler)) == "<|im_start|>user"


def raises(messages: Messages) -> str:
    raise RuntimeError("conversation roles must alternate user/assistant/user/assistant")


def only_the_last(messages: Messages) -> str:
    return chatml(messages[-1:])


def only_the_first(messages: Messages) -> str:
    return chatml(messages[:1])


def without_answers(messages: Messages) -> str:
    return chatml([m for m in messages if m["role"] == "user"])


def newest_first(messages: Messages) -> str:
    return chatml(list(reversed(messages)))


def only_space(messages: Messages) -> str:
    return "\n" + "\n\n".join(m["content"] for m in messages)


def nothing_between(messages: Messages) -> str:
    return "".join(m["content"] for m in messages)


def nothing_shared(messages: Messages) -> str:
    return "".join(f"{index}{m['content']}" for index, m in enumerate(messages))


def empty(messages: Messages) -> str:
    return ""


@pytest.mark.parametrize(
    "template",
    [
        raises,
        only_the_last,
        only_the_first,
        without_answers,
        newest_first,
        only_space,
        nothing_between,
        nothing_shared,
        empty,
    ],
)
def test_a_template_without_a_delimiter_costs_nothing(template: Template) -> None:
    found = user_delimiter(StubLlama(), handler_of(template))
    assert (found.dtype, found.size) == (np.dtype(np.int32), 0)


def test_a_template_that_raises_is_logged_with_its_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="llamakeep"):
        user_delimiter(StubLlama(), handler_of(raises))
    assert "roles must alternate" in caplog.text


def test_handlers_that_evaluate_nothing_or_tokens_are_let_be() -> None:
    def returns(*, llama: Any, messages: Messages) -> Any:
        return {"choices": []}

    def tokens_only(*, llama: Any, messages: Messages) -> Any:
        return llama.create_completion(prompt=[1, 2, 3])

    for handler in (returns, tokens_only):
        assert user_delimiter(StubLlama(), handler).size == 0


def test_a_handler_is_called_once_with_three_messages() -> None:
    seen = []

    def handler(*, llama: Any, messages: Messages) -> Any:
        seen.append([m["role"] for m in messages])
        llama.tokenize(chatml(messages).encode(), special=True)

    user_delimiter(StubLlama(), handler)
    assert seen == [["user", "assistant", "user"]]


# -- finding ---------------------------------------------------------------------------------------

ids = st.lists(st.integers(0, 2), max_size=30)


@given(tokens=ids, delimiter=st.lists(st.integers(0, 2), max_size=4))
def test_starts_are_those_of_brute_force(tokens: list[int], delimiter: list[int]) -> None:
    n = len(delimiter)
    brute = [at for at in range(len(tokens) - n + 1) if n and tokens[at : at + n] == delimiter]
    assert find_starts(np.array(tokens, np.int32), np.array(delimiter, np.int32)) == brute


def test_overlaps_and_both_ends_are_found() -> None:
    def starts(tokens: list[int], delimiter: list[int]) -> list[int]:
        return find_starts(np.array(tokens, np.int32), np.array(delimiter, np.int32))

    assert starts([1, 1, 1], [1, 1]) == [0, 1]
    assert starts([1, 2, 3, 1, 2], [1, 2]) == [0, 3]
    assert starts([1, 2], [1, 2]) == [0]
    assert starts([1], [1, 2]) == []
    assert starts([1, 2], []) == []
    assert starts([], []) == []
