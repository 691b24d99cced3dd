"""Rotary positions on the trailing dimensions of a head, pairs interleaved, optionally stretched by YaRN.

Pair i of the rotated part turns by ``position · inverse_frequency[i]``:
``a' = a·cos − b·sin, b' = a·sin + b·cos``. The angle is a float32 product of the position and the float32
inverse frequency, as the official model forms it: a float64 product is another function at long contexts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.pointwise import cos, sin


@dataclass(frozen=True)
class YarnScaling:
    """YaRN's interpolation (arXiv:2309.00071): low frequencies are divided by ``factor``, high ones kept."""

    factor: float
    original_context: int
    beta_fast: float
    beta_slow: float


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines of a batch's positions, float32 ``[T, rope_dim / 2]``."""

    cos: Tensor
    sin: Tensor

    def rows(self, index: Tensor) -> Rotation:
        """The same for a selection of rows."""
        return Rotation(self.cos[index], self.sin[index])


def inverse_frequencies(rope_dim: int, base: float, yarn: YarnScaling | None) -> Tensor:
    """float32 ``[rope_dim / 2]``: ``base^(−2i/rope_dim)``, stretched where ``yarn`` is given.

    Between the dimensions that turn ``beta_fast`` and ``beta_slow`` times over the original context the two
    frequencies are blended linearly; there is no magnitude scaling (attention factor 1).
    """
    plain = 1.0 / (base ** (torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim))
    if yarn is None:
        return plain

    def dimension(turns: float) -> float:
        return rope_dim * math.log(yarn.original_context / (turns * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(dimension(yarn.beta_fast)), 0)
    high: float = min(math.ceil(dimension(yarn.beta_slow)), rope_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(rope_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return (plain / yarn.factor) * (1 - kept) + plain * kept


def rotation(positions: Tensor, inverse_frequency: Tensor) -> Rotation:
    """Cosines and sines for int64 positions ``[T]``."""
    angles = positions.to(torch.float32)[:, None] * inverse_frequency[None, :]
    return Rotation(cos(angles), sin(angles))


def rotate(x: Tensor, turn: Rotation, *, inverse: bool = False) -> Tensor:
    """Turns the last ``rope_dim`` dimensions of every head.

    Args:
        x: float32 ``[T, D]`` or ``[T, H, D]``.
        turn: of the T positions.
        inverse: turn by the negative angle (attention output).

    Returns:
        a new tensor of x's shape.
    """
    c, s = turn.cos, -turn.sin if inverse else turn.sin
    if x.dim() == 3:
        c, s = c[:, None], s[:, None]
    rope_dim = 2 * c.shape[-1]
    out = x.clone()
    pairs = x[..., -rope_dim:]
    a, b = pairs[..., 0::2], pairs[..., 1::2]
    turned = out[..., -rope_dim:]
    turned[..., 0::2] = a * c - b * s
    turned[..., 1::2] = a * s + b * c
    return out
