"""Give LangChain's llama.cpp wrapper a cache.

Its `client` is the `llama_cpp.Llama`. Needs `pip install langchain-community`.

    python examples/langchain_cache.py MODEL.gguf
"""

from __future__ import annotations

import argparse
import time

from langchain_community.llms import LlamaCpp

from llamakeep.llama_cache import LlamaRAMCache

DOCUMENT = "The lighthouse was built in 1871 and burned whale oil at first. " * 30
QUESTIONS = ("When was it built?", "What did it burn?", "Does it stand today?")


def three_turns(llm: LlamaCpp) -> float:
    """Return the seconds that the three questions took."""
    seconds = 0.0
    for question in QUESTIONS:
        start = time.perf_counter()
        llm.invoke(DOCUMENT + question)
        seconds += time.perf_counter() - start
        llm.invoke("A recipe for pancakes needs flour, milk and eggs.")  # forgets the document
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="A cache for LangChain's LlamaCpp.")
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--max-tokens", type=int, default=8, help="length of each answer")
    args = parser.parse_args()

    llm = LlamaCpp(
        model_path=args.model,
        n_ctx=2048,
        n_batch=512,  # LangChain's own default is 8, which evaluates prompts slowly
        max_tokens=args.max_tokens,
        temperature=0.0,
        verbose=False,
    )
    print(f"without a cache: {three_turns(llm):.2f} s")

    cache = LlamaRAMCache(capacity_bytes=1 << 30)
    cache.set_namespace(llm.client)
    llm.client.set_cache(cache)
    print(f"with a cache:    {three_turns(llm):.2f} s")
    counters = cache.counters
    print(f"lookups: {counters.get('hits', 0)} hits, {counters.get('misses', 0)} misses")


if __name__ == "__main__":
    main()
