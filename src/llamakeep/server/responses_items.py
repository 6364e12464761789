"""What an answer of `/v1/responses` is made of: items, as they come, and the events of each.

::

    Talk.deltas -> Items.take -> events of a stream; at last Items.output
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from llamakeep.engine.request import Choice
from llamakeep.server.responses_input import sealed
from llamakeep.server.responses_tools import INPUT, Known
from llamakeep.server.wire import probs_json
from llamakeep.tool_calls import CallArguments, CallBegins, Content, Delta, Reasoning
from llamakeep.tool_calls.reader import Reader, Reading
from llamakeep.tool_calls.values import json_object

Event = tuple[str, dict[str, Any]]
"""Its type, and its fields without type and number."""
IN_PROGRESS, COMPLETED, INCOMPLETE = "in_progress", "completed", "incomplete"


class _Item(ABC):
    """An item that grows.

    Args:
        item_id: Its id.
        index: Its place among the items.
    """

    def __init__(self, item_id: str, index: int) -> None:
        self.item_id = item_id
        self._at = {"item_id": item_id, "output_index": index}
        self._index = index
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """What has come."""
        return "".join(self._pieces)

    def opened(self) -> list[Event]:
        """Return the events of its begin."""
        item = self.json(IN_PROGRESS)
        return [("response.output_item.added", {"output_index": self._index, "item": item})]

    def closed(self, item: dict[str, Any]) -> list[Event]:
        """Return the events of its end.

        Args:
            item: What it has become.
        """
        done = {"output_index": self._index, "item": item}
        return [*self._last(), ("response.output_item.done", done)]

    def settled(self) -> list[Event]:
        """Return the events of what is added only once nothing more comes."""
        return []

    def status(self, default: str) -> str:
        """Return how it ended.

        Args:
            default: What the end of the answer says of it.
        """
        return default

    @abstractmethod
    def json(self, status: str) -> dict[str, Any]:
        """Return it as it is now."""

    @abstractmethod
    def push(self, text: str, probs: Sequence[Choice]) -> list[Event]:
        """Add a piece; return its events."""

    @abstractmethod
    def _last(self) -> list[Event]:
        """Return the events that come before the last."""


class _Part(_Item):
    """An item with one part, which is a text."""

    kind = ""
    part_kind = ""
    event = ""

    def opened(self) -> list[Event]:
        return [*super().opened(), ("response.content_part.added", self._with_part(self._part("")))]

    def _with_part(self, part: dict[str, Any]) -> dict[str, Any]:
        return self._at | {"content_index": 0, "part": part}

    def _part(self, text: str) -> dict[str, Any]:
        return {"type": self.part_kind, "text": text}

    def _more(self) -> dict[str, Any]:
        """Return what the event of the whole text has besides it."""
        return {}

    def push(self, text: str, probs: Sequence[Choice]) -> list[Event]:
        self._pieces.append(text)
        return [(f"{self.event}.delta", self._at | {"content_index": 0, "delta": text})]

    def _last(self) -> list[Event]:
        text = self.text
        done = self._at | {"content_index": 0, "text": text} | self._more()
        return [
            (f"{self.event}.done", done),
            ("response.content_part.done", self._with_part(self._part(text))),
        ]


class _Message(_Part):
    """What the model says.

    Args:
        item_id: Its id.
        index: Its place among the items.
        n_probs: How many of the likeliest tokens are told; None for no probabilities.
    """

    part_kind = "output_text"
    event = "response.output_text"

    def __init__(self, item_id: str, index: int, n_probs: int | None) -> None:
        super().__init__(item_id, index)
        self._n_probs = n_probs
        self._probs: list[dict[str, Any]] = []

    def json(self, status: str) -> dict[str, Any]:
        content = [] if status == IN_PROGRESS else [self._part(self.text)]
        return {
            "id": self.item_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": content,
        }

    def push(self, text: str, probs: Sequence[Choice]) -> list[Event]:
        told: list[dict[str, Any]] = []
        if self._n_probs is not None:
            told = [probs_json(each, self._n_probs) for each in probs]
            self._probs += told
        [(name, fields)] = super().push(text, probs)
        return [(name, fields | {"logprobs": told})]

    def _part(self, text: str) -> dict[str, Any]:
        return super()._part(text) | {"annotations": [], "logprobs": self._probs if text else []}

    def _more(self) -> dict[str, Any]:
        return {"logprobs": self._probs}


class _Thoughts(_Part):
    """What the model thinks.

    Args:
        item_id: Its id.
        index: Its place among the items.
        seals: Tell it again in `encrypted_content`.
    """

    part_kind = "reasoning_text"
    event = "response.reasoning_text"

    def __init__(self, item_id: str, index: int, seals: bool) -> None:
        super().__init__(item_id, index)
        self._seals = seals

    def json(self, status: str) -> dict[str, Any]:
        is_done = status != IN_PROGRESS
        item: dict[str, Any] = {
            "id": self.item_id,
            "type": "reasoning",
            "status": status,
            "summary": [],
            "content": [self._part(self.text)] if is_done else [],
        }
        if self._seals:
            item["encrypted_content"] = sealed(self.text) if is_done else None
        return item


class _Call(_Item):
    """A call of a tool.

    Args:
        item_id: Its id.
        index: Its place among the items.
        call_id: Under which its result comes back.
        known: What the client calls the tool.
    """

    kind = "function_call"
    key = "arguments"
    event = "response.function_call_arguments"

    def __init__(self, item_id: str, index: int, call_id: str, known: Known) -> None:
        super().__init__(item_id, index)
        self._call_id = call_id
        self._known = known
        self._written: list[str] = []

    @property
    def written(self) -> str:
        """What the model has written: a JSON object, once it is complete."""
        return "".join(self._written)

    def status(self, default: str) -> str:
        return COMPLETED if json_object(self.written) is not None else INCOMPLETE

    def json(self, status: str) -> dict[str, Any]:
        item = {
            "id": self.item_id,
            "type": self.kind,
            "status": status,
            "call_id": self._call_id,
            "name": self._known.name,
            self.key: self.text,
        }
        if self._known.namespace is not None:
            item["namespace"] = self._known.namespace
        return item

    def push(self, text: str, probs: Sequence[Choice]) -> list[Event]:
        self._written.append(text)
        return self._told(text)

    def _told(self, text: str) -> list[Event]:
        self._pieces.append(text)
        return [(f"{self.event}.delta", self._at | {"delta": text})]

    def _last(self) -> list[Event]:
        return [(f"{self.event}.done", self._at | {self.key: self.text})]


class _CustomCall(_Call):
    """A call of a custom tool: its input is a text, which the model writes as a JSON string."""

    kind = "custom_tool_call"
    key = "input"
    event = "response.custom_tool_call_input"

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._input = InputText()

    def push(self, text: str, probs: Sequence[Choice]) -> list[Event]:
        self._written.append(text)
        piece = self._input.push(text)
        return self._told(piece) if piece else []

    def settled(self) -> list[Event]:
        is_other = not self._input.is_there and json_object(self.written) is not None
        return self._told(self.written) if is_other else []


class InputText:
    """Reads the text in `{"input": "..."}` as it comes.

    Attributes:
        is_there: It has begun. It never does in what is no such object.
    """

    def __init__(self) -> None:
        self.is_there = False
        self._reader = Reader()
        self._pieces: list[str] = []
        self._reading = self._read()
        next(self._reading)

    def push(self, text: str) -> str:
        """Go on with a piece of JSON; return what it adds to the text."""
        if text:
            self._reader.push(text)
            next(self._reading)
        pieces, self._pieces = self._pieces, []
        return "".join(pieces)

    def _read(self) -> Reading[None]:
        reader = self._reader
        for mark in ("{", f'"{INPUT}"', ":"):
            yield from reader.space()
            if not (yield from reader.literal(mark)):
                break
        else:
            yield from reader.space()
            self.is_there = (yield from reader.peek()) == '"'
            if self.is_there:
                yield from reader.text(lambda piece: self._pieces.append(piece))
        while True:  # the rest says nothing
            yield from reader.peek()
            reader.take()


class Items:
    """The items of one answer, in order, told by its deltas.

    Args:
        new_id: Returns an id that begins with a text.
        known: What the client calls each tool.
        n_probs: How many of the likeliest tokens are told with each; None for no probabilities.
        seals: Thoughts are told in `encrypted_content`, too.
    """

    def __init__(
        self,
        new_id: Callable[[str], str],
        known: Mapping[str, Known],
        *,
        n_probs: int | None = None,
        seals: bool = False,
    ) -> None:
        self._new_id = new_id
        self._known = known
        self._n_probs = n_probs
        self._seals = seals
        self._open: _Item | None = None
        self._held: list[Choice] = []
        self.output: list[dict[str, Any]] = []

    def take(self, deltas: Sequence[Delta], probs: Sequence[Choice] = ()) -> list[Event]:
        """Go on with deltas; return the events.

        Tokens whose text is still held back tell their probabilities with the text that comes of
        them; those of thoughts and calls are not told.

        Args:
            deltas: Of one update.
            probs: Of the tokens that came with them.
        """
        events: list[Event] = []
        if self._n_probs is not None:
            self._held += probs
        for delta in deltas:
            if isinstance(delta, Content):
                events += self._grow(_Message, delta.text, self._held)
                self._held = []
            elif isinstance(delta, Reasoning):
                events += self._grow(_Thoughts, delta.text, ())
            elif isinstance(delta, CallBegins):
                events += self._begin(self._call(delta))
            else:
                assert isinstance(delta, CallArguments)
                assert self._open is not None
                events += self._open.push(delta.json_text, ())
        if deltas:
            self._held = []
        return events

    def finish(self, *, is_whole: bool) -> list[Event]:
        """End the last item; return the events. An answer that says nothing has an empty message.

        Args:
            is_whole: The answer was not cut off.
        """
        events = [] if self.output or self._open else self._begin(self._item(_Message))
        if self._open is not None:
            events += self._close(COMPLETED if is_whole else INCOMPLETE)
        return events

    def _grow(self, kind: type[_Part], text: str, probs: Sequence[Choice]) -> list[Event]:
        if not text:
            return []
        events: list[Event] = []
        if not isinstance(self._open, kind):
            events = self._begin(self._item(kind))
        assert self._open is not None
        return events + self._open.push(text, probs)

    def _begin(self, item: _Item) -> list[Event]:
        events = self._close(COMPLETED) if self._open is not None else []
        self._open = item
        return events + item.opened()

    def _close(self, status: str) -> list[Event]:
        assert self._open is not None
        item, self._open = self._open, None
        events = item.settled()
        self.output.append(item.json(item.status(status)))
        return events + item.closed(self.output[-1])

    @property
    def _next(self) -> int:
        """The place of the next item, once the open one is complete."""
        return len(self.output) + (self._open is not None)

    def _item(self, kind: type[_Part]) -> _Item:
        if kind is _Thoughts:
            return _Thoughts(self._new_id("rs_"), self._next, self._seals)
        return _Message(self._new_id("msg_"), self._next, self._n_probs)

    def _call(self, begun: CallBegins) -> _Item:
        known = self._known[begun.name]
        if known.kind == "custom":
            return _CustomCall(self._new_id("ctc_"), self._next, begun.id, known)
        return _Call(self._new_id("fc_"), self._next, begun.id, known)
