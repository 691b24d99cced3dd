"""Streams a tensor, or a shard of one, from its file into memory that is already there.

Bytes go through one staging buffer of at most :data:`STAGING_BYTES` (or one row, where a row is longer),
never through a mapping, and the pages read are dropped from the page cache at once: on a box whose memory
is shared with the accelerator, cached file pages are memory the model cannot have.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.quant.formats import dequantize
from worker.errors import ModelFileError
from worker.gguf.read import TensorInfo

STAGING_BYTES = 16 << 20
_DEQUANTIZED_ELEMENTS = 1 << 20
"""Elements dequantized at a time: temporaries are several float32 and int64 tensors of this size."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")

OnBytes = Callable[[int], None]
"""Told how many bytes of the file have been read since it was last told."""


@dataclass(frozen=True)
class Shard:
    """A box cut out of a tensor; None takes a whole dimension.

    ``experts`` selects along the leading dimension of a three-dimensional tensor, ``rows`` along the last
    but one, ``columns`` along the last, in whole blocks of the tensor's format. Ranges are contiguous.
    """

    experts: range | None = None
    rows: range | None = None
    columns: range | None = None

    def ranges(self, info: TensorInfo) -> tuple[range, range, range]:
        """Experts, rows and columns of the tensor; missing dimensions count as one.

        Raises:
            ValueError: a range is empty, not contiguous, outside the tensor, of a dimension that the tensor
                lacks, or cuts a block.
        """
        full = (1,) * (3 - len(info.shape)) + info.shape
        if len(full) != 3:
            raise ValueError(f"{info.name} has {len(info.shape)} dimensions, at most 3 can be read")
        chosen: list[range] = []
        for axis, (part, size) in enumerate(zip((self.experts, self.rows, self.columns), full, strict=True)):
            if part is None:
                chosen.append(range(size))
                continue
            if axis < 3 - len(info.shape):
                raise ValueError(f"{info.name} of shape {info.shape} has no such dimension to take {part} of")
            if part.step != 1 or not 0 <= part.start < part.stop <= size:
                raise ValueError(f"{part} is not a part of the {size} in {info.name}")
            chosen.append(part)
        block = info.format.block_elements
        if chosen[2].start % block or len(chosen[2]) % block:
            raise ValueError(f"columns {chosen[2]} of {info.name} cut {info.format.name} blocks of {block}")
        return chosen[0], chosen[1], chosen[2]

    def shape(self, info: TensorInfo) -> tuple[int, ...]:
        """Shape of the part, with as many dimensions as the tensor."""
        sizes = tuple(len(part) for part in self.ranges(info))
        return sizes[3 - len(info.shape) :]

    def nbytes(self, info: TensorInfo) -> int:
        """Bytes of the part in the tensor's own format."""
        experts, rows, columns = self.ranges(info)
        return len(experts) * len(rows) * info.format.row_bytes(len(columns))


WHOLE = Shard()


def read_rows(
    info: TensorInfo,
    out: Tensor,
    shard: Shard = WHOLE,
    *,
    on_bytes: OnBytes | None = None,
    staging: Tensor | None = None,
) -> None:
    """Reads a shard and dequantizes it into ``out``.

    Args:
        info: a tensor of an opened file.
        out: ``shard.shape(info)`` on any device and with any strides: a floating dtype (float32 holds the
            values exactly, narrower ones round them), or int32 for I32.
        shard: which part.
        on_bytes: called after every read from the file.
        staging: uint8 memory to read through (pinned, say), one row at least; allocated here when None.

    Raises:
        ModelFileError: the file is gone, unreadable, or shorter than when it was opened.
        ValueError: ``out`` or the shard does not fit the tensor.
    """
    is_table = info.format.dequantize is None
    if tuple(out.shape) != shard.shape(info):
        raise ValueError(f"{info.name}: out is {tuple(out.shape)}, the shard {shard.shape(info)}")
    if (out.dtype != torch.int32) if is_table else (not out.dtype.is_floating_point):
        raise ValueError(f"{info.name} holds {info.format.name}, which does not go into {out.dtype}")
    columns = len(shard.ranges(info)[2])
    step = max(1, _DEQUANTIZED_ELEMENTS // columns)
    target = _three_dimensional(out)
    for expert, row, raw in _stream(info, shard, staging, on_bytes):
        for begin in range(0, raw.shape[0], step):
            part = raw[begin : begin + step]
            values = (
                part.contiguous().view(torch.int32) if is_table else dequantize(part, info.format, columns)
            )
            target[expert, row + begin : row + begin + part.shape[0]].copy_(values)


def read_raw(
    info: TensorInfo,
    out: Tensor,
    shard: Shard = WHOLE,
    *,
    on_bytes: OnBytes | None = None,
    staging: Tensor | None = None,
) -> None:
    """Reads a shard's bytes as they are.

    Like :func:`read_rows`, but ``out`` is uint8 whose last dimension counts the bytes of the selected
    columns.
    """
    row_bytes = info.format.row_bytes(len(shard.ranges(info)[2]))
    expected = (*shard.shape(info)[:-1], row_bytes)
    if tuple(out.shape) != expected or out.dtype != torch.uint8:
        raise ValueError(f"{info.name}: out is {out.dtype} {tuple(out.shape)}, the shard uint8 {expected}")
    target = _three_dimensional(out)
    for expert, row, raw in _stream(info, shard, staging, on_bytes):
        target[expert, row : row + raw.shape[0]].copy_(raw)


def stream_raw(info: TensorInfo, staging: Tensor, on_bytes: OnBytes | None = None) -> Iterator[Tensor]:
    """A tensor's rows in order as the file has them, uint8 ``[n, row_bytes]``, runs of them in ``staging``.

    A run is overwritten by the next. ``staging`` is contiguous uint8 of at least one row.
    """
    for _expert, _row, raw in _stream(info, WHOLE, staging, on_bytes):
        yield raw


def _three_dimensional(out: Tensor) -> Tensor:
    while out.dim() < 3:
        out = out.unsqueeze(0)
    return out


def _stream(
    info: TensorInfo, shard: Shard, staging: Tensor | None, on_bytes: OnBytes | None
) -> Iterator[tuple[int, int, Tensor]]:
    """Runs of rows: expert and first row, counted within the shard, and uint8 ``[n, bytes of the columns]``.

    A run is overwritten by the next.
    A shard of columns reads whole rows and leaves the rest: a disk reads whole pages, and rows are shorter.
    """
    experts, rows, columns = shard.ranges(info)
    row_bytes = info.row_bytes
    left = info.format.row_bytes(columns.start)
    right = left + info.format.row_bytes(len(columns))
    per_run = max(1, min(STAGING_BYTES // row_bytes, len(rows)))
    if staging is None:
        staging = torch.empty(per_run * row_bytes, dtype=torch.uint8)
    elif staging.dtype != torch.uint8 or staging.numel() < row_bytes or not staging.is_contiguous():
        raise ValueError(f"{info.name}: staging must be contiguous uint8 of at least {row_bytes} bytes")
    per_run = min(per_run, staging.numel() // row_bytes)
    window = staging.view(-1).numpy().data
    rows_of_expert = 1 if len(info.shape) < 2 else info.shape[-2]
    with _Source(info) as source:
        for expert in experts:
            for row in range(rows.start, rows.stop, per_run):
                count = min(per_run, rows.stop - row)
                offset = info.offset + (expert * rows_of_expert + row) * row_bytes
                source.read(window[: count * row_bytes], offset)
                if on_bytes is not None:
                    on_bytes(count * row_bytes)
                raw = staging.view(-1)[: count * row_bytes].view(count, row_bytes)
                yield expert - experts.start, row - rows.start, raw[:, left:right]


class _Source:
    """A tensor's file, open for as long as it is streamed."""

    def __init__(self, info: TensorInfo) -> None:
        self._info = info
        self._descriptor = -1

    def __enter__(self) -> _Source:
        try:
            self._descriptor = os.open(self._info.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self._error(f"cannot be opened: {error.strerror}") from error
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._descriptor)

    def read(self, window: memoryview, offset: int) -> None:
        """Fills the window from the offset on and drops the pages behind."""
        done = 0
        while done < len(window):
            try:
                count = os.preadv(self._descriptor, [window[done:]], offset + done)
            except OSError as error:
                raise self._error(f"cannot be read at byte {offset + done}: {error.strerror}") from error
            if count == 0:
                raise self._error(f"ends at byte {offset + done}, within tensor {self._info.name}")
            done += count
        # The cache keeps pages in runs (of 2 MiB, say) and drops only whole ones: reach back for the run in
        # which the read before this one ended.
        begin = max(0, offset - STAGING_BYTES) // _PAGE_BYTES * _PAGE_BYTES
        end = -(-(offset + done) // _PAGE_BYTES) * _PAGE_BYTES
        os.posix_fadvise(self._descriptor, begin, end - begin, os.POSIX_FADV_DONTNEED)

    def _error(self, problem: str) -> ModelFileError:
        return ModelFileError(
            f"{self._info.path}: {problem}", "leave the model's files in place while it loads"
        )
