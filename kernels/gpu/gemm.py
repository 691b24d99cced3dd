"""Matrix times many rows (prefill), on the tensor cores: float16 operands, float32 sums.

Quantized weights are first unpacked to float16 in a workspace, one matrix at a time. The tile depends on the
device alone, so a row's result does not depend on how many rows there are. Equals
:func:`kernels.linear.linear` on weights and activations rounded to float16.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.matmul import swiglu
from kernels.gpu.matrix import Matrix
from kernels.gpu.tiles import Tiles


@triton.jit
def _unpack_q8(words, scales, out, K32: tl.constexpr, G: tl.constexpr):
    n = tl.program_id(1).to(tl.int64)
    g, i = tl.program_id(0) * G + tl.arange(0, G), tl.arange(0, 8)
    packed = tl.load(words + n * (8 * K32) + i[None, :] * K32 + g[:, None])
    scale = tl.load(scales + n * K32 + g).to(tl.float32)[:, None]
    even = tl.join(
        ((packed << 24) >> 24).to(tl.float32) * scale, ((packed << 8) >> 24).to(tl.float32) * scale
    )
    odd = tl.join(((packed << 16) >> 24).to(tl.float32) * scale, (packed >> 24).to(tl.float32) * scale)
    values = tl.reshape(tl.join(even, odd), [G, 32]).to(tl.float16)
    tl.store(out + n * (32 * K32) + g[:, None] * 32 + tl.arange(0, 32)[None, :], values)


@triton.jit
def _gemm(
    x,
    w,
    out,
    rows,
    x_step,
    out_step,
    N: tl.constexpr,
    K: tl.constexpr,
    GROUPS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BAND: tl.constexpr,
):
    # Programs go through bands of row tiles, so that those that run together share operands.
    tiles_n = tl.cdiv(N, BN)
    per_band = BAND * tiles_n
    band = tl.program_id(0) // per_band
    height = tl.minimum(tl.cdiv(rows, BM) - band * BAND, BAND)
    tile_m = band * BAND + tl.program_id(0) % per_band % height
    tile_n = tl.program_id(0) % per_band // height
    m = tile_m * BM + tl.arange(0, BM)
    n = tile_n * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    group = tile_n * BN // (N // GROUPS)
    at_x = x + tl.minimum(m, rows - 1)[:, None].to(tl.int64) * x_step + group * K + k[None, :]
    at_w = w + tl.minimum(n, N - 1)[:, None].to(tl.int64) * K + k[None, :]
    sums = tl.zeros([BM, BN], tl.float32)
    for _first in range(0, K, BK):
        sums = tl.dot(tl.load(at_x), tl.trans(tl.load(at_w)), sums)
        at_x += BK
        at_w += BK
    inside = (m < rows)[:, None] & (n < N)[None, :]
    tl.store(out + m[:, None].to(tl.int64) * out_step + n[None, :], sums.to(out.dtype.element_ty), inside)


@triton.jit
def _swiglu(both, out, clamp, W: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(both + row * (2 * W) + column, column < W, 0.0)
    up = tl.load(both + row * (2 * W) + W + column, column < W, 0.0)
    tl.store(out + row * W + column, swiglu(gate, up, clamp).to(tl.float16), column < W)


class HalfWeights:
    """Weights as float16, made one call at a time.

    Args:
        elements: of the largest group of matrices that is asked for.
    """

    def __init__(self, elements: int, device: torch.device) -> None:
        self._workspace = torch.empty(elements, dtype=torch.float16, device=device)

    def of(self, matrices: Sequence[Matrix]) -> Tensor:
        """The matrices' rows one after another, float16 ``[N, K]``; valid until the next call."""
        if len(matrices) == 1 and matrices[0].format == "F16":
            return matrices[0].planes[0]
        columns = matrices[0].columns
        rows = sum(matrix.rows for matrix in matrices)
        out = self._workspace[: rows * columns].view(rows, columns)
        first = 0
        for matrix in matrices:
            part = out[first : first + matrix.rows]
            if matrix.format == "Q8_0":
                groups = columns // 32
                tile = min(groups & -groups, 32)
                _unpack_q8[(groups // tile, matrix.rows)](*matrix.planes, part, groups, tile)
            else:
                part.copy_(matrix.planes[0])
            first += matrix.rows
        return out


def gemm(weights: Tensor, x: Tensor, out: Tensor, tiles: Tiles, *, groups: int = 1) -> None:
    """``out[t] = weights · x[t]``.

    Args:
        weights: float16 ``[N, K]``.
        x: float16 ``[T, groups · K]``, rows any distance apart.
        out: float32 or float16 ``[T, N]``, rows any distance apart.
        groups: block-diagonal form: weight rows ``[g · N/groups, (g+1) · N/groups)`` multiply part g of x.
    """
    rows, (n, k) = x.shape[0], weights.shape
    bm, bn, bk, warps, stages = tiles.gemm
    bn = min(bn, n // groups & -(n // groups)) if groups > 1 else bn
    bk = min(bk, k & -k)
    grid = (triton.cdiv(rows, bm) * triton.cdiv(n, bn),)
    _gemm[grid](
        x,
        weights,
        out,
        rows,
        x.stride(0),
        out.stride(0),
        n,
        k,
        groups,
        bm,
        bn,
        bk,
        8,
        num_warps=warps,
        num_stages=stages,
    )


def swiglu_rows(both: Tensor, out: Tensor, clamp: float) -> None:
    """``both``, float32 ``[T, 2 W]``, holds gate and up; ``out`` is float16 ``[T, W]``."""
    width = out.shape[1]
    block = min(triton.next_power_of_2(width), 1024)
    _swiglu[(triton.cdiv(width, block), out.shape[0])](both, out, clamp, width, block)
