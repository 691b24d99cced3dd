"""Routed experts for a few rows, against float64 products of weights that `gguf` dequantized."""

from __future__ import annotations

import pytest
import torch
from support.gpu import error, normal, random_matrix, rounded

from kernels.gpu.experts import experts_down, experts_swiglu
from kernels.gpu.tables import grid_words, sign_words

BIG = pytest.mark.gpu
SIZES = [
    (4, 8, 256, 2, 1),
    pytest.param(16, 2048, 4096, 6, 4, marks=BIG),
    pytest.param(8, 1024, 4096, 3, 8, marks=BIG),
]


def _pick(rows: int, used: int, experts: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows)
    return torch.rand(rows, experts, generator=generator).argsort(1)[:, :used].to(torch.int32).to(device)


@pytest.mark.parametrize("format", ["IQ2_XXS", "Q4_K"])
@pytest.mark.parametrize(("experts", "width", "columns", "used", "rows"), SIZES)
def test_gate_up(
    device: torch.device, format: str, experts: int, width: int, columns: int, used: int, rows: int
) -> None:
    shape = (experts, width, columns)
    (gate, gate_weights), (up, up_weights) = (random_matrix(format, shape, seed, device) for seed in (1, 2))
    x, values = rounded(normal(rows, columns, seed=3, device=device) * 3)
    chosen = _pick(rows, used, experts, device)
    weights = torch.rand(rows, used, generator=torch.Generator().manual_seed(4)).to(device)
    out = torch.full((rows, used + 1, width), float("nan"), device=device)
    tables = (grid_words(device), sign_words(device))
    experts_swiglu(gate, up, tables, x, chosen, weights, out, rows, 2.0)
    for row in range(rows):
        for slot in range(used):
            expert = int(chosen[row, slot])
            g, u = gate_weights[expert] @ values[row], up_weights[expert] @ values[row]
            expected = torch.nn.functional.silu(g.clamp(max=2)) * u.clamp(-2, 2) * weights[row, slot]
            assert error(out[row, slot], expected) < 2e-5
    assert bool(out[:, used].isnan().all()), "the shared expert's place was written"


@pytest.mark.parametrize("format", ["Q2_K", "Q4_K"])
@pytest.mark.parametrize(("experts", "width", "columns", "used", "rows"), SIZES)
def test_down(
    device: torch.device, format: str, experts: int, width: int, columns: int, used: int, rows: int
) -> None:
    down, down_weights = random_matrix(format, (experts, columns // 2, max(width, 256)), 5, device)
    parts = used + 1
    x, values = rounded(normal(rows * parts, down.columns, seed=6, device=device))
    chosen = _pick(rows, used, experts, device)
    out = torch.full((rows, parts, down.rows), float("nan"), device=device)
    experts_down(down, x, chosen, out, rows)
    for row in range(rows):
        for slot in range(used):
            expected = down_weights[int(chosen[row, slot])] @ values[row * parts + slot]
            assert error(out[row, slot], expected) < 1e-6
    assert bool(out[:, used].isnan().all()), "the shared expert's place was written"
