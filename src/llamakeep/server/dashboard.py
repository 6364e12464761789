"""`/`: a page that shows what the server does and keeps, and what it reads for that.

The page is one file without anything of a client or the model in it; it asks for the rest every
second. What it is told is made at most every half second, whoever asks, and a page that has it
already is told only that. No text of a prompt is in it.
"""

from __future__ import annotations

import base64
import hashlib
import re
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from typing import Any

from blake3 import blake3
from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response
from starlette.concurrency import run_in_threadpool

from llamakeep.engine import Engine, SlotGlance
from llamakeep.outline import Branch, Outline, branches
from llamakeep.server.context import Context
from llamakeep.server.documented import ERRORS
from llamakeep.server.routing import PlainRoute
from llamakeep.server.series import INTERVAL_S, MOST_LETTERS, Series
from llamakeep.server.wire import dumps

FRESH_S = 0.5
"""What is told may be so old."""
MOST_BRANCHES = 120
_STEADY_S = 2.0
"""Two clocks may drift so far apart before times are told anew."""
_PRIVATE = {
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
}


class Board:
    """What the page is told. From any thread.

    Args:
        engine: It is about.
        series: Hears of every request of that engine.
        shows_slots: Whether slots are shown.
        clock: Seconds since 1970.
    """

    def __init__(
        self,
        engine: Engine,
        series: Series,
        *,
        shows_slots: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._engine = engine
        self._series = series
        self._shows_slots = shows_slots
        self._clock = clock
        self._gate = threading.Lock()
        self._made: tuple[float, bytes, str] | None = None
        self._version = -1
        self._requests = b""
        self._outline: Outline | None = None
        self._offset_s = 0.0
        self._tree = b"null"

    def fresh(self) -> tuple[bytes, str] | None:
        """Return what was told last, and its entity tag, if that is not too old."""
        made = self._made
        if made is None or not 0 <= self._clock() - made[0] < FRESH_S:
            return None
        return made[1:]

    def tell(self) -> tuple[bytes, str]:
        """Return what is to be told, JSON of some 30 KB at most, and its entity tag.

        Costs 1 to 3 ms, 10 where a large tree has changed; does not wait for the engine.
        """
        with self._gate:
            fresh = self.fresh()
            if fresh is not None:
                return fresh
            now = self._clock()
            self._engine.settle()  # so that the last request is among those that are told
            about = dumps(self._about())
            self._note_requests()
            self._note_tree(now)
            body = b"".join((about[:-1], self._requests, b',"tree":', self._tree, b"}"))
            tag = f'"{blake3(body).hexdigest(16)}"'
            self._made = now, body, tag
            return body, tag

    def _about(self) -> dict[str, Any]:
        """Return what may be different every time."""
        stats = self._engine.stats()
        saved_ms = self._series.ms_of(stats["reused_tokens"])
        names = ("requests", "reused_tokens", "evaluated_tokens", "generated_tokens", "saved_share")
        tiers = (stats.get("below") or {}).get("tiers") or {}
        slots = self._engine.glance() if self._shows_slots else None
        return {
            "model": self._engine.model_name,
            "since": round(self._series.since),
            "n_ctx": stats["n_ctx"],
            "waiting": stats["waiting"],
            "slots_busy": stats["slots_busy"],
            "slots": slots and [_slot_json(slot) for slot in slots],
            "totals": {name: stats[name] for name in names}
            | {"saved_ms": round(saved_ms), "reused_by_tier": stats["reused_by_tier"]},
            "cache": stats["cache"],
            "policy": stats["policy"],
            "failures": stats["failures"],
            "tiers": [
                {
                    "tier": tier,
                    "used_bytes": figures.get("used_bytes"),
                    "capacity_bytes": figures.get("capacity_bytes"),
                }
                for tier, figures in (("ram", stats), *tiers.items())
            ],
        }

    def _note_requests(self) -> None:
        version = self._series.version
        if version == self._version:
            return
        self._version = version
        series = {"interval_s": INTERVAL_S, "intervals": self._series.intervals()}
        told = dumps({"series": series, "recent": self._series.recent()})
        self._requests = b"," + told[1:-1]

    def _note_tree(self, now: float) -> None:
        latest = self._engine.outline()
        if latest is None:
            return
        outline, age_s = latest
        offset_s = now - age_s - outline.now
        is_steady = abs(offset_s - self._offset_s) < _STEADY_S
        last = self._outline
        if (
            is_steady
            and last is not None
            and (outline.seen, outline.n_unseen) == (last.seen, last.n_unseen)
        ):
            return
        self._outline = outline
        if not is_steady:
            self._offset_s = offset_s
        found = branches(outline, MOST_BRANCHES)
        self._tree = dumps(
            {
                "branches": [self._branch_json(branch) for branch in found.found],
                "n_more": found.n_more,
                "more_bytes": found.more_bytes,
                "spans": len(outline.seen) + outline.n_unseen,
                "unseen_spans": outline.n_unseen,
            }
        )

    def _branch_json(self, branch: Branch) -> dict[str, Any]:
        """Return a branch without what is 0 or empty."""
        told = asdict(branch) | {"last_used": round(branch.last_used + self._offset_s)}
        always = ("number", "parent")  # a number may be 0
        return {
            name: value
            for name, value in told.items()
            if value or (name in always and value is not None)
        }


def _slot_json(slot: SlotGlance) -> dict[str, Any]:
    told = asdict(slot) | {"tokens_per_second": round(slot.tokens_per_second, 1)}
    return told | {"label": slot.label[:MOST_LETTERS]}


@cache
def page() -> tuple[bytes, dict[str, str]]:
    """Return the page and its headers: nothing runs or is loaded but what stands in it."""
    text = files("llamakeep.server").joinpath("dashboard.html").read_text("utf-8")
    hashes = {
        kind: " ".join(
            f"'sha256-{base64.b64encode(hashlib.sha256(each.encode()).digest()).decode()}'"
            for each in re.findall(rf"<{kind}>(.*?)</{kind}>", text, re.DOTALL)
        )
        for kind in ("script", "style")
    }
    policy = (
        f"default-src 'none'; script-src {hashes['script']}; style-src {hashes['style']}; "
        "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    )
    content = text.encode()
    return content, {
        "Content-Security-Policy": policy,
        "Cache-Control": "no-cache",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "ETag": f'"{blake3(content).hexdigest(16)}"',
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
    }


def _answer(request: Request, content: bytes, headers: dict[str, str], kind: str) -> Response:
    """Return an answer, or a 304 for who has it."""
    known = request.headers.get("if-none-match", "")
    if headers["ETag"] in (each.strip().removeprefix("W/") for each in known.split(",")):
        return Response(None, 304, headers)
    return Response(content, 200, headers, media_type=kind)


def router(context: Context) -> APIRouter:
    """Return the endpoints. The engine is watched from now on."""
    routes = APIRouter(tags=["llamakeep"], route_class=PlainRoute)
    engine = context.engine
    series = Series()
    engine.observers.add(series)
    board = Board(engine, series, shows_slots=context.options.slots)

    @routes.get("/", response_class=HTMLResponse, responses={304: {"description": "As before."}})
    async def dashboard(request: Request) -> Response:
        """Return a page that shows what the server does and keeps. It needs no key; its data do."""
        return _answer(request, *page(), "text/html")

    @routes.get("/dashboard/data", responses=ERRORS | {304: {"description": "As before."}})
    async def data(request: Request) -> Response:
        """Return what the page shows: slots, totals, tiers, the last requests, and the tree."""
        told = board.fresh()
        if told is None:
            told = await run_in_threadpool(board.tell)
        body, tag = told
        return _answer(request, body, _PRIVATE | {"ETag": tag}, "application/json")

    return routes
