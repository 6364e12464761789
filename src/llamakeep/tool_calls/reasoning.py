"""What a model thinks before it answers: how it is marked, and whether a prompt opens it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Thoughts:
    """How thoughts are marked.

    Attributes:
        open: Stands before them; its first letter occurs in it once.
        close: Stands after them; the same.
    """

    open: str
    close: str


THINK = Thoughts("<think>", "</think>")
MISTRAL_THINK = Thoughts("[THINK]", "[/THINK]")


def thoughts_of(template: str) -> Thoughts | None:
    """Return how the model of a chat template marks its thoughts; None if it has none."""
    for each in (MISTRAL_THINK, THINK):
        if each.open in template or each.close in template:
            return each
    return None


def is_open(prompt: str, thoughts: Thoughts) -> bool:
    """Return whether an answer to `prompt` begins inside of thoughts: the prompt ends with them.

    Only its end counts, or what a client wrote about thoughts would open them.
    """
    return prompt.rstrip().endswith(thoughts.open)


def is_closed(prompt: str, thoughts: Thoughts) -> bool:
    """Return whether an answer to `prompt` begins after thoughts, which it has no more of."""
    return prompt.rstrip().endswith(thoughts.close)


def is_left_open(beginning: str, thoughts: Thoughts) -> bool:
    """Return whether an answer that goes on with `beginning` does so inside of thoughts."""
    return beginning.rfind(thoughts.open) > beginning.rfind(thoughts.close)
