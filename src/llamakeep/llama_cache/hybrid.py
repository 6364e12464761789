"""Checkpoints of one live sequence: what must be put back before its end can be cut off.

The memory of recurrent and hybrid models cannot be cut at any token, and a sliding window forgets
what has left it. A checkpoint is the part of a sequence's state that is true at one position only;
with it in place, the rows behind that position can be removed. The rows before it stay in the
context all the time, so a checkpoint is good only as long as they are: see
`llamakeep.llama_cache.tracking`.
"""

from __future__ import annotations

import ctypes
import logging
import operator
import sys
import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NoReturn

import numpy as np

from llamakeep.errors import InvalidValue, StateRejected, whole_number
from llamakeep.llama_cache.base import LOGGER, BaseLlamaCache, verbose_logger
from llamakeep.llama_cache.checkpoint import HybridCheckpoint, Saved, prefix_hashes
from llamakeep.llama_cache.tracking import Affected, ContextTracking, parts_of, track
from llamakeep.runtime.base import Family
from llamakeep.runtime.layout import check_header
from llamakeep.tokens import TokensLike, as_tokens

if TYPE_CHECKING:
    from llamakeep.runtime.llama_borrowed import BorrowedMemory

logger = logging.getLogger(LOGGER)

PARTIAL_ONLY: Final = 1
ON_DEVICE: Final = 2
NO_DICTIONARY: Final = "HybridCheckpointCache: pls use save_checkpoint or restore_checkpoint method"
_CONSTANT_SIZE: Final = (Family.RECURRENT, Family.HYBRID)
"""Families whose checkpoints are of one size, and can be left on the device."""


class HybridCheckpointCache(BaseLlamaCache):
    """Takes checkpoints of the sequences of one context, and puts them back.

    Two modes. In *host mode* a checkpoint's bytes are kept here, and there may be many for a
    sequence. In *device mode* llama.cpp keeps the tensors in buffers of the context, one set for
    each sequence, so only the newest checkpoint of a sequence is good. Device mode is for
    recurrent and hybrid memory: where a checkpoint holds key and value rows (attention, sliding
    windows), llama.cpp 0.3.36 ends the process when rows that lie in more pieces are written into
    buffers of the same size; there nothing is saved, and the log says why.

    A restore gives exactly the state that was saved, or says False. When llama.cpp has failed in
    the middle of one, what is left is worth nothing, and the sequence is emptied: evaluate the
    prompt anew.

    It is a `BaseLlamaCache` without the dictionary interface, and `capacity_bytes` limits nothing
    here: the number of checkpoints does. One thread at a time, the one that owns the context. Not
    for a `Llama` that a keeper is attached to, which moves rows on its own; attaching one to a
    `Llama` closes the caches that were made from it, with its context.

    Args:
        ctx: The context; it is borrowed, never freed and not kept alive. A `llama_cpp.Llama` or a
            `llama_cpp._internals.LlamaContext` is tracked from now on: the cache follows what
            their methods do to the memory, and is closed before the context is. A raw pointer
            tells nothing: who makes a cache from one calls `clear` after changing the memory
            behind a checkpoint, and `close` before freeing the context.
        max_checkpoints: Checkpoints to keep; the oldest goes first. 0 and below: none is taken.
        on_device: Device mode.
        verbose: Say on standard error what happens.

    Attributes:
        checkpoints: Those that are good now, in the order they were saved.
        max_checkpoints: As given; may be changed. `on_device` and `verbose` are as given, too.

    Raises:
        InvalidValue: When `ctx` is None, closed or no context (it is a ValueError), when a keeper
            is attached to its `Llama`, or when `max_checkpoints` is not a whole number.
    """

    def __init__(
        self, ctx: Any, max_checkpoints: int = 16, on_device: bool = False, verbose: bool = False
    ) -> None:
        super().__init__()
        if isinstance(max_checkpoints, bool) or not hasattr(max_checkpoints, "__index__"):
            raise InvalidValue(f"max_checkpoints must be a whole number, not {max_checkpoints!r}")
        if ctx is None:
            raise InvalidValue("HybridCheckpointCache: ctx is None, a llama.cpp context is needed")
        self.max_checkpoints = operator.index(max_checkpoints)
        self.on_device = bool(on_device)
        self.verbose = bool(verbose)
        self.checkpoints: list[HybridCheckpoint] = []
        self._current_size = 0
        self._records: dict[int, Saved] = {}  # by the ids of their checkpoints
        self._flags = PARTIAL_ONLY | (ON_DEVICE if self.on_device else 0)

        from llamakeep.keeper import has_keeper

        llama, context = parts_of(ctx)
        if context is not None and has_keeper(context):
            raise InvalidValue("a keeper is attached to this model and moves rows: detach it first")
        self._ctx: Any = ctx if context is None else context.ctx
        self._owner = None if context is None else weakref.ref(context)
        self._llama = None if llama is None else weakref.ref(llama)
        self._tracking = ContextTracking.of(ctx) if context is None else track(ctx)

        from llamakeep.runtime.llama_borrowed import BorrowedMemory

        self._memory: BorrowedMemory | None = BorrowedMemory(self._ctx)
        self._get_size_ext: Any = self._memory.get_size_ext
        self._get_data_ext: Any = self._memory.get_data_ext
        self._set_data_ext: Any = self._memory.set_data_ext
        if context is not None:
            self._tracking.add(self)
        if self.max_checkpoints <= 0:
            self._say("__init__", f"max_checkpoints is {self.max_checkpoints}: no rollback")

    @property
    def cache_size(self) -> int:
        """Bytes of the checkpoints that are kept here; what lies on a device is not counted."""
        return self._current_size

    # -- lifetime ----------------------------------------------------------------------------

    def clear(self) -> None:
        """Drop all checkpoints. The context's device buffers stay until it is freed."""
        if not self.checkpoints:
            return
        self.checkpoints.clear()
        self._records.clear()
        self._current_size = 0
        self._say("clear", "cleared")

    def close(self) -> None:
        """Drop all checkpoints and let go of the context, which is not freed.

        Afterwards nothing is saved, found or restored. Calling it again does nothing.
        """
        self.clear()
        self._tracking.remove(self)
        self._ctx = self._memory = self._owner = self._llama = None
        self._get_size_ext = self._get_data_ext = self._set_data_ext = None

    def __del__(self) -> None:
        # In a constructor that raised there is nothing to close, at exit nothing to close it with.
        if "_tracking" in vars(self) and not sys.is_finalizing():
            self.close()

    def forget(self, affected: Affected, why: str) -> None:
        """Drop the checkpoints that a change of the context's memory affects."""
        for saved in [saved for saved in self._registered() if affected(saved)]:
            self._records.pop(id(saved.checkpoint), None)
            self.checkpoints = [cp for cp in self.checkpoints if cp is not saved.checkpoint]
            self._current_size = max(0, self._current_size - saved.copy.size)
            self._say("invalidate", f"dropped the checkpoint at {saved.copy.pos}: {why}")

    def forget_unreached(self) -> None:
        """Drop the checkpoints whose rows the context's memory no longer has."""
        memory = self._open_memory()
        if memory is None:
            return
        ends = {s.seq_id: memory.positions(s.seq_id).pos_max for s in self._registered()}
        self.forget(lambda saved: ends[saved.seq_id] < saved.pos_max, "memory was reset")

    def _evict_checkpoints_if_needed(self) -> None:
        """Drop the oldest checkpoints until there are at most `max_checkpoints`."""
        while len(self.checkpoints) > max(0, self.max_checkpoints):
            oldest = self.checkpoints.pop(0)
            saved = self._records.pop(id(oldest), None)
            was = oldest if saved is None else saved.copy
            self._current_size = max(0, self._current_size - was.size)
            self._say("evict", f"dropped the checkpoint at {was.pos}, {was.size:,} bytes")

    # -- finding -----------------------------------------------------------------------------

    def _hash_prefix(self, tokens: TokensLike, length: int) -> str:
        """Return the first 32 hex digits of the SHA-256 of the first `length` tokens, or of all.

        They are hashed as native 32-bit integers. For a length of 0 or below it is "empty".

        Raises:
            TokenError: For tokens that are none.
        """
        return prefix_hashes(as_tokens(tokens), [length])[length]

    def find_best_checkpoint(self, tokens: TokensLike, seq_id: int = 0) -> HybridCheckpoint | None:
        """Return the checkpoint that the longest prefix of `tokens` leads to, or None.

        Among several at one position it is the newest. Checkpoints that somebody changed or put
        into the list are passed over. Costs one pass of SHA-256 over the tokens up to the last
        checkpoint, however many there are.

        Raises:
            TokenError: For tokens that are none.
        """
        if self.max_checkpoints <= 0 or not self.checkpoints:
            return None
        array = as_tokens(tokens)
        candidates = [
            saved
            for saved in reversed(self._registered())
            if saved.seq_id == seq_id and saved.copy.pos <= array.size and saved.is_unchanged
        ]
        hashes = prefix_hashes(array, (saved.copy.pos for saved in candidates))
        fitting = (saved for saved in candidates if saved.copy.hash_val == hashes[saved.copy.pos])
        best = max(fitting, key=lambda saved: saved.copy.pos, default=None)
        found = f"none of {len(candidates)}" if best is None else f"the one at {best.copy.pos}"
        self._say("find", f"{found} fits {array.size} tokens")
        return None if best is None else best.checkpoint

    # -- saving ------------------------------------------------------------------------------

    def save_checkpoint(self, current_pos: int, tokens: TokensLike, seq_id: int = 0) -> bool:
        """Take a checkpoint of a sequence as it is now; the sequence is unchanged.

        In device mode it ends the life of the sequence's previous one, in every cache that
        follows the context. At most one copy of the bytes exists besides those that are kept.

        Args:
            current_pos: Tokens that the sequence has evaluated.
            tokens: Its tokens, at least that many. (With fewer, the checkpoint is never found:
                no prompt that reaches its position has the hash of a shorter one.)
            seq_id: The sequence.

        Returns:
            Whether one was taken. False, with the reason in the log: when none are wanted, after
            `close` or the context's, for an empty sequence, in device mode for memory with
            rows in its checkpoints, and when llama.cpp does not write what it announced.

        Raises:
            TokenError: For tokens that are none.
            InvalidValue: For a negative position, for one that is not where the `Llama` is that the
                cache was made from, and for a sequence that the context has not.
        """
        if self.max_checkpoints <= 0:
            return False
        memory = self._open_memory()
        if memory is None:
            return self._refuse("save", "the cache is closed")
        current_pos = whole_number("current_pos", current_pos, 0)
        seq_id = whole_number("seq_id", seq_id, 0)
        if seq_id >= memory.n_seq_max:
            raise InvalidValue(f"seq_id {seq_id} is outside 0 to {memory.n_seq_max - 1}")
        array = as_tokens(tokens)
        llama = None if self._llama is None else self._llama()
        if llama is not None and seq_id == 0 and current_pos != llama.n_tokens:
            raise InvalidValue(
                f"current_pos is {current_pos}, but the Llama has evaluated {llama.n_tokens} tokens"
            )
        held = memory.positions(seq_id)
        if held.pos_max < 0:
            return self._refuse("save", f"sequence {seq_id} is empty")
        if self.on_device and memory.family not in _CONSTANT_SIZE:
            kind = memory.family.value
            return self._refuse("save", f"llama.cpp cannot leave {kind} memory on the device")
        device_write = self._write_device(seq_id) if self.on_device else None
        data = self._read(seq_id)
        if data is None:
            return False
        hash_val = prefix_hashes(array, [current_pos])[current_pos]
        checkpoint = HybridCheckpoint(
            current_pos, data, hash_val, len(data), seq_id, held.pos_min, held.pos_max
        )
        self._registered()  # lets go of the records of what was taken out of the list
        self._records[id(checkpoint)] = Saved(
            checkpoint, replace(checkpoint), memory.whole_bytes(seq_id), device_write
        )
        self.checkpoints.append(checkpoint)
        self._current_size += len(data)
        self._say("save", f"took a checkpoint at {current_pos}, {len(data):,} bytes")
        self._evict_checkpoints_if_needed()
        return True

    def _write_device(self, seq_id: int) -> object:
        """End the life of what lies in the context's buffers of a sequence, to write into them."""
        self._tell_all(
            lambda saved: saved.device_write is not None and saved.seq_id == seq_id,
            "a newer checkpoint takes its place on the device",
        )
        self._tracking.device_writes[seq_id] = write = object()
        return write

    def _read(self, seq_id: int) -> bytes | None:
        size = int(self._get_size_ext(self._ctx, seq_id, self._flags))
        why = f"llama.cpp announced {size} bytes of state"
        if size > 0:
            try:
                buffer = (ctypes.c_uint8 * size)()
                written = int(self._get_data_ext(self._ctx, buffer, size, seq_id, self._flags))
                if written == size:
                    return bytes(buffer)
                why = f"llama.cpp wrote {written:,} of {size:,} bytes of state"
            except MemoryError:
                why = f"no memory for {size:,} bytes of state"
        self._refuse("save", why)
        return None

    # -- restoring ---------------------------------------------------------------------------

    def restore_checkpoint(self, cp: HybridCheckpoint, seq_id: int = 0) -> bool:
        """Put a live sequence back to where a checkpoint was taken.

        Everything that can be checked is checked before llama.cpp sees a byte: it would end the
        process, or decode nonsense without an error. Such a refusal changes nothing. Afterwards
        the size of the sequence's whole state and its positions must be those of then; a row that
        is missing in its middle shows there and nowhere else.

        After success, checkpoints past the position are dropped from every cache that follows the
        context; this one and those before it stay. A `Llama` does not know of the restore: set
        its `n_tokens` to `cp.pos`. The bytes are not copied.

        Args:
            cp: One of `checkpoints`, the very object, unchanged.
            seq_id: Its sequence.

        Returns:
            Whether the sequence is now as it was saved. False with the reason in the log: refused
            and unchanged; or failed in llama.cpp, then the sequence is empty (all sequences are,
            if that alone could not be cleaned), its checkpoints are dropped, and the `Llama` that
            the cache was made from is reset.

        Raises:
            InvalidValue: When `cp` is no checkpoint.
            Exception: What the native calls raise; the sequence is emptied as after a failure.
        """
        if not isinstance(cp, HybridCheckpoint):
            raise InvalidValue(f"cp must be a HybridCheckpoint, not {type(cp).__name__}")
        if cp.seq_id != seq_id:
            return self._refuse("restore", f"it is of sequence {cp.seq_id}, not {seq_id}")
        memory = self._open_memory()
        saved = next((s for s in self._registered() if s.checkpoint is cp), None)
        if saved is None or memory is None:  # a closed cache has none
            return self._refuse("restore", "it is not, or no longer, one of this cache")
        if problem := self._unfit(saved, memory):
            return self._refuse("restore", problem)
        problem = "a call raised"
        try:
            problem = self._put_back(saved, memory)
        finally:
            if problem:
                self._give_up(saved, memory, problem)
        if problem:
            return False
        self._tell_all(
            lambda other: other.seq_id == seq_id and other.pos_max > saved.pos_max,
            f"the sequence went back to {saved.copy.pos}",
        )
        self._say("restore", f"sequence {seq_id} is back at {saved.copy.pos}")
        return True

    def _unfit(self, saved: Saved, memory: BorrowedMemory) -> str:
        """Return why a checkpoint must not be handed to llama.cpp as things are, or ""."""
        if not saved.is_unchanged:
            return "somebody changed it"
        context = None if self._owner is None else self._owner()
        if context is not None and memory.family is Family.SWA:
            # After a restore new tokens take cells of rows that an earlier position would need.
            from llamakeep.runtime.llama_borrowed import guard_window

            if not guard_window(context):
                return "its window could be cut afterwards where rows are gone"
        seq_id, data = saved.seq_id, saved.copy.data
        if saved.device_write not in (None, self._tracking.device_writes.get(seq_id)):
            return "its place on the device was overwritten"
        try:
            # Nobody changed what llama.cpp wrote; but the process ends if it wrote something else.
            check_header(np.frombuffer(data, np.uint8), seq_id)
        except StateRejected as error:
            return str(error)
        pos_max = memory.positions(seq_id).pos_max
        if pos_max < saved.pos_max:
            return f"the sequence ends at position {pos_max}, before its {saved.pos_max}"
        size = int(self._get_size_ext(self._ctx, seq_id, self._flags))
        # Where checkpoints hold rows, the live sequence has grown since.
        grown = size > len(data) and memory.family not in _CONSTANT_SIZE
        if size != len(data) and not grown:
            return f"it has {len(data):,} bytes, the sequence's would have {size:,}"
        return ""

    def _put_back(self, saved: Saved, memory: BorrowedMemory) -> str:
        """Restore the state and cut off the rest; return what is wrong afterwards, or ""."""
        was, seq_id = saved.copy, saved.seq_id
        source = ctypes.cast(ctypes.c_char_p(was.data), ctypes.POINTER(ctypes.c_uint8))
        read = int(self._set_data_ext(self._ctx, source, was.size, seq_id, self._flags))
        if read != was.size:
            return f"llama.cpp read {read:,} of {was.size:,} bytes of state"
        if not memory.cut(seq_id, saved.pos_max + 1):
            return f"llama.cpp could not remove what follows position {saved.pos_max}"
        size = memory.whole_bytes(seq_id)
        if size != saved.whole_bytes:
            return f"the sequence has {size:,} bytes of state, it had {saved.whole_bytes:,}"
        now = memory.positions(seq_id)
        # A full-size window holds rows from before it, which no state has: it may start later now.
        last_min = saved.pos_max if memory.family.has_window else was.pos_min
        if now.pos_max != saved.pos_max or not was.pos_min <= now.pos_min <= last_min:
            return f"it holds {now.pos_min} to {now.pos_max}, not {was.pos_min} to {was.pos_max}"
        return ""

    def _give_up(self, saved: Saved, memory: BorrowedMemory, problem: str) -> None:
        """Empty a sequence whose restore failed: with a row missing it would decode nonsense."""
        self._tell_all(lambda other: other.seq_id == saved.seq_id, "a restore failed")
        if memory.clear(saved.seq_id):
            self._tell_all(lambda _: True, "a restore failed")
        llama = None if self._llama is None else self._llama()
        if llama is not None and saved.seq_id == 0:
            # It counts on tokens that are gone; llama.cpp decodes behind them without an error.
            llama.reset()
        self._say("restore", f"failed, the sequence is empty now: {problem}", logging.WARNING)

    # -- the dictionary interface, which has no meaning here --------------------------------

    def __getitem__(self, key: Any) -> NoReturn:
        raise NotImplementedError(NO_DICTIONARY)

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        raise NotImplementedError(NO_DICTIONARY)

    def __contains__(self, key: Any) -> NoReturn:
        raise NotImplementedError(NO_DICTIONARY)

    # -- inner workings ----------------------------------------------------------------------

    def _open_memory(self) -> BorrowedMemory | None:
        """Return the context's memory; None, and be closed, when the context is known to be."""
        if self._owner is not None:
            context = self._owner()
            if context is None or context.ctx != self._ctx:
                self.close()
        return self._memory

    def _registered(self) -> list[Saved]:
        """Return what was saved and is still in `checkpoints`, oldest first."""
        listed = [self._records.get(id(checkpoint)) for checkpoint in self.checkpoints]
        saved = [record for record in listed if record is not None]
        if len(saved) != len(self._records):
            self._records = {id(record.checkpoint): record for record in saved}
        return saved

    def _tell_all(self, affected: Affected, why: str) -> None:
        """Make this cache and all that follow its context drop what is affected."""
        self._tracking.forget(affected, why)
        self.forget(affected, why)

    def _refuse(self, method: str, why: str) -> bool:
        self._say(method, f"refused: {why}")
        return False

    def _say(self, method: str, what: str, level: int = logging.DEBUG) -> None:
        target = logger
        if self.verbose:
            target, level = verbose_logger(), max(level, logging.INFO)
        target.log(level, "HybridCheckpointCache(%s): %s", method, what)
