"""Functions of single numbers whose result does not depend on where in a tensor the number stands.

A vectorised loop computes whole vectors one way and what is left over at its end (or at the border between
two threads) another way, which may differ in the last bit. Here every number goes through the vector form:
tensors are cut into pieces of one size, small enough to stay on one thread, and the last piece is padded.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

_PIECE = 16384  # below the number of elements from which torch splits work among threads
_VECTOR = 64  # a multiple of every vector loop's step


def exp(x: Tensor) -> Tensor:
    """e^x."""
    return _apply(torch.exp, x)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^−x)."""
    return _apply(torch.sigmoid, x)


def silu(x: Tensor) -> Tensor:
    """x · sigmoid(x)."""
    return _apply(F.silu, x)


def softplus(x: Tensor) -> Tensor:
    """ln(1 + e^x); the identity above 20."""
    return _apply(F.softplus, x)


def cos(x: Tensor) -> Tensor:
    """Cosine of radians."""
    return _apply(torch.cos, x)


def sin(x: Tensor) -> Tensor:
    """Sine of radians."""
    return _apply(torch.sin, x)


def _apply(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    flat = x.reshape(-1)
    count = flat.numel()
    if count <= _PIECE and count % _VECTOR == 0:
        return function(flat).view(x.shape)
    padded = F.pad(flat, (0, -count % _VECTOR))
    pieces = [function(piece) for piece in padded.split(_PIECE)]
    return torch.cat(pieces)[:count].view(x.shape)
