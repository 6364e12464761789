"""Which tiers a cache has below memory, from arguments and the environment, and opening them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llamakeep.errors import InvalidValue, whole_number
from llamakeep.fingerprint import Adapter, Namespace
from llamakeep.policy import DEFAULT_POLICY, Policy, policy_below
from llamakeep.runtime.base import Traits
from llamakeep.sizes import parse_bytes
from llamakeep.stores.base import Tier, TreeStore
from llamakeep.stores.envelope import seal_id
from llamakeep.stores.memory import MemoryStore
from llamakeep.stores.tiered import TieredStore

ENVIRONMENT = {
    "cache_dir": "LLAMAKEEP_CACHE_DIR",
    "disk_bytes": "LLAMAKEEP_DISK_BYTES",
    "redis_url": "LLAMAKEEP_REDIS_URL",
    "redis_prefix": "LLAMAKEEP_REDIS_PREFIX",
    "secret": "LLAMAKEEP_SECRET",
    "salt": "LLAMAKEEP_SALT",
}
"""The environment variable that stands in for each argument that is not given."""


@dataclass(frozen=True)
class TierSettings:
    """What is below memory.

    Attributes:
        cache_dir: Directory of the disk tier; None for no disk tier.
        disk_bytes: Limit on its bytes; None for the default of `DiskStore`.
        redis_url: Server of the shared tier; None for no shared tier.
        secret: Seals what leaves the process, see `RedisStore` and `DiskStore`.
        salt: Tenants with different salts share nothing.
        allow_unauthenticated: Use a shared tier without a secret.
        second_sighting: States go down only when a second prompt has used them.
        min_tokens: States of shorter prompts do not go down.
        redis_prefix: Begins all keys of the shared tier; who shares has the same. None for the
            default of `RedisStore`.
    """

    cache_dir: Path | None = None
    disk_bytes: int | None = None
    redis_url: str | None = field(default=None, repr=False)
    secret: str | None = field(default=None, repr=False)
    salt: str = field(default="", repr=False)
    allow_unauthenticated: bool = False
    second_sighting: bool = False
    min_tokens: int = 0
    redis_prefix: str | None = None

    @classmethod
    def resolve(
        cls,
        *,
        cache_dir: str | Path | None = None,
        disk_bytes: int | None = None,
        redis_url: str | None = None,
        redis_prefix: str | None = None,
        secret: str | None = None,
        salt: str | None = None,
        allow_unauthenticated: bool = False,
        second_sighting: bool = False,
        min_tokens: int = 0,
        environment: Mapping[str, str] | None = None,
    ) -> TierSettings:
        """Return the settings; what is None comes from the environment, see `ENVIRONMENT`.

        An empty string switches off what the environment has.

        Raises:
            InvalidValue: For a value that cannot be meant, with its name.
        """
        env = os.environ if environment is None else environment

        def text(name: str, given: str | None) -> str:
            return env.get(ENVIRONMENT[name], "") if given is None else given

        texts: dict[str, object] = {
            "redis_url": redis_url,
            "redis_prefix": redis_prefix,
            "secret": secret,
            "salt": salt,
        }
        for name, value in texts.items():
            if not (value is None or isinstance(value, str)):
                raise InvalidValue(f"{name} must be text, not {type(value).__name__}")
        where: object = cache_dir
        if not (where is None or isinstance(where, (str, Path))) or "\0" in str(where):
            raise InvalidValue(f"cache_dir must be a path, not {where!r}")
        directory = text("cache_dir", None if cache_dir is None else str(cache_dir))
        if disk_bytes is None and env.get(ENVIRONMENT["disk_bytes"]):
            try:
                disk_bytes = parse_bytes(env[ENVIRONMENT["disk_bytes"]])
            except InvalidValue as error:
                raise InvalidValue(f"{ENVIRONMENT['disk_bytes']}: {error}") from None
        if disk_bytes is not None:
            whole_number("disk_bytes", disk_bytes, 0)
        whole_number("min_tokens", min_tokens, 0)
        return cls(
            Path(directory).expanduser() if directory else None,
            disk_bytes,
            text("redis_url", redis_url) or None,
            text("secret", secret) or None,
            text("salt", salt),
            allow_unauthenticated,
            second_sighting,
            min_tokens,
            text("redis_prefix", redis_prefix) or None,
        )

    def namespace(
        self,
        traits: Traits,
        model: str,
        *,
        model_name: str,
        segment_tokens: int,
        context: Mapping[str, Any],
        build: Mapping[str, Any],
        adapters: Sequence[Adapter] = (),
    ) -> Namespace:
        """Return what makes the states of one model incompatible with others in these tiers.

        Args:
            traits: What the runtime's probe found.
            model: Fingerprint of its file.
            model_name: Its name, for people.
            segment_tokens: Longest span of a segment.
            context: Settings that change what is computed.
            build: What computes.
            adapters: LoRA adapters.
        """
        return Namespace(
            model=model,
            layout=traits.layout.hex(),
            segment_tokens=segment_tokens,
            family=traits.family.value,
            rolling=traits.rolling,
            context=context,
            build=build,
            adapters=tuple(adapters),
            seal=seal_id(self.secret),
            salt=self.salt,
            model_name=model_name,
        )

    def open(self, capacity_bytes: int, *, policy: str | Policy = DEFAULT_POLICY) -> TreeStore:
        """Open the tiers under a memory of `capacity_bytes`.

        Raises:
            InvalidValue: For a URL or a prefix of keys that cannot be meant, or a shared tier
                without a secret.
            StoreError: For a directory that cannot be used.
        """
        memory = MemoryStore(capacity_bytes)
        below: list[Tier] = []
        try:
            if self.cache_dir is not None:
                from llamakeep.stores.disk import DiskStore

                below.append(
                    DiskStore(
                        self.cache_dir,
                        self.disk_bytes,
                        secret=self.secret,
                        policy=policy_below(policy),
                    )
                )
            if self.redis_url is not None:
                from llamakeep.stores.redis import RedisStore
                from llamakeep.stores.redis.keys import DEFAULT_PREFIX

                below.append(
                    RedisStore(
                        self.redis_url,
                        secret=self.secret,
                        allow_unauthenticated=self.allow_unauthenticated,
                        prefix=self.redis_prefix or DEFAULT_PREFIX,
                    )
                )
        except BaseException:
            for tier in below:
                tier.close()
            raise
        if not below:
            return memory
        return TieredStore(
            memory,
            *below,
            second_sighting=self.second_sighting,
            min_tokens=self.min_tokens,
        )
