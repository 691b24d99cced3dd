"""Look-up tables of IQ2_XXS for the matrix kernels: eight weights in one word, a nibble each."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.quant import iq2_xxs

LEVELS = (8, 25, 43)


def grid_words(device: torch.device) -> Tensor:
    """int32 ``[256]``: the eight levels of a grid vector as codes 0, 1, 2; element i at bits 4 i."""
    levels = torch.tensor(LEVELS)
    codes = (iq2_xxs.grid()[..., None] == levels).to(torch.int64).argmax(-1)
    return _nibbles(codes).to(device)


def sign_words(device: torch.device) -> Tensor:
    """int32 ``[128]``: the eight signs of a pattern; bit 2 of nibble i is set where element i is negative."""
    return _nibbles((iq2_xxs.signs() < 0).to(torch.int64) << 2).to(device)


def _nibbles(values: Tensor) -> Tensor:
    words = (values << (4 * torch.arange(8))).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)
