"""The choice of experts for every row: by score plus bias, or by the token's fixed list.

Equals :func:`kernels.moe.choose_by_score` and :func:`kernels.moe.expert_weights`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _choose(
    logits,
    bias,
    table,
    tokens,
    chosen,
    weights,
    factor,
    E: tl.constexpr,
    E_2: tl.constexpr,
    USED: tl.constexpr,
    USED_2: tl.constexpr,
    HASHED: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    e, slot = tl.arange(0, E_2), tl.arange(0, USED_2)
    x = tl.load(logits + row * E + e, e < E, 0.0)
    power = tl.exp(tl.minimum(x, 20.0))
    # ln(1 + power) loses a small power's digits; its series does not.
    small = power * (1.0 - power * (0.5 - power * 0.33333333))
    softplus = tl.where(x > 20.0, x, tl.where(power < 1e-3, small, tl.log(1.0 + power)))
    score = tl.sqrt(softplus)
    if HASHED:
        token = tl.load(tokens + row).to(tl.int64)
        best = tl.load(table + token * USED + slot, slot < USED, 0)
        same = e[None, :] == best[:, None]
        picked = tl.sum(tl.where(same, score[None, :], 0.0), axis=1)
        picked = tl.where(slot < USED, picked, 0.0)
    else:
        ranked = tl.where(e < E, score + tl.load(bias + e, e < E, 0.0), float("-inf"))
        best = tl.zeros([USED_2], tl.int32)
        picked = tl.zeros([USED_2], tl.float32)
        for k in tl.static_range(USED):
            top = tl.max(ranked, axis=0)
            winner = tl.min(tl.where(ranked == top, e, E_2), axis=0)
            best = tl.where(slot == k, winner, best)
            picked = tl.where(slot == k, tl.sum(tl.where(e == winner, score, 0.0), axis=0), picked)
            ranked = tl.where(e == winner, float("-inf"), ranked)
    if NORMALISE:
        picked = picked / (tl.sum(picked, axis=0) + 1e-20)
    tl.store(chosen + row * USED + slot, best, slot < USED)
    tl.store(weights + row * USED + slot, picked * factor, slot < USED)


def choose_experts(
    logits: Tensor,
    bias: Tensor | None,
    table: Tensor | None,
    tokens: Tensor,
    chosen: Tensor,
    weights: Tensor,
    factor: float,
    rows: int,
    *,
    normalise: bool,
) -> None:
    """Fills ``chosen`` (int32) and ``weights`` (float32), both ``[≥ rows, USED]``.

    Args:
        logits: float32 ``[≥ rows, E]``.
        bias: float32 ``[E]`` of a layer that chooses by score.
        table: int32 ``[vocab, USED]`` of a layer that chooses by token.
        tokens: int32 ``[≥ rows]``.
        factor: scales the weights.
    """
    experts, used = logits.shape[1], chosen.shape[1]
    hashed = table is not None
    assert hashed != (bias is not None)
    _choose[(rows,)](
        logits,
        logits if bias is None else bias,
        tokens if table is None else table,
        tokens,
        chosen,
        weights,
        factor,
        experts,
        triton.next_power_of_2(experts),
        used,
        triton.next_power_of_2(used),
        hashed,
        normalise,
        num_warps=1,
    )
