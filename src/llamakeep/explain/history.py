"""Requests that an engine or a keeper has answered, by which the newest of them are explained."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Final

from llamakeep.errors import whole_number
from llamakeep.explain.circumstances import Circumstances, Evicted
from llamakeep.explain.explaining import explain
from llamakeep.explain.explanation import Explanation
from llamakeep.explain.prompts import Side
from llamakeep.fingerprint import Difference
from llamakeep.runtime.base import Vocab
from llamakeep.states import Reuse
from llamakeep.tokens import IntArray, common_prefix

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
        body: The request that it was made of, where that is kept.
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
    body: Mapping[str, Any] | None = None

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
        capacity_tokens: Tokens that are held at most: those of the oldest requests go first.
    """

    def __init__(
        self,
        *,
        policy: str = "",
        rolling: bool = False,
        align: int = 1,
        capacity_tokens: int = 1 << 22,
    ) -> None:
        self._policy = policy
        self._rolling = rolling
        self._slack = whole_number("align", align, 1) + _SLACK_TOKENS
        self._capacity = whole_number("capacity_tokens", capacity_tokens, 0)
        self._served: deque[Served] = deque()
        self._n_tokens = 0
        self._lock = threading.Lock()

    def add(self, served: Served) -> None:
        """Note a request."""
        with self._lock:
            self._served.append(served)
            self._n_tokens += int(served.tokens.size)
            while self._served and (
                self._n_tokens > self._capacity or len(self._served) > MOST_REQUESTS
            ):
                self._n_tokens -= int(self._served.popleft().tokens.size)

    def extend(self, tokens: IntArray) -> None:
        """Note what the last request has become: its prompt, and the answer behind it."""
        with self._lock:
            last = self._served[-1] if self._served else None
            if last is None or not last.keeps or tokens.size <= last.tokens.size:
                return
            if common_prefix(last.tokens, tokens) == last.tokens.size:
                self._n_tokens += int(tokens.size - last.tokens.size)
                self._served[-1] = replace(last, tokens=tokens.copy())

    def clear(self) -> None:
        """Forget all of them."""
        with self._lock:
            self._served.clear()
            self._n_tokens = 0

    def find(self, request: int | str | None = None) -> Served | None:
        """Return a request by its number or its label, the newest one first; None if it is gone.

        Args:
            request: Which one; the last if None.
        """
        for served in reversed(self._snapshot()):
            if request is None or request in (served.id, served.label, str(served.id)):
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
        found = explain(
            None if before is None else Side(before.tokens, before.text, before.body),
            Side(served.prompt, served.text, served.body),
            vocab=vocab,
            circumstances=self.circumstances(served, salts=salts),
        )
        return replace(
            found,
            request_id=served.label or str(served.id),
            before_id="" if before is None else before.label or str(before.id),
        )

    def circumstances(self, served: Served, *, salts: bool = False) -> Circumstances:
        """Return what is known of a request beside its text; for `salts` see `explain`."""
        reuse, n_prompt = served.reuse, served.n_prompt
        if reuse is None:
            return Circumstances(prompt_tokens=n_prompt, slack_tokens=self._slack)
        before, seen = self._best(served, same=True)
        shared = max(reuse.shared_tokens, reuse.reused_tokens)
        known = Circumstances.of(
            reuse,
            shared_tokens=shared,
            stored_tokens=None if before is None or seen != shared else int(before.tokens.size),
            rolling=self._rolling,
            nearest_checkpoint=(reuse.reused_tokens or None) if self._rolling else None,
            slack_tokens=self._slack,
        )
        kept = self._kept(served)
        if self._policy and kept > shared + self._slack:
            known = replace(known, evicted=Evicted(self._policy, kept))
        if salts and not shared:
            known = replace(known, namespaces=self._under_another_salt(served))
        return known

    def _kept(self, served: Served) -> int:
        """Return how many tokens of a prompt were kept once: what went before it left them."""
        before = (each for each in self._before(served) if each.keeps)
        found = (
            common_prefix(each.tokens, served.prompt)
            for each in before
            if each.namespace == served.namespace
        )
        return max(found, default=0)

    def _under_another_salt(self, served: Served) -> tuple[Difference, ...]:
        other, shared = self._best(served, same=False)
        if other is None or shared < min(_WORTH_TELLING, served.n_prompt):
            return ()
        return (Difference("salt_id", served.namespace.hex()[:8], other.namespace.hex()[:8]),)

    def _best(self, served: Served, *, same: bool) -> tuple[Served | None, int]:
        """Return the newest of the requests that share most with a prompt, and how much that is.

        Args:
            served: The request.
            same: Look in its own namespace; else in all others.
        """
        best, most = None, 0
        for each in self._before(served):
            if (each.namespace == served.namespace) is same:
                shared = common_prefix(each.tokens, served.prompt)
                if shared >= most and shared:
                    best, most = each, shared
        return best, most

    def _before(self, served: Served) -> Iterable[Served]:
        return takewhile(lambda each: each is not served, self._snapshot())

    def _snapshot(self) -> Sequence[Served]:
        with self._lock:
            return tuple(self._served)
