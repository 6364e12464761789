"""Requests that an engine or a keeper has answered, by which the newest of them are explained."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Final, TypeAlias

import numpy as np

from llamakeep.errors import InvalidValue, whole_number
from llamakeep.explain.circumstances import Circumstances, Evicted
from llamakeep.explain.evictions import Evictions, Held, deepest
from llamakeep.explain.explaining import explain
from llamakeep.explain.explanation import Explanation
from llamakeep.explain.kinds import Kind
from llamakeep.explain.prompts import Side
from llamakeep.fingerprint import Difference
from llamakeep.runtime.base import Vocab
from llamakeep.states import Reuse
from llamakeep.tokens import IntArray, common_prefix

logger = logging.getLogger("llamakeep")

Elsewhere: TypeAlias = Callable[[bytes, IntArray], tuple[Difference, ...]]
"""Returns under which other settings a prompt is kept, for the namespace that has nothing of it."""

MOST_REQUESTS: Final = 100
_SLACK_TOKENS: Final = 2
"""Of a prompt, besides those that alignment rounds off, always evaluated."""
_WORTH_TELLING: Final = 16
"""Tokens that prompts of two salts have to share, to be one prompt that was sent with both."""


@dataclass(frozen=True, slots=True, eq=False)
class Served:
    """A request that was answered.

    Attributes:
        id: Its number, which is larger than those before it.
        label: What its sender calls it.
        namespace: Digest of what makes its states incompatible with others, the salt included.
        tokens: Its prompt, and the answer behind it; empty if it may leave nothing behind.
        n_prompt: Tokens of the prompt.
        reuse: How the prompt was served; None if it never began.
        session: What its sender says that it belongs to.
        keeps: What it left behind may serve others.
        text: Its text, where that is kept.
        body: The request that it was made of, as JSON, where that is kept.
        alias: Another name that its sender knows it by, or "".
        reads: It might use what is kept.
        held_tokens: How many of its tokens were evaluated in the end, and may have been kept; None
            for all of them.
        elsewhere: How it is kept in another namespace, if that was looked for at once.
        resumed_s: When what is kept was looked through for it; None if it never was, or if that is
            not known.
        ended_s: When it ended, by the same clock.
    """

    id: int
    label: str
    namespace: bytes
    tokens: IntArray
    n_prompt: int
    reuse: Reuse | None
    session: str = ""
    keeps: bool = True
    text: str | None = None
    body: bytes | None = None
    alias: str = ""
    reads: bool = True
    held_tokens: int | None = None
    elsewhere: tuple[Difference, ...] = ()
    resumed_s: float | None = None
    ended_s: float = 0.0

    @property
    def n_bytes(self) -> int:
        """What it takes to remember it."""
        return int(self.tokens.nbytes) + len(self.body or b"")

    def side(self, tokens: IntArray) -> Side:
        """Return what is known of it, for these of its tokens.

        Raises:
            InvalidValue: For a body that is no object.
        """
        if self.body is None:
            return Side(tokens, self.text)
        try:
            body = json.loads(self.body)
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            raise InvalidValue("its body is no JSON object")
        return Side(tokens, self.text, body)

    @property
    def held(self) -> IntArray:
        """What it left behind, which may have been kept."""
        return self.tokens if self.held_tokens is None else self.tokens[: self.held_tokens]

    @property
    def prompt(self) -> IntArray:
        """The prompt's tokens; none where they are not kept."""
        return self.tokens[: self.n_prompt]


class History:
    """The last requests, and why each was read as far as it was. Any thread.

    Noting a request costs nothing but its tokens; what it should have gone on from is looked for
    when somebody asks.

    Args:
        policy: Name of what decides which states go; "" if nothing is kept but what is live.
        rolling: A position is restorable only where a checkpoint sits.
        align: Prompts are resumed at multiples of this.
        capacity_bytes: Of tokens and bodies that are held at most: the oldest requests go first.
        elsewhere: Asked, in the thread that wants an explanation, about a prompt of which nothing
            was known.
        clock: Seconds; that of `Served.resumed_s` and `Served.ended_s`.
    """

    def __init__(
        self,
        *,
        policy: str = "",
        rolling: bool = False,
        align: int = 1,
        capacity_bytes: int = 64 << 20,
        elsewhere: Elsewhere = lambda _namespace, _tokens: (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.now = clock
        self._elsewhere = elsewhere
        self._evictions = Evictions()
        self._policy = policy
        self._rolling = rolling
        self._slack = whole_number("align", align, 1) + _SLACK_TOKENS
        self._capacity_bytes = whole_number("capacity_bytes", capacity_bytes, 0)
        self._served: deque[Served] = deque()
        self._used_bytes = 0
        self._lock = threading.Lock()

    def add(self, served: Served) -> None:
        """Note a request."""
        with self._lock:
            self._served.append(served)
            self._used_bytes += served.n_bytes
            while self._served and (
                self._used_bytes > self._capacity_bytes or len(self._served) > MOST_REQUESTS
            ):
                self._used_bytes -= self._served.popleft().n_bytes

    def extend(self, tokens: IntArray) -> None:
        """Note what the last request has become: its prompt, and the answer behind it."""
        with self._lock:
            last = self._served[-1] if self._served else None
            if last is None or not last.keeps or tokens.size <= last.tokens.size:
                return
            if common_prefix(last.tokens, tokens) == last.tokens.size:
                self._used_bytes -= last.n_bytes
                self._served[-1] = replace(last, tokens=tokens.copy())
                self._used_bytes += self._served[-1].n_bytes

    def clear(self) -> None:
        """Forget all of them."""
        with self._lock:
            self._served.clear()
            self._evictions.clear()
            self._used_bytes = 0

    def evicted(self, namespace: bytes, tokens: IntArray, exact: bool) -> None:
        """Note a state that goes to make room. Costs a hash of its tokens.

        Args:
            namespace: Digest of its namespace.
            tokens: From the start to its end.
            exact: It served only prompts that begin with all of them.
        """
        with self._lock:
            self._evictions.add(namespace, tokens, exact=exact, at_s=self.now())

    def find(self, request: int | str | None = None) -> Served | None:
        """Return a request by its number or a name, the newest one first; None if it is gone.

        Args:
            request: Which one; the last if None.
        """
        for served in reversed(self._snapshot()):
            names = (served.id, served.label, served.alias, str(served.id))
            if request is None or request in names:
                return served
        return None

    def explain(
        self, served: Served, vocab: Vocab | None = None, *, salts: bool = False
    ) -> Explanation:
        """Say why the rest of a request's prompt was evaluated.

        Args:
            served: The request.
            vocab: Of the model, to compare texts and not only tokens.
            salts: Say that it was sent with another salt before: not to who may not know that.
        """
        before, _ = self._best(served, same=True)
        known = self.circumstances(served, salts=salts, looks=True)
        why = self._untold(served)
        if why:
            found = explain(None, Side(text=""), circumstances=known)
            if not known.shared_tokens and not known.reused_tokens:
                found = replace(found, kind=Kind.UNKNOWN, reason=why)
            before = None
        else:
            found = _compared(before, served, vocab, known)
        if found.kind is Kind.SALT:  # the request that it would have gone on from
            before, _ = self._best(served, same=False)
        return replace(
            found,
            request_id=served.label or str(served.id),
            before_id="" if before is None else before.label or str(before.id),
        )

    def _untold(self, served: Served) -> str:
        """Return why a request cannot be compared with those before it, or ""."""
        if served.reuse is None:
            return "it ended before it began, so that nothing of it was read"
        if not served.reads:
            return "it was not to use what is kept (cache_mode)"
        if not served.prompt.size:
            return "its tokens are not remembered (cache_mode), so that it cannot be compared"
        return ""

    def circumstances(
        self, served: Served, *, salts: bool = False, looks: bool = False
    ) -> Circumstances:
        """Return what is known of a request beside its text.

        Args:
            served: The request.
            salts: See `explain`.
            looks: Ask where else a prompt is kept of which nothing was known; that reads a disk.
        """
        reuse, n_prompt = served.reuse, served.n_prompt
        if reuse is None:
            return Circumstances(prompt_tokens=n_prompt, slack_tokens=self._slack)
        before, seen = self._best(served, same=True)
        shared = max(reuse.shared_tokens, reuse.reused_tokens)
        known = Circumstances.of(
            reuse,
            shared_tokens=shared,
            stored_tokens=None if before is None or seen != shared else int(before.held.size),
            rolling=self._rolling,
            nearest_checkpoint=(reuse.reused_tokens or None) if self._rolling else None,
            slack_tokens=self._slack,
        )
        gone = self._evicted(served, shared)
        if gone > shared + self._slack:
            known = replace(known, evicted=Evicted(self._policy, gone))
        if not shared and served.reads:
            found = self._under_another_salt(served) if salts else ()
            found = found or served.elsewhere
            if looks and not found and served.prompt.size:
                found = self._elsewhere(served.namespace, served.prompt)
            known = replace(known, namespaces=found)
        return known

    def _evicted(self, served: Served, shared: int) -> int:
        """Return up to which token a prompt would have been served but for evictions."""
        if not self._policy or served.resumed_s is None or not served.reads:
            return 0
        with self._lock:
            gone = self._evictions.snapshot()
        before = [
            Held(each.held, each.ended_s)
            for each in self._before(served)
            if each.keeps and each.namespace == served.namespace
        ]
        return deepest(
            gone,
            served.namespace,
            served.prompt,
            before,
            above=shared + self._slack,
            before_s=served.resumed_s,
        )

    def _under_another_salt(self, served: Served) -> tuple[Difference, ...]:
        other, shared = self._best(served, same=False)
        if other is None or shared < min(_WORTH_TELLING, served.n_prompt):
            return ()
        return (Difference("salt_id", served.namespace.hex()[:8], other.namespace.hex()[:8]),)

    def _best(self, served: Served, *, same: bool) -> tuple[Served | None, int]:
        """Return the request that shares most with a prompt, and how much that is.

        Of those that share as much, it is the one whose prompt ends most alike, then the newest: a
        change near the beginning leaves as little in common with all of them.

        Args:
            served: The request.
            same: Look in its own namespace; else in all others.
        """
        found: list[Served] = []
        most = 1
        for each in self._before(served):
            if (each.namespace == served.namespace) is same:
                shared = common_prefix(each.held, served.prompt)
                if shared > most:
                    found, most = [], shared
                if shared == most:
                    found.append(each)
        if not found:
            return None, 0
        end = np.ascontiguousarray(served.prompt[::-1])

        def ends_alike(each: Served) -> int:
            return common_prefix(np.ascontiguousarray(each.prompt[::-1]), end)

        return max(reversed(found), key=ends_alike), most

    def _before(self, served: Served) -> Iterable[Served]:
        """Return those that ended before it; none if it is forgotten itself."""
        all_of_them = self._snapshot()
        if not any(each is served for each in all_of_them):
            return ()
        return takewhile(lambda each: each is not served, all_of_them)

    def _snapshot(self) -> Sequence[Served]:
        with self._lock:
            return tuple(self._served)


def _compared(
    before: Served | None, served: Served, vocab: Vocab | None, known: Circumstances
) -> Explanation:
    """Compare a request with one before it; by tokens alone if one of the bodies cannot be read."""
    try:
        old = None if before is None else before.side(before.held)
        return explain(old, served.side(served.prompt), vocab=vocab, circumstances=known)
    except InvalidValue as error:
        if served.body is None and (before is None or before.body is None):
            raise
        logger.info("request %d is explained without its body: %s", served.id, error)
    old = None if before is None else Side(before.held, before.text)
    return explain(old, Side(served.prompt, served.text), vocab=vocab, circumstances=known)
