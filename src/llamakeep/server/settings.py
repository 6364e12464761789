"""What a server is told: one table of options.

`ServerSettings` is the table: each field is one option, with its flags, what it takes, its default
and its help; the command line, the TOML file, the environment and `--help` are read off it. Where
the values come from: see `sources.py`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from llamakeep.errors import InvalidValue, ModelError
from llamakeep.policy import DEFAULT_POLICY, get_policy, policy_names
from llamakeep.server.options import (
    DIRECTORY,
    FILE,
    NO_LIMIT,
    SIZE,
    SWITCH,
    TEXT,
    Kind,
    Option,
    choice,
    many,
    option,
    or_none,
    read_file,
    read_hosts,
    read_keys,
    read_layers,
    read_name,
    read_origin,
    read_ram,
    read_scaled,
    read_text,
    read_unified,
    read_values,
    real,
    whole,
)

MASK = "***"
"""Stands in for a secret wherever settings are shown."""
DEFAULT_RAM_BYTES = 8 << 30
KV_TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")
# What each way to load a model does: map its file, keep it in memory.
_LOAD_MODES = {
    "none": (False, False),
    "mmap": (True, False),
    "mlock": (False, True),
    "mmap+mlock": (True, True),
}
MIN_SLOT_TOKENS = 64
"""A slot with less room cannot even prove that its states can be kept."""

_UNSET = -1
_MOST_SEED = (1 << 32) - 1  # which means a random one, too
_SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "seed",
    "repeat_penalty",
    "repeat_last_n",
    "presence_penalty",
    "frequency_penalty",
    "ignore_eos",
)
_BY_CACHE = {"tree": (32, 512, DEFAULT_POLICY), "prompt": (32, 8192, "upstream")}

# -- the table -------------------------------------------------------------------------------------
MODEL, CONTEXT, CACHE = "Model", "Context and batches", "What is kept"
NETWORK, ANSWERS = "Who may ask, and where", "Requests"


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What a server is told. Each field is an option; its help says what it means.

    None means that nothing was chosen. Sizes are bytes, times are seconds. `repr` shows no secret.
    Paths become absolute: a relative one is meant from the directory that the process is in now.
    """

    model: Path = field(
        default=Path(), metadata=option(MODEL, "-m --model", FILE, "The model: a GGUF file.")
    )
    alias: tuple[str, ...] = field(
        default=(),
        metadata=option(
            MODEL,
            "-a --alias",
            many(read_text, "NAME"),
            "What clients see as the model's name, instead of the file's: of several the first in "
            "the alphabet.",
        ),
    )
    tags: tuple[str, ...] = field(
        default=(),
        metadata=option(
            MODEL, "--tags", many(read_text, "TAG"), "Words that the list of models has with it."
        ),
    )
    gpu_layers: int = field(
        default=-1,
        metadata=option(
            MODEL,
            "-ngl --gpu-layers --n-gpu-layers",
            Kind(read_layers, "N"),
            "Layers on the GPU; -1, auto or all for as many as there are.",
        ),
    )
    mmap: bool = field(
        default=True,
        metadata=option(MODEL, "--mmap/--no-mmap", SWITCH, "Map the file instead of reading it."),
    )
    mlock: bool = field(
        default=False,
        metadata=option(
            MODEL, "--mlock", SWITCH, "Keep the model in memory, where the system allows it."
        ),
    )
    load_mode: str | None = field(
        default=None,
        metadata=option(
            MODEL,
            "-lm --load-mode",
            or_none(choice(*_LOAD_MODES), "auto", ""),
            "The same in one word: none, mmap, mlock or mmap+mlock.",
        ),
    )
    lora: tuple[Path, ...] = field(
        default=(),
        metadata=option(MODEL, "--lora", many(read_file, "FILE", is_path=True), "A LoRA adapter."),
    )
    lora_scaled: tuple[tuple[Path, float], ...] = field(
        default=(),
        metadata=option(
            MODEL,
            "--lora-scaled",
            many(read_scaled, "FILE:SCALE", is_path=True),
            "A LoRA adapter and how strongly it acts.",
        ),
    )
    chat_template: str | None = field(
        default=None,
        metadata=option(
            MODEL,
            "--chat-template",
            or_none(TEXT, ""),
            "A Jinja template, or the name of a built-in one, instead of the model's own.",
        ),
    )
    chat_template_file: Path | None = field(
        default=None, metadata=option(MODEL, "--chat-template-file", FILE, "The same, from a file.")
    )
    chat_template_kwargs: Mapping[str, Any] = field(
        default_factory=dict,
        metadata=option(
            MODEL,
            "--chat-template-kwargs",
            Kind(read_values, "JSON", show=lambda _: ""),
            "Values for the template, where a request has no others.",
        ),
    )
    reasoning: str = field(
        default="auto",
        metadata=option(
            MODEL,
            "-rea --reasoning",
            choice("on", "off", "auto"),
            "Let the model think before it answers, where a request does not say; auto: as its "
            "template does.",
        ),
    )
    reasoning_format: str = field(
        default="auto",
        metadata=option(
            MODEL,
            "--reasoning-format",
            choice("none", "auto", "deepseek"),
            "Where thoughts go: auto and deepseek: into reasoning_content; none: they stay in the "
            "content.",
        ),
    )
    prefill_assistant: bool = field(
        default=True,
        metadata=option(
            MODEL,
            "--prefill-assistant/--no-prefill-assistant",
            SWITCH,
            "Let an answer go on with the last message, if that is the assistant's.",
        ),
    )

    ctx_size: int = field(
        default=0,
        metadata=option(
            CONTEXT,
            "-c --ctx-size",
            whole(0),
            "Tokens that all slots together have room for; 0 for as many as the model knows.",
        ),
    )
    parallel: int = field(
        default=1,
        metadata=option(
            CONTEXT,
            "-np --parallel",
            whole(1, 256),
            "Slots: requests that are answered at the same time.",
        ),
    )
    batch_size: int = field(
        default=2048,
        metadata=option(
            CONTEXT, "-b --batch-size", whole(1), "Most tokens in one call of llama.cpp."
        ),
    )
    ubatch_size: int = field(
        default=512,
        metadata=option(
            CONTEXT, "-ub --ubatch-size", whole(1), "Most tokens in one compute graph."
        ),
    )
    flash_attn: str = field(
        default="on",
        metadata=option(
            CONTEXT, "-fa --flash-attn", choice("on", "off", "auto"), "Flash attention."
        ),
    )
    cache_type_k: str = field(
        default="f16",
        metadata=option(
            CONTEXT,
            "-ctk --cache-type-k",
            choice(*KV_TYPES),
            "Type of the keys: " + ", ".join(KV_TYPES) + ".",
        ),
    )
    cache_type_v: str = field(
        default="f16",
        metadata=option(
            CONTEXT, "-ctv --cache-type-v", choice(*KV_TYPES), "Type of the values, likewise."
        ),
    )
    swa_full: bool = field(
        default=False,
        metadata=option(
            CONTEXT,
            "--swa-full",
            SWITCH,
            "Keep all rows of a sliding window: more memory, and no checkpoints are needed.",
        ),
    )
    threads: int | None = field(
        default=None,
        metadata=option(
            CONTEXT,
            "-t --threads",
            or_none(whole(1, 4096), -1),
            "Threads that generate; -1 for one per physical core.",
        ),
    )
    threads_batch: int | None = field(
        default=None,
        metadata=option(
            CONTEXT,
            "-tb --threads-batch",
            or_none(whole(1, 4096), -1),
            "Threads that read prompts; -1 for as many as generate.",
        ),
    )
    kv_unified: bool = field(
        default=True,
        metadata=option(
            CONTEXT,
            "-kvu/-no-kvu --kv-unified/--no-kv-unified",
            Kind(read_unified, show=lambda _: ""),
            "One buffer for all slots; always on.",
        ),
    )

    cache: str = field(
        default="tree",
        metadata=option(
            CACHE,
            "--cache",
            choice("tree", "prompt", "off"),
            "A tree that all prompts share; whole prompts, as in llama-server; or nothing.",
        ),
    )
    cache_ram_bytes: int | None = field(
        default=None,
        metadata=option(
            CACHE,
            "-cram --cache-ram",
            Kind(read_ram, "MIB"),
            "Memory for it, in MiB or like 8GiB; 0: none; -1: half of what is free. Without: 8192, "
            "or half of what is free if that is less.",
        ),
    )
    cache_dir: Path | None = field(
        default=None,
        metadata=option(
            CACHE, "--cache-dir", DIRECTORY, "Keep it on disk too, so that it survives a restart."
        ),
    )
    disk_bytes: int | None = field(
        default=None,
        metadata=option(
            CACHE, "--disk-bytes", SIZE, "Most bytes there. Without: a quarter of what is free."
        ),
    )
    redis_url: str | None = field(
        default=None,
        repr=False,
        metadata=option(
            CACHE,
            "--redis-url",
            or_none(TEXT, ""),
            "Share it with other machines through this server; needs a secret.",
        ),
    )
    redis_prefix: str | None = field(
        default=None,
        metadata=option(
            CACHE,
            "--redis-prefix",
            or_none(TEXT, ""),
            "Begins all keys there. Without: llamakeep. Only those with the same share.",
        ),
    )
    secret: str | None = field(
        default=None,
        repr=False,
        metadata=option(
            CACHE,
            "--secret",
            or_none(TEXT, ""),
            "Seals what leaves this process. Others can read flags: LLAMAKEEP_SECRET is better.",
        ),
    )
    salt: str = field(
        default="",
        repr=False,
        metadata=option(CACHE, "", TEXT, "Servers with different salts share nothing."),
    )
    allow_unauthenticated: bool = field(
        default=False,
        metadata=option(
            CACHE,
            "--allow-unauthenticated",
            SWITCH,
            "Share without a secret: whoever can write to that server can forge states.",
        ),
    )
    record: Path | None = field(
        default=None,
        metadata=option(
            ANSWERS,
            "--record",
            FILE,
            "Append a line for each request to this file, hashes and figures: llamakeep explain "
            "reads it.",
        ),
    )
    explain_texts: bool = field(
        default=False,
        metadata=option(
            ANSWERS,
            "--explain-texts",
            SWITCH,
            "Keep what clients send, quote it in explanations, and write it into --record.",
        ),
    )
    policy: str = field(
        default="",
        metadata=option(
            CACHE,
            "--policy",
            TEXT,
            f"What goes first: {', '.join(policy_names())}. Without: {DEFAULT_POLICY}; with "
            f"--cache prompt: upstream, and {', '.join(policy_names('prompts'))} are known.",
        ),
    )
    align: int = field(
        default=8,
        metadata=option(
            CACHE,
            "--align",
            whole(1, 4096),
            "Resume at multiples of this, so that rows round as in a cold run; 1: anywhere.",
        ),
    )
    ctx_checkpoints: int = field(
        default=_UNSET,
        metadata=option(
            CACHE,
            "-ctxcp --ctx-checkpoints --swa-checkpoints",
            whole(0),
            "Most checkpoints along one prompt, for models that need them. Without: 32.",
        ),
    )
    checkpoint_min_step: int = field(
        default=_UNSET,
        metadata=option(
            CACHE,
            "-cms --checkpoint-min-step",
            whole(0),
            "Least tokens between those at user messages. Without: 512; with --cache prompt: 8192.",
        ),
    )
    cache_idle_slots: bool = field(
        default=True,
        metadata=option(
            CACHE,
            "--cache-idle-slots/--no-cache-idle-slots",
            SWITCH,
            "Clear idle slots, which slow the others down; they are kept before.",
        ),
    )
    cache_prompt: bool = field(
        default=True,
        metadata=option(
            CACHE,
            "--cache-prompt/--no-cache-prompt",
            SWITCH,
            "Reuse what is kept, where a request does not say.",
        ),
    )
    slot_prompt_similarity: float = field(
        default=0.1,
        metadata=option(
            CACHE,
            "-sps --slot-prompt-similarity",
            real(0, 1),
            "Share of a prompt that an idle slot must hold to be chosen for that.",
        ),
    )
    slot_save_path: Path | None = field(
        default=None,
        metadata=option(
            CACHE,
            "--slot-save-path",
            DIRECTORY,
            "Where /slots/{id}?action=save writes files. Without: it does not.",
        ),
    )

    host: tuple[str, ...] = field(
        default=("127.0.0.1",),
        metadata=option(
            NETWORK,
            "--host",
            Kind(read_hosts, "HOST", show=", ".join),
            "The address to listen on; several with commas between them.",
        ),
    )
    port: int = field(
        default=8080,
        metadata=option(
            NETWORK, "--port", whole(0, 65535, "PORT"), "The port; 0 for any that is free."
        ),
    )
    api_key: tuple[str, ...] = field(
        default=(),
        repr=False,
        metadata=option(
            NETWORK,
            "--api-key",
            Kind(read_keys, "KEY", repeatable=True),
            "Only who has this key may ask. Others can read flags: --api-key-file is better.",
        ),
    )
    api_key_file: Path | None = field(
        default=None,
        metadata=option(NETWORK, "--api-key-file", FILE, "A file with keys, one a line."),
    )
    cors: tuple[str, ...] = field(
        default=(),
        metadata=option(
            NETWORK,
            "--cors --cors-origins",
            many(read_origin, "ORIGIN"),
            "Pages of this origin may ask from a browser; * for all, localhost for those of this "
            "machine.",
        ),
    )
    allowed_hosts: tuple[str, ...] = field(
        default=(),
        metadata=option(
            NETWORK,
            "--allowed-hosts",
            many(read_name, "HOST"),
            "A name under which the server is asked, as by a proxy; * for any. Without: local "
            "names only, if only this machine can reach it and there are no keys.",
        ),
    )
    metrics: bool = field(
        default=True,
        metadata=option(
            NETWORK, "--metrics/--no-metrics", SWITCH, "Answer /metrics, for Prometheus."
        ),
    )
    slots: bool = field(
        default=True, metadata=option(NETWORK, "--slots/--no-slots", SWITCH, "Answer /slots.")
    )

    predict: int | None = field(
        default=None,
        metadata=option(
            ANSWERS,
            "-n --predict --n-predict",
            or_none(whole(0), -1),
            "Most tokens of an answer whose request has no limit; -1 for no limit.",
        ),
    )
    temperature: float | None = field(
        default=None,
        metadata=option(
            ANSWERS,
            "--temp --temperature",
            or_none(real(-100, 100), ""),
            "Of requests that do not say; so the next ten. Without: 0.8, and 1 in OpenAI's API.",
        ),
    )
    top_k: int | None = field(
        default=None,
        metadata=option(ANSWERS, "--top-k", or_none(whole(-1), ""), "Without: 40."),
    )
    top_p: float | None = field(
        default=None,
        metadata=option(
            ANSWERS, "--top-p", or_none(real(0, 1), ""), "Without: 0.95, and 1 in OpenAI's API."
        ),
    )
    min_p: float | None = field(
        default=None,
        metadata=option(ANSWERS, "--min-p", or_none(real(0, 1), ""), "Without: 0.05."),
    )
    typical_p: float | None = field(
        default=None,
        metadata=option(
            ANSWERS,
            "--typical --typical-p",
            or_none(real(0, 1), ""),
            "Without: 1, which is off.",
        ),
    )
    seed: int | None = field(
        default=None,
        metadata=option(
            ANSWERS,
            "-s --seed",
            or_none(whole(-1, _MOST_SEED), -1, _MOST_SEED),
            "Without, or -1: another one each time.",
        ),
    )
    repeat_penalty: float | None = field(
        default=None,
        metadata=option(
            ANSWERS, "--repeat-penalty", or_none(real(0.001, 100), ""), "Without: 1, which is off."
        ),
    )
    repeat_last_n: int | None = field(
        default=None,
        metadata=option(
            ANSWERS,
            "--repeat-last-n",
            or_none(whole(-1), ""),
            "Tokens that penalties look at; -1 for the whole context. Without: 64.",
        ),
    )
    presence_penalty: float | None = field(
        default=None,
        metadata=option(
            ANSWERS,
            "--presence-penalty",
            or_none(real(-100, 100), ""),
            "Without: 0, which is off.",
        ),
    )
    frequency_penalty: float | None = field(
        default=None,
        metadata=option(
            ANSWERS,
            "--frequency-penalty",
            or_none(real(-100, 100), ""),
            "Without: 0, which is off.",
        ),
    )
    ignore_eos: bool = field(
        default=False,
        metadata=option(ANSWERS, "--ignore-eos", SWITCH, "The model may not end an answer."),
    )
    queue: int = field(
        default=256,
        metadata=option(
            ANSWERS,
            "--queue",
            whole(0, 1 << 20),
            "Most requests that wait for a slot; others get 503.",
        ),
    )
    max_body_bytes: int = field(
        default=16 << 20, metadata=option(ANSWERS, "--max-body", SIZE, "Largest request.")
    )
    timeout_s: float = field(
        default=60.0,
        metadata=option(
            ANSWERS,
            "-to --timeout",
            real(1, 1e9, "SECONDS"),
            "How long a client may take nothing of an answer that is there before it is cut off.",
        ),
    )
    ping_s: float | None = field(
        default=15.0,
        metadata=option(
            ANSWERS,
            "--sse-ping-interval",
            or_none(real(1, 1e6, "SECONDS"), -1, ""),
            "A stream that says nothing for so long has a comment; -1 for none.",
        ),
    )
    drain_s: float = field(
        default=10.0,
        metadata=option(
            ANSWERS,
            "--drain",
            real(0, 1e6, "SECONDS"),
            "How long running answers may go on when the server is told to end.",
        ),
    )

    sources: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    """Where each value that is no default came from, as messages name it: `--port`."""
    notices: tuple[str, ...] = field(default=(), repr=False, compare=False)
    """What is to be said of what was given, a line each: nothing of it is wrong."""

    def __post_init__(self) -> None:
        for option_ in OPTIONS:
            if option_.kind.is_path:
                path = beside(Path.cwd(), getattr(self, option_.name))
                object.__setattr__(self, option_.name, path)
        for name, value in zip(
            ("ctx_checkpoints", "checkpoint_min_step", "policy"),
            _BY_CACHE.get(self.cache, _BY_CACHE["tree"]),
            strict=True,
        ):
            if getattr(self, name) in (_UNSET, ""):
                object.__setattr__(self, name, value)
        try:
            get_policy(self.policy, "prompts" if self.cache == "prompt" else "tree")
        except InvalidValue as error:
            raise InvalidValue(f"{self.where('policy')}: {error}") from None
        if len(self.host) > 1 and not self.port:
            raise InvalidValue(f"{self.where('port')}: several addresses need a port that is named")
        if 0 < self.ctx_size < self.parallel * MIN_SLOT_TOKENS:
            slots = "one slot" if self.parallel == 1 else f"{self.parallel} slots"
            raise InvalidValue(
                f"{self.where('ctx_size')}: a context of {self.ctx_size} tokens is too small for "
                f"{slots}: {self.parallel * MIN_SLOT_TOKENS} is the least"
            )

    def where(self, name: str) -> str:
        """Return what messages call an option: where its value came from."""
        return self.sources.get(name) or BY_NAME[name].flag

    def masked(self) -> dict[str, Any]:
        """Return every value by its name, JSON-ready, with `***` for secrets."""
        shown = {each.name: _jsonable(getattr(self, each.name)) for each in OPTIONS}
        return {n: MASK if BY_NAME[n].is_secret and value else value for n, value in shown.items()}

    @property
    def adapters(self) -> tuple[tuple[Path, float], ...]:
        """LoRA adapters and their scales."""
        return (*((path, 1.0) for path in self.lora), *self.lora_scaled)

    @property
    def aliases(self) -> tuple[str, ...]:
        """The model's names, the one that clients see first."""
        return tuple(sorted(set(self.alias))) or (self.model.stem,)

    @property
    def sampling(self) -> dict[str, Any]:
        """What was chosen for requests that do not say, by the names of `Sampling`."""
        chosen = {name: getattr(self, name) for name in _SAMPLING}
        return {
            name: value
            for name, value in chosen.items()
            if value is not None and value is not False  # 0 is a choice
        }

    @property
    def use_mmap(self) -> bool:
        """Whether the model's file is mapped."""
        return self.mmap if self.load_mode is None else _LOAD_MODES[self.load_mode][0]

    @property
    def use_mlock(self) -> bool:
        """Whether the model is kept in memory."""
        return self.mlock if self.load_mode is None else _LOAD_MODES[self.load_mode][1]

    def capacity_bytes(self, available_bytes: int) -> int:
        """Return how many bytes of states may be in memory.

        Args:
            available_bytes: Memory that is free now; without a number of the user's own, no more
                than half of it is taken, as `NO_LIMIT_SHARE` of the prompt cache says.
        """
        from llamakeep.prompt_cache import NO_LIMIT_SHARE

        share = int(available_bytes * NO_LIMIT_SHARE)
        if self.cache == "off":
            return 0
        if self.cache_ram_bytes is None:
            return min(DEFAULT_RAM_BYTES, share)
        return share if self.cache_ram_bytes == NO_LIMIT else self.cache_ram_bytes

    def read_api_keys(self) -> tuple[str, ...]:
        """Return the keys that may ask, those of the file included. None: everybody may.

        Raises:
            InvalidValue: For a file that cannot be read, or has no key.
        """
        if self.api_key_file is None:
            return self.api_key
        lines = map(str.strip, self._read("api_key_file", self.api_key_file).splitlines())
        keys = tuple(line for line in lines if line and not line.startswith("#"))
        if not keys:
            raise InvalidValue(f"{self.where('api_key_file')}: no key is in {self.api_key_file}")
        return (*self.api_key, *keys)

    def read_chat_template(self) -> str | None:
        """Return the template that takes the place of the model's own, if there is one.

        Raises:
            InvalidValue: For a file that cannot be read.
        """
        if self.chat_template_file is None:
            return self.chat_template
        return self._read("chat_template_file", self.chat_template_file)

    def check_files(self) -> None:
        """Raise if something is missing that a value names. Reads no model.

        Raises:
            ModelError: For the model or an adapter.
            InvalidValue: For anything else, with the option that named it.
        """
        for name, path in (
            ("model", self.model),
            *(("lora", path) for path in self.lora),
            *(("lora_scaled", path) for path, _ in self.lora_scaled),
        ):
            if not path.is_file():
                what = "is no file" if path.exists() else "does not exist"
                raise ModelError(f"{self.where(name)}: {path} {what}")
        self.read_api_keys()
        self.read_chat_template()
        slots = self.slot_save_path
        if slots is not None and not (slots.is_dir() and os.access(slots, os.W_OK | os.X_OK)):
            wrong = "cannot be written to" if slots.is_dir() else "is no directory"
            raise InvalidValue(f"{self.where('slot_save_path')}: {slots} {wrong}")

    def _read(self, name: str, path: Path) -> str:
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise InvalidValue(f"{self.where(name)}: {path} is not UTF-8") from None
        except OSError as error:
            raise InvalidValue(
                f"{self.where(name)}: cannot read {path}: {error.strerror or error}"
            ) from error


def beside(directory: Path, value: Any) -> Any:
    """Return a path, or what has paths in it, with relative ones meant from a directory."""
    if isinstance(value, tuple):
        return tuple(beside(directory, item) for item in value)
    return directory / value if isinstance(value, Path) else value


def _jsonable(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_jsonable(item) for item in value]
    return str(value) if isinstance(value, Path) else value


OPTIONS: tuple[Option, ...] = tuple(
    Option(each.name, default=each.default, is_secret=not each.repr, **each.metadata)
    for each in fields(ServerSettings)
    if each.metadata
)
"""The table, in the order of help."""
BY_NAME = {each.name: each for each in OPTIONS}
