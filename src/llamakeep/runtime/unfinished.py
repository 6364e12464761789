"""Letters that a token leaves unfinished.

llama.cpp reads bytes for a grammar without asking whether they are UTF-8: a letter written too
long, half of a surrogate pair, or one above U+10FFFF counts as one letter, and becomes several
U+FFFD in the answer. So bytes that can become no letter are refused.
"""

from __future__ import annotations

import codecs
from typing import Final

_UTF8: Final = codecs.getincrementaldecoder("utf-8")
_SURROGATES: Final = 0xED
"""First byte of a surrogate, and of other letters with a second byte below `_FIRST_SURROGATE`."""
_FIRST_SURROGATE: Final = 0xA0


def letters_of(data: bytes) -> tuple[str, bytes] | None:
    """Return the letters in some bytes, and the begin of one at the end, or None.

    Args:
        data: They begin where a letter does.
    """
    decoder = _UTF8()
    try:
        letters = decoder.decode(data)
    except UnicodeDecodeError:
        return None
    rest = decoder.getstate()[0]
    if len(rest) > 1 and rest[0] == _SURROGATES and rest[1] >= _FIRST_SURROGATE:
        return None
    return letters, rest
