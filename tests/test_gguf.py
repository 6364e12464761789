"""The header of a GGUF file is read as far as it is there, and never believed further."""

from __future__ import annotations

import contextlib
import io
import itertools
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf as gguf_package
import numpy as np
import pytest
from gguf import GGUFEndian, GGUFReader, GGUFValueType, GGUFWriter
from hypothesis import example, given
from hypothesis import strategies as st

from llamakeep import gguf
from llamakeep.errors import ModelError
from llamakeep.gguf import Header, read_header, read_spans, sampled_spans, split_parts

KIND = {kind.name: int(kind) for kind in GGUFValueType}


def text(value: str, order: str = "<") -> bytes:
    return struct.pack(order + "Q", len(value.encode())) + value.encode()


def value(key: str, kind: str, packed: bytes, order: str = "<") -> bytes:
    return text(key, order) + struct.pack(order + "I", KIND[kind]) + packed


def array(kind: str, n: int, packed: bytes) -> bytes:
    return struct.pack("<IQ", KIND[kind], n) + packed


def tensor(name: str, offset: int, dims: tuple[int, ...] = (8,), order: str = "<") -> bytes:
    shape = struct.pack(f"{order}I{len(dims)}Q", len(dims), *dims)
    return text(name, order) + shape + struct.pack(order + "IQ", 0, offset)


def file_of(
    values: list[bytes],
    tensors: list[bytes] = [],  # noqa: B006 - never changed
    *,
    version: int = 3,
    order: str = "<",
    n_values: int | None = None,
    n_tensors: int | None = None,
    alignment: int = 32,
    data: bytes = b"",
) -> bytes:
    counts = (
        len(tensors) if n_tensors is None else n_tensors,
        len(values) if n_values is None else n_values,
    )
    head = b"GGUF" + struct.pack(order + "IQQ", version, *counts)
    head += b"".join(values) + b"".join(tensors)
    return head + bytes(-len(head) % alignment) + data


def header_of(content: bytes) -> Header:
    return read_header(io.BytesIO(content), len(content), "some.gguf")


SMALL = file_of(
    [
        value("general.architecture", "STRING", text("llama")),
        value("split.count", "UINT16", struct.pack("<H", 3)),
        value("a.list", "ARRAY", array("STRING", 2, text("x") + text("yy"))),
        value("a.table", "ARRAY", array("FLOAT32", 3, bytes(12))),
        value("a.flag", "BOOL", b"\1"),
    ],
    [tensor("one", 0), tensor("two", 32, (2, 4))],
    data=bytes(64),
)
"""Every shape that a value can have, in a file of 352 bytes; its data are the last 64."""

# -- what is read ----------------------------------------------------------------------------------


def test_a_header_by_hand() -> None:
    start = len(SMALL) - 64
    assert header_of(SMALL) == Header(
        file_bytes=len(SMALL),
        n_bytes=start,
        n_parts=3,
        tensors={"one": start, "two": start + 32},
    )


def write(path: Path, fill: Callable[[GGUFWriter], None], **options: Any) -> Path:
    writer = GGUFWriter(path, "llama", **options)
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def everything(writer: GGUFWriter) -> None:
    """Each value type, arrays of each, arrays of arrays."""
    examples = {
        "UINT8": 200,
        "INT8": -100,
        "UINT16": 60_000,
        "INT16": -30_000,
        "UINT32": 4_000_000_000,
        "INT32": -2_000_000_000,
        "FLOAT32": 1.5,
        "BOOL": True,
        "STRING": "word \u00e9",
        "UINT64": 1 << 63,
        "INT64": -(1 << 62),
        "FLOAT64": 2.5,
    }
    for name, example_value in examples.items():
        kind = GGUFValueType[name]
        writer.add_key_value(f"one.{name}", example_value, kind)
        writer.add_key_value(f"many.{name}", [example_value] * 3, GGUFValueType.ARRAY, kind)
    writer.add_array("nested", [[1, 2], [3]])
    writer.add_array("nested.words", [["a", "bc"], [""]])
    for index, n in enumerate((1, 7, 1_000)):
        writer.add_tensor(f"t.{index}", np.full((n, 3), index, np.float32))


def open_header(path: Path) -> Header:
    with open(path, "rb") as file:
        return read_header(file, path.stat().st_size, path)


@pytest.mark.parametrize("alignment", [None, 8, 64, 4096])
def test_what_the_gguf_package_writes_is_found_where_its_reader_finds_it(
    tmp_path: Path, alignment: int | None
) -> None:
    def fill(writer: GGUFWriter) -> None:
        if alignment is not None:
            writer.add_custom_alignment(alignment)
        everything(writer)

    path = write(tmp_path / "m.gguf", fill)
    header, reader = open_header(path), GGUFReader(path)
    assert header.tensors == {each.name: each.data_offset for each in reader.tensors}
    assert header.n_bytes == reader.data_offset
    assert header.n_parts == 1
    assert header.file_bytes == path.stat().st_size


def test_the_other_byte_order_is_read_too(tmp_path: Path) -> None:
    little = open_header(write(tmp_path / "little.gguf", everything))
    path = write(tmp_path / "big.gguf", everything, endianess=GGUFEndian.BIG)
    assert path.read_bytes()[4:8] == b"\0\0\0\3"
    assert open_header(path) == little


def test_a_real_model(smollm2_path: Path) -> None:
    header = open_header(smollm2_path)
    assert len(header.tensors) == 272
    assert min(header.tensors.values()) == header.n_bytes
    assert header.tensors["output_norm.weight"] + 4 * 576 == header.file_bytes


@pytest.mark.parametrize("version", [2, 3])
def test_versions_2_and_3_are_alike(version: int) -> None:
    assert header_of(SMALL[:4] + struct.pack("<I", version) + SMALL[8:]) == header_of(SMALL)


def test_a_file_without_tensors_has_a_header() -> None:
    content = file_of([value("a", "INT8", b"\1")])
    assert header_of(content).tensors == {}
    assert header_of(content).n_bytes == len(content)
    # Nothing has to be padded where nothing follows.
    assert header_of(content.rstrip(b"\0")).n_bytes == len(content.rstrip(b"\0"))


def test_a_header_longer_than_what_is_read_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    words = b"".join(text("w" * (index % 40)) for index in range(2_000))
    content = file_of(
        [
            value("words", "ARRAY", array("STRING", 2_000, words)),
            value("numbers", "ARRAY", array("INT32", 5_000, bytes(20_000))),
            value("long", "STRING", text("x" * 30_000)),
        ],
        [tensor("t", 0)],
        data=bytes(32),
    )
    whole = header_of(content)
    for chunk in (1, 7, 1_000, 40_000):
        monkeypatch.setattr(gguf, "_CHUNK_BYTES", chunk)
        assert header_of(content) == whole


def test_a_vocabulary_takes_well_under_100_ms() -> None:
    n = 250_000
    words = b"".join(text(f"token{index}") for index in range(n))
    content = file_of([value("tokenizer.ggml.tokens", "ARRAY", array("STRING", n, words))])
    taken = []
    for _ in range(3):
        start = time.process_time()
        header_of(content)
        taken.append(time.process_time() - start)
    assert min(taken) < 0.5  # 0.035 s here; a second look at what was read would take seconds


# -- what is not believed --------------------------------------------------------------------------


@given(cut=st.integers(0, len(SMALL) - 65))
@example(cut=0)
@example(cut=4)
@example(cut=23)
def test_a_truncated_header_is_refused_with_its_name(cut: int) -> None:
    with pytest.raises(ModelError, match=r"some\.gguf is not a GGUF file that can be read"):
        header_of(SMALL[:cut])


@given(at=st.integers(0, len(SMALL) - 1), flip=st.integers(1, 255))
def test_a_changed_byte_makes_another_header_or_none(at: int, flip: int) -> None:
    changed = bytearray(SMALL)
    changed[at] ^= flip
    try:
        header = header_of(bytes(changed))
    except ModelError:
        return
    assert all(0 <= start <= len(SMALL) for start in header.tensors.values())
    assert header.n_bytes <= len(SMALL)


@given(st.binary(max_size=400))
def test_noise_is_refused_or_read_never_worse(noise: bytes) -> None:
    for content in (noise, b"GGUF" + struct.pack("<I", 3) + noise, SMALL[:24] + noise):
        with contextlib.suppress(ModelError):
            header_of(content)


HUGE = [1 << 20, (1 << 31) - 1, 1 << 32, 1 << 61, (1 << 63) - 1, (1 << 64) - 1]


@pytest.mark.parametrize("n", HUGE)
@pytest.mark.parametrize(
    "claim",
    [
        lambda n: file_of([], n_values=n),
        lambda n: file_of([], n_tensors=n),
        lambda n: file_of([struct.pack("<Q", n)], n_values=1),
        lambda n: file_of([text("k") + struct.pack("<IQ", KIND["STRING"], n)]),
        lambda n: file_of([value("k", "ARRAY", array("STRING", n, b""))]),
        lambda n: file_of([value("k", "ARRAY", array("STRING", 1, struct.pack("<Q", n)))]),
        lambda n: file_of([value("k", "ARRAY", array("UINT8", n, b""))]),
        lambda n: file_of([value("k", "ARRAY", array("FLOAT64", n, b""))]),
        lambda n: file_of([value("k", "ARRAY", array("ARRAY", n, b""))]),
        lambda n: file_of([], [text("t") + struct.pack("<I", min(n, 2**32 - 1))]),
        lambda n: file_of([], [tensor("t", n)]),
    ],
)
def test_what_a_file_claims_is_measured_against_its_size(
    n: int, claim: Callable[[int], bytes]
) -> None:
    content = claim(n) + bytes(64)
    tracemalloc.start()
    try:
        with pytest.raises(ModelError):
            header_of(content)
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()


class Endless(io.RawIOBase):
    """Some content, then zeros without end; counts what is read."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self.n_read = 0

    def read(self, n: int = -1) -> bytes:
        start, self.n_read = self.n_read, self.n_read + n
        return self._content[start : start + n].ljust(n, b"\0")


@pytest.mark.parametrize(
    "content",
    [
        file_of([value("k", "ARRAY", array("UINT8", 1 << 33, b""))]),
        file_of([text("k") + struct.pack("<IQ", KIND["STRING"], 1 << 33)]),
        file_of([value("k", "ARRAY", array("STRING", 1 << 25, b""))]),
        file_of([], n_tensors=1 << 19),
        file_of([], n_values=1 << 30),
    ],
)
def test_in_a_large_file_too_a_header_is_bounded(content: bytes) -> None:
    file = Endless(content)
    with pytest.raises(ModelError):
        read_header(file, 1 << 40, "large.gguf")  # type: ignore[arg-type]
    assert file.n_read <= 1 << 20


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "begins with b''"),
        (b"GGU", "begins with b'GGU'"),
        (b"ggml" + SMALL[4:], "begins with b'ggml'"),
        (SMALL[:4] + struct.pack("<I", 1) + SMALL[8:], "its version is 1"),
        (SMALL[:4] + struct.pack("<I", 4) + SMALL[8:], "its version is 4"),
        (SMALL[:4] + struct.pack(">I", 4) + SMALL[8:], "its version is 4"),
        (SMALL[:4] + struct.pack("<I", 0) + SMALL[8:], "its version is 0"),
        (file_of([text("k") + struct.pack("<IQ", 13, 0)]), "unknown type 13"),
        (file_of([text("k") + struct.pack("<IIQ", 9, 99, 0)]), "unknown type 99"),
        (
            file_of([value("k", "ARRAY", array("ARRAY", 1, b"") * 5 + array("INT8", 0, b""))]),
            "nested more than 4",
        ),
        (file_of([value("general.alignment", "UINT32", bytes(4))]), "its alignment is 0"),
        (file_of([value("general.alignment", "INT32", b"\xff" * 4)]), "its alignment is -1"),
        (file_of([value("general.alignment", "UINT32", b"\x30\0\0\0")]), "its alignment is 48"),
        (file_of([], [tensor("far", 33)], data=bytes(32)), "tensor 'far' starts at"),
        (file_of([], [tensor("t", 0, (1,) * 9)], data=bytes(32)), "has 9 dimensions"),
    ],
)
def test_a_malformed_file_is_refused_saying_what_is_wrong(content: bytes, said: str) -> None:
    with pytest.raises(ModelError) as raised:
        header_of(content)
    assert "some.gguf" in str(raised.value)
    assert said in str(raised.value)


def test_names_that_are_no_text_are_read() -> None:
    name = b"\xff\xfe"
    odd = struct.pack("<Q", 2) + name + struct.pack("<IQIQ", 1, 8, 0, 0)
    assert list(header_of(file_of([], [odd], data=bytes(32))).tensors) == ["\\xff\\xfe"]


def test_a_file_that_shrinks_while_it_is_read_is_refused() -> None:
    with pytest.raises(ModelError, match="ended at 100 while it was read"):
        read_header(io.BytesIO(SMALL[:100]), len(SMALL), "some.gguf")


# -- which bytes stand for the whole ---------------------------------------------------------------


def placed(sizes: list[int], n_bytes: int = 500) -> Header:
    """A header of 500 bytes and tensors of these sizes."""
    at, tensors = n_bytes, {}
    for index, size in enumerate(sizes):
        tensors[str(index)] = at
        at += size
    return Header(at, n_bytes, 1, tensors)


def test_a_small_file_stands_for_itself() -> None:
    assert sampled_spans(placed([10, 20])) == [(0, 530)]
    assert sampled_spans(placed([], 0)) == [(0, 0)]


@given(
    sizes=st.lists(
        st.sampled_from([0, 1, 4095, 4096, 4097, 8192, 12_288, 12_289])
        | st.integers(0, 1 << 20)
        | st.integers(0, 1 << 28),
        max_size=12,
    )
)
def test_of_a_large_one_every_tensor_is_sampled(sizes: list[int]) -> None:
    header = placed([*sizes, gguf.WHOLE_BYTES])
    spans = sampled_spans(header)
    window, every = gguf.WINDOW_BYTES, gguf.WINDOW_EVERY_BYTES
    assert spans[0][0] == 0
    assert spans[0][1] >= header.n_bytes
    assert spans[-1][1] == header.file_bytes
    assert all(start < end for start, end in spans)
    assert all(one[1] < other[0] for one, other in itertools.pairwise(spans))

    def read(start: int, end: int) -> bool:
        return any(first <= start and end <= last for first, last in spans)

    at = header.n_bytes
    for size in [*sizes, gguf.WHOLE_BYTES]:
        if size <= 2 * window:
            assert read(at, at + size)
        else:
            middle = at + (size - window) // 2
            assert read(at, at + window)
            assert read(at + size - window, at + size)
            if size <= 2 * every:
                assert read(middle, middle + window)
        at += size
    # No gap is longer than the distance of two windows.
    assert all(other[0] - one[1] <= every for one, other in itertools.pairwise(spans))
    expected = 3 * (len(sizes) + 1) + 1 + header.file_bytes // every
    assert sum(end - start for start, end in spans) <= header.n_bytes + expected * window


@given(content=st.binary(max_size=300), cuts=st.lists(st.integers(0, 300), max_size=6))
def test_spans_are_read_as_they_lie(content: bytes, cuts: list[int]) -> None:
    ends = sorted({min(cut, len(content)) for cut in cuts})
    spans = list(zip(ends[::2], ends[1::2], strict=False))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "_CHUNK_BYTES", 7)
        read = b"".join(map(bytes, read_spans(io.BytesIO(content), spans, "f")))
    assert read == b"".join(content[start:end] for start, end in spans)


def test_a_span_past_the_end_is_refused() -> None:
    with pytest.raises(ModelError, match=r"f\.gguf ended at 10 while it was read"):
        list(read_spans(io.BytesIO(bytes(10)), [(0, 4), (8, 12)], "f.gguf"))


# -- parts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_parts_of_a_split_model_are_named_as_llama_cpp_names_them(number: int) -> None:
    parts = split_parts(f"dir/a-b-{number:05d}-of-00003.gguf")
    assert parts == [Path("dir") / f"a-b-0000{index}-of-00003.gguf" for index in (1, 2, 3)]


@pytest.mark.parametrize(
    "name",
    [
        "model.gguf",
        "m-1-of-3.gguf",
        "m-00001-of-00003.bin",
        "m-00000-of-00003.gguf",
        "m-00004-of-00003.gguf",
        "m-00001-of-00000.gguf",
        "m-00001-of-00003.gguf.part",
        "",
    ],
)
def test_another_name_is_the_only_part(name: str) -> None:
    assert split_parts(name) == [Path(name)]


def test_tensor_names_tell_of_rope_factors() -> None:
    def says(name: str) -> bool:
        return gguf.has_rope_factors(header_of(file_of([], [tensor(name, 0)], data=bytes(32))))

    names = gguf_package.TENSOR_NAMES
    assert says(names[gguf_package.MODEL_TENSOR.ROPE_FACTORS_LONG] + ".weight")
    assert says(names[gguf_package.MODEL_TENSOR.ROPE_FACTORS_SHORT] + ".weight")
    assert not says(names[gguf_package.MODEL_TENSOR.ROPE_FREQS] + ".weight")
