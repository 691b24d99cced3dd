"""The indexer's choice against the reference's, which sorts."""

from __future__ import annotations

import pytest
import torch
from support.gpu import normal

from kernels.gpu import indexer
from kernels.gpu.keys import Rows
from kernels.indexer import select_entries


def _rows(positions: torch.Tensor, device: torch.device) -> Rows:
    zeros = torch.zeros_like(positions)
    return Rows(zeros, positions, zeros, zeros, zeros[None])


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(
    ("entries", "top", "visible"),
    [
        (300, 20, (0, 1, 19, 20, 21, 300)),
        pytest.param(4096, 512, (511, 512, 513, 4000, 4096), marks=pytest.mark.gpu),
        pytest.param(30000, 512, (512, 4096, 4097, 29999), marks=pytest.mark.gpu),
        pytest.param(70000, 512, (4097, 32768, 32769, 70000), marks=pytest.mark.gpu),
    ],
)
def test_select(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    entries: int,
    top: int,
    visible: tuple[int, ...],
    ties: bool,
) -> None:
    if device.type == "cpu":
        monkeypatch.setattr(indexer, "_HELD", (64, 128))
    scores = normal(len(visible), entries, seed=1, device=device)
    if ties:
        scores = (scores * 4).round() / 4
    positions = torch.tensor([4 * count + 2 for count in visible], dtype=torch.int32, device=device)
    selected = torch.full((len(visible), top), -7, dtype=torch.int32, device=device)
    indexer.select_entries(scores, _rows(positions, device), selected, 4, len(visible), entries)
    expected = select_entries(scores.cpu(), torch.tensor(visible), top)
    assert torch.equal(selected.cpu().to(torch.int64), expected)
