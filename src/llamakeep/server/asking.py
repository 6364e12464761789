"""From a client's fields to the engine's requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from starlette.requests import Request as HttpRequest

from llamakeep.engine.request import Request
from llamakeep.modes import Mode
from llamakeep.runtime.base import Vocab
from llamakeep.sampling import RANDOM_SEED, Sampling
from llamakeep.server.context import NEVER_S, Context, ServerOptions
from llamakeep.server.errors import ApiError
from llamakeep.server.grammars import shapes
from llamakeep.server.prompts import Prompt, bias_of, check_slot
from llamakeep.server.schema import AnswerFields
from llamakeep.server.threads import size_of, soon

_SEEDS = 1 << 32
MOST_SESSION_CHARS = 256
_SAME_NAME = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repeat_penalty",
    "repeat_last_n",
    "presence_penalty",
    "frequency_penalty",
    "min_keep",
    "ignore_eos",
)


def seed_of(value: int | None, default: int) -> int:
    """Return the seed that is meant: llama.cpp has 32 bits, and the last one means a random one."""
    if value is None:
        return default
    seed = value % _SEEDS
    return RANDOM_SEED if seed == _SEEDS - 1 else seed


def openai_defaults(sampling: Sampling) -> Sampling:
    """Return `sampling` with OpenAI's defaults for what OpenAI's API defines."""
    return replace(
        sampling, temperature=1.0, top_p=1.0, presence_penalty=0.0, frequency_penalty=0.0
    )


def sampling_of(body: AnswerFields, vocab: Vocab, defaults: Sampling) -> Sampling:
    """Return how tokens are chosen.

    Raises:
        ApiError: For a `logit_bias` that cannot be meant.
    """
    changes = {name: value for name in _SAME_NAME if (value := getattr(body, name)) is not None}
    if "top_k" in changes:
        changes["top_k"] = max(0, changes["top_k"])
    if body.logit_bias is not None:
        changes["logit_bias"] = bias_of(vocab, body.logit_bias)
    return replace(defaults, seed=seed_of(body.seed, defaults.seed), **changes)


async def sampling_soon(
    context: Context, body: AnswerFields, defaults: Sampling, *, shaped: bool = True
) -> Sampling:
    """Return how tokens are chosen, and by which grammar; what takes long is done in a thread.

    Args:
        context: What every endpoint needs.
        body: What the client sent.
        defaults: Where it says nothing.
        shaped: Make a grammar of what the answer has to match; no, if somebody else does.

    Raises:
        ApiError: For a `logit_bias`, grammar or schema that cannot be meant.
    """
    options, vocab = context.options, context.vocab

    def read() -> Sampling:
        sampling = sampling_of(body, vocab, defaults)
        if not shaped:
            return sampling
        grammar = context.grammars.grammar_of(body, vocab)
        return replace(sampling, grammar=grammar) if grammar else sampling

    size = size_of(body.logit_bias, options.inline_chars)
    return await soon(options, size, read, compiles=shaped and shapes(body))


def mode_of(body: AnswerFields, options: ServerOptions) -> Mode:
    """Return what the request may do with kept states; `cache_mode` has the last word."""
    if body.cache_mode is not None:
        return Mode(body.cache_mode)
    reuses = options.cache_prompt if body.cache_prompt is None else body.cache_prompt
    return Mode.ON if reuses else Mode.WRITE


def options_for(body: AnswerFields, options: ServerOptions) -> ServerOptions:
    """Return what the server was told, with what the request says of its stream instead."""
    ping_s = body.sse_ping_interval
    if ping_s is None:
        return options
    return replace(options, ping_s=float(ping_s) if ping_s > 0 else NEVER_S)


def session_of(body: AnswerFields) -> str:
    """Return what a client says that its request belongs to, or ""."""
    for name in ("prompt_cache_key", "safety_identifier", "user"):
        value = getattr(body, name, None)
        if isinstance(value, str) and value:
            return value[:MOST_SESSION_CHARS]
    return ""


async def sent_of(context: Context, request: HttpRequest) -> bytes | None:
    """Return the body that a client sent; None unless texts may be kept to explain requests."""
    return await request.body() if context.options.explain_texts else None


def requests_of(
    context: Context,
    body: AnswerFields,
    prompts: Sequence[Prompt],
    *,
    sampling: Sampling,
    max_tokens: int | None,
    n_probs: int,
    label: str,
    shown: frozenset[int] = frozenset(),
    sent: bytes | None = None,
    session: str | None = None,
    alias: str = "",
) -> list[Request]:
    """Return a request for each answer: each prompt `n` times, prompts first.

    Answers to one prompt have different seeds.

    Args:
        context: What every endpoint needs.
        body: What all endpoints read of a request.
        prompts: What is to be answered.
        sampling: How tokens are chosen.
        max_tokens: Where the body does not say it.
        n_probs: How many of the likeliest tokens come with each.
        label: What clients call the answer.
        shown: Special tokens that are part of the answer's text.
        sent: The client's own body, see `sent_of`.
        session: What the client says that it belongs to; None to look into `body`.
        alias: What clients call the request, where that is another name.

    Raises:
        ApiError: For more answers than the server gives at once.
        InvalidValue: For a slot that is not there.
    """
    count = len(prompts) * body.choices
    if count > context.options.max_prompts:
        raise ApiError(
            f"'n': {count} answers are asked for, and at most {context.options.max_prompts} "
            "are given at once",
            param="n",
        )
    slot = check_slot(body.id_slot, context.engine.n_slots)
    limit = body.limit(max_tokens)
    result: list[Request] = []
    for prompt in prompts:
        for choice in range(body.choices):
            seed = sampling.seed
            if choice and seed != RANDOM_SEED:
                seed = (seed + choice) % (_SEEDS - 1)
            result.append(
                Request(
                    prompt.tokens,
                    max_tokens=limit,
                    sampling=replace(sampling, seed=seed) if choice else sampling,
                    stop=body.stop_words(),
                    shown=shown,
                    n_probs=n_probs,
                    user_starts=prompt.starts,
                    mode=mode_of(body, context.options),
                    salt=body.cache_salt or "",
                    slot=slot,
                    wants_progress=bool(body.stream and body.return_progress),
                    label=label,
                    session=session_of(body) if session is None else session,
                    body=sent if len(prompts) == 1 else None,  # it says which prompt is meant
                    alias=alias,
                )
            )
    return result
