"""Everything that can be set, in one frozen object: each value with its default, its environment name and its
meaning.

A value is taken from the command line, else from the environment (``TWINSPARK_`` and the field's name in
capitals), else from its default here.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from worker.device import Device, choose_device, device_bytes, find_gpu
from worker.errors import TwinsparkError
from worker.memory import parse_bytes
from worker.plan import DEFAULT_RESERVE_BYTES, Wanted


class ConfigError(TwinsparkError):
    """A setting is wrong; whoever set it must change it."""


def _bytes(value: object) -> object:
    return parse_bytes(value) if isinstance(value, str) else value


Bytes = Annotated[int, BeforeValidator(_bytes)]


def state_folder() -> Path:
    """Where the running service's record and logs are kept (XDG_STATE_HOME)."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "twinspark"


class ServeConfig(BaseSettings):
    """Settings of one service."""

    model_config = SettingsConfigDict(env_prefix="TWINSPARK_", frozen=True, extra="ignore")

    model: Path | None = Field(None, description="GGUF file to serve (any part of a split one).")
    demo: bool = Field(False, description="Serve the embedded demo model.")
    ctx: int | None = Field(
        None, ge=1, description="Context length in tokens; chosen from the memory when unset."
    )
    banks: int | None = Field(
        None, ge=1, description="Sequences kept and served at a time; chosen when unset."
    )
    host: str = Field("127.0.0.1", description="Address that the HTTP gateway listens on.")
    port: int = Field(8000, ge=0, le=65535, description="Port of the HTTP gateway; 0 takes a free one.")
    reserve: Bytes = Field(DEFAULT_RESERVE_BYTES, ge=0, description="Memory left to the system, e.g. 2GiB.")
    memory: Bytes | None = Field(
        None, gt=0, description="Plan with this much memory instead of what is available."
    )
    prefill_chunk: int | None = Field(
        None, ge=1, description="Prompt tokens processed at a time; 128 on a CPU, 4096 on a GPU when unset."
    )
    device: Literal["auto", "cpu", "gpu"] = Field(
        "auto", description="Where the model runs: gpu, cpu, or auto for a GPU if there is one."
    )
    no_graphs: bool = Field(
        False, description="Do not replay decode steps from CUDA graphs: to find a fault."
    )
    queue: int = Field(64, ge=0, description="Requests that may wait for a bank.")
    threads: int = Field(
        default_factory=lambda: max(1, len(os.sched_getaffinity(0)) - 1),
        ge=1,
        description="CPU threads of the engine; one core is left to the gateway when unset.",
    )
    watchdog_s: float = Field(
        600.0, gt=0, description="End an engine whose step takes longer than this, in seconds."
    )
    drain_s: float = Field(
        30.0, ge=0, description="Seconds that running requests get to finish when stopping."
    )
    ray_address: str | None = Field(None, description="Join this Ray cluster instead of starting one.")
    dashboard_port: int = Field(8265, ge=0, le=65535, description="Port of the Ray dashboard, on loopback.")
    state: Path = Field(default_factory=state_folder, description="Folder for the service's record and logs.")

    def wanted(self, device: Device) -> Wanted:
        """What the memory plan is asked for."""
        return Wanted(self.ctx, self.banks, self.prefill_chunk, self.reserve, device)

    def place(self) -> tuple[Device, int]:
        """The device to serve on, and the memory there is on it.

        Raises:
            DeviceError, MemoryPlanError: there is none that can serve, or the system does not say.
        """
        gpu = find_gpu()
        device = choose_device(self.device, gpu)
        return device, self.memory or device_bytes(device, gpu)


def load_config(**flags: Any) -> ServeConfig:
    """The effective configuration; flags that are None were not given.

    Raises:
        ConfigError: naming the setting, its value and what is allowed.
    """
    try:
        return ServeConfig(**{name: value for name, value in flags.items() if value is not None})
    except ValidationError as error:
        problem = error.errors()[0]
        name = str(problem["loc"][0])
        flag = "--" + name.replace("_", "-")
        raise ConfigError(
            f"{flag} is {problem['input']!r}: {problem['msg']}",
            f"set {flag} or TWINSPARK_{name.upper()} accordingly",
        ) from error


def doc(name: str) -> str:
    """A setting's description, for the command line's help."""
    return ServeConfig.model_fields[name].description or ""
