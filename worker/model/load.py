"""From a GGUF file to a model in memory: each tensor read once, straight into the place where it stays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from worker.gguf.load import STAGING_BYTES, read_rows
from worker.gguf.read import GgufFile, open_gguf
from worker.gguf.schema import check_tensors
from worker.model.config import ModelConfig
from worker.model.forward import Model
from worker.model.weights import assemble

OnLoaded = Callable[[int, int], None]
"""Told the bytes read so far and in all."""


def open_model(path: Path) -> tuple[GgufFile, ModelConfig]:
    """Opens and checks a model file; nothing large is allocated.

    Raises:
        ModelFileError: with the file and the key or tensor that is wrong.
    """
    file = open_gguf(path)
    config = ModelConfig.from_metadata(file.metadata, str(path))
    check_tensors(file, config)
    return file, config


def load_model(file: GgufFile, config: ModelConfig, on_loaded: OnLoaded | None = None) -> Model:
    """Reads the weights as float32.

    Raises:
        ModelFileError: the file has changed or cannot be read.
    """
    staging = torch.empty(STAGING_BYTES, dtype=torch.uint8)
    done = 0

    def count(more: int) -> None:
        nonlocal done
        done += more
        if on_loaded is not None:
            on_loaded(done, file.tensor_bytes)

    def get(name: str) -> Tensor:
        info = file.tensors[name]
        is_table = info.format.dequantize is None
        out = torch.empty(info.shape, dtype=torch.int32 if is_table else torch.float32)
        read_rows(info, out, on_bytes=count, staging=staging if info.row_bytes <= STAGING_BYTES else None)
        return out

    return Model(config, assemble(config, get))
