"""``twinspark synthetic``: a model file with random weights, for trying everything but the answers."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

from cluster.config import ConfigError
from worker.gguf.presets import PRESETS
from worker.gguf.synthetic import MIXES, plan_tensors, write_synthetic
from worker.memory import show_bytes


def command(
    file: Annotated[Path, typer.Argument(help="GGUF file to write.")],
    size: Annotated[str, typer.Option(help=f"One of {', '.join(PRESETS)}.")] = "small",
    mix: Annotated[str, typer.Option(help=f"Tensor types: one of {', '.join(MIXES)}.")] = "q2",
    seed: Annotated[int, typer.Option(help="Of the weights.")] = 0,
) -> None:
    """Writes FILE with the published names, types and metadata, and random weights: its answers are noise."""
    if size not in PRESETS:
        raise ConfigError(f"--size is {size!r}", f"choose one of {', '.join(PRESETS)}")
    try:
        total = sum(tensor.padded_bytes for tensor in plan_tensors(PRESETS[size], mix))
    except ValueError as error:
        raise ConfigError(str(error), "choose another --mix or --size") from error
    free = shutil.disk_usage(file.absolute().parent).free if file.absolute().parent.is_dir() else 0
    if free < total:
        raise ConfigError(
            f"{file.absolute().parent} has {show_bytes(free)} free, {show_bytes(total)} are needed",
            "choose another folder",
        )
    with Progress("writing", BarColumn(), DownloadColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task("writing", total=total)
        write_synthetic(file, PRESETS[size], mix, seed, on_bytes=lambda count: bar.advance(task, count))
