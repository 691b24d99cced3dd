"""Q3_K: 256 signed three-bit codes, a signed 6-bit scale for every 16, ``w = d · (scale − 32) · q``.

Block: ``u8 high[32]; u8 q[64]; u8 s[12]; f16 d``. The low two bits of the codes lie as in Q2_K; the third
bit of element ``32 j + r`` is bit j of ``high[r]``, and where it is clear 4 is subtracted. Scales 0-7 have
their low nibbles in the low, scales 8-15 in the high nibbles of ``s[0..7]``; the upper two bits of scale
``4 j + r`` are bits ``2 j`` of ``s[8 + r]``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.quant.blocks import bits, half

BLOCK_ELEMENTS = 256
BLOCK_BYTES = 110


def dequantize(blocks: Tensor) -> Tensor:
    """uint8 ``[B, 110]`` -> float32 ``[B, 256]``."""
    low = bits(blocks[:, 96:104], (0, 4), 4).flatten(1)
    high = bits(blocks[:, 104:108], (0, 2, 4, 6), 2).flatten(1)
    scales = (low | (high << 4)).to(torch.float32) - 32
    scales = half(blocks[:, 108:110]) * scales
    codes = bits(blocks[:, 32:96].reshape(-1, 2, 32), (0, 2, 4, 6), 2).reshape(-1, 256)
    third = bits(blocks[:, :32], (0, 1, 2, 3, 4, 5, 6, 7), 1).flatten(1)
    signed = (codes | (third << 2)).to(torch.float32) - 4
    return (scales.unsqueeze(2) * signed.reshape(-1, 16, 16)).flatten(1)
