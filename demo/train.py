"""Trains the demonstration model: ``python -m demo.train FOLDER --minutes 9 --total-minutes 18``.

A run goes on from what the folder holds, for its share of the total time, and saves there; a curve and the
held-out accuracies by kind are written beside the weights.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.progress import Progress as Bar
from rich.progress import TaskID
from torch import Tensor

from demo import checkpoint
from demo.architecture import DEMO_MODEL, new_model
from demo.checkpoint import Progress
from demo.evaluate import evaluate
from demo.network import Mode, losses_of, run
from demo.optimizers import Optimizers
from demo.plot import plot
from demo.recipe import shipped
from demo.rows import Shape, loader, to_batch
from demo.schedule import LONG, MIDDLE, SHORT, Phase, phase
from demo.working import Working
from worker.model.config import ModelConfig

_CONTEXT_WEIGHT = 0.1
_INDEX_WEIGHT = 1.0
_REPORT_EVERY = 25
_SAVE_EVERY_S = 150.0


class Trainer:
    """One run of a training."""

    def __init__(self, config: ModelConfig, folder: Path, seed: int, device: torch.device) -> None:
        self.config, self.folder, self.device = config, folder, device
        network = new_model(config, seed)
        self.progress = checkpoint.load(folder, network) if checkpoint.exists(folder) else Progress(seed)
        self.progress.runs += 1
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        network.to(device)  # type: ignore[arg-type]
        self.working = Working(
            dict(network.named_parameters()), dict(network.named_buffers()), shipped(config), self.dtype
        )
        self.optimizers = Optimizers(self.working.masters, config)
        self.first_step = self.progress.step

    def step(self, settings: Phase, columns: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """One update; returns scalars on the device."""
        self.working.refresh(settings.quantized)
        batch = to_batch(columns, self.device, _CONTEXT_WEIGHT)
        weights = self.working.weights()
        mode = Mode(self.dtype, settings.select, settings.rounding)
        result = run(weights, self.config, batch, mode)
        losses = losses_of(weights, result.hidden, batch, self.dtype)
        index_loss = torch.stack(result.index_losses).mean()
        (losses.total + _INDEX_WEIGHT * index_loss * len(result.index_losses)).backward()
        self.working.collect_gradients()
        norm = self.optimizers.step(settings.rate)
        self.working.clear_gradients()
        self._balance(result.loads, settings.balance)
        return {
            "loss": losses.answers,
            "right": losses.right,
            "index": index_loss.detach(),
            "recall": torch.stack(result.index_recall).mean(),
            "worst_load": torch.stack([load.max() for load in result.loads.values()]).max(),
            "norm": norm,
        }

    def train(self, minutes: float, total_minutes: float, workers: int, shapes: tuple[Shape, ...]) -> None:
        """Runs for ``minutes`` of wall-clock time, or to the end of the training's total."""
        data = {
            shape: loader(shape, self.progress.seed * 1000 + self.progress.runs * 10 + number, share)
            for number, (shape, share) in enumerate(zip(shapes, _shares(workers), strict=True))
        }
        with Bar(disable=not sys.stdout.isatty()) as bar:
            task = bar.add_task("training", total=1.0)
            self._loop(data, minutes * 60, total_minutes * 60, bar, task)
        self.save()

    def save(self) -> None:
        """Weights, progress and curve."""
        checkpoint.save(self.folder, self.working.masters | self._kept_buffers(), self.progress)
        plot(self.progress.curve, self.folder / "curve.svg")

    def accuracies(self) -> dict[str, float]:
        """On held-out dialogues, as the model will be served."""
        settings = phase(self._done(1.0), self.progress.step, 10**6)
        self.working.refresh(settings.quantized)
        return evaluate(
            self.working.weights(), self.config, Mode(self.dtype, True, settings.rounding), self.device
        )

    def _loop(
        self,
        data: dict[Shape, Iterator[tuple[Tensor, ...]]],
        seconds: float,
        total_seconds: float,
        bar: Bar,
        task: TaskID,
    ) -> None:
        self.total_seconds = total_seconds
        began, before = time.monotonic(), self.progress.seconds
        reported, reported_step, saved = began, self.progress.step, before
        while True:
            passed = time.monotonic() - began
            self.progress.seconds = before + passed
            if passed >= seconds or self.progress.seconds >= total_seconds:
                return
            settings = phase(self._done(0.0), self.progress.step, self.progress.step - self.first_step)
            found = self.step(settings, next(data[settings.shape]))
            self.progress.step += 1
            if self.progress.seconds - saved >= _SAVE_EVERY_S:
                saved = self.progress.seconds
                self.save()
            bar.update(task, completed=self._done(0.0))
            if self.progress.step % _REPORT_EVERY == 0:
                point = {name: float(value) for name, value in found.items()}
                moment = time.monotonic()
                rate = (self.progress.step - reported_step) / (moment - reported)
                reported, reported_step = moment, self.progress.step
                self.progress.curve.append({"step": self.progress.step, "done": self._done(0.0)} | point)
                if self.progress.step % (_REPORT_EVERY * 4) == 0 or self.progress.step < 200:
                    bar.console.print(
                        _line(self.progress, settings, point, rate), highlight=False, soft_wrap=True
                    )

    def _done(self, otherwise: float) -> float:
        total = getattr(self, "total_seconds", 0.0)
        return self.progress.seconds / total if total else otherwise

    def _kept_buffers(self) -> dict[str, Tensor]:
        return {name: buffer for name, buffer in self.working.buffers.items() if ".gate." in name}

    @torch.no_grad()
    def _balance(self, loads: dict[int, Tensor], amount: float) -> None:
        for layer, load in loads.items():
            bias = self.working.buffers[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"]
            bias.add_(torch.sign(load.mean() - load), alpha=amount)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, required=True, help="of this run")
    parser.add_argument("--total-minutes", type=float, required=True, help="of the whole training")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=max(3, (os.cpu_count() or 4) - 2))
    arguments = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trainer = Trainer(DEMO_MODEL, arguments.folder, arguments.seed, device)
    trainer.train(arguments.minutes, arguments.total_minutes, arguments.workers, (SHORT, MIDDLE, LONG))
    found = trainer.accuracies()
    (arguments.folder / "accuracy.json").write_text(json.dumps(found, indent=1))
    for name, accuracy in found.items():
        print(f"{name:24} {accuracy:.3f}")


def _shares(workers: int) -> tuple[int, int, int]:
    """Processes that make short, middle and long rows."""
    long = max(1, workers // 5)
    return max(1, workers - 2 * long), long, long


def _line(progress: Progress, settings: Phase, point: dict[str, float], rate: float) -> str:
    flags = "".join(
        letter if on else "-"
        for letter, on in (("s", settings.select), ("r", settings.rounding), ("q", settings.quantized))
    )
    memory = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    numbers = " ".join(f"{name} {value:.4f}" for name, value in point.items())
    return (
        f"{progress.seconds:6.1f}s step {progress.step} T {settings.shape.length} {flags} {numbers} "
        f"rate {settings.rate:.3f} steps/s {rate:.2f} GiB {memory:.1f}"
    )


if __name__ == "__main__":
    main()
