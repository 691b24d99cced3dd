"""IQ2_XXS: 256 weights from a grid of eight-vectors with signs, ``w = d · (0.5 + s) · 0.25 · grid · sign``.

Block: ``f16 d; u32 pair[8][2]``. The first word of a pair holds four grid indices for 32 elements, lowest
byte first; the second the scale s in bits 28-31 and four 7-bit sign patterns from bit 0 on. Seven signs are
stored, the eighth makes the number of minus signs even.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.quant.blocks import bits, half

BLOCK_ELEMENTS = 256
BLOCK_BYTES = 66

_LEVELS = (8.0, 25.0, 43.0)
_GRID = bytes.fromhex(
    "00000200050008000a00110014002000220028002a00410044005000580061006400800082008a00a200010104011001"
    "15014001840198010002020222028202010404041004210424044004420448046004810484049004a404000502050805"
    "200546056905800591050906100640068406a406000805080808140828084108440850085208880804094009020a140a"
    "01100410101021104010601084109010951000110811201150115a118011241245120014081420142514491480141815"
    "6215001616160118041810184018811800190519a019511a002002200a20442061208020822029214821002202220124"
    "04241024402456240025412564259026082820289428442a014004401040184021402440404048405640604081408440"
    "904000412041614180418541014210424842564268420044084420448044994412452445004601480448104840484548"
    "0049584961498249454a904a005008501150195020508050885004514251a4519152905492540a550156545600581158"
    "195864584059085a04601060406068600061556118626062006405641065126584654268008002800a80418082800481"
    "18814081118201840484108415844084608400854685948509864086608602880489118a0490109024904090a1901691"
    "8091459200942294449451958198209902a050a085a009a100a218a450a804a9"
)
"""The format's grid, two bits a value: an entry is 16 bits, lowest first, indexing the levels."""


def grid(device: torch.device | None = None) -> Tensor:
    """The 256 vectors, float32 ``[256, 8]``, without signs."""
    packed = torch.tensor(list(_GRID), dtype=torch.uint8, device=device).view(256, 2, 1)
    codes = bits(packed, (0, 2, 4, 6), 2).flatten(1)
    return torch.tensor(_LEVELS, device=device)[codes.to(torch.int64)]


def signs(device: torch.device | None = None) -> Tensor:
    """The 128 sign vectors, float32 ``[128, 8]`` of 1 and -1: seven stored bits, then their parity."""
    stored = torch.arange(128, device=device).unsqueeze(1) >> torch.arange(7, device=device) & 1
    minus = torch.cat([stored, stored.sum(dim=1, keepdim=True) & 1], dim=1)
    return 1.0 - 2.0 * minus.to(torch.float32)


def dequantize(blocks: Tensor) -> Tensor:
    """uint8 ``[B, 66]`` -> float32 ``[B, 256]``."""
    device = blocks.device
    pairs = blocks[:, 2:].reshape(-1, 8, 8)
    indices = pairs[..., :4].to(torch.int64)
    word = pairs[..., 4:].contiguous().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    shifts = torch.tensor([0, 7, 14, 21], device=device)
    patterns = (word >> shifts) & 0x7F
    scales = half(blocks[:, :2]) * ((word.squeeze(2) >> 28).to(torch.float32) + 0.5) * 0.25
    values = scales[:, :, None, None] * grid(device)[indices] * signs(device)[patterns]
    return values.flatten(1)
