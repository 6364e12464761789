"""Pairs of prompts as agents and chat clients send them, and why the second is read again."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from typing import Any

from llamakeep.explain import Given, Kind
from llamakeep.tool_calls.described import described
from llamakeep.tool_calls.values import Tool

SYSTEM = (
    "You are a coding agent that works in a terminal. Be brief. Read a file before you edit it, "
    "and run the tests after each change. Never commit without being asked."
)


def tool(name: str, description: str = "", **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {
        "type": "function",
        "function": {"name": name, "description": description or name, "parameters": schema},
    }


TOOLS = [
    tool("read_file", "Reads a file.", path={"type": "string"}, limit={"type": "integer"}),
    tool("run", "Runs a command.", command={"type": "string", "description": "For bash."}),
    tool("search", "Finds text.", pattern={"type": "string"}, max_results={"default": 105}),
]


def said(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def called(name: str, arguments: str, call_id: str = "call_a1b2c3") -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return said(
        "assistant",
        None,
        tool_calls=[{"id": call_id, "type": "function", "function": function}],
    )


HISTORY = [
    said("user", "Why does the build fail?"),
    called("run", '{"command": "make", "timeout": 60}'),
    said("tool", "cc: error: no input files\nmake: *** [all] Error 1", tool_call_id="call_a1b2c3"),
    said("assistant", "The compiler was given no files: SOURCES is empty in the Makefile."),
]


def chat(
    system: str = SYSTEM, history: list[Any] | None = None, *new: Any, **more: Any
) -> dict[str, Any]:
    first = [said("system", system)] if system else []
    messages = [*first, *copy.deepcopy(HISTORY if history is None else history), *new]
    return {"model": "local", "messages": messages, "tools": TOOLS, **more}


def claude(system: Any, messages: list[Any], **more: Any) -> dict[str, Any]:
    return {"model": "local", "max_tokens": 1024, "system": system, "messages": messages, **more}


def chatml(*messages: tuple[str, str], answer: bool = True) -> str:
    text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages)
    return text + ("<|im_start|>assistant\n" if answer else "")


def llama3(*messages: tuple[str, str]) -> str:
    text = "".join(
        f"<|start_header_id|>{role}<|end_header_id|>\n\n{content}<|eot_id|>"
        for role, content in messages
    )
    return f"<|begin_of_text|>{text}<|start_header_id|>assistant<|end_header_id|>\n\n"


FIX = said("user", "Then fix it.")
MORE = (said("assistant", "Done: SOURCES lists main.c now."), said("user", "Run the tests."))


def swapped(index: int, message: dict[str, Any]) -> list[dict[str, Any]]:
    history = copy.deepcopy(HISTORY)
    history[index] = message
    return history


def changed(index: int, path: tuple[Any, ...], value: Any) -> list[dict[str, Any]]:
    history: Any = copy.deepcopy(HISTORY)
    inner = history[index]
    for step in path[:-1]:
        inner = inner[step]
    inner[path[-1]] = value
    return list(history)


def with_arguments(arguments: str) -> list[dict[str, Any]]:
    return changed(1, ("tool_calls", 0, "function", "arguments"), arguments)


@dataclass(frozen=True)
class Pair:
    """A stored prompt, a new one, and what is to be said of them."""

    name: str
    before: Given
    after: Given
    kind: Kind
    part: str | None = None


def dated(stamp: str) -> str:
    return f"{SYSTEM}\n\n{stamp}\nWorking directory: /home/ada/parser\nPlatform: linux\n"


def dates(name: str, one: str, other: str) -> Pair:
    return Pair(
        f"date: {name}",
        chat(dated(one), None, FIX),
        chat(dated(other), None, FIX, *MORE),
        Kind.DATE,
        "messages[0].content",
    )


def ids(name: str, one: str, other: str) -> Pair:
    return Pair(
        f"id: {name}",
        chat(dated(one), None, FIX),
        chat(dated(other), None, FIX, *MORE),
        Kind.COUNTER,
        "messages[0].content",
    )


DATES = [
    dates("the day", "Today's date: 2025-03-01", "Today's date: 2025-03-02"),
    dates("ISO time", "Now: 2025-03-01T10:15:00Z", "Now: 2025-03-01T10:15:42Z"),
    dates("micros", "at 2025-03-01 10:15:00.123456+00:00.", "at 2025-03-01 10:15:07.9+00:00."),
    dates("in words", "It is Saturday, March 1, 2025.", "It is Sunday, March 2, 2025."),
    dates("12 hours", "Local time is 9:59 AM", "Local time is 10:01 AM"),
    dates("24 hours", "The time is 09:59.", "The time is 10:01."),
    dates("American", "Date: 3/1/2025", "Date: 3/12/2025"),
    dates("German", "Heute ist der 1. März 2025.", "Heute ist der 2. März 2025."),
    dates("Spanish", "Hoy es 1 de marzo de 2025.", "Hoy es 30 de abril de 2025."),
    dates("Chinese", "今天是2025年3月1日。", "今天是2025年3月2日。"),
    dates("ctime", "Sat Mar  1 10:15:00 UTC 2025", "Sat Mar  1 10:16:30 UTC 2025"),
    dates("RFC 2822", "Sat, 01 Mar 2025 10:15:00 +0100", "Mon, 03 Mar 2025 08:00:00 +0100"),
    dates("Unix seconds", "timestamp=1740820500", "timestamp=1740820542"),
    dates("Unix milliseconds", '{"ts": 1740820500123}', '{"ts": 1740820542001}'),
    dates("a weekday", "Today is Monday.", "Today is Tuesday."),
    dates("a month", "The current month is March.", "The current month is April."),
    dates("relative", "Last commit: 3 minutes ago", "Last commit: 4 minutes ago"),
    dates("compact", "Build 20250301T101500Z", "Build 20250302T080000Z"),
    dates("a week", "Sprint 2025-W09", "Sprint 2025-W10"),
    dates("French", "Heure: il est maintenant 10h15", "Heure: il est maintenant 10h16"),
    dates("Japanese", "今日は2025年3月1日(土)です", "今日は2025年3月2日(日)です"),
    dates("uptime", "up 3 days, 4:05", "up 3 days, 4:06"),
    dates("dots", "Stand: 01.03.2025", "Stand: 02.03.2025"),
    dates("two of them", "2025-03-01 (Sat), 10:15:00", "2025-03-02 (Sun), 08:00:00"),
    Pair(
        "date: Llama 3's own template",
        llama3(
            ("system", "Cutting Knowledge Date: December 2023\nToday Date: 01 Mar 2025\n\nHi."),
            ("user", "Hello"),
        ),
        llama3(
            ("system", "Cutting Knowledge Date: December 2023\nToday Date: 02 Mar 2025\n\nHi."),
            ("user", "Hello"),
        ),
        Kind.DATE,
        "message 0 (system)",
    ),
    Pair(
        "date: a plain text",
        f"{SYSTEM} Today is 2025-03-01.\n\nUser: Hello\nAssistant:",
        f"{SYSTEM} Today is 2025-03-02.\n\nUser: Hello\nAssistant: Hi\nUser: Bye\nAssistant:",
        Kind.DATE,
    ),
    Pair(
        "date: a text of nobody's form",
        "Current time: 10:15:00\nContinue the story of the lighthouse keeper and her dog.",
        "Current time: 10:15:30\nContinue the story of the lighthouse keeper and her dog.",
        Kind.DATE,
    ),
    Pair(
        "date: Anthropic's system as blocks",
        claude(
            [{"type": "text", "text": SYSTEM}, {"type": "text", "text": "Today: 2025-03-01"}],
            [said("user", "Hello")],
        ),
        claude(
            [{"type": "text", "text": SYSTEM}, {"type": "text", "text": "Today: 2025-03-02"}],
            [said("user", "Hello")],
        ),
        Kind.DATE,
        "system[1].text",
    ),
    Pair(
        "date: at the top of a long first message",
        chat("", [said("user", "Date: 2025-03-01\n\n" + "The lighthouse was built. " * 40)]),
        chat("", [said("user", "Date: 2025-03-02\n\n" + "The lighthouse was built. " * 40)]),
        Kind.DATE,
        "messages[0].content",
    ),
    Pair(
        "date: rendered anew in an old message",
        chat(SYSTEM, changed(0, ("content",), "[10:15:00] Why does it fail?"), FIX),
        chat(SYSTEM, changed(0, ("content",), "[10:15:09] Why does it fail?"), FIX, *MORE),
        Kind.DATE,
        "messages[1].content",
    ),
    Pair(
        "date: in the description of a tool",
        chat(tools=[tool("search", "Finds news. Today is 2025-03-01.", q={"type": "string"})]),
        chat(tools=[tool("search", "Finds news. Today is 2025-03-02.", q={"type": "string"})]),
        Kind.DATE,
        "tools[0].function.description",
    ),
]

IDS = [
    ids(
        "a UUID",
        "Session 7f1b2c3d-0a1b-4c2d-8e3f-9a0b1c2d3e4f",
        "Session 0d9e8f7a-6b5c-4d3e-a2f1-0b9c8d7e6f5a",
    ),
    ids("a counter of requests", "Request #17", "Request #18"),
    ids("one more digit", "Request-Id: 9", "Request-Id: 10"),
    ids("a share", "Context: 45% used", "Context: 47% used"),
    ids("a usage", "Token usage: 1203/200000", "Token usage: 2903/200000"),
    ids("a name and letters", "session: abcd-efgh-1234", "session: wxyz-efgh-9876"),
    ids("messages", "Messages sent so far: 12", "Messages sent so far: 13"),
    ids("a turn", "You are on turn 5 of 20.", "You are on turn 6 of 20."),
    ids("a budget", "1,204 tokens left", "998 tokens left"),
    ids("a commit", "HEAD is at 4f2a91c", "HEAD is at b07d3ee"),
    ids("random letters", "nonce: Zk3vQ9xLmP2rT8wY", "nonce: aB7cD1eF5gH0iJ4k"),
    ids("a temporary directory", "Scratch: /tmp/tmp4x_9k2ab", "Scratch: /tmp/tmpq7r81v0z"),
    ids("a process", "pid 41233", "pid 51"),
    ids("a ULID", "trace 01ARZ3NDEKTSV4RRFFQ69G5FAV", "trace 01BX5ZZKBKACTAV9WEVGEMMVRZ"),
    ids(
        "a digest",
        "state=9e107d9d372bb6826bd81d3542a419d6",
        "state=e4d909c290d0fb1ca068ffaddf22cbd0",
    ),
    Pair(
        "id: of a call, made anew",
        chat(SYSTEM, None, FIX),
        chat(
            SYSTEM,
            [
                HISTORY[0],
                called("run", '{"command": "make", "timeout": 60}', "call_zz9y8x"),
                said("tool", HISTORY[2]["content"], tool_call_id="call_zz9y8x"),
                HISTORY[3],
            ],
            FIX,
            *MORE,
        ),
        Kind.COUNTER,
        "messages[2].tool_calls[0].id",
    ),
    Pair(
        "id: in the result of a tool",
        chat(SYSTEM, changed(2, ("content",), '{"ok": true, "request_id": 41, "n": 3}'), FIX),
        chat(
            SYSTEM, changed(2, ("content",), '{"ok": true, "request_id": 42, "n": 3}'), FIX, *MORE
        ),
        Kind.COUNTER,
        "messages[3].content",
    ),
    Pair(
        "id: in chatml",
        chatml(("system", f"conversation_id=conv_8f3a91\n{SYSTEM}"), ("user", "Hello")),
        chatml(("system", f"conversation_id=conv_5b7d2e\n{SYSTEM}"), ("user", "Hello")),
        Kind.COUNTER,
        "message 0 (system)",
    ),
]

PRETTY = json.dumps([each["function"] for each in TOOLS], indent=2)
PRETTY_MOVED = json.dumps([each["function"] for each in reversed(TOOLS)], indent=2)
ORDERED = [
    Pair(
        "order: of tools",
        chat(SYSTEM, None, FIX),
        chat(SYSTEM, None, FIX, tools=[TOOLS[1], TOOLS[0], TOOLS[2]]),
        Kind.ORDER,
        "tools order",
    ),
    Pair(
        "order: of keys in a schema",
        chat(SYSTEM, None, FIX),
        chat(SYSTEM, None, FIX, tools=json.loads(json.dumps(TOOLS, sort_keys=True))),
        Kind.ORDER,
        "tools[0]",
    ),
    Pair(
        "order: of required names",
        chat(tools=[{"name": "f", "parameters": {"required": ["a", "b"]}}]),
        chat(tools=[{"name": "f", "parameters": {"required": ["b", "a"]}}]),
        Kind.ORDER,
        "tools[0]",
    ),
    Pair(
        "order: of keys in a call's arguments",
        chat(SYSTEM, None, FIX),
        chat(SYSTEM, with_arguments('{"timeout": 60, "command": "make"}'), FIX, *MORE),
        Kind.ORDER,
        "messages[2].tool_calls[0].function.arguments",
    ),
    Pair(
        "order: of tools in a text",
        f"{SYSTEM}\n\n# Tools\n{PRETTY}\n\nUser: Hello\n",
        f"{SYSTEM}\n\n# Tools\n{PRETTY_MOVED}\n\nUser: Hello\nAssistant: Hi\nUser: Bye\n",
        Kind.ORDER,
    ),
    Pair(
        "order: of tools in chatml, a line each",
        chatml(("system", "<tools>\n" + "\n".join(map(json.dumps, TOOLS)) + "\n</tools>")),
        chatml(("system", "<tools>\n" + "\n".join(map(json.dumps, TOOLS[::-1])) + "\n</tools>")),
        Kind.ORDER,
        "message 0 (system)",
    ),
    Pair(
        "order: of keys in a text",
        chatml(("system", 'Settings: {"lang": "en", "tone": "dry", "depth": 3}. Obey them.')),
        chatml(("system", 'Settings: {"tone": "dry", "lang": "en", "depth": 3}. Obey them.')),
        Kind.ORDER,
    ),
    Pair(
        "order: of files in a listing",
        chat(f"{SYSTEM}\nFiles:\nMakefile\nREADME.md\nmain.c\n", None, FIX),
        chat(f"{SYSTEM}\nFiles:\nmain.c\nMakefile\nREADME.md\n", None, FIX, *MORE),
        Kind.ORDER,
        "messages[0].content",
    ),
    Pair(
        "order: of names in a line",
        chat(f"{SYSTEM}\nSkills: review, test, deploy\nEnd.", None, FIX),
        chat(f"{SYSTEM}\nSkills: deploy, review, test\nEnd.", None, FIX),
        Kind.ORDER,
        "messages[0].content",
    ),
    Pair(
        "order: of what an object prints",
        chat(f"{SYSTEM}\nconfig = {{'lang': 'en', 'tone': 'dry'}}\n", None, FIX),
        chat(f"{SYSTEM}\nconfig = {{'tone': 'dry', 'lang': 'en'}}\n", None, FIX),
        Kind.ORDER,
        "messages[0].content",
    ),
    Pair(
        "order: of elements",
        chat(f"{SYSTEM}\n<tools><tool>run</tool><tool>see</tool></tools>\n", None, FIX),
        chat(f"{SYSTEM}\n<tools><tool>see</tool><tool>run</tool></tools>\n", None, FIX),
        Kind.ORDER,
        "messages[0].content",
    ),
    Pair(
        "order: of results of tools",
        chat(SYSTEM, [*HISTORY[:2], said("tool", "one"), said("tool", "two")], FIX),
        chat(SYSTEM, [*HISTORY[:2], said("tool", "two"), said("tool", "one")], FIX, *MORE),
        Kind.ORDER,
        "messages[3]",
    ),
    Pair(
        "order: Anthropic's input",
        claude(
            "",
            [
                said("user", "x"),
                said(
                    "assistant",
                    [
                        {
                            "type": "tool_use",
                            "id": "toolu_1a",
                            "name": "run",
                            "input": {"a": "1", "b": "2"},
                        }
                    ],
                ),
            ],
        ),
        claude(
            "",
            [
                said("user", "x"),
                said(
                    "assistant",
                    [
                        {
                            "type": "tool_use",
                            "id": "toolu_1a",
                            "name": "run",
                            "input": {"b": "2", "a": "1"},
                        }
                    ],
                ),
                said("user", "y"),
            ],
        ),
        Kind.ORDER,
        "messages[1].content[0].input",
    ),
]

WRITTEN = [
    Pair(
        "number: 105 and 105.0 in a schema",
        chat(SYSTEM, None, FIX),
        chat(
            tools=[
                TOOLS[0],
                TOOLS[1],
                tool(
                    "search",
                    "Finds text.",
                    pattern={"type": "string"},
                    max_results={"default": 105.0},
                ),
            ]
        ),
        Kind.NUMBER_FORMAT,
        "tools[2]",
    ),
    Pair(
        "number: 60 and 60.0 in a call",
        chat(SYSTEM, None, FIX),
        chat(SYSTEM, with_arguments('{"command": "make", "timeout": 60.0}'), FIX, *MORE),
        Kind.NUMBER_FORMAT,
        "messages[2].tool_calls[0].function.arguments",
    ),
    Pair(
        "number: thousands",
        chat(f"{SYSTEM} The limit is 10000 lines for each file that you read.", None, FIX),
        chat(f"{SYSTEM} The limit is 10,000 lines for each file that you read.", None, FIX),
        Kind.NUMBER_FORMAT,
        "messages[0].content",
    ),
    Pair(
        "number: an exponent in a text",
        "The rate is 0.001 per step, and the model shall say why it is too high or too low.",
        "The rate is 1e-3 per step, and the model shall say why it is too high or too low.",
        Kind.NUMBER_FORMAT,
    ),
    Pair(
        "number: several in the result of a tool",
        chat(SYSTEM, changed(2, ("content",), "x=1 y=2 z=3"), FIX),
        chat(SYSTEM, changed(2, ("content",), "x=1.0 y=2.0 z=3.0"), FIX, *MORE),
        Kind.NUMBER_FORMAT,
        "messages[3].content",
    ),
    Pair(
        "white space: stripped from an answer",
        chat(SYSTEM, changed(3, ("content",), "It is empty.\n"), FIX),
        chat(SYSTEM, changed(3, ("content",), "It is empty."), FIX, *MORE),
        Kind.WHITESPACE,
        "messages[4].content",
    ),
    Pair(
        "white space: CRLF",
        chat(SYSTEM, changed(2, ("content",), "one\ntwo\nthree\nfour"), FIX),
        chat(SYSTEM, changed(2, ("content",), "one\r\ntwo\r\nthree\r\nfour"), FIX, *MORE),
        Kind.WHITESPACE,
        "messages[3].content",
    ),
    Pair(
        "white space: JSON written anew",
        chat(SYSTEM, None, FIX),
        chat(SYSTEM, with_arguments('{"command":"make","timeout":60}'), FIX, *MORE),
        Kind.WHITESPACE,
        "messages[2].tool_calls[0].function.arguments",
    ),
    Pair(
        "white space: a mark of the byte order",
        SYSTEM + " Answer in one line, please.",
        "\ufeff" + SYSTEM + " Answer in one line, please.",
        Kind.WHITESPACE,
    ),
    Pair(
        "white space: a system prompt wrapped otherwise",
        chat(SYSTEM, None, FIX),
        chat(SYSTEM.replace(". ", ".\n"), None, FIX),
        Kind.WHITESPACE,
        "messages[0].content",
    ),
    Pair(
        "white space: tabs in chatml",
        chatml(("system", SYSTEM), ("user", "def f():\n    return 1\n"), ("assistant", "Fine.")),
        chatml(
            ("system", SYSTEM),
            ("user", "def f():\n\treturn 1\n"),
            ("assistant", "Fine."),
            ("user", "Thanks"),
        ),
        Kind.WHITESPACE,
        "message 1 (user)",
    ),
]

THOUGHT = "<think>\nSOURCES is empty; I should say so.\n</think>\n\nThe list of files is empty."
HISTORIC = [
    Pair(
        "reasoning: a block in the text",
        chat(SYSTEM, changed(3, ("content",), THOUGHT)),
        chat(SYSTEM, changed(3, ("content",), "The list of files is empty."), FIX),
        Kind.REASONING_REMOVED,
        "messages[4].content",
    ),
    Pair(
        "reasoning: a field",
        chat(
            SYSTEM, swapped(3, said("assistant", "It is empty.", reasoning_content="Hm, SOURCES."))
        ),
        chat(SYSTEM, swapped(3, said("assistant", "It is empty.")), FIX),
        Kind.REASONING_REMOVED,
        "messages[4]",
    ),
    Pair(
        "reasoning: by the template",
        chatml(("system", SYSTEM), ("user", "Why?"), ("assistant", THOUGHT), answer=False),
        chatml(
            ("system", SYSTEM),
            ("user", "Why?"),
            ("assistant", "The list of files is empty."),
            ("user", "Then fix it."),
        ),
        Kind.REASONING_REMOVED,
        "message 2 (assistant)",
    ),
    Pair(
        "reasoning: an empty block",
        chatml(("user", "Why?"), ("assistant", "<think>\n\n</think>\n\nBecause."), answer=False),
        chatml(("user", "Why?"), ("assistant", "Because."), ("user", "And?")),
        Kind.REASONING_REMOVED,
        "message 1 (assistant)",
    ),
    Pair(
        "reasoning: Anthropic's blocks",
        claude(
            SYSTEM,
            [
                said("user", "Why?"),
                said(
                    "assistant",
                    [
                        {"type": "thinking", "thinking": "Hm.", "signature": "c2ln"},
                        {"type": "text", "text": "Because."},
                    ],
                ),
            ],
        ),
        claude(SYSTEM, [said("user", "Why?"), said("assistant", "Because."), said("user", "And?")]),
        Kind.REASONING_REMOVED,
        "messages[1]",
    ),
    Pair(
        "reasoning: gpt-oss",
        "<|start|>user<|message|>Why?<|end|><|start|>assistant<|channel|>analysis<|message|>Hm."
        "<|end|><|start|>assistant<|channel|>final<|message|>Because.<|end|>",
        "<|start|>user<|message|>Why?<|end|><|start|>assistant<|channel|>final<|message|>Because."
        "<|end|><|start|>user<|message|>And?<|end|><|start|>assistant",
        Kind.REASONING_REMOVED,
    ),
    Pair(
        "system: edited",
        chat(SYSTEM, None, FIX),
        chat(SYSTEM.replace("Be brief.", "Explain each step at length."), None, FIX),
        Kind.SYSTEM_CHANGED,
        "messages[0].content",
    ),
    Pair(
        "system: more at its end",
        chat(SYSTEM, None, FIX),
        chat(f"{SYSTEM}\n\nThe user prefers British spelling.", None, FIX, *MORE),
        Kind.SYSTEM_CHANGED,
        "messages[0].content",
    ),
    Pair(
        "system: another mode of an agent",
        claude("You plan. You never edit files.", [said("user", "Add a test.")]),
        claude("You build. Edit files as needed.", [said("user", "Add a test.")]),
        Kind.SYSTEM_CHANGED,
        "system",
    ),
    Pair(
        "system: none any more",
        chat(SYSTEM, None, FIX),
        chat("", None, FIX),
        Kind.SYSTEM_CHANGED,
    ),
    Pair(
        "system: in chatml",
        chatml(("system", "You speak like a pirate."), ("user", "Hello")),
        chatml(("system", "You speak like a judge."), ("user", "Hello")),
        Kind.SYSTEM_CHANGED,
        "message 0 (system)",
    ),
    Pair(
        "tools: one more",
        chat(SYSTEM, None, FIX),
        chat(SYSTEM, None, FIX, tools=[*TOOLS, tool("browse", "Opens a page.")]),
        Kind.TOOLS_CHANGED,
        "tools",
    ),
    Pair(
        "tools: told otherwise",
        chat(SYSTEM, None, FIX),
        chat(SYSTEM, None, FIX, tools=[tool("read_file", "Reads at most 200 lines."), *TOOLS[1:]]),
        Kind.TOOLS_CHANGED,
        "tools[0]",
    ),
    Pair(
        "compacted: a summary instead of history",
        chat(SYSTEM, None, FIX, *MORE),
        chat(
            SYSTEM,
            [
                said(
                    "user",
                    "This session is being continued from a previous conversation "
                    "that ran out of context. The build failed because SOURCES was empty; fixed.",
                )
            ],
            said("user", "Run the tests."),
        ),
        Kind.COMPACTED,
        "messages[1]",
    ),
    Pair(
        "compacted: a summary by the assistant",
        chat(SYSTEM, None, FIX, *MORE),
        chat(
            SYSTEM,
            [HISTORY[0], said("assistant", "<summary>Makefile fixed.</summary>")],
            said("user", "Run the tests."),
        ),
        Kind.COMPACTED,
        "messages[2]",
    ),
    Pair(
        "compacted: the oldest messages dropped",
        chat(SYSTEM, None, FIX, *MORE),
        chat(SYSTEM, [*HISTORY[3:], FIX, *MORE], said("assistant", "ok"), said("user", "Go on.")),
        Kind.COMPACTED,
        "messages[1]",
    ),
    Pair(
        "compacted: results of tools emptied",
        chat(SYSTEM, changed(2, ("content",), "cc: error: no input files\n" * 20), FIX),
        chat(SYSTEM, changed(2, ("content",), "[Old tool result content cleared]"), FIX, *MORE),
        Kind.COMPACTED,
        "messages[3].content",
    ),
    Pair(
        "compacted: in chatml",
        chatml(
            ("system", SYSTEM),
            ("user", "Hello"),
            ("assistant", "Hi"),
            ("user", "Why?"),
            ("assistant", "Because."),
            ("user", "And?"),
        ),
        chatml(
            ("system", SYSTEM),
            ("user", "Summary of the conversation so far: greetings; a reason."),
            ("user", "And?"),
        ),
        Kind.COMPACTED,
    ),
    Pair(
        "salt: another tenant",
        chat(SYSTEM, None, FIX, cache_salt="ada"),
        chat(SYSTEM, None, FIX, cache_salt="bob"),
        Kind.SALT,
        "cache_salt",
    ),
]

NEW = [
    Pair(
        "new: the next turn",
        chat(SYSTEM, None, FIX),
        chat(SYSTEM, None, FIX, *MORE),
        Kind.NEW_TEXT,
        "messages[6]",
    ),
    Pair(
        "new: a date in the new message",
        chat(SYSTEM, None, said("user", "What happened on 2025-03-01?")),
        chat(SYSTEM, None, said("user", "What happened on 2025-03-02?")),
        Kind.NEW_TEXT,
        "messages[5]",
    ),
    Pair(
        "new: a date in a new message that goes on",
        chat(SYSTEM, None, said("user", "Today is 2025-03-01. Write the report for the board.")),
        chat(SYSTEM, None, said("user", "Today is 2025-03-02. Write the report for the board.")),
        Kind.NEW_TEXT,
        "messages[5]",
    ),
    Pair(
        "new: a date in the new message, in chatml",
        chatml(("system", SYSTEM), ("user", "Is 2025-03-01 a holiday in France?")),
        chatml(("system", SYSTEM), ("user", "Is 2025-05-01 a holiday in France?")),
        Kind.NEW_TEXT,
        "message 1 (user)",
    ),
    Pair(
        "new: another number in a question",
        chat(SYSTEM, [said("user", "What is 17 times 23?")]),
        chat(SYSTEM, [said("user", "What is 18 times 23?")]),
        Kind.NEW_TEXT,
        "messages[1]",
    ),
    Pair(
        "new: a request by its number",
        chat(SYSTEM, [said("user", "Review request 41 and say what is wrong.")]),
        chat(SYSTEM, [said("user", "Review request 42 and say what is wrong.")]),
        Kind.NEW_TEXT,
        "messages[1]",
    ),
    Pair(
        "new: another conversation under one system prompt",
        chat(SYSTEM, None, FIX),
        chat(
            SYSTEM,
            [said("user", "Write a poem."), said("assistant", "Roses."), said("user", "Longer.")],
        ),
        Kind.NEW_TEXT,
        "messages[1]",
    ),
    Pair(
        "new: the same question with its words moved",
        chatml(("user", "The dog bit the man.")),
        chatml(("user", "The man bit the dog.")),
        Kind.NEW_TEXT,
    ),
    Pair(
        "new: a text that goes on",
        "Once upon a time",
        "Once upon a time there was a king.",
        Kind.NEW_TEXT,
    ),
    Pair("same: sent twice", chat(SYSTEM, None, FIX), chat(SYSTEM, None, FIX), Kind.SAME),
    Pair(
        "same: only sampling differs",
        chat(SYSTEM, None, FIX, temperature=0, seed=1),
        chat(SYSTEM, None, FIX, temperature=1, stream=True),
        Kind.SAME,
    ),
    Pair(
        "same: content as text and as parts",
        chat(SYSTEM, [said("user", "Hello")]),
        chat(SYSTEM, [said("user", [{"type": "text", "text": "Hello"}])]),
        Kind.SAME,
    ),
    Pair(
        "same: cache_control moved",
        claude(
            "S",
            [
                said(
                    "user",
                    [{"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}],
                )
            ],
        ),
        claude("S", [said("user", [{"type": "text", "text": "Hello"}])]),
        Kind.SAME,
    ),
    Pair(
        "same: the last answer is wanted again",
        chat(SYSTEM, None, FIX, *MORE),
        chat(SYSTEM, None, FIX),
        Kind.SAME,
    ),
    Pair("first seen: nothing in common", "Hello", "Goodbye", Kind.FIRST_SEEN),
]

UNKNOWN = [
    Pair(
        "unknown: an old message was edited",
        chat(SYSTEM, None, FIX),
        chat(SYSTEM, changed(0, ("content",), "Why does the link step fail?"), FIX, *MORE),
        Kind.UNKNOWN,
        "messages[1].content",
    ),
    Pair(
        "unknown: a result has another value",
        chat(
            SYSTEM, changed(2, ("content",), "The house has 17 rooms and a garden behind it."), FIX
        ),
        chat(
            SYSTEM,
            changed(2, ("content",), "The house has 18 rooms and a garden behind it."),
            FIX,
            *MORE,
        ),
        Kind.UNKNOWN,
        "messages[3].content",
    ),
    Pair(
        "unknown: a number in a plain text",
        "The house has 17 rooms and a garden behind it. Go.",
        "The house has 18 rooms and a garden behind it. Go.",
        Kind.UNKNOWN,
    ),
    Pair(
        "unknown: a version",
        "Use Python 3.11 for all that follows in this long, long text.",
        "Use Python 3.12 for all that follows in this long, long text.",
        Kind.UNKNOWN,
    ),
    Pair(
        "unknown: a date in a question, in a plain text",
        "Who was born on 2025-03-01?",
        "Who was born on 2025-03-02?",
        Kind.UNKNOWN,
    ),
    Pair(
        "unknown: a verse",
        "Explain John 3:16 in the light of what comes before and after it.",
        "Explain John 3:17 in the light of what comes before and after it.",
        Kind.UNKNOWN,
    ),
    Pair(
        "unknown: a score",
        "The match ended 10:12, and the home side was not amused by that.",
        "The match ended 10:14, and the home side was not amused by that.",
        Kind.UNKNOWN,
    ),
    Pair(
        "unknown: a name",
        "Dear Ada, we are glad that you have come to work in this house.",
        "Dear Bob, we are glad that you have come to work in this house.",
        Kind.UNKNOWN,
    ),
    Pair(
        "unknown: words moved",
        "Never trust a friend of a friend, said the miller.",
        "Never trust a miller of a friend, said the friend.",
        Kind.UNKNOWN,
    ),
    Pair(
        "unknown: an accent composed otherwise",
        "The caf\u00e9 opens at dawn and stays open.",
        "The cafe\u0301 opens at dawn and stays open.",
        Kind.UNKNOWN,
    ),
    Pair("unknown: tokens without a vocabulary", [1, 2, 3, 4, 5], [1, 2, 3, 9, 5], Kind.UNKNOWN),
    Pair(
        "unknown: another template",
        chat(SYSTEM, None, FIX),
        chat(SYSTEM, None, FIX, chat_template_kwargs={"enable_thinking": False}),
        Kind.UNKNOWN,
        "chat_template_kwargs",
    ),
    Pair("unknown: a chat and a prompt", chat(), {"prompt": "Hello"}, Kind.UNKNOWN),
    Pair(
        "unknown: mixed prompts",
        {"prompt": [1, "two", 3]},
        {"prompt": [1, "two", 4]},
        Kind.UNKNOWN,
        "prompt[2]",
    ),
    Pair(
        "unknown: an argument has another value",
        chat(SYSTEM, None, FIX),
        chat(SYSTEM, with_arguments('{"command": "make", "timeout": 90}'), FIX, *MORE),
        Kind.UNKNOWN,
        "messages[2].tool_calls[0].function.arguments",
    ),
]

LOOKALIKES = [
    Pair(
        "a number that is content, in a system prompt",
        chat(f"{SYSTEM} Answer in 3 sentences at most, and never in more than that.", None, FIX),
        chat(f"{SYSTEM} Answer in 5 sentences at most, and never in more than that.", None, FIX),
        Kind.SYSTEM_CHANGED,
    ),
    Pair(
        "a pair of numbers that are a place",
        chat(SYSTEM, with_arguments('{"at": [10, 20]}'), FIX),
        chat(SYSTEM, with_arguments('{"at": [20, 10]}'), FIX, *MORE),
        Kind.UNKNOWN,
    ),
    Pair(
        "a new user who asks for a summary",
        chat(SYSTEM, None, FIX),
        chat(SYSTEM, [said("user", "Write a summary of this book.")]),
        Kind.NEW_TEXT,
    ),
    Pair(
        "a summary that is the next turn",
        chat(SYSTEM, None, FIX),
        chat(
            SYSTEM,
            None,
            FIX,
            said("assistant", "Done."),
            said("user", "Give me a summary of our conversation."),
        ),
        Kind.NEW_TEXT,
    ),
    Pair(
        "true is no number",
        chat(tools=[tool("f", x={"default": True})]),
        chat(tools=[tool("f", x={"default": 1})]),
        Kind.TOOLS_CHANGED,
    ),
    Pair(
        "a text that says think",
        chat(SYSTEM, changed(3, ("content",), "I think it is empty."), FIX),
        chat(SYSTEM, changed(3, ("content",), "It is empty."), FIX, *MORE),
        Kind.UNKNOWN,
    ),
    Pair(
        "an answer that was cut off is no white space",
        chat(SYSTEM, changed(3, ("content",), "It is empty, and"), FIX),
        chat(SYSTEM, changed(3, ("content",), "It is empty"), FIX, *MORE),
        Kind.UNKNOWN,
    ),
    Pair(
        "a system prompt with a date that is not the difference",
        chat(f"Today is 2025-03-01. {SYSTEM}", None, FIX),
        chat(f"Today is 2025-03-01. {SYSTEM.replace('terminal', 'browser')}", None, FIX),
        Kind.SYSTEM_CHANGED,
    ),
    Pair(
        "white space and words",
        chat("Be  brief. Be kind.", None, FIX),
        chat("Be long. Be rude, if need be.", None, FIX),
        Kind.SYSTEM_CHANGED,
    ),
    Pair(
        "a prompt of several",
        {"prompt": ["Hello", "Today is 2025-03-01, and all is well in the house."]},
        {"prompt": ["Hello", "Today is 2025-03-02, and all is well in the house."]},
        Kind.DATE,
        "prompt[1]",
    ),
    Pair(
        "a prompt with text and tokens mixed",
        {"prompt": [1, "Now it is 10:15:00. Tell me a story about a lighthouse.", 2]},
        {"prompt": [1, "Now it is 10:16:00. Tell me a story about a lighthouse.", 2]},
        Kind.DATE,
        "prompt[1]",
    ),
]

LOOKALIKES += [
    Pair(
        "letters written as escapes are no white space",
        chat(SYSTEM, with_arguments('{"path": "caf\\u00e9"}'), FIX),
        chat(SYSTEM, with_arguments('{"path": "café"}'), FIX, *MORE),
        Kind.UNKNOWN,
    ),
    Pair(
        "arguments as an object",
        chat(SYSTEM, with_arguments('{"command": "make", "timeout": 60}'), FIX),
        chat(
            SYSTEM,
            changed(
                1,
                ("tool_calls", 0, "function", "arguments"),
                {"command": "make", "timeout": 60},
            ),
            FIX,
            *MORE,
        ),
        Kind.UNKNOWN,
    ),
    Pair(
        "a developer is the system",
        chat(SYSTEM, None, FIX),
        {"messages": [said("developer", SYSTEM), *HISTORY, FIX], "tools": TOOLS},
        Kind.SAME,
    ),
    Pair(
        "a date, and behind it a summary",
        chat(f"{SYSTEM} Today: 2025-03-01", None, FIX, *MORE),
        chat(
            f"{SYSTEM} Today: 2025-03-02",
            [said("user", "Summary of the conversation so far: fixed.")],
        ),
        Kind.DATE,
        "messages[0].content",
    ),
    Pair(
        "a summary in the system prompt",
        chat(SYSTEM, None, FIX, *MORE),
        chat(
            f"{SYSTEM}\n\nSummary of the conversation so far: fixed.",
            [said("user", "Run the tests.")],
        ),
        Kind.COMPACTED,
    ),
    Pair(
        "a line that was taken away, before one like it",
        chat(f"{SYSTEM}\n---\nBe kind.\n---\nBe brief.\n---\nBe calm.", None, FIX),
        chat(f"{SYSTEM}\nBe kind.\n---\nBe brief.\n---\nBe calm.", None, FIX),
        Kind.SYSTEM_CHANGED,
    ),
    Pair(
        "a comma more is no order",
        chat(f"{SYSTEM}\nBe kind\nBe brief\nBe calm", None, FIX),
        chat(f"{SYSTEM}\nBe kind,\nBe brief\nBe calm", None, FIX),
        Kind.SYSTEM_CHANGED,
    ),
    Pair(
        "an object that ended before the difference",
        chat(SYSTEM + " {'a': 1, 'b': 2} is what you get, and no more.", None, FIX),
        chat(SYSTEM + " {'a': 1, 'b': 2} is what you see, and no more.", None, FIX),
        Kind.SYSTEM_CHANGED,
    ),
    Pair(
        "a list that is numbered, behind a word for requests",
        chat(f"{SYSTEM} What happens to a request\n1. It is read by one who knows it.", None, FIX),
        chat(f"{SYSTEM} What happens to a request\n2. It is read by one who knows it.", None, FIX),
        Kind.SYSTEM_CHANGED,
    ),
    Pair(
        "a message taken away, before one like it",
        chat(
            SYSTEM,
            [
                said("user", "ok"),
                said("assistant", "A"),
                said("user", "ok"),
                said("assistant", "B"),
            ],
            FIX,
        ),
        chat(SYSTEM, [said("assistant", "A"), said("user", "ok"), said("assistant", "B")], FIX),
        Kind.COMPACTED,
    ),
    Pair(
        "a question asked anew",
        chat(SYSTEM, None, FIX, *MORE),
        chat(SYSTEM, None, said("user", "Never mind. What does make do?")),
        Kind.NEW_TEXT,
        "messages[5]",
    ),
]


def rules(name: str, one: str, other: str) -> Pair:
    """A rule of the house that differs in what looks like a time, a counter or a number."""
    sides = [chat(f"{SYSTEM} {each} {SYSTEM}", None, FIX) for each in (one, other)]
    return Pair(f"a rule: {name}", sides[0], sides[1], Kind.SYSTEM_CHANGED, "messages[0].content")


RULES = [
    rules("a version", "Python 3.10 is used.", "Python 3.1 is used."),
    rules("a section", "See section 1.20 first.", "See section 1.2 first."),
    rules("a release", "Ubuntu 24.10 is used.", "Ubuntu 24.1 is used."),
    rules("a mode of a file", "Run chmod 0644 on it.", "Run chmod 644 on it."),
    rules("a postal code", "Send it to 01234 only.", "Send it to 1234 only."),
    rules("a percentage", "Scale up 5 percent at most.", "Scale up 7 percent at most."),
    rules("how many to set up", "Set up 3 servers.", "Set up 4 servers."),
    rules("a limit", "The limit is 1500000000 bytes.", "The limit is 1600000000 bytes."),
    rules("a telephone", "Call 1234567890 for help.", "Call 1987654321 for help."),
    rules("a persona", "You are Friday, an assistant.", "You are Monday, an assistant."),
    rules("a manager", "The current manager is April.", "The current manager is June."),
    rules("a user", "Your current user is called May.", "Your current user is called June."),
    rules("an age", "Mails sent 5 days ago count as late.", "Mails sent 7 days ago count as late."),
    rules("a timeout", "Timeout duration: 30 seconds.", "Timeout duration: 60 seconds."),
    rules("a closing time", "The shop closes at 5pm each day.", "The shop closes at 6pm each day."),
    rules("quiet hours", "Quiet hours begin at 22:00 UTC.", "Quiet hours begin at 23:00 UTC."),
    rules("shares", "Split it 1/3/20 among teams.", "Split it 1/4/20 among teams."),
    rules("a tax year", "The tax year 2023 counts.", "The tax year 2024 counts."),
    rules("lights", "Turn 5 lights off.", "Turn 6 lights off."),
    rules("a limit of a turn", "The most per turn is 3 files.", "The most per turn is 4 files."),
    rules("columns", "Show the 3 left columns.", "Show the 4 left columns."),
    rules("a margin", "Leave 20% left margin.", "Leave 30% left margin."),
]


def arguments(name: str, one: str, other: str) -> Pair:
    before, after = chat(SYSTEM, with_arguments(one)), chat(SYSTEM, with_arguments(other), FIX)
    return Pair(f"an argument: {name}", before, after, Kind.UNKNOWN)


RULES += [
    arguments("a command's words", '{"cmd": ["cp", "a", "b"]}', '{"cmd": ["cp", "b", "a"]}'),
    arguments(
        "edits, one after the other",
        '{"edits": [{"old": "a", "new": "b"}, {"old": "b", "new": "c"}]}',
        '{"edits": [{"old": "b", "new": "c"}, {"old": "a", "new": "b"}]}',
    ),
    arguments("a list in words", '{"say": "red, blue, green"}', '{"say": "green, blue, red"}'),
    Pair(
        "an argument: a command's words, in chatml",
        chatml(("user", "Copy."), ("assistant", 'call {"cmd": ["cp", "a", "b"]}'), ("user", "ok")),
        chatml(("user", "Copy."), ("assistant", 'call {"cmd": ["cp", "b", "a"]}'), ("user", "ok")),
        Kind.UNKNOWN,
    ),
    Pair(
        "number: a point and a 0 in a text",
        chat(f"{SYSTEM} Heat it to 105.0 degrees. {SYSTEM}", None, FIX),
        chat(f"{SYSTEM} Heat it to 105 degrees. {SYSTEM}", None, FIX),
        Kind.NUMBER_FORMAT,
    ),
]

TRANSLATE = "Put what the user says into French. Answer with nothing but that, in one line."
OTHERS = [
    Pair(
        "another conversation: in all things",
        chat(SYSTEM, None, FIX),
        chat(TRANSLATE, [said("user", "Good morning to all of you!")], tools=[]),
        Kind.FIRST_SEEN,
    ),
    Pair(
        "another conversation: other tools, too",
        chat(SYSTEM, None, FIX),
        chat(TRANSLATE, [said("user", "Good morning!")], tools=[tool("look_up")]),
        Kind.FIRST_SEEN,
    ),
    Pair(
        "another conversation: in chatml, with nothing but marks in common",
        chatml(("system", SYSTEM), ("user", "Why does the build fail?")),
        chatml(("system", TRANSLATE), ("user", "Good morning!")),
        Kind.FIRST_SEEN,
    ),
    Pair(
        "the same system prompt, other tools",
        chat(SYSTEM, [said("user", "Hello")]),
        chat(SYSTEM, [said("user", "Bye")], tools=[tool("look_up")]),
        Kind.TOOLS_CHANGED,
    ),
]


def described_in(system: str, *tools: str, question: str = "Hello") -> str:
    made = described(
        [said("system", system), said("user", question)],
        [Tool(name) for name in tools],
        has_system=True,
    )
    return chatml(*((each["role"], each["content"]) for each in made))


DESCRIBED = [
    Pair(
        "tools: the last one gone, told in plain words",
        described_in(SYSTEM, "read", "write"),
        described_in(SYSTEM, "read"),
        Kind.TOOLS_CHANGED,
        "message 0 (system)",
    ),
    Pair(
        "tools: the first one gone, told in plain words",
        described_in(SYSTEM, "read", "write"),
        described_in(SYSTEM, "write"),
        Kind.TOOLS_CHANGED,
    ),
    Pair(
        "tools: all gone, told in plain words",
        described_in(SYSTEM, "read", "write"),
        chatml(("system", SYSTEM), ("user", "Hello")),
        Kind.TOOLS_CHANGED,
    ),
    Pair(
        "tools: told in plain words in a system prompt that differs before them",
        described_in(SYSTEM, "read"),
        described_in(SYSTEM.replace("Be brief.", "Explain each step."), "read"),
        Kind.SYSTEM_CHANGED,
    ),
]

PAIRS = [
    *DATES,
    *IDS,
    *ORDERED,
    *WRITTEN,
    *HISTORIC,
    *NEW,
    *UNKNOWN,
    *LOOKALIKES,
    *RULES,
    *OTHERS,
    *DESCRIBED,
]
