"""Tile sizes of the prefill kernels, by device: what fits its shared memory and registers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton


@dataclass(frozen=True)
class Tiles:
    """For each kernel its tile, warps and pipeline stages.

    Attributes:
        gemm: rows, columns and depth of a tile.
        experts_in: rows, columns and depth of a tile of gate and up.
        experts_out: the same for down.
        attention: heads and keys of a tile.
        index: rows that share a tile of entries, and its entries.
    """

    gemm: tuple[int, int, int, int, int]
    experts_in: tuple[int, int, int, int, int]
    experts_out: tuple[int, int, int, int, int]
    attention: tuple[int, int, int, int]
    index: tuple[int, int, int, int]


SMALL = Tiles(
    gemm=(128, 128, 32, 4, 3),
    experts_in=(64, 64, 128, 4, 2),
    experts_out=(64, 128, 128, 8, 2),
    attention=(32, 32, 8, 1),
    index=(16, 64, 4, 1),
)
"""At most 99 KiB of shared memory a block: GB10 (sm_121) and consumer GPUs."""

LARGE = Tiles(
    gemm=(128, 256, 64, 8, 3),
    experts_in=(128, 64, 128, 8, 3),
    experts_out=(128, 128, 128, 8, 3),
    attention=(64, 32, 8, 1),
    index=(16, 128, 4, 2),
)
"""Data-centre GPUs with 163 KiB and more (sm_80, sm_90, sm_100)."""


def tiles_for(device: torch.device) -> Tiles:
    """By the shared memory of a block."""
    if device.type != "cuda":
        return SMALL
    properties = triton.runtime.driver.active.utils.get_device_properties(device.index or 0)
    return LARGE if properties["max_shared_mem"] > 160_000 else SMALL
