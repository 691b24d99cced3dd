"""``twinspark inspect``: what is in a model file, and whether it can be served."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from worker.gguf.read import GgufFile, open_gguf
from worker.gguf.schema import check_tensors
from worker.memory import show_bytes
from worker.model.config import ModelConfig


def command(
    file: Annotated[Path, typer.Argument(help="GGUF file, any part of a split one.")],
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
) -> None:
    """Shows FILE's architecture, types and sizes, and checks it; exit code 1 when it cannot be served."""
    opened = open_gguf(file)
    console = Console()
    console.print(_formats(opened))
    if tensors:
        console.print(_tensors(opened))
    config = ModelConfig.from_metadata(opened.metadata, str(file))
    console.print(_architecture(config))
    check_tensors(opened, config)
    console.print("The file is complete and can be served.")


def _formats(file: GgufFile) -> Table:
    count: Counter[str] = Counter()
    size: Counter[str] = Counter()
    for info in file.tensors.values():
        count[info.format.name] += 1
        size[info.format.name] += info.nbytes
    title = f"{file.path.name}: {len(file.tensors)} tensors, {show_bytes(file.tensor_bytes)}"
    if len(file.parts) > 1:
        title += f" in {len(file.parts)} parts"
    shown = Table("type", "tensors", "size", title=title, title_justify="left")
    for name, total in size.most_common():
        shown.add_row(name, str(count[name]), show_bytes(total))
    return shown


def _tensors(file: GgufFile) -> Table:
    shown = Table("tensor", "type", "shape", "size")
    for info in file.tensors.values():
        shape = " x ".join(str(dim) for dim in info.shape)
        shown.add_row(info.name, info.format.name, shape, show_bytes(info.nbytes))
    return shown


def _architecture(config: ModelConfig) -> Table:
    shown = Table("architecture", "value", title=config.name, title_justify="left")
    for name, value in vars(config).items():
        if name != "name":
            text = str(value)
            if isinstance(value, tuple):
                text = ", ".join(f"{entry} x {times}" for entry, times in sorted(Counter(value).items()))
            shown.add_row(name, text)
    return shown
