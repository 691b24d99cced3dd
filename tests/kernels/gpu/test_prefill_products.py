"""Products of many rows, against float64 products of weights that `gguf` dequantized."""

from __future__ import annotations

import pytest
import torch
from support.gpu import error, normal, random_matrix

from kernels.gpu.gemm import HalfWeights, gemm, swiglu_rows
from kernels.gpu.grouped import experts_down_rows, experts_gate_up, reorder, sort_pairs
from kernels.gpu.tables import grid_words, sign_words
from kernels.gpu.tiles import tiles_for

BIG = pytest.mark.gpu


@pytest.mark.parametrize("format", ["Q8_0", "F16", "F32"])
@pytest.mark.parametrize(
    ("shape", "groups", "rows"),
    [
        ((40, 64), 1, 3),
        ((16, 32), 2, 2),
        pytest.param((8192, 4096), 8, 300, marks=BIG),
        pytest.param((2624, 4096), 1, 1000, marks=BIG),
    ],
)
def test_gemm(device: torch.device, format: str, shape: tuple[int, int], groups: int, rows: int) -> None:
    matrix, weights = random_matrix(format, shape, 1, device)
    x = normal(rows, groups * shape[1], seed=2, device=device).to(torch.float16)
    out = torch.full((rows, shape[0]), float("nan"), device=device)
    gemm(HalfWeights(weights.numel(), device).of([matrix]), x, out, tiles_for(device), groups=groups)
    expected = torch.einsum(
        "tgk,gnk->tgn", x.to(torch.float64).view(rows, groups, -1), weights.view(groups, -1, shape[1])
    )
    assert error(out, expected.flatten(1)) < (1e-6 if format == "F16" else 5e-4)


def test_joined_matrices(device: torch.device) -> None:
    (one, one_weights), (two, two_weights) = (random_matrix("Q8_0", (8, 64), seed, device) for seed in (1, 2))
    half = HalfWeights(16 * 64, device).of([one, two])
    assert error(half, torch.cat((one_weights, two_weights))) < 5e-4


def test_swiglu_rows(device: torch.device) -> None:
    both = normal(3, 80, seed=3, device=device) * 3
    out = torch.empty(3, 40, dtype=torch.float16, device=device)
    swiglu_rows(both, out, 2.0)
    gate, up = both.to(torch.float64).split(40, 1)
    assert error(out, torch.nn.functional.silu(gate.clamp(max=2)) * up.clamp(-2, 2)) < 5e-4


@pytest.mark.parametrize(("rows", "experts"), [(5, 4), (40, 8)])
def test_sort_pairs_covers_every_pair_once(rows: int, experts: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    chosen = torch.rand(rows, experts, generator=generator).argsort(1)[:, :3].to(torch.int32)
    pairs = sort_pairs(chosen, experts, 4)
    seen = []
    for expert, first, last in zip(
        pairs.expert.tolist(), pairs.first.tolist(), pairs.last.tolist(), strict=True
    ):
        if expert < 0:
            continue
        assert 0 < last - first <= 4
        here = pairs.order[first:last]
        assert bool((chosen.flatten()[here.long()] == expert).all())
        seen += here.tolist()
    assert sorted(seen) == list(range(rows * 3))


@pytest.mark.parametrize("formats", [("IQ2_XXS", "Q2_K"), ("Q4_K", "Q4_K")])
@pytest.mark.parametrize(
    ("experts", "width", "columns", "used", "rows"),
    [
        (4, 256, 256, 2, 5),
        pytest.param(16, 2048, 4096, 6, 700, marks=BIG),
        pytest.param(32, 1024, 4096, 3, 50, marks=BIG),
    ],
)
def test_experts(
    device: torch.device,
    formats: tuple[str, str],
    experts: int,
    width: int,
    columns: int,
    used: int,
    rows: int,
) -> None:
    shape = (experts, width, columns)
    (gate, gate_weights), (up, up_weights) = (
        random_matrix(formats[0], shape, seed, device) for seed in (1, 2)
    )
    down, down_weights = random_matrix(formats[1], (experts, columns, width), 3, device)
    x = normal(rows, columns, seed=4, device=device).to(torch.float16)
    generator = torch.Generator().manual_seed(5)
    chosen = torch.rand(rows, experts, generator=generator).argsort(1)[:, :used].to(torch.int32).to(device)
    weights = torch.rand(rows, used, generator=generator).to(device)
    tiles = tiles_for(device)
    pairs = sort_pairs(chosen, experts, tiles.experts_in[0])
    hidden = torch.full((rows * used, width), float("nan"), dtype=torch.float16, device=device)
    tables = (grid_words(device), sign_words(device))
    experts_gate_up(gate, up, tables, reorder(x, formats[0]), pairs, weights, hidden, 2.0, tiles)
    expected = torch.empty(rows * used, width, dtype=torch.float64, device=device)
    for place, pair in enumerate(pairs.order.tolist()):
        row, slot = divmod(pair, used)
        expert = int(chosen[row, slot])
        values = x[row].to(torch.float64)
        g, u = gate_weights[expert] @ values, up_weights[expert] @ values
        expected[place] = torch.nn.functional.silu(g.clamp(max=2)) * u.clamp(-2, 2) * weights[row, slot]
    assert error(hidden, expected) < 1e-3
    out = torch.full((rows, used + 1, columns), float("nan"), dtype=torch.float16, device=device)
    experts_down_rows(down, reorder(hidden, formats[1]), pairs, used, out, tiles)
    for place, pair in enumerate(pairs.order.tolist()[:200]):
        row, slot = divmod(pair, used)
        part = down_weights[int(chosen[row, slot])] @ hidden[place].to(torch.float64)
        assert error(out[row, slot], part) < 1e-3
