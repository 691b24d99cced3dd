"""Random blocks of the published formats, with weights of mean 0 and a wanted standard deviation.

Codes are uniform; the scale fields are set so that the dequantized weights have the spread asked for, each
block a little more or less.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from kernels.quant import iq2_xxs
from kernels.quant.formats import BlockFormat

Bytes = NDArray[np.uint8]
Encoder = Callable[[int, float, np.random.Generator], Bytes]

_GRID_RMS = float(iq2_xxs.grid().square().mean().sqrt())


def random_blocks(fmt: BlockFormat, count: int, std: float, rng: np.random.Generator) -> Bytes:
    """uint8 ``[count, fmt.block_bytes]``.

    Raises:
        ValueError: no random blocks are made for the format.
    """
    encode = _ENCODERS.get(fmt.name)
    if encode is None:
        raise ValueError(f"no random weights for {fmt.name}; there are some for {', '.join(_ENCODERS)}")
    return encode(count, std, rng)


def _f32(count: int, std: float, rng: np.random.Generator) -> Bytes:
    values = rng.standard_normal((count, 1), dtype=np.float32) * np.float32(std)
    return values.view(np.uint8)


def _f16(count: int, std: float, rng: np.random.Generator) -> Bytes:
    values = rng.standard_normal((count, 1), dtype=np.float32) * np.float32(std)
    return values.astype(np.float16).view(np.uint8)


def _q8_0(count: int, std: float, rng: np.random.Generator) -> Bytes:
    blocks = _random(count, 34, rng)
    blocks[:, :2] = _halves(_spread(count, rng) * std / _uniform_rms(-128, 127))
    return blocks


def _q2_k(count: int, std: float, rng: np.random.Generator) -> Bytes:
    """A minimum near 1.5 of a scale centres the codes 0 to 3."""
    blocks = _random(count, 84, rng)
    scales, minima = _scales_and_minima(count, 16, 8, 15, rng)
    blocks[:, :16] = scales | (minima << 4)
    d = _spread(count, rng) * std / (_uniform_rms(8, 15) * _uniform_rms(-1.5, 1.5, 4))
    blocks[:, 80:82] = _halves(d)
    blocks[:, 82:84] = _halves(1.5 * d)
    return blocks


def _q4_k(count: int, std: float, rng: np.random.Generator) -> Bytes:
    """A minimum near 7.5 of a scale centres the codes 0 to 15."""
    blocks = _random(count, 144, rng)
    scales, minima = _scales_and_minima(count, 8, 32, 63, rng)
    d = _spread(count, rng) * std / (_uniform_rms(32, 63) * _uniform_rms(-7.5, 7.5, 16))
    blocks[:, :2] = _halves(d)
    blocks[:, 2:4] = _halves(7.5 * d)
    blocks[:, 4:8] = scales[:, :4] | (scales[:, 4:] >> 4 << 6)
    blocks[:, 8:12] = minima[:, :4] | (minima[:, 4:] >> 4 << 6)
    blocks[:, 12:16] = (scales[:, 4:] & 15) | (minima[:, 4:] << 4)
    return blocks


def _iq2_xxs(count: int, std: float, rng: np.random.Generator) -> Bytes:
    blocks = _random(count, 66, rng)
    d = _spread(count, rng) * std / (_GRID_RMS * 0.25 * _uniform_rms(0.5, 15.5, 16))
    blocks[:, :2] = _halves(d)
    return blocks


_ENCODERS: Mapping[str, Encoder] = {
    "F32": _f32,
    "F16": _f16,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q4_K": _q4_k,
    "IQ2_XXS": _iq2_xxs,
}


def _random(count: int, size: int, rng: np.random.Generator) -> Bytes:
    words = rng.integers(0, 2**64 - 1, -(-count * size // 8), dtype=np.uint64, endpoint=True)
    return words.view(np.uint8)[: count * size].reshape(count, size)


def _spread(count: int, rng: np.random.Generator) -> NDArray[np.float32]:
    """Factors around 1 of root mean square 1, one a block."""
    return (0.7 + 0.6 * rng.random((count, 1), dtype=np.float32)) / np.float32(1.03**0.5)


def _halves(values: NDArray[np.float32]) -> Bytes:
    return values.astype(np.float16).view(np.uint8)


def _scales_and_minima(
    count: int, groups: int, low: int, high: int, rng: np.random.Generator
) -> tuple[Bytes, Bytes]:
    """Scales in ``low..high``, and minima one less to one more than their scales."""
    scales = rng.integers(low, high + 1, (count, groups), dtype=np.uint8)
    minima = scales + rng.integers(0, 3, (count, groups), dtype=np.uint8) - np.uint8(1)
    return scales, np.minimum(minima, high)


def _uniform_rms(low: float, high: float, steps: int = 0) -> float:
    """Root mean square of evenly spaced values; ``steps`` defaults to whole numbers."""
    values = np.linspace(low, high, steps or round(high - low) + 1)
    return float(np.sqrt(np.mean(values**2)))
