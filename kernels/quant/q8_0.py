"""Q8_0: 32 signed bytes and one scale, ``w = d · q``.

Block: ``f16 d; i8 q[32]``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.quant.blocks import half

BLOCK_ELEMENTS = 32
BLOCK_BYTES = 34


def dequantize(blocks: Tensor) -> Tensor:
    """uint8 ``[B, 34]`` -> float32 ``[B, 32]``."""
    return blocks[:, 2:].view(torch.int8).to(torch.float32) * half(blocks[:, :2])
