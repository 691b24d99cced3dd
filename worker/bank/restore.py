"""Restore points: what a bank needs, besides its pages, to go back to an earlier position.

Points lie at multiples of a page's tokens. There every compressor's window has just closed, so that the last
raw keys and, where windows overlap, the last window's inputs of series a are all there is to keep: 3.7 MB at
Flash's sizes. A saved point never changes; banks that share a beginning share its points.
"""

from __future__ import annotations

import torch
from torch import Tensor

from worker.bank.codec import Planes, put, take
from worker.bank.store import KvStore, LayerStore, WindowRing


class RestoreStore:
    """Memory of all restore points, taken once.

    Args:
        store: whose rings are saved and restored.
        slots: number of points.
    """

    def __init__(self, store: KvStore, slots: int) -> None:
        geometry = store.geometry
        self._store = store
        self._keys = geometry.config.window - 1
        self._rings = [geometry.keys.allocate(slots * self._keys, store.device) for _ in store.layers]
        self._windows = [self._overlapping_windows(layer, ratio, slots) for layer, ratio in self._layers()]

    def save(self, slot: int, bank: int, position: int) -> None:
        """Keeps the bank's state, which must stand at ``position``."""
        for index, (layer, ratio) in enumerate(self._layers()):
            live, kept = self._ring_rows(slot, bank, position)
            put(self._rings[index], kept, take(layer.ring, live))
            for ring, points in zip(_windows(layer), self._windows[index], strict=False):
                live, kept = self._window_rows(slot, bank, position, ratio)
                width = points[0].shape[1]
                put(points, kept, (ring.vectors[live, :width], ring.scores[live, :width]))

    def load(self, slot: int, bank: int, position: int) -> None:
        """Brings the bank's rings back to ``position``, where the slot was saved."""
        for index, (layer, ratio) in enumerate(self._layers()):
            live, kept = self._ring_rows(slot, bank, position)
            put(layer.ring, live, take(self._rings[index], kept))
            for ring, points in zip(_windows(layer), self._windows[index], strict=False):
                live, kept = self._window_rows(slot, bank, position, ratio)
                width = points[0].shape[1]
                ring.vectors[live, :width], ring.scores[live, :width] = take(points, kept)

    def _layers(self) -> list[tuple[LayerStore, int]]:
        ratios = self._store.geometry.config.compress_ratios
        return list(zip(self._store.layers, ratios, strict=True))

    def _overlapping_windows(self, layer: LayerStore, ratio: int, slots: int) -> list[Planes]:
        if not ratio or self._store.geometry.overlap(ratio) == 1:
            return []
        widths = [ring.vectors.shape[1] // 2 for ring in _windows(layer)]
        device = self._store.device
        return [tuple(torch.zeros(slots * ratio, width, device=device) for _ in range(2)) for width in widths]

    def _ring_rows(self, slot: int, bank: int, position: int) -> tuple[Tensor, Tensor]:
        """Rows of the last raw keys in the bank's ring, and their places in the slot."""
        positions = torch.arange(max(0, position - self._keys), position)
        ring_rows = self._store.geometry.ring_rows
        return bank * ring_rows + positions % ring_rows, slot * self._keys + positions % self._keys

    def _window_rows(self, slot: int, bank: int, position: int, ratio: int) -> tuple[Tensor, Tensor]:
        """Rows of the last closed window in the compressor's ring, and their places in the slot."""
        positions = torch.arange(position - ratio, position)
        rows = self._store.geometry.window_rows(ratio)
        return bank * rows + positions % rows, slot * ratio + positions % ratio


def points_to_drop(points: list[int], keep: int) -> list[int]:
    """Which of a bank's points, ascending positions, to give up so that ``keep`` are left.

    The newest stays. Of the others the one goes whose neighbours lie closest together for its age, so that
    points stand densely near the end of a conversation and ever more thinly towards its beginning.
    """
    left = list(points)
    dropped = []
    while len(left) > max(keep, 1):
        gaps = [
            (after - before) / (left[-1] - point + 1)
            for before, point, after in zip([0, *left], left, left[1:], strict=False)
        ]
        dropped.append(left.pop(gaps.index(min(gaps))))
    return dropped


def _windows(layer: LayerStore) -> list[WindowRing]:
    return [ring for ring in (layer.window, layer.index_window) if ring is not None]
