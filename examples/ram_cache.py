"""Ask three questions about one document, with other work in between: with and without a cache.

A `Llama` remembers the last prompt only, so each piece of other work makes it forget the document.
`LlamaRAMCache` gives it back, up to where the questions begin to differ.

    python examples/ram_cache.py MODEL.gguf
"""

from __future__ import annotations

import argparse
import time

from llama_cpp import Llama

from llamakeep.llama_cache import LlamaRAMCache

DOCUMENT = "The lighthouse was built in 1871 and burned whale oil at first. " * 30
QUESTIONS = ("When was it built?", "What did it burn?", "Does it stand today?")
OTHER_WORK = "A recipe for pancakes needs flour, milk and eggs."


def three_turns(llm: Llama, max_tokens: int) -> float:
    """Return the seconds that the three questions took."""
    seconds = 0.0
    for question in QUESTIONS:
        start = time.perf_counter()
        llm(DOCUMENT + question, max_tokens=max_tokens, temperature=0)
        seconds += time.perf_counter() - start
        llm(OTHER_WORK, max_tokens=1)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="Three turns with and without a cache in memory.")
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--max-tokens", type=int, default=8, help="length of each answer")
    args = parser.parse_args()

    llm = Llama(args.model, n_ctx=2048, verbose=False)
    print(f"without a cache: {three_turns(llm, args.max_tokens):.2f} s")

    cache = LlamaRAMCache(capacity_bytes=1 << 30)
    cache.set_namespace(llm)  # states that this Llama could not load are misses
    llm.set_cache(cache)
    print(f"with a cache:    {three_turns(llm, args.max_tokens):.2f} s")
    counters = cache.counters
    print(f"lookups: {counters.get('hits', 0)} hits, {counters.get('misses', 0)} misses")
    print(f"kept: {len(cache)} states, {cache.cache_size:,} bytes")


if __name__ == "__main__":
    main()
