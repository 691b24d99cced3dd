"""Block formats against the `gguf` package's sizes and dequantization, bit for bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf import quants as oracle

from kernels.quant import iq2_xxs
from kernels.quant.formats import FORMATS, BlockFormat, by_ggml_id, dequantize

WEIGHTS = [fmt for fmt in FORMATS.values() if fmt.dequantize is not None]
SCALES = {
    "Q8_0": [0],
    "Q4_0": [0],
    "Q2_K": [80, 82],
    "Q3_K": [108],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
    "IQ2_XXS": [0],
}
"""Where a block has half-precision fields, in bytes."""


def random_blocks(fmt: BlockFormat, count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, fmt.block_bytes), dtype=np.uint8)


def assert_same_bits(blocks: np.ndarray, fmt: BlockFormat) -> None:
    with np.errstate(all="ignore"):
        expected = oracle.dequantize(blocks, GGMLQuantizationType(fmt.ggml_id))
    got = dequantize(torch.from_numpy(blocks), fmt, expected.shape[-1]).numpy()
    assert got.dtype == expected.dtype == np.float32
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(got), nan)
    np.testing.assert_array_equal(got.view(np.uint32)[~nan], expected.view(np.uint32)[~nan])


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda fmt: fmt.name)
def test_sizes_and_ids_are_ggml_s(fmt: BlockFormat) -> None:
    kind = GGMLQuantizationType[fmt.name]
    assert fmt.ggml_id == kind.value
    assert (fmt.block_elements, fmt.block_bytes) == gguf.GGML_QUANT_SIZES[kind]
    assert by_ggml_id(kind.value) is fmt


def test_other_ids_are_unknown() -> None:
    known = {fmt.ggml_id for fmt in FORMATS.values()}
    assert all(by_ggml_id(number) is None for number in range(-1, 300) if number not in known)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("fmt", WEIGHTS, ids=lambda fmt: fmt.name)
def test_any_bytes(fmt: BlockFormat, seed: int) -> None:
    assert_same_bits(random_blocks(fmt, 2000, seed), fmt)


@pytest.mark.parametrize("fmt", [fmt for fmt in WEIGHTS if fmt.name in SCALES], ids=lambda fmt: fmt.name)
def test_every_finite_scale(fmt: BlockFormat) -> None:
    halves = np.arange(65536, dtype=np.uint16)
    halves = halves[np.isfinite(halves.view(np.float16))]
    blocks = random_blocks(fmt, len(halves), seed=7)
    for shift, byte in enumerate(SCALES[fmt.name]):
        blocks[:, byte : byte + 2] = np.roll(halves, 1013 * shift).view(np.uint8).reshape(-1, 2)
    for part in np.array_split(blocks, 8):
        assert_same_bits(part, fmt)


def test_every_mxfp4_scale() -> None:
    blocks = random_blocks(FORMATS["MXFP4"], 1024, seed=3)
    blocks[:, 0] = np.arange(1024) % 256
    assert_same_bits(blocks, FORMATS["MXFP4"])


@pytest.mark.parametrize("name", ["F16", "BF16"])
def test_every_two_byte_float(name: str) -> None:
    assert_same_bits(np.arange(65536, dtype=np.uint16).view(np.uint8).reshape(64, -1), FORMATS[name])


def test_grid_of_iq2_xxs() -> None:
    oracle.IQ2_XXS.init_grid()  # type: ignore[no-untyped-call]
    assert oracle.IQ2_XXS.grid is not None
    np.testing.assert_array_equal(iq2_xxs.grid().numpy(), oracle.IQ2_XXS.grid.reshape(256, 8))


def test_rows_keep_their_leading_shape() -> None:
    fmt = FORMATS["Q2_K"]
    flat = torch.from_numpy(random_blocks(fmt, 24, seed=5))
    rows = flat.view(2, 3, 4 * fmt.block_bytes)
    assert torch.equal(
        dequantize(rows, fmt, 1024).nan_to_num(), dequantize(flat, fmt, 256).view(2, 3, 1024).nan_to_num()
    )


def test_a_strided_view_reads_its_own_bytes() -> None:
    fmt = FORMATS["Q4_K"]
    wide = torch.from_numpy(random_blocks(fmt, 6, seed=6)).view(2, -1)
    left = wide[:, : fmt.block_bytes]
    assert torch.equal(
        dequantize(left, fmt, 256).nan_to_num(), dequantize(left.clone(), fmt, 256).nan_to_num()
    )


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="integers"):
        dequantize(torch.zeros(1, 4, dtype=torch.uint8), FORMATS["I32"], 1)
    with pytest.raises(ValueError, match="whole Q8_0 blocks"):
        dequantize(torch.zeros(1, 34, dtype=torch.uint8), FORMATS["Q8_0"], 31)
    with pytest.raises(ValueError, match="bytes"):
        dequantize(torch.zeros(1, 33, dtype=torch.uint8), FORMATS["Q8_0"], 32)
