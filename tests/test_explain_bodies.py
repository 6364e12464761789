"""Request bodies of each API as conversations."""

from __future__ import annotations

from typing import Any

import pytest

from llamakeep.explain import Explanation, Kind, explain
from llamakeep.explain.bodies import from_body
from tests.explain_pairs import claude

RULES = (
    "You are a careful assistant. Read a file before you edit it. Today is 2026-03-01. Be brief."
)


def thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}


def call(arguments: str, call_id: str = "call_1") -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "run", "arguments": arguments}


def spoken(text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text}]
    return {"type": "message", "role": "assistant", "content": content}


ITEMS = [
    {"role": "user", "content": "Why does the build fail?"},
    thought("I should look at the output of make."),
    call('{"command": "make", "timeout": 105}'),
    {"type": "function_call_output", "call_id": "call_1", "output": "cc: no input files"},
    spoken("The compiler was given no files."),
    {"role": "user", "content": [{"type": "input_text", "text": "Repair it, please."}]},
]


def asked(items: Any = ITEMS, **more: Any) -> dict[str, Any]:
    return {"model": "local", "instructions": RULES, "input": items, **more}


def compared(before: dict[str, Any], after: dict[str, Any]) -> Explanation:
    return explain(before, after)


def test_items_of_one_answer_are_one_message() -> None:
    found = from_body(asked())
    assert [(message.role, message.path) for message in found.messages] == [
        ("system", "instructions"),
        ("user", "input[0]"),
        ("assistant", "input[1]"),
        ("tool", "input[3]"),
        ("assistant", "input[4]"),
        ("user", "input[5]"),
    ]
    assert [leaf.what for leaf in found.messages[2].leaves] == [
        "reasoning",
        "id",
        "name",
        "arguments",
    ]


def test_an_answer_speaks_once_before_it_calls() -> None:
    items = [spoken("One."), spoken("Two."), call("{}"), thought("Hm."), thought("Well.")]
    paths = [message.path for message in from_body({"input": items}).messages]
    assert paths == ["input[0]", "input[1]"]


@pytest.mark.parametrize(
    ("before", "after", "kind", "part"),
    [
        (asked(), asked(), Kind.SAME, ""),
        (asked("Hi"), asked("Hi"), Kind.SAME, ""),
        (asked("Hi"), asked("Hello"), Kind.NEW_TEXT, "input"),
        (asked(), asked([*ITEMS, spoken("Done."), ITEMS[0]]), Kind.NEW_TEXT, "input[6]"),
        (
            asked(),
            {**asked(), "instructions": RULES.replace("03-01", "03-02")},
            Kind.DATE,
            "instructions",
        ),
        (
            asked(),
            asked([*ITEMS[:2], call('{"timeout": 105, "command": "make"}'), *ITEMS[3:]]),
            Kind.ORDER,
            "input[2].arguments",
        ),
        (
            asked(),
            asked([*ITEMS[:2], call('{"command": "make", "timeout": 105.0}'), *ITEMS[3:]]),
            Kind.NUMBER_FORMAT,
            "input[2].arguments",
        ),
        (asked(), asked([ITEMS[0], *ITEMS[2:]]), Kind.REASONING_REMOVED, "input[1]"),
        (
            asked(tools=[{"type": "function", "name": "a"}]),
            asked(tools=[{"type": "function", "name": "b"}]),
            Kind.TOOLS_CHANGED,
            "tools",
        ),
        (
            asked(reasoning={"effort": "low"}),
            asked(reasoning={"effort": "high"}),
            Kind.UNKNOWN,
            "reasoning.effort",
        ),
        (asked(reasoning={"summary": "auto"}), asked(), Kind.SAME, ""),
        (
            asked(chat_template_kwargs={"a": 1}),
            asked(chat_template_kwargs={"a": 2}),
            Kind.UNKNOWN,
            "chat_template_kwargs",
        ),
        (asked(cache_salt="a"), asked(cache_salt="b"), Kind.SALT, "cache_salt"),
        ({"instructions": "Be brief."}, {"instructions": "Be brief."}, Kind.SAME, ""),
    ],
)
def test_what_differs_between_two_responses(
    before: dict[str, Any], after: dict[str, Any], kind: Kind, part: str
) -> None:
    found = compared(before, after)
    assert (found.kind, found.part) == (kind, part), found


QUESTION = [{"role": "user", "content": "Why?"}]


@pytest.mark.parametrize(
    ("before", "after", "kind", "part"),
    [
        ({"type": "enabled", "budget_tokens": 2048}, {"type": "disabled"}, Kind.UNKNOWN, True),
        ({"type": "enabled", "budget_tokens": 2048}, {"type": "adaptive"}, Kind.SAME, False),
        ({"type": "disabled"}, {"type": "disabled"}, Kind.SAME, False),
    ],
)
def test_thinking_is_a_setting_of_the_template(
    before: Any, after: Any, kind: Kind, part: bool
) -> None:
    found = compared(
        claude(RULES, QUESTION, thinking=before), claude(RULES, QUESTION, thinking=after)
    )
    assert (found.kind, found.part) == (kind, "thinking" if part else "")


def test_effort_is_a_setting_of_the_template() -> None:
    def with_effort(effort: str) -> dict[str, Any]:
        return claude(RULES, QUESTION, output_config={"effort": effort})

    found = compared(with_effort("low"), with_effort("high"))
    assert (found.kind, found.part) == (Kind.UNKNOWN, "output_config.effort")
    assert compared(with_effort("max"), with_effort("high")).kind is Kind.SAME
    chats = [{"messages": QUESTION, "reasoning_effort": effort} for effort in ("low", "high")]
    assert compared(*chats).part == "reasoning_effort"


@pytest.mark.parametrize("blocks", [True, False])
def test_who_pays_is_no_part_of_the_prompt(blocks: bool) -> None:
    def body(number: str) -> dict[str, Any]:
        text = f"x-anthropic-billing-header: cc_version=2.1; cch={number};"
        if not blocks:
            return claude(f"{text}\n{RULES}", QUESTION)
        system = [{"type": "text", "text": each} for each in (text, RULES)]
        return claude(system, QUESTION)

    assert compared(body("fa690"), body("0c1d2")).kind is Kind.SAME
    assert len(from_body(body("fa690")).messages[0].leaves) == 1
