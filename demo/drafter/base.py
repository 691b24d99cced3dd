"""The model that is drafted for, from its file, frozen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from demo.names import sources
from demo.working import is_large
from worker.gguf.load import read_rows
from worker.gguf.read import GgufFile
from worker.model.config import ModelConfig
from worker.model.load import open_model

SHIPPED = Path(__file__).parents[1] / "twinspark-demo.gguf"


@dataclass(frozen=True)
class Base:
    """Weights by transformers' names, large matrices in ``dtype``."""

    config: ModelConfig
    weights: dict[str, Tensor]
    dtype: torch.dtype

    @property
    def embedding(self) -> Tensor:
        """``[V, hidden]``."""
        return self.weights["model.embed_tokens.weight"]

    @property
    def head(self) -> Tensor:
        """``[V, hidden]``."""
        return self.weights["lm_head.weight"]


def load_base(path: Path, dtype: torch.dtype, device: torch.device) -> Base:
    """Reads a model's file.

    Raises:
        ModelFileError: it is not a model that is served.
    """
    file, config = open_model(path)
    parts: dict[str, list[Tensor]] = {}
    for source in sources(config):
        parts.setdefault(source.parameter, []).append(read_tensor(file, source.spec.name))
    weights = {}
    for name, tensors in parts.items():
        whole = torch.cat(tensors, 1) if len(tensors) > 1 else tensors[0]
        if whole.is_floating_point():
            weights[name] = whole.to(device, dtype if is_large(name) else torch.float32)
        else:
            weights[name] = whole.to(device, torch.int64)
    return Base(config, weights, dtype)


def read_tensor(file: GgufFile, name: str) -> Tensor:
    """A tensor in float32, or int32 where it is a table."""
    info = file.tensors[name]
    out = torch.empty(info.shape, dtype=torch.int32 if info.format.dequantize is None else torch.float32)
    read_rows(info, out)
    return out
