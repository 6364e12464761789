"""What is done to a slot by hand: saved to a file, restored from one, emptied."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from llamakeep.engine.keeping import Keeping
from llamakeep.engine.scheduler import Scheduler
from llamakeep.engine.slotfile import (
    SlotContent,
    SlotFile,
    read_slot_file,
    write_slot_file,
)
from llamakeep.errors import ContextOverflow, InvalidValue
from llamakeep.runtime.base import Runtime


class SlotActions:
    """Saves, restores and empties idle slots. From any thread.

    Args:
        call: Runs something in the engine's thread, and returns what it returns.
        runtime: Has the slots' sequences.
        keeping: What slots hold.
        scheduler: Who is in them.
        file_key: Seals the files, see `envelope.seal_key`; None for none.
    """

    def __init__(
        self,
        call: Callable[[Callable[[], Any]], Any],
        runtime: Runtime,
        keeping: Keeping,
        scheduler: Scheduler,
        file_key: bytes | None,
    ) -> None:
        self._call = call
        self._runtime = runtime
        self._keeping = keeping
        self._scheduler = scheduler
        self._file_key = file_key

    def save(self, slot_id: int, path: Path, *, salt: str = "") -> SlotFile:
        """Write what an idle slot holds to a file of its own, which replaces one that is there.

        Args:
            slot_id: The slot.
            path: The file.
            salt: Whose slot it must be, as `Request.salt`.

        Raises:
            InvalidValue: For a slot that does not exist, is busy, is empty, or is another tenant's.
            StoreError: When the file cannot be written; one that was there is unchanged.
        """

        def look() -> tuple[SlotContent, bytes]:
            self._idle(slot_id, salt)
            if not self._keeping.tokens(slot_id).size:
                raise InvalidValue(
                    f"slot {slot_id} is empty: there is nothing to save (idle slots are emptied "
                    "while others run, unless the engine is told to leave them)"
                )
            return self._keeping.content(slot_id), self._keeping.namespace(slot_id)

        return write_slot_file(path, *self._call(look), key=self._file_key)

    def restore(self, slot_id: int, path: Path, *, salt: str = "") -> SlotFile:
        """Put what a file holds into an idle slot; what the slot held is kept first.

        Raises:
            InvalidValue: For a slot that does not exist or is busy.
            BlobRejected: For a file that is none of these, damaged, or of another model, settings
                or tenant; the slot is as it was.
            StoreError: When it cannot be read.
            ContextOverflow: When it has more tokens than the context has room for.
            RestoreFailed: When the runtime refuses it; the slot is empty then.
        """
        self._call(lambda: self._idle(slot_id))
        namespace = self._keeping.namespace_of(salt)
        found, content = read_slot_file(path, namespace, key=self._file_key)
        n_tokens, whole = int(content.tokens.size), content.whole
        if n_tokens > self._runtime.n_ctx:
            raise ContextOverflow(
                f"{path.name} has {n_tokens} tokens, the context room for {self._runtime.n_ctx}",
                n_tokens=n_tokens,
                n_ctx=self._runtime.n_ctx,
            )

        def restore() -> None:
            self._idle(slot_id)
            slot = self._scheduler.slots[slot_id]
            self._keeping.park(slot_id)
            self._scheduler.cells.begins(slot)
            self._scheduler.cells.make_room(n_tokens, slot)
            self._runtime.restore(slot_id, n_tokens, whole.segments, whole.checkpoint)
            self._keeping.hold(slot_id, content, salt)

        self._call(restore)
        return found

    def erase(self, slot_id: int, *, salt: str = "") -> int:
        """Empty an idle slot; return how many tokens it held. What is kept of it stays kept.

        Args:
            slot_id: The slot.
            salt: Whose slot it must be, as `Request.salt`.

        Raises:
            InvalidValue: For a slot that does not exist, is busy, or is another tenant's.
        """

        def erase() -> int:
            self._idle(slot_id, salt)
            n_tokens = int(self._keeping.tokens(slot_id).size)
            self._keeping.clear(slot_id)
            return n_tokens

        n_erased: int = self._call(erase)
        return n_erased

    def _idle(self, slot_id: int, salt: str | None = None) -> None:
        """Check that a slot is there and idle; with a salt, that it holds nothing of others."""
        if not 0 <= slot_id < self._runtime.n_seqs:
            raise InvalidValue(f"slot {slot_id} is outside 0 to {self._runtime.n_seqs - 1}")
        if self._scheduler.slots[slot_id].job is not None:
            raise InvalidValue(f"slot {slot_id} is answering a request: wait for it, or cancel it")
        if salt is None or not self._keeping.tokens(slot_id).size:
            return
        if self._keeping.namespace(slot_id) != self._keeping.namespace_of(salt):
            raise InvalidValue(
                f"slot {slot_id} holds nothing of requests with this salt (cache_salt)"
            )
