"""The classes of `llama_cpp.llama_cache`, name for name: change the import, and nothing else."""

import importlib.util
import logging

from llamakeep.llama_cache.base import LOGGER, BaseLlamaCache
from llamakeep.llama_cache.checkpoint import HybridCheckpoint
from llamakeep.llama_cache.disk import LlamaDiskCache
from llamakeep.llama_cache.hybrid import HybridCheckpointCache
from llamakeep.llama_cache.ram import LlamaRAMCache
from llamakeep.llama_cache.tracking import ContextTracking, track
from llamakeep.llama_cache.trie import LlamaCache, LlamaTrieCache, TrieNode

__all__ = [
    "BaseLlamaCache",
    "ContextTracking",
    "HybridCheckpoint",
    "HybridCheckpointCache",
    "LlamaCache",
    "LlamaDiskCache",
    "LlamaRAMCache",
    "LlamaTrieCache",
    "TrieNode",
    "track",
]


def _register() -> None:
    """Let `isinstance` checks for llama_cpp's base class pass, where that is installed."""
    if importlib.util.find_spec("llama_cpp") is None:
        return
    try:
        from llamakeep.runtime.llama_borrowed import register_cache
    except (ImportError, OSError, RuntimeError) as error:  # it is there, but does not load
        logging.getLogger(LOGGER).debug("llama_cpp is not used: %s", error)
    else:
        register_cache(BaseLlamaCache)


_register()
