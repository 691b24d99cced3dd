"""What memory the box has, as the system tells it, and how sizes are written."""

from __future__ import annotations

import re
from pathlib import Path

from worker.errors import MemoryPlanError

_MEMINFO = Path("/proc/meminfo")
_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}
_UNITS |= {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def available_bytes() -> int:
    """What can be taken without pushing others out: MemAvailable. A process's own RSS tells nothing on
    unified memory.

    Raises:
        MemoryPlanError: the system does not say.
    """
    try:
        text = _MEMINFO.read_text(encoding="ascii")
    except OSError as error:
        raise MemoryPlanError(
            f"{_MEMINFO} cannot be read: {error.strerror}", "give the memory with --memory"
        ) from error
    match = re.search(r"^MemAvailable:\s+(\d+) kB$", text, re.MULTILINE)
    if match is None:
        raise MemoryPlanError(f"{_MEMINFO} has no MemAvailable", "give the memory with --memory")
    return int(match[1]) * 1024


def parse_bytes(text: str) -> int:
    """Bytes from ``119GiB``, ``80.5 GB``, ``512M`` or a plain number.

    Raises:
        ValueError: it is none of these, or not positive.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or (size := int(float(match[1]) * unit)) <= 0:
        raise ValueError(f"{text!r} is no size: write for instance 119GiB, 80.5GB or 512MiB")
    return size


def show_bytes(count: float) -> str:
    """For people: ``80.8 GiB``, ``512.0 MiB``, ``37 B``."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(count) >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"
