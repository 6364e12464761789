"""Grammars of tool calls, kept: agents send the same tools with each request."""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from llamakeep.errors import GrammarError, IntegrityError
from llamakeep.runtime.base import Vocab
from llamakeep.tool_calls import Format, Thoughts, Tool
from llamakeep.tool_calls.grammar import Grammar, as_json, as_schema, grammar_of

_KEPT_CHARS = 8 << 20
_log = logging.getLogger("llamakeep")


class ToolGrammars:
    """Makes grammars, and keeps those that were asked for last. Any thread may use it.

    Args:
        vocab: The model's.
        kept_chars: Length of all that is kept together, tools included.
    """

    def __init__(self, vocab: Vocab, kept_chars: int = _KEPT_CHARS) -> None:
        self._vocab = vocab
        self._most_chars = kept_chars
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Grammar | GrammarError] = OrderedDict()
        self._n_chars = 0

    def grammar(
        self,
        form: Format,
        tools: Sequence[Tool],
        *,
        required: bool,
        parallel: bool,
        thoughts: Thoughts | None,
        thinking: bool,
        said: Any = None,
        said_where: str = "format",
    ) -> Grammar | None:
        """Return what calls have to match; None where that is nothing, as calls need not come.

        Schemas that are too large together, or that no answer can be made to follow, are followed
        as far as calls are calls. See `grammar_of` for the arguments, and what it costs the first
        time; afterwards it is the tools' JSON that costs.

        Raises:
            GrammarError: Where calls are required, a tool is strict, or what is said has a schema,
                and that cannot be had.
        """
        what = [(tool.name, tool.parameters, tool.strict) for tool in tools]
        marks = None if thoughts is None else thoughts.open
        key = json.dumps([form.name, what, required, parallel, marks, thinking, said, said_where])
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
        if found is None:
            shape = (said, said_where)
            found = self._make(form, tools, required, parallel, thoughts, thinking, shape)
            self._keep(key, found)
        if isinstance(found, Grammar):
            return found
        if required or said is not None or any(tool.strict for tool in tools):
            raise GrammarError(str(found), where=found.where)
        _log.debug("calls are held to no grammar: %s", found)
        return None

    def _make(
        self,
        form: Format,
        tools: Sequence[Tool],
        required: bool,
        parallel: bool,
        thoughts: Thoughts | None,
        thinking: bool,
        shape: tuple[Any, str],
    ) -> Grammar | GrammarError:
        ways = (as_schema,) if any(tool.strict for tool in tools) else (as_schema, as_json)
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
                    said=shape[0],
                    said_where=shape[1],
                    held=held,
                )
                self._vocab.check_grammar(grammar.text)
            except GrammarError as error:
                failed = failed or error
            else:
                return grammar
        assert failed is not None
        return GrammarError(str(failed), where=failed.where)  # without the frames it came through

    def _keep(self, key: str, found: Grammar | GrammarError) -> None:
        n_chars = _size(key, found)
        with self._lock:
            if n_chars > self._most_chars or key in self._kept:
                return
            self._n_chars += n_chars
            while self._n_chars > self._most_chars:
                old, gone = self._kept.popitem(last=False)
                self._n_chars -= _size(old, gone)
            self._kept[key] = found

    def check(self) -> None:
        """Raise if what is counted is not what is kept."""
        with self._lock:
            n_chars = sum(_size(key, found) for key, found in self._kept.items())
            if not n_chars == self._n_chars <= self._most_chars:
                raise IntegrityError(
                    f"grammars of {n_chars:,} characters are counted as {self._n_chars:,}, "
                    f"at most {self._most_chars:,}"
                )


def _size(key: str, found: Grammar | GrammarError) -> int:
    return len(key) + (len(found.text) if isinstance(found, Grammar) else len(str(found)))
