"""What an engine shows of itself: immutable snapshots, safe to read from any thread."""

from __future__ import annotations

from dataclasses import dataclass

from worker.schedule.request import RequestId


@dataclass(frozen=True)
class Counters:
    """Totals since the engine started."""

    requests: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    refused: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    steps: int = 0


@dataclass(frozen=True)
class BankView:
    """One bank for status: ``state`` is free, idle, prefill or decode."""

    state: str
    tokens: int
    request: RequestId | None
    idle_s: float


@dataclass(frozen=True)
class EngineView:
    """The state as of the last step."""

    running: int
    queued: int
    banks: tuple[BankView, ...]
    pages_total: int
    pages_free: int
    counters: Counters
