"""Keep states in a directory: the second time this runs, it finds those of the first.

    python examples/disk_cache.py MODEL.gguf

The states of another model, or of other settings, are not touched.
"""

from __future__ import annotations

import argparse
import time

from llama_cpp import Llama

from llamakeep.llama_cache import LlamaDiskCache

DOCUMENT = "The lighthouse was built in 1871 and burned whale oil at first. " * 30
QUESTIONS = ("When was it built?", "What did it burn?", "Does it stand today?")


def main() -> None:
    parser = argparse.ArgumentParser(description="Three turns with a cache that outlives them.")
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--cache-dir", default=".cache/llama_cache", help="where states are kept")
    parser.add_argument("--max-tokens", type=int, default=8, help="length of each answer")
    args = parser.parse_args()

    llm = Llama(args.model, n_ctx=2048, verbose=False)
    with LlamaDiskCache(args.cache_dir, capacity_bytes=2 << 30) as cache:
        # Says which model and settings the states are of. Others would be nonsense to this Llama;
        # without it, the states of earlier processes are not touched.
        cache.set_namespace(llm)
        print(f"found: {len(cache)} states in {cache.cache.directory}")
        llm.set_cache(cache)
        for question in QUESTIONS:
            before = cache.counters.get("hits", 0)
            start = time.perf_counter()
            llm(DOCUMENT + question, max_tokens=args.max_tokens, temperature=0)
            seconds = time.perf_counter() - start
            how = "from disk" if cache.counters.get("hits", 0) > before else "no state"
            print(f"{seconds:6.2f} s, {how}: {question}")
        print(f"kept: {len(cache)} states, {cache.cache_size:,} bytes")


if __name__ == "__main__":
    main()
