"""``twinspark serve``: runs the service in the foreground."""

from __future__ import annotations

import logging
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from cluster.config import ConfigError, ServeConfig, doc, load_config
from cluster.demo import demo_model
from cluster.service import run_service

_LOG_BYTES = 8 << 20
_LOG_FILES = 4


def command(
    model: Annotated[Path | None, typer.Argument(help=doc("model"))] = None,
    demo: Annotated[bool | None, typer.Option("--demo", help=doc("demo"))] = None,
    ctx: Annotated[int | None, typer.Option(help=doc("ctx"))] = None,
    banks: Annotated[int | None, typer.Option(help=doc("banks"))] = None,
    host: Annotated[str | None, typer.Option(help=doc("host"))] = None,
    port: Annotated[int | None, typer.Option(help=doc("port"))] = None,
    reserve: Annotated[str | None, typer.Option(help=doc("reserve"))] = None,
    memory: Annotated[str | None, typer.Option(help=doc("memory"))] = None,
    prefill_chunk: Annotated[int | None, typer.Option(help=doc("prefill_chunk"))] = None,
    device: Annotated[str | None, typer.Option(help=doc("device"))] = None,
    no_graphs: Annotated[bool | None, typer.Option("--no-graphs", help=doc("no_graphs"))] = None,
    queue: Annotated[int | None, typer.Option(help=doc("queue"))] = None,
    threads: Annotated[int | None, typer.Option(help=doc("threads"))] = None,
    watchdog_s: Annotated[float | None, typer.Option(help=doc("watchdog_s"))] = None,
    drain_s: Annotated[float | None, typer.Option(help=doc("drain_s"))] = None,
    ray_address: Annotated[str | None, typer.Option(help=doc("ray_address"))] = None,
    dashboard_port: Annotated[int | None, typer.Option(help=doc("dashboard_port"))] = None,
    state: Annotated[Path | None, typer.Option(help=doc("state"))] = None,
) -> None:
    """Serves MODEL, or the embedded demo model, over HTTP until interrupted."""
    config = load_config(**locals())
    if config.demo == (config.model is not None):
        raise ConfigError(
            "both a model file and --demo are given" if config.demo else "no model is given",
            "give either: `twinspark serve FILE.gguf`, or `twinspark serve --demo`",
        )
    console = Console(stderr=True)
    path = config.model or demo_model()
    _log_to(config)
    run_service(config, path, _Watcher(console))


class _Watcher:
    """Shows the start on the terminal: lines, and a bar while the model loads."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None

    def __call__(self, line: str, done: float | None = None) -> None:
        if done is not None:
            if self._bar is None:
                self._bar = Progress(console=self._console, transient=True)
                self._bar.start()
                self._bar.add_task("loading", total=1.0)
            self._bar.update(self._bar.task_ids[0], completed=done)
            return
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        self._console.print(line, highlight=False)


def _log_to(config: ServeConfig) -> None:
    """Logs go to a rotating file in the state folder; the terminal shows what matters at the moment."""
    config.state.mkdir(mode=0o700, parents=True, exist_ok=True)
    handler = RotatingFileHandler(config.state / "service.log", maxBytes=_LOG_BYTES, backupCount=_LOG_FILES)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    logging.getLogger("httpx").setLevel(logging.WARNING)
