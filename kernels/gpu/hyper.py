"""Hyper-connections: the streams take in a sub-layer's output and give the next one its input.

Two launches a sub-layer. The first merges the output into the streams and multiplies them with the mixing
matrix, a piece of the width a program. The second adds the pieces up, weighs the streams to the next input,
normalises and rounds it, and beside that makes the weights of the next merge. Equals
:mod:`kernels.hyper` and :func:`kernels.norm.rms_norm`; four streams.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.quantize import Quantized, store_quantized

STREAMS = 4
PARTIALS = 32
"""Sums a piece leaves: up to 24 products, and the squares in the last place."""
_PIECE = 128


@dataclass(frozen=True)
class HyperState:
    """Streams of T rows and what a merge needs.

    Attributes:
        streams: float32 ``[T, 4, D]``.
        mix: float32 ``[T, 20]``: post, then comb by source and destination.
        partials: float32 ``[T, D / 128, 32]``.
    """

    streams: Tensor
    mix: Tensor
    partials: Tensor

    @classmethod
    def empty(cls, rows: int, hidden: int, device: torch.device) -> HyperState:
        """Memory for ``rows`` rows."""
        return cls(
            torch.zeros(rows, STREAMS, hidden, device=device),
            torch.zeros(rows, STREAMS + STREAMS**2, device=device),
            torch.zeros(rows, hidden // _PIECE, PARTIALS, device=device),
        )


@triton.jit
def _merge(
    streams,
    mix,
    outputs,
    tokens,
    fn,
    partials,
    rows,
    D: tl.constexpr,
    M: tl.constexpr,
    EMBED: tl.constexpr,
    PARTS: tl.constexpr,
    PIECE: tl.constexpr,
    ROWS: tl.constexpr,
):
    piece = tl.program_id(0)
    d = piece * PIECE + tl.arange(0, PIECE)
    m = tl.arange(0, 32)
    weights = ()
    for stream in tl.static_range(4):
        weights = weights + (
            tl.load(fn + m[:, None] * (4 * D) + stream * D + d[None, :], m[:, None] < M, 0.0),
        )
    first = tl.program_id(1).to(tl.int64) * ROWS
    for offset in range(tl.minimum(rows - first, ROWS)):
        _merge_row(
            streams,
            mix,
            outputs,
            tokens,
            weights,
            partials,
            first + offset,
            piece,
            d,
            m,
            D,
            EMBED,
            PARTS,
            PIECE,
        )


@triton.jit
def _merge_row(
    streams,
    mix,
    outputs,
    tokens,
    weights,
    partials,
    row,
    piece,
    d,
    m,
    D: tl.constexpr,
    EMBED: tl.constexpr,
    PARTS: tl.constexpr,
    PIECE: tl.constexpr,
):
    streams += row * (4 * D)
    sums = tl.zeros([32, PIECE], tl.float32)
    squares = tl.zeros([PIECE], tl.float32)
    if EMBED:
        token = tl.load(tokens + row).to(tl.int64)
        value = tl.load(outputs + token * D + d).to(tl.float32)
        for stream in tl.static_range(4):
            tl.store(streams + stream * D + d, value)
            sums += weights[stream].to(tl.float32) * value[None, :]
            squares += value * value
    else:
        out = tl.load(outputs + row * (PARTS * D) + d).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            out += tl.load(outputs + (row * PARTS + part) * D + d).to(tl.float32)
        old0 = tl.load(streams + d)
        old1 = tl.load(streams + D + d)
        old2 = tl.load(streams + 2 * D + d)
        old3 = tl.load(streams + 3 * D + d)
        mix += row * 20
        for stream in tl.static_range(4):
            value = tl.load(mix + stream) * out
            value += tl.load(mix + 4 + stream) * old0
            value += tl.load(mix + 8 + stream) * old1
            value += tl.load(mix + 12 + stream) * old2
            value += tl.load(mix + 16 + stream) * old3
            tl.store(streams + stream * D + d, value)
            sums += weights[stream].to(tl.float32) * value[None, :]
            squares += value * value
    total = tl.sum(sums, axis=1)
    total = tl.where(m == 31, tl.sum(squares, axis=0), total)
    tl.store(partials + (row * (D // PIECE) + piece) * 32 + m, total)


@triton.jit
def _column_sums(partials, first, COUNT: tl.constexpr, PIECES: tl.constexpr, PIECES_2: tl.constexpr):
    """The sums of ``COUNT`` columns from ``first`` on over the pieces."""
    piece, column = tl.arange(0, PIECES_2), first + tl.arange(0, COUNT)
    values = tl.load(partials + piece[:, None] * 32 + column[None, :], piece[:, None] < PIECES, 0.0)
    return tl.sum(values, axis=0)


@triton.jit
def _input(
    streams,
    partials,
    base,
    scale,
    norm,
    mix,
    words,
    scales,
    plain,
    iterations,
    hc_eps,
    rms_eps,
    D: tl.constexpr,
    D_2: tl.constexpr,
    PIECES: tl.constexpr,
    PIECES_2: tl.constexpr,
    HEAD: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    partials += row * (PIECES * 32)
    s = tl.arange(0, 4)
    squares = tl.sum(tl.where(s == 3, _column_sums(partials, 28, 4, PIECES, PIECES_2), 0.0), axis=0)
    r = tl.rsqrt(squares / (4 * D) + rms_eps)
    if tl.program_id(1) == 0:
        m = _column_sums(partials, 0, 4, PIECES, PIECES_2) * r * tl.load(scale)
        pre = 1.0 / (1.0 + tl.exp(-(m + tl.load(base + s)))) + hc_eps
        d = tl.arange(0, D_2)
        x = tl.load(streams + row * (4 * D) + s[:, None] * D + d[None, :], (d < D)[None, :], 0.0)
        y = tl.sum(x * pre[:, None], axis=0)
        y = y * tl.rsqrt(tl.sum(y * y, axis=0) / D + rms_eps) * tl.load(norm + d, d < D, 0.0)
        tl.store(plain + row * D + d, y.to(tl.float16), d < D)
        store_quantized(
            y, words + row * (D // 4), scales + row * (D // 32), tl.arange(0, D_2 // 32), D // 32, D_2 // 32
        )
    elif not HEAD:
        m = _column_sums(partials, 4, 4, PIECES, PIECES_2) * r * tl.load(scale + 1)
        tl.store(mix + row * 20 + s, 2.0 / (1.0 + tl.exp(-(m + tl.load(base + 4 + s)))))
        logits = tl.reshape(_column_sums(partials, 8, 16, PIECES, PIECES_2), [4, 4]) * r * tl.load(scale + 2)
        at = s[:, None] * 4 + s[None, :]
        logits += tl.load(base + 8 + at)
        comb = tl.exp(logits - tl.max(logits, axis=1)[:, None])
        comb = comb / tl.sum(comb, axis=1)[:, None] + hc_eps
        comb = comb / (tl.sum(comb, axis=0) + hc_eps)[None, :]
        for _iteration in range(1, iterations):
            comb = comb / (tl.sum(comb, axis=1) + hc_eps)[:, None]
            comb = comb / (tl.sum(comb, axis=0) + hc_eps)[None, :]
        tl.store(mix + row * 20 + 4 + at, comb)


def embed(state: HyperState, embedding: Tensor, tokens: Tensor, fn: Tensor, rows: int) -> None:
    """Fills the streams with the tokens' embeddings, and starts the first sub-layer's mix.

    Args:
        embedding: ``[vocab, D]``, F16 or F32.
        tokens: int32 ``[≥ rows]``.
        fn: the sub-layer's mixing matrix, ``[24, 4 D]``.
    """
    hidden, together = state.streams.shape[2], _rows_together(rows)
    _merge[(hidden // _PIECE, triton.cdiv(rows, together))](
        state.streams,
        state.mix,
        embedding,
        tokens,
        fn,
        state.partials,
        rows,
        hidden,
        fn.shape[0],
        True,
        1,
        _PIECE,
        together,
    )


def merge(state: HyperState, outputs: Tensor, fn: Tensor, rows: int) -> None:
    """Merges a sub-layer's output, the sum of its parts ``[≥ rows, parts, D]``, into the streams, and
    starts the mix of the sub-layer (or head) that ``fn`` belongs to.
    """
    hidden, together = state.streams.shape[2], _rows_together(rows)
    _merge[(hidden // _PIECE, triton.cdiv(rows, together))](
        state.streams,
        state.mix,
        outputs,
        outputs,
        fn,
        state.partials,
        rows,
        hidden,
        fn.shape[0],
        False,
        outputs.shape[1],
        _PIECE,
        together,
    )


def _rows_together(rows: int) -> int:
    """Rows that a program takes one after another with one read of its part of the matrix."""
    return 1 if rows <= 64 else 16


def mixed_input(
    state: HyperState,
    base: Tensor,
    scale: Tensor,
    norm: Tensor,
    iterations: int,
    hc_eps: float,
    rms_eps: float,
    rounded: Quantized,
    plain: Tensor,
    rows: int,
    *,
    head: bool = False,
) -> None:
    """The normalised input of the sub-layer that :func:`merge` was given the matrix of.

    Args:
        base, scale: of the mix.
        norm: float32 ``[D]``, the sub-layer's RMS norm.
        rounded, plain: the input, as bytes and as float16 ``[≥ rows, D]``.
        head: the streams end here: no weights for another merge.
    """
    hidden = state.streams.shape[2]
    pieces = hidden // _PIECE
    _input[(rows, 1 if head else 2)](
        state.streams,
        state.partials,
        base,
        scale,
        norm,
        state.mix,
        rounded.words,
        rounded.scales,
        plain,
        iterations,
        hc_eps,
        rms_eps,
        hidden,
        triton.next_power_of_2(hidden),
        pieces,
        triton.next_power_of_2(pieces),
        head,
        num_warps=8 if hidden >= 2048 else 4,
    )
