"""Routed experts for a few rows (decode): one launch for gate, up and SwiGLU, one for down.

A pair is a row and one of the experts it chose; every pair has programs of its own and reads its expert's
weights as they are stored. Equals :func:`kernels.moe.routed_experts` on dequantized weights and rounded
activations.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.bits import dp4a, grid_bytes
from kernels.gpu.matmul import swiglu
from kernels.gpu.matrix import Matrix
from kernels.gpu.quantize import Quantized


@triton.jit
def _iq2_products(
    grid, sign, scale, table, signs, at, scale_at, x, x_scale, BN: tl.constexpr, G: tl.constexpr
):
    """Products of groups of 32 IQ2_XXS weights with a vector's words ``x``, a tuple of eight ``[G]``."""
    indices = tl.load(grid + at)
    pattern = tl.load(sign + at)
    dot = tl.zeros([BN, G], tl.int32)
    for part in tl.static_range(4):
        selector = tl.load(table + ((indices >> (8 * part)) & 255)) | tl.load(
            signs + ((pattern >> (7 * part)) & 127)
        )
        dot = dp4a(grid_bytes(selector), tl.broadcast_to(x[2 * part][None, :], [BN, G]), dot)
        dot = dp4a(grid_bytes(selector >> 16), tl.broadcast_to(x[2 * part + 1][None, :], [BN, G]), dot)
    factor = ((pattern >> 28) & 15).to(tl.float32) * 0.25 + 0.125
    return dot.to(tl.float32) * (tl.load(scale + scale_at).to(tl.float32) * factor * x_scale[None, :])


@triton.jit
def _iq2_swiglu(
    gate_grid,
    gate_sign,
    gate_scale,
    up_grid,
    up_sign,
    up_scale,
    table,
    signs,
    x_words,
    x_scales,
    chosen,
    weights,
    out,
    out_step,
    clamp,
    N: tl.constexpr,
    K32: tl.constexpr,
    USED: tl.constexpr,
    BN: tl.constexpr,
    G: tl.constexpr,
):
    row, slot = tl.program_id(1) // USED, tl.program_id(1) % USED
    expert = tl.load(chosen + tl.program_id(1)).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    gate = tl.zeros([BN, G], tl.float32)
    up = tl.zeros([BN, G], tl.float32)
    for first in range(0, K32, G):
        g = first + tl.arange(0, G)
        x = ()
        for i in tl.static_range(8):
            x = x + (tl.load(x_words + (row * 8 + i) * K32 + g),)
        x_scale = tl.load(x_scales + row * K32 + g)
        at = (expert * N + n)[:, None] * K32 + g[None, :]
        scale_at = (expert * N + n)[:, None] * (K32 // 8) + (g // 8)[None, :]
        gate += _iq2_products(gate_grid, gate_sign, gate_scale, table, signs, at, scale_at, x, x_scale, BN, G)
        up += _iq2_products(up_grid, up_sign, up_scale, table, signs, at, scale_at, x, x_scale, BN, G)
    weight = tl.load(weights + tl.program_id(1))
    hidden = swiglu(tl.sum(gate, axis=1), tl.sum(up, axis=1), clamp)
    tl.store(out + row * out_step + slot * N + n, hidden * weight)


@triton.jit
def _q4_sum(
    words, scales, ranges, x_words, x_scales, n, vector, K64: tl.constexpr, BN: tl.constexpr, W: tl.constexpr
):
    """Sums of Q4_K rows ``n [BN]`` (int64) with one vector."""
    total = tl.zeros([BN, W], tl.float32)
    for first in range(0, 8 * K64, W):
        at = first + tl.arange(0, W)
        word, quarter = at // K64, at % K64
        packed = tl.load(words + n[:, None] * (8 * K64) + at[None, :])
        block = n[:, None] * (K64 // 4) + (quarter // 4)[None, :]
        d = tl.load(ranges + block * 2).to(tl.float32)
        least = tl.load(ranges + block * 2 + 1).to(tl.float32)
        for half in tl.static_range(2):
            scale, minimum = _k_scale(scales + block * 12, ((quarter % 4) * 2 + half)[None, :])
            group = 2 * quarter + half
            x = tl.load(x_words + (vector * 8 + word) * (2 * K64) + group)
            x = tl.broadcast_to(x[None, :], [BN, W])
            zero = tl.zeros([BN, W], tl.int32)
            dot = dp4a((packed >> (4 * half)) & 0x0F0F0F0F, x, zero).to(tl.float32)
            sum_ = dp4a(tl.full([BN, W], 0x01010101, tl.int32), x, zero).to(tl.float32)
            x_scale = tl.load(x_scales + vector * (2 * K64) + group)[None, :]
            total += x_scale * (d * scale * dot - least * minimum * sum_)
    return tl.sum(total, axis=1)


@triton.jit
def _k_scale(packed, index):
    """The 6-bit scale and minimum number ``index`` (0 to 7) of twelve packed bytes, float32."""
    low = index < 4
    a = tl.load(packed + tl.where(low, index, index + 4)).to(tl.int32)
    upper_scale = tl.load(packed + tl.where(low, index, index - 4)).to(tl.int32)
    upper_minimum = tl.load(packed + tl.where(low, index + 4, index)).to(tl.int32)
    scale = tl.where(low, a & 63, (a & 15) | ((upper_scale >> 2) & 48))
    minimum = tl.where(low, upper_minimum & 63, (a >> 4) | ((upper_minimum >> 2) & 48))
    return scale.to(tl.float32), minimum.to(tl.float32)


@triton.jit
def _q4_swiglu(
    gate_words,
    gate_scales,
    gate_ranges,
    up_words,
    up_scales,
    up_ranges,
    x_words,
    x_scales,
    chosen,
    weights,
    out,
    out_step,
    clamp,
    N: tl.constexpr,
    K64: tl.constexpr,
    USED: tl.constexpr,
    BN: tl.constexpr,
    W: tl.constexpr,
):
    row, slot = tl.program_id(1) // USED, tl.program_id(1) % USED
    expert = tl.load(chosen + tl.program_id(1)).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    at = expert * N + n
    gate = _q4_sum(gate_words, gate_scales, gate_ranges, x_words, x_scales, at, row, K64, BN, W)
    up = _q4_sum(up_words, up_scales, up_ranges, x_words, x_scales, at, row, K64, BN, W)
    weight = tl.load(weights + tl.program_id(1))
    tl.store(out + row * out_step + slot * N + n, swiglu(gate, up, clamp) * weight)


@triton.jit
def _q4_down(
    words,
    scales,
    ranges,
    x_words,
    x_scales,
    chosen,
    out,
    N: tl.constexpr,
    K64: tl.constexpr,
    USED: tl.constexpr,
    STEP: tl.constexpr,
    BN: tl.constexpr,
    W: tl.constexpr,
):
    row, slot = tl.program_id(1) // USED, tl.program_id(1) % USED
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    at = tl.load(chosen + tl.program_id(1)).to(tl.int64) * N + n
    total = _q4_sum(words, scales, ranges, x_words, x_scales, at, row * STEP + slot, K64, BN, W)
    tl.store(out + (row * STEP + slot) * N + n, total)


@triton.jit
def _q2_down(
    words,
    scales,
    ranges,
    x_words,
    x_scales,
    chosen,
    out,
    N: tl.constexpr,
    K128: tl.constexpr,
    USED: tl.constexpr,
    STEP: tl.constexpr,
    BN: tl.constexpr,
    W: tl.constexpr,
):
    row, slot = tl.program_id(1) // USED, tl.program_id(1) % USED
    vector = row * STEP + slot
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    at = (tl.load(chosen + tl.program_id(1)).to(tl.int64) * N + n)[:, None]
    total = tl.zeros([BN, W], tl.float32)
    for first in range(0, K128, W):
        half = first + tl.arange(0, W)
        packed = ()
        for i in tl.static_range(8):
            packed = packed + (tl.load(words + (at * 8 + i) * K128 + half[None, :]),)
        block = at * (K128 // 2) + (half // 2)[None, :]
        d = tl.load(ranges + block * 2).to(tl.float32)
        least = tl.load(ranges + block * 2 + 1).to(tl.float32)
        for side in tl.static_range(2):
            fields = tl.load(scales + at * (2 * K128) + (half * 2 + side)[None, :])
            for code in tl.static_range(4):
                group = half * 4 + code
                dot = tl.zeros([BN, W], tl.int32)
                sum_ = tl.zeros([1, W], tl.int32)
                for i in tl.static_range(4):
                    x = tl.load(x_words + (vector * 8 + 4 * side + i) * (4 * K128) + group)[None, :]
                    bits = (packed[4 * side + i] >> (2 * code)) & 0x03030303
                    dot = dp4a(bits, tl.broadcast_to(x, [BN, W]), dot)
                    sum_ = dp4a(tl.full([1, W], 0x01010101, tl.int32), x, sum_)
                scale = ((fields >> (8 * code)) & 15).to(tl.float32) * d
                minimum = ((fields >> (8 * code + 4)) & 15).to(tl.float32) * least
                x_scale = tl.load(x_scales + vector * (4 * K128) + group)[None, :]
                total += x_scale * (scale * dot.to(tl.float32) - minimum * sum_.to(tl.float32))
    tl.store(out + vector * N + n, tl.sum(total, axis=1))


def _fit(count: int, most: int) -> int:
    """The largest power of two that divides ``count``, at most ``most``."""
    return min(count & -count, most)


def experts_swiglu(
    gate: Matrix,
    up: Matrix,
    tables: tuple[Tensor, Tensor],
    x: Quantized,
    chosen: Tensor,
    weights: Tensor,
    out: Tensor,
    rows: int,
    clamp: float,
) -> None:
    """Hidden values of every pair, weighted.

    Args:
        gate, up: ``[E, N, K]``, IQ2_XXS or Q4_K.
        tables: of :mod:`kernels.gpu.tables`.
        x: a vector of K for every row.
        chosen: int32 ``[≥ rows, USED]``.
        weights: float32 of the same shape.
        out: float32 ``[≥ rows, S, N]``, S ≥ USED: pair (t, k) at ``[t, k]``.
    """
    used, step, columns = chosen.shape[1], out.stride(0), gate.columns
    if gate.format == "IQ2_XXS":
        bn = 1
        _iq2_swiglu[(gate.rows // bn, rows * used)](
            *gate.planes,
            *up.planes,
            *tables,
            x.words,
            x.scales,
            chosen,
            weights,
            out,
            step,
            clamp,
            gate.rows,
            columns // 32,
            used,
            bn,
            _fit(columns // 32, 32),
            num_warps=1,
        )
    else:
        bn = 1
        _q4_swiglu[(gate.rows // bn, rows * used)](
            *gate.planes,
            *up.planes,
            x.words,
            x.scales,
            chosen,
            weights,
            out,
            step,
            clamp,
            gate.rows,
            columns // 64,
            used,
            bn,
            _fit(columns // 8, 128),
            num_warps=1,
        )


def experts_down(down: Matrix, x: Quantized, chosen: Tensor, out: Tensor, rows: int) -> None:
    """``out[t, k] = down[chosen[t, k]] · x[t, k]``.

    Args:
        down: ``[E, N, K]``, Q2_K or Q4_K.
        x: S ≥ USED vectors of K for every row.
        chosen: int32 ``[≥ rows, USED]``.
        out: float32 ``[≥ rows, S, N]``.
    """
    used, columns, step = chosen.shape[1], down.columns, out.shape[1]
    if down.format == "Q2_K":
        _q2_down[(down.rows // 8, rows * used)](
            *down.planes,
            x.words,
            x.scales,
            chosen,
            out,
            down.rows,
            columns // 128,
            used,
            step,
            8,
            _fit(columns // 128, 16),
            num_warps=1,
        )
    else:
        _q4_down[(down.rows, rows * used)](
            *down.planes,
            x.words,
            x.scales,
            chosen,
            out,
            down.rows,
            columns // 64,
            used,
            step,
            1,
            _fit(columns // 8, 128),
            num_warps=1,
        )
