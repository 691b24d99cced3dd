"""The training's roundings against the served model's."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from demo.rounding import round_keys, round_rows
from kernels import rounding as served


def sample(seed: int, exponent: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(33, 128, generator=generator) * 2.0**exponent


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), exponent=st.integers(-20, 12))
def test_rows_are_what_the_engine_stores(seed: int, exponent: int) -> None:
    x = sample(seed, exponent).bfloat16()
    codes, exponents = served.pack_fp8(x[:, :64].float())
    expected = torch.cat((served.unpack_fp8(codes, exponents), x[:, 64:].float()), -1)
    assert torch.equal(round_rows(x, 64).float(), expected)
    assert torch.equal(round_rows(x.float(), 64), expected)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), exponent=st.integers(-20, 12))
def test_keys_round_to_fp4(seed: int, exponent: int) -> None:
    """Keys that are already turned back come out as the engine's codes of the turned rows."""
    x = sample(seed, exponent).bfloat16()
    found = round_keys(x).float()
    codes, exponents = served.pack_fp4(found)
    assert torch.equal(served.unpack_fp4(codes, exponents), found)
    assert float((round_keys(x).float().norm() - x.float().norm()).abs() / x.float().norm()) < 0.05


def test_gradients_pass() -> None:
    x = sample(1, 0).requires_grad_()
    round_rows(x, 64).backward(torch.ones(33, 128))  # type: ignore[no-untyped-call]
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(33, 128))
