"""Trains the drafter: ``python -m demo.drafter.train FOLDER FILE.gguf --total-minutes 4.5``.

The model's own answers to the training's dialogues are made on the way, greedy ones and sampled ones in turn,
each batch serving several updates. A run goes on from what the folder holds exactly where it was saved, stops
when the time is up, saves, and writes the file.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from demo import checkpoint
from demo.checkpoint import Progress
from demo.drafter.base import SHIPPED, Base, load_base
from demo.drafter.batches import loader
from demo.drafter.blocks import blocks_at, starts
from demo.drafter.design import demo_drafter, drafter_formats, new_drafter
from demo.drafter.export import export
from demo.drafter.losses import losses_of
from demo.drafter.network import draft
from demo.drafter.outputs import Outputs, own_outputs
from demo.network import Mode
from demo.optimizers import Optimizers
from demo.rows import to_batch
from demo.working import Working
from worker.gguf.drafter import DrafterConfig

UPDATES = 3
"""Of the weights, from one batch."""
_PASSES = 2
_TEMPERATURES = (0.0, 1.0)
_WARM_STEPS = 40
_DECAY_FROM, _LAST_RATE = 0.35, 0.02
_QUANTIZE_FROM = 0.6
_BALANCE = 0.002
_BALANCE_UNTIL = 0.9
_REPORT_EVERY_S = 4.0
_SAVE_EVERY_S = 60.0
_ENDING_S = 6.0
"""Kept for saving and writing the file."""


@dataclass(frozen=True)
class Phase:
    """The settings of one update."""

    rate: float
    """Of the full learning rates."""
    quantized: bool
    balance: float
    """How far a routing bias moves."""


def phase(done: float, step: int) -> Phase:
    """The settings of update ``step`` at ``done`` (0 to 1) of the training."""
    decay = min(1.0, max(0.0, done - _DECAY_FROM) / (1 - _DECAY_FROM))
    warm = min(1.0, (step + 1) / _WARM_STEPS)
    return Phase(
        rate=warm * (1 - (1 - _LAST_RATE) * decay),
        quantized=done >= _QUANTIZE_FROM,
        balance=_BALANCE if done < _BALANCE_UNTIL else 0.0,
    )


class Trainer:
    """One run of a training.

    Args:
        base: the model to draft for.
        config: the drafter's sizes.
        folder: of the checkpoint; what it holds is gone on from.
        seed: of the weights and dialogues, where the folder is empty.
        anchors: blocks an update.
    """

    def __init__(self, base: Base, config: DrafterConfig, folder: Path, seed: int, anchors: int) -> None:
        self.base, self.config, self.folder, self.anchors = base, config, folder, anchors
        self.device = base.embedding.device
        self.mode = Mode(base.dtype, rounding=True)
        is_new = not checkpoint.exists(folder)
        held, self.progress = ({}, Progress(seed)) if is_new else checkpoint.read(folder)
        self.progress.runs += 1
        weights, biases = new_drafter(config, base.config, self.progress.seed)
        self.working = Working(
            {name: self._placed(held.get(name, one)).requires_grad_() for name, one in weights.items()},
            {name: self._placed(held.get(name, one)) for name, one in biases.items()},
            drafter_formats(config, base.config),
            base.dtype,
        )
        self.optimizers = Optimizers(self.working.masters, config.stages_of(base.config))
        if held:
            self.optimizers.restore(held)

    def outputs(self, number: int, columns: tuple[Tensor, ...]) -> Outputs:
        """The model's own text in batch ``number``."""
        return own_outputs(
            self.base,
            to_batch(columns, self.device, 0.0),
            self.config.target_layers,
            _TEMPERATURES[number % len(_TEMPERATURES)],
            _PASSES,
            self.progress.seed * 1_000_003 + number,
        )

    def update(self, outputs: Outputs, settings: Phase) -> dict[str, Tensor]:
        """The next update, from its share of the batch's blocks; returns scalars on the device."""
        working = self.working
        working.refresh(settings.quantized)
        blocks = blocks_at(outputs, self._anchors(outputs), self.config.block, self.base.config.window)
        drafts = draft(working.weights(), self.config, self.base, outputs, blocks, self.mode)
        losses = losses_of(drafts, outputs, blocks, self.base)
        losses.total.backward()
        working.collect_gradients()
        norm = self.optimizers.step(settings.rate)
        working.clear_gradients()
        self._balance(drafts.loads, settings.balance)
        self.progress.step += 1
        return {
            "loss": losses.total.detach(),
            "token": losses.token,
            "distance": losses.distance,
            "confidence": losses.confidence,
            "right": losses.right,
            "emitted": losses.emitted,
            "norm": norm,
        }

    def train(
        self, batches: Iterator[tuple[Tensor, ...]], began: float, run_s: float, total_s: float
    ) -> None:
        """Updates until this run has taken ``run_s``, or the training's ``total_s`` are used up.

        Args:
            batches: from that of the next update on.
            began: the run, by ``time.monotonic()``.
            run_s: seconds of this run.
            total_s: seconds of the whole training, over which the phases are laid.
        """
        before = self.progress.seconds
        reported, reported_step, saved = time.monotonic(), self.progress.step, time.monotonic()
        for columns in batches:
            number = self.progress.step // UPDATES
            outputs = self.outputs(number, columns)
            while self.progress.step // UPDATES == number:
                found = self.update(outputs, phase(self.progress.seconds / total_s, self.progress.step))
                now = time.monotonic()
                self.progress.seconds = before + now - began
                if now - reported >= _REPORT_EVERY_S:
                    rate = (self.progress.step - reported_step) / (now - reported)
                    reported, reported_step = now, self.progress.step
                    self._report({name: float(value) for name, value in found.items()}, rate)
                if now - began >= run_s or self.progress.seconds >= total_s:
                    return
                if now - saved >= _SAVE_EVERY_S:
                    saved = now
                    self.save()

    def save(self) -> None:
        """Weights, optimizers and progress."""
        working = self.working
        checkpoint.write(
            self.folder, working.masters | working.buffers | self.optimizers.state(), self.progress
        )

    def export(self, path: Path) -> None:
        """The file."""
        export(self.working.masters | self.working.buffers, self.config, self.base.config, path)

    def _anchors(self, outputs: Outputs) -> Tensor:
        """This update's share of a batch's blocks, drawn by the batch's number."""
        number, turn = divmod(self.progress.step, UPDATES)
        found = starts(outputs)
        generator = torch.Generator().manual_seed(self.progress.seed * 1_000_003 + number)
        order = torch.randperm(len(found), generator=generator).to(self.device)
        count = min(self.anchors, len(found))
        share = (turn * count + torch.arange(count, device=self.device)) % max(1, len(found))
        return found[order[share]]

    def _placed(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self.device, torch.float32, copy=True)

    def _report(self, point: dict[str, float], rate: float) -> None:
        progress = self.progress
        progress.curve.append({"step": progress.step, "seconds": progress.seconds} | point)
        memory = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
        numbers = " ".join(f"{name} {value:.3f}" for name, value in point.items())
        print(
            f"{progress.seconds:6.1f}s step {progress.step} {numbers} steps/s {rate:.1f} GiB {memory:.1f}",
            flush=True,
        )

    @torch.no_grad()
    def _balance(self, loads: dict[int, Tensor], amount: float) -> None:
        for stage, load in loads.items():
            bias = self.working.buffers[f"model.layers.{stage}.mlp.gate.e_score_correction_bias"]
            bias.add_(torch.sign(load.mean() - load), alpha=amount)


def main() -> None:
    """The command."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="of the checkpoint")
    parser.add_argument("file", type=Path, help="the drafter's GGUF file")
    parser.add_argument("--total-minutes", type=float, required=True, help="of the whole training")
    parser.add_argument("--minutes", type=float, help="of this run; the whole training without it")
    parser.add_argument("--base", type=Path, default=SHIPPED, help="the model to draft for")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=65536, help="a batch")
    parser.add_argument("--anchors", type=int, default=4096, help="blocks an update")
    parser.add_argument("--workers", type=int, default=max(2, (os.cpu_count() or 4) - 3))
    arguments = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    base = load_base(arguments.base, dtype, device)
    trainer = Trainer(base, demo_drafter(), arguments.folder, arguments.seed, arguments.anchors)
    first = trainer.progress.step // UPDATES
    batches = loader(trainer.progress.seed, arguments.tokens, first, arguments.workers)
    total_s = 60 * arguments.total_minutes - _ENDING_S
    run_s = 60 * arguments.minutes - _ENDING_S if arguments.minutes else total_s
    # Compiling takes longer than it saves in a few minutes.
    with torch.compiler.set_stance("force_eager"):
        trainer.train(batches, began, run_s, total_s)
    trainer.save()
    trainer.export(arguments.file)
    size = arguments.file.stat().st_size / 1e6
    print(f"{arguments.file}: {size:.2f} MB after {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
