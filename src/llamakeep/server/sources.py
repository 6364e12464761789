"""Where a server's settings come from.

Each source over the one before::

    defaults < TOML file (--config FILE, or LLAMAKEEP_CONFIG) < LLAMAKEEP_* < flags
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llamakeep.errors import InvalidValue
from llamakeep.server.options import PREFIX, Option
from llamakeep.server.settings import BY_NAME, OPTIONS, ServerSettings, beside

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover - depends on the Python
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

CONFIG_ENV = PREFIX + "CONFIG"

_BY_KEY = {each.key: each for each in OPTIONS}
_ALTERNATIVES = (("chat_template", "chat_template_file"),)


def resolve(
    flags: Mapping[str, Any] | None = None,
    *,
    config: str | Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> ServerSettings:
    """Return the settings that all sources together say.

    A variable that is empty is as one that is not set, as for `attach`; an empty flag switches off
    what the others have, where something can be off.

    Args:
        flags: Texts (a bool for a switch, a list for what is repeatable) by the option's name;
            None for a flag that did not come.
        config: The TOML file; None for that of `LLAMAKEEP_CONFIG`, or none.
        environment: In place of that of the process.

    Raises:
        InvalidValue: For a value that cannot be meant: which option it is, and where it stands.
    """
    env = os.environ if environment is None else environment
    path = config if config is not None else env.get(CONFIG_ENV)
    given: dict[str, tuple[int, str, Any]] = {}
    if path:
        name = "--config" if config is not None else CONFIG_ENV
        for option_, where, value in _of_file(Path(path).expanduser(), name):
            given[option_.name] = (0, where, value)
    for each in OPTIONS:
        if env.get(each.env):
            given[each.name] = (1, each.env, _read(each, each.env, env[each.env]))
    for name, value in (flags or {}).items():
        if value is not None and value != []:
            flag = BY_NAME[name].flag
            if value is False:
                flag = f"--no-{BY_NAME[name].key}"
            given[name] = (2, flag, _read(BY_NAME[name], flag, value))
    for names in _ALTERNATIVES:
        _keep_one(given, names)
    if not given.get("model", (0, "", None))[2]:
        raise InvalidValue("no model: say which GGUF file with --model FILE (-m)")
    values = {name: value for name, (_, _, value) in given.items()}
    sources = {name: where for name, (_, where, _) in given.items()}
    return ServerSettings(**values, sources=sources)


def _keep_one(given: dict[str, tuple[int, str, Any]], names: tuple[str, ...]) -> None:
    """Drop of several options for one thing those of the lower sources."""
    there = sorted((given[name] for name in names if name in given), key=lambda each: each[0])
    if len(there) > 1 and there[-1][0] == there[-2][0]:
        raise InvalidValue(f"{there[-2][1]} and {there[-1][1]} are two ways to say one thing")
    for name in names:
        if name in given and given[name] is not there[-1]:
            del given[name]


def _read(option_: Option, where: str, value: Any) -> Any:
    try:
        return option_.kind.read(value)
    except InvalidValue as error:
        if option_.is_secret:
            raise InvalidValue(f"{where} has a value that cannot be meant") from None
        raise InvalidValue(f"{where} {error}") from None


def _of_file(path: Path, named_by: str) -> list[tuple[Option, str, Any]]:
    """Return what a TOML file says; paths in it are relative to it."""
    try:
        said: dict[str, Any] = tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise InvalidValue(f"{named_by}: cannot read {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidValue(f"{path} is not TOML: {error}") from None
    found = []
    for key, value in said.items():
        option_ = _BY_KEY.get(key.replace("_", "-"))
        if option_ is None:
            near = difflib.get_close_matches(key.replace("_", "-"), _BY_KEY, 1, 0.0)
            raise InvalidValue(
                f"{path.name} has an unknown key {key!r}; the nearest is {near[0]!r}"
            )
        where = f"{key} in {path.name}"
        value = _read(option_, where, value)
        found.append(
            (
                option_,
                where,
                beside(path.absolute().parent, value) if option_.kind.is_path else value,
            )
        )
    return found
