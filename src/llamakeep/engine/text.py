"""From tokens to text, as it comes: whole letters only, and nothing of a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class Writer:
    """Turns the bytes of tokens into text, and stops at the first stop string.

    What could still become part of a stop string is held back, and so are the first bytes of a
    letter whose rest has not come. Bytes that are no text become U+FFFD. Costs, for each piece,
    one search of the held text for each stop string.

    Args:
        stop: Texts that end it. Of several that begin at one place the longest counts.

    Attributes:
        stopped_by: The stop string that ended it, or "".
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self.stopped_by = ""
        self._stop = sorted(stop, key=len, reverse=True)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""

    def push(self, piece: bytes) -> str:
        """Add the bytes of a token; return the text that is certain now.

        After a stop string was found nothing is taken any more.
        """
        if self.stopped_by:
            return ""
        self._held += self._decoder.decode(piece)
        return self._release()

    def finish(self) -> str:
        """Return what is left, at the end of the answer; half a letter becomes U+FFFD."""
        if self.stopped_by:
            return ""
        self._held += self._decoder.decode(b"", final=True)
        text = self._release()
        if not self.stopped_by:
            text, self._held = text + self._held, ""
        return text

    def _release(self) -> str:
        held = self._held
        if not self._stop:
            self._held = ""
            return held
        found = [(at, -len(stop), stop) for stop in self._stop if (at := held.find(stop)) >= 0]
        if found:
            at, _, self.stopped_by = min(found)
            self._held = ""
            return held[:at]
        safe = len(held) - max(_overlap(held, stop) for stop in self._stop)
        self._held = held[safe:]
        return held[:safe]


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that `stop` begins with."""
    for n in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:n]):
            return n
    return 0
