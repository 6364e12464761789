"""The prompt cache as llama-server's is written: it looks at every entry, for every question."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from llamakeep.entries import Entry, ratio
from llamakeep.entry_list import LEAST_KEEP, EntryList
from llamakeep.events import LoadBase, LoadFound
from llamakeep.prompt_cache import PromptCache
from llamakeep.tokens import IntArray, common_prefix


class PlainEntries(EntryList):
    """A list without an index."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: list[Entry] = []

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(sorted(self.entries, key=lambda entry: entry.sequence))

    def __contains__(self, entry: object) -> bool:
        return any(each is entry for each in self.entries)

    @property
    def n_tokens(self) -> int:
        return sum(entry.n_tokens for entry in self.entries)

    def add(self, entry: Entry) -> None:
        self.entries.append(entry)

    def remove(self, entry: Entry) -> None:
        self.entries.remove(entry)

    def clear(self) -> None:
        self.entries.clear()

    def containing(self, entry: Entry) -> Iterator[Entry]:
        for each, shared in self._of_namespace(entry.namespace, entry.tokens):
            if shared == entry.n_tokens:
                yield each

    def prefixes(self, entry: Entry) -> list[Entry]:
        pairs = self._of_namespace(entry.namespace, entry.tokens)
        return [each for each, shared in pairs if shared == each.n_tokens]

    def sharing(
        self, namespace: bytes, tokens: IntArray, least: int
    ) -> Iterator[tuple[int, Entry]]:
        pairs = self._of_namespace(namespace, tokens)
        found = [(shared, each) for each, shared in pairs if shared >= least]
        return iter(sorted(found, key=lambda pair: -pair[0]))

    def reached_by_others(self, entry: Entry) -> int:
        reached = (
            each.reach(shared, entry.n_tokens)
            for each, shared in self._of_namespace(entry.namespace, entry.tokens)
            if each is not entry
        )
        return max(reached, default=0)

    def check(self) -> None:
        pass

    def _of_namespace(self, namespace: bytes, tokens: IntArray) -> list[tuple[Entry, int]]:
        mine = [entry for entry in self if entry.namespace == namespace]
        return [(entry, common_prefix(entry.tokens, tokens)) for entry in mine]


class PlainPromptCache(PromptCache):
    """Chooses by one loop over all entries, oldest first."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._entries = PlainEntries()

    def _choose(
        self, held: IntArray, prompt: IntArray, reach: int, most: int, namespace: bytes
    ) -> tuple[Entry | None, int]:
        common = common_prefix(held, prompt)
        keep = ratio(common, held.size) if held.size else -1.0
        sim = ratio(common, prompt.size)
        self._emit(LoadBase(keep, sim))
        best, best_reach = None, reach
        for entry in self._entries:
            if entry.namespace != namespace:
                continue
            shared = common_prefix(entry.tokens, prompt)
            its_keep, its_sim = ratio(shared, entry.n_tokens), ratio(shared, prompt.size)
            if self.mode == "keep":
                its_reach = entry.reach(shared, most)
                if its_reach < best_reach or (its_reach == best_reach and best is None):
                    continue
                if best and its_reach == best_reach and entry.last_used < best.last_used:
                    continue
                best_reach = its_reach
            elif its_keep < LEAST_KEEP or its_keep <= keep or its_sim <= sim:
                continue
            best, keep, sim = entry, its_keep, its_sim
        if best is not None:
            self._emit(LoadFound(keep, sim))
            return best, best_reach if self.mode == "keep" else best.n_tokens
        return None, 0
