"""Muon: momentum whose matrices are replaced by the nearest orthogonal ones.

Jordan et al., 2024; the model family's own optimizer for matrices. Matrices of one shape are treated
together.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


class Muon:
    """Updates matrices ``[..., r, c]`` in place from their ``grad``."""

    def __init__(self, parameters: list[tuple[Tensor, int]], momentum: float, decay: float) -> None:
        """``parameters`` come with the number of matrices stacked along their first dimension."""
        self.momentum, self.decay = momentum, decay
        self.groups: dict[tuple[int, int], list[tuple[Tensor, int]]] = defaultdict(list)
        for parameter, parts in parameters:
            flat = parameter.detach().reshape(parts, -1, parameter.shape[-1])
            self.groups[(flat.shape[1], flat.shape[2])].append((parameter, parts))
        self.velocity = {
            shape: torch.zeros(sum(parts for _, parts in group), *shape, device=group[0][0].device)
            for shape, group in self.groups.items()
        }

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One update of every matrix; a matrix without a gradient counts as having a zero one."""
        for shape, group in self.groups.items():
            gradient = torch.cat(
                [
                    (parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)).view(
                        parts, *shape
                    )
                    for parameter, parts in group
                ]
            )
            velocity = self.velocity[shape].lerp_(gradient, 1 - self.momentum)
            update = orthogonal(gradient.lerp(velocity, self.momentum))
            scale = -rate * max(1.0, shape[0] / shape[1]) ** 0.5
            at = 0
            for parameter, parts in group:
                parameter.mul_(1 - rate * self.decay)
                parameter.add_(update[at : at + parts].reshape(parameter.shape), alpha=scale)
                at += parts


def orthogonal(x: Tensor) -> Tensor:
    """Nearly orthogonal matrices with the same singular vectors: ``[n, r, c]``, singular values about 1."""
    tall = x.shape[-2] > x.shape[-1]
    y = (x.mT if tall else x).bfloat16()
    y = y / (y.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = _COEFFICIENTS
    for _ in range(_ITERATIONS):
        square = y @ y.mT
        y = a * y + (b * square + c * square @ square) @ y
    back: Tensor = y.mT if tall else y
    return back.float()
