"""The quantizers against gguf's own dequantizers."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from demo.quantize.formats import QUANTIZERS


def dequantized(packed: np.ndarray, name: str) -> torch.Tensor:
    """What any reader of the file gets."""
    return torch.from_numpy(gguf.quants.dequantize(packed, gguf.GGMLQuantizationType[name]))


@pytest.mark.parametrize("name", list(QUANTIZERS))
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), spread=st.floats(1e-4, 1e3), outliers=st.booleans())
def test_packed_bytes_give_back_the_rounded_matrix(
    name: str, seed: int, spread: float, outliers: bool
) -> None:
    x = torch.randn(3, 4, 512, generator=torch.Generator().manual_seed(seed)) * spread
    if outliers:
        x[..., ::37] *= 20
        x[0, 0] = 0
    quantizer = QUANTIZERS[name]
    torch.testing.assert_close(
        dequantized(quantizer.pack(x), name), quantizer.rounded(x), rtol=1e-6, atol=spread * 1e-6
    )


@pytest.mark.parametrize(
    ("name", "bound"), [("Q8_0", 0.006), ("Q4_K", 0.075), ("Q2_K", 0.32), ("IQ2_XXS", 0.37)]
)
def test_error_on_gaussian_weights(name: str, bound: float) -> None:
    """Root mean square error relative to the weights'."""
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
    assert float((QUANTIZERS[name].rounded(x) - x).square().mean().sqrt()) < bound


@pytest.mark.parametrize("name", ["Q2_K", "Q4_K"])
def test_searching_beats_the_full_range(name: str) -> None:
    """The naive choice spans each sub-block from its least to its largest value, unquantized scales even."""
    size, top = (16, 3) if name == "Q2_K" else (32, 15)
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(1))
    parts = x.unflatten(-1, (-1, size))
    low, high = parts.amin(-1, keepdim=True), parts.amax(-1, keepdim=True)
    step = (high - low) / top
    naive = (((parts - low) / step).round() * step + low).flatten(-2)
    ours = QUANTIZERS[name].rounded(x)
    assert (ours - x).square().sum() < (naive - x).square().sum() * (0.9 if name == "Q2_K" else 1.05)


@pytest.mark.skipif("Q8_0" not in QUANTIZERS, reason="needs the format")
def test_q8_0_is_gguf_s_own() -> None:
    x = torch.randn(16, 256, generator=torch.Generator().manual_seed(2))
    expected = gguf.quants.quantize(x.numpy(), gguf.GGMLQuantizationType.Q8_0)
    assert np.mean(QUANTIZERS["Q8_0"].pack(x) == expected) > 0.99
