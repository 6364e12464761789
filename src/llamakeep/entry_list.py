"""The entries of a prompt cache: in order, and found by what they share with a prompt.

Which entries there are is the truth; the rest follows from it: a `RadixIndex` of entries by their
tokens for each namespace, and sums. What follows is put aside while the truth changes. So an
interrupt in between leaves none, and it is made anew when somebody asks.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Final

import numpy as np

from llamakeep.entries import Entry, ratio
from llamakeep.errors import IntegrityError
from llamakeep.radix import RadixIndex
from llamakeep.tokens import IntArray

LEAST_KEEP: Final = 0.25
"""llama-server takes no entry of which less than this share would be reused."""
_FAR_BELOW: Final = round(1 / LEAST_KEEP) + 1
"""So many times longer than what it shares, an entry is below that, whatever is rounded."""

_in_order = attrgetter("sequence")


class EntryList:
    """Entries, in the order of their `sequence`. One thread at a time.

    Lookups cost what `RadixIndex` says: they follow the tokens, and visit entries that share enough
    of them. What the others are does not matter.
    """

    def __init__(self) -> None:
        self._entries: dict[Entry, None] = {}
        self._known: _Known | None = None

    def __repr__(self) -> str:
        return f"EntryList({len(self)} entries)"

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        """Yield the entries that are there now. Costs a pass over them, mostly without sorting."""
        return iter(sorted(self._entries, key=_in_order))

    def __contains__(self, entry: object) -> bool:
        return entry in self._entries

    @property
    def n_tokens(self) -> int:
        """Tokens of all entries."""
        return self._follow().n_tokens

    def add(self, entry: Entry) -> None:
        """Take an entry in, one that is not there."""
        known, self._known = self._follow(), None
        self._entries[entry] = None
        known.add(entry)
        self._known = known

    def remove(self, entry: Entry) -> None:
        """Take an entry out.

        Raises:
            KeyError: When it is not there; nothing is changed.
        """
        if entry not in self._entries:
            raise KeyError(f"{entry!r} is not in the list")
        known, self._known = self._follow(), None
        del self._entries[entry]
        known.remove(entry)
        self._known = known

    def clear(self) -> None:
        """Take all out."""
        self._known = None
        self._entries.clear()

    def containing(self, entry: Entry) -> Iterator[Entry]:
        """Yield those that begin with all tokens of `entry`, in no particular order."""
        return (each for _, each in self.sharing(entry.namespace, entry.tokens, entry.n_tokens))

    def prefixes(self, entry: Entry) -> list[Entry]:
        """Return those that `entry` begins with, in order."""
        index = self._follow().indexes.get(entry.namespace)
        found = index.prefixes(entry.tokens) if index is not None else []
        return sorted((each for _, same in found for each in same), key=_in_order)

    def sharing(
        self, namespace: bytes, tokens: IntArray, least: int
    ) -> Iterator[tuple[int, Entry]]:
        """Yield those that share at least `least` leading tokens, with how many they share.

        Those that share more come first, others in no particular order. The list must not change
        meanwhile.
        """
        index = self._follow().indexes.get(namespace)
        for shared, same in index.sharing(tokens, least) if index is not None else ():
            for entry in same:
                yield shared, entry

    def best_by_ratios(
        self, namespace: bytes, prompt: IntArray, common: int, keep: float
    ) -> tuple[int, Entry | None]:
        """Return llama-server's choice for a prompt, and how much of it that shares.

        One entry after the other, in order, takes the place of the best so far if both its ratios
        are above. So one that shares no more of the prompt than the slot need not be seen.

        Args:
            namespace: Of the request.
            prompt: The request.
            common: Tokens that it shares with what the slot holds.
            keep: Their share of what the slot holds; -1 for an empty one.

        Returns:
            Tokens shared, and the entry; None when none is better than the slot.
        """
        candidates = [
            (shared, entry)
            for shared, entry in self.sharing(namespace, prompt, common + 1)
            if entry.n_tokens <= shared * _FAR_BELOW
        ]
        candidates.sort(key=lambda pair: pair[1].sequence)
        best, best_shared, sim = None, common, ratio(common, prompt.size)
        for shared, entry in candidates:
            if shared <= best_shared:
                continue
            its_keep, its_sim = ratio(shared, entry.n_tokens), ratio(shared, prompt.size)
            if its_keep >= LEAST_KEEP and its_keep > keep and its_sim > sim:
                best, best_shared, keep, sim = entry, shared, its_keep, its_sim
        return best_shared, best

    def deepest(
        self, namespace: bytes, prompt: IntArray, reach: int, most: int
    ) -> tuple[int, Entry | None, int]:
        """Return the entry from which the most tokens of a prompt can be resumed.

        Of two that reach as far the one used last is the likelier to be used again.

        Args:
            namespace: Of the request.
            prompt: The request.
            reach: Tokens that can be resumed without any; only more is better.
            most: Tokens that may be resumed at most.

        Returns:
            Tokens that it shares with the prompt, the entry, and how many tokens can be resumed;
            None when none reaches further.
        """
        best, best_shared, best_reach = None, 0, reach
        for shared, entry in self.sharing(namespace, prompt, reach + 1):
            if min(shared, most) < best_reach:
                break
            its_reach = entry.reach(shared, most)
            if its_reach < best_reach or (its_reach == best_reach and best is None):
                continue
            if best is None or its_reach > best_reach or _used_after(entry, best):
                best, best_shared, best_reach = entry, shared, its_reach
        return best_shared, best, best_reach

    def reached_by_others(self, entry: Entry) -> int:
        """Return how many tokens of an entry can be resumed from another one.

        It is remembered until that changes, but for entries that resume at checkpoints only. Else
        it costs a visit of those that share more than the result.
        """
        known = self._follow()
        remembers = entry.namespace not in known.rolling
        reached = known.reached.get(entry) if remembers else None
        if reached is None:
            reached = 0
            for shared, other in self.sharing(entry.namespace, entry.tokens, 1):
                if shared <= reached:
                    break
                if other is not entry:
                    reached = max(reached, other.reach(shared, entry.n_tokens))
            if remembers and entry in self._entries:
                known.reached[entry] = reached
        return reached

    def _follow(self) -> _Known:
        """Return what follows from the entries, made anew if it was put aside."""
        if self._known is None:
            known = _Known()
            for entry in self._entries:
                known.add(entry)
            self._known = known
        return self._known

    def check(self) -> None:
        """Compare what follows from the entries with them.

        Raises:
            IntegrityError: With what differs.

        Costs as much as taking all entries in again.
        """
        known, again = self._follow(), EntryList()
        for entry in self._entries:
            again.add(entry)
        if known.n_tokens != again.n_tokens:
            raise IntegrityError(f"{known.n_tokens} tokens are counted, {again.n_tokens} are kept")
        found = set()
        for namespace, index in known.indexes.items():
            index.check()
            for tokens, same in index.items():
                for entry in same:
                    if entry.namespace != namespace or not np.array_equal(entry.tokens, tokens):
                        raise IntegrityError(f"{entry!r} is found by {tokens.size} other tokens")
                    found.add(entry)
        if found != self._entries.keys():
            raise IntegrityError(f"{len(found)} entries can be found, {len(self)} are kept")
        for entry, reached in known.reached.items():
            truth = again.reached_by_others(entry)
            if entry.namespace not in known.rolling and reached != truth:
                raise IntegrityError(f"others reach {truth} tokens of {entry!r}, not {reached}")


class _Known:
    """What follows from the entries.

    Attributes:
        indexes: Entries by tokens, for each namespace. Several may have the same tokens, with
            other checkpoints.
        n_tokens: Tokens of all entries.
        reached: How many tokens of an entry others can resume, as far as that is known.
        rolling: Namespaces with entries that resume at checkpoints only.
    """

    __slots__ = ("indexes", "n_tokens", "reached", "rolling")

    def __init__(self) -> None:
        self.indexes: dict[bytes, RadixIndex[list[Entry]]] = {}
        self.n_tokens = 0
        self.reached: dict[Entry, int] = {}
        self.rolling: set[bytes] = set()

    def add(self, entry: Entry) -> None:
        """Note an entry that came."""
        index = self.indexes.get(entry.namespace)
        if index is None:
            index = self.indexes[entry.namespace] = RadixIndex()
        if entry.rolling:
            self.rolling.add(entry.namespace)
        self._forget_closest(index, entry)
        same = index.get(entry.tokens)
        if same is None:
            index.insert(entry.tokens, [entry])
        else:
            same.append(entry)
        self.n_tokens += entry.n_tokens

    def remove(self, entry: Entry) -> None:
        """Note that an entry went."""
        index = self.indexes[entry.namespace]
        same = index.get(entry.tokens) or []
        same.remove(entry)
        if not same:
            index.remove(entry.tokens)
        self.reached.pop(entry, None)
        self._forget_closest(index, entry)
        if not len(index):
            del self.indexes[entry.namespace]
            self.rolling.discard(entry.namespace)
        self.n_tokens -= entry.n_tokens

    def _forget_closest(self, index: RadixIndex[list[Entry]], entry: Entry) -> None:
        """Forget what others can resume of those for whom that changes with `entry`.

        Of the entries that share the most with it, up to some point, two share as much with each
        other. So only one that is alone there gains or loses by it; all others have one that is as
        close. (Where entries resume at checkpoints only, nothing is remembered.)
        """
        _, closest = index.longest_common_prefix(entry.tokens)
        for each in closest or ():
            self.reached.pop(each, None)


def _used_after(one: Entry, other: Entry) -> bool:
    """Return whether `one` was used after `other`; of equals the one behind in the list was."""
    return (one.last_used, one.sequence) > (other.last_used, other.sequence)
