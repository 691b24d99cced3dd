"""Fusing of element-wise functions on the GPU; the CPU runs them as written."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
import torch._dynamo

_VARIANTS = 64
"""Shapes of one function that may be compiled; the limit's default is 8, beyond which it raises."""
torch._dynamo.config.recompile_limit = _VARIANTS

P = ParamSpec("P")
R = TypeVar("R")


def fused(function: Callable[P, R]) -> Callable[P, R]:
    """The function, compiled for CUDA tensors, a variant for each shape.

    ``TORCHDYNAMO_DISABLE=1`` in the environment leaves it uncompiled there as well.
    """
    compiled: Callable[P, R] = torch.compile(function, dynamic=False, fullgraph=True)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return compiled(*args, **kwargs) if _on_gpu(args) else function(*args, **kwargs)

    return call


def _on_gpu(args: tuple[Any, ...]) -> bool:
    return any(isinstance(arg, torch.Tensor) and arg.is_cuda for arg in args)
