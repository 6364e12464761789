"""Why a prompt was read again: the kinds, and what a user can do about each."""

from __future__ import annotations

import enum
from types import MappingProxyType
from typing import Final


class Kind(str, enum.Enum):
    """Why the rest of a prompt had to be evaluated."""

    SAME = "same"
    """Nothing differs: the prompt is a stored one, or the beginning of one."""
    NEW_TEXT = "new-text"
    """The prompt goes on with, or asks, something new. Nothing was lost."""
    FIRST_SEEN = "first-seen"
    """Nothing that is known begins like it."""
    EVICTED = "evicted"
    """It was kept, and dropped to make room."""
    NAMESPACE = "namespace"
    """It is kept for another model, other adapters or other settings."""
    SALT = "salt"
    """It was sent with another salt."""
    NO_CHECKPOINT = "no-checkpoint"
    """It is kept, but the model's memory cannot be cut back to where the prompt leaves it."""
    TOKENIZATION = "tokenization"
    """The text is the same, in other tokens."""
    DATE = "date-or-time"
    """A date or a time changed in text that is otherwise the same."""
    COUNTER = "counter-or-id"
    """A counter, a number of a request, or a random id changed."""
    ORDER = "order"
    """Keys, tools or lines are the same in another order."""
    NUMBER_FORMAT = "number-format"
    """A number has the same value and is written otherwise."""
    WHITESPACE = "whitespace"
    """Only white space differs."""
    REASONING_REMOVED = "reasoning-removed"
    """What the model thought in an earlier turn was left out."""
    SYSTEM_CHANGED = "system-changed"
    """The system prompt is another."""
    TOOLS_CHANGED = "tools-changed"
    """Tools were added, removed or described otherwise."""
    COMPACTED = "compacted"
    """Earlier messages were dropped, emptied or replaced by a summary."""
    UNKNOWN = "unknown"
    """None of these, or too little is known to tell."""


ADVICE: Final = MappingProxyType(
    {
        Kind.SAME: "Nothing needs to change.",
        Kind.NEW_TEXT: "Nothing needs to change: what is new has to be evaluated once.",
        Kind.FIRST_SEEN: (
            "Nothing needs to change: the next prompt that begins so is served from what is kept "
            "now. If this one was sent before, look whether the server was started without a cache "
            "directory."
        ),
        Kind.EVICTED: (
            "Give the cache more bytes (--cache-ram, --disk-bytes), a directory to keep what does "
            "not fit (--cache-dir), or try another policy."
        ),
        Kind.NAMESPACE: (
            "Start the model as it was when the prompt was kept, or accept one evaluation under "
            "the new settings: states of the two cannot be mixed."
        ),
        Kind.SALT: "Send the same cache_salt for requests that may share what is kept.",
        Kind.NO_CHECKPOINT: (
            "Let checkpoints be taken more often (--ctx-checkpoints, a smaller "
            "--checkpoint-min-step), or keep what changes behind what stays, so that "
            "prompts part where a message starts."
        ),
        Kind.TOKENIZATION: (
            "Send the text of answers back as it came, or send tokens. Where an answer ends in "
            "the middle of a word, the last token or two are always read again."
        ),
        Kind.DATE: (
            "Move the date or time to the end of the prompt (into the last user message), or "
            "round it, for example to the day."
        ),
        Kind.COUNTER: (
            "Leave the counter or id out of the prompt, move it to the end, or derive it from "
            "the content, so that it stays the same."
        ),
        Kind.ORDER: (
            "Write keys, tools and lists in a fixed order: sort them by name before they are sent."
        ),
        Kind.NUMBER_FORMAT: (
            "Write numbers the same way each time: send back the text that came, instead of "
            "parsing it and writing it anew."
        ),
        Kind.WHITESPACE: (
            "Send white space back as it came: do not strip, wrap or re-indent text that was sent "
            "before, and keep one kind of line ends."
        ),
        Kind.REASONING_REMOVED: (
            "Keep the reasoning in the messages that are sent back, or let the chat template leave "
            "it out (a template that drops it does so in every turn but the newest, and what "
            "follows is read again once)."
        ),
        Kind.SYSTEM_CHANGED: (
            "Keep the system prompt the same within a conversation, and put what changes behind "
            "it, into a later message."
        ),
        Kind.TOOLS_CHANGED: (
            "Send the same tools in every request of a conversation, also those that may not be "
            "used now; add new ones at the end of the list."
        ),
        Kind.COMPACTED: (
            "Nothing is wrong, but each compaction reads what follows it again: compact seldom, "
            "a large part at once, and leave what is before it as it is."
        ),
        Kind.UNKNOWN: "Compare the two texts where they part.",
    }
)
"""What a user can do about each kind."""

EDITED: Final = (
    "Leave earlier messages and results of tools as they were sent, and put what is new behind "
    "them: what follows a message that was edited is read again."
)
NO_TEXTS: Final = (
    "Start the server with --explain-texts to see both texts: without it, none of what is sent is "
    "kept or recorded."
)
NO_VOCAB: Final = "Show the tokens as text, with --model FILE, and compare the two where they part."
NOT_KEPT: Final = (
    "Look whether the cache was emptied, whether the server was started anew without a cache "
    "directory, and whether the earlier request might keep nothing (cache_mode)."
)

CHURN: Final = frozenset(
    {
        Kind.DATE,
        Kind.COUNTER,
        Kind.ORDER,
        Kind.NUMBER_FORMAT,
        Kind.WHITESPACE,
        Kind.REASONING_REMOVED,
        Kind.SYSTEM_CHANGED,
        Kind.TOOLS_CHANGED,
        Kind.COMPACTED,
    }
)
"""The kinds that a client causes, by sending what it sent before in another form."""

MEANING: Final = MappingProxyType(
    {
        Kind.NEW_TEXT: "the prompt goes on with, or asks, something new",
        Kind.UNKNOWN: "it is none of the other causes, or too little is known",
        Kind.DATE: "a date or a time changed",
        Kind.COUNTER: "a counter, a number or an id changed",
        Kind.ORDER: "keys, tools or lines came in another order",
        Kind.NUMBER_FORMAT: "a number was written otherwise",
        Kind.WHITESPACE: "white space changed",
        Kind.REASONING_REMOVED: "reasoning of an earlier turn was left out",
        Kind.SYSTEM_CHANGED: "the system prompt changed",
        Kind.TOOLS_CHANGED: "tools were added, removed or described otherwise",
        Kind.COMPACTED: "earlier messages were dropped, emptied or replaced",
    }
)
"""What happened, in words that quote nothing of what a client sent."""

EDITED_MEANING: Final = "an earlier message was edited, or a result of a tool is another"
"""The same of what is not known, but that it is in a message that is not new."""

TELLS_NO_TEXT: Final = frozenset(
    {
        Kind.SAME,
        Kind.FIRST_SEEN,
        Kind.EVICTED,
        Kind.NAMESPACE,
        Kind.SALT,
        Kind.NO_CHECKPOINT,
        Kind.TOKENIZATION,
    }
)
"""The kinds whose reasons are made of figures and of names of settings, never of a prompt."""
