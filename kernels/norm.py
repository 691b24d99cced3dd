"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """``x · rsqrt(mean(x²) + eps) · weight`` over the last dimension.

    Args:
        x: float32 ``[..., D]``.
        weight: float32 ``[D]``, or None for the weightless form (per-head query norm, hyper-connection
            input).
        eps: added to the mean square.
    """
    scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return scaled if weight is None else scaled * weight
