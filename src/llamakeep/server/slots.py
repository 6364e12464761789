"""`/slots`: what each slot does, and saving, restoring and emptying them by hand.

What slots do is shown of all tenants, without prompts and answers; by hand, each has its own.
"""

from __future__ import annotations

import hashlib
import unicodedata
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import Response
from starlette.concurrency import run_in_threadpool

from llamakeep.engine import SlotInfo
from llamakeep.errors import StateError, StoreError
from llamakeep.server.context import Context
from llamakeep.server.documented import ERRORS, example
from llamakeep.server.errors import ApiError
from llamakeep.server.native_json import sampling_json
from llamakeep.server.routing import JsonRoute
from llamakeep.server.schema import SlotAction
from llamakeep.server.wire import answer_json

_NAME_BYTES = 255
_FORBIDDEN = set('/\\:*?"<>|\uff0e\u2215\u2216\ufffd\ufeff')


def checked_name(name: str | None) -> str:
    """Return a file's name that stays in its directory, on every system.

    Raises:
        ApiError: For anything with separators, "..", control characters or a NUL in it, for names
            that a system would change, and for long ones.
    """
    if (
        not name
        or len(name.encode("utf-8", "replace")) > _NAME_BYTES
        or ".." in name
        or name[0] == " "
        or name[-1] in " ."
        or any(
            letter in _FORBIDDEN or unicodedata.category(letter) in ("Cc", "Cs") for letter in name
        )
    ):
        raise ApiError("Invalid filename", param="filename")
    return name


def directory_of(root: Path, salt: str) -> Path:
    """Return where a tenant's files are: names are apart, so that nobody replaces another's.

    Without a salt it is `root` itself, as in llama-server.
    """
    if not salt:
        return root
    digest = hashlib.sha256(salt.encode("utf-8", "surrogatepass")).hexdigest()
    return root / f"tenant-{digest[:32]}"


def slot_json(slot: SlotInfo) -> dict[str, Any]:
    """Return a slot by llama-server's names. Prompts and answers are not shown."""
    result: dict[str, Any] = {
        "id": slot.slot_id,
        "n_ctx": slot.n_ctx,
        "speculative": False,
        "is_processing": slot.is_processing,
    }
    request, reuse = slot.request, slot.reuse
    if request is None:
        return result
    limit, n_prompt = request.max_tokens, int(request.prompt.size)
    n_reused = reuse.reused_tokens if reuse else 0
    n_done = min(int(slot.tokens.size), n_prompt) if reuse else 0
    return result | {
        "id_task": slot.task_id,
        "n_prompt_tokens": n_prompt,
        "n_prompt_tokens_processed": max(0, n_done - n_reused),
        "n_prompt_tokens_cache": n_reused,
        "params": sampling_json(request.sampling, limit, n_probs=request.n_probs),
        "next_token": [
            {
                "has_next_token": slot.is_processing,
                "has_new_line": slot.has_new_line,
                "n_remain": -1 if limit is None else max(0, limit - slot.n_decoded),
                "n_decoded": slot.n_decoded,
            }
        ],
    }


def router(context: Context) -> APIRouter:
    """Return the endpoints."""
    routes = APIRouter(route_class=JsonRoute, tags=["llama-server"])
    engine, options = context.engine, context.options

    @routes.get("/slots", responses=ERRORS)
    async def slots(
        fail_on_no_slot: Annotated[
            str, Query(max_length=16, description="Anything: a 503 if all slots are busy.")
        ] = "",
    ) -> Response:
        """Return what each slot does."""
        if not options.slots:
            raise ApiError(
                "This server does not support slots endpoint. Start it with `--slots`", code=501
            )
        now = await run_in_threadpool(engine.slots)  # which waits for a batch
        if fail_on_no_slot and all(slot.is_processing for slot in now):
            raise ApiError("no slot available", code=503)
        return answer_json([slot_json(slot) for slot in now])

    @routes.post("/slots/{id_slot}", responses=ERRORS)
    async def act(
        id_slot: str,
        action: Annotated[
            str, Query(max_length=16, description="`save`, `restore` or `erase`.")
        ] = "",
        body: Annotated[SlotAction | None, example(filename="long-document.bin")] = None,
    ) -> Response:
        """Save what a slot holds, restore it, or empty the slot. The slot must be idle."""
        if options.slot_save_path is None:
            raise ApiError(
                "This server does not support slots action. Start it with `--slot-save-path`",
                code=501,
            )
        slot_id = _slot_id(id_slot, engine.n_slots)
        salt = (body.cache_salt if body else None) or ""
        if action == "erase":
            n_erased = await run_in_threadpool(partial(engine.slot_erase, slot_id, salt=salt))
            return answer_json({"id_slot": slot_id, "n_erased": n_erased})
        if action not in ("save", "restore"):
            raise ApiError("Invalid action", param="action")
        name = checked_name(body.filename if body else None)
        path = directory_of(Path(options.slot_save_path), salt) / name
        names = ("n_saved", "n_written") if action == "save" else ("n_restored", "n_read")
        work = engine.slot_save if action == "save" else engine.slot_restore
        try:
            done = await run_in_threadpool(partial(work, slot_id, path, salt=salt))
        except (StateError, StoreError) as error:
            # Which file is to be read is the client's choice; that one can be written is ours.
            code = 400 if action == "restore" else 500
            where = f" (in {path.parent})" if isinstance(error, StoreError) else ""
            raise ApiError(f"Unable to {action} slot: {error}{where}", code=code) from error
        return answer_json(
            {
                "id_slot": slot_id,
                "filename": name,
                names[0]: done.n_tokens,
                names[1]: done.n_bytes,
                "timings": {f"{action}_ms": done.ms},
            }
        )

    return routes


def _slot_id(text: str, n_slots: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) < n_slots):
        raise ApiError("Invalid slot ID", param="id_slot")
    return int(text)
