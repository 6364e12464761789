"""Grammars that are kept: each made once, the last used ones within a bound, failures as well."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from llamakeep.errors import GrammarError, IntegrityError
from llamakeep.gbnf import KeptGrammars

MOST = 40


def kept_by(kept: KeptGrammars[str], key: str, make: Callable[[], str]) -> str:
    """Return what is kept, or what is said of why there is none."""
    try:
        return kept.get(key, make)
    except GrammarError as error:
        return f"{error.where}{error}"


def length(key: str, found: str) -> int:
    """Return what counts of it: of a failure, what it says."""
    return len(key) + len(found.removeprefix("!"))


class Kept(RuleBasedStateMachine):
    """What is kept against a plain list, last used last."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: KeptGrammars[str] = KeptGrammars(MOST, len)
        self.model: list[tuple[str, str]] = []
        self.n_made = 0

    @rule(key=st.text("abc", max_size=2), size=st.integers(0, MOST + 1), fails=st.booleans())
    def get(self, key: str, size: int, fails: bool) -> None:
        before = self.n_made

        def make() -> str:
            self.n_made += 1
            text = "x" * size
            if fails:
                raise GrammarError(text, where="!")
            return text

        found = kept_by(self.kept, key, make)
        known = dict(self.model)
        if key in known:
            assert (found, self.n_made) == (known[key], before)
        else:
            assert self.n_made == before + 1
        if length(key, found) > MOST:
            return
        self.model = [each for each in self.model if each[0] != key] + [(key, found)]
        while sum(length(*each) for each in self.model) > MOST:
            del self.model[0]

    @invariant()
    def counts(self) -> None:
        assert self.kept.n_chars == sum(length(*each) for each in self.model)
        self.kept.check()


TestKept = Kept.TestCase


def test_a_failure_is_raised_anew_each_time() -> None:
    kept: KeptGrammars[str] = KeptGrammars(MOST, len)

    def fail() -> str:
        raise GrammarError("no", where="here")

    raised: list[GrammarError] = []
    for _ in range(2):
        with pytest.raises(GrammarError, match="no") as caught:
            kept.get("key", fail)
        raised.append(caught.value)
    assert raised[0] is not raised[1]


def test_a_count_that_is_wrong_is_found() -> None:
    kept: KeptGrammars[str] = KeptGrammars(MOST, len)
    kept.get("key", lambda: "text")
    kept._n_chars += 1
    with pytest.raises(IntegrityError, match="7 characters are counted as 8, at most 40"):
        kept.check()
