"""Why two conversations part: the first thing that differs, and what kind of difference it is."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from llamakeep.explain import marks
from llamakeep.explain.churn import Found, Proof, classify
from llamakeep.explain.conversation import Conversation, Leaf, Message
from llamakeep.explain.divergence import NOWHERE, Around, around, common_text
from llamakeep.explain.kinds import Kind
from llamakeep.explain.ordering import dumps, loads, same_content

SURE: Final = Proof()
NEW_MESSAGE: Final = Proof(same_chars=200, ends_count=False, says_when=False)
"""In text that is new, a date is content; unless much follows that is not new."""
LOOSE: Final = Proof(ends_count=False)
"""In a text of which nothing is known."""

_SHOWN_CHARS: Final = 60
_MOST_MOVED: Final = 16


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is to be said of two prompts.

    Attributes:
        kind: Why they part.
        reason: In a sentence.
        part: What part of the request it is, or "".
        char_index: Where they part: in the text of that part, or of the prompt.
        around: What stands there.
    """

    kind: Kind
    reason: str
    part: str = ""
    char_index: int | None = None
    around: Around = NOWHERE


def compare(before: Conversation, after: Conversation) -> Verdict:
    """Return the first difference of two conversations, in the order of a prompt.

    Costs a comparison of all messages up to there, and of a few thousand characters behind it.
    """
    if before.salt != after.salt:
        return Verdict(Kind.SALT, "the two were sent with different salts", "cache_salt")
    return (
        _compare_settings(before.settings, after.settings)
        or _compare_tools(before, after)
        or _compare_messages(before, after)
    )


def shown(value: object) -> str:
    """Return a value as a sentence can quote it."""
    text = value if isinstance(value, str) else dumps(value)
    text = text.encode("unicode_escape").decode() if not text.isprintable() else text
    return repr(text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}...")


def say(found: Found, part: str) -> str:
    """Return a sentence about what was found in a part of a prompt."""
    words = _WORDS[found.kind].format(part=part or "the prompt")
    if found.before or found.after:
        words += f": {shown(found.before)} before, {shown(found.after)} now"
    return words


_WORDS: Final = {
    Kind.DATE: "{part} has another date or time",
    Kind.COUNTER: "{part} has another counter or id",
    Kind.ORDER: "{part} says the same in another order",
    Kind.NUMBER_FORMAT: "{part} has a number in another form",
    Kind.WHITESPACE: "{part} differs in white space",
}


# -- settings and tools ----------------------------------------------------------------------------


def _compare_settings(before: Mapping[str, Any], after: Mapping[str, Any]) -> Verdict | None:
    for name in sorted({*before, *after}):
        one, other = before.get(name), after.get(name)
        kind = same_content(one, other)
        if kind is Kind.SAME:
            continue
        if kind is not None:
            return Verdict(kind, say(Found(kind), name), name)
        reason = f"{name} is {shown(other)}, and was {shown(one)}: the template writes another text"
        return Verdict(Kind.UNKNOWN, reason, name)
    return None


def _compare_tools(before: Conversation, after: Conversation) -> Verdict | None:
    one, other = before.tools, after.tools
    if [dumps(each) for each in one] == [dumps(each) for each in other]:
        return None
    path = after.tools_path
    kind = same_content(list(one), list(other))
    if kind is Kind.ORDER:
        names = [[_name(tool) for tool in side] for side in (one, other)]
        if names[0] != names[1]:
            reason = f"the tools are the same in another order: {shown(_first(*names))}"
            return Verdict(Kind.ORDER, reason, f"{path} order")
    for index, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if dumps(mine) == dumps(theirs):
            continue
        part = f"{path}[{index}]"
        if kind is not None:
            return Verdict(kind, say(Found(kind), f"{part} ({_name(theirs)})"), part)
        if _name(mine) == _name(theirs):
            return _in_json(part, mine, theirs) or Verdict(
                Kind.TOOLS_CHANGED, f"the tool {_name(theirs)!r} is described otherwise", part
            )
        break
    return _changed_set(one, other, path)


def _changed_set(one: Sequence[Any], other: Sequence[Any], path: str) -> Verdict:
    names = [{_name(tool) for tool in side} for side in (one, other)]
    added, removed = sorted(names[1] - names[0]), sorted(names[0] - names[1])
    said = [
        f"{word} {', '.join(map(shown, which[:4]))}{' and more' if len(which) > 4 else ''}"
        for word, which in (("with", added), ("without", removed))
        if which
    ]
    reason = f"the tools are others: {' and '.join(said) or 'the same names, told otherwise'}"
    return Verdict(Kind.TOOLS_CHANGED, reason, path)


def _name(tool: Any) -> str:
    inner = tool.get("function", tool) if isinstance(tool, Mapping) else tool
    name = inner.get("name") if isinstance(inner, Mapping) else None
    return name if isinstance(name, str) else "?"


def _first(one: Sequence[str], other: Sequence[str]) -> str:
    pairs = zip(one, other, strict=False)
    return next((f"{mine} before, {theirs} now" for mine, theirs in pairs if mine != theirs), "")


def _in_json(path: str, before: Any, after: Any) -> Verdict | None:
    """Return what kind the first different value within two JSON values is of, if it is of one."""
    if isinstance(before, dict) and isinstance(after, dict) and list(before) == list(after):
        pairs = [(f"{path}.{key}", before[key], after[key]) for key in before]
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = [(f"{path}[{i}]", a, b) for i, (a, b) in enumerate(zip(before, after, strict=True))]
    else:
        return _in_value(path, before, after)
    for inner, mine, theirs in pairs:
        kind = same_content(mine, theirs)
        if kind is not None and kind is not Kind.SAME:
            return Verdict(kind, say(Found(kind), inner), inner)
        if kind is None:
            return _in_json(inner, mine, theirs)
    return None


def _in_value(path: str, before: Any, after: Any) -> Verdict | None:
    if isinstance(before, str) and isinstance(after, str):
        at = common_text(before, after)
        found = classify(before, after, at, SURE)
        found = found or _by_name(path, before, after)
        if found is not None:
            near = around(before, after, at)
            return Verdict(found.kind, say(found, path), path, at, near)
        return None
    scalars = all(isinstance(each, (int, float, str)) for each in (before, after))
    found = _by_name(path, before, after) if scalars else None
    return Verdict(found.kind, say(found, path), path) if found is not None else None


def _by_name(path: str, before: Any, after: Any) -> Found | None:
    """Return what a field's name says of its value, if both are one word or number."""
    words = [str(each) for each in (before, after)]
    if not all(0 < len(word) <= 80 and " " not in word.strip() for word in words):
        return None
    if marks.ID_KEYS.search(path):
        return Found(Kind.COUNTER, *words)
    dated = marks.DATE_KEYS.search(path) and all(any(map(str.isdigit, word)) for word in words)
    return Found(Kind.DATE, *words) if dated else None


# -- messages --------------------------------------------------------------------------------------


def _compare_messages(before: Conversation, after: Conversation) -> Verdict:
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
            if sorted(old[:size]) == sorted(new[:size]):
                reason = f"{size} messages from {path} on come in another order"
                return Verdict(Kind.ORDER, reason, path)
        return None

    def compacted(self) -> Verdict | None:
        """Whether history was dropped, emptied, or replaced by a summary."""
        old, new = self.our_keys[self.first :], self.their_keys[self.first :]
        gone = [key for key in old if key not in set(new)]
        path = self.after.path
        told = [message.text for message in self.theirs[self.first : self.first + 2]]
        known = "\n".join(message.text for message in self.ours)
        says = any(marks.SUMMARY.search(text) and text not in known for text in told)
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
        if all(marks.THOUGHT.search(message.text) for message in dropped):
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
            kind = Kind.WHITESPACE
        if kind is not None:
            return Verdict(kind, say(Found(kind), part), part)
        return None if self.is_new else _in_json(part, *(_parsed(leaf.value) for leaf in pair))

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
            is_new = self.is_new or not same_conversation
            found = _json_texts(one, other) or classify(
                one, other, at, NEW_MESSAGE if is_new else SURE
            )
        if found is None:
            return None
        return Verdict(found.kind, say(found, part), part, theirs.start + at, near)

    def by_place(self) -> Verdict:
        """Return what can be said if only the place of the difference is known."""
        before, after, path = self.before, self.after, self.after.path
        if self.first == 0 and (before.is_system or after.is_system):
            return self._system_changed()
        if before.is_system and after.is_system and self.rendered:
            return self._system_changed()
        if self.is_new or (after.role == "user" and not self.is_resumed):
            return Verdict(Kind.NEW_TEXT, f"{path} is new", path)
        if before.role != after.role:
            return Verdict(Kind.UNKNOWN, f"{path} is of {after.role}, and was of {before.role}")
        if any(leaf.what == "reasoning" for leaf in before.leaves):
            thought = [leaf for leaf in after.leaves if leaf.what == "reasoning"]
            if not thought:
                reason = f"{path} came without the reasoning that it had"
                return Verdict(Kind.REASONING_REMOVED, reason, path)
        return Verdict(Kind.UNKNOWN, f"{path} is another text, for no reason that shows")

    def _system_changed(self) -> Verdict:
        before, after = self.before, self.after
        if not before.is_system:
            return Verdict(Kind.SYSTEM_CHANGED, "there is a system prompt now, and was none")
        if not after.is_system:
            return Verdict(Kind.SYSTEM_CHANGED, "there was a system prompt, and is none now")
        pair = self.leaves
        if self.rendered and pair is not None:
            text, at = pair[1].value, common_text(pair[0].value, pair[1].value)
            opened = [text.rfind(f"<{name}>", 0, at) for name in ("tools", "functions")]
            closed = [text.rfind(f"</{name}>", 0, at) for name in ("tools", "functions")]
            if max(opened) > max(closed):
                return Verdict(Kind.TOOLS_CHANGED, "the tools in the system prompt are others")
        return Verdict(Kind.SYSTEM_CHANGED, "the system prompt is another")


def _is_emptied(before: str, after: str) -> bool:
    # A word that was there before is no sign that something was taken away.
    found = marks.EMPTIED.search(after) or marks.SUMMARY.search(after)
    return found is not None and found.group() not in before and 2 * len(after) < len(before)


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
            text = marks.REASONING.sub("", leaf.value)
            thought = thought or text != leaf.value
            said.append(marks.ANSWER_MARK.sub("", text).strip())
        else:
            said.append([leaf.what, leaf.value])
    return thought, dumps([each for each in said if each != ""])


def _shape(text: str) -> str:
    """Return what ids of one maker have in common: their prefix."""
    return re.split(r"[_-]", text, maxsplit=1)[0] if re.search(r"[_-]", text) else ""
