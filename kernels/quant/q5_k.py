"""Q5_K: 256 five-bit codes, a 6-bit scale and minimum for every 32, ``w = d · scale · q − dmin · minimum``.

Block: ``f16 d; f16 dmin; u8 s[12]; u8 high[32]; u8 q[128]``. Nibbles lie as in Q4_K; the fifth bit of element
``32 j + r`` is bit j of ``high[r]``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.quant.blocks import bits, half, k_scales

BLOCK_ELEMENTS = 256
BLOCK_BYTES = 176


def dequantize(blocks: Tensor) -> Tensor:
    """uint8 ``[B, 176]`` -> float32 ``[B, 256]``."""
    scales, minima = k_scales(blocks[:, 4:16])
    scales = half(blocks[:, :2]) * scales
    minima = half(blocks[:, 2:4]) * minima
    fifth = bits(blocks[:, 16:48], (0, 1, 2, 3, 4, 5, 6, 7), 1)
    nibbles = bits(blocks[:, 48:].reshape(-1, 4, 32), (0, 4), 4).reshape(-1, 8, 32)
    codes = (nibbles | (fifth << 4)).to(torch.float32)
    return (scales.unsqueeze(2) * codes - minima.unsqueeze(2)).flatten(1)
