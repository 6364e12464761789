"""What shapes an answer: `grammar`, `json_schema` and `response_format`."""

from __future__ import annotations

import json
from typing import Any, Final

from llamakeep.errors import GrammarError
from llamakeep.gbnf import KeptGrammars
from llamakeep.json_schema import ANY_OBJECT, compile_schema
from llamakeep.runtime.base import Vocab
from llamakeep.server.errors import ApiError
from llamakeep.server.schema import AnswerFields, ResponseFormat
from llamakeep.tool_calls import Said

_KEPT_CHARS: Final = 16 << 20


class Grammars:
    """Makes grammars of what clients send, and keeps those of schemas. Any thread may use it.

    Args:
        kept_chars: Length of all that is kept together, schemas included, in characters.
    """

    def __init__(self, kept_chars: int = _KEPT_CHARS) -> None:
        self._kept: KeptGrammars[str] = KeptGrammars(kept_chars, len)

    def grammar_of(self, body: AnswerFields, vocab: Vocab) -> str:
        """Return the grammar that an answer has to match; "" for none.

        Costs up to a second for the largest schemas, little for those that were seen before.

        Raises:
            ApiError: For what cannot be compiled, with the path to it, and where more than one
                field asks for a shape.
        """
        said, name = said_of(body), shaping_field(body)
        if not name:
            return ""
        try:
            grammar = (body.grammar or "") if said is None else self.of_schema(said)
            vocab.check_grammar(grammar)
        except GrammarError as error:
            message = str(error)
            if not message.startswith("'"):
                message = f"'{name}': {message}"
            where = error.where if error.where.startswith(name) else name
            raise ApiError(message, param=where) from None
        return grammar

    def of_schema(self, said: Said) -> str:
        """Return the grammar of a schema, kept or new.

        Raises:
            GrammarError: With the path to what cannot be compiled.
        """
        key = json.dumps([said.where, said.schema], ensure_ascii=True, separators=(",", ":"))
        return self._kept.get(key, lambda: compile_schema(said.schema, said.where))

    def check(self) -> None:
        """Raise if what is counted is not what is kept."""
        self._kept.check()


def shapes(body: AnswerFields) -> bool:
    """Whether a request says what its answer has to match."""
    return bool(_asked(body))


def shaping_field(body: AnswerFields) -> str:
    """Return the first field that says what an answer has to match, or ""."""
    return next(iter(_asked(body)), "")


def said_of(body: AnswerFields) -> Said | None:
    """Return the schema that an answer has to match; None for no schema.

    Raises:
        ApiError: Where more than one field asks for a shape, or a schema is missing.
    """
    asked = _asked(body)
    if len(asked) > 1:
        first, second = asked[:2]
        raise ApiError(f"'{second}' cannot be used together with '{first}'", param=second)
    if body.json_schema is not None:
        return Said(body.json_schema, "json_schema")
    wanted = body.response_format
    return None if wanted is None or wanted.type == "text" else _said_by(wanted)


def said_as(schema: Any, where: str) -> Said:
    """Return what an answer has to be by the schema of a format, in every API.

    None at all, or an empty one, means any object and not any value.

    Args:
        schema: As the client sent it; None for none.
        where: The path to it.
    """
    return Said(ANY_OBJECT if schema is None or schema == {} else schema, where)


def _asked(body: AnswerFields) -> list[str]:
    """Return the fields that ask for a shape."""
    wanted = body.response_format
    asked = {
        "grammar": bool(body.grammar),
        "json_schema": body.json_schema is not None,
        "response_format": wanted is not None and wanted.type != "text",
    }
    return [name for name, is_asked in asked.items() if is_asked]


def _said_by(wanted: ResponseFormat) -> Said:
    if wanted.type == "json_object":
        return said_as(wanted.schema_, "response_format.schema")
    where = "response_format.json_schema"
    if wanted.json_schema is None:
        raise ApiError(f"'{where}' is required", param=where)
    return said_as(wanted.json_schema.schema_, f"{where}.schema")
