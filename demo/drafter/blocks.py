"""Blocks to train on: where they begin, what they see, and how much each row counts.

A block's anchor is a token that the model has said and not yet processed. Row k sits k positions after it and
drafts the token after that, so it counts only while the text between is what the model says itself: serving
never comes to a row whose drafts before it were rejected.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from demo.drafter.outputs import Outputs

_FALLOFF = 4.0
"""Row k counts exp(−k/4)."""


@dataclass(frozen=True)
class Blocks:
    """A blocks of K rows, by indices into the batch's N positions.

    Attributes:
        anchors: int64 ``[A]``.
        context: int64 ``[A, W]``, the window before each anchor.
        visible: bool ``[A, W]``, False before the document's first token.
        before: int64 ``[A, K]``: the token that each draft follows, the anchor first.
        rows: int64 ``[A, K]``: the position whose next token each row drafts.
        wanted: int64 ``[A, K]``: the token that the model says there.
        weights: float32 ``[A, K]``.
    """

    anchors: Tensor
    context: Tensor
    visible: Tensor
    before: Tensor
    rows: Tensor
    wanted: Tensor
    weights: Tensor


def starts(outputs: Outputs) -> Tensor:
    """int64: every position whose token the model has said and whose next token it says too."""
    answer = outputs.answer
    said = torch.cat((answer.new_zeros(1), answer[:-1]))
    return (said & answer).nonzero().squeeze(-1)


def blocks_at(outputs: Outputs, anchors: Tensor, block: int, window: int) -> Blocks:
    """The blocks that begin at ``anchors``, of ``block`` rows, with ``window`` positions of context."""
    batch = outputs.batch
    ids, positions = batch.ids.flatten(), batch.positions.flatten()
    back = torch.arange(-window, 0, device=anchors.device)
    rows = (anchors[:, None] + torch.arange(block, device=anchors.device)).clamp(max=len(ids) - 1)
    own = outputs.choices == batch.targets.flatten()
    reached = torch.ones_like(rows, dtype=torch.bool)
    reached[:, 1:] = own[rows[:, :-1]].cumprod(1).bool()
    counts = reached & outputs.answer[rows].cumprod(1).bool()
    falloff = torch.exp(torch.arange(block, device=anchors.device) / -_FALLOFF)
    return Blocks(
        anchors=anchors,
        context=(anchors[:, None] + back).clamp(min=0),
        visible=-back <= positions[anchors][:, None],
        before=ids[rows],
        rows=rows,
        wanted=outputs.choices[rows],
        weights=counts * falloff,
    )
