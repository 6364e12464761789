"""Flags of llama-server that mean something that is not here, and what to do instead.

Each would change answers, or who may ask, so none is passed over in silence.
"""

from __future__ import annotations

_SPECULATIVE = "answers are not drafted by a second model, nor by what was said before"
_EMBEDDINGS = "embeddings and rankings are not made here: this server writes answers"
_MEDIA = "pictures, sound and files are not read: prompts are text"
_ONE_MODEL = "a server has one model: start another one for another model"
_DOWNLOADS = "nothing is downloaded: name a file that is there with --model FILE (-m)"
_TOOLS = "a server runs no tools: clients run them"
_PLACING = "layers go where --gpu-layers puts them, and nothing else can be placed"
_PROCESS = "the system's own tools can do that (taskset, nice, numactl)"
_TLS = "it speaks plain HTTP: put a proxy that has the certificate before it"
_PAGES = "it serves no files and no web UI, and from the root of its address only"
_SAMPLERS = "that sampler is not there"
_ROPE = "positions are scaled as the model's file says"
_IN_REQUESTS = "send it with the requests that want it"
_LOG = "a log goes to standard error, as JSON where that is no terminal; 2>FILE writes it to a file"
_SHIFT = "a context is never shifted: an answer ends where the context does"
_THOUGHTS = "thoughts are as long as the model makes them; --reasoning off has none"

_FLAGS: dict[str, str] = {
    _SHIFT: "--context-shift --keep",
    _SPECULATIVE: "--model-draft -md --hf-repo-draft -hfd -hfrd --draft --draft-n --draft-max "
    "--draft-min --draft-n-min --draft-p-min --draft-p-split --threads-draft -td -tbd "
    "--threads-batch-draft --gpu-layers-draft --n-gpu-layers-draft -ngld --device-draft -devd "
    "--cache-type-k-draft -ctkd --cache-type-v-draft -ctvd --lookup-cache-static -lcs "
    "--lookup-cache-dynamic -lcd --override-tensor-draft -otd --cpu-moe-draft -cmoed "
    "--n-cpu-moe-draft -ncmoed",
    _EMBEDDINGS: "--embedding --embeddings --rerank --reranking --pooling --embd-normalize",
    _MEDIA: "--mmproj -mm --mmproj-url -mmu --mmproj-auto --mmproj-offload --no-mmproj-offload "
    "--mmproj-device -mmdev --image-min-tokens --image-max-tokens --media-path "
    "--mtmd-batch-max-tokens --video-fps --video-timestamp-interval --video-ffmpeg-dir",
    _ONE_MODEL: "--models-dir --models-preset --models-max --models-autoload "
    "--no-models-autoload --sleep-idle-seconds",
    _DOWNLOADS: "--model-url -mu --docker-repo -dr --hf-repo -hf -hfr --hf-file -hff --hf-token "
    "-hft",
    _TOOLS: "--tools --tools-runtime --mcp-servers-config --mcp-servers-json --agent -ag "
    "--ui-mcp-proxy --webui-mcp-proxy",
    _PLACING: "--device -dev --split-mode -sm --tensor-split -ts --main-gpu -mg --override-tensor "
    "-ot --cpu-moe -cmoe --n-cpu-moe -ncmoe --n-cpu-ffn -ncffn --no-kv-offload -nkvo --no-repack "
    "-nr --no-host --no-op-offload --rpc --lazy-mode -lzm",
    _PROCESS: "--cpu-mask -C --cpu-range -Cr --cpu-strict --prio --poll --cpu-mask-batch -Cb "
    "--cpu-range-batch -Crb --cpu-strict-batch --prio-batch --poll-batch --numa",
    _TLS: "--ssl-key-file --ssl-cert-file",
    _PAGES: "--ui --webui --path --api-prefix --ui-config --webui-config --ui-config-file "
    "--webui-config-file",
    _SAMPLERS: "--samplers --sampler-seq --sampling-seq --top-nsigma --top-n-sigma "
    "--xtc-probability --xtc-threshold --dry-multiplier --dry-base --dry-allowed-length "
    "--dry-penalty-last-n --dry-sequence-breaker --adaptive-target --adaptive-decay "
    "--dynatemp-range --dynatemp-exp --mirostat --mirostat-lr --mirostat-ent --backend-sampling "
    "-bs",
    _ROPE: "--rope-scaling --rope-scale --rope-freq-base --rope-freq-scale --yarn-orig-ctx "
    "--yarn-ext-factor --yarn-attn-factor --yarn-beta-slow --yarn-beta-fast --override-kv",
    _IN_REQUESTS: "--logit-bias -l --grammar --grammar-file --json-schema -j --json-schema-file "
    "-jf --reverse-prompt -r",
    _LOG: "--log-file --log-prompts-dir --log-jsonl",
    _THOUGHTS: "--reasoning-budget --reasoning-budget-message --reasoning-preserve "
    "--no-reasoning-preserve",
    "special tokens of an answer are never part of its text": "--special -sp",
    "requests always share batches": "--no-cont-batching -nocb",
    "chat templates are always read as Jinja": "--no-jinja",
    "a running server cannot be told otherwise": "--props",
    "one process has a port": "--reuse-port",
    "each slot may use all that others leave": "--kv-unified-per-slot",
    "adapters that are named take effect": "--lora-init-without-apply",
    "a model is not changed by a vector": "--control-vector --control-vector-scaled "
    "--control-vector-layer-range",
    "of pages that may ask, only the origins can be chosen": "--cors-methods --cors-headers "
    "--cors-credentials",
    "the size of the context is --ctx-size": "--fit-target -fitt --fit-ctx -fitc",
}
_BEGINNINGS = {"--spec-": _SPECULATIVE}

WHY = {flag: why for why, flags in _FLAGS.items() for flag in flags.split()}
"""Why a flag is refused, by the flag."""


def why(flag: str) -> str | None:
    """Return why a flag is refused; None for one that llama-server has not, or that is taken."""
    for beginning, reason in _BEGINNINGS.items():
        if flag.startswith(beginning):
            return reason
    return WHY.get(flag)
