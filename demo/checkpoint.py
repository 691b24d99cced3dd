"""Checkpoints small enough to copy around: weights in shards, matrices in bfloat16, progress beside them."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV4ForCausalLM

_SHARD_BYTES = 14 << 20
_STATE = "state.json"


@dataclass
class Progress:
    """How far a training has come."""

    seed: int
    step: int = 0
    seconds: float = 0.0
    runs: int = 0
    """How often it was started; each run draws other data."""
    curve: list[dict[str, float]] = field(default_factory=list)
    """What was reported, for the plot."""


def save(folder: Path, weights: dict[str, Tensor], progress: Progress) -> None:
    """Writes the weights narrowed, and the progress."""
    write(folder, {name: _kept(tensor) for name, tensor in weights.items()}, progress)


def write(folder: Path, tensors: dict[str, Tensor], progress: Progress) -> None:
    """Writes shards of at most 14 MiB of the tensors as they are, and the progress, the latter last."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("weights-*.safetensors"):
        old.unlink()
    shard: dict[str, Tensor] = {}
    size = number = 0
    for name, tensor in tensors.items():
        if shard and size + tensor.nbytes > _SHARD_BYTES:
            save_file(shard, folder / f"weights-{number:02}.safetensors")
            shard, size, number = {}, 0, number + 1
        shard[name] = tensor.detach().cpu().contiguous()
        size += tensor.nbytes
    save_file(shard, folder / f"weights-{number:02}.safetensors")
    (folder / _STATE).write_text(json.dumps(asdict(progress)))


def exists(folder: Path) -> bool:
    """Whether a training was saved there."""
    return (folder / _STATE).exists()


def load(folder: Path, network: DeepseekV4ForCausalLM) -> Progress:
    """Fills the network and returns the progress.

    Raises:
        RuntimeError: the shards do not hold exactly the network's tensors.
    """
    weights, progress = read(folder)
    network.load_state_dict(
        {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in weights.items()}
    )
    return progress


def read(folder: Path) -> tuple[dict[str, Tensor], Progress]:
    """What :func:`write` wrote."""
    tensors: dict[str, Tensor] = {}
    for shard in sorted(folder.glob("weights-*.safetensors")):
        tensors |= load_file(shard)
    return tensors, Progress(**json.loads((folder / _STATE).read_text()))


def _kept(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu()
    if not tensor.is_floating_point():
        return tensor.to(torch.int32).contiguous()
    return (tensor.bfloat16() if tensor.dim() >= 2 else tensor.float()).contiguous()
