"""The optimizer of matrices, against the singular value decomposition."""

from __future__ import annotations

import pytest
import torch

from demo.muon import Muon, orthogonal


@pytest.mark.parametrize("shape", [(3, 64, 64), (2, 32, 96), (2, 96, 32)])
def test_orthogonal_keeps_the_singular_vectors(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    left, _, right = torch.linalg.svd(x, full_matrices=False)
    found = left.mT @ orthogonal(x) @ right.mT
    singular = found.diagonal(dim1=-2, dim2=-1)
    assert float((singular - 1).abs().mean()) < 0.3
    assert float(singular.max()) < 1.3
    assert float((found - torch.diag_embed(singular)).abs().max()) < 0.1


def test_stacked_matrices_are_updated_as_if_they_were_apart() -> None:
    generator = torch.Generator().manual_seed(2)
    start, gradient = (torch.randn(2, 32, 64, generator=generator) for _ in range(2))
    joint = start.reshape(64, 64).clone()
    parts = [matrix.clone() for matrix in start]
    together = Muon([(joint, 2)], momentum=0.9, decay=0.1)
    apart = Muon([(part, 1) for part in parts], momentum=0.9, decay=0.1)
    for _ in range(3):
        joint.grad = gradient.reshape(64, 64)
        for part, own in zip(parts, gradient, strict=True):
            part.grad = own
        together.step(0.02)
        apart.step(0.02)
    torch.testing.assert_close(joint.view(2, 32, 64), torch.stack(parts))
    assert float((joint.view_as(start) - start).abs().max()) > 1e-3


def test_it_finds_a_least_squares_solution() -> None:
    generator = torch.Generator().manual_seed(3)
    wanted, matrix = torch.randn(16, 16, generator=generator), torch.zeros(16, 16)
    optimizer = Muon([(matrix, 1)], momentum=0.9, decay=0.0)
    for step in range(300):
        matrix.grad = matrix - wanted
        optimizer.step(0.1 * (1 - step / 300))
    assert float((matrix - wanted).norm() / wanted.norm()) < 0.1
