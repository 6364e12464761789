"""What makes states incompatible changes the namespace, and nothing else does."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamakeep import fingerprint
from llamakeep.fingerprint import Adapter, Namespace, fingerprint_file
from llamakeep.tokens import NAME_BYTES

ONE, TWO = Adapter("aa", 1.0), Adapter("bb", 1.0)
BASE = Namespace(
    model="m",
    layout="l",
    segment_tokens=256,
    context={"rope_freq_base": 10000.0, "flash_attn": True},
    adapters=(ONE, TWO),
    salt="s",
)


@pytest.mark.parametrize(
    "other",
    [
        replace(BASE, model="n"),
        replace(BASE, layout="k"),
        replace(BASE, segment_tokens=128),
        replace(BASE, context={}),
        replace(BASE, context={"rope_freq_base": 10000.5, "flash_attn": True}),
        replace(BASE, context={"rope_freq_base": 10000.0, "flash_attn": False}),
        replace(BASE, context={"rope_freq_base": 10000.0, "flash_attn": "True"}),
        replace(BASE, context={"rope_freq_base": 10000.0, "flash_attn": 1}),
        replace(BASE, context={"rope_freq_base": 10000.0}),
        replace(BASE, context={"rope_freq_base": 10000.0, "flash_attn": True, "yarn": 0}),
        replace(BASE, adapters=()),
        replace(BASE, adapters=(ONE,)),
        replace(BASE, adapters=(TWO, ONE)),
        replace(BASE, adapters=(ONE, TWO, TWO)),
        replace(BASE, adapters=(ONE, replace(TWO, scale=0.5))),
        replace(BASE, adapters=(ONE, replace(TWO, content="cc"))),
        replace(BASE, salt=""),
        replace(BASE, salt="t"),
        # The same letters in other parts.
        replace(BASE, model="ml", layout=""),
        replace(BASE, model="m", salt="l", layout="s"),
    ],
)
def test_faults_4_43_and_47_every_part_makes_another_namespace(other: Namespace) -> None:
    assert other.digest != BASE.digest


def test_equal_parts_make_the_same_namespace() -> None:
    assert len(BASE.digest) == NAME_BYTES
    assert replace(BASE).digest == BASE.digest
    turned = dict(reversed(BASE.context.items()))
    assert list(turned) != list(BASE.context)
    assert replace(BASE, context=turned).digest == BASE.digest


def test_a_digest_is_the_same_on_every_machine() -> None:
    """Stored names depend on it: whoever changes this forgets everything that was kept."""
    assert BASE.digest.hex() == "66788cfe1307a686537328a19c513252db835cc8a6ef2977054a76bf68fd857e"
    plain = Namespace("m", "l", 256)
    assert plain.digest.hex() == "3c53890bd875ae39ef91a66e569536b063901c5e0ee6740d6e3ab7c1132e872b"


settings_ = st.dictionaries(
    st.text(max_size=5),
    st.integers() | st.floats(allow_nan=False) | st.text(max_size=5) | st.booleans(),
    max_size=4,
)


@given(one=settings_, two=settings_)
def test_namespaces_are_equal_only_where_their_settings_are(
    one: dict[str, int | float | str | bool], two: dict[str, int | float | str | bool]
) -> None:
    equal = json.dumps(one, sort_keys=True) == json.dumps(two, sort_keys=True)
    first, second = (replace(BASE, context=context).digest for context in (one, two))
    assert (first == second) == equal
    # What was written down and read back is still the same.
    assert replace(BASE, context=json.loads(json.dumps(one))).digest == first


# -- files -----------------------------------------------------------------------------------------

MIB = 1 << 20


@pytest.fixture
def written(tmp_path: Path) -> Callable[[bytes], str]:
    """`written(content)` is the fingerprint of a file with that content."""

    def fingerprint(content: bytes) -> str:
        path = tmp_path / "model.gguf"
        path.write_bytes(content)
        return fingerprint_file(path)

    return fingerprint


@pytest.mark.parametrize("size", [1, 100, MIB - 1, MIB, MIB + 1, 20 * MIB + 3])
def test_start_end_and_size_are_seen(written: Callable[[bytes], str], size: int) -> None:
    base = bytes(size)
    seen = {written(base)}
    for at in sorted({0, size - 1}):
        changed = bytearray(base)
        changed[at] = 1
        seen.add(written(bytes(changed)))
    seen.add(written(base + b"\0"))
    seen.add(written(base[:-1]))
    assert len(seen) == (4 if size == 1 else 5)
    assert written(base) in seen


def test_eight_places_are_sampled(
    written: Callable[[bytes], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "_SAMPLE_BYTES", 100)
    size = 5_000
    base = written(bytes(size))
    seen = set()
    for index in range(8):
        changed = bytearray(size)
        changed[(size - 100) * index // 7 + 50] = 1
        seen.add(written(bytes(changed)))
    assert len(seen) == 8
    assert base not in seen


def test_a_small_file_is_read_whole(written: Callable[[bytes], str]) -> None:
    seen = set()
    for at in (0, MIB // 3, MIB // 2, MIB - 1):
        changed = bytearray(MIB)
        changed[at] = 1
        seen.add(written(bytes(changed)))
    assert len(seen) == 4


def test_an_empty_file_has_a_fingerprint(written: Callable[[bytes], str]) -> None:
    assert len(written(b"")) == 2 * NAME_BYTES
    assert written(b"") != written(b"\0")


def test_the_name_of_the_file_does_not_matter(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"the same")
    assert fingerprint_file(tmp_path / "a.gguf") == fingerprint_file(str(tmp_path / "b.gguf"))


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        fingerprint_file(tmp_path / "missing.gguf")
    with pytest.raises(OSError, match=r"directory|denied"):
        fingerprint_file(tmp_path)
