"""Attention over a row's window of raw keys and its compressed entries, with a sink, for a few rows (decode).

Keys are read packed, once for the scores and once as values. The list of a row's keys is split at fixed
places, a program each; a second launch joins the parts, turns the result back and rounds it for the output
projection. Equals :class:`kernels.attention.Attention`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.gpu.bits import e4m3_half, from_bf16_bits, power_of_two
from kernels.gpu.keys import Rows, Turns, raw_planes, rotate
from kernels.gpu.quantize import Quantized, store_quantized

MOST_SPLITS = 33
HEADS = 16
_TILE = 32


@dataclass(frozen=True)
class KeyLists:
    """Which keys the rows read.

    Attributes:
        bases, modulus: the raw key of position p of row t is row ``bases[t] + p % modulus`` of ``raw``.
        raw, entries: key planes; ``entries`` may be those of any layer where ``ratio`` is 0.
        ratio: tokens an entry covers; 0: there are none.
        per_page: entries a page.
        selected: int32 ``[T, top]``, the entries a row reads where there are more than it may; None: all.
        most_entries: none of the rows sees more.
        window: raw keys a row sees, a multiple of 32.
    """

    bases: Tensor
    modulus: int
    raw: tuple[Tensor, ...]
    entries: tuple[Tensor, ...]
    ratio: int
    per_page: int
    selected: Tensor | None
    most_entries: int
    window: int

    @property
    def split_keys(self) -> int:
        """Keys of a part, the same for every row."""
        keys = _TILE
        while -(-self._most // keys) > MOST_SPLITS - self.window // _TILE:
            keys *= 2
        return keys

    @property
    def splits(self) -> int:
        """Parts of the longest list: those of the window, then those of the entries."""
        return self.window // _TILE - (-self._most // self.split_keys)

    @property
    def _most(self) -> int:
        """Entries of the longest list."""
        if not self.ratio:
            return 0
        return self.most_entries if self.selected is None else min(self.most_entries, self.selected.shape[1])


@triton.jit
def query_blocks(
    q,
    cos,
    sin,
    head,
    eps,
    H: tl.constexpr,
    D: tl.constexpr,
    PLAIN: tl.constexpr,
    B: tl.constexpr,
    HB: tl.constexpr,
):
    """The heads' queries, normalised, rotated and scaled, as float16 ``[HB, B]`` blocks; and nothing else."""
    d = tl.arange(0, D)
    whole = tl.load(q + head[:, None] * D + d[None, :]).to(tl.float32)
    scale = tl.rsqrt(tl.sum(whole * whole, axis=1) / D + eps) * (D**-0.5)
    b = tl.arange(0, B)
    blocks = ()
    for block in tl.static_range(PLAIN // B):
        x = tl.load(q + head[:, None] * D + block * B + b[None, :]).to(tl.float32)
        blocks = blocks + ((x * scale[:, None]).to(tl.float16),)
    x = tl.load(q + head[:, None] * D + PLAIN + b[None, :]).to(tl.float32)
    first, second = tl.split(tl.reshape(x, [HB, B // 2, 2]))
    pair = tl.arange(0, B // 2)
    c, s = tl.load(cos + pair)[None, :], tl.load(sin + pair)[None, :]
    x = tl.reshape(tl.join(first * c - second * s, first * s + second * c), [HB, B])
    return blocks + ((x * scale[:, None]).to(tl.float16),)


@triton.jit
def key_block(codes, exponents, turned, at, block: tl.constexpr, PLAIN: tl.constexpr, B: tl.constexpr):
    """Block ``block`` of the keys in rows ``at [K]``, float16 ``[K, B]``."""
    b = tl.arange(0, B)
    if block * B < PLAIN:
        SCALES: tl.constexpr = (PLAIN + 63) // 64
        code = tl.load(codes + at[:, None] * PLAIN + block * B + b[None, :]).to(tl.int32)
        exponent = tl.load(exponents + at * SCALES + block * B // 64).to(tl.int32)
        return e4m3_half(code) * power_of_two(exponent + 8).to(tl.float16)[:, None]
    else:
        return from_bf16_bits(tl.load(turned + at[:, None] * B + b[None, :])).to(tl.float16)


@triton.jit
def read_tile(
    q,
    peak,
    total,
    sums,
    codes,
    exponents,
    turned,
    at,
    there,
    PLAIN: tl.constexpr,
    B: tl.constexpr,
    BLOCKS: tl.constexpr,
    HB: tl.constexpr,
    K: tl.constexpr,
):
    """Joins the keys in rows ``at [K]`` to the running softmax."""
    keys = ()
    for block in tl.static_range(BLOCKS):
        keys = keys + (key_block(codes, exponents, turned, at, block, PLAIN, B),)
    scores = tl.zeros([HB, K], tl.float32)
    for block in tl.static_range(BLOCKS):
        scores = tl.dot(q[block], tl.trans(keys[block]), scores)
    scores = tl.where(there[None, :], scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, axis=1))
    shrink = tl.exp(peak - higher)
    weights = tl.exp(scores - higher[:, None])
    total = total * shrink + tl.sum(weights, axis=1)
    weights = weights.to(tl.float16)
    joined = ()
    for block in tl.static_range(BLOCKS):
        joined = joined + (tl.dot(weights, keys[block], sums[block] * shrink[:, None]),)
    return higher, total, joined


@triton.jit
def entry_rows(index, there, pages, PER_PAGE: tl.constexpr):
    """Rows of the pool where the entries ``index`` of one bank lie."""
    page = tl.load(pages + index // PER_PAGE, there, 0)
    return (page * PER_PAGE + index % PER_PAGE).to(tl.int64)


@triton.jit
def _attend(
    q,
    cos,
    sin,
    codes,
    exponents,
    turned,
    entry_codes,
    entry_exponents,
    entry_turned,
    bases,
    modulus,
    selected,
    positions,
    banks,
    pages,
    page_step,
    out,
    peaks,
    eps,
    H: tl.constexpr,
    D: tl.constexpr,
    PLAIN: tl.constexpr,
    B: tl.constexpr,
    WINDOW: tl.constexpr,
    RATIO: tl.constexpr,
    PER_PAGE: tl.constexpr,
    TOP: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT: tl.constexpr,
    HB: tl.constexpr,
    K: tl.constexpr,
):
    row, split = tl.program_id(2).to(tl.int64), tl.program_id(1)
    head = tl.minimum(tl.program_id(0) * HB + tl.arange(0, HB), H - 1)
    position = tl.load(positions + row)
    BLOCKS: tl.constexpr = D // B
    count = 0
    if RATIO > 0:
        count = (position + 1) // RATIO
    if TOP > 0:
        count = tl.minimum(count, TOP)
    first = (split - WINDOW // K) * SPLIT
    if first < count:
        HALF: tl.constexpr = B // 2
        blocks = query_blocks(
            q + row * (H * D), cos + row * HALF, sin + row * HALF, head, eps, H, D, PLAIN, B, HB
        )
        peak = tl.full([HB], -1e30, tl.float32)
        total = tl.zeros([HB], tl.float32)
        sums = ()
        for _block in tl.static_range(BLOCKS):
            sums = sums + (tl.zeros([HB, B], tl.float32),)
        if split < WINDOW // K:
            key = position + 1 - WINDOW + split * K + tl.arange(0, K)
            there = key >= 0
            at = tl.where(there, tl.load(bases + row) + key % modulus, 0).to(tl.int64)
            peak, total, sums = read_tile(
                blocks, peak, total, sums, codes, exponents, turned, at, there, PLAIN, B, BLOCKS, HB, K
            )
        else:
            table = pages + tl.load(banks + row) * page_step
            for begin in range(first, tl.minimum(first + SPLIT, count), K):
                index = begin + tl.arange(0, K)
                there = index < count
                if TOP > 0:
                    index = tl.load(selected + row * TOP + index, there, 0)
                at = entry_rows(index, there, table, PER_PAGE)
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
        part = (row * SPLITS + split) * H + head
        tl.store(peaks + part * 2, peak)
        tl.store(peaks + part * 2 + 1, total)
        b = tl.arange(0, B)
        for block in tl.static_range(BLOCKS):
            tl.store(out + part[:, None] * D + block * B + b[None, :], sums[block])


@triton.jit
def _join(
    parts,
    peaks,
    sinks,
    positions,
    cos,
    sin,
    words,
    scales,
    H: tl.constexpr,
    D: tl.constexpr,
    PLAIN: tl.constexpr,
    RATIO: tl.constexpr,
    TOP: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_2: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW_SPLITS: tl.constexpr,
    GROUPS: tl.constexpr,
):
    row, head = tl.program_id(1).to(tl.int64), tl.program_id(0)
    count = 0
    if RATIO > 0:
        count = (tl.load(positions + row) + 1) // RATIO
    if TOP > 0:
        count = tl.minimum(count, TOP)
    used = WINDOW_SPLITS + (count + SPLIT - 1) // SPLIT
    sink = tl.load(sinks + head)
    split = tl.arange(0, SPLITS_2)
    part = (row * SPLITS + split) * H + head
    tops = tl.load(peaks + part * 2, split < used, float("-inf"))
    peak = tl.maximum(sink, tl.max(tops, axis=0))
    shares = tl.exp(tops - peak) * tl.load(peaks + part * 2 + 1, split < used, 0.0)
    total = tl.exp(sink - peak) + tl.sum(shares, axis=0)
    d, eight = tl.arange(0, D), tl.arange(0, 8)
    x = tl.zeros([D], tl.float32)
    for begin in range(0, used, 8):
        there = begin + eight < used
        piece = (row * SPLITS + begin + eight) * H + head
        weight = tl.exp(tl.load(peaks + piece * 2, there, float("-inf")) - peak)
        x += tl.sum(
            weight[:, None] * tl.load(parts + piece[:, None] * D + d[None, :], there[:, None], 0.0), axis=0
        )
    HALF: tl.constexpr = (D - PLAIN) // 2
    x = rotate(x / total, cos + row * HALF, sin + row * HALF, D, PLAIN, True)
    PER_GROUP: tl.constexpr = H // GROUPS
    K32: tl.constexpr = PER_GROUP * D // 32
    vector = row * GROUPS + head // PER_GROUP
    groups = (head % PER_GROUP) * (D // 32) + tl.arange(0, D // 32)
    store_quantized(x, words + vector * (8 * K32), scales + vector * K32, groups, K32, D // 32)


@dataclass(frozen=True)
class AttentionParts:
    """Memory between the two launches: float32 ``[T, splits, H, D]``, and peak and total of each."""

    sums: Tensor
    peaks: Tensor

    @classmethod
    def empty(cls, rows: int, splits: int, heads: int, dim: int, device: torch.device) -> AttentionParts:
        """For ``rows`` rows and lists of up to ``splits`` parts."""
        return cls(
            torch.empty(rows * splits * heads * dim, device=device),
            torch.empty(rows * splits * heads * 2, device=device),
        )


def attend(
    q: Tensor,
    sinks: Tensor,
    lists: KeyLists,
    rows: Rows,
    turns: Turns,
    eps: float,
    parts: AttentionParts,
    out: Quantized,
    groups: int,
    count: int,
) -> None:
    """The attention's result, rounded for the output projection.

    Args:
        q: float32 ``[T, H · D]``, as projected.
        sinks: float32 ``[H]``.
        out: ``groups`` vectors for every row, each of the heads of one output group.
    """
    heads = sinks.shape[0]
    dim = q.shape[1] // heads
    plain = lists.raw[0].shape[1]
    top = 0 if lists.selected is None else lists.selected.shape[1]
    selected = rows.positions if lists.selected is None else lists.selected
    splits = lists.splits
    _attend[(triton.cdiv(heads, HEADS), splits, count)](
        q,
        turns.cos,
        turns.sin,
        *raw_planes(lists.raw),
        *raw_planes(lists.entries),
        lists.bases,
        lists.modulus,
        selected,
        rows.positions,
        rows.banks,
        rows.pages,
        rows.pages.stride(0),
        parts.sums,
        parts.peaks,
        eps,
        heads,
        dim,
        plain,
        dim - plain,
        lists.window,
        lists.ratio,
        max(lists.per_page, 1),
        top,
        splits,
        lists.split_keys,
        HEADS,
        _TILE,
        num_warps=4,
        num_stages=1,
    )
    _join[(heads, count)](
        parts.sums,
        parts.peaks,
        sinks,
        rows.positions,
        turns.cos,
        turns.sin,
        out.words,
        out.scales,
        heads,
        dim,
        plain,
        lists.ratio,
        top,
        splits,
        triton.next_power_of_2(splits),
        lists.split_keys,
        lists.window // _TILE,
        groups,
        num_warps=4,
    )
