"""Fields that shape an answer's form and are not supported, and samplers that llamakeep lacks.

Ignoring them would give answers that are not what was asked for. So each is a 400 with its name,
unless its value asks for nothing. Tools are a chat's alone, where they are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llamakeep.server.errors import unsupported

# What asks for nothing, besides null, false, 0, "", [] and {}.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "tools": (),
    "functions": (),
    "tool_choice": ("none", "auto"),
    "function_call": ("none", "auto"),
    "grammar_lazy": (),
    "grammar_triggers": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "lora": (),
    "samplers": (),
    "mirostat": (),
    "dynatemp_range": (),
    "dry_multiplier": (),
    "xtc_probability": (),
    "top_n_sigma": (-1,),
    "adaptive_target": (-1,),
    "post_sampling_probs": (),
    "n_indent": (),
    "t_max_predict_ms": (-1,),
}


SAMPLERS = ("penalties", "top_k", "typ_p", "top_p", "min_p", "temperature")
"""The samplers that are there, in their order, by llama-server's names."""
_LETTERS = dict(zip("ekypmt", SAMPLERS, strict=True))
_WITHOUT_EFFECT = {"dry", "top_n_sigma", "xtc", *"dsx"}  # where no other field asks for them


def _is_our_order(value: Any) -> bool:
    """Whether a list of samplers, or a text with a letter for each, asks for what is done anyway.

    llama-server's own default does: it has some more, which do nothing unless they are asked for.
    """
    if not isinstance(value, str | list) or not all(isinstance(each, str) for each in value):
        return False
    wanted = [_LETTERS.get(each, each) for each in value if each not in _WITHOUT_EFFECT]
    return tuple(wanted) == SAMPLERS


def refuse(fields: Mapping[str, Any] | None) -> None:
    """Raise for the first of `fields` that asks for something that is not there.

    Raises:
        ApiError: With the name of the field.
    """
    for name, value in (fields or {}).items():
        if name not in _NEUTRAL or not value:
            continue
        if name == "samplers" and _is_our_order(value):
            continue
        if not any(value == neutral for neutral in _NEUTRAL[name]):
            raise unsupported(name)
