"""The drafter's training learns, and goes on from its folder as if never interrupted."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import torch
from support.drafting import DRAFTER, small_base
from torch import Tensor

from demo.drafter.base import Base
from demo.drafter.batches import loader, shape_of
from demo.drafter.train import UPDATES, Phase, Trainer, phase
from worker.gguf.drafter import open_drafter

PHASE = Phase(rate=1.0, quantized=True, balance=0.002)
TOKENS, ANCHORS = 256, 24


@pytest.fixture(scope="module")
def base() -> Base:
    return small_base(6)


def updates(trainer: Trainer, count: int) -> list[float]:
    """Some more updates from the dialogues that are due, and their losses."""
    losses = []
    first = trainer.progress.step // UPDATES
    for number, columns in enumerate(loader(trainer.progress.seed, TOKENS, first, 0), first):
        outputs = trainer.outputs(number, columns)
        while trainer.progress.step // UPDATES == number:
            if len(losses) == count:
                return losses
            losses.append(float(trainer.update(outputs, PHASE)["loss"]))
    return losses


def test_an_interrupted_training_ends_with_the_same_weights(base: Base, tmp_path: Path) -> None:
    whole = Trainer(base, DRAFTER, tmp_path / "whole", 3, ANCHORS)
    before = {name: master.detach().clone() for name, master in whole.working.masters.items()}
    updates(whole, 7)
    assert not [name for name, master in whole.working.masters.items() if torch.equal(master, before[name])]
    folder = tmp_path / "parts"
    # Interrupted between two updates from one batch, and at a batch's end.
    for count in (2, 4, 1):
        part = Trainer(base, DRAFTER, folder, 3, ANCHORS)
        updates(part, count)
        part.save()
    assert (part.progress.step, part.progress.runs) == (7, 3)
    for name, master in (whole.working.masters | whole.working.buffers).items():
        assert torch.equal(master, (part.working.masters | part.working.buffers)[name]), name


def test_it_learns_and_another_seed_learns_something_else(base: Base, tmp_path: Path) -> None:
    trainer = Trainer(base, DRAFTER, tmp_path, 4, ANCHORS)
    (columns,) = islice(loader(4, TOKENS, 0, 0), 1)
    outputs = trainer.outputs(0, columns)
    losses = [float(trainer.update(outputs, PHASE)["loss"]) for _ in range(15)]
    assert losses[-1] < 0.8 * losses[0]
    other = Trainer(base, DRAFTER, tmp_path / "other", 5, ANCHORS)
    assert not torch.equal(other.working.masters["markov_w1"], trainer.working.masters["markov_w1"])


def test_a_run_stops_in_time_and_its_file_can_be_opened(base: Base, tmp_path: Path) -> None:
    trainer = Trainer(base, DRAFTER, tmp_path / "folder", 6, ANCHORS)
    trainer.train(loader(6, TOKENS, 0, 0), began=-1e9, run_s=1.0, total_s=1e12)
    assert trainer.progress.step == 1, "no time is left after the first update"
    trainer.export(tmp_path / "drafter.gguf")
    assert open_drafter(tmp_path / "drafter.gguf", base.config)[1] == DRAFTER


def same(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_batch_is_the_same_whoever_makes_it() -> None:
    alone = list(islice(loader(1, TOKENS, 0, 0), 5))
    together = list(islice(loader(1, TOKENS, 0, 2), 5))
    later = list(islice(loader(1, TOKENS, 2, 0), 3))
    assert all(same(one, other) for one, other in zip(alone, together, strict=True))
    assert all(same(one, other) for one, other in zip(alone[2:], later, strict=True))
    assert not same(alone[0], alone[1])


def test_batches_have_their_tokens_whatever_their_shape() -> None:
    shapes = [shape_of(number, 65536) for number in range(12)]
    assert {shape.rows * shape.length for shape in shapes} == {65536}
    assert {shape.length for shape in shapes} == {2048, 4096}
    assert shape_of(5, 256).length == 256


def test_rates_rise_then_fall() -> None:
    assert phase(0.0, 0).rate < phase(0.0, 10).rate < phase(0.1, 1000).rate == 1.0
    assert phase(0.5, 1000).rate > phase(0.9, 1000).rate > phase(1.0, 1000).rate > 0
    assert not phase(0.1, 1000).quantized
    assert phase(1.0, 1000).quantized
