"""Rows of keys, from projection to packed form: norm, rotation, rounding, and the compressors' pooling.

One launch does for every row what its projections allow: the query's norm, the raw key, and, where the row
completes a window, the compressed entries. A launch may also only write the compressors' rings (after a
prefill chunk, whose rows are more than a ring's slack). Equals :mod:`kernels.norm`, :mod:`kernels.rope`,
:mod:`kernels.compressor` and :mod:`kernels.rounding`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.bits import (
    bf16_bits,
    e2m1_code,
    e4m3_code,
    hadamard_sign,
    power_of_two,
    scale_exponent,
    to_bf16,
)
from kernels.gpu.quantize import Quantized, store_quantized


@dataclass(frozen=True)
class Rows:
    """The rows of a step, int32 ``[T]`` each.

    Attributes:
        tokens, positions: of every row.
        banks: the bank it extends.
        firsts: the first row of the same bank in this step.
        pages: page tables, int32 ``[banks, P]``.
    """

    tokens: Tensor
    positions: Tensor
    banks: Tensor
    firsts: Tensor
    pages: Tensor


@dataclass(frozen=True)
class Turns:
    """Cosines and sines, float32 ``[T, rope_dim / 2]`` each: at the rows' positions, and at the first
    positions of the windows that the rows close.
    """

    cos: Tensor
    sin: Tensor
    entry_cos: Tensor
    entry_sin: Tensor


@triton.jit
def rotate(x, cos, sin, D: tl.constexpr, PLAIN: tl.constexpr, INVERSE: tl.constexpr):
    """Turns the pairs of ``x [D]`` from ``PLAIN`` on."""
    a, b = tl.split(tl.reshape(x, [D // 2, 2]))
    pair = tl.arange(0, D // 2) - PLAIN // 2
    c = tl.load(cos + pair, pair >= 0, 1.0)
    s = tl.load(sin + pair, pair >= 0, 0.0)
    if INVERSE:
        s = -s
    return tl.reshape(tl.join(a * c - b * s, a * s + b * c), [D])


@triton.jit
def _store_key(x, cos, sin, codes, exponents, turned, at, D: tl.constexpr, PLAIN: tl.constexpr):
    """Rotates, rounds and packs a normalised row ``x [D]`` as row ``at`` of the key planes."""
    x = to_bf16(rotate(to_bf16(x), cos, sin, D, PLAIN, False))
    d = tl.arange(0, D)
    WIDTH: tl.constexpr = 64 if D >= 64 else D
    plain = tl.where(d < PLAIN, x, 0.0)
    blocks = tl.reshape(plain, [D // WIDTH, WIDTH])
    amax = tl.maximum(tl.max(tl.abs(blocks), axis=1), 1e-4)
    exponent = scale_exponent(amax, 448.0)
    scaled = tl.div_rn(blocks, tl.broadcast_to(power_of_two(exponent)[:, None], [D // WIDTH, WIDTH]))
    code = tl.reshape(e4m3_code(tl.minimum(tl.maximum(scaled, -448.0), 448.0)), [D])
    SCALES: tl.constexpr = (PLAIN + 63) // 64
    block = tl.arange(0, D // WIDTH)
    tl.store(codes + at * PLAIN + d, code.to(tl.uint8), d < PLAIN)
    tl.store(exponents + at * SCALES + block, exponent.to(tl.uint8), block < SCALES)
    tl.store(turned + at * (D - PLAIN) + d - PLAIN, bf16_bits(x), d >= PLAIN)


@triton.jit
def _store_index(x, cos, sin, codes, exponents, at, D: tl.constexpr, PLAIN: tl.constexpr):
    """Rotates, spreads, rounds and packs a normalised indexer row ``x [D]`` as row ``at``."""
    x = to_bf16(rotate(to_bf16(x), cos, sin, D, PLAIN, False))
    d = tl.arange(0, D)
    spread = tl.sum(x[:, None] * hadamard_sign(d[:, None], d[None, :]), axis=0)
    code, exponent = fp4_codes(to_bf16(spread * (D**-0.5)), 1, D)
    low, high = tl.split(tl.reshape(code, [D // 2, 2]))
    SCALES: tl.constexpr = (D + 31) // 32
    tl.store(codes + at * (D // 2) + tl.arange(0, D // 2), (low | (high << 4)).to(tl.uint8))
    tl.store(exponents + at * SCALES + tl.arange(0, SCALES), tl.reshape(exponent, [SCALES]).to(tl.uint8))


@triton.jit
def fp4_codes(x, ROWS: tl.constexpr, D: tl.constexpr):
    """FP4 codes int32 ``[ROWS, D]`` and exponents ``[ROWS, D / 32]`` of ``x``."""
    WIDTH: tl.constexpr = 32 if D >= 32 else D
    blocks = tl.reshape(x, [ROWS, D // WIDTH, WIDTH])
    amax = tl.maximum(tl.max(tl.abs(blocks), axis=2), 7.0523110e-38)  # 6 · 2^−126
    exponent = tl.maximum(scale_exponent(amax, 6.0), 1)
    scale = tl.broadcast_to(power_of_two(exponent)[:, :, None], [ROWS, D // WIDTH, WIDTH])
    scaled = tl.div_rn(blocks, scale)
    return tl.reshape(e2m1_code(tl.minimum(tl.maximum(scaled, -6.0), 6.0)), [ROWS, D]), exponent


@triton.jit
def _pooled(
    vectors,
    scores,
    ape,
    ring_vectors,
    ring_scores,
    row,
    first,
    position,
    bank,
    STEP,
    RING: tl.constexpr,
    RATIO: tl.constexpr,
    D: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """The window that ends at ``position``, pooled ``[D]``, from the step's rows and the bank's ring."""
    OVERLAP: tl.constexpr = 2 if RATIO == 4 else 1
    WIDTH: tl.constexpr = OVERLAP * D
    d, slot = tl.arange(0, D), tl.arange(0, SLOTS)
    peak = tl.full([D], -1e30, tl.float32)
    total = tl.zeros([D], tl.float32)
    weighted = tl.zeros([D], tl.float32)
    step_start = position - (row - first)
    for begin in range(0, OVERLAP * RATIO, SLOTS):
        index = begin + slot
        at = position + 1 - OVERLAP * RATIO + index
        column = tl.where(index >= (OVERLAP - 1) * RATIO, (OVERLAP - 1) * D, 0)[:, None] + d[None, :]
        there = (at >= 0) & (index < OVERLAP * RATIO)
        fresh = there & (at >= step_start)
        kept = there & (at < step_start)
        place = (first + at - step_start)[:, None] * STEP + column
        held = (bank * RING + (at + RING) % RING)[:, None] * WIDTH + column
        value = tl.load(vectors + place, fresh[:, None], 0.0) + tl.load(
            ring_vectors + held, kept[:, None], 0.0
        )
        bias = tl.load(ape + ((at + RATIO) % RATIO)[:, None] * WIDTH + column, fresh[:, None], 0.0).to(
            tl.float32
        )
        score = tl.load(scores + place, fresh[:, None], 0.0) + bias
        score += tl.load(ring_scores + held, kept[:, None], 0.0)
        score = tl.where(there[:, None], score, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, axis=0))
        weight = tl.exp(score - higher[None, :])
        shrink = tl.exp(peak - higher)
        total = total * shrink + tl.sum(weight, axis=0)
        weighted = weighted * shrink + tl.sum(weight * value, axis=0)
        peak = higher
    return weighted / total


@triton.jit
def _keep(
    vectors,
    scores,
    ape,
    ring_vectors,
    ring_scores,
    row,
    position,
    bank,
    STEP,
    RING: tl.constexpr,
    RATIO: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Writes a row's compressor inputs to its bank's ring."""
    d = tl.arange(0, WIDTH)
    at = (bank * RING + position % RING) * WIDTH + d
    score = tl.load(scores + row * STEP + d) + tl.load(ape + (position % RATIO) * WIDTH + d).to(tl.float32)
    tl.store(ring_vectors + at, tl.load(vectors + row * STEP + d))
    tl.store(ring_scores + at, score)


@triton.jit
def _normed(x, weight, eps, D: tl.constexpr):
    return x * tl.rsqrt(tl.sum(x * x, axis=0) / D + eps) * tl.load(weight + tl.arange(0, D))


@triton.jit
def _attention_inputs(
    projected,
    q_norm,
    kv_norm,
    q_words,
    q_scales,
    q_plain,
    ring_codes,
    ring_exponents,
    ring_turned,
    key_bases,
    key_modulus,
    positions,
    cos,
    sin,
    eps,
    QA: tl.constexpr,
    D: tl.constexpr,
    PLAIN: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = (D - PLAIN) // 2
    if tl.program_id(1) == 0:
        d = tl.arange(0, QA)
        x = _normed(tl.load(projected + row * (QA + D) + d), q_norm, eps, QA)
        tl.store(q_plain + row * QA + d, x.to(tl.float16))
        store_quantized(
            x,
            q_words + row * (QA // 4),
            q_scales + row * (QA // 32),
            tl.arange(0, QA // 32),
            QA // 32,
            QA // 32,
        )
    else:
        key = _normed(tl.load(projected + row * (QA + D) + QA + tl.arange(0, D)), kv_norm, eps, D)
        at = (tl.load(key_bases + row) + tl.load(positions + row) % key_modulus).to(tl.int64)
        _store_key(
            key, cos + row * HALF, sin + row * HALF, ring_codes, ring_exponents, ring_turned, at, D, PLAIN
        )


@triton.jit
def _entries(
    projected,
    ape,
    index_ape,
    norm,
    index_norm,
    ring_vectors,
    ring_scores,
    index_vectors,
    index_scores,
    codes,
    exponents,
    turned,
    index_codes,
    index_exponents,
    positions,
    banks,
    firsts,
    pages,
    last,
    page_step,
    cos,
    sin,
    eps,
    STEP: tl.constexpr,
    RATIO: tl.constexpr,
    PER_PAGE: tl.constexpr,
    RING: tl.constexpr,
    D: tl.constexpr,
    PLAIN: tl.constexpr,
    INDEX_D: tl.constexpr,
    INDEX_PLAIN: tl.constexpr,
    POOL: tl.constexpr,
    KEEP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row)
    bank = tl.load(banks + row)
    first = tl.load(firsts + row)
    HALF: tl.constexpr = (D - PLAIN) // 2
    OVERLAP: tl.constexpr = 2 if RATIO == 4 else 1
    WIDTH: tl.constexpr = OVERLAP * D
    INDEX_WIDTH: tl.constexpr = OVERLAP * INDEX_D
    SLOTS: tl.constexpr = 8 if RATIO == 4 else 16
    closes = (position + 1) % RATIO == 0
    entry = position // RATIO
    at = (tl.load(pages + bank * page_step + entry // PER_PAGE) * PER_PAGE + entry % PER_PAGE).to(tl.int64)
    if tl.program_id(1) == 0:
        if POOL:
            if closes:
                x = _pooled(
                    projected,
                    projected + WIDTH,
                    ape,
                    ring_vectors,
                    ring_scores,
                    row,
                    first,
                    position,
                    bank,
                    STEP,
                    RING,
                    RATIO,
                    D,
                    SLOTS,
                )
                _store_key(
                    _normed(x, norm, eps, D),
                    cos + row * HALF,
                    sin + row * HALF,
                    codes,
                    exponents,
                    turned,
                    at,
                    D,
                    PLAIN,
                )
        if KEEP:
            if row >= last - RING:
                _keep(
                    projected,
                    projected + WIDTH,
                    ape,
                    ring_vectors,
                    ring_scores,
                    row,
                    position,
                    bank,
                    STEP,
                    RING,
                    RATIO,
                    WIDTH,
                )
    elif INDEX_D > 0:
        if POOL:
            if closes:
                y = _pooled(
                    projected + 2 * WIDTH,
                    projected + 2 * WIDTH + INDEX_WIDTH,
                    index_ape,
                    index_vectors,
                    index_scores,
                    row,
                    first,
                    position,
                    bank,
                    STEP,
                    RING,
                    RATIO,
                    INDEX_D,
                    SLOTS,
                )
                _store_index(
                    _normed(y, index_norm, eps, INDEX_D),
                    cos + row * HALF,
                    sin + row * HALF,
                    index_codes,
                    index_exponents,
                    at,
                    INDEX_D,
                    INDEX_PLAIN,
                )
        if KEEP:
            if row >= last - RING:
                _keep(
                    projected + 2 * WIDTH,
                    projected + 2 * WIDTH + INDEX_WIDTH,
                    index_ape,
                    index_vectors,
                    index_scores,
                    row,
                    position,
                    bank,
                    STEP,
                    RING,
                    RATIO,
                    INDEX_WIDTH,
                )


def attention_inputs(
    projected: Tensor,
    q_norm: Tensor,
    kv_norm: Tensor,
    q: Quantized,
    q_plain: Tensor,
    keys: tuple[Tensor, ...],
    key_bases: Tensor,
    key_modulus: int,
    rows: Rows,
    turns: Turns,
    eps: float,
    count: int,
) -> None:
    """The low-rank query, normalised and rounded, and the packed raw key of every row.

    Args:
        projected: float32 ``[T, q_rank + D]``: q_a's and kv's results.
        q, q_plain: the query as bytes and as float16.
        keys: planes that take the keys: row t at ``key_bases[t] + positions[t] % key_modulus``.
    """
    qa, dim = q_norm.shape[0], kv_norm.shape[0]
    codes, exponents, turned = raw_planes(keys)
    _attention_inputs[(count, 2)](
        projected,
        q_norm,
        kv_norm,
        q.words,
        q.scales,
        q_plain,
        codes,
        exponents,
        turned,
        key_bases,
        key_modulus,
        rows.positions,
        turns.cos,
        turns.sin,
        eps,
        qa,
        dim,
        keys[0].shape[1],
        num_warps=4,
    )


def compressed_entries(
    projected: Tensor,
    ape: Tensor,
    norm: Tensor,
    ring: tuple[Tensor, Tensor],
    entries: tuple[Tensor, ...],
    index: IndexEntries | None,
    rows: Rows,
    turns: Turns,
    ratio: int,
    per_page: int,
    eps: float,
    count: int,
    *,
    pool: bool,
    keep: bool,
) -> None:
    """Stores the entries whose windows the rows close (``pool``), and the rows' inputs (``keep``).

    Both at once need that no ring slot is read and written in the step: at most a ring's slack of rows a
    bank.
    With ``keep`` alone the rows are those of one bank, and the last ring's worth of them is kept.

    Args:
        projected: float32 ``[T, ≥ 2 · overlap · D]``: vectors and scores, then the indexer's.
        ape, norm: of the compressor.
        ring: vectors and scores, float32 ``[banks · ring rows, overlap · D]``.
        entries: planes of the pool.
        per_page: entries a page.
    """
    dim = norm.shape[0]
    codes, exponents, turned = raw_planes(entries)
    plain = entries[0].shape[1]
    slots = ring[0].shape[0] // rows.pages.shape[0]
    other = index or IndexEntries(ape, norm, ring, entries[:2])
    index_dim = 0 if index is None else index.norm.shape[0]
    _entries[(count, 2 if index else 1)](
        projected,
        ape,
        other.ape,
        norm,
        other.norm,
        *ring,
        *other.ring,
        codes,
        exponents,
        turned,
        other.entries[0].view(codes.dtype),
        other.entries[1],
        rows.positions,
        rows.banks,
        rows.firsts,
        rows.pages,
        0 if pool else count,
        rows.pages.stride(0),
        turns.entry_cos,
        turns.entry_sin,
        eps,
        projected.stride(0),
        ratio,
        per_page,
        slots,
        dim,
        plain,
        index_dim,
        index_dim - (dim - plain),
        pool,
        keep,
        num_warps=4,
    )


@dataclass(frozen=True)
class IndexEntries:
    """The indexer's compressor: as in :func:`compressed_entries`."""

    ape: Tensor
    norm: Tensor
    ring: tuple[Tensor, Tensor]
    entries: tuple[Tensor, ...]


def raw_planes(planes: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Key planes as plain bytes and 16-bit words."""
    codes, exponents, turned = planes
    return codes.view(torch.uint8), exponents, turned.view(torch.int16)
