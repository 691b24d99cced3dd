"""The drafter's sizes, its fresh weights, and how its file names and stores them."""

from __future__ import annotations

import torch
from torch import Tensor

from demo.architecture import DEMO_MODEL, VOCAB, new_model
from demo.names import Source, layer_source
from demo.vocabulary import LAST
from worker.gguf.drafter import DrafterConfig, drafter_tensors
from worker.gguf.schema import Role, TensorSpec
from worker.model.config import ModelConfig

_NOISE = "<｜place▁holder▁for▁copy｜>"
_HEADS = {
    "dspark.hc_head_fn.weight": "model.hc_head.hc_fn",
    "dspark.hc_head_base.weight": "model.hc_head.hc_base",
    "dspark.hc_head_scale.weight": "model.hc_head.hc_scale",
    "dspark.norm.weight": "model.norm.weight",
    "dspark.main_proj.weight": "main_proj.weight",
    "dspark.main_norm.weight": "main_norm.weight",
    "dspark.markov_w1.weight": "markov_w1",
    "dspark.markov_w2.weight": "markov_w2",
    "dspark.conf_proj.weight": "confidence",
}
_BY_NAME = {"dspark.markov_w1.weight": "F16"}
_BY_ROLE = {
    Role.VECTOR: "F32",
    Role.MATRIX: "F32",
    Role.PROJECTION: "Q8_0",
    Role.EXPERT_IN: "Q8_0",
    Role.EXPERT_OUT: "Q8_0",
}


def demo_drafter() -> DrafterConfig:
    """The demonstration model's: Flash's structure, with the last three layers tapped."""
    layers = DEMO_MODEL.layers
    return DrafterConfig(
        stages=3,
        block=5,
        markov_rank=64,
        noise_token=VOCAB - len(LAST) + LAST.index(_NOISE),
        target_layers=(layers - 3, layers - 2, layers - 1),
        experts=4,
    )


def new_drafter(
    config: DrafterConfig, model: ModelConfig, seed: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Fresh float32 parameters and the routing biases, on the CPU; the same seed gives the same ones.

    The stages begin as a model's layers do, the Markov head says nothing, the confidence is one half.
    """
    network = new_model(config.stages_of(model), seed)
    shared = ("model.embed_tokens.weight", "lm_head.weight")
    weights: dict[str, Tensor] = dict(network.named_parameters())
    for name in shared:
        del weights[name]
    biases = {name: tensor for name, tensor in network.named_buffers() if name.endswith("correction_bias")}
    hidden, rank, taps = model.hidden, config.markov_rank, len(config.target_layers)
    weights["main_proj.weight"] = torch.randn(hidden, taps * hidden) * (taps * hidden) ** -0.5
    weights["main_norm.weight"] = torch.ones(hidden)
    weights["markov_w1"] = torch.randn(model.vocab, rank)
    weights["markov_w2"] = torch.zeros(model.vocab, rank)
    weights["confidence"] = torch.zeros(1, hidden + rank)
    return {name: tensor.detach().requires_grad_() for name, tensor in weights.items()}, biases


def drafter_formats(config: DrafterConfig, model: ModelConfig) -> list[tuple[Source, str]]:
    """Every tensor of the file, the parameter that holds it, and the name of its format."""
    return [(_source(spec), _format(spec)) for spec in drafter_tensors(config, model)]


def _source(spec: TensorSpec) -> Source:
    return Source(spec, _HEADS[spec.name]) if spec.name in _HEADS else layer_source(spec)


def _format(spec: TensorSpec) -> str:
    return _BY_NAME.get(spec.name) or _BY_ROLE[spec.role]
