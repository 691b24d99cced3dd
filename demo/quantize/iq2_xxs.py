"""IQ2_XXS: groups of eight values from a codebook of 256, signs apart; 66 bytes for 256 values.

w = d·(½ + s)·¼·grid·sign with a four-bit s a group of 32. The signs of eight values are stored in seven
bits, so that an even number of them is negative: where it would be odd, the smallest value's is turned.
"""

from __future__ import annotations

from functools import cache

import gguf.quants
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from demo.quantize.affine import importance
from demo.quantize.blocks import SUPER_BLOCK, TINY, as_bytes, half_bytes, to_half

_STEPS = 16
_PEAKS = (0.72, 0.85, 1.0, 1.15, 1.32, 1.55)
"""Candidates for the group's largest value, relative to the codebook's largest."""


def codes(x: Tensor, columns: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``d [N]``, steps ``[N, 8]``, codebook indices ``[N, 8, 4]`` and signs ``[N, 8, 4, 8]`` (±1)."""
    parts = x.unflatten(-1, (8, 4, 8))
    weight = importance(x, columns).unflatten(-1, (8, 4, 8))
    size, sign = _even_signs(parts, weight)
    grid = codebook(x.device)
    scale = _group_scales(size, weight, grid)
    d = to_half(scale.amax(-1) / (_STEPS - 0.5) * 4)
    unit = d.clamp(min=TINY)[:, None] * 0.25
    steps = (scale / unit - 0.5).round().clamp(0, _STEPS - 1)
    chosen = unit * (0.5 + steps)
    index = _nearest(size / chosen[..., None, None], weight, grid)
    return d, steps, index, sign


def rounded(x: Tensor, columns: Tensor | None = None) -> Tensor:
    """A matrix as the file will give it back, float32."""
    d, steps, index, sign = codes(x.reshape(-1, SUPER_BLOCK), columns)
    scale = (d[:, None] * 0.25 * (0.5 + steps))[..., None, None]
    return (scale * codebook(x.device)[index] * sign).view_as(x)


def pack(x: Tensor, columns: Tensor | None = None) -> NDArray[np.uint8]:
    """Rows of bytes ``[..., columns / 256 · 66]``."""
    d, steps, index, sign = codes(x.reshape(-1, SUPER_BLOCK), columns)
    bits = (as_bytes(sign < 0) << np.arange(8, dtype=np.uint8))[..., :7].sum(-1)
    word = as_bytes(steps).astype(np.uint32) << 28
    for part in range(4):
        word |= bits[..., part].astype(np.uint32) << (7 * part)
    groups = np.concatenate((as_bytes(index), word[..., None].astype("<u4").view(np.uint8)), -1)
    return np.concatenate((half_bytes(d), groups.reshape(-1, 64)), -1).reshape(*x.shape[:-1], -1)


@cache
def codebook(device: torch.device) -> Tensor:
    """float32 ``[256, 8]``."""
    gguf.quants.IQ2_XXS.init_grid()  # type: ignore[no-untyped-call]
    grid = gguf.quants.IQ2_XXS.grid
    assert grid is not None
    return torch.from_numpy(np.asarray(grid, np.float32).reshape(256, 8)).to(device)


def _even_signs(parts: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Sizes (negative where a sign was turned) and signs with an even number of minuses in eight."""
    sign = torch.where(parts < 0, -1.0, 1.0)
    odd = (sign < 0).sum(-1, keepdim=True) % 2 == 1
    cheapest = (weight * parts.square()).argmin(-1, keepdim=True)
    turn = torch.zeros_like(parts).scatter_(-1, cheapest, 1.0) * odd
    sign = sign * (1 - 2 * turn)
    return parts * sign, sign


def _group_scales(size: Tensor, weight: Tensor, grid: Tensor) -> Tensor:
    """The best scale of each group of 32, ``[N, 8]``: nearest codes for some, solved for, best kept."""
    largest = size.amax((-1, -2)).clamp(min=TINY)
    best_error = largest.new_full(largest.shape, float("inf"))
    best = torch.zeros_like(largest)
    for peak in _PEAKS:
        scale = largest / (43 * peak)
        code = grid[_nearest(size / scale[..., None, None], weight, grid)]
        square = (weight * code * code).sum((-1, -2))
        scale = (weight * code * size).sum((-1, -2)).clamp(min=0) / square
        error = (weight * (scale[..., None, None] * code - size).square()).sum((-1, -2))
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best = torch.where(better, scale, best)
    return best


def _nearest(size: Tensor, weight: Tensor, grid: Tensor) -> Tensor:
    """Indices of the codebook's nearest entries under the weights: ``[..., 8]`` to ``[...]``."""
    flat, importance = size.reshape(-1, 8), weight.reshape(-1, 8)
    distance = torch.addmm(importance @ grid.square().T, importance * flat, grid.T, alpha=-2)
    return distance.argmin(-1).view(size.shape[:-1])
