"""A forward reader over a file's beginning that checks every length before it allocates."""

from __future__ import annotations

import os
import stat
import struct
from pathlib import Path
from types import TracebackType

from worker.errors import ModelFileError

_BUFFER_BYTES = 1 << 20
_MAX_HEADER_BYTES = 1 << 28
"""Far above any real file's header (about 6 MB); keeps a hostile one from filling the memory."""

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

DAMAGED = "the file is damaged or its download incomplete; fetch it again"


class Cursor:
    """Reads little-endian values from the start of a regular file, through one buffer of 1 MiB at most.

    Raises:
        ModelFileError: there is no such regular file, it cannot be read, or it ends too early.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = 0
        """Offset in the file of the next byte."""
        self._buffer = b""
        self._at = 0
        self._descriptor, self.size = _open_regular(path)

    def __enter__(self) -> Cursor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    @property
    def remaining(self) -> int:
        """Bytes left in the file."""
        return self.size - self.position

    def error(self, problem: str, hint: str = DAMAGED) -> ModelFileError:
        """An error about this file, to be raised by the caller."""
        return ModelFileError(f"{self.path}: {problem}", hint)

    def require(self, count: int, each: int, what: str) -> None:
        """Refuses ``count`` items of at least ``each`` bytes that the rest of the file cannot hold."""
        if count * each > self.remaining:
            raise self.error(f"truncated: {what} at byte {self.position} needs {count * each} more bytes")
        if self.position + count * each > _MAX_HEADER_BYTES:
            raise self.error(f"{what} goes beyond {_MAX_HEADER_BYTES} bytes of header")

    def take(self, count: int, what: str) -> bytes:
        """The next ``count`` bytes."""
        end = self._at + count
        if end > len(self._buffer):
            self.require(count, 1, what)
            self._fill(count)
            end = count
        data = self._buffer[self._at : end]
        self._at = end
        self.position += count
        return data

    def u32(self, what: str) -> int:
        """The next unsigned 32-bit integer."""
        return int(_U32.unpack(self.take(4, what))[0])

    def u64(self, what: str) -> int:
        """The next unsigned 64-bit integer."""
        return int(_U64.unpack(self.take(8, what))[0])

    def text(self, limit: int, what: str) -> str:
        """The next string: its length in bytes as u64, at most ``limit``, then UTF-8."""
        length = self.u64(f"length of {what}")
        if length > limit:
            raise self.error(f"{what} at byte {self.position} has {length} bytes, at most {limit} allowed")
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.error(f"{what} at byte {self.position} is not valid UTF-8") from error

    def _fill(self, count: int) -> None:
        """Makes the buffer start at the position and hold at least ``count`` bytes."""
        self._buffer = self._buffer[self._at :]
        self._at = 0
        while len(self._buffer) < count:
            offset = self.position + len(self._buffer)
            wanted = max(count - len(self._buffer), min(_BUFFER_BYTES, self.size - offset))
            try:
                data = os.pread(self._descriptor, wanted, offset)
            except OSError as error:
                raise self.error(f"cannot be read: {error.strerror}", "check the disk") from error
            if not data:
                raise self.error(f"ends at byte {offset}, {self.size} were there when it was opened")
            self._buffer += data


def _open_regular(path: Path) -> tuple[int, int]:
    """Descriptor and size of a regular file; anything else is refused without waiting on it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise ModelFileError(f"{path}: no such file", "check the path of the model") from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ModelFileError(
            f"{path}: cannot be opened: {reason}", "check the path and permissions"
        ) from error
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode):
        return descriptor, status.st_size
    os.close(descriptor)
    if stat.S_ISDIR(status.st_mode):
        raise ModelFileError(f"{path}: is a folder", "give the path of a .gguf file")
    raise ModelFileError(f"{path}: is not a regular file", "give the path of a .gguf file")
