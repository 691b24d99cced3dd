"""Q2_K: 16 sub-blocks of 16 two-bit codes with four-bit scales and minimums; 84 bytes for 256 values."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from demo.quantize.affine import importance, search
from demo.quantize.blocks import SUPER_BLOCK, TINY, as_bytes, half_bytes, to_half

_TOP = 3
_SCALE_TOP = 15


def codes(x: Tensor, columns: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``d [N]``, ``dmin [N]``, scales, minimums ``[N, 16]`` and
    codes ``[N, 16, 16]`` of blocks ``[N, 256]``."""
    parts = x.unflatten(-1, (16, 16))
    weight = importance(x, columns).unflatten(-1, (16, 16))
    scale, minimum = search(parts, weight, _TOP)
    d = to_half(scale.amax(-1) / _SCALE_TOP)
    dmin = to_half(minimum.amax(-1) / _SCALE_TOP)
    scales = (scale / d.clamp(min=TINY)[:, None]).round().clamp(0, _SCALE_TOP)
    minimums = (minimum / dmin.clamp(min=TINY)[:, None]).round().clamp(0, _SCALE_TOP)
    step = (d[:, None] * scales)[..., None]
    code = ((parts + (dmin[:, None] * minimums)[..., None]) / step.clamp(min=TINY)).round().clamp(0, _TOP)
    return d, dmin, scales, minimums, torch.where(step > 0, code, torch.zeros_like(code))


def rounded(x: Tensor, columns: Tensor | None = None) -> Tensor:
    """A matrix as the file will give it back, float32."""
    d, dmin, scales, minimums, code = codes(x.reshape(-1, SUPER_BLOCK), columns)
    return ((d[:, None] * scales)[..., None] * code - (dmin[:, None] * minimums)[..., None]).view_as(x)


def pack(x: Tensor, columns: Tensor | None = None) -> NDArray[np.uint8]:
    """Rows of bytes ``[..., columns / 256 · 84]``."""
    d, dmin, scales, minimums, code = codes(x.reshape(-1, SUPER_BLOCK), columns)
    head = as_bytes(scales) | as_bytes(minimums) << 4
    planes = as_bytes(code).reshape(-1, 2, 4, 32)
    packed = planes[:, :, 0] | planes[:, :, 1] << 2 | planes[:, :, 2] << 4 | planes[:, :, 3] << 6
    blocks = np.concatenate((head, packed.reshape(-1, 64), half_bytes(d), half_bytes(dmin)), -1)
    return blocks.reshape(*x.shape[:-1], -1)
