"""Evaluate the beginning that many prompts share once, and start every prompt from its state.

`LlamaTrieCache` gives back a state only if all of its key begins the prompt. Nothing of it has to
be cut then, so this works on every model, also on recurrent and hybrid ones.

    python examples/trie_cache.py MODEL.gguf
"""

from __future__ import annotations

import argparse
import time

from llama_cpp import Llama

from llamakeep.llama_cache import LlamaTrieCache

BEGINNING = "You answer questions about ships, briefly and in plain words. " * 30
QUESTIONS = ("What is a keel?", "What is a mast?", "What is a rudder?")


def three_turns(llm: Llama, beginning: list[int], max_tokens: int) -> float:
    """Return the seconds that the three questions took, each after other work."""
    seconds = 0.0
    for question in QUESTIONS:
        llm("Something else entirely.", max_tokens=1)
        prompt = beginning + llm.tokenize(question.encode(), add_bos=False)
        start = time.perf_counter()
        llm(prompt, max_tokens=max_tokens, temperature=0)
        seconds += time.perf_counter() - start
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="Three turns from the state of their beginning.")
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--max-tokens", type=int, default=8, help="length of each answer")
    args = parser.parse_args()

    llm = Llama(args.model, n_ctx=2048, verbose=False)
    beginning = llm.tokenize(BEGINNING.encode())
    print(f"without a cache: {three_turns(llm, beginning, args.max_tokens):.2f} s")

    cache = LlamaTrieCache(capacity_bytes=1 << 30)
    cache.set_namespace(llm)  # states that this Llama could not load are misses
    start = time.perf_counter()
    llm.reset()
    llm.eval(beginning)
    cache[beginning] = llm.save_state()
    print(f"the beginning:   {time.perf_counter() - start:.2f} s, once")

    llm.set_cache(cache)
    print(f"with a cache:    {three_turns(llm, beginning, args.max_tokens):.2f} s")
    hits = cache.counters.get("hits", 0)
    print(f"lookups: {hits} hits; the shared state has {len(beginning)} tokens")


if __name__ == "__main__":
    main()
