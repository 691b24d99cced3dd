"""Small models to draft for, made without files, and drafters with every term switched on."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from demo.architecture import DEMO_MODEL, new_model
from demo.drafter.base import Base
from demo.drafter.design import new_drafter
from demo.layout import Batch
from worker.gguf.drafter import DrafterConfig
from worker.model.config import ModelConfig

MODEL = replace(
    DEMO_MODEL,
    layers=3,
    compress_ratios=(0, 4, 128),
    hash_layers=1,
    experts=2,
    swiglu_clamp=(10.0,) * 3,
    swiglu_clamp_shared=(10.0,) * 3,
)
DRAFTER = DrafterConfig(stages=2, block=5, markov_rank=64, noise_token=2029, target_layers=(1, 2), experts=3)


def small_base(seed: int, dtype: torch.dtype = torch.float32, model: ModelConfig = MODEL) -> Base:
    """A freshly initialised model."""
    weights = {name: tensor.detach() for name, tensor in new_model(model, seed).state_dict().items()}
    narrow = ("proj.weight", "gate_up_proj", "down_proj", "lm_head.weight")
    return Base(
        model,
        {name: each.to(dtype) if name.endswith(narrow) else each for name, each in weights.items()},
        dtype,
    )


def random_drafter(
    seed: int, config: DrafterConfig = DRAFTER, model: ModelConfig = MODEL
) -> dict[str, Tensor]:
    """Parameters and biases of which none is zero or one."""
    weights, biases = new_drafter(config, model, seed)
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, tensor in (weights | biases).items():
        size = 0.3 if tensor.dim() < 2 else 0.02
        size = {"markov_w2": 0.3, "confidence": 0.1}.get(name, size)
        noise = torch.randn(tensor.shape, generator=generator)
        found[name] = (tensor.detach() + size * noise).requires_grad_(tensor.requires_grad)
    return found


def text(lengths: list[int], seed: int, answers: float = 0.5) -> Batch:
    """One row of random documents of these lengths (multiples of 128), part of it the assistant's."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    ids = torch.randint(3, MODEL.vocab, (1, total), generator=generator)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    documents = torch.cat([torch.full((length,), number) for number, length in enumerate(lengths)])[None]
    weights = torch.zeros(1, total)
    for begin, length in zip(torch.tensor([0, *lengths]).cumsum(0).tolist(), lengths, strict=False):
        weights[0, begin + int(length * (1 - answers)) : begin + length - 1] = 1
    return Batch(ids, positions, documents, ids.roll(-1, 1), weights)
