"""What shapes an answer: `grammar`, `json_schema` and `response_format`."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final

from llamakeep.errors import GrammarError
from llamakeep.json_schema import ANY_OBJECT, compile_schema
from llamakeep.runtime.base import Vocab
from llamakeep.server.errors import ApiError
from llamakeep.server.schema import AnswerFields, ResponseFormat

_KEPT_BYTES: Final = 16 << 20


class Grammars:
    """Makes grammars of what clients send, and keeps those of schemas. Any thread may use it.

    Args:
        kept_bytes: How much is kept at most: schemas and their grammars, the last used ones.
    """

    def __init__(self, kept_bytes: int = _KEPT_BYTES) -> None:
        self._most = kept_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, str] = OrderedDict()
        self._used_bytes = 0

    @property
    def used_bytes(self) -> int:
        """How much is kept."""
        return self._used_bytes

    def grammar_of(self, body: AnswerFields, vocab: Vocab) -> str:
        """Return the grammar that an answer has to match; "" for none.

        Costs up to a second for the largest schemas, little for those that were seen before.

        Raises:
            ApiError: For what cannot be compiled, with the path to it, and where more than one
                field asks for a shape.
        """
        asked = _asked(body)
        if not asked:
            return ""
        _only_one(asked)
        [(name, make)] = asked.items()
        try:
            grammar = make(self)
            vocab.check_grammar(grammar)
        except GrammarError as error:
            message = str(error)
            if not message.startswith("'"):
                message = f"'{name}': {message}"
            where = error.where if error.where.startswith(name) else name
            raise ApiError(message, param=where) from None
        return grammar

    def of_schema(self, schema: Any, where: str) -> str:
        """Return the grammar of a schema, kept or new.

        Raises:
            GrammarError: With the path to what cannot be compiled.
        """
        key = json.dumps(schema, ensure_ascii=True, separators=(",", ":"))
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return found
        grammar = compile_schema(schema, where)
        self._keep(key, grammar)
        return grammar

    def _keep(self, key: str, grammar: str) -> None:
        size = len(key) + len(grammar)  # both are ASCII, but for a schema's own letters
        if size > self._most:
            return
        with self._lock:
            if key in self._kept:
                return
            while self._used_bytes + size > self._most:
                old, text = self._kept.popitem(last=False)
                self._used_bytes -= len(old) + len(text)
            self._kept[key] = grammar
            self._used_bytes += size


def shapes(body: AnswerFields) -> bool:
    """Whether a request says what its answer has to match."""
    return bool(_asked(body))


def shaping_field(body: AnswerFields) -> str:
    """Return the first field that says what an answer has to match, or ""."""
    return next(iter(_asked(body)), "")


def said_of(body: AnswerFields) -> tuple[Any, str]:
    """Return the schema that an answer has to match, and the path to it; None for no schema.

    Raises:
        ApiError: Where more than one field asks for a shape, or a schema is missing.
    """
    _only_one(_asked(body))
    if body.json_schema is not None:
        return body.json_schema, "json_schema"
    wanted = body.response_format
    return (None, "") if wanted is None or wanted.type == "text" else _schema_of(wanted)


def _only_one(asked: Mapping[str, object]) -> None:
    if len(asked) > 1:
        first, second = list(asked)[:2]
        raise ApiError(f"'{second}' cannot be used together with '{first}'", param=second)


def _asked(body: AnswerFields) -> dict[str, Callable[[Grammars], str]]:
    """Return how each field that asks for a shape becomes a grammar."""
    asked: dict[str, Callable[[Grammars], str]] = {}
    if text := body.grammar:
        asked["grammar"] = lambda _: text
    if body.json_schema is not None:
        asked["json_schema"] = lambda grammars: grammars.of_schema(body.json_schema, "json_schema")
    wanted = body.response_format
    if wanted is not None and wanted.type != "text":
        asked["response_format"] = lambda grammars: grammars.of_schema(*_schema_of(wanted))
    return asked


def _schema_of(wanted: ResponseFormat) -> tuple[Any, str]:
    """Return a format's schema, and the path to it."""
    if wanted.type == "json_object":
        given, where = wanted.schema_, "response_format.schema"
    elif wanted.json_schema is None:
        where = "response_format.json_schema"
        raise ApiError(f"'{where}' is required", param=where)
    else:
        given, where = wanted.json_schema.schema_, "response_format.json_schema.schema"
    # An empty one means any object in both APIs, not any value.
    return (ANY_OBJECT if given is None or given == {} else given), where
