"""From tokens to text, as it comes: whole letters only, and nothing of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class Writer:
    """Turns the bytes of tokens into text, and stops at the first stop string that is complete.

    What could still become part of a stop string is held back, and so are the first bytes of a
    letter whose rest has not come. Bytes that are no text become U+FFFD. Costs, for each letter, a
    step of each stop string's automaton.

    Args:
        stop: Texts that end it. Of several that end at one place the longest counts.

    Attributes:
        stopped_by: The stop string that ended it, or "".
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self.stopped_by = ""
        self._stop = [_Automaton(text) for text in sorted(set(stop), key=len, reverse=True)]
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def push(self, piece: bytes) -> str:
        """Add the bytes of a token; return the text that is certain now.

        After a stop string was found nothing is taken any more.
        """
        if self.stopped_by:
            return ""
        return self._take(self._decoder.decode(piece))

    def finish(self) -> str:
        """Return what is left, at the end of the answer; half a letter becomes U+FFFD."""
        if self.stopped_by:
            return ""
        text = self._take(self._decoder.decode(b"", final=True))
        if not self.stopped_by:
            text, self._held = text + self._held, ""
        return text

    def _take(self, text: str) -> str:
        if not self._stop:
            return text
        before = len(self._held)
        self._held += text
        for at, letter in enumerate(text, before + 1):
            for automaton in self._stop:
                if automaton.step(letter):
                    self.stopped_by = automaton.text
                    text, self._held = self._held[: at - len(automaton.text)], ""
                    return text
        safe = len(self._held) - max(automaton.matched for automaton in self._stop)
        text, self._held = self._held[:safe], self._held[safe:]
        return text


class _Automaton:
    """Knows how much of a text the letters so far end with (Knuth, Morris and Pratt).

    Attributes:
        text: What it looks for.
        matched: How many letters of it.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._falls = [0] * len(text)
        matched = 0
        for at in range(1, len(text)):
            while matched and text[at] != text[matched]:
                matched = self._falls[matched - 1]
            matched += text[at] == text[matched]
            self._falls[at] = matched

    def step(self, letter: str) -> bool:
        """Go on by a letter; return whether the text is complete."""
        while self.matched and self.text[self.matched] != letter:
            self.matched = self._falls[self.matched - 1]
        self.matched += self.text[self.matched] == letter
        return self.matched == len(self.text)
