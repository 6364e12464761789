"""Who reads the states: which namespace is theirs, and what their `Llama` can take."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from blake3 import blake3

from llamakeep.errors import InvalidValue
from llamakeep.fingerprint import Namespace, read_adapters
from llamakeep.llama_cache.snapshots import Snapshot
from llamakeep.modelfile import inspect_file
from llamakeep.runtime.layout import has_window
from llamakeep.tally import Refused

NamespaceLike: TypeAlias = "Namespace | str | bytes | Any"
"""A `Namespace`, a label of the caller's own, or a `llama_cpp.Llama` to take it from."""

_LABEL = "llamakeep llama_cache label, version 1"
_UNKNOWN = "llamakeep llama_cache process, version 1"
_WINDOW = (
    "llama-cpp-python may answer wrongly after loading one of a model with a sliding window, "
    "unless set_namespace(llm) was called"
)
_random = secrets.token_bytes(32)


@dataclass(frozen=True, slots=True)
class Reader:
    """Whoever is given the states of one namespace.

    Attributes:
        namespace: Its digest.
        description: What it is, JSON-ready; None when there is nothing to say.
        is_named: It was said which namespace; else it is that of this process alone.
        n_ctx: Tokens that the `Llama` has room for; None when no `Llama` is known.
        n_vocab: Columns of its scores.
        n_rows: Rows of its scores.
        scores_matter: It computes scores of its own, and looks at them.
        is_guarded: It is kept from cutting its memory where rows that it needs are gone.
    """

    namespace: bytes
    description: dict[str, Any] | None = None
    is_named: bool = True
    n_ctx: int | None = None
    n_vocab: int = 0
    n_rows: int = 0
    scores_matter: bool = True
    is_guarded: bool = False

    @classmethod
    def of(cls, who: NamespaceLike | None, cache_dir: str | Path | None = None) -> Reader:
        """Return who reads.

        Args:
            who: A `Namespace`, a label, a `llama_cpp.Llama`; or None: this process.
            cache_dir: Where the fingerprint of the model's file is remembered.

        Raises:
            InvalidValue: When it is something else, or an empty label.
            ModelError: When the `Llama` is closed, or its file cannot be read.
        """
        if who is None:
            # Of this process, not of the one that it was forked from.
            seed = _random + os.getpid().to_bytes(8, "little")
            return cls(blake3(seed, derive_key_context=_UNKNOWN).digest(), None, False)
        if isinstance(who, Namespace):
            return cls(who.digest, who.describe())
        if isinstance(who, (str, bytes)):
            if not who:
                raise InvalidValue(f"namespace {who!r} is empty")
            label = who.encode("utf-8", "surrogatepass") if isinstance(who, str) else who
            digest = blake3(label, derive_key_context=_LABEL).digest()
            return cls(digest, {"label": who if isinstance(who, str) else who.hex()})
        return cls._of_llama(who, cache_dir)

    @classmethod
    def _of_llama(cls, llm: Any, cache_dir: str | Path | None) -> Reader:
        from llamakeep.runtime.llama_cpp import LlamaCppRuntime, guard_window, refuse_unfit

        refuse_unfit(llm)
        model = inspect_file(llm.model_path, cache_dir=cache_dir)
        adapters = [(llm.lora_path, llm.lora_scale)] if llm.lora_path else []
        context = LlamaCppRuntime.context_settings(llm, rope_factors=model.rope_factors)
        namespace = Namespace(
            model=model.fingerprint,
            layout="whole context",
            segment_tokens=1,
            context=context | {"n_seq_max": int(llm.context_params.n_seq_max)},
            build=LlamaCppRuntime.build_facts(),
            adapters=read_adapters(adapters, cache_dir=cache_dir),
            model_name=Path(llm.model_path).name,
        )
        scores = llm.scores
        guard_window(llm)
        return cls(
            namespace.digest,
            namespace.describe(),
            n_ctx=int(llm.n_ctx()),
            n_vocab=scores.shape[1],
            n_rows=scores.shape[0],
            scores_matter=bool(llm._logits_all),
            is_guarded=True,
        )

    def refuse(self, value: Any) -> None:
        """Refuse a state that nobody whom it is kept for may load.

        Raises:
            Refused: With the reason.
        """
        if not self.is_guarded:
            native = getattr(value, "llama_state", None)
            if _may_have_window(native, type(value)):
                raise Refused("window", f"a state is not kept: {_WINDOW}")

    def misfit(self, snapshot: Snapshot) -> str:
        """Return why a `Llama` must not load a state, or nothing: it may, as far as is known.

        `Llama.load_state` raises for what does not fit, in the middle of the user's request.
        """
        native = snapshot.raw.get("llama_state")
        if not self.is_guarded and _may_have_window(native, snapshot.make):
            return _WINDOW
        if self.n_ctx is None:
            return ""
        n_tokens = snapshot.plain.get("n_tokens")
        if not isinstance(n_tokens, int) or n_tokens < 0:
            return "it does not say how many tokens it is of"
        if n_tokens > self.n_ctx:
            return f"it is of {n_tokens} tokens, the context has room for {self.n_ctx}"
        zeros, scores = snapshot.zeros.get("scores"), snapshot.arrays.get("scores")
        if zeros is not None and self.scores_matter:
            return "its scores were left out"
        if zeros is not None:
            shape: tuple[int, ...] = (1, zeros.n_columns)
        elif scores is not None:
            shape = scores.shape
        else:
            return "it has no scores"
        room = (min(n_tokens, self.n_rows), self.n_vocab)
        try:
            fits = np.broadcast_shapes(shape, room) == room
        except ValueError:
            fits = False
        return "" if fits else f"its scores are {shape}, the model's {room}"


def _may_have_window(native: object, kind: type) -> bool:
    if not isinstance(native, bytes):
        return False
    found = has_window(native)
    # What llama.cpp wrote in a form of a later day may be anything.
    return kind.__module__.startswith("llama_cpp") if found is None else found
