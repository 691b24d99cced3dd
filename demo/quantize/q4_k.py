"""Q4_K: 8 sub-blocks of 32 four-bit codes with six-bit scales and minimums; 144 bytes for 256 values."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from demo.quantize.affine import importance, search
from demo.quantize.blocks import SUPER_BLOCK, TINY, as_bytes, half_bytes, to_half

_TOP = 15
_SCALE_TOP = 63


def codes(x: Tensor, columns: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``d [N]``, ``dmin [N]``, scales, minimums ``[N, 8]`` and
    codes ``[N, 8, 32]`` of blocks ``[N, 256]``."""
    parts = x.unflatten(-1, (8, 32))
    weight = importance(x, columns).unflatten(-1, (8, 32))
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
    """Rows of bytes ``[..., columns / 256 · 144]``."""
    d, dmin, scales, minimums, code = codes(x.reshape(-1, SUPER_BLOCK), columns)
    sc, mn = as_bytes(scales), as_bytes(minimums)
    first, last = slice(0, 4), slice(4, 8)
    head = np.concatenate(
        (
            sc[:, first] | sc[:, last] >> 4 << 6,
            mn[:, first] | mn[:, last] >> 4 << 6,
            sc[:, last] & 15 | (mn[:, last] & 15) << 4,
        ),
        -1,
    )
    nibbles = as_bytes(code).reshape(-1, 4, 2, 32)
    packed = (nibbles[:, :, 0] | nibbles[:, :, 1] << 4).reshape(-1, 128)
    blocks = np.concatenate((half_bytes(d), half_bytes(dmin), head, packed), -1)
    return blocks.reshape(*x.shape[:-1], -1)
