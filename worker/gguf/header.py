"""The header of one GGUF file: version, metadata, and the table of its tensors.

Layout, little-endian: ``"GGUF"``, u32 version, u64 tensor count, u64 metadata count; then each metadata
pair as key string, u32 type and value; then each tensor as name string, u32 dimension count, u64 dimensions
with the fastest first, u32 type, u64 offset; then padding to the alignment, where the data begins that the
offsets count from.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gguf import GGMLQuantizationType, GGUFValueType

from kernels.quant.formats import BlockFormat, by_ggml_id
from worker.gguf.cursor import Cursor

_MAGIC = b"GGUF"
_VERSION = 3
_MAX_PAIRS = 1 << 16
_MAX_TENSORS = 1 << 20
_MAX_ENTRIES = 1 << 24
"""Array entries in all metadata together; Python objects are larger than the bytes they come from."""
_MAX_KEY_BYTES = 65535
_MAX_TEXT_BYTES = 1 << 24
_MAX_DIMENSIONS = 4
_MAX_DEPTH = 3
_MAX_ALIGNMENT = 1 << 16
_SMALLEST_PAIR = 8 + 4 + 1
_SMALLEST_TENSOR = 8 + 4 + 8 + 4 + 8

_SCALARS = {
    GGUFValueType.UINT8: struct.Struct("<B"),
    GGUFValueType.INT8: struct.Struct("<b"),
    GGUFValueType.UINT16: struct.Struct("<H"),
    GGUFValueType.INT16: struct.Struct("<h"),
    GGUFValueType.UINT32: struct.Struct("<I"),
    GGUFValueType.INT32: struct.Struct("<i"),
    GGUFValueType.FLOAT32: struct.Struct("<f"),
    GGUFValueType.UINT64: struct.Struct("<Q"),
    GGUFValueType.INT64: struct.Struct("<q"),
    GGUFValueType.FLOAT64: struct.Struct("<d"),
}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor's place: ``shape`` in torch's order, ``offset`` from the start of the file ``path``."""

    name: str
    shape: tuple[int, ...]
    format: BlockFormat
    path: Path
    offset: int
    nbytes: int

    @property
    def columns(self) -> int:
        """Elements of a row."""
        return self.shape[-1]

    @property
    def rows(self) -> int:
        """Rows, all leading dimensions together."""
        return math.prod(self.shape[:-1])

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.format.row_bytes(self.columns)


@dataclass(frozen=True)
class Header:
    """What one file says about itself. Metadata values are int, float, bool, str, or tuples of them."""

    path: Path
    metadata: Mapping[str, object]
    tensors: tuple[TensorInfo, ...]


def read_header(path: Path) -> Header:
    """Reads and checks one file's header; the data itself is not touched.

    Raises:
        ModelFileError: the file is not a GGUF version 3 file, is damaged, or holds a tensor of an unknown
        type.
    """
    with Cursor(path) as cursor:
        tensor_count, pair_count = _read_counts(cursor)
        metadata = _read_metadata(cursor, pair_count)
        tensors = _read_tensors(cursor, tensor_count, _alignment(cursor, metadata))
    return Header(path, metadata, tensors)


def _read_counts(cursor: Cursor) -> tuple[int, int]:
    if cursor.size < 4 or cursor.take(4, "magic") != _MAGIC:
        raise cursor.error("is not a GGUF file", "give the path of a .gguf file")
    version = cursor.u32("version")
    if version != _VERSION:
        if version & 0xFFFF == 0:
            raise cursor.error("is a big-endian GGUF file", "only little-endian files are read")
        raise cursor.error(
            f"is GGUF version {version}", f"only version {_VERSION} is read; convert the file again"
        )
    tensor_count = cursor.u64("tensor count")
    pair_count = cursor.u64("metadata count")
    for count, limit, smallest, what in (
        (pair_count, _MAX_PAIRS, _SMALLEST_PAIR, "metadata pairs"),
        (tensor_count, _MAX_TENSORS, _SMALLEST_TENSOR, "tensors"),
    ):
        if count > limit:
            raise cursor.error(f"claims {count} {what}, at most {limit} allowed")
        cursor.require(count, smallest, f"table of {count} {what}")
    return tensor_count, pair_count


def _read_metadata(cursor: Cursor, count: int) -> dict[str, object]:
    reader = _ValueReader(cursor)
    metadata: dict[str, object] = {}
    for _ in range(count):
        key = cursor.text(_MAX_KEY_BYTES, "a metadata key")
        what = f"metadata key {key[:80]}"
        if key in metadata:
            raise cursor.error(f"{what} is there twice")
        metadata[key] = reader.read(reader.kind(what), what, depth=0)
    return metadata


class _ValueReader:
    """Reads metadata values, counting array entries over the whole file."""

    def __init__(self, cursor: Cursor) -> None:
        self._cursor = cursor
        self._entries = 0

    def kind(self, what: str) -> GGUFValueType:
        number = self._cursor.u32(f"type of {what}")
        try:
            return GGUFValueType(number)
        except ValueError:
            raise self._cursor.error(f"{what} has the unknown type {number}") from None

    def read(self, kind: GGUFValueType, what: str, depth: int) -> object:
        if kind == GGUFValueType.STRING:
            return self._cursor.text(_MAX_TEXT_BYTES, what)
        if kind == GGUFValueType.BOOL:
            return self._booleans(1, what)[0]
        if kind == GGUFValueType.ARRAY:
            return self._array(what, depth + 1)
        scalar = _SCALARS[kind]
        value: object = scalar.unpack(self._cursor.take(scalar.size, what))[0]
        return value

    def _array(self, what: str, depth: int) -> tuple[object, ...]:
        cursor = self._cursor
        if depth > _MAX_DEPTH:
            raise cursor.error(f"{what} nests arrays deeper than {_MAX_DEPTH}")
        kind = self.kind(what)
        count = cursor.u64(f"length of {what}")
        self._entries += count
        if self._entries > _MAX_ENTRIES:
            raise cursor.error(f"{what} has {count} entries, at most {_MAX_ENTRIES} allowed in all metadata")
        if kind == GGUFValueType.BOOL:
            return self._booleans(count, what)
        if kind == GGUFValueType.STRING:
            cursor.require(count, 8, what)
            return tuple([cursor.text(_MAX_TEXT_BYTES, what) for _ in range(count)])
        if kind == GGUFValueType.ARRAY:
            cursor.require(count, 12, what)
            return tuple([self._array(what, depth + 1) for _ in range(count)])
        scalar = _SCALARS[kind]
        data = cursor.take(count * scalar.size, what)
        return struct.unpack(f"<{count}{scalar.format[1:]}", data)

    def _booleans(self, count: int, what: str) -> tuple[bool, ...]:
        data = self._cursor.take(count, what)
        if count and max(data) > 1:
            raise self._cursor.error(f"{what} has the byte {max(data)} for a boolean")
        return tuple([byte == 1 for byte in data])


def _alignment(cursor: Cursor, metadata: Mapping[str, object]) -> int:
    value = metadata.get("general.alignment", 32)
    if isinstance(value, bool) or not isinstance(value, int):
        raise cursor.error("metadata key general.alignment is not an integer")
    if not 8 <= value <= _MAX_ALIGNMENT or value & (value - 1):
        raise cursor.error(f"metadata key general.alignment is {value}, expected a power of two from 8")
    return value


@dataclass(frozen=True)
class _Entry:
    """A row of the tensor table, its offset still relative."""

    name: str
    shape: tuple[int, ...]
    format: BlockFormat
    offset: int
    nbytes: int


def _read_tensors(cursor: Cursor, count: int, alignment: int) -> tuple[TensorInfo, ...]:
    entries: dict[str, _Entry] = {}
    for _ in range(count):
        entry = _read_entry(cursor, alignment)
        if entry.name in entries:
            raise cursor.error(f"tensor {entry.name[:80]} is there twice")
        entries[entry.name] = entry
    base = -(-cursor.position // alignment) * alignment
    _check_places(cursor, base, list(entries.values()))
    return tuple(
        TensorInfo(e.name, e.shape, e.format, cursor.path, base + e.offset, e.nbytes)
        for e in entries.values()
    )


def _read_entry(cursor: Cursor, alignment: int) -> _Entry:
    name = cursor.text(_MAX_KEY_BYTES, "a tensor name")
    what = f"tensor {name[:80]}"
    dimensions = cursor.u32(f"dimensions of {what}")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise cursor.error(f"{what} has {dimensions} dimensions, expected 1 to {_MAX_DIMENSIONS}")
    shape = tuple([cursor.u64(f"dimensions of {what}") for _ in range(dimensions)])[::-1]
    number = cursor.u32(f"type of {what}")
    offset = cursor.u64(f"offset of {what}")
    fmt = by_ggml_id(number)
    if fmt is None:
        raise cursor.error(f"{what} has the type {_type_name(number)}", "get a file in another quantization")
    if min(shape) < 1:
        raise cursor.error(f"{what} has an empty dimension in {list(shape)}")
    if shape[-1] % fmt.block_elements:
        raise cursor.error(
            f"{what} has rows of {shape[-1]}, no whole {fmt.name} blocks of {fmt.block_elements}"
        )
    nbytes = math.prod(shape[:-1]) * fmt.row_bytes(shape[-1])
    if nbytes > cursor.size:
        raise cursor.error(f"{what} of shape {list(shape)} needs {nbytes} bytes, the file has {cursor.size}")
    if offset % alignment:
        raise cursor.error(f"{what} has the offset {offset}, no multiple of {alignment}")
    return _Entry(name, shape, fmt, offset, nbytes)


def _check_places(cursor: Cursor, base: int, entries: list[_Entry]) -> None:
    """Every tensor lies within the file, and no two share a byte."""
    entries.sort(key=lambda entry: entry.offset)
    end = 0
    previous = ""
    for entry in entries:
        if entry.offset < end:
            raise cursor.error(f"tensors {previous[:80]} and {entry.name[:80]} overlap")
        end, previous = entry.offset + entry.nbytes, entry.name
        if base + end > cursor.size:
            raise cursor.error(
                f"truncated: tensor {previous[:80]} ends at byte {base + end}, the file at {cursor.size}"
            )


def _type_name(number: int) -> str:
    try:
        return f"{GGMLQuantizationType(number).name} ({number}), which this engine does not read"
    except ValueError:
        return f"number {number}, which is unknown"
