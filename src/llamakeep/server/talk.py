"""Conversations in no API's words: what is asked, and what an answer says, thinks and calls.

Every API over conversations is written on this: it makes a `Chat` of what a client sends, lets
`Conversations.plan` make a `Plan` of it, asks the engine with `Plan.prompt`, `Plan.sampling` and
`Plan.shown`, and writes what each answer's `Talk` tells::

    Chat -> Conversations.plan -> Plan -> Talk.take(update) -> Talk.deltas, at last Talk.ending
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from llamakeep.engine.request import Finished, Piece, Stop, Update
from llamakeep.sampling import Sampling
from llamakeep.server.errors import ApiError
from llamakeep.server.prompts import Prompt
from llamakeep.tool_calls import (
    AUTO,
    Delta,
    Format,
    Parser,
    Reply,
    Said,
    Thoughts,
    Tool,
    ToolChoice,
)
from llamakeep.tool_calls.grammar import Grammar


@dataclass(frozen=True, slots=True)
class Seam:
    """A place where conversations are expected to part: what comes before it comes again.

    Attributes:
        message: The place is in this message; None for the tools.
        part: It is at the end of this part of the message's content, or of this tool; None for the
            end of the message, calls included.
    """

    message: int | None
    part: int | None


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation that is to be answered.

    Attributes:
        messages: As OpenAI has them, for that is what templates know: with `tool_calls` of the
            assistant, their results under the role `tool`, and `reasoning_content`.
        tools: What the model may call.
        choice: Whether it may, must or must not.
        parallel: It may call several at once.
        said: What it says where it calls nothing, after its thoughts; None for anything.
        thoughts_apart: What it thinks is told apart; else it is content, with its marks. None for
            what the server was told.
        add_generation_prompt: End the prompt where the answer begins; None for yes.
        continue_final_message: The answer goes on with the last message; None if it is the
            assistant's.
        extra: More values for the template.
        seams: Places for checkpoints, besides those that every prompt has. A hint: they change
            nothing but what a later prompt finds.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = AUTO
    parallel: bool = True
    said: Said | None = None
    thoughts_apart: bool | None = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    seams: tuple[Seam, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """How a conversation is answered. Any number of answers may follow it.

    Attributes:
        prompt: In tokens.
        new_id: Returns an id for a call.
        form: How the model writes calls; None if it makes none.
        tools: Those that may be called, by name.
        parallel: It may call several at once.
        thoughts: How its thoughts are marked; None to leave them where they are.
        thinking: The prompt has opened them.
        grammar: What calls, and what is said where it has a schema, have to match; None for
            anything.
        shown: Special tokens whose text an answer has to show.
    """

    prompt: Prompt
    new_id: Callable[[], str]
    form: Format | None = None
    tools: Mapping[str, Tool] = field(default_factory=dict)
    parallel: bool = True
    thoughts: Thoughts | None = None
    thinking: bool = False
    grammar: Grammar | None = None
    shown: frozenset[int] = frozenset()

    @property
    def is_plain(self) -> bool:
        """Whether an answer is nothing but content, and needs no `Talk`."""
        return self.form is None and self.thoughts is None

    def sampling(self, sampling: Sampling) -> Sampling:
        """Return how tokens are chosen: with the grammar of the plan, where there is one.

        Raises:
            ApiError: When the request has a grammar of its own.
        """
        if self.grammar is None:
            return sampling
        if sampling.grammar:
            raise ApiError(
                "'tools' cannot be called in an answer that has to match a format of its own",
                param="tools",
            )
        return replace(sampling, grammar=self.grammar.text, grammar_triggers=self.grammar.triggers)

    def talk(self, *, keep: bool = True) -> Talk | None:
        """Return what tells one answer apart; None if there is nothing to tell apart.

        Args:
            keep: Collect what is told, for `Talk.reply`.
        """
        if self.is_plain:
            return None
        parser = Parser(
            self.form,
            self.tools,
            self.new_id,
            thoughts=self.thoughts,
            thinking=self.thinking,
            parallel=self.parallel,
        )
        return Talk(parser, keep=keep)


class Ending(str, enum.Enum):
    """Why an answer ended."""

    SAID = "said"
    """The model has said all."""
    WORD = "word"
    """A stop string came up."""
    CALLS = "calls"
    """The model waits for results of its calls."""
    LIMIT = "limit"
    """It was cut off; so may be the arguments of its last call. WORD and SAID can do that, too."""
    CANCELLED = "cancelled"
    """Nobody wants the rest."""


_ENDINGS = {
    Stop.END: Ending.SAID,
    Stop.WORD: Ending.WORD,
    Stop.LIMIT: Ending.LIMIT,
    Stop.CANCELLED: Ending.CANCELLED,
}


@dataclass(slots=True)
class Talk:
    """One answer, told apart. Of one thread at a time; costs about 1 us a letter.

    Attributes:
        deltas: What the last update added.
        reply: What all of them add up to; empty unless it is kept.
    """

    _parser: Parser
    keep: bool = True
    deltas: list[Delta] = field(default_factory=list)
    reply: Reply = field(default_factory=Reply)

    def take(self, update: Update) -> None:
        """Go on with an update of the engine's."""
        if isinstance(update, Piece):
            self.deltas = self._parser.feed(update.text) if update.text else []
        elif isinstance(update, Finished):
            self.deltas = self._parser.finish()
        else:
            self.deltas = []
        if self.keep and self.deltas:
            self.reply.add(self.deltas)

    @property
    def has_calls(self) -> bool:
        """Whether there are calls, all with complete arguments."""
        return self._parser.has_calls

    @property
    def is_complete(self) -> bool:
        """Whether nothing more can come, though the model may go on: its only call is complete."""
        return self._parser.complete


def ending_of(finished: Finished, talk: Talk | None) -> Ending:
    """Return why an answer ended."""
    is_cut = finished.stop in (Stop.LIMIT, Stop.CANCELLED)
    if talk is not None and talk.has_calls and (talk.is_complete or not is_cut):
        return Ending.CALLS
    return _ENDINGS[finished.stop]
