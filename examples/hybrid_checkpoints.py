"""Take a checkpoint, generate, go back to it, and generate the same again.

Recurrent and hybrid models cannot drop the end of what they have read; a checkpoint makes it
possible. Other models can do without, but it works the same way there.

    python examples/hybrid_checkpoints.py MODEL.gguf
"""

from __future__ import annotations

import argparse
import time

from llama_cpp import Llama

from llamakeep.llama_cache import HybridCheckpointCache

PROMPT = "The lighthouse was built in 1871 and burned whale oil at first. " * 30


def generate(llm: Llama, last: int, n_tokens: int) -> list[int]:
    """Evaluate the last token of the prompt and continue greedily."""
    tokens = [last]
    while len(tokens) <= n_tokens:
        llm.eval(tokens[-1:])
        tokens.append(llm.sample(temp=0.0))
    return tokens[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description="Roll back to a checkpoint.")
    parser.add_argument("model", help="a GGUF file")
    parser.add_argument("--max-tokens", type=int, default=16, help="tokens to generate")
    parser.add_argument("--on-device", action="store_true", help="leave the tensors there")
    args = parser.parse_args()

    llm = Llama(args.model, n_ctx=2048, verbose=False)
    # verbose: what happens, and why something does not, is said on standard error.
    cache = HybridCheckpointCache(llm, max_checkpoints=4, on_device=args.on_device, verbose=True)

    tokens = llm.tokenize(PROMPT.encode())
    # Without the last token: a restore brings back no logits, so there must be one to evaluate.
    start = time.perf_counter()
    llm.eval(tokens[:-1])
    print(f"evaluated: {llm.n_tokens} tokens in {time.perf_counter() - start:.2f} s")
    if not cache.save_checkpoint(llm.n_tokens, tokens):
        raise SystemExit("no checkpoint was taken")
    print(f"saved: a checkpoint of {cache.cache_size:,} bytes")
    first = generate(llm, tokens[-1], args.max_tokens)

    checkpoint = cache.find_best_checkpoint(tokens)
    start = time.perf_counter()
    if checkpoint is None or not cache.restore_checkpoint(checkpoint):
        raise SystemExit("the checkpoint could not be restored")
    llm.n_tokens = checkpoint.pos  # a Llama does not notice that its memory went back
    print(f"restored: to token {checkpoint.pos} in {time.perf_counter() - start:.4f} s")
    again = generate(llm, tokens[-1], args.max_tokens)
    print(f"the same {len(again)} tokens again: {again == first}")


if __name__ == "__main__":
    main()
