"""Q4_K: 256 nibbles, a 6-bit scale and minimum for every 32, ``w = d · scale · q − dmin · minimum``.

Block: ``f16 d; f16 dmin; u8 s[12]; u8 q[128]``. Byte r of quarter k holds element ``64 k + r`` in its low
nibble and ``64 k + 32 + r`` in its high one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.quant.blocks import bits, half, k_scales

BLOCK_ELEMENTS = 256
BLOCK_BYTES = 144


def dequantize(blocks: Tensor) -> Tensor:
    """uint8 ``[B, 144]`` -> float32 ``[B, 256]``."""
    scales, minima = k_scales(blocks[:, 4:16])
    scales = half(blocks[:, :2]) * scales
    minima = half(blocks[:, 2:4]) * minima
    codes = bits(blocks[:, 16:].reshape(-1, 4, 32), (0, 4), 4).reshape(-1, 8, 32).to(torch.float32)
    return (scales.unsqueeze(2) * codes - minima.unsqueeze(2)).flatten(1)
