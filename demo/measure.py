"""Times a training step's parts on the GPU: ``python -m demo.measure``."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from demo.architecture import DEMO_MODEL
from demo.rows import Rows
from demo.schedule import LONG, MIDDLE, SHORT, Phase
from demo.train import Trainer

_PHASES = (
    Phase(SHORT, select=False, rounding=False, quantized=False, rate=0.01, balance=0.0),
    Phase(SHORT, select=True, rounding=True, quantized=True, rate=0.01, balance=0.0),
    Phase(MIDDLE, select=True, rounding=True, quantized=True, rate=0.01, balance=0.0),
    Phase(LONG, select=True, rounding=True, quantized=True, rate=0.01, balance=0.0),
)


def main() -> None:
    """The command."""
    trainer = Trainer(DEMO_MODEL, Path("nowhere"), 1, torch.device("cuda"))
    for number, settings in enumerate(_PHASES):
        _measure(trainer, settings, in_detail=number in (0, len(_PHASES) - 1))
    print(f"refresh: {_seconds(partial(trainer.working.refresh, False), 10) * 1e3:.1f} ms")
    print(f"refresh, quantized: {_seconds(partial(trainer.working.refresh, True), 10) * 1e3:.1f} ms")
    print(f"muon: {_seconds(partial(trainer.optimizers.muon.step, 0.0), 10) * 1e3:.1f} ms")


def _measure(trainer: Trainer, settings: Phase, in_detail: bool) -> None:
    columns = tuple(torch.from_numpy(column) for column in next(iter(Rows(settings.shape, 1))))
    step = partial(trainer.step, settings, columns)
    print(f"first step: {_seconds(step, 1):.1f} s", flush=True)
    torch.cuda.reset_peak_memory_stats()
    each = _seconds(step, 6)
    memory = torch.cuda.max_memory_allocated() / 2**30
    print(f"{settings}: {each * 1e3:.1f} ms a step, {memory:.1f} GiB", flush=True)
    if in_detail:
        _profile(step)


def _seconds(action: Callable[[], object], times: int) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(times):
        action()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / times


def _profile(action: Callable[[], object]) -> None:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        action()
        torch.cuda.synchronize()
    print(
        trace.key_averages().table(sort_by="self_device_time_total", row_limit=22, max_name_column_width=60)
    )


if __name__ == "__main__":
    main()
