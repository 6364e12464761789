"""The log that a server writes of its requests: one JSON line each, hashes instead of content.

The lines are a trace as cache simulators read them (`hash_ids` and the fields about them), with
what was reused beside it. Ids are keyed: without the key, which lies in a file of its own, nobody
can tell from a log whether a text that they guess was in it. `docs/explain.md` has all fields.
"""

from __future__ import annotations

import gzip
import json
import logging
import math
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from llamakeep.errors import InvalidValue, StoreError, whole_number
from llamakeep.explain.blocks import BLOCK_TOKENS, KEY_BYTES, block_ids, key_id, pseudonym, read_key
from llamakeep.explain.circumstances import Circumstances
from llamakeep.tokens import IntArray, as_tokens

logger = logging.getLogger("llamakeep")

_NEEDED: Final = ("timestamp", "block_size", "hash_ids", "input_length")
_MOST_LINE_BYTES: Final = 64 << 20
_MOONCAKE_BLOCK_TOKENS: Final = 512


@dataclass(frozen=True, slots=True)
class Recorded:
    """One request of a log. What a line does not say is None, empty or 0.

    Attributes:
        timestamp: When it came, in seconds.
        session_id: What its sender says that it belongs to.
        block_size: Tokens of a block; the last one may have fewer.
        hash_ids: An id for each block of the prompt; equal ids mean equal tokens up to the end of
            that block, in one namespace and with one salt.
        block_tokens: Tokens in each block.
        input_length: Tokens of the prompt.
        output_length: Tokens of the answer.
        id: Name of the request; in a file the number of its line, if it has none.
        key_id: Tells keys apart: ids of different keys cannot be compared.
        reused_tokens: Prompt tokens that were not evaluated.
        tier: Where they came from.
        reason: Why the rest had to be evaluated.
        circumstances: What else is known of it.
        tokens: The prompt, where texts are recorded.
        text: Its text, where texts are recorded.
    """

    timestamp: float
    session_id: str
    block_size: int
    hash_ids: tuple[int, ...]
    block_tokens: tuple[int, ...]
    input_length: int
    output_length: int = 0
    id: str = ""
    key_id: str = ""
    reused_tokens: int | None = None
    tier: str = ""
    reason: str = ""
    circumstances: Circumstances | None = None
    tokens: tuple[int, ...] | None = None
    text: str | None = None

    @property
    def evaluated_tokens(self) -> int | None:
        """Prompt tokens that were evaluated."""
        return None if self.reused_tokens is None else self.input_length - self.reused_tokens

    def common_blocks(self, other: Recorded) -> int:
        """Return how many leading blocks two prompts share; 0 where that cannot be known."""
        if self.key_id != other.key_id or self.block_size != other.block_size:
            return 0
        pairs = zip(self.hash_ids, other.hash_ids, strict=False)
        shorter = min(len(self.hash_ids), len(other.hash_ids))
        return next((i for i, (one, two) in enumerate(pairs) if one != two), shorter)

    def to_json(self) -> dict[str, Any]:
        """Return a line of a log, ready for JSON."""
        line: dict[str, Any] = {
            "timestamp": self.timestamp,
            "session_id": self.session_id,
            "block_size": self.block_size,
            "hash_ids": list(self.hash_ids),
            "block_tokens": list(self.block_tokens),
            "input_length": self.input_length,
            "output_length": self.output_length,
            "id": self.id,
            "key_id": self.key_id,
            "reused_tokens": self.reused_tokens,
            "evaluated_tokens": self.evaluated_tokens,
            "tier": self.tier,
            "reason": self.reason,
            "circumstances": self.circumstances and self.circumstances.to_json(),
            "tokens": None if self.tokens is None else list(self.tokens),
            "text": self.text,
        }
        return {name: value for name, value in line.items() if value not in (None, "")}

    @classmethod
    def from_json(cls, line: object) -> Recorded:
        """Return what `to_json` wrote, or a line of another trace; other fields are passed over.

        Raises:
            InvalidValue: For anything else, with the field.
        """
        if not isinstance(line, Mapping):
            raise InvalidValue(f"a line must be an object, not {type(line).__name__}")
        known: dict[str, Any] = {
            "timestamp": _seconds(line.get("timestamp")),
            "session_id": _text("session_id", line.get("session_id", "")),
            "block_size": whole_number("block_size", line.get("block_size"), 1),
            "hash_ids": _numbers("hash_ids", line.get("hash_ids")),
            "input_length": whole_number("input_length", line.get("input_length"), 0),
            "output_length": whole_number("output_length", line.get("output_length", 0), 0),
        }
        known["block_tokens"] = _block_tokens(line.get("block_tokens"), known)
        if isinstance(line.get("id"), int):
            known["id"] = str(line["id"])
        for name in ("id", "key_id", "tier", "reason", "text"):
            if name not in known and line.get(name) is not None:
                known[name] = _text(name, line[name])
        if line.get("reused_tokens") is not None:
            reused = whole_number("reused_tokens", line["reused_tokens"], 0)
            if reused > known["input_length"]:
                raise InvalidValue(f"reused_tokens is {reused}, of {known['input_length']} tokens")
            known["reused_tokens"] = reused
        if line.get("tokens") is not None:
            known["tokens"] = _numbers("tokens", line["tokens"])
        if line.get("circumstances") is not None:
            known["circumstances"] = Circumstances.from_json(line["circumstances"])
        return cls(**known)


def _block_tokens(value: object, known: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the tokens of each block; without them, all blocks but the last one are full."""
    n_blocks, size, length = len(known["hash_ids"]), known["block_size"], known["input_length"]
    if value is None:
        if n_blocks != -(-length // size):
            raise InvalidValue(f"{n_blocks} hash_ids, but {length} tokens in blocks of {size}")
        return tuple(min(size, length - start) for start in range(0, length, size))
    sizes = _numbers("block_tokens", value)
    if n_blocks != len(sizes):
        raise InvalidValue(f"{n_blocks} hash_ids, but block_tokens of {len(sizes)} blocks")
    wrong = next((i for i, n in enumerate(sizes) if not 1 <= n <= size), None)
    if wrong is not None:
        raise InvalidValue(f"block_tokens[{wrong}] is {sizes[wrong]}, of blocks of {size}")
    if sum(sizes) != length:
        raise InvalidValue(f"input_length is {length}, block_tokens sum to {sum(sizes)}")
    return sizes


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidValue(f"timestamp must be a number of seconds, not {value!r:.60}")
    try:
        seconds = float(value)
    except OverflowError:
        seconds = math.inf
    if not math.isfinite(seconds):
        raise InvalidValue(f"timestamp {value!r:.60} is no time")
    return seconds


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidValue(f"{name} must be a text, not {value!r:.60}")
    return value


def _numbers(name: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise InvalidValue(f"{name} must be a list of numbers, not {value!r:.60}")
    for index, each in enumerate(value):
        if isinstance(each, bool) or not isinstance(each, int):
            raise InvalidValue(f"{name}[{index}] must be a whole number, not {each!r:.60}")
    return tuple(value)


# -- files -----------------------------------------------------------------------------------------


class RecordLog:
    """Appends requests to a file. Any thread; each line is one write, so several may share a file.

    Args:
        path: The file; it is made with mode 0600, and appended to if it is there.
        key: `KEY_BYTES` for the ids; that of `read_key` if None.
        with_texts: Record tokens and texts, too.
        block_tokens: Tokens of a block.
        clock: Seconds.

    Raises:
        StoreError: When the file cannot be opened.
    """

    def __init__(
        self,
        path: Path,
        *,
        clock: Callable[[], float],
        key: bytes | None = None,
        with_texts: bool = False,
        block_tokens: int = BLOCK_TOKENS,
    ) -> None:
        self.path = path
        self.with_texts = with_texts
        self._block_tokens = whole_number("block_tokens", block_tokens, 1)
        self._key = read_key(path) if key is None else key
        if len(self._key) != KEY_BYTES:
            raise InvalidValue(f"the key has {len(self._key)} bytes, not {KEY_BYTES}")
        self._key_id = key_id(self._key)
        self._clock = clock
        self._lock = threading.Lock()
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0)
        try:
            self._file = os.open(path, flags | getattr(os, "O_BINARY", 0), 0o600)
        except OSError as error:
            raise StoreError(f"cannot write {path}: {error.strerror or error}") from error
        self._closed = False

    def __enter__(self) -> RecordLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(
        self,
        tokens: IntArray,
        *,
        namespace: bytes,
        request_id: str,
        session_id: str = "",
        output_tokens: int = 0,
        circumstances: Circumstances | None = None,
        text: str | None = None,
    ) -> Recorded:
        """Append a request, and return what was written. Costs a hash of its tokens and a write.

        Args:
            tokens: The prompt.
            namespace: Digest of its namespace.
            request_id: Its name.
            session_id: What its sender says that it belongs to; a keyed hash of it is written,
                unless texts are recorded.
            output_tokens: Tokens of the answer.
            circumstances: How it was served.
            text: The prompt's text; left out unless texts are recorded.

        Raises:
            StoreError: When it cannot be written, or the log is closed.
        """
        size, n_tokens = self._block_tokens, int(tokens.size)
        if session_id and not self.with_texts:
            session_id = pseudonym(session_id, key=self._key)
        known = circumstances or Circumstances()
        line = Recorded(
            round(self._clock(), 6),
            session_id,
            size,
            block_ids(tokens, key=self._key, namespace=namespace, block_tokens=size),
            tuple(min(size, n_tokens - start) for start in range(0, n_tokens, size)),
            n_tokens,
            output_tokens,
            request_id,
            self._key_id,
            known.reused_tokens,
            known.tier,
            known.reason,
            circumstances,
            tuple(tokens.tolist()) if self.with_texts else None,
            text if self.with_texts else None,
        )
        data = json.dumps(line.to_json(), separators=(",", ":")).encode() + b"\n"
        with self._lock:
            self._write(data)
        return line

    def _write(self, data: bytes) -> None:
        if self._closed:
            raise StoreError(f"{self.path} is closed")
        try:
            written = os.write(self._file, data)
            while written < len(data):
                written += os.write(self._file, data[written:])
        except OSError as error:
            raise StoreError(f"cannot write {self.path}: {error.strerror or error}") from error

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self._file)


def read_log(path: Path, *, mooncake: bool = False) -> Iterator[Recorded]:
    """Yield the requests of a log or of another trace; a name that ends in `.gz` is unpacked.

    A request without an id has the number of its line. Empty lines are passed over, and so is a
    last line without an end that is no JSON, which a process left that was killed; that is logged.

    Args:
        path: The file.
        mooncake: Take a line without a `block_size` as one of Mooncake's traces.

    Raises:
        InvalidValue: For a line that is none, with its number.
        StoreError: When the file cannot be read.
    """
    for number, data in _lines(path):
        if not data.strip():
            continue
        try:
            found = json.loads(data)
            found = _of_mooncake(found) if mooncake else found
            if number == 1 and not mooncake:
                _check_is_log(found)
            line = Recorded.from_json(found)
        except RecursionError:
            raise InvalidValue(f"{path}, line {number}: nested too deeply") from None
        except UnicodeDecodeError as error:
            if number > 1 and not data.endswith(b"\n"):
                logger.warning("%s, line %d was cut off, and is left out", path, number)
                return
            raise InvalidValue(f"{path}, line {number}: no UTF-8 at byte {error.start}") from None
        except InvalidValue as error:
            raise InvalidValue(f"{path}, line {number}: {error}") from None
        except ValueError as error:
            if number > 1 and not data.endswith(b"\n"):
                logger.warning("%s, line %d was cut off, and is left out", path, number)
                return
            raise InvalidValue(f"{path}, line {number}: no JSON: {error}") from None
        yield line if line.id else replace(line, id=str(number))


def _of_mooncake(line: Any) -> Any:
    """Return a line of Mooncake's with what these leave out: blocks of 512, milliseconds."""
    if not isinstance(line, Mapping) or "block_size" in line:
        return line
    time = line.get("timestamp")
    seconds = time / 1e3 if isinstance(time, (int, float)) else time
    return {**line, "block_size": _MOONCAKE_BLOCK_TOKENS, "timestamp": seconds}


def _check_is_log(value: object) -> None:
    """Refuse a file whose first line is of something else."""
    if isinstance(value, Mapping):
        missing = [name for name in _NEEDED if name not in value]
        if missing:
            what = ", ".join(missing)
            raise InvalidValue(f"not a log of llamakeep serve --record: it has no {what}")


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    number = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            while data := file.readline(_MOST_LINE_BYTES):
                number += 1
                if len(data) == _MOST_LINE_BYTES:
                    most = _MOST_LINE_BYTES >> 20
                    raise InvalidValue(f"{path}, line {number}: longer than {most} MiB")
                yield number, data
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        place = f" after line {number}" if number else ""
        raise StoreError(f"cannot read {path}{place}: {reason}") from error


def tokens_of(line: Recorded) -> IntArray | None:
    """Return the tokens of a prompt, if they were recorded.

    Raises:
        TokenError: For numbers that are none.
    """
    return None if line.tokens is None else as_tokens(line.tokens)
