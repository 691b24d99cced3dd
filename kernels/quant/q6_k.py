"""Q6_K: 256 six-bit codes around 32, a signed byte scale for every 16, ``w = d · scale · (q − 32)``.

Block: ``u8 low[128]; u8 high[64]; i8 s[16]; f16 d``. In half h, byte r of ``low[64 h ..]`` holds the low
nibbles of elements ``128 h + r`` and ``128 h + 64 + r``; byte r of ``high[32 h ..]`` the upper two bits of
element ``128 h + 32 j + r`` at bits ``2 j``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.quant.blocks import bits, half

BLOCK_ELEMENTS = 256
BLOCK_BYTES = 210


def dequantize(blocks: Tensor) -> Tensor:
    """uint8 ``[B, 210]`` -> float32 ``[B, 256]``."""
    scales = half(blocks[:, 208:210]) * blocks[:, 192:208].view(torch.int8).to(torch.float32)
    low = bits(blocks[:, :128].reshape(-1, 2, 64), (0, 4), 4).reshape(-1, 256)
    high = bits(blocks[:, 128:192].reshape(-1, 2, 32), (0, 2, 4, 6), 2).reshape(-1, 256)
    codes = (low | (high << 4)).to(torch.float32) - 32
    return (scales.unsqueeze(2) * codes.reshape(-1, 16, 16)).flatten(1)
