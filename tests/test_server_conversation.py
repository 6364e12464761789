"""From conversations to prompts: an answer that goes on where the assistant's last words end."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamakeep.chat_template import ChatTemplate
from llamakeep.runtime.fake_text import FakeVocab
from llamakeep.server.conversation import Conversations
from llamakeep.server.errors import ApiError
from llamakeep.server.openai_tools import chat_of
from llamakeep.server.schema import TemplateFields

ASKED = {"role": "user", "content": "hi"}
BEFORE = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
TRIMS = (
    "{% for m in messages %}"
    "[{{ m.role }}]{{ m.content | trim }}[end]\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
THINKS = (
    "{% for m in messages %}"
    "{% set parts = m.content.split('</think>') %}"
    "[{{ m.role }}]"
    "{% if m.role == 'assistant' %}"
    "<think>{{ parts[0].split('<think>')[-1] if parts | length > 1 }}</think>"
    "{% endif %}"
    "{{ parts[-1] }}[end]"
    "{% endfor %}"
)

PREFILLS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20),
    st.text("<|im_endstar> \nu", min_size=1, max_size=8),
    st.sampled_from(["<", "|", "end", "\n", "<|im_end|>", "<|im_end|>\n", "assistant\n", BEFORE]),
)


def text_of(content: Any, source: str = "chatml", **fields: Any) -> str:
    conversations = Conversations(ChatTemplate(source), FakeVocab(300))
    messages = [ASKED, {"role": "assistant", "content": content}]
    return conversations.text(chat_of(TemplateFields(messages=messages, **fields)))


@given(prefill=PREFILLS)
def test_an_answer_goes_on_exactly_where_the_last_words_end(prefill: str) -> None:
    assert text_of(prefill) == BEFORE + prefill


@given(prefill=PREFILLS)
def test_so_it_does_where_the_template_trims(prefill: str) -> None:
    assert text_of(prefill, TRIMS) == "[user]hi[end]\n[assistant]" + prefill


@given(prefill=PREFILLS)
def test_the_last_of_several_parts_is_the_one_that_goes_on(prefill: str) -> None:
    parts = [{"type": "text", "text": text} for text in ("One", prefill)]
    assert text_of(parts) == f"{BEFORE}One\n{prefill}"


def test_without_prefill_a_last_message_is_a_whole_one_unless_a_request_says_so() -> None:
    conversations = Conversations(ChatTemplate("chatml"), FakeVocab(300), prefill=False)
    messages = [ASKED, {"role": "assistant", "content": "It"}]

    def text(**fields: Any) -> str:
        return conversations.text(chat_of(TemplateFields(messages=messages, **fields)))

    assert text() == f"{BEFORE}It<|im_end|>\n<|im_start|>assistant\n"
    assert text(continue_final_message=True) == BEFORE + "It"


def test_values_of_the_server_are_those_that_a_request_does_not_have() -> None:
    source = "{{ messages[0].content }}{{ a }}{{ reasoning_effort }}"
    values = {"a": "1", "reasoning_effort": "low"}
    conversations = Conversations(ChatTemplate(source), FakeVocab(300), values=values)

    def text(**fields: Any) -> str:
        return conversations.text(chat_of(TemplateFields(messages=[ASKED], **fields)))

    assert text() == "hi1low"
    assert text(reasoning_effort="high") == "hi1high"
    said = {"a": "2", "reasoning_effort": "most"}
    assert text(reasoning_effort="high", chat_template_kwargs=said) == "hi2most"


OPENS = "{{ messages[0].content }}<think>{% if enable_thinking is false %}!{% endif %}"


@pytest.mark.parametrize(
    ("thinks", "kwargs", "end"),
    [
        (None, {}, "<think>"),
        (True, {}, "<think>"),
        (False, {}, "<think>!"),
        (False, {"enable_thinking": True}, "<think>"),
        (None, {"enable_thinking": False}, "<think>!"),
    ],
)
def test_a_server_says_whether_models_think(
    thinks: bool | None, kwargs: dict[str, Any], end: str
) -> None:
    conversations = Conversations(ChatTemplate(OPENS), FakeVocab(300), thinks=thinks)
    body = TemplateFields(messages=[ASKED], chat_template_kwargs=kwargs)
    assert conversations.text(chat_of(body)) == "hi" + end


@pytest.mark.parametrize("thinks", [None, True, False])
def test_thoughts_that_a_template_opens_anyway_are_closed(thinks: bool | None) -> None:
    source = "{{ messages[0].content }}{% if add_generation_prompt %}<think>\n{% endif %}"
    conversations = Conversations(ChatTemplate(source), FakeVocab(300), thinks=thinks)
    text = conversations.text(chat_of(TemplateFields(messages=[ASKED])))
    assert text == "hi<think>\n" + ("</think>" if thinks is False else "")


@pytest.mark.parametrize(
    ("server", "asked", "apart"),
    [
        (True, None, True),
        (False, None, False),
        (False, "deepseek", True),
        (False, "auto", True),
        (True, "none", False),
    ],
)
def test_a_server_says_where_thoughts_go(server: bool, asked: Any, apart: bool) -> None:
    conversations = Conversations(ChatTemplate(OPENS), FakeVocab(300), thoughts_apart=server)
    body = TemplateFields(messages=[ASKED], reasoning_format=asked)
    assert (conversations.plan(chat_of(body)).thoughts is not None) is apart


def test_what_the_template_makes_of_thoughts_stays() -> None:
    assert text_of("<think>so</think>It", THINKS) == "[user]hi[end][assistant]<think>so</think>It"
    assert text_of("It", THINKS) == "[user]hi[end][assistant]<think></think>It"


def test_the_starts_are_those_of_the_whole_conversation() -> None:
    conversations = Conversations(ChatTemplate("chatml"), FakeVocab(300))
    messages = [ASKED, {"role": "assistant", "content": "<"}]
    prompt = conversations.prompt(chat_of(TemplateFields(messages=messages)))
    assert prompt.starts == (1,), "after the token that begins every prompt"


def test_a_template_that_does_not_show_the_last_message_is_told() -> None:
    with pytest.raises(Exception, match="does not show the last message"):
        text_of("x", "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")


WELL = {"type": "text", "text": "Well"}
NOTHING = {"type": "text", "text": ""}


@pytest.mark.parametrize("content", [[WELL], [WELL, NOTHING], [NOTHING, WELL, NOTHING, NOTHING]])
def test_empty_texts_at_the_end_are_no_end(content: list[dict[str, str]]) -> None:
    assert text_of(content).strip().endswith("Well")


@pytest.mark.parametrize("content", [None, "", [], [NOTHING]])
def test_a_message_with_nothing_in_it_begins_an_answer(content: Any) -> None:
    assert text_of(content) == BEFORE


@pytest.mark.parametrize(
    "last",
    [{"type": "image_url", "image_url": {"url": "data:"}}, {"type": "text"}, "Well", 7, None],
)
def test_what_was_said_is_not_dropped_where_something_else_follows(last: Any) -> None:
    with pytest.raises(ApiError, match=r"'messages\.1\.content\.1' is no text") as raised:
        text_of([WELL, last])
    assert raised.value.code == 400
