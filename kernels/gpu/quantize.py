"""Activations as signed bytes, one scale for every 32, in the order the matrix kernels read them.

A vector of K numbers becomes eight planes of K/32 words: word i of group g holds the four bytes of elements
``32 g + 4 i`` to ``32 g + 4 i + 3``. So a thread that owns a group reads its eight words from eight
contiguous runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

GROUP = 32


@dataclass(frozen=True)
class Quantized:
    """``words`` int32 ``[T, 8, K/32]`` and ``scales`` float32 ``[T, K/32]``: ``x = scale · byte``."""

    words: Tensor
    scales: Tensor

    @classmethod
    def empty(cls, rows: int, columns: int, device: torch.device) -> Quantized:
        """Memory for ``rows`` vectors of ``columns`` numbers, a multiple of 32."""
        groups = columns // GROUP
        return cls(
            torch.zeros(rows, 8, groups, dtype=torch.int32, device=device),
            torch.zeros(rows, groups, device=device),
        )


@triton.jit
def store_quantized(x, words, scales, groups, K32: tl.constexpr, G: tl.constexpr):
    """Rounds ``x [G · 32]`` and stores it as the ``groups [G]`` of a vector at ``words`` and ``scales``."""
    x = tl.reshape(x, [G, 8, 4])
    scale = tl.max(tl.max(tl.abs(x), axis=2), axis=1) / 127.0
    inverse = tl.where(scale > 0, 1.0 / scale, 0.0)
    bytes_ = tl.floor(x * inverse[:, None, None] + 0.5).to(tl.int32) & 255
    packed = tl.sum(bytes_ << (8 * tl.arange(0, 4))[None, None, :], axis=2)
    at = tl.arange(0, 8)[None, :] * K32 + groups[:, None]
    tl.store(words + at, packed)
    tl.store(scales + groups, scale)


@triton.jit
def _quantize(x, words, scales, K32: tl.constexpr, G: tl.constexpr):
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    groups = part * G + tl.arange(0, G)
    values = tl.load(x + row * K32 * 32 + part * G * 32 + tl.arange(0, G * 32))
    store_quantized(values, words + row * K32 * 8, scales + row * K32, groups, K32, G)


def quantize(x: Tensor, out: Quantized) -> None:
    """Rounds every row of ``x``, float32 ``[T, K]`` contiguous, into ``out``.

    K is a multiple of 32.
    """
    rows, columns = x.shape
    groups = columns // GROUP
    tile = min(groups & -groups, 16)
    _quantize[(groups // tile, rows)](
        x, out.words, out.scales, groups, tile, num_warps=4 if tile == 16 else 1
    )
