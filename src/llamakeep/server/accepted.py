"""Flags that change nothing: those of llama-server that scripts have, and ours beside some others.

They are taken, with a line that says why: a script for llama-server starts this one, too, and
nobody waits for what a flag will never do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llamakeep.server.options import env_of

if TYPE_CHECKING:
    from llamakeep.server.settings import ServerSettings


@dataclass(frozen=True, slots=True)
class Accepted:
    """A flag that is taken and changes nothing.

    Attributes:
        flags: Its names.
        why: Goes on after its name: "changes nothing: ...".
        metavar: Stands for its value; "" for a switch.
    """

    flags: tuple[str, ...]
    why: str
    metavar: str = ""

    @property
    def key(self) -> str:
        """The key in a TOML file."""
        return next(flag for flag in self.flags if flag.startswith("--"))[2:]

    @property
    def name(self) -> str:
        """Its name among the flags that came."""
        return "accepted_" + self.key.replace("-", "_")

    @property
    def env(self) -> str:
        """The environment variable."""
        return env_of(self.key)

    def notice(self, where: str) -> str:
        """Return what to say of it.

        Args:
            where: Where it came from: `--jinja`.
        """
        return f"{where} changes nothing: {self.why}"


ACCEPTED = (
    Accepted(("--jinja",), "chat templates are always read as Jinja"),
    Accepted(("--no-webui", "--no-ui"), "there is no web UI"),
    Accepted(("-cb", "--cont-batching"), "requests always share batches"),
    Accepted(
        ("--cache-reuse",),
        "a kept prefix is always used, and pieces behind it are never shifted",
        metavar="N",
    ),
    Accepted(("--no-context-shift",), "a context is never shifted"),
    Accepted(("--log-disable",), "a log goes to standard error; 2>/dev/null drops it"),
    Accepted(("-v", "--verbose", "--log-verbose"), "a request is always one line of the log"),
    Accepted(
        ("-lv", "--verbosity", "--log-verbosity"),
        "a request is always one line of the log",
        metavar="N",
    ),
    Accepted(("--log-colors",), "a log is not coloured", metavar="WORD"),
    Accepted(("--log-prefix", "--no-log-prefix"), "a line of the log has one form"),
    Accepted(("--log-timestamps", "--no-log-timestamps"), "a line of the log has one form"),
    Accepted(("--warmup", "--no-warmup"), "the start-up probe evaluates some tokens anyway"),
    Accepted(("--perf", "--no-perf"), "answers always tell what they cost"),
    Accepted(("--offline",), "nothing is ever downloaded"),
    Accepted(("--no-mmproj", "--no-mmproj-auto"), "a prompt is always text"),
    Accepted(("--threads-http",), "requests need no threads of their own", metavar="N"),
    Accepted(("-fit", "--fit"), "nothing is fitted to the memory of a device", metavar="on|off"),
)
"""Its lines, in the order of llama-server's help."""
BY_NAME = {each.name: each for each in ACCEPTED}


@dataclass(frozen=True, slots=True)
class Idle:
    """An option that changes nothing beside others.

    Attributes:
        name: The option's.
        why: Goes on after its name: "changes nothing: ...".
        beside: Whether the others are there.
    """

    name: str
    why: str
    beside: Callable[[ServerSettings], bool]


def _keeps_nothing(settings: ServerSettings) -> bool:
    return settings.cache == "off"


IDLE = (
    *(
        Idle(name, "--cache off keeps nothing", _keeps_nothing)
        for name in ("cache_ram_bytes", "policy", "ctx_checkpoints", "checkpoint_min_step")
    ),
    Idle(
        "align",
        "--cache prompt resumes where a prompt parts, as llama-server does",
        lambda settings: settings.cache == "prompt",
    ),
    *(
        Idle(
            name,
            "no server is shared with others; --redis-url names one",
            lambda settings: settings.redis_url is None,
        )
        for name in ("allow_unauthenticated", "redis_prefix")
    ),
)
"""Options that change nothing, and when."""


def idle_notices(settings: ServerSettings) -> list[str]:
    """Return what to say of options that were given and change nothing beside the others."""
    return [
        f"{settings.where(each.name)} changes nothing: {each.why}"
        for each in IDLE
        if each.name in settings.sources and each.beside(settings)
    ]
