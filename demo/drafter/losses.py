"""What a draft costs: cross entropy, distance to the model's distribution, and the confidence's error.

    loss = 0.1 · CE(z, wanted) + 0.9 · ‖softmax(z) − p‖₁ + BCE(c, 1 − ½‖softmax(z) − p‖₁)

The overlap of two distributions, 1 − ½‖q − p‖₁, is the probability that a drafted token is accepted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from demo.drafter.base import Base
from demo.drafter.blocks import Blocks
from demo.drafter.network import Drafts
from demo.drafter.outputs import Outputs
from demo.network import logits_of

_TOKEN, _DISTRIBUTION, _CONFIDENCE = 0.1, 0.9, 1.0


@dataclass(frozen=True)
class Losses:
    """Scalars; means over the rows by their weights, apart from the last two."""

    total: Tensor
    token: Tensor
    distance: Tensor
    confidence: Tensor
    emitted: Tensor
    """Tokens a step, the model's own included, of blocks whose rows all count."""
    right: Tensor
    """Part of the first rows that draft the model's token."""


def losses_of(drafts: Drafts, outputs: Outputs, blocks: Blocks, base: Base) -> Losses:
    """Compares drafts with what the model says at their places."""
    with torch.no_grad():
        goal = logits_of(base.weights, outputs.hidden[blocks.rows], base.dtype).float().softmax(-1)
    weights = blocks.weights / blocks.weights.sum().clamp(min=1e-6)
    token, distance = distances(drafts.logits, goal, blocks.wanted)
    overlap = 1 - distance.detach() / 2
    doubt = F.binary_cross_entropy_with_logits(drafts.confidence, overlap, reduction="none")
    token, distance, doubt = ((each * weights).sum() for each in (token, distance, doubt))
    total = _TOKEN * token + _DISTRIBUTION * distance + _CONFIDENCE * doubt
    matches = drafts.logits.detach().argmax(-1) == blocks.wanted
    whole = (blocks.weights > 0).all(1)
    emitted = 1 + matches.cumprod(1).sum(1).float()
    first = blocks.weights[:, 0] > 0
    return Losses(
        total,
        token.detach(),
        distance.detach(),
        doubt.detach(),
        (emitted * whole).sum() / whole.sum().clamp(min=1),
        (matches[:, 0] & first).sum() / first.sum().clamp(min=1),
    )


def distances(logits: Tensor, goal: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy and L1 distance of each row.

    Args:
        logits: float32 ``[..., V]``.
        goal: float32 ``[..., V]``, probabilities.
        wanted: int64 ``[...]``; what lies outside of answers counts as token 0.
    """
    log_q = logits.log_softmax(-1)
    token = -log_q.gather(-1, wanted.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return token, (log_q.exp() - goal).abs().sum(-1)
