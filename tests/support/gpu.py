"""Random matrices and vectors for kernel tests, and what they stand for in full precision."""

from __future__ import annotations

import gguf
import numpy as np
import torch
from gguf.quants import dequantize
from torch import Tensor

from kernels.gpu.matrix import Matrix, empty_planes, fill_planes
from kernels.gpu.quantize import Quantized, quantize
from kernels.quant.formats import FORMATS
from worker.gguf.random_blocks import random_blocks


def random_matrix(
    format: str, shape: tuple[int, ...], seed: int, device: torch.device
) -> tuple[Matrix, Tensor]:
    """A matrix on the device, and its weights by `gguf`, float64 of the same shape on the device."""
    *leading, columns = shape
    rows = int(np.prod(leading))
    fmt = FORMATS[format]
    count = rows * columns // fmt.block_elements
    raw = random_blocks(fmt, count, columns**-0.5, np.random.default_rng(seed)).reshape(rows, -1)
    planes = empty_planes(format, rows, columns, device)
    half = rows // 2
    for first, part in ((0, raw[:half]), (half, raw[half:])):
        fill_planes(planes, format, first, torch.from_numpy(np.ascontiguousarray(part)).to(device))
    weights = dequantize(raw, gguf.GGMLQuantizationType[format]).reshape(shape)
    return Matrix(format, shape, planes), torch.from_numpy(weights.astype(np.float64)).to(device)


def rounded(x: Tensor) -> tuple[Quantized, Tensor]:
    """``x [T, K]`` as bytes, and the float64 values that those stand for."""
    out = Quantized.empty(*x.shape, x.device)
    quantize(x, out)
    return out, unpacked(out).to(torch.float64)


def unpacked(x: Quantized) -> Tensor:
    """float32 ``[T, K]`` of bytes in the kernels' order."""
    words = x.words.transpose(1, 2).contiguous()
    bytes_ = words.view(torch.int8).view(words.shape[0], words.shape[1], 32)
    return (bytes_.to(torch.float32) * x.scales[:, :, None]).flatten(1)


def normal(*shape: int, seed: int, device: torch.device) -> Tensor:
    """float32, the same numbers on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def error(out: Tensor, expected: Tensor) -> float:
    """‖out − expected‖ / ‖expected‖; infinite where out is not finite."""
    if not bool(torch.isfinite(out).all()):
        return float("inf")
    expected = expected.to(torch.float64)
    return float((out.to(torch.float64) - expected).norm() / expected.norm())
