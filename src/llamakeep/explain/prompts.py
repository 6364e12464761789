"""Why two prompts part, as texts, tokens or request bodies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

from llamakeep.errors import InvalidValue
from llamakeep.explain.bodies import SETTINGS, from_body, is_chat, salt_of
from llamakeep.explain.churn import SAME_CHARS, classify
from llamakeep.explain.compare import compare
from llamakeep.explain.conversation import from_text
from llamakeep.explain.divergence import around, same_text_other_tokens
from llamakeep.explain.kinds import CHURN, Kind
from llamakeep.explain.reasoning import reasoning_end
from llamakeep.explain.verdict import LOOSE, Verdict, say
from llamakeep.runtime.base import Vocab
from llamakeep.texts import common_text
from llamakeep.tokens import IntArray, TokensLike, as_tokens, common_prefix

_SYNC_TOKENS: Final = 512
_OPENING_TOKENS: Final = 16
"""Tokens before the first message in which a template may write what it is set to."""
_LOOKED_FOR_CHARS: Final = 64
_PROMPT_FIELDS: Final = ("messages", "input", "prompt")


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """One of two prompts: what is known of it, at least one of the three.

    Attributes:
        tokens: Its tokens.
        text: Its text.
        body: The request that it was made of, parsed.
    """

    tokens: IntArray | None = None
    text: str | None = None
    body: Mapping[str, Any] | None = None


Given: TypeAlias = "Side | str | Mapping[str, Any] | TokensLike"
"""A prompt: a text, tokens, the body of a request, or what is known of all three."""


def side_of(given: Given) -> Side:
    """Return what is known of a prompt; the field `prompt` of a body is its text or its tokens.

    Raises:
        InvalidValue: For a body that has neither messages, an input nor a prompt.
        TokenError: For tokens that are none.
    """
    if isinstance(given, str):
        return Side(text=given)
    if isinstance(given, Mapping):
        given = Side(body=given)
    if not isinstance(given, Side):
        return Side(tokens=as_tokens(given))
    tokens = None if given.tokens is None else as_tokens(given.tokens)
    if given.body is None or is_chat(given.body):
        return replace(given, tokens=tokens)
    if "prompt" not in given.body:
        fields = " nor ".join(_PROMPT_FIELDS)
        raise InvalidValue(f"a request body has neither {fields}")
    prompt = _bare_prompt(given.body["prompt"])
    if isinstance(prompt, str) and given.text is None:
        return replace(given, text=prompt, tokens=tokens)
    if tokens is None and _is_tokens(prompt):
        tokens = as_tokens(prompt)
    return replace(given, tokens=tokens)


def _bare_prompt(prompt: Any) -> Any:
    if isinstance(prompt, Mapping) and isinstance(prompt.get("prompt_string"), str):
        return prompt["prompt_string"]
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        return prompt[0]  # a list of one prompt
    return prompt


def _is_token(item: Any) -> bool:
    return isinstance(item, int) and not isinstance(item, bool)


def _is_tokens(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(map(_is_token, prompt))


def compare_sides(before: Side, after: Side, vocab: Vocab | None) -> tuple[Verdict, int | None]:
    """Return why two prompts part, and at which token if tokens of both are known."""
    salts = [salt_of(side.body) if side.body is not None else None for side in (before, after)]
    both = before.body is not None and after.body is not None
    at = None
    if before.tokens is not None and after.tokens is not None:
        at = common_prefix(before.tokens, after.tokens)
    if both and salts[0] != salts[1]:
        reason = "the two were sent with different salts"
        return Verdict(Kind.SALT, reason, "cache_salt"), at
    if at is not None:
        found = _by_tokens(before, after, at, vocab)
        if found is not None:
            return found, at
        before, after = (_with_text(side, at, vocab) for side in (before, after))
    verdict = _by_content(before, after, at)
    if at is not None and verdict.kind is Kind.SAME:  # their tokens are not, as was found above
        verdict = Verdict(Kind.UNKNOWN, "the two say the same, and their tokens differ")
    return verdict, at


# -- tokens ----------------------------------------------------------------------------------------


def _by_tokens(before: Side, after: Side, at: int, vocab: Vocab | None) -> Verdict | None:
    """Return what the tokens alone say, if that is all there is to say."""
    ours, theirs = before.tokens, after.tokens
    if ours is None or theirs is None:
        return None
    if at == theirs.size:
        same = "nothing differs" if at == ours.size else "it is the beginning of the stored one"
        return Verdict(Kind.SAME, same)
    if at == ours.size:
        part = ""
        if before.body is not None and after.body is not None:
            part = _by_content(Side(body=before.body), Side(body=after.body), at).part
        return Verdict(Kind.NEW_TEXT, f"the prompt goes on from token {at}", part)
    if vocab is not None:
        rest = [side[at : at + _SYNC_TOKENS + 1].tolist() for side in (ours, theirs)]
        same_text = same_text_other_tokens(
            rest[0], rest[1], lambda token: vocab.piece(token, special=True)
        )
    else:
        one, other = before.text, after.text
        same_text = one is not None and other is not None and other.startswith(one)
    if not same_text:
        return None
    verdict = Verdict(Kind.TOKENIZATION, f"the text at token {at} is the same, in other tokens")
    if vocab is None:
        return verdict
    texts = [vocab.text(side[max(0, at - 32) : at + 32], special=True) for side in (ours, theirs)]
    lead = vocab.text(theirs[max(0, at - 32) : at], special=True)
    return replace(verdict, around=around(texts[0], texts[1], len(lead)))


def _with_text(side: Side, at: int, vocab: Vocab | None) -> Side:
    """Return a side with the text of its tokens, if that can be known."""
    if side.text is not None or side.tokens is None or vocab is None:
        return side
    # In two pieces, so that both sides have the same text up to where their tokens part.
    parts = (side.tokens[:at], side.tokens[at:])
    return replace(side, text="".join(vocab.text(part, special=True) for part in parts))


# -- texts and bodies ------------------------------------------------------------------------------


def _by_content(before: Side, after: Side, at: int | None = None) -> Verdict:
    text = None
    settings = at is None or at < _OPENING_TOKENS
    if before.text is not None and after.text is not None:
        text = compare_texts(before.text, after.text)
        if text.kind in (Kind.SAME, Kind.NEW_TEXT) and not text.part:
            return _with_part(text, before, after)  # what the template made of both is the truth
        settings = (text.char_index or 0) <= _first_content(after)
    body = _by_bodies(before, after, settings=settings)
    if body is not None and body.kind is Kind.SAME and not settings:
        body = _by_bodies(before, after)  # nothing but a setting is left that can have done it
        if body is not None and body.part in SETTINGS and (text is None or text.kind not in CHURN):
            return body
    if text is None:
        return body or Verdict(Kind.UNKNOWN, "the text of the two is not known")
    if body is None or body.kind is Kind.SAME:
        return text  # something made other texts of the same, which the bodies do not say
    if body.kind not in CHURN and text.kind in CHURN:
        return text
    return text if body.kind is Kind.UNKNOWN and text.kind is not Kind.UNKNOWN else body


def _first_content(side: Side) -> int:
    """Return where in the text of a prompt the first of its messages stands; 0 if not known."""
    if side.text is None or side.body is None or not is_chat(side.body):
        return 0
    messages = from_body(side.body).messages
    said = messages[0].text.strip()[:_LOOKED_FOR_CHARS] if messages else ""
    return max(0, side.text.find(said)) if said else 0


def _with_part(verdict: Verdict, before: Side, after: Side) -> Verdict:
    body = _by_bodies(before, after, settings=False)
    return verdict if body is None or body.kind in CHURN else replace(verdict, part=body.part)


def _by_bodies(before: Side, after: Side, *, settings: bool = True) -> Verdict | None:
    one, other = before.body, after.body
    if one is None or other is None:
        return None
    if is_chat(one) and is_chat(other):
        return compare(from_body(one), from_body(other), settings=settings)
    if is_chat(one) or is_chat(other):
        return Verdict(Kind.UNKNOWN, "one request is a chat, and the other is a plain prompt")
    return _prompts(_bare_prompt(one["prompt"]), _bare_prompt(other["prompt"]), "prompt")


def _prompts(before: Any, after: Any, part: str) -> Verdict:
    """Compare the field `prompt` of two bodies: texts, tokens, both mixed, or several of them."""
    if isinstance(before, str) and isinstance(after, str):
        return replace(compare_texts(before, after), part=part)
    if isinstance(before, list) and isinstance(after, list):
        pairs = enumerate(zip(before, after, strict=False))
        for index, (one, other) in pairs:
            if one != other:
                if _is_token(one) or _is_token(other):
                    reason = f"{part} has another token at item {index}"
                    return Verdict(Kind.UNKNOWN, reason, f"{part}[{index}]")
                return _prompts(one, other, f"{part}[{index}]")
        if len(after) <= len(before):
            return Verdict(Kind.SAME, "nothing differs", part)
        return Verdict(Kind.NEW_TEXT, f"{part} goes on", f"{part}[{len(before)}]")
    if before == after:
        return Verdict(Kind.SAME, "nothing differs", part)
    return Verdict(Kind.UNKNOWN, f"{part} is of another form, so its tokens may differ", part)


def compare_texts(before: str, after: str) -> Verdict:
    """Return why two texts of prompts part. Costs a few scans of both."""
    at = common_text(before, after)
    near = around(before, after, at)
    if at == len(after):
        same = "nothing differs" if at == len(before) else "it is the beginning of the stored one"
        return Verdict(Kind.SAME, same, char_index=at, around=near)
    if at == len(before):
        reason = f"the prompt goes on from character {at}"
        return Verdict(Kind.NEW_TEXT, reason, char_index=at, around=near)
    one, other = from_text(before), from_text(after)
    if one is not None and other is not None:
        verdict = compare(one, other)
        if verdict.kind is not Kind.SAME:
            return replace(verdict, char_index=at, around=near)
    found = classify(before, after, at, LOOSE)
    if found is not None:
        return Verdict(found.kind, say(found, ""), "", at, near)
    if _without_reasoning(before, after, at):
        reason = "what the model thought was left out"
        return Verdict(Kind.REASONING_REMOVED, reason, "", at, near)
    if at == 0:
        return Verdict(Kind.FIRST_SEEN, "the two have no beginning in common", "", at, near)
    return Verdict(Kind.UNKNOWN, "the texts differ, for no reason that shows", "", at, near)


def _without_reasoning(before: str, after: str, at: int) -> bool:
    for start in {at, before.rfind("<", max(0, at - 16), at + 1)}:
        end = reasoning_end(before, start) if start >= 0 else None
        if end is None:
            continue
        rest = before[end : end + SAME_CHARS]
        if rest.strip() and after[start : start + len(rest)] == rest:
            return True
    return False
