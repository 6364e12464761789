"""Who reads the states: which namespace is theirs, and which states they may load."""

from __future__ import annotations

import os
import re
import secrets
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from blake3 import blake3

from llamakeep.errors import InvalidValue
from llamakeep.fingerprint import Namespace, read_adapters
from llamakeep.llama_cache.snapshots import Snapshot
from llamakeep.modelfile import inspect_file
from llamakeep.runtime.layout import read_context
from llamakeep.tally import Refused
from llamakeep.tokens import NAME_BYTES, IntArray

if TYPE_CHECKING:
    from llama_cpp import Llama  # noqa: TID251 - a name for type checkers

    NamespaceLike: TypeAlias = Namespace | str | bytes | Llama
    """A `Namespace`, a label of the caller's own, or a `llama_cpp.Llama` to take it from."""

_WINDOW = (
    "sliding window, llama-cpp-python may answer wrongly once it is loaded, unless "
    "set_namespace(llm) was called, n_batch is at most n_ubatch, and there is no draft model"
)
_LABEL = "llamakeep llama_cache label, version 1"
_ARCHITECTURE = re.compile(rb"[a-z0-9][a-z0-9._-]+")
_MAX_NAME = 64


@dataclass(frozen=True, slots=True)
class Reader:
    """Whoever is given the states of one namespace.

    Attributes:
        namespace: Its digest.
        description: What it is, JSON-ready.
        is_named: It was said which namespace; else it is nobody else's.
        n_ctx: Tokens that the `Llama` has room for; None when no `Llama` is known.
        n_vocab: Columns of its scores.
        n_rows: Rows of its scores.
        scores_matter: It computes scores of its own, and looks at them.
        llama: The `Llama`, not kept alive; None when none is known.
    """

    namespace: bytes
    description: dict[str, Any]
    is_named: bool = True
    n_ctx: int | None = None
    n_vocab: int = 0
    n_rows: int = 0
    scores_matter: bool = True
    llama: weakref.ref[Any] | None = None

    @classmethod
    def of(cls, who: NamespaceLike | None, cache_dir: str | Path | None = None) -> Reader:
        """Return who reads.

        Args:
            who: A `Namespace`, a label, a `llama_cpp.Llama`; or None: somebody unknown, who shares
                nothing with anybody.
            cache_dir: Where the fingerprint of the model's file is remembered.

        Raises:
            InvalidValue: When it is something else, or an empty label.
            ModelError: When the `Llama` is closed, or its file cannot be read.
        """
        if who is None:
            unnamed = {"model_name": f"(unnamed, process {os.getpid()})"}
            return cls(secrets.token_bytes(NAME_BYTES), unnamed, False)
        if isinstance(who, Namespace):
            return cls(who.digest, who.describe())
        if isinstance(who, (str, bytes)):
            if not who:
                raise InvalidValue(f"namespace {who!r} is empty")
            label = who.encode("utf-8", "surrogatepass") if isinstance(who, str) else who
            digest = blake3(label, derive_key_context=_LABEL).digest()
            return cls(digest, {"model_name": who if isinstance(who, str) else who.hex()})
        namespace = namespace_of(who, cache_dir)
        return cls(
            namespace.digest,
            namespace.describe(),
            n_ctx=int(who.n_ctx()),
            n_vocab=who.scores.shape[1],
            n_rows=who.scores.shape[0],
            scores_matter=bool(who._logits_all),
            llama=weakref.ref(who),
        )

    def has_room(self, tokens: IntArray) -> bool:
        """Return whether the state of a key may fit; the key's last token may not be evaluated."""
        return self.n_ctx is None or tokens.size <= self.n_ctx + 1

    def guard(self) -> bool:
        """Keep the `Llama` from cutting where a sliding window has lost rows. See `guard_window`.

        Returns:
            Whether it may load states with a window now; False when none is known.
        """
        llm = None if self.llama is None else self.llama()
        if llm is None or llm._ctx is None or llm._ctx.ctx is None:
            return False
        from llamakeep.runtime.llama_borrowed import guard_window

        # A draft that is not accepted is cut without asking whether it could be.
        return guard_window(llm._ctx) and llm.draft_model is None

    def refuse(self, value: Any) -> None:
        """Refuse a state that nobody whom it is kept for may load.

        Raises:
            Refused: With the reason.
        """
        native, n_tokens = getattr(value, "llama_state", None), getattr(value, "n_tokens", None)
        if isinstance(native, bytes) and isinstance(n_tokens, int):
            self._refuse_native(native, n_tokens, is_proven=True, kind=type(value))

    def refuse_kept(self, snapshot: Snapshot, *, is_proven: bool) -> None:
        """Refuse to hand out a state that the `Llama` must not load, as far as that is known.

        `Llama.load_state` raises for what does not fit, in the middle of the user's request.

        Args:
            snapshot: What is kept.
            is_proven: It was looked at when it was put, and cannot have changed since.

        Raises:
            Refused: With the reason.
        """
        n_tokens = snapshot.n_tokens
        if self.n_ctx is not None:
            if n_tokens is None or n_tokens < 0:
                raise Refused("unfit", "it does not say how many tokens it is of")
            if n_tokens > self.n_ctx:
                raise Refused("unfit", f"its {n_tokens} tokens exceed the context of {self.n_ctx}")
            self._refuse_scores(snapshot, n_tokens)
        if snapshot.native is None or n_tokens is None:
            return
        # What lies in memory was looked at when it came; only the guard may be gone since.
        if not is_proven or (self.n_ctx is not None and not self.guard()):
            self._refuse_native(snapshot.native, n_tokens, is_proven=is_proven, kind=snapshot.make)

    def _refuse_scores(self, snapshot: Snapshot, n_tokens: int) -> None:
        shape, room = snapshot.scores_shape, (min(n_tokens, self.n_rows), self.n_vocab)
        if shape is None:
            raise Refused("unfit", "it has no scores")
        if snapshot.scores_left_out and self.scores_matter:
            raise Refused("unfit", "its scores were left out")
        try:
            fits = np.broadcast_shapes(shape, room) == room
        except ValueError:
            fits = False
        if not fits:
            raise Refused("unfit", f"its scores are {shape}, the model's {room}")

    def _refuse_native(self, native: bytes, n_tokens: int, *, is_proven: bool, kind: type) -> None:
        state = read_context(native)
        if state is None:
            if self.n_ctx is not None and not is_proven:
                raise Refused("unknown_form", "its bytes are not understood, so not to be trusted")
            unnamed = self.n_ctx is None and kind.__module__.startswith("llama_cpp")
            if unnamed and _is_of_llama_cpp(native):
                raise Refused("unknown_form", f"it is of an unknown form; if it has a {_WINDOW}")
            return
        if problem := state.problem(n_tokens):
            raise Refused("inconsistent", problem)
        if state.window is not None and state.recurrent is None and not self.guard():
            raise Refused("window", f"it has a {_WINDOW}")


def namespace_of(llm: Llama, cache_dir: str | Path | None = None) -> Namespace:
    """Return what the whole states of a `Llama` are of.

    Raises:
        InvalidValue: When it is no `Llama`.
        ModelError: When it is closed, or its file cannot be read.

    Costs a pass over the model's file the first time it is seen.
    """
    from llamakeep.runtime.llama_borrowed import refuse_unfit
    from llamakeep.runtime.llama_cpp import LlamaCppRuntime

    refuse_unfit(llm)
    model = inspect_file(llm.model_path, cache_dir=cache_dir)
    adapters = [(llm.lora_path, llm.lora_scale)] if llm.lora_path else []
    more = {
        "n_seq_max": int(llm.context_params.n_seq_max),
        "logits_all": bool(llm._logits_all),  # who needs scores has no use for states without
    }
    return Namespace(
        model=model.fingerprint,
        layout="whole context",
        segment_tokens=1,
        context=LlamaCppRuntime.context_settings(llm, rope_factors=model.rope_factors) | more,
        build=LlamaCppRuntime.build_facts(),
        adapters=read_adapters(adapters, cache_dir=cache_dir),
        model_name=Path(llm.model_path).name,
    )


def _is_of_llama_cpp(native: bytes) -> bool:
    """Return whether bytes begin like a context's state: with the name of an architecture."""
    size = int.from_bytes(native[:4], "little")
    return size <= _MAX_NAME and _ARCHITECTURE.fullmatch(native[4 : 4 + size]) is not None
