"""Routed experts for many rows (prefill): pairs of row and expert, sorted by expert, tile by tile.

A tile's weights are unpacked to float16 between memory and tensor cores; no expert is ever unpacked whole.
Activations lie in the order in which a format's words hold the weights (:func:`reorder`), so unpacking moves
nothing between threads. Equals :func:`kernels.moe.routed_experts` on weights and activations rounded to
float16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.bits import grid_bytes
from kernels.gpu.experts import _k_scale
from kernels.gpu.matmul import swiglu
from kernels.gpu.matrix import Matrix
from kernels.gpu.tiles import Tiles

_ORDERS = {
    "IQ2_XXS": ((-1, 4, 8), (1, 0, 2)),
    "Q4_K": ((-1, 2, 8, 4), (2, 0, 1, 3)),
    "Q2_K": ((-1, 4, 8, 4), (2, 0, 1, 3)),
}
_RUN = {"IQ2_XXS": 8, "Q4_K": 8, "Q2_K": 16}
"""Weights that a word (or, of IQ2_XXS, two indices) gives a place in the activations' order."""


@dataclass(frozen=True)
class Sorted:
    """Pairs by expert.

    Attributes:
        order: int32 ``[P]``: pair numbers ``t · USED + k``, those of expert 0 first.
        expert: int32 ``[tiles]``: of each tile; −1: none.
        first, last: int32 ``[tiles]``: the tile's places in ``order``.
    """

    order: Tensor
    expert: Tensor
    first: Tensor
    last: Tensor


def sort_pairs(chosen: Tensor, experts: int, tile: int) -> Sorted:
    """Sorts ``chosen``, int32 ``[T, USED]``, and cuts every expert's pairs into tiles of ``tile``."""
    device = chosen.device
    ranked, order = torch.sort(chosen.flatten(), stable=True)
    pairs = ranked.shape[0]
    borders = torch.searchsorted(ranked, torch.arange(experts + 1, dtype=torch.int32, device=device))
    tiles = (borders.diff() + tile - 1) // tile
    ends = tiles.cumsum(0)
    number = torch.arange(-(-pairs // tile) + min(experts, pairs), device=device)
    expert = torch.searchsorted(ends, number, right=True)
    known = expert.clamp(max=experts - 1)
    first = borders[known] + (number - (ends - tiles)[known]) * tile
    return Sorted(
        order.to(torch.int32),
        torch.where(expert < experts, expert, -1).to(torch.int32),
        first.to(torch.int32),
        torch.minimum(first + tile, borders[known + 1]).to(torch.int32),
    )


def reorder(x: Tensor, format: str) -> Tensor:
    """float16 ``[T, K]`` in the order of the format's words."""
    shape, order = _ORDERS[format]
    blocks = x.view(x.shape[0], *shape)
    return blocks.permute(0, *(axis + 1 for axis in order)).contiguous().view(x.shape)


@triton.jit
def _byte_half(bits, BYTE: tl.constexpr):
    """float16 of a byte of ``bits``, 0 to 255; exact: 0x6400 is 1024, whose last place is 1."""
    code = ((bits >> (8 * BYTE)) & 255) | 0x6400
    return code.to(tl.int16).to(tl.float16, bitcast=True) - 1024.0


@triton.jit
def _signed_half(bits, BYTE: tl.constexpr):
    """float16 of a signed byte of ``bits``."""
    code = (((bits >> (8 * BYTE)) & 255) ^ 128) | 0x6400
    return code.to(tl.int16).to(tl.float16, bitcast=True) - 1152.0


@triton.jit
def _interleave(a, b, c, d):
    """``[N, G]`` four times to ``[N, G, 4]``, as ``[N, G, 2, 2]``."""
    return tl.join(tl.join(a, c), tl.join(b, d))


@triton.jit
def _iq2_tile(
    grid, sign, scale, table, signs, row, part, g, K32: tl.constexpr, BN: tl.constexpr, G: tl.constexpr
):
    """Weights ``[BN, 8 G]`` of part ``part`` (0 to 3) of the groups ``g``."""
    at = row[:, None] * K32 + g[None, :]
    indices, pattern = tl.load(grid + at), tl.load(sign + at)
    selector = tl.load(table + ((indices >> (8 * part)) & 255)) | tl.load(
        signs + ((pattern >> (7 * part)) & 127)
    )
    d = tl.load(scale + row[:, None] * (K32 // 8) + (g // 8)[None, :]).to(tl.float32)
    factor = (d * (((pattern >> 28) & 15).to(tl.float32) * 0.25 + 0.125)).to(tl.float16)
    low, high = grid_bytes(selector), grid_bytes(selector >> 16)
    a = _interleave(
        _signed_half(low, 0) * factor,
        _signed_half(low, 1) * factor,
        _signed_half(low, 2) * factor,
        _signed_half(low, 3) * factor,
    )
    b = _interleave(
        _signed_half(high, 0) * factor,
        _signed_half(high, 1) * factor,
        _signed_half(high, 2) * factor,
        _signed_half(high, 3) * factor,
    )
    both = tl.join(tl.reshape(a, [BN, G, 4]), tl.reshape(b, [BN, G, 4]))
    return tl.reshape(tl.permute(both, (0, 1, 3, 2)), [BN, 8 * G])


@triton.jit
def _q4_tile(words, scales, ranges, row, part, g, K64: tl.constexpr, BN: tl.constexpr, G: tl.constexpr):
    """Weights ``[BN, 8 G]`` of word ``part`` (0 to 7) of the runs ``g`` of 64."""
    packed = tl.load(words + (row[:, None] * 8 + part) * K64 + g[None, :])
    block = row[:, None] * (K64 // 4) + (g // 4)[None, :]
    d, least = tl.load(ranges + block * 2).to(tl.float32), tl.load(ranges + block * 2 + 1).to(tl.float32)
    halves = ()
    for half in tl.static_range(2):
        factor, minimum = _k_scale(scales + block * 12, ((g % 4) * 2 + half)[None, :])
        factor, minimum = d * factor, least * minimum
        bits = (packed >> (4 * half)) & 0x0F0F0F0F
        values = ()
        for byte in tl.static_range(4):
            values = values + ((_byte_half(bits, byte).to(tl.float32) * factor - minimum).to(tl.float16),)
        halves = halves + (tl.reshape(_interleave(values[0], values[1], values[2], values[3]), [BN, G, 4]),)
    return tl.reshape(tl.permute(tl.join(halves[0], halves[1]), (0, 1, 3, 2)), [BN, 8 * G])


@triton.jit
def _q2_tile(words, scales, ranges, row, part, g, K128: tl.constexpr, BN: tl.constexpr, G: tl.constexpr):
    """Weights ``[BN, 16 G]`` of word ``part`` (0 to 7) of the runs ``g`` of 128."""
    packed = tl.load(words + (row[:, None] * 8 + part) * K128 + g[None, :])
    fields = tl.load(scales + row[:, None] * (2 * K128) + g[None, :] * 2 + part // 4)
    block = row[:, None] * (K128 // 2) + (g // 2)[None, :]
    d, least = tl.load(ranges + block * 2).to(tl.float32), tl.load(ranges + block * 2 + 1).to(tl.float32)
    codes = ()
    for code in tl.static_range(4):
        factor = (((fields >> (8 * code)) & 15).to(tl.float32) * d).to(tl.float16)
        minimum = (((fields >> (8 * code + 4)) & 15).to(tl.float32) * least).to(tl.float16)
        bits = (packed >> (2 * code)) & 0x03030303
        values = ()
        for byte in tl.static_range(4):
            values = values + (_byte_half(bits, byte) * factor - minimum,)
        codes = codes + (tl.reshape(_interleave(values[0], values[1], values[2], values[3]), [BN, G, 4]),)
    pairs = tl.join(tl.join(codes[0], codes[2]), tl.join(codes[1], codes[3]))  # [BN, G, 4 bytes, 2, 2 codes]
    return tl.reshape(tl.permute(tl.reshape(pairs, [BN, G, 4, 4]), (0, 1, 3, 2)), [BN, 16 * G])


@triton.jit
def _weights(
    first,
    second,
    third,
    table,
    signs,
    row,
    step,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    BN: tl.constexpr,
    RUNS: tl.constexpr,
    G: tl.constexpr,
):
    """The tile of step ``step``: all runs of word 0, then of word 1 and so on.

    Its users add 0: Triton's passes for sm_90 fail where they move a transposition over the tile's last
    reshape.
    """
    STEPS: tl.constexpr = RUNS // G
    part, g = step // STEPS, step % STEPS * G + tl.arange(0, G)
    if FORMAT == "IQ2_XXS":
        return _iq2_tile(first, second, third, table, signs, row, part, g, K // 32, BN, G)
    elif FORMAT == "Q4_K":
        return _q4_tile(first, second, third, row, part, g, K // 64, BN, G)
    else:
        return _q2_tile(first, second, third, row, part, g, K // 128, BN, G)


@triton.jit
def _gate_up(
    x,
    g1,
    g2,
    g3,
    u1,
    u2,
    u3,
    table,
    signs,
    order,
    tile_expert,
    tile_first,
    tile_last,
    weights,
    out,
    clamp,
    N: tl.constexpr,
    K: tl.constexpr,
    USED: tl.constexpr,
    FORMAT: tl.constexpr,
    RUNS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    G: tl.constexpr,
):
    tile = tl.program_id(1)
    expert = tl.load(tile_expert + tile)
    if expert >= 0:
        place = tl.load(tile_first + tile) + tl.arange(0, BM)
        there = place < tl.load(tile_last + tile)
        pair = tl.load(order + place, there, 0)
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        row = expert.to(tl.int64) * N + n
        at = x + (pair // USED)[:, None].to(tl.int64) * K + tl.arange(0, BK)[None, :]
        gate = tl.zeros([BM, BN], tl.float32)
        up = tl.zeros([BM, BN], tl.float32)
        for step in range(K // BK):
            values = tl.load(at + step * BK)
            w = _weights(g1, g2, g3, table, signs, row, step, K, FORMAT, BN, RUNS, G)
            gate = tl.dot(values, tl.trans(w + 0.0), gate)
            v = _weights(u1, u2, u3, table, signs, row, step, K, FORMAT, BN, RUNS, G)
            up = tl.dot(values, tl.trans(v + 0.0), up)
        hidden = swiglu(gate, up, clamp) * tl.load(weights + pair, there, 0.0)[:, None]
        tl.store(out + place[:, None].to(tl.int64) * N + n[None, :], hidden.to(tl.float16), there[:, None])


@triton.jit
def _down(
    x,
    first,
    second,
    third,
    order,
    tile_expert,
    tile_first,
    tile_last,
    out,
    N: tl.constexpr,
    K: tl.constexpr,
    USED: tl.constexpr,
    PARTS: tl.constexpr,
    FORMAT: tl.constexpr,
    RUNS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    G: tl.constexpr,
):
    tile = tl.program_id(1)
    expert = tl.load(tile_expert + tile)
    if expert >= 0:
        place = tl.load(tile_first + tile) + tl.arange(0, BM)
        there = place < tl.load(tile_last + tile)
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        row = expert.to(tl.int64) * N + n
        at = x + tl.where(there, place, 0)[:, None].to(tl.int64) * K + tl.arange(0, BK)[None, :]
        sums = tl.zeros([BM, BN], tl.float32)
        for step in range(K // BK):
            w = _weights(first, second, third, order, order, row, step, K, FORMAT, BN, RUNS, G)
            sums = tl.dot(tl.load(at + step * BK), tl.trans(w + 0.0), sums)
        pair = tl.load(order + place, there, 0)
        to = (pair // USED * PARTS + pair % USED).to(tl.int64) * N
        tl.store(out + to[:, None] + n[None, :], sums.to(tl.float16), there[:, None])


def _depth(matrix: Matrix, depth: int) -> tuple[int, int, int]:
    """A tile's depth, the runs of a word's plane, and the runs of a tile."""
    run = _RUN[matrix.format]
    runs = matrix.columns // (run * (4 if matrix.format == "IQ2_XXS" else 8))
    tile = min(runs & -runs, depth // run)
    return tile * run, runs, tile


def experts_gate_up(
    gate: Matrix,
    up: Matrix,
    tables: tuple[Tensor, Tensor],
    x: Tensor,
    pairs: Sorted,
    weights: Tensor,
    out: Tensor,
    clamp: float,
    tiles: Tiles,
) -> None:
    """Hidden values of every pair, weighted, in the order of ``pairs``.

    Args:
        gate, up: ``[E, N, K]``, IQ2_XXS or Q4_K.
        tables: of :mod:`kernels.gpu.tables`.
        x: float16 ``[T, K]``, reordered for their format.
        weights: float32 ``[T, USED]``.
        out: float16 ``[P, N]``.
    """
    bm, bn, depth, warps, stages = tiles.experts_in
    depth, runs, tile = _depth(gate, depth)
    bn = min(bn, gate.rows & -gate.rows)
    _gate_up[(gate.rows // bn, pairs.expert.shape[0])](
        x,
        *gate.planes,
        *up.planes,
        *tables,
        pairs.order,
        pairs.expert,
        pairs.first,
        pairs.last,
        weights,
        out,
        clamp,
        gate.rows,
        gate.columns,
        weights.shape[1],
        gate.format,
        runs,
        bm,
        bn,
        depth,
        tile,
        num_warps=warps,
        num_stages=stages,
    )


def experts_down_rows(down: Matrix, x: Tensor, pairs: Sorted, used: int, out: Tensor, tiles: Tiles) -> None:
    """``out[t, k] = down[expert of (t, k)] · x[place of (t, k)]``.

    Args:
        down: ``[E, N, K]``, Q2_K or Q4_K.
        x: float16 ``[P, K]`` in the order of ``pairs``, reordered for the format.
        used: experts a row.
        out: float16 ``[T, S, N]``, S ≥ USED.
    """
    bm, bn, depth, warps, stages = tiles.experts_out
    depth, runs, tile = _depth(down, depth)
    bn = min(bn, down.rows & -down.rows)
    _down[(down.rows // bn, pairs.expert.shape[0])](
        x,
        *down.planes,
        pairs.order,
        pairs.expert,
        pairs.first,
        pairs.last,
        out,
        down.rows,
        down.columns,
        used,
        out.shape[1],
        down.format,
        runs,
        bm,
        bn,
        depth,
        tile,
        num_warps=warps,
        num_stages=stages,
    )
