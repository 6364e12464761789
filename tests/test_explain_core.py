"""What explanations are made of: positions, tokens, what an engine knows, and arbitrary input."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamakeep.errors import InvalidValue, TokenError
from llamakeep.explain import (
    ADVICE,
    Around,
    Circumstances,
    Evicted,
    Explanation,
    Kind,
    Side,
    explain,
)
from llamakeep.explain.divergence import NOWHERE, SHOWN_CHARS, same_text_other_tokens
from llamakeep.explain.kinds import EDITED_MEANING, MEANING, TELLS_NO_TEXT
from llamakeep.explain.ordering import same_content, too_deep
from llamakeep.explain.reasoning import without_reasoning
from llamakeep.fingerprint import Difference, Namespace
from llamakeep.runtime.fake_text import FakeVocab
from llamakeep.states import Reuse
from llamakeep.texts import common_text
from llamakeep.tokens import as_tokens
from tests.explain_pairs import FIX, HISTORY, SYSTEM, chat, chatml, said, tool

VOCAB = FakeVocab(400)


def tokens_of(text: str, *, special: bool = True) -> Any:
    return VOCAB.tokenize(text, add_special=False, parse_special=special)


def brute_force(one: Any, other: Any) -> int:
    n = min(len(one), len(other))
    return next((i for i in range(n) if one[i] != other[i]), n)


# -- positions -------------------------------------------------------------------------------------

LETTERS = st.text(alphabet="ab \n{}[]\"':,0123456789<>|-", max_size=60)


@given(shared=LETTERS, one=LETTERS, other=LETTERS)
def test_position_in_a_text_equals_brute_force(shared: str, one: str, other: str) -> None:
    before, after = shared + one, shared + other
    found = explain(before, after)
    at = brute_force(before, after)
    assert found.char_index == at
    assert found.around.shared == after[max(0, at - SHOWN_CHARS) : at]
    assert found.around.before == before[at : at + SHOWN_CHARS]
    assert found.around.after == after[at : at + SHOWN_CHARS]


@given(length=st.integers(0, 20_000), one=LETTERS, other=LETTERS)
def test_long_common_texts(length: int, one: str, other: str) -> None:
    before, after = "x" * length + one, "x" * length + other
    assert common_text(before, after) == brute_force(before, after)


IDS = st.lists(st.integers(0, 3), max_size=40)


@given(shared=IDS, one=IDS, other=IDS)
def test_position_in_tokens_equals_brute_force(
    shared: list[int], one: list[int], other: list[int]
) -> None:
    before, after = shared + one, shared + other
    found = explain(before, after)
    assert (found.token_index, found.token_range) == (brute_force(before, after), 1)
    if len(before) < len(after) and after[: len(before)] == before:
        assert found.kind is Kind.NEW_TEXT


@given(shared=LETTERS, one=LETTERS, other=LETTERS)
def test_tokens_are_explained_as_their_text_is(shared: str, one: str, other: str) -> None:
    before, after = shared + one, shared + other
    by_tokens = explain(tokens_of(before), tokens_of(after), vocab=VOCAB)
    by_text = explain(before, after)
    assert by_tokens.token_index == brute_force(tokens_of(before), tokens_of(after))
    if Kind.TOKENIZATION not in (by_tokens.kind,):
        assert by_tokens.kind is by_text.kind


def test_what_is_shown_is_bounded() -> None:
    found = explain("a" * 5000 + "b" * 5000, "a" * 5000 + "c" * 5000)
    assert found.around == Around("a" * 80, "b" * 80, "c" * 80)
    assert len(json.dumps(found.to_json())) < 4096


# -- arbitrary input -------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=12),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["role", "content", "type", "text", "id", "function", "name", "arguments"]
            )
            | st.text(max_size=5),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)
BODIES = st.fixed_dictionaries(
    {"messages": st.lists(JSON, max_size=5)},
    optional={
        "tools": JSON,
        "system": JSON,
        "cache_salt": JSON,
        "chat_template_kwargs": JSON,
        "thinking": JSON,
        "output_config": JSON,
    },
)


@settings(max_examples=300)
@given(before=BODIES, after=BODIES)
def test_no_body_is_too_strange(before: dict[str, Any], after: dict[str, Any]) -> None:
    found = explain(before, after)
    assert found.kind in Kind
    assert Explanation.from_json(json.loads(json.dumps(found.to_json()))) == found
    assert explain(after, copy_of(after)).kind is Kind.SAME


RESPONSES = st.fixed_dictionaries(
    {"input": st.text(max_size=9) | st.lists(JSON, max_size=5)},
    optional={"tools": JSON, "instructions": JSON, "reasoning": JSON, "text": JSON},
)
ITEMS = st.fixed_dictionaries(
    {"type": st.sampled_from(["message", "reasoning", "function_call", "function_call_output"])},
    optional=dict.fromkeys(("role", "content", "call_id", "name", "output", "summary"), JSON),
)


@settings(max_examples=300)
@given(before=RESPONSES, after=st.fixed_dictionaries({"input": st.lists(ITEMS, max_size=6)}))
def test_no_items_are_too_strange(before: dict[str, Any], after: dict[str, Any]) -> None:
    for one, other in ((before, after), (after, before)):
        found = explain(one, other)
        assert found.kind in Kind
        assert explain(one, copy_of(one)).kind is Kind.SAME


@settings(max_examples=300)
@given(before=JSON, after=JSON)
def test_no_prompt_is_too_strange(before: Any, after: Any) -> None:
    if all(not isinstance(each, list) for each in (before, after)):
        assert explain({"prompt": before}, {"prompt": after}).kind in Kind


def copy_of(value: Any) -> Any:
    return json.loads(json.dumps(value))


@given(before=st.text(max_size=200), after=st.text(max_size=200))
def test_no_text_is_too_strange(before: str, after: str) -> None:
    assert explain(before, after).kind in Kind
    assert explain(before, before).kind is Kind.SAME


@given(
    words=st.lists(st.text("bcdgk", min_size=1, max_size=6), min_size=2, max_size=40),
    data=st.data(),
)
def test_words_are_no_dates_and_no_numbers(words: list[str], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(words) - 1))
    other = data.draw(st.text("bcdgk", min_size=1, max_size=6))
    changed = [*words[:at], other, *words[at + 1 :]]
    found = explain(" ".join(words), " ".join(changed))
    named = {Kind.SAME, Kind.NEW_TEXT, Kind.FIRST_SEEN, Kind.UNKNOWN}
    assert found.kind in named
    assert (found.kind is Kind.SAME) == (" ".join(words).startswith(" ".join(changed)))


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_text_with_deep_brackets(opening: str) -> None:
    deep = opening * 50_000
    assert explain(f"{deep} 1", f"{deep} 2").kind is Kind.UNKNOWN


def test_deep_bodies_are_refused() -> None:
    deep: Any = "x"
    for _ in range(200):
        deep = [deep]
    body = {"messages": [{"role": "user", "content": deep}]}
    with pytest.raises(InvalidValue, match="nested more than 128 times"):
        explain(body, body | {"tools": []})


@pytest.mark.parametrize("body", [{}, {"model": "x"}, {"messages": "none"}])
def test_what_is_no_request_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue, match="neither messages nor input nor prompt"):
        explain(body, body)


def test_what_are_no_tokens_is_refused() -> None:
    with pytest.raises(TokenError, match="-1"):
        explain([1, -1], [1, 2])


# -- reasoning ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("<think>a</think>\n\nb", "b"),
        ("a</think>\nb", "b"),
        ("a <think>b</think> c <think>d</think> e", "a c e"),
        ("[THINK]a[/THINK]b", "b"),
        ("<think>a", "<think>a"),
        ("<think>" * 50_000 + "a", "<think>" * 50_000 + "a"),
        ("<think><think>a</think>b", "b"),
        ("<|channel|>analysis<|message|>a<|end|><|channel|>final<|message|>b", "b"),
        ("I think so.", "I think so."),
    ],
)
def test_what_is_left_without_reasoning(text: str, left: str) -> None:
    assert without_reasoning(text) == left


# -- tokens ----------------------------------------------------------------------------------------


def test_the_same_text_in_other_tokens() -> None:
    text = "<|im_start|>user\nHello<|im_end|>\n"
    before = tokens_of(text)
    after = tokens_of(text, special=False)
    found = explain(before, after, vocab=VOCAB)
    assert found.kind is Kind.TOKENIZATION
    assert found.token_index == 0
    assert found.around.before[:12] == "<|im_start|>"
    found = explain(Side(before, text), Side(after, text + "And more."))
    assert found.kind is Kind.TOKENIZATION


WORDS = {1: b"Hel", 2: b"lo", 3: b"Hello", 4: b" wor", 5: b" world", 6: b"!", 7: b" w", 8: b"or"}


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        ([1, 2, 6], [3, 6, 5], True),  # an answer, tokenized anew
        ([1, 2], [3, 5], True),
        ([4], [5, 6], True),  # cut off in a word, and written out
        ([7, 8, 6], [4, 6], True),
        ([4, 6], [5, 6], False),  # the text differs there
        ([3], [6], False),
        ([7, 8, 6], [4, 2], False),  # it may only follow from the text behind it
        ([7, 8, 6], [4, 6, 2], True),
        ([], [1], False),
    ],
)
def test_tokens_that_spell_the_same(before: list[int], after: list[int], same: bool) -> None:
    assert same_text_other_tokens(before, after, WORDS.__getitem__) is same


def test_a_token_that_only_follows_from_another_text_is_no_boundary() -> None:
    pieces = {1: b".b", 2: b"ar1", 3: b".bar", 4: b"2"}
    assert not same_text_other_tokens([1, 2], [3, 4], pieces.__getitem__)


def test_tokens_with_a_text_and_a_body() -> None:
    def side(date: str) -> Side:
        body = chat(f"Today is {date}. {SYSTEM}", [{"role": "user", "content": "Hello"}])
        text = chatml(("system", f"Today is {date}. {SYSTEM}"), ("user", "Hello"))
        return Side(tokens_of(text), text, body)

    found = explain(side("2025-03-01"), side("2025-03-02"))
    assert (found.kind, found.part) == (Kind.DATE, "messages[0].content")
    before = side("2025-03-01").tokens
    assert before is not None
    assert found.token_index == brute_force(before, side("2025-03-02").tokens)
    assert found.lost_tokens == before.size - found.token_index


def test_what_the_template_leaves_out_is_no_difference() -> None:
    text = chatml(("user", "Hello"))
    calls = [{"role": "user", "content": "Hello", "name": name} for name in ("a1", "b2")]
    one, other = (Side(tokens_of(text), text, {"messages": [call]}) for call in calls)
    assert explain(one, other).kind is Kind.SAME


# -- what an engine knows --------------------------------------------------------------------------

DATED = (f"{SYSTEM} Today is 2025-03-01. Go.", f"{SYSTEM} Today is 2025-03-02. Go.")
MODEL = Namespace("5" * 64, "0" * 64, 256, "attention", context={"type_k": 1})
Q8 = Namespace("5" * 64, "0" * 64, 256, "attention", context={"type_k": 8})
SALTED = Namespace("5" * 64, "0" * 64, 256, "attention", context={"type_k": 1}, salt="s")


def test_evicted() -> None:
    known = Circumstances(
        prompt_tokens=900,
        reused_tokens=64,
        tier="ram",
        shared_tokens=64,
        evicted=Evicted("lru", 800),
    )
    found = explain(None, [1] * 900, circumstances=known)
    assert (found.kind, found.policy, found.lost_tokens) == (Kind.EVICTED, "lru", 736)
    assert (found.reused_tokens, found.evaluated_tokens, found.tier) == (64, 836, "ram")
    assert "lru" in found.reason
    assert "736 tokens" in found.reason
    found = explain(*DATED, circumstances=known)
    assert (found.kind, found.also) == (Kind.EVICTED, (Kind.DATE,))


@pytest.mark.parametrize(
    ("change", "also", "words"),
    [
        ({"content": "Why does the link step fail?"}, (Kind.UNKNOWN,), "was edited"),
        ({"content": "[10:15:09] Why does it fail?"}, (Kind.DATE,), "a date or a time changed"),
    ],
)
def test_what_was_evicted_does_not_hide_what_the_client_changed(
    change: dict[str, Any], also: tuple[Kind, ...], words: str
) -> None:
    history = copy_of(HISTORY)
    history[0]["content"] = "[10:15:00] Why does it fail?"
    before = chat(SYSTEM, history, FIX)
    after = copy_of(before)
    after["messages"][1].update(change)
    known = Circumstances(316, 0, "none", shared_tokens=0, evicted=Evicted("lru", 48))
    found = explain(before, after, circumstances=known)
    assert (found.kind, found.lost_tokens, found.also) == (Kind.EVICTED, 48, also)
    assert "268 more were read because" in found.reason
    assert words in found.reason
    assert explain(before, before, circumstances=known).also == ()


def test_what_is_not_kept_any_more_is_told() -> None:
    known = Circumstances(900, 0, "none", shared_tokens=0)
    for after in ([1] * 900, [1] * 950):
        found = explain([1] * 900, after, circumstances=known)
        assert (found.kind, found.lost_tokens) == (Kind.UNKNOWN, 900)
        assert "were not kept any more" in found.reason
        assert "cache was emptied" in found.advice
        assert found.without_texts() == found


# -- settings, advice and roles --------------------------------------------------------------------


def test_a_setting_is_no_cause_where_texts_part_behind_it() -> None:
    question = [said("user", "Why?"), said("assistant", "Because of the empty list of files.")]
    texts = [chatml(*((m["role"], m["content"]) for m in (said("system", SYSTEM), *question)))]
    edited = [question[0], said("assistant", "Because of a list of files that is empty.")]
    more = [*edited, said("user", "And?")]
    texts.append(chatml(*((m["role"], m["content"]) for m in (said("system", SYSTEM), *more))))
    one = chat(SYSTEM, question, chat_template_kwargs={"enable_thinking": True})
    other = chat(SYSTEM, more)
    bodies = explain(one, other)
    assert (bodies.part, "not given" in bodies.reason) == ("chat_template_kwargs", True)
    assert bodies.advice.startswith("Send the same chat_template_kwargs")
    found = explain(Side(text=texts[0], body=one), Side(text=texts[1], body=other))
    assert found.part == "messages[2].content"
    longer = texts[0] + "Fine."
    found = explain(Side(text=texts[0], body=one), Side(text=longer, body=chat(SYSTEM, question)))
    assert (found.kind, found.part) == (Kind.NEW_TEXT, "")


def test_a_setting_is_the_cause_where_nothing_else_differs() -> None:
    text = chatml(("system", SYSTEM), ("user", "Why?"))
    one = chat(SYSTEM, [said("user", "Why?")])
    other = one | {"chat_template_kwargs": {"enable_thinking": False}}
    found = explain(
        Side(text=text + "<think>\n", body=one), Side(text=text + "<none>\n", body=other)
    )
    assert found.part == "chat_template_kwargs"


def test_a_body_that_is_the_same_does_not_hide_texts_that_differ() -> None:
    body = {"prompt": ["About cats.", "And dogs."]}
    found = explain(Side(text="About cats.", body=body), Side(text="And dogs.", body=body))
    assert (found.kind, found.char_index) == (Kind.UNKNOWN, 1)


def test_what_is_not_proven_has_a_next_step() -> None:
    history = copy_of(HISTORY)
    history[0]["content"] = "Why is it slow?"
    edited = explain(chat(SYSTEM, None, FIX), chat(SYSTEM, history, FIX, FIX))
    assert "an earlier message was edited" in edited.reason
    assert edited.advice.startswith("Leave earlier messages")
    untold = edited.without_texts()
    assert (untold.reason[:30], untold.around) == ("an earlier message was edited,", NOWHERE)
    assert untold.advice == edited.advice
    history = copy_of(HISTORY)
    history[2]["content"] = "It works."
    assert "result of a tool" in explain(chat(), chat(SYSTEM, history, FIX)).reason
    tokens = explain([1, 2, 3, 4], [1, 2, 4, 4])
    assert "--model FILE" in tokens.advice
    assert "--explain-texts" in replace(tokens, request_id="7").advice
    texts = explain("Dear Ada, we are glad.", "Dear Bob, we are glad.")
    assert texts.advice == "Compare the two texts where they part."


def test_roles_that_a_client_made_up_are_not_told() -> None:
    sides = [chatml(("system", SYSTEM), ("SECRETWORD", word), ("user", "x")) for word in "ab"]
    found = explain(*sides)
    assert (found.part, "secretword" in found.reason.lower()) == ("message 1 (?)", False)
    other = chatml(("system", SYSTEM), ("OTHERWORD", "a"), ("user", "x"))
    assert "word" not in explain(sides[0], other).reason.lower()


def test_order_says_which_and_quotes_each() -> None:
    tools = [tool("f", a={"type": "string"}), tool("g", b={"type": "string"})]
    found = explain(chat(tools=tools), chat(tools=tools[::-1]))
    assert found.reason.endswith("'f' before, 'g' now")
    found = explain(chat(tools=tools), chat(tools=[dict(reversed(tools[0].items())), tools[1]]))
    assert found.reason.endswith("'type, function' before, 'function, type' now")


def test_white_space_is_escaped_once() -> None:
    found = explain(chat(f"{SYSTEM}\n\nBe kind."), chat(f"{SYSTEM}\nBe kind."))
    assert r"'\n\n' before, '\n' now" in found.reason


def test_what_was_evicted_is_no_cause_if_as_much_is_kept() -> None:
    known = Circumstances(900, 800, "ram", shared_tokens=800, evicted=Evicted("lru", 800))
    assert explain(*DATED, circumstances=known).kind is Kind.DATE


@pytest.mark.parametrize(
    ("theirs", "kind", "part", "also"),
    [
        (Q8, Kind.NAMESPACE, "context.type_k", ()),
        (SALTED, Kind.SALT, "cache_salt", ()),
        (
            Namespace("6" * 64, "0" * 64, 256, "attention", context={"type_k": 1}, salt="s"),
            Kind.NAMESPACE,
            "model",
            (Kind.SALT,),
        ),
    ],
)
def test_kept_in_another_namespace(
    theirs: Namespace, kind: Kind, part: str, also: tuple[Kind, ...]
) -> None:
    parts = tuple(MODEL.differences(theirs.describe()))
    known = Circumstances(900, 0, "none", shared_tokens=0, namespaces=parts)
    found = explain(None, [1] * 900, circumstances=known)
    assert (found.kind, found.part, found.also) == (kind, part, also)
    assert found.reason.startswith("kept with")


def test_another_namespace_is_no_cause_if_something_is_kept_in_this() -> None:
    known = Circumstances(
        900, 512, "ram", shared_tokens=512, namespaces=(Difference("model", "a", "b"),)
    )
    assert explain(*DATED, circumstances=known).kind is Kind.DATE


@pytest.mark.parametrize("nearest", [None, 256])
def test_no_checkpoint(nearest: int | None) -> None:
    known = Circumstances(
        prompt_tokens=900,
        reused_tokens=nearest or 0,
        shared_tokens=700,
        rolling=True,
        nearest_checkpoint=nearest,
    )
    found = explain(None, [1] * 900, circumstances=known)
    assert (found.kind, found.nearest_checkpoint) == (Kind.NO_CHECKPOINT, nearest)
    assert found.lost_tokens == 700 - (nearest or 0)
    assert found.token_index == 700
    assert ("nearest is at token 256" if nearest else "there is none") in found.reason
    found = explain(*DATED, circumstances=known)
    assert (found.kind, found.also) == (Kind.DATE, (Kind.NO_CHECKPOINT,))
    known = replace(known, rolling=False)
    assert explain(None, [1] * 900, circumstances=known).kind is Kind.UNKNOWN


def test_a_checkpoint_close_by_is_no_cause() -> None:
    known = Circumstances(900, 696, shared_tokens=700, stored_tokens=700, rolling=True)
    found = explain(None, [1] * 900, circumstances=known)
    assert (found.kind, found.token_index) == (Kind.NEW_TEXT, 700)


def test_first_seen() -> None:
    known = Circumstances(900, 0, "none", "first time seen", shared_tokens=0)
    assert explain(None, [1] * 900, circumstances=known).kind is Kind.FIRST_SEEN
    assert explain([2, 3], [1] * 900, circumstances=known).kind is Kind.FIRST_SEEN
    assert explain("Hello", "Goodbye", circumstances=known).kind is Kind.FIRST_SEEN


def test_what_was_sent_and_is_not_kept_is_not_first_seen() -> None:
    known = Circumstances(3, 0, "none", "mode is write", shared_tokens=0)
    found = explain([1, 2, 3], [1, 2, 3], circumstances=known)
    assert (found.kind, found.reason) == (Kind.UNKNOWN, "mode is write")


def test_all_is_known() -> None:
    known = Circumstances(900, 896, "live", shared_tokens=900)
    assert explain(None, [1] * 900, circumstances=known).kind is Kind.SAME


def test_circumstances_of_a_reuse() -> None:
    known = Circumstances.of(Reuse(64, 836, "disk", "why"), shared_tokens=70)
    assert known == Circumstances(900, 64, "disk", "why", 70)


def test_nothing_is_known() -> None:
    found = explain(None, "Hello")
    assert (found.kind, found.token_index, found.evaluated_tokens) == (Kind.UNKNOWN, None, None)
    assert found.reason


def test_circumstances_as_json() -> None:
    known = Circumstances(
        900,
        64,
        "ram",
        "new from token 64 on",
        64,
        70,
        True,
        32,
        9,
        Evicted("lru", 800),
        (Difference("context.type_k", 1, 8),),
    )
    assert Circumstances.from_json(copy_of(known.to_json())) == known
    assert Circumstances.from_json(copy_of(Circumstances().to_json())) == Circumstances()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([], "an object"),
        ({"shared_tokens": -1}, "shared_tokens"),
        ({"reused_tokens": "3"}, "reused_tokens"),
        ({"tier": 3}, "tier"),
        ({"evicted": 3}, "evicted"),
        ({"evicted": {"policy": "lru"}}, "evicted.n_tokens"),
        ({"evicted": {"n_tokens": 3}}, "evicted.policy"),
        ({"namespaces": 3}, "namespaces"),
        ({"namespaces": [3]}, r"namespaces\[0\]"),
        ({"namespaces": [{"part": None}]}, r"namespaces\[0\].part"),
    ],
)
def test_circumstances_that_are_none(value: object, said: str) -> None:
    with pytest.raises(InvalidValue, match=said):
        Circumstances.from_json(value)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (3, "an object"),
        ({}, "no kind"),
        ({"kind": "sunspots"}, "'sunspots' is no kind"),
        ({"kind": "same", "token_index": -1}, "token_index"),
        ({"kind": "same", "reason": 3}, "reason"),
        ({"kind": "same", "around": 3}, "around"),
        ({"kind": "same", "around": {"before": 3}}, "around.before"),
        ({"kind": "same", "also": 3}, "also"),
        ({"kind": "same", "also": ["sunspots"]}, "sunspots"),
        ({"kind": ["same"]}, "no kind"),
    ],
)
def test_explanations_that_are_none(value: object, said: str) -> None:
    with pytest.raises(InvalidValue, match=said):
        Explanation.from_json(value)


def test_there_is_advice_for_each_kind() -> None:
    assert set(ADVICE) == set(Kind)


# -- content ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "kind"),
    [
        ({"a": 1}, {"a": 1}, Kind.SAME),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, Kind.ORDER),
        ({"a": 1}, {"a": 1.0}, Kind.NUMBER_FORMAT),
        ({"a": 1, "b": 2}, {"b": 2.0, "a": 1}, Kind.ORDER),
        ([{"a": 1}, {"b": 1}], [{"b": 1}, {"a": 1}], None),
        (["a", "b"], ["b", "a"], None),
        ({"enum": ["a", "b"]}, {"enum": ["b", "a"]}, Kind.ORDER),
        ({"tools": [{"a": 1}, {"b": 1}]}, {"tools": [{"b": 1}, {"a": 1}]}, Kind.ORDER),
        ([1, 2], [2, 1], None),
        ([True], [1], None),
        ([2**60], [float(2**60)], None),
        ([[1]], [[1], [1]], None),
    ],
)
def test_same_content(before: Any, after: Any, kind: Kind | None) -> None:
    assert same_content(before, after) is kind


def test_too_deep() -> None:
    assert not too_deep([[[1]]], most=3)
    assert too_deep([[[1]]], most=2)
    assert not too_deep("x", most=0)


def test_arrays_are_taken() -> None:
    found = explain(as_tokens([1, 2]), np.array([1, 2, 3], np.int64))
    assert (found.kind, found.token_index) == (Kind.NEW_TEXT, 2)


# -- without texts ---------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", list(Kind))
def test_without_texts_a_reason_quotes_only_where_it_cannot(kind: Kind) -> None:
    said = Explanation(kind, "it said 'hush'", "message 2 (tool).hush[3]").without_texts()
    if kind in TELLS_NO_TEXT:
        assert said.reason == "it said 'hush'"
    else:
        assert "hush" not in said.reason
        assert said.reason == (EDITED_MEANING if kind is Kind.UNKNOWN else MEANING[kind])
    if kind not in (Kind.NAMESPACE, Kind.SALT):
        assert said.part == "message 2 (tool)"


def test_bodies_that_say_the_same_do_not_outvote_tokens_and_texts_that_differ() -> None:
    body = {"messages": [{"role": "user", "content": "Why?"}]}
    one, other = (Side(as_tokens(tokens), body=body) for tokens in ([1, 2, 3], [1, 2, 4]))
    assert explain(one, other).kind is Kind.UNKNOWN
    texts = (chatml(("user", "Why?")) + end for end in ("<think>\n", "<think>\n\n</think>\n"))
    assert explain(*(Side(text=text, body=body) for text in texts)).kind is not Kind.SAME


def test_settings_of_a_template_are_not_quoted_without_texts() -> None:
    bodies = [
        {"messages": [], "chat_template_kwargs": {"persona": persona}}
        for persona in ("hush", "hush, hush")
    ]
    found = explain(*bodies)
    assert found.kind is Kind.UNKNOWN
    assert "hush" in found.reason
    assert "hush" not in json.dumps(found.without_texts().to_json())
