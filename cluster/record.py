"""The running service's record: a file that lets the other commands find it, and a lock that keeps it
single.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from cluster.config import ConfigError

_RECORD = "service.json"
_LOCK = "service.lock"


@dataclass(frozen=True)
class ServiceRecord:
    """One running service.

    Attributes:
        pid: of the process that runs gateway and supervisor.
        started_ticks: when that process started, in clock ticks since boot; tells it from a later one of the
            same pid.
        url: of the HTTP gateway.
        dashboard_url: of the Ray dashboard; empty when there is none.
    """

    pid: int
    started_ticks: int
    url: str
    dashboard_url: str
    model: str
    version: str


def this_process() -> tuple[int, int]:
    """Pid and start of the calling process."""
    pid = os.getpid()
    return pid, _started_ticks(pid) or 0


def read_record(folder: Path) -> ServiceRecord | None:
    """The record of the service that runs from this state folder; None when none does."""
    try:
        record = ServiceRecord(**json.loads((folder / _RECORD).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return record if _started_ticks(record.pid) == record.started_ticks else None


def write_record(folder: Path, record: ServiceRecord) -> None:
    """Replaces the record atomically."""
    unfinished = folder / f"{_RECORD}.{os.getpid()}"
    unfinished.write_text(json.dumps(asdict(record), indent=2), encoding="utf-8")
    unfinished.replace(folder / _RECORD)


def remove_record(folder: Path) -> None:
    """Removes the record."""
    (folder / _RECORD).unlink(missing_ok=True)


@contextmanager
def single_service(folder: Path) -> Iterator[None]:
    """Holds the state folder for one service.

    Raises:
        ConfigError: another one runs from it, or it cannot be written.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = (folder / _LOCK).open("w")
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written: {error.strerror}", "choose another --state folder"
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            running = read_record(folder)
            where = f" at {running.url} (pid {running.pid})" if running else ""
            raise ConfigError(
                f"a service is already running{where}",
                "stop it with `twinspark stop`, or use another --state folder",
            ) from error
        yield


def _started_ticks(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat; the name before it may hold spaces and brackets. None for no such
    process.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    fields = stat.rsplit(")", 1)[1].split()
    return None if fields[0] == "Z" else int(fields[19])
