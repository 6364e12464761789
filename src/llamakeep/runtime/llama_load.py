"""Models and contexts of llama.cpp: how they are made, and what of their settings counts."""

from __future__ import annotations

import ctypes
import logging
import os
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import llama_cpp
import psutil

from llamakeep.errors import InvalidValue, ModelError
from llamakeep.runtime.base import Family

KV_TYPES: Final[dict[str, int]] = {
    "f32": 0,
    "f16": 1,
    "bf16": 30,
    "q8_0": 8,
    "q4_0": 2,
    "q4_1": 3,
    "iq4_nl": 20,
    "q5_0": 6,
    "q5_1": 7,
}
"""The types that keys and values can have, by llama-server's names."""

FlashAttention: TypeAlias = bool | Literal["auto", "on", "off"]

_FLASH: Final = {
    "auto": llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO,
    "on": llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED,
    "off": llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED,
}
_ALL_LAYERS: Final = 0x7FFFFFFF
_LOG_LEVELS: Final = {  # of ggml's GGML_LOG_LEVEL_*
    0: logging.DEBUG,
    1: logging.DEBUG,
    2: logging.DEBUG,
    3: logging.WARNING,
    4: logging.ERROR,
}
_COMPUTED_BY: Final = (
    "rope_scaling_type",
    "rope_freq_base",
    "rope_freq_scale",
    "yarn_ext_factor",
    "yarn_attn_factor",
    "yarn_beta_fast",
    "yarn_beta_slow",
    "yarn_orig_ctx",
    "attention_type",
    "ctx_type",
    "flash_attn_type",
    "type_k",
    "type_v",
    "kv_unified",
)
_YARN: Final = {"yarn_attn_factor": 1.0, "yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0}
"""What llama.cpp takes where neither context nor model say otherwise (`llama_hparams`)."""
_YARN_OF_ITS_OWN: Final = ("grok",)
"""Architectures that say otherwise in llama.cpp's code, not in the file."""


@dataclass(frozen=True)
class MadeWith:
    """The parameters that a model and its context were made with.

    Attributes:
        context_params: The native ones.
        model_params: The native ones.
        overrides: Metadata of the file that were replaced.
    """

    context_params: Any
    model_params: Any
    overrides: Mapping[str, Any] = field(default_factory=dict)


def usable_cores() -> int:
    """Return the physical cores, or the processors this process may use if those are fewer.

    llama.cpp's threads wait for each other by spinning: more of them than cores cost time.
    """
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(psutil.cpu_count(logical=False) or usable or 1, usable or 1)


def check_gguf(path: str | Path, what: str = "model") -> None:
    """Check that a file exists and begins like a GGUF file.

    Raises:
        ModelError: With the path and what is wrong.
    """
    try:
        with open(path, "rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelError(f"cannot read the {what} {path}: {error.strerror or error}") from error
    if magic != b"GGUF":
        raise ModelError(f"{path} is not a GGUF file (it begins with {magic!r})")


def kv_type(name: str, value: int | str | None) -> int | None:
    """Return the number of a type of keys or values, which is given by name or number.

    Raises:
        InvalidValue: For another one than those in `KV_TYPES`: llama.cpp may end the process.
    """
    if value is None:
        return None
    number = KV_TYPES.get(value.lower()) if isinstance(value, str) else value
    if number not in KV_TYPES.values():
        raise InvalidValue(f"{name} must be one of {', '.join(KV_TYPES)}, not {value!r}")
    return number


def flash_type(flash_attn: FlashAttention) -> int:
    """Return llama.cpp's number for whether to use flash attention.

    Raises:
        InvalidValue: For what is no such setting.
    """
    if isinstance(flash_attn, bool):
        flash_attn = "on" if flash_attn else "off"
    if flash_attn not in _FLASH:
        raise InvalidValue(f"flash_attn must be auto, on or off, not {flash_attn!r}")
    return int(_FLASH[flash_attn])


class _NativeLog:
    """Hands what llama.cpp logs, whole lines of it, to a logger. Called from any thread.

    A thread's lines are its own: one that is not complete does not go on with another's.
    """

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._of_thread = threading.local()
        self.callback = llama_cpp.llama_log_callback(self._hear)

    def _hear(self, level: int, text: bytes | None, _user_data: Any) -> None:
        try:
            mine = self._of_thread
            if level in _LOG_LEVELS:  # else it goes on with the line before
                mine.level = _LOG_LEVELS[level]
            begun = getattr(mine, "line", "") + (text or b"").decode("utf-8", "replace")
            *lines, mine.line = begun.split("\n")
            for line in filter(str.strip, lines):
                self._logger.log(getattr(mine, "level", logging.DEBUG), "%s", line.strip())
        except Exception:  # nobody above could catch it
            logging.getLogger("llamakeep").exception("a line of llama.cpp was lost")


def route_log(logger: logging.Logger) -> None:
    """Let llama.cpp log to a logger instead of standard error. Of the whole process.

    What it says of a model while loading, which is much, is on level DEBUG.
    """
    global _native_log
    _native_log = _NativeLog(logger)
    llama_cpp.llama_log_set(_native_log.callback, ctypes.c_void_p(0))


_native_log: _NativeLog | None = None  # llama.cpp calls it as long as the process lives


def model_params(*, n_gpu_layers: int = 0, use_mmap: bool = True, use_mlock: bool = False) -> Any:
    """Return parameters to load a model; see `LlamaCppRuntime.load`."""
    params = llama_cpp.llama_model_default_params()
    params.n_gpu_layers = _ALL_LAYERS if n_gpu_layers == -1 else n_gpu_layers
    if not hasattr(params, "load_mode"):  # in other builds
        params.use_mmap, params.use_mlock = use_mmap, use_mlock
    elif use_mlock:
        params.load_mode = (
            llama_cpp.LLAMA_LOAD_MODE_MMAP_MLOCK if use_mmap else llama_cpp.LLAMA_LOAD_MODE_MLOCK
        )
    elif not use_mmap:
        params.load_mode = llama_cpp.LLAMA_LOAD_MODE_NONE
    return params


def load_model(
    path: str | Path,
    params: Any,
    *,
    on_progress: Callable[[float], None] | None = None,
    verbose: bool = False,
    what: str = "",
) -> Any:
    """Load a model file, and return the native model, which the caller frees.

    Args:
        path: A GGUF file.
        params: Native parameters; `on_progress` is put in.
        on_progress: Called with 0 to 1; what it raises ends the loading and is raised here.
        verbose: Let llama.cpp log to standard error.
        what: What of the file is loaded, for messages.

    Raises:
        ModelError: For a file that is missing or cannot be loaded, with its path.
    """
    check_gguf(path)
    logging.getLogger("llama-cpp-python").setLevel(logging.DEBUG if verbose else logging.ERROR)
    llama_cpp.llama_backend_init()
    raised: list[BaseException] = []

    def report(progress: float, _: object) -> bool:
        try:
            if on_progress is not None and not raised:
                on_progress(float(progress))
        except BaseException as error:  # noqa: BLE001 - raised again where Python can see it
            raised.append(error)
        return not raised

    callback = llama_cpp.llama_progress_callback(report)  # kept alive until all is loaded
    if on_progress is not None:
        params.progress_callback = callback
    try:
        model = llama_cpp.llama_model_load_from_file(os.fsencode(path), params)
    finally:
        params.progress_callback = llama_cpp.llama_progress_callback()
    if raised:
        if model is not None:
            llama_cpp.llama_model_free(model)
        raise raised[0]
    if model is None:
        raise ModelError(f"llama.cpp could not load {what}{path}")
    return model


class OwnContext:
    """A context of our own, closed the way llama-cpp-python's `LlamaContext` is.

    Args:
        model: The native model.
        params: Native parameters.

    Raises:
        ModelError: When llama.cpp refuses, with the parameters that are often why.
    """

    def __init__(self, model: Any, params: Any) -> None:
        self.ctx = llama_cpp.llama_init_from_model(model, params)
        if self.ctx is None:
            kinds = {number: name for name, number in KV_TYPES.items()}
            flash = {number: name for name, number in _FLASH.items()}
            said = {
                "n_ctx": params.n_ctx,
                "n_seqs": params.n_seq_max - 1,
                "type_k": kinds.get(params.type_k),
                "type_v": kinds.get(params.type_v),
                "flash_attn": flash.get(params.flash_attn_type),
            }
            settings = ", ".join(f"{name}={value}" for name, value in said.items())
            raise ModelError(
                f"llama.cpp could not make a context ({settings}): "
                "not enough memory, or settings that the model cannot have together"
            )

    def close(self) -> None:
        """Free it. Calling it again does nothing."""
        if self.ctx is not None:
            llama_cpp.llama_free(self.ctx)
            self.ctx = None


def computed_settings(
    made: MadeWith, model: Any, ctx: Any, metadata: Mapping[str, str], *, rope_factors: bool
) -> dict[str, Any]:
    """Return the settings that change what is computed, as they take effect.

    What llama.cpp can be asked about is what it says, so that a default and the same value set
    by hand are equal, and so are settings without effect here. A default that llama.cpp takes
    from the model without telling (as `rope_freq_base=0`) stays as it is: at worst a miss.

    Where the work is done counts (layers on the GPU, attention with them or not): other
    devices have kernels of other precision. How much work is done at a time, or by how many
    equal devices, does not.

    Args:
        made: What model and context were made with.
        model: The native model.
        ctx: The native context.
        metadata: What the model's file says about itself.
        rope_factors: The file has rope factors that llama.cpp chooses by the size of the
            context, see `inspect_file`; True if unknown.
    """
    params = made.context_params
    settings = {name: getattr(params, name) for name in _COMPUTED_BY if hasattr(params, name)}
    arch = metadata.get("general.architecture", "")
    for name in ("yarn_ext_factor", *_YARN):
        settings[name] = max(-1.0, settings[name])  # below 0: the model's
    known = metadata.keys() | made.overrides.keys()
    if arch not in _YARN_OF_ITS_OWN and not any("rope.scaling.yarn_" in key for key in known):
        for name, value in _YARN.items():
            settings[name] = value if settings[name] < 0 else settings[name]
    if settings["rope_scaling_type"] == llama_cpp.LLAMA_ROPE_SCALING_TYPE_NONE:
        settings["rope_freq_scale"] = 1.0
    elif not settings["rope_freq_scale"]:
        trained = llama_cpp.llama_model_rope_freq_scale_train(model)
        settings["rope_freq_scale"] = float(trained)
    offloads = bool(llama_cpp.llama_supports_gpu_offload())
    all_layers = int(llama_cpp.llama_model_n_layer(model)) + 1
    wanted = int(made.model_params.n_gpu_layers) if offloads else 0
    layers = min(wanted, all_layers) if wanted >= 0 else all_layers
    has_window = int(llama_cpp.llama_model_n_swa(model)) > 0
    n_ctx = int(llama_cpp.llama_n_ctx_seq(ctx))
    return settings | {
        "kv_overrides": dict(made.overrides),
        "long_rope": rope_factors and _is_long(n_ctx, arch, metadata, made.overrides),
        "n_gpu_layers": layers,
        "offload_kqv": bool(params.offload_kqv) and layers > 0,
        "op_offload": bool(params.op_offload) and offloads,
        "swa_full": bool(params.swa_full) and has_window,
    }


def _is_long(
    n_ctx: int, arch: str, metadata: Mapping[str, str], overrides: Mapping[str, Any]
) -> bool | int:
    """Whether llama.cpp takes the long rope factors: the context exceeds the original one.

    As `llama_model::get_rope_factors` decides it. Where the original size is not known, returns the
    context's: then contexts of one size are alike.
    """
    for name in ("rope.scaling.original_context_length", "context_length"):
        original = overrides.get(f"{arch}.{name}", metadata.get(f"{arch}.{name}"))
        if original is not None:
            return n_ctx > int(original)
    return n_ctx


def model_facts(model: Any) -> dict[str, Any]:
    """Return what a model is, by llama-server's names: JSON-ready.

    Args:
        model: The native model.
    """
    vocab = llama_cpp.llama_model_get_vocab(model)
    ftype = llama_cpp.llama_ftype_name(llama_cpp.llama_model_ftype(model))
    return {
        "vocab_type": int(llama_cpp.llama_vocab_type(vocab)),
        "n_ctx_train": int(llama_cpp.llama_model_n_ctx_train(model)),
        "n_embd": int(llama_cpp.llama_model_n_embd(model)),
        "n_params": int(llama_cpp.llama_model_n_params(model)),
        "size": int(llama_cpp.llama_model_size(model)),
        "ftype": (ftype or b"").decode("utf-8", "replace"),
    }


def build_facts() -> dict[str, Any]:
    """Return what computes: versions of the package, of llama.cpp and its states, backends."""
    backends = ["CPU"]
    if llama_cpp.llama_supports_gpu_offload():
        known = llama_cpp.llama_print_system_info().decode("utf-8", "replace")
        backends = sorted(set(re.findall(r"(\w+) : ", known)))
    facts = {
        "llama_cpp_python": str(llama_cpp.__version__),
        "state_seq_version": int(llama_cpp.LLAMA_STATE_SEQ_VERSION),
        "session_version": int(llama_cpp.LLAMA_SESSION_VERSION),
        "backends": " ".join(backends),
    }
    if hasattr(llama_cpp, "llama_version"):  # not in every build
        facts["llama_cpp"] = llama_cpp.llama_version().decode("utf-8", "replace")
    return facts


def family_of(model: Any) -> Family:
    """Return the memory family of a native model."""
    window = int(llama_cpp.llama_model_n_swa(model)) > 0
    if llama_cpp.llama_model_is_hybrid(model):
        return Family.HYBRID_SWA if window else Family.HYBRID
    if llama_cpp.llama_model_is_recurrent(model):
        return Family.RECURRENT
    return Family.SWA if window else Family.ATTENTION
