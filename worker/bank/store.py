"""The memory of all KV banks, taken once.

Per layer and bank: a ring of the last raw key rows and rings of the compressors' inputs (the open windows).
Per layer and page: the compressed entries of :attr:`KvGeometry.page_tokens` tokens. Rings are addressed by
position modulo their size and are longer than the model needs by :data:`UNDO_ROWS`, so that taking back that
many tokens only moves a length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from worker.bank.codec import Float32Rows, IndexRows, KeyRows, Planes, RowCodec
from worker.errors import ModelFileError
from worker.model.config import ModelConfig

CPU = torch.device("cpu")

UNDO_ROWS = 6
"""Rows of one step that can be taken back: a draft block of five and the row it starts from."""

_MIN_PAGE_TOKENS = 128
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class KvGeometry:
    """Sizes of the store, from the model alone."""

    config: ModelConfig
    rounding: bool

    def __post_init__(self) -> None:
        dim = self.config.index_dim
        if self.rounding and dim & (dim - 1):
            raise ModelFileError(
                f"the indexer's key length is {dim}, and its Hadamard turn needs a power of two",
                "use a file with another key length, or serve it with rounding off",
            )

    @cached_property
    def keys(self) -> RowCodec:
        config = self.config
        return KeyRows(config.head_dim, config.rope_dim) if self.rounding else Float32Rows(config.head_dim)

    @cached_property
    def index_keys(self) -> RowCodec:
        return IndexRows(self.config.index_dim) if self.rounding else Float32Rows(self.config.index_dim)

    @property
    def ring_rows(self) -> int:
        return self.config.window + UNDO_ROWS

    def window_rows(self, ratio: int) -> int:
        """Compressor inputs kept a bank: the open window, the one before where windows overlap, and the
        slack.
        """
        return self.overlap(ratio) * ratio + UNDO_ROWS

    @staticmethod
    def overlap(ratio: int) -> int:
        """Windows that one entry pools, and series that a compressor computes: 2 for ratio 4, else 1."""
        return 2 if ratio == 4 else 1

    @staticmethod
    def indexed(ratio: int) -> bool:
        """Whether layers of this ratio select their entries with an indexer."""
        return ratio == 4

    @cached_property
    def ratios(self) -> tuple[int, ...]:
        """The compression ratios in use, ascending."""
        return tuple(sorted({ratio for ratio in self.config.compress_ratios if ratio}))

    @cached_property
    def page_tokens(self) -> int:
        """Tokens a page covers: every ratio's windows end at a page's end."""
        step = math.lcm(*self.ratios) if self.ratios else _MIN_PAGE_TOKENS
        return step * -(-_MIN_PAGE_TOKENS // step)

    @cached_property
    def page_bytes(self) -> int:
        """One page, all layers."""
        return sum(
            self.page_tokens // ratio * self._entry_bytes(ratio)
            for ratio in self.config.compress_ratios
            if ratio
        )

    @property
    def bytes_per_token(self) -> float:
        """Growth of a sequence with each further token."""
        return self.page_bytes / self.page_tokens

    @cached_property
    def bank_bytes(self) -> int:
        """One bank without its pages."""
        total = 0
        for ratio in self.config.compress_ratios:
            total += self.ring_rows * self.keys.row_bytes
            if ratio:
                widths = self.config.head_dim + (self.config.index_dim if self.indexed(ratio) else 0)
                total += self.window_rows(ratio) * 2 * self.overlap(ratio) * widths * _FLOAT_BYTES
        return total

    @cached_property
    def point_bytes(self) -> int:
        """One restore point."""
        total = 0
        for ratio in self.config.compress_ratios:
            total += (self.config.window - 1) * self.keys.row_bytes
            if ratio and self.overlap(ratio) == 2:
                widths = self.config.head_dim + (self.config.index_dim if self.indexed(ratio) else 0)
                total += ratio * 2 * widths * _FLOAT_BYTES
        return total

    def pages_for(self, tokens: int) -> int:
        """Pages that hold the entries of a sequence of ``tokens``."""
        return -(-tokens // self.page_tokens)

    def _entry_bytes(self, ratio: int) -> int:
        return self.keys.row_bytes + (self.index_keys.row_bytes if self.indexed(ratio) else 0)


@dataclass(frozen=True)
class WindowRing:
    """A compressor's inputs: ``vectors`` and ``scores``, float32 ``[B · rows, overlap · D]``."""

    vectors: Tensor
    scores: Tensor


@dataclass(frozen=True)
class LayerStore:
    """One layer's part of the store; entries and windows are absent in purely sliding layers."""

    ring: Planes
    entries: Planes = ()
    window: WindowRing | None = None
    index_entries: Planes = ()
    index_window: WindowRing | None = None


class KvStore:
    """All banks' tensors. Rows of a ring lie at ``bank · rows + position % rows``, entries at
    ``page · (page_tokens / ratio) + offset``.

    Args:
        geometry: sizes.
        banks: number of banks B.
        pages: number of pages in the pool.
        device: where they are.
        spare: further banks' rings, after those of the banks, for state that is under way.
    """

    def __init__(
        self,
        geometry: KvGeometry,
        banks: int,
        pages: int,
        device: torch.device = CPU,
        spare: int = 0,
    ) -> None:
        self.geometry = geometry
        self.banks = banks
        self.spare = spare
        self.pages = pages
        self.device = device
        self.layers = [self._layer(ratio) for ratio in geometry.config.compress_ratios]

    def copy_state(self, source: int, target: int) -> None:
        """Makes the rings and open windows of one bank those of another."""
        for layer in self.layers:
            planes = [*layer.ring]
            for window in (layer.window, layer.index_window):
                planes += [window.vectors, window.scores] if window is not None else []
            for plane in planes:
                rows = plane.shape[0] // (self.banks + self.spare)
                plane[target * rows : (target + 1) * rows].copy_(plane[source * rows : (source + 1) * rows])

    def _layer(self, ratio: int) -> LayerStore:
        geometry, config = self.geometry, self.geometry.config
        ring = geometry.keys.allocate((self.banks + self.spare) * geometry.ring_rows, self.device)
        if not ratio:
            return LayerStore(ring)
        entries = self.pages * (geometry.page_tokens // ratio)
        indexed = geometry.indexed(ratio)
        return LayerStore(
            ring,
            geometry.keys.allocate(entries, self.device),
            self._window(ratio, config.head_dim),
            geometry.index_keys.allocate(entries, self.device) if indexed else (),
            self._window(ratio, config.index_dim) if indexed else None,
        )

    def _window(self, ratio: int, dim: int) -> WindowRing:
        rows = (self.banks + self.spare) * self.geometry.window_rows(ratio)
        width = self.geometry.overlap(ratio) * dim
        return WindowRing(*(torch.zeros(rows, width, device=self.device) for _ in range(2)))
