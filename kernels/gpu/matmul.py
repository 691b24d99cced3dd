"""Matrix times a few rows (decode): weights are read once, as they are stored, for up to eight rows a time.

Equals :func:`kernels.linear.linear` on dequantized weights and rounded activations. A tile's shape depends
on the matrix alone and every row has sums of its own, so a row's result does not depend on the others.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.bits import dp4a
from kernels.gpu.matrix import Matrix
from kernels.gpu.quantize import Quantized

ROW_TILES = (1, 2, 4, 8)
"""Rows a program multiplies at once."""


def row_tile(rows: int) -> int:
    """The row tile for a step of ``rows`` rows; buffers hold whole tiles."""
    return next((tile for tile in ROW_TILES if tile >= rows), ROW_TILES[-1])


@triton.jit
def q8_dots(
    words,
    scales,
    x_words,
    x_scales,
    n,
    row0,
    ROW_STEP: tl.constexpr,
    K32: tl.constexpr,
    R: tl.constexpr,
    BN: tl.constexpr,
    G: tl.constexpr,
):
    """Sums of rows ``n [BN]`` of a Q8_0 matrix with R vectors, float32 ``[BN]`` each, as a tuple.

    Vector r is number ``row0 + r · ROW_STEP`` of ``x_words``.
    """
    sums = ()
    for _r in tl.static_range(R):
        sums = sums + (tl.zeros([BN, G], tl.float32),)
    n = n.to(tl.int64)
    for first in range(0, K32, G):
        g = first + tl.arange(0, G)
        dots = ()
        for _r in tl.static_range(R):
            dots = dots + (tl.zeros([BN, G], tl.int32),)
        for i in tl.static_range(8):
            w = tl.load(words + (n[:, None] * 8 + i) * K32 + g[None, :])
            added = ()
            for r in tl.static_range(R):
                x = tl.load(x_words + ((row0 + r * ROW_STEP) * 8 + i) * K32 + g)
                added = added + (dp4a(w, tl.broadcast_to(x[None, :], [BN, G]), dots[r]),)
            dots = added
        scale = tl.load(scales + n[:, None] * K32 + g[None, :]).to(tl.float32)
        summed = ()
        for r in tl.static_range(R):
            x_scale = tl.load(x_scales + (row0 + r * ROW_STEP) * K32 + g)
            summed = summed + (sums[r] + dots[r].to(tl.float32) * (scale * x_scale[None, :]),)
        sums = summed
    out = ()
    for r in tl.static_range(R):
        out = out + (tl.sum(sums[r], axis=1),)
    return out


@triton.jit
def _q8(
    words,
    scales,
    x_words,
    x_scales,
    out,
    out_step,
    N: tl.constexpr,
    K32: tl.constexpr,
    GROUPS: tl.constexpr,
    FIRST: tl.constexpr,
    STEP: tl.constexpr,
    R: tl.constexpr,
    BN: tl.constexpr,
    G: tl.constexpr,
):
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.program_id(1) * R
    # A group's rows of the matrix multiply that group's part of the vector.
    group = tl.program_id(0) * BN // (N // GROUPS)
    sums = q8_dots(words, scales, x_words, x_scales, n, row * STEP + FIRST + group, STEP, K32, R, BN, G)
    for r in tl.static_range(R):
        tl.store(out + (row + r) * out_step + n, sums[r])


@triton.jit
def _q8_swiglu(
    gate_words,
    gate_scales,
    up_words,
    up_scales,
    x_words,
    x_scales,
    out,
    out_step,
    clamp,
    K32: tl.constexpr,
    R: tl.constexpr,
    BN: tl.constexpr,
    G: tl.constexpr,
):
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.program_id(1) * R
    gate = q8_dots(gate_words, gate_scales, x_words, x_scales, n, row, 1, K32, R, BN, G)
    up = q8_dots(up_words, up_scales, x_words, x_scales, n, row, 1, K32, R, BN, G)
    for r in tl.static_range(R):
        tl.store(out + (row + r) * out_step + n, swiglu(gate[r], up[r], clamp))


@triton.jit
def swiglu(gate, up, clamp):
    """``silu(min(gate, clamp)) · clamp(up, −clamp, clamp)``."""
    gate = tl.minimum(gate, clamp)
    up = tl.minimum(tl.maximum(up, -clamp), clamp)
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def _plain(w, x, out, N: tl.constexpr, K: tl.constexpr, R: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.program_id(1) * R
    inside = n < N
    sums = ()
    for _r in tl.static_range(R):
        sums = sums + (tl.zeros([BN, BK], tl.float32),)
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        weights = tl.load(w + n[:, None].to(tl.int64) * K + k[None, :], inside[:, None], 0.0).to(tl.float32)
        summed = ()
        for r in tl.static_range(R):
            values = tl.load(x + (row + r) * K + k).to(tl.float32)
            summed = summed + (sums[r] + weights * values[None, :],)
        sums = summed
    for r in tl.static_range(R):
        tl.store(out + (row + r) * N + n, tl.sum(sums[r], axis=1), inside)


def _q8_tile(rows: int, columns: int) -> tuple[int, int, int]:
    """Matrix rows a program, groups a step, warps; from the matrix alone. A thread has a group at a time."""
    groups = columns // 32
    width = min(groups & -groups, 16 if columns > 1024 else 8)
    return min(rows & -rows, 32 // width), width, 1


def matmul_q8(
    matrix: Matrix, x: Quantized, out: Tensor, rows: int, *, groups: int = 1, first: int = 0, step: int = 1
) -> None:
    """``out[t] = matrix · x[t]`` for the first ``rows`` rows, a multiple of their row tile.

    Args:
        matrix: Q8_0 ``[N, K]``, N even.
        x: vectors of K; row t's are those from ``first + t · step`` on.
        out: float32 ``[≥ rows, N]``, rows any distance apart.
        groups: block-diagonal form: matrix rows ``[g · N/groups, (g+1) · N/groups)`` multiply vector g of
            the row.
    """
    tile = row_tile(rows)
    bn, width, warps = _q8_tile(matrix.rows // groups, matrix.columns)
    words, scales = matrix.planes
    _q8[(matrix.rows // bn, rows // tile)](
        words,
        scales,
        x.words,
        x.scales,
        out,
        out.stride(0),
        matrix.rows,
        matrix.columns // 32,
        groups,
        first,
        step,
        tile,
        bn,
        width,
        num_warps=warps,
    )


def swiglu_q8(
    gate: Matrix, up: Matrix, x: Quantized, out: Tensor, out_step: int, rows: int, clamp: float
) -> None:
    """The hidden values of a dense expert: row t of ``out`` (float32, ``out_step`` numbers apart)."""
    tile = row_tile(rows)
    bn, step, warps = _q8_tile(gate.rows, gate.columns)
    _q8_swiglu[(gate.rows // bn, rows // tile)](
        *gate.planes,
        *up.planes,
        x.words,
        x.scales,
        out,
        out_step,
        clamp,
        gate.columns // 32,
        tile,
        bn,
        step,
        num_warps=warps,
    )


def matmul_plain(matrix: Matrix, x: Tensor, out: Tensor, rows: int) -> None:
    """``out[t] = matrix · x[t]`` for an F16 or F32 matrix ``[N, K]``, K a multiple of 32.

    Args:
        matrix: of any number of rows.
        x: float16 or float32 ``[≥ rows, K]``.
        out: float32 ``[≥ rows, N]``.
        rows: a multiple of their row tile.
    """
    tile = row_tile(rows)
    columns = matrix.columns
    width = min(columns & -columns, 2048)
    _plain[(matrix.rows, rows // tile)](
        matrix.planes[0], x, out, matrix.rows, columns, tile, 1, width, num_warps=max(width // 256, 1)
    )
