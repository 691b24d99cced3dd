"""Matrix products whose rows do not depend on their neighbours.

A matrix library picks its blocking from the shape of the product, so a row computed alone may differ in its
last bits from the same row computed among others. Here every product has :data:`ROW_TILE` rows: inputs are
padded with zero rows and cut into tiles, and a row's result is then a function of that row and the weight
alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ROW_TILE = 16
"""Rows of one product. Smaller wastes less on a single stream, larger reads the weights less often in
prefill.
"""


def pad_rows(x: Tensor) -> Tensor:
    """Appends zero rows until the first dimension is a multiple of :data:`ROW_TILE`."""
    missing = -x.shape[0] % ROW_TILE
    if missing == 0:
        return x
    return F.pad(x, [0, 0] * (x.dim() - 1) + [0, missing])


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x · weightᵀ``.

    Args:
        x: float32 ``[T, K]``.
        weight: float32 ``[N, K]``, as a linear layer stores it.

    Returns:
        float32 ``[T, N]``; row t is bitwise the same whatever the other rows are and however many there are.
    """
    rows = x.shape[0]
    padded = pad_rows(x)
    out = padded.new_empty(padded.shape[0], weight.shape[0])
    transposed = weight.t()
    for begin in range(0, padded.shape[0], ROW_TILE):
        torch.mm(padded[begin : begin + ROW_TILE], transposed, out=out[begin : begin + ROW_TILE])
    return out[:rows]
