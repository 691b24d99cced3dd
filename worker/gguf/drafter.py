"""A DSpark drafter's file: its metadata, and the tensors it must hold, all sized by the model it drafts for.

Layout: ``general.architecture`` is ``deepseek4-dspark``, keys are under ``deepseek4.dspark``, a stage's
tensors under ``dspark.<stage>.`` with the names of a model's layer, the heads under ``dspark.``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from worker.errors import ModelFileError
from worker.gguf.read import GgufFile, open_gguf
from worker.gguf.schema import Role, TensorSpec, check_against, layer_tensors
from worker.model.config import ModelConfig
from worker.model.metadata import Metadata

ARCHITECTURE = "deepseek4-dspark"
PREFIX = "deepseek4.dspark"

_MAX_STAGES = 16
_MAX_BLOCK = 64
_MAX_RANK = 1 << 16
_HINT = "a drafter belongs to one model: get the file made for the model that is served"


@dataclass(frozen=True)
class DrafterConfig:
    """What a drafter has of its own; every other size is its model's."""

    stages: int
    block: int
    """Rows of a block: the anchor's and the noise's; as many tokens are drafted."""
    markov_rank: int
    noise_token: int
    target_layers: tuple[int, ...]
    """Layers of the model whose streams it reads, ascending."""
    experts: int

    @classmethod
    def from_file(cls, file: GgufFile, model: ModelConfig) -> DrafterConfig:
        """Reads and checks the metadata.

        Raises:
            ModelFileError: the file is no drafter, or none for ``model``.
        """
        source = str(file.path)
        values = Metadata(file.metadata, PREFIX, source)
        architecture = values.text("general.architecture")
        if architecture != ARCHITECTURE:
            raise ModelFileError(
                f"{source}: general.architecture is {architecture[:40]!r}, expected {ARCHITECTURE!r}", _HINT
            )
        taps = values.length(".target_layers")
        if not 1 <= taps <= model.layers:
            raise values.error(".target_layers", f"has {taps} entries, the model {model.layers} layers")
        layers = values.integers(".target_layers", taps, 0, model.layers - 1)
        if sorted(set(layers)) != list(layers):
            raise values.error(".target_layers", f"is {list(layers)}, expected ascending layers")
        return cls(
            stages=values.integer(".layer_count", 1, _MAX_STAGES),
            block=values.integer(".block_size", 1, _MAX_BLOCK),
            markov_rank=values.integer(".markov_rank", 1, _MAX_RANK),
            noise_token=values.integer(".noise_token_id", 0, model.vocab - 1),
            target_layers=layers,
            experts=values.integer(".expert_count", model.experts_used, 65536),
        )

    def stages_of(self, model: ModelConfig) -> ModelConfig:
        """The stages as a model's layers: sliding windows only, experts chosen by score."""
        return replace(
            model,
            layers=self.stages,
            compress_ratios=(0,) * self.stages,
            experts=self.experts,
            hash_layers=0,
            swiglu_clamp=model.swiglu_clamp[-1:] * self.stages,
            swiglu_clamp_shared=model.swiglu_clamp_shared[-1:] * self.stages,
        )


def open_drafter(path: Path, model: ModelConfig) -> tuple[GgufFile, DrafterConfig]:
    """Opens and checks a drafter's file for a model; nothing large is allocated.

    Raises:
        ModelFileError: with the file and the key or tensor that is wrong.
    """
    file = open_gguf(path)
    config = DrafterConfig.from_file(file, model)
    check_against(file, drafter_tensors(config, model))
    return file, config


def drafter_tensors(config: DrafterConfig, model: ModelConfig) -> list[TensorSpec]:
    """Every tensor of the file: stage by stage, then the heads."""
    stages = config.stages_of(model)
    specs = [
        spec
        for stage in range(config.stages)
        for spec in layer_tensors(stages, f"dspark.{stage}.", 0, is_hash=False)
    ]
    return [*specs, *_head_tensors(config, model)]


def _head_tensors(config: DrafterConfig, model: ModelConfig) -> Iterator[TensorSpec]:
    hidden, rank = model.hidden, config.markov_rank
    yield TensorSpec("dspark.main_proj.weight", (hidden, len(config.target_layers) * hidden), Role.PROJECTION)
    yield TensorSpec("dspark.main_norm.weight", (hidden,), Role.VECTOR)
    yield TensorSpec("dspark.markov_w1.weight", (model.vocab, rank), Role.MATRIX)
    yield TensorSpec("dspark.markov_w2.weight", (model.vocab, rank), Role.PROJECTION)
    yield TensorSpec("dspark.conf_proj.weight", (1, hidden + rank), Role.MATRIX)
    yield TensorSpec("dspark.hc_head_fn.weight", (model.streams, model.streams * hidden), Role.MATRIX)
    yield TensorSpec("dspark.hc_head_base.weight", (model.streams,), Role.VECTOR)
    yield TensorSpec("dspark.hc_head_scale.weight", (1,), Role.VECTOR)
    yield TensorSpec("dspark.norm.weight", (hidden,), Role.VECTOR)
