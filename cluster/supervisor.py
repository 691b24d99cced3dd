"""Keeps one engine alive: creates its actor, publishes its address, and replaces it when it dies.

Ray's own restarts have no backoff, so actors have none of Ray's; here a dead engine is replaced at once the
first time, then after growing pauses, and only once the memory it needs is available again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import RayActorError, RayError, RayTaskError

from worker.actor import Loading
from worker.errors import TwinsparkError
from worker.memory import available_bytes, show_bytes

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_FORGIVEN_AFTER_S = 600.0
"""A death counts for the pause for so long; an engine that lived longer starts afresh."""
_PROGRESS_POLL_S = 0.25
_MEMORY_POLL_S = 1.0
_LONGEST_MEMORY_WAIT_S = 120.0
_STOP_S = 10.0


@dataclass(frozen=True)
class EngineState:
    """What the supervisor knows of its engine.

    Attributes:
        address: where it serves; None while it does not.
        message: for people: loading and how far, ready, why it is being restarted.
        done: of the loading, 0 to 1; None while nothing is being loaded.
        fatal: the engine cannot be started until somebody changes something; ``message`` says what.
        restarts: engines that died since the service started.
    """

    address: str | None
    message: str
    done: float | None = None
    fatal: bool = False
    restarts: int = 0
    pid: int | None = None


Publish = Callable[[EngineState], None]


def pause_before_restart(deaths: Sequence[float], now: float) -> float:
    """Seconds to wait before replacing an engine, from the times of earlier deaths: 0, then 1, 2, 4 … 60."""
    recent = sum(1 for death in deaths if now - death < _FORGIVEN_AFTER_S)
    if recent <= 1:
        return 0.0
    return float(min(_FIRST_PAUSE_S * 2 ** (recent - 2), _LONGEST_PAUSE_S))


@dataclass
class Supervisor:
    """Supervises the engine of one box.

    Attributes:
        create: creates the engine's actor; the argument counts the attempts from 0.
        publish: hears every change of state.
        needed_bytes: what must be available before an engine is created again.
        available: what is, on the engine's device.
    """

    create: Callable[[int], Any]
    publish: Publish
    needed_bytes: int
    available: Callable[[], int] = available_bytes
    _deaths: list[float] = field(default_factory=list)
    _actor: Any = None

    async def run(self) -> None:
        """Runs until cancelled, or until the engine cannot be started at all."""
        attempt = 0
        while True:
            self._tell(None, "starting")
            try:
                await self._one_life(attempt)
            except RayTaskError as error:
                cause = error.cause
                if isinstance(cause, TwinsparkError):
                    self._tell(None, str(cause), fatal=True)
                    return
                await self._mourn(f"it failed to start: {cause}")
            except RayActorError as error:
                await self._mourn(_reason(error))
            except RayError as error:
                await self._mourn(str(error))
            attempt += 1

    async def stop(self) -> None:
        """Ends the engine in order, or by force when it does not answer."""
        if self._actor is None:
            return
        try:
            await asyncio.wait_for(_result(self._actor.stop.remote()), _STOP_S)
        except (RayError, TimeoutError) as error:
            log.warning("event=engine_stop_failed error=%r", error)

    async def _one_life(self, attempt: int) -> None:
        """From creation to death; returns only when the engine was stopped."""
        self._actor = actor = self.create(attempt)
        serving = asyncio.ensure_future(_result(actor.serve.remote()))
        try:
            while not serving.done():
                await asyncio.wait([serving], timeout=_PROGRESS_POLL_S)
                if not serving.done():
                    self._tell_loading(await _result(actor.loading.remote()))
            address = serving.result()
        finally:
            serving.cancel()
        self._tell(address, "ready", pid=await _result(actor.pid.remote()))
        await _result(actor.run.remote())
        await asyncio.Event().wait()  # stopped on purpose: whoever did so cancels us

    async def _mourn(self, reason: str) -> None:
        """Says that the engine died, and waits until a new one may be created."""
        self._deaths.append(time.monotonic())
        self._actor = None
        pause_s = pause_before_restart(self._deaths, time.monotonic())
        log.error("event=engine_died restarts=%d pause_s=%g reason=%s", len(self._deaths), pause_s, reason)
        self._tell(
            None, f"the engine died ({reason}); restarting" + (f" in {pause_s:g} s" if pause_s else "")
        )
        await asyncio.sleep(pause_s)
        give_up_at = time.monotonic() + _LONGEST_MEMORY_WAIT_S
        while (available := self.available()) < self.needed_bytes and time.monotonic() < give_up_at:
            self._tell(
                None,
                f"waiting for memory: {show_bytes(available)} of {show_bytes(self.needed_bytes)} available",
            )
            await asyncio.sleep(_MEMORY_POLL_S)

    def _tell_loading(self, loading: Loading) -> None:
        done = f" {loading.done:.0%}" if loading.done is not None else ""
        self._tell(None, loading.stage + done, done=loading.done)

    def _tell(
        self,
        address: str | None,
        message: str,
        *,
        done: float | None = None,
        fatal: bool = False,
        pid: int | None = None,
    ) -> None:
        self.publish(EngineState(address, message, done, fatal, len(self._deaths), pid))


async def _result(reference: Awaitable[Any]) -> Any:
    return await reference


def _reason(error: RayActorError) -> str:
    """The telling line of Ray's long account."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if "exit" in line.lower() or "died" in line.lower()]
    return (told[-1] if told else lines[0] if lines else "its process ended")[:300]
