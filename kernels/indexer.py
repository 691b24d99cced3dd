"""Which compressed entries a query reads: the highest-scoring ones of those it can see.

score[w] = Σ_head weight[head] · max(0, q[head]·k[w])
"""

from __future__ import annotations

import torch
from torch import Tensor

KEY_TILE = 512
"""Entries of one product. Fixed, so that a score does not depend on how many entries there are."""


def index_scores(q: Tensor, weight: Tensor, keys: Tensor) -> Tensor:
    """Scores of every entry for every query.

    Args:
        q: float32 ``[T, H, D]``.
        weight: float32 ``[T, H]``, the scale (D·H)^−½ included.
        keys: float32 ``[N, D]``.

    Returns:
        float32 ``[T, N]``.
    """
    out = []
    for begin in range(0, keys.shape[0], KEY_TILE):
        tile = keys[begin : begin + KEY_TILE]
        padded = torch.nn.functional.pad(tile, (0, 0, 0, KEY_TILE - tile.shape[0]))
        dots = torch.bmm(q, padded.t().expand(q.shape[0], -1, -1)).relu_()
        out.append(torch.bmm(weight[:, None], dots)[:, 0, : tile.shape[0]])
    return torch.cat(out, dim=1)


def select_entries(scores: Tensor, visible: Tensor, count: int) -> Tensor:
    """The ``count`` best visible entries of every query, ties to the lower index.

    Args:
        scores: float32 ``[T, N]``.
        visible: int64 ``[T]``: query t sees the entries 0 … visible[t]−1.
        count: entries to keep.

    Returns:
        int64 ``[T, count]``, ascending; −1 fills the end where fewer are visible.
    """
    entries = scores.shape[1]
    index = torch.arange(entries)
    hidden = index[None, :] >= visible[:, None]
    order = torch.sort(scores.masked_fill(hidden, -torch.inf), dim=1, descending=True, stable=True).indices
    best = order[:, :count]
    best = torch.where(best < visible[:, None], best, entries).sort(dim=1).values
    best = torch.nn.functional.pad(best, (0, count - best.shape[1]), value=entries)
    return torch.where(best < entries, best, -1)
