"""Tiny random-weight GGUF models, one for each memory family of llama.cpp.

They answer nonsense, but deterministically, and they run through the same code in
llama.cpp as real models: each has the memory layout of its family. Prefill runs at about
10,000 tokens a second on one core. Weights are F32, so logits differ by less than 1e-3
between batch shapes, while a wrong row or state moves them by 0.2 and more. Look for that
within a few tokens of the restore: recurrent states forget, and 16 tokens on the same
fault may show as 0.02. A sliding window forgets for good what has left it.

The tokenizer is borrowed from a donor, any GGUF file with a byte-level BPE vocabulary
(SmolLM2's in the tests), and cut to its first entries: a BPE vocabulary lists each merged
token after its parts, so a leading part of it is a vocabulary of its own. That shrinks the
embedding matrix, which otherwise is nine tenths of such a model.

    python -m tests.tiny_models OUTDIR DONOR.gguf
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGUFReader, GGUFValueType, GGUFWriter

Array = npt.NDArray[np.float32]

N_EMBD = 128
N_FF = 256
N_HEAD = 4
N_HEAD_KV = 2
HEAD_DIM = N_EMBD // N_HEAD
N_CTX_TRAIN = 32_768
N_VOCAB = 4_096
WINDOW = 64
"""Tokens that a sliding-window layer sees; a test crosses it in a fraction of a second."""

GEMMA3_PERIOD = 6
"""llama.cpp takes every sixth layer of a gemma3 model as a dense one."""


@dataclass(frozen=True)
class Tokenizer:
    """Tokenizer metadata of a GGUF file: key, value, type and, for arrays, element type."""

    fields: tuple[tuple[str, Any, GGUFValueType, GGUFValueType | None], ...]
    n_vocab: int

    @classmethod
    def from_gguf(cls, donor: Path, n_vocab: int = N_VOCAB) -> Tokenizer:
        """Read the tokenizer of `donor` and keep its first `n_vocab` tokens.

        Merges are kept whose two parts and result are all kept, in their order.

        Args:
            donor: A GGUF file with a byte-level BPE vocabulary.
            n_vocab: Tokens to keep; more than the donor has keeps them all.

        Raises:
            ValueError: A special token of the donor lies beyond the cut.
        """
        values: dict[str, tuple[Any, GGUFValueType, GGUFValueType | None]] = {}
        for key, field in GGUFReader(donor).fields.items():
            if key.startswith("tokenizer."):
                element_type = field.types[1] if len(field.types) > 1 else None
                values[key] = (field.contents(), field.types[0], element_type)

        tokens: list[str] = values["tokenizer.ggml.tokens"][0][:n_vocab]
        kept = set(tokens)
        for key, (value, value_type, element_type) in values.items():
            if key == "tokenizer.ggml.merges":
                pairs = (merge.split(" ") for merge in value)
                value = [
                    f"{left} {right}"
                    for left, right in pairs
                    if left in kept and right in kept and left + right in kept
                ]
            elif value_type is GGUFValueType.ARRAY:
                value = value[: len(tokens)]
            elif key.endswith("_token_id") and value >= len(tokens):
                raise ValueError(f"{key} is {value}, but only {len(tokens)} tokens are kept")
            values[key] = (value, value_type, element_type)
        return cls(tuple((key, *value) for key, value in values.items()), len(tokens))

    def write(self, writer: GGUFWriter) -> None:
        """Add this tokenizer's metadata to `writer`."""
        for key, value, value_type, element_type in self.fields:
            writer.add_key_value(key, value, value_type, element_type)


class _Weights:
    """Adds random tensors to a writer, scaled so that activations keep their size."""

    def __init__(self, writer: GGUFWriter, seed: int) -> None:
        self._writer = writer
        self._rng = np.random.default_rng(seed)

    def add(self, name: str, values: Array) -> None:
        self._writer.add_tensor(name, values)

    def random(self, name: str, *shape: int) -> None:
        values = self._rng.standard_normal(shape, dtype=np.float32)
        self.add(name, values / np.float32(np.sqrt(shape[-1])))

    def ones(self, name: str, n: int) -> None:
        self.add(name, np.ones(n, np.float32))

    def uniform(self, name: str, n: int, low: float) -> None:
        self.add(name, (self._rng.random(n) + low).astype(np.float32))


@contextmanager
def _gguf_file(path: Path, arch: str) -> Iterator[GGUFWriter]:
    """A writer whose file appears at `path` whole, or not at all."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    writer = GGUFWriter(partial, arch)
    try:
        yield writer
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _model(
    path: Path, arch: str, tokenizer: Tokenizer, n_layer: int, seed: int
) -> Iterator[tuple[GGUFWriter, _Weights]]:
    """What every model has: sizes, the tokenizer, and embeddings that serve as output too."""
    with _gguf_file(path, arch) as writer:
        writer.add_context_length(N_CTX_TRAIN)
        writer.add_embedding_length(N_EMBD)
        writer.add_block_count(n_layer)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_vocab_size(tokenizer.n_vocab)
        tokenizer.write(writer)
        weights = _Weights(writer, seed)
        weights.random("token_embd.weight", tokenizer.n_vocab, N_EMBD)
        yield writer, weights


def _attention(weights: _Weights, block: str, *, qk_norm: bool) -> None:
    weights.random(f"{block}.attn_q.weight", N_EMBD, N_EMBD)
    weights.random(f"{block}.attn_k.weight", N_HEAD_KV * HEAD_DIM, N_EMBD)
    weights.random(f"{block}.attn_v.weight", N_HEAD_KV * HEAD_DIM, N_EMBD)
    weights.random(f"{block}.attn_output.weight", N_EMBD, N_EMBD)
    if qk_norm:
        weights.ones(f"{block}.attn_q_norm.weight", HEAD_DIM)
        weights.ones(f"{block}.attn_k_norm.weight", HEAD_DIM)


def _feed_forward(weights: _Weights, block: str) -> None:
    weights.ones(f"{block}.ffn_norm.weight", N_EMBD)
    weights.random(f"{block}.ffn_gate.weight", N_FF, N_EMBD)
    weights.random(f"{block}.ffn_up.weight", N_FF, N_EMBD)
    weights.random(f"{block}.ffn_down.weight", N_EMBD, N_FF)


def _transformer(
    path: Path, tokenizer: Tokenizer, *, arch: str, n_layer: int, window: int, seed: int
) -> None:
    gemma = arch == "gemma3"
    with _model(path, arch, tokenizer, n_layer, seed) as (writer, weights):
        writer.add_feed_forward_length(N_FF)
        writer.add_head_count(N_HEAD)
        writer.add_head_count_kv(N_HEAD_KV)
        writer.add_key_length(HEAD_DIM)
        writer.add_value_length(HEAD_DIM)
        writer.add_rope_dimension_count(HEAD_DIM)
        writer.add_rope_freq_base(1e4)
        if window:
            writer.add_sliding_window(window)
        weights.ones("output_norm.weight", N_EMBD)
        for layer in range(n_layer):
            block = f"blk.{layer}"
            weights.ones(f"{block}.attn_norm.weight", N_EMBD)
            _attention(weights, block, qk_norm=gemma)
            _feed_forward(weights, block)
            if gemma:
                weights.ones(f"{block}.post_attention_norm.weight", N_EMBD)
                weights.ones(f"{block}.post_ffw_norm.weight", N_EMBD)


def write_attention(path: Path, tokenizer: Tokenizer, *, window: int = WINDOW) -> None:
    """Dense attention in every layer (llama). `window` has no meaning here."""
    _transformer(path, tokenizer, arch="llama", n_layer=4, window=0, seed=1)


def write_swa(path: Path, tokenizer: Tokenizer, *, window: int = WINDOW) -> None:
    """Sliding-window layers and one dense layer (gemma3)."""
    _transformer(path, tokenizer, arch="gemma3", n_layer=GEMMA3_PERIOD, window=window, seed=2)


def write_recurrent(path: Path, tokenizer: Tokenizer, *, window: int = WINDOW) -> None:
    """A recurrent state and no attention at all (mamba). `window` has no meaning here."""
    n_layer, d_inner, d_state, d_conv, dt_rank = 4, 2 * N_EMBD, 16, 4, N_EMBD // 16
    with _model(path, "mamba", tokenizer, n_layer, seed=3) as (writer, weights):
        writer.add_feed_forward_length(0)
        writer.add_head_count(0)
        writer.add_ssm_conv_kernel(d_conv)
        writer.add_ssm_inner_size(d_inner)
        writer.add_ssm_state_size(d_state)
        writer.add_ssm_time_step_rank(dt_rank)
        weights.ones("output_norm.weight", N_EMBD)
        decay = -np.tile(np.arange(1, d_state + 1, dtype=np.float32), (d_inner, 1))
        for layer in range(n_layer):
            block = f"blk.{layer}"
            weights.ones(f"{block}.attn_norm.weight", N_EMBD)
            weights.random(f"{block}.ssm_in.weight", 2 * d_inner, N_EMBD)
            weights.random(f"{block}.ssm_conv1d.weight", d_inner, d_conv)
            weights.add(f"{block}.ssm_conv1d.bias", np.zeros(d_inner, np.float32))
            weights.random(f"{block}.ssm_x.weight", dt_rank + 2 * d_state, d_inner)
            weights.random(f"{block}.ssm_dt.weight", d_inner, dt_rank)
            # Small time steps: the state forgets slowly, so that an old fault stays visible.
            weights.uniform(f"{block}.ssm_dt.bias", d_inner, low=-4.0)
            weights.add(f"{block}.ssm_a", decay)
            weights.ones(f"{block}.ssm_d", d_inner)
            weights.random(f"{block}.ssm_out.weight", N_EMBD, d_inner)


def _lfm2(path: Path, tokenizer: Tokenizer, *, window: int, seed: int) -> None:
    n_layer, d_conv = 6, 3
    kv_heads = [N_HEAD_KV if layer % 3 == 2 else 0 for layer in range(n_layer)]
    with _model(path, "lfm2", tokenizer, n_layer, seed) as (writer, weights):
        writer.add_feed_forward_length(N_FF)
        writer.add_head_count(N_HEAD)
        writer.add_head_count_kv(kv_heads)
        writer.add_rope_freq_base(1e6)
        writer.add_uint32("lfm2.shortconv.l_cache", d_conv)
        if window:
            writer.add_sliding_window(window)
        weights.ones("token_embd_norm.weight", N_EMBD)
        for layer, n_kv in enumerate(kv_heads):
            block = f"blk.{layer}"
            weights.ones(f"{block}.attn_norm.weight", N_EMBD)
            _feed_forward(weights, block)
            if n_kv:
                _attention(weights, block, qk_norm=True)
            else:
                weights.random(f"{block}.shortconv.conv.weight", N_EMBD, d_conv)
                weights.random(f"{block}.shortconv.in_proj.weight", 3 * N_EMBD, N_EMBD)
                weights.random(f"{block}.shortconv.out_proj.weight", N_EMBD, N_EMBD)


def write_hybrid(path: Path, tokenizer: Tokenizer, *, window: int = WINDOW) -> None:
    """Recurrent convolutions and dense attention (lfm2). `window` has no meaning here."""
    _lfm2(path, tokenizer, window=0, seed=4)


def write_hybrid_swa(path: Path, tokenizer: Tokenizer, *, window: int = WINDOW) -> None:
    """Recurrent convolutions and sliding-window attention, no dense layer (lfm2)."""
    _lfm2(path, tokenizer, window=window, seed=5)


Writer = Callable[..., None]

WRITERS: dict[str, Writer] = {
    "attention": write_attention,
    "swa": write_swa,
    "recurrent": write_recurrent,
    "hybrid": write_hybrid,
    "hybrid-swa": write_hybrid_swa,
}
FAMILIES = tuple(WRITERS)


def write_lora(path: Path, *, n_layer: int = 4, rank: int = 4, alpha: float = 8.0) -> None:
    """A random LoRA adapter for the query projections of the attention model.

    Args:
        path: Where the file appears.
        n_layer: Layers of the model that the adapter is for.
        rank: Inner size of the two factors.
        alpha: llama.cpp adds `scale * alpha / rank * B @ A` to each weight.
    """
    with _gguf_file(path, "llama") as writer:
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
        weights = _Weights(writer, seed=6)
        for layer in range(n_layer):
            weights.random(f"blk.{layer}.attn_q.weight.lora_a", rank, N_EMBD)
            weights.random(f"blk.{layer}.attn_q.weight.lora_b", N_EMBD, rank)


def model_file(family: str) -> str:
    """File name of a family's model."""
    return f"tiny-{family}.gguf"


LORA_FILE = "tiny-attention-lora.gguf"


def write_all(directory: Path, donor: Path, *, window: int = WINDOW) -> list[Path]:
    """Write the model of every family and the LoRA adapter into `directory`.

    Args:
        directory: Made if it is missing; files in it are replaced.
        donor: The GGUF file that lends its tokenizer.
        window: Tokens that a sliding-window layer sees.

    Returns:
        The paths written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_gguf(donor)
    paths = []
    for family, write in WRITERS.items():
        path = directory / model_file(family)
        write(path, tokenizer, window=window)
        paths.append(path)
    write_lora(directory / LORA_FILE)
    return [*paths, directory / LORA_FILE]


def content_version(donor: Path) -> str:
    """A short name for what `write_all` writes: it changes when the writer or the donor does."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    digest.update(f"{np.__version__} {donor.name} {donor.stat().st_size}".encode())
    return digest.hexdigest()[:16]


if __name__ == "__main__":
    _, out_dir, donor_file = sys.argv
    for written in write_all(Path(out_dir), Path(donor_file)):
        sys.stdout.write(f"{written}\n")
