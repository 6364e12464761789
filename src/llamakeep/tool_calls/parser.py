"""From the text of an answer, as it comes, to what is said, thought and called.

Where the text is cut into pieces makes no difference, and each letter costs the same. A call is
told as soon as its name is known and its arguments begin; up to there it may turn out to be no
call, and is content then, to the letter. Of arguments only brackets and quotes are looked at: they
are handed on as the model writes them, and an answer that is cut off leaves them cut off.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from llamakeep.tool_calls.calls import CallReader
from llamakeep.tool_calls.formats import Format
from llamakeep.tool_calls.reader import Reader, Reading
from llamakeep.tool_calls.reasoning import Thoughts
from llamakeep.tool_calls.values import Delta, Reasoning, Tool
from llamakeep.tool_calls.voice import Voice

_ALL = re.compile(r"(?s:.*)")


class Parser:
    """Parses one answer. Of one thread at a time.

    Args:
        form: How the model writes calls; None if it may make none: then all is content.
        tools: Those that may be called. A call of another is content.
        new_id: Returns an id for a call.
        thoughts: How the model marks its thoughts; None leaves them in the content.
        thinking: The prompt has opened them already.
        parallel: Several calls may come; else all after the first is dropped.

    """

    def __init__(
        self,
        form: Format | None,
        tools: Mapping[str, Tool],
        new_id: Callable[[], str],
        *,
        thoughts: Thoughts | None = None,
        thinking: bool = False,
        parallel: bool = True,
    ) -> None:
        # A generic answer is told apart though nothing may be called: it is wrapped all the same.
        self._form = form if tools or (form is not None and form.generic) else None
        self._thoughts = thoughts
        self._thinking = thinking and thoughts is not None
        self._reader = Reader()
        self._voice = Voice()
        self._calls = CallReader(self._reader, self._voice, tools, new_id, parallel)
        self._run: Reading[None] | None = self._answer()
        self._resume()

    @property
    def n_calls(self) -> int:
        """Calls that have begun."""
        return self._calls.n_calls

    @property
    def has_calls(self) -> bool:
        """Whether there are calls, all with complete arguments."""
        return self.n_calls > 0 and not self._calls.is_open

    @property
    def complete(self) -> bool:
        """Whether no more is to come, whatever the model writes: the only call is complete."""
        return self._calls.complete

    def feed(self, text: str) -> list[Delta]:
        """Go on with a piece of the text, and return what is certain now."""
        if text and self._run is not None:
            self._reader.push(text)
            self._resume()
        return self._voice.taken()

    def finish(self) -> list[Delta]:
        """Return the rest, at the end of the text."""
        self._reader.ended = True
        self._resume()
        return self._voice.taken()

    def _resume(self) -> None:
        if self._run is not None:
            try:
                next(self._run)
            except StopIteration:
                self._run = None

    def _answer(self) -> Reading[None]:
        voice = self._voice
        if self._thoughts is not None:
            yield from self._think(self._thoughts)
        if self._form is None:
            voice.keep_space()
            yield from self._reader.take_while(_ALL, voice.say_all)
            return
        yield from self._speak(self._form)
        if not self.n_calls:
            voice.keep_space()

    def _think(self, thoughts: Thoughts) -> Reading[None]:
        """Read thoughts, if the answer begins with them."""
        reader, voice = self._reader, self._voice
        if not self._thinking:
            reader.hold()
            yield from reader.space()
            if not (yield from reader.literal(thoughts.open)):
                voice.say(reader.release())
                return
            reader.release()
        else:
            yield from reader.space()
            yield from reader.literal(thoughts.open)  # some models write it once more
        yield from reader.space()
        yield from reader.through(thoughts.close, lambda text: voice.say(text, Reasoning))
        voice.drop_space()
        yield from reader.space()

    def _speak(self, form: Format) -> Reading[None]:
        """Read what is said, and calls in between."""
        reader, say, calls = self._reader, self._voice.say, self._calls
        if form.generic or form.bare:
            reader.hold()
            yield from reader.space()
            yield from calls.generic(wraps=form.wraps) if form.generic else calls.more()
            left = reader.release()
            is_cut = form.generic and self.n_calls and not (yield from reader.peek())
            if not is_cut:  # what stands around calls that is not complete was meant for nobody
                say(left)
        markers = {marker.text: marker for marker in form.markers}
        texts = tuple(markers)
        firsts = re.escape("".join({text[0] for text in texts}))
        others = re.compile(f"[^{firsts}]*") if firsts else _ALL
        while not self.complete:
            yield from reader.take_while(others, say)
            if not (yield from reader.peek()):
                return
            reader.hold()
            text = yield from reader.one_of(texts)
            if text is None:
                reader.take()
            else:
                yield from calls.marked(markers[text])
                if form.bare and not self.complete:
                    say(reader.release())
                    reader.hold()
                    yield from calls.more(separated=True)
            say(reader.release())
