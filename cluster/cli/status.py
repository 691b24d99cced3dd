"""``twinspark status``: what the running service is doing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from rich.console import Console
from rich.table import Table

from cluster.config import ConfigError, doc, load_config
from cluster.record import ServiceRecord, read_record
from worker.memory import show_bytes

_ANSWER_S = 10.0


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print it for programs.")] = False,
    state: Annotated[Path | None, typer.Option(help=doc("state"))] = None,
) -> None:
    """Shows engines, banks, memory and counters; exit code 3 when no service runs, 1 while it is not
    ready.
    """
    console = Console()
    record = read_record(load_config(state=state).state)
    if record is None:
        console.print("No service is running.")
        raise typer.Exit(3)
    told = _ask(record)
    if as_json:
        print(json.dumps({"service": vars(record), **told}, indent=2))
    else:
        _show(console, record, told)
    raise typer.Exit(0 if told["not_ready"] is None else 1)


def _ask(record: ServiceRecord) -> dict[str, Any]:
    try:
        answer = httpx.get(f"{record.url}/status", timeout=_ANSWER_S)
        answer.raise_for_status()
        told: dict[str, Any] = answer.json()
    except (httpx.HTTPError, ValueError) as error:
        raise ConfigError(
            f"the service at {record.url} (pid {record.pid}) does not answer: {error}",
            "look into service.log in its state folder",
        ) from error
    return told


def _show(console: Console, record: ServiceRecord, told: dict[str, Any]) -> None:
    console.print(
        f"twinspark {told['version']} at {record.url}, pid {record.pid}, model {record.model}",
        highlight=False,
    )
    if record.dashboard_url:
        console.print(f"Ray dashboard at {record.dashboard_url}", highlight=False)
    console.print("ready" if told["not_ready"] is None else told["not_ready"], highlight=False)
    for engine in told["engines"]:
        counters, memory = engine["counters"], engine["memory"]
        console.print(
            f"\n{engine['engine_id']}: {engine['state']}, up {engine['uptime_s']:.0f} s, "
            f"{engine['running']} running, {engine['queued']} of {engine['queue_limit']} queued",
            highlight=False,
        )
        shown = Table("bank", "state", "tokens", "idle s")
        for bank in engine["banks"]:
            tokens = f"{bank['tokens']} of {engine['context_tokens']}"
            shown.add_row(str(bank["bank"]), bank["state"], tokens, f"{bank['idle_s']:.0f}")
        console.print(shown)
        done = ", ".join(
            f"{name} {counters[name]}" for name in ("requests", "finished", "cancelled", "refused")
        )
        console.print(
            f"{done}; prompt tokens {counters['prompt_tokens']} ({counters['cached_tokens']} cached), "
            f"generated {counters['completion_tokens']}",
            highlight=False,
        )
        console.print(
            f"memory: {show_bytes(int(memory['planned_bytes']))} planned, "
            f"{show_bytes(int(memory['available_bytes']))} available, "
            f"{memory['pages_free']} of {memory['pages_total']} pages free",
            highlight=False,
        )
