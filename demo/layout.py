"""Rows of several documents, none seeing another, and what each position may attend to.

A document begins at a multiple of 128, where every compression window begins too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 128


@dataclass(frozen=True)
class Batch:
    """Token rows ready for the network.

    ``ids``, ``positions`` (in its document) and ``documents`` (unique in its row) are int64 ``[B, T]``, T a
    multiple of 128; ``weights`` float32 ``[B, T]`` weighs the loss of predicting the *next* token, whose id
    is in ``targets`` int64 ``[B, T]``.
    """

    ids: Tensor
    positions: Tensor
    documents: Tensor
    targets: Tensor
    weights: Tensor

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device."""
        return Batch(
            *(
                tensor.to(device, non_blocking=True)
                for tensor in (self.ids, self.positions, self.documents, self.targets, self.weights)
            )
        )


@dataclass(frozen=True)
class Visibility:
    """What each position may attend to, True where it may.

    ``raw`` is ``[B·T, 256]``: a token against its own and the preceding block of 128;
    ``windows[ratio]`` is ``[B·T, T/ratio]``: a token against its row's compressed entries.
    """

    raw: Tensor
    windows: dict[int, Tensor]


def visibility(batch: Batch, window: int, ratios: set[int]) -> Visibility:
    """The causal, windowed, per-document visibility of a batch; ``window`` is at most 128."""
    rows, length = batch.ids.shape
    device = batch.ids.device
    blocks = length // ALIGNMENT
    documents = batch.documents.view(rows, blocks, ALIGNMENT)
    before = torch.cat((documents.new_full((rows, 1, ALIGNMENT), -1), documents[:, :-1]), 1)
    keys = torch.cat((before, documents), -1)
    query = torch.arange(ALIGNMENT, device=device)[:, None] + ALIGNMENT
    distance = query - torch.arange(2 * ALIGNMENT, device=device)[None, :]
    near = (distance >= 0) & (distance < window)
    raw = (near & (documents[..., :, None] == keys[..., None, :])).view(rows * length, -1)
    windows = {}
    index = torch.arange(length, device=device)
    for ratio in ratios - {0}:
        complete = index[ratio - 1 :: ratio]
        same = batch.documents[:, :, None] == batch.documents[:, None, ::ratio]
        windows[ratio] = (same & (complete[None, None, :] <= index[None, :, None])).flatten(0, 1)
    return Visibility(raw, windows)
