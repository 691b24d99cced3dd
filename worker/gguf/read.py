"""Opens a model's GGUF file, or all parts of a split one, as one table of metadata and tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from worker.errors import ModelFileError
from worker.gguf.header import Header, TensorInfo, read_header

__all__ = ["GgufFile", "TensorInfo", "open_gguf"]

_PART_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_MAX_PARTS = 1024
_PARTS_HINT = "put all parts, under the names they were published with, into one folder"


@dataclass(frozen=True)
class GgufFile:
    """A model as its files describe it.

    ``metadata`` is that of the first part; values are int, float, bool, str, or tuples of them. ``tensors``
    is by name, in the order of the files. Nothing is kept open.
    """

    path: Path
    metadata: Mapping[str, object]
    tensors: Mapping[str, TensorInfo]
    parts: tuple[Path, ...]

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors, without padding."""
        return sum(info.nbytes for info in self.tensors.values())


def open_gguf(path: Path) -> GgufFile:
    """Reads the headers of a model's file or, given any part of a split model, of all its parts.

    Raises:
        ModelFileError: a file or part is missing, unreadable, damaged, inconsistent with the others, or of a
            version or tensor type that is not read.
    """
    given = read_header(path)
    count = _split_value(given, "split.count", 1)
    match = _PART_NAME.fullmatch(path.name)
    if count == 1 and (match is None or int(match["count"]) <= 1):
        return _merge([given])
    if match is None or int(match["count"]) != count:
        raise ModelFileError(f"{path}: is one of {count} parts, but its name does not say so", _PARTS_HINT)
    if not 1 <= count <= _MAX_PARTS:
        raise ModelFileError(f"{path}: claims {count} parts, at most {_MAX_PARTS} allowed")
    names = [f"{match['stem']}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]
    headers = [given if name == path.name else _read_part(path.with_name(name), path) for name in names]
    for number, header in enumerate(headers):
        _check_part(header, number, count)
    return _merge(headers)


def _read_part(part: Path, given: Path) -> Header:
    if not part.exists():
        raise ModelFileError(f"{given}: its part {part.name} is missing", _PARTS_HINT)
    return read_header(part)


def _check_part(header: Header, number: int, count: int) -> None:
    for key, expected in (("split.count", count), ("split.no", number)):
        found = _split_value(header, key, -1)
        if found != expected:
            stated = "is missing" if found == -1 else f"is {found}"
            raise ModelFileError(
                f"{header.path}: metadata key {key} {stated}, expected {expected} by its name", _PARTS_HINT
            )


def _merge(headers: list[Header]) -> GgufFile:
    tensors: dict[str, TensorInfo] = {}
    for header in headers:
        for info in header.tensors:
            if info.name in tensors:
                other = tensors[info.name].path.name
                raise ModelFileError(f"{header.path}: tensor {info.name[:80]} is in {other} too", _PARTS_HINT)
            tensors[info.name] = info
    for header in headers:
        total = _split_value(header, "split.tensors.count", len(tensors))
        if total != len(tensors):
            raise ModelFileError(
                f"{header.path}: metadata key split.tensors.count is {total}, "
                f"but the parts hold {len(tensors)}",
                _PARTS_HINT,
            )
    first = headers[0]
    parts = tuple(header.path for header in headers)
    return GgufFile(first.path, MappingProxyType(dict(first.metadata)), MappingProxyType(tensors), parts)


def _split_value(header: Header, key: str, default: int) -> int:
    value = header.metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelFileError(f"{header.path}: metadata key {key} is not an integer", _PARTS_HINT)
    return value
