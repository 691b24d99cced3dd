"""Supervision: pauses between restarts, and what is told, with real actors on a real Ray."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st

from cluster.supervisor import EngineState, Supervisor, pause_before_restart
from worker.actor import Loading
from worker.errors import ModelFileError

moments = st.lists(st.floats(0, 1e6), max_size=20).map(sorted)


@given(moments, st.floats(0, 1e6))
def test_pauses_grow_with_recent_deaths_and_are_bounded(deaths: list[float], later: float) -> None:
    now = (deaths[-1] if deaths else 0.0) + later
    pause = pause_before_restart(deaths, now)
    assert 0 <= pause <= 60
    assert pause <= pause_before_restart([*deaths, now], now)


def test_the_first_death_is_mended_at_once_and_old_ones_are_forgiven() -> None:
    assert [pause_before_restart([100.0] * count, 100.0) for count in range(1, 9)] == [
        0,
        1,
        2,
        4,
        8,
        16,
        32,
        60,
    ]
    assert pause_before_restart([100.0] * 8, 1000.0) == 0


class Engine:
    """An engine's outside, without a model: what the supervisor calls."""

    def __init__(self, attempt: int, failing: bool) -> None:
        self._attempt = attempt
        self._failing = failing
        self._stopped = asyncio.Event()

    async def serve(self) -> str:
        if self._failing:
            raise ModelFileError("model.gguf: tensor output.weight is missing", "get another file")
        return f"127.0.0.1:{1000 + self._attempt}"

    async def loading(self) -> Loading:
        return Loading("loading", 0.5)

    async def pid(self) -> int:
        return os.getpid()

    async def run(self) -> None:
        await self._stopped.wait()

    async def stop(self) -> None:
        self._stopped.set()


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 << 20,
    )
    yield
    ray.shutdown()


class Watched:
    """A supervisor and every state it told."""

    def __init__(self, *, failing: bool = False) -> None:
        self.states: list[EngineState] = []
        self._changed = asyncio.Event()
        remote = ray.remote(Engine)
        self.supervisor = Supervisor(
            create=lambda attempt: remote.options(max_restarts=0, num_cpus=0).remote(attempt, failing),
            publish=self._hear,
            needed_bytes=1,
        )

    def _hear(self, state: EngineState) -> None:
        self.states.append(state)
        self._changed.set()

    async def until(self, wanted: Any) -> EngineState:
        async with asyncio.timeout(60):
            while True:
                self._changed.clear()
                for state in self.states:
                    if wanted(state):
                        return state
                await self._changed.wait()


async def test_a_killed_engine_is_replaced_and_the_death_counted(cluster: None) -> None:
    watched = Watched()
    running = asyncio.create_task(watched.supervisor.run())
    first = await watched.until(lambda state: state.address)
    assert (first.address, first.restarts) == ("127.0.0.1:1000", 0)
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    second = await watched.until(lambda state: state.address and state.restarts == 1)
    assert second.address == "127.0.0.1:1001"
    assert second.pid != first.pid
    told = [state.message for state in watched.states]
    assert any("died" in message for message in told)
    running.cancel()
    await watched.supervisor.stop()


async def test_an_engine_that_cannot_start_is_not_tried_again(cluster: None) -> None:
    watched = Watched(failing=True)
    async with asyncio.timeout(60):
        await watched.supervisor.run()
    last = watched.states[-1]
    assert last.fatal
    assert "output.weight is missing (get another file)" in last.message
    assert sum(state.message == "starting" for state in watched.states) == 1
