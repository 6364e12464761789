"""Why two lists of messages part."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from llamakeep.explain import marks
from llamakeep.explain.churn import Found, classify
from llamakeep.explain.conversation import ROLES, Conversation, Leaf, Message
from llamakeep.explain.divergence import around
from llamakeep.explain.kinds import Kind
from llamakeep.explain.ordering import dumps, goes_on_alike, loads, same_content
from llamakeep.explain.reasoning import is_reasoning, without_reasoning
from llamakeep.explain.values import in_json
from llamakeep.explain.verdict import GIVEN, NEW_MESSAGE, SURE, Verdict, moved_keys, say
from llamakeep.texts import common_text
from llamakeep.tool_calls.described import ABOUT, ENDS

_TOOL_MARKS: Final = ("<tools>", "<functions>", "[AVAILABLE_TOOLS]")
_TOOL_ENDS: Final = ("</tools>", "</functions>", "[/AVAILABLE_TOOLS]")
_MOST_MOVED: Final = 16
_END_CHARS: Final = 4096


def compare_messages(before: Conversation, after: Conversation) -> Verdict:
    """Return the first difference of the messages of two conversations."""
    ours, theirs = before.messages, after.messages
    keys = [[message.key for message in side] for side in (ours, theirs)]
    shorter = min(len(ours), len(theirs))
    pairs = zip(keys[0], keys[1], strict=False)
    first = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
    if first == len(theirs):
        what = "nothing differs" if first == len(ours) else "it is the beginning of the stored one"
        return Verdict(Kind.SAME, what)
    if first == len(ours):
        path = theirs[first].path
        return Verdict(Kind.NEW_TEXT, f"the prompt goes on from {path}", path)
    pair = _Pair(ours, theirs, keys[0], keys[1], first, after.rendered)
    found = pair.moved() or pair.compacted() or pair.without_reasoning() or pair.classified()
    return pair.placed(found or pair.by_place())


@dataclass(frozen=True, slots=True)
class _Pair:
    """Two lists of messages that differ from the message `first` on."""

    ours: Sequence[Message]
    theirs: Sequence[Message]
    our_keys: Sequence[str]
    their_keys: Sequence[str]
    first: int
    rendered: bool

    @property
    def before(self) -> Message:
        return self.ours[self.first]

    @property
    def after(self) -> Message:
        return self.theirs[self.first]

    @property
    def leaves(self) -> tuple[Leaf, Leaf] | None:
        """The first two leaves that differ, if both say the same sort of thing."""
        for mine, theirs in zip(self.before.leaves, self.after.leaves, strict=False):
            if mine.what != theirs.what:
                return None
            if dumps(mine.value) != dumps(theirs.value):
                return mine, theirs
        return None

    @property
    def is_resumed(self) -> bool:
        """Whether later messages are there on both sides: it is the same conversation."""
        later = set(self.our_keys[self.first + 1 :])
        return any(key in later for key in self.their_keys[self.first + 1 :])

    @property
    def is_new(self) -> bool:
        """Whether the new prompt has not been answered from there on: that is what is new in it."""
        rest = self.theirs[self.first :]
        if self.after.is_system and len(rest) > 1:
            return False
        answered = [
            message for message in rest if message.role == "assistant" and message.text.strip()
        ]
        return len(rest) == 1 or not answered

    def placed(self, verdict: Verdict) -> Verdict:
        """Return a verdict with the place of the first difference, unless it has one."""
        if verdict.char_index is not None:
            return verdict
        pair = self.leaves
        if pair is None or not isinstance(pair[0].value, str) or not isinstance(pair[1].value, str):
            part = verdict.part or (pair[1].path if pair else self.after.path)
            return replace(verdict, part=part)
        at = common_text(pair[0].value, pair[1].value)
        near = around(pair[0].value, pair[1].value, at)
        start = pair[1].start
        return replace(
            verdict, part=verdict.part or pair[1].path, char_index=start + at, around=near
        )

    # -- each kind -------------------------------------------------------------------------------

    def moved(self) -> Verdict | None:
        """Whether the same messages, or parts of this one, come in another order."""
        path = self.after.path
        parts = [
            sorted(dumps([leaf.what, leaf.value]) for leaf in message.leaves)
            for message in (self.before, self.after)
        ]
        if self.before.role == self.after.role and parts[0] == parts[1]:
            return Verdict(Kind.ORDER, f"the parts of {path} come in another order", path)
        old, new = self.our_keys[self.first :], self.their_keys[self.first :]
        for size in range(2, 1 + min(_MOST_MOVED, len(old), len(new))):
            if sorted(old[:size]) == sorted(new[:size]) and goes_on_alike(old, new, size):
                reason = f"{size} messages from {path} on come in another order"
                return Verdict(Kind.ORDER, reason, path)
        return None

    def compacted(self) -> Verdict | None:
        """Whether history was dropped, emptied, or replaced by a summary."""
        old, new = self.our_keys[self.first :], self.their_keys[self.first :]
        there = set(new)
        gone = [key for key in old if key not in there]
        path = self.after.path
        # A system prompt that differs is a cause of its own, unless the summary is in it.
        n_told = 1 if self.after.is_system else 2
        told = [message.text for message in self.theirs[self.first : self.first + n_told]]
        known = "\n".join(message.text for message in self.ours)
        says = any(marks.SUMMARY.search(_ends(text)) and text not in known for text in told)
        fewer = len(new) < len(old) or sum(map(len, new)) < sum(map(len, old))
        if says and fewer and len(gone) >= 2:
            reason = f"{path} stands for {len(gone)} messages that are no longer there"
            return Verdict(Kind.COMPACTED, reason, path)
        if new[0] in old[1:]:
            return self._dropped(old.index(new[0], 1))
        pair = self.leaves
        if pair is not None and self.is_resumed:
            one, other = (leaf.value for leaf in pair)
            if isinstance(one, str) and isinstance(other, str) and _is_emptied(one, other):
                reason = f"{pair[1].path} was emptied: {len(one):,} characters before"
                return Verdict(Kind.COMPACTED, reason, pair[1].path)
        return None

    def _dropped(self, n_messages: int) -> Verdict | None:
        """Return what it means that so many messages are not there any more."""
        dropped, path = self.ours[self.first : self.first + n_messages], self.after.path
        if any(message.is_system for message in dropped):
            return None
        if all(is_reasoning(message.text) for message in dropped):
            reason = f"the reasoning before {path} is no longer there"
            return Verdict(Kind.REASONING_REMOVED, reason, path)
        what = "a message" if n_messages == 1 else f"{n_messages} messages"
        return Verdict(Kind.COMPACTED, f"{what} before {path} went missing", path)

    def without_reasoning(self) -> Verdict | None:
        """Whether the message is the same but for what the model thought."""
        if self.before.role != self.after.role or self.before.role not in ("assistant", "?"):
            return None
        one, other = (_told(message) for message in (self.before, self.after))
        if one[0] and not other[0] and one[1] == other[1]:
            reason = f"{self.after.path} came without the reasoning that it had"
            return Verdict(Kind.REASONING_REMOVED, reason)
        return None

    def classified(self) -> Verdict | None:
        """Whether one of the small causes can be proven."""
        pair = self.leaves
        if pair is None or self.before.role != self.after.role:
            return None
        mine, theirs = pair
        part = theirs.path
        if isinstance(mine.value, str) and isinstance(theirs.value, str):
            return self._in_text(mine, theirs)
        kind = same_content(*(_parsed(leaf.value) for leaf in pair))
        if kind is Kind.SAME:
            reason = f"{part} says the same in another form, which a template may write otherwise"
            return Verdict(Kind.UNKNOWN, reason, part)
        if kind is not None:
            moved = moved_keys(_parsed(mine.value), _parsed(theirs.value))
            return Verdict(kind, say(Found(kind), part) + moved, part)
        if self.is_new:
            return None
        proof = GIVEN if mine.what == "arguments" else SURE
        return in_json(part, _parsed(mine.value), _parsed(theirs.value), proof)

    def _in_text(self, mine: Leaf, theirs: Leaf) -> Verdict | None:
        one, other, part = mine.value, theirs.value, theirs.path
        at = common_text(one, other)
        near = around(one, other, at)
        if mine.what == "id":
            found: Found | None = Found(Kind.COUNTER, one, other)
            if self.is_new or _shape(one) != _shape(other):
                found = None
        else:
            same_conversation = self.after.is_system or (
                self.after.role == "assistant" or self.is_resumed
            )
            is_new = (self.is_new and not self.after.is_system) or not same_conversation
            proof = NEW_MESSAGE if is_new else GIVEN if mine.what == "arguments" else SURE
            found = _json_texts(one, other) or classify(one, other, at, proof)
        if found is None:
            return None
        reason = say(found, part)
        if found.kind is Kind.ORDER:
            reason += moved_keys(loads(one), loads(other))
        return Verdict(found.kind, reason, part, theirs.start + at, near)

    def by_place(self) -> Verdict:
        """Return what can be said if only the place of the difference is known."""
        before, after, path = self.before, self.after, self.after.path
        if self.rendered and self._tools_differ():
            return Verdict(Kind.TOOLS_CHANGED, f"the tools told in {path} are others")
        if self.first == 0 and (before.is_system or after.is_system):
            return self._system_changed()
        if before.is_system and after.is_system and self.rendered:
            return self._system_changed()
        if self.is_new or (after.role == "user" and not self.is_resumed):
            return Verdict(Kind.NEW_TEXT, f"{path} is new", path)
        if before.role != after.role:
            roles = [role if role in ROLES else "?" for role in (after.role, before.role)]
            return Verdict(Kind.UNKNOWN, f"{path} is of {roles[0]}, and was of {roles[1]}")
        if any(leaf.what == "reasoning" for leaf in before.leaves):
            thought = [leaf for leaf in after.leaves if leaf.what == "reasoning"]
            if not thought:
                reason = f"{path} came without the reasoning that it had"
                return Verdict(Kind.REASONING_REMOVED, reason, path)
        if after.role == "tool" or any(leaf.what == "tool_result" for leaf in after.leaves):
            reason = f"{path}: another result of a tool stands where one was before"
            return Verdict(Kind.UNKNOWN, reason)
        return Verdict(Kind.UNKNOWN, f"{path}: an earlier message was edited, and is another text")

    def _system_changed(self) -> Verdict:
        before, after = self.before, self.after
        if not before.is_system:
            return Verdict(Kind.SYSTEM_CHANGED, "there is a system prompt now, and was none")
        if not after.is_system:
            return Verdict(Kind.SYSTEM_CHANGED, "there was a system prompt, and is none now")
        return Verdict(Kind.SYSTEM_CHANGED, "the system prompt is another")

    def _tools_differ(self) -> bool:
        """Whether two texts part where one of them tells of tools."""
        one, other = self.before, self.after
        texts = [one.text, other.text]
        if one.is_system is not other.is_system:  # a message that does nothing but tell of them
            told = texts[0] if one.is_system else texts[1]
            return told.lstrip().startswith((ABOUT, *_TOOL_MARKS))
        at = common_text(*texts)
        if any(text[at:].lstrip().startswith((ABOUT, *_TOOL_MARKS)) for text in texts):
            return True
        text = texts[1]
        for opens, closes in ((ABOUT, ENDS), *zip(_TOOL_MARKS, _TOOL_ENDS, strict=True)):
            start = text.rfind(opens, 0, at)
            if start >= 0 and text.find(closes, start, at) < 0:
                return True
        return False


def _is_emptied(before: str, after: str) -> bool:
    # A word that was there before is no sign that something was taken away.
    if 2 * len(after) >= len(before):
        return False
    found = marks.EMPTIED.search(_ends(after)) or marks.SUMMARY.search(_ends(after))
    return found is not None and found.group() not in before


def _ends(text: str) -> str:
    """Return the beginning and the end of a text, where it says what it stands for."""
    if len(text) <= 2 * _END_CHARS:
        return text
    return f"{text[:_END_CHARS]}\n{text[-_END_CHARS:]}"


def _parsed(value: Any) -> Any:
    parsed = loads(value) if isinstance(value, str) else None
    return value if parsed is None else parsed


def _json_texts(one: str, other: str) -> Found | None:
    """Return how two texts that are JSON as a whole differ, if they say the same."""
    mine, theirs = loads(one), loads(other)
    if mine is None or theirs is None:
        return None
    kind = same_content(mine, theirs)
    if kind is Kind.SAME:
        kind = Kind.WHITESPACE if "".join(one.split()) == "".join(other.split()) else None
    return Found(kind) if kind is not None else None


def _told(message: Message) -> tuple[bool, str]:
    """Return whether a message has reasoning, and all of it that is none."""
    thought = False
    said: list[Any] = []
    for leaf in message.leaves:
        if leaf.what == "reasoning":
            thought = True
        elif leaf.what == "text" and isinstance(leaf.value, str):
            text = without_reasoning(leaf.value)
            thought = thought or text != leaf.value.strip()
            said.append(text)
        else:
            said.append([leaf.what, leaf.value])
    return thought, dumps([each for each in said if each != ""])


def _shape(text: str) -> str:
    """Return what ids of one maker have in common: their prefix."""
    return re.split(r"[_-]", text, maxsplit=1)[0] if re.search(r"[_-]", text) else ""
