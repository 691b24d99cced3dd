"""Writes a drafter as a GGUF file of its own, in the layout that drafters of Flash are published in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from gguf import GGUFValueType, GGUFWriter, LlamaFileType
from torch import Tensor

from demo.drafter.design import drafter_formats
from demo.export import write
from worker.gguf.drafter import ARCHITECTURE, PREFIX, DrafterConfig
from worker.model.config import ModelConfig

_QUANTIZATION_VERSION = 2


def export(weights: Mapping[str, Tensor], config: DrafterConfig, model: ModelConfig, path: Path) -> None:
    """Writes the whole file.

    Args:
        weights: parameters and routing biases by the names of :mod:`demo.drafter.design`.
        config: the drafter's sizes.
        model: that it drafts for.
        path: where to; an existing file is replaced.
    """
    writer = GGUFWriter(path, ARCHITECTURE)
    writer.add_string("general.name", f"{model.name} DSpark drafter")
    writer.add_string("general.license", "mit")
    writer.add_uint32("general.file_type", int(LlamaFileType.MOSTLY_Q8_0))
    writer.add_uint32("general.quantization_version", _QUANTIZATION_VERSION)
    integers = {
        "layer_count": config.stages,
        "block_size": config.block,
        "markov_rank": config.markov_rank,
        "noise_token_id": config.noise_token,
        "expert_count": config.experts,
    }
    for key, number in integers.items():
        writer.add_uint32(f"{PREFIX}.{key}", number)
    writer.add_key_value(
        f"{PREFIX}.target_layers",
        list(config.target_layers),
        GGUFValueType.ARRAY,
        sub_type=GGUFValueType.UINT32,
    )
    on_cpu = {name: tensor.detach().cpu() for name, tensor in weights.items()}
    write(writer, on_cpu, drafter_formats(config, model))
