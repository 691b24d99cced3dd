"""Dialogues for the drafter by number: batch n is the same whoever makes it and wherever a run began."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from demo.rows import Shape, drawn

_SHORT, _LONG = 2048, 4096
_LONG_EVERY, _LONG_PART = 6, 0.9


def shape_of(number: int, tokens: int) -> Shape:
    """Of batch ``number``, of ``tokens`` tokens where that makes at least one short row."""
    if tokens >= _LONG and number % _LONG_EVERY == _LONG_EVERY - 1:
        return Shape(tokens // _LONG, _LONG, _LONG_PART)
    length = min(_SHORT, tokens)
    return Shape(tokens // length, length, 0.0)


def loader(seed: int, tokens: int, first: int, workers: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Batches from number ``first`` on, made by ``workers`` processes."""
    return iter(
        DataLoader(
            _Batches(seed, tokens, first),
            batch_size=None,
            num_workers=workers,
            prefetch_factor=4 if workers else None,
            pin_memory=torch.cuda.is_available(),
        )
    )


class _Batches(IterableDataset[tuple[NDArray[np.int16], ...]]):
    """A worker makes every so many-th batch; the loader takes them in turn."""

    def __init__(self, seed: int, tokens: int, first: int) -> None:
        self.seed, self.tokens, self.first = seed, tokens, first

    def __iter__(self) -> Iterator[tuple[NDArray[np.int16], ...]]:
        worker = get_worker_info()
        number, stride = self.first, 1
        if worker is not None:
            number, stride = number + worker.id, worker.num_workers
        while True:
            yield next(drawn(shape_of(number, self.tokens), Random(f"drafter/{self.seed}/{number}")))
            number += stride
