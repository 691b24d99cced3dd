"""A model file, loaded by us and dequantized by `gguf` into `transformers`, gives the same logits."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from support.oracle import oracle_from
from support.runner import Runner
from torch import Tensor

from worker.errors import ModelFileError
from worker.gguf.presets import SMALL
from worker.gguf.synthetic import write_synthetic
from worker.model.config import ModelConfig
from worker.model.load import load_model, open_model


def reader_tensors(path: Path, config: ModelConfig) -> dict[str, Tensor]:
    """Every tensor as `gguf` reads it."""
    tensors = {}
    for tensor in gguf.GGUFReader(path).tensors:
        shape = tuple(int(dim) for dim in reversed(tensor.shape))
        if tensor.tensor_type == gguf.GGMLQuantizationType.I32:
            values = np.array(tensor.data).astype(np.int32)
        else:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        tensors[tensor.name] = torch.from_numpy(np.array(values)).reshape(shape)
    return tensors


@pytest.mark.parametrize("mix", ["q2", "q4"])
def test_a_quantized_file_gives_the_logits_of_transformers(tmp_path: Path, mix: str) -> None:
    # Random 2-bit weights make near-equal index scores likely; selecting all but a few entries leaves them
    # little effect.
    config = replace(SMALL, layers=4, compress_ratios=(0, 4, 128, 4), index_heads=32, hash_layers=1)
    config = replace(config, swiglu_clamp=(1.0,) * 4, swiglu_clamp_shared=(1.0,) * 4, index_top_k=100)
    path = tmp_path / f"{mix}.gguf"
    write_synthetic(path, config, mix, seed=3)
    file, read = open_model(path)
    done: list[tuple[int, int]] = []
    model = load_model(file, read, lambda so_far, total: done.append((so_far, total)))
    assert done[-1] == (file.tensor_bytes, file.tensor_bytes)
    tokens = torch.randint(0, config.vocab, (640,), generator=torch.Generator().manual_seed(0))
    oracle = oracle_from(read, reader_tensors(path, read).__getitem__)
    with torch.no_grad():
        expected = oracle(tokens[None]).logits[0]
    runner = Runner(model, rounding=False)
    logits = torch.cat(
        [runner.step([(0, tokens[begin : begin + 200].tolist())])[0] for begin in range(0, 640, 200)]
    )
    error = (logits - expected).abs().amax(1)
    assert error[:400].max() <= 1e-4, "the indexer keeps every entry up to here"
    assert error.max() <= 1e-4, f"from position {int((error > 1e-4).nonzero()[0])} on"


def test_a_file_that_shrinks_while_loading_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_synthetic(path, SMALL, "q2", seed=3)
    file, config = open_model(path)
    shorter = tmp_path / "shorter.gguf"
    shutil.copy(path, shorter)
    with path.open("r+b") as opened:
        opened.truncate(path.stat().st_size // 2)
    with pytest.raises(ModelFileError, match=r"model\.gguf"):
        load_model(file, config)
