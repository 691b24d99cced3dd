"""F32, F16 and BF16: plain floats, a block of one element each."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_ELEMENTS = 1
F32_BYTES = 4
F16_BYTES = 2
BF16_BYTES = 2


def dequantize_f32(blocks: Tensor) -> Tensor:
    """uint8 ``[B, 4]`` -> float32 ``[B, 1]``, the same bits."""
    return blocks.view(torch.float32)


def dequantize_f16(blocks: Tensor) -> Tensor:
    """uint8 ``[B, 2]`` -> float32 ``[B, 1]``, exact."""
    return blocks.view(torch.float16).to(torch.float32)


def dequantize_bf16(blocks: Tensor) -> Tensor:
    """uint8 ``[B, 2]`` -> float32 ``[B, 1]``: the upper half of a float32, NaN payloads included."""
    return (blocks.view(torch.int16).to(torch.int32) << 16).view(torch.float32)
