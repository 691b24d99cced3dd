"""Attention for many rows of one bank (prefill): a program a row and block of heads, over all the row's keys.

The keys of the chunk, and those of the window before it, lie packed in a buffer of their own. Equals
:class:`kernels.attention.Attention`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.attention import KeyLists, entry_rows, query_blocks, read_tile
from kernels.gpu.keys import Rows, Turns, raw_planes
from kernels.gpu.tiles import Tiles


@triton.jit
def _attend_rows(
    q,
    sinks,
    cos,
    sin,
    codes,
    exponents,
    turned,
    entry_codes,
    entry_exponents,
    entry_turned,
    modulus,
    selected,
    positions,
    pages,
    eps,
    H: tl.constexpr,
    D: tl.constexpr,
    PLAIN: tl.constexpr,
    B: tl.constexpr,
    WINDOW: tl.constexpr,
    RATIO: tl.constexpr,
    PER_PAGE: tl.constexpr,
    TOP: tl.constexpr,
    HB: tl.constexpr,
    K: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    head = tl.minimum(tl.program_id(0) * HB + tl.arange(0, HB), H - 1)
    position = tl.load(positions + row)
    BLOCKS: tl.constexpr = D // B
    HALF: tl.constexpr = B // 2
    q += row * (H * D)
    blocks = query_blocks(q, cos + row * HALF, sin + row * HALF, head, eps, H, D, PLAIN, B, HB)
    peak = tl.load(sinks + head)
    total = tl.full([HB], 1.0, tl.float32)
    sums = ()
    for _block in tl.static_range(BLOCKS):
        sums = sums + (tl.zeros([HB, B], tl.float32),)
    for begin in range(tl.maximum(WINDOW - 1 - position, 0) // K * K, WINDOW, K):
        key = position + 1 - WINDOW + begin + tl.arange(0, K)
        there = key >= 0
        at = tl.where(there, key % modulus, 0).to(tl.int64)
        peak, total, sums = read_tile(
            blocks, peak, total, sums, codes, exponents, turned, at, there, PLAIN, B, BLOCKS, HB, K
        )
    if RATIO > 0:
        count = (position + 1) // RATIO
        if TOP > 0:
            count = tl.minimum(count, TOP)
        for begin in range(0, count, K):
            index = begin + tl.arange(0, K)
            there = index < count
            if TOP > 0:
                index = tl.load(selected + row * TOP + index, there, 0)
            at = entry_rows(index, there, pages, PER_PAGE)
            peak, total, sums = read_tile(
                blocks,
                peak,
                total,
                sums,
                entry_codes,
                entry_exponents,
                entry_turned,
                at,
                there,
                PLAIN,
                B,
                BLOCKS,
                HB,
                K,
            )
    # The heads' queries have been read; their results take the same place.
    b = tl.arange(0, B)
    for block in tl.static_range(BLOCKS):
        x = sums[block] / total[:, None]
        if block == BLOCKS - 1:
            first, second = tl.split(tl.reshape(x, [HB, HALF, 2]))
            pair = tl.arange(0, HALF)
            c = tl.load(cos + row * HALF + pair)[None, :]
            s = tl.load(sin + row * HALF + pair)[None, :]
            x = tl.reshape(tl.join(first * c + second * s, second * c - first * s), [HB, B])
        tl.store(q + head[:, None] * D + block * B + b[None, :], x.to(tl.float16))


@triton.jit
def _copy_keys(
    codes,
    exponents,
    turned,
    to_codes,
    to_exponents,
    to_turned,
    first,
    base,
    modulus,
    to_base,
    to_modulus,
    PLAIN: tl.constexpr,
    SCALES: tl.constexpr,
    B: tl.constexpr,
    WIDTH: tl.constexpr,
):
    position = first + tl.program_id(0)
    at, to = (base + position % modulus).to(tl.int64), (to_base + position % to_modulus).to(tl.int64)
    d = tl.arange(0, WIDTH)
    tl.store(to_codes + to * PLAIN + d, tl.load(codes + at * PLAIN + d, d < PLAIN), d < PLAIN)
    tl.store(to_exponents + to * SCALES + d, tl.load(exponents + at * SCALES + d, d < SCALES), d < SCALES)
    tl.store(to_turned + to * B + d, tl.load(turned + at * B + d, d < B), d < B)


def attend_rows(
    q: Tensor,
    sinks: Tensor,
    lists: KeyLists,
    rows: Rows,
    pages: Tensor,
    turns: Turns,
    eps: float,
    tiles: Tiles,
) -> None:
    """The attention's result in the queries' place.

    Args:
        q: float16 ``[T, H · D]``, as projected; becomes the result, turned back.
        sinks: float32 ``[H]``.
        lists: keys; their bases are not used: the raw key of position p is row ``p % modulus``.
        rows: of one bank.
        pages: int32 ``[P]``, that bank's.
    """
    heads, count = sinks.shape[0], q.shape[0]
    dim = q.shape[1] // heads
    plain = lists.raw[0].shape[1]
    top = 0 if lists.selected is None else lists.selected.shape[1]
    selected = rows.positions if lists.selected is None else lists.selected
    block, keys, warps, stages = tiles.attention
    _attend_rows[(triton.cdiv(heads, block), count)](
        q,
        sinks,
        turns.cos,
        turns.sin,
        *raw_planes(lists.raw),
        *raw_planes(lists.entries),
        lists.modulus,
        selected,
        rows.positions,
        pages,
        eps,
        heads,
        dim,
        plain,
        dim - plain,
        lists.window,
        lists.ratio,
        max(lists.per_page, 1),
        top,
        block,
        keys,
        num_warps=warps,
        num_stages=stages,
    )


def copy_keys(
    source: tuple[Tensor, ...],
    base: int,
    modulus: int,
    target: tuple[Tensor, ...],
    to_base: int,
    to_modulus: int,
    first: int,
    last: int,
) -> None:
    """Copies the packed keys of the positions from ``first`` to before ``last``.

    The key of position p lies at ``base + p % modulus`` and goes to ``to_base + p % to_modulus``.
    """
    if last > first:
        plain, scales, turned = (plane.shape[1] for plane in source)
        _copy_keys[(last - first,)](
            *raw_planes(source),
            *raw_planes(target),
            first,
            base,
            modulus,
            to_base,
            to_modulus,
            plain,
            scales,
            turned,
            triton.next_power_of_2(max(plain, turned)),
            num_warps=4,
        )
