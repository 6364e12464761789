"""Environment variables of llama-server that mean here what they mean there."""

from __future__ import annotations

from collections.abc import Mapping

PREFIX = "LLAMA_ARG_"
_NO = PREFIX + "NO_"
_OFF = "off"

NAMES = {
    "threads": "LLAMA_ARG_THREADS",
    "ctx_size": "LLAMA_ARG_CTX_SIZE",
    "predict": "LLAMA_ARG_N_PREDICT",
    "batch_size": "LLAMA_ARG_BATCH",
    "ubatch_size": "LLAMA_ARG_UBATCH",
    "swa_full": "LLAMA_ARG_SWA_FULL",
    "flash_attn": "LLAMA_ARG_FLASH_ATTN",
    "cache_type_k": "LLAMA_ARG_CACHE_TYPE_K",
    "cache_type_v": "LLAMA_ARG_CACHE_TYPE_V",
    "load_mode": "LLAMA_ARG_LOAD_MODE",
    "gpu_layers": "LLAMA_ARG_N_GPU_LAYERS",
    "model": "LLAMA_ARG_MODEL",
    "temperature": "LLAMA_ARG_TEMPERATURE",
    "top_k": "LLAMA_ARG_TOP_K",
    "top_p": "LLAMA_ARG_TOP_P",
    "min_p": "LLAMA_ARG_MIN_P",
    "repeat_penalty": "LLAMA_ARG_REPEAT_PENALTY",
    "presence_penalty": "LLAMA_ARG_PRESENCE_PENALTY",
    "frequency_penalty": "LLAMA_ARG_FREQUENCY_PENALTY",
    "ctx_checkpoints": "LLAMA_ARG_CTX_CHECKPOINTS",
    "checkpoint_min_step": "LLAMA_ARG_CHECKPOINT_MIN_SPACING_NT",
    "cache_ram_bytes": "LLAMA_ARG_CACHE_RAM",
    "kv_unified": "LLAMA_ARG_KV_UNIFIED",
    "cache_idle_slots": "LLAMA_ARG_CACHE_IDLE_SLOTS",
    "parallel": "LLAMA_ARG_N_PARALLEL",
    "alias": "LLAMA_ARG_ALIAS",
    "tags": "LLAMA_ARG_TAGS",
    "host": "LLAMA_ARG_HOST",
    "port": "LLAMA_ARG_PORT",
    "cors": "LLAMA_ARG_CORS_ORIGINS",
    "api_key": "LLAMA_API_KEY",
    "api_key_file": "LLAMA_ARG_API_KEY_FILE",
    "timeout_s": "LLAMA_ARG_TIMEOUT",
    "ping_s": "LLAMA_ARG_SSE_PING_INTERVAL",
    "cache_prompt": "LLAMA_ARG_CACHE_PROMPT",
    "metrics": "LLAMA_ARG_ENDPOINT_METRICS",
    "slots": "LLAMA_ARG_ENDPOINT_SLOTS",
    "chat_template": "LLAMA_ARG_CHAT_TEMPLATE",
    "chat_template_file": "LLAMA_ARG_CHAT_TEMPLATE_FILE",
    "chat_template_kwargs": "LLAMA_ARG_CHAT_TEMPLATE_KWARGS",
    "prefill_assistant": "LLAMA_ARG_PREFILL_ASSISTANT",
}
"""The variable of each option that has one, by the option's name."""


def read(environment: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return the variable and its text for each option that one stands for.

    `LLAMA_ARG_NO_...`, whatever its value, is off, as in llama-server. Empty ones are not set.
    """
    found = {}
    for option, name in NAMES.items():
        negated = name.replace(PREFIX, _NO)
        if negated != name and negated in environment:
            found[option] = negated, _OFF
        elif environment.get(name):
            found[option] = name, environment[name]
    return found


def unknown(environment: Mapping[str, str]) -> list[str]:
    """Return the variables that llama-server may know and that mean nothing here, in order."""
    known = {*NAMES.values(), *(name.replace(PREFIX, _NO) for name in NAMES.values())}
    return sorted(
        name
        for name, value in environment.items()
        if name.startswith(PREFIX) and value and name not in known
    )
