"""Chats that people go back in: a workload for caches, made from a seed.

Conversations share a system prompt, grow turn by turn and take turns with each other. Now and then
somebody goes back some turns and goes on from there, changes an earlier message, asks for an answer
again, or follows two continuations of one turn at the same time. Tokens are random: what two
prompts share is what they share of these messages, and nothing by chance.

A prompt is laid out as templates do it. Every message begins with a token that says whose it is,
and a prompt ends with the one that an answer begins with.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from random import Random
from typing import Any, Final, TypeAlias

from llamakeep.errors import InvalidValue, StoreError, whole_number
from llamakeep.simulate.workload import Workload
from llamakeep.tokens import as_tokens

SYSTEM: Final = 1
USER: Final = 2
ASSISTANT: Final = 3
"""The tokens that messages begin with."""

TURN: Final = "turn"
REWIND: Final = "rewind"
EDIT: Final = "edit"
REGENERATE: Final = "regenerate"
BRANCH: Final = "branch"
KINDS: Final = (TURN, REWIND, EDIT, REGENERATE, BRANCH)
"""What a request may be."""

_FIRST_TOKEN: Final = 10
_N_VOCAB: Final = 32_000
_LONGEST: Final = 6.0
"""The longest message, in means."""
_BRANCH_ROUNDS: Final = 3
"""Requests of each of two continuations, before only one of them goes on."""

Message: TypeAlias = "tuple[int, ...]"


@dataclass(frozen=True, slots=True)
class ChatStyle:
    """How chats go.

    Attributes:
        n_chats: Conversations.
        n_turns: Requests of each.
        n_open: How many of them go on at a time; the next begins when one has ended.
        system_tokens: Tokens of the system prompt, which all share.
        user_tokens: Tokens of a user's message on average; most are shorter.
        answer_tokens: Tokens of an answer on average; most are shorter.
        rewind: How likely a request goes back one or more turns and goes on from there with another
            message.
        edit: How likely a request has an earlier message of the user changed; what followed it
            stays.
        regenerate: How likely a request asks for an answer again: the last one, with the same
            prompt, or as often the one before it, with the prompt before.
        branch: How likely two continuations of the last answer alternate from now on, for three
            requests each; then the first one goes on.

    Raises:
        InvalidValue: For a number that cannot be, and for likelihoods that sum up to more than 1.
    """

    n_chats: int = 20
    n_turns: int = 16
    n_open: int = 3
    system_tokens: int = 600
    user_tokens: int = 80
    answer_tokens: int = 240
    rewind: float = 0.1
    edit: float = 0.05
    regenerate: float = 0.1
    branch: float = 0.05

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.type == "int":
                whole_number(each.name, value, 1)
            elif not 0 <= value <= 1:
                raise InvalidValue(f"{each.name} must be 0 to 1, not {value!r}")
        total = self.rewind + self.edit + self.regenerate + self.branch
        if total > 1:
            raise InvalidValue(f"rewind, edit, regenerate and branch sum up to {total:g}, above 1")


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One request of a chat.

    Attributes:
        chat: The number of its chat.
        kind: One of `KINDS`.
        messages: System, user, answer, user, and so on; the last one is the user's.
    """

    chat: int
    kind: str
    messages: tuple[Message, ...]

    @property
    def tokens(self) -> list[int]:
        """The prompt."""
        return [*(token for message in self.messages for token in message), ASSISTANT]

    @property
    def user_starts(self) -> list[int]:
        """Where user messages start in it."""
        starts, at = [], 0
        for message in self.messages:
            if message[0] == USER:
                starts.append(at)
            at += len(message)
        return starts


class _Chat:
    """One conversation.

    Attributes:
        number: Its number.
        lanes: Its continuations, the one whose turn it is first.
        rounds: Requests until only one of two is left.
        n_requests: Requests so far.
    """

    def __init__(self, number: int, system: Message) -> None:
        self.number = number
        self.lanes: list[tuple[Message, ...]] = [(system,)]
        self.rounds = self.n_requests = 0


def make_chats(style: ChatStyle | None = None, *, seed: int = 0) -> Iterator[ChatRequest]:
    """Yield the requests of chats, in the order in which they come.

    The same for the same style and seed, on every machine.

    Args:
        style: How chats go; the default if not given.
        seed: Of all that is random.
    """
    style = style or ChatStyle()
    writer = _Writer(style, Random(seed))
    system = writer.message(SYSTEM, style.system_tokens, exact=True)
    waiting = [_Chat(number, system) for number in reversed(range(style.n_chats))]
    chats: list[_Chat] = []
    while waiting or chats:
        while waiting and len(chats) < style.n_open:
            chats.append(waiting.pop())
        chat = chats[writer.below(len(chats))]
        yield writer.request(chat)
        chat.n_requests += 1
        if chat.n_requests == style.n_turns:
            chats.remove(chat)


class _Writer:
    """Writes messages and decides what comes next.

    Only `Random.random` is asked: what else it has may differ between versions of Python.
    """

    def __init__(self, style: ChatStyle, random: Random) -> None:
        self._style = style
        self._random = random

    def below(self, n: int) -> int:
        """Return a number below `n`."""
        return int(self._random.random() * n)

    def message(self, role: int, mean: int, *, exact: bool = False) -> Message:
        """Return a message; its length falls off exponentially, unless `exact`."""
        n = mean
        if not exact:
            n = math.ceil(mean * min(_LONGEST, -math.log(1.0 - self._random.random())))
        span = _N_VOCAB - _FIRST_TOKEN
        return (role, *(_FIRST_TOKEN + self.below(span) for _ in range(max(1, n))))

    def request(self, chat: _Chat) -> ChatRequest:
        """Return what is asked next in a chat, and note it there."""
        messages = chat.lanes[0]
        kind = self._kind(chat)
        if kind == REGENERATE:
            if len(messages) > 2 and self.below(2):
                messages = messages[:-2]
        else:
            messages = self._changed(kind, messages)
            if messages[-1][0] == USER:
                messages = (*messages, self.message(ASSISTANT, self._style.answer_tokens))
            if kind == BRANCH:
                chat.lanes, chat.rounds = [messages, messages], 2 * _BRANCH_ROUNDS
            messages = (*messages, self.message(USER, self._style.user_tokens))
        chat.lanes[0] = messages
        if chat.rounds:
            chat.lanes.reverse()
            chat.rounds -= 1
            if not chat.rounds:
                del chat.lanes[1:]
        return ChatRequest(chat.number, kind, messages)

    def _kind(self, chat: _Chat) -> str:
        """Draw what comes next, of what is possible."""
        style, drawn, messages = self._style, self._random.random(), chat.lanes[0]
        if messages[-1][0] != USER:
            return TURN  # the first request of a chat, or of a second continuation
        shares = {
            REWIND: style.rewind if len(messages) > 2 else 0.0,
            EDIT: style.edit,
            REGENERATE: style.regenerate,
            BRANCH: 0.0 if chat.rounds else style.branch,
        }
        for kind, share in shares.items():
            if drawn < share:
                return kind
            drawn -= share
        return TURN

    def _changed(self, kind: str, messages: tuple[Message, ...]) -> tuple[Message, ...]:
        """Return the messages that the next one of the user goes on from."""
        n_user = len(messages) // 2  # at 1, 3, and so on
        if kind == REWIND:
            return messages[: 2 * (1 + self.below(n_user - 1)) + 1]
        if kind == EDIT:
            at = 1 + 2 * self.below(n_user)
            changed = self.message(USER, self._style.user_tokens)
            return (*messages[:at], changed, *messages[at + 1 :])
        return messages


def chat_workload(style: ChatStyle | None = None, *, seed: int = 0) -> Workload:
    """Return chats as a workload in memory, see `make_chats`."""
    requests = list(make_chats(style, seed=seed))
    return Workload(
        [as_tokens(request.tokens) for request in requests],
        [tuple(request.user_starts) for request in requests],
    )


def write_chats(path: Path, style: ChatStyle | None = None, *, seed: int = 0) -> dict[str, int]:
    """Write chats as a workload, see `make_chats`; packed where the name ends in `.gz`.

    Args:
        path: The file; one that is there is replaced.
        style: How chats go.
        seed: Of all that is random.

    Returns:
        How many requests of each kind it has.

    Raises:
        StoreError: When it cannot be written.
    """
    counts = dict.fromkeys(KINDS, 0)
    requests: list[dict[str, Any]] = []
    for request in make_chats(style, seed=seed):
        counts[request.kind] += 1
        requests.append(
            {
                "chat": request.chat,
                "kind": request.kind,
                "tokens": request.tokens,
                "user_starts": request.user_starts,
            }
        )
    data = (json.dumps(requests, separators=(",", ":")) + "\n").encode()
    try:
        path.write_bytes(gzip.compress(data, 6, mtime=0) if path.suffix == ".gz" else data)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror or error}") from error
    return counts
