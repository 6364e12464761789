"""What is done with a `llama_cpp.Llama` that is the user's, and with its context."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any, Final

import llama_cpp

from llamakeep.errors import InvalidValue, ModelError
from llamakeep.runtime.llama_load import MadeWith, check_gguf, family_of
from llamakeep.states import Positions

_WHOLE: Final = 0  # flags of a state
_EVERYTHING: Final = -1
_REMOVALS: Final = ("kv_cache_seq_rm", "memory_seq_rm")  # of this and other builds


def made_with(llm: Any) -> MadeWith:
    """Return what a `Llama` was made with."""
    overrides = dict(getattr(llm, "kv_overrides", None) or {})
    return MadeWith(llm.context_params, llm.model_params, overrides)


def load_llama(path: str | Path, **options: Any) -> Any:
    """Load a quiet `llama_cpp.Llama`.

    Raises:
        ModelError: With the path, when it cannot be loaded.
    """
    check_gguf(path)
    try:
        return llama_cpp.Llama(str(path), verbose=False, **options)
    except (ValueError, RuntimeError) as error:
        raise ModelError(f"llama.cpp could not load {path}: {error}") from error


def refuse_unfit(llm: Any) -> None:
    """Raise for a `llama_cpp.Llama` whose state cannot be kept.

    Raises:
        InvalidValue: When it is no `Llama`.
        ModelError: With the reason.
    """
    if not isinstance(llm, llama_cpp.Llama):
        raise InvalidValue(f"a llama_cpp.Llama is needed, not {type(llm).__name__}")
    if llm._ctx is None or llm._ctx.ctx is None or llm._model.model is None:
        raise ModelError(f"the model {llm.model_path} is closed")
    if llm.model_params.vocab_only:
        raise ModelError(f"{llm.model_path} was loaded with vocab_only=True: it evaluates nothing")
    if llm.context_params.embeddings:
        raise ModelError(f"{llm.model_path} was loaded with embedding=True: no prompt is continued")
    if llama_cpp.llama_model_has_encoder(llm._model.model):
        raise ModelError(f"{llm.model_path} has an encoder: its state is not one of a prompt")


class BorrowedMemory:
    """The sequences of a context that somebody else owns, as a cache of checkpoints needs them.

    One thread at a time, the context's owner. Nothing here knows whether the context still lives:
    who calls must.

    Args:
        ctx: The native context.

    Attributes:
        family: The memory family of its model.
        n_seq_max: Sequences it has; llama.cpp ends the process for others.
        empty_bytes: Size of the whole state of an empty sequence, where one was empty.
    """

    get_size_ext: Final = staticmethod(llama_cpp.llama_state_seq_get_size_ext)
    get_data_ext: Final = staticmethod(llama_cpp.llama_state_seq_get_data_ext)
    set_data_ext: Final = staticmethod(llama_cpp.llama_state_seq_set_data_ext)

    def __init__(self, ctx: Any) -> None:
        self._ctx = ctx
        self._mem = llama_cpp.llama_get_memory(ctx)
        self.family = family_of(llama_cpp.llama_get_model(ctx))
        self.n_seq_max = int(llama_cpp.llama_n_seq_max(ctx))
        empty = (seq for seq in range(self.n_seq_max) if self.positions(seq).n_tokens == 0)
        spare = next(empty, None)
        self.empty_bytes = None if spare is None else self.whole_bytes(spare)

    def positions(self, seq_id: int) -> Positions:
        """Return the first and last position of a sequence; -1 where there is no memory."""
        if self._mem is None:
            return Positions(-1, -1)
        return Positions(
            int(llama_cpp.llama_memory_seq_pos_min(self._mem, seq_id)),
            int(llama_cpp.llama_memory_seq_pos_max(self._mem, seq_id)),
        )

    def whole_bytes(self, seq_id: int) -> int:
        """Return the exact size of the whole state of a sequence, in about 0.02 ms."""
        return int(llama_cpp.llama_state_seq_get_size_ext(self._ctx, seq_id, _WHOLE))

    def cut(self, seq_id: int, start: int) -> bool:
        """Remove the positions from `start` on; False when llama.cpp refuses, changing nothing."""
        return bool(llama_cpp.llama_memory_seq_rm(self._mem, seq_id, start, _EVERYTHING))

    def clear(self, seq_id: int) -> bool:
        """Empty a sequence whose state may be broken; return whether all memory was cleared.

        A failed write can leave rows while positions say empty, so the size is what is believed.
        """
        self.cut(seq_id, _EVERYTHING)
        if self.whole_bytes(seq_id) == self.empty_bytes:
            return False
        llama_cpp.llama_memory_clear(self._mem, False)
        return True


def register_cache(base: type) -> None:
    """Make `base` and its subclasses count as ones of `llama_cpp.llama_cache.BaseLlamaCache`."""
    llama_cpp.llama_cache.BaseLlamaCache.register(base)


def guard_window(context: Any) -> bool:
    """Keep a context from being cut where sliding-window rows that are needed then are gone.

    After a whole state or a checkpoint was loaded, llama.cpp puts new tokens into cells that are
    outside of the window, so that the memory no longer reaches back. To cut it there and go on
    gives wrong answers, and llama.cpp does it without a word. With the guard, the method of the
    context that removes positions returns False then, as it does for recurrent memory, and
    `Llama.generate` evaluates the prompt again. Doing it again changes nothing.

    Args:
        context: A `LlamaContext`, open.

    Returns:
        Whether all is well now: the model has no window, or the context is guarded, and evaluates
        a batch at once. (With `n_batch` above `n_ubatch`, the first part of a batch was seen to
        miss rows that llama.cpp had given up for the later ones.)
    """
    n_swa = int(llama_cpp.llama_model_n_swa(llama_cpp.llama_get_model(context.ctx)))
    if n_swa <= 0:
        return True
    names = [name for name in _REMOVALS if hasattr(type(context), name)]
    for name in names:
        hook = vars(context).get(name)
        if hook is None:
            setattr(context, name, _WindowGuard(context, name, n_swa))
        elif not isinstance(hook, _WindowGuard):
            return False  # somebody else's, a keeper's perhaps, who looks after this in its way
    n_batch, n_ubatch = (
        f(context.ctx) for f in (llama_cpp.llama_n_batch, llama_cpp.llama_n_ubatch)
    )
    return bool(names) and int(n_batch) <= int(n_ubatch)


class _WindowGuard:
    """Removes positions of a context, unless rows that are needed then are gone.

    Args:
        context: The context; not kept alive.
        name: Of its method.
        n_swa: Size of the window in tokens.
    """

    def __init__(self, context: Any, name: str, n_swa: int) -> None:
        self._context = weakref.ref(context)
        self._name = name
        self._n_swa = n_swa

    def __call__(self, seq_id: int, p0: int, p1: int) -> bool:
        context = self._context()
        if context is None or context.ctx is None:
            return False
        memory = llama_cpp.llama_get_memory(context.ctx)
        n_seqs = int(llama_cpp.llama_n_seq_max(context.ctx))
        for each in range(n_seqs) if seq_id < 0 else (seq_id,):
            first = int(llama_cpp.llama_memory_seq_pos_min(memory, each))
            last = int(llama_cpp.llama_memory_seq_pos_max(memory, each))
            if 0 < p0 <= last and first > max(0, p0 - self._n_swa + 1):
                return False
        return bool(getattr(type(context), self._name)(context, seq_id, p0, p1))


def state_class() -> type:
    """Return the class of what `Llama.save_state` returns."""
    kind: type = llama_cpp.llama.LlamaState
    return kind
