"""Matrix times a few rows, against float64 products of weights that `gguf` dequantized."""

from __future__ import annotations

import pytest
import torch
from support.gpu import error, normal, random_matrix, rounded, unpacked

from kernels.gpu.matmul import ROW_TILES, matmul_plain, matmul_q8, swiglu_q8
from kernels.gpu.quantize import Quantized, quantize

BIG = pytest.mark.gpu


@pytest.mark.parametrize("columns", [32, 256, pytest.param(4096, marks=BIG)])
def test_quantize_is_within_half_a_step(device: torch.device, columns: int) -> None:
    x = normal(3, columns, seed=1, device=device)
    out, values = rounded(x)
    groups = x.view(3, -1, 32)
    steps = groups.abs().amax(-1, keepdim=True) / 127
    assert bool(((values.view_as(groups) - groups).abs() <= steps * 0.5001).all())
    assert out.scales.shape == (3, columns // 32)


def test_quantize_of_zeros_is_zero(device: torch.device) -> None:
    x = torch.zeros(1, 64, device=device)
    out = Quantized.empty(1, 64, device)
    quantize(x, out)
    assert not unpacked(out).any()


@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        ((8, 64), 1),
        ((8, 96), 2),
        pytest.param((4096, 4096), 1, marks=BIG),
        pytest.param((1536, 4096), 8, marks=BIG),
        pytest.param((32768, 1024), 4, marks=BIG),
        pytest.param((129280, 4096), 2, marks=BIG),
        pytest.param((64640, 2048), 32, marks=BIG),
    ],
)
def test_q8(device: torch.device, shape: tuple[int, int], rows: int) -> None:
    matrix, weights = random_matrix("Q8_0", shape, 2, device)
    x, values = rounded(normal(rows, shape[1], seed=3, device=device))
    out = torch.full((rows, shape[0]), float("nan"), device=device)
    matmul_q8(matrix, x, out, rows)
    assert error(out, values @ weights.T) < 1e-6


@pytest.mark.parametrize(
    ("shape", "groups", "rows"), [((16, 64), 2, 1), pytest.param((8192, 4096), 8, 8, marks=BIG)]
)
def test_q8_block_diagonal(device: torch.device, shape: tuple[int, int], groups: int, rows: int) -> None:
    matrix, weights = random_matrix("Q8_0", shape, 4, device)
    x, values = rounded(normal(rows * groups, shape[1], seed=5, device=device))
    out = torch.full((rows, shape[0]), float("nan"), device=device)
    matmul_q8(matrix, x, out, rows, groups=groups, step=groups)
    expected = torch.einsum("tgk,gnk->tgn", values.view(rows, groups, -1), weights.view(groups, -1, shape[1]))
    assert error(out, expected.flatten(1)) < 1e-6


@pytest.mark.parametrize(("shape", "rows"), [((8, 64), 2), pytest.param((2048, 4096), 8, marks=BIG)])
def test_q8_swiglu(device: torch.device, shape: tuple[int, int], rows: int) -> None:
    (gate, gate_weights), (up, up_weights) = (random_matrix("Q8_0", shape, seed, device) for seed in (6, 7))
    x, values = rounded(normal(rows, shape[1], seed=8, device=device) * 3)
    out = torch.full((rows, 2, shape[0]), float("nan"), device=device)
    swiglu_q8(gate, up, x, out[:, 1], out.stride(0), rows, 1.5)
    g, u = values @ gate_weights.T, values @ up_weights.T
    expected = torch.nn.functional.silu(g.clamp(max=1.5)) * u.clamp(-1.5, 1.5)
    assert error(out[:, 1], expected) < 1e-5


@pytest.mark.parametrize("format", ["F16", "F32"])
@pytest.mark.parametrize(("shape", "rows"), [((5, 64), 1), pytest.param((2624, 4096), 8, marks=BIG)])
def test_plain(device: torch.device, format: str, shape: tuple[int, int], rows: int) -> None:
    matrix, weights = random_matrix(format, shape, 9, device)
    x = normal(rows, shape[1], seed=10, device=device).to(torch.float16)
    out = torch.full((rows, shape[0]), float("nan"), device=device)
    matmul_plain(matrix, x, out, rows)
    assert error(out, x.to(torch.float64) @ weights.T) < 1e-6


@pytest.mark.gpu
def test_a_row_is_the_same_in_every_batch(device: torch.device) -> None:
    matrix, _ = random_matrix("Q8_0", (1024, 4096), 11, device)
    x = normal(ROW_TILES[-1], 4096, seed=12, device=device)
    alone = []
    for row in x:
        out = torch.empty(1, 1024, device=device)
        matmul_q8(matrix, rounded(row[None])[0], out, 1)
        alone.append(out)
    for rows in ROW_TILES:
        out = torch.empty(rows, 1024, device=device)
        matmul_q8(matrix, rounded(x[:rows])[0], out, rows)
        assert torch.equal(out, torch.cat(alone[:rows]))
