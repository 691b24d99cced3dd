"""Typed ways into torch's custom gradients and Triton's kernels, which come without types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import triton
from torch.autograd import Function


class Kernel(Protocol):
    """A Triton kernel: a grid of programs gives the launcher."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., object]: ...


def kernel(function: Callable[..., None]) -> Kernel:
    """The function as a Triton kernel, compiled when first launched."""
    compiled: Kernel = triton.jit(function)
    return compiled


def apply(function: type[Function], *inputs: object) -> Any:
    """What the function's ``forward`` returns, with its ``backward`` as the gradient."""
    return function.apply(*inputs)
