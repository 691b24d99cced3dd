"""MXFP4: 32 four-bit floats and one power-of-two scale, ``w = 2^(e − 128) · table[q]``.

Block: ``u8 e; u8 q[16]``; low nibbles are elements 0-15, high nibbles 16-31. The table holds the E2M1
values doubled, so that they are integers; the scale is halved to match.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.quant.blocks import bits

BLOCK_ELEMENTS = 32
BLOCK_BYTES = 17

VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""By code. Code 8 is a negative zero in E2M1 and counts as plain zero."""


def dequantize(blocks: Tensor) -> Tensor:
    """uint8 ``[B, 17]`` -> float32 ``[B, 32]``."""
    exponent = blocks[:, :1].to(torch.int32)
    # Below 2 the scale is a subnormal float32, which has no exponent field to write.
    pattern = torch.where(exponent < 2, 0x00200000 << exponent.clamp(max=1), (exponent - 1) << 23)
    values = torch.tensor(VALUES, dtype=torch.float32, device=blocks.device)
    codes = bits(blocks[:, 1:], (0, 4), 4).flatten(1)
    return pattern.view(torch.float32) * values[codes.to(torch.int64)]
