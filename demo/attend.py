"""Attention over a sliding window and compressed entries with one sink a head, in blocks of queries.

    p = softmax(raw logits | entry logits | sink),  output = p_raw · raw rows + p_entry · entries

Rows are keys and values at once and shared by all heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from demo.custom import apply
from demo.fuse import fused
from demo.layout import ALIGNMENT


def attend(
    rows: int,
    q: Tensor,
    kv: Tensor,
    entries: Tensor | None,
    raw_visible: Tensor,
    entries_visible: Tensor | None,
    sinks: Tensor,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Attention output before the inverse rotation.

    Args:
        rows: B; N is B rows of T tokens, B·W the rows' entries.
        q: ``[N, H, D]``.
        kv: ``[N, D]``.
        entries: ``[B·W, D]``, or None in layers without a compressor.
        raw_visible: bool ``[N, 256]``, over a token's own and the preceding block of 128.
        entries_visible: bool ``[N, W]``.
        sinks: float32 ``[H]``.

    Returns:
        ``[N, H, D]``, the entries' logits ``[N, H, W]``, and float32 ``[N, H]``, the logarithm of what the
        raw window and the sink add to the denominator; the last two carry no gradient.
    """
    count, heads, dim = q.shape
    blocks = count // ALIGNMENT
    own = kv.view(rows, -1, ALIGNMENT, dim)
    before = torch.cat((torch.zeros_like(own[:, :1]), own[:, :-1]), 1)
    near = torch.cat((before, own), 2).view(blocks, 2 * ALIGNMENT, dim)
    q = q * dim**-0.5
    raw = (q.view(blocks, ALIGNMENT * heads, dim) @ near.transpose(-1, -2)).view(count, heads, -1)
    if entries is None or entries_visible is None:
        raw_p = apply(_SoftmaxOne, raw, raw_visible, sinks)
        return (raw_p.view(blocks, ALIGNMENT * heads, -1) @ near).view(count, heads, dim), None, None
    by_row = entries.view(rows, -1, dim)
    logits = (q.view(rows, -1, dim) @ by_row.transpose(-1, -2)).view(count, heads, -1)
    raw_p, entry_p, free = apply(_SoftmaxTwo, raw, logits, raw_visible, entries_visible, sinks)
    out = (raw_p.view(blocks, ALIGNMENT * heads, -1) @ near).view(count, heads, dim)
    out = out + (entry_p.view(rows, -1, entry_p.shape[-1]) @ by_row).view(count, heads, dim)
    return out, logits.detach(), free


@torch.no_grad()
def entry_weights(free: Tensor, logits: Tensor, visible: Tensor) -> Tensor:
    """How much all heads together attend to each visible entry.

    Args:
        free: as :func:`attend` returns it.
        logits: ``[N, H, W]``.
        visible: bool ``[N, W]``.

    Returns:
        float32 ``[N, W]``, the heads' mean probability.
    """
    return _entry_weights(free, logits, visible)


@fused
def _entry_weights(free: Tensor, logits: Tensor, visible: Tensor) -> Tensor:
    masked = logits.float().masked_fill(~visible[:, None, :], float("-inf"))
    total = torch.logaddexp(masked.logsumexp(-1), free)
    return (masked - total[..., None]).exp().mean(1)


class _SoftmaxTwo(torch.autograd.Function):
    @staticmethod
    def forward(ctx, raw, entries, raw_visible, entries_visible, sinks):  # type: ignore[no-untyped-def]
        raw_p, entry_p, sink_p, free = _forward_two(raw, entries, raw_visible, entries_visible, sinks)
        ctx.save_for_backward(raw_p, entry_p, sink_p)
        ctx.mark_non_differentiable(free)
        return raw_p, entry_p, free

    @staticmethod
    def backward(ctx, raw_grad, entry_grad, _):  # type: ignore[no-untyped-def]
        raw_p, entry_p, sink_p = ctx.saved_tensors
        raw, entry, sinks = _backward_two(raw_p, entry_p, sink_p, raw_grad, entry_grad)
        return raw, entry, None, None, sinks


class _SoftmaxOne(torch.autograd.Function):
    @staticmethod
    def forward(ctx, raw, visible, sinks):  # type: ignore[no-untyped-def]
        raw_p, sink_p = _forward_one(raw, visible, sinks)
        ctx.save_for_backward(raw_p, sink_p)
        return raw_p

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def]
        raw_p, sink_p = ctx.saved_tensors
        raw, sinks = _backward_one(raw_p, sink_p, grad)
        return raw, None, sinks


@fused
def _forward_two(
    raw: Tensor, entries: Tensor, raw_visible: Tensor, entries_visible: Tensor, sinks: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    near = raw.float().masked_fill(~raw_visible[:, None, :], float("-inf"))
    far = entries.float().masked_fill(~entries_visible[:, None, :], float("-inf"))
    sink = sinks.float()[None, :, None]
    peak = torch.maximum(torch.maximum(near.amax(-1, keepdim=True), far.amax(-1, keepdim=True)), sink)
    near, far, sink = (near - peak).exp(), (far - peak).exp(), (sink - peak).exp()
    rest = near.sum(-1, keepdim=True) + sink
    total = rest + far.sum(-1, keepdim=True)
    free = (rest.log() + peak).squeeze(-1)
    return (near / total).to(raw.dtype), (far / total).to(raw.dtype), (sink / total).squeeze(-1), free


@fused
def _backward_two(
    raw_p: Tensor, entry_p: Tensor, sink_p: Tensor, raw_grad: Tensor, entry_grad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    near, far = raw_p.float(), entry_p.float()
    mean = (near * raw_grad).sum(-1, keepdim=True) + (far * entry_grad).sum(-1, keepdim=True)
    raw = (near * (raw_grad - mean)).to(raw_p.dtype)
    entries = (far * (entry_grad - mean)).to(raw_p.dtype)
    return raw, entries, -(sink_p * mean.squeeze(-1)).sum(0)


@fused
def _forward_one(raw: Tensor, visible: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    near = raw.float().masked_fill(~visible[:, None, :], float("-inf"))
    sink = sinks.float()[None, :, None]
    peak = torch.maximum(near.amax(-1, keepdim=True), sink)
    near, sink = (near - peak).exp(), (sink - peak).exp()
    total = near.sum(-1, keepdim=True) + sink
    return (near / total).to(raw.dtype), (sink / total).squeeze(-1)


@fused
def _backward_one(raw_p: Tensor, sink_p: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    near = raw_p.float()
    mean = (near * grad).sum(-1, keepdim=True)
    return (near * (grad - mean)).to(raw_p.dtype), -(sink_p * mean.squeeze(-1)).sum(0)
