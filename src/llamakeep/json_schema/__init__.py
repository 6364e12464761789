"""JSON schemas as grammars: whatever matches the grammar validates against the schema.

The other way round it need not be so: a grammar may allow less. Properties come in the order in
which the schema names them, others only where the schema speaks of them, numbers have no more
digits than a double has, and texts no letter that JSON need not escape is escaped otherwise.

What a schema forbids and a grammar cannot is refused, with the path to it, except that `oneOf` is
taken for `anyOf`, and that of formats only `date`, `time`, `date-time` and `uuid` are more than
annotations. Nothing is ever fetched: references lead to the schema itself.

::

    Rules (rules.py) <- numbers.py, words.py, pattern.py <- Flat (flat.py) <- Compiler (compiler.py)
"""

from __future__ import annotations

from typing import Any, Final

from llamakeep.errors import GrammarError
from llamakeep.gbnf import check_grammar
from llamakeep.json_schema.compiler import Compiler
from llamakeep.json_schema.rules import Rules, literal

__all__ = ["ANY_OBJECT", "Rules", "add_schema", "compile_schema", "literal"]

ANY_OBJECT: Final[dict[str, Any]] = {"type": "object"}
"""The schema of any JSON object."""


def compile_schema(schema: Any, where: str = "schema") -> str:
    """Return the grammar of the JSON texts that validate against a schema.

    Any thread; about 50 us for each property.

    Args:
        schema: As it is read from JSON.
        where: What messages call it; the path to what is wrong begins with it.

    Raises:
        GrammarError: For what is no schema, what cannot be compiled, and what is too large, with
            the path to it.
    """
    rules = Rules()
    text = rules.text(add_schema(rules, schema, where))
    try:
        is_endless = not check_grammar(text).ends
    except GrammarError as error:
        raise GrammarError(f"'{where}': {error}", where=where) from None
    if is_endless:
        raise GrammarError(f"'{where}': only values without an end satisfy it", where=where)
    return text


def add_schema(rules: Rules, schema: Any, where: str = "schema") -> str:
    """Add what a schema allows to a grammar that is being made; return the name of its rule.

    So a grammar can have a schema's JSON inside of another text, as tool calls do::

        rules = Rules()
        arguments = add_schema(rules, schema)
        text = rules.text(f'"<tool_call>" {arguments} "</tool_call>"')

    Args:
        rules: The grammar.
        schema: As it is read from JSON.
        where: As for `compile_schema`.

    Raises:
        GrammarError: As `compile_schema` does.
    """
    try:
        return Compiler(rules, schema, where).compile()
    except RecursionError:
        raise GrammarError(f"'{where}': is nested too deeply", where=where) from None
