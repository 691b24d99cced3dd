"""The program ``twinspark``: its commands, and how their errors reach the terminal."""

from __future__ import annotations

import sys

import typer
from rich.console import Console

from cluster.cli import chat, inspect, plan, serve, status, stop, synthetic
from worker.errors import TwinsparkError


def main() -> None:
    """Entry point; errors that are somebody's to act on end it with one message and exit code 1."""
    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        help="Serves DeepSeek-V4-Flash from GGUF files on one or two DGX Spark boxes.",
    )
    for module in (serve, chat, status, stop, inspect, plan, synthetic):
        app.command(module.__name__.rsplit(".", 1)[1])(module.command)
    try:
        app()
    except TwinsparkError as error:
        console = Console(stderr=True)
        console.print(f"[bold red]error:[/] {error.message}", highlight=False)
        if error.hint:
            console.print(f"[bold]what to do:[/] {error.hint}", highlight=False)
        sys.exit(1)
