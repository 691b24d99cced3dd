"""Balancing: against automatic differentiation, and the kernels in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import torch

from demo.sinkhorn import balance

_KERNELS = """
import torch
from demo import sinkhorn

x = torch.rand(150, 4, 4, generator=torch.Generator().manual_seed(1)) + 0.01
grad = torch.randn(150, 4, 4, generator=torch.Generator().manual_seed(2))
y, sums = sinkhorn._forward_gpu(x, 6, 1e-6)
expected_y, expected_sums = sinkhorn.forward_reference(x, 6, 1e-6)
torch.testing.assert_close(y, expected_y)
torch.testing.assert_close(sums, expected_sums)
torch.testing.assert_close(
    sinkhorn._backward_gpu(y, sums, grad),
    sinkhorn.backward_reference(y, sums, grad),
    rtol=1e-4,
    atol=1e-5,
)
"""


def test_rows_and_columns_sum_to_one() -> None:
    found = balance(torch.randn(64, 4, 4, generator=torch.Generator().manual_seed(1)), 20, 1e-6)
    for axis in (-1, -2):
        torch.testing.assert_close(found.sum(axis), torch.ones(64, 4), rtol=0, atol=1e-3)


def test_gradient_is_that_of_the_same_steps_written_out() -> None:
    generator = torch.Generator().manual_seed(2)
    logits, toward = (torch.randn(32, 4, 4, generator=generator) for _ in range(2))
    one, other = (logits.clone().requires_grad_() for _ in range(2))
    x = torch.softmax(other, -1) + 1e-6
    x = x / (x.sum(-2, keepdim=True) + 1e-6)
    for _ in range(19):
        x = x / (x.sum(-1, keepdim=True) + 1e-6)
        x = x / (x.sum(-2, keepdim=True) + 1e-6)
    torch.testing.assert_close(balance(one, 20, 1e-6), x)
    (x * toward).sum().backward()
    (balance(one, 20, 1e-6) * toward).sum().backward()
    assert one.grad is not None
    assert other.grad is not None
    torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-5)


def test_kernels_do_what_the_reference_does() -> None:
    """In a process of its own: the interpreter is chosen when the kernels are defined."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _KERNELS],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
