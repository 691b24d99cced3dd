"""The roundings the model was trained with, and their packed forms.

Key/value rows: the leading dimensions in FP8 (E4M3) with one power-of-two scale per 64, the rotated ones in
bfloat16. Indexer rows: a Hadamard turn, then FP4 (E2M1) with one power-of-two scale per 32. Scales being
powers of two, the packed form is exact: packing a rounded row and unpacking it gives the row back.

Every rounding is preceded by one to bfloat16, as in the official model.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

FP8_BLOCK = 64
FP4_BLOCK = 32
FP8_MAX = 448.0
FP4_MAX = 6.0
_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# Half-way points between neighbours. A value on one goes to the even code: True where that is the lower one.
_FP4_BORDERS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_FP4_BORDER_GOES_DOWN = (True, False, True, False, True, False, True)
_EXPONENT_BIAS = 127


def to_bf16(x: Tensor) -> Tensor:
    """Rounds float32 values to bfloat16 precision, staying in float32."""
    return x.to(torch.bfloat16).to(torch.float32)


def pack_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds blocks of 64 to FP8.

    Args:
        x: float32 ``[..., D]``; the last block may be shorter.

    Returns:
        codes, float8_e4m3fn ``[..., D]``, and exponents, uint8 ``[..., ceil(D/64)]`` (scale = 2^(exponent −
        127)).
    """
    blocks = _blocks(x, FP8_BLOCK)
    exponents = _exponents(blocks.abs().amax(-1).clamp(min=1e-4), FP8_MAX)
    scaled = (blocks / _scale(exponents)[..., None]).clamp(-FP8_MAX, FP8_MAX)
    return scaled.flatten(-2)[..., : x.shape[-1]].to(torch.float8_e4m3fn), exponents


def unpack_fp8(codes: Tensor, exponents: Tensor) -> Tensor:
    """float32 ``[..., D]`` from :func:`pack_fp8`'s pair."""
    scale = _scale(exponents).repeat_interleave(FP8_BLOCK, dim=-1)[..., : codes.shape[-1]]
    return codes.to(torch.float32) * scale


def pack_fp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds blocks of 32 to FP4, ties to the even code.

    Args:
        x: float32 ``[..., D]``, D even; the last block may be shorter.

    Returns:
        codes, uint8 ``[..., D/2]`` (low nibble first; bit 3 is the sign), and exponents, uint8 ``[...,
        ceil(D/32)]``.
    """
    blocks = _blocks(x, FP4_BLOCK)
    exponents = _exponents(blocks.abs().amax(-1).clamp(min=6 * 2.0**-126), FP4_MAX)
    scaled = (blocks / _scale(exponents)[..., None]).clamp(-FP4_MAX, FP4_MAX).flatten(-2)[..., : x.shape[-1]]
    magnitude = scaled.abs()
    code = torch.zeros(magnitude.shape, dtype=torch.uint8)
    for border, goes_down in zip(_FP4_BORDERS, _FP4_BORDER_GOES_DOWN, strict=True):
        code += (magnitude > border) if goes_down else (magnitude >= border)
    code |= torch.signbit(scaled).to(torch.uint8) << 3
    return code[..., 0::2] | (code[..., 1::2] << 4), exponents


def unpack_fp4(codes: Tensor, exponents: Tensor) -> Tensor:
    """float32 ``[..., D]`` from :func:`pack_fp4`'s pair."""
    table = torch.tensor([*_FP4_VALUES, *(-value for value in _FP4_VALUES)])
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    scale = _scale(exponents).repeat_interleave(FP4_BLOCK, dim=-1)[..., : nibbles.shape[-1]]
    return table[nibbles.to(torch.int64)] * scale


def hadamard(x: Tensor) -> Tensor:
    """The orthonormal Walsh-Hadamard turn of the last dimension (a power of two), float32.

    Butterflies in natural order; both sides of the index score are turned, so only the rounding after it
    shows.
    """
    size = x.shape[-1]
    stride = 1
    while stride < size:
        pairs: Tensor = x.unflatten(-1, (size // (2 * stride), 2, stride))
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((a + b, a - b), dim=-2).flatten(-3)
        stride *= 2
    return x.mul(size**-0.5)


def _blocks(x: Tensor, block: int) -> Tensor:
    blocks: Tensor = F.pad(x, (0, -x.shape[-1] % block)).unflatten(-1, (-1, block))
    return blocks


def _exponents(amax: Tensor, largest: float) -> Tensor:
    """ceil(log2(amax / largest)) + 127 as uint8; exact, since frexp reads the exponent instead of a
    logarithm.
    """
    mantissa, exponent = torch.frexp(amax / largest)
    return (exponent - (mantissa == 0.5).to(exponent.dtype) + _EXPONENT_BIAS).clamp(1, 254).to(torch.uint8)


def _scale(exponents: Tensor) -> Tensor:
    return (exponents.to(torch.int32) << 23).view(torch.float32)  # the bits of 2^(exponent − 127)
