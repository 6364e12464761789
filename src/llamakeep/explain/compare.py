"""Why two conversations part: the first thing that differs, and what kind of difference it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from llamakeep.explain.churn import Found
from llamakeep.explain.conversation import Conversation
from llamakeep.explain.kinds import Kind
from llamakeep.explain.likeness import related
from llamakeep.explain.messages import compare_messages
from llamakeep.explain.ordering import dumps, same_content
from llamakeep.explain.values import in_json
from llamakeep.explain.verdict import Verdict, moved_keys, say, shown


def compare(before: Conversation, after: Conversation, *, settings: bool = True) -> Verdict:
    """Return the first difference of two conversations, in the order of a prompt.

    Two that have nothing in common but how prompts begin are two conversations, and none has
    changed. Costs a comparison of all messages up to there, and of a few thousand characters
    behind it.

    Args:
        before: The conversation that was there.
        after: The one that is there now.
        settings: What changes the template's text may be the difference; False where it is known
            that it is not.
    """
    if before.salt != after.salt:
        return Verdict(Kind.SALT, "the two were sent with different salts", "cache_salt")
    found = _compare_settings(before.settings, after.settings) if settings else None
    if found is not None:
        return found
    found = _compare_tools(before, after) or compare_messages(before, after)
    if found.kind in (Kind.SYSTEM_CHANGED, Kind.TOOLS_CHANGED) and not related(before, after):
        reason = "it is another conversation: the two share no more than how a prompt begins"
        return replace(found, kind=Kind.FIRST_SEEN, reason=reason)
    return found


def _compare_settings(before: Mapping[str, Any], after: Mapping[str, Any]) -> Verdict | None:
    for name in sorted({*before, *after}):
        one, other = before.get(name), after.get(name)
        kind = same_content(one, other)
        if kind is Kind.SAME:
            continue
        if kind is not None:
            return Verdict(kind, say(Found(kind), name) + moved_keys(one, other), name)
        sides = ["not given" if each is None else shown(each) for each in (other, one)]
        reason = f"{name} is {sides[0]}, and was {sides[1]}: the template writes another text"
        return Verdict(Kind.UNKNOWN, reason, name)
    return None


def _compare_tools(before: Conversation, after: Conversation) -> Verdict | None:
    one, other = before.tools, after.tools
    if [dumps(each) for each in one] == [dumps(each) for each in other]:
        return None
    path = after.tools_path
    kind = same_content({"tools": list(one)}, {"tools": list(other)})
    if kind is Kind.ORDER:
        names = [[_name(tool) for tool in side] for side in (one, other)]
        if names[0] != names[1]:
            reason = f"the tools are the same in another order: {_first(*names)}"
            return Verdict(Kind.ORDER, reason, f"{path} order")
    for index, (mine, theirs) in enumerate(zip(one, other, strict=False)):
        if dumps(mine) == dumps(theirs):
            continue
        part = f"{path}[{index}]"
        if kind is not None:
            reason = say(Found(kind), f"{part} ({_name(theirs)})") + moved_keys(mine, theirs)
            return Verdict(kind, reason, part)
        if _name(mine) == _name(theirs):
            return in_json(part, mine, theirs) or Verdict(
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
    differ = (pair for pair in pairs if pair[0] != pair[1])
    return next((f"{shown(mine)} before, {shown(theirs)} now" for mine, theirs in differ), "")
