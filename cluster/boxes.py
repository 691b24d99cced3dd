"""Ray on this box: started for the service alone, or joined; and engine actors placed on it.

Ray is the control plane: placement, liveness, dashboard. Its object store is kept small, and its memory
monitor is off: it would kill the engine for using the memory that was planned for it.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from cluster.config import ConfigError, ServeConfig
from worker.actor import EngineActor, EngineSettings
from worker.device import Device

NAMESPACE = "twinspark"
_OBJECT_STORE_BYTES = 128 << 20
_CONNECT_S = 5.0
_LONGEST_SOCKET_FOLDER = 60
"""Ray puts sockets about 45 characters deep into its folder, and a socket's path has at most 107."""


@dataclass(frozen=True)
class RayCluster:
    """The Ray cluster the service runs on."""

    node_id: str
    dashboard_url: str


def start_ray(config: ServeConfig) -> RayCluster:
    """Starts Ray for this service, or joins the cluster at ``config.ray_address``.

    Raises:
        ConfigError: Ray cannot be started or reached.
    """
    os.environ["RAY_memory_monitor_refresh_ms"] = "0"  # noqa: SIM112, the name is Ray's
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    options: dict[str, Any] = {
        "namespace": NAMESPACE,
        "log_to_driver": False,
        "logging_level": logging.WARNING,
        "configure_logging": False,
    }
    if config.ray_address is None:
        options |= {
            "address": "local",
            "include_dashboard": True,
            "dashboard_host": "127.0.0.1",
            "dashboard_port": config.dashboard_port,
            "object_store_memory": _OBJECT_STORE_BYTES,
            "_temp_dir": str(_ray_folder()),
        }
    else:
        _check_reachable(config.ray_address)
        options["address"] = config.ray_address
    try:
        context = ray.init(**options)
    except Exception as error:  # Ray raises many kinds, from ConnectionError to its own
        where = f"join Ray at {config.ray_address}" if config.ray_address else "start Ray"
        raise ConfigError(
            f"cannot {where}: {error}", "see the logs below the service's Ray folder"
        ) from error
    url = context.dashboard_url
    return RayCluster(
        node_id=ray.get_runtime_context().get_node_id(),
        dashboard_url=f"http://{url}" if url else "",
    )


def stop_ray() -> None:
    """Leaves the cluster, and ends the processes that :func:`start_ray` started; nobody else's."""
    ray.shutdown()


def create_engine(cluster: RayCluster, settings: EngineSettings, attempt: int) -> Any:
    """Creates an engine actor on this box; returns its handle at once.

    It lives as long as this process and is never restarted by Ray.
    """
    remote = ray.remote(EngineActor)
    return remote.options(
        name=f"{settings.engine_id}-{attempt}",
        max_restarts=0,
        max_task_retries=0,
        max_concurrency=16,
        num_cpus=1,
        num_gpus=1 if settings.wanted.device is Device.GPU else 0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(cluster.node_id, soft=False),
    ).remote(settings)


def new_secret() -> str:
    """The secret that gateways and engines of one service start share."""
    return secrets.token_urlsafe(32)


def _check_reachable(address: str) -> None:
    """Ray itself goes on trying for minutes where nobody answers."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigError(
            f"no Ray cluster answers at {address}: {error}",
            "give HOST:PORT of a running head as --ray-address, or leave it out to start one",
        ) from error


def _ray_folder() -> Path:
    """A folder of our own for Ray: other Ray programs on the box are not disturbed, and do not disturb."""
    base = Path(tempfile.gettempdir())
    if len(str(base)) > _LONGEST_SOCKET_FOLDER:
        base = Path("/tmp")
    folder = base / f"twinspark-{os.getuid()}" / "ray"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder
