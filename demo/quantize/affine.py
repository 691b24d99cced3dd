"""Search of a scale and a minimum for blocks of small codes: x ≈ scale·code − minimum, minimum ≥ 0."""

from __future__ import annotations

import torch
from torch import Tensor

from demo.quantize.blocks import TINY

_SHRINKS = (1.0, 0.92, 0.84, 0.76, 0.66)


def search(x: Tensor, weight: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """The scale and minimum with the least weighted squared error among a few candidates.

    Each candidate's codes follow from a part of the block's range; scale and minimum are then solved for
    those codes.

    Args:
        x: float32 ``[..., n]``.
        weight: the squared errors' weights, same shape.
        top: the highest code.

    Returns:
        float32 ``[...]`` each, both at least 0.
    """
    low = x.amin(-1, keepdim=True).clamp(max=0)
    high = x.amax(-1, keepdim=True).clamp(min=0)
    best_error = x.new_full(x.shape[:-1], float("inf"))
    best_scale, best_minimum = torch.zeros_like(best_error), torch.zeros_like(best_error)
    for shrink in _SHRINKS:
        step = ((high - low) * shrink / top).clamp(min=TINY)
        code = ((x - low * shrink) / step).round().clamp(0, top)
        scale, minimum = _solve(x, weight, code)
        again = ((x + minimum[..., None]) / scale.clamp(min=TINY)[..., None]).round().clamp(0, top)
        scale, minimum = _solve(x, weight, again)
        error = (weight * (scale[..., None] * again - minimum[..., None] - x).square()).sum(-1)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        best_scale = torch.where(better, scale, best_scale)
        best_minimum = torch.where(better, minimum, best_minimum)
    return best_scale, best_minimum


def _solve(x: Tensor, weight: Tensor, code: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted least squares for given codes, the minimum kept from going below zero."""
    total = weight.sum(-1)
    c, cc = (weight * code).sum(-1), (weight * code * code).sum(-1)
    v, cv = (weight * x).sum(-1), (weight * code * x).sum(-1)
    determinant = total * cc - c * c
    usable = determinant > 1e-8 * total * cc.clamp(min=TINY)
    divisor = torch.where(usable, determinant, torch.ones_like(determinant))
    scale = (total * cv - c * v) / divisor
    minimum = (c * cv - cc * v) / divisor
    alone = cv / cc.clamp(min=TINY)
    plain = ~usable | (minimum < 0)
    scale = torch.where(plain, alone, scale).clamp(min=0)
    return scale, torch.where(plain, torch.zeros_like(minimum), minimum)


def importance(x: Tensor, columns: Tensor | None) -> Tensor:
    """Weights of the errors: large values matter more, and columns whose inputs are larger.

    Args:
        x: blocks ``[N, 256]``.
        columns: mean squares of the inputs ``[N, 256]``, or None when unknown.
    """
    spread = x.square().mean(-1, keepdim=True)
    weight = (spread + x.square()).sqrt()
    return weight if columns is None else weight * columns
