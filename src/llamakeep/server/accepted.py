"""Flags of llama-server that scripts have, and that change nothing here.

They are taken, with a line that says why, so that a script for llama-server starts this one, too.
"""

from __future__ import annotations

from dataclasses import dataclass

from llamakeep.server.options import env_of


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
    Accepted(("--no-webui",), "there is no web UI"),
    Accepted(("-cb", "--cont-batching"), "requests always share batches"),
    Accepted(
        ("--cache-reuse",),
        "a kept prefix is always used, and pieces behind it are never shifted",
        metavar="N",
    ),
    Accepted(("--no-context-shift",), "a context is never shifted"),
    Accepted(("--log-disable",), "a log goes to standard error; 2>/dev/null drops it"),
    Accepted(("-v", "--verbose"), "a request is always one line of the log"),
)
"""Its lines, in the order of llama-server's help."""
BY_NAME = {each.name: each for each in ACCEPTED}
