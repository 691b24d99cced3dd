"""The indexer: scores of every visible entry for every row, and the best of them.

Equals :mod:`kernels.indexer` with its rows rounded as :class:`worker.bank.codec.IndexRows` does.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.bits import e2m1_half, hadamard_sign, power_of_two, to_bf16
from kernels.gpu.keys import Rows, Turns, fp4_codes
from kernels.gpu.tiles import Tiles

_ENTRIES = 64
HELD = (4096, 16384)
"""Entries of a row that its program holds in registers: the fewer, the quicker."""


@triton.jit
def _queries(
    projected, out, cos, sin, H: tl.constexpr, D: tl.constexpr, PLAIN: tl.constexpr, HB: tl.constexpr
):
    row = tl.program_id(1).to(tl.int64)
    head = tl.minimum(tl.program_id(0) * HB + tl.arange(0, HB), H - 1)
    d = tl.arange(0, D)
    x = tl.load(projected + row * (H * D) + head[:, None] * D + d[None, :])
    a, b = tl.split(tl.reshape(x, [HB, D // 2, 2]))
    pair = tl.arange(0, D // 2) - PLAIN // 2
    HALF: tl.constexpr = (D - PLAIN) // 2
    c = tl.load(cos + row * HALF + pair, pair >= 0, 1.0)[None, :]
    s = tl.load(sin + row * HALF + pair, pair >= 0, 0.0)[None, :]
    x = to_bf16(tl.reshape(tl.join(a * c - b * s, a * s + b * c), [HB, D]))
    # bfloat16 values and signs: the products are exact in tf32.
    turn = hadamard_sign(d[:, None], d[None, :])
    spread = to_bf16(tl.dot(x, turn, input_precision="tf32") * (D**-0.5))
    code, exponent = fp4_codes(spread, HB, D)
    WIDTH: tl.constexpr = 32 if D >= 32 else D
    scale = tl.broadcast_to(power_of_two(exponent)[:, :, None], [HB, D // WIDTH, WIDTH])
    values = e2m1_half(code).to(tl.float32) * 16384.0 * tl.reshape(scale, [HB, D])
    low, high = tl.split(tl.reshape(values, [HB, D // 2, 2]))
    at = row * (H * D) + head[:, None] * (D // 2) + tl.arange(0, D // 2)[None, :]
    tl.store(out + at, low.to(tl.float16))
    tl.store(out + at + H * (D // 2), high.to(tl.float16))


@triton.jit
def _scores(
    queries,
    weights,
    codes,
    exponents,
    positions,
    banks,
    pages,
    page_step,
    out,
    out_step,
    WEIGHT_STEP: tl.constexpr,
    RATIO: tl.constexpr,
    PER_PAGE: tl.constexpr,
    H: tl.constexpr,
    HB: tl.constexpr,
    D: tl.constexpr,
    TOP: tl.constexpr,
    BE: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    visible = (tl.load(positions + row) + 1) // RATIO
    first = tl.program_id(0) * BE
    if (first < visible) & (visible > TOP):
        entry = first + tl.arange(0, BE)
        there = entry < visible
        low, high = _index_keys(
            codes, exponents, pages + tl.load(banks + row) * page_step, entry, there, PER_PAGE, D
        )
        head, byte = tl.minimum(tl.arange(0, HB), H - 1), tl.arange(0, D // 2)
        q = queries + row * (H * D) + head[:, None] * (D // 2) + byte[None, :]
        dots = tl.dot(tl.load(q), tl.trans(low))
        dots = tl.dot(tl.load(q + H * (D // 2)), tl.trans(high), dots)
        weight = tl.load(weights + row * WEIGHT_STEP + head, tl.arange(0, HB) < H, 0.0) * ((D * H) ** -0.5)
        score = tl.sum(tl.maximum(dots, 0.0) * weight[:, None], axis=0)
        tl.store(out + row * out_step + entry, score, there)


@triton.jit(do_not_specialize=["rows", "out_step"])
def _scores_rows(
    queries,
    weights,
    codes,
    exponents,
    positions,
    pages,
    out,
    rows,
    out_step,
    WEIGHT_STEP: tl.constexpr,
    RATIO: tl.constexpr,
    PER_PAGE: tl.constexpr,
    H: tl.constexpr,
    HB: tl.constexpr,
    D: tl.constexpr,
    BR: tl.constexpr,
    BE: tl.constexpr,
):
    first_row = tl.program_id(1).to(tl.int64) * BR
    last_row = tl.minimum(first_row + BR, rows)
    entry = tl.program_id(0) * BE + tl.arange(0, BE)
    most = (tl.load(positions + last_row - 1) + 1) // RATIO
    if tl.program_id(0) * BE < most:
        low, high = _index_keys(codes, exponents, pages, entry, entry < most, PER_PAGE, D)
        head, byte = tl.minimum(tl.arange(0, HB), H - 1), tl.arange(0, D // 2)
        for offset in range(last_row - first_row):
            row = first_row + offset
            q = queries + row * (H * D) + head[:, None] * (D // 2) + byte[None, :]
            dots = tl.dot(tl.load(q), tl.trans(low))
            dots = tl.dot(tl.load(q + H * (D // 2)), tl.trans(high), dots)
            weight = tl.load(weights + row * WEIGHT_STEP + head, tl.arange(0, HB) < H, 0.0) * (
                (D * H) ** -0.5
            )
            score = tl.sum(tl.maximum(dots, 0.0) * weight[:, None], axis=0)
            tl.store(out + row * out_step + entry, score, entry < most)


@triton.jit
def _index_keys(codes, exponents, pages, entry, there, PER_PAGE: tl.constexpr, D: tl.constexpr):
    """Keys of the entries ``entry [N]`` of one bank: even and odd elements, float16 ``[N, D / 2]`` each."""
    page = tl.load(pages + entry // PER_PAGE, there, 0)
    at = (page * PER_PAGE + entry % PER_PAGE).to(tl.int64)
    byte = tl.arange(0, D // 2)
    packed = tl.load(codes + at[:, None] * (D // 2) + byte[None, :]).to(tl.int32)
    SCALES: tl.constexpr = (D + 31) // 32
    exponent = tl.load(exponents + at[:, None] * SCALES + (byte // 16)[None, :]).to(tl.int32)
    scale = power_of_two(exponent) * 16384.0
    low = (e2m1_half(packed & 15).to(tl.float32) * scale).to(tl.float16)
    high = (e2m1_half(packed >> 4).to(tl.float32) * scale).to(tl.float16)
    return low, high


@triton.jit
def _ordered(score):
    """float32 as int32 of the same order."""
    u = score.to(tl.int32, bitcast=True)
    return tl.where(u < 0, u ^ 0x7FFFFFFF, u)


@triton.jit
def _keys(scores, begin, visible, BLOCK: tl.constexpr):
    """Ordered scores of a block of entries; entries that cannot be seen come last."""
    entry = begin + tl.arange(0, BLOCK)
    there = entry < visible
    return tl.where(there, _ordered(tl.load(scores + entry, there, 0.0)), -2147483648)


@triton.jit
def _store_best(key, limit, wanted, kept, ties, begin, selected, BLOCK: tl.constexpr):
    """Appends to ``selected`` the entries above ``limit``, and of those at it the first ``wanted``."""
    tie = (key == limit).to(tl.int32)
    take = ((key > limit) | ((tie > 0) & (ties + tl.cumsum(tie, axis=0) <= wanted))).to(tl.int32)
    place = kept + tl.cumsum(take, axis=0) - 1
    tl.store(selected + place, begin + tl.arange(0, BLOCK), take > 0)
    return kept + tl.sum(take, axis=0), ties + tl.sum(tie, axis=0)


@triton.jit
def _next_digit(counts, limit, shift, TOP: tl.constexpr):
    """The limit with its next two bits, from how many keys reach each of the three higher values."""
    c1, c2, c3 = counts & 0x1FFFFF, (counts >> 21) & 0x1FFFFF, counts >> 42
    digit = (c1 >= TOP).to(tl.int32) + (c2 >= TOP).to(tl.int32) + (c3 >= TOP).to(tl.int32)
    return limit ^ (digit << shift)


@triton.jit
def _reached(key, limit, shift):
    """How many of ``key`` reach the limit with digit 1, 2 and 3 at ``shift``: three counts of 21 bits."""
    one = (key >= (limit ^ (tl.full([], 1, tl.int32) << shift))).to(tl.int64)
    two = (key >= (limit ^ (tl.full([], 2, tl.int32) << shift))).to(tl.int64)
    three = (key >= (limit ^ (tl.full([], 3, tl.int32) << shift))).to(tl.int64)
    return tl.sum(one + (two << 21) + (three << 42), axis=0)


@triton.jit
def _select_held(scores, visible, selected, TOP: tl.constexpr, BLOCK: tl.constexpr):
    """The best ``TOP`` of at most BLOCK entries: their keys stay in registers.

    The limit, the key of the last entry taken, is found two bits at a time.
    """
    key = _keys(scores, 0, visible, BLOCK)
    limit = tl.full([], -2147483648, tl.int32)
    for step in range(16):
        shift = 30 - 2 * step
        limit = _next_digit(_reached(key, limit, shift), limit, shift, TOP)
    above = tl.sum((key > limit).to(tl.int32), axis=0)
    _store_best(key, limit, TOP - above, 0, 0, 0, selected, BLOCK)


@triton.jit
def _select_long(scores, visible, selected, TOP: tl.constexpr, BLOCK: tl.constexpr):
    """The same for up to 2 million entries, which are read once for every two bits."""
    limit = tl.full([], -2147483648, tl.int32)
    for step in range(16):
        shift = 30 - 2 * step
        counts = tl.full([], 0, tl.int64)
        for begin in range(0, visible, BLOCK):
            counts += _reached(_keys(scores, begin, visible, BLOCK), limit, shift)
        limit = _next_digit(counts, limit, shift, TOP)
    above = 0
    for begin in range(0, visible, BLOCK):
        above += tl.sum((_keys(scores, begin, visible, BLOCK) > limit).to(tl.int32), axis=0)
    kept = 0
    ties = 0
    for begin in range(0, visible, BLOCK):
        kept, ties = _store_best(
            _keys(scores, begin, visible, BLOCK), limit, TOP - above, kept, ties, begin, selected, BLOCK
        )


@triton.jit(do_not_specialize=["step"])
def _select(
    scores,
    step,
    positions,
    selected,
    RATIO: tl.constexpr,
    TOP: tl.constexpr,
    TOP_2: tl.constexpr,
    MOST: tl.constexpr,
    SHORT: tl.constexpr,
    LONG: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    visible = (tl.load(positions + row) + 1) // RATIO
    scores += row * step
    selected += row * TOP
    if visible <= TOP:
        slot = tl.arange(0, TOP_2)
        tl.store(selected + slot, tl.where(slot < visible, slot, -1), slot < TOP)
    else:
        if visible <= SHORT:
            _select_held(scores, visible, selected, TOP, SHORT)
        elif MOST > SHORT:
            if visible <= LONG:
                _select_held(scores, visible, selected, TOP, LONG)
            elif MOST > LONG:
                _select_long(scores, visible, selected, TOP, LONG)


def index_queries(projected: Tensor, out: Tensor, turns: Turns, count: int) -> None:
    """Rotates, spreads and rounds the indexer's queries.

    Args:
        projected: float32 ``[T, H · D]``.
        out: float16 ``[≥ T, 2, H, D / 2]``: even elements, then odd ones, as the packed keys pair them.
    """
    heads, dim = out.shape[2], out.shape[3] * 2
    _queries[(triton.cdiv(heads, 16), count)](
        projected, out, turns.cos, turns.sin, heads, dim, dim - 2 * turns.cos.shape[1], 16, num_warps=4
    )


def score_entries(
    queries: Tensor,
    weights: Tensor,
    entries: tuple[Tensor, ...],
    rows: Rows,
    scores: Tensor,
    ratio: int,
    per_page: int,
    top: int,
    count: int,
    most_entries: int,
) -> None:
    """Scores of the visible entries of every row that sees more than ``top``.

    Args:
        queries: of :func:`index_queries`.
        weights: float32, row t at ``weights[t, :H]``.
        entries: the indexer's planes of the pool.
        scores: float32 ``[≥ T, S]``.
        most_entries: none of the rows sees more.
    """
    heads, dim = queries.shape[2], queries.shape[3] * 2
    _scores[(triton.cdiv(most_entries, _ENTRIES), count)](
        queries,
        weights,
        entries[0],
        entries[1],
        rows.positions,
        rows.banks,
        rows.pages,
        rows.pages.stride(0),
        scores,
        scores.stride(0),
        weights.stride(0),
        ratio,
        per_page,
        heads,
        max(heads, 16),
        dim,
        top,
        _ENTRIES,
        num_warps=4,
    )


def score_rows(
    queries: Tensor,
    weights: Tensor,
    entries: tuple[Tensor, ...],
    positions: Tensor,
    pages: Tensor,
    scores: Tensor,
    ratio: int,
    per_page: int,
    most_entries: int,
    tiles: Tiles,
) -> None:
    """Scores of the visible entries for many rows of one bank (prefill); a tile of entries is read once for
    several rows.

    Args:
        queries: of :func:`index_queries`, for R rows.
        weights: float32, row r at ``weights[r, :H]``.
        entries: the indexer's planes of the pool.
        positions: int32 ``[R]``, ascending.
        pages: int32 ``[P]``, the bank's.
        scores: float32 ``[≥ R, S]``.
        most_entries: the last row sees no more.
    """
    heads, dim, rows = queries.shape[2], queries.shape[3] * 2, positions.shape[0]
    together, block, warps, stages = tiles.index
    _scores_rows[(triton.cdiv(most_entries, block), triton.cdiv(rows, together))](
        queries,
        weights,
        entries[0],
        entries[1],
        positions,
        pages,
        scores,
        rows,
        scores.stride(0),
        weights.stride(0),
        ratio,
        per_page,
        heads,
        max(heads, 16),
        dim,
        together,
        block,
        num_warps=warps,
        num_stages=stages,
    )


def select_entries(
    scores: Tensor, rows: Rows, selected: Tensor, ratio: int, count: int, most_entries: int
) -> None:
    """The best visible entries of every row, ties to the lower; ascending, −1 where there are fewer.

    Args:
        scores: of :func:`score_entries`.
        selected: int32 ``[≥ T, top]``.
        most_entries: none of the rows sees more.
    """
    top = selected.shape[1]
    short, long = HELD
    _select[(count,)](
        scores,
        scores.stride(0),
        rows.positions,
        selected,
        ratio,
        top,
        triton.next_power_of_2(top),
        next((size for size in HELD if size >= most_entries), 2 * long),
        short,
        long,
        num_warps=4 if most_entries <= short else 16,
    )
