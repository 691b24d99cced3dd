"""Attention of ragged rows over gathered keys, with a sink.

There is one key head, and a key is its own value. Every row reads its own list of keys. Tiles of
:data:`KEY_TILE` keys are taken in order and joined by the running-maximum form of softmax, so a row's result
depends on its own list
alone: tiles that only pad the list change nothing, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.pointwise import exp

KEY_TILE = 64


class Attention:
    """The running softmax of a batch of rows.

    Args:
        q: float32 ``[T, H, D]``, rotated.
        sinks: float32 ``[H]``: a logit per head that joins the denominator and carries no value.
    """

    def __init__(self, q: Tensor, sinks: Tensor) -> None:
        rows, heads, dim = q.shape
        self._q = q * dim**-0.5
        self._peak = sinks.expand(rows, heads).clone()
        self._total = torch.ones(rows, heads)
        self._sum = torch.zeros(rows, heads, dim)

    def read(self, index: Tensor, gather: Callable[[Tensor], Tensor]) -> None:
        """Adds keys.

        Args:
            index: int64 ``[T, L]``, L a multiple of :data:`KEY_TILE`; −1 means no key.
            gather: maps int64 ``[T, KEY_TILE]`` (no −1) to keys, float32 ``[T, KEY_TILE, D]``.
        """
        for begin in range(0, index.shape[1], KEY_TILE):
            tile = index[:, begin : begin + KEY_TILE]
            absent = tile < 0
            if bool(absent.all()):
                continue
            keys = gather(tile.clamp(min=0))
            scores = torch.bmm(self._q, keys.transpose(1, 2)).masked_fill_(absent[:, None, :], -torch.inf)
            peak = torch.maximum(self._peak, scores.amax(-1))
            kept = exp(self._peak - peak)
            weights = exp(scores - peak[:, :, None])
            self._total = self._total * kept + weights.sum(-1)
            self._sum = self._sum * kept[:, :, None] + torch.bmm(weights, keys)
            self._peak = peak

    def output(self) -> Tensor:
        """float32 ``[T, H, D]``, still rotated."""
        return self._sum / self._total[:, :, None]


def pad_keys(index: Tensor) -> Tensor:
    """Fills ``index [T, L]`` with −1 up to the next multiple of :data:`KEY_TILE`."""
    return torch.nn.functional.pad(index, (0, -index.shape[1] % KEY_TILE), value=-1)
