"""What an option of the server is, and what it takes: a flag's text, or a value of a TOML file."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamakeep.errors import InvalidValue
from llamakeep.sizes import format_bytes, parse_bytes

PREFIX = "LLAMAKEEP_"
NO_LIMIT = -1

_MOST = (1 << 31) - 1
_WHOLE = re.compile(r"[+-]?[0-9]{1,18}")
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^\s/,]+", re.IGNORECASE)
_WORDS = dict.fromkeys(("true", "on", "yes", "1", "enabled"), True)
_WORDS |= dict.fromkeys(("false", "off", "no", "0", "disabled"), False)


@dataclass(frozen=True, slots=True)
class Kind:
    """What an option takes.

    Attributes:
        read: Returns the value that text, or a value of a TOML file, means. Raises `InvalidValue`
            with a message that goes on after the option's name: "must be ...".
        metavar: Stands for the value in help; "" for a switch, which takes none.
        repeatable: The flag may come several times; elsewhere it is a list, or commas are between.
        is_path: A relative one is meant from where it is written.
        show: Returns what help shows of a default.
    """

    read: Callable[[Any], Any]
    metavar: str = ""
    repeatable: bool = False
    is_path: bool = False
    show: Callable[[Any], str] = str


def read_text(value: Any) -> str:
    """Return text as it is."""
    if not isinstance(value, str) or "\0" in value:
        raise InvalidValue("must be text")
    return value


def whole(least: int, most: int = _MOST, metavar: str = "N") -> Kind:
    """Return the kind of whole numbers from `least` to `most`."""

    def read(value: Any) -> int:
        if isinstance(value, str) and _WHOLE.fullmatch(value.strip()):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidValue(f"must be a whole number, not {value!r}")
        if not least <= value <= most:
            limits = f"{least} or more" if most == _MOST else f"between {least} and {most}"
            raise InvalidValue(f"must be {limits}, not {value}")
        return value

    return Kind(read, metavar)


def or_none(kind: Kind, *words: int | str) -> Kind:
    """Return a kind in which some values mean None: that nothing was chosen."""

    def read(value: Any) -> Any:
        if value in words or str(value) in map(str, words):
            return None
        return kind.read(value)

    return dataclasses.replace(kind, read=read)


def real(least: float, most: float = math.inf, metavar: str = "X") -> Kind:
    """Return the kind of finite numbers from `least` to `most`."""

    def read(value: Any) -> float:
        try:
            number = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not (math.isfinite(number) and least <= number <= most):
            limits = f"of {least:g} or more" if most == math.inf else f"from {least:g} to {most:g}"
            raise InvalidValue(f"must be a number {limits}, not {value!r}")
        return number

    return Kind(read, metavar, show="{:g}".format)


def choice(*names: str) -> Kind:
    """Return the kind of one of some words; where `on` is one, other words for it are, too."""

    def read(value: Any) -> str:
        said = value if isinstance(value, bool) else None
        if said is None and "on" in names:
            said = _WORDS.get(str(value).strip().lower())
        word = value if said is None else ("on" if said else "off")
        if word not in names:
            near = difflib.get_close_matches(str(word), names, 1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise InvalidValue(f"must be one of {', '.join(names)}, not {value!r}{hint}")
        return str(word)

    return Kind(read, "|".join(names) if len(names) <= 4 else "TYPE")


def _read_switch(value: Any) -> bool:
    word = value if isinstance(value, bool) else _WORDS.get(str(value).strip().lower())
    if word is None:
        raise InvalidValue(f"must be true or false, not {value!r}")
    return word


def _read_size(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    try:
        return parse_bytes(value)
    except (InvalidValue, TypeError):
        raise InvalidValue(f"must be a size like 512MiB or 8GiB, not {value!r}") from None


def read_ram(value: Any) -> int:
    """Read MiB, as llama-server takes them, or a size with its unit."""
    text = str(value).strip()
    if isinstance(value, (int, str)) and not isinstance(value, bool):
        if text == str(NO_LIMIT):
            return NO_LIMIT
        if _WHOLE.fullmatch(text) and int(text) >= 0:
            return int(text) << 20
        if not _WHOLE.fullmatch(text):
            try:
                return parse_bytes(text)
            except InvalidValue:
                pass
    raise InvalidValue(f"must be in MiB or like 8GiB, 0 for off or -1 for no limit, not {value!r}")


def _read_path(value: Any) -> Path | None:
    return Path(read_text(value)).expanduser() if value != "" else None


def read_layers(value: Any) -> int:
    """Read a number of layers; what llama-server calls `auto` and `all` is -1."""
    return -1 if value in ("auto", "all") else int(whole(-1).read(value))


def read_values(value: Any) -> Mapping[str, Any]:
    """Read an object with values: JSON, or a table of a TOML file."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = None
    if not isinstance(value, dict):
        raise InvalidValue('must be a JSON object, like {"enable_thinking": false}')
    return value


def read_unified(value: Any) -> bool:
    """Read a switch that cannot be off."""
    if not _read_switch(value):
        raise InvalidValue(
            "is refused: prefixes are shared between slots and kept in pieces, which llama.cpp can "
            "do in a unified buffer only"
        )
    return True


def read_origin(value: Any) -> str:
    """Read an origin as browsers name it, `*`, or `localhost`."""
    if value == "localhost":
        return "localhost"
    if not _ORIGIN.fullmatch(read_text(value)):
        raise InvalidValue(f"must be an origin like https://example.org, or *, not {value!r}")
    return str(value)


def read_scaled(value: Any) -> tuple[Path, float]:
    """Read an adapter's file and its scale."""
    name, colon, scale = read_text(value).rpartition(":")
    try:
        number = float(scale)
    except ValueError:
        number = math.nan
    if not (colon and name and math.isfinite(number)):
        raise InvalidValue(f"must be like style.gguf:0.8, not {value!r}")
    return Path(name).expanduser(), number


def read_name(value: Any) -> str:
    """Read text that is not empty."""
    if not read_text(value).strip():
        raise InvalidValue("must not be empty")
    return str(value).strip()


def read_hosts(value: Any) -> tuple[str, ...]:
    """Read addresses to listen on: at least one, and none of a UNIX socket."""
    hosts = tuple(read_name(each) for each in many(read_name, "HOST").read(value))
    if not hosts:
        raise InvalidValue("must not be empty")
    for host in hosts:
        if host.endswith(".sock"):
            raise InvalidValue(f"must be an address or a name: {host!r} would be a UNIX socket")
    return hosts


def read_file(value: Any) -> Path:
    """Read a file's name, which is not empty."""
    path = _read_path(value)
    if path is None:
        raise InvalidValue("must name a file")
    return path


def many(read: Callable[[Any], Any], metavar: str, *, is_path: bool = False) -> Kind:
    """Return a kind that takes several values: a list, or text with commas between them."""

    def read_all(value: Any) -> tuple[Any, ...]:
        given = value if isinstance(value, (list, tuple)) else [value]
        items = []
        for each in given:
            items += [part.strip() for part in each.split(",")] if isinstance(each, str) else [each]
        return tuple(read(item) for item in items if item != "")

    return Kind(read_all, metavar, repeatable=True, is_path=is_path)


def read_keys(value: Any) -> tuple[str, ...]:
    """Read keys; none at all is refused, for that would let everybody in."""
    keys: tuple[str, ...] = many(read_text, "KEY").read(value)
    if not keys:
        raise InvalidValue("must not be empty")
    return keys


TEXT = Kind(read_text, "TEXT")
SWITCH = Kind(_read_switch, show=lambda value: "on" if value else "off")
SIZE = Kind(_read_size, "SIZE", show=format_bytes)
FILE = Kind(_read_path, "FILE", is_path=True)
DIRECTORY = Kind(_read_path, "DIR", is_path=True)


@dataclass(frozen=True, slots=True)
class Option:
    """One line of the table.

    Attributes:
        name: The field of `ServerSettings`.
        flags: On the command line; llama-server's names where it has the option.
        kind: What it takes.
        default: The value if no source has one.
        help: One or two sentences.
        section: Under which heading help lists it.
        is_secret: Never shown.
    """

    name: str
    flags: tuple[str, ...]
    kind: Kind
    default: Any
    help: str
    section: str
    is_secret: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """Its keys in a TOML file, where `_` may stand for `-`: every long name of the flag."""
        long = (flag[2:].partition("/")[0] for flag in self.flags if flag.startswith("--"))
        return tuple(long) or (self.name.replace("_", "-"),)

    @property
    def key(self) -> str:
        """The first of them."""
        return self.keys[0]

    @property
    def flag(self) -> str:
        """What messages call it."""
        return f"--{self.key}" if self.flags else self.env

    @property
    def env(self) -> str:
        """The environment variable."""
        return env_of(self.key)


def env_of(key: str) -> str:
    """Return the environment variable that stands for a key."""
    return PREFIX + key.replace("-", "_").upper()


def option(section: str, flags: str, kind: Kind, text: str) -> dict[str, Any]:
    """Return what a dataclass field that is an option says of itself, as its metadata.

    Args:
        section: Under which heading help lists it.
        flags: With spaces between them; none for what the command line does not take.
        kind: What it takes.
        text: Its help.
    """
    return {"section": section, "flags": tuple(flags.split()), "kind": kind, "help": text}
