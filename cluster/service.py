"""The whole service in one process: gateway, supervisor and Ray's driver, from start to orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import uvicorn

from cluster.boxes import RayCluster, create_engine, new_secret, start_ray, stop_ray
from cluster.config import ConfigError, ServeConfig
from cluster.record import ServiceRecord, remove_record, single_service, this_process, write_record
from cluster.supervisor import EngineState, Supervisor
from gateway.chat.tokens import VocabularyError
from gateway.errors import GatewayError
from gateway.router import EngineAddress, Router
from gateway.server import ServerSettings, create_app
from worker.actor import EngineSettings, version
from worker.device import Device, device_bytes, find_gpu
from worker.errors import TwinsparkError
from worker.model.load import open_model
from worker.plan import MemoryPlan, make_plan

log = logging.getLogger(__name__)

ENGINE_ID = "engine-0"
_ENGINE_HOST = "127.0.0.1"


class Announce(Protocol):
    """Tells whoever watches what is going on; ``done`` is how much of it, 0 to 1, where that is known."""

    def __call__(self, line: str, done: float | None = None) -> None: ...


def run_service(config: ServeConfig, model: Path, announce: Announce) -> None:
    """Serves until a signal asks it to stop.

    Raises:
        TwinsparkError: the model, the memory, the port or Ray do not allow it; nothing is left running.
    """
    with single_service(config.state), _listen(config.host, config.port) as listener:
        file, model_config = open_model(model)
        device, available = config.place()
        plan = make_plan(file, model_config, config.wanted(device), available)
        port = listener.getsockname()[1]
        banks = f"{plan.banks} banks of {plan.context} tokens"
        announce(f"{model_config.name}: {banks} on the {plan.device.value}; starting Ray")
        ray_cluster = start_ray(config)
        try:
            pid, ticks = this_process()
            url = f"http://{_shown_host(config.host)}:{port}"
            record = ServiceRecord(pid, ticks, url, ray_cluster.dashboard_url, str(model), version())
            write_record(config.state, record)
            service = _Service(config, model, plan, ray_cluster, announce, record)
            asyncio.run(service.run(listener))
        finally:
            remove_record(config.state)
            stop_ray()
        if service.failure is not None:
            raise service.failure


class _Service:
    """What runs on the service's asyncio loop."""

    def __init__(
        self,
        config: ServeConfig,
        model: Path,
        plan: MemoryPlan,
        ray_cluster: RayCluster,
        announce: Announce,
        record: ServiceRecord,
    ) -> None:
        self.failure: TwinsparkError | None = None
        self._config = config
        self._record = record
        self._announce = announce
        self._router = Router()
        self._secret = new_secret()
        self._states: asyncio.Queue[EngineState] = asyncio.Queue()
        settings = EngineSettings(
            model=model.resolve(),
            engine_id=ENGINE_ID,
            host=_ENGINE_HOST,
            secret=self._secret,
            wanted=config.wanted(plan.device),
            queue=config.queue,
            threads=config.threads,
            watchdog_s=config.watchdog_s,
            memory_bytes=config.memory,
            graphs=not config.no_graphs,
        )
        self._supervisor = Supervisor(
            create=lambda attempt: create_engine(ray_cluster, settings, attempt),
            publish=self._states.put_nowait,
            needed_bytes=plan.total_bytes,
            available=lambda: device_bytes(plan.device, find_gpu() if plan.device is Device.GPU else None),
        )

    async def run(self, listener: socket.socket) -> None:
        """Serves until stopped; in order: no new requests, running ones to their end, engine, gateway."""
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        app = create_app(self._router, ServerSettings(version()))
        server = _Server(
            uvicorn.Config(
                app, log_config=None, access_log=False, lifespan="off", timeout_graceful_shutdown=5
            )
        )
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        supervising = asyncio.create_task(self._supervisor.run())
        following = asyncio.create_task(self._follow(stop))
        try:
            await stop.wait()
            if self.failure is None:
                await self._drain()
        finally:
            for task in (following, supervising):
                task.cancel()
            await asyncio.gather(following, supervising, return_exceptions=True)
            await self._supervisor.stop()
            server.should_exit = True
            await serving
            await self._router.close()

    async def _drain(self) -> None:
        running = self._router.streams
        if running:
            self._announce(f"stopping: {running} requests get up to {self._config.drain_s:g} s to finish")
        left = await self._router.drain(self._config.drain_s)
        log.info("event=drained unfinished=%d", left)

    async def _follow(self, stop: asyncio.Event) -> None:
        """Passes the engine's states on to the router and to whoever watches."""
        told = ""
        while True:
            state = await self._states.get()
            self._router.update_state(state.message)
            engines = [EngineAddress(ENGINE_ID, state.address, self._secret)] if state.address else []
            try:
                await self._router.set_engines(engines)
            except (GatewayError, VocabularyError) as error:
                log.warning("event=engine_unusable error=%s", error)
                self._router.update_state(str(error))
                continue
            if state.message != told:
                told = state.message
                where = f" at {self._record.url}" if state.address else ""
                self._announce(told + where, state.done)
            if state.fatal:
                self.failure = TwinsparkError(state.message, "change what it says and start again")
                stop.set()


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the service decides when to stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket, taken before anything slow happens.

    Raises:
        ConfigError: the address is not ours or the port is taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror or error}", "choose another --port or --host"
        ) from error
    return listener


def _shown_host(host: str) -> str:
    """The host for a URL: any address is reached on loopback."""
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"[{host}]" if ":" in host else host
