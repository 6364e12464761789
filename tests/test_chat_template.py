"""Chat templates: what they write, what they refuse, where user messages start, what they cost."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamakeep.chat_template import BUILT_IN, ChatTemplate, token_starts
from llamakeep.errors import InvalidValue, ModelError, TemplateError
from llamakeep.template_sandbox import SOURCE_CHARS

if TYPE_CHECKING:
    from llama_cpp import Llama

TEMPLATES = Path(__file__).parent / "data" / "templates"
FAMILIES = ("chatml", "llama3", "mistral", "gemma", "phi", "parts")
MERGES_SYSTEM = ("mistral", "gemma")
HI = [{"role": "user", "content": "hi"}]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who?"},
    {"role": "assistant", "content": "She."},
    {"role": "user", "content": "When?"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def load(family: str, **options: Any) -> ChatTemplate:
    source = (TEMPLATES / f"{family}.jinja").read_text()
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>", **options)


@pytest.mark.parametrize(
    ("family", "text"),
    [
        (
            "chatml",
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWho?<|im_end|>\n"
            "<|im_start|>assistant\nShe.<|im_end|>\n<|im_start|>user\nWhen?<|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
        (
            "llama3",
            "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nWho?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nShe.<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nWhen?<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        ("mistral", "<s>[INST] Be brief.\n\nWho? [/INST] She.</s>[INST] When? [/INST]"),
        (
            "gemma",
            "<s><start_of_turn>user\nBe brief.\n\nWho?<end_of_turn>\n<start_of_turn>model\n"
            "She.<end_of_turn>\n<start_of_turn>user\nWhen?<end_of_turn>\n<start_of_turn>model\n",
        ),
        (
            "phi",
            "<|system|>\nBe brief.<|end|>\n<|user|>\nWho?<|end|>\n<|assistant|>\nShe.<|end|>\n"
            "<|user|>\nWhen?<|end|>\n<|assistant|>\n",
        ),
        (
            "parts",
            "<system>Be brief.</system>\n<user>Who?</user>\n<assistant>She.</assistant>\n"
            "<user>When?</user>\n<assistant>",
        ),
    ],
)
def test_a_chat_is_written_as_its_template_has_it(family: str, text: str) -> None:
    assert load(family).render(CHAT) == text
    assert load(family).render_chat(CHAT).text == text


def test_the_template_of_smollm2_is_rendered(
    smollm2_path: Path, make_llama: Callable[..., Llama]
) -> None:
    llm = make_llama(smollm2_path, vocab_only=True)
    template = ChatTemplate(llm.metadata["tokenizer.chat_template"])
    rendered = template.render_chat(HI)
    before = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n"
    )
    assert rendered.text == before + "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert rendered.starts == (len(before),)

    def tokenize(text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        return llm.tokenize(text.encode(), add_bos=add_special, special=parse_special)

    rendered = template.render_chat(CHAT)
    tokens, starts = token_starts(rendered.text, rendered.starts, tokenize)
    whole = tokenize(rendered.text, add_special=True, parse_special=True)
    assert tokens.tolist() == whole
    assert len(starts) == 2
    for start in starts:
        assert llm.detokenize(whole[start : start + 3], special=True) == b"<|im_start|>user\n"


def test_a_model_without_template_is_told_what_to_do(
    gemma3_path: Path, make_llama: Callable[..., Llama]
) -> None:
    llm = make_llama(gemma3_path, vocab_only=True)
    with pytest.raises(ModelError, match=r"no chat template: .*--chat-template-file"):
        ChatTemplate(llm.metadata.get("tokenizer.chat_template"))


@pytest.mark.parametrize("source", [None, "", " \n"])
def test_no_template_is_an_error_of_the_model(source: str | None) -> None:
    with pytest.raises(ModelError, match="no chat template"):
        ChatTemplate(source)


def test_a_template_may_be_named() -> None:
    assert "chatml" in BUILT_IN
    assert ChatTemplate("chatml").render(CHAT) == load("chatml").render(CHAT)


def test_what_a_template_refuses_is_an_error_in_its_words() -> None:
    with pytest.raises(TemplateError, match=r"\AConversation roles must alternate user/assist"):
        load("mistral").render([*HI, *HI])


def test_wrong_syntax_is_an_error_with_its_line() -> None:
    with pytest.raises(TemplateError, match="line 3: "):
        ChatTemplate("\n\n{% for %}")


def test_a_failing_template_is_an_error_with_the_reason() -> None:
    with pytest.raises(TemplateError, match="'nothing' is undefined"):
        ChatTemplate("{{ nothing.at_all }}").render(HI)


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_of_text_are_written_as_text(family: str) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    text = load(family).render([{"role": "user", "content": parts}])
    between = "" if family in {"gemma", "parts"} else "\n"  # these two know parts
    assert f"one{between}two" in text


@pytest.mark.parametrize("kind", ["image_url", "input_audio"])
def test_other_parts_are_an_error_that_names_them(kind: str) -> None:
    message = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": kind}]}
    with pytest.raises(InvalidValue, match=rf"messages\[0\]\.content\[1\] is of type '{kind}'"):
        load("gemma").render([message])


@pytest.mark.parametrize(
    "messages",
    [[], "hi", [1], [{"content": "hi"}], [{"role": "user"}], [{"role": "user", "content": 1}]],
)
def test_what_is_no_message_is_an_error(messages: Any) -> None:
    with pytest.raises(InvalidValue, match="messages"):
        load("chatml").render(messages)


@pytest.mark.parametrize("arguments", ['{"a": "ä<"}', {"a": "ä<"}])
def test_tools_and_their_calls_are_written(arguments: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": "tool", "content": "3", "tool_call_id": "1"}
    text = load("chatml").render([*HI, answer, result], tools=TOOLS)
    assert '<tool_call>add {"a": "ä<"}</tool_call><|im_end|>\n<|im_start|>tool\n3<|im_end|>' in text
    assert '"function": {"name": "add", "parameters": {"type": "object"}}}\n</tools>' in text


def test_arguments_stay_text_where_a_template_writes_them_as_they_are() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.arguments }}{% endfor %}{% endfor %}"
    )
    for arguments in ('{"a": 1}', {"a": 1}):
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        assert template.render([{"role": "assistant", "tool_calls": [call]}]) == '{"a": 1}'


def test_variables_come_from_the_caller_and_the_clock() -> None:
    source = "{{ mood }} {{ strftime_now('%d %b %Y') }} {{ eos_token }}"
    template = ChatTemplate(source, eos_token="</s>", now=lambda: datetime(2024, 2, 29))
    assert template.render(HI, extra={"mood": "calm"}) == "calm 29 Feb 2024 </s>"
    for name in ("messages", "raise_exception", "bos_token"):
        with pytest.raises(InvalidValue, match=name):
            template.render(HI, extra={name: 1})


def test_a_template_may_ask_for_the_day_as_llama_cpp_tells_it() -> None:
    source = "{{ date_string }}, {{ datetime }}{{ ', never' if day is defined }}"
    template = ChatTemplate(source, now=lambda: datetime(2024, 2, 29))
    assert template.render(HI) == "29 Feb 2024, Feb 29 2024"
    assert template.render(HI, extra={"date_string": "today"}) == "today, Feb 29 2024"
    assert template.render_chat(HI).text == template.render(HI)


def test_blocks_and_loop_controls_work_as_with_hugging_face() -> None:
    source = "{% for m in 'ab' %}\n    {% if loop.last %}\n{% break %}\n{% endif %}\n{{ m }}\n"
    assert ChatTemplate(source + "{% endfor %}\n").render(HI) == "a\n"
    assert ChatTemplate("{% generation %}x{% endgeneration %}").render(HI) == "x"


def doubling(first: str, step: str, after: str = "") -> str:
    return (
        f"{{% set ns = namespace(x={first}) %}}{{% for i in range(99) %}}{{% set ns.x = {step} %}}"
        f"{{% endfor %}}{{{{ {after or 1} }}}}"
    )


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**9) %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}out{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
        "{{ 'a' * 10**10 }}",
        "{{ 10 ** (10 ** 10) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ 'a'.ljust(10**10) }}",
        "{{ 'a'|center(10**10) }}",
        "{{ 'a\n'|indent(10**10) }}",
        "{{ 5|round(-10**9) }}",
        "{{ ('b' * 100000)|join('a' * 100000) }}",
        doubling("3", "ns.x * ns.x"),
        doubling("'a'", "ns.x + ns.x"),
        doubling("'a'", "ns.x ~ ns.x"),
        doubling("'a' * 9", "ns.x.replace('a', 'aa')"),
        doubling("[1]", "ns.x + ns.x"),
        doubling("[1]", "[ns.x, ns.x]", "ns.x"),
        doubling("[1]", "[ns.x, ns.x]", "ns.x|tojson"),
        doubling("[1]", "[ns.x, ns.x]", "[ns.x] == [ns.x + []]"),
        doubling("(1,)", "(ns.x, ns.x)", "{ns.x: 1}"),
        "{% set s = 'a' * 4000000 %}" + doubling("[]", "ns.x + [s[1:]]"),
        "{% for x in 'ab' %}" * 60 + "{% endfor %}" * 60,
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "x" * (SOURCE_CHARS + 1),
    ],
)
def test_a_template_that_would_not_end_is_an_error(source: str) -> None:
    clock = iter(range(10**9))  # each look at it is a second later
    with pytest.raises(TemplateError):
        ChatTemplate(source, clock=lambda: next(clock) / 4).render(HI)


@pytest.mark.parametrize(
    "expression",
    [
        "''.__class__.__mro__",
        "messages.__class__",
        "messages['__class__']",
        "'{0.__class__.__mro__}'.format('')",
        "raise_exception.__globals__",
        "strftime_now.__globals__['METER']",
        "(messages|map('string')).gi_frame",
        "self._TemplateReference__context",
        "messages.append(1)",
        "messages[0].update({'a': 1})",
    ],
)
def test_internals_of_python_are_out_of_reach(expression: str) -> None:
    with pytest.raises(TemplateError, match=r"unsafe|undefined|access"):
        ChatTemplate(f"{{{{ {expression}.x.y }}}}").render(HI)


def test_a_long_chat_is_no_hostile_one() -> None:
    turns = [{"role": role, "content": "word " * 999} for role in ("user", "assistant")] * 200
    rendered = load("chatml").render_chat(turns)
    assert len(rendered.text) > 1_900_000
    assert len(rendered.starts) == 200


def test_the_bos_that_the_vocabulary_adds_is_not_written_twice() -> None:
    kept, dropped = load("llama3").render_chat(CHAT), load("llama3", add_bos=True).render_chat(CHAT)
    assert kept.text == "<s>" + dropped.text
    assert [start - 3 for start in kept.starts] == list(dropped.starts)
    assert load("llama3", add_bos=True).render(CHAT) == dropped.text
    for rendered in (kept, dropped):
        tokens, starts = token_starts(rendered.text, rendered.starts, Words(bos=True))
        assert tokens.tolist().count(Words.id("<s>")) == 1
        assert [tokens[start] for start in starts] == [Words.id("<|start_header_id|>")] * 2


class Words:
    """Tokenizes like a byte pair encoding: a space goes with the word behind it."""

    pieces: list[str] = []  # noqa: RUF012 - shared on purpose: ids mean the same in all tests
    pattern = re.compile(r"<[^<>\s]*>|\[/?INST\]| ?\w+|\n+|.", re.DOTALL)

    def __init__(self, *, bos: bool = False, prefix: str = "") -> None:
        self.bos = bos
        self.prefix = prefix
        self.chars = 0

    @classmethod
    def id(cls, piece: str) -> int:
        if piece not in cls.pieces:
            cls.pieces.append(piece)
        return cls.pieces.index(piece)

    def __call__(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        assert parse_special
        self.chars += len(text)
        found = self.pattern.findall(self.prefix + text if text else "")
        return [self.id(piece) for piece in (["<s>"] if add_special and self.bos else []) + found]

    def text(self, tokens: Any) -> str:
        return "".join(self.pieces[token] for token in tokens)


TEXTS = st.text("ab <|>\n", max_size=6).map(str.strip) | st.sampled_from(
    ["user", "<|im_start|>user\n", "a<|user|>\nb", "[INST] a", "<start_of_turn>user\na", "<user>"]
)


@st.composite
def chats(draw: st.DrawFn) -> list[dict[str, str]]:
    n_turns = draw(st.integers(1, 4))
    chat = [{"role": "system", "content": draw(TEXTS)}] if draw(st.booleans()) else []
    for _ in range(n_turns):
        chat.append({"role": "user", "content": draw(TEXTS)})
        chat.append({"role": "assistant", "content": draw(TEXTS)})
    return chat[:-1]


COMPILED = {family: load(family) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
@given(chat=chats(), bos=st.booleans())
def test_each_start_is_where_the_chat_cut_there_ends(
    family: str, chat: list[dict[str, str]], bos: bool
) -> None:
    template = COMPILED[family]
    rendered = template.render_chat(chat)
    assert rendered.text == template.render(chat)
    users = [index for index, message in enumerate(chat) if message["role"] == "user"]
    assert len(rendered.starts) == len(users)
    assert list(rendered.starts) == sorted(set(rendered.starts))
    for index, start in zip(users, rendered.starts, strict=True):
        if index and not (index == 1 and users[0] == 1):
            cut = template.render(chat[:index], add_generation_prompt=False)
            assert rendered.text[:start] == (cut.removesuffix("</s>") if family == "phi" else cut)

    tokenize = Words(bos=bos)
    tokens, starts = token_starts(rendered.text, rendered.starts, tokenize)
    assert tokenize.chars <= 2 * len(rendered.text)
    own = family in {"llama3", "mistral", "gemma"}
    whole = Words()(rendered.text, add_special=False, parse_special=True)
    assert tokens.tolist() == [*([Words.id("<s>")] if bos and not own else []), *whole]
    written = tokenize.text(tokens)
    shift = len(written) - len(rendered.text)
    at = [len(tokenize.text(tokens[:start])) - shift for start in starts]
    assert at == list(rendered.starts) or "<" in "".join(m["content"] for m in chat)
    assert all(mine <= its for mine, its in zip(at, rendered.starts, strict=False))


def test_a_start_inside_a_token_steps_back_to_before_it() -> None:
    tokens, starts = token_starts("one two three", [5, 7], Words())
    assert Words().text(tokens[: starts[0]]) == "one"
    assert starts == (1, 2)


def test_a_tokenizer_whose_pieces_never_fit_costs_no_more_than_a_few_texts() -> None:
    tokenize = Words(prefix=" ")  # as sentencepiece does before a text's first word
    text = "word, " * 500
    tokens, starts = token_starts(text, range(6, len(text), 6), tokenize)
    assert tokens.tolist() == tokenize(text, add_special=True, parse_special=True)
    assert tokenize.chars <= 6 * len(text) + len(text)
    assert list(starts) == sorted(set(starts))


def test_offsets_must_ascend_inside_the_text() -> None:
    for offsets in ([3, 2], [-1], [4]):
        with pytest.raises(InvalidValue, match="offsets"):
            token_starts("abc", offsets, Words())


def test_no_offsets_cost_one_tokenization() -> None:
    tokenize = Words()
    tokens, starts = token_starts("one two", [], tokenize)
    assert (tokens.dtype, starts, tokenize.chars) == (np.int32, (), len("one two"))
