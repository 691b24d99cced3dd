"""Reading GGUF headers: equal to the `gguf` package, and clear about files that are wrong."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter

from worker.errors import ModelFileError
from worker.gguf.presets import TINY
from worker.gguf.read import open_gguf
from worker.gguf.synthetic import write_synthetic


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, dims: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def build(
    pairs: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    data: int = 64,
    *,
    start: bytes = b"GGUF" + struct.pack("<I", 3),
    counts: tuple[int, int] | None = None,
    alignment: int = 32,
) -> bytes:
    """A file of given pairs and tensors with so many bytes of data."""
    pairs = [pair("general.name", 8, text("x"))] if pairs is None else pairs
    tensors = [tensor("a", [8])] if tensors is None else tensors
    tensor_count, pair_count = counts or (len(tensors), len(pairs))
    head = start + struct.pack("<QQ", tensor_count, pair_count) + b"".join(pairs + tensors)
    return head + bytes(-len(head) % alignment) + bytes(data)


def refused(path: Path) -> str:
    with pytest.raises(ModelFileError) as caught:
        open_gguf(path)
    assert caught.value.hint
    assert str(path.parent) in caught.value.message
    return caught.value.message


@pytest.fixture
def file(tmp_path: Path) -> Callable[[bytes], Path]:
    def write(content: bytes) -> Path:
        path = tmp_path / "model.gguf"
        path.write_bytes(content)
        return path

    return write


def test_every_kind_of_value_and_tensor_is_read_as_the_package_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "all.gguf"
    writer = GGUFWriter(path, "deepseek4")
    values: dict[str, tuple[Any, str]] = {
        "k.u8": (255, "uint8"),
        "k.i8": (-128, "int8"),
        "k.u16": (65535, "uint16"),
        "k.i16": (-32768, "int16"),
        "k.u32": (2**32 - 1, "uint32"),
        "k.i32": (-(2**31), "int32"),
        "k.u64": (2**64 - 1, "uint64"),
        "k.i64": (-(2**63), "int64"),
        "k.f32": (0.1, "float32"),
        "k.f64": (0.1, "float64"),
        "k.yes": (True, "bool"),
        "k.no": (False, "bool"),
        "k.text": ("<｜User｜> ü", "string"),
        "k.ints": ([1, -2, 3], "array"),
        "k.floats": ([0.5, 1e-6], "array"),
        "k.bools": ([True, False], "array"),
        "k.texts": (["a", "", "Ġthe"], "array"),
    }
    for key, (value, kind) in values.items():
        getattr(writer, f"add_{kind}")(key, value)
    rng = np.random.default_rng(0)
    for kind in (
        "F32",
        "F16",
        "BF16",
        "Q8_0",
        "Q4_0",
        "Q2_K",
        "Q3_K",
        "Q4_K",
        "Q5_K",
        "Q6_K",
        "IQ2_XXS",
        "MXFP4",
    ):
        elements, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
        raw = rng.integers(0, 256, (3, 512 // elements * size), dtype=np.uint8)
        writer.add_tensor(kind.lower(), raw, raw_dtype=GGMLQuantizationType[kind])
    writer.add_tensor("i32", rng.integers(0, 9, (5, 3, 2), dtype=np.int32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    opened = open_gguf(path)
    reader = GGUFReader(path)
    oracle = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    found = {key: list(v) if isinstance(v, tuple) else v for key, v in opened.metadata.items()}
    assert found == oracle
    assert {key: type(value) for key, value in found.items() if key in values} == {
        key: type(value) for key, (value, _) in values.items()
    }
    assert list(opened.tensors) == [tensor.name for tensor in reader.tensors]
    for other in reader.tensors:
        info = opened.tensors[other.name]
        assert info.shape == tuple(int(size) for size in other.shape)[::-1]
        assert info.format.name == other.tensor_type.name
        assert (info.offset, info.nbytes, info.path) == (other.data_offset, other.n_bytes, path)
        assert info.rows * info.row_bytes == info.nbytes
    assert opened.tensor_bytes == sum(other.n_bytes for other in reader.tensors)


def test_another_alignment(file: Callable[[bytes], Path]) -> None:
    path = file(build([pair("general.alignment", 4, struct.pack("<I", 128))], alignment=128))
    assert open_gguf(path).tensors["a"].offset == GGUFReader(path).tensors[0].data_offset


def test_no_tensors_and_no_metadata(file: Callable[[bytes], Path]) -> None:
    opened = open_gguf(file(build([], [])))
    assert (dict(opened.metadata), dict(opened.tensors)) == ({}, {})


class TestPaths:
    def test_missing_folder_and_special_files(self, tmp_path: Path) -> None:
        assert "no such file" in refused(tmp_path / "gone.gguf")
        (tmp_path / "folder.gguf").mkdir()
        assert "folder" in refused(tmp_path / "folder.gguf")
        os.mkfifo(tmp_path / "pipe.gguf")
        assert "not a regular file" in refused(tmp_path / "pipe.gguf")
        (tmp_path / "loop.gguf").symlink_to(tmp_path / "loop.gguf")
        assert "cannot be opened" in refused(tmp_path / "loop.gguf")
        assert "cannot be opened" in refused(tmp_path / "zero\0byte.gguf")

    @pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
    def test_unreadable(self, file: Callable[[bytes], Path]) -> None:
        path = file(build())
        path.chmod(0)
        assert "cannot be opened" in refused(path)


def value(kind: int, raw: bytes) -> list[bytes]:
    return [pair("k", kind, raw)]


def array(kind: int, count: int, raw: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + raw


HUGE = 2**63
DAMAGED = {
    "empty": (b"", "not a GGUF"),
    "another format": (b"PK\3\4" + bytes(100), "not a GGUF"),
    "big-endian": (build(start=b"GGUF" + struct.pack(">I", 3)), "big-endian"),
    "version 2": (build(start=b"GGUF" + struct.pack("<I", 2)), "version 2"),
    "version 4": (build(start=b"GGUF" + struct.pack("<I", 4)), "version 4"),
    "too many pairs": (build(counts=(1, HUGE)), "metadata pairs"),
    "too many tensors": (build(counts=(HUGE, 1)), "tensors"),
    "more pairs than bytes": (build(counts=(1, 60000)), "truncated"),
    "more tensors than bytes": (build(counts=(900000, 1)), "truncated"),
    "unknown value type": (build(value(13, bytes(8))), "unknown type 13"),
    "unknown entry type": (build(value(9, array(77, 1, bytes(8)))), "unknown type 77"),
    "huge string": (build(value(8, struct.pack("<Q", HUGE))), "at most"),
    "long string": (build(value(8, struct.pack("<Q", 5000))), "truncated"),
    "huge key": (build([struct.pack("<Q", HUGE)]), "at most"),
    "huge array": (build(value(9, array(0, HUGE))), "at most"),
    "long array": (build(value(9, array(10, 10_000_000))), "truncated"),
    "long array of strings": (build(value(9, array(8, 10_000_000))), "truncated"),
    "long array of arrays": (build(value(9, array(9, 10_000_000))), "truncated"),
    "arrays in arrays": (build(value(9, array(9, 1) * 10 + array(0, 1, b"a"))), "nests"),
    "boolean of 2": (build(value(7, b"\2")), "boolean"),
    "array of such": (build(value(9, array(7, 2, b"\1\2"))), "boolean"),
    "key that is no UTF-8": (build([pair(b"\xff\xfe", 4, bytes(4))]), "UTF-8"),
    "value that is no UTF-8": (build(value(8, text(b"\xc3("))), "UTF-8"),
    "key twice": (build(value(4, bytes(4)) * 2), "twice"),
    "alignment 0": (build([pair("general.alignment", 4, bytes(4))]), "general.alignment"),
    "alignment 48": (build([pair("general.alignment", 4, struct.pack("<I", 48))]), "general.alignment"),
    "alignment of text": (build([pair("general.alignment", 8, text("32"))]), "general.alignment"),
    "split count of text": (build([pair("split.count", 8, text("2"))]), "split.count"),
    "name that is no UTF-8": (build(tensors=[text(b"\xff") + bytes(40)]), "UTF-8"),
    "tensor twice": (build(tensors=[tensor("a", [8]), tensor("a", [8], 0, 32)]), "twice"),
    "no dimensions": (build(tensors=[tensor("a", [])]), "0 dimensions"),
    "five dimensions": (build(tensors=[tensor("a", [1] * 5)]), "5 dimensions"),
    "empty dimension": (build(tensors=[tensor("a", [8, 0])]), "empty dimension"),
    "overflowing product": (build(tensors=[tensor("a", [2**33, 2**31])]), "needs"),
    "overflowing to zero": (build(tensors=[tensor("a", [2**32, 2**32])]), "needs"),
    "unknown tensor type": (build(tensors=[tensor("a", [256], 1234)]), "number 1234"),
    "type not read": (build(tensors=[tensor("a", [256], 21)]), "IQ3_S"),
    "part of a block": (build(tensors=[tensor("a", [100], 12)]), "Q4_K blocks"),
    "misaligned": (build(tensors=[tensor("a", [8], 0, 4)]), "multiple of 32"),
    "overlapping": (build(tensors=[tensor("a", [12]), tensor("b", [4], 0, 32)]), "a and b overlap"),
    "same place": (build(tensors=[tensor("a", [4]), tensor("b", [4])]), "overlap"),
    "beyond the end": (build(tensors=[tensor("a", [8], 0, 64)]), "truncated: tensor a"),
    "far beyond the end": (build(tensors=[tensor("a", [8], 0, 2**64 - 32)]), "truncated: tensor a"),
    "data cut": (build()[:-33], "truncated: tensor a"),
    "table cut": (build(tensors=[tensor("a", [8])[:-3]], data=0, alignment=1), "truncated"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_named(name: str, file: Callable[[bytes], Path]) -> None:
    content, expected = DAMAGED[name]
    assert expected in refused(file(content))


def test_every_shortened_file_is_refused(tmp_path: Path) -> None:
    whole = tmp_path / "tiny.gguf"
    write_synthetic(whole, TINY, "f32", 0)
    content = whole.read_bytes()
    data_begins = min(info.offset for info in open_gguf(whole).tensors.values())
    cut = tmp_path / "cut.gguf"
    for end in [*range(200), *range(200, data_begins, 997), data_begins, len(content) - 64]:
        cut.write_bytes(content[:end])
        refused(cut)


class TestSplit:
    @pytest.fixture
    def parts(self, tmp_path: Path) -> list[Path]:
        """Three parts as the package splits them."""
        writer = GGUFWriter(tmp_path / "m.gguf", "deepseek4", split_max_tensors=2)
        writer.add_uint32("deepseek4.block_count", 7)
        for number in range(5):
            writer.add_tensor(f"t{number}", np.full((2, 3), number, dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return sorted(tmp_path.glob("m-*.gguf"))

    def test_any_part_opens_all(self, parts: list[Path]) -> None:
        assert len(parts) == 3
        for given in parts:
            opened = open_gguf(given)
            assert opened.path == parts[0]
            assert opened.parts == tuple(parts)
            assert opened.metadata["deepseek4.block_count"] == 7
            assert list(opened.tensors) == [f"t{number}" for number in range(5)]
        for part in parts:
            for other in GGUFReader(part).tensors:
                info = opened.tensors[other.name]
                assert (info.path, info.offset, info.nbytes) == (part, other.data_offset, other.n_bytes)

    @pytest.mark.parametrize("number", range(3))
    def test_a_missing_part_is_named(self, parts: list[Path], number: int) -> None:
        parts[number].unlink()
        message = refused(parts[(number + 1) % 3])
        assert parts[number].name in message
        assert "missing" in message

    def test_a_renamed_part_is_refused(self, parts: list[Path]) -> None:
        other = parts[1].rename(parts[1].with_name("renamed.gguf"))
        assert "3 parts" in refused(other)

    def test_swapped_parts_are_refused(self, parts: list[Path]) -> None:
        second, third = parts[1].read_bytes(), parts[2].read_bytes()
        parts[1].write_bytes(third)
        parts[2].write_bytes(second)
        message = refused(parts[0])
        assert parts[1].name in message
        assert "split.no" in message

    def test_a_part_of_another_model_is_refused(self, parts: list[Path], tmp_path: Path) -> None:
        alone = tmp_path / "alone.gguf"
        alone.write_bytes(build())
        alone.rename(parts[1])
        message = refused(parts[0])
        assert parts[1].name in message
        assert "split.count" in message

    def test_a_part_with_a_tensor_of_another_part_is_refused(self, parts: list[Path]) -> None:
        content = parts[1].read_bytes()
        parts[1].write_bytes(content.replace(b"t2", b"t1"))
        message = refused(parts[0])
        assert "t1" in message
        assert parts[0].name in message

    def test_a_wrong_total_is_refused(self, parts: list[Path]) -> None:
        key = b"split.tensors.count"
        content = parts[2].read_bytes()
        at = content.index(key) + len(key) + 4
        parts[2].write_bytes(content[:at] + struct.pack("<i", 6) + content[at + 4 :])
        assert "split.tensors.count is 6" in refused(parts[0])

    def test_a_damaged_part_is_named(self, parts: list[Path]) -> None:
        parts[2].write_bytes(parts[2].read_bytes()[:40])
        assert parts[2].name in refused(parts[0])
