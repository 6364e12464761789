"""What the namespaces are whose states a Redis server keeps, for people to read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from llamakeep.stores.descriptions import MAX_DESCRIPTION_BYTES, Described, parse_description
from llamakeep.stores.redis.keys import RedisKeys

if TYPE_CHECKING:
    from llamakeep.stores.redis.link import RedisLink


MAX_DESCRIBED = 1024
"""Descriptions that are read."""


class RedisNamespaces:
    """Descriptions of namespaces. Nothing seals them, and nothing depends on them.

    From any thread; all of it raises `Unreachable`.

    Args:
        link: To the server.
        keys: Of the prefix.
        count: Called with the kind of each thing that happened, for counters.
        ttl_ms: How long they live, all together, after the last one was written; using a state
            lets them live on too.
    """

    def __init__(
        self, link: RedisLink, keys: RedisKeys, count: Callable[[str], None], *, ttl_ms: int
    ) -> None:
        self._link = link
        self._key = keys.namespaces
        self._count = count
        self._ttl_ms = ttl_ms
        self._told = Described()

    def introduce(self, namespace: bytes, description: Mapping[str, Any]) -> None:
        """Write one, unless it was the last that was written here of its namespace.

        One that is too long for `read` is refused. Of more than `read` returns, others go.
        """
        if self._told.get(namespace) == description:
            return
        text = json.dumps(dict(description), sort_keys=True).encode()
        if len(text) > MAX_DESCRIPTION_BYTES:
            self._count("refused_description")
            return
        *_, n_described = self._link.run(
            [
                ("HSET", self._key, namespace, text),
                ("PEXPIRE", self._key, self._ttl_ms),
                ("HLEN", self._key),
            ],
        )
        if (over := self._link.whole(n_described) - MAX_DESCRIBED) > 0:
            (reply,) = self._link.run([("HRANDFIELD", self._key, over)])
            found = [self._link.text(name) for name in self._link.rows(reply)]
            if others := [name for name in found if name != namespace]:
                self._link.run([("HDEL", self._key, *others)])
        self._told.learn(namespace, dict(description))

    def forget(self) -> None:
        """Write again what is introduced again: it may be gone."""
        self._told = Described()

    def read(self) -> dict[bytes, dict[str, Any]]:
        """Return them; at most 1,024, of 64 KiB each, whatever is there."""
        (reply,) = self._link.run([("HRANDFIELD", self._key, MAX_DESCRIBED)])
        names = [self._link.text(name) for name in self._link.rows(reply)]
        sizes = self._link.run([("HSTRLEN", self._key, name) for name in names])
        names = [
            name
            for name, size in zip(names, sizes, strict=True)
            if self._link.whole(size) <= MAX_DESCRIPTION_BYTES
        ]
        texts = self._link.run([("HGET", self._key, name) for name in names])
        found: dict[bytes, dict[str, Any]] = {}
        for name, text in zip(names, texts, strict=True):
            description = parse_description(text)
            if description is not None:
                found[name] = description
            else:
                self._count("rejected_description")
        return found
