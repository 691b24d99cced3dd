"""The served model's roundings of key/value and indexer rows, letting gradients pass unchanged."""

from __future__ import annotations

import torch
from torch import Tensor

from demo.custom import apply
from demo.fuse import fused

FP8_BLOCK = 64
FP4_BLOCK = 32


def round_rows(x: Tensor, rotated: int) -> Tensor:
    """FP8 with a power-of-two scale a block of 64 over all but the last ``rotated`` dimensions.

    Args:
        x: ``[..., D]`` of any floating type.
        rotated: how many trailing dimensions stay in bfloat16.

    Returns:
        Same shape and type, rounded to bfloat16 first; the gradient is the identity.
    """
    rounded: Tensor = apply(_RoundRows, x, rotated)
    return rounded


def round_keys(x: Tensor) -> Tensor:
    """Hadamard turn, then FP4 with a power-of-two scale a block of 32.

    Args:
        x: ``[..., D]``, D a power of two.

    Returns:
        The turned and rounded rows; the gradient is that of the turn alone.
    """
    turned = x.bfloat16() @ hadamard(x.shape[-1], x.device).to(torch.bfloat16)
    rounded: Tensor = apply(_RoundKeys, turned)
    return rounded.to(x.dtype)


def hadamard(size: int, device: torch.device) -> Tensor:
    """The orthogonal, symmetric Sylvester matrix, float32 ``[size, size]``."""
    index = torch.arange(size, device=device)
    shared = index[:, None] & index[None, :]
    parity = torch.zeros_like(shared)
    for bit in range(size.bit_length() - 1):
        parity ^= shared >> bit & 1
    signs: Tensor = 1.0 - 2.0 * parity
    return signs.mul(size**-0.5)


def _scale(ratio: Tensor) -> Tensor:
    return torch.exp2(torch.ceil(torch.log2(ratio)))


class _RoundRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rotated):  # type: ignore[no-untyped-def]
        return _rows(x, rotated)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad, None


class _RoundKeys(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):  # type: ignore[no-untyped-def]
        return _keys(x)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        return grad


@fused
def _rows(x: Tensor, rotated: int) -> Tensor:
    plain = x[..., : x.shape[-1] - rotated].bfloat16().float()
    blocks = plain.unflatten(-1, (-1, min(FP8_BLOCK, plain.shape[-1])))
    scale = _scale(blocks.abs().amax(-1, keepdim=True).clamp(min=1e-4) / 448)
    rounded = (blocks / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    return torch.cat((rounded.flatten(-2), x[..., x.shape[-1] - rotated :].bfloat16().float()), -1).to(
        x.dtype
    )


@fused
def _keys(turned: Tensor) -> Tensor:
    blocks = turned.float().unflatten(-1, (-1, min(FP4_BLOCK, turned.shape[-1])))
    scale = _scale(blocks.abs().amax(-1, keepdim=True).clamp(min=6 * 2.0**-126) / 6)
    scaled = (blocks / scale).clamp(-6, 6)
    size = scaled.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    rounded: Tensor = ((scaled / step).round() * step * scale).flatten(-2)
    return rounded.to(turned.dtype)
