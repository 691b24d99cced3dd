"""Mixture of experts: routing by score or by token, clamped SwiGLU experts.

p = sqrt(softplus(router · x));   chosen: the largest of p + bias, or a fixed list by token id (hash layers)
out = Σ_chosen scale · p/Σp · down(silu(min(gate·x, c)) · clamp(up·x, −c, c)) + shared(x)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.linear import linear
from kernels.pointwise import silu, softplus

_TINY = 1e-20


@dataclass(frozen=True)
class ExpertWeights:
    """``gate`` and ``up [E, W, D]``, ``down [E, D, W]``, float32; the shared expert has E = 1."""

    gate: Tensor
    up: Tensor
    down: Tensor


def router_scores(x: Tensor, router: Tensor) -> Tensor:
    """float32 ``[T, E]`` from ``x [T, D]`` and ``router [E, D]``; never negative."""
    return softplus(linear(x, router)).sqrt()


def choose_by_score(scores: Tensor, bias: Tensor, count: int) -> Tensor:
    """int64 ``[T, count]``: the experts with the largest score plus bias, ties to the lower index."""
    return torch.sort(scores + bias, dim=-1, descending=True, stable=True).indices[:, :count]


def expert_weights(scores: Tensor, chosen: Tensor, scale: float, *, normalise: bool) -> Tensor:
    """float32 ``[T, K]``: the chosen experts' scores, without bias, normalised and scaled."""
    picked = scores.gather(1, chosen)
    if normalise:
        picked = picked / (_sum_columns(picked)[:, None] + _TINY)
    return picked * scale


def routed_experts(
    x: Tensor, chosen: Tensor, weights: Tensor, experts: ExpertWeights, clamp: float
) -> Tensor:
    """``Σ_k weights[t, k] · expert[chosen[t, k]](x[t])``, float32 ``[T, D]``; summed in the order of
    ``chosen``.
    """
    parts = x.new_zeros(x.shape[0], chosen.shape[1], x.shape[1])
    for expert in chosen.unique().tolist():
        rows, slots = torch.nonzero(chosen == expert, as_tuple=True)
        hidden = swiglu(linear(x[rows], experts.gate[expert]), linear(x[rows], experts.up[expert]), clamp)
        parts[rows, slots] = linear(hidden * weights[rows, slots, None], experts.down[expert])
    total = parts[:, 0]
    for slot in range(1, parts.shape[1]):
        total = total + parts[:, slot]
    return total


def shared_expert(x: Tensor, expert: ExpertWeights, clamp: float) -> Tensor:
    """The expert every token uses, float32 ``[T, D]``."""
    return linear(swiglu(linear(x, expert.gate[0]), linear(x, expert.up[0]), clamp), expert.down[0])


def swiglu(gate: Tensor, up: Tensor, clamp: float) -> Tensor:
    """``silu(min(gate, clamp)) · clamp(up, −clamp, clamp)``."""
    return silu(gate.clamp(max=clamp)) * up.clamp(-clamp, clamp)


def _sum_columns(x: Tensor) -> Tensor:
    total = x[:, 0]
    for column in range(1, x.shape[1]):
        total = total + x[:, column]
    return total
