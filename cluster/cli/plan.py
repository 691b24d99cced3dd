"""``twinspark plan``: what a model file takes in memory, before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from cluster.config import doc, load_config
from worker.device import Device
from worker.model.load import open_model
from worker.plan import MemoryPlan, make_plan, table


def command(
    file: Annotated[Path, typer.Argument(help="GGUF file, any part of a split one.")],
    ctx: Annotated[int | None, typer.Option(help=doc("ctx"))] = None,
    banks: Annotated[int | None, typer.Option(help=doc("banks"))] = None,
    memory: Annotated[str | None, typer.Option(help="Plan for a box with this much, e.g. 119GiB.")] = None,
    reserve: Annotated[str | None, typer.Option(help=doc("reserve"))] = None,
    prefill_chunk: Annotated[int | None, typer.Option(help=doc("prefill_chunk"))] = None,
    device: Annotated[str | None, typer.Option(help=doc("device"))] = None,
) -> None:
    """Prints the memory plan of FILE, or what would have to change for it to fit."""
    config = load_config(
        ctx=ctx, banks=banks, memory=memory, reserve=reserve, prefill_chunk=prefill_chunk, device=device
    )
    opened, model = open_model(file)
    if config.device == "gpu" and config.memory:
        place, available = Device.GPU, config.memory  # for a box that is not this one
    else:
        place, available = config.place()
    plan = make_plan(opened, model, config.wanted(place), available)
    Console().print(plan_table(plan))


def plan_table(plan: MemoryPlan) -> Table:
    """The plan for people."""
    shown = Table(title=f"{plan.banks} banks of {plan.context} tokens", title_justify="left")
    shown.add_column("what")
    shown.add_column("memory", justify="right")
    shown.add_column("note")
    lines = table(plan)
    for number, line in enumerate(lines):
        shown.add_row(*line, end_section=number == len(lines) - 3)
    return shown
