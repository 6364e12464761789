"""llama.cpp through llama-cpp-python's low-level functions: sequences and their states.

The modules `llama_*` beside it are the only ones that import `llama_cpp`.

Everything that llama.cpp would take on trust is checked here: states before they go down
(`layout`), sizes and positions after every move, and the model itself once at start-up (`_probe`).
Moves between sequences go through one *spare* sequence of a unified cache, which is empty between
calls: ``seq_cp(sequence, spare, p0, p1)`` and a read of the spare gives one range of tokens;
writing the spare and ``seq_cp(spare, sequence, p0, p1)`` puts it back.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import llama_cpp
import numpy as np
import numpy.typing as npt

from llamakeep.errors import (
    DecodeError,
    InvalidValue,
    KeeperClosed,
    ModelError,
    NoRoom,
    RestoreFailed,
    StateError,
    StateRejected,
    blaming,
    is_of_input,
    whole_number,
)
from llamakeep.gbnf import check_grammar
from llamakeep.runtime.base import (
    Family,
    Part,
    Runtime,
    Traits,
    check_fits,
    check_parts,
    spoils_others,
)
from llamakeep.runtime.layout import (
    HEADER_BYTES,
    StateLayout,
    check_cover,
    check_header,
    learn_kv,
    learn_recurrent,
    with_stops,
)
from llamakeep.runtime.llama_borrowed import made_with, refuse_unfit
from llamakeep.runtime.llama_grammar import ConstrainedSampler
from llamakeep.runtime.llama_load import (
    KV_TYPES as KV_TYPES,
)
from llamakeep.runtime.llama_load import (
    FlashAttention,
    MadeWith,
    OwnContext,
    build_facts,
    computed_settings,
    family_of,
    flash_type,
    kv_type,
    load_model,
    model_facts,
    model_params,
)
from llamakeep.runtime.llama_load import (
    check_gguf as check_gguf,
)
from llamakeep.runtime.llama_load import (
    usable_cores as usable_cores,
)
from llamakeep.runtime.llama_sampler import LlamaSampler
from llamakeep.runtime.llama_text import Vocabulary as Vocabulary
from llamakeep.runtime.sampling import settle
from llamakeep.sampling import Sampling
from llamakeep.states import (
    Buffer,
    Checkpoint,
    DeviceCheckpoint,
    Positions,
    Segment,
    frozen,
)
from llamakeep.tokens import IntArray, as_tokens

logger = logging.getLogger("llamakeep")

WHOLE: Final = 0
PARTIAL: Final = llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
ON_DEVICE: Final = llama_cpp.LLAMA_STATE_SEQ_FLAGS_ON_DEVICE
_EVERYTHING: Final = -1
_MOST: Final = 2**31 - 1
_NO_CELLS: Final = 1  # of llama_decode: "could not find a KV slot for the batch"
_PROBE_TOKENS: Final = 18

_generations = itertools.count(1)  # of device checkpoints; never the same twice in a process


class _Batch:
    """A native batch over arrays of ours, which are filled without a loop over tokens.

    Args:
        n_tokens: Most tokens in it.
    """

    def __init__(self, n_tokens: int) -> None:
        self._token = np.zeros(n_tokens, np.int32)
        self._pos = np.zeros(n_tokens, np.int32)
        self._seq = np.zeros(n_tokens, np.int32)
        self._output = np.zeros(n_tokens, np.int8)
        self._one = np.ones(n_tokens, np.int32)  # sequences of each token
        each = np.arange(n_tokens, dtype=np.uintp) * self._seq.itemsize
        self._seqs = self._seq.ctypes.data + each  # pointers to each token's sequences
        self._steps = np.arange(n_tokens, dtype=np.int32)
        self._native = llama_cpp.llama_batch()
        for name, array in (
            ("token", self._token),
            ("pos", self._pos),
            ("n_seq_id", self._one),
            ("seq_id", self._seqs),
            ("logits", self._output),
        ):
            kind = dict(llama_cpp.llama_batch._fields_)[name]
            setattr(self._native, name, ctypes.cast(array.ctypes.data, kind))

    def add(self, part: Part, tokens: IntArray, n_past: int, start: int) -> int:
        """Put a part's tokens from index `start` on, and return the index after them."""
        end = start + tokens.size
        self._token[start:end] = tokens
        np.add(self._steps[: tokens.size], n_past, out=self._pos[start:end])
        self._seq[start:end] = part.seq_id
        self._output[start:end] = 0
        self._output[end - 1] = part.output
        return end

    def of(self, n_tokens: int) -> Any:
        """Return the native batch of the first `n_tokens`; valid as long as this object lives."""
        self._native.n_tokens = n_tokens
        return self._native


class LlamaCppRuntime:
    """Sequences of one llama.cpp context, and their states as bytes.

    Made by `load` (a model of its own) or `adopt` (a `llama_cpp.Llama`'s). One thread at a time.

    Args:
        context: Object whose `ctx` is the native context (None once closed) and that has `close`.
        model: The native model.
        made: What both were made with.
        n_seqs: Sequences for the caller; the context has at least one more, the spare.
        swa_full: The context keeps sliding-window rows of the whole context.
        segment_tokens: The longest segment that will be read; decides whether sliding-window rows
            can stay in the segments.

    Raises:
        ModelError: When the context has no memory to keep.
    """

    def __init__(
        self,
        context: Any,
        model: Any,
        *,
        made: MadeWith,
        n_seqs: int,
        swa_full: bool,
        segment_tokens: int,
    ) -> None:
        self._context = context
        self._model = model
        self._made = made
        self._owned = contextlib.ExitStack()
        self._mem = llama_cpp.llama_get_memory(context.ctx)
        if self._mem is None:
            raise ModelError("this context has no memory: an encoder keeps no prompt state")
        if llama_cpp.llama_n_seq_max(context.ctx) <= n_seqs:
            raise ModelError(
                f"a context for {n_seqs} sequences needs {n_seqs + 1}, one of them spare"
            )
        self.n_seqs = n_seqs
        self._spare = n_seqs
        self.n_ctx = int(llama_cpp.llama_n_ctx(context.ctx))
        self.n_batch = int(llama_cpp.llama_n_batch(context.ctx))
        self._vocabulary = Vocabulary(model, is_open=lambda: context.ctx is not None)
        self.n_vocab = self._vocabulary.n_vocab
        self.draft: Runtime | None = None
        self._batch = _Batch(self.n_batch)
        self._outputs: frozenset[int] = frozenset()
        self._device_alive: dict[int, tuple[int, int]] = {}  # generation and position, by sequence
        self._adapters: dict[tuple[str, int, int], Any] = {}
        self._empty: Buffer = np.empty(0, np.uint8)
        self._layout: StateLayout | None = None
        self.traits = self._probe(swa_full, segment_tokens)

    # -- making one --------------------------------------------------------------------------

    @classmethod
    def load(
        cls,
        model_path: str | Path,
        *,
        n_ctx: int = 4096,
        n_seqs: int = 1,
        n_batch: int = 512,
        n_ubatch: int = 512,
        n_gpu_layers: int = 0,
        n_threads: int | None = None,
        n_threads_batch: int | None = None,
        flash_attn: FlashAttention = False,
        type_k: int | str | None = None,
        type_v: int | str | None = None,
        swa_full: bool = True,
        use_mmap: bool = True,
        use_mlock: bool = False,
        segment_tokens: int = 256,
        on_progress: Callable[[float], None] | None = None,
        verbose: bool = False,
    ) -> LlamaCppRuntime:
        """Load a model and make a context with `n_seqs` sequences and the spare one.

        Args:
            model_path: A GGUF file.
            n_ctx: Tokens that all sequences together have room for; 0 for the model's own.
            n_seqs: Sequences for the caller.
            n_batch: Most tokens a native call evaluates.
            n_ubatch: Most tokens a compute graph evaluates.
            n_gpu_layers: Layers on the GPU; -1 for all.
            n_threads: Threads for evaluating single tokens; None for as many as there are
                physical cores.
            n_threads_batch: Threads for evaluating several tokens; None for `n_threads`.
            flash_attn: Use flash attention: `on` or True, `off` or False, or `auto` where
                llama.cpp finds that the device can.
            type_k: Type of the keys, one of `KV_TYPES` or its number; None for f16.
            type_v: Type of the values; others than f32, f16 and bf16 need flash attention.
            swa_full: Keep sliding-window rows of the whole context.
            use_mmap: Map the file instead of reading it, where that works.
            use_mlock: Keep the model in memory; a warning of llama.cpp's where that fails.
            segment_tokens: The longest segment that will be read.
            on_progress: Called with 0 to 1 while the file is loaded; what it raises ends that.
            verbose: Let llama.cpp log to standard error.

        Raises:
            ModelError: For a file that is missing or not a model, with its path, or when no
                context can be made of it, with its settings.
            InvalidValue: For a number or name that cannot be meant.
        """
        for name, value, least in (
            ("n_ctx", n_ctx, 0),
            ("n_seqs", n_seqs, 1),
            ("n_batch", n_batch, 1),
            ("n_ubatch", n_ubatch, 1),
            ("n_gpu_layers", n_gpu_layers, -1),
            ("n_threads", 1 if n_threads is None else n_threads, 1),
            ("n_threads_batch", 1 if n_threads_batch is None else n_threads_batch, 1),
        ):
            if whole_number(name, value, least) > _MOST:
                raise InvalidValue(f"{name} must be {_MOST} at most, not {value}")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = n_ctx
        n_batch = max(n_batch, n_seqs + 1)  # llama.cpp aborts below it
        params.n_batch, params.n_ubatch = n_batch, min(n_batch, n_ubatch)
        params.n_seq_max, params.kv_unified = n_seqs + 1, True
        params.n_threads = n_threads or usable_cores()
        params.n_threads_batch = n_threads_batch or params.n_threads
        params.flash_attn_type = flash_type(flash_attn)
        params.swa_full = swa_full
        for name, kind in (
            ("type_k", kv_type("type_k", type_k)),
            ("type_v", kv_type("type_v", type_v)),
        ):
            if kind is not None:
                setattr(params, name, kind)
        loading = model_params(n_gpu_layers=n_gpu_layers, use_mmap=use_mmap, use_mlock=use_mlock)
        model = load_model(model_path, loading, on_progress=on_progress, verbose=verbose)
        with contextlib.ExitStack() as undo:
            undo.callback(llama_cpp.llama_model_free, model)
            context = OwnContext(model, params)
            undo.callback(context.close)
            runtime = cls(
                context,
                model,
                made=MadeWith(params, loading),
                n_seqs=n_seqs,
                swa_full=swa_full,
                segment_tokens=segment_tokens,
            )
            runtime._owned = undo.pop_all()
        return runtime

    @classmethod
    def adopt(cls, llm: Any, *, segment_tokens: int = 256) -> LlamaCppRuntime:
        """Give a `llama_cpp.Llama` a context with a spare sequence, and wrap that.

        The old context is closed first (two may not fit); if the new one cannot be made, the old
        one is made again. LoRA adapters that the `Llama` was built with are applied to the new
        context. What the `Llama` had evaluated is gone; `llm.n_tokens` is 0 afterwards.

        Raises:
            ModelError: For a closed, embedding or encoder model, with the reason; the `Llama` is
                unchanged. Also when no context can be made.
        """
        refuse_unfit(llm)
        params = llm.context_params
        before = (params.n_seq_max, params.kv_unified, params.n_batch)
        params.n_seq_max, params.kv_unified = max(2, params.n_seq_max), True
        params.n_batch = max(params.n_batch, params.n_seq_max)  # llama.cpp aborts below it
        llm._ctx.close()
        try:
            cls._new_context(llm)
        except Exception as error:
            params.n_seq_max, params.kv_unified, params.n_batch = before
            cls._new_context(llm)
            raise ModelError(
                f"no context with a spare sequence could be made for {llm.model_path}: {error}"
            ) from error
        return cls(
            llm._ctx,
            llm._model.model,
            made=made_with(llm),
            n_seqs=1,
            swa_full=bool(params.swa_full),
            segment_tokens=segment_tokens,
        )

    @staticmethod
    def _new_context(llm: Any) -> None:
        context = type(llm._ctx)(model=llm._model, params=llm.context_params, verbose=llm.verbose)
        llm._ctx = context
        llm._stack.callback(context.close)
        llm.n_tokens = 0
        llm._requires_eval = True
        if llm._lora_adapter is not None:
            _set_adapters(context.ctx, [(llm._lora_adapter, llm.lora_scale)])

    # -- evaluating --------------------------------------------------------------------------

    @property
    def _ctx(self) -> Any:
        ctx = self._context.ctx
        if ctx is None:
            raise KeeperClosed("the model is closed")
        return ctx

    def _seq(self, seq_id: int) -> int:
        if not 0 <= seq_id < self.n_seqs:
            raise InvalidValue(f"seq_id {seq_id} is outside 0 to {self.n_seqs - 1}")
        return seq_id

    def evaluate(self, seq_id: int, tokens: IntArray) -> None:
        """Evaluate `tokens` after those the sequence already holds. See `Runtime.evaluate`."""
        tokens = as_tokens(tokens, n_vocab=self.n_vocab)
        check_fits(self.positions(seq_id).n_tokens + tokens.size, self.n_ctx)
        for start in range(0, tokens.size, self.n_batch):
            try:
                self.decode([Part(seq_id, tokens[start : start + self.n_batch])])
            except NoRoom as error:
                self.clear(seq_id)
                raise DecodeError(str(error)) from None

    def decode(self, parts: Sequence[Part]) -> list[int | None]:
        """Evaluate tokens of several sequences in one native call. See `Runtime.decode`.

        Costs about 0.02 ms, and 0.01 ms for each part, beside llama.cpp's time.
        """
        ctx = self._ctx
        found = check_parts(self, parts)
        if not parts:
            return []
        batch, end = self._batch, 0
        outputs: list[int | None] = []
        for part, (tokens, held) in zip(parts, found, strict=True):
            end = batch.add(part, tokens, held.n_tokens, end)
            outputs.append(end - 1 if part.output else None)
        self._outputs = frozenset()
        code = llama_cpp.llama_decode(ctx, batch.of(end))
        if code:
            raise self._undone(code, end, parts, [held for _, held in found])
        self._outputs = frozenset(index for index in outputs if index is not None)
        return outputs

    def _undone(
        self, code: int, n_tokens: int, parts: Sequence[Part], before: Sequence[Positions]
    ) -> DecodeError:
        """Clear what a failed call left of the sequences, and return what to raise.

        With code 1, llama.cpp found no cells for some part of the batch. It looks for all of them
        before it computes any, and gives back those that it found; the positions show it.
        """
        said = f"llama_decode returned {code} for {n_tokens} tokens"
        if len(parts) == 1:
            said += f" at {before[0].n_tokens}"
        said += f" of {self.n_ctx}"
        changed = [part.seq_id for part in parts]
        if code == _NO_CELLS:
            pairs = zip(changed, before, strict=True)
            changed = [seq_id for seq_id, held in pairs if self.positions(seq_id) != held]
            if not changed:
                return NoRoom(said)
        if spoils_others(self.traits.family, parts):
            self.clear_all()
            return DecodeError(said, cleared_all=True)
        for seq_id in changed:
            self.clear(seq_id)
        return DecodeError(said)

    def logits(self) -> npt.NDArray[np.float32]:
        """Return the logits after the last evaluated token, shape (n_vocab,), a copy."""
        pointer = llama_cpp.llama_get_logits_ith(self._ctx, -1)
        if not pointer:
            raise InvalidValue("no logits: nothing was evaluated yet")
        return np.ctypeslib.as_array(pointer, (self.n_vocab,)).copy()

    def logits_of(self, index: int) -> npt.NDArray[np.float32]:
        """Return the logits of an output of the last `decode`, shape (n_vocab,), a copy."""
        return self._output(index).copy()

    def _output(self, index: int) -> npt.NDArray[np.float32]:
        """Return logits where they lie; llama.cpp ends the process for some that do not exist."""
        ctx = self._ctx
        if index not in self._outputs:
            raise InvalidValue(f"{index} is no output of the last batch")
        pointer = llama_cpp.llama_get_logits_ith(ctx, index)
        if not pointer:
            raise InvalidValue(f"llama.cpp has no output {index} any more")
        return np.ctypeslib.as_array(pointer, (self.n_vocab,))

    def positions(self, seq_id: int) -> Positions:
        """Return the first and last position that the sequence holds."""
        self._seq(seq_id)
        _ = self._ctx  # a closed context has no memory to ask
        return Positions(
            int(llama_cpp.llama_memory_seq_pos_min(self._mem, seq_id)),
            int(llama_cpp.llama_memory_seq_pos_max(self._mem, seq_id)),
        )

    def sampler(self, sampling: Sampling) -> LlamaSampler:
        """Return a sampler with these settings, of llama.cpp's own. See `Runtime.sampler`.

        The first one with `ignore_eos` asks about each token of the vocabulary whether it ends.
        """
        _ = self._ctx
        vocab = self._vocabulary
        forbidden = {*vocab.suppressed, *(vocab.ends if sampling.ignore_eos else ())}
        settled = settle(sampling, n_vocab=self.n_vocab, n_ctx=self.n_ctx, forbidden=forbidden)
        if sampling.grammar:
            vocab.check_grammar(sampling.grammar)
            return ConstrainedSampler(
                sampling,
                settled,
                grammar=check_grammar(sampling.grammar),
                vocabulary=vocab,
                output=self._output,
                context=lambda: self._ctx,
            )
        return LlamaSampler(
            sampling,
            settled,
            n_vocab=self.n_vocab,
            output=self._output,
            context=lambda: self._ctx,
        )

    @property
    def vocab(self) -> Vocabulary:
        """The tokens of the model; for any thread."""
        return self._vocabulary

    # -- native moves ------------------------------------------------------------------------

    def _size(self, seq_id: int, flags: int) -> int:
        return int(llama_cpp.llama_state_seq_get_size_ext(self._ctx, seq_id, flags))

    def _read(self, seq_id: int, flags: int) -> Buffer:
        """Read a state into uninitialised memory of its own; ids are still in it."""
        size = self._size(seq_id, flags)
        data = np.empty(size, np.uint8)
        got = llama_cpp.llama_state_seq_get_data_ext(self._ctx, _pointer(data), size, seq_id, flags)
        if got != size or not size:
            raise StateError(f"llama.cpp wrote {got:,} bytes of state, {size:,} were announced")
        return data

    def _write(self, seq_id: int, data: Buffer, flags: int) -> None:
        got = llama_cpp.llama_state_seq_set_data_ext(
            self._ctx, _pointer(data), data.size, seq_id, flags
        )
        if got != data.size:
            raise RestoreFailed(f"llama.cpp read {got:,} of {data.size:,} bytes of state")

    def _remove(self, seq_id: int, start: int = _EVERYTHING) -> bool:
        return bool(llama_cpp.llama_memory_seq_rm(self._mem, seq_id, start, _EVERYTHING))

    def _copy(self, src: int, dst: int, start: int, end: int) -> None:
        llama_cpp.llama_memory_seq_cp(self._mem, src, dst, start, end)

    def clear(self, seq_id: int) -> None:
        """Empty the sequence; its memory is free afterwards."""
        _ = self._ctx
        self._remove(self._seq(seq_id))
        self._device_alive.pop(seq_id, None)

    def clear_all(self) -> None:
        """Empty every sequence."""
        _ = self._ctx
        llama_cpp.llama_memory_clear(self._mem, False)
        self._device_alive.clear()

    def _clean_up(self, *seq_ids: int) -> bool:
        """Empty sequences after a failure; return whether the whole memory had to be cleared.

        A failed write can leave rows while positions say empty, so the size is what is believed.
        """
        for seq_id in seq_ids:
            self._remove(seq_id)
            self._device_alive.pop(seq_id, None)
        if all(self._size(seq_id, WHOLE) == self._empty_bytes for seq_id in seq_ids):
            return False
        logger.warning("sequences %s could not be emptied; clearing the whole memory", seq_ids)
        self.clear_all()
        return True

    @contextlib.contextmanager
    def _all_or_empty(self, *seq_ids: int) -> Iterator[None]:
        """Empty the sequences when what happens inside fails, or is interrupted."""
        try:
            yield
        except StateError as error:
            if is_of_input(error):
                self._clean_up(*seq_ids)
                raise
            raise RestoreFailed(str(error), cleared_all=self._clean_up(*seq_ids)) from None
        except BaseException:
            self._clean_up(*seq_ids)
            raise

    # -- segments ----------------------------------------------------------------------------

    @property
    def _known(self) -> StateLayout:
        if self._layout is None:
            raise InvalidValue(
                f"this model's state is kept whole ({self.traits.whole_because}): no segments"
            )
        return self._layout

    def segment_bytes(self, n_tokens: int) -> int:
        """Return the exact size of a segment of `n_tokens`, without reading one."""
        return self._known.segment_size(n_tokens)

    def read_segment(self, seq_id: int, start: int, end: int) -> Segment:
        """Read the truncatable bytes of tokens [start, end). See `Runtime.read_segment`."""
        layout, n_tokens = self._known, self.positions(seq_id).n_tokens
        if layout.rows is None:
            raise InvalidValue("a recurrent model has no truncatable part: no segments")
        if not 0 <= start < end <= n_tokens:
            raise InvalidValue(f"no tokens {start} to {end}: the sequence holds {n_tokens}")
        if layout.dense and end - start > layout.n_swa:
            raise InvalidValue(f"a segment of {end - start} tokens outgrows {layout.n_swa}")
        self._copy(seq_id, self._spare, start, end)
        try:
            if layout.recurrent:
                self._write(self._spare, self._empty, PARTIAL)
            data = self._read(self._spare, WHOLE)
            if layout.window and not layout.dense:
                # The window's rows are the suffix; an empty window takes their place.
                suffix = self._size(self._spare, PARTIAL) - HEADER_BYTES
                nothing = self._empty[HEADER_BYTES:]
                cut = data.size - suffix
                data[cut : cut + nothing.size] = nothing
                data.resize(cut + nothing.size, refcheck=False)
        except BaseException:
            self._clean_up(self._spare)
            raise
        self._remove(self._spare)
        layout.zero_segment_ids(data, end - start)
        if data.size != layout.segment_size(end - start):
            raise StateError(
                f"tokens {start} to {end} gave {data.size:,} bytes, "
                f"not {layout.segment_size(end - start):,}"
            )
        return Segment(start, end, frozen(data))

    # -- checkpoints -------------------------------------------------------------------------

    @property
    def _checkpoint_flags(self) -> int:
        return WHOLE if self._layout is None else PARTIAL

    def checkpoint_bytes(self, seq_id: int) -> int:
        """Return the exact size of a checkpoint of the sequence as it is now."""
        self._checkpoint_position(seq_id)
        return self._size(seq_id, self._checkpoint_flags)

    def read_checkpoint(self, seq_id: int) -> Checkpoint:
        """Read the rolling bytes at the sequence's end. See `Runtime.read_checkpoint`."""
        position = self._checkpoint_position(seq_id)
        data = self._read(seq_id, self._checkpoint_flags)
        if self._layout is None:
            data[4:HEADER_BYTES] = 0
        else:
            self._layout.zero_checkpoint_ids(data)
            self._layout.check_checkpoint(data, position)
        return Checkpoint(position, frozen(data))

    def _checkpoint_position(self, seq_id: int) -> int:
        position = self.positions(seq_id).n_tokens
        if not self.traits.rolling:
            raise InvalidValue(f"{self.traits.family.value} memory needs no checkpoints")
        if not position:
            raise InvalidValue(f"sequence {seq_id} is empty: nothing to checkpoint")
        return position

    def read_device_checkpoint(self, seq_id: int) -> DeviceCheckpoint:
        """Leave the rolling tensors on the device. See `Runtime.read_device_checkpoint`."""
        position = self._checkpoint_position(seq_id)
        flags = PARTIAL | ON_DEVICE
        if self._layout is None:
            raise InvalidValue("this model's state is kept whole: no device checkpoints")
        if self._layout.window:
            # llama.cpp 0.3.36's commit reuses the buffer of a window of equal size, and aborts when
            # the new one lies in more pieces (llama_io_write_device, "not enough space").
            raise InvalidValue("a sliding window cannot be left on the device")
        generation = next(_generations)
        self._device_alive[seq_id] = (generation, position)
        data = self._read(seq_id, flags)
        check_header(data, seq_id)
        return DeviceCheckpoint(
            position,
            frozen(data),
            seq_id,
            ctypes.cast(self._ctx, ctypes.c_void_p).value or 0,
            generation,
            device_bytes=self._size(seq_id, PARTIAL) - data.size,
        )

    def _check_device(self, checkpoint: DeviceCheckpoint, seq_id: int) -> None:
        # llama.cpp aborts the process on each of these.
        if checkpoint.context != (ctypes.cast(self._ctx, ctypes.c_void_p).value or 0):
            raise StateRejected("device checkpoint belongs to another context")
        if checkpoint.seq_id != seq_id:
            raise StateRejected(
                f"device checkpoint is of sequence {checkpoint.seq_id}, not {seq_id}"
            )
        if self._device_alive.get(seq_id) != (checkpoint.generation, checkpoint.position):
            raise StateRejected("device checkpoint is gone: overwritten, or its sequence was")
        check_header(checkpoint.data, seq_id)
        expected = self._size(seq_id, PARTIAL | ON_DEVICE)
        if checkpoint.data.size != expected:
            raise StateRejected(
                f"device checkpoint has {checkpoint.data.size} bytes, not {expected}"
            )

    # -- restoring ---------------------------------------------------------------------------

    def restore(
        self,
        seq_id: int,
        n_tokens: int,
        segments: Iterable[Segment],
        checkpoint: Checkpoint | None = None,
    ) -> None:
        """Make the sequence hold the first `n_tokens` of a prompt. See `Runtime.restore`."""
        self._seq(seq_id)
        _ = self._ctx
        if not 0 < n_tokens <= self.n_ctx:
            raise StateRejected(f"{n_tokens} tokens do not fit into a context of {self.n_ctx}")
        if self._layout is None:
            self._restore_whole(seq_id, n_tokens, list(segments), checkpoint)
            return
        if not self.traits.segments:
            check_cover(n_tokens, list(segments), needed=False)
        if isinstance(segments, Sequence):
            check_cover(n_tokens, segments, needed=self.traits.segments)
            segments = list(self._checked(segments))
        else:
            segments = self._checked(segments)
        if self.traits.rolling:
            n_window = self._check_checkpoint(checkpoint, n_tokens)
        else:
            n_window = self._known.window_cells(n_tokens)
        with self._all_or_empty(seq_id, self._spare):
            self.clear(seq_id)
            self._place(seq_id, n_tokens, segments)
            if checkpoint is not None and self.traits.rolling:
                self._write(seq_id, checkpoint.data, PARTIAL)
            self._verify(seq_id, n_tokens, n_window)

    def _checked(self, segments: Iterable[Segment]) -> Iterator[Segment]:
        """Yield segments, each checked before."""
        layout = self._known
        for segment in segments:
            with blaming(segment):
                layout.check_segment(segment.data, segment.start, segment.end)
            yield segment

    def _check_checkpoint(self, checkpoint: Checkpoint | None, n_tokens: int) -> int:
        if checkpoint is None:
            raise StateRejected(f"no checkpoint at {n_tokens}")
        if checkpoint.position != n_tokens:
            raise StateRejected(f"checkpoint is at {checkpoint.position}, not {n_tokens}")
        with blaming(checkpoint):
            return self._known.check_checkpoint(checkpoint.data, n_tokens)

    def _place(self, seq_id: int, n_tokens: int, segments: Iterable[Segment]) -> None:
        for segment, stop in with_stops(n_tokens, segments) if self.traits.segments else ():
            self._write(self._spare, segment.data, WHOLE)
            self._copy(self._spare, seq_id, segment.start, stop)
            self._remove(self._spare)

    def _verify(self, seq_id: int, n_tokens: int, n_window: int) -> None:
        """Prove by size and positions that nothing is missing and nothing is doubled."""
        size, expected = self._size(seq_id, WHOLE), self._known.state_size(n_tokens, n_window)
        if size != expected:
            raise RestoreFailed(
                f"sequence has {size:,} bytes after the move, {n_tokens} tokens have {expected:,}"
            )
        found = self.positions(seq_id)
        if self.traits.family.has_recurrent:
            first = n_tokens - 1
        else:
            # Further back, full-size window caches give up rows when others need their cells.
            first = n_tokens - n_window if self._known.window else 0
        if found.pos_max != n_tokens - 1 or found.pos_min > first:
            raise RestoreFailed(
                f"sequence holds positions {found.pos_min} to {found.pos_max} after the move, "
                f"not {first} to {n_tokens - 1}"
            )

    def _verify_rows(self, seq_id: int, n_tokens: int) -> None:
        """Prove that a sequence that was not moved has no holes in its truncatable part."""
        if self._layout is None or self._layout.rows is None:
            return
        rolling = 0
        if self.traits.family is not Family.ATTENTION:
            rolling = self._size(seq_id, PARTIAL) - HEADER_BYTES
        size = self._size(seq_id, WHOLE) - HEADER_BYTES - rolling
        if size != (expected := self._layout.rows.size(n_tokens)):
            raise RestoreFailed(f"rows of {n_tokens} tokens have {size:,} bytes, not {expected:,}")

    def _restore_whole(
        self,
        seq_id: int,
        n_tokens: int,
        segments: Sequence[Segment],
        checkpoint: Checkpoint | None,
    ) -> None:
        if segments or checkpoint is None or checkpoint.position != n_tokens:
            raise StateRejected(f"a whole state of {n_tokens} tokens is needed, nothing else")
        with blaming(checkpoint):
            check_header(checkpoint.data)
        with self._all_or_empty(seq_id):
            self.clear(seq_id)
            self._write(seq_id, checkpoint.data, WHOLE)
            found, size = self.positions(seq_id), self._size(seq_id, WHOLE)
            if found.pos_max != n_tokens - 1 or size != checkpoint.data.size:
                raise RestoreFailed(
                    f"sequence ends at {found.pos_max} with {size:,} bytes after the move, not at "
                    f"{n_tokens - 1} with {checkpoint.data.size:,}"
                )

    # -- rewinding and copying ---------------------------------------------------------------

    def can_rewind(self, seq_id: int, n_tokens: int) -> bool:
        """Whether `rewind` to `n_tokens` works without a checkpoint."""
        held = self.positions(seq_id)
        if n_tokens == held.n_tokens or n_tokens == 0:
            return True
        if not 0 < n_tokens < held.n_tokens or self.traits.whole_because:
            return False
        if self.traits.family.has_recurrent:
            return False
        # A window is proven only where its rows still reach back from the token that comes next.
        return held.pos_min <= max(0, n_tokens - self.traits.n_swa + 1) or not self.traits.n_swa

    def rewind(
        self,
        seq_id: int,
        n_tokens: int,
        checkpoint: Checkpoint | DeviceCheckpoint | None = None,
    ) -> None:
        """Cut the live sequence back in place. See `Runtime.rewind`."""
        held = self.positions(seq_id)
        if not 0 <= n_tokens <= held.n_tokens:
            raise InvalidValue(f"cannot rewind to {n_tokens}: the sequence holds {held.n_tokens}")
        if n_tokens == 0:
            self.clear(seq_id)
            return
        if n_tokens == held.n_tokens:
            with self._all_or_empty(seq_id):
                self._verify_rows(seq_id, n_tokens)
            return
        if self._layout is None:
            self._restore_whole(seq_id, n_tokens, (), _host(checkpoint))
            return
        if self.can_rewind(seq_id, n_tokens):
            first = max(0, n_tokens - self.traits.n_swa) if self.traits.n_swa else 0
            n_window = n_tokens - max(first, held.pos_min) if self._layout.window else 0
            checkpoint = None
        elif isinstance(checkpoint, DeviceCheckpoint):
            self._check_device(checkpoint, seq_id)
            if checkpoint.position != n_tokens:
                raise StateRejected(f"checkpoint is at {checkpoint.position}, not {n_tokens}")
            n_window = 0
        else:
            n_window = self._check_checkpoint(checkpoint, n_tokens)
        with self._all_or_empty(seq_id):
            if checkpoint is not None:
                flags = PARTIAL | (ON_DEVICE if isinstance(checkpoint, DeviceCheckpoint) else 0)
                self._write(seq_id, checkpoint.data, flags)
            if not self._remove(seq_id, n_tokens):
                raise RestoreFailed(f"llama.cpp could not cut the sequence back to {n_tokens}")
            self._verify(seq_id, n_tokens, n_window)
        if n_tokens < self._device_alive.get(seq_id, (0, 0))[1]:
            del self._device_alive[seq_id]  # other tokens may follow than those it is of

    def copy(self, src: int, dst: int, n_tokens: int, checkpoint: Checkpoint | None = None) -> None:
        """Make `dst` hold the first `n_tokens` of `src`. See `Runtime.copy`."""
        held = self.positions(src)
        self._seq(dst)
        if src == dst:
            raise InvalidValue(f"cannot copy sequence {src} to itself")
        if not 0 < n_tokens <= held.n_tokens:
            raise InvalidValue(f"cannot copy {n_tokens} tokens: the sequence holds {held.n_tokens}")
        if self.traits.rolling and checkpoint is None:
            if n_tokens != held.n_tokens:
                raise InvalidValue(
                    f"copying {n_tokens} of {held.n_tokens} tokens needs a checkpoint"
                )
            checkpoint = self.read_checkpoint(src)
        if not self.traits.segments:
            self.restore(dst, n_tokens, (), checkpoint)
            return
        n_window = self._check_checkpoint(checkpoint, n_tokens) if self.traits.rolling else 0
        with self._all_or_empty(dst):
            self.clear(dst)
            self._copy(src, dst, 0, n_tokens)
            if checkpoint is not None and self.traits.rolling:
                self._write(dst, checkpoint.data, PARTIAL)
            self._verify(dst, n_tokens, n_window)

    # -- adapters ----------------------------------------------------------------------------

    def load_adapter(self, path: str | Path) -> Any:
        """Load a LoRA adapter for this model; it lives as long as the model.

        Raises:
            ModelError: When it is missing or of another model, with its path.
        """
        check_gguf(path, "LoRA adapter")
        stat = Path(path).stat()
        key = (str(Path(path).resolve()), stat.st_size, stat.st_mtime_ns)
        if key not in self._adapters:
            adapter = llama_cpp.llama_adapter_lora_init(self._model, str(path).encode())
            if not adapter:  # a null pointer is no None
                raise ModelError(f"{path} is not a LoRA adapter for this model")
            self._adapters[key] = adapter
        return self._adapters[key]

    def set_adapters(self, adapters: Sequence[tuple[Any, float]]) -> None:
        """Apply LoRA adapters (and their scales) to the context, instead of those before."""
        _set_adapters(self._ctx, adapters)

    # -- what only a `Llama` has --------------------------------------------------------------

    @staticmethod
    def chat_handler(chat_format: str) -> Any:
        """Return llama-cpp-python's handler of a named chat format."""
        return llama_cpp.llama_chat_format.get_chat_completion_handler(chat_format)

    @staticmethod
    def context_settings(llm: Any, *, rope_factors: bool = True) -> dict[str, Any]:
        """Return the settings of a `Llama` that change what is computed, as they take effect.

        See `computed_settings`. It is a runtime's `namespace_settings`, for models without one.

        Args:
            llm: The model, with its context.
            rope_factors: The file has rope factors that llama.cpp chooses by the size of the
                context, see `inspect_file`; True if unknown.
        """
        return computed_settings(
            made_with(llm),
            llm._model.model,
            llm._ctx.ctx,
            llm.metadata,
            rope_factors=rope_factors,
        )

    @staticmethod
    def build_facts() -> dict[str, Any]:
        """Return what computes: versions of the package, of llama.cpp and its states, backends."""
        return build_facts()

    def model_facts(self) -> dict[str, Any]:
        """Return what the model is, by llama-server's names, such as `n_params`: JSON-ready.

        Raises:
            KeeperClosed: When the model is closed.
        """
        return model_facts(llama_cpp.llama_get_model(self._ctx))

    def namespace_settings(self, *, rope_factors: bool = True) -> dict[str, Any]:
        """Return the settings that change what is computed, as they take effect.

        Equal for equal settings, whether the model was loaded here or is a `Llama`'s. See
        `computed_settings`.

        Args:
            rope_factors: The file has rope factors that llama.cpp chooses by the size of the
                context, see `inspect_file`; True if unknown.

        Raises:
            KeeperClosed: When the model is closed.
        """
        ctx, metadata = self._ctx, self._vocabulary.metadata
        return computed_settings(self._made, self._model, ctx, metadata, rope_factors=rope_factors)

    # -- start and end -----------------------------------------------------------------------

    def _probe(self, swa_full: bool, segment_tokens: int) -> Traits:
        """Prove on the loaded model that segments and checkpoints do what they should."""
        family = family_of(self._model)
        n_swa = int(llama_cpp.llama_model_n_swa(self._model)) if family.has_window else 0
        # With several sequences llama.cpp hands rows that left one's window to the others.
        alone = self.n_seqs == 1
        dense = family is Family.SWA and swa_full and alone and segment_tokens <= n_swa
        self._empty_bytes = self._size(self._spare, WHOLE)
        try:
            self._empty = self._read(self._spare, PARTIAL)
            self._empty[4:HEADER_BYTES] = 0
            frozen(self._empty)
            rolling = family is not Family.ATTENTION and not dense
            self.traits = Traits(family, family.has_rows, rolling)
            self._prove(family, n_swa, dense)
        except (StateError, DecodeError, InvalidValue) as error:
            logger.warning("this model's states are kept whole, not in segments: %s", error)
            self._layout = None
            traits = Traits(family, False, True, n_swa=n_swa, whole_because=str(error))
        else:
            layout = self._known.digest()
            traits = Traits(
                family, family.has_rows, self.traits.rolling, dense, n_swa, layout=layout
            )
        finally:
            self.clear_all()
        return traits

    def _prove(self, family: Family, n_swa: int, dense: bool) -> None:
        # Two segments, a checkpoint after each, and two tokens that are evaluated again.
        tokens = as_tokens((np.arange(_PROBE_TOKENS) * 7919 + 13) % self.n_vocab)
        self.evaluate(0, tokens[:8])
        self._layout = self._learn(family, n_swa, dense)
        self.traits = Traits(family, family.has_rows, self.traits.rolling, dense, n_swa)
        first = self.read_checkpoint(0) if self.traits.rolling else None
        self.evaluate(0, tokens[8:16])
        second = self.read_checkpoint(0) if self.traits.rolling else None
        spans = ((0, 8), (8, 16), (0, 16)) if self.traits.segments else ()
        read = [self.read_segment(0, start, end) for start, end in spans]
        self.evaluate(0, tokens[16:])
        cold = self.logits()

        def same(what: str) -> None:
            off = float(np.abs(self.logits() - cold).max())
            allowed = 0.05 * float(cold.std())
            if not off <= allowed:
                raise StateError(f"{what}: logits are off by {off:.3g}, above {allowed:.3g}")

        self.restore(0, 16, read[:2], second)
        self.evaluate(0, tokens[16:])
        same("restored at the end of a segment")
        self.restore(0, 8, read[2:], first)
        self.evaluate(0, tokens[8:16])
        self.evaluate(0, tokens[16:])
        same("restored inside a segment")
        self.rewind(0, 16, second)
        self.evaluate(0, tokens[16:])
        same("rewound in place")
        if self.traits.segments:
            self._remove(0)
            self._write(self._spare, read[1].data, WHOLE)
            self._copy(self._spare, 0, 8, 16)
            self._remove(self._spare)
            if second is not None:
                self._write(0, second.data, PARTIAL)
            try:
                self._verify(0, 16, min(16, n_swa) if family.has_window else 0)
            except RestoreFailed:
                return
            raise StateError("a missing segment goes unnoticed")

    def _learn(self, family: Family, n_swa: int, dense: bool) -> StateLayout:
        whole, partial = self._read(0, WHOLE), self._read(0, PARTIAL)
        rows = window = recurrent = None
        rolling_at = whole.size
        if family is not Family.ATTENTION:
            rolling_at -= partial.size - HEADER_BYTES
        if family.has_rows:
            rows = learn_kv(whole, HEADER_BYTES, rolling_at)
        window_end = whole.size
        if family.has_window:
            if family.has_recurrent:
                # With the recurrent part dropped, what is left before its empty form is window.
                self._copy(0, self._spare, 0, self.positions(0).n_tokens)
                self._write(self._spare, self._empty, PARTIAL)
                left = self._size(self._spare, PARTIAL) - self._empty.size
                self._remove(self._spare)
                window_end = rolling_at + left + 8
            window = learn_kv(whole, rolling_at, window_end)
        if family.has_recurrent:
            start = window_end if family.has_window else rolling_at
            recurrent = learn_recurrent(whole, start, whole.size)
        return StateLayout(rows, window, recurrent, n_swa, dense)

    def close(self) -> None:
        """Free what the runtime owns. Calling it again does nothing.

        Waits for other threads that are reading or writing text. Samplers may still be open.
        """
        self._vocabulary.close()
        self._owned.close()  # an adopted context belongs to its `Llama` and stays


def _pointer(data: Buffer) -> Any:
    return ctypes.cast(data.ctypes.data, ctypes.POINTER(ctypes.c_uint8))


def _host(checkpoint: Checkpoint | DeviceCheckpoint | None) -> Checkpoint | None:
    if isinstance(checkpoint, DeviceCheckpoint):
        raise StateRejected("a whole state cannot come from the device")
    return checkpoint


def _set_adapters(ctx: Any, adapters: Sequence[tuple[Any, float]]) -> None:
    n = len(adapters)
    pointers = (llama_cpp.llama_adapter_lora_p_ctypes * n)(*(adapter for adapter, _ in adapters))
    scales = (ctypes.c_float * n)(*(scale for _, scale in adapters))
    if llama_cpp.llama_set_adapters_lora(ctx, pointers, n, scales):
        raise ModelError(f"llama.cpp refused {n} LoRA adapters")
