"""Q8_0: 32 signed bytes and one half-precision scale; 34 bytes."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from demo.quantize.blocks import TINY, half_bytes, to_half

BLOCK = 32


def codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Scales ``[N]`` and codes ``[N, 32]`` of float32 blocks ``[N, 32]``."""
    scale = to_half(x.abs().amax(-1) / 127)
    code = (x / scale.clamp(min=TINY)[:, None]).round().clamp(-127, 127)
    return scale, torch.where(scale[:, None] > 0, code, torch.zeros_like(code))


def rounded(x: Tensor) -> Tensor:
    """A matrix as the file will give it back, float32, any shape with whole blocks a row."""
    scale, code = codes(x.reshape(-1, BLOCK))
    return (scale[:, None] * code).view_as(x)


def pack(x: Tensor) -> NDArray[np.uint8]:
    """Rows of bytes ``[..., columns / 32 · 34]``."""
    scale, code = codes(x.reshape(-1, BLOCK))
    signed = code.to(torch.int8).cpu().numpy().view(np.uint8)
    return np.concatenate((half_bytes(scale), signed), -1).reshape(*x.shape[:-1], -1)
