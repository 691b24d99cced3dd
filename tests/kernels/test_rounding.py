"""Packed roundings against their definitions in exact arithmetic."""

from __future__ import annotations

from fractions import Fraction

import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.rounding import hadamard, pack_fp4, pack_fp8, unpack_fp4, unpack_fp8

FP4 = [Fraction(v) for v in ("0", "1/2", "1", "3/2", "2", "3", "4", "6")]
floats = st.floats(-1e6, 1e6, width=32).filter(lambda v: v == 0 or abs(v) > 1e-30)


def power_of_two_scale(amax: Fraction, largest: int) -> Fraction:
    """The smallest power of two s with amax / s <= largest."""
    scale = Fraction(1)
    while amax / scale > largest:
        scale *= 2
    while amax / (scale / 2) <= largest:
        scale /= 2
    return scale


def nearest(value: Fraction, grid: list[Fraction]) -> Fraction:
    """The nearest of an ascending grid, ties to the even index."""
    return min(enumerate(grid), key=lambda entry: (abs(abs(value) - entry[1]), entry[0] % 2))[1]


E4M3 = [
    Fraction(mantissa + (8 if exponent else 0), 8) * Fraction(2) ** (max(exponent, 1) - 7)
    for exponent in range(16)
    for mantissa in range(8)
    if not (exponent == 15 and mantissa == 7)
]


@given(st.lists(floats, min_size=2, max_size=70))
def test_fp8_blocks_of_64(values: list[float]) -> None:
    rounded = unpack_fp8(*pack_fp8(torch.tensor(values))).tolist()
    for begin in range(0, len(values), 64):
        block = [Fraction(v) for v in torch.tensor(values[begin : begin + 64]).tolist()]
        floor = Fraction(float(torch.tensor(1e-4)))
        scale = power_of_two_scale(max(floor, *(abs(v) for v in block)), 448)
        for value, got in zip(block, rounded[begin : begin + 64], strict=True):
            assert abs(Fraction(got)) == nearest(value / scale, E4M3) * scale
            assert got == 0 or (got > 0) == (value > 0)


@given(st.lists(floats, min_size=2, max_size=70).filter(lambda v: len(v) % 2 == 0))
def test_fp4_blocks_of_32(values: list[float]) -> None:
    rounded = unpack_fp4(*pack_fp4(torch.tensor(values))).tolist()
    for begin in range(0, len(values), 32):
        block = [Fraction(v) for v in torch.tensor(values[begin : begin + 32]).tolist()]
        amax = max(abs(v) for v in block)
        scale = power_of_two_scale(amax, 6) if amax else Fraction(1)
        for value, got in zip(block, rounded[begin : begin + 32], strict=True):
            assert abs(Fraction(got)) == nearest(value / scale, FP4) * scale
            assert got == 0 or (got > 0) == (value > 0)


def test_packing_a_rounded_row_gives_it_back() -> None:
    x = (
        torch.randn(200, 448, generator=torch.Generator().manual_seed(0))
        * torch.logspace(-6, 6, 200)[:, None]
    )
    for pack, unpack in ((pack_fp8, unpack_fp8), (pack_fp4, unpack_fp4)):
        once = unpack(*pack(x))
        assert torch.equal(unpack(*pack(once)), once)


def test_hadamard_is_orthonormal_and_its_own_inverse() -> None:
    x = torch.randn(50, 128, generator=torch.Generator().manual_seed(0))
    turned = hadamard(x)
    torch.testing.assert_close(hadamard(turned), x)
    torch.testing.assert_close(turned.norm(dim=1), x.norm(dim=1))
    torch.testing.assert_close(hadamard(torch.eye(4)).abs(), torch.full((4, 4), 0.5))
