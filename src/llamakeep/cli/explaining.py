"""What `explain` reads, and how it shows what it found."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from llamakeep.cli import screen
from llamakeep.cli.asking import get_json
from llamakeep.errors import InvalidValue, StoreError
from llamakeep.explain import Explanation, Side, explain, explain_logged
from llamakeep.explain.ordering import MOST_DEPTH, too_deep
from llamakeep.explain.prompts import side_of
from llamakeep.runtime.base import Vocab

_STDIN: Final = "-"
_MOST_BYTES: Final = 64 << 20
_WIDTH: Final = 96
_LABEL: Final = 10


@dataclass(frozen=True)
class Asked:
    """What is to be explained.

    Attributes:
        before: A file, or `-`.
        after: A file, or `-`.
        log: A log of requests.
        url: A server.
        request_id: Which request of those.
        api_key: The server's key, or "".
        model: A GGUF file whose vocabulary makes text of tokens.
        as_text: Files are texts, whatever is in them.
    """

    before: str | None = None
    after: str | None = None
    log: Path | None = None
    url: str | None = None
    request_id: str | None = None
    api_key: str = field(default="", repr=False)
    model: Path | None = None
    as_text: bool = False


def explain_asked(asked: Asked, *, as_json: bool) -> None:
    """Print an explanation.

    Raises:
        InvalidValue: For options that do not go together, and for what is no prompt, no log, or
            no answer.
        ModelError: For a model that cannot be read.
        StoreError: For a file or a server that cannot be read.
    """
    _check(asked)
    with ExitStack() as stack:
        vocab: Vocab | None = None
        if asked.model is not None:
            from llamakeep.runtime.llama_text import load_vocab

            vocab = stack.enter_context(load_vocab(asked.model))
        found = _explained(asked, vocab)
    if as_json:
        screen.print_json(found.to_json())
    else:
        _show(found)


def _check(asked: Asked) -> None:
    ways = [asked.before is not None, asked.log is not None, asked.url is not None]
    if sum(ways) > 1:
        raise InvalidValue("two files, --log or --url: one of them")
    if not any(ways):
        raise InvalidValue("nothing to explain: give two files, --log or --url")
    if asked.before is not None:
        if asked.after is None:
            raise InvalidValue(f"{asked.before} alone: give the prompt that came after it, too")
        if asked.before == asked.after == _STDIN:
            raise InvalidValue("standard input can be one of the two, not both")
        if asked.request_id is not None:
            raise InvalidValue("--id is for --log and --url")


def _explained(asked: Asked, vocab: Vocab | None) -> Explanation:
    if asked.log is not None:
        return explain_logged(asked.log, asked.request_id, vocab=vocab)
    if asked.url is not None:
        # Clients are given the address of the API, which is below the server's.
        url = asked.url.rstrip("/").removesuffix("/v1")
        answer = get_json(url, ("explain", asked.request_id), api_key=asked.api_key)
        return Explanation.from_json(answer)
    names = (asked.before or "", asked.after or "")
    before, after = (_read(name, as_text=asked.as_text) for name in names)
    pairs = (
        before.text is not None and after.text is not None,
        before.tokens is not None and after.tokens is not None,
        before.body is not None and after.body is not None,
    )
    if not any(pairs):
        raise InvalidValue(
            f"{_shown(names[0])} is {_form(before)}, and {_shown(names[1])} is {_form(after)}: "
            "they cannot be compared"
        )
    return explain(before, after, vocab=vocab)


def _form(side: Side) -> str:
    if side.body is not None:
        return "the body of a request"
    return "a list of tokens" if side.tokens is not None else "a text"


# -- reading ---------------------------------------------------------------------------------------


def _shown(name: str) -> str:
    return "standard input" if name == _STDIN else name


def _read(name: str, *, as_text: bool) -> Side:
    data = _bytes(name)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidValue(f"{_shown(name)} is no UTF-8, at byte {error.start}") from None
    if as_text or not text.lstrip("\ufeff \t\r\n").startswith(("{", "[")):
        return Side(text=_without_end(text))
    try:
        value = json.loads(text.lstrip("\ufeff"))
    except RecursionError:
        raise InvalidValue(f"{_shown(name)} is nested too deeply") from None
    except ValueError as error:
        if Path(name).suffix.lower() == ".json":
            raise InvalidValue(f"{_shown(name)} is no JSON: {error}") from None
        return Side(text=_without_end(text))  # a text may begin with a bracket
    if too_deep(value, most=2 * MOST_DEPTH):
        raise InvalidValue(f"{_shown(name)} is nested more than {2 * MOST_DEPTH} times")
    return _side(name, value)


def _without_end(text: str) -> str:
    """Return a text without the line end that editors put behind the last line of a file."""
    return text.removesuffix("\n").removesuffix("\r")


def _bytes(name: str) -> bytes:
    try:
        if name == _STDIN:
            data = sys.stdin.buffer.read(_MOST_BYTES + 1)
        else:
            with Path(name).open("rb") as file:
                data = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise StoreError(f"cannot read {_shown(name)}: {error.strerror or error}") from error
    if len(data) > _MOST_BYTES:
        raise InvalidValue(f"{_shown(name)} is larger than {_MOST_BYTES >> 20} MiB")
    return data


def _side(name: str, value: Any) -> Side:
    if isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
        value = {"messages": value}
    try:
        if isinstance(value, Mapping):
            _check_messages(value)
            return side_of(value)
        if isinstance(value, list) and value and all(isinstance(each, int) for each in value):
            return side_of(value)
    except InvalidValue as error:
        raise InvalidValue(f"{_shown(name)}: {error} (--text takes it as it is)") from None
    raise InvalidValue(
        f"{_shown(name)} is a JSON list of neither tokens nor messages (--text takes it as it is)"
    )


def _check_messages(body: Mapping[str, Any]) -> None:
    """Refuse what no server takes: a chat without messages, and messages that are none."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        return
    if not messages:
        raise InvalidValue("messages is empty: there is no prompt")
    for index, each in enumerate(messages):
        if not isinstance(each, Mapping):
            raise InvalidValue(f"messages[{index}] must be an object, not {each!r:.60}")


# -- showing ---------------------------------------------------------------------------------------


def _show(found: Explanation) -> None:
    lines = [
        ("kind", found.kind.value),
        ("reason", found.reason),
        ("request", _requests(found)),
        ("where", _where(found)),
        ("text", _quoted(found.around.shared, tail=True)),
        ("before", _quoted(found.around.before)),
        ("now", _quoted(found.around.after)),
        ("tokens", _figures(found)),
        ("also", ", ".join(kind.value for kind in found.also)),
        ("advice", found.advice),
    ]
    for label, text in lines:
        if text:
            indent = " " * _LABEL
            wrapped = textwrap.fill(
                screen.printable(text),
                _WIDTH,
                initial_indent=label.ljust(_LABEL),
                subsequent_indent=indent,
                drop_whitespace=label not in ("text", "before", "now"),
                break_on_hyphens=False,
                break_long_words=label != "request",
            )
            screen.say(wrapped)


def _requests(found: Explanation) -> str:
    if not found.request_id:
        return ""
    return found.request_id + (f", after {found.before_id}" if found.before_id else "")


def _where(found: Explanation) -> str:
    said = [found.part]
    if found.char_index is not None:
        said.append(f"character {found.char_index:,}")
    if found.token_index is not None:
        span = found.token_range or 1
        last = f" to {found.token_index + span - 1:,}" if span > 1 else ""
        said.append(f"token {found.token_index:,}{last}")
    if found.nearest_checkpoint is not None:
        said.append(f"nearest checkpoint at token {found.nearest_checkpoint:,}")
    return ", ".join(filter(None, said))


def _quoted(text: str, *, tail: bool = False) -> str:
    if not text:
        return ""
    quoted = json.dumps(text, ensure_ascii=False)
    return f"...{quoted}" if tail else f"{quoted}..."


def _figures(found: Explanation) -> str:
    said = []
    if found.reused_tokens is not None:
        source = f" from {found.tier}" if found.tier and found.reused_tokens else ""
        said.append(f"{found.reused_tokens:,} reused{source}")
    if found.evaluated_tokens is not None:
        said.append(f"{found.evaluated_tokens:,} evaluated")
    if found.lost_tokens is not None:
        said.append(f"up to {found.lost_tokens:,} of them need not have been")
    return ", ".join(said)
