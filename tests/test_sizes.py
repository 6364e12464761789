from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamakeep.errors import InvalidValue
from llamakeep.sizes import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("4096", 4096),
        ("512MiB", 512 << 20),
        (" 8 gib ", 8 << 30),
        ("1.5KiB", 1536),
        ("2TiB", 2 << 40),
        ("7B", 7),
        ("18014398509481985", (1 << 54) + 1),
    ],
)
def test_sizes_are_read(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "8GB", "8 G", "1e9", "nan", "٣", "8GiB8", "0x10"]
)
def test_what_is_no_size_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidValue, match="512MiB or 8GiB, not "):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("n_bytes", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (10 << 20, "10.0 MiB"),
        (123 << 30, "123 GiB"),
        (5000 << 40, "5000 TiB"),
    ],
)
def test_sizes_are_written(n_bytes: int, expected: str) -> None:
    assert format_bytes(n_bytes) == expected


@given(st.integers(0, 1 << 50))
def test_what_is_written_can_be_read(n_bytes: int) -> None:
    assert parse_bytes(format_bytes(n_bytes)) == pytest.approx(n_bytes, rel=0.01)
