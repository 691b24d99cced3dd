"""Rotary angles of a step's rows."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.gpu.keys import Turns
from kernels.rope import YarnScaling, inverse_frequencies
from worker.model.config import ModelConfig


class Frequencies:
    """The model's rotary frequencies by compression ratio (0: layers without entries)."""

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        yarn = YarnScaling(**vars(config.yarn)) if config.yarn else None
        plain = inverse_frequencies(config.rope_dim, config.rope_base, None)
        compressed = inverse_frequencies(config.rope_dim, config.compress_rope_base, yarn)
        self.ratios = tuple(sorted(set(config.compress_ratios)))
        self._frequencies = {ratio: (compressed if ratio else plain).to(device) for ratio in self.ratios}

    def turns(self, positions: Tensor, ratio: int) -> Turns:
        """For rows at ``positions``, int32 ``[T]``, in layers of this ratio."""
        frequencies = self._frequencies[ratio]
        angles = positions.to(torch.float32)[:, None] * frequencies
        starts = (positions + 1 - ratio).to(torch.float32)[:, None] * frequencies
        return Turns(angles.cos(), angles.sin(), starts.cos(), starts.sin())
