"""Pieces that several block formats share: little-endian fields and bit fields of a byte tensor.

Every format keeps its weights in blocks: a fixed number of elements in a fixed number of bytes, a row being
a whole number of blocks. The functions here take blocks as uint8 ``[B, block_bytes]`` (or a slice of their
columns).
"""

from __future__ import annotations

import torch
from torch import Tensor


def half(field: Tensor) -> Tensor:
    """IEEE half ``[..., 2]`` uint8 -> float32 ``[..., 1]``, exact."""
    return field.contiguous().view(torch.float16).to(torch.float32)


def bits(codes: Tensor, shifts: tuple[int, ...], width: int) -> Tensor:
    """Bit fields of every byte: uint8 ``[..., N]`` -> uint8 ``[..., len(shifts), N]``.

    Field s of a byte is ``(byte >> shifts[s]) & (2^width − 1)``.
    """
    by = torch.tensor(shifts, dtype=torch.uint8, device=codes.device).unsqueeze(-1)
    return (codes.unsqueeze(-2) >> by) & ((1 << width) - 1)


def k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """The eight 6-bit scales and eight 6-bit minima of a Q4_K or Q5_K block.

    Args:
        packed: uint8 ``[B, 12]``. Bytes 0-3 hold scales 0-3 and bytes 4-7 minima 0-3 in their low six bits;
            bytes 8-11 hold the low nibbles of scales 4-7 (low) and minima 4-7 (high), whose upper two bits
            are the upper two bits of bytes 0-3 and 4-7.

    Returns:
        Scales and minima, float32 ``[B, 8]`` each.
    """
    scales, minima, low = packed.split(4, dim=1)
    upper_scales = (low & 0x0F) | ((scales >> 2) & 0x30)
    upper_minima = (low >> 4) | ((minima >> 2) & 0x30)
    return (
        torch.cat([scales & 0x3F, upper_scales], dim=1).to(torch.float32),
        torch.cat([minima & 0x3F, upper_minima], dim=1).to(torch.float32),
    )
