"""How a row of keys is stored: packed exactly as the model rounds it, or as float32 when rounding is off."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kernels.rounding import (
    FP4_BLOCK,
    FP8_BLOCK,
    hadamard,
    pack_fp4,
    pack_fp8,
    to_bf16,
    unpack_fp4,
    unpack_fp8,
)

Planes = tuple[Tensor, ...]
"""Parallel tensors whose leading dimension is the row."""


class RowCodec(Protocol):
    """Rounds rows and stores them; ``decode(encode(x))`` is the rounding, and is exact on a rounded row."""

    @property
    def row_bytes(self) -> int: ...

    def allocate(self, rows: int, device: torch.device) -> Planes: ...

    def encode(self, x: Tensor) -> Planes: ...

    def decode(self, planes: Planes) -> Tensor: ...


class Float32Rows:
    """float32 as is: rounding off, as in the `transformers` implementation."""

    def __init__(self, dim: int) -> None:
        self._dim = dim
        self.row_bytes = 4 * dim

    def allocate(self, rows: int, device: torch.device) -> Planes:
        return (torch.zeros(rows, self._dim, device=device),)

    def encode(self, x: Tensor) -> Planes:
        return (x,)

    def decode(self, planes: Planes) -> Tensor:
        return planes[0]


class KeyRows:
    """Key/value rows: FP8 with a scale per 64 for the leading dimensions, bfloat16 for the rotated ones.

    At Flash's sizes 448 + 7 + 128 = 583 bytes.
    """

    def __init__(self, head_dim: int, rope_dim: int) -> None:
        self._plain_dim = head_dim - rope_dim
        self._rope_dim = rope_dim
        self._scales = -(-self._plain_dim // FP8_BLOCK)
        self.row_bytes = self._plain_dim + self._scales + 2 * rope_dim

    def allocate(self, rows: int, device: torch.device) -> Planes:
        return (
            torch.zeros(rows, self._plain_dim, dtype=torch.float8_e4m3fn, device=device),
            torch.zeros(rows, self._scales, dtype=torch.uint8, device=device),
            torch.zeros(rows, self._rope_dim, dtype=torch.bfloat16, device=device),
        )

    def encode(self, x: Tensor) -> Planes:
        rounded = to_bf16(x)
        codes, exponents = pack_fp8(rounded[..., : self._plain_dim])
        return codes, exponents, rounded[..., self._plain_dim :].to(torch.bfloat16)

    def decode(self, planes: Planes) -> Tensor:
        codes, exponents, rotated = planes
        return torch.cat((unpack_fp8(codes, exponents), rotated.to(torch.float32)), dim=-1)


class IndexRows:
    """Indexer rows: a Hadamard turn, then FP4 with a scale per 32. At Flash's sizes 64 + 4 = 68 bytes."""

    def __init__(self, dim: int) -> None:
        self._dim = dim
        self._scales = -(-dim // FP4_BLOCK)
        self.row_bytes = dim // 2 + self._scales

    def allocate(self, rows: int, device: torch.device) -> Planes:
        return (
            torch.zeros(rows, self._dim // 2, dtype=torch.uint8, device=device),
            torch.zeros(rows, self._scales, dtype=torch.uint8, device=device),
        )

    def encode(self, x: Tensor) -> Planes:
        return pack_fp4(to_bf16(hadamard(to_bf16(x))))

    def decode(self, planes: Planes) -> Tensor:
        return unpack_fp4(*planes)


def take(planes: Planes, index: Tensor) -> Planes:
    """The rows at ``index`` (any shape), plane by plane."""
    return tuple(_bytes(plane)[index].view(plane.dtype) for plane in planes)


def put(planes: Planes, index: Tensor, rows: Planes) -> None:
    """Writes ``rows`` at ``index``, in place."""
    for plane, row in zip(planes, rows, strict=True):
        _bytes(plane)[index] = _bytes(row)


def _bytes(plane: Tensor) -> Tensor:
    # Indexing is not implemented for every 8-bit float; a byte view of the same memory is.
    return plane.view(torch.uint8) if plane.dtype == torch.float8_e4m3fn else plane
