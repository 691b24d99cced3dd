"""Rotary angles of a batch, for layers without and with compressed entries."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from worker.model.config import ModelConfig


class Angles(NamedTuple):
    """Cosine and sine for rows without heads (``[N, R/2]``) and with them (``[N, 1, R/2]``)."""

    rows: tuple[Tensor, Tensor]
    heads: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Rotary:
    """Angles of ratio-0 layers (``main``) and of the others (``compress``)."""

    main: Angles
    compress: Angles

    @classmethod
    def of(cls, config: ModelConfig, positions: Tensor) -> Rotary:
        """Angles at ``positions`` int64 ``[N]``, in float32."""
        device = positions.device
        return cls(
            _angles(positions, frequencies(config, compressed=False).to(device)),
            _angles(positions, frequencies(config, compressed=True).to(device)),
        )


def frequencies(config: ModelConfig, compressed: bool) -> Tensor:
    """float32 ``[R/2]``; YaRN stretches the low ones of layers with compressed entries."""
    dim = config.rope_dim
    base = config.compress_rope_base if compressed else config.rope_base
    plain = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    yarn = config.yarn
    if yarn is None or not compressed:
        return plain

    def turning(rotations: float) -> float:
        return dim * math.log(yarn.original_context / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(turning(yarn.beta_fast)), 0)
    high = min(math.ceil(turning(yarn.beta_slow)), dim - 1)
    ramp = (torch.arange(dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    keep = 1 - ramp.clamp(0, 1)
    return plain / yarn.factor * (1 - keep) + plain * keep


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the interleaved pairs of the last ``2·cos.shape[-1]`` dimensions."""
    width = 2 * cos.shape[-1]
    pairs = x[..., -width:].float().unflatten(-1, (-1, 2))
    a, b = pairs[..., 0], pairs[..., 1]
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2).to(x.dtype)
    return torch.cat((x[..., :-width], turned), -1)


def _angles(positions: Tensor, inverse: Tensor) -> Angles:
    angle = positions[..., None].float() * inverse
    cos, sin = angle.cos(), angle.sin()
    return Angles((cos, sin), (cos.unsqueeze(1), sin.unsqueeze(1)))
