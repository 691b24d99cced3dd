"""``twinspark stop``: ends the running service in order."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cluster.config import ConfigError, doc, load_config
from cluster.record import read_record

_MARGIN_S = 30.0
_POLL_S = 0.1


def command(
    drain_s: Annotated[float | None, typer.Option(help="Seconds to wait for the service to end.")] = None,
    state: Annotated[Path | None, typer.Option(help=doc("state"))] = None,
) -> None:
    """Lets running requests finish, then ends engine and gateway."""
    config = load_config(state=state, drain_s=drain_s)
    console = Console(stderr=True)
    record = read_record(config.state)
    if record is None:
        console.print("No service is running.")
        return
    os.kill(record.pid, signal.SIGTERM)
    give_up_at = time.monotonic() + config.drain_s + _MARGIN_S
    while read_record(config.state) is not None:
        if time.monotonic() > give_up_at:
            raise ConfigError(
                f"the service (pid {record.pid}) has not ended within {config.drain_s + _MARGIN_S:g} s",
                f"end it with `kill -9 {record.pid}`",
            )
        time.sleep(_POLL_S)
    console.print("Stopped.")
