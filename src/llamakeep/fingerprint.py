"""What makes two kept states incompatible, as one digest: the namespace."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path

from blake3 import blake3

_SAMPLE_BYTES = 1 << 20
_SAMPLES = 8


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter: what it is and how strongly it is applied."""

    content: str
    scale: float


@dataclass(frozen=True)
class Namespace:
    """Everything that makes states incompatible. Equal digests mean interchangeable states.

    Attributes:
        model: Fingerprint of the model file, see `fingerprint_file`.
        layout: Hex digest of the state layout that the runtime's probe found; it covers key and
            value types, value transposition, layer sizes and window.
        segment_tokens: Longest span of a segment.
        context: Settings that change what is computed: rope and yarn settings, flash attention.
        adapters: LoRA adapters, in the order they are applied.
        salt: A tenant's secret; tenants with different salts share nothing.
    """

    model: str
    layout: str
    segment_tokens: int
    context: Mapping[str, int | float | str | bool] = field(default_factory=dict)
    adapters: tuple[Adapter, ...] = ()
    salt: str = ""

    @cached_property
    def digest(self) -> bytes:
        """BLAKE3 of all parts, 32 bytes."""
        parts = {item.name: getattr(self, item.name) for item in fields(self)}
        parts |= {
            "context": dict(self.context),
            "adapters": [asdict(adapter) for adapter in self.adapters],
        }
        return blake3(json.dumps(parts, sort_keys=True).encode()).digest()


def fingerprint_file(path: str | Path) -> str:
    """Return a fingerprint of a model or adapter file: its size and evenly spaced samples.

    Reads at most 8 MiB, so a 20 GB file costs milliseconds.

    Raises:
        OSError: When the file cannot be read.
    """
    size = Path(path).stat().st_size
    hasher = blake3(size.to_bytes(8, "little"))
    last = max(0, size - _SAMPLE_BYTES)
    with open(path, "rb") as file:
        for at in sorted({last * index // (_SAMPLES - 1) for index in range(_SAMPLES)}):
            file.seek(at)
            hasher.update(file.read(_SAMPLE_BYTES))
    return hasher.hexdigest()
