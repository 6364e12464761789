"""What makes two kept states incompatible, as one digest: the namespace.

A state may be used where everything that was part of computing it is the same: the model, what was
put on top of it, the settings that the arithmetic depends on, the build, the layout of the bytes,
and whose it is. Left out is what moves results by rounding alone because the same operations run
in another order or in groups of another size: `n_batch`, `n_ubatch`, `n_threads`, `n_seq_max`, how
layers are split among equal devices; and `n_ctx`, which says how much fits. What the low-level API
puts on a context and cannot be asked for, a control vector or an adapter, goes unnoticed.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeAlias

from blake3 import blake3

from llamakeep.errors import InvalidValue, whole_number
from llamakeep.modelfile import fingerprint_file

Settings: TypeAlias = Mapping[str, "int | float | str | bool | Settings"]
"""Names and values, nested where that is their nature; JSON-ready."""

_SCHEME: Final = 1
_SALT_CONTEXT: Final = "llamakeep namespace, which salt, version 1"


@dataclass(frozen=True, order=True)
class Adapter:
    """A LoRA adapter: what it is and how strongly it is applied.

    Attributes:
        content: Fingerprint of its file.
        scale: As llama.cpp has it, in single precision.

    Raises:
        InvalidValue: For a scale that is no finite number in single precision.
    """

    content: str
    scale: float

    def __post_init__(self) -> None:
        try:
            scale = struct.unpack("<f", struct.pack("<f", self.scale))[0]
        except (struct.error, OverflowError):
            scale = math.nan
        if not math.isfinite(scale):
            raise InvalidValue(f"the scale of an adapter is {self.scale!r}")
        object.__setattr__(self, "scale", scale)


@dataclass(frozen=True, eq=False, repr=False)
class Namespace:
    """Everything that makes states incompatible. Equal digests mean interchangeable states.

    Two namespaces are equal when their digests are.

    Attributes:
        model: Fingerprint of the model file, see `fingerprint_file`.
        layout: Hex digest of the state layout that the runtime's probe found; it covers key and
            value types, value transposition, layer sizes and window.
        segment_tokens: Longest span of a segment.
        family: The memory's family.
        rolling: States have a rolling part, so they are restored at checkpoints only.
        context: Settings that change what is computed, see `LlamaCppRuntime.context_settings`.
        build: What computes, see `LlamaCppRuntime.build_facts`.
        adapters: LoRA adapters. llama.cpp adds them up in an order of its own and leaves out those
            of scale 0; so here they are sorted, and those are left out.
        seal: Which secret seals what leaves the process, see `envelope.seal_id`; empty for none.
            States of another secret cannot be used, and must not be in the way.
        salt: A tenant's secret, text or its UTF-8 bytes; tenants with different salts share
            nothing. Empty for none.
        model_name: File name of the model, for people; no part of the digest.

    Raises:
        InvalidValue: For a setting that is no number, text or truth value, or is not finite.
    """

    model: str
    layout: str
    segment_tokens: int
    family: str = ""
    rolling: bool = False
    context: Settings = field(default_factory=dict)
    build: Settings = field(default_factory=dict)
    adapters: tuple[Adapter, ...] = ()
    seal: str = ""
    salt: str | bytes = ""
    model_name: str = ""
    _secret: bytes = field(init=False)

    def __post_init__(self) -> None:
        applied = sorted(adapter for adapter in self.adapters if adapter.scale)
        salt = self.salt
        if isinstance(salt, str):
            salt = salt.encode("utf-8", "surrogatepass")
        elif not isinstance(salt, bytes):
            raise InvalidValue(f"the salt must be text or bytes, not {type(salt).__name__}")
        for name, value in {
            "segment_tokens": whole_number("segment_tokens", self.segment_tokens, 1),
            "rolling": bool(self.rolling),
            # Copies: what a caller changes later must not change a digest.
            "context": MappingProxyType(_plain(self.context, "context")),
            "build": MappingProxyType(_plain(self.build, "build")),
            "adapters": tuple(applied),
            "_secret": salt,
        }.items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        return f"<Namespace {self.digest.hex()[:12]} {self.model_name or self.model[:12]}>"

    def __eq__(self, other: object) -> bool:
        return self.digest == other.digest if isinstance(other, Namespace) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest)

    def _parts(self) -> dict[str, Any]:
        return {
            "scheme": _SCHEME,
            "model": self.model,
            "adapters": [
                {"content": adapter.content, "scale": adapter.scale} for adapter in self.adapters
            ],
            "segment_tokens": self.segment_tokens,
            "family": self.family,
            "rolling": self.rolling,
            "context": _plain(self.context, "context"),
            "build": _plain(self.build, "build"),
            "layout": self.layout,
            "seal": self.seal,
        }

    @cached_property
    def digest(self) -> bytes:
        """BLAKE3 of the JSON of all parts, keys sorted; 32 bytes, the same on every machine."""
        parts = {**self._parts(), "salt": self._secret.hex()}
        return blake3(json.dumps(parts, sort_keys=True, allow_nan=False).encode()).digest()

    def describe(self) -> dict[str, Any]:
        """Return all parts, JSON-ready, but not the salt.

        Of the salt there is `salted`, whether there is one, and `salt_id`, equal for equal salts.
        The salt cannot be computed from it, but a guess can be checked: let salts be random. Also
        `model_name` and `digest` (hex).
        """
        salt_id = blake3(self._secret, derive_key_context=_SALT_CONTEXT).hexdigest(8)
        return {
            **self._parts(),
            "model_name": self.model_name,
            "salted": bool(self._secret),
            "salt_id": salt_id if self._secret else "",
            "digest": self.digest.hex(),
        }

    def differences(self, description: object) -> list[Difference]:
        """Return how a description, of another namespace, differs from this. See `differences`."""
        return differences(self.describe(), description)


def _plain(settings: Settings, where: str) -> dict[str, Any]:
    """Return settings as plain, sorted dictionaries."""
    result: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            result[name] = _plain(value, f"{where}.{name}")
        elif isinstance(value, float):
            if not math.isfinite(value):
                raise InvalidValue(f"{where}.{name} is {value!r}: no setting can be that")
            result[name] = value + 0.0  # no negative zero
        elif isinstance(value, (int, str)):  # a truth value is an int
            result[name] = value
        else:
            raise InvalidValue(f"{where}.{name} must be a number or text, not {value!r}")
    return dict(sorted(result.items()))


def read_adapters(
    adapters: Iterable[tuple[str | Path, float]], *, cache_dir: str | Path | None = None
) -> tuple[Adapter, ...]:
    """Return adapters by content. Costs what `inspect_file` costs for each.

    Args:
        adapters: Paths and scales.
        cache_dir: See `inspect_file`.

    Raises:
        InvalidValue: For a scale that is not finite, and for one file with two scales: which of
            them llama.cpp applies is nothing to rely on.
        ModelError: For a file that cannot be read or is no GGUF file.
    """
    found: dict[Path, Adapter] = {}
    for path, scale in adapters:
        adapter = Adapter(fingerprint_file(path, cache_dir=cache_dir), scale)
        if not adapter.scale:
            continue
        first = found.setdefault(Path(path).resolve(), adapter)
        if first.scale != adapter.scale:
            raise InvalidValue(f"{path} is given with two scales, {first.scale} and {scale}")
    return tuple(found.values())


# -- comparing -------------------------------------------------------------------------------------

_MOST_PARTS: Final = 256
_MOST_DEPTH: Final = 4
_MOST_SHOWN: Final = 60
_SAID: Final = 3
_FIRST: Final = (
    "scheme",
    "model",
    "model_name",
    "salted",
    "salt_id",
    "adapters",
    "segment_tokens",
    "family",
    "rolling",
    "context",
    "build",
    "seal",
    "layout",
)


@dataclass(frozen=True, slots=True)
class Difference:
    """A part in which two namespaces differ.

    Attributes:
        part: Its name; nested ones like `context.type_k`, adapters like `adapters.<content>`.
        ours: Our value, or None where we have none.
        theirs: The other value, or None.
    """

    part: str
    ours: Any
    theirs: Any


def differences(ours: object, theirs: object) -> list[Difference]:
    """Compare two descriptions part by part; what explains most comes first.

    Either may come from a store that others write to: whatever JSON it is, nothing is raised, and
    at most 256 parts of it are looked at. Numbers are equal if their JSON is, so 1, 1.0 and true
    are three values.

    That a state is kept under another salt is for the operator to know, not for a tenant.
    """
    one, other = (dict(islice(_flatten(each), _MOST_PARTS)) for each in (ours, theirs))
    found = [
        Difference(part, one.get(part), other.get(part))
        for part in sorted({*one, *other}, key=_rank)
        if not _same(one.get(part), other.get(part))
    ]
    changed = {difference.part for difference in found}
    silent: set[str] = set()
    if changed - {"digest", "model_name"}:
        silent.add("digest")  # it follows from the others
    if "model" not in changed:
        silent.add("model_name")  # the same model under another name
    if "salted" in changed:
        silent.add("salt_id")
    return [difference for difference in found if difference.part not in silent]


def _flatten(value: object, part: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and depth < _MOST_DEPTH:
        for key, inner in value.items():
            yield from _flatten(inner, f"{part}.{key}" if part else str(key), depth + 1)
    elif part == "adapters" and isinstance(value, Sequence) and not isinstance(value, str):
        yield from _flatten_adapters(value)
    elif part and (value is None or isinstance(value, (bool, int, float, str))):
        yield part, value
    elif part:
        yield part, f"({type(value).__name__})"


def _flatten_adapters(adapters: Sequence[object]) -> Iterator[tuple[str, Any]]:
    times: dict[str, int] = {}
    for adapter in adapters:
        content, scale = "?", None
        if isinstance(adapter, Mapping):
            content, scale = str(adapter.get("content")), adapter.get("scale")
        times[content] = times.get(content, 0) + 1
        again = f" #{times[content]}" if times[content] > 1 else ""
        yield from _flatten(scale, f"adapters.{content}{again}", _MOST_DEPTH)


def _rank(part: str) -> tuple[int, str]:
    top = part.partition(".")[0]
    return (_FIRST.index(top) if top in _FIRST else len(_FIRST), part)


def _same(one: object, other: object) -> bool:
    return type(one) is type(other) and one == other


def explain(found: Sequence[Difference]) -> str:
    """Say in a sentence how a state was kept that cannot be used now.

    Like ``kept with context.type_k=8, now 1``. Safe to log: values are shortened, and what is not
    printable is escaped.
    """
    said = [_say(difference) for difference in found[:_SAID]]
    if len(found) > _SAID:
        said.append(f"and {len(found) - _SAID} more")
    return "; ".join(said) if said else "nothing differs"


def _say(difference: Difference) -> str:
    part = _shown(difference.part)
    if part in ("salted", "salt_id"):
        return "kept with another salt"
    if difference.part == "seal":
        return "kept with another secret" if difference.theirs else "kept without a secret"
    if difference.theirs is None:
        return f"kept without {part}, now {_shown(difference.ours)}"
    kept = f"kept with {part}={_shown(difference.theirs)}"
    return f"{kept}, now {'without' if difference.ours is None else _shown(difference.ours)}"


def _shown(value: object) -> str:
    if isinstance(value, str):
        # Fingerprints are told apart by their beginning.
        text = re.sub(r"\b([0-9a-f]{12})[0-9a-f]{20,}\b", r"\1", value[: 4 * _MOST_SHOWN])
        if not re.fullmatch(r"[\w.+(#?) -]+", text, re.ASCII):
            text = json.dumps(text)
    elif isinstance(value, int) and abs(value) >= 1 << 64:
        text = "(a huge number)"
    else:
        text = json.dumps(value) if isinstance(value, (bool, int, float)) else repr(type(value))
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
