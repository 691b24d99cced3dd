"""Manifold-constrained hyper-connections: several residual streams, mixed by small learned maps.

Around a sub-layer f, with streams ``x [T, S, D]`` and the flattened, RMS-normalised streams as input:

    pre  = sigmoid(m[:S]·scale₀ + base[:S]) + ε
    post = 2·sigmoid(m[S:2S]·scale₁ + base[S:2S])
    C    = sinkhorn(softmax_row(m[2S:]·scale₂ + base[2S:]) + ε)

    input   y = Σ_j pre[j]·x[j]
    output  x'[k] = post[k]·f(y) + Σ_j C[j, k]·x[j]

C is doubly stochastic, not symmetric, and applied transposed.

GGUF keys ``hc_attn_*``, ``hc_ffn_*`` and ``output_hc_*``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.linear import ROW_TILE, linear, pad_rows
from kernels.norm import rms_norm
from kernels.pointwise import exp, sigmoid


@dataclass(frozen=True)
class HyperWeights:
    """``fn [R, S·D]``, ``base [R]``, ``scale [3 or 1]``, float32; R is S·(2 + S) in a layer, S at the
    head.
    """

    fn: Tensor
    base: Tensor
    scale: Tensor


@dataclass(frozen=True)
class Mix:
    """What joins a sub-layer to the streams: ``post [T, S]`` and ``comb [T, S, S]`` (source, destination)."""

    post: Tensor
    comb: Tensor


def hyper_input(
    streams: Tensor, weights: HyperWeights, sinkhorn_iterations: int, hc_eps: float, rms_eps: float
) -> tuple[Tensor, Mix]:
    """The sub-layer's input ``[T, D]`` and the mix for :func:`hyper_merge`; streams float32 ``[T, S, D]``."""
    count = streams.shape[1]
    m = linear(rms_norm(streams.flatten(1), None, rms_eps), weights.fn)
    base, scale = weights.base, weights.scale
    pre = sigmoid(m[:, :count] * scale[0] + base[:count]) + hc_eps
    post = 2 * sigmoid(m[:, count : 2 * count] * scale[1] + base[count : 2 * count])
    logits = (m[:, 2 * count :] * scale[2] + base[2 * count :]).unflatten(1, (count, count))
    comb = sinkhorn(_softmax_rows(logits) + hc_eps, sinkhorn_iterations, hc_eps)
    return _weighted_streams(streams, pre), Mix(post, comb)


def hyper_merge(streams: Tensor, output: Tensor, mix: Mix) -> Tensor:
    """The streams after the sub-layer: ``output [T, D]`` joins ``streams [T, S, D]``."""
    merged = mix.post[:, :, None] * output[:, None, :]
    for source in range(streams.shape[1]):
        merged += mix.comb[:, source, :, None] * streams[:, source, None, :]
    return merged


def hyper_head(streams: Tensor, weights: HyperWeights, hc_eps: float, rms_eps: float) -> Tensor:
    """Collapses the streams ``[T, S, D]`` to ``[T, D]`` before the output norm."""
    m = linear(rms_norm(streams.flatten(1), None, rms_eps), weights.fn)
    return _weighted_streams(streams, sigmoid(m * weights.scale[0] + weights.base) + hc_eps)


def sinkhorn(comb: Tensor, iterations: int, eps: float) -> Tensor:
    """Alternates column and row normalisation of ``comb [T, S, S]``, columns first and last.

    The sums over rows and columns are products with 0/1 matrices, so that one normalisation is two calls.
    """
    count = comb.shape[-1]
    ones, eye = torch.ones(count, count), torch.eye(count)
    row_sums, column_sums = torch.kron(eye, ones), torch.kron(ones, eye)
    padding = comb.new_tensor(eps)
    out = pad_rows(comb.flatten(1)).clone()
    sums = out.new_empty(ROW_TILE, count * count)
    for tile in out.split(ROW_TILE):
        for iteration in range(iterations):
            if iteration:
                tile.div_(torch.addmm(padding, tile, row_sums, out=sums))
            tile.div_(torch.addmm(padding, tile, column_sums, out=sums))
    return out[: comb.shape[0]].view_as(comb)


def _softmax_rows(logits: Tensor) -> Tensor:
    weights = exp(logits - logits.amax(-1, keepdim=True))
    return weights / weights.sum(-1, keepdim=True)


def _weighted_streams(streams: Tensor, weight: Tensor) -> Tensor:
    total = weight[:, 0, None] * streams[:, 0]
    for stream in range(1, streams.shape[1]):
        total += weight[:, stream, None] * streams[:, stream]
    return total
