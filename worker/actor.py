"""The engine as a Ray actor: plans, loads, serves, and dies loudly when its device or its loop fails.

Ray places and watches it; tokens never pass through Ray. It has no restarts of its own: whoever created it
decides when there is room for another one.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import logging
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from gateway.proto import engine_pb2 as pb
from worker.device import Device, device_bytes, find_gpu
from worker.engine import Engine, EngineLimits
from worker.errors import ModelFileError
from worker.gguf.read import GgufFile
from worker.model.config import ModelConfig
from worker.model.load import open_model
from worker.plan import Wanted, make_plan
from worker.service import EngineService, Served, start_server
from worker.start import make_executor

log = logging.getLogger(__name__)

_EXIT_FAILED = 70  # EX_SOFTWARE
_WATCHDOG_POLL_S = 1.0
_FINGERPRINT_BYTES = 1 << 20


@dataclass(frozen=True)
class EngineSettings:
    """What an engine is started with.

    Attributes:
        host: address to serve on; of the cluster interface.
        secret: that every call must carry.
        watchdog_s: an engine with work that finishes no step for so long is ended.
        memory_bytes: what may be used instead of what the system says is available.
        graphs: replay decode steps from CUDA graphs, on a GPU.
    """

    model: Path
    engine_id: str
    host: str
    secret: str
    wanted: Wanted
    queue: int
    threads: int
    watchdog_s: float
    memory_bytes: int | None = None
    graphs: bool = True


@dataclass(frozen=True)
class Loading:
    """How far an engine has come: ``stage`` in words, ``done`` 0 to 1 where it is known."""

    stage: str
    done: float | None = None


class EngineActor:
    """One engine in its own process. Created through ``ray.remote``; its methods run on one asyncio loop."""

    def __init__(self, settings: EngineSettings) -> None:
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
        self._settings = settings
        self._loading = Loading("starting")
        self._server: grpc.aio.Server | None = None
        self._engine: Engine | None = None
        self._stopped = asyncio.Event()

    async def serve(self) -> str:
        """Loads the model and starts serving; returns the address.

        Raises:
            ModelFileError, MemoryPlanError: the model cannot be served; trying again will not help by itself.
        """
        settings = self._settings
        file, config = open_model(settings.model)
        gpu = find_gpu() if settings.wanted.device is Device.GPU else None
        available = settings.memory_bytes or device_bytes(settings.wanted.device, gpu)
        plan = make_plan(file, config, settings.wanted, available)
        started_at = time.monotonic()
        executor = await asyncio.to_thread(
            make_executor, file, config, plan, self._reached, graphs=settings.graphs
        )
        log.info("event=loaded model=%s seconds=%.1f", settings.model, time.monotonic() - started_at)
        description = describe(file, config, plan.context)
        service = EngineService(Served(settings.engine_id, version(), description, plan))
        limits = EngineLimits(plan.context, plan.banks, plan.prefill_chunk, settings.queue, settings.threads)
        engine = Engine(executor, limits, service.hear, _die)
        service.attach(engine)
        engine.start()
        threading.Thread(target=_watch, args=(engine, settings.watchdog_s), daemon=True).start()
        self._server, port = await start_server(service, settings.host, settings.secret)
        self._engine = engine
        self._loading = Loading("ready", 1.0)
        log.info("event=serving address=%s:%d pid=%d", settings.host, port, os.getpid())
        return f"{settings.host}:{port}"

    async def loading(self) -> Loading:
        """How far the start has come."""
        return self._loading

    async def pid(self) -> int:
        """The process id."""
        return os.getpid()

    async def run(self) -> None:
        """Returns when :meth:`stop` was called; while the process lives, the call is pending."""
        await self._stopped.wait()

    async def stop(self) -> None:
        """Ends streams and engine in order."""
        if self._server is not None:
            await self._server.stop(grace=0)
        if self._engine is not None:
            await asyncio.to_thread(self._engine.stop)
        self._stopped.set()

    def _reached(self, stage: str, done: float) -> None:
        self._loading = Loading(stage, done)


def describe(file: GgufFile, config: ModelConfig, context: int) -> pb.ModelDescription:
    """The model for gateways, its vocabulary included.

    Raises:
        ModelFileError: the file has no tokenizer a gateway could use.
    """
    metadata = file.metadata

    def entries(key: str) -> tuple[Any, ...]:
        value = metadata.get(f"tokenizer.ggml.{key}")
        if not isinstance(value, tuple):
            raise ModelFileError(
                f"{file.path}: metadata key tokenizer.ggml.{key} is missing", "get a file with its tokenizer"
            )
        return value

    return pb.ModelDescription(
        name=config.name,
        fingerprint=fingerprint(file),
        context_tokens=context,
        vocabulary_size=config.vocab,
        vocabulary=pb.Vocabulary(
            model=str(metadata.get("tokenizer.ggml.model", "")),
            pre=str(metadata.get("tokenizer.ggml.pre", "")),
            tokens=entries("tokens"),
            token_types=entries("token_type"),
            merges=entries("merges"),
            bos_token=config.bos_token,
            eos_token=config.eos_token,
        ),
    )


def fingerprint(file: GgufFile) -> str:
    """Tells models apart: a hash of the header and of a piece of every part's data, not of all 81 GB."""
    digest = hashlib.sha256(
        repr(sorted((info.name, info.shape, info.offset) for info in file.tensors.values())).encode()
    )
    for path in file.parts:
        size = path.stat().st_size
        with path.open("rb") as part:
            for offset in (0, max(0, size // 2), max(0, size - _FINGERPRINT_BYTES)):
                part.seek(offset)
                digest.update(part.read(_FINGERPRINT_BYTES))
        digest.update(size.to_bytes(8, "little"))
    return digest.hexdigest()[:32]


def version() -> str:
    """The installed distribution's version."""
    return importlib.metadata.version("twinspark")


def _die(error: BaseException) -> None:
    """Ends the process: after a failed step nothing in it can be trusted, and a fresh start is quick."""
    log.critical("event=engine_exit error=%r", error)
    logging.shutdown()
    time.sleep(0.2)  # lets the loop send the failures of the requests in flight
    os._exit(_EXIT_FAILED)


def _watch(engine: Engine, limit_s: float) -> None:
    while True:
        time.sleep(_WATCHDOG_POLL_S)
        started_at = engine.step_started_at
        if started_at is not None and time.monotonic() - started_at > limit_s:
            _die(TimeoutError(f"a step has not finished within {limit_s:g} s"))
