"""What a grammar costs: a constrained stream of SmolLM2 against a plain one."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.bench_serve import N_ANSWER, Heard, best_ratio, rate, settings
from benchmarks.harness import Result, benchmark
from llamakeep.engine import Engine, Request
from llamakeep.json_schema import ANY_OBJECT, compile_schema
from llamakeep.sampling import Sampling
from llamakeep.server.loading import load_engine

QUESTION = (
    "<|im_start|>user\nList twenty people as JSON, each with a name, an age and a city.<|im_end|>\n"
    "<|im_start|>assistant\n"
)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"type": "string", "maxLength": 40},
    },
    "required": ["name", "age", "city"],
    "additionalProperties": False,
}
GRAMMARS = {
    "any JSON object": compile_schema(ANY_OBJECT),
    "a JSON schema": compile_schema({"type": "array", "items": PERSON, "minItems": 20}),
    # The model wants to say something else, so that nearly every token is refused.
    "digits only": "root ::= [0-9] root",
}


def stream_rate(engine: Engine, sampling: Sampling) -> tuple[float, int]:
    """Tokens per second of one answer, and how many there were."""
    prompt = engine.vocab.tokenize(QUESTION, add_special=True, parse_special=True)
    heard = Heard()
    engine.submit(Request(prompt, N_ANSWER, sampling), heard)
    heard.wait()
    return rate([heard]), len(heard.at)


@benchmark("grammar-rate")
def grammar_rate() -> Iterator[Result]:
    """Tokens per second with a grammar, against the same prompt without."""
    engine = load_engine(settings())
    try:
        for seeded in (False, True):
            plain = Sampling(temperature=0.8 if seeded else 0.0, seed=1, ignore_eos=True)
            stream_rate(engine, plain)
            for name, grammar in GRAMMARS.items():
                bound = Sampling(plain.temperature, seed=1, grammar=grammar)
                n_tokens = stream_rate(engine, bound)[1]
                ratio, pairs = best_ratio(
                    lambda bound=bound: stream_rate(engine, bound)[0],
                    lambda plain=plain: stream_rate(engine, plain)[0],
                )
                yield Result(
                    name=f"grammar-{name}, {'drawn' if seeded else 'greedy'} against plain",
                    value=ratio,
                    unit="x",
                    target=0.8,
                    better="higher",
                    detail={"pairs": pairs, "n_tokens": n_tokens},
                )
    finally:
        engine.close()
