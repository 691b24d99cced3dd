"""What an engine on a GPU takes besides weights and banks, from the shapes that it allocates."""

from __future__ import annotations

from dataclasses import fields, is_dataclass

import torch
from torch import Tensor

from worker.bank.store import KvGeometry, KvStore
from worker.gpu.decode import MAX_ROWS, StepBuffers
from worker.gpu.prefill import ChunkBuffers
from worker.model.config import ModelConfig

RUNTIME_BYTES = 2 << 30
"""CUDA context, modules, recorded steps, and the process around them."""


def workspace_bytes(config: ModelConfig, context: int, banks: int, chunk: int) -> int:
    """Buffers of decode steps and of the largest chunk, and the workspace for unpacked weights."""
    meta = torch.device("meta")
    geometry = KvGeometry(config, rounding=True)
    store = KvStore(geometry, banks, 1, meta, spare=1)
    step = StepBuffers.empty(config, MAX_ROWS, context, meta)
    piece = ChunkBuffers.empty(config, store, chunk, context, meta)
    return _bytes(step) + _bytes(piece) + 2 * _largest_unpacked(config)


def _largest_unpacked(config: ModelConfig) -> int:
    """Weights of the largest matrix, or pair of them, that prefill unpacks."""
    c = config
    heads = c.heads * c.head_dim
    return max(
        heads * c.q_rank,
        c.o_rank * heads,
        c.hidden * c.o_groups * c.o_rank,
        (c.q_rank + c.head_dim) * c.hidden,
        2 * c.expert_width * c.hidden,
    )


def _bytes(value: object) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, tuple):
        return sum(_bytes(one) for one in value)
    if is_dataclass(value):
        return sum(_bytes(getattr(value, field.name)) for field in fields(value))
    return 0
