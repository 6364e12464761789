"""From the text of calls, as it comes, to what is called with which arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from llamakeep.tool_calls.formats import FUNCTION, Body, Marker
from llamakeep.tool_calls.reader import Reader, Reading, drop
from llamakeep.tool_calls.values import (
    MOST_NAME_CHARS,
    CallArguments,
    CallBegins,
    Tool,
    json_object,
)
from llamakeep.tool_calls.voice import Voice
from llamakeep.tool_calls.xml_values import Values

_ARGUMENTS = ("arguments", "parameters")
_MOST_ID_CHARS = 64
_PARAMETER = "<parameter="
_TAGS = (_PARAMETER, "</function>", "</tool_call>")


class CallReader:
    """Reads calls. What is held when one of its methods returns turned out to be content.

    Args:
        reader: Stands where a call may be.
        voice: Is told of calls.
        tools: Those that may be called.
        new_id: Returns an id for a call.
        parallel: Several calls may come.

    Attributes:
        n_calls: Calls that have begun.
        is_open: The arguments of the last one are not complete.
        complete: The only call that may come is complete.
    """

    def __init__(
        self,
        reader: Reader,
        voice: Voice,
        tools: Mapping[str, Tool],
        new_id: Callable[[], str],
        parallel: bool,
    ) -> None:
        self.n_calls = 0
        self.is_open = False
        self.complete = False
        self._reader = reader
        self._voice = voice
        self._tools = tools
        self._new_id = new_id
        self._parallel = parallel

    def marked(self, marker: Marker) -> Reading[None]:
        """Read what follows a marker."""
        reader = self._reader
        if marker.body is Body.FUNCTION:
            is_done = yield from self._function()
        else:
            yield from reader.space()
            letter = yield from reader.peek()
            if marker.body is Body.TAGGED and letter == "<":
                if not (yield from reader.literal(FUNCTION.text)):
                    return
                is_done = yield from self._function()
            elif letter and letter in "[{":
                is_done = yield from self._objects()
            else:
                is_done = marker.body is Body.NAMED and (yield from self._named())
        if is_done and marker.close:
            yield from self._close(marker.close)

    def _close(self, text: str) -> Reading[None]:
        """Read what may come after a call."""
        if not self.complete:
            self._reader.hold()
            yield from self._reader.space()
            if (yield from self._reader.one_of((text,), or_cut=True)):
                self._reader.release()

    def more(self, *, separated: bool = False) -> Reading[None]:
        """Read objects without markers, one after the other."""
        reader = self._reader
        while True:
            if separated:
                yield from reader.space()
                if (yield from reader.one_of((";", ","))):
                    yield from reader.space()
            if (yield from reader.peek()) != "{" or not (yield from self._object(sure=False)):
                return
            if self.complete:
                return
            reader.release()
            reader.hold()
            separated = True

    def _begin(self, tool: Tool, call_id: str | None = None) -> None:
        """Tell that a call begins: what was held belongs to it."""
        self._reader.release()
        self._voice.drop_space()
        self._voice.add(CallBegins(self.n_calls, call_id or self._new_id(), tool.name))
        self.n_calls += 1
        self.is_open = True

    def _write(self, text: str) -> None:
        self._voice.add(CallArguments(self.n_calls - 1, text))

    def _end(self) -> bool:
        """Note that the arguments are complete."""
        self._reader.hold()
        self.is_open = False
        self.complete = not self._parallel
        if self.complete:
            self._reader.release()
        return True

    def _objects(self) -> Reading[bool]:
        """Read an object, or a list of them; false where that ends early."""
        reader = self._reader
        if not (yield from reader.literal("[")):
            is_done = yield from self._object(sure=True)
            if is_done:
                reader.release()
            return is_done
        while True:
            yield from reader.space()
            if not (yield from self._object(sure=True)):
                return False
            if self.complete:
                return True
            reader.release()
            reader.hold()
            yield from reader.space()
            end = yield from reader.one_of((",", "]"))
            if end != ",":
                if end:
                    reader.release()
                return end is not None

    def _object(self, *, sure: bool) -> Reading[bool]:
        """Read an object, and tell the call that it is; false if it is none, or not complete.

        Args:
            sure: It is a call if it has a name, though it may have no arguments.
        """
        reader = self._reader
        tool: Tool | None = None
        arguments: str | None = None
        told = False
        end: str | None = "{"
        if not (yield from reader.literal("{")):
            return False
        while end != "}":
            yield from reader.space()
            if end == "{" and (yield from reader.literal("}")):
                return False
            key = yield from self._key()
            if key == "name" and tool is None:
                tool = yield from self._name()
                if tool is None:
                    return False
            elif key in _ARGUMENTS and arguments is None:
                if tool is not None and (yield from reader.peek()) == "{":
                    self._begin(tool)
                    if not (yield from reader.value(self._write)):
                        return False
                    told, arguments = self._end(), ""
                else:
                    arguments = yield from self._arguments()
                    if arguments is None:
                        return False
            elif key is None or not (yield from reader.value(drop)):
                return False
            if tool is not None and arguments is not None and not told:
                told = self._tell(tool, arguments)
            if self.complete:
                return True
            yield from reader.space()
            end = yield from reader.one_of((",", "}"))
            if end is None:
                return False
        if not told and tool is not None and sure:
            told = self._tell(tool, "{}")
        return told

    def _tell(self, tool: Tool, arguments: str) -> bool:
        self._begin(tool)
        self._write(arguments)
        return self._end()

    def _key(self) -> Reading[str | None]:
        """Read a key and its colon; None if they are not there."""
        reader = self._reader
        if (yield from reader.peek()) != '"':
            return None
        pieces: list[str] = []
        if not (yield from reader.text(pieces.append)):
            return None
        yield from reader.space()
        if not (yield from reader.literal(":")):
            return None
        yield from reader.space()
        return "".join(pieces)

    def _name(self) -> Reading[Tool | None]:
        """Read a string; return the tool that it names."""
        pieces: list[str] = []
        if (yield from self._reader.peek()) != '"':
            return None
        if not (yield from self._reader.text(pieces.append)):
            return None
        return self._tools.get("".join(pieces))

    def _arguments(self) -> Reading[str | None]:
        """Read arguments up to their end: an object, null, or a string that has an object."""
        reader = self._reader
        first = yield from reader.peek()
        pieces: list[str] = []
        read = reader.text if first == '"' else reader.value
        if not (yield from read(pieces.append)):
            return None
        text = "".join(pieces)
        if first == "{":
            return text
        if first == '"':
            return text if json_object(text) is not None else "{}" if not text else None
        return "{}" if text == "null" else None

    def _named(self) -> Reading[bool]:
        """Read `name[ARGS]{...}`."""
        reader = self._reader
        name = yield from reader.until("[{ \t\r\n", MOST_NAME_CHARS, but="<")
        tool = self._tools.get(name or "")
        if tool is None:
            return False
        yield from reader.space()
        call_id = None
        if (yield from reader.literal("[CALL_ID]")):
            call_id = yield from reader.until("[", _MOST_ID_CHARS, but="<{")
        yield from reader.literal("[ARGS]")
        yield from reader.space()
        if (yield from reader.peek()) != "{":
            return False
        self._begin(tool, call_id)
        is_done = (yield from reader.value(self._write)) and self._end()
        reader.release()
        return is_done

    def _function(self) -> Reading[bool]:
        """Read `name>`, arguments, and `</function>`."""
        reader = self._reader
        name = yield from reader.until(">", MOST_NAME_CHARS, but="<\n")
        tool = self._tools.get(name or "")
        if tool is None:
            return False
        reader.take()
        yield from reader.space()
        if (yield from reader.peek()) != "{":
            return (yield from self._parameters(tool))
        self._begin(tool)
        if not (yield from reader.value(self._write)):
            return False
        self._end()
        yield from self._close(FUNCTION.close)
        return True

    def _parameters(self, tool: Tool) -> Reading[bool]:
        """Read `<parameter=key>value</parameter>` ..., up to the end of the function."""
        reader = self._reader
        values = Values(tool, self._write)
        begun = False
        while True:
            yield from reader.space()
            tag = yield from reader.one_of(_TAGS, or_cut=True)
            key = None
            if tag == _PARAMETER:
                key = yield from reader.until(">", MOST_NAME_CHARS, but="<\n")
            if key is None:
                break
            reader.take()
            if not begun:
                self._begin(tool)
                begun = True
            reader.release()
            values.begin(key)
            if not (yield from reader.through("</parameter>", values.push)):
                return False
            values.end()
            reader.hold()
        is_cut = not (yield from reader.peek()) and (reader.was_cut or tag in (None, _PARAMETER))
        if is_cut and begun:
            reader.release()
        if is_cut or (tag in (None, _PARAMETER) and not begun):
            return False
        if not begun:
            self._begin(tool)
        is_clean = tag not in (None, _PARAMETER)
        rest = "" if is_clean else reader.release()
        values.close()
        self._end()
        reader.release()
        if rest and not self.complete:
            self._voice.say(rest)
        return is_clean

    def generic(self, *, wraps: bool) -> Reading[None]:
        """Read an answer that is `{"tool_calls": [...]}`.

        Args:
            wraps: It may also be `{"response": "..."}`.
        """
        reader = self._reader
        if not (yield from reader.literal("{")):
            return
        yield from reader.space()
        key = yield from self._key()
        letter = yield from reader.peek()
        if key == "response" and letter == '"' and wraps:
            reader.release()
            self._voice.drop_space()
            if not (yield from reader.text(self._voice.say_all)):
                return
        elif key != "tool_calls" or letter != "[" or not (yield from self._objects()):
            return
        yield from self._close("}")
