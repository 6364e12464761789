"""From what clients send as a prompt to tokens, and to where user messages start in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llamakeep.biases import NO_BIASES, Biases
from llamakeep.chat import find_starts
from llamakeep.errors import InvalidValue, TokenError
from llamakeep.runtime.base import Vocab
from llamakeep.server.errors import ApiError, unsupported
from llamakeep.server.schema import Delimiter
from llamakeep.tokens import IntArray, as_tokens

MOST_BIASES = 16_384
"""Biases of a request at most: to forbid a whole script of a large vocabulary takes more than
10,000. Each answer of llama-server's `/completion` repeats them."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt in tokens.

    Attributes:
        tokens: At least one, unless the text was empty.
        starts: Positions where a user message starts, ascending.
    """

    tokens: IntArray
    starts: tuple[int, ...] = ()


_KINDS = "a text, a list of tokens, a list of both, or a list of such prompts"


def _is_token(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def tokenize_mixed(
    vocab: Vocab, content: Any, name: str, *, add_special: bool, parse_special: bool
) -> IntArray:
    """Return the tokens of a text, or of a list of texts and tokens.

    Args:
        vocab: The model's.
        content: What the client sent.
        name: Of the field, for errors.
        add_special: Begin as a prompt does, where the first item is a text.
        parse_special: Read special tokens in the texts.

    Raises:
        ApiError: For anything else, and for tokens outside the vocabulary.
    """
    items = [content] if isinstance(content, str) else content
    if not isinstance(items, list):
        raise ApiError(f"'{name}' must be a text, or a list of texts and tokens", param=name)
    parts: list[IntArray] = []
    start = 0
    for index, item in enumerate(items):
        if isinstance(item, str):
            parts.append(_tokens_of(vocab, items[start:index], name))
            special = add_special and index == 0
            parts.append(vocab.tokenize(item, add_special=special, parse_special=parse_special))
            start = index + 1
        elif not _is_token(item):
            raise ApiError(f"'{name}.{index}' must be a token or a text", param=name)
    parts.append(_tokens_of(vocab, items[start:], name))
    return np.concatenate(parts)


def _tokens_of(vocab: Vocab, numbers: Sequence[int], name: str) -> IntArray:
    try:
        return as_tokens(numbers, n_vocab=vocab.n_vocab)
    except TokenError as error:
        raise ApiError(f"'{name}': {error}", param=name) from error


def tokenize_prompts(vocab: Vocab, prompt: Any, *, most: int) -> list[IntArray]:
    """Return the tokens of each prompt in `prompt`.

    A list that has a number in it is one prompt; any other list has a prompt in each item. Costs
    one tokenization of all texts.

    Raises:
        ApiError: For what is no prompt, for no prompt at all, and for more than `most`.
    """
    several = isinstance(prompt, list) and not any(_is_token(item) for item in prompt)
    prompts = prompt if several else [prompt]
    if not prompts:
        raise ApiError("'prompt' must not be empty", param="prompt")
    if len(prompts) > most:
        raise ApiError(
            f"'prompt' has {len(prompts)} prompts, and at most {most} are answered", param="prompt"
        )
    return [_tokenize_prompt(vocab, each) for each in prompts]


def _tokenize_prompt(vocab: Vocab, prompt: Any) -> IntArray:
    if isinstance(prompt, dict) and "prompt_string" in prompt:
        if prompt.get("multimodal_data"):
            raise unsupported("multimodal_data", "is not supported: this model reads text")
        prompt = prompt["prompt_string"]
    if not isinstance(prompt, str | list):
        raise ApiError(f"'prompt' must be {_KINDS}", param="prompt")
    tokens = tokenize_mixed(vocab, prompt, "prompt", add_special=True, parse_special=True)
    if not tokens.size:
        raise ApiError("'prompt' must have at least one token", param="prompt")
    return tokens


def starts_of(vocab: Vocab, tokens: IntArray, delimiters: Iterable[Delimiter]) -> tuple[int, ...]:
    """Return where in `tokens` a user message starts.

    Each delimiter is tokenized and looked for; those with a role other than user are passed over.
    Costs 4 us for each token that a delimiter begins with.
    """
    texts = {each.delimiter for each in delimiters if each.role in (None, "user")}
    found: set[int] = set()
    for text in texts:
        wanted = vocab.tokenize(text, add_special=False, parse_special=True)
        found.update(find_starts(tokens, wanted))
    return tuple(sorted(found))


def bias_of(vocab: Vocab, bias: Any) -> Biases:
    """Return `logit_bias` as pairs of token and number; false forbids a token. Costs 2 us for each.

    Args:
        vocab: The model's.
        bias: An object from tokens to numbers, or a list of pairs, or of objects with `token` and
            `bias`, as answers tell it. Keys that are no numbers are texts: each of their tokens is
            meant, once.

    Raises:
        ApiError: For what is neither, for tokens outside the vocabulary, and for more biases than
            it has tokens, or than `MOST_BIASES`.
    """
    pairs = list(bias.items()) if isinstance(bias, dict) else bias
    if pairs is None:
        return NO_BIASES
    if not isinstance(pairs, list):
        raise ApiError("'logit_bias' must be an object or a list of pairs", param="logit_bias")
    most = min(vocab.n_vocab, MOST_BIASES)
    if len(pairs) > most:
        raise _too_many_biases(most)
    result: list[tuple[int, float]] = []
    for pair in map(_pair, pairs):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise ApiError("'logit_bias' must have pairs of token and bias", param="logit_bias")
        added = _bias(pair[1])
        result.extend((token, added) for token in _biased(vocab, pair[0]))
        if len(result) > most:
            raise _too_many_biases(most)
    return Biases(result)


def _too_many_biases(most: int) -> ApiError:
    return ApiError(f"'logit_bias' has more than {most} biases", param="logit_bias")


def _pair(given: Any) -> Any:
    """Return a pair; objects with `token` and `bias` are what answers tell of one."""
    if isinstance(given, dict) and given.keys() == {"token", "bias"}:
        return given["token"], given["bias"]
    return given


def _bias(value: Any) -> float:
    if value is False or value is None:  # JSON has no infinity
        return -np.inf
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1e6 <= value <= 1e6:
        raise ApiError(
            f"'logit_bias' must have numbers, or false, not {value!r}"[:200], param="logit_bias"
        )
    return float(value)


def _biased(vocab: Vocab, key: Any) -> list[int]:
    if isinstance(key, str):
        if not (key.isascii() and key.isdigit() and len(key) < 12):
            found = vocab.tokenize(key, add_special=False, parse_special=False)
            return list(dict.fromkeys(found.tolist()))
        key = int(key)
    if not _is_token(key) or not 0 <= key < vocab.n_vocab:
        raise ApiError(f"'logit_bias': {key!r} is no token of this model"[:200], param="logit_bias")
    return [key]


def check_slot(id_slot: int | None, n_slots: int) -> int | None:
    """Return the slot that is asked for, or None for any.

    Raises:
        InvalidValue: When there is no such slot.
    """
    if id_slot is None or id_slot < 0:
        return None
    if id_slot >= n_slots:
        raise InvalidValue(f"id_slot must be below {n_slots}, the number of slots, not {id_slot}")
    return id_slot
