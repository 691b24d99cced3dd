"""Q2_K: 256 two-bit codes, a 4-bit scale and minimum for every 16, ``w = d · scale · q − dmin · minimum``.

Block: ``u8 s[16]; u8 q[64]; f16 d; f16 dmin``. Byte r of half h holds the codes of elements ``128 h + 32 j
+ r`` at bits ``2 j``; byte ``s[i]`` has the scale of elements 16 i to 16 i + 15 in its low nibble, the
minimum in its high one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.quant.blocks import bits, half

BLOCK_ELEMENTS = 256
BLOCK_BYTES = 84


def dequantize(blocks: Tensor) -> Tensor:
    """uint8 ``[B, 84]`` -> float32 ``[B, 256]``."""
    packed = blocks[:, :16]
    scales = half(blocks[:, 80:82]) * (packed & 0x0F).to(torch.float32)
    minima = half(blocks[:, 82:84]) * (packed >> 4).to(torch.float32)
    codes = bits(blocks[:, 16:80].reshape(-1, 2, 32), (0, 2, 4, 6), 2)
    codes = codes.reshape(-1, 16, 16).to(torch.float32)
    return (scales.unsqueeze(2) * codes - minima.unsqueeze(2)).flatten(1)
