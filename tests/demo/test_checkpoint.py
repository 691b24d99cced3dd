"""Checkpoints give back what was saved, and a training goes on from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from demo import checkpoint
from demo.architecture import DEMO_MODEL, new_model
from demo.checkpoint import Progress
from demo.rows import Rows, Shape
from demo.schedule import Phase
from demo.train import Trainer

CONFIG = replace(
    DEMO_MODEL,
    layers=3,
    compress_ratios=(0, 4, 128),
    hash_layers=1,
    swiglu_clamp=(10.0,) * 3,
    swiglu_clamp_shared=(10.0,) * 3,
    experts=2,
)
PHASE = Phase(Shape(1, 256, 0.0), select=True, rounding=True, quantized=False, rate=1.0, balance=0.002)


def as_kept(tensor: Tensor) -> Tensor:
    """Matrices are kept in bfloat16."""
    return tensor.bfloat16().float() if tensor.is_floating_point() and tensor.dim() >= 2 else tensor


def test_what_was_saved_comes_back(tmp_path: Path) -> None:
    network = new_model(CONFIG, 1)
    saved = Progress(seed=1, step=7, seconds=3.5, runs=2, curve=[{"step": 7.0, "loss": 0.5}])
    assert not checkpoint.exists(tmp_path)
    checkpoint.save(tmp_path, network.state_dict(), saved)
    assert checkpoint.exists(tmp_path)
    other = new_model(CONFIG, 2)
    assert checkpoint.load(tmp_path, other) == saved
    found = other.state_dict()
    for name, tensor in network.state_dict().items():
        assert torch.equal(found[name], as_kept(tensor)), name


def test_a_shard_is_small_and_saving_again_leaves_none_of_the_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = new_model(CONFIG, 1).state_dict()
    monkeypatch.setattr(checkpoint, "_SHARD_BYTES", 1 << 20)
    checkpoint.save(tmp_path, weights, Progress(1))
    shards = list(tmp_path.glob("weights-*.safetensors"))
    largest = max(as_kept(tensor).numel() * 2 for tensor in weights.values())
    assert len(shards) > 3
    assert all(shard.stat().st_size < max(1 << 20, largest) + (1 << 16) for shard in shards)
    monkeypatch.undo()
    checkpoint.save(tmp_path, weights, Progress(1))
    assert len(list(tmp_path.glob("weights-*.safetensors"))) == 1


def test_weights_of_another_network_are_refused(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, new_model(CONFIG, 1).state_dict(), Progress(1))
    with pytest.raises(RuntimeError):
        checkpoint.load(tmp_path, new_model(replace(CONFIG, experts=4), 1))


def test_a_training_goes_on_from_its_folder(tmp_path: Path) -> None:
    columns = tuple(torch.from_numpy(column) for column in next(iter(Rows(PHASE.shape, 1))))
    first = Trainer(CONFIG, tmp_path, 1, torch.device("cpu"))
    before = {name: master.detach().clone() for name, master in first.working.masters.items()}
    losses = [float(first.step(PHASE, columns)["loss"]) for _ in range(3)]
    assert losses[-1] < losses[0]
    unmoved = [name for name, master in first.working.masters.items() if torch.equal(master, before[name])]
    assert not unmoved
    first.progress.step = 3
    first.save()
    second = Trainer(CONFIG, tmp_path, 99, torch.device("cpu"))
    assert (second.progress.step, second.progress.seed, second.progress.runs) == (3, 1, 2)
    for name, master in second.working.masters.items():
        assert torch.equal(master, as_kept(first.working.masters[name])), name
    assert float(second.step(PHASE, columns)["loss"]) < losses[0]
