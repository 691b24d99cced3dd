"""Q4_0: 32 nibbles around 8 and one scale, ``w = d · (q − 8)``.

Block: ``f16 d; u8 q[16]``; low nibbles are elements 0-15, high nibbles 16-31.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.quant.blocks import bits, half

BLOCK_ELEMENTS = 32
BLOCK_BYTES = 18


def dequantize(blocks: Tensor) -> Tensor:
    """uint8 ``[B, 18]`` -> float32 ``[B, 32]``."""
    codes = bits(blocks[:, 2:], (0, 4), 4).flatten(1).to(torch.float32)
    return half(blocks[:, :2]) * (codes - 8)
