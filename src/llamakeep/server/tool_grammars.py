"""Grammars of tool calls, kept: agents send the same tools with each request."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

from llamakeep.errors import GrammarError
from llamakeep.gbnf import KeptGrammars
from llamakeep.runtime.base import Vocab
from llamakeep.tool_calls import Format, Said, Thoughts, Tool
from llamakeep.tool_calls.grammar import Grammar, as_json, as_schema, grammar_of

_KEPT_CHARS = 8 << 20
_log = logging.getLogger("llamakeep")


class ToolGrammars:
    """Makes grammars, and keeps those that were asked for last. Any thread may use it.

    Args:
        vocab: The model's.
        kept_chars: Length of all that is kept together, tools included, in characters.
    """

    def __init__(self, vocab: Vocab, kept_chars: int = _KEPT_CHARS) -> None:
        self._vocab = vocab
        self._kept: KeptGrammars[Grammar] = KeptGrammars(kept_chars, lambda made: len(made.text))

    def grammar(
        self,
        form: Format,
        tools: Sequence[Tool],
        *,
        required: bool,
        parallel: bool,
        thoughts: Thoughts | None,
        thinking: bool,
        said: Said | None = None,
    ) -> Grammar | None:
        """Return what calls have to match; None where that is nothing, as calls need not come.

        Schemas that are too large together, or that no answer can be made to follow, are followed
        as far as calls are calls. See `grammar_of` for the arguments, and what it costs the first
        time; afterwards it is the tools' JSON that costs.

        Raises:
            GrammarError: Where calls are required, a tool is strict, or what is said has a schema,
                and that cannot be had.
        """
        what = [(tool.name, tool.path, tool.parameters, tool.strict) for tool in tools]
        marks = None if thoughts is None else thoughts.open
        shape = None if said is None else (said.schema, said.where)
        key = json.dumps([form.name, what, required, parallel, marks, thinking, shape])

        def make() -> Grammar:
            return self._make(form, tools, required, parallel, thoughts, thinking, said)

        try:
            return self._kept.get(key, make)
        except GrammarError as error:
            if required or said is not None or any(tool.strict for tool in tools):
                raise
            _log.debug("calls are held to no grammar: %s", error)
            return None

    def _make(
        self,
        form: Format,
        tools: Sequence[Tool],
        required: bool,
        parallel: bool,
        thoughts: Thoughts | None,
        thinking: bool,
        said: Said | None,
    ) -> Grammar:
        may_be_less = bool(tools) and not any(tool.strict for tool in tools)
        ways = (as_schema, as_json) if may_be_less else (as_schema,)
        failed: GrammarError | None = None
        for held in ways:
            try:
                grammar = grammar_of(
                    form,
                    tools,
                    required=required,
                    parallel=parallel,
                    thoughts=thoughts,
                    thinking=thinking,
                    said=said,
                    held=held,
                )
                self._vocab.check_grammar(grammar.text)
            except GrammarError as error:
                failed = failed or error
            else:
                return grammar
        assert failed is not None
        raise failed

    def check(self) -> None:
        """Raise if what is counted is not what is kept."""
        self._kept.check()
