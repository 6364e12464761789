"""What every endpoint needs: the engine, and what the server was told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llamakeep.engine import Engine
from llamakeep.runtime.base import Vocab
from llamakeep.sampling import Sampling
from llamakeep.server.grammars import Grammars

MIB = 1 << 20
NEVER_S = 1e8
"""As a time to wait: three years."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What the HTTP interface is told. Sizes are bytes, times seconds.

    Attributes:
        model_path: Shown by `/props`.
        aliases: Names of the model, shown by `/v1/models`; none for that of the engine.
        tags: Words that `/v1/models` shows with it.
        adapters: LoRA adapters and their scales, shown by `/lora-adapters`.
        sampling: Defaults of `/completion`.
        openai_sampling: Defaults of the OpenAI endpoints; None for `sampling` with OpenAI's own for
            what OpenAI's API defines.
        cache_prompt: Reuse what is kept, where a request does not say.
        template_values: Values for the chat template, where a request has no others.
        prefill: An answer goes on with a last message of the assistant.
        thinks: Models are to think before they answer, or not to; None for what templates do.
        thoughts_apart: What they think is told apart from the answer.
        n_predict: Tokens to generate where a request does not say; None for no limit.
        api_keys: A request must have one of them; none for no check.
        cors: Origins of pages that may ask; `*` for all.
        hosts: Names under which the server may be asked, beside local ones and addresses; then only
            local pages and those of `cors` may ask. None for no check.
        max_body_bytes: A larger request is refused before it is read.
        max_prompts: Most answers of one request: its prompts times `n`.
        slot_save_path: Where slots are saved; None to refuse it.
        slots: Whether `/slots` shows the slots.
        ping_s: A silent stream gets a comment this often, so that proxies keep it open.
        stall_s: A client that takes nothing for so long is cut off.
        backlog: Updates that wait for a slow client at most; then it is cut off.
        inline_chars: Prompts up to about this length are tokenized in the event loop, longer ones
            in a thread; and so for what is written. 2048 take 1 to 3 ms.
        explain_texts: Keep what clients send, and quote it where a request is explained.
        build: Which build answers, for `system_fingerprint` and `/props`.
    """

    model_path: str = ""
    aliases: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    adapters: tuple[tuple[str, float], ...] = ()
    sampling: Sampling = field(default_factory=Sampling)
    openai_sampling: Sampling | None = None
    cache_prompt: bool = True
    template_values: Mapping[str, Any] = field(default_factory=dict)
    prefill: bool = True
    thinks: bool | None = None
    thoughts_apart: bool = True
    n_predict: int | None = None
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    cors: tuple[str, ...] = ()
    hosts: tuple[str, ...] | None = None
    max_body_bytes: int = 16 * MIB
    max_prompts: int = 128
    slot_save_path: Path | None = None
    slots: bool = True
    ping_s: float = 15.0
    stall_s: float = 60.0
    backlog: int = 8192
    inline_chars: int = 2048
    explain_texts: bool = False
    build: str = "b0-llamakeep"


Exposition = Callable[[], tuple[bytes, str]]
"""Returns the text of `/metrics` and its content type."""


@dataclass(frozen=True, slots=True)
class Context:
    """What every endpoint needs.

    Attributes:
        engine: Answers requests.
        options: What the server was told.
        grammars: Makes grammars of what clients send.
    """

    engine: Engine
    options: ServerOptions
    grammars: Grammars = field(default_factory=Grammars)

    @property
    def vocab(self) -> Vocab:
        """The model's vocabulary."""
        return self.engine.vocab
