"""Sizes in bytes as people write and read them."""

from __future__ import annotations

import re

from llamakeep.errors import InvalidValue

_UNITS = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(text: str) -> int:
    """Return the bytes that `text` means.

    Example:
        >>> parse_bytes("8GiB"), parse_bytes("1.5 MiB"), parse_bytes("4096")
        (8589934592, 1572864, 4096)

    Args:
        text: A number, alone or with B, KiB, MiB, GiB or TiB.

    Raises:
        InvalidValue: For anything else; GB and the like are refused because they are ambiguous.
    """
    found = _SIZE.fullmatch(text)
    unit = _UNITS.get(found.group(2).lower()) if found else None
    if found is None or unit is None:
        raise InvalidValue(f"a size is written like 512MiB or 8GiB, not {text!r}")
    return int(float(found.group(1)) * unit) if "." in found.group(1) else int(found[1]) * unit


def format_bytes(n_bytes: float) -> str:
    """Return a size as people read it, three digits or so.

    Example:
        >>> format_bytes(0), format_bytes(1536), format_bytes(8 << 30)
        ('0 B', '1.50 KiB', '8.00 GiB')
    """
    value, unit = float(n_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    if unit == "B":
        return f"{int(value)} B"
    return f"{value:.{max(0, 2 - len(str(int(abs(value)))) + 1)}f} {unit}"
