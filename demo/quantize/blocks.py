"""What all quantizers share."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SUPER_BLOCK = 256
TINY = 1e-20


def to_half(x: Tensor) -> Tensor:
    """Rounded to half precision, kept in float32: a scale as the file stores it."""
    return x.to(torch.float16).float()


def half_bytes(x: Tensor) -> NDArray[np.uint8]:
    """``[..., 2]`` bytes of half-precision numbers."""
    return x.detach().cpu().numpy().astype("<f2")[..., None].view(np.uint8)


def as_bytes(x: Tensor) -> NDArray[np.uint8]:
    """Small whole numbers as bytes, for packing."""
    return x.detach().to(torch.uint8).cpu().numpy()
