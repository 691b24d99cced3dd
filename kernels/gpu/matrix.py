"""Matrices as the kernels read them: the file's blocks taken apart into aligned planes of the same size.

============ ================================================================ ====================
format       planes                                                           bytes a weight
============ ================================================================ ====================
Q8_0         words int32 ``[N, 8, K/32]``, scale float16 ``[N, K/32]``        34 / 32
IQ2_XXS      grid int32 ``[N, K/32]``, sign int32 ``[N, K/32]``,              66 / 256
             scale float16 ``[N, K/256]``
Q2_K         words int32 ``[N, 8, K/128]``, scale int32 ``[N, K/64]``,        84 / 256
             range float16 ``[N, K/256, 2]``
Q4_K         words int32 ``[N, 8, K/64]``, scale uint8 ``[N, K/256, 12]``,    144 / 256
             range float16 ``[N, K/256, 2]``
F16, F32     one plane ``[N, K]``
============ ================================================================ ====================

In Q8_0, Q2_K and Q4_K word i of a run of bytes lies in plane i, so that neighbouring threads, each with a run
of its own, read neighbouring words. The scale bytes of Q2_K are ordered so that one word holds those of the
four codes packed into a byte. N counts the rows of all experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

PlaneShapes = Callable[[int, int], tuple[tuple[tuple[int, ...], torch.dtype], ...]]


@dataclass(frozen=True)
class Matrix:
    """A weight matrix on a device.

    Attributes:
        format: its name in :data:`PACKINGS`.
        shape: ``(N, K)``, or ``(E, N, K)`` for experts.
        planes: as the module says; an expert's rows follow the one's before.
    """

    format: str
    shape: tuple[int, ...]
    planes: tuple[Tensor, ...]

    @property
    def rows(self) -> int:
        """Of one expert."""
        return self.shape[-2]

    @property
    def columns(self) -> int:
        return self.shape[-1]


@dataclass(frozen=True)
class Packing:
    """How blocks become planes.

    ``planes`` gives shapes and types for N rows of K; ``pack`` takes raw rows uint8 ``[n, row_bytes]`` and
    gives the planes of those rows.
    """

    planes: PlaneShapes
    pack: Callable[[Tensor], tuple[Tensor, ...]]


def _q8_0(raw: Tensor) -> tuple[Tensor, ...]:
    blocks = raw.view(raw.shape[0], -1, 34)
    words = blocks[..., 2:].contiguous().view(torch.int32)
    return words.transpose(1, 2), _halves(blocks[..., :2])[..., 0]


def _iq2_xxs(raw: Tensor) -> tuple[Tensor, ...]:
    blocks = raw.view(raw.shape[0], -1, 66)
    pairs = blocks[..., 2:].contiguous().view(torch.int32).view(raw.shape[0], -1, 2)
    return pairs[..., 0], pairs[..., 1], _halves(blocks[..., :2])[..., 0]


def _q2_k(raw: Tensor) -> tuple[Tensor, ...]:
    rows = raw.shape[0]
    blocks = raw.view(rows, -1, 84)
    words = blocks[..., 16:80].contiguous().view(torch.int32).view(rows, -1, 8)
    # Byte 8 h + 2 j + s scales the codes j of words 4 s to 4 s + 3 of half h.
    scales = blocks[..., :16].reshape(rows, -1, 2, 4, 2).transpose(3, 4).contiguous().view(torch.int32)
    return words.transpose(1, 2), scales.flatten(1), _halves(blocks[..., 80:84])


def _q4_k(raw: Tensor) -> tuple[Tensor, ...]:
    rows = raw.shape[0]
    blocks = raw.view(rows, -1, 144)
    words = blocks[..., 16:].contiguous().view(torch.int32).view(rows, -1, 8)
    return words.transpose(1, 2), blocks[..., 4:16], _halves(blocks[..., :4])


def _halves(raw: Tensor) -> Tensor:
    return raw.contiguous().view(torch.float16)


PACKINGS: Mapping[str, Packing] = MappingProxyType(
    {
        "Q8_0": Packing(lambda n, k: (((n, 8, k // 32), torch.int32), ((n, k // 32), torch.float16)), _q8_0),
        "IQ2_XXS": Packing(
            lambda n, k: (
                ((n, k // 32), torch.int32),
                ((n, k // 32), torch.int32),
                ((n, k // 256), torch.float16),
            ),
            _iq2_xxs,
        ),
        "Q2_K": Packing(
            lambda n, k: (
                ((n, 8, k // 128), torch.int32),
                ((n, k // 64), torch.int32),
                ((n, k // 256, 2), torch.float16),
            ),
            _q2_k,
        ),
        "Q4_K": Packing(
            lambda n, k: (
                ((n, 8, k // 64), torch.int32),
                ((n, k // 256, 12), torch.uint8),
                ((n, k // 256, 2), torch.float16),
            ),
            _q4_k,
        ),
        "F16": Packing(lambda n, k: (((n, k), torch.float16),), lambda raw: (raw.view(torch.float16),)),
        "F32": Packing(lambda n, k: (((n, k), torch.float32),), lambda raw: (raw.view(torch.float32),)),
    }
)


def empty_planes(format: str, rows: int, columns: int, device: torch.device) -> tuple[Tensor, ...]:
    """Memory for a matrix of ``rows`` rows."""
    shapes = PACKINGS[format].planes(rows, columns)
    return tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes)


def fill_planes(planes: tuple[Tensor, ...], format: str, first: int, raw: Tensor) -> None:
    """Packs raw rows, uint8 ``[n, row_bytes]`` contiguous on the planes' device, into rows from ``first``."""
    for plane, rows in zip(planes, PACKINGS[format].pack(raw), strict=True):
        plane[first : first + raw.shape[0]].copy_(rows)
