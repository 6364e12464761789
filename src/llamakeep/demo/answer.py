"""Answering: how a copy of the model is loaded, kept, asked and timed, in either process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from llamakeep.demo.story import Message
from llamakeep.errors import LlamakeepError, ModelError
from llamakeep.keeper import Keeper, attach
from llamakeep.states import Reuse
from llamakeep.tokens import IntArray

N_CTX = 4096


@dataclass(frozen=True, slots=True)
class Settings:
    """What all copies have in common: JSON-ready.

    Attributes:
        model: Path of a GGUF file.
        n_threads: For each copy; they never run at the same time.
        max_tokens: Longest answer.
        cache_dir: Directory of the disk tier.
        disk_bytes: Limit on its bytes.
        n_ctx: Tokens that a context holds.
    """

    model: str
    n_threads: int
    max_tokens: int
    cache_dir: str
    disk_bytes: int
    n_ctx: int = N_CTX

    def load(self) -> Any:
        """Load a copy.

        Raises:
            ModelError: When the file cannot be loaded.
        """
        from llamakeep.runtime.llama_borrowed import load_llama

        n_threads = self.n_threads
        return load_llama(
            self.model, n_ctx=self.n_ctx, n_threads=n_threads, n_threads_batch=n_threads
        )

    def attach(self, llm: Any) -> Keeper:
        """Give a copy a keeper with these tiers, whatever tiers the user's environment asks for.

        Raises:
            ModelError: For a model whose states cannot be kept.
            StoreError: For a directory that cannot be used.
        """
        return attach(
            llm,
            cache_dir=self.cache_dir,
            disk_bytes=self.disk_bytes,
            redis_url="",
            redis_prefix="",
            secret="",
            salt="",
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer. `tokens` are all in the context afterwards: prompt and answer but its last."""

    text: str
    first_ms: float
    total_ms: float
    tokens: IntArray


def ask(
    llm: Any,
    messages: list[Message],
    max_tokens: int,
    on_first: Callable[[], None] | None = None,
) -> Answer:
    """Put one request to a copy and time the answer.

    Args:
        llm: The copy.
        messages: The chat.
        max_tokens: Longest answer.
        on_first: Called when the first chunk is there.

    Raises:
        ModelError: For a template or a tokenizer that the chats do not suit.
    """
    begin = time.perf_counter()
    first_ms, texts = 0.0, []
    try:
        for chunk in llm.create_chat_completion(
            messages=messages, max_tokens=max_tokens, temperature=0.0, stream=True
        ):
            if not first_ms:
                first_ms = (time.perf_counter() - begin) * 1e3
                if on_first is not None:
                    on_first()
            texts.append(chunk["choices"][0]["delta"].get("content") or "")
    except LlamakeepError:
        raise
    except Exception as error:
        raise ModelError(f"{llm.model_path} cannot take the demo's chats: {error}") from error
    total_ms = (time.perf_counter() - begin) * 1e3
    tokens = llm.input_ids[: llm.n_tokens].astype(np.int32)
    return Answer("".join(texts), first_ms, total_ms, tokens)


def served(keeper: Keeper) -> Reuse:
    """Return how the last request was served.

    Raises:
        LlamakeepError: When the keeper has seen none.
    """
    if keeper.last is None:
        raise LlamakeepError("the keeper did not see the request")
    return keeper.last
