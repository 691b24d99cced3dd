"""Typed and checked access to a GGUF file's metadata; every complaint names the key and the file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from worker.errors import ModelFileError

_HINT = "the file is damaged or not a DeepSeek-V4 conversion this version knows; get another one"


class Metadata:
    """A view of metadata values under one architecture's prefix.

    A key that starts with a dot belongs to the architecture (``.block_count`` is ``deepseek4.block_count``);
    others are taken as they are. A key without a default must be there.
    """

    def __init__(self, values: Mapping[str, object], architecture: str, source: str) -> None:
        self._values = values
        self._architecture = architecture
        self._source = source

    def full_name(self, key: str) -> str:
        """The key as it stands in the file."""
        return self._architecture + key if key.startswith(".") else key

    def error(self, key: str, problem: str) -> ModelFileError:
        """An error about one key, to be raised by the caller."""
        return ModelFileError(f"{self._source}: metadata key {self.full_name(key)} {problem}", _HINT)

    def has(self, key: str) -> bool:
        """Whether the file has the key."""
        return self.full_name(key) in self._values

    def integer(self, key: str, low: int, high: int, default: int | None = None) -> int:
        """An integer of any GGUF width, ``low <= value <= high``."""
        return self._integer(key, self._get(key, default), low, high)

    def number(self, key: str, low: float, high: float, default: float | None = None) -> float:
        """A finite float or integer, ``low <= value <= high``."""
        return self._number(key, self._get(key, default), low, high)

    def boolean(self, key: str, default: bool | None = None) -> bool:
        """A boolean."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self.error(key, f"is {_show(value)}, expected a boolean")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A string."""
        value = self._get(key, default)
        if not isinstance(value, str):
            raise self.error(key, f"is {_show(value)}, expected a string")
        return value

    def integers(self, key: str, count: int, low: int, high: int) -> tuple[int, ...]:
        """The first ``count`` entries of an array; later ones belong to layers that are not run."""
        return tuple(self._integer(key, value, low, high) for value in self._array(key, count))

    def numbers(self, key: str, count: int, low: float, high: float) -> tuple[float, ...]:
        """The first ``count`` entries of an array of numbers; a single number stands for all of them."""
        value = self._get(key, None)
        if isinstance(value, (int, float)):
            return (self._number(key, value, low, high),) * count
        return tuple(self._number(key, entry, low, high) for entry in self._array(key, count))

    def length(self, key: str) -> int:
        """How many entries an array has."""
        return len(self._array(key, 0))

    def _array(self, key: str, count: int) -> Sequence[object]:
        value = self._get(key, None)
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise self.error(key, f"is {_show(value)}, expected an array")
        if len(value) < count:
            raise self.error(key, f"has {len(value)} entries, expected at least {count}")
        return value[:count] if count else value

    def _get(self, key: str, default: object) -> object:
        value = self._values.get(self.full_name(key), default)
        if value is None:
            raise self.error(key, "is missing")
        return value

    def _integer(self, key: str, value: object, low: int, high: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, f"is {_show(value)}, expected an integer")
        if not low <= value <= high:
            raise self.error(key, f"is {value}, expected {low} to {high}")
        return value

    def _number(self, key: str, value: object, low: float, high: float) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(key, f"is {_show(value)}, expected a number")
        if not (math.isfinite(value) and low <= value <= high):
            raise self.error(key, f"is {value}, expected {low:g} to {high:g}")
        return float(value)


def _show(value: object) -> str:
    """A value short enough for a message, whatever its size in the file."""
    if isinstance(value, str):
        return repr(value if len(value) <= 40 else value[:40] + "…")
    if isinstance(value, Sequence):
        return f"an array of {len(value)}"
    return repr(value)
