"""Balancing of the hyper-connections' stream matrices, forward and backward, in one kernel each.

A step divides by row or column sums, y = x / s. It is undone by x = y·s, so that the backward pass needs the
sums alone: dx = (dy - Σ dy·y) / s.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from demo.custom import apply, kernel

_BLOCK = 64


def balance(logits: Tensor, iterations: int, eps: float) -> Tensor:
    """Softmax over the last index, then ``iterations`` column and ``iterations - 1`` row normalisations.

    Args:
        logits: float32 ``[N, S, S]``.

    Returns:
        float32 ``[N, S, S]``, columns summing to one.
    """
    soft = torch.softmax(logits, -1) + eps
    balanced: Tensor = apply(_Balance, soft, iterations, eps)
    return balanced


class _Balance(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, iterations: int, eps: float) -> Tensor:
        y, sums = _forward_gpu(x, iterations, eps) if x.is_cuda else forward_reference(x, iterations, eps)
        ctx.save_for_backward(y, sums)
        return y

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        y, sums = ctx.saved_tensors  # type: ignore[attr-defined]
        run = _backward_gpu if y.is_cuda else backward_reference
        return run(y, sums, grad.contiguous()), None, None


def forward_reference(x: Tensor, iterations: int, eps: float) -> tuple[Tensor, Tensor]:
    """The balanced matrices and each step's sums, float32 ``[2·iterations - 1, N, S]``."""
    sums = []
    for step in range(2 * iterations - 1):
        axis = -2 if step % 2 == 0 else -1
        total = x.sum(axis, keepdim=True) + eps
        x = x / total
        sums.append(total.squeeze(axis))
    return x, torch.stack(sums)


def backward_reference(y: Tensor, sums: Tensor, grad: Tensor) -> Tensor:
    """The gradient at the input of :func:`forward_reference`."""
    for step in reversed(range(len(sums))):
        axis = -2 if step % 2 == 0 else -1
        total = sums[step].unsqueeze(axis)
        grad = (grad - (grad * y).sum(axis, keepdim=True)) / total
        y = y * total
    return grad


def _forward_gpu(x: Tensor, iterations: int, eps: float) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    count, streams, _ = x.shape
    y = torch.empty_like(x)
    sums = x.new_empty(2 * iterations - 1, count, streams)
    _forward[(triton.cdiv(count, _BLOCK),)](x, y, sums, count, eps, iterations, streams, _BLOCK)
    return y, sums


def _backward_gpu(y: Tensor, sums: Tensor, grad: Tensor) -> Tensor:
    count, streams, _ = y.shape
    out = torch.empty_like(y)
    _backward[(triton.cdiv(count, _BLOCK),)](y, sums, grad, out, count, len(sums), streams, _BLOCK)
    return out


@kernel
def _forward(  # type: ignore[no-untyped-def]  # Triton reads annotations as types of its own
    x_ptr, y_ptr, sums_ptr, count, eps, iterations: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    stream = tl.arange(0, S)
    cells = token[:, None, None] * (S * S) + stream[None, :, None] * S + stream[None, None, :]
    inside = (token < count)[:, None, None]
    lane = token[:, None] * S + stream[None, :]
    lane_inside = (token < count)[:, None]
    x = tl.load(x_ptr + cells, mask=inside, other=1.0)
    total = tl.sum(x, axis=1) + eps
    tl.store(sums_ptr + lane, total, mask=lane_inside)
    x = x / total[:, None, :]
    for step in range(iterations - 1):
        total = tl.sum(x, axis=2) + eps
        tl.store(sums_ptr + (2 * step + 1) * count * S + lane, total, mask=lane_inside)
        x = x / total[:, :, None]
        total = tl.sum(x, axis=1) + eps
        tl.store(sums_ptr + (2 * step + 2) * count * S + lane, total, mask=lane_inside)
        x = x / total[:, None, :]
    tl.store(y_ptr + cells, x, mask=inside)


@kernel
def _backward(  # type: ignore[no-untyped-def]
    y_ptr, sums_ptr, grad_ptr, out_ptr, count, steps: tl.constexpr, S: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    stream = tl.arange(0, S)
    cells = token[:, None, None] * (S * S) + stream[None, :, None] * S + stream[None, None, :]
    inside = (token < count)[:, None, None]
    lane = token[:, None] * S + stream[None, :]
    lane_inside = (token < count)[:, None]
    y = tl.load(y_ptr + cells, mask=inside, other=1.0)
    grad = tl.load(grad_ptr + cells, mask=inside, other=0.0)
    total = tl.load(sums_ptr + (steps - 1) * count * S + lane, mask=lane_inside, other=1.0)
    grad = (grad - tl.sum(grad * y, axis=1)[:, None, :]) / total[:, None, :]
    y = y * total[:, None, :]
    for turn in range(steps // 2):
        step = steps - 2 - 2 * turn
        total = tl.load(sums_ptr + step * count * S + lane, mask=lane_inside, other=1.0)
        grad = (grad - tl.sum(grad * y, axis=2)[:, :, None]) / total[:, :, None]
        y = y * total[:, :, None]
        total = tl.load(sums_ptr + (step - 1) * count * S + lane, mask=lane_inside, other=1.0)
        grad = (grad - tl.sum(grad * y, axis=1)[:, None, :]) / total[:, None, :]
        y = y * total[:, None, :]
    tl.store(out_ptr + cells, grad, mask=inside)
