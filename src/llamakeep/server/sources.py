"""Where a server's settings come from.

Each source over the one before::

    defaults < TOML file (--config FILE, or LLAMAKEEP_CONFIG)
             < LLAMA_ARG_* (llama-server's) < LLAMAKEEP_* < flags
"""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from llamakeep.errors import InvalidValue
from llamakeep.server import accepted, llama_env
from llamakeep.server.accepted import ACCEPTED
from llamakeep.server.options import PREFIX, Option, env_of
from llamakeep.server.settings import BY_NAME, OPTIONS, ServerSettings, beside
from llamakeep.tiers import ENVIRONMENT

if sys.version_info >= (3, 11):
    import tomllib
else:  # pragma: no cover - depends on the Python
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

CONFIG_ENV = PREFIX + "CONFIG"

_OTHER_ENVIRONMENT = {CONFIG_ENV, *ENVIRONMENT.values(), PREFIX + "TEST_CACHE"}
_BY_KEY = {key: each for each in OPTIONS for key in each.keys}
_BY_LETTER = {
    flag[1:]: each.key
    for each in OPTIONS
    for flag in each.flags
    if flag.startswith("-") and not flag.startswith("--")
}
_ACCEPTED_KEYS = {each.key: each for each in ACCEPTED}
_CLOSE = 0.6
"""How much a name must have of another one to be taken for a slip of it."""
_ALTERNATIVES = (
    ("chat_template", "chat_template_file"),
    ("load_mode", "mmap"),
    ("load_mode", "mlock"),
)


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
    notices: list[str] = []
    if path:
        name = "--config" if config is not None else CONFIG_ENV
        for option_, where, value in _of_file(Path(path).expanduser(), name, notices):
            given[option_.name] = (0, where, value)
    for option_name, (variable, text) in llama_env.read(env).items():
        given[option_name] = (1, variable, _read(BY_NAME[option_name], variable, text))
    for each in OPTIONS:
        if env.get(each.env):
            given[each.name] = (2, each.env, _read(each, each.env, env[each.env]))
    notices += _of_environment(env)
    for name, value in (flags or {}).items():
        if value in (None, []):
            continue
        if name in accepted.BY_NAME:
            notices.append(accepted.BY_NAME[name].notice(f"--{accepted.BY_NAME[name].key}"))
        else:
            flag = BY_NAME[name].flag
            if value is False:
                flag = f"--no-{BY_NAME[name].key}"
            given[name] = (3, flag, _read(BY_NAME[name], flag, value))
    for names in _ALTERNATIVES:
        _keep_one(given, names)
    if not given.get("model", (0, "", None))[2]:
        raise InvalidValue("no model: say which GGUF file with --model FILE (-m)")
    values = {name: value for name, (_, _, value) in given.items()}
    sources = {name: where for name, (_, where, _) in given.items()}
    settings = ServerSettings(**values, sources=sources)
    notices += accepted.idle_notices(settings)
    return replace(settings, notices=tuple(notices))


def _of_environment(env: Mapping[str, str]) -> list[str]:
    """Return what is to be said of variables that stand for no option of this server."""
    notices = []
    names = {env_of(key): each.env for key, each in _BY_KEY.items()}
    without_effect = {each.env: each for each in ACCEPTED}
    for name in sorted(env):
        if not name.startswith(PREFIX) or name in _OTHER_ENVIRONMENT or not env[name]:
            continue
        if name in without_effect:
            notices.append(without_effect[name].notice(name))
        elif names.get(name) != name:
            nearest = _nearest(name.removeprefix(PREFIX).replace("_", "-").lower(), _BY_KEY)
            near = names.get(name) or (env_of(nearest) if nearest else "")
            hint = f"; did you mean {near}?" if near else ""
            notices.append(f"{name} is not known, and ignored{hint}")
    notices += [f"{name} is not known here, and ignored" for name in llama_env.unknown(env)]
    return notices


def _nearest(name: str, names: Iterable[str]) -> str:
    return next(iter(difflib.get_close_matches(name, list(names), 1, _CLOSE)), "")


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


def _of_file(path: Path, named_by: str, notices: list[str]) -> list[tuple[Option, str, Any]]:
    """Return what a TOML file says; paths in it are relative to it. Adds to the notices."""
    try:
        said: dict[str, Any] = tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise InvalidValue(f"{named_by}: cannot read {path}: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidValue(f"{path} is not TOML: {error}") from None
    found: dict[str, tuple[Option, str, Any]] = {}
    for key, value in said.items():
        name, where = key.replace("_", "-"), f"{key} in {path.name}"
        if name in _ACCEPTED_KEYS:
            notices.append(_ACCEPTED_KEYS[name].notice(where))
            continue
        option_ = _BY_KEY.get(name)
        if option_ is None:
            raise InvalidValue(_unknown(path.name, key, value))
        if option_.name in found:
            raise InvalidValue(f"{found[option_.name][1]} and {where} are one option")
        value = _read(option_, where, value)
        if option_.kind.is_path:
            value = beside(path.absolute().parent, value)
        found[option_.name] = (option_, where, value)
    return list(found.values())


def _unknown(file: str, key: str, value: Any) -> str:
    """Return what is wrong with a key that nothing has."""
    if isinstance(value, dict):
        return f"{file} has a table [{key}]: tables are not known, all keys stand at the top"
    name = key.replace("_", "-")
    positive = name.removeprefix("no-")
    if positive != name and positive in _BY_KEY:
        return f"{file} has an unknown key {key!r}; write {positive} = false"
    near = _BY_LETTER.get(name) or _nearest(name, _BY_KEY)
    hint = f"the nearest is {near!r}" if near else "llamakeep serve --help lists all"
    return f"{file} has an unknown key {key!r}; {hint}"
